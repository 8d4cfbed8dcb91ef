"""Predictions of a linearised network: from a Gaussian over its outputs to what is predicted, in closed form or by draws."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.likelihood import Bernoulli, Gaussian
from bayesfl.protocols import Likelihood, Tensors


def kappa(variance: Tensor) -> Tensor:
    """By how much a logit of this variance shrinks, (1 + pi variance / 8)^(-1/2); MacKay (1992), "The evidence framework", eq. 10."""
    return (1 + math.pi / 8 * variance).rsqrt()


def root(covariance: Tensor) -> Tensor:
    """A factor R [..., O, O] with R R' the nearest covariance; singular ones (centred logits) are fine, rounding below 0 is cut."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def draws(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Outputs [S, N, O] of N(mean [N, O], covariance [N, O, O]) from standard normals [S, N, O]."""
    return mean + torch.einsum("nop,snp->sno", root(covariance), noise.to(mean))


def predictive(likelihood: Likelihood, mean: Tensor, covariance: Tensor, noise: Tensor | None = None) -> Tensors:
    """What is predicted where the outputs are N(mean [N, O], covariance [N, O, O]).

    Classes, without noise: `probs` [N, O], softmax(kappa f), each logit shrunk by its own variance (no parts of uncertainty: the closed
    form has the mean only, so `epistemic` is NaN). With standard normals [S, N, O]: the mean of the probabilities over draws of the
    outputs, `epistemic` [N] the mutual information of label and weights in nats, and `aleatoric` [N] the mean entropy that is left.

    Targets, exactly: `mean` and `variance` [N, O], noise of the data included, `epistemic` [N] the variance of the means.
    """
    spread = covariance.diagonal(dim1=-2, dim2=-1)
    if isinstance(likelihood, Gaussian):
        return {"mean": mean, "variance": spread + likelihood.scale**2, "epistemic": spread.sum(-1)}
    if noise is not None:
        found = likelihood.predictive(draws(mean, covariance, noise))
        return found | {"aleatoric": torch.special.entr(found["probs"]).sum(-1) - found["epistemic"]}
    shrunk = mean * kappa(spread)
    probs = torch.cat([F.sigmoid(-shrunk), F.sigmoid(shrunk)], -1) if isinstance(likelihood, Bernoulli) else shrunk.softmax(-1)
    return {"probs": probs, "epistemic": torch.full_like(probs[..., 0], torch.nan)}


def nll(found: Tensors, y: Tensor) -> Tensor:
    """Negative log density [N] in nats of labels or targets `y` [N] (or [N, O]) under what `predictive` gives."""
    if "mean" in found:
        residual = y.view(found["mean"].shape).to(found["mean"]) - found["mean"]
        return 0.5 * (residual.square() / found["variance"] + (2 * math.pi * found["variance"]).log()).sum(-1)
    probs = found["probs"].gather(-1, y.to(found["probs"].device).long().view(-1, 1)).squeeze(-1)
    return -probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
