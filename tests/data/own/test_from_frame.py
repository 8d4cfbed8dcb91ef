"""Federations of data frames: against scikit-learn's transformers, without leakage, and what is
refused.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import bayesfl as bf
from bayesfl.data import Columns, FederatedData, frame_statistics, from_frame
from tests.federation.made import run


def hospitals(n: int = 200, seed: int = 0) -> pd.DataFrame:
    """Patients of four hospitals, with missing numbers and levels, and a level that one patient
    has.
    """
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "hospital": rng.choice(["Basel", "Bern", "Chur", "Genf"], n, p=[0.4, 0.3, 0.2, 0.1]),
            "age": rng.normal(60, 9, n),
            "pain": rng.choice(["none", "typical", "atypical"], n),
            "pressure": rng.normal(130, 15, n),
            "code": rng.choice([3, 6, 7], n),
            "smokes": rng.random(n) < 0.3,
            "patient": rng.integers(0, n // 3, n),
            "ill": rng.random(n) < 0.4,
        }
    )
    frame.loc[rng.random(n) < 0.2, "pressure"] = None
    frame.loc[rng.random(n) < 0.1, "pain"] = None
    frame.loc[7, "pain"] = "rare"
    return frame


@pytest.fixture
def frame() -> pd.DataFrame:
    """Their patients, without a group."""
    return hospitals().drop(columns="patient")


def with_polars(frames: list[Any]) -> list[Any]:
    """The frames, and the first one in polars where that is installed."""
    if not importlib.util.find_spec("polars"):
        return frames
    return [*frames, pytest.importorskip("polars").from_pandas(frames[0])]


ROLES: dict[str, Any] = {"client": "hospital", "target": "ill"}
INPUTS = ["age", "pain", "pressure", "code", "smokes"]


def by_hand(
    frame: pd.DataFrame, train: np.ndarray, codes: list[str], inputs: list[str]
) -> np.ndarray:
    """The matrix that scikit-learn's transformers, fitted on training rows, make of all rows."""
    out = []
    for name in inputs:
        column = frame[[name]]
        if (
            name in codes
            or column[name].dtype == object
            or isinstance(column[name].dtype, pd.StringDtype)
        ):
            known = column[name].iloc[train].dropna().unique()
            encoder = OneHotEncoder(
                categories=[sorted(known, key=str)], handle_unknown="ignore", sparse_output=False
            )
            out.append(
                encoder.fit(column.iloc[train].dropna()).transform(
                    column.astype(object).where(column.notna(), "?")
                )
            )
            continue
        numbers = column.astype(float)
        steps = make_pipeline(SimpleImputer(), StandardScaler()).fit(numbers.iloc[train])
        out.append(steps.transform(numbers))
        if numbers.iloc[train].isna().any().any():
            out.append(MissingIndicator(features="all").fit(numbers.iloc[train]).transform(numbers))
    return np.concatenate(out, 1).astype(np.float32)


def train_rows(data: FederatedData, columns: Columns, frame: pd.DataFrame) -> np.ndarray:
    """The frame's training rows, by what `apply` makes of them."""
    whole = {tuple(row): i for i, row in enumerate(columns.apply(frame).tolist())}
    assert len(whole) == len(frame)
    return np.array([whole[tuple(row)] for row in data.train.x[data.train.index].tolist()])  # type: ignore[index]


@pytest.mark.parametrize("codes", [[], ["code"]])
def test_inputs_are_scikit_learns(codes: list[str], frame: pd.DataFrame):
    """Of its imputer, scaler, indicator and encoder, fitted on training rows; validation rows are
    none of these.
    """
    data, columns = from_frame(frame, **ROLES, categories=codes, validation=0.2)
    train = train_rows(data, columns, frame)
    assert len(train) == data.train.counts.sum() < len(frame) * 0.7
    wanted = by_hand(frame, train, codes, INPUTS)
    np.testing.assert_allclose(columns.apply(frame), wanted, atol=1e-6)
    assert (data.columns, data.prepared) == (columns.names, columns)
    assert len(columns.names) == wanted.shape[1]


