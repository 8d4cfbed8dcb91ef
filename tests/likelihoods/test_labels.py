"""Likelihoods of several labels: sums over places, those not known left out, and predictions for
each place.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from bayesfl.likelihoods import Bernoulli, Categorical, MultiLabel, Tokens
from tests.cases import numbers


def test_tokens_are_torchs_cross_entropy_summed_over_places():
    """With torch's own way to leave places out."""
    outputs, y = numbers(7, 4, 5), torch.arange(28).view(7, 4) % 5
    y[2, 1], y[3] = -100, -100
    wanted = F.cross_entropy(outputs.mT, y, reduction="none", ignore_index=-100).sum(1)
    assert_close(Tokens().nll(outputs, y), wanted)
    assert Tokens().nll(outputs, y)[3] == 0
    one = sum(Categorical().nll(outputs[:2, t], y[:2, t]) for t in range(4))
    assert_close(Tokens().nll(outputs, y)[:2], one)


def test_several_labels_are_torchs_binary_cross_entropy():
    outputs, y = numbers(7, 4), torch.arange(28).view(7, 4) % 2
    y[2, 1] = -100
    wanted = F.binary_cross_entropy_with_logits(
        outputs, y.double().clamp_min(0), reduction="none"
    ) * (y >= 0)
    assert_close(MultiLabel().nll(outputs, y), wanted.sum(1))


@pytest.mark.parametrize(
    ("likelihood", "one", "shape"),
    [(Tokens(), Categorical(), (6, 3, 4, 5)), (MultiLabel(), Bernoulli(), (6, 3, 4))],
)
def test_each_place_is_predicted_as_if_alone(likelihood, one, shape):
    """Probabilities and mutual information of a place, over draws of all."""
    outputs = numbers(2, *shape)  # [C, S, N, T, ...]
    seen = likelihood.predictive(outputs)
    for t in range(4):
        place = outputs[:, :, :, t] if outputs.dim() == 5 else outputs[..., t : t + 1]
        wanted = one.predictive(place)
        assert_close(seen["probs"][:, :, t], wanted["probs"])
        assert_close(seen["epistemic"][:, :, t], wanted["epistemic"])
