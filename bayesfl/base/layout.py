"""The layout of a block's parameters in one vector: which named tensors it covers, and views of the
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
`!head.*` excludes matches.
"""


def covers(pattern: Pattern, name: str) -> bool:
    """Return whether a pattern covers a parameter's name; if all patterns are exclusions, they
    cover all other names.
    """
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    wanted = [one for one in patterns if not one.startswith("!")]
    return (not wanted or any(fnmatchcase(name, one) for one in wanted)) and not any(
        fnmatchcase(name, one[1:]) for one in patterns if one.startswith("!")
    )


def aliases(module: nn.Module) -> dict[str, set[str]]:
    """Return the parameters that have several names, such as tied weights: {first name, as in
    `named_parameters()`: all names}.
    """
    first: dict[int, str] = {}
    found: dict[str, set[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(p), name), set()).add(name)
    return {name: names for name, names in found.items() if len(names) > 1}


def _untrained(model: nn.Module) -> Iterator[str]:
    """Yield the names of norms with statistics but no trainable parameters, and the names of these
    statistics.
    """
    for name, part in model.named_modules():
        if any(p.requires_grad for p in part.parameters(recurse=False)):
            continue
        held = {leaf for leaf, _ in part.named_buffers(recurse=False)}
        for leaf in sorted(held & {"running_mean", "running_var"}):
            yield name
            yield f"{name}.{leaf}".removeprefix(".")


def _matches(model: nn.Module, pattern: str) -> bool:
    """Return whether a pattern matches something trainable, or something to exclude; if not, it is
    probably misspelled.
    """
    bare = pattern.removeprefix("!")
    every = model.named_parameters(remove_duplicate=False)
    found = [p for name, p in every if fnmatchcase(name, bare)]
    if not found:
        return any(fnmatchcase(name, bare) for name in _untrained(model))
    return pattern.startswith("!") or any(p.requires_grad for p in found)


class Layout:
    """List the parameters of `model` that `pattern` covers, in the order of `named_parameters()`.

    Frozen parameters, those with `requires_grad=False`, are constants and belong to no layout.

    Args:
        model: Any module.
        pattern: Pattern over parameter names, see `Pattern`.

    Raises:
        ValueError: The pattern, or one of several, matches no parameter, or only frozen ones; or
            the model is a Pyro program.
    """

    def __init__(self, model: nn.Module, pattern: Pattern) -> None:
        for name, module in model.named_modules():
            for own in ("_pyro_samples", "_pyro_params"):
                for one in vars(module).get(own, ()):
                    raise ValueError(
                        f"{f'{name}.{one}'.lstrip('.')!r} is a PyroSample or PyroParam, not a "
                        "torch weight: bf.pyro.fit fits a Pyro model with its priors; "
                        "torch.nn.utils.parametrize restricts a torch.nn.Parameter to a range"
                    )
        every, also = dict(model.named_parameters()), aliases(model)
        covered = {
            name: p
            for name, p in every.items()
            if pattern and any(covers(pattern, one) for one in also.get(name, {name}))
        }
        self._hold({name: p for name, p in covered.items() if p.requires_grad})
        several = () if isinstance(pattern, str) else pattern
        idle = [one for one in several if not _matches(model, one)]
        if idle or not self.shapes:
            wrong = idle[0].removeprefix("!") if idle else pattern
            frozen = bool(wrong) and any(covers(wrong, name) for name in every)
            what = "only frozen parameters (requires_grad=False)" if frozen else "no parameter"
            raise ValueError(
                f"pattern {pattern!r}: {wrong!r} matches {what}; the model has {list(every)[:20]}. "
                "Patterns are matched against the trainable parameters in named_parameters(); "
                "bf.models.split(module, head=...) gives any module a body and a head, and "
                "bf.models.SplitModel(nn.Identity(), layer) makes a single layer the head, for "
                "methods that need no body."
            )

    @classmethod
    def of_buffers(cls, model: nn.Module, names: tuple[str, ...]) -> "Layout":
        """Return the layout of the buffers `names`, as if they were parameters."""
        made = cls.__new__(cls)
        made._hold({name: model.get_buffer(name) for name in names})
        return made

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
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
