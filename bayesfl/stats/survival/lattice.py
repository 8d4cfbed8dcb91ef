"""The lattice of times and thresholds in questions: decimal numbers with few digits.

So a question cannot move a threshold a little to see who lies in between. A number of the lattice
has an address, a whole number, which secure sums do not round.
"""

DIGITS = 2


def above(value: float, digits: int = DIGITS) -> int:
    """Return the address of the least number of the lattice that is not below a value.

    Args:
        value: The value, > 0.
        digits: Digits of the lattice's numbers.

    Example:
        >>> from bayesfl.stats.survival import lattice
        >>> lattice.at(lattice.above(1022.0))
        1100.0
    """
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    low = 10 ** (digits - 1)
    found = 9 * low * int(power) + round(float(mantissa) * low) - low
    return found if at(found, digits) >= value else found + 1


def at(address: int, digits: int = DIGITS) -> float:
    """Return the number at an address."""
    low = 10 ** (digits - 1)
    power, place = divmod(address, 9 * low)
    return float(f"{place + low}e{power - digits + 1}")
