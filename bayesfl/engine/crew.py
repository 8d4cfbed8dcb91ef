"""Worker threads that run a rank's chunks, each with one intra-op thread.

Torch's own threads wait actively at barriers and stall when another process is busy. Chunks in
workers then lose little time; they are as fast on an idle machine, and give the same bits for any
number of workers.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from bayesfl.base.processes.ranks import Alone, current

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_ONE_AT_A_TIME = threading.RLock()


def apart(phase: Any) -> AbstractContextManager[Any]:
    """Return a context that lets only one thread at a time run the steps of a user's phases.

    Such steps may use forward-mode differentiation, as torch.func.hessian and jvp do. Its level is
    one number for all threads of a process: two at once fail, or one reads the other's tangents.
    """
    function = getattr(phase, "fn", type(phase))
    while isinstance(function, partial):
        function = function.func
    own = not getattr(function, "__module__", "").startswith("bayesfl.")
    return _ONE_AT_A_TIME if own else nullcontext()


class Crew(AbstractContextManager["Crew"]):
    """Run work in a pool of `workers` threads at each rank; leaving the context restores torch's
    number of threads.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.ranks: Alone = current()
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            workers, "bayesfl", initializer=lambda: torch.set_num_threads(1)
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def over(
        self,
        items: Sequence[Item],
        work: Callable[[Item], Outcome],
        costs: Sequence[float] | None = None,
    ) -> Iterator[Outcome]:
        """Yield the results of `work` for all items, in order, at every rank; each rank computes
        its share.

        Args:
            items: The items.
            work: Function of an item.
            costs: Time for each item, in any unit; None for equal times.

        An exception raised by one item is raised here, and the remaining items are dropped.
        """
        if self.ranks.size == 1:
            yield from self.own(items, work)
            return
        mine = items[self.ranks.dealt([1.0] * len(items) if costs is None else costs)]
        for found in self.ranks.every(lambda: list(self.own(mine, work))):
            yield from found

    def own(self, items: Sequence[Item], work: Callable[[Item], Outcome]) -> Iterator[Outcome]:
        """Yield the results of `work` for all items, in order, at this rank, with at most workers +
        1 results waiting.

        An exception raised by one item is raised here, and the remaining items are dropped.
        """
        waiting: deque[Future[Outcome]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(work, item))
                if len(waiting) > self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
