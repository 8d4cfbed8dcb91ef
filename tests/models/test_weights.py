"""A module at given weights, and weights that it keeps elsewhere than among its parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bayesfl.likelihoods import Categorical
from bayesfl.models.weights import refuse_unseen
from bayesfl.posteriors import Laplace, MeanField, nuts, sgld

X, Y = torch.rand(6, 3), torch.arange(6) % 2


class Stray(nn.Module):
    """A network with weights that it does not name as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.extra = [torch.ones(2, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.extra[0]


def positive() -> nn.Module:
    """A network of Pyro's whose weights are positive."""
    pyro = pytest.importorskip("pyro")
    from pyro.nn import PyroModule, PyroParam

    pyro.clear_param_store()

    class Positive(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = PyroModule[nn.Linear](3, 2)
            constraint = torch.distributions.constraints.positive
            self.layer.weight = PyroParam(torch.rand(2, 3) + 0.1, constraint=constraint)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    return Positive()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", [positive, Stray])
def test_posteriors_refuse_weights_that_they_do_not_see(make, called):
    """Whether or not the module was called before."""
    model = make()
    if called:
        model(X)
    fits = [
        lambda: Laplace.fit(model, X, precision=1.0),
        lambda: Laplace.fit(model, X, precision=1.0, structure="diagonal"),
        lambda: MeanField.fit(model, X, Y, precision=1.0),
        lambda: sgld(model, X, Y, precision=1.0),
    ]
    if make is Stray:  # Pyro's store keeps its precision, and NUTS computes in float64
        fits.append(lambda: nuts(model, X, Y, likelihood=Categorical(), precision=1.0))
    for fit in fits:
        with pytest.raises(ValueError, match=r"PyroParam.*parametrize"):
            fit()


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights_are_seen(change):
    """As torch makes them, and where some are frozen."""
    model = nn.Sequential(change(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[3].bias.requires_grad_(False)
    refuse_unseen(model.eval(), X)
    fitted = Laplace.fit(model, X, precision=1.0)
    assert (fitted.diagonal > 0).any()
