"""Any module cut into body and head."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl import models
from bayesfl.models.cutting import has_body


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
    assert {key for key, _ in cut.named_parameters()} == {
        "body.conv.weight",
        "body.conv.bias",
        "head.weight",
        "head.bias",
    }
    with torch.no_grad():
        for p in cut.parameters():
            p.zero_()
    assert isinstance(module.fc, nn.Linear)
    assert_close(module.state_dict(), before, atol=0, rtol=0)


def test_split_takes_a_dotted_name():
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    cut = models.split(module, head="1.1")
    x = torch.randn(5, 3)
    assert_close(cut(x), module(x))
    assert cut.head.weight.shape == (2, 4)


def test_split_says_why_not():
    with pytest.raises(AttributeError, match="`head`"):
        models.split(Pretrained(), head="head")
    for last in (nn.Tanh(), nn.Linear(4, 2)):
        with pytest.raises(ValueError, match=r"'0' is not the last step"):
            models.split(nn.Sequential(nn.Linear(3, 4), last), head="0", example=torch.randn(2, 3))


def test_a_step_after_the_head_is_seen_without_an_example():
    """Where an `nn.Sequential` on the way takes it; a module that does nothing is no step, and a
    forward of its own is not looked into.
    """
    first, last, twice = nn.Linear(3, 4), nn.Linear(4, 2), nn.ReLU()
    inner = nn.Sequential(first, nn.Sequential(last, nn.LogSoftmax(-1)), nn.Identity())
    for module, head, words in (
        (nn.Sequential(first, twice, last), "0", r"'0' .*\['1', '2'\] come after"),
        (inner, "1.0", r"'1\.0' .*\['1\.1'\] come after .*softmax"),
        (nn.Sequential(first, twice, last, twice), "2", r"'2' .*\['3'\] come after"),
    ):
        with pytest.raises(ValueError, match=words):
            models.split(module, head=head)
    assert_close(models.split(inner, head="1")(torch.ones(2, 3)), inner(torch.ones(2, 3)))
    models.split(Pretrained(), head="conv")
    with pytest.raises(ValueError, match="'conv' is not the last step"):
        models.split(Pretrained(), head="conv", example=torch.randn(3, 1, 8, 8))


def test_an_example_of_several_inputs():
    """As `forward` takes them, by place or by name; the head stands last in one network and not in
    the other.
    """

    class Masked(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.inner, self.fc, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), scale

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.fc(self.inner(x) * mask) + self.scale

    x, mask = torch.randn(5, 3), torch.ones(5, 1)
    cut = models.split(Masked(0.0), example=(x, mask))
    assert_close(cut(x, mask=mask), cut(x, mask))
    for example in ((x, mask), {"x": x, "mask": mask}):
        with pytest.raises(ValueError, match="'fc' is not the last step"):
            models.split(Masked(1.0), example=example)


def test_whether_there_is_a_body_to_train():
    """A model without hidden layers has none, nor one whose body is frozen."""
    frozen = models.mlp(4, outputs=2, hidden=3)
    frozen.get_submodule("body").requires_grad_(False)
    plain = [models.mlp(4, outputs=2, hidden=hidden) for hidden in (3, ())]
    assert [has_body(model) for model in (*plain, frozen)] == [True, False, False]
