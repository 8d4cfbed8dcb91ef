"""Laplace approximations by sums over clients against those of the pooled rows: laplace-torch's,
the library's own, and the algebra of linear models.
"""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from bayesfl.base.surveys import conduct, together, uplink_bytes
from bayesfl.data import ClientData
from bayesfl.federation.clients.asking import LocalRows
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from bayesfl.posteriors import Laplace, pooled
from bayesfl.posteriors.pooled import PooledCurvature, PooledPosterior
from bayesfl.posteriors.prior_precision import by_evidence, by_validation
from tests.cases import Turned, numbers

COUNTS = (17, 3, 0, 20)  # one client has no rows
STRUCTURES = ("last_layer", "diagonal", "kfac", "full")
TASKS = {"classification": Categorical(), "regression": Gaussian(0.5)}


def network(outputs: int = 3) -> nn.Module:
    """An MLP with biases in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def rows(task: str) -> tuple[Tensor, Tensor]:
    """Forty rows for three outputs."""
    return numbers(40, 4), torch.arange(40) % 3 if task != "regression" else numbers(40, 3, seed=5)


def summed(question: PooledCurvature, x: Tensor, y: Tensor, counts: Any = COUNTS) -> Any:
    """The posterior of the rows, in order, of clients with these counts."""
    split = ClientData(x, y, torch.arange(len(y)), np.array(counts))
    local = LocalRows(split, np.arange(split.clients))
    return question.posterior(conduct(question, together(question, local), None))


@pytest.fixture(scope="module")
def laplace() -> Any:
    """laplace-torch, whose import needs torchvision's."""
    from bayesfl.data.recipes.torchvision import torchvision

    torchvision()
    return pytest.importorskip("laplace")


def theirs(laplace: Any, structure: str, task: str, precision: float = 0.7) -> Any:
    """laplace-torch's fit to the pooled rows."""
    curvature = import_module("laplace.curvature")
    subset = "last_layer" if structure == "last_layer" else "all"
    own = {"diagonal": "diag", "kfac": "kron"}.get(structure, "full")
    backend = curvature.CurvlinopsGGN if structure == "kfac" else curvature.BackPackGGN
    fitted = laplace.Laplace(
        network(),
        task,
        subset_of_weights=subset,
        hessian_structure=own,
        backend=backend,
        prior_precision=torch.tensor(precision, dtype=torch.float64),
        **({"sigma_noise": 0.5} if task == "regression" else {}),
    )
    fitted.fit(DataLoader(TensorDataset(*rows(task)), batch_size=40))
    return fitted


