"""Steps of calibration in files: their options, and what they have learnt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bayesfl.evaluation.calibration import Abstention, Bias, Choice, Conformal, Fitted, Step, Temperature

STEPS: dict[str, type] = {kind.__name__: kind for kind in (Choice, Temperature, Bias, Conformal, Abstention)}
"""Steps of calibration by their names in files."""


def described(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return what a file says of steps, JSON-able.

    Raises:
        ValueError: A step is none of bayesfl's.
    """
    if other := [type(step).__name__ for step in steps if type(step) not in STEPS.values()]:
        raise ValueError(f"the step {other[0]} cannot be saved, as its code would be needed to read it; bayesfl's are {list(STEPS)}")
    return [{"step": type(step).__name__, "options": json.loads(json.dumps(asdict(step), default=_plain))} for step in steps]  # pyright: ignore[reportArgumentType] (bayesfl's steps are dataclasses)


def _plain(value: Any) -> Any:
    """Return a number of NumPy's or torch's as Python's."""
    return value.item()


def tensors_of(steps: Sequence[Fitted]) -> dict[str, Any]:
    """Return the tensors of steps as a file has them, {place: {told, own}}."""
    return {str(place): {"told": dict(one.told), "own": dict(one.own)} for place, one in enumerate(steps)}


NEEDED: dict[str, tuple[set[str], set[str]]] = {
    "Choice": (set(), {"shared"}),
    "Temperature": ({"beta", "information"}, {"temperature"}),
    "Bias": (set(), {"bias"}),
    "Conformal": ({"groups", "edges", "counts"}, {"threshold", "scores", "epistemic"}),
    "Abstention": ({"threshold"}, set()),
}
"""The tensors that a step, or an alarm by it, needs: what was told, and the clients' own."""


def read_steps(about: Sequence[Mapping[str, Any]]) -> tuple[Step, ...]:
    """Return the steps that a file describes, without what they have learnt.

    Raises:
        KeyError: A step is unknown.
        ValueError: An option is out of range.
        TypeError: There is no such option.
    """
    return tuple(STEPS[one["step"]](**one["options"]) for one in about)


def read(about: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any], *, clients: int) -> tuple[Fitted, ...]:
    """Return the fitted steps that a file describes, on the CPU, where steps are applied.

    Args:
        about: What `described` says of them.
        tensors: What `tensors_of` gives.
        clients: Number of clients whose own parameters they hold.

    Raises:
        KeyError: A step is unknown, or lacks tensors.
        ValueError: An option is out of range, or there are parameters of another number of clients.
        TypeError: There is no such option.
    """
    found = []
    for place, step in enumerate(read_steps(about)):
        kept = tensors.get(str(place), {})
        told, own = ({name: t.cpu() for name, t in kept.get(part, {}).items()} for part in ("told", "own"))
        for needed, there in zip(NEEDED[type(step).__name__], (told, own), strict=True):
            if missing := sorted(needed - there.keys()):
                raise KeyError(f"{type(step).__name__} lacks {missing}")
        if any(len(t) != clients for t in own.values()):
            raise ValueError(f"{type(step).__name__} has parameters of another number of clients than {clients}")
        found.append(Fitted(step, told, own))
    return tuple(found)
