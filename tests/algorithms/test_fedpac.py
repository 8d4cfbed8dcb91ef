"""FedPAC against algebra: its statistics, its programs, clients that join later, and what is
refused.
"""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.algorithms.fedpac import mixing
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Once
from bayesfl.data import FederatedData
from bayesfl.models import SplitModel
from bayesfl.optim import SGD
from tests.algorithms.made import CLASSES, COUNTS, FEDPAC, solved
from tests.cases import keeping, run


def features(algorithm: Algorithm, body: Tensor, x: Tensor) -> Tensor:
    """[N, d] at the weights of a body."""
    leaves = algorithm.layout("body").leaves(body) | algorithm.layout("head").leaves(
        torch.zeros(algorithm.layout("head").size).to(body)
    )
    return algorithm.features(leaves, x.to(body))[0]  # pyright: ignore


def test_variance_is_the_trace_of_the_covariance(few: FederatedData, network: SplitModel):
    """With Phi = onehot(y) z' of an example: h is its mean, n V the trace of its biased covariance,
    at the body received.
    """
    algorithm = bf.algorithms.fedpac(network)
    start = algorithm.init(4, seed=2, dtype=torch.float64)["body"]["loc"]
    private = run(keeping(algorithm), few).private
    for j, n in enumerate(COUNTS):
        x, y = few.train.client(j)
        z = features(algorithm, start, x)
        phi = (F.one_hot(y, CLASSES).to(z)[:, :, None] * z[:, None]).flatten(1)
        assert_close(private["h"][j].flatten(), phi.mean(0), atol=1e-12, rtol=0)
        assert_close(
            n * private["variance"][j], torch.cov(phi.T, correction=0).trace(), atol=1e-12, rtol=0
        )
        assert private["counts"][j].tolist() == torch.bincount(y, minlength=CLASSES).tolist()


def test_pieces_of_the_pass_add_up(
    few: FederatedData, network: SplitModel, monkeypatch: pytest.MonkeyPatch
):
    """Statistics do not depend on how many examples are looked at together."""
    whole = run(keeping(bf.algorithms.fedpac(network)), few, 2)
    monkeypatch.setattr(FEDPAC, "ROWS_AT_ONCE", 4)
    pieces = run(keeping(bf.algorithms.fedpac(network)), few, 2)
    for name in ("h", "variance", "centroids"):
        assert_close(pieces.private[name], whole.private[name], atol=1e-12, rtol=0)


def test_padding_is_no_example(few: FederatedData, network: SplitModel):
    """Clients of unequal size may be measured together, the short ones padded."""
    alone = keeping(bf.algorithms.fedpac(network))
    together = replace(
        alone,
        phases=tuple(replace(p, batched=True) if isinstance(p, Once) else p for p in alone.phases),
    )
    one, other = run(alone, few, 2), run(together, few, 2, engine=bf.Engine(chunk=4))
    for name in ("counts", "h", "variance", "centroids"):
        assert_close(other.private[name], one.private[name], atol=1e-12, rtol=0)


def test_small_weights_are_none():
    """1 / V of (1, 3, 2000) would give the last 3.7e-4: it gets 0, the others the rest."""
    h = torch.ones(3, 2)
    a = mixing(h, torch.tensor([1.0, 3.0, 2000.0]), h)
    assert_close(
        a, torch.tensor([[0.75, 0.25, 0.0]], dtype=torch.float64).expand(3, 3), atol=1e-12, rtol=0
    )
    assert not a[:, 2].any()
    kept = mixing(h, torch.tensor([1.0, 1.0, 400.0]), h)[0, 2]  # 1.2e-3 is above the threshold
    assert_close(kept, torch.tensor(1 / 801, dtype=torch.float64), atol=1e-9, rtol=0)


def apart(clients: int = 7) -> tuple[Tensor, Tensor]:
    """Statistics whose programs have uneven answers."""
    rng = torch.Generator().manual_seed(0)
    h = 0.1 * torch.rand(clients, 30, generator=rng, dtype=torch.float64) + 0.05 * torch.eye(
        clients, 30
    )
    return h, 0.1 * torch.rand(clients, generator=rng, dtype=torch.float64) + 0.01


