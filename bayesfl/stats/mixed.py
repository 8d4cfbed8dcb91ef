"""Mixed models over sites, whose intervals are true: effects of each site's own are integrated out
at the site, and the federation's parameters by one question.

A site's coefficients are beta + tau * u with u ~ N(0, I), see `bayesfl.stats.hierarchy`. Newton's
steps on the sum of the sites' log marginal likelihoods find the mode of phi = (beta, log tau, the
family's own) under a half-normal prior of tau. Then all sites answer, for the same K draws of phi
around that mode (`bayesfl.posteriors.importance`), their log marginal likelihoods, which add up;
the ratios of sum and density are the draws' weights. Each site keeps, for each draw, what it says
of its own effects, so that draws of these have the uncertainty of phi in them. With tau set to its
estimate instead, intervals would be too short, most of all where that is near 0.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import Count, Positive, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.federation.clients.surveying import Adder
from bayesfl.posteriors.importance import Proposal, resampled, weights_of
from bayesfl.stats import newton
from bayesfl.stats.asking import (
    Questions,
    Sites,
    SiteSurvey,
    Sums,
    counted,
    outcome_unit,
    standard,
    with_likelihood,
)
from bayesfl.stats.families import FAMILIES, Family, Normal, row_information
from bayesfl.stats.fit import Refits, inverse
from bayesfl.stats.hierarchy import Groups, Phi, derivatives, log_marginals, modes
from bayesfl.stats.tables import Site, Tables
from bayesfl.stats.terms import column_of, numbers

MOVES = 3
"""How often the proposal is moved to where the weights are."""
MOST_K = 0.7
"""A k-hat above this says that the weights' mean cannot be relied on."""
RESAMPLED = 4000
"""Number of equally weighted draws that summaries are made of."""
FAR = 1000.0
"""A draw that is left out is so many nats less likely than all others."""
NUMBERS = 2**24
"""So many linear predictors are computed at once."""


