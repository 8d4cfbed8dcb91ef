"""Predictions of a linearised network: from a Gaussian over its outputs to the predictive
distribution, in closed form or by draws.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.options import declared
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.curvature.roots import check_known
from bayesfl.curvature.spectral import Spectral
from bayesfl.likelihoods import Bernoulli, Gaussian, Poisson

Link = Literal["contrasts", "per_class"]
"""Closed form from a Gaussian over the logits to probabilities, see `predictive`."""


def kappa(variance: Tensor) -> Tensor:
    """Return the shrinkage factor of a logit with this variance, (1 + pi variance / 8)^(-1/2).

    It is the probit approximation of MacKay (1992), "The evidence framework", eq. 10.
    """
    return (1 + math.pi / 8 * variance.clamp_min(0)).rsqrt()


def symmetric_root(covariance: Tensor) -> Tensor:
    """Return the symmetric root R [..., O, O] of a covariance, R R.

    Eigenvalues that are negative by rounding count as 0, for example for centred logits. Unlike a
    triangular factor, or eigenvectors alone, the root is stable under rounding of the covariance.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT


def draws(mean: Tensor, covariance: Tensor | Spectral, noise: Tensor) -> Tensor:
    """Draw outputs [S, N, O] of N(mean [N, O], covariance [N, O, O]) from standard normals [S, N,
    O].
    """
    if isinstance(covariance, Spectral):
        return mean + covariance.rooted(noise.to(mean))
    return mean + torch.einsum("nop,snp->sno", symmetric_root(covariance), noise.to(mean))


def variances(covariance: Tensor | Spectral) -> Tensor:
    """Return the diagonals [N, O] of covariances [N, O, O]."""
    if isinstance(covariance, Spectral):
        return covariance.variances()
    return covariance.diagonal(dim1=-2, dim2=-1)


def contrasts(mean: Tensor, covariance: Tensor | Spectral) -> tuple[Tensor, Tensor]:
    """Return the difference of the largest logit and each logit, f_w - f_o [N, O], and the variance
    of this difference [N, O].

    They do not change if a number, or a random variable, is added to all logits of an input.
    """
    most = mean.argmax(-1, keepdim=True)
    own = variances(covariance)
    if isinstance(covariance, Spectral):
        across = covariance.rows(most.squeeze(-1))
    else:
        across = covariance.gather(
            -2, most.unsqueeze(-1).expand(*most.shape, covariance.shape[-1])
        ).squeeze(-2)
    return mean.gather(-1, most) - mean, (own.gather(-1, most) + own - 2 * across).clamp_min(0)


@declared
def predictive(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor | Spectral,
    noise: Tensor | None = None,
    *,
    link: Link = "contrasts",
) -> Tensors:
    """Compute the predictive distribution if the outputs are N(mean [N, O], covariance [N, O, O]).

    For classes, without noise, `probs` [N, O] is given by one of two links:

    - `contrasts`: proportional to $exp(-kappa(s_o^2) (f_w - f_o))$, where w is the class of the
      largest logit and $s_o^2$ the variance of $f_w - f_o$. That class stays the most probable one,
      and for two classes the probabilities are the Bernoulli probit's. With $p_0 = softmax(f)$,
      `aleatoric` [N] is the entropy of $p_0$, and `epistemic` [N] the excess of the entropy of
      `probs` over it, at least 0; both in nats.
    - `per_class`: $softmax(kappa f)$, each logit shrunk by its own variance, as in the papers on
      linearised networks. The most probable class may differ from that without uncertainty.
      `epistemic` is NaN, because this form does not split the uncertainty.

    With standard normals `noise` [S, N, O]: `probs`, the mean of the probabilities over draws of
    the outputs; `epistemic` [N], the mutual information of label and weights in nats; and
    `aleatoric` [N], the mean entropy of the draws in nats.

    For targets, exactly: `mean` and `variance` [N, O], including noise of the data, and `epistemic`
    [N], the variance of the outputs summed over O. For counts, whose rates $exp(f)$ are log-normal,
    the mean is $exp(f + s^2 / 2)$, and `epistemic` the variance of the rates, $expm1(s^2) mean^2$
    summed over O; `variance` is the sum of the mean and this variance.

    Raises:
        ValueError: `noise` has another shape, or S is 0.
        TypeError: The predictive distribution of `likelihood` is not known here.
    """
    check_known(likelihood)
    spread = variances(covariance)
    if isinstance(likelihood, Gaussian):
        return {"mean": mean, "variance": spread + likelihood.known**2, "epistemic": spread.sum(-1)}
    if isinstance(likelihood, Poisson):
        rates = (mean + 0.5 * spread).exp().clamp_min(torch.finfo(mean.dtype).tiny)
        between = spread.expm1() * rates.square()
        return {"mean": rates, "variance": rates + between, "epistemic": between.sum(-1)}
    if noise is not None:
        found = likelihood.predictive(draws(mean, covariance, noise))
        return found | {
            "aleatoric": torch.special.entr(found["probs"]).sum(-1) - found["epistemic"]
        }
    # The logits of two classes are 0 and f, and f is shrunk under either link.
    two = isinstance(likelihood, Bernoulli)
    if two or link == "per_class":
        shrunk = mean * kappa(spread)
    else:
        below, variance = contrasts(mean, covariance)
        shrunk = -below * kappa(variance)
    probs = _of_logits(shrunk, two=two)
    if link == "per_class":
        return {"probs": probs, "epistemic": torch.full_like(probs[..., 0], torch.nan)}
    aleatoric = torch.special.entr(_of_logits(mean, two=two)).sum(-1)
    return {
        "probs": probs,
        "epistemic": (torch.special.entr(probs).sum(-1) - aleatoric).clamp_min(0),
        "aleatoric": aleatoric,
    }


