"""What the axes contain, without looking at them; headless, and without a trace in pyplot."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesfl.base.files import atomic_path
from bayesfl.evaluation.history import History
from bayesfl.evaluation.metrics import reliability_bins
from bayesfl.evaluation.report import mean_and_error

pytest.importorskip("matplotlib")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesfl.evaluation import detection, plots
from bayesfl.evaluation.calibration import conformal


def federation(clients: int = 14, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Random predictions of clients of different sizes; padded rows are NaN, and client 1 has no examples."""
    rng = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(clients, rows, 3, generator=rng)).softmax(-1)
    labels = torch.multinomial(probs.flatten(0, 1), 1, generator=rng).view(clients, rows)
    mask = torch.arange(rows) < torch.randint(10, rows, (clients, 1), generator=rng)
    mask[1] = False
    return probs.masked_fill(~mask[..., None], math.nan), labels, mask


def bars(ax: Axes, gid: str) -> list:
    return [patch for patch in ax.patches if patch.get_gid() == gid]


def beneath(ax: Axes) -> Axes:
    """The histogram that shares the diagram's x axis."""
    (histogram,) = [a for a in ax.figure.axes if a.get_label() == "histogram" and a.get_shared_x_axes().joined(a, ax)]
    return histogram


@pytest.fixture(autouse=True)
def _no_trace_in_pyplot():
    """No figure is registered with pyplot, and drawing switches no backend."""
    import matplotlib
    import matplotlib.pyplot as plt

    before = matplotlib.rcParams._get("backend")
    yield
    assert plt.get_fignums() == []
    assert matplotlib.rcParams._get("backend") == before


def test_matplotlib_is_imported_late():
    """Importing `bayesfl.plots` alone must not need it."""
    import subprocess

    code = (
        "import sys; from bayesfl.evaluation import plots, metrics, report; sys.exit('matplotlib' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


@pytest.mark.parametrize("own", [None, "subplot", "free"])
def test_diagram_shows_the_bins(own):
    """Bars are accuracies, gaps reach from accuracy to confidence, the histogram counts every example once."""
    case = federation()
    bins = reliability_bins(*case, bins=10)
    given = {None: lambda: None, "subplot": lambda: Figure().subplots(1, 2)[1], "free": lambda: Figure().add_axes((0.1, 0.1, 0.8, 0.8))}[
        own
    ]()
    ax = plots.reliability(*case, bins=10, ax=given, title="here")
    assert given is None or ax is given
    np.testing.assert_allclose([bar.get_height() for bar in bars(ax, "accuracy")], np.nan_to_num(bins.accuracy))
    np.testing.assert_allclose([bar.get_x() for bar in bars(ax, "accuracy")], bins.edges[:-1])
    counts = [bar.get_height() for bar in bars(beneath(ax), "count")]
    assert counts == bins.count.tolist()
    assert sum(counts) == case[2].sum()
    over, under = bars(ax, "overconfident"), bars(ax, "underconfident")
    assert len(over) + len(under) == (bins.count > 0).sum()
    above, below = (bins.confidence >= bins.accuracy), (bins.confidence < bins.accuracy)
    np.testing.assert_allclose([bar.get_y() for bar in over], bins.accuracy[above])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in over], bins.confidence[above])
    np.testing.assert_allclose([bar.get_y() for bar in under], bins.confidence[below])
    (diagonal,) = [line for line in ax.lines if line.get_gid() == "diagonal"]
    np.testing.assert_array_equal(diagonal.get_xydata(), [[0, 0], [1, 1]])
    (words,) = [text.get_text() for text in ax.texts]
    assert words.startswith(f"ECE {100 * bins.ece:.1f}%\nMCE {100 * bins.mce:.1f}%\nn = {bins.examples}")
    assert ax.get_title() == "here"
    legend = ax.get_legend() or ax.figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["accuracy", "overconfident", "underconfident"]
    ax.figure.canvas.draw()


