"""kNN-Per beside a plain loop over rows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import SHARES
from tests.cases import run

K, SCALE = 4, 0.3


@pytest.fixture(scope="module")
def clients() -> bf.data.FederatedData:
    return bf.data.concept_drift("digits", clients=4, seed=0, validation=0.3)


def method(clients: bf.data.FederatedData, **options: object) -> bf.Algorithm:
    # Not ReLU, whose dead units would make many rows equally near.
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh())
    model = bf.models.SplitModel(body, nn.Linear(6, clients.classes))
    return bf.algorithms.knn_per(model, k=K, scale=SCALE, epochs=1, **options)


def test_probabilities_of_a_plain_loop(clients: bf.data.FederatedData):
    share = 0.35
    result = run(method(clients, share=share), clients)
    net = result.model().double()
    for j in range(4):
        x, y = clients.train.client(j)
        new, _ = clients.test.client(j)
        with torch.no_grad():
            held, seen = net.body(x.double()).numpy(), net.body(new.double()).numpy()
            wanted = (1 - share) * net(new.double()).softmax(-1).numpy()
        for i, row in enumerate(seen):
            apart = [float(((row - h) ** 2).mean()) for h in held]
            near = np.argsort(apart)[:K]
            votes = [math.exp(-apart[n] / SCALE) for n in near]
            for n, vote in zip(near, votes, strict=True):
                wanted[i, int(y[n])] += share * vote / sum(votes)
        found = result.predict(clients.test).probs[j, : len(new)]
        assert_close(found, torch.from_numpy(wanted), atol=1e-9, rtol=0)


def test_the_share_fits_validation_rows_best(clients: bf.data.FederatedData):
    """Among all, up to one standard error; the ends are the rows and the model alone."""
    result = run(method(clients), clients)
    losses = []
    for share in SHARES:
        fixed = replace(
            result.algorithm, predictor=replace(result.algorithm.predictor, share=share)
        )
        probs = run(fixed, clients).predict(clients.validation).probs
        each = [
            -probs[j, : len(y)].gather(1, y[:, None]).log()
            for j in range(4)
            for y in [clients.validation.client(j)[1]]
        ]
        losses.append(torch.cat(each)[:, 0])
    mean = torch.stack(losses).mean(1)
    best, chosen = int(mean.argmin()), SHARES.index(result.tuned)
    assert 0 < best <= chosen < len(SHARES) - 1
    apart = losses[chosen] - losses[best]
    assert float(apart.mean()) <= float(apart.std() / math.sqrt(len(apart))) + 1e-12
    plain = bf.algorithms.fedavg(result.algorithm.model, epochs=1)
    alone = replace(result.algorithm, predictor=replace(result.algorithm.predictor, share=0.0))
    one, other = (run(made, clients).predict(clients.test).probs for made in (plain, alone))
    assert_close(one, other, equal_nan=True)


def test_all_rows_count_where_there_are_few(clients: bf.data.FederatedData):
    x, y = clients.train.client(1)
    few = bf.data.from_arrays([x[:2], x[:9]], [y[:2], y[:9]], test=([x[:3]] * 2, [y[:3]] * 2))
    probs = run(method(clients, share=1.0), few).predict(few.test).probs[0, :3]
    assert_close((probs > 0).sum(-1), torch.full((3,), len(y[:2].unique())))


def test_a_model_that_is_all_head_is_refused(clients: bf.data.FederatedData):
    model = bf.models.mlp(clients.inputs, hidden=(), outputs=clients.classes)
    with pytest.raises(ValueError, match="whose body is trained"):
        bf.algorithms.knn_per(model)
