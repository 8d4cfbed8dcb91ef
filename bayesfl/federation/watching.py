"""Alarms of a client's model: the scores of rows to come, and those of the client's calibration rows."""

from dataclasses import replace
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from bayesfl.evaluation.alarm import Alarm, Watched
from bayesfl.evaluation.calibration import Conformal, Fitted
from bayesfl.evaluation.calibration.conformal import doubt
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import Mine

UNCERTAIN = (
    "the predictions of {!r} have no epistemic uncertainty, as one set of weights makes them: take a method with a posterior, or give this "
    "one predictor=LinearisedLaplace(), or watch labels"
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
    place, one = _sets_of(model)
    mine: Mine = model.mine(x)
    if y is not None:
        mine = replace(mine, predictions=replace(mine.predictions, labels=_labels(model, mine.predictions, y)[None]))
    for earlier in model.steps[:place]:
        mine = earlier.apply(mine)
    if y is not None:
        return cast(Conformal, one.step).scored(mine)[0].numpy()
    found = doubt(mine)[0].numpy()
    if np.isnan(found).any():
        raise ValueError(UNCERTAIN.format(model.name))
    return found


def watching(model: Any, score: Watched, delta: float) -> Alarm:
    """Return an alarm for a client's rows to come; see `ClientModel.alarm`.

    Args:
        model: The model, a `ClientModel`, whose module imports this one.
        score: What the alarm looks at.
        delta: Probability of a false alarm, ever.

    Raises:
        ValueError: As by `ClientModel.alarm`.
    """
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
    return Alarm(reference.numpy(), alpha=1 - level, delta=delta, seed=model.seed, client=model.client, round=model.round)


def _sets_of(model: Any) -> tuple[int, Fitted]:
    """Return the last step that makes sets, and its place.

    Raises:
        ValueError: There is none, or one without the scores that an alarm needs.
    """
    found = [(place, one) for place, one in enumerate(model.steps) if isinstance(one.step, Conformal)]
    if not found or "scores" not in found[-1][1].own:
        raise ValueError(
            f"an alarm compares rows with the calibration rows of {model.name!r}, of which its model knows nothing: make it by "
            "result.calibrate(Conformal()).client(...)"
        )
    return found[-1]


def _labels(model: Any, found: Predictions, y: Any) -> Tensor:
    """Return labels or targets as those of a split, [N, ...]; names of classes as their numbers.

    Raises:
        ValueError: They do not fit the predictions.
    """
    values, rows = np.asarray(y), found.mask.shape[1]
    if values.dtype.kind in "OUT" and model.class_names is not None:
        known = {name: place for place, name in enumerate(model.class_names)}
        if other := sorted({str(one) for one in values.ravel().tolist()} - known.keys()):
            raise ValueError(f"y has {other[0]!r}, which is none of the classes {list(known)}")
        values = np.array([known[str(one)] for one in values.ravel().tolist()]).reshape(values.shape)
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
        raise ValueError(f"y must be classes from 0 to {found.probs.shape[-1] - 1}, one for each row, got shape {list(labels.shape)}")
    return labels.long()
