"""Prior precisions by evidence and by validation."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesfl.posteriors import Laplace
from bayesfl.posteriors import prior_precision as precision
from bayesfl.posteriors.prior_precision import ALIKE, GRID, by_evidence, by_validation, predictive_nll
from tests.cases import numbers
from tests.posteriors.made import network


def test_precision_by_evidence(monkeypatch: pytest.MonkeyPatch):
    """The grid's best where it has a best within; for a prior centred on the weights themselves, none: it stays, with a warning."""
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
    with pytest.warns(UserWarning, match=rf" {beyond[0]:g}\b.*edge of the grid"):  # of what can be computed of it
        assert by_evidence(fitted, x, y, grid=[GRID[0], *beyond]) is fitted


def test_precision_by_validation():
    """The smallest NLL of the grid; overflowing ones are passed over."""
    model, x = network(), numbers(40, 4)
    held, labels = numbers(30, 4, seed=7), torch.arange(30) % 3
    best = by_validation(Laplace.fit(model, x), x, held, labels)
    scores = [predictive_nll(Laplace.fit(model, x, precision=p), held, labels) for p in GRID]
    alike = [p for p, score in zip(GRID, scores, strict=True) if score <= min(scores) + ALIKE]
    assert float(best.precision[0]) == max(alike)
    probs = best.predict(held)["probs"]
    assert_close(predictive_nll(best, held, labels), float(-probs[torch.arange(30), labels].log().mean()))
    with pytest.raises(ValueError, match=r"precision .*\(0\.0001, .*finite"):
        by_validation(Laplace.fit(model, x), x, held.fill_(1e200), labels)


@pytest.mark.parametrize(("alike", "expected"), [(0.0, 10.0), (0.011, 100.0), (0.5, 1000.0)])
def test_precisions_that_are_alike(alike: float, expected: float, monkeypatch: pytest.MonkeyPatch):
    """Of those within `ALIKE` of the best the largest, whatever the order of the grid."""
    score = {1.0: 0.9, 10.0: 0.5, 100.0: 0.51, 1000.0: 0.8}
    monkeypatch.setattr(precision, "ALIKE", alike)
    monkeypatch.setattr(precision, "predictive_nll", lambda fitted, x, y, *, centre: score[float(fitted.precision[0])])
    model, x = network(), numbers(10, 4)
    best = by_validation(Laplace.fit(model, x), x, x, torch.zeros(10).long(), grid=(1000.0, 1.0, 100.0, 10.0))
    assert float(best.precision[0]) == expected


def test_an_empty_grid():
    x, y = numbers(12, 4), torch.arange(12) % 3
    fitted = Laplace.fit(network(), x)
    with pytest.raises(ValueError, match="grid is empty"):
        by_validation(fitted, x, x, y, grid=())
    with pytest.raises(ValueError, match="grid is empty"):
        by_evidence(fitted, x, y, grid=())
