"""Checks of a method: trained parameters are sent or kept, and the whole model is trained."""

import torch

from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.buffers import SUFFIX, Buffers
from bayesfl.composition.phases import Descend, Once, trained, unrolled


def check_followed(algorithm: Algorithm) -> None:
    """Check that every norm whose statistics are a block's is in the forward passes of some phase.

    Raises:
        ValueError: No phase has a block's norms, so that their statistics would stay those of the
            start.
    """
    inner = [one for phase in algorithm.phases for one in getattr(phase, "phases", (phase,))]
    followed = {
        name
        for one in inner
        if isinstance(one, Descend)
        for name in algorithm.whole(one.energy.parts)
    }
    if still := [
        name
        for name, block in algorithm.blocks.items()
        if isinstance(block, Buffers) and name not in followed
    ]:
        of = still[0].removesuffix(SUFFIX)
        raise ValueError(
            f"no phase of the method has block {of!r} in its energy's parts, so that the "
            "statistics of its norms would stay those of the start; convert the norms by "
            "bf.models.group_norm(model), or put them in eval mode"
        )


def warn_of_losses(algorithm: Algorithm) -> None:
    """Warn of trained parameters that are neither kept nor sent, see `lost`, and of parameters that
    none of its blocks covers.
    """
    told = lost(algorithm)
    covered = {name for block in algorithm.blocks for name in algorithm.layout(block).names}
    if idle := [
        name
        for name, p in algorithm.model.named_parameters()
        if p.requires_grad and name not in covered
    ]:
        told.append(
            f"no block of the method covers the parameters {idle[:5]} ({len(idle)} in all), so "
            "they stay as they are; freeze them (requires_grad=False) if that is meant, else "
            "rename them or widen a block's pattern"
        )
    for one in told:
        warn(one)


def lost(algorithm: Algorithm) -> list[str]:
    """Return warnings about trained tensors that nobody keeps, or about a method that learns
    nothing.
    """
    if not algorithm.phases:
        learns = algorithm.adapt or hasattr(algorithm.predictor, "asks")
        return [] if learns else ["the method has no phases, so that nothing is trained"]
    told = []
    # A function may put what blocks before it have learnt into what is kept or sent.
    steps = [one for phase in algorithm.phases for one in unrolled(phase)]
    functions = max((i for i, one in enumerate(steps) if isinstance(one, Once)), default=-1)
    for name in dict.fromkeys(name for one in steps[functions + 1 :] for name in trained(one)):
        block = algorithm.blocks[name]
        held = algorithm.belief(name, {"loc": torch.zeros(algorithm.layout(name).size)})
        gone = (
            []
            if block.keep
            else [key for key in held if block.pool is None or key not in block.pool.sends]
        )
        if gone:
            told.append(
                f"block {name!r} is trained, and what is learnt of its {gone} is thrown away after "
                "every round, as the client does not keep it and does not send it; pass "
                f"keep=True, or a pool that sends it, as pools.Mean(sends={tuple(held)})"
            )
    return told
