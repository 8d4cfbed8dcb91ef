"""Layer rules, and the other kernels on the same stacks, against one client and one draw at a time
under autograd.
"""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from bayesfl.engine import layers, rules
from bayesfl.engine.network import Pass, Rows
from bayesfl.models import SplitModel, cifar100_cnn, lenet, mlp
from tests.engine.made import (
    KERNELS,
    STACKS,
    WITHOUT_RULES,
    C,
    inputs,
    kernels,
    of_layers,
    owners,
    parameters,
    slopes_at,
    slow,
)
from tests.networks import residual

stacks = pytest.mark.parametrize("stack", STACKS)


class Scaled(nn.Module):
    """A layer behind a factor."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * x)


class Flat(nn.Module):
    """A module that joins its examples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten()[:, None]


def channels_last(leaf: Tensor) -> Tensor:
    """Every client's filters channels last, also those of a single channel; the rest plain."""
    return (
        leaf.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        if leaf.dim() == 5
        else leaf.contiguous()
    )


def run(
    name: str,
    module: nn.Module,
    leaves: dict[str, Tensor],
    wanted: frozenset[str],
    x: Tensor,
    lifted: bool,
    through: bool,
) -> tuple[Pass, dict[str, Tensor]]:
    """One pass of a kernel, of the live one client by client, and where the slopes will be written:
    views of a vector of NaN.
    """
    passage = KERNELS[name](module)
    sizes = [leaves[key][0].numel() for key in wanted]
    vector = torch.full((C, sum(sizes)), torch.nan, dtype=x.dtype)
    slopes = {
        key: t.view(leaves[key].shape)
        for key, t in zip(wanted, vector.split(sizes, 1), strict=True)
    }
    if name != "live":
        return passage(leaves, slopes, x, lifted, through), slopes
    rows = [tree_map(lambda t, c=c: t[c : c + 1], (leaves, slopes, x)) for c in range(C)]
    each = [passage(of, to, row, lifted, through) for of, to, row in rows]

    def back(slope: Tensor) -> Tensor | None:
        into = [one.back(slope[c : c + 1]) for c, one in enumerate(each)]
        return torch.cat(into) if through else into[0]

    return Pass(
        torch.cat([one.outputs for one in each]), each[0].lifted, back if each[0].back else None
    ), slopes


def compare(
    name: str,
    module: nn.Module,
    leaves: dict[str, Tensor],
    wanted: frozenset[str],
    x: Tensor,
    lifted: bool,
    through: bool,
    last: bool = False,
) -> None:
    """Outputs and slopes of a kernel are the slow ones; leaves are views of vectors, or lie
    channels last.
    """
    leaves = {key: channels_last(leaf) for key, leaf in leaves.items()} if last else leaves
    kept = {key: leaf.clone() for key, leaf in leaves.items()}, x.clone()
    outputs, up, expected = slow(module, leaves, x, lifted)
    found, slopes = run(name, module, leaves, wanted, x, lifted, through)
    assert found.lifted == up
    assert_close(found.outputs, outputs, rtol=1e-10, atol=1e-11)
    assert not found.outputs.requires_grad
    if not wanted and not through:
        assert found.back(found.outputs) is None
        return
    into = found.back(slopes_at(outputs))
    assert (into is None) == (not through)
    if through:
        assert_close(into, expected[""], rtol=1e-10, atol=1e-11)
    for key in wanted:
        assert_close(
            slopes[key],
            expected[key],
            rtol=1e-10,
            atol=1e-11,
            msg=lambda text, key=key: f"{key}: {text}",
        )
    assert_close((leaves, x), kept, rtol=0, atol=0)


@kernels
@stacks
@pytest.mark.parametrize("lifted", [False, True], ids=["one input", "an input for each draw"])
@pytest.mark.parametrize("which", ["none", "all", "first", "last"])
def test_outputs_and_slopes(kernel, stack, which, lifted):
    """With no layer drawn, all, the first or the last; with one input or one for each draw;
    everything asked for.
    """
    module, shape = STACKS[stack]
    layer = owners(module)
    drawn = of_layers(
        module, {"none": [], "all": layer, "first": layer[:1], "last": layer[-1:]}[which]
    )
    for last in (False, True):
        compare(
            kernel,
            module,
            parameters(module, drawn),
            of_layers(module, layer),
            inputs(shape, lifted),
            lifted,
            True,
            last,
        )


