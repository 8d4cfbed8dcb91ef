"""A hospital's side: its file, and which of its columns are the design and the outcome."""

from collections.abc import Mapping

import pandas as pd
import torch
from flwr.app import Context

import bayesfl as bf
from bayesfl.flower import site_app
from bayesfl.stats import Policy, Tables

torch.set_num_threads(1)  # torch's own threads stall beside other busy processes


def tables(files: Mapping[str, str], policy: Policy | None = None) -> Tables:
    """Return the tables of {hospital: its CSV file}; on a node there is one."""
    return bf.stats.tables(
        {name: pd.read_csv(file) for name, file in files.items()},
        outcome="died",
        terms=["age", bf.stats.levels("stage", ["I", "II", "III"]), "treated"],
        also=["months"],
        missing="complete",
        policy=policy,
    )


def load_tables(context: Context) -> Tables:
    """Return this hospital's tables; its node's configuration says where they are."""
    config = context.node_config
    return tables({str(config["site"]): str(config["data-file"])})


app = site_app(load_tables)
