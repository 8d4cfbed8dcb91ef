"""Laplace approximations against algebra, conjugate models, laplace-torch and finite
differences.
"""

import importlib
import math
from functools import partial

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesfl as bf
from bayesfl.curvature import Curvature, invert
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.linearised import nll_of_predictive
from bayesfl.posteriors.prior_precision import by_evidence, by_validation, predictive_nll
from bayesfl.posteriors.selection import Evidence, select
from tests.cases import numbers
from tests.curvature import brute
from tests.curvature.brute import PAIRS
from tests.posteriors.made import linear_model, network


def test_a_linear_model_is_its_conjugate_posterior():
    """Covariance, predictive variance and evidence of Bayesian linear regression, exactly."""
    model, x, y, precision = linear_model()
    hessian = x.T @ x / 0.25 + precision * torch.eye(3, dtype=torch.float64)
    fitted = Laplace.fit(model, x, precision=precision, likelihood=Gaussian(scale=0.5))
    mean, variance = fitted.moments()
    assert_close(mean, model.weight.detach()[0])
    assert_close(variance, hessian.inverse().diagonal())
    assert_close(fitted.log_det(), hessian.logdet())
    new = numbers(5, 3, seed=2)
    found = fitted.predict(new)
    assert_close(found["mean"], new @ mean[:, None])
    assert_close(found["variance"][:, 0], (new @ hessian.inverse() * new).sum(1) + 0.25)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(20, dtype=torch.float64),
        x @ x.T / precision + 0.25 * torch.eye(20, dtype=torch.float64),
    )
    assert_close(fitted.log_marginal_likelihood(x, y), marginal.log_prob(y))


def test_a_subnetwork_is_the_conditional():
    """The weights S given the others at their mean: the inverse of the block, not the block of the
    inverse.
    """
    model, x, _, precision = linear_model()
    hessian = x.T @ x / 0.25 + precision * torch.eye(3, dtype=torch.float64)
    chosen = torch.tensor([0, 2])
    fitted = Laplace.fit(
        model,
        x,
        precision=precision,
        structure="subnetwork",
        indices=chosen,
        likelihood=Gaussian(scale=0.5),
    )
    block = hessian[chosen][:, chosen]
    assert_close(
        fitted.moments()[1],
        torch.zeros(3, dtype=torch.float64).index_copy(0, chosen, block.inverse().diagonal()),
    )
    assert_close(fitted.log_det(), block.logdet())
    noise = numbers(40000, fitted.noise_size)
    drawn = fitted.draw(noise)
    assert_close(drawn[:, 1], fitted.loc[1].expand(40000), rtol=0, atol=0)
    assert_close(drawn[:, chosen].T.cov(), block.inverse(), rtol=0.05, atol=2e-3)


@pytest.fixture(scope="module")
def theirs():
    """laplace-torch's Laplace; its import needs torchvision's."""
    from bayesfl.data.recipes.torchvision import torchvision

    torchvision()
    return pytest.importorskip("laplace").Laplace


