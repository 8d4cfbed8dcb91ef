"""The client, which fails once where it is told to: `fail="sleep 1 2"` is client 1 in round 2."""

import os
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from bayesfl.data import FederatedData
from bayesfl.flower import client_app
from trial.task import federation, method, steps

app = ClientApp()


def load_data(context: Context) -> FederatedData:
    """This node's data."""
    return federation().select([int(context.node_config["client-id"])])


def misbehave(message: Message, context: Context) -> None:
    """Sleeps or raises in the middle of a round, the first time only."""
    config = context.run_config
    if not config["fail"]:
        return
    how, client, round = str(config["fail"]).split()
    if int(client) != context.node_config["client-id"] or message.content["config"]["round"] != int(
        round
    ):
        return
    mark = Path(str(config["marks"])) / f"{how}-{client}-{round}"
    if mark.exists():
        return
    mark.write_text(str(os.getpid()))
    if how == "raise":
        raise RuntimeError("the client has no memory left")
    time.sleep(600.0)


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Who it is."""
    name = str(context.run_config["method"])
    return client_app(method(name), load_data, calibration=steps(name))(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round."""
    misbehave(message, context)
    return hello(message, context)


@app.query("survey")
def survey(message: Message, context: Context) -> Message:
    """Questions about its rows and predictions."""
    return hello(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The end."""
    return hello(message, context)
