"""The choice of each client between its own model and the server's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from bayesfl.base.options import PROBABILITY, declared
from bayesfl.base.protocols import Tensors
from bayesfl.evaluation.predictions import Predictions, present
from bayesfl.evaluation.surveys import LocalPredictions, Outputs


@dataclass(frozen=True, kw_only=True)
@declared
class Choice:
    """Let each client predict with the server's model where that is better than its own, by an
    exact test on its own rows.

    Rows count on which exactly one of the two is right; of numbers, on which one is nearer. If
    neither is better, each wins such a row with probability 1/2, so a client takes the server's
    model if this number of its wins has a probability of at most `delta` (McNemar, Psychometrika
    12, 1947, in its exact form). Otherwise, and without rows, it keeps its own. Nothing is sent.

    It comes before other steps, which are then fitted to the predictions chosen. The method needs a
    server's model beside clients' own, as fine-tuning or a personal block gives it.

    Args:
        delta: Probability with which a client may take the server's model although that is no
            better, in (0, 1).
        split: The split on which the two are compared, which neither was trained on.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, validation=0.2)
        >>> method = bf.algorithms.ditto(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> (fitted,) = result.calibrate(bf.calibration.Choice()).steps
        >>> list(fitted.own)  # who takes the server's model, and on how many rows it wins and loses
        ['shared', 'better', 'worse']
    """

    delta: Annotated[float, PROBABILITY] = 0.05
    split: str = "validation"
    compares: ClassVar[bool] = True

    def start(self, outputs: Outputs) -> Tensors:
        """Return an empty state."""
        return {}

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return nothing, as nothing is asked."""
        return {}

    def answer(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return nothing."""
        return {}

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the state, which is the last."""
        return state, True

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return which clients take the server's model, `shared`, and on how many rows that is
        better and worse, [J] each.
        """
        from scipy.stats import binom

        own, shared = _losses(local, local.predictions), _losses(local, _shared(local))
        clients = local.places.clients
        better, worse = (clients.sum(won).long() for won in (shared < own, shared > own))
        p = torch.from_numpy(binom.sf((better - 1).numpy(), (better + worse).numpy(), 0.5))
        return {"shared": p <= self.delta, "better": better, "worse": worse}

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return the predictions that clients have chosen."""
        given, other = local.predictions, _shared(local)
        found: dict[str, Any] = {}
        takes = own["shared"][local.clients.owner]
        for name, t in given.tensors.items():
            if name not in ("mask", "labels"):
                theirs = other.tensors.get(name, torch.full_like(t, torch.nan)).to(t)
                found[name] = torch.where(takes.reshape(-1, *[1] * (t.dim() - 1)), theirs, t)
        return replace(given, **found)


def _shared(local: LocalPredictions) -> Predictions:
    """Return the predictions by the server's model.

    Raises:
        ValueError: There are none.
    """
    if local.shared is None:
        raise ValueError(
            "these predictions come without those of the server's model, "
            "`LocalPredictions.shared`, which Choice compares; result.calibrate makes both"
        )
    return local.shared


def _losses(local: LocalPredictions, predictions: Predictions) -> Tensor:
    """Return how bad each row's prediction is, [M]: 1 if it is wrong, or how far it is."""
    if predictions.probs is not None:
        other = replace(local, predictions=replace(predictions, labels=local.labels))
        logits, labels, _ = other.labelled
        return (logits.argmax(-1) != labels).double()
    centre = present(predictions.mean).double()
    return (local.labels.reshape(centre.shape).double() - centre).square().sum(-1)
