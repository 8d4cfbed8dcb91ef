"""What is kept of a tensor while it lives."""

from dataclasses import replace

import torch

from bayesfl.data import from_arrays
from bayesfl.data.tensors import digest_of, not_finite
from tests.data.made import arrays


def test_hash_notices_a_change_in_place():
    data = from_arrays(*arrays())
    before = data.hash
    data.train.x[0, 0] += 1
    assert replace(data).hash != before


def test_digests_know_the_numbers_whatever_their_precision_or_place():
    x = torch.arange(3000.0).reshape(1500, 2)  # more rows than are looked at together
    assert digest_of(x) == digest_of(x.double()) == digest_of(x.T.contiguous().T)
    assert digest_of(x.long()) == digest_of(x.int()) != digest_of(x)
    assert len({digest_of(x), digest_of(x.reshape(3000)), digest_of(x.flip(0))}) == 3


def test_rows_that_are_not_finite_are_marked():
    x = torch.zeros(2500, 3)
    assert not_finite(x) is None
    x[[7, 2400], [0, 2]] = torch.tensor([float("nan"), float("inf")])  # changed in place, which is noticed
    bad = not_finite(x)
    assert bad is not None
    assert bad.nonzero().flatten().tolist() == [7, 2400]
    assert not_finite(x) is bad
    assert not_finite(torch.zeros(3, dtype=torch.int64)) is None
    assert not_finite(x[:0]) is None
