"""Loaders of data: a posterior is that of all rows of a loader's data set, however it reads them,
or an error names the sampler.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import bayesfl as bf
from bayesfl.posteriors import FullGaussian, Laplace, ensemble, nuts, sgld
from bayesfl.posteriors.prior_precision import by_evidence, by_validation, predictive_nll

ROWS = 23
LIKELIHOOD = bf.likelihoods.Gaussian(scale=0.7)
rng = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 3, generator=rng, dtype=torch.float64)
Y = X.sum(1, keepdim=True) + 0.7 * torch.randn(ROWS, 1, generator=rng, dtype=torch.float64)
DATA = TensorDataset(X, Y)
PART = [20, 3, 5, 8, 1, 13, 22]


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(DATA)  # pyright: ignore[reportArgumentType] (a sequence)


class Pairs(Sampler[list[int]]):
    """Batches of two in a new order, of which the last may be left out, under a name of its own."""

    def __init__(self, *, short: bool) -> None:
        self.short = short

    def __iter__(self) -> Iterator[list[int]]:
        parts = torch.randperm(ROWS).split(2)
        return iter([part.tolist() for part in parts[: len(parts) - self.short]])


whole = {
    "shuffled, last left out": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "in order, last left out": lambda: DataLoader(DATA, 4, drop_last=True),
    "larger batch than data": lambda: DataLoader(DATA, 50, drop_last=True),
    "no length": lambda: DataLoader(Stream(), 4, drop_last=True),
    "sampler of batches": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=True)
    ),
    "batches read at once": lambda: DataLoader(
        DATA, batch_size=None, sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=True)
    ),
    "own sampler": lambda: DataLoader(DATA, batch_sampler=Pairs(short=False)),
    "all rows, weighted": lambda: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler(range(1, ROWS + 1), ROWS, replacement=False)
    ),
}
parts = {
    "subset": lambda: DataLoader(Subset(DATA, PART), 4, shuffle=True, drop_last=True),
    "subset by its sampler": lambda: DataLoader(
        DATA, 4, sampler=SubsetRandomSampler(PART), drop_last=True
    ),
    "a list as its sampler": lambda: DataLoader(DATA, 4, sampler=PART, drop_last=True),
}
unknown = {
    "WeightedRandomSampler": lambda: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)
    ),
    "RandomSampler": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "RandomSampler of few": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=8)),
    "Pairs": lambda: DataLoader(DATA, batch_sampler=Pairs(short=True)),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def fits(x: Any, y: Tensor | None) -> dict[str, Tensor]:
    """What a closed form, or full batches of any order, give to rounding."""
    net, own = model(), {"precision": 1.0, "likelihood": LIKELIHOOD}
    found = {}
    for structure in ("full", "diagonal", "kfac"):
        fitted = Laplace.fit(net, x, y, structure=structure, **own)
        found |= {
            f"{structure} {fitted.examples}": fitted.moments()[1],
            f"{structure} evidence": fitted.log_marginal_likelihood(x, y),
            f"{structure} anew": fitted.with_precision(x, 2.0).moments()[1],
            f"{structure} chosen": by_evidence(fitted, x).precision,
            f"{structure} held": by_validation(fitted, x, x, y).precision,
            f"{structure} nll": torch.tensor(predictive_nll(fitted, x, y)),
        }
    assert FullGaussian.fit(net, x, y, steps=1, **own).target.examples == ROWS
    return found


@pytest.mark.parametrize("loader", whole.values(), ids=whole)
def test_a_loader_has_the_posterior_of_its_data_set(loader: Any):
    """By every structure, in evidence, choice of the prior and predictions."""
    wanted, found = fits(X, Y), fits(loader(), None)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("loader", parts.values(), ids=parts)
def test_rows_that_are_chosen_are_the_data(loader: Any):
    fitted = Laplace.fit(model(), loader(), precision=1.0, likelihood=LIKELIHOOD)
    wanted = Laplace.fit(model(), X[PART], precision=1.0, likelihood=LIKELIHOOD)
    assert fitted.examples == len(PART)
    assert_close(fitted.moments()[1], wanted.moments()[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", unknown)
def test_rows_that_change_are_refused(name: str):
    own = {"precision": 1.0, "likelihood": LIKELIHOOD}
    for fit in (Laplace.fit, FullGaussian.fit, sgld, ensemble):
        with pytest.raises(ValueError, match=rf"loader's {name.split()[0]} .*DataLoader\(dataset"):
            fit(model(), unknown[name](), **own)


def test_sampling_by_batches_that_leave_rows_out():
    """A step counts a batch so often that all rows weigh the same; NUTS reads all of them."""
    loader = DataLoader(DATA, 4, shuffle=True, drop_last=True)
    own = {"precision": 1.0, "likelihood": LIKELIHOOD}
    short = {"draws": 20, "warmup": 20, **own}
    every = nuts(model(), DataLoader(DATA, 4, drop_last=True), **short)
    assert every.draws.equal(nuts(model(), X, Y, **short).draws)
    target = FullGaussian.fit(model(), loader, steps=1, **own).target
    w = torch.ones(4, dtype=torch.float64)
    total = sum(target.nll(w, x, y) for x, y in target.once()) / target.passed
    exact = 0.5 * (((X @ w[:3] + w[3]) - Y[:, 0]) / 0.7).square().sum()
    constant = LIKELIHOOD.nll(torch.zeros(1, 1).double(), torch.zeros(1, 1).double()).sum() * ROWS
    assert_close(total, exact + constant, rtol=1e-12, atol=0)


def test_the_loader_itself_is_unchanged():
    """Training goes on by the same batches, in the order that torch's generator gives."""
    loader = DataLoader(DATA, 4, shuffle=True, drop_last=True)
    torch.manual_seed(1)
    wanted = [x for x, _ in loader]
    Laplace.fit(model(), loader, precision=1.0, likelihood=LIKELIHOOD)
    torch.manual_seed(1)
    found = [x for x, _ in loader]
    assert len(found) == ROWS // 4
    assert all(map(torch.equal, found, wanted))
