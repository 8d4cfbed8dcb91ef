"""The layers kernel, which runs a stack of known layers for a whole chunk of clients by short
rules, one for each kind of layer.

A rule computes a layer's outputs and returns a function for the backward pass, so that no graph is
built: on small layers autograd costs as much as the products
(docs/decisions/0004-layer-rules-go-back-by-hand.md). For layers whose rule has no backward pass of
its own, autograd is used for that layer alone.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, first
from bayesfl.engine.network import Pass, Passage, by_autograd
from bayesfl.models import SplitModel
from bayesfl.models.altered import altered

LayerRule: TypeAlias = Callable[
    [Any, dict[str, Tensor], dict[str, Tensor], Tensor, bool, bool], Pass
]
"""Function (layer, its weights, buffers for the wanted slopes of these, x, lifted, whether the
slope at x is wanted) -> `Pass`.
"""


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (
        torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    )


def _linear(
    layer: nn.Linear,
    weights: dict[str, Tensor],
    slopes: dict[str, Tensor],
    x: Tensor,
    lifted: bool,
    through: bool,
) -> Pass:
    weight, bias = weights["weight"], weights.get("bias")
    drawn, lead = weight.dim() == 4, x.shape[:-1]
    # Every case is one batched matrix product. If only the weights have S draws, these count as S *
    # o outputs; if only the inputs have draws, as S times the rows; if both have draws, the batch
    # holds C * S products.
    both, wide, shape = drawn and lifted, drawn and not lifted, weight.shape
    if both:
        x = x.flatten(0, 1)
        weight = weight.flatten(0, 1)
        bias = None if bias is None else bias.flatten(0, 1)
    elif wide:
        weight, bias = weight.flatten(1, 2), None if bias is None else bias.flatten(1, 2)
    if x.dim() > 3:
        x = x.flatten(1, -2)
    flat = _affine(x, weight, bias)
    outputs = (
        flat.unflatten(-1, shape[1:3]).transpose(1, 2).unflatten(2, lead[1:])
        if wide
        else flat.view(*lead, -1)
    )

    def back(slope: Tensor) -> Tensor | None:
        if wide:
            slope = slope.flatten(2, -2).transpose(1, 2)
        if slope.shape != flat.shape or wide:
            slope = slope.reshape(flat.shape)
        for name, to in slopes.items():
            # Written in place, except for draws, whose product differs in shape.
            out = None if drawn else to
            found = (
                torch.bmm(slope.mT, x, out=out)
                if name == "weight"
                else torch.sum(slope, 1, out=out)
            )
            if drawn:
                to.copy_(found.view(to.shape))
        return torch.bmm(slope, weight).view(*lead, -1) if through else None

    return Pass(outputs, drawn or lifted, back)


def _relu(
    layer: nn.Module,
    weights: dict[str, Tensor],
    slopes: dict[str, Tensor],
    x: Tensor,
    lifted: bool,
    through: bool,
) -> Pass:
    outputs = F.relu(x)
    return Pass(
        outputs,
        lifted,
        lambda slope: torch.ops.aten.threshold_backward(slope, outputs, 0) if through else None,
    )


def _flatten(
    layer: nn.Module,
    weights: dict[str, Tensor],
    slopes: dict[str, Tensor],
    x: Tensor,
    lifted: bool,
    through: bool,
) -> Pass:
    return Pass(
        x.flatten(2 + lifted), lifted, lambda slope: slope.reshape(x.shape) if through else None
    )


def _spread(t: Tensor, has: bool, draws: int) -> Tensor:
    """Return [C, S, ...] as a chunk of C * S clients; a tensor without an axis of draws is repeated
    first.
    """
    return (t if has else t.unsqueeze(1).expand(-1, draws, *t.shape[1:])).flatten(0, 1)


def _gathered(t: Tensor, has: bool, draws: int) -> Tensor:
    """Return slopes of a chunk of C * S clients as [C, S, ...]; for tensors that were repeated, the
    sum over draws.
    """
    t = t.unflatten(0, (-1, draws))
    return t if has else t.sum(1)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _conv(
    layer: nn.Conv2d,
    weights: dict[str, Tensor],
    slopes: dict[str, Tensor],
    x: Tensor,
    lifted: bool,
    through: bool,
) -> Pass:
    weight, bias = weights["weight"], weights.get("bias")
    drawn = weight.dim() == 6
    if not drawn and not lifted:
        return _conv_chunk(layer, weight, bias, slopes, x, through, grouped=x.is_cuda)
    draws = weight.shape[1] if drawn else x.shape[1]
    weight = _spread(weight, drawn, draws)
    bias = None if bias is None else _spread(bias, drawn, draws)
    own = {
        name: weight.new_empty(weight.shape if name == "weight" else weight.shape[:2])
        for name in slopes
    }
    inner = _conv_chunk(
        layer, weight, bias, own, _spread(x, lifted, draws), through, grouped=x.is_cuda
    )

    def back(slope: Tensor) -> Tensor | None:
        assert inner.back is not None
        into = inner.back(slope.flatten(0, 1))
        for name, to in slopes.items():
            to.copy_(_gathered(own[name], drawn, draws))
        return None if into is None else _gathered(into, lifted, draws)

    return Pass(inner.outputs.unflatten(0, (-1, draws)), True, back)


def _conv_chunk(
    layer: nn.Conv2d,
    weight: Tensor,
    bias: Tensor | None,
    slopes: dict[str, Tensor],
    x: Tensor,
    through: bool,
    *,
    grouped: bool,
) -> Pass:
    """Run a convolution for every client of a chunk: one after another, which is faster on a CPU,
    or all at once, grouped.
    """
    clients, batch = x.shape[:2]
    if grouped:
        rows = (
            [x.transpose(0, 1).flatten(1, 2)],
            [weight.flatten(0, 1)],
            [None if bias is None else bias.flatten()],
        )
    else:
        rows = list(x), list(weight), [None] * clients if bias is None else list(bias)
    groups = clients * layer.groups if grouped else layer.groups
    options = (layer.stride, layer.padding, layer.dilation)
    # its overloads separate padding given as text from padding in pixels, the type of `layer` does
    # not
    convolve: Any = torch.conv2d

    def by_client(
        parts: Sequence[Tensor],
    ) -> Tensor:
        # [B, C * o, ...] once, or [B, o, ...] for each.
        return (
            parts[0].unflatten(1, (clients, -1)).transpose(0, 1)
            if grouped
            else _joined(parts).unflatten(0, (clients, batch))
        )

    def back(slope: Tensor) -> Tensor | None:
        each = [slope.transpose(0, 1).flatten(1, 2)] if grouped else list(slope)
        mask = [through, "weight" in slopes, "bias" in slopes]
        parts = [
            torch.ops.aten.convolution_backward(
                s, i, w, [len(w)], *options, False, [0, 0], groups, mask
            )
            for s, i, w in zip(each, rows[0], rows[1], strict=True)
        ]
        into, *found = zip(*parts, strict=True)
        for name, values in zip(("weight", "bias"), found, strict=True):
            if name in slopes:
                slopes[name].copy_(_joined(values).view(slopes[name].shape))
        return by_client(into) if through else None

    return Pass(
        by_client([convolve(*row, *options, groups) for row in zip(*rows, strict=True)]),
        False,
        back,
    )


def _max_pool(
    layer: nn.MaxPool2d,
    weights: dict[str, Tensor],
    slopes: dict[str, Tensor],
    x: Tensor,
    lifted: bool,
    through: bool,
) -> Pass:
    size, stride, padding, dilation = (
        _pair(v) for v in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    flat, lead = x.flatten(0, 1 + lifted), x.shape[: 2 + lifted]
    sizes = (size, stride, padding, dilation, layer.ceil_mode)
    pairs = (
        size == stride == [2, 2]
        and padding == [0, 0]
        and dilation == [1, 1]
        and not layer.ceil_mode
        and not x.is_cuda
    )
    outputs, places = (
        _halved(flat) if pairs else torch.ops.aten.max_pool2d_with_indices(flat, *sizes)
    )

    def back(slope: Tensor) -> Tensor | None:
        if not through:
            return None
        where = places() if callable(places) else places
        into = torch.ops.aten.max_pool2d_with_indices_backward(
            slope.flatten(0, 1 + lifted), flat, *sizes, where
        )
        return into.unflatten(0, lead)

    return Pass(outputs.unflatten(0, lead), lifted, back)


def _halved(x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Take maxima over windows of 2 x 2 that do not overlap, first along rows, then along columns:
    on a CPU much faster than torch's.

    Returns the maxima and a function that gives their places in [H, W]; of equal values the first
    in reading order is taken, as in torch.
    """
    height, width = x.shape[-2:]
    left, right = x[..., : height // 2 * 2, 0 : width // 2 * 2 : 2], x[..., : height // 2 * 2, 1::2]
    across = torch.maximum(left, right)
    top, bottom = across[..., 0::2, :], across[..., 1::2, :]

    def places() -> Tensor:
        second, lower = left < right, top < bottom
        above, below = second[..., 0::2, :], second[..., 1::2, :]
        across = above ^ ((above ^ below) & lower)  # as torch.where, which is slow for bools
        corner = torch.arange(0, height - 1, 2, device=x.device).unsqueeze(
            -1
        ) * width + torch.arange(0, width - 1, 2, device=x.device)
        return torch.add(corner + across, lower, alpha=width)

    return torch.maximum(top, bottom), places


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _elementwise(
    layer: nn.Module, weights: dict[str, Tensor], x: Tensor, lifted: bool
) -> tuple[Tensor, bool]:
    return layer(x.clone() if getattr(layer, "inplace", False) else x), lifted


def _folded(
    layer: nn.Module, weights: dict[str, Tensor], x: Tensor, lifted: bool
) -> tuple[Tensor, bool]:
    return layer(x.flatten(0, 1 + lifted)).unflatten(0, x.shape[: 2 + lifted]), lifted


def _graph(call: Callable[..., tuple[Tensor, bool]]) -> LayerRule:
    """Return the rule of a layer without parameters, whose backward pass uses autograd for this
    layer alone.
    """
    kernel = by_autograd(call)
    return lambda layer, weights, slopes, x, lifted, through: kernel(layer)(
        weights, slopes, x, lifted, through
    )


LAYER_RULES: dict[type, LayerRule] = {
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Flatten: _flatten,
    nn.Conv2d: _conv,
    nn.MaxPool2d: _max_pool,
    **dict.fromkeys(
        (nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity),
        _graph(_elementwise),
    ),
    **dict.fromkeys((nn.AvgPool2d, nn.AdaptiveAvgPool2d), _graph(_folded)),
}


_SUPPORTED: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def supported(module: nn.Module) -> bool:
    """Say whether every layer has a rule, and none with parameters is used twice; asked once of a
    module, which must then stay as it is.
    """
    if module not in _SUPPORTED:
        _SUPPORTED[module] = _objection(module) is None
    return _SUPPORTED[module]


def refuse(module: nn.Module) -> None:
    """Raise ValueError, naming the layer, if there is no rule for one."""
    if reason := _objection(module):
        raise ValueError(
            f"the layers kernel {reason}; use kernel='auto', which takes one that runs the model"
        )


def _objection(module: nn.Module) -> str | None:
    if found := altered(module):
        return f"cannot run {found[0]}"
    weighted: set[nn.Module] = set()
    for prefix, layer, names in _stack(module):
        called = f"{prefix.rstrip('.')!r} ({type(layer).__name__})"
        if not _has_rule(layer):
            return f"has no rule for layer {called}"
        if names and layer in weighted:
            return f"cannot use one layer's parameters twice, as in {called}"
        weighted |= {layer} if names else set()
    return None


def _has_rule(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d) and (
        layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return False
    if isinstance(layer, nn.MaxPool2d) and layer.return_indices:
        return False
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
        return False
    return type(layer) in LAYER_RULES


LayerStack: TypeAlias = tuple[tuple[str, nn.Module, tuple[str, ...]], ...]
"""Tuples of prefix, layer, and names of the layer's parameters."""


def _stack(module: nn.Module) -> LayerStack:
    """Return the layers of a stack in the order they run.

    One module may be used in several places, which `named_children` would leave out.
    """
    if type(module) not in (nn.Sequential, SplitModel):
        return (("", module, tuple(name for name, _ in module.named_parameters())),)
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    return tuple(
        (f"{name}.{prefix}", layer, names)
        for name, child in children
        for prefix, layer, names in _stack(child)
    )


def _order(stack: LayerStack) -> LayerStack:
    """Reorder layers to do less work for the same function: a max pooling goes before a ReLU, with
    which it commutes.
    """
    layers = list(stack)
    for i in range(len(layers) - 1):
        if isinstance(layers[i][1], nn.ReLU) and isinstance(layers[i + 1][1], nn.MaxPool2d):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return tuple(layers)


def kernel(module: nn.Module) -> Passage:
    """Return the passage of a stack of layers, see `network.Kernel`."""
    stack = _order(_stack(module))

    def passage(
        leaves: dict[str, Tensor], slopes: dict[str, Tensor], x: Inputs, lifted: bool, through: bool
    ) -> Pass:
        now = first(x)  # a stack takes one tensor
        passes: list[tuple[Pass, list[tuple[Tensor, Tensor]]]] = []
        reached = through
        for prefix, layer, names in stack:
            weights, repeated = _weights(prefix, layer, names, leaves, len(now))
            own, sums = _buffers(prefix, weights, repeated, slopes)
            passed = LAYER_RULES[type(layer)](layer, weights, own, now, lifted, reached)
            reached = reached or bool(own)
            now, lifted = passed.outputs, passed.lifted
            if reached:
                passes.append((passed, sums))

        def back(slope: Tensor) -> Tensor | None:
            into: Tensor | None = slope
            for passed, sums in reversed(passes):
                assert passed.back is not None
                assert into is not None
                into = passed.back(into)
                for to, each in sums:
                    torch.sum(each, 1, out=to)
            return into

        return Pass(now, lifted, back if passes else None)

    return passage


def _buffers(
    prefix: str,
    weights: dict[str, Tensor],
    repeated: frozenset[str],
    slopes: dict[str, Tensor],
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return the buffers into which a layer's rule writes slopes, by parameter, and for each one
    that has an axis of draws the pair (slope, buffer): the slope is the buffer's sum over draws.
    """
    own: dict[str, Tensor] = {}
    sums: list[tuple[Tensor, Tensor]] = []
    for name, weight in weights.items():
        slope = slopes.get(prefix + name)
        if slope is None:
            continue
        if name not in repeated:
            own[name] = slope
            continue
        own[name] = slope.new_empty(weight.shape)
        sums.append((slope, own[name]))
    return own, sums


def _weights(
    prefix: str, layer: nn.Module, names: tuple[str, ...], leaves: dict[str, Tensor], clients: int
) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return a layer's parameters, all with an axis of draws or none, and the names of those that
    were repeated over draws.
    """
    weights, draws, own = {}, None, {}
    for name in names:
        leaf = leaves.get(prefix + name)
        own[name] = layer.get_parameter(name)
        if leaf is None:  # no block covers it, so it is the same for all clients
            leaf = own[name].expand(clients, *own[name].shape)
        elif leaf.dim() == own[name].dim() + 2:
            draws = leaf.shape[1]
        weights[name] = leaf
    if draws is None:
        return weights, frozenset()
    repeated = frozenset(
        name for name, leaf in weights.items() if leaf.dim() == own[name].dim() + 1
    )
    for name in repeated:
        leaf = weights[name]
        weights[name] = leaf.unsqueeze(1).expand(clients, draws, *leaf.shape[1:])
    return weights, repeated