@pytest.mark.parametrize("form", ["full", "diagonal", "subnetwork"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_posteriors_are_those_of_laplace_torch(theirs, form, task):
    """Variances, log determinant, evidence, functional variance and probit predictions, in float64
    to 1e-8.
    """
    model, x = network(), numbers(12, 4)
    likelihood, y = {
        "classification": (Categorical(), torch.arange(12) % 3),
        "regression": (Gaussian(scale=1.0), numbers(12, 3, seed=5)),
    }[task]
    chosen = torch.tensor([0, 3, 8, 20, 31, 40])
    kwargs = (
        {"subset_of_weights": "subnetwork", "subnetwork_indices": chosen}
        if form == "subnetwork"
        else {"subset_of_weights": "all"}
    )
    structure = "diag" if form == "diagonal" else "full"
    # The default one leaves 1e-7.
    backend = importlib.import_module("laplace.curvature").BackPackGGN
    twin = network()  # BackPACK leaves hooks in what it is given
    other = theirs(
        nn.Sequential(twin.body, twin.head),
        task,
        backend=backend,
        hessian_structure=structure,
        prior_precision=torch.tensor(0.3, dtype=x.dtype),
        **kwargs,
    )
    other.fit(DataLoader(TensorDataset(x, y), batch_size=5))
    fitted = Laplace.fit(
        model,
        x,
        precision=0.3,
        structure=form,
        indices=chosen if form == "subnetwork" else None,
        likelihood=likelihood,
    )
    new = numbers(7, 4, seed=3)
    wanted = tuple(t.detach() for t in other._glm_predictive_distribution(new))
    assert_close(fitted.linearised(new, centre=False), wanted, rtol=1e-8, atol=1e-9)
    assert_close(
        fitted.log_det(), other.log_det_posterior_precision.detach().double(), rtol=1e-8, atol=1e-8
    )
    if form != "subnetwork":
        # There laplace-torch also counts the prior of weights that are not in it.
        assert_close(
            fitted.log_marginal_likelihood(x, y),
            other.log_marginal_likelihood().detach().double(),
            rtol=1e-8,
            atol=1e-8,
        )
    if task == "classification":
        probs = other(new, pred_type="glm", link_approx="probit")
        assert_close(
            fitted.predict(new, link="per_class", centre=False)["probs"],
            probs.detach(),
            rtol=1e-8,
            atol=1e-9,
        )


def test_evidence_around_another_centre():
    """Around the weights themselves it is larger by lambda / 2 |loc|^2 than around 0."""
    model, x, y = network(), numbers(12, 4), torch.arange(12) % 3
    fitted = Laplace.fit(model, x, precision=0.4)
    here, away = (
        fitted.log_marginal_likelihood(x, y, centre=c) for c in (fitted.loc, 0 * fitted.loc)
    )
    assert_close(here - away, 0.2 * fitted.loc.square().sum())
    assert_close(away, fitted.log_marginal_likelihood(x, y))


def test_variances_of_a_diagonal_posterior():
    """1 / (GGN_rr + precision_r), and draws of its root."""
    prior = numbers(51, seed=4).exp()
    diagonal = Laplace.fit(network(), numbers(12, 4), precision=prior, structure="diagonal")
    assert_close(diagonal.moments()[1], 1 / (diagonal.diagonal + prior))
    noise = numbers(3, diagonal.noise_size, seed=5)
    assert_close(diagonal.draw(noise), diagonal.loc + noise * diagonal.moments()[1].sqrt())


@pytest.mark.parametrize("examples", [4, 30])
@pytest.mark.parametrize("structure", ["full", "subnetwork", "diagonal"])
def test_an_example_that_counts_twice_is_one_that_stands_twice(structure, examples, tmp_path):
    """In covariance, evidence and predictions, under another precision and structure and after a
    file; in primal and dual form.
    """
    model, x, new = network(), numbers(examples, 4), numbers(7, 4, seed=3)
    y = counts = torch.arange(examples) % 3  # 0, 1 or 2 times
    twice = torch.arange(examples).repeat_interleave(counts)
    options = {
        "structure": structure,
        "indices": torch.tensor([0, 3, 8, 20, 31, 40]) if structure == "subnetwork" else None,
    }
    got = Laplace.fit(model, [x[:3], x[3:]], precision=0.3, weight=counts, **options)
    want = Laplace.fit(model, x[twice], precision=0.3, **options)
    got.save(tmp_path / "posterior")
    again = Laplace.load(tmp_path / "posterior", model)
    for one, other in (
        (got, want),
        (again, want),
        (again.with_precision(x, 0.8), want.with_precision(x[twice], 0.8)),
    ):
        assert_close(
            (one.moments(), one.log_det(), one.diagonal),
            (other.moments(), other.log_det(), other.diagonal),
        )
        assert_close(one.predict(new), other.predict(new))
        assert_close(
            one.log_marginal_likelihood(x, y), other.log_marginal_likelihood(x[twice], y[twice])
        )


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_independent_weights(case, backend):
    """A diagonal posterior predicts J diag(variance) J', centred or not, whatever the backend."""
    model, x, new = case.model(), case.data(9), case.data(5, seed=3)
    prior = 0.5 + torch.rand(
        Curvature(model).size, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    fitted = Laplace.fit(model, x, precision=prior, structure="diagonal", backend=backend)
    j, near = brute.jacobian(model, new), {"atol": 1e-10, "rtol": 1e-9}
    variance = 1 / (brute.ggn(model, Categorical(), x).diagonal() + prior)
    want, centring = j * variance @ j.mT, torch.eye(4, dtype=torch.float64) - 0.25
    assert_close(fitted.linearised(new, centre=False), (model(new).detach(), want), **near)
    assert_close(
        fitted.linearised(new.split(2)),
        (model(new).detach() @ centring, centring @ want @ centring),
        **near,
    )


@pytest.mark.parametrize("rule", ["wasserstein", "magnitude", "random"])
def test_a_rule_chooses_the_subnetwork(rule):
    """From the weights, their curvature and the prior's variances."""
    model, x = network(), numbers(12, 4)
    fit = partial(Laplace.fit, model, x, precision=0.3)
    whole = fit(structure="diagonal")
    evidence = Evidence(whole.loc, whole.diagonal, 1 / whole.precision, 3)
    chosen = select(rule, evidence, int(0.2 * len(whole.loc)))
    found = fit(structure="subnetwork", share=0.2, selection=rule, seed=3)
    assert torch.equal(found.indices, chosen)
    assert_close(found.moments(), fit(structure="subnetwork", indices=chosen).moments())


def test_the_last_layer():
    """By its pattern, whose name need not be known."""
    model, x = network(), numbers(12, 4)
    last = [name for name, _ in model.named_parameters()][-1].split(".")[0]
    wanted = Laplace.fit(model, x, precision=0.3, pattern=f"{last}.*")
    found = Laplace.fit(model, x, precision=0.3, structure="last_layer")
    assert_close(found.moments(), wanted.moments(), rtol=0, atol=0)
    assert found.structure == "full"


@pytest.mark.parametrize(
    ("structure", "given"),
    [
        ("kfac", {"weight": torch.ones(12)}),
        ("kfac", {"indices": torch.arange(3)}),
        ("full", {"share": 0.2}),
        ("last_layer", {"pattern": "0.*"}),
    ],
)
def test_options_of_other_structures_are_refused(structure, given):
    """As they would say nothing."""
    with pytest.raises(
        ValueError, match=f"{next(iter(given))} has no effect under structure='{structure}'"
    ):
        Laplace.fit(network(), numbers(12, 4), precision=1.0, structure=structure, **given)


@pytest.mark.parametrize("form", ["full", "subnetwork", "diagonal", "kfac"])
def test_a_saved_posterior_predicts_the_same(tmp_path, form):
    """To the bit for these few rows; and it is refused for other weights and other parameters."""
    model, x = network(), numbers(12, 4)
    chosen = torch.tensor([0, 3, 8, 20, 31, 40]) if form == "subnetwork" else None
    fitted = Laplace.fit(model, x, precision=0.3, structure=form, indices=chosen)
    fitted.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", model)
    new, noise = numbers(7, 4, seed=3), numbers(2, fitted.noise_size, seed=4)
    found, wanted = ((one.predict(new), one.moments(), one.draw(noise)) for one in (again, fitted))
    assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    other = bf.models.mlp(4, hidden=6, outputs=3, seed=2).double()
    for changed, pattern in ((other, "*"), (model, "head.*")):
        with pytest.raises(ValueError, match=r"other weights"):
            Laplace.load(tmp_path / "posterior.safetensors", changed, pattern=pattern)


def test_a_saved_posterior_is_of_one_network(tmp_path):
    """Beside the weights that it covers: of one body, one slope, one set of buffers."""

    def made(slope: float = 0.01) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), nn.LeakyReLU(slope), nn.Linear(5, 3)
        )

    def moved(what: str) -> nn.Module:
        model = made()
        model.get_parameter(what).data.add_(0.5) if "weight" in what else model.get_buffer(
            what
        ).add_(0.5)
        return model

    x, file = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), tmp_path / "one"
    fitted = Laplace.fit(made(), x, precision=1.0, pattern="3.*")
    fitted.save(file)
    again = Laplace.load(file, made(), pattern="3.*")
    assert_close(again.predict(x), fitted.predict(x), rtol=0, atol=0)
    for other in (made(0.3), moved("0.weight"), moved("1.running_mean")):
        with pytest.raises(ValueError, match="made for other layers or options, other weights"):
            Laplace.load(file, other, pattern="3.*")


