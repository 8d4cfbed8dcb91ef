"""What measurements of speed and memory share: random clients, sides that take turns, and memory
in a process of its own.
"""

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from bayesfl.data import ClientData, FederatedData, SourceInfo

T = TypeVar("T")


def federation(
    sizes: Sequence[int],
    shape: tuple[int, ...] = (784,),
    classes: int = 10,
    splits: tuple[str, ...] = ("train",),
) -> FederatedData:
    """Random inputs and labels, as many in every split: speed does not read them."""
    rng, n = torch.Generator().manual_seed(0), sum(sizes)
    # Around 0, for which the first rates leave the bodies of all methods alive.
    x = torch.rand(n * len(splits), *shape, generator=rng) - 0.5
    y = torch.randint(0, classes, (len(x),), generator=rng)
    return FederatedData(
        splits={
            name: ClientData(x, y, torch.arange(n) + k * n, np.array(sizes))
            for k, name in enumerate(splits)
        },
        outputs=classes,
        task="classification",
        inputs=shape,
        client_names=tuple(str(j) for j in range(len(sizes))),
        source=SourceInfo(name="random"),
        recipe={},
    )


def seconds(
    work: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter, calls: int = 1
) -> float:
    """Time work, the mean of several calls in a row."""
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls


def in_turn(sides: Mapping[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """Return what sides give in turn, so that disturbances fall on all."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(repetitions):
        for name, side in sides.items():
            gc.collect()
            found[name].append(side())
    return found


def ratio(own: Sequence[float], unit: Sequence[float]) -> float:
    """Return the median of the ratios within a repetition."""
    return statistics.median(a / b for a, b in zip(own, unit, strict=True))


def resident(key: str = "VmHWM") -> float:
    """Return a line of the process's status, in MiB: getrusage would count the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(key))
    return int(line.split()[1]) / 1024


def added(work: Callable[[], object]) -> float:
    """Return how many MiB work adds to the largest resident memory of this process."""
    before = resident()
    work()
    return resident() - before


def alone(work: Callable[..., T], *given: Any) -> T:
    """Return what a function gives in a process of its own; BrokenProcessPool where that dies."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (1,)) as pool:
        return pool.submit(work, *given).result()


def show(name: str, figures: Mapping[str, float | None]) -> None:
    """Print a line of the figures that there are."""
    found = [f"{key} {value:.4g}" for key, value in figures.items() if value is not None]
    print(f"  {name}: {', '.join(found)}", flush=True)
