"""Over a network: every algorithm's numbers are the simulation's, and what goes wrong on the way costs the others nothing."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten, nest
from bayesfl.data import FederatedData
from bayesfl.federation import checkpoint
from bayesfl.federation.admission import PROTOCOL
from bayesfl.federation.faults import KINDS, Fault
from bayesfl.federation.predict import choose as chosen
from bayesfl.federation.result import Result
from bayesfl.federation.settings import Settings
from bayesfl.flower import BadClients, Deployed, client_app, load, records, serve, server_app
from bayesfl.flower.client import Refused
from bayesfl.flower.roster import Roster
from bayesfl.flower.states import States
from tests.cases import CASES, Case, federation
from tests.flower.grid import Alter, LocalGrid

OPTIONS: dict[str, Any] = {"rounds": 3, "seed": 3, "dtype": torch.float64}


def grid_of(algorithm: bf.Algorithm, clients: FederatedData, folder: Path, **options: Any) -> LocalGrid:
    """A node for each client, numbered from 100."""

    def data_of(context: Any) -> FederatedData:
        return clients.select([int(context.node_config["client-id"])])

    app = client_app(algorithm, data_of, engine=bf.Engine(workers=1))
    return LocalGrid({100 + client: app for client in range(clients.clients)}, folder, **options)


def deploy(algorithm: bf.Algorithm, clients: FederatedData, folder: Path, grid: LocalGrid | None = None, **options: Any) -> Deployed:
    grid = grid or grid_of(algorithm, clients, folder)
    return serve(grid, algorithm, clients=clients.clients, **{**OPTIONS, "timeout": 5.0, **options})


def private(deployed: Deployed, folder: Path) -> dict[str, Tensor]:
    """The states of all clients as the server knows them, [J, ...]."""
    rows = []
    for client, base in enumerate(deployed.base):
        if base:
            file = folder / f"node-{100 + client}" / deployed.experiment / f"client-{client}" / f"state-{base}.safetensors"
            rows.append(flatten(checkpoint.read_file(file)[1]))
        else:
            rows.append({name: t[None] for name, t in flatten(deployed.start).items()})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def predictions(deployed: Deployed, folder: Path, client: int) -> dict[str, Tensor]:
    """What a client predicted for its test data."""
    file = folder / f"node-{100 + client}" / deployed.experiment / f"client-{client}" / "predictions.safetensors"
    return checkpoint.read_file(file)[1]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("participation", "train"),
    [(0.5, "all"), pytest.param(1.0, None, marks=pytest.mark.slow), pytest.param(0.5, "cohort", marks=pytest.mark.slow)],
)
def test_a_deployment_is_the_simulation(
    case: Case, model: nn.Module, clients: FederatedData, tmp_path: Path, participation: float, train: Any
):
    """Server, private states and predictions, for every algorithm and every way of taking part."""
    algorithm = case(model)
    options = {"participation": participation, "train": train}
    told = bf.simulate(algorithm, clients, evaluate_every=None, progress=False, **OPTIONS, **options)
    found = deploy(algorithm, clients, tmp_path, **options)
    assert_close(flatten(found.server), flatten(told.server), atol=1e-6, rtol=0)
    if told.private:
        assert_close(private(found, tmp_path), flatten(told.private), atol=1e-6, rtol=0)
    expected = told.predict()
    for client in range(clients.clients):
        assert_close(predictions(found, tmp_path, client)["probs"], expected.client(client).probs, atol=1e-6, rtol=0)
    row = found.history.rows[-1]
    assert row["personal_accuracy"] == pytest.approx(expected.summary(clients.test)["accuracy"], abs=1e-12)


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1, "batch_size": 10},
    "ditto": {"epochs": 1, "batch_size": 10},
    "pfedvem": {"head_epochs": 2, "body_epochs": 1, "batch_size": 10, "init_scale": 0.3},
}


def method(name: str, model: nn.Module) -> bf.Algorithm:
    return getattr(bf.algorithms, name)(model, **METHODS[name])


def asked(message: Message, key: str) -> Any:
    return records.config(message.content)[key]


def simulated(algorithm: bf.Algorithm, clients: FederatedData, **options: Any) -> Result:
    return bf.simulate(algorithm, clients, evaluate_every=None, progress=False, **{**OPTIONS, **options})


def assert_same(found: Deployed, folder: Path, told: Result) -> None:
    assert_close(flatten(found.server), flatten(told.server), atol=1e-6, rtol=0)
    assert_close(private(found, folder), flatten(told.private), atol=1e-6, rtol=0)


class Killed(BaseException):
    """The server's process has gone."""


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["ditto", "pfedvem"])
def test_a_killed_server_goes_on(name: str, every: int, model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Killed in mid-round, when some clients have trained already, the next run ends as one that never stopped."""
    algorithm, heard = method(name, model), []

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and asked(message, "round") == 3:
            heard.append(client)
            if len(heard) == 4:
                raise Killed
        return reply

    options = {"rounds": 5, "participation": 0.7, "checkpoint": tmp_path / "server", "every": every}
    with pytest.raises(Killed):
        deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), **options)
    assert load(tmp_path / "server", algorithm).round == 3 // every * every
    found = deploy(algorithm, clients, tmp_path, **options)
    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=5, participation=0.7))
    assert [row["round"] for row in found.history] == [1, 2, 3, 4, 5]
    again = deploy(algorithm, clients, tmp_path, **options)
    assert again.experiment == found.experiment
    assert_same(again, tmp_path, simulated(algorithm, clients, rounds=5, participation=0.7))


def test_a_damaged_checkpoint_costs_a_round(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """The one before it is taken, and the clients still have the states that it names."""
    algorithm = method("ditto", model)
    deploy(algorithm, clients, tmp_path, rounds=4, participation=0.7, checkpoint=tmp_path / "server")
    newest = max((tmp_path / "server").glob("round-*"))
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        found = deploy(algorithm, clients, tmp_path, rounds=6, participation=0.7, checkpoint=tmp_path / "server")
    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=6, participation=0.7))


def test_a_run_that_goes_on_spares_what_the_older_checkpoint_names(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Killed right after it went on, with the checkpoint that it went on from damaged since: the older one still has its states."""
    algorithm = method("ditto", model)
    options: dict[str, Any] = {"checkpoint": tmp_path / "server", "rounds": 6}

    def alter(round: int) -> Alter:
        def dies(client: int, message: Message, reply: Message) -> Message:
            if message.metadata.message_type == "train" and asked(message, "round") == round and client == 6:
                raise Killed
            return reply

        return dies

    for round in (4, 4):
        with pytest.raises(Killed):
            deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter(round)), **options)
    newest = max((tmp_path / "server").glob("round-*"))
    assert newest.name == "round-000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged"):
        found = deploy(algorithm, clients, tmp_path, **options)
    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=6))


