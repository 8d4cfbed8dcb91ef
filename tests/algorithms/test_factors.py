"""PVI and FedEP on linear regressions, whose fixed points are closed forms."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Bernoulli, Gaussian
from bayesfl.optim import SGD, Adam, cosine
from tests.algorithms.made import DIM, linear_only, moments
from tests.cases import run

PRIOR, SCALE = 0.7, 0.3


def method(name: str, **options: Any) -> bf.Algorithm:
    return getattr(bf.algorithms, name)(
        linear_only(torch.full((1, DIM), 0.4)),
        **{"prior_precision": PRIOR, "batch_size": None, "likelihood": Gaussian(), **options},
    )


def natural(q: Any) -> tuple[Tensor, Tensor]:
    """Of a mean field, written out."""
    precision = torch.nn.functional.softplus(q["rho"]).square().reciprocal()
    return precision, precision * q["loc"]


@pytest.mark.parametrize("name", ["pvi", "fedep"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_posterior_is_the_product_of_prior_and_factors(
    name: str, participation: float, regressions: FederatedData
):
    made = method(name, epochs=3, damping=0.6, optimiser=SGD(0.05))
    result = run(made, regressions, rounds=3, participation=participation)
    factor = result.private["factor"]
    precision, weighted = natural(result.server["w"])
    assert_close(precision, PRIOR + factor["precision"].sum(0), atol=1e-9, rtol=1e-9)
    assert_close(weighted, factor["weighted"].sum(0), atol=1e-9, rtol=1e-9)
    assert float(factor["precision"].min()) >= 0


def test_a_factor_goes_part_of_the_way(regressions: FederatedData):
    """From the prior, a client's new factor is its q_j over the prior, to the power of damping."""
    result = run(method("pvi", epochs=3, damping=0.6, init_scale=SCALE), regressions)
    precision, weighted = natural(result.private["v"])
    assert_close(result.private["factor"]["precision"], 0.6 * (precision - PRIOR).clamp_min(0))
    assert_close(result.private["factor"]["weighted"], 0.6 * weighted)


def pooled(data: FederatedData) -> tuple[Tensor, Tensor]:
    """Of all rows together: the mean of the posterior, and the precisions of the closest mean
    field, which are the diagonal of its own.
    """
    a, b = moments(data)
    whole = a.sum(0) + PRIOR * torch.eye(DIM).double()
    return torch.linalg.solve(whole, b.sum(0)), whole.diagonal()


def test_expectation_propagation_ends_at_the_pooled_posterior(regressions: FederatedData):
    """One client after the other."""
    made = method("fedep", damping=1.0, epochs=200, optimiser=SGD(0.3))
    result = run(made, regressions, rounds=60, participation=0.25)
    loc, precision = pooled(regressions)
    assert_close(result.server["w"]["loc"], loc, atol=1e-6, rtol=0)
    assert_close(natural(result.server["w"])[0], precision, atol=1e-6, rtol=0)


def test_a_logistic_posterior_is_laplaces(regressions: FederatedData):
    """Of all clients at once: its mean is the pooled maximum, and its precisions the prior's and
    the diagonal of the GGN there, which depends on the weights.
    """
    xs, ys = zip(*(regressions.train.client(j) for j in range(regressions.clients)), strict=True)
    labels = bf.data.from_arrays(list(xs), [(y > 0).long() for y in ys], test_share=0.0)
    made = bf.algorithms.fedep(
        linear_only(torch.zeros(1, DIM)),
        prior_precision=PRIOR,
        damping=0.4,
        epochs=100,
        batch_size=None,
        optimiser=SGD(0.5),
        likelihood=Bernoulli(),
    )
    q = run(made, labels, rounds=60).server["w"]
    x, sign = torch.cat(xs).double(), torch.cat(ys).double().sign()
    left = torch.sigmoid(-sign * (x @ q["loc"]))
    assert_close(x.T @ (sign * left), PRIOR * q["loc"], atol=1e-6, rtol=0)
    curvature = (left * (1 - left)) @ x.square()
    assert_close(natural(q)[0], PRIOR + curvature, atol=1e-6, rtol=0)
    once = run(made, labels).private
    for j, each in enumerate(xs):
        p = torch.sigmoid(each.double() @ once["v"]["loc"][j])
        curvature = (p * (1 - p)) @ each.double().square()
        assert_close(once["factor"]["precision"][j], 0.4 * curvature)


