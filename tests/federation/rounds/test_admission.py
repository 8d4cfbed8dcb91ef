"""What a reply must be, and how far a client may go."""

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.errors import FailedRound
from bayesfl.federation.rounds.admission import (
    Admission,
    Message,
    distances,
    objection,
    shares,
    usual,
)
from bayesfl.federation.rounds.faults import FAULTS, Fault, Lost
from tests.cases import federation
from tests.federation.made import METHODS, run, state


def test_rounds_with_too_few(
    model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """Skipped, a round leaves all as it was; repeated, it is the round of the attempt that went
    well; three failures stop the run.
    """
    algorithm = bf.algorithms.ditto(model, **METHODS["ditto"])
    plain = run(algorithm, clients)

    def failing(attempts: int, **options: Any) -> Any:
        def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
            return dict.fromkeys(ids[:4], Lost()) if round == 1 and attempt < attempts else {}

        rules = bf.Admission("skip", min_clients=4, **options)
        return run(algorithm, clients, faults=plan, admission=rules)

    with caplog.at_level(logging.WARNING, logger="bayesfl"):
        skipped = failing(1)
    assert re.search(r"round 2\b.* 3 replies .*4 \(min_clients\).*skipped", caplog.text)
    assert skipped.history["cohort"].tolist() == [7, 0, 7]
    repeated = failing(2, below_minimum="repeat")
    assert_close(state(repeated), state(plain), atol=1e-12, rtol=0)
    assert repeated.history["cohort"].tolist() == [7, 7, 7]
    with pytest.raises(FailedRound, match=r"round 2\b.* 3 replies .*4 \(min_clients\)"):
        failing(3, below_minimum="repeat")
    start = algorithm.init(7, seed=3, dtype=torch.float64)
    for faults, least in (
        ({0: FAULTS["nan"], 1: FAULTS["nan"]}, 6),
        (dict.fromkeys(range(7), Lost()), 1),
    ):
        refused = run(
            algorithm,
            clients,
            rounds=1,
            faults=lambda round, attempt, ids, faults=faults: faults,
            admission=bf.Admission("skip", min_clients=least),
        )
        assert refused.history["cohort"].tolist() == [0]
        assert_close(refused.server["w"], start["w"], atol=0, rtol=0)
        own = algorithm.rows(start)["v"]["loc"].expand(7, -1)
        assert_close(refused.private["v"]["loc"], own, atol=0, rtol=0)


def test_how_far_is_too_far():
    """A hundred medians of a round of three or more, else of earlier rounds; the floor is always
    allowed; without either, anything.
    """
    rules = Admission("skip", max_norm=10.0)
    for norms, earlier, limit in (
        ([1.0, 2.0, 9.0], [100.0], 20.0),
        ([1.0, 2.0], [3.0, 4.0, 7.0], 40.0),
        ([1.0, 2.0], [], np.inf),
        ([0.001, 0.002, 0.003], [], 1.0),
    ):
        assert rules.limit(norms, [1.0] * len(norms), earlier) == limit
    assert Admission("skip", max_norm=None).limit([1.0, 2.0, 3.0], [1.0] * 3, []) == np.inf


def test_distances():
    """Euclidean over everything that travels together, from what was sent to all or to each; what
    was not sent does not count.
    """
    sent = {
        "a": {"loc": torch.tensor([[3.0, 0.0], [0.0, 1.0]])},
        "b": {"loc": torch.tensor([[[4.0]], [[2.0]]]), "rho": torch.ones(2, 1)},
    }
    start = {"a": {"loc": torch.zeros(2)}, "b": {"loc": torch.tensor([[[0.0]], [[2.0]]])}}
    assert_close(distances(sent, start), torch.tensor([5.0, 1.0], dtype=torch.float64))


def test_a_message_as_declared():
    """The first thing that is wrong is named; a good message has nothing."""
    declared: Any = {"w.loc": ((2,), torch.float32), "count": ((), torch.int64)}
    loc, count = torch.zeros(2), torch.tensor(1)
    for round, tensors, reason in (
        (4, {"w.loc": loc, "count": count}, None),
        (3, {"w.loc": loc, "count": count}, "it answers round 4, not round 5"),
        (4, {"w.loc": loc}, "tensors ['count'] are missing"),
        (4, {"w.loc": "x", "count": count}, "w.loc is a str, not a tensor"),
        (
            4,
            {"w.loc": torch.zeros(3), "count": count},
            "w.loc is torch.float32 [3], declared as torch.float32 [2]",
        ),
        (
            4,
            {"w.loc": loc, "count": count.int()},
            "count is torch.int32 [], declared as torch.int64 []",
        ),
    ):
        assert objection(Message(tensors, round=round), declared, 4) == reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_client": "ignore"}, r"on_bad_client .*'stop'.*'skip'.* got 'ignore'"),
        ({"below_minimum": "wait"}, r"below_minimum .*'skip'.*'repeat'.* got 'wait'"),
        ({"min_clients": 0}, r"min_clients .*1.* got 0"),
        ({"max_norm": 0.5}, r"max_norm .*1.* got 0\.5"),
    ],
)
def test_rules_that_do_not_work(options: dict[str, Any], message: str):
    """Refused where they are made."""
    with pytest.raises(ValueError, match=message):
        Admission(**options)


