"""Checks, before training, that a method's likelihood and model fit the data."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import WIDE, Inputs, count, each, named
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.buffers import SUFFIX, Buffers
from bayesfl.composition.phases import Descend, trained
from bayesfl.data import ClientData, FederatedData
from bayesfl.evaluation.metrics.distributions import KINDS
from bayesfl.models.copies import check_original, refuse_changed
from bayesfl.models.forwards import looked_at, looked_at_training, one_row_each
from bayesfl.models.modes import asleep, note, noted
from bayesfl.models.remedies import remedy

PROBE = 32  # examples on which the model's outputs are checked
PIECE = 2**24  # bytes of whole numbers that are searched at once
NUMBERS = (torch.int16, torch.int32, torch.int64, *WIDE)
"""Types of tokens and codes; bytes are mostly images, in files of any size."""
COLUMNS = 64  # whole numbers of an example that may each choose rows of an embedding of its own

FAR = 10.0
"""Root mean square of targets beyond which a learned scale is warned of."""


def check(algorithm: Algorithm, data: FederatedData) -> None:
    """Check, before training, that the likelihood and the model's outputs fit the data, and that the model's outputs are reproducible.

    Raises:
        TypeError: The algorithm's likelihood is no `Likelihood`, or the model's outputs are no tensor.
        ValueError: The likelihood, the model's inputs or its outputs do not fit the data, or the same inputs give other outputs when
            repeated; a frozen parameter has changed since; or the likelihood's slope is not its derivative. The message names the remedy.
    """
    refuse_changed(algorithm.model)
    check_original(algorithm.model)
    likelihood = algorithm.likelihood
    missing = [name for name in ("task", "width", "nll", "nll_and_slope", "predictive") if not hasattr(likelihood, name)]
    if isinstance(likelihood, type) or missing:
        came = f"the class {likelihood.__name__}" if isinstance(likelihood, type) else type(likelihood).__name__
        lacks = "" if isinstance(likelihood, type) or len(missing) == 5 else f", which lacks {missing}"
        raise TypeError(
            f"likelihood must be a Likelihood, got {came}{lacks}; build the algorithm with one of bayesfl.likelihoods, as "
            "likelihood=Categorical()"
        )
    if (kind := getattr(likelihood, "distribution", "normal")) not in KINDS:
        raise ValueError(
            f"likelihood {type(likelihood).__name__} has distribution={kind!r}, by which measures are computed; take one of {list(KINDS)}"
        )
    wanted = likelihood.width(data.targets)
    if not isinstance(wanted, tuple):
        raise TypeError(f"likelihood {type(likelihood).__name__} must give its width as a tuple, as (1,), got {wanted!r}")
    module, rows = algorithm.module(torch.empty(0, dtype=data.train.dtype)), data.train.index[:PROBE]
    x, outputs, fault = _tried(module, data.train, rows)
    called = f"the model {type(algorithm.model).__name__}"
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"{called} returns a {type(outputs).__name__}, not a tensor of outputs; let forward return "
            "the logits, or wrap a model of Hugging Face by bf.models.logits(model)"
        )
    if not one_row_each(outputs, x) or outputs.dim() != 1 + len(wanted):
        axes = "[N, O]" if len(wanted) == 1 else f"[N, {', '.join(map(str, wanted))}]"
        raise ValueError(
            f"{called} returns {outputs.dtype} outputs of shape {list(outputs.shape)} for {count(x)} examples; they must be floats {axes}, "
            "one row for each example: "
            + ("leave out a squeeze at the end, or flatten further axes" if len(wanted) == 1 else "let it give outputs for each place")
        )
    if fault:
        raise ValueError(f"{called} is refused: its forward {fault}")
    _note_training(algorithm, data.train, x, outputs)
    looks_up = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
    if looks_up or any(t.dtype in NUMBERS for _, t in named(data.train.x)):
        for split in filter(lambda one: len(one.index), data.splits.values()):
            for some in _extremes(split).split(PROBE):  # a number beyond an embedding's rows, also of F.embedding, may stand in any row
                _tried(module, split, some)
    if tuple(outputs.shape[1:]) != wanted:
        what = "targets" if data.task == "regression" else "classes"
        had, needed = (str(shape[0]) if len(shape) == 1 else str(list(shape)) for shape in (outputs.shape[1:], wanted))
        plain = data.task == "classification" and wanted == (data.outputs,)
        few, many = plain and outputs.shape[1] < wanted[0], plain and outputs.shape[1] > wanted[0]
        raise ValueError(
            f"the model has {had} outputs, the data {data.outputs} {what}; build the model with outputs={needed}"
            + f", as likelihood {likelihood} takes" * (wanted != (data.outputs,))
            + ", or make the data with task='regression' if their integers are measurements and no classes" * few
            + f", or make the data with outputs={had} if some classes do not occur in them" * many
        )

    if getattr(likelihood, "scale", None) == "learned" and (told := _far_targets(data)):
        warnings.warn(told, stacklevel=3)
    _check_slope(likelihood, outputs, data.train.y[rows].cpu())
    _check_followed(algorithm)
    if still := asleep(algorithm.model):
        warnings.warn(
            f"the model {type(algorithm.model).__name__} is in evaluation mode, so that its norms keep the statistics that they have and "
            f"it trains without dropout: {still[:3]}; call model.train() before the method is made, or eval() on these parts alone",
            stacklevel=3,
        )
    for told in lost(algorithm):
        warnings.warn(told, stacklevel=3)
    covered = {name for block in algorithm.blocks for name in algorithm.layout(block).names}
    if idle := [name for name, p in algorithm.model.named_parameters() if p.requires_grad and name not in covered]:
        warnings.warn(
            f"no block of the method covers the parameters {idle[:5]} ({len(idle)} in all), so they stay as they are; freeze them "
            "(requires_grad=False) if that is meant, else rename them or widen a block's pattern",
            stacklevel=3,
        )


def _far_targets(data: FederatedData) -> str:
    """Say that targets are far from standardised; '' if they are not."""
    y = data.train.y[data.train.index].double()
    if float(y.square().mean().sqrt()) <= FAR:
        return ""
    return (
        f"the training targets have a mean of {float(y.mean()):.3g} and a standard deviation of {float(y.std()):.3g}, and a learned scale "
        "begins near 1 around 0, from which it may not find back: standardise them, as (y - y.mean()) / y.std() of training rows, and "
        "scale predictions back"
    )


def look(algorithm: Algorithm, split: ClientData) -> None:
    """Look at what a method's model does in training, if `check` has not done so in this process, as after loading or on a node.

    Raises:
        ValueError: The model does not take the inputs, or does what it may not do, see `check`.
    """
    if not noted(algorithm.model) and len(split.index):
        module = algorithm.module(torch.empty(0, dtype=split.dtype))
        x, outputs, _ = _tried(module, split, split.index[:PROBE])
        _note_training(algorithm, split, x, outputs)


def _note_training(algorithm: Algorithm, split: ClientData, x: Inputs, outputs: Any) -> None:
    """Note what the model does in training, by examples `x` and its outputs for them.

    Raises:
        ValueError: The model does something that it may not do.
    """
    trainable = {name for name, p in algorithm.model.named_parameters() if p.requires_grad}
    training = looked_at_training(algorithm.module(torch.empty(0, dtype=split.dtype), train=True), x, outputs, trainable)
    if training.fault:
        raise ValueError(f"the model {type(algorithm.model).__name__} is refused: its forward {training.fault}")
    note(algorithm.model, draws=training.draws, other=training.other)


def _tried(module: nn.Module, split: ClientData, rows: Tensor) -> tuple[Inputs, Any, str]:
    """Return the inputs at some rows, the model's outputs for them, and what `looked_at` finds.

    Raises:
        ValueError: The model does not take the inputs.
    """
    x = each(Tensor.cpu, split.take(rows))
    try:
        return x, *looked_at(module, x)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise ValueError(f"the model does not take inputs of shape {split.inputs} ({error}); {remedy(error, x)}") from error


def _extremes(split: ClientData) -> Tensor:
    """Return rows [R] of the shared tensors that have, between them, the smallest and the largest whole number of each column.

    Of inputs with many columns, which then are places in one text, the extremes of all columns together.
    """
    found = [split.index[:1]]
    for _, t in named(split.x):
        if t.is_floating_point() or t.dtype == torch.bool or not t[:1].numel():
            continue
        best, where = None, split.index[:1]
        for rows in split.index.split(max(1, PIECE // (8 * t[:1].numel()))):
            values = t.index_select(0, rows.to(t.device)).flatten(1).long().to(rows.device)
            low, high = (values, values) if values.shape[1] <= COLUMNS else (values.amin(1, True), values.amax(1, True))
            ends, places = torch.cat([low, -high], 1).min(0)
            at = rows[places]
            best, where = (ends, at) if best is None else (best.minimum(ends), at.where(ends < best, where))
        found.append(where)
    return torch.cat(found).unique()


def _check_followed(algorithm: Algorithm) -> None:
    """Check that every norm whose statistics are a block's is in the forward passes of some phase.

    Raises:
        ValueError: No phase has a block's norms, so that their statistics would stay those of the start.
    """
    inner = [one for phase in algorithm.phases for one in getattr(phase, "phases", (phase,))]
    followed = {name for one in inner if isinstance(one, Descend) for name in algorithm.whole(one.energy.parts)}
    if still := [name for name, block in algorithm.blocks.items() if isinstance(block, Buffers) and name not in followed]:
        of = still[0].removesuffix(SUFFIX)
        raise ValueError(
            f"no phase of the method has block {of!r} in its energy's parts, so that the statistics of its norms would stay those of the "
            "start; convert the norms by bf.models.group_norm(model), or put them in eval mode"
        )


def lost(algorithm: Algorithm) -> list[str]:
    """Name what a method learns in vain: trained tensors that nobody keeps; or that it learns nothing."""
    if not algorithm.phases:
        return ["the method has no phases, so that nothing is trained"]
    told = []
    for name in dict.fromkeys(name for phase in algorithm.phases for name in trained(phase)):
        block = algorithm.blocks[name]
        held = algorithm.belief(name, {"loc": torch.zeros(algorithm.layout(name).size)})
        gone = [] if block.keep else [key for key in held if block.pool is None or key not in block.pool.sends]
        if gone:
            told.append(
                f"block {name!r} is trained, and what is learnt of its {gone} is thrown away after every round, as the client does not "
                f"keep it and does not send it; pass keep=True, or a pool that sends it, as pools.Mean(sends={tuple(held)})"
            )
    return told


def _check_slope(likelihood: Any, outputs: Tensor, y: Tensor) -> None:
    """Check on some examples that `nll_and_slope` is `nll` and its derivative, as it is not where a subclass overrides one of the two.

    Raises:
        ValueError: The two differ.
    """
    try:
        apart = _slope_apart(likelihood, outputs.double(), y, 1e-4)
    except RuntimeError:  # as where it holds tensors in single precision
        apart = _slope_apart(likelihood, outputs, y, 1e-3)
    if apart is not None:
        raise ValueError(
            f"likelihood {type(likelihood).__name__}: nll_and_slope is not nll and its derivative at the model's outputs (they differ by "
            f"up to {apart:.3g}); override both in a subclass, or mend the slope"
        )


def _slope_apart(likelihood: Any, outputs: Tensor, y: Tensor, tolerance: float) -> float | None:
    """Return how far a likelihood's slope is from its derivative, or None if it is no farther than rounding."""
    y = y.to(outputs) if y.is_floating_point() else y
    shapes = [list(t.shape) for t in (likelihood.nll(outputs, y), *likelihood.nll_and_slope(outputs, y))]
    if shapes != [[len(outputs)], [len(outputs)], list(outputs.shape)]:
        raise ValueError(
            f"likelihood {type(likelihood).__name__}: nll returns shape {shapes[0]}, nll_and_slope {shapes[1]} and {shapes[2]}, "
            f"for outputs {list(outputs.shape)}; losses must be one for each example, as with reduction='none', and slopes must have the "
            "outputs' shape"
        )
    with torch.enable_grad():
        at = outputs.detach().requires_grad_()
        nll = likelihood.nll(at, y)
        if not nll.requires_grad:
            return None
        (wanted,) = torch.autograd.grad(nll.sum(), at)
    losses, slope = likelihood.nll_and_slope(outputs.detach(), y)
    nll = nll.detach()
    off = max(float((slope - wanted).abs().max() / (1 + wanted.abs().max())), float(((losses - nll).abs() / (1 + nll.abs())).max()))
    return off if off > tolerance else None
