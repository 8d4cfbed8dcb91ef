"""Backends that compute Jacobians: closed forms by layer, torch.func, or BackPACK."""

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from bayesfl.base.inputs import Inputs, at, each, named
from bayesfl.base.layout import Layout
from bayesfl.base.options import declared
from bayesfl.base.protocols import Likelihood
from bayesfl.curvature import layers
from bayesfl.curvature.jacobians import PulledRows
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.models.altered import altered
from bayesfl.models.copies import duplicate
from bayesfl.models.weights import call_at

Name = Literal["auto", "layers", "func", "backpack"]


def _on_a_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).is_cuda


def refusal(backend: str, what: str) -> ValueError:
    """Return an error on an input that an explicitly selected backend does not support."""
    return ValueError(
        f"backend {backend!r} does not support {what}; backend='func' supports any architecture "
        "and any inputs"
    )


def error_in_words(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


class Func:
    """Compute Jacobians with the `func` backend: torch.func's vector-Jacobian product for each row,
    vectorised over examples, or row by row if torch.func cannot vectorise; for any architecture and
    inputs.

    Args:
        module: Any module.
        layout: The parameters of the derivatives.
    """

    name = "func"

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._module, self._layout = module, layout
        self._fixed = dict(module.named_buffers()) | {
            name: p.detach() for name, p in module.named_parameters() if name not in layout.shapes
        }
        self._free = {name: module.get_parameter(name).detach() for name in layout.names}
        self._batched = True

    @torch.no_grad()
    def floats(self, x: Inputs) -> tuple[int, int, int]:
        """Return the number of floats in memory for one example of `x`: for the example itself and
        for each cotangent, and its number O of outputs. Both floats are equal, because rows are
        pulled back in blocks.
        """
        one = at(x, slice(1))
        outputs = call_at(self._module, {}, one).shape[-1]
        return sum(t.numel() for _, t in named(one)), outputs, outputs

    @torch.no_grad()
    def linearise(
        self, x: Inputs, cotangents: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, PulledRows]:
        """Compute outputs [N, O] and the rows c' J [N, Q, D] for the cotangents c =
        `cotangents(outputs)` [N, Q, O].
        """
        outputs = call_at(self._module, {}, x)  # waits for other threads
        return outputs, PulledRows(self._pull, x, cotangents(outputs), self._layout.size)

    def _pull(self, x: Inputs, cotangents: Tensor) -> Tensor:
        if self._batched:
            try:
                return self._pull_at_once(x, cotangents)
            except (AttributeError, RuntimeError):
                # For example for a GRU, control flow that depends on the data, or `get_parameter`.
                self._batched = False
        return torch.stack(
            [self._pull_one(at(x, slice(n, n + 1)), c) for n, c in enumerate(cotangents)]
        )

    def _pull_one(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """Return the rows [Q, D] of one example for its cotangents [Q, O], one after another."""
        # Take gradients of all, because a reentrant checkpoint needs inputs with gradients.
        every = {
            name: p.detach().requires_grad_(p.is_floating_point())
            for name, p in self._module.named_parameters()
        }
        ends = [every[name] for name in self._free]
        with torch.enable_grad():
            outputs = call_at(self._module, every, x)[0]
            rows = [
                torch.autograd.grad(outputs, ends, c, retain_graph=True, materialize_grads=True)
                for c in cotangents
            ]
        return torch.stack(
            [self._layout.ravel(dict(zip(self._free, row, strict=True))) for row in rows]
        )

    def _pull_at_once(self, x: Inputs, cotangents: Tensor) -> Tensor:
        def one(x: Inputs, cotangents: Tensor) -> Tensor:
            alone = each(lambda t: t[None], x)
            back = vjp(
                lambda free: call_at(self._module, free | self._fixed, alone)[0], self._free
            )[1]
            return vmap(lambda c: self._layout.ravel(back(c)[0]))(cotangents)

        return vmap(one)(x, cotangents)


class BackPack:
    """Compute Jacobians with the `backpack` backend: gradients of single examples, one backward
    pass for each cotangent, and an exact GGN diagonal.

    Args:
        module: A module of layers that BackPACK supports, or a (residual) network that its
            converter supports.
        layout: The parameters of the derivatives.
    """

    name = "backpack"

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        import backpack

        self._layout, module = layout, duplicate(module)  # BackPACK adds permanent hooks
        self._parameters = [module.get_parameter(name) for name in layout.names]
        for p in module.parameters():
            # BackPACK cannot skip frozen layers; results for other parameters are ignored.
            p.requires_grad_(True)
        for layer in module.modules():
            # BackPACK reads the inputs of a layer, so they must not be overwritten.
            if getattr(layer, "inplace", False):
                layer.inplace = False  # type: ignore[assignment]  # not declared by all modules
        self._module = backpack.extend(_prepared(module))

    @torch.no_grad()
    def floats(self, x: Tensor) -> tuple[int, int, int]:
        """Return the number of floats for one example, see `Func`: the outputs of all layers, for
        each output.
        """
        passed: list[int] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, out: passed.append(out.numel()))
            for layer in self._module.modules()
            if not list(layer.children())
        ]
        outputs = self._module(x[:1]).shape[-1]
        for hook in hooks:
            hook.remove()
        return x[0].numel() + sum(passed), sum(passed), outputs

    def linearise(
        self, x: Tensor, cotangents: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, PulledRows]:
        """Compute outputs and rows, see `Func`."""
        with torch.no_grad():
            outputs = self._module(x)
        return outputs, PulledRows(self._pull, x, cotangents(outputs), self._layout.size)

    @torch.enable_grad()
    def _pull(self, x: Tensor, cotangents: Tensor) -> Tensor:
        from backpack.extensions import BatchGrad

        return torch.stack(
            [
                self._backward(BatchGrad(), lambda x, c=c: (self._module(x) * c).sum(), x, 1)
                for c in cotangents.unbind(1)
            ],
            1,
        )

    def _backward(
        self, extension: Any, loss: Callable[[Tensor], Tensor], x: Tensor, lead: int
    ) -> Tensor:
        """Run a backward pass with `extension` and return its results on the parameters, as
        [..., D] with `lead` leading axes.
        """
        import backpack

        with backpack.backpack(extension):
            loss(x.detach().requires_grad_(x.is_floating_point())).backward()
        found = [getattr(p, extension.savefield).detach().flatten(lead) for p in self._parameters]
        for p in self._module.parameters():
            p.grad = None
            if hasattr(p, extension.savefield):
                delattr(p, extension.savefield)
        return torch.cat(found, -1)

    @torch.enable_grad()
    def diagonal(self, x: Tensor, likelihood: Likelihood) -> Tensor | None:
        """Compute the diagonal of the GGN [D] with BackPACK's own extension; return None if it has
        no loss for the likelihood.
        """
        import backpack
        from backpack.extensions import DiagGGNExact

        y: Tensor
        if isinstance(likelihood, Categorical):
            criterion, scale = nn.CrossEntropyLoss(reduction="sum"), 1.0
            y = torch.zeros(len(x), dtype=torch.long, device=x.device)
        elif isinstance(likelihood, Gaussian):
            criterion, scale = nn.MSELoss(reduction="sum"), 1 / (2 * likelihood.known**2)
            with torch.no_grad():
                y = self._module(x)
        else:
            return None
        criterion = backpack.extend(criterion)
        return scale * self._backward(DiagGGNExact(), lambda x: criterion(self._module(x), y), x, 0)


