"""Conversion of arrays, frames and nested lists to tensors: one input of a network or several."""

import mmap
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.inputs import WIDE, Inputs, named
from bayesfl.base.warning import warn
from bayesfl.data.mapped import mapped, mark_mapped
from bayesfl.data.tables.frames import columns_of

ROUNDED_ROWS, COARSE = 1000, 1e-2
"""Number of rows that are checked for rounding to float32; and the smallest rounding error that
causes a warning, relative to the column's standard deviation.
"""


def to_tensor(values: Any, name: str) -> Tensor:
    """Make a tensor of any numbers: int64 of integers, float32 of floats.

    Raises:
        ValueError: `values` are no numbers, or are of several shapes.
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
        whose: Text after the name in an error message, such as ` of client 3`.

    Raises:
        ValueError: An array holds no numbers, arrays have different numbers of rows, or a tuple or
            a mapping is empty.
    """
    made = _tree(values, name, whose)
    (first, one), *others = named(made, name)
    for other, tensor in others:
        if len(tensor) != len(one):
            raise ValueError(
                f"{first}{whose} has {len(one)} rows and {other}{whose} has {len(tensor)}: several "
                "inputs must have one row each for every example"
            )
    return made


def _tree(values: Any, name: str, whose: str) -> Inputs:
    """Make tensors of a tree of arrays."""
    if isinstance(values, tuple):
        return tuple(_tree(part, f"{name}[{j}]", whose) for j, part in enumerate(values))
    if isinstance(values, Mapping):
        return {str(key): _tree(part, f"{name}[{key!r}]", whose) for key, part in values.items()}
    tensor = _tensor(values, f"{name}{whose}")
    if mapped(tensor):
        return tensor
    if columns_of(values) or tensor.dtype == torch.float64:
        _warn_of_rounding(tensor, name)
        return tensor.float()
    return tensor.long() if tensor.dtype in WIDE else tensor


def _warn_of_rounding(values: Tensor, name: str) -> None:
    """Warn of columns whose numbers differ by hardly more than float32 resolves, as seconds since
    1970 do.
    """
    if values.dtype != torch.float64 or values.dim() != 2 or len(values) < 2:
        return
    seen = values[:: max(1, len(values) // ROUNDED_ROWS)]
    lost, spread = (seen - seen.float().double()).abs().amax(0), seen.std(0)
    columns = ((spread > 0) & (lost > COARSE * spread)).nonzero().flatten().tolist()
    if columns:
        warn(
            f"column {columns[0]} of {name} differs between rows by hardly more than float32 "
            "resolves, as dates in seconds do: subtract the mean and divide by the standard "
            "deviation first",
        )


def _tensor(values: Any, name: str) -> Tensor:
    """Make a tensor of any real numbers in their own type; it may share memory with `values`."""
    return values.detach().cpu() if isinstance(values, Tensor) else _of_array(values, name)


def _of_array(values: Any, name: str) -> Tensor:
    """Make a tensor of an array, a frame or nested lists; an array in a mapped file stays there."""
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name} has masked values, whose numbers are arbitrary; fill them in, as "
            "values.filled(...) does"
        )
    array = np.asarray(values)
    if array.dtype == object and array.ndim == 2 and hasattr(values, "dtypes"):
        # Columns of several types, such as bools beside floats.
        array = values.to_numpy(dtype=np.float64, na_value=np.nan)
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"{name} must be an array of numbers, got {array.dtype}; "
            + (
                "of a path, numpy.load(path) reads one"
                if isinstance(values, str | os.PathLike)
                else "make real numbers of it, as values.astype(float) does of numbers kept as "
                "text, and codes, class_names = pandas.factorize(values, sort=True) of classes"
            )
        )
    kind = np.float64 if array.dtype.char == "g" else array.dtype.newbyteorder("=")
    stays = _in_file(array) and kind == array.dtype and all(stride >= 0 for stride in array.strides)
    array = array.astype(kind, order="C", copy=False) if not stays else array
    with warnings.catch_warnings():
        # Nothing writes to inputs.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    if stays:
        mark_mapped(tensor)
    return tensor


def _in_file(array: Any) -> bool:
    """Return whether an array is a view of a mapped file."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, mmap.mmap)
