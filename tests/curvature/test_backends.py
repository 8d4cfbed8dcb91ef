"""Backends: which is chosen, and a BackPACK whose rules do not see all of a model."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.curvature import Curvature, backends, invert
from bayesfl.curvature.dual import restore
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from tests.curvature import brute
from tests.curvature.brute import CASES
from tests.curvature.made import EXACT
from tests.networks import residual


def test_backpack_agrees_on_its_own_diagonal():
    """DiagGGNExact for classes and regression, sums over rows for the rest."""
    for case in CASES:
        if "backpack" in case.backends:
            for likelihood in (Categorical(), Gaussian(0.3)):
                model, x = case.model(), case.data(6)
                found = Curvature(model, likelihood, backend="backpack").engine.diagonal(
                    x, likelihood
                )
                assert_close(found, brute.ggn(model, likelihood, x).diagonal(), **EXACT)


def test_the_backend_says_its_name():
    assert Curvature(brute.mlp(3)).backend == "layers"
    assert Curvature(brute.Residual(3)).backend == "func"
    assert Curvature(residual(3, outputs=3)).backend == "func"
    assert Curvature(bf.models.lenet((1, 12, 12), outputs=3)).backend == "layers"


def test_batch_norm_that_evaluates():
    """Through torch.func and BackPACK; its running averages are constants."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    model(torch.randn(20, 1, 4, 4, dtype=torch.float64))
    model.eval()
    x = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    want = brute.ggn(model, Categorical(), x).diagonal()
    assert Curvature(model).backend == "func"
    for backend in ("func", "backpack"):
        assert_close(Curvature(model, backend=backend).diagonal(x), want, **EXACT)


class Functional(nn.Module):
    """An activation that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


class Doubled(Functional):
    """A factor before the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.b(self.a(x))


class Scaled(nn.Sequential):
    """A stack whose forward does more."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Again(nn.Module):
    """One layer at two places of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.squash, self.b = nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.squash(self.a(self.squash(self.a(x)))))


class Mean(nn.Module):
    """A residual network whose places are averaged by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 3, 3, padding=1)
        self.relu = nn.ReLU()
        self.b = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        return self.head((x + self.b(x)).mean((2, 3)))


def vectors() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


def images() -> Tensor:
    return torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0))


def convolution(**options) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, **options), nn.ReLU(), nn.Flatten(), nn.Linear(192, 3))


def hooked(before: bool, container: bool) -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 3)))
    at = model[0] if container else model[0][0]  # type: ignore[index]
    if before:
        at.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    else:
        at.register_forward_hook(lambda _, __, out: 2 * out)
    return model


def tied() -> nn.Module:
    one, other = nn.Linear(5, 5), nn.Linear(5, 5)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


SEEN = [
    (
        convolution(padding=1, padding_mode="circular"),
        images(),
        "Conv2d '0' with padding_mode='circular'",
    ),
    (
        convolution(padding=1, padding_mode="reflect"),
        images(),
        "Conv2d '0' with padding_mode='reflect'",
    ),
    (hooked(before=False, container=False), vectors(), "Linear '0.0' with hooks"),
    (hooked(before=True, container=False), vectors(), "Linear '0.0' with hooks"),
    (hooked(before=False, container=True), vectors(), "Sequential '0' with hooks"),
    (tied(), vectors(), "parameters used in two places, ['0.weight', '2.weight']"),
]


PROBED = [
    (Functional(), vectors()),
    (Doubled(), vectors()),
    (Scaled(nn.Linear(5, 3)), vectors()),
    (Again(), vectors()),
    (Mean(), images()),
    (convolution(padding="same"), images()),
]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as `auto` knows."""
    monkeypatch.setattr(backends, "_on_a_gpu", lambda _: True)


@pytest.mark.parametrize(("model", "x", "named"), SEEN, ids=[case[2] for case in SEEN])
def test_what_its_rules_do_not_see_is_refused(on_a_gpu, model, x, named):
    """By BackPACK and by closed forms, before there are data; `auto` takes `func`."""
    with pytest.raises(ValueError, match=rf"'backpack' .*{re.escape(named)}; backend='func'"):
        Curvature(model, backend="backpack")
    with pytest.raises(
        ValueError, match=rf"'layers' .*{re.escape(named.split(' with padding')[0])}"
    ):
        Curvature(model, backend="layers")
    curvature = Curvature(model)
    assert curvature.backend == "func"
    assert_close(curvature.diagonal(x), Curvature(model, backend="func").diagonal(x))


