"""Families of outcomes: the negative log likelihood of a row by its linear predictor, with its
slope and its information.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

STIRLING = 16.0
"""From here on Stirling's series of log Gamma has all digits."""


@dataclass(frozen=True)
class Pieces:
    """Hold losses of n rows with their derivatives.

    Args:
        loss: Negative log likelihood of each row, in nats, [n]; infinite outside the family's
            range.
        slope: Its derivatives by the linear predictor and by the family's own parameters, [n, m].
        information: The second derivatives, [n, m, m], or their expectations.
    """

    loss: Tensor
    slope: Tensor
    information: Tensor


class Family(ABC):
    """A family of outcomes with its link, by default the logarithm.

    Attributes:
        name: Its name, with its link.
        own: Names of its own parameters, besides the linear predictor.
        ratio: Name of the exponential of a coefficient; None if it has none.
        largest: Upper limit of linear predictors at draws of a hierarchy's parameters; above it
            Hessians would be singular by rounding.
    """

    name: str
    own: tuple[str, ...] = ()
    ratio: str | None = None
    largest: float = math.inf

    @abstractmethod
    def check(self, y: Tensor, site: str) -> None:
        """Raise ValueError if outcomes [n] are outside the family's range."""

    @abstractmethod
    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return losses, slopes and information of outcomes y [n] at linear predictors eta [n]."""

    def mean(self, eta: Tensor) -> Tensor:
        """Return the outcome's mean by the linear predictor."""
        return eta.exp()

    def link(self, mean: float) -> float:
        """Return the linear predictor by the outcome's mean."""
        return math.log(mean)


def _pieces(loss: Tensor, slope: Tensor, information: Tensor) -> Pieces:
    """Return pieces of a family without parameters of its own."""
    return Pieces(loss, slope.unsqueeze(-1), information[..., None, None])


class Gaussian(Family):
    """Normal outcomes at the identity link, in units of their variance, which is estimated
    separately: the loss is half the squared residual.
    """

    name = "gaussian"

    def check(self, y: Tensor, site: str) -> None:
        """Take any numbers."""

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return half the squared residuals, with derivatives; see `Family`."""
        return _pieces((eta - y) ** 2 / 2, eta - y, torch.ones_like(eta))

    def mean(self, eta: Tensor) -> Tensor:
        """Return the linear predictor."""
        return eta

    def link(self, mean: float) -> float:
        """Return the mean."""
        return mean


class Normal(Gaussian):
    """Normal outcomes at the identity link with their own standard deviation, for hierarchies; its
    parameter is log sigma.
    """

    own = ("log sigma",)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return losses with slope and information by the linear predictor alone; see `Family`."""
        precision = torch.exp(-2 * own[0])
        residual = eta - y
        loss = precision * residual**2 / 2 + own[0] + math.log(2 * math.pi) / 2
        return _pieces(loss, precision * residual, precision * torch.ones_like(eta))


class Binomial(Family):
    """Outcomes 0 or 1 at the logit link; coefficients are log odds ratios."""

    name = "binomial, logit link"
    ratio = "odds ratio"

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


class LogBinomial(Family):
    """Outcomes 0 or 1 at the log link; coefficients are logarithms of risk ratios, and the
    information is the expected one.
    """

    name = "binomial, log link"
    ratio = "risk ratio"
    check = Binomial.check

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return -y eta - (1 - y) log(1 - e^eta). For a probability of 1 or more, loss and
        information are infinite.
        """
        inside = eta.exp() < 1  # in floating point, too
        safe = torch.where(inside, eta, -1.0)
        p = safe.exp()
        loss = -y * safe - (1 - y) * torch.log1p(-p)
        slope = (p - y) / (1 - p)
        loss, information = (torch.where(inside, t, torch.inf) for t in (loss, p / (1 - p)))
        return _pieces(loss, slope, information)


class Poisson(Family):
    """Counts at the log link; coefficients are logarithms of rate ratios."""

    name = "poisson, log link"
    ratio = "rate ratio"
    largest = 25.0  # a rate of 7e10

    def check(self, y: Tensor, site: str) -> None:
        """Raise ValueError if an outcome is no count."""
        _need(bool(((y >= 0) & (y == y.round())).all()), site, "counts", y)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return e^eta - y eta + log y!, see `Family`, relative to its minimum at log y, so that
        differences keep their digits for large counts.
        """
        mu, above = eta.exp(), eta - y.clamp_min(1).log()
        risen = torch.where(y > 0, y * (torch.expm1(above) - above), mu)
        return _pieces(risen + saturated(y), mu - y, mu)


