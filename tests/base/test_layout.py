"""A block's vector and its named leaves are two views of the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl.base.layout import Layout, aliases
from bayesfl.models import mlp


class Tempered(nn.Module):
    """A linear layer and a scalar between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.middle = nn.ParameterDict({"temperature": nn.Parameter(torch.tensor(2.0))})
        self.last = nn.Linear(2, 4, bias=False)


def test_covers_the_names_in_the_models_order():
    """A pattern takes whole names, case and all, in the order of named_parameters()."""
    model = mlp(3, hidden=(5, 4), outputs=2)
    layout = Layout(model, "body.*")
    assert layout.names == ("body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias")
    assert (layout.sizes, layout.size) == ((15, 5, 20, 4), 44)
    assert layout.shapes["body.2.weight"] == (4, 5)
    assert Layout(model, "*").size == sum(p.numel() for p in model.parameters())
    assert Layout(model, "*.bias").names == ("body.0.bias", "body.2.bias", "head.bias")
    assert Layout(model, "head.weight").names == ("head.weight",)


@pytest.mark.parametrize("leading", [(), (6,), (2, 3)], ids=str)
def test_round_trip_with_leading_axes(leading):
    """leaves and ravel undo each other, whatever stands in front."""
    layout = Layout(Tempered(), "*")
    vector = torch.arange(float(torch.Size(leading).numel() * layout.size)).view(
        *leading, layout.size
    )
    leaves = layout.leaves(vector)
    assert {name: tuple(leaf.shape) for name, leaf in leaves.items()} == {
        n: (*leading, *s) for n, s in layout.shapes.items()
    }
    assert_close(layout.ravel(leaves), vector, rtol=0, atol=0)


def test_ravel_lays_tensors_one_after_another():
    """The vector is the flattened tensors in order, and takes from a larger mapping what is the
    block's.
    """
    model = Tempered()
    named = dict(model.named_parameters())
    assert_close(
        Layout(model, "*").ravel(named),
        torch.cat([p.flatten() for p in model.parameters()]),
        rtol=0,
        atol=0,
    )
    assert_close(Layout(model, "last.*").ravel(named), model.last.weight.flatten(), rtol=0, atol=0)


def test_leaves_are_views():
    """Writing to a leaf writes to the vector, and the other way round: nothing is copied, a scalar
    neither.
    """
    layout = Layout(Tempered(), "*")
    vector = torch.zeros(2, layout.size)
    leaves = layout.leaves(vector)
    assert leaves["middle.temperature"].shape == (2,)
    leaves["middle.temperature"].fill_(7.0)
    leaves["first.weight"][1, 0, 2] = 5.0
    place = list(layout.names).index("middle.temperature")
    assert_close(vector[:, sum(layout.sizes[:place])], torch.tensor([7.0, 7.0]))
    assert vector[1, layout.leaves(torch.arange(layout.size))["first.weight"][0, 2]] == 5.0
    assert vector.count_nonzero() == 3
    vector.fill_(1.0)
    assert all((leaf == 1).all() for leaf in leaves.values())


def test_scalar_alone():
    """A block of one scalar has one weight."""
    layout = Layout(Tempered(), "middle.*")
    assert layout.size == 1
    assert layout.leaves(torch.tensor([3.0]))["middle.temperature"].shape == ()
    assert_close(
        layout.ravel({"middle.temperature": torch.tensor([3.0, 4.0])}), torch.tensor([[3.0], [4.0]])
    )


def test_no_match_says_what_there_is():
    """The error names the pattern and the parameters there are, and a remedy."""
    named = r".*first\.weight.*middle\.temperature.*last\.weight.*bf\.models\.split"
    for pattern, words in (
        ("fc.*", rf"'fc\.\*' {named}"),
        ("First.*", rf"'First\.\*' {named}"),
        ((), r"^pattern \(\).* matches no parameter"),
    ):
        with pytest.raises(ValueError, match=words):
            Layout(Tempered(), pattern)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (("body.0.*", "head.bias"), {"body.0.weight", "body.0.bias", "head.bias"}),
        ("!head.*", {"body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"}),
        (("body.*", "!*.bias"), {"body.0.weight", "body.2.weight"}),
        (("!*.bias", "!body.0.*"), {"body.2.weight", "head.weight"}),
    ],
)
def test_several_patterns(pattern: Any, names: set[str]):
    """They are joined; what `!` takes out is out, and alone it takes out of all."""
    assert set(Layout(mlp(4, hidden=(3, 3), outputs=2), pattern).names) == names


def test_tied_parameters_have_all_their_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert aliases(model) == {}
    model[1].weight = model[0].weight
    assert aliases(model) == {"0.weight": {"0.weight", "1.weight"}}
    for pattern, names in (
        ("*", ("0.weight", "0.bias", "1.bias")),
        ("*.bias", ("0.bias", "1.bias")),
        ("0.*", ("0.weight", "0.bias")),
    ):
        assert Layout(model, pattern).names == names


@pytest.mark.parametrize(
    "pattern", [("*", "!*.bais"), ("first.*", "haed.*"), ("last.*", "first.*")]
)
def test_each_of_several_patterns_matches_something_to_train(pattern):
    """A slip of the pen, or a head that was lost in freezing, is named; what is taken out may be
    frozen.
    """
    model = Tempered()
    model.last.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'!\*\.bais'|'haed\.\*'|'last\.\*'"):
        Layout(model, pattern)
    assert Layout(model, ("*", "!last.*")).names == (
        "first.weight",
        "first.bias",
        "middle.temperature",
    )
