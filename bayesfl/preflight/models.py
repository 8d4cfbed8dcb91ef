"""Checks of a model: it takes the data, and gives each example its own outputs."""

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import WIDE, call, each, named
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.likelihoods import Bernoulli, Categorical, MultiLabel, Tokens
from bayesfl.models.modes import asleep
from bayesfl.models.remedies import explained
from bayesfl.models.trial import ROWS, Trial, one_row_each

BYTES_SEARCHED = 2**24  # bytes of whole numbers that are searched at once
NUMBERS = (torch.int16, torch.int32, torch.int64, *WIDE)
"""Types of tokens and codes; bytes are mostly images, in files of any size."""
FEW_COLUMNS = 64  # whole numbers of an example that may each choose rows of an embedding of its own


def outputs(
    algorithm: Algorithm, data: FederatedData, trial: Trial, width: tuple[int, ...]
) -> Tensor:
    """Return the model's outputs for some of the training data, [N, ...].

    Raises:
        ValueError: They are not a tensor with one row of floats for each example.
    """
    found, rows = trial.outputs, data.train.index[:ROWS]
    if not one_row_each(found, rows) or found.dim() != 1 + len(width):
        what = (
            f"{found.dtype} outputs of shape {list(found.shape)}"
            if isinstance(found, Tensor)
            else f"a {type(found).__name__}, as Hugging Face's without bf.models.logits(model),"
        )
        raise ValueError(
            f"the model {type(algorithm.model).__name__} returns {what} for {len(rows)} examples; "
            f"they must be floats [N, {', '.join(map(str, width))}], one row for each example: "
            "leave out a squeeze at the end, or flatten further axes"
        )
    return found


def check_numbers(algorithm: Algorithm, data: FederatedData) -> None:
    """Check that no whole number, in whatever row, is beyond the rows of an embedding, also of
    `F.embedding`.

    Raises:
        ValueError: One is.
    """
    looks_up = any(
        isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in algorithm.model.modules()
    )
    if looks_up or any(t.dtype in NUMBERS for _, t in named(data.train.x)):
        module = algorithm.module(torch.empty(0, dtype=data.train.dtype))
        for split in filter(lambda one: len(one.index), data.splits.values()):
            for some in _extremes(split).split(ROWS):
                x = each(Tensor.cpu, split.take(some))
                with torch.no_grad(), explained(x, every=True):
                    call(module, x)


def check_width(
    algorithm: Algorithm, data: FederatedData, outputs: Tensor, width: tuple[int, ...]
) -> None:
    """Check that a model has as many outputs as its likelihood reads.

    Raises:
        ValueError: It has others.
    """
    if (had := tuple(outputs.shape[1:])) != width:
        had, needed = (", ".join(map(str, shape)) for shape in (had, width))
        raise ValueError(
            f"the model has {had} outputs, and likelihood {algorithm.likelihood} takes {needed} "
            f"for {data.outputs} {'targets' if data.task == 'regression' else 'classes'}: build "
            f"it with outputs={needed}, or make the data with outputs={had} if some classes do "
            "not occur in them, or with task='regression' if their integers are measurements; "
            "for one logit take bf.likelihoods.Bernoulli()"
        )


def warn_of_probabilities(algorithm: Algorithm, trial: Trial) -> None:
    """Warn if a model's outputs have passed a softmax or a sigmoid, which the likelihood applies
    again.
    """
    takes = isinstance(algorithm.likelihood, Categorical | Tokens | Bernoulli | MultiLabel)
    if takes and trial.squashed:
        warn(
            f"the model {type(algorithm.model).__name__} ends in a softmax or a sigmoid, and "
            f"{type(algorithm.likelihood).__name__} takes another of its outputs: let it give "
            "logits, without the last step",
        )


def warn_if_asleep(algorithm: Algorithm) -> None:
    """Warn if a model is in evaluation mode as a whole, where parts of it would train otherwise."""
    if still := asleep(algorithm.model):
        warn(
            f"the model {type(algorithm.model).__name__} is in evaluation mode, so that its norms "
            f"keep the statistics that they have and it trains without dropout: {still[:3]}; call "
            "model.train() before the method is made, or eval() on these parts alone",
        )


def _extremes(split: ClientData) -> Tensor:
    """Return rows [R] of the shared tensors that have, between them, the smallest and the largest
    whole number of each column, found piece by piece.

    Of inputs with many columns, which then are places in one text, the extremes of all columns
    together.
    """
    found = [split.index[:1]]
    for _, t in named(split.x):
        if t.is_floating_point() or t.dtype == torch.bool or not t[:1].numel():
            continue
        for rows in split.index.split(max(1, BYTES_SEARCHED // (8 * t[:1].numel()))):
            values = t.index_select(0, rows.to(t.device)).flatten(1).long().to(rows.device)
            low, high = (
                (values, values)
                if values.shape[1] <= FEW_COLUMNS
                else (values.amin(1, True), values.amax(1, True))
            )
            found.append(rows[torch.cat([low, -high], 1).argmin(0)])
    return torch.cat(found).unique()
