"""Curvature against its definition, whatever the backend."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.curvature import Curvature, basis, factors, ggn, invert, jacobians, root
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from tests.curvature import brute
from tests.curvature.brute import CASES, LIKELIHOODS, PAIRS

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def chosen(size: int, count: int = 25) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(2))[:count]


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_diagonal_and_subnetwork(case, backend, likelihood):
    model, x = case.model(brute.outputs_of(likelihood)), case.data(9)
    curvature, full = Curvature(model, likelihood, backend=backend), brute.ggn(model, likelihood, x)
    assert curvature.backend == backend
    assert_close(curvature.outputs(x), model(x).detach(), **EXACT)
    indices = chosen(curvature.size)
    assert_close(curvature.diagonal(x), full.diagonal(), **EXACT)
    assert_close(curvature.ggn(x, indices), full[indices][:, indices], **EXACT)
    assert_close(curvature.ggn(x), full, **EXACT)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_jacobian_columns_and_gram(case, backend):
    model, x, other = case.model(), case.data(9), case.data(5, seed=3)
    curvature, j, k = Curvature(model, backend=backend), brute.jacobian(model, x), brute.jacobian(model, other)
    indices = chosen(curvature.size)
    weight = torch.rand(curvature.size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert_close(curvature.columns(x, indices), j[:, :, indices], **EXACT)
    rows, others = j.flatten(0, 1), k.flatten(0, 1)
    assert_close(curvature.gram(x), rows @ rows.T, **EXACT)
    assert_close(curvature.gram(x, other, weight=3.0), 3 * rows @ others.T, **EXACT)
    assert_close(curvature.gram(x, weight=weight), rows * weight @ rows.T, **EXACT)
    assert_close(curvature.gram(x, other, weight=weight), rows * weight @ others.T, **EXACT)
    part = (rows[:, indices] * weight[indices], others[:, indices])
    assert_close(curvature.gram(x, other, weight=weight, indices=indices), part[0] @ part[1].T, **EXACT)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_some_of_the_parameters(case, backend):
    """A body, or a single bias, has the columns that it has in the whole."""
    model, x = case.model(), case.data(6)
    j, full = brute.jacobian(model, x), brute.ggn(model, Categorical(), x)
    names = [name for name, _ in model.named_parameters()]
    positions = Layout(model, "*").leaves(torch.arange(full.shape[0]))
    for pattern in (names[0].split(".")[0] + ".*", names[0], names[1], names[-1]):
        layout = Layout(model, pattern)
        covered = torch.cat([positions[name].flatten() for name in layout.names])
        curvature = Curvature(model, pattern=layout, backend=backend)
        assert_close(curvature.diagonal(x), full.diagonal()[covered], **EXACT)
        some = chosen(len(covered), 4)
        assert_close(curvature.columns(x, some), j[:, :, covered[some]], **EXACT)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_streams(case, backend, monkeypatch):
    """Batches of any size, in tensors, tuples or mappings, from a DataLoader, and blocks of one example give the same sums."""
    model, x = case.model(), case.data(9)
    curvature = Curvature(model, backend=backend)
    diagonal, columns, block = (f(x) for f in (curvature.diagonal, lambda x: curvature.columns(x, torch.arange(5)), curvature.ggn))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(9)), batch_size=4)
    for batches in ([x[:2], x[2:3], x[3:]], ({"x": b} for b in x.split(5)), loader):
        assert_close(curvature.diagonal(batches), diagonal, **EXACT)
    for module in (factors, jacobians, ggn):
        monkeypatch.setattr(module, "BLOCK", 1)
    assert_close(curvature.diagonal(x), diagonal, **EXACT)
    assert_close(curvature.columns(x, torch.arange(5)), columns, **EXACT)
    assert_close(curvature.ggn(loader), block, **EXACT)
    rows = brute.jacobian(model, x).flatten(0, 1)
    assert_close(curvature.gram(x, weight=diagonal), rows * diagonal @ rows.T, **EXACT)


def test_backpack_agrees_on_its_own_diagonal():
    """DiagGGNExact for classes and regression, sums over rows for the rest."""
    for case in CASES:
        if "backpack" in case.backends:
            for likelihood in (Categorical(), Gaussian(0.3)):
                model, x = case.model(), case.data(6)
                found = Curvature(model, likelihood, backend="backpack").engine.diagonal(x, likelihood)  # type: ignore[attr-defined]
                assert_close(found, brute.ggn(model, likelihood, x).diagonal(), **EXACT)


def test_the_backend_says_its_name():
    assert Curvature(brute.mlp(3)).backend == "layers"
    assert Curvature(brute.Residual(3)).backend == "func"
    assert Curvature(bf.models.resnet18((3, 8, 8), outputs=3, width=2)).backend == "func"
    assert Curvature(bf.models.lenet((1, 12, 12), outputs=3)).backend == "layers"


def test_float32_agrees_to_its_precision():
    case = CASES[0]
    model, x = case.model(), case.data(9)
    want = Curvature(model).diagonal(x)
    got = Curvature(copy.deepcopy(model).float()).diagonal(x.float())
    assert got.dtype == torch.float64
    assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert Curvature(copy.deepcopy(model).float()).columns(x.float(), torch.arange(3)).dtype == torch.float32


def test_root_is_exact():
    """R R' is the golden Lambda, has rank O - 1, and stays finite and right where p is one-hot or nearly so."""
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    want = torch.tensor([[[0.16, -0.06, -0.10], [-0.06, 0.21, -0.15], [-0.10, -0.15, 0.25]]], dtype=torch.float64)
    r = root(Categorical(), p.log())
    assert r.shape == (1, 3, 2)
    assert_close(r @ r.mT, want, atol=1e-15, rtol=0)
    f = torch.tensor([[0.0, -50.0, -60.0], [-50.0, 0.0, -60.0], [-60.0, -50.0, 0.0], [0.0, -2000.0, -2000.0], [-2000.0, 0.0, -2000.0]])
    r = root(Categorical(), f.double())
    p = f.double().softmax(-1)
    lam = r @ r.mT
    assert lam.isfinite().all()
    others = p.unsqueeze(1).expand(-1, 3, -1).masked_fill(torch.eye(3, dtype=torch.bool), 0).sum(-1)  # 1 - p without a difference
    exact = torch.where(torch.eye(3, dtype=torch.bool), (p * others).unsqueeze(-1), -p[:, :, None] * p[:, None, :])
    size = (p * others).sqrt()
    assert ((lam - exact).abs() <= 1e-15 * size[:, :, None] * size[:, None, :]).all()


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda value: type(value).__name__)
def test_root_is_the_second_derivative(likelihood):
    f = torch.randn(6, brute.outputs_of(likelihood), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    r = root(likelihood, f)
    assert_close(r @ r.mT, brute.output_hessian(likelihood, f), atol=1e-14, rtol=1e-12)


def test_basis():
    for centre, columns in ((False, 5), (True, 4)):
        u = basis(5, centre)
        assert_close(u.T @ u, torch.eye(columns, dtype=torch.float64))
    assert_close(u @ u.T, torch.eye(5, dtype=torch.float64) - 0.2)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_the_model_is_left_alone(case, backend):
    """Weights, gradients, modes, hooks and flags are what they were; later training doesn't reach the curvature."""
    model, x = case.model(), case.data(6)
    frozen, second, *_ = model.parameters()
    frozen.requires_grad_(False)
    second.grad = torch.ones_like(second)
    before = copy.deepcopy(model)
    curvature = Curvature(model, backend=backend)
    first = curvature.diagonal(x)
    invert(curvature, x, 1.0).predict(x)
    for (name, new), (_, old) in zip(model.named_modules(), before.named_modules(), strict=True):
        assert new.training == old.training, name
        assert set(vars(new)) == set(vars(old)), name
        assert not new._forward_hooks
        assert not new._backward_hooks
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(new, old)
        assert new.requires_grad == old.requires_grad
        assert (new.grad is None and old.grad is None) or torch.equal(new.grad, torch.ones_like(new))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert_close(curvature.diagonal(x), first, rtol=0, atol=0)


def test_batch_norm_that_evaluates():
    """Through torch.func and BackPACK; its running averages are constants."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    model(torch.randn(20, 1, 4, 4, dtype=torch.float64))
    model.eval()
    x = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    want = brute.ggn(model, Categorical(), x).diagonal()
    assert Curvature(model).backend == "func"
    for backend in ("func", "backpack"):
        assert_close(Curvature(model, backend=backend).diagonal(x), want, **EXACT)


def test_bernoulli_is_two_classes():
    """A logit against zero: the same curvature as softmax over (0, f)."""
    torch.manual_seed(0)
    one = nn.Linear(3, 1).double()
    two = nn.Linear(3, 2).double()
    with torch.no_grad():
        two.weight.copy_(torch.cat([torch.zeros_like(one.weight), one.weight]))
        two.bias.copy_(torch.cat([torch.zeros(1), one.bias]))
    x = torch.randn(5, 3, dtype=torch.float64)
    rows = torch.tensor([3, 4, 5, 7])
    assert_close(Curvature(one, Bernoulli()).ggn(x), Curvature(two).ggn(x, rows), **EXACT)
