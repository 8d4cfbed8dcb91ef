"""Measures of clients, and the sums by which those of all clients' examples together are made, part
of the clients by part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.data.names import check_names
from bayesfl.evaluation.metrics.clients import bottom_decile
from bayesfl.evaluation.metrics.reliability import error_in_bins


@dataclass(frozen=True)
class Measured:
    """Hold measures of some clients, with sums that add up to those of all clients' examples.

    Args:
        examples: Number of each client's examples, [C].
        columns: Measures of each client, [C]; NaN where one has no value.
        broken: Which clients have predictions that are not finite, [C] bool, of each measure whose
            mean over clients is told.
        sums: The sum over all these clients' examples and their number, [2]; as `bins` what
            `binned` returns, [3, bins]. NaN if a prediction is not finite.
    """

    examples: Tensor
    columns: dict[str, Tensor]
    broken: dict[str, Tensor]
    sums: dict[str, Tensor]

    @classmethod
    def joined(cls, order: Tensor, parts: "Sequence[Measured]") -> "Measured":
        """Join what was measured of parts of the clients, in an order of theirs, [J]."""
        each = [(one.examples, one.columns, one.broken) for one in parts]
        sums = tree_map(lambda *t: torch.stack(t).sum(0), *[one.sums for one in parts])
        examples, columns, broken = tree_map(lambda *t: torch.cat(t)[order], *each)
        return cls(examples, columns, broken, sums)

    def beside(self, shares: Mapping[str, tuple[Tensor, Tensor]]) -> "Measured":
        """Return this with the shares of examples that have something, by name: values and which
        examples count, [C, N] each.
        """
        columns = {name: share(*pair) for name, pair in shares.items()}
        nobody = {name: torch.zeros(len(t), dtype=torch.bool) for name, t in columns.items()}
        sums = {name: totals(t, among) for name, (t, among) in shares.items()}
        return Measured(
            self.examples, self.columns | columns, self.broken | nobody, self.sums | sums
        )

    def summary(self) -> dict[str, float]:
        """Return each measure's mean over clients, and with the prefix `pooled_` that of all
        clients' examples together.
        """
        found = {
            name: math.nan if broken.any() else float(self.columns[name].nanmean())
            for name, broken in self.broken.items()
        }
        pooled = {name: average(name, *t) for name, t in self.sums.items() if name != "bins"}
        if (bins := self.sums.get("bins")) is not None:
            lowest = bottom_decile(self.columns["accuracy"])
            found["accuracy_decile"] = math.nan if self.broken["accuracy"].any() else lowest
            count, hits, confidence = bins
            pooled["ece"] = error_in_bins(count, hits, confidence)
            pooled["mce"] = error_in_bins(count, hits, confidence, "max")
        return found | {f"pooled_{name}": float(value) for name, value in pooled.items()}

    def table(self, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Return the measures as columns [C], after `client`, names or numbers, and `examples`.

        Args:
            names: One name for each client; None for their numbers.

        Raises:
            TypeError: `names` is no list.
            ValueError: There is another number of names.
        """
        check_names(names, len(self.examples))
        known = np.arange(len(self.examples)) if names is None else np.array(names)
        found = {name: values.numpy() for name, values in self.columns.items()}
        return {"client": known, "examples": self.examples.cpu().numpy(), **found}


def average(name: str, total: Tensor, count: Tensor) -> Tensor:
    """Return a mean by its sum, or the root of one that is a mean of squares, as its name says."""
    return (total / count).sqrt() if name == "rmse" else total / count


def totals(values: Tensor, among: Tensor, *, broken: bool = False) -> Tensor:
    """Return the sum of what counts of values [J, N], and its number, [2] in float64; NaN if
    `broken`.
    """
    found = torch.where(among, values.double(), 0.0).flatten()[None].sum(-1)[0]
    return torch.stack([found, among.sum().double()]) * (math.nan if broken else 1.0)


def share(values: Tensor, among: Tensor) -> Tensor:
    """Return means over the last axis of what counts, in float64; NaN where nothing does."""
    return torch.where(among, values.double(), 0.0).sum(-1) / among.sum(-1)
