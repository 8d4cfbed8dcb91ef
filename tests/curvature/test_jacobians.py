"""Rows of a Jacobian against brute force."""

import pytest
import torch
from torch.testing import assert_close

from bayesfl.base.layout import Layout
from bayesfl.curvature import Curvature
from bayesfl.likelihoods import Categorical
from tests.curvature import brute
from tests.curvature.brute import PAIRS
from tests.curvature.made import EXACT, chosen, gram


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_jacobian_columns_and_gram(case, backend):
    model, x, other = case.model(), case.data(9), case.data(5, seed=3)
    curvature = Curvature(model, backend=backend)
    j, k = brute.jacobian(model, x), brute.jacobian(model, other)
    indices = chosen(curvature.size)
    weight = torch.rand(
        curvature.size, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    assert_close(curvature.columns(x, indices), j[:, :, indices], **EXACT)
    rows, others = j.flatten(0, 1), k.flatten(0, 1)
    assert_close(gram(curvature, x), rows @ rows.T, **EXACT)
    assert_close(gram(curvature, x, other, weight=3.0), 3 * rows @ others.T, **EXACT)
    assert_close(gram(curvature, x, weight=weight), rows * weight @ rows.T, **EXACT)
    assert_close(gram(curvature, x, other, weight=weight), rows * weight @ others.T, **EXACT)
    part = (rows[:, indices] * weight[indices], others[:, indices])
    assert_close(
        gram(curvature, x, other, weight=weight, indices=indices), part[0] @ part[1].T, **EXACT
    )


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
