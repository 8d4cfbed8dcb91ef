"""Phases: the local work of a round, as pure functions of one client. Engines run them for one
client or for many at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.options import Count, declared
from bayesfl.base.protocols import Batch, Carry, Info, Server, View
from bayesfl.base.warning import noted
from bayesfl.composition.algorithm import Algorithm, placed
from bayesfl.composition.energy import Energy
from bayesfl.composition.priors import Flat, Tilt, is_normal
from bayesfl.models.weights import gradient_of
from bayesfl.optim import SGD, Optimiser, check_optimiser, rate_at
from bayesfl.posteriors.point import Point

Noise: TypeAlias = dict[str, Tensor]
ClientEpochs: TypeAlias = Callable[[int, np.random.Generator], int]
"""Number of passes of each client, for devices that differ: (client, generator) -> a number >= 1.
The generator is the client's own in this round, the same for all phases, so draws depend only on
seed, round and client.
"""
Update: TypeAlias = Callable[[Algorithm, Server, View, Batch], View]


class Phase(Protocol):
    """Define the interface of a phase, as engines use it.

    A phase of your own is a class with these members. vmap runs it for many clients at once, or,
    with `batched=False`, the reference kernel runs it client by client.
    """

    @property
    def epochs(self) -> int | ClientEpochs | str:
        """Return the number of passes over the client's data, a function of the client, or the name
        of a number that the client receives; with no batch size, of full-batch steps.
        """
        ...

    @property
    def steps(self) -> int | None:
        """Return the number of steps, which replaces `epochs`; None to count passes."""
        ...

    @property
    def batch_size(self) -> int | None:
        """Return the number of examples of a step; None for all of the client's."""
        ...

    @property
    def batched(self) -> bool:
        """Return whether vmap can run the phase; otherwise it runs client by client."""
        ...

    def check(self, algorithm: Algorithm) -> None:
        """Raise ValueError if the phase does not fit the algorithm."""
        ...

    def noise(self, algorithm: Algorithm) -> dict[str, tuple[int, int]]:
        """Return {block: (S, noise size)}: the number of standard normals for one step, S draws of
        each block with draws.
        """
        ...

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """Return the initial state that one client keeps from round to round for this phase alone,
        given the posteriors (`beliefs`) of all blocks.
        """
        ...

    def begin(self, algorithm: Algorithm, given: Server, view: View) -> Carry:
        """Return the state that is passed from step to step, before the first step."""
        ...

    def step(
        self,
        algorithm: Algorithm,
        carry: Carry,
        given: Server,
        view: View,
        batch: Batch,
        noise: Noise,
    ) -> Carry:
        """Take one step on a batch and return the new state."""
        ...

    def end(
        self, algorithm: Algorithm, carry: Carry, given: Server, view: View
    ) -> tuple[View, Info]:
        """Return the client's view after the phase, and information for people to read."""
        ...


