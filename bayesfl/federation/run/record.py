"""The record of a run, which a simulation and a deployment share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from bayesfl.federation.settings import Settings
from bayesfl.federation.store.identity import Answer
from bayesfl.posteriors.pooled import PooledPosterior

METHODS_START = "the method's own start"
"""Origin of a run that was not started from another run."""


def in_words(what: str, names: Sequence[str], state: Mapping[str, Any]) -> str:
    """Return words for the state from which a run begins, with a digest of that state and of the
    clients' names.
    """
    return f"{what} (digest {digest_of_tensors(json.dumps(list(names)), detached(state))[:16]})"


@in_own_modes
@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """The state of a run after some rounds: what a `bayesfl.federation.run.result.Result` and a
    `bayesfl.flower.Deployed` have in common.

    Args:
        algorithm: The method.
        settings: The run's settings.
        round: Number of rounds done.
        server: The server's state.
        history: One row for each round.
        device: The device that holds the state.
        dtype: The precision of the state.
        began: What the run began from, in words that differ for other states.
        after: What was fitted after training: what clients have answered to the surveys of the
            method's predictor, and the steps of calibration. Training empties it.
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
        """Return the clients' names; empty text where a name is not known."""

    @property
    @abstractmethod
    def origin(self) -> str:
        """Return words for this state, which differ for other states; a run that begins from it
        keeps them.
        """

    @property
    def answers(self) -> Known:
        """Return the last states of the surveys of the method's predictor, by their names; none
        until clients are asked.
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
        """Return the posterior of the server's network on the rows of all clients.

        Raises:
            ValueError: The method's predictor is not a `PooledLaplace`, or clients were not asked.
        """
        rule: Any = self.algorithm.predictor
        if not hasattr(rule, "question") or POOLED not in self.answers:
            raise ValueError(
                "there is no pooled posterior; take that of result.laplace('last_layer'), or train "
                "a method that has its predictor, dataclasses.replace(method, "
                "predictor=bf.predictors.PooledLaplace())"
            )
        return rule.question(self.algorithm, self.server).posterior(self.answers[POOLED])

    def took_part(self, round: int) -> tuple[Any, ...]:
        """Return the names of clients whose work is in the server's state of a round, counted from
        1; numbers where names are not known.

        Raises:
            KeyError: There was no such round.
            ValueError: The cohorts are a secret of `ClientPrivacy`.
        """
        taken = {row["round"]: row.get("cohort") for row in self.history}[round]
        drawn = self.settings.cohort(len(self.called), round - 1).tolist()
        absent = set(self.history.absent.get(round, ()))
        return tuple(self.called[j] or j for j in drawn if taken and j not in absent)

    def model(self) -> nn.Module:
        """Return the server's network, at the posterior means: a module of its own, in
        evaluation mode.

        It is what clients have in common, as a start for other training or for a client with no
        data of its own. Over a network each client's own model is on its node, where
        `bayesfl.load_client` reads it.

        Raises:
            ValueError: The server holds no whole network, or several.
        """
        like = torch.ones((), dtype=self.dtype, device=self.device)
        return server_module(self.algorithm, self.server, len(self.called), like)
