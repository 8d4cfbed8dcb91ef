"""Variational inference: the member of a Gaussian family that is closest to the posterior of one
module's weights, by gradient steps on the evidence lower bound.

    $ELBO = E_q[log p(y | x, w)] - KL(q || N(centre, 1 / precision)) <= log p(y | x)$,

in nats, sums over the data. Expectations are taken over reparametrised draws in antithetic pairs,
$loc + e$ and $loc - e$. Gradients pass only through the draws, not through the density of q, whose
own gradient has mean 0: if q is the posterior itself, every estimate is exact.

Source: Blundell, Cornebise, Kavukcuoglu, Wierstra, "Weight uncertainty in neural networks", ICML
2015; Kucukelbir, Tran, Ranganath, Gelman, Blei, "Automatic differentiation variational inference",
JMLR 18, 2017, for Gaussians with all covariances; Roeder, Wu, Duvenaud, "Sticking the landing:
simple, lower-variance gradient estimators for variational inference", NeurIPS 2017.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base import archive
from bayesfl.base.inputs import Inputs
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.options import Count, Natural, Positive, declared
from bayesfl.base.protocols import Likelihood, Posterior, Tensors
from bayesfl.base.random import Purpose, generator
from bayesfl.curvature.batches import Data
from bayesfl.models.copies import duplicate
from bayesfl.optim import Adam, Optimiser, cosine, rate_at
from bayesfl.posteriors.sampling.samples import Drawn
from bayesfl.posteriors.sampling.stored import (
    check_network,
    likelihood_of,
    likelihood_text,
    network_of,
)
from bayesfl.posteriors.sampling.target import Target


@in_own_modes
@dataclass(frozen=True, eq=False, repr=False)
class Variational(Drawn):
    """Hold a Gaussian fitted by variational inference; made by `MeanField.fit` or
    `FullGaussian.fit`.

    Args:
        family: The family, which interprets the tensors.
        belief: The Gaussian's own tensors, in the model's precision.
        target: The model, its likelihood, the prior and the number of examples; its data are those
            of the fit, or none after `load`.
        history: Estimates of the ELBO at every step, in nats, sums over the data, [steps].

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> fitted = bf.posteriors.MeanField.fit(nn.Linear(2, 3), x, y, precision=1.0, steps=20)
        >>> fitted.history.shape, fitted.predict(x)["probs"].shape
        (torch.Size([20]), torch.Size([30, 3]))
    """

    family: "Family"
    belief: Tensors
    target: Target
    history: Tensor

    def __repr__(self) -> str:
        name, target = type(self.family).__name__, self.target
        return f"{name}({target.layout.size} weights, {target.examples} examples)"

    def parts(self) -> tuple[Layout, nn.Module, Likelihood]:
        """Return the layout of the weights, their module and the likelihood."""
        return self.target.layout, self.target.model, self.target.likelihood

    @property
    def noise_size(self) -> int:
        """Return the number of standard normals for one draw."""
        return self.family.noise_size(self.target.layout.size)

    def draw(self, noise: Tensor) -> Tensor:
        """Make S draws of all weights, [S, D], from standard normals [S, `noise_size`]."""
        return self.family.sample(self.belief, noise.to(self.target.loc))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight, [D] each."""
        return self.family.moments(self.belief)

    @declared
    def predict(self, x: Data, *, draws: Count = 100, seed: Natural = 0) -> Tensors:
        """Compute the predictive distribution at `x` by averaging over draws, with the entries of
        `Samples.predict`.

        Args:
            x: Inputs [N, ...], or batches of them, see `bayesfl.curvature.batches`.
            draws: Number of draws.
            seed: Seed of the draws.
        """
        return self.sample(draws, seed=seed).predict(x)

    @declared
    def elbo(
        self, x: Data, y: Tensor | None = None, *, draws: Count = 100, seed: Natural = 0
    ) -> Tensor:
        """Estimate the evidence lower bound, which is at most the log marginal likelihood, in nats,
        a sum over the data.

        Args:
            x: The inputs of the fit, or batches of (x, y).
            y: Labels or targets; None if they are in the batches.
            draws: Number of pairs of draws.
            seed: Seed of the draws.

        Raises:
            ValueError: The number of examples differs from that of the fit.
        """
        target, total = self.target.on(x, y), 0.0
        with torch.no_grad():
            for inputs, labels in target.once():
                for pair in range(draws):
                    noise = normals(seed, Purpose.POSTERIOR, pair, self.noise_size, target.loc)
                    energy = _energy(target, self.family, self.belief, noise, inputs, labels)
                    total -= float(energy) / (max(1, target.passed) * draws)
        return torch.tensor(total, dtype=torch.float64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior into one file, completely or not at all; `MeanField.load` or
        `FullGaussian.load` reads it.
        """
        target = self.target
        said = {
            "family": type(self.family).__name__,
            "parameters": list(target.layout.names),
            "likelihood": likelihood_text(target.likelihood),
            "network": network_of(target.model, target.layout.names),
            "examples": target.examples,
        }
        own = {"loc": target.loc, "precision": target.precision, "centre": target.centre}
        tensors = {f"target.{name}": t for name, t in own.items()} | {
            f"belief.{name}": t for name, t in self.belief.items()
        }
        archive.write(path, "variational", said, tensors | {"history": self.history})


@dataclass(frozen=True, kw_only=True)
@declared
class Family(Posterior, ABC):
    """Define a family of Gaussians over weights with reparametrised draws, for posteriors of a
    federation's block and for `fit` to one module.

    Args:
        init_scale: Standard deviation of every weight at the start, > 0.
    """

    init_scale: Positive = 0.1

    def noise_size(self, size: int) -> int:
        """Return the number of standard normals for one draw of `size` weights."""
        return size

    @abstractmethod
    def log_density(self, q: Tensors, w: Tensor) -> Tensor:
        """Compute log q(w) [...] in nats at weights `w` [..., D]."""

    @abstractmethod
    def natural(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return the natural parameters, which add up in a product of Gaussians: the precision, its
        diagonal [..., D] or the matrix [..., D, D], and the precision times the mean [..., D].
        """

    @abstractmethod
    def of_natural(self, precision: Tensor, weighted: Tensor) -> Tensors:
        """Return the posterior with these natural parameters, which `natural` returns."""

    @classmethod
    @declared
    def fit(
        cls,
        model: nn.Module,
        x: Data,
        y: Tensor | None = None,
        *,
        precision: float | Tensor,
        centre: float | Tensor = 0.0,
        likelihood: Likelihood | None = None,
        pattern: Pattern = "*",
        steps: Count = 2000,
        batch_size: Count | None = None,
        optimiser: Optimiser = Adam(cosine(0.02)),
        init_scale: Positive = 0.1,
        seed: Natural = 0,
    ) -> Variational:
        """Fit the family's closest member to the posterior of a module's weights, starting from
        these; the module is not changed, and computes in evaluation mode.

        Args:
            model: Any module.
            x: Training inputs [N, ...], or batches (x, y) that can be read repeatedly, such as a
                DataLoader.
            y: Labels or targets [N, ...]; None if they are in the batches.
            precision: Precision of the Gaussian prior, 1 / variance, > 0, for a likelihood that is
                a sum over the data: one number, or one for each weight, [D].
            centre: Mean of the prior: one number or one for each weight, [D].
            likelihood: Distribution of y given the outputs; categorical by default.
            pattern: The uncertain parameters, a pattern over names such as `head.*`; the others
                stay unchanged.
            steps: Number of gradient steps.
            batch_size: Number of examples in a step, for inputs and labels; None for all of them.
            optimiser: Optimiser of the ELBO's mean over examples; a schedule of its rate covers
                the steps, and should fall to 0, because draws are random.
            init_scale: Standard deviation of every weight at the start, > 0.
            seed: Seed of the draws and of the order of examples.

        Raises:
            ValueError: The data do not fit the module or the likelihood, or can be read only once;
                `precision` is not > 0; or the ELBO is not finite.

        Example:
            >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
            >>> model = nn.Linear(2, 3)
            >>> fitted = bf.posteriors.FullGaussian.fit(model, x, y, precision=1.0, steps=100)
            >>> fitted
            FullGaussian(9 weights, 30 examples)
            >>> fitted.predict(x)["probs"].shape
            torch.Size([30, 3])
        """
        target = Target.of(
            model, x, y, likelihood, precision=precision, centre=centre, pattern=pattern
        )
        family = cls(init_scale=init_scale)
        q = {name: t.clone() for name, t in family.init(target.loc).items()}
        size, state, history = family.noise_size(target.layout.size), optimiser.init(q), []
        batches = target.batches(batch_size, seed)
        for step, (inputs, labels) in zip(range(steps), batches, strict=False):
            noise = normals(seed, Purpose.NOISE, step, size, target.loc)
            leaves = {name: t.requires_grad_() for name, t in q.items()}
            with torch.enable_grad():
                energy = _energy(target, family, leaves, noise, inputs, labels)
                slopes = torch.autograd.grad(energy / target.examples, list(leaves.values()))
            history.append(-energy.detach())
            if not bool(history[-1].isfinite()):
                raise ValueError(
                    f"the ELBO is not finite at step {step + 1}: use a lower rate, as "
                    "optimiser=Adam(1e-3), or a smaller init_scale, and scale the inputs"
                )
            grads = dict(zip(leaves, slopes, strict=True))
            with torch.no_grad():
                rate = rate_at(optimiser.rate, step + 1, steps)
                q, state = optimiser.update(
                    {name: t.detach() for name, t in q.items()}, grads, state, rate
                )
        belief = {name: t.detach() for name, t in q.items()}
        return Variational(family, belief, target, torch.stack(history).cpu())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        likelihood: Likelihood | None = None,
        pattern: Pattern = "*",
    ) -> Variational:
        """Load a posterior that `Variational.save` wrote, for the same model; the model's weights
        under `pattern` are not read.

        Args:
            path: Path of the file.
            model: The model.
            likelihood: Likelihood of the fit; needed only if its class is not in
                `bayesfl.likelihoods`.
            pattern: The covered parameters, as in `fit`.

        Raises:
            CheckpointError: The file is absent or damaged, or has other content.
            ValueError: The file has another family or likelihood, or belongs to another model.
        """
        said, tensors = archive.read_kind(path, "variational")
        if said["family"] != cls.__name__:
            raise ValueError(
                f"{str(path)!r} holds a {said['family']}, not a {cls.__name__}; read it by "
                f"{said['family']}.load"
            )
        likelihood = likelihood_of(path, said["likelihood"], likelihood)
        layout = Layout(model, pattern)
        own = duplicate(model).eval().requires_grad_(False)
        check_network(path, said["network"], said["parameters"], own, layout)
        device = next(own.parameters()).device
        prior = (tensors[f"target.{name}"].to(device) for name in ("loc", "precision", "centre"))
        target = Target(
            own, layout, likelihood, *prior, data=(None, None), examples=said["examples"]
        )
        belief = {
            name.removeprefix("belief."): t.to(device)
            for name, t in tensors.items()
            if name.startswith("belief.")
        }
        return Variational(cls(), belief, target, tensors["history"])


def normals(seed: int, purpose: Purpose, index: int, size: int, like: Tensor) -> Tensor:
    """Draw an antithetic pair of standard normals, [2, size]: e and -e."""
    rng = generator(seed, purpose, index=index)
    noise = torch.from_numpy(rng.standard_normal(size, np.float32)).to(like)
    return torch.stack([noise, -noise])


def _energy(
    target: Target, family: Family, q: Tensors, noise: Tensor, x: Inputs, y: Tensor
) -> Tensor:
    """Estimate the negative ELBO by a batch, at draws of `noise` [2, D], in nats.

    The density of q is taken at constants, so that its gradient passes only through the draws.
    """
    held = {name: t.detach() for name, t in q.items()}
    energies = [
        target.nll(w, x, y) + target.prior(w) + family.log_density(held, w)
        for w in family.sample(q, noise)
    ]
    return torch.stack(energies).mean()
