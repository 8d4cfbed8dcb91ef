"""Reports of runs: one page with the settings, the data, learning curves, measures by client, and
the amount of data sent.
"""

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bayesfl.base.described import described
from bayesfl.base.display.html import facts, picture, size, table, text
from bayesfl.base.display.page import Section, write_page
from bayesfl.data import FederatedData
from bayesfl.data.outline import Outline
from bayesfl.data.tensors import dtype_name
from bayesfl.evaluation import plots
from bayesfl.evaluation.calibration import Fitted
from bayesfl.evaluation.history import HEADLINES, History
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.report import environment, in_prose
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.settings import OPEN, Settings

HEADLINE = (
    "accuracy",
    "most_frequent_class",
    "rmse",
    "nll",
    "pinball",
    "ece",
    "pooled_ece",
    "coverage",
    "set_size",
    "width",
)
"""Measures of test data at the top of a report, if available."""
WITHOUT = (
    "Measures by client and reliability diagrams need the clients' data: load the run with them, "
    "and write its report by result.report(path)."
)
BEFORE = "Measures are from training, before the steps of calibration."


def write_report(path: str | os.PathLike[str], found: Mapping[str, Any], run: Any = None) -> None:
    """Write the report of a run.

    Args:
        path: The file.
        found: The content of a saved run, as `bayesfl.federation.store.files.read` returns it.
        run: The run itself, for information on its method and data; None if not available.
    """
    known, settings, history = found["known"], found["settings"], found["history"]
    source = known.source if isinstance(known, Outline) else known.source.name
    headline, measured = _last(history), []
    tests = known.splits.get("test") if isinstance(known, FederatedData) else None
    if run is not None and tests is not None and tests.counts.any():
        predicted = run.known_of(tests)
        measures = predicted.measured()
        summary, rows = measures.summary(), measures.table(run.known.client_names)
        if (often := run.data.most_frequent("test")) is not None:
            rows["most_frequent_class"] = often
            summary["most_frequent_class"] = float(np.nanmean(often))
        headline = {in_prose(key): summary[key] for key in HEADLINE if key in summary}
        means = [summary.get(key, math.nan) for key in list(rows)[2:]]
        shown = {in_prose(key): column for key, column in rows.items()}
        told = "Every client's own model on its own test rows. Click a title to sort."
        foot = ["total rows, mean measures", int(np.sum(rows["examples"])), *means]
        measured = [
            Section("Clients", f"<p>{told}</p>" + table(shown, foot=foot)),
            *_reliability(predicted),
            *_coverage(run, predicted.predictions),
        ]
    lead = f"{known.outline.clients} clients; round {found['round']} of {settings.rounds}."
    lead += f" {BEFORE}" * bool(_steps(found) and not measured)
    recorded = _recorded(history, known.outline) or f"<p>{WITHOUT}</p>"
    parts = [
        *(measured or [Section("Clients", recorded)]),
        *_curves(history),
        Section("Data", _data(known)),
        *_about(found, run),
    ]
    write_page(path, f"{_method(found)} on {source}", parts, lead=lead, headline=headline)


def write_deployed_report(path: str | os.PathLike[str], found: Mapping[str, Any]) -> None:
    """Write the report of a run over a network from the server's data: measures are from the
    clients that share theirs.

    Args:
        path: The file.
        found: The content of a deployment's checkpoint, as `bayesfl.federation.store.files.read`
            returns it.
    """
    measures, names = found["measures"], dict(enumerate(found["names"]))
    columns: dict[str, Any] = {"client": [names.get(j) or f"client {j}" for j in measures]}
    columns |= {
        in_prose(key): [of.get(key) for of in measures.values()]
        for key in dict.fromkeys(key for of in measures.values() for key in of)
    }
    steps = [Fitted(step, {}, {}) for step in found["calibration"]]
    found = {**found, "after": steps, "private": found["start"]}
    shared = table(columns) if measures else "<p>No client shares its measures.</p>"
    parts = [Section("Clients", shared), *_curves(found["history"]), *_about(found, None)]
    clients, rounds = len(found["base"]), found["settings"].rounds
    lead = f"{clients} clients over a network; round {found['round']} of {rounds}."
    lead += f" {BEFORE}" * bool(steps)
    write_page(path, _method(found), parts, lead=lead, headline=_last(found["history"]))


def _steps(found: Mapping[str, Any]) -> list[Fitted]:
    """Return the steps of calibration among the objects fitted after training."""
    return [one for one in found["after"] if isinstance(one, Fitted)]


