"""Fed-RoD as a plain loop, what is measured of it, and for newcomers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.models import SplitModel
from bayesfl.optim import SGD
from tests.cases import run

OPTIONS = {"epochs": 3, "batch_size": None, "optimiser": SGD(0.3, momentum=0.5, weight_decay=0.01)}


def reference(
    network: SplitModel, clients: FederatedData, cohorts: list[list[int]]
) -> tuple[SplitModel, list[nn.Module]]:
    """The method as a plain loop with torch's own SGD: the generic model and the clients' phi."""
    common = copy.deepcopy(network).double()
    phis = [copy.deepcopy(common.head) for _ in range(clients.clients)]
    for phi in phis:
        for p in phi.parameters():
            nn.init.zeros_(p)
    for cohort in cohorts:
        trained, sizes = [], []
        for j in cohort:
            x, y = clients.train.client(j)
            net = copy.deepcopy(common)
            counts = torch.bincount(y, minlength=4).double()
            one, other = (
                torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.5, weight_decay=0.01)
                for part in (net, phis[j])
            )
            for _ in range(3):
                z = net.body(x.double())
                generic = net.head(z)
                weighed = counts * generic.exp()
                balanced = -(weighed.gather(1, y[:, None])[:, 0] / weighed.sum(1)).log().mean()
                personal = F.cross_entropy(generic.detach() + phis[j](z.detach()), y)
                one.zero_grad()
                other.zero_grad()
                balanced.backward()
                personal.backward()
                one.step()
                other.step()
            trained.append(parameters_to_vector(net.parameters()).detach())
            sizes.append(len(y))
        share = torch.tensor(sizes).double() / sum(sizes)
        nn.utils.vector_to_parameters(share @ torch.stack(trained), common.parameters())
    return common, phis


def flat(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("workers", [1, 3])
def test_rounds_as_a_plain_loop(few: FederatedData, network: SplitModel, workers: int):
    """Four rounds; clients stay away, and each lacks a class."""
    engine = bf.Engine(chunk=2, workers=workers)
    algorithm = bf.algorithms.fedrod(network, **OPTIONS)
    result = run(algorithm, few, 4, participation=0.75, sampling="fixed", engine=engine)
    cohorts = [result.settings.cohort(4, t).tolist() for t in range(4)]
    common, phis = reference(network, few, cohorts)
    assert_close(result.server["body"]["loc"], flat(common.body), atol=1e-9, rtol=0)
    assert_close(result.server["head"]["loc"], flat(common.head), atol=1e-9, rtol=0)
    own = torch.stack([flat(phi) for phi in phis])
    assert_close(result.private["phi"]["loc"], own, atol=1e-9, rtol=0)


def test_each_model_is_measured(few: FederatedData, network: SplitModel):
    """Clients predict with the sum of both heads' logits, the server's model with the generic
    one.
    """
    result = run(bf.algorithms.fedrod(network, **OPTIONS), few, 2, evaluate_every=1)
    common, phis = reference(network, few, [[0, 1, 2, 3]] * 2)
    losses: dict[str, list[Tensor]] = {"personal": [], "global": []}
    for j in range(4):
        x, y = few.test.client(j)
        z = common.body(x.double())
        losses["personal"].append(F.cross_entropy(common.head(z) + phis[j](z), y))
        losses["global"].append(F.cross_entropy(common.head(z), y))
    for name, found in losses.items():
        wanted = float(torch.stack(found).mean().detach())
        assert abs(result.history[-1][f"{name}_nll"] - wanted) < 1e-9
    assert result.history[-1]["before_pool_nll"] != result.history[-1]["personal_nll"]


def test_a_newcomer_trains_its_own_head(few: FederatedData, network: SplitModel):
    """From 0, by cross entropy under the generic model that it receives."""
    old, new = few.hold_out(1, seed=0)
    options = {**OPTIONS, "optimiser": SGD(0.3)}
    result = run(bf.algorithms.fedrod(network, adapt_epochs=2, **options), old, 2)
    before = {name: t["loc"].clone() for name, t in result.server.items()}
    found = result.adapt(new).private
    x, y = new.train.client(0)
    leaves = result.algorithm.leaves(("body", "head"), result.server)
    z, generic = result.algorithm.features(leaves, x.double())
    assert z is not None
    weight, bias = torch.zeros(4, 5).double(), torch.zeros(4).double()
    for _ in range(2):
        slope = (generic + z @ weight.T + bias).softmax(1) - torch.eye(4).double()[y]
        weight, bias = weight - 0.3 * slope.T @ z / len(y), bias - 0.3 * slope.mean(0)
    own = torch.cat([weight.flatten(), bias])
    assert_close(found["phi"]["loc"][0], own, atol=1e-9, rtol=0)
    assert_close(found["personal"]["loc"][0], own + before["head"], atol=1e-9, rtol=0)


def test_what_does_not_fit_is_refused(network: SplitModel):
    """A head of several layers, and another likelihood."""
    deep = SplitModel(network.body, nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)))
    with pytest.raises(ValueError, match=r"one nn\.Linear.*got Sequential"):
        bf.algorithms.fedrod(deep)
    with pytest.raises(ValueError, match=r"Categorical\(\), got Linear and Bernoulli"):
        bf.algorithms.fedrod(network, likelihood=bf.likelihoods.Bernoulli())
