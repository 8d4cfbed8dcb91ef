"""The transport of rounds in a simulation: the threads of each rank compute chunks of clients, and
a plan may simulate faults.
"""

import math
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import View
from bayesfl.base.random import Stage
from bayesfl.base.trees import flatten
from bayesfl.data import ClientData
from bayesfl.engine.crew import Crew
from bayesfl.engine.plan import chunks
from bayesfl.evaluation.collecting import Collector
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.clients import predict
from bayesfl.federation.clients.local import Done, Local, State, kept_phases, read_rows, write_rows
from bayesfl.federation.errors import called
from bayesfl.federation.rounds.admission import Message, objection
from bayesfl.federation.rounds.faults import Altered, Fault, FaultPlan, Lost
from bayesfl.federation.rounds.replies import Replies
from bayesfl.federation.rounds.round import Absence, Round, Transport


class OneMachine(Transport):
    """Carry out one attempt at a round on this machine; each rank trains its share of the chunks.

    Private rows are written by `commit`, when the round counts.

    Args:
        local: The clients' local work.
        state: The federation before the round.
        crew: The threads that compute.
        test: The split that the clients' own models predict before aggregation, directly after
            training; None for no predictions.
        faults: The plan of simulated faults; None for none.
    """

    trusted = True

    def __init__(
        self,
        local: Local,
        state: State,
        crew: Crew,
        test: ClientData | None,
        faults: FaultPlan | None,
    ) -> None:
        super().__init__(local.train.counts)
        self._local, self._state, self._crew = local, state, crew
        self._test, self._faults = test, faults
        self.predicted: LocalPredictions | None = None
        """Predictions on `test` before aggregation, from the accepted clients; None if there are
        none.
        """
        self._new: list[tuple[np.ndarray, View]] = []
        self._seen: list[predict.Predicted] = []

    def asked(self, round: Round) -> AbstractContextManager[Iterator[Replies | Absence]]:
        """Ask the clients of a round; see `Transport.asked`."""
        return closing(self._answers(round))

    def commit(self, dropped: Collection[int]) -> None:
        """Write the rows of the accepted clients, and collect predictions; see
        `Transport.commit`.
        """
        out = list(dropped)
        private, ranks, local = self._state.private, self._crew.ranks, self._local
        shared = ranks.shares(local.train.device)

        def keep() -> Any:
            taken = []
            for ids, new in self._new:
                inside = np.flatnonzero(~np.isin(ids, out))
                taken.append((ids[inside], read_rows(new, inside)))
            for ids, new in taken if shared else ():
                write_rows(private, ids, new)
            spent = {**self.seconds, **self.traffic, "apart": self.apart}
            return spent, self._seen, [] if shared else taken

        told = ranks.every(keep)
        spent = {name: math.fsum(one[name] for one, _, _ in told) for name in told[0][0]}
        self.apart = spent.pop("apart") / len(told)
        self.traffic = {name: spent[name] for name in self.traffic}
        self.seconds = {name: spent[name] for name in self.seconds}
        for ids, new in (one for _, _, taken in told for one in taken):
            write_rows(private, ids, new)
        seen = [part for _, parts, _ in told for part in parts]
        if self._test is not None and seen:
            before = Collector(self._test, local.names, local.algorithm.likelihood)
            for ids, part in seen:
                inside = ~np.isin(ids, out)
                before.add(ids[inside], read_rows(part, np.flatnonzero(inside)))
            self.predicted = before.found()

    def _answers(self, round: Round) -> Generator[Replies | Absence]:
        local, engine = self._local, self._local.engine
        wrong = (
            {}
            if self._faults is None
            else self._faults(
                round.number, round.attempt, np.concatenate([round.cohort, round.rest])
            )
        )
        lost = [client for client, fault in wrong.items() if isinstance(fault, Lost)]
        yield from (Absence(client, "it did not reply", lost=True) for client in lost)
        cohort, rest = (np.setdiff1d(group, lost) for group in (round.cohort, round.rest))
        # Clients outside the cohort have separate chunks, so that measuring them does not change
        # the chunks. If they are not measured, phases whose result would be discarded are skipped.
        device = local.train.device
        size = engine.chunk_size(local.train.clients, local.algorithm, device)
        ranks, counts = self._crew.ranks, local.train.counts
        parts = [chunks(group, counts, size) for group in (cohort, rest)]
        costs = [[float(counts[ids].sum()) for ids in group] for group in parts]

        def share(rank: int) -> list[tuple[np.ndarray, bool]]:
            return [
                (ids, sends)
                for group, cost, sends in zip(parts, costs, (True, False), strict=True)
                for ids in group[ranks.dealt(cost, rank)]
            ]

        todo = share(ranks.rank)
        ranks.hold(
            lambda rank: [called(int(j), local.names) for ids, _ in share(rank) for j in ids]
        )
        kept = kept_phases(local.algorithm)

        def work(chunk: tuple[np.ndarray, bool]) -> tuple[Done, list[predict.Predicted], float]:
            ids, sends = chunk
            phases = None if sends or self._test is not None else kept
            done = local.run(
                Stage.TRAIN,
                ids,
                self._state.received(local.algorithm, ids),
                round.number,
                phases=phases,
            )
            clock = perf_counter()
            if self._test is None:
                return done, [], 0.0
            (seen,) = predict.of_chunk(
                local, done, [self._test], round=round.number + 1, draws=local.algorithm.draws
            )
            return done, seen, perf_counter() - clock

        spent = {"steps": 0.0, "batches": 0.0, "noise": 0.0}
        received, measuring = 0, 0.0
        for (_, sends), (done, seen, clock) in zip(todo, self._crew.own(todo, work), strict=True):
            self._new.append((done.ids, {name: done.views[name] for name in self._state.private}))
            self._seen += seen
            received, measuring = received + done.received, measuring + clock
            spent = {part: spent[part] + done.seconds.get(part, 0.0) for part in spent}
            yield from self._of(done, sends, round, wrong)
        sent = sum(math.prod(shape) * dtype.itemsize for shape, dtype in round.declared.values())
        asked = sum(len(ids) for ids, sends in todo if sends)
        self.traffic = {"bytes_up": sent * asked, "bytes_down": received}
        self.seconds = {f"seconds_{part}": value for part, value in spent.items()}
        # Predictions ran in the workers in parallel with training, so their time is not counted.
        self.apart = measuring / max(1, min(len(todo), engine.worker_count(device)))

    def _of(
        self, done: Done, sends: bool, round: Round, wrong: Mapping[int, Fault]
    ) -> Iterator[Replies | Absence]:
        """Yield the answers of a chunk; if bad clients are skipped, each reply is checked
        separately.
        """
        algorithm, ids = self._local.algorithm, done.ids
        good = ~done.diverged
        yield from (
            Absence(client, "its training is not finite") for client in ids[done.diverged].tolist()
        )
        sent, reported = (
            (algorithm.sent(done.views), algorithm.reported(done.views)) if sends else ({}, {})
        )
        if self._local.tolerant:
            sent, reported = tree_map(torch.clone, (sent, reported))
            flat: dict[str, Tensor] = flatten({**sent, **reported})
            places = np.flatnonzero(good).tolist()
            for place, client in zip(places, ids[places].tolist(), strict=True):
                message = Message({name: t[place] for name, t in flat.items()}, round.number)
                fault = wrong.get(client)
                message = fault.change(message) if isinstance(fault, Altered) else message
                reason = objection(message, round.declared if sends else {}, round.number)
                if reason is not None:
                    good[place] = False
                    yield Absence(client, reason)
                elif isinstance(fault, Altered):
                    for name, t in flat.items():
                        t[place] = message.tensors[name]
        if sends and good.any():
            losses = (
                done.info["nll"].double().cpu().numpy()
                if "nll" in done.info
                else np.full(len(ids), math.nan)
            )
            replies = Replies(ids, done.views["n"], sent, reported, losses)
            yield replies if good.all() else replies.of(good)
