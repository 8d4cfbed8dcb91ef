"""The table of a study: options chosen by validation data, means over seeds with their errors,
paired differences, and differences in the methods' training.
"""

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bayesfl.base.described import digest_of
from bayesfl.base.display.html import Cell
from bayesfl.base.display.sheet import Sheet, Shown
from bayesfl.base.options import nearest
from bayesfl.base.warning import warn
from bayesfl.evaluation import report
from bayesfl.evaluation.report import Column
from bayesfl.federation.run.result import Result
from bayesfl.federation.store.identity import identity
from bayesfl.study.budget import BUDGET
from bayesfl.study.cells import SUFFIX, Record, by_client, record_of, recorded
from bayesfl.study.grid import Grid, edges
from bayesfl.study.reporting import write_report
from bayesfl.study.settings import Labelled, labels, value_in_words

SHOWN = ("accuracy", "rmse", "nll", "pinball", "ece", "pooled_ece", "brier")
"""Measures that a table shows where its cells have them."""
UNCOVERED = (
    "under ClientPrivacy no options are chosen, as exact measures of the clients' validation data "
    "are not covered by its epsilon; give one value of each option"
)
"""The reason why a private study does not choose."""
LOSSES = ("validation_nll", "validation_pinball")
"""Default measures for choosing options: the first that the cells have."""


class Estimate(NamedTuple):
    """A mean over seeds.

    Args:
        mean: The mean.
        error: Its standard error, std(ddof=1) / sqrt(seeds); NaN for one seed.
        seeds: Number of seeds.
    """

    mean: float
    error: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


