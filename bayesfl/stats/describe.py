"""A paper's first table of the rows, by site or by group, from sums."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas
import torch
from torch import Tensor

from bayesfl.base.display.sheet import Sheet, of_frame
from bayesfl.base.options import declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import PerClient
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.asking import Answered, FromState, Questions, Sites, SiteSurvey, refined, slot
from bayesfl.stats.survival.groups import group
from bayesfl.stats.tables import Site
from bayesfl.stats.terms import Levels

SHARES = (0.25, 0.5, 0.75)
HALVINGS = 12
"""Number of questions that halve the ranges of quantiles. At first a range is two standard
deviations wide, for quartiles 2.3."""


@dataclass(frozen=True)
class Grouped(SiteSurvey):
    """Hold the groups of a description's questions.

    Args:
        sites: Number of sites J.
        columns: Number p of columns of the design; the outcome is one more.
        column: Column whose levels are the groups; None if the sites are the groups.
        levels: Its levels.
    """

    sites: int
    columns: int
    column: str | None = None
    levels: tuple[Any, ...] = ()

    @property
    def groups(self) -> int:
        """Return the number of groups G."""
        return self.sites if self.column is None else len(self.levels)

    @property
    def each(self) -> type[tuple[int, ...]]:
        """Return the type of shapes by group: each site's own if the sites are the groups."""
        return PerClient if self.column is None else tuple

    def rows(self, site: Site, place: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return a site's columns [n, p + 1], the outcome last, 0 if there is none; and for each
        group with rows here its number and the rows' weights in it, [n].
        """
        y = torch.zeros_like(site.weights) if site.y is None else site.y
        x = torch.cat([site.x, y[:, None]], 1)
        if self.column is None:
            return x, [(place, site.weights)]
        of = self.of(site)
        return x, [(g, site.weights * (of == g)) for g in of.unique().tolist()]

    def of(self, site: Site) -> Tensor:
        """Return the group of each of a site's rows, [n], from the column."""
        return group(site.frame, Levels(str(self.column), self.levels), site.name)

    def cells(self, state: Tensors, site: Site) -> Sequence[Tensor]:
        """Return the groups, and their rows with either of two values; see `SiteSurvey`."""
        if self.column is None:
            return ()
        x, of = self.rows(site, 0)[0], self.of(site)
        two = [column == column.max() for column in x.T if len(column.unique()) == 2]
        return [of, *(2 * of + one for one in two)]


@dataclass(frozen=True)
class Totals(Grouped):
    """Ask for the groups' numbers and weights of rows, sums of columns, and which columns hold 0
    and 1 alone; then for sums of squares about the resulting means, see
    `bayesfl.stats.asking.Sums`.

    The last state has `rows` and `weight` [G], and `total`, `centre` and `scale` [G, p + 1].

    Args:
        rounded: Whether secure sums round, so that a sum of 0 may need a finer unit.
    """

    rounded: bool = False

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        g, p = self.groups, self.columns + 1
        if "unit" in state:
            return {"sum": self.each((g, p)), "square": self.each((g, p))}
        return {
            "rows": self.each((g,)),
            "weight": self.each((g,)),
            "sum": self.each((g, p)),
            "n_other": (p,),
            "n_outcome": (),
            "n_dropped": PerClient((self.sites,)),
        }

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        x, groups = self.rows(site, place)
        found = {name: torch.zeros(s, dtype=x.dtype) for name, s in self.shapes(state).items()}
        if "unit" in state:
            for g, weights in groups:
                away = (x - state["centre"][g]) / state["unit"][g]
                found["sum"][g] = weights @ away / state["of_one"]
                found["square"][g] = weights @ away.square() / state["of_one"]
            return found
        for g, weights in groups:
            found["rows"][g] = site.counts[weights > 0].sum()
            found["weight"][g] = weights.sum()
            found["sum"][g] = weights @ x
        found["n_other"] += ((x != 0) & (x != 1)).sum(0)
        found["n_outcome"] += 0 if site.y is None else len(x)
        return found | {"n_dropped": slot(site.dropped, place, self.sites)}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the means first, then better means and units, until they are precise."""
        if "unit" not in state:
            centre = (total["sum"] / total["weight"][:, None]).nan_to_num()
            begun = {
                "total": total["sum"],
                "of_one": total["weight"].sum() / total["rows"].sum(),
                "centre": centre,
                "unit": centre.abs().clamp_min(1.0),
            }
            return total | begun, False
        weight = state["weight"][:, None] / state["of_one"]
        found = refined(state["centre"], state["unit"], weight, total)
        none = (total["square"] == 0) & (not self.rounded)
        found["scale"] = torch.where(none, 0.0, found["scale"])
        return state | found, bool((found["known"] | none).all())


@dataclass(frozen=True)
class Quantiles(FromState, Grouped):
    """Ask for the numbers of rows, by group and in total, at or below the middles of ranges, and
    halve these.

    Args:
        at: The first state: lower and upper ends of the ranges, `low` and `high`
            [G + 1, p + 1, shares], those of all rows last; the groups' weights, `weight` [G + 1];
            and 0 for `n_asked`.
    """

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"below": tuple(state["low"].shape)}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        x, groups = self.rows(site, place)
        middle = (state["low"] + state["high"]) / 2
        if site.policy is not None:
            middle = _on_lattice(middle, x.std(0), site.policy.digits)
        found = torch.zeros_like(middle)
        for g, weights in [*groups, (self.groups, site.weights)]:
            rows = weights > 0
            below = x[rows, :, None] <= middle[g]
            if site.policy is not None:
                below = _in_steps(below, x[rows], site.policy.min_level)
            found[g] = torch.einsum("n,npq->pq", weights[rows], below.to(x.dtype))
        return {"below": found}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Keep the half that contains the quantile."""
        weight = state["weight"][:, None, None]
        enough = total["below"] >= torch.tensor(SHARES, dtype=torch.float64) * weight
        middle, asked = (state["low"] + state["high"]) / 2, state["n_asked"] + 1
        low = torch.where(enough, state["low"], middle)
        high = torch.where(enough, middle, state["high"])
        return state | {"low": low, "high": high, "n_asked": asked}, int(asked) == HALVINGS


def _on_lattice(threshold: Tensor, sd: Tensor, digits: int) -> Tensor:
    """Return thresholds [..., p, q] rounded to the largest of 1, 2 and 5 times a power of ten below
    a fifth of columns' standard deviations, [p], at two digits, and ten times as much at one.
    """
    most = sd / 5 * 10.0 ** (2 - digits)
    power = 10.0 ** most.log10().floor()
    step = (power * torch.where(most < 2 * power, 1, torch.where(most < 5 * power, 2, 5)))[:, None]
    return torch.where(step > 0, (threshold / step).round() * step, threshold)


def _in_steps(below: Tensor, x: Tensor, step: int) -> Tensor:
    """Return the rows that count as below thresholds, [n, p, q], if only groups of `step` rows may
    be counted: the lowest values x [n, p], in steps, and all rows if fewer are above.
    """
    count, n = below.sum(0), len(x)
    told = torch.where((count > n - step) & (count > 0), n, count - count % max(step, 1))
    return x.argsort(dim=0, stable=True).argsort(dim=0)[..., None] < told


@dataclass(frozen=True, repr=False)
class Description(Answered):
    """Hold a description of the rows of all sites by group, as in a paper's first table; see
    `describe`.

    Args:
        statistics: Data frame of pandas: a row for each column and statistic, a column for each
            group, and `all`.
        differences: Series of pandas, by column: the largest standardised difference between two
            groups.

    Example:
        >>> import pandas as pd
        >>> ages = {"north": [40.0, 50, 60], "south": [50.0, 60, 70]}
        >>> frames = {site: pd.DataFrame({"age": age}) for site, age in ages.items()}
        >>> found = bf.stats.describe(bf.stats.tables(frames, terms=["age"]))
        >>> found.table().columns.tolist()
        ['north', 'south', 'all', 'difference']
    """

    statistics: Any
    differences: Any

    def table(self) -> Any:
        """Return the texts of the printed table as a data frame of pandas: mean (sd) and median
        [quartiles] of numbers, count (share) of truth values and levels, and the largest
        standardised difference.
        """
        rows: dict[str, list[str]] = {}
        told = self.statistics
        counts = told.loc[("", "rows")]
        rows["rows"] = [f"{n:g}" for n in counts] + [""]
        for name, difference in self.differences.items():
            of = told.loc[name]
            if "share" in of.index:
                cells = [
                    f"{n:g} ({100 * share:.1f} %)"
                    for n, share in zip(of.loc["count"], of.loc["share"], strict=True)
                ]
            else:
                parts = of.loc[["mean", "sd", "median", "25 %", "75 %"]].to_numpy().T
                cells = [_number_told(*values) for values in parts]
            cells = [cell if n else "" for n, cell in zip(counts, cells, strict=True)]
            rows[str(name)] = [*cells, "" if math.isnan(difference) else f"{difference:.2f}"]
        columns = [*map(str, told.columns), "difference"]
        return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)

    def sheet(self) -> Sheet:
        """Return the printed table, with an explanation of its numbers below it."""
        left = [f"{site} {count}" for site, count in self.dropped.items() if count]
        lines = [
            "mean (sd), median [quartiles] of numbers, to a thousandth of the sd, or to a fifth of "
            "it where a site has a policy; count (share) of truth values; the largest standardised "
            "difference between two groups",
            *(
                [f"rows left out, with a missing value or as few new ones: {', '.join(left)}"]
                if left
                else []
            ),
            *self._below,
        ]
        return of_frame(self.table(), notes=lines)