def test_clients_keep_what_may_be_asked_for_again(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """States older than the oldest that a kept checkpoint names are deleted, and no others."""
    algorithm = method("ditto", model)
    found = deploy(algorithm, clients, tmp_path, rounds=6, checkpoint=tmp_path / "server", every=2)
    for client in range(clients.clients):
        folder = tmp_path / f"node-{100 + client}" / found.experiment / f"client-{client}"
        assert sorted(rounds_of(file.name for file in folder.glob("state-*"))) == [2, 4, 5, 6]
    # When round 6 was asked for, the checkpoints after rounds 2 and 4 were kept, and 5 was where to start.
    alone = deploy(algorithm, clients, tmp_path / "alone", rounds=6)
    folder = tmp_path / "alone" / "node-100" / alone.experiment / "client-0"
    assert sorted(rounds_of(file.name for file in folder.glob("state-*"))) == [5, 6]


def test_a_client_that_is_never_taken_keeps_little(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Its states of other rounds are nobody's."""
    algorithm = method("ditto", model)

    def alter(client: int, message: Message, reply: Message) -> Message:
        return changed(reply, round=99) if client == 2 and message.metadata.message_type == "train" else reply

    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), rounds=8)
    assert found.base[2] == ""
    folder = tmp_path / "node-102" / found.experiment / "client-2"
    assert rounds_of(file.name for file in folder.glob("state-*")) == [8]


def test_what_a_dead_server_asked_for_comes_late(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """A client that finishes an old order after the new server's does not spoil the state that the new one took."""
    algorithm, late = method("ditto", model), []
    grid = grid_of(algorithm, clients, tmp_path)

    def dies(client: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type != "train":
            return reply
        if asked(message, "round") == 0 and client == 2:
            return None
        if asked(message, "round") == 1 and client == 2:
            late.append(message)
        if asked(message, "round") == 2:
            raise Killed
        return reply

    options: dict[str, Any] = {"rounds": 4, "checkpoint": tmp_path / "server", "every": 4, "timeout": 0.3}
    grid.alter = dies
    with pytest.raises(Killed):
        deploy(algorithm, clients, tmp_path, grid, **options)

    def comes_late(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and asked(message, "round") == 1 and client == 2:
            grid.apps[102](late[0], grid.context(102))  # the old order, done after the new one
        return reply

    grid.alter = comes_late
    found = deploy(algorithm, clients, tmp_path, grid, **options)
    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=4))


def test_one_server_a_folder(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """A second one is refused while the first is at work."""
    algorithm, refused = method("fedavg", model), []

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and not refused:
            with pytest.raises(ValueError, match="is in use by another server"):
                deploy(algorithm, clients, tmp_path, checkpoint=tmp_path / "server")
            refused.append(client)
        return reply

    deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), checkpoint=tmp_path / "server")
    assert refused == [0]
    deploy(algorithm, clients, tmp_path, checkpoint=tmp_path / "server")


def rounds_of(names: Iterable[str]) -> list[int]:
    """The rounds in names of states."""
    return [int(name.removeprefix("state-")[:6]) for name in names if name]


def changed(reply: Message, **config: Any) -> Message:
    """A reply with other settings."""
    for key, value in config.items():
        records.config(reply.content)[key] = value
    return reply


