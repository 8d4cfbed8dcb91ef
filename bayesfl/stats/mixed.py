"""Mixed models over sites. Each site integrates its own effects out, and one question integrates
the federation's parameters.

A site's coefficients are $beta + L u$ with $u ~ N(0, I)$. The covariance $L L'$ is unstructured or
diagonal. Groups within a site, such as wards, may have further effects, see
`bayesfl.stats.hierarchy`. L is made of the standard deviations tau and the Cholesky factor of the
correlations, whose canonical partial correlations are tanh of real numbers. Newton's steps on the
sum of the sites' log marginal likelihoods find the mode of phi = (beta, log tau, these numbers, the
family's own) under half-normal priors of tau and an LKJ(1) prior of the correlations. Then all
sites answer their log marginal likelihoods at the same K draws of phi around that mode
(`bayesfl.posteriors.importance`). The ratios of their sum and the draws' density are the weights.
Each site draws its own effects at each draw of phi, so these include the uncertainty of phi. With
tau fixed at its estimate, intervals would be too short, above all if it is near 0. The table shows
that estimate beside the posterior, for comparison with other programs.

Sources: Lewandowski, Kurowicka, Joe, "Generating random correlation matrices based on vines and
extended onion method", J. Multivariate Analysis 100, 2009, section 2.4, for the prior of
correlations; Patterson, Thompson, "Recovery of inter-block information when block sizes are
unequal", Biometrika 58, 1971, for the restricted likelihood (REML); Nakagawa, Johnson, Schielzeth,
"The coefficient of determination R2 and intra-class correlation coefficient from generalized linear
mixed-effects models revisited and expanded", J. Royal Society Interface 14, 2017, table 1, for the
intraclass correlation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations
from typing import Any, Literal

import numpy as np
import pandas
import scipy.linalg
import torch
from torch import Tensor
from torch.nn.functional import pad

from bayesfl.base.options import Count, Positive, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.federation.clients.surveying import Adder
from bayesfl.posteriors.importance import Proposal, Weighted, weighted
from bayesfl.posteriors.linearised import symmetric_root
from bayesfl.stats import hierarchy, newton
from bayesfl.stats.asking import (
    FromState,
    Kept,
    Questions,
    Sites,
    SiteSurvey,
    Sums,
    counted,
    outcome_unit,
    standard,
    used_rows,
    with_likelihood,
)
from bayesfl.stats.density.integral import bent
from bayesfl.stats.families import FAMILIES, Family, Normal, row_information
from bayesfl.stats.fit import Compared, inverse, summaries
from bayesfl.stats.hierarchy import Groups, Phi
from bayesfl.stats.tables import Site, Tables, offsets
from bayesfl.stats.terms import column_of

FAR = 1000.0
"""Log likelihood below all others, in nats, of a draw that is left out."""
NUMBERS = 2**24
"""Maximum number of linear predictors in one computation."""
MOST_MOVE = 2.0
"""Longest step of logarithms of standard deviations, and the like, towards the mode."""
SMALL = 1e-6
"""Estimates of standard deviations below this value are 0, in units of a normal outcome's standard
deviation and of standardised columns."""
WHOLE = "(site)"
"""The name of a site as a whole among its groups."""


@dataclass(frozen=True)
class Hierarchy(SiteSurvey):
    """Hold the model that questions about a hierarchy share.

    Columns are standardised, and normal outcomes are in units of their standard deviation. If the
    intercept's effect may be correlated with those of slopes, it is the effect at the columns'
    means; otherwise it is the effect at 0.

    Args:
        family: Name of the family.
        columns: Number p of columns of the design.
        common: Places of a site's effects besides those of its groups, among intercept and columns,
            0 for the intercept; empty without groups.
        effects: Places of the effects of each group, or of the site without groups.
        group: Column whose values are groups within a site; None for the site itself.
        centre: Means of the columns.
        scale: Their standard deviations.
        diagonal: Whether effects are independent.
        shift: Mean of normal outcomes; 0 of others.
        unit: Their standard deviation; 1 of others.
    """

    family: str
    columns: int
    common: tuple[int, ...]
    effects: tuple[int, ...]
    group: str | None
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    diagonal: bool = False
    shift: float = 0.0
    unit: float = 1.0

    @property
    def rule(self) -> Family:
        """Return the family; for normal outcomes the one with its own standard deviation."""
        return Normal() if self.family == "gaussian" else FAMILIES[self.family]

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Return the places of the effects that may be correlated with each other, by level."""
        return (self.common, self.effects) if self.common else (self.effects,)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the name of each level: `site`, or the column of groups."""
        groups = () if self.group is None else (self.group,)
        return (("site",) if self.common or not groups else ()) + groups

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of coefficients, standard deviations, correlations, and parameters of
        the family's own.
        """
        return (
            1 + self.columns,
            sum(map(len, self.levels)),
            len(self.pairs[0]),
            len(self.rule.own),
        )

    @property
    def size(self) -> int:
        """Return the number q of parameters phi."""
        return sum(self.sizes)

    @property
    def ends(self) -> list[int]:
        """Return the end of each level's effects among all effects."""
        return list(accumulate(map(len, self.levels)))

    @property
    def pairs(self) -> Tensor:
        """Return the pairs of effects that may be correlated, as rows and columns below the
        diagonal of their covariance, [2, c].
        """
        level = torch.tensor([at for at, places in enumerate(self.levels) for _ in places])
        pairs = torch.tril_indices(len(level), len(level), -1)
        of_one_level = level[pairs[0]] == level[pairs[1]]
        return pairs[:, of_one_level & (not self.diagonal)]

    @property
    def loads(self) -> Tensor:
        """Return the matrix [1 + p, r] from effects to coefficients of standardised columns: a
        slope's effect moves the intercept, unless the two may be correlated.
        """
        found = []
        for places in self.levels:
            change = torch.eye(1 + self.columns, dtype=torch.float64)
            if self.diagonal or 0 not in places:
                change[0, 1:] = _row(self.centre) / _row(self.scale)
            found.append(change[:, list(places)])
        return torch.cat(found, 1)

    @property
    def change(self) -> Tensor:
        """Return the matrix [1 + p, 1 + p] from coefficients of standardised outcomes and columns
        to those of the original ones, without the outcome's mean.
        """
        change = torch.cat([torch.ones(1, dtype=torch.float64), 1 / _row(self.scale)]).diag()
        change[0, 1:] = -_row(self.centre) / _row(self.scale)
        return self.unit * change

    def coefficients(self, beta: Tensor) -> Tensor:
        """Return coefficients [..., 1 + p] of the original outcomes and columns."""
        return beta @ self.change.T + self.shift * torch.eye(1 + self.columns)[0]

    def design(self, site: Site) -> Tensor:
        """Return a column of ones and a site's standardised columns, [n, 1 + p]."""
        x = (site.x - _row(self.centre)) / _row(self.scale)
        return torch.cat([torch.ones(len(x), 1, dtype=torch.float64), x], 1)

    def groups(self, site: Site) -> Groups:
        """Return a site's rows by group."""
        x, y, offset = (
            self.design(site),
            (site.outcome - self.shift) / self.unit,
            site.offset / self.unit,
        )
        group = torch.from_numpy(self.labels(site)[0])
        return Groups.of(x, x @ self.loads, y, site.weights, offset, group, len(self.common))

    def labels(self, site: Site) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Return the group of each of a site's rows, [n] from 0, and the names of its parts with
        own coefficients: the site as a whole, if it has effects besides its groups, and the groups.

        Raises:
            ValueError: The site has no such column, or a value is missing.
        """
        if self.group is None:
            return np.zeros(len(site.x), int), (site.name,)
        codes, names = pandas.factorize(column_of(site.frame, self.group, site.name), sort=True)
        if missing := int((codes < 0).sum()):
            raise ValueError(
                f"site {site.name!r} has {missing} rows without {self.group!r}; name it in "
                "tables(also=...), which checks for missing values, or leave these rows out"
            )
        return codes, (*([WHOLE] if self.common else []), *names.tolist())

    def informations(self, phi: Tensor, site: Site) -> Iterator[Tensor]:
        """Yield rows' information at parameters [K, q] without own effects, [K, n] in parts."""
        design = self.design(site)
        for some in phi.split(max(1, NUMBERS // len(design))):
            parts = self.phi(some)
            eta = parts.beta @ design.T + site.offset
            yield site.weights * row_information(self.rule, eta, parts.own[..., 0])

    def phi(self, at: Tensor) -> Phi:
        """Return the parameters from a vector [..., q], which has the logarithms of standard
        deviations and the atanh of partial correlations.
        """
        beta, sd, pairs, own = at.split(self.sizes, -1)
        rows, columns = self.pairs
        r = sd.shape[-1]
        where = torch.eye(r * r, dtype=at.dtype)[rows * r + columns]
        root = self.root(sd, (pairs @ where).unflatten(-1, (r, r)))
        return Phi(beta, root, own.movedim(-1, 0)[..., None, None])

    def root(self, log_sd: Tensor, below: Tensor) -> Tensor:
        """Return the Cholesky factor of the effects' covariance, [..., r, r], from the logarithms
        of standard deviations [..., r] and the atanh of partial correlations below the diagonal.

        Row i of that of the correlations has $tanh(z_ij) prod_{k < j} sech(z_ik)$ at j < i, and the
        product over all k < i at i.
        """
        left = pad(below.cosh().reciprocal().cumprod(-1), (1, 0), value=1.0)
        unit = torch.eye(below.shape[-1], dtype=below.dtype)
        return log_sd.exp()[..., None] * (below.tanh() + unit) * left[..., :-1]

    def log_prior(self, at: Tensor, scale: float) -> Tensor:
        """Return the log prior density [...] at a vector [..., q], see `phi`: half-normal standard
        deviations and LKJ(1) correlations.

        Args:
            at: The vector.
            scale: Standard deviation of the half-normal.
        """
        _, log_tau, pairs, _ = at.split(self.sizes, -1)
        constant = math.log(2) - math.log(scale) - math.log(2 * math.pi) / 2
        found = (log_tau - (log_tau.exp() / scale) ** 2 / 2 + constant).sum(-1)
        # Of r effects, a partial correlation given c others is 2 Beta(b, b) - 1 with
        # b = (r - c) / 2; r - c - 1 pairs have the same c.
        given = self.pairs[1]
        b = (1 + given.bincount()[given]).double() / 2
        log_cosh = torch.logaddexp(pairs, -pairs) - math.log(2)
        constants = (2 * b - 1) * math.log(2) + 2 * b.lgamma() - (2 * b).lgamma()
        return found - (2 * b * log_cosh + constants).sum(-1)


def _row(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


DERIVATIVES = ("loss", "slope", "hessian")


@dataclass(frozen=True)
class Climb(Hierarchy):
    """Ask for the log marginal likelihood with its derivatives at some parameters, and make
    Newton's step.

    Args:
        sites: Number of sites.
        at: Start of the steps, [q].
    """

    sites: int = 0
    at: tuple[float, ...] = ()

    def start(self, about: Any, /) -> Tensors:
        """Return Newton's start."""
        return newton.begin(_row(self.at))

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        q = self.size
        return {"loss": (), "slope": (q,), "hessian": (q, q), "n_groups": (), "n_beyond": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share, its number of groups, and its number of rows minus the rank of
        the effects' design; see `SiteSurvey`.
        """
        groups = self.groups(site)
        value, slope, hessian = hierarchy.derivatives(self.rule, groups, self.phi, state["theta"])
        z = groups.z[..., groups.common :] * (groups.weights > 0)[..., None]
        beyond = len(site.x) - torch.linalg.matrix_rank(z).sum()
        counts = {"n_groups": torch.tensor(len(groups.y)), "n_beyond": beyond}
        return {"loss": -value, "slope": -slope, "hessian": -hessian, **counts}

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's information, [1, n]; see `SiteSurvey`."""
        return next(self.informations(state["theta"][None], site))

    def step(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return `newton.step`, shortened if parameters other than coefficients move far.

        Raises:
            ValueError: Effects cannot be separated from noise, or from each other.
        """
        groups, units = int(total["n_groups"]), self.sites if self.common else 1
        if not total["n_beyond"] and self.family != "poisson":
            raise ValueError(
                f"no {self.kinds[-1]} has more rows than effects, so these cannot be separated "
                "from noise: take fewer effects in random= or within=, or bf.stats.glm"
            )
        if groups <= units or units < len(self.levels):
            raise ValueError(
                f"{groups} groups by {self.kinds[-1]!r} at {self.sites} sites are too few to "
                "estimate how effects differ: this needs two sites, and two groups at some site; "
                "leave group= out, take random=() for effects of groups alone, or use bf.stats.glm"
            )
        after, done = newton.step(state, total["loss"], total["slope"], total["hessian"])
        move = after["theta"] - after["best"]
        short = (MOST_MOVE / move[self.sizes[0] :].abs().amax()).clamp(max=1.0)
        theta = after["best"] + short * move
        return after | {"theta": theta, "n_groups": total["n_groups"]}, done


@dataclass(frozen=True)
class Maximum(Climb):
    """Find the maximum of the likelihood, for normal outcomes of the restricted likelihood.

    Its parameters are the entries of the effects' symmetric root L. At the boundary, where L is
    singular, the likelihood is level in them, so Newton's steps find it. (A triangular root of a
    singular covariance is not unique.)

    The restricted log likelihood is $log m - log |A| / 2 + p log(2 pi) / 2$ with the information A
    on the coefficients. Its derivatives need those of A, and $tr(C A'')$ with the inverse C of A at
    the previous question, which converges to that of A.
    """

    def root(self, log_sd: Tensor, below: Tensor) -> Tensor:
        """Return the root from its own entries."""
        return log_sd.diag_embed() + below + below.mT

    @property
    def restricted(self) -> bool:
        """Return whether the likelihood is the restricted one."""
        return self.family == "gaussian"

    def start(self, about: Any, /) -> Tensors:
        """Return Newton's start, and no inverse yet."""
        p = self.sizes[0]
        return super().start(about) | {"inverse": torch.zeros(p, p, dtype=torch.float64)}

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        p = self.sizes[0]
        k = self.size - p
        more: dict[str, tuple[int, ...]] = {"turn": (k, p, p), "bend": (k, k)}
        return super().shapes(state) | (more if self.restricted else {})

    @torch.enable_grad()
    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        groups, found = self.groups(site), super().of_site(state, site, place)
        if not self.restricted:
            return found
        beta, at = state["theta"].clone().tensor_split([self.sizes[0]])

        def information(at: Tensor) -> Tensor:
            return hierarchy.information(groups, self.phi(torch.cat([beta, at])))

        def traced(at: Tensor) -> Tensor:
            return (state["inverse"].clone() * information(at)).sum()

        turn = torch.func.jacrev(information)(at).movedim(-1, 0)
        return found | {"turn": turn, "bend": bent(traced)(at)}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make Newton's step; see `newton.step`."""
        if not self.restricted:
            return self.step(state, total)
        p, loss, slope, hessian = self.sizes[0], *(total[k].clone() for k in DERIVATIVES)
        known = hessian[:p, :p]
        loss += torch.linalg.slogdet(known).logabsdet / 2 - p / 2 * math.log(2 * math.pi)
        inverse = torch.linalg.inv(known)
        change = total["turn"] @ inverse
        slope[p:] += change.diagonal(dim1=-2, dim2=-1).sum(-1) / 2
        hessian[p:, p:] += (total["bend"] - torch.einsum("iab,jba->ij", change, change)) / 2
        total = total | {"loss": loss, "slope": slope, "hessian": hessian}
        after, done = self.step(state, total)
        return after | {"inverse": inverse}, done


@dataclass(frozen=True)
class Mode(Climb):
    """Find the mode under the prior, with the coefficients integrated over.

    Given the others, coefficients have about the covariance $W = E + M$, where M is the covariance
    of the mean of all effects and E the rest. Their integral adds $log |W| / 2$. Without it,
    standard deviations at the mode are too small for few sites.

    Args:
        prior: Standard deviation of the half-normal prior of the effects' standard deviations.
        beside: The matrix E, [p, p].
    """

    prior: float = 2.5
    beside: tuple[tuple[float, ...], ...] = ()

    @torch.enable_grad()
    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make Newton's step; see `newton.step`."""

        def added(at: Tensor) -> Tensor:
            given = self.given(at[self.sizes[0] :], total["n_groups"])
            return self.log_prior(at, self.prior) + torch.linalg.slogdet(given).logabsdet / 2

        at = state["theta"].clone()
        by = (added, torch.func.grad(added), bent(added))
        less = {k: total[k] - f(at) for k, f in zip(DERIVATIVES, by, strict=True)}
        return self.step(state, total | less)

    def given(self, psi: Tensor, groups: Tensor) -> Tensor:
        """Return W [..., p, p] from the parameters other than coefficients, [..., q - p], and the
        number of groups [].
        """
        return torch.tensor(self.beside, dtype=torch.float64) + self.of_mean(psi, groups)

    def of_mean(self, psi: Tensor, groups: Tensor) -> Tensor:
        """Return the covariance M [..., p, p] of the means of effects; see `given`."""
        root = self.phi(pad(psi, (self.sizes[0], 0))).root
        counts = _row([self.sites] * len(self.common) + [float(groups)] * len(self.effects))
        means = self.loads @ (root / counts.sqrt()[:, None])
        return means @ means.mT

    def besides(self, information: Tensor, psi: Tensor, groups: Tensor) -> "Mode":
        """Return the same with E from the information [p, p] on the coefficients, at least half of
        their covariance; see `given`.
        """
        covariance = torch.linalg.inv(information)
        found = scipy.linalg.eigh(self.of_mean(psi, groups), (covariance + covariance.T) / 2)
        share, vectors = map(torch.from_numpy, found)
        vectors = covariance @ vectors
        beside = (vectors * (1 - share).clamp_min(0.5)) @ vectors.mT
        return replace(self, beside=tuple(map(tuple, beside.tolist())))


@dataclass(frozen=True)
class Draws(FromState, Hierarchy):
    """Ask for the log marginal likelihood at K draws of phi.

    If a row weighs more at a draw than a site's policy allows, as at draws far from the others, the
    site answers a very low likelihood.

    Args:
        at: The draws `phi`, [K, q].
    """

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"log_likelihood": (len(state["phi"]),)}

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's information at the draw with the most even one; see `SiteSurvey`."""
        least = [
            some[(some.amax(1) / some.sum(1)).nan_to_num(1.0).argmin()]
            for some in self.informations(state["phi"], site)
        ]
        return min(least, key=lambda one: float(one.max() / one.sum()))

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        groups = self.groups(site)
        found = [
            hierarchy.log_marginals(self.rule, groups, self.phi(some)).sum(-1)
            for some in state["phi"].split(max(1, NUMBERS // (16 * groups.y.numel())))
        ]
        logs = torch.cat(found)
        if site.policy is not None:
            parts = self.informations(state["phi"], site)
            even = torch.cat([site.policy.even(some, site.counts) for some in parts])
            logs = torch.where(even, logs, logs.min() - FAR)
        return {"log_likelihood": logs}


@dataclass(frozen=True)
class Own(Kept, Hierarchy):
    """Send sites on other machines the draws of phi; each draws its own coefficients from these and
    stores them.

    Args:
        at: The draws, [K, q].
        chosen: Places of the equally weighted ones among them, [S].
        names: Names of intercept and columns.
        seed: Seed of the draws.
    """

    at: tuple[tuple[float, ...], ...] = ()
    chosen: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    seed: int = 0

    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return draws of the site's own coefficients, of the original columns, with a row for each
        draw, or for each draw and group.
        """
        draws = self.draws(site, place).numpy()
        found = pandas.DataFrame(draws.reshape(-1, draws.shape[-1]), columns=list(self.names))
        if self.group is not None:
            found.insert(0, self.group, np.tile(self.labels(site)[1], len(draws)))
        return found

    def draws(self, site: Site, place: int) -> Tensor:
        """Return draws of the coefficients of the original outcomes and columns, [S, n, 1 + p], of
        the site as a whole, if it has effects besides its groups', and of the groups: by the normal
        approximation around the effects' modes at each draw of phi.
        """
        phi, chosen = torch.tensor(self.at, dtype=torch.float64), torch.tensor(self.chosen)
        groups, parts = self.groups(site), self.phi(phi[chosen])
        found = [
            hierarchy.modes(self.rule, groups, self.phi(some))
            for some in phi.split(max(1, NUMBERS // groups.y.numel()))
        ]
        u, hessian = (torch.cat(one)[chosen] for one in zip(*found, strict=True))
        rng = generator(self.seed, Purpose.POSTERIOR, client=place + 1)
        noise = torch.from_numpy(rng.standard_normal(u.shape))
        effects = hierarchy.drawn(groups, u, hessian, noise) @ parts.root.mT
        if self.common:
            whole = effects[:, :1].clone()
            whole[..., len(self.common) :] = 0
            effects = torch.cat([whole, effects], 1)
        return self.coefficients(parts.beta[:, None] + effects @ self.loads.T)


@dataclass(frozen=True)
class Level:
    """Effects that may be correlated: of sites, or of groups within them.

    Args:
        of: `site`, or the column of the groups.
        terms: Names of the coefficients that differ, [r].
        places: Their places among intercept and columns.
        covariance: Draws of the effects' covariance, for the original outcomes and columns,
            [S, r, r].
        estimate: Its maximum likelihood estimate, [r, r].
    """

    of: str
    terms: tuple[str, ...]
    places: tuple[int, ...]
    covariance: Tensor
    estimate: Tensor

    def named(self, covariance: Tensor) -> dict[str, Tensor]:
        """Return standard deviations and correlations [...] by name, of a covariance
        [..., r, r].
        """
        of = "" if self.of == "site" else f" of {self.of}"
        sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        found = {f"tau {term}{of}": sd[..., k] for k, term in enumerate(self.terms)}
        for a, b in combinations(range(len(self.terms)), 2):
            if self.covariance[:, a, b].any():  # of independent ones there is none
                name = f"correlation {self.terms[a]}, {self.terms[b]}{of}"
                found[name] = covariance[..., a, b] / (sd[..., a] * sd[..., b])
        return found


@dataclass(frozen=True, repr=False, kw_only=True)
class Mixed(Compared):
    """The posterior of a mixed model over sites; `print` shows its table.

    Args:
        shared: Draws of the federation's coefficients, [S, 1 + p], of the intercept and the
            original columns, `names`.
        levels: The effects, of sites and of groups.
        others: {name: draws [S]} of the family's own parameters, and of intraclass correlations:
            of two rows of a site, or group, at the columns' means; on the scale of the linear
            predictor if outcomes are not normal.
        estimate: {name: the maximum likelihood estimate} of the table's parameters; the restricted
            one for normal outcomes, and 0 at the boundary.
        errors: {name: its standard error}, of coefficients, given the standard deviations.
        own: {site: draws of its own coefficients [S, n, 1 + p]}, for sites on this machine, paired
            with the draws of `shared`; other sites store theirs.
        groups: {site: names of its parts}: its groups, after `(site)` for the site as a whole, if
            it has effects besides theirs; only the site, if it has no groups.
        effective: Effective number of the weighted draws.
        k_hat: Pareto's k of their weights; below .7 their means are reliable.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"dose": [0.0, 1, 2, 3], "gain": [0.0, 1, 1, 3]})
        >>> frames = {site: rows.assign(gain=rows["gain"] + k) for k, site in enumerate("abcd")}
        >>> sites = bf.stats.tables(frames, outcome="gain", terms=["dose"])
        >>> fit = bf.stats.mixed(sites, family="gaussian")
        >>> fit.sites().shape
        (4, 4)
    """

    shared: Tensor
    levels: tuple[Level, ...]
    others: Mapping[str, Tensor]
    estimate: Mapping[str, float]
    errors: Mapping[str, float]
    own: Mapping[str, Tensor]
    groups: Mapping[str, tuple[Any, ...]]
    effective: float
    k_hat: float
    restricted: bool
    link: Any
    design: Any
    offset: str | None

    def table(self, level: float = 0.95) -> Any:
        """Return means, standard deviations and intervals as a data frame of pandas, and beside
        them the estimate of maximum likelihood, `ML`, or of the restricted one, `REML`, with
        standard errors of coefficients. If coefficients are logarithms of ratios, `exp(mean)`,
        `exp(2.5 %)` and `exp(97.5 %)` are the exponentials.

        Args:
            level: Probability of the intervals, between quantiles.
        """
        found = dict(zip(self.names, self.shared.T, strict=True))
        for one in self.levels:
            found |= one.named(one.covariance)
        table = self._with_ratios(summaries({**found, **self.others}, level))
        named = "REML" if self.restricted else "ML"
        beside = {named: self.estimate, f"{named} se": self.errors}
        return table.assign(
            **{name: [of.get(row, math.nan) for row in table.index] for name, of in beside.items()}
        )

    def sites(self, level: float = 0.95) -> Any:
        """Return the sites' own coefficients as a data frame of pandas with a row for each site,
        group and effect.

        Args:
            level: As in `table`.
        """
        return summaries({(*of, name): draws for of, name, draws in self._differing()}, level)

    def _differing(self) -> Iterator[tuple[tuple[Any, ...], str, Tensor]]:
        """Yield the coefficients with own effects: (the site, or the site and group), the name, and
        the draws [S].
        """
        for site, draws in self.own.items():
            for at, group in enumerate(self.groups[site]):
                levels = self.levels[:1] if group == WHOLE else self.levels
                for place in sorted({place for level in levels for place in level.places}):
                    of = (site, group) if draws.shape[1] > 1 else (site,)
                    yield of, self.names[place], draws[:, at, place]

    def by_site(self, term: str, level: float = 0.95) -> Any:
        """Return the posteriors of the sites' own values of a coefficient as a data frame of
        pandas: a row for each site, or group, and a last one of what they have in common, and the
        columns `estimate` (mean), `low`, `high`, `rows` (of groups NaN) and `why` (empty).

        Args:
            term: Name of a coefficient with own effects.
            level: As in `table`.

        Raises:
            ValueError: There is no such coefficient with own effects.
        """
        differ = dict.fromkeys(term for one in self.levels for term in one.terms)
        if term not in differ:
            raise ValueError(
                f"{term!r} has no own effects; coefficients that have are {list(differ)}"
            )
        found = {
            ", ".join(str(part) for part in of if part != WHOLE): draws
            for of, name, draws in self._differing()
            if name == term
        }
        found["the federation"] = self.shared[:, self.names.index(term)]
        table = summaries(found, level)
        rows = {**self.rows, "the federation": sum(self.rows.values())}
        made = table.iloc[:, [0, 2, 3]].set_axis(["estimate", "low", "high"], axis=1)
        return made.assign(rows=[rows.get(name, math.nan) for name in made.index], why="")

    def _facts(self) -> dict[str, Any]:
        """Return the facts about the fit, {what: value}, for a report."""
        return {
            "effective draws": round(self.effective),
            "Pareto's k-hat": self.k_hat,
            "log marginal likelihood": self.evidence,
            f"{'restricted ' * self.restricted}log likelihood": self.log_likelihood,
        }

    def predict(
        self, frame: Any, *, site: str | None = None, group: Any = None, seed: int = 0
    ) -> Tensor:
        """Return draws of the outcome's means for rows of a data frame, [S, n].

        Args:
            frame: The rows, with the columns of the design, and of the offset where there is one.
            site: The site; None for a new one.
            group: The site's group; None for a new one, where there are groups.
            seed: Seed of the effects of a new site or group, which are drawn under tau.

        Raises:
            ValueError: The site or the group is unknown on this machine.
        """
        own, new, rng = self.shared, self.levels, generator(seed, Purpose.POSTERIOR)
        names = () if site is None else self.groups.get(site, ())
        wanted = group if group is not None else names[0] if len(names) == 1 else WHOLE
        if site is not None and wanted in names:
            own = self.own[site][:, names.index(wanted)]
            new = self.levels[1:] if wanted == WHOLE else ()
        elif site is not None and not (names and group is None):
            told = {name: list(groups) for name, groups in self.groups.items()}
            raise ValueError(f"there is no {group if names else site!r} here; there are {told}")
        for level in new:
            noise = torch.from_numpy(rng.standard_normal(level.covariance.shape[:2]))
            effects = (symmetric_root(level.covariance) @ noise[..., None])[..., 0]
            own = own + effects @ torch.eye(own.shape[-1], dtype=own.dtype)[list(level.places)]
        eta = own[:, :1] + own[:, 1:] @ self.design(frame).T
        return self.link(eta + offsets(frame, self.offset))


@declared
def mixed(
    sites: Sites,
    *,
    family: Literal["gaussian", "binomial", "poisson", "negative_binomial"],
    random: Sequence[str] = ("1",),
    covariance: Literal["unstructured", "diagonal"] = "unstructured",
    group: str | None = None,
    within: Sequence[str] = ("1",),
    tau_scale: Positive = 2.5,
    draws: Count = 1000,
    seed: int = 0,
    aggregation: Adder | None = None,
) -> Mixed:
    """Fit a mixed model with effects of each site to the rows of all sites. Return its posterior
    and the maximum likelihood estimate.

    Args:
        sites: The sites, of `tables`.
        family: Of the outcome, as of `glm`.
        random: The coefficients that differ between sites: `1` for the intercept, names of columns
            of the design for slopes. `["1", "days"]` is lme4's `(1 + days | site)`.
        covariance: Of a site's effects, and of a group's: `unstructured`, or `diagonal` for effects
            that are independent for the original columns, `(1 + days || site)`.
        group: A column whose values are groups within a site, such as wards, or patients with
            several rows, with effects besides those of sites: `(1 | site/ward)`; `random=()` for
            groups alone. None for no groups.
        within: The coefficients that differ between groups, as in `random`.
        tau_scale: Standard deviation of the half-normal prior of the effects' standard deviations,
            for standardised columns; times the outcome's for `gaussian`. Correlations for
            standardised columns have an LKJ(1) prior.
        draws: Number K of draws of the shared parameters, each a number that every site answers.
        seed: Seed of the draws.
        aggregation: As in `glm`.

    Raises:
        ValueError: A name in `random` or `within` is no column, an outcome is outside the family's
            range, a column is constant, some separate the outcome, k-hat stays above .7, rows have
            probability weights, or effects cannot be separated from noise or from each other:
            no group has more rows than effects, or each site has one group.

    Example:
        >>> import numpy as np
        >>> import pandas as pd
        >>> import bayesfl as bf
        >>> rng = np.random.default_rng(0)
        >>> frames = {
        ...     f"site {j}": pd.DataFrame({"dose": x, "gain": x + shift + rng.normal(size=20)})
        ...     for j, shift in enumerate((-1.0, 0.0, 0.5, 1.5))
        ...     for x in [rng.normal(size=20)]
        ... }
        >>> sites = bf.stats.tables(frames, outcome="gain", terms=["dose"])
        >>> fit = bf.stats.mixed(sites, family="gaussian")
        >>> list(fit.table().index)
        ['(intercept)', 'dose', 'tau (intercept)', 'sigma', 'intraclass correlation']
    """
    asked = Questions(sites, aggregation)
    with_likelihood(sites, "a mixed model")
    names = ("(intercept)", *sites.columns)
    common = _named(random, names, "random") if group is not None else ()
    effects = _named(random if group is None else within, names, "within" if group else "random")
    if not effects:
        raise ValueError(f"{'within' if group else 'random'}= names no coefficient; take ['1']")
    sums = asked.first(lambda count: Sums(count, len(sites.columns), family))
    everyone, sites = sites, asked.sites
    centre, scale = standard(sums, sites.columns)
    mean, n = float(sums["outcome_mean"]), float(sums["weight"])
    shift, unit = outcome_unit(family, sums, "outcome")
    model: dict[str, Any] = {
        "family": family,
        "columns": len(sites.columns),
        "common": common,
        "effects": effects,
        "group": group,
        "centre": tuple(centre.tolist()),
        "scale": tuple(scale.tolist()),
        "diagonal": covariance == "diagonal",
        "shift": shift,
        "unit": unit,
    }
    beside = torch.eye(1 + len(sites.columns)) / n  # a first approximation
    survey = Mode(
        **model,
        sites=len(sites.names),
        prior=tau_scale,
        beside=tuple(map(tuple, beside.tolist())),
    )
    (p, r, pairs, n_own), rule = survey.sizes, survey.rule
    begin = 0.0 if family == "gaussian" else rule.link((mean * n + 0.5) / (n + 1))
    begin -= float(sums["offset_mean"]) / unit
    at = (begin, *[0.0] * (p - 1), *[math.log(0.5)] * r, *[0.0] * (pairs + n_own))
    state = asked.conduct(replace(survey, at=at))
    theta = state["theta"]
    # Raises for separated outcomes, which have no posterior under a flat prior.
    inverse(
        {name: t[:p, :p] if t.dim() == 2 else t[:p] for name, t in state.items() if t.dim()}, names
    )
    drawn = _integrated(asked, survey, state, model, draws, seed)
    phi, chosen = drawn.phi, drawn.chosen()
    root = survey.phi(theta).root
    root = symmetric_root(root @ root.mT)
    at = torch.cat([theta[:p], root.diagonal(), root[*survey.pairs], theta[p + r + pairs :]])
    best = Maximum(**model, sites=survey.sites, at=tuple(at.tolist()))
    most = asked.conduct(best)
    known, point = most["hessian"][:p, :p], best.phi(most["theta"])
    keep = Own(
        **model,
        at=tuple(map(tuple, phi.tolist())),
        chosen=tuple(chosen.tolist()),
        names=names,
        seed=seed,
    )
    here = {}
    if isinstance(asked.sites, Tables):
        here = dict(zip(asked.sites.ids.tolist(), asked.sites.sites, strict=True))
    else:
        asked.conduct(keep)
    parts = survey.phi(phi[chosen])
    point = replace(point, root=point.root * (point.root.abs() > SMALL))
    change, levels = survey.change @ survey.loads, []
    for kind, places, end in zip(survey.kinds, survey.levels, survey.ends, strict=True):
        of = slice(end - len(places), end)
        own = [change[list(places), of] @ one.root[..., of, of] for one in (parts, point)]
        terms = tuple(names[place] for place in places)
        levels.append(Level(kind, terms, places, *(root @ root.mT for root in own)))
    others, at_most = (_others(survey, one, mean) for one in (parts, point))
    shared = survey.coefficients(parts.beta)
    estimate = dict(zip(names, survey.coefficients(point.beta).tolist(), strict=True))
    for level in levels:
        estimate |= {name: float(t) for name, t in level.named(level.estimate).items()}
    errors = (survey.change @ torch.linalg.inv(known) @ survey.change.T).diagonal().sqrt()
    # For the original outcome; the restricted one for the original columns.
    in_unit = -n * math.log(unit)
    of_columns = (p * math.log(unit) - float(scale.log().sum())) * best.restricted
    return Mixed(
        model=f"{rule.name}, own effects of each "
        + " and each ".join(f"{level.of}: {', '.join(level.terms)}" for level in levels),
        names=names,
        shared=shared,
        levels=tuple(levels),
        others=others,
        estimate=estimate | {name: float(t) for name, t in at_most.items()},
        errors=dict(zip(names, errors.tolist(), strict=True)),
        log_likelihood=-float(most["loss"]) + in_unit + of_columns,
        own={site.name: keep.draws(site, place) for place, site in here.items()},
        groups={site.name: survey.labels(site)[1] for site in here.values()},
        rows=counted(sites.names, sums["rows"]),
        dropped=dict(zip(sites.names, sums["n_dropped"].int().tolist(), strict=True)),
        left_out=asked.left_out,
        effective=drawn.effective,
        k_hat=drawn.k_hat,
        evidence=drawn.evidence + in_unit + p * math.log(unit),
        parameters=survey.size,
        # Coefficients are integrated over, so fits with other columns do not compare.
        likelihood=f"a mixed model's of {getattr(sites, 'outcome', None) or 'outcome'!r}, "
        f"{rule.name}, by {[*sites.columns]}",
        further={"used rows": lambda key: used_rows(asked.again(), key)},
        restricted=best.restricted,
        released=asked.released,
        refit=lambda chosen: mixed(
            everyone.only(chosen),
            family=family,
            random=random,
            covariance=covariance,
            group=group,
            within=within,
            tau_scale=tau_scale,
            draws=draws,
            seed=seed,
            aggregation=aggregation,
        ),
        link=rule.mean,
        design=sites.design,
        offset=sites.offset,
        ratio=rule.ratio,
    )


def _named(terms: Sequence[str], names: Sequence[str], option: str) -> tuple[int, ...]:
    """Return the places of coefficients by their names, `1` for the intercept.

    Raises:
        ValueError: There is no such coefficient.
    """
    wanted = dict.fromkeys("(intercept)" if term == "1" else term for term in terms)
    if strangers := [term for term in wanted if term not in names]:
        raise ValueError(
            f"{option}= names {strangers[0]!r}, which is no column of the design; take '1' or "
            f"columns of {list(names[1:])}"
        )
    return tuple(names.index(term) for term in wanted)


def _others(survey: Hierarchy, phi: Phi, mean: float) -> dict[str, Tensor]:
    """Return the family's own parameters [...] and the intraclass correlations by name.

    Args:
        survey: The model.
        phi: The parameters [...].
        mean: Mean of the outcomes.
    """
    found = {
        name[4:]: own[..., 0, 0].exp() for name, own in zip(survey.rule.own, phi.own, strict=True)
    }
    if survey.family == "gaussian":
        noise = found["sigma"].square()
        found["sigma"] = survey.unit * found["sigma"]
    elif survey.family == "binomial":
        noise = phi.root.new_tensor(math.pi**2 / 3)
    else:
        noise = torch.log1p(found.get("alpha", phi.root.new_zeros(())) + 1 / mean)
    shared = (survey.loads[0] @ phi.root).square().cumsum(-1)  # variance, at the columns' means
    for kind, end in zip(survey.kinds, survey.ends, strict=True):
        of = "" if kind == "site" else f" of {kind}"
        found[f"intraclass correlation{of}"] = shared[..., end - 1] / (shared[..., -1] + noise)
    return found


def _integrated(
    asked: Questions,
    survey: Mode,
    state: Tensors,
    model: Mapping[str, Any],
    draws: int,
    seed: int,
) -> Weighted:
    """Return weighted draws of phi.

    Raises:
        ValueError: k-hat stays above .7.
    """
    values, vectors = torch.linalg.eigh(state["hessian"])
    least = 1e-8 * float(values.abs().max())
    p = survey.sizes[0]
    survey = survey.besides(state["hessian"][:p, :p], state["theta"][p:], state["n_groups"])

    def value(phi: Tensor) -> Tensor:
        total = asked.conduct(Draws(**model, at={"phi": phi}))
        return total["log_likelihood"] + survey.log_prior(phi, survey.prior)

    def around(_: Any, centre: Tensor, covariance: Tensor) -> Proposal:
        return Proposal(centre, covariance, p, partial(survey.given, groups=state["n_groups"]))

    covariance = (vectors / values.abs().clamp_min(least)) @ vectors.T
    remedy = "take fewer effects, more draws=, or a smaller tau_scale="
    first = around(None, state["theta"], covariance)
    return weighted(first, value, around, count=draws, seed=seed, remedy=remedy)
