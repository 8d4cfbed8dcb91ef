"""The vmap kernel: what torch.func can batch and what it cannot, and pure phases carried over a
chunk.
"""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.composition.phases import Once
from bayesfl.data import ClientData
from bayesfl.engine import vmap
from bayesfl.engine.plan import PhasePlan
from bayesfl.models import mlp, resnet18
from tests.cases import numbers


@pytest.mark.parametrize(
    "layer", [nn.LSTM(3, 4), nn.GRU(3, 4), nn.RNN(3, 4)], ids=lambda layer: type(layer).__name__
)
def test_recurrent_layers_are_refused_by_name(layer):
    """The submodule's name and type, and which kernels take it."""
    module = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"reader": layer}))
    assert not vmap.can_batch(module)
    with pytest.raises(ValueError, match=rf"'1\.reader' \({type(layer).__name__}\).*kernel='live'"):
        vmap.refuse(module)
    with pytest.raises(ValueError, match=type(layer).__name__):
        vmap.refuse(layer)


def test_an_engine_refuses_before_it_starts():
    """`kernel="vmap"` on a module with an LSTM is an error where the kernel is chosen; `auto` takes
    the live one.
    """
    algorithm = bf.algorithms.fedavg(nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 4)))
    with pytest.raises(ValueError, match=r"'1' \(LSTM\)"):
        bf.Engine("vmap").choose(algorithm, algorithm.phases[0], torch.device("cpu"))
    assert bf.Engine().choose(algorithm, algorithm.phases[0], torch.device("cpu")) == "live"


def test_everything_else_is_let_through():
    """Norms, convolutions and attention."""
    for module in (
        mlp(3, outputs=2),
        resnet18((1, 8, 8), outputs=2, width=4),
        nn.MultiheadAttention(4, 2),
        nn.LayerNorm(3),
    ):
        assert vmap.can_batch(module)
        vmap.refuse(module)


@pytest.mark.parametrize("drawn", [False, True], ids=["point", "drawn"])
def test_residual_network(drawn):
    """A module without rules: outputs and slopes of three clients are those of each alone under
    autograd.
    """
    module = resnet18((2, 8, 8), outputs=3, width=4).double().requires_grad_(False)
    layout = Layout(copy.deepcopy(module).requires_grad_(), "*")
    vector = 0.3 * (numbers(3, 2, layout.size) if drawn else numbers(3, layout.size))
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in layout.leaves(vector).items()}
    x = numbers(3, 4, 2, 8, 8, seed=1)
    rows = [
        torch.stack(
            [
                functional_call(module, {k: leaf[c, s] for k, leaf in leaves.items()}, (x[c],))
                for s in range(2)
            ]
        )
        if drawn
        else functional_call(module, {k: leaf[c] for k, leaf in leaves.items()}, (x[c],))
        for c in range(3)
    ]
    outputs = torch.stack(rows)
    slope = numbers(*outputs.shape, seed=2)
    expected = torch.autograd.grad(outputs, list(leaves.values()), slope)
    slopes = layout.leaves(torch.full_like(vector, torch.nan))
    found = vmap.kernel(module)(
        {k: leaf.detach() for k, leaf in leaves.items()}, slopes, x, False, False
    )
    assert found.lifted == drawn
    assert_close(found.outputs, outputs.detach())
    assert found.back(slope) is None
    assert_close([slopes[key] for key in leaves], list(expected), rtol=1e-8, atol=1e-10)


