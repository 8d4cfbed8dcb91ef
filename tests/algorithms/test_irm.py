"""IRM: its limits, its gradient on the server, a linear model whose answer is known, what is
refused.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.engine.plan import PhasePlan
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD, Adam
from tests.algorithms.made import AdamByHand, ByHand
from tests.cases import close, run, weights

METHODS: dict[str, dict[str, Any]] = {
    "irm": {},
    "irm_l2": {},
    "irm_ft": {},
    "group_dro": {"environments": 2},
    "perinvfl": {},
}


def test_irm_ft_without_a_penalty_is_fedavg_ft(clients: FederatedData):
    """theta of a round is the model received, fine-tuned: what FedAvg-FT predicts by a round
    earlier.
    """
    model = nn.Linear(8, 3)
    options: dict[str, Any] = {
        "gamma": 0.0,
        "l2": 0.0,
        "personal_steps": 3,
        "steps": 2,
        "batch_size": None,
        "optimiser": SGD(0.1),
        "personal_optimiser": Adam(0.05),
    }
    tuned = bf.algorithms.fedavg_ft(
        model,
        epochs=2,
        batch_size=None,
        optimiser=SGD(0.1),
        finetune_epochs=6,
        finetune_optimiser=Adam(0.05),
    )
    before = run(tuned, clients, rounds=2).predict().probs
    for method in (bf.algorithms.irm_ft, bf.algorithms.irm_l2):
        more = {"lam": 0.0} if method is bf.algorithms.irm_l2 else {}
        got = run(method(model, **options, **more), clients, rounds=3).predict().probs
        assert_close(got, before, atol=1e-10, rtol=0, equal_nan=True)
    pulled = bf.algorithms.irm_l2(model, lam=1.0, **options)
    found = run(pulled, clients, rounds=3).predict().probs
    assert not torch.allclose(found, before, equal_nan=True)


def test_one_gradient_a_round_is_central_irm(clients: FederatedData):
    """Clients send one plain step, the server takes Adam's: the run is that of Adam on the clients'
    mean objective, to rounding.
    """
    gamma, l2, start, rate = 40.0, 0.03, 4, 0.05
    options: dict[str, Any] = {
        "gamma": gamma,
        "l2": l2,
        "anneal": start,
        "steps": 1,
        "batch_size": None,
        "optimiser": SGD(1.0),
    }
    algorithm = bf.with_server_optimiser(bf.algorithms.irm(nn.Linear(8, 3), **options), Adam(rate))
    hand, w, adam = ByHand(clients, algorithm), weights(algorithm), AdamByHand(rate)

    def pooled(w: Tensor, now: float) -> Tensor:
        return (
            sum((n * hand.irm(w, j, now, l2) for j, n in enumerate(hand.n)), torch.tensor(0.0))
            / hand.n.sum()
        )

    for round in range(8):
        w = adam(w, torch.func.grad(pooled)(w, gamma if round >= start else 1.0))
    result = run(algorithm, clients, rounds=8)
    close(result.server["w"]["loc"], w, 1e-6)
    plain = run(bf.algorithms.irm(algorithm.model, **options), clients, rounds=8).server["w"]["loc"]
    assert not torch.allclose(plain, w, atol=1e-3)


def moments(s: float, n: float, c: float) -> tuple[Tensor, Tensor]:
    """Four points with the exact second moments of  x1 ~ N(0, s), x3 ~ N(0, 1), y = x1 + c x3 +
    N(0, s), x2 = y + N(0, n).
    """
    # Of x1, x3, both noises.
    mix = torch.tensor(
        [[1.0, 0, 0, 0], [1, c, 1, 1], [0, 1, 0, 0], [1, c, 1, 0]], dtype=torch.float64
    )
    root = mix * torch.tensor([s, 1.0, s, n], dtype=torch.float64).sqrt()
    points = 2 * root.T  # [4, 4]: their mean square is root root'
    return points[:, :3], points[:, 3]


ENVIRONMENTS = (
    ((0.5, 1), (2, 0.3), (1, 3)),
    ((0.7, 0.5), (1.5, 2), (3, 1)),
    ((1, 1),),
    ((3, 0.5),),
)


def linear_clients() -> FederatedData:
    """Four clients, y = x1 for all of them, and +-x3 for each; x2 is what y causes."""
    parts = [
        [moments(s, n, c) for s, n in own]
        for own, c in zip(ENVIRONMENTS, (1.0, -1.0, 1.0, -1.0), strict=True)
    ]
    return bf.data.from_arrays(
        [torch.cat([x for x, _ in own]) for own in parts],
        [torch.cat([y for _, y in own]) for own in parts],
        test_share=0,
        environments=[torch.arange(len(own)).repeat_interleave(4) for own in parts],
    ).to(dtype=torch.float64)


def minimiser(
    algorithm: bf.Algorithm,
    block: str,
    clients: FederatedData,
    who: list[int],
    start: Tensor,
    given: dict[str, Any],
) -> Tensor:
    """Where the energies of some clients, added up, are least."""
    from scipy.optimize import minimize

    energy = algorithm.phases[-1].energy
    algorithm.module(start)  # made here, since no copy can be made inside torch.func
    plan = PhasePlan(algorithm.phases[-1], clients.train, np.array(who), dtype=torch.float64)
    everything = plan.batch(0, len(who))
    views = [
        {"n": torch.tensor(float(clients.train.counts[j]), dtype=torch.float64), **given}
        for j in who
    ]
    inside = everything["weight"] > 0
    batches = [{key: t[c][inside[c]] for key, t in everything.items()} for c in range(len(who))]
    here = {**given, "round": 1, "rounds": 1}

    def total(w: Tensor) -> Tensor:
        return torch.stack(
            [
                energy(algorithm, {block: {"loc": w}}, here, view, batch, {})[0]
                for view, batch in zip(views, batches, strict=True)
            ]
        ).sum()

    def both(w: np.ndarray) -> tuple[float, np.ndarray]:
        slope, value = torch.func.grad_and_value(total)(torch.from_numpy(w))
        return float(value), slope.numpy()

    return torch.from_numpy(
        minimize(
            both, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-12, "maxiter": 2000}
        ).x
    )


def by_continuation(
    make: Any,
    block: str,
    clients: FederatedData,
    who: list[int],
    start: Tensor,
    given: dict[str, Any],
) -> Tensor:
    """The minimiser as gamma grows to 1e6, each from the one before."""
    w = start
    for gamma in 10.0 ** torch.arange(0.0, 6.5, 0.5).double():
        w = minimiser(make(float(gamma)), block, clients, who, w, given)
    return w


@pytest.mark.slow
def test_a_linear_model_with_exact_moments():
    """From any start the federation finds x1 alone; clients with several environments add their own
    +-x3, one with one falls for x2, unless the pull is strong."""
    clients, model = linear_clients(), nn.Linear(3, 1, bias=False)
    common: dict[str, Any] = {"anneal": 0, "l2": 0.0, "likelihood": Gaussian()}
    for seed in range(2):
        start = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = by_continuation(
            lambda gamma: bf.algorithms.irm(model, gamma=gamma, **common),
            "w",
            clients,
            [0, 1, 2, 3],
            start,
            {},
        )
        assert_close(found, torch.tensor([1.0, 0.0, 0.0]).double(), atol=1e-3, rtol=0)
    received = {"w": {"loc": found}}

    def personal(lam: float, j: int) -> Tensor:
        return by_continuation(
            lambda gamma: bf.algorithms.perinvfl(model, gamma=gamma, lam=lam, **common),
            "theta",
            clients,
            [j],
            found,
            received,
        )

    for j, sign in ((0, 1.0), (1, -1.0)):
        assert_close(personal(1e-2, j), torch.tensor([1.0, 0.0, sign]).double(), atol=0.011, rtol=0)
    for j, own in ((2, (0.5, 0.5, 0.5)), (3, (1 / 7, 6 / 7, -1 / 7))):
        assert_close(personal(1e-4, j), torch.tensor(own).double(), atol=1e-3, rtol=0)
    for j in (0, 3):
        assert_close(personal(1e4, j), found, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_data_without_environments_are_refused(clients: FederatedData, name: str):
    """With the remedy, which works."""
    xs, ys = zip(*[clients.train.client(j) for j in range(7)], strict=True)
    plain = bf.data.from_arrays(list(xs), list(ys), outputs=3)
    algorithm = getattr(bf.algorithms, name)(nn.Linear(8, 3), **METHODS[name])
    with pytest.raises(ValueError, match=r"environments=.*clients\.as_environments\(\)"):
        run(algorithm, plain)
    assert torch.isfinite(run(algorithm, plain.as_environments()).server["w"]["loc"]).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("irm", {"gamma": -1.0}, r"gamma .*got -1.0"),
        ("irm", {"gamma": float("inf")}, r"gamma .*got inf"),
        ("irm", {"anneal": -1}, r"anneal.* 0.* got -1"),
        ("irm", {"estimator": "none"}, r"estimator .*'biased'.*'unbiased'.* got 'none'"),
        ("irm", {"l2": -0.1}, "l2 must be >= 0"),
        ("perinvfl", {"steps": None, "lower": "group_dro"}, r"^steps .*got None"),
        ("irm_l2", {"lam": -0.1}, "lam must be >= 0"),
        ("irm_ft", {"personal_steps": 0}, r"personal_steps .*1.* got 0"),
        ("group_dro", {"eta": -0.1}, r"^eta .*got -0.1"),
        ("group_dro", {"environments": 0}, r"environments .*1.* got 0"),
        ("group_dro", {"loss_examples": 0}, r"loss_examples .*1.* got 0"),
        ("perinvfl", {"lower": "erm"}, r"lower .*'irm'.*'group_dro'.* got 'erm'"),
        ("perinvfl", {"eta": 0.5}, r"eta has no effect under lower='irm', got 0\.5"),
        ("perinvfl", {"environments": 2}, r"environments has no effect under lower='irm', got 2"),
        (
            "perinvfl",
            {"loss_examples": 30},
            r"loss_examples has no effect under lower='irm', got 30",
        ),
        ("perinvfl", {"variant": "cosine"}, r"variant .*'distance'.*'contrastive'.* got 'cosine'"),
        ("perinvfl", {"lam": -1.0}, "lam must be >= 0"),
        ("perinvfl", {"adapt_steps": 0}, r"adapt_steps .*1.* got 0"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        getattr(bf.algorithms, name)(nn.Linear(8, 3), **options)
