"""Copies that share frozen parameters, and originals that have changed since."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from bayesfl.curvature import Curvature
from bayesfl.likelihoods import Gaussian
from bayesfl.models.copies import check_original, copied, refuse_changed, rescaled
from tests.cases import numbers


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
            r"\['1'\].*Sequential.*frozen or unfrozen.*deepcopy",
        ),
        (
            lambda model: model.requires_grad_(True),
            r"\['0'\].*frozen or unfrozen",
        ),
        (
            lambda model: model[1].register_forward_hook(lambda *given: None),
            r"\['1'\].*values or hooks",
        ),
        (lambda model: model.append(nn.Linear(2, 2)), r"\['2'\].*replaced"),
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


@pytest.mark.parametrize(("slopes", "shape"), [(1, (4,)), (3, (3,)), (3, (3, 2, 2))])
def test_slopes_of_prelu_have_gradients_of_each_example(slopes: int, shape: tuple[int, ...]):
    """torch's own are not summed under vmap; values and gradients are torch's."""
    module = nn.PReLU(slopes).double()
    module.weight.data = torch.arange(1.0, slopes + 1).double() / 7
    made, x = copied(module), numbers(5, *shape)
    x[0] = 0
    assert torch.equal(made(x), module(x))

    def summed(leaves: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(made, leaves, (one[None],)).square().sum()

    leaves = {"weight": made.get_parameter("weight").detach()}
    found = vmap(grad(summed), in_dims=(None, 0))(leaves, x)["weight"]
    for one, own in zip(x, found, strict=True):
        (expected,) = torch.autograd.grad(module(one[None]).square().sum(), [module.weight])
        assert_close(own, expected)


def test_curvature_of_prelu():
    """Of squares: the sum over outputs of their gradients' squares, by torch's own activation."""
    model = nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.Linear(3, 2)).double()
    x = numbers(6, 4)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, list(model.parameters()))])
        for f in (model(one[None])[0, o] for one in x for o in range(2))
    ]
    assert_close(Curvature(model, Gaussian(1.0)).diagonal(x), torch.stack(rows).square().sum(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: setattr(model[1], "negative_slope", 0.9),
            r"\['1'\] .*given other options",
        ),
        (lambda model: setattr(model[2], "p", 0.5), r"\['2'\] .*given other options"),
        (lambda model: setattr(model, "scale", 2.0), r"the model itself.*or given other options"),
        (lambda model: model.__setitem__(1, nn.Tanh()), r"\['1'\] .*replaced"),
    ],
)
def test_layers_that_change_after_the_method_was_made(change, words):
    """A method trains the copy that it made; a change of the copy itself is seen as well."""

    def fresh() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1), nn.Dropout(0.1))

    model = fresh()
    made = copied(model)
    check_original(made)
    change(model)
    refuse_changed(made)
    with pytest.raises(ValueError, match=words):
        check_original(made)
    made = copied(fresh())
    change(made)
    with pytest.raises(ValueError, match="own copy of the model were changed"):
        refuse_changed(made)
