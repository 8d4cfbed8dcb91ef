"""Predictions of many clients, put together as they are made, in parts that pad little."""

import numpy as np
import torch

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.warning import warn
from bayesfl.data import ClientData
from bayesfl.data.outline import known_names
from bayesfl.evaluation.predictions import Predictions, broken
from bayesfl.evaluation.surveys import LocalPredictions, Parts

FEW, NUMBERS = 2**12, 2**22
"""Clients whose rows, padding included, are no more than the first stand in one part whatever their
sizes; the numbers of a part are at most the second, unless one client alone has more.
"""


class Collector:
    """A collector of clients' predictions, as they come chunk by chunk, on the CPU: row after row,
    so that nothing is padded.

    Args:
        split: The split that is predicted.
        names: The clients' names; none where they are not known.
        likelihood: The likelihood under which they are made; None where it is not known.
    """

    def __init__(
        self, split: ClientData, names: tuple[str, ...] = (), likelihood: Likelihood | None = None
    ) -> None:
        self._split, self._names, self._likelihood = split, names or None, likelihood
        self._seen = np.zeros(split.clients, bool)
        self._tensors: Tensors = {}

    def add(self, rows: np.ndarray, chunk: Tensors) -> None:
        """Add the predictions of the clients `rows`, {name: [C, N', ...]}; padding beyond a
        client's examples is ignored.
        """
        self._seen[rows] = True
        places = list(zip(self._split.offsets[rows], self._split.counts[rows], strict=True))
        for name, values in chunk.items():
            if name not in self._tensors:
                shape = (len(self._split.index), *values.shape[2:])
                self._tensors[name] = torch.full(shape, torch.nan, dtype=values.dtype)
            for (start, n), value in zip(places, values.cpu(), strict=True):
                self._tensors[name][start : start + n] = value[:n]

    @property
    def empty(self) -> bool:
        """Say whether no predictions were added."""
        return not self._tensors

    def parts(self) -> Parts:
        """Return the predictions of all clients in parts of clients with similar numbers of rows;
        clients that were not added have no rows.
        """
        split = self._split
        bad = broken(self._tensors, axes=1)
        bad &= torch.from_numpy(np.repeat(self._seen, split.counts))
        if bad.any():
            row = int(bad.nonzero()[0, 0])
            j = int(np.searchsorted(split.offsets + split.counts, row, side="right"))
            warn(
                f"the predictions for {int(bad.sum())} examples are not finite, the first that of "
                f"row {row - int(split.offsets[j])} of client "
                f"{known_names(self._names, split.clients)[j]!r}, so that measures are NaN; look "
                "at these inputs, or at the weights",
            )
        numbers = sum(t[:1].numel() for t in self._tensors.values())
        found = alike(split.counts, most=NUMBERS // max(1, numbers))
        return Parts(LocalPredictions(self.of(ids), ids) for ids in found)

    def of(self, ids: np.ndarray) -> Predictions:
        """Return the predictions of the clients `ids` [C], padded to the longest."""
        labels, inside = (t.cpu() for t in self._split.select(ids.tolist()).padded_labels())
        rows = torch.from_numpy(self._split.offsets[ids])[:, None] + torch.arange(inside.shape[1])
        mask = inside & torch.from_numpy(self._seen[ids])[:, None]
        found: Tensors = {}
        for name, t in self._tensors.items():
            found[name] = t.new_full((*mask.shape, *t.shape[1:]), torch.nan)
            found[name][mask] = t[rows[mask]]
        return Predictions(
            mask=mask,
            labels=labels,
            names=None if self._names is None else tuple(self._names[j] for j in ids.tolist()),
            likelihood=self._likelihood,
            **found,  # pyright: ignore[reportArgumentType] (tensors alone)
        )


def alike(counts: np.ndarray, *, most: int) -> list[np.ndarray]:
    """Return the clients' ids in groups of similar numbers of rows: in a group at most as many rows
    are padding as are examples, where these are more than `FEW` together.

    Args:
        counts: The clients' numbers of rows, [J].
        most: Number of rows of a group, padding included; a client that has more stands alone.

    Example:
        >>> import numpy as np
        >>> from bayesfl.evaluation.collecting import alike
        >>> [ids.tolist() for ids in alike(np.array([9000, 10, 20, 30]), most=10**6)]
        [[0, 3], [1, 2]]
    """
    order = np.argsort(-counts, kind="stable")
    groups, start, held = [], 0, 0
    for end, n in enumerate(counts[order].tolist()):
        padded = int(counts[order[start]]) * (end - start + 1)
        if end > start and padded > min(most, max(2 * (held + n), FEW)):
            groups.append(np.sort(order[start:end]))
            start, held = end, 0
        held += n
    return [*groups, np.sort(order[start:])]
