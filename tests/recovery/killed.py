"""A run that is killed at a given moment: what tests of durability start as a process of its own.

python -m tests.recovery.killed FOLDER OUT ROUNDS [MOMENT COUNT]

MOMENT is write (half of the file is there), flush, rename, folder (before the COUNT-th of them), or
round (before its training). Without, the run goes to its end and saves its result in OUT.
"""

import importlib
import os
import signal
import sys
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


def die_at(moment: str, count: int) -> None:
    """Arranges for the process to be killed."""
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 4:
        die_at(sys.argv[4], int(sys.argv[5]))
    run(sys.argv[1], int(sys.argv[3])).save(sys.argv[2])
