"""Measures of clients, and of all clients' examples together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bayesfl.data.names import check_names
from bayesfl.evaluation.metrics.clients import Segments


@dataclass(frozen=True)
class Measured:
    """Hold measures of clients, their means over clients, and the measures of all examples pooled.

    Args:
        examples: Number of each client's examples, [J].
        columns: Measures of each client, [J]; NaN for a client without a value.
        means: Their means over clients with a value; NaN if a prediction is not finite.
        pooled: Measures of all clients' examples pooled.
    """

    examples: Tensor
    columns: Mapping[str, Tensor]
    means: Mapping[str, float]
    pooled: Mapping[str, float]

    @classmethod
    def of(cls, clients: Segments, values: Mapping[str, Tensor]) -> "Measured":
        """Average values of examples, [R] each in float64; those of `rmse` are squares. A NaN makes
        the averages that include it NaN.
        """
        columns = {name: rooted(name, clients.mean(t)) for name, t in values.items()}
        there = clients.counts > 0
        return cls(
            clients.counts,
            columns,
            {name: float(t[there].mean()) for name, t in columns.items()},
            {name: float(rooted(name, t.mean())) for name, t in values.items()},
        )

    def beside(self, clients: Segments, shares: Mapping[str, tuple[Tensor, Tensor]]) -> "Measured":
        """Return the same with averages of more values, {name: (values, which examples count)}, [R]
        each.
        """
        columns = {name: clients.mean(*pair) for name, pair in shares.items()}
        pooled = {name: float(t[among].double().mean()) for name, (t, among) in shares.items()}
        return Measured(
            self.examples,
            {**self.columns, **columns},
            {**self.means, **{name: float(t.nanmean()) for name, t in columns.items()}},
            {**self.pooled, **pooled},
        )

    def summary(self) -> dict[str, float]:
        """Return each measure's mean over clients and, with the prefix `pooled_`, its value for all
        clients' examples together.
        """
        return {**self.means, **{f"pooled_{name}": value for name, value in self.pooled.items()}}

    def table(self, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Return the measures as columns [J], after `client`, names or numbers, and `examples`.

        Args:
            names: One name for each client; None for their numbers.

        Raises:
            TypeError: `names` is not a list.
            ValueError: The number of names differs from the number of clients.
        """
        check_names(names, len(self.examples))
        known = np.arange(len(self.examples)) if names is None else np.array(names)
        found = {name: values.numpy() for name, values in self.columns.items()}
        return {"client": known, "examples": self.examples.numpy(), **found}


def rooted(name: str, mean: Tensor) -> Tensor:
    """Return a mean, or its root if the name is `rmse`, whose mean is of squares."""
    return mean.sqrt() if name == "rmse" else mean
