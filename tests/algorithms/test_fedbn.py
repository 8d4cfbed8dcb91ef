"""FedBN by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from tests.algorithms.made import descend
from tests.cases import run, with_batch_norm

ROUNDS, EPOCHS = 3, 2


def flat(net: nn.Module, *, norm: bool) -> torch.Tensor:
    """Its norm's weight and bias, or all other parameters."""
    return torch.cat(
        [
            p.detach().flatten()
            for name, p in net.named_parameters()
            if name.startswith("body.1.") == norm
        ]
    )


def statistics(net: nn.Module) -> torch.Tensor:
    """Running mean and variance of its norm."""
    return torch.cat([net.get_buffer("body.1.running_mean"), net.get_buffer("body.1.running_var")])


def test_a_bare_loop_that_averages_all_but_the_norms(clients: FederatedData):
    """Two clients of unequal size, which weigh the same, over some rounds of full batches: their
    norms, statistics and all else.
    """
    two, model = clients.select([1, 3]), with_batch_norm()
    algorithm = bf.algorithms.fedbn(
        model, epochs=EPOCHS, batch_size=None, optimiser=SGD(0.3, momentum=0.9, weight_decay=1e-3)
    )
    result = run(algorithm, two, rounds=ROUNDS)
    nets = [copy.deepcopy(model).double() for _ in range(2)]
    for _ in range(ROUNDS):
        for j, net in enumerate(nets):
            optimiser = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
            x, y = two.train.client(j)
            for _ in range(EPOCHS):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x.double()), y).backward()
                optimiser.step()
        with torch.no_grad():
            for name, p in nets[0].named_parameters():
                if not name.startswith("body.1."):
                    other = nets[1].get_parameter(name)
                    p.copy_((p + other) / 2)
                    other.copy_(p)
    assert_close(result.server["w"]["loc"], flat(nets[0], norm=False), atol=1e-12, rtol=0)
    for j, net in enumerate(nets):
        assert_close(result.private["norms"]["loc"][j], flat(net, norm=True), atol=1e-12, rtol=0)
        assert_close(result.private["norms_buffers"]["loc"][j], statistics(net), atol=1e-12, rtol=0)
        x, _ = two.test.client(j)
        outputs = net.eval()(x.double())
        assert_close(result.client(j).model()(x.double()), outputs, atol=1e-12, rtol=0)
    assert not torch.equal(*result.private["norms"]["loc"])


def test_norms_never_leave_a_client(clients: FederatedData):
    """Neither their weights nor their statistics; of the rest nothing stays."""
    algorithm = bf.algorithms.fedbn(with_batch_norm(), epochs=1)
    assert set(algorithm.uplink(algorithm.init(1))) == {"w.loc"}
    assert not any(name.startswith("body.1.") for name in algorithm.layout("w").names)
    result = run(algorithm, clients)
    assert set(result.private) == {"norms", "norms_buffers"}
    start = algorithm.init(7, seed=2, dtype=torch.float64)
    for block in ("norms", "norms_buffers"):
        assert torch.equal(result.server[block]["loc"], start[block]["loc"])
        assert (result.private[block]["loc"] - start[block]["loc"]).abs().amin(1).max() > 0


