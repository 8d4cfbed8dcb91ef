"""Clients that fail: each round is as it would have been without them, and what was refused is said by name."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.composition.phases import Once
from bayesfl.composition.pools import Clipped, Median
from bayesfl.data import FederatedData
from bayesfl.federation.admission import PROTOCOL, Admission, Message, distances, objection, shares, usual
from bayesfl.federation.errors import TooFewClients
from bayesfl.federation.faults import KINDS, Altered, Fault, Lost, at_random
from bayesfl.federation.result import Result
from bayesfl.federation.settings import Settings
from tests.cases import federation

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1, "batch_size": 10},
    "ditto": {"epochs": 1, "batch_size": 10},
    "pfedvem": {"head_epochs": 2, "body_epochs": 1, "batch_size": 10, "init_scale": 0.3},
    "d_fedem": {"components": 2, "epochs": 1, "batch_size": 10},
}
WORDS = {
    "lost": "did not reply",
    "stale": "it answers round 0, not round 1",
    "protocol": f"it speaks protocol {PROTOCOL + 1}, the server {PROTOCOL}",
    "missing": "are missing",
    "extra": r"tensors \['more'\] were not declared",
    "shape": "declared as",
    "dtype": "float16",
    "larger": "declared as",
    "nan": "is not finite",
    "infinite": "is not finite",
    "far": "from what it was sent, more than",
}


def state(result: Result) -> dict[str, Tensor]:
    return flatten({"server": result.server, "private": result.private})


def run(algorithm: bf.Algorithm, clients: FederatedData, **options: Any) -> Result:
    options = {"rounds": 3, "dtype": torch.float64, "seed": 3, "progress": False, "engine": bf.Engine(chunk=3), **options}
    return bf.simulate(algorithm, clients, **options)


def without(client: int, round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no cohort of that round has the client: by other means than a fault."""
    cohort = Settings.cohort

    def fewer(self: Settings, clients: int, at: int) -> np.ndarray:
        ids = cohort(self, clients, at)
        return ids[ids != client] if at == round else ids

    monkeypatch.setattr(Settings, "cohort", fewer)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("method", list(METHODS))
