"""Heads on trained bodies: predictions, newcomers, files, and sums that hide clients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    return bf.data.labels_per_client("digits", clients=6, labels=3, validation=0.2, max_size=60)


def trained(name: str, clients: FederatedData) -> tuple[Any, Result]:
    model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.outputs)
    method = getattr(bf.algorithms, name)(model)
    settings: dict[str, Any] = {"rounds": 3, "progress": False, "evaluate_every": None}
    return method, bf.simulate(method, clients, **settings, dtype=torch.float64)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "ditto", "pfedvem")]


@pytest.mark.parametrize("name", ["fedper", *SLOW])
def test_a_head_of_each_clients_own(name: str, clients: FederatedData, tmp_path: Any):
    """A newcomer with the same rows gets the same; files and secure sums keep the numbers."""
    method, result = trained(name, clients)
    found = result.heads(draws=20)
    prior = found.server["prior"]
    mean = replace(found, algorithm=bf.with_heads(method, draws=0))
    probs = mean.predict().probs
    own = found.private["own_head"]["loc"]
    assert probs is not None
    assert own.shape == (6, prior["centre"].numel())
    algorithm, layout = found.algorithm, found.algorithm.layout("own_head")
    body = algorithm.leaves(("body",), {"body": algorithm.centre("body", found.server)})
    x, y = clients.to("cpu", torch.float64).train.client(2)

    def energy(w: torch.Tensor) -> torch.Tensor:
        losses = algorithm.losses({**body, **layout.leaves(w)}, {"x": x, "y": y})
        return losses.sum() + ((w - prior["centre"]) / prior["tau"]).square().sum() / 2

    assert torch.func.grad(energy)(own[2]).abs().max() < 1e-4
    novel = found.adapt(clients)
    torch.testing.assert_close(novel.private["own_head"]["loc"], own, rtol=0, atol=1e-12)
    found.save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", found.algorithm, clients)
    np.testing.assert_array_equal(loaded.predict().probs, found.predict().probs)
    again = bf.load(tmp_path / "run", bf.with_heads(method, draws=found.algorithm.draws), clients)
    np.testing.assert_array_equal(again.predict().probs, found.predict().probs)
    hidden = result.heads(draws=20, aggregation=bf.SecureSum(range=2.0**20))
    assert hidden.algorithm.draws == found.algorithm.draws
    torch.testing.assert_close(hidden.private["own_head"]["loc"], own, rtol=0, atol=1e-3)
    single = found.client(clients.client_names[2])
    rows = clients.test.client(2)[0]
    np.testing.assert_allclose(
        single.predict(rows, draws=0).probs, probs[2, : len(rows)], rtol=0, atol=1e-9
    )
    posterior = found.to_arviz(2, "own_head", draws=30).posterior
    assert {"head.weight", "head.bias"} == set(posterior.data_vars)


def test_what_has_no_head(clients: FederatedData):
    with pytest.raises(ValueError, match="no body in common"):
        bf.with_heads(bf.algorithms.fedem(bf.models.mlp(clients.inputs, outputs=10)))
