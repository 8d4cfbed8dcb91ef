"""Surveys of clients' rows, without a trained method: the clients' data for a survey, and the call
that conducts it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import declared
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Ask, Survey, answers, conduct
from bayesfl.data import ClientData
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients.surveying import Adder, ask_here, asked
from bayesfl.federation.settings import Federation


@dataclass(frozen=True)
class LocalRows:
    """Hold the rows for clients' answers to a survey.

    Args:
        split: The rows of J clients; a node has J = 1.
        ids: The clients' numbers in the federation, [J].
    """

    split: ClientData
    ids: np.ndarray

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield each client's inputs [n_j, ...], in the form that a model receives, and its labels
        or targets [n_j, ...], in the order of `ids`.
        """
        return map(self.split.client, range(self.split.clients))


@declared
def survey(
    question: Survey[LocalRows], clients: Federation, *, aggregation: Adder | None = None
) -> Tensors:
    """Survey clients' rows and return the survey's result, computed from the sum of their answers.

    Only the answers leave a client. `result.survey` surveys the predictions of a trained method.

    Args:
        question: The survey; its `answer(state, local)` receives the `LocalRows` of its split, and
            its `start` a description of the targets, as `Outputs`.
        clients: The clients' data.
        aggregation: How answers are added, such as `SecureSum()`; None adds them in the clear.

    Raises:
        TypeError: `question` is not a survey, or the aggregation cannot add answers.
        ValueError: The split does not exist; or an answer differs in shape from the survey's
            declaration, or is not finite.

    Example:
        >>> import torch
        >>> import bayesfl as bf
        >>> class Count:
        ...     split = "train"
        ...     def start(self, about): return {}
        ...     def shapes(self, state): return {"n_rows": ()}
        ...     def answer(self, state, local):
        ...         return {"n_rows": torch.tensor([len(y) for _, y in local])}
        ...     def solve(self, state, total): return total, True
        >>> clients = bf.data.from_arrays([torch.rand(5, 2)] * 4, [torch.rand(5)] * 4)
        >>> int(bf.survey(Count(), clients)["n_rows"])
        16
    """
    local = LocalRows(asked(question, clients.splits), np.arange(clients.clients))
    return conduct(
        question, ask(question, local, aggregation), Outputs(clients.task, clients.outputs)
    )


def ask(question: Survey[LocalRows], local: LocalRows, aggregation: Adder | None) -> Ask:
    """Return a function that asks clients on this machine about their rows.

    Without an aggregation, clients answer one after another, in the order of their ids, so that a
    process stores only two answers at a time, which may be large. With several ranks, each surveys
    some of the clients.

    Raises:
        TypeError: The aggregation cannot add answers.
    """
    if aggregation is not None:
        return ask_here(question, local, aggregation)

    def openly(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        ranks, order = current(), np.argsort(local.ids, kind="stable")
        own = order[ranks.dealt(local.split.counts[order].tolist())].tolist()
        each = (LocalRows(local.split.select([j]), local.ids[j : j + 1]) for j in own)
        made = (answers(question, state, one, shapes) for one in each)
        kept: list[Tensors] = []
        if ranks.size > 1:  # all compute in parallel before the sum passes through the ranks
            ranks.every(lambda: kept.extend(made))

        def added(total: Tensors) -> Tensors:
            for found in chain(kept, made):
                for name, t in found.items():
                    total[name] += t[0]
            return total

        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return ranks.relay(zeros, added)

    return openly
