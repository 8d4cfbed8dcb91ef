"""Sites that are alike are computed at once, to the same numbers as alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, constraints

import bayesfl as bf
from bayesfl.stats.density.local import Batch, batches
from bayesfl.stats.density.questions import Marginals, OwnDraws
from bayesfl.stats.tables import Tables

SHARED = {"mu": constraints.real, "tau": constraints.positive}
LOCAL = {"theta": (constraints.real, 3)}


def density(shared: Any, own: Any, rows: Any) -> Tensor:
    y, noise = rows
    effects = Normal(shared["mu"], shared["tau"]).log_prob(own["theta"]).sum()
    return effects + Normal(own["theta"][:, None], noise).log_prob(y).sum()


def by_value(shared: Any, own: Any, rows: Any) -> Tensor:
    """What depends on the numbers in rows cannot be computed for several sites at once."""
    return density(shared, own, rows) if float(rows[0].max()) > -99 else shared["mu"]


def rows() -> dict[str, tuple[Tensor, float]]:
    """Sites of two shapes, in turns."""
    torch.manual_seed(0)
    return {f"s{j}": (torch.randn(3, 2 + j % 2).double(), 0.5 + j) for j in range(5)}


def alone(sites: Tables) -> list[Tables]:
    return [sites.only([name]) for name in sites.names]


def test_alike_sites_are_one_batch():
    """By the shapes of rows; a float is a number as others are."""
    sites = bf.stats.densities(density, rows(), shared=SHARED, local=LOCAL)
    assert batches([site.local for site in sites.sites]) == [[0, 2, 4], [1, 3]]
    apart = bf.stats.densities(by_value, rows(), shared=SHARED, local=LOCAL)
    assert batches([site.local for site in apart.sites]) == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_their_answers_are_those_of_each_alone(order: int):
    """Values, slopes and Hessians, in the order of the sites; and how far each can be relied on."""
    sites = bf.stats.densities(density, rows(), shared=SHARED, local=LOCAL)
    state = {"phi": torch.tensor([[0.2, -0.4], [-0.5, 0.3], [1.0, 0.0]]).double()}
    for question in (Marginals(5, 2, order), OwnDraws(5)):
        found = question.answer(state, sites)
        for j, one in enumerate(alone(sites)):
            for name, t in question.answer(state, one).items():
                assert torch.allclose(found[name][j], t[0], rtol=1e-9, atol=1e-9), name


def test_their_draws_are_those_of_each_alone():
    """Draw by draw, whatever the batch; two sites of the same rows have different ones."""
    given = rows()
    given["s0"] = given["s2"]
    sites = bf.stats.densities(density, given, shared=SHARED, local=LOCAL)
    models = [site.local for site in sites.sites]
    phi = torch.randn(50, 2, generator=torch.Generator().manual_seed(1)).double()
    together = Batch.of([models[k] for k in (0, 2, 4)]).drawn(phi, 3, [0, 2, 4])
    (each,) = Batch.of([models[2]]).drawn(phi, 3, [2])
    assert torch.allclose(together[1]["theta"], each["theta"], rtol=1e-9)
    assert not torch.allclose(together[0]["theta"], each["theta"])
