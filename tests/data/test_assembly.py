"""Shares for tuning and calibration: disjoint, stratified, each by its own draw."""

import torch

from bayesfl.data import from_arrays
from tests.data.made import arrays


def test_shares_are_disjoint_and_as_large_as_stated(data):
    rows = [set(split.index.tolist()) for split in data.splits.values()]
    assert sum(map(len, rows)) == len(set.union(*rows)) == 75
    assert {name: counts.tolist() for name, counts in data.counts.items()} == {
        "test": [4, 6, 5],
        "validation": [3, 5, 4],  # a fifth of 16, 24, 20
        "calibration": [2, 2, 2],
        "train": [11, 17, 14],
    }


def test_shares_are_stratified(data):
    for split in (data.train, data.test):
        for j in range(3):
            counts = torch.bincount(split.client(j)[1], minlength=3)
            assert counts.max() - counts.min() <= 1


def test_calibration_does_not_move_validation():
    xs, ys = arrays(sizes=(20, 30))
    alone, both = (from_arrays(xs, ys, validation=0.2, calibration=share) for share in (0.0, 0.2))
    assert alone.validation.index.tolist() == both.validation.index.tolist()
    assert "calibration" not in alone.splits
