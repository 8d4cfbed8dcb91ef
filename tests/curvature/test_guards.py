"""What bad input gets, and what is never formed."""

import math
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.curvature import Curvature, cholesky, factors, invert, root
from tests.curvature import brute


@pytest.fixture
def curvature() -> Curvature:
    torch.manual_seed(0)
    return Curvature(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("precision", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_prior_precision_is_positive(curvature, x, precision, form):
    for value in (precision, torch.full((23,), 1.0).index_fill(0, torch.tensor([4]), precision)):
        with pytest.raises(ValueError, match=re.escape(f"a prior precision must be > 0 and finite, got {precision}")):
            invert(curvature, x, value, form=form)


def test_a_precision_fits_the_weights(curvature, x):
    with pytest.raises(ValueError, match=r"one for each of the 23 weights is needed, got shape \(5,\)"):
        invert(curvature, x, torch.ones(5))


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (range(0), "indices are empty: a subnetwork has at least one weight"),
        ([0, 23], "indices must lie in 0 to 22, got 0 to 23"),
        ([-1, 3], "indices must lie in 0 to 22, got -1 to 3"),
        ([3, 4, 3], "each index may stand once; 1 stand again"),
        (list(range(24)), "a subnetwork of 24 weights is larger than the 23 weights that are covered"),
        ([[1, 2]], "must be a vector of integers"),
        ([0.5], "must be a vector of integers"),
        ([True, False], "must be a vector of integers"),
    ],
)
def test_indices(curvature, x, indices, message):
    indices = torch.tensor(list(indices), dtype=torch.long if isinstance(indices, range) else None)
    for call in (
        curvature.columns,
        curvature.ggn,
        lambda x, i: invert(curvature, x, 1.0, indices=i),
        lambda x, i: curvature.gram(x, indices=i),
    ):
        with pytest.raises(ValueError, match=message):
            call(x, indices)


def test_curvature_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[1, 0] = math.nan
    with pytest.raises(ValueError, match="outputs are not finite for 5 of 5 examples"):
        Curvature(model).diagonal(torch.ones(5, 3))
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 2))
    x = torch.full((4, 3), 1e30) * torch.tensor([1.0, 0.0, 0.0])  # its square is beyond float32, the outputs are not
    for backend in ("layers", "func"):
        with torch.no_grad():
            model[0].weight.zero_()
        curvature = Curvature(model, backend=backend)
        if backend == "layers":
            with pytest.raises(ValueError, match=r"the curvature is not finite for '0.weight' \(2 of 6\)"):
                curvature.diagonal(x)
        for value in (math.nan, math.inf):
            with pytest.raises(ValueError, match=r"the curvature is not finite for '2.bias' \(1 of 2\)"):
                invert(curvature, x[:, [1, 1, 1]], 1.0, diagonal=torch.ones(curvature.size).index_fill(0, torch.tensor([11]), value))


def test_the_bytes_are_said_first(x):
    """Before anything is allocated, for each result."""
    model = brute.mlp(4).double()
    x = torch.randn(9, 7, dtype=torch.float64)
    size = Curvature(model).size
    tight = Curvature(model, memory=100)
    with pytest.raises(MemoryError, match=rf"a GGN of {size} weights needs .*\({8 * size**2} bytes\) and 100 bytes may be used"):
        tight.ggn(x)
    with pytest.raises(MemoryError, match=r"J_S with 3 columns needs 864 bytes"):
        tight.columns(x, torch.arange(3))
    with pytest.raises(MemoryError, match=rf"the Gram matrix needs .*\({8 * 36**2} bytes\)"):
        tight.gram(x)
    with pytest.raises(MemoryError, match=rf"the dual form, of order 27, needs .*\({24 * 27**2} bytes\)"):
        invert(tight, x, 1.0)
    with pytest.raises(MemoryError, match="the primal form, of order 9, needs"):
        invert(tight, x, 1.0, indices=torch.arange(20, 29))
    huge = Curvature(nn.Sequential(nn.Linear(4000, 1000, bias=False), nn.Linear(1000, 2)))
    with pytest.raises(MemoryError, match=r"GGN of 4002002 weights needs 116\.\d TiB \(128128160064032 bytes\)"):
        huge.ggn(torch.zeros(1, 4000))


def test_a_failed_cholesky_says_so():
    bad = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match="of order 2, has no Cholesky factor even with 1e-6 of its mean diagonal 1"):
        cholesky(bad)
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        cholesky(bad * math.inf)
    singular = torch.ones(3, 3, dtype=torch.float64)
    assert_close(cholesky(singular) @ cholesky(singular).T, singular, atol=2e-6, rtol=0)
    assert torch.equal(singular, torch.ones_like(singular))


