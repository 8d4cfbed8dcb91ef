"""What a model may not do in training is refused, by the name of the module that does it."""

import pytest
import torch
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
    ],
)
def test_statistics_and_draws_that_a_run_repeats_pass(layer):
    refuse_impure(nn.Sequential(nn.Linear(2, 2), layer))


def test_what_repeats_itself_passes():
    refuse_impure(
        nn.Sequential(nn.Dropout(0.0), nn.InstanceNorm1d(2), nn.GroupNorm(1, 2), nn.LSTM(2, 2))
    )


def test_wrappers_that_hide_the_model_are_refused():
    """With the remedy: parallel ones, compiled ones, models without numbers, sparse gradients."""
    with pytest.raises(ValueError, match=r"DataParallel.*model\.module"):
        refuse_impure(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"ScriptModule.*before torch\.jit"):
        refuse_impure(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))
    with pytest.raises(ValueError, match=r"\['weight', 'bias'\].*'meta'"):
        refuse_impure(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"module '0' \(Embedding\).*sparse=False"):
        refuse_impure(nn.Sequential(nn.Embedding(4, 2, sparse=True)))


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


def test_spectral_norm_is_refused_in_training_mode():
    """It iterates whenever the weight is read; in evaluation mode it is a constant."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"'0\.parametrizations\.weight\.0'.*eval mode"):
        refuse_impure(model)
    refuse_impure(model.eval())