def _prepared(module: nn.Module) -> nn.Module:
    """Return the same network in containers that BackPACK supports: a flat stack, or the result of
    its converter.
    """
    flat: list[nn.Module] = []
    for _, layer in layers.stack(module):
        # An activation may be used twice.
        flat.append(copy.deepcopy(layer) if any(layer is other for other in flat) else layer)
    if any(list(layer.children()) for layer in flat):
        from backpack.custom_module.graph_utils import convert_module_to_backpack

        return convert_module_to_backpack(module, False)
    return nn.Sequential(*flat)


def backpack_unsupported(module: nn.Module) -> list[str]:
    """Return the names of modules for which BackPACK has no exact GGN diagonal or single gradients,
    or would give wrong ones without an error.
    """
    try:
        from backpack.extensions import BatchGrad, DiagGGNExact
    except ImportError:
        return ["anything: it is not installed (pip install backpack-for-pytorch)"]
    # BackPACK's table from layers to rules has no public name.
    second, first = (
        vars(e)["_BackpropExtension__module_extensions"] for e in (DiagGGNExact(), BatchGrad())
    )
    out = []
    for name, layer in module.named_modules():
        leaf, own = not list(layer.children()), any(True for _ in layer.parameters(recurse=False))
        if (leaf and type(layer) not in second) or (own and not (leaf and type(layer) in first)):
            out.append(f"{type(layer).__name__} {name!r}")
        elif getattr(layer, "padding_mode", "zeros") != "zeros":  # its rules pad with zeros
            out.append(f"{type(layer).__name__} {name!r} with padding_mode={layer.padding_mode!r}")
    return out + altered(module)


Backend: TypeAlias = layers.Layers | Func | BackPack
"""Objects that linearise a model at its parameters; inputs `x` are one tensor, and for `func` any.
"""


@declared
def choose(backend: Name, module: nn.Module, layout: Layout) -> Backend:
    """Return the backend of that name for a module, which is not changed.

    `auto` selects `layers` if every layer has a closed form; otherwise `func`, or on a GPU
    `backpack` if BackPACK supports every layer. BackPACK may miss operations in a `forward` that
    are not layers: compare it with `func` before use, as `Curvature` does.

    Raises:
        ValueError: The selected backend does not support the model.
    """
    missing: list[str] = []
    if backend in ("auto", "layers"):
        missing = layers.unsupported(module)
        if not missing:
            return layers.Layers(module, layout)
    if backend == "backpack" or (backend == "auto" and _on_a_gpu(module)):
        missing = backpack_unsupported(module)
        if not missing:
            try:
                return BackPack(module, layout)
            except Exception as error:  # its converter raises it for an unknown `forward`
                missing = [f"this {type(module).__name__} ({error_in_words(error)})"]
    if backend in ("layers", "backpack"):
        raise refusal(backend, ", ".join(missing))
    return Func(module, layout)
