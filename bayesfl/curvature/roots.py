"""The curvature Lambda of a likelihood in the network's outputs: exact factors R with
$Lambda = R R'$, its diagonal, and its sum over examples.
"""

from functools import cache

import torch
from torch import Tensor

from bayesfl.base.protocols import Likelihood
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian, Poisson


def check_known(likelihood: Likelihood) -> None:
    """Check that the curvature and the predictive distribution of a likelihood are known here, and
    that it overrides neither.

    Raises:
        TypeError: The likelihood is unknown, or a subclass with its own distribution.
    """
    kinds = (Categorical, Bernoulli, Gaussian, Poisson)
    known = (kind for kind in kinds if isinstance(likelihood, kind))
    kind, mine = next(known, None), type(likelihood)
    own = kind is None or any(
        getattr(mine, name) is not getattr(kind, name) for name in ("nll", "predictive")
    )
    if own or (isinstance(likelihood, Gaussian) and likelihood.floor is not None):
        raise TypeError(
            f"the curvature of {mine.__name__} is not known; known are Categorical, Bernoulli, "
            "Poisson, and Gaussian with a number as scale, with their own nll and predictive: use "
            "one of these, or predictions without a Laplace approximation"
        )


def root(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Compute a factor R of the curvature of the loss in the network's outputs: R R' is the Hessian
    of the negative log likelihood.

    R is [N, O, Q] in float64, with $R R' = Lambda$ [N, O, O] at `outputs` [N, O], in nats.

    For classes $Lambda = diag(p) - p p'$ has rank $O - 1$, and R has as many columns: with the tail
    sums $q_j = p_{j+1} + ... + p_O$,

        $R_jj = (p_j q_j / q_{j-1})^(1/2)$, $R_ij = -(p_i / q_j) R_jj$ for $i > j$.

    It contains no subtraction, so it stays exact if p is nearly one-hot. For counts with rates
    $exp(f)$ Lambda is $diag(exp(f))$.

    Raises:
        TypeError: The curvature of `likelihood` is not known here, see `check_known`.

    References:
        Tanabe, Sagae, "An exact Cholesky decomposition and the generalized inverse of the
        variance-covariance matrix of the multinomial distribution, with applications", JRSS B
        54(1), 1992.
    """
    check_known(likelihood)
    outputs = outputs.double()
    if isinstance(likelihood, Categorical):
        probs = outputs.softmax(-1)
        through = probs.flip(-1).cumsum(-1).flip(-1)  # p_j + ... + p_O
        tail = through[..., 1:]
        # [N, O, O - 1].
        ratios = torch.where(tail[..., None, :] > 0, probs[..., :, None] / tail[..., None, :], 0.0)
        scale = torch.where(tail > 0, probs[..., :-1] * (tail / through[..., :-1]), 0.0).sqrt()
        one = torch.eye(probs.shape[-1], dtype=probs.dtype, device=probs.device)[:, :-1]
        return (one - ratios.tril(-1)) * scale[..., None, :]
    if isinstance(likelihood, Bernoulli):
        return (outputs.sigmoid() * (-outputs).sigmoid()).sqrt().unsqueeze(-1)
    if isinstance(likelihood, Poisson):
        return (0.5 * outputs).exp().diag_embed()
    assert isinstance(likelihood, Gaussian)
    one = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return (one / likelihood.known).expand(*outputs.shape, -1)


def variances(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Compute the diagonal of Lambda [N, O] in float64 at `outputs` [N, O], in nats; see `root`.

    For classes it is $p_j$ times the sum of all other p, again without a subtraction.

    Raises:
        TypeError: The curvature of `likelihood` is not known here, see `check_known`.
    """
    if not isinstance(likelihood, Categorical):
        return root(likelihood, outputs).diagonal(dim1=-2, dim2=-1).square()
    check_known(likelihood)
    probs = outputs.double().softmax(-1)
    none = torch.zeros_like(probs[..., :1])
    before = torch.cat([none, probs[..., :-1].cumsum(-1)], -1)
    after = torch.cat([probs[..., 1:].flip(-1).cumsum(-1).flip(-1), none], -1)
    return probs * (before + after)


def total(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Compute the sum of Lambda over examples, [O, O] in float64, at `outputs` [N, O], in nats; see
    `root`.

    For classes it is $sum_n (diag p_n - p_n p_n')$: one product of [O, N] and [N, O].

    Raises:
        TypeError: The curvature of `likelihood` is not known here, see `check_known`.
    """
    diagonal = variances(likelihood, outputs).sum(0)
    if not isinstance(likelihood, Categorical):
        return diagonal.diag()
    probs = outputs.double().softmax(-1)
    found = probs.T @ -probs
    found.diagonal().copy_(diagonal)
    return found


@cache
def basis(outputs: int, centre: bool) -> Tensor:
    """Return orthonormal directions [O, Q] in the space of the outputs: all, or with `centre` only
    those that change class probabilities.

    With `centre` each direction sums to zero over classes. The direction left out, adding a
    constant to all logits, changes no probability. The columns are Helmert's, in float64.
    """
    if not centre:
        return torch.eye(outputs, dtype=torch.float64)
    steps = torch.arange(1, outputs, dtype=torch.float64)
    columns = (
        torch.ones(outputs, outputs - 1, dtype=torch.float64).triu()
        - torch.diag_embed(steps, -1)[:, :-1]
    )
    return columns / (steps * (steps + 1)).sqrt()
