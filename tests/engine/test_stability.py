"""Limits of stable steps, against the eigenvalues of their linear maps, and curvatures, against
whole matrices.
"""

import copy
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.curvature import Curvature
from bayesfl.data import FederatedData
from bayesfl.engine import stability
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, rate_limit
from tests.cases import run


def radius(
    rate: float, momentum: float, curvature: float, precision: float, *, prox: bool
) -> float:
    """Return the spectral radius of one step of velocity and weight, about the minimum of a
    quadratic with its centre there.
    """
    pull = 0.0 if prox else precision
    shrink = 1 / (1 + rate / (1 - momentum) * precision) if prox else 1.0
    velocity = np.array([momentum, curvature + pull])
    weight = (np.array([0.0, 1.0]) - rate * velocity) * shrink
    return float(np.abs(np.linalg.eigvals(np.stack([velocity, weight]))).max())


@pytest.mark.parametrize("prox", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("curvature", "precision"), [(30.0, 0.5), (500.0, 3.0), (40.0, 0.0)])
def test_the_limit_is_that_of_the_linear_map(
    prox: bool, momentum: float, curvature: float, precision: float
):
    """Below it the map contracts, above it does not."""
    most = rate_limit(curvature, precision, momentum, prox=prox)
    assert most < torch.inf
    assert radius(0.999 * most, momentum, curvature, precision, prox=prox) < 1
    assert radius(1.001 * most, momentum, curvature, precision, prox=prox) > 1


def test_a_tie_that_is_solved_may_be_of_any_strength():
    """Where it outweighs the curvature, no rate diverges."""
    assert rate_limit(3.0, 2.0, 0.5, prox=True) == rate_limit(0.0, 0.0, 0.5) == torch.inf
    assert all(radius(rate, 0.5, 3.0, 2.0, prox=True) < 1 for rate in (0.1, 10.0, 1000.0))


def started(algorithm: bf.Algorithm, clients: FederatedData, client: int) -> tuple[Any, Any, Any]:
    """Return what a client has at the start of round 1, in float64: what was sent, its view, and
    all its examples.
    """
    x, y = clients.train.client(client)
    n = torch.tensor(float(len(x)), dtype=torch.float64)
    server = algorithm.init(clients.clients, dtype=torch.float64)
    beliefs = {name: algorithm.centre(name, server) for name in algorithm.blocks}
    batch = {"x": x.double(), "y": y, "weight": torch.ones(len(x), dtype=torch.float64)}
    return algorithm.given(server, 0, 1), beliefs | {"n": n}, batch


def exact(algorithm: bf.Algorithm, view: Any, batch: Any) -> float:
    """Return the largest eigenvalue of the Hessian of the summed loss in the head's weights."""

    def loss(head: torch.Tensor) -> torch.Tensor:
        leaves = algorithm.leaves(algorithm.parts, view | {"head": {"loc": head}})
        return algorithm.losses(leaves, batch).sum()

    loss(view["head"]["loc"])  # makes the model's copy in float64, which a transform may not
    return float(torch.linalg.eigvalsh(torch.func.hessian(loss)(view["head"]["loc"])).max())


WEIGHTED = (
    Categorical(),
    Categorical(weights=(100.0, 1.0, 1.0)),
    Categorical((0.2, 5.0, 1.0)),
)


@pytest.mark.parametrize("likelihood", WEIGHTED, ids=str)
@pytest.mark.parametrize("scale", ["sum", "mean"])
def test_the_curvature_is_that_of_the_heads_hessian(
    clients: FederatedData, scale: Any, likelihood: Categorical
):
    """The largest eigenvalue in the head's weights, summed over the data or tempered by 1 / n, with
    class weights.
    """
    algorithm = bf.algorithms.pfedmap(
        bf.models.mlp(8, hidden=6, outputs=3, seed=3), likelihood_scale=scale, likelihood=likelihood
    )
    given, view, batch = started(algorithm, clients, 1)
    phase = algorithm.phases[0]
    found = float(
        stability.largest(algorithm, phase, given, view, batch) * phase.energy.scales(view["n"])[0]
    )
    assert_close(
        found,
        exact(algorithm, view, batch) / (1 if scale == "sum" else len(batch["x"])),
        rtol=1e-3,
        atol=0.0,
    )


