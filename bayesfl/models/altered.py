"""Alterations of a module, which then computes something else than its layers one after another:
hooks, replaced methods, shared parameters.
"""

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

from bayesfl.base.layout import aliases
from bayesfl.models.cutting import SplitModel

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.GroupNorm, nn.LayerNorm, nn.Embedding)


def altered(module: nn.Module) -> list[str]:
    """Name the alterations that rules for single layers would miss; empty if a stack computes its
    layers one after another.

    Alterations are hooks, a `forward` replaced on an instance, parameters used in two places, and
    weights or biases of layers that are no parameters.
    """
    out = [
        f"{type(part).__name__} {name!r} with {what}"
        for name, part in module.named_modules()
        for what in _marks(part)
    ]
    if shared := aliases(module):
        out.append(f"parameters used in two places, {sorted(next(iter(shared.values())))}")
    return out


def cut(module: nn.Module) -> TypeGuard[SplitModel]:
    """Return whether a module is computed as `head(body(x))`: a `SplitModel` with the forward of
    its class, whose parts share no parameter.
    """
    if (
        not isinstance(module, SplitModel)
        or type(module).forward is not SplitModel.forward
        or any(_marks(module))
    ):
        return False
    return not {id(p) for p in module.body.parameters()} & {id(p) for p in module.head.parameters()}


def _marks(module: nn.Module) -> Iterator[str]:
    """Name the alterations of a module itself, without its children."""
    if any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ):
        yield "hooks"
    if "forward" in vars(module):
        yield "a forward of its own"
    if type(module) in _LAYERS:
        own = {name for name, _ in module.named_parameters(recurse=False)}
        for name in ("weight", "bias"):
            if getattr(module, name, None) is not None and name not in own:
                yield f"a {name} that is no parameter"
