"""pFedVEM against algebra: with linear-Gaussian clients every step has a closed form."""

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.numerics import inverse_softplus
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Once
from bayesfl.composition.pools import Mean
from bayesfl.composition.priors import closest_variance
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Bernoulli, Gaussian
from bayesfl.models import SplitModel
from bayesfl.optim import SGD, Adam
from bayesfl.posteriors import MeanField
from tests.cases import federation, run

HEAVY = partial(SGD, momentum=0.9)


@pytest.mark.slow
def test_regression_end_to_end():
    """Diabetes by pFedVEM with a Gaussian likelihood: a mean, a variance that contains the noise,
    draws that add to it.
    """
    clients = bf.data.diabetes(clients=5, seed=0)
    model = bf.models.mlp(clients.inputs, hidden=10, outputs=1)
    algorithm = bf.algorithms.pfedvem(
        model, init_scale=0.1, batch_size=10, likelihood=Gaussian(0.7)
    )
    result = bf.simulate(algorithm, clients, rounds=20, seed=0, evaluate_every=20, progress=False)
    row = result.history.rows[-1]
    assert row["personal_rmse"] < 0.9  # the targets have standard deviation 1
    assert 0.75 < row["personal_coverage_90"] <= 1.0
    plug_in, averaged = result.predict(draws=0), result.predict(draws=30)
    assert_close(
        plug_in.variance[plug_in.mask], torch.full_like(plug_in.variance[plug_in.mask], 0.49)
    )
    assert bool((averaged.variance[averaged.mask] > 0.49).all())
    assert bool(plug_in.epistemic.isnan().all())
    assert_close(
        averaged.epistemic[averaged.mask],
        (averaged.variance[averaged.mask] - 0.49).squeeze(-1),
        atol=1e-5,
        rtol=1e-4,
    )


DIM, NOISE = 4, 0.5


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    rng = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, DIM, generator=rng) for n in (12, 7, 20, 9, 15)]
    ys = [
        x @ (1.0 + 0.5 * torch.randn(DIM, generator=rng))
        + NOISE * torch.randn(len(x), generator=rng)
        for x in xs
    ]
    return bf.data.from_arrays(xs, ys, test=([x + 1.0 for x in xs], ys))


def linear() -> SplitModel:
    body, head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():
        body.weight.copy_(torch.eye(DIM))
    return SplitModel(body, head)


