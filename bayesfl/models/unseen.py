"""Weights that a module keeps elsewhere than among its parameters, as Pyro does in a store."""

import torch
from torch import nn

from bayesfl.base.inputs import Inputs, at, call_at


def refuse_unseen(module: nn.Module, x: Inputs) -> None:
    """Refuse a module whose outputs depend on weights that cannot be given to it: their curvature
    and their gradients would be 0 without a word.

    Raises:
        ValueError: The outputs at `x` depend on another tensor that requires gradients than the
            module's own parameters.
    """
    strange = False
    # Twice, as a store may take the parameters of the first call for its own.
    for _ in range(2):
        leaves = {
            name: p.detach().clone().requires_grad_(p.is_floating_point())
            for name, p in module.named_parameters()
        }
        own = list(leaves.values())  # torch changes the mapping where the module sets a parameter
        with torch.enable_grad():
            outputs = call_at(module, leaves, at(x, slice(0, 2)))
        strange = any(all(t is not p for p in own) for t in _sources(outputs))
    if strange:
        raise ValueError(
            f"the outputs of this {type(module).__name__} depend on weights that are none of its "
            "parameters, such as PyroParam's, which Pyro keeps in its store: their curvature and "
            "gradients would be 0. Make them nn.Parameter, or constrain them by "
            "torch.nn.utils.parametrize"
        )


def _sources(outputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a result's gradient would go to."""
    found, seen, left = [], set(), [outputs.grad_fn]
    while left:
        step = left.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if (leaf := getattr(step, "variable", None)) is not None:
            found.append(leaf)
        left += [inner for inner, _ in step.next_functions]
    return found