@pytest.mark.filterwarnings("ignore::UserWarning")  # of BackPACK's hooks
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", TASKS)
def test_it_is_laplace_torchs_of_the_pooled_rows(laplace: Any, structure: Any, task: str):
    """Mean, variance, determinant and evidence, functional variance and probit predictions; at the
    precision of largest evidence theirs has no slope.
    """
    other = theirs(laplace, structure, task)
    question = PooledCurvature(network(), structure, 0.7, likelihood=TASKS[task])
    found, new = summed(question, *rows(task)), numbers(7, 4, seed=3)
    near = {"rtol": 1e-8, "atol": 1e-9}
    assert_close(found.loc, other.mean.detach().double(), **near)
    whole = {
        "kfac": lambda: other.posterior_precision.to_matrix(),
        "diagonal": lambda: other.posterior_precision.diag(),
    }.get(structure, lambda: other.posterior_precision)()
    variance = whole.inverse().diagonal()
    assert_close(found.moments()[1], variance.detach(), **near)
    assert_close(found.log_det(), other.log_det_posterior_precision.detach().double(), **near)
    evidence = other.log_marginal_likelihood().detach().double()
    assert_close(found.log_marginal_likelihood(), evidence, **near)
    wanted = tuple(t.detach() for t in other._glm_predictive_distribution(new))
    assert_close(found.linearised(new, centre=False), wanted, **near)
    if task == "classification":
        probs = other(new, pred_type="glm", link_approx="probit").detach()
        assert_close(found.predict(new, link="per_class", centre=False)["probs"], probs, **near)
    best = summed(PooledCurvature(network(), structure, likelihood=TASKS[task]), *rows(task))
    at = best.precision[:1].clone().requires_grad_()
    slope = torch.autograd.grad(other.log_marginal_likelihood(prior_precision=at), at)[0]
    assert abs(float(slope * at)) < 1e-8
    assert 0.01 < float(at) < 100


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", [*TASKS, "two classes"])
def test_it_is_that_of_the_pooled_rows(structure: Any, task: str):
    """To 1e-10, whichever clients have them; with the evidence that labels would give."""
    outputs, likelihood = (1, Bernoulli()) if task == "two classes" else (3, TASKS[task])
    x, y = rows(task)
    y = y % 2 if task == "two classes" else y
    model, new = network(outputs), numbers(7, 4, seed=3)
    found = summed(PooledCurvature(model, structure, 0.7, likelihood=likelihood), x, y)
    want = Laplace.fit(
        model,
        x,
        precision=0.7,
        structure=structure.replace("last_layer", "full"),
        likelihood=likelihood,
        pattern="2.*" if structure == "last_layer" else "*",
    )
    near = {"rtol": 1e-10, "atol": 1e-11}
    assert isinstance(found, PooledPosterior)
    assert found.examples == 40
    assert_close(found.moments(), want.moments(), **near)
    assert_close(found.predict(new), want.predict(new), **near)
    evidence = want.log_marginal_likelihood(x, y)
    for one in (found.log_marginal_likelihood(), found.log_marginal_likelihood(x, y)):
        assert_close(one, evidence, **near)
    away = want.log_marginal_likelihood(x, y, centre=0.3)
    assert_close(found.log_marginal_likelihood(centre=0.3), away, **near)
    again = summed(PooledCurvature(model, structure, 0.7, likelihood=likelihood), x, y, (1,) * 40)
    assert_close(again.moments(), found.moments(), **near)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_another_precision_needs_no_rows(structure: Any):
    """Neither from a smaller nor from a larger one: posterior and evidence are those that clients
    would be asked for; rows of one client alone are refused.
    """
    x, y = rows("classification")
    near = {"rtol": 1e-9, "atol": 1e-11}
    want = summed(PooledCurvature(network(), structure, 0.7), x, y)
    for first in (1e-3, 50.0):
        made = summed(PooledCurvature(network(), structure, first), x, y)
        for found in (made.with_precision(None, 0.7), made.with_precision(x.split(9), 0.7)):
            assert isinstance(found, PooledPosterior)
            assert_close(found.moments(), want.moments(), **near)
            assert_close(found.log_marginal_likelihood(), want.log_marginal_likelihood(), **near)
    best = summed(PooledCurvature(network(), structure), x, y)
    assert_close(by_evidence(want, None).precision, best.precision, **near)
    held = by_validation(want, None, x, y, grid=(0.1, 100.0))
    assert_close(held.moments(), want.with_precision(None, held.precision).moments(), **near)
    if structure in ("last_layer", "full"):
        with pytest.raises(ValueError, match="40 examples of the fit, got 17"):
            want.with_precision([x[:17]], 1.0)


def test_a_linear_model_has_the_errors_of_least_squares():
    """Under a flat prior the standard deviations are OLS's at its own sigma: their ratio is 1."""
    x = torch.cat([numbers(200, 3), torch.ones(200, 1, dtype=torch.float64)], 1)
    x[:, 1] += 0.8 * x[:, 0]
    y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64) + 0.7 * numbers(200, seed=1)
    coefficients = torch.linalg.lstsq(x, y).solution
    sigma = float(((y - x @ coefficients).square().sum() / (200 - 4)).sqrt())
    errors = sigma * (x.T @ x).inverse().diagonal().sqrt()
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(coefficients[None, :3])
        model.bias.copy_(coefficients[3:])
    for structure in ("full", "last_layer"):
        question = PooledCurvature(model, structure, 1e-10, likelihood=Gaussian(sigma))
        found = summed(question, x[:, :3], y, (150, 20, 30))
        assert_close(found.moments()[1].sqrt() / errors, torch.ones_like(errors), rtol=1e-8, atol=0)


