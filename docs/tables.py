"""Writes the tables of the README and of pages under docs from what the commands made: python
docs/tables.py.

What is implemented comes from the compositions themselves, the demo's table from
benchmarks/results/demo.json (`make demo` writes it to runs/demo/table.json), its rates and other
settings from benchmarks/results/sensitivity.json, speed from benchmarks/results/engines.json (`make
benchmarks`), rules of subnetworks from benchmarks/results/selection.json (python
benchmarks/selection.py), pFedVEM over many rounds from benchmarks/results/pfedvem.json, links from
benchmarks/results/links.json, networks as they come from benchmarks/results/networks.json, promises
from benchmarks/results/promises.json, noise from benchmarks/results/privacy.json, posteriors beside
the truth from benchmarks/results/truth.json, papers' tables from benchmarks/results/papers.
"""

import ast
import importlib
import inspect
import json
import math
import re
import runpy
import statistics
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import bayesfl as bf
from bayesfl.evaluation import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


GIVEN = (
    ("bayesfl.federation.run.result", "Result"),
    ("bayesfl.evaluation.history", "History"),
    ("bayesfl.evaluation.predictions", "Predictions"),
    ("bayesfl.study.table", "Table"),
    ("bayesfl.study.table", "Summary"),
    ("bayesfl.posteriors.variational", "Variational"),
    ("bayesfl.federation.errors", "BadClients"),
    ("bayesfl.federation.errors", "FailedRound"),
    ("bayesfl.base.archive", "CheckpointError"),
)
INTERNAL = {"check_mixing", "check_optimiser", "check_rule", "rate_at"}
"""Functions of public files without `__all__` that other folders of the library call, and users do
not.
"""
DATASETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
CONSTANTS = {"bf.plots.OKABE_ITO": "bayesfl.evaluation.plots.look"}
"""Public values that are neither classes nor functions, and the files that define them."""


def implemented() -> str:
    """List what is implemented, in Markdown."""
    lines = [
        "| method | in `bf.algorithms` | paper | belief of a client | sent each round | never "
        "leaves the client |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {e.title} | `{e.name}` | {e.paper} | {e.posterior} | {e.sent} | {e.private} |"
        for e in bf.algorithms.available()
    ]
    return "\n".join(lines)


def sections() -> dict[str, dict[str, Any]]:
    """Return what a user imports, is given or catches, by heading and by name."""

    def public(module: ModuleType) -> list[Any]:
        listed = getattr(module, "__all__", None)
        found = [getattr(module, name) for name in listed or vars(module) if name[0] != "_"]
        own = [
            thing
            for thing in found
            if (inspect.isclass(thing) or inspect.isfunction(thing))
            and thing.__name__ not in INTERNAL
            and (listed or thing.__module__ == module.__name__)
        ]
        return sorted(own, key=lambda thing: thing.__name__.lower())

    every = {name: getattr(bf, name) for name in sorted(bf.__all__, key=str.lower)}
    modules = {name: thing for name, thing in every.items() if isinstance(thing, ModuleType)}
    return {
        "bf": {f"bf.{name}": thing for name, thing in every.items() if name not in modules},
        "What these return and raise": {
            name: getattr(importlib.import_module(module), name) for module, name in GIVEN
        },
        **{
            f"bf.{name}": {f"bf.{name}.{thing.__name__}": thing for thing in public(module)}
            for name, module in modules.items()
        },
    }


def names(heads: Collection[str]) -> str:
    """List names under some headings, with the first sentence of each docstring, in Markdown."""

    def row(shown: str, thing: Any) -> str:
        first = (
            re.split(r"\n\n|(?<=[a-z\]`)])\. ", (inspect.getdoc(thing) or "").strip())[0]
            .replace("\n", " ")
            .rstrip(".")
        )
        return (
            f"| {{py:obj}}`{shown} <{thing.__module__}.{thing.__qualname__}>` | "
            f"{first.replace('|', chr(92) + '|')} |"
        )

    def constant(shown: str, home: str) -> str:
        body = ast.parse(inspect.getsource(importlib.import_module(home))).body
        name = shown.split(".")[-1]
        (said,) = (
            after.value.value
            for node, after in pairwise(body)
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == name
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        )
        return (
            f"| {{py:obj}}`{shown} <{home}.{name}>` | {' '.join(str(said).split()).rstrip('.')} |"
        )

    parts = []
    for head, things in sections().items():
        if head in heads:
            rows = [row(shown, thing) for shown, thing in things.items()]
            rows += [
                constant(shown, home)
                for shown, home in CONSTANTS.items()
                if shown.startswith(f"{head}.") and head != "bf"
            ]
            lines = [f"## {head}", "", "| name | what it does or is |", "|---|---|", *rows]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


TRAINING = (
    "bf",
    "What these return and raise",
    *(
        f"bf.{name}"
        for name in ("callbacks", "data", "engine", "faults", "flower", "models", "optim", "stats")
    ),
)
"""Headings of the first page of public names; the methods have a page of their own."""


def names_to_train() -> str:
    """List what one trains with, and the statistics."""
    return names(TRAINING)


def names_of_parts() -> str:
    """List the parts of methods, and what measures them."""
    return names(set(sections()) - {*TRAINING, "bf.algorithms"})


def demo() -> str:
    """The demo's table, in Markdown."""
    saved = json.loads((RESULTS / "demo.json").read_text())
    table = runpy.run_path(str(ROOT / "examples" / "pfedvem.py"))["table"](
        saved["rows"], "markdown"
    )
    return f"{table}\n\n{made({'command': 'make demo', **saved})}"


def demo_rates() -> str:
    """NLL on validation data by the demo's methods and rates, the chosen in bold, in Markdown."""
    saved = json.loads((RESULTS / "sensitivity.json").read_text())["rates"]
    lines = []
    for name, by in saved["nll"].items():
        cells = []
        for rate, values in by.items():
            cell = "diverged" if None in values else f"{sum(values) / len(values):.3f}"
            cells.append(f"**{cell}**" if float(rate) == saved["chosen"][name] else cell)
        lines.append([bf.algorithms.PAPERS[name][1], *cells])
    heads = ["method", *next(iter(saved["nll"].values()))]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def demo_settings() -> str:
    """The demo's accuracy and NLL beside those in other settings, in Markdown."""
    saved = json.loads((RESULTS / "sensitivity.json").read_text())["settings"]
    rows = json.loads((RESULTS / "demo.json").read_text())["rows"]
    names = list(next(iter(saved["rows"].values())))
    at_mean = {name: rows.get(f"{name}, mean", rows.get(name)) for name in names}
    settings = {"the demo": at_mean, **saved["rows"]}
    parts = []
    for key, title in (("accuracy", "Accuracy"), ("nll", "NLL (nats)")):
        cells = {name: {of: found[name][key] for of, found in settings.items()} for name in names}
        columns = [report.Column(of, title=of, better=report.better(key)) for of in settings]
        parts.append(f"**{title}**\n\n{report.table(cells, columns=columns, style='markdown')}")
    return "\n\n".join([*parts, made(saved)])


