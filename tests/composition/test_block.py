"""Blocks: how they are held, where they start, and parameters that none of them covers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.composition import (
    Descend,
    Energy,
    Mean,
    Normal,
    server_mean,
    standard_normal,
)
from bayesfl.composition.pools import PrecisionWeighted
from bayesfl.composition.priors import Flat, Tilt
from bayesfl.models import mlp, split
from bayesfl.optim import SGD
from bayesfl.posteriors import FullGaussian, MeanField, Point
from tests.composition.made import KERNELS, algorithm, data

KEPT = Normal(
    centre=server_mean("w"), variance=lambda given, view: torch.ones(1).to(given["w"]["loc"])
)


def test_training_a_belief_that_draws_under_a_flat_or_linear_prior_is_refused():
    """Its width has no optimum; the message names block, prior and both remedies. Where no phase
    trains it, as a belief that a function sets, nobody reads its prior.
    """
    step = bf.Descend(bf.Energy("w", ("w",), likelihood="mean"))
    for prior in (Flat(), Tilt(lambda given, view: given["w"]["loc"])):
        block = bf.Block(posterior=MeanField(), prior=prior, pool=Mean(sends=("loc", "rho")))
        with pytest.raises(
            ValueError, match=rf"\['w'\] draw.*{type(prior).__name__}.*Normal.*Point"
        ):
            bf.Algorithm(mlp(2, outputs=2), {"w": block}, (step,), parts=("w",))
        bf.Algorithm(mlp(2, outputs=2), {"w": block}, (), parts=("w",))
    kept = bf.Block(posterior=MeanField(), prior=KEPT)
    bf.Algorithm(mlp(2, outputs=2), {"w": kept}, (step,), parts=("w",))
    assert (kept.stochastic, bf.Block().stochastic) == (True, False)


def test_the_four_ways_to_hold_a_block():
    """Private is what is kept and never sent; a shared, a frozen and a hierarchical block
    are not.
    """
    ways = {
        (pool, keep): bf.Block(pool=Mean() if pool else None, keep=keep).private
        for pool in (True, False)
        for keep in (True, False)
    }
    assert [way for way, private in ways.items() if private] == [(False, True)]
    assert (type(bf.Block().prior), type(bf.Block().posterior)) == (Flat, Point)


PATTERNS = {
    "split, head": "head.*",
    "split, body": "body.2.*",
    "stack, first": "0.*",
    "stack, middle": "2.*",
    "weights": "*.weight",
}


def uncovered(which: str) -> tuple[nn.Module, str, list[str]]:
    """A model, a pattern over part of it, and the parameters that the pattern leaves out."""
    stack = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    model = split(stack, head="4") if which.startswith("split") else stack
    covered = Layout(model, PATTERNS[which]).names
    return (
        model,
        PATTERNS[which],
        [name for name, _ in model.named_parameters() if name not in covered],
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("which", PATTERNS)
def test_uncovered_parameters_stay_as_they_are(which, kernel):
    """Two full-batch rounds of two steps are those of gradient descent on the covered ones alone,
    the others held.
    """
    torch.manual_seed(0)
    model, pattern, frozen = uncovered(which)
    assert frozen
    step = Descend(Energy("w", ("w",), likelihood="mean"), steps=2, optimiser=SGD(0.5))
    made = bf.Algorithm(model, {"w": bf.Block(pattern)}, (step,), parts=("w",))
    clients = data(1)
    result = bf.simulate(
        made,
        clients,
        rounds=2,
        evaluate_every=None,
        engine=bf.Engine(kernel, workers=1),
        dtype=torch.float64,
        progress=False,
    )
    x, y = clients.to(dtype=torch.float64).train.client(0)
    params = {name: p.detach().double() for name, p in model.named_parameters()}
    for _ in range(4):
        live = {name: p.requires_grad_(name not in frozen) for name, p in params.items()}
        loss = F.cross_entropy(functional_call(model.double(), live, (x,)), y)
        moving = [name for name in live if name not in frozen]
        slopes = dict(
            zip(moving, torch.autograd.grad(loss, [live[name] for name in moving]), strict=True)
        )
        params = {
            name: p.detach() - 0.5 * slopes[name] if name in slopes else p.detach()
            for name, p in params.items()
        }
    assert_close(result.server["w"]["loc"], made.layout("w").ravel(params), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("belief", [MeanField(), FullGaussian()])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_belief_about_weights_alone_trains(kernel, belief):
    """Draws of a layer's weights under a bias that is a point, or that no block covers: every
    kernel agrees with the reference.
    """
    pool = PrecisionWeighted(posterior=belief)
    weights = bf.Block("head.weight", posterior=belief, prior=KEPT, pool=pool)
    for extra in ({}, {"b": bf.Block("head.bias")}):
        parts = ("w", *extra)
        step = Descend(
            Energy(parts, parts, likelihood="mean"), steps=2, draws=3, optimiser=SGD(0.1)
        )
        made = bf.Algorithm(
            mlp(4, hidden=3, outputs=2), {"w": weights, **extra}, (step,), parts=parts
        )
        runs = [
            bf.simulate(
                made,
                data(2),
                rounds=1,
                evaluate_every=None,
                engine=bf.Engine(k, workers=1),
                dtype=torch.float64,
                progress=False,
            )
            for k in ("reference", kernel)
        ]
        assert_close(runs[1].server, runs[0].server, rtol=1e-9, atol=1e-10)


def test_init_takes_the_modules_weights():
    """In the order of its parameters, in the precision asked for; the posterior's tensors travel as
    the pool says.
    """
    model = mlp(2, hidden=3, outputs=2)
    made = algorithm(
        model,
        {
            "body": bf.Block("body.*"),
            "head": bf.Block(
                "head.*",
                posterior=MeanField(init_scale=0.2),
                prior=Normal(
                    centre=server_mean("head"), variance=lambda given, view: torch.ones(1)
                ),
                pool=PrecisionWeighted(),
            ),
        },
    )
    server = made.init(3, dtype=torch.float64)
    assert_close(
        [server["body"]["loc"], server["head"]["loc"]],
        [
            torch.cat([p.detach().flatten() for p in part.parameters()]).double()
            for part in (model.body, model.head)
        ],
    )
    assert_close(
        server["head"]["rho"].exp().log1p(), torch.full((8,), 0.2).double(), rtol=1e-6, atol=0
    )
    assert {t.dtype for entry in server.values() for t in entry.values()} == {torch.float64}
    assert list(server["body"]) == ["loc"]


def test_init_draws_where_it_is_told():
    """standard_normal draws from N(0, scale^2) at an address of the seed and the block's place;
    equal seeds, equal bits.
    """
    model = mlp(30, hidden=100, outputs=2)
    blocks = {name: bf.Block("body.0.weight", start=standard_normal(2.0)) for name in ("a", "b")}
    made = algorithm(model, blocks, parts=("a",))
    first, again, other = made.init(3), made.init(5), made.init(3, seed=1)
    assert torch.equal(first["a"]["loc"], again["a"]["loc"])
    assert not torch.equal(first["a"]["loc"], other["a"]["loc"])
    assert not torch.equal(first["a"]["loc"], first["b"]["loc"])
    double = made.init(1, dtype=torch.float64)["a"]["loc"]
    assert torch.equal(double, first["a"]["loc"].double())
    draws = first["a"]["loc"] / 2.0
    assert abs(float(draws.mean())) < 4 / math.sqrt(3000)
    assert abs(float(draws.var()) - 1) < 4 * math.sqrt(2 / 3000)
    own = algorithm(
        model, {"w": bf.Block("head.bias", start=lambda rng, size: torch.arange(float(size)))}
    )
    assert_close(own.init(1)["w"]["loc"], torch.tensor([0.0, 1.0]))


def test_init_of_a_private_block_is_its_centre():
    """Of what never travels the server only knows where it starts."""
    prior = Normal(centre=server_mean("head"), variance=lambda given, view: torch.ones(1))
    block = bf.Block("head.*", posterior=MeanField(), prior=prior, pool=None, keep=True)
    made = algorithm(mlp(2, hidden=3, outputs=2), {"head": block})
    server = made.init(1)
    assert (set(server["head"]), set(made.rows(server)["head"])) == ({"loc"}, {"loc", "rho"})
    assert "head" not in made.share(server, torch.arange(1))[0]
