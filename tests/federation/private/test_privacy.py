"""Client-level differential privacy: the accountant against closed forms, a release against
algebra, draws from the secret alone.
"""

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.changes import with_server_optimiser
from bayesfl.composition.pools import Clipped, Mean, by_size, equal
from bayesfl.composition.predictors import LinearisedLaplace, PooledLaplace
from bayesfl.data import FederatedData
from bayesfl.federation.private.privacy import ClientPrivacy
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.rounds.faults import FAULTS
from bayesfl.federation.rounds.replies import Replies
from bayesfl.optim import SGD, Adam
from tests.cases import CASES, Case, with_batch_norm
from tests.federation.made import OTHER, SECRET, fedavg, privately, reads_replies, run, state

# `bf.simulate` is the function.
driver = importlib.import_module("bayesfl.federation.run.driver")


pytest.importorskip("dp_accounting", reason="dp-accounting is an extra")


def split(model: nn.Module) -> Algorithm:
    """FedAvg in two blocks, which are clipped together."""
    whole = bf.algorithms.fedper(model, epochs=1, batch_size=10)
    return replace(
        whole, blocks={"body": bf.Block("body.*"), "head": bf.Block("head.*", keep=True)}, adapt=()
    )


def test_without_the_extra(
    model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Said before the first round, and only where there is something to account for."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="dp_accounting"):
        privately(fedavg(model), clients, ClientPrivacy(clip=1.0, noise_multiplier=1.0))
    privately(fedavg(model), clients, ClientPrivacy(clip=1.0, noise_multiplier=0.0), rounds=1)


def release(
    algorithm: Algorithm,
    clients: FederatedData,
    rule: ClientPrivacy,
    moved: dict[str, Tensor],
    ids: Sequence[int],
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """The server's vector before, and after the clients `ids` have sent it plus `moved` [J, D]; in
    two chunks.
    """
    options = {"round": 0, "n": 5.0, **more}
    quiet = replace(rule, noise_multiplier=0.0, secret=SECRET)
    result = privately(algorithm, clients, quiet, rounds=1, participation=0.5)
    total = rule.start(result, Admission(), every=None, repeats=0).begin(
        result.server, options["round"], np.array(ids)
    )
    for part in [part for part in (list(ids[:2]), list(ids[2:])) if part]:
        sent = {name: {"loc": result.server[name]["loc"] + t[part]} for name, t in moved.items()}
        n = torch.full((len(part),), options["n"])
        total.add(Replies(np.array(part), n, sent, {}, np.full(len(part), np.nan)))
    new = total.server()
    return tuple(torch.cat([of[name]["loc"] for name in moved]) for of in (result.server, new))  # pyright: ignore[reportReturnType]


def differences(algorithm: Algorithm, scale: float = 1.0) -> dict[str, Tensor]:
    """Of seven clients, of lengths from 0.1 to 10 times `scale`, some of them 0."""
    rng = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(7, algorithm.layout(name).size, generator=rng, dtype=torch.float64)
        for name in algorithm.blocks
    }
    total = torch.stack([t.square().sum(1) for t in made.values()]).sum(0).sqrt()
    lengths = scale * torch.tensor([0.1, 10.0, 1.0, 0.0, 3.0, 0.99, 1.01], dtype=torch.float64)
    return {name: t * (lengths / total)[:, None] for name, t in made.items()}


@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5, 3.0, 1.0, 0.0, 1.0)])
def test_a_release_without_noise_is_algebra(weights: Any, model: nn.Module, clients: FederatedData):
    """Clipped jointly over both blocks, over p times all weights, whoever took part, and no
    client's size.
    """
    algorithm, clip, p = split(model), 1.0, 0.5
    moved, ids = differences(algorithm), [1, 2, 3, 4, 6]
    rule = ClientPrivacy(clip=clip, noise_multiplier=0, weights=weights)
    joint = torch.cat(list(moved.values()), 1)
    w = [1.0] * 7 if weights is None else weights
    wanted = sum(w[j] * joint[j] / max(1.0, float(joint[j].norm()) / clip) for j in ids) / (
        p * sum(w)
    )
    for n in (5.0, 500.0):
        before, after = release(algorithm, clients, rule, moved, ids, n=n)
        assert_close(after - before, wanted, atol=1e-13, rtol=0)
    assert torch.equal(*release(algorithm, clients, rule, moved, []))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9, 1e200])
