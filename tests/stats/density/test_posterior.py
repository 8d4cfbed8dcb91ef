"""Posteriors of plain densities: closed forms, published references, secure sums, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.distributions import Exponential, HalfCauchy, HalfNormal, Normal, constraints

import bayesfl as bf
from bayesfl.base.protocols import Tensors
from bayesfl.stats.density.posterior import Posterior
from bayesfl.stats.policy import Refusal

Y, SIGMA = (28.0, 8, -3, 7, -1, 1, 18, 12), (15.0, 10, 16, 11, 9, 11, 10, 18)
SCHOOLS = {f"school {j}": torch.tensor([Y[j], SIGMA[j]]) for j in range(8)}
SHARED = {"mu": constraints.real, "tau": constraints.positive}
REFERENCES = json.loads((Path(__file__).parents[2] / "pyro" / "references.json").read_text())


def schools(shared: Any, own: Any, rows: Tensor) -> Tensor:
    effect = Normal(shared["mu"], shared["tau"]).log_prob(own["theta"])
    return effect + Normal(own["theta"], rows[1]).log_prob(rows[0])


def prior(shared: Any) -> Tensor:
    return Normal(0, 5).log_prob(shared["mu"]) + HalfCauchy(5).log_prob(shared["tau"])


def fitted(**options: Any) -> Posterior:
    local = {"theta": constraints.real}
    return bf.stats.posterior(schools, SCHOOLS, shared=SHARED, local=local, prior=prior, **options)


def near(draws: Tensor, reference: dict[str, float], share: float = 0.05) -> None:
    """Mean within .1 standard deviations, and these within a share."""
    assert abs(float(draws.mean()) - reference["mean"]) < 0.1 * reference["sd"]
    assert abs(float(draws.std()) / reference["sd"] - 1) < share


def test_eight_schools_are_posteriordbs():
    """Own effects, too, in few questions."""
    fit = fitted()
    for name, t in fit.draws.items():
        near(t, REFERENCES["posteriordb"][name])
    for j, site in enumerate(fit.here):
        near(fit.local(site)["theta"], REFERENCES["posteriordb"][f"theta[{j + 1}]"])
    assert len(fit.released.questions) < 25
    assert max(fit.released.bytes.values()) < 12_000


@pytest.mark.slow
def test_chains_agree():
    """The exact way, by questions of slopes; of a thousand dependent draws deviations vary more."""
    fit = fitted(exact=True)
    for name, t in fit.draws.items():
        near(t, REFERENCES["posteriordb"][name], 0.1)


def regression(shared: Any, own: Any, rows: Any) -> Tensor:
    x, y = rows
    return Normal(x @ shared["beta"], 0.5).log_prob(y).sum()


def wide(shared: Any) -> Tensor:
    return Normal(0, 2).log_prob(shared["beta"]).sum()


def lines() -> dict[str, tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(0)
    found = {}
    for site in "abc":
        x = torch.from_numpy(rng.standard_normal((12, 2)))
        found[site] = x, x @ torch.tensor([1.0, -1]).double() + 0.5 * torch.randn(12).double()
    return found


def test_a_conjugate_model_is_its_closed_form():
    """Mean, covariance and evidence of a linear model with known noise; without one site, and under
    secure sums.
    """
    rows = lines()
    fit = bf.stats.posterior(regression, rows, shared={"beta": (constraints.real, 2)}, prior=wide)
    x, y = (torch.cat([of[k] for of in rows.values()]) for k in (0, 1))
    covariance = torch.linalg.inv(x.T @ x / 0.25 + torch.eye(2) / 4)
    mean = covariance @ x.T @ y / 0.25
    assert torch.allclose(
        fit.draws["beta"].mean(0), mean, atol=0.05 * float(covariance.max()) ** 0.5
    )
    assert torch.allclose(torch.cov(fit.draws["beta"].T), covariance, rtol=0.1, atol=1e-3)
    spread = 4 * x @ x.T + 0.25 * torch.eye(len(x))
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), spread)
    assert fit.evidence == pytest.approx(float(evidence.log_prob(y)), abs=0.02)
    assert sum(fit.without("c").rows.values()) == 24
    options: dict[str, Any] = {"shared": {"beta": (constraints.real, 2)}, "prior": wide}
    hidden = bf.stats.posterior(regression, rows, aggregation=bf.SecureSum(), **options)
    assert np.allclose(hidden.table(), fit.table(), atol=1e-5)
    assert "nobody saw a single site's" in str(hidden.released)
    assert "log Bayes factor of A over B 0.0000" in fit.compare(fit)
    rows["b"] = (rows["b"][0], rows["b"][1] + 1)
    with pytest.raises(ValueError, match=r"different rows of \['b'\]"):
        fit.compare(bf.stats.posterior(regression, rows, **options))


@pytest.mark.slow
def test_a_function_of_numpy():
    """Differences in place of derivatives."""

    def density(shared: Any, own: Any, rows: Any) -> Any:
        apart = (own["theta"] - shared["mu"]) / shared["tau"]
        noise = (float(rows[0]) - own["theta"]) / float(rows[1])
        return -0.5 * apart**2 - np.log(shared["tau"]) - 0.5 * noise**2

    few = {name: SCHOOLS[name] for name in list(SCHOOLS)[:2]}
    options: dict[str, Any] = {"shared": SHARED, "local": {"theta": constraints.real}}
    options |= {"prior": prior, "draws": 100}
    rough = bf.stats.posterior(density, few, derivatives="differences", **options)
    fine = bf.stats.posterior(schools, few, **options)
    apart = (rough.table()["mean"] - fine.table()["mean"]) / fine.table()["sd"]
    assert apart.abs().max() < 0.05


def test_a_density_is_one_number():
    """Not one for each row."""

    def density(shared: Any, own: Any, rows: Tensor) -> Tensor:
        return Normal(shared["mu"], 1.0).log_prob(rows)

    with pytest.raises(ValueError, match="log_density must return one number, as a sum over rows"):
        bf.stats.posterior(density, {"a": torch.ones(3)}, shared={"mu": constraints.real})


def test_names_and_priors_are_checked():
    """A name in both places, and a prior that is no number."""

    def log_density(shared: Any, own: Any, rows: Any) -> Tensor:
        return Normal(shared["mu"], 1.0).log_prob(rows).sum()

    rows = {"a": torch.zeros(2), "b": torch.ones(2)}
    real: Any = {"mu": constraints.real}
    with pytest.raises(ValueError, match=r"\['mu'\] are in shared= and in local="):
        bf.stats.posterior(log_density, rows, shared=real, local=real)

    def prior(shared: Tensors) -> Tensor:
        return shared["mu"].expand(2)

    with pytest.raises(RuntimeError) as raised:
        bf.stats.posterior(log_density, rows, shared=real, prior=prior)
    assert raised.value.__notes__ == ["in prior=, which returns one number, a tensor []"]


def test_ragged_own_parameters():
    """A shape that depends on rows; blocks are found by themselves."""

    def density(shared: Any, own: Any, rows: Any) -> Tensor:
        group, y = rows
        effects = Normal(shared["mu"], shared["tau"]).log_prob(own["theta"]).sum()
        return effects + Normal(own["theta"][group], 1.0).log_prob(y).sum()

    def count(rows: Any) -> int:
        return int(rows[0].max()) + 1

    rng = np.random.default_rng(0)
    groups = {"a": [3, 2, 4], "b": [2, 5]}
    rows = {
        site: (
            group,
            torch.from_numpy(rng.normal(size=len(group)) + rng.normal(size=len(sizes))[group]),
        )
        for site, sizes in groups.items()
        for group in [torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))]
    }
    local = {"theta": (constraints.real, count)}

    def weak(shared: Any) -> Tensor:
        return Normal(0, 3).log_prob(shared["mu"]) + HalfNormal(1).log_prob(shared["tau"])

    fit = bf.stats.posterior(density, rows, shared=SHARED, local=local, prior=weak)
    assert fit.local("a")["theta"].shape == (4000, 3)
    frames = {
        site: pd.DataFrame({"g": group.numpy(), "y": y.numpy()})
        for site, (group, y) in rows.items()
    }
    assert [len(of) for of in frames.values()] == [9, 7]
    assert fit.here["a"].integral.parts.parts.shape == (3, 1)
    assert fit.to_arviz().posterior["theta (b)"].shape == (1, 4000, 2)


def shifted(shared: Any, own: Any, rows: Any) -> Tensor:
    return Normal(shared["mu"].square(), 0.1).log_prob(rows).sum()


def test_two_maxima_are_named():
    """A summary of both would say nothing."""
    rows = {"a": torch.full((5,), 4.0), "b": torch.full((5,), 4.0)}
    options: dict[str, Any] = {"prior": lambda shared: Normal(0, 5).log_prob(shared["mu"])}
    with pytest.raises(ValueError, match=r"two maxima, mu -?2 or -?2"):
        bf.stats.posterior(shifted, rows, shared={"mu": constraints.real}, **options)


@pytest.mark.slow
def test_a_scale_without_a_prior_is_refused():
    """Two sites say nothing of how far sites differ: the tail does not fall."""
    few = {name: SCHOOLS[name] for name in list(SCHOOLS)[:2]}

    def flat(shared: Any) -> Tensor:
        return -shared["tau"].log()

    with pytest.raises(ValueError, match=r"the posterior does not fall along 'tau'"):
        bf.stats.posterior(
            schools, few, shared=SHARED, local={"theta": constraints.real}, prior=flat
        )


def test_a_level_tail_is_refused():
    """Of two sites and no prior the posterior of a scale never falls, however far one looks."""
    two = {name: SCHOOLS[name] for name in ("school 0", "school 1")}
    with pytest.raises(ValueError, match="does not fall along 'tau'"):
        bf.stats.posterior(schools, two, shared=SHARED, local={"theta": constraints.real})


def test_any_unit_gives_the_same():
    """Rows and prior in a unit a hundred million times smaller."""
    found = []
    for unit in (1.0, 1e8):
        rows = {name: unit * t for name, t in SCHOOLS.items()}

        def scaled(shared: Any, unit: float = unit) -> Tensor:
            return prior({name: t / unit for name, t in shared.items()})

        local = {"theta": constraints.real}
        fit = bf.stats.posterior(schools, rows, shared=SHARED, local=local, prior=scaled)
        found.append(fit.table().to_numpy() / unit)
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_rows_outside_the_support_are_refused():
    """Torch's own message, and the site."""

    def waits(shared: Any, own: Any, rows: Tensor) -> Tensor:
        return Exponential(shared["rate"]).log_prob(rows).sum()

    rows = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, -0.5])}
    with pytest.raises(ValueError, match="within the support") as caught:
        bf.stats.posterior(waits, rows, shared={"rate": constraints.positive})
    assert "site 'b'" in caught.value.__notes__[0]