@pytest.mark.skipif(
    "BAYESFL_DATA" not in os.environ, reason="needs the folder of data that BAYESFL_DATA names"
)
@pytest.mark.parametrize("name", ["heart", "brca"])
def test_real_files_as_they_lie(name: str, recwarn: pytest.WarningsRecorder):
    """Missing values and all."""
    folder = Path(os.environ["BAYESFL_DATA"])
    path = folder / {"heart": "heart_disease/heart.csv", "brca": "tcga_brca/brca.csv"}[name]
    if not path.exists():
        pytest.skip(f"needs {path.name}")
    frame = pd.read_csv(path).drop_duplicates()
    roles: dict[str, Any] = (
        {"client": "centre", "target": "num"}
        if name == "heart"
        else {"client": "region", "target": "event"}
    )
    codes = ["cp", "thal"] if name == "heart" else []
    frame = frame.drop(columns=[c for c in ("split", "time") if c in frame])
    frame["key"] = np.arange(len(frame)) / 7
    data, columns = from_frame(frame, **roles, categories=codes)
    train = train_rows(data, columns, frame)
    wanted = by_hand(frame, train, codes, [c for c in frame.columns if c not in roles.values()])
    np.testing.assert_allclose(columns.apply(frame), wanted, atol=2e-5)


def test_nothing_of_other_rows_is_learnt(frame: pd.DataFrame):
    """A value changed in a test, validation or calibration row, and a new level there, change no
    training input.
    """
    options: dict[str, Any] = {**ROLES, "validation": 0.2, "calibration": 0.1}
    data, columns = from_frame(frame, **options)
    train = set(train_rows(data, columns, frame).tolist())
    others = [row for row in range(len(frame)) if row not in train]
    changed = frame.copy()
    changed.loc[others, "pressure"] = 1e6
    changed.loc[others, "pain"] = "new"
    again, same = from_frame(changed, **options)
    assert same == columns
    assert torch.equal(data.train.x[data.train.index], again.train.x[again.train.index])  # type: ignore[index]
    rare = columns.apply(changed.loc[others])
    assert not rare[
        :, [i for i, name in enumerate(columns.names) if name.startswith("pain is")]
    ].any()


def test_hospitals_learn_columns_without_pooling():
    """Each on its own machine, by numbers that JSON holds: columns and splits are those of the
    frame that nobody has.
    """
    frame = (
        hospitals().drop(columns="patient").assign(ill=lambda f: np.where(f["ill"], "yes", "no"))
    )
    options: dict[str, Any] = {**ROLES, "validation": 0.2}
    data, columns = from_frame(frame, **options)
    told = [
        json.loads(json.dumps(frame_statistics(part, **options)))
        for _, part in frame.groupby("hospital")
    ]
    found = Columns.of(told)
    assert found == columns
    for j, (_, part) in enumerate(frame.groupby("hospital")):
        mine, again = from_frame(part, **options, columns=found)
        assert again == mine.prepared == found
        assert (mine.inputs, mine.classes, mine.class_names) == (data.inputs, 2, ("no", "yes"))
        for name, split in mine.splits.items():
            x, y = split.client(0)
            wanted, labels = data.splits[name].client(j)
            assert torch.equal(x, wanted)  # type: ignore[arg-type]
            assert torch.equal(y, labels)


def test_classes_are_those_of_the_columns():
    """On a machine where one does not occur, too; names that are given are an order, and all must
    be known.
    """
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "h": ["A", "B"] * 50,
            "x": rng.normal(size=100),
            "grade": rng.choice(["low", "mid", "high"], 100),
        }
    )
    _, columns = from_frame(frame, client="h", target="grade", class_names=["low", "mid", "high"])
    assert columns.classes == ("low", "mid", "high")
    part = frame[(frame["h"] == "B") & (frame["grade"] != "low")]
    data, _ = from_frame(part, client="h", target="grade", columns=columns)
    assert (data.class_names, {*data.train.y.tolist()}) == (("low", "mid", "high"), {1, 2})
    ordered = frame.assign(
        grade=pd.Categorical(frame["grade"], categories=["low", "mid", "high"], ordered=True)
    )
    assert from_frame(ordered, client="h", target="grade")[0].class_names == ("low", "mid", "high")
    whole = frame.assign(grade=np.arange(100) % 3)
    _, columns = from_frame(whole, client="h", target="grade")
    assert (
        from_frame(whole[whole["grade"] < 2], client="h", target="grade", columns=columns)[
            0
        ].classes
        == 3
    )


