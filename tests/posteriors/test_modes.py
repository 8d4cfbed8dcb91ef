"""Torch's modes of the caller: autocast, `no_grad`, `inference_mode` and another default precision
change no bit of a posterior.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesfl.posteriors import FullGaussian, Laplace, MeanField, ensemble, nuts, sghmc, sgld
from bayesfl.posteriors.pooled import PooledCurvature
from bayesfl.posteriors.prior_precision import by_evidence, by_validation, predictive_nll

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
PRIOR: dict[str, Any] = {"precision": 1.0}


def rows() -> tuple[Tensor, Tensor]:
    """Rows that are made where they are used, in the mode of the caller."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def laplace(structure: str, **more: Any) -> list[Tensor]:
    x, y = rows()
    fitted = Laplace.fit(MODEL, x, y, structure=structure, **PRIOR, **more)
    draws = fitted.sample(4)
    return [
        fitted.moments()[1],
        fitted.log_det(),
        fitted.log_marginal_likelihood(x, y),
        *fitted.linearised(x),
        *fitted.predict(x).values(),
        *fitted.predict(x, noise=torch.ones(2, 60, 3)).values(),
        *draws.predict(x).values(),
        by_evidence(fitted, x).precision,
        by_validation(fitted, x, x, y).moments()[1],
        torch.tensor(predictive_nll(fitted, x, y)),
    ]


def pooled(structure: Any) -> list[Tensor]:
    x, y = rows()
    survey = PooledCurvature(MODEL, structure)
    total = {name: t[0] for name, t in survey.answer({}, [(x, y)]).items()}
    found = survey.posterior(survey.solve({}, total)[0])
    return [found.moments()[1], found.log_marginal_likelihood(), *found.predict(x).values()]


def variational(family: Any) -> list[Tensor]:
    x, y = rows()
    fitted = family.fit(MODEL, x, y, steps=5, **PRIOR)
    return [
        fitted.sample(3).draws,
        *fitted.moments(),
        fitted.elbo(x, y, draws=2),
        *fitted.predict(x, draws=3).values(),
    ]


def sampled(sampler: Any, **more: Any) -> list[Tensor]:
    x, y = rows()
    found = sampler(MODEL, x, y, precision=torch.ones(67, dtype=torch.float64), **more)
    return [found.draws, *found.predict(x).values()]


def by_nuts() -> list[Tensor]:
    more = {"precision": 1.0, "pattern": "2.bias", "draws": 3, "warmup": 3, "chains": 1}
    found = nuts(MODEL, *rows(), **more)
    return [found.draws, *found.predict(rows()[0]).values()]


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "full": lambda: laplace("full"),
    "diagonal": lambda: laplace("diagonal"),
    "kfac": lambda: laplace("kfac"),
    "subnetwork": lambda: laplace("subnetwork", indices=torch.arange(9)),
    "last layer": lambda: laplace("full", pattern="2.*"),
    "pooled last layer": lambda: pooled("last_layer"),
    "pooled diagonal": lambda: pooled("diagonal"),
    "pooled kronecker": lambda: pooled("kfac"),
    "pooled full": lambda: pooled("full"),
    "MeanField": lambda: variational(MeanField),
    "FullGaussian": lambda: variational(FullGaussian),
    "sgld": lambda: sampled(sgld, draws=2, warmup=2),
    "sghmc": lambda: sampled(sghmc, draws=2, warmup=2),
    "ensemble": lambda: sampled(ensemble, members=2, steps=3),
    "nuts": by_nuts,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_modes_of_the_caller_change_no_bit(case: Callable[[], list[Tensor]]):
    wanted = case()
    for name, mode in MODES.items():
        with mode():
            found = case()
        assert [t.dtype for t in found] == [t.dtype for t in wanted], name
        assert all(map(torch.equal, found, wanted)), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_default_precision_changes_nothing_but_rounding(
    case: Callable[[], list[Tensor]],
):
    """The precision is the model's."""
    wanted = case()
    torch.set_default_dtype(torch.float64)
    try:
        found = case()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
