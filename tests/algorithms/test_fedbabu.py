"""FedBABU: a body under a head that stands still."""

import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.algorithms.made import descend, flat, twin
from tests.cases import SIZES, run


def test_fedbabu_trains_under_one_head_and_finetunes_to_predict(
    clients: FederatedData, model: nn.Module
):
    """The head that all share is the module's to the last round; predictions come from a fine-tuned
    copy.
    """
    algorithm = bf.algorithms.fedbabu(model, epochs=2, batch_size=10, finetune_epochs=2)
    result = run(algorithm, clients, rounds=3)
    assert torch.equal(result.server["head"]["loc"], flat(twin(model.head)))
    assert "head" not in result.private
    assert set(algorithm.uplink(algorithm.init(1))) == {"body.loc"}
    plain = bf.simulate(
        bf.Algorithm(model, algorithm.blocks, algorithm.phases, parts=algorithm.parts),
        clients, rounds=3, dtype=torch.float64, evaluate_every=None, seed=2, progress=False,
    )  # fmt: skip
    assert torch.equal(plain.server["body"]["loc"], result.server["body"]["loc"])
    assert not torch.equal(plain.predict().probs, result.predict().probs)


def test_fedbabu_moves_the_body_alone(clients: FederatedData, model: nn.Module):
    """Two full-batch steps of the body under the common head, which no step changes."""
    fedbabu = bf.algorithms.fedbabu(model, epochs=2, batch_size=None, optimiser=SGD(0.3))
    result = run(fedbabu, clients)
    nets = [twin(model) for _ in SIZES]
    for j, net in enumerate(nets):
        for _ in range(2):
            descend(net.body, net, clients.train.client(j), 0.3)
    bodies = torch.stack([flat(net.body) for net in nets])
    assert_close(result.server["body"]["loc"], bodies.mean(0), atol=1e-12, rtol=0)
