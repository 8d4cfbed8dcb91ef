"""Likelihoods of several labels for each example: a class at each place of a text, or labels that
apply or do not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.targets import IGNORE, Targets
from bayesfl.likelihoods.classes import class_predictive


def _several(likelihood: object, targets: Targets) -> None:
    """Check that each example has several labels.

    Raises:
        ValueError: The targets are numbers, or each example has one label.
    """
    targets.check(likelihood, "classification")
    if not targets.shape:
        raise ValueError(
            f"likelihood {type(likelihood).__name__} is for several labels of each example, y [N, "
            "T], the data have one; take Categorical()"
        )


@dataclass(frozen=True)
class Tokens:
    """The likelihood of a class at each of T places of an example, y [..., T], independent given
    the outputs [..., T, O].

    The negative log likelihood of an example is the sum over its places, so that a mean loss is one
    over examples: its steps are T times those of a mean over places. Places with the label -100,
    such as those that fill up short texts, add nothing to losses and measures; an example counts as
    one in means and weights, however many of its labels are known.

    Example:
        >>> outputs, y = torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]])  # the last is not known
        >>> round(bf.likelihoods.Tokens().nll(outputs, y).item(), 3)
        2.773
    """

    task = "classification"

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (T, O), one output for each class at each place.

        Raises:
            ValueError: The targets are no classes, or each example has one label.
        """
        _several(self, targets)
        return (*targets.shape, targets.count)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy [..., B] in nats, summed over places, of `outputs` [..., B, T,
        O] at labels `y` [..., B, T].
        """
        labels = y.expand(outputs.shape[:-1]).flatten()
        found = F.cross_entropy(
            outputs.flatten(0, -2), labels, reduction="none", ignore_index=IGNORE
        )
        return found.view(outputs.shape[:-1]).sum(-1)

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, softmax(outputs) -
        onehot(y), 0 at ignored places.
        """
        labels = y.expand(outputs.shape[:-1])
        used = (labels != IGNORE).unsqueeze(-1)
        log_probs, places = outputs.log_softmax(-1), labels.unsqueeze(-1).clamp_min(0)
        nll = -(log_probs.gather(-1, places) * used).flatten(-2).sum(-1)
        return nll, log_probs.exp().scatter_(-1, places, -1.0, reduce="add") * used

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return `probs` [..., N, T, O] and `epistemic` [..., N, T] (mutual information, nats) from
        draws `outputs` [..., S, N, T, O].
        """
        return class_predictive(outputs.log_softmax(-1), -4)


@dataclass(frozen=True)
class MultiLabel:
    """The likelihood of L labels y [..., L] of each example that are 0 or 1, independent given the
    outputs: 1 with probability sigmoid.

    Labels that are not known are -100: they add nothing to losses and measures. An example counts
    as one in means and weights, however many of its labels are known.

    Example:
        >>> outputs, y = torch.zeros(1, 3), torch.tensor([[0, 1, 1]])
        >>> round(bf.likelihoods.MultiLabel().nll(outputs, y).item(), 3)  # 3 log 2
        2.079
    """

    task = "classification"

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return (L,), the logit of each label.

        Raises:
            ValueError: The targets are no classes, or not two, or each example has one label.
        """
        _several(self, targets)
        if targets.count != 2 or len(targets.shape) != 1:
            raise ValueError(
                "likelihood MultiLabel is for labels y [N, L] that are 0 or 1, the data have "
                f"{targets.count} classes in y {['N', *targets.shape]}; make them with outputs=2, "
                "or take Tokens() for several classes"
            )
        return targets.shape

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy [..., B] in nats, summed over labels, of `outputs` [...,
        B, L] at labels `y` [..., B, L].
        """
        return ((F.softplus(outputs) - y * outputs) * (y != IGNORE)).sum(-1)

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, sigmoid(outputs) - y
        [..., B, L], 0 where ignored.
        """
        return self.nll(outputs, y), (outputs.sigmoid() - y) * (y != IGNORE)

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return `probs` [..., N, L, 2] and `epistemic` [..., N, L] (mutual information, nats) from
        draws `outputs` [..., S, N, L].
        """
        return class_predictive(
            torch.stack([F.logsigmoid(-outputs), F.logsigmoid(outputs)], -1), -4
        )