@pytest.mark.parametrize("structure", ["full", "kfac"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_a_saved_posterior_is_the_same_to_rounding(tmp_path, dtype, near, structure):
    """From several batches, with examples that were split off: the rows of the dual form come back
    in one batch.
    """
    case = brute.CASES[0]
    model, x, new = case.model().to(dtype), case.data(27).to(dtype), case.data(7, seed=3).to(dtype)
    fitted = Laplace.fit(model, x.split(5), precision=0.3, structure=structure)
    assert fitted.inverse.form == ("dual" if structure == "full" else "kronecker")
    fitted.save(tmp_path / "posterior.safetensors")
    again = Laplace.load(tmp_path / "posterior.safetensors", model)
    noise = numbers(2, fitted.noise_size)
    for call in (
        lambda f: f.predict(new)["probs"],
        lambda f: f.moments()[1],
        lambda f: f.draw(noise),
        Laplace.log_det,
    ):
        assert_close(call(again), call(fitted), rtol=near, atol=near)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "kron"}, "structure .*'kfac' or 'last_layer', got 'kron'"),
        ({"indices": torch.tensor([0])}, "indices has no effect under structure='full'"),
        ({"precision": 0.0}, r"prior precision .*got 0\.0"),
        ({"precision": -1.0, "structure": "diagonal"}, r"prior precision .*got -1\.0"),
        ({"precision": math.inf}, r"prior precision .*got inf"),
        ({"pattern": "neck.*"}, "matches no parameter"),
        (
            {"structure": "subnetwork", "indices": torch.tensor([0, 0])},
            r"indices .*once, got 2 .*1 of them",
        ),
    ],
)
def test_what_is_refused(options, message):
    """By argument and value."""
    with pytest.raises(ValueError, match=message):
        Laplace.fit(network(), numbers(5, 4), **{"precision": 1.0, **options})


