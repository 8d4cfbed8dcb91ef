"""The settings of a run in words, as readers compare them between methods."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

from bayesfl.base.described import ADDRESS, described, digest_of
from bayesfl.composition.phases import Descend, Repeat, steps_on_batch, unrolled
from bayesfl.data.tensors import dtype_name
from bayesfl.federation.run.result import Result
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
        "participation": (
            f"{settings.participation:g}" if isinstance(settings.sampling, str) else settings.drawn
        )
        + f" ({trains})",
        "length": (f"{length(turns[0])}, each " if turns else "") + each(long),
        "batch": ", ".join("all" if size is None else str(size) for size in batches),
        "optimiser": each(lambda phase: value_in_words(phase.optimiser, settings.rounds)),
        "likelihood": ADDRESS.sub("", repr(algorithm.likelihood)),
        "dtype": dtype_name(run.dtype),
    }


def recipe(**parts: Any) -> dict[str, str]:
    """Return the parts of runs besides their seed, by name, with another text for every other part:
    plain values as they are, others by a name and a digest of their description.

    Args:
        **parts: The parts; a `partial` counts as its function and its arguments.
    """
    found = {}
    for name, part in parts.items():
        if isinstance(part, partial):
            given = dict(enumerate(part.args)) | part.keywords
            found |= recipe(**{f"{name}.{key}": value for key, value in given.items()})
            part = part.func
        plain = described(part)
        kind = getattr(part, "__name__", type(part).__name__)
        words = value_in_words(part, 1) if hasattr(part, "rate") else kind
        nested = isinstance(plain, list | dict)
        found[name] = f"{words} {digest_of(plain)[:8]}" if nested else str(plain)
    return found


def recipe_of(run: Result) -> dict[str, str]:
    """Return the parts of a finished run besides its seed, its rows and its network."""
    made, settings = run.algorithm.made, asdict(run.settings)
    return recipe(
        clients=run.known.outline.clients,
        **({} if made is None else {f"method.{k}": value for k, value in made.options.items()}),
        **{name: value for name, value in settings.items() if name != "seed"},
    )


class Labelled(NamedTuple):
    """Hold the parts of a run's label.

    Args:
        name: Name of its method.
        recipe: Its other parts besides the seed, in words by name.
        choice: The options that were chosen for it.
        asked: Digest of the method, settings and functions, without the seed.
        seed: Its seed; each seed should have one run.
        alone: Text that distinguishes it from others of its seed, if there are more.
    """

    name: str
    recipe: Mapping[str, str]
    choice: Hashable
    asked: str
    seed: Hashable
    alone: str


def labels(runs: Sequence[Labelled]) -> list[str]:
    """Return a name for each run: that of its method, with its differences from other runs of the
    name. Runs of one label differ in their options or their seed alone.
    """
    ones: dict[str, list[Mapping[str, str]]] = {}
    for run in runs:
        ones.setdefault(run.name, []).append(run.recipe)
    differ = {
        name: {k for one in of for k in one if len({other.get(k) for other in of}) > 1}
        for name, of in ones.items()
    }
    told = [
        [f"{key} {text}" for key, text in run.recipe.items() if key in differ[run.name]]
        for run in runs
    ]
    for last in (False, True):
        groups = [
            (run.name, str(words), run.choice, *([run.seed] if last else []))
            for run, words in zip(runs, told, strict=True)
        ]
        of: dict[Any, list[str]] = {}
        for run, group in zip(runs, groups, strict=True):
            of.setdefault(group, []).append(run.alone if last else f"made {run.asked}")
        for run, group, words in zip(runs, groups, told, strict=True):
            if len(of[group] if last else {*of[group]}) > 1:
                words.append(run.alone if last else f"made {run.asked}")
    return [
        f"{run.name} ({', '.join(words)})" if words else run.name
        for run, words in zip(runs, told, strict=True)
    ]


def value_in_words(value: Any, rounds: int) -> str:
    """Return an option's value in words: for an optimiser its rate and the options that differ from
    their defaults; for a schedule its first, last and mean rate.
    """
    if not hasattr(value, "rate"):
        return value if isinstance(value, str) else ADDRESS.sub("", repr(value))
    if isinstance(value, Clip):
        return f"Clip({value_in_words(value.optimiser, rounds)}, norm {value.norm:g})"
    rate: Rate = value.rate
    first, last = rate_at(rate, 1, rounds), rate_at(rate, rounds, rounds)
    told = f"{first:g}"
    if callable(rate):
        mean = statistics.fmean(rate_at(rate, round + 1, rounds) for round in range(rounds))
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
