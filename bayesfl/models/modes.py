"""Behaviour of a module in training alone: norms that follow the statistics of batches, and random
draws.
"""

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bayesfl.models.copies import copied

STATISTICS = ("running_mean", "running_var")
"""Names of a norm's buffers that follow the batches."""
HALF = (torch.float16, torch.bfloat16)
"""Precisions of frozen layers only; no parameter is trained in them."""

_LOCK = threading.RLock()
_COPIES: "weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[threading.Thread, nn.Module]]]" = (
    weakref.WeakKeyDictionary()
)
"""The copies of a module, by precision, device and mode, and by the thread that has each."""
_TWINS: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], bool]]" = (
    weakref.WeakKeyDictionary()
)


def norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the norms in training mode, by name, that follow the statistics of batches."""
    kind = nn.modules.batchnorm._NormBase
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, kind) and part.training and part.running_mean is not None
    }


def trainable(name: str, part: nn.Module) -> list[str]:
    """Return the full names of the trainable parameters of a part itself."""
    return [
        f"{name}.{leaf}".removeprefix(".")
        for leaf, p in part.named_parameters(recurse=False)
        if p.requires_grad
    ]


def rate(part: nn.Module) -> float:
    """Return a layer's own rate of dropout; 1 for a layer that always draws."""
    if isinstance(part, nn.RReLU):
        return 1.0
    rate = (
        part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    )
    return float(rate) if isinstance(rate, float | int) and not isinstance(rate, bool) else 0.0


def asleep(module: nn.Module) -> list[str]:
    """Return the parts, by name, that training mode may change, of a module after `eval()`; empty
    if a part is in training mode.

    They are norms with statistics, layers with draws, and modules of the user's own classes, whose
    forward may read the mode.
    """
    parts = {
        name: part
        for name, part in module.named_modules()
        if not type(part).__module__.startswith("bayesfl.")
    }
    if any(part.training for part in parts.values()):
        return []
    follows = nn.modules.batchnorm._NormBase
    return [
        name or type(part).__name__
        for name, part in parts.items()
        if rate(part) > 0
        or (isinstance(part, follows) and part.running_mean is not None)
        or not type(part).__module__.startswith(("torch.", "torchvision."))
    ]


def in_training(module: nn.Module) -> nn.Module:
    """Return a copy for training, in the module's own modes; norms use their statistics where a
    batch has one value for each channel.

    torch refuses such batches, as the last one of a pass may be.
    """
    made = copied(module)
    for part in norms(made).values():
        part.register_forward_pre_hook(_mode, with_kwargs=True)
        part.register_forward_hook(_restored, always_call=True)
    return made


def _mode(norm: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    norm.__dict__["_modes"] = [norm.training]  # which the forward of the whole may have set
    if not norm.training:
        return
    x: Tensor = args[0] if args else named["input"]
    channels = x.shape[1] if x.dim() > 1 else 1
    spread = isinstance(norm, nn.modules.instancenorm._InstanceNorm)
    norm.training = x.numel() // channels // (len(x) if spread else 1) > 1


def _restored(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    (norm.training,) = norm.__dict__.pop("_modes")


def own_copy(module: nn.Module, like: Tensor, *, train: bool = False) -> nn.Module:
    """Return this thread's own copy of a module, in the precision and on the device of `like`,
    without gradients of its own; one that a thread has left behind, or else a new one.

    Layers in `halved` keep their precision, and share the module's memory on its device.

    It is in evaluation mode, or, to `train`, as `in_training` makes it.
    """
    me, key = threading.current_thread(), (like.dtype, like.device, train)
    with _LOCK:
        copies = _COPIES.setdefault(module, {}).setdefault(key, {})
        left = next((thread for thread in copies if not thread.is_alive()), None)
        if me not in copies and left is not None:
            copies[me] = copies.pop(left)
        elif me not in copies:
            made = in_training(module) if train else copied(module).eval()
            copies[me] = _moved(made, like).requires_grad_(False)
            for part, own in zip(module.modules(), made.modules(), strict=True):
                _TWINS[own] = weakref.ref(part), train
        return copies[me]


def halved(module: nn.Module) -> list[nn.Module]:
    """Return the layers in half precision without trained parameters of their own, except norms
    with statistics.
    """
    layers = [(part, [*part.parameters(recurse=False)]) for part in module.modules()]
    return [
        part
        for part, own in layers
        if any(p.dtype in HALF for p in own)
        and not any(p.requires_grad for p in own)
        and not isinstance(part, nn.modules.batchnorm._NormBase)
    ]


def _moved(module: nn.Module, like: Tensor) -> nn.Module:
    """Move a module to the precision and the device of `like`.

    Layers in `halved` are only moved to the device: they compute in their own precision, and return
    that of `like`.
    """
    half = halved(module)
    for part in module.modules():
        for t in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            fixed = part in half or not t.is_floating_point()
            t.data = t.data.to(like.device, None if fixed else like.dtype)
    for part in half:
        part.register_forward_pre_hook(_given, with_kwargs=True)
        part.register_forward_hook(partial(_returned, like.dtype))
    return module


def _given(part: nn.Module, args: Any, named: Any) -> Any:
    own = next(part.parameters(recurse=False)).dtype
    return tree_map(partial(_cast, own), (args, named))


def _returned(dtype: torch.dtype, part: nn.Module, args: Any, outputs: Any) -> Any:
    if next(part.parameters(recurse=False)).dtype not in HALF:  # moved since
        return outputs
    return tree_map(partial(_cast, dtype), outputs)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if real else value


def twin(part: nn.Module) -> tuple[nn.Module, bool | None]:
    """Return the origin of a module or a part that `own_copy` made, and whether it was made for
    training; for another module itself and None.
    """
    origin, key = _TWINS.get(part, (None, None))
    return (origin and origin()) or part, key


def check_norms(module: nn.Module) -> None:
    """Check that norms in training mode keep statistics that a federation can average.

    Raises:
        ValueError: One keeps none, so that it mixes the rows of every batch, or has a cumulative
            average, whose weight depends on the number of batches that all clients have seen.
    """
    for name, part in module.named_modules():
        if not isinstance(part, nn.modules.batchnorm._NormBase) or not part.training:
            continue
        if part.running_mean is not None and part.momentum is None:
            fault = (
                "has momentum=None, a cumulative average over the batches that it has seen, which "
                "clients that average their statistics do not have in common; pass a number, as "
                "momentum=0.1"
            )
        elif part.running_mean is None and isinstance(part, nn.modules.batchnorm._BatchNorm):
            fault = (
                "tracks no statistics, so that an example's outputs depend on the others of its "
                "batch, also to predict; pass track_running_stats=True, or take nn.GroupNorm"
            )
        else:
            continue
        raise ValueError(f"module {name!r} ({type(part).__name__}) {fault}")
