"""What is called after each round: stopping early, keeping the best state, records for other
programs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.evaluation.history import History
from bayesfl.federation.run.callbacks import EarlyStopping
from bayesfl.federation.settings import Settings
from bayesfl.optim import SGD
from tests.federation.made import run, same, state


class Told:
    """A run so far, of which only the settings and the history are known."""

    settings = Settings(9, 1.0, "fixed", "cohort", 0, 1)

    def __init__(self, values: list[float | None]) -> None:
        self.round = len(values)
        rows = [
            {"round": at + 1, **({} if value is None else {"validation_nll": value})}
            for at, value in enumerate(values)
        ]
        self.history = History(rows)


@pytest.fixture(scope="module")
def parted() -> FederatedData:
    return bf.data.concept_drift("digits", clients=4, seed=0, validation=0.2)


@pytest.fixture(scope="module")
def method(parted: FederatedData) -> bf.Algorithm:
    return bf.algorithms.ditto(
        bf.models.mlp(parted.inputs, hidden=8, outputs=parted.outputs),
        epochs=1,
        batch_size=20,
        optimiser=SGD(0.3),
    )


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([1.0, 0.9, None, None, None, 0.95], {}, False),
        ([1.0, 0.9, None, 0.95, None, 0.9], {}, True),
        ([1.0, 0.9, 0.95, 0.8], {}, False),
        ([1.0, float("nan"), float("nan")], {}, False),
        ([1.0, 0.9, 0.8], {"lowest": False}, True),
        ([None], {}, False),
    ],
)
def test_patience_counts_evaluations_without_a_better_value(
    values: list[float | None], options: dict[str, Any], stops: bool
):
    """Rounds without a value do not count; a value that is not finite is none; smaller is better
    for a loss, unless it is said.
    """
    assert EarlyStopping("validation_nll", patience=2, **options)(Told(values)) == stops


def test_a_run_ends_early_and_goes_on_with_its_patience(
    method, parted: FederatedData, tmp_path: Path
):
    """Patience is in the history: stopped in between and resumed, the run ends in the same round
    and state; ended, it stays so.
    """

    def patient(rounds: int, **options: Any) -> Any:
        stop = EarlyStopping("validation_nll", patience=3)
        return run(method, parted, rounds=rounds, evaluate_every=1, on_round=[stop], **options)

    whole = patient(40)
    values = whole.history["validation_nll"]
    assert 4 <= whole.round == len(values) < 40
    assert values.argmin() == whole.round - 4
    for rounds in (whole.round - 2, 40, 40):
        again = patient(rounds, checkpoint=tmp_path, every=4)
    assert again.round == whole.round
    assert_close(state(again), state(whole), atol=0, rtol=0)


@pytest.mark.slow
def test_the_best_state_is_returned(method, parted: FederatedData, tmp_path: Path):
    """That of the run which ends there, with its history; from memory or, resumed, from its folder;
    else the last, with a warning.
    """

    def best(folder: Path | None = None, rounds: int = 40, **options: Any) -> Any:
        stop = EarlyStopping("validation_nll", patience=3, keep="best", folder=folder)
        return run(method, parted, on_round=[stop], evaluate_every=1, rounds=rounds, **options)

    found = best()
    told = run(method, parted, rounds=found.round, evaluate_every=1)
    assert same(found, told)
    found.save(tmp_path / "saved")
    assert bf.load(tmp_path / "saved", method, parted).round == found.round
    best(tmp_path / "best", found.round + 1, checkpoint=tmp_path / "run")
    again = best(tmp_path / "best", checkpoint=tmp_path / "run")
    assert_close(state(again), state(found), atol=0, rtol=0)
    with pytest.warns(UserWarning, match=rf"from round {found.round}.*folder="):
        last = best(checkpoint=tmp_path / "run")
    assert last.round == found.round + 3


def test_what_is_refused(model, clients: FederatedData):
    for options, words in (
        ({"patience": 0}, "patience"),
        ({"keep": "first"}, "'first'"),
        ({"folder": "x"}, r"folder .*'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            EarlyStopping("validation_nll", **options)
    for callbacks, options, error, words in (
        ([EarlyStopping("validation_nll")], {}, KeyError, "validation_nll"),
        ([EarlyStopping("nonsense")], {"evaluate_every": None}, KeyError, "nonsense"),
        (print, {}, TypeError, "not iterable"),
        *((one, {}, TypeError, "on_round") for one in ("print", [3], [EarlyStopping])),
    ):
        with pytest.raises(error, match=words):
            run(bf.algorithms.fedavg(model, epochs=1), clients, on_round=callbacks, **options)


def test_the_best_state_is_that_of_its_own_run(model, clients: FederatedData, tmp_path: Path):
    """A callback or a folder that has served another run gives nothing of it: the last state, with
    a warning.
    """
    method = bf.algorithms.fedavg(model, epochs=1)
    used = EarlyStopping("personal_nll", keep="best", folder=tmp_path, lowest=False)
    run(method, clients, on_round=[used])
    other = run(method, clients, seed=8, rounds=2)
    with pytest.warns(UserWarning, match="is lost"):
        found = run(method, clients, seed=8, rounds=2, resume=other, on_round=[used])
    assert_close(state(found), state(other), atol=0, rtol=0)
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="holds the run's checkpoints"):
        run(
            method,
            clients,
            checkpoint=folder,
            on_round=[EarlyStopping("personal_nll", keep="best", folder=folder)],
        )


@pytest.mark.parametrize(
    ("answers", "rounds"),
    [
        ([np.bool_(True)], 1),
        ([torch.tensor(True)], 1),
        ([True], 1),
        (["yes", 1], 3),
        ([True, "a word"], 1),
    ],
)
def test_any_truth_value_ends_a_run(answers: list[Any], rounds: int, model, clients: FederatedData):
    """As numpy and torch give it for a comparison of numbers; other answers do not. Every one is
    called after every round, also where another ends the run.
    """
    seen: list[int] = []

    def answering(answer: Any) -> Any:
        def told(result: Any) -> Any:
            seen.append(len(result.history))
            return answer

        return told

    method = bf.algorithms.fedavg(model, epochs=1)
    result = run(method, clients, on_round=[answering(answer) for answer in answers])
    assert result.round == rounds
    assert seen == [round + 1 for round in range(rounds) for _ in answers]


def test_a_snapshot_stays_as_it_was(model, clients: FederatedData):
    """What a callback is given goes on with the run; its snapshot does not."""
    kept: list[Any] = []
    method = bf.algorithms.ditto(model, epochs=1, batch_size=10)
    run(method, clients, on_round=[lambda result: kept.append(bf.callbacks.snapshot(result))])
    told = run(method, clients, rounds=1)
    assert_close(state(kept[0]), state(told), atol=0, rtol=0)
    assert [len(one.history) for one in kept] == [1, 2, 3]


def test_an_error_of_a_measure_loses_nothing(model, clients: FederatedData):
    """It names the measure and the client, and carries the run."""
    with pytest.raises(ZeroDivisionError) as error:
        run(bf.algorithms.fedavg(model, epochs=1), clients, measures={"broken": lambda p, y: 1 / 0})
    assert "'broken' for client 0" in error.value.__notes__[0]
    assert error.value.result.round == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_run_ended_between_evaluations_is_measured(
    method, parted: FederatedData, tmp_path: Path, keep: Any
):
    """As the last round of any run is; callbacks and the checkpoint have the measures, and the best
    state may be this one.
    """
    best = EarlyStopping("validation_nll", patience=9, keep=keep)
    options: dict[str, Any] = {"evaluate_every": 2, "checkpoint": tmp_path / "run", "every": 5}
    callbacks = [best, lambda result: result.round == 3]
    found = run(method, parted, rounds=9, on_round=callbacks, **options)
    assert found.round == 3
    found_row, told_row = (
        {
            name: value
            for name, value in result.history[-1].items()
            if name.startswith(("personal_", "global_", "validation_"))
        }
        for result in (found, run(method, parted, rounds=3, evaluate_every=2))
    )
    assert found_row == told_row
    assert bf.load(tmp_path / "run", method, parted).history.rows == found.history.rows
    unmeasured = run(
        method, parted, rounds=9, evaluate_every=None, on_round=[lambda result: result.round == 3]
    )
    assert not [name for name in unmeasured.history.columns if name.startswith("personal_")]


def test_a_run_that_was_ended_stays_so(model, clients: FederatedData, tmp_path: Path):
    """Resumed, it first asks every callback about the round that it goes on from; without the one
    that ended it, it goes on.
    """
    method, seen = bf.algorithms.fedavg(model, epochs=1, batch_size=10), []
    options: dict[str, Any] = {"rounds": 4, "checkpoint": tmp_path}

    def low(result: Any) -> bool:
        seen.append(result.round)
        return result.round >= 2

    once = run(method, clients, on_round=[low], **options)
    again = run(method, clients, on_round=[low], **options)
    assert (once.round, again.round, seen) == (2, 2, [1, 2, 2])
    assert same(again, once)
    assert same(run(method, clients, **options), run(method, clients, rounds=4))


def test_an_error_of_a_callback_loses_nothing(model, clients: FederatedData):
    """It carries the run so far."""

    def fail(result: Any) -> None:
        if result.round == 2:
            raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network") as error:
        run(bf.algorithms.fedavg(model, epochs=1), clients, on_round=[fail])
    assert error.value.result.round == 2  # type: ignore[attr-defined]
    assert "after round 2" in error.value.__notes__[0]


def test_measures_of_ones_own_are_columns(parted: FederatedData, method):
    """Of every split that is measured, as means over clients; one that is undefined for a client
    leaves it out.
    """

    def errors(predictions: Any, labels: torch.Tensor) -> torch.Tensor:
        return (predictions.probs.argmax(-1) != labels).double().mean()

    def of_some(predictions: Any, labels: torch.Tensor) -> float:
        return float("nan") if len(labels) < sizes.max() else 1.0

    sizes = parted.test.counts
    result = run(method, parted, measures={"errors": errors, "of_some": of_some})
    for prefix in ("personal", "validation", "global", "before_pool"):
        np.testing.assert_allclose(
            result.history[f"{prefix}_errors"], 1 - result.history[f"{prefix}_accuracy"], atol=1e-12
        )
    assert (result.history["personal_of_some"] == 1).all() or np.isnan(
        result.history["personal_of_some"]
    ).all()


@pytest.mark.parametrize(
    ("measures", "error", "words"),
    [
        ({"F2": lambda p, y: 0.0}, ValueError, "'F2'"),
        ({"f2": 3}, TypeError, "'f2'"),
        ({"nll": lambda p, y: 0.0}, ValueError, r"\['nll'\]"),
        ({"f2": lambda p, y: "a"}, ValueError, "'a'"),
        ({"f2": lambda p, y: p.probs}, ValueError, "'f2'"),
    ],
)
def test_bad_measures_are_refused(
    model, clients: FederatedData, measures: Any, error: type, words: str
):
    with pytest.raises(error, match=words):
        run(bf.algorithms.fedavg(model, epochs=1), clients, measures=measures)
