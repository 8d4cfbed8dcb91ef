"""Surveys: questions to every client about its own predictions, answered by sums, after training.

A survey asks, and learns of the answers their sum only:

    start(outputs) -> state
    shapes(state) -> the shape of each summand; none: nothing is asked
    answer(state, local) -> summands
    solve(state, total) -> state, done

A step of calibration is a survey with `settle(state, local)`, the client's own parameters, which
never leave it, and `apply`. `conduct` is the one loop; how a question is put, and how answers are
added, is the caller's: on one machine, under secure sums, or over a network. Answers are summed in
float64 in the order of the clients' ids, so that the sum does not depend on who answered first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.protocols import Tensors
from bayesfl.base.random import Purpose, key, mixed
from bayesfl.base.targets import Task
from bayesfl.evaluation.predictions import Predictions, per_place

QUESTIONS = 1000
"""So many questions of one survey, and it is taken for one that does not end."""

Ask: TypeAlias = Callable[[Tensors, Mapping[str, tuple[int, ...]]], Tensors]
"""Ask a question: the survey's state and the shapes of the answer, to the sum of the
clients' answers in float64.
"""


@dataclass(frozen=True)
class Outputs:
    """Describe what is predicted, as a survey knows it before it asks.

    Args:
        task: `classification` or `regression`.
        count: Number of classes or of targets.
    """

    task: Task
    count: int


@dataclass(frozen=True)
class LocalPredictions:
    """Hold what clients know of themselves when they are asked: predictions on the survey's split.

    Args:
        predictions: Predictions and labels of J clients, [J, N, ...], on the CPU; a node has J = 1.
        ids: The clients' numbers in the federation, [J].
        seed: The run's seed.
        round: Number of rounds done.
        shared: Predictions of the same rows by the server's model, where a step compares them with
            the clients' own; None otherwise.
        rows: A hash of the inputs of every row, [J, N] uint64, where a step draws a number for
            each; None otherwise.
    """

    predictions: Predictions
    ids: np.ndarray
    seed: int = 0
    round: int = 0
    shared: Predictions | None = None
    rows: np.ndarray | None = None

    @cached_property
    def logits(self) -> Tensor:
        """Return log probabilities in float64 [J, N, O], or [J, N, T, O]: 0 in rows that pad, NaN
        where a prediction is not finite.

        Probabilities below the smallest normal number of their type count as that number.

        Raises:
            ValueError: What is predicted has no classes.
        """
        probs, mask = self.predictions.probs, self.predictions.mask
        if probs is None:
            raise ValueError(
                "this step changes probabilities of classes, and the predictions are of numbers, "
                "of which Conformal makes intervals"
            )
        inside = mask.reshape(*mask.shape, *[1] * (probs.dim() - 2)).cpu()
        probs = probs.detach().cpu()
        logs = probs.double().clamp_min(torch.finfo(probs.dtype).tiny).log()
        return torch.where(inside, logs.log_softmax(-1), 0.0)

    @property
    def labels(self) -> Tensor:
        """Return the labels [J, N] or targets [J, N, ...] on the CPU.

        Raises:
            ValueError: They are not known.
        """
        if self.predictions.labels is None:
            raise ValueError(
                "the labels of these predictions are not known; predict a split of the federation, "
                "as result.predict(...) does"
            )
        return self.predictions.labels.cpu()

    @cached_property
    def labelled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [J, N, O], labels [J, N] and the mask of examples, each place with a label
        of its own an example.

        Raises:
            ValueError: The labels are not known, a prediction for an example is not finite, or as
                by `logits`.
        """
        self.refuse_broken(self.logits)
        logits, labels, mask = per_place(
            self.logits, self.labels.long(), self.predictions.mask.cpu()
        )
        return torch.where(mask.unsqueeze(-1), logits, 0.0), labels.masked_fill(~mask, 0), mask

    def refuse_broken(self, found: Tensor) -> None:
        """Raise ValueError, naming client and row, if what was found of examples, [J, N, ...], is
        not finite somewhere.
        """
        finite = found.isfinite()
        bad = self.predictions.mask.cpu() & ~(
            finite if finite.dim() == 2 else finite.flatten(2).all(-1)
        )
        if bad.any():
            place, row = (int(i) for i in bad.nonzero()[0])
            names = self.predictions.names
            who = (
                f"client {int(self.ids[place])}"
                if names is None or len(names) != len(bad)
                else repr(names[place])
            )
            raise ValueError(
                f"predictions, or targets, of {int(bad.sum())} rows are not finite, the first of "
                f"row {row} of {who}: the run diverged, so lower its learning rate, or look at "
                "these inputs"
            )

    def uniform(self, phase: int) -> Tensor:
        """Return a number within (0, 1) for every row, [J, N] in float64: by the row's inputs, the
        same whichever rows stand beside it.

        Args:
            phase: 0 for rows on which a survey is made, 1 for those to which its result is applied.

        Raises:
            ValueError: The inputs of the rows are not known.
        """
        if self.rows is None:
            raise ValueError(
                "a score with a random term draws by the rows' inputs, which these predictions do "
                "not have; take score='lac'"
            )
        keys = np.array(
            [
                key(self.seed, Purpose.SURVEY, round=self.round, client=client, phase=phase)
                for client in self.ids.tolist()
            ],
            np.uint64,
        )
        return torch.from_numpy(
            ((mixed(self.rows ^ keys[:, None]) >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52
        )


Known_contra = TypeVar("Known_contra", contravariant=True)
"""What clients know of themselves: `LocalPredictions`, or what else a survey asks about, which has
the clients' numbers as `ids`.
"""


class NotNegative(tuple[int, ...]):
    """The shape of numbers >= 0 in a survey's answer."""


@runtime_checkable
class Survey(Protocol[Known_contra]):
    """A question, and what to make of its answers; see the module."""

    @property
    def split(self) -> str:
        """Return the name of the split on whose predictions clients are asked."""
        ...

    def start(self, outputs: Outputs) -> Tensors:
        """Return the state at first, which all clients receive.

        Raises:
            ValueError: The survey does not fit such predictions.
        """
        ...

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of one client's answer, by name; empty where there is nothing to ask.
        Names that begin with `n_` are counts, and a `NotNegative` shape is one of numbers >= 0.
        """
        ...

    def answer(self, state: Tensors, local: Known_contra) -> Tensors:
        """Return each client's answer, [J, ...]; zeros of a client without rows."""
        ...

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next state, or the last one, and whether it is the last."""
        ...


def conduct(survey: Survey, ask: Ask, outputs: Outputs) -> Tensors:
    """Put the survey's questions one after the other, and return the last state.

    Args:
        survey: The survey.
        ask: How a question is put.
        outputs: What is predicted.

    Raises:
        ValueError: The survey does not fit, or an answer's sum has another shape, is not finite, or
            is none that was declared.
        RuntimeError: The survey has not ended after `QUESTIONS` questions.
    """
    state = survey.start(outputs)
    for _ in range(QUESTIONS):
        shapes = survey.shapes(state)
        if not shapes:
            return state
        total = checked(ask(state, shapes), shapes, "the sum of the answers")
        state, done = survey.solve(state, total)
        if done:
            return state
    raise RuntimeError(
        f"{type(survey).__name__} has asked {QUESTIONS} questions and not ended; let its solve "
        "return True some time"
    )


def checked(answer: Tensors, shapes: Mapping[str, tuple[int, ...]], whose: str) -> Tensors:
    """Return an answer or a sum in float64 on the CPU, after a check of its names, shapes and
    numbers.

    Args:
        answer: The tensors.
        shapes: Their shapes, by name.
        whose: What they are, for error messages.

    Raises:
        ValueError: Names or shapes are others than were declared, or a number is not finite, no
            count, or negative.
    """
    if answer.keys() != dict(shapes).keys():
        raise ValueError(
            f"{whose} holds {sorted(answer)}, and the survey declares {sorted(shapes)}"
        )
    found = {
        name: torch.as_tensor(t).detach().to("cpu", torch.float64) for name, t in answer.items()
    }
    for name, t in found.items():
        if tuple(t.shape) != tuple(shapes[name]):
            raise ValueError(
                f"{whose} has {name!r} of shape {list(t.shape)}, and the survey declares "
                f"{list(shapes[name])}"
            )
        if not bool(t.isfinite().all()):
            raise ValueError(
                f"{whose} has numbers that are not finite in {name!r}; look at the predictions on "
                "the survey's split"
            )
        count = name.startswith("n_")
        below = (count or isinstance(shapes[name], NotNegative)) and bool((t < 0).any())
        if below or (count and not torch.equal(t, t.round())):
            raise ValueError(
                f"{whose} has numbers in {name!r} that are {'no counts' if count else 'negative'}"
            )
    return found


def answers(
    survey: Survey, state: Tensors, local: Any, shapes: Mapping[str, tuple[int, ...]]
) -> Tensors:
    """Return the answers of the clients of `local`, [J, ...] in float64, each checked.

    Raises:
        ValueError: As by `checked`.
    """
    return checked(
        survey.answer(state, local),
        {name: type(shape)((len(local.ids), *shape)) for name, shape in shapes.items()},
        "an answer",
    )


def together(survey: Survey, local: LocalPredictions) -> Ask:
    """Return how a question is put to clients whose predictions are all here: their answers are
    added.
    """

    def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        return summed(local.ids, answers(survey, state, local, shapes))

    return ask


def summed(ids: np.ndarray, found: Tensors) -> Tensors:
    """Add clients' answers [J, ...] in the order of their ids [J], so that the sum does not depend
    on who answered first.
    """
    order = torch.from_numpy(np.argsort(ids, kind="stable"))
    return {name: t[order].sum(0) for name, t in found.items()}


def uplink_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return what a client sends to answer one question, in bytes: eight a number."""
    return 8 * sum(int(np.prod(shape)) for shape in shapes.values())


def named_split(survey: object) -> str:
    """Return the name of the split that a survey asks about.

    Raises:
        TypeError: It is no survey.
    """
    if not isinstance(survey, Survey) or isinstance(survey, type):
        raise TypeError(
            f"a survey has split, start, shapes, answer and solve, got {survey!r}; see "
            "bayesfl.evaluation.surveys"
        )
    return survey.split
