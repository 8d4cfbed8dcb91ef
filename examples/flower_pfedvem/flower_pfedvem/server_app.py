"""The server: which method, how long, and where its checkpoints go."""

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bayesfl.flower import serve
from flower_pfedvem.task import method

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every look for replies
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the federation; where there are checkpoints, it goes on from the newest."""
    config = context.run_config
    options = {
        name: config[name]
        for name in ("clients", "rounds", "seed", "timeout", "evaluate_every", "checkpoint")
    }
    serve(grid, method(), **options)