def engines() -> str:
    """Speed, in Markdown: ratios to the row's unit, with its target where the file has one for that
    row.
    """
    saved = json.loads((RESULTS / "engines.json").read_text())
    heads = [
        "work",
        "unit",
        "time, 2 workers",
        "time, 1 worker",
        "loop on 2 threads",
        "share of overhead, 2 workers",
        "share of overhead, 1 worker",
        "busy neighbour: 2 workers / 1 worker",
    ]
    lines, origins = [], {}
    for name, row in saved["rows"].items():
        origins.setdefault(made(row), []).append(f"`{name}`")
        if name.endswith("_busy"):
            continue
        sides = row["sides"]
        pair = [sides[side] for side in ("2 workers", "1 worker")]
        cells = [
            f"{side['ratio']:.2f}"
            + (f" (target {side['at_most']:.2f})" if "at_most" in side else "")
            for side in pair
        ]
        cells.append(
            f"{sides['bare, 2 threads']['ratio']:.2f}" if "bare, 2 threads" in sides else ""
        )
        cells += [
            f"{side['rest']:.3f}"
            + (f" (target {side['rest_at_most']:.2f})" if "rest_at_most" in side else "")
            for side in pair
        ]
        busy = saved["rows"].get(f"{name}_busy", {}).get("sides")
        beside = f"{busy['2 workers']['to_one_worker']:.2f}" if busy else ""
        unit = next(iter(sides))
        lines.append([row["title"], f"{unit}, {sides[unit]['seconds']:.2f} s", *cells, beside])
    return "\n\n".join(
        [
            ruled(heads, lines),
            *(f"{origin} Rows {', '.join(names)}." for origin, names in origins.items()),
        ]
    )


def selection() -> str:
    """Show what rules of subnetworks are worth, in Markdown: a table for each measure, the networks
    side by side.
    """
    saved = json.loads((RESULTS / "selection.json").read_text())
    parts = {
        part: {
            f"{dataset}, {scaling}": found
            for dataset, by in saved[part]["results"].items()
            for scaling, found in by.items()
        }
        for part in ("alone", "pooled", "control")
    }
    words = runpy.run_path(str(ROOT / "benchmarks" / "selection.py"))["in_words"]
    cells = parts["alone"]
    rows = {cell: found["rows"] for cell, found in cells.items()}
    names = list(next(iter(rows.values())))

    def side_by_side(
        title: str,
        *keys: str,
        of: str = "alone",
        part: str = "rows",
        scaled: bool = False,
        **options: Any,
    ) -> str:
        found = {cell: by[part] for cell, by in parts[of].items()}
        kept = [
            name
            for name, row in next(iter(found.values())).items()
            if keys[0] in row and (scaled or "scaled" not in name)
        ]
        table = {
            words(name): {
                f"{cell} {key}": by[name][key]
                for cell, by in found.items()
                for key in keys
                if key in by[name]
            }
            for name in kept
        }
        kind = {key: "" if len(keys) == 1 else f": {key.split('_')[-1]}" for key in keys}
        columns = [
            report.Column(f"{cell} {key}", title=cell + kind[key], **options)
            for cell in found
            for key in keys
        ]
        return f"**{title}**\n\n{report.table(table, columns=columns, style='markdown')}"

    def beyond(title: str, of: str, key: str) -> str:
        found = {cell: by["rows"] for cell, by in parts[of].items()}
        table = {
            words(name): {
                c: [
                    a - b
                    for a, b in zip(by[name][key], by["MAP, one temperature"][key], strict=True)
                ]
                for c, by in found.items()
            }
            for name in next(iter(found.values()))
        }
        lines = report.table(
            table, columns=[report.Column(cell, title=cell) for cell in found], style="markdown"
        )
        return f"**{title}**\n\n{lines}"

    network = [
        report.Column("train_nll", title="NLL on training images", digits=4),
        report.Column("constant_pixels", title="share of constant pixels", digits=2),
        report.Column(
            "changed_by_themselves",
            title="share of test images that change a constant pixel",
            digits=2,
        ),
        report.Column("dead_units", title="share of dead units", digits=2),
        report.Column("uncurved", title="share of weights without curvature", digits=2),
    ]
    costs = {
        words(name): {
            key: [value for of in rows.values() for value in of[name][key]]
            for key in ("order", "seconds", "predict_seconds")
        }
        for name in names
        if "order" in rows[next(iter(rows))][name]
    }
    cost = [
        report.Column("order", title="order of the factor", digits=0),
        report.Column("seconds", title="one fit (CPU s)", digits=2),
        report.Column("predict_seconds", title="1,000 predictions and draws (CPU s)", digits=2),
    ]
    chosen = ["| method | " + " | ".join(cells) + " |", "|---|" + "---:|" * len(cells)]
    for name in names:
        if "log10_precision" in rows[next(iter(rows))][name] and "scaled" not in name:
            seeds = [
                ", ".join(f"{value:.1f}" for value in of[name]["log10_precision"])
                for of in rows.values()
            ]
            chosen.append(f"| {words(name)} | " + " | ".join(seeds) + " |")
    low, high = (
        f"{value:.0f}"
        for value in (
            math.log10(g)
            for g in (saved["alone"]["sizes"]["grid"][0], saved["alone"]["sizes"]["grid"][-1])
        )
    )
    networks = report.table(
        {cell: found["network"] for cell, found in cells.items()},
        columns=network,
        style="markdown",
        corner="network",
    )
    counted = [
        report.Column(f"{key}_count", title=title)
        for key, title in (("near", "unseen classes"), ("other", "the other data set"))
    ]
    counted.append(report.Column("permuted_count", title="permuted pixels"))
    counts = {cell: by["rows"]["changed constant pixels"] for cell, by in parts["control"].items()}
    control = report.table(counts, columns=counted, style="markdown", corner="images")
    return "\n\n".join(
        [
            f"**The networks**\n\n{networks}",
            side_by_side("Share of the selected weights without curvature", "uncurved", digits=2),
            side_by_side(
                "Share of the selected weights that lead into dead units", "in_dead_units", digits=2
            ),
            f"**Chosen precision, log10, seed by seed** (grid {low} to {high})\n\n"
            + "\n".join(chosen),
            side_by_side("Accuracy", "accuracy", scaled=True, better="higher"),
            side_by_side("NLL on test images (nats)", "nll", scaled=True, better="lower"),
            beyond(
                "NLL minus that of the MAP with one temperature (nats, paired by seed)",
                "alone",
                "nll",
            ),
            side_by_side(
                "NLL of every method with a temperature of its own (nats)",
                "nll_tempered",
                scaled=True,
                better="lower",
            ),
            side_by_side(
                "One precision or temperature for all networks of a column: NLL (nats)",
                "nll",
                of="pooled",
                better="lower",
            ),
            beyond(
                "One precision or temperature for all networks of a column: NLL minus the MAP's "
                "at one temperature (nats, paired by seed)",
                "pooled",
                "nll",
            ),
            side_by_side(
                "One precision or temperature for all networks of a column: ECE",
                "ece",
                of="pooled",
                better="lower",
            ),
            side_by_side(
                "One precision for all networks of a column: log10 of the precision",
                "log10_precision",
                of="pooled",
                digits=1,
            ),
            side_by_side("ECE", "ece", scaled=True, better="lower"),
            side_by_side(
                "AUROC of images of unseen classes",
                "near_entropy",
                "near_epistemic",
                scaled=True,
                better="higher",
            ),
            beyond(
                "AUROC of images of unseen classes by entropy, minus that of the MAP with one "
                "temperature (paired by seed)",
                "alone",
                "near_entropy",
            ),
            side_by_side(
                "AUROC of the other data set", "other_entropy", "other_epistemic", better="higher"
            ),
            side_by_side(
                "AUROC of permuted pixels",
                "permuted_entropy",
                "permuted_epistemic",
                better="higher",
            ),
            "**AUROC of the number of changed pixels that were constant in training, without a "
            f"network**\n\n{control}",
            side_by_side(
                "NLL on lit test images minus NLL on the same images unlit (nats)",
                "lit_change",
                better="lower",
            ),
            side_by_side(
                "At fixed precisions: NLL on the first 500 test images (nats)",
                "nll",
                part="fixed",
                better="lower",
            ),
            side_by_side(
                "At fixed precisions: NLL on the same images, lit (nats)",
                "lit_nll",
                part="fixed",
                better="lower",
            ),
            side_by_side(
                "At fixed precisions: AUROC of images of unseen classes",
                "near_entropy",
                "near_epistemic",
                part="fixed",
            ),
            "**Cost, mean over all "
            f"networks**\n\n{report.table(costs, columns=cost, style='markdown')}",
            "\n\n".join(f"{made(saved[part])} The part `{part}`." for part in parts),
        ]
    )


