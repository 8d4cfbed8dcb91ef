"""One client on its node: local work, predictions, and the files in its folder."""

import hmac
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MetricRecord, RecordDict
from torch.utils._pytree import tree_map

from bayesfl.base.described import digest_of
from bayesfl.base.inputs import words
from bayesfl.base.protocols import Tensors, View
from bayesfl.base.random import Stage, hashed, mixed
from bayesfl.base.surveys import answers
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.engine import Engine
from bayesfl.evaluation.calibration import Fitted, Step, applied
from bayesfl.evaluation.calibration.steps import any_draws
from bayesfl.evaluation.history import CALIBRATED, PREFIXES
from bayesfl.evaluation.own_measures import Measure, means, measured
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.clients import surveying
from bayesfl.federation.clients.after import last_layers, next_question
from bayesfl.federation.clients.asking import LocalRows
from bayesfl.federation.clients.client_model import client_model
from bayesfl.federation.clients.local import Done, Local, Received, kept_phases
from bayesfl.federation.clients.predict import of_chunk
from bayesfl.federation.clients.tuning import candidates
from bayesfl.federation.errors import called
from bayesfl.federation.store.identity import reading
from bayesfl.flower import records
from bayesfl.flower.leaving import HELLO
from bayesfl.flower.orders import Order
from bayesfl.flower.post import Refused
from bayesfl.flower.roster import NOT_SENT
from bayesfl.flower.states import States
from bayesfl.posteriors.heads import LocalHeads, Rows
from bayesfl.preflight import check

log = logging.getLogger(__name__)


def ordered(work: Callable[["Node", Order], RecordDict]) -> Callable[["Node", Message], RecordDict]:
    """Return a function that answers a message with a request of the server."""
    return lambda node, message: work(node, node.order(message))


