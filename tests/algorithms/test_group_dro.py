"""GroupDRO: whole rounds by hand, weights of environments, losses on some examples."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.engine.plan import PhasePlan
from bayesfl.optim import SGD
from tests.algorithms.made import ByHand
from tests.cases import close, keeping, run, weights


@pytest.mark.parametrize("name", ["group_dro", "perinvfl"])
def test_a_rare_environment_keeps_its_weight(name: str):
    """Three rows of 200, of which losses on 50 evenly spaced ones would have none."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=rng)
    y = torch.arange(200) % 3
    environment = torch.zeros(200, dtype=torch.int64)
    environment[[31, 90, 177]] = 1
    clients = bf.data.from_arrays([x], [y], environments=[environment], outputs=3, test_share=0)
    options = {"lower": "group_dro"} if name == "perinvfl" else {}
    algorithm = getattr(bf.algorithms, name)(
        nn.Linear(8, 3), environments=2, loss_examples=50, steps=1, **options
    )
    log_q = run(algorithm, clients, rounds=3).server["log_q"]
    assert bool((log_q.exp() > 0.3).all())
    close(log_q.exp().sum(), 1.0)
    with pytest.raises(ValueError, match=r"loss_examples .*environments=2.* got 1"):
        getattr(bf.algorithms, name)(nn.Linear(8, 3), environments=2, loss_examples=1, **options)


def test_rounds_of_group_dro_by_hand(clients: FederatedData):
    """Fresh losses at the model received; a client trains on its environments' part of q, and
    counts what they do together.
    """
    eta, rate, rounds = 0.8, 0.05, 3
    algorithm = bf.algorithms.group_dro(
        nn.Linear(8, 3), eta=eta, environments=2, steps=2, batch_size=None, optimiser=SGD(rate)
    )
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    groups = [(j, int(e)) for j in range(7) for e in hand.data[j][2].unique()]
    assert len(groups) == 10
    q = torch.full((10,), 0.1, dtype=torch.float64)

    def own(w: Tensor, mine: list[int], share: Tensor) -> Tensor:
        return torch.stack([share[k] * hand.risk(w, *groups[k]) for k in mine]).sum()

    for _ in range(rounds):
        raised = q * torch.exp(eta * torch.stack([hand.risk(w, *group) for group in groups]))
        q = raised / raised.sum()
        total = torch.zeros_like(w)
        for j in range(7):
            mine = [k for k, group in enumerate(groups) if group[0] == j]
            share = q[mine].sum()
            moved = w
            for _ in range(2):
                moved = moved - rate * torch.func.grad(own)(moved, mine, q / share)
            total = total + share * moved
        w = total
    result = run(algorithm, clients, rounds=rounds)
    close(result.server["w"]["loc"], w, 1e-10)
    log_q = result.server["log_q"]
    close(torch.stack([log_q[group] for group in groups]).exp(), q, 1e-10)
    close(log_q.exp().sum(), 1.0)


