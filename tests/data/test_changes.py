"""Functions of inputs, tried on a few rows before they are used."""

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.data import from_arrays
from bayesfl.data.changes import check_change


@pytest.fixture
def images():
    x = np.random.default_rng(0).integers(0, 256, (30, 2, 6, 6), dtype=np.uint8)
    return from_arrays(x, np.arange(30) % 3, client_ids=np.arange(30) % 4)


def writes(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def counts(x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006 (it is what is refused)
    calls.append(1)
    return x.float() + len(calls)


MEAN, STD = torch.full((2, 1, 1), 127.0), torch.full((2, 1, 1), 60.0)


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: x / 255,
        lambda x: (x.float() - MEAN) / STD,
        lambda x: x.flatten(1).float(),
        lambda x: (x / 255, x > 7),
        lambda x: {"image": x[:, :, ::2, ::2]},
        nn.Sequential(nn.Flatten(), nn.LayerNorm(72)).double().to(torch.float32).forward,
    ],
)
def test_what_is_done_row_by_row_is_taken(images, transform):
    given = transform if not hasattr(transform, "__self__") else lambda x: transform(x.float())
    x, y = images.transformed(given).test.client(2)
    assert len(bf.base.inputs.first(x)) == len(y)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            lambda x: x[:1] / 255,
            r"^transform\(x\) has shape \[1, 2, 6, 6\] for 4 rows.*one row for each",
        ),
        (lambda x: (x, x.float().mean()), r"^transform\(x\)\[1\] has shape \[\] for 4 rows"),
        (
            lambda x: x.float().repeat_interleave(2, 0),
            r"^transform\(x\) has shape \[8, 2, 6, 6\] for 4 rows",
        ),
        (lambda x: x.flatten(1).float().squeeze(0), r"^transform\(x\) has shape \[72\] for 1 rows"),
        (
            lambda x: x - x.float().mean(0),
            r"^transform gives a row other numbers among others.*fixed numbers.*mean",
        ),
        (
            lambda x: (x - x.float().mean(0)) / x.float().std(0, correction=0),
            r"^transform gives a row other numbers among others",
        ),
        (lambda x: x.flip(0), r"^transform gives a row other numbers among others"),
        (
            nn.BatchNorm2d(2).double(),
            r"^transform gives a row other numbers among others.*eval\(\)",
        ),
        (lambda x: x + torch.rand(len(x), 1, 1, 1), r"^transform .*draws.*data\.augmented"),
        (
            lambda x: x.flip(-1) if torch.rand(()) < 0.001 else x,
            r"^transform .*draws.*data\.augmented",
        ),
        (lambda x: x + random.random(), r"^transform .*draws.*data\.augmented"),
        (lambda x: x + np.random.rand(), r"^transform .*draws.*data\.augmented"),  # noqa: NPY002
        (counts, r"^transform gives other numbers each time"),
        (writes, r"^transform writes into its input.*x / 255"),
        (lambda x: x / 0, r"^transform\(x\) holds NaN or infinite"),
    ],
)
def test_what_no_transform_may_do(images, transform, message):
    given = (lambda x: transform(x.double())) if isinstance(transform, nn.Module) else transform
    with pytest.raises(ValueError, match=message):
        images.transformed(given)


OWN, COUNTS = torch.Generator(), itertools.count()


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (
            lambda x: x[:, :, 1:-1],
            r"^augment makes .*\[2, 4, 6\].* of .*\[2, 6, 6\].*crop after padding",
        ),
        (lambda x: x[1:], r"^augment\(x\) has shape \[3, 2, 6, 6\] for 4 rows"),
        (lambda x: (x, x), r"^augment makes {'x\[0\]': .*'x\[1\]': .* of {'x': "),
        (writes, r"^augment writes into its input"),
        (lambda x: x > 0, r"^augment makes {'x': \('bool', .* of .*data\.transformed"),
        (lambda x: x + torch.rand(1, generator=OWN), r"its own generator"),
        (
            lambda x: x.float() / 0,
            r"^augment\(x\) holds NaN or infinite",
        ),
        (lambda x: x + next(COUNTS), r"^augment gives other inputs when its draws are repeated"),
        (
            lambda x: x + random.random(),
            r"^augment .*by other means than torch.*torch\.rand\(len\(x\)\)",
        ),
        (lambda x: x + np.random.rand(), r"^augment .*by other means than torch"),  # noqa: NPY002
    ],
)
def test_what_no_augmentation_may_do(images, augment, message):
    with pytest.raises(ValueError, match=message):
        images.augmented(augment)


def test_an_augmentation_draws_by_torch_and_may_mix_rows(images):
    for augment in (
        lambda x: torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x),
        lambda x: x[torch.randperm(len(x))],
    ):
        assert images.augmented(augment).train.augment is not None


@pytest.mark.parametrize("name", ["transform", "augment"])
def test_a_trial_leaves_torch_s_generator_as_it_was(images, name):
    state = torch.get_rng_state()
    with contextlib.suppress(ValueError):
        check_change(name, images.train, lambda x: x + torch.rand(()))
    assert torch.equal(torch.get_rng_state(), state)


def test_trees_are_tried_as_models_are_called():
    x = {"tokens": np.arange(40).reshape(20, 2), "numbers": np.arange(20.0)}
    two = from_arrays(x, [0, 1] * 10, client_ids=[0] * 8 + [1] * 12)
    data = two.transformed(lambda x: {"tokens": x["tokens"] + 1, "numbers": x["numbers"] / 20})
    assert data.train.client(0)[0]["tokens"].min() >= 1
    for change, words in (
        (lambda numbers: numbers - numbers.mean(), "gives a row other numbers"),
        (lambda numbers: numbers.mul_(2), "writes into its input"),
    ):
        with pytest.raises(ValueError, match=f"^transform {words}"):
            two.transformed(lambda x, change=change: x | {"numbers": change(x["numbers"])})


def test_frozen_networks_may_be_part_of_a_transform(images):
    """Whether or not somebody has frozen their weights."""
    body = nn.Linear(72, 3)
    features = images.transformed(lambda x: body(x.flatten(1).float()))
    assert (features.inputs, features.train.client(0)[0].requires_grad) == ((3,), False)
