"""Trees of inputs: calls, names, rows."""

from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

from bayesfl.base.inputs import (
    Inputs,
    at,
    call,
    count,
    each,
    first,
    in_precision,
    in_rows,
    join,
    named,
    pieces,
    row_bytes,
    shape_of,
    structure,
    unnamed,
)
from bayesfl.models.weights import call_at

A, B = torch.arange(12.0).reshape(4, 3), torch.arange(4)


class Two(nn.Module):
    """A layer of the first input times the second."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, scale=None):
        return self.layer(x).squeeze(1) * (1 if scale is None else scale)


@pytest.mark.parametrize("x", [(A, B), {"scale": B, "x": A}, UserDict(scale=B, x=A)])
def test_a_tuple_goes_by_place_and_a_mapping_by_name(x):
    module = Two()
    assert call(module, x).equal(module(A, B))
    assert call(module, A).equal(module(A))
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
    assert call_at(module, doubled, x).allclose(2 * module(A, B))


def test_trees_are_walked():
    tree = {"b": B, "a": (A, UserDict(c=A))}
    assert [name for name, _ in named(tree)] == ["x['b']", "x['a'][0]", "x['a'][1]['c']"]
    assert first(tree) is B
    assert (count(tree), row_bytes(tree)) == (4, 8 + 12 + 12)
    assert shape_of(tree) == {"b": (), "a": ((3,), {"c": (3,)})}
    assert each(len, tree) == {"b": 4, "a": (4, {"c": 4})}
    again = join([*pieces(tree, 70)])
    assert [count(piece) for piece in pieces(tree, 70)] == [2, 2]
    assert all(a.equal(b) for (_, a), (_, b) in zip(named(again), named(tree), strict=True))
    assert first(again) is not B
    assert first(join([(B,)])).data_ptr() != B.data_ptr()


def test_only_floats_change_their_precision():
    kinds = {
        "f": A.half(),
        "i": B.int(),
        "m": B > 1,
        "u": B.to(torch.uint8),
        "w": B.to(torch.uint16),
    }
    read = in_precision(kinds, torch.float64)
    assert {name: t.dtype for name, t in named(read, "")} == {
        "['f']": torch.float64,
        "['i']": torch.int32,
        "['m']": torch.bool,
        "['u']": torch.uint8,
        "['w']": torch.int64,
    }
    assert in_precision(torch.tensor([65535], dtype=torch.uint16), torch.float32).item() == 65535  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ((), ValueError, "^x must hold at least one input.* got a tuple of 0"),
        ({"a": {}}, ValueError, r"^x\['a'\] must hold at least one input.* a mapping of \[\]"),
        ({1: A}, ValueError, r"^x .* must name each by text.* got a mapping of \[1\]"),
        ({"a": [A]}, TypeError, r"^x\['a'\] must be a tensor, .* got list"),
    ],
)
def test_what_is_no_tree_of_tensors_is_named(x, error, message):
    with pytest.raises(error, match=message):
        list(named(x))


TREES: tuple[Inputs, ...] = (
    torch.arange(5),
    (torch.arange(5), torch.rand(5, 2)),
    {"tokens": torch.arange(5), "a]'b": torch.rand(5, 2)},
    {"pair": (torch.arange(5), {"inner": torch.rand(5, 2)}), "mask": torch.arange(5) > 2},
    tuple(torch.arange(5) + k for k in range(12)),
)


def same(one: Inputs, other: Inputs) -> bool:
    mine, theirs = dict(named(one)), dict(named(other))
    return mine.keys() == theirs.keys() and all(
        torch.equal(t, theirs[name]) for name, t in mine.items()
    )


@pytest.mark.parametrize("x", TREES, ids=structure)
def test_rows_are_taken_apart_and_joined(x: Inputs):
    assert same(join(list(in_rows(x, 2))), x)
    assert same(at(x, torch.tensor([3, 1])), join([at(x, slice(3, 4)), at(x, slice(1, 2))]))
    assert [len(next(named(part))[1]) for part in in_rows(x, 2)] == [2, 2, 1]


@pytest.mark.parametrize("x", TREES, ids=structure)
def test_names_tell_the_tree(x: Inputs):
    """In whatever order, beside other tensors whose names are alike."""
    tensors = {"xs": torch.zeros(1), "chol": torch.zeros(1)} | dict(reversed(list(named(x))))
    assert type(unnamed(tensors)) is type(x)
    assert same(unnamed(tensors), x)
    assert unnamed({"xs": torch.zeros(1)}) is None


def test_what_inputs_are_made_of():
    assert [structure(x) for x in (torch.zeros(1), (1, 2), {"b": 1, "a": Tensor()}, [1])] == [
        "one tensor",
        "a tuple of 2",
        "a mapping of ['b', 'a']",
        "list",
    ]
