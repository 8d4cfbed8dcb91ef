"""The client's side of a federation over Flower: an algorithm's local work in answer to messages, on data that stay with the client."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils._pytree import tree_map

from bayesfl.base.checks import instance
from bayesfl.base.function_code import digest_of_code
from bayesfl.base.protocols import Server, View
from bayesfl.base.random import Stage
from bayesfl.base.trees import nest
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.engine import Engine
from bayesfl.evaluation.history import PREFIXES
from bayesfl.evaluation.own_measures import Measure, check_measures, measured
from bayesfl.evaluation.predictions import Predictions
from bayesfl.federation.admission import PROTOCOL
from bayesfl.federation.client import Done, Local, Received, kept_phases
from bayesfl.federation.client_model import of_client
from bayesfl.federation.errors import called
from bayesfl.federation.fits import check
from bayesfl.federation.identity import fingerprint
from bayesfl.federation.predict import of_chunk, scores
from bayesfl.federation.settings import DTYPES, FEDERATION, METHOD
from bayesfl.flower import records
from bayesfl.flower.states import States

log = logging.getLogger(__name__)


class Refused(RuntimeError):
    """An error raised when a client refuses a request; the server receives the reason."""


def client_app(
    algorithm: Algorithm,
    load_data: Callable[[Context], FederatedData],
    *,
    state_dir: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    device: torch.device | str = "cpu",
    share_measures: bool = False,
    measures: Mapping[str, Measure] = {},
) -> ClientApp:
    """Make a Flower ClientApp that does an algorithm's local work.

    A node's configuration says which client it is, `flower-supernode --node-config 'client-id=0 state-dir="/var/lib/bayesfl"'`.

    Args:
        algorithm: The method, with the same options as the server's.
        load_data: Function from the context to the data of this one client, whose splits must be the same each time.
        state_dir: Folder in which the client keeps its private state, one small file for each round, and at the end its own model, which
            `bayesfl.load_client(state_dir, algorithm)` reads, and the predictions on its test data; None for the node's `state-dir`. Only
            this client should be able to read it.
        engine: How the client computes; it changes only speed and rounding. None for `Engine()`.
        device: The device that computes.
        share_measures: Whether the server may keep this client's measures as such; otherwise it keeps their means over clients alone. The
            node's `share-measures=true` says the same.
        measures: {name: function} of measures beside the library's own, as of `simulate`; they are sent to the server.

    Raises:
        TypeError: `algorithm` is no `Algorithm`, `share_measures` no truth value, or a measure no function.
        ValueError: The name of a measure is not of small letters, digits and underscores.
    """
    check_measures(measures)
    instance("algorithm", algorithm, Algorithm, METHOD)
    instance("share_measures", share_measures, bool, "pass True or False")
    app, engine = ClientApp(), engine or Engine()

    def here(context: Context) -> "_Client":
        return _Client.of(algorithm, load_data, context, state_dir, engine, torch.device(device), share_measures, measures)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        check(algorithm, client.data)
        client.clean(records.setting(message.content, "experiment", str))
        n, validation = int(client.data.train.counts[0]), client.examples("validation")
        found = {"protocol": PROTOCOL, "client": client.id, "name": client.name, "n": n, "validation": validation}
        # Digests alone, as a transform may hold numbers of the client's data.
        for kind, change in (("transform", client.data.train.transform), ("augment", client.data.train.augment)):
            found[kind] = "" if change is None else digest_of_code(change)
        made = client.data.prepared
        found["columns"] = "" if made is None else hashlib.sha256(made.to_json().encode()).hexdigest()
        return Message(RecordDict({"config": ConfigRecord(found)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        return Message(client.train(client.order(message)), reply_to=message)

    @app.train("adapt")
    def adapt(message: Message, context: Context) -> Message:
        _same_code(message, algorithm)
        client = here(context)
        return Message(client.adapt(client.order(message)), reply_to=message)

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
    """Check that the server uses the same protocol and runs the same method.

    Raises:
        Refused: The protocol or the method differs.
    """
    protocol = records.setting(message.content, "protocol", int)
    if protocol != PROTOCOL:
        raise Refused(f"the server speaks protocol {protocol}, this client {PROTOCOL}; install the same version of bayesfl on both")
    if records.setting(message.content, "algorithm", str) != fingerprint(algorithm):
        raise Refused("the server runs another method, or this one with other options; ship the same app to both")


@dataclass(frozen=True)
class _Order:
    """A request of the server to one client.

    Args:
        client: The client's id.
        experiment: The experiment's name.
        round: Number of rounds done before.
        rounds: Number of rounds of the run.
        seed: The run's seed.
        dtype: The run's precision.
        sessions: Sessions of the servers that have run the experiment, the present one last.
        base: The name of the state from which the client starts; empty for the initial one.
        kept_in: The experiment under which the client keeps that state: this one, or one before.
        kept_as: The client's id in that experiment.
        named: Names of the states that may be asked for again.
        keeps: Whether the method's clients have a private state.
        sends: Whether the reply is gathered.
        value: The number that was tuned; NaN for none.
        tolerant: Whether the client predicts without its fine-tuning if that is not finite; always False for training.
        common: What the server sends to every client.
        addressed: What the server sends to this client alone, [1, ...].
        start: The initial state, [1, ...], if the client starts from it; empty otherwise.
    """

    client: int
    experiment: str
    round: int
    rounds: int
    seed: int
    dtype: torch.dtype
    sessions: list[str]
    base: str
    kept_in: str
    kept_as: int
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
        asked: dict[str, Any] = {key: records.setting(content, key, str) for key in ("experiment", "base", "kept_in")}
        asked |= {key: records.setting(content, key, bool) for key in ("keeps", "sends", "tolerant")}
        asked |= {key: records.setting(content, key, int) for key in ("client", "round", "rounds", "seed", "kept_as")}
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
        id: The client's id, from 0.
        algorithm: The method.
        data: The data of this one client.
        folder: The folder of its states.
        engine: How it computes.
        device: The device that computes.
        shares: Whether the server may keep its measures as such.
        measures: Measures beside the library's own.
    """

    id: int
    algorithm: Algorithm
    data: FederatedData
    folder: str | os.PathLike[str]
    engine: Engine
    device: torch.device
    shares: bool
    measures: Mapping[str, Measure]

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        load_data: Callable[[Context], FederatedData],
        context: Context,
        state_dir: str | os.PathLike[str] | None,
        engine: Engine,
        device: torch.device,
        share_measures: bool,
        measures: Mapping[str, Measure],
    ) -> "_Client":
        """Make the client that a node's configuration names.

        Raises:
            Refused: The configuration has no valid `client-id` or no folder for states, or the data are not those of one client.
            TypeError: `load_data` returns no `FederatedData`.
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
        return cls(id, algorithm, data, folder, engine, device, share_measures or node.get("share-measures") is True, measures)

    def examples(self, split: str) -> int:
        """Return the number of examples in a split, 0 if there is no such split."""
        return int(self.data.splits[split].counts.sum()) if split in self.data.splits else 0

    def order(self, message: Message) -> _Order:
        """Return the server's request to this client.

        Raises:
            Refused: The request is for another client: this node was restarted with another id.
        """
        order = _Order.of(message, self.device)
        if order.client != self.id:
            raise Refused(
                f"the server takes this node for client {order.client}, and it says now that it is {called(self.id, self._names)}; start "
                "each node with the client-id that it had, or start a new experiment"
            )
        return order

    def train(self, order: _Order) -> RecordDict:
        """Do a round's local work, and return the reply; the new state is on disk before the reply is sent."""
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

    def adapt(self, order: _Order) -> RecordDict:
        """Run the adaptation of a client that joins a federation trained without it; its state is then on disk."""
        local, received = self._local(order), self._received(order)
        with self.engine.crew(self.device) as crew:
            (done,) = crew.over([received], lambda got: local.run(Stage.ADAPT, self._ids, got, order.round))
        self._states(order.experiment).write(order.round, order.sessions[-1], {key: done.views[key] for key in received.rows})
        return RecordDict({"config": ConfigRecord({"protocol": PROTOCOL, "round": order.round})})

    def tune(self, order: _Order) -> RecordDict:
        """Return how each candidate of the method's predictor fits the validation data, as sums."""
        local = self._local(order)
        done = local.finetuned(self._ids, self._received(order), order.round)
        total = scores(local, done, self._split("validation", order), round=order.round)
        record, digest = records.pack({"scores": total})
        return RecordDict({"scores": record, "config": ConfigRecord({"digest": digest})})

    def evaluate(self, order: _Order) -> RecordDict:
        """Store the client's own model in its folder, and the predictions of its test data; the reply has the measures alone."""
        local, value = self._local(order), None if np.isnan(order.value) else order.value
        done = local.finetuned(self._ids, self._received(order), order.round)
        self._keep_model(order, local, done, value)
        names = [name for name in PREFIXES if self.examples(name)]
        parts = of_chunk(local, done, [self._split(name, order) for name in names], round=order.round, draws=None, value=value)
        reply: dict[str, Any] = {}
        for name, ((_, computed),) in zip(names, parts, strict=True):
            found: dict[str, Any] = {key: t.cpu() for key, t in computed.items()}
            if name == "test":
                self._states(order.experiment).write_predictions(order.round, {key: t[0] for key, t in found.items()})
            mask = torch.ones(1, self.examples(name), dtype=torch.bool)
            predictions = Predictions(mask=mask, likelihood=self.algorithm.likelihood, **found)
            reply[name] = MetricRecord(dict(self._measures(predictions, self._of_one(name, order).to("cpu"))))
        return RecordDict({**reply, "config": ConfigRecord({"share": self.shares})})

    def _measures(self, predictions: Predictions, split: ClientData) -> dict[str, float]:
        """Return the library's measures of predictions that are sent, and the client's own."""
        summary = predictions.summary(split)
        known = {name: summary[name] for name in records.MEASURES if name in summary}
        try:
            known |= measured(self.measures, predictions, split, summary)
        except Exception:  # of a user's own function; the library's measures are sent all the same
            log.exception("the measures of one's own are left out")
        return {name: value for name, value in known.items() if np.isfinite(value)}

    def _keep_model(self, order: _Order, local: Local, done: Done, value: float | None) -> None:
        """Store the client's own model, which `bayesfl.load_client` reads; at its means where its covariance would take too much."""
        view, train = tree_map(lambda t: t[0].clone(), done.views), dict(zip("xy", local.train.client(self.id), strict=True))
        about: dict[str, Any] = {"name": self.name, "client": self.id, "data": self.data, "round": order.round}
        made = of_client(self.algorithm, done.given, view, train, seed=order.seed, value=value, **about)
        folder = self._states(order.experiment).folder
        try:
            made.save(folder)
        except ValueError as error:
            log.warning("the model of this client is stored at the means of its beliefs alone: %s", error)
            made.save(folder, plug_in=True)

    @property
    def name(self) -> str:
        """Return the client's name, as its data have it."""
        return self.data.client_names[0]

    @property
    def _names(self) -> tuple[str, ...]:
        """Return names for messages, of which this client's alone is known."""
        return ("",) * self.id + (self.name,)

    @property
    def _ids(self) -> np.ndarray:
        return np.array([self.id])

    def _of_one(self, name: str, order: _Order) -> ClientData:
        return self.data.splits[name].to(self.device, order.dtype)

    def _split(self, name: str, order: _Order) -> ClientData:
        """Return a split in which this client has its own id, which selects its random draws, and all other clients have no examples."""
        split = self._of_one(name, order)
        return replace(split, counts=np.append(np.zeros(self.id, np.int64), split.counts))

    def clean(self, experiment: str) -> None:
        """Remove temporary files that a killed process of this client has left."""
        self._states(experiment).clean()

    def _states(self, experiment: str) -> States:
        return States(self.folder, experiment, self.id, self.name)

    def _local(self, order: _Order) -> Local:
        train = self._split("train", order)
        return Local(self.algorithm, self.engine, train, order.seed, order.rounds, order.tolerant, self._names)

    def _received(self, order: _Order) -> Received:
        """Return what the server sent, with the private state that it names, [1, ...]."""
        own = order.start
        if order.base and order.keeps:
            own = States(self.folder, order.kept_in, order.kept_as, self.name).read(order.base, now=order.experiment)
        return Received(order.common, order.addressed, tree_map(lambda t: t.to(self.device), own))
