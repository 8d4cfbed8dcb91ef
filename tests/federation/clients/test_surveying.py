"""Calibration of a federation: predictions, clients, files, newcomers, secure sums, and what is
refused.
"""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl import SecureSum
from bayesfl.evaluation.calibration import Abstention, Bias, Conformal, Temperature
from bayesfl.federation.clients import surveying
from bayesfl.federation.private import secure as secure_sums
from bayesfl.federation.private.secure import masked_total
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD
from tests.evaluation.calibration.made import CLASSES, local
from tests.evaluation.test_surveys import Share
from tests.federation.made import run


@pytest.fixture(scope="module")
def clients() -> bf.data.FederatedData:
    return bf.data.dirichlet(
        "digits", clients=5, alpha=0.3, max_size=80, validation=0.2, calibration=0.25, seed=1
    )


@pytest.fixture(scope="module")
def method(clients: bf.data.FederatedData) -> bf.Algorithm:
    return bf.algorithms.fedavg(bf.models.mlp(clients.inputs, hidden=8, outputs=10), epochs=2)


@pytest.fixture(scope="module")
def result(method: bf.Algorithm, clients: bf.data.FederatedData) -> Result:
    return run(method, clients, rounds=3, evaluate_every=None)


@pytest.fixture(scope="module")
def served(result: Result) -> Result:
    return result.calibrate(Temperature(), Bias()).calibrate(Conformal(score="aps"))


def same(one: Any, other: Any) -> None:
    for name, t in vars(one).items():
        if isinstance(t, torch.Tensor):
            assert_close(getattr(other, name), t, atol=0, rtol=0, equal_nan=True)


def test_predictions_are_calibrated(result: Result, served: Result, clients: bf.data.FederatedData):
    """By the steps in their order; the result before them stays as it was."""
    assert [type(one.step) for one in served.steps] == [Temperature, Bias, Conformal]
    plain, found = result.predict(), served.predict()
    assert (plain.sets, found.level) == (None, 0.9)
    temperature, bias = served.steps[0].own["temperature"], served.steps[1].own["bias"]
    wanted = (plain.probs.double().log() / temperature[:, None, None] + bias[:, None]).softmax(-1)
    assert_close(found.probs, wanted.to(plain.probs), equal_nan=True)
    assert served.predict(clients.calibration).sets is not None
    same(result.calibrate(Temperature(), Bias(), Conformal(score="aps")).predict(), found)


def test_files_and_clients_keep_it(
    served: Result, method: bf.Algorithm, clients: bf.data.FederatedData, tmp_path: Path
):
    """To the bit, in a saved run with data and without, and in a client's own file."""
    served.save(tmp_path / "run")
    found = served.predict()
    same(bf.load(tmp_path / "run", method, clients).predict(), found)
    x, _ = clients.test.client(2)
    one = served.client(2).predict(x)
    assert_close(one.probs, found.client(2).probs, atol=1e-6, rtol=0)
    assert torch.equal(one.sets, found.client(2).sets)  # type: ignore[arg-type]
    served.client(2).save(tmp_path / "client")
    for model in (
        bf.load(tmp_path / "run", method).client(2),
        bf.load_client(tmp_path / "client", method),
    ):
        same(model.predict(x), one)
    with pytest.raises(
        ValueError, match="is calibrated for its full predictions, but plug_in=True gives others"
    ):
        served.client(2).save(tmp_path / "other", plug_in=True)


def test_secure_sums_are_the_same(result: Result, served: Result, monkeypatch: pytest.MonkeyPatch):
    """Counts and thresholds to the bit; a temperature to the unit in which summands are rounded."""
    secure = result.calibrate(Temperature(), aggregation=SecureSum())
    assert_close(secure.steps[0].state["beta"], served.steps[0].state["beta"], atol=1e-7, rtol=0)
    sets, plain = (
        result.calibrate(Conformal(), aggregation=way).steps[0] for way in (SecureSum(), None)
    )
    assert torch.equal(sets.state["counts"], plain.state["counts"])
    assert torch.equal(sets.own["threshold"], plain.own["threshold"])
    seen: list[Any] = []
    monkeypatch.setattr(
        secure_sums,
        "masked_total",
        lambda messages: seen.extend(messages) or masked_total(messages),
    )
    answers = {client: {"g": torch.full((3,), float(client))} for client in (4, 2, 9)}
    assert SecureSum().added(answers)["g"].tolist() == [15.0] * 3
    # Numbers up to 9 in units of 2^-24, below the masks.
    assert (np.abs(np.stack(seen).view(np.int64).astype(float)) > 2**32).all()
    for refused, error, words in (
        (
            lambda: result.calibrate(Conformal(), aggregation=SecureSum(range=2)),
            ValueError,
            r"client \d answers with numbers up to .*, outside SecureSum\(range=2\); .*pass "
            r"range=\d+",
        ),
        (
            lambda: SecureSum().added({3: {"g": torch.ones(())}}),
            ValueError,
            "a sum over one client is that client's answer",
        ),
    ):
        with pytest.raises(error, match=words):
            refused()


