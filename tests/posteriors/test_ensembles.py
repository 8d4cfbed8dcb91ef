"""Deep ensembles: members are modes, from starts of their own."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesfl.likelihoods import Gaussian
from bayesfl.optim import Adam, cosine
from bayesfl.posteriors import ensemble
from tests.posteriors.made import linear_model, network


def test_members_of_a_linear_model_are_its_map():
    """A single mode is found by all; the module's own weights play no part."""
    model, x, y, precision = linear_model()
    wanted = model.weight.detach().clone()
    nn.init.constant_(model.weight, 100.0)
    found = ensemble(
        model,
        x,
        y,
        precision=precision,
        likelihood=Gaussian(0.5),
        members=2,
        steps=400,
        optimiser=Adam(cosine(0.1)),
    )
    assert_close(found.draws[0], wanted.expand(2, -1), rtol=0, atol=1e-6)
    assert_close(model.weight, torch.full_like(wanted, 100.0))


def test_members_of_a_network_differ():
    """Equal seeds give equal bits; predictions are means over members."""
    model, x, y = network().float(), torch.rand(20, 4), torch.arange(20) % 3
    options = {"precision": 0.1, "members": 3, "steps": 20, "batch_size": 7}
    one, two = (ensemble(model, x, y, **options) for _ in range(2))
    assert one.draws.equal(two.draws)
    assert one.draws.shape == (1, 3, 51)
    assert not one.draws[0, 0].equal(one.draws[0, 1])
    assert_close(one.predict(x)["probs"], one.outputs(x).softmax(-1).mean(0))
    with pytest.raises(ValueError, match="member 1 is not finite"):
        ensemble(model, x, y, precision=1.0, steps=3, optimiser=Adam(1e30))
