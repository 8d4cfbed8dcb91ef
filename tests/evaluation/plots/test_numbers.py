"""What a diagram of predicted numbers contains, without looking at it."""

import numpy as np
import pytest
import torch
from torch import Tensor

import bayesfl as bf
from bayesfl.evaluation import plots
from bayesfl.evaluation.metrics import coverage
from bayesfl.likelihoods import Poisson
from tests.cases import run

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three clients, one without examples, whose targets are normal around the means."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 300, 1, generator=generator).double()
    targets = mean + torch.randn(3, 300, 1, generator=generator).double()
    mask = torch.arange(300) < torch.tensor([[300], [0], [120]])
    return mean, torch.ones_like(mean), targets, mask


def lines(ax, gid: str) -> list:
    return [line for line in ax.lines if line.get_gid() == gid]


@pytest.mark.parametrize("own", [False, True])
def test_the_diagram_shows_coverage(own: bool):
    """The pooled share at each level, and a line for each client with examples."""
    mean, variance, targets, mask = case()
    given = Figure().subplots() if own else None
    ax = plots.interval_reliability((mean, variance, targets, mask), ax=given, title="here").axes[0]
    (pooled,) = lines(ax, "pooled")
    levels, shares = pooled.get_xydata().T
    flat = [t[mask][None] for t in (mean, variance, targets)]
    wanted = [float(coverage(*flat, torch.ones(1, 420).bool(), level)) for level in levels]
    np.testing.assert_allclose(shares, wanted)
    assert len(lines(ax, "client")) == 2
    (first, _) = lines(ax, "client")
    assert first.get_ydata()[3] == pytest.approx(
        float(coverage(mean, variance, targets, mask, float(levels[3]))[0])
    )
    assert (ax, ax.get_title()) == (given or ax, "here")
    ax.figure.canvas.draw()


def test_results_bring_their_distribution():
    """Of counts."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).numpy()
    y = np.random.default_rng(0).poisson(np.exp(x[:, 0])).astype(float)
    data = bf.data.from_arrays(x, y, client_ids=["Bern", "Chur"] * 30, task="regression")
    result = run(
        bf.algorithms.fedavg(bf.models.mlp(3, hidden=4, outputs=1), likelihood=Poisson()), data
    )
    ax = plots.interval_reliability(result).axes[0]
    found = result.predict()
    targets, mask = data.test.padded_labels()
    wanted = coverage(
        found.mean,
        found.variance,
        targets,
        mask,
        float(plots.numbers.LEVELS[9]),
        distribution="counts",
    )
    assert lines(ax, "client")[1].get_ydata()[9] == pytest.approx(float(wanted[1]))
