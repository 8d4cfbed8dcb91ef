"""Kronecker-factored Laplace approximations against laplace-torch, against matrices written out,
and where they are exact.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayesfl as bf
from bayesfl.curvature import factors, ggn, kronecker
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.linearised import predictive
from bayesfl.posteriors.prior_precision import by_validation, predictive_nll
from tests.cases import numbers
from tests.curvature import brute
from tests.curvature.brute import CASES, LIKELIHOODS, PAIRS
from tests.curvature.made import Largest

NEAR = {"rtol": 1e-8, "atol": 1e-9}


EXACT = {"rtol": 1e-10, "atol": 1e-10}


TASKS = {"classification": Categorical(), "regression": Gaussian(0.5)}


def network(outputs: int = 3) -> nn.Module:
    """An MLP with biases in float64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs)
    ).double()


def normed(outputs: int = 3) -> nn.Module:
    """An MLP with every kind of norm, in evaluation mode, in float64."""
    torch.manual_seed(0)
    batch = nn.BatchNorm1d(6)
    model = nn.Sequential(
        nn.Linear(4, 6), batch, nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4), nn.GroupNorm(2, 4)
    )
    model.extend([nn.RMSNorm(4), nn.Linear(4, outputs)])
    for t in (*model.parameters(), batch.running_mean, batch.running_var):
        t.data += 0.3 * torch.rand_like(t)
    return model.double().eval()


def labels(task: str, count: int) -> Tensor:
    """For four outputs."""
    return torch.arange(count) % 4 if task == "classification" else numbers(count, 4, seed=5)


@pytest.fixture(scope="module")
def theirs():
    """laplace-torch's Laplace, fitted in float64 with prior precision 0.7."""
    from bayesfl.data.recipes.torchvision import torchvision

    torchvision()
    laplace = pytest.importorskip("laplace")

    def fit(model: nn.Module, x: Tensor, task: str, **options):
        noise = {"sigma_noise": 0.5} if task == "regression" else {}
        precision = options.pop("precision", torch.tensor(0.7, dtype=torch.float64))
        fitted = laplace.Laplace(model, task, prior_precision=precision, **noise, **options)
        fitted.fit(DataLoader(TensorDataset(x, labels(task, len(x))), batch_size=4))
        return fitted

    return fit


