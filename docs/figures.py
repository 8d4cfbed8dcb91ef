"""Says in three sentences, with figures from the committed results, what each study answers;
docs/tables.py writes them into their pages.
"""

import fnmatch
import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@cache
def results(name: str) -> dict[str, Any]:
    """Read a file of the committed results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def cells(name: str, pattern: str, *path: str) -> list[Any]:
    """Collect what stands under `path` in every cell whose key matches, those of several seeds for
    instance.
    """
    found = []
    for key, cell in results(name)["cells"].items():
        if fnmatch.fnmatchcase(key, pattern):
            for one in path:
                cell = cell[one]
            found.append(cell)
    if not found:
        raise KeyError(f"no cell of {name} matches {pattern!r}")
    return found


def mean(values: Sequence[float], digits: int = 3) -> str:
    """A mean in decimals."""
    return f"{statistics.fmean(values):.{digits}f}"


def both(values: Sequence[float], digits: int = 3) -> str:
    """A mean and its standard error in decimals."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean(values, digits)} ± {error:.{digits}f}"


def minus(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Differences, paired by seed."""
    return [a - b for a, b in zip(these, those, strict=True)]


def still(holds: bool) -> None:
    """Raise ValueError where words of an answer no longer hold of the results."""
    if not holds:
        raise ValueError("the results no longer say what this answer does: write it anew")


def said(text: str) -> str:
    """Wrap a paragraph as the pages are."""
    return textwrap.fill(" ".join(text.split()), 140, break_on_hyphens=False)


def paper_rows(name: str, part: str) -> dict[str, dict[str, list[float]]]:
    """Gather what the cells of a part of a paper measured, {row: {measure: one value a seed}}."""
    rows: dict[str, dict[str, list[float]]] = {}
    for key, cell in results(f"papers/{name}")["cells"].items():
        if key.startswith(f"{part}/") and "/validation/" not in key:
            for title, row in cell.get("rows", {}).items():
                found = row | cell["options"]
                for measure, value in found.items():
                    rows.setdefault(title, {}).setdefault(measure, []).append(value)
    return rows


def counted(name: str) -> tuple[int, int]:
    """Return how many cells of a paper's tables are there, choices left out, and how many are
    planned.
    """
    saved = results(f"papers/{name}")
    plan = {
        f"{part}/{method}/{seed}"
        for part, of in saved["plan"].items()
        for method in of["methods"]
        for seed in of["seeds"]
    }
    return len(plan & saved["cells"].keys()), len(plan)


def common_answer() -> str:
    """Which methods lead where, and how many cells that rests on."""
    (there, planned), leads = counted("common"), {}
    for part in results("papers/common")["plan"]:
        rows = {
            name: row for name, row in paper_rows("common", part).items() if len(row["nll"]) == 3
        }
        if len(rows) > 30:
            best = max(rows, key=lambda name: statistics.fmean(rows[name]["accuracy"]))
            calm = min(rows, key=lambda name: statistics.fmean(rows[name]["nll_tempered"]))
            leads[part] = best, rows[best]["accuracy"], calm, rows[calm]["nll_tempered"]
    accurate = "; ".join(f"{a} on {part} ({both(v)})" for part, (a, v, _, _) in leads.items())
    likely = "; ".join(f"{c} on {part} ({both(v)})" for part, (_, _, c, v) in leads.items())
    return said(
        f"""
        The most accurate are {accurate}. The lowest NLL after one temperature (nats) have {likely}.
        Differences among the first are often within a standard error, each method had one grid of
        five rates, and {there} of {planned} planned cells are there.
        """
    )


def pfedvem_paper_answer() -> str:
    """What pFedVEM reaches on CIFAR-100, as far as it was run."""
    (there, planned), rows = counted("pfedvem"), paper_rows("pfedvem", "CIFAR-100")
    published = results("papers/pfedvem")["published"]
    ours = {name: mean(row["accuracy"]) for name, row in rows.items() if name in published}
    found = ", ".join(f"{name} {value}" for name, value in ours.items())
    theirs = ", ".join(f"{name} {row['accuracy'] / 100:.3f}" for name, row in published.items())
    told = f"Measured so far, at the reduced size: {found}." if ours else "No row is measured yet."
    return said(
        f"""
        It is not known yet: {there} of {planned} planned cells are there. {told} The paper prints,
        at its own size: {theirs}.
        """
    )


def fedpac_paper_answer() -> str:
    """What FedPAC reaches on Fashion-MNIST, as far as it was run, and on digits."""
    there, planned = counted("fedpac")
    rows = {name: mean(row["accuracy"]) for name, row in paper_rows("fedpac", FASHION).items()}
    found = ", ".join(f"{name} {value}" for name, value in rows.items())
    told = f"on Fashion-MNIST so far {found}" if rows else "no row on Fashion-MNIST is measured yet"
    digits = results("fedpac_digits")["rows"]["label skew"]
    small = {name: mean(digits[name]["before_accuracy"]) for name in ("FedPAC", "FedPer", "FedAvg")}
    return said(
        f"""
        It is not known yet: {there} of {planned} planned cells are there, and {told}. On
        handwritten digits FedPAC has an accuracy of {small["FedPAC"]} under label skew in groups,
        FedPer {small["FedPer"]} and FedAvg {small["FedAvg"]}. The paper's own numbers are lost to
        us.
        """
    )


FASHION = "Fashion-MNIST"


def demo_answer() -> str:
    """Who leads in the demo, and where the lead goes."""
    rows = results("demo")["rows"]
    other = results("sensitivity")["settings"]["rows"]["three times the rates"]
    best, next_best = rows["pFedVEM, mean"], rows["FedPer"]
    lead = minus(best["accuracy"], next_best["accuracy"])
    return said(
        f"""
        pFedVEM, which predicts at the mean of its beliefs, leads with an accuracy of
        {mean(best["accuracy"])} and an NLL of {mean(best["nll"])} nats; FedPer follows with
        {mean(next_best["accuracy"])} and {mean(next_best["nll"])}, {both(lead)} behind in
        accuracy, and has the lowest pooled ECE. FedAvg, FedPer, pFedMAP and pFedVEM with scales
        held lie within about a standard error of each other; one model can learn all ten
        digits. The lead depends on the setting: at three times the learning rates pFedVEM has
        {mean(other["pFedVEM"]["accuracy"])} and FedAvg {mean(other["FedAvg"]["accuracy"])}.
        """
    )


def fedsi_answer() -> str:
    """What FedSI reaches, and what its posterior adds and costs."""

    def row(cell: str, title: str, key: str) -> list[float]:
        return cells("papers/fedsi", f"{cell}/*", "rows", title, key)

    def of(data: str, key: str) -> tuple[str, str]:
        tuned, ours = row(f"{data}/fedavg_ft", "FedAvg-FT", key), row(f"{data}/fedsi", MAP, key)
        return mean(tuned), mean(ours)

    MAP, draws, fashion = "FedSI's MAP", "FedSI, 100 draws", "fashion-mnist"
    (tuned, ours), (tuned_f, ours_f) = of("mnist", "accuracy"), of(fashion, "accuracy")
    near, other = of("mnist", "near_tempered_auroc"), of("mnist", "other_tempered_auroc")
    best = mean(row("mnist/fedsi_fac", "FedSI-Fac, contrasts", "nll_pooled"))
    nll = mean(row("mnist/fedavg_ft", "FedAvg-FT", "nll_pooled"))
    near_f, other_f, nll_f, aurc_f = (
        of(fashion, key)[0]
        for key in ("near_tempered_auroc", "other_tempered_auroc", "nll_pooled", "pooled_aurc")
    )
    drawn = {
        key: mean(row(f"{fashion}/fedsi", draws, key))
        for key in ("near_epistemic_auroc", "other_epistemic_auroc", "nll_pooled", "pooled_aurc")
    }
    still(near[0] > near[1] and other[0] > other[1] and nll < best)
    still(drawn["nll_pooled"] > nll_f and drawn["pooled_aurc"] > aurc_f)
    still(drawn["near_epistemic_auroc"] < near_f)
    return said(
        f"""
        FedSI is as accurate as its own MAP estimate ({ours} on MNIST, {ours_f} on Fashion-MNIST)
        and less accurate than FedAvg with fine-tuning ({tuned} and {tuned_f}): we do not find the
        published lead. On MNIST FedAvg-FT also leads in NLL after one temperature, and detects
        unseen labels and another data set better. On Fashion-MNIST FedSI by draws detects another
        data set better than FedAvg-FT (AUROC {drawn["other_epistemic_auroc"]} and {other_f}), and
        pays for it with a higher NLL, a higher AURC and a worse detection of unseen labels.
        """
    )


def fedem_answer() -> str:
    """What FedEM reaches, what it sends, and what the comparison leaves open."""
    saved = results("papers/fedem")

    def of(method: str) -> tuple[str, str]:
        return (
            mean(cells("papers/fedem", f"synthetic/{method}/[0-9]", "accuracy")),
            f"{saved['published'][method]['accuracy'] / 100:.3f}",
        )

    rates = {
        key: cell["options"]["rate"]
        for key, cell in saved["cells"].items()
        if key.startswith("synthetic/")
    }
    chosen = {key: rate for key, rate in rates.items() if key.endswith("/0")}
    tried = {rate for key, rate in rates.items() if "/validation/" in key}
    edge = sum(rate in (min(tried), max(tried)) for rate in chosen.values())
    (local, local_), (fedavg, fedavg_), (fedem, fedem_) = map(of, ("Local", "FedAvg", "FedEM"))
    return said(
        f"""
        Local training agrees with the paper ({local}, published {local_}); every other method
        exceeds its published figure, if it has one, and FedEM leads, as in the paper ({fedem},
        published {fedem_}; FedAvg {fedavg}, published {fedavg_}). FedEM's clients train and send
        three models in every round, and no baseline was given three times the bytes or steps.
        {edge} of the {len(chosen)} chosen learning rates lie on the edge of the grid, so the
        differences hold for this grid alone.
        """
    )


def perinvfl_answer() -> str:
    """Where the paper's claims hold, and by how little."""

    def worst(name: str, method: str) -> list[float]:
        return cells("papers/perinvfl", f"{name}/{method}/*", "row", "worst")

    rotated, upright = "rc-mnist", "rc-fmnist, upright"
    small = minus(worst(rotated, "PerInvFL-DRO"), worst(rotated, "IRM"))
    large = minus(worst(upright, "PerInvFL-DRO"), worst(upright, "IRM"))
    below = sum(one < 0 for one in small)
    return said(
        f"""
        On two of four sets the better of PerInvFL's two forms has the best worst case and the best
        average: its worst case is {both(small)} above IRM's on rotated MNIST, with {below} of
        {len(small)} seeds reversed, and {both(large)} above it on upright Fashion-MNIST. On the
        other two IRM is best. The comparison favours PerInvFL, which has two forms and a tuned rate
        and pull, while FedAvg, GroupDRO, IRM and pFedMe were run once at fixed settings; and even
        its best worst case, {mean(worst(upright, "PerInvFL-DRO"))}, is near chance, 0.5.
        """
    )


def selection_answer() -> str:
    """What a subnetwork is worth beside the whole body and one temperature."""
    found = results("selection")["alone"]["results"]

    def gain(data: str, scaling: str, key: str) -> float:
        rows = found[data][scaling]["rows"]
        return statistics.fmean(minus(rows["whole body"][key], rows["MAP, one temperature"][key]))

    scalings = ("[0, 1]", "[-1, 1]")
    mnist, fashion = ([gain(d, s, "nll") for s in scalings] for d in ("mnist", "fashion-mnist"))
    auroc = [gain("fashion-mnist", s, "near_entropy") for s in scalings]
    return said(
        f"""
        No rule of selection is worth its cost: within the errors, random weights are as good as any
        rule and as the whole body, while the paper's rule picks weights that the training data
        never touch, and its predictions are nearly the MAP's. On MNIST the whole body changes NLL
        by {mnist[0]:+.3f} and {mnist[1]:+.3f} nats against the MAP with one temperature, at the two
        scalings of the pixels. On Fashion-MNIST it changes NLL by {fashion[0]:+.3f} and
        {fashion[1]:+.3f} nats and the AUROC of unseen classes by {auroc[0]:+.2f} and
        {auroc[1]:+.2f}.
        """
    )


def links_answer() -> str:
    """Which link to take, and what the posterior adds."""

    def row(data: str, title: str, key: str) -> list[float]:
        return cells("links", f"{data}/*", "rows", title, key)

    fashion = "fashion-mnist"
    kept, lost = (mean(row(fashion, t, "accuracy")) for t in ("contrasts", "class by class"))
    ours = [mean(row(d, "contrasts", "nll")) for d in (fashion, "mnist")]
    tempered = [mean(row(d, "MAP", "nll_tempered")) for d in (fashion, "mnist")]
    return said(
        f"""
        Take `contrasts`: it keeps the MAP's accuracy, where the papers' link, class by class,
        loses some ({kept} and {lost} on Fashion-MNIST), and has the lowest NLL of the three
        links on both data sets. In NLL it is no better than the MAP with one temperature ({ours[0]}
        and {tempered[0]} nats on Fashion-MNIST, {ours[1]} and {tempered[1]} on MNIST). What the
        posterior adds is detection, and on Fashion-MNIST alone: the AUROC of unseen classes is
        {mean(row(fashion, "contrasts", "epistemic_auroc"))} by its epistemic part and
        {mean(row(fashion, "MAP", "entropy_auroc"))} by the MAP's entropy.
        """
    )


def promises_answer() -> str:
    """What a Bayesian method adds once everything is calibrated, and what is kept."""

    def of(data: str, method: str, key: str) -> str:
        return mean(cells("promises", f"methods/{data}/{method}/*", "row", key))

    fashion, alarms = "fashion-mnist", results("promises")["cells"]["alarms"]["row"]
    return said(
        f"""
        Under label skew neither Bayesian method has the lowest NLL once every method has a
        temperature and a bias: FedAvg-FT has {of("mnist", "FedAvg-FT", "nll_b")} nats on MNIST and
        pFedVEM {of("mnist", "pFedVEM", "nll_b")}, Ditto {of(fashion, "Ditto", "nll_b")} on
        Fashion-MNIST and pFedVEM {of(fashion, "pFedVEM", "nll_b")}. The bias matters most for one
        global model: FedAvg on Fashion-MNIST goes from {of(fashion, "FedAvg", "nll")} nats to
        {of(fashion, "FedAvg", "nll_t")} by a temperature and to {of(fashion, "FedAvg", "nll_b")} by
        a bias on top. Shrunk sets raise the worst client's coverage in every row, though mean
        coverage on Fashion-MNIST is up to a hundredth below the guarantee; on simulated scores
        alarms keep theirs: {alarms["alarm"]:.3f} of clients have a false one, where a 5 % test
        repeated after every row is false for {alarms["test of 5 % at every look"]:.3f}.
        """
    )


def truth_answer() -> str:
    """Which intervals are true, and which are not."""
    found = results("truth")["cells"]

    def held(way: str) -> str:
        return " and ".join(
            f"{found[f'{kind}/{way}']['coverage']['90'][0]:.2f}" for kind in ("linear", "logistic")
        )

    def wide(way: str) -> str:
        return f"{found[f'shared/{way}']['ratio']:.2f}"

    return said(
        f"""
        Those of `bf.stats.mixed` do: 90 % intervals of clients' own coefficients contain the truth
        in {held("bf.stats.mixed")} of cases, for linear and logistic models, those of
        `result.heads()` in {held("fedavg, heads")}; and `result.laplace()` has the right width for
        a linear model that all clients share ({wide("fedavg, PooledLaplace")} times the exact
        standard deviations). Methods that train a belief fall short: 90 % intervals of `pfedvem`
        contain the truth in {held("pfedvem")} of cases, those of `pfedvem_held` in
        {held("pfedvem_held")}. Around weights that all clients trained, a Laplace approximation
        from one client's rows is {wide("fedavg, LinearisedLaplace")} times as wide as the exact
        posterior, and FedSI's {wide("fedsi, half the weights")} times.
        """
    )


def same_digits_answer() -> str:
    """How far fits over sites are from the pooled table."""
    saved = results("same_digits")
    exact = [row["coefficient"] for name, row in saved["rows"].items() if "random" not in name]
    mixed = max(row["coefficient"] for name, row in saved["rows"].items() if "random" in name)
    pairs = [
        (a, b)
        for one in saved["published"]
        for a, b in zip(one["published"], one["ours"], strict=True)
    ]
    met = sum(f"{a:.5f}" == f"{b:.5f}" for a, b in pairs)
    many = saved["many"]
    return said(
        f"""
        Yes: coefficients, curves and test statistics differ from the pooled fit's by
        {max(exact):.0e} at most, and by {mixed:.0e} for a random intercept, where MixedLM stops
        by its gradient. {met} of {len(pairs)} published coefficients and standard errors of Cox
        regressions agree to five decimals. A logistic regression of a million rows from 100
        sites takes {many["shared"] / many["rival"]:.2f} of statsmodels' time on the pooled
        rows.
        """
    )


def densities_answer() -> str:
    """How far posteriors over sites are from references on the pooled rows."""
    rows = results("densities")["rows"]
    known = [row for row in rows.values() if row["reference"] == "posteriordb"]
    heart, school = rows["heart disease, hierarchy"], rows["eight schools, centred"]
    return said(
        f"""
        Nearly: of the models of posteriordb, means are within
        {max(row["mean"] for row in known):.3f} of the reference's standard deviations, which are
        {min(row["least_sd"] for row in known):.2f} to {max(row["most_sd"] for row in known):.2f}
        times the reference's. A logistic hierarchy over four hospitals is within
        {heart["mean"]:.2f} of a chain on the pooled rows, which has
        {heart["rival_effective"]:.0f} effective draws of its slowest parameter, in
        {heart["seconds"] / heart["rival_seconds"]:.3f} of the chain's time. Eight schools, whose
        posterior is a funnel, take {school["questions"]} questions and
        {school["bytes"] / 1000:.0f} kB a site.
        """
    )


def long_training_answer() -> str:
    """Why pFedVEM loses accuracy, and what stops it."""

    def at(data: str, method: str, when: int) -> str:
        return mean(cells("pfedvem", f"{data}/{method}/*", "milestones", str(when), "accuracy"))

    held, tight = "pFedVEM, scales held", "pFedVEM, scales held, prior scale 0.1"
    best = cells("papers/fedsi", "mnist/fedbabu/*", "rows", "FedBABU", "nll_pooled")
    ours = cells("papers/fedsi", "mnist/pfedvem_held/*", "rows", f"{held}, mean", "nll_pooled")
    return said(
        f"""
        The tie is the cause: the prior's scale follows the width of the beliefs, not the spread of
        the heads, so every head stays tied closely to the centre. Accuracy after pooling falls from
        {at("mnist", "pFedVEM", 20)} at round 20 to {at("mnist", "pFedVEM", 800)} at round 800 on
        MNIST and from {at("fashion-mnist", "pFedVEM", 20)} to {at("fashion-mnist", "pFedVEM", 800)}
        on Fashion-MNIST, and with a fixed scale of 0.1 it falls as far, to
        {at("mnist", tight, 800)} and {at("fashion-mnist", tight, 800)}. `pfedvem_held`, which
        learns neither scale, ends at {at("mnist", held, 800)} and {at("fashion-mnist", held, 800)},
        within two standard errors of pFedMAP without noise, and does not beat a MAP with one
        temperature in NLL ({mean(ours)} nats on MNIST; FedBABU has {mean(best)}).
        """
    )


def speed_answer() -> str:
    """How long rounds and curvature take beside others'."""
    rows = results("engines")["rows"]
    curvature = [
        side["threads"]["1"]["times_ours"]
        for row in results("curvature")["rows"].values()
        for name, side in row["sides"].items()
        if name.startswith("laplace")
    ]
    targets = [
        side["ratio"] <= side["at_most"]
        for name, row in rows.items()
        for side in row["sides"].values()
        if "at_most" in side and not name.endswith("_busy")
    ]

    def times(name: str) -> str:
        sides = rows[name]["sides"]
        return " and ".join(f"{sides[side]['ratio']:.2f}" for side in ("1 worker", "2 workers"))

    return said(
        f"""
        A FedAvg round of ten clients with a small network takes {times("mlp10")} of the time of
        a plain PyTorch loop, on one and on two workers. Large networks are trained client by
        client: a transformer takes {times("transformer")}, a ResNet-18 {times("resnet")}.
        Curvature is {min(curvature):.1f} to {float(f"{max(curvature):.1g}"):,.0f} times as fast
        as laplace-torch's; {targets.count(False)} of {len(targets)} targets for the time of a
        round, set in advance, are missed.
        """
    )
