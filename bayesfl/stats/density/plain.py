"""The posterior of a plain function, log p(rows, own | shared), over sites."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map_only

from bayesfl.base.options import Count, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.warning import noted
from bayesfl.data.names import natural
from bayesfl.federation.clients.surveying import Adder
from bayesfl.stats.asking import Sites
from bayesfl.stats.density.integral import Differences, InDouble, Integral, Parts, Unasked
from bayesfl.stats.density.local import Batch, Local, Rows, apart, batches
from bayesfl.stats.density.parameters import Parameter, constrained
from bayesfl.stats.density.posterior import Posterior, fitted
from bayesfl.stats.policy import Policy
from bayesfl.stats.tables import Site, Tables

MOST_OWN = 20
"""Maximum number of a site's own parameters with derivatives by differences."""
Range: TypeAlias = Any
"""A range of `torch.distributions.constraints`, or (range, shape). The shape of a site's own
parameter may be a function of its rows.
"""
LogDensity: TypeAlias = Callable[[Any, Any, Any], Any]
"""Function (shared parameters by name, the site's own by name, its rows) to log p(rows, own |
shared) [] in nats.
"""


def leaves(rows: Any) -> list[np.ndarray]:
    """Return the arrays in a site's rows: an array, a data frame, or tuples, lists or dictionaries
    of these.
    """
    kinds = Tensor | np.ndarray | pandas.DataFrame | int | float
    return [np.asarray(one) for one in tree_leaves(rows) if isinstance(one, kinds)]


def in_double(rows: Any) -> Any:
    """Return rows with floats in float64, like parameters."""
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, rows)


def site_of(name: str, rows: Any, local: Local) -> Site:
    """Return a site whose rows have a log density. A `Policy` counts rows by the longest first
    dimension of their arrays, one if all are single numbers.
    """
    arrays = leaves(rows)
    count = max((len(one) for one in arrays if one.ndim), default=1)
    frame = pandas.DataFrame(
        {
            f"{place}.{k}": column
            for place, one in enumerate(arrays)
            if one.size and count == (len(one) if one.ndim else 1)
            for k, column in enumerate(one.reshape(count, -1).T)
        },
        index=range(count),
    )
    zeros = torch.zeros(count, dtype=torch.float64)
    told = [one.astype(str) if one.dtype == object else one for one in arrays]
    digest = sha256(b"".join(one.tobytes() for one in told)).hexdigest()
    x = zeros[:, None][:, :0]
    return Site(name, frame, x, None, zeros, zeros + 1, rows=digest, local=local)


def tables_of(
    sites: Mapping[str, Site],
    parameters: Sequence[Parameter],
    policy: Policy | None,
) -> Tables:
    """Return sites with the shared parameters as terms."""
    columns = tuple(name for one in parameters for name in one.columns)
    ordered = [sites[name] for name in sorted(sites, key=natural)]
    models = apart([one.local for one in ordered])
    for batch in batches(models):
        at = models[batch[0]].begin[None]
        integral = Batch.of([models[k] for k in batch]).integral
        known = integral.values(at, integral.begin[:, None]).isfinite()[:, 0]
        for k, is_known, has_mode in zip(batch, known, integral.has_modes(at), strict=True):
            if not is_known:
                raise ValueError(
                    f"site {ordered[k].name!r} has no finite log density at the start of the "
                    "search, the middle of the prior: its rows contain NaN, or values that are "
                    "impossible there"
                )
            if not has_mode:
                raise ValueError(
                    "Newton's steps find no mode of the own parameters of site "
                    f"{ordered[k].name!r}: the density may be flat along one, as along values "
                    "that obs_mask= masks, grow without bound, as when an own scale goes to zero, "
                    "or have a kink; write a parameter with this scale as the scale times a "
                    "standard one, or take a smooth density"
                )
    found = tuple(replace(one, local=local) for one, local in zip(ordered, models, strict=True))
    return Tables(found, tuple(parameters), columns, None, np.arange(len(found)), policy=policy)


def check_some(rows: Mapping[str, Any], shared: Collection[str]) -> None:
    """Refuse a fit without sites or without shared parameters."""
    if not rows or not shared:
        raise ValueError("there must be a site and a shared parameter: fit other sites one by one")


