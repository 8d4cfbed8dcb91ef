"""Schema of a federation's rows: their shapes, dtypes and names at training, which new rows, labels
and other data must share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.described import described, differences, in_words
from bayesfl.base.inputs import Shapes, as_tuples, count, named, unnamed
from bayesfl.base.targets import Task
from bayesfl.data.conversion import to_inputs
from bayesfl.data.split import ClientData
from bayesfl.data.tables.columns import Columns
from bayesfl.data.tables.frames import names_of
from bayesfl.data.tables.table import Table, is_frame
from bayesfl.data.tables.texts import is_number
from bayesfl.data.tensors import dtype_name, not_finite

REAL = "biuf"  # kinds of NumPy's real numbers
NAMES = ("columns", "class_names")
"""Fields that may be None, as of data without names, which fit all others."""
REMEDIES = {
    "outputs": "pass data of the same problem, and where the last classes do not occur in them, "
    "make them with outputs={then}, as from_arrays(..., outputs={then}) does",
    "columns": "select the columns of the model, in their order",
    "class_names": "number the labels in the order of the model's classes, as pandas.Categorical("
    "labels, categories=...).codes does, and pass it as class_names",
    "transform": "give them the federation's function, as clients.transformed(function) does, or "
    "dataclasses.replace(split, transform=clients.train.transform)",
}
"""Remedies for rows that differ in a field."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Describe the rows of a federation: as their owners have them, as a model receives them, and
    their targets.

    Args:
        tensors: Type and shape of one example of every tensor as it is stored, by the expression
            that finds it: `x`, `x[0]` or `x['mask']`.
        inputs: Shape of one example as a model receives it; for a tuple or a mapping of tensors,
            that of each.
        outputs: Number of outputs that a network needs: of classes, or of targets.
        task: `classification` or `regression`.
        class_names: One name for each class; None for classes without names.
        columns: Names of the inputs' columns; None for inputs without names.
        prepared: The columns that turn a frame into inputs; None for other inputs.
        transform: Function applied to inputs whenever they are read; None for none. Read from a
            file, its description alone, see `bayesfl.base.described`.

    Example:
        >>> schema = bf.data.iid("digits", clients=2).schema
        >>> schema.tensors, schema.inputs, schema.outputs
        ({'x': ('float32', (64,))}, (64,), 10)
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    inputs: Shapes
    outputs: int
    task: Task
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    prepared: Columns | None = None
    transform: Any = None

    @classmethod
    def of(cls, split: ClientData, **about: Any) -> Self:
        """Return the schema of a split's rows, with the fields that a split does not have."""
        tensors = {name: (dtype_name(t.dtype), tuple(t.shape[1:])) for name, t in named(split.x)}
        return cls(tensors=tensors, inputs=split.inputs, transform=split.transform, **about)

    def described(self) -> dict[str, Any]:
        """Return the schema as JSON can hold it, with descriptions of functions, not their code."""
        prepared = None if self.prepared is None else self.prepared.to_json()
        return {**vars(self), "prepared": prepared, "transform": described(self.transform)}

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """Return what `described` wrote."""
        functions = {name: found[name] for name in ("transform", "augment") if name in found}
        prepared = None if found["prepared"] is None else Columns.from_json(found["prepared"])
        return cls(**as_tuples(found) | functions | {"prepared": prepared})

    def differences(self, other: "Schema") -> dict[str, tuple[Any, Any]]:
        """Return the fields where the rows of another schema differ for a model, with both values;
        names count where both have them.
        """
        one, two = (
            {
                **{name: getattr(of, name) for name in ("inputs", "outputs", "task", *NAMES)},
                "tensors": {name: _kind(dtype) for name, (dtype, _) in of.tensors.items()},
                "transform": described(of.transform),
            }
            for of in (self, other)
        )
        unnamed = [name for name in NAMES if None in (one[name], two[name])]
        return differences(one, two | {name: one[name] for name in unnamed})

    def refuse_other(self, what: str, other: "Schema") -> None:
        """Raise ValueError if the rows of another schema differ for a model; `what` begins the
        message.
        """
        if different := self.differences(other):
            place, (then, _) = next(iter(different.items()))
            remedy = REMEDIES.get(place.partition(".")[0], "pass data of the same problem")
            raise ValueError(
                f"{what} has other rows than the model was trained on, {in_words(different)}; "
                + remedy.format(then=then)
            )

    def read_inputs(self, x: Any, *, dtype: torch.dtype, device: torch.device) -> ClientData:
        """Return new rows as the split of a single client, on `device`.

        Args:
            x: Rows as their owner has them: an array, a tensor, nested lists or a frame, or a tuple
                or a mapping of these; or a frame like that of the federation.
            dtype: The run's precision.
            device: The device.

        Raises:
            TypeError: Something is no array.
            KeyError: `x` lacks an input.
            ValueError: `x` has other columns, or tensors of another kind of numbers or another
                shape, different numbers of rows or none, or numbers that are not finite; or its
                transform has another shape than `inputs`.

        Warns:
            UserWarning: Rows of a frame are unlike the training rows.
        """
        if self.prepared is not None and is_frame(x):
            x = self.prepared.apply(Table(x, "x"))
        columns = names_of(x, pooled=True)
        if None not in (columns, self.columns) and columns != self.columns:
            raise ValueError(
                f"x has the columns {list(columns or ())[:20]}, the model was trained on "
                f"{list(self.columns or ())[:20]}; select these, in this order"
            )
        found = dict(named(to_inputs(x, "x")))
        rows: Any = unnamed({name: self._fit(name, found[name]) for name in self.tensors})
        index = torch.arange(count(rows), device=device)
        options: dict[str, Any] = {"transform": self.transform, "dtype": dtype}
        return ClientData(rows, torch.zeros_like(index), index, np.array([len(index)]), **options)

    def _fit(self, name: str, t: Tensor) -> Tensor:
        """Return a tensor in the type of the training data's.

        Raises:
            ValueError: It holds another kind of numbers, or numbers outside this type; has another
                shape; or holds NaN or infinities.
        """
        kept, shape = self.tensors[name]
        if (kind := _kind(dtype_name(t.dtype))) != _kind(kept):
            raise ValueError(
                f"{name} holds {kind} ({t.dtype}) and the model was trained on {_kind(kept)} "
                f"(torch.{kept}); pass the rows as they were before they were converted, or "
                f"convert them by {name}.astype({kept!r}) or {name}.to(torch.{kept}) if no "
                "fractions are lost, as those of bytes over 255 would be"
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
        own = t.to(getattr(torch, kept))
        back = own.to(t.dtype)
        if not torch.equal(back, t):
            raise ValueError(
                f"{name} holds {int(t[back != t][0])}, which is no {own.dtype}, as the training "
                "data were; look at its codes"
            )
        return own

    def read_labels(self, y: Any, rows: int) -> Tensor:
        """Return the outcomes of new rows: labels [N] int64, names of classes as their numbers; or
        targets [N, O].

        Args:
            y: Numbers or names of classes, or targets: an array, a tensor, a list or a column.
            rows: Number of rows N.

        Raises:
            ValueError: There are others than N, or `y` holds no class, or numbers that are not
                those which name the classes.
        """
        values, names = np.asarray(y).copy(), self.class_names  # a frame's cannot be written
        truth = values.dtype.kind == "b"
        if names is not None:
            if values.dtype.kind in "OUT" or (truth and set(names) <= {"False", "True"}):
                number = {name: place for place, name in enumerate(names)}
                texts = [str(one) for one in values.ravel().tolist()]
                if other := sorted(set(texts) - number.keys()):
                    raise ValueError(
                        f"y has {other[0]!r}, which is none of the classes {list(number)}"
                    )
                values = np.array([number[text] for text in texts]).reshape(values.shape)
            elif (
                values.dtype.kind in REAL
                and (truth or _numerals(names))
                and not isinstance(y, Tensor)
            ):
                raise ValueError(
                    f"y has {'truth values' if truth else 'numbers'}, and the classes are named by "
                    f"others, {list(names[:5])}: pass these names as text, y.astype(str)"
                )
        wanted = (rows,) if self.task == "classification" else (rows, self.outputs)
        if len(values) != rows or values.size != np.prod(wanted):
            one = "a label" if self.task == "classification" else f"{self.outputs} targets"
            raise ValueError(
                f"y must have {one} for each of {rows} rows, got shape {list(values.shape)}"
            )
        labels = torch.as_tensor(values)
        if self.task == "regression":
            return labels.reshape(wanted)
        classes = labels.long()
        wrong = (classes != labels) | (classes < 0) | (classes >= self.outputs)
        if wrong.any() or values.ndim > 1 or (values.dtype.kind == "b" and self.outputs != 2):
            raise ValueError(
                f"y must be classes, whole numbers from 0 to {self.outputs - 1}, one for each row, "
                f"got {labels.unique().tolist()[:5]} of shape {list(labels.shape)}"
            )
        return classes


def _kind(dtype: str) -> str:
    """Return what tensors of a type hold."""
    return "truth values" if dtype == "bool" else "floats" if "float" in dtype else "whole numbers"


def _numerals(names: Sequence[str]) -> bool:
    """Return whether the name of a class is a number, or a truth value, other than its place."""
    read = [{"false": "0", "true": "1"}.get(name.lower(), name) for name in names]
    return any(is_number(name) and float(name) != place for place, name in enumerate(read))
