"""The server's run: a deployment is the simulation, it goes on where it was stopped, and what fails
on the way is left out.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Tensors
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.clients.tuning import Tuning
from bayesfl.federation.settings import Settings
from bayesfl.flower import BadClients, client_app, load, records, serve, server_app
from bayesfl.optim import SGD
from tests.cases import (
    CASES,
    SAMPLE,
    Case,
    burst_by_fine_tuning,
    federation,
    with_batch_norm,
)
from tests.federation.made import power_of_choice, reporting
from tests.flower.grid import LocalGrid
from tests.flower.made import (
    OPTIONS,
    TOWNS,
    Killed,
    asked,
    assert_predicts,
    assert_same,
    changed,
    deploy,
    grid_of,
    losing,
    method,
    packed,
    simulated,
    spoilt,
    trains,
    tuned,
    unheard,
)


@pytest.fixture(scope="module")
def parted() -> FederatedData:
    """Clients with validation data."""
    return bf.data.concept_drift("digits", clients=4, seed=0, validation=0.2)


WHO = [
    pytest.param(case, 0.5, "all", marks=() if case.name in SAMPLE else pytest.mark.slow)
    for case in CASES
]
WHO += [
    pytest.param(case, *who, marks=pytest.mark.slow)
    for case in CASES
    if case.name in (*SAMPLE, "fedpac", "clustered")
    for who in ((1.0, None), (0.5, "cohort"))
]
"""Every method where most can go wrong, as who is not in the cohort trains too; one of each kind in
the other ways of taking part.
"""


@pytest.mark.parametrize(("case", "participation", "train"), WHO, ids=str)
def test_a_deployment_is_the_simulation(
    case: Case,
    model: nn.Module,
    clients: FederatedData,
    tmp_path: Path,
    participation: float,
    train: Any,
):
    """Server, private states and predictions."""
    algorithm = case(model)
    if algorithm.tally and participation < 1:
        train = "cohort"
    options = {"participation": participation, "train": train, "rounds": 2}
    sim = simulated(algorithm, clients, **options)
    found = deploy(algorithm, clients, tmp_path, **options)
    assert_same(found, tmp_path, sim)
    assert_predicts(found, tmp_path, sim)
    expected = sim.predict()
    for client in range(clients.clients):
        own, (x, _) = (
            bf.load_client(tmp_path / f"node-{100 + client}", algorithm),
            clients.test.client(client),
        )
        assert own.name == f"client {client}"
        assert_close(own.predict(x).probs, expected.client(client).probs, atol=1e-6, rtol=0)
    assert found.history.rows[-1]["personal_accuracy"] == pytest.approx(
        expected.summary(clients.test)["accuracy"], abs=1e-12
    )


def test_a_rule_of_the_users_draws_the_simulations_cohorts(
    fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """From what clients report; a server that is killed goes on with what it knew."""
    algorithm = reporting(fedavg)
    sim = simulated(algorithm, clients, sampling=power_of_choice)
    stop = [lambda run: run.round == 2]
    options: dict[str, Any] = {"sampling": power_of_choice, "checkpoint": tmp_path / "checkpoints"}
    for callbacks in (stop, ()):
        found = deploy(algorithm, clients, tmp_path, on_round=callbacks, **options)
    assert_same(found, tmp_path, sim)
    assert [found.took_part(round) for round in (1, 2, 3)] == [
        sim.took_part(round) for round in (1, 2, 3)
    ]
    for name in ("known_loss", "known_round"):
        assert_close(found.history.clients(name), sim.history.clients(name), equal_nan=True)
    assert load(tmp_path / "checkpoints", algorithm).took_part(1) == found.took_part(1)


def test_all_train_where_nobody_sends(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """As in the simulation; nobody is asked again to send."""
    algorithm = bf.algorithms.l2gd(model)

    def odd(round: int, rng: Any, known: Any) -> Any:
        return range(7) if round % 2 else []

    sim = simulated(algorithm, clients, sampling=odd)
    found = deploy(algorithm, clients, tmp_path, sampling=odd)
    assert_same(found, tmp_path, sim)
    assert found.history["cohort"].tolist() == [7, 0, 7]
    assert found.history["bytes_up"][1] == 0


def test_nodes_without_test_rows_have_their_model_too(
    ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """It is written before the predictions, which they lack; the server knows its network as the
    simulation does.
    """
    bare = replace(clients, splits={"train": clients.train})
    sim = bf.simulate(ditto, bare, evaluate_every=None, progress=False, **OPTIONS)
    found = deploy(ditto, bare, tmp_path)
    x, _ = clients.test.client(3)
    own = bf.load_client(tmp_path / "node-103", ditto)
    assert_close(own.predict(x).probs, sim.client(3).predict(x).probs, atol=1e-6, rtol=0)
    assert_close(found.model()(x.double()), sim.model()(x.double()), atol=1e-6, rtol=0)
    assert ("personal_accuracy" in found.history.columns, found.measures) == (False, {})


def test_measures_of_clients_that_share_them(
    fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """Of those alone, by an option of the app or by the node's configuration; they are in the
    checkpoint. Else the means are all.
    """

    def data_of(context: Any) -> FederatedData:
        return clients.select([int(context.node_config["client-id"])])

    def errors(predictions: Any, labels: Tensor) -> Tensor:
        return (predictions.probs.argmax(-1) != labels).double().mean()

    options: dict[str, Any] = {"engine": bf.Engine(workers=1), "measures": {"errors": errors}}
    apps = [
        client_app(fedavg, data_of, share_measures=client in (1, 4), **options)
        for client in range(7)
    ]
    grid = LocalGrid({100 + client: app for client, app in enumerate(apps)}, tmp_path)
    found = deploy(fedavg, clients, tmp_path, grid, rounds=1, checkpoint=tmp_path / "server")
    sim = bf.simulate(fedavg, clients, progress=False, **{**OPTIONS, "rounds": 1})
    assert list(found.measures) == [1, 4]
    alone = sim.predict().client(4).probs.argmax(-1) == clients.test.client(4)[1]
    assert found.measures[4]["accuracy"] == pytest.approx(alone.double().mean().item())
    assert found.history["evaluated"][-1] == 7
    assert found.history["personal_errors"][-1] == pytest.approx(
        1 - found.history["personal_accuracy"][-1]
    )
    assert load(tmp_path / "server", fedavg).measures == found.measures


def test_callbacks_end_a_deployment_early(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """As they end a simulation: in the same round; every node then has its model, the state is
    saved, and the run stays ended.
    """
    algorithm = bf.algorithms.ditto(model, epochs=1, batch_size=10, optimiser=SGD(0.5))
    seen: list[int] = []

    def stopping() -> list[Any]:
        return [
            lambda run: seen.append(run.round),
            bf.callbacks.EarlyStopping("train_nll", patience=1, lowest=False),
        ]

    sim = bf.simulate(
        algorithm,
        clients,
        evaluate_every=None,
        progress=False,
        on_round=stopping(),
        **{**OPTIONS, "rounds": 9},
    )
    assert sim.round < 9
    options: dict[str, Any] = {"rounds": 9, "checkpoint": tmp_path / "server", "every": 5}
    for _ in range(2):
        found = deploy(algorithm, clients, tmp_path, on_round=stopping(), **options)
        assert found.round == sim.round
        assert_close(flatten(found.server), flatten(sim.server), atol=1e-6, rtol=0)
    rounds = list(range(1, sim.round + 1))
    # Of the simulation, the deployment, and the deployment that goes on.
    assert seen == [*rounds, *rounds, sim.round]
    assert load(tmp_path / "server", algorithm).round == sim.round
    x, _ = clients.test.client(2)
    assert_close(
        bf.load_client(tmp_path / "node-102", algorithm).predict(x).probs,
        sim.client(2).predict(x).probs,
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("name", ["ditto", pytest.param("fedsi", marks=pytest.mark.slow)])
def test_evaluations_on_the_way_are_the_simulations(name: str, tmp_path: Path):
    """In the same rounds the same numbers, on test and validation data; the last round is not
    evaluated twice.
    """
    algorithm, parted = tuned()
    algorithm = (
        algorithm
        if name == "fedsi"
        else bf.algorithms.ditto(bf.models.mlp(64, hidden=8, outputs=5), epochs=1, batch_size=10)
    )
    options: dict[str, Any] = {"rounds": 3, "evaluate_every": 2}
    sim = bf.simulate(algorithm, parted, progress=False, **{**OPTIONS, **options})
    grid, seen = grid_of(algorithm, parted, tmp_path), []
    found = deploy(
        algorithm,
        parted,
        tmp_path,
        grid,
        on_round=[lambda run: seen.append(dict(run.history[-1]))],
        **options,
    )
    columns = [
        f"{prefix}_{measure}"
        for prefix in ("personal", "validation")
        for measure in ("accuracy", "nll", "brier", "ece")
    ]
    for row, expected, shown in zip(found.history, sim.history, seen, strict=True):
        assert row == shown
        assert ("personal_nll" in row) == (row["round"] > 1)
        for column in columns:
            assert row.get(column) == pytest.approx(expected.get(column), abs=1e-6)
    assert (
        sum(message.metadata.message_type == "evaluate" for message in grid.sent)
        == 2 * parted.clients
    )
    assert (
        found.history["tuned"].tolist()[1:] == [sim.tuned] * 2
        if name == "fedsi"
        else "tuned" not in found.history.columns
    )


def test_early_stopping_on_validation_data(parted: FederatedData, tmp_path: Path):
    """A deployment ends in the simulation's round, resumed or not; where nothing is measured on the
    way, the error says what to pass.
    """
    algorithm = bf.algorithms.ditto(
        bf.models.mlp(64, hidden=8, outputs=5), epochs=1, batch_size=20, optimiser=SGD(0.3)
    )
    options: dict[str, Any] = {"rounds": 40, "evaluate_every": 1}
    stop = bf.callbacks.EarlyStopping("validation_nll", patience=2)
    sim = bf.simulate(algorithm, parted, progress=False, on_round=[stop], **{**OPTIONS, **options})
    assert sim.round < 40
    folder = tmp_path / "server"
    deploy(
        algorithm,
        parted,
        tmp_path,
        on_round=[lambda run: run.round == 2],
        checkpoint=folder,
        **{**options, "evaluate_every": 2},
    )
    (folder / "round-000002.safetensors").unlink()  # goes on from round 1, which was not evaluated
    with pytest.raises(ValueError, match=r"keeps its settings, participation: saved 1\.0"):
        deploy(algorithm, parted, tmp_path, checkpoint=folder, participation=0.5, **options)
    found = deploy(algorithm, parted, tmp_path, on_round=[stop], checkpoint=folder, **options)
    assert found.round == sim.round
    assert_close(flatten(found.server), flatten(sim.server), atol=1e-6, rtol=0)
    with pytest.raises(KeyError, match=r"no column 'validation_nll'"):
        deploy(algorithm, parted, tmp_path / "other", on_round=[stop], rounds=3)


def test_a_round_at_which_it_ended_may_be_the_best(parted: FederatedData, tmp_path: Path):
    """Between evaluations, by another callback: it is measured before the best state is chosen, as
    in a simulation; also if repeated.
    """
    algorithm = bf.algorithms.ditto(
        bf.models.mlp(64, hidden=8, outputs=5), epochs=1, batch_size=20, optimiser=SGD(0.05)
    )
    options: dict[str, Any] = {"rounds": 9, "evaluate_every": 3}

    def stopping() -> list[Any]:
        return [
            bf.callbacks.EarlyStopping("validation_nll", patience=50, keep="best"),
            lambda run: run.round == 4,
        ]

    sim = bf.simulate(
        algorithm, parted, progress=False, on_round=stopping(), **{**OPTIONS, **options}
    )
    assert sim.round == 4
    for _ in range(2):
        found = deploy(
            algorithm,
            parted,
            tmp_path,
            on_round=stopping(),
            checkpoint=tmp_path / "server",
            **options,
        )
        assert found.round == 4
        assert found.history["validation_nll"] == pytest.approx(
            sim.history["validation_nll"], abs=1e-6, nan_ok=True
        )
        assert load(tmp_path / "server", algorithm).history.rows == found.history.rows
        assert bf.load_client(tmp_path / "node-102", algorithm).round == 4


def test_a_node_chooses_its_own_share_on_its_validation_rows(parted: FederatedData, tmp_path: Path):
    algorithm = bf.algorithms.knn_per(bf.models.mlp(64, hidden=8, outputs=5), k=4, epochs=1)
    result = bf.simulate(algorithm, parted, progress=False, **OPTIONS)
    deploy(algorithm, parted, tmp_path)
    shares = []
    for j in range(4):
        node = bf.load_client(tmp_path / f"node-10{j}", algorithm)
        shares.append(float(node._stored["share"]))
        x = parted.test.client(j)[0]
        assert_close(node.predict(x).probs, result.client(j).predict(x).probs, atol=1e-6, rtol=0)
    assert len(set(shares)) > 1


@pytest.mark.slow
def test_the_best_state_is_kept(parted: FederatedData, tmp_path: Path):
    """The server's, and the nodes', whose models are of its round; also where the run was stopped
    between two checkpoints and goes on, from the folder.
    """
    algorithm = bf.algorithms.ditto(
        bf.models.mlp(64, hidden=8, outputs=5), epochs=3, batch_size=20, optimiser=SGD(0.3)
    )
    options: dict[str, Any] = {"rounds": 40, "evaluate_every": 1}

    def best(folder: Path | None = None) -> bf.callbacks.EarlyStopping:
        return bf.callbacks.EarlyStopping("validation_nll", patience=3, keep="best", folder=folder)

    sim = bf.simulate(
        algorithm, parted, progress=False, on_round=[best()], **{**OPTIONS, **options}
    )
    whole = deploy(algorithm, parted, tmp_path / "whole", on_round=[best()], **options)
    resumed = {**options, "checkpoint": tmp_path / "server", "every": 2}
    folder = tmp_path / "best"
    deploy(
        algorithm,
        parted,
        tmp_path,
        on_round=[best(folder), lambda run: run.round == sim.round + 2],
        **resumed,
    )
    found = deploy(algorithm, parted, tmp_path, on_round=[best(folder)], **resumed)
    for state, nodes in (
        (whole, tmp_path / "whole"),
        (found, tmp_path),
        (load(folder, algorithm), tmp_path),
    ):
        assert state.round == sim.round == len(state.history)
        assert_same(state, nodes, sim)
        for client in range(4):
            own, (x, _) = (
                bf.load_client(nodes / f"node-{100 + client}", algorithm),
                parted.test.client(client),
            )
            assert own.round == sim.round
            assert_close(
                own.predict(x).probs, sim.client(client).predict(x).probs, atol=1e-6, rtol=0
            )
    assert load(tmp_path / "server", algorithm).round == sim.round + 3
    later = deploy(algorithm, parted, tmp_path, start=folder, rounds=1, seed=9)
    assert_same(later, tmp_path, simulated(algorithm, parted, start=sim, rounds=1, seed=9))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["ditto", "pfedvem"])
def test_a_killed_server_goes_on(
    name: str, every: int, model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Killed in mid-round, when some clients have trained already, the next run ends as one that
    never stopped.
    """
    algorithm, heard = method(name, model), []

    def alter(client: int, message: Message, reply: Message) -> Message:
        if trains(message, 3):
            heard.append(client)
            if len(heard) == 4:
                raise Killed
        return reply

    options = {"rounds": 5, "participation": 0.7, "checkpoint": tmp_path / "server", "every": every}
    with pytest.raises(Killed):
        deploy(algorithm, clients, tmp_path, alter=alter, **options)
    assert load(tmp_path / "server", algorithm).round == 3 // every * every
    sim = simulated(algorithm, clients, rounds=5, participation=0.7)
    found, again = (deploy(algorithm, clients, tmp_path, **options) for _ in range(2))
    for one in (found, again):
        assert_same(one, tmp_path, sim)
    assert [row["round"] for row in found.history] == [1, 2, 3, 4, 5]
    assert again.experiment == found.experiment


