"""APFL at the ends of alpha, and against a plain loop."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_apfl_at_the_ends_of_alpha(clients: FederatedData, model: nn.Module, alpha: float):
    """At 0 clients predict with FedAvg's model, at 1 with local training's."""
    options = {"epochs": 2, "batch_size": None, "optimiser": SGD(0.05)}
    apfl = bf.algorithms.apfl(model, alpha=alpha, adaptive=False, **options)
    mixed = run(apfl, clients, rounds=3)
    if alpha:
        alone = run(bf.algorithms.local(model, **options), clients, rounds=3)
        assert_close(mixed.private["v"]["loc"], alone.private["w"]["loc"], atol=1e-12, rtol=0)
        assert_close(mixed.predict().probs, alone.predict().probs, equal_nan=True)
    else:
        common = mixed.server["w"]["loc"]
        probs = mixed.predict().probs
        for j in range(clients.clients):
            found = nn.utils.parameters_to_vector(mixed.client(j).model().parameters())
            assert_close(found.double(), common, atol=1e-6, rtol=0)
        assert bool(probs.nansum() > 0)


def test_apfl_is_its_paper(regressions: FederatedData):
    """A plain loop in float64 of the three steps, all from the same values, with a weight decay;
    the clip holds one alpha at 1.
    """
    lr, decay, first, w0 = 0.1, 0.01, 0.875, torch.full((1, DIM), 0.4)
    algorithm = bf.algorithms.apfl(
        linear_only(w0),
        alpha=first,
        epochs=3,
        batch_size=None,
        optimiser=SGD(lr, weight_decay=decay),
        likelihood=Gaussian(),
    )
    result = run(algorithm, regressions, rounds=4)
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()
    common, v, alpha = w0.double()[0], w0.double().expand(4, -1).clone(), [first] * 4
    clipped = 0
    for _ in range(4):
        ends = []
        for j in range(4):
            w, own = common, v[j]
            for _ in range(3):
                vbar = alpha[j] * own + (1 - alpha[j]) * w
                slope = (a[j] @ vbar - b[j]) / n[j]
                wish = alpha[j] - lr * float((own - w) @ slope)
                own, w = (
                    own - lr * (alpha[j] * slope + decay * own),
                    w - lr * ((a[j] @ w - b[j]) / n[j] + decay * w),
                )
                alpha[j] = min(max(wish, 0.0), 1.0)
                clipped += alpha[j] != wish
            v[j] = own
            ends.append(w)
        common = torch.stack(ends).mean(0)
    assert 0 < clipped < 48
    assert_close(result.server["w"]["loc"], common, atol=1e-12, rtol=0)
    assert_close(result.private["v"]["loc"], v, atol=1e-12, rtol=0)
    assert_close(result.private["alpha"], torch.tensor(alpha).double(), atol=1e-12, rtol=0)
    x, _ = regressions.train.client(1)
    vbar = alpha[1] * v[1] + (1 - alpha[1]) * common
    assert_close(result.client(1).predict(x.double()).mean[..., 0], x.double() @ vbar)


def test_apfl_learns_alpha_where_told(clients: FederatedData, model: nn.Module):
    """Otherwise every client keeps it."""
    for adaptive in (True, False):
        method = bf.algorithms.apfl(model, adaptive=adaptive, epochs=2, optimiser=SGD(0.1))
        found = run(method, clients, rounds=2).private["alpha"]
        assert bool((found == 0.5).all()) is not adaptive
