"""Whole private runs: cohorts, secrets, what the history says, and how they go on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.private.privacy import ClientPrivacy, epsilon, epsilon_own
from bayesfl.federation.rounds.admission import Admission
from tests.federation.made import OTHER, SECRET, fedavg, privately, same

pytest.importorskip("dp_accounting", reason="dp-accounting is an extra")


def cohorts(
    clients: FederatedData,
    model: nn.Module,
    p: float,
    secret: bytes | None,
    rounds: int = 2000,
    **more: Any,
) -> np.ndarray:
    """[rounds, J], true where a client is in."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0, secret=secret)
    result = privately(fedavg(model), clients, rule, rounds=1, participation=p, **more)
    aggregator = rule.start(result, Admission(), every=None, repeats=0)
    found = np.zeros((rounds, 7), bool)
    for k in range(rounds):
        found[k, aggregator.cohort(k)] = True
    return found


def test_cohorts_are_poisson(model: nn.Module, clients: FederatedData):
    """Each client with the same probability, independently, nobody drawn again: sizes are binomial,
    empty ones included.
    """
    found = cohorts(clients, model, 0.3, SECRET)
    assert np.abs(found.mean(0) - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / 2000)
    sizes = np.bincount(found.sum(1), minlength=8) / 2000
    wanted = binom(7, 0.3).pmf(np.arange(8))
    assert (np.abs(sizes - wanted) < 5 * np.sqrt(wanted / 2000) + 1e-3).all()
    assert sizes[0] > 0.05
    assert np.abs(np.corrcoef(found.T) - np.eye(7)).max() < 5 / math.sqrt(2000)
    assert abs(np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]) < 0.03
    assert cohorts(clients, model, 1.0, SECRET, 3).all()


def test_cohorts_come_from_the_secret_alone(model: nn.Module, clients: FederatedData):
    """The seed that clients know changes nothing; without a secret every run has its own."""
    one = cohorts(clients, model, 0.5, SECRET, 100, seed=1)
    assert np.array_equal(one, cohorts(clients, model, 0.5, SECRET, 100, seed=2))
    for secret in (OTHER, None):
        assert 0.3 < (one != cohorts(clients, model, 0.5, secret, 100, seed=1)).mean() < 0.7
    assert not np.array_equal(*(cohorts(clients, model, 0.5, None, 100, seed=1) for _ in range(2)))
    settings = privately(
        fedavg(model), clients, ClientPrivacy(clip=1.0, noise_multiplier=0), rounds=1
    ).settings
    assert settings.sampling == "poisson"
    with pytest.raises(ValueError, match=r"poisson .*ClientPrivacy .*aggregation"):
        settings.cohort(7, 0)


def test_rounds_of_nobody(model: nn.Module, clients: FederatedData):
    """Are rounds of noise, and count; there is nothing to measure before the pool."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=1.0, secret=SECRET)
    found = privately(fedavg(model), clients, rule, participation=1e-9, evaluate_every=1)
    assert [found.history[name].tolist() for name in ("cohort", "releases", "bytes_up")] == [
        [0, 0, 0],
        [1, 2, 3],
        [0, 0, 0],
    ]
    assert "before_pool_accuracy" not in found.history.columns
    assert found.history["personal_accuracy"].shape == (3,)
    start = fedavg(model).init(7, seed=3, dtype=torch.float64)["w"]["loc"]
    moved = float((found.server["w"]["loc"] - start).std())
    assert moved == pytest.approx(math.sqrt(3) / (1e-9 * 7), rel=0.2)


def test_clients_own_measures_are_refused(model: nn.Module, clients: FederatedData):
    """No noise covers them; before anything is trained."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=1.0, secret=SECRET)
    with pytest.raises(ValueError, match=r"record_clients .*epsilon .*under ClientPrivacy"):
        privately(fedavg(model), clients, rule, evaluate_every=1, record_clients=("nll",))


