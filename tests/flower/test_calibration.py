"""Calibration over a network: the simulation's, to the nodes' own parameters; clients that are lost
on the way; who is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Abstention, Bias, Conformal, Temperature
from bayesfl.federation.run.result import Result
from bayesfl.flower import BadClients, Deployed, load, node
from bayesfl.likelihoods import Gaussian, Quantiles
from bayesfl.optim import SGD
from tests.flower.grid import Alter
from tests.flower.made import (
    asked,
    deploy,
    grid_of,
    predictions,
    simulated,
    trains,
    waits,
)

STEPS = (Temperature(strength=5.0), Bias(), Conformal(score="aps", shrink=5.0))


@pytest.fixture(scope="module")
def parted() -> FederatedData:
    return bf.data.dirichlet(
        "digits", clients=4, alpha=0.5, validation=0.2, calibration=0.2, seed=1, max_size=120
    )


@pytest.fixture(scope="module")
def method(parted: FederatedData) -> bf.Algorithm:
    return bf.algorithms.fedavg(
        bf.models.mlp(parted.inputs, hidden=8, outputs=10),
        epochs=5,
        batch_size=20,
        optimiser=SGD(0.1, momentum=0.9),
    )


def kept(folder: Path, found: Deployed, client: int) -> Path:
    return folder / f"node-{100 + client}" / found.experiment / f"client-{client}"


def mute(client: int, later: bool = False) -> Alter:
    """A client whose answers to surveys do not arrive, or those to further questions."""
    return lambda who, message, reply: (
        None
        if who == client
        and message.metadata.message_type == "query.survey"
        and not (later and asked(message, "whole"))
        else reply
    )


def surveys(grid: Any) -> list[Message]:
    return [message for message in grid.sent if message.metadata.message_type == "query.survey"]


def assert_as(found: Deployed, sim: Result) -> None:
    """What the steps found is the simulation's: the temperature nearly, counts exactly."""
    for one, other in zip(found.steps, sim.steps, strict=True):
        for name, t in other.state.items():
            assert_close(one.state[name], t, atol=0 if name == "counts" else 1e-9, rtol=0)


