"""Secure aggregation: the sum is that of an open run to the bound that is stated, and what the
server sees of one client says nothing.
"""

import importlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import AdditivePool, Server, StackedPool, Tensors
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.pools import (
    Clipped,
    Mean,
    Median,
    MomentMatched,
    PrecisionWeighted,
    Relaxed,
    by_size,
)
from bayesfl.composition.priors import Normal, inverse_size, server_mean
from bayesfl.data import FederatedData
from bayesfl.federation.private import secure
from bayesfl.federation.private.secure import (
    SecureSum,
    agreed,
    masked,
    masked_total,
    quantised,
    restored,
)
from bayesfl.federation.rounds.faults import FAULTS, Lost
from bayesfl.posteriors import MeanField
from tests.cases import CASES, Case, scaled, with_batch_norm
from tests.federation import made
from tests.federation.made import reads_replies, run, same_bits, state

COARSE = 2.0**-10


# `bf.simulate` is the function.
driver = importlib.import_module("bayesfl.federation.run.driver")


SIZE = 8 * 16 + 16 + 16 * 3 + 3  # of the fixture's model


def fedavg(model: nn.Module, pool: AdditivePool | None = None) -> Algorithm:
    plain = made.fedavg(model)
    return plain if pool is None else replace(plain, blocks={"w": bf.Block(pool=pool)})


def test_numbers_become_integers_and_come_back():
    """To half a step, negative ones too; beyond the range they are clipped, and counted."""
    values = np.array([0.0, 0.24, 0.26, -0.26, 0.75, -3.0, 4.0, 4.1, -1e20])
    units, clipped = quantised(values, 4.0, 0.5)
    assert (units.dtype, clipped) == (np.uint64, 2)
    assert units.view(np.int64).tolist() == [0, 0, 1, -1, 2, -6, 8, 8, -8]
    assert restored(units, 0.5).tolist() == [0, 0, 0.5, -0.5, 1, -3, 4, 4, -4]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float):
    """Nothing else would notice: numpy casts it to some integer."""
    with pytest.raises(ValueError, match="not finite"):
        quantised(np.array([0.0, bad]), 1.0, 0.5)


def random_group(ids: Sequence[int], size: int) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    return {client: rng.integers(-(2**40), 2**40, size).view(np.uint64) for client in ids}


def test_masks_cancel_in_the_sum_of_all_and_in_no_other():
    """Whatever the order of ids; one missing leaves noise."""
    own = random_group((7, 2, 90, 11), 50)
    shared = agreed(own)
    messages = {client: masked(values, client, shared[client]) for client, values in own.items()}
    wanted = sum(values.view(np.int64) for values in own.values())
    assert np.array_equal(masked_total(messages.values()).view(np.int64), np.asarray(wanted))
    for left in own:
        rest = [client for client in own if client != left]
        wrong = masked_total(messages[client] for client in rest).view(np.int64).astype(float)
        right = sum(own[client].view(np.int64) for client in rest)
        assert np.median(np.abs(wrong - right)) > 2**58


def test_the_sum_wraps_as_the_clients_numbers_do():
    """Partial sums may leave the range of an int64, the sum does not."""
    own = {
        k: np.array([value], np.int64).view(np.uint64)
        for k, value in enumerate((2**61, 2**61 - 1, -(2**61), 5))
    }
    shared = agreed(own)
    assert masked_total(masked(v, k, shared[k]) for k, v in own.items()).view(
        np.int64
    ).tolist() == [2**61 + 4]


def test_secrets_are_of_pairs_and_fresh():
    """Both ends of a pair know one, no other client does, and the next round has others."""
    first, second = agreed([4, 0, 9]), agreed([4, 0, 9])
    assert {client: sorted(known) for client, known in first.items()} == {
        0: [4, 9],
        4: [0, 9],
        9: [0, 4],
    }
    assert all(
        first[a][b] == first[b][a] and len(first[a][b]) == 32 for a in first for b in first[a]
    )
    known = [secret for table in (first, second) for of in table.values() for secret in of.values()]
    assert len(set(known)) == 6


