"""Problems whose answer is known, and ways to believe something about it, for the truth test.

A *problem* draws a federation of clients and the truth about some quantities: *linear* and
*logistic*, each client's own four coefficients, which are beta + tau * normal noise, and beta;
*correlated*, the same with noise whose entries are correlated, of columns far from 0;
*shared*, the values of one linear model at new rows; *network*, those of one network of 21 weights;
*program, normal* and *program, logistic*, each client's own intercept, and all that the clients of
a hierarchy in Pyro share, where the truth is drawn of the program's own prior.
*schools* and *hospitals* are data whose truth nobody knows, with a reference posterior. A *way*
believes something about the quantities.

To add a way, add a line to `WAYS`: a function of a federation that returns a `Belief`, for how many
federations it is asked, and what it tries. The first way of a problem is its reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyro
import pyro.distributions
import torch
from bayesfl.predictors import LinearisedBelief, LinearisedLaplace, PooledLaplace
from scipy import stats
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.likelihoods import Bernoulli, Gaussian
from bayesfl.optim import IVON, SGD, Adam, cosine
from bayesfl.posteriors import (
    FullGaussian,
    Laplace,
    MeanField,
    Samples,
    ensemble,
    ivon,
    nuts,
    sghmc,
    sgld,
    swag,
)
from bayesfl.stats import hierarchy
from bayesfl.stats.families import Normal

dist: Any = pyro.distributions  # whose methods of distributions have no types
SIZES = (20, 30, 40, 50, 60, 80, 100, 120)
TAU = np.array([0.8, 0.5, 0.3, 0.6])
SPREAD = np.diag(TAU**2)
CORRELATED = 0.3 * SPREAD + 0.7 * np.outer(TAU, TAU)
"""Covariances of clients' coefficients: of independent ones, and at a correlation of .7."""
FAR = 2.0
"""Mean of the columns where effects are correlated, whose intercept is at 0."""
COLUMNS = ["a", "b", "c"]
NEW = 4
"""Number of new rows at which a shared model's values are judged."""
PROGRAM_ROWS = 20
"""Rows of each client of a program."""
WIDEST = {"schools": 1.0, "hospitals": 2.5}
"""Standard deviation of the half-normal prior of tau where tau is not known."""


