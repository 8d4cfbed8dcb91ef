"""Draws of a module's weights from any posterior: from a sampler's chains, an ensemble, a Gaussian
approximation, or a client's posterior in a federation.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base import archive
from bayesfl.base.inputs import Inputs, in_precision
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.options import Count, Natural, declared
from bayesfl.base.protocols import Likelihood, Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.curvature.batches import Data, batches
from bayesfl.models.copies import duplicate
from bayesfl.models.weights import call_at
from bayesfl.posteriors.sampling.stored import (
    check_network,
    likelihood_of,
    likelihood_text,
    network_of,
)


@in_own_modes
@dataclass(frozen=True, eq=False, repr=False)
class Samples:
    """Hold draws from a posterior, of K chains with S draws each.

    Args:
        draws: Weights [K, S, D]; for a block with M copies [K, S, M, D].
        layout: The parameter that each of the D weights belongs to.
        model: A copy of the model, in evaluation mode; its other parameters belong to the draws.
        likelihood: Distribution of y given the model's outputs.
        diverging: Which of NUTS's transitions diverged, [K, S] bool; if more than a few did, the
            draws miss part of the posterior. None for other samplers.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> model = nn.Linear(2, 3)
        >>> fitted = bf.posteriors.Laplace.fit(model, x, y, precision=1.0)
        >>> draws = fitted.sample(500)
        >>> draws
        Samples(1 chain of 500 draws of 9 weights)
        >>> draws.predict(x)["probs"].shape
        torch.Size([30, 3])
    """

    draws: Tensor
    layout: Layout
    model: nn.Module
    likelihood: Likelihood
    diverging: Tensor | None = None

    def __repr__(self) -> str:
        chains, draws, weights = self.draws.shape[0], self.draws.shape[1], self.layout.size
        told = f"{chains} chain{'s' * (chains > 1)} of {draws} draws of {weights} weights"
        if self.diverging is not None:
            told += f"; {int(self.diverging.sum())} transitions diverged"
        return f"Samples({told})"

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight over all draws, [D] each."""
        flat = self.draws.flatten(0, 1)
        return flat.mean(0), flat.var(0)

    def outputs(self, x: Data) -> Tensor:
        """Compute the network's outputs at every draw of all chains, [K S, N, O].

        Args:
            x: Inputs [N, ...], or batches of them, see `bayesfl.curvature.batches`.
        """
        like = next(self.model.parameters())
        with torch.no_grad():
            return torch.cat(
                [
                    torch.stack(
                        [
                            self._at(w, in_precision(inputs, like.dtype))
                            for w in self.draws.flatten(0, 1)
                        ]
                    )
                    for inputs in batches(x, like)
                ],
                1,
            )

    def _at(self, w: Tensor, x: Inputs) -> Tensor:
        return call_at(self.model, self.layout.leaves(w.to(next(self.model.parameters()))), x)

    def predict(self, x: Data) -> Tensors:
        """Compute the predictive distribution over all draws, in the likelihood's form.

        For classes it has `probs` [N, O] and `epistemic` [N] (mutual information of label and
        weights, nats); for targets `mean` and `variance` [N, O] and `epistemic` [N], the variance
        of the draws' means summed over O.

        Args:
            x: Inputs [N, ...], or batches of them, see `bayesfl.curvature.batches`.
        """
        return self.likelihood.predictive(self.outputs(x))

    def to_arviz(self) -> Any:
        """Return the draws as ArviZ's InferenceData: one variable for each parameter, by its name;
        `diverging`, if known, among the sample statistics.
        """
        import arviz

        leaves = self.layout.leaves(self.draws)
        groups: dict[str, Any] = {
            "posterior": {name: leaf.cpu().numpy() for name, leaf in leaves.items()}
        }
        if self.diverging is not None:
            groups["sample_stats"] = {"diverging": self.diverging.cpu().numpy()}
        if int(arviz.__version__.split(".")[0]) > 0:
            # From version 1 on, it accepts the groups as one mapping.
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
            "r_hat": arviz.rhat(data) if len(self.draws) > 1 else arviz.ess(data) * np.nan,
            "ess": arviz.ess(data),
            "ess_tail": arviz.ess(data, method="tail"),
        }
        leaves = {
            key: {name: torch.from_numpy(np.array(table[name])) for name in self.layout.names}
            for key, table in found.items()
        }
        return {key: self.layout.ravel(leaf) for key, leaf in leaves.items()}

    def verdict(self) -> str:
        """Return a line on the reliability of the draws: the largest R-hat of several chains and
        the smallest effective number of draws over all weights, and a remedy if the former is above
        1.01 or the latter below 100 for each chain.

        Source: Vehtari et al., 2021, section 4; see `diagnostics`.

        Example:
            >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
            >>> drawn = bf.posteriors.sgld(nn.Linear(2, 3), x, y, precision=1.0, draws=4, chains=2)
            >>> drawn.verdict().endswith("run longer, by warmup= and draws= or thin=")
            True
        """
        found, (chains, draws) = self.diagnostics(), self.draws.shape[:2]
        worst, least = float(found["r_hat"].max()), float(found["ess"].min())
        said = f"least ESS {least:.0f} of {chains * draws}"
        if chains == 1:
            return f"no R-hat of one chain, {said}" + ": take more draws" * (not least >= 100)
        said = f"worst R-hat {worst:.2f}, {said}"
        if worst <= 1.01 and least >= 100 * chains:
            return said
        return f"{said}: run longer, by warmup= and draws= or thin="

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the draws into one file, completely or not at all; `Samples.load` reads it."""
        diverging = {} if self.diverging is None else {"diverging": self.diverging}
        said = {
            "parameters": list(self.layout.names),
            "likelihood": likelihood_text(self.likelihood),
            "network": network_of(_exact(self.model), self.layout.names),
            "precision": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }
        archive.write(path, "samples", said, {"draws": self.draws, **diverging})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        pattern: Pattern = "*",
    ) -> "Samples":
        """Load draws that `Samples.save` wrote, for the same model; its weights under `pattern` are
        not read.

        Args:
            path: Path of the file.
            model: The model.
            likelihood: Likelihood of the draws; needed only if its class is not in
                `bayesfl.likelihoods`.
            pattern: The drawn parameters.

        Raises:
            CheckpointError: The file is absent or damaged, or has other content.
            ValueError: The file has another likelihood, or belongs to another model.
        """
        said, tensors = archive.read_kind(path, "samples")
        likelihood = likelihood_of(path, said["likelihood"], likelihood)
        layout = Layout(model, pattern)
        check_network(path, said["network"], said["parameters"], _exact(model), layout)
        model = duplicate(model).eval().requires_grad_(False).to(getattr(torch, said["precision"]))
        draws = tensors["draws"].to(next(model.parameters()).device)
        return cls(draws, layout, model, likelihood, tensors.get("diverging"))


def _exact(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode and in float64, so that copies of one model in float32 and
    float64 are equal.
    """
    return duplicate(model).eval().double()


@in_own_modes
class Drawn(ABC):
    """Draw weights of one module from a posterior, given standard normals."""

    @property
    @abstractmethod
    def noise_size(self) -> int:
        """Return the number of standard normals for one draw."""

    @abstractmethod
    def draw(self, noise: Tensor) -> Tensor:
        """Make S draws of all weights, [S, D], from standard normals [S, `noise_size`]."""

    @abstractmethod
    def parts(self) -> tuple[Layout, nn.Module, Likelihood]:
        """Return the layout of the weights, their module and the likelihood."""

    @declared
    def sample(self, draws: Count = 1000, *, seed: Natural = 0) -> Samples:
        """Make independent draws of all weights, as one chain of `Samples`.

        Args:
            draws: Number S of draws.
            seed: Seed of the draws.
        """
        rng = generator(seed, Purpose.POSTERIOR)
        noise = torch.from_numpy(rng.standard_normal((draws, self.noise_size), np.float32))
        return Samples(self.draw(noise)[None], *self.parts())

    def to_arviz(self, *, draws: Count = 1000, seed: Natural = 0) -> Any:
        """Return draws as ArviZ's InferenceData: one variable for each parameter, by its name."""
        return self.sample(draws, seed=seed).to_arviz()