def test_what_the_server_sees_of_one_client_is_uniform():
    """Every byte of the message of a client that sends a constant, by chi square; one in 10^9 runs
    may fail.
    """
    size = 200_000
    shared = agreed(range(3))
    for client in range(3):
        seen = masked(np.full(size, 12345, np.uint64), client, shared[client])
        for byte in range(8):
            counts = np.bincount((seen >> np.uint64(8 * byte)).astype(np.uint8), minlength=256)
            assert chi2.sf(((counts - size / 256) ** 2 / (size / 256)).sum(), 255) > 1e-10


class Watched:
    """An additive pool that keeps the totals it solves."""

    def __init__(self, pool: AdditivePool) -> None:
        self.pool, self.totals = pool, []
        self.sends = pool.sends

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Any) -> Tensors:
        return self.pool.accumulate(total, server, name, uplink)

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        self.totals.append(total)
        return self.pool.solve(server, name, total)


@pytest.mark.parametrize("kind", ["mean", "precision", "moments"])
def test_the_sum_is_that_of_an_open_run_to_half_a_step_a_client(
    kind: str, model: nn.Module, clients: FederatedData
):
    """Each of a pool's sums, whatever closed form follows; the bound is met within a factor, so it
    is no empty one.
    """
    pools = {"mean": Mean(), "precision": PrecisionWeighted(), "moments": MomentMatched()}
    algorithm = fedavg(model)
    if kind != "mean":
        block = replace(
            algorithm.blocks["w"],
            posterior=MeanField(),
            prior=Normal(centre=server_mean("w"), variance=inverse_size(1.0)),
        )
        algorithm = replace(algorithm, blocks={"w": block})
    totals = []
    for aggregation in (None, SecureSum(step=COARSE)):
        pool = Watched(pools[kind])
        watched = replace(algorithm, blocks={"w": replace(algorithm.blocks["w"], pool=pool)})
        run(watched, clients, rounds=1, aggregation=aggregation)
        (total,) = pool.totals
        totals.append(total)
    plain, found = totals
    assert plain.keys() == found.keys()
    off = {key: float((plain[key] - found[key]).abs().max()) for key in plain}
    assert max(off.values()) <= clients.clients / 2 * COARSE * (1 + 1e-6)
    assert max(off.values()) > clients.clients / 20 * COARSE


def test_a_quotient_is_within_its_bound(model: nn.Module, clients: FederatedData):
    """With large weights, and with ones near the step, where the bound is wide and is needed."""
    widest = []
    for scale in (1.0, 1e-3):
        algorithm = fedavg(
            model, Mean(lambda server, uplink, scale=scale: scale * by_size(server, uplink))
        )
        plain, found = (
            run(algorithm, clients, rounds=1, aggregation=way)
            for way in (None, SecureSum(step=COARSE))
        )
        weight = scale * torch.tensor(float(clients.train.counts.sum()), dtype=torch.float64)
        loc = plain.server["w"]["loc"]
        half = clients.clients * COARSE / 2
        bound = half * (1 + loc.abs()) / (weight - half)
        off = (found.server["w"]["loc"] - loc).abs()
        assert (off <= bound).all()
        assert (off / bound).max() > 0.02
        widest.append(float(off.max()))
    assert widest[1] > 100 * widest[0]


