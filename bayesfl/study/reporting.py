"""Reports of studies: one page with means over seeds, learning curves, and every run."""

import os
from typing import Any

from bayesfl.base.display.html import facts, picture, table
from bayesfl.base.display.page import Section, write_page
from bayesfl.evaluation import plots
from bayesfl.evaluation.report import environment, in_prose
from bayesfl.federation.run.reporting import curves


def write_report(path: str | os.PathLike[str], study: Any) -> None:
    """Write the report of a study.

    Args:
        path: The file.
        study: Its table, with one choice of options a method.
    """
    drawn = picture(plots.study(study), "every method's measure, a dot for each seed")
    notes = study._choices()._repr_html_() + study._remarks()._repr_html_()
    seeds = len({row.seed for row in study.rows})
    means = (
        "<p>Mean ± standard error over seeds, of test data.</p>"
        if seeds > 1
        else "<p>Of test data. One seed gives no standard error.</p>"
    )
    parts = [
        Section("Methods", means + study._means()._repr_html_() + drawn),
        *[Section("Options and notes", notes)] * bool(notes),
        *_curves(study),
        Section("Cost of a round", study._budgets()._repr_html_()),
        Section("Runs", _runs(study)),
        Section("Environment", facts(study.rows[0].record.environment or environment())),
    ]
    failed = sum(row.record.error is not None for row in study.rows)
    headline = {"methods": len(study.methods), "runs": len(study.rows), "seeds": seeds}
    headline |= {"failed": failed} if failed else {}
    *others, last = study.methods
    title = f"{', '.join(others)} and {last}" if others else last
    write_page(path, title, parts, lead=_lead(study), headline=headline)


def _lead(study: Any) -> str:
    """Return whether all methods saw the same data."""
    seen = {
        frozenset((row.seed, row.record.data) for row in study.rows if row.method == method)
        for method in study.methods
    }
    if len(seen) == 1:
        return "A study: the same data for every method, seed by seed."
    return "Runs of several methods, not all with the same seeds and data."


def _curves(study: Any) -> list[Section]:
    histories: dict[str, list[Any]] = {}
    for row in study.rows:
        if row.record.error is None:
            histories.setdefault(row.method, []).append(row.record.history)
    return curves(histories)


def _runs(study: Any) -> str:
    found = study.to_pandas()
    if "error" in found and not found["error"].notna().any():
        found = found.drop(columns="error")
    measures = {measure for of in study.summary().values() for measure in of}
    shown = [
        name
        for name in found.columns
        if name in ("method", "seed", *measures, study.by, "seconds", "error")
        or name.startswith("option_")
    ]
    titles = {name: in_prose(str(name).removeprefix("option_")) for name in shown}
    return table({title: found[name] for name, title in titles.items()})
