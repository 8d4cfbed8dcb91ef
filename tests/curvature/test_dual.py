"""The inverse of H in both forms: against full matrices, conjugate regression, laplace-torch, and
what must not change it.
"""

import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.curvature import Curvature, ggn, invert
from bayesfl.curvature.dual import cholesky, restore
from bayesfl.curvature.ggn import Piece
from bayesfl.likelihoods import Categorical
from tests.curvature import brute
from tests.curvature.brute import CASES, LIKELIHOODS, PAIRS


@pytest.mark.parametrize("precision", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_prior_precision_is_positive(curvature, x, precision, form):
    for value in (precision, torch.full((23,), 1.0).index_fill(0, torch.tensor([4]), precision)):
        with pytest.raises(ValueError, match=rf"prior precision .*got {re.escape(str(precision))}"):
            invert(curvature, x, value, form=form)


@pytest.mark.parametrize("backend", ["layers", "func", "backpack"])
@pytest.mark.parametrize("form", ["auto", "dual"])
@pytest.mark.parametrize("some", [False, True], ids=["all weights", "a subnetwork"])
def test_curvature_that_is_none_in_each_example_and_just_not_in_sum(form, some, backend):
    """Examples that hardly count, as of a copy that explains next to none of them: the prior is
    left, and is kept in a file.
    """
    curvature = Curvature(nn.Sequential(nn.Linear(3, 2)).double(), backend=backend)
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    diagonal = curvature.diagonal(x)
    weight = torch.full((40,), 1.5e-12 * 0.7 / float(diagonal.max()), dtype=torch.float64)
    found = invert(
        curvature, x, 0.7, indices=torch.arange(8) if some else None, form=form, weight=weight
    )
    assert_close(found.marginals(), torch.full((8,), 1 / 0.7, dtype=torch.float64))
    alone = invert(curvature, x, 0.7, form=form, weight=torch.zeros(40, dtype=torch.float64))
    assert_close(alone.marginals(), torch.full((8,), 1 / 0.7, dtype=torch.float64))
    for one in (found, restore(curvature, found.tensors())):
        assert_close(one.predict(x)[1], alone.predict(x)[1], rtol=0, atol=1e-11)


def test_a_failed_cholesky_says_so():
    bad = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match=r"order 2\b.*Cholesky .*1e-6 .* 1 added"):
        cholesky(bad)
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        cholesky(bad * math.inf)
    singular = torch.ones(3, 3, dtype=torch.float64)
    assert_close(cholesky(singular) @ cholesky(singular).T, singular, atol=2e-6, rtol=0)
    assert torch.equal(singular, torch.ones_like(singular))


EXACT = {"atol": 1e-10, "rtol": 1e-9}


FORMS = ("primal", "dual")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def precision_of(size: int) -> Tensor:
    return 0.5 + torch.rand(size, generator=generator(5), dtype=torch.float64)


def chosen(size: int, count: int = 25) -> Tensor:
    return torch.randperm(size, generator=generator(2))[:count]


