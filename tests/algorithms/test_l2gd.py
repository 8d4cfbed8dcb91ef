"""L2GD on linear regressions, against its steps one by one."""

import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run

LAM, P, RATE, SEED = 1.5, 0.3, 0.1, 3


def method() -> bf.Algorithm:
    return bf.algorithms.l2gd(
        linear_only(torch.full((1, DIM), 0.4)),
        lam=LAM,
        p=P,
        optimiser=SGD(RATE),
        likelihood=Gaussian(),
    )


def test_models_take_the_papers_steps(regressions: FederatedData):
    """All clients together: towards their mean, then on their data, as often as is drawn."""
    rounds = 4
    result = run(method(), regressions, rounds=rounds, seed=SEED)
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double().unsqueeze(1)
    x = torch.full((4, DIM), 0.4).double()
    taken = []
    for round in range(rounds):
        pulls, steps = (
            int(generator(SEED, Purpose.COMMON, round=round, index=i).geometric(chance))
            for i, chance in enumerate((1 - P, P))
        )
        for _ in range(pulls):
            x = x - RATE * LAM * (1 - P) / P * (x - x.mean(0))
        for _ in range(steps):
            x = x - RATE * ((a @ x.unsqueeze(-1)).squeeze(-1) - b) / n
        taken.append((pulls, steps))
    assert_close(result.private["x"]["loc"], x, atol=1e-9, rtol=0)
    assert_close(result.server["x"]["loc"], x.mean(0), atol=1e-9, rtol=0)
    assert len(set(taken)) > 2


def test_the_numbers_of_steps_are_those_of_a_coin():
    """A run of one side that comes up with chance p ends, in the mean, after 1 / (1 - p)."""
    made, rounds = method(), 4000
    start = made.init(4)
    drawn = [made.redrawn(start, seed=0, round=r) for r in range(rounds)]
    for name, chance in (("pulls", 1 - P), ("steps", P)):
        numbers = torch.stack([one[name] for one in drawn]).double()
        spread = (1 - chance) ** 0.5 / chance
        assert abs(float(numbers.mean()) - 1 / chance) < 4 * spread / rounds**0.5
        assert float(numbers.min()) == 1
        assert float(numbers.std()) == pytest.approx(spread, rel=0.1)
