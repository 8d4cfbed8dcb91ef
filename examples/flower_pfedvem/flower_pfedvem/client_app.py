"""The client: its data, and the same method."""

from flwr.app import Context

from bayesfl.data import FederatedData
from bayesfl.flower import client_app
from flower_pfedvem.task import client_data, method


def load_data(context: Context) -> FederatedData:
    """This node's data."""
    return client_data(int(context.node_config["client-id"]), int(context.run_config["clients"]))


app = client_app(method(), load_data)
