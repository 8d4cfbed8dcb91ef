"""What a method's model does in training, seen by a step on a few examples: by it kernels, and the
addresses of draws, are chosen.
"""

from typing import Any

import torch
from torch import Tensor

from bayesfl.base.inputs import Inputs, each
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData
from bayesfl.models.forwards import looked_at, looked_at_training
from bayesfl.models.modes import note, noted
from bayesfl.models.remedies import remedy

OBSERVED_ROWS = 32
"""Number of examples on which a model is tried."""


def observe(
    algorithm: Algorithm, split: ClientData, tried: tuple[Inputs, Tensor] | None = None
) -> None:
    """Note whether a method's model draws in training, or computes something else than in
    evaluation; once in a process.

    Args:
        algorithm: The method.
        split: Training data; nothing is done without rows.
        tried: Some inputs and the model's outputs for them, where they are known.

    Raises:
        ValueError: The model does not take the inputs, or does in training what no run could
            repeat.
    """
    if noted(algorithm.model) or not len(split.index):
        return
    x, outputs = tried or outputs_at(algorithm, split, split.index[:OBSERVED_ROWS])[:2]
    trainable = {name for name, p in algorithm.model.named_parameters() if p.requires_grad}
    module = algorithm.module(torch.empty(0, dtype=split.dtype), train=True)
    training = looked_at_training(module, x, outputs, trainable)
    if training.fault:
        raise ValueError(
            f"the model {type(algorithm.model).__name__} is refused: its forward {training.fault}"
        )
    note(algorithm.model, draws=training.draws, other=training.other)


def outputs_at(algorithm: Algorithm, split: ClientData, rows: Tensor) -> tuple[Inputs, Any, str]:
    """Return the inputs at some rows, the model's outputs for them, and what its forward does and
    may not do, see `looked_at`.

    Raises:
        ValueError: The model does not take the inputs.
    """
    x = each(Tensor.cpu, split.take(rows))
    try:
        return x, *looked_at(algorithm.module(torch.empty(0, dtype=split.dtype)), x)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise ValueError(
            f"the model does not take inputs of shape {split.inputs} ({error}); {remedy(error, x)}"
        ) from error
