"""Personalised methods against algebra: limits of their strengths, and linear-Gaussian federations where fixed points are known."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.phases import Once
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.models import SplitModel
from tests.cases import SIZES

COUNTS = (9, 14, 6, 11)
DIM = 3


@pytest.fixture(scope="module")
def regressions() -> FederatedData:
    """Linear regressions whose weights differ between clients."""
    rng = torch.Generator().manual_seed(5)
    xs = [torch.randn(n, DIM, generator=rng) for n in COUNTS]
    ys = [x @ torch.randn(DIM, generator=rng) + 0.3 * torch.randn(len(x), generator=rng) for x in xs]
    return bf.data.from_arrays(xs, ys, test=(xs_like(xs), [y + 1.0 for y in ys]))


def xs_like(xs: list[Tensor]) -> list[Tensor]:
    return [x + 1.0 for x in xs]


def linear(head: Tensor | None = None) -> SplitModel:
    """A head on an identity body: with a body rate of 0, a linear model."""
    body, top = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():
        body.weight.copy_(torch.eye(DIM))
        top.weight.copy_(torch.zeros(1, DIM) if head is None else head)
    return SplitModel(body, top)


def moments(data: FederatedData) -> tuple[Tensor, Tensor]:
    """X'X [J, D, D] and X'y [J, D] of every client, in float64."""
    parts = [data.train.client(j) for j in range(data.clients)]
    return torch.stack([x.double().T @ x.double() for x, _ in parts]), torch.stack([x.double().T @ y.double() for x, y in parts])


def run(algorithm: bf.Algorithm, clients: FederatedData, rounds: int = 3, **options):
    options = {"dtype": torch.float64, "evaluate_every": None, "seed": 2, "progress": False, **options}
    return bf.simulate(algorithm, clients, rounds=rounds, **options)


def test_fedavg_of_one_full_step_is_a_gradient_step_on_everything(clients: FederatedData, model: nn.Module):
    """With one full-batch step, the size-weighted mean of the clients is a step on the pooled data."""
    result = run(bf.algorithms.fedavg(model, epochs=1, batch_size=None, lr=0.3, momentum=0.0), clients, rounds=1)
    copy = bf.models.mlp(8, hidden=16, outputs=3).double()
    copy.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    x, y = (torch.cat(parts) for parts in zip(*[clients.train.client(j) for j in range(len(SIZES))], strict=True))
    grads = torch.autograd.grad(nn.functional.cross_entropy(copy(x.double()), y), list(copy.parameters()))
    expected = torch.cat([(p - 0.3 * g).flatten() for p, g in zip(copy.parameters(), grads, strict=True)])
    assert_close(result.server["w"]["loc"], expected.detach(), atol=1e-12, rtol=0)


def test_fedprox_without_pull_is_fedavg(clients: FederatedData, model: nn.Module):
    """mu = 0: the same steps, to the bit."""
    options = {"epochs": 2, "batch_size": 10, "lr": 0.05, "momentum": 0.9}
    plain = run(bf.algorithms.fedavg(model, **options), clients)
    pulled = run(bf.algorithms.fedprox(model, mu=0.0, **options), clients)
    assert torch.equal(plain.server["w"]["loc"], pulled.server["w"]["loc"])


def test_fedprox_solves_its_proximal_problem(regressions: FederatedData):
    """A converged client is argmin |y - Xv|^2 / (2n) + mu/2 |v - w|^2, so the pull is by a mean loss: (A/n + mu)^-1 (b/n + mu w)."""
    w0, mu = torch.full((1, DIM), 0.7), 0.4
    algorithm = bf.algorithms.fedprox(linear_only(w0), mu=mu, epochs=3000, batch_size=None, lr=0.2, likelihood=Gaussian())
    result = run(algorithm, regressions, rounds=1)
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()
    solved = torch.linalg.solve(a / n[:, None, None] + mu * torch.eye(DIM).double(), b / n[:, None] + mu * w0.double())
    assert_close(result.server["w"]["loc"], (n[:, None] * solved).sum(0) / n.sum(), atol=1e-10, rtol=0)


def linear_only(weight: Tensor) -> nn.Module:
    layer = nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.Sequential(layer)


def test_ditto_without_pull_is_local(clients: FederatedData, model: nn.Module):
    """lambda = 0: the personal models are those of clients that train alone, to the bit where steps draw nothing."""
    options = {"epochs": 2, "batch_size": None, "lr": 0.05, "momentum": 0.0}
    ditto = run(bf.algorithms.ditto(model, lam=0.0, **options), clients)
    alone = run(bf.algorithms.local(model, **options), clients)
    assert torch.equal(ditto.private["v"]["loc"], alone.private["w"]["loc"])


def test_ditto_with_a_strong_pull_is_the_broadcast_model(clients: FederatedData, model: nn.Module):
    """lambda to infinity, with steps of 1 / lambda: personal models are the global one that the round began with."""
    lam = 1e6
    two = run(bf.algorithms.ditto(model, lam=lam, epochs=3, batch_size=None, lr=1 / lam, momentum=0.0), clients, rounds=2)
    one = run(bf.algorithms.ditto(model, lam=lam, epochs=3, batch_size=None, lr=1 / lam, momentum=0.0), clients, rounds=1)
    broadcast = one.server["w"]["loc"]
    assert_close(two.private["v"]["loc"], broadcast.expand_as(two.private["v"]["loc"]), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_ditto_fixed_point(regressions: FederatedData):
    """At convergence v_j = (A_j / n_j + lambda)^-1 (b_j / n_j + lambda w), with w the global model of the round."""
    lam = 0.5
    algorithm = bf.algorithms.ditto(linear_only(torch.zeros(1, DIM)), lam=lam, epochs=2000, batch_size=None, lr=0.2, likelihood=Gaussian())
    one, two = run(algorithm, regressions, rounds=1), run(algorithm, regressions, rounds=2)
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()
    w = one.server["w"]["loc"]
    solved = torch.linalg.solve(a / n[:, None, None] + lam * torch.eye(DIM).double(), b / n[:, None] + lam * w)
    assert_close(two.private["v"]["loc"], solved, atol=1e-9, rtol=0)
    least_squares = torch.linalg.solve(a, b).mean(0)  # the global model is the uniform mean of the clients' own optima
    assert_close(w, least_squares, atol=1e-9, rtol=0)


def test_pfedme_follows_the_moreau_envelope(regressions: FederatedData):
    """With the inner problem solved, w moves against the envelope's gradient, lambda (w - theta*(w)) [checked by autograd]."""
    lam, lr, w0 = 2.0, 0.05, torch.full((1, DIM), 0.4)
    algorithm = bf.algorithms.pfedme(
        linear_only(w0), lam=lam, batches=1, inner_steps=4000, batch_size=None, lr=lr, personal_lr=0.1, likelihood=Gaussian()
    )
    result = run(algorithm, regressions, rounds=1, participation=1.0, sampling="fixed")
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()[:, None]
    hessian = a / n[..., None]
    w = w0.double().expand(len(COUNTS), DIM).clone().requires_grad_()
    theta = torch.linalg.solve(hessian + lam * torch.eye(DIM).double(), b / n + lam * w)
    loss = 0.5 * torch.einsum("jd,jde,je->", theta, hessian, theta) - (theta * b / n).sum() + 0.5 * lam * (theta - w).square().sum()
    (envelope,) = torch.autograd.grad(loss, w)
    assert_close(envelope, lam * (w - theta).detach(), atol=1e-12, rtol=0)
    assert_close(result.private["theta"]["loc"], theta.detach(), atol=1e-9, rtol=0)
    assert_close(result.server["w"]["loc"], (w - lr * envelope).detach().mean(0), atol=1e-9, rtol=0)


