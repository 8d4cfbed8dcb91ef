"""The settings of a run, including the rule for drawing cohorts, and the names of its
floating-point types.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch

from bayesfl.base.described import described, differences, in_words
from bayesfl.base.options import Count, Natural, Range, declared, typed
from bayesfl.base.random import Purpose, generator
from bayesfl.base.warning import noted
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.data.tensors import dtype_name

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.float64)}


def check_precision(name: str, dtype: torch.dtype) -> None:
    """Check that methods can be trained in a dtype.

    Half precision raises an error: in it, torch's fused SGD computes wrong steps on a CPU, and
    numbers of examples above a few hundred are rounded.

    Raises:
        ValueError: The dtype is neither `torch.float32` nor `torch.float64`.
    """
    if dtype not in DTYPES.values():
        raise ValueError(
            f"{name} must be torch.float32 or torch.float64, got {dtype!r}; training in half "
            "precision fails here: train in float32, and convert the trained model"
        )


OPEN = "plain"
"""Name of the aggregation with which the server sees every uplink."""


FEDERATION = "make one by bf.data.from_arrays(x, y), or by a recipe such as bf.data.iid('digits')"
BUILD_ADMISSION = "build one, as bf.Admission('skip', min_clients=3)"

Method: TypeAlias = Annotated[
    Algorithm, typed(Algorithm, "build one on a model, as bf.algorithms.fedavg(model)")
]
Federation: TypeAlias = Annotated[FederatedData, typed(FederatedData, FEDERATION)]
Precision: TypeAlias = Annotated[torch.dtype, check_precision]

Sampling: TypeAlias = Callable[
    [int, np.random.Generator, Mapping[str, np.ndarray]], Sequence[int] | np.ndarray
]
"""A user's rule for who takes part: (round, rng, known) -> the cohort's numbers, from 0.

`round` counts from 1; draws of `rng` depend on seed and round alone. `known` has the server's
facts about every client, [J] each: "n", its number of training examples; "round", the last round in
which its work was accepted, 0 for none; and each report of one number that the method declares, by
name, as the client last sent it, NaN before. Under secure sums the server sees no reports.
"""


def is_a_function(sampling: object) -> bool:
    """Return whether cohorts are drawn by a user's rule."""
    return callable(sampling)


