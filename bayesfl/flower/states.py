"""A client's own state on its disk, one file a round.

The server names the state from which a client starts a round: that of its last reply that was taken, or the initial one. The client
writes what the round made of it under another name. So a repeated message, a lost reply, a refused one or a server that goes on from a
checkpoint all find the state that they mean, and never one that ran ahead.

A name is the number of rounds and the server's session, `000004-1f6f0c9a`: a server that was started again has another session, so what a
client still does for the one before is never mistaken for what it does for this one.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesfl.base.files import remove_leftovers
from bayesfl.federation import checkpoint

EXPERIMENT = re.compile(r"[0-9a-zA-Z_-]{1,64}")
SESSION = re.compile(r"[0-9a-f]{8}")
STATE = re.compile(r"\d{6,}-[0-9a-f]{8}")


def name_of(round: int, session: str) -> str:
    """A state's name.

    Raises:
        ValueError: The session could lead out of the folder.
    """
    if not STATE.fullmatch(name := f"{round:06d}-{session}"):
        raise ValueError(f"a state's name must be a round and eight hexadecimal digits, as 000004-1f6f0c9a, got {name!r}")
    return name


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
        if not EXPERIMENT.fullmatch(experiment):
            raise ValueError(f"the experiment's name must be letters, digits, _ and -, at most 64, got {experiment!r}")
        self.folder = Path(folder) / experiment / f"client-{client}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # personal models

    def clean(self) -> None:
        """Removes what a killed process has left under temporary names."""
        remove_leftovers(self.folder, ".safetensors")

    def write(self, round: int, session: str, rows: Mapping[str, Any]) -> None:
        """Keeps the state after `round` rounds, whole or not at all."""
        checkpoint.write(self.folder, {"round": round}, rows, name=f"state-{name_of(round, session)}.safetensors")

    def read(self, name: str) -> dict[str, Any]:
        """The state of that name.

        Raises:
            CheckpointError: It is absent or damaged.
            ValueError: It is no state's name.
        """
        round, _, session = name.partition("-")
        file = self.folder / f"state-{name_of(int(round), session)}.safetensors"
        if not file.is_file():
            raise checkpoint.CheckpointError(
                f"the client's state {name} is not in {str(self.folder)!r}; bring the folder back, or start another experiment"
            )
        _, tensors = checkpoint.read_file(file)
        return tensors

    def forget(self, round: int, *, named: Collection[str], sessions: Collection[str]) -> None:
        """Deletes the states that nobody will ask for again.

        Args:
            round: That is on; what is written in it stays.
            named: States that the server or a checkpoint of it names.
            sessions: The server's, the present one last; states of others are left alone, since a message that comes late knows less than
                one that came before it.
        """
        *ended, present = sessions
        for file in self.folder.glob("state-*.safetensors"):
            name = file.name.removeprefix("state-").removesuffix(".safetensors")
            if not STATE.fullmatch(name) or name in named:
                continue
            number, _, session = name.partition("-")
            if session in ended or (session == present and int(number) <= round):
                file.unlink(missing_ok=True)

    def write_predictions(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the predictions of the personal model after `round` rounds."""
        checkpoint.write(self.folder, {"round": round}, tensors, name="predictions.safetensors")
