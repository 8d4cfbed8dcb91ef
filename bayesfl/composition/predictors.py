"""Predictors: personal predictions that need more than a client's weights, such as its training data or several models."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.protocols import Batch, Fitted, Server, Tensors, View
from bayesfl.composition.priors import Parameter
from bayesfl.curvature import Curvature, Inverse
from bayesfl.curvature.covariance import Covariance
from bayesfl.curvature.dual import independent
from bayesfl.curvature.roots import check_known
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors import prior_precision as precision
from bayesfl.posteriors.laplace import Laplace, Structure
from bayesfl.posteriors.linearised import LINKS, Link, kappa, predictive
from bayesfl.posteriors.selection import Evidence, Rule, check_rule, select

GRID = precision.GRID[::2]
"""Precisions that are tried on validation data, from 1e-4 to 1e4 by decades; under the largest, predictions are close to the MAP's."""
SHRUNK = 0.3  # below this median kappa (factor by which logits shrink) the prior, not the data, determines the predictions


@dataclass(frozen=True)
class LinearisedLaplace:
    """A predictor by a Laplace approximation around a client's own weights, fitted to its training data, with the linearised network.

    Any method can have it: `replace(bf.algorithms.fedper(model), predictor=LinearisedLaplace())` is FedPer with a Laplace body.

    Args:
        block: Name of the block whose weights are uncertain, while the others are constants; None for the first of the method's `parts`.
        structure: `full` (the whole block, in the dual form where N O is less than its weights), `subnetwork`, or `diagonal`.
        precision: Prior precision, for a likelihood that is a sum over the data: a number; a function of what the client received and its
            view, for one that the server has learnt, returning a number or one for each weight, [D]; or None to choose a number for all
            clients on their validation data, under the link by which they predict.
        share: Share of the block's weights that are in a subnetwork, in (0, 1].
        selection: Rule that chooses the subnetwork, one of `bayesfl.selection`, used anew for every client.
        seed: Seed of rules that draw, which give all clients the same subnetwork.
        link: How the Gaussian over the logits becomes probabilities: in closed form by `contrasts`, or `per_class` as in the papers on
            linearised networks (see `bayesfl.posteriors.linearised.predictive`); or by the method's number of `draws`. Where that number is
            not 0, or a caller asks for draws, they take the place of a closed form.
        centre: Whether logits are centred over classes, see `Laplace.linearised`; `per_class` alone depends on it.

    Raises:
        TypeError: `centre` is not a bool.
        ValueError: `link` is unknown, or is not `per_class` and `centre` is False; `precision` is not > 0 and finite, `share` lies outside
            (0, 1], `structure` or `selection` is unknown, or `seed` is no whole number >= 0.
    """

    block: str | None = None
    structure: Structure = "full"
    precision: float | Parameter | None = None
    share: float = 0.05
    selection: str | Rule = "wasserstein"
    seed: int = 0
    link: Link | Literal["draws"] = "contrasts"
    centre: bool = True
    tunes = "predictive_precision"
    reads = ()
    needs_data = True

    def __post_init__(self) -> None:
        if (
            self.precision is not None
            and not callable(self.precision)
            and not 0 < number("predictive_precision", self.precision) < torch.inf
        ):
            raise ValueError(f"predictive_precision must be > 0 and finite, or None to choose it, got {self.precision}")
        if not 0 < number("share", self.share) <= 1:
            raise ValueError(f"share is the part of the weights that stays uncertain and must lie in (0, 1], got {self.share}")
        if self.structure not in ("full", "subnetwork", "diagonal"):
            raise ValueError(f"structure must be 'full', 'subnetwork' or 'diagonal', got {self.structure!r}")
        check_rule(self.selection)
        whole("seed", self.seed, least=0)
        _check_link(self.link, centre=self.centre)

    def check(self, algorithm: Any) -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor does not fit the algorithm."""
        if self.block is not None and self.block not in algorithm.parts:
            raise ValueError(
                f"block {self.block!r} is none of the predictor's parts {algorithm.parts}; name one of them, or None for the first"
            )
        _check_linearised(self, algorithm)
        if isinstance(algorithm.likelihood, Categorical) and not algorithm.likelihood.plain:
            raise ValueError(f"{algorithm.likelihood} is a training loss, of which no Laplace approximation is made; take Categorical()")

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the candidate precisions, see `Predictor`; none where a function gives the precision."""
        if callable(self.precision):
            return ()
        return GRID if self.precision is None else (float(self.precision),)

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> Fitted:
        """Return one client's predictor, see `Predictor`."""
        kept: dict[float | None, Laplace] = {}
        first = self.precision(given, view).double() if callable(self.precision) else self.grid[0]

        @cache
        def diagonal() -> Laplace:
            options = {"likelihood": algorithm.likelihood, "pattern": self._layout(algorithm)}
            return Laplace.fit(algorithm.network(view), data["x"], precision=first, structure="diagonal", **options)

        def at(value: float | None) -> Laplace:
            if value not in kept:
                kept.clear()  # one factor at a time, as they take most of the memory
                kept[value] = self._fit(diagonal(), data["x"], first if value is None else value)
            return kept[value]

        return _Linearised(self, algorithm, view, lambda value: at(value).inverse)

    def stored(self, fitted: Fitted, value: float | None, *, limit: int) -> Tensors:
        """Return the tensors by which `restored` predicts without training data, see `StoredPredictor`."""
        assert isinstance(fitted, _Linearised)
        inverse = fitted.inverse(value)
        covariance = inverse if isinstance(inverse, Covariance) else Covariance.of(cast(Inverse, inverse), limit=limit)
        return covariance.tensors()

    def restored(self, algorithm: Any, view: View, tensors: Tensors) -> Fitted:
        """Return one client's predictor, made of `tensors`, see `StoredPredictor`."""
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=self._layout(algorithm))
        covariance = Covariance.restored(curvature, tensors)
        return _Linearised(self, algorithm, view, lambda value: covariance)

    def _layout(self, algorithm: Any) -> Any:
        return algorithm.layout(algorithm.parts[0] if self.block is None else self.block)

    def _fit(self, diagonal: Laplace, x: Tensor, precision: float | Tensor) -> Laplace:
        diagonal = diagonal.with_precision(x, precision)
        if self.structure == "diagonal":
            return diagonal
        indices = None
        if self.structure == "subnetwork":
            evidence = Evidence(diagonal.loc, diagonal.diagonal, 1 / diagonal.precision, self.seed, diagonal.curvature.layout)
            indices = select(self.selection, evidence, size_of(self.share, len(diagonal.loc)))
        return diagonal.with_structure(x, self.structure, indices=indices)


