"""Who takes part by a rule of the user's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.study.settings import in_words
from tests.federation.made import METHODS, of_client, power_of_choice, reporting, run, same


def half(round: int, rng: np.random.Generator, known: Mapping[str, Any]) -> Any:
    """Two of those who are there: in odd rounds the even ones."""
    there = [j for j in range(len(known["n"])) if (j + round) % 2]
    return rng.choice(there, 2, replace=False)


@pytest.fixture(scope="module")
def fedavg(model: nn.Module) -> bf.Algorithm:
    return bf.algorithms.fedavg(model, **METHODS["fedavg"])


def took_part(result: Result) -> list[list[int]]:
    names = result.data.client_names
    rounds = range(1, result.round + 1)
    return [[names.index(name) for name in result.took_part(round)] for round in rounds]


def test_clients_that_are_there(fedavg: bf.Algorithm, clients: FederatedData):
    """Rounds count from 1, and draws have the address of cohorts."""
    result = run(fedavg, clients, rounds=3, sampling=half, evaluate_every=None)
    there = [[0, 2, 4, 6], [1, 3, 5], [0, 2, 4, 6]]
    drawn = [
        generator(3, Purpose.COHORT, round=round).choice(ids, 2, replace=False)
        for round, ids in enumerate(there)
    ]
    assert took_part(result) == [sorted(ids.tolist()) for ids in drawn]


def test_the_largest_loss_is_chosen(fedavg: bf.Algorithm, clients: FederatedData):
    """The rule is given what clients last reported: their losses at the model of that round."""
    method = reporting(fedavg)
    seen: list[Any] = []

    def watched(round: int, rng: np.random.Generator, known: Mapping[str, Any]) -> Any:
        seen.append({name: values.copy() for name, values in known.items()})
        return power_of_choice(round, rng, known)

    servers = [method.init(7, seed=3, dtype=torch.float64)]
    options: dict[str, Any] = {"rounds": 5, "evaluate_every": None}
    keep = [lambda found: servers.append(found.server)]
    result = run(method, clients, sampling=watched, on_round=keep, **options)
    last, loss = np.zeros(7), np.full(7, np.nan)
    for round, cohort in enumerate(took_part(result)):
        for name, wanted in {"n": clients.train.counts, "round": last, "loss": loss}.items():
            np.testing.assert_array_equal(seen[round][name], wanted)
        rng = generator(3, Purpose.COHORT, round=round)
        assert cohort == sorted(power_of_choice(round + 1, rng, seen[round]))
        for j in cohort:
            x, y = clients.train.client(j)
            leaves = method.leaves(("w",), servers[round])
            given = {"x": x.double(), "y": y}
            last[j], loss[j] = round + 1, method.losses(leaves, given).mean().item()
        assert_close(result.history.clients("known_loss")[round], loss, equal_nan=True)
        loss = result.history.clients("known_loss")[round].copy()
        assert result.history.clients("known_round")[round].tolist() == last.tolist()
    bare = run(fedavg, clients, sampling=half, **options)
    assert (result.history["bytes_up"] - bare.history["bytes_up"] == 2 * 8).all()  # two float64


def test_a_run_goes_on(fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path):
    """To the bit, also from a file, with a client that is lost; another rule is refused."""
    method = reporting(fedavg)
    options: dict[str, Any] = {
        "sampling": power_of_choice,
        "faults": of_client(3, 0, bf.faults.Lost()),
    }
    whole = run(method, clients, rounds=4, **options)
    assert (took_part(whole)[0], whole.history.absent) == ([4], {1: [3]})
    assert whole.history.clients("known_round")[0].tolist() == [0, 0, 0, 0, 1, 0, 0]
    two = run(method, clients, rounds=2, **options)
    two.save(tmp_path / "run")
    for resume in (two, tmp_path / "run"):
        again = run(method, clients, rounds=4, resume=resume, **options)
        assert same(again, whole)
        assert took_part(again) == took_part(whole)
    assert took_part(bf.load(tmp_path / "run", method, clients)) == took_part(two)
    with pytest.raises(ValueError, match=r"sampling.*power_of_choice.*half"):
        run(method, clients, rounds=4, resume=two, sampling=half)
    with pytest.raises(ValueError, match="sampling"):
        run(method, clients, rounds=4, resume=tmp_path / "run", participation=0.3)


@pytest.mark.slow
def test_a_report_and_a_study_name_it(fedavg: bf.Algorithm, clients: FederatedData, tmp_path: Path):
    result = run(fedavg, clients, rounds=1, sampling=half, evaluate_every=None)
    result.save(tmp_path / "run")
    for found in (result, bf.load(tmp_path / "run", fedavg, clients)):
        assert found.settings.drawn == f"drawn by {__name__}.half"
        assert in_words(found)["participation"] == f"drawn by {__name__}.half (cohort trains)"
    bf.load(tmp_path / "run", fedavg).report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"drawn by {__name__}.half" in page
    assert "As recorded" not in page


@pytest.mark.parametrize(
    ("found", "options", "words"),
    [
        ([7], {}, "must return numbers of clients, 0 to 6"),
        ([-1], {}, "must return numbers of clients, 0 to 6"),
        ([0.5], {}, "must return numbers of clients, 0 to 6"),
        ([0], {"participation": 0.5}, "participation has no effect where the sampling is a fun"),
        (
            [0],
            {"aggregation": bf.ClientPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-2)},
            "ClientPrivacy draws its own cohorts",
        ),
    ],
)
def test_what_does_not_fit(
    found: Any, options: dict[str, Any], words: str, fedavg: bf.Algorithm, clients: FederatedData
):
    with pytest.raises(ValueError, match=words):
        run(fedavg, clients, sampling=lambda round, rng, known: found, **options)


def test_a_sum_hides_reports(fedavg: bf.Algorithm, clients: FederatedData):
    """The error says what the server knows; a rule that needs no report works."""
    options: dict[str, Any] = {"aggregation": bf.SecureSum(), "rounds": 2}
    with pytest.raises(KeyError, match="loss") as error:
        run(reporting(fedavg), clients, sampling=power_of_choice, **options)
    assert "`known` has ['n', 'round']" in error.value.__notes__[0]
    hidden = run(fedavg, clients, sampling=half, **options)
    assert took_part(hidden) == took_part(run(fedavg, clients, rounds=2, sampling=half))


def test_nobody_is_there(fedavg: bf.Algorithm, clients: FederatedData):
    """The round is skipped, and what the server knows stays."""
    result = run(fedavg, clients, rounds=3, sampling=lambda round, rng, known: [2] * (round != 2))
    assert took_part(result) == [[2], [], [2]]
    assert result.history.clients("known_round")[:, 2].tolist() == [1, 1, 3]


def test_all_train_where_nobody_sends(clients: FederatedData, model: nn.Module):
    """L2GD: the mean of the models stays, and each client goes on, also after a break."""

    def odd(round: int, rng: np.random.Generator, known: Mapping[str, Any]) -> Any:
        return range(7) if round % 2 else []

    made = bf.algorithms.l2gd(model)
    options: dict[str, Any] = {"sampling": odd, "evaluate_every": None}
    first, second = (run(made, clients, rounds=rounds, **options) for rounds in (1, 2))
    assert torch.equal(first.server["x"]["loc"], second.server["x"]["loc"])
    moved = (first.private["x"]["loc"] - second.private["x"]["loc"]).abs().amax(1)
    assert float(moved.min()) > 0
    assert took_part(second) == [list(range(7)), []]
    assert second.history["bytes_up"][1] == second.history["lost"][1] == 0
    again = run(made, clients, rounds=2, resume=first, **options)
    assert_close(again.private["x"]["loc"], second.private["x"]["loc"], atol=0, rtol=0)