@dataclass(frozen=True)
class Hierarchy(SiteSurvey):
    """Hold the model that questions about a hierarchy share.

    Args:
        family: Name of the family.
        columns: Number p of columns of the design.
        effects: Places of the own effects among intercept and columns, 0 the intercept.
        group: Column whose values are groups within a site; None for the site itself.
        centre: Means of the columns.
        scale: Their standard deviations.
    """

    family: str
    columns: int
    effects: tuple[int, ...]
    group: str | None
    centre: tuple[float, ...]
    scale: tuple[float, ...]

    @property
    def rule(self) -> Family:
        """Return the family; of normal outcomes with its own standard deviation."""
        return Normal() if self.family == "gaussian" else FAMILIES[self.family]

    @property
    def size(self) -> int:
        """Return the number q of parameters phi."""
        return 1 + self.columns + len(self.effects) + len(self.rule.own)

    def groups(self, site: Site) -> Groups:
        """Return a site's rows by group, columns standardised, after a column of ones."""
        centre, scale = (torch.tensor(t, dtype=torch.float64) for t in (self.centre, self.scale))
        ones = torch.ones(len(site.x), 1, dtype=torch.float64)
        x = torch.cat([ones, (site.x - centre) / scale], 1)
        assert site.y is not None
        group = None if self.group is None else torch.from_numpy(self.labels(site)[0])
        return Groups.of(x, x[:, list(self.effects)], site.y, site.weights, site.offset, group)

    def labels(self, site: Site) -> tuple[np.ndarray, tuple[Any, ...]]:
        """Return the group of each of a site's rows, [n] from 0, and the groups' names.

        Raises:
            ValueError: The site has no such column, or a value is missing.
        """
        import pandas

        if self.group is None:
            return np.zeros(len(site.x), int), (site.name,)
        codes, names = pandas.factorize(column_of(site.frame, self.group, site.name), sort=True)
        if missing := int((codes < 0).sum()):
            raise ValueError(
                f"site {site.name!r} has {missing} rows without {self.group!r}; name it in "
                "tables(also=...), which looks at missing values, or leave these rows out"
            )
        return codes, tuple(names.tolist())

    def informations(self, phi: Tensor, site: Site) -> Iterator[Tensor]:
        """Yield rows' information at parameters [K, q] without own effects, [K, n] in parts."""
        centre, scale = (torch.tensor(t, dtype=torch.float64) for t in (self.centre, self.scale))
        design = (site.x - centre) / scale
        for some in phi.split(max(1, NUMBERS // len(design))):
            parts = self.phi(some)
            eta = parts.beta[:, :1] + parts.beta[:, 1:] @ design.T + site.offset
            yield site.weights * row_information(self.rule, eta, parts.own[..., 0])

    def phi(self, phi: Tensor) -> Phi:
        """Return the parts of a vector of parameters [..., q]."""
        return Phi.of(phi, 1 + self.columns, len(self.effects))


@dataclass(frozen=True)
class Mode(Hierarchy):
    """Ask for the log marginal likelihood with its derivatives at phi, and make Newton's step
    towards the mode under the prior of tau.

    Args:
        prior: Standard deviation of tau's half-normal prior; None for the maximum of the
            likelihood.
        at: Where to begin, [q].
    """

    prior: float | None = None
    at: tuple[float, ...] = ()

    def start(self, about: Any, /) -> Tensors:
        """Return Newton's start."""
        return newton.begin(torch.tensor(self.at, dtype=torch.float64))

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an answer."""
        q = self.size
        return {"loss": (), "slope": (q,), "hessian": (q, q), "n_groups": ()}

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's information, [1, n]; see `SiteSurvey`."""
        return next(self.informations(state["theta"][None], site))

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        groups = self.groups(site)
        value, slope, hessian = derivatives(self.rule, groups, state["theta"], len(self.effects))
        count = torch.tensor(len(groups.y))
        return {"loss": -value, "slope": -slope, "hessian": -hessian, "n_groups": count}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Make Newton's step; see `newton.step`."""
        loss, slope, hessian = (total[name].clone() for name in ("loss", "slope", "hessian"))
        if self.prior is not None:
            tau = self.phi(state["theta"]).tau
            at = torch.arange(1 + self.columns, 1 + self.columns + len(self.effects))
            ratio = (tau / self.prior) ** 2
            loss = loss - log_prior(state["theta"][at], self.prior)
            slope[at] += ratio - 1
            hessian[at, at] += 2 * ratio
        after, done = newton.step(state, loss, slope, hessian)
        return after | {"n_groups": total["n_groups"]}, done


def log_prior(log_tau: Tensor, scale: float) -> Tensor:
    """Return the log density of log tau [..., r] under a half-normal prior of tau, [...]."""
    constant = math.log(2) - math.log(scale) - math.log(2 * math.pi) / 2
    return (log_tau - (log_tau.exp() / scale) ** 2 / 2 + constant).sum(-1)


@dataclass(frozen=True)
class Draws(Hierarchy):
    """Ask for the log marginal likelihood at K draws of phi.

    A site with a policy tells at draws where a row weighs more than that allows, which are those
    far from the others, that they are very unlikely.

    Args:
        at: The draws, [K, q].
    """

    at: tuple[tuple[float, ...], ...]

    def start(self, about: Any, /) -> Tensors:
        """Return the draws."""
        return {"phi": torch.tensor(self.at, dtype=torch.float64)}

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"log_likelihood": (len(state["phi"]),)}

    def row_weights(self, state: Tensors, site: Site) -> Tensor:
        """Return each row's information at the draw where it is most even; see `SiteSurvey`."""
        least = [
            some[(some.amax(1) / some.sum(1)).nan_to_num(1.0).argmin()]
            for some in self.informations(state["phi"], site)
        ]
        return min(least, key=lambda one: float(one.max() / one.sum()))

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return one site's share; see `SiteSurvey`."""
        groups = self.groups(site)
        found = [
            log_marginals(self.rule, groups, self.phi(some)).sum(-1)
            for some in state["phi"].split(max(1, NUMBERS // (16 * groups.y.numel())))
        ]
        logs = torch.cat(found)
        if site.policy is not None:
            parts = self.informations(state["phi"], site)
            even = torch.cat([site.policy.even(some) for some in parts])
            logs = torch.where(even, logs, logs.min() - FAR)
        return {"log_likelihood": logs}


@dataclass(frozen=True)
class Own(Hierarchy):
    """Tell sites on other machines the draws of phi, by which each makes draws of its own
    coefficients and keeps them; it answers how many.

    Args:
        at: The draws, [K, q].
        chosen: Places of the equally weighted ones among them, [S].
        names: Names of intercept and columns.
        seed: Seed of the draws.
    """

    at: tuple[tuple[float, ...], ...]
    chosen: tuple[int, ...]
    names: tuple[str, ...]
    seed: int

    def shapes(self, state: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the shape of an answer."""
        return {"n_kept": ()}

    def of_site(self, state: Tensors, site: Site, place: int) -> Tensors:
        """Return the number of draws; see `SiteSurvey`."""
        return {"n_kept": torch.tensor(len(self.chosen))}

    def kept(self, state: Tensors, site: Site, place: int) -> Any:
        """Return draws of the site's own coefficients, of columns as they are, with a row for each
        draw, or for each draw and group.
        """
        import pandas

        phi, chosen = torch.tensor(self.at, dtype=torch.float64), torch.tensor(self.chosen)
        centre, scale = (torch.tensor(t, dtype=torch.float64) for t in (self.centre, self.scale))
        own = _own_draws(self, site, phi, chosen, self.seed, place)
        draws = _as_they_are(own, centre, scale).numpy()
        found = pandas.DataFrame(draws.reshape(-1, draws.shape[-1]), columns=list(self.names))
        if self.group is not None:
            found.insert(0, self.group, np.tile(self.labels(site)[1], len(draws)))
        return found


@dataclass(frozen=True, repr=False)
class Mixed(Refits):
    """The posterior of a mixed model over sites; `print` shows its table.

    Args:
        effects: Names of the own effects, [r].
        shared: Draws of the federation's coefficients, [S, 1 + p], of intercept and columns as
            they are, `names`.
        tau: Draws of the standard deviations of own effects, [S, r]: of the intercept's at the
            means of the columns.
        others: {name: draws [S]} of the family's own parameters.
        own: {site: draws of its own coefficients [S, groups, 1 + p]}, of sites on this machine,
            draw by draw beside `shared`; others keep theirs.
        groups: {site: names of its groups}, of these sites; its own where it is one group.
        effective: Effective number of the weighted draws.
        k_hat: Pareto's k of their weights; below .7 their means can be relied on.
        evidence: Log marginal likelihood, in nats, under a density of 1 for what has no prior.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"dose": [0.0, 1, 2, 3], "gain": [0.0, 1, 1, 3]})
        >>> frames = {site: rows.assign(gain=rows["gain"] + k) for k, site in enumerate("abcd")}
        >>> sites = bf.stats.tables(frames, outcome="gain", terms=["dose"])
        >>> fit = bf.stats.mixed(sites, family="gaussian")
        >>> fit.sites().shape
        (4, 4)
    """

    effects: tuple[str, ...]
    shared: Tensor
    tau: Tensor
    others: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    groups: Mapping[str, tuple[Any, ...]]
    effective: float
    k_hat: float
    evidence: float
    link: Any
    design: Any
    ratio: str | None
    offset: str | None
    places: tuple[int, ...]
    scale: Tensor
    centre: Tensor

    def table(self, level: float = 0.95) -> Any:
        """Return means, standard deviations and intervals as a data frame of pandas.

        Args:
            level: Probability of the intervals, between quantiles.
        """
        found = dict(zip(self.names, self.shared.T, strict=True))
        found |= {f"tau {name}": t for name, t in zip(self.effects, self.tau.T, strict=True)}
        return _summaries({**found, **self.others}, level, self.ratio)

    def sites(self, level: float = 0.95) -> Any:
        """Return the sites' own coefficients as a data frame of pandas with a row for each site,
        group and effect.

        Args:
            level: As in `table`.
        """
        found = {
            (site, *([group] if draws.shape[1] > 1 else []), self.names[place]): draws[:, at, place]
            for site, draws in self.own.items()
            for at, group in enumerate(self.groups[site])
            for place in self.places
        }
        return _summaries(found, level, None)

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
        if term not in self.effects:
            raise ValueError(
                f"{term!r} has no own effects; coefficients that have are {list(self.effects)}"
            )
        place = self.names.index(term)
        found = {
            site if draws.shape[1] == 1 else f"{site}, {group}": draws[:, at, place]
            for site, draws in self.own.items()
            for at, group in enumerate(self.groups[site])
        }
        table = _summaries({**found, "the federation": self.shared[:, place]}, level, None)
        rows = {**self.rows, "the federation": sum(self.rows.values())}
        made = table.iloc[:, [0, 2, 3]].set_axis(["estimate", "low", "high"], axis=1)
        return made.assign(rows=[rows.get(name, math.nan) for name in made.index], why="")

    def interval(self, term: str, level: float) -> dict[str, float]:
        """Return mean, `estimate`, and quantiles, `low` and `high`, of a shared coefficient."""
        row = self.table(level).loc[term]
        return {"estimate": row.iloc[0], "low": row.iloc[2], "high": row.iloc[3]}

    def _facts(self) -> dict[str, Any]:
        """Return what the fit rests on, {what: value}, for a report."""
        return {
            "effective draws": round(self.effective),
            "Pareto's k-hat": self.k_hat,
            "log evidence": self.evidence,
        }

    def __str__(self) -> str:
        counted = "; ".join(
            f"{site} {count}"
            + (f" ({self.dropped[site]} left out)" if self.dropped.get(site) else "")
            for site, count in self.rows.items()
        )
        return "\n".join(
            [
                self.model,
                self.table().to_string(float_format=lambda value: f"{value:.4g}"),
                f"{len(self.rows)} sites, {sum(self.rows.values())} rows: {counted}",
                *(f"left out: {site}, {why}" for site, why in self.left_out.items()),
                f"{self.effective:.0f} effective draws, k-hat {self.k_hat:.2f}; "
                f"{self.questions} questions; log evidence {self.evidence:.4f}",
                str(self.released),
            ]
        )

    __repr__ = __str__

    def to_arviz(self) -> Any:
        """Return the draws as ArviZ's InferenceData: `beta` by term, `tau` by effect, and `own` by
        site and term, where a site is one group.
        """
        import arviz

        draws = {"beta": self.shared[None].numpy(), "tau": self.tau[None].numpy()}
        draws |= {name: t[None].numpy() for name, t in self.others.items()}
        coords: dict[str, list[str]] = {"term": list(self.names), "effect": list(self.effects)}
        dims = {"beta": ["term"], "tau": ["effect"]}
        single = {site: t for site, t in self.own.items() if t.shape[1] == 1}
        if single:
            draws["own"] = torch.stack([t[:, 0] for t in single.values()], 1)[None].numpy()
            coords["site"], dims["own"] = list(single), ["site", "term"]
        return arviz.from_dict(draws, coords=coords, dims=dims)

    def predict(self, frame: Any, *, site: str | None = None, seed: int = 0) -> Tensor:
        """Return draws of the outcome's means for rows of a data frame, [S, n].

        Args:
            frame: The rows, with the columns of the design, and of the offset where there is one.
            site: The site; None for a new one, whose effects are drawn under tau.
            seed: Seed of a new site's effects.

        Raises:
            ValueError: The site is not on this machine, or has several groups.
        """
        x = self.design(frame)
        if site is None:
            rng = generator(seed, Purpose.POSTERIOR)
            u = torch.from_numpy(rng.standard_normal(self.tau.shape))
            sizes = torch.cat([torch.ones(1, dtype=torch.float64), self.scale])
            effects = u * (self.tau * sizes[list(self.places)])
            away = _spread(effects, self.places, self.shared.shape[1])
            own = self.shared + _as_they_are(away, self.centre, self.scale)
        elif site in self.own and self.own[site].shape[1] == 1:
            own = self.own[site][:, 0]
        else:
            raise ValueError(f"{site!r} is no site of one group here; those are {list(self.own)}")
        eta = own[:, :1] + own[:, 1:] @ x.T
        if self.offset is not None:
            eta = eta + torch.from_numpy(numbers(frame, self.offset, "the frame"))
        return self.link(eta)


def _spread(effects: Tensor, places: Sequence[int], width: int) -> Tensor:
    """Return effects [..., r] at their places among intercept and columns, [..., 1 + p]."""
    found = effects.new_zeros(*effects.shape[:-1], width)
    found[..., list(places)] = effects
    return found


def _as_they_are(coefficients: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """Return coefficients [..., 1 + p] for columns as they are, by those of standardised ones."""
    slopes = coefficients[..., 1:] / scale
    return torch.cat([coefficients[..., :1] - (slopes @ centre)[..., None], slopes], -1)


def _summaries(draws: Mapping[Any, Tensor], level: float, ratio: str | None) -> Any:
    import pandas

    low, high = (1 - level) / 2, (1 + level) / 2
    values = torch.stack(list(draws.values())).numpy()
    columns = {
        "mean": values.mean(1),
        "sd": values.std(1, ddof=1),
        f"{100 * low:g} %": np.quantile(values, low, axis=1),
        f"{100 * high:g} %": np.quantile(values, high, axis=1),
    }
    index = list(draws)
    if isinstance(index[0], tuple):
        index = pandas.MultiIndex.from_tuples(index)
    return pandas.DataFrame(columns, index=index)


@declared
def mixed(
    sites: Sites,
    *,
    family: Literal["gaussian", "binomial", "poisson", "negative_binomial"],
    random: Sequence[str] = ("1",),
    group: str | None = None,
    tau_scale: Positive = 2.5,
    draws: Count = 1000,
    seed: int = 0,
    aggregation: Adder | None = None,
) -> Mixed:
    """Fit a mixed model, in which sites have effects of their own, to the rows of all sites, and
    return its posterior.

    Args:
        sites: The sites, of `tables`.
        family: Of the outcome, as of `glm`.
        random: The coefficients that differ between sites: `1` for the intercept, names of columns
            of the design for slopes. They are independent, for columns that are standardised.
        group: A column whose values are groups within a site, as wards; then the effects are each
            group's. None for the site's.
        tau_scale: Standard deviation of the half-normal prior of the effects' standard deviations,
            for standardised columns; times the outcome's, where that is `gaussian`.
        draws: Number K of draws of the shared parameters, each a number that every site answers.
        seed: Seed of the draws.
        aggregation: As in `glm`.

    Raises:
        ValueError: A name in `random` is no column, an outcome is outside the family's range, a
            column is constant, some separate the outcome, or k-hat stays above .7.

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
        ['(intercept)', 'dose', 'tau (intercept)', 'sigma']
    """
    asked = Questions(sites, aggregation)
    with_likelihood(sites, "a mixed model")
    names = ("(intercept)", *sites.columns)
    terms = list(dict.fromkeys("(intercept)" if name == "1" else name for name in random))
    if strangers := [name for name in terms if name not in names]:
        raise ValueError(
            f"random= names {strangers[0]!r}, which is no column of the design; take '1' or some "
            f"of {list(sites.columns)}"
        )
    effects = tuple(names.index(name) for name in terms)
    sums = asked.first(lambda count: Sums(count, len(sites.columns), family))
    everyone, sites = sites, asked.sites
    centre, scale = standard(sums, sites.columns)
    mean, unit = float(sums["outcome_mean"]), outcome_unit(family, sums, "outcome")[1]
    model: dict[str, Any] = {
        "family": family,
        "columns": len(sites.columns),
        "effects": effects,
        "group": group,
        "centre": tuple(centre.tolist()),
        "scale": tuple(scale.tolist()),
    }
    rule = Normal() if family == "gaussian" else FAMILIES[family]
    begin = [rule.link((mean * float(sums["weight"]) + 0.5) / (float(sums["weight"]) + 1))]
    begin += [0.0] * len(sites.columns) + [math.log(0.5 * unit)] * len(effects)
    begin += [math.log(unit)] * len(rule.own)
    survey = Mode(**model, prior=tau_scale * unit, at=tuple(begin))
    state = asked.conduct(survey)
    found, p = newton.minimum(state), 1 + len(sites.columns)
    # Of separated outcomes there is no posterior under a flat prior; it raises.
    beta = newton.Minimum(
        theta=found.theta[:p],
        loss=found.loss,
        hessian=found.hessian[:p, :p],
        moved=found.moved[:p],
        first=found.first[:p, :p],
    )
    inverse(beta, names)
    phi, weights, k_hat, evidence = _integrated(
        asked, survey, found, model, float(state["n_groups"]), draws, seed
    )
    rng = generator(seed, Purpose.POSTERIOR, index=MOVES + 1)
    chosen = torch.from_numpy(resampled(weights, RESAMPLED, rng))
    own, here = {}, asked.sites.sites if isinstance(asked.sites, Tables) else ()
    if isinstance(asked.sites, Tables):
        own = {
            site.name: _own_draws(survey, site, phi, chosen, seed, int(place))
            for site, place in zip(asked.sites.sites, asked.sites.ids, strict=True)
        }
    else:
        at, places = tuple(map(tuple, phi.tolist())), tuple(chosen.tolist())
        asked.conduct(Own(**model, at=at, chosen=places, names=names, seed=seed))
    parts = survey.phi(phi[chosen])
    sizes = torch.cat([torch.ones(1, dtype=torch.float64), scale])
    return Mixed(
        model=f"{rule.name}, own effects of each {group or 'site'}: {', '.join(terms)}",
        names=names,
        effects=tuple(terms),
        shared=_as_they_are(parts.beta, centre, scale),
        tau=parts.tau / sizes[list(effects)],
        others={name[4:]: t[:, 0, 0].exp() for name, t in zip(rule.own, parts.own, strict=True)},
        own={site: _as_they_are(t, centre, scale) for site, t in own.items()},
        groups={site.name: survey.labels(site)[1] for site in here},
        rows=counted(sites.names, sums["rows"]),
        dropped=dict(zip(sites.names, sums["n_dropped"].int().tolist(), strict=True)),
        left_out=asked.left_out,
        effective=1 / float((weights**2).sum()),
        k_hat=k_hat,
        evidence=evidence,
        released=asked.released,
        refit=lambda chosen: mixed(
            everyone.only(chosen),
            family=family,
            random=random,
            group=group,
            tau_scale=tau_scale,
            draws=draws,
            seed=seed,
            aggregation=aggregation,
        ),
        link=rule.mean,
        design=sites.design,
        offset=sites.offset,
        ratio=rule.ratio,
        places=effects,
        scale=scale,
        centre=centre,
    )


def _integrated(
    asked: Questions,
    survey: Mode,
    found: newton.Minimum,
    model: Mapping[str, Any],
    groups: float,
    draws: int,
    seed: int,
) -> tuple[Tensor, np.ndarray, float, float]:
    """Return draws of phi [K, q], their weights [K], k-hat and the log evidence.

    Raises:
        ValueError: k-hat stays above `MOST_K`.
    """
    assert survey.prior is not None
    values, vectors = torch.linalg.eigh(found.hessian)
    least = 1e-8 * float(values.abs().max())
    centre, covariance = found.theta, (vectors / values.abs().clamp_min(least)) @ vectors.T
    k_hat = math.inf
    for move in range(1 + MOVES):
        rng = generator(seed, Purpose.POSTERIOR, index=move)
        proposal = Proposal(centre, covariance, survey.effects, 1 + survey.columns, groups)
        phi, log_density = proposal.draw(draws, rng)
        total = asked.conduct(Draws(**model, at=tuple(map(tuple, phi.tolist()))))
        logs = total["log_likelihood"] + log_prior(survey.phi(phi).tau.log(), survey.prior)
        ratio = logs - log_density
        weights, k_hat = weights_of(ratio)
        if k_hat <= MOST_K:
            evidence = float(ratio.logsumexp(0)) - math.log(draws)
            return phi, weights, k_hat, evidence
        mass = torch.from_numpy(weights)
        centre = mass @ phi
        around = (phi - centre).T @ (mass[:, None] * (phi - centre))
        covariance = around + 1e-12 * float(around.diagonal().max()) * torch.eye(len(centre))
    raise ValueError(
        f"the draws' weights have k-hat {k_hat:.2f}, above {MOST_K}, after {MOVES} moves, so their "
        "means cannot be relied on: take fewer effects, more draws=, or a smaller tau_scale="
    )


def _own_draws(
    survey: Hierarchy, site: Site, phi: Tensor, chosen: Tensor, seed: int, place: int
) -> Tensor:
    """Return draws of the coefficients of a site's groups, [S, G, 1 + p], of standardised columns:
    the normal approximation around the groups' modes at each draw of phi.
    """
    groups, parts = survey.groups(site), survey.phi(phi)
    found = [
        modes(survey.rule, groups, survey.phi(some))
        for some in phi.split(max(1, NUMBERS // groups.y.numel()))
    ]
    u = torch.cat([mode for mode, _ in found])
    # With hessian = L L', the rows of L'^-1 noise have its inverse as covariance.
    lower = torch.linalg.cholesky(torch.cat([hessian for _, hessian in found]))
    rng = generator(seed, Purpose.POSTERIOR, client=place + 1)
    noise = torch.from_numpy(rng.standard_normal((len(chosen), *u.shape[1:])))
    away = torch.linalg.solve_triangular(lower[chosen].mT, noise[..., None], upper=True)[..., 0]
    effects = (u[chosen] + away) * parts.tau[chosen][:, None]
    beta = parts.beta[chosen][:, None]
    return beta + _spread(effects, survey.effects, beta.shape[-1])
