"""Alarms of a client's model: the scores of rows to come, and those of the client's calibration rows."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from bayesfl.base import digest
from bayesfl.evaluation.alarm import Alarm, Scores, Watched
from bayesfl.evaluation.calibration import Conformal, Fitted, applied
from bayesfl.evaluation.calibration.conformal import doubt
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import Mine

UNCERTAIN = (
    "the predictions of {!r} have no epistemic uncertainty, as it predicts at the mean of one set of weights or by link='per_class': "
    "before the run give the method draws, dataclasses.replace(method, draws=20), another link, or dataclasses.replace(method, "
    "predictor=bf.predictors.LinearisedLaplace()); or watch labels"
)


def strangeness(model: Any, x: Any, y: Any) -> np.ndarray:
    """Return how strange rows are to a client's model, [N]; see `ClientModel.scores`.

    Args:
        model: The model, a `ClientModel`, whose module imports this one.
        x: Inputs.
        y: Labels or targets; None for the epistemic uncertainty.

    Raises:
        ValueError: As by `ClientModel.scores`.
    """
    _same_alone(model)
    place, one = _sets_of(model)
    mine: Mine = model.mine(x)
    if y is not None:
        mine = replace(mine, predictions=replace(mine.predictions, labels=_labels(model, mine.predictions, y)[None]))
    mine = applied(model.steps[:place], mine)
    if y is not None:
        return Scores.made(cast(Conformal, one.step).scored(mine)[0].numpy(), "labels", _whose(model, one))
    found = doubt(mine)[0].numpy()
    if np.isnan(found).any():
        raise ValueError(UNCERTAIN.format(model.name))
    return Scores.made(found, "epistemic", _whose(model, one))


def watching(model: Any, score: Watched, delta: float) -> Alarm:
    """Return an alarm for a client's rows to come; see `ClientModel.alarm`.

    Args:
        model: The model, a `ClientModel`, whose module imports this one.
        score: What the alarm looks at.
        delta: Probability of a false alarm, ever.

    Raises:
        ValueError: As by `ClientModel.alarm`.
    """
    _same_alone(model)
    if score not in get_args(Watched):
        raise ValueError(f"score must be one of {get_args(Watched)}, got {score!r}")
    _, one = _sets_of(model)
    kept = {"labels": "scores", "epistemic": "epistemic"}[score]
    reference = one.own[kept][0]
    reference = reference[one.own["scores"][0].isfinite()]
    if not len(reference):
        raise ValueError(
            f"{model.name!r} has no rows in the split {one.step.split!r}, with which an alarm compares rows to come; give it some there"
        )
    if bool(reference.isnan().any()):
        raise ValueError(UNCERTAIN.format(model.name))
    level = cast(Conformal, one.step).level
    if len(reference) < (least := math.ceil(1 / (1 - level))):
        warnings.warn(
            f"{model.name!r} has {len(reference)} calibration rows, and an alarm needs {least} to expect a miss among them: it will be "
            "raised late",
            stacklevel=3,
        )
    about: dict[str, Any] = {"seed": model.seed, "client": model.client, "round": model.round, "of": (score, _whose(model, one))}
    return Alarm(reference.numpy(), alpha=1 - level, delta=delta, **about)


def _same_alone(model: Any) -> None:
    """Raise ValueError if predictions of a row depend on the rows with it, so that new rows differ from calibration rows in any case."""
    if model.algorithm.predictor is not None and model.algorithm.draws:
        raise ValueError(
            f"the predictor of {model.name!r} draws noise for each row by its place among those that are predicted together, so that an "
            "alarm would compare what cannot be compared: train by the same method with another link, such as 'contrasts', and draws=0"
        )


def _whose(model: Any, one: Fitted) -> str:
    """Return what tells a model and its calibration from others: its calibration rows' scores follow from both."""
    made = digest.of_tensors(repr(one.step), {name: t.cpu() for name, t in one.own.items()})[:8]
    return f"{model.name!r} after round {model.round}, seed {model.seed}, calibration {made}"


def _sets_of(model: Any) -> tuple[int, Fitted]:
    """Return the last step that makes sets, and its place.

    Raises:
        ValueError: There is none.
    """
    found = [(place, one) for place, one in enumerate(model.steps) if isinstance(one.step, Conformal)]
    if not found:
        raise ValueError(
            f"{model.name!r} has no conformal sets, by whose scores rows are compared: make it by result.calibrate(Conformal())"
        )
    return found[-1]


def _numerals(names: Sequence[str]) -> bool:
    """Say whether a class is named by a number, or a truth value, which is not the place that it has."""

    def other(name: str, place: int) -> bool:
        try:
            return float({"false": "0", "true": "1"}.get(name.lower(), name)) != place
        except ValueError:
            return False

    return any(other(name, place) for place, name in enumerate(names))


def _labels(model: Any, found: Predictions, y: Any) -> Tensor:
    """Return labels or targets as those of a split, [N, ...]; names of classes as their numbers.

    Raises:
        ValueError: They do not fit the predictions.
    """
    values, rows = np.asarray(y).copy(), found.mask.shape[1]  # a copy, as what a data frame gives cannot be written
    if values.dtype.kind in "OUT" and model.class_names is not None:
        known = {name: place for place, name in enumerate(model.class_names)}
        if other := sorted({str(one) for one in values.ravel().tolist()} - known.keys()):
            raise ValueError(f"y has {other[0]!r}, which is none of the classes {list(known)}")
        values = np.array([known[str(one)] for one in values.ravel().tolist()]).reshape(values.shape)
    elif values.dtype.kind in "biuf" and not isinstance(y, Tensor) and model.class_names is not None and _numerals(model.class_names):
        raise ValueError(
            f"y has {'truth values' if values.dtype.kind == 'b' else 'numbers'}, and the classes are named by others, "
            f"{list(model.class_names[:5])}: pass these names as text, y.astype(str)"
        )
    if values.dtype.kind not in "biuf" or not values.ndim:
        raise ValueError(f"y must be a list or an array of labels or targets, one for each row, got {type(y).__name__} of {values.dtype}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("y has numbers that are not finite; leave these rows out")
    if found.probs is not None and values.dtype.kind == "f" and (values != np.rint(values)).any():
        raise ValueError("y must be whole numbers of classes, got fractions")
    if found.probs is not None and found.probs.dim() == 4:
        raise ValueError(
            "alarms watch rows of one label each: the labels of one row are not independent; score rows by a number of your own"
        )
    if found.probs is not None and values.dtype.kind == "b" and found.probs.shape[-1] != 2:
        raise ValueError(f"y must be one of {found.probs.shape[-1]} classes, got truth values")
    labels = torch.as_tensor(values)
    if len(labels) != rows:
        raise ValueError(f"y must have a label for each of {rows} rows, got {len(labels)}")
    if found.probs is None:
        like = found.lower if found.variance is None else found.mean
        assert like is not None  # predictions of numbers have one of the two
        if labels.numel() != like.numel():
            raise ValueError(f"y must have {like.shape[-1]} targets for each row, got shape {list(labels.shape)}")
        return labels.reshape(like.shape[1:])
    if labels.shape != found.probs.shape[1:-1] or bool(((labels < 0) | (labels >= found.probs.shape[-1])).any()):
        raise ValueError(
            f"y must be classes from 0 to {found.probs.shape[-1] - 1}, one for each row, got {labels.unique().tolist()[:5]} of shape "
            f"{list(labels.shape)}"
        )
    return labels.long()