def test_a_survey_of_ones_own(result: Result, clients: bf.data.FederatedData):
    """Asks about predictions as the result makes them, calibrated or not."""
    for one, way in ((result, None), (result, SecureSum()), (result.calibrate(Bias()), None)):
        assert float(one.survey(Share(), aggregation=way)["share"]) == pytest.approx(
            one.predict().summary(clients.test)["pooled_accuracy"]
        )


def test_newcomers_settle_by_what_was_told(served: Result):
    """With their own rows where they have such a split, without where they have none; others'
    parameters stay with these.
    """
    novel = bf.data.dirichlet("digits", clients=3, alpha=0.3, max_size=40, calibration=0.5, seed=9)
    joined = served.adapt(novel)
    temperature, bias, sets = joined.steps
    assert temperature.own["temperature"].tolist() == pytest.approx(
        [1 / float(served.steps[0].state["beta"])] * 3
    )
    assert bias.own["bias"].abs().max() == 0
    assert sets.own["n_scores"].flatten().tolist() == novel.calibration.counts.tolist()
    steps = [one.step for one in served.steps]
    (local,) = joined.uncalibrated().local_predictions(
        novel.to(joined.device, joined.dtype).calibration, steps=steps
    )
    local = bias.apply(temperature.apply(local))
    assert_close(sets.own["threshold"], steps[2].settle(served.steps[2].state, local)["threshold"])
    assert all(joined.steps[k].state is served.steps[k].state for k in range(3))
    assert joined.predict().sets.shape[0] == 3


def test_training_that_goes_on_forgets_it(
    served: Result, method: bf.Algorithm, clients: bf.data.FederatedData
):
    with pytest.warns(UserWarning, match="the steps are dropped; calibrate the new result"):
        on = bf.simulate(
            method, clients, rounds=1, start=served, progress=False, evaluate_every=None
        )
    assert on.steps == ()


