"""BPFed on a linear model whose body and head have a column each, where bounds are closed forms."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import Adam
from tests.algorithms.made import moments
from tests.cases import run

ZETA, PRIOR, SCALE = 2.0, 0.7, 0.4


class Columns(nn.Module):
    """The body has the first two columns, the head the third."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
        for part in (self.body, self.head):
            nn.init.constant_(part.weight, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the parts make."""
        return self.body(x[:, :2]) + self.head(x[:, 2:])


@pytest.mark.slow
def test_a_round_maximises_the_bound_under_the_last_rounds_posterior(regressions: FederatedData):
    """Precisions of a mean field are the diagonal of X'X / zeta and the prior's, and its mean that
    of the posterior; the body's are averaged as loc and rho.
    """
    made = bf.algorithms.bpfed(
        Columns(),
        zeta=ZETA,
        prior_precision=PRIOR,
        steps=300,
        batch_size=None,
        optimiser=Adam(lambda round, rounds: 0.02),
        draws=200,
        init_scale=SCALE,
        likelihood=Gaussian(),
    )
    centre, width = torch.full((2,), 0.4).double(), torch.full((2,), SCALE).double()
    a, b = moments(regressions)
    for rounds in (1, 2):
        result = run(made, regressions, rounds=rounds)
        prior = torch.cat([width**-2, torch.tensor([PRIOR]).double()])
        pull = prior * F.pad(centre, (0, 1))
        loc = torch.linalg.solve(a / ZETA + prior.diag(), b / ZETA + pull)
        scale = (a.diagonal(dim1=1, dim2=2) / ZETA + prior).rsqrt()
        centre, rho = loc[:, :2].mean(0), scale[:, :2].expm1().log().mean(0)
        width = F.softplus(rho)
        assert_close(result.server["body"]["loc"], centre, atol=0.02, rtol=0)
        assert_close(F.softplus(result.server["body"]["rho"]), width, atol=0, rtol=0.05)
        assert_close(result.private["head"]["loc"], loc[:, 2:], atol=0.02, rtol=0)
        assert_close(F.softplus(result.private["head"]["rho"]), scale[:, 2:], atol=0, rtol=0.05)
