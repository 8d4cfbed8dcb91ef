"""Addressed randomness: a draw is a function of its whole address, and of nothing else."""

from itertools import product

import numpy as np
import pytest
import torch

from bayesfl.base.random import WORD, Purpose, Stage, generator

WORDS = ("round", "client", "stage", "phase", "index")


def bits(*args, **address) -> int:
    """The first 64 bits drawn at an address."""
    return int(generator(*args, **address).integers(2**64, dtype=np.uint64))


def test_no_two_addresses_share_bits():
    """All of some two thousand near addresses differ, trailing zeros and seeds beyond 32 bits
    included.
    """
    seeds, purposes = (0, 1, 2, WORD, 1 + 2 * WORD), (Purpose.PERMUTATION, Purpose.NOISE)
    seen = [
        bits(seed, purpose, **dict(zip(WORDS, words, strict=True)))
        for seed, purpose in product(seeds, purposes)
        for words in product((0, 1, 2), repeat=len(WORDS))
    ]
    assert len(set(seen)) == len(seen)


def test_seed_and_purpose_matter():
    """No two purposes and no two seeds draw the same."""
    assert len({bits(0, purpose) for purpose in Purpose}) == len(Purpose)
    assert len({bits(seed, Purpose.START) for seed in (0, 1, WORD - 1, WORD, 2**64, 2**128)}) == 6


def test_equal_addresses_draw_equal_bits():
    """Omitted words are 0, and NumPy's integers count as Python's."""
    first = generator(7, Purpose.NOISE, client=3, stage=Stage.ADAPT).standard_normal(
        100, dtype=np.float32
    )
    again = generator(
        np.int64(7), Purpose.NOISE, round=0, client=np.int64(3), stage=2, phase=0, index=0
    )
    assert (first == again.standard_normal(100, dtype=np.float32)).all()


def test_the_address_is_the_documented_one():
    """A Philox generator whose key SeedSequence makes of the seed and (purpose, round, client,
    stage, phase, index).
    """
    words = np.random.SeedSequence(
        11, spawn_key=(int(Purpose.PREDICT), 1, 2, 0, 4, 5)
    ).generate_state(2, np.uint64)
    expected = np.random.Generator(np.random.Philox(key=words)).standard_normal(10)
    drawn = generator(
        11, Purpose.PREDICT, round=1, client=2, stage=0, phase=4, index=5
    ).standard_normal(10)
    assert (drawn == expected).all()


def test_order_of_creation_and_use_does_not_matter():
    """Generators read in turns, or made in another order, draw what each draws alone; no global
    state is read or moved.
    """
    alone = {c: generator(0, Purpose.NOISE, client=c).standard_normal(6) for c in range(4)}
    np.random.seed(0)  # noqa: NPY002 (numpy's own generator must stay untouched)
    torch.manual_seed(0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002 (as above)
    turns = {c: generator(0, Purpose.NOISE, client=c) for c in reversed(range(4))}
    drawn: dict[int, list[float]] = {c: [] for c in range(4)}
    for _ in range(3):
        for c in (2, 0, 3, 1):
            drawn[c] += turns[c].standard_normal(2).tolist()
    assert all(drawn[c] == alone[c].tolist() for c in range(4))
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002 (as above)
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("value", [-1, WORD, WORD + 1])
def test_words_outside_the_range_are_refused(word, value):
    """A word that would be cut to 32 bits, or wrap, is an error that shows the address."""
    with pytest.raises(ValueError, match=rf"within \[0, 2\*\*32\).*{value}"):
        generator(0, Purpose.NOISE, **{word: value})