def test_layers_that_are_not_supported_are_named():
    norm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="'layers' has no closed form for GroupNorm '1'; backend='func' takes any architecture"):
        Curvature(norm, backend="layers")
    with pytest.raises(ValueError, match="BackPACK does not support GroupNorm '1'; backend='func' takes any architecture"):
        Curvature(norm, backend="backpack")
    assert Curvature(norm).backend == "func"
    with pytest.raises(ValueError, match="Residual ''"):
        Curvature(brute.Residual(2), backend="layers")
    for layer in (nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")):
        with pytest.raises(ValueError, match="Conv2d '0'"):
            Curvature(nn.Sequential(layer, nn.Flatten()), backend="layers")
    twice = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="used in two places"):
        Curvature(nn.Sequential(twice, nn.Tanh(), twice), backend="layers")
    assert Curvature(nn.Sequential(twice, nn.Tanh(), twice)).backend == "func"
    with pytest.raises(ValueError, match="must be 'auto', 'layers', 'func' or 'backpack', got 'asdl'"):
        Curvature(norm, backend="asdl")  # type: ignore[arg-type]


def test_training_modes_are_refused():
    with pytest.raises(ValueError, match=r"batch norm '1' in training mode .* model.eval\(\), or use group norm"):
        Curvature(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match=r"batch norm '1' that tracks no statistics .*: let it track them, or use group norm"):
        Curvature(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)).eval())
    with pytest.raises(ValueError, match=r"dropout '1' in training mode .* model.eval\(\)"):
        Curvature(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))


def test_data(curvature, x):
    for call in (
        curvature.diagonal,
        curvature.ggn,
        lambda x: invert(curvature, x, 1.0),
        curvature.gram,
        lambda x: curvature.columns(x, torch.tensor([1])),
    ):
        with pytest.raises(ValueError, match="there are no data"):
            call(x[:0])
    with pytest.raises(TypeError, match="read more than once"):
        invert(curvature, iter([x]), 1.0)
    with pytest.raises(TypeError, match="a batch must be a tensor"):
        curvature.diagonal(["text"])
    with pytest.raises(ValueError, match=r"outputs \[N, O\], got shape \(6, 4, 3\)"):
        Curvature(nn.Linear(4, 3).double()).diagonal(x[:, None].expand(-1, 4, -1))
    with pytest.raises(ValueError, match="form must be"):
        invert(curvature, x, 1.0, form="both")
    with pytest.raises(ValueError, match="indices must be a vector of integers, got 'a'"):
        curvature.columns(x, "a")
    with pytest.raises(ValueError, match="indices are empty"):
        curvature.columns(x, [])
    for precision in (True, torch.tensor(True)):
        with pytest.raises(ValueError, match=r"precision: one number or one for each of the .* got (tensor\()?True"):
            invert(curvature, x, precision)
    with pytest.raises(TypeError, match="pattern must be of type str, got int"):
        Curvature(nn.Linear(2, 2), pattern=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the curvature of Poisson is not known"):
        root(type("Poisson", (), {})(), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="matches no parameter"):
        Curvature(nn.Linear(2, 2), pattern="body.*")
    assert Curvature(nn.Linear(2, 2), pattern=Layout(nn.Linear(2, 2), "bias")).size == 2


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            # A view of a tensor expanded over an axis takes no memory of its own.
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // 8)
        return out


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "count"), [("layers", 100), ("func", 40)])
def test_the_jacobian_is_never_formed(backend, count):
    """For an MLP whose [N, O, D] takes gigabytes nothing beyond a block, D or the result is made; the same for ten times the data."""
    torch.manual_seed(0)
    model = bf.models.mlp(784, hidden=1000, outputs=5)
    x, test = torch.rand(count, 784), torch.rand(10, 784)
    curvature = Curvature(model, pattern="body.*", backend=backend)
    full = count * 5 * curvature.size
    assert 8 * full > 1.2e9
    indices = torch.arange(0, curvature.size, curvature.size // 300)
    block = factors.BLOCK // 8
    with Largest() as largest:
        curvature.diagonal(x)
        curvature.columns(x, indices)
        curvature.ggn(x, indices)
        for form in ("primal", "dual"):
            part = invert(curvature, x, 1.0, indices=indices, form=form)  # type: ignore[arg-type]
            part.predict(test)
            part.marginals()
        if backend == "layers":
            curvature.gram(x)
            whole = invert(curvature, x, 1.0)
            assert whole.form == "dual"
            whole.predict(test)
            whole.marginals()
            whole.sample(torch.randn(2, whole.noise_size, dtype=torch.float64))
    assert largest.numbers <= 1.1 * block < full / 15
    if backend == "layers":
        before = largest.numbers
        with Largest() as more:
            curvature.diagonal([x] * 10)
            invert(curvature, [x] * 10, 1.0, indices=indices)
        assert more.numbers <= before


@pytest.mark.slow
def test_a_convolution_is_taken_apart():
    """Weights of a wide convolution come in pieces of a block, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 3))
    x = torch.rand(40, 256, 4, 4)
    curvature = Curvature(model)
    with Largest() as largest:
        curvature.diagonal(x)
        curvature.gram(x)
    assert largest.numbers <= 1.1 * factors.BLOCK // 8 < 40 * 3 * curvature.size / 7
