"""`Energy`: the objective of a phase, the expected loss of the data plus the divergence of beliefs
from their priors.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bayesfl.base.options import Count, NotNegative, declared
from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.composition.algorithm import Algorithm

ExampleWeight: TypeAlias = Callable[[Server, View, Batch], Tensor]
"""Factor of each example's loss: (given, view, batch) -> tensor that broadcasts against [..., B];
for each copy of a block [..., M, B].
"""
Penalty: TypeAlias = Callable[[Tensor | None, Tensor, Tensor, Batch, Server, View], Tensor]
"""Term added to a batch's loss: (features, outputs, losses, batch, given, view) -> [...], for one
client or many. `features` [..., B, F] are the inputs of the head of a `bf.models.SplitModel`, None
for other models; `outputs` are [..., B, O], `losses` the negative log likelihoods [..., B].
Gradients flow through these three; padding has batch["weight"] 0. Where the energy has `at`,
batch["at"] holds an `Elsewhere` for each of its names."""
OtherWeights: TypeAlias = Callable[[Algorithm, Server, View], Mapping[str, Tensor]]
"""Other weights of the network, all of them, for one client or many: (algorithm, given, view) ->
parameters and buffers by name, [..., *shape], as `algorithm.leaves(("w",), given)` of the model
that was received, or `algorithm.leaves(("teacher",), view)` of another block."""


class Elsewhere(NamedTuple):
    """Hold what the network gives for a batch at other weights, in evaluation mode; constants,
    through which no gradient flows.

    Args:
        features: Inputs of the head of a `bf.models.SplitModel` [..., B, F]; None for other models.
        outputs: Outputs [..., B, O].
    """

    features: Tensor | None
    outputs: Tensor


def inverse_count(given: Server, view: View, batch: Batch) -> Tensor:
    """Return each example's weight 1 / n_j [..., 1], which turns a sum over the data into their
    mean while the KL is kept whole.
    """
    return 1 / view["n"].unsqueeze(-1)


def tempering(likelihood_scale: Literal["sum", "mean"]) -> ExampleWeight | None:
    """Return the example weight for a method's option `likelihood_scale`: None for the sum over the
    data, `inverse_count` for the mean.
    """
    return None if likelihood_scale == "sum" else inverse_count


@dataclass(frozen=True)
@declared(idle={("likelihood", "none"): ("weight",)})
class Energy:
    """Compute the expected negative log likelihood of a client's data plus the KL divergence of the
    trained blocks from their priors, in nats.

    Priors, weights and `at` read the view as it was when the phase began, the trained blocks
    included: they are constant during the phase.

    In production `bayesfl.engine.descent` computes the slopes of a plain energy itself, of
    `shares`, `scales` and `penalty`; `loss` and `__call__` are what the reference kernel
    differentiates, and vmap where a subclass of this or of `Descend` has them run (see
    `bayesfl.composition.phases.by_algebra`), and against them the others are tested.

    Args:
        block: Name of the trained block, or names of several; their KL divergences are added.
        parts: Names of the blocks that make the predictor.
        likelihood: `sum` over the client's n examples (n times the batch's mean, plus the KL), or
            that divided by n: the `mean` plus KL / n, with the same minimum. A pull lambda / 2 |w_j
            - w|^2 added to a mean loss is thus a prior of variance 1 / (lambda n). `none` leaves
            the data out: the KL alone, plus the penalty.
        weight: Factor of each example's loss, see `ExampleWeight`; None for 1.
        penalty: Term added to the batch's mean negative log likelihood, in nats, see `Penalty`; no
            part may then draw or have copies.
        at: {name: weights} of other weights of the network at which the penalty wants its features
            and outputs, see `OtherWeights`: kernels compute them for many clients at once.
        kl_weight: Factor of the KL, >= 0. Another than 1 tempers the posterior: below 1 it is
            colder than Bayes' rule makes it, as if each example counted 1 / kl_weight times, and
            the energy is no longer an evidence bound.
        trains: Number of a block's copies that `weight` leaves to a client, as 1 where each client
            has a cluster; None for all. Budgets count these.

    Example:
        >>> fit = bf.Energy("head", ("body", "head"), likelihood="mean")
        >>> fit.blocks
        ('head',)
        >>> fit.scales(torch.tensor(50.0))  # factors of the mean loss and of the KL
        (tensor(1.), tensor(0.0200))
    """

    block: str | tuple[str, ...]
    parts: tuple[str, ...]
    _: KW_ONLY
    likelihood: Literal["sum", "mean", "none"]
    weight: ExampleWeight | None = None
    penalty: Penalty | None = None
    at: Mapping[str, OtherWeights] = field(default_factory=dict)
    kl_weight: NotNegative = 1.0
    trains: Count | None = None

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the trained blocks as a tuple."""
        return (self.block,) if isinstance(self.block, str) else tuple(self.block)

    def scales(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the mean negative log likelihood and of the KL, [...] each, for
        clients of `n` [...] examples.
        """
        one = torch.ones_like(n)
        scale, weight = (
            (one, 1 / n)
            if self.likelihood == "mean"
            else (n if self.likelihood == "sum" else one, one)
        )
        return scale, self.kl_weight * weight

    def shares(self, given: Server, view: View, batch: Batch) -> Tensor:
        """Return each example's share in the batch's weighted mean loss, [..., B], for each copy
        [..., M, B]; 0 for padding.
        """
        share = batch["weight"] / batch["weight"].sum(-1, keepdim=True)
        if self.likelihood == "none":
            return torch.zeros_like(share)
        if self.weight is None:
            return share
        weight = self.weight(given, view, batch)
        return (share.unsqueeze(-2) if weight.dim() > share.dim() else share) * weight

    def loss(
        self,
        algorithm: Algorithm,
        beliefs: Mapping[str, Tensors],
        given: Server,
        view: View,
        batch: Batch,
        noise: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss term of one client over a batch, and the weighted mean negative log
        likelihood in it; scalars, in nats.

        The first is what `likelihood` scales: the second plus the penalty.

        Args:
            algorithm: The algorithm that has these blocks.
            beliefs: Beliefs about the trained blocks; the others are read from `view`.
            given: The entries that every client received this round.
            view: The client's view at the start of the phase.
            batch: Examples of the client.
            noise: {block: [S, noise size]} for the blocks that draw; the likelihood is a mean over
                draws.
        """
        now, shares = {**view, **beliefs}, self.shares(given, view, batch)
        if self.penalty is not None:
            features, outputs = algorithm.features(algorithm.leaves(self.parts, now), batch["x"])
            losses = algorithm.likelihood.nll(outputs, batch["y"])
            if self.at:
                seen = {
                    name: Elsewhere(
                        *algorithm.features(weights(algorithm, given, view), batch["x"])
                    )
                    for name, weights in self.at.items()
                }
                batch = batch | {"at": seen}
            nll = (losses * shares).sum()
            return nll + self.penalty(features, outputs, losses, batch, given, view), nll
        draws = (
            [
                {key: e[s] for key, e in noise.items()}
                for s in range(len(next(iter(noise.values()))))
            ]
            if noise
            else [{}]
        )
        losses = torch.stack(
            [algorithm.losses_of_copies(self.parts, now, batch, e) for e in draws]
        ).mean(0)
        nll = (losses * shares).sum()
        return nll, nll

    def __call__(
        self,
        algorithm: Algorithm,
        beliefs: Mapping[str, Tensors],
        given: Server,
        view: View,
        batch: Batch,
        noise: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Compute the energy of one client over a batch, and its mean negative log likelihood; both
        scalars. Arguments as of `loss`.
        """
        loss, nll = self.loss(algorithm, beliefs, given, view, batch, noise)
        scale, weight = self.scales(view["n"])
        return scale * loss + weight * sum(
            algorithm.divergence(name, beliefs[name], given, view) for name in self.blocks
        ), nll
