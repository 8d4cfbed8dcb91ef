"""Differential privacy for clients, in simulation: the server's state after a round hardly depends
on whether any one client took part.

The server is trusted: it sees every client's uplink, and nobody else does. For each client it
computes the difference between the uplink and the state that it sent to the client, over all
gathered blocks together, and clips it to a length. It adds up the clipped differences, each times a
weight fixed beforehand, adds Gaussian noise, and divides by a constant, the expected sum of
weights:

    w <- w + (sum_{j in cohort} w_j min(1, clip / |d_j|) d_j + sigma clip max_j w_j N(0, I))
             / (p sum_j w_j).

A round's cohort contains each client with probability p, independently, and may be empty; a round
without clients adds noise only. Cohort and noise are derived from a secret of the server, never
from the run's seed, because clients have the seed.

The sequence of the server's states, and everything computed from it, is (epsilon,
delta)-differentially private under adding or removing one client's contributions to all rounds. The
number of clients, their weights and the initial state are public.

Source: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models",
ICLR 2018, algorithm 1 with the fixed-denominator estimator; accounting: Koskela, Jälkö, Honkela,
"Computing tight differential privacy guarantees using FFT", AISTATS 2020, in Google's
dp-accounting.
"""

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.archive import CheckpointError
from bayesfl.base.options import (
    PROBABILITY,
    Natural,
    NotNegative,
    Positive,
    Share,
    declared,
    number,
)
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Server
from bayesfl.base.random import keyed
from bayesfl.base.trees import flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.pools import Mean, by_size, equal
from bayesfl.federation.clients.tuning import together
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.rounds.replies import (
    Aggregation,
    AggregationRun,
    Replies,
    RoundSum,
    Unseen,
    check_combine,
    was_sent,
)

SECRET = 16
"""Minimum number of bytes of a secret."""
SPACING = 1e-3
"""Widest spacing of the grid of privacy losses. The accountant rounds losses up: a coarser grid
loosens the bound, but never breaks it.
"""
CLIPPED_ONLY = "with ClientPrivacy only the clipped differences of single clients may be used"


@declared
def epsilon(
    *,
    noise_multiplier: NotNegative,
    participation: Share,
    releases: Natural,
    delta: Annotated[float, PROBABILITY],
) -> float:
    """Return an upper bound of epsilon for `releases` rounds together at `delta`, under adding or
    removing one client.

    Computed from the distribution of the privacy loss of the Poisson-sampled Gaussian mechanism,
    composed by FFT on a grid.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum, divided by the largest change
            of the sum by one client, >= 0; at 0, epsilon is infinite.
        participation: Probability that a client is in a cohort, in (0, 1].
        releases: Number of rounds; a repeated round counts twice.
        delta: The delta of (epsilon, delta)-differential privacy, in (0, 1).

    Raises:
        ImportError: dp-accounting is not installed.
    """
    if not releases:
        return 0.0
    return (
        _composed(noise_multiplier, participation, releases, delta)
        if noise_multiplier
        else math.inf
    )


def epsilon_own(*, noise_multiplier: float, releases: int, delta: float) -> float:
    """Return an upper bound of epsilon against an observer who has the list of a client's rounds,
    such as the client itself.

    The random cohort then hides nothing, so each of these rounds counts as with
    `participation=1`.

    Args:
        noise_multiplier: See `epsilon`.
        releases: Number of rounds with the client in the cohort.
        delta: See `epsilon`, in (0, 1).

    Raises:
        ImportError: dp-accounting is not installed.
    """
    return epsilon(
        noise_multiplier=noise_multiplier, participation=1.0, releases=releases, delta=delta
    )


@lru_cache(maxsize=4096)
def _composed(sigma: float, p: float, releases: int, delta: float) -> float:
    import dp_accounting as dp
    from dp_accounting import pld

    # Standard deviation of one release's privacy loss; a tenth of it is a fine grid.
    spread = p * math.sqrt(math.expm1(min(50.0, sigma**-2)))
    # Range of privacy losses that matter at delta; it bounds the grid's memory.
    most = 10 / sigma + 1 / (2 * sigma**2)
    grid = max(min(SPACING, spread / 10), 3e-6 * most)
    accountant = pld.PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid
    )
    accountant.compose(dp.PoissonSampledDpEvent(p, dp.GaussianDpEvent(sigma)), releases)
    return float(accountant.get_epsilon(delta))


