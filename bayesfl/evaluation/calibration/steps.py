"""Steps of calibration: surveys whose result changes predictions, fitted one after another."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Ask, Survey, conduct, together
from bayesfl.evaluation.predictions import Predictions, present
from bayesfl.evaluation.surveys import LocalPredictions, Outputs


@runtime_checkable
class Step(Survey[LocalPredictions], Protocol):
    """Define the interface of a survey whose result is applied to predictions.

    A step with `draws = True` receives `LocalPredictions.rows`. A step with `last = True` makes
    sets or answers from the probabilities, and no step that changes these may follow. See
    docs/howto/extending.md for an example.

    Example:
        >>> isinstance(bf.calibration.Temperature(), bf.calibration.Step)
        True
    """

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return the clients' own parameters, [J, ...], from the survey's last state."""
        ...

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return changed predictions.

        Args:
            state: The survey's last state.
            own: The clients' own parameters, [J, ...].
            local: The predictions to change, with their clients; labels are not read.
        """
        ...


@dataclass(frozen=True)
class Fitted:
    """Hold a fitted step.

    Args:
        step: The step.
        state: The common state, such as a pooled temperature or the histogram of all scores.
        own: The clients' own parameters, [J, ...], which never leave the clients.
        reading: The method's way of predicting at the fit; None if unknown.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> (fitted,) = result.calibrate(bf.calibration.Temperature()).steps
        >>> fitted.step, list(fitted.own)
        (Temperature(split='validation', strength=10.0), ['temperature'])
    """

    step: Step
    state: Tensors = field(repr=False)
    own: Tensors = field(repr=False)
    reading: str | None = None

    def apply(self, local: LocalPredictions) -> LocalPredictions:
        """Return the predictions as changed by the step, with their clients."""
        return replace(local, predictions=self.step.apply(self.state, self.own, local))

    def of(self, rows: Tensor) -> "Fitted":
        """Return the step for some clients, by their indices [C]."""
        return replace(self, own={name: t[rows] for name, t in self.own.items()})


def fit(step: Step, local: LocalPredictions, outputs: Outputs, ask: Ask | None = None) -> Fitted:
    """Fit a step to clients' predictions on its split, as changed by the preceding steps.

    Args:
        step: The step.
        local: The predictions, and whose they are.
        outputs: What is predicted.
        ask: Function that asks a question; None adds the answers of `local`.

    Raises:
        ValueError: The step does not fit such predictions, or a prediction is not finite.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
        >>> (local,) = bf.simulate(method, clients, rounds=1).local_predictions(clients.validation)
        >>> outputs = bf.evaluation.surveys.Outputs("classification", 10)
        >>> bf.calibration.fit(bf.calibration.Bias(), local, outputs).own["bias"].shape
        torch.Size([2, 10])
    """
    state = conduct(step, ask or together(step, local), outputs)
    return Fitted(step, state, step.settle(state, local))


def refuse_numbers(step: object, outputs: Outputs) -> None:
    """Raise ValueError for a regression, for a step that needs probabilities of classes.

    Raises:
        ValueError: The predictions have no classes.
    """
    if outputs.task != "classification":
        raise ValueError(
            f"{type(step).__name__} works on probabilities of classes, and this is a regression: "
            "leave it out; for regression, Conformal gives intervals"
        )


def refuse_empty(split: str, examples: Tensor) -> None:
    """Raise ValueError for a split without examples, given the number of all clients' examples.

    Raises:
        ValueError: No client has one.
    """
    if not examples > 0:
        raise ValueError(
            f"no client has an example in the split {split!r}: make the data with {split}=0.1"
        )


def ends(step: Step) -> bool:
    """Return whether no step that changes probabilities may follow this one."""
    return getattr(step, "last", False)


def any_draws(steps: "Iterable[Step]") -> bool:
    """Return whether any step draws a number for every row."""
    return any(getattr(step, "draws", False) for step in steps)


def applied(steps: Iterable[Fitted], local: LocalPredictions) -> LocalPredictions:
    """Apply all steps to local predictions, one after another.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1)
        >>> result = result.calibrate(bf.calibration.Bias())
        >>> (local,) = result.local_predictions(clients.test)
        >>> bf.calibration.applied(result.steps, local).predictions.probs.shape
        torch.Size([359, 10])
    """
    for one in steps:
        local = one.apply(local)
    return local


def changed(predictions: Predictions, logits: Tensor) -> Predictions:
    """Return predictions with the probabilities of these logits; the epistemic part is capped at
    their entropy.
    """
    probs = logits.softmax(-1).to(present(predictions.probs))
    return replace(
        predictions,
        probs=probs,
        epistemic=torch.minimum(predictions.epistemic, torch.special.entr(probs).sum(-1)),
    )