def test_one_client_moves_the_sum_by_no_more(
    scale: float, model: nn.Module, clients: FederatedData
):
    """Than clip times its weight, whatever it sends; where its difference has no finite length, by
    nothing.
    """
    algorithm, weights = split(model), (1.0, 2.0, 0.5, 3.0, 1.0, 0.7, 1.0)
    rule = ClientPrivacy(clip=0.5, noise_multiplier=0, weights=weights)
    moved = differences(split(model), scale)
    constant = 0.5 * sum(weights)
    _, everyone = release(algorithm, clients, rule, moved, range(7))
    for left in range(7):
        _, without = release(algorithm, clients, rule, moved, [j for j in range(7) if j != left])
        assert (
            float((everyone - without).norm()) * constant
            <= 0.5 * weights[left] * (1 + 1e-9) + 1e-12
        )
    before, most = release(algorithm, clients, rule, moved, [1])
    far = float((most - before).norm()) * constant
    assert far == pytest.approx({1e-9: 2e-8, 1e200: 0.0}.get(scale, 0.5 * 2), rel=1e-6)


def test_differences_are_from_what_each_client_was_sent(model: nn.Module, clients: FederatedData):
    """Where a method sends each a block of its own, those who send it back unchanged move
    nothing.
    """
    algorithm, rule = split(model), ClientPrivacy(clip=0.5, noise_multiplier=0)
    own = torch.arange(1.0, 8.0, dtype=torch.float64)[:, None] / 100

    def address(server: Any, ids: Tensor) -> Any:
        return {"body": {"loc": server["body"]["loc"] + own[ids].to(server["body"]["loc"])}}

    still = {
        "body": own.expand(7, algorithm.layout("body").size),
        "head": torch.zeros(7, algorithm.layout("head").size).double(),
    }
    before, after = release(replace(algorithm, address=address), clients, rule, still, range(7))
    assert_close(before, after, atol=1e-15, rtol=0)
    assert not torch.equal(*release(algorithm, clients, rule, still, range(7)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_has_no_length_adds_nothing(bad: float, model: nn.Module, clients: FederatedData):
    """A number that is none, should one come this far."""
    algorithm, rule = split(model), ClientPrivacy(clip=0.5, noise_multiplier=0)
    moved = differences(algorithm)
    moved["body"][4, 3] = bad
    _, found = release(algorithm, clients, rule, moved, [1, 2, 4, 5])
    assert torch.equal(found, release(algorithm, clients, rule, moved, [1, 2, 5])[1])


@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 0.5, 3.0, 1.0, 0.0, 1.0)])
def test_the_noise(weights: Any, model: nn.Module, clients: FederatedData):
    """Normal, its standard deviation sigma clip max w over p sum w; other rounds, other secrets and
    other sums have other noise.
    """
    algorithm = split(model)
    rule = ClientPrivacy(clip=2.0, noise_multiplier=0.7, weights=weights, secret=SECRET)
    moved, ids = differences(algorithm), [0, 1, 4]
    _, clean = release(algorithm, clients, replace(rule, noise_multiplier=0), moved, ids)
    drawn = torch.stack(
        [release(algorithm, clients, rule, moved, ids, round=k)[1] - clean for k in range(60)]
    )
    w = [1.0] * 7 if weights is None else weights
    wanted = 0.7 * 2.0 * max(w) / (0.5 * sum(w))
    count = drawn.numel()
    assert abs(float(drawn.std()) / wanted - 1) < 5 / math.sqrt(2 * count)
    assert abs(float(drawn.mean())) < 5 * wanted / math.sqrt(count)
    assert kstest((drawn / wanted).flatten().numpy(), "norm").pvalue > 1e-4
    correlation = torch.corrcoef(drawn)
    assert float((correlation - torch.eye(60)).abs().max()) < 6 / math.sqrt(drawn.shape[1])
    again = release(algorithm, clients, rule, moved, ids, round=0)[1] - clean
    assert torch.equal(again, drawn[0])
    shifted = {name: t * (1 - 1e-9) for name, t in moved.items()}
    for other, sent in ((replace(rule, secret=OTHER), moved), (rule, shifted)):
        noise = release(algorithm, clients, other, sent, ids, round=0)[1] - clean
        assert abs(float(torch.corrcoef(torch.stack([noise, drawn[0]]))[0, 1])) < 6 / math.sqrt(
            drawn.shape[1]
        )


