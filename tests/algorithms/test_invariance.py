"""Invariant learning against algebra: slopes and their squares, weights of environments, limits, and whole rounds by hand."""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.invariance import (
    Annealed,
    by_environment,
    evenly,
    irm_energy,
    members,
    reweighted,
    scale_slopes,
    squared_slopes,
    tied,
)
from bayesfl.composition.pools import Mean, equal
from bayesfl.composition.priors import server_mean
from bayesfl.composition.server_optimiser import with_server_optimiser
from bayesfl.data import FederatedData
from bayesfl.engine import PhasePlan
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from bayesfl.optim import SGD, Adam
from tests.cases import federation, keeping

METHODS: dict[str, dict[str, Any]] = {
    "irm": {},
    "irm_l2": {},
    "irm_ft": {},
    "group_dro": {"environments": 2},
    "perinvfl": {},
}


def run(algorithm: bf.Algorithm, clients: FederatedData, rounds: int = 1, **options: Any):
    options = {"dtype": torch.float64, "evaluate_every": None, "seed": 2, "progress": False, "engine": bf.Engine(workers=1), **options}
    return bf.simulate(algorithm, clients, rounds=rounds, **options)


def batch_of(environment: Any, weight: Any = None) -> dict[str, Tensor]:
    """What a batch says beside its examples, from environments [..., B]."""
    environment = torch.as_tensor(environment)
    weight = torch.ones_like(environment) if weight is None else torch.as_tensor(weight)
    return {"environment": torch.nn.functional.one_hot(environment).double(), "weight": weight.double()}


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    assert_close(*(torch.as_tensor(t, dtype=torch.float64) for t in (a, b)), rtol=tolerance, atol=tolerance)


# Slopes


def test_slopes_of_a_scale():
    """The published values, two classes and three."""
    logits = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    slopes = scale_slopes(Bernoulli(), logits, torch.tensor([1, 0]))
    close(slopes.mean(), -0.25367363270711507)
    close(squared_slopes(slopes, batch_of([0, 0])), 0.06435031193082433)
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 1.0]], dtype=torch.float64)
    slopes = scale_slopes(Categorical(), logits, torch.tensor([1, 2]))
    close(slopes.mean(), -0.4331900448834201)
    close(squared_slopes(slopes, batch_of([0, 0])), 0.18765361498609953)


@pytest.mark.parametrize(("likelihood", "outputs"), [(Bernoulli(), 1), (Categorical(), 3), (Gaussian(scale=0.7), 2)])
def test_slopes_by_finite_differences(likelihood, outputs):
    """And the slope of the penalty at the outputs, which training goes down; for many clients as for one."""
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(2, 6, outputs, generator=rng, dtype=torch.float64)
    y = (
        torch.randn(2, 6, outputs, generator=rng, dtype=torch.float64)
        if outputs == 2
        else torch.randint(0, max(2, outputs), (2, 6), generator=rng)
    )
    h = 1e-6
    slopes = scale_slopes(likelihood, a, y)
    close(slopes, (likelihood.nll((1 + h) * a, y) - likelihood.nll((1 - h) * a, y)) / (2 * h), 1e-8)
    close(slopes[1], scale_slopes(likelihood, a[1], y[1]))
    batch = batch_of([[0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 1, 0]])
    for estimator in ("biased", "unbiased"):

        def penalty(a: Tensor, estimator: Any = estimator) -> Tensor:
            return squared_slopes(scale_slopes(likelihood, a, y), batch, estimator).sum()

        slope = torch.func.grad(penalty)(a)
        for place in ((0, 2, 0), (1, 4, outputs - 1)):
            step = torch.zeros_like(a)
            step[place] = h
            close(slope[place], (penalty(a + step) - penalty(a - step)) / (2 * h), 1e-7)


def test_squares_by_environment():
    """Environments add up, one that a batch lacks counts 0, padding counts nothing, clients side by side as one by one."""
    rng = torch.Generator().manual_seed(1)
    slopes = torch.randn(3, 7, generator=rng, dtype=torch.float64)
    environment = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 2]])
    weight = torch.ones(3, 7)
    weight[1, 4:] = weight[2, 6:] = 0
    batch = batch_of(environment, weight)
    for estimator in ("biased", "unbiased"):
        found = squared_slopes(slopes, batch, estimator)
        for c in range(3):
            total = 0.0
            for e in range(3):
                own = slopes[c][(environment[c] == e) & (weight[c] > 0)]
                if estimator == "biased":
                    total += float(own.mean() ** 2) if len(own) else 0.0
                else:
                    pairs = [float(own[i] * own[j]) for i, j in combinations(range(len(own)), 2)]
                    total += sum(pairs) / len(pairs) if pairs else 0.0
            close(found[c], total)
    mean, count = by_environment(slopes, batch)
    assert count.tolist() == [[2, 3, 2], [1, 3, 0], [6, 0, 0]]
    assert mean[1, 2] == 0


def test_the_unbiased_square_is_one():
    """Its mean over all samples with replacement is the square of the mean; one sample's is that of its halves, over all ways to halve."""
    values = torch.tensor([0.3, -1.0, 2.2], dtype=torch.float64)
    one = batch_of([0] * 4)
    samples = [torch.stack(chosen) for chosen in product(values, repeat=4)]
    unbiased = torch.stack([squared_slopes(sample, one, "unbiased") for sample in samples])
    close(unbiased.mean(), values.mean() ** 2)
    assert unbiased.min() < 0
    biased = torch.stack([squared_slopes(sample, one) for sample in samples])
    close(biased.mean(), values.mean() ** 2 + values.var(correction=0) / 4)
    for sample in samples[5::20]:
        halves = [(sample[list(half)].mean(), sample[[i for i in range(4) if i not in half]].mean()) for half in combinations(range(4), 2)]
        close(squared_slopes(sample, one, "unbiased"), torch.stack([a * b for a, b in halves]).mean())


def test_annealing():
    """1 before the round, gamma from it on; a gamma below 1 is there from the start; division by what exceeds 1."""
    annealed = Annealed(50.0, start=3)
    assert [annealed.weight(t) for t in (0, 2, 3, 9)] == [1, 1, 50, 50]
    assert [annealed.scale(t) for t in (0, 2, 3, 9)] == [1, 1, 50, 50]
    small = Annealed(0.2, start=3)
    assert [small.weight(t) for t in (0, 3)] == [0.2, 0.2]
    assert [small.scale(t) for t in (0, 3)] == [1, 1]
    assert Annealed(0.0, start=3).weight(0) == 0


