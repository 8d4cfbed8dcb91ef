"""Prior precisions by evidence and by validation."""

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.likelihoods import Gaussian
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.linearised import nll_of_predictive
from bayesfl.posteriors.prior_precision import (
    GRID,
    best_precision,
    by_evidence,
    by_layer_evidence,
    by_noise_evidence,
    by_validation,
    largest_alike,
    predictive_nll,
)
from tests.cases import numbers
from tests.posteriors.made import network


@pytest.mark.parametrize(
    ("structure", "precision"),
    [("full", 2.0), ("full", None), ("diagonal", 0.1), ("kfac", 2.0), ("subnetwork", 2.0)],
)
def test_precision_by_evidence(structure: Any, precision: float | None):
    """The evidence is largest there, whichever precision it is sought from: it falls to both
    sides, by squares. The dual form has it, too.
    """
    model, labels = network(), torch.arange(40) % 3
    inputs = numbers(40, 4)
    start = numbers(51, seed=4).exp() if precision is None else precision
    chosen = torch.tensor([0, 7, 31]) if structure == "subnetwork" else None
    for rows in (6, 40):  # 12 rows of the dual form are fewer than 51 weights
        x, y = inputs[:rows], labels[:rows]
        fitted = Laplace.fit(model, x, precision=start, structure=structure, indices=chosen)
        best = by_evidence(fitted, x)
        found = float(best.precision[0])
        assert bool((best.precision == found).all())
        least, here, most = (
            float(best.with_precision(x, found * factor).log_marginal_likelihood(x, y))
            for factor in (0.999, 1.0, 1.001)
        )
        assert 0 < here - least < 1e-4
        assert 0 < here - most < 1e-4
        assert here - least == pytest.approx(here - most, rel=0.01)


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
def test_a_precision_for_each_layer(structure: Any):
    """The evidence falls from there on both sides, alike, in the precision of any layer."""
    x, y = numbers(40, 4), torch.arange(40) % 3
    best = by_layer_evidence(Laplace.fit(network(), x, precision=2.0, structure=structure), x)
    here = float(best.log_marginal_likelihood(x, y))
    for name in best.curvature.layout.names:
        drops = []
        for factor in (0.99, 1 / 0.99):
            precision = best.precision.clone()
            best.curvature.layout.leaves(precision)[name].mul_(factor)
            beside = best.with_precision(x, precision)
            drops.append(here - float(beside.log_marginal_likelihood(x, y)))
        assert min(drops) > 0
        assert drops[0] == pytest.approx(drops[1], rel=0.02)
    assert here > float(by_evidence(best, x).log_marginal_likelihood(x, y))


def test_a_subnetwork_has_no_layers():
    fitted = Laplace.fit(
        network(), numbers(9, 4), precision=1.0, indices=torch.arange(3), structure="subnetwork"
    )
    with pytest.raises(ValueError, match="a subnetwork has no weights of some layers"):
        by_layer_evidence(fitted, numbers(9, 4))


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac", "subnetwork"])
@pytest.mark.parametrize("weighted", [False, True])
def test_noise_and_precision_by_evidence(structure: Any, weighted: bool):
    """The evidence falls from there to all sides, whatever noise and precision it begins with."""
    if weighted and structure == "kfac":
        return
    x, y = numbers(40, 4), 3 * numbers(40, 2, seed=8)
    weight = torch.linspace(0.5, 2, 40, dtype=torch.float64) if weighted else None
    chosen = torch.tensor([0, 7, 31]) if structure == "subnetwork" else None
    model = network(2)

    def fit(scale: float, precision: float) -> Laplace:
        return Laplace.fit(
            model,
            x,
            precision=precision,
            structure=structure,
            indices=chosen,
            likelihood=Gaussian(scale=scale),
            weight=weight,
        )

    best, other = (by_noise_evidence(fit(*start), x, y) for start in ((0.3, 5.0), (4.0, 0.1)))
    scale, precision = best.curvature.likelihood.scale, float(best.precision[0])
    assert scale == pytest.approx(other.curvature.likelihood.scale, rel=1e-6)
    here = float(best.log_marginal_likelihood(x, y))
    for a, b in ((0.999, 1.0), (1.0, 0.999)):
        drops = [
            here - float(fit(scale * one, precision * two).log_marginal_likelihood(x, y))
            for one, two in ((a, b), (1 / a, 1 / b))
        ]
        assert min(drops) > 0
        assert drops[0] == pytest.approx(drops[1], rel=0.02)


def test_only_a_gaussian_has_noise():
    with pytest.raises(TypeError, match="only a Gaussian with one scale has a noise"):
        by_noise_evidence(Laplace.fit(network(), numbers(9, 4), precision=1.0), numbers(9, 4))


def test_a_precision_at_the_edge_of_its_grid():
    """With a warning that says so."""
    x, y = numbers(40, 4), torch.arange(40) % 3
    fitted = Laplace.fit(network(), x, precision=1.0)
    with pytest.warns(UserWarning, match="the precision is at the lower edge of its grid, 1000"):
        by_validation(fitted, x, x, y, grid=(1e3, 1e9))
    with pytest.warns(UserWarning, match=r"at the upper edge of its grid, 1.1"):
        by_validation(fitted, x, x, y, grid=(1.0, 1.1))


def test_where_evidence_says_nothing_of_the_precision():
    """For a prior centred on the weights themselves: it stays, with a warning."""
    x = numbers(40, 4)
    fitted = Laplace.fit(network(), x, precision=2.0)
    with pytest.warns(UserWarning, match=r"no maximum in the prior precision, .* stays at 2\b"):
        assert by_evidence(fitted, x, centre=fitted.loc) is fitted
    nothing, one = torch.zeros(3, dtype=torch.float64), torch.tensor(1.0)
    assert best_precision(nothing, one) is best_precision(nothing + 1, 0 * one) is None


def test_evidence_is_not_that_of_a_grid():
    """It is MacKay's: the weights' square is that of as many weights as the data determine."""
    eigenvalues, square = numbers(20, seed=2).exp(), torch.tensor(3.0, dtype=torch.float64)
    found = best_precision(eigenvalues, square)
    assert found is not None
    assert found * 3 == pytest.approx(float((eigenvalues / (eigenvalues + found)).sum()), rel=1e-12)


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
    with pytest.raises(RuntimeError, match="non-empty"):
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
    best = by_validation(fitted, x, x, labels, link=link, grid=(1e4, 1.0, 100.0, 10.0))
    assert set(asked) == {link}
    again = by_validation(fitted, x, x, labels, link=link, grid=(1.0, 10.0, 100.0, 1e4))
    assert_close(best.precision, again.precision)


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
        assert predictive_nll(by_evidence(fitted, x[train]), x[test], y[test]) > alone
        assert predictive_nll(best, x[test], y[test]) < 1.02 * alone
