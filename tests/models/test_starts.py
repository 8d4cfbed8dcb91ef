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
    assert_close(plain.body.state_dict(), scaled.body.state_dict(), atol=0, rtol=0)
    draws = {key: p.detach() for key, p in unit.head.named_parameters()}
    for key, tolerance in (("weight", 0.2), ("bias", 0.7)):
        assert_close(scaled.head.get_parameter(key).detach(), 0.3 * draws[key])
        assert draws[key].std().item() == pytest.approx(1, abs=tolerance)


def test_default_device_does_not_matter():
    with torch.device("meta"):
        model = models.mlp(4, outputs=2, head_scale=1.0)
    assert next(model.parameters()).device.type == "cpu"


def test_weights_can_be_drawn_anew():
    """As the layers draw them, by the generator alone; the module and the global generator stay as
    they are.
    """
    model = models.mlp(5, outputs=2, hidden=4)
    before = {name: p.clone() for name, p in model.state_dict().items()}
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
    assert_close(model.state_dict(), before, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (True, r"layers \['1'\] have no reset_parameters\(\).*member.*class"),
        (False, r"^the layers \['the module itself'\] have no reset_parameters\(\)"),
    ],
)
def test_what_cannot_draw_anew_is_named(inside, words):
    scale = nn.Module()
    scale.factor = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=words):
        models.anew(nn.Sequential(nn.Linear(2, 2), scale) if inside else scale)
