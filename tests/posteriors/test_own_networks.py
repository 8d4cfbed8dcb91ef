"""Networks that reach their weights in unusual ways have the gradients and Jacobians of PyTorch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayesfl.curvature import Curvature
from bayesfl.curvature.kronecker import diagonal_of, factors
from bayesfl.posteriors import Laplace, MeanField, nuts, sgld
from bayesfl.posteriors.sampling.target import Target
from tests.networks import KINDS, Base, X, Y, made


def elsewhere(name: str) -> nn.Module:
    """The network at other weights."""
    model = made(name).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p)
    return model


def slope(model: nn.Module) -> Tensor:
    """The gradient of the summed loss, by PyTorch alone."""
    model.zero_grad()
    F.cross_entropy(model(X), Y, reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", KINDS)
def test_slopes_are_pytorchs(name):
    model = elsewhere(name)
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    wanted = slope(model) + w
    target = Target.of(made(name).double(), X, Y, None, precision=1.0, centre=0.0, pattern="*")
    for _ in range(2):
        found = target.slope(w, X, Y) * len(X)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "InABackwardHook"])
def test_curvature_is_pytorchs(name):
    """The diagonal of the GGN, by a loop over examples and outputs."""
    model = elsewhere(name)
    wanted = 0.0
    for row in X:
        f = model(row[None])
        p = f.softmax(1).detach()[0]
        rows = []
        for k in range(3):
            model.zero_grad()
            f = model(row[None])
            f[0, k].backward()
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        J = torch.stack(rows)
        wanted = wanted + torch.einsum("kd,kl,ld->d", J, p.diag() - p.outer(p), J)
    found = Curvature(model).diagonal(X)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["InALambda", "SharedRecurrent", "BackwardReadsTheLayer"])
def test_posteriors_move_every_weight(name):
    model = made(name)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    for fitted in (
        MeanField.fit(model, X, Y, precision=1.0, steps=30),
        sgld(model, X, Y, precision=1.0, draws=10, warmup=10),
        nuts(model, X, Y, precision=100.0, draws=3, warmup=2, chains=1),
    ):
        mean = fitted.moments()[0]
        assert (mean != before.to(mean)).all()


@pytest.mark.parametrize("name", ["InAList", "InALambda", "InHooks"])
def test_threads_may_predict_by_one_posterior(name):
    fitted = Laplace.fit(made(name), X.float(), precision=1.0)
    wanted = fitted.predict(X.float())
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: fitted.predict(X.float()), range(40)):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


class Scaled(Base):
    def begin(self):
        self.a.register_forward_hook(lambda layer, given, out: 2 * out)


class BesideALayer(Base):
    def hidden(self, x):
        return self.a(x) + F.linear(x, self.a.weight)


class InACheckpoint(Base):
    def hidden(self, x):
        return checkpoint(self.a, x, use_reentrant=False)


class SineInACheckpoint(Base):
    def hidden(self, x):
        return checkpoint(lambda t: self.a(t).sin(), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Scaled, "alone use their weights, but those of 'a'"),
        (BesideALayer, "alone use their weights, but those of 'a'"),
        (InACheckpoint, "in no checkpoint.*'a' is used 2 times"),
        (SineInACheckpoint, "in no checkpoint.*'a' is used 2 times"),
    ],
)
def test_kronecker_factors_are_of_layers_that_alone_use_their_weights(kind, words):
    """Else factors would miss what the weights do elsewhere, or count inputs twice."""
    with pytest.raises(ValueError, match=words):
        Laplace.fit(kind().double(), X, precision=1.0, structure="kfac")


def test_kronecker_factors_of_one_example_have_the_ggns_diagonal():
    curvature = Curvature(Base().double())
    found = diagonal_of(curvature, *factors(curvature, X[:1]))
    torch.testing.assert_close(found, curvature.diagonal(X[:1]), rtol=1e-10, atol=1e-14)
