"""Temperatures of clients and of everyone."""

import itertools
import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.testing import assert_close

from bayesfl.evaluation import metrics
from bayesfl.evaluation.calibration import temperature
from bayesfl.evaluation.calibration.padded import fit_temperature, temper
from tests.evaluation.made import certain, federation

torch.set_num_threads(1)


def test_tempering_by_hand():
    """[.8, .2] has odds 4: 2 at T = 2, 16 at T = 1/2; T = 1 changes nothing and a large T forgets everything."""
    probs = torch.tensor([[[0.8, 0.2]], [[0.8, 0.2]]])
    assert_close(temper(probs, 2.0), torch.tensor([[[2 / 3, 1 / 3]]]).expand(2, 1, 2))
    assert_close(temper(probs, torch.tensor([2.0, 0.5])), torch.tensor([[[2 / 3, 1 / 3]], [[16 / 17, 1 / 17]]]))
    assert_close(temper(probs, 1.0), probs)
    assert_close(temper(probs, 1e9), torch.full_like(probs, 0.5))


def test_tempering_is_the_softmax_of_divided_logits():
    """Of probabilities, log probabilities and logits alike; order and padding stay."""
    probs, _, mask = federation()
    rng = torch.Generator().manual_seed(1)
    logits = probs.log() + torch.randn(5, 60, 1, generator=rng)
    t = torch.tensor([0.3, 0.7, 1.0, 2.0, 5.0])
    expected = (logits / t[:, None, None]).softmax(-1)
    for found in (temper(probs, t), temper(probs.log(), t, logs=True), temper(logits, t, logs=True)):
        assert_close(found, expected, equal_nan=True)
    assert temper(probs, t)[~mask].isnan().all()
    assert temper(probs, t)[mask].argmax(-1).equal(probs[mask].argmax(-1))
    assert temper(probs.float(), 2.0).dtype == torch.float32


def test_pooled_temperature_is_the_optimum():
    """Against a bounded scalar search, on all clients' examples pooled."""
    probs, labels, mask = federation()
    logits, y = probs[mask].log(), labels[mask]

    def nll(log_t: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / math.exp(log_t), y))

    best = math.exp(minimize_scalar(nll, bounds=(math.log(0.05), math.log(20)), method="bounded", options={"xatol": 1e-10}).x)  # type: ignore[attr-defined]
    fit = fit_temperature(probs, labels, mask)
    assert fit.pooled == pytest.approx(best, rel=1e-6)
    assert metrics.pooled(metrics.nll, temper(probs, fit.pooled), labels, mask) == pytest.approx(nll(math.log(best)))
    assert fit.pooled == pytest.approx(3, rel=0.25)  # what the logits were multiplied with


def test_temperature_in_closed_form():
    """Two classes with odds a, a share r of examples right: a^(1/T) = r / (1 - r)."""
    probs, labels, mask = certain(20, p=0.9)
    labels[0, :5] = 1
    expected = math.log(9) / math.log(3)
    fit = fit_temperature(probs, labels, mask, strength=0)
    assert fit.pooled == pytest.approx(expected, rel=1e-9)
    assert fit.clients.item() == pytest.approx(expected, rel=1e-9)


def test_clients_shrink_as_documented():
    """Each minimises its own likelihood plus the stated penalty: against a fine grid, built from the definition."""
    probs, labels, mask = federation()
    probs = (probs.log() * torch.tensor([0.2, 0.5, 1.0, 2.0, 4.0])[:, None, None]).softmax(-1)  # far from each other
    strength = 30.0
    fit = fit_temperature(probs, labels, mask, strength=strength)
    at = math.log(fit.pooled)
    u = probs[mask].log() / fit.pooled
    p = u.softmax(-1)
    h = float(((p * u.square()).sum(-1) - (p * u).sum(-1).square()).mean())
    grid = torch.linspace(math.log(0.05), math.log(20), 20001, dtype=torch.float64)
    for j in range(5):
        logits, y = probs[j][mask[j]].log(), labels[j][mask[j]]
        loss = torch.stack([torch.nn.functional.cross_entropy(logits / g.exp(), y, reduction="sum") for g in grid[::10]])
        loss += 0.5 * strength * h * (grid[::10] - at).square()
        assert math.log(fit.clients[j]) == pytest.approx(float(grid[::10][loss.argmin()]), abs=0.004)


