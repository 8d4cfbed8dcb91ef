"""Audits and alarms of a calibrated federation: whose rows they read, also under secure sums, from
files and without labels.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.data import FederatedData
from bayesfl.data.schema import _numerals
from bayesfl.evaluation.alarm import Alarm
from bayesfl.evaluation.calibration import Abstention, Bias, Conformal, Temperature, applied, fit
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD
from tests.federation.made import run

NAMES = ("cold", "flu", "none")


def federation(**options: Any) -> FederatedData:
    """Three clients of named classes that depend on the largest input."""
    x = np.random.default_rng(0).normal(size=(900, 3)).astype(np.float32)
    y = np.abs(x).argmax(1)
    return bf.data.from_arrays(
        [x[i::3] for i in range(3)],
        [y[i::3] for i in range(3)],
        class_names=NAMES,
        calibration=0.2,
        validation=0.2,
        **options,
    )


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return federation()


@pytest.fixture(scope="module")
def served(data: FederatedData) -> Result:
    method = bf.algorithms.fedavg(
        bf.models.mlp(3, hidden=16, outputs=3), epochs=5, optimiser=SGD(0.3, momentum=0.9)
    )
    return run(method, data, rounds=10, evaluate_every=None).calibrate(
        Temperature(), Bias(), Conformal(level=0.8, score="aps")
    )


def test_an_audit_is_of_the_predictions(served: Result, data: FederatedData):
    """Coverage and accuracy by client are the table's; the same under secure sums; labels by their
    names; groups by function or list.
    """
    table, found = served.table(), served.audit()
    for name, column in (
        ("coverage", "coverage"),
        ("size", "set_size"),
        ("accuracy", "accuracy"),
        ("ece", "ece"),
    ):
        np.testing.assert_allclose(found.columns()[name], table[column], rtol=1e-12, atol=1e-12)
    assert (found.units, found.level) == (data.client_names, 0.8)
    secure = served.audit(by="label", aggregation=bf.SecureSum())
    assert secure.units == NAMES
    assert str(secure) == str(served.audit(by="label"))
    assert secure.rows.tolist() == torch.bincount(data.test.y[data.test.index]).tolist()
    groups = [["high" if v > 0 else "low" for v in data.test.client(j)[0][:, 0]] for j in range(3)]
    by_list = served.audit(groups=groups)
    by_function = served.audit(groups=lambda x: np.where(x[:, 0] > 0, "high", "low"))
    assert str(by_list) == str(by_function)
    assert by_list.units == ("high", "low")
    assert by_list.rows.sum() == found.rows.sum()
    assert served.audit("validation").rows.tolist() == data.validation.counts.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "town"}, "by must be 'client' or 'label'"),
        ({"delta": 0}, "delta must lie within"),
        ({"split": "later"}, r"reads the split 'later', but the data have"),
        ({"groups": [["a"]]}, "groups must have a list for each of 3 clients"),
    ],
)
def test_audits_that_do_not_fit(options: dict[str, Any], words: str, served: Result):
    with pytest.raises(ValueError, match=words):
        served.audit(**options)


def test_an_alarm_compares_with_the_clients_calibration_rows(
    served: Result, data: FederatedData, tmp_path: Path
):
    """Scores of new rows are those of calibration rows; a client's file gives the same alarm;
    labels may be names.
    """
    model = served.client(1)
    x, y = data.splits["calibration"].client(1)
    kept = served.steps[2].own["scores"][1]
    np.testing.assert_allclose(model.scores(x, y), kept[kept.isfinite()].numpy(), atol=1e-6)
    assert kept.isfinite().sum() == data.splits["calibration"].counts[1]
    x, y = data.test.client(1)
    scores = model.scores(x, y)
    expected = Alarm(
        kept[kept.isfinite()].numpy(),
        alpha=1 - 0.8,
        delta=0.1,
        client=1,
        round=10,
        seed=served.settings.seed,
    ).see(scores)
    model.save(tmp_path)
    loaded = bf.load_client(tmp_path, served.algorithm)
    for watch in (
        model.alarm(delta=0.1),
        served.client(data.client_names[1]).alarm(delta=0.1),
        loaded.alarm(delta=0.1),
    ):
        assert np.array_equal(watch.see(scores).history, expected.history)
    np.testing.assert_array_equal(loaded.scores(x, [NAMES[c] for c in y]), scores)
    assert not expected.raised
    assert served.client(1).alarm().see(model.scores(x, (y + 1) % 3)).raised


def test_a_row_alone_has_the_score_that_it_has_among_others(served: Result, data: FederatedData):
    """To the bit, as scores of classes are rounded: where a model is sure, floating-point error
    would otherwise decide who is stranger.
    """
    model, (x, y) = served.client(2), data.test.client(2)
    together = model.scores(x, y)
    alone = [float(model.scores(x[i : i + 1], y[i : i + 1])[0]) for i in range(20)]
    assert alone == together[:20].tolist()
    assert (together == together.round(6)).all()
    assert len(np.unique(together)) > 10


def test_sets_of_rows_one_by_one(served: Result, data: FederatedData):
    """Each row draws its own u: alone it has the set that it has among others."""
    model = served.uncalibrated().calibrate(Conformal(level=0.8, score="aps", shrink=0.0)).client(0)
    x, y = data.test.client(0)
    together = model.predict(x).sets
    alone = torch.cat([model.predict(x[i : i + 1]).sets for i in range(len(x))])
    assert torch.equal(alone, together)
    assert 0.7 < float(together.gather(1, y[:, None]).double().mean()) < 0.95


def test_scores_of_another_kind_or_model_are_refused(
    served: Result, data: FederatedData, tmp_path: Path
):
    """By alarms that were loaded, too; plain numbers are taken."""
    x, y = data.test.client(0)
    model, other = served.client(0), served.client(1)
    scores = model.scores(x, y)
    model.alarm().save(tmp_path / "alarm.npz")
    for watch in (model.alarm(), Alarm.load(tmp_path / "alarm.npz")):
        with pytest.raises(ValueError, match="this alarm watches labels by 'client 0'"):
            watch.see(other.scores(x, y))
        for changed in (Conformal(level=0.8), Conformal(level=0.7, score="aps")):
            again = served.uncalibrated().calibrate(changed)
            with pytest.raises(
                ValueError,
                match=r"scores are of labels by 'client 0' .* calibration [0-9a-f]{8}, and this "
                r"alarm watches",
            ):
                watch.see(again.client(0).scores(x, y))
        for foreign in (
            other.scores(x, y)[0],
            next(iter(other.scores(x, y))),
            2 * other.scores(x, y)[1:2],
        ):
            with pytest.raises(ValueError, match="this alarm watches"):
                watch.see(foreign)
        assert len(watch.see(scores[:3]).see(np.asarray(scores).tolist()).p) == 3 + len(x)
    one_by_one = model.alarm()
    for one in scores:
        one_by_one.see(one)
    assert np.array_equal(one_by_one.history, model.alarm().see(scores).history)


def test_one_row_that_is_not_finite_stays_one(served: Result, data: FederatedData):
    """Predictions of other rows and clients are as they were; fitting names who it is."""
    (mine,) = served.local_predictions(data.to(dtype=torch.float64).test)
    probs = mine.predictions.probs.clone()
    row = int(mine.clients.starts[1]) + 2
    probs[row, 0] = torch.nan
    broken = dataclasses.replace(
        mine, predictions=dataclasses.replace(mine.predictions, probs=probs)
    )
    found, whole = (applied(served.steps, one).predictions for one in (broken, mine))
    assert found.probs[row].isnan().all()
    assert not found.sets[row].any()
    others = torch.arange(len(probs)) != row
    assert torch.equal(found.sets[others], whole.sets[others])
    for step in (Temperature(), Bias(), Conformal()):
        with pytest.raises(
            ValueError, match="rows are not finite, the first of row 2 of 'client 1'"
        ):
            fit(step, broken, Outputs("classification", 3))


def test_steps_are_of_the_way_of_predicting(served: Result, data: FederatedData, tmp_path: Path):
    """Another predictor or number of draws is refused, with the remedy, after saving, too; the
    method's own number of draws is not.
    """
    other = dataclasses.replace(served, algorithm=dataclasses.replace(served.algorithm, draws=3))
    other.save(tmp_path)
    loaded = bf.load(tmp_path, other.algorithm, data)
    model, (x, y) = served.client(0), data.test.client(0)
    with pytest.raises(
        ValueError, match="is calibrated for its full predictions, but plug_in=True gives others"
    ):
        dataclasses.replace(model, plug_in=True).scores(x, y)
    model.save(tmp_path / "client")
    for read in (
        lambda: dataclasses.replace(model, algorithm=other.algorithm).predict(x),
        lambda: dataclasses.replace(
            bf.load_client(tmp_path / "client", served.algorithm), algorithm=other.algorithm
        ).predict(x),
        other.predict,
        loaded.predict,
        loaded.audit,
        lambda: other.calibrate(Abstention(risk=0.3)),
        lambda: other.client(0),
    ):
        with pytest.raises(ValueError, match="fitted for another predictor"):
            read()
    served.save(tmp_path)
    assert torch.equal(
        bf.load(tmp_path, served.algorithm, data).predict().sets, served.predict().sets
    )
    assert torch.equal(served.predict(draws=served.algorithm.draws).sets, served.predict().sets)


def test_splits_that_were_used(served: Result):
    """Steps on training or test rows, and audits of rows that were used, warn."""
    plain = served.uncalibrated()
    for split in ("train", "test"):
        with pytest.warns(UserWarning, match=f"is fitted to the split '{split}'"):
            plain.calibrate(Conformal(split=split))
    with pytest.warns(UserWarning, match="was used for training or calibration"):
        served.audit("calibration")


def test_scores_of_an_early_conformal_step(data: FederatedData, served: Result):
    """Scores are of the predictions to which sets were fitted, after the steps before and none
    behind.
    """
    plain, (x, y) = served.uncalibrated(), data.test.client(0)
    probs = plain.client(0).predict(x).probs
    np.testing.assert_allclose(
        plain.calibrate(Conformal()).client(0).scores(x, y),
        1 - probs.gather(1, y[:, None])[:, 0].double().numpy(),
        atol=1e-6,
    )


def laplace(data: FederatedData, rounds: int, link: Any, **options: Any) -> Any:
    """The first client's model, by FedPer with a Laplace approximation."""
    method = bf.algorithms.fedper(
        bf.models.mlp(3, hidden=8, outputs=3), epochs=3, optimiser=SGD(0.1, momentum=0.9)
    )
    predictor = LinearisedLaplace(precision=1.0, link=link)
    method = dataclasses.replace(method, predictor=predictor, **options)
    return run(method, data, rounds=rounds, evaluate_every=None).calibrate(Conformal()).client(0)