def test_no_factor_has_a_negative_precision():
    factors = bf.Factors("w", precision=PRIOR, damping=1.0)
    belief = factors.posterior.init(torch.zeros(2, dtype=torch.float64))
    nothing = factors.entries["private"]["factor"]({"w": belief})
    of_q = torch.tensor([PRIOR / 2, PRIOR * 2]).double()
    view = factors.refined(
        factors.entries["server"]({}, 3), {"w": belief, "factor": nothing}, of_q, torch.zeros(2)
    )
    assert_close(view["factor"]["precision"], torch.tensor([0.0, PRIOR]).double())


@pytest.mark.slow
def test_variational_inference_ends_at_the_pooled_bounds_maximum(regressions: FederatedData):
    options = {"epochs": 60, "draws": 200, "init_scale": SCALE, "optimiser": Adam(cosine(0.05))}
    result = run(method("pvi", damping=0.5, **options), regressions, rounds=30)
    loc, precision = pooled(regressions)
    assert_close(result.server["w"]["loc"], loc, atol=0.02, rtol=0)
    assert_close(natural(result.server["w"])[0], precision, atol=0, rtol=0.05)


def test_a_client_is_forgotten(regressions: FederatedData):
    """Without its factor the posterior is the product of the others'."""
    result = run(method("fedep", epochs=20, optimiser=SGD(0.1)), regressions, rounds=4)
    factor = result.private["factor"]
    one = {name: t[1] for name, t in factor.items()}
    left = bf.Factors("w", precision=PRIOR).without(result.server["w"], one)
    precision, weighted = natural(left)
    rest = [0, 2, 3]
    assert_close(precision, PRIOR + factor["precision"][rest].sum(0), atol=1e-9, rtol=1e-9)
    assert_close(weighted, factor["weighted"][rest].sum(0), atol=1e-9, rtol=1e-9)


def test_a_lost_factor_changes_nothing(regressions: FederatedData):
    """Its client keeps the factor of which the server knows, and replaces that one later."""
    lost = bf.faults.at_random(0.4, kinds=("lost",))
    result = run(
        method("fedep", epochs=3, damping=0.5, optimiser=SGD(0.05)),
        regressions,
        rounds=4,
        faults=lost,
    )
    assert result.history["lost"].sum() > 2
    factor = result.private["factor"]
    precision, weighted = natural(result.server["w"])
    assert_close(precision, PRIOR + factor["precision"].sum(0), atol=1e-9, rtol=1e-9)
    assert_close(weighted, factor["weighted"].sum(0), atol=1e-9, rtol=1e-9)


