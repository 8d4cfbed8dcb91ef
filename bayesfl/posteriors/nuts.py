"""Draws from the exact posterior of a small model by the No-U-Turn sampler, as a reference for
approximations.
"""

import logging
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, call_at, each, in_precision
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.options import PROBABILITY, Count, Natural, declared
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.targets import IGNORE, Targets
from bayesfl.curvature.ggn import check_outputs
from bayesfl.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiLabel,
    Ordinal,
    Poisson,
    Quantiles,
    Tokens,
)
from bayesfl.posteriors.linearised import as_labels

LIMIT = 5000
"""Largest number of weights that can be sampled; one trajectory takes up to 1023 gradients of the
whole data.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """Draws from a posterior, made by `nuts`; K is the number of chains, and S the number of draws
    of each.

    Args:
        draws: Weights [K, S, D] in float64.
        diverging: Which transitions diverged, [K, S] bool; if more than a few did, the draws miss
            part of the posterior.
        layout: Which parameter each weight belongs to.
        model: A copy of the model, in float64 on the CPU.
        likelihood: Distribution of y given the model's outputs.
    """

    draws: Tensor
    diverging: Tensor
    layout: Layout
    model: nn.Module
    likelihood: Likelihood

    def __repr__(self) -> str:
        chains, draws, weights = self.draws.shape
        return (
            f"Samples({chains} chains of {draws} draws of {weights} weights; "
            f"{int(self.diverging.sum())} transitions diverged)"
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight over all draws, [D] each."""
        flat = self.draws.flatten(0, 1)
        return flat.mean(0), flat.var(0)

    def covariance(self) -> Tensor:
        """Return the covariance of the weights over all draws, [D, D]."""
        return self.draws.flatten(0, 1).T.cov().reshape(self.layout.size, self.layout.size)

    def outputs(self, x: Inputs) -> Tensor:
        """Compute the network's outputs at every draw of all chains, [K S, N, O], for inputs [N,
        *].
        """
        x = _own(x)
        with torch.no_grad():
            return torch.stack(
                [_outputs(self.model, self.layout, w, x) for w in self.draws.flatten(0, 1)]
            )

    def predict(self, x: Inputs) -> Tensors:
        """Compute the predictive distribution over all draws for inputs [N, *], as the likelihood
        gives it.

        For classes it has `probs` [N, O] and `epistemic` [N] (mutual information of label and
        weights, nats); for targets `mean` and `variance` [N, O] and `epistemic` [N], the variance
        of the draws' means summed over O.
        """
        return self.likelihood.predictive(self.outputs(x))

    def to_arviz(self) -> Any:
        """Return the draws as ArviZ's InferenceData: one variable for each parameter, `diverging`
        among the sample statistics.
        """
        import arviz

        posterior = {name: leaf.numpy() for name, leaf in self.layout.leaves(self.draws).items()}
        groups: dict[str, Any] = {
            "posterior": posterior,
            "sample_stats": {"diverging": self.diverging.numpy()},
        }
        if int(arviz.__version__.split(".")[0]) > 0:
            # From version 1 on, it takes the groups as one mapping.
            return arviz.from_dict(groups)
        return arviz.from_dict(**groups)

    def diagnostics(self) -> dict[str, Tensor]:
        """Compute ArviZ's convergence diagnostics of each weight, [D] each.

        Vehtari et al., "Rank-normalization, folding, and localization: an improved R-hat", Bayesian
        Analysis 16(2), 2021.

        Returns:
            `r_hat`: near 1 where the chains agree; above 1.01, run longer. NaN with a single chain.
            `ess`: effective number of draws for the mean. `ess_tail`: for the 0.05 and 0.95
            quantiles. All NaN with fewer than 4 draws.
        """
        import arviz

        data = self.to_arviz()
        found = {
            "r_hat": arviz.rhat(data),
            "ess": arviz.ess(data),
            "ess_tail": arviz.ess(data, method="tail"),
        }
        leaves = {
            key: {name: torch.from_numpy(np.array(table[name])) for name in self.layout.names}
            for key, table in found.items()
        }
        return {key: self.layout.ravel(leaf) for key, leaf in leaves.items()}


