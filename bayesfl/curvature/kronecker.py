"""The inverse of a Kronecker-factored GGN plus the prior's precision (KFAC); the factors come from
laplace-torch.

For a linear layer with inputs x_n [I] and cotangents g_nq [H] pulled back to its outputs through
the root of the likelihood's curvature,

    GGN of the weights [H I, H I]  =  sum_nq (g_nq g_nq') (x) (x_n x_n')  ~  B (x) A,
    B = sum_nq g_nq g_nq',  A = mean_n x_n x_n',

exact for one example; terms between layers, and between weights and biases, are left out. The bias
is one more input that is always 1. For a layer used at T places (a convolution) B is summed and A
averaged over the places. With eigenvectors B = U b U', A = V a V' the layer's precision is diagonal
in the basis U (x) V, where the prior's precision is one number, with b_h a_i + precision.

Sources: Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate
curvature", ICML 2015; Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for
convolution layers", ICML 2016; as posterior: Ritter, Botev, Barber, "A scalable Laplace
approximation for neural networks", ICLR 2018; in this form: Daxberger et al., "Laplace Redux",
NeurIPS 2021 (laplace-torch).
"""

import copy
import importlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import structure
from bayesfl.base.protocols import Tensors
from bayesfl.base.torchvision import torchvision
from bayesfl.curvature.batches import Data, require
from bayesfl.curvature.dual import NO_CURVATURE, check_prior_precision
from bayesfl.curvature.factors import BLOCK, Outer
from bayesfl.curvature.ggn import Curvature
from bayesfl.curvature.jacobians import FactorRows, Rows
from bayesfl.likelihoods import Bernoulli, Gaussian

_OTHERS = "structure 'full', 'subnetwork' or 'diagonal' takes any"


@dataclass(frozen=True, eq=False)
class Basis:
    """The basis in which one layer's curvature is diagonal.

    Args:
        slots: Positions [H, I] of the layer's weights in the flat vector, the bias as the last
            input.
        left: Eigenvectors U of B, [H, H].
        right: Eigenvectors V of A, [I, I]; the bias's input is an eigenvector on its own.
    """

    slots: Tensor
    left: Tensor
    right: Tensor

    def into(self, values: Tensor) -> Tensor:
        """Transform values [..., H, I] of the weights into this basis."""
        return self.left.T @ values @ self.right

    def back(self, values: Tensor) -> Tensor:
        """Transform values [..., H, I] back from this basis."""
        return self.left @ values @ self.right.T