@dataclass(frozen=True)
class Federation:
    """The rows of all clients, and the truth about them.

    Args:
        seed: Seed of all that is drawn.
        family: `gaussian`, whose noise is known to be 1, or `binomial`.
        x: Inputs of each client, [n_j, p].
        y: Outcomes, [n_j].
        truth: The quantities, [R, q]: a row for each client, then one for what they have in common
            where that is asked; None where nobody knows them.
        at: New rows at which a shared model is asked for its values, [NEW, p].
        quick: Whether ways take few rounds and draws, which shows that they run.
    """

    seed: int
    family: str
    x: list[np.ndarray]
    y: list[np.ndarray]
    truth: np.ndarray | None
    at: np.ndarray | None = None
    quick: bool = False

    @property
    def likelihood(self) -> Any:
        """Of the outcomes, with the scale of their noise."""
        return Gaussian() if self.family == "gaussian" else Bernoulli()

    @cached_property
    def clients(self) -> bf.data.FederatedData:
        """As methods take them, with the new rows, whose outcomes nobody reads, as test split."""
        kind = np.float32 if self.family == "gaussian" else np.int64
        xs, ys = [x.astype(np.float32) for x in self.x], [y.astype(kind) for y in self.y]
        if self.at is None:
            return bf.data.from_arrays(xs, ys, test_share=0.0)
        new = [self.at.astype(np.float32)] * len(xs), [np.zeros(len(self.at), np.float32)] * len(xs)
        return bf.data.from_arrays(xs, ys, test=new)

    @cached_property
    def sites(self) -> bf.stats.Tables:
        """As regressions take them."""
        frames = {
            f"site {j}": pd.DataFrame(x, columns=COLUMNS[: x.shape[1]]).assign(y=y)
            for j, (x, y) in enumerate(zip(self.x, self.y, strict=True))
        }
        return bf.stats.tables(frames, outcome="y", terms=COLUMNS[: self.x[0].shape[1]])

    def rows(self) -> tuple[Tensor, Tensor]:
        """All rows in one place, in float64, which no federated method sees."""
        x, y = np.concatenate(self.x), np.concatenate(self.y)
        return torch.from_numpy(x).double(), torch.from_numpy(y).double()

    def few(self, count: int) -> int:
        """Take fewer of something, if it shall be quick."""
        return max(2, count // 25) if self.quick else count


def draw_inputs(seed: int) -> tuple[np.random.Generator, list[np.ndarray]]:
    """Draw correlated inputs [n_j, 3] of clients of different sizes; return the generator, too."""
    rng = generator(seed, Purpose.PARTITION)
    mixing = rng.normal(size=(3, 3))
    root = np.linalg.cholesky(mixing @ mixing.T / 3 + 0.5 * np.eye(3))
    return rng, [rng.normal(size=(n, 3)) @ root.T for n in SIZES]


def draw_hierarchy(
    family: str, seed: int, *, spread: np.ndarray = SPREAD, mean: float = 0.0
) -> Federation:
    """Draw clients whose own coefficients are normal around the federation's."""
    rng, x = draw_inputs(seed)
    x = [rows + mean for rows in x]
    beta = rng.normal(size=4)
    own = beta + rng.normal(size=(len(SIZES), 4)) @ np.linalg.cholesky(spread).T
    y = []
    for rows, w in zip(x, own, strict=True):
        eta = w[0] + rows @ w[1:]
        normal = eta + rng.normal(size=len(rows))
        binary = rng.random(len(rows)) < 1 / (1 + np.exp(-eta))
        y.append(normal if family == "gaussian" else binary.astype(float))
    return Federation(seed, family, x, y, np.vstack([own, beta]))


def draw_shared(seed: int) -> Federation:
    """Draw clients with one linear model; the quantities are its values at new rows."""
    rng, x = draw_inputs(seed)
    w, at = rng.normal(size=4), rng.normal(size=(NEW, 3))
    y = [w[0] + rows @ w[1:] + rng.normal(size=len(rows)) for rows in x]
    truth = np.tile(w[0] + at @ w[1:], (len(x), 1))
    return Federation(seed, "gaussian", x, y, truth, at)


def draw_network(seed: int) -> Federation:
    """Draw clients with one network, whose weights are of the prior that the ways assume."""
    rng = generator(seed, Purpose.PARTITION)
    x = [rng.normal(size=(n, 2)) for n in SIZES]
    at = rng.normal(size=(NEW, 2))
    net = network(seed).double()
    weights = sum(p.numel() for p in net.parameters())
    set_weights(net, torch.from_numpy(rng.normal(size=weights)))
    with torch.no_grad():
        y = [net(torch.from_numpy(rows))[:, 0].numpy() for rows in x]
        truth = np.tile(net(torch.from_numpy(at))[:, 0].numpy(), (len(x), 1))
    y = [values + rng.normal(size=len(values)) for values in y]
    return Federation(seed, "gaussian", x, y, truth, at)


def draw_program(family: str, seed: int) -> Federation:
    """Draw clients of a hierarchy that is a Pyro program, see `hierarchy_program`: the quantities
    are each client's own intercept, and (mu, tau, slope, noise), the last of normal outcomes.
    """
    rng = generator(seed, Purpose.PARTITION)
    (mu, slope), (tau, noise) = rng.normal(size=2), np.abs(rng.normal(size=2))
    own = mu + tau * rng.normal(size=len(SIZES))
    x = rng.normal(size=(len(SIZES), PROGRAM_ROWS, 1))
    eta = own[:, None] + slope * x[..., 0]
    if family == "gaussian":
        y, shared = eta + noise * rng.normal(size=eta.shape), [mu, tau, slope, noise]
    else:
        y, shared = (rng.random(eta.shape) < 1 / (1 + np.exp(-eta))).astype(float), [mu, tau, slope]
    return Federation(seed, family, [*x], [*y], np.vstack([beside(own, len(shared)), shared]))


def beside(own: np.ndarray, width: int) -> np.ndarray:
    """Return one quantity a client [..., J] in the first of some columns, [..., J, width]."""
    return np.concatenate([own[..., None], np.full((*own.shape, width - 1), np.nan)], axis=-1)


def eight_schools(seed: int) -> Federation:
    """Return the effects of coaching in eight schools, in tens of points, each by its error: so the
    noise is 1, and a school's effect is the coefficient of the only column.

    Rubin, "Estimation in parallel randomized experiments", J. Educational Statistics 6(4), 1981.
    """
    effects = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]) / 10
    errors = np.array([15.0, 10, 16, 11, 9, 11, 10, 18]) / 10
    x = [np.array([[1 / s]]) for s in errors]
    return Federation(seed, "gaussian", x, [np.array([y]) for y in effects / errors], None)


def hospitals(seed: int) -> Federation:
    """Return the patients of four hospitals: whether a heart is ill, by age, greatest heart rate
    and depression of the ST segment, standardised over all.
    """
    source = bf.data.load("heart")
    x = source.x[:, [0, 5, 7]].double().numpy()
    x, y, owners = (x - x.mean(0)) / x.std(0), source.y.double().numpy(), source.owners.numpy()
    places = range(len(source.owner_names))
    rows = [x[owners == j] for j in places], [y[owners == j] for j in places]
    return Federation(seed, "binomial", *rows, None)


PROBLEMS: dict[str, Callable[[int], Federation]] = {
    "linear": partial(draw_hierarchy, "gaussian"),
    "logistic": partial(draw_hierarchy, "binomial"),
    "correlated": partial(draw_hierarchy, "gaussian", spread=CORRELATED, mean=FAR),
    "shared": draw_shared,
    "network": draw_network,
    "program, normal": partial(draw_program, "gaussian"),
    "program, logistic": partial(draw_program, "binomial"),
    "schools": eight_schools,
    "hospitals": hospitals,
}


