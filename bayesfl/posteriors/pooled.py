"""Laplace's approximation for the rows of all clients, from sums: each client sends only the
generalised Gauss-Newton matrix of its own rows at one network, or its factors.

    $H = sum_j GGN_j + precision I$, $GGN_j$ that of the rows of client j,

so that the network has the posterior of a fit to the pooled rows; for Kronecker factors B is
summed, and A is the mean over all examples. The log likelihood is a sum, too, and so is the
evidence; the prior precision with the largest evidence follows from the summed curvature alone.

Sources: see `bayesfl.posteriors.laplace`. Sums suffice because the log likelihood is additive, as
in `bayesfl.stats`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.surveys import NotNegative
from bayesfl.curvature import Curvature, Inverse, kronecker
from bayesfl.curvature.batches import Data, require
from bayesfl.curvature.dual import independent, invert_ggn, restore
from bayesfl.curvature.kronecker import Kronecker
from bayesfl.posteriors.laplace import Laplace, last_layer
from bayesfl.posteriors.laplace import Structure as Form
from bayesfl.posteriors.prior_precision import best_precision

Structure = Literal["last_layer", "diagonal", "kfac", "full"]
"""Covariances of a pooled approximation: all of the last layer's weights, with the others constant;
none; a product of two factors for each layer; all of all weights.
"""


@in_own_modes
@dataclass(frozen=True, eq=False, repr=False)
class PooledPosterior(Laplace):
    """Hold a Laplace approximation for rows on other machines, made by `PooledCurvature`.

    Args:
        log_likelihood: Log likelihood of all rows at the weights, in nats; None if unknown, as
            after `load`.
    """

    log_likelihood: Tensor | None = None

    def log_marginal_likelihood(
        self, x: Data | None = None, y: Tensor | None = None, *, centre: float | Tensor = 0.0
    ) -> Tensor:
        """Compute the log marginal likelihood of all rows, see `Laplace.log_marginal_likelihood`;
        the rows themselves are not needed.
        """
        if x is None and self.log_likelihood is not None:
            return self.evidence(self.log_likelihood, centre)
        return super().log_marginal_likelihood([] if x is None else x, y, centre=centre)

    def with_precision(self, x: Data | None, precision: float | Tensor) -> Self:
        """Return the approximation for the same rows under another prior precision; the rows are
        not needed: `with_precision(None, 1.0)`.

        Args:
            x: All rows' inputs, which are then read; None reads the curvature from the posterior.
            precision: The new precision, one number or one for each covered weight, [D].

        Raises:
            ValueError: See `Laplace.with_precision`.
        """
        if x is not None or self.structure != "full" or isinstance(self.inverse, Kronecker):
            return super().with_precision(x, precision)
        prior = self.curvature.vector(precision)
        inverse = invert_ggn(self.curvature, self.inverse.ggn(), prior)
        return replace(self, precision=prior, inverse=inverse)


@in_own_modes
@dataclass(frozen=True, eq=False)
class PooledCurvature:
    """Survey the curvature of clients' training rows at one network, see `bayesfl.base.surveys`.

    Each client sends, eight bytes for each number: the number of its rows and their summed negative
    log likelihood in nats, and, for D covered weights, the $D (D + 1) / 2$ different entries of its
    GGN, its diagonal of D, or those of the two factors of each layer. A last layer of 100 inputs
    and 10 classes with a bias takes 4.1 MB in full, and 41 kB in Kronecker form.

    Args:
        model: The network, in evaluation mode.
        structure: The covariances that are kept. `last_layer` covers the layer that makes the
            network's outputs, which must be linear; if `forward` does not reveal it, the layer that
            the network declares last, if it makes them.
        precision: Prior precision of every weight, for a likelihood that is a sum over the rows; or
            `evidence` for the one with the largest log marginal likelihood.
        pattern: The covered parameters: a layout, or a pattern over their names; `*` with
            `last_layer` means that layer's.
        likelihood: Distribution of y given the outputs; categorical by default.

    Raises:
        TypeError: The likelihood's curvature is not known.
        ValueError: The network cannot be covered in this way.
    """

    model: nn.Module
    structure: Structure = "last_layer"
    precision: float | Literal["evidence"] = "evidence"
    pattern: Pattern | Layout = "*"
    likelihood: Likelihood | None = None
    split = "train"
    reads = "rows"
    sums = "the curvature at the server's model, and the loss, in nats"

    @cached_property
    def curvature(self) -> Curvature:
        """Return the curvature of the network, at its weights."""
        last = self.structure == "last_layer" and self.pattern == "*"
        pattern = last_layer(self.model) if last else self.pattern
        return Curvature(self.model, self.likelihood, pattern=pattern)

    def start(self, about: Any, /) -> Tensors:
        """Return an empty state."""
        return {}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a client's answer."""
        size = self.curvature.size
        common: dict[str, tuple[int, ...]] = {"n_examples": (), "nll": ()}
        if self.structure == "diagonal":
            return common | {"diagonal": NotNegative((size,))}
        if self.structure == "kfac":
            for place, (outputs, inputs) in enumerate(kronecker.orders(self.curvature)):
                common |= {f"outputs_{place}": _triangle(outputs)}
                common |= {f"inputs_{place}": _triangle(inputs)}
            return common
        smaller = "use structure='last_layer', 'kfac' or 'diagonal'"
        require(8 * size**2, self.curvature.memory, f"a GGN of {size} weights", smaller)
        return common | {"ggn": _triangle(size)}

    def answer(self, state: Tensors, local: Iterable[tuple[Inputs, Tensor]]) -> Tensors:
        """Return each client's sums, [J, ...].

        Args:
            state: The survey's state.
            local: The clients' inputs and labels or targets, as `LocalRows` yields them.

        Raises:
            ValueError: The network's outputs or its curvature are not finite, or there is no linear
                layer that is known to make its outputs.
        """
        shapes = self.shapes(state)
        none = {name: torch.zeros(shape) for name, shape in shapes.items()}
        found = [self._of_rows(x, y) if len(y) else none for x, y in local]
        return {name: torch.stack([one[name].double().cpu() for one in found]) for name in shapes}

    def _of_rows(self, x: Inputs, y: Tensor) -> Tensors:
        """Return the sums of one client's rows."""
        curvature, data = self.curvature, {"x": x}
        losses = curvature.likelihood.nll(curvature.outputs(data), y.to(curvature.device))
        found = {"n_examples": torch.tensor(len(y)), "nll": losses.sum()}
        if self.structure == "diagonal":
            return found | {"diagonal": curvature.diagonal(data)}
        if self.structure == "kfac":
            for place, (outputs, inputs) in enumerate(kronecker.factors(curvature, data)[0]):
                found |= {f"outputs_{place}": _lower(outputs), f"inputs_{place}": _lower(inputs)}
            return found
        if self.structure == "last_layer" and curvature.last_layer(x) is None:
            raise ValueError(
                f"the layer that the network declares last, {curvature.layout.names}, does not "
                "make its outputs alone; name the layer that does, as structure='full', "
                "pattern='head.*'"
            )
        return found | {"ggn": _lower(curvature.ggn(data))}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the tensors of the posterior on the CPU, which `posterior` restores.

        Raises:
            ValueError: The evidence has no maximum in the prior precision.
            torch.linalg.LinAlgError: The curvature has no Cholesky factor.
        """
        curvature, examples = self.curvature, int(total["n_examples"])
        diagonal, eigenvalues, inverted = self._summed(
            {name: t.to(curvature.device) for name, t in total.items()}, examples
        )
        precision = self._chosen(eigenvalues)
        inverse = inverted(curvature.vector(precision))
        # Row by row, as in a file, so that products are rounded alike.
        parts = {
            f"inverse_{name}".replace(".", "_"): t.contiguous()
            for name, t in inverse.tensors().items()
        }
        about = {
            "n_examples": torch.tensor(examples),
            "nll": total["nll"],
            "precision": torch.tensor(precision, dtype=torch.float64),
            "diagonal": diagonal,
        }
        return {name: t.cpu() for name, t in (about | parts).items()}, True

    def _summed(
        self, total: Tensors, examples: int
    ) -> tuple[Tensor, Callable[[], Tensor], Callable[[Tensor], Inverse | Kronecker]]:
        """Return, for the summed curvature, the diagonal [D], a function that computes the
        eigenvalues, and a function from the prior precision [D] to the posterior covariance.
        """
        curvature = self.curvature
        if self.structure == "diagonal":
            diagonal = total["diagonal"]
            return diagonal, lambda: diagonal, partial(independent, curvature, diagonal=diagonal)
        if self.structure == "kfac":
            factors = [
                (_whole(total[f"outputs_{place}"], h), _whole(total[f"inputs_{place}"], i))
                for place, (h, i) in enumerate(kronecker.orders(curvature))
            ]
            diagonal = kronecker.diagonal_of(curvature, factors, examples)
            found = kronecker.of_factors(curvature, factors, examples, curvature.vector(1.0))
            return diagonal, lambda: found.eigenvalues, found.with_precision
        ggn = _whole(total["ggn"], curvature.size)
        # Sums of rounded numbers, as under secure sums, may be negative.
        return (
            ggn.diagonal().clone(),
            lambda: torch.linalg.eigvalsh(ggn).clamp_min(0),
            partial(invert_ggn, curvature, ggn),
        )

    def _chosen(self, eigenvalues: Callable[[], Tensor]) -> float:
        """Return the given prior precision, or select it from the summed curvature."""
        if self.precision != "evidence":
            return self.precision
        found = best_precision(eigenvalues(), self.curvature.weights.square().sum())
        if found is None:
            raise ValueError(
                "the log marginal likelihood has no maximum in the prior precision, because the "
                "covered weights are all 0 or have no curvature; pass a number, as precision=1.0"
            )
        return found

    def posterior(self, state: Tensors) -> PooledPosterior:
        """Return the posterior from the survey's last state."""
        curvature = self.curvature
        parts = {
            re.sub(r"_(\d+)$", r".\1", name.removeprefix("inverse_")): t
            for name, t in state.items()
            if name.startswith("inverse_")
        }
        form: Form = "full" if self.structure == "last_layer" else self.structure
        own = {name: t.to(curvature.device) for name, t in state.items()}
        return PooledPosterior(
            curvature=curvature,
            loc=curvature.weights,
            precision=curvature.vector(own["precision"]),
            diagonal=own["diagonal"],
            structure=form,
            examples=int(own["n_examples"]),
            inverse=kronecker.restore_factors(curvature, parts)
            if form == "kfac"
            else restore(curvature, parts),
            log_likelihood=-own["nll"],
        )


def _triangle(order: int) -> tuple[int]:
    """Return the shape of the different entries of a symmetric matrix."""
    return (order * (order + 1) // 2,)


def _lower(matrix: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix [K, K], row by row, [K (K + 1) / 2]."""
    return matrix[tuple(torch.tril_indices(*matrix.shape, device=matrix.device))]


def _whole(lower: Tensor, order: int) -> Tensor:
    """Return the symmetric matrix with a lower triangle."""
    rows, columns = torch.tril_indices(order, order, device=lower.device)
    out = lower.new_empty(order, order)
    out[rows, columns] = lower
    out[columns, rows] = lower
    return out
