"""Temperature scaling as a survey: a pooled temperature by Newton's method on sums, and each
client's own, shrunk towards it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

from bayesfl.base.options import Range, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import NotNegative
from bayesfl.base.warning import warn
from bayesfl.evaluation.calibration.steps import changed, refuse_empty, refuse_numbers
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.posteriors.linearised import as_labels

COLDEST, HOTTEST = 0.05, 20.0
"""Smallest and largest temperature considered. If every prediction is right, the likelihood
increases down to 0.
"""
CONVERGED = 2e-16
"""Newton's method counts as converged if g^2 <= CONVERGED n h: the remaining gain is far below the
rounding error of n examples' losses.
"""
GRID = torch.linspace(math.log(COLDEST), math.log(HOTTEST), 61, dtype=torch.float64)
"""Logarithms of the temperatures that are tried before the best is refined; each temperature is
10 % above the one before.
"""
_STEPS = 48
_ENOUGH = 1e-13
"""Largest change of log T at which a client's own temperature counts as converged."""


@dataclass(frozen=True, kw_only=True)
@declared
class Temperature:
    """Divide logits by a temperature T that minimises the negative log likelihood of held-out
    labels; the order of classes does not change.

    The pooled temperature $T_0 = 1 / beta$ is found by Newton's method on sums over all examples of
    the slope g and the curvature h of the negative log likelihood in beta, which is convex, within
    a bracket. A client's own minimises

        $sum_i nll_i(T) + 1/2 strength I (log T - log T_0)^2$,

    a Gaussian prior on $log T$ with the precision of `strength` average examples, whose information
    about $log T$ at $T_0$ is I (Kass and Wasserman, JASA 90, 1995). A client with n average
    examples therefore moves $n / (n + strength)$ of the way to its own optimum.

    Args:
        split: The split for the fit.
        strength: Weight of the pooled temperature in a client's, in examples, >= 0. With `math.inf`
            every client has the pooled one; with 0 each has its own optimum, which is 0.05, an end
            of the range, if all of its labels are the most probable classes.

    References:
        Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, section
        4.2.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> warm = result.calibrate(bf.calibration.Temperature())
        >>> rows = clients.validation
        >>> warm.predict(rows).summary(rows)["nll"] < result.predict(rows).summary(rows)["nll"]
        True
    """

    split: str = "validation"
    strength: Annotated[float, Range(0, math.inf, "[]")] = 10.0

    def start(self, outputs: Outputs) -> Tensors:
        """Return beta = 1, and the bracket of the search: the largest beta known to be too small
        and the smallest known to be too large, initially 0 and infinity.

        Raises:
            ValueError: The predictions have no classes.
        """
        refuse_numbers(self, outputs)
        found = {"beta": 1.0, "low": 0.0, "high": math.inf, "information": 0.0, "bounded": 1.0}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of g, h, the number of examples, and the number whose label is not the
        most probable class.
        """
        return {"g": (), "h": NotNegative(), "n_examples": (), "n_wrong": ()}

    def answer(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return slope and curvature of the clients' negative log likelihoods in beta, in nats, and
        two counts; sums over examples, [J].
        """
        logits, labels, clients = local.labelled
        probs = (state["beta"] * logits).softmax(-1)
        mean, true = (probs * logits).sum(-1), logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        h = (probs * (logits - mean.unsqueeze(-1)).square()).sum(-1)
        return {
            "g": clients.sum(mean - true),
            "h": clients.sum(h),
            "n_examples": clients.counts,
            "n_wrong": clients.sum(true < logits.amax(-1)),
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next beta: Newton's, or if that leaves the bracket, its end if not yet tried,
        otherwise its middle.

        Raises:
            ValueError: No client has an example.
        """
        beta, low, high = (float(state[name]) for name in ("beta", "low", "high"))
        g, h, n = (float(total[name]) for name in ("g", "h", "n_examples"))
        refuse_empty(self.split, total["n_examples"])
        now = state | {"information": state["beta"].square() * total["h"] / n}
        if g == h == 0:  # no prediction separates the classes, so no temperature has an effect
            return now, True
        if not total["n_wrong"] > 0:
            return self._unbounded(now, 1 / COLDEST), True
        if g * g <= CONVERGED * n * h:
            step = state["beta"] - total["g"] / total["h"]  # which the sums still give
            return now | {"beta": step.clamp(*_ends(low, high))}, True
        if beta == (1 / COLDEST if g < 0 else 1 / HOTTEST):
            return self._unbounded(now, beta), True
        low, high = (beta, high) if g < 0 else (low, beta)
        step = beta - g / h if h > 0 else math.copysign(math.inf, -g)
        following = _following(step, low, high)
        if following == beta:  # the ends are neighbouring numbers
            return now, True
        new = {"beta": following, "low": low, "high": high}
        return now | {
            name: torch.tensor(value, dtype=torch.float64) for name, value in new.items()
        }, False

    def _unbounded(self, now: Tensors, beta: float) -> Tensors:
        warn(
            f"the split {self.split!r} does not bound the temperature, which is set to "
            f"{1 / beta:.3g}, an end of the range considered: "
            + (
                "every label, or nearly so, is the most probable class"
                if beta > 1
                else "predictions contain no information about the labels"
            ),
        )
        return now | {
            "beta": torch.tensor(beta, dtype=torch.float64),
            "bounded": torch.zeros((), dtype=torch.float64),
        }

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return every client's own temperature, [J]."""
        pooled = (1 / state["beta"]).expand(len(local.ids))
        if self.strength == math.inf:
            return {"temperature": pooled.clone()}
        logits, labels, clients = local.labelled
        logits = logits - logits.amax(-1, keepdim=True)
        scored = Tempered(logits.T.contiguous(), labels, clients, GRID)
        own = scored.minimise(
            pooled.log(), self.strength * state["information"].expand(len(pooled))
        )
        return {"temperature": own.exp().clamp(COLDEST, HOTTEST)}

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return predictions with softmax(log(probs) / T)."""
        temperature = local.of_rows(own["temperature"].unsqueeze(-1))
        return changed(local.predictions, local.logits / temperature)


def temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature T that minimises the negative log likelihood of softmax(logits / T) at
    one model's held-out labels.

    Guo, Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, section
    4.2. If no T minimises it, for example if every label is the most probable class, T is an end of
    the range 0.05 to 20, with a warning.

    Args:
        logits: Outputs of the model, [N, O], or logarithms of its probabilities, which may be -inf
            except for the label; [N] or [N, 1] for the logit of the second of two classes.
        y: Labels [N], integers in [0, O).

    Raises:
        ValueError: The numbers of labels and logits differ, a label is not a class, or its
            probability is 0 or not finite.

    Example:
        >>> logits, y = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1, 1])
        >>> round(bf.calibration.temperature(logits, y), 2)
        5.77
    """
    logits, y = torch.as_tensor(logits).detach().cpu().double(), torch.as_tensor(y).cpu()
    if logits.dim() == 1 or logits.shape[-1] == 1:
        logits = (logits.reshape(-1, 1) * torch.tensor([-1, 1])).clamp_max(0)  # infinite ones, too
    y = as_labels(y, *logits.shape)
    logits = logits - logits.amax(-1, keepdim=True)
    if len(bad := (~logits.gather(-1, y[:, None]).isfinite()).flatten().nonzero()):
        raise ValueError(
            f"the label of row {int(bad[0])} has probability 0, or its logits are not finite, "
            "which no temperature changes: for votes use (probs + 1e-3).log()"
        )
    logits = logits.clamp_min(-1e300)  # of probability 0; its product with 0 is 0
    none = torch.zeros(1, dtype=torch.float64)
    clients = Segments(torch.tensor([len(y)]))
    log_t = Tempered(logits.T.contiguous(), y, clients, GRID).minimise(none, none)
    found = float(log_t.exp().clamp(COLDEST, HOTTEST))
    if not COLDEST * 1.001 < found < HOTTEST / 1.001:
        warn(
            f"the labels do not bound the temperature, which is set to {found:.3g}, an end of the "
            "range considered"
        )
    return found


def _ends(low: float, high: float) -> tuple[float, float]:
    """Return the ends of a bracket, limited to the range."""
    return max(low, 1 / HOTTEST), min(high, 1 / COLDEST)


def _following(step: float, low: float, high: float) -> float:
    """Return the beta to try after Newton's `step`: the step if it lies within the bracket;
    otherwise the end that it passes, or the bracket's middle if that end was tried.
    """
    least, most = _ends(low, high)
    if least < step < most:
        return step
    end, tried = (most, high < math.inf) if step >= most else (least, low > 0)
    return math.sqrt(least * most) if tried else end


@dataclass(frozen=True)
class Tempered:
    """Evaluate logits [O, R], with maximum 0 for each example, and labels [R] of some clients as
    functions of log T [J], with a grid of values to try.

    Classes come before examples because torch's sums over a few classes are several times slower
    along the last axis.
    """

    logits: Tensor
    labels: Tensor
    clients: Segments
    grid: Tensor

    @cached_property
    def true(self) -> Tensor:
        """Return the logits of the labels, summed over examples [J]."""
        return self.clients.sum(self.logits.gather(0, self.labels[None])[0])

    def nll(self, log_t: Tensor) -> Tensor:
        """Compute the negative log likelihood of each client, summed over examples [J], in nats."""
        beta = (-log_t).exp()
        # The largest logit is 0, so it is not subtracted; in place, because this is the costly part
        # of a calibration.
        losses = (self.logits * beta[self.clients.owner]).exp_().sum(0).log_()
        return self.clients.sum(losses) - self.true * beta

    def slopes(self, log_t: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the derivative of `nll` with respect to log T, u_y - E u for u = logits / T, and
        the Fisher information, Var u; sums [J].
        """
        beta = (-log_t).exp()
        u = self.logits * beta[self.clients.owner]
        e = u.exp()
        total = e.sum(0)
        e *= u
        mean = e.sum(0) / total
        e *= u
        information = self.clients.sum(e.sum(0) / total - mean.square())
        return self.true * beta - self.clients.sum(mean), information

    def minimise(self, centre: Tensor, pull: Tensor) -> Tensor:
        """Return each client's log T [J] with the smallest nll + 1/2 pull (log T - centre)^2 within
        the grid.

        The likelihood alone has one optimum (it is convex in $1 / T$), but with the quadratic term
        there may be several. Therefore a grid is evaluated first, and Newton's steps, or
        bisections, refine its best value. If the nll does not depend on T, the result is `centre`.
        """
        tried = torch.stack([self.nll(g.expand(len(self.clients))) for g in self.grid], -1)
        values = tried + 0.5 * (pull * (self.grid[:, None] - centre).square()).T
        best = values.argmin(-1)
        low = self.grid[(best - 1).clamp_min(0)]
        high = self.grid[(best + 1).clamp_max(len(self.grid) - 1)]
        now = self.grid[best]
        for _ in range(_STEPS):
            slope, information = self.slopes(now)
            curvature = information - slope + pull
            slope = slope + pull * (now - centre)
            low, high = torch.where(slope < 0, now, low), torch.where(slope < 0, high, now)
            step = now - slope / curvature
            then = torch.where(
                (curvature > 0) & (step > low) & (step < high), step, (low + high) / 2
            )
            moved, now = (then - now).abs().amax(), then
            if moved <= _ENOUGH:
                break
        return torch.where(values.amax(-1) == values.amin(-1), centre, now)