def refusal(algorithm: bf.Algorithm) -> str | None:
    """What a method is told that sends nothing, or whose server does more than add up; None for the
    others.
    """
    pools = [block.pool for block in algorithm.blocks.values() if block.pool]
    if not pools:
        return "the method sends none: leave aggregation out"
    if any(isinstance(pool, StackedPool) for pool in pools):
        return "needs every client's uplink.*leave aggregation out"
    return r"bf\.Algorithm\.combine" if reads_replies(algorithm) else None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_is_taken_or_refused_with_the_remedy(
    case: Case, model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Those whose server adds up and no more are taken, and come out as in the open; the others
    don't begin.
    """
    algorithm = case(model)
    if words := refusal(algorithm):
        monkeypatch.setattr(driver, "run_round", None)
        with pytest.raises(ValueError, match=words):
            run(algorithm, clients, aggregation=SecureSum())
        return
    plain, found = (
        run(algorithm, clients, rounds=2, evaluate_every=None, aggregation=way)
        for way in (None, SecureSum())
    )
    assert_close(state(plain), state(found), atol=1e-5, rtol=0)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, np.ndarray]]:
    """Every message that a client makes, in order."""
    sent: list[tuple[int, np.ndarray]] = []

    def noted(values: np.ndarray, client: int, shared: Any) -> np.ndarray:
        sent.append((client, masked(values, client, shared)))
        return sent[-1][1]

    monkeypatch.setattr(secure, "masked", noted)
    return sent


def test_the_result_does_not_depend_on_the_masks(
    model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Two runs of one seed: the same bits, and no message twice; nor with other chunks."""
    sent = watch(monkeypatch)
    one, two = (run(fedavg(model), clients, aggregation=SecureSum()) for _ in range(2))
    assert same_bits(state(one), state(two))
    assert len(sent) == 2 * 3 * 7
    for k, (client, message) in enumerate(sent):
        assert all(
            (message != other).mean() > 0.99 for mate, other in sent[k + 1 :] if mate == client
        )
    other = run(
        fedavg(model), clients, aggregation=SecureSum(), engine=bf.Engine(chunk=3, workers=2)
    )
    assert torch.equal(one.server["w"]["loc"], other.server["w"]["loc"])


@pytest.mark.parametrize("kind", ["lost", "nan", "shape", "stale"])
def test_a_client_that_drops_out(
    kind: str, model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """The others send again under fresh masks, the bytes count, and the round is as without it."""
    sent = watch(monkeypatch)
    options: dict[str, Any] = {
        "faults": lambda round, attempt, ids: {4: FAULTS[kind]} if round == 1 else {},
        "rounds": 3,
        "admission": bf.Admission("skip", max_norm=None),
    }
    found = run(fedavg(model), clients, aggregation=SecureSum(), **options)
    assert found.history["repeats"].tolist() == [0, 1, 0]
    assert found.history["cohort"].tolist() == [7, 6, 7]
    message = 8 * (SIZE + 1 + 1)  # numbers, their weight, the count of what was clipped
    first = message * 6  # of a client that is missing nothing arrives that counts
    assert found.history["bytes_up"].tolist() == [7 * message, first + 6 * message, 7 * message]
    again = [client for client, _ in sent[7 : 7 + 12]]
    assert again == [0, 1, 2, 3, 5, 6] * 2
    for (_, before), (_, after) in zip(sent[7:13], sent[13:19], strict=True):
        assert (before != after).mean() > 0.99
    assert_close(state(found), state(run(fedavg(model), clients, **options)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("lost", "least", "cohort"),
    [(range(1, 7), 1, 0), ((0, 5), 5, 5), ((0, 5), 6, 0)],
    ids=["one alone", "as many as the minimum", "fewer than the minimum"],
)
def test_too_few_are_left(
    lost: Sequence[int], least: int, cohort: int, model: nn.Module, clients: FederatedData
):
    """Of one client there is no sum: the round is skipped, as one below any minimum."""
    found = run(
        fedavg(model),
        clients,
        rounds=1,
        aggregation=SecureSum(),
        faults=lambda round, attempt, ids: dict.fromkeys(lost, Lost()),
        admission=bf.Admission("skip", max_norm=None, min_clients=least),
    )
    assert found.history["cohort"].tolist() == [cohort]
    # Not what an open round would have taken.
    assert np.isnan(found.history["bytes_up"]).all() == (not cohort)
    start = fedavg(model).init(7, seed=3, dtype=torch.float64)
    assert torch.equal(found.server["w"]["loc"], start["w"]["loc"]) == (not cohort)


def test_what_is_clipped_is_counted(
    model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """Each summand at the declared range, as a slow reference has it; the count is that of all
    clients.
    """
    limit, seen = 2.0, []

    class Noted(Watched):
        def accumulate(
            self, total: Tensors | None, server: Server, name: str, uplink: Any
        ) -> Tensors:
            own = Mean().accumulate(None, server, name, uplink)
            seen.append(np.concatenate([t.numpy().ravel() for t in own.values()]))
            return super().accumulate(total, server, name, uplink)

    pool = Noted(Mean())
    with caplog.at_level(logging.WARNING, logger="bayesfl"):
        found = run(
            fedavg(model, pool),
            clients,
            rounds=1,
            aggregation=SecureSum(range=limit, step=2.0**-30),
        )
    count = int((np.abs(np.stack(seen)) > limit).sum())
    assert len(seen) == 7 < count
    assert found.history["clipped"].tolist() == [count]
    assert f"round 1: {count} numbers were clipped" in caplog.text
    (total,) = pool.totals
    wanted = torch.from_numpy(np.stack(seen)).clip(-limit, limit).sum(0)
    assert_close(torch.cat([t.flatten() for t in total.values()]), wanted, atol=1e-8, rtol=0)


def test_a_client_looks_at_its_own_sums(model: nn.Module, clients: FederatedData):
    """A weight that is infinite for one client stops the run with its name; it would have become an
    integer.
    """

    def seventh(server, uplink):
        return torch.where(uplink["ids"] == 6, torch.inf, 1.0).to(uplink["n"])

    with pytest.raises(bf.DivergenceError, match=r"client 6 .*round 1\b.*summands") as caught:
        run(fedavg(model, Mean(seventh)), clients, aggregation=SecureSum())
    assert caught.value.client == 6
    assert caught.value.result is not None


def test_a_resumed_run_has_the_same_bits(model: nn.Module, clients: FederatedData, tmp_path: Any):
    """Through a file; in the open it is another experiment."""
    whole = run(fedavg(model), clients, rounds=3, aggregation=SecureSum())
    run(fedavg(model), clients, rounds=2, aggregation=SecureSum(), checkpoint=tmp_path)
    again = run(fedavg(model), clients, rounds=3, aggregation=SecureSum(), checkpoint=tmp_path)
    assert torch.equal(whole.server["w"]["loc"], again.server["w"]["loc"])
    assert whole.history["bytes_up"].tolist() == again.history["bytes_up"].tolist()
    for other in (None, SecureSum(step=COARSE)):
        with pytest.raises(ValueError, match=r"keeps its settings.*SecureSum\("):
            run(fedavg(model), clients, rounds=4, aggregation=other, resume=again)


def test_a_combine_that_asks_later_is_refused_then(model: nn.Module, clients: FederatedData):
    """Not only at the start: whenever it reads what the server has not seen."""

    def later(server, ids, uplink):
        return {} if torch.equal(server["w"]["loc"], first) else {"w": uplink["w"]}

    algorithm = fedavg(model)
    first = algorithm.init(7, seed=3, dtype=torch.float64)["w"]["loc"]
    with pytest.raises(ValueError, match=r"secure .*`combine` .*'w'"):
        run(replace(algorithm, combine=later), clients, aggregation=SecureSum())


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (Median(), r"block 'w' .*Median"),
        (Clipped(Mean(), 1.0), r"block 'w' .*clipped"),
        (Relaxed(Clipped(Mean(), 1.0), 0.5), r"block 'w' .*clipped"),
    ],
)
def test_pools_that_need_single_clients(
    pool: Any, words: str, model: nn.Module, clients: FederatedData
):
    """Refused by name, with what to do."""
    with pytest.raises(ValueError, match=rf"{words}.*leave aggregation out"):
        run(fedavg(model, pool), clients, aggregation=SecureSum())


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        (
            {"range": 2.0**40, "step": 2.0**-20},
            {},
            r"range / step .*2\*\*62, got 7 x .* = 2\*\*62\.8",
        ),
        (
            {},
            {"admission": bf.Admission("skip")},
            r"max_norm=100 .*max_norm=None",
        ),
        ({}, {"participation": 0.2}, r"one client of 7 .*participation=0\.2"),
    ],
)
def test_runs_that_do_not_work(
    rule: dict[str, float],
    options: dict[str, Any],
    words: str,
    model: nn.Module,
    clients: FederatedData,
):
    """Refused before anything is trained."""
    with pytest.raises(ValueError, match=words):
        run(fedavg(model), clients, aggregation=SecureSum(**rule), **options)


