"""Rules that compute a torch function for all clients of a chunk at once, and its backward pass.

A rule is called like the function, with a `Call` before its arguments and with tensors that have an
axis of clients in front, [C, B, ...] for inputs and [C, ...] for parameters. It returns the result
and a function from the slope at the result to the slopes at its tensors. No graph is built: for
small layers autograd costs as much as the products
(docs/decisions/0004-layer-rules-go-back-by-hand.md). A function without a rule is batched by
torch.func, and autograd differentiates only that function.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from bayesfl.base.addressed import bernoulli
from bayesfl.engine.network import Rows, Shares
from bayesfl.engine.recording import Operation, filled

aten = torch.ops.aten


class Call(NamedTuple):
    """Describe a call of a rule.

    Args:
        wanted: For each tensor among the arguments, whether a slope at it is needed.
        into: For each, the buffer for its slope; None for no buffer.
        lifted: For each, whether it has an axis of draws after that of the clients.
        rows: The clients' rows, and the addresses of their draws.
        draw: Number of earlier random draws in the forward pass; None for a function without
            draws.
        draws: Number of draws of weights in the forward pass.
    """

    wanted: tuple[bool, ...]
    into: tuple[Tensor | None, ...]
    lifted: tuple[bool, ...]
    rows: Rows
    draw: int | None
    draws: int


Slopes: TypeAlias = Sequence[Tensor | None]
Backward: TypeAlias = Callable[[Tensor], Slopes]
Rule: TypeAlias = Callable[..., tuple[Tensor, Backward]]


def linear(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Backward]:
    """Compute `F.linear`, as one batched product."""
    drawn, lifted = call.lifted[1], call.lifted[0]
    if bias is not None and call.lifted[2] != drawn:
        return at_draws(linear)(call, x, weight, bias)
    lead, shape = x.shape[:-1], weight.shape
    # Every case is one batched matrix product. If only the weights have S draws, these count as S *
    # o outputs; if only the inputs have draws, as S times the rows; if both have draws, the batch
    # has C * S products.
    both, wide = drawn and lifted, drawn and not lifted
    if both:
        x, weight = x.flatten(0, 1), weight.flatten(0, 1)
        bias = None if bias is None else bias.flatten(0, 1)
    elif wide:
        weight, bias = weight.flatten(1, 2), None if bias is None else bias.flatten(1, 2)
    x = x.flatten(1, -2) if x.dim() > 3 else x
    flat = (
        torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    )
    outputs = (
        flat.unflatten(-1, shape[1:3]).transpose(1, 2).unflatten(2, lead[1:])
        if wide
        else flat.view(*lead, -1)
    )

    def back(slope: Tensor) -> Slopes:
        slope = slope.flatten(2, -2).transpose(1, 2) if wide else slope
        slope = slope.reshape(flat.shape) if slope.shape != flat.shape or wide else slope
        found: list[Tensor | None] = [None] * len(call.wanted)
        if call.wanted[0]:
            found[0] = torch.bmm(slope, weight).view(*lead, -1)
        if call.wanted[1]:  # written in place, except for draws, whose product differs in shape
            product = torch.bmm(slope.mT, x, out=None if drawn else call.into[1])
            found[1] = product.view(shape) if drawn else product
        if bias is not None and call.wanted[2]:
            total = torch.sum(slope, 1, out=None if drawn else call.into[2])
            found[2] = total.view(shape[:-1]) if drawn else total
        return found

    return outputs, back


def convolution(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> tuple[Tensor, Backward]:
    """Compute `F.conv1d`, `F.conv2d` or `F.conv3d`."""
    axes = x.dim() - 3
    strides, spaces = _each(stride, axes), _each(dilation, axes)
    if isinstance(padding, str):
        missing = [d * (k - 1) for d, k in zip(spaces, weight.shape[3:], strict=True)]
        padding = tuple(m // 2 if padding == "same" else 0 for m in missing)
    options = (strides, _each(padding, axes), spaces)
    return _convolved(call, x, weight, bias, options, groups, grouped=x.is_cuda)


def _convolved(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: tuple[list[int], list[int], list[int]],
    groups: int,
    *,
    grouped: bool,
) -> tuple[Tensor, Backward]:
    """Convolve for one client after another, which is faster on a CPU, or for all at once, with
    groups.
    """
    clients, batch = x.shape[:2]
    axes = x.dim() - 3
    if grouped:
        rows = (
            [x.transpose(0, 1).flatten(1, 2)],
            [weight.flatten(0, 1)],
            [None if bias is None else bias.flatten()],
        )
    else:
        rows = x.unbind(), weight.unbind(), [None] * clients if bias is None else bias.unbind()
    groups = clients * groups if grouped else groups

    def by_client(parts: Sequence[Tensor]) -> Tensor:
        # [B, C * o, ...] once, or [B, o, ...] for each.
        return (
            parts[0].unflatten(1, (clients, -1)).transpose(0, 1)
            if grouped
            else _joined(parts).unflatten(0, (clients, batch))
        )

    def back(slope: Tensor) -> Slopes:
        each = [slope.transpose(0, 1).flatten(1, 2)] if grouped else slope.unbind()
        mask = [*call.wanted, False][:3]
        parts = [
            aten.convolution_backward(s, i, w, [len(w)], *options, False, [0] * axes, groups, mask)
            for s, i, w in zip(each, rows[0], rows[1], strict=True)
        ]
        into, *found = zip(*parts, strict=True)
        slopes: list[Tensor | None] = [by_client(into) if mask[0] else None]
        for like, values, wanted in zip((weight, bias), found, mask[1:], strict=True):
            if like is not None:
                slopes.append(_joined(values).view(like.shape) if wanted else None)
        return slopes

    outputs = by_client(
        [
            aten.convolution(*row, *options, False, [0] * axes, groups)
            for row in zip(*rows, strict=True)
        ]
    )
    return outputs, back


def _each(value: Any, axes: int) -> list[int]:
    """Return an option of a convolution or a pooling for each axis."""
    return [value] * axes if isinstance(value, int) else [int(v) for v in value]


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def batch_norm(
    call: Call,
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Backward]:
    """Compute `F.batch_norm`: for every client from the rows of its own batch without padding; from
    the running statistics outside training, and for a client with one value for each channel.

    New statistics overwrite the old ones, as many times as there are draws of weights.
    """
    statistics = running_mean, running_var
    found, back, new = _normed(call.rows, x, *statistics, weight, bias, training, eps)
    for to, (value, several) in zip(statistics, new, strict=False):
        for _ in range(call.draws):
            to.lerp_(value, momentum if several is None else momentum * several)
    return found, back


def batch_norm_at_draws(
    call: Call,
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Backward]:
    """Compute the same if tensors have draws; the running statistics, [C, F] or [C, M, F] for M
    copies, are updated with one draw after another.
    """
    draws, clients = call.draws, len(x)
    copies = [
        t if up else t.unsqueeze(1)
        for t, up in zip((running_mean, running_var), call.lifted[1:3], strict=True)
    ]
    which = torch.arange(draws, device=x.device) % copies[0].shape[1]
    scale, shift = (
        None if t is None else _spread(t, up, draws)
        for t, up in zip((weight, bias), (*call.lifted[3:], False, False), strict=False)
    )
    rows = call.rows
    every = None if rows.weight is None else _spread(rows.weight, False, draws)
    found, back, new = _normed(
        Rows(every),
        _spread(x, call.lifted[0], draws),
        copies[0][:, which].flatten(0, 1),
        copies[1][:, which].flatten(0, 1),
        scale,
        shift,
        training,
        eps,
    )
    for to, (value, several) in zip(copies, new, strict=False):
        pace = momentum if several is None else momentum * several[::draws]
        for s, of_draw in enumerate(value.unflatten(0, (clients, draws)).unbind(1)):
            to[:, s % to.shape[1]].lerp_(of_draw, pace)

    def gathered(slope: Tensor) -> Slopes:
        slopes = zip(back(slope.flatten(0, 1)), call.lifted, strict=True)
        return [None if t is None else _gathered(t, up, draws) for t, up in slopes]

    return found.unflatten(0, (clients, draws)), gathered


def _normed(
    rows: Rows,
    x: Tensor,
    old_mean: Tensor,
    old_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
) -> tuple[Tensor, Backward, Sequence[tuple[Tensor, Tensor | None]]]:
    """Return x [N, B, F, ...] normalised for each client and channel, the backward pass, and new
    statistics [N, F] with the mask `Shares.several`; no statistics outside training.
    """
    flat = x.flatten(3) if x.dim() > 3 else x
    places = flat.shape[3] if flat.dim() == 4 else 1

    def total(t: Tensor) -> Tensor:  # [N, B, F]
        return t if t.dim() == 3 else t.sum(3)

    def wide(t: Tensor) -> Tensor:  # [N, F], shaped to broadcast against x
        return t.unsqueeze(1) if flat.dim() == 3 else t[:, None, :, None]

    def of_batch(t: Tensor, shares: Shares, old: Tensor) -> Tensor:
        found = torch.bmm(shares.each.unsqueeze(1), total(t)).squeeze(1)
        return found if shares.several is None else torch.where(shares.several > 0, found, old)

    mean, var, new = old_mean, old_var, []
    shares = rows.shares(flat, places) if training else None
    mean = of_batch(flat, shares, old_mean) if shares is not None else mean
    centred = flat - wide(mean)
    if shares is not None:
        var = of_batch(centred.square(), shares, old_var)
        new = [(mean, shares.several), (var * shares.unbiased, shares.several)]
    inverse = wide((var + eps).rsqrt())
    normed = centred * inverse
    scale = None if weight is None else wide(weight)
    outputs = _affine(normed, scale, None if bias is None else wide(bias))

    def back(slope: Tensor) -> Slopes:
        slope = slope.view(flat.shape) if slope.is_contiguous() else slope.reshape(flat.shape)
        by_scale, by_shift = total(slope * normed).sum(1), total(slope).sum(1)
        at_x = slope
        if shares is not None:
            pulled = torch.addcmul(wide(by_shift), normed, wide(by_scale))
            of = shares.each.view(*shares.each.shape, *[1] * (flat.dim() - 2))
            at_x = torch.addcmul(slope, of, pulled, value=-1)
        at_x = at_x * (inverse if scale is None else inverse * scale)
        affine = [by_scale] * (weight is not None) + [by_shift] * (bias is not None)
        return [at_x.view(x.shape), None, None, *affine]

    return outputs.view(x.shape), back, new


def layer_norm(
    call: Call,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Backward]:
    """Compute `F.layer_norm`."""
    size = list(normalized_shape)
    x = x.contiguous()
    normed, mean, inverse = aten.native_layer_norm(x, size, None, None, eps)
    scale, shift = (None if t is None else _over(t, x) for t in (weight, bias))

    def back(slope: Tensor) -> Slopes:
        inner = slope if scale is None else slope * scale
        at_x = aten.native_layer_norm_backward(
            inner.contiguous(), x, size, mean, inverse, None, None, [True, False, False]
        )[0]
        axes = tuple(range(1, x.dim() - len(size)))
        return [at_x, *_by_affine(slope, normed, weight, bias, axes)]

    return _affine(normed, scale, shift), back


def group_norm(
    call: Call,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Backward]:
    """Compute `F.group_norm`."""
    flat = x.flatten(0, 1).contiguous()
    sizes = (len(flat), flat.shape[1], flat[0, 0].numel(), num_groups)
    found, mean, inverse = aten.native_group_norm(flat, None, None, *sizes, eps)
    normed = found.view(x.shape)
    along = (1, x.shape[2], *[1] * (x.dim() - 3))
    scale, shift = (None if t is None else t.view(len(t), *along) for t in (weight, bias))

    def back(slope: Tensor) -> Slopes:
        inner = slope if scale is None else slope * scale
        at_x = aten.native_group_norm_backward(
            inner.reshape(flat.shape).contiguous(),
            flat,
            mean,
            inverse,
            None,
            *sizes,
            [True, False, False],
        )[0]
        axes = (1, *range(3, x.dim()))
        return [at_x.view(x.shape), *_by_affine(slope, normed, weight, bias, axes)]

    return _affine(normed, scale, shift), back


def _affine(normed: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is None:
        return normed
    return normed * scale if shift is None else torch.addcmul(shift, normed, scale)


def _by_affine(
    slope: Tensor,
    normed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: tuple[int, ...],
) -> list[Tensor | None]:
    """Return the slopes at a norm's weight and bias, which broadcast over some axes."""
    return [
        *([] if weight is None else [(slope * normed).sum(axes)]),
        *([] if bias is None else [slope.sum(axes)]),
    ]


