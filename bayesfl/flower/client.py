"""The client's side: an algorithm's local work in answer to messages, on data that never leave."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils._pytree import tree_map

from bayesfl.base.checks import instance
from bayesfl.base.protocols import Server, View
from bayesfl.base.random import Stage
from bayesfl.base.trees import nest
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.engine import Engine
from bayesfl.evaluation.predictions import Predictions
from bayesfl.federation.admission import PROTOCOL
from bayesfl.federation.client import Local, Received, kept_phases
from bayesfl.federation.identity import fingerprint
from bayesfl.federation.predict import of_chunk, scores
from bayesfl.federation.settings import DTYPES, FEDERATION, METHOD
from bayesfl.federation.simulation import check
from bayesfl.flower import records
from bayesfl.flower.states import States


class Refused(RuntimeError):
    """What a client does not do; the server gets the reason."""


def client_app(
    algorithm: Algorithm,
    load_data: Callable[[Context], FederatedData],
    *,
    state_dir: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    device: torch.device | str = "cpu",
) -> ClientApp:
    """A Flower ClientApp that does an algorithm's local work.

    A node says which client it is in its configuration, `flower-supernode --node-config 'client-id=0 state-dir="/var/lib/bayesfl"'`.

    Args:
        algorithm: The method, the same as the server's to the last option.
        load_data: (context) -> the data of this one client. Its splits must be the same each time.
        state_dir: Where the client keeps its private state, one small file a round, and the predictions on its test data; None for the
            node's `state-dir`. Only this client should be able to read it.
        engine: How it is computed; changes nothing but speed and rounding.
        device: Where.

    Raises:
        TypeError: `algorithm` is no Algorithm.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    app, engine = ClientApp(), engine or Engine()

    def here(context: Context) -> "_Client":
        return _Client.of(algorithm, load_data, context, state_dir, engine, torch.device(device))

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        check(algorithm, client.data)
        client.clean(records.setting(message.content, "experiment", str))
        found = {"client": client.id, "n": int(client.data.train.counts[0]), "validation": client.examples("validation")}
        return Message(RecordDict({"config": ConfigRecord({"protocol": PROTOCOL, **found})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        return Message(client.train(client.order(message)), reply_to=message)

    @app.evaluate("tune")
    def tune(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        return Message(client.tune(client.order(message)), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        return Message(client.evaluate(client.order(message)), reply_to=message)

    return app


def _same_code(message: Message, algorithm: Algorithm) -> None:
    """That the server speaks of the same method.

    Raises:
        Refused: It does not.
    """
    protocol = records.setting(message.content, "protocol", int)
    if protocol != PROTOCOL:
        raise Refused(f"the server speaks protocol {protocol}, this client {PROTOCOL}; install the same version of bayesfl on both")
    if records.setting(message.content, "algorithm", str) != fingerprint(algorithm):
        raise Refused("the server runs another method, or this one with other options; ship the same app to both")


@dataclass(frozen=True)
class _Order:
    """What the server asks for.

    Args:
        client: Whom.
        experiment: Its name.
        round: Rounds done before.
        rounds: Of the run.
        seed: Of the run.
        dtype: Precision of the run.
        sessions: Of the servers that have run it, the present one last.
        base: The name of the state to start from; empty for the initial one.
        named: The states that may be asked for again.
        keeps: Whether clients have a private state at all.
        sends: Whether the reply is gathered.
        value: What was tuned; NaN for nothing.
        tolerant: Whether it predicts without its fine-tuning where that is not finite; what trains is never tolerated.
        common: What all clients were sent.
        addressed: What this one was sent, [1, ...].
        start: The state of round 0, [1, ...], where it starts from that.
    """

    client: int
    experiment: str
    round: int
    rounds: int
    seed: int
    dtype: torch.dtype
    sessions: list[str]
    base: str
    named: list[str]
    keeps: bool
    sends: bool
    value: float
    tolerant: bool
    common: Server
    addressed: View
    start: View

    @classmethod
    def of(cls, message: Message, device: torch.device | str) -> "_Order":
        content = message.content
        asked: dict[str, Any] = {key: records.setting(content, key, str) for key in ("experiment", "base")}
        asked |= {key: records.setting(content, key, bool) for key in ("keeps", "sends", "tolerant")}
        asked |= {key: records.setting(content, key, int) for key in ("client", "round", "rounds", "seed")}
        asked |= {key: [str(name) for name in records.setting(content, key, list)] for key in ("sessions", "named")}
        asked["value"] = records.setting(content, "value", float)
        dtype = DTYPES[records.setting(content, "dtype", str)]
        common, own = (
            nest({name: t.to(device) for name, t in records.unpack(content, part, records.setting(content, f"{part}_digest", str)).items()})
            for part in ("common", "own")
        )
        return cls(dtype=dtype, common=common, **{"addressed": {}, "start": {}, **own}, **asked)


@dataclass(frozen=True)
class _Client:
    """One client on its node.

    Args:
        id: Its number, from 0.
        algorithm: The method.
        data: Its data, of one client.
        folder: Where its states are.
        engine: How it computes.
        device: Where.
    """

    id: int
    algorithm: Algorithm
    data: FederatedData
    folder: str | os.PathLike[str]
    engine: Engine
    device: torch.device

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        load_data: Callable[[Context], FederatedData],
        context: Context,
        state_dir: str | os.PathLike[str] | None,
        engine: Engine,
        device: torch.device,
    ) -> "_Client":
        """The client that a node is.

        Raises:
            Refused: Its configuration or its data don't say.
        """
        node = context.node_config
        id = node.get("client-id")
        if type(id) is not int or id < 0:
            raise Refused(
                f"this node does not say which client it is: client-id must be a whole number >= 0, got {id!r}; start it with "
                "--node-config 'client-id=0'"
            )
        folder = node.get("state-dir") if state_dir is None else state_dir
        if not isinstance(folder, str | os.PathLike):
            raise Refused("the client has no folder for its state: give client_app a state_dir, or the node state-dir in --node-config")
        data = load_data(context)
        instance("what load_data returns", data, FederatedData, FEDERATION)
        if data.clients != 1:
            raise Refused(f"load_data must return the data of one client, got {data.clients}; data.select([{id}]) takes one of many")
        return cls(id, algorithm, data, folder, engine, device)

    def examples(self, split: str) -> int:
        """How many examples a split has."""
        return int(self.data.splits[split].counts.sum()) if split in self.data.splits else 0

    def order(self, message: Message) -> _Order:
        """What the server asks of this client.

        Raises:
            Refused: It is meant for another: this node was started again as somebody else.
        """
        order = _Order.of(message, self.device)
        if order.client != self.id:
            raise Refused(
                f"the server takes this node for client {order.client}, and it says now that it is client {self.id}; start each node with "
                "the client-id that it had, or start a new experiment"
            )
        return order

    def train(self, order: _Order) -> RecordDict:
        """A round's local work; the new state is on disk before the reply leaves."""
        received, local = self._received(order), self._local(order)
        phases = None if order.sends else kept_phases(self.algorithm)
        with self.engine.crew(self.device) as crew:
            (done,) = crew.over([received], lambda got: local.run(Stage.TRAIN, self._ids, got, order.round, phases=phases))
        views = done.views
        if order.keeps:
            states = self._states(order.experiment)
            states.write(order.round + 1, order.sessions[-1], {key: views[key] for key in received.rows})
            states.forget(order.round, named=order.named, sessions=order.sessions)
        metrics = MetricRecord()
        if order.sends and "nll" in done.info:
            metrics["train_nll"] = float(done.info["nll"].double().mean())
        config: dict[str, Any] = {"protocol": PROTOCOL, "round": order.round}
        out: dict[str, Any] = {"metrics": metrics}
        if order.sends:
            sent = tree_map(lambda t: t[0], {**self.algorithm.sent(views), **self.algorithm.reported(views)})
            out["up"], config["digest"] = records.pack(sent)
        return RecordDict({**out, "config": ConfigRecord(config)})

    def tune(self, order: _Order) -> RecordDict:
        """How likely its validation data are under each candidate of the method's predictor."""
        local = self._local(order)
        done = local.finetuned(self._ids, self._received(order), order.round)
        total = scores(local, done, self._split("validation", order))
        record, digest = records.pack({"scores": total})
        return RecordDict({"scores": record, "config": ConfigRecord({"digest": digest})})

    def evaluate(self, order: _Order) -> RecordDict:
        """Predicts its test data, which stay in its folder; the measures go to the server."""
        measures: dict[str, float] = {}
        if self.examples("test"):
            local, value = self._local(order), None if np.isnan(order.value) else order.value
            done = local.finetuned(self._ids, self._received(order), order.round)
            (parts,) = of_chunk(local, done, [self._split("test", order)], round=order.round, draws=None, value=value)
            ((_, found),) = parts
            found = {name: t.cpu() for name, t in found.items()}
            self._states(order.experiment).write_predictions(order.round, {name: t[0] for name, t in found.items()})
            predictions = Predictions(mask=torch.ones(1, self.examples("test"), dtype=torch.bool), **found)
            summary = predictions.summary(self._of_one("test", order).to("cpu"))
            measures = {name: summary[name] for name in records.MEASURES if np.isfinite(summary.get(name, np.nan))}
        return RecordDict({"metrics": MetricRecord(dict(measures))})

    @property
    def _ids(self) -> np.ndarray:
        return np.array([self.id])

    def _of_one(self, name: str, order: _Order) -> ClientData:
        return self.data.splits[name].to(self.device, order.dtype)

    def _split(self, name: str, order: _Order) -> ClientData:
        """A split in which this client has its number, which addresses its draws, and all others have nothing."""
        split = self._of_one(name, order)
        return ClientData(split.x, split.y, split.index, np.append(np.zeros(self.id, np.int64), split.counts), split.environment)

    def clean(self, experiment: str) -> None:
        """Removes what a killed process of this client has left half-written."""
        self._states(experiment).clean()

    def _states(self, experiment: str) -> States:
        return States(self.folder, experiment, self.id)

    def _local(self, order: _Order) -> Local:
        return Local(self.algorithm, self.engine, self._split("train", order), order.seed, order.rounds, order.tolerant)

    def _received(self, order: _Order) -> Received:
        """What it was sent, and the state that the server names, [1, ...]."""
        own = self._states(order.experiment).read(order.base) if order.base and order.keeps else order.start
        return Received(order.common, order.addressed, tree_map(lambda t: t.to(self.device), own))
