"""The client's side of a federation over Flower: an algorithm's local work in response to messages,
on data that stay with the client.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from bayesfl.base.described import differences, digest_of
from bayesfl.base.options import declared, instance
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.engine import Engine
from bayesfl.evaluation.calibration import Step
from bayesfl.evaluation.own_measures import Measure, check_measures
from bayesfl.federation.clients.surveying import checked_steps
from bayesfl.federation.settings import FEDERATION, Method
from bayesfl.federation.store.files import described_steps
from bayesfl.federation.store.identity import agreement, method_differences
from bayesfl.flower import records
from bayesfl.flower.node import Node, ordered
from bayesfl.flower.post import Refused, app_of


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

    A node's configuration sets the client's id, as in

        flower-supernode --node-config 'client-id=0 state-dir="/var/lib/bayesfl"'

    Add `shared-secret="..."`, the same on all nodes and unknown to the server, to send digests of
    the functions of inputs and of the columns, keyed with the secret, so that the server detects
    differences between nodes; without it no digest is sent.

    Args:
        algorithm: The method, with the same options as on the server.
        load_data: Function from the context to the data of this one client; its splits must be the
            same each time.
        state_dir: Folder for the client's private state, one small file for each round, and finally
            for its own model, which `bayesfl.load_client(state_dir, algorithm)` reads, and its
            predictions on test data; None for the node's `state-dir`. Only this client should be
            able to read the folder.
        engine: How the client computes; it changes only speed and rounding. None for `Engine()`.
        device: The device that computes.
        share_measures: Whether the server may store this client's measures individually; otherwise
            it stores only their means over clients. The node's `share-measures=true` has the same
            effect.
        measures: {name: function} of further measures, as in `simulate`; they are sent to the
            server.
        calibration: The steps of calibration that the server fits after training, with the same
            options as on the server; the client predicts with its own parameters, which stay in its
            folder.

    Raises:
        TypeError: `algorithm` is not an `Algorithm`, `share_measures` is not a bool, a measure is
            not a function, or a step of calibration is not a step.
        ValueError: The name of a measure does not consist of small letters, digits and underscores;
            a step of calibration is not from bayesfl, or needs a server's model, which the method
            does not have.

    Warns:
        UserWarning: Sets are made on the split of another step.

    Example:
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> def load_data(context):  # a real one reads the client's own files
        ...     return bf.data.iid("digits", clients=4).select([context.node_config["client-id"]])
        >>> app = bf.flower.client_app(method, load_data)  # in client_app.py
    """
    steps = checked_steps(calibration)
    described_steps(steps)
    agreed = agreement(algorithm, steps)
    own = engine or Engine(), torch.device(device)

    @contextmanager
    def here(message: Message, context: Context) -> Iterator[Node]:
        _same_code(message, algorithm, agreed)
        node = context.node_config
        shares = share_measures or node.get("share-measures") is True
        id, folder, data = _configured(context, load_data, state_dir)
        # Digests are keyed, because a plain digest can be compared with guesses of a client's data.
        secret = str(node.get("shared-secret", ""))
        yield Node(id, algorithm, data, folder, *own, shares, measures, steps, secret)

    return app_of(
        here,
        {
            "query": Node.hello,
            "query.survey": ordered(Node.survey),
            "train": ordered(Node.train),
            "train.adapt": ordered(Node.adapt),
            "evaluate": ordered(Node.evaluate),
        },
    )


def _configured(
    context: Context,
    load_data: Callable[[Context], FederatedData],
    state_dir: str | os.PathLike[str] | None,
) -> tuple[int, str | os.PathLike[str], FederatedData]:
    """Return the client's id, the folder of its states, and its data from a node's configuration.

    Raises:
        Refused: The configuration has no valid `client-id` or no folder for states, or the data
            are not those of one client.
        TypeError: `load_data` does not return a `FederatedData`.
    """
    id = context.node_config.get("client-id")
    if type(id) is not int or id < 0:
        raise Refused(
            "this node's configuration names no client: client-id must be a whole number >= "
            f"0, got {id!r}; start it with --node-config 'client-id=0'"
        )
    folder = context.node_config.get("state-dir") if state_dir is None else state_dir
    if not isinstance(folder, str | os.PathLike):
        raise Refused(
            "the client has no folder for its state: pass state_dir to client_app, or set "
            "state-dir in the node's --node-config"
        )
    data = load_data(context)
    instance("the result of load_data", data, FederatedData, FEDERATION)
    if data.clients != 1:
        raise Refused(
            f"load_data must return the data of one client, got {data.clients}; "
            f"data.select([{id}]) selects one of several"
        )
    return id, folder, data


def _same_code(message: Message, algorithm: Algorithm, agreed: dict[str, Any]) -> None:
    """Check that the server runs the same method and calibration.

    Raises:
        Refused: They differ.
    """
    if records.setting(message.content, "algorithm", str) != digest_of(agreed):
        theirs = json.loads(str(records.config(message.content).get("agreement", "{}")))
        apart: dict[str, tuple[Any, Any]] = {}
        if theirs:
            apart = method_differences(theirs, algorithm) | differences(
                theirs["calibration"], agreed["calibration"], "calibration", absent="its default"
            )
        said = [f"{at} is {here} here and {there} there" for at, (there, here) in apart.items()]
        raise Refused(
            "the server runs another method or calibration, or one with other options"
            + "".join(f"; {one}" for one in said[:3])
            + ": use the same app on both"
        )
