"""What holds for every recipe: its options, what determines it, and what is said of mistakes."""

import functools
import inspect
import re
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from bayesfl import data
from bayesfl.data import (
    concept_drift,
    diabetes,
    dirichlet,
    dominant_classes,
    iid,
    label_groups,
    labels_per_client,
    load,
    pachinko,
    shards,
    swapped_labels,
)
from bayesfl.data.recipes.shared import Options
from tests.data.made import small

RECIPES = {
    name: make
    for name in data.__all__
    if "validation" in inspect.signature(make := getattr(data, name)).parameters
}
for own in ("from_arrays", "from_frame", "frame_statistics"):
    RECIPES.pop(own)


def told(make) -> list[str]:
    """The names in the Args section of a docstring, in its order."""
    section = (inspect.getdoc(make) or "").partition("Args:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    (\w+): ", section, re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_help_shows_every_option(name):
    """In the order of the signature; those that recipes share are of one type."""
    options, shared = inspect.signature(RECIPES[name]).parameters, get_type_hints(Options)
    assert told(RECIPES[name]) == list(options)
    assert told(Options) == list(inspect.signature(Options).parameters)
    assert all(options[key].annotation == shared[key] for key in options.keys() & shared.keys())
    assert {"seed", "validation", "calibration"} <= options.keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: concept_drift(clients=10, **options),
        lambda **options: labels_per_client(clients=10, **options),
        lambda **options: labels_per_client(clients=10, sizes="random", **options),
        lambda **options: dirichlet(clients=10, **options),
        lambda **options: dominant_classes(clients=10, **options),
        lambda **options: swapped_labels(clients=10, **options),
        lambda **options: shards(clients=10, **options),
        lambda **options: pachinko("digits", clients=10, **options),
        lambda **options: iid(clients=10, **options),
        lambda **options: diabetes(clients=10, **options),
    ],
    ids=[
        "concept_drift",
        "labels",
        "labels-random",
        "dirichlet",
        "dominant",
        "swapped",
        "shards",
        "pachinko",
        "iid",
        "diabetes",
    ],
)
def test_every_recipe_is_determined_by_its_arguments(make):
    data = make(seed=5)
    assert make(seed=5).hash == data.hash
    assert make(seed=6).hash != data.hash
    assert not torch.equal(make(seed=6).train.index, data.train.index)
    shared = make(seed=5, validation=0.1, calibration=0.1)
    assert shared.hash != data.hash
    assert shared.train.x is data.train.x  # one copy of the data, whatever is made of it
    together = torch.cat([split.index for name, split in shared.splits.items() if name != "test"])
    assert torch.equal(together.sort()[0], data.train.index.sort()[0])
    assert torch.equal(shared.test.index, data.test.index)
    held = load(str(data.source.name)).train
    assert (data.train.index < held).all()
    assert (data.test.index >= held).all()


LIMITED = [
    name
    for name, make in RECIPES.items()
    if {"max_size", "source"} <= set(inspect.signature(make).parameters)
]


