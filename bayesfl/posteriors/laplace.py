"""Laplace's approximation: a Gaussian around trained weights, its precision the curvature of the
data plus that of the prior.

    $q(w_S) = N(loc_S, H_S^-1)$, $H = GGN(x) + diag(precision)$,

    the other weights stay at loc (a Dirac),

where the subscript S restricts to P selected weights of D: all of them (`full`), some
(`subnetwork`), or all with simpler covariances: none (`diagonal`), or a product of two factors for
each layer (`kfac`). $H_S^-1$ is the covariance of $w_S$ *given* the other weights. Predictions use
the linearised network $f(x) + J(x) (w - loc)$.

The last-layer approximation, `last_layer`, is `full` over only the last layer's parameters. A
pattern, such as `head.*`, restricts any structure to these parameters.

Sources: MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation
4(3), 1992; Immer, Korzepa, Bauer, "Improving predictions of Bayesian neural nets via local
linearization", AISTATS 2021; Daxberger et al., "Bayesian deep learning via subnetwork inference",
ICML 2021; for one layer: Kristiadi, Hein, Hennig, "Being Bayesian, even just a bit, fixes
overconfidence in ReLU networks", ICML 2020; for `kfac` see `bayesfl.curvature.kronecker`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self, cast

import torch
from torch import Tensor, nn

from bayesfl.base import archive
from bayesfl.base.inputs import Inputs, count
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.numerics import in_own_modes, own_modes
from bayesfl.base.options import Natural, Share, declared
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.curvature import Curvature, Inverse, invert, kronecker
from bayesfl.curvature.backends import Name
from bayesfl.curvature.batches import Data, batches, labelled, of_batch, one_batch
from bayesfl.curvature.dual import independent, restore
from bayesfl.curvature.kronecker import Kronecker
from bayesfl.likelihoods import Categorical
from bayesfl.models.remedies import explained
from bayesfl.posteriors.linearised import (
    Link,
    as_labels,
    as_targets,
    predictive,
)
from bayesfl.posteriors.sampling.samples import Drawn
from bayesfl.posteriors.sampling.stored import (
    check_network,
    likelihood_of,
    likelihood_text,
    network_of,
)
from bayesfl.posteriors.selection import Evidence, Rule, check_rule, select, size_of

Structure = Literal["full", "subnetwork", "diagonal", "kfac"]
RULED = ("share", "selection", "indices", "seed")
"""Options of a subnetwork."""


@in_own_modes
@dataclass(frozen=True, eq=False, repr=False)
class Laplace(Drawn):
    """Hold a fitted Laplace approximation; made by `Laplace.fit`.

    With `structure="diagonal"` a weight's standard deviation is that given all other weights, as
    under a `MeanField`: .82 of the correct one for two slopes of correlation .57.

    Args:
        curvature: Curvature of the model at its weights.
        loc: All covered weights, [D] in float64.
        precision: Prior precision of each weight, [D].
        diagonal: Diagonal of the GGN, a sum over the data in nats, [D].
        structure: The covariances between weights that are kept, see `fit`.
        examples: Number N of examples in the fit.
        inverse: $H_S^-1$, the covariance of the P selected weights; its `form` is the selected
            form.
        weight: Weight of each example, [N]; None for 1.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> posterior = bf.posteriors.Laplace.fit(nn.Linear(2, 3), x, y, precision=1.0)
        >>> posterior.predict(x)["probs"].shape
        torch.Size([30, 3])
    """

    curvature: Curvature
    loc: Tensor
    precision: Tensor
    diagonal: Tensor
    structure: Structure
    examples: int
    inverse: Inverse | Kronecker
    weight: Tensor | None = None

    @classmethod
    @declared(
        idle={
            **{("structure", name): RULED for name in ("full", "diagonal")},
            ("structure", "last_layer"): (*RULED, "pattern"),
            ("structure", "kfac"): (*RULED, "weight"),
        }
    )
    def fit(
        cls,
        model: nn.Module,
        x: Data,
        y: Tensor | None = None,
        *,
        precision: float | Tensor,
        structure: Structure | Literal["last_layer"] = "full",
        share: Share = 0.05,
        selection: Annotated[str | Rule, check_rule] = "wasserstein",
        indices: Tensor | None = None,
        seed: Natural = 0,
        likelihood: Likelihood | None = None,
        pattern: Pattern | Layout = "*",
        weight: Tensor | None = None,
        backend: Name = "auto",
        memory: int | None = None,
    ) -> Self:
        """Fit Laplace's approximation around the present weights of `model`, which is not changed.

        Args:
            model: Any trained module.
            x: Training inputs [N, ...], or batches of them that can be read twice; several inputs,
                a tuple or a mapping, as `{"x": inputs}`, see `bayesfl.curvature.batches`.
            y: Labels or targets; they are not used, because the GGN does not depend on them, but
                accepted so that all posteriors have the same call.
            precision: Prior precision, for a likelihood that is a sum over the data: one number, or
                one for each covered weight [D]; for `kfac` the same within each weight matrix and
                each bias. No number suits all networks: if it is too small, predictions are worse
                than those of the weights alone, see
                `bayesfl.posteriors.prior_precision.by_validation`, which selects it.
            structure: `full`: all weights with all covariances, by the smaller of primal and dual
                form, never a D x D matrix if N O < D; `last_layer`: the same for only the layer
                that the network declares last, which must be linear; `subnetwork`: some weights
                with all covariances; `diagonal`: all weights without covariances; `kfac`: a
                Kronecker-factored GGN of whole linear layers and convolutions, and for norms
                (batch, layer, group) the GGN's own block of each weight and each bias.
            share: Share of the weights in the subnetwork.
            selection: Rule that selects these, or its name, see `bayesfl.selection`.
            indices: Indices of the subnetwork's P weights into the flat vector of covered weights,
                [P], instead of a rule.
            seed: Seed of random rules.
            likelihood: Distribution of y given the outputs; categorical by default.
            pattern: The covered parameters, as a pattern over names such as `body.*`; the others
                are constants.
            weight: Weight of each example, [N] numbers >= 0, such as its responsibility in a
                mixture; None for 1. It needs inputs in a fixed order, as one tensor or a list of
                batches; `kfac` does not support it.
            backend: How Jacobians are computed, see `bayesfl.curvature.Curvature`.
            memory: Maximum number of bytes of one matrix; by default all free memory.

        Raises:
            TypeError: The likelihood's curvature is not known.
            ValueError: `precision` lies outside 1e-30 to 1e30, `indices`, `pattern` or `weight` do
                not fit the structure or the data, the curvature is not finite, or the likelihood
                needs another number of outputs; for `kfac`, `pattern` covers other layers, or a
                layer in part.
            MemoryError: A factor exceeds `memory`; the message has its size.
            torch.linalg.LinAlgError: A matrix has no Cholesky factor.

        Example:
            >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
            >>> model = nn.Linear(2, 3)
            >>> bf.posteriors.Laplace.fit(model, x, y, precision=1.0, structure="kfac")
            Laplace(kfac, 9 of 9 weights, 30 examples, precision 1)
        """
        if structure == "last_layer":
            structure, pattern = "full", last_layer(model)
        if weight is not None and not isinstance(x, Tensor | Mapping | Sequence):
            raise ValueError(
                f"weight is matched to examples by position, but a {type(x).__name__} may change "
                "their order in every pass; pass the inputs as one tensor, or as a list of batches"
            )
        curvature = Curvature(model, likelihood, pattern=pattern, backend=backend, memory=memory)
        counts: list[int] = []
        with explained(of_batch(x) if one_batch(x) else {}):
            diagonal = curvature.diagonal(_counted(x, counts, curvature.device), weight=weight)
        prior, examples = curvature.vector(precision), sum(counts)
        if structure == "subnetwork" and indices is None:
            evidence = Evidence(curvature.weights, diagonal, 1 / prior, seed)
            indices = select(selection, evidence, size_of(share, len(prior)))
        inverse = _inverse(curvature, x, prior, structure, indices, diagonal, examples, weight)
        return cls(
            curvature, curvature.weights, prior, diagonal, structure, examples, inverse, weight
        )

    @classmethod
    @own_modes()
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        pattern: Pattern | Layout = "*",
        backend: Name = "auto",
    ) -> "Laplace":
        """Load a posterior that `Laplace.save` wrote, for the same model at the weights of the fit,
        on that model's device.

        Its results equal those of the saved posterior up to rounding: rows of the dual form are
        computed again, in other batches.

        Args:
            path: Path of the file.
            model: The model of the fit.
            likelihood: Likelihood of the fit; needed only if its class is not in
                `bayesfl.likelihoods`.
            pattern: The covered parameters, as in `fit`.
            backend: How Jacobians are computed, see `bayesfl.curvature.Curvature`.

        Raises:
            CheckpointError: The file is absent or damaged, or has other content.
            ValueError: The file has another likelihood, or the model has other parameters or other
                weights.
        """
        meta, tensors = archive.read_kind(path, "laplace")
        likelihood = likelihood_of(path, meta["likelihood"], likelihood)
        curvature = Curvature(model, likelihood, pattern=pattern, backend=backend)
        # with the alignment at saving
        tensors = {name: t.to(curvature.device, copy=True) for name, t in tensors.items()}
        structure = cast(Structure, meta["structure"])
        check_network(path, meta["network"], meta["parameters"], curvature.module, curvature.layout)
        if not torch.allclose(curvature.weights, tensors["loc"], rtol=1e-6, atol=1e-8):
            raise ValueError(
                f"{str(path)!r} was fitted to other weights than the model has now; load it for "
                "the model as it was"
            )
        parts = {
            name.removeprefix("inverse."): t
            for name, t in tensors.items()
            if name.startswith("inverse.")
        }
        inverse = (
            kronecker.restore_factors(curvature, parts)
            if structure == "kfac"
            else restore(curvature, parts)
        )
        own = tensors["loc"], tensors["precision"], tensors["diagonal"]
        return cls(curvature, *own, structure, meta["examples"], inverse, tensors.get("weight"))

    def __repr__(self) -> str:
        return (
            f"Laplace({self.structure}, {self.inverse.size} of {self.curvature.layout.size} "
            f"weights, {self.examples} examples, precision {_told(self.precision)})"
        )

    def parts(self) -> tuple[Layout, nn.Module, Likelihood]:
        """Return the layout of the weights, their module and the likelihood."""
        return self.curvature.layout, self.curvature.module, self.curvature.likelihood

    @property
    def indices(self) -> Tensor | None:
        """Return the indices [P] of the subnetwork, or None for all weights."""
        return self.inverse.indices

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight, [D] each; outside a subnetwork the variance is
        0.
        """
        return self.loc, self._everywhere(self.inverse.marginals())

    @property
    def noise_size(self) -> int:
        """Return the number of standard normals for one draw."""
        return self.inverse.noise_size

    def draw(self, noise: Tensor) -> Tensor:
        """Make S draws of all weights, [S, D], from standard normals [S, `noise_size`]."""
        return self.loc + self._everywhere(self.inverse.sample(noise))

    def _everywhere(self, values: Tensor) -> Tensor:
        """Insert values [..., P] of the selected weights among all weights [..., D]; the others get
        0.
        """
        if self.indices is None:
            return values
        return values.new_zeros(*values.shape[:-1], len(self.loc)).index_copy_(
            -1, self.indices, values
        )

    def log_det(self) -> Tensor:
        """Compute the log determinant of the posterior precision H_S, in nats."""
        return self.inverse.log_det()

    def log_marginal_likelihood(
        self, x: Data, y: Tensor | None = None, *, centre: float | Tensor = 0.0
    ) -> Tensor:
        """Compute the log marginal likelihood of the data by Laplace's method, in nats,
        summed over the data.

            $log p(y | x) = log p(y | x, loc) - (a + b) / 2$,

            $a = sum_S precision (loc - centre)^2$, $b = log |H_S| - sum_S log precision$.

        Args:
            x: The inputs of the fit, [N, ...], or batches of (x, y).
            y: Labels or targets of `x` [N, ...]; None if they are in the batches.
            centre: Mean of the prior, one number or one for each weight [D]. If it equals loc, the
                evidence has no maximum in the precision.

        Raises:
            ValueError: `x`, `y` or `centre` does not fit the posterior.
        """
        losses = torch.cat(
            [self._losses(inputs, own) for inputs, own in labelled(x, y, self.loc)]
            or [self.loc[:0]]
        )
        _check_count(self.examples, len(losses))
        nll = losses.sum() if self.weight is None else losses @ self.weight.to(losses)
        return self.evidence(-nll, centre)

    def evidence(self, log_likelihood: Tensor, centre: float | Tensor) -> Tensor:
        """Compute the log marginal likelihood from the data's log likelihood at the weights, see
        `log_marginal_likelihood`.
        """
        chosen = slice(None) if self.indices is None else self.indices
        away = (self.loc - self.curvature.vector(centre))[chosen]
        precision = self.precision[chosen]
        return (
            log_likelihood
            - 0.5 * (precision * away.square()).sum()
            - 0.5 * (self.log_det() - precision.log().sum())
        )

    def _losses(self, x: Inputs, y: Tensor) -> Tensor:
        """Compute the negative log likelihoods [B] of one batch at the weights, in nats."""
        outputs = self.curvature.outputs({"x": x})
        if self.curvature.likelihood.task == "regression":
            y = as_targets(y, outputs)
        else:
            y = as_labels(y, len(outputs), max(2, outputs.shape[1]))
        return self.curvature.likelihood.nll(outputs, y)

    def linearised(self, x: Data, *, centre: bool = True) -> tuple[Tensor, Tensor]:
        """Compute the outputs of the linearised network: mean [N, O] and covariance [N, O, O],
        without noise of the data.

        Args:
            x: Inputs [N, ...], or batches of them, in the form in which `fit` takes them.
            centre: Whether to remove, for classes, the part of the logits that all classes have in
                common. It changes no probability, but $softmax(kappa f)$ would depend on it.
                Daxberger et al. and laplace-torch keep it.
        """
        centre = centre and isinstance(self.curvature.likelihood, Categorical)
        return self.inverse.predict(x, centre=centre)

    def predict(
        self, x: Data, *, link: Link = "contrasts", centre: bool = True, noise: Tensor | None = None
    ) -> Tensors:
        """Compute the predictive distribution at `x`; for its entries see
        `bayesfl.posteriors.linearised.predictive`.

        Args:
            x: Inputs [N, ...], or batches of them, in the form in which `fit` takes them.
            link: The closed form for classes, `contrasts` or the papers' `per_class`.
            centre: Whether logits are centred over classes, see `linearised`; among the links only
                `per_class` depends on it.
            noise: Standard normals [S, N, O] for S draws of the outputs; None for the closed form.
        """
        likelihood, inverse = self.curvature.likelihood, self.inverse
        spread = inverse.spread if isinstance(inverse, Kronecker) else inverse.predict
        centre = centre and isinstance(likelihood, Categorical)
        return predictive(likelihood, *spread(x, centre=centre), noise, link=link)

    def with_precision(self, x: Data | None, precision: float | Tensor) -> Self:
        """Return the approximation under another prior precision, for the same `x`; the GGN's
        diagonal and Kronecker factors are reused.

        Args:
            x: The inputs of the fit; None for the structures `diagonal` and `kfac`, which do not
                need them.
            precision: The new precision, as in `fit`.

        Raises:
            ValueError: See `fit`; or `x` has another number of examples than in the fit.
            MemoryError: See `fit`.
            torch.linalg.LinAlgError: See `fit`.
        """
        if x is not None and one_batch(x):
            _check_count(self.examples, count(of_batch(x)))
        prior = self.curvature.vector(precision)
        if isinstance(self.inverse, Kronecker):
            inverse = self.inverse.with_precision(prior)
        else:
            inverse = _inverse(
                self.curvature,
                x,
                prior,
                self.structure,
                self.indices,
                self.diagonal,
                self.examples,
                self.weight,
            )
        return replace(self, precision=prior, inverse=inverse)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior into one file, completely or not at all; `Laplace.load` reads it on
        any device.

        With a dual form the file includes the inputs of the fit, which predictions need: such a
        file contains training data.
        """
        own = {"loc": self.loc, "precision": self.precision, "diagonal": self.diagonal}
        own |= {} if self.weight is None else {"weight": self.weight}
        tensors = own | {f"inverse.{name}": t for name, t in self.inverse.tensors().items()}
        meta = {
            "structure": self.structure,
            "parameters": list(self.curvature.layout.names),
            "examples": self.examples,
            "likelihood": likelihood_text(self.curvature.likelihood),
            "network": network_of(self.curvature.module, self.curvature.layout.names),
        }
        archive.write(path, "laplace", meta, tensors)


def _counted(x: Data, counts: list[int], device: torch.device) -> Iterator[Data]:
    """Yield only the inputs of each batch, and append their number to `counts`."""
    for inputs in batches(x, torch.empty(0, device=device)):
        counts.append(count(inputs))
        yield {"x": inputs}


@dataclass(frozen=True)
class _Same:
    """Iterate over the batches of `x`; raise ValueError at the end if their number of examples has
    changed.
    """

    x: Data
    examples: int
    device: torch.device

    def __iter__(self) -> Iterator[Data]:
        counts: list[int] = []
        yield from _counted(self.x, counts, self.device)
        if counts:
            _check_count(self.examples, sum(counts))


def _check_count(examples: int, found: int) -> None:
    if found != examples:
        raise ValueError(
            f"x must be the {examples} examples of the fit, got {found}; fit other data with "
            "Laplace.fit"
        )


def _inverse(
    curvature: Curvature,
    x: Data | None,
    prior: Tensor,
    structure: Structure,
    indices: Tensor | None,
    diagonal: Tensor,
    examples: int,
    weight: Tensor | None,
) -> Inverse | Kronecker:
    """Return the covariance of the selected weights for a structure, from the GGN's diagonal and
    from `x`, which must have this number of examples.

    Raises:
        TypeError: `x` is None, and the structure needs it.
        ValueError: `x` has another number of examples.
    """
    if structure == "diagonal":
        return independent(curvature, prior, diagonal)
    if x is None:
        raise TypeError(f"structure {structure!r} needs the inputs x of the fit")
    same = _Same(x, examples, curvature.device)
    if structure == "kfac":
        return kronecker.invert_factors(curvature, same, prior)
    return invert(curvature, same, prior, indices=indices, diagonal=diagonal, weight=weight)


def last_layer(model: nn.Module) -> str:
    """Return a pattern for the parameters of the layer that a network declares last.

    Raises:
        ValueError: That layer is not linear.
    """
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    name, layer = layers[-1] if layers else ("", model)
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"the layer that the network declares last, {name!r}, is a {type(layer).__name__} and "
            "not linear; name the last one, as structure='full', pattern='head.*'"
        )
    return f"{name}.*" if name else "*"


def _told(precision: Tensor) -> str:
    """Return a prior's precisions as text: one number, or a range."""
    least, most = float(precision.min()), float(precision.max())
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
