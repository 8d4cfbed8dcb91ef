"""Alarms that may be read after every row: e-processes for a difference between a client's new rows
and its calibration rows.

Each new score is compared with the client's calibration scores and those seen since. If all are
exchangeable, the conformal p-values

    p_s = (#{i : s_i > s} + u #{i : s_i = s}) / (m + 1),

of m scores before it, where the second count includes s itself and u is uniform, are independent
and uniform (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005, theorem
8.2). Bets against that multiply a wealth that starts at 1,

    E_t = 1/2 mean over lambda of prod_s (1 + lambda (1[p_s <= alpha] - alpha))
        + 1/2 mean over eps of prod_s eps p_s^(eps - 1),

the first on a share of p-values up to alpha (misses) above alpha, the second on small p-values
(Vovk, Nouretdinov and Gammerman, "Testing exchangeability on-line", ICML 2003). It is a conformal
test martingale, so the probability that it ever reaches 1 / delta is at most delta (Ville),
whenever and however often it is read.
"""

import os
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike

from bayesfl.base import archive
from bayesfl.base.numerics import levelled
from bayesfl.base.options import PROBABILITY, declared
from bayesfl.base.random import Purpose, generator

Watched: TypeAlias = Literal["labels", "epistemic"]
"""Scores that an alarm watches: nonconformity of labels, or the predictions' epistemic uncertainty,
which needs no labels.
"""
STAKES = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
"""Loss of a bet on misses for a row that is not a miss; lambda = stake / alpha."""
POWERS = np.arange(1, 10) / 10
"""The values of eps in the bets on small p-values."""
_BLOCK = 512  # scores that are ranked among each other at once


class Scores(np.ndarray):
    """Hold scores of rows [N], float64, with their kind and the model that made them.

    Single scores, slices and arithmetic keep these; `np.concatenate` loses them.
    """

    of: tuple[str, str] | None = None

    @classmethod
    def made(cls, values: ArrayLike, kind: str, whose: str) -> "Scores":
        """Return scores of a kind from a client's model."""
        found = np.asarray(values, np.float64).view(cls)
        found.of = kind, whose
        return found

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return (
            found if self.of is None or isinstance(found, Scores) else Scores.made(found, *self.of)
        )

    def __array_finalize__(self, other: Any) -> None:
        self.of = getattr(other, "of", None)


