"""pFedMAP against its fixed points on linear-Gaussian clients."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.models import SplitModel
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, moments
from tests.cases import federation, run


def linear(head: Tensor | None = None) -> SplitModel:
    """A head on an identity body: with a body rate of 0, a linear model."""
    body, top = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():
        body.weight.copy_(torch.eye(DIM))
        top.weight.copy_(torch.zeros(1, DIM) if head is None else head)
    return SplitModel(body, top)


@pytest.mark.slow
def test_pfedmap_reaches_its_fixed_point(regressions: FederatedData):
    """For quadratics w = [sum_j (I - lambda R_j)]^-1 sum_j R_j b_j, R_j = (A_j + lambda I)^-1: the
    joint MAP, sum likelihood.
    """
    lam = 2.0
    options: dict[str, Any] = {
        "head_epochs": 200,
        "body_epochs": 1,
        "head_optimiser": SGD(0.02, momentum=0.5),
        "body_optimiser": SGD(0.0),
    }
    algorithm = bf.algorithms.pfedmap(linear(), precision=lam, likelihood=Gaussian(), **options)
    result = run(algorithm, regressions, rounds=60, sampling="fixed")
    a, b = moments(regressions)
    identity = torch.eye(DIM).double()
    r = torch.linalg.inv(a + lam * identity)
    w = torch.linalg.solve((identity - lam * r).sum(0), torch.einsum("jde,je->d", r, b))
    assert_close(result.server["head"]["loc"], w, atol=1e-8, rtol=0)
    assert_close(
        result.private["head"]["loc"], torch.einsum("jde,je->jd", r, b + lam * w), atol=1e-8, rtol=0
    )


def test_pfedmap_under_a_mean_likelihood_is_tempered(regressions: FederatedData):
    """The paper's energy has the mean loss beside the whole penalty: w_j = (A / n + lambda)^-1 (b /
    n + lambda w).
    """
    lam, start = 2.0, torch.full((1, DIM), 0.3)
    algorithm = bf.algorithms.pfedmap(
        linear(start),
        precision=lam,
        head_epochs=2000,
        body_epochs=1,
        head_optimiser=SGD(0.1, momentum=0.9),
        body_optimiser=SGD(0.0),
        likelihood_scale="mean",
        likelihood=Gaussian(),
    )
    result = run(algorithm, regressions, rounds=1, sampling="fixed")
    a, b = moments(regressions)
    n = torch.tensor(COUNTS).double()[:, None]
    expected = torch.linalg.solve(
        a / n[..., None] + lam * torch.eye(DIM).double(), b / n + lam * start.double()
    )
    assert_close(result.private["head"]["loc"], expected, atol=1e-8, rtol=0)


def test_precisions_without_an_inverse_are_refused():
    model = bf.models.mlp(8, hidden=4, outputs=3)
    for precision in (float("inf"), 1e40, 1e-50, 0.0):
        with pytest.raises(
            ValueError,
            match=rf"precision .*\(1e-30, 1e\+30\).*got {re.escape(str(precision))}; its inverse",
        ):
            bf.algorithms.pfedmap(model, precision=precision, head_optimiser=SGD(0.0))


def test_a_rate_that_grows_until_the_tie_diverges():
    """A schedule is judged as the rounds come: in round 2 here, before the steps that diverge."""
    growing = SGD(lambda round, rounds: 1e-3 * round, momentum=0.9)
    warming = bf.algorithms.pfedmap(
        bf.models.mlp(8, hidden=4, outputs=3), precision=1e6, head_optimiser=growing
    )
    with (
        pytest.warns(
            UserWarning,
            match=r"round 2: .*rate 0\.001 .*prior precision 1e\+06; .*a prior precision below",
        ),
        pytest.raises(bf.DivergenceError),
    ):
        bf.simulate(warming, federation(), rounds=3, evaluate_every=None, progress=False)


@pytest.mark.parametrize(
    "option", [{"body_epochs": 7}, {"body_optimiser": SGD(3.0)}, {"batch_size": 3}], ids=str
)
@pytest.mark.parametrize("make", [bf.algorithms.pfedmap, bf.algorithms.pfedvem])
def test_options_of_a_body_without_one(make: Any, option: dict[str, Any]):
    flat = bf.models.mlp(8, hidden=(), outputs=3)
    with pytest.raises(
        ValueError, match=rf"{next(iter(option))} has no effect where the model trains no body"
    ):
        make(flat, **option)


def test_a_model_that_is_all_head():
    """The heads move as those of a model whose body is the identity, held still; nothing of a body
    is sent.
    """
    data, flat = federation(), bf.models.mlp(8, hidden=(), outputs=3, seed=1)
    still = SplitModel(nn.Linear(8, 8, bias=False), flat.head)
    with torch.no_grad():
        still.get_parameter("body.weight").copy_(torch.eye(8))
    alone = run(bf.algorithms.pfedmap(flat, head_epochs=4), data, rounds=2)
    held = run(bf.algorithms.pfedmap(still, head_epochs=4, body_optimiser=SGD(0.0)), data, rounds=2)
    assert list(alone.server) == ["head"]
    assert_close(alone.private["head"]["loc"], held.private["head"]["loc"], atol=1e-12, rtol=0)
