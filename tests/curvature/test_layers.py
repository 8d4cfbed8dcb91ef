"""Layers that have closed forms, and those that have none."""

import pytest
from torch import nn

from bayesfl.curvature import Curvature
from tests.curvature import brute


def test_layers_that_are_not_supported_are_named():
    norm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"'layers' .*GroupNorm '1'.*backend='func'"):
        Curvature(norm, backend="layers")
    with pytest.raises(ValueError, match=r"BackPACK .*GroupNorm '1'.*backend='func'"):
        Curvature(norm, backend="backpack")
    assert Curvature(norm).backend == "func"
    with pytest.raises(ValueError, match="Residual ''"):
        Curvature(brute.Residual(2), backend="layers")
    for layer in (
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
    ):
        with pytest.raises(ValueError, match="Conv2d '0'"):
            Curvature(nn.Sequential(layer, nn.Flatten()), backend="layers")
    twice = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="used in two places"):
        Curvature(nn.Sequential(twice, nn.Tanh(), twice), backend="layers")
    assert Curvature(nn.Sequential(twice, nn.Tanh(), twice)).backend == "func"
    with pytest.raises(ValueError, match=r"backend .*'layers'.* got 'asdl'"):
        Curvature(norm, backend="asdl")  # type: ignore[arg-type]