class Averaged:
    """A phase by hand: noisy gradient steps whose iterates are averaged."""

    epochs, steps, batch_size, batched = 2, None, 2, True

    def check(self, algorithm):
        """Fits any."""

    def noise(self, algorithm):
        """One draw a step."""
        return {"w": (1, algorithm.layout("w").size)}

    def keeps(self, algorithm, beliefs):
        """Nothing."""
        return {}

    def begin(self, algorithm, given, view):
        """Where it starts, the sum and the number of iterates."""
        return {
            "w": view["w"]["loc"],
            "sum": torch.zeros_like(view["w"]["loc"]),
            "count": torch.zeros_like(view["n"]),
        }

    def step(self, algorithm, carry, given, view, batch, noise):
        """A step downhill and a small one anywhere."""

        def loss(w: Tensor) -> Tensor:
            losses = algorithm.losses(algorithm.leaves(("w",), {"w": {"loc": w}}), batch)
            return (losses * batch["weight"]).sum() / batch["weight"].sum()

        w = carry["w"] - 0.1 * torch.func.grad(loss)(carry["w"]) + 0.01 * noise["w"][0]
        return {"w": w, "sum": carry["sum"] + w, "count": carry["count"] + 1}

    def end(self, algorithm, carry, given, view):
        """Their average, and how many they were."""
        return view | {"w": {"loc": carry["sum"] / carry["count"]}}, {"count": carry["count"]}


def test_a_pure_phase_over_unequal_clients():
    """`vmap.run` carries any phase's begin, step and end, and leaves alone whoever is done: as the
    reference, client by client.
    """
    phase = Averaged()
    algorithm = bf.Algorithm(mlp(3, hidden=4, outputs=2), {"w": bf.Block()}, (phase,), parts=("w",))
    counts = np.array([5, 4, 2])
    split = ClientData(numbers(11, 3), (numbers(11, seed=1) > 0).long(), torch.arange(11), counts)
    server = algorithm.init(3, dtype=torch.float64)
    given = algorithm.given(server, 0, 1)
    views = algorithm.views(given, {}, {}, torch.from_numpy(counts).double())
    runs = [
        bf.Engine(kernel).run(
            algorithm,
            phase,
            given,
            views,
            PhasePlan(phase, split, np.arange(3), dtype=torch.float64),
        )
        for kernel in ("reference", "vmap", "layers", "live")
    ]
    for fast, info in runs[1:]:
        assert_close(fast["w"], runs[0][0]["w"], rtol=1e-10, atol=1e-12)
        assert info["count"].tolist() == [6.0, 4.0, 2.0]
    assert not torch.equal(runs[1][0]["w"]["loc"][0], views["w"]["loc"][0])


def unasked(*_):
    raise AssertionError("no phase here asks for losses")


def test_a_closed_form_over_a_chunk():
    """`Once` sees one client's view and data, and what it returns comes back stacked."""

    def centre(algorithm, given, view, batch):
        mean = (batch["weight"][:, None] * batch["x"]).sum(0) / batch["weight"].sum()
        return view | {"mean": mean, "n": view["n"]}

    phase = Once(centre, data=True)
    algorithm = bf.Algorithm(mlp(3, hidden=4, outputs=2), {"w": bf.Block()}, (phase,), parts=("w",))
    split = ClientData(
        numbers(7, 3), torch.zeros(7, dtype=torch.long), torch.arange(7), np.array([5, 2])
    )
    server = algorithm.init(2, dtype=torch.float64)
    given = algorithm.given(server, 0, 1)
    views = algorithm.views(given, {}, {}, torch.tensor([5.0, 2.0]).double())
    found, info = vmap.run(
        algorithm,
        phase,
        given,
        views,
        PhasePlan(phase, split, np.arange(2), dtype=torch.float64),
        losses=unasked,
    )
    assert_close(found["mean"], torch.stack([split.x[:5].mean(0), split.x[5:].mean(0)]))
    assert info == {}


def test_embeddings_with_options_of_their_gradient_run_alone():
    """torch.func would move the row that fills up, and would not scale gradients by frequency."""
    assert vmap.can_batch(nn.Sequential(nn.Embedding(4, 2)))
    assert not vmap.can_batch(nn.Sequential(nn.Embedding(4, 2, padding_idx=0)))
    assert not vmap.can_batch(nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True)))