@dataclass(frozen=True)
@declared
class Descend:
    """Minimise an energy over one block, or over several blocks together, by gradient steps.

    Priors are constant during the phase: they read the view before the first step, including the
    trained blocks. Only trained blocks that are no parts of the energy move with the phase: they
    are parameters of the other blocks' priors, which read them from the view, as
    `priors.own_mean` does; a block that no prior reads stays where it is.

    Kernels other than `reference` run a plain `Descend` by `bayesfl.engine.descent`, in place and
    for a chunk of clients (see `by_algebra` and `bayesfl.engine.driver`). The reference kernel runs
    its `step`; so does vmap for a subclass, or for an energy that overrides a method. Tests compare
    the two.

    Args:
        energy: The objective, which also names the trained blocks.
        epochs: Number of passes over the client's data, the last short batch included, a function
            of the client, see `ClientEpochs`, or the name of a number that everyone receives, see
            `Algorithm(drawn=)`; with `batch_size=None`, number of full-batch steps. Inside
            `Repeat`, number of steps on the shared batch.
        steps: Number of steps; if given, it replaces `epochs`.
        batch_size: Number of examples of a step; None for all of the client's.
        optimiser: Optimiser. Its state lasts for the phase within a round, inside `Repeat` from
            batch to batch; it is reset every round unless `persist` names it.
        draws: Number S of posterior draws of a step, shared by its examples.
        prox: Whether Gaussian priors are left out of the gradient and solved exactly after each
            step of rate lr, $w <- (w + lr k centre) / (1 + lr k)$ with $k = 1 / variance$ (under a
            mean likelihood $1 / (n variance)$). This is stable for priors of any strength, where a
            gradient step needs $lr k < 2$, and has the same minimum (Parikh and Boyd, "Proximal
            algorithms", 2014, section 4.2). The lr of a weight is the optimiser's `pace`: larger
            with momentum, and different for each weight with Adam.
        persist: Name of the optimiser's state, which the client then keeps from round to round as
            private state.
        counts: Name of an entry of the view that receives the client's number of steps, a
            floating-point number, for later phases; inside `Repeat`, the steps on the last batch.

    Example:
        >>> fit = bf.Energy("w", ("w",), likelihood="mean")
        >>> step = bf.Descend(fit, epochs=5, batch_size=50, optimiser=bf.optim.SGD(0.1))
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> bf.Algorithm(model, {"w": bf.Block()}, (step,), parts=("w",))  # FedAvg
        Algorithm(SplitModel; w: Point; 1 phases)
    """

    energy: Energy
    _: KW_ONLY
    epochs: Count | ClientEpochs | str = 1
    steps: Count | None = None
    batch_size: Count | None = None
    optimiser: Annotated[Optimiser, check_optimiser] = SGD()
    draws: Count = 1
    prox: bool = False
    persist: str | None = None
    counts: str | None = None
    batched = True

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the trained blocks, which are the energy's."""
        return self.energy.blocks

    def check(self, algorithm: Algorithm) -> None:
        """Raise ValueError if the phase does not fit the algorithm, see `Phase.check`."""
        algorithm.check_parts(self.energy.parts)
        pulled = [name for name in self.blocks if type(algorithm.blocks[name].prior) is not Flat]
        tied = self.energy.of_priors
        if tied and (self.prox or not set(pulled) - set(tied)):
            raise ValueError(
                f"blocks {list(tied)} are trained on an energy without them in its parts "
                f"{self.energy.parts}: they must be parameters of its blocks' priors, with prox "
                "False"
            )
        drawn = [
            name
            for name in self.energy.parts
            if algorithm.blocks[name].stochastic or algorithm.blocks[name].copies
        ]
        if self.energy.penalty is not None and drawn:
            raise ValueError(
                f"a penalty is defined for one model at its weights, but blocks {drawn} draw or "
                "have copies; use Point blocks"
            )
        if loose := [
            name
            for name in self.blocks
            if algorithm.blocks[name].stochastic
            and isinstance(algorithm.blocks[name].prior, Flat | Tilt)
            and name not in tied
        ]:
            kind = type(algorithm.blocks[loose[0]].prior).__name__
            raise ValueError(
                f"blocks {loose} draw, and under their prior {kind} the width has no optimum (it "
                "grows without bound along directions without data); give them a Normal prior, or "
                "a Point posterior"
            )
        predicts = {name for part in algorithm.parts for name in algorithm.layout(part).names}
        if left := sorted(
            predicts - {name for part in self.energy.parts for name in algorithm.layout(part).names}
        ):
            raise ValueError(
                f"the energy of {self.blocks} has the parts {self.energy.parts}, which leave out "
                f"{left[:3]}: in training these would have the given model's weights, not the "
                f"client's; name all parts, as {algorithm.parts}"
            )
        if self.prox and not all(
            is_normal(block.prior) and type(block.posterior) is Point
            for block in map(algorithm.blocks.__getitem__, pulled)
        ):
            raise ValueError(
                "prox solves a Gaussian prior of Point blocks after each step, but blocks "
                f"{pulled} have other priors or posteriors; use prox=False"
            )

    def noise(self, algorithm: Algorithm) -> dict[str, tuple[int, int]]:
        """Return the noise of one step, see `Phase.noise`, for every part with draws."""
        return {
            name: (self.draws, algorithm.noise_size(name))
            for name in self.energy.parts
            if algorithm.blocks[name].stochastic
        }

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """Return the optimiser's state if it persists, see `Phase.keeps`."""
        state = (
            None
            if self.persist is None
            else self.optimiser.init({name: beliefs[name] for name in self.blocks})
        )
        return {} if state is None else {str(self.persist): tree_map(torch.as_tensor, state)}

    def begin(self, algorithm: Algorithm, given: Server, view: View) -> Carry:
        """Return the state before the first step, see `Phase.begin`."""
        beliefs = {name: view[name] for name in self.blocks}
        state = view[self.persist] if self.persist in view else self.optimiser.init(beliefs)
        return beliefs, state, torch.zeros_like(view["n"]), 0

    def step(
        self,
        algorithm: Algorithm,
        carry: Carry,
        given: Server,
        view: View,
        batch: Batch,
        noise: Noise,
    ) -> Carry:
        """Take one step, see `Phase.step`."""
        beliefs, state, total, count = carry

        scale, weight = self.energy.scales(view["n"])

        def energy(beliefs: Any) -> tuple[Tensor, Tensor]:
            if not self.prox:
                return self.energy(algorithm, beliefs, given, view, batch, noise)
            loss, nll = self.energy.loss(algorithm, beliefs, given, view, batch, noise)
            return scale * loss, nll

        gradient, nll = gradient_of(energy, beliefs)
        rate = rate_at(self.optimiser.rate, given["round"], given["rounds"])
        beliefs, state = self.optimiser.update(beliefs, gradient, state, rate)
        pace = self.optimiser.pace(beliefs, state, rate) if self.prox else {}
        for name in pace:
            prior = algorithm.blocks[name].prior
            if is_normal(prior):
                pull = pace[name]["loc"] * weight / prior.variance(given, view)
                beliefs = beliefs | {
                    name: {
                        "loc": (beliefs[name]["loc"] + pull * prior.centre(given, view))
                        / (1 + pull)
                    }
                }
        return beliefs, state, total + nll.detach(), count + 1

    def end(
        self, algorithm: Algorithm, carry: Carry, given: Server, view: View
    ) -> tuple[View, Info]:
        """Return the client's view and the mean over batches of their mean negative log likelihood,
        in nats, see `Phase.end`.
        """
        beliefs, state, total, count = carry
        kept = {} if self.persist is None or state is None else {self.persist: state}
        if self.counts is not None:
            kept[self.counts] = torch.as_tensor(count).to(view["n"])
        return view | beliefs | kept, {"nll": total / count}