def packed(reply: Message, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Message:
    """A reply with other tensors, honestly summed."""
    tensors = records.unpack(reply.content, "up", asked(reply, "digest"))
    reply.content["up"], digest = records.pack(nest(change(tensors)))
    return changed(reply, digest=digest)


def first(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Changes one tensor."""

    def other(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = min(tensors)
        return {**tensors, name: change(tensors[name])}

    return other


def blob(reply: Message, change: Callable[[bytes], bytes]) -> Message:
    """A reply with other bytes, whose digest does not match."""
    data = change(reply.content["up"][records.BLOB].data)
    reply.content["up"] = ArrayRecord({records.BLOB: Array(dtype="uint8", shape=(len(data),), stype=records.STYPE, data=data)})
    return reply


def lacking(reply: Message, name: str) -> Message:
    """A reply that lacks a record."""
    del reply.content[name]
    return reply


BAD: dict[str, tuple[Callable[[Message], Message | None], str]] = {
    "silent": (lambda reply: None, "did not reply within"),
    "raises": (lambda reply: Message(Error(code=2, reason="out of memory"), metadata=reply.metadata), "error 2: out of memory"),
    "stale": (lambda reply: changed(reply, round=0), "it answers round 0, not round 1"),
    "protocol": (lambda reply: changed(reply, protocol=PROTOCOL + 1), "it speaks protocol"),
    "untyped": (lambda reply: changed(reply, round="one"), "must be of type int"),
    "missing": (lambda reply: packed(reply, lambda t: {k: v for k, v in t.items() if k != min(t)}), "are missing"),
    "extra": (lambda reply: packed(reply, lambda t: {**t, "more": torch.zeros(1)}), "were not declared"),
    "shape": (lambda reply: packed(reply, first(lambda t: t[None])), "declared as"),
    "dtype": (lambda reply: packed(reply, first(lambda t: t.half())), "declared as"),
    "nan": (lambda reply: packed(reply, first(lambda t: t / 0 * 0)), "is not finite"),
    "far": (lambda reply: packed(reply, first(lambda t: t + 1e6)), "from what it was sent, more than"),
    "large": (lambda reply: packed(reply, lambda t: {**t, "more": torch.zeros(10**6)}), "more than the"),
    "damaged": (lambda reply: blob(reply, lambda data: data[:-1] + bytes([data[-1] ^ 1])), "its digest does not match"),
    "no tensors": (lambda reply: lacking(reply, "up"), "is not one blob of tensors"),
    "no settings": (lambda reply: lacking(reply, "config"), "has no settings"),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_a_bad_reply_is_left_out(kind: str, model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """By name and with the reason; the round is as without the client, and the client goes on from its last state that was taken."""
    algorithm, (change, words) = method("pfedvem", model), BAD[kind]

    def alter(client: int, message: Message, reply: Message) -> Message | None:
        bad = message.metadata.message_type == "train" and asked(message, "round") == 1 and client == 2
        return change(reply) if bad else reply

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {2: KINDS["lost"]} if round == 1 else {}

    with caplog.at_level(logging.WARNING):
        found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), timeout=0.3)
    (line,) = [record.message for record in caplog.records if "is left out" in record.message]
    assert_same(found, tmp_path, simulated(algorithm, clients, faults=plan))
    assert line.startswith("round 1: client 2 is left out: ")
    assert words in line
    lost = kind == "silent"
    cohort = Settings(3, 1.0, algorithm.sampling, algorithm.train, 3, None).cohort(clients.clients, 1)
    assert 2 in cohort
    assert (found.history["lost"][1], found.history["rejected"][1]) == (float(lost), float(not lost))
    assert rounds_of(found.base) == [3] * clients.clients


def test_a_bad_reply_may_stop_the_run(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """With what is wrong and whose it is; nothing was averaged."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)
    grid.alter = lambda client, message, reply: None if client == 4 and message.metadata.message_type == "train" else reply
    with pytest.raises(BadClients, match=r"round 0, counted from 0: client 4: it did not reply within 0\.3 seconds"):
        deploy(algorithm, clients, tmp_path, grid, timeout=0.3, admission=bf.Admission("stop"), checkpoint=tmp_path / "server")
    assert load(tmp_path / "server", algorithm).round == 0


def test_a_cohort_below_the_minimum(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """The round is skipped, or repeated from the states that were taken."""
    algorithm, times = method("ditto", model), []

    def alter(client: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "train" and asked(message, "round") == 1 and client == 2:
            times.append(1)
            return None if len(times) == 1 else reply
        return reply

    everyone = bf.Admission("skip", min_clients=clients.clients)
    again, grid = (
        bf.Admission("skip", min_clients=clients.clients, below_minimum="repeat"),
        grid_of(algorithm, clients, tmp_path, alter=alter),
    )
    found = deploy(algorithm, clients, tmp_path, grid, timeout=0.3, admission=again)
    assert_same(found, tmp_path, simulated(algorithm, clients))
    times.clear()
    grid = grid_of(algorithm, clients, tmp_path / "skip", alter=alter)
    found = deploy(algorithm, clients, tmp_path / "skip", grid, timeout=0.3, admission=everyone)

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {2: KINDS["lost"]} if round == 1 else {}

    assert_same(found, tmp_path / "skip", simulated(algorithm, clients, faults=plan, admission=everyone))
    assert found.history["cohort"].tolist() == [7.0, 0.0, 7.0]


def test_an_acknowledgement_is_all_that_leaves(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """A client that trains outside the cohort sends no tensor."""
    algorithm, sent = method("pfedvem", model), []

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train":
            sent.append((asked(message, "sends"), sorted(reply.content), list(reply.content["metrics"])))
        return reply

    deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), participation=0.5)
    assert {sends for sends, *_ in sent} == {True, False}
    assert all(names == (["config", "metrics", "up"] if sends else ["config", "metrics"]) for sends, names, _ in sent)
    assert all(measured == (["train_nll"] if sends else []) for sends, _, measured in sent)


@pytest.mark.parametrize("bad", ["skip", "stop"])
def test_a_cohort_that_is_too_small_is_not_asked(bad: Any, model: nn.Module, clients: FederatedData, tmp_path: Path):
    """No client trains for a round that cannot count."""
    algorithm = method("ditto", model)
    grid = grid_of(algorithm, clients, tmp_path)
    options: dict[str, Any] = {"participation": 0.4, "sampling": "bernoulli", "admission": bf.Admission(bad, min_clients=3), "rounds": 6}
    found = deploy(algorithm, clients, tmp_path, grid, **options)
    told = simulated(algorithm, clients, **options)
    assert_same(found, tmp_path, told)
    small = {round for round in range(6) if len(found.settings.cohort(7, round)) < 3}
    assert small
    assert not [message for message in grid.sent if message.metadata.message_type == "train" and asked(message, "round") in small]
    for name in ("cohort", "lost", "rejected"):
        assert found.history[name].tolist() == told.history[name].tolist()
    assert [bool(count == 0) for count in found.history["bytes_down"]] == [round in small for round in range(6)]


def test_a_round_that_is_not_finite_is_counted(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """As in a simulation: who was lost, who was refused, what went over the wire."""
    algorithm = method("pfedvem", model)

    def alter(client: int, message: Message, reply: Message) -> Message:
        bad = client == 4 and message.metadata.message_type == "train" and asked(message, "round") == 1
        return packed(reply, lambda t: {**t, "rho2": torch.zeros_like(t["rho2"])}) if bad else reply

    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter))
    assert found.history["cohort"][1] == 0.0
    assert found.history["lost"].tolist() == found.history["rejected"].tolist() == [0.0, 0.0, 0.0]
    assert found.history["bytes_up"][1] == found.history["bytes_up"][0] > 0
    assert all(bool(t.isfinite().all()) for t in flatten(found.server).values())


def test_what_a_client_says_of_its_data_buys_little(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: Any):
    """Limits grow with the examples that a node says it has, up to a hundredfold; the log names it."""
    algorithm = method("fedavg", model)

    def alter(client: int, message: Message, reply: Message) -> Message:
        if client != 2 or message.metadata.message_type == "evaluate":
            return reply
        return changed(reply, n=2**40) if message.metadata.message_type == "query" else packed(reply, first(lambda t: t + 1e6))

    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter))
    assert found.history["rejected"].tolist() == [1.0, 1.0, 1.0]
    assert f"client 2 says that it has {2**40} training examples" in caplog.text