def test_everyone_unclipped_and_no_noise_is_fedavg(model: nn.Module, clients: FederatedData):
    """With equal weights; with those of sizes, FedAvg by size."""
    plain = fedavg(model)
    alike = replace(plain, blocks={"w": bf.Block(pool=Mean(equal))})
    for weights, algorithm in ((None, alike), (clients.train.counts.tolist(), plain)):
        found = privately(
            plain, clients, ClientPrivacy(clip=1e6, noise_multiplier=0, weights=weights)
        )
        wanted = run(algorithm, clients, evaluate_every=None, engine=bf.Engine())
        assert_close(state(found), state(wanted), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["lost", "nan", "shape"])
def test_a_client_that_fails_adds_nothing(kind: str, model: nn.Module, clients: FederatedData):
    """Lost or refused on its own account: the sum is without it, and its denominator is not."""
    rule = ClientPrivacy(clip=1e6, noise_multiplier=0)
    without = privately(
        fedavg(model), clients, replace(rule, weights=[1] * 4 + [0] + [1] * 2), rounds=1
    )
    start = fedavg(model).init(7, seed=3, dtype=torch.float64)["w"]["loc"]
    found = privately(
        fedavg(model),
        clients,
        rule,
        rounds=1,
        faults=lambda round, attempt, ids: {4: FAULTS[kind]},
        admission=bf.Admission("skip", max_norm=None),
    )
    assert_close(
        (found.server["w"]["loc"] - start) * 7,
        (without.server["w"]["loc"] - start) * 6,
        atol=1e-12,
        rtol=0,
    )


def test_an_optimiser_on_the_server_takes_what_was_released(
    model: nn.Module, clients: FederatedData
):
    """Adam, on the noisy mean; SGD(1.0) is the release itself."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.5, secret=SECRET)
    plain = privately(fedavg(model), clients, rule)
    assert_close(
        privately(with_server_optimiser(fedavg(model), SGD(1.0)), clients, rule).server["w"],
        plain.server["w"],
        atol=1e-9,
        rtol=0,
    )
    assert (
        privately(with_server_optimiser(fedavg(model), Adam(0.01)), clients, rule)
        .server["w"]["loc"]
        .isfinite()
        .all()
    )


def refusal(algorithm: bf.Algorithm) -> str | None:
    """What a method is told that sends more than blocks gathered by means, with weights of sizes or
    none; None for the others.
    """
    pools = [block.pool for block in algorithm.blocks.values() if block.pool]
    if not pools:
        return "the method sends none: leave aggregation out"
    for pool in pools:
        if type(pool) is not Mean:
            return "in Mean pools only.*leave aggregation out"
        if pool.weight not in (by_size, equal):
            return r"ClientPrivacy\(weights="
    if algorithm.reports:
        return "`reports` sends.*leave aggregation out"
    return r"bf\.Algorithm\.combine" if reads_replies(algorithm) else None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_is_taken_or_refused_with_the_remedy(
    case: Case, model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Taken are those that send nothing but blocks gathered by means with weights of sizes or none;
    who trains is free.
    """
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.5)
    algorithm = case(model)
    if words := refusal(algorithm):
        monkeypatch.setattr(driver, "run_round", None)  # refused before the first
        with pytest.raises(ValueError, match=words):
            privately(algorithm, clients, rule)
        return
    found = privately(algorithm, clients, rule, rounds=1, participation=0.5, train="all")
    assert found.history["releases"].tolist() == [1]


