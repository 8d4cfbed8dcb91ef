"""Surveys of clients' rows, without a trained method."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.surveys import conduct, together
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients import asking
from bayesfl.federation.clients.asking import LocalRows
from tests.cases import numbers


@dataclass(frozen=True)
class Spread:
    """Mean and variance of columns, by two questions of which the second knows the mean."""

    columns: int
    split: str = "train"

    def start(self, about: Any) -> dict[str, torch.Tensor]:
        return {"outputs": torch.tensor(about.count)}

    def shapes(self, state: Any) -> dict[str, tuple[int, ...]]:
        return {"n_rows": (), "sum": (self.columns,)}

    def answer(self, state: Any, local: LocalRows) -> dict[str, torch.Tensor]:
        found = [x.double() for x, _ in local]
        if "mean" in state:
            found = [(x - state["mean"]).square() for x in found]
        return {
            "n_rows": torch.tensor([len(x) for x in found]),
            "sum": torch.stack([x.sum(0) for x in found]),
        }

    def solve(self, state: Any, total: Any) -> tuple[dict[str, torch.Tensor], bool]:
        found = total["sum"] / total["n_rows"]
        return {**state, "variance" if "mean" in state else "mean": found}, "mean" in state


@pytest.fixture(scope="module")
def clients() -> bf.data.FederatedData:
    """Three clients of 40, 10 and 20 rows, a fifth of them for tests; inputs are doubled when they
    are read.
    """
    xs = [numbers(n, 3, seed=n) for n in (40, 10, 20)]
    made = bf.data.from_arrays(xs, [torch.arange(len(x)) % 2 for x in xs], seed=1)
    return made.transformed(lambda x: 2 * x).to(dtype=torch.float64)


def test_a_question_about_rows(clients: bf.data.FederatedData):
    """Is answered of the rows that a model would receive, of the question's split alone; what
    predicts is known before it is asked.
    """
    for split in ("train", "test"):
        rows = torch.cat([x for x, _ in LocalRows(clients.splits[split], np.arange(3))])
        found = bf.survey(Spread(3, split), clients)
        assert len(rows) == clients.splits[split].counts.sum()
        assert_close(found["mean"], rows.mean(0))
        assert_close(found["variance"], rows.var(0, correction=0))
        assert found["outputs"] == 2


def test_answers_are_added_in_secret(clients: bf.data.FederatedData):
    """To the step of the sum."""
    open_, hidden = (
        bf.survey(Spread(3), clients, aggregation=how) for how in (None, bf.SecureSum())
    )
    for name in ("mean", "variance"):
        assert_close(hidden[name], open_[name], rtol=0, atol=1e-6)


def test_the_order_of_clients_is_none_of_the_answer(clients: bf.data.FederatedData):
    """To the bit."""
    order = np.array([2, 0, 1])
    turned = LocalRows(clients.train.select(order), order)
    question, about = Spread(3), Outputs("classification", 2)
    found = conduct(question, asking.ask(question, turned, None), about)
    at_once = conduct(question, together(question, turned), about)
    for name, t in bf.survey(question, clients).items():
        assert torch.equal(found[name], t)
        assert_close(at_once[name], t)


def test_what_is_asked(clients: bf.data.FederatedData):
    """Is about a split that has rows, with answers as they were declared."""
    with pytest.raises(ValueError, match="Spread reads the split 'validation'"):
        bf.survey(Spread(3, "validation"), clients)
    with pytest.raises(ValueError, match=r"'sum' of shape \[1, 3\], .* declares \[1, 2\]"):
        bf.survey(Spread(2), clients)
