"""Pools against what they are: minimisers, products, moments and barycentres, summed client after
client in float64.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.numerics import inverse_softplus
from bayesfl.base.protocols import AdditivePool, Server, StackedPool, Tensors, Uplink
from bayesfl.composition.pools import (
    Barycentre,
    Mean,
    Mixed,
    MomentMatched,
    PrecisionWeighted,
    Relaxed,
    Stack,
    equal,
)
from bayesfl.data import FederatedData
from bayesfl.posteriors import FullGaussian
from tests.cases import numbers, run

DOUBLE = torch.float64


def rho(variance: Tensor) -> Tensor:
    """The parameter of a standard deviation."""
    return inverse_softplus(variance.sqrt())


def federation(
    clients: int = 5, size: int = 3, dtype: torch.dtype = DOUBLE
) -> tuple[Server, Uplink]:
    """A server and beliefs of clients of different sizes."""
    loc, *others = (
        numbers(*shape, seed=seed).to(dtype)
        for seed, shape in enumerate([(clients, size), (clients, size), (size,), (size,)])
    )
    return {"w": {"loc": others[1], "rho": others[2]}}, {
        "n": torch.arange(1.0, clients + 1, dtype=dtype) ** 2,
        "ids": torch.arange(clients),
        "w": {"loc": loc, "rho": rho(others[0].exp())},
        "tau": numbers(clients, seed=4).exp(),
    }


def pooled(pool: AdditivePool, server: Server, uplink: Uplink) -> Tensors:
    """All clients at once."""
    return pool.solve(server, "w", pool.accumulate(None, server, "w", uplink))


def moments(entry: Tensors) -> tuple[Tensor, Tensor]:
    """Mean and variance."""
    return entry["loc"], F.softplus(entry["rho"]).square()


def some(uplink: Uplink, clients: slice) -> Uplink:
    """A chunk of an uplink."""
    return torch.utils._pytree.tree_map(lambda t: t[clients], uplink)


POOLS = {
    "mean by size": Mean(),
    "mean": Mean(equal),
    "precision-weighted mean": Mean(lambda server, uplink: uplink["tau"]),
    "relaxed": Relaxed(Mean(), 0.3),
    "product": PrecisionWeighted(),
    "moments": MomentMatched(),
    "barycentre": Barycentre(),
}
pools = pytest.mark.parametrize("pool", POOLS.values(), ids=list(POOLS))


# What every pool keeps


@pools
def test_chunks_do_not_change_a_bit(pool):
    """Clients in chunks of any size are added one after another: the same bits as all at once."""
    server, uplink = federation(7, 11)
    whole = pool.accumulate(None, server, "w", uplink)
    for cuts in ([0, 2, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 6, 7]):
        total = None
        for start, end in pairwise(cuts):
            total = pool.accumulate(total, server, "w", some(uplink, slice(start, end)))
        assert total.keys() == whole.keys()
        assert all(torch.equal(total[key], whole[key]) for key in whole)


@pools
def test_totals_are_float64_and_the_entry_keeps_its_precision(pool):
    """Whatever the run's precision; they stream, and what the pool does not gather stays as it
    was.
    """
    server, uplink = federation(dtype=torch.float32)
    server["w"]["further"] = torch.ones(2, dtype=torch.float32)
    total = pool.accumulate(None, server, "w", uplink)
    assert {t.dtype for t in total.values()} == {DOUBLE}
    new = pool.solve(server, "w", total)
    assert {t.dtype for t in new.values()} == {torch.float32}
    assert new.keys() == server["w"].keys()
    assert torch.equal(new["further"], server["w"]["further"])
    gathers = isinstance(pool, PrecisionWeighted | MomentMatched | Barycentre)
    assert ("rho" in pool.sends) == gathers != torch.equal(new["rho"], server["w"]["rho"])
    assert isinstance(pool, AdditivePool)


@pools
def test_server_and_uplink_are_only_read(pool):
    """Neither is changed, and the new entry is another one."""
    server, uplink = federation()
    new = pooled(pool, server, uplink)
    assert_close((server, uplink), federation(), rtol=0, atol=0)
    assert new["loc"].data_ptr() != server["w"]["loc"].data_ptr()


def test_float32_clients_cancel_exactly():
    """1e8 + 1 - 1e8 is 1 in float64 and 0 in float32."""
    loc = torch.tensor([[1e8], [1.0], [-1e8]])
    server = {"w": {"loc": torch.zeros(1)}}
    assert_close(
        pooled(Mean(equal), server, {"n": torch.ones(3), "w": {"loc": loc}})["loc"],
        torch.tensor([1 / 3]),
    )


def test_long_rows_are_added_as_short_ones():
    """In pieces, to the bit; of any layout."""
    loc = torch.randn(3, 3 * 2**16 + 5, generator=torch.Generator().manual_seed(0))
    for rows in (loc, loc.flip(1).t().contiguous().t()):
        server = {"w": {"loc": torch.zeros(rows.shape[1])}}
        uplink = {"n": torch.tensor([1.0, 2.0, 4.0]), "w": {"loc": rows}}
        total = Mean().accumulate(None, server, "w", uplink)["loc"]
        wanted = torch.zeros_like(total)
        for weight, row in zip((1.0, 2.0, 4.0), rows, strict=True):
            wanted.add_(row.double(), alpha=weight)
        assert torch.equal(total, wanted)


# Means


def test_precision_weights_minimise_the_spread():
    """With weights tau_j the mean is where sum_j tau_j |mu_j - w|^2 has no slope."""
    server, uplink = federation()
    w = pooled(Mean(lambda server, uplink: uplink["tau"]), server, uplink)["loc"].requires_grad_()
    spread = (uplink["tau"][:, None] * (uplink["w"]["loc"] - w) ** 2).sum()
    assert_close(torch.autograd.grad(spread, w)[0], torch.zeros(3).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("inner", [Mean(), Barycentre()])
@pytest.mark.parametrize("step", [0.5, 1.0, 2.0])
def test_relaxed_goes_part_of_the_way(step, inner):
    """(1 - step) old + step new, beyond the new for a step above 1, of all that travels; at 1 it is
    the pool itself.
    """
    server, uplink = federation()
    new = pooled(inner, server, uplink)
    wanted = {key: (1 - step) * old + step * new[key] for key, old in server["w"].items()}
    assert_close(pooled(Relaxed(inner, step), server, uplink), wanted)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan")])
def test_relaxed_refuses_to_stay(step):
    """A step of 0 would ignore the clients."""
    with pytest.raises(ValueError, match="step must be > 0"):
        Relaxed(Mean(), step)


# Gaussians


def conjugate(
    x: Tensor, y: Tensor, mean: Tensor, precision: Tensor, noise: float
) -> tuple[Tensor, Tensor]:
    """Posterior mean and precision of a linear regression whose design has orthogonal columns."""
    gram = x.T @ x
    assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)
    new = precision + gram.diagonal() / noise**2
    return (precision * mean + x.T @ y / noise**2) / new, new


def shards(clients: int = 4, rows: int = 6, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Regressions of clients, each with orthogonal columns."""
    designs = [
        torch.linalg.qr(numbers(rows, size, seed=j))[0] * numbers(size, seed=50 + j).exp()
        for j in range(clients)
    ]
    return [
        (x, x @ torch.tensor([1.0, -1.0, 2.0]).double() + 0.5 * numbers(rows, seed=90 + j))
        for j, x in enumerate(designs)
    ]