@dataclass(frozen=True)
class LinearisedBelief:
    """A predictor by the Gaussian that a block already holds, with the network linearised around its mean.

    Any block whose posterior draws can have it, as that of `pfedvem`, of a mean-field posterior on all weights, or of online Laplace. It
    needs no training data and no validation data. Where weights are many, draws of them leave the region in which the network is as it
    was trained, and predict badly; the linearised network with the same Gaussian does not.

    Args:
        block: Name of the block; None for the first of the method's `parts` that draws. The other blocks are constants, at their means.
        link: As of `LinearisedLaplace`.
        centre: As of `LinearisedLaplace`.

    Raises:
        TypeError: `centre` is not a bool.
        ValueError: `link` is unknown, or is not `per_class` and `centre` is False.

    References:
        Immer, Korzepa, Bauer, "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021.
    """

    block: str | None = None
    link: Link | Literal["draws"] = "contrasts"
    centre: bool = True
    precision = None
    tunes = ""
    grid = ()
    reads = ()
    needs_data = False

    def __post_init__(self) -> None:
        _check_link(self.link, centre=self.centre)

    def check(self, algorithm: Any) -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor does not fit the algorithm."""
        drawn = [name for name in algorithm.parts if algorithm.blocks[name].stochastic]
        if not drawn or self.block not in (None, *drawn):
            raise ValueError(
                f"block {self.block!r} holds no Gaussian: of the parts {algorithm.parts} those that draw are {drawn}; name one of them, or "
                "take LinearisedLaplace(), which makes a Gaussian of training data"
            )
        _check_linearised(self, algorithm)

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> Fitted:
        """Return one client's predictor, see `Predictor`."""
        name = self.block or next(part for part in algorithm.parts if algorithm.blocks[part].stochastic)
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=algorithm.layout(name))
        _, variance = algorithm.blocks[name].posterior.moments(view[name])
        inverse = independent(curvature, 1 / variance.double(), torch.zeros_like(variance, dtype=torch.float64))
        return _Linearised(self, algorithm, view, lambda value: inverse)

    def stored(self, fitted: Fitted, value: float | None, *, limit: int) -> Tensors:
        """Return nothing, since the belief is all, see `StoredPredictor`."""
        return {}

    def restored(self, algorithm: Any, view: View, tensors: Tensors) -> Fitted:
        """Return one client's predictor, see `StoredPredictor`."""
        return self(algorithm, {}, view, {})


def _check_link(link: str, *, centre: bool) -> None:
    instance("centre", centre, bool, "pass True or False")
    if link not in (*LINKS, "draws"):
        raise ValueError(f"link must be one of {(*LINKS, 'draws')}, got {link!r}")
    if not centre and link != "per_class":
        raise ValueError(f"centre=False changes nothing under link={link!r}; leave it out, or take link='per_class'")


