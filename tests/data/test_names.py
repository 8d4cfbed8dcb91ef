"""Names of clients and classes: in lists alone, and the same classes under the same numbers."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf
from bayesfl.data import from_arrays
from tests.data.made import small

X, Y, IDS = np.arange(24.0)[:, None], np.arange(24) % 3, ["c", "a", "b"] * 8


@pytest.mark.parametrize(
    "given",
    [{"c": "Zurich", "a": "Basel", "b": "Bern"}, {"Zurich", "Basel", "Bern"}, "abc", 3],
    ids=["mapping", "set", "text", "number"],
)
def test_names_are_a_list(given: Any):
    """A mapping would have given its keys, in its own order, to the sorted ids; a set gives some
    order.
    """
    with pytest.raises(
        TypeError,
        match=r"^names must be a list.*(Zurich|abc|3).* sorted client_ids, \['a', 'b', 'c'\]",
    ):
        from_arrays(X, Y, client_ids=IDS, names=given)
    with pytest.raises(TypeError, match=r"^names must be a list.*in the order of x"):
        from_arrays([X, X, X], [Y, Y, Y], names=given)


def test_the_remedy_names_clients_by_a_mapping():
    names: Any = {"c": "Zurich", "a": "Basel", "b": "Bern"}
    remedy = "[names[i] for i in client_ids]"
    with pytest.raises(TypeError, match=re.escape(remedy)):
        from_arrays(X, Y, client_ids=IDS, names=names)
    listed = eval(remedy, {"names": names, "client_ids": IDS})
    data = from_arrays(X, Y, client_ids=listed, test_share=0)
    assert data.client_names == ("Basel", "Bern", "Zurich")
    assert data.train.client(2)[0][0].item() == 0.0


def test_names_in_another_order_are_refused():
    """A column's by its index, where that holds the ids; a column with other indices is a list. Ids
    as they come in the rows: each client would have had another's id as its name.
    """
    towns, sorted_towns = (
        pd.Series({"c": "Zurich", "a": "Basel", "b": "Bern"}),
        ("Basel", "Bern", "Zurich"),
    )
    wrong: list[Any] = [towns, ["c", "a", "b"]]
    for given in wrong:
        with pytest.raises(ValueError, match=r"^names .*\['c', 'a', 'b'\].*\['a', 'b', 'c'\]"):
            from_arrays(X, Y, client_ids=IDS, names=given)
    fitting: list[Any] = [towns.sort_index(), pd.Series(sorted_towns), pd.Index(sorted_towns)]
    for given in fitting:
        assert from_arrays(X, Y, client_ids=IDS, names=given).client_names == sorted_towns
    assert from_arrays(X, Y, client_ids=IDS, names=["a", "b", "c"]).client_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({2: "dead", 0: "healthy", 1: "ill"}, "[class_names[k] for k in sorted(class_names)]"),
        ({"dead": 2, "ill": 1, "healthy": 0}, "sorted(class_names, key=class_names.get)"),
        ({"healthy", "ill", "dead"}, "numbers, 0 to 2"),
        ("abc", "numbers, 0 to 2"),
    ],
    ids=["by number", "by name", "set", "text"],
)
def test_class_names_are_a_list(given: Any, remedy: str):
    """Wherever they are given; the remedy makes the list of either mapping."""
    data, source = from_arrays(X, Y, client_ids=IDS), replace(small(3), class_names=given)
    for refused in (
        lambda: from_arrays(X, Y, client_ids=IDS, class_names=given),
        lambda: replace(data, class_names=given),
        lambda: bf.data.iid(source, clients=2),
    ):
        with pytest.raises(TypeError, match=rf"^class_names must be a list.*{re.escape(remedy)}"):
            refused()
    if isinstance(given, dict):
        assert eval(remedy, {"class_names": given}) == ["healthy", "ill", "dead"]


def test_class_names_are_texts_one_for_each_class():
    data = from_arrays(X, Y, client_ids=IDS, class_names=np.array(["a", "b", "c"]))  # type: ignore[arg-type]
    assert [(name, type(name)) for name in data.class_names or ()] == [(k, str) for k in "abc"]
    with pytest.raises(ValueError, match=r"^class_names .*3 classes, got 2"):
        bf.data.iid(replace(small(3), class_names=("a", "b")), clients=2)


def test_names_of_data_made_by_hand_are_a_list():
    data = from_arrays(X, Y, client_ids=IDS)
    wrong: Any = {"a": "Basel", "b": "Bern", "c": "Zurich"}
    with pytest.raises(
        TypeError, match=r"names must be a list.*'Basel'.*in the order of the clients"
    ):
        replace(data, client_names=wrong)


@pytest.mark.filterwarnings("error")
def test_names_that_are_almost_alike_are_told():
    """Case and surrounding space; they stay clients of their own."""
    ids = [{"c": "Bern", "a": "Bern ", "b": "bern"}[i] for i in IDS]
    with pytest.warns(
        UserWarning,
        match=r"\['Bern', 'Bern ', 'bern'\] differ only by case or surrounding space.*client_ids",
    ) as told:
        data = from_arrays(X, Y, client_ids=ids)
    assert data.clients == 3
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match=r"\['Bern', 'BERN'\]"):
        from_arrays([X, X, X], [Y, Y, Y], names=["Bern", "Chur", "BERN"])
    from_arrays(X, Y, client_ids=IDS)