def test_sources_are_equivalent():
    """Tensors, a tuple, a result, and one client's rows without a client axis or mask."""
    probs, labels, mask = federation()

    class Test:
        def padded_labels(self) -> tuple[Tensor, Tensor]:
            return labels, mask

    test = Test()
    result = SimpleNamespace(data=SimpleNamespace(test=test), predict=lambda data: SimpleNamespace(probs=probs if data is test else None))
    drawn = [plots.reliability(probs, labels, mask), plots.reliability((probs, labels, mask)), plots.reliability(result)]
    heights = [[bar.get_height() for bar in bars(ax, "accuracy")] for ax in drawn]
    assert heights[0] == heights[1] == heights[2]
    single = plots.reliability(probs[0][mask[0]], labels[0][mask[0]])
    chosen = plots.reliability(probs, labels, mask, clients=[0])
    assert [bar.get_height() for bar in bars(single, "accuracy")] == [bar.get_height() for bar in bars(chosen, "accuracy")]
    with pytest.raises(ValueError, match="brings its own"):
        plots.reliability(result, labels, mask)
    with pytest.raises(ValueError, match="need labels"):
        plots.reliability(probs)


def test_by_client():
    """One diagram a client: those asked for, or the first 12 that have examples."""
    case = federation()
    axes = plots.reliability(*case, by="client", title="all")
    assert [ax.get_title() for ax in axes] == [f"client {j}" for j in (0, *range(2, 13))]
    for j, ax in zip((0, *range(2, 13)), axes, strict=True):
        assert sum(bar.get_height() for bar in bars(beneath(ax), "count")) == case[2][j].sum()
    assert axes[0].figure.get_suptitle() == "all"
    few = plots.reliability(*case, by="client", clients=[5, 3, 1])
    assert [ax.get_title() for ax in few] == ["client 5", "client 3", "client 1"]
    assert few[2].texts[0].get_text() == "no examples"
    few[0].figure.canvas.draw()


def test_compare(tmp_path: Path):
    """One diagram a method with its histogram, all histograms on one scale; the figure can be saved atomically."""
    probs, labels, mask = federation()
    figure = plots.reliability_compare(
        {"a": (probs, labels, mask), "b": (probs[:3], labels[:3], mask[:3]), "c": (probs, labels, mask)}, columns=2
    )
    panels = [ax for ax in figure.axes if ax.get_label() != "histogram"]
    assert [ax.get_title() for ax in panels] == ["a", "b", "c"]
    assert len({beneath(ax).get_ylim() for ax in panels}) == 1
    with atomic_path(tmp_path / "compare.png") as temporary:
        figure.savefig(temporary)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def history(seed: int, rounds: int = 20, every: int = 5) -> dict[str, np.ndarray]:
    """Evaluated every few rounds, NaN between."""
    at = np.arange(1, rounds + 1)
    values = np.random.default_rng(seed).random(rounds)
    return {"round": at, "personal_accuracy": np.where(at % every == 0, values, math.nan), "loss": values}


def test_learning_curves():
    """A line without the rounds that were not evaluated; several seeds give their mean and a band of one standard error."""
    seeds = [history(s) for s in range(3)]
    ax: Any = plots.learning_curves({"one": seeds[0], "three": seeds, "result": SimpleNamespace(history=seeds[1])})
    one, three, result = ax.lines
    assert one.get_xdata().tolist() == [5, 10, 15, 20]
    np.testing.assert_allclose(one.get_ydata(), seeds[0]["personal_accuracy"][4::5])
    np.testing.assert_allclose(result.get_ydata(), seeds[1]["personal_accuracy"][4::5])
    values = np.array([seed["personal_accuracy"][4::5] for seed in seeds])
    np.testing.assert_allclose(three.get_ydata(), values.mean(0))
    (band,) = ax.collections
    mean, error = mean_and_error(values[:, 0])
    edge = [y for x, y in band.get_paths()[0].vertices if x == 5]
    assert (min(edge), max(edge)) == (pytest.approx(mean - error), pytest.approx(mean + error))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "three", "result"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("round", "personal accuracy")
    assert ax.yaxis.get_major_formatter()(0.5).endswith("%")
    short: Any = plots.learning_curves({"two rounds": history(0, rounds=2, every=1)})
    assert all(tick == int(tick) for tick in short.get_xticks())
    ax.figure.canvas.draw()


