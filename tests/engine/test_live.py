"""The live kernel: any module, one client at a time, convolutions channels last."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.engine import live
from bayesfl.optim import SGD
from tests.cases import CASES, EM, numbers
from tests.engine.made import Reader
from tests.networks import residual

B = 3


def test_convolutions_are_noticed():
    """Anywhere in the module."""
    assert live.has_convolutions(residual(1, outputs=2))
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
    assert slopes.pop("spare").tolist() == [[0, 0]]
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
    assert_close(probs.sum(-1), torch.ones(1, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"torch\.func .*'body\.read' \(LSTM\).*kernel='live'"):
        run("vmap")
