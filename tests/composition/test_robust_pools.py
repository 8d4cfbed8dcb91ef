"""Robust pools against their definitions, number by number, and against one client that sends
anything.
"""

from dataclasses import replace
from statistics import mean, median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Uplink
from bayesfl.composition.pools import Clipped, Mean, Median, MomentMatched, TrimmedMean, equal
from tests.composition.test_pools import federation, pooled, some


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_median(clients: int):
    """Coordinate by coordinate that of Python's statistics; sizes don't matter, and what does not
    travel stays.
    """
    server, uplink = federation(clients, 4)
    found = Median()(server, "w", uplink)
    assert_close(
        found["loc"],
        torch.tensor(
            [median(column) for column in uplink["w"]["loc"].T.tolist()], dtype=torch.float64
        ),
    )
    assert found["rho"] is server["w"]["rho"]
    assert_close(
        Median(("loc", "rho"))(server, "w", uplink)["rho"], uplink["w"]["rho"].quantile(0.5, 0)
    )


@pytest.mark.parametrize(
    ("clients", "share", "cut"),
    [(5, 0.0, 0), (5, 0.1, 1), (7, 0.29, 2), (10, 0.3, 3), (10, 0.49, 4)],
)
def test_trimmed_mean(clients: int, share: float, cut: int):
    """The mean of the sorted numbers without so many at each end; at least one, unless the share is
    0.
    """
    server, uplink = federation(clients, 3)
    wanted = [mean(sorted(column)[cut : clients - cut]) for column in uplink["w"]["loc"].T.tolist()]
    assert_close(
        TrimmedMean(share)(server, "w", uplink)["loc"], torch.tensor(wanted, dtype=torch.float64)
    )


def test_clipping():
    """Each difference keeps its direction and is at most so long, over all tensors of the block
    together.
    """
    server, uplink = federation(5, 3)
    for norm in (0.5, 2.0, 1e9):
        moved = torch.cat([uplink["w"][key] - server["w"][key] for key in ("loc", "rho")], 1)
        moved = moved * (norm / moved.norm(dim=1, keepdim=True)).clamp_max(1.0)
        honest = {
            "loc": server["w"]["loc"] + moved[:, :3],
            "rho": server["w"]["rho"] + moved[:, 3:],
        }
        assert_close(
            pooled(Clipped(MomentMatched(), norm), server, uplink),
            pooled(MomentMatched(), server, uplink | {"w": honest}),
            rtol=1e-12,
            atol=0,
        )
    still = uplink | {"w": {"loc": server["w"]["loc"].expand(5, 3)}}
    assert_close(pooled(Clipped(Mean(), 0.1), server, still)["loc"], server["w"]["loc"])
    total = Clipped(Mean(), 0.5).accumulate(None, server, "w", some(uplink, slice(0, 2)))
    total = Clipped(Mean(), 0.5).accumulate(total, server, "w", some(uplink, slice(2, 5)))
    assert torch.equal(
        Mean().solve(server, "w", total)["loc"], pooled(Clipped(Mean(), 0.5), server, uplink)["loc"]
    )


@pytest.mark.parametrize(
    "pool",
    [Median(), TrimmedMean(0.2), Clipped(Mean(equal), 1.0)],
    ids=lambda pool: type(pool).__name__,
)
def test_one_liar(pool: Any):
    """One of seven that sends 1e12, or minus that, moves no coordinate beyond the honest ones, or
    by more than its share of the norm.
    """

    def gathered(uplink: Uplink) -> Tensor:
        return (
            pooled(pool, server, uplink) if isinstance(pool, Clipped) else pool(server, "w", uplink)
        )["loc"]

    server, uplink = federation(7, 4)
    honest = gathered(uplink)
    for lie in (1e12, -1e12):
        loc = uplink["w"]["loc"].clone()
        loc[3] = lie
        found = gathered(uplink | {"w": {"loc": loc}})
        if isinstance(pool, Clipped):
            assert float((found - honest).norm()) <= 2 * pool.norm / 7
        else:
            others = torch.cat([loc[:3], loc[4:]])
            assert bool(((found >= others.amin(0)) & (found <= others.amax(0))).all())


def test_in_a_federation(model, clients):
    """Any block takes them; float32 comes back, kernels and chunks agree."""
    for pool in (Median(), TrimmedMean(0.2), Clipped(Mean(), 0.1)):
        algorithm = replace(
            bf.algorithms.fedavg(model, epochs=1), blocks={"w": bf.Block(pool=pool)}
        )
        found = [
            bf.simulate(
                algorithm,
                clients,
                rounds=2,
                engine=bf.Engine(kernel, chunk=chunk),
                evaluate_every=None,
                progress=False,
            ).server
            for kernel, chunk in (("layers", 3), ("reference", 2))
        ]
        assert found[0]["w"]["loc"].dtype == torch.float32
        assert_close(found[0], found[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(0.5), r"share .*\[0, 0\.5\).* got 0\.5"),
        (lambda: TrimmedMean(-0.1), "share"),
        (lambda: Clipped(Mean(), 0.0), "norm must be > 0, got 0.0"),
        (
            lambda: TrimmedMean(0.1)({}, "w", federation(2, 3)[1]),
            r"trimmed mean of 2 clients .* 1 ",
        ),
    ],
)
def test_arguments_that_do_not_work(make: Any, message: str):
    """Refused, with the remedy."""
    with pytest.raises(ValueError, match=message):
        make()
