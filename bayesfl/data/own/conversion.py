"""What users hand over, arrays, tensors, frames and nested lists, as tensors; one input of a
network or several.
"""

import mmap
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bayesfl.base.inputs import WIDE, Inputs
from bayesfl.data.mapped import mapped, mark_mapped
from bayesfl.data.tables.frames import columns_of, numbers_of


def to_tensor(values: Any, name: str) -> Tensor:
    """Make a tensor of any numbers: int64 of integers, float32 of floats.

    Raises:
        ValueError: `values` are no numbers, or are of several shapes.
        TypeError: `values` are None or a torch data set.
    """
    tensor = _tensor(values, name)
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def to_inputs(values: Any, name: str = "x", whose: str = "") -> Inputs:
    """Make inputs of an array, of a tuple of arrays or of a mapping of arrays by name, in the types
    of their numbers.

    Exceptions are float64, which becomes float32, and uint16, uint32 and uint64, which become
    int64, but for arrays in mapped files; these are converted where they are read. Frames become
    float32. The tensors may share memory with `values`.

    Args:
        values: The arrays.
        name: Name of the argument.
        whose: What follows the name in an error message, as ` of client 3`.

    Raises:
        ValueError: An array holds no numbers or is a single number, arrays have different numbers
            of rows, a tuple or a mapping is empty, or a name is no text.
        TypeError: An array is None or a torch data set.
    """
    leaves: dict[str, Tensor] = {}
    made = _tree(values, name, whose, leaves)
    (first, one), *others = leaves.items()
    for other, tensor in others:
        if len(tensor) != len(one):
            raise ValueError(
                f"{first}{whose} has {len(one)} rows and {other}{whose} has {len(tensor)}: several "
                "inputs must have one row each for every "
                "example"
            )
    return made


def _tree(values: Any, name: str, whose: str, leaves: dict[str, Tensor]) -> Inputs:
    """Make tensors of a tree of arrays, and note each under its name in `leaves`."""
    if isinstance(values, Mapping | tuple):
        if not values:
            raise ValueError(
                f"{name}{whose} is an empty {_kind(values)}: pass at least one array of inputs"
            )
        if isinstance(values, tuple):
            return tuple(
                _tree(part, f"{name}[{place}]", whose, leaves) for place, part in enumerate(values)
            )
        if wrong := [key for key in values if not isinstance(key, str)]:
            raise ValueError(
                f"{name}{whose} must name its arrays by text, as the arguments of the model's "
                f"forward, got {wrong[0]!r}: take "
                "{str(name): array ...}, or a tuple of arrays"
            )
        return {
            str(key): _tree(part, f"{name}[{key!r}]", whose, leaves) for key, part in values.items()
        }
    tensor = _tensor(values, f"{name}{whose}")
    if tensor.dim() < 1 and name.endswith("]"):
        raise ValueError(
            f"{name}{whose} is a single number, {tensor.item()}: several inputs are a tuple or a "
            "mapping of arrays with a row for each "
            "example; the numbers of a vector are a list or an array"
        )
    if not mapped(tensor):
        if columns_of(values) or tensor.dtype == torch.float64:
            tensor = tensor.float()
        elif tensor.dtype in WIDE:
            tensor = tensor.long()
    leaves[name] = tensor
    return tensor


def _tensor(values: Any, name: str) -> Tensor:
    """Make a tensor of any real numbers in their own type; it may share memory with `values`."""
    if values is None or isinstance(values, Dataset | DataLoader):
        raise TypeError(
            f"{name} must be an array, a tensor or nested lists of numbers, got {kind_of(values)}; "
            "torch data sets go to from_datasets, "
            "one per client"
        )
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        tensor = _of_array(values, name)
    if tensor.is_complex():
        raise ValueError(
            f"{name} must be real numbers, got {tensor.dtype}; pass real and imaginary parts as "
            "columns of their own"
        )
    return tensor


def _of_array(values: Any, name: str) -> Tensor:
    """Make a tensor of an array, a frame or nested lists; an array in a mapped file stays there."""
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name} has masked values, below which there may be any numbers; fill them in, as "
            "values.filled(...) does"
        )
    try:
        array = np.asarray(values)
        if array.dtype == object and array.ndim == 2 and hasattr(values, "dtypes"):
            array = numbers_of(
                values, name
            )  # of a frame of several types, bools beside floats for instance
        if (
            array.dtype.kind in "OUST"
            and array.ndim == 1
            and any(isinstance(value, str) for value in array)
        ):
            raise ValueError(
                f"{name} holds text: make numbers of it, as codes, class_names = "
                "pandas.factorize(values, sort=True) does"
            )
        if array.dtype.kind not in "fiub":
            raise TypeError(
                f"got {array.dtype}; make real numbers of it, as values.astype(float) does of "
                "numbers kept as text"
            )
    except (TypeError, ValueError) as error:
        if str(error).startswith(name):
            raise
        several = (
            "; several inputs of a network are a tuple or a mapping of arrays"
            if isinstance(values, list) and name[0] == "x"
            else ""
        )
        raise ValueError(
            f"{name} must be an array of numbers, all rows of one shape: {error}{several}"
        ) from None
    kind = np.float64 if array.dtype.char == "g" else array.dtype.newbyteorder("=")
    stays = _in_file(array) and kind == array.dtype and all(stride >= 0 for stride in array.strides)
    if not stays:
        array = array.astype(kind, order="C", copy=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )  # nothing writes to inputs
        tensor = torch.from_numpy(array)
    if stays:
        mark_mapped(tensor)
    return tensor


def _in_file(array: Any) -> bool:
    """Say whether an array is a view of a mapped file."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, mmap.mmap)


def kind_of(value: Any) -> str:
    """Describe a value's type for an error message."""
    name = "None" if value is None else type(value).__name__
    return f"{name} of length {len(value)}" if isinstance(value, tuple | list) else name


def _kind(values: Any) -> str:
    return "tuple" if isinstance(values, tuple) else "mapping"


def as_list(values: Any, name: str, of: str) -> list[Any]:
    """Return a list with one thing per client.

    Raises:
        TypeError: `values` is a torch data set, a mapping, or nothing that can be iterated.
    """
    if isinstance(values, Dataset | DataLoader):
        raise TypeError(
            f"{name} must be a list with one {of} per client, got one {kind_of(values)}: pass a "
            "list of them to from_datasets"
        )
    if isinstance(values, Mapping):
        raise TypeError(
            f"{name} must be a list with one {of} per client, got {kind_of(values)}: a mapping of "
            "all clients' arrays needs client_ids, "
            "one per row"
        )
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list with one {of} per client, got {kind_of(values)}")
    return list(values)
