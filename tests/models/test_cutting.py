"""Any module cut into body and head."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl import models


class Pretrained(nn.Module):
    """Like torchvision's networks: features, a flattening in forward, a last layer called fc."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(torch.relu(self.conv(x))), 1))


def test_split_cuts_a_copy():
    module, x = Pretrained(), torch.randn(3, 1, 8, 8)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    cut = models.split(module, example=x)
    assert_close(cut(x), module(x))
    assert {key for key, _ in cut.named_parameters()} == {"body.conv.weight", "body.conv.bias", "head.weight", "head.bias"}
    with torch.no_grad():
        for p in cut.parameters():
            p.zero_()
    assert isinstance(module.fc, nn.Linear)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


def test_split_takes_a_dotted_name():
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    cut = models.split(module, head="1.1")
    x = torch.randn(5, 3)
    assert_close(cut(x), module(x))
    assert cut.head.weight.shape == (2, 4)


def test_split_says_why_not():
    with pytest.raises(ValueError, match=r"'head'.*\['conv', 'pool', 'fc'\]"):
        models.split(Pretrained(), head="head")
    with pytest.raises(ValueError, match=r"'pool' .*\['conv', 'fc'\]"):
        models.split(Pretrained(), head="pool")
    with pytest.raises(ValueError, match="not the last step"):
        models.split(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), head="0", example=torch.randn(2, 3))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="shares parameters"):
        models.split(tied, head="1")