def by_algebra(phase: "Phase | Repeat") -> TypeGuard[Descend]:
    """Return whether kernels may compute a phase's steps themselves: it is a `Descend` whose energy
    overrides nothing, and whose priors are constant.

    A subclass may have a step, or an energy, of its own.
    """
    return (
        type(phase) is Descend
        and not phase.energy.of_priors
        and all(
            getattr(type(phase.energy), name) is getattr(Energy, name)
            for name in ("__call__", "loss")
        )
    )


@dataclass(frozen=True)
@declared
class Once:
    """Apply a pure function to a client's view once, for closed-form updates, statistics, or a new
    start.

    Args:
        fn: (algorithm, given, view, batch) -> the entries of the view that change. An added entry
            is dropped after the round unless the algorithm's `private` has its name, and is sent if
            the algorithm's `reports` has it.
        data: Rows of the client that `fn` reads: True or `train` for its training rows,
            `validation` for its validation rows; with False `batch` is empty. Inside `Repeat`,
            `batch` is always the shared batch, of training rows.
        losses: Parts of a predictor. Their negative log likelihoods at their means, in nats, are
            then in `batch["losses"]`, [B], or [M, B] for copies; engines compute them faster than
            `fn` would. They need `data`.
        kept: {name: start} of tensors that the client keeps from round to round only for this
            phase.
        normals: Names of blocks. `batch["normals"]` then has, by block, a standard normal for each
            weight, [D], or [M, D] for copies.
        batched: Whether vmap can run `fn`.

    Raises:
        ValueError: `fn` changes names, shapes or dtypes of the tensors of a block, or of an entry
            that a client keeps.

    Example:
        >>> def halve(algorithm, given, view, batch):
        ...     return {"w": {"loc": view["w"]["loc"] / 2}}
        >>> model = nn.Linear(2, 2)
        >>> bf.Algorithm(model, {"w": bf.Block()}, (bf.Once(halve),), parts=("w",))
        Algorithm(Linear; w: Point; 1 phases)
    """

    fn: Update
    _: KW_ONLY
    data: bool | Literal["train", "validation"] = False
    losses: tuple[str, ...] = ()
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    normals: tuple[str, ...] = ()
    batched: bool = True
    epochs = 1
    steps = None
    batch_size = None

    def check(self, algorithm: Algorithm) -> None:
        """Check that the algorithm has the parts of `losses`."""
        algorithm.check_parts(self.losses)

    def noise(self, algorithm: Algorithm) -> dict[str, tuple[int, int]]:
        """Return the noise of `normals`, see `Phase.noise`."""
        return {
            name: (1, (algorithm.blocks[name].copies or 1) * algorithm.layout(name).size)
            for name in self.normals
        }

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """Return the starts of `kept`, see `Phase.keeps`."""
        like = next(iter(beliefs.values()))["loc"]
        return {name: placed(start, like).clone() for name, start in self.kept.items()}

    def begin(self, algorithm: Algorithm, given: Server, view: View) -> Carry:
        """Return the view, see `Phase.begin`."""
        return view

    def step(
        self,
        algorithm: Algorithm,
        carry: Carry,
        given: Server,
        view: View,
        batch: Batch,
        noise: Noise,
    ) -> Carry:
        """Apply `fn`, see `Phase.step`."""
        normals = {name: algorithm.noise_of_copies(name, e[0]) for name, e in noise.items()}
        known = {**algorithm.blocks, **algorithm.private, **self.kept}
        with noted(f"in {getattr(self.fn, '__name__', self.fn)!r}, a function of a phase"):
            found = tree_map(
                lambda t: placed(t, view["n"]) if isinstance(t, float) else t,
                self.fn(algorithm, given, carry, batch | {"normals": normals} if noise else batch),
            )
            for name, entry in found.items():
                if name in known and (new := _form(entry)) != (old := _form(carry[name])):
                    raise ValueError(f"entry {name!r} was {old}, and is returned as {new}")
        return {**carry, **found}

    def end(
        self, algorithm: Algorithm, carry: Carry, given: Server, view: View
    ) -> tuple[View, Info]:
        """Return the view and no information, see `Phase.end`."""
        return carry, {}