def calibrated(data: FederatedData, rounds: int = 1) -> Result:
    """FedAvg with conformal sets."""
    method = bf.algorithms.fedavg(bf.models.mlp(data.inputs, hidden=8, outputs=data.outputs))
    return run(method, data, rounds=rounds, evaluate_every=None).calibrate(Conformal())


def test_without_labels_by_epistemic_uncertainty(data: FederatedData):
    """Rows far from the training data raise it, others do not; a method of one set of weights has
    none.
    """
    model, (x, _) = laplace(data, 3, LinearisedLaplace().link), data.test.client(0)
    np.testing.assert_allclose(
        model.scores(x), model.predict(x).epistemic.double().numpy(), atol=1e-6
    )
    for rows, raised in ((x, False), (6 * x, True)):
        assert model.alarm(score="epistemic").see(model.scores(rows)).raised == raised


def test_noise_by_a_rows_place_cannot_be_watched(data: FederatedData):
    """A row alone would have the noise of the first, so that new rows would differ from calibration
    rows in any case.
    """
    model = laplace(data, 1, "draws", draws=3)
    for make in (model.alarm, lambda: model.scores(*data.test.client(0))):
        with pytest.raises(ValueError, match=r"draws noise for each row by its place.*'contrasts'"):
            make()


def test_classes_named_by_other_numbers():
    """Numbers that may be names or places are refused; as text they are names, and tensors are of
    the package, by place.
    """
    for names, numerals in (
        (("1.0", "0.0", "none"), True),
        (("-1", "+1", "x"), True),
        (("True", "False"), True),
        (("0", "1", "other"), False),
        (("a", "b", "2"), False),
        (("False", "True"), False),
    ):
        assert bool(_numerals(names)) == numerals
    data = dataclasses.replace(federation(), class_names=("1", "2", "3"))
    model = calibrated(data).client(0)
    x, y = data.test.client(0)
    words = r"the classes are named by others, \['1', '2', '3'\]: pass these names as text"
    for numbers, kind in (
        ((y == 1).numpy(), "truth values"),
        ((y + 1).numpy(), "numbers"),
        ((y + 1).tolist(), "numbers"),
    ):
        with pytest.raises(ValueError, match=f"y has {kind}, and {words}"):
            model.scores(x, numbers)
    np.testing.assert_array_equal(model.scores(x, (y + 1).numpy().astype(str)), model.scores(x, y))


