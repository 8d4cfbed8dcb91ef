"""Digests of tensors."""

import hashlib

import torch

from bayesfl.base.archive import digest_of_tensor, digest_of_tensors


def test_a_tensors_digest_is_that_of_its_entries():
    """In their order, however they lie."""
    t = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert digest_of_tensor(t) == hashlib.sha256(t.numpy().tobytes()).hexdigest()
    assert digest_of_tensor(t.T.contiguous().T) == digest_of_tensor(t) != digest_of_tensor(t.T)


def test_everything_about_tensors_counts():
    """Text, names, types, shapes and bytes; not the order in which they are given."""
    a, b = torch.zeros(2), torch.ones(3)
    found = digest_of_tensors("text", {"a": a, "b": b})
    assert found == digest_of_tensors("text", {"b": b, "a": a})
    others = (
        digest_of_tensors("texts", {"a": a, "b": b}),
        digest_of_tensors("text", {"a": a, "c": b}),
        digest_of_tensors("text", {"a": a.int(), "b": b}),
        digest_of_tensors("text", {"a": a[None], "b": b}),
        digest_of_tensors("text", {"a": -a, "b": b}),
        digest_of_tensors("text", {"a": a}),
    )
    assert len({found, *others}) == 1 + len(others)
