"""FedBABU: a body under a head that stands still."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.phases import Once
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.cases import SIZES, run


def test_fedbabu_trains_under_one_head_and_finetunes_to_predict(
    clients: FederatedData, model: nn.Module
):
    """The head that all share is the module's to the last round; predictions come from a fine-tuned
    copy.
    """
    algorithm = bf.algorithms.fedbabu(model, epochs=2, batch_size=10, finetune_epochs=2)
    result = run(algorithm, clients, rounds=3)
    head = torch.cat([p.detach().double().flatten() for p in model.head.parameters()])
    assert torch.equal(result.server["head"]["loc"], head)
    assert "head" not in result.private
    assert set(algorithm.uplink(algorithm.init(1))) == {"body.loc"}
    plain = bf.simulate(
        bf.Algorithm(model, algorithm.blocks, algorithm.phases, parts=algorithm.parts),
        clients, rounds=3, dtype=torch.float64, evaluate_every=None, seed=2, progress=False,
    )  # fmt: skip
    assert torch.equal(plain.server["body"]["loc"], result.server["body"]["loc"])
    assert not torch.equal(plain.predict().probs, result.predict().probs)


def test_fedbabu_moves_the_body_alone(clients: FederatedData, model: nn.Module):
    """Two full-batch steps of the body under the common head, which a client has unchanged until it
    fine-tunes.
    """
    heads: list[Tensor] = []

    def watch(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        heads.append(view["head"]["loc"].clone())
        return view

    plain = bf.algorithms.fedbabu(model, epochs=2, batch_size=None, optimiser=SGD(0.3))
    watched = replace(plain, phases=(*plain.phases, Once(watch)))
    result = run(watched, clients, rounds=1, engine=bf.Engine("reference", workers=1))
    bodies = []
    for j in range(len(SIZES)):
        x, y = clients.train.client(j)
        net = bf.models.mlp(8, hidden=16, outputs=3).double()
        net.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
        for _ in range(2):
            slopes = torch.autograd.grad(
                nn.functional.cross_entropy(net(x.double()), y), list(net.body.parameters())
            )
            with torch.no_grad():
                for p, slope in zip(net.body.parameters(), slopes, strict=True):
                    p -= 0.3 * slope
        bodies.append(torch.cat([p.detach().flatten() for p in net.body.parameters()]))
    assert_close(result.server["body"]["loc"], torch.stack(bodies).mean(0), atol=1e-12, rtol=0)
    assert len(heads) == len(SIZES)
    assert all(torch.equal(head, result.server["head"]["loc"]) for head in heads)
