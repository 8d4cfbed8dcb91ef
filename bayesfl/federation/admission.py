"""Which of a round's replies the server takes: whole, as declared, finite, and not absurdly far from what it sent.

These checks catch machines that break and code of another version. They are no defence against clients that lie consistently; for those
there are the pools of `bayesfl.pools`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.checks import number, whole
from bayesfl.base.protocols import Tensors
from bayesfl.federation.errors import FailedRound, SmallCohort, TooFewClients

log = logging.getLogger(__name__)


T = TypeVar("T")


Declared: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and precision of every tensor that a client sends, by its dotted name."""


PROTOCOL = 1
"""Version of what a client and a server say to each other."""


ATTEMPTS = 3
"""How often a round is tried before the run stops for want of clients."""


ENOUGH = 3
"""Replies of a round from which its own median says how far clients go."""


LARGEST = 100.0
"""How far a client's data count beyond the median client's: what a node says of these is believed."""


@dataclass(frozen=True)
class Message:
    """What a client replies in a round.

    Args:
        tensors: By their declared names.
        round: That it was trained in.
        protocol: Of the client's code.
    """

    tensors: Mapping[str, Any]
    round: int
    protocol: int = PROTOCOL


def objection(message: Message, declared: Declared, round: int) -> str | None:
    """Why a message is not taken, in words; None where nothing is wrong with it on its own.

    Args:
        message: What came.
        declared: Shape and precision of every tensor, as `Algorithm.uplink` has them.
        round: The round that is on.
    """
    if message.protocol != PROTOCOL:
        return f"it speaks protocol {message.protocol}, the server {PROTOCOL}"
    if message.round != round:
        return f"it answers round {message.round}, not round {round}"
    if missing := sorted(declared.keys() - message.tensors.keys()):
        return f"tensors {missing} are missing"
    if extra := sorted(message.tensors.keys() - declared.keys()):
        return f"tensors {extra} were not declared"
    for name, (shape, dtype) in declared.items():
        tensor = message.tensors[name]
        if not isinstance(tensor, Tensor):
            return f"{name} is a {type(tensor).__name__}, no tensor"
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, declared as {dtype} {list(shape)}"
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
    return None


def distances(sent: Mapping[str, Tensors], start: Mapping[str, Tensors]) -> Tensor:
    """How far each client has gone from what the server sent it, [C], Euclidean over all pooled blocks together.

    Args:
        sent: {block: {tensor: [C, ...]}}, not empty.
        start: The same as the server sent it, [...] or [C, ...]; tensors that it did not send don't count.
    """
    total = torch.zeros(len(next(iter(next(iter(sent.values())).values()))), dtype=torch.float64)
    for name, tensors in sent.items():
        for key, value in tensors.items():
            if key in start.get(name, {}):
                total += (value.double() - start[name][key].double()).flatten(1).square().sum(1).cpu()
    return total.sqrt()


def shares(counts: np.ndarray) -> np.ndarray:
    """Each client's examples in units of the median client's, [J], within 1/100 and 100; 1 where they are not known.

    Args:
        counts: Examples of all clients, [J]; 0 where that is not known.
    """
    known = counts[counts > 0]
    if not len(known):
        return np.ones(len(counts))
    return np.where(counts > 0, np.clip(counts / np.median(known), 1 / LARGEST, LARGEST), 1.0)


def usual(sizes: Sequence[float], share: Sequence[float] | np.ndarray) -> float:
    """What clients usually say, whether or not it grows with their data: the larger of the medians of size and of size / share.

    Distances grow with the steps of an epoch, counts with the examples; a method with a fixed number of steps has neither.

    Args:
        sizes: Of some clients, one at least.
        share: Their data, as `shares` has them.
    """
    return float(max(np.median(sizes), np.median(np.divide(sizes, share))))


