"""Copies that share frozen parameters, and originals that have changed since."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bayesfl.models.copies import check_original, copied, refuse_changed, rescaled


def test_changes_of_shared_parameters_are_noticed():
    """By the names of those that are frozen; others are copied, and may change."""
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    made = copied(copied(model))
    refuse_changed(made)
    with torch.no_grad():
        model.bias.add_(1.0)
    refuse_changed(made)
    model.requires_grad_(True)
    torch.optim.SGD([model.weight], lr=0.1).step()
    refuse_changed(made)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD([model.weight], lr=0.1).step()
    with pytest.raises(ValueError, match=r"\['weight'\]"):
        refuse_changed(made)


def half_frozen() -> nn.Sequential:
    """Return two layers, of which the first is frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.fill_(3.0),
        lambda model: model[0].load_state_dict(nn.Linear(2, 2).state_dict()),
    ],
)
def test_changes_by_way_of_data_are_noticed(change: Callable[[nn.Sequential], object]):
    """Torch counts no change that is made by way of `data`; the numbers themselves are compared."""
    model = half_frozen()
    made = copied(model)
    change(model)
    with pytest.raises(ValueError, match=r"\['0\.weight'.*copy\.deepcopy"):
        refuse_changed(made)


def test_nan_and_empty_tensors_have_not_changed():
    """A NaN differs from itself; its bytes do not."""
    model = half_frozen()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    model.register_buffer("none", torch.empty(0))
    made = copied(model)
    refuse_changed(made)
    check_original(made)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: model[1].requires_grad_(False),
            r"\['1\.bias', '1\.weight'\].*Sequential.*frozen or unfrozen.*deepcopy",
        ),
        (
            lambda model: model.requires_grad_(True),
            r"\['0\.bias', '0\.weight'\].*frozen or unfrozen",
        ),
        (
            lambda model: model[1].register_forward_hook(lambda *given: None),
            r"\['1'\].*other hooks",
        ),
        (lambda model: model.append(nn.Linear(2, 2)), r"\['2\.bias', '2\.weight'\].*replaced"),
    ],
)
def test_an_original_that_was_altered_is_refused(
    change: Callable[[nn.Sequential], object], words: str
):
    """Who freezes layers after the method was made would train them all the same; a copy of the
    copy knows it, too.
    """
    model = half_frozen()
    made = copied(copied(model))
    check_original(made)
    change(model)
    with pytest.raises(ValueError, match=words):
        check_original(made)


@pytest.mark.filterwarnings("error")
def test_weights_that_were_changed_since_are_warned_of():
    """The method begins with those that it was made with, as a copy in its place would."""
    model = half_frozen()
    made = copied(model)
    model.load_state_dict(model.state_dict())  # the same numbers
    for unchanged in (made, copied(half_frozen()), nn.Linear(2, 2)):
        check_original(unchanged)
    with torch.no_grad():
        model[1].bias.add_(1.0)
    with pytest.warns(UserWarning, match=r"\['1\.bias'\].*make the method anew"):
        check_original(made)


def test_embeddings_that_torch_rescales_are_named():
    table, plain = nn.Embedding(3, 2, max_norm=1.0), nn.Embedding(3, 2)
    reader = nn.ModuleDict({"table": table, "plain": plain})
    assert [rescaled(module) for module in (reader, table)] == [{"table.weight"}, {"weight"}]
