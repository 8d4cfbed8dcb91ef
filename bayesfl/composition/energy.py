"""Energy: what a phase minimises, the data's expected loss and the divergence of beliefs from their priors."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.composition.algorithm import Algorithm

ExampleWeight: TypeAlias = Callable[[Server, View, Batch], Tensor]
"""What multiplies each example's loss: (given, view, batch) -> broadcasting against [..., B]; for each copy of a block [..., M, B]."""
Penalty: TypeAlias = Callable[[Tensor | None, Tensor, Tensor, Batch, Server, View], Tensor]
"""What is added to a batch's loss: (features, outputs, losses, batch, given, view) -> [...], for one client or many. `features`
[..., B, F] is what the head of a `bf.models.SplitModel` gets, None for other models; `outputs` are [..., B, O], `losses` the negative log
likelihoods [..., B]. Gradients flow through these three; padding has batch["weight"] 0."""


def inverse_count(given: Server, view: View, batch: Batch) -> Tensor:
    """An example's weight 1 / n_j [..., 1]: under a sum likelihood, the data's mean beside the whole KL."""
    return 1 / view["n"].unsqueeze(-1)


def tempering(likelihood_scale: Literal["sum", "mean"]) -> ExampleWeight | None:
    """The weight of examples that a method's `likelihood_scale` asks for beside a whole KL: None, or `inverse_count` for the mean.

    Raises:
        ValueError: It is neither word.
    """
    if likelihood_scale not in ("sum", "mean"):
        raise ValueError(f"likelihood_scale must be 'sum' or 'mean', got {likelihood_scale!r}")
    return None if likelihood_scale == "sum" else inverse_count


@dataclass(frozen=True)
class Energy:
    """Expected negative log likelihood of the client's data plus the KL divergence of the trained blocks to their priors, in nats.

    Priors and weights read the view as it was when the phase began, the trained blocks in it too: they are constant while it lasts.

    Args:
        block: The block or blocks whose KL counts: those that are trained.
        parts: The blocks that make the predictor.
        likelihood: `sum` over the client's n examples (n times the batch's mean, plus the KL), or that divided by n: the `mean`
            plus KL / n, with the same minimum. A pull lambda / 2 |w_j - w|^2 written beside a mean loss is thus a prior of variance
            1 / (lambda n).
        weight: (given, view, batch) -> what multiplies each example's loss, broadcasting against [..., B]; for one client or many.
        penalty: What is added to the batch's mean negative log likelihood, in nats, see `Penalty`; where no part draws or has copies.
    """

    block: str | tuple[str, ...]
    parts: tuple[str, ...]
    _: KW_ONLY
    likelihood: Literal["sum", "mean"]
    weight: ExampleWeight | None = None
    penalty: Penalty | None = None

    def __post_init__(self) -> None:
        if self.likelihood not in ("sum", "mean"):
            raise ValueError(f"likelihood must be 'sum' or 'mean', got {self.likelihood!r}")

    @property
    def blocks(self) -> tuple[str, ...]:
        """The trained blocks as a tuple."""
        return (self.block,) if isinstance(self.block, str) else tuple(self.block)

    def scales(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """What multiplies the mean negative log likelihood, and the KL, for clients of `n` [...] examples."""
        one = torch.ones_like(n)
        return (n, one) if self.likelihood == "sum" else (one, 1 / n)

    def shares(self, given: Server, view: View, batch: Batch) -> Tensor:
        """What each example's loss counts in the batch's weighted mean, [..., B], for each copy [..., M, B]; padding counts nothing."""
        share = batch["weight"] / batch["weight"].sum(-1, keepdim=True)
        if self.weight is None:
            return share
        weight = self.weight(given, view, batch)
        return (share.unsqueeze(-2) if weight.dim() > share.dim() else share) * weight

    def loss(
        self, algorithm: Algorithm, beliefs: Mapping[str, Tensors], given: Server, view: View, batch: Batch, noise: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What `likelihood` scales, of one client over a batch, and the weighted mean negative log likelihood in it; scalars, in nats.

        Args:
            algorithm: Whose blocks these are.
            beliefs: The trained blocks; the others are read from `view`.
            given: What the server sent to everyone.
            view: The client's view at the start of the phase.
            batch: Its examples.
            noise: {block: [S, noise size]} for the blocks that draw; the likelihood is a mean over draws.
        """
        now, shares = {**view, **beliefs}, self.shares(given, view, batch)
        if self.penalty is not None:
            features, outputs = algorithm.features(algorithm.leaves(self.parts, now), batch["x"])
            losses = algorithm.likelihood.nll(outputs, batch["y"])
            nll = (losses * shares).sum()
            return nll + self.penalty(features, outputs, losses, batch, given, view), nll
        draws = [{key: e[s] for key, e in noise.items()} for s in range(len(next(iter(noise.values()))))] if noise else [{}]
        losses = torch.stack([algorithm.losses_of_copies(self.parts, now, batch, e) for e in draws]).mean(0)
        nll = (losses * shares).sum()
        return nll, nll

    def __call__(
        self, algorithm: Algorithm, beliefs: Mapping[str, Tensors], given: Server, view: View, batch: Batch, noise: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The energy of one client, and its mean negative log likelihood; both scalars. Arguments as of `loss`."""
        loss, nll = self.loss(algorithm, beliefs, given, view, batch, noise)
        scale, weight = self.scales(view["n"])
        return scale * loss + weight * sum(algorithm.divergence(name, beliefs[name], given, view) for name in self.blocks), nll