def fedsi() -> str:
    """FedSI's Tables I and II beside what was measured, and what else was."""
    saved = json.loads((RESULTS / "papers" / "fedsi.json").read_text())
    order = ["Local", "FedAvg", "FedAvg-FT", "FedBABU"]
    for title in ("FedSI", "FedSI-Fac", "FedSI, whole body"):
        its_map = "FedSI's MAP" if title == "FedSI" else f"{title}, its MAP"
        order += [
            its_map,
            title,
            f"{title}, contrasts",
            f"{title}, 100 draws",
            f"{title}, the server's prior",
        ]
    order += ["FedSI, to the letter, its MAP", "FedSI, to the letter"]
    order += [
        f"{title}, {how}"
        for title in ("pFedVEM", "pFedVEM, scales held")
        for how in ("mean", "100 draws")
    ]
    parts = []
    for dataset, published in saved["published"].items():
        rows: dict[str, dict[str, list[float]]] = {name: {} for name in order}
        for key, cell in saved["cells"].items():
            if key.split("/")[0] == dataset:
                for title, row in cell["rows"].items():
                    for name, value in row.items():
                        rows[title].setdefault(name, []).append(value)
        rows = {name: row for name, row in rows.items() if row}
        for name, row in rows.items():
            row |= {
                f"published_{key}": [value / (100 if key == "accuracy" else 1)]
                for key, value in published.get(name, {}).items()
            }
            row["seeds"] = [float(len(row["accuracy"]))]
            if "precision" in row:
                row["precision"] = [math.log10(value) for value in row["precision"]]
        both = [
            ("accuracy", "accuracy", 4),
            ("ece", "ECE", 3),
            ("mce", "MCE", 3),
            ("brier", "Brier", 3),
        ]
        first = [
            report.Column(f"{prefix}{key}", title=f"{title}, {word}", digits=digits)
            for key, title, digits in both
            for prefix, word in (("published_", "published"), ("", "measured"))
        ]
        first.insert(2, report.Column("before_accuracy", title="accuracy before pooling", digits=4))
        plain = [
            ("nll", "NLL (nats)"),
            ("nll_pooled", "NLL, one temperature"),
            ("nll_client", "NLL, a temperature for each client"),
            ("ece_pooled", "ECE, one temperature"),
            ("mce_pooled", "MCE, one temperature"),
            ("brier_pooled", "Brier, one temperature"),
            ("precision", "log10 of the precision"),
            ("seeds", "seeds"),
        ]
        second = [
            report.Column(key, title=title, digits=0 if key == "seeds" else 3)
            for key, title in plain
        ]
        kinds = (
            ("near", "unseen labels"),
            ("other", "another data set"),
            ("far", "permuted pixels"),
        )
        scores = (
            ("entropy", "entropy"),
            ("tempered", "entropy, one temperature"),
            ("epistemic", "epistemic part"),
        )
        third = [
            report.Column(f"{kind}_{score}_auroc", title=f"{what}: AUROC by {by}")
            for kind, what in kinds
            for score, by in scores
        ]
        fourth = [
            report.Column("ece_client", title="ECE, a temperature for each client"),
            report.Column("near_entropy_fpr95", title="unseen labels: FPR at TPR 0.95"),
            report.Column("far_entropy_fpr95", title="permuted pixels: FPR at TPR 0.95"),
            report.Column("pooled_aurc", title="AURC", digits=4),
            report.Column("accuracy_at_80", title="accuracy on the most confident four fifths"),
        ]
        there = {key for row in rows.values() for key in row}
        tables = [
            report.table(rows, columns=[c for c in columns if c.key in there], style="markdown")
            for columns in (first, second, third, fourth)
        ]
        more = [
            f"{key.split('/')[1]}, seed {key.split('/')[2]}: uncurved share "
            f"{cell['uncurved_share']:.3g}"
            for key, cell in saved["cells"].items()
            if key.split("/")[0] == dataset and "uncurved_share" in cell
        ]
        parts.append(
            f"**{dataset}**\n\n"
            + "\n\n".join([*tables, *(["; ".join(more) + "."] if more else [])])
        )
    parts.append(versions(saved, place=1, drawn_anew=set()))
    return "\n\n".join(parts)


