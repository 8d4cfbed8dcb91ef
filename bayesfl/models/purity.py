"""Refusing models whose training a federation cannot repeat or exchange, and wrappers that hide the
model.
"""

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm

from bayesfl.models.modes import check_norms


def refuse_impure(model: nn.Module) -> None:
    """Raise ValueError, naming the module, if one updates buffers that are no statistics of a norm,
    or cannot be run here.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(f"model is a {type(model).__name__}; pass the module inside, model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "model is a compiled ScriptModule, whose parameters cannot be exchanged; pass the "
            "module before torch.jit"
        )
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"parameters {empty[:3]} are on the device 'meta' and hold no numbers; load the "
            "weights first"
        )
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a gradient hook, which is not run here; to train a part "
                "of a weight alone, multiply it by a mask "
                "in forward"
            )
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and any(
            p.requires_grad for p in module.parameters(recurse=False)
        ):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) rescales its rows in place whenever "
                "they are read (max_norm), also to predict; "
                "pass max_norm=None"
            )
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) has sparse gradients, which are not "
                "used here; pass sparse=False"
            )
        if isinstance(module, _SpectralNorm) and module.training:
            raise ValueError(
                f"module {name!r} (spectral norm) updates buffers in training that are no "
                "statistics to average; put it in eval mode"
            )
    check_norms(model)
