"""Pools for clients that may lie, or whose training went wrong without leaving the finite numbers.

A mean follows any one client as far as it goes. A median and a trimmed mean stay within the range of the honest, coordinate by coordinate,
while those are in the majority; clipping bounds how far one can pull. All have a price where clients differ honestly: what a minority
knows looks like a lie.
"""

from dataclasses import dataclass

import torch

from bayesfl.checks import number
from bayesfl.protocols import AdditivePool, Server, Tensors, Uplink


@dataclass(frozen=True)
class Median:
    """The coordinate-wise median of what the clients send, every client counting the same; of an even number, the mean of the middle two.

    Args:
        sends: Which of the posterior's tensors travel.

    References:
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, option I.
    """

    sends: tuple[str, ...] = ("loc",)

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """See `StackedPool`."""
        found = {key: uplink[name][key].double().sort(0).values for key in self.sends}
        middle = {key: (t[(len(t) - 1) // 2] + t[len(t) // 2]) / 2 for key, t in found.items()}
        return {**server[name], **{key: t.to(server[name][key]) for key, t in middle.items()}}


@dataclass(frozen=True)
class TrimmedMean:
    """The coordinate-wise mean of what is left when the largest and the smallest numbers of the clients are taken away.

    Args:
        share: Of the clients, taken away at each end, in [0, 1/2); of few clients at least one where it is not 0.
        sends: Which of the posterior's tensors travel.

    Raises:
        ValueError: The share lies outside its range, or in a round no client is left.

    References:
        Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal statistical rates", ICML 2018, option II.
    """

    share: float = 0.1
    sends: tuple[str, ...] = ("loc",)

    def __post_init__(self) -> None:
        if not 0 <= number("share", self.share) < 0.5:
            raise ValueError(f"share is taken away at each end and must lie in [0, 0.5), got {self.share}")

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """See `StackedPool`."""
        clients = len(uplink["n"])
        cut = max(1, int(self.share * clients + 1e-9)) if self.share else 0
        if 2 * cut >= clients:
            raise ValueError(
                f"a trimmed mean of {clients} clients leaves none when {cut} go at each end; take a larger cohort, or a median"
            )
        found = {key: uplink[name][key].double().sort(0).values[cut : clients - cut].mean(0) for key in self.sends}
        return {**server[name], **{key: t.to(server[name][key]) for key, t in found.items()}}


@dataclass(frozen=True)
class Clipped:
    """Another pool, of clients whose difference from what the server sent is shrunk to a given length where it is longer.

    Args:
        pool: The pool that gathers them.
        norm: Largest Euclidean length of the difference over all tensors of the block that travel, > 0.

    Raises:
        ValueError: The norm is not positive, or the pool needs all clients at once.

    References:
        Sun, Kairouz, Suresh, McMahan, "Can you really backdoor federated learning?", 2019, section 4.
    """

    pool: AdditivePool
    norm: float

    def __post_init__(self) -> None:
        if isinstance(self.pool, type) or not hasattr(self.pool, "accumulate"):
            raise ValueError(f"pool must be one that adds up, such as Mean(), got {self.pool!r}")
        if not number("norm", self.norm) > 0:
            raise ValueError(f"norm must be > 0, got {self.norm}")

    @property
    def sends(self) -> tuple[str, ...]:
        """What the inner pool sends."""
        return self.pool.sends

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """As the inner pool, of what is left of the differences."""
        moved = {key: uplink[name][key].double() - server[name][key].double() for key in self.sends}
        length = torch.stack([t.flatten(1).square().sum(1) for t in moved.values()]).sum(0).sqrt()
        share = (self.norm / length).clamp(max=1.0)
        kept = {key: server[name][key].double() + t * share.view(-1, *[1] * (t.dim() - 1)) for key, t in moved.items()}
        return self.pool.accumulate(total, server, name, {**uplink, name: kept})

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """As the inner pool."""
        return self.pool.solve(server, name, total)
