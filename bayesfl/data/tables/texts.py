"""Texts in columns of data frames: which are numbers or dates, how many a category may have, and
the order of classes.
"""

import re
from collections.abc import Iterable, Sequence

DATE = re.compile(
    # 2026-11-23, 23.11.2026
    r"((?:19|20)\d{2}([-/.])\d{1,2}(\2\d{1,2})?|\d{1,2}([-/.])\d{1,2}\4\d{2,4}"
    # 23 Nov 2026, 10:30
    r"|\d{1,2}[- .]+[^\W\d]{3,9}\.?[- ,]+\d{2,4}|\d{1,2}:\d{2}(:\d{2})?)([ T]|$)"
)
"""Beginnings of texts that are dates or times of day."""
COMMA = re.compile(r"-?\d+,\d+")
"""A number with a comma."""
MOST_LEVELS = 100
"""Most levels of a category: of more, nearly each row is a level of its own."""


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes in their order: by size where all are numbers, else by the
    alphabet.
    """
    found = sorted(names)
    return tuple(sorted(found, key=float) if all(map(is_number, found)) else found)


def check_levels(name: str, levels: Sequence[str]) -> None:
    """Raise ValueError if a category has too many levels."""
    if len(levels) > MOST_LEVELS:
        raise ValueError(
            f"column {name!r} has {len(levels)} levels, more than {MOST_LEVELS}: leave it out if "
            "it is a name or an id, give rare levels "
            "one name, or make numbers of it"
        )


def check_text(name: str, texts: Sequence[str], otherwise: str) -> None:
    """Check that texts are no numbers, nor dates, which would become a column or a class each.

    Args:
        name: The column's name.
        texts: The texts that occur, each once.
        otherwise: What to do if they are meant as text, for the error message.

    Raises:
        ValueError: At least half of them are numbers, or most are dates.
    """
    numbers = [text for text in texts if is_number(text)]
    if texts and len(numbers) >= len(texts) / 2:
        beside = [text for text in texts if text not in numbers]
        with_others = (
            f" beside {beside[0]!r}, which may stand for a missing value" if beside else ""
        )
        raise ValueError(
            f"column {name!r} holds numbers as text, as {numbers[0]!r}{with_others}: make numbers "
            f"of it by pandas.to_numeric, or {otherwise}"
        )
    if texts and 2 * sum(COMMA.fullmatch(text) is not None for text in texts) > len(texts):
        raise ValueError(
            f"column {name!r} holds numbers with commas, as {texts[0]!r}: "
            "pandas.read_csv(decimal=',') reads them as decimals, thousands=',' as thousands; or "
            f"{otherwise}"
        )
    if texts and 2 * sum(DATE.match(text) is not None for text in texts) > len(texts):
        dated = next(text for text in texts if DATE.match(text))
        raise ValueError(
            f"column {name!r} holds dates as text, as {dated!r}: make numbers of it that mean "
            f"something at prediction, as days since an event, leave it out, or {otherwise}"
        )


def is_number(text: str) -> bool:
    """Say whether a text is a number's."""
    try:
        float(text)
    except ValueError:
        return False
    return True
