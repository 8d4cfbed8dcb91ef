"""A client's private states on its own disk, one file for each round.

The server names the state from which a client starts a round: that of its last reply that was
taken, or the initial one. The client writes its new state under another name. So after a repeated
message, a lost or rejected reply, or a restart of the server from a checkpoint, the client finds
the state that the server names, and never a later one.

A name is the number of rounds and the server's session, `000004-1f6f0c9a`. A server that was
restarted has another session, so that work which a client still does for the session before is
never mistaken for work of the present one.
"""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bayesfl.base.archive import CheckpointError
from bayesfl.base.files import remove_leftovers
from bayesfl.federation.store import files

EXPERIMENT = re.compile(r"[0-9a-zA-Z_-]{1,64}")
STATE_NAME = re.compile(r"\d{6,}-[0-9a-f]{8}")
FORGOTTEN = "of the run from which this one began"
"""What a node says of a state that it has not kept until another run began from it; the server
recognises the case by these words.
"""
ANEW = (
    "let the client begin anew: on the server, pass "
    "start=dataclasses.replace(bayesfl.flower.load(folder, algorithm), names=[...]) with another "
    "name in this client's place"
)
"""What to do where a state of the run before is lost."""


def state_name(round: int, session: str) -> str:
    """Return a state's name.

    Raises:
        ValueError: `session` is not eight hexadecimal digits, so that the name could lead out of
            the folder.
    """
    if not STATE_NAME.fullmatch(name := f"{round:06d}-{session}"):
        raise ValueError(
            "a state's name must be a round and eight hexadecimal digits, as 000004-1f6f0c9a, got "
            f"{name!r}"
        )
    return name


class States:
    """The stored states of one client in one experiment.

    Args:
        folder: The folder in which clients keep their states.
        experiment: The experiment's name, as the server sent it.
        client: The client's id.
        name: The client's name, by which a state that is another client's is recognised.

    Raises:
        ValueError: `experiment` has other characters than a name may have, so that it could lead
            out of the folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], experiment: str, client: int, name: str = ""
    ) -> None:
        self._name = name
        if not EXPERIMENT.fullmatch(experiment):
            raise ValueError(
                "the experiment's name must be letters, digits, _ and -, at most 64, got "
                f"{experiment!r}"
            )
        self.folder = Path(folder) / experiment / f"client-{client}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # readable by its owner alone: personal models

    def clean(self) -> None:
        """Remove temporary files that a killed process has left, and predictions that were kept for
        surveys.
        """
        remove_leftovers(self.folder, ".safetensors")
        self.forget_kept()

    def forget_kept(self) -> None:
        """Delete predictions that were kept for surveys."""
        for file in self.folder.glob("survey-*.safetensors"):
            file.unlink(missing_ok=True)

    def write(self, round: int, session: str, rows: Mapping[str, Any]) -> None:
        """Store the state after `round` rounds, completely or not at all."""
        self.keep(f"state-{state_name(round, session)}", {"client": self._name, "rows": rows})

    def read(self, name: str, *, now: str) -> dict[str, Any]:
        """Return the state of that name.

        Args:
            name: The state's name.
            now: The experiment that asks for it, which may have begun from this one; the remedy
                depends on it.

        Raises:
            CheckpointError: The state is absent or damaged.
            ValueError: `name` is not the name of a state.
        """
        round, _, session = name.partition("-")
        file = self.folder / f"state-{state_name(int(round), session)}.safetensors"
        if not file.is_file():
            before = now != self.folder.parent.name
            what, remedy = (f" {FORGOTTEN}", ANEW) if before else ("", "start another experiment")
            raise CheckpointError(
                f"{str(self.folder)!r} holds no state {name}{what}; bring the folder back, or "
                f"{remedy}"
            )
        found = files.read_file(file, files.NODE)
        if found["client"] != self._name:
            raise CheckpointError(
                f"the client's state {name} is of {found['client']!r}, and this node's data are of "
                f"{self._name!r}: start each node with the client-id that it had"
            )
        return found["rows"]

    def forget(self, round: int, *, named: Collection[str], sessions: Collection[str]) -> None:
        """Delete the states that will not be asked for again.

        Args:
            round: The current round; states written in it are kept.
            named: States that the server or one of its checkpoints names, which are kept.
            sessions: The server's sessions, the present one last. States of other sessions are
                kept, since a message that arrives late does not know of later sessions.
        """
        *ended, present = sessions
        for file in self.folder.glob("state-*.safetensors"):
            name = file.name.removeprefix("state-").removesuffix(".safetensors")
            if not STATE_NAME.fullmatch(name) or name in named:
                continue
            number, _, session = name.partition("-")
            if session in ended or (session == present and int(number) <= round):
                file.unlink(missing_ok=True)

    def kept(self, name: str, made_by: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what was kept for surveys under a name, as `made_by` and `predictions`; None where
        that is nothing, or something else made it.
        """
        with contextlib.suppress(CheckpointError):
            found = files.read_file(self.folder / f"survey-{name}.safetensors", files.NODE)
            return found["predictions"] if found["made_by"] == made_by else None
        return None

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of that name, completely or not at all."""
        files.write(self.folder, files.NODE, content, file=f"{name}.safetensors")
