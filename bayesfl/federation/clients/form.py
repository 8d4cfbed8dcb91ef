"""The form of inputs as their owners have them, before the transform: what new rows must look like,
and what is made of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.described import described
from bayesfl.base.inputs import Shapes, count, named, unnamed
from bayesfl.data import FederatedData
from bayesfl.data.outline import Outline
from bayesfl.data.own.conversion import to_inputs
from bayesfl.data.split import Change, ClientData
from bayesfl.data.tensors import not_finite
from bayesfl.federation.store.identity import differences, in_words


@dataclass(frozen=True, eq=False)
class Form:
    """The tensors that make an example, and what is done to them before a model receives them.

    Args:
        tensors: Type and shape of one example of every tensor, by the expression that finds it, as
            `x`, `x[0]` or `x['mask']`.
        transform: What is done to inputs whenever they are read; None for nothing.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    transform: Change | None = None

    @classmethod
    def of(cls, split: ClientData) -> "Form":
        """Return the form of a split's inputs."""
        return cls(
            {name: (t.dtype, tuple(t.shape[1:])) for name, t in named(split.x)}, split.transform
        )

    def described(self) -> dict[str, Any]:
        """Return what JSON can write of the form: of the transform a description, not its code."""
        tensors = {
            name: [str(dtype).removeprefix("torch."), list(shape)]
            for name, (dtype, shape) in self.tensors.items()
        }
        return {"tensors": tensors, "transform": described(self.transform)}

    @classmethod
    def read(cls, found: Mapping[str, Any], transform: Change | None) -> "Form":
        """Return the form that `described` wrote, with this transform.

        Raises:
            KeyError: An entry is missing.
            ValueError: A type is none of torch.
        """
        return cls(
            {
                str(name): (getattr(torch, dtype), tuple(shape))
                for name, (dtype, shape) in found["tensors"].items()
            },
            transform,
        )

    def split(
        self, x: Any, inputs: Shapes, *, dtype: torch.dtype, device: torch.device
    ) -> ClientData:
        """Return new rows as the split of a single client, which gives them as a model receives
        them, on `device`, a piece at a time.

        Args:
            x: Rows as their owner has them: an array, a tensor, nested lists or a frame, or a tuple
                or a mapping of these.
            inputs: Shape of one example as the model receives it.
            dtype: The run's precision.
            device: The device.

        Raises:
            TypeError: Something is no array.
            ValueError: `x` holds other tensors than the form, of another kind of numbers or another
                shape, different numbers of rows or none, or numbers that are not finite; or what
                the transform makes of it has another shape than `inputs`.
        """
        found = dict(named(to_inputs(x, "x")))
        if found.keys() != self.tensors.keys():
            raise ValueError(
                f"x must hold the inputs that the model was trained on, {list(self.tensors)}, got "
                f"{list(found)}"
            )
        rows = unnamed({name: self._fit(name, found[name]) for name in self.tensors})
        assert rows is not None
        index = torch.arange(count(rows), device=device)
        options: dict[str, Any] = {"transform": self.transform, "dtype": dtype}
        split = ClientData(rows, torch.zeros_like(index), index, np.array([len(index)]), **options)
        if split.inputs != inputs:
            raise ValueError(
                f"the transform makes inputs of shape {split.inputs} of x, the model was trained "
                f"on {inputs}; pass the same transform"
            )
        return split

    def _fit(self, name: str, t: Tensor) -> Tensor:
        """Return a tensor in the type of the training data's.

        Raises:
            ValueError: It holds another kind of numbers, or some that this type has not; has
                another shape; or holds NaN or infinities.
        """
        dtype, shape = self.tensors[name]
        if _kind(t.dtype) != _kind(dtype):
            raise ValueError(
                f"{name} holds {_kind(t.dtype)} ({t.dtype}) and the model was trained on "
                f"{_kind(dtype)} ({dtype}); {_as_trained(name, t, dtype)}"
            )
        if tuple(t.shape[1:]) != shape or not t.dim() or not len(t):
            wanted = ", ".join(["N", *map(str, shape)])
            raise ValueError(
                f"{name} must have one row or more of the shape trained on, [{wanted}], got "
                f"{list(t.shape)}"
            )
        if t.is_floating_point():
            if (bad := not_finite(t)) is not None:
                raise ValueError(
                    f"{name} holds NaN or infinite numbers, first in row {int(bad.nonzero()[0])}; "
                    "fill them in as before training, or drop the rows"
                )
            return t
        own = t.to(dtype)
        back = own.to(t.dtype)
        if not torch.equal(back, t):
            raise ValueError(
                f"{name} holds {int(t[back != t][0])}, which is no {dtype}, as the training data "
                "were; look at its codes"
            )
        return own


def same_form(what: str, found: ClientData, known: ClientData) -> None:
    """Check that a split gives the model inputs as another does: of the same names, kinds of
    numbers and shapes, by the same transform.

    Raises:
        ValueError: They differ.
    """
    different = differences(_as_given(known), _as_given(found))
    if different:
        raise ValueError(
            f"{what} gives the model other inputs than the training data, {in_words(different)}; "
            "take a split of the federation, whose transform is part of it, or give it one, as "
            "dataclasses.replace(split, transform=clients.train.transform)"
        )


def other_transform(found: FederatedData, known: FederatedData | Outline) -> str:
    """Return how the transform of some data differs from that of those that a model was trained on;
    empty if it does not.
    """
    then, now = ({"transform": one.outline.transform} for one in (known, found))
    return in_words(differences(then, now))


def _kind(dtype: torch.dtype) -> str:
    """Return what tensors of a type hold."""
    return (
        "floats"
        if dtype.is_floating_point
        else "truth values"
        if dtype == torch.bool
        else "whole numbers"
    )


def _as_trained(name: str, t: Tensor, dtype: torch.dtype) -> str:
    """Return how to make numbers of another kind what the training data were, by their values."""
    kept = str(dtype).removeprefix("torch.")
    if not t.is_floating_point() or torch.equal(t, t.round()):
        return (
            f"make them these before, as {name}.astype({kept!r}) or {name}.to({dtype}) does, if "
            "they mean the same"
        )
    if dtype == torch.uint8 and bool(((t >= 0) & (t <= 1)).all()):
        return (
            "they lie in [0, 1], as bytes over 255 do: pass the bytes themselves, or make them "
            f"again by (255 * {name}).round().astype('uint8') or (255 * {name}).round().to({dtype})"
        )
    return (
        "they have fractions, or NaN, which would be lost: pass the rows as they were before they "
        "were made floats"
    )


def _as_given(split: ClientData) -> dict[str, Any]:
    """Return what a split gives a model, in words, by name."""
    one = named(split.take(split.index[:1]))
    inputs: dict[str, Any] = {name: f"{_kind(t.dtype)} {list(t.shape[1:])}" for name, t in one}
    return {**inputs, "transform": described(split.transform)}
