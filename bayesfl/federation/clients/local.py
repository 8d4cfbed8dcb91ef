"""The local work of clients: a method's phases in order, for a chunk of clients, with a check after
each phase that the state is finite.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.inputs import each
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Batch, Info, Server, View
from bayesfl.base.random import Stage
from bayesfl.base.warning import noted, warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import (
    Descend,
    Phase,
    Repeat,
    by_algebra,
    by_chance,
    phase_in_words,
    trained,
    unrolled,
)
from bayesfl.data import ClientData
from bayesfl.engine import Engine, stability
from bayesfl.engine.crew import Crew
from bayesfl.engine.plan import PhasePlan, chunks
from bayesfl.federation.errors import DivergenceError, called
from bayesfl.models.trial import draws_in_training, trials

log = logging.getLogger(__name__)
T = TypeVar("T")
KEPT = 2**28
"""Maximum number of bytes of cached fine-tuned views, and of cached heads, which clients then
compute only once.
"""


@dataclass(frozen=True)
class Received:
    """Hold the state of a chunk of clients at the start of a round.

    Args:
        common: State that the server sent to every client.
        addressed: State that the server sent to single clients of the chunk, [C, ...].
        rows: The private state of the chunk's clients, [C, ...].
    """

    common: Server
    addressed: View
    rows: View


@dataclass(frozen=True)
class State:
    """Hold a federation's state between two rounds.

    Args:
        server: The server's state.
        private: The clients' private states, [J, ...] each.
        round: Number of rounds done.
        kept: Cached outcomes of fine-tuning by their clients, at most `KEPT` bytes.
        heads: See `Done`.
    """

    server: Server
    private: View
    round: int
    kept: "dict[bytes, Done]" = field(default_factory=dict, compare=False, repr=False)
    heads: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def received(self, algorithm: Algorithm, ids: np.ndarray) -> Received:
        """Return the state of the clients `ids` at the start of a round."""
        like = next(t for t in tree_leaves(self.server) if isinstance(t, Tensor))
        return Received(
            *algorithm.share(self.server, torch.from_numpy(ids).to(like.device)),
            read_rows(self.private, ids),
        )

    def finetuned(self, local: "Local", ids: np.ndarray) -> "Done":
        """Return the outcome of `Local.finetuned` for a chunk of clients, computed once."""
        if (found := self.kept.get(ids.tobytes())) is not None:
            return found
        done = local.finetuned(ids, self.received(local.algorithm, ids), self.round)
        done = replace(done, heads=self.heads)
        held = sum(t.nbytes for one in (*self.kept.values(), done) for t in tree_leaves(one.views))
        if local.algorithm.finetune and held <= KEPT:
            self.kept[ids.tobytes()] = done
        return done


@dataclass(frozen=True)
class Done:
    """Hold the outcome of a chunk's local work.

    Args:
        ids: The chunk's clients [C], in descending order of their numbers of examples.
        given: State that every client received this round.
        views: The clients' views after the work, [C, ...].
        info: Diagnostics such as losses, [C] each.
        seconds: Time spent in steps, batches and noise, in seconds.
        received: Number of bytes that the chunk received.
        diverged: True for clients whose training is no longer finite, [C] bool; their views are
            reset to the start.
        heads: Cached statistics that restore clients' predictors for `Heads`, by client number; at
            most `KEPT` bytes.
    """

    ids: np.ndarray
    given: Server
    views: View
    info: Info
    seconds: dict[str, float]
    received: int
    diverged: np.ndarray
    heads: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """Run the clients' local work: a method's phases, with an engine, on the training data.

    Args:
        algorithm: The method.
        engine: How the phases are computed.
        train: The clients' training data, on the run's device and in its precision.
        seed: Seed of all random draws.
        rounds: Number of rounds of the run.
        tolerant: Whether a client whose training is no longer finite is skipped instead of
            stopping the run.
        names: The clients' names, for messages; empty if unknown.
        validation: Their validation data, for a `Once` that reads them; None for none.
        said: Warnings of the method's `watch` so far, by kind.
    """

    algorithm: Algorithm
    engine: Engine
    train: ClientData
    seed: int
    rounds: int
    tolerant: bool = False
    names: tuple[str, ...] = ()
    validation: ClientData | None = None
    said: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.train.index) and not trials(self.algorithm.model):
            self.algorithm.trial(self.train)  # needed after loading, when there was no preflight

    def run(
        self,
        stage: Stage,
        ids: np.ndarray,
        received: Received,
        round: int,
        *,
        phases: int | None = None,
    ) -> Done:
        """Run the phases of a stage for the clients `ids`.

        Args:
            stage: Training, fine-tuning or adaptation.
            ids: The clients [C], in descending order of their numbers of examples.
            received: Their state at the start.
            round: Number of rounds done before; it selects the random draws.
            phases: Number of phases to run, from the first; None for all.

        Raises:
            DivergenceError: A client's state is no longer finite, and `tolerant` is False.
            ValueError: A client's reports have other shapes than the method declares.
        """
        algorithm, dtype, device = self.algorithm, self.train.dtype, self.train.device
        given = algorithm.given(received.common, round, self.rounds)
        counts = torch.from_numpy(self.train.counts[ids]).to(dtype=dtype, device=device)
        started = views = algorithm.views(given, received.addressed, received.rows, counts)
        info: Info = {}
        seconds: dict[str, float] = {}
        diverged = np.zeros(len(ids), bool)
        todo = {
            Stage.TRAIN: algorithm.phases,
            Stage.FINETUNE: algorithm.finetune,
            Stage.ADAPT: algorithm.adapt,
        }[stage]
        # Counts phases that shuffle or draw, so that other phases do not change the draws.
        place = 0
        for position, phase in enumerate(todo[:phases]):
            plan = PhasePlan(
                phase,
                self._split(phase),
                ids,
                given,
                seed=self.seed,
                round=round,
                stage=stage,
                position=place,
                dtype=dtype,
            )
            place += (
                by_chance(phase, algorithm)
                or self.train.augment is not None
                or draws_in_training(algorithm.model)
            )
            before = views
            if algorithm.watch is not None and stage is Stage.TRAIN and stability.is_due(round):
                first = int(plan.ids[0])
                row = int(np.flatnonzero(ids == first)[0])
                view = tree_map(lambda t, row=row: t[row], views)
                batch = tree_map(lambda t: t[0], plan.batch(0, 1))
                named = called(first, self.names)
                seen = algorithm.watch(algorithm, phase, given, view, batch, named)
                for kind, said in seen.items():  # once in a run, not for every client and round
                    if self.said.setdefault(kind, said) is said:
                        warn(said)
            with noted(f"in phase {position + 1}, {phase_in_words(phase)}"):
                views, new = self.engine.run(algorithm, phase, given, views, plan)
            info |= new
            seconds = {key: seconds.get(key, 0.0) + value for key, value in plan.seconds.items()}
            finite = _finite(
                [
                    t
                    for key in views
                    if views[key] is not before.get(key)
                    for t in tree_leaves(views[key])
                ],
                len(ids),
            )
            if finite.all():
                continue
            if not self.tolerant:
                client = int(ids[int(np.argmin(finite))])
                tuned = "fine-tuning " * (stage is Stage.FINETUNE)
                raise DivergenceError(
                    f"{called(client, self.names)} is no longer finite after {tuned}phase "
                    f"{position + 1} ({phase_in_words(phase)}) of round {round + 1}: "
                    "a loss became NaN or infinite; lower the learning rate, or check this "
                    "client's data",
                    round=round + 1,
                    client=client,
                    phase=position + 1,
                )
            diverged |= ~finite
            views = _set_aside(views, started, torch.from_numpy(~finite).to(device))
        if diverged.any():  # later phases changed the views that had been reset
            views = _set_aside(views, started, torch.from_numpy(diverged).to(device))
        if views is not started:
            algorithm.check_reported(started, views)
            if stage is Stage.TRAIN and stability.is_due(round) and not diverged.any():
                algorithm.check_names(started, views)
        # Clients have frozen blocks from the start.
        frozen = [name for name, block in algorithm.blocks.items() if block.pool is None]
        common = [
            t
            for key, value in given.items()
            if key not in frozen
            for t in tree_leaves(value)
            if isinstance(t, Tensor)
        ]
        sent = [*common * len(ids), *tree_leaves(received.addressed)]
        return Done(ids, given, views, info, seconds, sum(t.nbytes for t in sent), diverged)

    def over(
        self, crew: Crew, ids: np.ndarray | None, work: Callable[[np.ndarray], T]
    ) -> Iterator[T]:
        """Yield `work` for the clients `ids`, or for all, chunk by chunk, at every rank."""
        size = self.engine.chunk_size(self.train.clients, self.algorithm, self.train.device)
        counts = self.train.counts
        parts = chunks(np.arange(len(counts)) if ids is None else ids, counts, size)
        return crew.over(parts, work, [float(counts[some].sum()) for some in parts])

    def adapt(self, state: State, crew: Crew, *, ids: np.ndarray | None = None) -> None:
        """Run the adaptation phases of clients never seen in training, and write their new state
        to `state.private`.

        Args:
            state: The federation's state.
            crew: The threads that compute.
            ids: The clients; None for all.

        Raises:
            DivergenceError: A client's state is no longer finite, whether or not `tolerant` is set.
        """
        strict = replace(self, tolerant=False)

        def work(some: np.ndarray) -> Done:
            return strict.run(Stage.ADAPT, some, state.received(self.algorithm, some), state.round)

        for done in self.over(crew, ids, work):
            write_rows(state.private, done.ids, done.views)

    def own_rows(self, client: int) -> Batch:
        """Return one client's training rows, x and y; also its `validation` rows, if there are any
        and the method's predictor reads them.
        """
        x, y = self.train.client(client)
        if not getattr(self.algorithm.predictor, "validates", False):
            return {"x": x, "y": y}
        held = (each(lambda t: t[:0], x), y[:0])
        if self.validation is not None:
            held = self.validation.client(client)
        return {"x": x, "y": y, "validation": dict(zip("xy", held, strict=True))}

    def _split(self, phase: Phase | Repeat) -> ClientData:
        if getattr(phase, "data", False) != "validation":
            return self.train
        if self.validation is None:
            raise ValueError(
                "the method uses validation rows in training, but the data have none: make them "
                "with validation=0.1"
            )
        return self.validation

    def finetuned(self, ids: np.ndarray, received: Received, round: int) -> Done:
        """Run the fine-tuning phases before prediction, on a copy of each client's view.

        If `tolerant`, a client whose fine-tuning is not finite predicts without it, and a warning
        is logged.

        Raises:
            DivergenceError: A client's state is no longer finite, and `tolerant` is False.
        """
        done = self.run(Stage.FINETUNE, ids, received, round)
        for client in ids[done.diverged].tolist():
            log.warning(
                "after round %d: the fine-tuning of %s is not finite; it predicts without it",
                round,
                called(client, self.names),
            )
        return done


def _finite(changed: list[Tensor], clients: int) -> np.ndarray:
    """Return which clients have only finite entries, [C] bool, in tensors [C, ...]."""
    if not changed:
        return np.ones(clients, bool)
    # A sum takes one pass and is finite only if all its terms are. Large finite terms may overflow,
    # so each entry is checked if the sum is not finite.
    finite = torch.stack([t.reshape(clients, -1).sum(1).isfinite() for t in changed]).all(0)
    if not bool(finite.all()):
        finite = torch.stack([t.reshape(clients, -1).isfinite().all(1) for t in changed]).all(0)
    return finite.cpu().numpy()


def _set_aside(views: View, started: View, diverged: Tensor) -> View:
    """Reset the views [C, ...] of `diverged` clients [C] to their start; entries absent at the
    start become zeros.
    """

    def back(now: Tensor, then: Tensor) -> Tensor:
        return torch.where(diverged.view(-1, *[1] * (now.dim() - 1)), then, now)

    return {
        key: tree_map(
            back, value, started[key] if key in started else tree_map(torch.zeros_like, value)
        )
        for key, value in views.items()
    }


def kept_phases(algorithm: Algorithm) -> int:
    """Return the number of phases that a client outside the cohort must run.

    Final phases are skipped if they only train blocks that the client does not keep; outside the
    cohort it does not send them either.
    """
    count = len(algorithm.phases)
    for phase in reversed(algorithm.phases):
        if (
            not by_algebra(phase)
            or phase.persist
            or any(algorithm.blocks[name].keep for name in phase.blocks)
        ):
            break  # a phase of another type may train kept blocks
        count -= 1
    return count


def touched(algorithm: Algorithm) -> bool:
    """Return whether training may change every part of the predictor; a phase that does not declare
    its blocks may change any.
    """
    phases = [inner for phase in algorithm.phases for inner in unrolled(phase)]
    if not all(isinstance(phase, Descend) for phase in phases):
        return True
    return set(algorithm.parts) <= {name for phase in phases for name in trained(phase)}


def private_rows(algorithm: Algorithm, server: Server, clients: int) -> View:
    """Return the initial private state of all clients, [J, ...] each."""
    return current().copied(tree_map(lambda t: t.expand(clients, *t.shape), algorithm.rows(server)))


def read_rows(tree: Any, ids: np.ndarray) -> Any:
    """Return copies of the rows `ids` of a tensor, or of every tensor of a nest, [C, ...] each."""
    return tree_map(lambda t: t.index_select(0, torch.from_numpy(ids).to(t.device)), tree)


def write_rows(private: View, ids: np.ndarray, views: View) -> None:
    """Write the clients' rows into `private`, in place."""
    for key in private:
        tree_map(
            lambda kept, new: kept.index_copy_(0, torch.from_numpy(ids).to(kept.device), new),
            private[key],
            views[key],
        )