@pytest.mark.parametrize(("l2", "lam"), [(0.3, 0.0), (0.0, 2.0), (0.3, 2.0)])
def test_ties_as_one_gaussian(l2, lam):
    """Under a mean over n examples its slope is that of (l2 |w|^2 + lam / 2 |w - centre|^2) / max(1, gamma_t)."""
    prior = tied(Annealed(40.0, start=2), l2=l2, lam=lam, centre=server_mean("w"))
    w, centre = torch.tensor([[0.5, -2.0], [1.0, 3.0]], dtype=torch.float64), torch.tensor([1.5, 1.0], dtype=torch.float64)
    view = {"n": torch.tensor([5.0, 17.0], dtype=torch.float64)}
    for round, scale in ((1, 1.0), (2, 40.0)):
        given: dict[str, Any] = {"w": {"loc": centre}, "round": round, "rounds": 9}
        slope = torch.func.grad(lambda w, g=given: (prior.energy(w, torch.zeros_like(w), g, view) / view["n"]).sum())(w)
        close(slope, (2 * l2 * w + lam * (w - centre)) / scale)


# Weights of environments


def test_reweighting():
    """The published value; the simplex; losses that are equal, shifted, or scaled against the step; what is not there."""
    q = torch.full((3, 1), 1 / 3, dtype=torch.float64)
    risk, there = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64), torch.ones(3, 1)
    new = reweighted(q.log(), risk, there, 0.1)
    close(new.exp().flatten(), [0.30060961, 0.33222499, 0.36716540], 1e-7)
    close(new.exp().sum(), 1.0)
    uneven = torch.tensor([[0.7], [0.2], [0.1]], dtype=torch.float64).log()
    close(reweighted(uneven, torch.full_like(risk, 5.0), there, 0.1), uneven)
    close(reweighted(uneven, risk + 100, there, 0.1), reweighted(uneven, risk, there, 0.1), 1e-10)
    close(reweighted(uneven, risk * 10, there, 0.01), reweighted(uneven, risk, there, 0.1))
    close(reweighted(uneven[:2], risk[:2], there[:2], 0.1).exp().sum(), 0.9)
    gone = reweighted(uneven, risk, torch.tensor([[1], [0], [1]]), 0.1)
    close(gone.exp().flatten(), 0.8 * torch.tensor([0.7 * np.exp(0.1), 0, 0.1 * np.exp(0.3)]) / (0.7 * np.exp(0.1) + 0.1 * np.exp(0.3)))
    assert gone[1] == torch.finfo(gone.dtype).min
    close(reweighted(uneven, risk * 1e6, there, 1.0).exp().flatten(), [0.0, 0.0, 1.0])


