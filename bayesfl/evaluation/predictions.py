"""Predictive distributions of many clients, and their measures."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.targets import IGNORE
from bayesfl.data import ClientData
from bayesfl.data.outline import known_names, place
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.metrics.intervals import measured_intervals
from bayesfl.evaluation.metrics.measured import Measured
from bayesfl.evaluation.metrics.regression import Fitted, measured_numbers
from bayesfl.evaluation.metrics.scores import Scored
from bayesfl.evaluation.metrics.summaries import measured_classes


@dataclass(frozen=True)
class Predictions:
    """Hold predictive distributions for J clients with at most N examples; padding rows are NaN.

    Predictions of one client have no axis of clients; neither have those inside the library, which
    contain all clients' rows, one client's after another's.

    Args:
        mask: Which rows are examples, [J, N] bool.
        epistemic: Uncertainty that more data would remove, [J, N], or [J, N, T] if an example has T
            labels. For classes, in nats: with draws the mutual information of label and weights;
            under the link `contrasts` the entropy added by uncertainty; NaN at the mean, and under
            the link `per_class`. For regression the variance of the means.
        probs: Class probabilities [J, N, O], or [J, N, T, O] if an example has T labels; None for
            regression.
        mean: Predictive means [J, N, O], or the middles of intervals; None for classes.
        variance: Predictive variances [J, N, O], noise included; None for classes and intervals.
        lower: Lower ends of intervals, [J, N, O], from the likelihood `Quantiles` or from
            `Conformal`; None without intervals.
        upper: Upper ends of the intervals.
        sets: Which classes are in the conformal set of an example, [J, N, O] or [J, N, T, O] bool;
            None without sets.
        answered: Which examples are answered after `Abstention`, [J, N] or [J, N, T] bool; None if
            all are.
        level: Nominal coverage of the sets or intervals; None for that of the likelihood's
            intervals.
        risk: Guaranteed maximum share of wrong answers among all clients' `answered` rows together;
            None if all are answered.
        labels: Labels [J, N] or targets [J, N, ...] of the predicted split, by which `summary`
            recognises it; None without labels. Padding rows are 0.
        names: The clients' names, for `client`; None if unknown.
        class_names: One name for each class, see `named_sets`; None for classes without names.
        likelihood: The likelihood, whose distribution the measures of numbers use; None for normal
            distributions.

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
        hidden = ("mask", "labels", *["epistemic"] * none)
        shown = {name: t.shape for name, t in self.tensors.items() if name not in hidden}
        tensors = ", ".join(f"{name} {list(shape)}" for name, shape in shown.items())
        return f"Predictions({many}; {tensors})"

    @property
    def tensors(self) -> Tensors:
        """Return all tensors by name."""
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}

    def at(self, places: Any) -> "Predictions":
        """Return the predictions at an index into the first axes, without names of clients."""
        cut: dict[str, Any] = {name: t[places] for name, t in self.tensors.items()}
        return replace(self, names=None, **cut)

    def rows(self) -> tuple["Predictions", Segments]:
        """Return the rows of all clients without padding, [R, ...], and their clients."""
        return self.at(self.mask), Segments(self.mask.sum(1))

    @property
    def aleatoric(self) -> Tensor:
        """Return the uncertainty that more data would not remove, in the shape of `epistemic`; NaN
        where that is NaN.

        For classes the entropy minus `epistemic`, in nats; under the link `contrasts` this is the
        entropy of softmax(f), or that of `probs` if it is smaller. For regression the noise's
        variance, summed over targets; NaN for intervals, which do not determine it.
        """
        if self.probs is None and self.variance is None:
            return torch.full_like(self.epistemic, torch.nan)
        total = (
            torch.special.entr(self.probs).sum(-1)
            if self.probs is not None
            else present(self.variance).sum(-1)
        )
        return total - self.epistemic

    def client(self, client: int | str) -> "Predictions":
        """Return one client's predictions alone, without padding: tensors [n_j, ...].

        Args:
            client: The client's name, if names are known, or its number; see `Result.client`.

        Raises:
            TypeError: `client` is neither.
            ValueError: There is no such client, or the predictions are of one client alone.
        """
        if self.mask.dim() != 2:
            raise ValueError(
                f"client {client!r}: these predictions are of one client alone; use them as they "
                "are"
            )
        j = place(client, known_names(self.names, len(self.mask)))
        return self.at((j, self.mask[j]))

    def places(self) -> "Predictions":
        """Return predictions with one example for each known label of an example, [J, M], for
        measures of labels.

        Predictions with one label for each example are returned unchanged.

        Raises:
            ValueError: The labels are unknown.
        """
        if self.probs is None or self.probs.dim() == self.mask.dim() + 1:
            return self
        rows, clients, _ = by_place(*self.rows())
        return replace(padded(rows, clients), names=self.names)

    def summary(self, split: ClientData) -> dict[str, float]:
        """Compute the applicable measures of `bayesfl.metrics` with the labels or targets of
        `split`, over clients with rows.

        For classes those of `classification_summary`, label by label where an example has several;
        for numbers, under the likelihood's distribution, `rmse`, `nll`, `crps`, `coverage_50` and
        `coverage_90`; for intervals `rmse`, `pinball`, `coverage`, `width` and `interval_score`.
        With conformal sets or intervals, also `coverage`, the share of examples whose set contains
        the label, or whose intervals contain all targets, and `set_size`, the mean number of
        classes, or `width`. After `Abstention`, also `answered`, the share of examples with an
        answer, and `answered_accuracy`. The prefix `pooled_` marks the same over all clients'
        examples pooled.

        Args:
            split: The predicted split.

        Raises:
            ValueError: The predictions are for another split, with other numbers of examples or
                other labels, or for a single client.
        """
        return measured(*self.of_split(split)).summary()

    def named_sets(self) -> list[Any]:
        """Return the conformal sets as names of classes, or numbers if classes have no names, the
        most probable class first.

        Returns:
            For one client a tuple for each row, for several clients a list of these for each,
            without padding; a row with T labels has a list of T tuples.

        Raises:
            ValueError: There are no sets.
        """
        if self.sets is None or self.probs is None:
            raise ValueError(
                "there are no sets: make them with result.calibrate(Conformal()), of "
                "bayesfl.evaluation.calibration"
            )
        if self.mask.dim() == 2:
            return [self.at((j, mask)).named_sets() for j, mask in enumerate(self.mask)]
        known = self.class_names or tuple(range(self.sets.shape[-1]))
        order = self.probs.sort(dim=-1, descending=True, stable=True).indices

        def named(held: Any, ranked: Any) -> Any:
            if held and isinstance(held[0], list):
                return [named(*pair) for pair in zip(held, ranked, strict=True)]
            return tuple(known[c] for c in ranked if held[c])

        return [named(*pair) for pair in zip(self.sets.tolist(), order.tolist(), strict=True)]

    @property
    def promise(self) -> float | None:
        """Return the nominal coverage of sets or intervals, including those of a likelihood that
        predicts quantiles of one target.

        None without any, and for quantiles of several targets, whose coverage is nominal for each
        target and not jointly.
        """
        if self.level is not None or self.lower is None or self.lower.shape[-1] > 1:
            return self.level
        return 0.9 if self.likelihood is None else getattr(self.likelihood, "level", None)

    def promised(self) -> tuple[Tensor, Tensor] | None:
        """Return for every row whether its set or interval contains the truth, [R] bool, and the
        number of classes in the set, or the mean width of the intervals, [R] in float64; None
        without sets or intervals.
        """
        if self.promise is None:
            return None
        if self.sets is None:
            lower, upper = present(self.lower).double(), present(self.upper).double()
            y = present(self.labels).reshape(lower.shape).double()
            return ((lower <= y) & (y <= upper)).all(-1), (upper - lower).mean(-1)
        return self.sets.gather(-1, present(self.labels)[:, None])[:, 0], self.sets.sum(-1).double()

    def of_split(self, split: ClientData) -> tuple["Predictions", Segments]:
        """Return the rows with the labels or targets of a split, and their clients.

        Raises:
            ValueError: The predictions are not of this split.
        """
        if self.mask.dim() == 2 and len(self.mask) == split.clients:
            rows, clients = self.rows()
            held = clients.counts > 0  # predictions before aggregation are of the cohort alone
            counts = torch.from_numpy(split.counts)
            labels = split.y[split.index].cpu()[held.repeat_interleave(counts)]
            own = labels if rows.labels is None else rows.labels
            if torch.equal(clients.counts, counts * held) and torch.equal(own, labels.to(own)):
                return replace(rows, labels=labels), clients
        raise ValueError(
            f"split, of {split.clients} clients and {len(split.index)} examples, is not the one "
            f"that was predicted, of {int(self.mask.sum())} examples, or has other labels: pass "
            "that, as in result.predict(clients.test).summary(clients.test)"
        )


