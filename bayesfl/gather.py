"""What the server makes of a round's replies: which it takes, and what their sum gives."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.admission import Admission, distances
from bayesfl.blocks import Algorithm
from bayesfl.local import DivergenceError
from bayesfl.protocols import Server, StackedPool, Tensors, Uplink

log = logging.getLogger(__name__)


class Gather:
    """What the server adds up over a round.

    Args:
        algorithm: Whose pools they are.
        server: The state that clients were sent.
        round: The round that is on.
    """

    def __init__(self, algorithm: Algorithm, server: Server, round: int) -> None:
        self._algorithm, self._server, self._round = algorithm, server, round
        self._totals: dict[str, Tensors] = {}
        self._stacked: list[Uplink] = []
        self._pools = {name: block.pool for name, block in algorithm.blocks.items() if block.pool}

    def add(self, ids: np.ndarray, n: Tensor, sent: Mapping[str, Tensors], reported: Uplink) -> None:
        """The uplinks of a chunk, client after client."""
        extra = reported | {"n": n, "ids": torch.from_numpy(ids).to(n.device)}
        for name, pool in self._pools.items():
            if not isinstance(pool, StackedPool):
                self._totals[name] = pool.accumulate(self._totals.get(name), self._server, name, {**sent, **extra})
        self._stacked.append(extra | {name: sent[name] for name, pool in self._pools.items() if isinstance(pool, StackedPool)})

    def server(self) -> Server:
        """The server's next state.

        Raises:
            DivergenceError: It is not finite.
            ValueError: The method's `combine` returns something that the server does not have.
        """
        uplink = tree_map(lambda *rows: torch.cat(rows), *self._stacked)
        new = dict(self._server)
        for name, pool in self._pools.items():
            if isinstance(pool, StackedPool):
                new[name] = pool(self._server, name, uplink)
            else:
                new[name] = pool.solve(self._server, name, self._totals[name])
        changed = self._algorithm.combine(new, uplink["ids"], uplink)
        if unknown := sorted(changed.keys() - new.keys()):
            raise ValueError(f"`combine` returns {unknown}, which the server does not have; give them a start in `server`")
        if not all(bool(t.isfinite().all()) for t in tree_leaves(new | changed)):
            raise DivergenceError(
                f"the server is no longer finite after round {self._round}, counted from 0; lower the learning rates", round=self._round
            )
        return new | changed


class Gate:
    """Holds a round's replies until it is known which are taken; those are gathered in the order in which they came.

    Args:
        algorithm: The method.
        server: The state that clients were sent.
        gather: Where the replies go that are taken.
        admission: Which are.
        round: The round that is on.
        history: Rows of the rounds before.
    """

    def __init__(
        self, algorithm: Algorithm, server: Server, gather: Gather, admission: Admission, round: int, history: Iterable[Mapping[str, Any]]
    ) -> None:
        self._algorithm, self._server, self._gather, self._admission, self._round = algorithm, server, gather, admission, round
        self._earlier = [row["uplink_norm"] for row in history if math.isfinite(row.get("uplink_norm", math.nan))]
        self._held: list[tuple[np.ndarray, Tensor, dict[str, Tensors], Uplink]] = []
        self._norms: dict[int, float] = {}
        self.dropped: dict[int, str] = {}
        """Why a client is left out."""
        self.median = math.nan
        """Of the distances of the replies that were taken; known when closed."""

    def drop(self, client: int, reason: str) -> None:
        """Leaves a client out, whose reply may still be held with the others of its chunk."""
        self.dropped.setdefault(client, reason)

    def hold(self, ids: np.ndarray, n: Tensor, sent: dict[str, Tensors], reported: Uplink) -> None:
        """The replies of a chunk, each looked at on its own before; of clients that were dropped any numbers."""
        common, addressed = self._algorithm.share(self._server, torch.from_numpy(ids).to(n.device))
        start = {name: addressed.get(name, common.get(name, {})) for name in sent}
        norms = distances(sent, start) if sent else torch.zeros(len(ids))
        self._norms |= dict(zip(ids.tolist(), norms.tolist(), strict=True))
        self._held.append((ids, n, sent, reported))

    def close(self) -> list[int]:
        """Gathers the replies that are taken; the ids of clients whose reply, or training, was not."""
        norms = {client: norm for client, norm in self._norms.items() if client not in self.dropped}
        limit = self._admission.limit(list(norms.values()), self._earlier)
        for client, norm in norms.items():
            if norm > limit:
                self.drop(client, f"it went {norm:.3g} from what it was sent, more than {limit:.3g}")
        for client, reason in self.dropped.items():
            log.warning("round %d: client %d is left out: %s", self._round, client, reason)
        inside = [norm for client, norm in norms.items() if client not in self.dropped]
        self.median = float(np.median(inside)) if inside else math.nan
        for ids, n, sent, reported in self._held:
            if (kept := ~np.isin(ids, list(self.dropped))).any():
                self._gather.add(ids[kept], *(some_rows(tree, kept) for tree in (n, sent, reported)))
        return list(self.dropped)


def some_rows(tree: Any, kept: np.ndarray) -> Any:
    """The clients of a chunk whose entry in `kept` [C] is true."""
    return tree_map(lambda t: t[torch.from_numpy(kept).to(t.device)], tree)