@pytest.mark.parametrize(
    ("kernel", "name"), [*(("live", name) for name in WITHOUT_RULES), ("vmap", "residual")]
)
@pytest.mark.parametrize("lifted", [False, True], ids=["one input", "an input for each draw"])
@pytest.mark.parametrize("drawn", [False, True], ids=["point", "drawn"])
def test_modules_without_rules(kernel, name, drawn, lifted):
    """They run as they are, draw after draw or batched by torch.func, and go back by autograd."""
    module, shape = WITHOUT_RULES[name]
    every = of_layers(module, owners(module))
    leaves = parameters(module, every if drawn else frozenset())
    compare(kernel, module, leaves, every, inputs(shape, lifted), lifted, True)


@kernels
@pytest.mark.parametrize(
    "through", [False, True], ids=["no slope at the inputs", "slope at the inputs"]
)
@pytest.mark.parametrize("stack", ["two convolutions", "body and head", "nested", "GELU"])
@pytest.mark.parametrize("lifted", [False, True], ids=["one input", "an input for each draw"])
def test_wanted_subsets(kernel, stack, through, lifted):
    """Any layers may be trained, or biases or weights alone; only what was asked for comes back,
    and no way back where nothing was.
    """
    module, shape = STACKS[stack]
    layer = owners(module)
    for count in range(len(layer) + 1):
        for some in combinations(layer, count):
            drawn = of_layers(module, layer[-1:])
            compare(
                kernel,
                module,
                parameters(module, drawn),
                of_layers(module, some),
                inputs(shape, lifted),
                lifted,
                through,
            )
    biases = frozenset(name for name, _ in module.named_parameters() if name.endswith("bias"))
    for some in (biases, frozenset(dict(module.named_parameters())) - biases):
        compare(
            kernel, module, parameters(module, drawn), some, inputs(shape, lifted), lifted, through
        )


@kernels
@pytest.mark.parametrize("stack", ["two convolutions", "body and head", "convolution with groups"])
@pytest.mark.parametrize("lifted", [False, True], ids=["one input", "an input for each draw"])
def test_uncovered_parameters_are_the_modules_own(kernel, stack, lifted):
    """Layers without leaves are the same for everyone, whatever of the others is drawn."""
    module, shape = STACKS[stack]
    layer = owners(module)
    for count in range(len(layer)):
        for some in combinations(layer, count):
            names = of_layers(module, some)
            for drawn in (frozenset(), names):
                compare(
                    kernel,
                    module,
                    parameters(module, drawn, names),
                    names,
                    inputs(shape, lifted),
                    lifted,
                    True,
                )


@kernels
@pytest.mark.parametrize("stack", ["linear", "convolution"])
@pytest.mark.parametrize("lifted", [False, True], ids=["one input", "an input for each draw"])
@pytest.mark.parametrize(
    "case",
    ["weight drawn", "bias drawn", "weight drawn, bias uncovered", "bias drawn, weight uncovered"],
)
def test_layers_of_which_half_is_drawn(kernel, stack, lifted, case):
    """A belief about the weights beside a point for the bias, or the other way round, or beside a
    parameter of no block.
    """
    module, shape = STACKS[stack]
    drawn = frozenset({case.split()[0]})
    covered = drawn if "uncovered" in case else frozenset({"weight", "bias"})
    compare(
        kernel,
        module,
        parameters(module, drawn, covered),
        covered,
        inputs(shape, lifted),
        lifted,
        True,
    )


@kernels
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, 1), nn.MaxPool2d(2, padding=1)],
    ids=["pairs", "threes", "padded"],
)
def test_the_first_of_equal_values_wins(kernel, pool):
    """Of a window's equal maxima, common behind a ReLU, torch gives the slope to the first in
    reading order.
    """
    module = nn.Sequential(pool, nn.Conv2d(1, 1, 1)).double()
    x = (2 * inputs((1, 6, 7), False)).round().relu()
    compare(kernel, module, parameters(module), of_layers(module, ["1"]), x, False, True)


