"""Secure aggregation in simulation: the server learns the sum of the clients' uplinks, but not the
uplink of any single client.

Every pair of clients of a round shares a secret, which both stretch to the same mask; one client
adds the mask to its uplink and the other subtracts it. The message from one client is uniform over
the integers modulo 2^64, whatever the client's values; in the sum the masks cancel.

Integers cancel exactly and floating-point numbers would not, so a client first converts its
summands to integers: clipped to a range that is declared beforehand, in units of a step. For J
clients that reply, the sum then differs from that of a run without secure aggregation by at most
e = J step / 2, and rounding. A mean s / w then differs by at most e (1 + |s / w|) / (w - e). Each
client checks its own numbers first, because a NaN would silently become some integer.

If a client drops out, its masks do not cancel. The others then send again, under new secrets,
among themselves; the earlier messages are useless without the secrets of the missing client. There
are no shares of secrets from which others could recover it, and no second mask: if the missing
reply arrived late, a server that kept the first sum could subtract the second from it. The server
is trusted to discard both.

Not simulated are: how two clients agree on a secret (by a Diffie-Hellman exchange of keys that a
third party certifies; otherwise the server could impersonate clients), its traffic, and a client
that drops out while the others repeat. Flower's message API has no secure aggregation; its SecAgg+
needs the older workflow API, and quantises too.

Source: Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017, section 4 (masks by pairs; no double
mask, no recovery).
"""

import logging
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.options import Positive, declared
from bayesfl.base.protocols import Server, StackedPool, Tensors
from bayesfl.base.random import keyed
from bayesfl.base.trees import flatten, nest
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.pools import Clipped
from bayesfl.federation.errors import DivergenceError
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.rounds.replies import (
    Aggregation,
    AggregationRun,
    Replies,
    RoundSum,
    Unseen,
    check_combine,
)

log = logging.getLogger(__name__)
ROOM = 2.0**62
"""Upper bound of clients x range / step; below it no sum of rounded numbers overflows int64."""
LEAST_CLIENTS = 2
"""Minimum number of clients in a sum: a sum over one client is that client's own uplink."""
SUMS_ONLY = "under secure aggregation the server sees sums only"


def quantised(values: np.ndarray, range: float, step: float) -> tuple[np.ndarray, int]:
    """Convert numbers to integers modulo 2^64, uint64, in units of `step`; return them and the
    number of values that were clipped to +-`range`.

    Raises:
        ValueError: `values` are not all finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("the numbers are not finite")
    units = np.rint(np.clip(values, -range, range) / step).astype(np.int64)
    return units.view(np.uint64), int((np.abs(values) > range).sum())


def restored(total: np.ndarray, step: float) -> np.ndarray:
    """Convert a sum of `quantised` numbers, uint64, back to float64."""
    return total.view(np.int64).astype(np.float64) * step


def agreed(ids: Iterable[int]) -> dict[int, dict[int, bytes]]:
    """Return, for each client, the secrets that it shares with each other client, drawn from the
    operating system independently of the run's seed.
    """
    found: dict[int, dict[int, bytes]] = {client: {} for client in sorted(ids)}
    for first, second in combinations(found, 2):
        found[first][second] = found[second][first] = secrets.token_bytes(32)
    return found


def masked(values: np.ndarray, client: int, shared: Mapping[int, bytes]) -> np.ndarray:
    """Return a client's message [D], uint64: its integers, plus the masks shared with larger ids,
    minus those shared with smaller ids.
    """
    out = values.copy()
    for other, secret in shared.items():
        mask = keyed(secret, b"mask", size=len(values))
        out = out + mask if client < other else out - mask
    return out


def masked_total(messages: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sum of the clients' messages modulo 2^64, from which the server gets the sum of
    their values.
    """
    return np.add.reduce(np.stack(list(messages)), axis=0, dtype=np.uint64)


