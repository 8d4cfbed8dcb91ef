"""Predictions of one client by the linearised network, at a Gaussian that a predictor has made."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesfl.base.checks import instance
from bayesfl.base.inputs import Inputs
from bayesfl.base.protocols import Tensors, View
from bayesfl.curvature.roots import check_known
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors.linearised import Link, kappa, predictive, refuse_idle_centre

SHRUNK = 0.3  # below this median kappa (factor by which logits shrink) the prior, not the data, determines the predictions


def check_block(block: Any) -> None:
    """Raise TypeError if `block` is neither None nor text."""
    if block is not None:
        instance("block", block, str, "pass the name of one block, or None")


def check_link(link: str, *, centre: bool) -> None:
    """Raise ValueError if `centre` is without effect."""
    refuse_idle_centre(link, centre=centre)


def check_linearised(rule: Any, algorithm: Any) -> None:
    """Raise TypeError for a likelihood of unknown curvature, ValueError for an idle option or draws without a number."""
    likelihood = algorithm.likelihood
    check_known(likelihood)
    if isinstance(likelihood, Gaussian) and rule.link != "contrasts":
        raise ValueError(f"link={rule.link!r} says nothing for targets, whose distribution is exact; leave it out")
    if not rule.centre and not isinstance(likelihood, Categorical):
        raise ValueError(
            f"centre=False says nothing under likelihood {type(likelihood).__name__}, as only classes are centred; leave it out"
        )
    if rule.link == "draws" and not algorithm.draws:
        raise ValueError(
            "link='draws' needs the number of a prediction's draws: dataclasses.replace(method, draws=100, predictor=...), which is not "
            "the number that a function such as pfedvem takes for its steps; or take link='contrasts'"
        )


def refuse_copies(rule: Any, algorithm: Any) -> None:
    """Raise ValueError if an algorithm predicts by several copies, of which the rule linearises one."""
    if (copies := algorithm.copies(algorithm.parts)) is not None:
        raise ValueError(
            f"a linearised network is one model, and parts {algorithm.parts} have {copies} copies; take "
            f"Mixture({algorithm.parts[0]!r}, 'pi', each={type(rule).__name__}()), with the name of the mixture's weights for 'pi'"
        )


class Linearised:
    """One client's predictor by the linearised network, see `Fitted`.

    Args:
        rule: The method's predictor.
        algorithm: The method.
        view: The client's view.
        inverse: Function from the prior precision that is tuned, or None, to the covariance of the weights.
    """

    def __init__(self, rule: Any, algorithm: Any, view: View, inverse: Callable[[float | None], Any]) -> None:
        self._rule, self._algorithm, self._view, self.inverse = rule, algorithm, view, inverse

    def __call__(self, x: Inputs, *, value: float | None = None, noise: Tensor | None = None, plain: bool = False) -> Tensors:
        """Return the prediction, see `Fitted`; warn where it is the prior's, under a precision that was given."""
        algorithm, rule, likelihood = self._algorithm, self._rule, self._algorithm.likelihood
        if plain:
            return at_mean(algorithm, self._view, x)
        inverse = self.inverse(value)
        mean, covariance = inverse.predict({"x": x}, centre=rule.centre and isinstance(likelihood, Categorical))
        classes = not isinstance(likelihood, Gaussian)  # kappa is defined for logits, not for the variance of targets
        fixed = rule.precision is not None and float(self._view["n"]) >= 1  # a copy that made no example has the prior under any precision
        if fixed and classes and float(kappa(covariance.diagonal(dim1=1, dim2=2)).median()) < SHRUNK:
            which = "the precision that the method computes" if callable(rule.precision) else f"predictive_precision={rule.precision}"
            warnings.warn(
                f"{which} leaves the predictions to the prior (the median kappa is below {SHRUNK}); choose a precision on validation data: "
                "predictive_precision=None under an isotropic prior",
                stacklevel=2,
            )
        link: Link = "contrasts" if rule.link == "draws" else rule.link
        return {name: t.to(self._view["n"]) for name, t in predictive(likelihood, mean, covariance, noise, link=link).items()}


def at_mean(algorithm: Any, view: View, x: Inputs) -> Tensors:
    """Return the prediction at `x` [N, *] by one client's blocks at their means; its epistemic part is NaN."""
    found = algorithm.likelihood.predictive(algorithm.outputs(algorithm.leaves(algorithm.parts, view), x).unsqueeze(0))
    return found | {"epistemic": torch.full_like(found["epistemic"], torch.nan)}
