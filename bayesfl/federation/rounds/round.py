"""One round of a federation: clients are asked, replies are taken, and the server combines them.
Who is asked is drawn by `Settings.cohort`, or by `ClientPrivacy`.

A `Transport` carries the messages, on one machine or between many.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Server
from bayesfl.composition.algorithm import Algorithm
from bayesfl.federation.errors import BadClients, FailedRound, SmallCohort, called
from bayesfl.federation.rounds.admission import Admission, Declared
from bayesfl.federation.rounds.replies import AggregationRun, Replies, ReplyFilter
from bayesfl.federation.settings import OPEN, Settings


@dataclass(frozen=True)
class Rules:
    """The rules that all rounds of a run share.

    Args:
        algorithm: The method.
        settings: The run's settings.
        clients: Number of clients.
        declared: Shape and dtype of every tensor that a client sends, from `Algorithm.uplink`.
        admission: Which replies are taken.
        aggregation: Who is in a cohort, and how their replies are added up.
        names: The clients' names, for messages; none where the server does not know them.
    """

    algorithm: Algorithm
    settings: Settings
    clients: int
    declared: Declared
    admission: Admission
    aggregation: AggregationRun
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """A request to the clients for one attempt at a round.

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
    """A record that a client has no part in a round.

    Args:
        client: The client's id.
        reason: The reason, in words.
        lost: True if the client did not answer; False if it answered, but not as it should.
    """

    client: int
    reason: str
    lost: bool = False


class Transport(ABC):
    """A carrier of one attempt at a round: it takes the server's state to the clients and brings
    their replies back, at each rank those of its share.

    Args:
        counts: Numbers of training examples of all clients, [J], 0 where unknown; known once the
            clients are asked.
    """

    trusted = False
    """Whether replies need no checks when a bad client would stop the run, because this process has
    computed them itself.
    """

    def __init__(self, counts: np.ndarray) -> None:
        self.counts, self.apart = counts, 0.0
        """`apart` are seconds of the round spent on other work, such as measuring; as all below,
        known after `commit`.
        """
        self.seconds: dict[str, float] = {}
        """The history's columns on where the time was spent, in seconds."""
        self.traffic: dict[str, float] = {"bytes_up": 0, "bytes_down": 0}

    @abstractmethod
    def asked(self, round: Round) -> AbstractContextManager[Iterator[Replies | Absence]]:
        """Ask the clients of a round, and give an iterator over their answers, which come in any
        order.

        A client of the cohort answers once; of the other clients only absences are reported. Until
        `commit`, clients keep the states that they had before the round.
        """

    @abstractmethod
    def commit(self, dropped: Collection[int]) -> None:
        """Make the new state of the clients that were taken permanent; clients in `dropped` return
        to the state before the round.
        """


def run_round(
    rules: Rules,
    server: Server,
    number: int,
    history: Iterable[Mapping[str, Any]],
    transport: Transport,
    *,
    attempt: int = 0,
) -> tuple[Server, dict[str, Any], list[int]]:
    """Run one round.

    Args:
        rules: The run's rules.
        server: The server's state.
        number: Number of rounds done before.
        history: The rows of the rounds before.
        transport: Carries this attempt alone.
        attempt: Number of earlier attempts at this round.

    Returns:
        The server's next state, the history's row of this round, and the ids of clients of its
        cohort whose work was not taken.

    Raises:
        DivergenceError: A client's training is not finite and bad clients stop the run, or the
            server's next state is not finite.
        BadClients: A reply is missing or bad, and bad clients stop the run.
        FailedRound: Fewer replies were taken than a round needs, or, where bad clients are skipped,
            the server's next state is not finite.
    """
    start = perf_counter()
    admission, aggregation = rules.admission, rules.aggregation
    cohort = aggregation.cohort(number)
    if len(cohort) < (least := aggregation.least):
        raise SmallCohort(
            f"round {number + 1} has {len(cohort)} clients and needs {least} (min_clients)",
            **dict.fromkeys(("lost", "rejected", "bytes_up", "bytes_down"), 0),
        )
    rest = (
        np.setdiff1d(np.arange(rules.clients), cohort)
        if rules.settings.train == "all"
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
            if taken < least:
                raise FailedRound(
                    f"round {number + 1} comes to {taken} replies and needs {least} (min_clients)"
                )
            server = filter.server()
        except FailedRound as error:
            failed = error
        transport.commit(dropped if failed is None else range(rules.clients))
        missing = len(lost.intersection(cohort.tolist()))
        counted = {
            "lost": missing,
            "rejected": len(cohort) - missing - taken,
            **transport.traffic,
        }
        if failed is not None:
            # Other sums count their own bytes.
            hidden = rules.settings.aggregation != OPEN
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
    return server, row, [client for client in cohort.tolist() if client in filter.dropped]
