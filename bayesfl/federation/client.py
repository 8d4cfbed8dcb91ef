"""The local work of a round: phases in order, for a chunk of clients, checked after each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.protocols import Info, Server, View
from bayesfl.base.random import Stage
from bayesfl.base.trees import flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Repeat
from bayesfl.data import Split
from bayesfl.engine import Engine, Plan
from bayesfl.federation.errors import DivergenceError


@dataclass(frozen=True)
class Done:
    """What a chunk of clients has done.

    Args:
        ids: Its clients [C], longest first.
        given: What every client received.
        views: Their views afterwards, [C, ...].
        info: What people may read, [C] each.
        seconds: Time of steps, batches and noise.
        received: Bytes that the chunk received.
        diverged: Whose training left the finite numbers, [C] bool; their views are those at their start.
    """

    ids: np.ndarray
    given: Server
    views: View
    info: Info
    seconds: dict[str, float]
    received: int
    diverged: np.ndarray


@dataclass(frozen=True)
class Local:
    """The local work of a chunk of clients: phases in order, checked after each.

    Args:
        algorithm: Whose phases they are.
        phases: The phases.
        engine: How they are run.
        train: The clients' training data.
        seed: Of everything random.
        rounds: Of the run.
        stage: Which list of phases it is.
        tolerant: Whether a client that leaves the finite numbers is set aside instead of stopping all.
    """

    algorithm: Algorithm
    phases: tuple[Any, ...]
    engine: Engine
    train: Split
    seed: int
    rounds: int
    stage: Stage = Stage.TRAIN
    tolerant: bool = False

    def __call__(self, ids: np.ndarray, server: Server, private: View, round: int, phases: int | None = None) -> Done:
        """Runs the first `phases` phases, or all, for the clients `ids`, longest first.

        Raises:
            DivergenceError: A client's state is no longer finite, and that is not tolerated.
        """
        common, addressed = self.algorithm.share(server, torch.from_numpy(ids).to(self.train.x.device))
        return self.received(ids, common, addressed, read_rows(private, ids), round, phases)

    def received(self, ids: np.ndarray, common: Server, addressed: View, rows: View, round: int, phases: int | None = None) -> Done:
        """As a call, from what was sent to the clients `ids`: to all, and to each of them [C, ...]; `rows` are their own [C, ...].

        Raises:
            DivergenceError: A client's state is no longer finite, and that is not tolerated.
        """
        dtype, device = self.train.x.dtype, self.train.x.device
        given = self.algorithm.given(common, round, self.rounds)
        counts = torch.from_numpy(self.train.counts[ids]).to(dtype=dtype, device=device)
        views = self.algorithm.views(given, addressed, rows, counts)
        info: Info = {}
        seconds: dict[str, float] = {}
        started, diverged = views, np.zeros(len(ids), bool)
        for position, phase in enumerate(self.phases[:phases]):
            plan = Plan(phase, self.train, ids, seed=self.seed, round=round, stage=self.stage, position=position, dtype=dtype)
            before = views
            views, new = self.engine.run(self.algorithm, phase, given, views, plan)
            info |= new
            seconds = {key: seconds.get(key, 0.0) + value for key, value in plan.seconds.items()}
            changed = [t for key in views if views[key] is not before.get(key) for t in tree_leaves(views[key])]
            # A sum takes one pass and is finite only where all of its terms are; large terms may overflow, so what it finds is looked at.
            finite = torch.stack([t.reshape(len(ids), -1).sum(1).isfinite() for t in changed]).all(0) if changed else None
            if finite is not None and not bool(finite.all()):
                finite = torch.stack([t.reshape(len(ids), -1).isfinite().all(1) for t in changed]).all(0)
            if finite is not None and not bool(finite.all()):
                if self.tolerant:
                    diverged |= ~finite.cpu().numpy()
                    views = _set_aside(views, started, ~finite)
                    continue
                client = int(ids[int((~finite).nonzero()[0])])
                raise DivergenceError(
                    f"client {client} is no longer finite after phase {position} ({_described(phase)}) of round {round}, both counted "
                    "from 0: a loss became NaN or infinite; lower the learning rate, or look at this client's data",
                    round=round,
                    client=client,
                    phase=position,
                )
        received = len(ids) * sum(t.nbytes for t in self._travels(given)) + sum(t.nbytes for t in tree_leaves(addressed))
        return Done(ids, given, views, info, seconds, received, diverged)

    def _travels(self, given: Server) -> list[Tensor]:
        """What a client receives each round: frozen blocks it has had from the start."""
        frozen = [name for name, block in self.algorithm.blocks.items() if block.pool is None]
        return [t for key, t in flatten(given).items() if isinstance(t, Tensor) and key.split(".")[0] not in frozen]


def _set_aside(views: View, started: View, diverged: Tensor) -> View:
    """The views [C, ...], of clients that have diverged [C] those at their start, and zeros of what was not there then."""

    def back(now: Tensor, then: Tensor) -> Tensor:
        return torch.where(diverged.view(-1, *[1] * (now.dim() - 1)), then, now)

    return {
        key: tree_map(back, value, started[key] if key in started else tree_map(torch.zeros_like, value)) for key, value in views.items()
    }


def _described(phase: Any) -> str:
    """What a phase is and which blocks it trains, as `Descend on head`."""
    inner = phase.phases if isinstance(phase, Repeat) else (phase,)
    trained = dict.fromkeys(name for one in inner for name in getattr(one, "blocks", ()))
    return type(phase).__name__ + (f" on {', '.join(trained)}" if trained else "")


def kept_phases(algorithm: Algorithm) -> int:
    """How many phases a client outside the cohort runs: those at the end are left out that train only what it neither keeps nor sends."""
    count = len(algorithm.phases)
    for phase in reversed(algorithm.phases):
        trained = getattr(phase, "blocks", None)
        if not trained or getattr(phase, "persist", None) or any(algorithm.blocks[name].keep for name in trained):
            break
        count -= 1
    return count


def private_rows(algorithm: Algorithm, server: Server, clients: int) -> View:
    """The private state of all clients at their start, [J, ...] each."""
    return tree_map(lambda t: t.expand(clients, *t.shape).clone(), algorithm.rows(server))


def read_rows(tree: Any, ids: np.ndarray) -> Any:
    """Copies of the rows `ids` of a tensor, or of every tensor of a nest, [C, ...] each."""
    return tree_map(lambda t: t.index_select(0, torch.from_numpy(ids).to(t.device)), tree)


def write_rows(private: View, ids: np.ndarray, views: View) -> None:
    """Writes the clients' rows into `private`, in place."""
    for key in private:
        tree_map(lambda kept, new: kept.index_copy_(0, torch.from_numpy(ids).to(kept.device), new), private[key], views[key])
