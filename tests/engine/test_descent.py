"""Gradient steps of a chunk: optimisers that persist, for clients that took different numbers of
steps.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import bayesfl as bf
from bayesfl.base.protocols import Tensors
from bayesfl.composition.block import Block
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Flat, Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.optim import SGD, Adam, AdamW
from bayesfl.posteriors import Point
from tests.cases import run
from tests.engine.made import chunk


@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
@pytest.mark.parametrize(
    "optimiser",
    [
        SGD(0.05),
        SGD(0.03, momentum=0.9),
        Adam(0.01, weight_decay=1e-2),
        AdamW(0.01, weight_decay=1.0),
    ],
    ids=str,
)
def test_an_optimiser_that_persists(
    model: nn.Module, clients: FederatedData, optimiser: Any, kernel: str
):
    """A client alone goes through three rounds of two steps as through one of six; without,
    momentum starts anew.
    """

    def phase(epochs: int, persist: str | None) -> bf.Algorithm:
        step = Descend(
            Energy("w", ("w",), likelihood="mean"),
            optimiser=optimiser,
            epochs=epochs,
            persist=persist,
        )
        return bf.Algorithm(model, {"w": Block(pool=None, keep=True)}, (step,), parts=("w",))

    kept, anew = (
        run(phase(2, name), clients, kernel=kernel, rounds=3).private["w"]["loc"]
        for name in ("velocity", None)
    )
    once = run(phase(6, None), clients, kernel=kernel).private["w"]["loc"]
    assert_close(kept, once, atol=1e-12, rtol=0)
    assert torch.equal(anew, kept) == (optimiser == SGD(0.05))


@pytest.mark.parametrize(
    "optimiser", [Adam(0.01), AdamW(0.01, weight_decay=1.0)], ids=["adam", "adamw"]
)
@pytest.mark.parametrize("prox", [False, True])
def test_clients_that_took_different_numbers_of_steps(
    model: nn.Module, clients: FederatedData, prox: bool, optimiser: Adam
):
    """Adam corrects each client's moments by its own number of steps, whoever shares its chunk."""
    prior = Normal(
        centre=server_mean("w"),
        variance=lambda given, view: torch.full_like(view["n"], 0.5)[..., None],
    )
    step = Descend(
        Energy("w", ("w",), likelihood="mean"),
        optimiser=optimiser,
        epochs=2,
        batch_size=10,
        persist="moments",
        prox=prox,
    )
    algorithm = bf.Algorithm(model, {"w": Block(prior=prior)}, (step,), parts=("w",))
    options: dict[str, Any] = {"rounds": 3, "participation": 0.5}
    reference = run(algorithm, clients, kernel="reference", **options)
    steps = reference.private["moments"]["steps"]
    assert len(set(steps.tolist())) > 2
    for kernel in ("layers", "live", "vmap"):
        found = run(algorithm, clients, kernel=kernel, **options)
        assert_close(found.server["w"]["loc"], reference.server["w"]["loc"], atol=1e-10, rtol=0)
        assert torch.equal(found.private["moments"]["steps"], steps)


def test_a_state_that_persists_is_not_written_into(model: nn.Module, clients: FederatedData):
    """A kernel returns a new one: what the view held is the client's until its round is
    accepted.
    """
    step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=Adam(0.05), persist="moments")
    algorithm = bf.Algorithm(model, {"w": Block()}, (step,), parts=("w",))
    given, views, plan = chunk(algorithm, clients.to("cpu", torch.float64).train)
    before = tree_map(torch.clone, views)
    after, _ = bf.Engine("layers").run(algorithm, step, given, views, plan)
    assert_close(views, before, atol=0, rtol=0)
    assert float(after["moments"]["steps"].sum()) == 7


class Halved(Energy):
    """Counts half of the loss."""

    def loss(self, *given: Any) -> tuple[Tensor, Tensor]:
        loss, nll = super().loss(*given)
        return loss / 2, nll


class Huber(Normal):
    """A prior of another shape."""

    def energy(self, loc: Tensor, var: Tensor, given: Any, view: Any) -> Tensor:
        return 5 * F.huber_loss(
            loc, self.centre(given, view).expand_as(loc), reduction="none", delta=0.1
        ).sum(-1)


class Rounded(Point):
    """A point whose weights are squashed before they are used."""

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        return q["loc"].tanh()


@pytest.mark.parametrize("kernel", ["layers", "live", "vmap"])
@pytest.mark.parametrize("kind", ["energy", "prior", "posterior", "held"])
def test_what_a_subclass_overrides_is_what_runs(
    model: nn.Module, clients: FederatedData, kernel: str, kind: str
):
    """Kernels have algebra of their own for the library's classes, and take no subclass for one of
    these.
    """
    tie: dict[str, Any] = {
        "centre": server_mean("body"),
        "variance": lambda given, view: torch.full_like(view["n"], 0.5)[..., None],
    }

    def method(own: bool) -> bf.Algorithm:
        prior = (Huber if own and kind == "prior" else Normal)(**tie)
        energy = (Halved if own and kind == "energy" else Energy)(
            "body", ("body", "head"), likelihood="sum"
        )
        body = Rounded() if own and kind == "posterior" else Point()
        head = Rounded() if own and kind == "held" else Point()
        blocks = {
            "body": Block("body.*", prior=prior, posterior=body),
            "head": Block("head.*", posterior=head),
        }
        return bf.Algorithm(
            model,
            blocks,
            (Descend(energy, optimiser=SGD(0.003), epochs=2, batch_size=10),),
            parts=("body", "head"),
        )

    found, expected, plain = (
        run(method(own), clients, kernel=by).server["body"]["loc"]
        for own, by in ((True, kernel), (True, "reference"), (False, "reference"))
    )
    assert_close(found, expected, atol=1e-12, rtol=0)
    assert (plain - expected).abs().max() > 1e-4


@pytest.mark.parametrize("kernel", ["layers", "live"])
def test_a_penalty_that_mixes_clients_is_refused(
    model: nn.Module, clients: FederatedData, kernel: str
):
    """It is computed for many clients at once, and must reduce over the last axes alone."""

    def mixed(features: Any, outputs: Tensor, *rest: Any) -> Tensor:
        return outputs.square().mean()

    energy = Energy("w", ("w",), likelihood="mean", penalty=mixed)
    algorithm = bf.Algorithm(model, {"w": Block()}, (Descend(energy),), parts=("w",))
    with pytest.raises(ValueError, match=r"penalty returns shape \[\] for .*\.sum\(-1\)"):
        run(algorithm, clients, kernel=kernel)


@pytest.mark.parametrize("kernel", ["reference", "layers", "live"])
def test_a_point_of_ones_own_needs_no_prior(model: nn.Module, clients: FederatedData, kernel: str):
    """Its divergence has no slope; and `prox` solves no prior with an energy of its own, one that
    derives from Flat neither.
    """

    class Lasso(Flat):
        def energy(self, loc: Tensor, var: Tensor, given: Any, view: Any) -> Tensor:
            return loc.abs().sum(-1)

    step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=SGD(0.05))
    method = bf.Algorithm(model, {"w": Block(posterior=Rounded())}, (step,), parts=("w",))
    found, expected = (
        run(method, clients, kernel=one).server["w"]["loc"] for one in (kernel, "reference")
    )
    assert_close(found, expected, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=r"prox .*\['w'\]"):
        bf.Algorithm(model, {"w": Block(prior=Lasso())}, (replace(step, prox=True),), parts=("w",))