def check(fitted: Laplace, other, task: str, x: Tensor, new: Tensor) -> None:
    """All that laplace-torch offers, of one fit and of the other."""
    wanted = tuple(t.detach() for t in other._glm_predictive_distribution(new))
    assert_close(fitted.linearised(new, centre=False), wanted, **NEAR)
    assert_close(fitted.loc, other.mean.detach(), **NEAR)
    assert_close(fitted.log_det(), other.log_det_posterior_precision.detach(), **NEAR)
    assert_close(
        fitted.log_marginal_likelihood(x, labels(task, len(x))),
        other.log_marginal_likelihood().detach(),
        **NEAR,
    )
    if task == "classification":
        probs = other(new, pred_type="glm", link_approx="probit")
        assert_close(
            fitted.predict(new, link="per_class", centre=False)["probs"], probs.detach(), **NEAR
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_posteriors_are_those_of_laplace_torch(theirs, case, backend, task):
    """Variances, draws, log determinant, evidence, functional covariance and probit predictions,
    whatever the batches.
    """
    x, new = case.data(9), case.data(5, seed=3)
    other = theirs(case.model(), x, task, subset_of_weights="all", hessian_structure="kron")
    fitted = Laplace.fit(
        case.model(), x, precision=0.7, structure="kfac", likelihood=TASKS[task], backend=backend
    )
    check(fitted, other, task, x, new)
    assert_close(fitted.moments()[1], other.posterior_precision.diag(-1), **NEAR)
    noise = numbers(3, fitted.noise_size, seed=4)
    assert_close(
        fitted.draw(noise) - fitted.loc,
        other.posterior_precision.bmm(noise, exponent=-0.5),
        **NEAR,
    )


@pytest.mark.filterwarnings("ignore")
def test_a_precision_of_each_weight_and_bias(theirs):
    """As laplace-torch's `prior_precision` with one entry for each."""
    case = CASES[2]
    x, each = case.data(9), torch.tensor([0.2, 3.0, 0.7, 11.0], dtype=torch.float64)
    other = theirs(
        case.model(),
        x,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        precision=each,
    )
    prior = torch.cat(
        [
            p.new_full((p.numel(),), float(v))
            for p, v in zip(case.model().parameters(), each, strict=True)
        ]
    )
    check(
        Laplace.fit(case.model(), x, precision=prior, structure="kfac"),
        other,
        "classification",
        x,
        case.data(5, seed=3),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("structure", "their_structure"), [("full", "full"), ("diagonal", "diag"), ("kfac", "kron")]
)
@pytest.mark.parametrize(
    ("case", "head"), [(CASES[0], "head"), (CASES[2], "4")], ids=["mlp", "cnn"]
)
def test_the_last_layer_is_a_pattern(theirs, case, head, structure, their_structure, task):
    """`pattern="head.*"` is laplace-torch's last-layer approximation of the same structure."""
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    x, new = case.data(9), case.data(5, seed=3)
    # The former's full GGN is of single precision.
    backend = CurvlinopsGGN if structure == "kfac" else BackPackGGN
    options = {
        "subset_of_weights": "last_layer",
        "last_layer_name": head,
        "hessian_structure": their_structure,
        "backend": backend,
    }
    other = theirs(case.model(), x, task, **options)
    fitted = Laplace.fit(
        case.model(),
        x,
        precision=0.7,
        structure=structure,
        likelihood=TASKS[task],
        pattern=f"{head}.*",
    )
    check(fitted, other, task, x, new)
    precision = other.posterior_precision
    dense = (
        precision.to_matrix()
        if structure == "kfac"
        else precision.diag()
        if structure == "diagonal"
        else precision
    )
    assert_close(fitted.moments()[1], torch.linalg.inv(dense).diagonal(), **NEAR)


def written_out(model: nn.Module, likelihood, x: Tensor, precision: Tensor) -> Tensor:
    """H [D, D] of an MLP by the definition: B from the Jacobian in each layer's outputs, which is
    that in its bias; of a norm's weight and bias the GGN's blocks.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(jacrev(lambda p, x: functional_call(model, p, (x[None],))[0]), in_dims=(None, 0))(
        parameters, x
    )
    curved, blocks, inputs = brute.output_hessian(likelihood, model(x)), [], x
    for name, layer in model.named_children():
        for key, p in layer.named_parameters():
            j = found[f"{name}.{key if p.dim() == 1 else 'bias'}"]
            block = torch.einsum("noh,nop,npg->hg", j, curved, j).contiguous()
            a = (inputs.T @ inputs / len(x)).contiguous()
            blocks.append(block if p.dim() == 1 else torch.kron(block, a))
        inputs = layer(inputs).detach()
    return torch.block_diag(*blocks) + precision.diag()


@pytest.mark.parametrize("likelihood", LIKELIHOODS[:3], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("make", "backend"), [(network, "layers"), (network, "func"), (normed, "func")]
)
def test_it_is_the_matrix_written_out(make, backend, likelihood):
    """Everything that `Laplace` offers, under one precision and under one for each weight
    and bias.
    """
    model, x, new = make(brute.outputs_of(likelihood)), numbers(9, 4), numbers(5, 4, seed=3)
    several = torch.cat(
        [p.new_full((p.numel(),), 0.3 + k) for k, p in enumerate(model.parameters())]
    )
    for prior in (torch.full_like(several, 0.7), several):
        fitted = Laplace.fit(
            model, x, precision=prior, structure="kfac", likelihood=likelihood, backend=backend
        )
        h, j = written_out(model, likelihood, x, prior), brute.jacobian(model, new)
        covariance = torch.linalg.inv(h)
        assert_close(fitted.moments(), (fitted.loc, covariance.diagonal()), **EXACT)
        assert_close(fitted.log_det(), torch.logdet(h), **EXACT)
        assert_close(
            fitted.linearised(new, centre=False),
            (model(new).detach(), j @ covariance @ j.mT),
            **EXACT,
        )
        again = kronecker.restore_factors(fitted.curvature, fitted.inverse.tensors())
        assert_close(again.predict(new), fitted.inverse.predict(new), rtol=0, atol=0)
        # A draw is linear in the noise.
        linear = fitted.draw(torch.eye(fitted.noise_size, dtype=torch.float64)) - fitted.loc
        assert_close(linear.T @ linear, covariance, **EXACT)
        assert_close(linear, linear.T, **EXACT)  # and the root is the symmetric one
        if isinstance(likelihood, Categorical):
            centring = torch.eye(4, dtype=torch.float64) - 0.25
            assert_close(
                fitted.linearised(new)[1], centring @ j @ covariance @ j.mT @ centring, **EXACT
            )


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("make", [network, normed])
def test_the_last_layer_alone_is_the_matrix_written_out(make, likelihood):
    """Fit and predictions need no cotangents, and predictions by every link and by draws are those
    from the covariances written out.
    """
    outputs = brute.outputs_of(likelihood)
    model, x, new = make(outputs), numbers(9, 4), numbers(5, 4, seed=3)
    head, own = str(len(model) - 1), slice(-sum(p.numel() for p in model[-1].parameters()), None)
    every = torch.cat([p.new_full((p.numel(),), 0.3 * p.dim()) for p in model.parameters()])
    h = written_out(model, likelihood, x, every)[own, own]
    j = brute.jacobian(model, new)[:, :, own]
    covariance = torch.linalg.inv(h)
    fitted = Laplace.fit(
        model,
        x,
        precision=every[own],
        structure="kfac",
        likelihood=likelihood,
        pattern=f"{head}.*",
    )
    assert fitted.curvature.last_layer(new) is not None
    mean, wanted = model(new).detach(), j @ covariance @ j.mT
    assert_close(fitted.linearised(new, centre=False), (mean, wanted), **EXACT)
    centred = mean, wanted
    if isinstance(likelihood, Categorical):
        project = torch.eye(outputs, dtype=torch.float64) - 1 / outputs
        centred = mean @ project, project @ wanted @ project
        assert_close(fitted.linearised(new), centred, **EXACT)
    noise = numbers(7, 5, outputs, seed=6)
    for link, centre, drawn in (
        ("contrasts", True, None),
        ("contrasts", True, noise),
        ("per_class", True, None),
        ("per_class", False, None),
        ("per_class", False, noise),
    ):
        assert_close(
            fitted.predict(new, link=link, centre=centre, noise=drawn),
            predictive(likelihood, *(centred if centre else (mean, wanted)), drawn, link=link),
            equal_nan=True,
            rtol=1e-8,
            atol=1e-9,
        )


def test_a_last_layer_of_many_classes_takes_no_matrix_an_example():
    """Neither the fit nor predictions: no array has more numbers than a few of [O, O]."""
    torch.manual_seed(0)
    model, x = bf.models.mlp(8, hidden=6, outputs=200), torch.rand(60, 8)
    with Largest() as largest:
        fitted = Laplace.fit(model, x, precision=1.0, structure="kfac", pattern="head.*")
        fitted.predict(x)
        fitted.predict(x, link="per_class")
        fitted.predict(x, noise=torch.randn(2, 60, 200))
    assert largest.numbers <= 2 * 200**2 < 60 * 200**2 / 20


@pytest.mark.parametrize("likelihood", TASKS.values(), ids=lambda value: type(value).__name__)
def test_one_layer_and_one_example_leave_nothing_out(likelihood):
    """There the GGN is a product: the full Laplace approximation."""
    torch.manual_seed(0)
    model, x, new = nn.Linear(5, 4, bias=False).double(), numbers(1, 5), numbers(6, 5, seed=3)
    y = torch.tensor([2]) if isinstance(likelihood, Categorical) else numbers(1, 4, seed=5)
    kfac, full = (
        Laplace.fit(model, x, precision=0.3, structure=s, likelihood=likelihood)
        for s in ("kfac", "full")
    )
    assert_close(kfac.moments(), full.moments(), **EXACT)
    assert_close(kfac.linearised(new), full.linearised(new), **EXACT)
    assert_close(kfac.log_marginal_likelihood(x, y), full.log_marginal_likelihood(x, y), **EXACT)
    assert_close(kfac.diagonal, full.diagonal, rtol=0, atol=0)


def test_a_single_weight():
    """The product of two numbers."""
    model, x = nn.Linear(1, 1, bias=False).double(), numbers(7, 1)
    kfac, full = (
        Laplace.fit(model, x, precision=1.0, structure=s, likelihood=Gaussian(0.5))
        for s in ("kfac", "full")
    )
    assert_close(kfac.moments(), full.moments(), **EXACT)


@pytest.mark.parametrize("backend", ["layers", "func"])
def test_streams(backend, monkeypatch):
    """Batches of any size and blocks of one example give the same."""
    case = CASES[2]
    x, new = case.data(9), case.data(5, seed=3)
    once = Laplace.fit(case.model(), x, precision=1.0, structure="kfac", backend=backend)
    wanted = once.moments(), once.linearised(new)
    for module in (ggn, kronecker, factors):
        monkeypatch.setattr(module, "BLOCK", 1)
    loader = DataLoader(TensorDataset(x, torch.zeros(9)), batch_size=4)
    streamed = Laplace.fit(case.model(), loader, precision=1.0, structure="kfac", backend=backend)
    assert_close((streamed.moments(), streamed.linearised(list(new.split(2)))), wanted, **EXACT)


def test_another_precision_keeps_the_factors(monkeypatch):
    """And gives what a fit under it gives; so do searches for one."""
    model, x, new = network(), numbers(12, 4), numbers(30, 4, seed=7)
    fitted = Laplace.fit(model, x, precision=1.0, structure="kfac")
    wanted = {p: Laplace.fit(model, x, precision=p, structure="kfac") for p in (0.1, 1.0, 10.0)}
    monkeypatch.setattr(kronecker, "_factors", None)
    for precision, want in wanted.items():
        found = fitted.with_precision(x, precision)
        assert_close(
            (found.moments(), found.log_det()), (want.moments(), want.log_det()), rtol=0, atol=0
        )
        assert_close(found.precision, want.precision)
    y = torch.arange(30) % 3
    best = by_validation(fitted, x, new, y, grid=(0.1, 1.0, 10.0))
    assert_close(
        predictive_nll(best, new, y), min(predictive_nll(want, new, y) for want in wanted.values())
    )
    with pytest.raises(ValueError, match="prior precision must be > 0"):
        fitted.with_precision(x, 0.0)


def test_what_it_says_of_itself():
    """Its form and size; a weight without curvature keeps its prior's variance."""
    x = numbers(9, 4)
    x[:, 1] = 0
    fitted = Laplace.fit(network(), x, precision=0.3, structure="kfac")
    assert (fitted.inverse.form, fitted.inverse.size) == ("kronecker", len(fitted.loc))
    assert_close(fitted.moments()[1][1:24:4], torch.full((6,), 1 / 0.3, dtype=torch.float64))


@pytest.mark.slow
def test_curvlinops_is_imported_for_layers_below_the_last_alone():
    """Neither for the last one, nor for the other structures, nor to load."""
    code = """
import sys, tempfile, torch
from bayesfl.posteriors import Laplace
model, x = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)), torch.rand(4, 3)
Laplace.fit(model, x, precision=1.0).predict(x)
Laplace.fit(model, x, precision=1.0, structure="kfac", pattern="1.*").predict(x)
assert "curvlinops" not in sys.modules
with tempfile.TemporaryDirectory() as folder:
    Laplace.fit(model, x, precision=1.0, structure="kfac").save(folder + "/posterior.safetensors")
    for name in [name for name in sys.modules if name.split(".")[0] == "curvlinops"]:
        del sys.modules[name]
    Laplace.load(folder + "/posterior.safetensors", model).predict(x)
assert "curvlinops" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Reused(nn.Module):
    """One layer used twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


NORM = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))


