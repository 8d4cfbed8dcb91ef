"""Another optimiser on the clients, for any method."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Descend, Repeat
from bayesfl.optim import Optimiser, check_optimiser


def with_optimiser(algorithm: Algorithm, optimiser: Optimiser, *, on: Iterable[str] | None = None) -> Algorithm:
    """Return the method with another optimiser in its gradient steps: those of training, fine-tuning and adaptation, inside `Repeat` too.

    Batches, numbers of steps and what is kept from round to round stay as they are. Closed-form steps (an empirical-Bayes scale, a proximal
    step, EM's weights) and phases that are functions have no optimiser and are not changed. The server's optimiser is
    `with_server_optimiser`.

    Args:
        algorithm: The method.
        optimiser: One of `bayesfl.optim`, such as `Clip(Adam(1e-3), norm=1.0)`.
        on: Names of the blocks whose steps it takes; None for all.

    Raises:
        TypeError: `on` is text.
        ValueError: `optimiser` is not one of `bayesfl.optim`, no gradient step trains a block of `on`, or one trains such a block together
            with others.
    """
    check_optimiser("optimiser", optimiser)
    if isinstance(on, str):
        raise TypeError(f"on must be names of blocks, as ({on!r},), got {on!r}")
    wanted = set(algorithm.blocks if on is None else on)
    if not wanted:
        raise ValueError("on names no block; leave it out for all")
    met: set[str] = set()

    def changed(phase: Any) -> Any:
        if isinstance(phase, Repeat):
            return replace(phase, phases=tuple(changed(inner) for inner in phase.phases))
        if not isinstance(phase, Descend) or not wanted & set(phase.blocks):
            return phase
        if apart := sorted(set(phase.blocks) - wanted):
            raise ValueError(f"blocks {list(phase.blocks)} are trained together by one optimiser; name {apart} in on, too")
        met.update(phase.blocks)
        return replace(phase, optimiser=optimiser)

    made = {name: tuple(changed(phase) for phase in getattr(algorithm, name)) for name in ("phases", "finetune", "adapt")}
    if missing := sorted(wanted - met) if on is not None else not met and ["any block"]:
        raise ValueError(f"no gradient step trains {missing}; the blocks are {list(algorithm.blocks)}")
    return replace(algorithm, **made)
