"""Draws pictures of studies from the committed results: python docs/pictures.py.

Those of subnetworks, links, truth, long training and the network are drawn by their benchmarks.
"""

import math
import runpy
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bayesfl import stats
from bayesfl.data.names import natural
from bayesfl.evaluation.plots.look import GREY, INK, OKABE_ITO, clean, finish, lines, new_figure

ROOT = Path(__file__).parent.parent
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))


def spots(
    ax: Axes, rows: Iterable[Sequence[float]], colour: str, label: str, *, marker: str = "o"
) -> None:
    """Draw one spot a row, mean and standard error, from the top down; an empty row has none."""
    for place, values in enumerate(rows):
        if values:
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0
            ax.errorbar(
                statistics.fmean(values),
                place,
                xerr=error,
                color=colour,
                marker=marker,
                markersize=5,
                linestyle="none",
                label=label if place == 0 else None,
            )


def named(ax: Axes, names: Sequence[str], title: str) -> None:
    """Name rows from the top down."""
    clean(ax)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(True, axis="y", color="0.93", linewidth=0.8)
    ax.set_title(title, fontsize="medium", loc="left")


def below(figure: Figure, ax: Axes) -> None:
    """Write the legend of one panel below all."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def fedsi() -> Figure:
    """What a form of FedSI detects, and what its probabilities lose."""
    _, tables = TABLES["_fedsi"]()
    shown = {
        "FedAvg-FT": "s",
        "FedSI's MAP": "D",
        "FedSI, contrasts": "o",
        "FedSI, 100 draws": "o",
        "FedSI-Fac, contrasts": "v",
        "FedSI, whole body, contrasts": "P",
    }
    figure = new_figure((8, 4))
    axes = figure.subplots(1, 2)
    for ax, (title, table) in zip(axes, tables.items(), strict=True):
        for (name, marker), colour in zip(shown.items(), OKABE_ITO, strict=False):
            row = table[name]
            found = row["nll_pooled"], row["near_auroc"]
            (x, dx), (y, dy) = (
                (statistics.fmean(one), statistics.stdev(one) / math.sqrt(len(one)))
                for one in found
            )
            ax.errorbar(
                x,
                y,
                xerr=dx,
                yerr=dy,
                color=colour,
                marker=marker,
                markersize=6,
                label=name,
                linestyle="none",
            )
        clean(ax, grid="both")
        ax.set_title(title, fontsize="medium", loc="left")
        ax.set_xlabel("NLL after one temperature (nats), lower is better")
    axes[0].set_ylabel("AUROC of unseen labels")
    below(figure, axes[0])
    return figure


def fedem() -> Figure:
    """Published and measured accuracies."""
    saved = TABLES["results"]("papers/fedem")
    synthetic = {
        tuple(key.split("/")[1:]): cell
        for key, cell in saved["cells"].items()
        if key.startswith("synthetic/") and "/validation/" not in key
    }
    names = list(dict.fromkeys(name for name, _ in synthetic))
    figure = new_figure((8, 3.6))
    axes = figure.subplots(1, 2, sharey=True)
    panels = {"accuracy": "Average over clients", "accuracy_decile": "Bottom decile of clients"}
    for ax, (key, title) in zip(axes, panels.items(), strict=True):
        ours = [
            [cell[key] for (other, _), cell in synthetic.items() if other == name] for name in names
        ]
        theirs = [
            [saved["published"][name][key] / 100] if name in saved["published"] else []
            for name in names
        ]
        named(ax, names, title)
        spots(ax, ours, OKABE_ITO[0], "measured")
        spots(ax, theirs, OKABE_ITO[1], "published", marker="D")
        ax.set_xlabel("accuracy")
    below(figure, axes[0])
    return figure


def common() -> Figure:
    """Accuracy of every method, federation by federation."""
    plan = TABLES["results"]("papers/common")["plan"]
    tables = {part: TABLES["_paper"]("common", part) for part in plan}
    tables = {part: rows for part, rows in tables.items() if any(rows.values())}
    names = list(dict.fromkeys(name for rows in tables.values() for name in rows))
    figure = new_figure((9, 9))
    axes = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for ax, (part, rows) in zip(axes, tables.items(), strict=True):
        named(ax, names, part)
        found = [rows.get(name, {}).get("accuracy", []) for name in names]
        spots(ax, found, OKABE_ITO[0], "accuracy")
        ax.set_xlabel("accuracy")
    return figure


def pfedvem_paper() -> Figure:
    """Published and measured accuracies, and how confident clients are."""
    saved, rows = (
        TABLES["results"]("papers/pfedvem"),
        TABLES["_paper"]("pfedvem", "CIFAR-100"),
    )
    told = [cell["clients"] for cell in saved["cells"].values() if "clients" in cell]
    figure = new_figure((8, 3.6))
    left, *more = figure.subplots(1, 2 if told else 1, squeeze=False)[0]
    named(left, list(rows), "")
    for key, colour, marker in (("published", OKABE_ITO[1], "D"), ("accuracy", OKABE_ITO[0], "o")):
        spots(left, [row.get(key, []) for row in rows.values()], colour, key, marker=marker)
    left.set_xlabel("accuracy (diamonds: published, dots: measured)")
    for right in more:
        clean(right)
        x, y, c = (
            [value for one in told for value in one[key]]
            for key in ("rows", "precision", "accuracy")
        )
        dots = right.scatter(x, y, c=c, cmap="viridis", s=14)
        figure.colorbar(dots, label="client's accuracy")
        right.set(xscale="log", yscale="log", xlabel="training images of a client")
        right.set_ylabel("confidence of pFedVEM, 1 / rho²")
    return figure


def fedpac_paper() -> Figure:
    """Accuracy on digits and on the sets that were run, and by the share of uniform data."""
    digits = TABLES["results"]("fedpac_digits")["rows"]
    tables = {
        f"digits, {kind}": {name: row["before_accuracy"] for name, row in rows.items()}
        for kind, rows in digits.items()
    }
    shares: dict[float, dict[str, list[float]]] = {}
    for part in TABLES["results"]("papers/fedpac")["plan"]:
        rows = TABLES["_paper"]("fedpac", part)
        rows.pop("most frequent class", None)  # far below the others
        if any(rows.values()):
            shown = {name: row.get("accuracy", []) for name, row in rows.items()}
            if share := part.partition(", uniform ")[2]:
                shares[float(share)] = shown
            else:
                tables[part] = shown
    down = math.ceil((len(tables) + 1) / 3)
    figure = new_figure((12, 3.6 * down))
    axes = [figure.add_subplot(down, 3, place + 1) for place in range(len(tables) + 1)]
    last = axes.pop()
    for one in lines(next(iter(shares.values()))):
        found = {share: rows[one["label"]] for share, rows in sorted(shares.items())}
        found = {share: seeds for share, seeds in found.items() if seeds}
        errors = [
            np.std(seeds, ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else 0.0
            for seeds in found.values()
        ]
        last.errorbar(list(found), list(map(np.mean, found.values())), errors, marker="o", **one)
    finish(
        last,
        "Fashion-MNIST, 200 images a client",
        legend=True,
        xlabel="share of uniform data",
        ylabel="accuracy",
    )
    for ax, (part, rows) in zip(axes, tables.items(), strict=True):
        named(ax, list(rows), part)
        spots(ax, list(rows.values()), OKABE_ITO[0], "accuracy")
        ax.set_xlabel("accuracy")
    return figure


def perinvfl() -> Figure:
    """The worst case on each coloured set, seed by seed."""
    _, tables = TABLES["_perinvfl"]()
    figure = new_figure((8, 5.6))
    axes = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for ax, (title, rows) in zip(axes, tables.items(), strict=True):
        named(ax, list(rows), title)
        for place, (name, row) in enumerate(rows.items()):
            colour = OKABE_ITO[0] if name.startswith("PerInvFL") else INK
            mean = statistics.fmean(row["worst"])
            ax.plot(row["worst"], [place] * len(row["worst"]), "o", color=colour, markersize=4)
            ax.plot([mean, mean], [place - 0.3, place + 0.3], color=colour, linewidth=2)
        ax.axvline(0.5, color=GREY, linestyle="--", linewidth=1, zorder=0)
        ax.text(0.51, 0, "chance", va="center", fontsize=8, color=GREY)
    figure.supxlabel("accuracy in the worst case: three seeds, and their mean", fontsize="medium")
    return figure


def promises() -> Figure:
    """NLL of each method by the steps of calibration."""
    _, tables = TABLES["_promises"]()
    steps = {
        "nll": "as trained",
        "nll_t": "after one temperature",
        "nll_b": "and a bias for each client",
    }
    figure = new_figure((9, 3.6))
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (title, rows) in zip(axes, tables.items(), strict=True):
        named(ax, list(rows), title)
        for (key, said), colour, marker in zip(steps.items(), OKABE_ITO, "Dos", strict=False):
            spots(ax, [row[key] for row in rows.values()], colour, said, marker=marker)
        ax.set_xlabel("NLL (nats)")
        ax.set_xlim(left=0)
    below(figure, axes[0])
    return figure


def same_digits() -> Figure:
    """The largest difference from the pooled fit."""
    rows: Mapping[str, dict[str, float]] = TABLES["results"]("same_digits")["rows"]
    kinds = {
        "coefficient": "coefficients, curves, statistics",
        "error": "standard errors",
    }
    figure = new_figure((8, 4.6))
    ax = figure.subplots()
    named(ax, [name.replace("_", " ") for name in rows], "")
    for (key, said), colour, marker in zip(kinds.items(), OKABE_ITO, "oD", strict=False):
        found = [[row[key]] if key in row else [] for row in rows.values()]
        spots(ax, found, colour, said, marker=marker)
    ax.set_xscale("log")
    ax.set_xlim(1e-17, 1e-3)
    ax.axvline(2**-52, color=GREY, linestyle="--", linewidth=1, zorder=0)
    ax.text(2**-52, -0.6, "rounding of float64", ha="center", va="bottom", fontsize=8, color=GREY)
    ax.set_xlabel("largest absolute difference from the fit to the pooled rows")
    below(figure, ax)
    return figure


def densities() -> Figure:
    """Means and standard deviations beside the references'."""
    rows: Mapping[str, dict[str, float]] = TABLES["results"]("densities")["rows"]
    figure = new_figure((8, 3))
    left, right = figure.subplots(1, 2, sharey=True)
    named(left, list(rows), "")
    spots(left, [[row["mean"]] for row in rows.values()], OKABE_ITO[0], "mean", marker="o")
    left.set_xlim(0, 0.1)
    left.set_xlabel("largest difference of a mean (sd)")
    ends = [[row["least_sd"], row["most_sd"]] for row in rows.values()]
    spots(right, ends, OKABE_ITO[1], "least and largest", marker="D")
    right.axvline(1, color=GREY, linestyle="--", linewidth=1, zorder=0)
    right.set_xlim(0.8, 1.2)
    right.set_xlabel("ratio of standard deviations")
    return figure


