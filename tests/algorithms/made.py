"""Linear federations, and what methods of invariant learning minimise, from formulas alone."""

import copy
import importlib
from itertools import combinations, cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.data import FederatedData

COUNTS = (9, 14, 6, 11)
DIM = 3
CLASSES, WIDTH = 4, 5
FEDPAC = importlib.import_module("bayesfl.algorithms.fedpac")


def moments(data: FederatedData) -> tuple[Tensor, Tensor]:
    """X'X [J, D, D] and X'y [J, D] of every client, in float64."""
    parts = [data.train.client(j) for j in range(data.clients)]
    return torch.stack([x.double().T @ x.double() for x, _ in parts]), torch.stack(
        [x.double().T @ y.double() for x, y in parts]
    )


def linear_only(weight: Tensor) -> nn.Module:
    """A linear model without a bias."""
    layer = nn.Linear(DIM, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.Sequential(layer)


class ByHand:
    """Clients' data, and what methods minimise on it, from formulas alone, for a linear layer of
    three classes.
    """

    def __init__(
        self, clients: FederatedData, algorithm: bf.Algorithm, estimator: str = "biased"
    ) -> None:
        self.layout, self.estimator = algorithm.layout("w"), estimator
        self.data = []
        for j in range(clients.clients):
            x, y = clients.train.client(j)
            environment: Any = clients.train.environment
            self.data.append((x.double(), y, environment[clients.train.rows(j)]))
        self.n = torch.tensor([len(y) for _, y, _ in self.data]).double()

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        leaves = self.layout.leaves(w)
        return x @ leaves["weight"].T + leaves["bias"]

    def risk(self, w: Tensor, j: int, e: int) -> Tensor:
        return self.losses(w, j)[self.data[j][2] == e].mean()

    def losses(self, w: Tensor, j: int) -> Tensor:
        x, y, _ = self.data[j]
        logits = self.logits(w, x)
        return logits.logsumexp(1) - logits[torch.arange(len(y)), y]

    def squares(self, w: Tensor, j: int) -> Tensor:
        x, y, environment = self.data[j]
        logits = self.logits(w, x)
        slope = ((logits.softmax(1) - torch.eye(3, dtype=torch.float64)[y]) * logits).sum(1)
        total = torch.tensor(0.0)
        for e in environment.unique():
            own = slope[environment == e]
            if self.estimator == "biased":
                total = total + own.mean() ** 2
            else:
                total = total + (torch.outer(own, own).sum() - (own * own).sum()) / (
                    len(own) * (len(own) - 1)
                )
        return total

    def irm(self, w: Tensor, j: int, gamma: float, l2: float) -> Tensor:
        return (
            self.losses(w, j).mean() + gamma * self.squares(w, j) + l2 * w.square().sum()
        ) / max(1.0, gamma)


class AdamByHand:
    """Adam as its paper has it."""

    def __init__(self, rate: float) -> None:
        self.rate, self.t = rate, 0
        self.m: Any = 0.0
        self.v: Any = 0.0

    def __call__(self, w: Tensor, slope: Tensor) -> Tensor:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * slope
        self.v = 0.999 * self.v + 0.001 * slope**2
        return w - self.rate * (self.m / (1 - 0.9**self.t)) / (
            (self.v / (1 - 0.999**self.t)).sqrt() + 1e-8
        )


def twin(model: nn.Module) -> nn.Module:
    """A copy in float64, to train by hand."""
    return copy.deepcopy(model).double()


def descend(part: nn.Module, net: nn.Module, data: tuple[Tensor, Tensor], rate: float) -> None:
    """One plain step of a part of a network on the mean cross entropy of some examples."""
    x, y = data
    slopes = torch.autograd.grad(F.cross_entropy(net(x.double()), y), list(part.parameters()))
    with torch.no_grad():
        for p, slope in zip(part.parameters(), slopes, strict=True):
            p -= rate * slope


def flat(part: nn.Module) -> Tensor:
    """A module's parameters, one after another."""
    return torch.cat([p.detach().flatten() for p in part.parameters()])


def in_turn(starts: Tensor) -> Any:
    """A block's start that hands out rows, one copy after another."""
    rows = cycle(starts.float())
    return lambda rng, size: next(rows)


def solved(h: Tensor, variance: Tensor, own: Tensor) -> Tensor:
    """A program's weights [J] by trying every support: on it the minimum is linear algebra, and the
    best feasible one is the answer.
    """
    best, found = torch.inf, torch.zeros(len(h), dtype=torch.float64)
    for size in range(1, len(h) + 1):
        for support in combinations(range(len(h)), size):
            s = list(support)
            ones = torch.ones(size, 1, dtype=torch.float64)
            q = h[s] @ h[s].T + torch.diag(variance[s])
            system = torch.cat(
                [
                    torch.cat([q, ones], 1),
                    torch.cat([ones.T, torch.zeros(1, 1, dtype=torch.float64)], 1),
                ]
            )
            a = torch.linalg.solve(
                system, torch.cat([h[s] @ own, torch.ones(1, dtype=torch.float64)])
            )[:-1]
            value = float((a.square() * variance[s]).sum() + (own - a @ h[s]).square().sum())
            if bool((a >= 0).all()) and value < best:
                best = value
                found = torch.zeros(len(h), dtype=torch.float64).index_copy(0, torch.tensor(s), a)
    found = torch.where(found < 1e-3, 0.0, found)
    return found / found.sum()
