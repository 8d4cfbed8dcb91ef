"""Draws from the exact posterior of a small model by the No-U-Turn sampler, as a reference for
approximations.
"""

import logging
import math
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesfl.base.inputs import join
from bayesfl.base.layout import Pattern
from bayesfl.base.options import PROBABILITY, Count, Natural, declared
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.curvature.batches import Data
from bayesfl.models.copies import duplicate
from bayesfl.posteriors.sampling.samples import Samples
from bayesfl.posteriors.sampling.target import Target

log = logging.getLogger(__name__)


@torch.enable_grad()
@declared
def nuts(
    model: nn.Module,
    x: Data,
    y: Tensor | None = None,
    *,
    precision: float | Tensor,
    centre: float | Tensor = 0.0,
    likelihood: Likelihood | None = None,
    pattern: Pattern = "*",
    draws: Count = 500,
    warmup: Natural = 500,
    chains: Count = 4,
    seed: Natural = 0,
    full_mass: bool = False,
    target_accept: Annotated[float, PROBABILITY] = 0.8,
    progress: bool = False,
) -> Samples:
    """Draw from p(w | x, y), proportional to p(y | x, w) N(w; centre, 1 / precision), by Pyro's
    No-U-Turn sampler.

    Hoffman and Gelman, "The No-U-Turn sampler: adaptively setting path lengths in Hamiltonian Monte
    Carlo", JMLR 15, 2014. The likelihood is the sum over the data. Everything is computed in
    float64 on the CPU, on a copy of the model in evaluation mode. Chains run one after another,
    each from the model's own weights plus a standard normal (times the prior's standard deviation
    if that is below 1), so that `r_hat` compares different starts. Equal seeds give equal draws,
    and no shared random generator is used. The posterior of a network's weights has thousands of
    equivalent modes (hidden units can be permuted): compare predictions there, not weights.

    Args:
        model: Any module; parameters that `pattern` does not match stay unchanged.
        x: Inputs [N, ...], or batches (x, y) of them, such as a DataLoader; several inputs, a tuple
            or a mapping, as `{"x": inputs}`, see `bayesfl.curvature.batches`.
        y: Labels or targets, in the likelihood's form; None if they are in the batches.
        precision: Precision of the Gaussian prior, 1 / variance, > 0: one number or one for each
            weight, [D].
        centre: Mean of the prior: one number or one for each weight, [D].
        likelihood: Distribution of y given the outputs; categorical by default.
        pattern: A shell-style pattern over the names of the sampled parameters, such as `head.*`.
        draws: Number of kept draws of each chain.
        warmup: Number of earlier draws of each chain, which adapt step size and mass matrix; they
            are dropped.
        chains: Number of chains.
        seed: Seed of the starts and the draws, >= 0.
        full_mass: Whether the mass matrix is full, [D, D], for posteriors with strong correlations,
            rather than diagonal.
        target_accept: Acceptance probability to which the step size is adapted, in (0, 1); closer
            to 1 if transitions diverge.
        progress: Whether to show Pyro's progress bar.

    Raises:
        ValueError: `pattern` matches no parameter, there are no data, sizes, labels or outputs do
            not fit, or the posterior's density at a start is not finite.

    Example:
        >>> x, y = torch.zeros(4, 1), torch.tensor([0.0, 1.0, 2.0, 1.0])
        >>> options = {"likelihood": bf.likelihoods.Gaussian(), "precision": 1.0, "chains": 1}
        >>> bf.posteriors.nuts(nn.Linear(1, 1), x, y, draws=5, warmup=5, **options)
        Samples(1 chain of 5 draws of 2 weights; 0 transitions diverged)
    """
    from pyro.infer import mcmc

    model = duplicate(model).to("cpu", torch.float64)
    target = Target.of(model, x, y, likelihood, precision=precision, centre=centre, pattern=pattern)
    pairs = list(target.once())
    inputs, targets = join([inputs for inputs, _ in pairs]), torch.cat([y for _, y in pairs])
    loc = target.loc

    def potential(z: Tensors) -> Tensor:
        """Return -log p(y | x, w) - log N(w; centre, 1 / precision) in nats, up to a constant."""
        nll = target.likelihood.nll(target.outputs(z["w"], inputs), targets).sum()
        return nll + 0.5 * (target.precision * (z["w"] - target.centre).square()).sum()

    kept, diverging = [], []
    words = np.random.SeedSequence(seed).generate_state(chains, np.uint32)
    for word in words:
        with _Seeded(int(word)):
            start = loc + target.precision.rsqrt().clamp_max(1) * torch.randn(
                len(loc), dtype=torch.float64
            )
            if not math.isfinite(potential({"w": start})):
                raise ValueError(
                    "the posterior's density is not finite at the start; check that x and y are "
                    "finite, and the likelihood"
                )
            kernel = mcmc.NUTS(
                potential_fn=potential, full_mass=full_mass, target_accept_prob=target_accept
            )
            # Divergences are read after each draw: Pyro's summary needs four draws, and the kernel
            # discards them when the run ends.
            places: list[int] = []

            def note(kernel: Any, _: Any, stage: str, __: int, places: list[int] = places) -> None:
                if not stage.startswith("Warmup"):
                    places[:] = kernel.diagnostics()["divergences"]

            run = mcmc.MCMC(
                kernel,
                num_samples=draws,
                warmup_steps=warmup,
                initial_params={"w": start},
                hook_fn=note,
                disable_progbar=not progress,
            )
            run.run()
        kept.append(run.get_samples()["w"].detach())
        diverging.append(
            torch.zeros(draws, dtype=torch.bool).index_fill_(
                0, torch.tensor(places, dtype=torch.long), True
            )
        )
    samples = Samples(
        torch.stack(kept),
        target.layout,
        target.model,
        target.likelihood,
        diverged := torch.stack(diverging),
    )
    if diverged.any():
        log.warning(
            "%d of %d transitions diverged: the draws may miss part of the posterior; raise "
            "target_accept, or the prior precision",
            int(diverged.sum()),
            diverged.numel(),
        )
    return samples


class _Seeded(TorchFunctionMode):
    """Make Pyro draw from a separate generator. `bayesfl.base.addressed.Seeded` would intercept
    every operation of a gradient as well, which takes longer than these small operations.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._own = {"generator": torch.Generator().manual_seed(seed)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}), **(self._own if func in _DRAWS else {}))


_DRAWS = {torch.bernoulli, torch.normal, torch.rand, torch.randn}
"""Functions that Pyro uses to draw."""