def uniforms(secret: bytes, *address: bytes, size: int) -> np.ndarray:
    """Draw [size] numbers, float64, from the uniform distribution on the multiples of 2^-53 in [0,
    1).
    """
    return (keyed(secret, *address, size=size) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(secret: bytes, *address: bytes, size: int) -> np.ndarray:
    """Draw [size] standard normals, float64, by Box and Muller's transform."""
    half = (size + 1) // 2
    first, second = uniforms(secret, *address, size=2 * half).reshape(2, half)
    radius = np.sqrt(-2 * np.log1p(-first))
    return np.concatenate(
        [radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)]
    )[:size]


@dataclass(frozen=True, kw_only=True)
@declared
class ClientPrivacy(Aggregation):
    """Make rounds differentially private for clients, by `simulate(aggregation=)`.

    Every client is in a cohort with probability `participation`, independently of the others; leave
    out `sampling`. All pools of the method must be `Mean`s; `weights` replaces their weights. Norms
    whose statistics would be sent raise ValueError: the statistics are on the scale of the data,
    and neither one `clip` nor one noise level fits both them and weights. Norms that stay with the
    clients, as in FedBN, are allowed, and so is dropout: the difference that a client sends is
    clipped in any case.

    The history has three more columns. `releases` is the number of rounds so far, including
    repeated ones. `epsilon` bounds the loss of privacy in these rounds, at `delta`. `epsilon_own`
    bounds it for a client that took part in all of these rounds, against an observer with that
    information; for a client that took part in k rounds, call
    `bayesfl.federation.private.privacy.epsilon_own(releases=k, ...)` with the noise multiplier and
    `delta` of the run. `train_nll` is NaN. The other columns (evaluations, `cohort`, bytes,
    seconds) exist in a simulation only: epsilon does not cover them, and a deployment would not
    publish them. Callbacks therefore do not see them, and `EarlyStopping`, steps of calibration,
    audits and surveys that ask for sums raise ValueError.

    Args:
        clip: Maximum length of a client's difference, over all gathered blocks together, > 0.
        noise_multiplier: Standard deviation of the noise on the sum, >= 0, in units of `clip` times
            the largest weight; 0 means no noise, and no privacy.
        delta: The delta at which epsilon is reported, in (0, 1 / (2 J)]; choose it far
            below 1 / J, because publishing one client drawn at random has a delta of 1 / J.
        secret: At least 16 bytes, such as `secrets.token_bytes(32)`, which only the server has and
            uses for one run. None: a new secret whenever a run starts or continues, which is not
            stored.
        weights: One number >= 0 for each client, [J], chosen without looking at the data; None: 1
            for each.

    Raises:
        ValueError: At the start of a run, the method or its settings do not fit, or statistics of
            norms would be sent.

    Example:
        >>> clients = bf.data.iid("digits", clients=4)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> noise = bf.ClientPrivacy(clip=0.5, noise_multiplier=1.0)
        >>> result = bf.simulate(method, clients, rounds=1, participation=0.5, aggregation=noise)
        >>> [name in result.history.columns for name in ("releases", "epsilon")]
        [True, True]
    """

    clip: Positive
    noise_multiplier: NotNegative
    delta: Annotated[float, PROBABILITY] = 1e-5
    secret: bytes | None = field(default=None, repr=False)
    weights: Sequence[float] | None = field(default=None, repr=False)
    sampling: ClassVar[Literal["poisson"] | None] = "poisson"

    def __post_init__(self) -> None:
        if self.secret is not None and not (
            isinstance(self.secret, bytes) and len(self.secret) >= SECRET
        ):
            raise ValueError(
                f"secret must be at least {SECRET} bytes that nobody can guess, such as "
                "secrets.token_bytes(32), or None"
            )
        if self.weights is not None:
            given = [number("each of weights", w) for w in self.weights]
            if not all(0 <= w < math.inf for w in given) or not any(given):
                raise ValueError(f"weights must be >= 0 and finite, and not all 0, got {given}")
            object.__setattr__(self, "weights", tuple(given))

    @property
    def name(self) -> str:
        """Return the settings as text, without the secret; see `Aggregation.name`."""
        if self.weights is None:
            return repr(self)
        weights = hashlib.sha256(np.array(self.weights).tobytes()).hexdigest()
        return f"{repr(self)[:-1]}, weights of SHA-256 {weights})"

    def start(
        self, result: Any, admission: Admission, *, every: int | None, repeats: int
    ) -> AggregationRun:
        """Start a run that continues from `result`; see `Aggregation.start`.

        Raises:
            ValueError: The method, the settings or the admission rules do not fit.
            CheckpointError: The history of `result` does not count its releases.
            ImportError: dp-accounting is not installed.
        """
        algorithm, clients = result.algorithm, result.data.clients
        if self.weights is not None and len(self.weights) != clients:
            raise ValueError(
                f"weights must be one number for each of {clients} clients, got {len(self.weights)}"
            )
        if self.delta > 1 / (2 * clients):
            raise ValueError(
                f"delta={self.delta:g} allows publishing one of {clients} clients completely; "
                f"choose a delta far below 1 / {clients}, such as {0.01 / clients:.1g}"
            )
        _check(algorithm, free=self.weights is None)
        check_combine(
            result,
            Unseen(CLIPPED_ONLY, result.round, result.settings.rounds, result.data.clients),
            CLIPPED_ONLY,
        )
        if admission.min_clients > 1 or admission.below_minimum != "skip":
            raise ValueError(
                f"min_clients={admission.min_clients}, below_minimum={admission.below_minimum!r} "
                "would reveal by a round's outcome how many clients took part; with ClientPrivacy "
                "every round counts, also one without clients: leave both out"
            )
        if admission.skips and admission.max_norm is not None:
            raise ValueError(
                f"max_norm={admission.max_norm:g} compares clients with each other, which the "
                "noise does not cover; pass max_norm=None: clip bounds every client"
            )
        if every is not None and every > 1:
            raise ValueError(
                f"every={every} lets states leave the server that are in no checkpoint, so a "
                "resumed run could not count them; with ClientPrivacy pass every=1"
            )
        last = result.history.rows[-1] if result.history.rows else {"releases": 0}
        counted = last.get("releases", -1)
        if not (result.round <= counted < 2**31 and counted == int(counted)):
            raise CheckpointError(
                f"the history of the resumed run counts {last.get('releases', 'no')} releases "
                f"after {result.round} rounds, so its epsilon is unknown; start a new run"
            )
        of: Any = algorithm, result.settings, clients, 0, _PrivateRound
        run = _PrivateRun(*of, rule=self, releases=repeats + int(counted))
        run.spent(run.releases + 1)  # the first round's; fails now if dp-accounting is missing
        return run


