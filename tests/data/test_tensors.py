"""What is kept of a tensor while it lives."""

import hashlib
from dataclasses import replace

import pytest
import torch

from bayesfl.data import from_arrays, tensors
from bayesfl.data.tensors import digest_of_array, digest_of_inputs, not_finite
from tests.data.made import arrays


def test_hash_notices_a_change_in_place():
    data = from_arrays(*arrays())
    before = data.hash
    data.train.x[0, 0] += 1
    assert replace(data).hash != before


def test_digests_know_the_numbers_whatever_their_precision_or_place():
    x = torch.arange(3000.0).reshape(1500, 2)
    assert digest_of_array(x) == digest_of_array(x.double()) == digest_of_array(x.T.contiguous().T)
    assert digest_of_array(x[:1000].half()) == digest_of_array(x[:1000])
    assert (
        len({digest_of_array(x), digest_of_array(x.reshape(3000)), digest_of_array(x.flip(0))}) == 3
    )


def test_digests_of_whole_numbers_are_of_their_bytes_and_their_type():
    """So uint8 is read as it lies there; int64 keeps the digest it always had, of shape and
    numbers.
    """
    x = torch.arange(200).reshape(100, 2)
    for kind, stored, told in ((torch.int64, "<i8", b""), (torch.uint8, "u1", b"torch.uint8")):
        spelt = b"(100, 2)" + told + x.numpy().astype(stored).tobytes()
        assert digest_of_array(x.to(kind)) == hashlib.sha256(spelt).hexdigest()
    whole = (torch.uint8, torch.int8, torch.int32, torch.uint16, torch.int64)
    assert len({digest_of_array(x.to(kind)) for kind in (*whole, torch.float32)}) == 6
    assert digest_of_array(x > 7) != digest_of_array((x > 7).to(torch.uint8))


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_pieces_do_not_change_what_is_found(monkeypatch, size):
    """Pieces are of bytes: of one row at least, of none for tensors without rows or numbers."""
    wide = torch.arange(60, dtype=torch.int16).reshape(20, 3)
    double = torch.arange(20.0, dtype=torch.float64)
    whole = [digest_of_array(t.clone()) for t in (wide, double, wide[:0], wide[:, :0])]
    monkeypatch.setattr(tensors, "_PIECE", size)
    assert [digest_of_array(t.clone()) for t in (wide, double, wide[:0], wide[:, :0])] == whole
    double[13] = torch.nan
    bad = not_finite(double)
    assert bad is not None
    assert bad.equal(double.isnan())


def test_digests_of_trees_know_names_and_not_their_order():
    a, b = torch.arange(4.0), torch.arange(4)
    assert digest_of_inputs(a) == digest_of_array(a)
    assert digest_of_inputs({"a": a, "b": b}) == digest_of_inputs({"b": b, "a": a})
    trees = [a, (a,), (a, b), (b, a), {"a": a}, {"a": a, "b": b}, {"a": b, "b": a}, {"a": (a, b)}]
    assert len({digest_of_inputs(tree) for tree in trees}) == len(trees)


def test_rows_that_are_not_finite_are_marked():
    x = torch.zeros(2500, 3)
    assert not_finite(x) is None
    # Changed in place, which is noticed.
    x[[7, 2400], [0, 2]] = torch.tensor([float("nan"), float("inf")])
    bad = not_finite(x)
    assert bad is not None
    assert bad.nonzero().flatten().tolist() == [7, 2400]
    assert not_finite(x) is bad
    assert not_finite(torch.zeros(3, dtype=torch.int64)) is not_finite(x[:0]) is None
