"""PerInvFL: whole rounds by hand, strong pulls, optimisers that clients keep, what is refused."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD, Adam
from tests.algorithms.made import AdamByHand, ByHand
from tests.cases import close, run, weights


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
def test_rounds_of_perinvfl_by_hand(clients: FederatedData, estimator: str):
    """Both problems, Adam kept across rounds and forgotten as gamma jumps, ridge and pull divided
    with the rest.
    """
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


def test_rounds_of_the_contrastive_form_by_hand(clients: FederatedData):
    """Features of theta, of the model received and of the client's own; theta goes on from where it
    was, each on its optimiser.
    """
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
        cosines = [
            ((z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1))).exp()
            for other in (near, far)
        ]
        return (
            risk(v, x, y)
            - lam * (cosines[0] / (cosines[0] + 0.2 * cosines[1])).log().mean()
            + l2 * v.square().sum()
        )

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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gamma"), [("irm_l2", 30.0), ("perinvfl", 0.0)])
def test_strong_pulls_give_the_model_received(name: str, gamma: float):
    """Steps short enough for the pull, 1 / (curvature + lam): theta ends at w, and at the pulled
    optimum of a quadratic in between.

    IRM-L2's own objective has no penalty, so gamma does not divide it.
    """
    rng = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, 2, generator=rng) for n in (9, 14)]
    ys = [
        x @ torch.tensor([1.0, -2.0]) + j + torch.randn(len(x), generator=rng)
        for j, x in enumerate(xs)
    ]
    linear = bf.data.from_arrays(
        xs, ys, test_share=0, environments=[torch.zeros(len(x)).long() for x in xs]
    )
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


def test_adam_is_forgotten_once(clients: FederatedData):
    """In a client's first round from the jump on, whenever that is: its count of steps starts anew
    there, and there alone.
    """
    algorithm = bf.algorithms.perinvfl(
        nn.Linear(8, 3), anneal=2, steps=2, personal_steps=3, batch_size=None
    )
    rounds = 6
    result = run(algorithm, clients, rounds=rounds, participation=0.4)
    cohorts = [set(result.settings.cohort(7, t).tolist()) for t in range(rounds)]
    taken = [
        sum(j in cohorts[t] for t in range(2, rounds)) or sum(j in cohorts[t] for t in range(2))
        for j in range(7)
    ]
    assert any(
        j not in cohorts[2] and j in set.union(*cohorts[:2]) & set.union(*cohorts[3:])
        for j in range(7)
    ), "nobody comes late"
    assert result.private["w_optimiser"]["steps"].tolist() == [2 * k for k in taken]
    assert result.private["theta_optimiser"]["steps"].tolist() == [6 * k for k in taken]
    never = run(bf.algorithms.irm(nn.Linear(8, 3), gamma=0.5, anneal=2, steps=2), clients, rounds=4)
    assert never.private["w_optimiser"]["steps"].tolist() == [8] * 7


def test_what_travels(clients: FederatedData):
    """FedAvg's traffic, and for GroupDRO a loss and a presence for each environment."""
    model = nn.Linear(8, 3)

    def sent(method: bf.Algorithm) -> dict:
        return method.uplink(method.init(1))

    average = sent(bf.algorithms.fedavg(model))
    for name in ("irm", "irm_l2", "irm_ft", "perinvfl"):
        assert sent(getattr(bf.algorithms, name)(model)) == average
    robust = sent(bf.algorithms.perinvfl(model, lower="group_dro", environments=2))
    assert {name: shape for name, (shape, _) in robust.items()} == {
        "w.loc": (27,),
        "risk": (2,),
        "present": (2,),
    }


@pytest.mark.parametrize("variant", ["distance", "contrastive"])
def test_a_novel_client_starts_from_the_global_model(
    clients: FederatedData, model: nn.Module, variant: str
):
    """With steps of no length, theta of one that joins is w, after as many of them as were asked
    for.
    """
    old, novel = clients.hold_out(2, seed=0)
    algorithm = bf.algorithms.perinvfl(
        model, variant=variant, personal_steps=2, adapt_steps=5, personal_optimiser=Adam(0.0)
    )
    result = run(algorithm, old, rounds=2)
    adapted = result.adapt(novel).private
    close(adapted["theta"]["loc"], result.server["w"]["loc"].expand(2, -1))
    assert (
        adapted["theta_optimiser"]["steps"].tolist() == [6, 6]
        if variant == "contrastive"
        else [5, 5]
    )
    assert not torch.allclose(result.private["theta"]["loc"][0], result.server["w"]["loc"])


@pytest.mark.parametrize(
    ("lower", "variant"), list(product(("irm", "group_dro"), ("distance", "contrastive")))
)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gamma": -1.0}, r"gamma .*got -1.0"),
        ({"gamma": float("nan")}, r"gamma .*got nan"),
        ({"anneal": -3}, r"anneal.* 0.* got -3"),
        ({"estimator": "zzz"}, r"estimator .*'biased'.*'unbiased'.* got 'zzz'"),
        ({"l2": -1.0}, r"l2 .*0.* got -1"),
        ({"lam": -1.0}, r"lam .*0.* got -1"),
        ({"eta": -1.0}, r"^eta .*0.* got -1"),
        ({"eta": float("nan")}, r"^eta .*got nan"),
        ({"environments": -3}, r"environments .*1.* got -3"),
        ({"loss_examples": -2}, r"loss_examples .*1.* got -2"),
    ],
)
def test_options_of_other_branches_are_checked(
    lower: Any, variant: Any, option: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        bf.algorithms.perinvfl(
            bf.models.mlp(8, hidden=3, outputs=3), lower=lower, variant=variant, **option
        )