MEASURES: dict[str, tuple[str, ...]] = {
    "classes": ("accuracy", "nll", "ece", "mce", "brier", "macro_f1", "auroc"),
    "numbers": ("rmse", "nll", "crps", "coverage_50", "coverage_90", "width_90"),
    "intervals": ("rmse", "pinball", "coverage", "width", "interval_score"),
}
"""Names of the measures of every client, by the kind of prediction."""


def measures_of(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the names of the measures of every client that predicts under a likelihood."""
    if likelihood.task == "classification":
        return MEASURES["classes"]
    return MEASURES["intervals" if hasattr(likelihood, "level") else "numbers"]


def by_place(rows: Predictions, clients: Segments) -> tuple[Predictions, Segments, Tensor]:
    """Return predictions with one row for each known label, their clients, and the original row of
    each, [M] int64; unchanged if rows have one label.

    Args:
        rows: The predictions of rows, [R, ...].
        clients: Whose the rows are.
    """
    if rows.probs is None or rows.probs.dim() == 2:
        return rows, clients, torch.arange(len(rows.mask))
    known = present(rows.labels) != IGNORE
    row, _ = known.nonzero(as_tuple=True)
    places = replace(rows, mask=rows.mask.unsqueeze(-1).expand(known.shape)).at(known)
    return places, Segments(clients.sum(known.sum(-1)).long()), row


def measured(rows: Predictions, clients: Segments) -> Measured:
    """Compute every applicable measure of every client from the labels of its rows.

    Args:
        rows: The predictions of rows, [R, ...].
        clients: Whose the rows are.
    """
    rows, clients, _ = by_place(rows, clients)
    labels, shares = present(rows.labels), {}
    if rows.level is not None and (promised := rows.promised()) is not None:
        held, size = promised
        sized = "set_size" if rows.sets is not None else "width"
        shares = {"coverage": (held, rows.mask), sized: (size, rows.mask)}
    if rows.probs is not None:
        scored = Scored.of_rows(clients, rows.probs, labels.long())
        found = measured_classes(scored)
        if (given := rows.answered) is not None:
            shares |= {"answered": (given, rows.mask), "answered_accuracy": (scored.hits, given)}
    elif rows.variance is None and rows.lower is not None:
        level: Any = rows.level or getattr(rows.likelihood, "level", 0.9)
        y = labels.reshape(rows.lower.shape)
        ends = rows.lower, present(rows.upper), y, present(rows.mean)
        found = measured_intervals(clients, *ends, level=level)
    else:
        numbers = present(rows.mean), present(rows.variance)
        kind: Any = getattr(rows.likelihood, "distribution", "normal")
        y = labels.reshape(numbers[0].shape)
        found = measured_numbers(Fitted.of_rows(clients, *numbers, y, kind))
    return found.beside(clients, shares)


def padded(rows: Predictions, clients: Segments) -> Predictions:
    """Return the predictions of rows with an axis of clients, padded to the longest, [J, N, ...].

    Args:
        rows: The predictions of rows, [R, ...].
        clients: Whose the rows are.
    """
    found: dict[str, Any] = {
        name: clients.padded(t, torch.nan if t.is_floating_point() and name != "labels" else 0)
        for name, t in rows.tensors.items()
    }
    return replace(rows, **found)


def broken(predictions: Tensors) -> Tensor:
    """Return which rows have a prediction that is not finite, [R] bool; the epistemic and aleatoric
    parts do not count.

    Args:
        predictions: The predictions by name, each [R, ...].
    """
    read = [t for name, t in predictions.items() if name not in ("epistemic", "aleatoric")]
    return ~torch.stack([t.isfinite().unsqueeze(-1).flatten(1).all(-1) for t in read]).all(0)


def present(t: Tensor | None) -> Tensor:
    """Return a tensor; None is an error.

    Raises:
        ValueError: It is None.
    """
    if t is None:
        raise ValueError(
            "predictions of numbers need mean and variance: let `predictive` of the likelihood "
            "give both"
        )
    return t