def _over(t: Tensor, like: Tensor) -> Tensor:
    """Return a client's tensor [C, ...] with axes of size 1 inserted after the first, until it has
    as many axes as `like`.
    """
    return t.view(len(t), *[1] * (like.dim() - t.dim()), *t.shape[1:])


def embedding(
    call: Call,
    x: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, Backward]:
    """Compute `F.embedding`: rows of each client's own table."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("embeddings with max_norm, scale_grad_by_freq or sparse")
    clients, entries, width = weight.shape
    if int(x.min()) < 0 or int(x.max()) >= entries:  # these would be rows of another client
        raise IndexError("index out of range in self")  # torch's own message
    first = torch.arange(0, clients * entries, entries, device=x.device)
    places = (x + first.view(-1, *[1] * (x.dim() - 1))).flatten()
    outputs = weight.reshape(-1, width).index_select(0, places).view(*x.shape, width)

    def back(slope: Tensor) -> Slopes:
        at = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        at.view(-1, width).index_add_(0, places, slope.reshape(-1, width))
        if padding_idx is not None:
            at[:, padding_idx] = 0
        return [None, at]

    return outputs, back


def dropout(
    call: Call, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, Backward]:
    """Compute `F.dropout` with the draws at each client's own address; its draws of weights share
    the mask.
    """
    return _dropped(call, x, p, training, x.shape[2 + call.lifted[0] :])


def feature_dropout(
    call: Call, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, Backward]:
    """Compute `F.dropout1d`, `F.dropout2d` or `F.dropout3d`, which drop whole channels."""
    channels, *places = x.shape[2 + call.lifted[0] :]
    return _dropped(call, x, p, training, (channels, *[1] * len(places)))


def _dropped(
    call: Call, x: Tensor, p: float, training: bool, shape: Sequence[int]
) -> tuple[Tensor, Backward]:
    if not training or p == 0:
        return x, lambda slope: [slope]
    lifted = call.lifted[0]
    if p == 1:
        factor = x.new_zeros(())
    else:
        assert call.rows.keys is not None
        assert call.draw is not None
        size, draw = (x.shape[1 + lifted], *shape), call.rows.start + call.draw
        kept = bernoulli(call.rows.keys, draw, size, 1 - p, x.device)
        factor = kept.to(x.dtype).mul_(1 / (1 - p))
        factor = factor.unsqueeze(1) if lifted else factor
    return x * factor, lambda slope: [slope * factor]


def max_pool2d(
    call: Call,
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Backward]:
    """Compute `F.max_pool2d`."""
    size = _each(kernel_size, 2)
    stride = size if stride is None or stride == [] else _each(stride, 2)
    padding, dilation = _each(padding, 2), _each(dilation, 2)
    flat, lead = x.flatten(0, 1), x.shape[:2]
    sizes = (size, stride, padding, dilation, ceil_mode)
    pairs = (
        size == stride == [2, 2]
        and padding == [0, 0]
        and dilation == [1, 1]
        and not ceil_mode
        and not x.is_cuda
    )
    outputs, places = _halved(flat) if pairs else aten.max_pool2d_with_indices(flat, *sizes)

    def back(slope: Tensor) -> Slopes:
        where = places() if callable(places) else places
        into = aten.max_pool2d_with_indices_backward(slope.flatten(0, 1), flat, *sizes, where)
        return [into.unflatten(0, lead)]

    return outputs.unflatten(0, lead), back


def _halved(x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Take maxima over windows of 2 x 2 that do not overlap, first along rows, then along columns:
    on a CPU much faster than torch's function.

    Returns the maxima and a function that returns their places in [H, W]; among equal values the
    first in reading order is selected, as in torch.
    """
    height, width = x.shape[-2:]
    left, right = x[..., : height // 2 * 2, 0 : width // 2 * 2 : 2], x[..., : height // 2 * 2, 1::2]
    across = torch.maximum(left, right)
    top, bottom = across[..., 0::2, :], across[..., 1::2, :]

    def places() -> Tensor:
        second, lower = left < right, top < bottom
        above, below = second[..., 0::2, :], second[..., 1::2, :]
        across = above ^ ((above ^ below) & lower)  # torch.where is slow for bools
        corner = torch.arange(0, height - 1, 2, device=x.device).unsqueeze(
            -1
        ) * width + torch.arange(0, width - 1, 2, device=x.device)
        return torch.add(corner + across, lower, alpha=width)

    return torch.maximum(top, bottom), places


def flatten(
    call: Call, x: Tensor, start_dim: int = 0, end_dim: int = -1
) -> tuple[Tensor, Backward]:
    """Compute `torch.flatten`."""
    start, end = (d + 1 if d >= 0 else d for d in (start_dim, end_dim))
    return x.flatten(start, end), lambda slope: [slope.reshape(x.shape)]


def reshape(call: Call, x: Tensor, *shape: Any) -> tuple[Tensor, Backward]:
    """Compute `torch.reshape` and `Tensor.view`."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return x.reshape(len(x), *sizes), lambda slope: [slope.reshape(x.shape)]


def cat(call: Call, tensors: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, Backward]:
    """Compute `torch.cat`."""
    dim = dim + 1 if dim >= 0 else dim
    sizes = [t.shape[dim] for t in tensors]
    return torch.cat(list(tensors), dim), lambda slope: slope.split(sizes, dim)


def _elementwise(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor], *, by_output: bool = False
) -> Rule:
    """Return the rule of an elementwise function, whose backward pass needs the slope, the input
    (or the output) and the function's options; arguments are those of `forward`.
    """

    @wraps(forward)
    def rule(call: Call, x: Tensor, *options: Any) -> tuple[Tensor, Backward]:
        outputs = forward(call, x, *options)
        at = outputs if by_output else x
        return outputs, lambda slope: [backward(slope, at, *options)]

    return rule


def _pair(function: Callable[[Any, Any], Tensor], slopes: Callable[..., Slopes]) -> Rule:
    """Return the rule of a function of two tensors that broadcast, or of a tensor and a number.

    Args:
        function: The function.
        slopes: (slope, one, other) -> the slopes at both, before they are summed over axes along
            which a tensor was broadcast.
    """

    def rule(call: Call, one: Any, other: Any) -> tuple[Tensor, Backward]:
        axes = max(t.dim() for t in (one, other) if isinstance(t, Tensor))
        wide = [
            t.view(len(t), *[1] * (axes - t.dim()), *t.shape[1:]) if isinstance(t, Tensor) else t
            for t in (one, other)
        ]
        outputs = function(*wide)

        def back(slope: Tensor) -> Slopes:
            found = zip(slopes(slope, *wide), (one, other), wide, strict=True)
            return [
                s.sum_to_size(w.shape).view(t.shape)
                for s, t, w in found
                if s is not None and isinstance(t, Tensor)
            ]

        return outputs, back

    return rule


def batched(step: Operation) -> Rule:
    """Return the rule of any function without draws: torch.func batches it, and autograd
    differentiates only that function.
    """
    function = _out_of_place(step.function)

    def rule(
        call: Call, *tensors: Tensor, rows: int, precision: torch.dtype
    ) -> tuple[Tensor, Backward]:
        def one(*tensors: Tensor) -> Tensor:
            args, named = filled((step.args, step.named), iter(tensors), rows, precision)
            found = function(*args, **named)
            return found if step.piece is None else found[step.piece]

        if not any(call.wanted):
            with torch.no_grad():
                return vmap(one)(*tensors), lambda slope: [None] * len(tensors)
        with torch.enable_grad():
            live = [
                t.detach().requires_grad_() if want else t
                for t, want in zip(tensors, call.wanted, strict=True)
            ]
            outputs = vmap(one)(*live)

        def back(slope: Tensor) -> Slopes:
            ends = [t for t, want in zip(live, call.wanted, strict=True) if want]
            found = iter(torch.autograd.grad(outputs, ends, slope, materialize_grads=True))
            return [next(found) if want else None for want in call.wanted]

        return outputs.detach(), back

    return rule


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the out-of-place variant of a function that modifies its first argument."""
    name = getattr(function, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        name = f"__{name[3:]}"
    elif not name.startswith("_") and name.endswith("_"):
        name = name[:-1]
    else:
        return function
    return getattr(Tensor, name, function)


def _pooling(function: Callable[..., Tensor]) -> Rule:
    """Return the rule of a function with one axis of examples, with autograd."""

    def rule(call: Call, x: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Backward]:
        with torch.enable_grad():
            live = x.detach().requires_grad_(call.wanted[0])
            outputs = function(live.flatten(0, 1), *args, **named).unflatten(0, x.shape[:2])
        return outputs.detach(), lambda slope: torch.autograd.grad(outputs, [live], slope)

    return rule


def _spread(t: Tensor, has: bool, draws: int) -> Tensor:
    """Reshape [C, S, ...] to a chunk of C * S clients; a tensor without an axis of draws is
    repeated first.
    """
    return (t if has else t.unsqueeze(1).expand(-1, draws, *t.shape[1:])).flatten(0, 1)


def _gathered(t: Tensor, has: bool, draws: int) -> Tensor:
    """Reshape slopes of a chunk of C * S clients to [C, S, ...]; for tensors that were repeated,
    return the sum over draws.
    """
    t = t.unflatten(0, (-1, draws))
    return t if has else t.sum(1)


def at_draws(rule: Rule) -> Rule:
    """Return a rule for tensors some of which have an axis of draws: it treats the draws of C
    clients as C * S clients.
    """

    def spread(call: Call, *args: Any, **named: Any) -> tuple[Tensor, Backward]:
        lifted, draws = iter(call.lifted), call.draws
        wide = _changed(args, lambda t: _spread(t, next(lifted), draws))
        inner, back = rule(
            call._replace(into=(None,) * len(call.into), lifted=(False,) * len(call.lifted)),
            *wide,
            **named,
        )

        def gathered(slope: Tensor) -> Slopes:
            found = zip(back(slope.flatten(0, 1)), call.lifted, strict=True)
            return [None if t is None else _gathered(t, up, draws) for t, up in found]

        return inner.unflatten(0, (-1, draws)), gathered

    return spread


def _changed(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_changed(part, function) for part in value)
    return value


RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution),
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.embedding: embedding,
    F.dropout: dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), feature_dropout),
    F.max_pool2d: max_pool2d,
    **{f: _pooling(f) for f in (F.avg_pool2d, F.adaptive_avg_pool2d, F.avg_pool1d)},
    **dict.fromkeys((torch.flatten, Tensor.flatten), flatten),
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view), reshape),
    **dict.fromkeys((torch.cat, torch.concat), cat),
    **dict.fromkeys(
        (F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_),
        _elementwise(
            lambda call, x, inplace=False: torch.relu(x),
            lambda slope, outputs, _: aten.threshold_backward(slope, outputs, 0),
            by_output=True,
        ),
    ),
    F.gelu: _elementwise(
        lambda call, x, approximate="none": F.gelu(x, approximate=approximate),
        lambda slope, x, approximate: aten.gelu_backward(slope, x, approximate=approximate),
    ),
    F.silu: _elementwise(
        lambda call, x, inplace=False: F.silu(x), lambda slope, x, _: aten.silu_backward(slope, x)
    ),
    F.leaky_relu: _elementwise(
        lambda call, x, negative_slope=0.01, inplace=False: F.leaky_relu(x, negative_slope),
        lambda slope, x, below, _: aten.leaky_relu_backward(slope, x, below, False),
    ),
    F.elu: _elementwise(
        lambda call, x, alpha=1.0, inplace=False: F.elu(x, alpha),
        lambda slope, x, alpha, _: aten.elu_backward(slope, alpha, 1.0, 1.0, False, x),
    ),
    **dict.fromkeys(
        (torch.tanh, Tensor.tanh, F.tanh),
        _elementwise(lambda call, x: torch.tanh(x), aten.tanh_backward, by_output=True),
    ),
    **dict.fromkeys(
        (torch.sigmoid, Tensor.sigmoid, F.sigmoid),
        _elementwise(lambda call, x: torch.sigmoid(x), aten.sigmoid_backward, by_output=True),
    ),
    **dict.fromkeys((Tensor.detach, torch.detach), _elementwise(lambda call, x: x, lambda s, x: s)),
    **dict.fromkeys(
        (torch.add, Tensor.add, Tensor.add_, Tensor.__iadd__),
        _pair(torch.add, lambda slope, one, other: [slope, slope]),
    ),
    **dict.fromkeys(
        (torch.sub, Tensor.sub), _pair(torch.sub, lambda slope, one, other: [slope, -slope])
    ),
    Tensor.__rsub__: _pair(lambda a, b: torch.sub(b, a), lambda slope, a, b: [-slope, slope]),
    **dict.fromkeys(
        (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__imul__),
        _pair(torch.mul, lambda slope, one, other: [slope * other, slope * one]),
    ),
}
"""The rules by function; other functions are `batched`."""
LIFTING: dict[Rule, Rule] = {
    batch_norm: batch_norm_at_draws,
    **{rule: rule for rule in (linear, dropout, feature_dropout)},
    **{rule: rule for rule in RULES.values() if hasattr(rule, "__wrapped__")},
}
"""Rules for tensors some of which have an axis of draws, by the rule without draws; for others see
`at_draws`.
"""