def test_the_room_that_is_left_is_enough(model: nn.Module, clients: FederatedData):
    """Just below the limit every client may be at the end of its range."""
    limit = 2.0**62 / 7
    units, _ = quantised(np.array([limit, -limit]), limit, 1.0)
    total = masked_total([units] * 7).view(np.int64)
    assert total[0] > 2**61
    assert total[1] < -(2**61)
    with pytest.raises(ValueError, match="must stay below"):
        run(fedavg(model), clients, aggregation=SecureSum(range=limit, step=1.0))
    run(
        fedavg(model), clients, rounds=1, aggregation=SecureSum(range=limit * (1 - 1e-12), step=1.0)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"range": 0.0}, "range must be > 0"), ({"step": math.nan}, "step must be > 0")],
)
def test_numbers_that_do_not_work(change: dict[str, float], words: str):
    """Said where they come in."""
    with pytest.raises(ValueError, match=words):
        SecureSum(**change)


@pytest.mark.parametrize("wrong", ["secure", SecureSum, 3])
def test_what_is_no_aggregation(wrong: Any, model: nn.Module, clients: FederatedData):
    """A word, a class, a number."""
    with pytest.raises(TypeError, match=r"aggregation .*Aggregation, got .*bayesfl\.SecureSum\(\)"):
        run(fedavg(model), clients, aggregation=wrong)