def enumerated(h: Tensor, v: Tensor) -> Tensor:
    """Every client's weights by trying supports, small ones cut off as `mixing` does."""
    a = torch.stack([solved(h, v, own) for own in h])
    a = torch.where(a < 1e-3, 0, a)
    return a / a.sum(1, keepdim=True)


@pytest.mark.parametrize("size", [50.0, 255.0, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("others", [1, 3])
def test_what_one_client_says_is_no_floor_for_the_rest(size: float, others: int):
    """Features times s and variances times s^2: the programs as they stand."""
    h, v = apart()
    assert_close(mixing(h, v, h), enumerated(h, v), atol=1e-9, rtol=0)
    assert float(enumerated(h, v).diagonal().max()) < 0.8
    factor = torch.ones(7, dtype=torch.float64)
    factor[:others] = size
    h, v = h * factor[:, None], v * factor**2
    assert_close(mixing(h, v, h), enumerated(h, v), atol=2e-3, rtol=0)


def test_statistics_of_any_size():
    """No error, whatever is far, loud, dark or certain; heads that nothing tells apart count the
    same.
    """
    far = torch.tensor([[1.0, 0.0], [0.0, 300.0]], dtype=torch.float64)
    assert_close(
        mixing(far, torch.tensor([0.01, 900.0]), far)[1],
        torch.tensor([0.01, 0.99], dtype=torch.float64),
        atol=1e-4,
        rtol=0,
    )
    h, v = apart()
    loud = mixing(h, torch.cat([torch.tensor([1e3]).double(), v[1:]]), h)
    assert not loud[:, 0].any()
    assert_close(loud[1:, 1:], enumerated(h[1:], v[1:]), atol=0.01, rtol=0)
    here = (torch.arange(7) > 3).double()  # most have no features and no variance
    dark, quiet = h * here[:, None], v * here
    assert_close(
        mixing(dark, quiet, dark)[4:, 4:],
        enumerated(dark, quiet + 1e-10)[4:, 4:],
        atol=1e-3,
        rtol=0,
    )
    for scale in (1e3, 1e8, 1e15, 1e30):
        for variance in (v, v * torch.tensor([scale**2, *[1.0] * 6], dtype=torch.float64), 0 * v):
            stretched = torch.cat([scale * torch.ones(3, 30, dtype=torch.float64), h[3:]])
            found = mixing(stretched, variance, stretched)
            assert_close(found.sum(1), torch.ones(7).double())
            assert bool((found >= 0).all())
    alike = mixing(stretched, 0 * v, stretched)
    assert_close(alike[:3, :3], torch.full((3, 3), 1 / 3, dtype=torch.float64), atol=1e-3, rtol=0)


@pytest.mark.parametrize("clients", [1, 2, 30])
def test_clients_of_one_example(clients: int):
    """V = 0 is no division by zero: alone they keep their heads, alike or without features they
    share them equally.
    """
    h, none = torch.ones(clients, 3), torch.zeros(clients)
    equal = torch.full((clients, clients), 1 / clients, dtype=torch.float64)
    assert_close(mixing(h, none, h), equal, atol=1e-5, rtol=0)
    assert_close(mixing(0 * h, none, 0 * h), equal, atol=1e-9, rtol=0)
    assert_close(
        mixing(torch.eye(clients), none, torch.eye(clients)),
        torch.eye(clients, dtype=torch.float64),
        atol=1e-9,
        rtol=0,
    )


def test_a_newcomer_gets_the_mixture_of_one_like_it(clients: FederatedData, model: nn.Module):
    """With a body that stands still, one with the data of a client has that client's statistics,
    and gets its head.
    """
    head, still = (SGD(rate, momentum=0.5, weight_decay=5e-4) for rate in (0.5, 1e-30))
    result = run(bf.algorithms.fedpac(model, head_optimiser=head, body_optimiser=still), clients, 2)
    still = replace(result, algorithm=replace(result.algorithm, adapt=result.algorithm.adapt[:2]))
    joined = still.adapt(clients.select([5, 2]))
    assert_close(
        joined.private["head"]["loc"], result.server["head"]["each"][[5, 2]], atol=1e-9, rtol=0
    )
    assert_close(joined.predict().probs[0], result.predict().probs[5], atol=1e-9, rtol=0)


def test_a_newcomer_trains_its_head_from_there(clients: FederatedData, model: nn.Module):
    """The mixture, then `head_epochs` passes, here as one step of plain descent; the body is the
    server's.
    """
    old, novel = clients.hold_out(2, seed=0)
    options: dict[str, Any] = {
        "batch_size": None,
        "head_optimiser": SGD(0.3),
        "body_optimiser": SGD(0.01),
    }
    result = run(bf.algorithms.fedpac(model, **options), old, 3)
    joined = result.adapt(novel)
    algorithm, known = result.algorithm, result.server["trained"]
    for j in range(2):
        x, y = novel.train.client(j)
        z = features(algorithm, result.server["body"]["loc"], x)
        h = (F.one_hot(y, 3).to(z)[:, :, None] * z[:, None]).mean(0).flatten()
        a = mixing(known["h"], known["variance"], h[None])[0]
        head = (a @ known["head"]).requires_grad_()
        weight, bias = algorithm.layout("head").leaves(head).values()
        (slope,) = torch.autograd.grad(F.cross_entropy(z @ weight.T + bias, y), head)
        assert_close(
            joined.private["head"]["loc"][j], head.detach() - 0.3 * slope, atol=1e-9, rtol=0
        )


def test_only_newcomers_are_sent_heads_of_others(clients: FederatedData, model: nn.Module):
    """In training the heads that the server keeps for them stay there: a client receives one model
    and the centroids.
    """
    algorithm = bf.algorithms.fedpac(model)
    result = run(algorithm, clients, 2, dtype=torch.float32)
    size = sum(p.numel() for p in model.parameters())
    assert result.history["bytes_down"].tolist() == [7 * (4 * (size + 3 * 16) + 3)] * 2
    common, addressed = algorithm.share(result.server, torch.tensor([0, 3]))
    assert "trained" not in common
    assert torch.equal(addressed["head"]["loc"], result.server["head"]["each"][[0, 3]])


def test_defaults_are_the_papers():
    """Of the authors' code; CIFAR-10 takes another learning rate."""
    papers = {
        "head_epochs": 1,
        "body_epochs": 5,
        "batch_size": 50,
        "head_optimiser": SGD(0.1, momentum=0.5, weight_decay=5e-4),
        "body_optimiser": SGD(0.01, momentum=0.5, weight_decay=5e-4),
        "lam": 1.0,
    }
    options = inspect.signature(bf.algorithms.fedpac).parameters
    assert {name: options[name].default for name in papers} == papers


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (bf.models.mlp(3, outputs=2), {"lam": -0.1}, r"lam .*got -0.1"),
        (bf.models.mlp(3, outputs=2), {"lam": float("nan")}, r"lam .*got nan"),
        (nn.Linear(3, 2), {}, r"model .*SplitModel.* got Linear"),
    ],
)
def test_what_is_refused(model: nn.Module, options: dict[str, Any], message: str):
    """By name, with the remedy."""
    with pytest.raises(ValueError, match=message):
        bf.algorithms.fedpac(model, **options)


def test_two_classes_of_one_output(few: FederatedData):
    """A Bernoulli likelihood has one output and two classes, which the statistics know."""
    data = few.select([0, 1, 2])
    binary = replace(data, outputs=2)
    model = bf.models.mlp(6, hidden=4, outputs=1)
    result = run(bf.algorithms.fedpac(model, likelihood=bf.likelihoods.Bernoulli()), binary, 2)
    assert result.server["centroids"].shape == (2, 4)
    assert result.server["seen"].all()


def test_many_heads_that_are_alike():
    """Of more than a thousand every weight is below the paper's threshold: equal heads stay equal,
    and sum to 1.
    """
    weights = mixing(torch.ones(1001, 3), torch.ones(1001), torch.ones(1, 3))
    assert_close(weights, torch.full((1, 1001), 1 / 1001, dtype=torch.float64))
