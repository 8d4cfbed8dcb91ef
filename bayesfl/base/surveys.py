"""Surveys: sequences of questions whose answers are sums over clients.

The server sends questions and receives only the sums of the answers:

    start(about) -> state
    shapes(state) -> shape of each summand; empty for no question
    answer(state, local) -> summands
    solve(state, total) -> state, done

Calibration and audits survey clients' predictions (`bayesfl.evaluation.surveys`), statistics survey
their rows (`bayesfl.stats`). `conduct` is the common loop. Its caller decides how a question
reaches the clients and how answers are added: on one machine, under secure sums, or over a network.
Answers are summed in float64 in the order of the clients' ids, so that the sum does not depend on
the order of their arrival.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch

from bayesfl.base.numerics import own_modes
from bayesfl.base.protocols import Tensors

QUESTIONS = 1000
"""Maximum number of questions; a survey that asks more raises RuntimeError."""

Ask: TypeAlias = Callable[[Tensors, Mapping[str, tuple[int, ...]]], Tensors]
"""Function that asks a question: from the survey's state and the shapes of the answer to the sum of
the clients' answers in float64.
"""


Known_contra = TypeVar("Known_contra", contravariant=True)
"""Data about clients from which they answer, such as `LocalPredictions` or `LocalRows`, with the
clients' numbers as `ids`.
"""


class NotNegative(tuple[int, ...]):
    """Declare the shape of an answer whose numbers are >= 0."""


class PerClient(tuple[int, ...]):
    """Declare the shape of an answer where each client writes to its own place in the first
    dimension, and 0 to the others.
    """

    ends: Sequence[int] | None = None
    """End of each client's places, if a client has several; None for one each."""

    def own(self, answer: torch.Tensor, client: int) -> torch.Tensor:
        """Return an answer with the entries in other clients' places set to 0."""
        ends = self.ends or range(1, self[0] + 1)
        found = torch.zeros_like(answer)
        at = slice(ends[client - 1] if client else 0, ends[client])
        found[at] = answer[at]
        return found


class NotNegativePerClient(PerClient):
    """Declare a shape as `PerClient`, of numbers >= 0."""


class Semidefinite(tuple[int, ...]):
    """Declare the shape of an answer that is a symmetric matrix without negative eigenvalues."""


class Survey(Protocol[Known_contra]):
    """Define the interface of a survey, its questions and the use of answers; see the module."""

    @property
    def split(self) -> str:
        """Return the name of the split that clients answer about."""
        ...

    def start(self, about: Any, /) -> Tensors:
        """Return the initial state, which all clients receive.

        Args:
            about: Facts about all clients' rows before the first question, such as `Outputs`.

        Raises:
            ValueError: The survey does not fit the data.
        """
        ...

    def shapes(self, state: Tensors) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of one client's answer, by name; empty if there is no question. Names
        that begin with `n_` are counts; `NotNegative` declares numbers >= 0, and `Semidefinite` a
        positive semidefinite matrix.
        """
        ...

    def answer(self, state: Tensors, local: Known_contra) -> Tensors:
        """Return each client's answer, [J, ...]; zeros for a client without rows."""
        ...

    def solve(self, state: Tensors, total: Tensors) -> tuple[Tensors, bool]:
        """Return the next state, and whether it is the last."""
        ...


@own_modes()
def conduct(survey: Survey, ask: Ask, about: Any) -> Tensors:
    """Ask a survey's questions one after another, and return the last state.

    Args:
        survey: The survey.
        ask: Function that asks a question.
        about: See `Survey.start`.

    Raises:
        ValueError: The survey does not fit the data, or a sum of answers has another shape, is not
            finite, or violates its declaration.
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
        f"{type(survey).__name__} has asked {QUESTIONS} questions without ending; its solve must "
        "return True eventually"
    )


def checked(answer: Tensors, shapes: Mapping[str, tuple[int, ...]], whose: str) -> Tensors:
    """Check the names, shapes and numbers of an answer or a sum, and return it in float64 on the
    CPU.

    Args:
        answer: The tensors.
        shapes: Their shapes, by name.
        whose: Description of the tensors, for error messages.

    Raises:
        ValueError: Names or shapes differ from the declaration, or a number is not finite, not a
            count, or negative.
    """
    if answer.keys() != dict(shapes).keys():
        raise ValueError(
            f"{whose} contains {sorted(answer)}, but the survey declares {sorted(shapes)}"
        )
    found = {
        name: torch.as_tensor(t).detach().to("cpu", torch.float64) for name, t in answer.items()
    }
    for name, t in found.items():
        if tuple(t.shape) != tuple(shapes[name]):
            raise ValueError(
                f"{whose} contains {name!r} of shape {list(t.shape)}, but the survey declares "
                f"{list(shapes[name])}"
            )
        if not bool(t.isfinite().all()):
            raise ValueError(
                f"{whose} contains numbers in {name!r} that are not finite; check the rows or "
                "predictions of the survey's split"
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
                f"{whose} contains numbers in {name!r} that are "
                f"{'not counts' if count else 'negative'}"
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
    """Return a function that asks all clients on this machine and adds their answers."""

    def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        return summed(local.ids, answers(survey, state, local, shapes))

    return ask


def summed(ids: np.ndarray, found: Tensors) -> Tensors:
    """Add clients' answers [J, ...] in the order of their ids [J], so that the sum does not depend
    on the order of arrival.
    """
    order = torch.from_numpy(np.argsort(ids, kind="stable"))
    return {name: t[order].sum(0) for name, t in found.items()}


def uplink_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the size of a client's answer to one question in bytes: eight for each number."""
    return 8 * sum(int(np.prod(shape)) for shape in shapes.values())