@pytest.mark.parametrize("name", LIMITED)
def test_clients_may_have_so_many_examples_at_most(name):
    """The rows that stay are of the same client and split, each class in proportion, and other
    splits have what they had.
    """
    make = functools.partial(RECIPES[name], "digits")
    every, few = make(seed=1), make(seed=1, max_size=30)
    assert (few.recipe["max_size"], every.recipe.get("max_size")) == (30, None)
    assert few.train.counts.tolist() == np.minimum(every.train.counts, 30).tolist()
    assert torch.equal(few.test.index, every.test.index)
    assert make(seed=1, max_size=30).hash == few.hash
    for j in range(every.clients):
        all_rows, kept = every.train.rows(j), few.train.rows(j)
        assert set(kept.tolist()) <= set(all_rows.tolist())
        counts = [
            torch.bincount(every.train.y[rows], minlength=every.outputs).double()
            for rows in (all_rows, kept)
        ]
        assert torch.equal(counts[0] > 0, counts[1] > 0)  # no class is lost
        assert (counts[0] * len(kept) / len(all_rows) - counts[1]).abs().max() < 2
    shared = make(seed=1, max_size=30, validation=0.2)
    assert (shared.train.counts + shared.validation.counts).tolist() == few.train.counts.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(max_size=0), r"max_size .*1.* got 0"),
        (lambda: concept_drift(clients=5), "multiple of 2"),
        (lambda: concept_drift(small(3), clients=2), r"superclasses .*\[0, 3\).*'small'"),
        (lambda: concept_drift(clients=0), r"^clients .*1.* got 0"),
        (lambda: concept_drift(clients=20.0), r"^clients .*got 20\.0"),
        (lambda: concept_drift(clients=2000), "at most 278"),
        (lambda: concept_drift(clients=60, min_piece=10), "at most 26"),
        (lambda: concept_drift(min_piece=0), r"min_piece .*1.* got 0"),
        (lambda: concept_drift(min_piece=1.5), r"min_piece .*got 1\.5"),  # pyright: ignore[reportArgumentType]
        (lambda: concept_drift(min_piece="2"), r"min_piece .*got '2'"),  # pyright: ignore[reportArgumentType]
        (lambda: concept_drift(superclasses=[[0, 1], [2]]), "groups of one size"),
        (lambda: concept_drift(superclasses=[[0, 1], [1, 2]]), "different classes"),
        (lambda: concept_drift(superclasses=[[0, 10]]), "different classes within"),
        (lambda: concept_drift("diabetes"), "is a regression"),
        (lambda: concept_drift(seed=-1), r"^seed .*0.* got -1$"),
        (lambda: labels_per_client(seed=-1), r"^seed .*0.* got -1$"),
        (lambda: dirichlet(seed=-1), r"^seed .*0.* got -1$"),
        (lambda: iid(seed=-1), r"^seed .*0.* got -1$"),
        (lambda: diabetes(seed=0.5), r"^seed .*got 0.5$"),  # pyright: ignore[reportArgumentType]
        (lambda: labels_per_client(labels=0), r"^labels .*1.* got 0"),
        (lambda: labels_per_client(labels=2.5), r"^labels .*got 2\.5"),
        (lambda: label_groups(seed=-1), r"^seed .*0.* got -1$"),
        (lambda: label_groups(labels=0), r"^labels .*1.* got 0"),
        (lambda: label_groups(labels=2.5), r"^labels .*got 2\.5"),
        (lambda: label_groups(train=0), r"^train .*1.* got 0"),
        (lambda: label_groups(train=1.5), r"^train .*got 1\.5"),
        (lambda: label_groups(test=0), r"^test .*1.* got 0"),
        (lambda: label_groups(test=True), r"^test .*got True"),
        (lambda: label_groups(clients=0), r"^clients .*1.* got 0"),
        (lambda: label_groups(clients=2.5), r"^clients .*got 2\.5"),
        (lambda: label_groups(test=21), "class 8 has 174 rows, and its clients need 175"),
        (lambda: label_groups("diabetes"), r"label_groups .*'diabetes' .*regression"),
        (lambda: label_groups(validation=1.0), r"^validation .*\[0, 1\), got 1\.0; .*share"),
        (lambda: labels_per_client(sizes="some"), "sizes must be 'equal' or 'random', got 'some'"),  # pyright: ignore[reportArgumentType]
        (
            lambda: labels_per_client(clients=1400, labels=9),
            r"class 0 .*142 .*1260 clients.*labels",
        ),
        (lambda: dominant_classes(uniform=1.5), r"uniform .*\[0, 1\].* got 1.5"),
        (lambda: dominant_classes(uniform=float("nan")), r"uniform .*\[0, 1\], got nan"),
        (lambda: dominant_classes(train=0), r"^train .*1.* got 0"),
        (lambda: dominant_classes(test=1.5), r"^test .*got 1\.5"),
        (
            lambda: dominant_classes(train=60, validation=0.2),
            r"47 training examples .*several clients.*`train`",
        ),
        (
            lambda: dominant_classes(train=60, calibration=0.2),
            r"47 training examples .*several clients.*`train`",
        ),
        (lambda: dominant_classes(train=600), r"class 8 .*139 examples.* 172.*`uniform`"),
        (lambda: dominant_classes("diabetes"), "is a regression"),
        (lambda: dominant_classes(clients=0), r"^clients .*1.* got 0"),
        (lambda: swapped_labels(groups=0), r"^groups .*1.* got 0"),
        (
            lambda: swapped_labels(swaps=6),
            r"6 pairs of 10 classes .* 0 ways: use at most 1 groups, got 4",
        ),
        (lambda: swapped_labels(swaps=0), r"swaps .*1.* got 0"),
        (
            lambda: swapped_labels(small(3), clients=5, groups=5, swaps=1),
            r"in 3 ways.*4 groups.* got 5",
        ),
        (
            lambda: swapped_labels(small(4), clients=5, groups=5, swaps=2),
            r"in 3 ways.*4 groups.* got 5",
        ),
        (lambda: swapped_labels("diabetes"), "is a regression"),
        (lambda: dirichlet(alpha=0), "alpha must be > 0 and finite, got 0"),
        (lambda: dirichlet(alpha=float("inf")), "alpha must be > 0 and finite, got inf"),
        (lambda: dirichlet(alpha="a"), r"alpha .*got 'a'"),  # pyright: ignore[reportArgumentType]
        (lambda: dirichlet(min_size=0), r"min_size .*1.* got 0"),
        (lambda: dirichlet(min_size=10.5), r"min_size .*got 10\.5"),
        (lambda: dirichlet(clients=500), r"clients .*143.* sets of 10 training examples, got 500"),
        (lambda: shards(shards=0), r"shards .*1.* got 0"),
        (lambda: shards("diabetes"), r"shards .*'diabetes' .*regression"),
        (lambda: pachinko("digits", alpha=0), r"alpha .*got 0"),
        (lambda: pachinko("digits", beta=-1.0), r"beta .*got -1"),
        (
            lambda: pachinko("digits", clients=10, size=144),
            r"clients .* 9, .* sets of 144 training examples, got 10",
        ),
        (lambda: pachinko("digits", superclasses=[[0, 1], [1, 2]]), "different classes"),
        (lambda: pachinko("diabetes"), r"pachinko .*'diabetes' .*regression"),
        (lambda: iid(clients=0), r"^clients .*1.* got 0"),
        (lambda: iid(clients=2.5), r"^clients .*got 2\.5"),  # pyright: ignore[reportArgumentType]
        (
            lambda: dirichlet(min_size=1, alpha=0.01, validation=0.5, calibration=0.4),
            "no training example .*a larger min_size",
        ),
    ],
)
def test_errors_say_what_and_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    drifted: Any = concept_drift(clients=np.int64(10), seed=np.int64(3))
    assert drifted.hash == concept_drift(clients=10, seed=3).hash
    sizes: list[Any] = [(np.float64(1), np.int64(8)), (1, 8), (1.0, 8)]
    assert len({dirichlet(clients=5, alpha=a, min_size=size).hash for a, size in sizes}) == 1
    assert dominant_classes(uniform=1, validation=0).hash == dominant_classes(uniform=1.0).hash
