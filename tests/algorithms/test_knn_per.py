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
from bayesfl.federation.run.result import Result
from tests.cases import run

K, SCALE = 4, 0.3


@pytest.fixture(scope="module")
def clients() -> bf.data.FederatedData:
    return bf.data.concept_drift("digits", clients=4, seed=0, validation=0.3)


def method(clients: bf.data.FederatedData, **options: object) -> bf.Algorithm:
    # Not ReLU, whose dead units would make many rows equally near.
    torch.manual_seed(0)
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


def losses_of_shares(result: Result, clients: bf.data.FederatedData) -> list[list[torch.Tensor]]:
    """Losses of clients' validation rows under each share, each of a run of its own."""
    found = []
    for share in SHARES:
        fixed = replace(
            result.algorithm, predictor=replace(result.algorithm.predictor, share=share)
        )
        probs = run(fixed, clients).predict(clients.validation).probs
        labels = [clients.validation.client(j)[1] for j in range(4)]
        found.append(
            [-probs[j, : len(y)].gather(1, y[:, None]).log()[:, 0] for j, y in enumerate(labels)]
        )
    return found


def test_a_client_takes_the_share_that_fits_its_own_validation_rows_best(
    clients: bf.data.FederatedData,
):
    result = run(method(clients), clients)
    means = torch.tensor(
        [[float(each.mean()) for each in of] for of in losses_of_shares(result, clients)]
    )
    best = torch.tensor(SHARES, dtype=torch.float64)[means.argmin(0)]
    assert len(set(best.tolist())) > 1
    own = torch.stack([result.client(j)._stored["share"] for j in range(4)])
    assert_close(own, best)
    for j, share in enumerate(best.tolist()):
        fixed = replace(
            result.algorithm, predictor=replace(result.algorithm.predictor, share=share)
        )
        want = run(fixed, clients).predict().probs[j]
        assert_close(result.predict().probs[j], want, equal_nan=True)


def test_a_client_without_validation_rows_takes_the_model_alone(clients: bf.data.FederatedData):
    split = clients.validation
    counts = split.counts * [0, 1, 1, 1]
    held = replace(split, counts=counts, index=split.index[-counts.sum() :])
    some = replace(clients, splits={**clients.splits, "validation": held})
    result = run(method(some), some)
    plain = run(bf.algorithms.fedavg(result.algorithm.model, epochs=1), some)
    assert_close(result.predict().probs[0], plain.predict().probs[0], equal_nan=True)
    none = replace(clients, splits={k: t for k, t in clients.splits.items() if k != "validation"})
    with pytest.raises(ValueError, match="share is chosen on validation data, and the data have"):
        run(method(none), none).predict()


def test_the_share_fits_validation_rows_best(clients: bf.data.FederatedData):
    """Among all, up to one standard error; a share of 0 is the model alone."""
    result = run(method(clients, share="common"), clients)
    losses = [torch.cat(each) for each in losses_of_shares(result, clients)]
    mean = torch.stack(losses).mean(1)
    best, chosen = int(mean.argmin()), SHARES.index(result.tuned)
    assert 0 < best <= chosen
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
    with pytest.raises(ValueError, match="with a trained body"):
        bf.algorithms.knn_per(model)
