"""The number that a method's predictor tunes, such as FedSI's predictive precision: a survey of the
clients' validation data.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.protocols import Predictor, Tensors
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients.local import Done, Local
from bayesfl.federation.clients.predict import fitted_of, of_fitted, rows_of
from bayesfl.likelihoods import Poisson
from bayesfl.posteriors.linearised import nll_of_predictive
from bayesfl.posteriors.prior_precision import largest_alike


@dataclass(frozen=True)
class Candidates:
    """Hold the losses of clients' validation examples under each candidate of a predictor.

    Args:
        losses: Negative log likelihoods under each candidate, [n_j, K] in nats for each client;
            infinite or NaN if a candidate fails.
        ids: The clients' numbers, [J].
    """

    losses: Sequence[Tensor]
    ids: np.ndarray


@dataclass(frozen=True)
class Tuning:
    """Choose the candidate of a predictor's grid that best fits the validation data of all clients.

    Clients send sums over their examples: of the negative log likelihoods under each candidate, and
    of their pairwise products, for a comparison of candidates example by example. Among the
    candidates within one standard error of the difference from the best, the largest is chosen, see
    `largest_alike`.

    Args:
        predictor: The method's predictor, whose grid holds K candidates in ascending order.
    """

    predictor: Predictor
    split = "validation"
    reads = "candidates"
    sums = "in nats, of each candidate for the tuned number"

    def start(self, outputs: Outputs) -> Tensors:
        """Return an empty state."""
        return {}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the sums, of the number of examples and of each candidate's number
        of failures.
        """
        count = len(self.predictor.grid)
        return {"nll": (count,), "products": (count, count), "n_examples": (), "n_broken": (count,)}

    def answer(self, state: Tensors, local: Candidates) -> Tensors:
        """Return the clients' sums; 0 for a candidate that fails for one of a client's examples."""
        n_broken = [(~losses.isfinite()).sum(0) for losses in local.losses]
        works = [t.masked_fill(bad > 0, 0) for t, bad in zip(local.losses, n_broken, strict=True)]
        return {
            "nll": torch.stack([losses.sum(0) for losses in works]),
            "products": torch.stack([losses.T @ losses for losses in works]),
            "n_examples": torch.tensor([len(losses) for losses in works]),
            "n_broken": torch.stack(n_broken),
        }

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the chosen candidate, `value`; warn if it is at an edge of the grid.

        Raises:
            ValueError: No candidate gives finite predictions.
        """
        grid, examples = self.predictor.grid, int(total["n_examples"])
        losses = total["nll"].where(total["n_broken"] == 0, torch.inf)
        best = largest_alike(losses, total["products"], examples)
        # Nothing is below 0; at a precision of 1e4, predictions are usually close to the MAP's.
        if best in (0, len(grid) - 1) and 0 < grid[best] < 1e4:
            warn(
                f"{self.predictor.tunes} is at the {'upper' if best else 'lower'} edge of its "
                f"grid, {grid[best]:g}: the validation data do not bound it; use more validation "
                "rows, or pass a number",
            )
        return {"value": torch.tensor(grid[best], dtype=torch.float64)}, True


def candidates(
    local: Local,
    done: Done,
    validation: ClientData,
    *,
    round: int,
    known: Mapping[str, Tensors] = {},
) -> Candidates:
    """Return the losses of a chunk's validation data under the candidates of the grid, predicted
    with the method's defaults.

    Args:
        local: The clients' local work.
        done: The outcome of local work; the clients predict with its views.
        validation: Their validation data.
        round: Number of rounds done; it selects the random draws.
        known: The last states of the predictor's surveys, by their names.
    """
    algorithm: Any = local.algorithm
    grid, losses = algorithm.predictor.grid, []
    counted = isinstance(algorithm.likelihood, Poisson)
    for ids, fitted in fitted_of(local, done, known):
        counts = validation.counts[ids]
        own = [validation.rows(client) for client in ids]
        y = validation.y[torch.cat(own)]
        every = torch.full((len(y), len(grid)), torch.inf, dtype=torch.float64)
        with contextlib.suppress(torch.linalg.LinAlgError):
            about = {"client": int(ids[0]), "seed": local.seed, "round": round}
            rows = rows_of(validation, ids)
            found = of_fitted(algorithm, fitted, done.views["n"], rows, grid, **about)
            inside = torch.from_numpy(np.arange(counts.max()) < counts[:, None]).to(y.device)
            each = {name: t[:, inside].flatten(0, 1) for name, t in found.items()}
            if len(y):
                nll = nll_of_predictive(each, torch.cat([y] * len(grid)), counts=counted)
                every = nll.view(len(grid), len(y)).T.cpu().double()
        losses += every.split(counts.tolist())
    return Candidates(losses, done.ids)


def check_tunable(
    algorithm: Algorithm,
    there: object,
    why: str = "the data have none: make them with validation=0.1",
) -> None:
    """Check that there are validation data if the method's predictor tunes a number on them.

    Args:
        algorithm: The method.
        there: Whether there are validation data.
        why: Reason for their absence, for the message.

    Raises:
        ValueError: The predictor tunes a number and there are no validation data.
    """
    if (together(algorithm) or getattr(algorithm.predictor, "validates", False)) and not there:
        tunes = "" if algorithm.predictor is None else algorithm.predictor.tunes
        raise ValueError(f"{tunes} is chosen on validation data, and {why}, or pass a number")


def tunable(data: FederatedData) -> bool:
    """Return whether there are validation data."""
    return "validation" in data.splits and bool(data.validation.counts.any())


def together(algorithm: Algorithm) -> bool:
    """Return whether the method's predictor has a number that is chosen on all clients' validation
    data together.
    """
    return algorithm.predictor is not None and len(algorithm.predictor.grid) > 1