def test_clients_must_agree_on_classes():
    """One order where one is given, and one kind of target."""
    frame = pd.DataFrame(
        {
            "h": ["A", "B"] * 20,
            "x": np.arange(40.0),
            "grade": ["low", "high"] * 10 + ["high", "low"] * 10,
        }
    )

    def told(**options: Any) -> dict[str, Any]:
        return frame_statistics(
            frame.assign(**options.pop("change", {})), client="h", target="grade", **options
        )

    one, other = told(class_names=["low", "high"]), told(class_names=["high", "low"])
    others = {
        **one,
        "clients": {f"{client}'": columns for client, columns in one["clients"].items()},
    }
    assert Columns.of([one, others]).classes == ("low", "high")
    for statistics, words in (
        ([one, other], r"different orders or names, .*class_names= everywhere"),
        (
            [told(), told(change={"grade": np.arange(40) % 2})],
            "text at some clients and numbers at others",
        ),
        ([told(), told()], r"statistics has the clients \['A', 'B'\] more than once"),
        (
            [
                told(),
                frame_statistics(frame.rename(columns={"x": "z"}), client="h", target="grade"),
            ],
            r"clients have other columns: \['x', 'z'\] are not everywhere",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            Columns.of(statistics)


def test_frames_are_raw_and_arrays_prepared():
    """Also where both have the same columns."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "h": ["A", "B"] * 50,
            "x": rng.normal(9, 3, size=100),
            "z": rng.normal(size=100),
            "y": np.arange(100) % 2,
        }
    )
    data, columns = from_frame(frame, client="h", target="y")
    assert columns.names == ("x", "z")
    one = run(
        bf.algorithms.fedavg(bf.models.mlp(2, hidden=4, outputs=2), epochs=1),
        data,
        evaluate_every=None,
    ).client("A")
    wanted = one.predict(columns.apply(frame)).probs
    for given in (frame, frame[["x", "z"]], frame[["z", "x"]]):
        assert torch.equal(one.predict(given).probs, wanted)  # type: ignore[arg-type]


def test_levels_that_no_row_knows_are_warned_of(frame: pd.DataFrame):
    """As of text with spaces, or of numbers in place of text; 3, 3.0 and "3.0" are one level."""
    _, columns = from_frame(frame, **ROLES, categories=["code"])
    number = frame["code"].astype(float)
    for twin in (number, frame["code"].astype(str), number.astype(str)):
        found = columns.apply(frame.assign(code=twin))
        np.testing.assert_array_equal(found, columns.apply(frame))
    with pytest.warns(
        UserWarning,
        match=r"'code': 200 of 200 rows have no level of the training rows, \['3', '6', '7'\], "
        r"but for instance '03'",
    ):
        columns.apply(frame.assign(code="03"))
    with pytest.warns(UserWarning, match=r"'code': 100 of 200 rows have no level"):
        columns.apply(frame.assign(code=[3, 33] * 100))
    declared, _ = from_frame(frame.astype({"code": "category"}), **ROLES)
    assert declared.columns == columns.names


@pytest.mark.filterwarnings("error")
def test_rows_unlike_the_training_rows_are_warned_of(frame: pd.DataFrame):
    """A code for what is missing, or another unit of all rows; the numbers are taken
    nevertheless.
    """
    data, columns = from_frame(frame, **ROLES)
    new = frame.drop(columns=["ill", "hospital"]).head(40)
    with pytest.warns(
        UserWarning,
        match=r"'age': 2 of 40 rows are far from the training rows, for instance 999; training "
        r"rows have a mean of \d+",
    ):
        x = columns.apply(new.assign(age=[999.0, 999.0, *new["age"][2:]]))
    assert x[0, 0] > 90
    with pytest.warns(
        UserWarning,
        match=r"'pressure': half of the rows are far off, their median is 1[0-9]\.\d+; .*is it "
        r"another unit",
    ):
        columns.apply(new.assign(pressure=new["pressure"] / 10))
    columns.apply(new)
    one = run(
        bf.algorithms.fedavg(bf.models.mlp(data.inputs, hidden=4, outputs=2), epochs=1),
        data,
        evaluate_every=None,
    ).client("Bern")
    with pytest.warns(UserWarning, match="'age': 1 of 1 rows are far") as caught:
        one.predict(new.head(1).assign(age=744.0))
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
def test_what_no_training_row_lacked_is_warned_of(frame: pd.DataFrame):
    """A mean in place of most rows' values would otherwise look like data; a single row of many may
    lack one.
    """
    _, columns = from_frame(frame, **ROLES)
    with pytest.warns(
        UserWarning, match=r"'age'.*: 200 of 200 rows lack it, which no training row did: the mean"
    ):
        columns.apply(frame.assign(age=None).astype({"age": float}))
    frame.loc[3, "age"] = None
    columns.apply(frame)


def test_large_ids_are_not_merged():
    """Nor codes of a category; of any library."""
    frame = (
        hospitals(120)
        .drop(columns="patient")
        .assign(hospital=lambda f: 2**60 + np.arange(len(f)) % 4)
    )
    frame["code"] = 2**60 + frame["code"] % 3
    for twin in with_polars([frame, frame.convert_dtypes()]):
        data, columns = from_frame(twin, **ROLES, categories=["code"])
        assert data.client_names == tuple(str(2**60 + k) for k in range(4))
        assert [name for name in columns.names if "code" in name] == [
            f"code is {2**60 + k}" for k in range(2)
        ]


def test_names_that_look_like_numbers_are_names(frame: pd.DataFrame):
    frame["hospital"] = frame["hospital"].map(
        {"Basel": "1", "Bern": "1.0", "Chur": "v1", "Genf": "2"}
    )
    for twin in (frame, frame.astype({"hospital": "category"})):
        assert from_frame(twin, **ROLES)[0].client_names == ("1", "1.0", "2", "v1")
    grades = frame.assign(ill=pd.Categorical(np.array(["7", "7.0"])[np.arange(200) % 2]))
    assert from_frame(grades, **ROLES, class_names=["7.0", "7"])[0].class_names == ("7.0", "7")
    morphology = frame.assign(code=[f"85{k % 3}0/3" for k in range(200)])  # no dates
    assert "code is 8500/3" in from_frame(morphology, **ROLES)[1].names


def test_classes_of_types_keep_their_order(frame: pd.DataFrame):
    """Ordered categories of pandas, enumerations of polars, and numbers as categories, which are
    sorted as such.
    """
    level = pd.Categorical(
        np.array(["mid", "low", "high"])[np.arange(200) % 3],
        categories=["low", "mid", "high"],
        ordered=True,
    )
    whole = pd.Categorical(np.arange(200) % 11)
    for kind, names in ((level, ("low", "mid", "high")), (whole, tuple(map(str, range(11))))):
        assert from_frame(frame.assign(ill=kind), **ROLES)[0].class_names == names
    polars = pytest.importorskip("polars")
    enumerated = polars.from_pandas(frame.assign(ill=level.astype(str))).with_columns(
        polars.col("ill").cast(polars.Enum(["low", "mid", "high"]))
    )
    assert from_frame(enumerated, **ROLES)[0].class_names == ("low", "mid", "high")
    codes = polars.from_pandas(frame.assign(ill=(np.arange(200) % 3).astype(str))).with_columns(
        polars.col("ill").cast(polars.Categorical)
    )
    assert from_frame(codes, **ROLES)[0].class_names == ("0", "1", "2")


@pytest.mark.parametrize("levels", [[10, 9, 2], ["1", "2", "10"], [-1.5, 0.5, -10.5]])
def test_classes_are_counted_alike_everywhere(levels: list[Any]):
    """Numbers as categories by size: in the data, in the columns, and on machines that
    have these.
    """
    frame = (
        hospitals()
        .drop(columns="patient")
        .assign(ill=pd.Categorical(np.array(levels, dtype=object)[np.arange(200) % 3]))
    )
    data, columns = from_frame(frame, **ROLES)
    assert data.class_names == columns.classes == tuple(sorted(map(str, levels), key=float))
    again, _ = from_frame(frame, **ROLES, columns=columns, class_names=list(data.class_names))
    assert (again.class_names, again.train.y.tolist()) == (data.class_names, data.train.y.tolist())


def test_counts_stay_numbers_beside_columns():
    frame = hospitals().drop(columns="patient").assign(ill=np.arange(200) % 30)
    _, columns = from_frame(frame, **ROLES, task="regression")
    assert from_frame(frame, **ROLES, columns=columns)[0].task == "regression"
    labels = frame.assign(ill=1.0)
    assert frame_statistics(labels, **ROLES, task="classification")["outputs"] == 2


def test_codes_do_not_depend_on_what_other_rows_lack(frame: pd.DataFrame):
    """Large ones beside a missing value are not rounded, of any type."""
    codes = pd.array(2**53 + np.arange(200) % 3, dtype="Int64")
    codes[5] = pd.NA
    kinds = (codes, pd.Categorical(codes), codes.astype(object))
    for twin in with_polars([frame.assign(code=kind) for kind in kinds]):
        _, columns = from_frame(twin, **ROLES, categories=["code"])
        place = [i for i, name in enumerate(columns.names) if "code" in name]
        assert [columns.names[i] for i in place] == [f"code is {2**53 + k}" for k in range(3)]
        found = columns.apply(twin)[:, place]
        assert found[6:].argmax(1).tolist() == (np.arange(200) % 3)[6:].tolist()
        assert not found[5].any()


@pytest.mark.filterwarnings("error")
def test_rare_flags_are_no_outliers():
    """Nor long tails among the rows of which columns are learnt."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "h": ["A", "B"] * 2000,
            "flag": np.arange(4000) % 1501 == 0,
            "lab": rng.lognormal(0, 1.5, 4000),
        }
    )
    frame["y"] = (rng.random(4000) < 0.4).astype(int)
    _, columns = from_frame(frame, client="h", target="y")
    columns.apply(frame.assign(lab=1.0))


