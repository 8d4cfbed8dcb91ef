"""Deep ensembles: modes of the posterior found by training from different starts."""

import torch
from torch import Tensor, nn

from bayesfl.base.layout import Pattern
from bayesfl.base.options import Count, Natural, declared
from bayesfl.base.protocols import Likelihood
from bayesfl.base.random import Purpose, generator
from bayesfl.curvature.batches import Data
from bayesfl.models.starts import anew
from bayesfl.optim import Adam, Optimiser, cosine, rate_at
from bayesfl.posteriors.sampling.samples import Samples
from bayesfl.posteriors.sampling.target import Target


@declared
def ensemble(
    model: nn.Module,
    x: Data,
    y: Tensor | None = None,
    *,
    precision: float | Tensor,
    centre: float | Tensor = 0.0,
    likelihood: Likelihood | None = None,
    pattern: Pattern = "*",
    members: Count = 5,
    steps: Count = 1000,
    batch_size: Count | None = None,
    optimiser: Optimiser = Adam(cosine(1e-2)),
    seed: Natural = 0,
) -> Samples:
    """Train networks of one architecture from different starts and average their predictions.

    Lakshminarayanan, Pritzel, Blundell, "Simple and scalable predictive uncertainty estimation
    using deep ensembles", NeurIPS 2017, without adversarial examples. Each member is a mode of the
    posterior under a Gaussian prior. Members are not draws from the posterior: if it has a single
    mode, all are equal and do not indicate its width.

    Args:
        model: Any module whose layers have `reset_parameters`, which draws each member's weights;
            it is not changed, and trains in evaluation mode.
        x: Training inputs [N, ...], or batches (x, y) that can be read repeatedly, such as a
            DataLoader.
        y: Labels or targets [N, ...]; None if they are in the batches.
        precision: Precision of the Gaussian prior, 1 / variance, > 0, for a likelihood that is a
            sum over the data: one number, or one for each weight, [D].
        centre: Mean of the prior: one number or one for each weight, [D].
        likelihood: Distribution of y given the outputs; categorical by default.
        pattern: The trained parameters, a pattern over names such as `head.*`.
        members: Number of members.
        steps: Number of gradient steps of each.
        batch_size: Number of examples in a step, for inputs and labels; None for all of them.
        optimiser: Optimiser of the mean over examples of the negative log joint density; a schedule
            of its rate covers the steps.
        seed: Seed of the starts and of the order of examples.

    Returns:
        `Samples` of one chain with a draw for each member.

    Raises:
        ValueError: The data do not fit the module or the likelihood, or can be read only once;
            `precision` is not > 0; a layer has no `reset_parameters`; or a member is not finite.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> bf.posteriors.ensemble(nn.Linear(2, 3), x, y, precision=1.0, members=3, steps=20)
        Samples(1 chain of 3 draws of 9 weights)
    """
    target = Target.of(model, x, y, likelihood, precision=precision, centre=centre, pattern=pattern)
    start, trained = anew(model, pattern=pattern), []
    for member in range(members):
        w = start(generator(seed, Purpose.START, index=member), target.layout.size).to(target.loc)
        state = optimiser.init(w)
        batches = target.batches(batch_size, seed, chain=member)
        for step in range(steps):
            slope = target.slope(w, *next(batches))
            w, state = optimiser.update(w, slope, state, rate_at(optimiser.rate, step + 1, steps))
        if not bool(w.isfinite().all()):
            raise ValueError(
                f"member {member + 1} is not finite: use a lower rate, as optimiser=Adam(1e-3), "
                "and scale the inputs"
            )
        trained.append(w)
    return Samples(torch.stack(trained)[None], target.layout, target.model, target.likelihood)
