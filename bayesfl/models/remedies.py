"""Remedies for an error that a model's forward raises."""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs, named, shape_of

BEYOND = re.compile(
    r"index out of range in self|is out of bounds for dimension|not in the valid range|Class "
    r"values must be"
)
"""Torch's errors for a number beyond the rows of an embedding, or of any table."""
BOOLEAN = re.compile(
    r"boolean masks|boolean tensor|BoolTensor for mask|only bool and floating types|dtype to be "
    r"bool"
)
"""Torch's errors for a mask of other numbers than truth values."""
TYPES = re.compile(
    r"dtype|datatype|scalar type|type .* should be the same|not implemented for|not supported"
)
"""Torch's errors for inputs of another type than a layer's weights."""


@contextlib.contextmanager
def explained(x: Inputs, *, every: bool = False) -> Iterator[None]:
    """Enter a context that turns a model's errors into ValueError with a remedy: errors about whole
    numbers in inputs `x`, beyond an embedding's rows or in place of floats, or `every` error.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        said = str(error)
        if not every and not (
            isinstance(error, IndexError | RuntimeError)
            and (BEYOND.search(said) or (TYPES.search(said) and _whole(x)))
        ):
            raise
        raise ValueError(
            f"the model does not take inputs of shape {shape_of(x)} ({error}); {remedy(error, x)}"
        ) from error


def _whole(x: Inputs) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in named(x) if not t.is_floating_point()]


def remedy(error: Exception, x: Inputs) -> str:
    """Return the remedy for an error of a model's forward on inputs `x`."""
    said = str(error)
    whole = _whole(x)
    numbers = [(name, t.long()) for name, t in whole if t.dtype != torch.bool and t.numel()]
    if BEYOND.search(said) and numbers:
        ranges = [f"{name} {int(t.min())} to {int(t.max())}" for name, t in numbers]
        return (
            "whole numbers choose an embedding's rows, from 0 to below its num_embeddings; here "
            f"are {', '.join(ranges)}: build it with more rows, or give all that are rare one "
            "number; if these fit, forward looks up something else that is too large, as a place"
        )
    if "embedding" in said or "argument 'indices'" in said or "used as indices" in said:
        return (
            "an embedding takes whole numbers, and they stay such: pass an array of integers, as "
            "x.astype('int64')"
        )
    if numbers and BOOLEAN.search(said):
        masks = [name for name, _ in numbers if "mask" in name] or [name for name, _ in numbers]
        return (
            "a mask holds truth values, and whole numbers stay such: pass "
            f"{' or '.join(f'{name}.astype(bool)' for name in masks)}"
        )
    if whole and TYPES.search(said):
        kinds = ", ".join(f"{name} holds {t.dtype}" for name, t in whole)
        floats = " or ".join(f"{name}.astype('float32')" for name, _ in whole)
        read = (
            ", or make them where they are read, as clients.transformed(lambda x: x / 255) does"
            if isinstance(x, Tensor)
            else ""
        )
        return (
            f"{kinds}, and such numbers stay as they are: where the model wants floats, pass "
            f"{floats}{read}; or inputs and labels are exchanged"
        )
    if isinstance(error, TypeError) and "argument" in said:
        return (
            "inputs that are one array are passed as model(x), a tuple of arrays as model(*x), a "
            "mapping as model(**x): make the data in the form that forward takes"
        )
    return (
        "build it for inputs of this shape, [N, ...] with the axis of examples, as bf.models does "
        "with inputs=clients.inputs"
    )
