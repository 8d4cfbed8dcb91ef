"""The server: it waits for the hospitals and runs the analysis."""

import logging
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bayesfl.flower import analyse
from regressions.analysis import analysis

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every look for replies
torch.set_num_threads(1)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the analysis once; a hospital that is lost or refuses is named and stops it."""
    config = context.run_config
    analyse(
        grid,
        lambda sites: analysis(
            sites, Path(str(config["out"])), exact_times=bool(config["exact-times"])
        ),
        sites=str(config["sites"]).split(),
        timeout=float(str(config["timeout"])),
    )
