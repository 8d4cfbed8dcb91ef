"""What is read of a Pyro model, and what is refused by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

import bayesfl as bf
from bayesfl.pyro.program import Program
from bayesfl.stats.density.parameters import Parameter

dist: Any = pyro.distributions  # whose methods of distributions have no types
Y = torch.tensor([1.0, 2.0, 0.5, 1.5])
ROWS = {"a": (Y,), "b": (Y + 1,)}


def normal(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def with_param(y: Tensor) -> None:
    scale = pyro.param("scale", torch.tensor(1.0))
    normal(y * scale)


def with_discrete(y: Tensor) -> None:
    pyro.sample("which", dist.Bernoulli(0.5))
    normal(y)


def with_subsample(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("rows", len(y), subsample_size=2) as at:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y[at])


def shared_in_rows(y: Tensor) -> None:
    with pyro.plate("rows", len(y)):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def changing(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    top = pyro.sample("top", dist.Uniform(mu, mu + 1))
    pyro.sample("y", dist.Normal(top, 1.0).expand(y.shape).to_event(1), obs=y)


def changing_names(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    if mu > 0:
        mu = mu + pyro.sample("more", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mu, 1.0).expand(y.shape).to_event(1), obs=y)


def by_value(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    scale = 1.0 if mu > 0 else 2.0
    pyro.sample("y", dist.Normal(mu, scale).expand(y.shape).to_event(1), obs=y)


def at_random(y: Tensor) -> None:
    normal(y + torch.randn(()))


def at_numpys_random(y: Tensor) -> None:
    normal(y + np.random.default_rng().normal())


def unobserved(y: Tensor) -> None:
    pyro.sample("mu", dist.Normal(0.0, 5.0))


def of_rows(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(y.mean(), 5.0))
    pyro.sample("y", dist.Normal(mu, 1.0).expand(y.shape).to_event(1), obs=y)


def of_own(y: Tensor) -> None:
    own = pyro.sample("own", dist.Normal(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(own, 1.0))
    pyro.sample("y", dist.Normal(mu, 1.0).expand(y.shape).to_event(1), obs=y)


def of_length(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    pyro.sample("y", dist.Normal(mu, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("model", "shared", "message"),
    [
        (with_param, "mu", r"'a'.*'scale' is a pyro\.param.*pyro\.sample"),
        (with_discrete, "mu", r"'which' is discrete.*sum it out"),
        (with_subsample, "mu", r"plate 'rows' has a subsample.*subsample_size="),
        (shared_in_rows, "mu", r"'mu' is shared and stands in the plate 'rows'"),
        (changing, "mu", r"'top' has another shape or range"),
        (changing_names, "mu", r"'more' has another shape or range, or is not there"),
        (by_value, "mu", r"many draws at once.*torch\.where"),
        (at_random, "mu", r"draws random numbers of its own"),
        (at_numpys_random, "mu", r"density of 'y'.*draws random numbers of its own"),
        (unobserved, "mu", r"nothing is observed.*obs="),
        (of_rows, "mu", r"priors of 'a' and 'b' differ.*may not read rows"),
        (of_own, "mu", r"prior of mu depends on the site's own parameters"),
        (normal, "my", r"shared= names 'my'.*mu"),
    ],
)
def test_what_cannot_be_read_is_named(model: Callable[..., Any], shared: str, message: str):
    """The site, the name and the remedy."""
    with pytest.raises(ValueError, match=message):
        bf.pyro.fit(model, ROWS, shared=[shared])


def test_another_shape_at_another_site():
    """Which is the site's own, or a mistake."""
    rows = {"a": (Y,), "b": (Y[:3],)}
    with pytest.raises(ValueError, match=r"'mu'.*site 'a'.*'b': give it one shape"):
        bf.pyro.fit(of_length, rows, shared=["mu"])


def test_nothing_of_pyros_is_left_behind():
    """Neither parameters nor handlers; validation is as it was; no draw is taken."""
    pyro.get_param_store().clear()
    before = torch.get_rng_state()
    fit = bf.pyro.fit(normal, ROWS, shared=["mu"])
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(pyro.get_param_store().keys())
    mean = float(torch.cat([Y, Y + 1]).sum()) / (8 + 1 / 25)
    assert float(fit.draws["mu"].mean()) == pytest.approx(mean, abs=0.02)
    assert float(fit.draws["mu"].std()) == pytest.approx((8 + 1 / 25) ** -0.5, rel=0.05)


def test_named_arguments_and_one():
    """What the model is called with."""

    def fitted(rows: Any) -> Any:
        return bf.pyro.fit(normal, rows, shared=["mu"]).table()

    wanted = fitted(ROWS)
    assert fitted({site: {"y": y} for site, (y,) in ROWS.items()}).equals(wanted)
    assert fitted({site: y for site, (y,) in ROWS.items()}).equals(wanted)