def speed() -> Figure:
    """Time of a round in units of a plain loop."""
    rows = [
        row
        for name, row in TABLES["results"]("engines")["rows"].items()
        if "bare" in row["sides"] and not name.endswith("_busy")
    ]
    figure = new_figure((8, 4.6))
    ax = figure.subplots()
    titles, before = list[str](), ""
    for row in rows:
        if not row["title"].startswith("the same"):
            before = row["title"].split(",")[0]
        titles.append(row["title"].replace("the same", before))
    named(ax, titles, "")
    for side, colour, marker in (("1 worker", OKABE_ITO[0], "o"), ("2 workers", OKABE_ITO[1], "D")):
        spots(ax, [[row["sides"][side]["ratio"]] for row in rows], colour, side, marker=marker)
    ax.axvline(1, color=GREY, linestyle="--", linewidth=1, zorder=0)
    ax.text(1, -0.6, "plain loop, one thread", ha="center", va="bottom", fontsize=8, color=GREY)
    ax.set_xlim(left=0)
    ax.set_xlabel("time of a round, in units of a plain loop over clients")
    below(figure, ax)
    return figure


def readme() -> Figure:
    """Coverage as trained and after, and hazard ratios of hospitals, federated and pooled."""
    figure = new_figure((9, 3.6))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    ways = {
        "pfedvem": "pFedVEM,\nas trained",
        "fedavg, heads": "FedAvg with\nresult.heads()",
        "bf.stats.mixed": "bf.stats.mixed",
    }
    cells = TABLES["results"]("truth")["cells"]
    named(left, list(ways.values()), "Coverage of 90 % intervals")
    for shift, kind, colour, marker in (
        (-0.12, "linear", OKABE_ITO[0], "o"),
        (0.12, "logistic", OKABE_ITO[1], "s"),
    ):
        found = [cells[f"{kind}/{way}"]["coverage"]["90"] for way in ways]
        left.errorbar(
            [100 * share for share, _ in found],
            [place + shift for place in range(len(ways))],
            xerr=[196 * error for _, error in found],
            color=colour,
            marker=marker,
            linestyle="none",
            label=f"{kind} regression",
        )
    left.axvline(90, color=INK, linestyle=":", linewidth=1)
    left.set_xlim(65, 100)
    left.set_xlabel("intervals that contain the truth (%)")
    left.legend(loc="lower left", frameon=False, fontsize="small")
    lung(right)
    return figure