def test_labels_of_other_rows_or_codes_are_refused():
    """Labels of a frame go with its rows by their index, and truth values are no classes that have
    names.
    """
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(300, 3)), columns=list("abc"))
    frame["h"], frame["t"] = np.repeat(list("uvw"), 100), np.where(frame.a > 0, "ill", "well")
    rows, _ = bf.data.from_frame(frame, client="h", target="t", calibration=0.2)
    model = calibrated(rows).client("u")
    some = frame[frame.h == "u"].head(40)
    found = model.scores(some, some.t)
    with pytest.raises(ValueError, match="y and x have the same number of rows and other indices"):
        model.scores(some, some.t.sample(frac=1.0, random_state=0))
    with pytest.raises(ValueError, match="y has truth values, and the classes are named by others"):
        model.scores(some, some.t == "ill")
    np.testing.assert_array_equal(model.scores(some, some.t.to_numpy()), found)


def test_raw_rows_are_those_before_the_transform(data: FederatedData):
    """As a client's own model takes them; stored ones would be transformed twice."""
    scaled = data.transformed(lambda x: 2 * x - 1)
    (x, y), (stored, labels) = scaled.test.client(1, raw=True), scaled.test.client(1)
    torch.testing.assert_close(2 * x - 1, stored)
    assert torch.equal(y, labels)