def test_a_node_that_became_another_client(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Two nodes change places in mid-run: their replies are not taken for each other's."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and asked(message, "round") == 0 and client == 6:
            grid.ids = {100: 1, 101: 0}
        return reply

    grid.alter = alter
    found = deploy(algorithm, clients, tmp_path, grid)
    assert found.history["rejected"].tolist() == [0.0, 2.0, 2.0]
    assert "the server takes this node for client 0, and it says now that it is client 1" in caplog.text


def test_no_order_is_for_another(tmp_path: Path):
    """Training, tuning, predicting: a node does what it is asked as the client that it is."""
    algorithm, clients = tuned()
    grid = grid_of(algorithm, clients, tmp_path)
    deploy(algorithm, clients, tmp_path, grid, rounds=1)
    orders = {message.metadata.message_type: message for message in grid.sent if message.metadata.dst_node_id == 100}
    assert orders.pop("query")
    assert orders.keys() == {"train", "evaluate", "evaluate.tune"}
    for order in orders.values():
        with pytest.raises(Refused, match=r"for client 0, and it says now that it is client 1; .* or start a new experiment"):
            grid.apps[101](order, grid.context(101))


@pytest.mark.slow
def test_honest_clients_of_any_size(model: nn.Module, tmp_path: Path):
    """Their numbers of examples are part of what is refused, as in a simulation."""
    uneven = federation(sizes=(20, 24, 30, 18, 22, 26, 6000))
    algorithm = bf.algorithms.fedbabu(model, epochs=2, batch_size=10)
    assert deploy(algorithm, uneven, tmp_path, rounds=2).history["rejected"].tolist() == [0.0, 0.0]


def test_counts_of_clients_that_are_away(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """They are in the checkpoint; where they are not known, they don't count."""
    assert Roster(3, {}, patience=1.0, counts={1: 5}).sizes().tolist() == [0, 5, 0]
    algorithm, folder = method("fedavg", model), tmp_path / "server"
    deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=folder)

    def alter(client: int, message: Message, reply: Message) -> Message:
        return changed(reply, n=2**40) if client == 2 and message.metadata.message_type == "query" else reply

    grid = grid_of(algorithm, clients, tmp_path, alter=alter)
    grid.apps = {node: grid.apps[node] for node in (100, 102)}
    found = deploy(algorithm, clients, tmp_path, grid, rounds=2, checkpoint=folder, timeout=0.05)
    assert found.history["bytes_down"][1] == found.history["bytes_down"][0] * 2 / clients.clients
    median = np.median([2**40 if client == 2 else n for client, n in enumerate(clients.train.counts)])
    assert f"client 2 says that it has {2**40} training examples, the median client {median:g}" in caplog.text


@pytest.mark.parametrize("counts", [{"2": 2**70}, {"2": 0}, {"2": 1.5}, {"99": 5}, []])
def test_counts_that_are_none(counts: Any, model: nn.Module, clients: FederatedData, tmp_path: Path):
    """A checkpoint with such numbers is damaged; one of a version that had none is not."""
    algorithm, folder = method("fedavg", model), tmp_path / "server"
    deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=folder)
    meta, tensors = checkpoint.read(folder)
    checkpoint.write_round(folder, 1, {key: value for key, value in meta.items() if key != "counts"}, tensors)
    assert load(folder, algorithm).round == 1
    checkpoint.write_round(folder, 1, meta | {"counts": counts}, tensors)
    with pytest.raises(checkpoint.CheckpointError, match="is no checkpoint of a deployed federation"):
        load(folder, algorithm)