@pytest.mark.slow
def test_the_best_state_is_kept_with_what_was_told(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    """In its folder, with the measures of calibrated predictions; a server that is started again
    finds it there, and asks for nothing.
    """
    options: dict[str, Any] = {"calibration": STEPS, "rounds": 9, "evaluate_every": 1}
    options |= {"checkpoint": tmp_path / "server"}
    for _ in range(2):
        best = bf.callbacks.EarlyStopping(
            "validation_nll", patience=2, keep="best", folder=tmp_path / "best", lowest=False
        )
        grid = grid_of(method, parted, tmp_path, calibration=STEPS)
        found = deploy(method, parted, tmp_path, grid, on_round=[best], **options)
        there = load(tmp_path / "best", method)
        assert there.round == found.round == 1
        assert [type(one.step) for one in there.steps] == [type(step) for step in STEPS]
        assert there.history.rows == found.history.rows
        assert "calibrated_nll" in there.history.columns
    assert not surveys(grid)
    assert not [w for w in recwarn if "its state is lost" in str(w.message)]


def test_calibration_is_the_simulations(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path
):
    """Temperature, counts, own parameters, sets, and the measures; the clients' files predict with
    them.
    """
    sim = simulated(method, parted).calibrate(*STEPS)
    expected = sim.predict()
    found = deploy(method, parted, tmp_path, calibration=STEPS, checkpoint=tmp_path / "server")
    for one in (found, load(tmp_path / "server", method)):
        assert_as(one, sim)
    for j in range(4):
        tensors = predictions(found, tmp_path, j)
        assert_close(tensors["probs"], expected.client(j).probs, atol=1e-9, rtol=0)
        assert torch.equal(tensors["sets"], expected.client(j).sets)
        model = bf.load_client(kept(tmp_path, found, j), method)
        assert_close(
            model.steps[0].own["temperature"],
            sim.steps[0].own["temperature"][j : j + 1],
            atol=1e-8,
            rtol=0,
        )
        assert torch.equal(model.predict(parted.test.client(j)[0]).sets, expected.client(j).sets)
    last, summary = found.history[-1], expected.summary(parted.test)
    for name in ("nll", "coverage", "set_size"):
        assert last[f"calibrated_{name}"] == pytest.approx(summary[name], abs=1e-8)
    assert last["personal_nll"] == pytest.approx(
        simulated(method, parted).predict().summary(parted.test)["nll"], abs=1e-8
    )


def test_a_client_predicts_once(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first question brings the model, further ones have numbers alone; predictions of a split
    are made once.
    """
    made: list[int] = []
    real = node.of_chunk

    def counted(local: Any, done: Any, splits: Any, **options: Any) -> Any:
        made.extend(int(split.counts.sum()) for split in splits)
        return real(local, done, splits, **options)

    monkeypatch.setattr(node, "of_chunk", counted)
    grid = grid_of(method, parted, tmp_path, calibration=STEPS)
    deploy(method, parted, tmp_path, grid, calibration=STEPS)
    names = ("validation", "calibration", "test")
    assert sorted(made) == sorted(int(n) for name in names for n in parted.splits[name].counts)
    whole = [asked(message, "whole") for message in surveys(grid)]
    assert sum(whole) == 3 * 4 < len(whole)  # three surveys ask, of four clients each
    for message in surveys(grid):
        sizes = {
            name: sum(len(a.data) for a in r.values())
            for name, r in message.content.items()
            if isinstance(r, ArrayRecord)
        }
        assert ("common" in sizes) == asked(message, "whole")
        assert sizes["survey_states"] < 30_000


def test_a_survey_begins_again(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A client that is lost at a further question; asked again from the start, it answers."""
    lost: list[int] = []

    def alter(client: int, message: Message, reply: Message) -> Message | None:
        if (
            message.metadata.message_type == "query.survey"
            and client == 2
            and not asked(message, "whole")
            and not lost
        ):
            lost.append(client)
            return None
        return reply

    grid = grid_of(method, parted, tmp_path, calibration=STEPS, alter=alter)
    admission = bf.Admission("skip")
    found = deploy(
        method, parted, tmp_path, grid, calibration=STEPS, admission=admission, timeout=0.5
    )
    assert lost
    assert "Temperature starts again: client 2 did not answer" in caplog.text
    assert_as(found, simulated(method, parted).calibrate(*STEPS))


def test_kept_predictions_that_are_gone(
    parted: FederatedData,
    method: bf.Algorithm,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """A node whose folder was emptied between two questions says so, and is asked from
    the start.
    """
    real, gone = node.States.kept, []

    def forgets(states: Any, split: str, made_by: Any) -> dict[str, Tensor] | None:
        found = real(states, split, made_by)
        if found is not None and not gone:
            return gone.append(split)
        return found

    monkeypatch.setattr(node.States, "kept", forgets)
    found = deploy(method, parted, tmp_path, calibration=STEPS, admission=bf.Admission("skip"))
    assert gone == ["validation"]
    assert "no longer in its folder" in caplog.text
    assert_as(found, simulated(method, parted).calibrate(*STEPS))


def test_a_client_that_was_away_settles_later(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path
):
    """The cohort is those that answered; another one predicts by what they found, with parameters
    of its own.
    """

    options: dict[str, Any] = {"admission": bf.Admission("skip"), "timeout": 0.5}
    found = deploy(method, parted, tmp_path, calibration=STEPS, alter=mute(0), **options)
    assert found.steps[2].state["counts"].sum() == parted.splits["calibration"].counts[1:].sum()
    model = bf.load_client(kept(tmp_path, found, 0), method)
    assert int(model.steps[2].own["n_scores"].sum()) == parted.splits["calibration"].counts[0]
    assert model.predict(parted.test.client(0)[0]).sets is not None


@pytest.mark.slow
def test_a_survey_is_given_up(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """After four losses the run ends without calibration, and says so; a later server fits what is
    missing.
    """

    options: dict[str, Any] = {
        "calibration": STEPS,
        "admission": bf.Admission("skip"),
        "timeout": 0.3,
        "checkpoint": tmp_path / "server",
    }
    found = deploy(method, parted, tmp_path, alter=mute(2, later=True), **options)
    assert "nothing is calibrated: Temperature is abandoned after 4 attempts" in caplog.text
    assert caplog.text.count("Temperature starts again") == 3
    assert found.steps == ()
    assert "calibrated_nll" not in found.history.columns
    assert bf.load_client(kept(tmp_path, found, 1), method).steps == ()
    again = deploy(method, parted, tmp_path, **{**options, "timeout": 5.0})
    assert_as(again, simulated(method, parted).calibrate(*STEPS))
    grid = grid_of(method, parted, tmp_path, calibration=STEPS)
    more = deploy(method, parted, tmp_path, grid, **options)
    assert not surveys(grid)  # what was found is in the checkpoint
    assert_as(more, simulated(method, parted).calibrate(*STEPS))
    other = (Conformal(),)
    assert_as(
        deploy(method, parted, tmp_path, **{**options, "calibration": other}),
        simulated(method, parted).calibrate(*other),
    )


def test_a_missing_answer_may_stop_the_run(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path
):
    options: dict[str, Any] = {"admission": bf.Admission("stop"), "timeout": 0.3}
    with pytest.raises(BadClients, match="client 2 has no part in a survey"):
        deploy(method, parted, tmp_path, calibration=STEPS, alter=mute(2), **options)


def test_steps_are_part_of_the_fingerprint(
    parted: FederatedData, method: bf.Algorithm, tmp_path: Path, monkeypatch: Any, caplog: Any
):
    """Nodes with other steps, or none, are refused before anything is trained."""
    for own in ((), (Temperature(), Bias(), Conformal(shrink=7.0))):
        grid = grid_of(method, parted, tmp_path, calibration=own)
        caplog.clear()
        waits(grid, monkeypatch, algorithm=method, clients=4, rounds=1, calibration=STEPS)
        assert "another method or calibration" in caplog.text
        assert not any(map(trains, grid.sent))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            [Conformal(split="later")],
            "Conformal reads the split 'later', but no client has rows in it",
        ),
        ([Temperature, Bias()], "steps must be steps"),
        ("Temperature", "steps must be steps"),
    ],
)
def test_steps_that_do_not_fit(
    steps: Any, words: str, parted: FederatedData, method: bf.Algorithm, tmp_path: Path
):
    with pytest.raises((ValueError, TypeError), match=words):
        deploy(method, parted, tmp_path, calibration=steps)


def test_regressions_have_intervals(tmp_path: Path):
    """Of numbers: a temperature is refused before training; intervals are the simulation's, and a
    client without rows has some.
    """
    x = np.random.default_rng(0).normal(size=(240, 3)).astype(np.float32)
    y = x.sum(1) + np.random.default_rng(1).normal(size=240).astype(np.float32)
    made = bf.data.from_arrays(
        [x[i::4] for i in range(4)],
        [y[i::4] for i in range(4)],
        validation=0.2,
        calibration=0.3,
        task="regression",
    )
    algorithm = bf.algorithms.fedavg(
        bf.models.mlp(3, hidden=4, outputs=1), likelihood=bf.likelihoods.Gaussian(1.0), epochs=1
    )
    with pytest.raises(ValueError, match="Temperature works on probabilities of classes"):
        deploy(algorithm, made, tmp_path / "refused", calibration=[Temperature()])
    steps = [Conformal(level=0.8)]
    sim = simulated(algorithm, made).calibrate(*steps)
    found = deploy(algorithm, made, tmp_path, calibration=steps)
    assert_as(found, sim)
    lower = [predictions(found, tmp_path, j)["lower"] for j in range(4)]
    assert_close(lower, [sim.predict().client(j).lower for j in range(4)], atol=1e-9, rtol=0)
    assert found.history[-1]["calibrated_coverage"] > 0.5


def test_answers_are_the_simulations(parted: FederatedData, tmp_path: Path):
    """Nodes answer where doubt is low; so do their files."""
    model = bf.models.mlp(parted.inputs, hidden=16, outputs=10)
    slow, fast = (SGD(rate, momentum=0.9) for rate in (0.03, 0.15))
    method = bf.algorithms.fedavg_ft(
        model, epochs=5, batch_size=10, optimiser=slow, finetune_epochs=5, finetune_optimiser=fast
    )
    steps = (Temperature(), Abstention(risk=0.4, delta=0.4))
    sim = simulated(method, parted).calibrate(*steps)
    found = deploy(method, parted, tmp_path, calibration=steps)
    expected = sim.predict()
    assert float(found.steps[1].state["threshold"]) == pytest.approx(
        float(sim.steps[1].state["threshold"])
    )
    for j in range(4):
        model = bf.load_client(kept(tmp_path, found, j), method)
        again, test = model.predict(parted.test.client(j)[0]), expected.client(j)
        assert_close(again.probs, test.probs, atol=1e-8, rtol=0)
        assert torch.equal(again.answered, test.answered)
        assert torch.equal(predictions(found, tmp_path, j)["answered"], test.answered)
    assert found.history[-1]["calibrated_answered"] == pytest.approx(
        expected.summary(parted.test)["answered"], abs=1e-9
    )


def test_widths_without_end_are_not_left_out(tmp_path: Path):
    """Where a client has too few rows the mean width is infinite, as in the simulation, and not
    that of the others.
    """
    rng = np.random.default_rng(0)
    x, ids = rng.normal(size=(300, 4)).astype(np.float32), rng.choice(3, 300, p=[0.55, 0.4, 0.05])
    y = (x[:, 0] + rng.normal(size=300)).astype(np.float32)
    data = bf.data.from_arrays(x, y, client_ids=ids, calibration=0.2, task="regression")
    for likelihood in (Gaussian(), Quantiles(0.9)):
        outputs = 2 if isinstance(likelihood, Quantiles) else 1
        method = bf.algorithms.fedavg(
            bf.models.mlp(4, hidden=4, outputs=outputs), epochs=1, likelihood=likelihood
        )
        steps = (Conformal(shrink=0.0),)
        summary = simulated(method, data).calibrate(*steps).predict().summary(data.test)
        folder = tmp_path / type(likelihood).__name__
        last = deploy(method, data, folder, calibration=steps).history[-1]
        assert last["calibrated_width"] == summary["width"] == np.inf
        assert last["calibrated_coverage"] == pytest.approx(summary["coverage"], abs=1e-9)
        assert last["calibrated_rmse"] == pytest.approx(summary["rmse"], abs=1e-6)
        # Intervals do not change means.
        assert last["personal_rmse"] == pytest.approx(summary["rmse"], abs=1e-6)