def _of_logits(logits: Tensor, *, two: bool) -> Tensor:
    return torch.cat([F.sigmoid(-logits), F.sigmoid(logits)], -1) if two else logits.softmax(-1)


def nll_of_predictive(found: Tensors, y: Tensor, *, counts: bool = False) -> Tensor:
    """Compute the negative log density [N] in nats of labels or targets `y` [N] (or [N, O]) under
    the result of `predictive`.

    Args:
        found: The result of `predictive`.
        y: Labels or targets.
        counts: Whether targets are counts, under negative binomial distributions with these
            moments instead of normal ones.

    Raises:
        ValueError: `y` has another length than the predictions, or a label is not a class.
    """
    if counts:
        return _nll_of_counts(found["mean"], found["variance"], as_targets(y, found["mean"]))
    if "mean" in found:
        residual = as_targets(y, found["mean"]) - found["mean"]
        return 0.5 * (
            residual.square() / found["variance"] + (2 * math.pi * found["variance"]).log()
        ).sum(-1)
    probs = found["probs"]
    probs = probs.gather(-1, as_labels(y, *probs.shape).to(probs.device)[:, None]).squeeze(-1)
    return -probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _nll_of_counts(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Compute the negative log probability [N] in nats of counts `y` [N, O], summed over O, under
    negative binomial distributions with these moments; Poisson's if the variance is the mean.
    """
    excess = (variance - mean).clamp_min(0)
    poisson = mean - y * mean.log() + (y + 1).lgamma()
    size = mean.square() / excess.clamp_min(torch.finfo(mean.dtype).tiny)
    binomial = (
        size.lgamma()
        + (y + 1).lgamma()
        - (y + size).lgamma()
        + size * (mean / size).log1p()
        + y * (size / mean).log1p()
    )
    # For larger sizes the difference of log gamma functions is only rounding error.
    return torch.where(excess > 1e-7 * mean, binomial, poisson).sum(-1)


def as_targets(y: Tensor, like: Tensor) -> Tensor:
    """Convert targets [N] (if O is 1) or [N, O] to the shape [N, O], dtype and device of `like`.

    Raises:
        ValueError: `y` has another shape.
    """
    if y.shape != like.shape and y.shape != like.shape[:1] + (
        () if like.shape[1] == 1 else like.shape[1:]
    ):
        raise ValueError(
            f"targets must be one for each of the {len(like)} inputs, of shape {list(like.shape)}, "
            f"got {list(y.shape)}"
        )
    return y.reshape(like.shape).to(like)


def as_labels(y: Tensor, count: int, classes: int) -> Tensor:
    """Convert labels [N], or [N, 1], to whole numbers [N].

    Raises:
        ValueError: `y` does not have `count` labels, or one is not a class from 0 to `classes` - 1.
    """
    if y.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"labels must be one for each of the {count} inputs, got shape {list(y.shape)}"
        )
    labels = y.reshape(-1).long()
    bad = y.reshape(-1)[(labels != y.reshape(-1)) | (labels < 0) | (labels >= classes)]
    if len(bad):
        raise ValueError(
            f"labels must be classes from 0 to {classes - 1}, got {bad[0].item()} ({len(bad)} of "
            f"{count})"
        )
    return labels