def test_nodes_that_go_are_forgotten(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once the time is over that they had for saying who they are."""
    now = [0.0]
    monkeypatch.setattr("bayesfl.flower.roster.time.monotonic", lambda: now[0])
    grid = grid_of(method("fedavg", model), clients, tmp_path)
    grid.alter = lambda client, message, reply: None
    roster = Roster(clients.clients, {}, patience=10.0)
    roster.look(grid)
    grid.apps = {}
    for now[0], kept in ((9.0, clients.clients), (10.0, 0)):
        roster.look(grid)
        assert len(roster._pending) == len(roster._again) == kept


class Impatient(Exception):
    """The server still waits."""


def waits(grid: LocalGrid, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Ends a server that waits for clients."""

    def enough(seconds: float) -> None:
        raise Impatient

    monkeypatch.setattr("bayesfl.flower.roster.time.sleep", enough)
    with pytest.raises(Impatient):
        serve(grid, **options)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({101: 0}, "client 0 is node 100 already"),
        ({101: 9}, "it says that it is client 9, and clients are 0 to 6"),
        ({101: "one"}, "client-id must be a whole number >= 0"),
    ],
)
def test_every_node_is_one_client(
    ids: dict[int, Any], words: str, model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """A node that is none of them, or one that is there already, is not taken; the server goes on waiting."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path, ids=ids)
    if ids[101] == 9:
        app = client_app(algorithm, lambda context: clients.select([1]))
        grid.apps = {**grid.apps, 101: app}
    waits(grid, monkeypatch, algorithm=algorithm, clients=clients.clients, rounds=1)
    (line,) = [record.message for record in caplog.records if "is not taken" in record.message]
    assert line.startswith("node 101 is not taken: ")
    assert words in line


def test_a_client_is_bound_to_its_key(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any):
    """In a run that goes on, a node with another key cannot be the same client."""
    algorithm = method("fedavg", model)
    options: dict[str, Any] = {"checkpoint": tmp_path / "server"}
    deploy(algorithm, clients, tmp_path, **options)
    grid = grid_of(algorithm, clients, tmp_path, keys={103: b"somebody else's"})
    options |= {"algorithm": algorithm, "clients": clients.clients, **OPTIONS, "rounds": 4}
    waits(grid, monkeypatch, **options)
    assert "node 103 is not taken: client 3 is bound to another node's key" in caplog.text


def test_nodes_without_keys_are_named(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """They work, as in a trial, and the log says what that means."""
    algorithm = method("fedavg", model)
    keys = {100 + client: b"" for client in range(clients.clients)}
    deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, keys=keys), rounds=1)
    assert "node 100 of client 0 has no key: anyone could be this client" in caplog.text


def test_another_method_is_refused(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any):
    """A client with other options than the server says so before anything is trained."""
    grid = grid_of(bf.algorithms.fedavg(model, epochs=7), clients, tmp_path)
    waits(grid, monkeypatch, algorithm=bf.algorithms.fedavg(model, epochs=8), clients=clients.clients, rounds=1)
    assert "the server runs another method, or this one with other options" in caplog.text
    assert not [message for message in grid.sent if message.metadata.message_type == "train"]


def test_a_client_that_lost_its_state_says_so(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: Any):
    """It cannot go on from another one; the others do."""
    algorithm = method("ditto", model)

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and asked(message, "round") == 0 and client == 1:
            for file in tmp_path.rglob("client-1/state-*"):
                file.unlink()
        return reply

    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter))
    assert "client 1 is left out: its node reports error 2" in caplog.text
    assert f"the client's state 000001-{found.sessions[0]} is not in" in caplog.text
    assert rounds_of(found.base) == [3, 1, 3, 3, 3, 3, 3]
    assert found.history["cohort"].tolist() == [7.0, 6.0, 6.0]


def test_names_cannot_leave_the_folder(tmp_path: Path):
    """An experiment's name comes from outside."""
    for name in ("../up", "/etc", "a/b", "", ".", "x" * 65):
        with pytest.raises(ValueError, match="letters, digits, _ and -"):
            States(tmp_path / "states", name, 0)
    assert not (tmp_path / "states").exists()


def test_load_data_returns_one_client(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any):
    """All of them would be somebody else's data."""
    algorithm = method("fedavg", model)
    grid = LocalGrid({100: client_app(algorithm, lambda context: clients)}, tmp_path)
    waits(grid, monkeypatch, algorithm=algorithm, clients=1, rounds=1)
    assert r"load_data must return the data of one client, got 7; data.select([0]) takes one of many" in caplog.text


def tuned() -> tuple[bf.Algorithm, FederatedData]:
    """A method whose predictor tunes a number, and clients with validation data."""
    clients = bf.data.concept_drift("digits", clients=4, seed=0, validation=0.2)
    model = bf.models.mlp(64, hidden=8, outputs=5)
    return bf.algorithms.fedsi_full(model, steps=5, batch_size=10, finetune_steps=5), clients


@pytest.mark.slow
def test_a_tuned_number_is_the_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """FedSI's predictive precision, from sums over the clients' validation data, which are the simulation's."""
    sums: list[tuple[Tensor, int]] = []

    def choose(predictor: Any, total: Tensor, examples: int) -> float:
        sums.append((total.clone(), examples))
        return chosen(predictor, total, examples)

    monkeypatch.setattr("bayesfl.federation.predict.choose", choose)
    monkeypatch.setattr("bayesfl.flower.server.choose", choose)
    algorithm, clients = tuned()
    assert len(algorithm.predictor.grid) > 1
    told = simulated(algorithm, clients, rounds=2)
    found = deploy(algorithm, clients, tmp_path, rounds=2)
    expected = told.predict()
    for client in range(4):
        assert_close(predictions(found, tmp_path, client)["probs"], expected.client(client).probs, atol=1e-6, rtol=0)
    assert found.history["tuned"][-1] == told.tuned
    (over, examples), (within, known) = sums
    assert_close(over, within, atol=1e-6, rtol=0)
    assert examples == known == clients.validation.counts.sum()
    assert over.std() > 0
    bare = bf.data.concept_drift("digits", clients=4, seed=0)
    with pytest.raises(ValueError, match="is chosen on validation data, and no client has any"):
        deploy(algorithm, bare, tmp_path / "bare", rounds=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, "clients must be at least 1"),
        ({"timeout": 0.0}, "timeout is in seconds and must be > 0"),
        ({"dtype": torch.int64}, "dtype must be a floating-point type"),
        ({"every": 0}, "every must be at least 1"),
        ({"participation": 0.0}, r"must lie in \(0, 1\]"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str, model: nn.Module, tmp_path: Path):
    """Named, with the value, before anything is waited for."""
    with pytest.raises(ValueError, match=words):
        serve(LocalGrid({}, tmp_path), method("fedavg", model), **{"clients": 1, "rounds": 1, **options})
    with pytest.raises(TypeError, match="algorithm must be of type Algorithm"):
        server_app(model, clients=1, rounds=1)  # type: ignore[arg-type]


def test_another_run_in_the_folder(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Other settings, another method or a simulation's checkpoints are not gone on from."""
    algorithm, folder = method("fedavg", model), tmp_path / "server"
    deploy(algorithm, clients, tmp_path, rounds=2, checkpoint=folder)
    with pytest.raises(ValueError, match="a run that goes on keeps its settings"):
        deploy(algorithm, clients, tmp_path, rounds=3, seed=4, checkpoint=folder)
    with pytest.raises(ValueError, match="rounds counts all rounds, and 2 are already done"):
        deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=folder)
    with pytest.raises(checkpoint.CheckpointError, match="was made with another algorithm"):
        deploy(method("ditto", model), clients, tmp_path, checkpoint=folder)
    simulated(algorithm, clients, checkpoint=tmp_path / "simulated")
    with pytest.raises(checkpoint.CheckpointError, match="is no checkpoint of a deployed federation"):
        load(tmp_path / "simulated", algorithm)
    with pytest.raises(TypeError, match="algorithm must be of type Algorithm"):
        load(folder, model)  # type: ignore[arg-type]


def test_a_lost_client_outside_the_cohort_is_not_counted(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """`lost` and `rejected` are of the cohort, as in the simulation; what an outsider did is as if it had not been."""
    algorithm = method("pfedvem", model)
    cohort = Settings(3, 0.5, algorithm.sampling, "all", 3, None).cohort(clients.clients, 1)
    outside = int(np.setdiff1d(np.arange(clients.clients), cohort)[0])

    def alter(client: int, message: Message, reply: Message) -> Message | None:
        return None if message.metadata.message_type == "train" and asked(message, "round") == 1 and client == outside else reply

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {outside: KINDS["lost"]} if round == 1 else {}

    options: dict[str, Any] = {"participation": 0.5, "train": "all"}
    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), timeout=0.3, **options)
    told = simulated(algorithm, clients, faults=plan, **options)
    assert_same(found, tmp_path, told)
    for column in ("cohort", "lost", "rejected"):
        assert found.history[column].tolist() == told.history[column].tolist()


