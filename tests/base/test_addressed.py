"""Draws of torch's own operations at an address: they repeat, in whatever thread, and leave the
shared generator alone.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bayesfl.base.addressed import Addressed, Seeded, bernoulli
from tests.cases import draws_elsewhere

X = torch.linspace(0.1, 1, 60).view(2, 5, 6)
DRAWING: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(40),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(4, 10),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(2, 90, (40,)),
    "randint_like": lambda: torch.randint_like(X, 90),
    "randperm": lambda: torch.randperm(40),
    "bernoulli": lambda: torch.bernoulli(X),
    "normal": lambda: torch.normal(X, X),
    "uniform_": lambda: torch.empty(40).uniform_(),
    "exponential_": lambda: X.clone().exponential_(),
    "multinomial": lambda: torch.multinomial(X[0], 3),
    "dropout": lambda: F.dropout(X, 0.4),
    "dropout with gradients": lambda: F.dropout(X.clone().requires_grad_(), 0.4).detach(),
    "dropout2d": lambda: F.dropout2d(torch.ones(20, 20, 2, 2), 0.4),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.4, training=True),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.4),
    "gamma": lambda: torch.distributions.Gamma(2.0, 1.0).sample((40,)),
    "in place": lambda: nn.Dropout(0.4, inplace=True)(X.clone()),
}


def drawn(code: Callable[[], Tensor], address: int) -> Tensor:
    with Addressed(address):
        return code()


@pytest.mark.parametrize("name", DRAWING)
def test_an_address_repeats_its_draws(name: str):
    """The same at one address, others at another and at the second call; the shared generator stays
    where it was.
    """
    code, before = DRAWING[name], torch.get_rng_state()
    one = drawn(code, 5)
    assert torch.equal(drawn(code, 5), one)
    assert not torch.equal(drawn(code, 6), one)
    with Addressed(5) as context:
        assert torch.equal(code(), one)
        count = context.drawn
        assert not torch.equal(code(), one)
    assert count >= 1
    assert context.drawn == 2 * count
    assert torch.equal(torch.get_rng_state(), before)


BUILT: dict[str, Callable[[], Tensor]] = {
    "a layer": lambda: nn.Linear(40, 3).weight.detach(),
    "a recurrent layer": lambda: nn.LSTM(3, 4).weight_hh_l0.detach(),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(5, 8)),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(40)),
    "sparse_": lambda: nn.init.sparse_(torch.empty(9, 9), 0.3),
    "bernoulli_": lambda: torch.empty(40).bernoulli_(0.3),
    "bernoulli_ of rates": lambda: torch.empty(2, 5, 6).bernoulli_(X),
    "random_": lambda: torch.empty(40).random_(0, 9),
}


@pytest.mark.parametrize("name", [*DRAWING, *BUILT])
def test_a_seed_gives_torchs_numbers(name: str):
    """Twice in a row those after `manual_seed`, which they also are where the code seeds what all
    threads share, and while another thread draws from that.
    """
    code = {**DRAWING, **BUILT}[name]
    torch.manual_seed(5)
    plain = [code(), code()]
    torch.manual_seed(6)
    before = torch.get_rng_state()
    with Seeded(5):
        found = [code(), code()]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, found, plain))
    with draws_elsewhere(), Seeded(5):
        torch.manual_seed(7)
        assert all(map(torch.equal, [code(), code()], plain))


def test_a_given_generator_draws_for_itself():
    plain = nn.init.normal_(torch.empty(9), generator=torch.Generator().manual_seed(3))
    with Seeded(5):
        mine = nn.init.normal_(torch.empty(9), generator=torch.Generator().manual_seed(3))
    assert torch.equal(mine, plain)


def test_what_does_not_draw_is_left_alone():
    """Dropout that is off, at rate 0, or of attention without any: the same bits as without a
    context, and nothing is counted.
    """
    for code in (
        lambda: F.dropout(X, 0.4, training=False),
        lambda: F.dropout(X, 0.0),
        lambda: F.scaled_dot_product_attention(X, X, X),
        lambda: X.softmax(-1) @ X.mT,
    ):
        with Addressed(1) as context:
            found = code()
        assert torch.equal(found, code())
        assert context.drawn == 0


def test_dropout_is_torchs():
    """Zeros at its rate, the rest scaled so that the mean stays; the slope has the same mask."""
    x = torch.ones(200_000, requires_grad=True)
    with Addressed(2):
        y = F.dropout(x, 0.3)
    assert set(y.detach().unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    assert abs(float((y == 0).float().mean()) - 0.3) < 0.005
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, y.detach())
    with Addressed(2):
        assert not F.dropout(torch.ones(5), 1.0).any()


def test_neighbouring_addresses_are_unrelated():
    """Means of normals over 2,000 addresses that follow each other, and their correlation with the
    next.
    """
    values = torch.stack([drawn(lambda: torch.randn(3), k) for k in range(2000)])
    assert float(values.mean(0).abs().max()) < 4 / 2000**0.5
    assert abs(float((values[1:] * values[:-1]).mean())) < 4 / 6000**0.5


def test_threads_that_draw_elsewhere_change_nothing():
    """A context holds in its own thread alone, and neither waits for nor hears another one."""
    with draws_elsewhere():
        found = [drawn(lambda: F.dropout(X, 0.5) + torch.randn_like(X), 3) for _ in range(200)]
    assert all(torch.equal(one, found[0]) for one in found)


def test_generators_that_go_on_are_refused():
    with pytest.raises(ValueError, match=r"aten.rand.*its own generator.*leave generator= out"):
        drawn(lambda: torch.rand(3, generator=torch.Generator()), 1)


def test_what_is_off_draws_nothing():
    """In evaluation, or at a rate of 0, layers need no address; in training they have one."""
    for layer, x in (
        (nn.RReLU(), X),
        (nn.Dropout(0.5), X),
        (nn.LSTM(3, 2, num_layers=2, dropout=0.5), torch.ones(4, 2, 3)),
    ):
        for training in (False, True):
            with Addressed(1) as context:
                layer.train(training)(x)
            assert bool(context.drawn) == training


def test_draws_that_are_passed_over():
    """The third at an address, with two passed over or made before."""
    with Addressed(5):
        torch.rand(4), torch.randn(2)
        third = torch.rand(3)
    with Addressed(5, 2):
        assert torch.equal(torch.rand(3), third)


def test_dropout_of_many_addresses_at_once():
    """What each address gives by itself, whatever the shape's padding and the precision."""
    shape, keys = (6, 5), [3, 2**64 - 1, 2**63]
    many = bernoulli(keys, 4, shape, 0.7, torch.device("cpu"))
    for one, key in zip(many, keys, strict=True):
        for dtype in (torch.float32, torch.float64):
            with Addressed(key, 4):
                x = F.dropout(torch.ones(4, 5, dtype=dtype), 0.3)
            assert_close(x, one[:4].to(dtype) / 0.7, rtol=0, atol=1e-6)


