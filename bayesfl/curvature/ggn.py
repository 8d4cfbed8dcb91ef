"""The generalised Gauss-Newton matrix of a network, in parts: its diagonal, a subnetwork's block,
its Gram (dual) form.

For data $x_1$, ..., $x_N$, outputs f [O], $J_n = df(x_n)/dw$ [O, D] and $Lambda_n$ the Hessian of
the negative log likelihood in f,

    $GGN = sum_n J_n' Lambda_n J_n$, $H = GGN + diag(precision)$,

a sum over the data, in nats. No array of shape [N, O, D] is formed. Source: Schraudolph, "Fast
curvature matrix-vector products for second-order gradient descent", Neural Computation 14(7), 2002;
for Laplace: Daxberger et al., "Bayesian deep learning via subnetwork inference", ICML 2021.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, call, count, in_rows, shape_of, structure
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.protocols import Likelihood
from bayesfl.curvature.backends import (
    Backend,
    BackPack,
    Func,
    Name,
    choose,
    error_in_words,
    refusal,
)
from bayesfl.curvature.batches import Data, available_memory, batches, require
from bayesfl.curvature.factors import BLOCK
from bayesfl.curvature.jacobians import Rows
from bayesfl.curvature.layers import Layers, copied, unsupported
from bayesfl.curvature.roots import basis, root, variances
from bayesfl.likelihoods import Bernoulli, Categorical
from bayesfl.models.altered import altered
from bayesfl.models.copies import differentiable, duplicate
from bayesfl.models.modes import twin
from bayesfl.models.trial import trials
from bayesfl.models.weights import bound, refuse_unseen


@dataclass(frozen=True)
class Piece:
    """Hold a piece of data and the network's linearisation there; a piece from `Curvature.held`
    represents all data.

    Args:
        x: Inputs [N, ...].
        weight: Weight of each example, [N]; None for 1.
        outputs: The network's outputs, [N, O] in float64.
        rows: The rows R' J with R R' = weight Lambda.
    """

    x: Inputs
    weight: Tensor | None
    outputs: Tensor
    rows: Rows


@in_own_modes
class Curvature:
    """Compute the curvature of a model at its present weights, from a copy: `model` is not changed,
    and its later training has no effect here.

    Data are inputs [N, ...], a mapping with them as `x`, or an iterable of batches (these, tuples
    that start with inputs, a DataLoader's items), and are processed in pieces; several inputs, a
    tuple or a mapping, are `{"x": inputs}`, see `bayesfl.curvature.batches`. Indices refer to the
    flat vector of the covered parameters, in the order of `named_parameters()`. Results are in
    float64; Jacobians and cotangents pulled back through the network have the model's precision.

    Args:
        model: Any module from inputs [N, ...], one tensor or several of any dtype, to outputs [N,
            O]. Its modes are kept: call `eval()` first if they matter.
        likelihood: Distribution of y given the outputs; categorical by default.
        pattern: The covered parameters: a layout, or a pattern over their names, such as `body.*`.
        backend: `layers` (closed forms), `func` (torch.func), `backpack`, or `auto`; the attribute
            `backend` has the one in use. BackPACK is compared with `func` on the first two
            examples; if they differ, `auto` selects `func`, as it does for inputs that are not a
            single tensor.
        memory: Maximum number of bytes of one result; by default all free memory of the device at
            the time.

    Raises:
        TypeError: `pattern` is neither text nor a layout.
        ValueError: No parameter matches `pattern`; the backend does not support a layer; batch norm
            or dropout is in training mode, or batch norm tracks no statistics; or the likelihood is
            only a training loss.

    Example:
        >>> x, model = torch.tensor([[1.0], [2.0]]), nn.Linear(1, 1, bias=False)
        >>> curvature = bf.curvature.Curvature(model, bf.likelihoods.Gaussian())
        >>> curvature.diagonal(x).tolist()  # the sum of squares
        [5.0]
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | None = None,
        *,
        pattern: Pattern | Layout = "*",
        backend: Name = "auto",
        memory: int | None = None,
    ) -> None:
        _check_modes(model)
        self.likelihood = Categorical() if likelihood is None else likelihood
        if not getattr(self.likelihood, "plain", True):
            raise ValueError(
                f"{self.likelihood} is a training loss, not a distribution, and has no curvature "
                f"here; use {type(self.likelihood).__name__}()"
            )
        self.layout = pattern if isinstance(pattern, Layout) else Layout(model, pattern)
        self._memory = memory
        plain = backend in ("auto", "layers") and not unsupported(model)
        self.module = copied(model) if plain else duplicate(model)
        differentiable(self.module)
        self.engine: Backend = (Layers if plain else partial(choose, backend))(
            self.module, self.layout
        )
        self._asked, self._proven = backend, not isinstance(self.engine, BackPack)
        closed = any(trial.closed for trial in trials(twin(model)[0]))
        self._seen = closed or self.engine.name == "layers"  # whose layers are torch's own
        self._like = next(model.parameters()).detach().flatten()[:0]

    @property
    def size(self) -> int:
        """Return the number of covered weights, D."""
        return self.layout.size

    @property
    def backend(self) -> str:
        """Return the name of the backend in use."""
        return self.engine.name

    @property
    def weights(self) -> Tensor:
        """Return the covered weights, [D] in float64."""
        return self.layout.ravel(dict(self.module.named_parameters())).detach().double()

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._like.device

    @property
    def memory(self) -> int:
        """Return the maximum number of bytes of a result now."""
        return available_memory(self._like) if self._memory is None else self._memory

    def diagonal(self, x: Data | Piece, *, weight: Tensor | None = None) -> Tensor:
        """Compute the diagonal of the GGN, [D], a sum over the data with weights `weight` [N] of
        the examples; None for 1.

        Raises:
            ValueError: There are no data, `weight` is not a finite number >= 0 for each example, or
                the curvature is not finite; the message names the parameters.
        """
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        if isinstance(x, Piece):
            total += x.rows.squares()
        for batch, share in () if isinstance(x, Piece) else self.weighed(x, weight):
            found, last = None, self.last_layer(batch)
            if last is not None:
                found = self._of_last(*last, share)
            elif isinstance(self.engine, BackPack) and isinstance(batch, Tensor) and share is None:
                found = self.engine.diagonal(batch, self.likelihood)
            total += self.linearise(batch, weight=share)[1].squares() if found is None else found
        self.check_finite(total, torch.arange(self.size, device=total.device))
        return total

    def _of_last(self, inputs: Tensor, outputs: Tensor, weight: Tensor | None) -> Tensor:
        """Compute the diagonal [D] for the `last_layer`'s weights (h, i), sum_n Lambda_n[h, h]
        x_n[i]^2, without cotangents.
        """
        curved = variances(self.likelihood, outputs)
        curved = curved if weight is None else curved * weight[:, None]
        found = {"weight": curved.T @ inputs.square(), "bias": curved.sum(0)}
        return self.layout.ravel(
            {name: found[name.rpartition(".")[2]] for name in self.layout.names}
        )

    def columns(self, x: Data, indices: Tensor) -> Tensor:
        """Compute the columns J_S of the outputs' Jacobian for P selected weights, [N, O, P] for
        `indices` [P], in the model's precision.

        Raises:
            ValueError: An index is out of range or given twice.
            MemoryError: The result exceeds the available memory.
        """
        indices = self.check_indices(indices)
        parts = []
        for batch in self.batches(x, extra=len(indices)):
            rows = self.linearise(batch, torch.eye)[1]
            require(
                sum(p.nbytes for p in parts)
                + rows.examples * rows.cotangents * len(indices) * self._like.element_size(),
                self.memory,
                f"J_S with {len(indices)} columns",
                "pass fewer examples or fewer indices",
            )
            parts.append(rows.restrict(indices).dense(self._like.dtype))
        return torch.cat(parts)

    def ggn(
        self, x: Data | Piece, indices: Tensor | None = None, *, weight: Tensor | None = None
    ) -> Tensor:
        """Compute the block of the GGN for P selected weights, [P, P] for `indices` [P]; by default
        for all weights. `weight` [N] has the weights of the examples; None for 1.

        Raises:
            ValueError: An index is out of range or given twice, or the curvature is not finite.
            MemoryError: The result exceeds the available memory.
        """
        indices = (
            torch.arange(self.size, device=self.device)
            if indices is None
            else self.check_indices(indices)
        )
        count = len(indices)
        require(
            8 * count**2,
            self.memory,
            f"a GGN of {count} weights",
            "use a smaller subnetwork, or the dual form of `invert`",
        )
        out = torch.zeros(count, count, dtype=torch.float64, device=self.device)
        for piece in self.pieces(x, weight, extra=count):
            rows = piece.rows.restrict(indices).dense().flatten(0, 1)
            out.addmm_(rows.T, rows)
        self.check_finite(out.diagonal(), indices)
        return out

    def outputs(self, x: Data) -> Tensor:
        """Compute the model's outputs, [N, O]."""
        return torch.cat(
            [
                self.linearise(batch, lambda count: torch.zeros(count, 0))[0]
                for batch in self.batches(x)
            ]
        )

    # Parts used by the other files of this folder

    def last_layer(self, x: Inputs) -> tuple[Tensor, Tensor] | None:
        """Compute inputs [B, I] and outputs [B, O], in float64, of the one covered layer if it is
        linear and the network's last; None for other layers.

        The outputs are then linear in the covered weights, and their Jacobian is the inputs alone.
        """
        owners = {name.rpartition(".")[0] for name in self.layout.names}
        layer = self.module.get_submodule(owners.pop())
        if owners or type(layer) is not nn.Linear or altered(layer):
            return None
        passed: list[tuple[Tensor, Any]] = []
        hook = layer.register_forward_hook(
            lambda _, xs, named, out: passed.append((*xs, *named.values(), out.grad_fn)),
            with_kwargs=True,
        )
        held = {name: p.detach() for name, p in self.module.named_parameters()}
        with hook, torch.enable_grad(), bound(self.module, held, self.layout.names):
            outputs = call(self.module, x)
        # Inputs that need a gradient depend on the covered weights, which are used earlier, too.
        if (
            len(passed) != 1
            or passed[0][0].requires_grad
            or passed[0][1] is not getattr(outputs, "grad_fn", None)
        ):
            return None
        check_values(outputs, x)
        check_outputs(self.likelihood, outputs.shape[1])
        return passed[0][0].double(), outputs.detach().double()

    def spread(
        self, x: Data, between: Callable[[Rows], Tensor], *, centre: bool, extra: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Compute outputs [N, O], and U between(U' J) U' [N, O, O] for orthonormal directions U;
        see `batches` for `extra`.
        """
        means, covariances = [], []
        for batch in self.batches(x, extra=extra):
            outputs, rows = self.linearise(batch, lambda count: basis(count, centre))
            directions, covariance = basis(outputs.shape[1], centre).to(outputs), between(rows)
            means.append(outputs @ directions @ directions.T if centre else outputs)
            covariances.append(directions @ covariance @ directions.T if centre else covariance)
        return torch.cat(means), torch.cat(covariances, -3)

    def held(self, x: Data, weight: Tensor | None = None, *, extra: int = 0) -> Data | Piece:
        """Linearise the data once if they fit one piece; otherwise return them unchanged."""
        first = list(islice(self.pieces(x, weight, extra=extra), 2))
        return first[0] if len(first) == 1 else x

    def pieces(self, x: Data | Piece, weight: Tensor | None, *, extra: int = 0) -> Iterator[Piece]:
        """Linearise the data in pieces, see `weighed`; yield `held` data unchanged."""
        return (
            iter([x])
            if isinstance(x, Piece)
            else (
                Piece(batch, share, *self.linearise(batch, weight=share))
                for batch, share in self.weighed(x, weight, extra=extra)
            )
        )

    def batches(self, x: Data, *, extra: int = 0) -> Iterator[Inputs]:
        """Yield the data in pieces that fit a block of memory; each row needs `extra` further
        numbers.

        Raises:
            ValueError: There are no data.
        """
        size, seen = 1, None
        for batch in batches(x, self._like):
            if shape_of(batch) != seen:
                seen = shape_of(batch)
                self.prove(batch)
                size = self.at_once(batch, extra)
            yield from in_rows(batch, size)
        if seen is None:
            raise ValueError(
                "there are no data: at least one example is needed, and an iterator is empty after "
                "it was read; pass a tensor, a list of batches or a DataLoader"
            )

    def at_once(self, x: Any, extra: int) -> int:
        """Return the number of rows of `x` that fit a block of memory, if each output of a row
        needs `extra` further numbers.
        """
        alone, each, outputs = self.engine.floats(x)
        return max(1, BLOCK // (8 * (alone + outputs * (each + extra))))

    def weighed(
        self, x: Data, weight: Tensor | None, *, extra: int = 0
    ) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Yield `batches` of the data, each with the weights of its examples, [B]; None if there
        are none.

        Raises:
            ValueError: There are no data, or `weight` is not one number for each example.
        """
        if weight is not None:
            weight = weight.to(self.device, torch.float64)
        start = 0
        for batch in self.batches(x, extra=extra):
            share = None if weight is None else weight[start : start + count(batch)]
            start += count(batch)
            if share is not None and len(share) < count(batch):
                break
            yield batch, share
        if weight is not None and len(weight) != start:
            raise ValueError(
                f"weight must have one number for each example, got {len(weight)} for {start} "
                "examples or more"
            )

    def prove(self, x: Inputs) -> None:
        """Check that the backend supports such inputs, and once that BackPACK's diagonal for two
        examples equals `func`'s; if not, `auto` selects `func`.

        Raises:
            ValueError: An explicitly selected backend does not support such inputs; or BackPACK was
                selected, and fails or gives another diagonal; or the outputs depend on weights that
                are not parameters of the model.
        """
        if not self._seen:
            refuse_unseen(self.module, x)
            self._seen = True
        if isinstance(x, Tensor):
            if not self._proven:
                self._compare(x)
        elif self._asked in ("layers", "backpack"):
            raise refusal(self._asked, f"inputs of several tensors, {structure(x)}")
        elif self.backend != "func":
            self.engine, self._proven = Func(self.module, self.layout), True

    def _compare(self, x: Tensor) -> None:
        """Compare BackPACK with torch.func, see `prove`."""
        backpack: Any = self.engine
        func = Func(self.module, self.layout)
        two = x[:2]
        self.engine = func
        want = self.linearise(two)[1].squares()  # raises for outputs that are not finite
        self.engine = backpack
        try:
            own = backpack.diagonal(two, self.likelihood)
            fault = self._differs(self.linearise(two)[1].squares().double(), want)
            if fault is None and own is not None:
                fault = self._differs(own.double(), want)
        except Exception as error:  # BackPACK raises it for an unknown `forward`
            fault = error_in_words(error)
        if fault is not None:
            if self._asked == "backpack":
                raise refusal("backpack", f"this {type(self.module).__name__} ({fault})")
            self.engine = func
        self._proven = True

    def _differs(self, found: Tensor, want: Tensor) -> str | None:
        """Return a parameter whose diagonal [D] differs by more than rounding (that of TF32 in
        float32); None if there is none.
        """
        eps = torch.finfo(self._like.dtype).eps
        floor = eps * want.norm()
        pairs = zip(
            self.layout.leaves(found).items(), self.layout.leaves(want).values(), strict=True
        )
        bad = [
            name
            for (name, mine), theirs in pairs
            if (mine - theirs).norm() > eps**0.25 * theirs.norm() + floor
        ]
        return f"its curvature of {bad[0]!r} is not torch.func's" if bad else None

    def linearise(
        self,
        x: Any,
        directions: Callable[[int], Tensor] | None = None,
        *,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Rows]:
        """Compute outputs [B, O] in float64 and rows: R' J with R R' = Lambda, or U' J for
        `directions(O)` = U [O, Q].

        With `weight` [B], R R' is the example's weight times Lambda.

        Raises:
            ValueError: The outputs are not finite, not [B, O], or their number does not fit the
                likelihood.
        """

        def cotangents(f: Tensor) -> Tensor:
            check_values(f, x)
            if directions is None:
                check_outputs(self.likelihood, f.shape[1])
                return self.root(f, weight).mT.to(f.dtype)
            return directions(f.shape[1]).to(f).T.expand(len(f), -1, -1)

        outputs, rows = self.engine.linearise(x, cotangents)
        return outputs.double(), rows

    def root(self, outputs: Tensor, weight: Tensor | None) -> Tensor:
        """Compute R [B, O, Q] with R R' = weight Lambda at `outputs` [B, O], for a weight [B] of
        each example; None for 1.
        """
        found = root(self.likelihood, outputs)
        return found if weight is None else found * weight.sqrt()[:, None, None]

    def vector(self, value: float | Tensor) -> Tensor:
        """Expand one number, or one for each weight, to [D] in float64."""
        return torch.as_tensor(value, dtype=torch.float64, device=self.device).expand(self.size)

    def check_indices(self, indices: Tensor) -> Tensor:
        """Check indices and return them on the model's device.

        Raises:
            ValueError: `indices` is not a vector of integers, is empty, or has an entry that is out
                of range or given twice.
        """
        indices = torch.as_tensor(indices, device=self.device)
        integers = indices.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if indices.dim() != 1 or not len(indices) or not integers:
            raise ValueError(
                f"indices must be a vector of one integer or more, got {indices.dtype} of shape "
                f"{tuple(indices.shape)}"
            )
        least, most, different = int(indices.min()), int(indices.max()), len(indices.unique())
        if least < 0 or most >= self.size or different < len(indices):
            raise ValueError(
                f"indices must lie in 0 to {self.size - 1}, each once, got {len(indices)} from "
                f"{least} to {most}, {different} of them different"
            )
        return indices.long()

    def check_finite(self, values: Tensor, indices: Tensor) -> None:
        """Check that the curvature `values` [P] of the P selected weights `indices` [P] is finite.

        Raises:
            ValueError: An entry of `values` is not finite; the message names the parameters.
        """
        if values.isfinite().all():
            return
        bad = torch.zeros(self.size, dtype=torch.bool, device=values.device)
        bad[indices] = ~values.isfinite()
        named = ", ".join(
            f"{name!r} ({int(part.sum())} of {part.numel()})"
            for name, part in self.layout.leaves(bad).items()
            if part.any()
        )
        raise ValueError(
            f"the curvature is not finite for {named}; check the weights and the scale of the "
            "inputs"
        )


def check_values(outputs: Tensor, x: Inputs) -> None:
    """Check that a model's outputs at `x` are [N, O] and finite.

    Raises:
        ValueError: They are not.
    """
    if outputs.dim() != 2 or len(outputs) != count(x):
        raise ValueError(
            f"the model must give outputs [N, O], got shape {tuple(outputs.shape)} for "
            f"{count(x)} examples"
        )
    bad = int((~outputs.isfinite().all(-1)).sum())
    if bad:
        raise ValueError(
            f"the model's outputs are not finite for {bad} of {len(outputs)} examples, so "
            "neither is its curvature"
        )


def check_outputs(likelihood: Likelihood, count: int) -> None:
    """Check that the likelihood supports a model with `count` outputs.

    Raises:
        ValueError: The likelihood needs another number of outputs.
    """
    one = isinstance(likelihood, Bernoulli)
    if isinstance(likelihood, Bernoulli | Categorical) and (count == 1) != one:
        other = "Categorical()" if one else "Bernoulli(), or Gaussian(scale=...) for a regression"
        raise ValueError(
            f"likelihood {type(likelihood).__name__}() needs {'one output' if one else 'several'}, "
            f"the model has {count}: pass likelihood={other}"
        )


def _check_modes(model: nn.Module) -> None:
    """Check that no layer draws or makes the output for a row depend on the other rows.

    Raises:
        ValueError: Batch norm or dropout is in training mode, or batch norm tracks no statistics.
    """
    for name, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if (norm and module.running_mean is None) or ((norm or dropout) and module.training):
            raise ValueError(
                f"{type(module).__name__} {name!r} makes outputs random, or dependent on other "
                "examples of a batch: call model.eval(), and let batch norm track its statistics "
                "or use group norm"
            )