def test_a_round_without_the_client(
    method: str, kind: str, model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Its reply is refused with the reason, its own state is that of its last accepted round, all others go on as without it."""
    algorithm = getattr(bf.algorithms, method)(model, **METHODS[method])
    with caplog.at_level(logging.WARNING, logger="bayesfl"):
        result = run(algorithm, clients, train="cohort", faults=lambda round, attempt, ids: {4: KINDS[kind]} if round == 1 else {})
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("round 1: client 4 ")

    assert re.search(WORDS[kind], said)
    assert result.history["cohort"].tolist() == [7, 6, 7]
    assert result.history["lost"].tolist() == [0, int(kind == "lost"), 0]
    assert result.history["rejected"].tolist() == [0, int(kind != "lost"), 0]
    without(4, 1, monkeypatch)
    assert_close(state(result), state(run(algorithm, clients, train="cohort")), atol=1e-12, rtol=0)


def test_a_lost_client_outside_the_cohort(model: nn.Module, clients: FederatedData):
    """Where all train, one that is not gathered may fail too: its state stays, and nobody else's changes."""
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    cohort = Settings(3, 0.5, "fixed", "all", 3, None).cohort(7, 2)
    out = int(np.setdiff1d(np.arange(7), cohort)[0])
    options: dict[str, Any] = {"participation": 0.5, "sampling": "fixed", "train": "all"}
    before = run(algorithm, clients, rounds=2, **options)
    result = run(algorithm, clients, resume=before, faults=lambda round, attempt, ids: {out: Lost()}, **options)
    plain = run(algorithm, clients, resume=before, **options)
    assert_close(result.server, plain.server, atol=1e-12, rtol=0)
    for name, t in flatten(result.private).items():
        others = np.setdiff1d(np.arange(7), [out])
        assert_close(t[others], flatten(plain.private)[name][others], atol=1e-12, rtol=0)
        assert torch.equal(t[out], flatten(before.private)[name][out])


def breaking(model: nn.Module, clients: FederatedData) -> bf.Algorithm:
    """FedPer whose third client loses its head to NaN, and then goes on training."""
    plain = bf.algorithms.fedper(model, epochs=1, batch_size=10)
    n = int(clients.train.counts[2])
    assert (clients.train.counts == n).sum() == 1

    def lose(algorithm: bf.Algorithm, given: Any, view: Any, data: Any) -> Any:
        nan = torch.where(view["n"] == n, torch.nan, 1.0)
        return view | {"head": {"loc": view["head"]["loc"] * nan}}

    return replace(plain, phases=(*plain.phases, Once(lose), *plain.phases))


@pytest.mark.parametrize("kernel", ["layers", "live", "reference"])
def test_training_that_leaves_the_numbers(kernel: Any, model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch):
    """It stops a plain run; skipped, its client is left out, and the others of its chunk are as they were."""
    algorithm = breaking(model, clients)
    with pytest.raises(bf.DivergenceError, match="client 2"):
        run(algorithm, clients)
    result = run(algorithm, clients, admission=bf.Admission("skip"), engine=bf.Engine(kernel, chunk=3))
    assert result.history["rejected"].tolist() == [1, 1, 1]
    plain = bf.algorithms.fedper(model, epochs=1, batch_size=10)
    for round in range(3):
        without(2, round, monkeypatch)
    healthy = run(replace(plain, phases=(*plain.phases, *plain.phases)), clients, engine=bf.Engine(kernel, chunk=3))
    assert_close(result.private, healthy.private, atol=1e-12, rtol=0)
    assert_close(result.server, healthy.server, atol=1e-12, rtol=0)


def test_rounds_with_too_few(model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture):
    """Skipped, a round leaves all as it was; repeated, it is the round of the attempt that went well; three failures stop the run."""
    algorithm = bf.algorithms.ditto(model, **METHODS["ditto"])
    plain = run(algorithm, clients)

    def first(attempts: int) -> Any:
        return lambda round, attempt, ids: {int(k): Lost() for k in ids[:4]} if round == 1 and attempt < attempts else {}

    with caplog.at_level(logging.WARNING, logger="bayesfl"):
        skipped = run(algorithm, clients, faults=first(1), admission=bf.Admission("skip", min_clients=4))
    assert "round 1, counted from 0, comes to 3 replies and needs 4 (min_clients); the round is skipped" in caplog.text
    assert skipped.history["cohort"].tolist() == [7, 0, 7]
    after_one = run(algorithm, clients, rounds=1)
    two = run(algorithm, clients, rounds=2, faults=first(1), admission=bf.Admission("skip", min_clients=4))
    assert_close(state(two), state(after_one), atol=0, rtol=0)
    repeated = run(algorithm, clients, faults=first(2), admission=bf.Admission("skip", min_clients=4, below_minimum="repeat"))
    assert_close(state(repeated), state(plain), atol=1e-12, rtol=0)
    assert repeated.history["cohort"].tolist() == [7, 7, 7]
    with pytest.raises(TooFewClients, match="round 1, counted from 0, comes to 3 replies"):
        run(algorithm, clients, faults=first(3), admission=bf.Admission("skip", min_clients=4, below_minimum="repeat"))
    nan = {0: KINDS["nan"], 1: KINDS["nan"]}
    refused = run(algorithm, clients, rounds=1, faults=lambda round, attempt, ids: nan, admission=bf.Admission("skip", min_clients=6))
    assert refused.history["cohort"].tolist() == [0]
    fresh = run(
        algorithm,
        clients,
        rounds=1,
        faults=lambda round, attempt, ids: {int(k): Lost() for k in ids},
        admission=bf.Admission("skip"),
    )
    assert_close(state(refused), state(fresh), atol=0, rtol=0)


@pytest.mark.slow
def test_a_long_bad_time(model: nn.Module, clients: FederatedData, tmp_path: Any):
    """Faults of every kind at random: kernels and chunks agree, and a run stopped in between goes on to the same bits."""
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    options: dict[str, Any] = {"rounds": 10, "participation": 0.7, "faults": at_random(0.3, seed=1), "evaluate_every": 5}
    options["admission"] = bf.Admission("skip", min_clients=2)
    whole = run(algorithm, clients, **options)
    assert np.nansum(whole.history["lost"]) > 0
    assert np.nansum(whole.history["rejected"]) > 5
    assert_close(state(whole), state(run(algorithm, clients, engine=bf.Engine("reference", chunk=2), **options)), atol=1e-6, rtol=0)
    run(algorithm, clients, checkpoint=tmp_path / "run", **(options | {"rounds": 6}))
    again = run(algorithm, clients, checkpoint=tmp_path / "run", resume=True, **options)
    assert all(torch.equal(t, state(whole)[name]) for name, t in state(again).items())
    assert np.array_equal(again.history["uplink_norm"], whole.history["uplink_norm"], equal_nan=True)


def test_how_far_is_too_far():
    """A hundred medians of a round of three or more, else of earlier rounds; the floor is always allowed; without either, anything."""
    rules = Admission("skip", max_norm=10.0, norm_floor=0.5)
    assert rules.limit([1.0, 2.0, 9.0], [1.0] * 3, [100.0]) == 20.0
    assert rules.limit([1.0, 2.0], [1.0] * 2, [3.0, 4.0, 7.0]) == 40.0
    assert rules.limit([1.0, 2.0], [1.0] * 2, []) == np.inf
    assert rules.limit([0.001, 0.002, 0.003], [1.0] * 3, []) == 0.5
    assert Admission("skip", max_norm=None).limit([1.0, 2.0, 3.0], [1.0] * 3, []) == np.inf


def test_distances():
    """Euclidean over everything that travels together, from what was sent to all or to each; what was not sent does not count."""
    sent = {"a": {"loc": torch.tensor([[3.0, 0.0], [0.0, 1.0]])}, "b": {"loc": torch.tensor([[[4.0]], [[2.0]]]), "rho": torch.ones(2, 1)}}
    start = {"a": {"loc": torch.zeros(2)}, "b": {"loc": torch.tensor([[[0.0]], [[2.0]]])}}
    assert_close(distances(sent, start), torch.tensor([5.0, 1.0], dtype=torch.float64))


def test_a_message_as_declared():
    """The first thing that is wrong is named; a good message has nothing."""
    declared: Any = {"w.loc": ((2,), torch.float32), "count": ((), torch.int64)}
    good = Message({"w.loc": torch.zeros(2), "count": torch.tensor(1)}, round=3)
    assert objection(good, declared, 3) is None
    bad: dict[str, Message] = {
        "it answers round 3, not round 4": good,
        "tensors ['count'] are missing": replace(good, tensors={"w.loc": torch.zeros(2)}, round=4),
        "w.loc is a str, no tensor": replace(good, tensors={"w.loc": "x", "count": torch.tensor(1)}, round=4),
        "w.loc is torch.float32 [3], declared as torch.float32 [2]": replace(
            good, tensors={"w.loc": torch.zeros(3), "count": torch.tensor(1)}, round=4
        ),
        "count is torch.int32 [], declared as torch.int64 []": replace(
            good, tensors={"w.loc": torch.zeros(2), "count": torch.tensor(1, dtype=torch.int32)}, round=4
        ),
    }
    for reason, message in bad.items():
        assert objection(message, declared, 4) == reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_client": "ignore"}, "on_bad_client must be 'stop' or 'skip', got 'ignore'"),
        ({"below_minimum": "wait"}, "below_minimum must be 'skip' or 'repeat', got 'wait'"),
        ({"min_clients": 0}, "min_clients must be at least 1, got 0"),
        ({"max_norm": 0.5}, "max_norm is in medians and must be > 1"),
    ],
)
def test_rules_that_do_not_work(options: dict[str, Any], message: str):
    """Refused where they are made."""
    with pytest.raises(ValueError, match=message):
        Admission(**options)


