"""Questions as text: the same question comes back, and nothing but the library's own."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf
from bayesfl.stats import wire
from bayesfl.stats.asking import Sums
from bayesfl.stats.glm import Likelihood, Meat
from bayesfl.stats.mixed import Draws, Mode
from bayesfl.stats.tables import Levels, Number, Tables
from tests.stats.survival import made as survival

LIKELIHOOD = Likelihood("binomial", 2, True, 2.5, (math.pi, 1e-300), (0.1, 3.0), -1 / 3)
MODEL: dict[str, Any] = {
    "family": "poisson",
    "columns": 1,
    "common": (0,),
    "effects": (0, 1),
    "group": "ward",
    "centre": (0.1,),
    "scale": (1 / 3,),
}
QUESTIONS = (
    Sums(3, 2, "binomial"),
    LIKELIHOOD,
    Meat(LIKELIHOOD),
    Mode(**MODEL, beside=((1 / 3, 0.0),), at=(math.inf, -0.0)),
    Draws(**MODEL),
    (Number("age"), Levels("sex", ("f", "m"))),
)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: type(one).__name__)
def test_the_same_question_comes_back(question: Any):
    """To the bit of every number."""
    found = wire.read(wire.written(question))
    assert found == question
    assert repr(found) == repr(question)


class Wired(Tables):
    """Sites that make each question of its text, as other machines do."""

    def ask(self, survey: Any, aggregation: Any) -> Any:
        return super().ask(wire.read(wire.written(survey)), aggregation)


WHEN: dict[str, Any] = {"time": "untied", "event": "event"}
ASKED: dict[str, Callable[[Any], Any]] = {
    "describe": lambda given: bf.stats.describe(given).table(),
    "glm": lambda given: bf.stats.glm(given, family="poisson", errors="site").table(),
    "diagnostics": lambda given: bf.stats.glm(given, family="poisson").diagnostics().sites,
    "cox": lambda given: bf.stats.cox(given, **WHEN, errors="sandwich").table(),
    "check": lambda given: bf.stats.cox(given, **WHEN).check().table,
    "concordance": lambda given: bf.stats.cox(given, **WHEN, baseline="per_site").concordance(),
    "exact": lambda given: bf.stats.cox(given, **WHEN, exact_times=True).check().table,
    "piecewise": lambda given: bf.stats.piecewise(given, **WHEN, cuts=[3, 9]).table(),
    "kaplan_meier": lambda given: pd.DataFrame(
        bf.stats.kaplan_meier(given, **WHEN, by="kind").survival
    ),
    "logrank": lambda given: bf.stats.logrank(given, **WHEN, by="kind").table,
    "mixed": lambda given: bf.stats.mixed(given, family="poisson", draws=100).table(),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_every_fit_can_be_asked_for_by_text(ask: Callable[[Any], Any]):
    """The numbers are those of questions that were not sent."""
    given = survival.sites(outcome="count")
    kinds = {name: getattr(given, name) for name in vars(given)}
    assert ask(Wired(**kinds)).equals(ask(given))


def test_levels_out_of_a_data_frame():
    declared = bf.stats.levels("cp", np.array([1, 2, 3]))
    assert wire.read(wire.written(declared)) == bf.stats.levels("cp", [1, 2, 3])


def test_every_question_of_the_library_is_known():
    """Each under a name of its own, with fields for what it is made of."""
    known = wire.known()
    places = [one.__module__ for one in known.values()]
    assert all(place.startswith("bayesfl.stats.") for place in places)
    assert all(fields(one) for one in known.values())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"class": "Path", "options": {}}', "no 'Path' of these options"),
        ('{"class": ["Sums"], "options": {}}', "no \\['Sums'\\] of these"),
        (
            '{"class": "Sums", "options": {"sites": 1, "columns": 1, "run": "true"}}',
            "unexpected keyword argument",
        ),
        ('{"options": {}}', "no None of these options"),
        ("print(1)", "Expecting value"),
    ],
)
def test_anything_else_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        wire.read(text)
