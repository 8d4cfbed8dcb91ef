"""Fits after training: clients answer the surveys of a method's predictor, on one machine or over a
network.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Server, Tensors
from bayesfl.base.surveys import Survey, conduct
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.engine.crew import Crew
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients import predict, tuning
from bayesfl.federation.clients.asking import LocalRows, ask
from bayesfl.federation.clients.local import Done, Local, State
from bayesfl.federation.clients.surveying import Adder, ask_here, asked
from bayesfl.federation.store.identity import Answer, reading
from bayesfl.posteriors.heads import LocalHeads, Rows

Known: TypeAlias = Mapping[str, Tensors]
"""The last states of the surveys of a method's predictor, by their names."""


Conduct: TypeAlias = Callable[[str, Survey[Any], Known], Tensors]
"""Function that conducts a survey among clients: from its name, the survey and the last states of
earlier surveys to its own last state. Each transport has its own.
"""


def next_question(
    algorithm: Algorithm, server: Server, known: Known
) -> tuple[str, Survey[Any]] | None:
    """Return the name of the next survey that a method's predictor needs, and the survey: first
    those that the predictor asks, then the choice of its tuned number; None after the last one.

    Args:
        algorithm: The method.
        server: The server's state, or what a client has received.
        known: The last states of the surveys so far.
    """
    rule = algorithm.predictor
    found = getattr(rule, "asks", lambda *_: None)(algorithm, server, known)
    if found is None and tuning.together(algorithm) and predict.TUNING not in known:
        return predict.TUNING, tuning.Tuning(rule)  # pyright: ignore[reportArgumentType] (it has a grid)
    return found


def answered(algorithm: Algorithm, server: Server, known: Known, conduct: Conduct) -> Known:
    """Return the states of all surveys that a method's predictor needs; only missing ones are
    conducted.
    """
    states = dict(known)
    while (question := next_question(algorithm, server, states)) is not None:
        name, survey = question
        states[name] = conduct(name, survey, states)
    return states


def known_of(after: Iterable[Any], algorithm: Algorithm) -> Known:
    """Return the survey states among fitted objects that apply to the method as it predicts now."""
    now = reading(algorithm)
    return {one.name: one.state for one in after if isinstance(one, Answer) and one.reading == now}


def answers_of(known: Known, algorithm: Algorithm) -> tuple[Answer, ...]:
    """Convert states of surveys to fitted objects, for the method as it predicts now."""
    return tuple(Answer(name, state, reading(algorithm)) for name, state in known.items())


def last_layers(local: Local, done: Done, split: ClientData | None) -> list[Rows | None]:
    """Return statistics of a chunk's clients about their last layers; None for clients without
    rows.

    Args:
        local: The clients' local work.
        done: Its outcome; the clients predict with its views.
        split: The rows; None if there are none.
    """
    rule: Any = local.algorithm.predictor
    return [
        rule.rows(local.algorithm, tree_map(lambda t, c=c: t[c], done.views), *split.client(j))
        if split is not None and split.counts[j]
        else None
        for c, j in enumerate(done.ids.tolist())
    ]


def heads(local: Local, done: Done, splits: Mapping[str, ClientData]) -> LocalHeads:
    """Return the statistics of a chunk's clients about their last layers, as `LocalHeads`."""
    rows, train = (last_layers(local, done, splits.get(name)) for name in ("validation", "train"))
    return LocalHeads(rows, train, done.ids)  # pyright: ignore[reportArgumentType] (all have training rows)


@dataclass(frozen=True)
class Here:
    """Conduct surveys among clients that are all on this machine.

    Args:
        local: The clients' local work.
        state: The federation's state.
        data: The clients' data, on the device and in the precision of the state.
        crew: The threads that compute.
        aggregation: How answers are added; None adds them in the clear.
        ids: The clients that predict; None for all.
    """

    local: Local
    state: State
    data: FederatedData
    crew: Crew
    aggregation: Adder | None = None
    ids: np.ndarray | None = None

    def __call__(self, name: str, survey: Survey[Any], known: Known) -> Tensors:
        """Return a survey's last state; see `Conduct`."""
        split, outputs = asked(survey, self.data.splits), Outputs(self.data.task, self.data.outputs)
        reads = getattr(survey, "reads", "rows")
        if reads == "rows":
            rows = LocalRows(split, np.arange(split.clients))
            return conduct(survey, ask(survey, rows, self.aggregation), outputs)
        if reads == "predictions":
            (found,) = predict.personal(
                self.local, self.state, [split], self.crew, known=known, ids=self.ids
            )
        elif reads == "candidates":
            about: Any = {"round": self.state.round, "known": known}
            found = self._known(
                lambda done: tuning.candidates(self.local, done, split, **about), self.ids
            )
        else:  # a prior of heads is fitted to all clients' rows
            found = self._known(lambda done: heads(self.local, done, self.data.splits), None)
        return conduct(survey, ask_here(survey, found, self.aggregation), outputs)

    def _known(self, of_chunk: Callable[[Done], Any], ids: np.ndarray | None) -> Any:
        """Compute the clients' data for a survey, chunk by chunk."""

        def work(some: np.ndarray) -> Any:
            return of_chunk(self.state.finetuned(self.local, some))

        parts = list(self.local.over(self.crew, ids, work))
        *known, chunks = zip(*(vars(part).values() for part in parts), strict=True)
        return type(parts[0])(*(list(chain(*one)) for one in known), np.concatenate(chunks))