def test_weights_that_are_data_are_replaced_where_told(
    model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """PFedVEM's confidence: refused; without its report it needs weights of its own, and then is as
    any method.
    """
    algorithm = bf.algorithms.pfedvem(
        model, head_epochs=2, body_epochs=1, batch_size=10, init_scale=0.3
    )
    plain = ClientPrivacy(clip=1.0, noise_multiplier=0.5)
    rule = replace(plain, weights=[1.0] * 7)
    silent = replace(algorithm, reports={}, combine=bf.Algorithm.combine)
    assert privately(silent, clients, rule).history["releases"].tolist() == [1, 2, 3]
    monkeypatch.setattr(driver, "run_round", None)
    reading = replace(
        fedavg(model),
        combine=lambda server, ids, uplink: {"w": {"loc": server["w"]["loc"] * len(ids)}},
    )
    for made, under, words in (
        (algorithm, plain, r"block 'head' .*weights=\[\.\.\.\]"),
        (algorithm, rule, r"`reports` sends \['rho2'\].*reports=\{\}"),
        (reading, rule, r"ClientPrivacy .*clipped.*`combine` .*'them'"),
    ):
        with pytest.raises(ValueError, match=words):
            privately(made, clients, under)


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        ({"weights": [1.0] * 6}, {}, r"weights .*7 clients, got 6"),
        ({}, {"sampling": "fixed"}, r"ClientPrivacy .*got 'fixed'; .*sampling"),
        (
            {},
            {"admission": bf.Admission(min_clients=2)},
            r"min_clients=2, below_minimum='skip' .*ClientPrivacy",
        ),
        (
            {},
            {"admission": bf.Admission(below_minimum="repeat")},
            "below_minimum='repeat' would reveal",
        ),
        ({}, {"admission": bf.Admission("skip")}, r"max_norm=100 .*max_norm=None"),
        ({}, {"checkpoint": "runs", "every": 2}, r"every=2 .*every=1"),
        ({"delta": 0.08}, {}, r"delta=0\.08 .*one of 7 clients.*far below 1 / 7, such as 0\.001"),
    ],
)
def test_runs_that_do_not_work(
    rule: dict[str, Any],
    options: dict[str, Any],
    words: str,
    model: nn.Module,
    clients: FederatedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Refused before anything is trained."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        privately(
            fedavg(model), clients, ClientPrivacy(clip=1.0, noise_multiplier=1.0, **rule), **options
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clip": 0.0}, "clip must be > 0"),
        ({"clip": math.inf}, r"clip .*got inf"),
        ({"noise_multiplier": -0.1}, "noise_multiplier must be >= 0"),
        ({"delta": 1.0}, "delta must lie within"),
        ({"secret": b"short"}, r"secret .*16 bytes .*secrets\.token_bytes\(32\)"),
        (
            {"secret": "a text of more than sixteen letters"},
            r"secret .*16 bytes .*secrets\.token_bytes\(32\)",
        ),
        ({"weights": [1.0, -1.0]}, r"weights .*0.* got \[1\.0, -1\.0\]"),
        ({"weights": [0.0, 0.0]}, r"weights .*0.* got \[0\.0, 0\.0\]"),
        ({"weights": [1.0, math.nan]}, r"weights .*0.* got \[1\.0, nan\]"),
    ],
)
def test_numbers_that_do_not_work(change: dict[str, Any], words: str):
    """Said where they come in; never the secret itself."""
    with pytest.raises(ValueError, match=words) as caught:
        ClientPrivacy(**{"clip": 1.0, "noise_multiplier": 1.0, **change})
    assert "short" not in str(caught.value)


