"""Networks that reach their weights in unusual ways train as in a plain PyTorch loop."""

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
    method = bf.algorithms.fedavg(made(name), epochs=4, batch_size=None, optimiser=SGD(0.5))
    engine = bf.Engine(kernel)
    run = bf.simulate(method, data, rounds=2, engine=engine, dtype=torch.float64, progress=False)
    plain = loop(name, 8)
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