def test_entries_of_dropout_are_as_good_as_independent():
    """Means, and products of an entry with its neighbours in place, draw and address, within four
    standard errors; and the probabilities 0 and 1.
    """
    device, keys = torch.device("cpu"), range(1, 401, 10)
    kept = torch.stack([bernoulli(keys, d, (50, 40), 0.3, device) for d in range(5)]).double()
    centred = (kept - 0.3) / (0.3 * 0.7) ** 0.5
    pairs = [centred]
    for axis, step in ((0, 1), (1, 1), (2, 1), (2, 2), (3, 1), (3, 8)):
        end = centred.shape[axis] - step
        pairs.append(centred.narrow(axis, 0, end) * centred.narrow(axis, step, end))
    for t in pairs:
        assert abs(float(t.mean())) < 4 * t.numel() ** -0.5
    by_place = centred.mean((0, 1)).square().mean() * 5 * len(keys)
    assert abs(float(by_place) - 1) < 4 * (2 / 2000) ** 0.5
    for p in (0.0, 1.0):
        assert (bernoulli(keys, 0, (9,), p, device) == bool(p)).all()


@pytest.mark.parametrize(
    "draw",
    [torch.rand, torch.randn, torch.randperm, lambda n, **named: torch.randint(9, (n,), **named)],
)
def test_no_generator_may_be_given(draw):
    """As code does that passes one on where there is one."""
    assert torch.equal(drawn(lambda: draw(5, generator=None), 3), drawn(lambda: draw(5), 3))