def _number_told(mean: float, sd: float, middle: float, low: float, high: float) -> str:
    """Return the text of a number, with quantiles to a tenth of the sd's first digit."""
    digits = max(0, math.ceil(1 - math.log10(sd))) if sd > 0 else 3
    middle, low, high = (round(value, digits) + 0.0 for value in (middle, low, high))
    return f"{mean:.4g} ({sd:.3g}), {middle:g} [{low:g}, {high:g}]"


@declared
def describe(
    sites: Sites, *, by: Literal["site"] | Levels = "site", aggregation: Adder | None = None
) -> Description:
    """Summarise the columns of the design and the outcome, by group and over all rows, from sums.

    Means and standard deviations (n - 1) are those of the pooled rows up to rounding. A quantile is
    the smallest value with this share of the rows at or below it. An exact one would be the value
    of a person, so 12 questions halve its range, to a thousandth of the group's standard deviation.
    The standardised difference is the difference of means divided by the root of the mean of two
    groups' variances, $p (1 - p)$ for a truth value (Austin, "Using the standardized difference to
    compare the prevalence of a binary variable between two groups", Communications in Statistics
    38, 2009). Counts of few people are not suppressed.

    Args:
        sites: The sites, of `tables`.
        by: The groups: the sites, or the levels of a column, of `levels`.
        aggregation: As in `glm`.

    Raises:
        ValueError: A row has no level or an undeclared one.

    Example:
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> frames = {
        ...     "north": pd.DataFrame({"age": [40.0, 50, 60], "ill": [0, 1, 1]}),
        ...     "south": pd.DataFrame({"age": [50.0, 60, 70], "ill": [0, 0, 1]}),
        ... }
        >>> found = bf.stats.describe(bf.stats.tables(frames, outcome="ill", terms=["age"]))
        >>> found.statistics.loc[("age", "mean")].tolist()
        [50.0, 60.0, 55.0]
    """
    asked = Questions(sites, aggregation)
    grouped: dict[str, Any] = {"columns": len(sites.columns)}
    if isinstance(by, Levels):
        grouped |= {"column": by.column, "levels": by.levels}
    totals = asked.first(lambda count: Totals(count, **grouped, rounded=aggregation is not None))
    sites = asked.sites
    groups: Sequence[Any] = by.levels if isinstance(by, Levels) else sites.names
    weight, rows_of, sums = (
        torch.cat([totals[name], totals[name].sum(0, keepdim=True)])
        for name in ("weight", "rows", "total")
    )
    share = (totals["weight"] / weight[-1])[:, None]
    mean, variance_of = totals["centre"], totals["scale"].square()
    middle = (share * mean).sum(0, keepdim=True)
    whole = (share * (variance_of + (mean - middle).square())).sum(0, keepdim=True)
    mean = torch.cat([mean.where(share > 0, math.nan), middle])
    variance_of = torch.cat([variance_of, whole])
    grouped["sites"] = len(sites.names)
    quartiles = _quantiles(asked, grouped, mean, variance_of, weight)
    names = list(sites.columns)
    if totals["n_outcome"]:
        names.append(getattr(sites, "outcome", None) or "outcome")
    rows: dict[tuple[str, str], Tensor] = {("", "rows"): rows_of}
    if sites.weighing == "probability":
        rows["", "weight"] = weight
    differences = {}
    for place, name in enumerate(names):
        here = mean[:, place]
        if totals["n_other"][place] == 0:
            found, variance = {"count": sums[:, place], "share": here}, here * (1 - here)
        else:
            variance = variance_of[:, place] * rows_of / (rows_of - 1)
            found = {"mean": here, "sd": variance.sqrt()}
            found |= dict(zip(("25 %", "median", "75 %"), quartiles[:, place].T, strict=True))
        rows |= {(name, key): t for key, t in found.items()}
        differences[name] = _difference(here[:-1], variance[:-1])
    values = torch.stack(list(rows.values())).numpy()
    index = pandas.MultiIndex.from_tuples(list(rows), names=["column", "statistic"])
    return Description(
        statistics=pandas.DataFrame(values, index=index, columns=[*groups, "all"]),
        differences=pandas.Series(differences, dtype=float),
        dropped=dict(zip(sites.names, totals["n_dropped"].int().tolist(), strict=True)),
        left_out=asked.left_out,
        released=asked.released,
    )


