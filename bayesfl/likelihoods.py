"""Likelihoods: the distribution of the data given the network's outputs, for single examples.

Whether an objective takes their sum or mean over a client's data is decided by the energy.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.checks import number
from bayesfl.base.protocols import Tensors


def _class_predictive(log_probs: Tensor) -> Tensors:
    """Return mean probabilities over draws [..., S, N, O] and the mutual information of label and weights [..., N], in nats."""
    probs = log_probs.exp()
    mean = probs.mean(-3)
    total = torch.special.entr(mean).sum(-1)
    expected = torch.special.entr(probs).sum(-1).mean(-2)
    return {"probs": mean, "epistemic": (total - expected).clamp_min(0)}


def _listed(values: Any) -> Any:
    """Return the numbers of a tensor or an array as Python's own, in a list where there are several; return anything else as it is."""
    return values.tolist() if isinstance(values, Tensor | np.ndarray | np.generic) else values


@dataclass(frozen=True)
class Categorical:
    """The likelihood of classes 0 to O - 1 with probabilities softmax(outputs), or a training loss with class weights or label smoothing.

    With weights w and smoothing s the loss of an example of class y is, as in `torch.nn.functional.cross_entropy`,

        (1 - s) w_y nll_y + s / O sum_o w_o nll_o,   nll_o = -log softmax(outputs)_o,

    which is no negative log likelihood of a distribution. Measures are not affected: they compare probabilities with labels. A mean loss
    is the sum of these over n, as of torch's `reduction="none"`, and not torch's weighted mean, which divides by the sum of the weights.

    Args:
        weights: Weight of each class in the loss, O numbers >= 0, also as an array or a tensor; None for 1.
        smoothing: Share s of the loss that all classes have alike, in [0, 1).

    Raises:
        ValueError: A weight is negative or not finite, or `smoothing` lies outside [0, 1).
    """

    weights: tuple[float, ...] | None = None
    smoothing: float = 0.0
    task = "classification"

    def __post_init__(self) -> None:
        if self.weights is not None:
            weights = _listed(self.weights)
            if not isinstance(weights, Iterable) or isinstance(weights, str | Mapping):
                raise ValueError(f"weights must be one number for each class, as (1.0, 2.0), got {weights!r}")
            object.__setattr__(self, "weights", tuple(number("weights", w) for w in weights))
            if not self.weights or not all(0 <= w < math.inf for w in self.weights) or not any(self.weights):
                raise ValueError(f"weights must be numbers >= 0, one for each class and not all 0, got {self.weights}")
        if not 0 <= number("smoothing", self.smoothing) < 1:
            raise ValueError(f"smoothing is a share and must lie in [0, 1), got {self.smoothing}")

    @property
    def plain(self) -> bool:
        """Say whether the loss is the negative log likelihood itself."""
        return self.weights is None and not self.smoothing

    def _weights(self, outputs: Tensor) -> Tensor:
        if self.weights is None:
            return outputs.new_ones(outputs.shape[-1])
        if len(self.weights) != outputs.shape[-1]:
            raise ValueError(f"weights must be one for each of the {outputs.shape[-1]} classes, got {len(self.weights)}")
        return torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss [..., B] in nats of `outputs` [..., B, O] at labels `y` [..., B], which broadcast: the cross-entropy if plain."""
        labels = y.expand(outputs.shape[:-1]).flatten()
        options = {} if self.plain else {"weight": self._weights(outputs), "label_smoothing": self.smoothing}
        return F.cross_entropy(outputs.flatten(0, -2), labels, reduction="none", **options).view(outputs.shape[:-1])

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs` [..., B, O]: softmax(outputs) - onehot(y) if plain."""
        # For few classes torch's softmax is several times slower along the last axis than along the one before.
        log_probs = outputs.mT.contiguous().log_softmax(-2).mT
        places = y.expand(outputs.shape[:-1]).unsqueeze(-1)
        if self.plain:
            nll = -log_probs.gather(-1, places).squeeze(-1)
            return nll, log_probs.exp_().scatter_(-1, places, -1.0, reduce="add")
        target = self.targets(outputs, y)
        return -(target * log_probs).sum(-1), target.sum(-1, keepdim=True) * log_probs.exp() - target

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the weighted and smoothed labels t [..., B, O], by which `nll` is -sum_o t_o log softmax(outputs)_o; onehot(y) if plain.

        The Hessian of `nll` in `outputs` is that of the plain loss times sum_o t_o.
        """
        weights, places = self._weights(outputs), y.expand(outputs.shape[:-1]).unsqueeze(-1)
        target = (self.smoothing / outputs.shape[-1] * weights).expand(outputs.shape)
        return target.scatter_add(-1, places, (1 - self.smoothing) * weights[places])

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return `probs` [..., N, O] and `epistemic` [..., N] (mutual information, nats) from draws `outputs` [..., S, N, O]."""
        return _class_predictive(outputs.log_softmax(-1))


@dataclass(frozen=True)
class Bernoulli:
    """The likelihood of two classes, 1 with probability sigmoid(outputs[..., 0])."""

    task = "classification"

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy [..., B] in nats of `outputs` [..., B, 1] at labels `y` [..., B] in {0, 1}, which broadcast."""
        logit = outputs.squeeze(-1)
        return F.softplus(logit) - y * logit

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, sigmoid(outputs) - y [..., B, 1]."""
        return self.nll(outputs, y), outputs.sigmoid() - y.unsqueeze(-1)

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return `probs` [..., N, 2] and `epistemic` [..., N] (mutual information, nats) from draws `outputs` [..., S, N, 1]."""
        return _class_predictive(torch.cat([F.logsigmoid(-outputs), F.logsigmoid(outputs)], -1))


@dataclass(frozen=True)
class Gaussian:
    """The likelihood of targets [..., O] with mean `outputs` and one known standard deviation.

    Args:
        scale: Standard deviation of the noise, in the targets' unit, > 0 and finite; one for all targets.

    Raises:
        ValueError: `scale` is no number, or out of range.
    """

    scale: float = 1.0
    task = "regression"

    def __post_init__(self) -> None:
        scale = _listed(self.scale)
        if isinstance(scale, bool) or not isinstance(scale, Real):
            raise ValueError(f"scale is one standard deviation for all targets, a number, got {scale!r}; standardise targets that differ")
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"scale is a standard deviation and must be > 0 and finite, got {scale}")
        object.__setattr__(self, "scale", float(scale))

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log density [..., B] in nats, summed over the outputs; `y` is [..., B] where O is 1, else [..., B, O]."""
        squares = (self._residual(outputs, y) / self.scale).square().sum(-1)
        return 0.5 * squares + outputs.shape[-1] * (0.5 * math.log(2 * math.pi) + math.log(self.scale))

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, (outputs - y) / scale^2 [..., B, O]."""
        return self.nll(outputs, y), self._residual(outputs, y) / self.scale**2

    def _residual(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs - (y.unsqueeze(-1) if y.dim() < outputs.dim() and outputs.shape[-1] == 1 else y)

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return moments of the mixture over draws [..., S, N, O]: `mean` and `variance` [..., N, O], and `epistemic` [..., N].

        The variance includes the noise; `epistemic` is the variance of the draws' means, summed over O.
        """
        spread = outputs.var(-3, correction=0)
        return {"mean": outputs.mean(-3), "variance": self.scale**2 + spread, "epistemic": spread.sum(-1)}
