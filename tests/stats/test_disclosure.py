"""Many analyses under the default policy, against who knows one identifying column of everybody.

Whatever a site answers of columns that the attacker does not know, and weighs by rows as the one
does that is known, is a linear equation of the unknown ones. All of these are solved together.
"""

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.stats import Policy
from bayesfl.stats.asking import Sums
from bayesfl.stats.describe import Totals
from bayesfl.stats.glm import Likelihood
from bayesfl.stats.tables import Tables

N = 60
UNKNOWN = ("sbp", "bmi", "dose")


def hospital() -> pd.DataFrame:
    """Rows of one site, of which the attacker knows the age of each."""
    rng = np.random.default_rng(0)
    age = rng.permutation(np.linspace(40, 80, N).round(1))
    sex = rng.permutation(np.arange(N) % 2)
    sbp = 100 + 0.5 * age + rng.normal(0, 10, N)
    ill = (rng.random(N) < 1 / (1 + np.exp(-(age - 60) / 15))).astype(int)
    return pd.DataFrame(
        {
            "age": age,
            "sex": sex,
            "sbp": sbp,
            "bmi": rng.normal(26, 4, N) + 2 * sex,
            "dose": rng.gamma(6, 2, N),
            "ill": ill,
            "visits": rng.poisson(np.exp(0.01 * age)),
            "time": rng.exponential(40, N).round(1) + 0.1,
            "dead": (rng.random(N) < 0.7).astype(int),
        }
    )


class Overheard(Tables):
    """Tables whose answers are noted: equations of rows by the weights that are known."""

    def ask(self, survey: Any, aggregation: Any) -> Any:
        put = super().ask(survey, aggregation)

        def ask(state: Any, shapes: Any, beyond: Any) -> Any:
            told = put(state, shapes, beyond)
            EQUATIONS.extend(equations(self, survey, state, told))
            return told

        return ask


EQUATIONS: list[tuple[str, torch.Tensor, float]] = []
"""(column, weights of rows [n], their sum)."""


def equations(tables: Tables, survey: Any, state: Any, told: Any) -> Any:
    """Yield what an answer says of columns that are not known."""
    age = tables.sites[0].column("age")
    one = torch.ones_like(age)
    for place, name in enumerate(tables.columns):
        if name not in UNKNOWN:
            continue
        if isinstance(survey, Sums):
            yield name, one, float(told["sum"][place])
        if isinstance(survey, Totals) and survey.column is None and "rows" in told:
            yield name, one, float(told["sum"][0, place])
        if not isinstance(survey, Likelihood) or not survey.columns or survey.per_site:
            continue
        theta, first = state["theta"][1 : 1 + survey.columns], list(tables.columns)
        others = [theta[at] for at, other in enumerate(first) if other != "age"]
        if any(float(slope) for slope in others):
            continue  # weights depend on what is not known
        # The question's own state is public, and so are the weights that it gives by age alone.
        weight = torch.atleast_2d(survey.row_weights(state, tables.sites[0]))[0]
        centre, scale = survey.centre[place], survey.scale[place]
        total = float(told["hessian"][0, 0])
        yield name, weight, float(told["hessian"][0, 1 + place]) * scale + centre * total
        if "age" in first:
            at = first.index("age")
            known = (age - survey.centre[at]) / survey.scale[at] * weight
            cross = float(told["hessian"][1 + at, 1 + place]) * scale
            yield name, known, cross + centre * float(told["hessian"][0, 1 + at])


