"""Surveys over a network: questions to the nodes, with one cohort for each survey, which begins
again where a client of it is lost.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Survey, checked, conduct, summed
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.errors import BadClients, FailedSurvey
from bayesfl.federation.rounds.admission import Admission
from bayesfl.flower import records
from bayesfl.flower.network import Connection
from bayesfl.flower.post import Failure

log = logging.getLogger(__name__)
RESTARTS = 3
"""How often a survey begins again because a client of its cohort did not answer."""


class LostClients(RuntimeError):
    """An error raised when a question has fewer answers than the survey needs."""


@dataclass(frozen=True)
class Questions:
    """The questions of one server after training.

    The first question of a survey brings the model, by which a client predicts once; those that
    answer are the survey's cohort. Further questions go to them alone, without the model but for
    surveys of the method's predictor that do not read the last layer alone.

    Args:
        network: The connection to the clients.
        admission: Whether a client that does not answer stops the run, and how many answers are
            needed.
        request: Makes the messages to some clients, as `orders` does of a state.
    """

    network: Connection
    admission: Admission
    request: Callable[..., Mapping[int, RecordDict]]

    def conduct(
        self, survey: Survey[Any], name: str, outputs: Outputs, before: Mapping[str, Tensors]
    ) -> Tensors:
        """Conduct a survey among the clients that have rows in its split, and return its last state
        at last.

        Args:
            survey: The survey.
            name: Its name in messages.
            outputs: What is predicted.
            before: The last states of the surveys before it, by their names.

        Raises:
            ValueError: As by `bayesfl.base.surveys.conduct`.
            BadClients: A client does not answer, or wrongly, and bad clients stop the run.
            FailedSurvey: Clients were lost each of the times that it began.
        """
        begun = 0
        while True:
            try:
                return conduct(survey, _Asked(self, survey, name, before), outputs)
            except LostClients as error:
                begun += 1
                if begun > RESTARTS:
                    raise FailedSurvey(
                        f"{type(survey).__name__} is given up after it began {1 + RESTARTS} times: "
                        f"{error}; start the server again, with its folder of checkpoints, when "
                        "the clients are back"
                    ) from error
                log.warning("%s begins again: %s", type(survey).__name__, error)


class _Asked:
    """Put the questions of a survey that has begun."""

    def __init__(
        self, questions: Questions, survey: Survey[Any], name: str, before: Mapping[str, Tensors]
    ) -> None:
        self._questions, self._survey, self._name, self._before = questions, survey, name, before
        self._cohort: list[int] | None = None

    def __call__(self, state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        network, first = self._questions.network, self._cohort is None
        if first:
            network.roster.look(network.grid)
        asked = (
            self._cohort if self._cohort is not None else network.roster.having(self._survey.split)
        )
        # A predictor's survey is made of the model, which a client does not keep; one of heads is
        # made of what the client keeps.
        whole = first or getattr(self._survey, "reads", "head") != "head"
        messages = self._questions.request(
            np.array(asked, np.int64),
            survey=self._name,
            survey_states={**self._before, self._name: state},
            whole=whole,
        )
        found = self._answers(messages, shapes)
        least = self._questions.admission.min_clients
        if first and len(found) < least:
            raise LostClients(f"{len(found)} clients answered and {least} are needed (min_clients)")
        if missing := [
            network.roster.called(client) for client in self._cohort or () if client not in found
        ]:
            raise LostClients(f"{', '.join(missing)} did not answer a further question")
        self._cohort = sorted(found)
        return summed(
            np.array(self._cohort),
            {
                name: torch.stack([found[client][name] for client in self._cohort])
                for name in shapes
            },
        )

    def _answers(
        self, messages: Mapping[int, RecordDict], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[int, Tensors]:
        """Return the answers by client; of clients without one say why."""
        out, network = {}, self._questions.network
        most = records.most_bytes({name: (shape, torch.float64) for name, shape in shapes.items()})
        for client, reply in network.ask("evaluate.survey", messages, group=f"survey-{self._name}"):
            try:
                if isinstance(reply, Failure):
                    raise records.RecordError(reply.reason)
                tensors = records.unpack(
                    reply, "answer", records.setting(reply, "digest", str), most=most
                )
                out[client] = checked(tensors, shapes, "its answer")
            except ValueError as error:
                if not self._questions.admission.skips:
                    raise BadClients(
                        f"{network.roster.called(client)} has no part in a survey: {error}"
                    ) from error
                log.warning(
                    "%s has no part in %s: %s",
                    network.roster.called(client),
                    type(self._survey).__name__,
                    error,
                )
        return out
