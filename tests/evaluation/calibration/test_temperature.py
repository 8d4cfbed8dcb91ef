"""The temperature by Newton on sums: against a search, at the ends of its range, and each client's
own.
"""

import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.surveys import together
from bayesfl.evaluation.calibration import Temperature, fit, temperature
from bayesfl.evaluation.calibration.temperatures import COLDEST, HOTTEST
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from tests.evaluation.calibration.made import CLASSES, alone, local, part


def central(given: LocalPredictions) -> float:
    """The best temperature of all rows together, by a search."""
    rows = alone(given)

    def nll(log_t: float) -> float:
        return float(
            sum(
                (z / math.exp(log_t)).log_softmax(-1).gather(1, y[:, None]).neg().sum()
                for z, y in rows
            )
        )

    return math.exp(
        minimize_scalar(nll, bounds=(-3, 3), method="bounded", options={"xatol": 1e-12}).x
    )


@pytest.mark.parametrize("heat", [0.15, 0.6, 1.0, 1.7, 6.0])
def test_it_is_exact(heat: float):
    """To 1e-9 of the root of the slope of all rows together, by bisection; in few questions, whose
    answers are sums.
    """
    given, asked = local(heat=heat), []
    put, rows = together(Temperature(), given), alone(given)

    def counted(state, shapes):
        asked.append(put(state, shapes))
        return asked[-1]

    def slope(beta: float) -> float:
        return sum(
            float(((beta * z).softmax(-1) * z).sum() - z.gather(1, y[:, None]).sum())
            for z, y in rows
        )

    root = brentq(slope, 1 / HOTTEST, 1 / COLDEST, xtol=1e-15, rtol=1e-15)
    fitted = fit(Temperature(), given, CLASSES, counted)
    assert float(fitted.state["beta"]) == pytest.approx(root, rel=1e-9)
    assert len(asked) <= 10


def test_slope_and_curvature_are_derivatives():
    """Of the negative log likelihood in beta, of each client."""
    given, step = local(), Temperature()
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    state = step.start(CLASSES) | {"beta": beta.detach()}
    answer = step.answer(state, given)
    for j, (z, y) in enumerate(alone(given)):
        nll = -(beta * z).log_softmax(-1).gather(1, y[:, None]).sum()
        (g,) = torch.autograd.grad(nll, beta, create_graph=True)
        (h,) = torch.autograd.grad(g, beta) if len(y) else (torch.zeros((), dtype=torch.float64),)
        assert_close(answer["g"][j], g.detach())
        assert_close(answer["h"][j], h)
        assert int(answer["n_examples"][j]) == len(y)
        assert int(answer["n_wrong"][j]) == int((z.argmax(-1) != y).sum())
        assert_close(step.answer(state, part(given, j))["g"][0], answer["g"][j]) if len(y) else None


@pytest.mark.parametrize("strength", [0.0, 3.0, 10.0])
def test_a_clients_own_is_drawn_to_it(strength: float):
    """By a prior as precise as so many examples; a client without rows has the pooled one."""
    given = local()
    fitted = fit(Temperature(strength=strength), given, CLASSES)
    pooled, rows = 1 / central(given), alone(given)
    u = pooled * torch.cat([z for z, _ in rows])
    p = u.softmax(-1)
    information = float((p * (u - (p * u).sum(-1, keepdim=True)).square()).sum()) / len(u)
    for j, (z, y) in enumerate(rows):

        def penalised(log_t: float, z: Tensor = z, y: Tensor = y) -> float:
            nll = float((z / math.exp(log_t)).log_softmax(-1).gather(1, y[:, None]).neg().sum())
            return nll + strength * information * (log_t + math.log(pooled)) ** 2 / 2

        if strength or len(y):
            starts = [
                minimize_scalar(
                    penalised, bounds=(low, low + 1), method="bounded", options={"xatol": 1e-12}
                )
                for low in range(-3, 3)
            ]
            best = min(starts, key=lambda one: one.fun)
            assert float(fitted.own["temperature"][j]) == pytest.approx(math.exp(best.x), rel=1e-6)
    assert float(fitted.own["temperature"][2]) == pytest.approx(float(1 / fitted.state["beta"]))
    own = fitted.apply(given).predictions.probs
    z, _ = rows[0]
    assert_close(own[:30], (z / fitted.own["temperature"][0]).softmax(-1))


