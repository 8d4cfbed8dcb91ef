"""One round: who is asked, which replies are taken, and what the server makes of them; a transport carries it, on one machine or many."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from bayesfl.base.protocols import Server
from bayesfl.composition.algorithm import Algorithm
from bayesfl.federation.admission import Admission, Declared, check_cohort, check_replies
from bayesfl.federation.errors import BadClients, FailedRound
from bayesfl.federation.replies import AggregationRun, OpenSum, Replies, ReplyFilter
from bayesfl.federation.settings import Settings


@dataclass(frozen=True)
class Rules:
    """What all rounds of a run have in common.

    Args:
        algorithm: The method.
        settings: How the run is made.
        clients: How many there are.
        declared: What a client sends, as `Algorithm.uplink` says it.
        admission: Which replies are taken.
        aggregation: Who is in a cohort, and how their replies are added up.
    """

    algorithm: Algorithm
    settings: Settings
    clients: int
    declared: Declared
    admission: Admission
    aggregation: AggregationRun


@dataclass(frozen=True)
class Round:
    """What a transport is asked to carry.

    Args:
        number: Rounds done before.
        attempt: How often it was tried before.
        server: The server's state.
        cohort: Clients that train and send, ascending.
        rest: Clients that only train, ascending.
        declared: What a client of the cohort sends.
    """

    number: int
    attempt: int
    server: Server
    cohort: np.ndarray
    rest: np.ndarray
    declared: Declared


@dataclass(frozen=True)
class Absence:
    """A client that has no part in a round.

    Args:
        client: Which.
        reason: Why, in words.
        lost: Whether nothing was heard of it; else what it replied is no good.
    """

    client: int
    reason: str
    lost: bool = False


class Transport(Protocol):
    """What carries one attempt at a round to the clients and their replies back."""

    @property
    def trusted(self) -> bool:
        """Whether replies need not be looked at where bad clients would stop the run: the server has made them itself."""
        ...

    @property
    def counts(self) -> np.ndarray:
        """Training examples of all clients, [J], 0 where that is not known; once the clients are asked."""
        ...

    @property
    def apart(self) -> float:
        """Seconds of the round that went into something else, such as measuring, once all answers are there."""
        ...

    @property
    def seconds(self) -> dict[str, float]:
        """Columns of the history on where the time went, once all answers are there."""
        ...

    @property
    def traffic(self) -> dict[str, float]:
        """The columns `bytes_up` and `bytes_down`, once all answers are there."""
        ...

    def asked(self, round: Round) -> AbstractContextManager[Iterator[Replies | Absence]]:
        """Ask the clients of a round; left by an exception, clients have the states that they had before.

        Answers come in any order. A client of the cohort answers once; of the rest only absences are said.
        """
        ...

    def commit(self, dropped: Collection[int]) -> None:
        """Let the clients that were taken go on from what they have made, and those that were dropped from where they started."""
        ...


def run_round(
    rules: Rules, server: Server, number: int, history: Iterable[Mapping[str, Any]], transport: Transport, *, attempt: int = 0
) -> tuple[Server, dict[str, Any]]:
    """Run one round.

    Args:
        rules: Of the run.
        server: The server's state.
        number: Rounds done before.
        history: Their rows.
        transport: Carries the round; of this attempt alone.
        attempt: How often this round was tried before.

    Returns:
        The server's next state, and what the history says of the round.

    Raises:
        DivergenceError: A client's training is not finite and bad clients stop the run, or the server is not.
        BadClients: A reply is missing or bad, and that stops the run.
        FailedRound: Fewer replies were taken than a round needs, or, where bad clients are skipped, what they make is not finite.
    """
    start = perf_counter()
    algorithm, admission, aggregation = rules.algorithm, rules.admission, rules.aggregation
    cohort = aggregation.cohort(number)
    check_cohort(len(cohort), number, aggregation.least)
    rest = np.setdiff1d(np.arange(rules.clients), cohort) if rules.settings.train == "all" else cohort[:0]
    total = aggregation.begin(server, number, cohort)
    looks = admission.skips or not transport.trusted
    lost: set[int] = set()
    with transport.asked(Round(number, attempt, server, cohort, rest, rules.declared)) as answers:
        filter = ReplyFilter(algorithm, server, total, admission if looks else None, number, history, transport.counts)
        for answer in answers:
            if isinstance(answer, Replies):
                filter.add(answer)
            else:
                filter.drop(answer.client, answer.reason)
                lost |= {answer.client} if answer.lost else set()
        dropped = filter.close()
        if dropped and not admission.skips:
            raise BadClients(f"round {number}, counted from 0: " + "; ".join(f"client {c}: {filter.dropped[c]}" for c in dropped))
        transport.commit(dropped)
        missing = len(lost.intersection(cohort.tolist()))
        counted = {"lost": missing, "rejected": len(cohort) - missing - filter.taken, **transport.traffic}
        try:
            check_replies(filter.taken, number, aggregation.least)
            server = filter.server()
        except FailedRound as error:
            error.row |= counted if isinstance(total, OpenSum) else counted | {"bytes_up": math.nan}  # what others send is theirs to say
            raise
    row = {"round": number + 1, "cohort": filter.taken, "seconds": perf_counter() - start - transport.apart, **transport.seconds}
    row |= {"train_nll": filter.loss(), **counted} | ({"uplink_norm": filter.usual} if looks else {})
    return server, row | total.row()