def test_pfedme_server_step(clients: FederatedData, model: nn.Module):
    """beta is the server's step: (1 - beta) w + beta mean."""
    options = {"batches": 2, "inner_steps": 2, "batch_size": 10}
    whole = run(bf.algorithms.pfedme(model, beta=1.0, **options), clients, rounds=1).server["w"]["loc"]
    further = run(bf.algorithms.pfedme(model, beta=2.0, **options), clients, rounds=1).server["w"]["loc"]
    start = bf.algorithms.pfedme(model).init(1, dtype=torch.float64)["w"]["loc"]
    assert_close(further - start, 2 * (whole - start), atol=1e-12, rtol=0)


def test_pfedme_restarts_where_told(regressions: FederatedData):
    """Without a warm start each inner problem begins at w: with one step, theta = w - personal_lr (gradient at w)."""
    options = {"lam": 2.0, "batches": 2, "inner_steps": 1, "batch_size": None, "lr": 0.1, "personal_lr": 0.1, "likelihood": Gaussian()}
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()[:, None]

    def gradient(v: Tensor) -> Tensor:
        return torch.einsum("jde,je->jd", a, v) / n - b / n

    for warm in (True, False):
        result = run(bf.algorithms.pfedme(linear_only(torch.ones(1, DIM)), warm_start=warm, **options), regressions, rounds=1)
        w = torch.ones(len(COUNTS), DIM).double()
        theta = w.clone()
        for _ in range(2):
            start = theta if warm else w
            theta = start - 0.1 * (gradient(start) + 2.0 * (start - w))
            w = w - 0.1 * 2.0 * (w - theta)
        assert_close(result.private["theta"]["loc"], theta, atol=1e-12, rtol=0)


