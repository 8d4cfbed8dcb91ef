"""Checks before a run: whether a method, its model, its likelihood and the data fit together.

Without these checks a run would silently give wrong numbers, or fail later with an unclear error.
`models.trial` detects models that mix rows, as norms in training mode do; `composition.buffers`
detects norms that a pool cannot gather.
"""

from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.models.copies import check_original, refuse_changed
from bayesfl.preflight import likelihoods, methods, models


def check(algorithm: Algorithm, data: FederatedData) -> None:
    """Check, before training, that a method fits the data, and that its model's outputs are
    reproducible.

    Raises:
        ValueError: The likelihood, the model's inputs or its outputs do not fit the data, or the
            same inputs give other outputs when repeated; a frozen parameter has changed since; or
            the likelihood's slope is not its derivative. The message names the remedy.

    Warns:
        UserWarning: The model is in evaluation mode, or ends in a softmax or a sigmoid; or
            something is learnt in vain, or not at all.
    """
    refuse_changed(algorithm.model)
    check_original(algorithm.model)
    width = algorithm.likelihood.width(data.targets)
    trial = algorithm.trial(data.train)
    outputs = models.outputs(algorithm, data, trial, width)
    models.check_numbers(algorithm, data)
    models.check_width(algorithm, data, outputs, width)
    models.warn_of_probabilities(algorithm, trial)
    likelihoods.check_slope(
        algorithm.likelihood, outputs, data.train.y[data.train.index[: len(outputs)]].cpu()
    )
    methods.check_followed(algorithm)
    models.warn_if_asleep(algorithm)
    methods.warn_of_losses(algorithm)
