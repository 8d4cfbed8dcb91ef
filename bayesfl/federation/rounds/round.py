"""One round of a federation: clients train and reply, replies are checked, and the server combines
them. The cohort is drawn by `Settings.cohort`, or by `ClientPrivacy`. For a rule of the user's the
history records, in columns `known_...`, the server's facts about clients after each round.

A `Transport` carries the messages, on one machine or between machines.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Server
from bayesfl.evaluation.history import History
from bayesfl.federation.errors import BadClients, FailedRound, SmallCohort, called
from bayesfl.federation.rounds.admission import Admission, Declared
from bayesfl.federation.rounds.replies import AggregationRun, Replies, ReplyFilter
from bayesfl.federation.settings import OPEN

KNOWN = "known_"
"""Prefix of the history's columns of clients with the server's facts about them."""


@dataclass(frozen=True)
class Rules:
    """Hold the rules that all rounds of a run share.

    Args:
        declared: Shape and dtype of every tensor that a client sends, from `Algorithm.uplink`.
        admission: Rules for accepting replies.
        aggregation: The method, the settings, and the rule for drawing cohorts and adding up their
            replies.
        names: The clients' names, for messages; empty if unknown.
    """

    declared: Declared
    admission: Admission
    aggregation: AggregationRun
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """Describe the request to the clients in one attempt at a round.

    Args:
        number: Number of rounds done before.
        attempt: Number of earlier attempts at this round.
        server: The server's state.
        cohort: Ids of the clients that train and send, ascending.
        rest: Ids of the clients that only train, ascending.
        declared: Shape and dtype of every tensor that a client of the cohort sends.
    """

    number: int
    attempt: int
    server: Server
    cohort: np.ndarray
    rest: np.ndarray
    declared: Declared


@dataclass(frozen=True)
class Absence:
    """Record that a client does not take part in a round.

    Args:
        client: The client's id.
        reason: The reason, as text.
        lost: True if the client did not answer; False if its answer was invalid.
    """

    client: int
    reason: str
    lost: bool = False


class Transport(ABC):
    """Carry one attempt at a round: send the server's state to the clients and fetch their replies,
    at each rank for its share of the clients.

    Args:
        counts: Numbers of training examples of all clients, [J], 0 if unknown.
    """

    trusted = False
    """Whether replies need no checks if bad clients stop the run, because this process has computed
    them itself.
    """

    def __init__(self, counts: np.ndarray) -> None:
        self.counts, self.apart = counts, 0.0
        """`apart` is the time of the round spent on other work, such as evaluation, in seconds; all
        values below are available after `commit`.
        """
        self.seconds: dict[str, float] = {}
        """Columns of the history with the time spent on each part, in seconds."""
        self.traffic: dict[str, float] = {"bytes_up": 0, "bytes_down": 0}

    @abstractmethod
    def asked(self, round: Round) -> AbstractContextManager[Iterator[Replies | Absence]]:
        """Send the request to the clients, and return an iterator over their answers, in any order.

        Each client of the cohort answers once; for other clients only absences are reported. Until
        `commit`, clients keep the states from before the round.
        """

    @abstractmethod
    def commit(self, dropped: Collection[int]) -> None:
        """Make the new state of the accepted clients permanent; clients in `dropped` return to the
        state before the round.
        """


def run_round(
    rules: Rules,
    server: Server,
    number: int,
    history: History,
    transport: Transport,
    *,
    attempt: int = 0,
) -> tuple[Server, dict[str, Any], list[int], dict[str, np.ndarray]]:
    """Run one round.

    Args:
        rules: The run's rules.
        server: The server's state.
        number: Number of rounds done before.
        history: The history of the rounds before.
        transport: Carries this attempt only.
        attempt: Number of earlier attempts at this round.

    Returns:
        The server's next state, the history's row of this round, the ids of clients of its cohort
        whose work was not accepted, and the server's facts about clients, see `known_of`.

    Raises:
        DivergenceError: A client's training is not finite and bad clients stop the run, or the
            server's next state is not finite.
        BadClients: A reply is missing or bad, and bad clients stop the run.
        FailedRound: Fewer replies were accepted than a round needs, or bad clients are skipped and
            the server's next state is not finite.
    """
    start = perf_counter()
    admission, aggregation = rules.admission, rules.aggregation
    known = known_of(rules, history)
    cohort = aggregation.cohort(number, {"n": transport.counts, **known})
    # All clients train, and nothing is sent.
    silent = aggregation.settings.train == "all" and not len(cohort)
    if len(cohort) < (least := aggregation.least) and not silent:
        raise SmallCohort(
            f"round {number + 1} has {len(cohort)} clients and needs {least} (min_clients)",
            **dict.fromkeys(("lost", "rejected", "bytes_up", "bytes_down"), 0),
        )
    rest = (
        np.setdiff1d(np.arange(aggregation.clients), cohort)
        if aggregation.settings.train == "all"
        else cohort[:0]
    )
    total = aggregation.begin(server, number, cohort)
    looks = admission.skips or not transport.trusted
    lost: set[int] = set()
    with transport.asked(Round(number, attempt, server, cohort, rest, rules.declared)) as answers:
        filter = ReplyFilter(
            total,
            admission if looks else None,
            history,
            transport.counts,
            rules.names,
        )

        def take() -> None:
            for answer in answers:
                if isinstance(answer, Replies):
                    filter.add(answer)
                else:
                    filter.dropped.setdefault(answer.client, answer.reason)
                    lost.update([answer.client] if answer.lost else [])

        current().every(take)
        dropped = filter.close()
        if dropped and not admission.skips:
            bad = "; ".join(
                f"{called(client, rules.names)}: {filter.dropped[client]}" for client in dropped
            )
            raise BadClients(f"round {number + 1}: {bad}")
        failed, taken = None, len(filter.losses)
        try:
            if taken < least and not silent:
                raise FailedRound(
                    f"round {number + 1} has {taken} replies and needs {least} (min_clients)"
                )
            server = server if silent else filter.server()
        except FailedRound as error:
            failed = error
        transport.commit(dropped if failed is None else range(aggregation.clients))
        missing = len(lost.intersection(cohort.tolist()))
        counted = {
            "lost": missing,
            "rejected": len(cohort) - missing - taken,
            **transport.traffic,
        }
        if failed is not None:
            # Other sums count their own bytes.
            hidden = aggregation.settings.aggregation != OPEN
            failed.row |= counted | ({"bytes_up": math.nan} if hidden else {})
            raise failed
    row = {
        "round": number + 1,
        "cohort": taken,
        "seconds": current().every(lambda: perf_counter() - start)[0] - transport.apart,
        **transport.seconds,
        "train_nll": filter.loss(),
        **counted,
        **({"uplink_norm": filter.usual} if looks else {}),
        **total.row,
    }
    absent = [client for client in cohort.tolist() if client in filter.dropped]
    if known:
        known["round"][np.setdiff1d(cohort, absent)] = number + 1
        for name in known.keys() & total.seen.keys():
            places = total.seen["ids"].cpu().numpy()
            known[name][places] = total.seen[name].cpu().double().numpy()
    return server, row, absent, known


def known_of(rules: Rules, history: History) -> dict[str, np.ndarray]:
    """Return the server's facts about clients for a user's rule of sampling, [J] each, except their
    numbers of rows, see `bayesfl.federation.settings.Sampling`; empty without such a rule.
    """
    run = rules.aggregation
    if not callable(run.settings.sampling):
        return {}
    start = {"round": np.zeros(run.clients)} | {
        name: np.full(run.clients, np.nan)
        for name in run.algorithm.reports
        if run.settings.aggregation == OPEN and rules.declared.get(name, [None])[0] == ()
    }
    last = history.recorded.get(history[-1]["round"], {}) if history.rows else {}
    return {name: last.get(KNOWN + name, first).copy() for name, first in start.items()}