def curvature() -> str:
    """Curvature beside laplace-torch, row by row: how many times as long the other takes, and how
    much of its memory ours does.
    """
    saved = json.loads((RESULTS / "curvature.json").read_text())
    heads = [
        "work",
        "bayesfl (s)",
        "compared with",
        "its time / bayesfl's, 1 thread",
        "2 threads",
        "target",
    ]
    heads += ["bayesfl's memory / its memory", "target"]
    lines = []
    for row in saved["rows"].values():
        ours, title = row["sides"]["ours"], row["title"].replace("|", "\\|")
        for name, side in row["sides"].items():
            if name == "ours":
                continue
            times = [
                f"{side['threads'][count]['times_ours']:.2f}" if count in side["threads"] else "-"
                for count in ("1", "2")
            ]
            both = side["memory_mib"] and ours["memory_mib"]
            share = f"{ours['memory_mib'] / side['memory_mib']:.3f}" if both else "-"
            targets = [
                f"{value:.3g}" if value else ""
                for value in (side["aim_times_ours"], side["aim_memory_share"])
            ]
            lines.append(
                [
                    title,
                    f"{ours['threads']['1']['seconds']:.3g}",
                    name,
                    *times,
                    targets[0],
                    share,
                    targets[1],
                ]
            )
    origins = dict.fromkeys(made(row) for row in saved["rows"].values())
    return "\n\n".join([ruled(heads, lines), *origins])


def fedsi_round() -> str:
    """Show what a round of FedSI costs."""
    saved = json.loads((RESULTS / "fedsi.json").read_text())
    lines = []
    for name, one in saved["workers"]["1"].items():
        two = saved["workers"]["2"][name]
        pairs = [
            f"{one[key]:.2f}, {two[key]:.2f}"
            for key in ("seconds", "times_fedavg", "times_fedavg_and_factors")
        ]
        target = (
            f"{saved['aims'][name][0]:g} {saved['aims'][name][1]}" if name in saved["aims"] else ""
        )
        lines.append(
            [
                name,
                *pairs,
                target,
                f"{saved['memory_mib'][name]:.0f}" if name in saved["memory_mib"] else "",
            ]
        )
    heads = [
        "round",
        "seconds, 1 and 2 workers",
        "in rounds of FedAvg",
        "in rounds of FedAvg with factors",
        "target",
        "memory (MiB)",
    ]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def curvature_every() -> str:
    """Return what FedSI loses where its Laplace approximations are made anew only every few rounds,
    mean and error over seeds.
    """
    saved = json.loads((RESULTS / "curvature_every.json").read_text())
    rows: dict[str, dict[str, list[float]]] = {}
    for key, cell in saved["cells"].items():
        rule = {"wasserstein": "", "curved_wasserstein": "curved weights, "}[key.split("/")[1]]
        for every, row in cell["rows"].items():
            name = rule + (f"every {every} rounds" if every != "1" else "every round")
            for measure, value in row.items():
                rows.setdefault(name, {}).setdefault(measure, []).append(value)
    columns = [
        report.Column("map_accuracy", title="MAP: accuracy", better="higher"),
        report.Column("map_nll", title="NLL (nats)", better="lower"),
        report.Column("per_class_accuracy", title="class by class: accuracy", better="higher"),
        report.Column("per_class_nll", title="NLL", better="lower"),
        report.Column("contrasts_nll", title="contrasts: NLL", better="lower"),
        report.Column("global_nll", title="the server's prior: NLL", better="lower"),
    ]
    return "\n\n".join(
        [
            report.table(rows, columns=columns, style="markdown"),
            versions(saved, place=0, drawn_anew=set()),
        ]
    )


def programs() -> str:
    """FedPAC's quadratic programs."""
    saved = json.loads((RESULTS / "simplex.json").read_text())
    lines = []
    for name, row in saved["rows"].items():
        theirs = [f"{row['slsqp_cpu_seconds']:.1f}", f"{row['slsqp_violation']:.0e}"]
        lines.append(
            [
                name,
                f"{row['cpu_seconds']:.2f}",
                str(saved["at_most"]),
                f"{row['violation']:.0e}",
                *theirs,
            ]
        )
    heads = [
        "100 programs of 100 weights",
        "CPU seconds",
        "target",
        "violation",
        "SLSQP: CPU seconds",
        "SLSQP: violation",
    ]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def rivals() -> str:
    """Rounds of further methods in units of FedAvg's."""
    saved = json.loads((RESULTS / "rivals.json").read_text())
    lines = [
        [
            bf.algorithms.PAPERS[name][1],
            f"{row['steps']:g}",
            f"{row['seconds']:.3f}",
            f"{row['times_fedavg']:.2f}",
        ]
        for name, row in saved["rows"].items()
    ]
    heads = ["method", "gradient steps a client", "seconds a round", "times FedAvg's round"]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def privacy() -> str:
    """Accuracy against epsilon, and what masks cost."""
    saved = json.loads((RESULTS / "privacy.json").read_text())
    columns = [
        report.Column("epsilon", title="epsilon", digits=2),
        report.Column("epsilon_own", title="epsilon, own rounds", digits=2),
        report.Column("accuracy"),
        report.Column("nll", title="NLL (nats)", digits=3),
        report.Column("megabytes_up", title="MB sent", digits=1),
        report.Column("seconds", title="seconds", digits=1),
    ]
    return f"{report.table(saved['rows'], columns=columns, style='markdown')}\n\n{made(saved)}"