SLOPES = nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Linear(3, 2))


AROUND = nn.Sequential(
    nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(32, 2)
)


IMAGES = torch.rand(3, 1, 4, 4)


@pytest.mark.parametrize(
    ("model", "x", "options", "message"),
    [
        (
            network(),
            numbers(5, 4),
            {"pattern": "*.weight"},
            r"'kfac' .*\['0.weight'\] of \['0.weight', '0.bias'\].*pattern=",
        ),
        (
            network(),
            numbers(5, 4),
            {"pattern": "4.bias"},
            r"'kfac' .*\['4.bias'\] of \['4.weight', '4.bias'\].*pattern=",
        ),
        (SLOPES, torch.rand(5, 4), {}, r"'kfac' .*not PReLU '1'.*pattern=.*'full'"),
        (AROUND, IMAGES, {}, r"'kfac' .*not Conv2d '0'"),
        (Reused(), torch.rand(5, 4), {"pattern": "inner.*"}, "'inner' is used 2 times"),
        (Reused(), torch.rand(5, 4), {"pattern": "idle.*"}, "'idle' is used 0 times"),
        (Tied(), torch.rand(5, 4), {"pattern": "first.*"}, "'first' is used 2 times"),
        (
            network(),
            numbers(5, 4),
            {"precision": numbers(83).exp()},
            r"'kfac' .*precision .*'0.weight'",
        ),
        (network(), numbers(5, 4), {"precision": -1.0}, r"prior precision .*got -1\.0"),
        (network(), numbers(5, 4), {"indices": torch.tensor([0])}, r"indices .*'kfac'"),
    ],
)
def test_what_is_refused(model, x, options, message):
    """By argument, with the remedy."""
    with pytest.raises(ValueError, match=message):
        Laplace.fit(model, x, structure="kfac", **{"precision": 1.0, **options})


