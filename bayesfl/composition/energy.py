"""`Energy`: the objective of a phase, the expected loss of the data plus the divergence of
posteriors from their priors.
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
from bayesfl.composition.priors import Flat

ExampleWeight: TypeAlias = Callable[[Server, View, Batch], Tensor]
"""Factor of each example's loss: (given, view, batch) -> tensor that broadcasts against [..., B];
for each copy of a block [..., M, B].
"""
Penalty: TypeAlias = Callable[[Tensor | None, Tensor, Tensor, Batch, Server, View], Tensor]
"""Term added to a batch's loss: (features, outputs, losses, batch, given, view) -> [...], for one
client or many. `features` [..., B, F] are the inputs of the head of a `bf.models.SplitModel`, None
for other models; `outputs` are [..., B, O], `losses` the negative log likelihoods [..., B].
Gradients flow through these three; padding has batch["weight"] 0. If the energy has `at`,
batch["at"] has an `Elsewhere` for each of its names.
"""
OtherWeights: TypeAlias = Callable[[Algorithm, Server, View], Mapping[str, Tensor]]
"""Other weights of the network, all of them, for one client or many: (algorithm, given, view) ->
parameters and buffers by name, [..., *shape], as `algorithm.leaves(("w",), given)` of the model
that was received, or `algorithm.leaves(("teacher",), view)` of another block."""


class Elsewhere(NamedTuple):
    """Hold the network's results for a batch at other weights, in evaluation mode; no gradient
    flows through them.

    Args:
        features: Inputs of the head of a `bf.models.SplitModel` [..., B, F]; None for other models.
        outputs: Outputs [..., B, O].
    """

    features: Tensor | None
    outputs: Tensor


def inverse_count(given: Server, view: View, batch: Batch) -> Tensor:
    """Return each example's weight 1 / n_j [..., 1]; it turns the sum over the data into their mean
    and leaves the KL unchanged.
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
    included: they are constant during the phase. Trained blocks that are no parts are parameters of
    the parts' priors, which read them from the view, as `priors.own_mean` does: they move with the
    phase. Their own KL counts if they have a prior themselves.

    Kernels other than `reference` compute the slopes of a plain energy from `shares`, `scales` and
    `penalty`, in `bayesfl.engine.descent`. The reference kernel differentiates `__call__`; so does
    vmap for a subclass of this class or of `Descend` (see `bayesfl.composition.phases.by_algebra`).
    Tests compare the two.

    Args:
        block: Name of the trained block, or names of several; their KL divergences are added.
        parts: Names of the blocks that make the predictor.
        likelihood: `sum` over the client's n examples (n times the batch's mean, plus the KL), or
            that divided by n: the `mean` plus $KL / n$, with the same minimum. A pull
            $lambda / 2 |w_j - w|^2$ added to a mean loss is thus a prior of variance
            $1 / (lambda n)$. `none` leaves the data out: the KL alone, plus the penalty.
        weight: Factor of each example's loss, see `ExampleWeight`; None for 1.
        penalty: Term added to the batch's mean negative log likelihood, in nats, see `Penalty`; no
            part may then draw or have copies.
        at: {name: weights} of other weights of the network, see `OtherWeights`. Kernels compute the
            network's features and outputs there for many clients at once, and the penalty reads
            them.
        kl_weight: Factor of the KL, >= 0. A factor other than 1 tempers the posterior, and the
            energy is then no evidence bound. Below 1 the posterior is colder, as if each example
            counted 1 / kl_weight times.
        trains: Number of a block's copies that a client trains under `weight`, such as 1 if each
            client has one cluster; None for all. Budgets count these copies.

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

    @cached_property
    def of_priors(self) -> tuple[str, ...]:
        """Return the trained blocks that are no parts: parameters of the other blocks' priors."""
        return tuple(name for name in self.blocks if name not in self.parts)

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

        The first is the second plus the penalty, and `likelihood` scales it.

        Args:
            algorithm: The algorithm that has these blocks.
            beliefs: Posteriors of the trained blocks; the others are read from `view`.
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
        scalars. See `loss` for the arguments.
        """
        loss, nll = self.loss(algorithm, beliefs, given, view, batch, noise)
        scale, weight = self.scales(view["n"])
        view = {**view, **{name: beliefs[name] for name in self.of_priors}}
        return scale * loss + weight * sum(
            algorithm.divergence(name, beliefs[name], given, view)
            for name in self.blocks
            if name in self.parts or type(algorithm.blocks[name].prior) is not Flat
        ), nll
