"""Refusing models that draw random numbers or update their buffers in training, and wrappers that hide the model."""

import torch
from torch import nn


def refuse_impure(model: nn.Module) -> None:
    """Raise ValueError, naming the module, if one draws its own randomness in training, updates its buffers, or cannot be run here."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"model is a {type(model).__name__}; pass the module inside, model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("model is a compiled ScriptModule, whose parameters cannot be exchanged; pass the module before torch.jit")
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"parameters {empty[:3]} are on the device 'meta' and hold no numbers; load the weights first")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(f"module {name!r} ({type(module).__name__}) has sparse gradients, which are not used here; pass sparse=False")
        if not module.training:
            continue
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