@dataclass(frozen=True)
class Admission:
    """The rules of a run.

    Args:
        on_bad_client: `stop` the run, or `skip` the client: its reply and its new state are dropped, it starts its next round from the
            last state that was taken, and the round is as without it.
        min_clients: Replies that a round needs.
        below_minimum: What becomes of a round with fewer: `skip` leaves everything as it was, `repeat` tries again, three times in all.
        max_norm: A reply is dropped that went so many times as far from what was sent as is `usual` in the round, or, where fewer than
            three replied, as in the median of earlier rounds; clients with more data than the median client may go further, by their
            `shares`. None for no such check.
        norm_floor: A distance that is always allowed.

    Raises:
        ValueError: A word or a number outside its range.
    """

    on_bad_client: Literal["stop", "skip"] = "stop"
    min_clients: int = 1
    below_minimum: Literal["skip", "repeat"] = "skip"
    max_norm: float | None = 100.0
    norm_floor: float = 1.0

    def __post_init__(self) -> None:
        if self.on_bad_client not in ("stop", "skip"):
            raise ValueError(f"on_bad_client must be 'stop' or 'skip', got {self.on_bad_client!r}")
        if self.below_minimum not in ("skip", "repeat"):
            raise ValueError(f"below_minimum must be 'skip' or 'repeat', got {self.below_minimum!r}")
        whole("min_clients", self.min_clients, least=1)
        if self.max_norm is not None and not number("max_norm", self.max_norm) > 1:
            raise ValueError(f"max_norm is in medians and must be > 1, or None for no check, got {self.max_norm}")
        if not number("norm_floor", self.norm_floor) >= 0:
            raise ValueError(f"norm_floor must be >= 0, got {self.norm_floor}")

    def check(self, cohort: int) -> None:
        """That a cohort of at most so many clients can make a round.

        Raises:
            ValueError: It is smaller than a round needs.
        """
        if self.min_clients > cohort:
            raise ValueError(f"min_clients must be at most the size of a cohort, {cohort}, got {self.min_clients}; or raise participation")

    @property
    def skips(self) -> bool:
        """Whether bad clients are left out."""
        return self.on_bad_client == "skip"

    def limit(self, norms: Sequence[float], share: Sequence[float] | np.ndarray, earlier: Sequence[float]) -> float:
        """The largest distance that is taken from the median client.

        Args:
            norms: Of this round's replies.
            share: Their clients' data, as `shares` has them.
            earlier: What was usual in earlier rounds.
        """
        enough = len(norms) >= ENOUGH
        if self.max_norm is None or not (enough or len(earlier)):
            return np.inf
        return max(self.norm_floor, self.max_norm * (usual(norms, share) if enough else float(np.median(earlier))))

    def report_limit(self, sizes: Sequence[float], share: Sequence[float] | np.ndarray) -> float:
        """The largest entry that is taken of what a method reports, where nothing was sent that it could be compared with.

        It counts from `norm_floor` up, since a report may well be near 0 for most clients: losses are.

        Args:
            sizes: The largest absolute entry of each of this round's replies.
            share: Their clients' data, as `shares` has them.
        """
        if self.max_norm is None or len(sizes) < ENOUGH:
            return np.inf
        return self.max_norm * max(self.norm_floor, usual(sizes, share))


def check_cohort(drawn: int, round: int, least: int) -> None:
    """That enough clients were drawn for a round.

    Raises:
        SmallCohort: There are not.
    """
    if drawn < least:
        nothing = {"lost": 0, "rejected": 0, "bytes_up": 0, "bytes_down": 0}
        raise SmallCohort(f"round {round}, counted from 0, has {drawn} clients and needs {least} (min_clients)", **nothing)


def check_replies(taken: int, round: int, least: int) -> None:
    """That enough replies were taken in a round.

    Raises:
        TooFewClients: There are not.
    """
    if taken < least:
        raise TooFewClients(f"round {round}, counted from 0, comes to {taken} replies and needs {least} (min_clients)")


def attempts(admission: Admission, once: Callable[[int], T]) -> T | FailedRound:
    """A round, tried again where it comes to nothing and might not the next time; the last failure where it is to be skipped.

    Args:
        admission: What becomes of such a round.
        once: Tries the round, given how often it was tried before.

    Raises:
        FailedRound: It came to nothing every time.
    """
    for attempt in range(ATTEMPTS):
        try:
            return once(attempt)
        except FailedRound as error:
            if admission.below_minimum == "skip" or isinstance(error, SmallCohort):
                log.warning("%s; the round is skipped", error)
                return error
            log.warning("%s; attempt %d of %d", error, attempt + 1, ATTEMPTS)
            if attempt + 1 == ATTEMPTS:
                raise
    raise AssertionError