def test_evenly_spaced_examples():
    """All where there are few, else as many as asked for, in the order of the data; padding stays padding."""
    x = torch.arange(10.0).expand(3, 10)
    weight = torch.tensor([[1.0] * 10, [1.0] * 4 + [0.0] * 6, [1.0] * 2 + [0.0] * 8])
    data = {"x": x.unsqueeze(-1), "y": x.long(), "weight": weight, "environment": torch.ones(3, 10, 1)}
    some = evenly(data, 4)
    assert some["y"].tolist() == [[0, 2, 5, 7], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert some["x"][..., 0].tolist() == some["y"].double().tolist()
    assert some["weight"].tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert evenly({key: t[1] for key, t in data.items()}, 4)["y"].tolist() == [0, 1, 2, 3]
    assert evenly(data, None) is data
    assert evenly(data, 10) is data


def test_rare_environments_are_among_the_examples():
    """An equal share from each environment, evenly spaced there; all of a small one; a client with few examples loses none."""
    environment = torch.zeros(2, 200, dtype=torch.int64)
    environment[0, [31, 90, 177]] = 1
    environment[1, 25:] = 1
    weight = torch.ones(2, 200)
    weight[1, 27:] = 0
    data = batch_of(environment, weight) | {"y": torch.arange(200).expand(2, 200)}
    some = evenly(data, 50)
    first = some["y"][0][some["weight"][0] > 0].tolist()
    others = [i for i in range(200) if environment[0, i] == 0]
    assert first == sorted([31, 90, 177, *(others[i * 197 // 25] for i in range(25))])
    assert some["y"][1][some["weight"][1] > 0].tolist() == list(range(27))
    assert [members(evenly(data, most))[0].sum(0).tolist() for most in (2, 3, 7)] == [[1, 1], [1, 1], [3, 3]]


@pytest.mark.parametrize("name", ["group_dro", "perinvfl"])
def test_a_rare_environment_keeps_its_weight(name: str):
    """Three rows of 200, of which losses on 50 evenly spaced ones would have none."""
    rng = torch.Generator().manual_seed(0)
    x, y, environment = torch.randn(200, 8, generator=rng), torch.arange(200) % 3, torch.zeros(200, dtype=torch.int64)
    environment[[31, 90, 177]] = 1
    clients = bf.data.from_arrays([x], [y], environments=[environment], outputs=3, test_share=0)
    options = {"lower": "group_dro"} if name == "perinvfl" else {}
    algorithm = getattr(bf.algorithms, name)(nn.Linear(8, 3), environments=2, loss_examples=50, steps=1, **options)
    log_q = run(algorithm, clients, rounds=3).server["log_q"]
    assert bool((log_q.exp() > 0.3).all())
    close(log_q.exp().sum(), 1.0)
    with pytest.raises(ValueError, match=r"loss_examples must be at least environments=2.* got 1: pass more, or None"):
        getattr(bf.algorithms, name)(nn.Linear(8, 3), environments=2, loss_examples=1, **options)


# By hand


class ByHand:
    """Clients' data, and what methods minimise on it, from formulas alone, for a linear layer of three classes."""

    def __init__(self, clients: FederatedData, algorithm: bf.Algorithm, estimator: str = "biased") -> None:
        self.layout, self.estimator = algorithm.layout("w"), estimator
        self.data = []
        for j in range(clients.clients):
            x, y = clients.train.client(j)
            environment = clients.train.environment
            assert environment is not None
            self.data.append((x.double(), y, environment[clients.train.rows(j)]))
        self.n = torch.tensor([len(y) for _, y, _ in self.data]).double()

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        leaves = self.layout.leaves(w)
        return x @ leaves["weight"].T + leaves["bias"]

    def losses(self, w: Tensor, j: int) -> Tensor:
        x, y, _ = self.data[j]
        logits = self.logits(w, x)
        return logits.logsumexp(1) - logits[torch.arange(len(y)), y]

    def squares(self, w: Tensor, j: int) -> Tensor:
        x, y, environment = self.data[j]
        logits = self.logits(w, x)
        slope = ((logits.softmax(1) - torch.eye(3, dtype=torch.float64)[y]) * logits).sum(1)
        total = torch.tensor(0.0)
        for e in environment.unique():
            own = slope[environment == e]
            if self.estimator == "biased":
                total = total + own.mean() ** 2
            else:
                total = total + (torch.outer(own, own).sum() - (own * own).sum()) / (len(own) * (len(own) - 1))
        return total

    def irm(self, w: Tensor, j: int, gamma: float, l2: float) -> Tensor:
        return (self.losses(w, j).mean() + gamma * self.squares(w, j) + l2 * w.square().sum()) / max(1.0, gamma)


class AdamByHand:
    """Adam as its paper has it."""

    def __init__(self, rate: float) -> None:
        self.rate, self.t = rate, 0
        self.m: Any = 0.0
        self.v: Any = 0.0

    def __call__(self, w: Tensor, slope: Tensor) -> Tensor:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * slope
        self.v = 0.999 * self.v + 0.001 * slope**2
        return w - self.rate * (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-8)


def weights(algorithm: bf.Algorithm, block: str = "w") -> Tensor:
    return algorithm.init(7, seed=2, dtype=torch.float64)[block]["loc"]


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_rounds_of_perinvfl_by_hand(clients: FederatedData, estimator: str):
    """Both problems, Adam kept across rounds and forgotten as gamma jumps, ridge and pull divided with the rest."""
    gamma, l2, lam, start, steps, personal = 25.0, 0.05, 0.7, 2, 2, 3
    algorithm = bf.algorithms.perinvfl(
        nn.Linear(8, 3),
        gamma=gamma,
        l2=l2,
        lam=lam,
        anneal=start,
        estimator=estimator,
        steps=steps,
        personal_steps=personal,
        batch_size=None,
        optimiser=Adam(0.02),
        personal_optimiser=Adam(0.03),
    )
    hand, w = ByHand(clients, algorithm, estimator), weights(algorithm)
    theta = [w] * 7
    for round in range(4):
        now = gamma if round >= start else 1.0
        if round in (0, start):
            adams, own = [AdamByHand(0.02) for _ in range(7)], [AdamByHand(0.03) for _ in range(7)]
        models = []
        for j in range(7):
            moved = w
            for _ in range(steps):
                moved = adams[j](moved, torch.func.grad(hand.irm)(moved, j, now, l2))
            models.append(moved)
            for _ in range(steps * personal):
                pull = lam * (theta[j] - w) / max(1.0, now)
                theta[j] = own[j](theta[j], torch.func.grad(hand.irm)(theta[j], j, now, l2) + pull)
        w = sum(n * model for n, model in zip(hand.n, models, strict=True)) / hand.n.sum()
    result = run(algorithm, clients, rounds=4)
    close(result.server["w"]["loc"], w, 1e-9)
    close(result.private["theta"]["loc"], torch.stack(theta), 1e-9)


def test_rounds_of_group_dro_by_hand(clients: FederatedData):
    """Fresh losses at the model received; a client trains on its environments' part of q, and counts what they do together."""
    eta, rate, rounds = 0.8, 0.05, 3
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=eta, environments=2, steps=2, batch_size=None, optimiser=SGD(rate))
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    groups = [(j, int(e)) for j in range(7) for e in hand.data[j][2].unique()]
    assert len(groups) == 10
    q = torch.full((10,), 0.1, dtype=torch.float64)

    def risk(w: Tensor, j: int, e: int) -> Tensor:
        return hand.losses(w, j)[hand.data[j][2] == e].mean()

    def own(w: Tensor, mine: list[int], share: Tensor) -> Tensor:
        return torch.stack([share[k] * risk(w, *groups[k]) for k in mine]).sum()

    for _ in range(rounds):
        raised = q * torch.exp(eta * torch.stack([risk(w, *group) for group in groups]))
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
    """Weights over- and underflow, their logarithms don't, nor what stands for environments that a client lacks: small cohorts by hand."""
    torch.manual_seed(0)
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=eta, environments=2, steps=1, batch_size=None, optimiser=SGD(0.05))
    result = run(algorithm, clients, rounds=12, participation=0.3)
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    groups = [(j, int(e)) for j in range(7) for e in hand.data[j][2].unique()]
    log_q = {(j, e): torch.tensor(1 / 14, dtype=torch.float64).log() for j in range(7) for e in (0, 1)}

    def risk(w: Tensor, j: int, e: int) -> Tensor:
        return hand.losses(w, j)[hand.data[j][2] == e].mean()

    for round in range(12):
        cohort = result.settings.cohort(7, round).tolist()
        mine = [group for group in groups if group[0] in cohort]
        mass = torch.stack([log_q[group] for group in mine]).logsumexp(0)
        raised = torch.stack([log_q[group] + eta * risk(w, *group) for group in mine])
        after = raised - raised.logsumexp(0) + mass
        log_q |= dict(zip(mine, after, strict=True))
        log_q = {group: q for group, q in log_q.items() if group in groups or group[0] not in cohort}
        total = torch.stack(list(log_q.values())).logsumexp(0)
        log_q = {group: q - total for group, q in log_q.items()}
        models, sums = [], []
        for j in cohort:
            own = torch.stack([log_q[group] for group in mine if group[0] == j])
            at = [group for group in mine if group[0] == j]
            slope = torch.func.grad(lambda w, at, own: torch.stack([risk(w, *group) for group in at]) @ own.softmax(0))
            models.append(w - 0.05 * slope(w, at, own))
            sums.append(own.logsumexp(0))
        w = torch.stack(sums).softmax(0) @ torch.stack(models)
    close(result.server["w"]["loc"], w, 1e-9)
    close(torch.stack([result.server["log_q"][group] for group in groups]), torch.stack([log_q[group] for group in groups]), 1e-6)
    assert float(min(log_q.values())) < -1e3


def test_one_step_of_group_dro_descends_the_weighted_risk(clients: FederatedData):
    """sum_e q_e R_e, at the weights of the round."""
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=2.0, environments=2, steps=1, batch_size=None, optimiser=SGD(0.3))
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    result = run(algorithm, clients)
    q = result.server["log_q"].exp()

    def weighted(w: Tensor) -> Tensor:
        return sum(
            (q[j, e] * hand.losses(w, j)[hand.data[j][2] == e].mean() for j in range(7) for e in hand.data[j][2].unique()),
            torch.tensor(0.0),
        )

    close(result.server["w"]["loc"], w - 0.3 * torch.func.grad(weighted)(w), 1e-10)


@pytest.mark.parametrize("most", [None, 7])
def test_batches_of_group_dro_are_weighted_as_the_client(clients: FederatedData, most: int | None):
    """One example a batch: the energy's mean over a pass is sum_e q_e R_e of a client, also where q is from losses on a few examples."""
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=2.0, environments=2, loss_examples=most, steps=1, batch_size=1)
    measure, step = algorithm.phases
    hand, w, ids = ByHand(clients, algorithm), weights(algorithm), np.array([1])
    data = clients.to(dtype=torch.float64).train
    view = {"w": {"loc": w}, "n": hand.n[1], "log_q": torch.tensor([0.3, 0.7]).double().log()}
    given: dict[str, Any] = {"w": {"loc": w}, "round": 0, "rounds": 1}
    everything = {key: t[0] for key, t in PhasePlan(measure, data, ids, dtype=torch.float64).batch(0, 1).items()}
    view = measure.fn(algorithm, given, view, everything)
    plan = PhasePlan(replace(step, steps=40), data, ids, dtype=torch.float64)
    batches = [{key: t[0] for key, t in plan.batch(t, 1).items()} for t in range(40)]
    found = torch.stack([step.energy(algorithm, {"w": {"loc": w}}, given, view, batch, {})[0] for batch in batches])
    losses, environment = hand.losses(w, 1), hand.data[1][2]
    places = torch.arange(20) if most is None else torch.arange(most // 2) * 20 // (most // 2)
    measured = torch.stack([losses[environment == e][places].mean() for e in (0, 1)])
    q = torch.tensor([0.3, 0.7]) * torch.exp(2.0 * measured)
    risks = torch.stack([losses[environment == e].mean() for e in (0, 1)])
    close(found.mean(), (q / q.sum() * risks).sum(), 1e-7)


def test_one_client_has_all_the_weight():
    """One client with one environment: q is 1, and the method is FedAvg."""
    alone = federation(sizes=(40,))
    options = {"steps": 3, "batch_size": None, "optimiser": SGD(0.1)}
    result = run(bf.algorithms.group_dro(nn.Linear(8, 3), eta=5.0, **options), alone, rounds=3)
    assert result.server["log_q"].tolist() == [[0.0]]
    same = bf.algorithms.fedavg(result.algorithm.model, epochs=3, batch_size=None, lr=0.1, momentum=0.0)
    close(result.server["w"]["loc"], run(same, alone, rounds=3).server["w"]["loc"])


@pytest.mark.parametrize("environments", [2, 4])
def test_without_a_step_all_environments_count_the_same(clients: FederatedData, environments: int):
    """Whoever came when, and however many places of a client are empty."""
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=0.0, environments=environments, steps=1)
    for participation in (1.0, 0.5):
        result = run(algorithm, clients, rounds=6, participation=participation)
        assert set(np.concatenate([result.settings.cohort(7, t) for t in range(6)])) == set(range(7))
        there = torch.zeros(7, environments)
        for j in range(7):
            there[j, ByHand(clients, algorithm).data[j][2]] = 1
        close(result.server["log_q"].exp(), there.double() / 10)


def test_weights_of_those_who_stay_away(clients: FederatedData):
    """A cohort's weights move among themselves; the sum over everyone stays 1."""
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=3.0, environments=2, steps=1)
    full = run(algorithm, clients, rounds=1)
    result = run(algorithm, clients, rounds=2, participation=0.5)
    first = run(algorithm, clients, rounds=1, participation=0.5)
    cohort = result.settings.cohort(7, 1)
    absent = np.setdiff1d(np.arange(7), cohort)
    shift = (result.server["log_q"] - first.server["log_q"])[absent]
    shift = shift[first.server["log_q"][absent] > -1e30]
    close(shift, shift[:1].expand_as(shift))
    assert not torch.equal(result.server["log_q"][cohort], first.server["log_q"][cohort])
    for one in (full, first, result):
        close(one.server["log_q"].exp().sum(), 1.0)