def test_the_history(model: nn.Module, clients: FederatedData):
    """What is spent so far, by both accounts, and nothing that clients would have to send."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.8, delta=1e-4)
    history = privately(fedavg(model), clients, rule, participation=0.4).history
    for k in (1, 2, 3):
        row, known = history.rows[k - 1], {"noise_multiplier": 0.8, "releases": k, "delta": 1e-4}
        assert (row["epsilon"], row["epsilon_own"], row["releases"]) == (
            epsilon(**known, participation=0.4),
            epsilon_own(**known),
            k,
        )
    assert np.isnan(history["train_nll"]).all()
    assert not [
        column
        for column in history.columns
        if "accuracy" in column or "norm" in column.removeprefix("seconds_")
    ]


def test_a_secret_makes_a_run_repeatable_and_is_told_nowhere(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Not in the rule's text, the settings, or any byte that is written."""
    secret = b"never to be seen outside"
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.5, secret=secret, weights=range(1, 8))
    one = privately(fedavg(model), clients, rule, checkpoint=tmp_path / "rounds")
    assert same(one, privately(fedavg(model), clients, rule, engine=bf.Engine(chunk=3, workers=2)))
    assert not same(one, privately(fedavg(model), clients, replace(rule, secret=OTHER)))
    one.save(tmp_path / "saved")
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) == 4  # a lock, two checkpoints, a result
    for text in (*written, repr(rule).encode(), rule.name.encode(), repr(one.settings).encode()):
        assert b"never" not in text
        assert secret.hex().encode() not in text
    fresh = [privately(fedavg(model), clients, replace(rule, secret=None)) for _ in range(2)]
    assert not same(*fresh)


@pytest.mark.parametrize("through", ["file", "memory"])
def test_resume(through: str, model: nn.Module, clients: FederatedData, tmp_path: Path):
    """The same secret: the same bits, history included. None: fresh noise, and the releases go on
    being counted.
    """
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.5, secret=SECRET)
    whole = privately(fedavg(model), clients, rule, rounds=4, participation=0.5)
    half = privately(fedavg(model), clients, rule, rounds=2, participation=0.5)
    half.save(tmp_path / "half")
    resume = tmp_path / "half" if through == "file" else half
    assert same(
        whole, privately(fedavg(model), clients, rule, rounds=4, participation=0.5, resume=resume)
    )
    fresh = [
        privately(
            fedavg(model),
            clients,
            replace(rule, secret=None),
            rounds=4,
            participation=0.5,
            resume=resume,
        )
        for _ in range(2)
    ]
    assert not same(*fresh)
    for result in fresh:
        assert result.history["releases"].tolist() == [1, 2, 3, 4]
        assert result.history["epsilon"].tolist() == whole.history["epsilon"].tolist()
    for other in (
        replace(rule, noise_multiplier=0.6),
        replace(rule, clip=2.0),
        replace(rule, weights=(2.0,) * 7),
        None,
    ):
        with pytest.raises(ValueError, match=r"keeps its settings.*ClientPrivacy\("):
            privately(fedavg(model), clients, other, rounds=4, participation=0.5, resume=resume)


def test_rounds_done_again_are_releases(model: nn.Module, clients: FederatedData, tmp_path: Path):
    """Where the newest checkpoint is damaged, its round had left the server, and is done again."""
    rule = ClientPrivacy(clip=1.0, noise_multiplier=0.5)
    privately(fedavg(model), clients, rule, rounds=3, checkpoint=tmp_path)
    newest = tmp_path / "round-000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="is damaged"):
        again = privately(fedavg(model), clients, rule, rounds=4, checkpoint=tmp_path)
    assert again.history["releases"].tolist() == [1, 2, 4, 5]
    wanted = epsilon(noise_multiplier=0.5, participation=1.0, releases=5, delta=1e-5)
    assert again.history["epsilon"][-1] == wanted
