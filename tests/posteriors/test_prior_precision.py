"""Prior precisions by evidence and by validation."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.linearised import nll_of_predictive
from bayesfl.posteriors.prior_precision import (
    GRID,
    by_evidence,
    by_validation,
    largest_alike,
    predictive_nll,
)
from tests.cases import numbers
from tests.posteriors.made import network


def test_precision_by_evidence(monkeypatch: pytest.MonkeyPatch):
    """The grid's best where it has a best within; for a prior centred on the weights themselves,
    none: it stays, with a warning.
    """
    model, x, y = network(), numbers(40, 4), torch.arange(40) % 3
    fitted = Laplace.fit(model, x, precision=2.0)
    best = by_evidence(fitted, x, y)
    scores = [float(Laplace.fit(model, x, precision=p).log_marginal_likelihood(x, y)) for p in GRID]
    assert float(best.precision[0]) == GRID[scores.index(max(scores))]
    with pytest.warns(UserWarning, match=r"10000\b.*edge of the grid"):
        assert by_evidence(fitted, x, y, centre=fitted.loc) is fitted
    beyond = [p for p in GRID if p > float(best.precision[0])]
    with pytest.warns(UserWarning, match=rf" {beyond[0]:g}\b.*edge of the grid"):
        assert by_evidence(fitted, x, y, grid=beyond) is fitted
    honest = Laplace.with_precision

    def fails(self: Laplace, x: Tensor, precision: float) -> Laplace:
        if precision == GRID[0]:
            raise torch.linalg.LinAlgError
        return honest(self, x, precision)

    monkeypatch.setattr(Laplace, "with_precision", fails)
    with pytest.warns(UserWarning, match=rf" {beyond[0]:g}\b.*edge of the grid"):
        # Of what can be computed of it.
        assert by_evidence(fitted, x, y, grid=[GRID[0], *beyond]) is fitted


def test_precision_by_validation():
    """The largest that is within one standard error of the best; overflowing ones are
    passed over.
    """
    model, x = network(), numbers(40, 4)
    held, labels = numbers(30, 4, seed=7), torch.arange(30) % 3
    best = by_validation(Laplace.fit(model, x, precision=1.0), x, held, labels)
    scores = {
        p: nll_of_predictive(Laplace.fit(model, x, precision=p).predict(held), labels) for p in GRID
    }
    least = min(scores, key=lambda p: float(scores[p].sum()))
    apart = {p: score - scores[least] for p, score in scores.items()}
    assert float(best.precision[0]) == max(
        p for p, d in apart.items() if d.mean() <= d.std() / len(d) ** 0.5
    )
    probs = best.predict(held)["probs"]
    assert_close(
        predictive_nll(best, held, labels), float(-probs[torch.arange(30), labels].log().mean())
    )
    with pytest.raises(ValueError, match=r"precision .*\(0\.0001, .*finite"):
        by_validation(Laplace.fit(model, x, precision=1.0), x, held.fill_(1e200), labels)


@pytest.mark.parametrize(
    ("more", "wide", "expected"), [(0.01, 0.005, 0), (0.001, 0.005, 1), (0.001, 0.2, 2)]
)
def test_the_largest_that_is_alike(more: float, wide: float, expected: int):
    """Pairs decide: losses that differ widely between examples are told apart by a difference that
    is nearly the same for each.
    """
    base, noise = 3 * numbers(50, seed=1).abs(), numbers(50, 2, seed=2)
    noise = noise - noise.mean(0)
    losses = torch.stack([base, base + more + 0.01 * noise[:, 0], base + 0.01 + wide * noise[:, 1]])
    apart = losses - losses[0]
    error = apart.std(1) / 50**0.5
    assert (
        largest_alike(losses.sum(1), losses @ losses.T, 50)
        == int((apart.mean(1) <= error).nonzero().max())
        == expected
    )


def test_candidates_that_do_not_work_are_passed_over():
    """Infinite and undefined losses; one example has no standard error, and equal candidates are
    alike.
    """
    losses = torch.tensor(
        [[1.0, 2.0], [1.0, 2.0], [torch.inf, 1.0], [torch.nan, 1.0]], dtype=torch.float64
    )
    assert largest_alike(losses.sum(1), losses @ losses.T, 2) == 1
    assert largest_alike(losses[:2, 0], losses[:2, :1] @ losses[:2, :1].T, 1) == 1
    # A difference that does not vary has no error.
    sure = torch.tensor([[1.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    assert largest_alike(sure.sum(1), sure @ sure.T, 2) == 0
    # .34 more, to an error of .36; over n and not n - 1, .29.
    few = torch.tensor([[1.0, 1.0, 1.0], [1.35, 0.99, 1.0]], dtype=torch.float64)
    assert largest_alike(few.sum(1), few @ few.T, 3) == 1
    one = torch.tensor([[1.0], [1.1]], dtype=torch.float64)
    assert largest_alike(one.sum(1), one @ one.T, 1) == 0
    with pytest.raises(ValueError, match="no candidate"):
        largest_alike(losses[2:].sum(1), losses[2:] @ losses[2:].T, 2)


@pytest.mark.parametrize("link", ["contrasts", "per_class"])
def test_the_precision_is_chosen_under_the_link_that_predicts(
    link: Any, monkeypatch: pytest.MonkeyPatch
):
    """In whatever order the grid comes."""
    asked, honest = [], Laplace.predict

    def predict(self: Laplace, x: Any, **options: Any) -> Any:
        asked.append(options["link"])
        return honest(self, x, **options)

    monkeypatch.setattr(Laplace, "predict", predict)
    model, x = network(), numbers(10, 4)
    fitted, labels = Laplace.fit(model, x, precision=1.0), torch.zeros(10).long()
    best = by_validation(fitted, x, x, labels, link=link, grid=(1000.0, 1.0, 100.0, 10.0))
    assert set(asked) == {link}
    again = by_validation(fitted, x, x, labels, link=link, grid=(1.0, 10.0, 100.0, 1000.0))
    assert_close(best.precision, again.precision)


def test_an_empty_grid():
    x, y = numbers(12, 4), torch.arange(12) % 3
    fitted = Laplace.fit(network(), x, precision=1.0)
    with pytest.raises(ValueError, match=r"no precision of the grid \(\)"):
        by_validation(fitted, x, x, y, grid=())


def test_a_precision_that_is_too_small_is_worse_than_the_weights_alone():
    """Of a network that fits its training data: at 1.0, and by evidence; not on validation data."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x / 16).float(), torch.from_numpy(y)
    train, held, test = (slice(0, 300), slice(300, 700), slice(700, None))
    model = bf.models.mlp(64, hidden=20, outputs=10, seed=0)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimiser.step()
    alone = nn.functional.cross_entropy(model(x[test]).detach(), y[test])
    for structure in ("kfac", "diagonal"):
        fitted = Laplace.fit(model, x[train], precision=1.0, structure=structure)
        best = by_validation(fitted, x[train], x[held], y[held])
        assert predictive_nll(fitted, x[test], y[test]) > 1.5 * alone
        assert predictive_nll(by_evidence(fitted, x[train], y[train]), x[test], y[test]) > alone
        assert predictive_nll(best, x[test], y[test]) < 1.02 * alone