def test_constrained_parameters_have_their_jacobian_once():
    """A rate under a gamma prior: conjugate to counts."""

    def counts(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    y = torch.tensor([1.0, 3.0, 2.0])
    fit = bf.pyro.fit(counts, {"a": y, "b": y, "c": y}, shared=["rate"])
    exact = dist.Gamma(2.0 + 18, 1.0 + 9)
    assert float(fit.draws["rate"].mean()) == pytest.approx(float(exact.mean), rel=0.01)
    assert float(fit.draws["rate"].std()) == pytest.approx(float(exact.stddev), rel=0.05)


def test_a_site_without_rows_adds_nothing():
    """And one whose rows are no numbers is named."""

    def model(y: Tensor) -> None:  # as Pyro has no plate of no rows
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        pyro.sample("y", dist.Normal(mu, 1.0).expand(y.shape).to_event(1), obs=y)

    empty = bf.pyro.fit(model, ROWS | {"c": (Y[:0],)}, shared=["mu"])
    wanted = bf.pyro.fit(model, ROWS, shared=["mu"]).table()
    assert torch.allclose(torch.tensor(empty.table().to_numpy()), torch.tensor(wanted.to_numpy()))
    with pytest.raises(ValueError, match="site 'c' has no finite log density"):
        bf.pyro.fit(normal, ROWS | {"c": (Y * float("inf"),)}, shared=["mu"])
    with pytest.raises(ValueError, match=r"site 'c': 'y' has observed values .* cannot have"):
        bf.pyro.fit(normal, ROWS | {"c": (Y * float("nan"),)}, shared=["mu"])


def test_outcomes_outside_of_their_support_are_refused():
    """A two among ones and zeros; and what a model raises names the site."""

    def binary(y: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Bernoulli(p), obs=y)

    rows = {"a": torch.tensor([0.0, 1, 1, 0]), "b": torch.tensor([0.0, 2, 1, 0])}
    with pytest.raises(ValueError, match=r"site 'b': 'y' has observed values .* cannot have"):
        bf.pyro.fit(binary, rows, shared=["p"])
    with pytest.raises(ValueError, match="broadcast") as raised:
        bf.pyro.fit(binary, {"a": rows["a"], "b": torch.zeros(3)}, shared=["p"])
    assert raised.value.__notes__ == ["raised by the model at site 'b'"]


def test_predictions_and_likelihoods():
    """Of a site's rows anew, of others, and for ArviZ."""
    fit = bf.pyro.fit(normal, ROWS, shared=["mu"])
    again = fit.predict("a")["y"]
    assert again.shape == (500, 4)
    assert float(again.std()) == pytest.approx(1.06, abs=0.1)
    logs = fit.pointwise("b")["y"]
    wanted = dist.Normal(fit.draws["mu"][:, None], 1.0).log_prob(Y + 1)
    assert torch.allclose(logs, wanted)
    data = fit.to_arviz()
    assert data.log_likelihood["y (a)"].shape == (1, 4000, 4)
    assert data.posterior_predictive["y (a)"].shape == (1, 500, 4)
    assert np.array_equal(data.observed_data["y (b)"], Y + 1)
    assert float(data.prior["mu"].std()) == pytest.approx(5, rel=0.1)
    assert data.prior_predictive["y (b)"].shape == (1, 500, 4)
    told = fit.compare(fit)
    assert "a: 4 rows left out in turn, A - B 0.00 nats" in told
    assert "all of these: 8 rows left out in turn" in told


def test_rows_to_predict_are_taken_as_those_of_the_fit():
    """In float32, of NumPy; and more draws than the fit has."""

    def sloped(x: Any, y: Any = None) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ slope), obs=y)

    x = torch.tensor([[0.5, 1.0], [1.0, -1.0], [0.0, 2.0]])
    d = torch.tensor([1.0, 0.0, 1.0])
    rows = {"a": (x, d), "b": (x.numpy(), d.numpy())}
    fit = bf.pyro.fit(sloped, rows, shared=["slope"])
    assert fit.predict("a", x[:2])["y"].shape == (500, 2)
    assert fit.predict("b", x.numpy(), draws=5000)["y"].shape == (5000, 3)


