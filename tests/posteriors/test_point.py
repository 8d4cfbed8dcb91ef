"""A point: no draws, no entropy, and maximum a posteriori under a prior."""

import torch
from torch import distributions
from torch.testing import assert_close

from bayesfl.base.protocols import Posterior
from bayesfl.composition.priors import Normal
from bayesfl.posteriors import Point


def test_is_its_centre():
    """It starts at what it is given, and a draw is that, with noise or without."""
    loc = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).double()
    q = Point().init(loc)
    assert list(q) == ["loc"]
    assert q["loc"] is loc
    for noise in (None, torch.ones(2, 2).double()):
        assert_close(Point().sample(q, noise), loc, rtol=0, atol=0)


def test_conventions():
    """Variance 0, entropy 0 for each leading axis, nothing to draw."""
    q = {"loc": torch.randn(3, 2, 5, dtype=torch.float64)}
    assert_close(Point().moments(q), (q["loc"], 0 * q["loc"]), rtol=0, atol=0)
    assert_close(Point().entropy(q), torch.zeros(3, 2).double(), rtol=0, atol=0)
    assert Point().noise_size(5) == 0
    assert isinstance(Point(), Posterior)


def test_energy_is_the_negative_log_prior():
    """With entropy 0, energy minus entropy is -log p(w): what maximum a posteriori adds to the
    loss.
    """
    w, centre, variance = (
        torch.tensor(v).double() for v in ([0.5, 2.0, -1.0], [0.0, 1.0, 1.0], [1.0, 4.0, 0.25])
    )
    prior = Normal(centre=lambda given, view: centre, variance=lambda given, view: variance)
    q = Point().init(w)
    energy = prior.energy(*Point().moments(q), {}, {}) - Point().entropy(q)
    assert_close(energy, -distributions.Normal(centre, variance.sqrt()).log_prob(w).sum())