def _check(algorithm: Algorithm, *, free: bool) -> None:
    """Check that every block that is sent is gathered by a `Mean`, and that nothing else is sent.

    Args:
        algorithm: The method.
        free: Whether the pools' own weights would be used; they must then be `by_size` or `equal`.

    Raises:
        ValueError: A pool is of another type or weights clients by their data, statistics of norms
            are sent, or `reports` sends more.
    """
    pools = {name: block.pool for name, block in algorithm.blocks.items() if block.pool}
    for name, pool in pools.items():
        if isinstance(algorithm.blocks[name], Buffers):
            raise ValueError(
                f"block {name!r} holds statistics of norms, on the scale of the data: clipped "
                "together with the weights they would dominate them, and noise could make a "
                "variance negative; build the method on bf.models.group_norm(model), put the "
                "norms in eval mode, or let them stay with the clients, as bf.algorithms.fedbn "
                "does"
            )
        if type(pool) is not Mean:
            raise ValueError(
                f"block {name!r} is gathered by {type(pool).__name__}; ClientPrivacy bounds a "
                "client's part in Mean pools only: build the block with pool=Mean(), or leave "
                "aggregation out"
            )
        if free and pool.weight not in (by_size, equal):
            raise ValueError(
                f"block {name!r} weights clients by a function of what they send, which would "
                "reveal something about their data; pass ClientPrivacy(weights=[...]), fixed "
                "beforehand, which replaces it"
            )
    if together(algorithm) or hasattr(algorithm.predictor, "asks"):
        raise ValueError(
            f"{type(algorithm.predictor).__name__} asks clients for sums, which ClientPrivacy does "
            "not cover: pass the number that it tunes, choose another predictor, or leave "
            "aggregation out"
        )
    if more := sorted(algorithm.reports):
        raise ValueError(
            f"the method's `reports` sends {more}, which ClientPrivacy does not cover; if the "
            "method works without them, use dataclasses.replace(algorithm, reports={}, "
            "combine=bf.Algorithm.combine), otherwise leave aggregation out"
        )


