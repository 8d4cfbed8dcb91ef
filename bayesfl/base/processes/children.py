"""Ranks of one call in a notebook: processes that start and end with the call."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from bayesfl.base.processes.ranks import ALONE, OF_PROCESS, Ranks, current, using

START = timedelta(minutes=5)
"""Maximum time that the call waits for the other processes to start."""


@contextmanager
def on_processes(
    count: int | None, call: Callable[..., Any], given: Mapping[str, Any]
) -> Iterator[None]:
    """Run a block as rank 0 of `count` processes; the other processes make the same call.

    Method and data are sent to them once, with cloudpickle.

    Args:
        count: Number of processes; None for this one, or for the ranks of torchrun.
        call: The function that contains this block.
        given: Its arguments by name.
    """
    if count in (None, 1) or current() is not ALONE:
        yield
        return
    from joblib.externals.loky.backend.reduction import dumps

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    about |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    about |= {"PYTHONPATH": os.pathsep.join(sys.path), OF_PROCESS: ""}
    about |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as at; at.take_part()"],
            env={**os.environ, **about, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches rank 0 alone
        )
        for rank in range(1, count)
    ]

    def end(message: str = "") -> None:
        for other in others:
            other.kill()

    ranks = None
    try:
        content = dumps((call, dict(given)))
        for other in others:
            with suppress(BrokenPipeError), other.stdin as pipe:  # pyright: ignore[reportOptionalContextManager] (it is a pipe)
                pipe.write(content)
        ranks = Ranks(store, 0, count, count, end, start=START)
        ranks.compares = False  # as in `take_part`
        with using(ranks):
            yield
    finally:
        end()
        for other in others:
            other.wait()
        if ranks is not None:
            ranks.close()


def take_part() -> None:
    """Repeat the call of rank 0 in a process that rank 0 has started, and to which it writes."""
    call, given = pickle.load(sys.stdin.buffer)
    current().compares = False  # the arguments are those of rank 0
    with suppress(Exception):  # all ranks raise the error, and rank 0 prints it
        call(**given)