def test_layers_beside_those_covered_may_be_any():
    """The head of a network that has a group norm."""
    fitted = Laplace.fit(NORM, IMAGES, precision=1.0, structure="kfac", pattern="3.*")
    assert fitted.predict(IMAGES)["probs"].isfinite().all()
    # Also of those not covered.
    assert all(p.requires_grad for p in fitted.curvature.module.parameters())


def test_data_are_read_twice():
    """Once for the diagonal, once for the factors."""
    with pytest.raises(ValueError, match="iterator is empty after it was read"):
        Laplace.fit(network(), iter([numbers(5, 4)]), precision=1.0, structure="kfac")


def test_float32_agrees_to_its_precision():
    """Factors, eigenvectors and sums are in float64."""
    x, new = numbers(9, 4), numbers(5, 4, seed=3)
    want = Laplace.fit(network(), x, precision=1.0, structure="kfac").linearised(new)
    got = Laplace.fit(network().float(), x.float(), precision=1.0, structure="kfac").linearised(
        new.float()
    )
    assert got[1].dtype == torch.float64
    assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_bytes_are_said_first():
    """Three arrays for each factor."""
    orders = (6, 5, 5, 7, 3, 6)
    with pytest.raises(
        MemoryError, match=rf"Kronecker factors .* {24 * sum(n**2 for n in orders):,} bytes"
    ):
        Laplace.fit(network(), numbers(5, 4), precision=1.0, structure="kfac", memory=100)


