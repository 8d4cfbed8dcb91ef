"""Collection of the predictions of many clients, chunk by chunk."""

import numpy as np
import torch

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.data import ClientData
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions


class Collector:
    """Collect clients' predictions chunk by chunk on the CPU, one client's rows after another's,
    without padding.

    Args:
        split: The split that is predicted.
        names: The clients' names; empty if unknown.
        likelihood: The likelihood of the predictions; None if unknown.
    """

    def __init__(
        self, split: ClientData, names: tuple[str, ...] = (), likelihood: Likelihood | None = None
    ) -> None:
        self._split, self._names, self._likelihood = split, names or None, likelihood
        self._seen = np.zeros(split.clients, bool)
        self._tensors: Tensors = {}

    def add(self, ids: np.ndarray, chunk: Tensors) -> None:
        """Add the predictions of the clients `ids`, {name: [C, N', ...]}; padding beyond a client's
        examples is ignored.
        """
        self._seen[ids] = True
        places = list(zip(self._split.offsets[ids], self._split.counts[ids], strict=True))
        for name, values in chunk.items():
            if name not in self._tensors:
                shape = (len(self._split.index), *values.shape[2:])
                self._tensors[name] = torch.full(shape, torch.nan, dtype=values.dtype)
            for (start, n), value in zip(places, values.cpu(), strict=True):
                self._tensors[name][start : start + n] = value[:n]

    def found(self, *, seed: int = 0, round: int = 0) -> LocalPredictions:
        """Return the predictions of all clients; clients that were not added have no rows.

        Args:
            seed: The run's seed.
            round: Number of rounds done.
        """
        split, ids = self._split, np.arange(self._split.clients)
        inside = torch.from_numpy(np.repeat(self._seen, split.counts))
        tensors = {**self._tensors, "labels": split.y[split.index].cpu()}
        if not inside.all():
            tensors = {name: t[inside] for name, t in tensors.items()}
        clients = Segments(torch.from_numpy(split.counts * self._seen))
        rows = Predictions(
            mask=torch.ones(len(tensors["labels"]), dtype=torch.bool),
            names=self._names,
            likelihood=self._likelihood,
            **tensors,  # pyright: ignore[reportArgumentType] (tensors alone)
        )
        return LocalPredictions(rows, clients, ids, seed, round)