def test_pools_and_methods_that_do_not_fit(model: nn.Module, clients: FederatedData):
    """By block and by pool."""
    clipped = replace(fedavg(model), blocks={"w": bf.Block(pool=Clipped(Mean(), 1.0))})
    for made, words in (
        (bf.algorithms.local(model), r"sends none: .*aggregation"),
        (clipped, r"block 'w' .*Clipped; ClientPrivacy .*pool=Mean\(\)"),
    ):
        with pytest.raises(ValueError, match=words):
            privately(made, clients, ClientPrivacy(clip=1.0, noise_multiplier=1.0))


def test_what_epsilon_leaves_out_does_not_choose(model: nn.Module, clients: FederatedData):
    """Clients' validation data neither end a run nor calibrate its model by sums without noise; a
    budget may end it, and what each client fits alone may follow.
    """
    rule = ClientPrivacy(clip=1.0, noise_multiplier=2.0)
    for keep in ("last", "best"):
        stop = bf.callbacks.EarlyStopping("personal_nll", keep=keep)
        with pytest.raises(ValueError, match=r"epsilon does not cover.*run\.history\['epsilon'\]"):
            privately(fedavg(model), clients, rule, on_round=[stop])
    budget = privately(fedavg(model), clients, rule, rounds=1).history["epsilon"][0] + 1e-9
    spent = [lambda found: found.history["epsilon"][-1] > budget]
    assert privately(fedavg(model), clients, rule, on_round=spent).round == 2
    best = [lambda found: found.history["personal_nll"][-1] < 9]
    with pytest.raises(KeyError, match="no column 'personal_nll'") as caught:
        privately(fedavg(model), clients, rule, on_round=best)
    assert vars(caught.value)["result"].history["cohort"][0] >= 0
    found = privately(fedavg(model), clients, rule)
    for ask in (lambda: found.survey(bf.calibration.Temperature(split="test")), found.audit):
        with pytest.raises(ValueError, match="asks clients for sums"):
            ask()
    with pytest.raises(ValueError, match="drawn by ClientPrivacy from its secret"):
        found.took_part(1)
    for step in (bf.calibration.Temperature(split="test"), bf.calibration.Conformal(split="test")):
        with pytest.raises(ValueError, match=r"asks clients for sums .*epsilon .*Bias\(var"):
            found.calibrate(step)
    with pytest.warns(UserWarning, match="which evaluates the result"):
        assert len(found.calibrate(bf.calibration.Bias(split="test", variance=1.0)).steps) == 1
    tuned = replace(fedavg(model), predictor=LinearisedLaplace(block="w"))
    with pytest.raises(ValueError, match="asks clients for sums"):
        privately(tuned, clients, rule)
    with pytest.raises(ValueError, match="sums, which ClientPrivacy does not cover"):
        privately(replace(fedavg(model), predictor=PooledLaplace()), clients, rule)


def test_norms_whose_statistics_would_be_sent(clients: FederatedData):
    """They are refused with three remedies, each of which is taken; dropout is free."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.5)
    options = {"rounds": 2, "participation": 0.5}
    model, still = with_batch_norm(dropout=0.3), with_batch_norm(dropout=0.3)
    for made in (
        fedavg(model),
        with_server_optimiser(fedavg(model), SGD(1.0)),
        bf.algorithms.fedper(model),
    ):
        with pytest.raises(ValueError, match=r"_buffers' .*group_norm\(model\).*eval mode.*fedbn"):
            privately(made, clients, rule, **options)
    still.get_submodule("body.1").eval()
    for made in (
        fedavg(bf.models.group_norm(model)),
        fedavg(still),
        bf.algorithms.fedbn(model, epochs=1),
    ):
        assert privately(made, clients, rule, **options).history["releases"].tolist() == [1, 2]