def test_ends_of_its_range():
    """Labels that are always the most probable class, or the least, do not bound it; equal
    probabilities know none.
    """
    given = local()
    found = given.predictions
    for labels, value in (
        (found.probs.argmax(-1), 0.05),
        (found.probs.argmin(-1), 20.0),
    ):
        with pytest.warns(
            UserWarning,
            match=f"'validation' does not bound the temperature, which is set to {value:.3g}",
        ):
            fitted = fit(
                Temperature(), replace(given, predictions=replace(found, labels=labels)), CLASSES
            )
        assert float(1 / fitted.state["beta"]) == pytest.approx(value)
        assert fitted.state["bounded"] == 0
    right = replace(given, predictions=replace(found, labels=found.probs.argmax(-1)))
    step, state = Temperature(), Temperature().start(CLASSES)
    total = together(step, right)(state, step.shapes(state))
    with pytest.warns(UserWarning, match="does not bound"):
        assert step.solve(state, total)[1]  # one question is enough
    flat = replace(given, predictions=replace(found, probs=torch.full_like(found.probs, 0.25)))
    assert fit(Temperature(), flat, CLASSES).own["temperature"].tolist() == [1.0] * 4


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"^strength must be >= 0, got -1"):
        Temperature(strength=-1)
    with pytest.raises(ValueError, match="this is a regression"):
        fit(Temperature(), local(), Outputs("regression", 1))
    with pytest.raises(ValueError, match="no client has an example in the split 'validation'"):
        fit(
            Temperature(),
            local((0, 0, 3)),
            CLASSES,
            lambda state, shapes: {name: torch.zeros(()) for name in shapes},
        )
    broken = local()
    broken.predictions.probs[31, 0] = torch.nan
    with pytest.raises(ValueError, match="rows are not finite, the first of row 1 of client 1"):
        fit(Temperature(), broken, CLASSES)


def test_the_temperature_of_one_model():
    """The root of the slope in T, for two classes in either form; and where there is none."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 4, generator=rng)
    y = (logits / 2.5).softmax(-1).multinomial(1, generator=rng)[:, 0]
    found = bf.calibration.temperature(logits, y)
    assert 2.0 < found < 3.1
    beta = torch.tensor(1 / found, dtype=torch.float64, requires_grad=True)
    nll = torch.nn.functional.cross_entropy(beta * logits.double(), y, reduction="sum")
    assert abs(float(torch.autograd.grad(nll, beta)[0])) < 1e-5
    two = logits[:, :2]
    labels = (two / 2.5).softmax(-1).multinomial(1, generator=rng)[:, 0]
    one = two[:, 1] - two[:, 0]
    forms = [bf.calibration.temperature(form, labels) for form in (two, one, one[:, None])]
    assert forms == pytest.approx([forms[0]] * 3)
    assert bf.calibration.temperature(logits.numpy(), y.numpy()) == pytest.approx(found)
    with pytest.warns(UserWarning, match=r"do not bound the temperature, .* 0\.05"):
        assert bf.calibration.temperature(logits, logits.argmax(-1)) == pytest.approx(0.05)


@pytest.mark.parametrize("y", [torch.tensor([0, 1]), torch.tensor([0, 1, 2]), torch.rand(3)])
def test_labels_that_are_not_of_the_logits_are_refused(y):
    with pytest.raises(ValueError, match="labels must be"):
        bf.calibration.temperature(torch.rand(3, 2), y)


VOTES = torch.tensor(
    [[1, 0, 0], [0.4, 0.6, 0], [0, 0, 1], [0.2, 0.8, 0], [0.7, 0, 0.3], [0.1, 0.3, 0.6]]
).double()


@pytest.mark.parametrize("labels", [[0, 1, 2, 0, 0, 2], [0, 0, 2, 1, 2, 2], [0, 1, 2, 1, 0, 1]])
def test_a_temperature_of_votes(labels: list[int]):
    """A class without votes has probability 0 at every temperature, as by p^(1 / T) on a grid."""
    y = torch.tensor(labels)
    grid = torch.linspace(math.log(0.06), math.log(19.0), 20001).double().exp()
    powers = VOTES.pow(1 / grid[:, None, None])
    nll = -(powers[:, torch.arange(6), y] / powers.sum(-1)).log().sum(-1)
    wanted = float(grid[nll.argmin()])
    assert 0.07 < wanted < 18
    for logits in (VOTES.log(), VOTES.float().log(), VOTES.log() + 3):
        assert temperature(logits, y) == pytest.approx(wanted, rel=1e-3)


def test_a_temperature_of_odds_of_0_and_infinity():
    """One logit: the certain rows add nothing."""
    odds, y = torch.tensor([2.0, 1.0, -1.5, 3.0]), torch.tensor([1, 0, 0, 1])
    certain = torch.cat([odds, torch.tensor([math.inf, -math.inf])])
    wanted = temperature(odds, y)
    assert temperature(certain, torch.cat([y, torch.tensor([1, 0])])) == pytest.approx(wanted)
    assert temperature(torch.stack([-odds, odds], -1) / 2, y) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("logits", "y"),
    [
        (VOTES.log(), [2, 1, 2, 0, 0, 2]),
        (torch.full((6, 2), -math.inf), [0] * 6),
        (torch.tensor([[math.inf, 0.0]] + [[1.0, 0.0]] * 5), [0] * 6),
        (torch.tensor([[math.nan, 0.0]] + [[1.0, 0.0]] * 5), [1] * 6),
        (torch.tensor([math.inf] + [1.0] * 5), [0] * 6),
    ],
    ids=["a vote against", "no class", "infinite", "nan", "odds"],
)
def test_a_label_of_probability_0_is_refused(logits: Tensor, y: list[int]):
    with pytest.raises(ValueError, match=r"label of row 0 .*no temperature.*probs \+ 1e-3"):
        temperature(logits, torch.tensor(y))