def check(inverse, h: Tensor, columns: Tensor, x: Tensor, model: nn.Module) -> None:
    """All that an inverse offers, against the matrix H [S, S] and Jacobian columns [N, O, S] at
    `x`.
    """
    covariance = torch.linalg.inv(h)
    mean, between = inverse.predict(x)
    assert_close(mean, model(x).detach(), **EXACT)
    assert_close(between, columns @ covariance @ columns.mT, **EXACT)
    assert_close(inverse.marginals(), covariance.diagonal(), **EXACT)
    assert_close(inverse.log_det(), torch.logdet(h), **EXACT)
    # A draw is linear in the noise.
    linear = inverse.sample(torch.eye(inverse.noise_size, dtype=torch.float64))
    assert_close(linear.T @ linear, covariance, **EXACT)
    noise = torch.randn(3, inverse.noise_size, generator=generator(8), dtype=torch.float64)
    assert_close(inverse.sample(noise), noise @ linear, **EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("some", [True, False], ids=["subnetwork", "all"])
@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_both_forms_are_the_inverse(case, backend, some, form):
    """With a precision of its own for every weight, saved and restored too."""
    model, x, test = case.model(), case.data(9), case.data(5, seed=3)
    curvature = Curvature(model, backend=backend)
    indices = chosen(curvature.size) if some else None
    where = torch.arange(curvature.size) if indices is None else indices
    precision = precision_of(curvature.size)
    h = (brute.ggn(model, Categorical(), x) + precision.diag())[where][:, where]
    inverse = invert(curvature, x, precision, indices=indices, form=form)
    assert inverse.form == form
    assert inverse.curvature.backend == backend
    columns = brute.jacobian(model, test)[:, :, where]
    check(inverse, h, columns, test, model)
    check(restore(Curvature(model, backend=backend), inverse.tensors()), h, columns, test, model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda value: type(value).__name__)
def test_every_likelihood(likelihood, form):
    case = CASES[0]
    model, x, test = case.model(brute.outputs_of(likelihood)), case.data(9), case.data(5, seed=3)
    curvature = Curvature(model, likelihood)
    h = brute.ggn(model, likelihood, x) + 2 * torch.eye(curvature.size, dtype=torch.float64)
    check(invert(curvature, x, 2.0, form=form), h, brute.jacobian(model, test), test, model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["layers", "func"])
def test_streams(backend, form, monkeypatch):
    case = CASES[2]
    model, x, test = case.model(), case.data(7), case.data(5, seed=3)
    curvature, indices = Curvature(model, backend=backend), chosen(80, 30)
    once = invert(curvature, x, 0.3, indices=indices, form=form)
    monkeypatch.setattr(ggn, "BLOCK", 1)
    streamed = invert(curvature, [x[:1], x[1:]], 0.3, indices=indices, form=form)
    assert_close(streamed.predict(list(test.split(2))), once.predict(test), **EXACT)
    assert_close(streamed.marginals(), once.marginals(), **EXACT)


def test_the_smaller_factor_is_taken():
    """The order is the number of curved weights or of rows."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x = torch.randn(5, 4, generator=generator(0), dtype=torch.float64)
    curvature = Curvature(model)
    small, large = invert(curvature, x, 1.0, indices=torch.arange(9)), invert(curvature, x, 1.0)
    assert (small.form, small.order) == ("primal", 9)
    assert (large.form, large.order) == ("dual", 10)  # 5 examples of rank 2, against 27 weights


@pytest.mark.parametrize("form", ["primal", "dual", "auto"])
@pytest.mark.parametrize("backend", ["layers", "func"])
def test_weights_without_curvature(backend, form):
    """A constant zero input and a dead unit: split off, they keep the prior variance and the rest
    is as before.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x = torch.rand(6, 5, generator=generator(0), dtype=torch.float64)
    x[:, 1] = 0
    with torch.no_grad():
        model[0].bias.fill_(2.0)
        model[0].bias[2] = -100.0
    test = torch.rand(4, 5, generator=generator(1), dtype=torch.float64)  # here input 1 is not zero
    precision = precision_of(39)
    full = brute.ggn(model, Categorical(), x)
    zero = full.diagonal() == 0
    indices = torch.arange(24)
    curvature = Curvature(model, backend=backend)
    inverse = invert(curvature, x, precision, indices=indices, form=form)
    h = (full + precision.diag())[:24, :24]
    check(inverse, h, brute.jacobian(model, test)[:, :, :24], test, model)
    assert int(zero[:24].sum()) == 9
    assert torch.equal(inverse.marginals()[zero[:24]], 1 / precision[:24][zero[:24]])
    only = zero[:24].nonzero().squeeze(1)
    nothing = invert(curvature, x, precision, indices=only, form=form)
    assert nothing.order == 0
    check(nothing, precision[only].diag(), brute.jacobian(model, test)[:, :, only], test, model)
    assert float(nothing.predict(test)[1].diagonal(dim1=1, dim2=2).max()) > 0


def test_examples_without_rows_are_split_off():
    """Of the examples only those count in which a selected unit fires."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[0].bias.zero_()
    x = torch.tensor([[1.0], [2.0], [-1.0], [-3.0], [4.0]], dtype=torch.float64)
    # The unit that fires for negative inputs.
    inverse = invert(Curvature(model), x, 1.0, indices=torch.tensor([1]), form="dual")
    assert inverse.order == 2
    want = torch.linalg.inv(brute.ggn(model, Categorical(), x)[1:2, 1:2] + 1)
    assert_close(inverse.marginals(), want[0], **EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_a_constant_added_to_all_logits_changes_nothing_when_centred(form):
    """The head gains the same row for every class: the outputs and Jacobians move along (1, ..., 1)
    alone.
    """
    case = CASES[0]
    model, moved, x, test = case.model(), case.model(), case.data(9), case.data(5, seed=3)
    with torch.no_grad():
        moved.head.weight += torch.linspace(-3, 3, 5)  # type: ignore[union-attr, operator]
        moved.head.bias += 7  # type: ignore[union-attr, operator]
    one, other = (invert(Curvature(m, pattern="body.*"), x, 0.2, form=form) for m in (model, moved))
    assert_close(one.predict(test, centre=True), other.predict(test, centre=True), **EXACT)
    plain, shifted = one.predict(test), other.predict(test)
    assert (plain[1] - shifted[1]).abs().max() > 0.1
    centring = torch.eye(4, dtype=torch.float64) - 0.25
    assert_close(
        one.predict(test, centre=True),
        (plain[0] @ centring, centring @ plain[1] @ centring),
        **EXACT,
    )
    assert_close(one.log_det(), other.log_det(), **EXACT)


def test_the_whole_body_leaves_nothing_out_of_the_dual_form():
    """There zero columns cost nothing; they are counted all the same, and keep their prior
    variance.
    """
    case = CASES[0]
    model, x, test = case.model(), case.data(9), case.data(5, seed=3)
    x[:, 2] = 0
    for backend in case.backends:
        curvature = Curvature(model, backend=backend)
        inverse = invert(curvature, x, 2.0, form="dual")
        full = brute.ggn(model, Categorical(), x)
        assert int((full.diagonal() / 2 < 1e-12).sum()) >= 6
        check(
            inverse,
            full + 2 * torch.eye(len(full), dtype=torch.float64),
            brute.jacobian(model, test),
            test,
            model,
        )
        assert inverse.curved.all()
        assert not invert(curvature, x, 2.0, form="primal").curved.all()


def test_the_forms_agree_at_a_training_prior():
    """At precision 1e-4 the dual form subtracts numbers of the size 1e4; eight digits are left."""
    case = CASES[0]
    model, x, test = case.model(), case.data(9), case.data(5, seed=3)
    curvature = Curvature(model)
    primal, dual = (invert(curvature, x, 1e-4, form=form) for form in FORMS)
    assert_close(dual.predict(test)[1], primal.predict(test)[1], rtol=1e-8, atol=1e-6)
    assert_close(dual.marginals(), primal.marginals(), rtol=1e-8, atol=0)
    assert_close(dual.log_det(), primal.log_det(), rtol=1e-12, atol=0)


def test_a_known_diagonal_saves_a_pass():
    model, x = CASES[0].model(), CASES[0].data(9)
    curvature = Curvature(model)
    inverse = invert(curvature, x, 1.0, diagonal=curvature.diagonal(x))
    assert_close(inverse.marginals(), invert(curvature, x, 1.0).marginals(), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_several_prior_variances_at_once(form):
    """Covariances under a precision and its multiples are those of inverses of their own, whichever
    form they have; so are those of data that were linearised before.
    """
    torch.manual_seed(0)
    model = bf.models.mlp(4, hidden=5, outputs=3).double()
    x, held = torch.randn(6, 4).double(), torch.randn(5, 4).double()
    curvature, scale = Curvature(model), torch.tensor([1.0, 0.1, 1e-6]).double()
    indices = torch.arange(0, curvature.size, 2)
    piece = curvature.held(x, extra=len(indices))
    assert isinstance(piece, Piece)
    assert_close(curvature.diagonal(piece), curvature.diagonal(x))
    found = invert(curvature, piece, 0.2, indices=indices, form=form, scale=scale)
    mean, covariance = found.predict(held, centre=True)
    for one, own in zip(scale.tolist(), covariance, strict=True):
        alone = invert(curvature, x, 0.2 / one, indices=indices, form=form)
        assert_close(alone.predict(held, centre=True), (mean, own), rtol=1e-9, atol=1e-15)


def test_of_several_matrices_one_may_fail():
    """Its factor is NaN, the others are as they are alone; strictly, it is refused."""
    good, bad = 2 * torch.eye(3).double(), -torch.eye(3).double()
    several = torch.stack([good, bad, good * torch.inf])
    found = cholesky(several, strict=False)
    assert_close(found[0], cholesky(good))
    assert bool(found[1:].isnan().all())
    for strictly in (bad, several):
        with pytest.raises(torch.linalg.LinAlgError, match="no Cholesky"):
            cholesky(strictly)