def test_information_is_that_of_labels_drawn_from_the_model():
    """The second derivative of the expected nll by log T, by finite differences."""
    probs, _, mask = federation(clients=1)
    logits = probs[mask].log()
    at = 0.3
    q = (logits / math.exp(at)).softmax(-1)

    def expected(log_t: float) -> float:
        return -float((q * (logits / math.exp(log_t)).log_softmax(-1)).sum())

    step = 1e-4
    curvature = (expected(at + step) - 2 * expected(at) + expected(at - step)) / step**2
    tempered = temperature.Tempered(logits.T[None], q.argmax(-1)[None], torch.zeros(1))
    assert float(tempered.slopes(torch.tensor([at]))[1]) == pytest.approx(curvature, rel=1e-5)


def test_shrinkage_counts_in_examples():
    """Close to the pooled optimum a client of n ordinary examples goes n / (n + strength) of the way to its own."""
    probs, labels, mask = certain(4000, clients=3, p=0.7)
    labels[0, :1200], labels[1, :1160], labels[2, :1240] = 1, 1, 1
    own = fit_temperature(probs, labels, mask, strength=0).clients.log()
    for strength in (1000.0, 4000.0, 16000.0):
        fit = fit_temperature(probs, labels, mask, strength=strength)
        way = fit.clients.log()[1:] / own[1:]  # the pooled one is 1
        assert fit.pooled == pytest.approx(1, abs=1e-9)
        assert_close(way, torch.full((2,), 4000 / (4000 + strength)).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_default_strength_serves_clients_that_differ_little_or_much(spread):
    """With 9 examples a client it beats no shrinkage clearly, and is close to the best of all strengths, on examples not seen."""
    rng = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(40, 309, 10, generator=rng, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=rng).view(40, 309)
    claimed = logits * (math.log(2) + spread * torch.randn(40, 1, 1, generator=rng)).exp()
    mask = torch.ones(40, 309, dtype=torch.bool)

    def nll(**options) -> float:
        fit = fit_temperature(claimed[:, :9], labels[:, :9], mask[:, :9], logs=True, **options)
        return metrics.nll(temper(claimed[:, 9:], fit.clients, logs=True), labels[:, 9:], mask[:, 9:]).mean().item()

    others = {strength: nll(strength=strength) for strength in (0.0, 1.0, 3.0, 30.0, 100.0, math.inf)}
    assert others[0] - nll() > 0.1
    assert nll() - min(others.values()) < 0.03


def test_limits_of_the_strength():
    """0 leaves each client alone, infinity gives all the pooled one, and between the two they move monotonically."""
    probs, labels, mask = federation()
    alone = [fit_temperature(probs[j : j + 1], labels[j : j + 1], mask[j : j + 1]).pooled for j in range(5)]
    assert fit_temperature(probs, labels, mask, strength=0).clients.tolist() == pytest.approx(alone)
    everybody = fit_temperature(probs, labels, mask, strength=math.inf)
    assert everybody.clients.tolist() == pytest.approx([everybody.pooled] * 5)
    nearly = fit_temperature(probs, labels, mask, strength=1e9)
    assert nearly.clients.tolist() == pytest.approx([everybody.pooled] * 5, rel=1e-5)
    away = [(fit_temperature(probs, labels, mask, strength=s).clients.log() - math.log(everybody.pooled)).abs() for s in (0, 10, 100, 1000)]
    assert all((closer <= far + 1e-9).all() for far, closer in itertools.pairwise(away))


def test_a_client_that_is_always_right_stays_finite():
    """Its likelihood wants T = 0: the prior holds it near the pooled one, the bound holds it without; so too all if nobody errs."""
    probs, labels, mask = certain(9, clients=2)
    labels[1, :3] = 1
    fit = fit_temperature(probs, labels, mask)
    assert fit.pooled > fit.clients[0] > 0.5 * fit.pooled
    assert fit_temperature(probs, labels, mask, strength=0).clients[0] == pytest.approx(0.05)
    saturated = torch.tensor([1.0, 0.0]).expand(2, 9, 2)
    for right in (certain(9, clients=2)[0], saturated, saturated.double()):
        fit = fit_temperature(right, torch.zeros(2, 9).long(), mask)
        assert fit.pooled == pytest.approx(0.05)
        assert fit.clients.tolist() == pytest.approx([0.05, 0.05])
        assert temper(right, fit.clients).isfinite().all()
    wrong = fit_temperature(saturated, torch.ones(2, 9).long(), mask)
    assert wrong.pooled == pytest.approx(20)
    assert metrics.nll(temper(saturated, wrong.pooled), torch.ones(2, 9).long(), mask).isfinite().all()


def test_what_says_nothing_about_temperature_leaves_it():
    """Uniform predictions are the same at every T; a client without examples gets the pooled one."""
    uniform = torch.full((1, 6, 3), 1 / 3)
    for strength in (0, 10, math.inf):
        fit = fit_temperature(uniform, torch.zeros(1, 6).long(), torch.ones(1, 6).bool(), strength=strength)
        assert (fit.pooled, fit.clients.item()) == (pytest.approx(1), pytest.approx(1))
    probs, labels, mask = federation()
    mask[2] = False
    fit = fit_temperature(probs, labels, mask)
    assert fit.clients[2].item() == pytest.approx(fit.pooled)
    mixed = torch.cat(
        [uniform.double().expand(1, 6, 3), (torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0))).double().softmax(-1)]
    )
    fit = fit_temperature(mixed, torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, 6), torch.ones(2, 6).bool(), strength=0)
    assert fit.clients[0].item() == pytest.approx(fit.pooled)


