"""Reliability diagrams of classes and numbers, learning and risk-coverage curves, promises and what
is kept of them, mixing weights, and curves of survival.
is kept of them, mixing weights, and coefficients by site.

Matplotlib is imported only when something is drawn, and only its object-oriented interface is used:
no backend is switched, no figure is registered with pyplot, nothing is shown. Without `ax` a figure
is made, to be saved by `axes.figure.savefig("diagram.png")`; to draw into a figure of your own,
pass `ax`. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from bayesfl.evaluation.plots.clients import client_curves, collaboration
from bayesfl.evaluation.plots.curves import learning_curves, risk_coverage
from bayesfl.evaluation.plots.diagrams import reliability, reliability_compare
from bayesfl.evaluation.plots.forest import forest
from bayesfl.evaluation.plots.look import OKABE_ITO
from bayesfl.evaluation.plots.numbers import interval_reliability
from bayesfl.evaluation.plots.promises import coverage, evidence
from bayesfl.evaluation.plots.studies import paired, study
from bayesfl.evaluation.plots.survival import kaplan_meier

__all__ = [
    "OKABE_ITO",
    "client_curves",
    "collaboration",
    "coverage",
    "evidence",
    "forest",
    "interval_reliability",
    "kaplan_meier",
    "learning_curves",
    "paired",
    "reliability",
    "reliability_compare",
    "risk_coverage",
    "study",
]