def test_a_recipe_says_how_rows_were_split():
    data, _ = from_frame(
        hospitals(),
        **ROLES,
        group="patient",
        categories=["code"],
        validation=0.2,
        calibration=0.1,
        test_share=0.3,
        seed=3,
    )
    assert data.recipe == {
        "recipe": "from_frame",
        "client": "hospital",
        "target": "ill",
        "group": "patient",
        "categories": ["code"],
        "task": "classification",
        "seed": 3,
        "test": 0.3,
        "validation": 0.2,
        "calibration": 0.1,
    }


def test_columns_travel(tmp_path: Path):
    """As JSON, in clients' files and saved runs; new frames may have other columns, and these in
    any order.
    """
    frame = hospitals()
    data, columns = from_frame(frame.drop(columns="patient"), **ROLES)
    columns.save(tmp_path / "columns.json")
    assert Columns.load(tmp_path / "columns.json") == columns
    result = run(
        bf.algorithms.fedavg(bf.models.mlp(data.inputs, hidden=4, outputs=2), epochs=1),
        data,
        evaluate_every=None,
    )
    new = hospitals(20, seed=5)[["patient", *reversed(INPUTS)]]
    wanted = result.client("Chur").predict(columns.apply(new)).probs
    result.client("Chur").save(tmp_path / "chur")
    result.save(tmp_path / "run")
    for model in (
        result.client("Chur"),
        bf.load_client(tmp_path / "chur", result.algorithm),
        bf.load(tmp_path / "run", result.algorithm, data).client("Chur"),
        bf.load(tmp_path / "run", result.algorithm).client("Chur"),
    ):
        assert torch.equal(model.predict(new).probs, wanted)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"has no columns \['age'\]"):
            model.predict(new.drop(columns="age"))
        with pytest.raises(
            ValueError, match=r"'age' holds text where the training data hold numbers"
        ):
            model.predict(new.assign(age="old"))
    assert data.hash != from_frame(frame.drop(columns=["patient", "age"]), **ROLES)[0].hash


