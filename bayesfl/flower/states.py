"""A client's own state on its disk, one file a round.

The server names the state from which a client starts a round (`base`: the round of its last state that the server took, 0 for the initial
one), and the client writes what the round made of it under that round's number. So a repeated message, a lost reply, a refused one or a
server that goes on from a checkpoint all find the state that they mean, and never one that ran ahead.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesfl import checkpoint
from bayesfl.files import remove_leftovers

NAME = re.compile(r"[0-9a-zA-Z_-]{1,64}")
FILE = re.compile(r"state-(\d{6,})\.safetensors")


class States:
    """The states of one client in one experiment.

    Args:
        folder: Where a client keeps its states.
        experiment: The experiment's name, as the server sent it.
        client: The client's id.

    Raises:
        ValueError: The name could lead out of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], experiment: str, client: int) -> None:
        if not NAME.fullmatch(experiment):
            raise ValueError(f"the experiment's name must be letters, digits, _ and -, at most 64, got {experiment!r}")
        self.folder = Path(folder) / experiment / f"client-{client}"
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder, ".safetensors")

    def write(self, round: int, rows: Mapping[str, Any]) -> None:
        """Keeps the state after `round` rounds, whole or not at all."""
        checkpoint.write(self.folder, {"round": round}, rows, name=f"state-{round:06d}.safetensors")

    def read(self, round: int) -> dict[str, Any]:
        """The state after `round` rounds.

        Raises:
            CheckpointError: It is absent or damaged.
        """
        file = self.folder / f"state-{round:06d}.safetensors"
        if not file.is_file():
            raise checkpoint.CheckpointError(
                f"the client's state after round {round} is not in {str(self.folder)!r}; bring the folder back, or start another experiment"
            )
        _, tensors = checkpoint.read_file(file)
        return tensors

    def forget(self, before: int) -> None:
        """Deletes the states of rounds before `before`, which no checkpoint of the server names any more."""
        for file in self.folder.glob("state-*"):
            if (match := FILE.fullmatch(file.name)) and int(match[1]) < before:
                file.unlink(missing_ok=True)

    def write_predictions(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the predictions of the personal model after `round` rounds."""
        checkpoint.write(self.folder, {"round": round}, tensors, name="predictions.safetensors")
