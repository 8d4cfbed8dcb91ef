"""The posterior of any log density over sites, by questions that sums answer.

Each site integrates its own parameters out (`bayesfl.stats.density.integral`), so the federation
sees only the shared ones, phi, as unconstrained numbers. Its steps:

1. Newton's steps from several starts find the maxima of $log p(phi | rows)$.
2. Along the logarithm of each scale, such as the standard deviation of sites' effects, the mode and
   covariance of the other parameters are found at several nodes. They determine a proposal
   (`bayesfl.stats.density.proposal`).
3. The sites answer their log integrals at K shared draws of the proposal. These give the draws'
   weights, and Pareto's k-hat measures their reliability.
4. Each site draws its own parameters for the draws of the shared ones, and stores them.

Source: Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", JMLR 25, 2024.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from bayesfl.base.options import Count
from bayesfl.base.protocols import Tensors
from bayesfl.base.warning import noted
from bayesfl.federation.clients.surveying import Adder
from bayesfl.posteriors.importance import weighted
from bayesfl.stats.asking import Questions, Sites, counted, used_rows
from bayesfl.stats.density.chains import CHAINS, chains
from bayesfl.stats.density.integral import Unasked, bent
from bayesfl.stats.density.local import Batch, batches
from bayesfl.stats.density.modes import mode
from bayesfl.stats.density.parameters import Parameter, constrained, entries
from bayesfl.stats.density.proposal import Along, Besides, nodes_along
from bayesfl.stats.density.questions import Begin, Marginals, OwnDraws
from bayesfl.stats.fit import Refits, summaries
from bayesfl.stats.policy import LOG_LIKELIHOOD
from bayesfl.stats.tables import Tables

PREDICTIONS = 500
"""Number of draws of predictions, and of the prior, for ArviZ."""


@dataclass(frozen=True, repr=False, kw_only=True)
class Posterior(Refits):
    """The posterior of a log density over sites; `print` shows its table.

    Args:
        draws: {shared parameter: its draws, [S, ...]}, equally weighted.
        here: {site: its model}, of sites on this machine.
        phi: The draws as unconstrained numbers, [S, q].
        seed: Seed of the draws.
        k_hat: Pareto's k-hat of the weighted draws; below .7 their means are reliable.
        effective: Effective number of the weighted draws.
        integrals: {site: Pareto's k-hat of the approximation of its own integral}.
        evidence: Log marginal likelihood, in nats; parameters without a prior have a density of 1.
        used_rows: Function (key) -> {site: keyed hash of its rows}, from a question to the sites.

    Example:
        >>> import torch
        >>> import bayesfl as bf
        >>> from torch.distributions import Normal, constraints
        >>> def log_density(shared, own, rows):
        ...     return Normal(shared["mu"], 1.0).log_prob(rows).sum()
        >>> rows = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])}
        >>> fit = bf.stats.posterior(log_density, rows, shared={"mu": constraints.real})
        >>> fit.table().loc["mu"].round(2).tolist()[:2]
        [1.0, 0.58]
    """

    draws: Tensors
    here: Mapping[str, Any]
    phi: Tensor
    seed: int
    k_hat: float
    effective: float
    integrals: Mapping[str, float]
    evidence: float
    used_rows: Callable[[str], dict[str, Any]]

    def table(self, level: float = 0.95) -> Any:
        """Return means, standard deviations and intervals of the shared parameters as a data frame
        of pandas.

        Args:
            level: Probability of the intervals, between quantiles.
        """
        return summaries(entries(self.draws), level)

    def local(self, site: str) -> Tensors:
        """Return draws of a site's own parameters, and of the `pyro.deterministic` values of a
        Pyro model, by name, [S, ...], paired with `draws`.

        Raises:
            ValueError: The site is not on this machine.
        """
        self._check_here(site)
        return self._made(self._own([site]))[site]

    def _made(self, drawn: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Return draws of some sites' own parameters with their deterministic values."""
        return {
            site: own | (one.made(self.draws | own) if (one := self.here[site].program) else {})
            for site, own in drawn.items()
        }

    def _check_here(self, site: str) -> None:
        if site not in self.here:
            raise ValueError(
                f"the parameters of {site!r} stay at the site; available are {list(self.here)}"
            )

    def _own(self, sites: Sequence[str]) -> dict[str, Tensors]:
        """Return draws of the own parameters of some sites; see `local`."""
        models, order = [self.here[site] for site in sites], list(self.rows)
        found: dict[str, Tensors] = {}
        for batch in batches(models):
            names = [sites[k] for k in batch]
            drawn = Batch.of([models[k] for k in batch]).drawn(
                self.phi, self.seed, [order.index(name) for name in names]
            )
            found |= zip(names, drawn, strict=True)
        return {site: found[site] for site in sites}

    def sites(self, level: float = 0.95) -> Any:
        """Return the sites' own parameters as a data frame of pandas, of sites on this machine.

        Args:
            level: As in `table`.
        """
        found = {
            (site, name): draws
            for site, own in self._made(self._own(list(self.here))).items()
            for name, draws in entries(own).items()
        }
        return summaries(found, level)

    def predict(self, site: str, *rows: Any, draws: Count = 500, **named: Any) -> Tensors:
        """Return draws of a Pyro model's samples at other rows of a site, including observed values
        that are not given, by name, [S, ...].

        Args:
            site: The site whose own parameters are used.
            rows: Arguments of the model.
            draws: Number S of draws.
            named: Keyword arguments of the model.

        Raises:
            ValueError: The site is not on this machine, or has no Pyro model.
        """
        self._check_here(site)
        if self.here[site].program is None:
            raise ValueError("a plain density cannot predict; take draws and local() yourself")
        values = self._some(self._own([site])[site], draws)
        return self.here[site].program.predicted(values, self.seed, draws, *rows, **named)

    def _some(self, own: Tensors, count: int) -> Tensors:
        """Return `count` draws of shared parameters and a site's own."""
        which = torch.arange(count) * len(self.phi) // count
        return {name: t[which] for name, t in (self.draws | own).items()}

    def compare(self, other: "Posterior") -> str:
        """Return a text that compares two fits: by evidence, for proper priors, and, for Pyro
        models at sites on this machine, by leaving out rows.

        Args:
            other: The other fit, to the same rows, which sites confirm by a hash.

        Raises:
            ValueError: The fits have different rows, or mask different ones.

        Source: Vehtari, Gelman, Gabry, "Practical Bayesian model evaluation using leave-one-out
            cross-validation and WAIC", Statistics and Computing 27, 2017.
        """
        with self.released.also(), other.released.also():
            self._check_rows(other, lambda fit, key: fit.used_rows(key), "so fit both to the same")
        lines = [
            f"A: {self.model}",
            f"B: {other.model}",
            f"log Bayes factor of A over B {self.evidence - other.evidence:.4f} nats",
        ]
        both = [
            name
            for name in self.here
            if name in other.here
            and all((one := fit.here[name].program) and one.observed for fit in (self, other))
        ]
        masks = [{site: fit.here[site].program.counted() for site in both} for fit in (self, other)]
        if others := [site for site in both if not np.array_equal(masks[0][site], masks[1][site])]:
            raise ValueError(f"the fits mask different rows of {others}; mask the same in both")
        apart = {
            site: (self._left_out(site) - other._left_out(site))[masks[0][site]] for site in both
        }
        if len(both) > 1:
            apart["all of these"] = np.concatenate([*apart.values()])
        for site, each in apart.items():
            error = math.sqrt(len(each) * np.var(each))
            lines.append(
                f"{site}: {len(each)} rows left out in turn, A - B {each.sum():.2f} nats "
                f"(standard error {error:.2f})"
            )
        return "\n".join(lines)

    def _left_out(self, site: str) -> np.ndarray:
        """Return the log density of each row of a site given the others, [n], in nats."""
        import arviz

        logs = torch.cat([t.reshape(len(t), -1) for t in self.pointwise(site).values()], 1).numpy()
        found, _ = arviz.psislw(-logs.T)
        return np.asarray(np.logaddexp.reduce(found + logs.T, axis=1))

    def pointwise(self, site: str) -> Tensors:
        """Return the log likelihood of each row of a site at the draws, {statement: [S, ...]}, in
        nats.

        Raises:
            ValueError: The site is not on this machine.
        """
        self._check_here(site)
        return self.here[site].program.pointwise(self.draws | self._own([site])[site])

    def to_arviz(self) -> Any:
        """Return the draws as ArviZ's InferenceData: shared parameters, and those of each site on
        this machine along `site`, or as `name (site)` if they have different shapes. A Pyro model
        adds each site's outcomes, log likelihoods and predictions, and draws of the prior and its
        predictions; dimensions have the names of its plates. The draws are chosen among weighted
        ones; their effective number is `effective`, not ArviZ's.
        """
        import arviz

        dims: dict[str, list[str]] = {}
        drawn: dict[str, Tensors] = {}
        programs = {site: one.program for site, one in self.here.items() if one.program is not None}
        mine = self._own(list(self.here))
        own = self._made(mine)
        groups = {
            "posterior": {_free(name): t for name, t in self.draws.items()}
            | self._joined(own, dims)
        }
        if programs:
            one = next(iter(programs.values()))
            dims |= {_free(name): [*map(_free, one.plates[name])] for name in self.draws}
            first = one.predicted({}, self.seed, PREDICTIONS)
            prior = {name: first[name] for name in self.draws}
            drawn = {
                site: one.predicted(prior, self.seed, PREDICTIONS) for site, one in programs.items()
            }
            groups["prior"] = {_free(name): t for name, t in prior.items()} | self._joined(
                {site: {n: t[n] for n in own[site]} for site, t in drawn.items()}, dims
            )
        for site, program in programs.items():
            for name, t in program.outcomes.items():
                at = f"{name} ({site})"
                dims[at] = [f"{plate} ({site})" for plate in program.plates[name]]
                groups.setdefault("observed_data", {})[at] = t
                groups.setdefault("prior_predictive", {})[at] = drawn[site][name]
            for kind, found in (
                ("log_likelihood", program.pointwise(self.draws | mine[site])),
                (
                    "posterior_predictive",
                    program.predicted(self._some(mine[site], PREDICTIONS), self.seed, PREDICTIONS),
                ),
            ):
                groups.setdefault(kind, {}).update(
                    {f"{n} ({site})": found[n] for n in program.observed}
                )
        arrays: dict[str, Any] = {
            kind: {n: (t if kind == "observed_data" else t[None]).numpy() for n, t in of.items()}
            for kind, of in groups.items()
        }
        return arviz.from_dict(**arrays, coords={"site": list(own)}, dims=dims)

    def _joined(self, own: Mapping[str, Tensors], dims: dict[str, list[str]]) -> Tensors:
        """Return the sites' own draws along sites, or as `name (site)` if they have different
        shapes, and add the names of their dimensions.
        """
        found: Tensors = {}
        for name in dict.fromkeys(name for of in own.values() for name in of):
            each = {site: of[name] for site, of in own.items() if name in of}
            plates = {
                site: program.plates[name] if (program := self.here[site].program) else []
                for site in each
            }
            if len(each) == len(own) and len({t.shape for t in each.values()}) == 1:
                found[_free(name)] = torch.stack([*each.values()], 1)
                dims[_free(name)] = ["site", *map(_free, next(iter(plates.values())))]
            else:
                for site, t in each.items():
                    found[f"{name} ({site})"] = t
                    dims[f"{name} ({site})"] = [f"{plate} ({site})" for plate in plates[site]]
        return found

    def _facts(self) -> dict[str, Any]:
        """Return the facts about the fit, {what: value}, for a report."""
        worst = max(self.integrals, key=lambda site: self.integrals[site])
        return {
            "effective draws": round(self.effective),
            "Pareto's k-hat": self.k_hat,
            "k-hat of sites' integrals at most": f"{self.integrals[worst]:.2f} ({worst})",
            "log marginal likelihood": self.evidence,
        }


