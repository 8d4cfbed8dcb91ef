"""Which node is which client."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from torch import nn

import bayesfl as bf
from bayesfl.base.described import digest_of
from bayesfl.data import FederatedData
from bayesfl.flower import BadClients, client_app, load, serve
from bayesfl.flower.roster import Roster
from tests.flower.made import (
    OPTIONS,
    TOWNS,
    asked,
    assert_same,
    changed,
    deploy,
    grid_of,
    later,
    losing,
    method,
    simulated,
    sleeping,
    trains,
    waits,
)


def test_nodes_that_go_are_forgotten(
    model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
        assert len(roster._asked) == kept


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({101: 0}, r"client 0 .*node 100"),
        ({101: 9}, r"client 9, .*0 to 6"),
        ({101: "one"}, r"client-id .*'one'"),
    ],
)
def test_every_node_is_one_client(
    ids: dict[int, Any],
    words: str,
    fedavg: Any,
    clients: FederatedData,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: Any,
):
    """A node that is none of them, or one that is there already, is not accepted; the server
    continues to wait.
    """
    grid = grid_of(fedavg, clients, tmp_path, ids=ids)
    if ids[101] == 9:
        grid.apps = {**grid.apps, 101: client_app(fedavg, lambda context: clients.select([1]))}
    waits(grid, monkeypatch, algorithm=fedavg, clients=clients.clients, rounds=1)
    (line,) = [record.message for record in caplog.records if "is not accepted" in record.message]
    assert re.match(f"node 101 is not accepted: .*{words}", line)


def broken(context: Any) -> FederatedData:
    raise FileNotFoundError("/data/basel.csv")


@pytest.mark.parametrize("kind", ["method", "file", "one", "few", "ids", "late"])
def test_refused_nodes_end_the_wait(
    kind: str, model: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any
):
    """All or one of them, after the timeout and no sooner; a node that comes late gets its time."""
    own, clock = bf.algorithms.fedavg(model, epochs=1), sleeping(monkeypatch)
    grid = grid_of(own, clients, tmp_path)
    unreadable = client_app(own, broken)
    words = rf"waiting for client 0, .*: no node was accepted .*{FileNotFoundError.__name__}.*basel"
    ends = 61
    if kind == "method":
        grid = grid_of(bf.algorithms.fedavg(model, epochs=2), clients, tmp_path)
        words = "waiting for client 0, .*client 6: .*node 100: .*epochs is 2 here.*node 106: "
    elif kind == "file":
        grid.apps = dict.fromkeys(grid.apps, unreadable)
    elif kind == "one":
        grid.apps = {**grid.apps, 100: unreadable}
        words = "waiting for client 0: .*node 100: .*basel"
    elif kind == "few":  # the others are not there
        grid.apps = {100: unreadable}
    elif kind == "ids":
        grid = grid_of(own, clients, tmp_path, ids=dict.fromkeys(grid.apps, 3))
        words = r"waiting for client 0, .*: .*give every node its own client-id"
    elif kind == "late":
        last, grid.apps = grid.apps[106], {**grid.apps, 100: unreadable}
        del grid.apps[106]
        join = {50.0: lambda grid: grid.apps.update({106: last})}
        grid, ends = later(grid, clock, join), 111
        words = "waiting for client 0: "
    with pytest.raises(BadClients, match=words):
        serve(grid, own, clients=clients.clients, rounds=1, timeout=60.0)
    assert ends <= clock.monotonic() <= ends + 2


def test_a_node_is_mended_in_time(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any
):
    """It is asked again; and where none is refused the server waits for as long as it takes."""
    clock = sleeping(monkeypatch)
    grid = grid_of(fedavg, clients, tmp_path)
    whole, first = dict(grid.apps), dict(list(grid.apps.items())[:2])
    grid.apps = first | {100: client_app(fedavg, broken)}
    changes: dict[float, Any] = {
        50.0: lambda grid: grid.apps.update(first),
        1000.0: lambda grid: grid.apps.update(whole),
    }
    options: dict[str, Any] = {"clients": clients.clients, "rounds": 1, "timeout": 100.0}
    assert serve(later(grid, clock, changes), fedavg, **options).round == 1
    assert clock.monotonic() >= 1000


def test_a_run_goes_on_without_refused_nodes(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any
):
    """From its checkpoint, if enough clients are there; otherwise it ends with the reason."""
    options: dict[str, Any] = {"checkpoint": tmp_path / "server"}
    deploy(fedavg, clients, tmp_path, **options)
    sleeping(monkeypatch)
    grid = grid_of(fedavg, clients, tmp_path)
    grid.apps = {**grid.apps, 100: client_app(fedavg, broken)}
    found = deploy(fedavg, clients, tmp_path, grid, rounds=4, **options)
    assert found.history["cohort"][-1] == clients.clients - 1
    every = bf.Admission("skip", min_clients=clients.clients)
    with pytest.raises(BadClients, match="waiting for client 0: "):
        deploy(fedavg, clients, tmp_path, grid, rounds=5, admission=every, **options)


def test_a_client_is_bound_to_its_key(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """In a run that goes on, a node with another key cannot be the same client."""
    options: dict[str, Any] = {"checkpoint": tmp_path / "server"}
    deploy(fedavg, clients, tmp_path, **options)
    grid = grid_of(fedavg, clients, tmp_path, keys={103: b"somebody else's"})
    options |= {"algorithm": fedavg, "clients": clients.clients, **OPTIONS, "rounds": 4}
    waits(grid, monkeypatch, **options)
    assert re.search(r"node 103 .*not accepted.*client 3 .*key", caplog.text)


def test_a_client_keeps_its_name(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """In a run that goes on, data of another name are somebody else's; those who are awaited are
    called by their names.
    """
    towns = replace(clients, client_names=TOWNS)
    options: dict[str, Any] = {"checkpoint": tmp_path / "server"}
    assert (
        deploy(fedavg, towns, tmp_path, **options).names
        == load(tmp_path / "server", fedavg).names
        == TOWNS
    )
    other = replace(clients, client_names=(*TOWNS[:3], "Zug", *TOWNS[4:]))
    options |= {"algorithm": fedavg, "clients": clients.clients, **OPTIONS, "rounds": 4}
    waits(grid_of(fedavg, other, tmp_path), monkeypatch, **options)
    assert re.search(r"node 103 .*not accepted: client 3 was called 'Chur', .*'Zug'", caplog.text)
    assert re.search(r"waiting for client 3 \('Chur'\)", caplog.text)


def test_nodes_without_keys_are_named(
    fedavg: Any, clients: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """They work, as in a trial, and the log says what that means."""
    keys = {100 + client: b"" for client in range(clients.clients)}
    deploy(fedavg, clients, tmp_path, grid_of(fedavg, clients, tmp_path, keys=keys), rounds=1)
    assert re.search(r"node 100 .*client 0 .*no key", caplog.text)


@pytest.mark.parametrize("kind", ["transform", "augment"])
@pytest.mark.parametrize("other", [None, lambda x: x / 3])
def test_a_node_whose_inputs_are_made_otherwise_is_named(
    kind: str,
    other: Any,
    fedavg: Any,
    clients: FederatedData,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """The server cannot know whether that is meant; the same function elsewhere is no news. Nodes
    that share no secret send no digest.
    """
    made = getattr(clients, {"transform": "transformed", "augment": "augmented"}[kind])
    told = rf"client 3 .*has no or another {kind} of its inputs than the first client"
    cases = (
        ("none", lambda x: x / 3, "", False),
        ("one", lambda x: x / 2, "key", False),
        ("other", other, "key", True),
    )
    for folder, change, secret, said in cases:
        caplog.clear()
        third = clients if change is None else made(change)
        grid = grid_of(fedavg, made(lambda x: x / 2), tmp_path / folder)
        grid.secret = secret
        own = client_app(fedavg, lambda context, third=third: third.select([3]))
        grid.apps = {**grid.apps, 103: own}
        deploy(fedavg, clients, tmp_path, grid, rounds=1)
        assert ("of its inputs than" in caplog.text) == said == bool(re.search(told, caplog.text))
        assert caplog.text.count(f"nodes use the same {kind};") == (not secret)


def test_digests_of_a_clients_numbers_are_keyed(
    fedavg: Any, clients: FederatedData, tmp_path: Path
):
    """By the nodes' secret: who tries the client's numbers finds none of them in what it said."""
    scaled = clients.transformed(lambda x: x / 2)
    said = []
    for secret in ("", "one", "other"):
        grid = grid_of(fedavg, scaled, tmp_path / f"of {secret}")
        grid.secret, heard = secret, []

        def alter(client, message, reply, heard=heard):
            if not reply.has_error() and "transform" in reply.content["config"]:
                heard.append(reply.content["config"]["transform"])
            return reply

        grid.alter = alter
        deploy(fedavg, scaled, tmp_path / f"of {secret}", grid, rounds=1)
        said.append(heard[0])
    assert said[0] == "not sent"
    assert len({*said, digest_of(scaled.train.transform)}) == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("splits", "x"),
        ("task", 5),
        ("outputs", "x"),
        ("n", 0),
        ("n", 2.5),
        ("name", ""),
        ("name", "x" * 201),
        ("name", 7),
    ],
)
def test_a_greeting_is_checked_before_it_counts(
    key: str,
    value: Any,
    fedavg: Any,
    clients: FederatedData,
    tmp_path: Path,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
):
    """Of a node that is not accepted nothing stays."""
    grid = grid_of(fedavg, clients, tmp_path)
    grid.alter = lambda client, message, reply: (
        changed(reply, **{key: value}) if client == 3 else reply
    )
    waits(grid, monkeypatch, algorithm=fedavg, clients=clients.clients, rounds=1)
    assert "node 103 is not accepted" in caplog.text
    assert not any(map(trains, grid.sent))


def test_a_key_is_one_client(
    fedavg: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """Two nodes with one key cannot be two clients."""
    grid = grid_of(fedavg, clients, tmp_path, keys={103: b"key 102"})
    waits(grid, monkeypatch, algorithm=fedavg, clients=clients.clients, rounds=1)
    assert re.search(r"node 103 .*not accepted.*key .*client 2", caplog.text)


def test_a_run_that_goes_on_does_so_without_the_missing(
    ditto: Any, clients: FederatedData, tmp_path: Path, caplog: Any
):
    """A client that does not come back does not hold the others for ever; it may come later."""
    deploy(ditto, clients, tmp_path, rounds=2, checkpoint=tmp_path / "server")
    grid = grid_of(ditto, clients, tmp_path)
    whole = grid.apps
    grid.apps = {node: app for node, app in whole.items() if node != 104}

    def comes_back(client: int, message: Message, reply: Message) -> Message:
        if trains(message, 2):
            grid.apps = whole
        return reply

    grid.alter = comes_back
    found = deploy(
        ditto, clients, tmp_path, grid, rounds=4, checkpoint=tmp_path / "server", timeout=0.05
    )
    assert "continuing without client 4\n" in caplog.text
    assert re.search(r"client 4 .*left out.*not connected", caplog.text)
    sim = simulated(ditto, clients, rounds=4, faults=losing(4, round=2))
    assert_same(found, tmp_path, sim)


def test_a_newcomer_is_heard_while_another_hangs(
    ditto: Any, clients: FederatedData, tmp_path: Path, monkeypatch: Any
):
    """Its answer comes when a round has begun, and that round lasts as long as the client that
    hangs is waited for.
    """
    deploy(ditto, clients, tmp_path, rounds=1, checkpoint=tmp_path / "server")
    clock = sleeping(monkeypatch)
    grid = grid_of(ditto, clients, tmp_path)
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
    grid.pull_messages = lambda ids: honest(
        id for id in ids if due.get(id, 0.0) <= clock.monotonic()
    )
    found = deploy(ditto, clients, tmp_path, grid, rounds=4, checkpoint=tmp_path / "server")
    assert found.history["lost"].tolist() == [0.0, 2.0, 2.0, 1.0]