def test_losses_on_some_examples(clients: FederatedData):
    """They are measured on those alone, at the model received."""
    algorithm = bf.algorithms.group_dro(nn.Linear(8, 3), eta=1.0, environments=2, loss_examples=10, steps=1)
    hand, w = ByHand(clients, algorithm), weights(algorithm)
    result = run(keeping(algorithm), clients)
    for j in range(7):
        n = int(hand.n[j])
        losses, environment = hand.losses(w, j), hand.data[j][2]
        for e in environment.unique():
            own, share = losses[environment == e], 10 // len(environment.unique())
            places = [i * len(own) // share for i in range(share)] if n > 10 else list(range(len(own)))
            close(result.private["risk"][j, e], own[places].mean(), 1e-10)


def test_rounds_of_the_contrastive_form_by_hand(clients: FederatedData):
    """Features of theta, of the model received and of the client's own; theta goes on from where it was, each on its optimiser."""
    lam, l2, personal, steps = 0.6, 0.02, 2, 3
    model = bf.models.mlp(8, hidden=30, outputs=3)  # wide: features are never all 0
    algorithm = bf.algorithms.perinvfl(
        model,
        variant="contrastive",
        gamma=0.0,
        lam=lam,
        l2=l2,
        steps=steps,
        personal_steps=personal,
        batch_size=None,
        optimiser=SGD(0.1),
        personal_optimiser=Adam(0.02),
    )
    layout, w = algorithm.layout("w"), weights(algorithm)

    def look(v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        p = layout.leaves(v)
        z = torch.relu(x @ p["body.0.weight"].T + p["body.0.bias"])
        return z, z @ p["head.weight"].T + p["head.bias"]

    def risk(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        logits = look(v, x)[1]
        return (logits.logsumexp(1) - logits[torch.arange(len(y)), y]).mean()

    def upper(v: Tensor, x: Tensor, y: Tensor, near: Tensor, far: Tensor) -> Tensor:
        z = look(v, x)[0]
        cosines = [((z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1))).exp() for other in (near, far)]
        return risk(v, x, y) - lam * (cosines[0] / (cosines[0] + 0.2 * cosines[1])).log().mean() + l2 * v.square().sum()

    slope = torch.func.grad
    theta, alone, adams = [w] * 7, [w] * 7, [AdamByHand(0.02) for _ in range(7)]
    for _ in range(2):
        models = []
        for j in range(7):
            x, y = clients.train.client(j)
            x, moved = x.double(), w
            for _ in range(steps):
                moved = moved - 0.1 * (slope(risk)(moved, x, y) + 2 * l2 * moved)
            models.append(moved)
            for _ in range(steps):
                near, far = look(w, x)[0], look(alone[j], x)[0]
                for _ in range(personal):
                    theta[j] = adams[j](theta[j], slope(upper)(theta[j], x, y, near, far))
                alone[j] = alone[j] - 0.1 * slope(risk)(alone[j], x, y)
        n = torch.tensor(clients.train.counts).double()
        w = (n[:, None] * torch.stack(models)).sum(0) / n.sum()
    for kernel in ("reference", "auto"):
        result = run(algorithm, clients, rounds=2, engine=bf.Engine(kernel, workers=1))
        close(result.private["theta"]["loc"], torch.stack(theta), 1e-9)
        close(result.private["alone"]["loc"], torch.stack(alone), 1e-9)


# Limits


def test_without_a_penalty_irm_is_fedavg(clients: FederatedData):
    """gamma and l2 at 0, the same optimiser and steps; and by GroupDRO where eta is 0 and clients are one environment, but for sizes."""
    model = nn.Linear(8, 3)
    options: dict[str, Any] = {"steps": 5, "batch_size": None, "optimiser": SGD(0.1)}
    average = bf.algorithms.fedavg(model, epochs=5, batch_size=None, lr=0.1, momentum=0.0)
    wanted = run(average, clients, rounds=3).server["w"]["loc"]
    close(run(bf.algorithms.irm(model, gamma=0.0, l2=0.0, **options), clients, rounds=3).server["w"]["loc"], wanted)
    assert not torch.allclose(run(bf.algorithms.irm(model, gamma=0.1, l2=0.0, **options), clients, rounds=3).server["w"]["loc"], wanted)
    alike = replace(average, blocks={"w": replace(average.blocks["w"], pool=Mean(equal))})
    wanted = run(alike, clients, rounds=3).server["w"]["loc"]
    got = run(bf.algorithms.group_dro(model, eta=0.0, **options), clients.as_environments(), rounds=3).server["w"]["loc"]
    close(got, wanted, 1e-10)


def test_irm_ft_without_a_penalty_is_fedavg_ft(clients: FederatedData):
    """theta of a round is the model received, fine-tuned: what FedAvg-FT predicts by a round earlier."""
    model = nn.Linear(8, 3)
    options: dict[str, Any] = {"steps": 2, "batch_size": None, "optimiser": SGD(0.1), "personal_optimiser": Adam(0.05)}
    tuned = bf.algorithms.fedavg_ft(model, epochs=2, batch_size=None, lr=0.1, momentum=0.0, finetune_epochs=6)
    tuned = replace(tuned, finetune=(replace(tuned.finetune[0], optimiser=Adam(0.05)),))
    before = run(tuned, clients, rounds=2).predict().probs
    for method in (bf.algorithms.irm_ft, bf.algorithms.irm_l2):
        more = {"lam": 0.0} if method is bf.algorithms.irm_l2 else {}
        got = run(method(model, gamma=0.0, l2=0.0, personal_steps=3, **options, **more), clients, rounds=3).predict().probs
        assert_close(got, before, atol=1e-10, rtol=0, equal_nan=True)
    pulled = run(bf.algorithms.irm_l2(model, gamma=0.0, l2=0.0, personal_steps=3, lam=1.0, **options), clients, rounds=3).predict().probs
    assert not torch.allclose(pulled, before, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gamma"), [("irm_l2", 30.0), ("perinvfl", 0.0)])
def test_strong_pulls_give_the_model_received(name: str, gamma: float):
    """Steps short enough for the pull, 1 / (curvature + lam): theta ends at w, and at the pulled optimum of a quadratic in between.

    IRM-L2's own objective has no penalty, so gamma does not divide it.
    """
    rng = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, 2, generator=rng) for n in (9, 14)]
    ys = [x @ torch.tensor([1.0, -2.0]) + j + torch.randn(len(x), generator=rng) for j, x in enumerate(xs)]
    linear = bf.data.from_arrays(xs, ys, test_share=0, environments=[torch.zeros(len(x)).long() for x in xs])
    for lam in (1e5, 2.0):
        algorithm = getattr(bf.algorithms, name)(
            nn.Linear(2, 1, bias=False),
            gamma=gamma,
            anneal=0,
            l2=0.0,
            lam=lam,
            steps=100,
            personal_steps=10,
            batch_size=None,
            optimiser=SGD(0.0),
            personal_optimiser=SGD(1 / (lam + 5)),
            likelihood=Gaussian(),
        )
        result = run(algorithm, linear)
        w = result.server["w"]["loc"]
        for j, (x, y) in enumerate(zip(xs, ys, strict=True)):
            a, b = x.double().T @ x.double() / len(x), x.double().T @ y.double() / len(x)
            wanted = torch.linalg.solve(a + lam * torch.eye(2), b + lam * w)
            close(result.private["theta"]["loc"][j], wanted, 1e-8)
            assert lam < 1e3 or (wanted - w).norm() < 1e-4


# The server's optimiser


def test_one_gradient_a_round_is_central_irm(clients: FederatedData):
    """Clients send one plain step, the server takes Adam's: the run is that of Adam on the clients' mean objective, to rounding."""
    gamma, l2, start, rate = 40.0, 0.03, 4, 0.05
    options: dict[str, Any] = {"gamma": gamma, "l2": l2, "anneal": start, "steps": 1, "batch_size": None, "optimiser": SGD(1.0)}
    algorithm = bf.algorithms.irm(nn.Linear(8, 3), server_optimiser=Adam(rate), **options)
    hand, w, adam = ByHand(clients, algorithm), weights(algorithm), AdamByHand(rate)

    def pooled(w: Tensor, now: float) -> Tensor:
        return sum((n * hand.irm(w, j, now, l2) for j, n in enumerate(hand.n)), torch.tensor(0.0)) / hand.n.sum()

    for round in range(8):
        w = adam(w, torch.func.grad(pooled)(w, gamma if round >= start else 1.0))
    result = run(algorithm, clients, rounds=8)
    close(result.server["w"]["loc"], w, 1e-6)
    plain = run(bf.algorithms.irm(algorithm.model, **options), clients, rounds=8).server["w"]["loc"]
    assert not torch.allclose(plain, w, atol=1e-3)


@pytest.mark.parametrize("server", [SGD, Adam])
def test_one_gradient_a_round_is_irm_on_all_data_with_gamma_over_clients(server: Any):
    """Four clients of 15: gamma = 40 is gamma = 10 with every environment on one client, and not gamma = 40 there."""
    clients, gamma, rate = federation(sizes=(15,) * 4), 40.0, 0.02
    xs, ys = (list(part) for part in zip(*(clients.train.client(j) for j in range(4)), strict=True))
    own = [torch.arange(15) % 2, *[torch.zeros(15).long()] * 3]  # five environments
    apart = bf.data.from_arrays(xs, ys, environments=own, outputs=3, test_share=0)
    on_one = torch.cat([own[0], *(own[j] + 1 + j for j in range(1, 4))])
    together = bf.data.from_arrays([torch.cat(xs)], [torch.cat(ys)], environments=[on_one], outputs=3, test_share=0)
    model = nn.Linear(8, 3)
    options: dict[str, Any] = {"l2": 0.03, "anneal": 0, "steps": 1, "batch_size": None, "optimiser": SGD(1.0)}

    def trained(data: FederatedData, gamma: float, rate: float) -> Tensor:
        return run(bf.algorithms.irm(model, gamma=gamma, server_optimiser=server(rate), **options), data, rounds=8).server["w"]["loc"]

    # The objectives are divided by their gammas, which Adam's steps do not see.
    federated = trained(apart, gamma, rate * 4 if server is SGD else rate)
    close(federated, trained(together, gamma / 4, rate), 1e-9 if server is SGD else 1e-5)
    assert not torch.allclose(federated, trained(together, gamma, rate), atol=1e-3)


@pytest.mark.parametrize("name", ["fedavg", "pfedvem", "group_dro", "fedem"])
def test_a_step_of_length_one_is_the_method_itself(clients: FederatedData, model: nn.Module, name: str):
    """SGD(1.0) takes what pools, and `combine`, made; what the server keeps for it is not sent."""
    options = {"group_dro": {"environments": 2}}.get(name, {})
    algorithm = getattr(bf.algorithms, name)(model, **options)
    stepped = with_server_optimiser(algorithm, SGD(1.0))
    a, b = (run(one, clients, rounds=2, participation=0.6) for one in (algorithm, stepped))
    for block, entry in a.server.items():
        assert_close(b.server[block], entry, atol=1e-9, rtol=0)
    assert b.history["bytes_down"].tolist() == a.history["bytes_down"].tolist()
    assert stepped.uplink() == algorithm.uplink()


@pytest.mark.parametrize(("name", "block"), [("d_fedem", "components"), ("fedpac", "head"), ("clustered", "w")])
def test_no_optimiser_steps_what_nobody_is_sent(clients: FederatedData, model: nn.Module, name: str, block: str):
    """These have models of their own for clients or clusters."""
    stepped = with_server_optimiser(getattr(bf.algorithms, name)(model), SGD(0.5))
    with pytest.raises(ValueError, match=rf"steps what is sent to everyone alike, and of this method \['{block}'\] are not"):
        run(stepped, clients, rounds=1)


def test_one_optimiser_on_the_server_is_enough(clients: FederatedData):
    twice = with_server_optimiser(bf.algorithms.irm(nn.Linear(8, 3), server_optimiser=Adam(0.01)), SGD(1.0))
    with pytest.raises(ValueError, match="has an optimiser on the server already"):
        run(twice, clients, rounds=1)


def test_momentum_on_the_server(clients: FederatedData):
    """v <- 0.5 v + (w - mean), w <- w - 0.8 v, from what FedAvg makes of each round."""
    average = bf.algorithms.fedavg(nn.Linear(8, 3), epochs=2, batch_size=None, lr=0.1)
    momentum = with_server_optimiser(average, SGD(0.8, momentum=0.5))
    w, v = weights(average), torch.zeros(27, dtype=torch.float64)
    for _ in range(3):
        start = replace(average, blocks={"w": replace(average.blocks["w"], start=lambda rng, size, w=w: w)})
        v = 0.5 * v + w - run(start, clients).server["w"]["loc"]
        w = w - 0.8 * v
    close(run(momentum, clients, rounds=3).server["w"]["loc"], w, 1e-6)


def test_a_schedule_on_the_server(clients: FederatedData):
    """The rate of a round is the schedule's, at the number that the server counts."""
    average = bf.algorithms.fedavg(nn.Linear(8, 3), epochs=1, batch_size=None, lr=0.1)
    stepped = with_server_optimiser(average, SGD(lambda round, rounds: [0.5, 0.0, 2.0][round] if rounds == 3 else 9.0))
    w = weights(average)
    for rate in (0.5, 0.0, 2.0):
        start = replace(average, blocks={"w": replace(average.blocks["w"], start=lambda rng, size, w=w: w)})
        w = w + rate * (run(start, clients).server["w"]["loc"] - w)
    close(run(stepped, clients, rounds=3).server["w"]["loc"], w, 1e-6)


# What clients keep


def test_adam_is_forgotten_once(clients: FederatedData):
    """In a client's first round from the jump on, whenever that is: its count of steps starts anew there, and there alone."""
    algorithm = bf.algorithms.perinvfl(nn.Linear(8, 3), anneal=2, steps=2, personal_steps=3, batch_size=None)
    rounds = 6
    result = run(algorithm, clients, rounds=rounds, participation=0.4)
    cohorts = [set(result.settings.cohort(7, t).tolist()) for t in range(rounds)]
    taken = [sum(j in cohorts[t] for t in range(2, rounds)) or sum(j in cohorts[t] for t in range(2)) for j in range(7)]
    assert any(j not in cohorts[2] and j in set.union(*cohorts[:2]) & set.union(*cohorts[3:]) for j in range(7)), "nobody comes late"
    assert result.private["w_optimiser"]["steps"].tolist() == [2 * k for k in taken]
    assert result.private["theta_optimiser"]["steps"].tolist() == [6 * k for k in taken]
    never = run(bf.algorithms.irm(nn.Linear(8, 3), gamma=0.5, anneal=2, steps=2), clients, rounds=4)
    assert never.private["w_optimiser"]["steps"].tolist() == [8] * 7


def test_what_travels(clients: FederatedData):
    """FedAvg's traffic, and for GroupDRO a loss and a presence for each environment."""
    model = nn.Linear(8, 3)
    average = bf.algorithms.fedavg(model).uplink()
    for name in ("irm", "irm_l2", "irm_ft", "perinvfl"):
        assert getattr(bf.algorithms, name)(model).uplink() == average
    robust = bf.algorithms.perinvfl(model, lower="group_dro", environments=2).uplink()
    assert {name: shape for name, (shape, _) in robust.items()} == {"w.loc": (27,), "risk": (2,), "present": (2,)}


@pytest.mark.parametrize("variant", ["distance", "contrastive"])
def test_a_novel_client_starts_from_the_global_model(clients: FederatedData, model: nn.Module, variant: str):
    """With steps of no length, theta of one that joins is w, after as many of them as were asked for."""
    old, novel = clients.hold_out(2, seed=0)
    algorithm = bf.algorithms.perinvfl(model, variant=variant, personal_steps=2, adapt_steps=5, personal_optimiser=Adam(0.0))
    result = run(algorithm, old, rounds=2)
    adapted = result.adapt(novel).private
    close(adapted["theta"]["loc"], result.server["w"]["loc"].expand(2, -1))
    assert adapted["theta_optimiser"]["steps"].tolist() == [6, 6] if variant == "contrastive" else [5, 5]
    assert not torch.allclose(result.private["theta"]["loc"][0], result.server["w"]["loc"])


# The linear model


def moments(s: float, n: float, c: float) -> tuple[Tensor, Tensor]:
    """Four points with the exact second moments of  x1 ~ N(0, s), x3 ~ N(0, 1), y = x1 + c x3 + N(0, s), x2 = y + N(0, n)."""
    mix = torch.tensor([[1.0, 0, 0, 0], [1, c, 1, 1], [0, 1, 0, 0], [1, c, 1, 0]], dtype=torch.float64)  # of x1, x3, both noises
    root = mix * torch.tensor([s, 1.0, s, n], dtype=torch.float64).sqrt()
    points = 2 * root.T  # [4, 4]: their mean square is root root'
    return points[:, :3], points[:, 3]


ENVIRONMENTS = (((0.5, 1), (2, 0.3), (1, 3)), ((0.7, 0.5), (1.5, 2), (3, 1)), ((1, 1),), ((3, 0.5),))


def linear_clients() -> FederatedData:
    """Four clients, y = x1 for all of them, and +-x3 for each; x2 is what y causes."""
    parts = [[moments(s, n, c) for s, n in own] for own, c in zip(ENVIRONMENTS, (1.0, -1.0, 1.0, -1.0), strict=True)]
    return bf.data.from_arrays(
        [torch.cat([x for x, _ in own]) for own in parts],
        [torch.cat([y for _, y in own]) for own in parts],
        test_share=0,
        environments=[torch.arange(len(own)).repeat_interleave(4) for own in parts],
    ).to(dtype=torch.float64)


def minimiser(algorithm: bf.Algorithm, block: str, clients: FederatedData, who: list[int], start: Tensor, given: dict[str, Any]) -> Tensor:
    """Where the energies of some clients, added up, are least."""
    from scipy.optimize import minimize

    energy = algorithm.phases[-1].energy
    algorithm.module(start)  # made here, since no copy can be made inside torch.func
    plan = PhasePlan(algorithm.phases[-1], clients.train, np.array(who), dtype=torch.float64)
    everything = plan.batch(0, len(who))
    views = [{"n": torch.tensor(float(clients.train.counts[j]), dtype=torch.float64), **given} for j in who]
    batches = []
    for c in range(len(who)):
        inside = everything["weight"][c] > 0
        batches.append({key: t[c][inside] for key, t in everything.items()})
    here = {**given, "round": 0, "rounds": 1}

    def total(w: Tensor) -> Tensor:
        return torch.stack(
            [energy(algorithm, {block: {"loc": w}}, here, view, batch, {})[0] for view, batch in zip(views, batches, strict=True)]
        ).sum()

    def both(w: np.ndarray) -> tuple[float, np.ndarray]:
        slope, value = torch.func.grad_and_value(total)(torch.from_numpy(w))
        return float(value), slope.numpy()

    return torch.from_numpy(minimize(both, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-12, "maxiter": 2000}).x)


