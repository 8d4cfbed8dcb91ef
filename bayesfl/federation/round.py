"""One round of a simulation: local work in chunks of clients, which replies are taken, and what the server makes of them."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Uplink, View
from bayesfl.base.trees import flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.engine import Crew
from bayesfl.engine.plan import chunks
from bayesfl.evaluation.predictions import Collector
from bayesfl.federation import predict
from bayesfl.federation.admission import Admission, Declared, Message, check_cohort, check_replies, objection
from bayesfl.federation.client import Done, Local, kept_phases, read_rows, write_rows
from bayesfl.federation.errors import DivergenceError, FailedRound
from bayesfl.federation.faults import Altered, Fault, Lost, Plan
from bayesfl.federation.replies import Aggregator, Gate, Gather
from bayesfl.federation.result import Result

log = logging.getLogger(__name__)


def run_round(
    result: Result,
    data: FederatedData,
    crew: Crew,
    before: Collector | None,
    *,
    declared: Declared,
    admission: Admission,
    aggregator: Aggregator,
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
        aggregator: Who is in the cohort, and how their uplinks are added up.
        faults: What goes wrong on purpose.
        attempt: How often this round was tried before.

    Raises:
        DivergenceError: A client's training is not finite and bad clients stop the run, or the server is not.
        FailedRound: Fewer replies were taken than a round needs, or, where bad clients are skipped, what they make is not finite.
    """
    start = perf_counter()
    algorithm, settings, engine, round = result.algorithm, result.settings, result.engine, result.round
    server, private = result.server, result.private
    local = Local(algorithm, algorithm.phases, engine, data.train, settings.seed, settings.rounds, tolerant=admission.skips)
    chosen = aggregator.cohort(round)
    check_cohort(len(chosen), round, aggregator.least)
    gather = aggregator.gather(server, round, chosen)
    rest = np.setdiff1d(np.arange(data.clients), chosen) if settings.train == "all" else chosen[:0]
    wrong = {} if faults is None else faults(round, attempt, np.concatenate([chosen, rest]))
    lost = [client for client, fault in wrong.items() if isinstance(fault, Lost)]
    for client in lost:
        log.warning("round %d: client %d did not reply", round, client)
    absent = int(np.isin(chosen, lost).sum())
    chosen, rest = (np.setdiff1d(group, lost) for group in (chosen, rest))
    # The rest come in chunks of their own, so that whether they are measured does not change who shares a chunk; unmeasured,
    # they leave out the phases whose result would be thrown away.
    size = engine.chunk_size(data.clients, algorithm, result.device)
    todo = [(ids, sends) for group, sends in ((chosen, True), (rest, False)) for ids in chunks(group, data.train.counts, size)]
    kept = kept_phases(algorithm)

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
    gate = Gate(algorithm, server, gather, admission, round, result.history, data.train.counts) if admission.skips else None
    undo: list[tuple[np.ndarray, View]] = []
    finished: list[Done] = []
    held: list[predict.Part] = []
    measuring = 0.0
    try:
        for (_, sends), (done, reported, seen, seconds) in zip(todo, crew.over(todo, work), strict=True):
            undo.append((done.ids, read_rows(private, done.ids)))
            write_rows(private, done.ids, done.views)
            if gate is not None:
                _look(gate, algorithm, declared, wrong, round, done, reported, sends)
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
                write_rows(private, ids[out], read_rows(old, np.flatnonzero(out)))
        taken = np.setdiff1d(chosen, dropped)
        counted = {"lost": absent, "rejected": len(chosen) - len(taken)}
        counted |= {"bytes_up": sent * len(chosen), "bytes_down": sum(done.received for done in finished)}
        try:
            check_replies(len(taken), round, aggregator.least)
            server = gather.server() if gate is None else gate.server()
        except FailedRound as error:
            error.row |= counted if isinstance(gather, Gather) else counted | {"bytes_up": math.nan}  # what others send is theirs to say
            raise
    except BaseException as error:
        for ids, old in undo:
            write_rows(private, ids, old)
        if isinstance(error, DivergenceError):
            error.result = result
        raise
    if before is not None:
        for rows, part in held:
            inside = ~np.isin(rows, dropped)
            before.add(rows[inside], read_rows(part, np.flatnonzero(inside)))
    # Predictions ran in the workers, beside training; their share of the time is taken out.
    row: dict[str, Any] = {"round": round + 1, "cohort": len(taken)}
    row["seconds"] = perf_counter() - start - measuring / max(1, min(len(todo), engine.worker_count(result.device)))
    for part in ("steps", "batches", "noise"):
        row[f"seconds_{part}"] = sum(done.seconds.get(part, 0.0) for done in finished)
    losses = [
        done.info["nll"].double().cpu()[torch.from_numpy(~np.isin(done.ids, dropped))]
        for (_, sends), done in zip(todo, finished, strict=True)
        if sends and "nll" in done.info
    ]
    row |= {"train_nll": float(torch.cat(losses).mean()) if losses else math.nan, **counted}
    if gate is not None:
        row["uplink_norm"] = gate.usual
    return replace(result, round=round + 1, server=server), row | gather.row()


def _look(
    gate: Gate, algorithm: Algorithm, declared: Declared, wrong: Mapping[int, Fault], round: int, done: Done, reported: Uplink, sends: bool
) -> None:
    """A chunk's replies, each looked at on its own; clients outside the cohort send an acknowledgement without tensors."""
    for client in done.ids[done.diverged].tolist():
        gate.drop(client, "its training is not finite")
    if not sends:
        for client in done.ids.tolist():
            message, fault = Message({}, round), wrong.get(client)
            if isinstance(fault, Altered) and (reason := objection(fault.change(message), {}, round)):
                gate.drop(client, reason)
        return
    sent = tree_map(torch.clone, algorithm.sent(done.views))
    reported = tree_map(torch.clone, reported)
    flat = flatten(sent | reported)
    for place, client in enumerate(done.ids.tolist()):
        if client in gate.dropped:
            continue
        message = Message({name: t[place] for name, t in flat.items()}, round)
        fault = wrong.get(client)
        if isinstance(fault, Altered):
            message = fault.change(message)
        if reason := objection(message, declared, round):
            gate.drop(client, reason)
        elif isinstance(fault, Altered):
            for name, t in flat.items():
                t[place] = message.tensors[name]
    gate.hold(done.ids, done.views["n"], sent, reported)
