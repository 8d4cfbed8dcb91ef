"""What diagrams of a study contain, without looking at them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from tests.cases import run

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def results(model: nn.Module, clients: FederatedData) -> dict[str, Any]:
    makes = {"FedAvg": bf.algorithms.fedavg, "Ditto": bf.algorithms.ditto}
    return {
        name: [
            run(make(model, epochs=1), clients, seed=seed, evaluate_every=1) for seed in range(2)
        ]
        for name, make in makes.items()
    }


def test_every_method_has_its_mean_and_its_seeds(results: dict[str, Any]):
    table = bf.table(results)
    ax = bf.plots.study(table, metric="personal_nll", title="t").axes[0]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["FedAvg", "Ditto"]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    for line, runs in zip(dots, results.values(), strict=True):
        np.testing.assert_array_equal(
            line.get_xdata(), [one.history["personal_nll"][-1] for one in runs]
        )
    means = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    assert means == [table.summary()[name]["personal_nll"].mean for name in results]
    assert ax.get_xlabel() == "personal NLL"
    assert bf.plots.study(table).axes[0].get_xlabel() == "personal accuracy"
    ax.figure.canvas.draw()


def test_two_methods_client_by_client(results: dict[str, Any]):
    """Each client of each seed is a dot at its two losses; the title counts."""
    ax = bf.plots.paired(bf.table(results), "FedAvg", "Ditto", metric="nll").axes[0]
    wanted = np.array([[run.table()["nll"] for run in runs] for runs in results.values()]).reshape(
        2, -1
    )
    with pytest.raises(ValueError, match="last round only"):
        bf.plots.paired(replace(bf.table(results), at="best"), "FedAvg", "Ditto")
    (dots,) = ax.collections
    np.testing.assert_allclose(np.asarray(dots.get_offsets()).T, wanted)
    better = int((wanted[1] < wanted[0]).sum())
    assert ax.get_title() == f"Ditto better: {better} of 14"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("NLL, FedAvg", "NLL, Ditto")
    ax.figure.canvas.draw()
