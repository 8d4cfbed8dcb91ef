"""Clients that fail: each round is as it would have been without them, and what was refused is said
by name.
"""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.admission import PROTOCOL, Admission
from bayesfl.federation.rounds.faults import FAULTS, at_random
from tests.federation.made import METHODS, run, same_bits, state, without

WORDS = {
    "lost": "did not reply",
    "stale": "round 1, not round 2",
    "protocol": f"protocol {PROTOCOL + 1}, .*server {PROTOCOL}",
    "missing": "are missing",
    "extra": r"\['more'\] .*not declared",
    "shape": "declared as",
    "dtype": "float16",
    "larger": "declared as",
    "nan": "is not finite",
    "infinite": "is not finite",
    "far": r"its distance .* more than",
}


@pytest.mark.parametrize("kind", list(FAULTS))
@pytest.mark.parametrize(
    "method",
    ["ditto", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "ditto")],
)
def test_a_round_without_the_client(
    method: str,
    kind: str,
    model: nn.Module,
    clients: FederatedData,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Its reply is refused with the reason, its own state is that of its last accepted round, all
    others go on as without it.
    """
    algorithm = getattr(bf.algorithms, method)(model, **METHODS[method])
    with caplog.at_level(logging.WARNING, logger="bayesfl"):
        result = run(
            algorithm,
            clients,
            train="cohort",
            faults=lambda round, attempt, ids: {4: FAULTS[kind]} if round == 1 else {},
        )
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("round 2: client 4 ")

    assert re.search(WORDS[kind], said)
    assert [result.history[name].tolist() for name in ("cohort", "lost", "rejected")] == [
        [7, 6, 7],
        [0, int(kind == "lost"), 0],
        [0, int(kind != "lost"), 0],
    ]
    without(4, 1, monkeypatch)
    assert_close(state(result), state(run(algorithm, clients, train="cohort")), atol=1e-12, rtol=0)


@pytest.mark.slow
def test_a_long_bad_time(model: nn.Module, clients: FederatedData, tmp_path: Any):
    """Faults of every kind at random: kernels and chunks agree, and a run stopped in between goes
    on to the same bits.
    """
    algorithm = bf.algorithms.pfedvem(model, **METHODS["pfedvem"])
    options: dict[str, Any] = {
        "rounds": 10,
        "participation": 0.7,
        "faults": at_random(0.3, seed=1),
        "evaluate_every": 5,
        "admission": bf.Admission("skip", min_clients=2),
    }
    whole = run(algorithm, clients, **options)
    assert np.nansum(whole.history["lost"]) > 0
    assert np.nansum(whole.history["rejected"]) > 5
    assert_close(
        state(whole),
        state(run(algorithm, clients, engine=bf.Engine("reference", chunk=2), **options)),
        atol=1e-6,
        rtol=0,
    )
    run(algorithm, clients, checkpoint=tmp_path / "run", **(options | {"rounds": 6}))
    again = run(algorithm, clients, checkpoint=tmp_path / "run", **options)
    assert same_bits(state(again), state(whole))
    assert np.array_equal(
        again.history["uplink_norm"], whole.history["uplink_norm"], equal_nan=True
    )


def test_faults_need_rules_that_skip(model: nn.Module, clients: FederatedData):
    """The first of them would stop the run."""
    with pytest.raises(ValueError, match=r"faults need admission=Admission\('skip'\)"):
        run(
            bf.algorithms.fedavg(model), clients, faults=at_random(0.1), admission=Admission("stop")
        )


def test_plans_that_do_not_work():
    """A share that is none, kinds that are not there."""
    with pytest.raises(ValueError, match=r"^share .*\[0, 1\], got 1\.5"):
        at_random(1.5)
    with pytest.raises(KeyError, match="late"):
        at_random(0.1, kinds=("late",))


def test_what_cannot_be(
    model: nn.Module, clients: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Refused before anything is trained, by name."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    monkeypatch.chdir(tmp_path)
    for options, error, words in (
        ({"admission": "skip"}, TypeError, "admission .*Admission, got str"),
        ({"admission": Admission(min_clients=8)}, ValueError, "min_clients .*7.* got 8"),
        (
            {"admission": Admission(min_clients=5), "participation": 0.7},
            ValueError,
            "min_clients .*4.* got 5.*participation",
        ),
        ({"checkpoint": 3}, TypeError, "^checkpoint must name a folder.*got 3"),
        *(
            ({name: ""}, ValueError, f"^{name} must name a folder.*got ''")
            for name in ("checkpoint", "resume", "start")
        ),
    ):
        with pytest.raises(error, match=words):
            run(algorithm, clients, **options)
    assert not list(tmp_path.iterdir())
