"""A run that is killed at a given moment, in a process of its own, for tests of durability."""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

import bayesfl as bf
from tests.cases import federation

# The package holds the function under this name.
module = importlib.import_module("bayesfl.federation.run.driver")


def algorithm() -> bf.Algorithm:
    """Something with private state, a schedule and an optimiser that persists."""
    return bf.algorithms.ditto(bf.models.mlp(8, hidden=8, outputs=3), epochs=1, batch_size=10)


def run(folder: str, rounds: int, **options: Any) -> Any:
    """All rounds, from the newest checkpoint in the folder."""
    return bf.simulate(
        algorithm(),
        federation(),
        rounds=rounds,
        participation=0.5,
        checkpoint=folder,
        progress=False,
        seed=4,
        **options,
    )


def code_of(program: Callable[..., None], *arguments: Any) -> int | None:
    """The exit code of a program in a process of its own, forked from one that has imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([program.__module__])
    process = context.Process(target=program, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


def die_at(moment: str, count: int) -> None:
    """Arranges for the process to be killed.

    Args:
        moment: write (half of the file is there), flush, rename, folder, or round (before its
            training).
        count: Before which of them.
    """
    left = [count]

    def before(
        function: Callable[..., Any], when: Callable[..., bool] = lambda *arguments: True
    ) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            if when(*arguments):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)

        return wrapped

    def is_folder(descriptor: int) -> bool:
        return os.path.isdir(f"/proc/self/fd/{descriptor}")

    if moment == "write":
        import safetensors.torch

        write = safetensors.torch.save_file

        def half(tensors: Any, path: str, metadata: Any) -> None:
            write(tensors, path, metadata=metadata)
            left[0] -= 1
            if not left[0]:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        safetensors.torch.save_file = half
    elif moment == "flush":
        os.fsync = before(os.fsync, lambda descriptor: not is_folder(descriptor))
    elif moment == "rename":
        os.replace = before(os.replace)
    elif moment == "folder":
        os.fsync = before(os.fsync, is_folder)
    else:
        module.run_round = before(module.run_round)


def program(folder: str, out: str, rounds: int, *moment: Any) -> None:
    """Die at a moment; without one, run to the end and save the result."""
    torch.set_num_threads(1)
    if moment:
        die_at(*moment)
    run(folder, rounds).save(out)