def by_continuation(make: Any, block: str, clients: FederatedData, who: list[int], start: Tensor, given: dict[str, Any]) -> Tensor:
    """The minimiser as gamma grows to 1e6, each from the one before."""
    w = start
    for gamma in 10.0 ** torch.arange(0.0, 6.5, 0.5).double():
        w = minimiser(make(float(gamma)), block, clients, who, w, given)
    return w


@pytest.mark.slow
def test_a_linear_model_with_exact_moments():
    """From any start the federation finds x1 alone; clients with several environments add their own +-x3, one with one falls for x2,
    unless the pull is strong."""
    clients, model = linear_clients(), nn.Linear(3, 1, bias=False)
    common: dict[str, Any] = {"anneal": 0, "l2": 0.0, "likelihood": Gaussian()}
    for seed in range(3):
        start = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = by_continuation(lambda gamma: bf.algorithms.irm(model, gamma=gamma, **common), "w", clients, [0, 1, 2, 3], start, {})
        assert_close(found, torch.tensor([1.0, 0.0, 0.0]).double(), atol=1e-3, rtol=0)
    received = {"w": {"loc": found}}

    def personal(lam: float, j: int) -> Tensor:
        return by_continuation(
            lambda gamma: bf.algorithms.perinvfl(model, gamma=gamma, lam=lam, **common), "theta", clients, [j], found, received
        )

    for j, sign in ((0, 1.0), (1, -1.0)):
        assert_close(personal(1e-2, j), torch.tensor([1.0, 0.0, sign]).double(), atol=0.011, rtol=0)
    for j, own in ((2, (0.5, 0.5, 0.5)), (3, (1 / 7, 6 / 7, -1 / 7))):
        assert_close(personal(1e-4, j), torch.tensor(own).double(), atol=1e-3, rtol=0)
    for j in range(4):
        assert_close(personal(1e4, j), found, atol=1e-3, rtol=0)


