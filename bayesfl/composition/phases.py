"""Phases: the local work of a round, written for ONE client and pure. Engines run them for one client or for many at once."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.checks import whole
from bayesfl.base.protocols import Batch, Carry, GaussianPrior, Info, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block
from bayesfl.composition.energy import Energy
from bayesfl.composition.priors import Flat
from bayesfl.optim import SGD, Optimiser, check_optimiser, rate_at

Noise: TypeAlias = dict[str, Tensor]
Update: TypeAlias = Callable[[Algorithm, Server, View, Batch], View]


class Phase(Protocol):
    """What an engine asks of a phase. A phase by hand is a class with these members; vmap, or `batched=False`, carries it."""

    @property
    def epochs(self) -> int:
        """Passes over the client's data; with no batch size, full-batch steps."""
        ...

    @property
    def steps(self) -> int | None:
        """Steps instead of passes; wins over `epochs`."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Examples of a step; None for all of the client's."""
        ...

    @property
    def batched(self) -> bool:
        """False where vmap cannot carry it: it then runs client by client."""
        ...

    def check(self, algorithm: Algorithm) -> None:
        """Raises ValueError where the phase does not fit the algorithm."""
        ...

    def noise(self, algorithm: Algorithm) -> dict[str, tuple[int, int]]:
        """{block: (S, noise size)} of one step."""
        ...

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """What one client keeps from round to round for this phase alone, at its start, where `beliefs` are those of all blocks."""
        ...

    def begin(self, algorithm: Algorithm, given: Server, view: View) -> Carry:
        """What the steps carry."""
        ...

    def step(self, algorithm: Algorithm, carry: Carry, given: Server, view: View, batch: Batch, noise: Noise) -> Carry:
        """One step."""
        ...

    def end(self, algorithm: Algorithm, carry: Carry, given: Server, view: View) -> tuple[View, Info]:
        """The client's view afterwards, and what people may read."""
        ...


@dataclass(frozen=True)
class Descend:
    """Minimise an energy over its block, or over its several blocks together, by gradient steps.

    Priors are constant meanwhile: what they read of the view is as it was before the first step, also of the blocks trained here.

    Args:
        energy: What is minimised, and over which blocks.
        epochs: Passes over the client's data, the last short batch included; with `batch_size=None`, full-batch steps. Inside
            `Repeat`, steps on the shared batch.
        steps: Steps instead of passes; wins over `epochs`.
        batch_size: Examples of a step; None for all of the client's.
        optimiser: Starts anew in every phase of every round, unless `persist` names its state.
        draws: Posterior draws of a step, shared by its examples.
        prox: Whether Gaussian priors are left out of the gradient and solved exactly after each step of rate lr,
            w <- (w + lr k centre) / (1 + lr k) with k = 1 / variance (under a mean likelihood 1 / (n variance)): stable however stiff
            they are, where a gradient step needs lr k < 2, with the same minimum (Parikh and Boyd, "Proximal algorithms", 2014, section
            4.2). The lr of a weight is the optimiser's `pace`: that of momentum is longer, Adam's differs from weight to weight.
        persist: A name for the optimiser's state, which the client then keeps from round to round as private state.
    """

    energy: Energy
    _: KW_ONLY
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = None
    optimiser: Optimiser = SGD()
    draws: int = 1
    prox: bool = False
    persist: str | None = None
    batched = True

    def __post_init__(self) -> None:
        whole("epochs", self.epochs, least=1)
        whole("draws", self.draws, least=1)
        check_optimiser("optimiser", self.optimiser)
        for name, value in {"steps": self.steps, "batch_size": self.batch_size}.items():
            if value is not None:
                whole(name, value, least=1)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The trained blocks: the energy's."""
        return self.energy.blocks

    def check(self, algorithm: Algorithm) -> None:
        """See `Phase.check`."""
        algorithm.check_parts(self.energy.parts)
        if missing := [name for name in self.blocks if name not in self.energy.parts]:
            raise ValueError(f"blocks {missing} are trained on an energy whose predictor {self.energy.parts} does not contain them")
        drawn = [name for name in self.energy.parts if algorithm.blocks[name].stochastic or algorithm.blocks[name].copies]
        if self.energy.penalty is not None and drawn:
            raise ValueError(f"a penalty is defined for one model at its weights, but blocks {drawn} draw or have copies; use Point blocks")
        pulled = [name for name in self.blocks if not isinstance(algorithm.blocks[name].prior, Flat)]
        if self.prox and not all(_solvable(algorithm.blocks[name]) for name in pulled):
            raise ValueError(
                f"prox solves a Gaussian prior of Point blocks after each step, which blocks {pulled} have not; use prox=False"
            )

    def noise(self, algorithm: Algorithm) -> dict[str, tuple[int, int]]:
        """See `Phase.noise`: every part with an entropy draws."""
        return {name: (self.draws, algorithm.noise_size(name)) for name in self.energy.parts if algorithm.blocks[name].stochastic}

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """See `Phase.keeps`: the optimiser's state, where it persists and has any."""
        state = None if self.persist is None else self.optimiser.init({name: beliefs[name] for name in self.blocks})
        return {} if state is None else {str(self.persist): tree_map(torch.as_tensor, state)}

    def begin(self, algorithm: Algorithm, given: Server, view: View) -> Carry:
        """See `Phase.begin`."""
        beliefs = {name: view[name] for name in self.blocks}
        state = view[self.persist] if self.persist in view else self.optimiser.init(beliefs)
        return beliefs, state, torch.zeros_like(view["n"]), 0

    def step(self, algorithm: Algorithm, carry: Carry, given: Server, view: View, batch: Batch, noise: Noise) -> Carry:
        """See `Phase.step`."""
        beliefs, state, total, count = carry

        scale, weight = self.energy.scales(view["n"])

        def energy(beliefs: Any) -> tuple[Tensor, Tensor]:
            if not self.prox:
                return self.energy(algorithm, beliefs, given, view, batch, noise)
            loss, nll = self.energy.loss(algorithm, beliefs, given, view, batch, noise)
            return scale * loss, nll

        gradient, nll = torch.func.grad(energy, has_aux=True)(beliefs)
        rate = rate_at(self.optimiser.rate, given["round"], given["rounds"])
        beliefs, state = self.optimiser.update(beliefs, gradient, state, rate)
        pace = self.optimiser.pace(beliefs, state, rate) if self.prox else {}
        for name in pace:
            prior = algorithm.blocks[name].prior
            if isinstance(prior, GaussianPrior):
                pull = pace[name]["loc"] * weight / prior.variance(given, view)
                beliefs = beliefs | {name: {"loc": (beliefs[name]["loc"] + pull * prior.centre(given, view)) / (1 + pull)}}
        return beliefs, state, total + nll.detach(), count + 1

    def end(self, algorithm: Algorithm, carry: Carry, given: Server, view: View) -> tuple[View, Info]:
        """See `Phase.end`; the information is the batches' mean negative log likelihood, in nats."""
        beliefs, state, total, count = carry
        kept = {self.persist: state} if self.persist in view else {}
        return view | beliefs | kept, {"nll": total / count}


