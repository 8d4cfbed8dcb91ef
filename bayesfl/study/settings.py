"""The settings of a run in words, as readers compare them between methods."""

import statistics
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from bayesfl.base.described import ADDRESS
from bayesfl.composition.phases import Descend, Repeat, steps_on_batch, unrolled
from bayesfl.federation.run.result import Result
from bayesfl.federation.settings import dtype_name
from bayesfl.optim import Clip, Rate, rate_at
from bayesfl.study.budget import length


def in_words(run: Result) -> dict[str, str]:
    """Return the settings that readers compare: data, model, those of the run, and of each gradient
    phase by the blocks it trains.
    """
    outline, settings, algorithm = run.known.outline, run.settings, run.algorithm
    turns = [phase for phase in algorithm.phases if isinstance(phase, Repeat)]
    steps = [
        one for phase in algorithm.phases for one in unrolled(phase) if isinstance(one, Descend)
    ]
    inner = [one for turn in turns for one in turn.phases]

    def each(of: Any) -> str:
        found = [(", ".join(phase.blocks), of(phase)) for phase in steps]
        if len({value for _, value in found}) == 1:
            return found[0][1]
        return ", ".join(f"{blocks}: {value}" for blocks, value in found) or "none"

    def long(phase: Descend) -> str:
        if phase in inner and not phase.steps:  # its epochs are steps on the batch of the Repeat
            number = steps_on_batch(phase)
            return f"{number} step{'s' * (number > 1)}"
        return length(phase)

    sizes = {getattr(phase, "batch_size", None) for phase in algorithm.phases}
    batches = sorted((sizes - {None, 0}) or {None}, key=str)
    parameters = list(algorithm.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    drawn = settings.participation < 1 and settings.sampling != "fixed"
    trains = f"{settings.train} trains" + (f", {settings.sampling}" if drawn else "")
    done = str(run.round) if run.round == settings.rounds else f"{run.round} of {settings.rounds}"
    return {
        "data": f"{outline.source} {outline.hash[:8]}",
        "model": f"{type(algorithm.model).__name__} of {trained} weights"
        + (f" and {frozen} frozen" if frozen else ""),
        "rounds": done,
        "participation": f"{settings.participation:g} ({trains})",
        "length": (f"{length(turns[0])}, each " if turns else "") + each(long),
        "batch": ", ".join("all" if size is None else str(size) for size in batches),
        "optimiser": each(lambda phase: value_in_words(phase.optimiser, settings.rounds)),
        "likelihood": ADDRESS.sub("", repr(algorithm.likelihood)),
        "dtype": dtype_name(run.dtype),
    }


def value_in_words(value: Any, rounds: int) -> str:
    """Return an option's value in words: of an optimiser its rate, and what is not as by default;
    of a schedule its first, last and mean rate.
    """
    if not hasattr(value, "rate"):
        return value if isinstance(value, str) else ADDRESS.sub("", repr(value))
    if isinstance(value, Clip):
        return f"Clip({value_in_words(value.optimiser, rounds)}, norm {value.norm:g})"
    rate: Rate = value.rate
    first, last = rate_at(rate, 0, rounds), rate_at(rate, rounds - 1, rounds)
    told = f"{first:g}"
    if callable(rate):
        mean = statistics.fmean(rate_at(rate, round, rounds) for round in range(rounds))
        told = f"a schedule, {first:g} to {last:g}, mean {mean:.3g}"
    given = [
        (f.name, getattr(value, f.name), f.default)
        for f in (fields(value) if is_dataclass(value) else ())
        if f.name != "rate"
    ]
    more = "".join(
        f", {name} {now}" for name, now, default in given if default not in (MISSING, now)
    )
    return f"{type(value).__name__}({told}{more})"
