"""The vmap kernel: what torch.func can batch and what it cannot, and pure phases carried over a
chunk.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import ClientData
from bayesfl.engine import vmap
from bayesfl.models import mlp
from tests.cases import numbers
from tests.engine.made import chunk
from tests.networks import residual


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
    given = (algorithm, algorithm.phases[0], torch.zeros(1), torch.rand(4, 3))
    with pytest.raises(ValueError, match=r"'1' \(LSTM\)"):
        bf.Engine("vmap").choose(*given)
    assert bf.Engine().choose(*given) == "live"


def test_everything_else_is_let_through():
    """Norms, convolutions and attention."""
    for module in (
        mlp(3, outputs=2),
        residual(1, outputs=2),
        nn.MultiheadAttention(4, 2),
        nn.LayerNorm(3),
    ):
        assert vmap.can_batch(module)
        vmap.refuse(module)


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
    y = (numbers(11, seed=1) > 0).long()
    split = ClientData(numbers(11, 3), y, torch.arange(11), np.array([5, 4, 2]))
    given, views, _ = chunk(algorithm, split)
    wanted, *others = (
        bf.Engine(kernel).run(algorithm, phase, given, views, chunk(algorithm, split)[-1])
        for kernel in ("reference", "vmap", "layers", "live")
    )
    for fast, info in others:
        assert_close(fast["w"], wanted[0]["w"], rtol=1e-10, atol=1e-12)
        assert info["count"].tolist() == [6.0, 4.0, 2.0]
        assert not torch.equal(fast["w"]["loc"][0], views["w"]["loc"][0])


def test_embeddings_with_options_of_their_gradient_run_alone():
    """torch.func would move the row that fills up, and would not scale gradients by frequency."""
    for options in ({}, {"padding_idx": 0}, {"scale_grad_by_freq": True}):
        assert vmap.can_batch(nn.Sequential(nn.Embedding(4, 2, **options))) == (not options)