def test_a_bad_reply_may_stop_the_run(fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path):
    """With what is wrong and whose it is; nothing was averaged."""
    options: dict[str, Any] = {"admission": bf.Admission("stop"), "checkpoint": tmp_path / "server"}
    with pytest.raises(BadClients, match=r"round 1\b.*client 4\b.* 0\.3 seconds"):
        deploy(fedavg, clients, tmp_path, alter=spoilt(4, unheard), timeout=0.3, **options)
    assert load(tmp_path / "server", fedavg).round == 0


def test_clients_are_called_by_their_names(
    model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: Any
):
    """In the log, in errors, and where the node itself says what went wrong."""
    algorithm, towns = burst_by_fine_tuning(model), replace(clients, client_names=TOWNS)
    grid = grid_of(algorithm, towns, tmp_path, alter=spoilt(4, unheard))
    options: dict[str, Any] = {"rounds": 1, "timeout": 0.3}
    found = deploy(algorithm, towns, tmp_path, grid, admission=bf.Admission("skip"), **options)
    assert "client 4 ('Genf') is left out: it did not reply" in caplog.text
    drawn = [TOWNS[j] for j in found.settings.cohort(len(TOWNS), 0)]
    assert found.took_part(1) == tuple(town for town in drawn if town != "Genf")
    with pytest.raises(BadClients, match=r"client 4 \('Genf'\): it did not reply"):
        deploy(algorithm, towns, tmp_path, grid, admission=bf.Admission("stop"), **options)
    grid.alter = None
    deploy(algorithm, towns, tmp_path, grid, admission=bf.Admission("stop"), **options)
    assert re.search(
        r"WARNING .*client (\d) \('(\w+)'\) did not predict: .*client \1 \('\2'\) is no longer "
        r"finite",
        caplog.text,
    )


