"""The numbers of every method under its revision: who changes them raises the revision, so that no
saved run goes on under others.

`python -m tests.contract.test_revisions` records the numbers anew, after the revision was raised.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.optim import SGD
from tests.cases import CASES, Case, federation, run

MORE = (
    Case(
        "pfedvem",
        {
            "head_epochs": 2,
            "body_epochs": 1,
            "batch_size": 10,
            "init_scale": 0.1,
            "head_optimiser": SGD(0.05, momentum=0.5),
        },
    ),
    Case(
        "pfedvem",
        {
            "head_epochs": 2,
            "body_epochs": 1,
            "batch_size": 10,
            "scale_prior": (2.0, 3.0),
            "scale_update": "after",
        },
    ),
    Case(
        "fedsi",
        {
            "epochs": 1,
            "batch_size": 10,
            "aggregation": "moment_match",
            "finetune_steps": 2,
            "predictive_precision": 1.0,
        },
    ),
    Case(
        "fedsi",
        {
            "epochs": 1,
            "batch_size": 10,
            "aggregation": "product",
            "finetune_steps": 2,
            "predictive_precision": 1.0,
        },
    ),
)
"""Equations that no case of the contract battery meets: the pace of pFedVEM's scales, their prior,
and FedSI's other rules.
"""
ALL = (*CASES, *MORE)
RECORDED = Path(__file__).with_name("revisions.json")


def names() -> list[str]:
    """One for each case; a method that has several has them numbered."""
    found = [str(case) for case in ALL]
    return [
        f"{name} {found[:place].count(name) + 1}" if found.count(name) > 1 else name
        for place, name in enumerate(found)
    ]


def numbers(case: Case) -> dict[str, Any]:
    """The revision, and for every tensor of the state and of the predictions its norm and a sum
    that knows the places of its entries.
    """
    torch.manual_seed(0)
    algorithm, clients = case(bf.models.mlp(8, hidden=6, outputs=3)), federation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stability, at test size
        result = run(algorithm, clients, rounds=2, participation=0.6)
        probs = [result.predict().probs, result.adapt(clients).predict().probs]
    tensors = flatten(
        {
            "server": result.server,
            "private": result.private,
            "predicted": dict(zip(("test", "novel"), probs, strict=True)),
        }
    )
    found = {}
    for name, t in tensors.items():
        flat = t.double().flatten().clamp(-1e30, 1e30)  # a sum that does not overflow
        found[name] = [
            float(flat.norm()),
            float(flat @ (torch.arange(len(flat)) + 1.0).double().cos()),
        ]
    return {"revision": revision(algorithm), "numbers": found}


def revision(algorithm: bf.Algorithm) -> int:
    """That of the method itself, where an optimiser on the server is added to it."""
    assert algorithm.made is not None
    return (
        revision(algorithm.made.options["algorithm"])
        if "algorithm" in algorithm.made.options
        else algorithm.made.revision
    )


@pytest.mark.parametrize(("case", "name"), list(zip(ALL, names(), strict=True)), ids=names())
def test_numbers_change_with_the_revision_alone(case: Case, name: str):
    known, now = json.loads(RECORDED.read_text())[name], numbers(case)
    if now["revision"] != known["revision"]:
        pytest.fail(
            f"{name}: the revision is {now['revision']}, the numbers were recorded under "
            f"{known['revision']}; record them anew"
        )
    assert now["numbers"].keys() == known["numbers"].keys()
    for tensor, values in now["numbers"].items():
        if values != pytest.approx(known["numbers"][tensor], rel=1e-7, abs=1e-7):
            pytest.fail(
                f"{name}: {tensor} has changed; raise the method's revision and record the numbers "
                "anew, or mend what changed them"
            )


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({name: numbers(case) for case, name in zip(ALL, names(), strict=True)}, indent=1)
        + "\n"
    )
