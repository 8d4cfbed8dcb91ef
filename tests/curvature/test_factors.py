"""Factors of a Jacobian, a block at a time."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.curvature import Curvature, factors, invert
from tests.curvature.made import Largest, gram


@pytest.mark.parametrize("unit", [0, 1000])
def test_both_ways_to_the_marginals(unit: int, monkeypatch: pytest.MonkeyPatch):
    """Of a dual form, by the factor's inverse or by solves for all columns: the diagonal of the
    primal form's covariance.
    """
    monkeypatch.setattr(factors, "UNIT", unit)
    monkeypatch.setattr(factors, "MOST_COLUMNS", 7)
    used: list[str] = []
    for name in ("quadratic_into", "solved_into"):
        monkeypatch.setattr(factors.Outer, name, _noting(getattr(factors.Outer, name), name, used))
    model = bf.models.mlp(5, hidden=6, outputs=3, seed=1).double()
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).double()
    curvature, precision = Curvature(model), torch.linspace(0.5, 2.0, 57, dtype=torch.float64)
    dual = invert(curvature, x, precision, form="dual").marginals()
    assert set(used) == {"solved_into" if unit else "quadratic_into"}
    assert_close(
        dual, invert(curvature, x, precision, form="primal").marginals(), atol=1e-12, rtol=1e-9
    )


def _noting(method: Any, name: str, used: list[str]) -> Any:
    def noted(*arguments: Any) -> Any:
        used.append(name)
        return method(*arguments)

    return noted


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "count"), [("layers", 100), ("func", 40)])
def test_the_jacobian_is_never_formed(backend, count):
    """For an MLP whose [N, O, D] takes gigabytes nothing beyond a block, D or the result is made;
    the same for ten times the data.
    """
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
            gram(curvature, x)
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
    model = nn.Sequential(
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 3),
    )
    x = torch.rand(40, 256, 4, 4)
    curvature = Curvature(model)
    with Largest() as largest:
        curvature.diagonal(x)
        gram(curvature, x)
    assert largest.numbers <= 1.1 * factors.BLOCK // 8 < 40 * 3 * curvature.size / 7