def test_values_are_read_back(frame: pd.DataFrame):
    """From inputs: numbers in their units, NaN where they were missing; levels as they were, None
    for none or unknown ones.
    """
    _, columns = from_frame(frame, **ROLES)
    frame.loc[9, "pain"] = "never seen"
    x = columns.apply(frame)
    for name in ("age", "pressure"):
        np.testing.assert_allclose(columns.values(x, name), frame[name].to_numpy(), rtol=1e-5)
    # To the digit, so that they can be groups.
    assert columns.values(torch.from_numpy(x), "code").tolist() == frame["code"].tolist()
    known = set(columns.parts[1].levels)  # type: ignore[union-attr] (a category's)
    assert known >= {"none", "typical", "atypical"}
    levels = [one if one in known else None for one in frame["pain"]]
    assert columns.values(x, "pain").tolist() == levels


@pytest.mark.parametrize("seed", range(3))
def test_a_group_stands_in_one_split(seed: int):
    """Also where its rows are of several clients; shares are met about, and other rows than a
    group's move freely.
    """
    frame = hospitals(400)
    options: dict[str, Any] = {
        **ROLES,
        "group": "patient",
        "validation": 0.2,
        "calibration": 0.2,
        "seed": seed,
    }
    frame["key"] = np.arange(len(frame)).astype(float)
    data, columns = from_frame(frame, **options)
    assert "patient" not in columns.names
    key = next(part for part in columns.parts if part.name == "key")
    place = columns.names.index("key")
    split_of: dict[int, set[str]] = {}
    for name, split in data.splits.items():
        values = split.x[split.index, place].double() * key.scale + key.mean  # type: ignore[index, union-attr]
        for row in values.round().long().tolist():
            split_of.setdefault(int(frame["patient"].iloc[row]), set()).add(name)
    assert all(len(names) == 1 for names in split_of.values())
    assert sum(split.counts.sum() for split in data.splits.values()) == len(frame)
    assert 0.1 < data.test.counts.sum() / len(frame) < 0.35
    assert 0.03 < data.validation.counts.sum() / len(frame) < 0.3
    for part in frame["hospital"].unique():
        # A patient of two hospitals stands in the same split on both machines.
        alone, _ = from_frame(frame[frame["hospital"] == part], **options, columns=columns)
        for name, split in alone.splits.items():
            values = split.x[split.index, place].double() * key.scale + key.mean  # type: ignore[index, union-attr]
            assert all(
                split_of[int(frame["patient"].iloc[row])] == {name}
                for row in values.round().long().tolist()
            )


