"""Laplace's approximation: a Gaussian around trained weights, its precision the curvature of the data plus that of the prior.

    q(w_S) = N(loc_S, H_S^-1),    H = GGN(x) + diag(precision),    the weights outside S stay at loc (a Dirac),

where S is all weights (`full`), some (`subnetwork`), or all while part of what ties them is left out: every weight on its own
(`diagonal`), or a product of two factors for each layer (`kfac`). H_S^-1 is the covariance of w_S *given* the other weights. Predictions
go through the linearised network f(x) + J(x) (w - loc).

The last-layer approximation is any of these over the last layer's parameters alone: `Laplace.fit(model, x, pattern="head.*")`.

Sources: MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation 4(3), 1992; Immer, Korzepa, Bauer,
"Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021; Daxberger et al., "Bayesian deep learning via
subnetwork inference", ICML 2021; for one layer: Kristiadi, Hein, Hennig, "Being Bayesian, even just a bit, fixes overconfidence in ReLU
networks", ICML 2020; for `kfac` see `bayesfl.curvature.kronecker`.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from bayesfl.base.files import atomic_path
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.curvature import Curvature, Inverse, invert, kronecker, restore
from bayesfl.curvature.backends import Name
from bayesfl.curvature.batches import Inputs, batches
from bayesfl.curvature.dual import independent
from bayesfl.curvature.kronecker import Kronecker
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from bayesfl.posteriors.linearised import as_labels, as_targets, predictive

Structure = Literal["full", "subnetwork", "diagonal", "kfac"]


@dataclass(frozen=True, eq=False)
class Laplace:
    """A fitted Laplace approximation; made by `Laplace.fit`.

    Args:
        curvature: Of the model at its weights.
        loc: These weights, all that are covered, [D] in float64.
        precision: Prior precision of each, [D].
        diagonal: Of the GGN, [D].
        structure: What ties the weights.
        examples: How many it was fitted to.
        inverse: H_S^-1; says which form was chosen and why.
    """

    curvature: Curvature
    loc: Tensor
    precision: Tensor
    diagonal: Tensor
    structure: Structure
    examples: int
    inverse: Inverse | Kronecker

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        x: Inputs,
        *,
        precision: float | Tensor = 1.0,
        structure: Structure = "full",
        indices: Tensor | None = None,
        likelihood: Likelihood | None = None,
        pattern: str = "*",
        backend: Name = "auto",
        memory: int | None = None,
    ) -> "Laplace":
        """Laplace's approximation around the present weights of `model`, which is not changed.

        Args:
            model: Any module, trained.
            x: Its training inputs [N, ...], or batches of them that can be read twice.
            precision: Of the prior, in the units of a sum over the data: one number, or one for each covered weight [D], under `kfac` the
                same within each weight matrix and each bias.
            structure: `full`: all weights and what ties them, by whichever of primal and dual form is smaller, never a D x D matrix where
                N O < D; `subnetwork`: those of `indices`; `diagonal`; `kfac`: a Kronecker-factored GGN, of whole linear layers and
                convolutions, which laplace-torch computes.
            indices: Of the subnetwork, into the flat vector of covered weights, [S]; see `bayesfl.selection`.
            likelihood: What the outputs mean; categorical by default.
            pattern: Which parameters are covered, a pattern over names such as `body.*`; the others are constants. `head.*`, the last
                layer's, gives the last-layer approximation.
            backend: See `bayesfl.curvature.Curvature`.
            memory: Bytes that one matrix may take; by default what is free.

        Raises:
            TypeError: The model is no module, `x` neither inputs nor batches, or the likelihood's curvature is not known.
            ValueError: A precision that is not in 1e-30 to 1e30, indices that don't fit the structure, curvature that is not finite, a
                likelihood that takes another number of outputs, memory that is no number of bytes; under `kfac` other layers, or a layer
                in part.
            MemoryError: A factor is larger than memory allows; the message says the bytes.
            torch.linalg.LinAlgError: A covariance without Cholesky factor.
        """
        _check_structure(structure, indices)
        curvature = Curvature(model, likelihood, pattern=pattern, backend=backend, memory=memory)
        counts: list[int] = []
        diagonal = curvature.diagonal(_counted(x, counts, curvature.device))
        return cls._of(curvature, x, _weights(model, curvature), precision, structure, indices, diagonal, sum(counts))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        pattern: str = "*",
        backend: Name = "auto",
    ) -> "Laplace":
        """A posterior that `Laplace.save` wrote, for the model at the weights it was fitted at, on that model's device.

        What it gives is what the saved one gave, to rounding: rows of the dual form are computed anew, in other batches.

        Args:
            path: Of the file.
            model: The model that it was fitted to.
            likelihood: By default the one that it was fitted with; only one of another class than those here has to be given.
            pattern: Which parameters it covers.
            backend: See `bayesfl.curvature.Curvature`.

        Raises:
            ValueError: The file is no such posterior, or of another likelihood; the model has other parameters, or other weights.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is no file that Laplace.save wrote, or is damaged: {error}") from error
        if (
            not {"parameters", "structure", "likelihood", "examples"} <= meta.keys()
            or not {"loc", "precision", "diagonal"} <= tensors.keys()
        ):
            raise ValueError(f"{str(path)!r} is no posterior that Laplace.save wrote")
        likelihood = _likelihood(path, meta["likelihood"], likelihood)
        curvature = Curvature(model, likelihood, pattern=pattern, backend=backend)
        tensors = {name: t.to(curvature.device) for name, t in tensors.items()}
        names, structure = meta["parameters"].split("\n"), cast(Structure, meta["structure"])
        if names != list(curvature.layout.names):
            raise ValueError(f"{str(path)!r} covers the parameters {names}, the model has {list(curvature.layout.names)} under {pattern!r}")
        loc = _weights(model, curvature)
        if loc.shape != tensors["loc"].shape or not torch.allclose(loc, tensors["loc"], rtol=1e-6, atol=1e-8):
            raise ValueError(f"{str(path)!r} was fitted at other weights; load those into the model first")
        parts = {name.removeprefix("inverse."): t for name, t in tensors.items() if name.startswith("inverse.")}
        inverse = kronecker.restore(curvature, parts) if structure == "kfac" else restore(curvature, parts)
        return cls(curvature, tensors["loc"], tensors["precision"], tensors["diagonal"], structure, int(meta["examples"]), inverse)

    @classmethod
    def _of(
        cls,
        curvature: Curvature,
        x: Inputs,
        loc: Tensor,
        precision: float | Tensor,
        structure: Structure,
        indices: Tensor | None,
        diagonal: Tensor,
        examples: int,
    ) -> "Laplace":
        prior = curvature.vector(precision)
        if structure == "diagonal":
            inverse = independent(curvature, prior, diagonal)
        elif structure == "kfac":
            inverse = kronecker.invert(curvature, x, prior, diagonal=diagonal)
        else:
            inverse = invert(curvature, x, prior, indices=indices, diagonal=diagonal)
        return cls(curvature, loc, prior, diagonal, structure, examples, inverse)

    @property
    def indices(self) -> Tensor | None:
        """The subnetwork S, or None for all weights."""
        return self.inverse.indices

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each weight, [D] each; outside a subnetwork the variance is 0."""
        return self.loc, self._everywhere(self.inverse.marginals())

    @property
    def noise_size(self) -> int:
        """Standard normals that one draw takes."""
        return self.inverse.noise_size

    def sample(self, noise: Tensor) -> Tensor:
        """Draws of all weights [K, D] from standard normals [K, `noise_size`].

        Raises:
            ValueError: The noise is no tensor of that shape.
        """
        if not isinstance(noise, Tensor) or noise.dim() != 2 or noise.shape[1] != self.noise_size:
            got = list(noise.shape) if isinstance(noise, Tensor) else repr(noise)
            raise ValueError(f"noise must be [K, {self.noise_size}], `noise_size` standard normals for each draw, got {got}")
        return self.loc + self._everywhere(self.inverse.sample(noise))

    def _everywhere(self, values: Tensor) -> Tensor:
        """Values of the weights S [..., S] among all [..., D]; 0 for the others."""
        if self.indices is None:
            return values
        return values.new_zeros(*values.shape[:-1], len(self.loc)).index_copy_(-1, self.indices, values)

    def log_det(self) -> Tensor:
        """Log determinant of the posterior precision H_S, in nats."""
        return self.inverse.log_det()

    def entropy(self) -> Tensor:
        """Differential entropy of the weights S, in nats; the others have none."""
        return 0.5 * (self.inverse.size * (1 + math.log(2 * math.pi)) - self.log_det())

    def log_marginal_likelihood(self, x: Tensor, y: Tensor, *, centre: float | Tensor = 0.0) -> Tensor:
        """Log evidence of the data by Laplace's method, in nats, a sum over the data.

            log p(y | x) = log p(y | x, loc) - 1/2 sum_S precision (loc - centre)^2 - 1/2 (log |H_S| - sum_S log precision).

        Args:
            x: The inputs it was fitted on, [N, ...].
            y: Their labels or targets.
            centre: Of the prior, one number or one for each weight [D]. Around loc itself the evidence has no maximum in the precision.

        Raises:
            ValueError: Inputs, labels, targets or a centre that don't fit.
        """
        self._check_fitted_to(x)
        chosen = slice(None) if self.indices is None else self.indices
        away = (self.loc - self.curvature.vector(centre, "centre"))[chosen]
        precision = self.precision[chosen]
        outputs = self.curvature.outputs(x)
        regression = isinstance(self.curvature.likelihood, Gaussian)
        y = as_targets(y, outputs) if regression else as_labels(y, len(outputs), max(2, outputs.shape[1])).to(outputs.device)
        nll = self.curvature.likelihood.nll(outputs, y).sum()
        return -nll - 0.5 * (precision * away.square()).sum() - 0.5 * (self.log_det() - precision.log().sum())

    def linearised(self, x: Inputs, *, centre: bool = True) -> tuple[Tensor, Tensor]:
        """The outputs of the linearised network: mean [N, O] and covariance [N, O, O], without noise of the data.

        Args:
            x: Inputs, or batches of them.
            centre: For classes, leave out what is the same for all of them, a constant added to the logits: it means nothing, and
                softmax(kappa f) would still read it. Daxberger et al. and laplace-torch keep it.
        """
        centre = centre and isinstance(self.curvature.likelihood, Categorical)
        return self.inverse.predict(x, centre=centre)

    def predict(self, x: Inputs, *, centre: bool = True, noise: Tensor | None = None) -> Tensors:
        """Predictive distribution at `x`; what is in it says `bayesfl.posteriors.linearised.predictive`.

        Args:
            x: Inputs, or batches of them.
            centre: See `linearised`.
            noise: Standard normals [S, N, O] for draws of the outputs; without them the closed form.

        Raises:
            ValueError: The noise has another shape, or there are no draws.
        """
        return predictive(self.curvature.likelihood, *self.linearised(x, centre=centre), noise)

    def with_precision(self, x: Inputs, precision: float | Tensor) -> "Laplace":
        """The same under another prior precision, fitted to the same `x`; the GGN's diagonal and its Kronecker factors are kept.

        Raises:
            ValueError: As in `fit`, or `x` is a tensor of other than the `examples` that it was fitted to.
            MemoryError: As in `fit`.
            torch.linalg.LinAlgError: As in `fit`.
        """
        self._check_fitted_to(x)
        if isinstance(self.inverse, Kronecker):
            prior = self.curvature.vector(precision)
            return replace(self, precision=prior, inverse=self.inverse.with_precision(prior, self.diagonal))
        return self._of(self.curvature, x, self.loc, precision, self.structure, self.indices, self.diagonal, self.examples)

    def with_structure(self, x: Inputs, structure: Structure, *, indices: Tensor | None = None) -> "Laplace":
        """The same weights and precision under another structure, fitted to the same `x`; the diagonal of the GGN is not computed anew.

        So a subnetwork is chosen from a diagonal fit, see `bayesfl.selection`, and then fitted.

        Args:
            x: What it was fitted to.
            structure: See `fit`.
            indices: See `fit`.

        Raises:
            ValueError: As in `fit`.
            MemoryError: As in `fit`.
            torch.linalg.LinAlgError: As in `fit`.
        """
        _check_structure(structure, indices)
        return self._of(self.curvature, x, self.loc, self.precision, structure, indices, self.diagonal, self.examples)

    def _check_fitted_to(self, x: Inputs) -> None:
        if isinstance(x, Tensor) and len(x) != self.examples:
            raise ValueError(
                f"x must be the {self.examples} examples that it was fitted to, got {len(x)}; fit other data anew by Laplace.fit"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior, whole or not at all, as one safetensors file; `Laplace.load` reads it on any device.

        A dual form keeps the inputs it was fitted to, which its predictions need: such a file contains training data.
        """
        from safetensors.torch import save_file

        own = {"loc": self.loc, "precision": self.precision, "diagonal": self.diagonal}
        tensors = own | {f"inverse.{name}": t for name, t in self.inverse.tensors().items()}
        meta = {"structure": self.structure, "parameters": "\n".join(self.curvature.layout.names), "examples": str(self.examples)}
        meta["likelihood"] = _described(self.curvature.likelihood)
        with atomic_path(path) as temporary:
            save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, temporary, meta)