class Summary(Shown, dict[str, dict[str, Estimate]]):
    """Means over seeds, by method and measure; `print` shows them as a table.

    Args:
        runs: {method: {measure: one value a seed}}.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
        >>> runs = {"FedAvg": bf.simulate(method, clients, rounds=1)}
        >>> "personal_accuracy" in bf.table(runs).summary()["FedAvg"]
        True
    """

    def __init__(self, runs: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        super().__init__()
        self.runs = runs
        for method, of in runs.items():
            self[method] = {
                measure: Estimate(*report.mean_and_error(values), len(values))
                for measure, values in of.items()
            }

    def sheet(self) -> Sheet:
        """Return the table of means and errors."""
        return report.table(self.runs)


@dataclass(frozen=True)
class Row:
    """One run in a table.

    Args:
        method: The method's name.
        options: The options that the study set.
        seed: The seed.
        record: What is kept of the run.
        load: Function that returns the whole result; None where it was not kept.
    """

    method: str
    options: Mapping[str, Any]
    seed: int
    record: Record
    load: Callable[[], Result] | None

    def measures(self, at: Literal["last", "best"], by: str | None) -> dict[str, Any]:
        """Return the row of the history that counts: the last evaluated one, or the one with the
        best value of `by`; empty if no row was evaluated.
        """
        history = self.record.history
        rows = [row for row in history if any(key.startswith("personal_") for key in row)]
        if not rows:
            return {}
        return history.best(by) if at == "best" and by is not None else rows[-1]

    def clients(self) -> Mapping[str, list[Any]] | None:
        """Return every measure of test data by client, {measure: [J]}, after the last round."""
        if self.record.clients is None and self.load is not None:
            return by_client(self.load())
        return self.record.clients


@dataclass(frozen=True, repr=False)
class Table:
    """The runs of a study, or of results that are compared.

    Where a method has several options, its measures are those of the options that `chosen` takes.

    Args:
        rows: The runs.
        grid: The options that each method was tried with.
        rounds: Number of rounds.
        notes: Notes for readers, one sentence each.
        at: The round that counts, see `chosen`.
        by: The measure that chose options, and the best round; None if nothing was chosen.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
        >>> runs = {"FedAvg": bf.simulate(method, clients, rounds=1)}
        >>> bf.table(runs).methods
        ('FedAvg',)
    """

    rows: tuple[Row, ...]
    grid: Mapping[str, Grid] = field(default_factory=dict)
    rounds: int = 1
    notes: tuple[str, ...] = ()
    at: Literal["last", "best"] = "last"
    by: str | None = None

    def __repr__(self) -> str:
        failed = sum(row.record.error is not None for row in self.rows)
        told = f"Table({len(self.rows)} runs of {', '.join(self.methods)}"
        line = told + (f"; {failed} failed" if failed else "") + ")"
        return f"{line}\n{self._choices()}" if self.by else line

    def __str__(self) -> str:
        return self._written(str)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a report of the study: one page of HTML that needs no other file.

        It has the table of means over seeds, learning curves, the chosen options, what a client
        computes and sends, all runs, and the environment.

        Args:
            path: The file, as `report.html`.

        Raises:
            ValueError: As by `chosen`.

        Example:
            >>> from pathlib import Path
            >>> from tempfile import mkdtemp
            >>> import bayesfl as bf
            >>> clients = bf.data.iid("digits", clients=4)
            >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
            >>> method = bf.algorithms.fedavg(model)
            >>> runs = [bf.simulate(method, clients, rounds=2, seed=s) for s in range(2)]
            >>> path = Path(mkdtemp()) / "report.html"
            >>> bf.table({"FedAvg": runs}).report(path)
            >>> "FedAvg" in path.read_text()
            True
        """
        write_report(path, self._settled())

    def to_markdown(self) -> str:
        """Return the table in Markdown: measures, budgets and settings that differ, and notes.

        Raises:
            ValueError: As by `chosen`.
        """
        return self._written(Sheet.to_markdown)

    def to_latex(self, columns: Sequence[str] | None = None) -> str:
        r"""Return the means and standard errors in LaTeX as a paper has them, for
        `\usepackage{booktabs}`: the best mean of each measure in bold, and a dagger behind others
        that are not told apart from it by a paired t test at 5 % over seeds.

        Args:
            columns: As in `summary`.

        Raises:
            ValueError: As by `summary`.

        Example:
            >>> clients = bf.data.iid("digits", clients=2)
            >>> net = bf.models.mlp(64, hidden=4, outputs=10)
            >>> made = {"FedAvg": bf.algorithms.fedavg(net), "Local": bf.algorithms.local(net)}
            >>> runs = {name: bf.simulate(one, clients, rounds=1) for name, one in made.items()}
            >>> bf.table(runs).to_latex(["personal_nll"]).splitlines()[0]
            '\\begin{tabular}{lr}'
        """
        runs = self.summary(columns).runs
        shown = [Column(key, better=report.better(key)) for of in runs.values() for key in of]
        alike = [
            (method, column.key)
            for column in dict.fromkeys(shown)
            for method in self._alike(column)
        ]
        found = report.table(runs, columns=list(dict.fromkeys(shown)), marks=alike)
        note = "Best means in bold. † Not told apart from the best: paired t test over seeds, 5 %."
        return replace(found, notes=(note,) if alike else ()).to_latex()

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the names of the methods."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def options(self) -> dict[str, Mapping[str, Any]]:
        """Return the options of each method.

        Raises:
            ValueError: As by `chosen`.
        """
        return {row.method: row.options for row in self._settled().rows}

    def chosen(
        self, measure: str | None = None, *, at: Literal["last", "best"] = "last"
    ) -> "Table":
        """Return the table with one choice of options for each method: that with the best mean of a
        validation measure over all seeds.

        Options with a failed run are not chosen. A method without successful options has no rows.
        Test data never choose.

        Args:
            measure: A column of the history that begins with `validation_`; None for
                `validation_nll`, of intervals `validation_pinball`.
            at: The round that counts, for the choice and for all measures: the `last`, or for each
                run the `best` by the validation measure.

        Raises:
            ValueError: The data have no validation split, no run succeeded, or `measure` is of
                other data or has no known best direction.
        """
        by = self._judge(measure)
        kept: list[Row] = []
        for method in self.methods:
            tried = self._tried(method)
            if len(tried) == 1:
                kept += tried[0]
                continue
            values = np.array(
                [
                    np.mean([row.measures(at, by).get(by, math.nan) for row in rows])
                    if all(row.record.error is None for row in rows)
                    else math.nan
                    for rows in tried
                ]
            )
            if np.isfinite(values).any():
                lowest = report.better(by) == "lower"
                kept += tried[int(np.nanargmin(values) if lowest else np.nanargmax(values))]
        return replace(self, rows=tuple(kept), notes=(*self.notes, *self._failures()), at=at, by=by)

    def summary(self, columns: Sequence[str] | None = None) -> Summary:
        """Return mean and standard error over seeds of the methods' measures.

        Args:
            columns: Columns of the history, as `personal_nll`; None for the usual ones of test
                data.

        Raises:
            ValueError: No run has such a column; or as by `chosen`.
        """
        table = self._settled()
        wanted = table._columns(columns)
        rows = [(row.method, row.measures(table.at, table.by)) for row in table.rows]
        return Summary(
            {
                method: {
                    column: [row[column] for name, row in rows if name == method and column in row]
                    for column in wanted
                    if any(name == method and column in row for name, row in rows)
                }
                for method in table.methods
            }
        )

    def differences(self, reference: str, columns: Sequence[str] | None = None) -> Summary:
        """Return how far the other methods are above one, paired: mean and standard error of the
        differences seed by seed, on the same data.

        Args:
            reference: The method that the others are compared with.
            columns: As in `summary`.

        Raises:
            ValueError: There is no such method, or it has no seed on the same data as another; or
                as by `summary`.
        """
        table = self._settled()
        wanted = table._columns(columns)
        values: dict[str, dict[str, list[float]]] = {}
        for method in (name for name in table.methods if name != reference):
            pairs = [
                (one.measures(table.at, table.by), other.measures(table.at, table.by))
                for one, other in table.pairs(reference, method)
            ]
            values[method] = {
                column: [other[column] - one[column] for one, other in pairs]
                for column in wanted
                if all(column in row for pair in pairs for row in pair)
            }
        return Summary(values)

    def pairs(self, one: str, other: str) -> list[tuple[Row, Row]]:
        """Return the runs of two methods seed by seed, on the same data.

        Raises:
            ValueError: There is no such method, or they have no seed on the same data; or as by
                `chosen`.
        """
        table = self._settled()
        found = [
            {(row.seed, row.record.data): row for row in table._of(name) if not row.record.error}
            for name in (one, other)
        ]
        shared = [key for key in found[0] if key in found[1]]
        if not shared:
            raise ValueError(
                f"{one} and {other} have no seed on the same data, so they cannot be paired; train "
                "both on the same clients"
            )
        return [(found[0][key], found[1][key]) for key in shared]

    def result(self, method: str, seed: int) -> Result:
        """Return the whole result of a method after its last round, at its chosen options.

        Raises:
            ValueError: There is no such run, it failed, or it was not kept; or as by `chosen`.
        """
        table = self._settled()
        found = [row for row in table._of(method) if row.seed == seed]
        if not found:
            raise ValueError(
                f"{method} has no seed {seed}; its seeds are "
                f"{sorted({row.seed for row in table._of(method)})}"
            )
        if found[0].load is None:
            error = found[0].record.error
            raise ValueError(
                f"the run of {method} with seed {seed} "
                + (
                    "was not kept; run the study with keep='result'"
                    if error is None
                    else f"failed: {_error(error)}"
                )
            )
        return found[0].load()

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each run, of all options that were tried: what was
        set, the measures of the round that counts, budget, time and error.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"method": row.method}
                | {
                    f"option_{name}": value
                    if isinstance(value, int | float | str | None)
                    else value_in_words(value, self.rounds)
                    for name, value in row.options.items()
                }
                | {"seed": row.seed}
                | row.measures(self.at, self.by)
                | dict(row.record.budget)
                | {
                    "seconds": row.record.seconds,
                    "commit": row.record.environment.get("commit"),
                    "error": None if row.record.error is None else row.record.error["class"],
                }
                for row in self.rows
            ]
        )

    def _of(self, method: str) -> list[Row]:
        """Return the runs of a method.

        Raises:
            ValueError: There are none.
        """
        if method not in self.methods:
            raise ValueError(
                f"there is no run of a method {method!r}; the nearest are "
                f"{nearest(method, self.methods, 3)}"
            )
        return [row for row in self.rows if row.method == method]

    def _settled(self) -> "Table":
        """Return the table with one choice of options a method, by default where none is made."""
        several = any(len(self._tried(method)) > 1 for method in self.methods)
        return self.chosen() if several else self

    def _tried(self, method: str) -> list[list[Row]]:
        """Return the runs of a method by its options."""
        found: dict[int, list[Row]] = {}
        for row in self._of(method):  # runs of one choice share the mapping, whatever it holds
            found.setdefault(id(row.options), []).append(row)
        return list(found.values())

    def _judge(self, measure: str | None) -> str:
        """Return the validation measure that chooses."""
        self._refuse_failed()
        there = list(dict.fromkeys(c for row in self.rows for c in row.record.history.columns))
        private = "epsilon" in there  # which covers no measure of the clients
        known = [c for c in there if c.startswith("validation_") and not private]
        by = next((c for c in LOSSES if c in known), None) if measure is None else measure
        if not known:
            raise ValueError(
                UNCOVERED
                if private
                else "options are chosen on validation data, never on test data, and there are no "
                "measures of validation data; give the data a validation split, as in "
                "partial(bf.data.dirichlet, 'digits', validation=0.2)"
            )
        if by not in known or report.better(by) is None:
            raise ValueError(
                f"options are chosen on validation data, never on test data, and {by!r} is no "
                "validation measure of these runs with a known best; the nearest are "
                f" {nearest(str(by), [c for c in known if report.better(c)], 4)}"
            )
        return by

    def _columns(self, columns: Sequence[str] | None) -> list[str]:
        self._refuse_failed()
        found = [row.measures(self.at, self.by) for row in self.rows]
        there = list(dict.fromkeys(key for row in found for key in row))
        if columns is None:
            usual = [f"personal_{name}" for name in SHOWN if f"personal_{name}" in there]
            if not usual:
                raise ValueError("no run was evaluated; evaluate them, with evaluate_every=1")
            return usual
        columns = [columns] if isinstance(columns, str) else columns
        if strangers := [column for column in columns if column not in there]:
            raise ValueError(
                f"no run has the measure {strangers[0]!r}; the nearest are "
                f"{nearest(strangers[0], sorted(there, key=lambda c: c[:9] != 'personal_'), 4)}"
            )
        return list(columns)

    def _alike(self, column: Column) -> list[str]:
        """Return the methods that do not differ significantly from the best mean of a column."""
        from scipy import stats

        means = {method: of[column.key].mean for method, of in self.summary([column.key]).items()}
        if column.better is None or len(means) < 2:
            return []
        best = (max if column.better == "higher" else min)(means, key=lambda one: means[one])
        alike = []
        for method in means.keys() - {best}:
            with contextlib.suppress(ValueError):  # of runs on other data
                pairs = [
                    other.measures(self.at, self.by)[column.key]
                    - one.measures(self.at, self.by)[column.key]
                    for one, other in self.pairs(best, method)
                ]
                mean, error = report.mean_and_error(pairs)
                if abs(mean) <= float(stats.t.ppf(0.975, len(pairs) - 1)) * error:
                    alike.append(method)
        return alike

    def _written(self, form: Callable[[Sheet], str]) -> str:
        try:
            table = self._settled()
            means = table._means()
        except ValueError as error:  # which `print` should show, not raise
            return f"{self!r}\n{error}"
        sheets = (means, table._budgets(), table._choices(), table._remarks())
        return "\n\n".join(told for told in map(form, sheets) if told)

    def _means(self) -> Sheet:
        """Return the table of means, with the accuracy of always answering the most frequent class
        where methods have one.
        """
        runs = dict(self.summary().runs)
        often = {
            (row.seed, row.record.data): row.record.often
            for row in self.rows
            if row.record.often is not None
        }
        if often and any("personal_accuracy" in of for of in runs.values()):
            runs["most frequent class"] = {"personal_accuracy": [*often.values()]}
        return report.table(runs)

    def _budgets(self) -> Sheet:
        """Return the table of a training client's steps and bytes in a round, and of the settings
        that differ between methods.
        """
        done: dict[str, list[Record]] = {}
        for row in self.rows:
            if row.record.error is None:
                done.setdefault(row.method, []).append(row.record)
        told: dict[str, dict[str, Any]] = {}
        for method, records in done.items():
            means = {
                key: float(np.mean([r.budget[key] for r in records]))
                for key in BUDGET
                if key in records[0].budget and not np.isnan(records[0].budget[key])
            }
            told[method] = {
                key: Cell(mean, f"{mean:,.{BUDGET[key]}f}") for key, mean in means.items()
            }
            told[method] |= {
                key: ", ".join(dict.fromkeys(r.settings[key] for r in records))
                for key in records[0].settings
            } | {"seeds": str(len(records))}
            if told[method]["data"].count(",") > 1:
                told[method]["data"] = f"{told[method]['data'].count(',') + 1} data sets"
        shown = [
            key
            for key in dict.fromkeys(key for row in told.values() for key in row)
            if key in BUDGET or len({row.get(key) for row in told.values()}) > 1
        ]
        columns = {
            report.in_prose(key): [row.get(key, "-") for row in told.values()] for key in shown
        }
        return Sheet({"per training client and round": list(told), **columns})

    def _choices(self) -> Sheet:
        """Return the chosen options, with a note for values on the edge of a grid."""
        lines = []
        for row in {row.method: row for row in self.rows}.values():
            grid = self.grid.get(row.method, {})
            ends = edges(grid, row.options, self.rounds)
            words = [
                f"{option} {value_in_words(value, self.rounds)}"
                + (f" (the {ends[option]} of its grid)" if option in ends else "")
                for option, value in row.options.items()
            ]
            if words:
                lines.append(f"{row.method}: {', '.join(words)}")
        rounds = ", each run at its best round by it" if self.at == "best" else ""
        head = f"Options chosen by {self.by}{rounds}:" if self.by and lines else ""
        return Sheet({}, head, tuple(lines))

    def _remarks(self) -> Sheet:
        """Return the notes, with how phases were scaled, what privacy was spent and which runs
        failed.
        """
        scaled = [f"{row.method}: {row.record.scaled}" for row in self.rows if row.record.scaled]
        spent = {
            method: [
                row.record.history["epsilon"][-1]
                for row in self.rows
                if row.method == method and "epsilon" in row.record.history.columns
            ]
            for method in self.methods
        }
        epsilons = [
            f"{method}: epsilon {max(each):.3g} for each run, {sum(each):.3g} for all {len(each)} "
            "together where they have the same clients"
            for method, each in spent.items()
            if each
        ]
        told = dict.fromkeys([*self.notes, *scaled, *epsilons, *self._failures()])
        return Sheet({}, "", tuple(told))

    def _failures(self) -> list[str]:
        """Return the number of failed runs of each method, with the first error of each kind."""
        told = []
        for method in self.methods:
            mine = [row.record.error for row in self.rows if row.method == method]
            errors = {error["class"]: error for error in reversed(mine) if error is not None}
            if errors:
                number = sum(error is not None for error in mine)
                kinds = "; ".join(map(_error, errors.values()))
                told.append(f"{method}: {number} of {len(mine)} runs failed: {kinds}")
        return told

    def _refuse_failed(self) -> None:
        if self.rows and all(row.record.error is not None for row in self.rows):
            raise ValueError(
                f"no run went through: {'; '.join(self._failures())}. The tracebacks are in "
                "table.rows[0].record.error['traceback'] and those of the other rows"
            )


def _error(error: Mapping[str, str]) -> str:
    """Return an error's class and the first line of its text."""
    return f"{error['class']}: {error['text'].strip().partition(chr(10))[0]}"


def table(results: Mapping[str, Result | Sequence[Result]]) -> Table:
    """Compare finished runs in a table: means over seeds, paired differences, and differing budgets
    and settings.

    Nothing is marked as the best: the measures are of test data, on which no method is chosen.
    Defaults are those of each method's paper, so two methods may differ in steps, batches, rates
    and momentum as well as in themselves.

    Args:
        results: {method: a result, or a list of results, one a seed}.

    Example:
        >>> import bayesfl as bf
        >>> clients = bf.data.iid("digits", clients=4)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        >>> made = {"FedAvg": bf.algorithms.fedavg(model), "Local": bf.algorithms.local(model)}
        >>> runs = {name: bf.simulate(one, clients, rounds=1) for name, one in made.items()}
        >>> list(bf.table(runs).differences("Local", ["personal_nll"]))
        ['FedAvg']
    """
    runs = {
        name: list(found) if isinstance(found, Sequence) else [found]
        for name, found in results.items()
    }
    if calibrated := [name for name, found in runs.items() if any(run.steps for run in found)]:
        warn(
            f"{', '.join(calibrated)}: the table has measures of training, before the steps of "
            "calibration; those after them are in result.predict().summary(clients.test)"
        )
    options: Mapping[str, Any] = {}
    flat = [(name, recorded(run), run) for name, found in runs.items() for run in found]
    told = labels(
        [
            Labelled(
                name,
                record.recipe,
                None,
                digest_of({**identity(run.algorithm), "constants": None})[:8],
                (run.settings.seed, record.data),
                f"run {place}",
            )
            for place, (name, record, run) in enumerate(flat)
        ]
    )
    return Table(
        tuple(
            Row(name, options, run.settings.seed, record, lambda run=run: run)
            for name, (_, record, run) in zip(told, flat, strict=True)
        )
    )


def read(folder: str | os.PathLike[str]) -> Table:
    """Return the table of all runs with a record in a folder, also of a study in progress, without
    the code that made them.

    Methods have the names, and options the words, of the study that ran them.

    Args:
        folder: The folder, as of `Study.run`.

    Raises:
        ValueError: There is no record.
    """
    files = {file: record_of(file) for file in Path(folder).glob(f"[!.]*{SUFFIX}")}
    if broken := sorted(str(file) for file, record in files.items() if record is None):
        warn(f"{broken} are no whole records of this version's, and are left out")
    records = [record for record in files.values() if record is not None]
    if not records:
        raise ValueError(f"{str(folder)!r} does not exist, or holds no runs of a study")
    records.sort(key=lambda one: (one.method, str(one.options), one.seed, one.address))
    found = []
    for one in records:
        own = {**one.recipe, "bayesfl": str(one.environment.get("bayesfl"))}
        asked, *others = one.address.split("-")
        alone = "run " + "-".join(part[:6] for part in others)
        found.append(Labelled(one.method, own, own.pop("options"), asked, one.seed, alone))
    told = labels(found)
    shared: dict[str, Mapping[str, str]] = {}  # runs of one choice share the mapping
    seeds: dict[tuple[str, str], set[int]] = {}
    for name, one in zip(told, records, strict=True):
        seeds.setdefault((name, one.recipe["options"]), set()).add(one.seed)
    alike = len(set(map(frozenset, seeds.values()))) == 1
    return Table(
        tuple(
            Row(name, shared.setdefault(one.recipe["options"], one.options), one.seed, one, None)
            for name, one in zip(told, records, strict=True)
        ),
        notes=()
        if alike
        else (
            "Some methods or options lack seeds that others have, as while a study runs: means, "
            "and choices of options, are over different seeds.",
        ),
    )
