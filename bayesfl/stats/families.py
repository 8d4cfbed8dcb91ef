"""Families of outcomes: the negative log likelihood of a row by its linear predictor, with its
slope and its information.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Hold what a family says of n rows.

    Args:
        loss: Negative log likelihood of each row, in nats, [n]; infinite outside the family's
            range.
        slope: Its derivatives by the linear predictor and by the family's own parameters, [n, m].
        information: The second derivatives, [n, m, m], or what is expected of them.
    """

    loss: Tensor
    slope: Tensor
    information: Tensor


class Family(Protocol):
    """A family of outcomes with its link."""

    @property
    def name(self) -> str:
        """Return the family's name, with its link."""
        ...

    @property
    def own(self) -> tuple[str, ...]:
        """Return the names of parameters of its own, beside the linear predictor."""
        ...

    @property
    def ratio(self) -> str | None:
        """Return what the exponential of a coefficient is called; None where it says nothing."""
        ...

    def check(self, y: Tensor, site: str) -> None:
        """Raise ValueError if outcomes [n] are outside the family's range."""
        ...

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return losses, slopes and information of outcomes y [n] at linear predictors eta [n]."""
        ...

    def mean(self, eta: Tensor) -> Tensor:
        """Return the outcome's mean by the linear predictor."""
        ...

    def link(self, mean: float) -> float:
        """Return the linear predictor by the outcome's mean."""
        ...


def _pieces(loss: Tensor, slope: Tensor, information: Tensor) -> Pieces:
    """Return pieces of a family without parameters of its own."""
    return Pieces(loss, slope.unsqueeze(-1), information[..., None, None])


@dataclass(frozen=True)
class Gaussian:
    """Normal outcomes at the identity link, in units of their variance, which is estimated beside:
    the loss is half the squared residual.
    """

    name: str = "gaussian"
    own: tuple[str, ...] = ()
    ratio: str | None = None

    def check(self, y: Tensor, site: str) -> None:
        """Take any numbers."""

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return half the squared residuals; see `Family`."""
        return _pieces((eta - y) ** 2 / 2, eta - y, torch.ones_like(eta))

    def mean(self, eta: Tensor) -> Tensor:
        """Return the linear predictor."""
        return eta

    def link(self, mean: float) -> float:
        """Return the mean."""
        return mean


@dataclass(frozen=True)
class Normal(Gaussian):
    """Normal outcomes at the identity link with their own standard deviation, for hierarchies; its
    parameter is log sigma.
    """

    own: tuple[str, ...] = ("log sigma",)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return losses with slope and information by the linear predictor alone; see `Family`."""
        precision = torch.exp(-2 * own[0])
        residual = eta - y
        loss = precision * residual**2 / 2 + own[0] + math.log(2 * math.pi) / 2
        return _pieces(loss, precision * residual, precision * torch.ones_like(eta))


@dataclass(frozen=True)
class Binomial:
    """Outcomes 0 or 1 at the logit link, whose coefficients are log odds ratios."""

    name: str = "binomial, logit link"
    own: tuple[str, ...] = ()
    ratio: str | None = "odds ratio"

    def check(self, y: Tensor, site: str) -> None:
        """Raise ValueError if an outcome is not 0 or 1."""
        _need(bool(((y == 0) | (y == 1)).all()), site, "0 or 1", y)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return softplus(eta) - y eta; see `Family`."""
        p = torch.sigmoid(eta)
        return _pieces(torch.nn.functional.softplus(eta) - y * eta, p - y, p * (1 - p))

    def mean(self, eta: Tensor) -> Tensor:
        """Return the probability of 1."""
        return torch.sigmoid(eta)

    def link(self, mean: float) -> float:
        """Return the log odds."""
        return math.log(mean / (1 - mean))


@dataclass(frozen=True)
class LogBinomial(Binomial):
    """Outcomes 0 or 1 at the log link, whose coefficients are logarithms of risk ratios; the
    information is the expected one.
    """

    name: str = "binomial, log link"
    ratio: str | None = "risk ratio"

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return -y eta - (1 - y) log(1 - e^eta), infinite for a probability of 1 or more."""
        inside = eta.exp() < 1  # in floating point, too
        safe = torch.where(inside, eta, -1.0)
        p = safe.exp()
        loss = -y * safe - (1 - y) * torch.log1p(-p)
        slope = (p - y) / (1 - p)
        return _pieces(torch.where(inside, loss, torch.inf), slope, p / (1 - p))

    def mean(self, eta: Tensor) -> Tensor:
        """Return the probability of 1."""
        return eta.exp()

    def link(self, mean: float) -> float:
        """Return the logarithm."""
        return math.log(mean)


@dataclass(frozen=True)
class Poisson:
    """Counts at the log link, whose coefficients are logarithms of rate ratios."""

    name: str = "poisson, log link"
    own: tuple[str, ...] = ()
    ratio: str | None = "rate ratio"

    def check(self, y: Tensor, site: str) -> None:
        """Raise ValueError if an outcome is no count."""
        _need(bool(((y >= 0) & (y == y.round())).all()), site, "counts", y)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return e^eta - y eta + log y!; see `Family`."""
        mu = eta.exp()
        return _pieces(mu - y * eta + torch.lgamma(y + 1), mu - y, mu)

    def mean(self, eta: Tensor) -> Tensor:
        """Return the expected count."""
        return eta.exp()

    def link(self, mean: float) -> float:
        """Return the logarithm."""
        return math.log(mean)


@dataclass(frozen=True)
class NegativeBinomial(Poisson):
    """Counts at the log link of mean mu and variance mu + alpha mu^2 (NB2); its own parameter is
    log alpha, and the information the observed one.
    """

    name: str = "negative binomial, log link"
    own: tuple[str, ...] = ("log alpha",)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return the negative log likelihood; with r = 1 / alpha it is as follows.

        -log Gamma(y + r) + log Gamma(r) + log y! - r log r - y eta + (y + r) log(mu + r).
        """
        mu, r = eta.exp(), torch.exp(-own[0])
        both = mu + r
        loss = (
            torch.lgamma(r)
            - torch.lgamma(y + r)
            + torch.lgamma(y + 1)
            - torch.xlogy(r, r)
            - y * eta
            + (y + r) * both.log()
        )
        by_eta = (y + r) * mu / both - y
        # Derivatives by r; d r / d log alpha = -r.
        by_r = torch.digamma(r) - torch.digamma(y + r) - r.log() - 1 + both.log() + (y + r) / both
        by_rr = (
            torch.polygamma(1, r) - torch.polygamma(1, y + r) - 1 / r + 2 / both - (y + r) / both**2
        )
        eta_eta = (y + r) * mu * r / both**2
        eta_r = mu * (mu - y) / both**2
        slope = torch.stack([by_eta, -r * by_r], -1)
        cross = -r * eta_r
        own_own = r * by_r + r**2 * by_rr
        information = torch.stack(
            [torch.stack([eta_eta, cross], -1), torch.stack([cross, own_own], -1)], -2
        )
        return Pieces(loss, slope, information)


FAMILIES: dict[str, Family] = {
    "gaussian": Gaussian(),
    "binomial": Binomial(),
    "log_binomial": LogBinomial(),
    "poisson": Poisson(),
    "negative_binomial": NegativeBinomial(),
}


def _need(holds: bool, site: str, what: str, y: Tensor) -> None:
    if not holds:
        some = sorted({float(value) for value in y.tolist() if not math.isnan(value)})[:5]
        raise ValueError(
            f"outcomes of this family are {what}, and site {site!r} has {some}; take another "
            "family, or recode the outcome"
        )
