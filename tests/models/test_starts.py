"""Where weights start: the seed decides, the head may have a scale of its own, and any module's
layers can draw anew.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl import models
from tests.models.made import MAKERS, every


@every
def test_the_seed_decides_and_the_global_generator_is_left_alone(name):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = MAKERS[name](seed=4)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    again, other = MAKERS[name](seed=4), MAKERS[name](seed=5)
    for (key, p), q, r in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q)
        if p.unique().numel() > 1:  # a norm starts at ones
            assert not torch.equal(p, r), key


@every
def test_head_scale_draws_the_head_and_leaves_the_body(name):
    plain, scaled, unit = MAKERS[name](), MAKERS[name](head_scale=0.3), MAKERS[name](head_scale=1.0)
    for p, q in zip(plain.body.parameters(), scaled.body.parameters(), strict=True):
        assert torch.equal(p, q)
    draws = {key: p.detach() for key, p in unit.head.named_parameters()}
    assert_close(scaled.head.get_parameter("weight").detach(), 0.3 * draws["weight"])
    assert_close(scaled.head.get_parameter("bias").detach(), 0.3 * draws["bias"])
    assert draws["weight"].std().item() == pytest.approx(1, abs=0.2)
    assert draws["bias"].std().item() == pytest.approx(1, abs=0.7)


def test_default_device_does_not_matter():
    with torch.device("meta"):
        model = models.mlp(4, outputs=2, head_scale=1.0)
    assert next(model.parameters()).device.type == "cpu"


def test_weights_can_be_drawn_anew():
    """As the layers draw them, by the generator alone; the module and the global generator stay as
    they are.
    """
    model = models.mlp(5, outputs=2, hidden=4)
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    start = models.anew(model, pattern="head.*")
    draws = [start(np.random.default_rng(seed), 10) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert (draws[0].shape, draws[0].dtype) == ((10,), torch.float32)
    assert 0 < draws[0].abs().max() <= 4**-0.5  # of a linear layer with four inputs
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_what_cannot_draw_anew_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

    with pytest.raises(
        ValueError, match=r"layers \['1'\] have no reset_parameters\(\).*fedem.*class"
    ):
        models.anew(nn.Sequential(nn.Linear(2, 2), Scale()))
    with pytest.raises(
        ValueError, match=r"^parameters of the module itself have no reset_parameters\(\)"
    ):
        models.anew(Scale())