def test_an_unreadable_reply_costs_nobody_else(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Whatever reading it raises; a lost connection ends the run."""
    algorithm = method("fedavg", model)
    for error in (IndexError, RecursionError, KeyError, MemoryError):
        caplog.clear()
        grid = grid_of(algorithm, clients, tmp_path)
        honest = grid.pull_messages

        def pull(ids: Iterable[str], honest: Any = honest, error: Any = error, grid: LocalGrid = grid) -> Iterable[Message]:
            replies = list(honest(ids))
            for reply in replies:
                if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 102:
                    raise error("odd bytes")
            return replies

        grid.pull_messages = pull  # type: ignore[method-assign]
        found = deploy(algorithm, clients, tmp_path, grid, rounds=1)
        assert found.history["cohort"].tolist() == [6.0]
        assert f"client 2 is left out: its reply cannot be read: {error.__name__}" in caplog.text
    grid = grid_of(algorithm, clients, tmp_path)

    def gone(ids: Iterable[str]) -> Iterable[Message]:
        raise httpx.ConnectError("the SuperLink is away")

    grid.pull_messages = gone  # type: ignore[method-assign]
    with pytest.raises(httpx.ConnectError):
        deploy(algorithm, clients, tmp_path, grid, rounds=1)


def test_a_node_that_cannot_be_reached(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It is left out at once."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)
    honest = grid.push_messages

    def push(messages: Iterable[Message]) -> Iterable[Any]:
        (message,) = messages
        return [None] if message.metadata.message_type == "train" and message.metadata.dst_node_id == 102 else honest([message])

    grid.push_messages = push  # type: ignore[method-assign]
    found = deploy(algorithm, clients, tmp_path, grid, rounds=1, timeout=1e6)
    assert found.history["lost"].tolist() == [1.0]
    assert "client 2 is left out: its node could not be reached" in caplog.text


def test_replies_have_the_time_that_was_given(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that only sleeping moves."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("bayesfl.flower.post.time", clock)
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)
    grid.alter = lambda client, message, reply: None if client == 2 and message.metadata.message_type == "train" else reply
    deploy(algorithm, clients, tmp_path, grid, rounds=1, timeout=20.0)
    assert sum(slept) == pytest.approx(20.0)
    assert {message.metadata.ttl for message in grid.sent if message.metadata.message_type == "train"} == {20.0}


@pytest.mark.parametrize(("after", "words"), [(5.0, "its node reports error 3: expired"), (19.5, "it did not reply within 20 seconds")])
def test_a_message_that_is_gone(
    after: float, words: str, model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    """Flower drops a message when its time is over, and may say so just before the server gives it up."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("bayesfl.flower.post.time", clock)
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)
    honest, due = grid.pull_messages, set()

    def alter(client: int, message: Message, reply: Message) -> Message:
        if client == 2 and message.metadata.message_type == "train":
            due.add(message.metadata.message_id)
            return Message(Error(code=3, reason="expired"), reply_to=message)
        return reply

    grid.alter = alter
    grid.pull_messages = lambda ids: honest(id for id in ids if id not in due or clock.monotonic() >= after)  # type: ignore[method-assign]
    found = deploy(algorithm, clients, tmp_path, grid, rounds=1, timeout=20.0)
    assert found.history["lost"].tolist() == [1.0]
    assert f"client 2 is left out: {words}" in caplog.text


