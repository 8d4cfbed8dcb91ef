"""The layout of a block's parameters as one vector: which named tensors it covers, and views of the
vector in their shapes.
"""

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

Pattern: TypeAlias = str | tuple[str, ...]
"""Shell-style pattern over parameter names, such as `head.*`, or several, whose matches are joined;
`!head.*` takes matches out.
"""


def covers(pattern: Pattern, name: str) -> bool:
    """Say whether a pattern covers a parameter's name; patterns that only take out cover all other
    names.
    """
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    wanted = [one for one in patterns if not one.startswith("!")]
    return (not wanted or any(fnmatchcase(name, one) for one in wanted)) and not any(
        fnmatchcase(name, one[1:]) for one in patterns if one.startswith("!")
    )


def aliases(module: nn.Module) -> dict[str, set[str]]:
    """Return the parameters that have several names, as tied weights do: by the first, which
    `named_parameters()` gives, all names.
    """
    first: dict[int, str] = {}
    found: dict[str, set[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(p), name), set()).add(name)
    return {name: names for name, names in found.items() if len(names) > 1}


def _untrained(model: nn.Module) -> Iterator[str]:
    """Yield the names of norms that have statistics and no trainable parameters, and of the
    statistics.
    """
    for name, part in model.named_modules():
        if not any(p.requires_grad for p in part.parameters(recurse=False)):
            statistics = [
                leaf
                for leaf, _ in part.named_buffers(recurse=False)
                if leaf in ("running_mean", "running_var")
            ]
            yield from (
                one.removeprefix(".")
                for one in (
                    (name,) * bool(statistics) + tuple(f"{name}.{leaf}" for leaf in statistics)
                )
            )


class Layout:
    """The parameters of `model` that `pattern` covers, in the order of `named_parameters()`.

    Frozen parameters, those with `requires_grad=False`, are constants and in no layout.

    Args:
        model: Any module.
        pattern: Pattern over parameter names, see `Pattern`.

    Raises:
        TypeError: The pattern is neither text nor a tuple of texts.
        ValueError: The pattern matches no parameter, or frozen ones alone.
    """

    def __init__(self, model: nn.Module, pattern: Pattern) -> None:
        if not isinstance(pattern, str) and not (
            isinstance(pattern, tuple) and pattern and all(isinstance(one, str) for one in pattern)
        ):
            raise TypeError(
                f"pattern must be text, such as 'head.*', or a tuple of texts, got {pattern!r}"
            )
        covered = {name: p for name, p in model.named_parameters() if covers(pattern, name)}
        if not covered:
            raise ValueError(
                f"pattern {pattern!r} matches no parameter; the model has "
                f"{[name for name, _ in model.named_parameters()]}. Patterns are "
                "matched against named_parameters(); bf.models.split(module, head=...) gives any "
                "module a body and a head, and bf.models.SplitModel(nn.Identity(), layer) a single "
                "layer that is all head, for methods that need no body."
            )
        self._check_patterns(model, pattern)
        self._hold({name: p for name, p in covered.items() if p.requires_grad})
        if not self.shapes:
            raise ValueError(
                f"pattern {pattern!r} matches frozen parameters alone: {list(covered)} have "
                "requires_grad=False; unfreeze what is to be "
                "trained, take a method without such a part, or compute what the frozen part gives "
                "once and federate the rest on that"
            )

    @classmethod
    def of_buffers(cls, model: nn.Module, names: tuple[str, ...]) -> "Layout":
        """Return the layout of the buffers `names`, as of parameters."""
        made = cls.__new__(cls)
        made._hold({name: model.get_buffer(name) for name in names})
        return made

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.names = tuple(self.shapes)
        self.sizes = tuple(math.prod(shape) for shape in self.shapes.values())
        self.size = sum(self.sizes)

    @staticmethod
    def _check_patterns(model: nn.Module, pattern: Pattern) -> None:
        """Raise ValueError if one of several patterns matches nothing or frozen parameters alone: a
        slip, or a part that was lost.
        """
        patterns = () if isinstance(pattern, str) else pattern
        for one in patterns:
            found = [
                p.requires_grad
                for name, p in model.named_parameters()
                if fnmatchcase(name, one.removeprefix("!"))
            ]
            if not found and any(
                fnmatchcase(name, one.removeprefix("!")) for name in _untrained(model)
            ):
                continue
            if not found or (not any(found) and not one.startswith("!")):
                what = (
                    "matches frozen parameters alone (requires_grad=False)"
                    if found
                    else "matches no parameter"
                )
                names = [name for name, _ in model.named_parameters()][:20]
                raise ValueError(
                    f"{one!r} of the patterns {pattern!r} {what}; leave it out, or mend it. The "
                    f"model has {names}"
                )

    def ravel(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """Join the named tensors [..., *shape] into one vector [..., D]."""
        parts = []
        for name, shape in self.shapes.items():
            leaf = leaves[name]
            parts.append(leaf.reshape(*leaf.shape[: leaf.dim() - len(shape)], -1))
        return torch.cat(parts, -1)

    def leaves(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of `vector` [..., D] in the parameters' shapes [..., *shape]; nothing is
        copied.
        """
        out, start = {}, 0
        for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
            out[name] = (
                vector.narrow(-1, start, size).unflatten(-1, shape)
                if shape
                else vector.select(-1, start)
            )
            start += size
        return out