def _described(likelihood: Likelihood) -> str:
    """Its class and options as JSON."""
    options = asdict(likelihood) if is_dataclass(likelihood) and not isinstance(likelihood, type) else {}
    return json.dumps({"class": type(likelihood).__name__, **options}, default=float)


def _likelihood(path: str | os.PathLike[str], stored: str, given: Likelihood | None) -> Likelihood:
    """The likelihood that a file describes.

    Raises:
        ValueError: Another one is given, or none and it is of a class that is not known here.
    """
    if given is not None:
        if _described(given) != stored:
            raise ValueError(f"{str(path)!r} was fitted with the likelihood {stored}, got {_described(given)}; leave out likelihood=")
        return given
    options = json.loads(stored)
    name = options.pop("class")
    known = {kind.__name__: kind for kind in (Categorical, Bernoulli, Gaussian)}
    if name not in known:
        raise ValueError(f"{str(path)!r} was fitted with a likelihood of class {name}: pass it as likelihood=")
    return known[name](**options)


def _counted(x: Inputs, counts: list[int], device: torch.device) -> Iterator[Tensor]:
    """The inputs of each batch, while their numbers are noted."""
    for batch in batches(x, torch.empty(0, device=device)):
        counts.append(len(batch))
        yield batch


def _check_structure(structure: Structure, indices: Tensor | None) -> None:
    if structure not in ("full", "subnetwork", "diagonal", "kfac"):
        raise ValueError(f"structure must be 'full', 'subnetwork', 'diagonal' or 'kfac', got {structure!r}")
    if (indices is None) == (structure == "subnetwork"):
        needs = "needs" if indices is None else "has no"
        raise ValueError(f"indices say which weights a subnetwork has: structure {structure!r} {needs} indices")


def _weights(model: nn.Module, curvature: Curvature) -> Tensor:
    return curvature.layout.ravel(dict(model.named_parameters())).detach().double()