@pytest.mark.parametrize("kind", ["frozen bias", "activation in the head"])
def test_heads_of_which_not_all_is_trained(clients: FederatedData, kind: str):
    """A bias that no block covers adds to the outputs, and not to their change; behind an
    activation the inputs of the head's last layer are what it makes of the features.
    """
    model = bf.models.mlp(8, hidden=6, outputs=3, seed=3)
    if kind == "frozen bias":
        model.head.bias.requires_grad_(False).copy_(torch.tensor([3.0, 0.0, -2.0]))
    else:
        model = bf.models.SplitModel(model.body, nn.Sequential(nn.Tanh(), model.head))
    algorithm = bf.algorithms.pfedmap(model)
    assert stability.watched(algorithm.phases[0], algorithm)
    given, view, batch = started(algorithm, clients, 1)
    found = float(
        stability.largest(algorithm, algorithm.phases[0], given, view, batch) * len(batch["x"])
    )
    assert_close(found, exact(algorithm, view, batch), rtol=1e-3, atol=0.0)


def test_saturated_outputs_have_no_curvature(clients: FederatedData):
    """It is 0 and not NaN, so that the tie alone is judged."""
    model = bf.models.mlp(8, hidden=(), outputs=3)
    with torch.no_grad():
        model.get_parameter("head.weight").zero_()
        model.get_parameter("head.bias").copy_(torch.tensor([1e4, 0.0, 0.0]))
    algorithm = bf.algorithms.pfedmap(model)
    given, view, batch = started(algorithm, clients, 1)
    assert float(stability.largest(algorithm, algorithm.phases[0], given, view, batch)) == 0


