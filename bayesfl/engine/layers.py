"""The layers kernel: a stack of known layers, run for a whole chunk of clients by rules of a few lines each.

A rule takes a layer forward and returns the way back, so that no graph is built: on small layers autograd costs as much as the
products (docs/decisions/0004-layer-rules-go-back-by-hand.md). Layers without a way back of their own go back by autograd, alone.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.engine.network import Pass, by_autograd
from bayesfl.models import Split

Rule: TypeAlias = Callable[[Any, dict[str, Tensor], bool, Tensor, bool, bool], Pass]
"""(layer, its weights, whether their slopes are wanted, x, lifted, whether the slope at x is wanted) -> what went through."""


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _linear(layer: nn.Linear, weights: dict[str, Tensor], wanted: bool, x: Tensor, lifted: bool, through: bool) -> Pass:
    weight, bias = weights["weight"], weights.get("bias")
    drawn = weight.dim() == 4
    shape, batch = weight.shape, x.shape[-2]
    # In every case one product of stacks: S draws of one layer are S * o outputs, lifted inputs are S * B rows, and where both
    # have draws the stack holds C * S products.
    if drawn and lifted:
        x, weight, bias = x.flatten(0, 1), weight.flatten(0, 1), None if bias is None else bias.flatten(0, 1)
    elif drawn:
        weight, bias = weight.flatten(1, 2), None if bias is None else bias.flatten(1, 2)
    elif lifted:
        x = x.flatten(1, 2)
    flat = _affine(x, weight, bias)
    if drawn and lifted:
        outputs = flat.unflatten(0, shape[:2])
    elif drawn:
        outputs = flat.unflatten(-1, shape[1:3]).transpose(1, 2)
    elif lifted:
        outputs = flat.unflatten(1, (-1, batch))
    else:
        outputs = flat

    def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        if drawn and not lifted:
            slope = slope.transpose(1, 2)
        slope = slope.reshape(flat.shape)
        slopes = {}
        if wanted:
            slopes["weight"] = torch.bmm(slope.mT, x).view(shape)
            if bias is not None:
                slopes["bias"] = slope.sum(1).view(shape[:-1])
        into = None
        if through:
            into = torch.bmm(slope, weight)
            if lifted:
                into = into.unflatten(0, shape[:2]) if drawn else into.unflatten(1, (-1, batch))
        return into, slopes

    return Pass(outputs, drawn or lifted, back)


def _relu(layer: nn.Module, weights: dict[str, Tensor], wanted: bool, x: Tensor, lifted: bool, through: bool) -> Pass:
    outputs = F.relu(x)
    return Pass(outputs, lifted, lambda slope: (torch.ops.aten.threshold_backward(slope, outputs, 0) if through else None, {}))


def _flatten(layer: nn.Module, weights: dict[str, Tensor], wanted: bool, x: Tensor, lifted: bool, through: bool) -> Pass:
    return Pass(x.flatten(2 + lifted), lifted, lambda slope: (slope.reshape(x.shape) if through else None, {}))


def _spread(t: Tensor, has: bool, draws: int) -> Tensor:
    """[C, S, ...] as a chunk of C * S, repeated over draws where it has none."""
    return (t if has else t.unsqueeze(1).expand(-1, draws, *t.shape[1:])).flatten(0, 1)


def _gathered(t: Tensor, has: bool, draws: int) -> Tensor:
    """The reverse for slopes: what was repeated gets their sum."""
    t = t.unflatten(0, (-1, draws))
    return t if has else t.sum(1)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _conv(layer: nn.Conv2d, weights: dict[str, Tensor], wanted: bool, x: Tensor, lifted: bool, through: bool) -> Pass:
    weight, bias = weights["weight"], weights.get("bias")
    drawn = weight.dim() == 6
    if drawn or lifted:
        draws = weight.shape[1] if drawn else x.shape[1]
        spread = {"weight": _spread(weight, drawn, draws)} | ({} if bias is None else {"bias": _spread(bias, drawn, draws)})
        inner = _conv(layer, spread, wanted, _spread(x, lifted, draws), False, through)

        def back_to_draws(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
            assert inner.back is not None
            into, slopes = inner.back(slope.flatten(0, 1))
            return None if into is None else _gathered(into, lifted, draws), {k: _gathered(v, drawn, draws) for k, v in slopes.items()}

        return Pass(inner.outputs.unflatten(0, (-1, draws)), True, back_to_draws)
    clients, batch = x.shape[:2]
    options = (layer.stride, layer.padding, layer.dilation)
    if x.is_cuda:  # one grouped convolution
        rows = [x.transpose(0, 1).flatten(1, 2)], [weight.flatten(0, 1)], [None if bias is None else bias.flatten()]
        groups = clients * layer.groups
    else:  # one client after another is faster than grouped on a CPU
        rows = list(x), list(weight), [None] * clients if bias is None else list(bias)
        groups = layer.groups
    outputs = [torch.conv2d(*row, *options, groups) for row in zip(*rows, strict=True)]

    def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        slopes = [slope.transpose(0, 1).flatten(1, 2)] if x.is_cuda else list(slope)
        mask = [through, wanted, wanted and bias is not None]
        parts = [
            torch.ops.aten.convolution_backward(s, i, w, [len(w)], *options, False, [0, 0], groups, mask)
            for s, i, w in zip(slopes, rows[0], rows[1], strict=True)
        ]
        into, for_weight, for_bias = zip(*parts, strict=True)
        found = {}
        if wanted:
            found["weight"] = _joined(for_weight).unflatten(0, (clients, -1))
            if bias is not None:
                found["bias"] = _joined(for_bias).unflatten(0, (clients, -1))
        if not through:
            return None, found
        return (into[0].unflatten(1, (clients, -1)).transpose(0, 1) if x.is_cuda else _joined(into).unflatten(0, (clients, batch))), found

    if x.is_cuda:
        return Pass(outputs[0].unflatten(1, (clients, -1)).transpose(0, 1), False, back)
    return Pass(_joined(outputs).unflatten(0, (clients, batch)), False, back)


def _max_pool(layer: nn.MaxPool2d, weights: dict[str, Tensor], wanted: bool, x: Tensor, lifted: bool, through: bool) -> Pass:
    size, stride, padding, dilation = (_pair(v) for v in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
    if size == stride == [2, 2] and padding == [0, 0] and dilation == [1, 1] and not layer.ceil_mode and not x.is_cuda:
        return _halved(x, lifted, through)
    flat, lead = x.flatten(0, 1 + lifted), x.shape[: 2 + lifted]
    sizes = (size, stride, padding, dilation, layer.ceil_mode)
    outputs, places = torch.ops.aten.max_pool2d_with_indices(flat, *sizes)

    def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not through:
            return None, {}
        into = torch.ops.aten.max_pool2d_with_indices_backward(slope.flatten(0, 1 + lifted), flat, *sizes, places)
        return into.unflatten(0, lead), {}

    return Pass(outputs.unflatten(0, lead), lifted, back)


def _halved(x: Tensor, lifted: bool, through: bool) -> Pass:
    """Windows of 2 x 2 that don't overlap, first along rows, then along columns; four times as fast as torch's on a CPU.

    Of equal values the first in reading order wins, as in torch.
    """
    rows, columns = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    left, right = x[..., :rows, 0:columns:2], x[..., :rows, 1:columns:2]
    across = torch.maximum(left, right)
    top, bottom = across[..., 0::2, :], across[..., 1::2, :]

    def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not through:
            return None, {}
        middle = torch.empty_like(across)
        _share_out(slope, top >= bottom, middle[..., 0::2, :], middle[..., 1::2, :])
        into = torch.empty_like(x) if (rows, columns) == x.shape[-2:] else torch.zeros_like(x)
        _share_out(middle, left >= right, into[..., :rows, 0:columns:2], into[..., :rows, 1:columns:2])
        return into, {}

    return Pass(torch.maximum(top, bottom), lifted, back)


def _share_out(slope: Tensor, first: Tensor, to_first: Tensor, to_second: Tensor) -> None:
    torch.mul(slope, first, out=to_first)
    torch.sub(slope, to_first, out=to_second)


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _elementwise(layer: nn.Module, weights: dict[str, Tensor], x: Tensor, lifted: bool) -> tuple[Tensor, bool]:
    return layer(x), lifted


def _folded(layer: nn.Module, weights: dict[str, Tensor], x: Tensor, lifted: bool) -> tuple[Tensor, bool]:
    return layer(x.flatten(0, 1 + lifted)).unflatten(0, x.shape[: 2 + lifted]), lifted


def _graph(call: Callable[..., tuple[Tensor, bool]]) -> Rule:
    kernel = by_autograd(call)
    return lambda layer, weights, wanted, x, lifted, through: kernel(
        layer, weights, frozenset(weights) if wanted else frozenset(), x, lifted, through
    )


RULES: dict[type, Rule] = {
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    nn.Conv2d: _conv,
    nn.MaxPool2d: _max_pool,
    **dict.fromkeys((nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity), _graph(_elementwise)),
    **dict.fromkeys((nn.AvgPool2d, nn.AdaptiveAvgPool2d), _graph(_folded)),
}


def supported(module: nn.Module) -> bool:
    """Whether every submodule has a rule."""
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return False
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        return False
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    if type(module) in (nn.Sequential, Split):
        return all(supported(child) for child in module.children())
    return type(module) in RULES


@lru_cache(maxsize=64)
def _stack(module: nn.Module) -> tuple[tuple[str, nn.Module, tuple[str, ...]], ...]:
    """The layers of a supported module in order: prefix, layer, names of its parameters."""
    if type(module) not in (nn.Sequential, Split):
        return (("", module, tuple(name for name, _ in module.named_parameters())),)
    return tuple((f"{name}.{prefix}", layer, names) for name, child in module.named_children() for prefix, layer, names in _stack(child))


def kernel(module: nn.Module, leaves: dict[str, Tensor], wanted: frozenset[str], x: Tensor, lifted: bool, through: bool) -> Pass:
    """See `network.Kernel`; a layer's parameters are wanted all or none."""
    passes: list[tuple[str, Pass]] = []
    reached = through
    for prefix, layer, names in _stack(module):
        weights = {}
        for name in names:
            leaf = leaves.get(prefix + name)
            if leaf is None:  # no block covers it: the same for everyone
                own = layer.get_parameter(name)
                leaf = own.expand(len(x), *own.shape)
            weights[name] = leaf
        mine = any(prefix + name in wanted for name in names)
        passed = RULES[type(layer)](layer, weights, mine, x, lifted, reached)
        reached = reached or mine
        x, lifted = passed.outputs, passed.lifted
        if reached:
            passes.append((prefix, passed))

    def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        slopes: dict[str, Tensor] = {}
        into: Tensor | None = slope
        for prefix, passed in reversed(passes):
            assert passed.back is not None
            assert into is not None
            into, new = passed.back(into)
            slopes |= {prefix + name: value for name, value in new.items()}
        return into, slopes

    return Pass(x, lifted, back if passes else None)