# What is refused


@pytest.mark.parametrize("name", METHODS)
def test_data_without_environments_are_refused(clients: FederatedData, name: str):
    """With the remedy, which works."""
    xs, ys = zip(*[clients.train.client(j) for j in range(7)], strict=True)
    plain = bf.data.from_arrays(list(xs), list(ys), outputs=3)
    algorithm = getattr(bf.algorithms, name)(nn.Linear(8, 3), **METHODS[name])
    with pytest.raises(ValueError, match=r"the data have no environments.*clients.as_environments\(\)"):
        run(algorithm, plain)
    assert torch.isfinite(run(algorithm, plain.as_environments()).server["w"]["loc"]).all()


def test_more_environments_than_weights_are_refused(clients: FederatedData):
    with pytest.raises(ValueError, match="clients have up to 2 environments, the method was made for 1: pass environments=2"):
        run(bf.algorithms.group_dro(nn.Linear(8, 3)), clients)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("irm", {"gamma": -1.0}, "gamma is the weight of a penalty and must be >= 0"),
        ("irm", {"gamma": float("inf")}, "gamma is the weight of a penalty and must be >= 0"),
        ("irm", {"anneal": -1}, "anneal, the round from which the penalty counts in full, must be at least 0"),
        ("irm", {"estimator": "none"}, "estimator must be 'biased' or 'unbiased'"),
        ("irm", {"l2": -0.1}, "l2 must be >= 0"),
        ("irm", {"optimiser": 0.1}, r"optimiser must be one of bayesfl.optim, such as SGD\(0.1\), got 0.1"),
        ("irm", {"server_optimiser": "adam"}, r"server_optimiser must be one of bayesfl.optim, such as SGD\(0.1\), got 'adam'"),
        ("group_dro", {"server_optimiser": Adam}, r"server_optimiser must be one of bayesfl.optim, such as SGD\(0.1\), got <class"),
        ("irm", {"steps": None}, "steps must be a whole number, got None"),
        ("group_dro", {"steps": None}, "steps must be a whole number, got None"),
        ("perinvfl", {"steps": None, "lower": "group_dro"}, "steps must be a whole number, got None"),
        ("irm_l2", {"lam": -0.1}, "lam must be >= 0"),
        ("irm_ft", {"personal_steps": 0}, "personal_steps must be at least 1"),
        ("group_dro", {"eta": -0.1}, "eta is the step of the weights and must be >= 0"),
        ("group_dro", {"environments": 0}, "environments must be at least 1"),
        ("group_dro", {"loss_examples": 0}, "loss_examples must be at least 1"),
        ("perinvfl", {"lower": "erm"}, "lower must be 'irm' or 'group_dro'"),
        ("perinvfl", {"variant": "cosine"}, "variant must be 'distance' or 'contrastive'"),
        ("perinvfl", {"variant": "contrastive"}, "variant 'contrastive' compares features"),
        ("perinvfl", {"lam": -1.0}, "lam must be >= 0"),
        ("perinvfl", {"adapt_steps": 0}, "adapt_steps must be at least 1"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        getattr(bf.algorithms, name)(nn.Linear(8, 3), **options)


@pytest.mark.parametrize(("lower", "variant"), list(product(("irm", "group_dro"), ("distance", "contrastive"))))
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gamma": -1.0}, "gamma is the weight of a penalty"),
        ({"gamma": float("nan")}, "gamma is the weight of a penalty"),
        ({"anneal": -3}, "anneal, the round from which the penalty counts in full, must be at least 0, got -3"),
        ({"estimator": "zzz"}, "estimator must be 'biased' or 'unbiased', got 'zzz'"),
        ({"l2": -1.0}, "l2 must be >= 0 and finite, got -1"),
        ({"lam": -1.0}, "lam must be >= 0 and finite, got -1"),
        ({"eta": -1.0}, "eta is the step of the weights and must be >= 0 and finite, got -1"),
        ({"eta": float("nan")}, "eta is the step of the weights and must be >= 0 and finite, got nan"),
        ({"environments": -3}, "environments must be at least 1, got -3"),
        ({"loss_examples": -2}, "loss_examples must be at least 1, got -2"),
        ({"optimiser": 0.1}, r"optimiser must be one of bayesfl.optim, such as SGD\(0.1\), got 0.1"),
    ],
)
def test_options_of_other_branches_are_checked(lower: Any, variant: Any, option: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        bf.algorithms.perinvfl(bf.models.mlp(8, hidden=3, outputs=3), lower=lower, variant=variant, **option)


def test_a_pull_needs_a_centre():
    with pytest.raises(ValueError, match="a pull needs a centre"):
        tied(Annealed(0.0), lam=1.0)
    with pytest.raises(ValueError, match="estimator must be"):
        irm_energy("w", Categorical(), Annealed(1.0), estimator="half")  # pyright: ignore[reportArgumentType]
