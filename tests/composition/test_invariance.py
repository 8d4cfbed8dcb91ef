"""What invariant learning is composed of: slopes and their squares, annealing, ties, weights of
environments.
"""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
from bayesfl.composition.priors import server_mean
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from tests.cases import close


def batch_of(environment: Any, weight: Any = None) -> dict[str, Tensor]:
    """What a batch says beside its examples, from environments [..., B]."""
    environment = torch.as_tensor(environment)
    weight = torch.ones_like(environment) if weight is None else torch.as_tensor(weight)
    return {
        "environment": torch.nn.functional.one_hot(environment).double(),
        "weight": weight.double(),
    }


@pytest.mark.parametrize(
    ("likelihood", "logits", "labels", "mean", "square"),
    [
        (Bernoulli(), [[1.0], [-2.0]], [1, 0], -0.25367363270711507, 0.06435031193082433),
        (
            Categorical(),
            [[1.0, 2.0, 0.5], [0.0, -1.0, 1.0]],
            [1, 2],
            -0.4331900448834201,
            0.18765361498609953,
        ),
    ],
)
def test_slopes_of_a_scale(likelihood, logits, labels, mean, square):
    """The published values, two classes and three."""
    slopes = scale_slopes(likelihood, torch.tensor(logits).double(), torch.tensor(labels))
    close(torch.stack([slopes.mean(), squared_slopes(slopes, batch_of([0, 0]))]), [mean, square])


@pytest.mark.parametrize(
    ("likelihood", "outputs"), [(Bernoulli(), 1), (Categorical(), 3), (Gaussian(scale=0.7), 2)]
)
def test_slopes_by_finite_differences(likelihood, outputs):
    """And the slope of the penalty at the outputs, which training goes down; for many clients as
    for one.
    """
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
    """Environments add up, one that a batch lacks counts 0, padding counts nothing, clients side by
    side as one by one.
    """
    rng = torch.Generator().manual_seed(1)
    slopes = torch.randn(3, 7, generator=rng, dtype=torch.float64)
    environment = torch.tensor(
        [[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 2]]
    )
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
    assert (count.tolist(), mean[1, 2]) == ([[2, 3, 2], [1, 3, 0], [6, 0, 0]], 0)


def test_the_unbiased_square_is_one():
    """Its mean over all samples with replacement is the square of the mean; one sample's is that of
    its halves, over all ways to halve.
    """
    values = torch.tensor([0.3, -1.0, 2.2], dtype=torch.float64)
    one = batch_of([0] * 4)
    samples = [torch.stack(chosen) for chosen in product(values, repeat=4)]
    unbiased = torch.stack([squared_slopes(sample, one, "unbiased") for sample in samples])
    close(unbiased.mean(), values.mean() ** 2)
    assert unbiased.min() < 0
    biased = torch.stack([squared_slopes(sample, one) for sample in samples])
    close(biased.mean(), values.mean() ** 2 + values.var(correction=0) / 4)
    for sample in samples[5::20]:
        halves = [
            (sample[list(half)].mean(), sample[[i for i in range(4) if i not in half]].mean())
            for half in combinations(range(4), 2)
        ]
        close(
            squared_slopes(sample, one, "unbiased"), torch.stack([a * b for a, b in halves]).mean()
        )


def test_annealing():
    """1 in the first rounds, gamma after them; a gamma below 1 is there from the start; division by
    what exceeds 1.
    """
    annealed, small = Annealed(50.0, start=3), Annealed(0.2, start=3)
    both = [(annealed.weight(t), annealed.scale(t)) for t in (1, 3, 4, 10)]
    assert both == [(1, 1), (1, 1), (50, 50), (50, 50)]
    assert [(small.weight(t), small.scale(t)) for t in (1, 4)] == [(0.2, 1), (0.2, 1)]
    assert Annealed(0.0, start=3).weight(1) == 0


@pytest.mark.parametrize(("l2", "lam"), [(0.3, 0.0), (0.0, 2.0), (0.3, 2.0)])
def test_ties_as_one_gaussian(l2, lam):
    """Under a mean over n examples its slope is that of (l2 |w|^2 + lam / 2 |w - centre|^2) /
    max(1, gamma_t).
    """
    prior = tied(Annealed(40.0, start=2), l2=l2, lam=lam, centre=server_mean("w"))
    w = torch.tensor([[0.5, -2.0], [1.0, 3.0]], dtype=torch.float64)
    centre = torch.tensor([1.5, 1.0], dtype=torch.float64)
    view = {"n": torch.tensor([5.0, 17.0], dtype=torch.float64)}
    for round, scale in ((2, 1.0), (3, 40.0)):
        given: dict[str, Any] = {"w": {"loc": centre}, "round": round, "rounds": 9}
        slope = torch.func.grad(
            lambda w, g=given: (prior.energy(w, torch.zeros_like(w), g, view) / view["n"]).sum()
        )(w)
        close(slope, (2 * l2 * w + lam * (w - centre)) / scale)


def test_reweighting():
    """The published value; the simplex; losses that are equal, shifted, or scaled against the step;
    what is not there.
    """
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
    close(
        gone.exp().flatten(),
        0.8
        * torch.tensor([0.7 * np.exp(0.1), 0, 0.1 * np.exp(0.3)])
        / (0.7 * np.exp(0.1) + 0.1 * np.exp(0.3)),
    )
    assert gone[1] == torch.finfo(gone.dtype).min
    close(reweighted(uneven, risk * 1e6, there, 1.0).exp().flatten(), [0.0, 0.0, 1.0])


def test_evenly_spaced_examples():
    """All where there are few, else as many as asked for, in the order of the data; padding stays
    padding.
    """
    x = torch.arange(10.0).expand(3, 10)
    weight = torch.tensor([[1.0] * 10, [1.0] * 4 + [0.0] * 6, [1.0] * 2 + [0.0] * 8])
    data = {
        "x": x.unsqueeze(-1),
        "y": x.long(),
        "weight": weight,
        "environment": torch.ones(3, 10, 1),
    }
    some, places = evenly(data, 4), [[0, 2, 5, 7], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert some["y"].tolist() == some["x"][..., 0].tolist() == places
    assert some["weight"].tolist() == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert evenly({key: t[1] for key, t in data.items()}, 4)["y"].tolist() == places[1]
    assert evenly(data, None) is evenly(data, 10) is data


def test_rare_environments_are_among_the_examples():
    """An equal share from each environment, evenly spaced there; all of a small one; a client with
    few examples loses none.
    """
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
    assert [members(evenly(data, most))[0].sum(0).tolist() for most in (2, 3, 7)] == [
        [1, 1],
        [1, 1],
        [3, 3],
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tied(Annealed(0.0), lam=1.0), "a pull needs a centre"),
        (
            lambda: irm_energy("w", Categorical(), Annealed(1.0), estimator="half"),  # pyright: ignore[reportArgumentType]
            "estimator must be",
        ),
    ],
)
def test_what_is_refused(call: Any, words: str):
    with pytest.raises(ValueError, match=words):
        call()