def test_faults_need_rules_that_skip(model: nn.Module, clients: FederatedData):
    """The first of them would stop the run; rules are an Admission."""
    with pytest.raises(ValueError, match=r"faults need admission=Admission\('skip'\)"):
        run(bf.algorithms.fedavg(model), clients, faults=at_random(0.1), admission=Admission("stop"))
    with pytest.raises(TypeError, match="admission must be an Admission, got 'skip'"):
        run(bf.algorithms.fedavg(model), clients, admission="skip")


def test_plans_that_do_not_work():
    """A share that is none, kinds that are not there."""
    with pytest.raises(ValueError, match=r"share is a probability and must lie in \[0, 1\], got 1.5"):
        at_random(1.5)
    with pytest.raises(ValueError, match="kinds must be among"):
        at_random(0.1, kinds=("late",))
    with pytest.raises(ValueError, match="kinds must be among"):
        at_random(0.1, kinds=())


def test_a_reply_that_is_taken_leaves_the_clients_own_state_alone(model: nn.Module, clients: FederatedData):
    """Changed on its way by so little that nobody objects, it moves the server, and not what the client keeps."""
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])

    def nudged(message: Message) -> Message:
        return replace(message, tensors={name: t + 0.1 if t.is_floating_point() else t for name, t in message.tensors.items()})

    plain = run(algorithm, clients, rounds=1, admission=bf.Admission("skip"))
    result = run(algorithm, clients, rounds=1, faults=lambda round, attempt, ids: {3: Altered(nudged)})
    assert result.history["rejected"].tolist() == [0]
    assert_close(result.private, plain.private, atol=0, rtol=0)
    assert not torch.allclose(result.server["body"]["loc"], plain.server["body"]["loc"])


