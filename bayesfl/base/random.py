"""Addressed randomness: every draw is a function of (seed; purpose, round, client, stage, phase,
index) only.

A run therefore uses the same draws for every kernel, chunk size, number of workers, order of the
clients and machine: there is no shared generator. NumPy's `SeedSequence` hashes an address, with a
spawn key of fixed length (entropy lists collide: [1, 2] equals [1, 2, 0]), to the key of a
counter-based Philox generator. Draws are always made in float32 on the CPU, so neither the device
nor the precision of a run changes them.

Randomness that protects clients must not depend on a seed that others know: `keyed` derives it from
a secret.
"""

import hashlib
from enum import IntEnum

import numpy as np

WORD = 2**32


class Purpose(IntEnum):
    """Name the purpose of a draw, the first word of its address."""

    PERMUTATION = 0
    NOISE = 1
    COHORT = 2
    START = 3
    MODEL = 4
    PARTITION = 5
    SPLIT = 6
    PREDICT = 7
    POSTERIOR = 8
    SELECTION = 9
    GRAPH = 10
    FAULT = 11
    AUGMENT = 12
    FORWARD = 13
    SURVEY = 14
    EPOCHS = 15
    EVALUATION = 16
    COMMON = 17


class Stage(IntEnum):
    """List of phases that a draw belongs to; part of a client's address."""

    TRAIN = 0
    FINETUNE = 1
    ADAPT = 2


def generator(
    seed: int,
    purpose: Purpose,
    *,
    round: int = 0,
    client: int = 0,
    stage: int = 0,
    phase: int = 0,
    index: int = 0,
) -> np.random.Generator:
    """Return the generator at one address, see `_words`."""
    words = _words(seed, purpose, round, client, stage, phase, index)
    return np.random.Generator(np.random.Philox(words))


def key(
    seed: int,
    purpose: Purpose,
    *,
    round: int = 0,
    client: int = 0,
    stage: int = 0,
    phase: int = 0,
    index: int = 0,
) -> int:
    """Return a number of 64 bits that seeds torch's own random operations at one address, see
    `_words` and `Addressed`.
    """
    return int(
        _words(seed, purpose, round, client, stage, phase, index).generate_state(1, np.uint64)[0]
    )


def _words(
    seed: int, purpose: Purpose, round: int, client: int, stage: int, phase: int, index: int
) -> np.random.SeedSequence:
    """Return the hash of one address.

    Args:
        seed: The experiment's seed, a non-negative integer.
        purpose: The purpose of the draws.
        round: Round of the federation, from 0.
        client: Client id, from 0.
        stage: Training, fine-tuning or adaptation.
        phase: Place of the phase among those in its list that shuffle or draw.
        index: A further word: the epoch of a permutation, the number of a block, the step of a
            phase.

    Raises:
        ValueError: A word of the address lies outside [0, 2^32).
    """
    words = (int(purpose), round, client, stage, phase, index)
    if not all(0 <= word < WORD for word in words):
        raise ValueError(f"every word of an address must lie within [0, 2**32), got {words}")
    return np.random.SeedSequence(seed, spawn_key=words)


def keyed(secret: bytes, *address: bytes, size: int) -> np.ndarray:
    """Return words [size], uint64, of SHAKE-256 of a secret and an address; without the secret they
    cannot be told from uniform ones.
    """
    text = b"".join(
        len(part).to_bytes(8, "little") + part for part in (b"bayesfl", secret, *address)
    )
    return np.frombuffer(hashlib.shake_256(text).digest(8 * size), "<u8").astype(np.uint64)


def hashed(rows: np.ndarray) -> np.ndarray:
    """Return a hash of every row [n, m] of 32-bit words, [n] uint64: a multilinear function with
    fixed random weights.
    """
    weights = generator(0, Purpose.SURVEY, phase=9).integers(
        0, 2**64, rows.shape[1] + 1, dtype=np.uint64
    )
    out = np.empty(len(rows), np.uint64)
    size = max(1, 2**18 // max(1, rows.shape[1]))
    for start in range(0, len(rows), size):
        out[start : start + size] = (
            rows[start : start + size].astype(np.uint64) * weights[1:]
        ).sum(1, dtype=np.uint64) + weights[0]
    return mixed(out)


def mixed(words: np.ndarray) -> np.ndarray:
    """Return words of 64 bits, mixed so that every output bit depends on all input bits
    (splitmix64; Steele, Lea and Flood, OOPSLA 2014).
    """
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
