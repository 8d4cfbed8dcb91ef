"""The layout of a block's parameters as one vector: which named tensors it covers, and views of the vector in their shapes."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


class Layout:
    """The parameters of `model` that `pattern` covers, in the order of `named_parameters()`.

    Args:
        model: Any module.
        pattern: A shell-style pattern over parameter names, such as `head.*`.

    Raises:
        ValueError: The pattern matches no parameter.
    """

    def __init__(self, model: nn.Module, pattern: str) -> None:
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.shapes = {name: shape for name, shape in shapes.items() if fnmatchcase(name, pattern)}
        if not self.shapes:
            raise ValueError(
                f"pattern {pattern!r} matches no parameter; the model has {list(shapes)}. Patterns are matched against "
                "named_parameters(); bf.models.split(module, head=...) gives any module a body and a head."
            )
        self.names = tuple(self.shapes)
        self.sizes = tuple(math.prod(shape) for shape in self.shapes.values())
        self.size = sum(self.sizes)

    def ravel(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Join the named tensors [..., *shape] into one vector [..., D]."""
        parts = []
        for name, shape in self.shapes.items():
            leaf = leaves[name]
            parts.append(leaf.reshape(*leaf.shape[: leaf.dim() - len(shape)], -1))
        return torch.cat(parts, -1)

    def leaves(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of `vector` [..., D] in the parameters' shapes [..., *shape]; nothing is copied."""
        out, start = {}, 0
        for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
            out[name] = vector.narrow(-1, start, size).unflatten(-1, shape) if shape else vector.select(-1, start)
            start += size
        return out