@pytest.mark.slow
def test_pfedmap_reaches_its_fixed_point(regressions: FederatedData):
    """For quadratics w = [sum_j (I - lambda R_j)]^-1 sum_j R_j b_j, R_j = (A_j + lambda I)^-1: the joint MAP, sum likelihood."""
    lam = 2.0
    algorithm = bf.algorithms.pfedmap(
        linear(), precision=lam, head_epochs=400, body_epochs=1, body_lr=0.0, head_lr=0.02, momentum=0.5, likelihood=Gaussian()
    )
    result = run(algorithm, regressions, rounds=60, sampling="fixed")
    a, b = moments(regressions)
    identity = torch.eye(DIM).double()
    r = torch.linalg.inv(a + lam * identity)
    w = torch.linalg.solve((identity - lam * r).sum(0), torch.einsum("jde,je->d", r, b))
    assert_close(result.server["head"]["loc"], w, atol=1e-8, rtol=0)
    assert_close(result.private["head"]["loc"], torch.einsum("jde,je->jd", r, b + lam * w), atol=1e-8, rtol=0)


def test_pfedmap_under_a_mean_likelihood_is_tempered(regressions: FederatedData):
    """The paper's energy has the mean loss beside the whole penalty: w_j = (A / n + lambda)^-1 (b / n + lambda w)."""
    lam, start = 2.0, torch.full((1, DIM), 0.3)
    algorithm = bf.algorithms.pfedmap(
        linear(start),
        precision=lam,
        head_epochs=2000,
        body_epochs=1,
        body_lr=0.0,
        head_lr=0.1,
        likelihood_scale="mean",
        likelihood=Gaussian(),
    )
    result = run(algorithm, regressions, rounds=1, sampling="fixed")
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()[:, None]
    expected = torch.linalg.solve(a / n[..., None] + lam * torch.eye(DIM).double(), b / n + lam * start.double())
    assert_close(result.private["head"]["loc"], expected, atol=1e-8, rtol=0)


def test_fedbabu_trains_under_one_head_and_finetunes_to_predict(clients: FederatedData, model: nn.Module):
    """The head that all share is the module's to the last round; predictions come from a fine-tuned copy."""
    algorithm = bf.algorithms.fedbabu(model, epochs=2, batch_size=10, finetune_epochs=2)
    result = run(algorithm, clients)
    head = torch.cat([p.detach().double().flatten() for p in model.head.parameters()])
    assert torch.equal(result.server["head"]["loc"], head)
    assert "head" not in result.private
    assert set(algorithm.uplink()) == {"body.loc"}
    plain = bf.simulate(
        bf.Algorithm(model, algorithm.blocks, algorithm.phases, parts=algorithm.parts),
        clients, rounds=3, dtype=torch.float64, evaluate_every=None, seed=2, progress=False,
    )  # fmt: skip
    assert torch.equal(plain.server["body"]["loc"], result.server["body"]["loc"])
    assert not torch.equal(plain.predict().probs, result.predict().probs)


