"""Draws from a client's posterior, in the form of ArviZ."""

from typing import Any

import numpy as np
import torch

from bayesfl.base.checks import whole
from bayesfl.base.protocols import View
from bayesfl.base.random import Purpose, generator
from bayesfl.composition.algorithm import Algorithm


def to_arviz(algorithm: Algorithm, view: View, block: str, *, client: int, draws: int, seed: int, round: int) -> Any:
    """Return draws of a block; see `Result.to_arviz`.

    Args:
        algorithm: The method.
        view: The client's view, [1, ...].
        block: The block.
        client: The client's number, which selects the draws.
        draws: Number of draws.
        seed: The run's seed.
        round: Number of rounds done.

    Raises:
        ValueError: There is no such block, it has nothing to draw, or `draws` is not a whole number >= 1.
        ImportError: ArviZ is not installed.
    """
    import arviz

    whole("draws", draws, least=1)
    if block not in algorithm.blocks:
        raise ValueError(f"there is no block {block!r}; the method's blocks are {list(algorithm.blocks)}")
    if not algorithm.blocks[block].stochastic:
        drawn = [name for name, this in algorithm.blocks.items() if this.stochastic]
        raise ValueError(f"block {block!r} is a point, of which there are no draws; the blocks with a distribution are {drawn}")
    this, layout = algorithm.blocks[block], algorithm.layout(block)
    belief = {key: t[0] for key, t in view[block].items()}
    index = list(algorithm.blocks).index(block)
    rng = generator(seed, Purpose.POSTERIOR, round=round, client=client, index=index)
    noise = torch.from_numpy(rng.standard_normal((draws, algorithm.noise_size(block)), np.float32)).to(belief["loc"])
    noise = algorithm.noise_of_copies(block, noise)
    leaves = layout.leaves(this.posterior.sample({key: t.unsqueeze(0) for key, t in belief.items()}, noise))
    posterior = {name: leaf.unsqueeze(0).cpu().numpy() for name, leaf in leaves.items()}
    if int(arviz.__version__.split(".")[0]) > 0:  # from version 1 the groups are one mapping
        return arviz.from_dict({"posterior": posterior})
    return arviz.from_dict(posterior=posterior)