@pytest.mark.slow
def test_honest_reports_are_taken(model: nn.Module):
    """Counts grow with the data, and what most report may be near 0."""
    skewed = federation(sizes=(20, 24, 30, 18, 22, 26, 6000))
    for algorithm in (
        bf.algorithms.fedpac(model, body_epochs=1, batch_size=50),
        bf.algorithms.fedbabu(model, epochs=2, batch_size=10),
    ):
        found = run(
            algorithm, skewed, admission=bf.Admission("skip"), rounds=2, evaluate_every=None
        )
        assert found.history["rejected"].tolist() == [0.0, 0.0]
    few = run(
        algorithm,
        skewed,
        admission=bf.Admission("skip"),
        rounds=12,
        participation=0.15,
        seed=5,
        evaluate_every=None,
    )
    # So the medians of small clients' rounds limit the large one.
    assert max(few.history["cohort"]) == 1.0
    assert any(6 in few.settings.cohort(7, round) for round in range(1, 12))
    assert few.history["rejected"].sum() == 0.0


def test_how_large_a_report_may_be():
    """A hundred times what is usual; of two clients, anything."""
    for rule, sizes, shares_, limit in (
        (Admission(), [0.0, 0.0, 0.0, 60.0], [1.0] * 4, 100.0),
        (Admission(), [10.0, 20.0, 30.0], [1.0] * 3, 2000.0),
        (Admission(), [10.0, 20.0, 30.0], [0.1, 0.2, 0.5], 10_000.0),
        (Admission(), [10.0, 20.0], [1.0] * 2, np.inf),
        (Admission(max_norm=None), [1.0] * 3, [1.0] * 3, np.inf),
    ):
        assert rule.report_limit(sizes, shares_) == limit


def test_shares_of_data():
    """In units of the median client's, a hundredth to a hundred; unknown counts don't count."""
    for counts, wanted in (
        ([10, 20, 30, 60, 20], [0.5, 1.0, 1.5, 3.0, 1.0]),
        ([10, 200, 300, 2**40, 1], [0.05, 1.0, 1.5, 100.0, 0.01]),
        ([0, 20, 30, 40], [1.0, 2 / 3, 1.0, 4 / 3]),
        ([0, 0, 0], [1.0, 1.0, 1.0]),
    ):
        assert shares(np.array(counts)).tolist() == wanted


def test_what_is_usual():
    """What grows with the data is measured by them, what does not as it is."""
    assert usual([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == 2.0
    assert usual([0.5, 0.5, 50.0], [0.1, 0.1, 10.0]) == 5.0
    assert usual([2.0, 2.0, 2.0], [10.0, 10.0, 1.0]) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("participation", [0.1, 0.4])
def test_honest_clients_beside_small_ones(participation: float, model: nn.Module):
    """Most clients are large, a cohort may be small ones for the most part, or rounds before it
    were.
    """
    uneven = federation(sizes=(3000,) * 6 + (5,) * 5)
    rounds, seed = (14, 0) if participation < 0.3 else (10, 5)
    options: dict[str, Any] = {
        "participation": participation,
        "admission": bf.Admission("skip"),
        "evaluate_every": None,
        "rounds": rounds,
        "seed": seed,
    }
    for algorithm in (
        bf.algorithms.fedpac(model, body_epochs=1, batch_size=50),
        bf.algorithms.fedbabu(model, epochs=2, batch_size=10),
    ):
        assert run(algorithm, uneven, **options).history["rejected"].sum() == 0.0


@pytest.mark.parametrize("bad", ["skip", "stop"])
def test_a_cohort_that_is_too_small_is_not_trained(
    bad: Any, model: nn.Module, clients: FederatedData
):
    """Nothing is sent, nothing counted; in the history every round has the same columns."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    options: dict[str, Any] = {
        "participation": 0.4,
        "sampling": "bernoulli",
        "rounds": 6,
        "evaluate_every": None,
    }
    found = run(algorithm, clients, admission=bf.Admission(bad, min_clients=3), **options)
    small = np.array([len(found.settings.cohort(7, round)) < 3 for round in range(6)])
    assert 0 < small.sum() < 6
    assert (
        (found.history["bytes_down"] == 0).tolist()
        == (found.history["bytes_up"] == 0).tolist()
        == small.tolist()
    )
    assert found.history["lost"].tolist() == found.history["rejected"].tolist() == [0.0] * 6
    # The same would be drawn.
    rules = bf.Admission(bad, min_clients=3, below_minimum="repeat")
    again = run(algorithm, clients, admission=rules, **options)
    assert_close(state(again), state(found), atol=0, rtol=0)
