"""Writes the tables of the README and of pages under docs from the committed results: python
docs/tables.py.

What is implemented comes from the compositions themselves, public names from the docstrings, all
else from the files under benchmarks/results, which the benchmarks and `make demo` write.
"""

import ast
import importlib
import inspect
import json
import math
import re
import runpy
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import bayesfl as bf
from bayesfl.evaluation import report

ROOT = Path(__file__).parent.parent
FIGURES = runpy.run_path(str(ROOT / "docs" / "figures.py"))
both = FIGURES["both"]
RESULTS = ROOT / "benchmarks" / "results"
Tables = dict[str, dict[str, dict[str, list[float]]]]
"""By table, row and measure, the values of all seeds."""
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


ARXIV = {
    **dict.fromkeys(("fedem", "d_fedem", "fedavg_ft"), "2108.10252"),
    **dict.fromkeys(("irm_l2", "irm_ft", "perinvfl"), "2211.11243"),
    **dict.fromkeys(("pfedmap", "pfedvem", "pfedvem_held"), "2305.12557"),
    **dict.fromkeys(("fedsi", "fedsi_fac", "fedsi_full"), "2404.15657"),
    "apfl": "2003.13461",
    "clustered": "1910.01991",
    "ditto": "2012.04221",
    "fedamp": "2007.03797",
    "fedavg": "1602.05629",
    "bpfed": "2309.15499",
    "fedbabu": "2106.06042",
    "fedbn": "2102.07623",
    "fedfomo": "2012.08565",
    "fedivon": "2411.18385",
    "fedpac": "2306.11867",
    "fedper": "1912.00818",
    "fedprox": "1812.06127",
    "fedrep": "2102.07078",
    "fedrod": "2107.00778",
    "fedpop": "2206.03611",
    "fola": "2102.01936",
    "group_dro": "1911.08731",
    "ifca": "2006.04088",
    "irm": "1907.02893",
    "knn_per": "2111.09360",
    "l2gd": "2002.05516",
    "lg_fedavg": "2001.01523",
    "moon": "2103.16257",
    "fedep": "2302.04228",
    "fedpa": "2010.05273",
    "pfedbayes": "2206.07977",
    "pfedhn": "2103.04628",
    "pfedme": "2006.08848",
    "pvi": "2202.12275",
    "fedsa_lora": "2410.01463",
    "qlsd": "2106.00797",
    "scaffold": "1910.06378",
}
"""Where each method's paper stands on arXiv."""


