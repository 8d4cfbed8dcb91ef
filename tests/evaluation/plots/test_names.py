"""Names that matplotlib would read as something else are drawn as they are written."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from matplotlib.text import Text

import bayesfl as bf
from bayesfl.federation.run.result import Result

WORST = ["$\\frac{$", "_x"]
"""Matplotlib cannot read the first, and leaves the second out of legends."""
NAMES = [*WORST, "a$b$c", "\\$5", "$\\mathdefault{x}$", "100 %_^{}~#&", "<b>a\nb"]


def run_of(name: str) -> Result:
    """A run whose first client and first class have this name."""
    x = [torch.randn(30, 3, generator=torch.Generator().manual_seed(j)) for j in range(2)]
    clients = bf.data.from_arrays(
        x,
        [(one[:, 0] > 0).long() for one in x],
        names=[name, "plain"],
        class_names=[name, "other"],
        calibration=0.2,
    )
    method = bf.algorithms.fedavg(bf.models.mlp(3, hidden=4, outputs=2), epochs=1)
    return bf.simulate(method, clients, rounds=2, progress=False, record_clients=["nll"])


@pytest.fixture(scope="module")
def named(request: pytest.FixtureRequest) -> tuple[str, Result]:
    return request.param, run_of(request.param)


def sites_of(name: str) -> Any:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.normal(size=40), "ill": [0, 1] * 20, "group": [name, "q"] * 20})
    return bf.stats.tables({name: frame, "south": frame}, outcome="ill", terms=[name])


def survival_of(name: str) -> Any:
    frame = pd.DataFrame({"t": range(1, 21), "d": [0, 1] * 10, "by": [name, "q", "q", name] * 5})
    by = bf.stats.levels("by", [name, "q"])
    sites = bf.stats.tables({"north": frame}, terms=[by], also=["t", "d"])
    return bf.stats.kaplan_meier(sites, time="t", event="d", by=by, exact_times=True)


def fitted() -> Any:
    return bf.posteriors.Laplace.fit(nn.Linear(2, 2), torch.randn(20, 2), precision=1.0)


class Named(nn.Module):
    """A model one of whose parameters has a name of its owner's choice."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_parameter(name.replace(".", ""), nn.Parameter(torch.randn(2, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ next(self.parameters()).T


def audit(run: Result) -> Any:
    return run.calibrate(bf.calibration.Conformal()).audit()


DRAWN: dict[str, Callable[[str, Result], Any]] = {
    "client_curves": lambda n, r: bf.plots.client_curves(r.history, "personal_nll", title=n),
    "coverage": lambda n, r: bf.plots.coverage({n: audit(r), "b": audit(r)}),
    "forest": lambda n, r: bf.plots.forest(bf.stats.glm(sites_of(n), family="binomial"), n),
    "interval_reliability": lambda n, r: bf.plots.interval_reliability(
        (torch.zeros(1, 9, 1), torch.ones(1, 9, 1), torch.randn(1, 9), torch.ones(1, 9).bool()),
        title=n,
    ),
    "kaplan_meier": lambda n, r: bf.plots.kaplan_meier(survival_of(n)),
    "labels": lambda n, r: bf.plots.labels(r.data),
    "learning_curves": lambda n, r: bf.plots.learning_curves({n: r, "b": r}),
    "paired": lambda n, r: bf.plots.paired(bf.table({n: r, "b": r}), n, "b"),
    "predictions": lambda n, r: bf.plots.predictions(fitted(), torch.randn(5, 2), title=n),
    "reliability": lambda n, r: bf.plots.reliability(r, by="client", title=n),
    "reliability_compare": lambda n, r: bf.plots.reliability_compare({n: r, "b": r}),
    "risk_coverage": lambda n, r: bf.plots.risk_coverage({n: r, "b": r}),
    "study": lambda n, r: bf.plots.study(bf.table({n: r, "b": r})),
}


def written(figure: Figure) -> dict[str, Any]:
    """What stands in the visible texts of a figure that was drawn, and how it was read."""
    figure.savefig(io.BytesIO())
    texts: list[Any] = [text for text in figure.findobj(Text) if text.get_visible()]
    return {text.get_text(): text._preprocess_math(text.get_text()) for text in texts}


def test_every_diagram_is_here():
    """A new diagram is tested, too."""
    assert {"OKABE_ITO", *DRAWN} == set(bf.plots.__all__)


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        (name, kind)
        for name in NAMES
        for kind in DRAWN
        if name in WORST or kind in ("forest", "labels")
    ],
    indirect=["named"],
)
def test_names_are_drawn_as_they_are_written(kind: str, named: tuple[str, Result]):
    name, run = named
    texts = written(DRAWN[kind](name, run))
    assert any(name in text for text in texts), texts
    assert all(read == (text, False) for text, read in texts.items() if name in text)


@pytest.mark.slow
@pytest.mark.parametrize("named", [*WORST, "<b>a\nb"], indirect=True)
def test_a_report_has_any_name(named: tuple[str, Result], tmp_path):
    """One client cannot deny a report to all, and what it writes is no HTML."""
    name, run = named
    run.calibrate(bf.calibration.Conformal()).report(tmp_path / "run.html")
    bf.table({name: [run, run]}).report(tmp_path / "study.html")
    fit = bf.stats.glm(sites_of(name), family="binomial")
    fit.report(tmp_path / "fit.html", by_site=[name])
    for page in tmp_path.iterdir():
        assert "<b>a" not in page.read_text()


def test_a_legend_has_every_line():
    """Matplotlib leaves out labels that are empty or begin with an underscore."""
    history = {"round": [1, 2], "loss": [0.5, 0.4]}
    one = bf.plots.learning_curves({"a": history}, metric="loss").axes[0]
    assert one.get_legend() is None  # nothing is explained
    names = ["", "_x", "_child0", "plain"]
    ax = bf.plots.learning_curves(dict.fromkeys(names, history), metric="loss").axes[0]
    legend: Any = ax.get_legend()
    assert [text.get_text().strip() for text in legend.get_texts()] == names


def test_numbers_remain_mathematics():
    """Powers of ten, in axes that are drawn twice, and what the caller writes afterwards."""
    curves = {"$a$": {"round": [1, 2], "loss": [1e-3, 1e9]}}
    ax: Any = bf.plots.learning_curves(curves, metric="loss").axes[0]
    ax.set_yscale("log")
    for _ in range(2):
        texts = written(ax.figure)
        powers = [read for text, read in texts.items() if "10^{" in text]
        assert powers
        assert all(math for _, math in powers)
        bf.plots.learning_curves(curves, metric="loss", ax=ax)
    ax.set_xlabel("$\\alpha$")
    assert written(ax.figure)["$\\alpha$"] == ("$\\alpha$", True)


def test_texts_do_not_go_to_latex(monkeypatch: pytest.MonkeyPatch):
    """A name is no command of LaTeX, whatever the caller's settings are."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    figure: Any = bf.plots.reliability_compare({"\\input{x}": run_of("a")})
    title = figure.axes[0].title
    assert title.get_text() == "\\input{x}"
    assert not title.get_usetex()
