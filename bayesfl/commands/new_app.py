"""A small Flower app that runs, to be changed into one's own."""

from pathlib import Path

from bayesfl.base.files import atomic_write

FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "federated"
version = "1.0.0"
description = "A personal, calibrated model for each node"
license = "MIT"
dependencies = ["bayesfl[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "us"

[tool.flwr.app.components]
serverapp = "federated.server:app"
clientapp = "federated.node:app"
""",
    "federated/__init__.py": '''\
"""A personal, calibrated model for each node."""
''',
    "federated/task.py": '''\
"""What server and nodes share: the method, and how a node finds its data."""

import torch

import bayesfl as bf

torch.set_num_threads(1)
CLIENTS = 2


def method() -> bf.Algorithm:
    """Return the method; server and nodes build the same."""
    model = bf.models.mlp(64, hidden=50, outputs=5, head_scale=1.0, seed=0)
    return bf.algorithms.pfedvem(model)


def data(client: int) -> bf.data.FederatedData:
    """Return one client's data. Read your own files here, as by `bf.data.from_arrays`."""
    return bf.data.concept_drift("digits", clients=CLIENTS, seed=0).select([client])
''',
    "federated/server.py": '''\
"""The server: how long to train, and where its checkpoints go."""

import logging

from bayesfl.flower import server_app

from federated.task import CLIENTS, method

logging.basicConfig(level=logging.INFO)  # each round is a line of the log
logging.getLogger("httpx").setLevel(logging.WARNING)  # and not each look for replies
app = server_app(method(), clients=CLIENTS, rounds=3, seed=0, checkpoint="checkpoints")
''',
    "federated/node.py": '''\
"""A node: its data, and the same method."""

from bayesfl.data import FederatedData
from bayesfl.flower import client_app
from flwr.app import Context

from federated.task import data, method


def load_data(context: Context) -> FederatedData:
    """Return this node's data; the client is in its configuration."""
    return data(int(context.node_config["client-id"]))


app = client_app(method(), load_data)
''',
    "README.md": """\
# A small federation

A federation of two nodes that learn from handwritten digits. `federated/task.py` has the method and
the data: put your own there.

On one machine, to try it, name the SuperLink in `~/.flwr/config.toml`:

```toml
[superlink.here]
address = "127.0.0.1:8000"
insecure = true
```

Then, in this folder, each in a terminal of its own:

```bash
flower-superlink --insecure --disable-runtime-dependency-installation
flower-supernode --insecure --superlink 127.0.0.1:8000 --port 8100 \\
  --node-config 'client-id=0 state-dir="node-0"'
flower-supernode --insecure --superlink 127.0.0.1:8000 --port 8101 \\
  --node-config 'client-id=1 state-dir="node-1"'
flwr run . here --stream
```

The three rounds take about a minute. Afterwards `node-0` and `node-1` hold each node's own model,
which needs neither the server nor the training data. In this folder:

```python
import bayesfl as bf
from federated.task import data, method

own = bf.load_client("node-0", method())
x, y = data(0).test.client(0)
print(own.predict(x[:5]).probs, y[:5])
```

`bayesfl report checkpoints` writes a report of the run. A real network needs certificates and keys
of nodes.
""",
}
"""{path: text}"""


def new_app(folder: Path) -> None:
    """Write a Flower app that runs into a new folder, and print what to do next.

    Args:
        folder: The folder.

    Raises:
        ValueError: It holds something already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} holds something already; give a new folder")
    for path, text in FILES.items():
        atomic_write(folder / path, text)
    print(f"Made {folder}; {folder / 'README.md'} explains how to run it.")
