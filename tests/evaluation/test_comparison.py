"""Several results in one table, and what of their training differs."""

from typing import Any

import pytest
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.evaluation.comparison import compare
from tests.cases import run


def found(method: bf.Algorithm, clients: FederatedData, **options: Any) -> Any:
    return run(method, clients, 2, evaluate_every=1, **options)


def test_what_differs_stands_beneath(model: nn.Module, clients: FederatedData):
    """Steps, batches, optimisers, rounds and who takes part, as far as the results differ in them; with every phase that trains."""
    results = {
        "FedAvg": found(bf.algorithms.fedavg(model, epochs=1, batch_size=10, lr=0.1, momentum=0.0), clients),
        "FedRep": found(bf.algorithms.fedrep(model, head_epochs=2, body_epochs=1, batch_size=10, lr=0.1, momentum=0.0), clients),
        "pFedMe": found(bf.algorithms.pfedme(model, batch_size=5), clients, participation=0.5),
    }
    text = compare(results)
    first, second = text.split("\n\n")
    for name, result in results.items():
        (line,) = [line for line in first.splitlines() if line.startswith(name)]
        assert f"{result.history[-1]['personal_accuracy']:.3f}" in line
    head, _, *lines = second.splitlines()
    assert head.split() == ["trained", "with", "participation", "steps", "batch", "optimiser"]
    assert "head: 2 epochs, body: 1 epoch" in lines[1]
    assert "0.5 (all trains)" in lines[2]
    assert " 5 " in lines[2]
    assert "SGD(0.1)" in lines[0]


def test_what_is_alike_is_not_said(model: nn.Module, clients: FederatedData):
    """Nothing differs between two runs of one setting; a schedule is called one; several seeds make one row."""
    one = found(bf.algorithms.fedavg(model, epochs=1, lr=lambda round, rounds: 0.1), clients)
    assert "trained with" not in compare({"a": one, "b": [one, one]})
    assert "±" in compare({"b": [one, one]})
    other = found(bf.algorithms.fedavg(model, epochs=1), clients)
    assert "a schedule" in compare({"a": one, "b": other}, style="markdown")


def test_what_cannot_be_compared(model: nn.Module, clients: FederatedData):
    one = found(bf.algorithms.fedavg(model, epochs=1), clients)
    with pytest.raises(ValueError, match=r"results .*empty"):
        compare({})
    with pytest.raises(ValueError, match=r"'a' .*'speed'"):
        compare({"a": one}, columns=["speed"])
    with pytest.raises(ValueError, match=r"'a' .*'accuracy'.*evaluate_every"):
        compare({"a": run(bf.algorithms.fedavg(model, epochs=1), clients)})