@pytest.mark.parametrize("eta", [1e4, 1e6])
def test_group_dro_beyond_the_range_of_exp(eta: float, clients: FederatedData):
    """Weights over- and underflow, their logarithms don't, nor what stands for environments that a
    client lacks: small cohorts by hand.
    """
    torch.manual_seed(0)
    algorithm = bf.algorithms.group_dro(
        nn.Linear(8, 3), eta=eta, environments=2, steps=1, batch_size=None, optimiser=SGD(0.05)
    )
    result = run(algorithm, clients, rounds=12, participation=0.3)
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    groups = [(j, int(e)) for j in range(7) for e in hand.data[j][2].unique()]
    log_q = {
        (j, e): torch.tensor(1 / 14, dtype=torch.float64).log() for j in range(7) for e in (0, 1)
    }

    for round in range(12):
        cohort = result.settings.cohort(7, round).tolist()
        mine = [group for group in groups if group[0] in cohort]
        mass = torch.stack([log_q[group] for group in mine]).logsumexp(0)
        raised = torch.stack([log_q[group] + eta * hand.risk(w, *group) for group in mine])
        after = raised - raised.logsumexp(0) + mass
        log_q |= dict(zip(mine, after, strict=True))
        log_q = {
            group: q for group, q in log_q.items() if group in groups or group[0] not in cohort
        }
        total = torch.stack(list(log_q.values())).logsumexp(0)
        log_q = {group: q - total for group, q in log_q.items()}
        models, sums = [], []
        for j in cohort:
            own = torch.stack([log_q[group] for group in mine if group[0] == j])
            at = [group for group in mine if group[0] == j]
            slope = torch.func.grad(
                lambda w, at, own: (
                    torch.stack([hand.risk(w, *group) for group in at]) @ own.softmax(0)
                )
            )
            models.append(w - 0.05 * slope(w, at, own))
            sums.append(own.logsumexp(0))
        w = torch.stack(sums).softmax(0) @ torch.stack(models)
    close(result.server["w"]["loc"], w, 1e-9)
    close(
        torch.stack([result.server["log_q"][group] for group in groups]),
        torch.stack([log_q[group] for group in groups]),
        1e-6,
    )
    assert float(min(log_q.values())) < -1e3


@pytest.mark.parametrize("most", [None, 7])
def test_batches_of_group_dro_are_weighted_as_the_client(clients: FederatedData, most: int | None):
    """One example a batch: the energy's mean over a pass is sum_e q_e R_e of a client, also where q
    is from losses on a few examples.
    """
    algorithm = bf.algorithms.group_dro(
        nn.Linear(8, 3), eta=2.0, environments=2, loss_examples=most, steps=1, batch_size=1
    )
    measure, step = algorithm.phases
    hand, w, ids = ByHand(clients, algorithm), weights(algorithm), np.array([1])
    data = clients.to(dtype=torch.float64).train
    view = {"w": {"loc": w}, "n": hand.n[1], "log_q": torch.tensor([0.3, 0.7]).double().log()}
    given: dict[str, Any] = {"w": {"loc": w}, "round": 1, "rounds": 1}
    everything = {
        key: t[0]
        for key, t in PhasePlan(measure, data, ids, dtype=torch.float64).batch(0, 1).items()
    }
    view |= measure.fn(algorithm, given, view, everything)
    plan = PhasePlan(replace(step, steps=40), data, ids, dtype=torch.float64)
    batches = [{key: t[0] for key, t in plan.batch(t, 1).items()} for t in range(40)]
    found = torch.stack(
        [step.energy(algorithm, {"w": {"loc": w}}, given, view, batch, {})[0] for batch in batches]
    )
    losses, environment = hand.losses(w, 1), hand.data[1][2]
    places = torch.arange(20) if most is None else torch.arange(most // 2) * 20 // (most // 2)
    measured = torch.stack([losses[environment == e][places].mean() for e in (0, 1)])
    q = torch.tensor([0.3, 0.7]) * torch.exp(2.0 * measured)
    risks = torch.stack([hand.risk(w, 1, e) for e in (0, 1)])
    close(found.mean(), (q / q.sum() * risks).sum(), 1e-7)


def test_losses_on_some_examples(clients: FederatedData):
    """They are measured on those alone, at the model received."""
    algorithm = bf.algorithms.group_dro(
        nn.Linear(8, 3), eta=1.0, environments=2, loss_examples=10, steps=1
    )
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    result = run(keeping(algorithm), clients)
    for j in range(7):
        n = int(hand.n[j])
        losses, environment = hand.losses(w, j), hand.data[j][2]
        for e in environment.unique():
            own, share = losses[environment == e], 10 // len(environment.unique())
            places = (
                [i * len(own) // share for i in range(share)] if n > 10 else list(range(len(own)))
            )
            close(result.private["risk"][j, e], own[places].mean(), 1e-10)


def test_more_environments_than_weights_are_refused(clients: FederatedData):
    with pytest.raises(ValueError, match=r"2 environments.* 1: .*environments=2"):
        run(bf.algorithms.group_dro(nn.Linear(8, 3)), clients)
