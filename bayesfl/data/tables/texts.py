"""Texts in columns of data frames: how they are read, which are numbers or dates, how many a
category may have, and the order of classes.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

OTHER = (
    (
        r"-?\d+,\d+",
        "numbers with commas, as {0!r}: pandas.read_csv(decimal=',') reads them as decimals, "
        "thousands=',' as thousands",
    ),
    # apart by a blank or an apostrophe
    (
        r"-?\d{1,3}([ '’])\d{3}(\1\d{3})*",
        "numbers with thousands apart, as {0!r}: pandas.read_csv(thousands={1!r}) reads them",
    ),
    (
        # 2026-11-23, 23.11.2026
        r"((?:19|20)\d{2}([-/.])\d{1,2}(\2\d{1,2})?|\d{1,2}([-/.])\d{1,2}\4\d{2,4}"
        # 23 Nov 2026, 10:30
        r"|\d{1,2}[- .]+[^\W\d]{3,9}\.?[- ,]+\d{2,4}|\d{1,2}:\d{2}(:\d{2})?)([ T].*)?",
        "dates as text, as {0!r}: make numbers of it that mean something at prediction, as days "
        "since an event, leave it out",
    ),
)
"""Patterns of texts that stand for something else, and what to do about a column of them."""
MOST_LEVELS = 100
"""Maximum number of levels of a category: with more, nearly each row has its own."""


def tidied(text: str) -> str | None:
    """Return a text in Unicode's composed form, without blanks around it and with single ones
    inside; None for blanks alone. So texts that look the same are one level, client or class.
    """
    return " ".join(unicodedata.normalize("NFC", text).split()) or None


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
            "it is a name or an id, give rare levels one name, or make numbers of it"
        )


def check_text(name: str, texts: Sequence[str], otherwise: str) -> None:
    """Check that texts are neither numbers nor dates: each would become a column or a class.

    Args:
        name: The column's name.
        texts: The different texts.
        otherwise: Remedy in the error message if they are meant as text.

    Raises:
        ValueError: At least half of them are numbers, or most are numbers with commas, or dates.
    """
    if told := _other_than_text(texts):
        raise ValueError(f"column {name!r} holds {told}, or {otherwise}")


def _other_than_text(texts: Sequence[str]) -> str:
    """Return what texts are instead, with the remedy; '' if they are text."""
    numbers = [text for text in texts if is_number(text)]
    if numbers and 2 * len(numbers) >= len(texts):
        beside = [text for text in texts if text not in numbers]
        others = f" beside {beside[0]!r}, which may stand for a missing value" if beside else ""
        return (
            f"numbers as text, as {numbers[0]!r}{others}: make numbers of it by pandas.to_numeric"
            + ("(errors='coerce')" if beside else "")
        )
    for pattern, told in OTHER:
        found = [one for text in texts if (one := re.fullmatch(pattern, text))]
        if found and 2 * (len(found) + len(numbers)) > len(texts):
            return told.format(found[0].string, *found[0].groups())
    return ""


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
