"""Which options go to which method, and the edges of a grid."""

from functools import partial
from typing import Any

import pytest
from torch import nn

import bayesfl as bf
from bayesfl.optim import SGD, Clip, cosine
from bayesfl.study.grid import combinations, edges, grids


def own(model: nn.Module, **options: Any) -> bf.Algorithm:
    return bf.algorithms.fedavg(model, **options)


METHODS = {
    "FedAvg": bf.algorithms.fedavg,
    "Ditto": partial(bf.algorithms.ditto, lam=0.5),
    "pFedVEM": bf.algorithms.pfedvem,
    "own": own,
}
RATES = [SGD(0.01), SGD(0.1)]


def test_options_go_to_those_who_have_them():
    """A method's own entry comes first; who lacks an option of all is named."""
    found, notes = grids(
        METHODS, {"*": {"optimiser": RATES, "epochs": [1]}, "FedAvg": {"epochs": [2, 3]}}
    )
    assert found == {
        "FedAvg": {"optimiser": RATES, "epochs": [2, 3]},
        "Ditto": {"optimiser": RATES, "epochs": [1]},
        "pFedVEM": {},
        "own": {"optimiser": RATES, "epochs": [1]},
    }
    assert notes == (
        "optimiser is no option of pFedVEM (it has head_optimiser, body_optimiser)",
        "epochs is no option of pFedVEM (it has head_epochs, body_epochs)",
    )
    assert combinations({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert combinations({}) == [{}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dito": {"lam": [1]}}, r"method 'dito'.*'Ditto'"),
        ({"Ditto": {"lamb": [1]}}, r"Ditto has not an option 'lamb'.*'lam'"),
    ],
)
def test_mistakes_are_found_before_hours(options: Any, words: str):
    with pytest.raises(ValueError, match=words):
        grids(METHODS, options)


def test_an_option_of_nobody():
    methods = {name: make for name, make in METHODS.items() if name != "own"}
    with pytest.raises(ValueError, match=r"no method has an option 'optimizer'.*'optimiser'"):
        grids(methods, {"*": {"optimizer": RATES}})


def test_edges():
    """Of numbers and of optimisers by their first rates; words, and single values, have none."""
    grid = {
        "lam": [1.0, 0.1, 10.0],
        "optimiser": [SGD(0.1), Clip(SGD(cosine(0.5))), SGD(0.01)],
        "weight": ["size", "equal"],
        "epochs": [5],
        "flag": [True, False],
    }
    fixed = {"weight": "size", "epochs": 5, "flag": True}
    assert edges(grid, {"lam": 10.0, "optimiser": SGD(0.1), **fixed}, 10) == {"lam": "largest"}
    chosen = {"lam": 0.1, "optimiser": grid["optimiser"][1], **fixed}
    assert edges(grid, chosen, 10) == {"lam": "smallest", "optimiser": "largest"}
