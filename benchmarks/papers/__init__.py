"""Tables of papers, each as data: what runs, how it is measured, and what the paper printed.

A file of this folder is a paper. Its `parts(size)` returns the federations of its tables by name,
`PUBLISHED` is what the paper printed, and where. `python -m benchmarks.papers NAME` runs them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Temperature, fit
from bayesfl.evaluation.metrics import classification_summary
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.run.result import Result
from bayesfl.study.grid import Grid, Make
from bayesfl.study.table import Row

Size = Literal["quick", "reduced", "full"]
"""Toy size, the size of the committed results, the paper's size."""
QUALITY = ("accuracy", "nll", "ece", "brier")
DRAWS = 20


def quality(result: Result, draws: int | None = None) -> dict[str, float]:
    """Return the quality of predictions of test data, mean over clients, and that after one
    temperature for all clients, fitted to their validation data.
    """
    data, outputs = result.data, Outputs(result.data.task, result.data.outputs)
    seen, test = result.local_predictions(data.validation, data.test, draws=draws)
    warm = fit(Temperature(strength=math.inf), seen, outputs).apply(test)
    row = {}
    for suffix, one in (("", test), ("_tempered", warm)):
        found = classification_summary(one.padded().probs, *data.test.padded_labels())
        row |= {f"{key}{suffix}": found[key] for key in QUALITY}
    del row["accuracy_tempered"]  # as the order of classes stays
    return row


def spent(run: Row, result: Result) -> dict[str, float]:
    """Return what a run cost: passes of a client over its data, bytes of a client up and down, all
    over the whole run, and seconds of training.
    """
    cohorts = float(result.history["cohort"].sum())
    trained = len(result.history) * result.data.clients
    turns = (trained if result.settings.train == "all" else cohorts) / result.data.clients
    found = {"passes": run.record.budget["epochs"] * turns}
    for key in ("bytes_up", "bytes_down"):
        found[key] = float(result.history[key].sum()) / result.data.clients
    return found | {"seconds": float(result.history["seconds"].sum())}


def measured(run: Row, result: Result) -> dict[str, Any]:
    """Return the rows of a run: its predictions, for pFedVEM at its mean and by draws."""
    cost = spent(run, result)
    if not run.method.startswith("pFedVEM"):
        return {"rows": {run.method: quality(result) | cost}}
    rows = {f"{run.method}, mean": 0, f"{run.method}, {DRAWS} draws": DRAWS}
    return {"rows": {title: quality(result, draws) | cost for title, draws in rows.items()}}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One federation of a paper, and the methods that run on it.

    Args:
        data: (seed=) -> the clients' data, with validation data where options are chosen.
        model: (clients, seed=) -> the network, the same start for every method.
        methods: {title: (model, options of the grid) -> algorithm}.
        rounds: Number of rounds.
        seconds: Roughly what a run takes on one core, for the hours that are announced.
        seeds: Seeds of data, start and training; options are chosen with the first.
        grid: {title, or `*` for all: {option: its values, which are numbers}}, of which one choice
            is made by validation data.
        by: The measure by which.
        choice: Other data for this choice, (seed=) -> data; None for the same.
        settings: Further arguments of `bf.Study`.
        own: Those of single methods, {title: arguments}.
        measure: (run, its result) -> what the results hold of it.
    """

    data: Callable[..., FederatedData]
    model: Callable[..., nn.Module]
    methods: Mapping[str, Make]
    rounds: int
    seconds: float
    seeds: Sequence[int] = (0, 1, 2)
    grid: Mapping[str, Grid] = field(default_factory=dict)
    by: str = "validation_accuracy"
    choice: Callable[..., FederatedData] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measure: Callable[[Row, Result], dict[str, Any]] = measured
