"""The live kernel: any module, one client at a time, convolutions channels last."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.engine import live
from bayesfl.models import resnet18
from bayesfl.optim import SGD
from tests.cases import CASES, EM, numbers

S, B = 2, 3


class Reader(nn.Module):
    """Reads sequences [B, T, F]; the last state decides. No rule knows it, and torch.func cannot
    batch it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, 2]."""
        return self.head(self.reader(x)[0][:, -1])


MODULES = {
    "lstm": (Reader().double(), (5, 3)),
    "residual": (resnet18((2, 8, 8), outputs=3, width=4).double(), (2, 8, 8)),
    "same padding": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Flatten()).double(),
        (2, 4, 4),
    ),
    "circular padding": (
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten()
        ).double(),
        (2, 4, 4),
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("lifted", [False, True], ids=["one input", "an input for each draw"])
@pytest.mark.parametrize("drawn", [False, True], ids=["point", "drawn"])
def test_outputs_and_slopes_of_any_module(name, drawn, lifted):
    """What no rule knows runs as it is, draw after draw, and goes back by autograd."""
    module, shape = MODULES[name]
    layout = Layout(module, "*")
    vector = 0.3 * (numbers(1, S, layout.size) if drawn else numbers(1, layout.size))
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in layout.leaves(vector).items()}
    x = (
        numbers(1, S, B, *shape, seed=1) if lifted else numbers(1, B, *shape, seed=1)
    ).requires_grad_()
    up = drawn or lifted
    rows = [
        functional_call(
            module,
            {k: leaf[0, s] if drawn else leaf[0] for k, leaf in leaves.items()},
            (x[0, s] if lifted else x[0],),
        )
        for s in range(S if up else 1)
    ]
    outputs = torch.stack(rows)[None] if up else rows[0][None]
    slope = numbers(*outputs.shape, seed=2)
    expected = torch.autograd.grad(outputs, [*leaves.values(), x], slope)
    slopes = layout.leaves(torch.full_like(vector, torch.nan))
    found = live.kernel(module)(
        {key: leaf.detach() for key, leaf in leaves.items()}, slopes, x.detach(), lifted, True
    )
    assert found.lifted == up
    assert_close(found.outputs, outputs.detach())
    into = found.back(slope)
    assert_close([*(slopes[key] for key in leaves), into], list(expected), rtol=1e-8, atol=1e-10)


def test_convolutions_are_noticed():
    """Anywhere in the module."""
    assert live.has_convolutions(resnet18((1, 8, 8), outputs=2, width=4))
    assert not live.has_convolutions(Reader())


def test_filters_and_images_lie_channels_last():
    """Also those of a single channel, which torch counts as lying either way; the rest stays as it
    is.
    """
    for shape in ((4, 3, 5, 5), (4, 1, 5, 5), (1, 3, 1, 1)):
        filters = numbers(*shape)
        assert_close(live._channels_last(filters), filters, rtol=0, atol=0)
        assert (
            live._channels_last(filters).stride()
            == torch.empty(shape, memory_format=torch.channels_last).stride()
        )
    matrix = numbers(5, 4).mT
    assert live._channels_last(matrix) is matrix


def test_a_parameter_that_forward_leaves_out():
    """Its slope is zero, not the last one's and not an error."""
    module = Reader()
    module.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))
    layout = Layout(module.double(), "*")
    leaves = layout.leaves(torch.cat([p.detach().flatten() for p in module.parameters()])[None])
    slopes = layout.leaves(torch.full((1, layout.size), torch.nan, dtype=torch.float64))
    found = live.kernel(module)(leaves, slopes, numbers(1, B, 5, 3), False, False)
    found.back(numbers(1, B, 2))
    assert bool((slopes["spare"] == 0).all())
    assert all(bool(slope.isfinite().all()) for slope in slopes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedem", "d_fedem", "ifca", "clustered"])
def test_methods_run_on_an_lstm(name: str):
    """Which nothing can batch: client by client, as the reference does; copies one after another;
    new clients and predictions too.
    """
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randint(6, (n, 4), generator=rng).float() for n in (9, 5, 3)]
    ys = [((x[:, -1] + x[:, 0]) % 6).long() for x in xs]
    clients = bf.data.from_arrays(xs, ys, test=(xs, ys), outputs=6, task="classification")
    model = bf.models.char_lstm(clients.inputs, outputs=6, embedding=2, hidden=3, layers=2)
    case = next(case for case in CASES if case.name == name)

    optimiser = EM(0.3) if "fedem" in name else SGD(0.3, momentum=0.9)

    def run(kernel):
        options = {"rounds": 3, "dtype": torch.float64, "evaluate_every": None, "progress": False}
        return bf.simulate(
            case(model, batch_size=4, optimiser=optimiser),
            clients,
            engine=bf.Engine(kernel),
            **options,
        )

    live, reference = run("auto"), run("reference")
    assert_close(live.server, reference.server, atol=1e-9, rtol=0)
    assert_close(live.private, reference.private, atol=1e-9, rtol=0)
    start = case(model).init(3, dtype=torch.float64)
    block = next(iter(live.algorithm.blocks))
    assert not torch.allclose(live.server[block]["loc"], start[block]["loc"])
    layout = live.algorithm.layout(block)
    for part in ("body.embed.", "body.read.weight_hh_l0", "body.read.weight_ih_l1", "head."):
        moved = {
            name: (leaf - layout.leaves(start[block]["loc"])[name]).abs().max()
            for name, leaf in layout.leaves(live.server[block]["loc"]).items()
        }
        assert max(value for name, value in moved.items() if name.startswith(part)) > 1e-6
    assert_close(live.predict().probs, reference.predict().probs, atol=1e-9, rtol=0, equal_nan=True)
    probs = live.adapt(clients.select([1])).predict().probs
    assert probs is not None
    assert_close(probs.sum(-1), torch.ones(1, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"torch\.func .*'body\.read' \(LSTM\).*kernel='live'"):
        run("vmap")