@dataclass(frozen=True)
class Node:
    """Represent one client on its node.

    Args:
        id: The client's id, from 0.
        algorithm: The method.
        data: The data of this one client.
        folder: The folder of its states.
        engine: How it computes.
        device: The device that computes.
        shares: Whether the server may store its measures individually.
        measures: Further measures in addition to the library's.
        calibration: Steps of calibration, the same as on the server.
        secret: Key of the digests of functions of inputs and of columns that it sends; without a
            key it sends none.
    """

    id: int
    algorithm: Algorithm
    data: FederatedData
    folder: str | os.PathLike[str]
    engine: Engine
    device: torch.device
    shares: bool
    measures: Mapping[str, Measure]
    calibration: tuple[Step, ...]
    secret: str

    def examples(self, split: str) -> int:
        """Return the number of examples in a split, 0 if there is no such split."""
        return int(self.data.splits[split].counts.sum()) if split in self.data.splits else 0

    def order(self, message: Message) -> Order:
        """Return the server's request to this client.

        Raises:
            Refused: The request is for another client: this node was restarted with another id.
        """
        order = Order.of(message, self.device)
        if order.client != self.id:
            raise Refused(
                f"the server sent a request for client {order.client}, but this node is now "
                f"{called(self.id, self._names)}; start each node with its earlier client-id, "
                "or start a new experiment"
            )
        return order

    def hello(self, message: Message) -> RecordDict:
        """Return this client's first message."""
        check(self.algorithm, self.data)
        self.states(records.setting(message.content, "experiment", str)).clean()
        train, made = self.data.train, self.data.prepared
        found: dict[str, Any] = {
            "client": self.id,
            "name": self.name,
            "n": self.examples("train"),
            "task": self.data.task,
            "outputs": self.data.outputs,
            "splits": [s for s in self.data.splits if self.examples(s)],
        }
        for kind, text in (
            ("transform", "" if train.transform is None else digest_of(train.transform)),
            ("augment", "" if train.augment is None else digest_of(train.augment)),
            ("columns", "" if made is None else made.to_json()),
        ):
            keyed = hmac.new(self.secret.encode(), text.encode(), "sha256").hexdigest()
            found[kind] = "" if not text else keyed if self.secret else NOT_SENT
        assert {"protocol", *found} == HELLO.keys()
        return records.message({}, **found)

    def train(self, order: Order) -> RecordDict:
        """Do a round's local work, and return the reply; the new state is on disk before the reply
        is sent.
        """
        phases = None if order.sends else kept_phases(self.algorithm)
        done = self._worked(order, Stage.TRAIN, order.round + 1, phases)
        views = done.views
        if order.keeps:
            self.states(order.experiment).forget(
                order.round, named=order.named, sessions=order.sessions
            )
        metrics = MetricRecord()
        if order.sends and "nll" in done.info:
            metrics["train_nll"] = float(done.info["nll"].double().mean())
        config: dict[str, Any] = {"round": order.round}
        out: dict[str, Any] = {"metrics": metrics}
        if order.sends:
            sent = tree_map(
                lambda t: t[0], {**self.algorithm.sent(views), **self.algorithm.reported(views)}
            )
            out["up"], config["digest"] = records.pack(sent)
        return records.message(out, **config)

    def adapt(self, order: Order) -> RecordDict:
        """Run the adaptation of a client that joins after training, and write its state to disk."""
        self._worked(order, Stage.ADAPT, order.round)
        self.states(order.experiment).forget_kept()
        return records.message({}, round=order.round)

    def _worked(self, order: Order, stage: Stage, made: int, phases: int | None = None) -> Done:
        """Run the phases of a stage, and write the state after `made` rounds, if the method's
        clients keep one.
        """
        local, received = self._local(order), self._received(order)
        with self.engine.crew(self.device) as crew:
            (done,) = crew.over(
                [received],
                lambda got: local.run(stage, self._ids, got, order.round, phases=phases),
            )
        if order.keeps:
            own = {key: done.views[key] for key in received.rows}
            self.states(order.experiment).write(made, order.sessions[-1], own)
        return done

    def survey(self, order: Order) -> RecordDict:
        """Answer a question of a survey with sums over this client's rows; zeros if it has none."""
        survey = self._surveying(order)
        state = order.survey_states.get(order.survey, {})
        shapes = survey.shapes(state)
        if not self.examples(survey.split):
            found: Tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        else:
            local = self._known(order, survey.split, getattr(survey, "reads", "rows"))
            found = {name: t[0] for name, t in answers(survey, state, local, shapes).items()}
        return records.of_answer(found)

    def _known(self, order: Order, split: str, reads: str) -> Any:
        """Return this client's data for a survey: rows, losses of candidates, its last layer, or
        predictions.
        """
        if order.survey.isdecimal():
            return applied(self._steps(order, int(order.survey)), self._predicted(order, split))
        if reads == "candidates":
            about: Any = {"round": order.round, "known": order.told}
            return candidates(*self._finetuned(order), self._split(split, order), **about)
        if reads == "head":
            rows = self._of_head(order, "validation") if self.examples("validation") else None
            return LocalHeads([rows], [self._of_head(order, "train")], self._ids)
        if reads == "predictions":
            return self._predicted(order, split)
        return LocalRows(self._of_one(split, order), self._ids)

    def _surveying(self, order: Order) -> Any:
        """Return the survey that a request names.

        Raises:
            Refused: There is no survey of that name.
        """
        name = order.survey
        if name.isdecimal() and int(name) < len(self.calibration):
            return self.calibration[int(name)]
        # Questions that are sent without the model do not depend on it.
        server = order.common if order.whole else self.algorithm.init(1)
        asks = next_question(self.algorithm, server, order.told)
        if asks is not None and asks[0] == name:
            return asks[1]
        raise Refused(
            f"the server asks for survey {name!r}, which this client does not have; use the same "
            "app on both"
        )

    def _finetuned(self, order: Order) -> tuple[Local, Done]:
        """Return this client's local work, and its outcome after fine-tuning, which is computed
        once and stored in its folder.
        """
        local, received = self._local(order), self._received(order)

        def views() -> View:
            return local.finetuned(self._ids, received, order.round).views

        made_by = self._made_by(order, "common", "own")
        found = self._kept(order, "views", made_by, views) if self.algorithm.finetune else views()
        found = tree_map(lambda t: t.to(self.device), found)
        given = self.algorithm.given(received.common, order.round, order.rounds)
        return local, Done(self._ids, given, found, {}, {}, 0, np.zeros(1, bool))

    def _kept(
        self, order: Order, name: str, made_by: Mapping[str, Any], make: Callable[[], Any]
    ) -> Any:
        """Return an object that this client computes once and stores in its folder.

        Raises:
            Refused: The file is missing, and the request has no model to compute it again.
        """
        states = self.states(order.experiment)
        if (found := states.kept(name, made_by)) is None:
            if not order.whole:
                raise Refused(f"this client's {name!r} for surveys is no longer in its folder")
            found = make()
            states.keep(f"survey-{name}", {"made_by": made_by, "predictions": found})
        return found

    def _made_by(self, order: Order, *parts: str) -> dict[str, Any]:
        """Identify stored objects: digests of these parts of the message, the client's state at the
        start, and the run.
        """
        return {
            "model": [order.model[part] for part in parts],
            "state": [order.kept_in, order.base],
            "run": [order.round, order.seed, str(order.dtype), order.tolerant],
        }

    def _of_head(self, order: Order, split: str) -> Rows:
        """Return this client's statistics of a split about its last layer, stored as in `_kept`."""
        rows = int(np.bitwise_xor.reduce(mixed(self._hashed(split, order))))
        made_by = self._made_by(order, "common", "own") | {"head": rows}

        def make() -> dict[str, Any]:
            return vars(*last_layers(*self._finetuned(order), self._split(split, order)))

        return Rows(**self._kept(order, split, made_by, make))

    def _steps(self, order: Order, steps: int) -> tuple[Fitted, ...]:
        """Return the first steps of calibration from their surveys' states, with this client's own
        parameters.
        """
        fitted = [
            Fitted(step, order.survey_states.get(str(place), {}), {}, reading(self.algorithm))
            for place, step in enumerate(self.calibration[:steps])
        ]
        return surveying.settled(
            fitted, {one.step.split: self._predicted(order, one.step.split) for one in fitted}
        )

    def _predicted(self, order: Order, split: str) -> LocalPredictions:
        """Return this client's predictions on a split, stored as in `_kept`."""
        if not self.examples(split):
            smallest = min(
                (name for name in self.data.splits if self.examples(name)), key=self.examples
            )
            return surveying.without_rows(self._predicted(order, smallest))
        labels, rows = self._of_one(split, order).client(0)[1].cpu(), self._hashed(split, order)
        made_by = {
            **self._made_by(order, "common", "own", "told"),
            "rows": [int(np.bitwise_xor.reduce(mixed(rows))), records.pack({"labels": labels})[1]],
        }

        def make() -> dict[str, Any]:
            about: Any = {"round": order.round, "draws": None, "known": order.told}
            [[(_, own)]] = of_chunk(*self._finetuned(order), [self._split(split, order)], **about)
            return {name: t[0].cpu() for name, t in own.items()}

        found = self._kept(order, split, made_by, make)
        return LocalPredictions.of_one(
            self.id,
            found,
            {"labels": labels, "likelihood": self.algorithm.likelihood},
            seed=order.seed,
            round=order.round,
            rows=rows if any_draws(self.calibration) else None,
        )

    def _hashed(self, split: str, order: Order) -> np.ndarray:
        """Return a hash of the inputs of every row of a split, [n] uint64."""
        return hashed(words(self._of_one(split, order).client(0)[0]))

    def evaluate(self, order: Order) -> RecordDict:
        """Store the client's own model and its predictions on test data in its folder; the reply
        has only the measures.
        """
        local, done = self._finetuned(order)
        try:
            steps = self._steps(order, len(self.calibration) if order.calibrated else 0)
        except ValueError as error:  # the model and its measures are useful without calibration
            log.error("this client predicts without calibration: %s", error)
            steps = ()
        self._keep_model(order, local, done, steps)
        reply: dict[str, Any] = {}
        for name in filter(self.examples, PREFIXES):
            predicted = self._predicted(order, name)
            reply[name] = MetricRecord(dict(self._measures(predicted)))
            if name == "test":
                if steps:
                    predicted = applied(steps, predicted)
                    reply[CALIBRATED] = MetricRecord(dict(self._measures(predicted)))
                tensors = predicted.predictions.tensors
                kept = {key: t for key, t in tensors.items() if key not in ("mask", "labels")}
                self.states(order.experiment).keep(
                    "predictions", {"round": order.round, "predictions": kept}
                )
        if order.calibrated or not self.calibration:  # the last request about this state
            self.states(order.experiment).forget_kept()
        return records.message(reply, share=self.shares)

    def _measures(self, predicted: LocalPredictions) -> dict[str, float]:
        """Return the library's measures of the predictions, and the client's own."""
        summary = predicted.measured().summary()
        known = {name: summary[name] for name in records.MEASURES if name in summary}
        try:
            known |= means(measured(self.measures, predicted, summary))
        except Exception:  # in a user's function; the library's measures are sent nevertheless
            log.exception("the client's own measures are left out")
        return {
            name: value
            for name, value in known.items()
            if value in records.MEASURES.get(name, records.ANY)
        }

    def _keep_model(
        self, order: Order, local: Local, done: Done, steps: tuple[Fitted, ...]
    ) -> None:
        """Store the client's own model for `bayesfl.load_client`; only its means if its covariance
        is too large.
        """
        view = tree_map(lambda t: t[0].clone(), done.views)
        made = client_model(
            self.algorithm,
            done.given,
            view,
            local.own_rows(self.id),
            seed=order.seed,
            known=order.told,
            name=self.name,
            client=self.id,
            data=self.data,
            round=order.round,
            steps=steps,
        )
        folder = self.states(order.experiment).folder
        try:
            made.save(folder)
        except (MemoryError, ValueError) as error:
            log.warning("only the means of this client's model are stored: %s", error)
            if steps:
                log.warning(
                    "it is stored without its calibration, which was fitted to its full predictions"
                )
            replace(made, steps=()).save(folder, plug_in=True)

    @property
    def name(self) -> str:
        """Return the client's name from its data."""
        return self.data.client_names[0]

    @property
    def _names(self) -> tuple[str, ...]:
        """Return names for messages; only this client's is known."""
        return ("",) * self.id + (self.name,)

    @property
    def _ids(self) -> np.ndarray:
        return np.array([self.id])

    def _of_one(self, name: str, order: Order) -> ClientData:
        return self.data.splits[name].to(self.device, order.dtype)

    def _split(self, name: str, order: Order) -> ClientData:
        """Return a split in which this client has its own id, which selects its random draws, and
        all other clients have no examples.
        """
        split = self._of_one(name, order)
        return replace(split, counts=np.append(np.zeros(self.id, np.int64), split.counts))

    def states(self, experiment: str) -> States:
        """Return this client's files in an experiment."""
        return States(self.folder, experiment, self.id, self.name)

    def _local(self, order: Order) -> Local:
        return Local(
            self.algorithm,
            self.engine,
            self._split("train", order),
            order.seed,
            order.rounds,
            order.tolerant,
            self._names,
            self._split("validation", order) if self.examples("validation") else None,
        )

    def _received(self, order: Order) -> Received:
        """Return the state that the server sent, with the private state that it names, [1, ...]."""
        own = order.start
        if order.base and order.keeps:
            own = States(self.folder, order.kept_in, order.kept_as, self.name).read(
                order.base, now=order.experiment
            )
        return Received(order.common, order.addressed, tree_map(lambda t: t.to(self.device), own))