def test_earlier_rounds_say_how_far_two_clients_go(model: nn.Module, clients: FederatedData):
    """In the first round of two there is nothing to compare with; from the second on its median is, also after a resume."""
    two = clients.select([0, 1])
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])

    def far_in(round: int) -> Any:
        return lambda at, attempt, ids: {1: KINDS["far"]} if at == round else {}

    assert run(algorithm, two, rounds=1, faults=far_in(0)).history["rejected"].tolist() == [0]
    result = run(algorithm, two, rounds=2, faults=far_in(1))
    assert result.history["rejected"].tolist() == [0, 1]
    first = run(algorithm, two, rounds=1, faults=far_in(1))
    assert_close(state(run(algorithm, two, rounds=2, resume=first, faults=far_in(1))), state(result), atol=0, rtol=0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_clients_that_send_nothing(kind: str, model: nn.Module, clients: FederatedData):
    """A method without a server's model survives every fault; a client whose reply is refused stays where it was."""

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {2: KINDS[kind]} if round == 0 else {}

    algorithm = bf.algorithms.local(model, epochs=1, batch_size=10)
    kept = flatten(run(algorithm, clients, faults=plan, rounds=1, evaluate_every=None).private)
    start = flatten(algorithm.rows(algorithm.init(clients.clients, seed=3, dtype=torch.float64)))
    refused = kind in ("lost", "stale", "protocol", "extra")
    assert all(torch.equal(t[2], start[name]) == refused for name, t in kept.items())
    assert not any(torch.equal(t[1], start[name]) for name, t in kept.items())


def of_client(client: int, round: int, fault: Fault) -> Any:
    """A plan in which one client fails once."""

    def plan(at: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {client: fault} if at == round and client in ids else {}

    return plan


def setting(name: str, value: float) -> Altered:
    """A reply in which one tensor is a constant."""
    return Altered(lambda message: replace(message, tensors={**message.tensors, name: torch.full_like(message.tensors[name], value)}))


@pytest.mark.parametrize("name", ["centroids", "variance", "counts"])
def test_absurd_reports_are_left_out(name: str, model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture):
    """What a method reports has no start to be compared with; it is compared with the others'."""
    algorithm = bf.algorithms.fedpac(model, body_epochs=1, batch_size=10)
    found = run(algorithm, clients, faults=of_client(4, 1, setting(name, 1e30)), evaluate_every=None)
    without = run(algorithm, clients, faults=of_client(4, 1, Lost()), evaluate_every=None)
    assert_close(state(found), state(without), atol=1e-12, rtol=0)
    assert f"client 4 is left out: its {name} goes up to 1e+30" in caplog.text
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.slow
def test_honest_reports_are_taken(model: nn.Module):
    """Counts grow with the data, and what most report may be near 0."""
    skewed = federation(sizes=(20, 24, 30, 18, 22, 26, 6000))
    for algorithm in (bf.algorithms.fedpac(model, body_epochs=1, batch_size=50), bf.algorithms.fedbabu(model, epochs=2, batch_size=10)):
        found = run(algorithm, skewed, admission=bf.Admission("skip"), rounds=2, evaluate_every=None)
        assert found.history["rejected"].tolist() == [0.0, 0.0]
    few = run(algorithm, skewed, admission=bf.Admission("skip"), rounds=12, participation=0.15, seed=5, evaluate_every=None)
    assert max(few.history["cohort"]) == 1.0  # so the medians of small clients' rounds limit the large one
    assert any(6 in few.settings.cohort(7, round) for round in range(1, 12))
    assert few.history["rejected"].sum() == 0.0
    rule = Admission(on_bad_client="skip")
    assert rule.report_limit([0.0, 0.0, 0.0, 60.0], [1.0] * 4) == 100.0
    assert rule.report_limit([10.0, 20.0, 30.0], [1.0] * 3) == 2000.0
    assert rule.report_limit([10.0, 20.0, 30.0], [0.1, 0.2, 0.5]) == 10_000.0
    assert rule.report_limit([10.0, 20.0], [1.0] * 2) == Admission(max_norm=None).report_limit([1.0] * 3, [1.0] * 3) == np.inf


def test_shares_of_data():
    """In units of the median client's, a hundredth to a hundred; unknown counts don't count."""
    assert shares(np.array([10, 20, 30, 60, 20])).tolist() == [0.5, 1.0, 1.5, 3.0, 1.0]
    assert shares(np.array([10, 200, 300, 2**40, 1])).tolist() == [0.05, 1.0, 1.5, 100.0, 0.01]
    assert shares(np.array([0, 20, 30, 40])).tolist() == [1.0, 2 / 3, 1.0, 4 / 3]
    assert shares(np.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_what_is_usual():
    """What grows with the data is measured by them, what does not as it is."""
    assert usual([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == 2.0
    assert usual([0.5, 0.5, 50.0], [0.1, 0.1, 10.0]) == 5.0
    assert usual([2.0, 2.0, 2.0], [10.0, 10.0, 1.0]) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("participation", [0.1, 0.4])
def test_honest_clients_beside_small_ones(participation: float, model: nn.Module):
    """Most clients are large, a cohort may be small ones for the most part, or rounds before it were."""
    uneven = federation(sizes=(3000,) * 6 + (5,) * 5)
    options: dict[str, Any] = {"participation": participation, "admission": bf.Admission("skip"), "evaluate_every": None}
    options |= {"rounds": 14, "seed": 0} if participation < 0.3 else {"rounds": 10, "seed": 5}
    for algorithm in (bf.algorithms.fedpac(model, body_epochs=1, batch_size=50), bf.algorithms.fedbabu(model, epochs=2, batch_size=10)):
        assert run(algorithm, uneven, **options).history["rejected"].sum() == 0.0


@pytest.mark.parametrize("bad", ["skip", "stop"])
def test_a_cohort_that_is_too_small_is_not_trained(bad: Any, model: nn.Module, clients: FederatedData):
    """Nothing is sent, nothing counted; in the history every round has the same columns."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    options: dict[str, Any] = {"participation": 0.4, "sampling": "bernoulli", "rounds": 6, "evaluate_every": None}
    found = run(algorithm, clients, admission=bf.Admission(bad, min_clients=3), **options)
    small = np.array([len(found.settings.cohort(7, round)) < 3 for round in range(6)])
    assert 0 < small.sum() < 6
    assert (found.history["bytes_down"] == 0).tolist() == (found.history["bytes_up"] == 0).tolist() == small.tolist()
    assert found.history["lost"].tolist() == found.history["rejected"].tolist() == [0.0] * 6
    again = run(
        algorithm, clients, admission=bf.Admission(bad, min_clients=3, below_minimum="repeat"), **options
    )  # the same would be drawn
    assert_close(state(again), state(found), atol=0, rtol=0)


def test_a_skipped_round_counts_the_refused_beside_the_lost(model: nn.Module, clients: FederatedData):
    """Also where the lost alone were too many."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {1: Lost(), 2: Lost(), 3: KINDS["stale"]} if round == 1 else {}

    found = run(algorithm, clients, faults=plan, admission=bf.Admission("skip", min_clients=6), evaluate_every=None)
    assert (found.history["lost"][1], found.history["rejected"][1], found.history["cohort"][1]) == (2.0, 1.0, 0.0)


def test_a_round_that_is_not_finite_is_passed_over(model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture):
    """A reported variance of 0 is finite and small, and weighs infinitely: the round changes nothing, and the run goes on."""
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    found = run(algorithm, clients, faults=of_client(4, 1, setting("rho2", 0.0)), evaluate_every=None, train="cohort")
    assert "what the replies of round 1, counted from 0, make together is not finite; the round is skipped" in caplog.text
    assert all(bool(t.isfinite().all()) for t in state(found).values())
    assert found.history["cohort"].tolist() == [7.0, 0.0, 7.0]
    assert found.history["lost"].tolist() == found.history["rejected"].tolist() == [0.0, 0.0, 0.0]
    assert found.history["bytes_up"][1] == found.history["bytes_up"][0] > 0


@pytest.mark.parametrize("kind", ["stale", "protocol", "extra"])
def test_a_bad_acknowledgement(kind: str, model: nn.Module, clients: FederatedData):
    """A client that trains outside the cohort and whose word is not taken starts again from where it was."""
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    options: dict[str, Any] = {"participation": 0.5, "train": "all", "evaluate_every": None}
    outside = int(np.setdiff1d(np.arange(7), Settings(3, 0.5, algorithm.sampling, "all", 3, None).cohort(7, 1))[0])
    found = run(algorithm, clients, faults=of_client(outside, 1, KINDS[kind]), **options)
    lost = run(algorithm, clients, faults=of_client(outside, 1, Lost()), **options)
    assert_close(state(found), state(lost), atol=1e-12, rtol=0)
    assert found.history["rejected"].sum() == lost.history["lost"].sum() == 0


def test_a_skipped_round_counts_who_was_missing(model: nn.Module, clients: FederatedData):
    """Its row says how many were lost or refused."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    found = run(algorithm, clients, faults=of_client(4, 1, Lost()), admission=bf.Admission("skip", min_clients=7), evaluate_every=None)
    assert found.history["lost"].tolist() == [0.0, 1.0, 0.0]
    found = run(
        algorithm, clients, faults=of_client(4, 1, KINDS["nan"]), admission=bf.Admission("skip", min_clients=7), evaluate_every=None
    )
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]


def test_what_cannot_be(model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Refused before anything is trained, by name."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="min_clients must be at most the size of a cohort, 7, got 8"):
        run(algorithm, clients, admission=bf.Admission(min_clients=8))
    with pytest.raises(ValueError, match="min_clients must be at most the size of a cohort, 4, got 5; or raise participation"):
        run(algorithm, clients, admission=bf.Admission(min_clients=5), participation=0.7)
    with pytest.raises(TypeError, match="faults must be a plan"):
        run(algorithm, clients, faults="lost")
    for checkpoint in (3, ""):
        with pytest.raises(ValueError, match="checkpoint must name a folder"):
            run(algorithm, clients, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"pool must be one that adds up, such as Mean\(\)"):
        Clipped(Median(), 1.0)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
