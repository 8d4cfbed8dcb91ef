"""Roots of a likelihood's curvature at the outputs."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Tensors
from bayesfl.curvature.roots import basis, root, total, variances
from bayesfl.likelihoods import Categorical
from tests.curvature import brute
from tests.curvature.brute import LIKELIHOODS


def test_root_is_exact():
    """R R' is the golden Lambda, has rank O - 1, and stays finite and right where p is one-hot or
    nearly so.
    """
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    want = torch.tensor(
        [[[0.16, -0.06, -0.10], [-0.06, 0.21, -0.15], [-0.10, -0.15, 0.25]]], dtype=torch.float64
    )
    r = root(Categorical(), p.log())
    assert r.shape == (1, 3, 2)
    assert_close(r @ r.mT, want, atol=1e-15, rtol=0)
    f = torch.tensor(
        [
            [0.0, -50.0, -60.0],
            [-50.0, 0.0, -60.0],
            [-60.0, -50.0, 0.0],
            [0.0, -2000.0, -2000.0],
            [-2000.0, 0.0, -2000.0],
        ]
    )
    r = root(Categorical(), f.double())
    p = f.double().softmax(-1)
    lam = r @ r.mT
    assert lam.isfinite().all()
    # 1 - p without a difference.
    others = p.unsqueeze(1).expand(-1, 3, -1).masked_fill(torch.eye(3, dtype=torch.bool), 0).sum(-1)
    exact = torch.where(
        torch.eye(3, dtype=torch.bool), (p * others).unsqueeze(-1), -p[:, :, None] * p[:, None, :]
    )
    size = (p * others).sqrt()
    assert ((lam - exact).abs() <= 1e-15 * size[:, :, None] * size[:, None, :]).all()
    assert_close(variances(Categorical(), f), p * others, rtol=1e-15, atol=0)
    assert_close(total(Categorical(), f[:1]), exact[0], rtol=1e-15, atol=0)


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda value: type(value).__name__)
def test_root_is_the_second_derivative(likelihood):
    f = torch.randn(
        6,
        brute.outputs_of(likelihood),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    r = root(likelihood, f)
    curved = brute.output_hessian(likelihood, f)
    assert_close(r @ r.mT, curved, atol=1e-14, rtol=1e-12)
    assert_close(variances(likelihood, f), curved.diagonal(dim1=1, dim2=2), atol=1e-14, rtol=1e-12)
    assert_close(total(likelihood, f), curved.sum(0), atol=1e-14, rtol=1e-12)


def test_basis():
    for centre, columns in ((False, 5), (True, 4)):
        u = basis(5, centre)
        assert_close(u.T @ u, torch.eye(columns, dtype=torch.float64))
    assert_close(u @ u.T, torch.eye(5, dtype=torch.float64) - 0.2)


class Colder(Categorical):
    """A likelihood with a distribution of its own."""

    def predictive(self, outputs: Tensor) -> Tensors:
        return super().predictive(outputs / 4)


class Named(Categorical):
    """Nothing but another name."""


def test_likelihoods_of_unknown_curvature():
    """A subclass that overrides the loss or the predictive distribution is another likelihood; for
    Laplace it is refused at once.
    """
    outputs = torch.zeros(2, 3)
    assert_close(root(Named(), outputs), root(Categorical(), outputs))
    for likelihood in (Colder(), type("Mine", (), {})()):
        with pytest.raises(
            TypeError, match=rf"curvature of {type(likelihood).__name__} .*Categorical, Bernoulli"
        ):
            root(likelihood, outputs)
    with pytest.raises(TypeError, match=r"Colder"):
        bf.algorithms.fedsi(bf.models.mlp(4, outputs=3, hidden=3), likelihood=Colder())