@declared
def nuts(
    model: nn.Module,
    likelihood: Likelihood,
    x: Inputs,
    y: Tensor,
    *,
    precision: float | Tensor,
    centre: float | Tensor = 0.0,
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
    float64 on the CPU, on a copy of the model in evaluation mode; chains run one after another,
    each from the model's own weights plus a standard normal (times the prior's standard deviation
    where that is below 1), so that `r_hat` compares starts that differ. Equal seeds give equal
    draws, and no shared random generator is used. The posterior of a network's weights has
    thousands of equivalent modes (hidden units can be permuted): compare predictions there, not
    weights.

    Args:
        model: Any module; parameters that `pattern` does not match stay as they are.
        likelihood: Distribution of y given the outputs.
        x: Inputs [N, *]: a tensor, or a tuple or a mapping of several.
        y: Labels or targets, as the likelihood takes them.
        precision: Precision of the Gaussian prior, 1 / variance, > 0: one number or one for each
            weight, [D].
        centre: Mean of the prior: one number or one for each weight, [D].
        pattern: A shell-style pattern over the names of the parameters that are sampled, such as
            `head.*`.
        draws: Number of draws of each chain that are kept.
        warmup: Number of draws of each chain before these, in which step size and mass matrix are
            adapted; they are dropped.
        chains: Number of chains.
        seed: Seed of the starts and the draws, >= 0.
        full_mass: Whether the mass matrix is full, [D, D], for posteriors with strong correlations,
            rather than diagonal.
        target_accept: Acceptance probability that the step size is adapted to, in (0, 1); closer to
            1 where transitions diverge.
        progress: Whether to show Pyro's progress bar.

    Raises:
        ValueError: There are more than `LIMIT` weights, `pattern` matches no parameter, there are
            no data, sizes, labels or outputs do not fit, or the posterior's density at a start is
            not finite.
    """
    from pyro.infer import mcmc

    layout = Layout(model, pattern)
    if layout.size > LIMIT:
        raise ValueError(
            f"{layout.size} weights are more than the {LIMIT} that sampling can serve; take a "
            "smaller model, or sample part of it, as in pattern='head.*'"
        )
    if not len(y):
        raise ValueError(
            "x has no rows: at least one example is needed, without data the draws would be the "
            "prior's"
        )
    prior = {
        name: _weights(name, value, layout.size)
        for name, value in {"precision": precision, "centre": centre}.items()
    }
    if not bool((prior["precision"] > 0).all()):
        raise ValueError(
            "precision is 1 / variance of the prior and must be > 0, got "
            f"{float(prior['precision'].min())}"
        )
    model = deepcopy(model).to("cpu", torch.float64).eval().requires_grad_(False)
    x, y = _own((x, y))
    loc = layout.ravel(dict(model.named_parameters()))
    y = _checked(likelihood, _outputs(model, layout, loc, x), y)
    potential = _potential(model, likelihood, layout, x, y, prior["precision"], prior["centre"])

    kept, diverging = [], []
    words = np.random.SeedSequence(seed).generate_state(chains, np.uint32)
    for chain, word in enumerate(words):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(word))
            start = loc + prior["precision"].rsqrt().clamp_max(1) * torch.randn(
                layout.size, dtype=torch.float64
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
            # drops them when the run ends.
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
        log.info("chain %d of %d: %d draws, %d diverged", chain + 1, chains, draws, len(places))
    samples = Samples(torch.stack(kept), torch.stack(diverging), layout, model, likelihood)
    if samples.diverging.any():
        log.warning(
            "%d of %d transitions diverged: the draws may miss part of the posterior; raise "
            "target_accept, or the prior precision",
            int(samples.diverging.sum()),
            samples.diverging.numel(),
        )
    return samples


def _checked(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Convert labels or targets to the form that the likelihood takes with outputs `f`; keep them
    for a user's own likelihood.

    Raises:
        ValueError: The outputs `f` or `y` do not fit the likelihood.
    """
    if isinstance(likelihood, Quantiles):
        raise ValueError(
            f"{likelihood} is a loss and no density, so that there is nothing to sample; take "
            "Gaussian() or another likelihood"
        )
    if isinstance(likelihood, Gaussian | Poisson):
        numbers = y.double().reshape(len(y), -1)
        wanted = likelihood.width(Targets("regression", numbers.shape[1], numbers))
        if len(y) != len(f) or tuple(f.shape[1:]) != wanted:
            raise ValueError(
                f"targets must be one row for each of the {len(f)} inputs, and the model's outputs "
                f"for them {['N', *wanted]} under {likelihood}; got {list(y.shape)} and "
                f"{list(f.shape)}"
            )
        return numbers
    if isinstance(likelihood, Tokens | MultiLabel):
        labels = y.long()
        classes = f.shape[-1] if isinstance(likelihood, Tokens) else 2
        wanted = likelihood.width(Targets("classification", classes, labels))
        wrong = (labels != y) | (labels < 0) & (labels != IGNORE) | (labels >= classes)
        if len(y) != len(f) or tuple(f.shape[1:]) != wanted or bool(wrong.any()):
            raise ValueError(
                f"labels must be whole numbers from 0 to {classes - 1}, or {IGNORE}, for each of "
                f"the {len(f)} inputs and outputs {list(f.shape)}; got {list(y.shape)} from "
                f"{float(y.min()):g} to {float(y.max()):g}"
            )
        return labels
    if not isinstance(likelihood, Categorical | Bernoulli | Ordinal):
        return y
    if f.dim() != 2:
        raise ValueError(f"the model must give outputs [N, O], got shape {list(f.shape)}")
    check_outputs(likelihood, f.shape[1])
    return as_labels(
        y, len(f), f.shape[1] + 1 if isinstance(likelihood, Ordinal) else max(2, f.shape[1])
    )


def _potential(
    model: nn.Module,
    likelihood: Likelihood,
    layout: Layout,
    x: Inputs,
    y: Tensor,
    precision: Tensor,
    centre: Tensor,
) -> Callable[[Tensors], Tensor]:
    """Return -log p(y | x, w) - log N(w; centre, 1 / precision) in nats, up to a constant, as a
    function of {"w": [D]}.
    """

    def potential(z: Tensors) -> Tensor:
        nll = likelihood.nll(_outputs(model, layout, z["w"], x), y).sum()
        return nll + 0.5 * (precision * (z["w"] - centre).square()).sum()

    return potential


def _own(x: Any) -> Any:
    """Return tensors on the CPU, floats in float64."""
    return in_precision(each(lambda t: t.detach().cpu(), x), torch.float64)


def _outputs(model: nn.Module, layout: Layout, w: Tensor, x: Inputs) -> Tensor:
    """Compute outputs [N, O] at weights `w` [D]."""
    return call_at(model, layout.leaves(w), x)


def _weights(name: str, value: float | Tensor, size: int) -> Tensor:
    """Expand one number, or one for each weight, to [D]."""
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.shape not in ((), (1,), (size,)):
        raise ValueError(
            f"{name} must be one number or one for each of the {size} weights; got shape "
            f"{list(tensor.shape)}"
        )
    return tensor.double().expand(size)
