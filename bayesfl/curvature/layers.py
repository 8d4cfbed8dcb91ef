"""The `layers` backend: closed forms of the Jacobian for a stack of known layers."""

from collections.abc import Callable
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.base.layout import Layout
from bayesfl.curvature.factors import Factor, Outer, Shared
from bayesfl.curvature.jacobians import FactorRows
from bayesfl.models import SplitModel
from bayesfl.models.altered import altered
from bayesfl.models.weights import gradient_of

ELEMENTWISE = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Identity,
)
POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
# These are the identity in evaluation mode; `Curvature` raises for them in training mode.
_DROPOUT = (nn.Dropout, nn.Dropout2d)


def stack(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of nested `nn.Sequential` and `bf.models.SplitModel`, in the order they
    run, with their names.
    """
    if type(module) not in (nn.Sequential, SplitModel):
        return [("", module)]
    return [
        (f"{name}.{inner}".rstrip("."), layer)
        for name, child in module._modules.items()
        if child is not None
        for inner, layer in stack(child)
    ]


def copied(module: nn.Module) -> nn.Module:
    """Return a stack of layers with closed forms, with its own parameters."""
    made = copy(module)
    made._parameters = {
        name: p if p is None else nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    made._modules = {name: part and copied(part) for name, part in module._modules.items()}
    return made


def unsupported(module: nn.Module) -> list[str]:
    """Return the layers without a closed form here, such as "GroupNorm 'body.1'"; empty if all
    have one.
    """
    return [
        f"{type(layer).__name__} {name!r}" for name, layer in stack(module) if not _has_form(layer)
    ] + altered(module)


def _has_form(layer: nn.Module) -> bool:
    if (
        (
            isinstance(layer, nn.Conv2d)
            and (
                layer.padding_mode != "zeros" or isinstance(layer.padding, str) or layer.groups != 1
            )
        )
        or (isinstance(layer, nn.MaxPool2d) and layer.return_indices)
        or (isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1))
    ):
        return False
    known = (nn.Linear, nn.Conv2d, nn.Flatten, *ELEMENTWISE, *POOLING, *_DROPOUT)
    parameters = {name for name, _ in layer.named_parameters()}
    return type(layer) in known and parameters <= {"weight", "bias"}


class Layers:
    """Compute Jacobians with the `layers` backend: it stores the inputs of each layer in one
    forward pass and pulls cotangents back by closed forms.

    Args:
        module: A stack of layers with closed forms.
        layout: The parameters of the derivatives.
    """

    name = "layers"

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self._layers = stack(module)
        self._size, self._slots = layout.size, {}
        places = layout.leaves(torch.arange(layout.size))
        for number, (name, _) in enumerate(self._layers):
            prefix = f"{name}." if name else ""
            slots = [
                places[k].flatten(1) if k.endswith("weight") else places[k][:, None]
                for k in (f"{prefix}weight", f"{prefix}bias")
                if k in places
            ]
            if slots:
                self._slots[number] = (
                    torch.cat(slots, 1),
                    prefix + "weight" in places,
                    prefix + "bias" in places,
                )

    def floats(self, x: Tensor) -> tuple[int, int, int]:
        """Return the number of floats for one example, see `Func`."""
        passed = self._forward(x[:1])
        total = sum(t.numel() for t in passed)
        return x[0].numel() + total, total, passed[-1].shape[-1]

    @torch.no_grad()
    def _forward(self, x: Tensor) -> list[Tensor]:
        """Compute the outputs of every layer."""
        out = []
        for _, layer in self._layers:
            x = layer(x.clone() if getattr(layer, "inplace", False) else x)
            out.append(x)
        return out

    @torch.no_grad()
    def linearise(
        self, x: Tensor, cotangents: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, FactorRows]:
        """Compute outputs and rows, see `Func`."""
        passed = [x, *self._forward(x)]
        outputs = passed[-1]
        g = cotangents(outputs)
        shape = (len(x), g.shape[1], self._size)
        factors: list[Factor] = []
        for number in range(len(self._layers) - 1, min(self._slots, default=0) - 1, -1):
            layer = self._layers[number][1]
            if number in self._slots:
                factors.append(_factor(layer, passed[number], g, *self._slots[number]))
            g = _pull(layer, passed[number], g) if number > min(self._slots) else g
        return outputs, FactorRows(factors, shape, outputs)


def _factor(
    layer: nn.Module, x: Tensor, g: Tensor, slots: Tensor, weight: bool, bias: bool
) -> Factor:
    """Return the rows of one layer, from its inputs [N, ...] and the cotangents pulled back to its
    outputs [N, Q, ...].
    """
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        g = g.flatten(3)
    else:
        x = x.flatten(1, -2).mT if x.dim() > 2 else x.unsqueeze(-1)
        g = g.flatten(2, -2).mT if g.dim() > 3 else g.unsqueeze(-1)
    parts = [x] if weight else []  # inputs [N, I, T] and slopes [N, Q, H, T]
    if bias:
        parts.append(x.new_ones(len(x), 1, x.shape[2]))
    inputs, slots = torch.cat(parts, 1), slots.to(x.device)
    if inputs.shape[2] == 1:
        return Outer(inputs.squeeze(2), g.squeeze(3), slots)
    return Shared(inputs.mT, g, slots).formed()


def _pull(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """Pull cotangents [N, Q, ...] of a layer's outputs back to its inputs `x` [N, ...]."""
    if isinstance(layer, nn.Linear):
        return g @ layer.weight
    if isinstance(layer, nn.Conv2d):
        at = x.new_empty(g.shape[0] * g.shape[1], *x.shape[1:])  # only its shape is read
        pulled = torch.ops.aten.convolution_backward(
            g.flatten(0, 1),
            at,
            layer.weight,
            None,
            layer.stride,
            layer.padding,
            layer.dilation,
            False,
            [0, 0],
            layer.groups,
            [True, False, False],
        )[0]
        return pulled.view(*g.shape[:2], *x.shape[1:])
    if isinstance(layer, (nn.Flatten, nn.Identity, *_DROPOUT)):
        return g.reshape(*g.shape[:2], *x.shape[1:])
    if isinstance(layer, ELEMENTWISE):
        return g * gradient_of(lambda t: (layer(t.clone()).sum(), ()), x)[0].unsqueeze(1)
    with torch.enable_grad():
        start = x.detach().requires_grad_()
        outputs = layer(start)
    pulled = [torch.autograd.grad(outputs, start, c, retain_graph=True)[0] for c in g.unbind(1)]
    return torch.stack(pulled, 1) if pulled else g.new_zeros(len(x), 0, *x.shape[1:])
