"""A saved run is opened with its own method and its own data."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD
from tests.federation.made import algorithm


def opened(
    method: bf.Algorithm, data: FederatedData, folder: Path, result: Result
) -> Iterable[Callable[[], Any]]:
    """The ways to go on with a result and other data: loaded, resumed from its folder or itself."""
    yield lambda: bf.load(folder, method, data)
    for resume in (folder, result):
        yield partial(
            bf.simulate,
            method,
            data,
            rounds=2,
            evaluate_every=None,
            progress=False,
            resume=resume,
        )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"init_scale": 0.5}, r"pfedvem\.init_scale: saved its default, given 0\.5"),
        ({"scale_update": "after"}, r"pfedvem\.scale_update: saved its default, given after"),
        (
            {"head_optimiser": SGD(1e-3)},
            r"pfedvem\.head_optimiser: saved its default, given \{.*'rate': 0\.001\}",
        ),
        (
            {"draws": 3, "beta": 0.5},
            r"pfedvem\.draws: saved its default, given 3; "
            r"pfedvem\.beta: saved its default, given 0\.5",
        ),
    ],
)
def test_another_algorithm_is_refused(saved: Path, clients, other, words):
    """By the names of its options."""
    with pytest.raises(CheckpointError, match=rf"made with another method: {words}; pass"):
        bf.load(saved, algorithm(**other), clients)


def test_a_split_of_another_transform_is_refused(clients, tmp_path: Path):
    """Also where the training split has the same."""
    done = clients.transformed(lambda x: x / 2)

    def made(by: float) -> FederatedData:
        test = replace(done.test, transform=lambda x: x / by)
        return replace(done, splits={**done.splits, "test": test})

    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=4, outputs=3), epochs=1)
    bf.simulate(method, made(2.0), rounds=1, evaluate_every=None, progress=False).save(tmp_path)
    bf.load(tmp_path, method, made(2.0))
    with pytest.raises(CheckpointError, match=r"made on other data: hash: saved .*in every split"):
        bf.load(tmp_path, method, made(3.0))


def test_another_function_of_inputs_is_named(clients, tmp_path: Path):
    """The transform or the augmentation that differs, in code alone too; the same ones under other
    names are taken.
    """
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=4, outputs=3), epochs=1)

    def noise(x):
        return x + torch.randn(len(x), 1)

    def less(x):
        return x + torch.randn(len(x), 1) / 2

    def scaled(x):
        return x / 255

    made, twin = (clients.transformed(scaled).augmented(noise) for _ in range(2))
    result = bf.simulate(method, made, rounds=1, evaluate_every=None, progress=False)
    result.save(tmp_path)
    assert bf.load(tmp_path, method, twin).data is twin
    for other, words in (
        (
            clients.transformed(lambda x: x / 254).augmented(noise),
            r"other data: transform\.name: saved .*scaled, given .*<lambda>;",
        ),
        (
            clients.transformed(scaled).augmented(less),
            r"other data: augment\.name: saved .*noise, given .*less; augment\.source",
        ),
        (clients.transformed(scaled), r"other data: augment: saved {.*, given None"),
        (clients.augmented(noise), r"other data: transform: saved {.*, given None"),
        (
            clients.select([1, 0, 2, 3, 4, 5, 6]).transformed(scaled).augmented(noise),
            "other data: .*rows: saved",
        ),
    ):
        for refused in opened(method, other, tmp_path, result):
            with pytest.raises(CheckpointError, match=words):
                refused()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            {"class_names": ("b", "a", "c")},
            r"other data: class_names: saved \('a', 'b', 'c'\), given \('b', 'a', 'c'\);",
        ),
        ({"columns": tuple("hgfedcba")}, r"other data: columns: saved \('a', .*given \('h', "),
    ],
    ids=["classes", "columns"],
)
def test_other_names_are_refused(names, words: str, clients, tmp_path: Path):
    """Of classes and of columns, which the hash does not hold; loaded or resumed, and data without
    names fit.
    """
    named = replace(clients, class_names=("a", "b", "c"), columns=tuple("abcdefgh"))
    turned = replace(named, **names)
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=4, outputs=3), epochs=1)
    result = bf.simulate(method, named, rounds=1, evaluate_every=None, progress=False)
    result.save(tmp_path)
    for refused in opened(method, turned, tmp_path, result):
        with pytest.raises(CheckpointError, match=words):
            refused()
    assert bf.load(tmp_path, method, clients).data is clients
