"""Modules that compute something else than their layers do one after another train and predict as
plain torch does, by every kernel.
"""

import copy
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.curvature import Curvature
from bayesfl.data import FederatedData
from bayesfl.models.altered import altered, cut
from bayesfl.optim import SGD
from tests.federation.made import run


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def hooked() -> nn.Module:
    model = stack()
    model[0].register_forward_hook(lambda layer, inputs, outputs: outputs * 3)
    return model


def pre_hooked() -> nn.Module:
    model = nn.Sequential(stack()[:4], nn.Linear(6, 3))
    model[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0] - 1,))
    return model


def replaced() -> nn.Module:
    model = stack()
    model[0].forward = types.MethodType(
        lambda self, x: 2 * F.linear(x, self.weight, self.bias), model[0]
    )
    return model


def tied() -> nn.Module:
    model = nn.Sequential(*stack()[:4], nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model[4].weight = model[2].weight
    return model


def tied_across() -> nn.Module:
    model = bf.models.SplitModel(
        stack()[:4], nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    )
    model.head[0].weight = model.body[2].weight  # type: ignore[index]
    return model


def constant_bias() -> nn.Module:
    model = stack()
    del model[0].bias
    model[0].register_buffer("bias", torch.ones(6))
    return model


class Scaled(bf.models.SplitModel):
    """A head that reads scaled features, by a parameter that is in neither part."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__(body, head)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * self.body(x).sigmoid())


def scaled() -> nn.Module:
    return Scaled(stack()[:4], nn.Linear(6, 3))


MADE = (hooked, pre_hooked, replaced, tied, tied_across, constant_bias, scaled)


@pytest.mark.parametrize("kernel", ["auto", "live", "vmap", "reference"])
@pytest.mark.parametrize("make", MADE)
def test_it_trains_and_predicts_as_plain_torch(
    make: Callable[[], nn.Module], kernel: Any, clients: FederatedData
):
    """Ten full-batch steps of gradient descent, against a bare loop over the module itself."""
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model).double()
    x, y = clients.train.client(0)
    optimiser = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(10):
        optimiser.zero_grad()
        F.cross_entropy(alone(x.double()), y).backward()
        optimiser.step()
    method = bf.algorithms.local(model, epochs=1, batch_size=None, optimiser=SGD(0.1))
    result = run(method, clients, rounds=10, evaluate_every=None, engine=bf.Engine(kernel, chunk=3))
    test = clients.test.client(0)[0].double()
    found = [result.predict().client(0).probs, result.client(0).model()(test)]
    assert_close(found, [alone(test).softmax(-1), alone(test)], atol=1e-10, rtol=0)


@pytest.mark.parametrize("make", MADE)
def test_its_curvature_is_that_of_the_whole_module(make: Callable[[], nn.Module]):
    """No backend takes the layers' closed forms, unless what is altered is a constant alone, which
    they do not read.
    """
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(5, 8, dtype=torch.float64)
    assert_close(
        Curvature(model).diagonal(x),
        Curvature(model, backend="func").diagonal(x),
        atol=1e-10,
        rtol=1e-8,
    )


def test_what_is_named():
    """The module and what alters it; a plain stack is not."""
    assert altered(stack()) == altered(bf.models.mlp(8, outputs=3)) == []
    for make, words in (
        (hooked, "hooks"),
        (replaced, "forward"),
        (tied, "two places"),
        (constant_bias, "bias that is no parameter"),
    ):
        assert any(words in found for found in altered(make())), make
    whole = (lambda: bf.models.mlp(8, outputs=3), stack, tied_across, scaled)
    assert [cut(make()) for make in whole] == [True, False, False, False]


def test_a_method_that_needs_features_refuses_a_module_that_has_none():
    with pytest.raises(ValueError, match="SplitModel"):
        bf.algorithms.fedpac(scaled())


def test_a_laplace_predictor_reads_the_whole_module(clients: FederatedData):
    """By hooks too: predictions of any kernel are the same."""
    torch.manual_seed(0)
    method = replace(
        bf.algorithms.fedavg(hooked(), epochs=1), predictor=LinearisedLaplace(precision=1.0)
    )
    found = [
        run(method, clients, rounds=1, evaluate_every=None, engine=bf.Engine(kernel))
        .predict()
        .probs
        for kernel in ("auto", "vmap")
    ]
    assert_close(found[0], found[1], atol=1e-10, rtol=0, equal_nan=True)
