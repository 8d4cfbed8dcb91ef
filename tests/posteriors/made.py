"""Small networks, and numbers for them."""

import torch
from torch import Tensor, nn

import bayesfl as bf
from tests.cases import numbers


def network(outputs: int = 3) -> nn.Module:
    """A small MLP in float64."""
    return bf.models.mlp(4, hidden=6, outputs=outputs, seed=1).double()


def linear_model() -> tuple[nn.Module, Tensor, Tensor, float]:
    """A linear model at its MAP under precision 0.7 and noise 0.5: Laplace is exact there."""
    x, noise, precision = numbers(20, 3), 0.5, 0.7
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + noise * numbers(20, seed=1)
    model = nn.Linear(3, 1, bias=False).double()
    hessian = x.T @ x / noise**2 + precision * torch.eye(3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_((torch.linalg.solve(hessian, x.T @ y / noise**2))[None])
    return model, x, y, precision
