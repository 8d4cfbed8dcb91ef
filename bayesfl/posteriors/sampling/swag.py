"""SWAG: a Gaussian with the mean and the spread of SGD's iterates."""

import torch
from torch import Tensor, nn

from bayesfl.base.layout import Pattern
from bayesfl.base.options import Count, Natural, declared
from bayesfl.base.protocols import Likelihood
from bayesfl.base.random import Purpose, generator
from bayesfl.curvature.batches import Data
from bayesfl.optim import SGD, Optimiser, rate_at
from bayesfl.posteriors.sampling.samples import Samples
from bayesfl.posteriors.sampling.target import Target


@declared
def swag(
    model: nn.Module,
    x: Data,
    y: Tensor | None = None,
    *,
    precision: float | Tensor,
    centre: float | Tensor = 0.0,
    likelihood: Likelihood | None = None,
    pattern: Pattern = "*",
    draws: Count = 30,
    warmup: Natural = 1000,
    averages: Count = 30,
    thin: Count = 10,
    rank: Count = 20,
    batch_size: Count | None = None,
    optimiser: Optimiser = SGD(1e-2, momentum=0.9),
    seed: Natural = 0,
) -> Samples:
    """Draw from the Gaussian with the mean of SGD's iterates, whose covariance is half their
    variances plus half the covariance of the last ones.

    With the mean m and the variances v of all iterates $w_i$, and a matrix D whose columns are the
    last `rank` deviations $w_i - m_i$ from the mean $m_i$ so far, a draw is

        $m + (v / 2)^(1/2) e + D f / (2 (rank - 1))^(1/2)$, e, f standard normal.

    Its width is that of SGD's path at this rate and batch size, which may differ from the
    posterior's.

    Maddox, Garipov, Izmailov, Vetrov, Wilson, "A simple baseline for Bayesian uncertainty in deep
    learning", NeurIPS 2019, algorithm 1.

    Args:
        model: Any module, which is not changed; SGD starts from its weights, in evaluation mode.
        x: Training inputs [N, ...], or batches (x, y) that can be read repeatedly, such as a
            DataLoader.
        y: Labels or targets [N, ...]; None if they are in the batches.
        precision: Precision of the Gaussian prior, 1 / variance, > 0, for a likelihood that is a
            sum over the data: one number, or one for each weight, [D].
        centre: Mean of the prior: one number or one for each weight, [D].
        likelihood: Distribution of y given the outputs; categorical by default.
        pattern: The uncertain parameters, a pattern over names such as `head.*`.
        draws: Number of draws.
        warmup: Number of steps before iterates are averaged.
        averages: Number of averaged iterates.
        thin: Number of steps from one averaged iterate to the next.
        rank: Number of last iterates for covariances; all if there are fewer.
        batch_size: Number of examples in a step, fewer than all; needed for inputs and labels, and
            None for batches, which have their own sizes.
        optimiser: Optimiser of the mean over examples of the negative log joint density.
        seed: Seed of the order of examples, and of the draws.

    Returns:
        `Samples` of one chain.

    Raises:
        ValueError: The data do not fit the module or the likelihood, or can be read only once;
            `precision` is not > 0; every step reads all rows, so that SGD has no noise, or batches
            in a fixed order repeat at each averaged iterate; or an iterate is not finite.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> bf.posteriors.swag(nn.Linear(2, 3), x, y, precision=1.0, warmup=9, batch_size=10)
        Samples(1 chain of 30 draws of 9 weights)
    """
    target = Target.of(model, x, y, likelihood, precision=precision, centre=centre, pattern=pattern)
    if len(next(target.batches(batch_size, seed))[1]) >= target.examples:
        raise ValueError(
            f"every step reads all {target.examples} rows, so that SGD has no noise, of which SWAG "
            f"takes its width: pass a smaller batch_size, such as a tenth"
        )
    w, steps = target.loc, warmup + averages * thin
    state, batches = optimiser.init(w), target.batches(batch_size, seed)
    mean = spread = torch.zeros_like(w)  # spread: the sum of squares about the mean
    last: list[Tensor] = []
    for step in range(steps):
        slope = target.slope(w, *next(batches))
        w, state = optimiser.update(w, slope, state, rate_at(optimiser.rate, step + 1, steps))
        count, left = divmod(step - warmup + 1, thin)
        if step >= warmup and not left:
            before, mean = mean, mean + (w - mean) / count
            spread = spread + (w - before) * (w - mean)
            last = [*last, w - mean][-rank:]
    if not bool(w.isfinite().all()):
        raise ValueError(
            "SGD's iterates are not finite: use a lower rate, as optimiser=SGD(1e-3), and scale "
            "the inputs"
        )
    if bool((spread.max() / averages).sqrt() < 1e-5 * mean.abs().max()):
        raise ValueError(
            "SGD's iterates hardly differ, because it meets the same batches at every "
            f"{thin}th step or reads all rows in each: shuffle the batches, or use another thin"
        )
    noise = generator(seed, Purpose.POSTERIOR).standard_normal((draws, len(w) + len(last)))
    e, f = torch.from_numpy(noise).to(w).split([len(w), len(last)], 1)
    drawn = mean + (spread / averages / 2).sqrt() * e
    if len(last) > 1:
        drawn = drawn + f @ torch.stack(last) / (2 * (len(last) - 1)) ** 0.5
    return Samples(drawn[None], target.layout, target.model, target.likelihood)