def test_groups_by_a_column(recwarn: pytest.WarningsRecorder):
    """Of a frame, in its own words and units; a column of many values asks for ranges."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 80, 400),
            "sex": rng.choice(["f", "m"], 400),
            "town": ["A", "B"] * 200,
        }
    )
    frame["ill"] = np.where(frame["age"] + rng.normal(0, 10, 400) > 50, "yes", "no")
    data, columns = bf.data.from_frame(frame, client="town", target="ill", calibration=0.2)
    served = calibrated(data, 2)
    found = served.audit(groups="sex")
    assert found.units == ("f", "m")
    for j, town in enumerate("AB"):
        x, _ = data.test.client(j)
        rows = zip(*(columns.values(x, name).tolist() for name in ("age", "sex")), strict=True)
        own = frame.loc[frame["town"] == town, ["age", "sex"]]
        assert {*rows} <= {*own.itertuples(index=False, name=None)}
    assert found.rows.sum() == data.test.counts.sum()

    def by_decade(x: Any) -> Any:
        return columns.values(x, "age") // 10 * 10

    decades = served.audit(groups=by_decade)
    assert decades.units == ("20", "30", "40", "50", "60", "70")
    # Of the frame, whatever the transform makes of it.
    again = calibrated(data.transformed(lambda x: -x))
    for groups, of in (("sex", found), (by_decade, decades)):
        assert again.audit(groups=groups).rows.tolist() == of.rows.tolist()
    spoilt = frame.assign(
        code=np.where(rng.uniform(size=400) < 0.1, 999_999_999, rng.integers(0, 4, 400))
    )
    wide, _ = bf.data.from_frame(spoilt, client="town", target="ill", calibration=0.2)
    for one, name, words in (
        (calibrated(wide), "code", "the column 'code' has numbers so far apart"),
        (served, "size", "'size' is not in list"),
    ):
        with pytest.raises(ValueError, match=words):
            one.audit(groups=name)


def test_alarms_that_cannot_be(served: Result, data: FederatedData):
    model, (x, y) = served.client(0), data.test.client(0)
    for make, words in (
        (
            lambda: model.alarm(score="epistemic"),
            "reference must be one finite number",
        ),
        (
            lambda: dataclasses.replace(model, steps=()).alarm(),
            r"result.calibrate\(Conformal\(\)\)",
        ),
        (lambda: model.scores(x, y[:3]), "y must have a label for each of"),
        (lambda: model.scores(x, y + 0.5), "y must be classes, whole numbers"),
        (lambda: model.scores(x, y / 0), "y must be classes, whole numbers"),
        (lambda: model.scores(x, y + 3), "y must be classes, whole numbers from 0 to 2"),
        (lambda: model.scores(x, ["flue"] * len(x)), "y has 'flue', which is none of the classes"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_a_client_without_calibration_rows(data: FederatedData):
    """It has sets by the others' scores, and no alarm."""
    old = data.splits["calibration"]
    none, *others = old.counts
    fewer = dataclasses.replace(
        old, index=old.index[none:], counts=np.array([0, *others], dtype=old.counts.dtype)
    )
    served = calibrated(dataclasses.replace(data, splits={**data.splits, "calibration": fewer}))
    assert bool(served.predict().sets[0].any())
    with pytest.raises(ValueError, match=r"'client 0' has no rows in the split 'calibration'"):
        served.client(0).alarm()
    assert not served.client(1).alarm().raised


def test_numbers_have_alarms_too():
    """|y - m| / s of targets; a target shifted by three deviations raises it."""
    data = bf.data.diabetes(clients=3, calibration=0.3, seed=0)
    method = bf.algorithms.fedavg(
        bf.models.mlp(10, hidden=4, outputs=1),
        likelihood=bf.likelihoods.Gaussian(scale=0.7),
        epochs=2,
    )
    model = run(method, data, rounds=3, evaluate_every=None).calibrate(Conformal()).client(2)
    x, y = data.test.client(2)
    found = model.predict(x)
    expected = (y - found.mean[:, 0]).abs() / found.variance[:, 0].sqrt()
    np.testing.assert_allclose(model.scores(x, y), expected.double().numpy(), rtol=1e-5)
    assert not model.alarm().see(model.scores(x, y)).raised
    assert model.alarm().see(model.scores(x, y + 4.0)).raised
    with pytest.raises(ValueError, match="y must have 1 targets for each of"):
        model.scores(x, torch.stack([y, y], 1))