@pytest.mark.parametrize("form", ["full", "kfac"])
def test_the_model_is_left_alone(form):
    """Weights, gradients, modes and hooks."""
    model, x = network(), numbers(12, 4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    Laplace.fit(model, x, precision=1.0, structure=form, pattern="head.*").predict(x)
    assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
@pytest.mark.parametrize(
    "likelihood",
    [Gaussian(0.3), Bernoulli(), Categorical()],
    ids=lambda value: type(value).__name__,
)
def test_a_saved_posterior_keeps_its_likelihood(tmp_path, likelihood, structure):
    """It is what it was without being told, and another one is refused."""
    model, x = network(1 if isinstance(likelihood, Bernoulli) else 3), numbers(12, 4)
    path = tmp_path / "posterior.safetensors"
    fitted = Laplace.fit(model, x, precision=1.0, structure=structure, likelihood=likelihood)
    fitted.save(path)
    for again in (Laplace.load(path, model), Laplace.load(path, model, likelihood=likelihood)):
        assert (again.curvature.likelihood, again.examples) == (likelihood, 12)
        assert_close(again.predict(x), fitted.predict(x), equal_nan=True)
    for other in (Gaussian(0.4), Categorical() if likelihood != Categorical() else Bernoulli()):
        with pytest.raises(
            ValueError, match=rf"posterior.*' .*likelihood .*{type(likelihood).__name__}.*, got"
        ):
            Laplace.load(path, model, likelihood=other)


def test_a_likelihood_of_ones_own_is_given_again(tmp_path):
    class Mine(Gaussian):
        pass

    model, x, path = network(), numbers(12, 4), tmp_path / "posterior.safetensors"
    Laplace.fit(model, x, precision=1.0, likelihood=Mine(0.3)).save(path)
    assert Laplace.load(path, model, likelihood=Mine(0.3)).curvature.likelihood == Mine(0.3)
    with pytest.raises(ValueError, match=r"Mine.*, got None: .*likelihood="):
        Laplace.load(path, model)


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
def test_a_likelihood_fits_the_outputs(structure):
    """One logit is no softmax, and two are no sigmoid."""
    for one, count, other in ((Categorical(), 1, "Bernoulli"), (Bernoulli(), 2, "Categorical")):
        words = rf"{type(one).__name__}\(\) .*model has {count}: .*likelihood={other}\(\)"
        with pytest.raises(ValueError, match=words):
            Laplace.fit(
                network(count), numbers(5, 4), precision=1.0, structure=structure, likelihood=one
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": 1e-320}, r"precision .*\(1e-30, 1e\+30\), got 1e-320 \(51 of 51\)"),
        ({"precision": 1e31}, r"precision .*\(1e-30, 1e\+30\), got 1e\+31"),
        (
            {"weight": torch.tensor([1.0, 1.0, -0.5, 1.0, 1.0])},
            "curvature is not finite|weight has no effect under structure='kfac'",
        ),
        (
            {"weight": torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0])},
            "curvature is not finite|weight has no effect under structure='kfac'",
        ),
        (
            {"weight": torch.ones(4)},
            r"weight .*got 4 for 5 examples|weight has no effect under structure='kfac'",
        ),
        (
            {"weight": torch.ones(6)},
            r"weight .*got 6 for 5 examples|weight has no effect under structure='kfac'",
        ),
    ],
)
@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
def test_what_comes_in_is_checked(structure, arguments, message):
    """By argument, value and remedy."""
    with pytest.raises(ValueError, match=message):
        Laplace.fit(
            network(), numbers(5, 4), structure=structure, **{"precision": 1.0, **arguments}
        )


