"""A deployed run in its folder: whose it is, who may go on from it, and what a damaged checkpoint
costs.
"""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from torch import nn

from bayesfl.data import FederatedData
from bayesfl.federation.errors import CheckpointError
from bayesfl.flower import load
from tests.flower.grid import Alter
from tests.flower.made import Killed, asked, assert_same, deploy, grid_of, method, simulated


def test_a_damaged_checkpoint_costs_a_round(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """The one before it is taken, and the clients still have the states that it names."""
    algorithm = method("ditto", model)
    deploy(
        algorithm, clients, tmp_path, rounds=4, participation=0.7, checkpoint=tmp_path / "server"
    )
    newest = max((tmp_path / "server").glob("round-*"))
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        found = deploy(
            algorithm,
            clients,
            tmp_path,
            rounds=6,
            participation=0.7,
            checkpoint=tmp_path / "server",
        )
    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=6, participation=0.7))


def test_a_run_that_goes_on_spares_what_the_older_checkpoint_names(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Killed right after it went on, with the checkpoint that it went on from damaged since: the
    older one still has its states.
    """
    algorithm = method("ditto", model)
    options: dict[str, Any] = {"checkpoint": tmp_path / "server", "rounds": 6}

    def alter(round: int) -> Alter:
        def dies(client: int, message: Message, reply: Message) -> Message:
            if (
                message.metadata.message_type == "train"
                and asked(message, "round") == round
                and client == 6
            ):
                raise Killed
            return reply

        return dies

    for round in (4, 4):
        with pytest.raises(Killed):
            deploy(
                algorithm,
                clients,
                tmp_path,
                grid_of(algorithm, clients, tmp_path, alter=alter(round)),
                **options,
            )
    newest = max((tmp_path / "server").glob("round-*"))
    assert newest.name == "round-000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        found = deploy(algorithm, clients, tmp_path, **options)
    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=6))


def test_one_server_a_folder(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """A second one is refused while the first is at work."""
    algorithm, refused = method("fedavg", model), []

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and not refused:
            with pytest.raises(ValueError, match=r"checkpoint folder .*in use"):
                deploy(algorithm, clients, tmp_path, checkpoint=tmp_path / "server")
            refused.append(client)
        return reply

    deploy(
        algorithm,
        clients,
        tmp_path,
        grid_of(algorithm, clients, tmp_path, alter=alter),
        checkpoint=tmp_path / "server",
    )
    assert refused == [0]
    deploy(algorithm, clients, tmp_path, checkpoint=tmp_path / "server")


def test_another_run_in_the_folder(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Other settings, another method or a simulation's checkpoints are not gone on from."""
    algorithm, folder = method("fedavg", model), tmp_path / "server"
    deploy(algorithm, clients, tmp_path, rounds=2, checkpoint=folder)
    with pytest.raises(ValueError, match=r"keeps its settings, seed: saved 3, given 4; "):
        deploy(algorithm, clients, tmp_path, rounds=3, seed=4, checkpoint=folder)
    with pytest.raises(ValueError, match=r"rounds .*2 .*already done; got 1"):
        deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=folder)
    with pytest.raises(CheckpointError, match="another method"):
        deploy(method("ditto", model), clients, tmp_path, checkpoint=folder)
    simulated(algorithm, clients, checkpoint=tmp_path / "simulated")
    with pytest.raises(CheckpointError, match=r"a run of bf\.simulate, not the checkpoints"):
        load(tmp_path / "simulated", algorithm)
    with pytest.raises(TypeError, match=r"algorithm .*Algorithm.* got SplitModel"):
        load(folder, model)  # type: ignore[arg-type]
