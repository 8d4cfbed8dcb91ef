"""Likelihoods of one label for each example: a class of several, one of two, or one of several in
an order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.options import declared, listed, number
from bayesfl.base.protocols import Tensors
from bayesfl.base.targets import Targets


def class_predictive(log_probs: Tensor, draws: int = -3) -> Tensors:
    """Return mean probabilities over draws, and the mutual information of label and weights in
    nats.

    Args:
        log_probs: Logarithms of probabilities, [..., S, N, O].
        draws: Axis of the draws S; further axes stand between N and O where an example has several
            labels.
    """
    probs = log_probs.exp()
    mean = probs.mean(draws)
    total = torch.special.entr(mean).sum(-1)
    expected = torch.special.entr(probs).sum(-1).mean(draws + 1)
    return {"probs": mean, "epistemic": (total - expected).clamp_min(0)}


def _one_label(likelihood: object, targets: Targets, least: int, most: float = math.inf) -> None:
    """Check that each example has one label, of `least` to `most` classes.

    Raises:
        ValueError: The targets are numbers, or each example has several labels, or there are fewer
            or more classes.
    """
    targets.check(likelihood, "classification")
    if targets.shape:
        raise ValueError(
            f"likelihood {type(likelihood).__name__} is for one label an example, the data have "
            f"labels {list(targets.shape)} of each; take y.argmax(1) of one-hot labels, Tokens() "
            "for a class at each place, or MultiLabel() for labels that are 0 or 1"
        )
    if not least <= targets.count <= most:
        wanted = "two classes" if most == 2 else "two classes or more"
        raise ValueError(
            f"likelihood {type(likelihood).__name__} is for {wanted}, the data have "
            f"{targets.count}; use Categorical() for more, or make the data with outputs=2 if "
            "class 1 does not occur in them"
        )


def _class_weights(given: object) -> tuple[float, ...] | None:
    """Return the weights of classes as numbers.

    Raises:
        ValueError: They are no numbers >= 0, or all 0.
    """
    if given is None:
        return None
    found = listed(given)
    several = isinstance(found, Sequence) and not isinstance(found, str)
    weights = tuple(number("weights", one) for one in found) if several else ()
    if not any(weights) or not all(0 <= one < math.inf for one in weights):
        raise ValueError(
            "weights must be numbers >= 0, one for each class and not all 0, as "
            f"clients.balanced_weights, got {found!r}"
        )
    return weights


def _weight_of(weights: tuple[float, ...] | None, like: Tensor, classes: int) -> Tensor:
    """Return the weight of each class, [O].

    Raises:
        ValueError: There are more or fewer than classes.
    """
    if weights is None:
        return like.new_ones(classes)
    if len(weights) != classes:
        raise ValueError(
            f"weights must be one for each of the {classes} classes, got {len(weights)}"
        )
    return torch.tensor(weights, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
@declared
class Categorical:
    """The likelihood of classes 0 to O - 1 with probabilities softmax(outputs), or a training loss
    with class weights.

    With weights w the loss of an example of class y is, as in `torch.nn.functional.cross_entropy`,
    $-w_y log softmax(outputs)_y$, which is no negative log likelihood of a distribution. Measures
    are not affected: they compare probabilities with labels. A mean loss is the sum of these over
    n, as of torch's `reduction="none"`, and not torch's weighted mean, which divides by the sum of
    the weights.

    Args:
        weights: Weight of each class in the loss, O numbers >= 0, also as an array or a tensor, as
            the federation's `balanced_weights`; None for 1.

    Raises:
        ValueError: A weight is negative or not finite.

    Example:
        >>> logits, y = torch.zeros(1, 4), torch.tensor([2])
        >>> round(bf.likelihoods.Categorical().nll(logits, y).item(), 3)  # log 4
        1.386
    """

    weights: tuple[float, ...] | None = None
    task = "classification"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", _class_weights(self.weights))

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (O,), one output for each class.

        Raises:
            ValueError: The targets are no classes, or each example has several labels.
        """
        _one_label(self, targets, least=1)
        return (targets.count,)

    @property
    def plain(self) -> bool:
        """Return whether the loss is the negative log likelihood itself."""
        return self.weights is None

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss [..., B] in nats of `outputs` [..., B, O] at labels `y` [..., B], which
        broadcast: the cross-entropy if plain.
        """
        labels = y.expand(outputs.shape[:-1]).flatten()
        weight = None if self.plain else _weight_of(self.weights, outputs, outputs.shape[-1])
        return F.cross_entropy(outputs.flatten(0, -2), labels, weight, reduction="none").view(
            outputs.shape[:-1]
        )

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs` [..., B, O]:
        softmax(outputs) - onehot(y) if plain.
        """
        # For few classes torch's softmax is several times slower along the last axis than along the
        # one before.
        log_probs = outputs.mT.contiguous().log_softmax(-2).mT
        places = y.expand(outputs.shape[:-1]).unsqueeze(-1)
        if self.plain:
            nll = -log_probs.gather(-1, places).squeeze(-1)
            return nll, log_probs.exp_().scatter_(-1, places, -1.0, reduce="add")
        weight = self.times(outputs, places)
        slope = (weight * log_probs.exp()).scatter_add(-1, places, -weight)
        return -(weight * log_probs.gather(-1, places)).squeeze(-1), slope

    def times(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return how many times that of the plain loss the Hessian of `nll` in `outputs` is, [...,
        B].
        """
        return _weight_of(self.weights, outputs, outputs.shape[-1])[y]

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return `probs` [..., N, O] and `epistemic` [..., N] (mutual information, nats) from draws
        `outputs` [..., S, N, O].
        """
        return class_predictive(outputs.log_softmax(-1))


@dataclass(frozen=True)
class Bernoulli:
    """The likelihood of two classes, 1 with probability sigmoid(outputs[..., 0]), or a training
    loss with class weights, see `Categorical`.

    Args:
        weights: Weight of class 0 and of class 1 in the loss, >= 0, as the federation's
            `balanced_weights`; None for 1.

    Raises:
        ValueError: A weight is negative or not finite.

    Example:
        >>> logits, y = torch.zeros(2, 1), torch.tensor([0, 1])
        >>> bf.likelihoods.Bernoulli(weights=(1.0, 3.0)).nll(logits, y)
        tensor([0.6931, 2.0794])
    """

    weights: tuple[float, ...] | None = None
    task = "classification"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", _class_weights(self.weights))

    @property
    def plain(self) -> bool:
        """Return whether the loss is the negative log likelihood itself."""
        return self.weights is None

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (1,), the logit of class 1.

        Raises:
            ValueError: The targets are no classes, or not two, or each example has several labels.
        """
        _one_label(self, targets, least=2, most=2)
        return (1,)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy [..., B] in nats of `outputs` [..., B, 1] at labels `y`
        [..., B] in {0, 1}, which broadcast.
        """
        logit = outputs.squeeze(-1)
        nll = F.softplus(logit) - y * logit
        return nll if self.plain else nll * self.times(outputs, y)

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, sigmoid(outputs) - y
        [..., B, 1].
        """
        slope = outputs.sigmoid() - y.unsqueeze(-1)
        slope = slope * self.times(outputs, y).unsqueeze(-1) if not self.plain else slope
        return self.nll(outputs, y), slope

    def times(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return how many times that of the plain loss the Hessian of `nll` in `outputs` is, [...,
        B].
        """
        return _weight_of(self.weights, outputs, 2)[y.long()]

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return `probs` [..., N, 2] and `epistemic` [..., N] (mutual information, nats) from draws
        `outputs` [..., S, N, 1].
        """
        return class_predictive(torch.cat([F.logsigmoid(-outputs), F.logsigmoid(outputs)], -1))
