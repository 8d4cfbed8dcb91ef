"""FedPA on linear regressions, against dense algebra and a plain loop."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.phases import Repeat
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run

RATE, WARM, AVERAGE, SAMPLES = 0.05, 2, 3, 4


def method(**options: Any) -> bf.Algorithm:
    return bf.algorithms.fedpa(
        linear_only(torch.full((1, DIM), 0.4)),
        samples=SAMPLES,
        average=options.pop("average", AVERAGE),
        epochs=WARM,
        batch_size=None,
        optimiser=SGD(RATE),
        likelihood=Gaussian(),
        **options,
    )


def by_hand(data: FederatedData, w: Tensor, shrinkage: float) -> Tensor:
    """The server's step, by the covariance as a matrix."""
    (a, b), deltas = moments(data), []
    for j, n in enumerate(COUNTS):
        at, iterates = w.clone(), []
        for _ in range(WARM + AVERAGE * SAMPLES):
            at = at - RATE * (a[j] @ at - b[j]) / n
            iterates.append(at)
        drawn = torch.stack(iterates[WARM:]).unflatten(0, (SAMPLES, AVERAGE)).mean(1)
        rho = 1 / (1 + (SAMPLES - 1) * shrinkage)
        spread = rho * torch.eye(DIM).double() + (1 - rho) * drawn.T.cov()
        deltas.append(torch.linalg.solve(spread, w - drawn.mean(0)))
    weights = torch.tensor(COUNTS).double() / sum(COUNTS)
    return weights @ torch.stack(deltas)


def test_the_servers_step(regressions: FederatedData):
    """Two rounds; with a large shrinkage the covariance counts most."""
    for shrinkage in (0.0, 0.3, 50.0):
        w = torch.full((DIM,), 0.4).double()
        for _ in range(2):
            w = w - 0.7 * by_hand(regressions, w, shrinkage)
        result = run(method(shrinkage=shrinkage, server_lr=0.7), regressions, rounds=2)
        assert_close(result.server["w"]["loc"], w, atol=1e-7, rtol=1e-7)


def test_the_first_rounds_are_fedavgs(regressions: FederatedData):
    """Over as many steps as FedPA takes."""
    plain = bf.algorithms.fedavg(
        linear_only(torch.full((1, DIM), 0.4)),
        epochs=WARM + AVERAGE * SAMPLES,
        batch_size=None,
        optimiser=SGD(RATE),
        likelihood=Gaussian(),
    )
    one = run(method(fedavg_rounds=1), regressions).server["w"]["loc"]
    assert_close(one, run(plain, regressions).server["w"]["loc"], atol=1e-9, rtol=0)


def test_averages_are_over_the_batches_that_there_were(regressions: FederatedData):
    """As where a study gives every method the same number of steps."""
    made = method(shrinkage=0.3)
    longer = replace(
        made,
        phases=tuple(
            replace(phase, times=AVERAGE + 2) if isinstance(phase, Repeat) else phase
            for phase in made.phases
        ),
    )
    want = run(method(shrinkage=0.3, average=AVERAGE + 2), regressions).server["w"]["loc"]
    assert_close(run(longer, regressions).server["w"]["loc"], want, atol=1e-9, rtol=0)