def _quantiles(
    asked: Questions, grouped: dict[str, Any], mean: Tensor, variance: Tensor, weight: Tensor
) -> Tensor:
    """Return the quantiles, [G + 1, p + 1, shares], as the middles of the last ranges.

    By Cantelli's inequality a quantile lies between mean - sd sqrt((1 - q) / q) and
    mean + sd sqrt(q / (1 - q)), with n in the sd.
    """
    sd = variance.sqrt()[..., None] * (1 + 1e-9)
    share = torch.tensor(SHARES, dtype=torch.float64)
    low = mean[..., None] - sd * ((1 - share) / share).sqrt()
    high = mean[..., None] + sd * (share / (1 - share)).sqrt()
    at = {"low": low.nan_to_num(), "high": high.nan_to_num(), "weight": weight}
    state = asked.conduct(Quantiles(**grouped, at=at | {"n_asked": torch.tensor(0)}))
    return torch.where(mean[..., None].isnan(), math.nan, (state["low"] + state["high"]) / 2)


def _difference(mean: Tensor, variance: Tensor) -> float:
    """Return the largest standardised difference between two of the groups: infinite if two
    constants differ, NaN if no two have a variance.
    """
    apart = (mean[:, None] - mean).abs()
    spread = ((variance[:, None] + variance) / 2).sqrt()
    found = torch.where((apart == 0) & ~spread.isnan(), 0.0, apart / spread)
    pairs = found[*torch.triu_indices(len(mean), len(mean), 1)]
    return float(pandas.Series(pairs.numpy()).max())
