"""The settings of a run, among them who takes part in a round, and the names of its floating-point
types.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch

from bayesfl.base.described import differences, in_words
from bayesfl.base.options import Count, Natural, Range, declared, typed
from bayesfl.base.random import Purpose, generator
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64)}


def check_precision(name: str, dtype: torch.dtype) -> None:
    """Check that methods can be trained in a dtype.

    Half precision is refused: in it, torch's fused SGD computes wrong steps on a CPU, and numbers
    of examples above a few hundred are rounded.

    Raises:
        ValueError: It is neither `torch.float32` nor `torch.float64`.
    """
    if dtype not in DTYPES.values():
        raise ValueError(
            f"{name} must be torch.float32 or torch.float64, got {dtype!r}; half precision learns "
            "nothing here: train in float32, and convert the trained model"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float32`, which is its key in `DTYPES`."""
    return str(dtype).removeprefix("torch.")


OPEN = "plain"
"""The name of the aggregation in which the server sees every uplink."""


FEDERATION = "make one by bf.data.from_arrays(x, y), or by a recipe such as bf.data.iid('digits')"
BUILD_ADMISSION = "build one, as bf.Admission('skip', min_clients=3)"

Method: TypeAlias = Annotated[
    Algorithm, typed(Algorithm, "build one on a model, as bf.algorithms.fedavg(model)")
]
Federation: TypeAlias = Annotated[FederatedData, typed(FederatedData, FEDERATION)]
Precision: TypeAlias = Annotated[torch.dtype, check_precision]


@dataclass(frozen=True)
@declared
class Settings:
    """The settings of a run; a resumed run shares all but `rounds` and `evaluate_every` with the
    run that it continues.

    Args:
        rounds: Number of rounds in all; learning-rate schedules depend on it. 0 only where a
            deployment trains nothing.
        participation: Expected share of the clients in a cohort, in (0, 1].
        sampling: How cohorts are drawn. `fixed`: max(1, floor(J participation)) clients.
            `bernoulli`: each client with that probability, given that at least min(2, J) are drawn.
            `poisson`: each client with that probability, unconditionally, which only
            `ClientPrivacy` does, from its secret.
        train: Which clients train: the `cohort`, or `all`, of whom only the cohort is gathered.
        seed: Seed of all random draws.
        evaluate_every: Rounds between evaluations; the last round is always evaluated. None: never.
        aggregation: How uplinks are added up, in words; by default the server sees every uplink.
    """

    rounds: Natural
    participation: Annotated[float, Range(0, 1, "]", why="it is a share of the clients")]
    sampling: Literal["fixed", "bernoulli", "poisson"]
    train: Literal["cohort", "all"]
    seed: Natural
    evaluate_every: Count | None
    aggregation: str = OPEN

    def check_goes_on(self, saved: "Settings", done: int, **fixed: tuple[Any, Any]) -> None:
        """Check that a run can go on under these settings after `done` rounds under others.

        Args:
            saved: The settings before, of which `rounds` and `evaluate_every` may change.
            done: Number of rounds done.
            fixed: What else must stay, as it was and as it is now.

        Raises:
            ValueError: Another setting has changed, or fewer rounds are wanted than are done.
        """
        if self.rounds < done:
            raise ValueError(
                f"rounds counts all rounds, and {done} are already done; got {self.rounds}"
            )
        free = {"rounds": self.rounds, "evaluate_every": self.evaluate_every}
        then, now = ({name: both[at] for name, both in fixed.items()} for at in (0, 1))
        if apart := differences(vars(saved) | free | then, vars(self) | now):
            raise ValueError(
                f"a run that goes on keeps its settings, {in_words(apart)}; pass the saved ones, "
                "or begin another run, in another folder"
            )

    def fixed_size(self, clients: int) -> int:
        """Return the number of clients in a cohort of fixed size, of `clients` clients."""
        return max(1, int(clients * self.participation + 1e-9))  # 0.29 * 100 is 28.999...

    def largest(self, clients: int) -> int:
        """Return the largest possible number of clients in a cohort, of `clients` clients."""
        return self.fixed_size(clients) if self.sampling == "fixed" else clients

    def cohort(self, clients: int, round: int) -> np.ndarray:
        """Draw the ids of one round's cohort, ascending.

        Raises:
            ValueError: `sampling` is `poisson`: only `ClientPrivacy` has the secret from which
                such cohorts are drawn.
        """
        if self.sampling == "poisson":
            raise ValueError(
                "poisson cohorts are drawn by ClientPrivacy from its secret; pass it as "
                "aggregation, or another sampling"
            )
        rng = generator(self.seed, Purpose.COHORT, round=round)
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
    equally likely. So the size can be drawn before the clients, and no cohort that is too small is
    ever drawn and rejected, however small p is.

    Args:
        trials: Number of trials, >= `least`.
        p: Probability of success in each trial, in (0, 1].
        least: Smallest number that may be drawn, >= 0.
        rng: Generator, of which one uniform number is used unless p is 1.
    """
    if p == 1:
        return trials
    k = np.arange(least, trials)
    # What the log probability of k + 1 has more than that of k.
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
        # Torch raises another one for each kind of absence.
        raise ValueError(f"device {str(device)!r} is absent ({error}); use device='cpu'") from error
