"""States that clients keep: those that may be asked for again, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from bayesfl.data import FederatedData
from bayesfl.flower.states import States
from tests.flower.made import (
    Killed,
    assert_same,
    changed,
    deploy,
    grid_of,
    rounds_of,
    simulated,
    spoilt,
    trains,
)


def test_clients_keep_what_may_be_asked_for_again(
    ditto: Any, clients: FederatedData, tmp_path: Path
):
    """States older than the oldest that a kept checkpoint names are deleted, and no others."""
    found = deploy(ditto, clients, tmp_path, rounds=6, checkpoint=tmp_path / "server", every=2)
    for client in range(clients.clients):
        folder = tmp_path / f"node-{100 + client}" / found.experiment / f"client-{client}"
        assert sorted(rounds_of(file.name for file in folder.glob("state-*"))) == [2, 4, 5, 6]
    # When round 6 was asked for, the checkpoints after rounds 2 and 4 were kept, and 5 was where to
    # start.
    alone = deploy(ditto, clients, tmp_path / "alone", rounds=6)
    folder = tmp_path / "alone" / "node-100" / alone.experiment / "client-0"
    assert sorted(rounds_of(file.name for file in folder.glob("state-*"))) == [5, 6]


def test_a_client_that_is_never_taken_keeps_little(
    ditto: Any, clients: FederatedData, tmp_path: Path
):
    """Its states of other rounds are nobody's."""

    alter = spoilt(2, lambda reply: changed(reply, round=99))
    found = deploy(ditto, clients, tmp_path, alter=alter, rounds=8)
    assert found.base[2] == ""
    folder = tmp_path / "node-102" / found.experiment / "client-2"
    assert rounds_of(file.name for file in folder.glob("state-*")) == [8]


def test_what_a_dead_server_asked_for_comes_late(
    ditto: Any, clients: FederatedData, tmp_path: Path
):
    """A client that finishes an old order after the new server's does not spoil the state that the
    new one took.
    """
    late = []
    grid = grid_of(ditto, clients, tmp_path)

    def dies(client: int, message: Message, reply: Message) -> Message | None:
        if client == 2 and trains(message, 1):
            late.append(message)
        if trains(message, 2):
            raise Killed
        return None if client == 2 and trains(message, 0) else reply

    options: dict[str, Any] = {
        "rounds": 4,
        "checkpoint": tmp_path / "server",
        "every": 4,
        "timeout": 0.3,
    }
    grid.alter = dies
    with pytest.raises(Killed):
        deploy(ditto, clients, tmp_path, grid, **options)

    def comes_late(reply: Message) -> Message:
        grid.apps[102](late[0], grid.context(102))  # the old order, done after the new one
        return reply

    grid.alter = spoilt(2, comes_late, round=1)
    found = deploy(ditto, clients, tmp_path, grid, **options)
    assert_same(found, tmp_path, simulated(ditto, clients, rounds=4))


def test_names_cannot_leave_the_folder(tmp_path: Path):
    """An experiment's name comes from outside."""
    for name in ("../up", "/etc", "a/b", "", ".", "x" * 65):
        with pytest.raises(ValueError, match="letters, digits, _ and -"):
            States(tmp_path / "states", name, 0)
    assert not (tmp_path / "states").exists()


def test_kept_predictions_are_of_what_made_them(tmp_path: Path):
    """Those of another model, or of other rows, are made anew; so are damaged ones."""
    states = States(tmp_path, "run", 0)
    made_by = {"model": ["a", "b"], "run": [3, 0, "torch.float32", False, None]}
    kept = {"own": {"probs": torch.ones(1, 2, 3)}}
    states.keep("survey-validation", {"made_by": made_by, "predictions": kept})
    kept = states.kept("validation", made_by)
    assert kept is not None
    assert torch.equal(kept["own"]["probs"], torch.ones(1, 2, 3))
    assert states.kept("validation", {**made_by, "model": ["a", "c"]}) is None
    assert states.kept("calibration", made_by) is None
    (file,) = states.folder.glob("survey-*")
    file.write_bytes(file.read_bytes()[:-3])
    assert states.kept("validation", made_by) is None
    states.clean()
    assert not file.exists()
