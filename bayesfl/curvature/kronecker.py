"""The inverse of a Kronecker-factored GGN plus the prior's precision (KFAC).

For a linear layer with inputs $x_n$ [I] and cotangents $g_nq$ [H] pulled back to its outputs
through the root of the likelihood's curvature,

    GGN of the weights [H I, H I]: $sum_nq (g_nq g_nq') (x) (x_n x_n') ~ B (x) A$,

    $B = sum_nq g_nq g_nq'$, $A = mean_n x_n x_n'$,

exact for one example; terms between layers, and between weights and biases, are left out. The bias
is a further input that is always 1. For a layer used at T places (a convolution) B is summed and A
averaged over the places. With eigenvectors $B = U b U'$, $A = V a V'$ the layer's precision is
diagonal in the basis $U (x) V$ if the prior's precision is one number, with entries
$b_h a_i + precision$.

For the network's last layer alone $B = sum_n Lambda_n$, the likelihood's curvature, is a closed
form, and $J H^-1 J' = U diag(s) U'$, $s_h = sum_i (V'x)_i^2 / (b_h a_i + precision)$, has the same
eigenvectors for all inputs (`Spectral`). The factors of other layers come from curvlinops.

The weight and the bias of a norm are short vectors, and keep the GGN's own blocks [H, H], sums over
the data.

Sources: Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate
curvature", ICML 2015; Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for
convolution layers", ICML 2016; as posterior: Ritter, Botev, Barber, "A scalable Laplace
approximation for neural networks", ICLR 2018; in this form: Daxberger et al., "Laplace Redux",
NeurIPS 2021 (laplace-torch).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, count
from bayesfl.base.numerics import apart
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.curvature.batches import Data, require
from bayesfl.curvature.dual import check_prior_precision
from bayesfl.curvature.factors import BLOCK, Outer
from bayesfl.curvature.ggn import Curvature
from bayesfl.curvature.jacobians import FactorRows, Rows
from bayesfl.curvature.roots import total
from bayesfl.curvature.spectral import Spectral
from bayesfl.likelihoods import Categorical, Gaussian, Poisson
from bayesfl.models.copies import duplicate

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers whose weight and bias scale and shift; each is a vector with its own block."""
_OTHERS = "structure 'full', 'subnetwork' or 'diagonal' supports any"


@dataclass(frozen=True, eq=False)
class Basis:
    """Hold the basis that diagonalises one layer's curvature.

    Args:
        slots: Positions [H, I] of the layer's weights in the flat vector, the bias as the last
            input; [H, 1] for a norm's weight, or for its bias.
        left: Eigenvectors U of B, [H, H].
        right: Eigenvectors V of A, [I, I]; the bias's input is a separate eigenvector.
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


@dataclass(frozen=True, eq=False, repr=False)
class Kronecker:
    """Hold the inverse H^-1 for all covered weights, where H is a Kronecker-factored GGN plus
    diag(precision); made by `invert_factors`.

    Args:
        curvature: Curvature of the model at its weights.
        bases: One basis for each layer.
        eigenvalues: Eigenvalues of the GGN in these bases, $b_h a_i$ at the slot of weight (h, i),
            [D].
        precision: Prior precision, one number within each weight and each bias, [D].
    """

    curvature: Curvature
    bases: tuple[Basis, ...]
    eigenvalues: Tensor
    precision: Tensor

    form = "kronecker"
    indices = None

    @property
    def size(self) -> int:
        """Return the number of weights, D."""
        return len(self.precision)

    @property
    def _variance(self) -> Tensor:
        """Compute the variances in the bases, [D]."""
        return 1 / (self.eigenvalues + self.precision)

    def with_precision(self, precision: Tensor) -> "Kronecker":
        """Return the inverse with the same factors under another prior precision [D].

        Raises:
            ValueError: An entry of `precision` is not positive and finite, or entries differ within
                a weight or bias.
        """
        _check_prior(self.curvature, precision)
        return replace(self, precision=precision)

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
        """Return the number of standard normals for one draw."""
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
        mean, covariance = self.spread(x, centre=centre)
        return mean, covariance.dense() if isinstance(covariance, Spectral) else covariance

    def spread(self, x: Data, *, centre: bool = False) -> tuple[Tensor, Tensor | Spectral]:
        """Compute the same as `predict`; the covariance stays unformed if the one layer is the
        network's last, in O(I O + O^2) operations for each example.
        """
        means, covariances = zip(
            *(self._spread(batch, centre) for batch in self.curvature.batches(x)), strict=True
        )
        mean, spectral = torch.cat(means), [one for one in covariances if isinstance(one, Spectral)]
        if not spectral:
            return mean, torch.cat(covariances)
        found = Spectral(spectral[0].vectors, torch.cat([one.values for one in spectral]))
        return (mean - mean.mean(1, keepdim=True), found.centred()) if centre else (mean, found)

    def _spread(self, x: Inputs, centre: bool) -> tuple[Tensor, Tensor | Spectral]:
        """Compute `spread` for one batch, for a last layer without `centre`."""
        last = self.curvature.last_layer(x)
        if last is None:
            extra = 0 if self.curvature.backend == "layers" else self.size
            return self.curvature.spread({"x": x}, self._between, centre=centre, extra=extra)
        (inputs, mean), (basis,) = last, self.bases
        if len(basis.right) > inputs.shape[1]:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)
        values = (inputs @ basis.right).square() @ self._variance[basis.slots].T
        return mean, Spectral(basis.left, values)

    def _between(self, rows: Rows) -> Tensor:
        """Compute J H^-1 J' for rows J over all weights, example by example, [N, Q, Q]."""
        if not isinstance(rows, FactorRows):  # pull back once for all layers
            rows = rows.restrict(torch.arange(self.size, device=self.precision.device))
        out = self.precision.new_zeros(rows.examples, rows.cotangents, rows.cotangents)
        every = self._variance
        for basis in self.bases:
            variance, part = every[basis.slots], rows.restrict(basis.slots.flatten())
            factor = part.factors[0]
            if isinstance(factor, Outer):
                # An outer product stays an outer product in the new basis: each of its two vectors
                # is transformed.
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
        """Return all tensors that `restore_factors` needs in addition to the model, for saving or
        moving.
        """
        out = {"eigenvalues": self.eigenvalues, "precision": self.precision}
        for number, basis in enumerate(self.bases):
            out |= {f"left.{number}": basis.left, f"right.{number}": basis.right}
        return out


