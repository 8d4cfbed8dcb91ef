"""One round of a simulation: local work in chunks of clients, which replies are taken, and what the server makes of them."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl import predict
from bayesfl.admission import Admission, Declared, Message, TooFewClients, distances, objection
from bayesfl.blocks import Algorithm, flatten
from bayesfl.data import FederatedData
from bayesfl.engine import Crew
from bayesfl.faults import Altered, Fault, Lost, Plan
from bayesfl.local import DivergenceError, Done, Local, chunks, read_rows, write_rows
from bayesfl.predict import Collector
from bayesfl.protocols import Server, StackedPool, Tensors, Uplink, View
from bayesfl.result import Result

log = logging.getLogger(__name__)


def run_round(
    result: Result,
    data: FederatedData,
    crew: Crew,
    before: Collector | None,
    *,
    declared: Declared,
    admission: Admission,
    faults: Plan | None = None,
    attempt: int = 0,
) -> tuple[Result, dict[str, Any]]:
    """The result a round later, and what the history says of the round.

    Private rows are changed in place; whatever is raised, they are put back as they were.

    Args:
        result: The run so far.
        data: Its clients, on the device.
        crew: Workers.
        before: Where predictions of the clients' own models go, as their training left them; None where they are not measured.
        declared: What a client sends, as `Algorithm.uplink` says it.
        admission: Which replies are taken.
        faults: What goes wrong on purpose.
        attempt: How often this round was tried before.

    Raises:
        DivergenceError: A client's training is not finite and bad clients stop the run, or the server is not.
        TooFewClients: Fewer replies were taken than a round needs.
    """
    start = perf_counter()
    algorithm, settings, engine, round = result.algorithm, result.settings, result.engine, result.round
    server, private = result.server, result.private
    local = Local(algorithm, algorithm.phases, engine, data.train, settings.seed, settings.rounds, tolerant=admission.skips)
    chosen = settings.cohort(data.clients, round)
    rest = np.setdiff1d(np.arange(data.clients), chosen) if settings.train == "all" else chosen[:0]
    wrong = {} if faults is None else faults(round, attempt, np.concatenate([chosen, rest]))
    lost = [client for client, fault in wrong.items() if isinstance(fault, Lost)]
    for client in lost:
        log.warning("round %d: client %d did not reply", round, client)
    absent = int(np.isin(chosen, lost).sum())
    chosen, rest = (np.setdiff1d(group, lost) for group in (chosen, rest))
    if len(chosen) < admission.min_clients:
        raise TooFewClients(f"{len(chosen)} clients replied in round {round}, counted from 0, which needs {admission.min_clients}")
    # The rest come in chunks of their own, so that whether they are measured does not change who shares a chunk; unmeasured,
    # they leave out the phases whose result would be thrown away.
    size = engine.chunk_size(data.clients, algorithm, result.device)
    todo = [(ids, sends) for group, sends in ((chosen, True), (rest, False)) for ids in chunks(group, data.train.counts, size)]
    kept = len(algorithm.phases) - _wasted(algorithm)

    def work(chunk: tuple[np.ndarray, bool]) -> tuple[Done, Uplink, list[predict.Part], float]:
        ids, sends = chunk
        done = local(ids, server, private, round, None if sends or before is not None else kept)
        reported = engine.map(lambda view: algorithm.report(done.given, view), done.views) if sends else {}
        clock = perf_counter()
        seen: list[predict.Part] = []
        if before is not None:
            address = {"seed": settings.seed, "round": round + 1, "draws": algorithm.predictive}
            (seen,) = predict.of_chunk(algorithm, done.given, done.views, data.train, [data.test], ids, engine, **address)
        return done, reported, seen, perf_counter() - clock

    sent = sum(math.prod(shape) * dtype.itemsize for shape, dtype in declared.values())
    gather = _Gather(algorithm, server)
    gate = _Gate(algorithm, server, gather, admission, declared, wrong, round, result.history.rows) if admission.skips else None
    undo: list[tuple[np.ndarray, View]] = []
    finished: list[Done] = []
    held: list[predict.Part] = []
    measuring = 0.0
    try:
        for (_, sends), (done, reported, seen, seconds) in zip(todo, crew.over(todo, work), strict=True):
            undo.append((done.ids, read_rows(private, done.ids)))
            write_rows(private, done.ids, done.views)
            if gate is not None:
                gate.add(done, reported, sends)
            elif sends:
                gather.add(done.ids, done.views["n"], algorithm.sent(done.views), reported)
            if before is not None and gate is None:  # nobody will be left out
                for rows, part in seen:
                    before.add(rows, part)
            else:
                held += seen
            measuring += seconds
            finished.append(replace(done, given={}, views={}))
        dropped = [] if gate is None else gate.close()
        for ids, old in undo:
            if (out := np.isin(ids, dropped)).any():
                write_rows(private, ids[out], _rows(old, out))
        if len(taken := np.setdiff1d(chosen, dropped)) < admission.min_clients:
            raise TooFewClients(f"{len(taken)} replies were taken in round {round}, counted from 0, which needs {admission.min_clients}")
        server = gather.server()
        if not all(bool(t.isfinite().all()) for t in tree_leaves(server)):
            raise DivergenceError(
                f"the server is no longer finite after round {round}, counted from 0; lower the learning rates", round=round
            )
    except BaseException as error:
        for ids, old in undo:
            write_rows(private, ids, old)
        if isinstance(error, DivergenceError):
            error.result = result
        raise
    if before is not None:
        for rows, part in held:
            inside = ~np.isin(rows, dropped)
            before.add(rows[inside], _rows(part, inside))
    # Predictions ran in the workers, beside training; their share of the time is taken out.
    row: dict[str, Any] = {"round": round + 1, "cohort": len(taken)}
    row["seconds"] = perf_counter() - start - measuring / min(len(todo), engine.worker_count(result.device))
    for part in ("steps", "batches", "noise"):
        row[f"seconds_{part}"] = sum(done.seconds.get(part, 0.0) for done in finished)
    row |= {"bytes_up": sent * len(chosen), "bytes_down": sum(done.received for done in finished)}
    losses = [
        done.info["nll"].double().cpu()[torch.from_numpy(~np.isin(done.ids, dropped))]
        for (_, sends), done in zip(todo, finished, strict=True)
        if sends and "nll" in done.info
    ]
    row["train_nll"] = float(torch.cat(losses).mean()) if losses else math.nan
    if gate is not None:
        row |= {"lost": absent, "rejected": len(chosen) - len(taken), "uplink_norm": gate.median}
    return replace(result, round=round + 1, server=server), row


class _Gather:
    """What the server adds up over a round."""

    def __init__(self, algorithm: Algorithm, server: Server) -> None:
        self._algorithm, self._server = algorithm, server
        self._totals: dict[str, Tensors] = {}
        self._stacked: list[Uplink] = []
        self._pools = {name: block.pool for name, block in algorithm.blocks.items() if block.pool}

    def add(self, ids: np.ndarray, n: Tensor, sent: Mapping[str, Tensors], reported: Uplink) -> None:
        """The uplinks of a chunk, client after client."""
        extra = reported | {"n": n, "ids": torch.from_numpy(ids).to(n.device)}
        for name, pool in self._pools.items():
            if not isinstance(pool, StackedPool):
                self._totals[name] = pool.accumulate(self._totals.get(name), self._server, name, {**sent, **extra})
        self._stacked.append(extra | {name: sent[name] for name, pool in self._pools.items() if isinstance(pool, StackedPool)})

    def server(self) -> Server:
        """The server's next state."""
        uplink = tree_map(lambda *rows: torch.cat(rows), *self._stacked)
        new = dict(self._server)
        for name, pool in self._pools.items():
            if isinstance(pool, StackedPool):
                new[name] = pool(self._server, name, uplink)
            else:
                new[name] = pool.solve(self._server, name, self._totals[name])
        changed = self._algorithm.combine(new, uplink["ids"], uplink)
        if unknown := sorted(changed.keys() - new.keys()):
            raise ValueError(f"`combine` returns {unknown}, which the server does not have; give them a start in `server`")
        return new | changed


