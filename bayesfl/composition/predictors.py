"""Predictors: personal predictions that need more than a client's weights, made where a client's training data are."""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.protocols import Batch, Fitted, Server, Tensors, View
from bayesfl.likelihoods import Gaussian
from bayesfl.posteriors import prior_precision as precision
from bayesfl.posteriors.laplace import Laplace, Structure
from bayesfl.posteriors.linearised import kappa, predictive
from bayesfl.posteriors.selection import Evidence, Rule, check_rule, select

GRID = precision.GRID[::2]
"""Precisions that are tried on validation data, from 1e-4 to 1e4 by decades; the largest leave the MAP's predictions."""
SHRUNK = 0.3  # a median kappa below this says that the prior, not the data, makes the predictions


@dataclass(frozen=True)
class LinearisedLaplace:
    """A Laplace approximation around a client's own weights, fitted to its training data, predicting through the linearised network.

    Any method can take it: `replace(bf.algorithms.fedper(model), predictor=LinearisedLaplace())` is FedPer with a Laplace body.

    Args:
        block: The block whose weights are uncertain, the others constants; None for the first of the method's `parts`.
        structure: `full` (the whole block, in the dual form where N O is less than its weights), `subnetwork`, or `diagonal`.
        precision: Of the prior, in the units of a sum over the data; None to choose one for all clients on their validation data.
        share: Of the block's weights that a subnetwork has.
        selection: Which these are, a rule of `bayesfl.selection`, used anew for every client.
        seed: Of rules that draw: one subnetwork for all clients.
        centre: See `Laplace.linearised`.

    Raises:
        TypeError: `centre` is no bool.
        ValueError: A precision that is not > 0, a share outside (0, 1], an unknown structure or selection.
    """

    block: str | None = None
    structure: Structure = "full"
    precision: float | None = None
    share: float = 0.05
    selection: str | Rule = "wasserstein"
    seed: int = 0
    centre: bool = True
    tunes = "predictive_precision"

    def __post_init__(self) -> None:
        if self.precision is not None and not 0 < number("predictive_precision", self.precision) < torch.inf:
            raise ValueError(f"predictive_precision must be > 0 and finite, or None to choose it, got {self.precision}")
        if not 0 < number("share", self.share) <= 1:
            raise ValueError(f"share is the part of the weights that stays uncertain and must lie in (0, 1], got {self.share}")
        if self.structure not in ("full", "subnetwork", "diagonal"):
            raise ValueError(f"structure must be 'full', 'subnetwork' or 'diagonal', got {self.structure!r}")
        check_rule(self.selection)
        whole("seed", self.seed, least=0)
        instance("centre", self.centre, bool, "pass True or False")

    def check(self, algorithm: Any) -> None:
        """See `Predictor`."""
        if self.block is not None and self.block not in algorithm.parts:
            raise ValueError(
                f"block {self.block!r} is none of the predictor's parts {algorithm.parts}; name one of them, or None for the first"
            )

    @property
    def grid(self) -> tuple[float, ...]:
        """See `Predictor`."""
        return GRID if self.precision is None else (float(self.precision),)

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> Fitted:
        """See `Predictor`."""
        likelihood, kept = algorithm.likelihood, {}

        @cache
        def diagonal() -> Laplace:
            block = algorithm.parts[0] if self.block is None else self.block
            options = {"likelihood": likelihood, "pattern": algorithm.blocks[block].pattern}
            return Laplace.fit(algorithm.network(view), data["x"], precision=self.grid[0], structure="diagonal", **options)

        def at(value: float) -> Laplace:
            if value not in kept:
                kept.clear()  # one factor at a time: they are what takes the memory
                kept[value] = self._fit(diagonal(), data["x"], value)
            return kept[value]

        def fitted(x: Tensor, *, value: float | None = None, noise: Tensor | None = None, plain: bool = False) -> Tensors:
            if plain:
                found = likelihood.predictive(algorithm.outputs(algorithm.leaves(algorithm.parts, view), x).unsqueeze(0))
                return found | {"epistemic": torch.full_like(found["epistemic"], torch.nan)}
            mean, covariance = at(self.grid[0] if value is None else value).linearised(x, centre=self.centre)
            classes = not isinstance(likelihood, Gaussian)  # the variance of targets has their unit
            if self.precision is not None and classes and float(kappa(covariance.diagonal(dim1=1, dim2=2)).median()) < SHRUNK:
                warnings.warn(
                    f"predictive_precision={self.precision:g} leaves the predictions to the prior (the median kappa is below {SHRUNK}); "
                    "choose it on validation data: predictive_precision=None",
                    stacklevel=2,
                )
            return {name: t.to(x) for name, t in predictive(likelihood, mean, covariance, noise).items()}

        return fitted

    def _fit(self, diagonal: Laplace, x: Tensor, precision: float) -> Laplace:
        diagonal = diagonal.with_precision(x, precision)
        if self.structure == "diagonal":
            return diagonal
        indices = None
        if self.structure == "subnetwork":
            evidence = Evidence(diagonal.loc, diagonal.diagonal, 1 / diagonal.precision, self.seed, diagonal.curvature.layout)
            indices = select(self.selection, evidence, size_of(self.share, len(diagonal.loc)))
        return diagonal.with_structure(x, self.structure, indices=indices)


def size_of(share: float, weights: int) -> int:
    """How many of so many weights a share is: whole ones, at least one."""
    return max(1, int(share * weights + 1e-9))


@dataclass(frozen=True)
class Mixture:
    """The copies of a block together: sum_m pi_m p(y | x, copy m), probabilities mixed and not logits; for targets, moments of the mixture.

    Args:
        block: The block with copies.
        weights: Name of pi [M] in a client's view.
    """

    block: str
    weights: str
    tunes = ""
    grid = ()

    def check(self, algorithm: Any) -> None:
        """See `Predictor`."""
        if self.block not in algorithm.parts or algorithm.blocks[self.block].copies is None:
            raise ValueError(f"block {self.block!r} must be one of the predictor's parts {algorithm.parts} and have copies")

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> Fitted:
        """See `Predictor`."""
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
