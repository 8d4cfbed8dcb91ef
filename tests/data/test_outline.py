"""Finding a client by its name or its number."""

from json import dumps, loads

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.data.outline import Outline, place

NAMES = ("Zurich", "Basel", "7", "1")


def test_a_client_is_a_name_or_a_number():
    """Where the two agree there is nothing to guess; a place need not be a name."""
    assert [place(client, NAMES) for client in ("Basel", 0, np.int64(2), "7")] == [1, 0, 2, 2]
    assert [place(1, ("0", "1", "2")), place(0, ("1", "2", "3"))] == [1, 0]


@pytest.mark.parametrize(
    ("client", "names", "words"),
    [
        ("Bsel", NAMES, r"'Bsel'.*'Basel'"),
        (4, NAMES, r"0 to 3, got 4"),
        (7, NAMES, r"got 7.*'7' is the name"),
        (-1, NAMES, r"got -1"),
        (1, NAMES, r"client 1 .*'Basel'.*'1' is the name of another"),
        (3, ("1", "2", "3"), r"got 3; '3' is the name of one"),
        ("VA", ("va", "nc", "bo"), r"no client 'VA'; .* are \['va'\]"),
        ("a", ("a", "b", "a"), r"clients \[0, 2\] .*'a'; pass a number"),
    ],
)
def test_what_could_be_either_of_two_is_refused(client, names, words):
    """Which is meant is not guessed; the nearest names are offered."""
    with pytest.raises(ValueError, match=words):
        place(client, names)


def test_names_that_read_as_a_number_are_that_number():
    """Ids with zeros in front, and those that pandas made floats of; a client's own name is no
    other's.
    """
    for names in (("01", "02", "03"), ("1.0", "2.0", "3.0")):
        with pytest.raises(
            ValueError,
            match=rf"client 1 is ambiguous: number 1 is '{names[1]}', and '{names[0]}' is the "
            r"name of another",
        ):
            place(1, names)
        with pytest.raises(ValueError, match=rf"got 3; '{names[2]}' is the name of one"):
            place(3, names)
        assert place(0, names) == 0
    assert place(1, ("00", "01", "x", "nan", "1e400")) == 1
    assert place(1, ("01", "1", "2")) == 1


def test_hospitals_whose_ids_are_numbers_can_be_held_out():
    data = bf.data.from_arrays(
        torch.randn(40, 2), torch.arange(40) % 2, client_ids=[30, 20, 10, 1] * 10
    )
    rest, held = data.hold_out(1)
    assert sorted((*rest.client_names, *held.client_names)) == sorted(data.client_names)
    assert data.select(["30"]).client_names == ("30",)


def test_numbers_are_places_where_names_are_numbers_too():
    """In a selection as in `place`: what could be either of two clients is refused, with the
    remedy.
    """
    data = bf.data.from_arrays(torch.randn(30, 2), torch.arange(30) % 2, client_ids=[1, 2, 3] * 10)
    assert data.select([0]).client_names == data.select(["1"]).client_names == ("1",)
    assert data.select(["3", "1"]).client_names == ("3", "1")
    with pytest.raises(ValueError, match=r"client 1 is ambiguous: .*; pass a name, as text"):
        data.select([0, 1])


def test_shapes_of_several_inputs_survive_json():
    """Tuples of shapes, mappings, and numbers without axes."""
    x = {
        "image": np.zeros((4, 3, 2), np.uint8),
        "rest": (np.zeros(4), {"tokens": np.zeros((4, 5), int)}),
    }
    outline = bf.data.from_arrays(x, [0, 1, 0, 1], client_ids=[0, 0, 1, 1], test_share=0).outline
    assert outline.inputs == {"image": (3, 2), "rest": ((), {"tokens": (5,)})}
    assert Outline.read(loads(dumps(outline.described()))) == outline
