"""Checks of transforms and augmentations on a few rows."""

import numpy as np
import torch

from bayesfl.base.addressed import Addressed
from bayesfl.base.described import digest_of
from bayesfl.base.inputs import Inputs, at, count, each, named
from bayesfl.base.numerics import apart, same
from bayesfl.base.warning import warn
from bayesfl.data.split import Change, ClientData, all_finite
from bayesfl.data.tensors import dtype_name

TRIED_ROWS = 4
"""Number of rows on which a function is tried."""

CALLS = 3
"""Number of calls to detect a function that counts, or draws by other means than torch."""

# Largest difference between a row alone and the same row among others, relative to the largest
# number: sums have another order.
_ROUNDING = 1e-3


def check_change(name: str, split: ClientData, change: Change) -> None:
    """Try a transform or an augmentation on a few rows of a split.

    Args:
        name: `transform` or `augment`.
        split: The data, without the function.
        change: The function.

    Raises:
        ValueError: It returns another number of rows or numbers that are not finite, writes into
            its input, counts, or draws by something else than torch or by a generator of its own; a
            transform draws, or gives a row something else among others than alone; an augmentation
            returns other shapes or dtypes.
        TypeError: It is no function, or does not return tensors.

    Warns:
        UserWarning: It changes its own state when it is called.
    """
    spread = np.unique(np.linspace(0, len(split.index) - 1, TRIED_ROWS).astype(np.int64))
    x = split.take(split.index[torch.from_numpy(spread).to(split.index.device)])
    before = digest_of(change)
    calls, drawn = [], False
    for _ in range(CALLS):
        with Addressed(0) as drawing:
            calls.append(_tried_on(name, split, change, x))
        drawn |= drawing.drawn
    made, *again = calls
    all_finite(name, made, x)
    steady = all(_near(made, other, 0.0) for other in again)
    if name == "augment":
        if not steady:
            raise ValueError(
                "augment gives other inputs when its draws are repeated: it counts, or draws by "
                "other means than torch's operations, which no seed of a run reaches; draw by "
                "torch, as torch.rand(len(x)) does, without a generator"
            )
        if _form(made) != _form(x):
            raise ValueError(
                f"augment makes {_form(made)} of {_form(x)}, the names, types and shapes of "
                "examples: predictions see those that are not augmented, so return inputs of the "
                "same form; crop after padding, and convert by data.transformed(...), which "
                "predictions have, too"
            )
    elif drawn or not steady:
        raise ValueError(
            "transform gives other numbers each time, or draws: what is done to inputs must be the "
            "same in training and prediction. Pass it to data.augmented(...), which is for "
            "training alone"
        )
    elif not all(
        _near(at(made, one), _tried_on(name, split, change, at(x, one)), _ROUNDING)
        for one in (slice(row, row + 1) for row in range(count(x)))
    ):
        raise ValueError(
            "transform gives a row other numbers among others than alone, so that predictions "
            "would depend on what is read together: standardise with fixed numbers, as lambda x: "
            "(x - mean) / std does with those of the training data, and put modules into eval()"
        )
    if digest_of(change) != before:
        warn(
            f"{name} changes what it holds or reads when it is called, so that saved runs and "
            "saved models of clients will not recognise it: fill that before, as in __init__",
        )


def _tried_on(name: str, split: ClientData, change: Change, x: Inputs) -> Inputs:
    """Return what a function makes of a copy of inputs, after a check that it did not write into
    that.
    """
    given = each(lambda t: t.clone(), x)
    made = each(lambda t: t.clone(), split.changed(name, change, given))
    if not _near(given, x, 0.0):
        raise ValueError(
            f"{name} writes into its input: return new tensors, as x / 255 does in place of "
            "x.div_(255)"
        )
    return made


def _form(x: Inputs) -> dict[str, tuple[str, list[int]]]:
    """Return the type and the shape of one example of every tensor, by name."""
    return {name: (dtype_name(t.dtype), list(t.shape[1:])) for name, t in named(x)}


def _near(one: Inputs, other: Inputs, rounding: float) -> bool:
    """Return whether two trees hold the same numbers, floats to within a share of the largest."""
    mine, theirs = dict(named(one)), dict(named(other))
    return _form(one) == _form(other) and all(
        not apart(theirs[name], t, rounding) if t.is_floating_point() else same(t, theirs[name])
        for name, t in mine.items()
    )