def test_statistics_of_norms_are_never_clipped(clients: FederatedData):
    """A variance times a count of examples that the range cannot hold stops the run, by name; a
    wider range takes it.
    """
    large = scaled(clients, (1.0, 1e3, 1.0, 1.0, 1.0, 1.0, 1.0))
    algorithm = fedavg(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)))
    with pytest.raises(
        bf.DivergenceError,
        match=r"client 1 .*round 1\b.*block 'w_buffers' .*range=1\.04858e\+06; .*group_norm",
    ) as caught:
        run(algorithm, large, aggregation=SecureSum())
    assert caught.value.client == 1
    assert caught.value.result is not None
    plain, found = (
        run(algorithm, large, aggregation=way) for way in (None, SecureSum(range=2.0**30))
    )
    assert found.history["clipped"].tolist() == [0, 0, 0]
    assert_close(state(plain), state(found), atol=1e-4, rtol=0)


def test_weights_are_clipped_beside_statistics(clients: FederatedData):
    """Which are inside the range, and stay as they are."""
    algorithm = fedavg(with_batch_norm())
    seen = run(algorithm, clients, rounds=1, aggregation=SecureSum(range=200.0, step=2.0**-30))
    assert seen.history["clipped"].tolist() == [0]
    with torch.no_grad():
        algorithm.model.get_parameter("head.weight").add_(10.0)
    plain, found = (
        run(algorithm, clients, rounds=1, aggregation=way)
        for way in (None, SecureSum(range=200.0, step=2.0**-30))
    )
    assert found.history["clipped"][0] > 0
    assert_close(plain.server["w_buffers"], found.server["w_buffers"], atol=1e-6, rtol=0)
