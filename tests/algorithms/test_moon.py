"""MOON as a plain loop, and without its contrastive term."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.engine.driver import KernelName
from bayesfl.optim import SGD
from tests.cases import run


def reference(
    model: bf.models.SplitModel, clients: FederatedData, cohorts: list[list[int]]
) -> Tensor:
    """The method as a plain loop, mu = 2 and tau = 0.5, three full-batch steps of torch's SGD."""
    common = copy.deepcopy(model).double()
    before = [copy.deepcopy(common) for _ in range(clients.clients)]
    for cohort in cohorts:
        trained, sizes = [], []
        for j in cohort:
            x, y = clients.train.client(j)
            x, net = x.double(), copy.deepcopy(common)
            optimiser = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
            for _ in range(3):
                optimiser.zero_grad()
                z = net.body(x)
                with torch.no_grad():
                    near, far = common.body(x), before[j].body(x)
                a = torch.cosine_similarity(z, near, dim=1) / 0.5
                b = torch.cosine_similarity(z, far, dim=1) / 0.5
                term = -torch.log(a.exp() / (a.exp() + b.exp())).mean()
                (F.cross_entropy(net.head(z), y) + 2.0 * term).backward()
                optimiser.step()
            before[j] = net
            trained.append(parameters_to_vector(net.parameters()).detach())
            sizes.append(len(y))
        share = torch.tensor(sizes).double() / sum(sizes)
        nn.utils.vector_to_parameters(share @ torch.stack(trained), common.parameters())
    return parameters_to_vector(common.parameters()).detach()


@pytest.mark.parametrize("kernel", ["reference", "live", "layers", "vmap", "auto"])
def test_rounds_as_a_plain_loop(
    model: bf.models.SplitModel, clients: FederatedData, kernel: KernelName
):
    """Three rounds with clients that stay away, by every kernel, with three workers."""
    algorithm = bf.algorithms.moon(
        model, mu=2.0, epochs=3, batch_size=None, optimiser=SGD(0.2, momentum=0.5)
    )
    engine = bf.Engine(kernel, chunk=2, workers=3)
    result = run(algorithm, clients, 3, participation=0.7, engine=engine)
    cohorts = [result.settings.cohort(7, t).tolist() for t in range(3)]
    expected = reference(model, clients, cohorts)
    assert_close(result.server["w"]["loc"], expected, atol=1e-9, rtol=0)


def test_without_its_term_it_is_fedavg(model: nn.Module, clients: FederatedData):
    """And the first round has none, since the model received is the last one, too."""
    options = {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.1)}
    plain = bf.algorithms.fedavg(model, **options)
    for mu, rounds in ((0.0, 3), (5.0, 1)):
        found, wanted = (
            run(method, clients, rounds).server["w"]["loc"]
            for method in (bf.algorithms.moon(model, mu=mu, **options), plain)
        )
        assert_close(found, wanted, atol=1e-9, rtol=0)


def test_a_model_without_a_head_is_refused(clients: FederatedData):
    """It has no features."""
    with pytest.raises(ValueError, match=r"model must be a bf\.models\.SplitModel"):
        bf.algorithms.moon(nn.Sequential(nn.Linear(8, 3)))
