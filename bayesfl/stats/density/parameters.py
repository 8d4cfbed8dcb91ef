"""Parameters of a log density: names, shapes and ranges, and vectors of unconstrained numbers.

A range is one of `torch.distributions.constraints`, and `biject_to` maps unconstrained numbers to
it. The log of the map's Jacobian turns a density of parameters into one of these numbers.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from bayesfl.base.protocols import Tensors
from bayesfl.stats.terms import Number


@dataclass(frozen=True)
class Parameter(Number):
    """A shared parameter, as a term of the sites' tables.

    Args:
        column: Its name.
        support: Its range, as torch prints it.
        shape: Its shape.
    """

    support: str = "Real()"
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, support: Any, shape: Sequence[int]) -> "Parameter":
        """Make the parameter from a range of torch.

        Raises:
            ValueError: The range differs between entries or has no map, or the name has the form of
                a vector's entry.
        """
        if name.endswith("]"):
            raise ValueError(f"{name!r} has the form of an entry of a vector; give it another name")
        made = cls(name, repr(support), tuple(shape))
        try:
            _ = made.map
        except (NotImplementedError, ValueError, SyntaxError, AttributeError) as error:
            raise ValueError(
                f"{name!r} has the range {support}, which has no map from unconstrained numbers; "
                "take one of torch.distributions.constraints with the same bounds for all entries"
            ) from error
        return made

    @property
    def variables(self) -> tuple[str, ...]:
        """Return no columns: a parameter reads none."""
        return ()

    @cached_property
    def map(self) -> Any:
        """Return torch's map from unconstrained numbers to the range."""
        return biject_to(_range(ast.parse(self.support, mode="eval").body))

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Return the shape of the unconstrained numbers."""
        return tuple(self.map.inverse_shape(torch.Size(self.shape)))

    @property
    def size(self) -> int:
        """Return the number of unconstrained numbers."""
        return torch.Size(self.free).numel()

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the name of each."""
        return named(self.column, self.free)

    @property
    def words(self) -> str:
        """Return a description."""
        return f"{self.column} of shape {list(self.shape)} in {self.support}"

    @property
    def is_scale(self) -> bool:
        """Return whether it is positive, like a standard deviation."""
        found = _range(ast.parse(self.support, mode="eval").body)
        while isinstance(found, constraints.independent):
            found = found.base_constraint
        return getattr(found, "lower_bound", None) == 0 and not hasattr(found, "upper_bound")


def _range(node: ast.AST) -> Any:
    """Return the range that a text describes, only of classes of torch and Pyro."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = f"_{node.func.id}"  # pyright: ignore[reportAttributeAccessIssue]
    ranges: Any = constraints
    if not hasattr(constraints, name):
        from pyro.distributions import constraints as ranges  # registers the maps of Pyro's own
    kind = getattr(ranges, name)
    if not issubclass(kind, constraints.Constraint):
        raise ValueError(ast.unparse(node))
    return kind(
        *map(_range, node.args), **{str(one.arg): _range(one.value) for one in node.keywords}
    )


def named(name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return the names of a parameter's entries, such as `beta[0, 1]`."""
    if not shape:
        return (name,)
    return tuple(f"{name}[{', '.join(map(str, at))}]" for at in product(*map(range, shape)))


def split(parameters: Sequence[Parameter], numbers: Tensor) -> Tensors:
    """Return the unconstrained numbers [d] by parameter, in its shape."""
    parts = numbers.split([one.size for one in parameters])
    return {one.column: part.reshape(one.free) for one, part in zip(parameters, parts, strict=True)}


def constrained(parameters: Sequence[Parameter], numbers: Tensor) -> tuple[Tensors, Tensor]:
    """Return the parameters of unconstrained numbers [d], by name, and the log Jacobian []."""
    free = split(parameters, numbers)
    found = {one.column: one.map(free[one.column]) for one in parameters}
    log_jacobian = numbers.new_zeros(())
    for one in parameters:
        name = one.column
        log_jacobian = log_jacobian + one.map.log_abs_det_jacobian(free[name], found[name]).sum()
    return found, log_jacobian


def unconstrained(parameters: Sequence[Parameter], values: Tensors) -> Tensor:
    """Return the unconstrained numbers [d] of parameters by name."""
    parts = [one.map.inv(values[one.column]).flatten() for one in parameters]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def entries(draws: Tensors) -> dict[str, Tensor]:
    """Return draws [S] of each entry of parameters [S, ...], by name."""
    return {
        name: column
        for parameter, t in draws.items()
        for name, column in zip(named(parameter, t.shape[1:]), t.reshape(len(t), -1).T, strict=True)
    }