@dataclass(frozen=True)
class Belief:
    """What a way believes of the quantities, one by one; rows without a belief are NaN.

    Args:
        mean: Means, [R, q].
        sd: Standard deviations, [R, q]; NaN of a method that tells none.
        draws: Draws, [S, R, q]; None for normal beliefs.
        rounds: Rounds of training, or questions, that it took.
        bytes: Bytes that a client sent in all.
    """

    mean: np.ndarray
    sd: np.ndarray
    draws: np.ndarray | None = None
    rounds: int = 0
    bytes: float = 0.0

    @classmethod
    def drawn(cls, draws: Any, **sent: Any) -> "Belief":
        """Make a belief of draws [S, R, q]."""
        found = np.asarray(draws)
        return cls(found.mean(0), found.std(0, ddof=1), found, **sent)

    def below(self, truth: np.ndarray) -> np.ndarray:
        """Return the probability of values below the truth, [R, q]; NaN where there is none."""
        if self.draws is not None:
            return np.where(np.isnan(self.sd), np.nan, (self.draws < truth).mean(0))
        with np.errstate(divide="ignore"):
            return stats.norm.cdf((truth - self.mean) / self.sd)


def network(seed: int) -> nn.Module:
    """A network of 21 weights, smooth as samplers like it."""
    made = bf.models.mlp(2, hidden=5, outputs=1, seed=seed)
    made.body[1] = nn.Tanh()
    return made


def linear(fed: Federation) -> nn.Module:
    """A linear model that is all head."""
    return bf.models.mlp(fed.x[0].shape[1], hidden=(), outputs=1)


def with_body(fed: Federation) -> nn.Module:
    """A linear model that is all body, before a head that passes it on."""
    head = nn.Linear(1, 1)
    set_weights(head, torch.tensor([1.0, 0.0]))
    return bf.models.SplitModel(bf.models.mlp(3, hidden=(), outputs=1).head, head)


def with_idle_body(fed: Federation) -> nn.Module:
    """A linear model that is all head, after a body that passes the inputs on."""
    body = nn.Linear(3, 3, bias=False)
    nn.init.eye_(body.weight)
    return bf.models.SplitModel(body, linear(fed))


def slope(fed: Federation) -> nn.Module:
    """A coefficient alone."""
    return bf.models.SplitModel(nn.Identity(), nn.Linear(1, 1, bias=False))


def set_weights(module: nn.Module, flat: Tensor) -> None:
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(flat, module.parameters())


def intercept_first(flat: Any) -> np.ndarray:
    """Order a linear layer's weights [..., p + 1] as coefficients."""
    return np.roll(np.asarray(flat, dtype=float), 1, -1)


def padded(values: Any) -> np.ndarray:
    """Return the clients' rows [J, q], and one of NaN for what they have in common."""
    values = np.asarray(values)
    return np.vstack([values, np.full((1, values.shape[1]), np.nan)])


def exact_hierarchy(fed: Federation, *, spread: np.ndarray = SPREAD) -> Belief:
    """The posterior of normal outcomes under the law that made them, in closed form."""
    j = len(fed.x)
    own = np.diag([1.0] * j + [0.0])
    prior = np.kron(np.ones((j + 1, j + 1)), np.eye(4)) + np.kron(own, spread)
    precision, moment = np.linalg.inv(prior), np.zeros(4 * (j + 1))
    for place, (rows, y) in enumerate(zip(fed.x, fed.y, strict=True)):
        x, part = np.column_stack([np.ones(len(rows)), rows]), slice(4 * place, 4 * place + 4)
        precision[part, part] += x.T @ x
        moment[part] = x.T @ y
    covariance = np.linalg.inv(precision)
    mean, sd = covariance @ moment, np.sqrt(covariance.diagonal())
    return Belief(mean.reshape(-1, 4), sd.reshape(-1, 4))


def exact_shared(fed: Federation) -> Belief:
    """The posterior of the shared linear model, of all rows, in closed form."""
    x, y = (t.numpy() for t in fed.rows())
    x, at = (np.column_stack([np.ones(len(rows)), rows]) for rows in (x, fed.at))
    covariance = np.linalg.inv(x.T @ x + np.eye(x.shape[1]))
    mean = at @ covariance @ x.T @ y
    sd = np.sqrt(np.einsum("np,pq,nq->n", at, covariance, at))
    return Belief(*(np.tile(t, (len(fed.x), 1)) for t in (mean, sd)))


def halved(exact: Callable[[Federation], Belief], fed: Federation) -> Belief:
    """The same with half the variances, which the test must find out."""
    found = exact(fed)
    return replace(found, sd=found.sd / math.sqrt(2))


class Hierarchy(nn.Module):
    """Clients' coefficients beta + tau * u as one module, of rows [p] with the client's number
    behind them, so that a sampler of networks can draw from its posterior.

    Args:
        clients: Number of clients.
        tau: The standard deviations [q], where they are known.
        widest: Where they are not, the standard deviation of their half-normal prior: tau is
            widest * |z| with a standard normal z. Signs of z and u cancel.
    """

    def __init__(self, clients: int, q: int, tau: Any = None, widest: float = 1.0) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(q))
        self.z = None if tau is not None else nn.Parameter(0.3 * torch.ones(q))
        self.u = nn.Parameter(torch.zeros(clients, q))
        self.known, self.widest = tau, widest

    def own(self, beta: Tensor, u: Tensor, z: Tensor | None) -> Tensor:
        """Compute the clients' coefficients [..., J, q]."""
        tau = torch.as_tensor(self.known).to(beta) if z is None else self.widest * z
        return beta.unsqueeze(-2) + tau.unsqueeze(-2) * u

    def forward(self, x: Tensor) -> Tensor:
        """Compute linear predictors [n, 1]."""
        own = self.own(self.beta, self.u, self.z)
        return (x[:, :-1] * own[x[:, -1].long()]).sum(-1, keepdim=True)


