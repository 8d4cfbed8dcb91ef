"""The form of inputs as their owners have them, before the transform: what new rows must look like, and what is made of them."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.function_code import digest_of_code, function_identity, told
from bayesfl.base.inputs import Shapes, count, named, unnamed
from bayesfl.data import FederatedData
from bayesfl.data.conversion import to_inputs
from bayesfl.data.outline import Outline
from bayesfl.data.split import Change, ClientData
from bayesfl.data.tensors import not_finite
from bayesfl.federation.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Form:
    """The tensors that make an example, and what is done to them before a model receives them.

    Args:
        tensors: Type and shape of one example of every tensor, by the expression that finds it, as `x`, `x[0]` or `x['mask']`.
        transform: What is done to inputs whenever they are read; None for nothing.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    transform: Change | None = None

    @classmethod
    def of(cls, split: ClientData) -> "Form":
        """Return the form of a split's inputs."""
        return cls({name: (t.dtype, tuple(t.shape[1:])) for name, t in named(split.x)}, split.transform)

    @classmethod
    def of_floats(cls, inputs: Shapes) -> "Form":
        """Return the form of one tensor of floats of this shape, as all inputs were in earlier versions.

        Raises:
            ValueError: `inputs` are the shapes of several tensors.
        """
        if not isinstance(inputs, tuple) or not all(isinstance(size, int) for size in inputs):
            raise ValueError(f"inputs are of several tensors, {inputs}, whose types are not known without the data; pass the data, too")
        return cls({"x": (torch.float32, inputs)})

    def described(self) -> dict[str, Any]:
        """Return what JSON can write of the form: of the transform its name and a digest, not its code."""
        tensors = {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in self.tensors.items()}
        return {"tensors": tensors, "transform": _identity(self.transform)}

    @classmethod
    def read(cls, found: Mapping[str, Any], transform: Change | None) -> "Form":
        """Return the form that `described` wrote, with this transform.

        Raises:
            KeyError: An entry is missing.
            ValueError: A type is none of torch.
        """
        return cls({str(name): (_dtype(dtype), tuple(shape)) for name, (dtype, shape) in found["tensors"].items()}, transform)

    def split(self, x: Any, inputs: Shapes, *, dtype: torch.dtype, device: torch.device) -> ClientData:
        """Return new rows as the split of a single client, which gives them as a model receives them, on `device`, a piece at a time.

        Args:
            x: Rows as their owner has them: an array, a tensor, nested lists or a frame, or a tuple or a mapping of these.
            inputs: Shape of one example as the model receives it.
            dtype: The run's precision.
            device: The device.

        Raises:
            TypeError: Something is no array.
            ValueError: `x` holds other tensors than the form, of another kind of numbers or another shape, different numbers of rows or
                none, or numbers that are not finite; or what the transform makes of it has another shape than `inputs`.
        """
        given = to_inputs(x, "x")
        found = dict(named(given))
        if found.keys() != self.tensors.keys():
            raise ValueError(f"x must hold the inputs that the model was trained on, {list(self.tensors)}, got {list(found)}")
        rows = unnamed({name: self._fit(name, found[name]) for name in self.tensors})
        assert rows is not None
        index = torch.arange(count(rows), device=device)
        options: dict[str, Any] = {"transform": self.transform, "dtype": dtype}
        split = ClientData(rows, torch.zeros_like(index), index, np.array([len(index)]), **options)
        if split.inputs != inputs:
            raise ValueError(
                f"the transform makes inputs of shape {split.inputs} of x, the model was trained on {inputs}; pass the same transform"
            )
        return split

    def _fit(self, name: str, t: Tensor) -> Tensor:
        """Return a tensor in the type of the training data's.

        Raises:
            ValueError: It holds another kind of numbers, or some that this type has not; has another shape; or holds NaN or infinities.
        """
        dtype, shape = self.tensors[name]
        if _kind(t.dtype) != _kind(dtype):
            raise ValueError(
                f"{name} holds {_kind(t.dtype)} ({t.dtype}) and the model was trained on {_kind(dtype)} ({dtype}); make them these before, "
                f"as {name}.astype({str(dtype).removeprefix('torch.')!r}) or {name}.to({dtype}) does, if they mean the same"
            )
        if tuple(t.shape[1:]) != shape or not t.dim() or not len(t):
            wanted = ", ".join(["N", *map(str, shape)])
            raise ValueError(f"{name} must have one row or more of the shape trained on, [{wanted}], got {list(t.shape)}")
        if t.is_floating_point():
            if (bad := not_finite(t)) is not None:
                raise ValueError(
                    f"{name} holds NaN or infinite numbers, first in row {int(bad.nonzero()[0])}; fill them in as before training, or "
                    "drop the rows"
                )
            return t
        own = t.to(dtype)
        if not torch.equal(back := own.to(t.dtype), t):
            raise ValueError(f"{name} holds {int(t[back != t][0])}, which is no {dtype}, as the training data were; look at its codes")
        return own


