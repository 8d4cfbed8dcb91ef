"""What becomes of each kind of column, line by line of the table in docs/howto/own-data.md."""

import unicodedata
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.data import Columns, frame_statistics, from_frame
from tests.federation.made import run

ROWS = 120
ROLES: dict[str, Any] = {"client": "h", "target": "y"}
CAFE, DECOMPOSED = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
WAYS = {
    "male": ["male", " male", "male\t", "\u00a0male "],
    "not known": ["not known", "not  known", "not\u00a0known"],
    CAFE: [CAFE, DECOMPOSED],
}
"""Ways in which readers see the same level written."""


def frame(values: Any, **others: Any) -> pd.DataFrame:
    """Rows of two clients with a number, a target, and values in column `c`, in turn if they are
    fewer.
    """
    rng = np.random.default_rng(0)
    made = {"h": rng.choice(["A", "B"], ROWS), "z": rng.normal(size=ROWS)}
    turns = [values[k % len(values)] for k in range(ROWS)] if isinstance(values, list) else values
    return pd.DataFrame({**made, "y": rng.integers(0, 2, ROWS), "c": turns, **others})


def test_a_client_in_another_unit_is_told_of():
    """A mean many standard deviations of the others' rows away, not one that differs a little."""
    rng = np.random.default_rng(0)
    made = pd.DataFrame({"h": rng.choice(list("ABC"), 400), "p": rng.normal(130, 15, 400)})
    made["y"] = rng.integers(0, 2, 400)
    other = made.assign(p=np.where(made.h == "B", made.p / 7.5, made.p))
    with pytest.warns(UserWarning, match=r"'p' has a mean of 17.* at 'B' and of 1[23].* elsewhere"):
        from_frame(other, **ROLES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_frame(made.assign(p=np.where(made.h == "B", made.p + 20, made.p)), **ROLES)


def test_a_number_of_its_own_range_at_each_client_looks_like_an_identifier():
    """One warning, not one for each client."""
    made = pd.DataFrame({"h": np.repeat(list("ABCDEFGHI"), 30), "patient": np.arange(270)})
    made["y"] = np.arange(270) % 2
    with pytest.warns(UserWarning, match=r"columns: 'patient' looks like an identifier: [^;]*$"):
        from_frame(made, **ROLES)


def learnt(values: Any, **others: Any) -> tuple[tuple[str, ...], list[str]]:
    """The names of the inputs that come of column `c`, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, columns = from_frame(frame(values, **others), **ROLES)
    return columns.names[1:], [str(one.message) for one in caught]


def later(columns: Columns, values: Any) -> tuple[np.ndarray, list[str]]:
    """The inputs that come of column `c` in a later frame, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = columns.apply(frame(values))[:, 1:]
    return x, [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["a", "b", "c"], ("c is a", "c is b", "c is c")),
        (["yes", "no"], ("c is no", "c is yes")),
        (["True", "False"], ("c is False", "c is True")),
        ([True, False], ("c",)),
        (["a", "NA", "?"], ("c is ?", "c is NA", "c is a")),
        (["a", None, " ", ""], ("c is a",)),
        (["1a", "1b", "2a", "2b", "3"], ("c is 1a", "c is 1b", "c is 2a", "c is 2b", "c is 3")),
        (["1st", "2nd", "3rd"], ("c is 1st", "c is 2nd", "c is 3rd")),
        (["5", "a", "b"], ("c is 5", "c is a", "c is b")),
        ([2, 1, " ", None], ("c", "c is missing")),
        ([way for ways in WAYS.values() for way in ways], tuple(f"c is {w}" for w in sorted(WAYS))),
    ],
)
def test_what_is_taken_and_not_said(values: list[Any], names: tuple[str, ...]):
    found, said = learnt(values)
    assert found == names
    assert [one for one in said if "constant" not in one] == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["1 234", "20 000", "900"], r"thousands apart, as '1 234': .*thousands=' '"),
        (["1'234", "2'234'567"], 'thousands apart, as "1\'234"'),
        ([f"{k},234" for k in range(46)], r"numbers with commas, as '0,234': .*thousands=','"),
        (["1", "2", "3", "1,5", "2,5", "3,5", "?"], "numbers with commas, as '1,5'"),
        (["0,5", "1,5"], r"numbers with commas, as '0,5': .*decimal=','"),
        (["1", "2", " ", ""], r"numbers as text, as '1': make .*to_numeric, or.*categories="),
        (["1", "2", "NA"], r"'1' beside 'NA', which may stand .*to_numeric\(errors='coerce'\)"),
        ([1e300], r"infinite or too large numbers, first 1e\+300 in row 0"),
        (pd.Categorical([1.0, np.inf] * (ROWS // 2)), "infinite or too large numbers, first inf"),
        (["2026-01-31", "2026-02-01"], "dates as text, as '2026-01-31'"),
        (["2026/01/31", "2026/02/01"], "dates as text"),
        (["01 Jan 2026", "28 Jan 2026"], "dates as text"),
        (["00:30", "01:30", "unknown"], "dates as text, as '00:30'"),
        (pd.date_range("2026-01-01", periods=ROWS), r"\['Timestamp'\].*\.dt\.days"),
        ([date(2026, 1, 1)], r"types \['date'\]"),
        ([[1]], r"types \['list'\]"),
        (pd.to_timedelta(np.arange(ROWS), unit="D"), r"\['Timedelta'\]"),
        ([1, "a"], r"types \['int', 'str'\]"),
    ],
)
def test_what_is_refused(values: Any, words: str):
    """With the remedy, on hospitals' own machines, too."""
    for make in (from_frame, frame_statistics):
        with pytest.raises(ValueError, match=f"column 'c' .*{words}"):
            make(frame(values), **ROLES)


def test_remedies_make_numbers():
    """Those that the messages name; `categories=` keeps text as it is."""
    numbers = frame(["1", "2", "NA"])
    numbers["c"] = pd.to_numeric(numbers["c"], errors="coerce")
    assert from_frame(numbers, **ROLES)[1].names == ("z", "c", "c is missing")
    doses = frame(["10 mg", "20 mg", "placebo"])
    assert "c is 20 mg" in from_frame(doses, **ROLES, categories=["c"])[1].names
    assert "c is 20 mg" in from_frame(doses.astype({"c": "category"}), **ROLES)[1].names


@pytest.mark.parametrize("kind", ["object", "category", "string", "polars"])
def test_levels_that_look_alike_are_one(kind: str):
    """In training rows and in later ones, of any library."""

    def typed(values: list[Any]) -> Any:
        if kind != "polars":
            return frame(values).astype({"c": kind})
        pytest.importorskip("pyarrow")
        return pytest.importorskip("polars").from_pandas(frame(values))

    _, columns = from_frame(typed(list(WAYS)), **ROLES)
    assert columns == from_frame(typed([ways[-1] for ways in WAYS.values()]), **ROLES)[1]
    x, said = later(columns, list(WAYS))
    for place in range(4):
        values = [ways[place % len(ways)] for ways in WAYS.values()]
        np.testing.assert_array_equal(columns.apply(typed(values))[:, 1:], x)
    assert x.sum() == ROWS
    assert not said
    assert set(columns.values(columns.apply(typed(list(WAYS))), "c")) == set(WAYS)


def test_levels_that_look_alike_are_one_in_every_role():
    """A patient whose id has a blank behind stands in one split; classes have their given order."""
    values = [f"{k}{' ' * (k % 2)}" for k in range(ROWS)]
    rough = frame(
        ["a", "b"],
        h=["A", "A ", "B", "\u00a0B"] * 30,
        y=["low", "high ", DECOMPOSED, " low"] * 30,
        patient=[f"{one} " if k % 3 else one for k, one in enumerate(values)],
    )
    plain = rough.assign(
        **{name: [" ".join(one.split()) for one in rough[name]] for name in ("h", "patient")},
        y=["low", "high", CAFE, "low"] * 30,
    )
    options: dict[str, Any] = {
        **ROLES,
        "group": "patient",
        "class_names": ["low", "high", DECOMPOSED],
    }
    data, columns = from_frame(rough, **options)
    assert (data.client_names, data.class_names) == (("A", "B"), ("low", "high", CAFE))
    assert (data.hash, columns) == (from_frame(plain, **options)[0].hash, columns)
    kind = pd.CategoricalDtype(["low", " low", "high ", DECOMPOSED], ordered=True)
    typed, _ = from_frame(rough.astype({"y": kind}), **ROLES, group="patient")
    assert typed.class_names == ("low", "high", CAFE)
    for role, words in (("h", "no client in 30 rows"), ("y", "missing in 30 rows")):
        with pytest.raises(ValueError, match=words):
            from_frame(rough.assign(**{role: ["A", "B", "A", " "] * 30}), **ROLES)


def test_a_loaded_client_reads_levels_as_the_trained_one(tmp_path: Path):
    """From its file, in which the columns stand."""
    data, _ = from_frame(frame(list(WAYS)), **ROLES)
    method = bf.algorithms.fedavg(bf.models.mlp(data.inputs, hidden=4, outputs=2), epochs=1)
    run(method, data, evaluate_every=None).client("A").save(tmp_path / "a")
    loaded = bf.load_client(tmp_path / "a", method)

    def probs(levels: list[str]) -> torch.Tensor:
        found = loaded.predict(frame(levels)).probs
        assert found is not None
        return found

    wanted = probs(list(WAYS))
    assert not torch.equal(wanted[0], probs(["male"])[1])
    for place in range(1, 4):
        assert torch.equal(probs([ways[place % len(ways)] for ways in WAYS.values()]), wanted)


def test_case_is_kept_and_said_once():
    """Of all columns and of the target in one warning, with whatever else there is to say."""
    found, said = learnt(
        ["Male", "male", "f"], y=["ill", "Ill", "well"] * 40, d=["x", "X"] * 60, one=[1.0] * ROWS
    )
    assert found == ("c is Male", "c is f", "c is male", "d is X", "d is x", "one")
    (told,) = said
    for words in (
        "levels of 'c' differ by case alone, and are kept apart: ['Male', 'male']",
        "levels of 'd' differ by case alone, and are kept apart: ['X', 'x']",
        "classes of the target differ by case alone, and are kept apart: ['Ill', 'ill']",
    ):
        assert words in told


def test_case_that_differs_between_hospitals_is_said():
    """By `Columns.of`, though each writes the level in one way; an order that is given names
    classes apart.
    """
    rows = frame(["m", "f"], y=["ill", "Ill", "well"] * 40)
    rows["c"] = np.where(rows["h"] == "A", rows["c"].str.upper(), rows["c"])
    order: dict[str, Any] = {"class_names": ["well", "ill", "Ill"]}
    told = [frame_statistics(part, **ROLES, **order) for _, part in rows.groupby("h")]
    with pytest.warns(UserWarning, match="levels of 'c' differ by case alone.*'M', 'm'") as caught:
        Columns.of(told)
    assert len(caught) == 1
    assert "classes" not in str(caught[0].message)


@pytest.mark.parametrize(
    ("values", "wanted", "words"),
    [
        (["b"], [[0, 1, 0]], None),
        (["new", "b", "b", "b", "b", "b"], [[0, 0, 0], [0, 1, 0]], None),
        (["new", "b", "b", "b"], [[0, 0, 0], [0, 1, 0]], "30 of 120 rows have no level of the"),
        (["A", "b", "b"], [[0, 0, 0], [0, 1, 0]], "for instance 'A'"),
        ([None, "b"], [[0, 0, 0], [0, 1, 0]], None),
        ([" ", None], [[0, 0, 0], [0, 0, 0]], "column 'c': none of 120 rows has a value"),
    ],
)
def test_levels_of_later_rows(values: list[Any], wanted: list[list[int]], words: str | None):
    """Those that no later row has keep their columns; those that no training row had have none."""
    _, columns = from_frame(frame(["a", "b", "c"]), **ROLES)
    x, said = later(columns, values)
    assert x[: len(wanted)].tolist() == wanted
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


def test_a_number_that_no_later_row_has_is_said():
    """Also where training rows lacked some; a single row may lack it."""
    _, columns = from_frame(frame([1.0, 2.0, None]), **ROLES)
    x, said = later(columns, [None])
    assert (len(said), x[0].tolist()) == (1, [0, 1])
    assert "column 'c': none of 120 rows has a value" in said[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns.apply(frame([None]).head(1))


def test_later_rows_are_warned_of_once():
    _, columns = from_frame(frame(["a", "b"]), **ROLES)
    with pytest.warns(UserWarning, match="column 'z': .* far .*; column 'c': 120 of") as caught:
        columns.apply(frame(["new"]).assign(z=1e6))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="column 'z': .*; column 'c': 120 of") as caught:
        from_frame(frame(["new"]).assign(z=1e6), **ROLES, columns=columns)
    assert len(caught) == 1
