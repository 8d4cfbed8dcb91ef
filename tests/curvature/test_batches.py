"""Data in batches: any size and kind of them, what is refused, and bytes that are said first."""

from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bayesfl.base.layout import Layout
from bayesfl.curvature import Curvature, factors, ggn, invert, jacobians
from bayesfl.likelihoods import Categorical
from tests.curvature import brute
from tests.curvature.brute import PAIRS
from tests.curvature.made import EXACT, gram


def test_the_bytes_are_said_first(x):
    """Before anything is allocated, for each result."""
    model = brute.mlp(4).double()
    x = torch.randn(9, 7, dtype=torch.float64)
    size = Curvature(model).size
    tight = Curvature(model, memory=100)
    huge = Curvature(nn.Sequential(nn.Linear(4000, 1000, bias=False), nn.Linear(1000, 2)))
    for call, words in (
        (lambda: tight.ggn(x), rf"GGN .*{size} weights .* {8 * size**2:,} bytes .*100 may"),
        (lambda: tight.columns(x, torch.arange(3)), r"J_S .*3 columns .*864 bytes"),
        (lambda: invert(tight, x, 1.0), rf"dual form.* 27\b.* {24 * 27**2:,} bytes"),
        (
            lambda: invert(tight, x, 1.0, indices=torch.arange(20, 29)),
            r"primal form.* 9\b.* 1,944 bytes",
        ),
        (
            lambda: huge.ggn(torch.zeros(1, 4000)),
            r"GGN .*4002002 weights .* 128,128,160,064,032 bytes",
        ),
    ):
        with pytest.raises(MemoryError, match=words):
            call()


def test_data(curvature, x):
    for call in (
        curvature.diagonal,
        curvature.ggn,
        lambda x: invert(curvature, x, 1.0),
        lambda x: curvature.columns(x, torch.tensor([1])),
    ):
        with pytest.raises(ValueError, match="there are no data"):
            call(x[:0])
    several, linear = x[:, None].expand(-1, 4, -1), nn.Linear(4, 3).double()
    for call, words in (
        (lambda: invert(curvature, iter([x]), 1.0), "iterator is empty after it was read"),
        (lambda: Curvature(linear).diagonal(several), r"outputs \[N, O\], .*\(6, 4, 3\)"),
        (lambda: invert(curvature, x, 1.0, form="both"), r"form must be .*got 'both'"),
        (lambda: Curvature(linear, pattern="body.*"), "matches no parameter"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert Curvature(nn.Linear(2, 2), pattern=Layout(nn.Linear(2, 2), "bias")).size == 2


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_streams(case, backend, monkeypatch):
    """Batches of any size, in tensors, tuples or mappings, from a DataLoader, and blocks of one
    example give the same sums.
    """
    model, x = case.model(), case.data(9)
    curvature = Curvature(model, backend=backend)
    diagonal, columns, block = (
        f(x)
        for f in (
            curvature.diagonal,
            lambda x: curvature.columns(x, torch.arange(5)),
            curvature.ggn,
        )
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, torch.zeros(9)), batch_size=4
    )
    for batches in ([x[:2], x[2:3], x[3:]], ({"x": b} for b in x.split(5)), loader):
        assert_close(curvature.diagonal(batches), diagonal, **EXACT)
    for module in (factors, jacobians, ggn):
        monkeypatch.setattr(module, "BLOCK", 1)
    assert_close(curvature.diagonal(x), diagonal, **EXACT)
    assert_close(curvature.columns(x, torch.arange(5)), columns, **EXACT)
    assert_close(curvature.ggn(loader), block, **EXACT)
    rows = brute.jacobian(model, x).flatten(0, 1)
    assert_close(gram(curvature, x, weight=diagonal), rows * diagonal @ rows.T, **EXACT)


class Pairs(torch.utils.data.Dataset):
    """Examples of two inputs and a label, as data sets for two inputs give them."""

    def __init__(self, a: Tensor, b: Tensor, *, names: bool) -> None:
        self.a, self.b, self.names = a, b, names

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, i: int):
        return ({"a": self.a[i], "b": self.b[i]} if self.names else (self.a[i], self.b[i])), 0


def test_several_inputs():
    """A tuple or a mapping, whole or in batches of every form: the sums are those of the network
    that takes them as one tensor.
    """
    one, two, x, a, b = brute.two_inputs(9)
    curvature, want = Curvature(two), Curvature(one).diagonal(x)
    pairs = [(a[i], b[i]) for i in (slice(4), slice(4, 9))]
    named = [{"a": a[i], "b": b[i]} for i in (slice(4), slice(4, 9))]
    loaders = [
        torch.utils.data.DataLoader(Pairs(a, b, names=names), batch_size=2)
        for names in (False, True)
    ]
    whole = [
        {"x": (a, b)},
        {"x": [a, b]},
        {"y": None, "x": {"a": a, "b": b}},
        {"x": MappingProxyType({"b": b, "a": a})},
    ]
    parts = [[(inputs, 0) for inputs in of] for of in (pairs, named)] + [
        [{"x": inputs} for inputs in of] for of in (pairs, named)
    ]
    for data in (*whole, *parts, *loaders, tuple(parts[0])):
        assert_close(curvature.diagonal(data), want, **EXACT)
    assert (curvature.backend, Curvature(one).backend) == ("func", "layers")
    assert_close(curvature.outputs({"x": (a, b)}), one(x).detach(), **EXACT)


def test_tokens_stay_whole_numbers():
    """In every result, against dense Jacobians, also in blocks of one example."""
    model, tokens = brute.token_model()
    curvature, rows = Curvature(model), brute.jacobian(model, tokens)
    ggn_ = brute.ggn(model, Categorical(), tokens)
    assert_close(curvature.diagonal(tokens), ggn_.diagonal(), **EXACT)
    assert_close(curvature.ggn({"x": tokens}), ggn_, **EXACT)
    assert_close(curvature.columns(tokens, torch.arange(40)), rows[:, :, :40], **EXACT)
    assert_close(
        gram(curvature, tokens, tokens[:2]), rows.flatten(0, 1) @ rows[:2].flatten(0, 1).T, **EXACT
    )
    assert tokens.dtype == torch.int64


def test_pieces_of_several_inputs(monkeypatch):
    """Blocks of one example give the same sums."""
    _, two, _, a, b = brute.two_inputs()
    curvature, data = Curvature(two), {"x": {"a": a, "b": b}}
    calls = (
        curvature.diagonal,
        curvature.ggn,
        lambda x: invert(curvature, x, 1.0).marginals(),
    )
    found = [call(data) for call in calls]
    for module in (factors, jacobians, ggn):
        monkeypatch.setattr(module, "BLOCK", 1)
    assert_close([call(data) for call in calls], found, **EXACT)


def test_several_inputs_without_rows_are_refused():
    _, two, _, a, b = brute.two_inputs()
    with pytest.raises(ValueError, match="there are no data"):
        Curvature(two).diagonal({"x": (a[:0], b[:0])})
