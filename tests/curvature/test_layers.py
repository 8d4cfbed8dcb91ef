"""Layers that have closed forms, and those that have none."""

import pytest
from torch import nn

from bayesfl.curvature import Curvature
from tests.curvature import brute


def test_layers_that_are_not_supported_are_named():
    norm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    for backend in ("layers", "backpack"):
        with pytest.raises(ValueError, match=rf"'{backend}' .*GroupNorm '1'.*backend='func'"):
            Curvature(norm, backend=backend)
    assert Curvature(norm).backend == "func"
    twice = nn.Linear(3, 3)
    for model, words in (
        (brute.Residual(2), "Residual ''"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)), "Conv2d '0'"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding="same")), "Conv2d '0'"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")), "Conv2d '0'"),
        (nn.Sequential(twice, nn.Tanh(), twice), "used in two places"),
    ):
        with pytest.raises(ValueError, match=words):
            Curvature(model, backend="layers")
    assert Curvature(nn.Sequential(twice, nn.Tanh(), twice)).backend == "func"
    with pytest.raises(ValueError, match=r"backend .*'layers'.* got 'asdl'"):
        Curvature(norm, backend="asdl")  # type: ignore[arg-type]