def _free(name: str) -> str:
    """Return a name that differs from ArviZ's own dimensions and from `site`."""
    return f"{name}_" if name in ("chain", "draw", "site") else name


def fitted(
    sites: Sites,
    prior: Callable[[Tensors], Tensor] | None,
    *,
    model: str,
    draws: int,
    exact: bool,
    seed: int,
    aggregation: Adder | None,
) -> Posterior:
    """Return the posterior of the sites' densities.

    Args:
        sites: The sites, whose terms are the shared parameters.
        prior: Log density of these by name, counted once; None if the sites' models have it.
        model: The model, in words.
        draws: Number K of weighted draws.
        exact: Whether to run chains from these.
        seed: Seed of the draws.
        aggregation: What adds the answers; None adds them openly.

    Raises:
        ValueError: Sites have different priors, there is no maximum or more than one, the posterior
            does not fall along a scale, or k-hat stays above .7.
    """
    asked = Questions(sites, aggregation)
    parameters = [one for one in sites.terms if isinstance(one, Parameter)]
    if len(parameters) < max(1, len(sites.terms)):
        raise ValueError(
            "these sites have tables without a log density: make them by bf.stats.densities or "
            "bf.pyro.densities"
        )
    names = tuple(name for one in parameters for name in one.columns)
    q, j = len(names), len(sites.names)
    scales = torch.tensor([one.is_scale for one in parameters for _ in one.columns])

    def ours(phi: Tensor) -> Tensor:
        values, log_jacobian = constrained(parameters, phi)
        if prior is None:
            return log_jacobian
        with Unasked(), noted("in prior=, which returns one number, a tensor []"):
            return log_jacobian + prior(values).reshape(())

    def target(phi: Tensor, order: int) -> list[Tensor]:
        told = asked.conduct(Marginals(j, q, order, at={"phi": phi}))
        of = (ours, grad(ours), bent(ours))[: order + 1]
        return [
            told[name] + vmap(one)(phi).detach()
            for name, one in zip((LOG_LIKELIHOOD, "slope", "hessian"), of, strict=False)
        ]

    begun = asked.conduct(Begin(j, q))
    apart = (begun["prior"] - begun["prior"][0]).abs().amax(1)
    if (apart > 1e-6 * (1 + begun["prior"][0].abs().max())).any():
        other = sites.names[int(apart.argmax())]
        raise ValueError(
            f"the priors of {sites.names[0]!r} and {other!r} differ, by {float(apart.max()):.3g} "
            "nats at a point: a prior may not read rows, because each site would have its own; "
            "give it numbers"
        )
    best = mode(target, begun["begin"][0], scales, parameters, seed)
    nodes = nodes_along(target, best, scales.nonzero().flatten().tolist(), names)
    drawn = weighted(
        Along.of(best, nodes),
        lambda phi: target(phi, 0)[0],
        Besides,
        count=draws,
        seed=seed,
        remedy="take more draws=, a narrower prior, or fewer shared parameters",
    )
    phi = drawn.phi[drawn.chosen()]
    if exact:
        phi = chains(target, phi[:CHAINS], torch.cov(phi.T).reshape(q, q), seed)
    integrals = asked.conduct(OwnDraws(j, seed, at={"phi": phi}))["k_hat"]
    found, _ = vmap(lambda one: constrained(parameters, one))(phi)
    here: Any = sites.sites if isinstance(sites, Tables) else ()
    return Posterior(
        model=model,
        names=tuple(entries(found)),
        draws=found,
        here={site.name: site.local for site in here},
        phi=phi,
        seed=seed,
        rows=counted(sites.names, begun["rows"]),
        dropped={},
        left_out=asked.left_out,
        effective=drawn.effective,
        k_hat=drawn.k_hat,
        integrals=dict(zip(sites.names, integrals.tolist(), strict=True)),
        evidence=drawn.evidence,
        used_rows=lambda key: used_rows(asked.again(), key),
        released=asked.released,
        refit=lambda chosen: fitted(
            sites.only(chosen),
            prior,
            model=model,
            draws=draws,
            exact=exact,
            seed=seed,
            aggregation=aggregation,
        ),
    )