def exact_step(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
    """The mean-field optimum of a Gaussian posterior: its mean, and the inverse of its precision's
    diagonal.
    """
    x, y = data["x"] * data["weight"].unsqueeze(-1), data["y"] * data["weight"]
    precision = x.mT @ x / NOISE**2 + torch.eye(DIM, dtype=x.dtype) / view["rho2"]
    mean = torch.linalg.solve(precision, x.mT @ y / NOISE**2 + given["head"]["loc"] / view["rho2"])
    return view | {"head": {"loc": mean, "rho": inverse_softplus(precision.diagonal().rsqrt())}}


def exact(order: str, **options) -> Algorithm:
    """pFedVEM with its gradient steps replaced by exact E steps; the rest is the library's."""
    plain = bf.algorithms.pfedvem(
        linear(), scale_update=order, likelihood=Gaussian(NOISE), **options
    )
    scale = next(phase for phase in plain.phases if isinstance(phase, Once))
    e_step = Once(exact_step, data=True)
    return replace(plain, phases=(scale, e_step) if order == "before" else (e_step, scale))


def bound(result) -> float:
    """The evidence lower bound at the current q_j, rho_j and w, in float64 and closed form."""
    algorithm, total = result.algorithm, 0.0
    given = algorithm.given(result.server, 0, 1)
    for j in range(result.data.clients):
        x, y = (t.double() for t in result.data.train.client(j))
        view = {
            "head": {k: v[j] for k, v in result.private["head"].items()},
            "rho2": result.private["rho2"][j],
        }
        mean, variance = algorithm.blocks["head"].posterior.moments(view["head"])
        squares = (y - x @ mean).square().sum() + ((x * x).sum(0) * variance).sum()
        likelihood = -0.5 * len(y) * math.log(2 * math.pi * NOISE**2) - 0.5 * squares / NOISE**2
        total += float(likelihood - algorithm.divergence("head", view["head"], given, view))
    return total


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_the_bound_never_falls(clients: FederatedData, order: str, beta: float):
    """Exact E and M steps and full participation: coordinate ascent, in either order, also with a
    relaxed centre.
    """
    algorithm = exact(order, beta=beta, scale_floor=1e-6)
    result, bounds = None, []
    for rounds in range(1, 31):
        result = bf.simulate(
            algorithm,
            clients,
            rounds=rounds,
            sampling="fixed",
            dtype=torch.float64,
            evaluate_every=None,
            progress=False,
            resume=result,
        )
        bounds.append(bound(result))
    steps = torch.tensor(bounds).diff()
    assert steps.min() > -1e-10
    assert steps.max() > 0.1


def test_first_round_scale_is_the_initial_one():
    """In round 0 every q_j is centred on w with sigma = init_scale, so rho_j = init_scale
    exactly.
    """
    algorithm = bf.algorithms.pfedvem(
        bf.models.mlp(8, hidden=4, outputs=3), init_scale=0.8, head_epochs=1, body_epochs=1
    )
    result = bf.simulate(
        algorithm, federation(), rounds=1, dtype=torch.float64, evaluate_every=None, progress=False
    )
    assert_close(
        result.private["rho2"], torch.full((7,), 0.64, dtype=torch.float64), atol=1e-14, rtol=0
    )


def test_scale_is_the_root_of_the_bound():
    """rho^2 = (sum sigma^2 + |mu - w|^2) / D minimises KL(q || N(w, rho^2 I)): the derivative there
    is zero.
    """
    q = MeanField()
    belief = {
        "loc": torch.tensor([1.0, 2.0]).double(),
        "rho": inverse_softplus(torch.tensor([0.5, 1.0]).double()),
    }
    rho2 = closest_variance(q.moments(belief), torch.zeros(2).double()).requires_grad_()
    assert_close(rho2.item(), 3.125)
    prior = bf.algorithms.pfedvem(linear()).blocks["head"].prior
    energy = prior.energy(
        *q.moments(belief),
        {"head": {"loc": torch.zeros(2).double()}, "round": 1, "rounds": 1},
        {"rho2": rho2},
    )
    (slope,) = torch.autograd.grad(energy, rho2)
    assert_close(slope.item(), 0.0)


def test_equal_scales_give_the_plain_mean_and_unequal_ones_weigh_by_precision():
    """w = sum_j mu_j / rho_j^2 over sum_j 1 / rho_j^2 minimises sum_j |mu_j - w|^2 / rho_j^2."""
    pool = bf.algorithms.pfedvem(linear()).blocks["head"].pool
    mu = torch.randn(3, DIM, generator=torch.Generator().manual_seed(0)).double()
    server = {"head": {"loc": torch.zeros(DIM).double()}}
    for rho2 in (torch.ones(3).double(), torch.tensor([0.1, 1.0, 4.0]).double()):
        uplink = {"head": {"loc": mu}, "rho2": rho2, "n": torch.tensor([5.0, 50.0, 500.0])}
        w = pool.solve(server, "head", pool.accumulate(None, server, "head", uplink))[
            "loc"
        ].requires_grad_()
        (slope,) = torch.autograd.grad(((mu - w).square().sum(1) / rho2).sum(), w)
        assert_close(slope, torch.zeros(DIM).double(), atol=1e-12, rtol=0)


def sweeps(shape: float, scale: float, count: int = 3000) -> Tensor:
    """The largest client's share of the precision after exact sweeps over five linear-Gaussian
    clients.
    """
    rng = torch.Generator().manual_seed(11)
    n, dim = 10, 3
    x = torch.randn(5, n, dim, generator=rng).double()
    truth = (
        torch.randn(dim, generator=rng).double() + 0.3 * torch.randn(5, dim, generator=rng).double()
    )
    y = torch.einsum("jnd,jd->jn", x, truth) + torch.randn(5, n, generator=rng).double()
    a, b = x.mT @ x, torch.einsum("jnd,jn->jd", x, y)
    mu = torch.zeros(5, dim).double()
    variance = torch.ones(5, dim).double()
    w = torch.zeros(dim).double()
    pool = Mean(weight=lambda server, uplink: 1 / uplink["rho2"])
    rho2 = torch.ones(5).double()
    for _ in range(count):
        rho2 = closest_variance((mu, variance), w, shape=shape, scale=scale).clamp_min(1e-6)
        precision = a + torch.eye(dim).double() / rho2[:, None, None]
        mu = torch.linalg.solve(precision, b + w / rho2[:, None])
        variance = 1 / precision.diagonal(dim1=1, dim2=2)
        server = {"head": {"loc": w}}
        uplink = {"head": {"loc": mu}, "rho2": rho2, "n": torch.ones(5)}
        w = pool.solve(server, "head", pool.accumulate(None, server, "head", uplink))["loc"]
    return (1 / rho2).max() / (1 / rho2).sum()


def test_a_collapsed_client_dictates_unless_the_scale_has_a_prior():
    """rho_j -> 0 is an attractor, and such a client owns the centre; an inverse-gamma prior on
    rho_j^2 holds every share under 0.4.
    """
    assert sweeps(0.0, 0.0) > 0.4
    assert sweeps(1.0, 0.1) < 0.4


@pytest.mark.slow
def test_the_floor_keeps_a_collapse_finite(clients: FederatedData):
    """One client alone is its own centre: its scale falls to the floor and stays there, and
    everything stays finite.
    """
    alone = clients.select([2])
    algorithm = exact("before", scale_floor=5e-2)
    result = bf.simulate(
        algorithm, alone, rounds=300, dtype=torch.float64, evaluate_every=None, progress=False
    )
    assert_close(result.private["rho2"], torch.tensor([2.5e-3]).double())
    x, y = (t.double() for t in alone.train.client(0))
    assert_close(
        result.server["head"]["loc"],
        torch.linalg.lstsq(x, y[:, None]).solution[:, 0],
        atol=1e-2,
        rtol=0,
    )


def test_a_new_client_starts_from_the_population_scale(clients: FederatedData):
    """Adapted without steps that move it, a client never seen has the pooled scale, exp(mean log
    rho_j^2), not its own first guess.
    """
    algorithm = exact("before")
    result = run(algorithm, clients, rounds=3, sampling="fixed")
    first = replace(algorithm, adapt=algorithm.adapt[:1])
    adapted = replace(result, algorithm=first).adapt(clients.select([0]))
    assert_close(adapted.private["rho2"][0], result.private["rho2"].log().mean().exp())


@pytest.mark.parametrize("scale", ["sum", "mean"])
def test_what_the_head_minimises(clients: FederatedData, scale: str):
    """sum: n times the mean loss plus KL(q_j || N(w, rho_j^2 I)). mean, the paper's energy: the
    mean loss beside the whole KL.
    """
    algorithm = bf.algorithms.pfedvem(linear(), likelihood=Gaussian(NOISE), likelihood_scale=scale)
    (descend,) = (
        phase for phase in algorithm.phases if getattr(phase, "blocks", None) == ("head",)
    )
    x, y = (t.double() for t in clients.train.client(0))
    # So narrow that draws are the mean.
    belief = {"loc": torch.linspace(-1, 1, DIM).double(), "rho": torch.full((DIM,), -20.0).double()}
    view = {
        "head": belief,
        "body": {"loc": torch.eye(DIM).double().flatten()},
        "rho2": torch.tensor(0.7).double(),
    }
    given = {"head": {"loc": torch.full((DIM,), 0.2).double()}, "round": 1, "rounds": 1}
    n = torch.tensor(12.0).double()
    batch = {"x": x, "y": y, "weight": torch.ones(12).double()}
    energy, _ = descend.energy(
        algorithm, {"head": belief}, given, view | {"n": n}, batch, {"head": torch.zeros(1, DIM)}
    )
    losses = -torch.distributions.Normal(x @ belief["loc"], NOISE).log_prob(y)
    sigma2 = torch.nn.functional.softplus(belief["rho"]).square()
    q, p = (
        torch.distributions.Normal(m, v.sqrt())
        for m, v in ((belief["loc"], sigma2), (given["head"]["loc"], view["rho2"]))
    )
    expected = (
        losses.sum() if scale == "sum" else losses.mean()
    ) + torch.distributions.kl_divergence(q, p).sum()
    assert_close(energy, expected)


def test_beta_is_the_share_of_the_old_state(clients: FederatedData):
    """Body and centre move 1 - beta of the way that they would move without it."""
    plain, relaxed = (
        run(
            bf.algorithms.pfedvem(linear(), beta=b, likelihood=Gaussian(NOISE)),
            clients,
            sampling="fixed",
            seed=0,
        )
        for b in (0.0, 0.3)
    )
    start = plain.algorithm.init(1, dtype=torch.float64)
    for block in ("body", "head"):
        moved = plain.server[block]["loc"] - start[block]["loc"]
        assert moved.abs().max() > 1e-3
        assert_close(
            relaxed.server[block]["loc"] - start[block]["loc"], 0.7 * moved, atol=1e-12, rtol=0
        )


def test_the_first_scale_is_the_initial_one_in_the_other_order_too():
    """Where rho_j is updated after the head, the first E step runs under init_scale^2."""
    algorithm = bf.algorithms.pfedvem(linear(), init_scale=0.3, scale_update="after")
    assert_close(algorithm.rows(algorithm.init(1, dtype=torch.float64))["rho2"].item(), 0.09)


def test_a_scale_that_is_never_updated(clients: FederatedData):
    """The prior's scale stays what was asked for, for clients that join later, too; all clients
    have one weight in the centre.
    """
    # As in pfedvem, but for the prior's scale.
    learnt: dict[str, Any] = {"init_scale": 1.0, "scale_rate": 1.0, "head_start": "normal"}
    algorithm = bf.algorithms.pfedvem_held(
        linear(), prior_scale=0.7, likelihood=Gaussian(NOISE), head_epochs=2, **learnt
    )
    result = run(algorithm, clients, rounds=3)
    assert set(result.private) == {"head"}
    assert set(algorithm.uplink(algorithm.init(1))) == {"body.loc", "head.loc"}
    assert_close(result.server["head"]["loc"], result.private["head"]["loc"].mean(0))
    other, plain = (
        bf.algorithms.pfedvem_held(linear(), init_scale=0.3, **scale)
        for scale in ({"prior_scale": 0.3}, {})
    )
    for method, variance in ((algorithm, 0.49), (other, 0.09), (plain, 1.0)):
        prior: Any = method.blocks["head"].prior
        assert_close(prior.variance({}, {"n": torch.ones(5)}), torch.full((5, 1), variance))
    assert set(result.adapt(clients).private) == {"head"}


@pytest.mark.parametrize("scale_rate", [0.0, 0.3])
def test_the_scales_have_a_rate_of_their_own(clients: FederatedData, scale_rate: float):
    """One step of SGD with that multiple of the means' rate; 0 holds them. The means move
    as ever.
    """
    options: dict[str, Any] = {
        "head_epochs": 1,
        "body_epochs": 1,
        "head_optimiser": SGD(1e-3),
        "body_optimiser": SGD(1e-2),
    }
    fast, slow = (
        bf.algorithms.pfedvem(linear(), scale_rate=rate, likelihood=Gaussian(NOISE), **options)
        for rate in (1.0, scale_rate)
    )
    plain, slow = run(fast, clients), run(slow, clients)
    start = inverse_softplus(torch.tensor(1.0, dtype=torch.float64))
    moved = plain.private["head"]["rho"] - start
    assert moved.abs().max() > 1e-3
    assert_close(slow.private["head"]["rho"] - start, moved * scale_rate, atol=1e-12, rtol=0)
    assert_close(slow.private["head"]["loc"], plain.private["head"]["loc"], atol=1e-12, rtol=0)


def test_heads_may_start_as_the_modules(clients: FederatedData):
    """With fixed variances they do, and widths stay where they start, also under a rate that grows
    from 0 or is 0 throughout; options replace defaults.
    """
    bf.algorithms.pfedvem(linear(), head_optimiser=HEAVY(0.0), scale_rate=0.0)
    model = bf.models.mlp(8, hidden=4, outputs=3, seed=2)
    held = bf.algorithms.pfedvem_held(model)
    own = torch.cat(
        [p.flatten() for name, p in model.named_parameters() if name.startswith("head.")]
    )
    assert_close(held.init(3)["head"]["loc"], own)
    assert (bf.algorithms.pfedvem(model).init(3)["head"]["loc"] - own).abs().max() > 0.1
    grown = bf.algorithms.pfedvem_held(model, head_epochs=2, head_optimiser=HEAVY(warming))
    result = run(grown, federation(), rounds=2)
    width = result.algorithm.blocks["head"].posterior.moments(result.private["head"])[1].sqrt()
    assert_close(width, torch.full_like(width, 0.1))
    assert bf.algorithms.pfedvem_held(model, init_scale=0.3).blocks["head"].posterior == MeanField(
        init_scale=0.3, scale_rate=0.0
    )


def warming(round: int, rounds: int) -> float:
    """A learning rate that grows from 0."""
    return 1e-3 * min(1.0, round / 5)


@pytest.mark.parametrize(
    ("options", "round", "floor"),
    [
        ({}, 1, 1e-3 / 1.9),
        ({"head_optimiser": SGD(1e-3)}, 1, 1e-3),
        ({"scale_floor": 0.5}, 1, 0.25),
        ({"head_optimiser": HEAVY(1e-8)}, 1, 1e-6),
        ({"head_optimiser": HEAVY(0.0)}, 1, 1e-6),
        ({"head_optimiser": HEAVY(warming)}, 1, 1e-6),
        ({"head_optimiser": HEAVY(warming)}, 3, 4e-4 / 1.9),
        ({"head_optimiser": HEAVY(warming)}, 8, 1e-3 / 1.9),
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_floor_is_half_of_where_steps_to_the_centre_diverge(
    order: str, options: dict[str, Any], round: int, floor: float
):
    """At the round's rate: for the defaults .023. A larger floor stands. An update gives no smaller
    scale, the prior reads none.
    """
    algorithm = bf.algorithms.pfedvem(
        bf.models.mlp(8, hidden=4, outputs=3), scale_update=order, **options
    )
    view = {
        "head": {"loc": torch.zeros(15), "rho": torch.full((15,), -20.0)},
        "rho2": torch.tensor(1e-9),
    }
    given = {"head": {"loc": torch.zeros(15)}, "round": round, "rounds": 20}
    (update,) = (phase.fn for phase in algorithm.phases if isinstance(phase, Once))
    assert_close(float(update(None, given, view, {})["rho2"]), floor, rtol=1e-6, atol=0)
    prior: Any = algorithm.blocks["head"].prior
    assert_close(float(prior.variance(given, view)), floor, rtol=1e-6, atol=0)
    assert float(prior.variance(given, view | {"rho2": torch.tensor(1.0)})) == 1.0


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("rate", [1e-3, warming])
def test_a_start_below_the_floor_does_not_diverge(order: str, rate: Any):
    """No step is unstable in any round, in either order, and under a rate that grows."""
    options: dict[str, Any] = {
        "scale_update": order,
        "init_scale": 0.005,
        "head_optimiser": HEAVY(rate),
    }
    algorithm = bf.algorithms.pfedvem(bf.models.mlp(8, hidden=4, outputs=3), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = bf.simulate(algorithm, federation(), rounds=8, evaluate_every=None, progress=False)
    assert float(result.private["rho2"].min()) >= 1e-3 / 1.9 * (1 - 1e-6)
    assert float(result.private["head"]["loc"].abs().max()) < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale_update": "always"}, r"scale_update must be 'before' or 'after', got 'always'"),
        ({"scale_update": "never"}, r"scale_update must be 'before' or 'after', got 'never'"),
        ({"head_start": "zero"}, r"head_start .*got 'zero'"),
        ({"scale_floor": 0.0}, r"scale_floor must be > 0 and finite, got 0\.0"),
        ({"scale_prior": 1.0}, r"scale_prior must be 2 numbers, got 1\.0"),
        ({"scale_prior": (1.0, -1.0)}, r"each of scale_prior must be >= 0 and finite, got -1"),
        ({"scale_rate": -1.0}, r"scale_rate must be >= 0 and finite, got -1"),
        ({"beta": 1.0}, r"beta must lie within \[0, 1\), got 1\.0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        bf.algorithms.pfedvem(bf.models.mlp(8, hidden=4, outputs=3), **options)


def test_the_floor_needs_sgd():
    """By whose rate and momentum it is; fixed variances have no floor."""
    model = bf.models.mlp(8, hidden=4, outputs=3)
    for other in (Adam(1e-3), bf.optim.Clip(SGD(1e-3)), 1e-3):
        with pytest.raises(
            TypeError, match=rf"head_optimiser must be of type SGD, got {type(other).__name__}"
        ):
            bf.algorithms.pfedvem(model, head_optimiser=other)  # pyright: ignore[reportArgumentType]
    bf.algorithms.pfedvem_held(model, head_optimiser=Adam(1e-3))


def test_a_fixed_scale_is_positive():
    model = bf.models.mlp(8, hidden=4, outputs=3)
    with pytest.raises(ValueError, match=r"prior_scale .*got 0\.0"):
        bf.algorithms.pfedvem_held(model, prior_scale=0.0)


def test_a_hierarchical_logistic_regression():
    """One line: the beliefs move as those of a model whose body is the identity, held still;
    nothing of a body is sent.
    """
    data = federation()
    data = replace(
        data,
        splits={
            name: replace(split, y=(split.y > 0).long()) for name, split in data.splits.items()
        },
        outputs=2,
    )
    flat = bf.models.mlp(8, hidden=(), outputs=1, seed=1)
    still = SplitModel(nn.Linear(8, 8, bias=False), flat.head)
    with torch.no_grad():
        still.get_parameter("body.weight").copy_(torch.eye(8))
    make = partial(
        bf.algorithms.pfedvem, likelihood=Bernoulli(), head_epochs=4, head_start="module"
    )
    alone, held = (run(m, data, 3) for m in (make(flat), make(still, body_optimiser=SGD(0.0))))
    assert list(alone.algorithm.blocks) == ["head"]
    for name in ("head", "rho2"):
        assert_close(alone.private[name], held.private[name], atol=1e-12, rtol=0)


def test_a_model_that_is_all_head(clients: FederatedData):
    """A model that is all head predicts as its client model does."""
    flat = bf.models.mlp(DIM, hidden=(), outputs=1)
    method = bf.algorithms.pfedvem(flat, likelihood=Gaussian(NOISE), head_epochs=3)
    assert list(method.blocks) == list(method.parts) == ["head"]
    assert len(method.phases) == 2
    result = run(method, clients, rounds=2)
    assert "body" not in result.server
    assert_close(
        result.client(1).predict(torch.zeros(1, DIM)).mean,
        result.client(1).model()(torch.zeros(1, DIM).double()).detach(),
    )


def test_widths_stay_at_home():
    """mu_j and one number go up; sigma_j and the training data never do."""
    method = exact("before")
    assert set(method.uplink(method.init(1))) == {"body.loc", "head.loc", "rho2"}