def groups_of(parameters: Sequence[Parameter]) -> Tensor:
    """Return the possible group of each number [d] of own parameters: its place in the longest
    first dimension, or -1 if its parameter has another first dimension.
    """
    most = max([1, *(one.free[0] for one in parameters if one.free)])
    parts = [
        torch.arange(most).repeat_interleave(one.size // most)
        if one.free[:1] == (most,)
        else torch.full((one.size,), -1)
        for one in parameters
    ]
    return torch.cat([torch.zeros(0, dtype=torch.long), *parts])


def _parameters(ranges: Mapping[str, Range], rows: Any) -> tuple[Parameter, ...]:
    found = []
    for name, given in ranges.items():
        support, shape = given if isinstance(given, tuple) else (given, ())
        size: Any = shape(rows) if callable(shape) else shape
        found.append(Parameter.of(name, support, (size,) if isinstance(size, int) else size))
    return tuple(found)


def _one(found: Any) -> Any:
    if np.ndim(found):
        raise ValueError(
            f"log_density must return one number, as a sum over rows, not {found.shape}"
        )
    return found


def _flat(_: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _by_torch(
    log_density: LogDensity,
    rows: Any,
    shared: tuple[Parameter, ...],
    own: tuple[Parameter, ...],
) -> Local:
    """Return a site's model of a function of tensors."""
    given = Rows.of(rows)

    def density(phi: Tensor, z: Tensor, *tensors: Tensor) -> Tensor:
        (values, log_jacobian), (ours, _) = constrained(own, z), constrained(shared, phi)
        with InDouble(), Unasked() if tensors else nullcontext():
            return _one(log_density(ours, values, given.having(tensors))) + log_jacobian

    begin, middle = _zeros(shared), _zeros(own)
    density(begin, middle)  # without vmap, so that torch's distributions validate the rows
    parts = Parts.of(density, begin, middle, groups_of(own))
    integral = Integral(density, parts, middle[None], width=given.longest)
    return Local(integral, own, begin, _flat, given)


def _by_differences(
    log_density: LogDensity,
    rows: Any,
    shared: tuple[Parameter, ...],
    own: tuple[Parameter, ...],
) -> Local:
    """Return a site's model of a function of NumPy arrays."""
    begin, middle = _zeros(shared), _zeros(own)
    if len(middle) > MOST_OWN:
        raise ValueError(
            f"there are {len(middle)} own parameters, and derivatives by differences allow at most "
            f"{MOST_OWN}: write log_density in torch"
        )

    def density(phi: Tensor, z: Tensor) -> Tensor:
        values, log_jacobian = vmap(partial(constrained, own))(z)
        ours = vmap(partial(constrained, shared))(phi)[0]
        found = [_one(log_density(_at(ours, k), _at(values, k), rows)) for k in range(len(phi))]
        return torch.tensor(found, dtype=torch.float64) + log_jacobian

    density(begin[None], middle[None])
    return Local(Differences(density, Parts.whole(len(middle)), middle[None]), own, begin, _flat)


def _at(values: Tensors, k: int) -> dict[str, Any]:
    return {name: t.numpy()[k] for name, t in values.items()}


def _zeros(parameters: Sequence[Parameter]) -> Tensor:
    return torch.zeros(sum(one.size for one in parameters), dtype=torch.float64)


@declared
def densities(
    log_density: LogDensity,
    rows: Mapping[str, Any],
    *,
    shared: Mapping[str, Range],
    local: Mapping[str, Range] | None = None,
    derivatives: Literal["autograd", "differences"] = "autograd",
    policy: Policy | None = None,
) -> Tables:
    """Make the sites of a log density for `posterior`, and for a node's own app.

    Args:
        log_density: As of `posterior`.
        rows: {site: its rows}.
        shared: As of `posterior`.
        local: As of `posterior`.
        derivatives: As of `posterior`.
        policy: As in `tables`; its rules on numbers of rows, sites and draws apply. No rule bounds
            what a density reveals; the owner of the rows is responsible.

    Raises:
        ValueError: A range has no map from unconstrained numbers, or a name is in both `shared` and
            `local`.

    Example:
        >>> import torch
        >>> from torch.distributions import Normal, constraints
        >>> def log_density(shared, own, rows):
        ...     return Normal(shared["mu"], 1.0).log_prob(rows).sum()
        >>> rows = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0])}
        >>> sites = bf.stats.densities(log_density, rows, shared={"mu": constraints.real})
        >>> sites.names, sites.columns
        (('a', 'b'), ('mu',))
    """
    check_some(rows, shared)
    if both := sorted({*shared} & {*(local or {})}):
        raise ValueError(f"{both} are in shared= and in local=; leave them in one")
    parameters = _parameters(shared, None)
    sites = {}
    for name, one in rows.items():
        own = _parameters(local or {}, one)
        make = _by_torch if derivatives == "autograd" else _by_differences
        with noted(f"in log_density, of the rows of site {name!r}"):
            made = make(log_density, in_double(one), parameters, own)
        sites[name] = site_of(name, one, made)
    return tables_of(sites, parameters, policy)


@declared
def posterior(
    log_density: LogDensity,
    sites: Mapping[str, Any] | Sites,
    *,
    shared: Mapping[str, Range],
    local: Mapping[str, Range] | None = None,
    prior: Callable[[Tensors], Tensor] | None = None,
    derivatives: Literal["autograd", "differences"] = "autograd",
    draws: Count = 1000,
    exact: bool = False,
    seed: int = 0,
    aggregation: Adder | None = None,
) -> Posterior:
    """Fit any log density to the rows of all sites, and return its posterior. Each site integrates
    its own parameters out; sums determine the shared ones.

    Args:
        log_density: Function (shared, own, rows) to log p(rows, own | shared) in nats, in torch, of
            parameters by name and of a site's rows. Its control flow may not depend on values.
        sites: {site: its rows}, tensors, or tuples or mappings of these, whose numbers become
            float64; or sites on other machines, whose apps make them by `densities`.
        shared: {shared parameter: its range}, of `torch.distributions.constraints`, or
            (range, shape).
        local: {each site's own parameter: its range}; a shape may be a function of the rows.
        prior: Log density of the shared parameters by name, counted once; None for 1.
        derivatives: `autograd`, by torch; or `differences`, for a function of NumPy arrays with at
            most twenty own parameters of a site.
        draws: Number K of draws of the shared parameters; every site answers a number for each.
        exact: Whether Hamiltonian chains follow, a question for each step: a reference, for
            simulations.
        seed: Seed of the draws.
        aggregation: As in `glm`.

    Raises:
        ValueError: There is no maximum or more than one, the posterior does not fall along a scale,
            or k-hat stays above .7.

    Example:
        >>> import torch
        >>> import bayesfl as bf
        >>> from torch.distributions import HalfCauchy, Normal, constraints
        >>> def log_density(shared, own, rows):
        ...     y, sigma = rows
        ...     effect = Normal(shared["mu"], shared["tau"]).log_prob(own["theta"])
        ...     return effect + Normal(own["theta"], sigma).log_prob(y)
        >>> def prior(shared):
        ...     return Normal(0, 5).log_prob(shared["mu"]) + HalfCauchy(5).log_prob(shared["tau"])
        >>> y, sigma = (28, 8, -3, 7, -1, 1, 18, 12), (15, 10, 16, 11, 9, 11, 10, 18)
        >>> rows = {f"school {j}": torch.tensor(one) for j, one in enumerate(zip(y, sigma))}
        >>> shared = {"mu": constraints.real, "tau": constraints.positive}
        >>> local = {"theta": constraints.real}
        >>> fit = bf.stats.posterior(log_density, rows, shared=shared, local=local, prior=prior)
        >>> fit.table()["mean"].round(1).tolist()
        [4.4, 3.6]
    """
    if not isinstance(sites, Sites):
        sites = densities(log_density, sites, shared=shared, local=local, derivatives=derivatives)
    name = getattr(log_density, "__name__", "a log density")
    options = {"draws": draws, "exact": exact, "seed": seed, "aggregation": aggregation}
    return fitted(sites, prior, model=name, **options)