@dataclass
class _PrivateRun(AggregationRun):
    """Run with `ClientPrivacy`."""

    rule: ClientPrivacy = field(kw_only=True)
    releases: int = field(kw_only=True)

    def __post_init__(self) -> None:
        # The secret of rank 0, so that all ranks draw the same cohort.
        told, *_ = current().every(lambda: (self.rule.secret or secrets.token_bytes(32)).hex())
        self.secret, given = bytes.fromhex(told), self.rule.weights
        self.weights = np.ones(self.clients) if given is None else np.array(given)

    def cohort(self, round: int, known: Mapping[str, np.ndarray] = {}) -> np.ndarray:
        drawn = uniforms(self.secret, b"cohort", round.to_bytes(8, "little"), size=self.clients)
        return np.flatnonzero(drawn < self.settings.participation)

    def spent(self, releases: int) -> dict[str, float]:
        """Return the history's columns after a number of releases, cached."""
        noise, delta = self.rule.noise_multiplier, self.rule.delta
        about: Any = {"noise_multiplier": noise, "releases": releases, "delta": delta}
        return {
            "releases": releases,
            "epsilon": epsilon(participation=self.settings.participation, **about),
            "epsilon_own": epsilon_own(**about),
        }


class _PrivateRound(RoundSum):
    run: _PrivateRun

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._flat: dict[str, Tensor] = flatten(
            {
                name: {key: self.start[name][key] for key in pool.sends}
                for name, pool in self._pools.items()
            }
        )
        self.total = torch.cat(
            [
                torch.zeros(t.numel(), dtype=torch.float64, device=t.device)
                for t in self._flat.values()
            ]
        )

    def add(self, replies: Replies) -> None:
        """Add the clipped differences of a chunk; the clients' numbers of examples are not used."""
        ids, sent = replies.ids, replies.sent
        began = flatten(was_sent(self.run.algorithm, self.start, ids, replies.n.device, sent))
        came = flatten(sent)
        moved = [
            (came[name].double() - began.get(name, old).double()).flatten(1)
            for name, old in self._flat.items()
        ]
        for client, *rows in zip(ids.tolist(), *moved, strict=True):
            difference = torch.cat(rows)
            length = float(difference.norm())
            if math.isfinite(length):  # otherwise the difference adds nothing
                share = min(1.0, self.run.rule.clip / length) if length else 1.0
                self.total.add_(difference, alpha=float(self.run.weights[client]) * share)

    def server(self) -> Server:
        """Return the server's next state, with noise; see `RoundSum.server`.

        Raises:
            DivergenceError: The next state is not finite.
            ValueError: The method's `combine` reads what single clients sent.
        """
        run, weights = self.run, self.run.weights
        released = (self.total + self._noise()) / (run.settings.participation * weights.sum())
        new = dict(self.start)
        for (name, old), part in zip(
            self._flat.items(),
            released.split([t.numel() for t in self._flat.values()]),
            strict=True,
        ):
            block, key = name.split(".")
            new[block] = {**new[block], key: (old.double() + part.view(old.shape)).to(old)}
        run.releases += 1
        self.row = {"train_nll": math.nan, **run.spent(run.releases)}
        unseen = Unseen(CLIPPED_ONLY, **self._known)
        return self._next_state(new, unseen, unseen)

    def _noise(self) -> Tensor:
        """Return the noise on the sum, a function of the secret, the round and the sum itself.

        A round repeated with the same kernel and chunk gives the same release, which reveals
        nothing new. For other data, or another seed under the same secret, the noise is practically
        independent, so the difference of two releases always contains noise. The same holds if
        another kernel only rounds the sum differently.
        """
        run = self.run
        seen = hashlib.sha256(self.total.cpu().numpy().tobytes()).digest()
        drawn = normals(
            run.secret, b"noise", self.round.to_bytes(8, "little"), seen, size=len(self.total)
        )
        return torch.from_numpy(
            run.rule.noise_multiplier * run.rule.clip * run.weights.max() * drawn
        ).to(self.total)