class _Gate:
    """Holds a round's replies until it is known which are taken; those are gathered in the order in which they came."""

    def __init__(
        self,
        algorithm: Algorithm,
        server: Server,
        gather: _Gather,
        admission: Admission,
        declared: Declared,
        wrong: Mapping[int, Fault],
        round: int,
        history: list[dict[str, Any]],
    ) -> None:
        self._algorithm, self._server, self._gather, self._admission = algorithm, server, gather, admission
        self._declared, self._wrong, self._round = declared, wrong, round
        self._earlier = [row["uplink_norm"] for row in history if math.isfinite(row.get("uplink_norm", math.nan))]
        self._held: list[tuple[np.ndarray, Tensor, dict[str, Tensors], Uplink]] = []
        self._norms: dict[int, float] = {}
        self._dropped: dict[int, str] = {}
        self.median = math.nan

    def add(self, done: Done, reported: Uplink, sends: bool) -> None:
        """A chunk's replies, each looked at on its own; of clients outside the cohort only whether their training went well."""
        for client in done.ids[done.diverged].tolist():
            self._dropped[client] = "its training is not finite"
        if not sends:
            return
        sent = tree_map(torch.clone, self._algorithm.sent(done.views))
        reported = tree_map(torch.clone, reported)
        flat = flatten(sent | reported)
        for place, client in enumerate(done.ids.tolist()):
            if client in self._dropped:
                continue
            message = Message({name: t[place] for name, t in flat.items()}, self._round)
            fault = self._wrong.get(client)
            if isinstance(fault, Altered):
                message = fault.change(message)
            if reason := objection(message, self._declared, self._round):
                self._dropped[client] = reason
            elif isinstance(fault, Altered):
                for name, t in flat.items():
                    t[place] = message.tensors[name]
        ids = torch.from_numpy(done.ids).to(done.views["n"].device)
        common, addressed = self._algorithm.share(self._server, ids)
        norms = distances(sent, {name: addressed.get(name, common.get(name, {})) for name in sent})
        self._norms |= {client: norm for client, norm in zip(done.ids.tolist(), norms.tolist(), strict=True) if client not in self._dropped}
        self._held.append((done.ids, done.views["n"], sent, reported))

    def close(self) -> list[int]:
        """Gathers the replies that are taken; the ids of clients whose reply, or training, was not."""
        limit = self._admission.limit(list(self._norms.values()), self._earlier)
        for client, norm in self._norms.items():
            if norm > limit:
                self._dropped[client] = f"it went {norm:.3g} from what it was sent, more than {limit:.3g}"
        for client, reason in self._dropped.items():
            log.warning("round %d: client %d is left out: %s", self._round, client, reason)
        inside = [norm for client, norm in self._norms.items() if client not in self._dropped]
        self.median = float(np.median(inside)) if inside else math.nan
        for ids, n, sent, reported in self._held:
            if (kept := ~np.isin(ids, list(self._dropped))).any():
                self._gather.add(ids[kept], *(_rows(tree, kept) for tree in (n, sent, reported)))
        return list(self._dropped)


def _rows(tree: Any, kept: np.ndarray) -> Any:
    """The clients of a chunk whose entry in `kept` [C] is true."""
    return tree_map(lambda t: t[torch.from_numpy(kept).to(t.device)], tree)


def _wasted(algorithm: Algorithm) -> int:
    """How many phases at the end train only what a client outside the cohort neither keeps nor sends."""
    count = 0
    for phase in reversed(algorithm.phases):
        trained = getattr(phase, "blocks", None)
        if not trained or getattr(phase, "persist", None) or any(algorithm.blocks[name].keep for name in trained):
            break
        count += 1
    return count
