"""Steps of calibration: surveys whose result changes predictions, fitted one after the other."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Ask, Survey, conduct, together
from bayesfl.evaluation.predictions import Predictions, present
from bayesfl.evaluation.surveys import LocalPredictions, Outputs


@runtime_checkable
class Step(Survey[LocalPredictions], Protocol):
    """A survey whose result is applied to predictions.

    A step may say `draws = True`, and is then given `LocalPredictions.rows`; and `last = True` if
    it makes sets or answers of the probabilities, which others then change no more.
    docs/howto/extending.md writes one.

    Example:
        >>> isinstance(bf.calibration.Temperature(), bf.calibration.Step)
        True
    """

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return the clients' own parameters, [J, ...], by the survey's last state."""
        ...

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return changed predictions.

        Args:
            state: The survey's last state.
            own: The clients' own parameters, [J, ...].
            local: The predictions to change, and whose they are; labels are not read.
        """
        ...


@dataclass(frozen=True)
class Fitted:
    """A step with what it has learnt.

    Args:
        step: The step.
        state: What all clients know, as a pooled temperature or the histogram of all scores.
        own: The clients' own parameters, [J, ...], which never leave them.
        reading: How the method predicted when the step was fitted; None where that is not known.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> (fitted,) = result.calibrate(bf.calibration.Temperature()).steps
        >>> fitted.step, list(fitted.own)
        (Temperature(split='validation', strength=10.0), ['temperature'])
    """

    step: Step
    state: Tensors
    own: Tensors
    reading: str | None = None

    def __repr__(self) -> str:
        kept = ", ".join(
            f"{name} {list(t.shape)}" for name, t in {**self.state, **self.own}.items()
        )
        return f"Fitted({self.step}; {kept})"

    def apply(self, local: LocalPredictions) -> LocalPredictions:
        """Return predictions as the step changes them, with whose they are."""
        return replace(local, predictions=self.step.apply(self.state, self.own, local))

    def of(self, rows: Tensor) -> "Fitted":
        """Return the step as some clients know it, by their places [C]."""
        return replace(self, own={name: t[rows] for name, t in self.own.items()})


def fit(step: Step, local: LocalPredictions, outputs: Outputs, ask: Ask | None = None) -> Fitted:
    """Fit a step to clients' predictions on its split, after the steps before it.

    Args:
        step: The step.
        local: The predictions, and whose they are.
        outputs: What is predicted.
        ask: How questions are put; None adds the answers of `local`.

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
    """Refuse predictions of numbers, for a step that works on probabilities of classes.

    Raises:
        ValueError: What is predicted has no classes.
    """
    if outputs.task != "classification":
        raise ValueError(
            f"{type(step).__name__} works on probabilities of classes, and this is a regression: "
            "leave it out; for regression, Conformal gives intervals"
        )


def refuse_empty(split: str, examples: Tensor) -> None:
    """Refuse a split of which no client has an example, by the number of all clients' examples.

    Raises:
        ValueError: No client has one.
    """
    if not examples > 0:
        raise ValueError(
            f"no client has an example in the split {split!r}: make the data with {split}=0.1"
        )


def ends(step: Step) -> bool:
    """Return whether a step leaves probabilities as they are, so that none which changes them may
    follow.
    """
    return getattr(step, "last", False)


def any_draws(steps: "Iterable[Step]") -> bool:
    """Return whether one of some steps draws a number for every row, by its inputs."""
    return any(getattr(step, "draws", False) for step in steps)


def applied(steps: Iterable[Fitted], local: LocalPredictions) -> LocalPredictions:
    """Apply all steps to local predictions, one after the other.

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
    """Return predictions with the probabilities of these logits; the epistemic part stays, capped
    at the entropy of these.
    """
    probs = logits.softmax(-1).to(present(predictions.probs))
    return replace(
        predictions,
        probs=probs,
        epistemic=torch.minimum(predictions.epistemic, torch.special.entr(probs).sum(-1)),
    )
