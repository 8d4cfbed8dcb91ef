"""A table of several results, with the settings of their training that differ beneath."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bayesfl.composition.phases import Descend, Repeat
from bayesfl.evaluation import report
from bayesfl.optim import Clip, Rate, rate_at

MEASURES = {"classification": ("accuracy", "nll", "ece", "pooled_ece", "brier"), "regression": ("rmse", "nll")}


def compare(results: Mapping[str, Any], *, columns: Sequence[str] | None = None, style: Literal["text", "markdown"] = "text") -> str:
    """Return a table of results' personal measures in their last evaluated round, and what differs in how they were trained.

    Defaults are those of each method's paper, so two methods may differ in steps, batches, rates and momentum as well as in themselves. A
    second table beneath the first has the settings in which the results differ, the data (by source and hash) and seeds among them; it is
    left out if there are none.

    Args:
        results: {method: a result, or a list of results, one a seed}.
        columns: Measures to show, without their prefix, as `accuracy`; None for the usual ones of the task.
        style: `text` for a terminal, or `markdown`.

    Raises:
        TypeError: `results` is no mapping, or an entry is neither a result nor a list of results.
        ValueError: `results` is empty, or a result was not evaluated or has no such measure.
    """
    if not isinstance(results, Mapping):
        raise TypeError(f"results must give each result a name, as {{'FedAvg': result}}, got {type(results).__name__}")
    runs = {name: list(found) if isinstance(found, Sequence) else [found] for name, found in results.items()}
    if not runs or not all(runs.values()):
        raise ValueError(f"results is empty{' for ' * bool(runs)}{', '.join(runs)}: give at least one {{method: result}}")
    for name, found in runs.items():
        if wrong := [run for run in found if not all(hasattr(run, part) for part in ("algorithm", "known", "settings", "history"))]:
            raise TypeError(
                f"result {name!r} must be a Result, or a list of them, got {type(wrong[0]).__name__}; pass what simulate returned"
            )
    task = next(iter(runs.values()))[0].known.task
    wanted = MEASURES[task] if columns is None else tuple(columns)
    rows = {name: {key: [_last(name, run, key) for run in found] for key in wanted} for name, found in runs.items()}
    shown = [report.Column(key, better=report.better(key)) for key in wanted]
    table = report.table(rows, columns=shown, style=style)
    told = {name: _given(found) | _training(found[0]) for name, found in runs.items()}
    apart = [what for what in next(iter(told.values())) if len({one[what] for one in told.values()}) > 1]
    if not apart:
        return table
    texts = [["trained with", *apart], *([name, *(one[what] for what in apart)] for name, one in told.items())]
    widths = [max(len(cell) for cell in column) for column in zip(*texts, strict=True)]
    texts.insert(1, ["-" * width for width in widths])
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in texts]
    if style == "markdown":
        lines = ["| " + " | ".join(line) + " |" for line in texts]
    return table + "\n\n" + "\n".join(lines)


def _last(name: str, run: Any, key: str) -> float:
    values = [row[f"personal_{key}"] for row in run.history if f"personal_{key}" in row]
    if not values:
        raise ValueError(
            f"result {name!r} has no measure {key!r} in its history; evaluate it (evaluate_every=), or choose others by columns="
        )
    return values[-1]


def _given(runs: Sequence[Any]) -> dict[str, str]:
    """Name the data, by their source and the beginning of their hash, and the seeds of one method's results."""
    outlines = [getattr(run.known, "outline", run.known) for run in runs]
    return {
        "data": ", ".join(dict.fromkeys(f"{outline.source} {outline.hash[:8]}" for outline in outlines)),
        "seed": ", ".join(map(str, sorted({run.settings.seed for run in runs}))),
    }


def _training(run: Any) -> dict[str, str]:
    """Describe the settings that readers compare: of the run, and of each gradient phase by the blocks it trains."""
    phases = [inner for phase in run.algorithm.phases for inner in (phase.phases if isinstance(phase, Repeat) else (phase,))]
    turns = [phase for phase in run.algorithm.phases if isinstance(phase, Repeat)]
    steps = [phase for phase in phases if isinstance(phase, Descend)]
    inner = [phase for turn in turns for phase in turn.phases]

    def each(of: Any) -> str:
        found = [(", ".join(phase.blocks), of(phase)) for phase in steps]
        return found[0][1] if len({value for _, value in found}) == 1 else ", ".join(f"{blocks}: {value}" for blocks, value in found)

    def length(phase: Descend | Repeat) -> str:
        unit = "batches" if isinstance(phase, Repeat) else "steps"
        if phase in inner and not phase.steps:
            return f"{phase.epochs} step{'s' * (phase.epochs > 1)}"
        return f"{phase.steps} {unit}" if phase.steps else f"{phase.epochs} epoch{'s' * (phase.epochs > 1)}"

    batches = {phase.batch_size for phase in run.algorithm.phases if hasattr(phase, "batch_size") and phase.batch_size} or {None}
    return {
        "rounds": str(run.settings.rounds),
        "participation": f"{run.settings.participation:g} ({run.settings.train} trains)",
        "steps": (f"{length(turns[0])}, each " if turns else "") + (each(length) if steps else "none"),
        "batch": ", ".join("all" if size is None else str(size) for size in sorted(batches, key=str)),
        "optimiser": each(lambda phase: _optimiser(phase.optimiser, run.settings.rounds)) if steps else "none",
    }


def _optimiser(optimiser: Any, rounds: int) -> str:
    rate: Rate = optimiser.rate
    first, last = rate_at(rate, 0, rounds), rate_at(rate, rounds - 1, rounds)
    told = f"a schedule, {first:g} to {last:g}" if callable(rate) else f"{first:g}"
    if isinstance(optimiser, Clip):
        return f"Clip({_optimiser(optimiser.optimiser, rounds)}, norm {optimiser.norm:g})"
    more = "".join(f", {name} {value:g}" for name in ("momentum", "weight_decay") if (value := getattr(optimiser, name, 0)))
    return f"{type(optimiser).__name__}({told}{more})"
