"""What the server makes of the replies that it takes."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.pools import Stack
from bayesfl.data import FederatedData
from bayesfl.federation.faults import KINDS, Altered, Lost
from bayesfl.federation.replies import Unseen
from tests.cases import SIZES
from tests.federation.made import METHODS, of_client, run, state


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
    assert re.search(rf"client 4 .*left out.*{name} .*1e\+30", caplog.text)
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]


def test_a_round_that_is_not_finite_is_passed_over(model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture):
    """A reported variance of 0 is finite and small, and weighs infinitely: the round changes nothing, and the run goes on."""
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    found = run(algorithm, clients, faults=of_client(4, 1, setting("rho2", 0.0)), evaluate_every=None, train="cohort")
    assert re.search(r"round 1\b.*not finite.*skipped", caplog.text)
    assert all(bool(t.isfinite().all()) for t in state(found).values())
    assert found.history["cohort"].tolist() == [7.0, 0.0, 7.0]
    assert found.history["lost"].tolist() == found.history["rejected"].tolist() == [0.0, 0.0, 0.0]
    assert found.history["bytes_up"][1] == found.history["bytes_up"][0] > 0


def test_addressed_share_stack_and_combine(clients, model):
    """What methods with one server result per client need: gossip over a ring, the server keeping a copy for each client."""
    jobs = len(SIZES)
    ring = torch.zeros(jobs, jobs).double()
    for j in range(jobs):
        ring[j, [j, (j + 1) % jobs, (j - 1) % jobs]] = 1 / 3
    step = bf.algorithms.fedavg(model, epochs=1, batch_size=10).phases
    gossip = bf.Algorithm(
        model,
        {"w": bf.Block(pool=Stack())},
        step,
        parts=("w",),
        server=lambda blocks, count: {"copies": blocks["w"]["loc"].expand(count, -1)},
        address=lambda server, ids: {"w": {"loc": server["copies"][ids]}},
        combine=lambda server, ids, uplink: {"copies": ring @ torch.empty_like(server["copies"]).index_copy_(0, ids, uplink["w"]["loc"])},
    )
    options = {"dtype": torch.float64, "evaluate_every": None, "progress": False}
    one = bf.simulate(gossip, clients, rounds=1, engine=bf.Engine(chunk=2), **options)
    alone = bf.simulate(bf.algorithms.local(model, epochs=1, batch_size=10), clients, rounds=1, **options)
    assert_close(one.server["copies"], ring @ alone.private["w"]["loc"])
    two = bf.simulate(gossip, clients, rounds=2, engine=bf.Engine(chunk=3), **options)
    probs = two.predict().probs
    x, _ = clients.test.client(3)
    expected = gossip.outputs(gossip.leaves(("w",), {"w": {"loc": two.server["copies"][3]}}), x.double()).softmax(-1)
    assert_close(probs[3], expected)


def test_unseen_refuses_whatever_is_asked():
    """Entries but the number of the round, attributes, iteration, length."""
    unseen = Unseen("it is hidden", 3, 5, 7)
    assert (unseen["round"], unseen["rounds"]) == (3, 5)
    for ask in (lambda: unseen["n"], lambda: unseen.shape, lambda: list(unseen), lambda: len(unseen), lambda: "n" in unseen):
        with pytest.raises(ValueError, match=r"it is hidden, .*`combine`"):
            ask()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"w": {"loc": torch.zeros(3)}}, r"`combine` .*'w\.loc'.*server .*'w\.loc'"),
        ({"seen": torch.zeros(2)}, r"'seen': \(torch\.float32.*server .*'seen': \(torch\.int64"),
        ({"seen": 3.0}, r"`combine` .*\['seen'\].*tensors"),
        ({"w": {"loc": None}}, r"`combine` .*\['w\.loc'\].*tensors"),
        ({"each": torch.zeros(3, 2)}, r"each.*\(3, 2\).*each.*\(7, 2\)"),
        ({"one": torch.zeros(1)}, r"one.*\(1,\).*one.*\(\)"),
        (None, r"`combine` .*mapping.* got NoneType"),
        ({"other": torch.zeros(2)}, r"`combine` .*\['other'\].*`server`"),
    ],
)
def test_combine_returns_what_the_server_has(returned: Any, words: str, model: nn.Module, clients: FederatedData):
    """Names, shapes and dtypes; else the next round, or a saved run that nobody can load, would be the first to notice."""
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {"seen": torch.zeros(2, dtype=torch.int64), "each": torch.zeros(number, 2), "one": 0.0},
        combine=lambda server, ids, uplink: returned,
    )
    with pytest.raises(ValueError, match=words):
        run(made, clients, rounds=1)


def assigned(server: Any, key: str, value: Any) -> Any:
    server[key] = value
    return {}


def inside(server: Any) -> Any:
    server["d"]["m"] = server["d"]["m"] + 1
    return {}


@pytest.mark.parametrize(
    "combine",
    [
        lambda server, ids, uplink: (server["k"].add_(1), {})[1],
        lambda server, ids, uplink: assigned(server, "k", server["k"] + 1),
        lambda server, ids, uplink: assigned(server, "more", server["k"] + 1),
        lambda server, ids, uplink: (server.pop("k"), {})[1],
        lambda server, ids, uplink: inside(server),
    ],
)
def test_combine_does_not_change_what_it_is_given(combine: Any, model: nn.Module, clients: FederatedData):
    """The state of the round before would change with it: that of a result that is resumed, or of a round that is repeated."""
    made = replace(
        bf.algorithms.fedavg(model, epochs=1), server=lambda blocks, number: {"k": 0.0, "d": {"m": torch.zeros(number)}}, combine=combine
    )
    for aggregation in (None, bf.SecureSum()):
        with pytest.raises(ValueError, match=r"`combine` .*server\['k'\] \+ 1"):
            run(made, clients, rounds=1, aggregation=aggregation)


@dataclass(frozen=True)
class Own:
    """A pool of a user's own."""

    entry: Any
    sends = ("loc",)

    def __call__(self, server: Any, name: str, uplink: Any) -> Any:
        return self.entry(server[name]["loc"])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (lambda loc: {"loc": loc.float()}, r"w\.loc.*float32.*float64"),
        (lambda loc: {"loc": loc[None]}, r"w\.loc.*\(1, .*w\.loc"),
        (lambda loc: {"loc": loc, "more": loc}, r"\['w\.more'\]"),
        (lambda loc: {"loc": loc.add_(1)}, "pool.*writes"),
    ],
)
def test_pools_return_what_the_server_has(entry: Any, words: str, model: nn.Module, clients: FederatedData):
    """Names, shapes and dtypes, in new tensors."""
    made = bf.algorithms.fedavg(model, epochs=1)
    with pytest.raises(ValueError, match=words):
        run(replace(made, blocks={"w": bf.Block(pool=Own(entry))}), clients, rounds=1)


def test_a_first_axis_that_stands_still_at_this_number_of_clients_may_grow(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """By the rule that saved runs and new clients are held to: the same for one client more."""
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {"models": torch.zeros(min(number, 3), 2)},
        combine=lambda server, ids, uplink: {"models": torch.cat([server["models"], server["models"][:1]])},
    )
    result = run(made, clients, rounds=2)
    result.save(tmp_path / "run")
    assert bf.load(tmp_path / "run", made, clients).server["models"].shape == (5, 2)


def test_combine_knows_how_many_clients_there_are(model: nn.Module, clients: FederatedData):
    """The number J, also where only some take part, and where the server sees sums alone."""
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {"known": 0.0},
        combine=lambda server, ids, uplink: {"known": torch.zeros_like(server["known"]) + uplink["clients"]},
    )
    for aggregation in (None, bf.SecureSum()):
        assert run(made, clients, rounds=1, participation=0.5, aggregation=aggregation).server["known"].item() == clients.clients
