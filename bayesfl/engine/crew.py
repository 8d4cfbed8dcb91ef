"""Worker threads that run the chunks of a round, each with one intra-op thread.

Torch's own threads spin at barriers and stall beside any other busy process; chunks in workers lose little there, are as fast
when the machine is quiet, and give the same bits for any number of them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Crew:
    """A pool of `workers` threads; as a context it gives torch's own number of threads back at the end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(workers, "bayesfl", initializer=lambda: torch.set_num_threads(1))

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def over(self, items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """`work` of every item, in order; at most workers + 1 results wait. What an item raises is raised here, and the rest dropped."""
        waiting: deque[Future[Result]] = deque()
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
