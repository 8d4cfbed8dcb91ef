"""Predictive distributions of many clients, and their measures."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.display.html import preview
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.targets import IGNORE
from bayesfl.data import ClientData
from bayesfl.data.outline import known_names, place
from bayesfl.evaluation.metrics.intervals import measured_intervals
from bayesfl.evaluation.metrics.measured import Measured, share
from bayesfl.evaluation.metrics.regression import measured_numbers
from bayesfl.evaluation.metrics.summaries import measured_classes


@dataclass(frozen=True)
class Predictions:
    """Predictive distributions for J clients of at most N examples; rows that pad a shorter client
    are NaN.

    Args:
        mask: Which rows are examples, [J, N] bool.
        epistemic: The part of the uncertainty that more data would remove, [J, N], or [J, N, T]
            where an example has T labels. For classes, in nats: by draws the mutual information of
            label and weights; under the link by contrasts the entropy that uncertainty adds; NaN at
            the mean, and class-wise (link="per_class"). For regression the variance of the means.
        probs: Class probabilities [J, N, O], or [J, N, T, O] where an example has T labels; None
            for regression.
        mean: Predictive means [J, N, O], or the middles of intervals; None for classes.
        variance: Predictive variances [J, N, O], noise included; None for classes and intervals.
        lower: Lower ends of intervals, [J, N, O], of likelihood `Quantiles` or made by `Conformal`;
            None where there are none.
        upper: Upper ends of these.
        sets: Which classes are in the conformal set of an example, [J, N, O] or [J, N, T, O] bool;
            None where none were made.
        answered: Which examples are answered, [J, N] or [J, N, T] bool, as `Abstention` says; None
            where all are.
        level: The probability that the sets or the intervals promise; None for that of the
            likelihood's intervals.
        risk: The share of wrong answers that `answered` promises at most, of all clients' rows
            together; None where all are answered.
        labels: The labels [J, N] or targets [J, N, ...] of the split that was predicted, by which
            `summary` knows it; None where they are not known. Rows that pad are 0.
        names: The clients' names, by which `client` finds them; None where they are not known.
        class_names: One name for each class, see `named_sets`; None for classes without names.
        likelihood: The likelihood, by whose distribution numbers are measured; None for normal
            ones.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
        >>> found = bf.simulate(method, clients, rounds=1).predict(clients.test)
        >>> found
        Predictions(2 clients of 179 to 180 examples; probs [2, 180, 10])
        >>> list(found.summary(clients.test))[:3]
        ['accuracy', 'nll', 'ece']
    """

    mask: Tensor
    epistemic: Tensor
    probs: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    lower: Tensor | None = None
    upper: Tensor | None = None
    sets: Tensor | None = None
    answered: Tensor | None = None
    level: float | None = None
    risk: float | None = None
    labels: Tensor | None = None
    names: tuple[str, ...] | None = None
    likelihood: Likelihood | None = None
    class_names: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        rows = self.mask.sum(-1)
        many = (
            f"{len(rows)} clients of {int(rows.min())} to {int(rows.max())} examples"
            if self.mask.dim() > 1
            else f"{int(rows)} examples"
        )
        none = bool(self.epistemic[self.mask].isnan().all())
        shown = {
            name: t
            for name, t in vars(self).items()
            if isinstance(t, Tensor) and name not in ("mask", "labels", *["epistemic"] * none)
        }
        tensors = ", ".join(f"{name} {list(t.shape)}" for name, t in shown.items())
        drawn = "" if none else "; averaged over draws or a closed form"
        return f"Predictions({many}; {tensors}{drawn})"

    def _repr_html_(self) -> str:
        if self.mask.dim() == 2:
            names = known_names(self.names, len(self.mask))
            columns: dict[str, Any] = {"client": names, "rows": self.mask.sum(1).numpy()}
            if self.probs is not None and self.labels is not None:
                probs, labels, mask = per_place(self.probs, self.labels.long(), self.mask)
                top = probs.max(-1)
                columns["accuracy"] = share(top.indices == labels, mask).numpy()
                columns["mean confidence"] = share(top.values, mask).numpy()
            return preview(columns, repr(self))
        if self.probs is None:
            found = [("mean", self.mean), ("lower", self.lower), ("upper", self.upper)]
            numbers = {name: t[:, 0].numpy() for name, t in found if t is not None}
            return preview({"row": np.arange(len(self.mask)), **numbers}, repr(self))
        top = self.probs.flatten(0, -2).max(-1)
        names = self.class_names or range(self.probs.shape[-1])
        columns = {
            "row": np.arange(len(top.indices)),
            "class": [names[c] for c in top.indices.tolist()],
            "probability": top.values.numpy(),
        }
        return preview(columns, repr(self))

    @property
    def aleatoric(self) -> Tensor:
        """Return the part of the uncertainty that more data would not remove, of the shape of
        `epistemic`; NaN where that is.

        For classes the entropy less `epistemic`, in nats; under the link `contrasts` this is the
        entropy of softmax(f), or that of `probs` if it is smaller. For regression the noise's
        variance, summed over targets; NaN for intervals, which do not tell it.
        """
        if self.probs is None and self.variance is None:
            return torch.full_like(self.epistemic, torch.nan)
        total = (
            torch.special.entr(self.probs).sum(-1)
            if self.probs is not None
            else _present(self.variance).sum(-1)
        )
        return total - self.epistemic

    def client(self, client: int | str) -> "Predictions":
        """Return one client's predictions alone, without padding: tensors [n_j, ...].

        Args:
            client: The client's name, where names are known, or its number; see `Result.client`.

        Raises:
            TypeError: `client` is neither.
            ValueError: There is no such client, or the predictions are of one client alone.
        """
        if self.mask.dim() != 2:
            raise ValueError(
                f"client {client!r}: these predictions are of one client alone; use them as they "
                "are"
            )
        return of_client(self, place(client, known_names(self.names, len(self.mask))))

    def places(self) -> "Predictions":
        """Return predictions in which each label of an example is an example, [J, N * T], as
        calibration and detection take them.

        Labels that are not known are masked. Predictions with one label for each example are
        returned as they are.

        Raises:
            ValueError: The labels are not known, or the predictions are of one client alone.
        """
        if self.probs is None or self.probs.dim() == self.mask.dim() + 1:
            return self
        if self.labels is None or self.mask.dim() != 2:
            raise ValueError(
                "places() needs predictions of a split of all clients, as "
                "result.predict(clients.test) gives"
            )
        probs, labels, mask = per_place(self.probs, self.labels.long(), self.mask)
        return replace(
            self,
            probs=probs,
            labels=labels,
            mask=mask,
            epistemic=self.epistemic.flatten(1),
            sets=None if self.sets is None else self.sets.flatten(1, 2),
            answered=None if self.answered is None else self.answered.flatten(1, 2),
        )

    def summary(self, split: ClientData) -> dict[str, float]:
        """Compute the measures of `bayesfl.metrics` that apply, with the labels or targets of
        `split`, over clients that have rows.

        Classes by `classification_summary`, label by label where an example has several; numbers by
        `regression_summary`, under the likelihood's distribution; intervals by `interval_summary`.
        With conformal sets or intervals, also `coverage`, the share of examples whose set contains
        the label, or whose intervals contain all targets, and `set_size`, the mean number of
        classes, or `width`. After `Abstention`, also `answered`, the share of examples with an
        answer, and `answered_accuracy`. The prefix `pooled_` marks the same over all clients'
        examples pooled.

        Args:
            split: The split that was predicted.

        Raises:
            ValueError: The predictions are of another split, with other numbers of examples or
                other labels, or of one client alone.
        """
        return self.of_split(split).measured().summary()

    def named_sets(self) -> list[Any]:
        """Return the conformal sets as the names of their classes, or their numbers where classes
        have none, the most probable first.

        Returns:
            For one client a tuple for each row, for several a list of these for each client,
            without padding; of rows with T labels each row has a list of T tuples.

        Raises:
            ValueError: There are no sets.
        """
        if self.sets is None or self.probs is None:
            raise ValueError(
                "there are no sets: make them with result.calibrate(Conformal()), of "
                "bayesfl.evaluation.calibration"
            )
        if self.mask.dim() == 2:
            return [of_client(self, j).named_sets() for j in range(len(self.mask))]
        known = self.class_names or tuple(range(self.sets.shape[-1]))
        order = self.probs.sort(dim=-1, descending=True, stable=True).indices

        def named(held: Any, ranked: Any) -> Any:
            if held and isinstance(held[0], list):
                return [named(*pair) for pair in zip(held, ranked, strict=True)]
            return tuple(known[c] for c in ranked if held[c])

        return [named(*pair) for pair in zip(self.sets.tolist(), order.tolist(), strict=True)]

    @property
    def promise(self) -> float | None:
        """Return the probability that sets or intervals promise, those of a likelihood that
        predicts quantiles of one target too.

        None without any, and for quantiles of several targets, which promise each target and not
        all together.
        """
        if self.level is not None or self.lower is None or self.lower.shape[-1] > 1:
            return self.level
        return 0.9 if self.likelihood is None else getattr(self.likelihood, "level", None)

    def promised(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return for every example whether its set or interval contains the truth, and its size;
        None where there are none.

        Args:
            labels: The labels or targets, [J, N, ...].

        Returns:
            Which hold it, [J, M] bool; the number of classes in the set, or the mean width of the
            intervals, [J, M] in float64; and which places are examples, [J, M] bool. M is N, or N T
            where an example has T labels.
        """
        if self.promise is None:
            return None
        if self.sets is None:
            lower, upper = _present(self.lower).cpu(), _present(self.upper).cpu()
            y = labels.cpu().reshape(lower.shape).double()
            held = ((lower.double() <= y) & (y <= upper.double())).all(-1)
            return (
                held & self.mask.cpu(),
                (upper.double() - lower.double()).mean(-1),
                self.mask.cpu(),
            )
        sets, labels, mask = per_place(self.sets.cpu(), labels.cpu().long(), self.mask.cpu())
        held = sets.gather(-1, labels.masked_fill(~mask, 0).unsqueeze(-1)).squeeze(-1)
        return held & mask, sets.sum(-1).double(), mask

    def _promised(self, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the measures of conformal sets, intervals and answers, of every example, [J, M],
        and which examples count, [J, M] bool.
        """
        measures = {}
        if self.level is not None and (found := self.promised(labels)) is not None:
            held, size, mask = found
            measures = {
                "coverage": (held, mask),
                "set_size" if self.sets is not None else "width": (size, mask),
            }
        if self.answered is not None and self.probs is not None:
            probs, labels, mask = per_place(self.probs.cpu(), labels.long(), self.mask.cpu())
            given = self.answered.cpu().reshape(mask.shape) & mask
            measures |= {
                "answered": (given, mask),
                "answered_accuracy": (probs.argmax(-1) == labels, given),
            }
        return measures

    def of_split(self, split: ClientData) -> "Predictions":
        """Return the predictions with the labels or targets of a split.

        Raises:
            ValueError: The predictions are not of this split.
        """
        labels, mask = (t.cpu() for t in split.padded_labels())
        if not self._is_of(labels, mask):
            raise ValueError(
                f"split, of {len(mask)} clients and {int(mask.sum())} examples, is not the one "
                f"that was predicted, of {int(self.mask.sum())} examples, or has other labels: "
                "pass that, as in result.predict(clients.test).summary(clients.test)"
            )
        return replace(self, labels=labels[:, : self.mask.shape[1]])

    def measured(self) -> Measured:
        """Compute every measure of every client that applies, by the labels that are known."""
        assert self.labels is not None  # of a split
        labels = self.labels
        if self.probs is not None:
            found = measured_classes(*per_place(self.probs, labels.long(), self.mask))
        elif self.variance is None and self.lower is not None:
            level: Any = self.level or (
                0.9 if self.likelihood is None else getattr(self.likelihood, "level", None)
            )
            found = measured_intervals(
                self.lower,
                _present(self.upper),
                labels,
                self.mask,
                level=level,
                middle=self.mean,
            )
        else:
            found = measured_numbers(
                _present(self.mean),
                _present(self.variance),
                labels,
                self.mask,
                distribution=getattr(self.likelihood, "distribution", "normal"),
            )
        return found.beside(self._promised(labels.cpu()))

    def _is_of(self, labels: Tensor, mask: Tensor) -> bool:
        """Say whether a split of these labels and this mask was predicted, as far as clients,
        numbers of examples and, where they are known, labels tell.
        """
        if self.mask.dim() != 2 or len(self.mask) != len(mask):
            return False
        held = self.mask.any(1).cpu()  # predictions before aggregation are of the cohort alone
        if bool((held & (self.mask.sum(1).cpu() != mask.sum(1))).any()):
            return False
        if self.labels is None:
            return True
        own, given = self.labels[self.mask], labels[:, : self.mask.shape[1]][self.mask]
        return own.shape == given.shape and torch.equal(own, given.to(own.dtype))


MEASURES: dict[str, tuple[str, ...]] = {
    "classes": ("accuracy", "nll", "ece", "mce", "brier", "macro_f1", "auroc"),
    "numbers": ("rmse", "nll", "crps", "coverage_50", "coverage_90", "width_90"),
    "intervals": ("rmse", "pinball", "coverage", "width", "interval_score"),
}
"""What is measured of every client, by what it predicts."""


def measures_of(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the names of the measures of every client that predicts under a likelihood."""
    if likelihood.task == "classification":
        return MEASURES["classes"]
    return MEASURES["intervals" if hasattr(likelihood, "level") else "numbers"]


def of_client(predictions: Predictions, j: int) -> Predictions:
    """Return the predictions of the client at place j alone, without padding: tensors
    [n_j, ...].
    """
    inside = predictions.mask[j]
    cut: dict[str, Any] = {
        name: t[j][inside] for name, t in vars(predictions).items() if isinstance(t, Tensor)
    }
    return replace(predictions, names=None, **cut)


def per_place(probs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities [J, N, O], labels and mask [J, N] with each place of an example as an
    example; of one place as they are.

    Args:
        probs: Class probabilities, [J, N, O], or [J, N, T, O] where an example has T labels.
        labels: Labels, [J, N] or [J, N, T]; places of which none is known hold -100, and do not
            count.
        mask: Which rows are examples, [J, N] bool.
    """
    if probs.dim() == 3:
        return probs, labels, mask
    known = labels != IGNORE
    return (
        probs.flatten(1, 2),
        labels.where(known, 0).flatten(1),
        (mask.unsqueeze(-1) & known).flatten(1),
    )


def broken(predictions: Tensors, axes: int = 2) -> Tensor:
    """Say of which examples a prediction is not finite, bool of the first `axes` axes; its parts by
    their source do not count.

    Args:
        predictions: The predictions by name, each [J, N, ...], or [N, ...] of one client.
        axes: Number of the axes that count examples: 2, or 1 of one client.
    """
    read = [t for name, t in predictions.items() if name not in ("epistemic", "aleatoric")]
    return ~torch.stack([t.reshape(*t.shape[:axes], -1).isfinite().all(-1) for t in read]).all(0)


def _present(t: Tensor | None) -> Tensor:
    if t is None:
        raise ValueError(
            "predictions of numbers need mean and variance: let `predictive` of the likelihood "
            "give both"
        )
    return t