@dataclass(frozen=True, eq=False)
class Kronecker:
    """The inverse H^-1 for all covered weights where H is a Kronecker-factored GGN plus
    diag(precision), made by `invert_factors`.

    Args:
        curvature: Curvature of the model at its weights.
        bases: One basis for each layer.
        eigenvalues: Eigenvalues of the GGN in these bases, b_h a_i at the slot of weight (h, i),
            [D].
        precision: Prior precision, one number within each weight and each bias, [D].
        uncurved: Number of weights without curvature, by the diagonal of the GGN itself.
    """

    curvature: Curvature
    bases: tuple[Basis, ...]
    eigenvalues: Tensor
    precision: Tensor
    uncurved: int

    form = "kronecker"
    indices = None

    def __repr__(self) -> str:
        return f"Kronecker(order {self.order}, {self.size} weights, {self.backend}: {self.reason})"

    @property
    def backend(self) -> str:
        """Return the name of the backend that is used for predictions."""
        return self.curvature.backend

    @property
    def reason(self) -> str:
        """Return why this form is used, as text."""
        return f"{len(self.bases)} layers, each a product of two factors"

    @property
    def order(self) -> int:
        """Return the order of the largest factor."""
        return max(len(factor) for basis in self.bases for factor in (basis.left, basis.right))

    @property
    def size(self) -> int:
        """Return the number of weights, D."""
        return len(self.precision)

    @property
    def uncurved_share(self) -> float:
        """Return the share of the weights that have no curvature."""
        return self.uncurved / self.size

    @property
    def _variance(self) -> Tensor:
        """Compute the variances in the bases, [D]."""
        return 1 / (self.eigenvalues + self.precision)

    def with_precision(self, precision: Tensor, diagonal: Tensor) -> "Kronecker":
        """Return the inverse with the same factors under another prior precision [D].

        `diagonal` [D] of the GGN determines which weights have curvature.

        Raises:
            ValueError: An entry of `precision` is not positive and finite, or entries differ within
                a weight or bias.
        """
        _check_prior(self.curvature, precision)
        return replace(self, precision=precision, uncurved=_uncurved(diagonal, precision))

    def log_det(self) -> Tensor:
        """Compute the log determinant of the posterior precision H, in nats."""
        return -self._variance.log().sum()

    def marginals(self) -> Tensor:
        """Compute the diagonal of H^-1: posterior variances, [D]."""
        variance = self._variance
        out = torch.empty_like(variance)
        for basis in self.bases:
            out[basis.slots] = basis.left.square() @ variance[basis.slots] @ basis.right.square().T
        return out

    @property
    def noise_size(self) -> int:
        """Return how many standard normals one draw takes."""
        return self.size

    def sample(self, noise: Tensor) -> Tensor:
        """Make S draws from N(0, H^-1), [S, D], by standard normals [S, `noise_size`].

        The symmetric root is used, so that draws do not depend on the choice of eigenvectors.
        """
        scale = self._variance.sqrt()
        noise = noise.to(scale)
        out = torch.empty_like(noise)
        for basis in self.bases:
            out[:, basis.slots] = basis.back(basis.into(noise[:, basis.slots]) * scale[basis.slots])
        return out

    def predict(self, x: Data, *, centre: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the linearised model's outputs at `x`: mean [N, O] and covariance J H^-1 J' [N,
        O, O]; see `Inverse.predict`.
        """
        return self.curvature.spread(
            x, self._between, centre=centre, extra=0 if self.backend == "layers" else self.size
        )

    def _between(self, rows: Rows) -> Tensor:
        """Compute J H^-1 J' for rows J over all weights, example by example, [N, Q, Q]."""
        if not isinstance(rows, FactorRows):  # pulled back once for all layers
            rows = rows.restrict(torch.arange(self.size, device=self.precision.device))
        assert isinstance(rows, FactorRows)
        out = self.precision.new_zeros(rows.examples, rows.cotangents, rows.cotangents)
        every = self._variance
        for basis in self.bases:
            variance, part = every[basis.slots], rows.restrict(basis.slots.flatten())
            factor = part.factors[0]
            if isinstance(factor, Outer):
                # An outer product stays one in the new basis: each of its two vectors is
                # transformed.
                turned = Outer(
                    factor.inputs.double() @ basis.right,
                    factor.slopes.double() @ basis.left,
                    factor.slots,
                )
                out += turned.within(variance.flatten())
                continue
            # Four arrays of this size at a time.
            step = max(1, BLOCK // (4 * 8 * rows.cotangents * variance.numel()))
            for some in torch.arange(rows.examples, device=out.device).split(step):
                half = (
                    basis.into(part.take(some).dense().unflatten(-1, variance.shape))
                    .mul_(variance.sqrt())
                    .flatten(2)
                )
                out[some] += half @ half.mT
        return out

    def tensors(self) -> Tensors:
        """Return all tensors that `restore_factors` needs in addition to the model, to be saved
        or moved.
        """
        out = {
            "eigenvalues": self.eigenvalues,
            "precision": self.precision,
            "uncurved": torch.tensor(self.uncurved),
        }
        for number, basis in enumerate(self.bases):
            out |= {f"left.{number}": basis.left, f"right.{number}": basis.right}
        return out


def restore_factors(curvature: Curvature, tensors: Tensors) -> Kronecker:
    """Return the `Kronecker` with these `tensors`, for the same model at the same weights."""
    tensors = {name: t.to(curvature.device) for name, t in tensors.items()}
    bases = [
        Basis(places, tensors[f"left.{number}"], tensors[f"right.{number}"])
        for number, places in enumerate(_layers(curvature).values())
    ]
    return Kronecker(
        curvature,
        tuple(bases),
        tensors["eigenvalues"],
        tensors["precision"],
        int(tensors["uncurved"]),
    )


def invert_factors(
    curvature: Curvature, x: Data, precision: Tensor, *, diagonal: Tensor
) -> Kronecker:
    """Compute the inverse of the Kronecker-factored GGN, a sum over the data, plus diag(precision).

    Args:
        curvature: Curvature of the model, which must cover whole linear layers and convolutions.
        x: Inputs [N, ...], or batches of them that can be read twice.
        precision: Prior precision [D], one number within each weight and each bias.
        diagonal: Diagonal of the GGN, [D].

    Raises:
        ValueError: A covered parameter belongs to another kind of layer; a layer is covered in part
            or not used exactly once; `precision` is not positive and finite, or not constant within
            a weight or bias; the inputs are no single tensor; or there are no data.
        MemoryError: The factors need more bytes than may be used; the message says how many.
    """
    _check_prior(curvature, precision)
    layers = _layers(curvature)
    require(
        3 * 8 * sum(order**2 for slots in layers.values() for order in slots.shape),
        curvature.memory,
        "the Kronecker factors",
        "cover fewer layers by pattern=",
    )
    bases = []
    eigenvalues = torch.zeros(curvature.size, dtype=torch.float64, device=curvature.device)
    for slots, (outer, inner) in zip(
        layers.values(), _factors(curvature, list(layers), x), strict=True
    ):
        b, left = torch.linalg.eigh(outer)
        a, right = torch.linalg.eigh(inner)
        if slots.shape[1] > len(a):
            a, right = torch.cat([a, a.new_ones(1)]), torch.block_diag(right, right.new_ones(1, 1))
        bases.append(Basis(slots, left, right))
        eigenvalues[slots] = torch.outer(b.clamp_min(0), a.clamp_min(0))
    return Kronecker(
        curvature, tuple(bases), eigenvalues, precision, _uncurved(diagonal, precision)
    )


def _uncurved(diagonal: Tensor, precision: Tensor) -> int:
    return int((diagonal < NO_CURVATURE * precision).sum())


def _check_prior(curvature: Curvature, precision: Tensor) -> None:
    """Check that the prior's precision is one number > 0 within each weight and each bias, so that
    it is the same in every basis.
    """
    check_prior_precision(precision)
    for name, part in curvature.layout.leaves(precision).items():
        if (part != part.flatten()[0]).any():
            raise ValueError(
                "structure 'kfac' takes one prior precision for each weight and each bias, and "
                f"{name!r} has several: pass one number, or a vector that is constant within each; "
                f"{_OTHERS}"
            )


def _layers(curvature: Curvature) -> dict[str, Tensor]:
    """Return the slots [H, I] of weight and bias of each covered layer, by name."""
    covered, found, unknown = curvature.layout.shapes, {}, []
    places = curvature.layout.leaves(torch.arange(curvature.size, device=curvature.device))
    for name, layer in curvature.module.named_modules():
        own = [f"{name}.{key}".lstrip(".") for key, _ in layer.named_parameters(recurse=False)]
        inside = [key for key in own if key in covered]
        if inside and (
            type(layer) not in (nn.Linear, nn.Conv2d)
            or getattr(layer, "padding_mode", "zeros") != "zeros"
        ):
            unknown.append(f"{type(layer).__name__} {name!r}")
        elif inside and len(inside) < len(own):
            unknown.append(f"{inside} of {own} alone")
        elif inside:
            found[name] = torch.cat([places[key].reshape(len(places[key]), -1) for key in own], 1)
    if unknown:
        raise ValueError(
            "structure 'kfac' knows whole linear layers and convolutions padded with zeros, not "
            f"{', '.join(unknown)}: cover others by pattern=, such as 'head.*', or {_OTHERS}"
        )
    return found


def _factors(curvature: Curvature, names: list[str], x: Data) -> list[tuple[Tensor, Tensor]]:
    """Compute B [H, H], a sum over the data, and A [I, I], a mean over them, of each layer, by
    laplace-torch.
    """
    likelihood, module = curvature.likelihood, copy.deepcopy(curvature.module)
    for name, p in module.named_parameters():
        p.requires_grad_(name in curvature.layout.shapes)
    regression = isinstance(likelihood, Gaussian)
    # laplace-torch knows squared error and softmax only; one logit is turned into two classes, the
    # first with a logit of 0.
    whole = (
        nn.Sequential(module, nn.ConstantPad1d((1, 0), 0.0))
        if isinstance(likelihood, Bernoulli)
        else module
    )
    torchvision()  # laplace-torch imports torchvision, which may need help to load
    backend = importlib.import_module("laplace.curvature").CurvlinopsGGN(
        whole, "regression" if regression else "classification"
    )
    scale = 1 / likelihood.known**2 if isinstance(likelihood, Gaussian) else 1.0
    layers = [module.get_submodule(name) for name in names]
    outer, inner, count = [0.0] * len(names), [0.0] * len(names), 0
    for batch in curvature.batches(x):
        if not isinstance(batch, Tensor):
            raise ValueError(
                f"structure 'kfac' takes inputs of one tensor, got {structure(batch)}; {_OTHERS}"
            )
        step, outputs = _pieces(module, names, batch[:1])
        for some in batch.split(step):
            # laplace-torch needs labels, but the curvature does not depend on them.
            labels = (
                outputs.expand(len(some), -1)
                if regression
                else torch.zeros(len(some), dtype=torch.long, device=some.device)
            )
            with torch.enable_grad():
                # N=1: sums over the inputs too.
                found = iter(backend.kron(some, labels, N=1)[1].kfacs)
            for k, layer in enumerate(layers):
                pair = next(found)
                outer[k] += pair[0].double()
                # For a layer with a single weight, laplace-torch gives the product of both factors.
                inner[k] += (
                    pair[1].double()
                    if len(pair) == 2
                    else pair[0].new_full((1, 1), len(some), dtype=torch.float64)
                )
                if layer.bias is not None:
                    next(found)  # the bias's factor, which is B again
            count += len(some)
    # laplace-torch splits the loss's factor between A and B; here B has all of it, as the bias
    # needs.
    root = backend.factor**0.5
    return [(scale * root * b, a / (root * count)) for b, a in zip(outer, inner, strict=True)]


def _pieces(module: nn.Module, names: list[str], x: Tensor) -> tuple[int, Tensor]:
    """Return how many examples fit a block, and the outputs [1, O] of one example, `x` [1, ...].

    Raises:
        ValueError: A covered layer is not used exactly once in a pass.
    """
    owner = {id(p): name for name in names for p in module.get_submodule(name).parameters()}
    uses, numbers = Counter(), []

    def note(layer: nn.Module, _: Any, out: Tensor) -> None:
        uses.update({owner[id(p)] for p in layer.parameters() if id(p) in owner})
        weight = layer.get_parameter("weight")
        numbers.append(out.numel() // len(weight) * (len(weight) + weight[0].numel()))

    hooks = [
        m.register_forward_hook(note)
        for m in module.modules()
        if any(id(p) in owner for p in m.parameters(recurse=False))
    ]
    with torch.no_grad():
        outputs = module(x)
    for hook in hooks:
        hook.remove()
    for name in names:
        if uses[name] != 1:
            raise ValueError(
                f"structure 'kfac' needs layers used once in a pass, {name!r} is used {uses[name]} "
                f"times; {_OTHERS}"
            )
    return max(1, BLOCK // (8 * (sum(numbers) + outputs.numel() ** 2))), outputs
