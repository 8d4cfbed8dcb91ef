"""What a run does with its callbacks: looks at them before it begins, and calls them after every
round.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from bayesfl.base.ranks import current
from bayesfl.evaluation.history import History
from bayesfl.federation.run.callbacks import Callback

RELEASED = ("round", "releases", "epsilon", "epsilon_own")
"""Columns of the history that callbacks see under `ClientPrivacy`: by others the clients' data
would decide when a run ends, which no epsilon covers.
"""


def check_callbacks(name: str, on_round: object) -> None:
    """Check that callbacks are a list of functions.

    Raises:
        TypeError: They are no list, or one of them is no function.
    """
    if not isinstance(on_round, Sequence) or isinstance(on_round, str):
        raise TypeError(f"{name} must be a list of callbacks, as [it], got {on_round!r}")
    for callback in on_round:
        if not callable(callback) or isinstance(callback, type):  # else after the first round
            raise TypeError(
                f"{name} must hold functions, or objects as CSV(path), got {callback!r}"
            )


def ended(callbacks: Sequence[Callback], result: Any) -> bool:
    """Call every callback with the run so far, and say whether one ends it, at any rank; an error
    of a callback carries the run as its `result`.
    """
    said, told = [], result
    if result.settings.sampling == "poisson":
        rows = [{key: row[key] for key in RELEASED if key in row} for row in result.history]
        told = replace(result, history=History(rows))

    def call() -> bool:
        for callback in callbacks:
            answer = callback(told)
            said.append(isinstance(answer, bool | np.bool_ | Tensor) and bool(answer))
        return any(said)

    try:
        return any(current().every(call, "simulate"))
    except Exception as error:  # a user's function may raise anything; it is passed on
        error.add_note(
            f"raised by a callback after round {result.round}; the run so far is this error's "
            "attribute `result`"
        )
        error.result = result  # type: ignore[attr-defined]  # on an error of any class, as a DivergenceError has it
        raise


def finished(callbacks: Sequence[Any], result: Any) -> Any:
    """Return the state that a run returns, as the callbacks with a `finish` choose."""
    for callback in callbacks:
        result = callback.finish(result) if hasattr(callback, "finish") else result
    return result
