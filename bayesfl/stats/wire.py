"""Questions and designs as text, from which another machine makes the same.

Only the library's own classes of questions and terms are made, from plain values: received text
runs no code.
"""

import json
from inspect import isabstract
from typing import Any

from bayesfl.base import archive
from bayesfl.stats.asking import SiteSurvey
from bayesfl.stats.density.parameters import Parameter
from bayesfl.stats.formulas import Formula
from bayesfl.stats.survival.times import Grid
from bayesfl.stats.terms import Levels, Number


def known() -> dict[str, type]:
    """Return the classes that text can make, by name."""
    parts = (Number, Levels, Formula, Parameter, Grid)
    surveys: list[type] = [SiteSurvey]
    for one in surveys:
        surveys += one.__subclasses__()
    return {
        one.__name__: one
        for one in (*parts, *surveys)
        if one.__module__.startswith("bayesfl.stats.") and not isabstract(one)
    }


def written(value: Any) -> str:
    """Return a question, or the terms of a design, as JSON.

    Args:
        value: A question, a term, or a tuple of these.

    Raises:
        TypeError: It contains other than plain values.

    Example:
        >>> from bayesfl.stats.asking import Sums
        >>> from bayesfl.stats.wire import written
        >>> written(Sums(sites=3, columns=2))
        '{"class": "Sums", "options": {"sites": 3, "columns": 2}}'
    """
    return json.dumps(archive.plain(value, known()))


def read(text: str) -> Any:
    """Return the question or terms that `written` wrote.

    Raises:
        ValueError: It is not JSON, or there is no such question or term, or it has other fields.

    Example:
        >>> from bayesfl.stats.wire import read
        >>> read('{"class": "Number", "options": {"column": "age"}}')
        Number(column='age')
    """
    return archive.made(json.loads(text), known())
