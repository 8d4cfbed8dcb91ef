"""Surveys of a federation after training, and calibration from them: their clients, and how answers
are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import words
from bayesfl.base.options import whole
from bayesfl.base.protocols import Tensors
from bayesfl.base.random import hashed
from bayesfl.base.surveys import Ask, Survey, answers, together
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData
from bayesfl.evaluation.audit import Counting
from bayesfl.evaluation.calibration import (
    Fitted,
    Step,
    applied,
    fit,
)
from bayesfl.evaluation.calibration.steps import any_draws, ends
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.predictions import present
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.federation.store.identity import reading


@runtime_checkable
class Adder(Protocol):
    """Define the interface of an aggregation that can add survey answers, such as `SecureSum`."""

    def added(self, summands: Mapping[int, Tensors]) -> Tensors:
        """Return the sum of the clients' summands, in float64, without reading single ones."""
        ...


def ask_here(survey: Survey, local: Any, aggregation: Adder | None) -> Ask:
    """Return a function that sends a survey's questions to clients on this machine."""
    if aggregation is None:
        return together(survey, local)

    def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        found = answers(survey, state, local, shapes)
        return aggregation.added(
            {
                client: {name: t[row] for name, t in found.items()}
                for row, client in enumerate(local.ids.tolist())
            }
        )

    return ask


def asked(survey: Survey, splits: Mapping[str, ClientData]) -> ClientData:
    """Return the split that a survey reads.

    Raises:
        ValueError: The split does not exist, or has no example.
    """
    name = survey.split
    if name not in splits or not splits[name].counts.any():
        raise ValueError(
            f"{'the audit' if isinstance(survey, Counting) else type(survey).__name__} reads the "
            f"split {name!r}, but the data have rows only in "
            f"{[one for one, split in splits.items() if split.counts.any()]}: name one of them, or "
            "make the data with such a split"
        )
    return splits[name]


def checked_steps(steps: Sequence[Step], before: Sequence[Step] = ()) -> tuple[Step, ...]:
    """Check steps of calibration and return them.

    Args:
        steps: The steps.
        before: The steps that are already fitted.

    Raises:
        TypeError: Something is not a step.
        ValueError: A step changes probabilities after sets were made from them.

    Warns:
        UserWarning: A step is fitted to training or test rows, or sets are made from scores on the
            split of an earlier step.
    """
    for number, step in enumerate(steps):
        if not isinstance(step, Step) or isinstance(step, type):
            raise TypeError(f"steps must be steps of calibration, as Temperature(), got {step!r}")
        earlier = (*before, *steps[:number])
        made = {type(one).__name__ for one in earlier if ends(one)}
        if made and not ends(step):
            raise ValueError(
                f"{type(step).__name__} must come before {' and '.join(sorted(made))}, which read "
                "the probabilities that it changes: start from "
                "result.uncalibrated().calibrate(...), and pass the steps in order of use"
            )
        if step.split in ("train", "test"):
            warn(
                f"{type(step).__name__} is fitted to the split {step.split!r}, "
                + (
                    "on which the model was trained"
                    if step.split == "train"
                    else "which evaluates the result"
                )
                + ": its guarantee then does not hold for other rows, or cannot be checked; use "
                "'validation' or 'calibration' instead",
            )
        shared = [
            type(one).__name__ for one in earlier if one.split == step.split and not ends(one)
        ]
        if ends(step) and shared:
            warn(
                f"{', '.join(shared)} and {type(step).__name__} are fitted to the same split, "
                f"{step.split!r}: coverage then falls below the level, hardly after a pooled "
                "temperature, by one or two per cent after a bias; fit the former to "
                "'validation', the latter to 'calibration'",
            )
    return tuple(steps)


def fitted(
    steps: Sequence[Step],
    before: Sequence[Fitted],
    predicted: Mapping[str, LocalPredictions],
    outputs: Outputs,
    aggregation: Adder | None,
) -> tuple[Fitted, ...]:
    """Fit new steps one after another, after the ones that are already fitted.

    Args:
        steps: The new steps.
        before: The steps that are already fitted.
        predicted: The clients' predictions on every split that is needed, before any step.
        outputs: Description of the targets.
        aggregation: How the clients' answers are added; None adds them in the clear.
    """
    done = list(before)
    for step in steps:
        now = {name: applied(done, local) for name, local in predicted.items()}
        local = now.pop(step.split)
        done.append(fit(step, local, outputs, ask_here(step, local, aggregation)))
        if not ends(step):
            for split, others in now.items():
                if losses := worse(others, done[-1].apply(others)):
                    warn(
                        f"{type(step).__name__} raises the loss of the rows in {split!r}, to which "
                        f"it was not fitted, from {losses[0]:.3g} to {losses[1]:.3g} nats a row: "
                        f"leave the step out, or put more rows into {step.split!r}"
                    )
    return tuple(done)


