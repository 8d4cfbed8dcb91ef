"""Every algorithm on a network of several inputs: the numbers of the same network on one tensor
that holds them all.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.inputs import Inputs, each
from bayesfl.composition.predictors import LinearisedBelief, LinearisedLaplace
from bayesfl.data import FederatedData
from tests.cases import CASES, FEWER, SAMPLE, federation, run
from tests.federation.made import state


class One(nn.Module):
    """The body of a network of numbers and truth values, which stand in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x[:, :8]) * (1 + self.second(x[:, 8:])))


class Several(One):
    """The same of its own tensors."""

    def forward(self, numbers: Tensor, known: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] (others, on purpose)
        assert known.dtype == torch.bool
        return super().forward(torch.cat([numbers.flatten(1), known.to(numbers)], 1))


def network(body: type[One]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return bf.models.SplitModel(body(), nn.Linear(6, 3))


def of(data: FederatedData, x: Inputs) -> FederatedData:
    """The same federation with other inputs."""
    splits = {name: replace(split, x=x) for name, split in data.splits.items()}
    return replace(data, splits=splits, inputs=splits["train"].inputs)


def with_predictors(name: str, model: nn.Module) -> bf.Algorithm:
    """FedPer and pFedVEM with predictors by linearised networks."""
    if name == "belief":
        method = bf.algorithms.pfedvem(
            model, head_epochs=2, body_epochs=1, batch_size=10, init_scale=0.1
        )
        return replace(method, predictor=LinearisedBelief())
    structure: Any = name
    return replace(
        bf.algorithms.fedper(model, epochs=1, batch_size=10),
        predictor=LinearisedLaplace("body", structure=structure, precision=1.0),
    )


# Which wants a norm, and is otherwise fedper.
METHODS = {str(case): case for case in CASES if case.name not in ("fedbn", "fedsa_lora")}
METHODS |= {
    name: lambda model, name=name: with_predictors(name, model)
    for name in ("full", "subnetwork", "diagonal", "belief")
}


@pytest.mark.filterwarnings(
    "ignore:most of the selected weights", "ignore:.*lets the prior determine the predictions"
)
@pytest.mark.parametrize(
    "name",
    [
        name if name in (*SAMPLE, "belief") else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
    ],
)
def test_several_inputs_are_one_that_is_joined(name: str):
    """States, predictions, and those of a client alone."""
    data, method = federation(sizes=FEWER), METHODS[name]
    x = data.train.x
    assert isinstance(x, Tensor)
    numbers, known = x.unflatten(1, (2, 4)), x.flip(1) > 0
    wanted = run(method(network(One)), of(data, torch.cat([x, known.float()], 1)), 2)
    found = run(method(network(Several)), of(data, {"known": known, "numbers": numbers}), 2)
    assert_close(state(found), state(wanted), rtol=0, atol=1e-10)
    own = wanted.predict()
    for field in ("probs", "epistemic"):
        assert_close(
            getattr(found.predict(), field), getattr(own, field), rtol=0, atol=1e-9, equal_nan=True
        )
    rows = each(lambda t: t[found.data.test.rows(2)], found.data.test.x)
    assert_close(found.client(2).predict(rows).probs, own.client(2).probs, rtol=0, atol=1e-9)
