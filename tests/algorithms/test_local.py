"""Local: nobody hears of anybody."""

from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.cases import SIZES, run


def test_everyone_trains_as_a_federation_of_one(clients: FederatedData, model: nn.Module):
    """In full batches, which draw nothing, a client's model is FedAvg's of it alone, to the
    rounding of a mean; nothing is sent.
    """
    options = {"epochs": 2, "batch_size": None, "optimiser": SGD(0.1)}
    result = run(bf.algorithms.local(model, **options), clients)
    assert not result.algorithm.uplink(result.server)
    for j in range(len(SIZES)):
        alone = run(bf.algorithms.fedavg(model, **options), clients.select([j]))
        assert_close(result.private["w"]["loc"][j], alone.server["w"]["loc"], atol=1e-14, rtol=0)