def test_learning_curves_options():
    """Another measure, another abscissa, own axes, and seeds that were evaluated at different rounds."""
    mine = Figure().add_subplot()
    ax: Any = plots.learning_curves({"a": [history(0, every=5), history(1, every=10)]}, ax=mine, title="t")
    assert ax is mine
    assert ax.lines[0].get_xdata().tolist() == [10, 20]
    assert ax.get_title() == "t"
    assert ax.get_legend() is None
    loss: Any = plots.learning_curves({"a": history(0)}, metric="loss", x="round")
    assert len(loss.lines[0].get_xdata()) == 20
    assert not loss.yaxis.get_major_formatter()(0.5).endswith("%")
    many = plots.learning_curves({str(k): history(k) for k in range(20)})
    assert len({(line.get_color(), line.get_linestyle()) for line in many.lines}) == 20


def test_the_default_measure_is_that_of_the_task():
    """Accuracy, of regressions the error; where the histories share neither, the columns they share are listed."""
    accuracy, rmse = {"round": 2, "train_nll": 1.0, "personal_accuracy": 0.5}, {"round": 2, "train_nll": 1.0, "personal_rmse": 3.0}
    assert plots.learning_curves({"a": History([accuracy])}).get_ylabel() == "personal accuracy"
    regression: Any = plots.learning_curves({"a": History([{"round": 1}, rmse]), "b": [History([rmse])] * 2})
    assert regression.get_ylabel() == "personal RMSE"
    assert regression.lines[0].get_ydata().tolist() == [3.0]
    assert not regression.yaxis.get_major_formatter()(0.5).endswith("%")
    for other in ([accuracy], [{"round": 1, "train_nll": 2.0}]):
        with pytest.raises(ValueError, match=r"metric must be given: .*columns that all have are \['round', 'train_nll'\]"):
            plots.learning_curves({"a": History([rmse]), "b": History(other)})


def test_errors_name_the_remedy():
    """At the boundary, before anything is drawn."""
    case = federation()
    with pytest.raises(ValueError, match=r"clients \[14\] are not there"):
        plots.reliability(*case, clients=[14])
    with pytest.raises(ValueError, match="by must be"):
        plots.reliability(*case, by="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave ax out"):
        plots.reliability(*case, by="client", ax=Figure().add_subplot())
    with pytest.raises(ValueError, match="no client with examples"):
        plots.reliability(case[0], case[1], torch.zeros_like(case[2]), by="client")
    with pytest.raises(ValueError, match="entries is empty"):
        plots.reliability_compare({})
    with pytest.raises(ValueError, match="columns"):
        plots.reliability_compare({"a": case}, columns=0)
    with pytest.raises(ValueError, match="histories is empty"):
        plots.learning_curves({})
    with pytest.raises(ValueError, match=r"histories must be {method: history}, got SimpleNamespace"):
        plots.learning_curves(SimpleNamespace(history=history(0)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'round': a history must be a result.* got ndarray"):
        plots.learning_curves(history(0))
    for table in (history(0), History([{"round": 1, "personal_accuracy": 0.5, "loss": 0.1}])):
        with pytest.raises(ValueError, match=r"'a': the history has no 'auroc'; it has \['round', 'personal_accuracy', 'loss'\]"):
            plots.learning_curves({"a": table}, metric="auroc")
    with pytest.raises(ValueError, match="at no round that all seeds share"):
        plots.learning_curves({"a": [history(0, every=20), history(1, every=19)]})
    with pytest.raises(ValueError, match="of one length"):
        plots.learning_curves({"a": {"round": [1, 2], "personal_accuracy": [0.5]}})


def test_a_regression_has_no_reliability_diagram():
    """The message says what a regression has instead."""

    class Regression:
        class data:
            test = None

        def predict(self, split):
            return type("Predictions", (), {"probs": None})

    with pytest.raises(ValueError, match="coverage"):
        plots.reliability(Regression())


def test_risk_coverage_shows_the_curve():
    """One line a method: of predictions by the largest probability, of a curve as it is; the legend has the areas."""
    probs, labels, mask = case = federation()
    right = probs.argmax(-1) == labels
    by_entropy = detection.risk_coverage(detection.entropy(probs), right, mask)
    mine = Figure().add_subplot()
    ax = plots.risk_coverage({"doubt": case, "entropy": by_entropy}, ax=mine, title="t")
    assert ax is mine
    by_doubt = detection.risk_coverage(detection.doubt(probs), right, mask)
    for line, curve in zip(ax.lines, (by_doubt, by_entropy), strict=True):
        np.testing.assert_allclose(line.get_xdata(), curve.coverage)
        np.testing.assert_allclose(line.get_ydata(), curve.risk)
    legend: Any = ax.get_legend()
    words = [text.get_text() for text in legend.get_texts()]
    assert words == [f"doubt (AURC {100 * by_doubt.aurc:.2f}%)", f"entropy (AURC {100 * by_entropy.aurc:.2f}%)"]
    assert ax.get_title() == "t"
    ax.figure.canvas.draw()
    with pytest.raises(ValueError, match="entries is empty"):
        plots.risk_coverage({})
    with pytest.raises(ValueError, match="have no examples"):
        plots.risk_coverage({"a": (probs, labels, torch.zeros_like(mask))})
    with pytest.raises(ValueError, match="labels must"):
        plots.risk_coverage({"a": (probs, labels + 1, mask)})


def test_coverage_shows_clients_and_chance():
    """A point and a size for each client with test examples, its interval behind; who is beyond chance looks different."""
    probs, labels, mask = case = federation()
    found = conformal(*case, by="pooled").evaluate(*case)
    figure = plots.coverage({"a": found, "b": conformal(*case, by="client").evaluate(*case)}, title="t")
    upper = [ax for ax in figure.axes if ax.get_label() == "coverage"]
    lower = [ax for ax in figure.axes if ax.get_label() == "size"]
    assert [ax.get_title() for ax in upper] == ["a", "b"]
    assert len({ax.get_ylim() for ax in upper}) == len({ax.get_ylim() for ax in lower}) == 1
    client = [0, *range(2, 14)]
    inside, outside = (next(line for line in upper[0].lines if line.get_gid() == gid) for gid in ("a client", "a client beyond chance"))
    drawn = dict(zip((*inside.get_xdata(), *outside.get_xdata()), (*inside.get_ydata(), *outside.get_ydata()), strict=True))
    assert drawn == pytest.approx({j: found.share[j].item() for j in client})
    low, high = found.chance(0.9)
    assert {int(j) for j in outside.get_xdata()} == {j for j in client if not low[j] <= found.share[j] <= high[j]}
    np.testing.assert_allclose([bar.get_y() for bar in bars(upper[0], "chance")], low[client])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in bars(upper[0], "chance")], high[client])
    np.testing.assert_allclose([bar.get_height() for bar in bars(lower[0], "size")], found.size[client])
    (asked,) = [line for line in upper[0].lines if str(line.get_label()).startswith("asked")]
    assert list(asked.get_ydata()) == [0.9, 0.9]
    assert figure.get_suptitle() == "t"
    figure.canvas.draw()
    plots.coverage(found).canvas.draw()
    with pytest.raises(ValueError, match="entries is empty"):
        plots.coverage({})
    with pytest.raises(ValueError, match="no test examples"):
        plots.coverage(conformal(*case).evaluate(probs, labels, torch.zeros_like(mask)))