def implemented() -> str:
    """List what is implemented, in Markdown."""

    def paper(e: bf.algorithms.Entry) -> str:
        return e.paper if e.paper == "-" else f"[{e.paper}](https://arxiv.org/abs/{ARXIV[e.name]})"

    lines = [
        "| method | in `bf.algorithms` | paper | posterior of a client | sent each round | never "
        "leaves the client |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {e.title} | `{e.name}` | {paper(e)} | {e.posterior} | {e.sent} | {e.private} |"
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


def leaving() -> str:
    """List what leaves a client of a deployment of pFedVEM with calibration, in Markdown."""
    from bayesfl.flower import leaves

    method = bf.algorithms.pfedvem(bf.models.mlp(64, hidden=20, outputs=10))
    steps = (
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


TRAINING = (
    "bf",
    "What these return and raise",
    *(
        f"bf.{name}"
        for name in (
            "callbacks",
            "data",
            "engine",
            "faults",
            "flower",
            "models",
            "optim",
            "pyro",
            "stats",
        )
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
    saved = results("demo")
    table = runpy.run_path(str(ROOT / "examples" / "pfedvem.py"))["table"](
        saved["rows"]
    ).to_markdown()
    return f"{table}\n\n{made({'command': 'make demo', **saved})}"


def demo_rates() -> str:
    """NLL on validation data by the demo's methods and rates, the chosen in bold, in Markdown."""
    saved = results("sensitivity")["rates"]
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
    saved = results("sensitivity")["settings"]
    rows = results("demo")["rows"]
    names = list(next(iter(saved["rows"].values())))
    at_mean = {name: rows.get(f"{name}, mean", rows.get(name)) for name in names}
    settings = {"the demo": at_mean, **saved["rows"]}
    parts = []
    for key, title in (("accuracy", "Accuracy"), ("nll", "NLL (nats)")):
        cells = {name: {of: found[name][key] for of, found in settings.items()} for name in names}
        columns = [report.Column(of, title=of, better=report.better(key)) for of in settings]
        parts.append(f"**{title}**\n\n{report.table(cells, columns=columns).to_markdown()}")
    return "\n\n".join([*parts, made(saved)])


def engines() -> str:
    """Time of a round, in Markdown: ratios to the row's unit, beside the target where the file has
    one for that row.
    """
    saved = results("engines")
    heads = ["work", "unit", "1 worker", "target", "2 workers", "target", "unit on 2 threads"]
    lines = []
    for name, row in saved["rows"].items():
        if name.endswith("_busy"):
            continue
        sides = row["sides"]
        unit = next(iter(sides))
        cells = [row["title"], f"{unit}, {sides[unit]['seconds']:.2f} s"]
        for side in (sides["1 worker"], sides["2 workers"]):
            target = f"{side['at_most']:.2f}" if "at_most" in side else ""
            cells += [f"{side['ratio']:.2f}", target]
        threads = sides.get("bare, 2 threads")
        lines.append([*cells, f"{threads['ratio']:.2f}" if threads else ""])
    origins = dict.fromkeys(made(row) for row in saved["rows"].values())
    return "\n\n".join([ruled(heads, lines), *origins])


def overhead() -> str:
    """Show the share of a round that is no training, and what a busy neighbour costs."""
    saved = results("engines")["rows"]
    heads = ["work", "1 worker", "target", "2 workers", "target"]
    heads += ["with a busy neighbour, time on 2 workers / on 1"]
    lines = []
    for name, row in saved.items():
        if name.endswith("_busy"):
            continue
        cells = [row["title"]]
        for side in (row["sides"]["1 worker"], row["sides"]["2 workers"]):
            target = f"{side['rest_at_most']:.2f}" if "rest_at_most" in side else ""
            cells += [f"{side['rest']:.3f}", target]
        busy = saved.get(f"{name}_busy")
        cells.append(f"{busy['sides']['2 workers']['to_one_worker']:.2f}" if busy else "")
        lines.append(cells)
    return ruled(heads, lines)


def ranks() -> str:
    """Time, CPU and memory of two ranks beside one process, by method and number of clients."""
    saved = results("ranks")
    heads = ["run", "one thread, s", "two threads", "two ranks", "CPU of a rank"]
    heads += ["memory of a rank", "MiB between ranks"]
    kept = dict.fromkeys(name.rsplit(", ", 1)[0] for name in saved["rows"])
    lines = []
    for name in kept:
        one, threads, two = (
            saved["rows"][f"{name}, {way}"] for way in ("one thread", "two threads", "two ranks")
        )
        key = "{} / one thread".format
        cells = [threads[key("seconds")], *(two[key(what)] for what in ("seconds", "cpu", "mib"))]
        figures = [f"{cell:.2f}" for cell in cells]
        lines.append([name, f"{one['seconds']:.3f}", *figures, f"{two['mib_sent']:.1f}"])
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def rivals() -> str:
    """Rounds of further methods in units of FedAvg's."""
    saved = results("rivals")
    lines = [
        [
            bf.algorithms.PAPERS[name][1],
            f"{row['steps']:g}",
            f"{row['seconds']:.3f}",
            f"{row['times_fedavg']:.2f}",
        ]
        for name, row in saved["rows"].items()
    ]
    heads = ["method", "gradient steps a client", "CPU seconds a round", "times FedAvg's round"]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def memory() -> str:
    """Show the memory of runs of many clients, and of a federation of many images."""
    saved = results("memory")
    lines = [
        [
            bf.algorithms.PAPERS[name][1],
            f"{row['clients']:,}",
            *(f"{row[key]:,.0f}" for key in ("kept_state_mib", "server_mib", "peak_mib")),
        ]
        for name, row in saved["rows"].items()
    ]
    heads = [
        "method",
        "clients",
        "their state (MiB)",
        "the server's (MiB)",
        "process, at most (MiB)",
    ]
    images = [
        [name, *(f"{row[key]:,.0f}" for key in ("made_mib", "peak_mib")), f"{row['seconds']:.1f}"]
        for name, row in saved["images"]["medians"].items()
    ]
    size = f"{saved['images']['count']:,} images of 3 x 32 x 32"
    held = ruled([size, "held (MiB)", "in a round of FedAvg (MiB)", "seconds"], images)
    return f"{ruled(heads, lines)}\n\n{held}\n\n{made(saved)}"


def scale() -> str:
    """What many clients take on one core, and 100,000 by the slope of the last two numbers."""
    saved, many = results("scale"), 100_000
    keys = ("round_seconds", "evaluation_seconds", "audit_seconds", "file_bytes")

    def line(name: str, clients: str, row: dict[str, float]) -> list[str]:
        held = max(row[f"{step}_mib"] for step in ("round", "evaluated", "audit"))
        *times, size = (row[key] for key in keys)
        added = "-" if clients.endswith("paper") else f"{held:.0f}"
        return [name, clients, *(f"{t:.2f}" for t in times), added, f"{size / 1e6:.1f}"]

    lines = []
    for method in ("fedavg", "pfedvem", "fedem", "fedsi", "scaffold", "local"):
        name = bf.algorithms.PAPERS[method][1]
        rows = {
            clients: saved["rows"][f"{method}, {clients} clients, the longest of 12 rows"]
            for clients in (1_000, 5_000, 20_000)
        }
        lines += [line(name, f"{clients:,}", row) for clients, row in rows.items()]
        uneven = saved["rows"][f"{method}, 20000 clients, the longest of 20000 rows"]
        lines.append(line(name, "20,000, one of 20,000 rows", uneven))
        step = (many - 20_000) / 15_000
        grown = {key: a + (a - rows[5_000][key]) * step for key, a in rows[20_000].items()}
        lines.append(line(name, f"{many:,}, on paper", grown))
    heads = [
        "method",
        "clients",
        "round (s)",
        "evaluation (s)",
        "audit (s)",
        "added (MiB)",
        "file (MB)",
    ]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def curvature() -> str:
    """Curvature beside laplace-torch, row by row: how many times as long the other takes, and how
    much of its memory ours does.
    """
    saved = results("curvature")
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
            known = side["memory_mib"] and ours["memory_mib"]
            share = f"{ours['memory_mib'] / side['memory_mib']:.3f}" if known else "-"
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
    saved = results("fedsi")
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
    saved = results("curvature_every")
    rules = {"wasserstein": "", "curved_wasserstein": "curved weights, "}
    (rows,) = by_seed(
        ("", rules[key.split("/")[1]] + when, row)
        for key, cell in saved["cells"].items()
        for every, row in cell["rows"].items()
        for when in [f"every {every} rounds" if every != "1" else "every round"]
    ).values()
    columns = [
        report.Column("map_accuracy", title="MAP: accuracy", better="higher"),
        report.Column("map_nll", title="NLL (nats)", better="lower"),
        report.Column("per_class_accuracy", title="class by class: accuracy", better="higher"),
        report.Column("per_class_nll", title="NLL", better="lower"),
        report.Column("contrasts_nll", title="contrasts: NLL", better="lower"),
        report.Column("global_nll", title="the server's prior: NLL", better="lower"),
    ]
    return f"{report.table(rows, columns=columns).to_markdown()}\n\n{versions(saved)}"


def programs() -> str:
    """FedPAC's quadratic programs."""
    saved = results("simplex")
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


def _selection(part: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A part of the study of subnetworks, and what it found of each network."""
    saved = results("selection")[part]
    found = {
        f"{DATASETS[dataset]} {scaling}": cell
        for dataset, by in saved["results"].items()
        for scaling, cell in by.items()
    }
    return saved, found


def _rules(measure: Callable[[dict[str, Any], str], Any], *, scaled: bool = False) -> Tables:
    """What `measure` finds of each rule in each network."""
    words = runpy.run_path(str(ROOT / "benchmarks" / "selection.py"))["in_words"]
    return {
        network: {
            words(name): {"": value}
            for name in cell["rows"]
            if (scaled or "scaled" not in name)
            and (value := measure(cell["rows"], name)) is not None
        }
        for network, cell in _selection("alone")[1].items()
    }


def selection() -> str:
    """Show what rules of subnetworks are worth beside the MAP with one temperature, in Markdown."""

    def beyond(key: str) -> Callable[[dict[str, Any], str], list[float]]:
        return lambda rows, name: [
            a - b for a, b in zip(rows[name][key], rows["MAP, one temperature"][key], strict=True)
        ]

    saved, _ = _selection("alone")
    nll, auroc = (
        beside(_rules(beyond(key)), [report.Column("", title="")])
        for key in ("nll", "near_entropy")
    )
    return (
        f"NLL minus that of the MAP with one temperature (nats, paired by seed):\n\n{nll}\n\nAUROC "
        "of images of unseen classes by entropy, minus that of the MAP with one temperature "
        f"(paired by seed):\n\n{auroc}\n\n{made(saved)}"
    )


def selection_more() -> str:
    """Show the weights that rules select, and what that costs, in Markdown."""

    def of(key: str) -> Callable[[dict[str, Any], str], Any]:
        return lambda rows, name: rows[name].get(key)

    _, alone = _selection("alone")
    control, seen = _selection("control")
    network = [
        report.Column("train_nll", title="NLL on training images", digits=4),
        report.Column("constant_pixels", title="share of constant pixels", digits=2),
        report.Column("dead_units", title="share of dead units", digits=2),
        report.Column("uncurved", title="share of weights without curvature", digits=2),
    ]
    counted = [
        report.Column("near_count", title="unseen classes"),
        report.Column("other_count", title="the other data set"),
        report.Column("permuted_count", title="permuted pixels"),
    ]
    networks = report.table(
        {name: cell["network"] for name, cell in alone.items()},
        columns=network,
        corner="network",
    ).to_markdown()
    counts = report.table(
        {name: cell["rows"]["changed constant pixels"] for name, cell in seen.items()},
        columns=counted,
        corner="images",
    ).to_markdown()
    parts = [
        f"**The networks**\n\n{networks}",
        "**AUROC of the number of changed pixels that were constant in training, without a "
        f"network**\n\n{counts}",
    ]
    for title, key, digits in (
        ("NLL (nats)", "nll", 3),
        ("Share of the selected weights without curvature", "uncurved", 2),
        ("AUROC of unseen classes by entropy", "near_entropy", 3),
        ("AUROC of unseen classes by the epistemic part", "near_epistemic", 3),
        ("NLL on lit images minus NLL on the same images unlit (nats)", "lit_change", 3),
    ):
        columns = [report.Column("", title="", digits=digits)]
        parts.append(f"**{title}**\n\n{beside(_rules(of(key), scaled=key == 'nll'), columns)}")
    return "\n\n".join([*parts, made(control)])


KINDS = {"near": "unseen labels", "other": "another data set", "far": "permuted pixels"}


def _fedsi() -> tuple[dict[str, Any], Tables]:
    """The cells of FedSI's tables, by data set and row, beside what was published; other images are
    told by the better of two scores, entropy after one temperature and the epistemic part.
    """
    saved = results("papers/fedsi")
    tables = by_seed(
        (DATASETS[key.split("/")[0]], title, row)
        for key, cell in saved["cells"].items()
        for title, row in cell["rows"].items()
    )
    for dataset, published in saved["published"].items():
        for name, row in tables[DATASETS[dataset]].items():
            row |= {
                f"published_{key}": [value / (100 if key == "accuracy" else 1)]
                for key, value in published.get(name, {}).items()
            }
            for kind in KINDS:
                scores = [row.get(f"{kind}_{key}_auroc") for key in ("tempered", "epistemic")]
                row[f"{kind}_auroc"] = max(filter(None, scores), key=statistics.fmean)
    return saved, tables


def fedsi() -> str:
    """FedSI beside its MAP and other methods: accuracy, NLL, and detection of other images."""
    _, tables = _fedsi()
    names = ["Local", "FedAvg", "FedAvg-FT", "FedSI's MAP", "FedSI", "FedSI, contrasts"]
    names += ["FedSI, 100 draws", "FedSI, the server's prior", "FedSI-Fac, contrasts"]
    names += ["FedSI, whole body, contrasts", "pFedVEM, fixed variances, mean"]
    columns = [
        report.Column("published_accuracy", title="accuracy, published"),
        report.Column("accuracy", better="higher"),
        report.Column("nll_pooled", title="NLL, one temperature (nats)", better="lower"),
        report.Column("pooled_aurc", title="AURC", digits=4, better="lower"),
    ]
    columns += [
        report.Column(f"{kind}_auroc", title=f"AUROC, {what}", better="higher")
        for kind, what in KINDS.items()
    ]
    kept = {dataset: {name: rows[name] for name in names} for dataset, rows in tables.items()}
    return titled(kept, columns)


def fedsi_more() -> str:
    """Every row of FedSI's tables: calibration beside the paper's, NLL, and detection."""
    saved, tables = _fedsi()
    kinds = [("ece", "ECE"), ("mce", "MCE"), ("brier", "Brier")]
    first = [
        report.Column(f"{prefix}{key}", title=f"{title}, {word}")
        for key, title in kinds
        for prefix, word in (("published_", "published"), ("", "measured"))
    ]
    second = [
        report.Column("before_accuracy", title="accuracy before pooling", digits=4),
        report.Column("accuracy", digits=4),
        report.Column("nll", title="NLL (nats)"),
        report.Column("nll_pooled", title="one temperature"),
        report.Column("nll_client", title="a temperature for each client"),
        report.Column("ece_pooled", title="ECE, one temperature"),
        report.Column("precision", title="log10 of the precision", digits=1),
    ]
    scores = {
        "entropy": "entropy",
        "tempered": "entropy, one temperature",
        "epistemic": "epistemic part",
    }
    third = [
        report.Column(f"{kind}_{score}_auroc", title=f"{what}: {by}")
        for kind, what in KINDS.items()
        for score, by in scores.items()
    ]
    parts = []
    for dataset, rows in tables.items():
        for row in rows.values():
            row["precision"] = [math.log10(value) for value in row.get("precision", ())]
        rows = {name: {k: v for k, v in row.items() if v} for name, row in sorted(rows.items())}
        for title, columns in (
            ("calibration", first),
            ("NLL", second),
            ("AUROC of other images", third),
        ):
            parts.append(titled({f"{dataset}, {title}": rows}, columns))
    return "\n\n".join([*parts, versions(saved)])


def fedem() -> str:
    """The synthetic row of FedEM's Table 2 beside what was measured."""
    saved = _part(results("papers/fedem"), "synthetic")
    cells = {key: cell for key, cell in saved["cells"].items() if "/validation/" not in key}
    rows = by_seed(
        (*key.split("/")[:2], _numbers(cell | cell["options"])) for key, cell in cells.items()
    )["synthetic"]
    for name, row in rows.items():
        row["rate"] = row["rate"][:1]  # the same for all seeds
        row |= {
            f"published_{key}": [value / 100]
            for key, value in saved["published"].get(name, {}).items()
        }
    columns = [
        report.Column("published_accuracy", title="average, published"),
        report.Column("accuracy", title="average, measured", better="higher"),
        report.Column("published_accuracy_decile", title="bottom decile, published"),
        report.Column("accuracy_decile", title="bottom decile, measured", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("l1", title="mixture weights: distance to the true ones"),
        report.Column("rate", title="learning rate", digits=2),
    ]
    shown = report.table(rows, columns=columns).to_markdown()
    return f"{shown}\n\n{versions(saved, anew={'FedEM', 'D-FedEM', 'pFedMe'})}"


def _part(saved: dict[str, Any], part: str) -> dict[str, Any]:
    """The results of one part of a paper."""
    cells = {key: cell for key, cell in saved["cells"].items() if key.startswith(f"{part}/")}
    return saved | {"cells": cells}


def fedem_letters() -> str:
    """FedEM on EMNIST letters by its number of components."""
    columns = [
        *PAPER,
        report.Column("seconds", digits=0),
        report.Column("rate", title="learning rate", digits=2),
    ]
    part = "EMNIST letters"
    made = versions(_part(results("papers/fedem"), part))
    return f"{_beside_paper('fedem', part, columns)}\n\n{made}"


PAPER = [
    report.Column("accuracy", better="higher"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("nll_tempered", title="NLL, one temperature", better="lower"),
    report.Column("ece", title="ECE", better="lower"),
    report.Column("ece_tempered", title="ECE, one temperature", better="lower"),
    report.Column("passes", title="passes", digits=0),
]


def _paper(name: str, part: str) -> dict[str, dict[str, list[float]]]:
    """The rows of a part in the order of its plan, those that were not run without measures, and
    what was published of each.
    """
    saved, found = results(f"papers/{name}"), FIGURES["paper_rows"](name, part)
    rows: dict[str, dict[str, list[float]]] = {}
    for method in saved["plan"][part]["methods"]:
        own = [row for row in found if row == method or row.rpartition(", ")[0] == method]
        rows |= {row: found.get(row, {}) for row in own or [method]}
    for row, of in rows.items():
        alike = ("passes", "rate", "factor")
        of |= {key: [statistics.fmean(of[key])] for key in alike if key in of}
        published = saved["published"].get(row) or saved["published"].get(f"{row}, mean")
        if published:
            known = published["accuracy"] / 100
            of["published"] = [known]
            if "accuracy" in of:
                of["difference"] = [value - known for value in of["accuracy"]]
    often = {
        key.rpartition("/")[2]: cell["often"]
        for key, cell in saved["cells"].items()
        if key.startswith(f"{part}/") and cell.get("often") is not None
    }
    return rows | ({"most frequent class": {"accuracy": [*often.values()]}} if often else {})


def _not_run(name: str, part: str) -> str:
    """Say which cells of a part were not run, and which failed, and why."""
    saved = results(f"papers/{name}")
    missing: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}
    diverged: list[str] = []
    for method in saved["plan"][part]["methods"]:
        seeds = saved["plan"][part]["seeds"]
        cells = [saved["cells"].get(f"{part}/{method}/{seed}") for seed in seeds]
        if gone := [str(seed) for seed, cell in zip(seeds, cells, strict=True) if cell is None]:
            missing.setdefault(", ".join(gone), []).append(method)
        errors = [cell["error"] for cell in cells if cell and "error" in cell]
        far = [error for error in errors if error.startswith("DivergenceError")]
        for error in sorted({*errors} - {*far}):
            failed.setdefault(error.split("\n")[0], []).append(method)
        if far:
            diverged.append(f"{method} diverged in {len(far)} of {len(cells)} seeds.")
    told = [
        f"Not run: seeds {seeds} of "
        + ("all." if of == saved["plan"][part]["methods"] else f"{'; '.join(of)}.")
        for seeds, of in missing.items()
    ]
    # What an error says, without its remedy.
    told += [f"{'; '.join(of)}: {error.split(';')[0].rstrip('.')}." for error, of in failed.items()]
    return " ".join([*told, *diverged]) or "All planned cells were run."


def _beside_paper(name: str, part: str, columns: list[report.Column]) -> str:
    rows = _paper(name, part)
    there = {key for row in rows.values() for key in row}
    shown = [column for column in columns if column.key in there]
    table = report.table(rows, columns=shown).to_markdown() if shown else ""
    return f"{table}\n\n{_not_run(name, part)}"


def _made_paper(name: str) -> str:
    saved = results(f"papers/{name}")
    return versions(saved) if saved["cells"] else ""


def pfedvem_paper() -> str:
    """Show pFedVEM's Table 1 beside what was measured."""
    columns = [report.Column("published"), *PAPER]
    columns.insert(2, report.Column("difference"))
    columns.append(report.Column("rate", title="learning rate", digits=2))
    return f"{_beside_paper('pfedvem', 'CIFAR-100', columns)}\n\n{_made_paper('pfedvem')}"


def fedpac_paper() -> str:
    """FedPAC's comparison on the sets that are run."""
    columns = [*PAPER, report.Column("rate", title="learning rate", digits=2)]
    columns.insert(1, report.Column("trained_accuracy", title="after local training"))
    return f"{_of_fedpac(SMALL, columns)}\n\n{_made_paper('fedpac')}"


def fedpac_paper_more() -> str:
    """The other federations of FedPAC's comparison."""
    return _of_fedpac(
        [part for part in results("papers/fedpac")["plan"] if part not in SMALL], PAPER
    )


SMALL = ("EMNIST letters", "CIFAR-10")


def _of_fedpac(parts: Sequence[str], columns: list[report.Column]) -> str:
    return "\n\n".join(f"**{part}**\n\n{_beside_paper('fedpac', part, columns)}" for part in parts)


def common() -> str:
    """Accuracy and NLL of every method on the federations that are complete."""
    tables = {part: _paper("common", part) for part in results("papers/common")["plan"]}
    tables = {part: rows for part, rows in tables.items() if any(rows.values())}
    columns = [
        report.Column("accuracy", better="higher"),
        report.Column("nll_tempered", title="NLL", better="lower"),
    ]
    return f"{beside(tables, columns)}\n\n{_made_paper('common')}"


def common_leads() -> str:
    """List the five most accurate methods of each federation that is complete, and simple rows."""
    lines, simple = [], ("most frequent class", "Local", "FedAvg")
    for part in results("papers/common")["plan"]:
        found = {name: row.get("accuracy", []) for name, row in _paper("common", part).items()}
        whole = {name: values for name, values in found.items() if len(values) == 3}
        if {*simple, "FedSI, whole body"} <= whole.keys():
            first = sorted(whole, key=lambda name: -statistics.fmean(whole[name]))[:5]
            lines.append(
                [
                    part,
                    *(both(whole[name]) for name in simple),
                    "; ".join(f"{name} {both(whole[name])}" for name in first),
                ]
            )
    return ruled(["federation", *simple, "the five most accurate"], lines)


def common_more() -> str:
    """Every measure of the common table, federation by federation."""
    columns = [
        *PAPER,
        report.Column("bytes_up", title="kB up", scale=1e-3, digits=0),
        report.Column("bytes_down", title="kB down", scale=1e-3, digits=0),
        report.Column("seconds", digits=1),
        report.Column("factor", title="rates times", digits=1),
    ]
    return "\n\n".join(
        f"**{part}**\n\n{_beside_paper('common', part, columns)}"
        for part in results("papers/common")["plan"]
    )


def gpu() -> str:
    """Show the seconds of rounds and of curvature on a GPU, where one was at hand."""
    if not (RESULTS / "gpu.json").exists():
        return "Not measured: no machine with a CUDA device was at hand."
    rows = results("gpu")["rows"]
    table = report.table({name: row["seconds"] for name, row in rows.items()}, corner="seconds")
    known = next(iter(rows.values()))
    return f"{table.to_markdown()}\n\n{made(known)} GPU: {known['environment']['accelerator']}."


def _numbers(cell: Mapping[str, Any]) -> dict[str, float]:
    """The measures of a cell that are numbers."""
    return {key: value for key, value in cell.items() if isinstance(value, int | float)}


def fedem_rates() -> str:
    """Accuracy on validation data by learning rate, the chosen in bold."""
    saved = {
        key.removeprefix("synthetic/"): cell
        for key, cell in results("papers/fedem")["cells"].items()
        if key.startswith("synthetic/")
    }
    tried = {key: cell for key, cell in saved.items() if "/validation/" in key}
    rates = sorted({cell["options"]["rate"] for cell in tried.values()})
    lines = []
    for name in dict.fromkeys(key.split("/")[0] for key in saved):
        found = [tried[f"{name}/validation/rate {rate:g}"]["value"] for rate in rates]
        chosen = saved[f"{name}/0"]["options"]["rate"]
        shown = zip(rates, found, strict=True)
        lines.append([name, *(f"**{a:.3f}**" if r == chosen else f"{a:.3f}" for r, a in shown)])
    return ruled(["method", *(f"{rate:g}" for rate in rates)], lines)


COLOURED = {
    "rc-mnist": "MNIST, rotated",
    "rc-mnist, upright": "MNIST, upright",
    "rc-fmnist": "Fashion-MNIST, rotated",
    "rc-fmnist, upright": "Fashion-MNIST, upright",
}
CASES = [f"p{p}" for p in (0.1, 0.2, 0.3, 0.4, 0.5)]
OURS = ("PerInvFL-IRM", "PerInvFL-DRO")


def _perinvfl() -> tuple[dict[str, Any], Tables]:
    """The cells of the coloured sets, set by set."""
    saved = results("papers/perinvfl")
    tables = by_seed(
        (COLOURED[name], method, cell["row"])
        for key, cell in saved["cells"].items()
        for name, method, _ in [key.rsplit("/", 2)]
        if name in COLOURED
    )
    return saved, tables


def perinvfl() -> str:
    """The coloured sets: the worst case, PerInvFL's margins, and whether what the
    paper claims holds.
    """
    saved, tables = _perinvfl()
    columns = [report.Column("worst", title="", better="higher")]
    anew = {"IRM", "GroupDRO", "IRM-L2", "IRM-FT", *OURS, "Ditto", "pFedMe"}
    parts = [beside(tables, columns), _margins(tables), _claims(tables)]
    return "\n\n".join([*parts, versions(saved, anew=anew)])


def _margins(tables: Tables) -> str:
    """How far the better form of PerInvFL lies above the best rival, paired by seed."""
    lines = []
    for name, rows in tables.items():
        cells = [name]
        for key in ("worst", "average"):
            mean = {method: statistics.fmean(row[key]) for method, row in rows.items()}
            form = max((m for m in OURS if m in mean), key=lambda m: mean[m])
            rival = max((m for m in mean if m not in OURS), key=lambda m: mean[m])
            apart = [a - b for a, b in zip(rows[form][key], rows[rival][key], strict=True)]
            error = statistics.stdev(apart) / math.sqrt(len(apart))
            cells += [
                f"{form} over {rival}",
                f"{statistics.fmean(apart):+.3f} ± {error:.3f}",
                f"{sum(one > 0 for one in apart)} of {len(apart)}",
            ]
        lines.append(cells)
    heads = ["set", "worst case", "margin", "seeds above", "average", "margin", "seeds above"]
    return ruled(heads, lines)


def _claims(tables: Tables) -> str:
    """List what the paper's text claims, set by set, by means over seeds; a method that is not
    there yet leaves its claims open.
    """
    found = [_verdicts(rows) for rows in tables.values()]
    lines = [[claim, *(one[claim] for one in found)] for claim in found[0]]
    return ruled(["by means over seeds", *tables], lines)


def _verdicts(rows: dict[str, dict[str, list[float]]]) -> dict[str, str]:
    mean = {
        method: {key: statistics.fmean(values) for key, values in row.items()}
        for method, row in rows.items()
    }
    plain = ("FedAvg", "Ditto", "FedAvg-FT", "pFedMe")
    spread = {
        method: max(row[c] for c in CASES) - min(row[c] for c in CASES)
        for method, row in mean.items()
    }

    def verdict(needed: tuple[str, ...], holds: Callable[[], bool]) -> str:
        if any(method not in mean for method in needed):
            return "open"
        return "holds" if holds() else "does not hold"

    def best(key: str) -> bool:
        others = [method for method in mean if method not in OURS]
        return max(mean[m][key] for m in OURS) > max(mean[m][key] for m in others)

    return {
        "the best worst case is PerInvFL's": verdict(OURS, lambda: best("worst")),
        "the best average is PerInvFL's": verdict(OURS, lambda: best("average")),
        "its spread over cases is at most 1.5 times IRM's and less than half of that of FedAvg, "
        "Ditto, FedAvg-FT and pFedMe": verdict(
            (*OURS, "IRM", *plain),
            lambda: (
                min(spread[m] for m in OURS) <= 1.5 * spread["IRM"]
                and min(spread[m] for m in OURS) < 0.5 * min(spread[m] for m in plain)
            ),
        ),
        "IRM-L2 and IRM-FT are worse than IRM, on average": verdict(
            ("IRM", "IRM-L2", "IRM-FT"),
            lambda: mean["IRM"]["average"] > max(mean[m]["average"] for m in ("IRM-L2", "IRM-FT")),
        ),
        "not a claim of the paper: IRM is above FedAvg at p = 0.1": verdict(
            ("IRM", "FedAvg"), lambda: mean["IRM"]["p0.1"] > mean["FedAvg"]["p0.1"]
        ),
    }


def perinvfl_more() -> str:
    """Accuracy case by case, and IRM's own experiment beside its published figures."""
    saved, tables = _perinvfl()
    columns = [report.Column(case, title=f"p = {case[1:]}") for case in CASES]
    columns.append(report.Column("average", title="average", better="higher"))
    columns.append(report.Column("held_back", title="training colours"))
    every = titled(tables, columns)
    (central,) = by_seed(
        ("", key.split("/")[1], cell["row"])
        for key, cell in saved["cells"].items()
        if key.startswith("coloured mnist, central/")
    ).values()
    for method, row in saved["published"].items():
        central[f"{method}, published"] = {key: [value / 100] for key, value in row.items()}
    columns = [report.Column(key, title=key) for key in ("training", "test")]
    return f"{every}\n\n{titled({'Coloured MNIST on one machine': central}, columns)}"


def fedpac() -> str:
    """FedPAC and others on digits in two kinds of groups, and its margins, paired by seed."""
    saved = results("fedpac_digits")
    columns = [
        report.Column("before_accuracy", title="accuracy", better="higher"),
        report.Column("after_accuracy", title="after local training", better="higher"),
        report.Column("before_nll", title="NLL (nats)", better="lower"),
    ]
    kept = {
        kind: {
            name: {key: row[key] for key in ("before_accuracy", "after_accuracy", "before_nll")}
            for name, row in rows.items()
        }
        for kind, rows in saved["rows"].items()
    }
    margins = {
        kind: {
            f"FedPAC minus {name}": {
                key: [a - b for a, b in zip(rows["FedPAC"][key], row[key], strict=True)]
                for key in row
            }
            for name, row in rows.items()
            if name not in ("FedPAC", "Local")
        }
        for kind, rows in kept.items()
    }
    plain = [replace(one, better=None) for one in columns]
    return f"{beside(kept, columns)}\n\n{beside(margins, plain, corner='margin')}\n\n{made(saved)}"


def links() -> str:
    """Return the measures of FedSI's whole body under each link, means and standard errors over
    seeds, one table for each data set.
    """
    saved = results("links")
    tables = by_seed(
        (DATASETS[key.split("/")[0]], name, row)
        for key, cell in saved["cells"].items()
        for name, row in cell["rows"].items()
    )
    columns = [
        report.Column("accuracy", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_tempered", title="with one temperature", better="lower"),
        report.Column("ece", title="ECE", better="lower"),
        report.Column("brier", title="Brier", better="lower"),
        report.Column("entropy_auroc", title="AUROC of unseen classes, entropy", better="higher"),
        report.Column("epistemic_auroc", title="epistemic", better="higher"),
    ]
    return f"{titled(tables, columns)}\n\n{made(next(iter(saved['cells'].values())) | saved)}"


def _promises() -> tuple[dict[str, Any], Tables]:
    """Steps of calibration for each method, by data set."""
    saved = results("promises")
    return saved, by_seed(
        (DATASETS.get(dataset, "Digits"), name, cell["row"])
        for key, cell in saved["cells"].items()
        if key.startswith("methods/")
        for _, dataset, name, _ in [key.split("/")]
    )


def promises() -> str:
    """Show NLL and sets before and after calibration, for each method and data set."""
    _, tables = _promises()
    columns = [
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_b", title="after T and bias", better="lower"),
        report.Column("pooled_worst", title="worst client, pooled sets"),
        report.Column("shrunk_worst", title="shrunk sets"),
    ]
    return titled(tables, columns)


def promises_more() -> str:
    """Return what steps of calibration do for each method, a table for each data set and question,
    and how often promises are broken.
    """
    saved, tables = _promises()
    quality = [
        report.Column("accuracy", better="higher"),
        report.Column("accuracy_b", title="accuracy with T and bias", better="higher"),
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
    for dataset, rows in tables.items():
        for title, columns in (("probabilities", quality), ("sets for 0.9", sets)):
            parts.append(titled({f"{dataset}, {title}": rows}, columns))
    made_up = saved["cells"]["sets"]["row"]
    alike = {case: row for case, row in made_up.items() if case.startswith("alike")}
    ((_, unlike),) = ((case, row) for case, row in made_up.items() if case not in alike)
    heads = ["coverage, own scores alike", *next(iter(alike.values()))]
    lines = [
        [case.removeprefix("alike, "), *(f"{v:.3f}" for v in row.values())]
        for case, row in alike.items()
    ]
    parts.append(ruled(heads, lines))
    told = ("coverage", "worst", "below .85")
    heads = ["scales that differ", "coverage", "worst of twenty", "share of clients below 0.85"]
    lines = [
        [kind, *(f"{unlike[f'{kind}, {key}']:.3f}" for key in told)]
        for kind in ("own", "shrunk", "pooled")
    ]
    parts.append(ruled(heads, lines))
    return "\n\n".join([*parts, versions(saved)])


def promises_kept() -> str:
    """Show how often alarms and abstentions break their promises on made-up scores, their speed,
    and what sets cover by the images that calibrate them.
    """
    cells = results("promises")["cells"]
    rest = {
        name: value
        for part in ("alarms", "answers", "speed", "images")
        for name, value in cells[part]["row"].items()
    }
    said = {
        "alarm": "clients with an alarm within 2,000 rows, nothing changed",
        "alarm, ties": "the same, scores with ties",
        "test of 5 % at every look": "clients with a significant 5 % test, repeated after every "
        "row, nothing changed",
        "any of twenty clients at 1 / delta": "federations of twenty with any alarm, nothing "
        "changed",
        "looks until a shift by 1.5 deviations is seen, median": "rows until a shift by 1.5 "
        "standard deviations is seen, median",
        "broken, fixed sequence": "abstention: data sets with more wrong answers than guaranteed",
        "broken, looks right": "the same, the threshold that looks right on the same rows",
        "answered, fixed sequence": "abstention: rows answered",
        "prediction_seconds": "seconds of a prediction pass, 1,000 clients of 100 rows, ten "
        "classes",
        "calibration_seconds": "seconds of temperature, bias and sets for these",
        "looks_per_second": "rows that an alarm takes in a second",
        "training": "FedAvg's own sets on Fashion-MNIST, calibrated on training images: coverage",
        "test": "the same, calibrated on test images",
    }
    lines = [
        [said[name], f"{value:,.0f}" if value > 10 else f"{value:.3f}"]
        for name, value in rest.items()
    ]
    return ruled(
        [
            "shares unless another unit is named; scores are simulated, but in the last two rows",
            "",
        ],
        lines,
    )


def _pfedvem(rounds: Collection[str]) -> tuple[dict[str, Any], Tables]:
    """PFedVEM and its kin at some rounds, by data set."""
    saved = results("pfedvem")
    methods = list(dict.fromkeys(key.split("/")[1] for key in saved["cells"]))
    cells = sorted(saved["cells"].items(), key=lambda one: methods.index(one[0].split("/")[1]))
    return saved, by_seed(
        (DATASETS[dataset], f"{method}, round {round}", found)
        for key, cell in cells
        for dataset, method, _ in [key.split("/")]
        for round, found in cell["milestones"].items()
        if round in rounds
    )


def pfedvem() -> str:
    """Accuracy after pooling and NLL of pFedVEM and its kin, early and late, but for two settings
    that fail.
    """
    _, tables = _pfedvem(("20", "800"))
    failing = ("pFedVEM, start 1", "pFedMAP, precision 100")
    tables = {
        dataset: {name: row for name, row in rows.items() if not name.startswith(failing)}
        for dataset, rows in tables.items()
    }
    columns = [
        report.Column("accuracy", title="accuracy", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_drawn", title="by 20 draws", better="lower"),
    ]
    return beside(tables, columns)


def pfedvem_more() -> str:
    """Every milestone of pFedVEM and its kin, means and standard errors over seeds."""
    saved, tables = _pfedvem(("20", "100", "200", "400", "800"))
    columns = [
        report.Column("before_accuracy", title="before pooling", better="higher"),
        report.Column("accuracy", title="after", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("nll_drawn", title="by 20 draws", better="lower"),
        report.Column("rho", title="rho"),
        report.Column("width", title="width"),
        report.Column("distance", title="distance"),
    ]
    return f"{titled(tables, columns)}\n\n{versions(saved)}"


def privacy() -> str:
    """Accuracy against epsilon, and what masks cost."""
    saved = results("privacy")
    columns = [
        report.Column("epsilon", title="epsilon", digits=2),
        report.Column("epsilon_own", title="epsilon, own rounds", digits=2),
        report.Column("accuracy"),
        report.Column("nll", title="NLL (nats)", digits=3),
        report.Column("megabytes_up", title="MB sent", digits=1),
        report.Column("seconds", title="seconds", digits=1),
    ]
    return f"{report.table(saved['rows'], columns=columns).to_markdown()}\n\n{made(saved)}"


def networks() -> str:
    """Return the measures of each network of examples/networks.py under each method, means and
    standard errors over seeds.
    """
    saved = results("networks")
    tables = by_seed((*key.split("/")[:2], cell["row"]) for key, cell in saved["cells"].items())
    sizes = {key.split("/")[0]: cell["size"] for key, cell in saved["cells"].items()}
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
        parts.append(f"`{part}`: {said}.\n\n{report.table(rows, columns=columns).to_markdown()}")
    return "\n\n".join([*parts, versions(saved)])


def alone() -> str:
    """Posteriors of one network, beside laplace-torch: mean and error over seeds."""
    saved = results("alone")

    def line(name: str, row: Any) -> list[str]:
        by = {key: [one[key] for one in row["seeds"]] for key in row["seeds"][0]}
        seconds = [f"{statistics.fmean(by[f'{key}_seconds']):.2g}" for key in ("fit", "predict")]
        return [name, row["precision"], both(by["nll"]), both(by["ece"]), *seconds]

    lines = [line(name, row) for name, row in saved["rows"].items()]
    heads = ["posterior", "precision", "NLL (nats)", "ECE", "fit (s)", "597 predictions (s)"]
    return f"{ruled(heads, lines)}\n\n{made(saved)}"


def coverage() -> str:
    """How often 90 % intervals of sites' own coefficients hold, by size of site."""
    saved = results("truth")
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
    return f"{ruled(heads, lines)}\n\n{versions(saved)}"


def truth() -> str:
    """Coverage of clients' own coefficients by every way, linear and logistic side by side."""
    saved = results("truth")
    problems = ("linear", "logistic")
    ways = list(
        dict.fromkeys(key.split("/")[1] for key in saved["cells"] if key.split("/")[0] in problems)
    )
    lines = []
    for way in ways:
        cells = [way]
        for problem in problems:
            cell = saved["cells"].get(f"{problem}/{way}")
            if cell is None or "coverage" not in cell:
                cells += ["-", "-", "-"]
                continue
            share, error = cell["coverage"]["90"]
            width = f"{cell['ratio']:.2f}" if "ratio" in cell else "-"
            cells += [f"{share:.3f}" + (f" ± {error:.3f}" if error else ""), width, _verdict(cell)]
        lines.append(cells)
    heads = ["method"]
    for problem in problems:
        heads += [f"{problem}: 90 % intervals", "sd", "covers"]
    return ruled(heads, lines)


def truth_more() -> str:
    """Every way to believe beside the truth, or beside a reference where nobody knows it."""
    saved = results("truth")
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
            heads = ["method", "mean", "sd: least", "sd: most", *SPENT]
            lines = [
                [way, f"{cell['shift']:.2f}", *(f"{t:.2f}" for t in cell["ratios"]), *_spent(cell)]
                for way, cell in cells.items()
            ]
        else:
            ends = [f"{n} rows" for n in (saved["sizes"][0], saved["sizes"][-1])]
            heads = ["method", "federations", "covers", "90 % intervals", *ends]
            heads += ["90 %, in common", "50 % intervals"]
            heads += ["even ranks", "sd", *(f"sd, {end}" for end in ends), "error", *SPENT]
            lines = [[way, *_judged(cell), *_spent(cell)] for way, cell in cells.items()]
        parts.append(f"{title}\n\n{ruled(heads, lines)}")
    return "\n\n".join([*parts, versions(saved)])


TRUTHS = {
    "linear": "**Clients' own coefficients, linear**",
    "logistic": "**Clients' own coefficients, logistic**",
    "correlated": "**Clients' own coefficients, correlated**",
    "shared": "**One linear model, its values at new rows**",
    "network": "**One network of 21 weights, its values at new rows**",
    "program, normal": "**A hierarchy in Pyro, own intercepts, normal**",
    "program, logistic": "**A hierarchy in Pyro, own intercepts, logistic**",
    "schools": "**Eight schools**",
    "hospitals": "**Four hospitals**",
}
SPENT = ("rounds", "bytes")


def _judged(cell: dict[str, Any]) -> list[str]:
    """What is found of a way where the truth is known; of points the error alone."""
    distance = f"{cell['rms'] / cell['least_rms']:.2f}" if "rms" in cell else "-"
    if "coverage" not in cell:
        return [str(cell["federations"]), *["-"] * 10, distance]
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
        _verdict(cell),
        shares["90"],
        *(f"{cell['by_client']['90'][place]:.2f}" for place in (0, -1)),
        f"{cell['common']['90']:.3f}" if cell["common"] else "-",
        shares["50"],
        even,
        *widths,
        distance,
    ]


def _verdict(cell: dict[str, Any]) -> str:
    return {True: "yes", False: "no", None: "too few"}[cell["true"]]


def _spent(cell: dict[str, Any]) -> list[str]:
    return [f"{cell[name]:,.0f}" if cell[name] else "-" for name in SPENT]


def same_digits() -> str:
    """Fits over sites beside statsmodels' and lifelines' to the pooled rows."""
    saved = results("same_digits")
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


def published_digits() -> str:
    """Cox's regressions over sites beside figures that others printed."""
    saved = results("same_digits")
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


def many_rows() -> str:
    """How long a logistic regression of a million rows takes."""
    saved = results("same_digits")
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


def densities() -> str:
    """Posteriors of log densities over sites beside references."""
    rows = results("densities")["rows"]
    lines = [
        [
            name,
            f"{row['rows']:,} in {row['sites']}",
            row["reference"],
            f"{row['mean']:.3f}",
            f"{row['least_sd']:.2f} to {row['most_sd']:.2f}",
            f"{row['questions']}",
            f"{row['bytes'] / 1000:,.0f}",
            f"{row['effective']:.0f}",
            f"{row['seconds']:.1f}",
        ]
        for name, row in rows.items()
    ]
    heads = [
        "model",
        "rows in sites",
        "reference",
        "mean, off by (sd)",
        "sd, ratio",
        "questions",
        "kB a site",
        "effective draws",
        "seconds",
    ]
    return f"{ruled(heads, lines)}\n\n{made(next(iter(rows.values())))}"


def results(name: str) -> dict[str, Any]:
    """Read a file of the committed results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def by_seed(found: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Tables:
    """Gather measures of seeds: by table, row and measure, from each cell's table, row and
    measures.
    """
    tables: Tables = {}
    for table, row, measures in found:
        for key, value in measures.items():
            tables.setdefault(table, {}).setdefault(row, {}).setdefault(key, []).append(value)
    return tables


def titled(tables: Tables, columns: Sequence[report.Column]) -> str:
    """Tables one below another, each under its title, in Markdown."""
    return "\n\n".join(
        f"**{title}**\n\n{report.table(rows, columns=columns).to_markdown()}"
        for title, rows in tables.items()
    )


def beside(tables: Tables, columns: Sequence[report.Column], *, corner: str = "method") -> str:
    """Tables of the same rows side by side, in Markdown."""
    rows: dict[str, dict[str, list[float]]] = {}
    for title, table in tables.items():
        for name, row in table.items():
            found = {f"{title} {key}": values for key, values in row.items()}
            rows.setdefault(name, {}).update(found)
    heads = [
        replace(
            one, key=f"{title} {one.key}", title=f"{title}: {one.title}" if one.title else title
        )
        for title in tables
        for one in columns
    ]
    return report.table(rows, columns=heads, corner=corner).to_markdown()


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


def versions(saved: dict[str, Any], *, anew: Collection[str] = ()) -> str:
    """Say by which commands, when, on what and at which commits a table's cells were made, and
    which of the methods `anew` would draw other random numbers today.
    """
    cells: dict[str, dict[str, Any]] = saved["cells"]
    envs = [cell["environment"] for cell in cells.values()]
    changed = sum(not commit_of(env)[1] for env in envs)
    clean = (
        f"{len(cells) - changed} from clean working trees, {changed} with uncommitted changes"
        if changed
        else "all from clean working trees"
    )
    days = sorted({env["date"][:10] for env in envs})
    commits = dict.fromkeys(commit_of(env)[0][:7] for env in envs)
    old = sorted(
        method
        for method in anew
        if any(
            method in key.split("/") and cell["environment"]["date"] < DRAWN_ANEW
            for key, cell in cells.items()
        )
    )
    again = f" A run today would draw other random numbers for {', '.join(old)}." if old else ""
    commands, machines, torches = (
        " and ".join(dict.fromkeys(found))
        for found in (
            (f"`{cell.get('command', saved.get('command'))}`" for cell in cells.values()),
            (f"{env['cpu']}, {env['cores']} cores" for env in envs),
            (env["torch"] for env in envs),
        )
    )
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Made by {commands}, {when}, {machines}, torch {torches}, at {', '.join(commits)}: "
        f"{len(cells)} cells, {clean}.{again}"
    )


MADE = re.compile(r"(?<=<!-- )(\w+)(: begin -->\n).*?(?=<!-- \1: end -->)", re.DOTALL)
"""What a function of this file or of docs/figures.py writes into a page."""


def written(text: str) -> str:
    """Return a page's text with what its marks name made anew: `<!-- engines: begin -->`, `<!--
    engines: end -->` hold what `engines()` returns.
    """
    makers = {**FIGURES, **globals()}
    return MADE.sub(lambda mark: f"{mark[1]}{mark[2]}{makers[mark[1]]()}\n", text)


def pages() -> list[Path]:
    """Return the README, the page for contributors, every page of the documentation and those
    beside the benchmarks.
    """
    built = ROOT / "docs" / "_build"
    found = [
        page
        for folder in ("docs", "benchmarks")
        for page in sorted((ROOT / folder).rglob("*.md"))
        if built not in page.parents
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text()))
