"""Initial weights, drawn from a seed of their own without torch's global generator."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Seeded
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.random import Purpose, generator
from bayesfl.models.copies import duplicate
from bayesfl.models.cutting import SplitModel

P = ParamSpec("P")
_BODY, _HEAD = 0, 1  # words of the addresses under Purpose.MODEL


def seeded(function: Callable[P, SplitModel]) -> Callable[P, SplitModel]:
    """Let a function build its model on the CPU and from its option `seed` alone, with a head drawn
    from N(0, head_scale^2) if its option `head_scale` is not None.
    """

    @functools.wraps(function)
    def made(*args: P.args, **options: P.kwargs) -> SplitModel:
        seed: Any = options.get("seed", 0)
        word = int(generator(seed, Purpose.MODEL, index=_BODY).integers(2**63))
        with Seeded(word), torch.device("cpu"):
            model = function(*args, **options)
        head_scale: Any = options.get("head_scale")
        if head_scale is not None:
            rng = generator(seed, Purpose.MODEL, index=_HEAD)
            with torch.no_grad():
                for p in model.head.parameters():
                    draw = rng.standard_normal(tuple(p.shape), dtype="float32")
                    p.copy_(torch.from_numpy(draw).to(p.dtype) * head_scale)
        return model

    return made


def anew(
    module: nn.Module, *, pattern: Pattern = "*"
) -> Callable[[np.random.Generator, int], Tensor]:
    """Return a start for a block that draws weights as the module's layers do when they are made:
    (generator, D) -> [D], float32.

    Args:
        module: The model; it is not changed.
        pattern: The block's parameters, as in `Block.pattern`.

    Raises:
        ValueError: A layer has parameters but no method `reset_parameters`, or no parameter fits
            `pattern`.

    Example:
        >>> import numpy as np
        >>> start = bf.models.anew(bf.models.mlp(4, hidden=3, outputs=2))
        >>> start(np.random.default_rng(0), 23).shape
        torch.Size([23])
    """
    stuck = [
        name or "the module itself"
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
        and not hasattr(layer, "reset_parameters")
    ]
    if stuck:
        raise ValueError(
            f"the layers {stuck} have no reset_parameters(), which draws the weights of each copy "
            "or member anew: write that method in their class, as torch's layers have it"
        )
    layout = Layout(module, pattern)

    def start(rng: np.random.Generator, size: int) -> Tensor:
        fresh = duplicate(module)
        with Seeded(int(rng.integers(2**31))):
            for layer in fresh.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        return layout.ravel(
            {
                name: p.detach().float()
                for name, p in fresh.named_parameters()
                if name in layout.shapes
            }
        )

    return start