def analyse(rng: np.random.Generator, rows: pd.DataFrame, policy: Policy) -> None:
    """An analysis at random, which the policy may refuse."""
    outcome, family = [
        ("ill", "binomial"),
        ("visits", "poisson"),
        ("dose", "gaussian"),
        ("visits", "negative_binomial"),
    ][rng.integers(4)]
    columns = [name for name in ("age", "sex", *UNKNOWN) if name != outcome]
    terms = [name for name in columns if rng.random() < 0.6] or ["age"]
    sites = bf.stats.tables(
        {"va": rows}, outcome=outcome, terms=terms, also=["time", "dead"], policy=policy
    )
    heard = Overheard(**{name: getattr(sites, name) for name in vars(sites)})
    errors = ["model", "sandwich"][rng.integers(2)]
    sex = bf.stats.levels("sex", [0, 1])
    when: dict[str, Any] = {"time": "time", "event": "dead", "baseline": "per_site"}
    what = rng.integers(6)
    if what < 3:
        fit = bf.stats.glm(heard, family=family, errors=errors)  # pyright: ignore[reportArgumentType]
        fit.diagnostics()
    elif what == 3:
        bf.stats.describe(heard, by="site" if rng.random() < 0.5 else sex)
    elif what == 4:
        bf.stats.cox(heard, **when).check()
    else:
        scale = float(10 ** rng.uniform(-6, 0))  # a window at somebody's age
        centre = [float(rng.choice(rows["age"])) if name == "age" else 0.0 for name in terms]
        size = [scale if name == "age" else 1.0 for name in terms]
        question = Likelihood(
            "binomial", len(terms), False, centre=tuple(centre), scale=tuple(size)
        )
        slopes = [1.0 if name == "age" else 0.0 for name in terms]
        state = question.start(None) | {"theta": torch.tensor([0.0, *slopes], dtype=torch.float64)}
        heard.ask(question, None)(state, question.shapes(state), {})


@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_random_analyses_do_not_tell_a_person(count: int):
    """No more than the regression on what is known that is fitted to the others: the ratio of both
    errors is .9 at least. Without a policy a question tells all of somebody.
    """
    rng, rows, policy = np.random.default_rng(count), hospital(), Policy()
    EQUATIONS.clear()
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            try:
                analyse(rng, rows, policy)
            except ValueError:
                refused += 1
    assert 0 < refused < count / 2
    assert errors(rows) >= 0.9
    one = Likelihood("binomial", 2, False, centre=(rows["age"][17], 0.0), scale=(1e-6, 1.0))
    sites = bf.stats.tables({"va": rows}, outcome="ill", terms=["age", "sbp"])
    heard = Overheard(**{name: getattr(sites, name) for name in vars(sites)})
    state = one.start(None) | {"theta": torch.tensor([0.0, 1, 0], dtype=torch.float64)}
    heard.ask(one, None)(state, one.shapes(state), {})
    assert recovered(rows, "sbp")[17] == pytest.approx(rows["sbp"][17])


def recovered(rows: pd.DataFrame, column: str) -> np.ndarray:
    """The solution of all equations about a column that is nearest to the regression by age."""
    x = np.stack([np.ones(N), rows["age"] - 60], 1)
    fitted = x @ np.linalg.lstsq(x, rows[column].to_numpy(), rcond=None)[0]
    known = [(w.numpy(), total) for c, w, total in EQUATIONS if c == column and w.any()]
    size = np.array([np.linalg.norm(w) for w, _ in known])
    a = np.stack([w for w, _ in known]) / size[:, None]
    b = np.array([total for _, total in known]) / size
    return fitted + np.linalg.lstsq(a, b - a @ fitted, rcond=1e-9)[0]


def errors(rows: pd.DataFrame) -> float:
    """The least ratio of the attacker's error to that of a regression without the target."""
    ratios = []
    x = np.stack([np.ones(N), rows["age"] - 60], 1)
    hat = (x @ np.linalg.inv(x.T @ x) * x).sum(1)
    for column in UNKNOWN:
        value = rows[column].to_numpy()
        residual = value - x @ np.linalg.lstsq(x, value, rcond=None)[0]
        without = residual / (1 - hat)
        ratios.append(np.sqrt(((recovered(rows, column) - value) ** 2).sum() / (without**2).sum()))
    return float(min(ratios))
