"""A table of several results, with the settings of their training that differ beneath."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal

from bayesfl.base.described import ADDRESS
from bayesfl.base.warning import warn
from bayesfl.composition.phases import Descend, Repeat, steps_on_batch, unrolled
from bayesfl.evaluation import report
from bayesfl.federation.run.result import Result
from bayesfl.federation.settings import dtype_name
from bayesfl.federation.store.identity import differences, identity, without_parts
from bayesfl.optim import Clip, Rate, rate_at

LINES = 8  # most lines that name the options of one result

SHOWN = {
    "classification": ("accuracy", "nll", "ece", "pooled_ece", "brier"),
    "regression": ("rmse", "nll"),
}


def compare(
    results: Mapping[str, Result | Sequence[Result]],
    *,
    columns: Sequence[str] | None = None,
    style: Literal["text", "markdown"] = "text",
) -> str:
    """Return a table of results' personal measures in their last evaluated round, and what differs
    in how they were trained.

    Nothing is marked as the best: the measures are of test data, on which no method is chosen.
    Defaults are those of each method's paper, so two methods may differ in steps, batches, rates
    and momentum as well as in themselves. A second table beneath the first has the settings in
    which the results differ, the data (by source and hash), seeds, models, likelihoods and
    precisions among them; it is left out if there are none. Of a list of results it has every
    distinct setting, and of a run that was ended the rounds done, as `12 of 40`. Where two results
    are of one method, lines beneath name the other options, and the layers, in which they differ,
    at most 8 for each result.

    Args:
        results: {method: a result, or a list of results, one a seed}.
        columns: Measures to show, without their prefix, as `accuracy`; None for the usual ones of
            the task.
        style: `text` for a terminal, or `markdown`.

    Raises:
        ValueError: A result was not evaluated or has no such measure.
    """
    runs: dict[str, list[Result]] = {
        name: list(found) if isinstance(found, Sequence) else [found]
        for name, found in results.items()
    }
    calibrated = [name for name, found in runs.items() if any(run.steps for run in found)]
    if calibrated:
        warn(
            f"{', '.join(calibrated)}: the table has measures of training, before the steps of "
            "calibration; those after them are in result.predict().summary(clients.test)"
        )
    rows: dict[str, dict[str, list[float]]] = {}
    for name, found in runs.items():
        wanted = _usual(found) if columns is None else columns
        rows[name] = {key: [_last(name, run, key) for run in found] for key in wanted}
    shown = dict.fromkeys(key for row in rows.values() for key in row)
    heads = [report.Column(key) for key in shown]
    parts = [report.table(rows, columns=heads, style=style)]
    parts += [_settings(runs, style), "\n".join(_options(runs))]
    return "\n\n".join(part for part in parts if part)


def _settings(runs: Mapping[str, Sequence[Result]], style: Literal["text", "markdown"]) -> str:
    """Return the table of the settings in which results differ; empty where they do not."""
    settings = {
        name: _given(found) | _together([_training(run) for run in found])
        for name, found in runs.items()
    }
    first = next(iter(settings.values()))
    apart = [what for what in first if len({one[what] for one in settings.values()}) > 1]
    if not apart:
        return ""
    texts = [["trained with", *apart]]
    texts += [[name, *(one[what] for what in apart)] for name, one in settings.items()]
    widths = [max(len(cell) for cell in column) for column in zip(*texts, strict=True)]
    texts.insert(1, ["-" * width for width in widths])
    if style == "markdown":
        return "\n".join("| " + " | ".join(line) + " |" for line in texts)
    lines = []
    for line in texts:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _usual(runs: Sequence[Result]) -> tuple[str, ...]:
    """Return the measures to show by default: of intervals by quantiles their loss, as they have no
    NLL.
    """
    intervals = any("personal_pinball" in row for run in runs for row in run.history)
    return ("rmse", "pinball") if intervals else SHOWN[runs[0].known.task]


def _last(name: str, run: Result, key: str) -> float:
    values = [row[f"personal_{key}"] for row in run.history if f"personal_{key}" in row]
    if not values:
        raise ValueError(
            f"result {name!r} has no measure {key!r} in its history; evaluate it "
            "(evaluate_every=), or choose others by columns="
        )
    return values[-1]


def _given(runs: Sequence[Result]) -> dict[str, str]:
    """Name the data, by their source and the beginning of their hash, and the seeds of one method's
    results.
    """
    outlines = [getattr(run.known, "outline", run.known) for run in runs]
    return {
        "data": ", ".join(
            dict.fromkeys(f"{outline.source} {outline.hash[:8]}" for outline in outlines)
        ),
        "seed": ", ".join(map(str, sorted({run.settings.seed for run in runs}))),
    }


def _together(told: Sequence[dict[str, str]]) -> dict[str, str]:
    """Join the distinct settings of several results."""
    return {what: ", ".join(dict.fromkeys(one[what] for one in told)) for what in told[0]}


def _options(runs: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Name the options and layers, beyond those of `_training`, in which results differ from the
    first one of the same method.
    """
    shown = ("optimiser", "epochs", "steps", "batch_size", "likelihood")
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, found in runs.items():
        lines: list[str] = []
        for run in found:
            one = {
                part: of
                for part, of in identity(run.algorithm).items()
                if part not in ("parameters", "constants")
            }
            by_hand = one["method"] if run.algorithm.made else str(_kind(one[one["method"]]))
            known, other = first.setdefault(by_hand, (name, one))
            whom = "its first run" if known == name else known
            for path, (before, now) in without_parts(differences(other, one)).items():
                if not any(
                    part in shown or part.endswith("_optimiser") for part in path.split(".")
                ):
                    lines.append(
                        f"{name} differs from {whom} in {path.rstrip('.')}: {now}, not {before}"
                    )
        lines = list(dict.fromkeys(lines))
        yield from lines[:LINES]
        if len(lines) > LINES:
            yield f"{name} differs in {len(lines) - LINES} more"


