"""Fits over sites: estimates with their errors, and what they rest on."""

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas
import torch
from scipy import stats
from torch import Tensor

from bayesfl.base.display.html import facts, picture, table, text
from bayesfl.base.display.page import Section, write_page
from bayesfl.base.display.sheet import Sheet, of_frame
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Tensors
from bayesfl.evaluation import plots
from bayesfl.evaluation.report import environment
from bayesfl.stats.asking import Answered, Sites, with_likelihood
from bayesfl.stats.diagnostics import Diagnostics
from bayesfl.stats.newton import eigen
from bayesfl.stats.tables import Weighing

Errors = Literal["model", "sandwich", "site"]
ERRORS = {
    "model": "the model",
    "sandwich": "the sandwich, by rows",
    "site": "the sandwich, by sites, with the correction for few (CR2)",
}
"""{errors: their method, in words}."""
MOVING = 1e-6
"""If the last step's squared length, by the first question's information, is above this,
coefficients grow without bound."""

ALONE = 1e-8
"""If other sites' share of the information in a direction is below this, they have none."""


def chosen_errors(sites: Sites, errors: Errors | None, prior: float | None) -> Errors:
    """Return the method of standard errors: by default the model's, and the sandwich under
    probability weights.

    Raises:
        ValueError: With probability weights, `model` or a prior is requested; or `site` with fewer
            than three sites.
    """
    if errors == "site" and len(sites.names) < 3:
        raise ValueError("errors='site' needs three sites at least: take errors='sandwich'")
    if errors == "model" or prior is not None:
        with_likelihood(sites, "errors='model'" if errors == "model" else "prior=")
    return errors or ("sandwich" if sites.weighing == "probability" else "model")


