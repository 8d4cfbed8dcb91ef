"""What the server makes of the replies that it takes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.pools import Stack
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.faults import FAULTS, Altered, Lost
from bayesfl.federation.run.callbacks import snapshot
from tests.cases import SIZES, scaled, with_batch_norm
from tests.federation.made import METHODS, of_client, run, state


def test_earlier_rounds_say_how_far_two_clients_go(model: nn.Module, clients: FederatedData):
    """In the first round of two there is nothing to compare with; from the second on its median is,
    also after a resume.
    """
    two = clients.select([0, 1])
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    at_once, later = (of_client(1, round, FAULTS["far"]) for round in (0, 1))
    assert run(algorithm, two, rounds=1, faults=at_once).history["rejected"].tolist() == [0]
    result = run(algorithm, two, rounds=2, faults=later)
    assert result.history["rejected"].tolist() == [0, 1]
    first = run(algorithm, two, rounds=1, faults=later)
    resumed = run(algorithm, two, rounds=2, resume=first, faults=later)
    assert_close(state(resumed), state(result), atol=0, rtol=0)


def setting(name: str, value: float) -> Altered:
    """A reply in which one tensor is a constant."""
    return Altered(
        lambda message: replace(
            message,
            tensors={**message.tensors, name: torch.full_like(message.tensors[name], value)},
        )
    )


@pytest.mark.parametrize("name", ["centroids", "variance", "counts"])
def test_absurd_reports_are_left_out(
    name: str, model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """What a method reports has no start to be compared with; it is compared with the others'."""
    algorithm = bf.algorithms.fedpac(model, body_epochs=1, batch_size=10)
    found, lost = (
        run(algorithm, clients, faults=of_client(4, 1, fault), evaluate_every=None)
        for fault in (setting(name, 1e30), Lost())
    )
    assert_close(state(found), state(lost), atol=1e-12, rtol=0)
    assert re.search(rf"client 4 .*left out.*{name} .*1e\+30", caplog.text)
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("pfedvem", -0.5, {"head_epochs": 2, "body_epochs": 1}),
        ("ifca", 3.0, {"clusters": 2}),
        ("fedem", -0.1, {"components": 2}),
        ("fedem", 1.5, {"components": 2}),
        ("fedpac", -1.0, {"body_epochs": 1}),
    ],
)
def test_reports_outside_their_range_are_left_out(
    name: str,
    value: float,
    options: dict[str, Any],
    model: nn.Module,
    clients: FederatedData,
    caplog: pytest.LogCaptureFixture,
):
    """A variance of -0.5, a share of 3: that client is named, and the round goes on without it."""
    told = {"pfedvem": "rho2", "ifca": "cluster", "fedem": "pi", "fedpac": "variance"}[name]
    algorithm = getattr(bf.algorithms, name)(model, batch_size=10, **options)
    found, lost = (
        run(algorithm, clients, faults=of_client(4, 1, fault), evaluate_every=None)
        for fault in (setting(told, value), Lost())
    )
    assert_close(state(found), state(lost), atol=1e-12, rtol=0)
    assert re.search(rf"client 4 .*left out.*its {told} must .*, got {value:g}", caplog.text)
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]