def pfedvem() -> str:
    """Return accuracy before and after pooling and NLL of pFedVEM and its kin at each milestone,
    means and standard errors over seeds.
    """
    saved = json.loads((RESULTS / "pfedvem.json").read_text())
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    methods = list(dict.fromkeys(key.split("/")[1] for key in saved["cells"]))
    for key, cell in sorted(
        saved["cells"].items(), key=lambda one: methods.index(one[0].split("/")[1])
    ):
        dataset, method, _ = key.split("/")
        for round, found in cell["milestones"].items():
            row = tables.setdefault(dataset, {}).setdefault(f"{method}, round {round}", {})
            for name, value in found.items():
                row.setdefault(name, []).append(value)
    columns = [
        report.Column("before_accuracy", title="before pooling", better="higher"),
        report.Column("accuracy", title="after", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_drawn", title="by 20 draws", better="lower"),
        report.Column("rho", title="rho"),
        report.Column("width", title="width"),
        report.Column("distance", title="distance"),
    ]
    parts = [
        f"{DATASETS[name]}:\n\n{report.table(rows, columns=columns, style='markdown')}"
        for name, rows in tables.items()
    ]
    return "\n\n".join([*parts, versions(saved, place=1, drawn_anew=set())])


def networks() -> str:
    """Return the measures of each network of examples/networks.py under each method, means and
    standard errors over seeds.
    """
    saved = json.loads((RESULTS / "networks.json").read_text())
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    sizes: dict[str, dict[str, Any]] = {}
    for key, cell in saved["cells"].items():
        part, title, _ = key.split("/")
        sizes[part] = cell["size"]
        for name, value in cell["row"].items():
            tables.setdefault(part, {}).setdefault(title, {}).setdefault(name, []).append(value)
    columns = [
        report.Column("before_accuracy", title="before pooling", better="higher"),
        report.Column("accuracy", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("pooled_ece", title="ECE, pooled", better="lower"),
        report.Column("seconds", digits=0),
    ]
    parts = []
    for part, rows in tables.items():
        size = sizes[part]
        examples = f"{size['train']} training and {size['test']} test examples"
        said = (
            f"{size['dataset']}, {size['clients']} clients of {examples}, {size['rounds']} rounds"
        )
        parts.append(
            f"`{part}`: {said}.\n\n{report.table(rows, columns=columns, style='markdown')}"
        )
    return "\n\n".join([*parts, versions(saved, place=1, drawn_anew=set())])


def links() -> str:
    """Return the measures of FedSI's whole body under each link, means and standard errors over
    seeds, one table for each data set.
    """
    saved = json.loads((RESULTS / "links.json").read_text())
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    for key, cell in saved["cells"].items():
        rows = tables.setdefault(key.split("/")[0], {})
        for name, row in cell["rows"].items():
            for measure, value in row.items():
                rows.setdefault(name, {}).setdefault(measure, []).append(value)
    columns = [
        report.Column("accuracy", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_tempered", title="with one temperature", better="lower"),
        report.Column("ece", title="ECE", better="lower"),
        report.Column("brier", title="Brier", better="lower"),
        report.Column("entropy_auroc", title="AUROC of unseen classes, entropy", better="higher"),
        report.Column("epistemic_auroc", title="epistemic", better="higher"),
    ]
    parts = [
        f"{DATASETS[name]}:\n\n{report.table(rows, columns=columns, style='markdown')}"
        for name, rows in tables.items()
    ]
    return "\n\n".join([*parts, made(next(iter(saved["cells"].values())) | saved)])


def promises() -> str:
    """Return what steps of calibration do for each method, a table for each data set and question,
    and how often promises are broken.
    """
    saved = json.loads((RESULTS / "promises.json").read_text())
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    for key, cell in saved["cells"].items():
        if key.startswith("methods/"):
            _, dataset, name, _ = key.split("/")
            for measure, value in cell["row"].items():
                tables.setdefault(dataset, {}).setdefault(name, {}).setdefault(measure, []).append(
                    value
                )
    quality = [
        report.Column("accuracy", better="higher"),
        report.Column("accuracy_b", title="accuracy with T and bias", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_t", title="NLL, one T", better="lower"),
        report.Column("nll_own", title="NLL, a client's T", better="lower"),
        report.Column("nll_b", title="NLL, T and bias", better="lower"),
        report.Column("ece", title="ECE", better="lower"),
        report.Column("ece_b", title="ECE, T and bias", better="lower"),
    ]
    kinds = {
        "shrunk": "shrunk",
        "pooled": "pooled",
        "own": "own",
        "quantile_of_quantiles": "FedCP-QQ",
        "mean_of_quantiles": "mean quantile",
    }
    measures = {"coverage": "coverage", "worst": "worst client", "size": "size"}
    sets = [
        report.Column(f"{kind}_{key}", title=f"{name}: {said}")
        for kind, name in kinds.items()
        for key, said in measures.items()
    ]
    parts = []
    for dataset in ("digits", *DATASETS):
        rows = tables[dataset]
        shown = [
            report.table(rows, columns=columns, style="markdown") for columns in (quality, sets)
        ]
        parts.append(
            f"{DATASETS.get(dataset, 'Digits')}, probabilities:\n\n{shown[0]}\n\nSets for 0.9, "
            f"after T and bias:\n\n{shown[1]}"
        )
    made_up = saved["cells"]["sets"]["row"]
    alike = {case: row for case, row in made_up.items() if case.startswith("alike")}
    ((_, unlike),) = ((case, row) for case, row in made_up.items() if case not in alike)
    heads = ["own scores alike", *next(iter(alike.values()))]
    parts.append(
        ruled(
            heads,
            [
                [case.removeprefix("alike, "), *(f"{v:.3f}" for v in row.values())]
                for case, row in alike.items()
            ],
        )
    )
    told = ("coverage", "worst", "below .85")
    lines = [
        [kind, *(f"{unlike[f'{kind}, {key}']:.3f}" for key in told)]
        for kind in ("own", "shrunk", "pooled")
    ]
    parts.append(
        ruled(
            ["scales that differ", "coverage", "worst of twenty", "share of clients below 0.85"],
            lines,
        )
    )
    rest = {
        **saved["cells"]["alarms"]["row"],
        **saved["cells"]["answers"]["row"],
        **saved["cells"]["speed"]["row"],
    }
    said = {
        "alarm": "share of alarms ever raised in 2,000 rows, nothing changed",
        "alarm, ties": "the same, scores with ties",
        "test of 5 % at every look": "share of 5 % tests ever significant, one after every row, "
        "nothing changed",
        "any of twenty clients at 1 / delta": "share of federations of twenty in which any alarm "
        "is raised, nothing changed",
        "looks until a shift by 1.5 deviations is seen, median": "rows until a shift by 1.5 "
        "standard deviations is seen, "
        "median",
        "broken, fixed sequence": "abstention: share of data sets whose answers are wrong more "
        "often than promised, fixed sequence",
        "broken, looks right": "the same, the threshold that looks right on the same rows",
        "answered, fixed sequence": "abstention: share of rows answered, fixed sequence",
        "prediction_seconds": "seconds of a prediction pass, 1,000 clients of 100 rows, ten "
        "classes",
        "calibration_seconds": "seconds of temperature, bias and sets for these",
        "looks_per_second": "rows that an alarm takes in a second",
    }
    shown = {
        said[name]: f"{value:,.0f}" if value > 10 else f"{value:.3f}"
        for name, value in rest.items()
    }
    parts.append(
        ruled(["alarms, answers, speed", ""], [[name, value] for name, value in shown.items()])
    )
    named = {key if "/" in key else f"//{key}": cell for key, cell in saved["cells"].items()}
    return "\n\n".join([*parts, versions({**saved, "cells": named}, place=2, drawn_anew=set())])


def ruled(heads: list[str], lines: list[list[str]]) -> str:
    """A table of texts."""
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines)
    )


def made(saved: dict[str, Any]) -> str:
    """Say by which command, when, on what and at which commit results were made."""
    env = saved["environment"]
    commit, clean = commit_of(env)
    at = (
        ""
        if not commit
        else f", commit {commit[:10]}{'' if clean else ' with uncommitted changes'}"
    )
    return (
        f"Made by `{saved['command']}`, {env['date'][:10]}, {env['cpu']}, {env['cores']} cores, "
        f"torch {env['torch']}{at}."
    )


def commit_of(env: dict[str, Any]) -> tuple[str, bool]:
    """The commit that something was measured at, empty where it is not known, and whether nothing
    was changed beside it.
    """
    commit = env["commit"] or ""
    return commit.removesuffix("-dirty"), not commit.endswith("-dirty")


DRAWN_ANEW = "2026-11-22T12:00"
"""From when on addresses of randomness count only phases that shuffle or draw; see the
changelog.
"""


def versions(saved: dict[str, Any], *, place: int, drawn_anew: set[str]) -> str:
    """Say by which command, when, on what and at which commits a table's cells were made, and which
    methods would draw otherwise today.

    Args:
        saved: With `cells`, by keys of words between slashes, and the command, there or in every
            cell.
        place: Of the method among the words of a key.
        drawn_anew: Methods whose draws changed.
    """
    cells: dict[str, dict[str, Any]] = saved["cells"]
    by: dict[tuple[str, bool, str], list[str]] = {}
    days: dict[tuple[str, bool, str], set[str]] = {}
    old: set[str] = set()
    for key, cell in cells.items():
        method, env = key.split("/")[place], cell["environment"]
        commit, clean = commit_of(env)
        origin = (commit[:7], clean, f"{env['cpu']}, {env['cores']} cores")
        by.setdefault(origin, []).append(method)
        days.setdefault(origin, set()).add(env["date"][:10])
        old |= {method} & drawn_anew if env["date"] < DRAWN_ANEW else set()
    everything = {method for methods in by.values() for method in methods}
    count = {
        clean: sum(len(methods) for (_, c, _), methods in by.items() if c == clean)
        for clean in (True, False)
    }
    both = (
        f": {count[True]} from clean working trees, {count[False]} with uncommitted changes"
        if count[False]
        else ", all from clean working trees"
    )
    machines = dict.fromkeys(machine for *_, machine in by)
    parts = []
    for (commit, clean, machine), methods in by.items():
        found = sorted(days[commit, clean, machine])
        when = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
        kinds = "all methods" if set(methods) == everything else ", ".join(sorted(set(methods)))
        where = "" if len(machines) == 1 else f", {machine}"
        changed = "" if clean else " with uncommitted changes"
        parts.append(
            f"{commit}{changed}, {when}{where} ({len(methods)} cell{'s' * (len(methods) > 1)}: "
            f"{kinds})"
        )
    anew = (
        " The addresses of randomness have changed since then. A run today would draw other "
        f"random numbers for {', '.join(sorted(old))}."
        if old
        else ""
    )
    commands = dict.fromkeys(
        f"`{cell.get('command', saved.get('command'))}`" for cell in cells.values()
    )
    torches = dict.fromkeys(cell["environment"]["torch"] for cell in cells.values())
    start = (
        f"Made by {' and '.join(commands)}, {' and '.join(machines)}, torch "
        f"{' and '.join(torches)}."
    )
    return f"{start} {len(cells)} cells{both}. By commit and date: {'; '.join(parts)}.{anew}"


def fedem() -> str:
    """The synthetic row of FedEM's Table 2 beside what was measured."""
    saved = json.loads((RESULTS / "papers" / "fedem.json").read_text())
    rows: dict[str, dict[str, list[float]]] = {}
    clusters = []
    for key, cell in saved["cells"].items():
        name, *rest = key.split("/")
        if "validation" in rest:
            continue
        row = rows.setdefault(name, {})
        for measure in ("accuracy", "accuracy_decile", "nll", "rate", "l1"):
            if measure in cell:
                row.setdefault(measure, []).append(cell[measure])
        if "cluster_sizes" in cell:
            clusters.append(
                f"seed {rest[0]}: {len(cell['cluster_sizes'])} clusters of "
                f"{', '.join(map(str, cell['cluster_sizes']))}"
            )
    for name, row in rows.items():
        row["seeds"] = [float(len(row["accuracy"]))]
        row["rate"] = row["rate"][:1]  # the same for all seeds
        row |= {
            f"published_{key}": [value / 100]
            for key, value in saved["published"].get(name, {}).items()
        }
    columns = [
        report.Column("published_accuracy", title="average, published"),
        report.Column("accuracy", title="average, measured"),
        report.Column("published_accuracy_decile", title="bottom decile, published"),
        report.Column("accuracy_decile", title="bottom decile, measured"),
        report.Column("nll", title="NLL (nats)"),
        report.Column("l1", title="mixture weights: distance to the true ones"),
        report.Column("rate", title="learning rate", digits=2),
        report.Column("seeds", title="seeds", digits=0),
    ]
    rates = sorted({float(key.split("/")[2]) for key in saved["cells"] if "/validation/" in key})
    grid = {
        name: {
            f"{rate:g}": saved["cells"]
            .get(f"{name}/validation/{rate:g}", {})
            .get("accuracy", math.nan)
            for rate in rates
        }
        for name in rows
    }
    tried = [report.Column(f"{rate:g}", title=f"{rate:g}") for rate in rates]
    shown = "\n\n".join(
        [
            report.table(rows, columns=columns, style="markdown"),
            "**Accuracy on validation data by learning rate, seed "
            f"0**\n\n{report.table(grid, columns=tried, style='markdown')}",
        ]
    )
    shown += (
        f"\n\nSizes of the clusters of clustered FL, in clients: {'; '.join(clusters)}."
        if clusters
        else ""
    )
    return f"{shown}\n\n{versions(saved, place=0, drawn_anew={'FedEM', 'D-FedEM', 'pFedMe'})}"


def perinvfl() -> str:
    """The coloured sets, case by case, what the penalty left, and whether what the paper claims
    holds.
    """
    path = RESULTS / "papers" / "perinvfl.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    cells = saved.get("cells", {})
    if not cells:
        return "No cell has been run yet."
    sets: dict[str, dict[str, dict[str, list[float]]]] = {}
    for key, cell in cells.items():
        name, method, _ = key.rsplit("/", 2)
        row = sets.setdefault(name, {}).setdefault(method, {})
        for measure, value in (cell["row"] | cell.get("chosen", {})).items():
            # Their size, which signs that differ by seed would hide.
            slope = measure in {f"g{j}" for j in range(4)}
            row.setdefault(measure, []).append(abs(value) if slope else value)
    cases = [f"p{p}" for p in (0.1, 0.2, 0.3, 0.4, 0.5)]
    scored = [report.Column(case, title=f"p = {case[1:]}") for case in cases]
    scored += [report.Column(key, title=key) for key in ("worst", "average")]
    scored += [
        report.Column("held_back", title="training colours"),
        report.Column("seeds", digits=0),
    ]
    seen = [report.Column(f"g{j}", title=f"abs(g), client {j}", digits=4) for j in range(4)]
    seen += [
        report.Column(f"turn{k}", title=f"abs(logit) at {90 * k}°", digits=2) for k in range(4)
    ]
    seen += [
        report.Column("rate", title="personal rate", digits=4),
        report.Column("lam", title="pull", digits=1),
    ]
    parts = []
    for name, rows in sets.items():
        for row in rows.values():
            row["seeds"] = [float(len(next(iter(row.values()))))]
        if "p0.1" not in next(iter(rows.values())):
            columns = [report.Column(key, title=key) for key in ("training", "test")]
            for method, row in saved["published"].items():
                rows[f"{method}, published"] = {key: [value / 100] for key, value in row.items()}
            parts.append(f"**{name}**\n\n{report.table(rows, columns=columns, style='markdown')}")
            continue
        there = {key for row in rows.values() for key in row}
        tables = [
            report.table(rows, columns=[c for c in columns if c.key in there], style="markdown")
            for columns in (scored, seen)
        ]
        parts.append(f"**{name}**\n\n" + "\n\n".join([*tables, _claims(rows, cases)]))
    anew = {
        "IRM",
        "GroupDRO",
        "IRM-L2",
        "IRM-FT",
        "PerInvFL-IRM",
        "PerInvFL-DRO",
        "Ditto",
        "pFedMe",
    }
    parts.append(versions(saved, place=1, drawn_anew=anew))
    return "\n\n".join(parts)


def _claims(rows: dict[str, dict[str, list[float]]], cases: list[str]) -> str:
    """List what the paper's text claims of one set, by means over seeds; a method that is not there
    yet leaves its claims open.
    """
    mean = {
        method: {key: sum(values) / len(values) for key, values in row.items()}
        for method, row in rows.items()
    }
    ours, plain = ("PerInvFL-IRM", "PerInvFL-DRO"), ("FedAvg", "Ditto", "FedAvg-FT", "pFedMe")
    spread = {
        method: max(row[c] for c in cases) - min(row[c] for c in cases)
        for method, row in mean.items()
    }

    def verdict(needed: tuple[str, ...], holds: Any) -> str:
        return (
            ("holds" if holds() else "does not hold")
            if all(method in mean for method in needed)
            else "open"
        )

    others = tuple(method for method in mean if method not in ours)

    def best(key: str) -> bool:
        return max(mean[m][key] for m in ours) > max(mean[m][key] for m in others)

    lines = [
        ("the best worst case is PerInvFL's", verdict(ours, lambda: best("worst"))),
        ("the best average is PerInvFL's", verdict(ours, lambda: best("average"))),
        (
            "the spread over cases of the PerInvFL form with the smaller spread is at most 1.5 "
            "times IRM's, and less than half of that of FedAvg, Ditto, FedAvg-FT and pFedMe",
            verdict(
                (*ours, "IRM", *plain),
                lambda: (
                    min(spread[m] for m in ours) <= 1.5 * spread["IRM"]
                    and min(spread[m] for m in ours) < 0.5 * min(spread[m] for m in plain)
                ),
            ),
        ),
        (
            "IRM-L2 and IRM-FT are worse than IRM, on average",
            verdict(
                ("IRM", "IRM-L2", "IRM-FT"),
                lambda: (
                    mean["IRM"]["average"] > max(mean[m]["average"] for m in ("IRM-L2", "IRM-FT"))
                ),
            ),
        ),
        (
            "not a claim of the paper: IRM is above FedAvg at p = 0.1",
            verdict(("IRM", "FedAvg"), lambda: mean["IRM"]["p0.1"] > mean["FedAvg"]["p0.1"]),
        ),
    ]
    return "\n".join(
        [
            "| claim | result here |",
            "|---|---|",
            *(f"| {claim} | {found} |" for claim, found in lines),
        ]
    )


def same_digits() -> str:
    """Fits over sites beside statsmodels' and lifelines' to the pooled rows."""
    saved = json.loads((RESULTS / "same_digits.json").read_text())
    lines = [
        [
            name.replace("_", " "),
            f"{row['rows']:,} in {row['sites']}",
            *(
                f"{row[key]:.0e}" if key in row else ""
                for key in ("coefficient", "error", "log_likelihood")
            ),
            f"{row['seconds']:.2f}",
            f"{row['rival_seconds']:.2f}",
        ]
        for name, row in saved["rows"].items()
    ]
    heads = [
        "fit",
        "rows in sites",
        "coefficients",
        "standard errors",
        "log likelihood (nats)",
        "seconds",
        "pooled, seconds",
    ]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def many_rows() -> str:
    """How long a logistic regression of a million rows takes."""
    saved = json.loads((RESULTS / "same_digits.json").read_text())
    row = saved["many"]
    lines = [
        [title, f"{row[key]:.1f}", f"{row[key] / row['rival']:.2f}"]
        for key, title in (
            ("shared", "one intercept for all sites"),
            ("per_site", "an intercept for each site"),
            ("rival", "statsmodels, one intercept, pooled rows"),
        )
    ]
    size = f"{row['rows']:,} rows of {row['sites']} sites, {row['columns']} columns"
    return f"{ruled([size, 'seconds', 'ratio'], lines)}\n\n{made(saved)}"


def published_digits() -> str:
    """Cox's regressions over sites beside figures that others printed."""
    saved = json.loads((RESULTS / "same_digits.json").read_text())
    lines = [
        [
            f"`{one['data']}`, {one['term']}",
            *(f"{value:.5f}" for value in one["published"]),
            *(f"{value:.5f}" for value in one["ours"]),
        ]
        for one in saved["published"]
    ]
    heads = ["data, term", "published coefficient", "error", "over sites", "error"]
    return ruled(heads, lines)


def alone() -> str:
    """Posteriors of one network, beside laplace-torch: mean and error over seeds."""
    saved = json.loads((RESULTS / "alone.json").read_text())

    def told(values: list[float], digits: int) -> str:
        error = statistics.stdev(values) / math.sqrt(len(values))
        return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"

    def line(name: str, row: Any) -> list[str]:
        by = {key: [one[key] for one in row["seeds"]] for key in row["seeds"][0]}
        seconds = [f"{statistics.fmean(by[f'{key}_seconds']):.2g}" for key in ("fit", "predict")]
        return [name, row["precision"], told(by["nll"], 3), told(by["ece"], 3), *seconds]

    lines = [line(name, row) for name, row in saved["rows"].items()]
    heads = ["posterior", "precision", "NLL (nats)", "ECE", "fit (s)", "597 predictions (s)"]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def coverage() -> str:
    """How often 90 % intervals of sites' own coefficients hold, by size of site."""
    saved = json.loads((RESULTS / "truth.json").read_text())
    said = {
        "bf.stats.mixed": "mixed model",
        "own rows, bf.stats.glm": "own rows alone",
        "exact posterior": "exact posterior",
    }
    lines = []
    for problem in ("linear", "logistic"):
        for way, name in said.items():
            cell = saved["cells"].get(f"{problem}/{way}")
            if cell is None:
                continue
            share, error = cell["coverage"]["90"]
            lines.append(
                [
                    f"{problem}, {name}",
                    f"{share:.3f} ± {error:.3f}",
                    *(f"{one:.2f}" for one in cell["by_client"]["90"]),
                    f"{cell['common']['90']:.2f}" if cell["common"] else "",
                    f"{cell['error']:.3f}",
                    str(cell["federations"]),
                    str(cell["refused"] or cell["absent"] or ""),
                ]
            )
    heads = ["90 % intervals", "over all", *(f"{n} rows" for n in saved["sizes"])]
    heads += ["the federation's", "error", "federations", "federations, or sites, without a fit"]
    return f"{ruled(heads, lines)}\n\n{versions(saved, place=1, drawn_anew=set())}"


TRUTHS = {
    "linear": "**Clients' own coefficients, linear**",
    "logistic": "**Clients' own coefficients, logistic**",
    "shared": "**One linear model, its values at new rows**",
    "network": "**One network of 21 weights, its values at new rows**",
    "schools": "**Eight schools**",
    "hospitals": "**Four hospitals**",
}


SPENT = ("rounds", "bytes")


def truth() -> str:
    """Every way to believe beside the truth, or beside a reference where nobody knows it."""
    saved = json.loads((RESULTS / "truth.json").read_text())
    parts = []
    for problem, title in TRUTHS.items():
        cells = {
            key.split("/")[1]: cell
            for key, cell in saved["cells"].items()
            if key.startswith(f"{problem}/")
        }
        if not cells:
            continue
        if "shift" in next(iter(cells.values())):
            heads = ["way", "mean", "sd: least", "sd: most", *SPENT]
            lines = [
                [way, f"{cell['shift']:.2f}", *(f"{t:.2f}" for t in cell["ratios"]), *_spent(cell)]
                for way, cell in cells.items()
            ]
        else:
            ends = [f"{n} rows" for n in (saved["sizes"][0], saved["sizes"][-1])]
            heads = ["way", "federations", "true", "90 % intervals", *ends, "50 % intervals"]
            heads += ["even ranks", "sd", *(f"sd, {end}" for end in ends), "error", *SPENT]
            lines = [[way, *_judged(cell), *_spent(cell)] for way, cell in cells.items()]
        parts.append(f"{title}\n\n{ruled(heads, lines)}")
    return "\n\n".join([*parts, versions(saved, place=1, drawn_anew=set())])


def _judged(cell: dict[str, Any]) -> list[str]:
    """What is found of a way where the truth is known; of points the error alone."""
    distance = f"{cell['rms'] / cell['least_rms']:.2f}" if "rms" in cell else "-"
    if "coverage" not in cell:
        return [str(cell["federations"]), *["-"] * 9, distance]
    shares = {
        name: f"{share:.3f}" + ("" if error is None else f" ± {error:.3f}")
        for name, (share, error) in cell["coverage"].items()
    }
    widths = ["-", "-", "-"]
    if "ratio" in cell:
        found = cell["ratio"], cell["ratios"][0], cell["ratios"][-1]
        widths = [f"{width:.2f}" for width in found]
    even = "-"
    if cell["even"] is not None:
        even = f"{cell['even']:.3f}" if cell["even"] >= 1e-3 else "< 0.001"
    return [
        str(cell["federations"]),
        {True: "yes", False: "no", None: "too few"}[cell["true"]],
        shares["90"],
        *(f"{cell['by_client']['90'][place]:.2f}" for place in (0, -1)),
        shares["50"],
        even,
        *widths,
        distance,
    ]


def _spent(cell: dict[str, Any]) -> list[str]:
    return [f"{cell[name]:,.0f}" if cell[name] else "-" for name in SPENT]


def leaving() -> str:
    """List what leaves a client of a deployment of pFedVEM with calibration, in Markdown."""
    from bayesfl.flower import leaves

    method = bf.algorithms.pfedvem(bf.models.mlp(64, hidden=20, outputs=10))
    steps = (
        bf.calibration.Choice(),
        bf.calibration.Temperature(),
        bf.calibration.Bias(),
        bf.calibration.Conformal(),
        bf.calibration.Abstention(split="test"),
    )
    sent: dict[tuple[str, str], list[str]] = {}
    for one in leaves(method, calibration=steps):
        size = f" ({one.size:,} numbers)" if one.size > 1 else ""
        where = (one.when, "" if one.when.startswith("once") else one.what)
        what = f": {one.what}" if one.when.startswith("once") else ""
        sent.setdefault(where, []).append(f"`{one.name}`{size}{what}")
    lines = ["| when | what is sent | which is |", "|---|---|---|"]
    lines += [f"| {when} | {'; '.join(names)} | {what} |" for (when, what), names in sent.items()]
    return "\n".join(lines)


PAGES = {
    ROOT / "README.md": (demo,),
    ROOT / "docs" / "demo.md": (demo, demo_rates, demo_settings),
    ROOT / "docs" / "methods.md": (implemented,),
    ROOT / "docs" / "deployment.md": (leaving,),
    ROOT / "docs" / "api" / "names.md": (names_to_train,),
    ROOT / "docs" / "api" / "names-of-parts.md": (names_of_parts,),
    ROOT / "docs" / "selection.md": (selection,),
    ROOT / "docs" / "long-training.md": (pfedvem,),
    ROOT / "docs" / "links.md": (links,),
    ROOT / "docs" / "promises.md": (promises,),
    ROOT / "docs" / "howto" / "networks.md": (networks,),
    ROOT / "docs" / "howto" / "statistics.md": (coverage,),
    ROOT / "docs" / "same-digits.md": (same_digits, published_digits, many_rows),
    ROOT / "docs" / "howto" / "posteriors.md": (alone,),
    ROOT / "docs" / "truth.md": (truth,),
    ROOT / "docs" / "privacy.md": (privacy,),
    ROOT / "docs" / "speed.md": (
        engines,
        rivals,
        curvature,
        fedsi_round,
        curvature_every,
        programs,
    ),
    ROOT / "docs" / "papers" / "fedsi.md": (fedsi,),
    ROOT / "docs" / "papers" / "fedem.md": (fedem,),
    ROOT / "docs" / "papers" / "perinvfl.md": (perinvfl,),
}


if __name__ == "__main__":
    for page, makers in PAGES.items():
        text = page.read_text()
        for make in makers:
            begin, end = f"<!-- {make.__name__}: begin -->", f"<!-- {make.__name__}: end -->"
            text = (
                text[: text.index(begin) + len(begin)] + f"\n{make()}\n" + text[text.index(end) :]
            )
        page.write_text(text)
