"""Graphs and mixing matrices: shapes by hand, what mixing keeps and where it ends, what is
refused.
"""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bayesfl.composition import topology

LINE = torch.diag(torch.ones(4), 1).bool() | torch.diag(torch.ones(4), -1).bool()
GRAPHS = {
    "ring": topology.ring(7),
    "two": topology.ring(2),
    "line": LINE,
    "complete": torch.ones(6, 6, dtype=torch.bool).fill_diagonal_(False),
    "random": topology.erdos_renyi(12, p=0.3, seed=1),
}


def test_graphs_by_hand():
    """Degrees; two islands are not connected, a client by
    itself is.
    """
    degrees = [topology.ring(clients).sum(1).tolist() for clients in (5, 1)]
    assert degrees == [[2] * 5, [0]]
    islands = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool().fill_diagonal_(False)
    assert (topology.connected(islands), topology.connected(topology.ring(1))) == (False, True)


@pytest.mark.parametrize("name", GRAPHS)
def test_metropolis_weights(name: str):
    """Symmetric, doubly stochastic, on edges only; mixing keeps the mean, and repeated
    ends there.
    """
    edges = GRAPHS[name]
    assert topology.connected(edges)
    w = topology.metropolis(edges)
    assert_close(w, w.T, atol=0, rtol=0)
    assert_close(w.sum(0), torch.ones(len(w), dtype=torch.float64))
    assert bool((w >= 0).all())
    assert not bool((w[~edges & ~torch.eye(len(w), dtype=torch.bool)] != 0).any())
    some = torch.tensor([len(w) - 1, 0])
    assert torch.equal(topology.metropolis(edges, some), w[some])
    theta = torch.randn(len(w), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close((w @ theta).mean(0), theta.mean(0))
    assert_close(
        torch.matrix_power(w, 5000) @ theta, theta.mean(0).expand_as(theta), atol=1e-8, rtol=0
    )


def test_metropolis_by_hand():
    """On a complete graph 1 / J; on a path of three 1/3 along edges, the rest at home."""
    assert_close(
        topology.metropolis(GRAPHS["complete"]), torch.full((6, 6), 1 / 6, dtype=torch.float64)
    )
    third = (
        torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], dtype=torch.float64) / 3
    )
    assert_close(topology.metropolis(LINE[:3, :3]), third)


def test_random_graphs():
    """Equal seeds draw equal graphs, p is the share of edges, within four standard errors;
    connected or refused.
    """
    assert torch.equal(topology.erdos_renyi(9, seed=3), topology.erdos_renyi(9, seed=3))
    assert not torch.equal(topology.erdos_renyi(9, seed=3), topology.erdos_renyi(9, seed=4))
    share = float(topology.erdos_renyi(100, p=0.3).double().sum() / (100 * 99))
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 4950) ** 0.5
    with pytest.raises(ValueError, match=r"100 graphs .*50 clients .*p=0\.001"):
        topology.erdos_renyi(50, p=0.001)


@pytest.mark.parametrize(
    ("weights", "clients", "message"),
    [
        (torch.empty(0, 0), 0, r"^clients .*1.* got 0"),
        (torch.ones(2, 3) / 3, None, r"must be \[2, 2\].* got \[2, 3\]"),
        (torch.eye(3), 3, "graph is not connected"),
        (torch.full((2, 2), 0.5), 3, r"must be \[3, 3\]"),
        (torch.full((3, 3), 0.5), 3, "must be doubly stochastic"),
        (
            torch.tensor([[1.5, -0.5, 0.0], [-0.5, 1.0, 0.5], [0.0, 0.5, 0.5]]),
            3,
            "must be doubly stochastic",
        ),
        (
            torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]),
            3,
            "must be doubly stochastic",
        ),
        (torch.full((3, 3), float("nan")), 3, "must be doubly stochastic"),
        (torch.eye(3).roll(1, 0), 3, r"modulus 1\b.*topology\.metropolis"),
        (3, 3, r"\[3, 3\].* got \[\].*topology\.metropolis"),
    ],
)
def test_mixing_matrices_that_are_none(weights: Any, clients: int | None, message: str):
    """Each by name, with the remedy."""
    with pytest.raises(ValueError, match=message):
        topology.check_mixing(weights, clients)


def test_mixing_that_goes_round():
    """Between two groups that only take from each other, in either precision; on odd rings, or with
    one weight at home, it ends.
    """
    for clients in (2, 4, 10):
        edges = topology.ring(clients).float()
        with pytest.raises(ValueError, match=r"as topology.metropolis"):
            topology.check_mixing(edges / edges.sum(1), clients)
    thirds = sum((torch.eye(64).roll(k, 0) / 3 for k in (1, 3, 5)), torch.zeros(64, 64))
    with pytest.raises(ValueError, match="oscillates"):
        topology.check_mixing(thirds)
    home = topology.ring(4).double() / 2
    home[0, 0] = home[1, 1] = 0.5
    home[0, 1] = home[1, 0] = 0
    for ends in (home, topology.ring(7).double() / 2, torch.ones(1, 1)):
        w = topology.check_mixing(ends)
        assert_close(torch.matrix_power(w, 5000), torch.full_like(w, 1 / len(w)))
    listed: Any = [[0.9, 0.1, 0.0], [0.1, 0.8, 0.1], [0.0, 0.1, 0.9]]  # not by way of float32
    assert topology.check_mixing(listed).tolist() == listed


@pytest.mark.parametrize(
    "edges",
    [
        torch.ones(3, 3, dtype=torch.bool),
        torch.ones(3, 3).triu(1).bool(),
        torch.zeros(3, 3),
    ],
)
def test_edges_that_are_none(edges: Any):
    """Self-loops, one-way edges, numbers, no matrix."""
    with pytest.raises(ValueError, match="edges must be a symmetric"):
        topology.metropolis(edges)
