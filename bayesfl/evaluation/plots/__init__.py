"""Diagrams of data, runs, studies, posteriors and fits.

Each returns a matplotlib Figure: a notebook shows it as the last line of a cell,
`figure.savefig("diagram.png")` saves it, and `figure.axes` has the parts to change. To draw into a
figure of your own, pass `ax`. Matplotlib is imported only when something is drawn, and only its
object-oriented interface is used: no backend is switched, and no figure is registered with pyplot.
Colours are those of Okabe and Ito, which colour-blind readers can distinguish.
"""

from bayesfl.evaluation.plots.clients import client_curves, labels
from bayesfl.evaluation.plots.curves import learning_curves, risk_coverage
from bayesfl.evaluation.plots.diagrams import reliability, reliability_compare
from bayesfl.evaluation.plots.forest import forest
from bayesfl.evaluation.plots.look import OKABE_ITO
from bayesfl.evaluation.plots.numbers import interval_reliability
from bayesfl.evaluation.plots.posteriors import predictions
from bayesfl.evaluation.plots.promises import coverage
from bayesfl.evaluation.plots.studies import paired, study
from bayesfl.evaluation.plots.survival import kaplan_meier

__all__ = [
    "OKABE_ITO",
    "client_curves",
    "coverage",
    "forest",
    "interval_reliability",
    "kaplan_meier",
    "labels",
    "learning_curves",
    "paired",
    "predictions",
    "reliability",
    "reliability_compare",
    "risk_coverage",
    "study",
]