def test_frames_of_any_library(frame: pd.DataFrame):
    """Of polars by way of Arrow, of pandas with its nullable and string types, and with objects:
    one federation.
    """
    data, columns = from_frame(frame, **ROLES)
    twins = [
        frame.convert_dtypes(),
        frame.astype(object),
        frame.astype({"pain": "category"}),
        frame.set_index(np.arange(200)[::-1]),
    ]
    pl = pytest.importorskip("polars")
    pytest.importorskip("pyarrow")
    twins.append(
        pl.DataFrame(
            {name: [None if pd.isna(v) else v for v in frame[name].tolist()] for name in frame}
        )
    )
    for twin in twins:
        other, same = from_frame(twin, **ROLES)
        assert same == columns, type(twin)
        assert other.hash == data.hash


def test_targets_of_each_kind(frame: pd.DataFrame):
    """Text and truth values are classes, floats are numbers, several columns several numbers."""
    named, _ = from_frame(frame.assign(ill=np.where(frame["ill"], "yes", "no")), **ROLES)
    assert (named.task, named.class_names, named.classes) == ("classification", ("no", "yes"), 2)
    assert torch.equal(from_frame(frame, **ROLES)[0].train.y, named.train.y)
    number, _ = from_frame(frame, client="hospital", target="age", task="regression")
    two, columns = from_frame(
        frame.dropna(), client="hospital", target=["age", "pressure"], task="regression"
    )
    assert (number.task, number.outputs, two.outputs) == ("regression", 1, 2)
    assert "age" not in columns.names


def test_a_constant_is_0(frame: pd.DataFrame):
    _, columns = from_frame(frame.assign(age=60.0), **ROLES)
    assert not columns.apply(frame.assign(age=60.0))[:, columns.names.index("age")].any()


def test_clients_without_rows_in_a_split_are_named():
    """As where all of one's rows are one group; a client without training rows is refused."""
    frame = (
        hospitals()
        .drop(columns="patient")
        .assign(patient=lambda f: np.where(f["hospital"] == "Genf", -1, np.arange(len(f))))
    )
    with pytest.warns(UserWarning, match=r"clients \['Genf'\] have no test rows"):
        data, _ = from_frame(frame, **ROLES, group="patient", seed=1)
    assert data.test.counts[-1] == 0
    with pytest.raises(
        ValueError,
        match=r"client 'Genf', who has no training data: leave its rows out",
    ):
        from_frame(frame, **ROLES, group="patient", seed=0)


def test_floats_count_all_classes_that_were_learnt(frame: pd.DataFrame):
    labels, roles = frame.assign(ill=np.arange(200.0) % 3), {**ROLES, "task": "classification"}
    _, columns = from_frame(labels, **roles)
    assert from_frame(labels[labels["ill"] < 2], **roles, columns=columns)[0].outputs == 3


def test_statistics_of_clients_that_lack_the_first_class():
    """Are those of all clients together; a client counts once."""
    frame = (
        hospitals()
        .drop(columns="patient")
        .assign(ill=lambda f: np.where(f["hospital"] == "Bern", 2, f["ill"].astype(int)))
    )
    frame["pressure"] = frame["pressure"].where(frame["hospital"] != "Bern")
    told = [frame_statistics(own, **ROLES) for _, own in frame.groupby("hospital")]
    columns = Columns.of(told)
    assert columns.outputs == 3
    assert columns == from_frame(frame, **ROLES)[1]


