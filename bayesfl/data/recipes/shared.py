"""Recipes: one call makes a federation from the name of a data set, as papers do.

This module holds their common options, and the steps that several need. Recipes
of equal parts, of label skew and of concept shift keep the data's own division into training and
test rows, all but `label_groups`; all recipes share one copy of the data between clients. The same
arguments give the same partition on every machine; two federations are the same if their
`FederatedData.hash` is.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypedDict,
    get_args,
    get_type_hints,
)

import numpy as np
from torch import Tensor

from bayesfl.base.options import AT_LEAST_0, AT_LEAST_1, Range, declared
from bayesfl.base.random import Purpose, generator
from bayesfl.data.assembly import assemble
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import generated
from bayesfl.data.partitions import LIMIT, stratified
from bayesfl.data.recipes.readers import load
from bayesfl.data.sources import Source

_SHARE = Range(0, 1, "[", why="it is a share of each client's training rows")

SourceName: TypeAlias = Annotated[str | Source, "Name of a data set, or a source of your own."]
Clients: TypeAlias = Annotated[int, AT_LEAST_1, "Number of clients."]
Labels: TypeAlias = Annotated[int, AT_LEAST_1, "Number of classes of each client."]
Superclasses: TypeAlias = Annotated[
    Sequence[Sequence[int]] | None,
    "The classes of each superclass, in groups of one size; None for the source's own.",
]
TrainRows: TypeAlias = Annotated[
    int, AT_LEAST_1, "Number of training rows of each client, before validation and calibration."
]
TestRows: TypeAlias = Annotated[int, AT_LEAST_1, "Number of test rows of each client."]
Share: TypeAlias = Annotated[float, Range(0, 1, "[]")]
MaxSize: TypeAlias = Annotated[
    int | None,
    AT_LEAST_1,
    "Largest number of training rows of each client, before validation and calibration. Those "
    "beyond it are left out, each class in proportion. None for all.",
]
Seed: TypeAlias = Annotated[
    int,
    AT_LEAST_0,
    "Seed of all draws: the partition, rows left out, and the two shares below.",
]
Validation: TypeAlias = Annotated[
    float,
    _SHARE,
    "Share of each client's training rows for tuning, at least one row; 0 for no such split.",
]
Calibration: TypeAlias = Annotated[
    float, _SHARE, "The same for temperatures and conformal thresholds, disjoint from `validation`."
]
Root: TypeAlias = Annotated[
    str | Path | None,
    "Folder of the data's files; None for the default of `bayesfl.data.load`.",
]
Download: TypeAlias = Annotated[bool, "Whether torchvision may download images that are absent."]

P = ParamSpec("P")


class Read(TypedDict, total=False):
    """Options of every recipe that divides a data set by name."""

    seed: Seed
    validation: Validation
    calibration: Calibration
    root: Root
    download: Download


class Cut(Read, total=False):
    """Options of a recipe that also leaves clients some of their training rows."""

    max_size: MaxSize


class Recipe(Protocol[P]):
    """A recipe as it is called."""

    def __call__(
        self, source: SourceName = "digits", *args: P.args, **kwargs: P.kwargs
    ) -> FederatedData:
        """Make a federation."""
        ...


@dataclass(frozen=True, kw_only=True)
@declared
class Options:
    """The options of every recipe, by these names, and with these defaults unless it has others.

    Recipes of one data set have no `source`, and those that need no files no `root` and no
    `download`. Those that fix or standardise each client's training rows themselves have no
    `max_size`.

    Args:
        recipe: Record of the call: the recipe's name, its own options and what it found; source,
            shares and seed are added.
    """

    source: SourceName = "digits"
    max_size: MaxSize = None
    seed: Seed = 0
    validation: Validation = 0.0
    calibration: Calibration = 0.0
    root: Root = None
    download: Download = False
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def rng(self) -> np.random.Generator:
        """Return the generator of the partition, at its start."""
        return generator(self.seed, Purpose.PARTITION)

    def load(self) -> Source:
        """Return the source that was given, or read the data set that was named."""
        return (
            self.source
            if isinstance(self.source, Source)
            else load(self.source, root=self.root, download=self.download)
        )

    def open(self) -> Source:
        """Return a data set that is to be divided among clients.

        Raises:
            ValueError: The rows of the data set belong to clients already.
        """
        opened = self.load()
        if opened.owners is not None:
            own = "shakespeare()" if opened.info.name == "shakespeare" else "heart_disease()"
            raise ValueError(
                f"{opened.info.name!r} belongs to its own clients already and has no test part to "
                f"share out; use {own}"
            )
        return opened

    def federate(
        self,
        source: Source,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray],
        *,
        pooled: bool = False,
        x: Tensor | None = None,
        y: Tensor | None = None,
        outputs: int | None = None,
        names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        environment: Tensor | None = None,
    ) -> FederatedData:
        """Give each client its rows of a data set, and take the validation and calibration shares
        out of its training rows.

        Args:
            source: The data set.
            train: Training rows of each client.
            test: Test rows of each client, numbered from 0 within the source's test part.
            pooled: Whether test rows are numbered through all of the source, as training rows are,
                so that its own division is not kept.
            x: Inputs in place of the source's; None for the source's.
            y: Labels in place of the source's; None for the source's.
            outputs: Number of classes in place of the source's; None for the source's.
            names: One name for each client; by default `client 0` and so on.
            class_names: One name for each class; None for the source's.
            environment: Environment from which each row comes, [N] int64, from 0 within each
                client; None for no environments.

        Raises:
            ValueError: The shares add up to 1 or more, or a client would have no training rows
                left.
        """
        y, recipe = source.y if y is None else y, self.recipe
        if self.max_size is not None:
            labels = y.numpy() if source.task == "classification" and y.dim() == 1 else None
            train = [
                stratified(
                    None if labels is None else labels[mine],
                    mine,
                    max(len(mine) - self.max_size, 0),
                    generator(self.seed, Purpose.SPLIT, client=j, phase=LIMIT),
                )[0]
                for j, mine in enumerate(train)
            ]
            recipe = {**recipe, "max_size": self.max_size}
        return assemble(
            source.x if x is None else x,
            y,
            {"train": train, "test": test if pooled else [rows + source.train for rows in test]},
            outputs=source.outputs if outputs is None else outputs,
            task=source.task,
            names=generated(len(train)) if names is None else names,
            class_names=source.class_names if class_names is None else class_names,
            source=source.info,
            recipe=recipe,
            validation=self.validation,
            calibration=self.calibration,
            seed=self.seed,
            environment=environment,
        )

    def by_class(self) -> tuple[Source, np.ndarray, np.ndarray]:
        """Return the source, the class of each training row, and that of each test row.

        Raises:
            ValueError: The data set is for regression, or as by `open`.
        """
        source = self.open()
        if source.task != "classification":
            raise ValueError(
                f"{self.recipe['recipe']} shares data out by class, {source.info.name!r} is a "
                "regression: use iid"
            )
        train, test = source.y.numpy()[: source.train], source.y.numpy()[source.train :]
        return source, train, test


def recipe(
    source: str = "digits",
) -> Callable[[Callable[Concatenate[Options, P], FederatedData]], Recipe[P]]:
    """Make a recipe of a function that divides a data set: its users give a source, the options
    that all recipes share and its own, and the function gets these as `Options`.

    The last parameter of the function, `**_: Unpack[Cut]` or `**_: Unpack[Read]`, names the shared
    options that it has. The recipe is `declared`: it raises an error for unknown options, and
    `help` shows all.

    Args:
        source: The data set by default.
    """

    def decorate(function: Any) -> Any:
        _, *own, rest = inspect.signature(function).parameters.values()
        hints = get_type_hints(Options, include_extras=True)
        given = [name for name in hints if name in get_type_hints(*get_args(rest.annotation))]

        @functools.wraps(function)
        def divide(source: SourceName, **named: Any) -> FederatedData:
            mine = {one.name: named.pop(one.name) for one in own}
            called = source.info.name if isinstance(source, Source) else source
            about = {"recipe": function.__name__, "source": called, **mine}
            return function(Options(source=source, recipe=about, **named), **mine)

        made: Any = divide
        del made.__wrapped__  # whose signature is another
        parameters = [
            inspect.Parameter("source", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=source),
            *own,
            *(
                inspect.Parameter(
                    one, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, one)
                )
                for one in given
            ),
        ]
        made.__signature__ = inspect.Signature(parameters, return_annotation=FederatedData)
        made.__annotations__ = (
            {"source": SourceName}
            | {one.name: one.annotation for one in own}
            | {one: hints[one] for one in given}
            | {"return": FederatedData}
        )
        return declared(made)

    return decorate


def check_clients(clients: int, most: int, what: str) -> None:
    """Raise ValueError if there are more clients than `most`, the number of `what`."""
    if clients > most:
        raise ValueError(
            f"clients must be at most {most}, as many as there are {what}, got {clients}"
        )


def superclass_groups(opened: Source, given: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Return the classes of each superclass: those given, else the source's own, else classes in
    pairs.

    Raises:
        ValueError: The groups are not of one size or not of different classes, as pairs of an odd
            number are not.
    """
    given = given if given is not None else opened.superclasses
    given = [(k, k + 1) for k in range(0, opened.outputs, 2)] if given is None else given
    groups = [[int(k) for k in group] for group in given]
    flat = [k for group in groups for k in group]
    if (
        not flat
        or len({len(group) for group in groups}) > 1
        or len(set(flat)) < len(flat)
        or not set(flat) <= set(range(opened.outputs))
    ):
        raise ValueError(
            "superclasses must be groups of one size of different classes within [0, "
            f"{opened.outputs}), got {groups} for {opened.info.name!r}"
        )
    return groups
