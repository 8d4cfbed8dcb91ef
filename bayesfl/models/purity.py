"""Errors for models whose training a federation cannot repeat or exchange."""

from torch import nn

from bayesfl.models.modes import check_norms


def refuse_impure(model: nn.Module) -> None:
    """Raise ValueError, naming the module, for features that a run would skip or undo: hooks of
    gradients, rows that are rescaled when they are read, statistics that cannot be averaged.
    """
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a gradient hook, which is not run here; to train a part "
                "of a weight alone, multiply it by a mask in forward"
            )
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and any(
            p.requires_grad for p in module.parameters(recurse=False)
        ):
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) rescales its rows in place whenever "
                "they are read (max_norm), also to predict; pass max_norm=None"
            )
    check_norms(model)