def test_collaboration_shows_groups_as_blocks():
    """Clients stand in the order of their groups, labelled by their own numbers, lines between groups; without groups as they come."""
    weights = torch.tensor([[0.6, 0.0, 0.4, 0.0], [0.1, 0.9, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.3, 0.0, 0.7]])
    mine = Figure().add_subplot()
    ax = plots.collaboration(weights, groups=[0, 1, 0, 1], ax=mine, title="t")
    assert ax is mine
    (image,) = ax.images
    order = [0, 2, 1, 3]
    np.testing.assert_allclose(image.get_array(), weights.numpy()[order][:, order])
    assert image.get_clim() == (0, pytest.approx(0.9))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "2", "1", "3"]
    across, down = ax.lines
    assert list(across.get_ydata()) == list(down.get_xdata()) == [1.5, 1.5]
    assert ax.get_title() == "t"
    ax.figure.canvas.draw()
    plain = plots.collaboration(weights.numpy())
    np.testing.assert_allclose(plain.images[0].get_array(), weights)
    assert not plain.lines
    plots.collaboration(torch.zeros(30, 30)).figure.canvas.draw()
    with pytest.raises(ValueError, match=r"weights must be square, .* got shape \[4, 3\]"):
        plots.collaboration(weights[:, :3])
    with pytest.raises(ValueError, match=r"finite and >= 0, got -0\.9"):
        plots.collaboration(-weights)
    with pytest.raises(ValueError, match="one group for each of 4 clients, got 2"):
        plots.collaboration(weights, groups=[0, 1])