@pytest.mark.parametrize("structure", ["full", "diagonal", "kfac"])
def test_what_is_asked_of_a_fit_is_checked(structure):
    """Data that it was not fitted to."""
    x, y = numbers(12, 4), torch.arange(12) % 3
    fitted = Laplace.fit(network(), x.split(5), precision=1.0, structure=structure)
    assert fitted.examples == 12
    for call in (
        lambda: fitted.with_precision(x[:7], 2.0),
        lambda: fitted.log_marginal_likelihood(x[:7], y[:7]),
    ):
        with pytest.raises(ValueError, match=r"^x .*12 examples .*got 7"):
            call()
    assert fitted.with_precision(x.split(7), 2.0).with_precision(x, 3.0).examples == 12
    assert fitted.curvature.backend == "layers"


SOME = torch.tensor([1, 4, 17, 30, 50])


@pytest.mark.parametrize("rows", [60, 8])  # in the primal form, in the dual one
@pytest.mark.parametrize(
    "other", [lambda x: [x[:4], x[4:7]], lambda x: DataLoader(TensorDataset(x[:7]), 4)]
)
def test_other_rows_do_not_replace_the_curvature(other, rows):
    """They are counted as they are read; the same rows in other batches give a fresh fit."""
    x, y = numbers(rows, 4), torch.arange(rows) % 3
    some = Laplace.fit(network(), x, precision=1.0, structure="subnetwork", indices=SOME)
    whole = Laplace.fit(network(), x, precision=1.0)
    for call in (
        lambda: some.with_precision(other(x), 2.0),
        lambda: whole.with_precision(other(x), 2.0),
        lambda: by_evidence(whole, other(x)),
        lambda: by_validation(whole, other(x), x, y),
    ):
        with pytest.raises(ValueError, match=rf"^x .*{rows} examples .*got 7; fit .*Laplace\.fit"):
            call()
    again = Laplace.fit(network(), x, precision=2.0)
    assert_close(whole.with_precision(x.split(7), 2.0).moments(), again.moments())
    with pytest.raises(TypeError, match="'full' needs the inputs x"):
        whole.with_precision(None, 2.0)


@pytest.mark.parametrize("rows", [60, 8])
@pytest.mark.parametrize("indices", [None, SOME])
def test_an_inverse_gives_back_its_ggn(rows, indices):
    """That of the Jacobian written out, also where a weight has no curvature."""
    x = numbers(rows, 4)
    x[:, 2] = 0
    curvature = Curvature(network())
    precision = 0.5 + torch.rand(curvature.size, dtype=torch.float64)
    found = invert(curvature, x, precision, indices=indices)
    assert found.form == ("primal" if rows == 60 or indices is not None else "dual")
    assert_close(found.ggn(), curvature.ggn(x, indices), rtol=1e-9, atol=1e-11)