@pytest.mark.parametrize(("below", "cohorts"), [("repeat", [7.0] * 3), ("skip", [7.0, 0.0, 7.0])])
def test_a_cohort_below_the_minimum(
    below: Any, cohorts: list[float], ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """The round is skipped, or repeated from the states that were taken."""
    times: list[int] = []

    def once(reply: Message) -> Message | None:
        times.append(1)
        return None if len(times) == 1 else reply

    everyone = bf.Admission("skip", min_clients=clients.clients, below_minimum=below)
    alter = spoilt(2, once, round=1)
    found = deploy(ditto, clients, tmp_path, alter=alter, timeout=0.3, admission=everyone)
    faults = losing(2, round=1) if below == "skip" else None
    assert_same(found, tmp_path, simulated(ditto, clients, faults=faults, admission=everyone))
    assert found.history["cohort"].tolist() == cohorts


@pytest.mark.parametrize("bad", ["skip", "stop"])
def test_a_cohort_that_is_too_small_is_not_asked(
    bad: Any, ditto: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """No client trains for a round that cannot count."""
    grid = grid_of(ditto, clients, tmp_path)
    options: dict[str, Any] = {
        "participation": 0.4,
        "sampling": "bernoulli",
        "admission": bf.Admission(bad, min_clients=3),
        "rounds": 6,
    }
    found = deploy(ditto, clients, tmp_path, grid, **options)
    sim = simulated(ditto, clients, **options)
    assert_same(found, tmp_path, sim)
    small = {round for round in range(6) if len(found.settings.cohort(7, round)) < 3}
    assert small
    assert not [message for message in grid.sent for round in small if trains(message, round)]
    for name in ("cohort", "lost", "rejected"):
        assert found.history[name].tolist() == sim.history[name].tolist()
    assert [bool(count == 0) for count in found.history["bytes_down"]] == [
        round in small for round in range(6)
    ]


def test_a_round_that_is_not_finite_is_counted(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """As in a simulation: who was lost, who was refused, what went over the wire."""
    algorithm = method("pfedvem", model)

    def flat(reply: Message) -> Message:
        # Its inverse is infinite.
        return packed(reply, lambda t: {**t, "rho2": torch.full_like(t["rho2"], 1e-310)})

    found = deploy(algorithm, clients, tmp_path, alter=spoilt(4, flat, round=1))
    assert found.history["cohort"][1] == 0.0
    assert found.history["lost"].tolist() == found.history["rejected"].tolist() == [0.0, 0.0, 0.0]
    assert found.history["bytes_up"][1] == found.history["bytes_up"][0] > 0
    assert all(bool(t.isfinite().all()) for t in flatten(found.server).values())


@pytest.mark.slow
def test_honest_clients_of_any_size(model: nn.Module, tmp_path: Path):
    """Their numbers of examples are part of what is refused, as in a simulation."""
    uneven = federation(sizes=(20, 24, 30, 18, 22, 26, 6000))
    algorithm = bf.algorithms.fedbabu(model, epochs=2, batch_size=10)
    assert deploy(algorithm, uneven, tmp_path, rounds=2).history["rejected"].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_a_tuned_number_is_the_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """FedSI's predictive precision, from sums over the clients' validation data, which are the
    simulation's.
    """
    sums: list[Tensors] = []

    def solve(survey: Tuning, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        sums.append(dict(total))
        return chosen(survey, state, total)

    chosen = Tuning.solve
    monkeypatch.setattr(Tuning, "solve", solve)
    algorithm, clients = tuned()
    assert len(algorithm.predictor.grid) > 1
    sim = simulated(algorithm, clients, rounds=2)
    found = deploy(algorithm, clients, tmp_path, rounds=2)
    assert_predicts(found, tmp_path, sim)
    assert found.history["tuned"][-1] == sim.tuned
    over, within = sums
    assert_close(over, within, atol=1e-6, rtol=0)
    assert over["n_examples"] == clients.validation.counts.sum()
    assert over["nll"].std() > 0 == over["n_broken"].sum()
    bare = bf.data.concept_drift("digits", clients=4, seed=0)
    with pytest.raises(ValueError, match=r"predictive_precision .*no client"):
        deploy(algorithm, bare, tmp_path / "bare", rounds=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, r"^clients .*1.* got 0"),
        ({"timeout": 0.0}, r"timeout .*got 0\.0"),
        ({"dtype": torch.int64}, r"dtype .*torch\.float32 .*got torch\.int64"),
        ({"every": 0}, r"^every .*1.* got 0"),
        ({"participation": 0.0}, r"must lie within \(0, 1\]"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str, model: nn.Module, tmp_path: Path):
    """Named, with the value, before anything is waited for."""
    with pytest.raises(ValueError, match=words):
        serve(
            LocalGrid({}, tmp_path),
            method("fedavg", model),
            **{"clients": 1, "rounds": 1, **options},
        )
    with pytest.raises(TypeError, match=r"algorithm .*Algorithm.* got SplitModel"):
        server_app(model, clients=1, rounds=1)  # type: ignore[arg-type]


def test_a_lost_client_outside_the_cohort_is_not_counted(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """`lost` and `rejected` are of the cohort, as in the simulation; what an outsider did is as if
    it had not been.
    """
    algorithm = method("pfedvem", model)
    cohort = Settings(3, 0.5, algorithm.sampling, "all", 3, None).cohort(clients.clients, 1)
    outside = int(np.setdiff1d(np.arange(clients.clients), cohort)[0])

    options: dict[str, Any] = {"participation": 0.5, "train": "all"}
    alter = spoilt(outside, unheard, round=1)
    found = deploy(algorithm, clients, tmp_path, alter=alter, timeout=0.3, **options)
    sim = simulated(algorithm, clients, faults=losing(outside, round=1), **options)
    assert_same(found, tmp_path, sim)
    for column in ("cohort", "lost", "rejected"):
        assert found.history[column].tolist() == sim.history[column].tolist()


def test_who_trains_is_gathered_where_the_server_holds_their_mean(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """As in a simulation, before a client is asked."""
    with pytest.raises(ValueError, match=r"train='all' .*leave train out"):
        deploy(bf.algorithms.scaffold(model), clients, tmp_path, participation=0.5, train="all")


def test_a_server_app_runs_what_it_was_given(
    fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path
):
    """Its main function is `serve`; an option that there is not is refused when it is built."""
    grid = grid_of(fedavg, clients, tmp_path)
    app = server_app(
        fedavg,
        clients=clients.clients,
        checkpoint=tmp_path / "server",
        **{**OPTIONS, "timeout": 5.0},
    )
    app(grid, grid.context(0))
    assert_same(load(tmp_path / "server", fedavg), tmp_path, simulated(fedavg, clients))
    with pytest.raises(TypeError, match="round"):
        server_app(fedavg, clients=1, round=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        lambda t: t * float("nan"),
        lambda t: t - float("inf"),
        lambda t: t[None],
        lambda t: -t,
    ],
    ids=["nan", "-inf", "shape", "negative counts"],
)
def test_scores_that_are_no_numbers(
    bad: Callable[[Tensor], Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One client cannot end the run or make the choice; where nobody scores, nothing is predicted,
    and the models are kept.
    """
    algorithm, clients = tuned()
    liars: list[int] = [1]

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type != "query.survey" or client not in liars:
            return reply
        sums = records.unpack(reply.content, "answer", asked(reply, "digest"))
        reply.content["answer"], digest = records.pack({name: bad(t) for name, t in sums.items()})
        return changed(reply, digest=digest)

    found = deploy(algorithm, clients, tmp_path, alter=alter, rounds=1)
    assert found.history["tuned"][-1] in algorithm.predictor.grid
    assert re.search(r"client 1 .*Tuning", caplog.text)
    liars[:] = [0, 1, 2, 3]
    found = deploy(algorithm, clients, tmp_path, alter=alter, rounds=1)
    assert "tuned" not in found.history.columns
    assert "nothing is predicted" in caplog.text


@pytest.mark.parametrize("rule", ["skip", "stop"])
def test_a_fine_tuning_that_leaves_the_numbers(
    rule: Any, model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Its client predicts without it where bad clients are skipped, as in a simulation; else it
    predicts nothing.
    """
    algorithm, admission = burst_by_fine_tuning(model), bf.Admission(rule)
    found = deploy(algorithm, clients, tmp_path, admission=admission).history.rows[-1]
    sim = bf.simulate(
        algorithm,
        clients,
        evaluate_every=None,
        progress=False,
        admission=bf.Admission("skip"),
        **OPTIONS,
    )
    expected = sim.predict().summary(clients.test)["nll"]
    assert found["evaluated"] == clients.clients - (rule == "stop")
    assert (found["personal_nll"] == pytest.approx(expected, abs=1e-6)) == (rule == "skip")


def noisy(x: Tensor) -> Tensor:
    """Inputs with a little noise, drawn anew in every step."""
    return x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "pfedvem"])
def test_batch_norm_dropout_and_augmentation_to_the_bit(
    name: str, clients: FederatedData, tmp_path: Path
):
    """Statistics that are sent or kept, draws of the network and of the inputs; also where the
    server stops and goes on. A node computes its client alone, as a simulation in chunks of one.
    """
    case = next(case for case in CASES if case.name == name)
    algorithm, data = case(with_batch_norm(dropout=0.3)), clients.augmented(noisy)
    options: dict[str, Any] = {"participation": 0.6, "dtype": torch.float32}
    sim = simulated(algorithm, data, engine=bf.Engine(chunk=1, workers=2), **options)
    deploy(algorithm, data, tmp_path, rounds=2, checkpoint=tmp_path / "server", **options)
    found = deploy(algorithm, data, tmp_path, checkpoint=tmp_path / "server", **options)
    assert_same(found, tmp_path, sim, atol=0)
    assert_predicts(found, tmp_path, sim, atol=0)
    plain, block = simulated(algorithm, clients, **options), next(iter(algorithm.blocks))
    assert not torch.allclose(plain.server[block]["loc"], sim.server[block]["loc"])


def test_a_phase_reads_validation_rows_of_a_node(parted: FederatedData, tmp_path: Path):
    """By which FedFomo compares models, as in a simulation."""
    net = bf.models.mlp(64, hidden=4, outputs=5)
    algorithm = bf.algorithms.fedfomo(net, models=2, epochs=1)
    found, wanted = deploy(algorithm, parted, tmp_path), simulated(algorithm, parted)
    assert_same(found, tmp_path, wanted)
    assert wanted.server["affinity"].any()


def test_bytes_of_statistics_count(clients: FederatedData, tmp_path: Path):
    """A client sends a mean and a variance for each channel of a norm, beside its weight and bias;
    where norms stay, none of the four.
    """
    sent = []
    for make in (bf.algorithms.fedavg, bf.algorithms.fedbn):
        algorithm = make(with_batch_norm(), epochs=1)
        sim, found = (
            one.history["bytes_up"][0]
            for one in (
                simulated(algorithm, clients, rounds=1),
                deploy(algorithm, clients, tmp_path / make.__name__, rounds=1),
            )
        )
        # What a message says of each tensor.
        assert 0 < found - sim < 7 * 100 * len(algorithm.uplink(algorithm.init(1)))
        sent.append(sim)
    assert sent[0] - sent[1] == 7 * 4 * 16 * 8
