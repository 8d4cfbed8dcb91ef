"""Nests of tensors under dotted names."""

import pytest
import torch

from bayesfl.base.trees import detached, flatten, nest


def test_there_and_back():
    """Whatever the depth; what is no mapping is a leaf."""
    tree = {"a": {"b": torch.zeros(1), "c": {"d": torch.ones(2)}}, "e": torch.ones(3)}
    flat = flatten(tree)
    assert list(flat) == ["a.b", "a.c.d", "e"]
    assert flat["a.c.d"] is tree["a"]["c"]["d"]
    assert nest(flat) == tree


@pytest.mark.parametrize("key", ["a.b", "", 3])
def test_names_that_cannot_be_joined(key):
    """Text without dots."""
    with pytest.raises(ValueError, match=rf"{key!r} .*dots"):
        flatten({"x": {key: torch.zeros(1)}})


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_one_name_is_the_beginning_of_another(names):
    """In either order."""
    with pytest.raises(ValueError, match=r"tensor .* is a prefix of another"):
        nest({name: torch.zeros(1) for name in names})


def test_detached_tensors_share_no_memory():
    """Not with the nest, nor with each other; in the order of names."""
    base = torch.arange(6.0).reshape(2, 3).requires_grad_()
    found = detached({"b": base.T, "a": {"c": base}})
    assert list(found) == ["a.c", "b"]
    assert (found["b"].is_contiguous(), found["b"].requires_grad) == (True, False)
    found["b"].zero_()
    assert torch.equal(found["a.c"], base)