@pytest.mark.parametrize("kernel", ["live", "vmap"])
def test_one_layer_used_twice(kernel):
    """So does one with parameters: its slope is the sum over both places. The rules say no, or the
    same.
    """
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, nn.Tanh(), layer).double()
    names = frozenset({"0.weight", "0.bias"})
    compare(kernel, module, parameters(module), names, inputs((4,), False), False, True)
    if layers.supported(module, inputs((4,), False)[0]):
        compare("layers", module, parameters(module), names, inputs((4,), False), False, True)


@kernels
@pytest.mark.parametrize(
    "act",
    [nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True), nn.SiLU(inplace=True)],
    ids=lambda a: type(a).__name__,
)
def test_activations_in_place(kernel, act):
    """`inplace=True` changes neither inputs nor slopes."""
    module = nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 3)).double()
    if kernel != "layers" or layers.supported(module, inputs((4,), False)[0]):
        compare(
            kernel,
            module,
            parameters(module),
            of_layers(module, ["0", "2"]),
            inputs((4,), False),
            False,
            True,
        )


def test_what_has_rules():
    """The networks of `bf.models`, and every stack above, with a rule for each function."""
    for module, shape in (
        *STACKS.values(),
        (mlp((1, 4, 4), hidden=(5, 5), outputs=2), (1, 4, 4)),
        (lenet((1, 28, 28), outputs=10), (1, 28, 28)),
        (cifar100_cnn(), (3, 32, 32)),
        (residual(1, outputs=2), (1, 8, 8)),
    ):
        plan = layers._plan(module.requires_grad_(False), torch.rand(4, *shape))
        assert not isinstance(plan, str)
        assert all(ready.args is not None for ready in plan.steps)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), (1, 5, 5)),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), (1, 5, 5)),
        (nn.Conv2d(1, 1, 3, padding="same"), (1, 5, 5)),
        (nn.ConvTranspose2d(1, 2, 3), (1, 5, 5)),
        (nn.Flatten(1, 2), (2, 2, 3)),
        (nn.Softmax(-1), (4,)),
        (nn.InstanceNorm1d(2, affine=True), (2, 5)),
        (nn.Mish(), (4,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_functions_without_a_rule(module: nn.Module, shape: tuple[int, ...]):
    """Are batched by torch.func one by one, as far as that can."""
    module, x = Scaled(module), inputs(shape, False)
    every = of_layers(module.double().requires_grad_(False), owners(module))
    assert layers.supported(module, x[0])
    for drawn in (frozenset(), every):
        compare("layers", module, parameters(module, drawn), every, x, False, True)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.LSTM(4, 4), (4,)), (nn.MaxPool2d(2, return_indices=True), (1, 4, 4)), (Flat(), (4,))],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_run(module: nn.Module, shape: tuple[int, ...]):
    """Several results, functions that torch.func cannot batch, axes of examples that are gone."""
    for made in (module, SplitModel(nn.Identity(), module)):
        assert not layers.supported(made.double().requires_grad_(False), inputs(shape, False)[0])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_a_grouped_convolution_is_one_for_each_client(groups: int, bias: bool):
    """What a GPU runs, one grouped convolution, gives the outputs and slopes of one convolution
    after another.
    """
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups, bias=bias).double()
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, *layer.weight.shape, generator=rng).double()
    x = torch.randn(3, 5, 4, 7, 7, generator=rng).double()
    shift = (torch.randn(3, 6, generator=rng).double(),) if bias else ()
    count = 2 + bias
    call = rules.Call((True,) * count, (None,) * count, (False,) * count, Rows(), None, 1)
    options = () if bias else (None,)
    outcome = []
    for grouped in (False, True):
        found, back = rules._convolved(
            call, x, weight, *shift, *options, ([2, 2], [1, 1], [1, 1]), groups, grouped=grouped
        )
        outcome.append((found, *back(slopes_at(found))))
    assert_close(outcome[1], outcome[0])