FORMS: dict[str, dict] = {
    "diagonal": {"precision": 1.0, "structure": "diagonal"},
    "dual": {"precision": 1.0},
    "subnetwork": {
        "precision": 1.0,
        "structure": "subnetwork",
        "indices": torch.tensor([1, 4, 30, 60, 80]),
    },
    "last layer": {"pattern": "*head.*", "precision": 0.3},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("names", [False, True], ids=["tuple", "mapping"])
def test_two_inputs_are_the_network_of_one_joined_tensor(name, names, tmp_path):
    """Moments, determinant, evidence, draws, predictions in closed form, and from a file,
    to 1e-12.
    """
    one, two, x, a, b = brute.two_inputs(7)
    near, data = {"rtol": 1e-12, "atol": 1e-12}, {"x": {"b": b, "a": a} if names else (a, b)}
    y, weight = torch.arange(7) % 4, numbers(7, seed=3).square()
    weight[2] = 0
    want, found = (
        Laplace.fit(model, inputs, weight=weight, **FORMS[name])
        for model, inputs in ((one, x), (two, data))
    )
    assert (found.curvature.backend, found.inverse.form) == ("func", want.inverse.form)
    assert found.examples == 7
    found.save(tmp_path / "posterior")
    loaded = Laplace.load(tmp_path / "posterior", two, pattern=FORMS[name].get("pattern", "*"))
    noise = numbers(3, found.noise_size, seed=4)
    for each in (found, loaded):
        assert_close(each.moments(), want.moments(), **near)
        assert_close(each.log_det(), want.log_det(), **near)
        assert_close(each.draw(noise), want.draw(noise), **near)
        assert_close(
            each.log_marginal_likelihood(data, y), want.log_marginal_likelihood(x, y), **near
        )
        assert_close(each.predict(data), want.predict(x), **near)
    assert_close(
        found.with_precision(data, 2.0).moments(), want.with_precision(x, 2.0).moments(), **near
    )
    with pytest.raises(ValueError, match=r"x must be the 7 examples .*, got 6"):
        found.with_precision({"x": (a[:6], b[:6])}, 2.0)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5)])
def test_tokens_against_dense_matrices(likelihood, tmp_path):
    """An embedding, its mean and a layer: (GGN + precision)^-1 and J H^-1 J' written out; tokens in
    the file are whole numbers.
    """
    model, tokens = brute.token_model()
    hessian = brute.ggn(model, likelihood, tokens) + 0.7 * torch.eye(49, dtype=torch.float64)
    new = tokens.flip(0)[:4]
    rows, near = brute.jacobian(model, new), {"rtol": 1e-10, "atol": 1e-12}
    fitted = Laplace.fit(model, tokens, precision=0.7, likelihood=likelihood)
    assert fitted.inverse.form == "dual"
    fitted.save(tmp_path / "posterior")
    for each in (fitted, Laplace.load(tmp_path / "posterior", model)):
        assert each.inverse.data["x"].dtype == torch.int64
        assert_close(each.moments()[1], hessian.inverse().diagonal(), **near)
        mean, covariance = each.linearised(new, centre=False)
        assert_close(mean, model(new).detach(), **near)
        assert_close(covariance, rows @ hessian.inverse() @ rows.mT, **near)


