"""Ten Pyro models over a few sites, and the pooled model of each, which plain Pyro samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyro
import pyro.distributions
import torch
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor

dist: Any = pyro.distributions  # whose methods of distributions have no types


@dataclass
class _OfSite(Messenger):
    """Name a site's own statements after the site, and sample shared ones once."""

    site: str
    shared: tuple[str, ...]
    values: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values:
            msg.update(value=self.values[msg["name"]], done=True, stop=True)
        elif msg["name"] not in self.shared:
            msg["name"] = f"{self.site}.{msg['name']}"

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.shared:
            self.values[msg["name"]] = msg["value"]


def pooled(model: Callable[..., Any], rows: Mapping[str, Any], shared: tuple[str, ...]) -> Any:
    """The model of all rows together."""

    def together() -> None:
        values: dict[str, Tensor] = {}
        for site, args in rows.items():
            with _OfSite(site, shared, values):
                model(*args)

    return together


def _schools() -> dict[str, Any]:
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
    sigma = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])
    # Two sites of four schools each, which are exchangeable within and between them.
    return {f"site {j}": (sigma[4 * j : 4 * j + 4], y[4 * j : 4 * j + 4]) for j in range(2)}


def centred(sigma: Tensor, y: Any = None) -> None:
    """Eight schools."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def non_centred(sigma: Tensor, y: Any = None) -> None:
    """Eight schools, of standardised effects."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * z)
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def ragged(group: Tensor, groups: int, y: Any = None) -> None:
    """Groups of different sizes, of which sites have different numbers."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("groups", groups):
        effect = pyro.sample("effect", dist.Normal(mu, tau))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Normal(effect[group], sigma), obs=y)


def nested(y: Tensor) -> None:
    """Groups by two plates, one within the other: rows [wards, patients, visits]."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    omega = pyro.sample("omega", dist.HalfNormal(2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    wards, patients, visits = y.shape
    with pyro.plate("wards", wards, dim=-3):
        ward = pyro.sample("ward", dist.Normal(mu, tau))
        with pyro.plate("patients", patients, dim=-2):
            patient = pyro.sample("patient", dist.Normal(ward, omega))
            with pyro.plate("visits", visits, dim=-1):
                pyro.sample("y", dist.Normal(patient, sigma), obs=y)


def poisson(exposure: Tensor, x: Tensor, y: Any = None) -> None:
    """Counts with an exposure, and an intercept for each site."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    intercept = pyro.sample("intercept", dist.Normal(mu, tau))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson(exposure * (intercept + beta * x).exp()), obs=y)


def correlated(group: Tensor, groups: int, x: Tensor, y: Any = None) -> None:
    """Logistic, with correlated intercepts and slopes of groups."""
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
    with pyro.plate("groups", groups):
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    own = beta + (z @ root.mT.to(z)) * tau
    with pyro.plate("rows", len(x)):
        logits = own[group, 0] + own[group, 1] * x
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def student(x: Tensor, y: Any = None) -> None:
    """Errors with long tails, and an intercept for each site."""
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    intercept = pyro.sample("intercept", dist.Normal(mu, tau))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.StudentT(4.0, intercept + beta * x, sigma), obs=y)


def mixture(y: Tensor) -> None:
    """Two components, whose membership is summed out, in order."""
    low = pyro.sample("low", dist.Normal(-1.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(0.5, 0.5))
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    shift = pyro.sample("shift", dist.Normal(0.0, 0.5))
    parts = torch.stack([low, low + gap]) + shift
    weights = dist.Categorical(torch.stack([share, 1 - share]))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(parts, sigma)), obs=y)


class Layer(PyroModule):
    """A small network whose weights are shared, with a bias of each site."""

    def __init__(self) -> None:
        super().__init__()
        linear: Any = PyroModule[torch.nn.Linear]
        self.hidden = linear(2, 2)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 0.1).expand([2]).to_event(1))
        self.shift = PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, x: Tensor, y: Any = None) -> None:
        """Positive weights of what comes out, so that units do not change places."""
        hidden: Any = self.hidden(x)
        out = hidden[..., 0] + 0.3 * torch.tanh(hidden[..., 1]) + self.shift
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(out, 0.5), obs=y)


def three_levels(group: Tensor, groups: int, y: Any = None) -> None:
    """Rows within groups within sites."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    within = pyro.sample("within", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    site = pyro.sample("site", dist.Normal(mu, between))
    with pyro.plate("groups", groups):
        effect = pyro.sample("effect", dist.Normal(site, within))
    with pyro.plate("rows", len(group)):
        pyro.sample("y", dist.Normal(effect[group], sigma), obs=y)


