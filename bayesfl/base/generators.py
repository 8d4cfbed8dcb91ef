"""The random generators that a whole program shares: those of torch, NumPy and Python."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "numpy.random": (np.random.get_state, np.random.set_state),
    "random": (random.getstate, random.setstate),
}


@contextlib.contextmanager
def kept(*names: str) -> Iterator[Callable[[], list[str]]]:
    """Enter a context that gives a function which names the generators used so far, and after which they are as they were.

    Args:
        names: Which of "torch", "numpy.random" and "random".
    """
    before = {name: _SHARED[name][0]() for name in names}
    plain = {name: _plain(state) for name, state in before.items()}
    try:
        yield lambda: [name for name in names if _plain(_SHARED[name][0]()) != plain[name]]
    finally:
        for name, state in before.items():
            _SHARED[name][1](state)


def _plain(state: Any) -> Any:
    """Return a state as bytes and numbers, which can be compared."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)
