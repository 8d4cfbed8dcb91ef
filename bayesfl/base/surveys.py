"""Surveys: questions that are answered by sums over clients, one after the other.

A survey asks, and learns of the answers their sum only:

    start(about) -> state
    shapes(state) -> the shape of each summand; none: nothing is asked
    answer(state, local) -> summands
    solve(state, total) -> state, done

Calibration and audits ask clients about their predictions (`bayesfl.evaluation.surveys`),
statistics about their rows (`bayesfl.stats`). `conduct` is the one loop; how a question is put, and
how answers are added, is the caller's: on one machine, under secure sums, or over a network.
Answers are summed in float64 in the order of the clients' ids, so that the sum does not depend on
who answered first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from bayesfl.base.numerics import own_modes
from bayesfl.base.protocols import Tensors

QUESTIONS = 1000
"""Number of questions after which a survey is taken for one that does not end."""

Ask: TypeAlias = Callable[[Tensors, Mapping[str, tuple[int, ...]]], Tensors]
"""Ask a question: the survey's state and the shapes of the answer, to the sum of the
clients' answers in float64.
"""


Known_contra = TypeVar("Known_contra", contravariant=True)
"""What clients know of themselves, as `LocalPredictions` or `LocalRows`, which has the clients'
numbers as `ids`.
"""


class NotNegative(tuple[int, ...]):
    """The shape of numbers >= 0 in a survey's answer."""


class PerClient(tuple[int, ...]):
    """The shape of numbers in a survey's answer of which each client has its own, at its place in
    the first dimension, and 0 at others'.
    """

    ends: Sequence[int] | None = None
    """Where each client's places end, if these are not one each."""

    def own(self, answer: torch.Tensor, client: int) -> torch.Tensor:
        """Return an answer without what a client has written into others' places."""
        ends = self.ends or range(1, self[0] + 1)
        found = torch.zeros_like(answer)
        at = slice(ends[client - 1] if client else 0, ends[client])
        found[at] = answer[at]
        return found


class NotNegativePerClient(PerClient):
    """The shape of such numbers >= 0."""


class Semidefinite(tuple[int, ...]):
    """The shape of a symmetric matrix without negative eigenvalues in a survey's answer."""


class Survey(Protocol[Known_contra]):
    """A question, and what to make of its answers; see the module."""

    @property
    def split(self) -> str:
        """Return the name of the split about which clients are asked."""
        ...

    def start(self, about: Any, /) -> Tensors:
        """Return the state at first, which all clients receive.

        Args:
            about: What is known of all clients' rows before the first question, as `Outputs`.

        Raises:
            ValueError: The survey does not fit.
        """
        ...

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of one client's answer, by name; empty where there is nothing to ask.
        Names that begin with `n_` are counts, a `NotNegative` shape is one of numbers >= 0, and a
        `Semidefinite` one that of a matrix.
        """
        ...

    def answer(self, state: Tensors, local: Known_contra) -> Tensors:
        """Return each client's answer, [J, ...]; zeros of a client without rows."""
        ...

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next state, or the last one, and whether it is the last."""
        ...


@own_modes()
def conduct(survey: Survey, ask: Ask, about: Any) -> Tensors:
    """Put the survey's questions one after the other, and return the last state.

    Args:
        survey: The survey.
        ask: How a question is put.
        about: See `Survey.start`.

    Raises:
        ValueError: The survey does not fit, or an answer's sum has another shape, is not finite, or
            is none that was declared.
        RuntimeError: The survey has not ended after `QUESTIONS` questions.
    """
    state = survey.start(about)
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
                f"{whose} has numbers that are not finite in {name!r}; look at the rows or "
                "predictions on the survey's split"
            )
        count = name.startswith("n_")
        below = (count or isinstance(shapes[name], NotNegative | NotNegativePerClient)) and bool(
            (t < 0).any()
        )
        if isinstance(shapes[name], Semidefinite) and t.numel():
            values = torch.linalg.eigvalsh((t + t.mT) / 2)
            below = bool((values.amin(-1) < -1e-6 * values.abs().amax(-1)).any())
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
        ValueError: See `checked`.
    """
    return checked(
        survey.answer(state, local),
        {name: type(shape)((len(local.ids), *shape)) for name, shape in shapes.items()},
        "an answer",
    )


def together(survey: Survey, local: Any) -> Ask:
    """Return how a question is put to clients that are all here: their answers are added."""

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
