"""Curvature against its definition, whatever the backend."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl.curvature import Curvature, invert
from tests.curvature import brute
from tests.curvature.brute import CASES, LIKELIHOODS, PAIRS
from tests.curvature.made import EXACT, chosen


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (range(0), r"indices .*one integer or more, got torch\.int64 .*\(0,\)"),
        ([0, 23], r"indices .*0 to 22.* from 0 to 23"),
        ([-1, 3], r"indices .*0 to 22.* from -1 to 3"),
        ([3, 4, 3], r"indices .*once, got 3 .*2 of them different"),
        ([[1, 2]], r"indices .*integer.* got torch\.int64 .*\(1, 2\)"),
        ([0.5], r"indices .*integer.* got torch\.float"),
        ([True, False], r"indices .*integer.* got torch\.bool"),
    ],
)
def test_indices(curvature, x, indices, message):
    indices = torch.tensor(list(indices), dtype=torch.long if isinstance(indices, range) else None)
    for call in (
        curvature.columns,
        curvature.ggn,
        lambda x, i: invert(curvature, x, 1.0, indices=i),
    ):
        with pytest.raises(ValueError, match=message):
            call(x, indices)


def test_curvature_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"outputs .*not finite .*5 of 5"):
        Curvature(model).diagonal(torch.ones(5, 3))
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 2))
    # Its square is beyond float32, the outputs are not.
    x = torch.full((4, 3), 1e30) * torch.tensor([1.0, 0.0, 0.0])
    for backend in ("layers", "func"):
        with torch.no_grad():
            model[0].weight.zero_()
        curvature = Curvature(model, backend=backend)
        if backend == "layers":
            with pytest.raises(ValueError, match=r"curvature .*'0.weight' \(2 of 6\)"):
                curvature.diagonal(x)
        for value in (math.nan, math.inf):
            with pytest.raises(ValueError, match=r"curvature .*'2.bias' \(1 of 2\)"):
                invert(
                    curvature,
                    x[:, [1, 1, 1]],
                    1.0,
                    diagonal=torch.ones(curvature.size).index_fill(0, torch.tensor([11]), value),
                )


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, track_running_stats=False).eval(),
        nn.Dropout(0.1),
    ],
    ids=str,
)
def test_training_modes_are_refused(layer):
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} '1' .*model\.eval\(\)"):
        Curvature(nn.Sequential(nn.Linear(2, 2), layer))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_diagonal_and_subnetwork(case, backend, likelihood):
    model, x = case.model(brute.outputs_of(likelihood)), case.data(9)
    curvature, full = Curvature(model, likelihood, backend=backend), brute.ggn(model, likelihood, x)
    assert curvature.backend == backend
    assert_close(curvature.outputs(x), model(x).detach(), **EXACT)
    indices = chosen(curvature.size)
    assert_close(curvature.diagonal(x), full.diagonal(), **EXACT)
    assert_close(curvature.ggn(x, indices), full[indices][:, indices], **EXACT)
    assert_close(curvature.ggn(x), full, **EXACT)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_examples_may_count_by_a_factor(case, backend):
    """The diagonal is the sum of weight times each example's own, batch by batch."""
    curvature, x = Curvature(case.model(), backend=backend), case.data(5)
    weight = torch.tensor([0.3, 0.0, 2.5, 1.0, 0.01], dtype=torch.float64)
    each = torch.stack([curvature.diagonal(row[None]) for row in x])
    assert_close(curvature.diagonal([x[:2], x[2:]], weight=weight), weight @ each, **EXACT)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.tensor([1.0, 0.5, -2.0, 1.0, 1.0]), "curvature is not finite"),
        (torch.tensor([1.0, torch.nan, 2.0, 1.0, 1.0]), "curvature is not finite"),
        (torch.ones(4), r"weight .*got 4 for 5"),
        (torch.ones(6), r"weight .*got 6 for 5"),
    ],
)
def test_factors_that_are_none(weight, message):
    case = CASES[0]
    with pytest.raises(ValueError, match=message):
        Curvature(case.model()).diagonal(case.data(5), weight=weight)


def test_float32_agrees_to_its_precision():
    case = CASES[0]
    model, x = case.model(), case.data(9)
    single = Curvature(copy.deepcopy(model).float())
    got = single.diagonal(x.float())
    assert got.dtype == torch.float64
    assert_close(got, Curvature(model).diagonal(x), rtol=1e-4, atol=1e-6)
    assert single.columns(x.float(), torch.arange(3)).dtype == torch.float32


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_the_model_is_left_alone(case, backend):
    """Weights, gradients, modes, hooks and flags are what they were; later training doesn't reach
    the curvature.
    """
    model, x = case.model(), case.data(6)
    frozen, second, *_ = model.parameters()
    frozen.requires_grad_(False)
    second.grad = torch.ones_like(second)
    before = copy.deepcopy(model)
    curvature = Curvature(model, backend=backend)
    first = curvature.diagonal(x)
    invert(curvature, x, 1.0).predict(x)
    for (name, new), (_, old) in zip(model.named_modules(), before.named_modules(), strict=True):
        assert (new.training, set(vars(new))) == (old.training, set(vars(old))), name
        assert not new._forward_hooks | new._backward_hooks
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(new, old)
        assert new.requires_grad == old.requires_grad
        assert (new.grad is None and old.grad is None) or torch.equal(
            new.grad, torch.ones_like(new)
        )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert_close(curvature.diagonal(x), first, rtol=0, atol=0)


class Around(nn.Module):
    """A head whose outputs are the network's in one way only, `plain`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.body, self.head = way, nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).tanh()
        if self.way == "before":
            h = h @ self.head.weight
        if self.way == "twice":
            h = self.head(h)
        out = self.head(input=h)
        if self.way == "beside":
            return out + self.head.bias
        return out.exp_() if self.way == "after" else out


@pytest.mark.parametrize("likelihood", LIKELIHOODS[:2], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("way", ["plain", "before", "twice", "beside", "after"])
def test_a_last_layer_is_known_by_what_the_network_computes(way, likelihood):
    """And the diagonal is right whether it is one or not, examples weighted or not."""
    torch.manual_seed(0)
    model, x = Around(way).double(), torch.randn(6, 4).double()
    weight = torch.rand(6).double()
    curvature = Curvature(model, likelihood, pattern="head.*")
    assert (curvature.last_layer(x) is not None) == (way == "plain")
    for each, factor in ((None, torch.ones(6).double()), (weight, weight)):
        j = factor.sqrt()[:, None, None] * brute.jacobian(model, x)[:, :, 15:]
        want = torch.einsum("nod,nop,npd->d", j, brute.output_hessian(likelihood, model(x)), j)
        assert_close(curvature.diagonal(x, weight=each), want, **EXACT)