class NegativeBinomial(Poisson):
    """Counts at the log link of mean mu and variance mu + alpha mu^2 (NB2); its own parameter is
    log alpha, and the information the observed one.
    """

    name = "negative binomial, log link"
    own = ("log alpha",)

    def pieces(self, eta: Tensor, y: Tensor, own: Tensor) -> Pieces:
        """Return the negative log likelihood; with r = 1 / alpha it is as follows.

        $log y! + log Gamma(r) - log Gamma(y + r) - r log r - y eta + (y + r) log(mu + r)$,

        The code writes it relative to its minimum by eta, at log y, with Gamma by Stirling's
        formula and its `_remainder`. So no large terms cancel, and its limit at an alpha of 0 is
        Poisson's.
        """
        mu, r = eta.exp(), torch.exp(-own[0])
        above, both, least = eta - y.clamp_min(1).log(), mu + r, y + r
        e, q = (mu - y) / least, (mu - y) / both
        at_r, at_least = _remainder(r), _remainder(least)
        risen = least * torch.log1p(e) - torch.where(y > 0, y * above, 0.0)
        loss = risen + torch.log1p(y / r) / 2 + at_r[0] - at_least[0] + saturated(y)
        # Derivatives by r; d r / d log alpha = -r.
        r_by_r = r * (torch.log1p(e) - q + at_r[1] - at_least[1]) - y / least / 2
        rr_by_rr = (
            r**2 * (at_r[2] - at_least[2])
            - (r * q) * (r / least) * q
            + y / least * (1 + r / least) / 2
        )
        slope = torch.stack([r * q, -r_by_r], -1)
        cross = -r / both * q * mu
        information = torch.stack(
            [
                torch.stack([least / both * mu * (r / both), cross], -1),
                torch.stack([cross, r_by_r + rr_by_rr], -1),
            ],
            -2,
        )
        return Pieces(loss, slope, information)


def saturated(y: Tensor) -> Tensor:
    """Return Poisson's loss of counts if each is its own mean, y - y log y + log y!."""
    return y - torch.xlogy(y, y) + torch.lgamma(y + 1)


def _remainder(x: Tensor) -> tuple[Tensor, ...]:
    """Return log Gamma(x) minus (x - 1/2) log x - x + log(2 pi) / 2, with its first two
    derivatives: by Binet's series from 16 on, where it has all digits.
    """
    small, inverse = x.clamp_max(STIRLING), 1 / x.clamp_min(STIRLING)
    log, square = small.log(), inverse**2
    exact = (
        torch.lgamma(small) - (small - 0.5) * log + small - math.log(2 * math.pi) / 2,
        torch.digamma(small) - log + 0.5 / small,
        torch.polygamma(1, small) - 1 / small - 0.5 / small**2,
    )
    series = (
        inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))),
        -square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240))),
        inverse * square * (1 / 6 - square * (1 / 30 - square * (1 / 42 - square / 30))),
    )
    return tuple(torch.where(x < STIRLING, a, b) for a, b in zip(exact, series, strict=True))


FAMILIES: dict[str, Family] = {
    "gaussian": Gaussian(),
    "binomial": Binomial(),
    "log_binomial": LogBinomial(),
    "poisson": Poisson(),
    "negative_binomial": NegativeBinomial(),
}


def row_information(family: Family, eta: Tensor, own: Tensor) -> Tensor:
    """Return the weights of rows in sums at linear predictors eta, for any outcomes: their
    information at an outcome of 0. At other outcomes it is the same, or for `NegativeBinomial` a
    multiple that does not depend on eta. So a change of eta never adds or drops a row.
    """
    return family.pieces(eta, torch.zeros_like(eta), own).information[..., 0, 0]


def _need(holds: bool, site: str, what: str, y: Tensor) -> None:
    if not holds:
        some = sorted({float(value) for value in y.tolist() if not math.isnan(value)})[:5]
        raise ValueError(
            f"outcomes of this family are {what}, but site {site!r} has {some}; take another "
            "family, or recode the outcome"
        )