class Alarm:
    """Watch one client's new rows: `see` takes their scores, and `raised` is whether the evidence
    has ever reached 1 / delta.

    Args:
        reference: Scores of the client's calibration rows, [n]; larger scores are more unusual.
        alpha: Share of rows whose rank counts as a miss, in (0, 1); a client's model uses 1 minus
            the level of its sets.
        delta: Maximum probability of a false alarm at any time, in (0, 1).
        seed: The run's seed; with `client` and `round` it gives the uniform draws that break ties.
        client: The client's number.
        round: Number of rounds done.
        of: Kind of the scores and the model that made them, as in `Scores`; `see` then refuses
            scores of other kinds or models.

    Attributes:
        p: P-value of every row seen, [t].
        uniforms: Draw u of every row seen, [t].
        history: Evidence E_t after every row seen, [t].

    Raises:
        ValueError: `alpha` or `delta` is out of range, or the reference is not finite.

    Example:
        >>> from bayesfl.evaluation.alarm import Alarm
        >>> watch = Alarm([0.1, 0.2, 0.3], delta=0.05)
        >>> watch.see([0.25, 0.15]).raised
        False
    """

    @declared
    def __init__(
        self,
        reference: Any,
        *,
        alpha: Annotated[float, PROBABILITY] = 0.1,
        delta: Annotated[float, PROBABILITY] = 0.05,
        seed: int = 0,
        client: int = 0,
        round: int = 0,
        of: tuple[str, str] | None = None,
    ) -> None:
        self.alpha, self.delta = alpha, delta
        self._address = {"seed": seed, "client": client, "round": round}
        self._sorted = np.sort(_scores("reference", reference))
        self.of = of
        self._wealth = np.zeros(len(STAKES) + len(POWERS))  # logarithms
        self.p, self.uniforms, self.history = np.empty((3, 0))

    def __repr__(self) -> str:
        said = f"raised after {self.raised_after} rows" if self.raised else "not raised"
        return (
            f"Alarm({len(self.history)} rows seen, evidence {self.evidence:.3g} of "
            f"{1 / self.delta:g}; {said})"
        )

    @property
    def evidence(self) -> float:
        """Return E_t for all rows seen, >= 0; 1 before the first. Only this number is sent if
        clients' evidence is averaged.
        """
        return float(self.history[-1]) if len(self.history) else 1.0

    @property
    def raised(self) -> bool:
        """Return whether the evidence has ever reached 1 / delta."""
        return self.raised_after is not None

    @property
    def raised_after(self) -> int | None:
        """Return the number of rows at which the evidence first reached 1 / delta; None if it has
        not.
        """
        reached = np.flatnonzero(self.history >= 1 / self.delta)
        return int(reached[0]) + 1 if len(reached) else None

    def see(self, scores: ArrayLike) -> "Alarm":
        """Add the scores of new rows, in the order of their arrival, and return the alarm itself.

        Args:
            scores: Scores of the kind of the reference, [n], or a single one, as from
                `ClientModel.scores`.

        Raises:
            ValueError: A score is not finite, there is more than one axis, or the kind or the model
                differs.
        """
        other = getattr(scores, "of", None)
        if self.of is not None and other is not None and other != self.of:
            raise ValueError(
                f"scores are of {' by '.join(other)}, and this alarm watches "
                f"{' by '.join(self.of)}: take its model's scores"
            )
        new = _scores("scores", scores)
        for start in range(0, len(new), _BLOCK):
            self._take(new[start : start + _BLOCK])
        return self

    def _take(self, new: np.ndarray) -> None:
        m, u, added = len(self._sorted), self._uniform(len(self.history), len(new)), np.sort(new)
        both = levelled(torch.from_numpy(np.concatenate([self._sorted, new]))).numpy()
        known, new = both[:m], both[m:]
        earlier = np.tri(len(new), k=-1, dtype=bool)  # of each new score those that came before it
        above = (
            m - np.searchsorted(known, new, "right") + ((new[None] > new[:, None]) & earlier).sum(1)
        )
        up_to = np.searchsorted(known, new, "right") - np.searchsorted(known, new, "left")
        equal = up_to + ((new[None] == new[:, None]) & earlier).sum(1) + 1
        p = (above + u * equal) / (m + np.arange(len(new)) + 1)
        bets = np.concatenate(
            [
                np.where(
                    (p <= self.alpha)[:, None],
                    np.log1p(STAKES / self.alpha * (1 - self.alpha)),
                    np.log1p(-STAKES),
                ),
                np.log(POWERS) + (POWERS - 1) * np.log(p)[:, None],
            ],
            1,
        )
        wealth = np.cumsum(np.concatenate([self._wealth[None], bets]), 0)[1:]
        self._wealth = wealth[-1]
        share = np.repeat([0.5 / len(STAKES), 0.5 / len(POWERS)], [len(STAKES), len(POWERS)])
        with np.errstate(over="ignore"):
            # Not a product of matrices, whose bits depend on the number of rows.
            evidence = (np.exp(wealth) * share).sum(1)
        self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, added), added)
        seen = [self.p, self.uniforms, self.history]
        self.p, self.uniforms, self.history = np.concatenate([seen, [p, u, evidence]], 1)

    def _uniform(self, start: int, count: int) -> np.ndarray:
        """Return the draws u of the scores from `start` on, within (0, 1); they do not depend on
        how scores are split into calls.
        """
        first, skip = divmod(start, _BLOCK)
        drawn = [
            generator(purpose=Purpose.SURVEY, phase=2, index=block, **self._address).integers(
                0, 2**52, _BLOCK
            )
            for block in range(first, -(-(start + count) // _BLOCK))
        ]
        return (np.concatenate(drawn)[skip : skip + count] + 0.5) / 2**52

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the alarm's state into a file, completely or not at all; `Alarm.load` continues
        with bit-identical results.

        The file contains the scores of the client's rows; keep it at the client.
        """
        seen = np.stack([self.p, self.uniforms, self.history])
        arrays = {"sorted": self._sorted, "wealth": self._wealth, "seen": seen}
        said = {"alpha": self.alpha, "delta": self.delta, **self._address, "of": self.of}
        archive.write(
            path, "alarm", said, {name: torch.from_numpy(one) for name, one in arrays.items()}
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Alarm":
        """Read an alarm that `save` wrote.

        Raises:
            CheckpointError: The file is absent or damaged, or has other content.
        """
        said, tensors = archive.read_kind(path, "alarm")
        of = said.pop("of")
        made = cls(tensors["sorted"].numpy(), **said, of=of and (of[0], of[1]))
        made._wealth = tensors["wealth"].numpy()
        made.p, made.uniforms, made.history = tensors["seen"].numpy()
        return made


def _scores(name: str, scores: Any) -> np.ndarray:
    """Return scores as an array [n] of float64.

    Raises:
        ValueError: There is more than one axis, or a score is not finite.
    """
    found = np.atleast_1d(np.asarray(scores, np.float64))
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError(
            f"{name} must be one finite number for each row, got shape {list(found.shape)}, and "
            f"{int((~np.isfinite(found)).sum())} of them not finite"
        )
    return found
