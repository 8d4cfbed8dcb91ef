"""Likelihoods of numbers: with noise of a known or a learned scale, of counts, and intervals by two
quantiles.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.options import PROBABILITY, Range, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.targets import Targets

DEVIATION = Range(0, why="it is one standard deviation for all targets")


def _rows(y: Tensor, outputs: Tensor) -> Tensor:
    """Return targets [..., B] of one number as [..., B, 1], and others [..., B, O] as they are, for
    means `outputs` [..., B, O].
    """
    return y.unsqueeze(-1) if y.dim() < outputs.dim() and outputs.shape[-1] == 1 else y


@dataclass(frozen=True)
@declared(idle={("scale", float): ("floor",)})
class Gaussian:
    """The likelihood of targets [..., O] with a normal distribution: of one known standard
    deviation, or of one that the network gives.

    With a learned scale the network has 2 O outputs, first the O means m, then the O numbers r of
    which the standard deviations are $floor + softplus(r)$. Without a floor the density of examples
    that are met exactly grows without bound, and training diverges.

    Args:
        scale: Standard deviation of the noise, in the targets' unit, > 0 and finite, one for all
            targets; or `learned`.
        floor: Least standard deviation that is learned, in the targets' unit, > 0; None for 0.2, a
            fifth of the spread of standardised targets. Steps of gradient descent are stable below
            a rate in proportion to its square. Only for `scale="learned"`.

    Raises:
        ValueError: `scale` or `floor` is no number, or out of range; or `floor` is given for a
            scale that is known.

    References:
        Nix and Weigend, "Estimating the mean and variance of the target probability distribution",
        ICNN 1994.

    Example:
        >>> outputs, y = torch.zeros(1, 1), torch.tensor([[2.0]])
        >>> round(bf.likelihoods.Gaussian(scale=2.0).nll(outputs, y).item(), 3)
        2.112
    """

    scale: Annotated[float | Literal["learned"], DEVIATION] = 1.0
    floor: Annotated[float | None, DEVIATION] = None
    task = "regression"
    distribution = "normal"

    def __post_init__(self) -> None:
        if self.scale == "learned" and self.floor is None:
            object.__setattr__(self, "floor", 0.2)

    @property
    def known(self) -> float:
        """Return the known standard deviation."""
        assert isinstance(self.scale, float)  # which who asks has made sure of
        return self.scale

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (O,), one output for each number; (2 O,) where the scale is learned.

        Raises:
            ValueError: The targets are classes.
        """
        targets.check(self, "regression")
        return (targets.count if self.floor is None else 2 * targets.count,)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return means [..., B, O], and their standard deviations, or the one that is known."""
        if self.floor is None:
            return outputs, self.known
        mean, raw = outputs.chunk(2, -1)
        return mean, self.floor + F.softplus(raw)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log density [..., B] in nats, summed over the targets; `y` is [...,
        B] where O is 1, else [..., B, O].
        """
        mean, scale = self._parts(outputs)
        squares = ((mean - _rows(y, mean)) / scale).square().sum(-1)
        logs = (
            scale.log().sum(-1) if isinstance(scale, Tensor) else mean.shape[-1] * math.log(scale)
        )
        return 0.5 * squares + mean.shape[-1] * 0.5 * math.log(2 * math.pi) + logs

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs` [..., B, O]: (m - y) /
        scale^2 of a mean.
        """
        mean, scale = self._parts(outputs)
        slope = (mean - _rows(y, mean)) / scale**2
        if not isinstance(scale, Tensor):
            return self.nll(outputs, y), slope
        squares = slope * (mean - _rows(y, mean))
        return self.nll(outputs, y), torch.cat(
            [slope, (1 - squares) / scale * outputs.chunk(2, -1)[1].sigmoid()], -1
        )

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return moments of the mixture over draws [..., S, N, O]: `mean` and `variance` [..., N,
        O], and `epistemic` [..., N].

        The variance includes the noise, its mean over draws where it is learned; `epistemic` is the
        variance of the draws' means, summed over O.
        """
        means, scale = self._parts(outputs)
        return _moments(means, scale**2)


@dataclass(frozen=True)
class Poisson:
    """The likelihood of counts [..., O] with rates exp(outputs).

    References:
        McCullagh and Nelder, "Generalized linear models", 2nd ed. 1989, section 6.2.

    Example:
        >>> outputs, y = torch.zeros(1, 1), torch.tensor([[0.0]])  # rate 1
        >>> bf.likelihoods.Poisson().nll(outputs, y).tolist()
        [1.0]
    """

    task = "regression"
    distribution = "counts"

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (O,), the logarithm of the rate of each count.

        Raises:
            ValueError: The targets are classes, or no whole numbers >= 0.
        """
        targets.check(self, "regression")
        wrong = targets.y[(targets.y < 0) | (targets.y != targets.y.round())]
        if len(wrong):
            raise ValueError(
                "likelihood Poisson is of counts, whole numbers >= 0, the targets hold "
                f"{wrong[0].item():g}; leave out scaling and standardising of the targets, or take "
                "Gaussian(scale=...)"
            )
        return (targets.count,)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return -log p(y) [..., B] in nats, summed over the counts, with all constants; `y` is
        [..., B] where O is 1, else [..., B, O].
        """
        y = _rows(y, outputs)
        return (outputs.exp() - y * outputs + (y + 1).lgamma()).sum(-1)

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, exp(outputs) - y
        [..., B, O].
        """
        return self.nll(outputs, y), outputs.exp() - _rows(y, outputs)

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return moments of the mixture over draws [..., S, N, O]: `mean` and `variance` [..., N,
        O], and `epistemic` [..., N].

        The variance is the mean rate and the variance of the rates over draws, which, summed over
        O, is `epistemic`.
        """
        rates = outputs.exp().clamp_min(torch.finfo(outputs.dtype).tiny)  # so that no variance is 0
        return _moments(rates, rates)


@dataclass(frozen=True)
@declared
class Quantiles:
    """The loss of an interval for targets [..., O] by two quantiles, which is no negative log
    likelihood of a distribution.

    The network has 2 O outputs, first the O lower ends, then the O numbers r by whose $softplus(r)$
    the upper ends lie above them. With the levels $a = (1 - level) / 2$ and $1 - a$ of the two ends
    q the loss is the sum of $(y - q) (a - 1[y < q])$ over both.

    Args:
        level: Probability of the interval, in (0, 1).

    Raises:
        ValueError: `level` is no number in (0, 1).

    References:
        Koenker and Bassett, "Regression quantiles", Econometrica 46(1), 1978.

    Example:
        >>> outputs, y = torch.tensor([[0.0, 2.0]]), torch.tensor([[5.0]])  # ends, and a target
        >>> bf.likelihoods.Quantiles(level=0.9).nll(outputs, y)
        tensor([2.9794])
    """

    level: Annotated[float, PROBABILITY] = 0.9
    task = "regression"

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (2 O,), two outputs for each number.

        Raises:
            ValueError: The targets are classes.
        """
        targets.check(self, "regression")
        return (2 * targets.count,)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss [..., B] in the targets' unit, summed over ends and targets; `y` is [...,
        B] where O is 1, else [..., B, O].
        """
        return self.nll_and_slope(outputs, y)[0]

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs` [..., B, 2 O]."""
        ends = _ends(outputs)
        y = _rows(y, ends[0])
        away = [y - q for q in ends]
        shares = (1 - self.level) / 2, (1 + self.level) / 2
        low, high = (  # share - 1[residual < 0]
            -torch.where(residual < 0, share - 1, share).to(residual)
            for residual, share in zip(away, shares, strict=True)
        )
        return -(low * away[0] + high * away[1]).sum(-1), torch.cat(
            [low + high, high * outputs.chunk(2, -1)[1].sigmoid()], -1
        )

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return the interval from draws `outputs` [..., S, N, 2 O]: its ends, averaged over draws,
        and the spread of its middle.

        Returns:
            `lower` and `upper` [..., N, O]; `mean` [..., N, O], the middle, which is no mean; and
            `epistemic` [..., N], the variance over draws of the middle, summed over O.
        """
        lower, upper = _ends(outputs)
        middle = (lower + upper) / 2
        found = {"lower": lower.mean(-3), "upper": upper.mean(-3), "mean": middle.mean(-3)}
        return found | {"epistemic": middle.var(-3, correction=0).sum(-1)}


def _ends(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper ends of intervals, [..., O] each."""
    lower, raw = outputs.chunk(2, -1)
    return lower, lower + F.softplus(raw)


def _moments(means: Tensor, variances: Tensor | float) -> Tensors:
    """Return mean and variance of a mixture over draws [..., S, N, O], and the variance of the
    means, summed over O.
    """
    spread = means.var(-3, correction=0)
    noise = variances.mean(-3) if isinstance(variances, Tensor) else variances
    return {"mean": means.mean(-3), "variance": noise + spread, "epistemic": spread.sum(-1)}
