"""The client's side of a federation over Flower: an algorithm's local work in answer to messages,
on data that stay with the client.
"""

import hmac
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from bayesfl.base.described import differences, digest_of
from bayesfl.base.options import declared
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.data.split import Change
from bayesfl.engine import Engine
from bayesfl.evaluation.calibration import Step
from bayesfl.evaluation.own_measures import Measure, check_measures
from bayesfl.federation.clients.surveying import check_servers_model, checked_steps
from bayesfl.federation.rounds.admission import PROTOCOL
from bayesfl.federation.settings import Method
from bayesfl.federation.store.files import described_steps
from bayesfl.federation.store.identity import agreement, method_differences
from bayesfl.flower import records
from bayesfl.flower.leaving import HELLO
from bayesfl.flower.node import Node, Refused
from bayesfl.flower.orders import Order
from bayesfl.flower.roster import NOT_SENT
from bayesfl.preflight import check


@declared
def client_app(
    algorithm: Method,
    load_data: Callable[[Context], FederatedData],
    *,
    state_dir: str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
    device: torch.device | str = "cpu",
    share_measures: bool = False,
    measures: Annotated[Mapping[str, Measure], check_measures] = {},
    calibration: Sequence[Step] = (),
) -> ClientApp:
    """Make a Flower ClientApp that does an algorithm's local work.

    A node's configuration says which client it is, as in

        flower-supernode --node-config 'client-id=0 state-dir="/var/lib/bayesfl"'

    With `shared-secret="..."` there, the same on all nodes and unknown to the server, it sends
    digests of the functions of inputs and of the columns, keyed by that, so that the server sees
    where nodes' differ; without it none is sent.

    Args:
        algorithm: The method, with the same options as the server's.
        load_data: Function from the context to the data of this one client, whose splits must be
            the same each time.
        state_dir: Folder in which the client keeps its private state, one small file for each
            round, and at the end its own model, which `bayesfl.load_client(state_dir, algorithm)`
            reads, and the predictions on its test data; None for the node's `state-dir`. Only this
            client should be able to read it.
        engine: How the client computes; it changes only speed and rounding. None for `Engine()`.
        device: The device that computes.
        share_measures: Whether the server may keep this client's measures as such; otherwise it
            keeps their means over clients alone. The node's `share-measures=true` says the same.
        measures: {name: function} of measures beside the library's own, as of `simulate`; they are
            sent to the server.
        calibration: The steps of calibration that the server fits after training, with the same
            options as there; the client predicts with its own parameters, which stay in its folder.

    Raises:
        TypeError: `algorithm` is no `Algorithm`, `share_measures` no truth value, a measure no
            function, or a step of calibration none.
        ValueError: The name of a measure is not of small letters, digits and underscores, a step of
            calibration is none of bayesfl's, or it needs a server's model, which the method has
            not.

    Warns:
        UserWarning: Sets are made on a split to which another step is fitted.

    Example:
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> def load_data(context):  # a real one reads the client's own files
        ...     return bf.data.iid("digits", clients=4).select([context.node_config["client-id"]])
        >>> app = bf.flower.client_app(method, load_data)  # in client_app.py
    """
    steps = checked_steps(calibration)
    described_steps(steps)
    check_servers_model(steps, algorithm)
    app, engine, agreed = ClientApp(), engine or Engine(), agreement(algorithm, steps)

    def here(message: Message, context: Context) -> Node:
        _same_code(message, algorithm, agreed)
        return Node.of(
            context,
            load_data,
            state_dir,
            algorithm,
            engine,
            torch.device(device),
            share_measures,
            measures,
            steps,
        )

    def answered(
        message: Message, context: Context, work: Callable[[Node, Order], RecordDict]
    ) -> Message:
        client = here(message, context)
        return Message(work(client, client.order(message)), reply_to=message)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        client = here(message, context)
        check(algorithm, client.data)
        client.states(records.setting(message.content, "experiment", str)).clean()
        train, made = client.data.train, client.data.prepared
        found: dict[str, Any] = {
            "protocol": PROTOCOL,
            "client": client.id,
            "name": client.name,
            "n": client.examples("train"),
            "task": client.data.task,
            "outputs": client.data.outputs,
            "splits": [s for s in client.data.splits if client.examples(s)],
        }
        # Keyed, as who guesses the client's numbers could try them on a plain digest.
        secret = str(context.node_config.get("shared-secret", ""))
        for kind, text in (
            ("transform", _described(train.transform)),
            ("augment", _described(train.augment)),
            ("columns", "" if made is None else made.to_json()),
        ):
            keyed = hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()
            found[kind] = "" if not text else keyed if secret else NOT_SENT
        assert found.keys() == HELLO.keys()
        return Message(RecordDict({"config": ConfigRecord(found)}), reply_to=message)

    for registered, work in (
        (app.train(), Node.train),
        (app.train("adapt"), Node.adapt),
        (app.evaluate("survey"), Node.survey),
        (app.evaluate(), Node.evaluate),
    ):
        registered(partial(answered, work=work))
    return app


def _described(change: Change | None) -> str:
    return "" if change is None else digest_of(change)


def _same_code(message: Message, algorithm: Algorithm, agreed: dict[str, Any]) -> None:
    """Check that the server uses the same protocol, and runs the same method and calibration.

    Raises:
        RecordError: The protocol differs.
        Refused: The method or the calibration differs.
    """
    records.same_protocol(message.content)
    if records.setting(message.content, "algorithm", str) != digest_of(agreed):
        theirs = json.loads(str(records.config(message.content).get("agreement", "{}")))
        apart: dict[str, tuple[Any, Any]] = {}
        if theirs:
            both = (theirs["calibration"], agreed["calibration"])
            apart = method_differences(theirs, algorithm)
            apart |= differences(*both, "calibration", absent="its default")
        said = [f"{at} is {here} here and {there} there" for at, (there, here) in apart.items()]
        raise Refused(
            "the server runs another method or calibration, or one with other options"
            + "".join(f"; {one}" for one in said[:3])
            + ": ship the same app to both"
        )
