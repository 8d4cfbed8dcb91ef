"""FedIVON on linear regressions, against a plain loop and a closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import IVON
from bayesfl.posteriors import MeanField
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run

PRIOR, RATE, BETAS = 0.7, 0.03, (0.8, 0.9)


def method(**options: Any) -> bf.Algorithm:
    given: dict[str, Any] = {"prior_precision": PRIOR, "optimiser": IVON(RATE, betas=BETAS)}
    return bf.algorithms.fedivon(
        linear_only(torch.full((1, DIM), 0.4)),
        likelihood=Gaussian(),
        **{"batch_size": None, **given, **options},
    )


def natural(q: Any) -> tuple[Tensor, Tensor]:
    """Of a mean field, written out."""
    precision = torch.nn.functional.softplus(q["rho"]).square().reciprocal()
    return precision, q["loc"]


def test_steps_are_ivons():
    """Three of them from random draws, in the paper's form of a curvature h and a decay d, without
    a prior's mean, against slopes of the bound by autograd.
    """
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, DIM, generator=rng).double(), torch.randn(9, generator=rng).double()
    n, d, (b1, b2), optimiser = 9, PRIOR / 9, BETAS, IVON(RATE, betas=BETAS)
    q = {"w": MeanField(init_scale=0.3).init(torch.full((DIM,), 0.4).double())}
    state = optimiser.init(q)
    listed = [t.clone()[None] for t in q["w"].values()]
    own = optimiser.init(listed)
    m, h, g = q["w"]["loc"], 1 / (n * 0.3**2) - d, torch.zeros(DIM).double()
    for t in range(1, 4):
        e = torch.randn(DIM, generator=rng).double()

        def bound(q: Any, e: Tensor = e) -> Tensor:
            s = torch.nn.functional.softplus(q["w"]["rho"])
            fit = (y - x @ (q["w"]["loc"] + s * e)).square().sum() / 2
            return fit + PRIOR * s.square().sum() / 2 - s.log().sum()

        slopes = torch.func.grad(bound)(q)
        q, state = optimiser.update(q, slopes, state, RATE)
        optimiser.update_(listed, [t[None] for t in slopes["w"].values()], own, RATE, 1)

        s = (n * (h + d)) ** -0.5
        slope = (x.T @ (x @ (m + s * e) - y)) / n
        new = slope * e / s
        g = b1 * g + (1 - b1) * slope
        h = b2 * h + (1 - b2) * new + (1 - b2) ** 2 * (h - new) ** 2 / (2 * (h + d))
        m = m - RATE * g / (1 - b1**t) / (h + d)
    for found in (q["w"], dict(zip(q["w"], (t[0] for t in listed), strict=True))):
        precision, loc = natural(found)
        assert_close(precision, n * (h + d), rtol=1e-9, atol=0)
        assert_close(loc, m, rtol=1e-9, atol=0)


def test_points_have_no_precision(regressions: FederatedData):
    with pytest.raises(ValueError, match="IVON trains a mean and a deviation"):
        run(bf.algorithms.fedavg(linear_only(torch.zeros(1, DIM)), optimiser=IVON(),
                                 likelihood=Gaussian()), regressions)  # fmt: skip


def test_the_server_multiplies_gaussians():
    """Of three clients of twelve: each counts four times."""
    made = method()
    rng = torch.Generator().manual_seed(1)
    precision = 1 + torch.rand(3, DIM, generator=rng).double()
    loc = torch.randn(3, DIM, generator=rng).double()
    block = made.blocks["w"]
    sent = MeanField().of_natural(precision, precision * loc)
    server = made.init(12, dtype=torch.float64)
    pool: Any = block.pool
    found = pool.solve(server, "w", pool.accumulate(None, server, "w", {"w": sent}))
    assert_close(natural(found)[0], 4 * precision.sum(0))
    assert_close(found["loc"], (precision * loc).sum(0) / precision.sum(0))


def test_a_client_starts_with_its_share_of_the_posterior():
    """A quarter of the precision, where there are four, around the same mean."""
    made = method(init_scale=0.3)
    server = made.init(4, dtype=torch.float64)
    given = made.given(made.share(server, torch.arange(4))[0], 0, 1)
    view = {"w": made.belief("w", server["w"])}
    start: Any = made.phases[0]
    precision, loc = natural(start.fn(made, given, view, {})["w"])
    assert_close(precision, torch.full((DIM,), 1 / (4 * 0.3**2)).double())
    assert_close(loc, torch.full((DIM,), 0.4).double())


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_clients_end_at_their_own_posteriors(participation: float, regressions: FederatedData):
    """Each under its share of the prior, with the diagonal of its precision; the posterior is their
    product, which is that of all rows where precisions are diagonal.
    """
    optimiser = IVON(0.1, betas=(0.9, 0.995))
    options = {"steps": 1500, "optimiser": optimiser, "init_scale": 0.2, "draws": 20}
    result = run(method(**options), regressions, participation=participation)
    names = regressions.client_names
    cohort = [names.index(name) for name in result.took_part(1)]
    a, b = (t[cohort] for t in moments(regressions))
    share = PRIOR / len(COUNTS)
    loc = torch.linalg.solve(a + share * torch.eye(DIM).double(), b)
    each = a.diagonal(dim1=1, dim2=2) + share
    precision, mean = natural(result.server["w"])
    assert_close(precision, each.sum(0) / participation, rtol=0.08, atol=0)
    assert_close(mean, (each * loc).sum(0) / each.sum(0), rtol=0, atol=0.03)


@pytest.mark.slow
def test_few_steps_in_many_rounds_give_the_precision_of_all_rows(regressions: FederatedData):
    """Though clients have 2 to 4 batches."""
    optimiser = IVON(0.01, betas=(0.9, 0.997))
    options = {"steps": 5, "batch_size": 4, "optimiser": optimiser, "init_scale": 0.2, "draws": 8}
    result = run(method(**options), regressions, rounds=400)
    precision, _ = natural(result.server["w"])
    exact = moments(regressions)[0].diagonal(dim1=1, dim2=2).sum(0) + PRIOR
    assert_close(precision, exact, rtol=0.05, atol=0)
