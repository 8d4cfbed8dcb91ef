"""Refusing models that draw random numbers or update their buffers in training."""

from torch import nn


def refuse_impure(model: nn.Module) -> None:
    """Raise ValueError, naming the module, if one draws its own randomness in training or updates its buffers."""
    for name, module in model.named_modules():
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
