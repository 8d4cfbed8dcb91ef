"""The live kernel, which runs the module itself, one client after another.

It is for modules that no rule supports, and for larger CNNs on a CPU, where the activations of two
clients exceed the cache.

Convolutions run in channels-last memory if they are not large.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, count, each
from bayesfl.engine.network import Rows, by_autograd
from bayesfl.models.weights import call_at

COPIED = 1_000_000
"""Number of convolution weights above which copying them in every step costs more than the other
memory layout saves (ResNet-18).
"""


def has_convolutions(module: nn.Module) -> bool:
    """Return whether the module has convolutions, whose speed depends on the memory layout."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


Known: TypeAlias = tuple[dict[str, int], Callable[[Tensor], Tensor]]
_KNOWN: "weakref.WeakKeyDictionary[nn.Module, Known]" = weakref.WeakKeyDictionary()


def _known(module: nn.Module) -> Known:
    """Return cached properties of a module for its steps: the number of axes of each parameter and
    buffer, and the function that converts weights and inputs to the memory layout of its
    convolutions.
    """
    if module not in _KNOWN:
        axes = {name: t.dim() for name, t in (*module.named_parameters(), *module.named_buffers())}
        weights = sum(p.numel() for p in module.parameters() if p.dim() == 4)
        _KNOWN[module] = axes, _channels_last if weights <= COPIED else lambda t: t
    return _KNOWN[module]


def _forward(
    module: nn.Module, leaves: dict[str, Tensor], x: Inputs, lifted: bool, rows: Rows
) -> tuple[Tensor, bool]:
    axes, placed = _known(module)
    leaves = {name: leaf.squeeze(0) for name, leaf in leaves.items()}
    drawn = {name: leaf for name, leaf in leaves.items() if leaf.dim() > axes[name]}
    fixed = {name: placed(leaf) for name, leaf in leaves.items() if name not in drawn}
    x = each(lambda t: t.squeeze(0), x)
    if not drawn and not lifted:
        x = each(placed, x)
        with _drawing(rows):
            return call_at(module, fixed, x).unsqueeze(0), False
    draws = count(x) if lifted else max(len(leaf) for leaf in drawn.values())
    out = []
    for s in range(draws):
        # Statistics have a row for each copy, not for each draw.
        weights = fixed | {name: placed(leaf[s % len(leaf)]) for name, leaf in drawn.items()}
        own = each(lambda t, s=s: placed(t[s] if lifted else t), x)
        with _drawing(rows):  # the same dropout for each draw
            out.append(call_at(module, weights, own))
    return torch.stack(out).unsqueeze(0), True


def _drawing(rows: Rows) -> AbstractContextManager[Any]:
    """Return the context that gives a client's draws their address."""
    return nullcontext() if rows.keys is None else Addressed(rows.keys[0], rows.start)


def _channels_last(t: Tensor) -> Tensor:
    # A convolution selects its memory layout by strides, which `contiguous` does not change for a
    # single channel.
    return t.to(memory_format=torch.channels_last, copy=True) if t.dim() == 4 else t


kernel = by_autograd(_forward)
