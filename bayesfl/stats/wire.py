"""Questions and designs as text, by which a machine elsewhere makes the same.

Only the library's own classes of questions and terms are made, of plain values: what arrives runs
no code.
"""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from bayesfl.stats.asking import SiteSurvey
from bayesfl.stats.formulas import Formula
from bayesfl.stats.survival.piecewise import Cut
from bayesfl.stats.survival.times import Grid
from bayesfl.stats.terms import Interaction, Levels, Number


def known() -> dict[str, type]:
    """Return the classes that may be made, by name."""
    parts = (Number, Levels, Interaction, Formula, Grid, Cut)
    found: dict[str, type] = {one.__name__: one for one in parts}
    waiting: list[type] = [SiteSurvey]
    while waiting:
        for one in waiting.pop().__subclasses__():
            waiting.append(one)
            if one.__module__.startswith("bayesfl.stats."):
                found[one.__name__] = one
    return found


def written(value: Any) -> str:
    """Return a question, or the terms of a design, as JSON.

    Args:
        value: A question, a term, or a tuple of these.

    Raises:
        TypeError: It holds something else than plain values.

    Example:
        >>> from bayesfl.stats.asking import Sums
        >>> from bayesfl.stats.wire import written
        >>> written(Sums(sites=3, columns=2))
        '{"class": "Sums", "fields": {"sites": 3, "columns": 2, "family": null}}'
    """
    return json.dumps(_plain(value))


def read(text: str) -> Any:
    """Return what `written` made text of.

    Raises:
        ValueError: It is no JSON, or there is no such question or term, or it has other fields.

    Example:
        >>> from bayesfl.stats.wire import read
        >>> read('{"class": "Number", "fields": {"column": "age"}}')
        Number(column='age')
    """
    return _made(json.loads(text), known())


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        inner = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.compare}
        return {"class": type(value).__name__, "fields": inner}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):  # a level out of a data frame
        return value.item()
    return value


def _made(value: Any, classes: dict[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_made(one, classes) for one in value)
    if not isinstance(value, dict):
        return value
    name, inner = value.get("class"), value.get("fields")
    if not isinstance(name, str) or name not in classes or not isinstance(inner, dict):
        raise ValueError(f"there is no question {name!r}; install the same version of bayesfl")
    try:
        return classes[name](**{key: _made(one, classes) for key, one in inner.items()})
    except TypeError as error:
        raise ValueError(
            f"{name} has other fields here ({error}); install the same version of bayesfl"
        ) from error
