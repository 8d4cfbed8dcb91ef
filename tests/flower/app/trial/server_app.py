"""The server."""

import logging

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bayesfl.flower import serve
from trial.task import CLIENTS, SEED, method, steps

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every look for replies
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs what the configuration says."""
    config = context.run_config
    options = {name: config[name] for name in ("rounds", "timeout", "checkpoint")}
    name = str(config["method"])
    serve(
        grid,
        method(name),
        clients=CLIENTS,
        seed=SEED,
        dtype=torch.float64,
        calibration=steps(name),
        **options,
    )
