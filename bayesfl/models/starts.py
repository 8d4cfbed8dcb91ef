"""Initial weights, drawn from a seed of their own without torch's global generator."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base.addressed import Seeded
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.random import Purpose, generator
from bayesfl.models.copies import duplicate
from bayesfl.models.cutting import SplitModel

_BODY, _HEAD = 0, 1  # words of the addresses under Purpose.MODEL


def seeded(make: Callable[[], SplitModel], seed: int, head_scale: float | None) -> SplitModel:
    """Build the model that `make` makes, on the CPU and from `seed` alone; its head is drawn from
    N(0, head_scale^2) if that is given.
    """
    word = int(generator(seed, Purpose.MODEL, index=_BODY).integers(2**63))
    with Seeded(word), torch.device("cpu"):
        model = make()
    if head_scale is not None:
        rng = generator(seed, Purpose.MODEL, index=_HEAD)
        with torch.no_grad():
            for p in model.head.parameters():
                draw = rng.standard_normal(tuple(p.shape), dtype="float32")
                p.copy_(torch.from_numpy(draw).to(p.dtype) * head_scale)
    return model


def _listed(layers: list[str]) -> str:
    """Name layers, of which '' is the whole module."""
    inner = [name for name in layers if name]
    return " and ".join(
        ["the module itself"] * ("" in layers) + [f"its layers {inner}"] * bool(inner)
    )


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
        name
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
        and not hasattr(layer, "reset_parameters")
    ]
    if stuck:
        raise ValueError(
            f"parameters of {_listed(stuck)} have no reset_parameters(), by which the "
            "weights of each copy or member are drawn anew: write that method in their class, as "
            "torch's layers have it"
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
