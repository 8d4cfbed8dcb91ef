"""Surveys of a federation after training, and calibration by them: whose predictions are asked, how answers are added, and what is kept."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from bayesfl.base.checks import probability
from bayesfl.base.protocols import Tensors
from bayesfl.data import ClientData
from bayesfl.evaluation.audit import Audit, Counting, grouped
from bayesfl.evaluation.calibration import Abstention, Bias, Choice, Conformal, Fitted, Step, Temperature, compares
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import Mine, Outputs, Put, Survey, answers, conduct, named_split, together

Groups: TypeAlias = Sequence[Sequence[Any]] | Callable[[Any], Any]
"""Groups of rows: for each client that of every row, or a function that makes these of a client's inputs."""
STEPS: dict[str, type] = {kind.__name__: kind for kind in (Choice, Temperature, Bias, Conformal, Abstention)}
"""Steps of calibration by their names in files."""


@runtime_checkable
class Adder(Protocol):
    """An aggregation that can add what clients answer to a survey, as `SecureSum`."""

    def added(self, summands: Mapping[int, Tensors]) -> Tensors:
        """Return the sum of the clients' summands, in float64, without a look at a single one."""
        ...


def put_to(survey: Survey, mine: Mine, aggregation: Any) -> Put:
    """Return how a survey's questions are put to clients on this machine.

    Raises:
        TypeError: The aggregation cannot add answers.
    """
    if aggregation is None:
        return together(survey, mine)
    if not isinstance(aggregation, Adder):
        raise TypeError(f"aggregation must be able to add the answers of a survey, as SecureSum() is, got {aggregation!r}")

    def put(told: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        found = answers(survey, told, mine, shapes)
        return aggregation.added({client: {name: t[row] for name, t in found.items()} for row, client in enumerate(mine.ids.tolist())})

    return put


def asked(survey: Any, splits: Mapping[str, ClientData]) -> ClientData:
    """Return the split that a survey asks about.

    Raises:
        TypeError: It is no survey.
        ValueError: There is no such split, or it has no example.
    """
    name = named_split(survey)
    if name not in splits or not splits[name].counts.any():
        raise ValueError(
            f"{type(survey).__name__} reads the split {name!r}, and the data have {list(splits)}: make them with {name}=0.1, or pass split="
        )
    return splits[name]


def checked_steps(steps: Sequence[Any], before: Sequence[Any] = ()) -> tuple[Step, ...]:
    """Return steps of calibration after a look at what they are.

    Args:
        steps: The steps.
        before: The steps that are fitted already.

    Raises:
        TypeError: Something is no step, or `steps` is no list of them.
        ValueError: A step that compares models is not the first.

    Warns:
        UserWarning: Sets are made of scores on a split to which an earlier step is fitted.
    """
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise TypeError(f"calibration must be a list of steps, as [Temperature(), Conformal()], got {steps!r}")
    for number, step in enumerate(steps):
        if not isinstance(step, Step) or isinstance(step, type):
            raise TypeError(f"steps must be steps of calibration, as Temperature(), got {step!r}")
        earlier = (*before, *steps[:number])
        if compares([step]) and earlier:
            raise ValueError(f"{type(step).__name__} must be the first step, as others are fitted to the predictions that it chooses")
        shared = [type(one).__name__ for one in earlier if one.split == step.split and not isinstance(one, Conformal | Abstention)]
        if isinstance(step, Conformal | Abstention) and shared:
            warnings.warn(
                f"{', '.join(shared)} and {type(step).__name__} are fitted to the same split, {step.split!r}: then less is kept than is "
                "promised, hardly less after a pooled temperature, one or two per cent of coverage after a bias, more after a choice; fit "
                "these to 'validation'",
                stacklevel=3,
            )
    return tuple(steps)


def fitted(
    steps: Sequence[Step], before: Sequence[Fitted], predicted: Mapping[str, Mine], outputs: Outputs, aggregation: Any
) -> tuple[Fitted, ...]:
    """Fit steps one after the other, after those that were fitted before.

    Args:
        steps: The new steps.
        before: The steps that are fitted already.
        predicted: The clients' predictions on every split that is read, before any step.
        outputs: What is predicted.
        aggregation: What adds the clients' answers; None adds them openly.
    """
    done = list(before)
    for step in steps:
        mine = predicted[step.split]
        for one in done:
            mine = one.apply(mine)
        told = conduct(step, put_to(step, mine, aggregation), outputs)
        done.append(Fitted(step, told, step.settle(told, mine)))
    return tuple(done)


def settled(steps: Sequence[Fitted], predicted: Mapping[str, Mine]) -> tuple[Fitted, ...]:
    """Return steps with the own parameters of other clients, by what was told; clients without rows in a split have none to go by."""
    done: list[Fitted] = []
    for one in steps:
        mine = predicted[one.step.split]
        for earlier in done:
            mine = earlier.apply(mine)
        done.append(replace(one, own=one.step.settle(one.told, mine)))
    return tuple(done)


def check_draws(steps: Sequence[Fitted], draws: int) -> None:
    """Raise ValueError if predictions are to be made with another number of draws than those to which steps were fitted."""
    if steps:
        raise ValueError(
            f"draws={draws} makes other predictions than those that were calibrated, which have the method's own number; leave draws out, "
            "or predict with dataclasses.replace(result, steps=())"
        )


def without_rows(known: Mine) -> Mine:
    """Return predictions of the same clients that have no rows in a split, with the outputs of `known`."""
    like, ids, seed, round = known.predictions, known.ids, known.seed, known.round
    mask = torch.zeros(len(ids), 1, dtype=torch.bool)
    names = [name for name, t in vars(like).items() if isinstance(t, torch.Tensor) and t.is_floating_point() and name != "labels"]
    blank: dict[str, Any] = {name: torch.full((len(ids), 1, *getattr(like, name).shape[2:]), torch.nan) for name in names}
    labels = torch.zeros(len(ids), 1, dtype=torch.int64 if like.labels is None else like.labels.dtype)
    if like.labels is not None:
        labels = labels.reshape(len(ids), 1, *[1] * (like.labels.dim() - 2)).expand(len(ids), 1, *like.labels.shape[2:])
    none = Predictions(mask=mask, labels=labels, likelihood=like.likelihood, **blank)
    return Mine(none, ids, seed, round, None if known.shared is None else none)


def audited(result: Any, split: str, by: str, groups: Groups | None, delta: float, aggregation: Any) -> Audit:
    """Return the audit of a federation's predictions; see `Result.audit`.

    Args:
        result: The federation, a `Result`, whose module imports this one.
        split: As of `Result.audit`.
        by: As of `Result.audit`.
        groups: As of `Result.audit`.
        delta: As of `Result.audit`.
        aggregation: As of `Result.audit`.

    Raises:
        TypeError: As by `Result.audit`.
        ValueError: As by `Result.audit`.
    """
    probability("delta", delta, "that an interval of a column misses")
    if by not in ("client", "label"):
        raise ValueError(f"by must be 'client' or 'label', got {by!r}; of other groups pass groups=")
    known = result.data
    if groups is not None:
        if by != "client":
            raise ValueError("groups= has rows of its own in the table; leave by out")
        rows = asked(Counting("group", (), split), known.splits)
        each = [groups(rows.client(j)[0]) for j in range(known.clients)] if callable(groups) else groups
        names, places = grouped(each, rows.counts)
        survey = Counting("group", names, split, places)
    elif by == "label":
        survey = Counting("label", tuple(known.class_names or map(str, range(known.outputs))), split)
    else:
        survey = Counting("client", tuple(known.client_names), split)
    levels = [one.step.level for one in result.steps if isinstance(one.step, Conformal)]
    return survey.audit(result.survey(survey, aggregation=aggregation), level=levels[-1] if levels else None, delta=delta)


def described(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return what a file says of steps, JSON-able.

    Raises:
        ValueError: A step is none of bayesfl's.
    """
    if other := [type(step).__name__ for step in steps if type(step) not in STEPS.values()]:
        raise ValueError(f"the step {other[0]} cannot be saved, as its code would be needed to read it; bayesfl's are {list(STEPS)}")
    return [{"step": type(step).__name__, "options": json.loads(json.dumps(asdict(step)))} for step in steps]  # pyright: ignore[reportArgumentType] (bayesfl's steps are dataclasses)


def tensors_of(steps: Sequence[Fitted]) -> dict[str, Any]:
    """Return the tensors of steps as a file has them, {place: {told, own}}."""
    return {str(place): {"told": dict(one.told), "own": dict(one.own)} for place, one in enumerate(steps)}


def read(about: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any]) -> tuple[Fitted, ...]:
    """Return the steps that a file describes.

    Raises:
        KeyError: A step or its tensors are unknown.
        ValueError: An option is out of range.
        TypeError: There is no such option.
    """
    found = []
    for place, one in enumerate(about):
        kept = tensors.get(str(place), {})
        found.append(Fitted(STEPS[one["step"]](**one["options"]), kept.get("told", {}), kept.get("own", {})))
    return tuple(found)