@pytest.mark.parametrize(("model", "x"), PROBED, ids=[type(case[0]).__name__ for case in PROBED])
def test_a_forward_that_it_does_not_know(on_a_gpu, model, x):
    """An error that names the model, what happened and the remedy, by any way the data come; `auto`
    takes `func`.
    """
    message = rf"'backpack' .*{type(model).__name__} \(\w+Error: .+\); backend='func'"
    for call in (
        Curvature.diagonal,
        Curvature.outputs,
        lambda c, x: invert(c, x, 1.0),
        lambda c, x: c.columns(x, torch.arange(2)),
    ):
        with pytest.raises(ValueError, match=message):
            call(Curvature(model, backend="backpack"), x)
    curvature = Curvature(model)
    assert_close(curvature.diagonal(x), Curvature(model, backend="func").diagonal(x))
    assert curvature.backend == "func"


@pytest.mark.parametrize(
    "likelihood", [None, Gaussian(0.5), Bernoulli()], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize("broken", ["diagonal", "_pull"])
def test_other_numbers_than_those_of_torch_func(on_a_gpu, monkeypatch, broken, likelihood):
    """Of its own diagonal or of its rows: refused by name, and `auto` takes `func`, after a restore
    too.
    """
    right = getattr(backends.BackPack, broken)

    def wrong(self, *args):
        found = right(self, *args)
        return None if found is None else 1.1 * found

    outputs = 1 if isinstance(likelihood, Bernoulli) else 3
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, outputs))
    x = vectors()
    curvature = Curvature(model, likelihood)
    assert_close(
        curvature.diagonal(x),
        Curvature(model, likelihood, backend="func").diagonal(x),
        rtol=1e-5,
        atol=1e-6,
    )
    assert curvature.backend == "backpack"
    saved = invert(curvature, x, 1.0, form="dual").tensors()
    if broken == "diagonal" and isinstance(likelihood, Bernoulli):
        return  # it has none of its own
    monkeypatch.setattr(backends.BackPack, broken, wrong)
    asked = Curvature(model, likelihood, backend="backpack")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"Sequential \(.*'0.weight' .*torch\.func.*\).*backend='func'"
        ):
            asked.diagonal(x)
    for use in (lambda c: c.diagonal(x), lambda c: restore(c, saved)):
        curvature = Curvature(model, likelihood)
        use(curvature)
        assert curvature.backend == "func"


def test_two_examples_are_enough(monkeypatch):
    """It is held against torch.func once, on no more."""
    counts, linearise = [], backends.Func.linearise
    monkeypatch.setattr(
        backends.Func,
        "linearise",
        lambda self, x, cotangents: counts.append(len(x)) or linearise(self, x, cotangents),
    )
    curvature = Curvature(Functional(), backend="func")
    curvature.diagonal(vectors())
    assert counts == [6]
    counts.clear()
    curvature = Curvature(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), backend="backpack"
    )
    for x in (vectors(), vectors()[:1]):
        curvature.diagonal(x)
    assert counts == [2]
    Curvature(nn.Linear(5, 3), backend="backpack").diagonal(vectors()[:1])
    assert counts == [2, 1]


def test_an_activation_in_place_or_in_several_places():
    """They are taken apart in a copy."""
    relu, x = nn.ReLU(inplace=True), vectors()
    model = nn.Sequential(nn.Linear(5, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 3))
    want = Curvature(model, backend="func").diagonal(x)
    assert_close(Curvature(model, backend="backpack").diagonal(x), want, rtol=1e-5, atol=1e-6)
    assert relu.inplace


def test_dilated_groups_in_float64():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, dilation=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()
    x = images().double()
    curvature = Curvature(model, backend="backpack")
    assert_close(curvature.diagonal(x), Curvature(model, backend="func").diagonal(x))


def test_outputs_that_are_not_finite():
    """Are no fault of BackPACK's."""
    model = nn.Sequential(nn.Linear(5, 3))
    with torch.no_grad():
        model[0].weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"outputs .*not finite .*2 of 2"):
        Curvature(model, backend="backpack").diagonal(vectors())


@pytest.mark.parametrize("name", ["layers", "backpack"])
def test_several_inputs_are_for_func(name):
    """A backend for one tensor refuses others by name, and `auto` does not take it for them; what
    it takes as one tensor stays its.
    """
    model, x = nn.Sequential(nn.Linear(5, 3)), vectors()
    with pytest.raises(
        ValueError, match=rf"'{name}' .*inputs of several tensors, a tuple of 1; backend='func'"
    ):
        Curvature(model, backend=name).diagonal({"x": (x,)})
    curvature = Curvature(model)
    want = curvature.diagonal({"x": x})
    assert curvature.backend == "layers"
    assert_close(curvature.diagonal({"x": (x,)}), want, rtol=1e-5, atol=1e-6)
    assert curvature.backend == "func"
