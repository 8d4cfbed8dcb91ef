"""The partial likelihood over sites: Newton's question, and those that follow a fit.

With a baseline of each site's own, the partial likelihood is a sum over sites, and sites answer its
loss, slope and Hessian; no time leaves a site. With one baseline, the sums over risk sets add up
over sites, time by time, and the partial likelihood is made of these (`efron`).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Semidefinite
from bayesfl.stats import newton
from bayesfl.stats.asking import SiteSurvey
from bayesfl.stats.survival import efron
from bayesfl.stats.survival.groups import ALL, group
from bayesfl.stats.survival.times import Grid, followed
from bayesfl.stats.tables import Site

LARGEST = 500.0
"""A linear predictor of this size is outside the range of steps, as its exponential overflows."""
KEPT = ("at_risk", "of_tied", "mean")
"""What residuals need of a baseline that sites share, of `efron.Hazards`."""


@dataclass(frozen=True)
class PartialLikelihood(SiteSurvey):
    """Ask for what the negative log partial likelihood, its slope and its Hessian are made of, and
    make Newton's step; columns are standardised.

    Args:
        time: Column of times.
        event: Column of events.
        columns: Number p of columns.
        grid: Times of the baseline that sites share; None where each has its own, at its own times.
        prior: Standard deviation of the coefficients' prior; None without one.
        centre: Means of the columns.
        scale: Their standard deviations.
        unit: The weight that is 1.
        entry: Column of the times at which rows enter; None if all are at risk from 0.
        strata: Column of strata, each with a baseline of its own; None for one.
        levels: The S strata.
    """

    time: str
    event: str
    columns: int
    grid: Grid | None
    prior: float | None = None
    centre: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    unit: float = 1.0
    entry: str | None = None
    strata: str | None = None
    levels: tuple[Any, ...] = (ALL,)

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
        return {**efron.shapes(len(self.levels) * len(self.grid.ends), p), "n_outside": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        rows = self.rows(state["theta"], site)
        outside = rows.eta.abs() > LARGEST
        rows.eta[outside] = 0.0
        sums = efron.moments(rows)
        if self.grid is None:
            own = efron.hazards(sums)
            sums = {"loss": own.loss, "slope": own.slope, "hessian": own.hessian_of(rows)}
        else:
            sums |= efron.squares(rows)
        return {**sums, "n_outside": outside.sum()}

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's relative hazard, [n]; see `SiteSurvey`."""
        eta = self.rows(state["theta"], site).eta
        return site.weights * (eta - eta.max()).exp()

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make Newton's step, see `newton.step`, and keep what residuals and curves need of the
        baseline.
        """
        found, kept = total, {}
        if self.grid is not None:
            shared = efron.hazards(total)
            hessian = shared.hessian(total)
            found = {"loss": shared.loss, "slope": shared.slope, "hessian": hessian}
            kept = {name: getattr(shared, name) for name in KEPT}
            kept |= {"weight": total["weight"], "variance": shared.variance / self.unit}
            kept["followed"] = total["risk"][:, 0] > 0
            kept["coarser"] = self._coarser(state["theta"], total, len(self.grid.ends))
        theta = state["theta"]
        loss = torch.where(total["n_outside"] > 0, torch.inf, found["loss"])
        after, done = newton.step(
            state,
            loss + self.strength * theta @ theta / 2,
            found["slope"] + self.strength * theta,
            found["hessian"] + self.strength * torch.eye(len(theta), dtype=torch.float64),
        )
        return {**state, **after, **kept}, done

    def _coarser(self, theta: Tensor, total: Tensors, times: int) -> Tensor:
        """Return Newton's step to the minimum where neighbouring times are joined in pairs, [p]."""
        sums = efron.paired(total, times)
        shared, prior = efron.hazards(sums), self.strength
        hessian = shared.hessian(sums) + prior * torch.eye(len(theta), dtype=torch.float64)
        return -torch.linalg.pinv(hessian, hermitian=True) @ (shared.slope + prior * theta)

    def cells(self, state: Tensors, site: Site) -> list[Tensor]:
        """Return the cells of strata, times and events of a baseline that sites share, and those
        of strata and times of entry; see `SiteSurvey`.
        """
        if self.grid is None:
            return []
        rows = self.rows(state["theta"], site)
        leaving = self.grid.cells(rows.last, rows.events, rows.stratum)
        return [leaving] if self.entry is None else [leaving, rows.slot + rows.first]

    def rows(self, theta: Tensor, site: Site) -> efron.Rows:
        """Return a site's rows as the partial likelihood reads them.

        Raises:
            ValueError: As by `followed`, `group` and `entries`, or a time is beyond the grid.
        """
        times, events = followed(site, self.time, self.event)
        own = tuple(torch.unique(times[events]).tolist())
        grid = self.grid or Grid(own, exact_times=True, middles=own)
        centre, scale = (torch.tensor(t, dtype=torch.float64) for t in (self.centre, self.scale))
        stratum = group(site.frame, self.strata, self.levels, site.name)
        design = site.x - centre
        if self.grid is None:  # each baseline takes up means of its own, so that no digits cancel
            for one in stratum.unique():
                own = site.x[stratum == one]
                own = own - own[0]  # 0 without rounding where a column is constant
                design[stratum == one] = own - own.mean(0)
        design = design / scale
        last = grid.last(site, times, events, stratum)
        return efron.Rows(
            design=design,
            eta=design @ theta + site.offset,
            weights=site.weights / self.unit,
            events=events,
            first=grid.first(site, self.entries(site, times), last, stratum),
            last=last,
            stratum=stratum,
            times=len(grid.ends),
            strata=len(self.levels),
        )

    def entries(self, site: Site, times: Tensor) -> Tensor:
        """Return the times at which a site's rows enter, [n], by the times at which they leave.

        Raises:
            ValueError: A row leaves before it enters.
        """
        entries = torch.zeros_like(times) if self.entry is None else site.column(self.entry)
        if never := int((entries >= times).sum()):
            raise ValueError(
                f"site {site.name!r} has {never} rows whose {self.entry!r} is not before "
                f"{self.time!r}, who were never at risk; leave them out"
            )
        return entries