def test_a_parameter_without_entries():
    """As of a site that misses none of its values."""

    def density(shared: Any, own: Any, rows: Tensor) -> Tensor:
        filled = Normal(shared["mu"], 1.0).log_prob(own["missing"]).sum()
        return filled + Normal(shared["mu"], 1.0).log_prob(rows[rows.isfinite()]).sum()

    rows = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([2.0, torch.nan])}
    local = {"missing": (constraints.real, lambda rows: int(rows.isnan().sum()))}
    fit = bf.stats.posterior(density, rows, shared={"mu": constraints.real}, local=local)
    assert [len(fit.local(site)["missing"][0]) for site in "ab"] == [0, 1]
    assert abs(float(fit.draws["mu"].mean()) - 1) < 0.06


def test_nothing_is_said_of_a_parameter():
    """No prior and no rows."""

    def nothing(shared: Any, own: Any, rows: Any) -> Tensor:
        return Normal(shared["mu"], 1.0).log_prob(rows).sum() + 0 * shared["nu"]

    with pytest.raises(ValueError, match=r"k-hat|no maximum"):
        bf.stats.posterior(
            nothing,
            {"a": torch.ones(5), "b": torch.ones(5)},
            shared={"mu": constraints.real, "nu": constraints.real},
        )


def test_a_policy_counts_rows_and_draws():
    """A school is one row."""
    sites = bf.stats.densities(
        schools, SCHOOLS, shared=SHARED, local={"theta": constraints.real}, policy=bf.stats.Policy()
    )
    with pytest.raises(Refusal, match="min_rows"):
        bf.stats.posterior(schools, sites, shared=SHARED, prior=prior)