def test_a_round_that_is_not_finite_is_passed_over(
    model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """A reported variance of 1e-310 is positive, and weighs infinitely: the round changes nothing,
    and the run goes on.
    """
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    found = run(
        algorithm,
        clients,
        faults=of_client(4, 1, setting("rho2", 1e-310)),
        evaluate_every=None,
        train="cohort",
    )
    assert re.search(r"round 2\b.*not finite.*skipped", caplog.text)
    assert all(bool(t.isfinite().all()) for t in state(found).values())
    assert [found.history[name].tolist() for name in ("cohort", "lost", "rejected")] == [
        [7, 0, 7],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert found.history["bytes_up"][1] == found.history["bytes_up"][0] > 0


def test_addressed_share_stack_and_combine(clients, model):
    """What methods with one server result per client need: gossip over a ring, the server keeping a
    copy for each client.
    """
    one_each = torch.eye(len(SIZES)).double()
    ring = (one_each + one_each.roll(1, 0) + one_each.roll(-1, 0)) / 3
    step = bf.algorithms.fedavg(model, epochs=1, batch_size=10).phases
    gossip = bf.Algorithm(
        model,
        {"w": bf.Block(pool=Stack())},
        step,
        parts=("w",),
        server=lambda blocks, count: {"copies": blocks["w"]["loc"].expand(count, -1)},
        address=lambda server, ids: {"w": {"loc": server["copies"][ids]}},
        combine=lambda server, ids, uplink: {
            "copies": ring
            @ torch.empty_like(server["copies"]).index_copy_(0, ids, uplink["w"]["loc"])
        },
    )
    options = {"dtype": torch.float64, "evaluate_every": None, "progress": False}
    one = bf.simulate(gossip, clients, rounds=1, engine=bf.Engine(chunk=2), **options)
    alone = bf.simulate(
        bf.algorithms.local(model, epochs=1, batch_size=10), clients, rounds=1, **options
    )
    assert_close(one.server["copies"], ring @ alone.private["w"]["loc"])
    two = bf.simulate(gossip, clients, rounds=2, engine=bf.Engine(chunk=3), **options)
    x, _ = clients.test.client(3)
    expected = gossip.outputs(
        gossip.leaves(("w",), {"w": {"loc": two.server["copies"][3]}}), x.double()
    ).softmax(-1)
    assert_close(two.predict().probs[3], expected)


@pytest.mark.parametrize(
    "many", [True, False], ids=["all on a large scale", "one on a large scale"]
)
def test_statistics_of_norms_are_no_distance(
    many: bool, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """Variances of a million neither hide weights that are absurd, nor make those of one honest
    client so.
    """
    large = scaled(clients, tuple(1e3 if many or j == 2 else 1.0 for j in range(7)))
    algorithm = bf.algorithms.fedavg(
        nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)), **METHODS["fedavg"]
    )
    options: dict[str, Any] = {"rounds": 2, "evaluate_every": None}
    honest = run(algorithm, large, **options, admission=bf.Admission("skip"))
    assert honest.history["rejected"].tolist() == [0, 0]
    assert honest.history["uplink_norm"].max() < 10
    assert honest.server["w_buffers"]["loc"].max() > 1e3
    found = run(algorithm, large, **options, faults=of_client(4, 1, setting("w.loc", 1e3)))
    assert found.history["rejected"].tolist() == [0, 1]
    assert re.search(r"client 4 .*left out.* distance ", caplog.text)
    assert_close(
        state(found),
        state(run(algorithm, large, **options, faults=of_client(4, 1, Lost()))),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [(float("nan"), "is not finite"), (-5.0, "its w_buffers have negative variances")],
)
def test_statistics_that_cannot_be_set_a_client_aside(
    value: float, words: str, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """As any tensor; negative variances whatever their size, which has no bound. Means may be of
    either sign.
    """
    algorithm = bf.algorithms.fedavg(with_batch_norm(), **METHODS["fedavg"])
    poisoned, lost = (
        run(algorithm, clients, faults=of_client(4, 1, fault))
        for fault in (setting("w_buffers.loc", value), Lost())
    )
    assert poisoned.history["rejected"].tolist() == [0, 1, 0]
    assert lost.history["rejected"].tolist() == [0, 0, 0]
    assert re.search(rf"client 4 .*left out.* {words}", caplog.text)
    assert_close(state(poisoned), state(lost), atol=1e-12, rtol=0)


def test_who_took_part_is_recorded(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Of each round by name: those drawn, without those that were lost or left out; nobody in a
    round that was passed over. A saved run, one that goes on and a copy know it too.
    """
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])

    def plan(round: int, attempt: int, ids: Any) -> Any:
        bad = {1: {ids[0]: Lost(), ids[2]: FAULTS["nan"]}, 2: dict.fromkeys(ids, Lost())}
        return bad.get(round, {})

    options: dict[str, Any] = {"participation": 0.6, "faults": plan, "evaluate_every": None}
    found = run(algorithm, clients, rounds=4, **options)
    drawn = [found.settings.cohort(clients.clients, round) for round in range(4)]
    named = [tuple(clients.client_names[j] for j in ids) for ids in drawn]
    expected = [named[0], (named[1][1], *named[1][3:]), (), named[3]]
    assert [found.took_part(round) for round in (1, 2, 3, 4)] == expected
    with pytest.raises(KeyError):
        found.took_part(0)
    half = run(algorithm, clients, rounds=2, **options)
    half.save(tmp_path / "run")
    went_on = run(algorithm, clients, rounds=4, resume=tmp_path / "run", **options)
    assert [went_on.took_part(round) for round in (1, 2, 3, 4)] == expected
    assert snapshot(half).took_part(2) == expected[1]
