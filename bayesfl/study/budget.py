"""The budget of a method in a round: gradient steps and passes over the data of a client; and one
number of steps for methods whose phases take others.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import (
    Descend,
    Once,
    Phase,
    Repeat,
    phase_in_words,
    steps_on_batch,
    unrolled,
)
from bayesfl.engine.plan import passes

ROUNDS = 200
"""Number of rounds for the mean of a drawn number of passes."""
BUDGET = {"steps": 1, "epochs": 2, "bytes_up": 0, "bytes_down": 0}
"""Recorded quantities of a training client in a round, and the decimals to show."""


def gradient_steps(algorithm: Algorithm, counts: Sequence[int], *, seed: int = 0) -> float:
    """Return the number of gradient steps of a client in a round, mean over clients that have data.

    The steps of every phase of a round count, those on a batch of a `Repeat` each, and those of
    each copy of a block that the client trains; fine-tuning before predictions does not. Of epochs
    that are a function of the client, those of the first round count; of drawn epochs, their mean.

    Args:
        algorithm: The method.
        counts: Number of training examples of each client, [J].
        seed: The run's seed, on which epochs of clients may depend.

    Returns:
        NaN where a phase is of another kind than the library's.
    """
    if _strange(algorithm):
        return math.nan
    return float(sum(_phase_steps(algorithm, phase, counts, seed) for phase in algorithm.phases))


def epochs(algorithm: Algorithm, counts: Sequence[int], *, seed: int = 0) -> float:
    """Return how often a client goes over its training data in a round by gradient steps, mean over
    clients that have data; counted as `gradient_steps`.

    Args:
        algorithm: The method.
        counts: Number of training examples of each client, [J].
        seed: As in `gradient_steps`.
    """
    if _strange(algorithm):
        return math.nan
    clients, sizes = _with_data(counts)
    total = 0.0
    for phase in algorithm.phases:
        if phase.steps:
            size = sizes if phase.batch_size is None else phase.batch_size
            whole, rest = np.divmod(phase.steps, -(-sizes // size))  # whose last batches are short
            gone = np.mean(whole + rest * size / sizes)
        else:
            gone = _passes(algorithm, phase, clients, seed).mean()
        total += float(gone) * _gradients(algorithm, phase)
    return total


def with_steps(
    algorithm: Algorithm, steps: int, counts: Sequence[int], *, seed: int = 0
) -> tuple[Algorithm, str]:
    """Return the method with about `steps` gradient steps of every client in a round, and in words
    how its phases were scaled.

    The phases share the steps as they share them in the method, and each takes one batch at least.
    A `Repeat` changes its number of batches, not its steps on a batch. A method with another kind
    of phase is returned as it is.

    Args:
        algorithm: The method.
        steps: Number of gradient steps, counted as by `gradient_steps`.
        counts: Number of training examples of each client, [J].
        seed: As in `gradient_steps`.
    """
    if strange := _strange(algorithm):
        return algorithm, f"not scaled, as {type(strange[0]).__name__} is no Descend or Repeat"
    each = np.array([_gradients(algorithm, phase) for phase in algorithm.phases])
    trains = np.flatnonzero(each)
    if not len(trains):
        return algorithm, "not scaled, as it takes no gradient steps"
    each = each[trains]
    before = np.array([_phase_steps(algorithm, algorithm.phases[i], counts, seed) for i in trains])
    wanted = steps * before / before.sum() / each
    batches = np.maximum(1, wanted.astype(int))
    left = steps - int(batches @ each)
    for place in np.argsort(batches - wanted, kind="stable"):  # largest remainders first
        if each[place] <= left:
            batches[place] += 1
            left -= each[place]
    phases, told = list(algorithm.phases), []
    for i, number in zip(trains, batches.tolist(), strict=True):
        phase = phases[i]
        phases[i] = (
            replace(phase, times=number)
            if isinstance(phase, Repeat)
            else replace(phase, steps=number)
        )
        told.append(f"{phase_in_words(phase)}: {length(phases[i])} instead of {length(phase)}")
    if left:
        told.append(f"{steps - left} steps in all, as no whole number of batches has {steps}")
    return replace(algorithm, phases=tuple(phases)), "; ".join(told)


def length(phase: Phase | Repeat) -> str:
    """Return how long a phase is, in words, as `5 epochs`."""
    number = phase.steps or phase.epochs
    if not isinstance(number, int):
        return "epochs by client" if callable(number) else "epochs by chance"
    unit = "epoch" if not phase.steps else "batch" if isinstance(phase, Repeat) else "step"
    return f"{number} {unit}{('es' if unit == 'batch' else 's') * (number > 1)}"


def _strange(algorithm: Algorithm) -> list[Phase]:
    """Return the phases that are neither `Descend`, `Repeat` nor `Once`."""
    known = (Descend, Repeat, Once)
    return [
        phase
        for phase in algorithm.phases
        if not all(isinstance(one, known) for one in (phase, *unrolled(phase)))
    ]


def _with_data(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients that have examples, [C], and how many they have, [C]."""
    sizes = np.asarray(counts)
    return np.flatnonzero(sizes), sizes[sizes > 0]


def _passes(
    algorithm: Algorithm, phase: Phase | Repeat, clients: np.ndarray, seed: int
) -> np.ndarray:
    """Return the number of passes of each client, [C], in the first round; of a drawn number, the
    mean over `ROUNDS` rounds.
    """
    if not isinstance(phase.epochs, str):
        return passes(phase, clients, {}, seed=seed, round=0)
    start = algorithm.init(1)
    drawn = (algorithm.redrawn(start, seed=seed, round=i)[phase.epochs] for i in range(ROUNDS))
    return np.full(len(clients), np.mean([float(number) for number in drawn]))


def _phase_steps(
    algorithm: Algorithm, phase: Phase | Repeat, counts: Sequence[int], seed: int
) -> float:
    """Return a phase's gradient steps, mean over clients that have data."""
    clients, sizes = _with_data(counts)
    batches = 1 if phase.batch_size is None else -(-sizes // phase.batch_size)
    number = phase.steps or float(np.mean(_passes(algorithm, phase, clients, seed) * batches))
    return number * _gradients(algorithm, phase)


def _gradients(algorithm: Algorithm, phase: Phase | Repeat) -> float:
    """Return how many gradients a phase takes on each of its batches."""
    return sum(
        min(one.energy.trains or math.inf, algorithm.copies(one.energy.parts) or 1)
        * (steps_on_batch(one) if isinstance(phase, Repeat) else 1)
        for one in unrolled(phase)
        if isinstance(one, Descend)
    )