def test_product_with_the_prior_counted_once_is_the_pooled_posterior():
    """Conjugate linear regression: every client's posterior holds the prior, the pooled posterior
    holds it once.
    """
    mean = torch.tensor([0.5, 0.0, -0.5]).double()
    precision = torch.tensor([1.0, 2.0, 0.5]).double()
    data = shards()
    locs, precisions = zip(*[conjugate(x, y, mean, precision, 0.5) for x, y in data], strict=True)
    uplink = {
        "n": torch.ones(4),
        "w": {"loc": torch.stack(locs), "rho": rho(1 / torch.stack(precisions))},
    }
    server = {"w": {"loc": torch.zeros(3).double(), "rho": torch.zeros(3).double()}}
    found = moments(
        pooled(PrecisionWeighted(prior=lambda server: (mean, precision)), server, uplink)
    )
    gram = sum(x.T @ x for x, _ in data)
    expected = precision + gram.diagonal() / 0.25
    loc = (precision * mean + sum(x.T @ y for x, y in data) / 0.25) / expected
    assert_close(found, (loc, 1 / expected), rtol=1e-9, atol=1e-9)


def test_a_product_of_full_gaussians_is_the_pooled_posterior():
    """Of correlated slopes: the matrix and the mean of all rows together, the prior counted once;
    clients wider than their prior are refused.
    """
    mean, precision = (
        torch.tensor([0.5, 0.0, -0.5]).double(),
        torch.tensor([1.0, 2.0, 0.5]).double(),
    )
    q, data = FullGaussian(), [(numbers(6, 3, seed=j), numbers(6, seed=9 + j)) for j in range(4)]

    def natural(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.T @ x / 0.25 + precision.diag(), x.T @ y / 0.25 + precision * mean

    beliefs = [q.of_natural(*natural(x, y)) for x, y in data]
    stacked = {key: torch.stack([one[key] for one in beliefs]) for key in beliefs[0]}
    uplink = {"n": torch.full((4,), 6.0), "w": stacked}
    server = {"w": q.init(torch.zeros(3).double())}
    once = PrecisionWeighted(posterior=q, prior=lambda server: (mean, precision))
    found = pooled(once, server, uplink)
    matrix, weighted = natural(*(torch.cat(parts) for parts in zip(*data, strict=True)))
    assert_close(found["loc"], torch.linalg.solve(matrix, weighted), rtol=1e-9, atol=1e-9)
    root = q.cholesky(found)
    assert_close(root @ root.T, matrix.inverse(), rtol=1e-9, atol=1e-9)
    assert_close(q.natural(found), (matrix, weighted), rtol=1e-9, atol=1e-9)
    assert (matrix.inverse() - matrix.inverse().diagonal().diag()).abs().max() > 1e-3
    assert not found["lower"].triu().any()
    wide = PrecisionWeighted(posterior=q, prior=lambda server: (mean, 1e6 * precision))
    with pytest.raises(ValueError, match=r"'w': 3 weights .*precision"):
        pooled(wide, server, uplink)


def test_product_without_a_prior_multiplies_densities():
    """Precisions add, and the log density is the sum of the clients' up to a constant."""
    server, uplink = federation()
    loc, variance = moments(pooled(PrecisionWeighted(), server, uplink))
    means, variances = moments(uplink["w"])
    assert_close(1 / variance, (1 / variances).sum(0))
    points = numbers(9, 3, seed=8)
    product = -0.5 * ((points - loc) ** 2 / variance).sum(-1)
    clients = -0.5 * ((points[:, None] - means) ** 2 / variances).sum((-1, -2))
    assert_close(product - product[0], clients - clients[0])


def test_product_refuses_precisions_that_are_not_positive():
    """Clients wider than their prior: the message says which block and how many weights."""
    server, uplink = federation()
    wide = (torch.zeros(3).double(), torch.tensor([1e6, 1e-6, 1e6]).double())
    with pytest.raises(ValueError, match=r"'w': 2 weights .*precision"):
        pooled(PrecisionWeighted(prior=lambda server: wide), server, uplink)


@pytest.mark.parametrize("weight", [None, equal], ids=["by size", "equal"])
def test_moment_matching_has_the_mixtures_moments(weight):
    """Mean and variance of sum_j pi_j N(mu_j, sigma_j^2), by the law of total variance."""
    server, uplink = federation()
    pool = MomentMatched() if weight is None else MomentMatched(weight=weight)
    share = (uplink["n"] if weight is None else torch.ones(5).double())[:, None]
    share = share / share.sum()
    means, variances = moments(uplink["w"])
    mean = (share * means).sum(0)
    assert_close(
        moments(pooled(pool, server, uplink)),
        (mean, (share * (variances + (means - mean) ** 2)).sum(0)),
    )


def test_moment_matching_of_tiny_spreads_far_from_zero():
    """Spreads of 1e-6 at 1e4, where E[x^2] - E[x]^2 has no digit left, against exact fractions."""
    loc = 1e4 + 1e-6 * numbers(5, 3)
    variance = 1e-12 * numbers(5, 3, seed=1).exp()
    server = {"w": {"loc": torch.full((3,), 1e4).double() + 1e-6, "rho": torch.zeros(3).double()}}
    uplink = {"n": torch.arange(1.0, 6.0).double(), "w": {"loc": loc, "rho": rho(variance)}}
    mean, found = moments(pooled(MomentMatched(), server, uplink))
    exact = F.softplus(uplink["w"]["rho"]).square()
    for d in range(3):
        share = [Fraction(j + 1, 15) for j in range(5)]
        at = [Fraction(v) for v in loc[:, d].tolist()]
        centre = sum(s * m for s, m in zip(share, at, strict=True))
        spread = sum(
            s * (Fraction(v) + (m - centre) ** 2)
            for s, m, v in zip(share, at, exact[:, d].tolist(), strict=True)
        )
        assert_close(mean[d].item(), float(centre), rtol=1e-15, atol=0)
        assert_close(found[d].item(), float(spread), rtol=1e-6, atol=0)


@pytest.mark.parametrize("distance", [1.0, 1e3])
def test_moment_matching_of_equal_clients_far_from_the_server(distance):
    """Clients that agree are given back, however narrow they are and far from the old centre."""
    server = {"w": {"loc": torch.zeros(2).double(), "rho": torch.zeros(2).double()}}
    variance = torch.tensor([1e-16, 1e-20]).double()
    uplink = {
        "n": torch.ones(3).double(),
        "w": {"loc": torch.full((3, 2), distance).double() / 3, "rho": rho(variance).expand(3, 2)},
    }
    mean, found = moments(pooled(MomentMatched(), server, uplink))
    assert_close(mean, torch.full((2,), distance).double() / 3)
    assert_close(found, variance, rtol=1e-6, atol=0)


def w2(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """Squared 2-Wasserstein distance of N(m, diag v), by the general form |m1 - m2|^2 + tr(S1 + S2
    - 2 (S2^1/2 S1 S2^1/2)^1/2).
    """
    return ((a[0] - b[0]) ** 2 + a[1] + b[1] - 2 * (b[1].sqrt() * a[1] * b[1].sqrt()).sqrt()).sum(
        -1
    )


def test_barycentre_averages_means_and_standard_deviations():
    """Both by the clients' weights."""
    server, uplink = federation()
    share = (uplink["n"] / uplink["n"].sum())[:, None]
    means, variances = moments(uplink["w"])
    assert_close(
        moments(pooled(Barycentre(), server, uplink)),
        ((share * means).sum(0), (share * variances.sqrt()).sum(0) ** 2),
    )
    assert_close(pooled(Barycentre(weight=equal), server, uplink)["loc"], means.mean(0))


def test_barycentre_minimises_the_distances():
    """The weighted sum of squared distances has no slope there, neither by the mean nor by the
    variance.
    """
    server, uplink = federation()
    mean, variance = (
        t.detach().requires_grad_() for t in moments(pooled(Barycentre(), server, uplink))
    )
    distance = (uplink["n"] * w2((mean, variance), moments(uplink["w"]))).sum()
    slopes = torch.stack(torch.autograd.grad(distance, [mean, variance]))
    assert_close(slopes, torch.zeros(2, 3).double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda server, uplink: torch.ones(2), r"weight .*\[5\].*'w', got \[2\]"),
        (lambda server, uplink: torch.ones(5, 1), r"weight .*\[5\].*'w', got \[5, 1\]"),
        (lambda server, uplink: torch.tensor(1.0), r"got \[\]"),
    ],
)
@pytest.mark.parametrize("pool", [Mean, MomentMatched, Barycentre])
def test_weights_that_do_not_fit(pool, weight, message):
    """Before anything is added."""
    with pytest.raises(ValueError, match=message):
        pooled(pool(weight=weight), *federation())