def test_a_node_that_says_nothing_holds_up_nobody(
    model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is asked who it is, and nothing waits for its answer."""

    def sleeps(seconds: float) -> None:
        raise Impatient

    monkeypatch.setattr("bayesfl.flower.post.time.sleep", sleeps)
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path, ids={200: "nobody"})
    grid.apps = {**grid.apps, 200: grid.apps[100]}
    grid.alter = lambda client, message, reply: None if client == "nobody" else reply
    found = deploy(algorithm, clients, tmp_path, grid)
    assert found.history["cohort"].tolist() == [7.0, 7.0, 7.0]
    assert len([message for message in grid.sent if message.metadata.dst_node_id == 200]) == 1


@pytest.mark.parametrize(("key", "value"), [("validation", "x"), ("validation", -5), ("n", 0), ("n", 2.5)])
def test_a_greeting_is_checked_before_it_counts(
    key: str, value: Any, model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
):
    """Of a node that is not taken nothing stays."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)
    grid.alter = lambda client, message, reply: changed(reply, **{key: value}) if client == 3 else reply
    waits(grid, monkeypatch, algorithm=algorithm, clients=clients.clients, rounds=1)
    assert "node 103 is not taken" in caplog.text
    assert not [message for message in grid.sent if message.metadata.message_type == "train"]


def test_a_key_is_one_client(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any):
    """Two nodes with one key cannot be two clients."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path, keys={103: b"key 102"})
    waits(grid, monkeypatch, algorithm=algorithm, clients=clients.clients, rounds=1)
    assert "node 103 is not taken: its key is that of client 2" in caplog.text


def test_a_run_that_goes_on_does_so_without_the_missing(model: nn.Module, clients: FederatedData, tmp_path: Path, caplog: Any):
    """A client that does not come back does not hold the others for ever; it may come later."""
    algorithm = method("ditto", model)
    deploy(algorithm, clients, tmp_path, rounds=2, checkpoint=tmp_path / "server")
    grid = grid_of(algorithm, clients, tmp_path)
    whole = grid.apps
    grid.apps = {node: app for node, app in whole.items() if node != 104}

    def comes_back(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type == "train" and asked(message, "round") == 2:
            grid.apps = whole
        return reply

    grid.alter = comes_back
    found = deploy(algorithm, clients, tmp_path, grid, rounds=4, checkpoint=tmp_path / "server", timeout=0.05)
    assert "going on without clients [4]" in caplog.text
    assert "client 4 is left out: its node has not come" in caplog.text

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {4: KINDS["lost"]} if round == 2 else {}

    assert_same(found, tmp_path, simulated(algorithm, clients, rounds=4, faults=plan))


def test_a_newcomer_is_heard_while_another_hangs(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: Any):
    """Its answer comes when a round has begun, and that round lasts as long as the client that hangs is waited for."""
    algorithm = method("ditto", model)
    deploy(algorithm, clients, tmp_path, rounds=1, checkpoint=tmp_path / "server")
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("bayesfl.flower.post.time", clock)
    monkeypatch.setattr("bayesfl.flower.roster.time", clock)
    grid = grid_of(algorithm, clients, tmp_path)
    whole, honest = grid.apps, grid.pull_messages
    grid.apps = {node: app for node, app in whole.items() if node != 104}
    due: dict[str, float] = {}

    def comes_back(client: int, message: Message, reply: Message) -> Message | None:
        if message.metadata.message_type == "query":
            due[message.metadata.message_id] = clock.monotonic() + (0.05 if client == 4 else 0.0)
            return reply
        if asked(message, "round") == 1:
            grid.apps = whole
        return None if client == 2 else reply

    grid.alter = comes_back
    grid.pull_messages = lambda ids: honest(id for id in ids if due.get(id, 0.0) <= clock.monotonic())  # type: ignore[method-assign]
    found = deploy(algorithm, clients, tmp_path, grid, rounds=4, checkpoint=tmp_path / "server")
    assert found.history["lost"].tolist() == [0.0, 2.0, 2.0, 1.0]


def test_a_server_app_runs_what_it_was_given(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Its main function is `serve`; an option that there is not is refused when it is built."""
    algorithm = method("fedavg", model)
    grid = grid_of(algorithm, clients, tmp_path)
    app = server_app(algorithm, clients=clients.clients, checkpoint=tmp_path / "server", **{**OPTIONS, "timeout": 5.0})
    app(grid, grid.context(0))
    found = load(tmp_path / "server", algorithm)
    assert_close(flatten(found.server), flatten(simulated(algorithm, clients).server), atol=1e-6, rtol=0)
    with pytest.raises(TypeError, match="round"):
        server_app(algorithm, clients=1, round=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [lambda t: t * float("nan"), lambda t: t - float("inf"), lambda t: t + float("inf"), lambda t: t[:3], lambda t: t.float()],
    ids=["nan", "-inf", "inf", "shape", "dtype"],
)
def test_scores_that_are_no_numbers(bad: Callable[[Tensor], Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """One client cannot end the run or make the choice; where nobody scores, nothing is predicted, and the models are kept."""
    clients = bf.data.concept_drift("digits", clients=4, seed=0, validation=0.2)
    model = bf.models.mlp(64, hidden=8, outputs=5)
    algorithm = bf.algorithms.fedsi_full(model, steps=5, batch_size=10, finetune_steps=5)
    liars: list[int] = [1]

    def alter(client: int, message: Message, reply: Message) -> Message:
        if message.metadata.message_type != "evaluate.tune" or client not in liars:
            return reply
        scores = records.unpack(reply.content, "scores", asked(reply, "digest"))["scores"]
        reply.content["scores"], digest = records.pack({"scores": bad(scores)})
        return changed(reply, digest=digest)

    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), rounds=1)
    assert found.history["tuned"][-1] in algorithm.predictor.grid
    assert "client 1 has no part in tuning" in caplog.text
    liars[:] = [0, 1, 2, 3]
    found = deploy(algorithm, clients, tmp_path, grid_of(algorithm, clients, tmp_path, alter=alter), rounds=1)
    assert "tuned" not in found.history.columns
    assert "nothing is predicted: no client has scored the candidates" in caplog.text