@dataclass(frozen=True, kw_only=True)
@declared
class SecureSum(Aggregation):
    """Show the server only the sum of the clients' uplinks, by `simulate(aggregation=)`.

    A client computes its summands for the pools, already multiplied by its weight, and masks them.
    The history has two more columns: `clipped`, the number of values clipped in a round (the
    clients' counts are part of the sum), and `repeats`, the number of times that clients sent again
    because one was missing. `bytes_up` counts everything sent by the clients whose replies are
    used, eight bytes for each number.

    Masks cost a client time in proportion to the cohort's size times the model's.

    Args:
        range: Maximum absolute value of a summand, such as n_j w_j; larger ones are clipped to it.
            Statistics of norms are not clipped, because a mean with a clipped variance would belong
            to another network: a value outside the range stops the run with an error that names the
            client.
        step: The unit to which summands are rounded; a power of two adds no other rounding.

    Raises:
        ValueError: `range` or `step` is not positive and finite. At the start of a run: J range /
            step is not below 2^62; a pool, the method's `combine` or an admission rule needs single
            clients; or a cohort may have one client.

    Example:
        >>> clients = bf.data.iid("digits", clients=3)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> plain = bf.simulate(method, clients, rounds=1)
        >>> hidden = bf.simulate(method, clients, rounds=1, aggregation=bf.SecureSum())
        >>> apart = (hidden.server["w"]["loc"] - plain.server["w"]["loc"]).abs().max()
        >>> bool(0 < apart < 1e-4)
        True
    """

    range: Positive = 2.0**20
    step: Positive = 2.0**-24

    @property
    def name(self) -> str:
        """Return the settings as text; see `Aggregation.name`."""
        return repr(self)

    def added(self, summands: Mapping[int, Tensors]) -> Tensors:
        """Return the sum of clients' answers to a survey, in float64; the server sees only masked
        integers.

        Args:
            summands: Each client's tensors, by its number; all have the same names and shapes.

        Raises:
            ValueError: There is only one client, a number is not finite, J range / step is not
                below 2^62, or a number lies outside the range and would be clipped; the message has
                the range that is needed.
        """
        ids = sorted(summands)
        if len(ids) < LEAST_CLIENTS:
            raise ValueError(
                "a sum over one client is that client's answer; secure sums need at least two"
            )
        self._check_room(len(ids))
        shapes = {name: t.shape for name, t in summands[ids[0]].items()}
        shared, messages = agreed(ids), []
        sent = {
            client: np.concatenate(
                [summands[client][name].cpu().numpy().ravel() for name in shapes]
            ).astype(float)
            for client in ids
        }
        largest = max(float(np.abs(values).max(initial=0.0)) for values in sent.values())
        for client, values in sent.items():
            units, clipped = quantised(values, self.range, self.step)
            if clipped:
                needed = 2.0 ** math.ceil(math.log2(largest))
                raise ValueError(
                    f"client {client} answers with numbers up to {np.abs(values).max():.3g}, "
                    f"outside SecureSum(range={self.range:g}); a clipped answer would be wrong: "
                    f"pass range={needed:g}"
                )
            messages.append(masked(units, client, shared[client]))
        flat = torch.from_numpy(restored(masked_total(messages), self.step))
        parts = flat.split([shape.numel() for shape in shapes.values()])
        return {
            name: part.reshape(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def _check_room(self, clients: int) -> None:
        if not clients * self.range / self.step < ROOM:
            raise ValueError(
                f"clients x range / step must stay below 2**62, got {clients} x {self.range:g} / "
                f"{self.step:g} = "
                f"2**{math.log2(clients) + math.log2(self.range) - math.log2(self.step):.1f}; "
                "choose a smaller range or a larger step"
            )

    def start(
        self, result: Any, admission: Admission, *, every: int | None, repeats: int
    ) -> AggregationRun:
        """Start a run that continues from `result`; see `Aggregation.start`.

        Raises:
            ValueError: The method, the settings or the admission rules do not fit.
        """
        algorithm, clients, settings = result.algorithm, result.data.clients, result.settings
        self._check_room(clients)
        for name, block in algorithm.blocks.items():
            pool = block.pool
            if isinstance(pool, StackedPool):
                raise ValueError(
                    f"block {name!r} is gathered by {type(pool).__name__}, which needs every "
                    "client's uplink, but secure aggregation shows the server only their sum: use "
                    "a pool that adds up, such as Mean(), or leave aggregation out"
                )
            if _clips(pool):
                raise ValueError(
                    f"block {name!r} is clipped by the server, but under secure aggregation it "
                    "never sees one client's difference; use the pool inside it, or leave "
                    "aggregation out"
                )
        if admission.skips and admission.max_norm is not None:
            raise ValueError(
                f"max_norm={admission.max_norm:g} checks single clients, which secure aggregation "
                "hides; pass max_norm=None: clients clip their own summands to SecureSum(range=)"
            )
        if clients < LEAST_CLIENTS or (
            settings.sampling == "fixed" and settings.fixed_size(clients) < LEAST_CLIENTS
        ):
            raise ValueError(
                f"a cohort has one client of {clients} at "
                f"participation={settings.participation:g}; its sum would be its own uplink, so "
                "secure aggregation needs two: raise participation"
            )
        check_combine(result, torch.arange(clients), SUMS_ONLY)
        least = max(LEAST_CLIENTS, admission.min_clients)
        return AggregationRun(algorithm, settings, clients, least, partial(_SecureRound, self))


def _clips(pool: object) -> bool:
    """Return whether a pool, or one inside it, clips."""
    return isinstance(pool, Clipped) or (hasattr(pool, "pool") and _clips(pool.pool))  # pyright: ignore[reportAttributeAccessIssue] (asked for)


class _SecureRound(RoundSum):
    """Store each client's integers, as the client would, and add up their masked
    forms.
    """

    def __init__(self, rule: SecureSum, *of: Any) -> None:
        super().__init__(*of)
        self._rule = rule
        self._device = tree_leaves(self.start)[0].device
        # Each client's integers, and each sum's shape.
        self.total: tuple[dict[int, np.ndarray], dict[str, list[int]]] = {}, {}

    def add(self, replies: Replies) -> None:
        """Prepare the messages of a chunk's clients; the server does not read them yet.

        Raises:
            DivergenceError: A summand is not finite, or a statistic of norms lies outside the
                range.
        """
        own, sizes = self.total
        uplink = {
            **replies.sent,
            **replies.reported,
            "n": replies.n,
            "ids": torch.from_numpy(replies.ids).to(self._device),
        }
        for place, client in enumerate(replies.ids.tolist()):
            alone = tree_map(lambda t, place=place: t[place : place + 1], uplink) | self._known
            flat = flatten(
                {
                    name: pool.accumulate(None, self.start, name, alone)
                    for name, pool in self._pools.items()
                }
            )
            sizes |= {name: list(t.shape) for name, t in flat.items()}
            values = np.concatenate([t.cpu().numpy().ravel() for t in flat.values()])
            try:
                units, clipped = quantised(values, self._rule.range, self._rule.step)
            except ValueError as error:
                raise DivergenceError(
                    f"client {client} sends nothing in round {self.round + 1}: in its summands, "
                    f"{error}; lower the learning rates, or check its weight",
                    round=self.round + 1,
                    client=client,
                ) from error
            if clipped:
                self._refuse_clipped(client, flat)
            own[client] = np.append(units, np.uint64(clipped))

    def _refuse_clipped(self, client: int, summands: Tensors) -> None:
        for name, t in summands.items():
            block, size = name.split(".")[0], float(t.abs().max())
            statistics = isinstance(self.run.algorithm.blocks[block], Buffers)
            if statistics and size > self._rule.range:
                raise DivergenceError(
                    f"client {client} sends nothing in round {self.round + 1}: for the statistics "
                    f"of norms in block {block!r} it would add {size:.4g} to the sums (its weight "
                    f"times its value), more than range={self._rule.range:g}; pass a larger "
                    "SecureSum(range=), with a larger step if necessary, scale the inputs, or use "
                    "bf.models.group_norm(model)",
                    round=self.round + 1,
                    client=client,
                )

    def server(self) -> Server:
        """Return the server's next state from the sum; see `RoundSum.server`.

        Raises:
            DivergenceError: The next state is not finite.
            ValueError: The method's `combine` reads what single clients sent.
        """
        *values, clipped = self._sum()
        flat = torch.from_numpy(restored(np.array(values, np.uint64), self._rule.step)).to(
            self._device
        )
        own, sizes = self.total
        parts = zip(
            sizes.items(), flat.split([math.prod(shape) for shape in sizes.values()]), strict=True
        )
        totals = nest({name: part.reshape(shape) for (name, shape), part in parts})
        if clipped:
            log.warning(
                "round %d: %d numbers were clipped to +-%g; declare a larger range",
                self.round + 1,
                clipped,
                self._rule.range,
            )
        self.row["clipped"] = int(clipped)
        new = self.start | {
            name: pool.solve(self.start, name, totals[name]) for name, pool in self._pools.items()
        }
        ids = torch.tensor(sorted(own), device=self._device)
        return self._next_state(new, ids, Unseen(SUMS_ONLY, **self._known))

    def _sum(self) -> np.ndarray:
        """Return the sum of the encoded values of the clients that replied, with the number of
        clipped values as last entry, uint64.

        If a client of the cohort does not reply, its masks do not cancel. The other clients then
        mask their values again among themselves, and send them again.
        """
        group, sends, volume, (own, _) = self.cohort, 0, 0, self.total
        while True:
            shared = agreed(group)
            messages = [
                masked(own[client], client, shared[client]) for client in group if client in own
            ]
            sends, volume = sends + 1, volume + sum(message.nbytes for message in messages)
            if len(messages) == len(group):
                self.row |= {"repeats": sends - 1, "bytes_up": volume}
                return masked_total(messages)
            group = sorted(own)
