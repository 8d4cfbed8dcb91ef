"""Subnetworks of several networks at once are those of each network alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.curvature import Curvature, invert
from bayesfl.curvature.stack import Stack, stackable
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from tests.curvature import made
from tests.curvature.made import Largest

EXACT: Any = made.EXACT
COUNTS = (7, 5, 1)
LIKELIHOODS = {
    "classes": (Categorical(), 4),
    "two classes": (Bernoulli(), 1),
    "numbers": (Gaussian(0.7), 2),
    "counts": (Poisson(), 2),
}


def networks(outputs: int) -> list[nn.Module]:
    """Three networks that differ in their weights; all of one are dead in its first layer."""
    found: list[nn.Module] = []
    for seed in range(3):
        torch.manual_seed(seed)
        body = nn.Sequential(
            nn.Flatten(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Tanh()
        )
        found.append(bf.models.SplitModel(body, nn.Linear(4, outputs)).double())
    with torch.no_grad():
        found[1].get_parameter("body.1.bias").copy_(torch.tensor([0.0, 0, -100, 0, -100]))
    return found


def rows(seed: int, *, first: float = 1.0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Each network's own inputs, of whose numbers the first is multiplied by `first`; padded by the
    first row; and which are not padding.
    """
    generator = torch.Generator().manual_seed(seed)
    own = [torch.randn(n, 2, 3, dtype=torch.float64, generator=generator) for n in COUNTS]
    for x in own:
        x[:, 0, 0] *= first
    padded = [torch.cat([x, x[:1].expand(max(COUNTS) - len(x), 2, 3)]) for x in own]
    weight = torch.arange(max(COUNTS)) < torch.tensor(COUNTS)[:, None]
    return own, torch.stack(padded), weight.double()


def stacked(likelihood: Any, outputs: int) -> tuple[list[Curvature], Stack]:
    """The curvatures of networks, and of all at once."""
    each = networks(outputs)
    alone = [Curvature(one, likelihood, pattern="body.*") for one in each]
    leaves = [dict(one.named_parameters()) for one in each]
    every = {name: torch.stack([one[name].detach() for one in leaves]) for name in leaves[0]}
    return alone, Stack(alone[0], every)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("block", [2**26, 2**12], ids=["one piece", "pieces"])
def test_as_each_alone(kind: str, block: int, monkeypatch: pytest.MonkeyPatch):
    """The diagonal; means and covariances under one precision and under several, also with one for
    each weight; weights without curvature, or next to none, keep their prior variance.
    """
    monkeypatch.setattr("bayesfl.curvature.ggn.BLOCK", block)
    alone, every = stacked(*LIKELIHOODS[kind])
    own, x, weight = rows(0, first=1e-8)
    new, test, _ = rows(1)
    held, diagonal = every.held(x, weight)
    for c, curvature in enumerate(alone):
        assert_close(every.weights[c], curvature.weights, **EXACT)
        assert_close(diagonal[c], curvature.diagonal(own[c]), **EXACT)
    size = alone[0].size
    chosen = torch.stack([torch.randperm(size)[:17].sort().values for _ in COUNTS])
    several = torch.rand(3, size, dtype=torch.float64) + 0.5
    ones = torch.ones((), dtype=torch.float64)
    for precision, scale in ((0.5, ones), (several, ones), (0.5, torch.tensor([1.0, 0.1, 1e-3]))):
        found = every.invert(
            held, precision, indices=chosen, diagonal=diagonal, scale=scale.double()
        )
        for centre in (False, kind == "classes"):
            mean, covariance = found.predict({"x": test.flatten(0, 1)}, centre=centre)
            for c, curvature in enumerate(alone):
                for g, factor in enumerate(scale.reshape(-1).double()):
                    prior = every.vector(precision)[c] / factor
                    expected = invert(curvature, own[c], prior, indices=chosen[c])
                    one, other = expected.predict(new[c], centre=centre)
                    n = len(new[c])
                    assert_close(mean.unflatten(0, (3, -1))[c, :n], one, **EXACT)
                    assert_close(covariance.unflatten(1, (3, -1))[g, c, :n], other, **EXACT)
    assert int(found.curved.sum()) < found.curved.numel()


def test_which_networks_have_it():
    """Linear layers that see an example once, whatever stands beside them."""
    x = torch.randn(3, 4, 6)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    along = nn.Sequential(nn.Linear(6, 2), nn.Flatten(), nn.Linear(8, 3))
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(16, 3))
    normed = nn.Sequential(nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 3))
    assert stackable(Curvature(flat), x)
    assert not stackable(Curvature(flat), (x, x))
    assert not stackable(Curvature(along), x)
    assert stackable(Curvature(along, pattern="2.*"), x)
    assert not stackable(Curvature(images), x[:, None])
    assert stackable(Curvature(images, pattern="2.*"), torch.randn(3, 1, 6, 4))
    assert not stackable(Curvature(normed), x)


def test_what_is_not_finite_is_refused():
    """The outputs of any network, and curvature."""
    _, every = stacked(Categorical(), 4)
    _, x, weight = rows(0)
    x[1, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="outputs are not finite for 1 of 21"):
        every.held(x, weight)
    _, x, _ = rows(0)
    with pytest.raises(ValueError, match="curvature is not finite"):
        every.held(x, weight * torch.inf)


def test_memory_is_that_of_the_columns():
    """No array has all weights for every row and output."""
    alone, every = stacked(Categorical(), 4)
    _, x, weight = rows(0)
    with Largest() as largest:
        held, diagonal = every.held(x, weight)
        chosen = torch.arange(5).expand(3, -1)
        every.invert(held, 1.0, indices=chosen, diagonal=diagonal).predict({"x": x.flatten(0, 1)})
    assert largest.numbers < 3 * max(COUNTS) * 3 * alone[0].size