def _last(history: History) -> dict[str, Any]:
    """Return the last measures of a history that appear at the top of a report."""
    evaluated = [row for row in history if any(key.startswith("personal_") for key in row)]
    last = {
        key.removeprefix("personal_"): value for row in evaluated[-1:] for key, value in row.items()
    }
    return {in_prose(key): last[key] for key in HEADLINE if key in last}


def _method(found: Mapping[str, Any]) -> str:
    """Return the method's name for display."""
    from bayesfl.algorithms import PAPERS

    name = found["algorithm"]["method"]
    return PAPERS[name][1] if name in PAPERS else f"A method {name}" if " " in name else name


def _about(found: Mapping[str, Any], run: Any) -> list[Section]:
    return [
        Section("What was sent", _sent(found, run)),
        Section("Settings", _settings(found)),
        Section("Environment", "<p>Where this report was made.</p>" + facts(environment())),
    ]


def _defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a library method; a file has only the options that differ."""
    from bayesfl.algorithms import PAPERS

    known = inspect.signature(PAPERS[name][0]).parameters if name in PAPERS else {}
    return described(
        {key: one.default for key, one in known.items() if one.default is not one.empty}
    )


def _settings(found: Mapping[str, Any]) -> str:
    settings: Settings = found["settings"]
    algorithm, history = found["algorithm"], found["history"]
    run = {
        "rounds": settings.rounds,
        "clients in a round": settings.drawn,
        "who trains": settings.train,
        "seed": settings.seed,
        "aggregation": "open" if settings.aggregation == OPEN else settings.aggregation,
        "precision": dtype_name(found["dtype"]),
        "began from": found["began"],
    }
    if "seconds" in history.columns:
        run["time"] = f"{np.nansum(history['seconds']):.1f} s"
    name = algorithm["method"]
    parts = {f"Method: {name}": _defaults(name) | algorithm.get(name, {})}
    parts |= {
        f"Calibration: {type(one.step).__name__}": described(vars(one.step))
        for one in _steps(found)
    }
    shown = facts(run)
    for title, of in parts.items():
        told = {name.replace("_", " "): _words(of[name]) for name in of if name != "class"}
        shown += f"<h3>{text(title)}</h3>{facts(told)}"
    return shown


def _words(said: Any) -> str:
    """Return a description of `bayesfl.base.described` as readable text."""
    if isinstance(said, Mapping):
        name = said.get("class", said.get("name"))
        name = _words(name) if name else ""
        inner = ", ".join(
            f"{key} {_words(value)}"
            for key, value in said.items()
            if key not in ("class", "name", "source", "holds")
        )
        return f"{name}({inner})" if inner else name
    if isinstance(said, list):
        return ", ".join(map(_words, said)) or "none"
    return "none" if said is None else str(said).removeprefix("bayesfl.")


def _data(known: FederatedData | Outline) -> str:
    outline = known.outline
    told: dict[str, Any] = {
        "data": outline.source,
        "task": outline.task,
        "inputs": str(outline.inputs),
        "classes" if outline.task == "classification" else "targets": outline.outputs,
        "hash": outline.hash[:12],
    }
    rows: dict[str, Any] = {}
    classes: dict[str, Any] = {}
    cite, caption = "", ""
    if isinstance(known, Outline):
        rows["train"] = known.counts
    else:
        told["licence"] = known.source.licence
        cite = f'<p class="quiet">{text(known.source.citation)}</p>' * bool(known.source.citation)
        rows |= {name: split.counts for name, split in known.splits.items()}
        labels = known.label_counts
        if labels is not None and known.outputs <= 40:
            names = [str(name) for name in known.class_names or range(known.outputs)]
            taken = {"client", *rows}
            heads = [f"label {name}" if name.isdigit() or name in taken else name for name in names]
            classes = dict(zip(heads, labels.T, strict=True))
            caption = "Rows in each split, and training rows of each label: darker means more."
    rows |= classes
    foot = ["all", *(int(np.sum(column)) for column in rows.values())]
    columns = {"client": outline.client_names, **rows}
    return facts(told) + cite + table(columns, caption=caption, foot=foot, shaded=classes)


def _curves(history: History) -> list[Section]:
    """Plot the main measures, and those that the run recorded for each client."""
    recorded = dict.fromkeys(column for of in history.recorded.values() for column in of)
    own = [
        picture(plots.client_curves(history, column), f"{in_prose(column)} of every client")
        for column in recorded
        if column.startswith("personal_") and len(history) > 1
    ]
    return curves({"run": [history]}, own)


def curves(histories: Mapping[str, list[History]], more: Sequence[str] = ()) -> list[Section]:
    """Plot the main measures against the rounds, if each method has at least two values under every
    seed, and show further pictures after them.
    """
    drawn = [
        picture(
            plots.learning_curves(histories, metric=column),
            f"{in_prose(column)} against the rounds",
        )
        for column in (*HEADLINES, "personal_nll")
        if all(len(_evaluated(seeds, column)) > 1 for seeds in histories.values())
    ]
    pictures = "".join([*drawn, *more])
    return [Section("Learning curves", f'<div class="pictures">{pictures}</div>')] * bool(pictures)


def _evaluated(seeds: list[History], column: str) -> set[float]:
    """Return the rounds in which a measure is available under every seed."""
    return set[float].intersection(
        *(
            set(one["round"][np.isfinite(one[column])]) if column in one.columns else set()
            for one in seeds
        )
    )


def _recorded(history: History, outline: Outline) -> str:
    """Return the table of measures that the run recorded for each client, if any."""
    measured = {
        round: {in_prose(key): of for key, of in values.items() if key.startswith("personal_")}
        for round, values in history.recorded.items()
    }
    round, last = max(((round, of) for round, of in measured.items() if of), default=(0, {}))
    if not last:
        return ""
    columns = {"client": outline.client_names, **last}
    return f"<p>As recorded in round {round}. {WITHOUT}</p>" + table(columns)


def _reliability(predicted: LocalPredictions) -> list[Section]:
    known = predicted.places
    every, tensors = known.predictions, known.predictions.tensors
    if every.probs is not None:
        drawn = plots.reliability(every.probs, every.labels)
    elif every.variance is not None:
        kind = getattr(every.likelihood, "distribution", "normal")
        flat = [tensors[name][None] for name in ("mean", "variance", "labels", "mask")]
        drawn = plots.interval_reliability((*flat, kind))
    else:  # intervals of one level
        return []
    all_of = "<p>All clients' test rows together.</p>" + picture(drawn, "reliability")
    return [Section("Reliability", all_of)]


def _coverage(run: Any, predicted: Predictions) -> list[Section]:
    """Show the coverage of calibrated sets or intervals by client."""
    if predicted.level is None or run.settings.sampling == "poisson":
        return []
    audit = run.audit()
    kept = ("client", "rows", "coverage", "coverage_low", "coverage_high", "size", "width")
    shown = {key: of for key, of in audit.columns().items() if key in kept}
    told = f"<p>Sets or intervals should contain the truth with probability {audit.level:g}.</p>"
    drawn = picture(plots.coverage(audit), "coverage by client")
    counts = table({in_prose(key).removeprefix("coverage "): of for key, of in shown.items()})
    return [Section("Coverage", f'{told}<div class="scrolls">{drawn}</div><br>{counts}')]


def _sent(found: Mapping[str, Any], run: Any) -> str:
    """Return a section on the data that clients sent in training: totals of the history, and each
    tensor if the method is known.
    """
    history, settings = found["history"], found["settings"]
    told: dict[str, Any] = {}
    for column, what in (("bytes_up", "from clients"), ("bytes_down", "to clients")):
        if column in history.columns and math.isfinite(total := np.nansum(history[column])):
            told[f"{what}, in all"] = size(total)
            told[f"{what}, a round"] = size(total / max(1, len(history)))
    told["who saw it"] = (
        "the server saw what each client sent"
        if settings.aggregation == OPEN
        else settings.aggregation
    )
    told["kept by a client between rounds"] = ", ".join(found["private"]) or "nothing"
    if run is None:
        return facts(told)
    sent = run.algorithm.uplink(run.server)
    numbers = [math.prod(shape) for shape, _ in sent.values()]
    bytes_ = [n * dtype.itemsize for n, (_, dtype) in zip(numbers, sent.values(), strict=True)]
    columns = {
        "tensor": list(sent),
        "shape": [str(list(shape)) for shape, _ in sent.values()],
        "numbers": numbers,
        "bytes": bytes_,
    }
    caption = "Tensors that a client sends after each round in which it trains."
    foot = ["all", "", sum(numbers), sum(bytes_)]
    return facts(told) + (table(columns, caption=caption, foot=foot) if sent else "")
