"""What is fitted after training: answers to what a method's predictor asks of clients, one after
the other, however they are asked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Server, Tensors
from bayesfl.base.surveys import Survey, answers, conduct
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.engine.crew import Crew
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients import predict, tuning
from bayesfl.federation.clients.asking import LocalRows, ask
from bayesfl.federation.clients.local import Done, Local, State
from bayesfl.federation.clients.surveying import Adder, added, ask_here, asked
from bayesfl.federation.store.identity import Answer, reading
from bayesfl.posteriors.heads import LocalHeads, Rows

Known: TypeAlias = Mapping[str, Tensors]
"""The last states of the surveys of a method's predictor, by their names."""


class Conduct(Protocol):
    """Put a survey to clients: the one thing that a transport does after training."""

    def __call__(self, name: str, survey: Survey[Any], known: Known, /) -> Tensors:
        """Return a survey's last state.

        Args:
            name: The survey's name.
            survey: The survey.
            known: The last states of the surveys before it.
        """
        ...


def next_question(
    algorithm: Algorithm, server: Server, known: Known
) -> tuple[str, Survey[Any]] | None:
    """Return the next survey that a method's predictor needs, and its name: what the predictor
    asks, and then the choice of the number that it tunes; None where nothing is left to ask.

    Args:
        algorithm: The method.
        server: The server's state, or what a client has received.
        known: The last states of the surveys so far.
    """
    rule = algorithm.predictor
    found = getattr(rule, "asks", lambda *_: None)(algorithm, server, known)
    if found is None and tuning.needs_validation(algorithm) and predict.TUNING not in known:
        return predict.TUNING, tuning.Tuning(rule)  # pyright: ignore[reportArgumentType] (it has a grid)
    return found


def answered(algorithm: Algorithm, server: Server, known: Known, conduct: Conduct) -> Known:
    """Return the states of all surveys that a method's predictor needs; those that are known are
    not asked again.
    """
    states = dict(known)
    while (question := next_question(algorithm, server, states)) is not None:
        name, survey = question
        states[name] = conduct(name, survey, states)
    return states


def known_of(after: Iterable[Any], algorithm: Algorithm) -> Known:
    """Return the states of the answers among what is fitted, of the method as it predicts now."""
    now = reading(algorithm)
    return {one.name: one.state for one in after if isinstance(one, Answer) and one.reading == now}


def answers_of(known: Known, algorithm: Algorithm) -> tuple[Answer, ...]:
    """Return states of surveys as what is fitted, for the method as it predicts now."""
    return tuple(Answer(name, state, reading(algorithm)) for name, state in known.items())


def last_layers(local: Local, done: Done, split: ClientData | None) -> list[Rows | None]:
    """Return what the rows of a chunk's clients say of their last layers; None without rows.

    Args:
        local: The clients' local work.
        done: Its outcome, with whose views the clients predict.
        split: The rows; None where there are none.
    """
    rule: Any = local.algorithm.predictor
    return [
        rule.rows(local.algorithm, tree_map(lambda t, c=c: t[c], done.views), *split.client(j))
        if split is not None and split.counts[j]
        else None
        for c, j in enumerate(done.ids.tolist())
    ]


@dataclass(frozen=True)
class Here:
    """Put surveys to clients that are all on this machine.

    Args:
        local: The clients' local work.
        state: The federation's state.
        data: The clients' data, on the device and in the precision of the state.
        crew: The threads that compute.
        aggregation: How answers are added; None adds them openly.
        ids: The clients that predict; None for all.
    """

    local: Local
    state: State
    data: FederatedData
    crew: Crew
    aggregation: Adder | None = None
    ids: np.ndarray | None = None

    def __call__(self, name: str, survey: Survey[Any], known: Known) -> Tensors:
        """Return a survey's last state, see `Conduct`."""
        split, outputs = asked(survey, self.data.splits), Outputs(self.data.task, self.data.outputs)
        reads = getattr(survey, "reads", "rows")
        if reads == "candidates":
            return conduct(survey, self._by_chunk(survey, known), outputs)
        if reads == "head":
            return conduct(survey, ask_here(survey, self._heads(), self.aggregation), outputs)
        if reads == "rows":
            rows = LocalRows(split, np.arange(split.clients))
            return conduct(survey, ask(survey, rows, self.aggregation), outputs)
        (found,) = predict.personal(
            self.local, self.state, [split], self.crew, known=known, ids=self.ids
        )
        return conduct(survey, ask_here(survey, found, self.aggregation), outputs)

    def _by_chunk(
        self, survey: Survey[Any], known: Known
    ) -> Callable[[Tensors, Mapping[str, tuple[int, ...]]], Tensors]:
        """Return how a question about candidates is put, chunk by chunk."""

        def ask(so_far: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
            def work(ids: np.ndarray) -> tuple[np.ndarray, Tensors]:
                local, state = self.local, self.state
                done = state.finetuned(local, ids)
                split = self.data.splits[survey.split]
                own = tuning.candidates(local, done, split, round=state.round, known=known)
                return ids, answers(survey, so_far, own, shapes)

            parts = list(self.crew.over(self.local.chunked(self.ids), work))
            found = {name: torch.cat([own[name] for _, own in parts]) for name in shapes}
            return added(np.concatenate([ids for ids, _ in parts]), found, self.aggregation)

        return ask

    def _heads(self) -> LocalHeads:
        """Return what all clients know of their last layers."""

        def work(ids: np.ndarray) -> tuple[np.ndarray, list[list[Any]]]:
            done = self.state.finetuned(self.local, ids)
            splits = (self.data.splits.get("validation"), self.data.train)
            return ids, [last_layers(self.local, done, split) for split in splits]

        parts = list(self.crew.over(self.local.chunked(), work))
        rows, train = ([one for _, of in parts for one in of[split]] for split in range(2))
        return LocalHeads(rows, train, np.concatenate([ids for ids, _ in parts]))
