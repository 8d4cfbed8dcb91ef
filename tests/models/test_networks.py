"""Networks: published sizes, shapes, gradients under vmap, and what is said of sizes that
are none.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from bayesfl import models
from tests.models.made import INPUTS, MAKERS, every


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_published_sizes():
    assert size(models.mlp(784, outputs=10)) == 79_510  # FedSI, MNIST
    assert size(models.lenet((3, 32, 32), outputs=10)) == 62_006  # FedSI, CIFAR-10
    assert size(models.lenet((1, 28, 28), outputs=10)) == 61_706  # LeNet-5
    pfedvem = models.lenet((3, 32, 32), outputs=10, channels=(16, 32))
    assert pfedvem.body[7].in_features == 800  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]
    widths = (3, 32, 64, 128, 256, 100)
    convs = sum(9 * a * b + b for a, b in pairwise(widths))
    assert size(models.cifar100_cnn()) == convs + 100 * 20 + 20
    dense = 800 * 128 + 128 + 128 * 10 + 10
    # FedPAC, Fashion-MNIST.
    assert (
        size(models.leaky_cnn((1, 28, 28), outputs=10)) == 25 * 16 + 16 + 25 * 16 * 32 + 32 + dense
    )
    dense = 576 * 128 + 128 + 128 * 10 + 10
    convs = 3 * 25 * 16 + 16 + 25 * 16 * 32 + 32 + 9 * 32 * 64 + 64
    assert size(models.leaky_cnn((3, 32, 32), outputs=10)) == convs + dense  # FedPAC, CIFAR-10


def test_the_character_network():
    """FedEM's sizes for 100 characters; the state after the last character, by the LSTM's
    equations.
    """
    assert size(models.char_lstm(80, outputs=100)) == 825_220
    model = models.char_lstm((5,), outputs=7, embedding=3, hidden=4, layers=2, seed=1)
    assert {key.partition(".")[0] for key, _ in model.named_parameters()} == {"body", "head"}
    x = torch.tensor([[0.0, 1.0, 6.0, 3.0, 3.0], [2.0, 0.0, 0.0, 5.0, 1.0]])
    outputs = model(x)
    assert_close(model(x[1:]), outputs[1:])
    read = model.body.read
    state = cell = low = low_cell = torch.zeros(2, 4)

    def step(layer, x, state, cell):
        w = {
            key: getattr(read, f"{key}_l{layer}")
            for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        i, f, g, o = (
            x @ w["weight_ih"].T + w["bias_ih"] + state @ w["weight_hh"].T + w["bias_hh"]
        ).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell

    for t in range(5):
        low, low_cell = step(0, model.body.embed.weight[x[:, t].long()], low, low_cell)
        state, cell = step(1, low, state, cell)
    assert_close(outputs, model.head(state))
    assert not torch.equal(
        models.char_lstm(5, outputs=7, seed=2).head.weight,
        models.char_lstm(5, outputs=7, seed=3).head.weight,
    )


@every
def test_shapes_and_names(name):
    model = MAKERS[name]()
    x = torch.randn(2, *INPUTS[name])
    outputs = model(x)
    assert outputs.shape == (2, model.head.out_features)
    assert_close(outputs, model.head(model.body(x)))
    assert_close(model(x[:1]), outputs[:1], atol=1e-5, rtol=1e-5)  # a batch of one keeps its axis
    assert {key.partition(".")[0] for key, _ in model.named_parameters()} == {"body", "head"}
    assert not list(model.buffers())


@every
def test_one_gradient_per_client_under_vmap(name):
    """Stacked copies under vmap give the gradients that each copy gives alone."""
    model = MAKERS[name]().double()
    copies = [MAKERS[name](seed=s).double() for s in range(2)]
    stacked = {
        key: torch.stack([dict(c.named_parameters())[key].detach() for c in copies])
        for key, _ in model.named_parameters()
    }
    x = torch.randn(2, 3, *INPUTS[name], dtype=torch.float64)

    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).square().mean()

    together = vmap(grad(loss))(stacked, x)
    for j in range(2):
        alone = grad(loss)({key: p[j] for key, p in stacked.items()}, x[j])
        assert_close({key: slope[j] for key, slope in together.items()}, alone)


@pytest.mark.parametrize(
    "name",
    ["mlp", "mlp-deep", "lenet-grey", "lenet-colour", "leaky-grey", "leaky-colour", "cifar100_cnn"],
)
def test_bodies_are_trees_of_the_layers_that_kernels_know(name):
    known = (
        nn.Sequential,
        nn.Linear,
        nn.Conv2d,
        nn.ReLU,
        nn.LeakyReLU,
        nn.MaxPool2d,
        nn.AdaptiveAvgPool2d,
        nn.Flatten,
    )
    assert {type(module) for module in MAKERS[name]().body.modules()} <= set(known)


def test_the_cifar100_network_pools_with_padding():
    x, places = torch.randn(1, 3, 32, 32), []
    for layer in models.cifar100_cnn().body:  # pyright: ignore[reportGeneralTypeIssues]
        x = layer(x)
        if isinstance(layer, nn.MaxPool2d):
            places.append((x.shape[-1], layer.padding))
    assert places == [(17, 1), (9, 1), (5, 1), (3, 1)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.mlp(0, outputs=3), r"inputs .*got 0"),
        (lambda: models.mlp("64", outputs=3), r"inputs .*got '6'"),
        (lambda: models.mlp((1, 28.5), outputs=3), r"inputs .*got 28.5"),  # pyright: ignore[reportArgumentType]
        (lambda: models.mlp(4, outputs=0), r"outputs .*1.* got 0"),
        (lambda: models.mlp(4, outputs=2.5), r"outputs .*got 2.5"),
        (lambda: models.mlp(4, outputs=2, hidden=(3, 0)), "hidden .*1, got 0"),
        (lambda: models.mlp(4, outputs=2, hidden="100"), r"hidden .*got '1'"),  # pyright: ignore[reportArgumentType]
        (lambda: models.mlp(4, outputs=2, hidden=10.5), r"hidden .*got 10.5"),  # pyright: ignore[reportArgumentType]
        (lambda: models.mlp(4, outputs=2, head_scale=0.0), r"head_scale .*> 0 .*got 0\.0"),
        (lambda: models.mlp(4, outputs=2, head_scale="1"), r"head_scale .*got '1'"),  # pyright: ignore[reportArgumentType]
        (
            lambda: models.lenet((1, 28, 28), outputs=10, channels=(6, 16, 32)),
            r"channels .*got \(6, 16, 32\)",
        ),
        (
            lambda: models.lenet((1, 28, 28), outputs=10, channels=(6, 0)),
            "channels must be at least 1, got 0",
        ),
        (
            lambda: models.lenet((1, 28, 28), outputs=10, hidden=84),
            "hidden must be 2 numbers, got 84",
        ),
        (lambda: models.lenet((64,), outputs=10), "not enough values to unpack"),
        (lambda: models.char_lstm((1, 28, 28), outputs=10), "too many values to unpack"),
        (lambda: models.char_lstm(80, outputs=10, hidden=0), r"hidden .*1.* got 0"),
        (lambda: models.char_lstm(80, outputs=10, embedding=1.5), r"embedding .*got 1\.5"),  # pyright: ignore[reportArgumentType]
        (lambda: models.cifar100_cnn(outputs=2.5), r"outputs .*got 2.5"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_errors_say_what_and_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    model = models.mlp(np.int64(4), outputs=np.int64(2), hidden=np.int64(3))  # pyright: ignore[reportArgumentType]
    assert [tuple(p.shape) for p in model.parameters()] == [(3, 4), (3,), (2, 3), (2,)]


def test_xavier_start():
    """Weights uniform within sqrt(6 / (fan in + fan out)), biases 0; a head_scale still has the
    last word on the head.
    """
    model = models.mlp((2, 14, 14), hidden=(390, 390), outputs=1, start="xavier")
    for layer, (before, after) in zip(
        [model.body[1], model.body[3], model.head], [(392, 390), (390, 390), (390, 1)], strict=True
    ):
        bound = (6 / (before + after)) ** 0.5
        assert layer.weight.shape == (after, before)
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()
    assert (
        models.mlp(5, hidden=3, outputs=2, start="xavier", head_scale=0.1).head.bias.abs().min() > 0
    )
    with pytest.raises(ValueError, match=r"start .*'torch'.*'xavier'.* got 'glorot'"):
        models.mlp(5, outputs=2, start="glorot")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "depth", "side"),
    [
        *((models.lenet, 2, side) for side in (12, 13, 28, 31, 32, 33)),
        *((models.leaky_cnn, 1, side) for side in (12, 13, 28)),
        *((models.leaky_cnn, 3, side) for side in (16, 17, 32)),
    ],
)
def test_convolutions_take_any_size(make, depth, side):
    model = make((depth, side, side + 3), outputs=4)
    assert model(torch.randn(2, depth, side, side + 3)).shape == (2, 4)
    slopes = {layer.negative_slope for layer in model.modules() if isinstance(layer, nn.LeakyReLU)}
    assert slopes == ({0.01} if make is models.leaky_cnn else set())


def test_a_linear_model_is_all_head():
    """Without hidden layers, for features and for images."""
    plain, image = models.mlp(4, outputs=3, hidden=()), models.mlp((1, 2, 2), outputs=3, hidden=())
    for model, x in ((plain, torch.randn(5, 4)), (image, torch.randn(5, 1, 2, 2))):
        assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
        assert_close(
            model(x),
            x.flatten(1) @ model.get_parameter("head.weight").T + model.get_parameter("head.bias"),
        )
