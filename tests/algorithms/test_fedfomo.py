"""FedFomo on linear regressions, against a plain loop."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import DIM, linear_only
from tests.cases import run

RATE, EXPLORE, DECAY, MODELS, ROUNDS = 0.1, 0.6, 0.2, 2, 5


def test_models_are_those_of_a_loop():
    """Which models are sent, how far a client goes towards each by its validation rows, and its
    step on the others.
    """
    rng = torch.Generator().manual_seed(1)
    rules = torch.randn(2, DIM, generator=rng)
    xs = [torch.randn(n, DIM, generator=rng) for n in (18, 25, 12, 20)]
    ys = [x @ rules[j // 2] for j, x in enumerate(xs)]
    data = bf.data.from_arrays(xs, ys, test=(xs, ys), validation=0.4)
    made = bf.algorithms.fedfomo(
        linear_only(torch.full((1, DIM), 0.4)),
        models=MODELS,
        explore=EXPLORE,
        explore_decay=DECAY,
        epochs=1,
        batch_size=None,
        optimiser=SGD(RATE),
        likelihood=Gaussian(),
    )
    result = run(made, data, rounds=ROUNDS)

    def loss(w: Tensor, j: int) -> Tensor:
        x, y = data.validation.client(j)
        return 0.5 * (x.double() @ w - y).square().mean()

    w, held = (torch.full((4, DIM), 0.4).double() for _ in range(2))
    affinity, explore, moved = np.zeros((4, 4)), EXPLORE, 0
    for round in range(ROUNDS):
        draw = int(generator(2, Purpose.COMMON, round=round).integers(2**62))
        draws = np.random.default_rng(draw)
        coin, score = draws.random((4, 1)), draws.random((4, 4))
        sent, gains = w.clone(), np.zeros((4, 4))
        for j in range(4):
            order = score[j] if coin[j, 0] < explore else affinity[j] + 1e-9 * score[j]
            who = [k for k in np.argsort(-order) if k != j][:MODELS]
            for k in who:
                if not torch.equal(held[k], w[j]):
                    gain = (loss(w[j], j) - loss(held[k], j)) / (held[k] - w[j]).norm()
                    gains[j, k] = float(gain)
            shares = torch.from_numpy(gains[j]).clamp_min(0)
            if float(shares.sum()):
                sent[j] = w[j] + shares / shares.sum() @ (held - w[j])
                moved += 1
            x, y = (t.double() for t in data.train.client(j))
            sent[j] = sent[j] - RATE * x.T @ (x @ sent[j] - y) / len(x)
        affinity, w, held = affinity + gains, sent, sent.clone()
        explore = max(0.0, explore - DECAY)
    assert moved > 4
    assert_close(result.private["w"]["loc"], w, atol=1e-9, rtol=0)
    assert_close(result.server["affinity"], torch.from_numpy(affinity), atol=1e-9, rtol=0)
    assert_close(result.server["w"]["loc"], w.mean(0), atol=1e-9, rtol=0)


def test_equal_models_gain_nothing_though_their_losses_round_apart(
    regressions: bf.data.FederatedData, monkeypatch: pytest.MonkeyPatch
):
    losses, calls = bf.Algorithm.losses, itertools.count()

    def rounded(self: bf.Algorithm, *given: Any) -> Tensor:
        return losses(self, *given) * (1 - 1e-7 * next(calls))

    monkeypatch.setattr(bf.Algorithm, "losses", rounded)
    made = bf.algorithms.fedfomo(
        linear_only(torch.zeros(1, DIM)), rows="train", likelihood=Gaussian()
    )
    result = run(made, regressions)
    assert bool((result.server["affinity"] == 0).all())
    assert bool(result.server["w"]["loc"].isfinite().all())


def test_validation_rows_must_be_there(regressions: bf.data.FederatedData):
    made = bf.algorithms.fedfomo(linear_only(torch.zeros(1, DIM)), likelihood=Gaussian())
    with pytest.raises(ValueError, match=r"validation rows in training.*validation=0\.1"):
        run(made, regressions)
