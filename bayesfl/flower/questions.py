"""Surveys over a network: questions to the nodes, with one cohort for each survey, which begins
again where a client of it is lost.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Survey, conduct
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.errors import BadClients, FailedSurvey
from bayesfl.federation.rounds.admission import Admission
from bayesfl.flower.deployed import Deployed
from bayesfl.flower.network import Connection
from bayesfl.flower.orders import orders
from bayesfl.flower.post import answers, total

log = logging.getLogger(__name__)
RESTARTS = 3
"""How often a survey begins again because a client of its cohort did not answer."""


def conducted(
    network: Connection,
    admission: Admission,
    run: Deployed,
    kept: Collection[tuple[str, ...]],
    survey: Survey[Any],
    name: str,
    outputs: Outputs,
) -> Tensors:
    """Conduct a survey among the clients that have rows in its split, and return its last state.

    The first question brings the model, by which a client predicts once; those that answer are the
    survey's cohort. Further questions go to them alone, without the model but for surveys of the
    method's predictor that do not read the last layer alone.

    Args:
        network: The connection to the clients.
        admission: Whether a client that does not answer stops the run, and how many answers are
            needed.
        run: The federation, with the steps of calibration that are fitted.
        kept: As of `orders`.
        survey: The survey.
        name: Its name in messages.
        outputs: What is predicted.

    Raises:
        ValueError: As by `bayesfl.base.surveys.conduct`.
        BadClients: A client does not answer, or wrongly, and bad clients stop the run.
        FailedSurvey: Clients were lost each of the times that it began.
    """
    what, roster, begun = type(survey).__name__, network.roster, 0
    cohort: list[int] | None = None
    before = {str(place): one.state for place, one in enumerate(run.steps)}

    def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        nonlocal cohort
        if cohort is None:
            roster.look(network.grid)
        messages = orders(
            run,
            np.array(roster.having(survey.split) if cohort is None else cohort, np.int64),
            set(),
            kept,
            tolerant=admission.skips,
            survey=name,
            survey_states={**before, name: state},
            # A predictor's survey is made of the model, which a client does not keep; one of heads
            # is made of what the client keeps.
            whole=cohort is None or getattr(survey, "reads", "head") != "head",
        )
        found: dict[int, Tensors] = {}
        replies = network.ask("query.survey", messages, group=f"survey-{name}")
        for client, answer, _ in answers(replies, shapes):
            if not isinstance(answer, ValueError):
                found[client] = answer
                continue
            who = roster.called(client)
            if not admission.skips:
                raise BadClients(f"{who} has no part in a survey: {answer}") from answer
            log.warning("%s has no part in %s: %s", who, what, answer)
        if cohort is None and len(found) < admission.min_clients:
            raise FailedSurvey(
                f"{len(found)} clients answered and {admission.min_clients} are needed "
                "(min_clients)"
            )
        if missing := [roster.called(client) for client in cohort or () if client not in found]:
            raise FailedSurvey(f"{', '.join(missing)} did not answer a further question")
        cohort = sorted(found)
        return total(found)

    while True:
        try:
            return conduct(survey, ask, outputs)
        except FailedSurvey as error:
            begun, cohort = begun + 1, None
            if begun > RESTARTS:
                raise FailedSurvey(
                    f"{what} is given up after it began {begun} times: {error}; start the "
                    "server again, with its folder of checkpoints, when the clients are back"
                ) from error
            log.warning("%s begins again: %s", what, error)