@dataclass(frozen=True)
@declared
class Settings:
    """Hold the settings of a run; a resumed run has the same ones, except `rounds` and
    `evaluate_every`.

    Args:
        rounds: Number of rounds in all; learning-rate schedules depend on it. 0 only for a
            deployment that trains nothing.
        participation: Expected share of the clients in a cohort, in (0, 1].
        sampling: How cohorts are drawn. `fixed`: max(1, floor(J participation)) clients.
            `bernoulli`: each client with that probability, given that at least min(2, J) are drawn.
            `poisson`: each client with that probability, unconditionally; only `ClientPrivacy` uses
            it, with its secret. Or a rule of the user's, see `Sampling`; in a loaded run its
            description.
        train: Which clients train: the `cohort`, or `all`, with only the cohort gathered.
        seed: Seed of all random draws.
        evaluate_every: Rounds between evaluations; the last round is always evaluated. None: never.
        aggregation: Description of how uplinks are added up; by default the server sees every
            uplink.
    """

    rounds: Natural
    participation: Annotated[float, Range(0, 1, "]", why="it is a share of the clients")]
    sampling: Literal["fixed", "bernoulli", "poisson"] | Sampling | Mapping[str, Any]
    train: Literal["cohort", "all"]
    seed: Natural
    evaluate_every: Count | None
    aggregation: str = OPEN

    def check_goes_on(self, saved: "Settings", done: int, **fixed: tuple[Any, Any]) -> None:
        """Check that a run can continue under these settings after `done` rounds under others.

        Args:
            saved: The earlier settings; `rounds` and `evaluate_every` may change.
            done: Number of rounds done.
            fixed: Further values that must not change, as (earlier, present).

        Raises:
            ValueError: Another setting has changed, or `rounds` is less than the number of rounds
                done.
        """
        if self.rounds < done:
            raise ValueError(
                f"rounds counts all rounds, and {done} are already done; got {self.rounds}"
            )
        free = {"rounds": self.rounds, "evaluate_every": self.evaluate_every}
        then, now = ({name: both[at] for name, both in fixed.items()} for at in (0, 1))
        if apart := differences(*map(described, (vars(saved) | free | then, vars(self) | now))):
            raise ValueError(
                f"a continued run keeps its settings, {in_words(apart)}; pass the saved ones, or "
                "start another run, in another folder"
            )

    def fixed_size(self, clients: int) -> int:
        """Return the number of clients in a cohort of fixed size, from `clients` clients."""
        return max(1, int(clients * self.participation + 1e-9))  # 0.29 * 100 is 28.999...

    def largest(self, clients: int) -> int:
        """Return the maximum number of clients in a cohort, from `clients` clients."""
        return self.fixed_size(clients) if self.sampling == "fixed" else clients

    @property
    def drawn(self) -> str:
        """Return as text who takes part in a round."""
        if isinstance(self.sampling, str):
            everyone = self.participation == 1
            return "all" if everyone else f"{self.participation:.3g} of all, {self.sampling}"
        return f"drawn by {described(self.sampling).get('name', 'a function')}"

    def cohort(self, clients: int, round: int, known: Mapping[str, np.ndarray] = {}) -> np.ndarray:
        """Draw the ids of one round's cohort, ascending.

        Args:
            clients: Number of clients.
            round: The round, counted from 0.
            known: The server's facts about clients, for a user's rule, see `Sampling`.

        Raises:
            ValueError: `sampling` is `poisson`: only `ClientPrivacy` has the secret for such
                cohorts. Or a user's rule returns something other than numbers of clients.
        """
        if self.sampling == "poisson":
            raise ValueError(
                "poisson cohorts are drawn by ClientPrivacy from its secret; pass it as "
                "aggregation, or another sampling"
            )
        rng = generator(self.seed, Purpose.COHORT, round=round)
        if callable(self.sampling):
            with noted(f"in sampling, {self.drawn}, for which `known` has {[*known]}"):
                ids = np.unique(np.asarray(self.sampling(round + 1, rng, known)))
            if len(ids) and (ids.dtype.kind not in "iu" or ids[0] < 0 or ids[-1] >= clients):
                raise ValueError(
                    f"sampling must return numbers of clients, 0 to {clients - 1}, got {ids}"
                )
            return ids.astype(np.int64)
        size = (
            self.fixed_size(clients)
            if self.sampling == "fixed"
            else _successes(clients, self.participation, min(2, clients), rng)
        )
        return np.sort(rng.permutation(clients)[:size])

    def evaluates(self, round: int) -> bool:
        """Return whether the models are evaluated after this round, counted from 0."""
        every = self.evaluate_every
        return every is not None and ((round + 1) % every == 0 or round + 1 == self.rounds)


def _successes(trials: int, p: float, least: int, rng: np.random.Generator) -> int:
    """Draw the number of successes in independent trials, given that there are at least `least`.

    The number is found from one uniform draw, by inverting the distribution function. It is used
    for the size of a cohort: if clients are drawn independently, all cohorts of one size are
    equally likely. The size can therefore be drawn before the clients, and no cohort that is too
    small is drawn and rejected, however small p is.

    Args:
        trials: Number of trials, >= `least`.
        p: Probability of success in each trial, in (0, 1].
        least: Smallest number that may be drawn, >= 0.
        rng: Generator; one uniform number is used unless p is 1.
    """
    if p == 1:
        return trials
    k = np.arange(least, trials)
    # Difference between the log probabilities of k + 1 and k.
    steps = np.log(trials - k) - np.log(k + 1) + (np.log(p) - np.log1p(-p))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    below = np.cumsum(np.exp(logs - logs.max()))
    return least + min(
        int(np.searchsorted(below, rng.random() * below[-1], side="right")), trials - least
    )


def present(device: torch.device | str) -> torch.device:
    """Return the device, with its index.

    Raises:
        ValueError: This machine has no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Torch raises a different error for each kind of absence.
        raise ValueError(f"device {str(device)!r} is absent ({error}); use device='cpu'") from error