def _groups(rng: Any, sizes: list[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def _rows(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size)).float()

    found: dict[str, Any] = {}
    for j in range(2 if name != "poisson" else 4):
        sizes = [[3, 7, 2, 5], [6, 4, 4, 9, 2, 3]][j % 2]
        group = _groups(rng, sizes)
        n, g = len(group), len(sizes)
        effect = normal(g)
        if name == "ragged":
            found[f"site {j}"] = (group, g, 1 + effect[group] + 0.7 * normal(n))
        if name == "nested":
            w, p, v = (3, 4, 3) if j else (4, 3, 4)
            found[f"site {j}"] = (
                1 + normal(w, 1, 1) + 0.6 * normal(w, p, 1) + 0.5 * normal(w, p, v),
            )
        if name == "poisson":
            x, exposure = normal(12), 0.5 + normal(12).abs()
            rate = exposure * (0.3 + 0.5 * normal(1) + 0.4 * x).exp()
            found[f"site {j}"] = (exposure, x, torch.from_numpy(rng.poisson(rate.numpy())).float())
        if name == "correlated":
            group = _groups(rng, [6] * 8)
            x, own = normal(48), normal(8, 2) * torch.tensor([1.0, 0.5])
            logits = 0.3 + own[group, 0] + (0.8 + own[group, 1]) * x
            y = torch.from_numpy(rng.random(48)).float() < logits.sigmoid()
            found[f"site {j}"] = (group, 8, x, y.float())
        if name == "student":
            x = normal(20)
            noise = torch.from_numpy(rng.standard_t(4, 20)).float()
            found[f"site {j}"] = (x, 0.5 + 0.6 * normal(1) + 0.8 * x + 0.6 * noise)
        if name == "mixture":
            of = torch.from_numpy(rng.random(40)) < 0.4
            found[f"site {j}"] = (torch.where(of, -1.0, 1.5) + 0.3 * normal(1) + 0.5 * normal(40),)
        if name == "layer":
            x = normal(30, 2)
            found[f"site {j}"] = (x, x @ torch.tensor([1.0, -0.5]) + j + 0.5 * normal(30))
        if name == "three_levels":
            found[f"site {j}"] = (
                group,
                g,
                1 + 0.8 * normal(1) + 0.7 * effect[group] + 0.6 * normal(n),
            )
    return found


MODELS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "centred": (centred, ("mu", "tau"), _schools()),
    "non_centred": (non_centred, ("mu", "tau"), _schools()),
    "ragged": (ragged, ("mu", "tau", "sigma"), _rows("ragged")),
    "nested": (nested, ("mu", "tau", "omega", "sigma"), _rows("nested")),
    "poisson": (poisson, ("beta", "mu", "tau"), _rows("poisson")),
    "correlated": (correlated, ("beta", "tau", "root"), _rows("correlated")),
    "student": (student, ("beta", "mu", "tau", "sigma"), _rows("student")),
    "mixture": (mixture, ("low", "gap", "share", "sigma"), _rows("mixture")),
    "layer": (Layer(), ("hidden.weight", "hidden.bias"), _rows("layer")),
    "three_levels": (three_levels, ("mu", "between", "within", "sigma"), _rows("three_levels")),
}
"""{name: (model, shared parameters, {site: arguments})}."""