def test_tables_have_no_density():
    """A clear word."""
    frames = {site: pd.DataFrame({"x": [1.0, 2.0]}) for site in "ab"}
    sites = bf.stats.tables(frames, terms=["x"])
    with pytest.raises(ValueError, match="without a log density"):
        bf.stats.posterior(schools, sites, shared=SHARED)


def test_own_parameters_without_a_mode_are_refused():
    """Of a density with a kink, and of an own scale that can go to zero."""

    def kink(shared: Tensors, own: Tensors, rows: Tensor) -> Tensor:
        return -(own["z"] - 0.3).abs() - (rows - shared["mu"]).square().sum()

    def neck(shared: Tensors, own: Tensors, rows: Tensor) -> Tensor:
        return Normal(0.0, own["s"]).log_prob(own["z"]).sum() + kink(shared, {"z": rows}, rows)[0]

    rows = {name: torch.tensor([1.0, 2.0]) for name in "ab"}
    for density, own in (
        (kink, {"z": constraints.real}),
        (neck, {"s": constraints.positive, "z": (constraints.real, 3)}),
    ):
        with pytest.raises(ValueError, match="no mode of the own parameters of site 'a'"):
            bf.stats.posterior(density, rows, shared={"mu": constraints.real}, local=own)


def test_many_own_parameters_by_differences_are_refused():
    """As their second differences would have little precision."""
    own = {"z": (constraints.real, 21)}
    with pytest.raises(ValueError, match=r"21 own parameters.*write .* in torch"):
        bf.stats.posterior(
            lambda *_: 0.0,
            {"a": np.zeros(2)},
            shared={"mu": constraints.real},
            local=own,
            derivatives="differences",
        )