@pytest.mark.slow
def test_a_factor_that_arrives_a_round_late_replaces_its_own(regressions: FederatedData):
    """Clients send what they made a round ago, under a posterior that has moved since; the end is
    the pooled posterior as well.
    """
    made = method("fedep", damping=0.3, epochs=60, optimiser=SGD(0.3))
    factors = bf.Factors("w", precision=PRIOR)
    refine: Any = made.phases[-1]

    def late(algorithm: Any, given: Any, view: Any, data: Any) -> Any:
        new = refine.fn(algorithm, given, view, data)["factor"]
        others, pull = factors.cavity(view)
        then = view["made"]
        q = factors.posterior.of_natural(others + then["precision"], pull + then["weighted"])
        return {"w": q, "factor": then, "made": new}

    behind = replace(
        made,
        phases=(*made.phases[:-1], replace(refine, fn=late)),
        private={**factors.entries["private"], "made": factors.entries["private"]["factor"]},
    )
    assert_close(
        natural(run(behind, regressions).server["w"])[0], torch.full((DIM,), PRIOR).double()
    )
    result = run(behind, regressions, rounds=70)
    loc, precision = pooled(regressions)
    assert_close(result.server["w"]["loc"], loc, atol=1e-4, rtol=0)
    assert_close(natural(result.server["w"])[0], precision, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("before", [[0, 1, 2], [0, 1, 2, 3, 4]], ids=["joins", "leaves"])
@pytest.mark.parametrize("name", ["pvi", "fedep"])
def test_q_is_the_product_of_the_factors_of_those_who_are_there(
    name: str, before: list[int], regressions: FederatedData
):
    """Also after a round of another run: who joins has none, who leaves takes its own along."""
    data, made = five(regressions), method(name, epochs=3, optimiser=SGD(0.05))
    start = run(made, data.select(before), rounds=2)
    result = run(made, data.select(range(4)), rounds=1, seed=9, start=start)
    factor = result.private["factor"]
    precision, weighted = natural(result.server["w"])
    assert_close(precision, PRIOR + factor["precision"].sum(0), atol=1e-9, rtol=1e-9)
    assert_close(weighted, factor["weighted"].sum(0), atol=1e-9, rtol=1e-9)
    assert float(factor["precision"].sum(1).min()) > 0
    assert float(result.server["size"]) == 4


@pytest.mark.parametrize("name", ["pvi", "fedep"])
def test_a_run_that_begins_from_another_has_its_own_prior(name: str, regressions: FederatedData):
    """Its posterior is that prior times the factors."""
    options: dict[str, Any] = {"epochs": 3, "optimiser": SGD(0.05)}
    start = run(method(name, **options), regressions, rounds=2)
    now = method(name, prior_precision=10 * PRIOR, **options)
    result = run(now, regressions, rounds=1, seed=9, start=start)
    precision, _ = natural(result.server["w"])
    assert_close(precision, 10 * PRIOR + result.private["factor"]["precision"].sum(0))


@pytest.mark.parametrize("name", ["pvi", "fedep"])
def test_factors_that_are_not_gathered_do_not_change(name: str, regressions: FederatedData):
    """Nor does a server's optimiser change the product."""
    with pytest.raises(ValueError, match="gathers the cohort's changes only"):
        run(method(name), regressions, participation=0.5, train="all")
    with pytest.raises(ValueError, match="gathers the cohort's changes only"):
        run(replace(method(name), train="all"), regressions, participation=0.5)
    with pytest.raises(ValueError, match="which a step of an optimiser"):
        bf.with_server_optimiser(method(name), SGD(0.5))


@pytest.mark.parametrize("name", ["pvi", "fedep"])
def test_a_run_that_begins_from_another_has_its_own_damping(name: str, regressions: FederatedData):
    """From the same start, a factor moves in proportion to the damping."""
    options: dict[str, Any] = {"epochs": 3, "optimiser": SGD(0.05)}
    start = run(method(name, damping=0.1, **options), regressions, rounds=1)

    def moved(damping: float) -> Tensor:
        made = method(name, damping=damping, **options)
        result = run(made, regressions, rounds=1, seed=9, start=start)
        return result.private["factor"]["weighted"] - start.private["factor"]["weighted"]

    assert float(moved(0.25).abs().max()) > 1e-3
    assert_close(moved(0.5), 2 * moved(0.25), atol=1e-12, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("before", [[0, 1, 2], [0, 1, 2, 3, 4]], ids=["joins", "leaves"])
def test_the_end_does_not_depend_on_who_was_there(before: list[int], regressions: FederatedData):
    data, made = five(regressions), method("fedep", epochs=100, optimiser=SGD(0.3))
    start = run(made, data.select(before), rounds=10)
    now = data.select(range(4))
    q = run(made, now, rounds=80, seed=9, start=start).server["w"]
    loc, precision = pooled(now)
    assert_close(q["loc"], loc, atol=1e-5, rtol=0)
    assert_close(natural(q)[0], precision, atol=1e-5, rtol=0)


def five(regressions: FederatedData) -> FederatedData:
    """The four clients, and one more with the third's rows; all have names."""
    xs, ys = zip(*(regressions.train.client(j) for j in (0, 1, 2, 3, 2)), strict=True)
    data = bf.data.from_arrays(list(xs), list(ys), test_share=0.0)
    return replace(data, client_names=tuple("abcde"))
