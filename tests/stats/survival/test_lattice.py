"""Numbers of few digits and their addresses."""

import numpy as np
import pytest

from bayesfl.stats.survival import lattice


@pytest.mark.parametrize(
    ("value", "digits", "wanted"),
    [
        (3472.0, 1, 4000.0),
        (4000.0, 1, 4000.0),
        (0.301, 1, 0.4),
        (9.5, 1, 10.0),
        (96e-5, 1, 1e-3),
        (1022.0, 2, 1100.0),
        (99.0001, 2, 100.0),
        (52.0, 2, 52.0),
        (0.3, 2, 0.3),
        (0.30000001, 2, 0.31),
        (1e-12, 2, 1e-12),
        (1.7e9, 2, 1.7e9),
        (1022.0, 3, 1030.0),
    ],
)
def test_a_value_is_rounded_up(value: float, digits: int, wanted: float):
    assert lattice.at(lattice.above(value, digits), digits) == wanted


@pytest.mark.parametrize("digits", [1, 2])
def test_addresses_are_of_all_numbers_in_turn(digits: int):
    addresses = range(-500, 500)
    numbers = [lattice.at(address, digits) for address in addresses]
    assert numbers == sorted({float(f"{number:.{digits - 1}e}") for number in numbers})
    assert [lattice.above(number, digits) for number in numbers] == [*addresses]
    rng = np.random.default_rng(0)
    for value in np.exp(rng.uniform(-25, 25, 500)).tolist():
        address = lattice.above(value, digits)
        assert lattice.at(address - 1, digits) < value <= lattice.at(address, digits)
