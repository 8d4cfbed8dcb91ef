"""A deployment that begins where another ended is the simulation that does so: known clients with
their states, new ones adapted.
"""

import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.data import FederatedData
from bayesfl.flower import client_app, load
from tests.cases import CASES, SAMPLE, Case, sampled
from tests.flower.grid import LocalGrid
from tests.flower.made import (
    METHODS,
    OPTIONS,
    assert_same,
    deploy,
    grid_of,
    method,
    simulated,
)

LATER: dict[str, Any] = {"rounds": 2, "seed": 9}
MOVED = [4, 6, 1, 5, 0]
OTHERS = ("scaffold", "fedpac", "fedpop", "fedamp", "pfedhn", "fedep", "clustered")
"""Methods of what else a start takes: variates, statistics and weights of clients, chains, models
of their own on the server, embeddings, sites and groups; tests of the server have all methods.
"""


@pytest.mark.filterwarnings("ignore:the earlier run has 5 clients")
@pytest.mark.parametrize(
    "case", sampled(case for case in CASES if case.name in (*SAMPLE, *OTHERS)), ids=str
)
def test_it_is_the_simulation(case: Case, model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Five clients at half participation, so that some never trained; then two are gone, two are
    new, and numbers have moved.
    """
    algorithm, few = case(model), clients.select(range(5))
    half: dict[str, Any] = {"participation": 0.5, "rounds": 1, "train": "cohort"}
    sim = simulated(algorithm, few, **half)
    found = deploy(algorithm, few, tmp_path, checkpoint=tmp_path / "first", **half)
    moved, nodes = clients.select(MOVED), [100 + client for client in MOVED]
    told = r"'client 6', 'client 5'\] are new and \['client 2', 'client 3'\]"
    with pytest.warns(UserWarning, match=told):
        later_told = simulated(algorithm, moved, start=sim, **LATER)
    # All from a folder, those of the quick tests from what is in memory, too.
    starts = [tmp_path / "first", *([found] if case.name in SAMPLE else [])]
    for start in starts:
        with pytest.warns(UserWarning, match=told):
            later = deploy(
                algorithm,
                moved,
                tmp_path,
                grid_of(algorithm, moved, tmp_path, nodes=nodes),
                start=start,
                **LATER,
            )
        assert_same(later, tmp_path, later_told, nodes)
        assert later.experiment != found.experiment
        assert later.names == moved.client_names


@pytest.mark.parametrize("name", METHODS)
def test_a_run_after_a_run_after_a_run(
    name: str, model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """A client that was never in a cohort of the second run goes on from the first; one that was in
    none, from its first start.
    """
    algorithm, some = method(name, model), {"participation": 0.3, "rounds": 1, "train": "cohort"}
    sim = simulated(algorithm, clients, **some)
    found = deploy(algorithm, clients, tmp_path, **some)
    order = [6, 2, 0, 4, 1, 3, 5]
    moved, nodes = clients.select(order), [100 + client for client in order]
    grid = grid_of(algorithm, moved, tmp_path, nodes=nodes)
    for seed in (11, 12):
        sim = simulated(algorithm, moved, start=sim, **{**some, "seed": seed})
        found = deploy(
            algorithm,
            moved,
            tmp_path,
            grid,
            start=found,
            checkpoint=tmp_path / f"server-{seed}",
            **{**some, "seed": seed},
        )
        for known in (found, load(tmp_path / f"server-{seed}", algorithm)):
            assert_same(known, tmp_path, sim, nodes)
    assert found.before is not None
    assert len({place.experiment for place in found.before.places if place}) == 2
    x, _ = clients.test.client(2)
    assert_close(
        bf.load_client(tmp_path / "node-102", algorithm).predict(x).probs,
        sim.client(1).predict(x).probs,
        atol=1e-6,
        rtol=0,
    )


def alike(algorithm: bf.Algorithm, clients: FederatedData, folder: Path) -> LocalGrid:
    """Nodes whose data all call their client the same."""

    def data_of(context: Any) -> FederatedData:
        return replace(
            clients.select([int(context.node_config["client-id"])]), client_names=("ward",)
        )

    app = client_app(algorithm, data_of, engine=bf.Engine(workers=1))
    return LocalGrid({100 + client: app for client in range(clients.clients)}, folder)


def test_clients_of_one_name_are_never_confused(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path, caplog: Any
):
    """Said when they first train, refused where names would matter; by number if that is
    asked for.
    """
    before = deploy(ditto, clients, tmp_path, alike(ditto, clients, tmp_path), rounds=1)
    assert re.search(
        r"clients \[0, 1, 2, 3, 4, 5, 6\] are all called 'ward': .*load_data", caplog.text
    )
    with pytest.raises(
        ValueError, match=r"clients \[0, 1, 2, 3, 4, 5, 6\] are all called 'ward'; .*client_ids"
    ):
        deploy(ditto, clients, tmp_path, alike(ditto, clients, tmp_path), start=before, **LATER)
    with pytest.raises(
        ValueError, match=r"in the earlier run clients \[0, .* called 'ward'; .*names=\(\)"
    ):
        deploy(ditto, clients, tmp_path, start=before, **LATER)
    with pytest.warns(UserWarning, match=r"matched by number"):
        found = deploy(
            ditto,
            clients,
            tmp_path,
            alike(ditto, clients, tmp_path),
            start=replace(before, names=()),
            **LATER,
        )
    sim = simulated(ditto, clients, start=simulated(ditto, clients, rounds=1), **LATER)
    assert_same(found, tmp_path, sim)


def test_folders_of_another_kind(
    model: nn.Module, ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """Each says what it is, and what reads it."""
    deploy(ditto, clients, tmp_path, rounds=1, checkpoint=tmp_path / "server")
    simulated(ditto, clients, rounds=1).save(tmp_path / "run")
    sim = (
        r"server.* holds the checkpoints of a deployment over Flower, not a run of "
        r"bf\.simulate: .*flower\.serve\(start=path\).*nodes"
    )
    for read in (
        lambda: simulated(ditto, clients, start=tmp_path / "server"),
        lambda: simulated(ditto, clients, resume=tmp_path / "server"),
        lambda: bf.load(tmp_path / "server", ditto),
    ):
        with pytest.raises(CheckpointError, match=sim):
            read()
    with pytest.raises(
        CheckpointError,
        match=r"run.* holds a run of bf\.simulate, not the checkpoints of .* "
        r"bf\.simulate\(start=path\)",
    ):
        deploy(ditto, clients, tmp_path, start=tmp_path / "run", **LATER)
    for node in (tmp_path / "node-102", *(tmp_path / "node-102").glob("*")):
        with pytest.raises(CheckpointError, match="contains no saved run"):
            deploy(ditto, clients, tmp_path, start=node, **LATER)
    bf.load_client(tmp_path / "node-102", ditto).save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="contains no saved run"):
        simulated(ditto, clients, start=tmp_path / "one")


def test_a_server_that_goes_on_knows_where_it_began(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """Stopped after its first round, at which half of the clients trained: the others still begin
    from the run before.
    """
    before = deploy(ditto, clients, tmp_path, rounds=1)
    sim = simulated(
        ditto,
        clients,
        start=simulated(ditto, clients, rounds=1),
        participation=0.4,
        **LATER,
    )
    options: dict[str, Any] = {
        "participation": 0.4,
        "seed": 9,
        "checkpoint": tmp_path / "server",
        "start": before,
    }
    deploy(ditto, clients, tmp_path, rounds=2, on_round=[lambda run: run.round == 1], **options)
    assert load(tmp_path / "server", ditto).before is not None
    found = deploy(ditto, clients, tmp_path, rounds=2, **options)
    assert_same(found, tmp_path, sim)


def test_a_client_whose_state_is_lost_begins_anew_where_the_server_says_so(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path, caplog: Any
):
    """It says so and is left out, not taken for a new client; its message has the line with which
    it begins as a new client of a simulation does.
    """
    before = deploy(ditto, clients, tmp_path, rounds=1, checkpoint=tmp_path / "first")
    shutil.rmtree(tmp_path / "node-102")
    left_out = deploy(ditto, clients, tmp_path, start=before, **LATER)
    assert (left_out.history["rejected"].tolist(), left_out.base[2]) == ([1, 1], "")
    words = (
        r"client 2 .*node-102.* has no state 000001-\w+ of the run from which .*; restore "
        r"the folder, or to let the client "
    )
    assert re.search(
        words
        + r"start anew, pass on the server start=dataclasses\.replace\(.*load\(folder, .*names=\[",
        caplog.text,
    )
    sim = simulated(ditto, clients, rounds=1)
    others = ["client 0", "client 1", "before its disk failed", *before.names[3:]]
    with pytest.warns(UserWarning, match=r"\['client 2'\] are new"):
        later_told = simulated(
            ditto,
            clients,
            start=replace(sim, known=replace(clients, client_names=tuple(others))),
            **LATER,
        )
    shutil.rmtree(tmp_path / "node-102")
    with pytest.warns(UserWarning, match=r"\['client 2'\] are new"):
        later = deploy(
            ditto,
            clients,
            tmp_path,
            start=replace(load(tmp_path / "first", ditto), names=others),
            **LATER,
        )
    assert_same(later, tmp_path, later_told)


def test_a_start_that_all_nodes_have_forgotten(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """That of the best round, after the run went on without the callback: an error, whoever is
    asked; the newest state is there.
    """
    folder = tmp_path / "best"
    best = bf.callbacks.EarlyStopping(
        "train_nll", patience=1, keep="best", folder=folder, lowest=False
    )
    deploy(ditto, clients, tmp_path, on_round=[best], checkpoint=tmp_path / "server", rounds=5)
    forgotten = load(folder, ditto)
    deploy(ditto, clients, tmp_path, checkpoint=tmp_path / "server", rounds=5)
    assert forgotten.round < 4
    words = (
        r"no client has kept its state of .*if that run continued .*pass its folder of "
        r"checkpoints as start=; otherwise .*leave start= out"
    )
    for participation in (1.0, 0.3):
        with pytest.raises(CheckpointError, match=words):
            deploy(
                ditto,
                clients,
                tmp_path,
                start=folder,
                participation=participation,
                train="cohort",
                **LATER,
            )
    assert deploy(ditto, clients, tmp_path, start=tmp_path / "server", **LATER).round == 2


def test_what_does_not_fit_is_refused(model: nn.Module, clients: FederatedData, tmp_path: Path):
    algorithm = bf.algorithms.fedavg(model, epochs=1)
    before = deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=tmp_path / "first")
    with pytest.raises(TypeError, match=r"start must name a folder.*got Deployed"):
        simulated(algorithm, clients, start=before)
    sim = simulated(algorithm, clients, rounds=1)
    for options, words in (
        ({"start": 3}, r"start must name a folder.*got 3"),
        ({"start": sim}, r"start must name a folder.*got Result"),
        ({"start": before, "dtype": torch.float32}, r"float64.*dtype="),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            deploy(algorithm, clients, tmp_path, **options)
    with pytest.warns(UserWarning, match=r"^seed 3 "):
        deploy(algorithm, clients, tmp_path, start=before, rounds=1)
    wide = bf.algorithms.fedavg(bf.models.mlp(8, hidden=5, outputs=3), epochs=1)
    smooth = bf.algorithms.fedavg(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), epochs=1
    )
    for other in (wide, smooth):
        for start, what in ((before, "start"), (tmp_path / "first", "first'")):
            with pytest.raises(
                CheckpointError, match=rf"{what} has the state of another network.* layers\."
            ):
                deploy(
                    other,
                    clients,
                    tmp_path,
                    grid_of(other, clients, tmp_path),
                    start=start,
                    **{**OPTIONS, **LATER},
                )


def test_a_server_that_goes_on_began_from_the_same_start(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """The same command goes on without a word; another start, and the folder of its own
    checkpoints, are refused.
    """
    before = deploy(ditto, clients, tmp_path, rounds=1, checkpoint=tmp_path / "first")
    options: dict[str, Any] = {**LATER, "checkpoint": tmp_path / "later"}
    deploy(ditto, clients, tmp_path, start=before, on_round=[lambda run: run.round == 1], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in (before, tmp_path / "first", None):
            assert deploy(ditto, clients, tmp_path, start=start, **options).round == 2
    later = load(tmp_path / "later", ditto)
    there = (
        rf"later' has a run that started from round 1 of experiment {before.experiment} "
        rf"\(digest \w{{16}}\), but start is"
    )
    for start, what in (
        (later, rf"round 2 of experiment {later.experiment}"),
        (
            replace(before, names=("Bern", *before.names[1:])),
            rf"round 1 of experiment {before.experiment}",
        ),
    ):
        with pytest.raises(
            ValueError,
            match=rf"{there} {what} \(digest \w{{16}}\); pass another folder .*or leave start out",
        ):
            deploy(ditto, clients, tmp_path, start=start, **options)
    own = r"first' has a run that started from the method's own start, but start is round"
    for start in (later, tmp_path / "first"):
        with pytest.raises(ValueError, match=own):
            deploy(ditto, clients, tmp_path, start=start, checkpoint=tmp_path / "first", rounds=1)


@pytest.mark.filterwarnings("ignore:the earlier run has", "ignore:clients .* of the earlier run")
@pytest.mark.parametrize("later", [[4, 6, 1, 5, 0], [6, 3, 2, 1, 0, 4]], ids=["gone", "joined"])
def test_a_mean_of_what_clients_keep_stays_one(
    later: list[int], model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """SCAFFOLD's c, where clients join, and where some are gone; as in the simulation."""
    algorithm, half = bf.algorithms.scaffold(model), {"participation": 0.5, "rounds": 1}
    few, moved = clients.select(range(5)), clients.select(later)
    sim = simulated(algorithm, few, **half)
    found = deploy(algorithm, few, tmp_path, checkpoint=tmp_path / "first", **half)
    sim = simulated(algorithm, moved, start=sim, **LATER, participation=0.5)
    nodes = [100 + client for client in later]
    grid = grid_of(algorithm, moved, tmp_path, nodes=nodes)
    again = deploy(algorithm, moved, tmp_path, grid, start=found, **LATER, participation=0.5)
    assert_same(again, tmp_path, sim, nodes)
    assert_close(again.server["c"].double(), sim.private["own"].double().mean(0), atol=1e-7, rtol=0)


def test_a_server_keeps_the_factors_of_clients_that_left_and_says_so(
    model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """They are on nodes that are gone."""
    algorithm, few = bf.algorithms.fedep(model, epochs=1), clients.select([0, 1, 2])
    before = deploy(algorithm, few, tmp_path, rounds=1)
    assert "is not rebuilt" not in caplog.text
    with pytest.warns(UserWarning, match="the earlier run has 3 clients"):
        deploy(algorithm, few.select([0, 1]), tmp_path, start=before, rounds=1, seed=9)
    assert "is not rebuilt" in caplog.text
