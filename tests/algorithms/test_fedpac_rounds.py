"""Whole rounds of FedPAC: as a plain loop, at the limits that are other methods, and for those who
are absent.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.models import SplitModel
from bayesfl.optim import SGD
from tests.algorithms.made import CLASSES, WIDTH, solved
from tests.cases import run


def reference(
    network: SplitModel, clients: FederatedData, cohorts: list[list[int]], lam: float
) -> dict[str, Any]:
    """The method as a plain loop with torch's own SGD: full batches, 2 head steps and 3
    body steps.
    """
    model = copy.deepcopy(network).double()
    body, sizes = copy.deepcopy(model.body.state_dict()), clients.train.counts
    heads = [copy.deepcopy(model.head.state_dict()) for _ in range(clients.clients)]
    centroids: dict[int, Tensor] = {}
    data = [(x.double(), y) for x, y in (clients.train.client(j) for j in range(clients.clients))]
    for t, cohort in enumerate(cohorts):
        bodies, trained, h, v = [], [], [], []
        sums = torch.zeros(CLASSES, WIDTH).double()
        counts = torch.zeros(CLASSES).double()
        for j in cohort:
            x, y = data[j]
            model.body.load_state_dict(body)
            model.head.load_state_dict(heads[j])
            with torch.no_grad():
                z = model.body(x)
            p = [float((y == k).double().mean()) for k in range(CLASSES)]
            means = [
                z[y == k].mean(0) if p[k] else torch.zeros(WIDTH).double() for k in range(CLASSES)
            ]
            h.append(torch.cat([p[k] * means[k] for k in range(CLASSES)]))
            square = sum(
                p[k] * z[y == k].square().sum(1).mean() - p[k] ** 2 * means[k].square().sum()
                for k in range(CLASSES)
                if p[k]
            )
            v.append(torch.as_tensor(square) / len(x))
            target = torch.stack([centroids.get(int(k), means[int(k)]) for k in y])
            sgd = torch.optim.SGD(model.head.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
            for _ in range(2):
                sgd.zero_grad()
                F.cross_entropy(model(x), y).backward()
                sgd.step()
            sgd = torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
            for _ in range(3):
                sgd.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if t > 0:
                    loss = loss + lam * F.mse_loss(model.body(x), target)
                loss.backward()
                sgd.step()
            bodies.append(copy.deepcopy(model.body.state_dict()))
            trained.append(copy.deepcopy(model.head.state_dict()))
            with torch.no_grad():
                z = model.body(x)
            counts += torch.bincount(y, minlength=CLASSES)
            sums.index_add_(0, y, z)
        n = float(sum(sizes[j] for j in cohort))
        body = {
            key: sum(sizes[j] / n * b[key] for j, b in zip(cohort, bodies, strict=True))
            for key in body
        }
        weights = []
        for i, j in enumerate(cohort):
            a = solved(torch.stack(h), torch.stack(v), h[i])
            heads[j] = {
                key: sum(w * head[key] for w, head in zip(a, trained, strict=True))
                for key in heads[j]
            }
            weights.append(a)
        centroids |= {k: sums[k] / counts[k] for k in range(CLASSES) if counts[k]}
    return {
        "body": body,
        "heads": heads,
        "weights": torch.stack(weights),
        "centroids": centroids,
    }


@pytest.mark.parametrize(("participation", "seed"), [(1.0, 0), (0.75, 0), (0.5, 3)])
def test_rounds_as_a_plain_loop(
    few: FederatedData, network: SplitModel, participation: float, seed: int
):
    """Four rounds, clients that stay away, a class of which the server hears late and one of which
    it never does.
    """
    head, body = (SGD(rate, momentum=0.5, weight_decay=0.01) for rate in (0.2, 0.1))
    options: dict[str, Any] = {
        "head_optimiser": head,
        "body_optimiser": body,
        "batch_size": None,
        "lam": 0.8,
    }
    algorithm = bf.algorithms.fedpac(network, head_epochs=2, body_epochs=3, **options)
    result = run(algorithm, few, 4, participation=participation, sampling="fixed", seed=seed)
    cohorts = [result.settings.cohort(4, t).tolist() for t in range(4)]
    if participation == 0.5:
        assert 3 not in cohorts[0]
        assert any(3 in cohort for cohort in cohorts[1:])
    expected = reference(network, few, cohorts, lam=0.8)

    def flat(state: dict[str, Tensor]) -> Tensor:
        return torch.cat([state[key].flatten() for key in state])

    assert_close(result.server["body"]["loc"], flat(expected["body"]), atol=1e-10, rtol=0)
    assert_close(
        result.server["head"]["each"],
        torch.stack([flat(head) for head in expected["heads"]]),
        atol=1e-10,
        rtol=0,
    )
    assert_close(result.server["head"]["weights"], expected["weights"], atol=1e-9, rtol=0)
    assert result.server["head"]["cohort"].tolist() == cohorts[-1]
    for k, centroid in expected["centroids"].items():
        assert_close(result.server["centroids"][k], centroid, atol=1e-10, rtol=0)
    assert result.server["seen"].tolist() == [k in expected["centroids"] for k in range(CLASSES)]


def test_a_run_that_starts_from_another_goes_on_with_its_centroids(
    clients: FederatedData, model: nn.Module
):
    """Without chance, its first round is the next round of the run before: with the pull, which
    matters.
    """
    free, pulled = (
        bf.algorithms.fedpac(model, head_epochs=1, body_epochs=2, batch_size=None, lam=lam)
        for lam in (0.0, 0.7)
    )
    before = run(pulled, clients, 2)
    found, other = (
        run(method, clients, 1, seed=9, start=before).server for method in (pulled, free)
    )
    whole = run(pulled, clients, 3).server
    for block in ("body", "head"):
        assert_close(found[block]["loc"], whole[block]["loc"], atol=1e-12, rtol=0)
    assert (found["body"]["loc"] - other["body"]["loc"]).abs().max() > 1e-5


def test_the_two_evaluations_of_a_round(clients: FederatedData, model: nn.Module):
    """`personal_` is the common body under the mixed head, `before_pool_` the client's own models
    after local training.
    """
    body = SGD(0.2, momentum=0.5, weight_decay=5e-4)
    algorithm = bf.algorithms.fedpac(model, batch_size=None, head_epochs=3, body_optimiser=body)
    result = run(algorithm, clients, 2, evaluate_every=1)
    x = clients.test.client(4)[0]
    leaves = algorithm.layout("body").leaves(result.server["body"]["loc"])
    leaves |= algorithm.layout("head").leaves(result.server["head"]["each"][4])
    probs = algorithm.outputs(leaves, x.double()).softmax(-1)
    assert_close(result.predict().client(4).probs, probs, atol=1e-12, rtol=0)
    # Of one client alone pooling changes nothing, and its head is mixed with no other.
    alone = run(algorithm, clients.select([4]), 2, evaluate_every=1).history
    assert_close(
        torch.tensor(alone["before_pool_nll"]),
        torch.tensor(alone["personal_nll"]),
        atol=1e-12,
        rtol=0,
    )
    assert result.history["before_pool_nll"][-1] != result.history["personal_nll"][-1]
