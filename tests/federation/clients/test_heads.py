"""Heads on trained bodies: predictions, newcomers, files, and sums that hide clients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Gaussian
from bayesfl.posteriors import FullGaussian
from bayesfl.posteriors.heads import Head
from bayesfl.posteriors.linearised import predictive
from tests.cases import Turned, numbers


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    return bf.data.labels_per_client("digits", clients=6, labels=3, validation=0.2, max_size=60)


def own_of(result: Result) -> Tensor:
    """The means of all clients' heads, [J, D]."""
    return torch.stack([result.client(j).view["own_head"]["loc"] for j in range(6)])


def trained(name: str, clients: FederatedData) -> tuple[Any, Result]:
    model = bf.models.mlp(clients.inputs, hidden=3, outputs=clients.outputs)
    method = getattr(bf.algorithms, name)(model)
    settings: dict[str, Any] = {"rounds": 3, "progress": False, "evaluate_every": None}
    return method, bf.simulate(method, clients, **settings, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ditto", "pfedvem"])
def test_a_head_of_each_clients_own(name: str, clients: FederatedData, tmp_path: Any):
    """Of a network that is one block, and of one in two. A newcomer with the same rows gets the
    same; files and secure sums keep the numbers.
    """
    method, result = trained(name, clients)
    found = result.heads()
    assert list(found.answers) == ["heads", "heads-scaled"]
    prior, scale = found.answers["heads"], found.answers["heads-scaled"]["scale"]
    probs, own = found.predict().probs, own_of(found)
    assert probs is not None
    assert not found.private
    assert own.shape == (6, prior["centre"].shape[1])
    algorithm, layout = found.algorithm, found.algorithm.layout("own_head")
    body = algorithm.leaves(("body",), {"body": algorithm.centre("body", found.server)})
    x, y = clients.to("cpu", torch.float64).train.client(2)

    modes = []
    for centre, tau in zip(prior["centre"], scale * prior["tau"], strict=True):

        def energy(w: Tensor, centre: Tensor = centre, tau: Tensor = tau) -> Tensor:
            losses = algorithm.losses({**body, **layout.leaves(w)}, {"x": x, "y": y})
            return losses.sum() + ((w - centre) / tau).square().sum() / 2

        w = own[2]
        for _ in range(4):
            slope, hessian = torch.func.grad(energy)(w), torch.func.hessian(energy)(w)
            w = w - torch.linalg.solve(hessian, slope)
        modes.append(w)
    assert_close(own[2], prior["weight"] @ torch.stack(modes), rtol=0, atol=1e-5)
    novel = found.adapt(clients)
    assert novel.after == found.after
    assert_close(novel.predict().probs, probs, rtol=0, atol=1e-12, equal_nan=True)
    rows = clients.test.client(2)[0]
    at_mean = algorithm.outputs({**body, **layout.leaves(own[2])}, rows.double()).softmax(-1)
    assert_close(found.predict(draws=0).client(2).probs, at_mean, rtol=0, atol=1e-9)
    found.save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", found.algorithm, clients)
    np.testing.assert_array_equal(loaded.predict().probs, found.predict().probs)
    for given in (method, bf.with_heads(method)):
        again = bf.load(tmp_path / "run", given, clients)
        np.testing.assert_array_equal(again.predict().probs, probs)
    with pytest.raises(ValueError, match="needs its training data"):
        bf.load(tmp_path / "run", method).client(2)
    hidden = result.heads(aggregation=bf.SecureSum(range=2.0**20))
    assert_close(own_of(hidden), own, rtol=0, atol=1e-3)
    single = found.client(clients.client_names[2])
    single.save(tmp_path / "client")
    made = (method, bf.with_heads(method), method.model)
    for one in (single, *(bf.load_client(tmp_path / "client", one) for one in made)):
        assert_close(one.predict(rows).probs, probs[2, : len(rows)], rtol=0, atol=1e-9)
    single.save(tmp_path / "means", plug_in=True)
    means = bf.load_client(tmp_path / "means", method.model)
    assert_close(means.predict(rows).probs, at_mean, rtol=0, atol=1e-9)
    rule: Any = algorithm.predictor
    head, belief = Head(10, True, algorithm.likelihood), single.view["own_head"]
    root = FullGaussian().cholesky(belief)
    of_head = rule.rows(algorithm, single.view, rows.double(), y)
    outputs = of_head.features @ head.matrix(own[2]).T
    spread = head.spread(of_head, root @ root.T)
    width = found.answers["heads-scaled"]["width"]
    wanted = predictive(algorithm.likelihood, outputs, width**2 * spread)["probs"]
    assert_close(found.predict().client(2).probs, wanted, rtol=0, atol=1e-9)
    draws = found.samples(2, "own_head", draws=500).draws[0]
    away = torch.linalg.solve_triangular(root, (draws - own[2]).mT, upper=False)
    assert_close(away.square().mean(), torch.ones(()).double(), rtol=0, atol=0.03)
    posterior = found.samples(2, "own_head", draws=30).to_arviz().posterior
    assert {"head.weight", "head.bias"} == set(posterior.data_vars)


@pytest.mark.slow
def test_heads_are_made_once(clients: FederatedData, monkeypatch: pytest.MonkeyPatch):
    """But where they take too many bytes; the means of the head that all share are not theirs."""
    asked = trained("fedavg", clients)[1].heads()
    unasked = replace(asked, after=())
    shared = unasked.predict(draws=0).probs
    assert list(unasked.answers) == ["heads", "heads-scaled"]
    made, plain = [], Head.posterior
    monkeypatch.setattr(Head, "posterior", lambda *args: made.append(1) or plain(*args))
    first, again = (unasked.predict().probs for _ in range(2))
    assert len(made) == 6
    assert_close(again, first, rtol=0, atol=0, equal_nan=True)
    assert_close(unasked.predict(draws=0).probs, shared, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr("bayesfl.federation.clients.predict.KEPT", 3 * 8 * 40**2)
    some = replace(asked)
    assert_close(some.predict().probs, first, rtol=0, atol=0, equal_nan=True)
    some.predict()
    assert len(made) == 6 + 6 + 4


def test_a_network_that_declares_its_head_first():
    """It is refused; cut into body and head, it has heads."""
    xs, ys = zip(*((numbers(6, 3, seed=j), numbers(6, seed=9 + j)) for j in range(3)), strict=True)
    clients = bf.data.from_arrays(xs, ys, task="regression", seed=0)

    def heads(model: torch.nn.Module) -> Result:
        method = bf.algorithms.fedavg(model, likelihood=Gaussian(0.5))
        return bf.simulate(method, clients, rounds=1, progress=False, evaluate_every=None).heads()

    with pytest.raises(ValueError, match=r"declares last, \('body.*declare the one that does last"):
        heads(Turned(3, 2, 1))
    cut = heads(bf.models.split(Turned(3, 2, 1), head="head"))
    assert cut.algorithm.layout("own_head").names == ("head.weight", "head.bias")


def test_what_has_no_head(clients: FederatedData):
    with pytest.raises(ValueError, match="no common body"):
        bf.with_heads(bf.algorithms.fedem(bf.models.mlp(clients.inputs, outputs=10)))


class Twice(nn.Module):
    """A layer that runs twice, under one name or two."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two, self.names = self.one if names == 2 else None, names
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        again = self.one if self.two is None else self.two
        return self.head(torch.tanh(again(torch.tanh(self.one(x)))))


def test_a_body_that_has_a_layer_in_two_places():
    """Its heads are those of the same network with one name."""

    def probs(names: int) -> Tensor:
        torch.manual_seed(0)
        method = bf.algorithms.fedavg(Twice(names), epochs=1, batch_size=8)
        xs = [numbers(30, 4, seed=j) for j in range(2)]
        data = bf.data.from_arrays(xs, [(x[:, 0] > 0).long() for x in xs], validation=0.3)
        result = bf.simulate(method, data, rounds=1, progress=False, dtype=torch.float64)
        found = result.heads().predict().probs
        assert found is not None
        return found

    assert torch.equal(probs(2), probs(1))