def _check_linearised(rule: "LinearisedLaplace | LinearisedBelief", algorithm: Any) -> None:
    """Check that an algorithm is of one model and of a known likelihood, and has a number of draws where the rule draws."""
    check_known(algorithm.likelihood)
    if rule.link == "draws" and not algorithm.draws:
        raise ValueError("link='draws' needs a number of draws; give the method one, as draws=100, or take link='contrasts'")
    if (copies := algorithm.copies(algorithm.parts)) is not None:
        raise ValueError(f"a linearised network is one model, and parts {algorithm.parts} have {copies} copies; take Mixture() for these")


class _Linearised:
    """One client's predictor by the linearised network, see `Fitted`.

    Args:
        rule: The method's predictor.
        algorithm: The method.
        view: The client's view.
        inverse: Function from the prior precision that is tuned, or None, to the covariance of the weights.
    """

    def __init__(
        self, rule: LinearisedLaplace | LinearisedBelief, algorithm: Any, view: View, inverse: Callable[[float | None], Any]
    ) -> None:
        self._rule, self._algorithm, self._view, self.inverse = rule, algorithm, view, inverse

    def __call__(self, x: Tensor, *, value: float | None = None, noise: Tensor | None = None, plain: bool = False) -> Tensors:
        algorithm, rule, likelihood = self._algorithm, self._rule, self._algorithm.likelihood
        if plain:
            found = likelihood.predictive(algorithm.outputs(algorithm.leaves(algorithm.parts, self._view), x).unsqueeze(0))
            return found | {"epistemic": torch.full_like(found["epistemic"], torch.nan)}
        inverse = self.inverse(value)
        mean, covariance = inverse.predict(x, centre=rule.centre and isinstance(likelihood, Categorical))
        classes = not isinstance(likelihood, Gaussian)  # kappa is defined for logits, not for the variance of targets
        if rule.precision is not None and classes and float(kappa(covariance.diagonal(dim1=1, dim2=2)).median()) < SHRUNK:
            which = "the precision that the method computes" if callable(rule.precision) else f"predictive_precision={rule.precision}"
            warnings.warn(
                f"{which} leaves the predictions to the prior (the median kappa is below {SHRUNK}); choose a precision on validation data: "
                "predictive_precision=None under an isotropic prior",
                stacklevel=2,
            )
        link: Link = "contrasts" if rule.link == "draws" else rule.link
        return {name: t.to(x) for name, t in predictive(likelihood, mean, covariance, noise, link=link).items()}


def size_of(share: float, weights: int) -> int:
    """Return the number of weights in a subnetwork: a share of D weights, rounded down, at least one."""
    return max(1, int(share * weights + 1e-9))


@dataclass(frozen=True)
class Mixture:
    """A predictor by the copies of a block together: sum_m pi_m p(y | x, copy m).

    Probabilities are averaged, not logits; for targets, the result has the moments of the mixture.

    Args:
        block: Name of the block with copies.
        weights: Name of the mixture weights pi [M] in a client's view.
    """

    block: str
    weights: str
    tunes = ""
    grid = ()
    needs_data = False

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the name of the weights, see `StoredPredictor`."""
        return (self.weights,)

    def check(self, algorithm: Any) -> None:
        """Raise ValueError if the predictor does not fit the algorithm, see `Predictor`."""
        if self.block not in algorithm.parts or algorithm.blocks[self.block].copies is None:
            raise ValueError(f"block {self.block!r} must be one of the predictor's parts {algorithm.parts} and have copies")

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> Fitted:
        """Return one client's predictor, see `Predictor`."""
        leaves, pi = algorithm.leaves(algorithm.parts, view), view[self.weights]
        many = algorithm.layout(self.block).shapes

        def fitted(x: Tensor, *, value: float | None = None, noise: Tensor | None = None, plain: bool = False) -> Tensors:
            single = [{k: v[m] if k in many else v for k, v in leaves.items()} for m in range(len(pi))]
            each = [algorithm.likelihood.predictive(algorithm.outputs(one, x).unsqueeze(0)) for one in single]
            stacked = {name: torch.stack([found[name] for found in each], -1) for name in each[0]}
            if "probs" in stacked:
                return {"probs": stacked["probs"] @ pi, "epistemic": torch.full_like(stacked["epistemic"][..., 0], torch.nan)}
            mean = stacked["mean"] @ pi
            spread = (stacked["mean"] - mean.unsqueeze(-1)).square() @ pi
            return {
                "mean": mean,
                "variance": stacked["variance"] @ pi + spread,
                "epistemic": torch.full_like(stacked["epistemic"][..., 0], torch.nan),
            }

        return fitted

    def stored(self, fitted: Fitted, value: float | None, *, limit: int) -> Tensors:
        """Return nothing, since no training data are needed, see `StoredPredictor`."""
        return {}

    def restored(self, algorithm: Any, view: View, tensors: Tensors) -> Fitted:
        """Return one client's predictor, see `StoredPredictor`."""
        return self(algorithm, {}, view, {})
