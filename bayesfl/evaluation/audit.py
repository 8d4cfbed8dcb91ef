"""Audits: coverage and accuracy by client, label or group, with exact intervals, beside the
guaranteed level.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.display.sheet import Sheet, Shown
from bayesfl.base.options import declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Ask, NotNegative, together
from bayesfl.data import ClientData, FederatedData
from bayesfl.data.tables.texts import in_order
from bayesfl.evaluation.binomial import clopper_pearson, worst_by_chance
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.metrics.reliability import bin_of, error_in_bins
from bayesfl.evaluation.predictions import by_place, present
from bayesfl.evaluation.surveys import LocalPredictions, Outputs

BINS = 15
"""Bins of confidence of the calibration error, as of `bayesfl.metrics.ece`."""
Unit: TypeAlias = Literal["client", "label", "group"]
Groups: TypeAlias = Sequence[Sequence[Any]] | Callable[[Any], Any] | str
"""Groups of rows: for each client the group of every row, a function that computes them from a
client's inputs, or a column of the frame.
"""
COARSE = 1e4
"""Largest standard deviation of a column whose whole numbers are recovered exactly from its inputs.
"""
_SHARES = ("coverage", "accuracy", "answered", "answered_accuracy")


@dataclass(frozen=True, eq=False, repr=False)
class Audit(Shown):
    """Report coverage and accuracy of each client, label or group, with exact intervals.

    Args:
        by: Kind of the units: `client`, `label` or `group`.
        units: Names of the G units.
        rows: Numbers of examples, [G]; of labels, if an example has several. Such labels are not
            independent, so that intervals are too narrow.
        level: Guaranteed coverage of sets or intervals; None without any.
        delta: Probability with which any of the intervals of a column may miss.
        held: Numbers of examples whose set or interval contains the truth, [G]; None without sets.
        size: Mean number of classes in a set, or mean width of an interval, [G]; None without sets.
        right: Numbers of right predictions, [G]; None for numbers.
        ece: Expected calibration errors, [G]; None for numbers, and by label.
        rmse: Roots of mean squared errors, [G]; None for classes.
        risk: Guaranteed maximum share of wrong answers, for all rows together; None if all rows are
            answered.
        answered: Numbers of answered examples, [G]; None if all are answered.
        answered_right: Numbers of right answers among these, [G].
        examples: Number of examples that are in a unit; fewer than the sum of `rows` where an
            example has several labels.
        left_out: Number of examples, or labels, without a unit.
        pooled_ece: Expected calibration error of all these rows together, as in a reliability
            diagram; None if `ece` is None.
    """

    by: Unit
    units: tuple[str, ...]
    rows: np.ndarray
    level: float | None
    delta: float
    held: np.ndarray | None = None
    size: np.ndarray | None = None
    right: np.ndarray | None = None
    ece: np.ndarray | None = None
    rmse: np.ndarray | None = None
    risk: float | None = None
    answered: np.ndarray | None = None
    answered_right: np.ndarray | None = None
    examples: int | None = None
    left_out: int = 0
    pooled_ece: float | None = None

    @property
    def coverage(self) -> np.ndarray | None:
        """Return the share of each unit's examples whose set or interval contains the truth, [G];
        NaN without examples.
        """
        return None if self.held is None else _share(self.held, self.rows)

    @property
    def accuracy(self) -> np.ndarray | None:
        """Return the share of right predictions of each unit, [G]; NaN without examples."""
        return None if self.right is None else _share(self.right, self.rows)

    def intervals(self, counts: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
        """Return Clopper-Pearson intervals of shares, [G, 2], that all cover together with a
        probability of at least 1 - `delta`.

        Each misses with probability delta / G (Bonferroni), G the number of units with examples.

        Args:
            counts: Numbers of successes, [G], such as `held` or `right`.
            among: Numbers of examples, [G]; None for `rows`.
        """
        rows = self.rows if among is None else among
        return clopper_pearson(counts, rows, self.delta / max(1, int((rows > 0).sum())))

    @property
    def below(self) -> tuple[str, ...]:
        """Return the units whose coverage is significantly below the guaranteed level: their whole
        interval lies below it.

        The interval is conditional on the calibration rows. Conformal coverage is guaranteed on
        average over these: if a client's n own rows set its threshold, as under `shrink=0`, its
        coverage has a standard deviation of about sqrt(level (1 - level) / n), which the interval
        does not include.
        """
        if self.held is None or self.level is None:
            return ()
        return tuple(
            name
            for name, high in zip(self.units, self.intervals(self.held)[:, 1], strict=True)
            if high < self.level
        )

    @property
    def worst_by_chance(self) -> float:
        """Return the expected lowest measured coverage if every unit has exactly the guaranteed
        one; NaN without sets.
        """
        return float("nan") if self.level is None else worst_by_chance(self.rows, self.level)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the audit as columns [G] for a data frame; the ends of a share's interval are in
        the columns with `_low` and `_high`.
        """
        found: dict[str, np.ndarray] = {self.by: np.array(self.units), "rows": self.rows}
        for name, counts, among in (
            ("coverage", self.held, None),
            ("accuracy", self.right, None),
            ("answered", self.answered, None),
            ("answered_accuracy", self.answered_right, self.answered),
        ):
            if counts is not None:
                low, high = self.intervals(counts, among).T
                found |= {
                    name: _share(counts, self.rows if among is None else among),
                    f"{name}_low": low,
                    f"{name}_high": high,
                }
        size = {"size": self.size} if self.right is not None else {"width": self.size}
        return found | {
            name: t
            for name, t in {**size, "ece": self.ece, "rmse": self.rmse}.items()
            if t is not None
        }

    def sheet(self) -> Sheet:
        """Return the audit as a table, with notes on chance below it."""
        columns = self.columns()
        shown = {
            name: [_text(name, value) for value in values]
            for name, values in columns.items()
            if not name.endswith(("_low", "_high"))
        }
        for name in shown.keys() & {*_SHARES}:
            ends = zip(columns[f"{name}_low"], columns[f"{name}_high"], strict=True)
            shown[name] = [
                f"{share}  {low:.2f} to {high:.2f}"
                for share, (low, high) in zip(shown[name], ends, strict=True)
            ]
        return Sheet(shown, notes=tuple(self._said()))

    def _pooled(self, counts: int, rows: int) -> str:
        low, high = clopper_pearson(np.array(counts), np.array(rows), self.delta)
        return f"{counts / rows:.2f}, {low:.2f} to {high:.2f} with probability {1 - self.delta:g}"

    def _said(self) -> list[str]:
        units = int((self.rows > 0).sum())
        said = [f"All intervals of a column hold together with probability {1 - self.delta:g}."]
        if self.level is not None and units:
            said += [
                f"Nominal coverage {self.level:g}."
                + (
                    " With exact coverage everywhere, the lowest observed coverage would average "
                    f"{self.worst_by_chance:.2f}."
                    if units > 1
                    else ""
                ),
                f"Significantly below it: {', '.join(self.below) or 'none'}.",
                "All rows together: "
                f"{self._pooled(int(np.asarray(self.held).sum()), int(self.rows.sum()))}.",
            ]
        if self.pooled_ece is not None and units > 1:
            mean = float(np.asarray(self.ece)[self.rows > 0].mean())
            said.append(f"ECE, pooled {self.pooled_ece:.3f}; ECE, {self.by}s' mean {mean:.3f}.")
        if self.risk is not None and (answers := int(np.asarray(self.answered).sum())):
            wrong = answers - int(np.asarray(self.answered_right).sum())
            said += [
                f"Wrong among all {answers} answers: {self._pooled(wrong, answers)}; nominal: at "
                f"most {self.risk:g}."
            ]
        if self.examples is not None and self.examples < self.rows.sum():
            said.append(
                "Rows are labels, several of an example, which are not independent: the intervals "
                "are too narrow."
            )
        if self.left_out:
            said.append(f"{self.left_out} rows of no group are left out.")
        return said