CODE = np.arange(200)


def _learnt(**change: Any) -> Columns:
    """The columns of the hospitals, of which some are changed."""
    return from_frame(hospitals().drop(columns="patient").assign(**change), **ROLES)[1]


GRADES = np.array(["low", "mid", "high"])[CODE % 3]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (
            lambda f: f.assign(ill=np.arange(200) % 40),
            {},
            "'ill' holds 40 different whole numbers, .*task='regression'",
        ),
        (
            lambda f: f.assign(ill=(f["age"] / 7).round(3).astype(str)),
            {},
            r"'ill' holds numbers as text, .*to_numeric, or pass class_names=",
        ),
        (
            lambda f: f.assign(ill=["0", "1", "?", "0"] * 50),
            {},
            r"'ill' holds numbers as text, as '0' beside '\?'",
        ),
        (
            lambda f: f.assign(name=[f"patient {i}" for i in CODE]),
            {},
            r"'name' has 1\d\d levels, more than 100: leave it out",
        ),
        (
            lambda f: f.assign(ill=GRADES),
            {"class_names": ["low", "mid"]},
            r"'ill' holds \['high'\], which are none of the classes \['low', 'mid'\]",
        ),
        (lambda f: f.assign(ill=GRADES), {"task": "regression"}, "holds text, which is no number"),
        (
            lambda f: f.assign(ill=GRADES),
            {"class_names": ["low", "mid", "high"], "columns": _learnt(ill=GRADES)},
            r"class_names are \['low', .*columns= has the classes \['high',",
        ),
        (
            lambda f: f,
            {"target": "age", "columns": _learnt(), "task": "regression"},
            r"columns= has the inputs \['age'\], which are client, target or group",
        ),
        (lambda f: f.assign(age=None), {}, r"'age' has no value in any training row; leave it out"),
        (
            lambda f: f.assign(hospital=CODE % 4 * 1.5),
            {},
            r"'hospital' holds floats, and a client .*astype\('int64'\)",
        ),
        (
            lambda f: f.assign(hospital=f["hospital"].where(CODE != 3)),
            {},
            r"'hospital' has no client in 1 rows, first row 3: .*dropna",
        ),
        (
            lambda f: f.assign(ill=f["ill"].astype(object).where(CODE != 3)),
            {},
            r"target 'ill' is missing in 1 rows, first row 3",
        ),
        (
            lambda f: f,
            {"client": "clinic"},
            r"client: frame has no columns \['clinic'\], only \['hospital'",
        ),
        (lambda f: f, {"target": ["ill", "gone"]}, r"target: frame has no columns \['gone'\]"),
        (lambda f: f, {"categories": ["gone"]}, r"categories: frame has no columns \['gone'\]"),
        (
            lambda f: f.drop(columns="code").assign(code=1).rename(columns={"code": "age"}),
            {},
            r"several columns called \['age'\]",
        ),
        (
            lambda f: f.assign(hospital=np.where(CODE == 5, "Thun", f["hospital"])),
            {},
            r"client 'Thun', who has no training data",
        ),
        (
            lambda f: f,
            {"target": ["ill", "pain"]},
            r"several targets must be numbers, \['pain'\] hold text",
        ),
        (lambda f: f, {"test_share": 1.5}, r"test_share is a share .* got 1\.5"),
    ],
)
def test_what_is_refused(change: Any, options: dict[str, Any], words: str, frame: pd.DataFrame):
    """By the column's name, with what to do."""
    with pytest.raises(ValueError, match=words):
        from_frame(change(frame.fillna({"pain": "none"})), **{**ROLES, **options})


def test_inputs_of_one_name_are_told_apart():
    """Those of a column that is called as another's indicator of missing values."""
    frame = hospitals().drop(columns="patient").assign(**{"pressure is missing": CODE % 7})
    _, columns = from_frame(frame, **ROLES)
    x = columns.apply(frame)
    assert columns.names.count("pressure is missing") == 2
    assert columns.values(x, "pressure is missing").tolist() == (CODE % 7).tolist()
    np.testing.assert_allclose(columns.values(x, "pressure"), frame["pressure"], rtol=1e-5)