def _kind(description: Any) -> Any:
    """Return a description without its numbers and tensors."""
    if isinstance(description, Mapping):
        return {key: _kind(value) for key, value in description.items()}
    if isinstance(description, list):
        return [_kind(value) for value in description]
    return (
        description
        if isinstance(description, str) and not description.startswith("Tensor(")
        else None
    )


def _training(run: Result) -> dict[str, str]:
    """Describe the settings that readers compare: the model, those of the run, and of each gradient
    phase by the blocks it trains.
    """
    phases = [inner for phase in run.algorithm.phases for inner in unrolled(phase)]
    turns = [phase for phase in run.algorithm.phases if isinstance(phase, Repeat)]
    steps = [phase for phase in phases if isinstance(phase, Descend)]
    inner = [phase for turn in turns for phase in turn.phases]

    def each(of: Any) -> str:
        found = [(", ".join(phase.blocks), of(phase)) for phase in steps]
        return (
            found[0][1]
            if len({value for _, value in found}) == 1
            else ", ".join(f"{blocks}: {value}" for blocks, value in found)
        )

    def length(phase: Descend | Repeat) -> str:
        unit = "batches" if isinstance(phase, Repeat) else "steps"
        if phase.steps:
            return f"{phase.steps} {unit}"
        one = "step" if phase in inner else "epoch"
        if callable(phase.epochs):
            return f"{one}s by client"
        return f"{phase.epochs} {one}{'s' * (phase.epochs > 1)}"

    sizes = {getattr(phase, "batch_size", None) for phase in run.algorithm.phases}
    batches = sorted((sizes - {None, 0}) or {None}, key=str)
    settings = run.settings
    parameters = list(run.algorithm.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    model = f"{type(run.algorithm.model).__name__} of {trained} weights"
    whole = run.round == settings.rounds
    drawn = settings.participation < 1 and settings.sampling != "fixed"
    trains = f"{settings.train} trains" + (f", {settings.sampling}" if drawn else "")
    optimiser = "none"
    length_of_turns = f"{length(turns[0])}, each " if turns else ""
    if steps:
        optimiser = each(lambda phase: _optimiser(phase.optimiser, settings.rounds))
    return {
        "model": model + (f" and {frozen} frozen" if frozen else ""),
        "rounds": str(run.round) if whole else f"{run.round} of {settings.rounds}",
        "participation": f"{settings.participation:g} ({trains})",
        "steps": length_of_turns + (each(length) if steps else "none"),
        "passes a round": f"{passes(run):.3g}",
        "batch": ", ".join("all" if size is None else str(size) for size in batches),
        "optimiser": optimiser,
        "likelihood": ADDRESS.sub("", repr(run.algorithm.likelihood)),
        "dtype": dtype_name(run.dtype),
    }


def passes(run: Result) -> float:
    """Return how often a client goes over its training data in a round by gradient steps, mean over
    clients; the steps of every phase count, and those of each copy of a block.
    """
    counts = run.known.outline.counts
    total = 0.0
    for phase in run.algorithm.phases:
        times = [_passes(phase, n) for n in counts if n]
        mean = statistics.fmean(times) if times else 0.0
        for one in unrolled(phase):
            if isinstance(one, Descend):
                copies = max(run.algorithm.blocks[name].copies or 1 for name in one.blocks)
                repeated = steps_on_batch(one) if isinstance(phase, Repeat) else 1
                total += mean * copies * repeated
    return total


def _passes(phase: Any, n: int) -> float:
    """Return how often a phase goes over n examples; NaN where that differs by client."""
    if not phase.steps:
        return math.nan if callable(phase.epochs) else phase.epochs
    return phase.steps * (1.0 if phase.batch_size is None else min(1.0, phase.batch_size / n))


def _optimiser(optimiser: Any, rounds: int) -> str:
    rate: Rate = optimiser.rate
    first, last = rate_at(rate, 0, rounds), rate_at(rate, rounds - 1, rounds)
    mean = (
        statistics.fmean(rate_at(rate, round, rounds) for round in range(rounds))
        if callable(rate)
        else first
    )
    told = f"a schedule, {first:g} to {last:g}, mean {mean:.3g}" if callable(rate) else f"{first:g}"
    if isinstance(optimiser, Clip):
        return f"Clip({_optimiser(optimiser.optimiser, rounds)}, norm {optimiser.norm:g})"
    set_ = (
        [(f.name, getattr(optimiser, f.name), f.default) for f in fields(optimiser)]
        if is_dataclass(optimiser)
        else []
    )
    more = "".join(
        f", {name} {value}"
        for name, value, default in set_
        if name != "rate" and default is not MISSING and value != default
    )
    return f"{type(optimiser).__name__}({told}{more})"