def test_one_byte_for_each_number_stays_so():
    """Truth values and bytes come to the network as they are."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3).double()

        def forward(self, image: Tensor, mask: Tensor) -> Tensor:
            assert (image.dtype, mask.dtype) == (torch.uint8, torch.bool)
            return self.head(image.double() / 255 * mask)

    image, model = torch.arange(40, dtype=torch.uint8).view(8, 5), Masked()
    mask = image % 3 > 0
    found = Laplace.fit(model, {"x": {"image": image, "mask": mask}}, precision=1.0)
    want = Laplace.fit(model.head, image.double() / 255 * mask, precision=1.0)
    assert_close(found.moments(), want.moments(), rtol=1e-12, atol=1e-12)


def test_labels_travel_with_their_rows():
    """Evidence, and both choices of the precision, of a loader that shuffles are those of the
    tensors.
    """
    model, x = brute.mlp(2).double(), numbers(40, 7)
    y, new = (x[:, 0] > 0).long(), numbers(30, 7, seed=1)
    labels = (new[:, 0] > 0).long()

    def loader(inputs: Tensor, classes: Tensor) -> DataLoader:
        return DataLoader(TensorDataset(inputs, classes), batch_size=7, shuffle=True)

    want, found = (
        Laplace.fit(model, x, precision=1.0),
        Laplace.fit(model, loader(x, y), precision=1.0),
    )
    for other in (loader(x, y), list(zip(x.split(9), y.split(9), strict=True)), {"x": x, "y": y}):
        assert_close(found.log_marginal_likelihood(other), want.log_marginal_likelihood(x, y))
    chosen = by_validation(found, loader(x, y), loader(new, labels))
    assert torch.equal(chosen.precision, by_validation(want, x, new, labels).precision)
    chosen = by_evidence(found, loader(x, y))
    assert_close(chosen.precision, by_evidence(want, x).precision)
    assert predictive_nll(found, loader(new, labels)) == pytest.approx(
        predictive_nll(want, new, labels)
    )


@pytest.mark.parametrize(
    ("data", "given", "words"),
    [
        (lambda x: x, False, "no labels: "),
        (lambda x: x.split(3), False, r"no labels: .*\(x, y\)"),
        (lambda x: x.split(3), True, "y is given with .*leave it out"),
        (lambda x: {"x": x, "y": x[:, 0]}, True, "y is given with .*leave it out"),
    ],
)
def test_labels_that_would_be_paired_by_place(data, given, words):
    """None, or twice, or beside batches whose order may change."""
    fitted, x = Laplace.fit(brute.mlp(2).double(), numbers(5, 7), precision=1.0), numbers(5, 7)
    with pytest.raises(ValueError, match=words):
        fitted.log_marginal_likelihood(data(x), torch.zeros(5).long() if given else None)


def test_weights_need_a_fixed_order():
    """A loader may shuffle."""
    loader = DataLoader(TensorDataset(numbers(5, 7)), batch_size=2)
    with pytest.raises(ValueError, match=r"weight is matched .* DataLoader may change"):
        Laplace.fit(brute.mlp(2).double(), loader, precision=1.0, weight=torch.ones(5))


def test_counts_have_a_laplace_approximation():
    """Curvature, predictions and the log density of counts: a golden Hessian, moments of
    log-normal rates, and scipy's negative binomial; no factors of hidden layers.
    """
    model, x = nn.Linear(3, 1, bias=False).double(), numbers(30, 3)
    fitted = Laplace.fit(model, x, precision=0.5, likelihood=Poisson())
    rates = model(x).detach().exp()
    one = torch.eye(3, dtype=torch.float64)
    assert_close(fitted.moments()[1], (x.T @ (rates * x) + 0.5 * one).inverse().diagonal())
    new, noise = numbers(4, 3, seed=2), numbers(200_000, fitted.noise_size, seed=3)
    drawn = Poisson().predictive((fitted.draw(noise) @ new.T)[..., None])
    found = fitted.predict(new)
    assert_close(found["mean"], drawn["mean"], rtol=5e-3, atol=0)
    assert_close(found["epistemic"], drawn["epistemic"], rtol=3e-2, atol=0)
    assert_close(found["variance"][:, 0], found["mean"][:, 0] + found["epistemic"])
    y = torch.tensor([0.0, 1.0, 7.0, 30.0])
    size = found["mean"].square() / found["epistemic"][:, None]
    wanted = stats.nbinom.logpmf(y, size[:, 0], (size / (size + found["mean"]))[:, 0])
    assert_close(nll_of_predictive(found, y, counts=True), -torch.from_numpy(wanted))
    sure = {"mean": found["mean"], "variance": found["mean"]}
    wanted = stats.poisson.logpmf(y, found["mean"][:, 0])
    assert_close(nll_of_predictive(sure, y, counts=True), -torch.from_numpy(wanted))
    near = {"mean": found["mean"], "variance": found["mean"] * (1 + 2e-7)}
    assert_close(
        nll_of_predictive(near, y, counts=True), -torch.from_numpy(wanted), rtol=1e-5, atol=1e-5
    )
    counts = torch.poisson(rates[:, 0], generator=torch.Generator().manual_seed(0))
    best = by_validation(fitted, x, x, counts)
    assert predictive_nll(best, x, counts) <= predictive_nll(fitted, x, counts) + 0.05
    assert fitted.log_marginal_likelihood(x, counts).isfinite()
    assert Laplace.fit(model, x, precision=0.5, structure="kfac", likelihood=Poisson())
    with pytest.raises(ValueError, match=r"no Poisson factors"):
        Laplace.fit(network(), numbers(5, 4), precision=1.0, structure="kfac", likelihood=Poisson())