def _form(entry: Any) -> Any:
    return tree_map(lambda t: f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else t, entry)


@dataclass(frozen=True)
@declared
class Repeat:
    """Loop over batches, and run the inner phases one after another on each. A `Repeat` is not a
    phase: engines unroll it.

    Args:
        phases: Inner phases, each a `Descend` (which takes `epochs`, or `steps`, steps on the
            batch) or a `Once`.
        epochs: Number of passes over the client's data, the last short batch included, or a
            function of the client, see `ClientEpochs`.
        times: Number of batches; if given, it replaces `epochs`. A new pass over the data begins
            whenever one ends.
        batch_size: Number of examples of a batch; None for all of the client's.

    Raises:
        ValueError: An inner phase is a `Repeat`, has a batch size of its own, or reads validation
            rows.

    Example:
        >>> both = ("body", "head")
        >>> head = bf.Descend(bf.Energy("head", both, likelihood="mean"))
        >>> body = bf.Descend(bf.Energy("body", both, likelihood="mean"))
        >>> phase = bf.Repeat((head, body), epochs=2, batch_size=50)  # both steps on each batch
        >>> len(phase.inner)
        2
    """

    phases: tuple[Descend | Once, ...]
    _: KW_ONLY
    epochs: Count | ClientEpochs = 1
    times: Count | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        if wrong := [
            phase
            for phase in self.phases
            if isinstance(phase, Repeat)
            or phase.batch_size is not None
            or (isinstance(phase, Once) and phase.data == "validation")
        ]:
            raise ValueError(
                "a phase inside a Repeat works on its batch of training rows, got "
                f"{wrong[0]!r}; give batch_size to the Repeat alone, and put a phase with "
                "data='validation', or another Repeat, before or after it"
            )

    @cached_property
    def inner(self) -> tuple[Descend | Once, ...]:
        """Return the phases as engines run them: the view passes the state of each optimiser from
        batch to batch, under a name with a dot, which no other entry has.
        """
        return tuple(
            replace(phase, persist=f".{place}")
            if isinstance(phase, Descend) and phase.persist is None
            else phase
            for place, phase in enumerate(self.phases)
        )

    def end(self, view: View) -> View:
        """Return the view after the last batch, without the states of optimisers."""
        return {name: entry for name, entry in view.items() if not name.startswith(".")}

    @property
    def steps(self) -> int | None:
        """Return the number of batches; None to count passes."""
        return self.times

    @property
    def batched(self) -> bool:
        """Return whether vmap can run all inner phases."""
        return all(phase.batched for phase in self.phases)

    def check(self, algorithm: Algorithm) -> None:
        """Raise ValueError if an inner phase does not fit the algorithm."""
        for phase in self.phases:
            phase.check(algorithm)

    def keeps(self, algorithm: Algorithm, beliefs: View) -> View:
        """Return the state that the inner phases keep."""
        return {
            name: state
            for phase in self.phases
            for name, state in phase.keeps(algorithm, beliefs).items()
        }


def unrolled(phase: Phase | Repeat) -> tuple[Phase, ...]:
    """Return the inner phases of a `Repeat`, or the phase itself."""
    return phase.phases if isinstance(phase, Repeat) else (phase,)


def steps_on_batch(phase: Phase) -> int:
    """Return the number of steps of a phase inside a `Repeat` on the shared batch."""
    count: Any = phase.steps or phase.epochs
    return count


def by_chance(phase: Phase | Repeat, algorithm: Algorithm) -> bool:
    """Return whether a phase's steps are random: by the order of the examples, or by draws from a
    posterior.
    """
    return phase.batch_size is not None or any(one.noise(algorithm) for one in unrolled(phase))


def phase_in_words(phase: Phase | Repeat) -> str:
    """Return a phase's class and the blocks it trains as text, such as `Descend on head`."""
    blocks = trained(phase)
    return type(phase).__name__ + (f" on {', '.join(blocks)}" if blocks else "")


def trained(phase: Phase | Repeat) -> tuple[str, ...]:
    """Return the blocks that a phase trains, including those of a `Repeat`'s inner phases; none for
    a phase that does not declare them, such as `Once`.
    """
    inner = unrolled(phase)
    return tuple(dict.fromkeys(name for one in inner for name in getattr(one, "blocks", ())))