def restore_factors(curvature: Curvature, tensors: Tensors) -> Kronecker:
    """Return the `Kronecker` with these `tensors`, for the same model at the same weights."""
    tensors = {name: t.to(curvature.device) for name, t in tensors.items()}
    bases = [
        Basis(places, tensors[f"left.{number}"], tensors[f"right.{number}"])
        for number, places in enumerate(_slots(curvature))
    ]
    return Kronecker(curvature, tuple(bases), tensors["eigenvalues"], tensors["precision"])


def invert_factors(curvature: Curvature, x: Data, precision: Tensor) -> Kronecker:
    """Compute the inverse of the Kronecker-factored GGN, a sum over the data, plus diag(precision).

    Args:
        curvature: Curvature of the model, which must cover whole linear layers, convolutions and
            norms.
        x: Inputs [N, ...], or batches of them that can be read twice.
        precision: Prior precision [D], one number within each weight and each bias.

    Raises:
        ValueError: A covered parameter belongs to another type of layer; a layer is covered partly
            or not used exactly once; `precision` is not positive and finite, or not constant within
            a weight or bias; the inputs are not a single tensor; or there are no data.
        MemoryError: The factors exceed the available memory; the message has their size.
    """
    _check_prior(curvature, precision)
    return of_factors(curvature, *factors(curvature, x), precision)