def of_rows(fitted: Laplace, x: Tensor) -> kronecker.Kronecker:
    """The factors of other rows, without their diagonal, which takes long."""
    return kronecker.invert_factors(fitted.curvature, x, fitted.precision)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["layers", "func"])
def test_the_jacobian_is_never_formed(backend):
    """Where [N, O, D] takes more than a gigabyte nothing beyond a block, D or a factor is made,
    curvlinops' arrays included.
    """
    torch.manual_seed(0)
    model, x = bf.models.mlp(784, hidden=1000, outputs=5), torch.rand(100, 784)
    Laplace.fit(nn.Linear(2, 2), torch.rand(1, 2), precision=1.0, structure="kfac")  # imports
    fitted = Laplace.fit(model, x[:5], precision=1.0, structure="kfac", backend=backend)
    assert 8 * len(x) * 5 * len(fitted.loc) > 3e9
    with Largest() as largest:
        whole = replace(fitted, inverse=of_rows(fitted, x))
        whole.predict(x if backend == "layers" else x[:10])
    assert largest.numbers <= 1.1 * factors.BLOCK // 8 < 10 * 5 * len(fitted.loc) / 4


def test_examples_come_in_pieces_of_a_block():
    """Where a convolution's patches of all of them take more."""
    model = nn.Sequential(
        nn.Conv2d(8, 16, 5, padding=2),
        nn.Softsign(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    x = torch.rand(200, 8, 32, 32)
    fitted = Laplace.fit(model, x[:2], precision=1.0, structure="diagonal")
    with Largest() as largest:
        of_rows(fitted, x)
    assert 2 * factors.BLOCK < 4 * len(x) * 32**2 * 8 * 5**2  # in single precision
    assert 8 * largest.numbers <= factors.BLOCK


def test_tokens_are_taken():
    """The head behind tokens has the factors of the same head behind their means."""
    model, tokens = brute.token_model()
    found = Laplace.fit(model, tokens, precision=1.0, structure="kfac", pattern="3.*")
    wanted = Laplace.fit(model[3], model[:3](tokens).detach(), precision=1.0, structure="kfac")
    assert_close(found.moments()[1], wanted.moments()[1], **EXACT)