def test_a_step_that_makes_others_rows_worse_is_told():
    """A bias fitted to rows of one label only, by the loss of rows of all; not one fitted to
    these.
    """
    seen, few = local((60, 60, 60), seed=1), local((20, 20, 20), seed=2)
    labels = few.predictions.labels
    assert labels is not None
    few = replace(few, predictions=replace(few.predictions, labels=torch.zeros_like(labels)))
    predicted = {"validation": seen, "calibration": few}
    with pytest.warns(UserWarning, match=r"Bias raises the loss of the rows in 'validation', to"):
        surveying.fitted([Bias(split="calibration")], (), predicted, CLASSES, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predicted["calibration"] = local((60, 60, 60), seed=1)
        surveying.fitted([Bias(), Conformal()], (), predicted, CLASSES, None)


def test_what_is_refused(result: Result, served: Result):
    for refused, words in (
        (
            lambda: result.calibrate(Temperature(split="tuning")),
            r"Temperature reads the split 'tuning', but .*rows only in \['train', 'test', "
            ".*name one of them",
        ),
        (lambda: served.predict(draws=7), "draws=7 gives other predictions than the"),
        (
            lambda: served.client(0).predict(torch.zeros(1, 64), draws=7),
            "draws=7 gives other predictions than the calibrated ones",
        ),
        (
            lambda: result.calibrate(type("Own", (Temperature,), {})()).save("nowhere"),
            "the step Own cannot be saved",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            refused()
    with pytest.warns(
        UserWarning, match="Bias and Conformal are fitted to the same split, 'calibration'"
    ) as caught:
        result.calibrate(Bias(split="calibration"), Conformal())
    assert caught[0].filename == __file__


def test_regression_has_intervals(tmp_path: Path):
    """Beside means and variances, by which it is measured as before; of a client's file, too."""
    data = bf.data.diabetes(clients=4, calibration=0.3, seed=0)
    method = bf.algorithms.fedavg(
        bf.models.mlp(10, hidden=4, outputs=1),
        likelihood=bf.likelihoods.Gaussian(scale=0.7),
        epochs=2,
    )
    plain = run(method, data, rounds=3, evaluate_every=None)
    served = plain.calibrate(Conformal(level=0.8, shrink=math.inf))
    found = served.predict()
    y, mask = data.test.padded_labels()
    inside = (found.lower[..., 0] <= y) & (y <= found.upper[..., 0])
    by_client = [inside[j, mask[j]] for j in range(4)]
    assert 0.65 < float(inside[mask].double().mean()) < 0.95
    summary, before = found.summary(data.test), plain.predict().summary(data.test)
    assert {name: summary[name] for name in before} == before
    widths = [float((found.upper - found.lower)[j, mask[j]].double().mean()) for j in range(4)]
    assert served.table()["width"].tolist() == pytest.approx(widths, abs=1e-6)
    assert (summary["coverage"], summary["width"]) == pytest.approx(
        (np.mean([float(one.double().mean()) for one in by_client]), np.mean(widths)),
        abs=1e-6,
    )
    served.client(1).save(tmp_path / "client")
    x, _ = data.test.client(1)
    assert_close(
        bf.load_client(tmp_path / "client", method).predict(x).lower, found.client(1).lower
    )
    assert served.uncalibrated().predict().lower is None


def test_sets_have_the_names_of_classes(tmp_path: Path):
    """The most probable class first; of a client's file, too; numbers where classes have
    no names.
    """
    x = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    y, names = np.abs(x).argmax(1), ["cold", "flu", "none"]
    data = bf.data.from_arrays(
        [x[i::3] for i in range(3)],
        [y[i::3] for i in range(3)],
        class_names=names,
        calibration=0.3,
        seed=0,
    )
    method = bf.algorithms.fedavg(bf.models.mlp(3, hidden=8, outputs=3), epochs=2)
    served = run(method, data, rounds=3, evaluate_every=None).calibrate(Conformal(level=0.8))
    found = served.predict()
    named = found.named_sets()
    assert [len(rows) for rows in named] == data.test.counts.tolist()
    for i, row in enumerate(named[1]):
        assert set(row) == {data.class_names[c] for c in range(3) if found.sets[1, i, c]}
        assert (
            not row
            or row[0] == data.class_names[int((found.probs[1, i] * found.sets[1, i]).argmax())]
        )
    assert len({row for rows in named for row in rows}) > 3
    served.client(1).save(tmp_path)
    assert bf.load_client(tmp_path, method).predict(data.test.client(1)[0]).named_sets() == named[1]
    plain = replace(found, class_names=None).client(1)
    assert plain.named_sets()[0] == tuple(data.class_names.index(name) for name in named[1][0])
    with pytest.raises(ValueError, match=r"there are no sets: .*Conformal"):
        replace(found, sets=None).named_sets()


@pytest.fixture(scope="module")
def personal() -> tuple[Any, Any]:
    """FedAvg with fine-tuning at a rate that is too high for some clients, at which the global
    model is better.
    """
    data = bf.data.dirichlet(
        "digits", clients=5, alpha=0.5, validation=0.4, calibration=0.2, seed=0
    )
    model = bf.models.mlp(data.inputs, hidden=16, outputs=10)
    slow, fast = (SGD(rate, momentum=0.9) for rate in (0.03, 0.1))
    method = bf.algorithms.fedavg_ft(
        model, epochs=5, batch_size=10, optimiser=slow, finetune_epochs=5, finetune_optimiser=fast
    )
    return data, run(method, data, rounds=5, evaluate_every=None)


def test_sets_are_made_once_and_last(personal: tuple[Any, Any]):
    """A step that changes probabilities would leave sets of others; a second Conformal would
    replace the first's sets.
    """
    _, plain = personal
    served = plain.calibrate(Temperature(), Conformal())
    for wrong in ([Temperature()], Temperature):
        with pytest.raises(TypeError, match="steps must be steps of calibration"):
            plain.calibrate(wrong)
    for one, steps, words in (
        (served, (Bias(),), "Bias must come before Conformal"),
        (plain, (Abstention(risk=0.2), Temperature()), "Temperature must come before Abstention"),
    ):
        with pytest.raises(ValueError, match=words):
            one.calibrate(*steps)
    assert served.calibrate(Abstention(risk=0.2)).predict().sets is not None


def test_answers_where_doubt_is_low(personal: tuple[Any, Any], tmp_path: Path):
    """`answered` and its accuracy by client are those of a loop; a client's file answers the same
    rows.
    """
    data, plain = personal
    served = plain.calibrate(Temperature(), Abstention(risk=0.06, delta=0.2))
    found, table = served.predict(), served.table()
    for j in range(5):
        (x, y), given = data.test.client(j), found.client(j)
        right = (given.probs.argmax(-1) == y)[given.answered]
        assert table["answered"].iloc[j] == pytest.approx(float(given.answered.double().mean()))
        assert table["answered_accuracy"].iloc[j] == pytest.approx(float(right.double().mean()))
        served.client(j).save(tmp_path / str(j))
        assert torch.equal(
            bf.load_client(tmp_path / str(j), plain.algorithm).predict(x).answered, given.answered
        )
    summary = found.summary(data.test)
    assert 0.2 < summary["answered"] < 1
    assert summary["answered_accuracy"] > summary["accuracy"]
    audit = served.audit()
    for name in ("answered", "answered_accuracy"):
        np.testing.assert_allclose(audit.columns()[name], table[name], rtol=1e-12)
    assert audit.risk == 0.06
    assert (summary["pooled_answered"], summary["pooled_answered_accuracy"]) == pytest.approx(
        (
            audit.answered.sum() / audit.rows.sum(),
            audit.answered_right.sum() / audit.answered.sum(),
        ),
        rel=1e-12,
    )
    assert summary["pooled_answered"] != pytest.approx(summary["answered"], rel=1e-6)
    secure = plain.calibrate(
        Temperature(), Abstention(risk=0.06, delta=0.2), aggregation=SecureSum()
    )
    assert secure.steps[1].state["threshold"] == served.steps[1].state["threshold"]
    with pytest.warns(UserWarning, match="Bias and Abstention are fitted to the same split"):
        plain.calibrate(Bias(split="calibration"), Abstention(risk=0.3, delta=0.3))