def factors(curvature: Curvature, x: Data) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Compute the factors of each layer, B [H, H] and A [I, I] *summed* over the data, and the
    number of examples; a bias has no row in A.

    Sums over several data sets are sums over all their examples. A norm's vector is a layer with
    one input, which is always 1.

    Raises:
        ValueError: See `invert_factors`.
        MemoryError: See `invert_factors`.
    """
    layers, vectors = _layers(curvature)
    require(
        3 * 8 * sum(order**2 for slots in _slots(curvature) for order in slots.shape),
        curvature.memory,
        "the Kronecker factors",
        "cover fewer layers by pattern=",
    )
    found, examples = _factors(curvature, list(layers), x)
    blocks = _blocks(curvature, vectors, x)
    return found + [(block, block.new_full((1, 1), examples)) for block in blocks], examples


def orders(curvature: Curvature) -> list[tuple[int, int]]:
    """Return the orders (H, I) of each layer's `factors`.

    Raises:
        ValueError: See `invert_factors`.
    """
    layers, vectors = _layers(curvature)
    names = curvature.layout.names
    biased = [f"{name}.bias".lstrip(".") in names for name in layers]
    own = [(len(s), s.shape[1] - bias) for s, bias in zip(layers.values(), biased, strict=True)]
    return own + [(len(slots), 1) for slots in vectors]


def of_factors(
    curvature: Curvature,
    found: list[tuple[Tensor, Tensor]],
    examples: int,
    precision: Tensor,
) -> Kronecker:
    """Return the inverse for these `factors`, summed over a number of examples; see
    `invert_factors` for `precision`.
    """
    bases = []
    eigenvalues = torch.zeros(curvature.size, dtype=torch.float64, device=curvature.device)
    for slots, (outer, inner) in zip(_slots(curvature), found, strict=True):
        b, left = torch.linalg.eigh(outer)
        a, right = torch.linalg.eigh(inner / examples)
        if slots.shape[1] > len(a):
            a, right = torch.cat([a, a.new_ones(1)]), torch.block_diag(right, right.new_ones(1, 1))
        bases.append(Basis(slots, left, right))
        eigenvalues[slots] = torch.outer(b.clamp_min(0), a.clamp_min(0))
    return Kronecker(curvature, tuple(bases), eigenvalues, precision)


def diagonal_of(curvature: Curvature, found: list[tuple[Tensor, Tensor]], examples: int) -> Tensor:
    """Return the diagonal of the GGN from its `factors`, b_hh a_ii, [D]."""
    out = torch.zeros(curvature.size, dtype=torch.float64, device=curvature.device)
    for slots, (outer, inner) in zip(_slots(curvature), found, strict=True):
        inputs = inner.diagonal() / examples
        inputs = torch.cat([inputs, inputs.new_ones(1)]) if slots.shape[1] > len(inputs) else inputs
        out[slots] = torch.outer(outer.diagonal(), inputs)
    return out


def _check_prior(curvature: Curvature, precision: Tensor) -> None:
    """Check that the prior's precision is one number > 0 within each weight and each bias, so that
    it is the same in every basis.
    """
    check_prior_precision(precision)
    for name, part in curvature.layout.leaves(precision).items():
        if (part != part.flatten()[0]).any():
            raise ValueError(
                "structure 'kfac' needs one prior precision for each weight and each bias, but "
                f"{name!r} has several: pass one number, or a vector that is constant within each; "
                f"{_OTHERS}"
            )


def _slots(curvature: Curvature) -> list[Tensor]:
    """Return the slots [H, I] of each basis, [H, 1] for norms."""
    layers, vectors = _layers(curvature)
    return [*layers.values(), *(slots.unsqueeze(1) for slots in vectors)]


def _layers(curvature: Curvature) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the slots [H, I] of weight and bias of each covered linear layer or convolution, by
    name; and the slots [H] of each covered weight and bias of norms.
    """
    covered, found, vectors, unknown = curvature.layout.shapes, {}, [], []
    places = curvature.layout.leaves(torch.arange(curvature.size, device=curvature.device))
    for name, layer in curvature.module.named_modules():
        own = [f"{name}.{key}".lstrip(".") for key, _ in layer.named_parameters(recurse=False)]
        inside = [key for key in own if key in covered]
        if isinstance(layer, NORMS):
            vectors += [places[key].flatten() for key in inside]
        elif inside and (
            type(layer) not in (nn.Linear, nn.Conv2d)
            or getattr(layer, "padding_mode", "zeros") != "zeros"
        ):
            unknown.append(f"{type(layer).__name__} {name!r}")
        elif inside and len(inside) < len(own):
            unknown.append(f"only {inside} of {own}")
        elif inside:
            found[name] = torch.cat([places[key].reshape(len(places[key]), -1) for key in own], 1)
    if unknown:
        raise ValueError(
            "structure 'kfac' supports whole linear layers, convolutions padded with zeros, and "
            f"norms, not {', '.join(unknown)}: cover others by pattern=, such as 'head.*', or "
            f"{_OTHERS}"
        )
    return found, vectors