def same_form(what: str, found: ClientData, known: ClientData) -> None:
    """Check that a split gives the model inputs as another does: of the same names, kinds of numbers and shapes, by the same transform.

    Raises:
        ValueError: They differ.
    """
    given, wanted = (
        {name: f"{_kind(t.dtype)} {list(t.shape[1:])}" for name, t in named(split.take(split.index[:1]))} for split in (found, known)
    )
    one, other = found.transform, known.transform
    if one is not other and (one is None or other is None or digest_of_code(one) != digest_of_code(other)):
        given, wanted = ("rows as they are" if change is None else f"what {told(change)} makes of rows" for change in (one, other))
        wanted += ", by other code or of other values" if given == wanted else ""
    elif given == wanted:
        return
    raise ValueError(
        f"{what} gives the model {given}, the training data {wanted}; take a split of the federation, whose transform is part of it, or "
        "give it one, as dataclasses.replace(split, transform=clients.train.transform)"
    )


def other_transform(found: FederatedData, known: FederatedData | Outline) -> str:
    """Return how the transform of some data differs from that of those that a model was trained on; empty if it does not."""
    then = known.transform if isinstance(known, Outline) else _identity(known.train.transform)
    now = _identity(found.train.transform)
    if then == now or (then is not None and now is not None and then["code"] == now["code"]):
        return ""
    if then is not None and now is not None and then["under"] != now["under"] and list(then["function"]) == now["function"]:
        warnings.warn(_unseen("the model that goes on", "transform", then, now), stacklevel=4)
        return ""
    said = ["none" if one is None else str(list(one["function"])) for one in (now, then)]
    return f"the transform {said[0]}, the data that the model was trained on {said[1]}"


def _identity(change: Change | None) -> dict[str, Any] | None:
    return None if change is None else function_identity(change)


def check_function(what: str, name: str, saved: Any, given: Change | None) -> None:
    """Check that a transform or an augmentation is the one with which a saved model was made.

    Args:
        what: The model's name, which begins the error message.
        name: `transform` or `augment`.
        saved: Identity of the function with which it was made, see `function_identity`; None for none.
        given: The function for which it is loaded.

    Raises:
        TypeError: `given` is no function.
        CheckpointError: The two differ, or there is only one of them.

    Warns:
        UserWarning: The digests differ, and so do the versions of Python, torch or NumPy, of which they may depend.
    """
    if given is not None and not callable(given):
        raise TypeError(f"{name} must be a function of inputs to inputs, got {type(given).__name__}; pass that of the federation")
    saved, now = json.loads(json.dumps([saved, _identity(given)]))  # lists where either has tuples
    if saved is not None and not (isinstance(saved, Mapping) and saved.keys() >= {"function", "code", "under"}):
        raise CheckpointError(f"{what} does not say by code which {name} it was made with, {saved}; make it again with this version")
    if now is None:
        if saved is None:
            return
        raise CheckpointError(f"{what} was made with the {name} {saved['function']}, got none; give the same, a file holds no code")
    if saved is None:
        raise CheckpointError(f"{what} was made without {name}=, got {now['function']}; leave it out")
    if saved["code"] == now["code"]:
        return
    if saved["under"] == now["under"] or saved["function"] != now["function"]:
        code = ", which reads other code or other values" if saved["function"] == now["function"] else ""
        raise CheckpointError(f"{what} was made with the {name} {saved['function']}, got {now['function']}{code}; give that one")
    warnings.warn(_unseen(what, name, saved, now), stacklevel=3)


def _unseen(what: str, name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the warning that other versions of Python, torch or NumPy hide whether a function is the same."""
    return (
        f"{what} was made under {then['under']}, and this is {now['under']}: whether the {name} {now['function']} still computes the same "
        "cannot be seen; compare predictions with those made before"
    )


def _kind(dtype: torch.dtype) -> str:
    """Return what tensors of a type hold."""
    return "floats" if dtype.is_floating_point else "truth values" if dtype == torch.bool else "whole numbers"


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, str(name), None), torch.dtype):
        raise ValueError(f"{name!r} is no type of torch")
    return found