@dataclass(frozen=True)
class AfterFit(SiteSurvey):
    """A question about a fit, of residuals of a site's rows.

    Args:
        likelihood: The partial likelihood.
        theta: Where it was asked last, [p].
        at_risk: As in `efron.Hazards`, of the baseline that sites share, [S T, 1 + p]; empty
            where each has its own.
        of_tied: As in `efron.Hazards`, [S T, 1 + p].
        mean: As in `efron.Hazards`, [S T, p].
    """

    likelihood: PartialLikelihood
    theta: tuple[float, ...]
    at_risk: tuple[tuple[float, ...], ...] = ()
    of_tied: tuple[tuple[float, ...], ...] = ()
    mean: tuple[tuple[float, ...], ...] = ()

    def start(self, about: Any, /) -> Tensors:
        """Return the fit."""
        return {
            name: torch.tensor(getattr(self, name), dtype=torch.float64)
            for name in ("theta", *KEPT)
        }

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's relative hazard, [n]; see `SiteSurvey`."""
        return self.likelihood.row_weights(state, site)

    def cells(self, state: Tensors, site: Site) -> list[Tensor]:
        """Return those of the partial likelihood; see `SiteSurvey`."""
        return self.likelihood.cells(state, site)

    def baseline(self, state: Tensors, rows: efron.Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return `at_risk`, `of_tied` and `mean` of the baseline of a site's rows."""
        if self.likelihood.grid is None:
            own = efron.hazards(efron.moments(rows))
            return own.at_risk, own.of_tied, own.mean
        return state["at_risk"], state["of_tied"], state["mean"]


def after(likelihood: PartialLikelihood, state: Tensors) -> dict[str, Any]:
    """Return the first options of an `AfterFit` by the last state of its partial likelihood."""
    kept = {name: tuple(map(tuple, state[name].tolist())) for name in KEPT if name in state}
    return {"likelihood": likelihood, "theta": tuple(state["best"].tolist()), **kept}


@dataclass(frozen=True)
class Scores(AfterFit):
    """Ask for the outer products of score residuals, by which errors are robust.

    Args:
        by: Of rows (`sandwich`), each as many as it stands for, or of the sums of each site's
            (`site`).
    """

    by: Literal["sandwich", "site"] = "sandwich"

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"meat": (self.likelihood.columns, self.likelihood.columns)}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        rows = self.likelihood.rows(state["theta"], site)
        scores = efron.score_residuals(rows, *self.baseline(state, rows))
        if self.by == "site":
            scores = scores.sum(0)
            return {"meat": torch.outer(scores, scores)}
        return {"meat": scores.T @ (scores / site.counts[:, None])}