def test_fedbabu_moves_the_body_alone(clients: FederatedData, model: nn.Module):
    """Two full-batch steps of the body under the common head, which a client has unchanged until it fine-tunes."""
    heads: list[Tensor] = []

    def watch(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        heads.append(view["head"]["loc"].clone())
        return view

    plain = bf.algorithms.fedbabu(model, epochs=2, batch_size=None, lr=0.3, momentum=0.0)
    watched = replace(plain, phases=(*plain.phases, Once(watch)))
    result = run(watched, clients, rounds=1, engine=bf.Engine("reference", workers=1))
    bodies = []
    for j in range(len(SIZES)):
        x, y = clients.train.client(j)
        net = bf.models.mlp(8, hidden=16, outputs=3).double()
        net.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
        for _ in range(2):
            slopes = torch.autograd.grad(nn.functional.cross_entropy(net(x.double()), y), list(net.body.parameters()))
            with torch.no_grad():
                for p, slope in zip(net.body.parameters(), slopes, strict=True):
                    p -= 0.3 * slope
        bodies.append(torch.cat([p.detach().flatten() for p in net.body.parameters()]))
    assert_close(result.server["body"]["loc"], torch.stack(bodies).mean(0), atol=1e-12, rtol=0)
    assert len(heads) == len(SIZES)
    assert all(torch.equal(head, result.server["head"]["loc"]) for head in heads)


@pytest.mark.parametrize(
    ("name", "block", "by_size"),
    [
        ("fedavg", "w", True),
        ("fedprox", "w", True),
        ("fedper", "body", True),
        ("fedrep", "body", True),
        ("lg_fedavg", "head", True),
        ("fedbabu", "body", False),
        ("ditto", "w", False),
        ("pfedme", "w", False),
        ("pfedmap", "head", False),
    ],
)
def test_who_counts_for_how_much(clients: FederatedData, model: nn.Module, name: str, block: str, by_size: bool):
    """The server's block is the mean of what each client makes of it alone, weighted by size, or every client counting the same."""
    two = {"pfedme": ("batches",), "fedrep": ("head_epochs", "body_epochs"), "pfedmap": ("head_epochs", "body_epochs")}
    made = getattr(bf.algorithms, name)(model, batch_size=None, **dict.fromkeys(two.get(name, ("epochs",)), 2))
    options = {"rounds": 1, "sampling": "fixed", "train": "all"}
    together = run(made, clients, **options).server[block]["loc"]
    alone = torch.stack([run(made, clients.select([j]), **options).server[block]["loc"] for j in range(len(SIZES))])
    weights = torch.tensor(SIZES if by_size else [1] * len(SIZES)).double()
    assert_close(together, weights @ alone / weights.sum(), atol=1e-12, rtol=0)
    other = torch.tensor([1] * len(SIZES) if by_size else SIZES).double()
    assert (together - other @ alone / other.sum()).abs().max() > 1e-5


def test_fedrep_fits_the_head_first(clients: FederatedData, model: nn.Module):
    """One full-batch step of each: the head's under the old body, then the body's under the new head."""
    fedrep = bf.algorithms.fedrep(model, head_epochs=1, body_epochs=1, batch_size=None, lr=0.3, momentum=0.0)
    result = run(fedrep, clients, rounds=1)
    bodies = []
    for j in range(len(SIZES)):
        x, y = clients.train.client(j)
        net = bf.models.mlp(8, hidden=16, outputs=3).double()
        net.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
        for part in (net.head, net.body):
            slopes = torch.autograd.grad(nn.functional.cross_entropy(net(x.double()), y), list(part.parameters()))
            with torch.no_grad():
                for p, slope in zip(part.parameters(), slopes, strict=True):
                    p -= 0.3 * slope
        head, body = (torch.cat([p.detach().flatten() for p in part.parameters()]) for part in (net.head, net.body))
        assert_close(result.private["head"]["loc"][j], head, atol=1e-12, rtol=0)
        bodies.append(body)
    weights = torch.tensor(SIZES).double()
    assert_close(result.server["body"]["loc"], weights @ torch.stack(bodies) / weights.sum(), atol=1e-12, rtol=0)


def test_lg_fedavg_shares_its_head_alone(clients: FederatedData, model: nn.Module):
    """Every client predicts with its own body under the server's head."""
    result = run(bf.algorithms.lg_fedavg(model, epochs=1, batch_size=10), clients)
    x, _ = clients.test.client(2)
    algorithm = result.algorithm
    view = {"body": {"loc": result.private["body"]["loc"][2]}, "head": result.server["head"]}
    expected = algorithm.outputs(algorithm.leaves(("body", "head"), view), x.double()).softmax(-1)
    assert_close(result.predict().client(2).probs, expected, atol=1e-12, rtol=0)


@pytest.mark.slow
def test_regression_end_to_end():
    """Diabetes by pFedVEM with a Gaussian likelihood: a mean, a variance that contains the noise, draws that add to it."""
    clients = bf.data.diabetes(clients=5, seed=0)
    model = bf.models.mlp(clients.inputs, hidden=10, outputs=1)
    algorithm = bf.algorithms.pfedvem(model, init_scale=0.1, batch_size=10, likelihood=Gaussian(0.7))
    result = bf.simulate(algorithm, clients, rounds=20, seed=0, evaluate_every=20, progress=False)
    row = result.history.rows[-1]
    assert row["personal_rmse"] < 0.9  # the targets have standard deviation 1
    assert 0.75 < row["personal_coverage_90"] <= 1.0
    plug_in, averaged = result.predict(draws=0), result.predict(draws=30)
    assert_close(plug_in.variance[plug_in.mask], torch.full_like(plug_in.variance[plug_in.mask], 0.49))
    assert bool((averaged.variance[averaged.mask] > 0.49).all())
    assert bool(plug_in.epistemic.isnan().all())
    assert_close(averaged.epistemic[averaged.mask], (averaged.variance[averaged.mask] - 0.49).squeeze(-1), atol=1e-5, rtol=1e-4)
