"""SCAFFOLD as a plain loop, and where it ends on quadratics, on which FedAvg ends elsewhere."""

import copy
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import DIM, linear_only, moments
from tests.cases import SIZES, run

RATES = (0.2, 0.1, 0.05)


def falling(round: int, rounds: int) -> float:
    """A rate of its own for each round."""
    return RATES[round]


def reference(
    model: nn.Module,
    clients: FederatedData,
    cohorts: list[list[int]],
    steps: list[int],
    server_lr: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The method as a plain loop on all of a client's data: x, c and the clients' c_i."""
    net = copy.deepcopy(model).double()
    x = parameters_to_vector(net.parameters()).detach()
    c, own = torch.zeros_like(x), torch.zeros(clients.clients, len(x)).double()
    for cohort, rate in zip(cohorts, RATES, strict=False):
        ends, changes = [], []
        for j in cohort:
            inputs, labels = clients.train.client(j)
            y = x.clone()
            for _ in range(steps[j]):
                vector_to_parameters(y, net.parameters())
                loss = F.cross_entropy(net(inputs.double()), labels)
                slope = parameters_to_vector(torch.autograd.grad(loss, list(net.parameters())))
                y = y - rate * (slope - own[j] + c)
            new = own[j] - c + (x - y) / (steps[j] * rate)
            ends.append(y)
            changes.append(new - own[j])
            own[j] = new
        x = x + server_lr * (torch.stack(ends).mean(0) - x)
        c = c + len(cohort) / clients.clients * torch.stack(changes).mean(0)
    return x, c, own


def alike(model: nn.Module, clients: FederatedData) -> FederatedData:
    """Clients whose examples are all the same, so that any batch is as good as any other."""
    rows = [clients.train.client(j) for j in range(clients.clients)]
    xs, ys = [x[:1].expand_as(x) for x, _ in rows], [y[:1].expand_as(y) for _, y in rows]
    return bf.data.from_arrays(xs, ys, test=(xs, ys), outputs=3, task="classification")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_rounds_as_a_plain_loop(
    model: nn.Module, clients: FederatedData, batch_size: int | None, workers: int
):
    """Three rounds with clients that stay away; in batches, each client has its own number of
    steps.
    """
    data = clients if batch_size is None else alike(model, clients)
    algorithm = bf.algorithms.scaffold(
        model, epochs=3, batch_size=batch_size, optimiser=SGD(falling), server_lr=0.7
    )
    engine = bf.Engine(chunk=2, workers=workers)
    result = run(algorithm, data, 3, participation=0.6, engine=engine)
    cohorts = [result.settings.cohort(7, t).tolist() for t in range(3)]
    assert len({*map(tuple, cohorts)}) > 1
    steps = [3 * (1 if batch_size is None else -(-n // batch_size)) for n in SIZES]
    x, c, own = reference(model, data, cohorts, steps, 0.7)
    assert_close(result.server["w"]["loc"], x, atol=1e-9, rtol=0)
    assert_close(result.server["c"], c, atol=1e-9, rtol=0)
    assert_close(result.private["own"], own, atol=1e-9, rtol=0)
    assert_close(c, own.mean(0), atol=1e-9, rtol=0)


def test_it_ends_at_the_common_minimum(regressions: FederatedData):
    """Clients of different curvature and many steps: the minimum of the mean of their losses, from
    which FedAvg stays away.
    """
    a, b = moments(regressions)
    n = torch.tensor(regressions.train.counts).double()
    best = torch.linalg.solve((a / n[:, None, None]).mean(0), (b / n[:, None]).mean(0))
    options = {"epochs": 5, "batch_size": None, "optimiser": SGD(0.1), "likelihood": Gaussian()}
    start = linear_only(torch.zeros(1, DIM))
    found, plain = (
        run(make(start, **options), regressions, 200).server["w"]["loc"]
        for make in (bf.algorithms.scaffold, bf.algorithms.fedavg)
    )
    assert_close(found, best, atol=1e-9, rtol=0)
    assert (plain - best).abs().max() > 1e-2


def test_momentum_is_refused(model: nn.Module):
    """Under it the way that a client has gone says something else."""
    with pytest.raises(ValueError, match=r"optimiser must have no momentum, got 0\.9"):
        bf.algorithms.scaffold(model, optimiser=SGD(0.1, momentum=0.9))
    with pytest.raises(TypeError, match="optimiser must be"):
        bf.algorithms.scaffold(model, optimiser=bf.optim.Adam(0.1))  # pyright: ignore[reportArgumentType]


def off_the_mean(result: Result) -> float:
    """How far c is from the mean of the clients' c_i, in units of c's largest entry."""
    c, own = result.server["c"], result.private["own"]
    assert len(own) == result.data.clients
    assert float(c.abs().max()) > 0
    return float((c - own.mean(0)).abs().max() / c.abs().max())


@pytest.mark.filterwarnings("ignore:clients .* are new and", "ignore:the earlier run has")
@pytest.mark.parametrize(
    "later", [[0, 1, 2, 3, 4, 5], [4, 3, 2, 1, 0], [6, 5, 1, 2, 3, 4, 0], [5, 0, 6], [1, 2], [6]]
)
def test_c_stays_the_mean_as_clients_come_and_go(
    model: nn.Module, clients: FederatedData, later: list[int]
):
    """In a later run of known clients, of further ones, and of few that are left; those that were
    never in a cohort are counted.
    """
    algorithm, half = bf.algorithms.scaffold(model), {"participation": 0.5, "seed": 3}
    first = run(algorithm, clients.select(range(5)), 2, **half)
    assert off_the_mean(first) < 1e-12
    gone = not {0, 1, 2, 3, 4} <= {*later}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again = run(algorithm, clients.select(later), 1, start=first, participation=0.5, seed=4)
    assert gone == any("the server has a mean" in str(one.message) for one in told)
    assert off_the_mean(again) < 1e-12


def test_lost_replies_leave_c_the_mean(model: nn.Module, clients: FederatedData):
    faults = bf.faults.at_random(0.4, seed=1)
    result = run(bf.algorithms.scaffold(model), clients, 4, participation=0.8, faults=faults)
    assert off_the_mean(result) < 1e-12


def test_who_trains_is_gathered(model: nn.Module, clients: FederatedData):
    """Others would change their c_i, of which c is not told; where all are gathered, all train."""
    algorithm = bf.algorithms.scaffold(model)
    with pytest.raises(ValueError, match=r"train='all' .*leave train out"):
        run(algorithm, clients, 1, train="all", participation=0.5)
    assert off_the_mean(run(algorithm, clients, 2, train="all", participation=1.0)) < 1e-12


@pytest.mark.parametrize(
    "rates", [(0.0, 0.1, 0.2), (0.1, 0.0, 0.1), (0.1, 0.1, 0.0), (0.0, 0, 0.1)]
)
@pytest.mark.parametrize("kernel", ["vmap", "live", "reference"])
def test_a_round_at_rate_0_changes_nothing(
    model: nn.Module, clients: FederatedData, rates: tuple[float, ...], kernel: str
):
    """The run is that of the other rounds alone."""
    engine = bf.Engine(kernel=kernel)
    data = alike(model, clients)
    others = [rate for rate in rates if rate]

    def trained(chosen: Sequence[float]) -> Result:
        method = bf.algorithms.scaffold(
            model, optimiser=SGD(lambda round, rounds: chosen[round]), batch_size=100
        )
        return run(method, data, len(chosen), engine=engine)

    found, wanted = trained(rates), trained(others)
    for key in ("c", "w"):
        assert_close(found.server[key], wanted.server[key], rtol=1e-12, atol=1e-12)
    assert_close(found.private, wanted.private, rtol=1e-12, atol=1e-12)