def _solvable(block: Block) -> bool:
    return isinstance(block.prior, GaussianPrior) and not block.stochastic


@dataclass(frozen=True)
class Once:
    """One pure function of a client's view: closed forms, statistics, restarts.

    Args:
        fn: (algorithm, given, view, batch) -> view. What it adds dies with the round unless `private` names it; `reports` has it sent.
        data: Whether it reads the client's data; without, `batch` is empty (inside `Repeat` it is always the shared batch).
        losses: Parts of a predictor whose negative log likelihoods at their means, in nats, `batch["losses"]` then has, [B], or [M, B] of
            copies: what engines compute faster than `fn` would.
        kept: {name: start} of what the client keeps from round to round for this phase alone.
        batched: False where vmap cannot carry `fn`.

    Raises:
        ValueError: Losses without data.
    """

    fn: Update
    _: KW_ONLY
    data: bool = False
    losses: tuple[str, ...] = ()
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    batched: bool = True
    epochs = 1
    steps = None
    batch_size = None

    def __post_init__(self) -> None:
        if self.losses and not self.data:
            raise ValueError(f"losses of {self.losses} are those of the client's data; pass data=True")

    def check(self, algorithm: Algorithm) -> None:
        """Fits any algorithm that has the parts of `losses`."""
        algorithm.check_parts(self.losses)

    def noise(self, algorithm: Algorithm) -> dict[str, tuple[int, int]]:
        """Draws nothing."""
        return {}

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """See `Phase.keeps`."""
        return {name: start.clone() for name, start in self.kept.items()}

    def begin(self, algorithm: Algorithm, given: Server, view: View) -> Carry:
        """See `Phase.begin`."""
        return view

    def step(self, algorithm: Algorithm, carry: Carry, given: Server, view: View, batch: Batch, noise: Noise) -> Carry:
        """See `Phase.step`."""
        return self.fn(algorithm, given, carry, batch)

    def end(self, algorithm: Algorithm, carry: Carry, given: Server, view: View) -> tuple[View, Info]:
        """See `Phase.end`."""
        return carry, {}


@dataclass(frozen=True)
class Repeat:
    """`times` batches; on each, the inner phases one after another. A nested loop, not a phase: engines unroll it.

    Args:
        phases: `Descend` (taking `epochs`, or `steps`, steps on the batch) and `Once`.
        times: How many batches; passes over the data follow one another.
        batch_size: Examples of a batch; None for all of the client's.
    """

    phases: tuple[Descend | Once, ...]
    _: KW_ONLY
    times: int
    batch_size: int | None = None
    epochs = 1

    def __post_init__(self) -> None:
        whole("times", self.times, least=1)
        if self.batch_size is not None:
            whole("batch_size", self.batch_size, least=1)

    @property
    def steps(self) -> int:
        """One for each batch."""
        return self.times

    @property
    def batched(self) -> bool:
        """Whether vmap carries all of its phases."""
        return all(phase.batched for phase in self.phases)

    def check(self, algorithm: Algorithm) -> None:
        """As its inner phases."""
        for phase in self.phases:
            phase.check(algorithm)

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """What its inner phases keep."""
        return {name: state for phase in self.phases for name, state in phase.keeps(algorithm, beliefs).items()}


def described(phase: Any) -> str:
    """What a phase is and which blocks it trains, as `Descend on head`."""
    blocks = trained(phase)
    return type(phase).__name__ + (f" on {', '.join(blocks)}" if blocks else "")


def trained(phase: Any) -> tuple[str, ...]:
    """The blocks that a phase trains, those of a `Repeat`'s inner phases too; none where it does not say, as `Once`."""
    inner = phase.phases if isinstance(phase, Repeat) else (phase,)
    return tuple(dict.fromkeys(name for one in inner for name in getattr(one, "blocks", ())))
