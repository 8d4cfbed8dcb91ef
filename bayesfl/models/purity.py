"""Refusing models that draw random numbers or update their buffers in training, and wrappers that hide the model."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm


def refuse_impure(model: nn.Module) -> None:
    """Raise ValueError, naming the module, if one draws its own randomness in training, updates its buffers, or cannot be run here."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"model is a {type(model).__name__}; pass the module inside, model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("model is a compiled ScriptModule, whose parameters cannot be exchanged; pass the module before torch.jit")
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"parameters {empty[:3]} are on the device 'meta' and hold no numbers; load the weights first")
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a gradient hook, which is not run here; to train a part of a weight alone, multiply it by a mask "
                "in forward"
            )
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and any(p.requires_grad for p in module.parameters(recurse=False)):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) rescales its rows in place whenever they are read (max_norm), also to predict; "
                "pass max_norm=None"
            )
        if getattr(module, "sparse", False) is True:
            raise ValueError(f"module {name!r} ({type(module).__name__}) has sparse gradients, which are not used here; pass sparse=False")
        if not module.training:
            continue
        if isinstance(module, _SpectralNorm):
            raise ValueError(
                f"module {name!r} (spectral norm) updates its buffers in training, and buffers are constants here; put it in eval mode"
            )
        dropout = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(module, nn.RReLU) or (isinstance(dropout, float) and dropout > 0):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) draws its own randomness in training, which no address could repeat; "
                "remove it, set its probability to 0, or put it in eval mode"
            )
        batch = isinstance(module, nn.modules.batchnorm._BatchNorm)  # even without running statistics it would use padded rows
        if batch or (isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) updates its buffers in training, and buffers are constants here; "
                "use nn.GroupNorm instead, or put it in eval mode"
            )
