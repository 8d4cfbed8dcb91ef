"""Behaviour of a module in training alone: norms that follow the statistics of batches, and random
draws.
"""

import threading
import weakref
from typing import Any

from torch import Tensor, nn

from bayesfl.models.copies import copied

STATISTICS = ("running_mean", "running_var")
"""Names of a norm's buffers that follow the batches."""

_LOCK = threading.RLock()
_COPIES: "weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[threading.Thread, nn.Module]]]" = (
    weakref.WeakKeyDictionary()
)
"""The copies of a module, by precision, device and mode, and by the thread that has each."""
_TWINS: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], bool]]" = (
    weakref.WeakKeyDictionary()
)


def norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the norms, by name, that follow the statistics of batches, which those in evaluation
    mode do not.
    """
    kind = nn.modules.batchnorm._NormBase
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, kind) and part.training and part.running_mean is not None
    }


def trainable(name: str, part: nn.Module) -> list[str]:
    """Return the names, in the whole module, of the trainable parameters that its part `name` has
    itself.
    """
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
    """Return the parts that training mode may change, by name, of a module of which no part is in
    it, as `eval()` leaves it.

    They are norms with statistics, layers with draws, and modules of the user's own classes, whose
    forward may ask for the mode.
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
            copies[me] = made.to(dtype=like.dtype, device=like.device).requires_grad_(False)
            for part, own in zip(module.modules(), made.modules(), strict=True):
                _TWINS[own] = weakref.ref(part), train
        return copies[me]


def twin(part: nn.Module) -> tuple[nn.Module, bool | None]:
    """Return the module of which `own_copy` made a module or a part of one, and whether to train;
    of another module itself and None.
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
