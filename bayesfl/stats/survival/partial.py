"""The partial likelihood over sites: Newton's question, and those that follow a fit.

If each site has its own baseline, the partial likelihood is a sum over sites. Sites answer its
loss, slope and Hessian, and no time leaves a site. With one baseline, the sums over risk sets add
up over sites, time by time, and determine the partial likelihood (`efron`).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import NotNegative, Semidefinite
from bayesfl.stats import newton
from bayesfl.stats.asking import AfterFit
from bayesfl.stats.fit import ALONE
from bayesfl.stats.survival import efron
from bayesfl.stats.survival.groups import ALL, group
from bayesfl.stats.survival.times import Grid, OfTimes, entries, followed
from bayesfl.stats.tables import Site
from bayesfl.stats.terms import Levels

LARGEST = 500.0
"""Maximum size of linear predictors; beyond it their exponentials overflow."""


@dataclass(frozen=True)
class PartialLikelihood(OfTimes):
    """Ask for the terms of the negative log partial likelihood, its slope and its Hessian, and make
    Newton's step; columns are standardised.

    Args:
        columns: Number p of columns.
        grid: Times of the shared baseline; None if each site has its own, at its own times.
        prior: Standard deviation of the coefficients' prior; None without one.
        centre: Means of the columns.
        scale: Their standard deviations.
        unit: The weight that counts as 1.
        entry: Column of entry times; None if all are at risk from 0.
        strata: The S strata, each with its own baseline.
    """

    columns: int
    grid: Grid | None
    prior: float | None = None
    centre: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    unit: float = 1.0
    entry: str | None = None
    strata: Levels = ALL

    @property
    def strength(self) -> float:
        """Return the prior's precision; 0 without one."""
        return 0.0 if self.prior is None else self.prior**-2

    def start(self, about: Any, /) -> Tensors:
        """Return Newton's start."""
        return newton.begin(torch.zeros(self.columns, dtype=torch.float64))

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        p = self.columns
        if self.grid is None:
            return {"loss": (), "slope": (p,), "hessian": Semidefinite((p, p)), "n_outside": ()}
        return {**efron.shapes(len(self.strata.levels) * len(self.grid.ends), p), "n_outside": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        rows = self.rows(state["theta"], site)
        if (rows.eta.abs() > LARGEST).any():  # sums without some rows would reveal these
            return newton.outside(self.shapes(state))
        found = efron.moments(rows)
        if self.grid is None:
            found = efron.hazards(found)
            found["hessian"] = efron.hessian_of(found, rows)
        else:
            found |= efron.squares(rows)
        found["n_outside"] = torch.tensor(0.0)
        return {name: found[name] for name in self.shapes(state)}

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's relative hazard, [n], and 0 for rows in no sum, such as those of strata
        without events; see `SiteSurvey`.
        """
        rows = self.rows(state["theta"], site)
        events = efron.added(rows.events.double(), rows.stratum, rows.strata)
        at_risk = (events > 0)[rows.stratum] & (rows.first <= rows.last)
        counts = at_risk | ~rows.events.any()
        return site.weights * (rows.eta - rows.eta.max()).exp() * counts

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make Newton's step, see `newton.step`, and keep the baseline for residuals and curves."""
        if total["n_outside"]:
            return newton.step(state, torch.tensor(torch.inf), state["theta"], state["hessian"])
        found = total if self.grid is None else self._shared(state["theta"], total)
        loss, slope, hessian = self._penalised(state["theta"], found)
        after, done = newton.step(state, loss, slope, hessian)
        return state | found | after, done

    def _shared(self, theta: Tensor, total: Tensors) -> Tensors:
        """Return `efron.hazards` with the Hessian, whether rows are `followed` until each time, and
        `coarser`, the length of two Newton steps to the minima with neighbouring times joined in
        pairs, from the first on and from the second on, [p]. One step alone may be short by chance.
        """
        found, moves = _likelihood(total), []
        for skip in (0, 1):
            joined = efron.paired(total, len(total["weight"]) // len(self.strata.levels), skip)
            _, slope, hessian = self._penalised(theta, _likelihood(joined))
            moves.append(torch.linalg.pinv(hessian, hermitian=True) @ slope)
        return found | {
            "variance": found["variance"] / self.unit,
            "followed": total["risk"][:, 0] > 0,
            "coarser": torch.stack(moves).norm(dim=0),
        }

    def _penalised(self, theta: Tensor, found: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, slope and Hessian with the prior's."""
        strength = self.strength
        return (
            found["loss"] + strength * theta @ theta / 2,
            found["slope"] + strength * theta,
            found["hessian"] + strength * torch.eye(len(theta), dtype=torch.float64),
        )

    def cells(self, state: Tensors, site: Site) -> list[Tensor]:
        """Return the strata; for a shared baseline the cells of strata, times and events, and those
        of strata and entry times; see `SiteSurvey`.
        """
        rows = self.rows(state["theta"], site)
        if self.grid is None:
            return [rows.stratum]
        leaving = self.grid.cells(rows.last, rows.events, rows.stratum)
        return [leaving] if self.entry is None else [leaving, rows.slot + rows.first]

    def rows(self, theta: Tensor, site: Site) -> efron.Rows:
        """Return a site's rows for the partial likelihood.

        Raises:
            ValueError: As by `followed`, `group` and `entries`, or a time is beyond the grid.
        """
        times, events = followed(site, self.time, self.event)
        grid = self.grid_at(site)
        centre, scale = (torch.tensor(t, dtype=torch.float64) for t in (self.centre, self.scale))
        stratum = group(site.frame, self.strata, site.name)
        design = site.x - centre
        if self.grid is None:  # subtract the means of each baseline, so that no digits cancel
            for one in stratum.unique():
                own = site.x[stratum == one]
                own = own - own[0]  # exactly 0 if a column is constant
                design[stratum == one] = own - own.mean(0)
        design = design / scale
        last = grid.last(site, times, events, stratum)
        return efron.Rows(
            design=design,
            eta=design @ theta + site.offset,
            weights=site.weights / self.unit,
            events=events,
            first=grid.first(
                site, entries(site, self.time, self.entry, times), last, events, stratum
            ),
            last=last,
            stratum=stratum,
            times=len(grid.ends),
            strata=len(self.strata.levels),
        )

    def grid_at(self, site: Site) -> Grid:
        """Return the times of a site's baseline: the shared ones, or those of its own events."""
        if self.grid is not None:
            return self.grid
        times, events = followed(site, self.time, self.event)
        own = tuple(torch.unique(times[events]).tolist())
        return Grid(own, exact_times=True, middles=own)

    def baseline(self, state: Tensors, rows: efron.Rows) -> Tensors:
        """Return `efron.hazards` of the baseline of a site's rows."""
        return efron.hazards(efron.moments(rows)) if self.grid is None else state


def _likelihood(sums: Tensors) -> Tensors:
    """Return `efron.hazards` with the Hessian."""
    found = efron.hazards(sums)
    return found | {"hessian": efron.hessian(found, sums)}


@dataclass(frozen=True)
class Scores(AfterFit):
    """Ask for the outer products of score residuals, for robust errors.

    Args:
        by: Whether of rows (`sandwich`), counted by frequency weight, or of each site's sums
            (`site`).
    """

    by: Literal["sandwich", "site"] = "sandwich"

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"meat": (self.likelihood.columns, self.likelihood.columns)}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        rows = self.likelihood.rows(state["theta"], site)
        scores = efron.score_residuals(rows, self.likelihood.baseline(state, rows))
        if self.by == "site":
            scores = scores.sum(0)
            return {"meat": torch.outer(scores, scores)}
        return {"meat": scores.T @ (scores / site.counts[:, None])}


@dataclass(frozen=True)
class Alone(AfterFit):
    """Ask for the products of the columns, and of a constant for a shared baseline, summed over
    rows; then for the share of each column's direction that single sites alone inform.
    """

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        p = self.likelihood.columns
        q = p + (self.likelihood.grid is not None)
        return {"alone": NotNegative((p,))} if "root" in state else {"gram": Semidefinite((q, q))}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        rows, p = self.likelihood.rows(state["theta"], site), self.likelihood.columns
        design = rows.design
        if self.likelihood.grid is not None:
            design = torch.nn.functional.pad(design, (0, 1), value=1.0)
        gram = design.T @ (rows.weights[:, None] * design)
        if "root" not in state:
            return {"gram": gram}
        values, vectors = torch.linalg.eigh(state["root"].T @ gram @ state["root"])
        square = (state["root"] @ vectors)[:p].square()
        return {"alone": square @ (1 - values < ALONE).double() / square.sum(1)}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return a root of the inverse of the sums, then the shares of single sites."""
        if "root" in state:
            return state | total, True
        root = torch.linalg.inv(torch.linalg.cholesky(total["gram"])).T
        return state | {"root": root.contiguous()}, False
