"""What an algorithm is composed of is checked first."""

from dataclasses import replace
from typing import Any

import pytest

import bayesfl as bf
from bayesfl.composition import Descend, Energy
from bayesfl.likelihoods import Categorical
from bayesfl.models import mlp
from tests.composition.made import algorithm

W = Energy("w", ("w",), likelihood="mean")
STEP = Descend(W)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"likelihood": Categorical}, "^likelihood .*Likelihood, got the class Categorical"),
    ],
)
def test_what_is_no_composition_is_refused(options: dict[str, Any], words: str):
    """Before anything is looked up in it."""
    with pytest.raises(TypeError, match=words):
        replace(algorithm(mlp(2, hidden=3, outputs=2), {"w": bf.Block()}), **options)


def test_a_tied_parameter_is_covered_by_all_its_names_or_none():
    """Body and head that share a weight cannot be treated differently; all names at once can, and
    frozen ones are constants.
    """
    model = mlp(4, hidden=4, outputs=4)
    model.head.weight = model.get_parameter("body.0.weight")
    with pytest.raises(
        ValueError, match=r"'body\.\*'.*\['body\.0\.weight'\].*\['head\.weight'\].*untie"
    ):
        bf.algorithms.lg_fedavg(model)
    assert bf.algorithms.fedavg(model).layout("w").names == (
        "body.0.weight",
        "body.0.bias",
        "head.bias",
    )
    model.head.weight.requires_grad_(False)
    assert bf.algorithms.fedper(model).layout("head").names == ("head.bias",)