def _factors(
    curvature: Curvature, names: list[str], x: Data
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Compute B [H, H] and A [I, I] of each layer, sums over the data, and the number of examples:
    for the last layer alone in closed form, for others with curvlinops.
    """
    outer: list[Any] = [0.0] * len(names)
    inner: list[Any] = [0.0] * len(names)
    examples = 0
    module = duplicate(curvature.module).requires_grad_(False)
    for name in names:
        module.get_submodule(name).requires_grad_(True)
    for batch in curvature.batches(x):
        examples += count(batch)
        if not names:
            continue
        last = curvature.last_layer(batch)
        if last is None:
            found = _by_curvlinops(curvature.likelihood, module, names, batch)
        else:
            inputs, outputs = last
            found = [[(total(curvature.likelihood, outputs), inputs.T @ inputs)]]
        for part in found:
            for k, (b, a) in enumerate(part):
                outer[k], inner[k] = outer[k] + b, inner[k] + a
    return list(zip(outer, inner, strict=True)), examples


def _by_curvlinops(
    likelihood: Likelihood, module: nn.Module, names: list[str], x: Any
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield B [H, H] and A [I, I] of each layer, both summed over a piece of the examples `x`.

    `module` computes gradients for these layers' parameters only.
    """
    from curvlinops import FisherType, KFACLinearOperator

    if isinstance(likelihood, Poisson):
        raise ValueError(
            "structure 'kfac' has no Poisson factors for layers below the last; "
            f"pattern='head.*' covers the last layer, {_OTHERS}"
        )
    step, outputs = _pieces(module, names, x[:1])
    scale = 1.0
    # Targets are needed, but the curvature does not depend on them.
    loss, target = nn.BCEWithLogitsLoss(reduction="sum"), torch.zeros_like(outputs)
    if isinstance(likelihood, Categorical):
        loss, target = nn.CrossEntropyLoss(reduction="sum"), torch.zeros_like(outputs[:, 0]).long()
    elif isinstance(likelihood, Gaussian):
        # The squared error is the negative log likelihood times 2 sigma^2.
        loss, scale = nn.MSELoss(reduction="sum"), 1 / (2 * likelihood.known**2)
    parameters = [p for p in module.parameters() if p.requires_grad]
    for some in x.split(step):
        operator = KFACLinearOperator(
            module,
            loss,
            parameters,
            [(some, target.expand(len(some), *target.shape[1:]))],
            fisher_type=FisherType.TYPE2,
            check_deterministic=False,
        )
        with torch.enable_grad():
            operator.compute_kronecker_factors()
        found = operator.state_dict()
        yield [
            (
                scale * found["gradient_covariances"][name].double(),
                # A mean over the piece.
                len(some) * found["input_covariances"][name].double(),
            )
            for name in names
        ]


def _blocks(curvature: Curvature, vectors: list[Tensor], x: Data) -> list[Tensor]:
    """Compute the GGN's own block of each vector of weights with these slots [H], [H, H] each, a
    sum over the data.
    """
    out = [
        torch.zeros(len(slots), len(slots), dtype=torch.float64, device=slots.device)
        for slots in vectors
    ]
    if not vectors:
        return out
    every = torch.cat(vectors)
    for batch in curvature.batches(x, extra=len(every)):
        rows = curvature.linearise(batch)[1].restrict(every).dense().flatten(0, 1)
        for block, part in zip(out, rows.split([len(v) for v in vectors], 1), strict=True):
            block.addmm_(part.T, part)
    return out


def _pieces(module: nn.Module, names: list[str], x: Tensor) -> tuple[int, Tensor]:
    """Return the number of examples that fit a block, and the outputs [1, O] of one example, `x`
    [1, ...].

    Raises:
        ValueError: A covered layer is not used exactly once in a pass with autograd, or the
            gradients of its weights do not come from the layer alone.
    """
    owner = {id(p): name for name in names for p in module.get_submodule(name).parameters()}
    uses, numbers, alone = Counter(), [], {}

    def tally(layer: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            uses.update({owner[id(p)] for p in layer.parameters() if id(p) in owner})

    def note(layer: nn.Module, given: Any, out: Tensor) -> None:
        def back(slope: Tensor) -> None:
            own = [p for p in layer.parameters() if p.requires_grad]
            with torch.enable_grad():
                plain = type(layer).forward(layer, given[0].detach())
            alone.update(zip(own, torch.autograd.grad(plain, own, slope), strict=True))

        if out.requires_grad:
            out.register_hook(back)
        weight = layer.get_parameter("weight")
        numbers.append(out.numel() // len(weight) * (len(weight) + weight[0].numel()))

    with ExitStack() as hooks, torch.enable_grad():
        for m in module.modules():
            if any(id(p) in owner for p in m.parameters(recurse=False)):
                hooks.enter_context(m.register_forward_pre_hook(tally))
                hooks.enter_context(m.register_forward_hook(note))
        outputs = module(x)
        _check_uses(uses, names)
        every = [p for p in module.parameters() if p.requires_grad]
        probe = torch.linspace(1, 2, outputs.numel()).to(outputs).view_as(outputs)
        slopes = torch.autograd.grad(outputs, every, probe, materialize_grads=True)
    _check_uses(uses, names)  # a checkpoint has called its layers again
    for p, slope in zip(every, slopes, strict=True):
        if apart(slope, alone.get(p, torch.zeros_like(p)), 1e-4):
            raise ValueError(
                f"structure 'kfac' needs layers that alone use their weights, but those of "
                f"{owner[id(p)]!r} are used elsewhere, too, or in another forward or by a hook; "
                f"{_OTHERS}"
            )
    outputs = outputs.detach()
    return max(1, BLOCK // (8 * (sum(numbers) + outputs.numel() ** 2))), outputs


def _check_uses(uses: Mapping[str, int], names: list[str]) -> None:
    """Check that each of these layers was called once."""
    for name in names:
        if uses[name] != 1:
            raise ValueError(
                "structure 'kfac' needs layers used once in a pass and in no checkpoint, which "
                f"calls them again; {name!r} is used {uses[name]} times; {_OTHERS}"
            )