def lung(ax: Axes) -> None:
    """Draw hazard ratios of women against men at hospitals, and of all by both ways."""
    from lifelines import CoxPHFitter
    from lifelines.datasets import load_lung

    rows = load_lung().rename(columns={"ph.ecog": "ecog", "status": "dead"})
    rows["female"] = rows["sex"] - 1
    rows = rows[rows.groupby("inst")["inst"].transform("size").ge(13)].dropna(subset=["ecog"])
    frames = {f"H{number:.0f}": frame for number, frame in rows.groupby("inst")}
    terms = ["age", "female", "ecog"]
    sites = stats.tables(frames, terms=terms, also=["time", "dead"])
    found = stats.cox(sites, time="time", event="dead", exact_times=True).by_site("female")
    pooled = CoxPHFitter().fit(rows[[*terms, "time", "dead"]], "time", "dead")
    own = [
        (f"{name} ({row.rows:.0f} patients)", row.estimate, row.low, row.high, INK, "s")
        for name, row in sorted(list(found.iterrows())[:-1], key=lambda one: natural(one[0]))
        if not row.why
    ]
    joint = found.iloc[-1]
    low, high = pooled.confidence_intervals_.loc["female"]
    own += [
        ("federated", joint.estimate, joint.low, joint.high, OKABE_ITO[0], "D"),
        ("pooled (lifelines)", pooled.params_["female"], low, high, OKABE_ITO[1], "D"),
    ]
    named(ax, [name for name, *_ in own], "Hazard ratio of women, with 95 % intervals")
    for place, (_, *values, colour, marker) in enumerate(own):
        middle, least, most = (math.exp(value) for value in values)
        ax.plot([least, most], [place, place], color=colour, linewidth=1.5)
        ax.plot(middle, place, marker, color=colour, markersize=6)
    ax.axvline(1, color=GREY, linestyle="--", linewidth=1, zorder=0)
    ax.set_xscale("log")
    ax.set_xlim(0.05, 100)
    ax.set_xticks([0.1, 0.5, 1, 2, 10, 50], ["0.1", "0.5", "1", "2", "10", "50"])
    ax.minorticks_off()