def test_a_client_that_joins_trains_norms_alone(clients: FederatedData):
    """From the start's, on the averaged weights; the federation stays as it is."""
    old, novel = clients.hold_out(2, seed=0)
    algorithm = bf.algorithms.fedbn(
        with_batch_norm(), epochs=1, batch_size=None, adapt_epochs=3, optimiser=SGD(0.2)
    )
    result = run(algorithm, old)
    adapted = result.adapt(novel)
    for j in range(2):
        net = result.algorithm.network(
            result.server | {"n": torch.zeros((), dtype=torch.float64)}, ("w",)
        )
        net = copy.deepcopy(net).requires_grad_().train()
        for _ in range(3):
            descend(net.body[1], net, novel.train.client(j), 0.2)
        assert_close(adapted.private["norms"]["loc"][j], flat(net, norm=True), atol=1e-12, rtol=0)
        assert_close(
            adapted.private["norms_buffers"]["loc"][j], statistics(net), atol=1e-12, rtol=0
        )


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), nn.BatchNorm1d(6).eval()],
    ids=lambda n: type(n).__name__,
)
def test_norms_of_every_kind(norm: nn.Module, clients: FederatedData):
    """Their weights stay; one in evaluation mode keeps the statistics that it has."""
    result = run(
        bf.algorithms.fedbn(nn.Sequential(nn.Linear(8, 6), norm, nn.Linear(6, 3)), epochs=1),
        clients,
    )
    assert set(result.private) == {"norms"}
    assert result.algorithm.layout("norms").names == tuple(
        f"1.{name}" for name, _ in norm.named_parameters()
    )
    assert result.private["norms"]["loc"].std(0).max() > 0


@pytest.mark.parametrize(
    "still",
    [nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8).requires_grad_(False)],
    ids=["none", "frozen"],
)
def test_norms_without_trainable_weights_keep_their_statistics(
    still: nn.Module, clients: FederatedData
):
    """They go by their modules' names; nothing of any norm is sent, and each client's statistics
    are those of its own rows.
    """
    model = nn.Sequential(copy.deepcopy(still), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    algorithm = bf.algorithms.fedbn(model, epochs=1, batch_size=None)
    assert algorithm.layout("norms").names == ("2.weight", "2.bias")
    assert set(algorithm.layout("norms_buffers").names) == {
        f"{i}.running_{name}" for i in (0, 2) for name in ("mean", "var")
    }
    assert set(algorithm.uplink(algorithm.init(1))) == {"w.loc"}
    result = run(algorithm, clients)
    for j in range(clients.clients):
        found = algorithm.layout("norms_buffers").leaves(result.private["norms_buffers"]["loc"][j])
        assert_close(
            found["0.running_mean"],
            clients.train.client(j)[0].double().mean(0) * (1 - 0.9**result.round),
            atol=1e-12,
            rtol=0,
        )


@pytest.mark.parametrize(("norm", "linear"), [("bn[0]", "bn0"), ("a*", "ab"), ("bn1", "bn10")])
def test_names_are_no_patterns(norm: str, linear: str):
    """Signs that patterns have in a module's name stand for themselves."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(
                {
                    norm: nn.BatchNorm1d(8),
                    linear: nn.Linear(8, 3),
                    "still": nn.BatchNorm1d(8, affine=False),
                }
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[linear](self.parts["still"](self.parts[norm](x)))

    algorithm = bf.algorithms.fedbn(Named())
    assert algorithm.layout("norms").names == (f"parts.{norm}.weight", f"parts.{norm}.bias")
    assert algorithm.layout("w").names == (f"parts.{linear}.weight", f"parts.{linear}.bias")
    assert {name.split(".")[1] for name in algorithm.layout("norms_buffers").names} == {
        norm,
        "still",
    }


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(8, 3), r"model Linear has no norm .*fedavg"),
        (
            nn.Sequential(
                nn.Linear(8, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)
            ),
            r"model Sequential has no norm .*fedavg",
        ),
        (
            nn.Sequential(nn.BatchNorm1d(8).requires_grad_(False), nn.Linear(8, 3)),
            r"model Sequential has no norm .*affine=True",
        ),
        (
            nn.Sequential(*[nn.BatchNorm1d(4)] * 2, nn.Linear(4, 2)),
            r"the norm '1' is in the model under two names; give each place "
            r"its own norm",
        ),
    ],
)
def test_models_that_do_not_fit(model: nn.Module, words: str):
    """With the remedy; the weights of a norm in two places would be a client's own under one name
    and averaged under the other.
    """
    with pytest.raises(ValueError, match=words):
        bf.algorithms.fedbn(model)
