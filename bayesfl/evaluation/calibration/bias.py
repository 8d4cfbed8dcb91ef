"""A bias on the logits of each client, fitted by the client alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.evaluation.calibration.steps import PerClient, changed, refuse_numbers
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs

_STEPS = 100
_HALVINGS = 30
_ENOUGH = 1e-10
"""Largest slope, in nats, at which Newton's steps end."""
_ROUNDING = 1e-13
"""Share of a loss that a step may seem to add to it, by floating-point error."""


@dataclass(frozen=True, kw_only=True)
class Bias(PerClient):
    """Add a vector b_j [O] to each client's logits, with prior N(0, I), for classes that are more
    frequent at one client than at others.

    b_j maximises sum_i log softmax(z_i + b)_{y_i} - |b|^2 / 2 over the client's examples, z_i the
    logits after the steps before. The objective is strictly concave; Newton's steps are halved
    until they improve it. Nothing is sent. A client without examples has b_j = 0.

    Under label skew it corrects a global model for each client's class frequencies; where clients
    are alike, the prior keeps b near 0.

    Args:
        split: The split that it is fitted to.

    Example:
        >>> clients = bf.data.label_groups("digits", clients=4, validation=0.2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1, evaluate_every=None)
        >>> local, rows = result.calibrate(bf.calibration.Bias()), clients.test
        >>> local.predict(rows).summary(rows)["nll"] < result.predict(rows).summary(rows)["nll"]
        True
    """

    split: str = "validation"

    def start(self, outputs: Outputs) -> Tensors:
        """Return an empty state.

        Raises:
            ValueError: What is predicted has no classes.
        """
        refuse_numbers(self, outputs)
        return {}

    def settle(self, state: Tensors, local: LocalPredictions) -> Tensors:
        """Return every client's b_j, [J, O]."""
        logits, labels, clients = local.labelled
        counts, owner = clients.counts.tolist(), clients.owner
        seen = clients.count(labels, logits.shape[-1])

        def loss(b: Tensor) -> Tensor:
            z = (logits + b[owner]).logsumexp(-1)
            return clients.sum(z) - (seen * b).sum(-1) + b.square().sum(-1) / 2

        b = torch.zeros_like(seen)
        now = loss(b)
        for _ in range(_STEPS):
            probs = (logits + b[owner]).softmax(-1)
            total = clients.sum(probs)
            slope = total - seen + b
            if not len(b) or float(slope.abs().max()) <= _ENOUGH:
                break
            products = torch.stack([p.T @ p for p in probs.split(counts)])
            curvature = torch.diag_embed(total + 1) - products
            step = torch.linalg.solve(curvature, slope.unsqueeze(-1)).squeeze(-1)
            then, most = loss(b - step), now + _ROUNDING * (1 + now.abs())
            for _ in range(_HALVINGS):
                worse = then > most
                if not worse.any():
                    break
                step = torch.where(worse.unsqueeze(-1), step / 2, step)
                then = loss(b - step)
            b, now = b - step, then
        return {"bias": b}

    def apply(self, state: Tensors, own: Tensors, local: LocalPredictions) -> Predictions:
        """Return predictions with softmax(log(probs) + b_j)."""
        return changed(local.predictions, local.logits + local.of_rows(own["bias"]))
