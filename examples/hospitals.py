"""Fit a regression over hospitals whose rows may not be pooled, beside what a meta-analysis of
their own fits finds.

    python examples/hospitals.py [--out runs/hospitals] [--data-root DATA]

The sites are institutions of a lung cancer study, which ship with lifelines (death within a year,
logistic); where they are on disk, in the folder --data-root or BAYESFL_DATA, also the four
hospitals of the heart disease data (logistic) and the six regions of TCGA's breast cancers (deaths
by time at risk, Poisson). The script prints, of each, the table of all sites, the inverse-variance
meta-analysis of the sites that have a fit of their own and, in standard errors, how far it is off,
and a mixed model. It writes forest plots into a folder.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import bayesfl as bf


@dataclass(frozen=True)
class Study:
    """A study: its sites and the terms of its model.

    Args:
        title: What it is of.
        frames: {site: its rows}.
        outcome: Column of the outcome.
        terms: Terms of the design.
        family: Family of the outcome.
        term: The coefficient that is drawn, which has effects of each site's own.
        offset: Column of the offset.
    """

    title: str
    frames: Mapping[str, pd.DataFrame]
    outcome: str
    terms: tuple[Any, ...]
    family: Any
    term: str
    offset: str | None = None


def lung() -> Study:
    """Institutions with ten patients or more; death within a year. Patients who left earlier are
    dropped, which biases the share of deaths: for an analysis use `bf.stats.cox`.
    """
    from lifelines.datasets import load_lung

    rows = load_lung().rename(columns={"ph.ecog": "ecog"}).dropna(subset=["inst", "ecog"])
    known = (rows["time"] >= 365) | (rows["status"] == 1)
    rows = rows[known].assign(dead=(rows["time"] < 365).astype(int))
    frames = {f"centre {number:.0f}": part for number, part in rows.groupby("inst")}
    large = {site: frame for site, frame in frames.items() if len(frame) >= 10}
    terms = ("age", bf.stats.levels("sex", [1, 2]), "ecog")
    return Study("Lung cancer, institutions", large, "dead", terms, "binomial", "sex[2]")


def heart(root: Path) -> Study:
    """The four hospitals; disease or none."""
    rows = pd.read_csv(root / "heart_disease" / "heart.csv")
    frames = dict(list(rows.assign(disease=(rows["num"] > 0).astype(int)).groupby("centre")))
    terms = ("age", "sex", bf.stats.levels("cp", [4, 1, 2, 3]), "thalach", "exang", "oldpeak")
    return Study("Heart disease, hospitals", frames, "disease", terms, "binomial", "sex")


def cancers(root: Path) -> Study:
    """The six regions; deaths by years at risk, patients without any left out."""
    rows = pd.read_csv(root / "tcga_brca" / "brca.csv")
    rows = rows[rows["time"] > 0]
    rows = rows.assign(
        log_years=np.log(rows["time"] / 365.25),
        decades=rows["age_at_index"] / 10,
        late=rows[[name for name in rows if name.endswith(("Stage IIIA", "Stage IIIC"))]].sum(
            axis=1
        ),
        nodes=rows[[name for name in rows if "pathologic_n_N2" in name]].sum(axis=1),
    )
    frames = dict(list(rows.groupby("region")))
    terms = ("decades", "late", "nodes")
    title = "Breast cancer, regions"
    return Study(title, frames, "event", terms, "poisson", "decades", offset="log_years")


def studies(root: Path | None) -> Iterator[Study]:
    """Give the studies whose data are there."""
    yield lung()
    for file, make in (("heart_disease/heart.csv", heart), ("tcga_brca/brca.csv", cancers)):
        if root is not None and (root / file).exists():
            yield make(root)


def meta_analysis(fit: Any, term: str) -> tuple[float, float, int]:
    """Return the inverse-variance mean of the sites' own estimates, its standard error, and the
    number of sites that have one.
    """
    own = fit.by_site(term).iloc[:-1].dropna(subset=["estimate"])
    error = (own["high"] - own["low"]) / (2 * 1.959964)
    weight = 1 / error**2
    mean = float((weight * own["estimate"]).sum() / weight.sum())
    return mean, float(weight.sum() ** -0.5), len(own)


def beside(fit: Any) -> pd.DataFrame:
    """Return the coefficients of all sites beside those of the meta-analysis."""
    rows = {}
    for term, row in fit.table().iterrows():
        mean, error, sites = meta_analysis(fit, str(term))
        rows[term] = {
            "all sites": row["coef"],
            "se": row["se"],
            "meta-analysis": mean,
            "its se": error,
            "apart, in se": (mean - row["coef"]) / row["se"],
            "sites in it": f"{sites} of {len(fit.rows) + len(fit.left_out)}",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def main(arguments: list[str] | None = None) -> int:
    """Run the studies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/hospitals"))
    parser.add_argument("--data-root", type=Path, default=os.environ.get("BAYESFL_DATA"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    root = None if options.data_root is None else Path(options.data_root)
    for study in studies(root):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="constant|levels at one site")
            sites = bf.stats.tables(
                study.frames,
                outcome=study.outcome,
                terms=study.terms,
                offset=study.offset,
                missing="complete",
            )
        print(f"\n{study.title}\n")
        fit = bf.stats.glm(sites, family=study.family, intercept="per_site")
        print(fit)
        print(f"\n{beside(fit).to_string(float_format='{:.3f}'.format)}\n")
        mixed = bf.stats.mixed(sites, family=study.family, random=["1", study.term])
        print(mixed)
        name = study.title.split(",")[0].lower().replace(" ", "-")
        for kind, one in (("sums", fit), ("mixed", mixed)):
            figure = bf.plots.forest(one, study.term, title=f"{study.title}, {kind}")
            figure.savefig(options.out / f"{name}-{kind}.png")
    print(f"\nforest plots in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
