"""Conformal sets and intervals of each client, with thresholds from its own scores and the
federation's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from bayesfl.base.options import PROBABILITY, Range, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.warning import warn
from bayesfl.evaluation.calibration.scores import (
    Score,
    class_scores,
    intervals,
    number_scores,
)
from bayesfl.evaluation.calibration.steps import refuse_empty
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs

By: TypeAlias = Literal["client", "label"]
HISTOGRAM_BINS = 1024
"""Number of bins of the histogram of the federation's scores; a threshold at a bin's upper end is
at most one bin too large.
"""
OCTAVES = 64
"""Scores of numbers are first counted up to each of these powers of 2, from 2^-32, which gives
the histogram its range.
"""
_POWERS_OF_2 = 2.0 ** (torch.arange(OCTAVES, dtype=torch.float64) - OCTAVES // 2)
TAIL = 128
"""Number of bins for large scores of numbers beyond the equal bins; their ends grow by a constant
factor up to the largest power of 2.
"""
_BEYOND = 0.5
"""Maximum share of scores beyond the equal bins, such as outliers, as a multiple of 1 - level."""
_DECIMALS = 6
_SLACK = 1e-6  # of scores of classes: less is rounding, in float32, of scores that are equal
_ROUNDING = (
    1e-9  # so that a rank is not rounded up where it would be whole but for floating-point error
)


@dataclass(frozen=True, kw_only=True)
@declared
class Conformal:
    """Make a prediction set, or for regression an interval, that contains the truth with
    probability `level`.

    A set contains all values whose score is at most the client's threshold $t_j$. With the shares
    $F_j(s)$ of its own $n_j$ scores and $F(s)$ of all clients' N scores up to s, and n0 = `shrink`,
    $t_j$ is the smallest s with

        $n_j F_j(s) + n0 F(s) >= level (n_j + n0 + 1 + n0 / N)$,

    which is everything if no s suffices. All clients' scores together have weight n0, each of the
    client's own weight 1 in addition, and the new example's score weight $1 + n0 / N$. No score has
    a larger weight than the new one, so that, if all clients have the same distribution, coverage
    is at least `level` for any number of scores: Barber, Candès, Ramdas and Tibshirani, "Conformal
    prediction beyond exchangeability", Annals of Statistics 51, 2023, theorem 2, which also bounds
    the loss of coverage otherwise. `shrink=0` uses only the client's own scores, and guarantees
    `level` for each client; a client with fewer than level / (1 - level) scores gets everything.
    `shrink=math.inf` uses all scores as if from one source. n0 must be fixed before the scores are
    seen.

    The federation's scores are summarised by a histogram, whose scores count at the upper ends of
    bins; this makes thresholds larger by at most one bin. The client's own scores are exact. Sets
    are often empty if a model's accuracy exceeds `level`: then no class fits as well as true ones
    did. `never_empty` adds the most probable class, which only raises coverage.

    Args:
        level: Guaranteed coverage, in (0, 1).
        score: Score of classes, see `class_scores`; numbers have one score, see `number_scores`.
        shrink: n0, >= 0, in examples.
        by: One threshold for each `client`, or for each client and `label`; then `level` holds for
            examples of each class.
        never_empty: Whether sets of classes contain at least the most probable class.
        split: The split for the scores, to which nothing else was fitted.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, calibration=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> found = result.calibrate(bf.calibration.Conformal(level=0.9)).predict(clients.test)
        >>> held, labels = found.sets, found.labels  # of 360 test rows
        >>> bool(held.gather(-1, labels[..., None]).double().mean() > 0.85)
        True
    """

    level: Annotated[float, PROBABILITY] = 0.9
    score: Score = "lac"
    shrink: Annotated[float, Range(0, math.inf, "[]")] = 20.0
    by: By = "client"
    never_empty: bool = False
    split: str = "calibration"
    last: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        """Return whether the score has a random term, which depends on the row's inputs."""
        return self.score != "lac"

    def start(self, outputs: Outputs) -> Tensors:
        """Return the ends of the histogram's bins for classes; for numbers none, because the first
        question determines their range.
        """
        if outputs.task == "classification":
            return {
                "groups": torch.tensor(outputs.count if self.by == "label" else 1),
                "edges": _ends(0.0, 1.0, HISTOGRAM_BINS),
            }
        return {"groups": torch.tensor(1)}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of counts of scores, in each bin and beyond the last, or of counts of
        numbers' scores by power of 2.
        """
        if "edges" not in state:
            return {"n_powers": (2, OCTAVES + 1)}
        return {"n_scores": (int(state["groups"]), HISTOGRAM_BINS + 1)}

    def answer(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return the clients' counts of scores, [J, G, bins + 1]."""
        scores, group, clients = self._scores(local)
        if "edges" not in state:
            name, groups, size = "n_powers", 2, OCTAVES + 1
            place, group = torch.bucketize(scores.abs(), _POWERS_OF_2), (scores < 0).long()
        else:
            name, groups, size = "n_scores", int(state["groups"]), HISTOGRAM_BINS + 1
            slack = _SLACK * (local.predictions.probs is not None)
            place = torch.bucketize(scores - slack, state["edges"])
        return {name: clients.count(group * size + place, groups * size).view(-1, groups, size)}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the bins' ends once the range is known; then their counts, and end.

        Raises:
            ValueError: No client has an example.
        """
        if "edges" not in state:
            counts = total["n_powers"]
            refuse_empty(self.split, counts.sum())
            beyond = counts.sum() - counts.sum(0).cumsum(0)[:-1]  # scores above each power
            allowed = _BEYOND * (1 - self.level) * counts.sum()
            if not counts[:, 1:].sum() > 0.5 * counts.sum() or beyond[-1] > allowed:
                warn(
                    f"scores of targets lie outside 2^-{OCTAVES // 2} to 2^{OCTAVES // 2 - 1}, so "
                    "that intervals may be far too wide: scale the targets, to a standard "
                    "deviation of 1 for instance",
                )
            high = float(_POWERS_OF_2[min(int((beyond > allowed).sum()), OCTAVES - 1)])
            negative = counts[1, :-1].nonzero()
            low = -float(_POWERS_OF_2[int(negative.max())]) if len(negative) else 0.0
            near = _ends(max(low, -high), high, HISTOGRAM_BINS - TAIL)
            far = high * (2 * _POWERS_OF_2[-1] / high) ** (
                torch.arange(1, TAIL + 1, dtype=torch.float64) / TAIL
            )
            return state | {"edges": torch.cat([near, far])}, False
        refuse_empty(self.split, total["n_scores"].sum())
        return state | {"counts": total["n_scores"]}, True

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return the clients' thresholds, [J, G], infinite if a set contains everything, and the
        numbers of their own scores [J, G].

        For alarms, which compare later rows with these, also `scores`, see `scored`, and
        `epistemic` of every row, [J, N], NaN for padding.
        """
        scores, group, clients = self._scores(local)
        found, groups = [], int(state["groups"])
        for g in range(groups):
            own = group == g
            known = scores[own], clients.kept(own), state["edges"], state["counts"][g]
            found.append(thresholds(*known, level=self.level, shrink=self.shrink))
        return {
            "threshold": torch.stack(found, -1),
            "n_scores": clients.count(group, groups).long(),
            "scores": clients.padded(self.scored(local), torch.nan),
            "epistemic": clients.padded(epistemic_score(local), torch.nan),
        }

    def scored(self, local: LocalPredictions) -> Tensor:
        """Return the scores of labels or targets for alarms, [M] in float64; with u = 1/2 if scores
        have a random term.

        Scores of classes are rounded: for a confident model, floating-point error would otherwise
        decide which row is more unusual, and rows predicted one by one may have another error than
        calibration rows, which are predicted together.

        Raises:
            ValueError: Labels or targets are unknown, or a prediction is not finite.
        """
        scores, _, _ = self._scores(local, 0.5)
        return scores if local.predictions.probs is None else scores.round(decimals=_DECIMALS)

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return predictions with `sets` of classes, or with the ends of intervals as `lower` and
        `upper`.
        """
        given, threshold = local.predictions, own["threshold"]
        if given.probs is None:
            lower, upper = intervals(given, threshold[local.clients.owner, 0])
            return replace(
                given, lower=lower.to(_like(given)), upper=upper.to(_like(given)), level=self.level
            )
        probs = local.logits.softmax(-1)
        u = torch.zeros(probs.shape[:-1], dtype=torch.float64)
        if self.draws:
            u += local.uniform(1).reshape(-1, *[1] * (probs.dim() - 2))
        sets = class_scores(self.score, probs, u) <= _SLACK + local.of_rows(threshold)
        sets = sets.scatter(-1, probs.argmax(-1, keepdim=True), True) if self.never_empty else sets
        return replace(given, sets=sets, level=self.level)

    def _scores(
        self, local: LocalPredictions, u: float | None = None
    ) -> tuple[Tensor, Tensor, Segments]:
        """Return scores [M], the group of each, and their clients; with one draw u for all, or the
        draws of calibration rows.
        """
        if local.predictions.probs is None:
            scores = number_scores(local.predictions, local.labels)
            local.refuse_broken(scores)
            return scores, torch.zeros(len(scores), dtype=torch.int64), local.clients
        logits, labels, clients = local.labelled
        drawn = torch.full(labels.shape, u or 0.0, dtype=torch.float64)
        if self.draws and u is None:
            drawn = local.places.uniform(0)
        scores = class_scores(self.score, logits.softmax(-1), drawn)
        group = labels if self.by == "label" else torch.zeros_like(labels)
        return scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1), group, clients


def _ends(low: float, high: float, bins: int) -> Tensor:
    """Return the upper ends of equal bins between two numbers, [bins] in float64."""
    return low + (high - low) * torch.arange(1, bins + 1, dtype=torch.float64) / bins


def epistemic_score(local: LocalPredictions) -> Tensor:
    """Return the epistemic uncertainty of every known label of rows, [M] in float64, for classes
    rounded as in `Conformal.scored`; NaN if there is none.
    """
    found = local.places.predictions.epistemic.flatten().double()
    return found if local.predictions.probs is None else found.round(decimals=_DECIMALS)


def thresholds(
    scores: Tensor, clients: Segments, edges: Tensor, counts: Tensor, *, level: float, shrink: float
) -> Tensor:
    """Return each client's threshold, [J] in float64, see `Conformal`; infinite if sets contain
    everything.

    It is one of the client's own scores, or the end of the first bin at which the weighted share of
    all clients' scores reaches the remainder.

    Args:
        scores: The clients' own scores, [R].
        clients: Their clients.
        edges: Upper ends of the bins of all clients' scores, [B], ascending.
        counts: Number of all clients' scores in each bin, and beyond the last, [B + 1].
        level: Nominal coverage of the sets.
        shrink: n0; `math.inf` for all clients' scores as if from one source.
    """
    if shrink == math.inf:
        return _pooled(edges, counts, level).expand(len(clients)).clone()
    foreign = shrink * (1 + 1 / counts.sum().clamp_min(1))
    needed = level * (clients.counts.double() + 1 + foreign)
    ends = torch.cat([edges, edges.new_tensor([math.inf])])
    # Of scores up to each end, after none.
    share = torch.cat([counts.new_zeros(1), counts[:-1].cumsum(0)])
    share = shrink * share / counts.sum().clamp_min(1)
    least = needed - _ROUNDING
    own = scores[clients.order(scores)]
    rank = torch.arange(1, len(own) + 1) - clients.starts[clients.owner]
    rest = least[clients.owner] - rank
    at_own = own.where(share[torch.searchsorted(edges, own, right=True)] >= rest, math.inf)
    at_end = ends[torch.searchsorted(share[1:], rest)]
    found = torch.minimum(at_own, at_end.where(at_end >= own, math.inf))
    return ends[torch.searchsorted(share[1:], least)].scatter_reduce(
        0, clients.owner, found, "amin"
    )


def _pooled(edges: Tensor, counts: Tensor, level: float) -> Tensor:
    """Return the threshold from all clients' scores as if from one source."""
    enough = counts[:-1].cumsum(0) >= level * (counts.sum() + 1) - _ROUNDING
    return torch.cat([edges[enough], edges.new_tensor([math.inf])]).min()


def _like(predictions: Predictions) -> torch.dtype:
    t = predictions.mean if predictions.mean is not None else predictions.lower
    return torch.float32 if t is None else t.dtype