def refuse_alone(alone: Tensor, names: Sequence[str]) -> None:
    """Raise ValueError if a single site alone informs a coefficient, because scores of sites then
    give no error for it.

    Args:
        alone: The share of each coefficient's direction that single sites alone inform, [q].
        names: Names of the coefficients.
    """
    if single := [names[i] for i in (alone > 1e-6).nonzero().flatten().tolist()]:
        raise ValueError(
            f"a single site alone informs the coefficients of {single}, so errors='site' has no "
            "error for them: take errors='sandwich', or leave these terms out"
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class Refits(Answered, ABC):
    """A fit that can be repeated without some of its sites.

    A subclass has `table`, with the estimates in the first column, and `_facts`.

    Args:
        model: What was fitted, in words.
        names: Names of the parameters.
        rows: {site: its number of rows, counted by weight}.
        events: {site: sum of its outcome, or its number of events}; empty for Gaussian outcomes.
        said: Remarks on the estimates.
        refit: Function (names of sites) -> the same fit to these alone.
    """

    model: str
    names: tuple[str, ...]
    rows: Mapping[str, float]
    events: Mapping[str, float] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    refit: Callable[[Sequence[str]], Any]

    def interval(self, term: str, level: float) -> dict[str, float]:
        """Return `estimate`, `low` and `high` of a coefficient.

        Raises:
            KeyError: There is no such coefficient.
        """
        row = self.table(level).loc[term]
        return dict(
            zip(("estimate", "low", "high"), (row.iloc[0], *row.filter(regex=" %$")), strict=True)
        )

    @abstractmethod
    def table(self, level: float = 0.95) -> Any:
        """Return the parameters with their intervals as a data frame of pandas."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return the facts about the fit, {what: value}, for a report."""

    def sheet(self) -> Sheet:
        """Return the table of parameters, with the facts about the fit below it."""
        with_events = [
            f"{site} {count:.10g}"
            + (f" ({self.events[site]:g} events)" if site in self.events else "")
            + (f", {self.dropped[site]} rows left out" if self.dropped.get(site) else "")
            for site, count in self.rows.items()
        ]
        lines = [
            f"{len(self.rows)} sites, {sum(self.rows.values()):.10g} rows: "
            f"{'; '.join(with_events)}",
            *(f"left out: {site}, {why}" for site, why in self.left_out.items()),
            f"{len(self.released.questions)} questions; "
            + ", ".join(
                f"{what} {value:.4f}" if isinstance(value, float) else f"{what} {value}"
                for what, value in self._facts().items()
                if what != "note"
            ),
            *self.said,
            str(self.released),
        ]
        return of_frame(self.table(), self.model, lines)

    def report(self, path: str | os.PathLike[str], *, by_site: Sequence[str] = ()) -> None:
        """Write a report of the fit: one page of HTML that needs no other file.

        It contains the table of parameters, the sites, the release sheet, and the environment.

        Args:
            path: The file, as `report.html`.
            by_site: Names of coefficients whose forest plots the report shows. `glm` and `cox` fit
                each site for these, and the release sheet lists the questions; `mixed` puts none.

        Raises:
            KeyError: A `Fit` has no such coefficient.
            ValueError: A `Mixed` has no such coefficient with own effects.

        Example:
            >>> from pathlib import Path
            >>> from tempfile import mkdtemp
            >>> import pandas as pd
            >>> import bayesfl as bf
            >>> a = pd.DataFrame({"dose": [0.0, 1, 2, 3] * 9, "ill": [0, 0, 1] * 12})
            >>> sites = bf.stats.tables({"a": a, "b": a}, outcome="ill", terms=["dose"])
            >>> path = Path(mkdtemp()) / "report.html"
            >>> bf.stats.glm(sites, family="binomial").report(path, by_site=["dose"])
            >>> "What left the sites" in path.read_text()
            True
        """
        fit: Any = self  # forests put questions, so they come before the release sheet
        forests = "".join(picture(plots.forest(fit, term), term) for term in by_site)
        counts: dict[str, Mapping[str, float]] = {
            "rows": self.rows,
            "events": self.events,
            "rows left out": self.dropped if any(self.dropped.values()) else {},
            "bytes sent": self.released.bytes,
        }
        sites = {what: [of.get(site, 0) for site in self.rows] for what, of in counts.items() if of}
        absent = "".join(
            f"<p>{text(site)}: {text(why)}.</p>" for site, why in self.left_out.items()
        )
        parts = [
            Section("Parameters", of_frame(self.table().rename_axis("parameter"))._repr_html_()),
            *([Section("By site", f'<div class="pictures">{forests}</div>')] if forests else []),
            Section("Sites", table({"site": list(self.rows), **sites}) + absent),
            Section("Fit", facts(self._facts())),
            Section("What left the sites", self.released.html()),
            Section("Environment", facts(environment())),
        ]
        large = {what: sum(sites[what]) for what in ("rows", "events") if what in sites}
        write_page(
            path,
            self.model[0].upper() + self.model[1:],
            parts,
            lead="A fit to the rows of several sites, which stayed there. What each sent is listed "
            f"below; {self.released.judged}.",
            headline={"sites": len(self.rows), **large, "questions": len(self.released.questions)},
        )

    def without(self, *sites: str) -> Any:
        """Return the same fit to the other sites, with new questions.

        Raises:
            ValueError: There is no such site.
        """
        names = [*self.rows, *self.left_out]
        if strangers := [site for site in sites if site not in names]:
            raise ValueError(f"there is no site {strangers[0]!r}; the sites are {names}")
        with self.released.also():
            return self.refit([name for name in names if name not in sites])

    def leave_one_out(self, term: str, level: float = 0.95) -> Any:
        """Return the estimate of a coefficient with each site left out in turn, of fits to the
        others, as a data frame of pandas of the form of `by_site`.

        Args:
            term: Name of the coefficient.
            level: Probability of the intervals.

        Raises:
            KeyError: There is no such coefficient.
            ValueError: Answers were added unseen: the sum of all sites minus that of all but one is
                one site's answer.
        """
        if self.released.hidden is not None:
            raise ValueError(
                "leave_one_out is not available where answers are added unseen: the sum of all "
                "sites minus that of all but one is one site's answer. without() leaves several out"
            )
        return self._refitted(
            {f"without {site}": [name for name in self.rows if name != site] for site in self.rows},
            term,
            level,
        )

    def _check_rows(self, other: Any, used: Callable[[Any, str], Any], remedy: str) -> None:
        """Raise an error unless sites' hashes of the rows that they used, `used(fit, key)` under a
        new key, are the same for two fits.
        """
        key = current().every(lambda: secrets.token_hex(16))[0]
        here, there = used(self, key), used(other, key)
        if others := [site for site in here | there if here.get(site) != there.get(site)]:
            raise ValueError(f"the fits used different rows of {others}, {remedy}")

    def _refitted(self, parts: Mapping[str, Sequence[str]], term: str, level: float) -> Any:
        rows: dict[str, dict[str, Any]] = {}
        whole = self.interval(term, level)
        for name, sites in parts.items():
            try:
                with self.released.also():
                    row = {**self.refit(sites).interval(term, level), "why": ""}
            except ValueError as error:
                # The remedy, after a colon or a consequence, does not apply here.
                row = {"why": str(error).partition(":")[0].partition(", so")[0]}
            rows[name] = {"rows": sum(self.rows[site] for site in sites), **row}
        rows |= {site: {"why": why} for site, why in self.left_out.items()}
        rows["all sites"] = {"rows": sum(self.rows.values()), **whole, "why": ""}
        return pandas.DataFrame.from_dict(rows, orient="index")[
            ["estimate", "low", "high", "rows", "why"]
        ]


@dataclass(frozen=True, repr=False, kw_only=True)
class Compared(Refits, ABC):
    """A fit that compares with others by its likelihood.

    Args:
        ratio: Name of the exponential of a coefficient, such as `odds ratio`; None if it has none.
        log_likelihood: Log likelihood at the estimate, without a prior, in nats; under probability
            weights a pseudo-likelihood, of weights whose mean is 1.
        parameters: Number of parameters, own intercepts included.
        likelihood: What the likelihood describes, in words; only equal ones compare.
        evidence: Log marginal likelihood, in nats; None without a prior.
        weighing: The kind of weights.
        further: Further functions of the fit by name: `used rows`; `predict` and `diagnostics` of
            `glm`; `check`, `concordance` and `survival` of `cox`.
    """

    ratio: str | None
    log_likelihood: float
    parameters: int
    likelihood: str
    evidence: float | None = None
    weighing: Weighing = "none"
    further: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def aic(self) -> float:
        """Return Akaike's criterion, 2 k - 2 log likelihood.

        Raises:
            ValueError: The rows have probability weights.
        """
        with_likelihood(self, "AIC")
        return 2 * self.parameters - 2 * self.log_likelihood

    def compare(self, other: "Compared") -> str:
        """Return a text that compares two fits to the same rows: likelihood ratio, AIC, evidence.

        The sites of both send a hash of the rows that they used. Fits of `mixed` compare with each
        other if they have the same columns, because their likelihoods integrate over coefficients.
        If a standard deviation is 0 in one of them, the ratio's p is up to twice too large.

        Args:
            other: The other fit. The ratio's p is for a fit that is a special case of the other.

        Raises:
            ValueError: The fits have different rows or kinds of likelihood, or the rows have
                probability weights.
        """
        if self.likelihood != other.likelihood:
            raise ValueError(
                f"the likelihoods describe different things, {self.likelihood} and "
                f"{other.likelihood}, and do not compare"
            )
        self._check_rows(
            other,
            lambda fit, key: fit._asked("used rows", key),
            "for example because different columns have gaps: name the columns of both in "
            "tables(also=...), and fit the same sites",
        )
        large, small = sorted((self, other), key=lambda fit: -fit.parameters)
        more = large.parameters - small.parameters
        ratio = 2 * (large.log_likelihood - small.log_likelihood)
        p = stats.chi2.sf(max(ratio, 0.0), more)
        lines = [
            f"A: {large.model}: {', '.join(large.names)}",
            f"B: {small.model}: {', '.join(small.names)}",
            f"likelihood ratio {ratio:.4f} on {more} degrees of freedom, p {p:.4g}, if B is a "
            "special case of A"
            if more
            else "",
            f"AIC {large.aic:.2f} and {small.aic:.2f}",
            f"log Bayes factor of A over B {large.evidence - small.evidence:.4f} nats"
            if large.evidence is not None and small.evidence is not None
            else "",
        ]
        return "\n".join(filter(None, lines))

    def _with_ratios(self, table: Any) -> Any:
        """Return a table with the exponentials of the estimates and of the ends of intervals of
        `names`, if these are logarithms of ratios.
        """
        if self.ratio is None:
            return table
        with np.errstate(over="ignore"):  # of a column in a large unit
            ratios = np.exp(table.loc[list(self.names)].filter(regex="^coef$|^mean$| %$"))
            return table.join(ratios.add_prefix("exp(").add_suffix(")"))

    def _asked(self, question: str, *given: Any) -> Any:
        if question not in self.further:
            why = " under probability weights" if self.weighing == "probability" else ""
            raise ValueError(
                f"there is no {question} of this fit{why}; there is "
                + ", ".join(name for name in self.further if name.isidentifier())
            )
        with self.released.also():
            return self.further[question](*given)


@dataclass(frozen=True, repr=False, kw_only=True)
class Fit(Compared):
    """A fit to the rows of all sites; `print` shows its table.

    Args:
        estimate: Estimates of the q parameters `names`, [q].
        covariance: The covariance of their errors, [q, q].
        errors: The method of the standard errors, in words.
        degrees: Degrees of freedom of the errors, for intervals by Student's t, or those of each
            parameter, [q]; None for the normal distribution.
        scale: Residual variance of a Gaussian outcome; 1 for other outcomes.
        own_intercepts: {site: its own intercept}, of sites that are on this machine.

    Example:
        >>> import pandas as pd
        >>> a = pd.DataFrame({"x": [0.0, 1, 2], "y": [0.0, 3, 3]})
        >>> frames = {"a": a, "b": a + 1}
        >>> fit = bf.stats.glm(bf.stats.tables(frames, outcome="y", terms=["x"]), family="gaussian")
        >>> fit.table().index.tolist()
        ['(intercept)', 'x']
    """

    estimate: Tensor
    covariance: Tensor
    errors: str
    degrees: float | Tensor | None = None
    scale: float = 1.0
    own_intercepts: Mapping[str, float] = field(default_factory=dict)

    def table(self, level: float = 0.95) -> Any:
        """Return estimates, errors, statistics, p values and intervals as a data frame of pandas.

        If coefficients are logarithms of ratios, `exp(coef)` is the ratio, and `exp(2.5 %)` and
        `exp(97.5 %)` are the ends of its interval.

        Args:
            level: Probability of the intervals.
        """
        estimate, error = self.estimate.numpy(), self.covariance.diagonal().sqrt().numpy()
        z = estimate / error
        law = stats.norm if self.degrees is None else stats.t(np.asarray(self.degrees))
        reach = law.ppf((1 + level) / 2) * error
        columns = {
            "coef": estimate,
            "se": error,
            "z" if self.degrees is None else "t": z,
            "p": 2 * law.sf(np.abs(z)),
            f"{50 * (1 - level):g} %": estimate - reach,
            f"{50 * (1 + level):g} %": estimate + reach,
        }
        if isinstance(self.degrees, Tensor):
            columns["df"] = self.degrees.numpy()
        return self._with_ratios(pandas.DataFrame(columns, index=list(self.names)))

    def _facts(self) -> dict[str, Any]:
        """Return the facts about the fit, {what: value}, for a report."""
        if self.weighing == "probability":
            return {"errors by": f"{self.errors}, under probability weights"}
        return {
            "errors by": self.errors,
            "log likelihood": self.log_likelihood,
            "AIC": self.aic,
            **({"note": "; ".join(self.said)} if self.said else {}),
            **({} if self.evidence is None else {"log marginal likelihood": self.evidence}),
        }

    def predict(self, frame: Any, *, site: str | None = None) -> Tensor:
        """Return the outcome's means for rows of a data frame, [n].

        Args:
            frame: The rows, with the columns of the design and of the offset, if there is one.
            site: The site whose own intercept is used, if sites have one.

        Raises:
            ValueError: The fit has no predictions, a site must be named, or its intercept is not
                here.
        """
        return self._asked("predict", frame, site)

    def diagnostics(self, level: float = 0.95) -> Diagnostics:
        """Return deviance, observed and expected events and concordance of a regression, by further
        questions, which also fit the model of intercepts alone.

        Args:
            level: Probability of the concordance's intervals.

        Raises:
            ValueError: The fit is no regression of an outcome.
        """
        return self._asked("diagnostics", level)

    def check(self) -> Any:
        """Test whether hazards are proportional, by Schoenfeld's residuals against the logarithm of
        time, in a question to the sites.

        Returns:
            A `Tested`: the statistic of all coefficients together, and a table of each.

        Raises:
            ValueError: The fit is none of `cox`.

        Source: Grambsch and Therneau, "Proportional hazards tests and diagnostics based on weighted
            residuals", Biometrika 81, 1994, the form with a constant covariance.
        """
        return self._asked("check")

    def concordance(self) -> Any:
        """Return Harrell's concordance of each site, of all pairs of rows within sites, and, if
        sites share a baseline, of all pairs, as a data frame of pandas, by questions to the sites.

        All pairs are counted from numbers of rows by time and by score, in 50 bins of equal shares;
        pairs in one bin count as ties. Sites with a policy refuse this question. Under strata,
        pairs belong to one stratum; with entry times, both rows are at risk together.

        Raises:
            ValueError: The fit is none of `cox`.
        """
        return self._asked("concordance")

    def survival(self, frame: Any = None, level: float = 0.95) -> Any:
        """Return the cumulative hazards and the survival that a Cox fit predicts, as a data frame
        of pandas with a line for each row and time while somebody of the row's stratum is at risk.

        The baseline follows from the sums of the fit, without a further question. It is Efron's
        estimate, and Breslow's if no times tie. The columns are `hazard`, cumulative, with its
        error, and `survival` with its interval, which is normal for $log(-log survival)$.

        Args:
            frame: Rows to predict for, with the columns of the design, of strata and of the offset,
                if there are any; None for the baseline of each stratum: a row at the columns' means
                over all sites.
            level: Probability of the intervals.

        Raises:
            ValueError: The fit is none of `cox`, each site has its own baseline, or rows have
                probability weights, for which the baseline's error is not implemented.

        Source: Tsiatis, "A large sample study of Cox's regression model", Annals of Statistics 9,
            1981, as R's survfit.

        Example:
            >>> import pandas as pd
            >>> north = pd.DataFrame({"t": [2, 3, 5, 8], "d": [1, 1, 0, 1], "dose": [3, 1, 2, 0]})
            >>> south = pd.DataFrame({"t": [1, 4, 6, 7], "d": [1, 0, 1, 1], "dose": [1, 2, 0, 1]})
            >>> frames = {"north": north, "south": south}
            >>> sites = bf.stats.tables(frames, terms=["dose"], also=["t", "d"])
            >>> fit = bf.stats.cox(sites, time="t", event="d", exact_times=True)
            >>> found = fit.survival(pd.DataFrame({"dose": [0, 3]}))
            >>> found["survival"].unstack()[3.0].round(2).tolist()
            [0.81, 0.37]
        """
        return self._asked("survival", frame, level)

    def by_site(self, term: str, level: float = 0.95) -> Any:
        """Return each site's own estimate of a coefficient, from a fit to its rows alone, as a data
        frame of pandas: a row for each site and a last one for all sites, and the columns
        `estimate`, `low`, `high`, `rows`, and `why`, the reason if a site has no estimate.

        Each site receives the questions of a new fit.

        Args:
            term: Name of the coefficient.
            level: Probability of the intervals.

        Raises:
            KeyError: There is no such coefficient.
        """
        return self._refitted({site: [site] for site in self.rows}, term, level)


def summaries(draws: Mapping[Any, Tensor], level: float) -> Any:
    """Return means, standard deviations and quantiles of draws [S] as a data frame of pandas."""
    low, high = (1 - level) / 2, (1 + level) / 2
    values = torch.stack(list(draws.values())).numpy()
    columns = {
        "mean": values.mean(1),
        "sd": values.std(1, ddof=1),
        f"{100 * low:g} %": np.quantile(values, low, axis=1),
        f"{100 * high:g} %": np.quantile(values, high, axis=1),
    }
    return pandas.DataFrame(columns, index=pandas.Index(list(draws)))


def inverse(state: Tensors, names: Sequence[str]) -> Tensor:
    """Return the inverse of the information matrix [q, q] of standardised columns at a minimum.

    If columns separate the outcome, the sum falls as $e^-t$ along a direction: steps keep their
    length while the information vanishes. The information at the first question measures that
    length, so it does not depend on units of weights or columns.

    Args:
        state: Newton's last state.
        names: Names of the parameters.

    Raises:
        ValueError: It is singular: the outcome is separated by some columns, or these are linearly
            dependent.
    """
    values, vectors, size = eigen(state["hessian"])
    # The last step has the size of rounding, unless the sum falls without bound.
    moved, first = state["theta"] - state["best"], state["first"]
    length = float(moved @ first @ moved)
    if not len(values) or (float(values[0]) >= 1e-10 and length <= MOVING):
        inner = vectors / size[:, None]
        return (inner / values) @ inner.T
    # Dependent columns have no information in a direction from the start, up to the rounding of
    # secure sums; separated ones lose it in the end.
    at_first, directions, _ = eigen(first)
    least = int(at_first.abs().argmin())
    if float(at_first.abs()[least]) < 1e-6:
        sizes = directions[:, least].abs()
        raise ValueError(f"{_involved(sizes, names)} are linearly dependent: leave one out")
    sizes = moved if length > MOVING else vectors[:, 0] / size
    raise ValueError(separation(sizes.abs(), names))


def separation(sizes: Tensor, names: Sequence[str]) -> str:
    """Return a text that names the columns that separate the outcome, by their sizes, [q]."""
    sizes = sizes * torch.tensor([name != "(intercept)" or len(names) == 1 for name in names])
    return (
        f"{_involved(sizes, names)} separate the outcome, so coefficients grow without bound: "
        "leave one out, or give a weak prior, prior=2.5"
    )


def _involved(sizes: Tensor, names: Sequence[str]) -> list[str]:
    most = 0.1 * float(sizes.max())
    return [name for name, size in zip(names, sizes.tolist(), strict=True) if size > most]
