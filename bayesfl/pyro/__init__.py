"""Any Pyro model over sites whose rows may not be pooled.

Sums over sites determine the shared parameters; a site's own parameters stay there. See
`bayesfl.stats.density.posterior` for the method.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bayesfl.base.options import Count, declared
from bayesfl.base.warning import noted
from bayesfl.federation.clients.surveying import Adder
from bayesfl.pyro.program import Program
from bayesfl.stats.asking import Sites
from bayesfl.stats.density.plain import check_some, site_of, tables_of
from bayesfl.stats.density.posterior import Posterior, fitted
from bayesfl.stats.policy import Policy
from bayesfl.stats.tables import Tables

__all__ = ["densities", "fit"]


@declared
def densities(
    model: Callable[..., Any],
    rows: Mapping[str, Any],
    *,
    shared: Sequence[str],
    policy: Policy | None = None,
) -> Tables:
    """Make the sites of a Pyro model, for `fit`, and for a node's own app.

    Args:
        model: As of `fit`.
        rows: {site: its rows}.
        shared: As of `fit`.
        policy: As of `bayesfl.stats.density.plain.densities`.

    Raises:
        ValueError: The model has what cannot be read, or other shapes at another site.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import torch
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(mu, 1.0).expand([len(y)]).to_event(1), obs=y)
        >>> rows = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])}
        >>> bf.pyro.densities(model, rows, shared=["mu"]).columns
        ('mu',)
    """
    shared = tuple(dict.fromkeys(shared))
    check_some(rows, shared)
    sites, first = {}, None
    for name in sorted(rows):
        with noted(f"raised by the model at site {name!r}"):
            ours, local = Program.of(model, name, rows[name]).local(shared)
        first = first or (name, ours)
        if ours != first[1]:
            told = next((a, b) for a, b in zip(first[1], ours, strict=True) if a != b)
            raise ValueError(
                f"the shared parameter {told[0].column!r} is {told[0].words} at site {first[0]!r} "
                f"and {told[1].words} at {name!r}: give it one shape and range, or make it the "
                "site's own"
            )
        sites[name] = site_of(name, rows[name], local)
    return tables_of(sites, first[1] if first else (), policy)


@declared
def fit(
    model: Callable[..., Any],
    sites: Mapping[str, Any] | Sites,
    *,
    shared: Sequence[str],
    draws: Count = 1000,
    exact: bool = False,
    seed: int = 0,
    aggregation: Adder | None = None,
) -> Posterior:
    """Fit a Pyro model to the rows of all sites, and return its posterior.

    Each site's parameters that are not shared are integrated out there. Priors of shared ones are
    counted once.

    Args:
        model: The model: a function of rows, or a `PyroModule`. Its statements may not depend on
            values, discrete parameters are summed out, and plates have no subsample.
        sites: {site: the model's arguments: a tuple, a mapping of named ones, or a single one}; or
            sites on other machines, whose apps make them by `densities`.
        shared: Names of the parameters that sites share; the others are each site's own.
        draws: Number K of draws of the shared parameters, each a number that every site answers.
        exact: As of `bayesfl.stats.posterior`.
        seed: Seed of the draws.
        aggregation: As in `bayesfl.stats.glm`.

    Raises:
        ValueError: The model has what cannot be read, sites have different priors, there is no
            maximum or more than one, or k-hat stays above .7.

    Example:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import torch
        >>> import bayesfl as bf
        >>> def schools(sigma, y=None):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        ...     tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        ...     theta = pyro.sample("theta", dist.Normal(mu, tau))
        ...     pyro.sample("y", dist.Normal(theta, sigma), obs=y)
        >>> y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
        >>> sigma = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])
        >>> rows = {f"school {j}": (sigma[j], y[j]) for j in range(8)}
        >>> fit = bf.pyro.fit(schools, rows, shared=["mu", "tau"])
        >>> fit.table()["mean"].round(1).tolist()
        [4.4, 3.6]
    """
    if not isinstance(sites, Sites):
        sites = densities(model, sites, shared=shared)
    elif {*shared} != (made := {one.column for one in sites.terms}):
        raise ValueError(
            f"shared={list(shared)} differs from what the sites were made with, "
            f"{sorted(made)}; give these, or make the sites anew"
        )
    name = getattr(model, "__name__", type(model).__name__)
    options = {"draws": draws, "exact": exact, "seed": seed, "aggregation": aggregation}
    return fitted(sites, None, model=name, **options)