def test_copies_are_weighed_together_or_each():
    """[C] or [C, M], and nothing else, for a block [C, M, D]."""
    loc = numbers(5, 2, 3)
    server = {"w": {"loc": numbers(2, 3, seed=1)}}
    uplink = {"n": torch.arange(1.0, 6).double(), "w": {"loc": loc}}
    each = torch.rand(5, 2, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    assert_close(
        pooled(Mean(lambda s, u: each), server, uplink)["loc"],
        torch.einsum("cm,cmd->md", each / each.sum(0), loc),
    )
    assert_close(pooled(Mean(equal), server, uplink)["loc"], loc.mean(0))
    with pytest.raises(ValueError, match=r"weight .*\[5\] or \[5, 2\].*'w'.* got .*\[5, 3\]"):
        pooled(Mean(lambda s, u: torch.ones(5, 3)), server, uplink)


# Stacked


def test_stack_leaves_the_entry_to_combine():
    """Nothing is changed; what travels is its option."""
    server, uplink = federation()
    assert Stack()(server, "w", uplink) is server["w"]
    assert [Stack().sends, Stack(("loc", "rho")).sends] == [("loc",), ("loc", "rho")]
    assert [
        (isinstance(pool, AdditivePool), isinstance(pool, StackedPool))
        for pool in (Stack(), Mean())
    ] == [(False, True), (True, False)]


def test_mixed_gives_each_client_its_own_mixture():
    """Rows of the matrix times what the cohort sent; the absent keep theirs, the mean is over all;
    newcomers have none.
    """
    weights = torch.tensor([[0.75, 0.25], [0.0, 1.0]])
    pool = Mixed(lambda server, ids, uplink: weights * uplink["round"])
    start = pool.start({"loc": numbers(3)}, 4)
    assert_close(start["each"], numbers(3).expand(4, 3))
    sent, ids = numbers(2, 3, seed=1), torch.tensor([3, 1])
    new = pool({"w": start}, "w", {"w": {"loc": sent}, "ids": ids, "round": 1})
    assert_close(new["each"][ids], weights.double() @ sent)
    assert torch.equal(new["each"][[0, 2]], start["each"][[0, 2]])
    assert_close(new["loc"], new["each"].mean(0))
    assert new["weights"].tolist() == [[1.0, 0.0], [0.25, 0.75]]
    assert new["cohort"].tolist() == [1, 3]
    dense = torch.eye(4).double()
    dense[3, 3], dense[3, 1] = 0.75, 0.25
    made = start["each"].index_copy(0, ids, sent)
    assert_close(new["each"], dense @ made)
    later = pool.start(new, 0)
    assert {key: len(later[key]) for key in Mixed.holds} == {"each": 0, "weights": 0, "cohort": 0}
    assert later["loc"] is new["loc"]


@pytest.mark.parametrize("size", [1, 3, 300])
def test_mixed_copies(size: int):
    """Of a block with copies each is mixed alike, also where the mean is made in parts."""
    pool = Mixed(lambda server, ids, uplink: torch.full((2, 2), 0.5))
    start, sent = pool.start({"loc": numbers(2, size)}, 3), numbers(2, 2, size, seed=1)
    new = pool({"w": start}, "w", {"w": {"loc": sent}, "ids": torch.arange(2)})
    assert_close(new["each"][:2], sent.mean(0).expand(2, 2, size))
    assert_close(new["loc"], new["each"].mean(0))


def test_raw_parameters_are_averaged_as_they_are(model: nn.Module, clients: FederatedData):
    """`Mean(sends=("loc", "rho"))` gives the weighted mean of each, by hand."""
    plain = bf.algorithms.pfedvem(model, head_epochs=2, body_epochs=1, init_scale=0.3)
    head = replace(plain.blocks["head"], pool=Mean(sends=("loc", "rho")))
    result = run(replace(plain, blocks={**plain.blocks, "head": head}), clients)
    n = torch.from_numpy(clients.train.counts).double()
    wanted = {key: (n @ t) / n.sum() for key, t in result.private["head"].items()}
    assert_close(result.server["head"], wanted, atol=1e-12, rtol=0)
