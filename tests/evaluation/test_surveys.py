"""Surveys: their loop, what is declared and checked, and the order in which answers are added."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from bayesfl.base.surveys import answers, checked, conduct, together, uplink_bytes
from bayesfl.evaluation.calibration import Temperature
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.surveys import LocalPredictions
from tests.evaluation.calibration.made import CLASSES, local, split


@dataclass(frozen=True)
class Share:
    """How many examples are predicted rightly; asked twice, so that the state changes."""

    split: str = "test"
    wrong: Any = None

    def start(self, outputs: Any) -> dict[str, torch.Tensor]:
        return {"asked": torch.zeros(())}

    def shapes(self, state: Any) -> dict[str, tuple[int, ...]]:
        return {"n_right": (), "n_examples": (2,)}

    def answer(self, state: Any, local: LocalPredictions) -> dict[str, torch.Tensor]:
        right = local.predictions.probs.argmax(-1) == local.labels
        counts = local.clients.counts[:, None].expand(-1, 2)
        answer = {"n_right": local.clients.sum(right), "n_examples": counts}
        return answer if self.wrong is None else self.wrong(answer)

    def solve(self, state: Any, total: Any) -> tuple[dict[str, torch.Tensor], bool]:
        return {
            "asked": state["asked"] + 1,
            "share": total["n_right"] / total["n_examples"][0],
        }, bool(state["asked"] == 1)


def test_a_survey_of_ones_own():
    """Ends when it says so, and knows sums alone."""
    given = local()
    state = conduct(Share(), together(Share(), given), CLASSES)
    right = given.predictions.probs.argmax(-1) == given.labels
    assert state["asked"] == 2
    assert float(state["share"]) == pytest.approx(float(right.double().mean()))
    assert uplink_bytes(Share().shapes({})) == 24


def test_sums_do_not_depend_on_the_order_of_clients():
    """To the bit: answers are added in the order of the clients' numbers."""
    given = local((30, 7, 1, 55), ids=(5, 2, 9, 1))
    order = torch.tensor([3, 1, 0, 2])
    rows = torch.cat([(given.clients.owner == j).nonzero()[:, 0] for j in order])
    turned = replace(
        given,
        ids=given.ids[order.numpy()],
        predictions=given.predictions.at(rows),
        clients=Segments(given.clients.counts[order]),
    )
    step = Temperature()
    state = step.start(CLASSES) | {"beta": torch.tensor(0.3, dtype=torch.float64)}
    one, other = (together(step, some)(state, step.shapes(state)) for some in (given, turned))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_draws_are_the_clients_own():
    """Of each row the same, whatever rows and clients stand beside it; uniform; two phases, rounds,
    seeds and clients draw apart.
    """
    given = local((3000, 7, 0, 55))
    u = given.uniform(0)
    one = Segments(torch.tensor([1]))
    alone = replace(given, ids=given.ids[1:2], clients=one, rows=given.rows[3004:3005])
    assert torch.equal(alone.uniform(0), u[3004:3005])
    assert 0 < float(u.min()) < float(u.max()) < 1
    assert kstest(u[:3000].numpy(), "uniform").pvalue > 0.01
    for other in (
        replace(given, seed=9).uniform(0),
        replace(given, round=9).uniform(0),
        given.uniform(1),
    ):
        assert abs(float(np.corrcoef(other.numpy(), u.numpy())[0, 1])) < 0.1
    same = replace(given, rows=np.full_like(given.rows, 5)).uniform(0)
    assert [len(one.unique()) for one in split(given, same)] == [1, 1, 0, 1]
    assert len(same.unique()) == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda a: {"n_right": a["n_right"]},
            r"contains \['n_right'\], but the survey declares \['n_examples', 'n_right'\]",
        ),
        (
            lambda a: a | {"n_examples": a["n_right"]},
            r"an answer contains 'n_examples' of shape \[4\], but the survey declares \[4, 2\]",
        ),
        (
            lambda a: a | {"n_right": a["n_right"] / 0 * 0},
            "an answer contains numbers in 'n_right' that are not finite",
        ),
        (
            lambda a: a | {"n_right": -a["n_right"]},
            "an answer contains numbers in 'n_right' .* not counts",
        ),
        (lambda a: a | {"n_right": a["n_right"] + 0.5}, "in 'n_right' that are not counts"),
    ],
)
def test_answers_are_checked(wrong: Any, words: str):
    given = local()
    with pytest.raises(ValueError, match=words):
        answers(Share(wrong=wrong), {}, given, Share().shapes({}))


def test_numbers_that_are_declared_not_negative_are_checked():
    """As a curvature, of which one client's lie would turn Newton's step round."""
    shapes = Temperature().shapes({})
    said = {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()}
    assert checked(said | {"g": -said["g"]}, shapes, "its answer")["g"] == -1
    with pytest.raises(ValueError, match="its answer contains numbers in 'h' that are negative"):
        checked(said | {"h": -said["h"]}, shapes, "its answer")


def test_what_does_not_end():
    endless = type("Endless", (Share,), {"solve": lambda self, state, total: (state, False)})()
    with pytest.raises(RuntimeError, match="Endless has asked 1000 questions without ending"):
        conduct(
            endless,
            lambda state, shapes: {name: torch.zeros(shape) for name, shape in shapes.items()},
            CLASSES,
        )
    with pytest.raises(
        ValueError, match=r"the sum of the answers contains numbers in .* that are not counts"
    ):
        conduct(
            Share(),
            lambda state, shapes: {name: -torch.ones(shape) for name, shape in shapes.items()},
            CLASSES,
        )
