"""Admission of replies: the server accepts those that are complete, as declared, finite, and not
extremely far from the state that it sent.

These checks detect failing machines and code of another version. They do not defend against clients
that lie consistently; use the pools of `bayesfl.pools` for that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.numerics import finite
from bayesfl.base.options import Count, Range, declared
from bayesfl.base.protocols import Tensors

Declared: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor that a client sends, by its dotted name."""


PROTOCOL = 7
"""Version of the messages between client and server."""


NORM_FLOOR = 1.0
"""A distance from the sent state that is always allowed."""
ENOUGH_REPLIES = 3
"""Minimum number of replies whose median defines the usual distance of clients."""


LARGEST_SHARE = 100.0
"""Maximum factor by which a client's reported number of examples, which cannot be verified, may
exceed the median client's.
"""


@dataclass(frozen=True)
class Message:
    """Hold a client's reply in a round.

    Args:
        tensors: The tensors, by their declared names.
        round: The round of the client's training, counted from 0.
        protocol: The message version of the client's code.
    """

    tensors: Mapping[str, Any]
    round: int
    protocol: int = PROTOCOL


def objection(message: Message, declared: Declared, round: int) -> str | None:
    """Return the reason for rejecting a message; None if it has no fault that is visible without
    comparison to other messages.

    Args:
        message: The client's reply.
        declared: Shape and dtype of every tensor, from `Algorithm.uplink`.
        round: The current round, counted from 0.
    """
    if message.protocol != PROTOCOL:
        return f"it uses protocol {message.protocol}, the server {PROTOCOL}"
    if message.round != round:
        return f"it answers round {message.round + 1}, not round {round + 1}"
    if missing := sorted(declared.keys() - message.tensors.keys()):
        return f"tensors {missing} are missing"
    if extra := sorted(message.tensors.keys() - declared.keys()):
        return f"tensors {extra} were not declared"
    for name, (shape, dtype) in declared.items():
        tensor = message.tensors[name]
        if not isinstance(tensor, Tensor):
            return f"{name} is a {type(tensor).__name__}, not a tensor"
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape)}, declared as {dtype} {list(shape)}"
            )
        if tensor.is_floating_point() and not finite(tensor):
            return f"{name} is not finite"
    return None


def distances(sent: Mapping[str, Tensors], start: Mapping[str, Tensors]) -> Tensor:
    """Return each client's Euclidean distance from the state that it received, [C], over several
    blocks together.

    Args:
        sent: The clients' uplinks, {block: {tensor: [C, ...]}}, not empty.
        start: The state that the server sent for the same blocks, [...] or [C, ...]; tensors that
            are absent there do not count.
    """
    total = torch.zeros(len(next(iter(next(iter(sent.values())).values()))), dtype=torch.float64)
    for name, tensors in sent.items():
        for key, value in tensors.items():
            if key in start.get(name, {}):
                total += (
                    (value.double() - start[name][key].double()).flatten(1).square().sum(1).cpu()
                )
    return total.sqrt()


def shares(counts: np.ndarray) -> np.ndarray:
    """Return each client's number of examples divided by the median client's, [J], clipped to
    [1/100, 100]; 1 if unknown.

    Args:
        counts: Numbers of examples of all clients, [J]; 0 if unknown.
    """
    known = counts[counts > 0]
    if not len(known):
        return np.ones(len(counts))
    return np.where(
        counts > 0, np.clip(counts / np.median(known), 1 / LARGEST_SHARE, LARGEST_SHARE), 1.0
    )


def usual(sizes: Sequence[float], share: Sequence[float] | np.ndarray) -> float:
    """Return the usual size of clients' reports: the larger of the median of size and the median of
    size / share.

    Sizes may grow with a client's data or not: distances grow with the number of steps in an epoch,
    and counts with the number of examples; under a fixed number of steps neither grows.

    Args:
        sizes: The sizes for some clients, at least one.
        share: Their numbers of examples relative to the median client's, from `shares`.
    """
    return float(max(np.median(sizes), np.median(np.divide(sizes, share))))


@dataclass(frozen=True)
@declared
class Admission:
    """Set the rules by which a run accepts clients' replies and treats rounds with too few of them.

    Args:
        on_bad_client: `stop` the run, or `skip` the client: its reply and its new state are
            discarded, it starts its next round from its last accepted state, and the round proceeds
            without it.
        min_clients: Minimum number of replies in a round, >= 1.
        below_minimum: Treatment of a round with fewer replies: `skip` leaves everything unchanged,
            `repeat` tries again, up to three attempts.
        max_norm: Maximum distance of a reply from the state that the server sent, as a multiple of
            the round's `usual` distance or, with fewer than three replies, of the median of that in
            earlier rounds; > 1. Statistics of norms do not count: on the scale of the data, they
            would hide the weights. For clients with more data than the median client the limit is
            multiplied by their `shares`. The same multiple bounds the entries that a method
            reports. None for no such check.

    Example:
        >>> clients = bf.data.iid("digits", clients=4)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> plan = bf.faults.at_random(0.5, kinds=("nan",))
        >>> rules = bf.Admission("skip", min_clients=2)
        >>> result = bf.simulate(method, clients, rounds=2, faults=plan, admission=rules)
        >>> result.history["cohort"].tolist()
        [3.0, 3.0]
    """

    on_bad_client: Literal["stop", "skip"] = "stop"
    min_clients: Count = 1
    below_minimum: Literal["skip", "repeat"] = "skip"
    max_norm: Annotated[float | None, Range(1, math.inf, "]")] = 100.0

    def check(self, cohort: int) -> None:
        """Check that a cohort of at most `cohort` clients can make a round.

        Raises:
            ValueError: `cohort` is smaller than `min_clients`.
        """
        if self.min_clients > cohort:
            raise ValueError(
                f"min_clients must be at most the size of a cohort, {cohort}, got "
                f"{self.min_clients}; or raise participation"
            )

    @property
    def skips(self) -> bool:
        """Return whether bad clients are skipped instead of stopping the run."""
        return self.on_bad_client == "skip"

    def limit(
        self, norms: Sequence[float], share: Sequence[float] | np.ndarray, earlier: Sequence[float]
    ) -> float:
        """Return the maximum distance for a client with as many examples as the median client;
        infinity for no limit.

        Args:
            norms: The distances of this round's replies.
            share: Their clients' numbers of examples relative to the median client's, from
                `shares`.
            earlier: The `usual` distances of earlier rounds.
        """
        enough = len(norms) >= ENOUGH_REPLIES
        if self.max_norm is None or not (enough or len(earlier)):
            return np.inf
        return max(
            NORM_FLOOR,
            self.max_norm * (usual(norms, share) if enough else float(np.median(earlier))),
        )

    def report_limit(self, sizes: Sequence[float], share: Sequence[float] | np.ndarray) -> float:
        """Return the maximum absolute entry of a method's reports; infinity for no limit.

        The server has no own value to compare a report with. The usual size counts as at least
        `NORM_FLOOR`, because a report, such as a loss, may be near 0 for most clients.

        Args:
            sizes: The largest absolute entry of each of this round's replies.
            share: Their clients' numbers of examples relative to the median client's, from
                `shares`.
        """
        if self.max_norm is None or len(sizes) < ENOUGH_REPLIES:
            return np.inf
        return self.max_norm * max(NORM_FLOOR, usual(sizes, share))
