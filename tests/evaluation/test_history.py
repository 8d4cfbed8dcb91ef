"""The table of a run: columns of rows that need not agree."""

import math

import numpy as np
import pytest

from bayesfl.evaluation.history import History


def history() -> History:
    """Three rounds, of which the second was not evaluated."""
    return History(
        [
            {"round": 1, "train_nll": 0.9, "validation_nll": 0.8, "personal_accuracy": 0.5},
            {"round": 2, "train_nll": 0.7},
            {
                "round": 3,
                "train_nll": 0.6,
                "validation_nll": 0.5,
                "personal_accuracy": 0.75,
                "personal_pooled_accuracy": 0.7,
            },
        ]
    )


def test_columns_in_order_of_appearance():
    """A column that comes late comes last, and none comes twice."""
    assert history().columns == [
        "round",
        "train_nll",
        "validation_nll",
        "personal_accuracy",
        "personal_pooled_accuracy",
    ]
    assert History().columns == []


def test_column_is_an_array_with_nan_where_missing():
    """One float a round; a round that was not evaluated has NaN."""
    for column, values in (
        ("round", [1.0, 2.0, 3.0]),
        ("validation_nll", [0.8, math.nan, 0.5]),
        ("personal_pooled_accuracy", [math.nan, math.nan, 0.7]),
    ):
        np.testing.assert_array_equal(history()[column], np.array(values), strict=True)


def test_unknown_column_offers_the_nearest():
    """The KeyError names what was asked and the nearest there is; the first columns where nothing
    is near.
    """
    with pytest.raises(
        KeyError,
        match=r"no column 'accuracy'.* 5 .*\['personal_accuracy', 'personal_pooled_accuracy'\]",
    ):
        history()["accuracy"]
    with pytest.raises(
        KeyError,
        match=r"no column 'x'.*\['round', 'train_nll', 'validation_nll', 'personal_accuracy'\]",
    ):
        history()["x"]


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ("val_loss", r"\[.*'validation_nll'.*has all.$"),
        ("Validation_NLL", r"\[.*'validation_nll'"),
    ],
)
def test_a_column_by_another_librarys_name_offers_the_one_that_is_meant(asked: str, offered: str):
    with pytest.raises(KeyError, match=rf"^\"no column '{asked}'.* are {offered}"):
        history()[asked]


def test_best_ignores_what_was_not_measured():
    """The highest or the lowest, by the measure's name unless it is said; a round without a value
    never wins.
    """
    for column, lowest, round in (
        ("personal_accuracy", None, 3),
        ("validation_nll", True, 3),
        ("validation_nll", None, 3),
        ("validation_nll", False, 1),
        ("train_nll", None, 3),
    ):
        assert history().best(column, lowest=lowest)["round"] == round


def test_best_of_what():
    """The best of a number of rounds is not known."""
    table = History([{"round": 1, "validation_nll": math.nan}, {"round": 2}])
    with pytest.raises(ValueError, match=r"'round' .*lowest=True"):
        table.best("round")
    assert table.best("round", lowest=True)["round"] == 1


def test_append_and_iterate():
    """Rows are copied in, in both ways, and come back in order."""
    first, second = {"round": 1}, {"round": 2}
    table = History([first])
    table.append(second)
    first["round"] = second["round"] = 9
    assert [row["round"] for row in table] == [1, 2]
    assert len(table) == 2


def test_repr_shows_the_last_evaluation():
    """The last evaluated round, its personal measures but not the pooled ones; or that there is
    none.
    """
    table = history()
    table.append({"round": 4})
    assert repr(table) == "History(4 rounds; personal_accuracy 0.75)"
    assert repr(History([{"round": 1}])) == "History(1 rounds, not evaluated)"


def test_rows_by_place():
    """An integer is a place, as in a list, whatever its type; a slice is a history of
    these rows.
    """
    history = History([{"round": 1, "a": 2.0}, {"round": 2}])
    assert history[-1] == history[np.int64(1)] == {"round": 2}
    assert history[0]["a"] == 2.0
    assert history[:1].rows == history.rows[:1]
    with pytest.raises(IndexError):
        history[2]


def recorded() -> History:
    """Three clients; the second round was not evaluated, and the third client has no rows."""
    found = History()
    for round, values in ((1, [0.5, 0.7, math.nan]), (2, None), (3, [0.25, 1.0, math.nan])):
        found.append({"round": round})
        if values is not None:
            found.record({"personal_nll": np.array(values)})
            found.record({"global_nll": np.array(values) + 1})
    return found


def test_clients_values_have_a_row_for_each_round():
    """NaN for a round that was not evaluated, a slice has the rows of its rounds, and a copy goes
    its own way.
    """
    wanted = np.array([[0.5, 0.7, math.nan], [math.nan] * 3, [0.25, 1.0, math.nan]])
    whole = recorded()
    np.testing.assert_array_equal(whole.clients("personal_nll"), wanted, strict=True)
    np.testing.assert_array_equal(whole.clients("global_nll"), wanted + 1)
    np.testing.assert_array_equal(whole[1:].clients("personal_nll"), wanted[1:])
    assert whole[:0].clients("personal_nll").shape == (0, 3)
    before = whole.copy()
    whole.record({"personal_nll": np.zeros(3), "before_pool_nll": np.ones(3)})
    np.testing.assert_array_equal(before.clients("personal_nll"), wanted)
    np.testing.assert_array_equal(whole.clients("personal_nll")[2], np.zeros(3))
    np.testing.assert_array_equal(whole.clients("global_nll"), wanted + 1)


def test_what_was_not_recorded_names_the_option():
    """And what was recorded."""
    for found, there in ((history(), ""), (recorded(), "'personal_nll', 'global_nll'")):
        with pytest.raises(KeyError, match=rf"'personal_ece' .*only \[{there}\].*record_clients="):
            found.clients("personal_ece")
