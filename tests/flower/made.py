"""Deployments over a grid of this process, replies gone wrong, and the simulation to
compare with.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten, nest
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.faults import FAULTS, Fault
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from bayesfl.flower import Deployed, client_app, records, serve
from tests.flower.grid import Alter, LocalGrid

OPTIONS: dict[str, Any] = {"rounds": 3, "seed": 3, "dtype": torch.float64}
TOWNS = ("Basel", "Bern", "Brig", "Chur", "Genf", "Thun", "Visp")
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1, "batch_size": 10},
    "ditto": {"epochs": 1, "batch_size": 10},
    "pfedvem": {"head_epochs": 2, "body_epochs": 1, "batch_size": 10, "init_scale": 0.3},
}


def grid_of(
    algorithm: bf.Algorithm, clients: FederatedData, folder: Path, **options: Any
) -> LocalGrid:
    """A node for each client, numbered from 100, or as `nodes` says."""

    def data_of(context: Any) -> FederatedData:
        return clients.select([int(context.node_config["client-id"])])

    app = client_app(
        algorithm, data_of, engine=bf.Engine(workers=1), calibration=options.pop("calibration", ())
    )
    nodes = options.pop("nodes", range(100, 100 + clients.clients))
    return LocalGrid(
        dict.fromkeys(nodes, app),
        folder,
        **{"ids": {node: client for client, node in enumerate(nodes)}, **options},
    )


def deploy(
    algorithm: bf.Algorithm,
    clients: FederatedData,
    folder: Path,
    grid: LocalGrid | None = None,
    **options: Any,
) -> Deployed:
    own = {"calibration": options.get("calibration", ()), "alter": options.pop("alter", None)}
    grid = grid or grid_of(algorithm, clients, folder, **own)
    return serve(grid, algorithm, clients=clients.clients, **{**OPTIONS, "timeout": 5.0, **options})


def private(
    deployed: Deployed, folder: Path, nodes: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """The states of all clients as the server knows them, [J, ...]; `nodes` are theirs where they
    moved.
    """
    rows = []
    for client in range(deployed.clients):
        place, node = deployed.place(client), 100 + client if nodes is None else nodes[client]
        if place.base:
            file = (
                folder
                / f"node-{node}"
                / place.experiment
                / f"client-{place.client}"
                / f"state-{place.base}.safetensors"
            )
            rows.append(flatten(files.read_file(file, files.NODE)["rows"]))
        else:
            rows.append(
                {name: t[None] for name, t in flatten(deployed.initial(place.experiment)).items()}
            )
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def method(name: str, model: nn.Module) -> bf.Algorithm:
    """One of METHODS."""
    return getattr(bf.algorithms, name)(model, **METHODS[name])


def asked(message: Message, key: str) -> Any:
    """A setting of a message."""
    return records.config(message.content)[key]


def simulated(algorithm: bf.Algorithm, clients: FederatedData, **options: Any) -> Result:
    """The simulation under the same options."""
    return bf.simulate(
        algorithm, clients, evaluate_every=None, progress=False, **{**OPTIONS, **options}
    )


def assert_same(
    found: Deployed,
    folder: Path,
    sim: Result,
    nodes: Sequence[int] | None = None,
    atol: float = 1e-6,
) -> None:
    """Server's and clients' states are the simulation's."""
    assert_close(flatten(found.server), flatten(sim.server), atol=atol, rtol=0)
    if sim.private:
        assert_close(private(found, folder, nodes), flatten(sim.private), atol=atol, rtol=0)


def predictions(deployed: Deployed, folder: Path, client: int) -> dict[str, Tensor]:
    """What a client predicted for its test data."""
    place = f"node-{100 + client}/{deployed.experiment}/client-{client}/predictions.safetensors"
    return files.read_file(folder / place, files.NODE)["predictions"]


def assert_predicts(found: Deployed, folder: Path, sim: Result, atol: float = 1e-6) -> None:
    """Clients' predictions are the simulation's."""
    predicted = sim.predict()
    for client in range(found.clients):
        mine, wanted = predictions(found, folder, client), predicted.client(client)
        assert_close(mine["probs"], wanted.probs, atol=atol, rtol=0)


def trains(message: Message, round: int | None = None) -> bool:
    """Whether a message asks for training, in any round or in one."""
    kind = message.metadata.message_type
    return kind == "train" and (round is None or asked(message, "round") == round)


def spoilt(
    client: int, change: Callable[[Message], Message | None], round: int | None = None
) -> Alter:
    """Changes what a client replies to training, in any round or in one."""
    return lambda who, message, reply: (
        change(reply) if who == client and trains(message, round) else reply
    )


def unheard(reply: Message) -> None:
    """The reply does not arrive."""


def losing(client: int, round: int) -> Callable[..., dict[int, Fault]]:
    """Faults of a simulation that loses a client in a round."""
    return lambda now, attempt, ids: {client: FAULTS["lost"]} if now == round else {}


class Killed(BaseException):
    """The server's process has gone."""


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


class Impatient(Exception):
    """The server still waits."""


def waits(grid: LocalGrid, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Ends a server that waits for clients."""

    def enough(seconds: float) -> None:
        raise Impatient

    monkeypatch.setattr("bayesfl.flower.roster.time.sleep", enough)
    with pytest.raises(Impatient):
        serve(grid, **options)


def tuned() -> tuple[bf.Algorithm, FederatedData]:
    """A method whose predictor tunes a number, and clients with validation data."""
    clients = bf.data.concept_drift("digits", clients=4, seed=0, validation=0.2)
    model = bf.models.mlp(64, hidden=8, outputs=5)
    return bf.algorithms.fedsi_full(model, steps=5, batch_size=10, finetune_steps=5), clients


def sleeping(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's clock, which only sleeping moves."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    for module in ("post", "roster"):
        monkeypatch.setattr(f"bayesfl.flower.{module}.time", clock)
    return clock


class Later(LocalGrid):
    """A grid that changes while the server waits: {seconds: what is done then}."""

    def get_nodes(self) -> Any:
        for when in [when for when in self.later if when <= self.clock.monotonic()]:
            self.later.pop(when)(self)
        return super().get_nodes()

    def get_node_ids(self) -> Any:
        return [node.node_id for node in self.get_nodes()]


def later(grid: LocalGrid, clock: Any, changes: dict[float, Any]) -> LocalGrid:
    grid.__class__ = Later
    vars(grid).update(clock=clock, later=changes)
    return grid