def test_an_outcome_of_one_number_is_a_row_and_a_factor_is_none():
    """For what is left out in turn, of which a factor tells nothing."""

    def one(sigma: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        pyro.factor("more", -0.1 * mu**2)
        pyro.sample("y", dist.Normal(mu, sigma), obs=y)

    rows = {"a": (torch.tensor(2.0), Y[0]), "b": (torch.tensor(3.0), Y[1])}
    fit = bf.pyro.fit(one, rows, shared=["mu"])
    assert list(fit.pointwise("a")) == ["y"]
    assert "a: 1 rows left out in turn, A - B 0.00 nats" in fit.compare(fit)


def test_whole_numbers_are_computed_in_double():
    """Torch makes float32 of a number times whole numbers, and rounds a parameter to that."""

    def sloped(x: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mu + 0.1 * x, 1.0), obs=y)

    x = torch.arange(4)
    whole = Program.of(sloped, "a", (x, x)).log_probs({"mu": torch.tensor(1 / 3).double()})["y"]
    single = Program.of(sloped, "a", (x.double(), x.double()))
    wanted = single.log_probs({"mu": torch.tensor(1 / 3).double()})["y"]
    assert whole.dtype is torch.float64
    assert torch.allclose(whole, wanted, rtol=0, atol=1e-7)  # 0.1 itself is in float32


def test_a_covariance_may_depend_on_parameters():
    """Torch looks whether it is symmetric, which it cannot for many draws at once."""

    def joint(x: Tensor) -> None:
        r = pyro.sample("r", dist.Uniform(-1.0, 1.0))
        one = torch.ones_like(r)
        covariance = torch.stack([torch.stack([one, r]), torch.stack([r, one])])
        with pyro.plate("rows", len(x)):
            normal = dist.MultivariateNormal(torch.zeros(2), covariance_matrix=covariance)
            pyro.sample("x", normal, obs=x)

    x = torch.tensor([[1.0, 0.8], [-0.5, -0.7], [0.2, 0.1], [-1.3, -0.9]])
    fit = bf.pyro.fit(joint, {"a": x, "b": 0.9 * x}, shared=["r"])
    grid = torch.linspace(-0.9999, 0.9999, 20001).double()
    both = torch.cat([x, 0.9 * x]).double()
    square = both.square().sum() - 2 * grid * (both[:, 0] * both[:, 1]).sum()
    logs = -square / 2 / (1 - grid**2) - len(both) / 2 * (1 - grid**2).log()
    mean = (logs - logs.max()).exp() @ grid / (logs - logs.max()).exp().sum()
    assert float(fit.draws["r"].mean()) == pytest.approx(float(mean), abs=0.01)


def test_rows_that_a_mask_leaves_out_do_not_count():
    """And fits whose masks differ are not compared: their evidence is of other rows."""

    def masked(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y)), pyro.poutine.mask(mask=y < 2):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    fit, other = (bf.pyro.fit(model, ROWS, shared=["mu"]) for model in (masked, normal))
    assert "b: 1 rows left out in turn" in fit.compare(fit)
    with pytest.raises(ValueError, match=r"mask different rows of \['a', 'b'\]; mask the same"):
        fit.compare(other)


def test_a_delta_is_deterministic():
    """As Pyro writes both alike."""

    def model(y: Tensor) -> None:
        shift = pyro.sample("shift", dist.Delta(torch.tensor(1.0)))
        normal(y - shift)

    fit = bf.pyro.fit(model, ROWS, shared=["mu"])
    wanted = bf.pyro.fit(normal, {site: (y - 1,) for site, (y,) in ROWS.items()}, shared=["mu"])
    assert fit.table().equals(wanted.table())
    assert bool((fit.local("a")["shift"] == 1).all())


@pytest.mark.parametrize(("rows", "shared"), [({}, ["mu"]), (ROWS, [])])
def test_sites_share_something(rows: dict[str, Any], shared: list[str]):
    """One site at least, and one parameter."""
    with pytest.raises(ValueError, match="there must be a site and a shared parameter"):
        bf.pyro.fit(normal, rows, shared=shared)


def test_what_is_deterministic_is_with_a_sites_own():
    """Of draws and for ArviZ, where plates and dimensions do not share a name."""

    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        level = pyro.deterministic("level", mu + own)
        with pyro.plate("site", len(y)):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    fit = bf.pyro.fit(model, ROWS, shared=["mu"])
    here = fit.local("b")
    assert torch.allclose(here["level"], fit.draws["mu"] + here["own"])
    assert {"level", "own"} == set(fit.sites().index.get_level_values(1))
    data = fit.to_arviz()
    assert data.posterior["level"].dims == ("chain", "draw", "site")
    assert data.observed_data["y (a)"].dims == ("site (a)",)
    assert list(data.posterior_predictive) == ["y (a)", "y (b)"]