@pytest.mark.parametrize("prox", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("share", [0.1, 3.0])
def test_what_the_warning_names_fits(
    clients: FederatedData, prox: bool, momentum: float, share: float
):
    """The rate solves the limit with lambda, the tie's precision and the momentum; so does the tie,
    where this rate has room for one.
    """
    model = bf.models.mlp(8, hidden=6, outputs=3, seed=3)
    given, view, batch = started(bf.algorithms.pfedmap(model), clients, 1)
    curvature = exact(bf.algorithms.pfedmap(model), view, batch)
    precision = curvature * (share * (1 - momentum) / (1 + momentum) / 4 if prox else share)
    over = 1.2 * rate_limit(curvature, precision, momentum, prox=prox)
    made = bf.algorithms.pfedmap(model, precision=precision, head_optimiser=SGD(1e-9, momentum))
    phase = replace(made.phases[0], optimiser=SGD(over, momentum), prox=prox)
    words = stability.if_unstable(made, phase, given, view, batch, "client 1")
    assert re.match(r"round 1: .*and these weights", words)
    rate = float(words.split("a rate below ")[1].split(" ")[0])
    if prox:
        assert_close(
            rate * curvature,
            (1 + momentum) * (2 + rate * precision / (1 - momentum)),
            rtol=0.02,
            atol=0.0,
        )
    else:
        assert_close(rate * (curvature + precision), 2 * (1 + momentum), rtol=0.01, atol=0.0)
    if prox or share < 1:
        # A weaker tie helps no steps that solve for it, nor where the data alone are too much.
        assert "a prior precision below" not in words
        return
    limits = words.split("a prior precision below ")[1].split(" (")[0]
    tie, scale = limits.split(", a prior scale above ")
    assert_close(over * (curvature + float(tie)), 2 * (1 + momentum), rtol=0.01, atol=0.0)
    assert_close(float(scale), float(tie) ** -0.5, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("kind", ["pfedmap", "pfedvem"])
def test_unstable_steps_are_warned_of(model: nn.Module, clients: FederatedData, kind: str):
    """Once in a run, with the client's name and a rate that fits, which is then silent."""
    make = getattr(bf.algorithms, kind)
    options: dict[str, Any] = {"precision": 0.1} if kind == "pfedmap" else {"init_scale": 3.0}
    with pytest.warns(
        UserWarning, match=r"round 1: .*'head' of client.*rate 1 .*below 0\."
    ) as caught:
        run(make(model, head_optimiser=SGD(1.0, momentum=0.9), **options), clients, rounds=4)
    (text,) = [str(one.message) for one in caught if "unstable" in str(one.message)]
    fits = float(text.split("below ")[1].split(" ")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(make(model, head_optimiser=SGD(fits / 10, momentum=0.9)), clients, rounds=2)


def test_what_is_not_looked_at(model: nn.Module):
    """Steps on other blocks, in mini-batches, by other optimisers, or without a tie."""
    method = bf.algorithms.pfedmap(model)
    head, body = method.phases
    untied = bf.algorithms.fedrep(model, batch_size=None)
    assert stability.watched(head, method)
    for other, phase in (
        (method, body),
        (method, replace(head, batch_size=10)),
        (method, replace(head, optimiser=bf.optim.Adam())),
        (untied, untied.phases[0]),
    ):
        assert not stability.watched(phase, other)
    assert [round for round in range(20) if stability.is_due(round)] == [0, 1, 3, 7, 15]


class Squashed(nn.Linear):
    """Linear by name."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute outputs that saturate."""
        return super().forward(input).tanh()


def hooked() -> nn.Linear:
    """A layer with a hook that squashes what it computes."""
    layer = nn.Linear(8, 3)
    layer.register_forward_hook(lambda module, inputs, outputs: outputs.tanh())
    return layer


OTHERS = {
    "subclass": lambda: Squashed(8, 3),
    "hook": hooked,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 3)),
    "inside": lambda: nn.Sequential(nn.Tanh(), hooked()),
    "norm": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_heads_that_are_no_layers_of_torch(kind: str):
    """They are not looked at."""
    made = bf.algorithms.pfedmap(bf.models.SplitModel(nn.Linear(8, 8), OTHERS[kind]()))
    assert not stability.watched(made.phases[0], made)


def test_heads_of_several_layers(clients: FederatedData):
    """They have the curvature of Gauss and Newton; outputs that are not finite have none."""
    torch.manual_seed(3)
    head = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    algorithm = bf.algorithms.pfedmap(bf.models.SplitModel(nn.Linear(8, 6), head))
    phase = algorithm.phases[0]
    assert stability.watched(phase, algorithm)
    given, view, batch = started(algorithm, clients, 1)
    body, own = (copy.deepcopy(part) for part in algorithm.network(view).children())
    ggn = Curvature(own.requires_grad_()).ggn(body(batch["x"]))
    whole = torch.linalg.eigvalsh(ggn)[-1]
    found = stability.largest(algorithm, phase, given, view, batch) * len(batch["x"])
    assert_close(found, whole, rtol=1e-3, atol=0.0)
    view["head"]["loc"].fill_(torch.nan)
    assert not stability.if_unstable(algorithm, phase, given, view, batch, "client 1")


def test_a_dead_body_is_named(clients: FederatedData):
    """Features that are the same for all examples, if more than nine in ten are; a body that is
    alive is silent.
    """
    model = bf.models.mlp(8, hidden=20, outputs=3, seed=3)
    lone = dict(model.named_parameters())["body.0.bias"]
    words = r"round 1: 19 of the 20 features .*of client 1, .*init_scale.*body_optimiser"
    for alive in (1, 2, 20):
        with torch.no_grad():
            lone.copy_(torch.where(torch.arange(20) < alive, 10.0, -1e4))
        algorithm = bf.algorithms.pfedmap(model)
        found = started(algorithm, clients, 1)
        said = stability.if_dead(algorithm, algorithm.phases[0], *found, "client 1")
        assert bool(said) == (alive == 1) == bool(re.search(words, said))


def test_where_a_dead_body_is_not_looked_for(clients: FederatedData):
    """A client of few examples, whose features may be equal by chance; a model that is all head,
    whose features are the inputs.
    """
    body, flat = bf.models.mlp(8, hidden=6, outputs=3), bf.models.mlp(8, hidden=(), outputs=3)
    with torch.no_grad():
        body.get_parameter("body.0.bias").fill_(-1e4)
    for model, rows in ((body, 9), (flat, 20)):
        algorithm = bf.algorithms.pfedmap(model)
        given, view, batch = started(algorithm, clients, 1)
        few = {name: t[:1].expand(rows, *t.shape[1:]) for name, t in batch.items()}
        assert not stability.if_dead(algorithm, algorithm.phases[0], given, view, few, "client 1")
