"""Batch norms converted to group norms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

import bayesfl as bf
from tests.cases import numbers


class Residual(nn.Module):
    """A block of a ResNet as torchvision has it."""

    def __init__(self, inputs: int, outputs: int, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), norm(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, outputs, height / 2, width / 2]."""
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.downsample(x))


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same module, in float64, with other parameters."""
    with torch.no_grad():
        for i, p in enumerate(module.double().parameters()):
            p.copy_(numbers(*p.shape, seed=seed + i))
    return module


def test_a_block_of_a_resnet():
    """It computes what the same block built with group norms does, at the same weights, and keeps
    the names of its parameters.
    """
    block = drawn(Residual(3, 64))
    before = {name: t.clone() for name, t in block.state_dict().items()}
    made = bf.models.group_norm(block)
    wanted = Residual(3, 64, lambda channels: nn.GroupNorm(32, channels)).double()
    wanted.load_state_dict(dict(block.named_parameters()))
    x = numbers(5, 3, 8, 8, seed=9)
    assert_close(made(x), wanted(x), atol=1e-14, rtol=0)
    assert list(made.state_dict()) == [name for name, _ in block.named_parameters()]
    with torch.no_grad():
        made.get_parameter("bn1.weight").add_(1)
    assert_close(block.state_dict(), before, atol=0, rtol=0)
    assert isinstance(block.bn1, nn.BatchNorm2d)


@pytest.mark.parametrize(
    ("norm", "groups", "found"),
    [
        (nn.BatchNorm2d(64), 32, 32),
        (nn.BatchNorm2d(48), 32, 24),
        (nn.BatchNorm2d(6), 32, 3),
        (nn.BatchNorm2d(32), 32, 16),
        (nn.BatchNorm2d(37), 32, 1),
        (nn.BatchNorm2d(1), 32, 1),
        (nn.BatchNorm3d(64), 5, 4),
        (nn.BatchNorm2d(64), 1, 1),
        (nn.BatchNorm1d(512), 32, 32),
        (nn.BatchNorm1d(100), 32, 5),
        (nn.BatchNorm1d(16), 32, 1),
        (nn.BatchNorm1d(3), 32, 1),
    ],
)
def test_the_largest_number_of_groups_that_divides(norm: nn.Module, groups: int, found: int):
    """At most the number given; with two channels in each at least, and of vectors sixteen, since
    of one number alone nothing is left.
    """
    made = bf.models.group_norm(norm, groups=groups)
    assert isinstance(made, nn.GroupNorm)
    assert (made.num_groups, made.num_channels) == (found, norm.num_features)


def test_what_a_norm_keeps():
    """Its weight and bias, or that it has none; whether they are frozen; eps, dtype and mode."""
    norm = drawn(nn.BatchNorm1d(8, eps=0.5)).eval()
    norm.get_parameter("bias").requires_grad_(False)
    made = bf.models.group_norm(norm)
    assert {name: p.requires_grad for name, p in made.named_parameters()} == {
        "weight": True,
        "bias": False,
    }
    assert all(torch.equal(p, norm.get_parameter(name)) for name, p in made.named_parameters())
    x = numbers(4, 8)
    by_hand = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 0.5).sqrt()
    assert_close(
        made(x),
        by_hand * norm.get_parameter("weight") + norm.get_parameter("bias"),
        atol=1e-14,
        rtol=0,
    )
    bare = bf.models.group_norm(nn.Sequential(nn.BatchNorm2d(4, affine=False)))
    assert (made.training, list(bare.parameters())) == (False, [])
    assert bare(numbers(2, 4, 3, 3).float()).shape == (2, 4, 3, 3)


def test_a_norm_in_two_places_stays_one():
    """In one part, or in two."""
    norm = nn.BatchNorm2d(4)
    made = bf.models.group_norm(nn.Sequential(norm, nn.Conv2d(4, 4, 1), norm, nn.Sequential(norm)))
    assert made.get_submodule("0") is made.get_submodule("2") is made.get_submodule("3.0")
    assert isinstance(made.get_submodule("0"), nn.GroupNorm)


def hooked() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.register_forward_hook(lambda module, args, out: out.relu())
    return norm


class Active(nn.BatchNorm2d):
    """A norm with an activation, as some libraries have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_vectors_of_few_channels_are_warned_of():
    """Of two numbers a group norm leaves which is larger."""
    with pytest.warns(UserWarning, match=r"batch norm '0' has 2 channels.*standardise"):
        bf.models.group_norm(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))


def test_a_norm_without_a_bias_is_converted():
    norm = nn.BatchNorm2d(8)
    norm.register_parameter("bias", None)
    made = bf.models.group_norm(nn.Sequential(norm))
    assert [name for name, _ in made.named_parameters()] == ["0.weight"]
    assert made(numbers(2, 8, 3, 3).float()).shape == (2, 8, 3, 3)


def test_other_norms_stay():
    """Beside a batch norm, and alone."""
    others = [nn.SyncBatchNorm(4), nn.InstanceNorm2d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)]
    for given, first in (([nn.BatchNorm2d(4), *others], [nn.GroupNorm]), (others, [])):
        made = bf.models.group_norm(nn.Sequential(*given))
        assert [type(part) for part in made.children()] == [*first, *map(type, others)]


@pytest.mark.parametrize(
    ("module", "groups", "words"),
    [
        (nn.BatchNorm1d(4), 0, "groups .*got 0"),
        (Active(4), 32, r"batch norm '' \(Active\) does more than torch's.*replace it by hand"),
        (nn.Sequential(hooked()), 32, r"batch norm '0' \(BatchNorm2d\) does more"),
        (nn.Sequential(weight_norm(nn.BatchNorm2d(4), dim=0)), 32, "batch norm '0' .* does more"),
        (
            nn.Sequential(nn.utils.weight_norm(nn.BatchNorm2d(4), dim=0)),
            32,
            "batch norm '0' .* does more",
        ),
    ],
)
def test_what_does_not_fit(module: nn.Module, groups: int, words: str):
    """Said by name."""
    with pytest.raises(ValueError, match=words):
        bf.models.group_norm(module, groups=groups)
