"""A deployed run in its folder: whose it is, who may go on from it, and what a damaged checkpoint
costs.
"""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from torch import nn

from bayesfl.base.archive import CheckpointError
from bayesfl.data import FederatedData
from bayesfl.flower import load
from tests.flower.made import (
    Killed,
    assert_same,
    deploy,
    method,
    simulated,
    spoilt,
)


def test_a_run_that_goes_on_spares_what_the_older_checkpoint_names(
    ditto: Any, clients: FederatedData, tmp_path: Path
):
    """Killed right after it went on, with the checkpoint that it went on from damaged since: the
    older one still has its states.
    """
    options: dict[str, Any] = {"checkpoint": tmp_path / "server", "rounds": 6}

    def dies(reply: Message) -> Message:
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            deploy(ditto, clients, tmp_path, alter=spoilt(6, dies, round=4), **options)
    newest = max((tmp_path / "server").glob("round-*"))
    assert newest.name == "round-000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        found = deploy(ditto, clients, tmp_path, **options)
    assert_same(found, tmp_path, simulated(ditto, clients, rounds=6))


def test_one_server_a_folder(fedavg: Any, clients: FederatedData, tmp_path: Path):
    """A second one is refused while the first is at work."""
    refused = []

    def meanwhile(reply: Message) -> Message:
        with pytest.raises(ValueError, match=r"checkpoint folder .*in use"):
            deploy(fedavg, clients, tmp_path, checkpoint=tmp_path / "server")
        refused.append(reply)
        return reply

    alter = spoilt(0, meanwhile, round=0)
    deploy(fedavg, clients, tmp_path, alter=alter, checkpoint=tmp_path / "server")
    assert len(refused) == 1
    deploy(fedavg, clients, tmp_path, checkpoint=tmp_path / "server")


def test_another_run_in_the_folder(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Other settings, another method or a simulation's checkpoints are not gone on from."""
    algorithm, folder = method("fedavg", model), tmp_path / "server"
    deploy(algorithm, clients, tmp_path, rounds=2, checkpoint=folder)
    for other, options, words in (
        (algorithm, {"seed": 4}, r"keeps its settings, seed: saved 3, given 4; "),
        (algorithm, {"rounds": 1}, r"rounds .*2 .*already done; got 1"),
        (method("ditto", model), {}, "another method"),
    ):
        with pytest.raises((ValueError, CheckpointError), match=words):
            deploy(other, clients, tmp_path, checkpoint=folder, **options)
    simulated(algorithm, clients, checkpoint=tmp_path / "simulated")
    for path, given, words in (
        (tmp_path / "simulated", algorithm, r"a run of bf\.simulate, not the checkpoints"),
        (folder, model, r"algorithm .*Algorithm.* got SplitModel"),
    ):
        with pytest.raises((CheckpointError, TypeError), match=words):
            load(path, given)  # type: ignore[arg-type]
