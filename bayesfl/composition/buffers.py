"""Statistics of norms as blocks: each block that covers a norm has a block of the norm's buffers,
sent and kept in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor, nn

from bayesfl.base.layout import Layout, covers
from bayesfl.base.protocols import AdditivePool
from bayesfl.composition.block import Block
from bayesfl.composition.pools import Mean, Median, TrimmedMean
from bayesfl.models.modes import STATISTICS, norms, trainable

SUFFIX = "_buffers"


@dataclass(frozen=True)
class Buffers(Block):
    """Hold the running statistics of norms; `Algorithm` adds such blocks. Forward passes in
    training change them, optimisers do not.
    """


def with_buffers(model: nn.Module, blocks: Mapping[str, Block]) -> dict[str, Block]:
    """Return the blocks, with a block of buffers for each that covers a norm with statistics in
    training; earlier blocks of buffers are dropped.

    A norm belongs to the block that covers its weight or bias. A norm without trainable parameters
    belongs to the block whose pattern matches its name or its buffers' names.

    Raises:
        ValueError: A norm without trainable parameters belongs to no block, or a block with norms
            has a pool that mixes the clients.
    """
    plain = {name: block for name, block in blocks.items() if not isinstance(block, Buffers)}
    found: dict[str, list[str]] = {}
    for norm, part in norms(model).items():
        own = trainable(norm, part)
        names = own or [norm, *buffers_of(norm)]
        owners = [
            name
            for name, block in plain.items()
            if any(covers(block.pattern, one) for one in names)
        ]
        if not owners:
            raise ValueError(
                f"no block covers the norm {norm!r}, so its statistics would never change; widen a "
                "block's pattern, or put it in eval mode"
            )
        if torn := [
            name for name in owners if not all(covers(plain[name].pattern, one) for one in own)
        ]:
            raise ValueError(
                f"block {torn[0]!r} covers some of {own}, the parameters of the norm {norm!r}, and "
                "not all, so that its statistics would have several owners; let one block's "
                "pattern cover them all"
            )
        for name in owners:
            found.setdefault(name, []).extend(buffers_of(norm))
    added = {}
    for name, buffers in found.items():
        block = plain[name]
        mixed = not isinstance(block.pool, AdditivePool | Median | TrimmedMean | None)
        if mixed or not (block.pool or block.keep):
            raise ValueError(
                f"block {name!r} has batch norms, and its pool {type(block.pool).__name__} has no "
                "rule for the clients' statistics; convert the norms by "
                "bf.models.group_norm(model), or put them in eval mode"
            )
        values = Layout.of_buffers(model, tuple(buffers)).ravel(tensors_of(model))
        start = (
            "module" if block.copies is None else partial(_values, values.detach().cpu().float())
        )
        pool = block.pool if isinstance(block.pool, Mean | Median | TrimmedMean | None) else Mean()
        pool = replace(pool, sends=("loc",)) if isinstance(pool, Mean) else pool
        added[name + SUFFIX] = Buffers(
            tuple(buffers), pool=pool, keep=block.keep, copies=block.copies, start=start
        )
    return {**plain, **added}


def layout(model: nn.Module, block: Block) -> Layout:
    """Return the layout of a block, of buffers or of parameters."""
    if isinstance(block, Buffers):
        return Layout.of_buffers(model, tuple(block.pattern))
    return Layout(model, block.pattern)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, detached."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def buffers_of(norm: str) -> list[str]:
    """Return the names of a norm's statistics."""
    return [f"{norm}.{name}".removeprefix(".") for name in STATISTICS]


def _values(values: Tensor, rng: np.random.Generator, size: int) -> Tensor:
    return values
