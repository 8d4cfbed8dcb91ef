"""Predictions of a linearised network: from a Gaussian over its outputs to the predictive distribution, in closed form or by draws."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.likelihoods import Bernoulli, Gaussian


def kappa(variance: Tensor) -> Tensor:
    """Return the factor by which a logit of this variance shrinks, (1 + pi variance / 8)^(-1/2).

    It is the probit approximation of MacKay (1992), "The evidence framework", eq. 10.
    """
    return (1 + math.pi / 8 * variance).rsqrt()


def root(covariance: Tensor) -> Tensor:
    """Return the symmetric root R [..., O, O] of a covariance, R R.

    Eigenvalues that rounding made negative count as 0, as of centred logits. Unlike a triangular factor, or eigenvectors alone, it hardly
    changes where the covariance changes by rounding.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT


def draws(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Draw outputs [S, N, O] of N(mean [N, O], covariance [N, O, O]) from standard normals [S, N, O]."""
    return mean + torch.einsum("nop,snp->sno", root(covariance), noise.to(mean))


def predictive(likelihood: Likelihood, mean: Tensor, covariance: Tensor, noise: Tensor | None = None) -> Tensors:
    """Compute the predictive distribution where the outputs are N(mean [N, O], covariance [N, O, O]).

    For classes, without noise: `probs` [N, O], softmax(kappa f), each logit shrunk by its own variance; `epistemic` is NaN, as the closed
    form does not split the uncertainty. With standard normals `noise` [S, N, O]: `probs`, the mean of the probabilities over draws of the
    outputs; `epistemic` [N], the mutual information of label and weights in nats; and `aleatoric` [N], the mean entropy of the draws in
    nats.

    For targets, exactly: `mean` and `variance` [N, O], noise of the data included, and `epistemic` [N], the variance of the outputs summed
    over O.

    Raises:
        ValueError: `noise` has another shape, or S is 0.
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
    """Compute the negative log density [N] in nats of labels or targets `y` [N] (or [N, O]) under the result of `predictive`.

    Raises:
        ValueError: `y` has another length than the predictions, or a label is no class.
    """
    if "mean" in found:
        residual = as_targets(y, found["mean"]) - found["mean"]
        return 0.5 * (residual.square() / found["variance"] + (2 * math.pi * found["variance"]).log()).sum(-1)
    probs = found["probs"]
    probs = probs.gather(-1, as_labels(y, *probs.shape).to(probs.device)[:, None]).squeeze(-1)
    return -probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def as_targets(y: Tensor, like: Tensor) -> Tensor:
    """Convert targets [N] (where O is 1) or [N, O] to the shape [N, O], dtype and device of `like`.

    Raises:
        ValueError: `y` has another shape.
    """
    if y.shape != like.shape and y.shape != like.shape[:1] + (() if like.shape[1] == 1 else like.shape[1:]):
        raise ValueError(f"targets must be one for each of the {len(like)} inputs, of shape {list(like.shape)}, got {list(y.shape)}")
    return y.reshape(like.shape).to(like)


def as_labels(y: Tensor, count: int, classes: int) -> Tensor:
    """Convert labels [N], or [N, 1], to whole numbers [N].

    Raises:
        ValueError: `y` does not have `count` labels, or one is not a class from 0 to `classes` - 1.
    """
    if y.shape not in ((count,), (count, 1)):
        raise ValueError(f"labels must be one for each of the {count} inputs, got shape {list(y.shape)}")
    labels = y.reshape(-1).long()
    bad = y.reshape(-1)[(labels != y.reshape(-1)) | (labels < 0) | (labels >= classes)]
    if len(bad):
        raise ValueError(f"labels must be classes from 0 to {classes - 1}, got {bad[0].item()} ({len(bad)} of {count})")
    return labels
