"""What a model may not do in training is refused, by the name of the module that does it."""

import pytest
from torch import nn

from bayesfl.models.purity import refuse_impure


def test_statistics_that_nobody_could_average_are_refused():
    """Of norms that keep none and mix the rows of a batch, or keep a cumulative average."""
    for layer, match in (
        (nn.BatchNorm2d(2, track_running_stats=False), "no statistics"),
        (nn.BatchNorm1d(2, momentum=None), "momentum=0.1"),
    ):
        with pytest.raises(ValueError, match=rf"module '1' \({type(layer).__name__}\) .*{match}"):
            refuse_impure(nn.Sequential(nn.Linear(2, 2), layer))
        refuse_impure(layer.eval())


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Dropout(0.1),
        nn.RReLU(),
        nn.Sequential(nn.Dropout(0.0), nn.InstanceNorm1d(2), nn.GroupNorm(1, 2), nn.LSTM(2, 2)),
    ],
)
def test_statistics_and_draws_that_a_run_repeats_pass(layer):
    refuse_impure(nn.Sequential(nn.Linear(2, 2), layer))


def test_gradient_hooks_of_parameters_are_refused():
    """They would be dropped: a part of a weight that was to stay would train."""
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda slope: slope * 0)
    with pytest.raises(ValueError, match=r"'weight'.*hook.*mask"):
        refuse_impure(model)


def test_embeddings_that_are_rescaled_when_read_are_refused():
    """Predictions would change them; frozen ones are copied."""
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(ValueError, match=r"module '0' \(Embedding\).*max_norm=None"):
        refuse_impure(model)
    refuse_impure(model.requires_grad_(False))
