"""Draws from the posterior of a network by Langevin dynamics with gradients of batches: SGLD, and
SGHMC with momentum.

Both descend along the gradient g of the negative log joint density's mean over N examples, at a
rate comparable with SGD's, and add the noise that makes $p(w | x, y)^(1 / T)$ stationary:

    SGLD: $w <- w - rate g + (2 rate T / N)^(1/2) e$,

    SGHMC: $v <- momentum v - rate g + (2 (1 - momentum) rate T / N)^(1/2) e$, $w <- w + v$,

with e standard normal and T the temperature. On a Gaussian posterior of precision A the draws are
Gaussian, with its mean and the covariance

    $T A^-1 (I - rate A / (2 (1 + momentum) N))^-1$,

which is too wide by the last factor, and wider with batches, because their noise is not corrected.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base.layout import Pattern
from bayesfl.base.options import Count, Natural, NotNegative, Positive, Range, declared
from bayesfl.base.protocols import Likelihood
from bayesfl.base.random import Purpose, generator
from bayesfl.curvature.batches import Data
from bayesfl.posteriors.sampling.samples import Samples
from bayesfl.posteriors.sampling.target import Target


@declared
def sgld(
    model: nn.Module,
    x: Data,
    y: Tensor | None = None,
    *,
    precision: float | Tensor,
    temperature: NotNegative = 1.0,
    rate: Positive = 1e-2,
    centre: float | Tensor = 0.0,
    likelihood: Likelihood | None = None,
    pattern: Pattern = "*",
    draws: Count = 100,
    warmup: Natural = 1000,
    thin: Count = 10,
    chains: Count = 1,
    batch_size: Count | None = None,
    seed: Natural = 0,
) -> Samples:
    """Draw from a posterior by stochastic gradient Langevin dynamics, at a constant rate.

    Welling and Teh, "Bayesian learning via stochastic gradient Langevin dynamics", ICML 2011, eq. 4
    with their step size 2 rate / N.

    Args:
        model: Any module, which is not changed; chains start from its weights, in evaluation mode.
        x: Training inputs [N, ...], or batches (x, y) that can be read repeatedly, such as a
            DataLoader.
        y: Labels or targets [N, ...]; None if they are in the batches.
        precision: Precision of the Gaussian prior, 1 / variance, > 0, for a likelihood that is a
            sum over the data: one number, or one for each weight, [D].
        temperature: T; the draws' distribution is $p(w | x, y)^(1 / T)$: 1 for the posterior
            itself, a smaller T for a colder, narrower one.
        rate: Step size along the gradient of the mean over examples, as SGD's, > 0.
        centre: Mean of the prior: one number or one for each weight, [D].
        likelihood: Distribution of y given the outputs; categorical by default.
        pattern: The drawn parameters, a pattern over names such as `head.*`.
        draws: Number of kept draws of each chain.
        warmup: Number of steps of each chain before these.
        thin: Number of steps from one kept draw to the next.
        chains: Number of chains.
        batch_size: Number of examples in a step, for inputs and labels; None for all of them.
        seed: Seed of the noise and of the order of examples.

    Raises:
        ValueError: The data do not fit the module or the likelihood, or can be read only once;
            `precision` is not > 0; or a chain is not finite.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> bf.posteriors.sgld(nn.Linear(2, 3), x, y, precision=1.0, draws=5, warmup=20, chains=2)
        Samples(2 chains of 5 draws of 9 weights)
    """
    return sghmc(  # without momentum, its velocity is one step of SGLD
        model,
        x,
        y,
        precision=precision,
        temperature=temperature,
        rate=rate,
        momentum=0.0,
        centre=centre,
        likelihood=likelihood,
        pattern=pattern,
        draws=draws,
        warmup=warmup,
        thin=thin,
        chains=chains,
        batch_size=batch_size,
        seed=seed,
    )


@declared
def sghmc(
    model: nn.Module,
    x: Data,
    y: Tensor | None = None,
    *,
    precision: float | Tensor,
    temperature: NotNegative = 1.0,
    rate: Positive = 1e-2,
    momentum: Annotated[float, Range(0, 1, "[")] = 0.9,
    centre: float | Tensor = 0.0,
    likelihood: Likelihood | None = None,
    pattern: Pattern = "*",
    draws: Count = 100,
    warmup: Natural = 1000,
    thin: Count = 10,
    chains: Count = 1,
    batch_size: Count | None = None,
    seed: Natural = 0,
) -> Samples:
    """Draw from a posterior by stochastic gradient Hamiltonian Monte Carlo, at a constant rate.

    Chen, Fox, Guestrin, "Stochastic gradient Hamiltonian Monte Carlo", ICML 2014, eq. 15 without an
    estimate of the gradients' noise.

    Args:
        model: Any module, which is not changed; chains start from its weights, in evaluation mode.
        x: Training inputs [N, ...], or batches (x, y) that can be read repeatedly, such as a
            DataLoader.
        y: Labels or targets [N, ...]; None if they are in the batches.
        precision: Precision of the Gaussian prior, 1 / variance, > 0, for a likelihood that is a
            sum over the data: one number, or one for each weight, [D].
        temperature: T; the draws' distribution is $p(w | x, y)^(1 / T)$: 1 for the posterior
            itself, a smaller T for a colder, narrower one.
        rate: Step size along the gradient of the mean over examples, as SGD's, > 0.
        momentum: Share of the velocity that a step keeps, in [0, 1); with 0 it is `sgld`.
        centre: Mean of the prior: one number or one for each weight, [D].
        likelihood: Distribution of y given the outputs; categorical by default.
        pattern: The drawn parameters, a pattern over names such as `head.*`.
        draws: Number of kept draws of each chain.
        warmup: Number of steps of each chain before these.
        thin: Number of steps from one kept draw to the next.
        chains: Number of chains.
        batch_size: Number of examples in a step, for inputs and labels; None for all of them.
        seed: Seed of the noise and of the order of examples.

    Raises:
        ValueError: The data do not fit the module or the likelihood, or can be read only once;
            `precision` is not > 0; or a chain is not finite.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> bf.posteriors.sghmc(nn.Linear(2, 3), x, y, precision=1.0, draws=5, warmup=20, chains=2)
        Samples(2 chains of 5 draws of 9 weights)
    """
    target = Target.of(model, x, y, likelihood, precision=precision, centre=centre, pattern=pattern)
    width = (2 * (1 - momentum) * rate * temperature / target.examples) ** 0.5
    kept = torch.empty(chains, draws, target.layout.size).to(target.loc)
    for chain in range(chains):
        w, v = target.loc.clone(), torch.zeros_like(target.loc)
        batches = target.batches(batch_size, seed, chain=chain)
        for step in range(warmup + draws * thin):
            slope = target.slope(w, *next(batches))
            rng = generator(seed, Purpose.NOISE, phase=chain, index=step)
            noise = torch.from_numpy(rng.standard_normal(len(w), np.float32)).to(w)
            v = momentum * v - rate * slope + width * noise
            w = w + v
            place, left = divmod(step - warmup + 1, thin)
            if step >= warmup and not left:
                kept[chain, place - 1] = w
        if not bool(w.isfinite().all()):
            raise ValueError(
                f"chain {chain + 1} is not finite: the rate {rate:g} is too large for this model "
                f"and these inputs; use {rate / 10:g}"
            )
    return Samples(kept, target.layout, target.model, target.likelihood)