def by_nuts(
    fed: Federation,
    *,
    tau: np.ndarray | None = None,
    widest: float = 1.0,
    intercept: bool = True,
    chains: int = 1,
) -> Belief:
    """The hierarchy's posterior by the No-U-Turn sampler; beta has a flat prior where tau is not
    known.
    """
    rows = [
        np.column_stack([*[np.ones(len(x))] * intercept, x, np.full(len(x), j)])
        for j, x in enumerate(fed.x)
    ]
    x, (_, y) = torch.from_numpy(np.concatenate(rows)), fed.rows()
    q = x.shape[1] - 1
    module = Hierarchy(len(fed.x), q, tau, widest)
    precision = torch.ones(sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    if tau is None:
        precision[:q] = 1e-4
    found = nuts(
        module,
        x,
        y,
        likelihood=fed.likelihood,
        precision=precision,
        draws=fed.few(1000),
        warmup=fed.few(400),
        chains=chains,
        seed=fed.seed,
        full_mass=True,
        target_accept=0.9,
    )
    leaves = found.layout.leaves(found.draws.flatten(0, 1))
    own = module.own(leaves["beta"], leaves["u"], leaves.get("z"))
    return Belief.drawn(torch.cat([own, leaves["beta"].unsqueeze(-2)], -2))


def by_quadrature(fed: Federation) -> Belief:
    """The posterior of the eight schools by a grid over tau, of which all else is normal."""
    s, y = (np.array([float(t.squeeze()) for t in ts]) for ts in (fed.x, fed.y))
    s = 1 / s
    y = y * s
    tau = np.linspace(1e-4, 6 * WIDEST["schools"], 4000)[:, None]
    wide = s**2 + tau**2
    spread = 1 / (1 / wide).sum(1)  # of beta, under its flat prior
    beta = spread * (y / wide).sum(1)
    logs = 0.5 * np.log(spread) - 0.5 * ((y - beta[:, None]) ** 2 / wide + np.log(wide)).sum(1)
    logs -= 0.5 * (tau[:, 0] / WIDEST["schools"]) ** 2
    mass = np.exp(logs - logs.max())
    mass /= mass.sum()
    shrink = s**2 / wide
    mean = np.column_stack([shrink * beta[:, None] + (1 - shrink) * y, beta])
    variance = np.column_stack([shrink * tau**2 + shrink**2 * spread[:, None], spread])
    return moments_of_grid(mass, mean, variance)


def moments_of_grid(mass: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> Belief:
    """Return the belief that mixes normal ones [K, R] by their masses [K]."""
    first = mass @ mean
    sd = np.sqrt(mass @ (variance + (mean - first) ** 2))
    return Belief(first[:, None], sd[:, None])


def by_hierarchy(fed: Federation) -> Belief:
    """The same by the formulas of `bf.stats.mixed`, at a grid over beta and log tau."""
    x, y = (torch.tensor(np.array(t)).reshape(len(fed.x), 1, -1) for t in (fed.x, fed.y))
    rows = hierarchy.Groups(x, x, y[..., 0], torch.ones(len(y), 1).double(), 0 * y[..., 0])
    beta, log_tau = torch.linspace(-2, 4, 121).double(), torch.linspace(-7, 1.8, 121).double()
    grid = torch.cartesian_prod(beta, log_tau)
    tau = grid[:, 1].exp()[:, None]
    at = hierarchy.Phi(grid[:, :1], tau[..., None], torch.zeros(1, len(grid), 1, 1).double())
    logs = hierarchy.log_marginals(Normal(), rows, at).sum(-1)
    logs = logs + grid[:, 1] - (tau[:, 0] / WIDEST["schools"]) ** 2 / 2
    u, hessian = hierarchy.modes(Normal(), rows, at)
    mean = torch.cat([at.beta + tau * u[..., 0], at.beta], 1)
    variance = torch.cat([tau**2 / hessian[..., 0, 0], 0 * at.beta], 1)
    return moments_of_grid(logs.softmax(0).numpy(), mean.numpy(), variance.numpy())


def network_by_nuts(fed: Federation) -> Belief:
    """The values of the network under its posterior of all rows, by the No-U-Turn sampler."""
    x, y = fed.rows()
    draws = {"draws": fed.few(250), "warmup": fed.few(250), "chains": 1, "seed": fed.seed}
    found = nuts(network(fed.seed), x, y, likelihood=fed.likelihood, precision=1.0, **draws)
    return everywhere(fed, found)


def shared_by_nuts(fed: Federation) -> Belief:
    x, y = fed.rows()
    draws = {"draws": fed.few(500), "warmup": fed.few(200), "chains": 1, "seed": fed.seed}
    found = nuts(
        linear(fed), x, y, likelihood=fed.likelihood, precision=1.0, full_mass=True, **draws
    )
    return everywhere(fed, found)


def everywhere(fed: Federation, found: Any) -> Belief:
    """The values at the new rows, the same for every client, by draws of the weights."""
    values = found.outputs(torch.from_numpy(fed.at))[..., 0].numpy()
    return Belief.drawn(np.repeat(values[:, None], len(fed.x), 1))


def own_fit(fed: Federation) -> Belief:
    """Regressions of each site's own rows; NaN where there is none, as the outcome is separated."""
    mean, sd = np.full((2, len(fed.x), 4), np.nan)
    for j, name in enumerate(fed.sites.names):
        try:
            fit = bf.stats.glm(fed.sites.only([name]), family=fed.family)
        except ValueError:
            continue
        mean[j], sd[j] = fit.estimate.numpy(), fit.covariance.diagonal().sqrt().numpy()
    return Belief(padded(mean), padded(sd))


def common_fit(fed: Federation) -> Belief:
    """One regression of all sites' rows by sums."""
    fit = bf.stats.glm(fed.sites, family=fed.family)
    at = torch.from_numpy(np.column_stack([np.ones(NEW), fed.at]))
    mean = (at @ fit.estimate).numpy()
    sd = torch.einsum("np,pq,nq->n", at, fit.covariance, at).sqrt().numpy()
    tiled = (np.tile(t, (len(fed.x), 1)) for t in (mean, sd))
    return Belief(
        *tiled, rounds=len(fit.released.questions), bytes=max(fit.released.bytes.values())
    )


def mixed_fit(fed: Federation, **options: Any) -> Belief:
    """`bf.stats.mixed`, which knows neither the law of effects nor the scale of the noise."""
    effects = ["1", *fed.sites.columns]
    fit = bf.stats.mixed(fed.sites, family=fed.family, random=effects, seed=fed.seed, **options)
    own = torch.stack([fit.own[name][:, 0] for name in fed.sites.names], 1)
    sent = {"rounds": len(fit.released.questions), "bytes": max(fit.released.bytes.values())}
    if fed.at is None:
        return Belief.drawn(torch.cat([own, fit.shared.unsqueeze(1)], 1), **sent)
    at = torch.from_numpy(np.column_stack([np.ones(NEW), fed.at]))
    return Belief.drawn(own @ at.T, **sent)


def hierarchy_program(x: Tensor, y: Tensor, *, family: str) -> None:
    """A regression with an intercept of each site, in Pyro."""
    mu, slope = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("mu", "slope"))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    own = pyro.sample("own", dist.Normal(mu, tau))
    noise = pyro.sample("noise", dist.HalfNormal(1.0)) if family == "gaussian" else None
    eta = own + slope * x
    law = dist.Bernoulli(logits=eta) if noise is None else dist.Normal(eta, noise)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", law, obs=y)


def by_program(fed: Federation) -> Belief:
    """`bf.pyro.fit`, whose program has the prior that drew the truth."""
    rows = {
        f"site {j}": {"x": torch.from_numpy(x[:, 0]), "y": torch.from_numpy(y)}
        for j, (x, y) in enumerate(zip(fed.x, fed.y, strict=True))
    }
    names = ["mu", "tau", "slope", *["noise"] * (fed.family == "gaussian")]
    program = partial(hierarchy_program, family=fed.family)
    fit = bf.pyro.fit(program, rows, shared=names, draws=fed.few(1000), seed=fed.seed)
    own = np.stack([fit.local(site)["own"].numpy() for site in rows], 1)
    shared = np.stack([fit.draws[name].numpy() for name in names], 1)
    drawn = np.concatenate([beside(own, len(names)), shared[:, None]], 1)
    sent = {"rounds": len(fit.released.questions), "bytes": max(fit.released.bytes.values())}
    return Belief.drawn(drawn, **sent)


def own_laplace(fed: Federation) -> Belief:
    """Laplace's approximation of each client's own rows, under the true law of its coefficients."""
    precision = torch.from_numpy(np.roll(1 / (1 + TAU**2), -1))
    mean, sd = [], []
    for x, y in zip(fed.x, fed.y, strict=True):
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        module = at_mode(linear(fed).double(), fed.likelihood, x, y, precision)
        options = {"precision": precision, "likelihood": fed.likelihood}
        loc, variance = Laplace.fit(module, x, **options).moments()
        mean.append(intercept_first(loc))
        sd.append(intercept_first(variance.sqrt()))
    return Belief(padded(mean), padded(sd))


def own_draws(fit: Callable[..., Any], lengths: dict[str, int], fed: Federation) -> Belief:
    """Another posterior of each client's own rows, under the true law of its coefficients."""
    spent = {name: fed.few(count) for name, count in lengths.items()}
    precision = torch.from_numpy(np.roll(1 / (1 + TAU**2), -1))
    mean, sd = [], []
    for x, y in zip(fed.x, fed.y, strict=True):
        options = {"precision": precision, "likelihood": fed.likelihood, "seed": fed.seed}
        rows = torch.from_numpy(x), torch.from_numpy(y)
        found = fit(linear(fed).double(), *rows, **options, **spent)
        samples = found if isinstance(found, Samples) else found.sample(1000)
        draws = samples.draws.flatten(0, 1)
        mean.append(intercept_first(draws.mean(0)))
        sd.append(intercept_first(draws.std(0)))
    return Belief(padded(mean), padded(sd))


def at_mode(module: nn.Module, likelihood: Any, x: Tensor, y: Tensor, precision: Tensor) -> Any:
    """Train a small module to the mode of its posterior."""
    parameters = list(module.parameters())
    search = torch.optim.LBFGS(
        parameters, max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        w = torch.nn.utils.parameters_to_vector(parameters)
        total = likelihood.nll(module(x), y).sum() + 0.5 * (precision * w.square()).sum()
        total.backward()
        return total

    search.step(loss)
    return module


def trained(
    make: Callable[..., Any],
    read: Callable[[Federation, Any], Belief],
    *,
    model: Callable[[Federation], nn.Module] = linear,
    rounds: int = 50,
) -> Callable[[Federation], Belief]:
    """Return the way that trains a method and reads its belief."""

    def believe(fed: Federation) -> Belief:
        method = make(model(fed), likelihood=fed.likelihood)
        given = {"seed": fed.seed, "rounds": fed.few(rounds), "evaluate_every": None}
        result = bf.simulate(method, fed.clients, progress=False, **given)
        sent = float(result.history["bytes_up"].sum()) / len(fed.x)
        return replace(read(fed, result), rounds=result.round, bytes=sent)

    return believe


def heads(fed: Federation, result: Any) -> Belief:
    """The clients' beliefs about their own heads, as the method holds them."""
    posterior = result.algorithm.blocks["head"].posterior
    loc, variance = posterior.moments(result.private["head"])
    mean, sd = (intercept_first(t) for t in (loc, variance.sqrt()))
    return Belief(padded(mean), padded(sd))


def chains_of_heads(fed: Federation, result: Any) -> Belief:
    """The mean and the spread of the chains of every client's head."""
    draws = intercept_first(result.private["head"]["loc"])
    return Belief(padded(draws.mean(-2)), padded(draws.std(-2, ddof=1)))


def beliefs_of_q(fed: Federation, result: Any) -> Belief:
    """The clients' beliefs about all their weights, as the method holds them."""
    loc, variance = result.algorithm.blocks["q"].posterior.moments(result.private["q"])
    mean, sd = (intercept_first(t) for t in (loc, variance.sqrt()))
    return Belief(padded(mean), padded(sd))


def points(fed: Federation, result: Any) -> Belief:
    """The clients' own weights, without a belief about them."""
    names = [name for name in ("head", "v", "theta", "w") if name in result.private]
    mean = intercept_first(result.private[names[0]]["loc"])
    return Belief(padded(mean), padded(np.nan * mean))


def laplace_of_heads(fed: Federation, result: Any) -> Belief:
    """Laplace's approximation at each client's own head, under the method's tie to the centre."""
    mean, sd = [], []
    for flat, x in zip(result.private["head"]["loc"], fed.x, strict=True):
        module = linear(fed).double()
        set_weights(module, flat.double())
        options = {"precision": 1.0, "likelihood": fed.likelihood}
        loc, variance = Laplace.fit(module, torch.from_numpy(x), **options).moments()
        mean.append(intercept_first(loc))
        sd.append(intercept_first(variance.sqrt()))
    return Belief(padded(mean), padded(sd))


def own_heads(fed: Federation, result: Any) -> Belief:
    """Heads of clients' own, whose centre and tau are estimates."""
    made, mean, sd = result.heads(), [], []
    for j in range(len(fed.x)):
        loc, variance = FullGaussian().moments(made.client(j).view["own_head"])
        mean.append(intercept_first(loc.double()))
        sd.append(intercept_first(variance.sqrt().double()))
    return Belief(padded(mean), padded(sd))


def predictions(fed: Federation, result: Any) -> Belief:
    """What every client's own predictions say of the values at the new rows, without noise."""
    found = result.predict(fed.clients.test)
    return Belief(
        found.mean[..., 0].double().numpy(), found.epistemic.double().clamp_min(0).sqrt().numpy()
    )


def chains_at_rows(fed: Federation, result: Any) -> Belief:
    """The mean and the spread of the values at the new rows by the server's chains."""
    made, at = result.algorithm, torch.from_numpy(fed.at).float()
    chains = result.server["w"]["loc"]
    values = [made.outputs(made.layout("w").leaves(w), at)[:, 0].double() for w in chains]
    draws = torch.stack(values)
    return Belief(*(np.tile(t, (len(fed.x), 1)) for t in (draws.mean(0), draws.std(0))))


def laplace_of_rows(structure: str, fed: Federation, result: Any) -> Belief:
    """Laplace's approximation at the server's network, of all rows in one place."""
    x, _ = fed.rows()
    options = {"precision": 1.0, "likelihood": fed.likelihood, "structure": structure}
    fit = Laplace.fit(result.model().double(), x, **options)
    mean, covariance = fit.linearised(torch.from_numpy(fed.at))
    tiled = (np.tile(t[:, 0], (len(fed.x), 1)) for t in (mean, covariance[..., 0].sqrt()))
    return Belief(*tiled)


def predicting(make: Callable[..., Any], predictor: Any) -> Callable[..., Any]:
    """Return a method that predicts by something else."""
    return lambda model, **given: replace(make(model, **given), predictor=predictor)


METHODS = bf.algorithms
KNOWN = LinearisedLaplace(precision=1.0)
"""The prior of the shared models has precision 1, and all ways are told so."""
FEDSI_NET: dict[str, Any] = {"prior_precision": 1.0, "predictive_precision": 1.0}
FEDSI: dict[str, Any] = {
    **FEDSI_NET,
    # The head passes a linear model on, and stays as it is.
    "finetune_optimiser": SGD(1e-12),
    "finetune_steps": 1,
}
FASTER = SGD(1e-2, momentum=0.9)


def mode(model: nn.Module, **given: Any) -> bf.Algorithm:
    """Return FedAvg by steps on all rows, whose objective has the prior in it: it goes to the
    posterior's mode, around which Laplace's approximation is made.
    """
    decayed = SGD(1.0, weight_decay=1 / sum(SIZES))
    one_step = METHODS.fedavg(model, epochs=1, batch_size=None, optimiser=decayed, **given)
    return bf.with_server_optimiser(one_step, SGD(0.1, momentum=0.9))


LOCAL = partial(METHODS.local, epochs=5, optimiser=SGD(0.05, momentum=0.9))
PVI = partial(METHODS.pvi, optimiser=Adam(cosine(0.02)), draws=4, epochs=20)
FEDEP = partial(METHODS.fedep, optimiser=SGD(cosine(0.1), momentum=0.9), epochs=20)
FOLA = partial(METHODS.fola, optimiser=SGD(cosine(0.1), momentum=0.9), epochs=20)
FEDIVON = partial(METHODS.fedivon, optimiser=IVON(cosine(0.1)), draws=4, steps=40)
FEDPOP = partial(METHODS.fedpop, chains=20, burn_in=20, kept=1, body_optimiser=SGD(1e-12))
QLSD = partial(METHODS.qlsd, chains=50, step=2e-4, levels=127)
BPFED = partial(METHODS.bpfed, optimiser=Adam(1e-2))


class Way(NamedTuple):
    """A way to a belief.

    Args:
        believe: Function of a federation that returns the belief.
        federations: For how many federations it is asked; fewer where it takes long.
        tries: Names in the library of the methods, predictors and posteriors that it tries.
    """

    believe: Callable[[Federation], Belief]
    federations: int
    tries: tuple[str, ...] = ()


# Of the clients' own coefficients, under either family.
OWN: dict[str, Way] = {
    "bf.stats.mixed": Way(mixed_fit, 200, ("mixed",)),
    "own rows, bf.stats.glm": Way(own_fit, 200, ("glm",)),
    "own rows, Laplace": Way(own_laplace, 200, ("Laplace",)),
    **{
        f"own rows, {name}": Way(partial(own_draws, fit, lengths), 20, (name,))
        for name, fit, lengths in (
            ("MeanField", MeanField.fit, {"steps": 2000}),
            ("FullGaussian", FullGaussian.fit, {"steps": 2000}),
            ("ivon", ivon, {"steps": 2000}),
            ("sgld", sgld, {"draws": 1000, "warmup": 2000}),
            ("sghmc", sghmc, {"draws": 1000, "warmup": 2000}),
            ("ensemble", ensemble, {"steps": 1000}),
            ("swag", swag, {"draws": 1000, "averages": 200, "batch_size": 10}),
        )
    },
    "pfedvem": Way(trained(METHODS.pfedvem, heads), 60, ("pfedvem", "MeanField")),
    "pfedvem, 200 rounds": Way(trained(METHODS.pfedvem, heads, rounds=200), 30, ("pfedvem",)),
    "pfedvem_held": Way(trained(METHODS.pfedvem_held, heads), 60, ("pfedvem_held",)),
    "pfedvem_held, widths learned": Way(
        trained(partial(METHODS.pfedvem_held, scale_rate=1.0), heads), 60, ("pfedvem_held",)
    ),
    "pfedbayes, zeta 1": Way(
        trained(partial(METHODS.pfedbayes, zeta=1.0, optimiser=Adam(1e-2)), beliefs_of_q),
        60,
        ("pfedbayes",),
    ),
    "fedpop": Way(trained(FEDPOP, chains_of_heads, model=with_idle_body), 60, ("fedpop",)),
    "pfedmap, Laplace of heads": Way(trained(METHODS.pfedmap, laplace_of_heads), 60, ("Laplace",)),
    "fedavg, heads": Way(trained(METHODS.fedavg, own_heads), 60, ("heads",)),
    "ditto, points": Way(trained(METHODS.ditto, points), 30),
    "local, points": Way(trained(LOCAL, points), 30),
}


def of_one_model(model: Callable[[Federation], nn.Module], count: int) -> dict[str, Way]:
    """Return the ways to the values of a model that all clients share."""
    one = partial(trained, model=model)
    at_mode, at_product = partial(one, rounds=300), partial(one, rounds=100)
    return {
        **{
            f"fedavg, {name} of all rows": Way(
                at_mode(mode, partial(laplace_of_rows, structure)), count, ("Laplace",)
            )
            for name, structure in (("Laplace", "full"), ("kfac", "kfac"), ("diagonal", "diagonal"))
        },
        "fedavg, LinearisedLaplace": Way(
            at_mode(predicting(mode, KNOWN), predictions), count, ("LinearisedLaplace",)
        ),
        "fedavg, PooledLaplace": Way(
            at_mode(predicting(mode, PooledLaplace("full", precision=1.0)), predictions),
            count,
            ("PooledLaplace",),
        ),
        "local, LinearisedLaplace": Way(
            one(predicting(LOCAL, KNOWN), predictions), count, ("LinearisedLaplace",)
        ),
        "pfedvem, LinearisedBelief": Way(
            one(predicting(METHODS.pfedvem, LinearisedBelief()), predictions),
            count,
            ("pfedvem", "LinearisedBelief"),
        ),
        "pvi": Way(at_product(predicting(PVI, LinearisedBelief()), predictions), count, ("pvi",)),
        "fedep": Way(
            at_product(predicting(FEDEP, LinearisedBelief()), predictions), count, ("fedep",)
        ),
        "fedivon": Way(
            at_product(predicting(FEDIVON, LinearisedBelief()), predictions), count, ("fedivon",)
        ),
        "qlsd": Way(at_mode(QLSD, chains_at_rows), count, ("qlsd",)),
        "fola": Way(
            at_product(predicting(FOLA, LinearisedBelief()), predictions), count, ("fola",)
        ),
    }


def of_fedsi(model: Callable[[Federation], nn.Module], given: Any, count: int) -> dict[str, Way]:
    """Return FedSI's ways, whose subnetworks have half of the body's weights."""
    one = partial(trained, read=predictions, model=model)
    half = partial(METHODS.fedsi, share=0.5, **given)
    return {
        "fedsi, half the weights": Way(one(half), count, ("fedsi",)),
        "fedsi_fac": Way(one(partial(METHODS.fedsi_fac, **given)), count, ("fedsi_fac",)),
        "fedsi_full": Way(one(partial(METHODS.fedsi_full, **given)), count, ("fedsi_full",)),
    }


def a_network(fed: Federation) -> nn.Module:
    return network(fed.seed)


ON_SCHOOLS = {
    "pfedvem": Way(trained(partial(METHODS.pfedvem, head_optimiser=FASTER), heads, model=slope), 1),
    "pfedvem_held": Way(
        trained(partial(METHODS.pfedvem_held, head_optimiser=FASTER), heads, model=slope), 1
    ),
}
WAYS: dict[str, dict[str, Way]] = {
    "linear": {
        "exact posterior": Way(exact_hierarchy, 200),
        "half the variances": Way(partial(halved, exact_hierarchy), 200),
        "nuts, all rows": Way(partial(by_nuts, tau=TAU), 20, ("nuts",)),
        **OWN,
    },
    "logistic": {"nuts, all rows": Way(partial(by_nuts, tau=TAU), 40, ("nuts",)), **OWN},
    "correlated": {
        "exact posterior": Way(partial(exact_hierarchy, spread=CORRELATED), 200),
        "bf.stats.mixed": OWN["bf.stats.mixed"],
        "bf.stats.mixed, diagonal": Way(partial(mixed_fit, covariance="diagonal"), 60, ("mixed",)),
    },
    "shared": {
        "exact posterior": Way(exact_shared, 200),
        "nuts, all rows": Way(shared_by_nuts, 30, ("nuts",)),
        "bf.stats.glm": Way(common_fit, 200, ("glm",)),
        "bf.stats.mixed": Way(mixed_fit, 60, ("mixed",)),
        **of_one_model(linear, 60),
        **of_fedsi(with_body, FEDSI, 60),
    },
    "network": {
        "nuts, all rows": Way(network_by_nuts, 20, ("nuts",)),
        **of_one_model(a_network, 60),
        "qlsd, 1,500 rounds": Way(
            trained(QLSD, chains_at_rows, model=a_network, rounds=1500), 20, ("qlsd",)
        ),
        "bpfed": Way(
            trained(predicting(BPFED, LinearisedBelief()), predictions, model=a_network),
            60,
            ("bpfed",),
        ),
        **of_fedsi(a_network, FEDSI_NET, 20),
    },
    **{
        f"program, {family}": {"bf.pyro.fit": Way(by_program, 400, ("fit",))}
        for family in ("normal", "logistic")
    },
    "schools": {
        "quadrature": Way(by_quadrature, 1),
        "formulas of bf.stats.mixed": Way(by_hierarchy, 1, ("mixed",)),
        "nuts": Way(partial(by_nuts, widest=WIDEST["schools"], intercept=False, chains=2), 1),
        **ON_SCHOOLS,
    },
    "hospitals": {
        "nuts": Way(partial(by_nuts, widest=WIDEST["hospitals"], chains=2), 1, ("nuts",)),
        "bf.stats.mixed": OWN["bf.stats.mixed"]._replace(federations=1),
        "pfedvem": OWN["pfedvem"]._replace(federations=1),
        "pfedvem_held": OWN["pfedvem_held"]._replace(federations=1),
    },
}
