"""A client's private states on its own disk, one file for each round.

The server names a client's state at the start of a round: that of its last accepted reply, or the
initial one. The client writes its new state under another name. After a repeated message, a lost or
rejected reply, or a restart of the server from a checkpoint, the client therefore finds the named
state, and never a later one.

A name is the number of rounds and the server's session, `000004-1f6f0c9a`. A restarted server has
another session, so that results of a client's work for an earlier session cannot be confused with
those for the present one.
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

STATE_NAME = re.compile(r"\d{6,}-[0-9a-f]{8}")
FORGOTTEN = "of the run from which this one began"
"""Text in a node's message if a state of the earlier run (`start=`) is missing; the server
recognises the case by this text.
"""


def state_name(round: int, session: str) -> str:
    """Return a state's name.

    Raises:
        ValueError: `session` is not eight hexadecimal digits; the name could then point outside the
            folder.
    """
    if not STATE_NAME.fullmatch(name := f"{round:06d}-{session}"):
        raise ValueError(
            "a state's name must be a round and eight hexadecimal digits, as 000004-1f6f0c9a, got "
            f"{name!r}"
        )
    return name


class States:
    """Store the states of one client in one experiment.

    Args:
        folder: The folder for clients' states.
        experiment: The experiment's name, as the server sent it.
        client: The client's id.
        name: The client's name, which identifies another client's state.

    Raises:
        ValueError: `experiment` contains characters that are not allowed in a name; it could then
            point outside the folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], experiment: str, client: int, name: str = ""
    ) -> None:
        self._name = name
        if not re.fullmatch(r"[0-9a-zA-Z_-]{1,64}", experiment):
            raise ValueError(
                "the experiment's name must be letters, digits, _ and -, at most 64, got "
                f"{experiment!r}"
            )
        self.folder = Path(folder) / experiment / f"client-{client}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)  # only the owner may read personal models

    def clean(self) -> None:
        """Remove temporary files of a killed process, and predictions stored for surveys."""
        remove_leftovers(self.folder, ".safetensors")
        self.forget_kept()

    def forget_kept(self) -> None:
        """Delete predictions that were stored for surveys."""
        for file in self.folder.glob("survey-*.safetensors"):
            file.unlink(missing_ok=True)

    def write(self, round: int, session: str, rows: Mapping[str, Any]) -> None:
        """Store the state after `round` rounds, completely or not at all."""
        self.keep(f"state-{state_name(round, session)}", {"client": self._name, "rows": rows})

    def read(self, name: str, *, now: str) -> dict[str, Any]:
        """Return the state of that name.

        Args:
            name: The state's name.
            now: The experiment that needs it, which may have started from this one; the remedy in
                the error message depends on it.

        Raises:
            CheckpointError: The state is absent or damaged.
            ValueError: `name` is not the name of a state.
        """
        round, _, session = name.partition("-")
        file = self.folder / f"state-{state_name(int(round), session)}.safetensors"
        if not file.is_file():
            before = now != self.folder.parent.name
            what, remedy = (
                (
                    f" {FORGOTTEN}",
                    "to let the client start anew, pass on the server start=dataclasses.replace("
                    "bayesfl.flower.load(folder, algorithm), names=[...]) with another name in "
                    "this client's place",
                )
                if before
                else ("", "start another experiment")
            )
            raise CheckpointError(
                f"{str(self.folder)!r} has no state {name}{what}; restore the folder, or {remedy}"
            )
        found = files.read_file(file, files.NODE)
        if found["client"] != self._name:
            raise CheckpointError(
                f"the client's state {name} belongs to {found['client']!r}, but this node's data "
                f"belong to {self._name!r}: start each node with its earlier client-id"
            )
        return found["rows"]

    def forget(self, round: int, *, named: Collection[str], sessions: Collection[str]) -> None:
        """Delete the states that will not be needed again.

        Args:
            round: The current round; states written in it are kept.
            named: States that the server or one of its checkpoints names, which are kept.
            sessions: The server's sessions, the present one last. States of other sessions are
                kept, because a late message may belong to an earlier session.
        """
        *ended, present = sessions
        for file in self.folder.glob("state-*.safetensors"):
            name = file.name.removeprefix("state-").removesuffix(".safetensors")
            number, _, session = name.partition("-")
            if (
                STATE_NAME.fullmatch(name)
                and name not in named
                and (session in ended or (session == present and int(number) <= round))
            ):
                file.unlink(missing_ok=True)

    def kept(self, name: str, made_by: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the content stored for surveys under a name, as `made_by` and `predictions`; None
        if there is none, or it was made from another state.
        """
        with contextlib.suppress(CheckpointError):
            found = files.read_file(self.folder / f"survey-{name}.safetensors", files.NODE)
            return found["predictions"] if found["made_by"] == made_by else None
        return None

    def keep(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of that name, completely or not at all."""
        files.write(self.folder, files.NODE, content, file=f"{name}.safetensors")
