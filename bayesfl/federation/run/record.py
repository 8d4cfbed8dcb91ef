"""The record of a run, common to simulation and deployment."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from bayesfl.base.archive import digest_of_tensors
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.protocols import Server
from bayesfl.base.trees import detached
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.predictors import POOLED
from bayesfl.evaluation.calibration import Fitted
from bayesfl.evaluation.history import History
from bayesfl.federation.clients.after import Known, known_of
from bayesfl.federation.clients.modules import server_module
from bayesfl.federation.rounds.round import KNOWN
from bayesfl.federation.settings import Settings
from bayesfl.federation.store.identity import Answer
from bayesfl.posteriors.pooled import PooledPosterior

METHODS_START = "the method's own start"
"""Origin of a run that was not started from another run."""


def in_words(what: str, names: Sequence[str], state: Mapping[str, Any]) -> str:
    """Describe the start of a run, with a digest of its state and of the clients' names."""
    return f"{what} (digest {digest_of_tensors(json.dumps(list(names)), detached(state))[:16]})"


@in_own_modes
@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """Hold the state of a run after some rounds: the common part of
    `bayesfl.federation.run.result.Result` and `bayesfl.flower.Deployed`.

    Args:
        algorithm: The method.
        settings: The run's settings.
        round: Number of rounds done.
        server: The server's state.
        history: One row for each round.
        device: The device of the state.
        dtype: The precision of the state.
        began: Description of the run's start; differs between states.
        after: Objects fitted after training: the clients' answers to the surveys of the method's
            predictor, and the steps of calibration. Further training deletes them.
    """

    algorithm: Algorithm
    settings: Settings
    round: int
    server: Server
    history: History = field(default_factory=History)
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    began: str = METHODS_START
    after: tuple[Answer | Fitted, ...] = ()

    @property
    @abstractmethod
    def called(self) -> tuple[str, ...]:
        """Return the clients' names; empty text if a name is unknown."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """Return a description of this state, different for different states; a run that starts
        from it stores the description.
        """

    @property
    def answers(self) -> Known:
        """Return the last states of the surveys of the method's predictor, by their names; empty
        before the surveys.
        """
        return known_of(self.after, self.algorithm)

    @property
    def steps(self) -> tuple[Fitted, ...]:
        """Return the fitted steps of calibration; a server has them without the clients' own
        parameters.
        """
        return tuple(one for one in self.after if isinstance(one, Fitted))

    @property
    def posterior(self) -> PooledPosterior:
        """Return the posterior of the server's network given all clients' rows.

        Raises:
            ValueError: The method's predictor is not a `PooledLaplace`, or clients were not asked.
        """
        rule: Any = self.algorithm.predictor
        if not hasattr(rule, "question") or POOLED not in self.answers:
            raise ValueError(
                "there is no pooled posterior; use that of result.laplace('last_layer'), or train "
                "a method that has its predictor, dataclasses.replace(method, "
                "predictor=bf.predictors.PooledLaplace())"
            )
        return rule.question(self.algorithm, self.server).posterior(self.answers[POOLED])

    def took_part(self, round: int) -> tuple[Any, ...]:
        """Return the names of clients whose work is in the server's state after a round, counted
        from 1; numbers if names are unknown.

        Raises:
            KeyError: There was no such round.
            ValueError: The run uses `ClientPrivacy`, whose cohorts are secret.
        """
        taken = {row["round"]: row.get("cohort") for row in self.history}[round]
        last = self.history.recorded.get(round, {}).get(f"{KNOWN}round")
        drawn = (
            self.settings.cohort(len(self.called), round - 1)
            if last is None
            else np.flatnonzero(last == round)
        ).tolist()
        absent = set(self.history.absent.get(round, ()))
        return tuple(self.called[j] or j for j in drawn if taken and j not in absent)

    def model(self) -> nn.Module:
        """Return the server's network at the posterior means: a separate module, in evaluation
        mode.

        It is the clients' common model, a start for other training or for a client without own
        data. Over a network each client's own model is on its node, where `bayesfl.load_client`
        reads it.

        Raises:
            ValueError: The server has no complete network, or several.
        """
        like = torch.ones((), dtype=self.dtype, device=self.device)
        return server_module(self.algorithm, self.server, len(self.called), like)