def test_ordered_vectors():
    """Beside sums over a grid, as with cutpoints of an ordinal outcome."""
    ordered = [dist.transforms.OrderedTransform()]

    def model(y: Tensor) -> None:
        base = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        cut = pyro.sample("cut", dist.TransformedDistribution(base, ordered))
        pyro.sample("y", dist.Normal(cut, 1.0).to_event(1), obs=y)

    y = torch.tensor([0.5, 0.8])
    fit = bf.pyro.fit(model, {"a": y, "b": y + 0.2}, shared=["cut"])
    z = torch.cartesian_prod(*[torch.linspace(-4, 4, 201).double()] * 2)
    cut = torch.stack([z[:, 0], z[:, 0] + z[:, 1].exp()], 1)
    logs = -(z.square() + (cut - y).square() + (cut - y - 0.2).square()).sum(1) / 2
    weights = logs.softmax(0)
    mean = weights @ cut
    sd = (weights @ (cut - mean).square()).sqrt()
    assert torch.allclose(fit.draws["cut"].mean(0), mean, atol=0.03)
    assert torch.allclose(fit.draws["cut"].std(0), sd, rtol=0.05)
    assert bool((fit.draws["cut"].diff(dim=1) > 0).all())
    to = Parameter.of("cut", dist.constraints.ordered_vector, (2,)).map
    assert torch.allclose(to.inv(to(z)), z)


def test_numbers_in_distributions_are_in_double():
    """torch's gamma distribution would round values to the precision of its parameters."""

    def model(y: Tensor) -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(rate), obs=y)

    value = torch.tensor(0.1, dtype=torch.float64) + 1e-9
    program = bf.pyro.program.Program.of(model, "a", torch.tensor(1.0))
    found = program.log_probs({"rate": value})["rate"]
    assert float(found) == pytest.approx(float(value.log() - value), abs=1e-13)


def test_the_names_of_parameters_are_checked():
    """Against sites that are made already, and against the entries of vectors."""
    sites = bf.pyro.densities(normal, ROWS, shared=["mu"])
    with pytest.raises(ValueError, match=r"shared=\['nu'\] differs from .*\['mu'\]"):
        bf.pyro.fit(normal, sites, shared=["nu"])

    def entry(y: Tensor) -> None:
        pyro.sample("y", dist.Normal(pyro.sample("b[0]", dist.Normal(0.0, 1.0)), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"'b\[0\]' has the form of an entry"):
        bf.pyro.fit(entry, {"a": Y[0], "b": Y[1]}, shared=["b[0]"])


class Bayesian(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.slope = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope + self.bias


def _trained(model: Any) -> Any:
    return bf.algorithms.fedavg(model)


def _laplace(model: Any) -> Any:
    data = (Y[:, None], Y[:, None])
    return bf.posteriors.Laplace.fit(model, bf.likelihoods.Gaussian(), data, precision=1.0)


def _nuts(model: Any) -> Any:
    data = (Y[:, None], Y[:, None])
    return bf.posteriors.nuts(model, bf.likelihoods.Gaussian(), data, precision=1.0)


@pytest.mark.parametrize("use", [_trained, _laplace, _nuts])
def test_a_pyro_module_is_no_network(use: Callable[..., Any]):
    """Its weights would be drawn anew at each call, and the bias trained alone."""
    with pytest.raises(ValueError, match=r"'slope' is a PyroSample.*bf\.pyro\.fit"):
        use(Bayesian())


def grouped(groups: int, y: Any = None) -> None:
    mu = pyro.sample("mu", dist.Normal(1.0, 1.0))
    site = pyro.sample("site", dist.Normal(mu, 0.5))
    with pyro.plate("wards", groups):
        level = pyro.sample("level", dist.Normal(site, 0.5))
        with pyro.plate("days", 3):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)


@pytest.mark.parametrize("counts", [(2, 2), (2, 4)])
def test_plates_for_arviz(counts: tuple[int, int]):
    """Their names are those of dimensions; a parameter called as the dimension of sites gets
    another name.
    """
    rows = {name: (n, torch.ones(3, n)) for name, n in zip("ab", counts, strict=True)}
    data = bf.pyro.fit(grouped, rows, shared=["mu"]).to_arviz()
    for group, draws in (("posterior", 4000), ("prior", 500)):
        found = data[group]
        assert found["site_"].dims == ("chain", "draw", "site")
        if counts[0] == counts[1]:
            assert found["level"].dims == ("chain", "draw", "site", "wards")
        else:
            assert found["level (b)"].dims == ("chain", "draw", "wards (b)")
            assert found["level (b)"].shape == (1, draws, 4)
    assert data.log_likelihood["y (a)"].dims == ("chain", "draw", "days (a)", "wards (a)")
    assert data.observed_data["y (a)"].dims == ("days (a)", "wards (a)")
    assert float(data.prior["level (b)" if counts[1] > 2 else "level"].std()) == pytest.approx(
        1.5**0.5, rel=0.15
    )
