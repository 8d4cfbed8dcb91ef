"""Predictions of a linearised network: from a Gaussian over its outputs to what is predicted, in closed form or by draws."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.likelihoods import Bernoulli, Gaussian


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

    Raises:
        ValueError: The noise has another shape, or there are no draws.
    """
    if noise is not None and (noise.dim() != 3 or not len(noise) or noise.shape[1:] != mean.shape):
        wanted = ", ".join(map(str, mean.shape))
        raise ValueError(f"noise must be [S, {wanted}], standard normals for one draw or more of the outputs, got {list(noise.shape)}")
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
    """Negative log density [N] in nats of labels or targets `y` [N] (or [N, O]) under what `predictive` gives.

    Raises:
        ValueError: There are fewer or more of them than predictions, or a label is no class.
    """
    if "mean" in found:
        residual = as_targets(y, found["mean"]) - found["mean"]
        return 0.5 * (residual.square() / found["variance"] + (2 * math.pi * found["variance"]).log()).sum(-1)
    probs = found["probs"]
    probs = probs.gather(-1, as_labels(y, *probs.shape).to(probs.device)[:, None]).squeeze(-1)
    return -probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def as_targets(y: Tensor, like: Tensor) -> Tensor:
    """Targets [N] (where O is 1) or [N, O] in the shape [N, O], type and place of `like`.

    Raises:
        ValueError: Their shape is another.
    """
    if y.shape != like.shape and y.shape != like.shape[:1] + (() if like.shape[1] == 1 else like.shape[1:]):
        raise ValueError(f"targets must be one for each of the {len(like)} inputs, of shape {list(like.shape)}, got {list(y.shape)}")
    return y.reshape(like.shape).to(like)


def as_labels(y: Tensor, count: int, classes: int) -> Tensor:
    """Labels [N], or [N, 1], as whole numbers [N].

    Raises:
        ValueError: There are not `count`, or one is not a class from 0 to `classes` - 1.
    """
    if y.shape not in ((count,), (count, 1)):
        raise ValueError(f"labels must be one for each of the {count} inputs, got shape {list(y.shape)}")
    labels = y.reshape(-1).long()
    bad = y.reshape(-1)[(labels != y.reshape(-1)) | (labels < 0) | (labels >= classes)]
    if len(bad):
        raise ValueError(f"labels must be classes from 0 to {classes - 1}, got {bad[0].item()} ({len(bad)} of {count})")
    return labels