def test_what_is_made_of_sums():
    """A symmetric matrix of its triangle, and the diagonal that factors have, as their product
    has it.
    """
    matrix = numbers(5, 5) + numbers(5, 5).T
    assert torch.equal(pooled._whole(pooled._lower(matrix), 5), matrix)
    found = summed(PooledCurvature(network(), "kfac", 0.7), *rows("classification"))
    for basis in found.inverse.bases:
        curved = found.inverse.eigenvalues[basis.slots]
        diagonal = basis.left.square() @ curved @ basis.right.square().T
        assert_close(found.diagonal[basis.slots], diagonal, rtol=1e-10, atol=1e-11)


def test_what_a_client_sends():
    """Bytes of 100 inputs and 10 classes with a bias; of whole networks every layer's factors."""
    head = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 10))

    def sent(structure: Any, **options: Any) -> int:
        return uplink_bytes(PooledCurvature(head, structure, **options).shapes({}))

    assert sent("last_layer") == sent("full", pattern="2.*") == 8 * (2 + 1010 * 1011 // 2)
    assert sent("kfac", pattern="2.*") == 8 * (2 + 100 * 101 // 2 + 10 * 11 // 2) == 40_856
    assert sent("kfac") == 40_856 + 8 * (20 * 21 // 2 + 100 * 101 // 2)
    assert sent("diagonal") == 8 * (2 + 2100 + 1010)
    normed = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    x, y = rows("classification")
    found = summed(PooledCurvature(normed, "kfac", 0.7), x, y)
    want = Laplace.fit(normed, x, precision=0.7, structure="kfac")
    assert_close(found.moments(), want.moments(), rtol=1e-10, atol=1e-11)
    question = PooledCurvature(head, "full")
    question.curvature._memory = 1000
    with pytest.raises(MemoryError, match=r"a GGN of 3110 weights .*'kfac' or 'diagonal'"):
        question.shapes({})


def test_the_last_layer_makes_the_outputs():
    """Another one that is declared last is refused, by its name or when rows pass through."""
    with pytest.raises(ValueError, match=r"'1', is a LayerNorm .* pattern='head\.\*'"):
        PooledCurvature(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))).shapes({})
    x, y = rows("classification")
    with pytest.raises(ValueError, match=r"\('body.weight', 'body.bias'\), does not make"):
        summed(PooledCurvature(Turned(4, 6, 3).double()), x, y)
    given = summed(PooledCurvature(Turned(4, 6, 3).double(), "full", 1.0, "head.*"), x, y)
    assert given.examples == 40


def test_without_a_best_precision():
    """Weights of 0 are the prior's centre: a number is asked for."""
    model = nn.Linear(4, 3).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    with pytest.raises(ValueError, match=r"no maximum .* as precision=1\.0"):
        summed(PooledCurvature(model), *rows("classification"))


def test_of_rows_that_are_not_here(tmp_path: Any):
    """It is stored as other posteriors are, without the likelihood of rows."""
    x, y = rows("classification")
    found = summed(PooledCurvature(network(), "kfac"), x, y)
    found.save(tmp_path / "posterior")
    again = PooledPosterior.load(tmp_path / "posterior", network())
    assert_close(again.moments(), found.moments(), rtol=0, atol=0)
    assert_close(again.log_marginal_likelihood(x, y), found.log_marginal_likelihood())
    with pytest.raises(ValueError, match="of the fit, got 0"):
        again.log_marginal_likelihood()
