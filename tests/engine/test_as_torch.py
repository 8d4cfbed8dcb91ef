"""Networks that reach their weights in unusual ways train as in a plain PyTorch loop."""

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.optim import SGD
from tests.networks import KINDS, Base, X, Y, made


def loop(name: str, steps: int) -> nn.Module:
    """The network after steps of a plain loop, on all rows."""
    model = made(name).double()
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimiser.step()
    return model


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kernel", ["auto", "live", "reference"])
def test_trained_as_by_a_plain_loop(name, kernel):
    data = bf.data.from_arrays([X], [Y], test=([X], [Y]), outputs=3)
    method = bf.algorithms.fedavg(made(name), epochs=2, batch_size=None, optimiser=SGD(0.5))
    engine = bf.Engine(kernel)
    run = bf.simulate(method, data, rounds=2, engine=engine, dtype=torch.float64, progress=False)
    plain = loop(name, 4)
    for (key, mine), (_, theirs) in zip(
        run.model().named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12, msg=key)
    torch.testing.assert_close(run.client(0).model()(X), plain(X), rtol=0, atol=1e-12)


HIDDEN = nn.Linear(6, 8)


class Global(Base):
    def hidden(self, x):
        return HIDDEN(x)


class Registered(Global):
    def begin(self):
        self.a = HIDDEN


class Cached(Base):
    def begin(self):
        self.f = lru_cache(self.a.forward)

    def hidden(self, x):
        return self.f(x)


class View(Base):
    def begin(self):
        self.held = {"w": [self.a.weight.T]}


class Data(Base):
    def begin(self):
        self.o.held = self.a.weight.data


class Ids(Base):
    def begin(self):
        self.held = {id(self.a.weight): 2.0}

    def hidden(self, x):
        return self.a(x) * self.held.get(id(self.a.weight), 1.0)


class Keeps(Base):
    def hidden(self, x):
        if not hasattr(self, "held"):
            self.held = self.a.weight.detach()
        return self.a(x) + F.linear(x, self.held)


class OlderSpectral(Base):
    def begin(self):
        self.o = nn.utils.spectral_norm(self.o)


class Generator(Base):
    def begin(self):
        self.o.numbers = (n for n in range(3))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Global, "in a global variable"),
        (Registered, "in a global variable"),
        (Cached, "in its attribute 'f'"),
        (View, "shares the memory of a parameter.*in its attribute 'held'"),
        (Data, "shares the memory of a parameter.*in its attribute 'o.held'"),
        (Ids, "the id of a part.*in its attribute 'held'"),
        (Keeps, "uses weights in its attribute 'held'"),
        (OlderSpectral, "shares the memory of a parameter.*in its attribute 'o.weight'"),
        (Generator, "cannot be copied.*in its attribute 'o.numbers'"),
    ],
)
def test_what_no_copy_can_follow_is_named(kind, words):
    data = bf.data.from_arrays([X], [Y], test=([X], [Y]), outputs=3)
    with pytest.raises(ValueError, match=words):
        bf.simulate(bf.algorithms.fedavg(kind()), data, rounds=1, progress=False)


def test_a_tensor_of_its_own_is_a_constant():
    """As an optimiser over `parameters()` leaves it."""

    class Plain(Base):
        def begin(self):
            self.held = [nn.Linear(6, 8)]

        def hidden(self, x):
            return self.a(x) + self.held[0](x)

    model = Plain()
    data = bf.data.from_arrays([X], [Y], test=([X], [Y]), outputs=3)
    run = bf.simulate(bf.algorithms.fedavg(model), data, rounds=1, progress=False)
    moved = run.model()
    assert not torch.equal(moved.a.weight, model.a.weight)
    assert torch.equal(moved.held[0].weight, model.held[0].weight)


class Product(torch.autograd.Function):
    """A product of the newer kind, which torch.func batches, whose way back reads the layer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, layer: nn.Linear) -> Tensor:
        return x @ w.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x, ctx.w, ctx.layer = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.layer.weight, g.T @ ctx.x, None


class Kept(Product):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x, None


class Reads(Base):
    product = Product

    def begin(self):
        self.b = nn.Linear(8, 8, bias=False)

    def hidden(self, x):
        return self.product.apply(self.a(x), self.b.weight, self.b)


class Saves(Reads):
    product = Kept


class Hooked(Base):
    def hidden(self, x):
        w = self.a.weight * 1
        if w.requires_grad:
            w.register_hook(lambda slope: 2 * slope)
        return F.linear(x, w)


@pytest.mark.parametrize("kind", [Reads, Hooked, Saves, Base])
def test_torch_func_trains_as_autograd_does_or_names_what_differs(kind):
    data = bf.data.from_arrays([X, X[:9]], [Y, Y[:9]], test=([X, X], [Y, Y]), outputs=3)
    torch.manual_seed(0)
    method = bf.algorithms.fedavg(kind(), epochs=2, batch_size=None, optimiser=SGD(0.5))

    def run(kernel):
        return bf.simulate(
            method,
            data,
            rounds=2,
            engine=bf.Engine(kernel),
            dtype=torch.float64,
            progress=False,
        ).server["w"]["loc"]

    if kind in (Reads, Hooked):
        with pytest.raises(RuntimeError, match=r"gradients of .*'a.weight'.*kernel='live'"):
            run("vmap")
    else:
        torch.testing.assert_close(run("vmap"), run("live"), rtol=0, atol=1e-12)


def test_a_reentrant_head_has_the_curvature_of_the_same_head_without():
    data = bf.data.from_arrays([X], [Y], test=([X], [Y]), outputs=3)
    found = []
    for kind in ("ReentrantHead", "InAMethod"):  # the other one computes the same
        method = bf.algorithms.fedavg(made(kind), epochs=2, batch_size=None, optimiser=SGD(0.5))
        run = bf.simulate(method, data, rounds=1, dtype=torch.float64, progress=False)
        found.append(run.laplace(precision=2.0).client(0).predict(X).mean)
        if kind == "ReentrantHead":
            with pytest.raises(ValueError, match=r"in no checkpoint.*'o' is used 0 times"):
                run.laplace("kfac")
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
