"""The layers kernel: a stack of known layers, run for a whole chunk of clients by rules of a few lines each.

Activations are [C, B, ...], or [C, S, B, ...] once a layer's weights are draws ("lifted"). Autograd stays outside.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.models import Split


class _Affine(torch.autograd.Function):
    """x [C, B, i] times W [C, o, i] transposed, plus b [C, o]: weight gradients come out contiguous, without transposed copies."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if for_x else None,
            torch.bmm(grad.mT, x) if for_weight else None,
            grad.sum(1) if for_bias else None,
        )


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Affine.apply(x, weight, bias)  # type: ignore[return-value]


def _linear(module: nn.Linear, weights: dict[str, Tensor], x: Tensor, lifted: bool) -> tuple[Tensor, bool]:
    weight, bias = weights["weight"], weights.get("bias")
    if weight.dim() == 3 and not lifted:
        return _affine(x, weight, bias), False
    if weight.dim() == 3:
        return _affine(x.flatten(1, 2), weight, bias).unflatten(1, x.shape[1:3]), True
    draws = weight.shape[1]
    if not lifted:  # S draws of one layer are one product with S * o outputs
        out = _affine(x, weight.flatten(1, 2), None if bias is None else bias.flatten(1, 2))
        return out.unflatten(-1, (draws, -1)).transpose(1, 2), True
    out = _affine(x.flatten(0, 1), weight.flatten(0, 1), None if bias is None else bias.flatten(0, 1))
    return out.unflatten(0, (-1, draws)), True


def _conv(module: nn.Conv2d, weights: dict[str, Tensor], x: Tensor, lifted: bool) -> tuple[Tensor, bool]:
    weight, bias = weights["weight"], weights.get("bias")
    drawn = weight.dim() == 6
    if drawn or lifted:
        draws = weight.shape[1] if drawn else x.shape[1]
        spread = lambda t, has: (t if has else t.unsqueeze(1).expand(-1, draws, *t.shape[1:])).flatten(0, 1)  # noqa: E731
        x, weight = spread(x, lifted), spread(weight, drawn)
        bias = None if bias is None else spread(bias, drawn)
    rest = (module.stride, module.padding, module.dilation, module.groups)
    if x.is_cuda:  # one grouped convolution
        clients, batch = x.shape[:2]
        stacked = x.transpose(0, 1).flatten(1, 2)
        out = F.conv2d(stacked, weight.flatten(0, 1), None if bias is None else bias.flatten(), *rest[:3], clients * module.groups)
        out = out.unflatten(1, (clients, -1)).transpose(0, 1)
    else:  # one client after another is faster than grouped on a CPU
        out = torch.stack([F.conv2d(x[c], weight[c], None if bias is None else bias[c], *rest) for c in range(len(x))])
    return (out.unflatten(0, (-1, draws)), True) if drawn or lifted else (out, False)


def _flatten(module: nn.Flatten, x: Tensor, lifted: bool) -> Tensor:
    return x.flatten(2 + lifted)


def _relu(module: nn.Module, x: Tensor, lifted: bool) -> Tensor:
    return F.relu(x)


def _elementwise(module: nn.Module, x: Tensor, lifted: bool) -> Tensor:
    return module(x)


def _folded(module: nn.Module, x: Tensor, lifted: bool) -> Tensor:
    lead = x.shape[: 2 + lifted]
    return module(x.flatten(0, 1 + lifted)).unflatten(0, lead)


WEIGHTED: dict[type, Callable[..., tuple[Tensor, bool]]] = {nn.Linear: _linear, nn.Conv2d: _conv}
PLAIN: dict[type, Callable[..., Tensor]] = {
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    **dict.fromkeys((nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity), _elementwise),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), _folded),
}


def supported(module: nn.Module) -> bool:
    """Whether every submodule has a rule."""
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros"
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    if type(module) in (nn.Sequential, Split):
        return all(supported(child) for child in module.children())
    return type(module) in WEIGHTED or type(module) in PLAIN


def forward(module: nn.Module, leaves: dict[str, Tensor], x: Tensor, lifted: bool) -> tuple[Tensor, bool]:
    """Outputs of a chunk of clients; see `descent.Forward`."""
    if type(module) in (nn.Sequential, Split):
        for name, child in module.named_children():
            inner = {key[len(name) + 1 :]: leaf for key, leaf in leaves.items() if key.startswith(f"{name}.")}
            x, lifted = forward(child, inner, x, lifted)
        return x, lifted
    if rule := WEIGHTED.get(type(module)):
        frozen = {key: p.expand(len(x), *p.shape) for key, p in module.named_parameters() if key not in leaves}
        return rule(module, frozen | leaves, x, lifted)
    return PLAIN[type(module)](module, x, lifted), lifted