@dataclass(frozen=True, eq=False)
class Counting:
    """Survey the counts and sums of every unit for an audit, added over clients.

    Args:
        by: What the units are.
        units: Their names.
        split: The split that is predicted.
        groups: The unit of every row, [R], -1 of rows without one. None of clients and labels.
    """

    by: Unit
    units: tuple[str, ...]
    split: str = "test"
    groups: Tensor | None = None

    def openly(self, local: LocalPredictions) -> Ask:
        """Return the function that asks clients on this machine in the clear: their rows are
        counted as those of one client, so that no client's answer has the other clients' units.
        """
        one = Segments(local.clients.counts.sum()[None])
        local_of_one = replace(local, clients=one, ids=np.zeros(1, np.int64))
        return together(replace(self, groups=self._groups(local)), local_of_one)

    def _groups(self, local: LocalPredictions) -> Tensor:
        """Return the unit of every row, [R]; of labels 0."""
        if self.groups is not None:
            return self.groups
        owner = local.clients.owner
        return torch.from_numpy(local.ids)[owner] if self.by == "client" else 0 * owner

    def start(self, outputs: Outputs) -> Tensors:
        """Return the initial state: whether classes are predicted.

        Raises:
            ValueError: A regression is audited by label.
        """
        if self.by == "label" and outputs.task != "classification":
            raise ValueError(
                "by='label' audits each class, and this is a regression; take by='client', or "
                "groups="
            )
        return {"classes": torch.tensor(outputs.task == "classification")}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of counts and sums by unit, and by unit and bin of confidence."""
        units = len(self.units)
        common: dict[str, tuple[int, ...]] = {
            "n_rows": (units,),
            "n_held": (units,),
            "n_endless": (units,),
            "size": NotNegative((units,)),
            "n_examples": (),
            "n_left_out": (),
        }
        if not bool(state["classes"]):
            return common | {"squares": NotNegative((units,))}
        return common | {
            "n_answered": (units,),
            "n_answered_right": (units,),
            "n_bin": (units, BINS),
            "n_bin_right": (units, BINS),
            "confidence": NotNegative((units, BINS)),
        }

    def answer(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return each client's counts and sums, [J, G] and [J, G, BINS]."""
        given, clients, row = by_place(local.predictions, local.clients)
        units, groups = len(self.units), self._groups(local)
        labels = present(given.labels)
        of_row = local.clients.sum((row.bincount(minlength=len(groups)) > 0) & (groups >= 0))
        inside, unit = groups[row] >= 0, groups[row]
        unit = (labels if self.by == "label" else unit).long().clamp_min(0)

        def summed(values: Tensor, place: Tensor = unit, size: int = units) -> Tensor:
            return clients.count(place, size, values.double().masked_fill(~inside, 0.0))

        held, size = given.promised() or (torch.zeros_like(inside), torch.zeros(len(unit)))
        endless = ~size.isfinite()
        found = {
            "n_examples": of_row,
            "n_left_out": clients.sum(~inside),
            "n_rows": summed(inside),
            "n_held": summed(held),
            "n_endless": summed(endless),
            "size": summed(size.masked_fill(endless, 0.0)),
        }
        if given.probs is None:
            centre = present(given.mean).double()
            error = labels.reshape(centre.shape).double() - centre
            return found | {"squares": summed(error.square().mean(-1))}
        top, best = given.probs.max(-1)
        bins = unit * BINS + bin_of(top.double().nan_to_num(nan=0.0), BINS)
        right = best == labels
        answered = inside if given.answered is None else given.answered

        def by_bin(values: Tensor) -> Tensor:
            return summed(values, bins, units * BINS).view(-1, units, BINS)

        return found | {
            "n_answered": summed(answered),
            "n_answered_right": summed(answered & right),
            "n_bin": by_bin(inside),
            "n_bin_right": by_bin(right),
            "confidence": by_bin(top),
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the sums over clients."""
        return {**state, **total}, True

    def audit(
        self, state: Tensors, *, level: float | None, risk: float | None, delta: float
    ) -> Audit:
        """Return the audit from the survey's last state.

        Args:
            state: The sums over clients.
            level: Guaranteed coverage of sets or intervals; None without any.
            risk: The guaranteed maximum share of wrong answers; None where all rows are answered.
            delta: Probability with which any of the intervals of a column may miss, in (0, 1).
        """
        sums = {name: t.numpy() for name, t in state.items()}
        rows = sums["n_rows"]
        found: dict[str, Any] = {
            "examples": int(sums["n_examples"]),
            "left_out": int(sums["n_left_out"]),
        }
        if level is not None:
            found |= {
                "held": sums["n_held"].astype(np.int64),
                "size": np.where(sums["n_endless"] > 0, np.inf, _share(sums["size"], rows)),
            }
        if "n_bin" in sums:
            found["right"] = sums["n_bin_right"].sum(-1).astype(np.int64)
            if risk is not None:
                found |= {
                    name: sums[f"n_{name}"].astype(np.int64)
                    for name in ("answered", "answered_right")
                }
            if self.by != "label":
                # Among rows of one label even a calibrated model is wrong by its confidence.
                count, hits, confidence = (
                    state[name].double() for name in ("n_bin", "n_bin_right", "confidence")
                )
                found["ece"] = error_in_bins(count, hits, confidence).numpy()
                found["pooled_ece"] = float(
                    error_in_bins(count.sum(0), hits.sum(0), confidence.sum(0))
                )
        else:
            found["rmse"] = np.sqrt(_share(sums["squares"], rows))
        return Audit(self.by, self.units, rows.astype(np.int64), level, delta, risk=risk, **found)


@declared
def units(
    data: FederatedData,
    split: str,
    rows: ClientData,
    by: Literal["client", "label"],
    groups: Groups | None,
) -> Counting:
    """Return the survey of an audit, with the units that are the rows of its table.

    Args:
        data: The federation's data.
        split: Name of the split that is audited.
        rows: The split.
        by: `client` or `label`; `client` if there are groups.
        groups: Groups of the split's rows; None for none.

    Raises:
        ValueError: `groups` does not fit.
    """
    if groups is None and by == "label":
        return Counting("label", tuple(data.class_names or map(str, range(data.outputs))), split)
    if groups is None:
        return Counting("client", tuple(data.client_names), split)
    groups = _by_column(data, groups) if isinstance(groups, str) else groups
    each = (
        [groups(rows.client(j, raw=True)[0]) for j in range(data.clients)]
        if callable(groups)
        else groups
    )
    names, places = grouped(each, rows.counts)
    return Counting("group", names, split, places)


def _by_column(data: FederatedData, name: str) -> Callable[[Any], Any]:
    """Return the function from a client's inputs to the values of a column of the frame.

    Raises:
        ValueError: The data are not from a frame, lack the column, or its numbers are too far
            apart.
    """
    columns: Any = data.prepared
    if any(getattr(part, "scale", 0.0) > COARSE for part in columns.parts if part.name == name):
        raise ValueError(
            f"the column {name!r} has numbers so far apart that small ones cannot be recovered "
            "from the inputs, such as codes beside 999999: pass a list of groups for each client"
        )
    return lambda x: columns.values(x, name)


def grouped(
    groups: Sequence[Sequence[object]], counts: np.ndarray
) -> tuple[tuple[str, ...], Tensor]:
    """Return the sorted names of groups, and the index of every row's group, [R], one client after
    another; -1 for no group.

    Args:
        groups: For each client the group of every row, as text, numbers or bools; None or NaN for
            no group.
        counts: The clients' numbers of rows, [J].

    Raises:
        ValueError: The number of clients, or of a client's rows, differs.
    """
    each = [np.asarray(own, dtype=object) for own in groups]
    if [own.shape for own in each] != [(n,) for n in counts]:
        raise ValueError(
            f"groups must have a list for each of {len(counts)} clients, with a group for each of "
            f"its rows, {counts.tolist()}; got arrays of shape {[list(own.shape) for own in each]}"
        )
    texts = [_text_of(group) for own in each for group in own.tolist()]
    names = in_order({one for one in texts if one is not None})
    known = {None: -1} | {name: place for place, name in enumerate(names)}
    return names, torch.tensor([known[one] for one in texts], dtype=torch.int64)


def _text_of(group: Any) -> str | None:
    """Return a row's group as text, whole numbers without a decimal point; None for no group."""
    group = group.item() if isinstance(group, Tensor | np.generic) else group
    if group is None or group != group:
        return None
    return str(int(group) if isinstance(group, float) and group.is_integer() else group)


def _share(counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rows > 0, counts / rows, np.nan)


def _text(name: str, value: Any) -> str:
    """Return a cell of a table: shares to two decimals, an ECE to three, as in a reliability
    diagram, other fractions to three digits.
    """
    if isinstance(value, str | np.str_ | int | np.integer):
        return str(value)
    form = ".3f" if name == "ece" else ".2f" if name in (*_SHARES, "size") else ".3g"
    return "-" if np.isnan(value) else f"{value:{form}}"