def worse(before: LocalPredictions, after: LocalPredictions) -> tuple[float, float] | None:
    """Return the mean losses of two predictions of classes for the same rows, in nats, if the
    second is larger by more than two standard errors of the difference; None otherwise.
    """
    if before.predictions.probs is None:
        return None
    losses = [_losses(before), _losses(after)]
    more = losses[1] - losses[0]
    if len(more) > 1 and float(more.mean()) > 2 * float(more.std()) / len(more) ** 0.5:
        return float(losses[0].mean()), float(losses[1].mean())
    return None


def _losses(known: LocalPredictions) -> Tensor:
    """Return the loss of every known label, in nats."""
    probs = present(known.places.predictions.probs)
    of_label = probs.gather(-1, known.places.labels.unsqueeze(-1)).squeeze(-1).double()
    return -of_label.clamp_min(torch.finfo(probs.dtype).tiny).log()


def settled(
    steps: Sequence[Fitted], predicted: Mapping[str, LocalPredictions]
) -> tuple[Fitted, ...]:
    """Return fitted steps with the own parameters of other clients, from the surveys' states;
    clients without rows in a split have no own parameters.
    """
    done: list[Fitted] = []
    for one in steps:
        local = applied(done, predicted[one.step.split])
        done.append(replace(one, own=one.step.settle(one.state, local)))
    return tuple(done)


def about(result: Any, surveys: Sequence[Survey]) -> Outputs:
    """Return the description of the targets for the start of surveys.

    Raises:
        ValueError: A survey asks clients for sums, after training under `ClientPrivacy`.
    """
    outputs = Outputs(result.known.task, result.known.outputs)
    if result.settings.sampling == "poisson":
        for one in surveys:
            if one.shapes(one.start(outputs)):
                raise ValueError(
                    f"{type(one).__name__} asks clients for sums without noise, so the run's "
                    "epsilon would not cover the result; under ClientPrivacy use steps that each "
                    "client fits alone, as Bias(variance=1.0)"
                )
    return outputs


def check_draws(steps: Sequence[Fitted], draws: int | None, algorithm: Algorithm) -> None:
    """Raise ValueError if the number of draws is no whole number, or another than that of the
    steps' fit; None stands for the method's own.
    """
    if draws is None:
        return
    whole("draws (None is the paper's number)", draws, least=0)
    # 0 also stands for the plain mean of a predictor.
    if steps and not (draws == algorithm.draws and (draws > 0 or algorithm.predictor is None)):
        raise ValueError(
            f"draws={draws} gives other predictions than the calibrated ones, which use the "
            f"method's own number, {algorithm.draws}; leave draws out, or predict with "
            "result.uncalibrated()"
        )


def check_reading(result: Any) -> None:
    """Raise ValueError if a `Result` or a `ClientModel` predicts in another way than when its steps
    were fitted.
    """
    if result.steps and getattr(result, "plug_in", False):
        raise ValueError(
            f"{result.name!r} is calibrated for its full predictions, but plug_in=True gives "
            "others: use dataclasses.replace(model, steps=())"
        )
    now = reading(result.algorithm) if result.steps else None
    if any(one.reading not in (None, now) for one in result.steps):
        raise ValueError(
            "the steps of calibration were fitted for another predictor, likelihood or number of "
            "draws: calibrate this result again, result.uncalibrated().calibrate(...)"
        )


def hashed_rows(
    found: LocalPredictions, split: ClientData, steps: Sequence[Step]
) -> LocalPredictions:
    """Add hashes of a split's rows to its predictions, if a step needs them for its draws."""
    each = [split.client(j)[0] for j in range(split.clients)] if any_draws(steps) else []
    return replace(found, rows=np.concatenate([hashed(words(x)) for x in each]) if each else None)


def without_rows(known: LocalPredictions) -> LocalPredictions:
    """Return predictions of the same clients for a split without rows, with `known`'s outputs."""
    none = slice(0)
    return replace(
        known,
        predictions=known.predictions.at(none),
        clients=Segments(0 * known.clients.counts),
        rows=None if known.rows is None else known.rows[none],
    )