def calibrated() -> Figure:
    """NLL before and after calibration, and the coverage of sets."""
    _, tables = TABLES["_promises"]()
    shown = ("FedAvg", "Ditto", "FedPer", "pFedVEM")
    figure = new_figure((9, 3.8))
    left, right = figure.subplots(1, 2, sharey=True)
    rows = [(data, name, table[name]) for data, table in tables.items() for name in shown]
    for ax, title in ((left, "NLL"), (right, "Coverage of 90 % sets, clients' mean")):
        named(ax, [f"{name}, {data}" for data, name, _ in rows], title)
    spots(left, [row["nll"] for *_, row in rows], OKABE_ITO[1], "as trained", marker="D")
    spots(left, [row["nll_b"] for *_, row in rows], OKABE_ITO[0], "calibrated")
    left.set_xlim(left=0)
    left.set_xlabel("nats")
    sets = [[100 * one for one in row["shrunk_coverage"]] for *_, row in rows]
    spots(right, sets, OKABE_ITO[0], "calibrated")
    right.axvline(90, color=INK, linestyle=":", linewidth=1)
    right.set_xlim(65, 100)
    right.set_xlabel("rows whose set contains the label (%)")
    below(figure, left)
    return figure


def methods() -> Figure:
    """Accuracy and NLL of the demo's methods over its seeds."""
    rows = {
        name: row
        for name, row in TABLES["results"]("demo")["rows"].items()
        if not name.endswith("draws")
    }
    figure = new_figure((9, 3))
    axes = figure.subplots(1, 2, sharey=True)
    panels = {"accuracy": "Accuracy", "nll": "NLL (nats)"}
    for ax, (key, title) in zip(axes, panels.items(), strict=True):
        named(ax, [name.removesuffix(", mean") for name in rows], title)
        for place, row in enumerate(rows.values()):
            ax.plot(row[key], [place] * len(row[key]), "o", color=GREY, markersize=4, alpha=0.6)
        spots(ax, [row[key] for row in rows.values()], OKABE_ITO[0], "mean", marker="D")
    axes[0].set_xlabel("clients' mean; grey: seeds")
    axes[1].set_xlabel("lower is better")
    return figure


if __name__ == "__main__":
    doors, papers = (readme, calibrated, methods), (fedsi, fedem, perinvfl, pfedvem_paper)
    studies = (fedpac_paper, common, promises, same_digits, densities, speed)
    for draw in (*doors, *papers, *studies):
        name = draw.__name__.replace("_", "-")
        draw().savefig(ROOT / "docs" / "images" / f"{name}.png")