def test_temperatures_do_not_depend_on_padding_scale_or_order():
    """Garbage in the padding, logits for probabilities, another order of clients."""
    probs, labels, mask = federation()
    base = fit_temperature(probs, labels, mask)
    garbage = fit_temperature(torch.where(mask[..., None], probs, 7.0), torch.where(mask, labels, 99), mask)
    assert_close(garbage.clients, base.clients)
    assert_close(fit_temperature(probs.log() + 3, labels, mask, logs=True).clients, base.clients)
    assert_close(fit_temperature(probs.flip(0), labels.flip(0), mask.flip(0)).clients, base.clients.flip(0))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda p, y, m: (p[0], y, m), {}, r"probs must be \[J, N, O\]"),
        (lambda p, y, m: (p.log(), y, m), {}, "softmax"),
        (lambda p, y, m: (p, y + 1, m), {}, "labels must lie"),
        (lambda p, y, m: (p, y, torch.ones_like(m)), {}, "labels must lie"),
        (lambda p, y, m: (p, y.clamp_min(0), torch.ones_like(m)), {}, r"clients \[0, 1, 2, 3\] .*not finite"),
        (lambda p, y, m: (p, y, torch.zeros_like(m)), {}, r"no example .*calibration=0.2"),
        (lambda p, y, m: (p, y, m), {"strength": -1}, "strength"),
        (lambda p, y, m: (p, y, m), {"bounds": (0, 20)}, "bounds"),
        (lambda p, y, m: (p, y, m), {"bounds": (2, 1)}, "bounds"),
    ],
)
def test_temperature_errors(change, options, message):
    """At the boundary, with the remedy."""
    with pytest.raises(ValueError, match=message):
        fit_temperature(*change(*federation()), **options)


def test_tempering_errors():
    """Logits for probabilities, and temperatures that are none."""
    probs, _, _ = federation()
    for t, message in ((0.0, "> 0"), (math.inf, "finite"), (torch.ones(3), "one for each client"), (torch.ones(5, 1), "one for each")):
        with pytest.raises(ValueError, match=message):
            temper(probs, t)
    with pytest.raises(ValueError, match="logs=True"):
        temper(probs.log(), 1.0)
    with pytest.raises(ValueError, match=r"\[J, N, O\]"):
        temper(probs[0], 1.0)
