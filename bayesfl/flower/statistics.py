"""Statistics over a network: sites that answer questions about their tables, and an analysis that
asks them.

An analysis is a function of `bayesfl.stats.asking.Sites`, the same as in a simulation. A site is a
client that answers and does not train; hello, questions and refusals are those of clients. A node
finds a question by its name in its own app: a client among those of its method, a site among those
of the library (`bayesfl.stats.wire`). The site's policy checks a question first, because its
options come with the message. A ledger records the questions of all runs. If a site fails, it sends
only the type of the error, because the text could quote the data.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from bayesfl.base.options import Count, Range, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Survey
from bayesfl.data.names import natural
from bayesfl.data.tables.table import pandas_of
from bayesfl.federation.clients.surveying import Adder
from bayesfl.federation.errors import BadClients
from bayesfl.flower import records
from bayesfl.flower.post import Refused, answers, app_of, ask, total
from bayesfl.flower.roster import LONGEST, Hello
from bayesfl.stats import wire
from bayesfl.stats.asking import Sites
from bayesfl.stats.formulas import Formula, formula_of
from bayesfl.stats.kept.ledger import Ledger
from bayesfl.stats.policy import Policy, Put, Refusal
from bayesfl.stats.tables import Tables, Weighing, design
from bayesfl.stats.terms import Levels, Number

log = logging.getLogger(__name__)
Seconds = Annotated[float, Range(0, why="it is in seconds")]
FILES, NUMBERS = 1000, 10**7
"""Maximum number of files with own models on a node, and of numbers in each."""


def site_app(load_tables: Callable[[Context], Tables]) -> ClientApp:
    """Make a Flower ClientApp that answers questions about the tables of one site.

    A node's configuration names the file with its policy, as in

        flower-supernode --node-config 'policy="/etc/bayesfl/policy.toml" data-file="/data/va.csv"'

    Without one the rules of `bf.stats.Policy()` apply. The configuration must name a folder as
    `state-dir`. There the node stores a ledger of all questions, which `bayesfl show` prints, and
    CSV files with its own model of each fit with own intercepts, and draws of its own coefficients
    of each mixed model.

    Args:
        load_tables: Function from the context to the tables of this one site, from
            `bf.stats.tables({name: frame}, ...)`. All sites must have the same terms. It is called
            for each question.

    Example:
        >>> import pandas as pd
        >>> def load_tables(context):  # a real one reads the site's own file
        ...     frame = pd.DataFrame({"age": [50, 60, 70], "ill": [0, 1, 1]})
        ...     return bf.stats.tables({"va": frame}, outcome="ill", terms=["age"])
        >>> app = bf.flower.site_app(load_tables)
    """

    @contextmanager
    def here(message: Message, context: Context) -> Iterator[_AtSite]:
        try:
            if "state-dir" not in context.node_config:
                raise Refused(
                    "no folder for its ledger of questions: name one in --node-config, as "
                    'state-dir="/var/lib/bayesfl"'
                )
            path = context.node_config.get("policy")
            policy = Policy() if path is None else Policy.read(str(path))
            with Ledger.opened(Path(str(context.node_config["state-dir"]))) as policy.ledger:
                yield _AtSite(replace(load_tables(context), policy=policy), policy.ledger, context)
        except (Refused, records.RecordError):  # their texts are the library's own
            raise
        except Exception as error:  # its text may contain data
            raise Refused(f"it failed with {type(error).__name__}; see its own log") from error

    return app_of(here, {"query": _AtSite.hello, "query.survey": _AtSite.survey})


@dataclass(frozen=True)
class _AtSite:
    """Represent a site on its node.

    Args:
        tables: Its tables, with its policy.
        ledger: The record of questions.
        context: The context of the run.
    """

    tables: Tables
    ledger: Ledger
    context: Context

    def __post_init__(self) -> None:
        """Check that the tables are those of the node's first answer in the run.

        Raises:
            Refused: They have changed.
        """
        (site,) = self.tables.sites
        parts = (site.row_hashes(), site.x.numpy(), site.weights.numpy(), site.offset.numpy())
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in parts))
        now = ConfigRecord({"digest": digest.hexdigest()})
        if self.context.state.setdefault("table", now) != now:
            raise Refused(
                "another table than at its first answer in this run, so that sums would mix both: "
                "start the run again"
            )

    def hello(self, message: Message) -> RecordDict:
        """Return the message with the site's name and design."""
        (name,) = self.tables.names
        return records.message(
            {},
            name=name,
            terms=wire.written(self.tables.terms),
            offset=self.tables.offset or "",
            weighing=self.tables.weighing,
        )

    def survey(self, message: Message) -> RecordDict:
        """Answer a question, or return the rule of the policy that refuses it.

        Raises:
            RecordError: This version has no such question, or the answer would need too large
                files here.
        """
        content = message.content
        try:
            survey = wire.read(records.setting(content, "survey", str))
        except ValueError as error:
            raise records.RecordError(str(error)) from error
        state = records.unpack(content, "state", records.setting(content, "digest", str))
        place, shapes = records.setting(content, "place", int), survey.shapes(state)
        told = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
        note = partial(self.ledger.note, self.context.run_id, type(survey).__name__, told)
        beyond: dict[str, str] = {}
        put = replace(self.tables, ids=np.array([place])).ask(survey, None)
        try:
            answer = records.of_answer(put(state, shapes, beyond), beyond="".join(beyond.values()))
        except Refusal as refusal:
            log.warning("%s", refusal)
            (rule,) = refusal.rules.values()
            note(rule)
            return records.message({}, refused=rule)
        note()
        _keep(survey.kept(state, self.tables.sites[0], place), self.context)
        return answer


def _keep(found: Any, context: Context) -> None:
    """Write a data frame that a site keeps into its folder. Text that a spreadsheet would execute
    is quoted, because the analyst names the columns; the number and size of files are bounded,
    because the analyst chooses them.

    Raises:
        RecordError: There are too many files, or the frame is too large.
    """
    if found is None:
        return
    folder = Path(str(context.node_config["state-dir"]))
    number = len(list(folder.glob(f"own-{context.run_id}-*.csv"))) + 1
    if len(list(folder.glob("own-*.csv"))) >= FILES or found.size > NUMBERS:
        raise records.RecordError(
            f"it stores at most {FILES} files of its own models, of {NUMBERS:,} numbers each; move "
            "older ones out of its state-dir, or request fewer draws"
        )
    found = found.rename(columns=_quoted).map(_quoted)
    found.to_csv(folder / f"own-{context.run_id}-{number}.csv", index=False)


def _quoted(value: Any) -> Any:
    """Return a value; text that a spreadsheet could read as a formula gets an apostrophe first."""
    formula = isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@")
    return f"'{value}" if formula else value


@declared
def analysis_app(
    analysis: Callable[[Sites], Any],
    *,
    sites: Count | Sequence[str],
    timeout: Seconds = 600.0,
    formula: str | None = None,
) -> ServerApp:
    """Make a Flower ServerApp that runs `analyse` with these options, and prints the analysis'
    result.

    If options depend on the run's configuration, call `analyse` in your own main function.

    Args:
        analysis: See `analyse`.
        sites: See `analyse`.
        timeout: See `analyse`.
        formula: See `analyse`.

    Example:
        >>> def analysis(sites):
        ...     return bf.stats.glm(sites, family="binomial")
        >>> app = bf.flower.analysis_app(analysis, sites=["va", "ohio", "texas"])
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        found = analyse(grid, analysis, sites=sites, timeout=timeout, formula=formula)
        if found is not None:
            print(found, flush=True)

    return app


@declared
def analyse(
    grid: Grid,
    analysis: Callable[[Sites], Any],
    *,
    sites: Count | Sequence[str],
    timeout: Seconds = 600.0,
    formula: str | None = None,
) -> Any:
    """Wait for the sites, run an analysis of them, and return its result.

    The numbers equal those of the simulation with the same tables, because answers are added in the
    order of the sites' names. A site's own results, such as intercepts or effects, stay on its
    node; a mixed model asks one more question than in a simulation, because nodes store their own
    draws.

    Args:
        grid: Flower's grid, as a ServerApp receives it.
        analysis: Function of the sites; it may pass them to `bf.stats.glm` and the like any number
            of times; `sites.only(names)` selects some of them.
        sites: Names of the expected sites, or their number.
        timeout: Time limit for a site's answer in seconds, > 0.
        formula: The formula of the sites' tables, for predictions here; None if they have none. The
            text received from sites is compared with it, and never evaluated.

    Raises:
        BadClients: A site does not answer a question; the message names the site. Or a connected
            site failed, for example because it cannot read its file, or its tables have other terms
            than those of the first, and no other one was accepted for `timeout` seconds.
        bayesfl.stats.policy.Refusal: A site's policy refuses a question.
        httpx.HTTPError, OSError: The SuperLink cannot be reached.

    Example:
        >>> from flwr.serverapp import ServerApp
        >>> app = ServerApp()
        >>> @app.main()
        ... def main(grid, context):
        ...     fit = bf.flower.analyse(
        ...         grid, lambda sites: bf.stats.glm(sites, family="binomial"), sites=["va", "ohio"]
        ...     )
        ...     fit.save("fit")
    """
    names, count = ((), sites) if isinstance(sites, int) else (tuple(sites), len(sites))
    roster = _SiteRoster(count, {}, timeout, awaited=names)
    roster.wait(grid, least=roster.clients, timeout=timeout)
    nodes = {
        name: roster.nodes[place]
        for place, name in sorted(roster.names.items(), key=lambda one: natural(one[1]))
    }
    terms, offset, weighing = roster.design
    design = wire.read(terms), offset or None, cast(Weighing, weighing)
    return analysis(RemoteSites(grid, nodes, *design, timeout, formula))


@dataclass
class _SiteRoster(Hello):
    """Hold the sites of an analysis and their nodes; sites are numbered in the order of arrival.

    Args:
        awaited: The names of the expected sites; empty for any.
        design: The terms, the offset and the weights of the first site that answered.
    """

    awaited: tuple[str, ...] = ()
    design: tuple[str, ...] = ()

    def missing(self) -> str:
        """Return the number and the names of sites that have not answered, as text."""
        lacking = self.clients - len(self.nodes)
        who = f": {sorted({*self.awaited} - {*self.names.values()})}" if self.awaited else ""
        return f"{lacking} of {self.clients} sites{who}" if lacking else ""

    def bind(self, node: int, reply: RecordDict) -> None:
        """Assign a node to the site that its answer names.

        Raises:
            RecordError: The answer is invalid, the site is not expected, another node is this site,
                or its design differs from the first site's.
        """
        keys = ("name", "terms", "offset", "weighing")
        name, *design = (records.setting(reply, key, str) for key in keys)
        if twice := [self.nodes[j] for j, known in self.names.items() if known == name]:
            raise records.RecordError(f"site {name!r} is node {twice[0]} already")
        if len(self.nodes) == self.clients or (self.awaited and name not in self.awaited):
            raise records.RecordError(f"site {name[:LONGEST]!r} is not expected")
        self.design = self.design or tuple(design)
        if self.design != tuple(design):
            raise records.RecordError(
                f"sites {self.names[0]!r} and {name!r} have different terms, offsets or weights, "
                f"{self.design} and {tuple(design)}; use the same app on all"
            )
        place = len(self.nodes)
        self.nodes[place], self.names[place] = node, name


@dataclass(frozen=True)
class RemoteSites:
    """Represent sites on other machines, as `Sites`.

    Args:
        grid: Flower's grid.
        nodes: {site: its node}, by name.
        terms: The terms of all sites' designs.
        offset: The column of their offsets in linear predictors; None if there is none.
        weighing: The meaning of the weights of their rows.
        timeout: Time limit for a site's answer in seconds.
        formula: The formula of the server's own code, which makes the design of rows here.
    """

    grid: Grid
    nodes: Mapping[str, int]
    terms: tuple[Number | Levels | Formula, ...]
    offset: str | None
    weighing: Weighing
    timeout: float
    formula: str | None = None
    over = "Flower"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sites."""
        return tuple(self.nodes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns of the design."""
        return tuple(name for term in self.terms for name in term.columns)

    def design(self, frame: Any) -> Tensor:
        """Return the design of local rows, [n, p] in float64.

        Raises:
            ValueError: The sites have a formula and the server none, or it makes other columns.
        """
        frame, terms = pandas_of(frame), self.terms
        if self.formula is not None:
            terms = (formula_of(self.formula, {"the frame": frame}, right_only=True)[0],)
        if terms != self.terms:
            raise ValueError(f"formula= is {self.formula!r}, but the sites' terms {self.terms}")
        return design(frame, terms)

    def only(self, names: Any) -> "RemoteSites":
        """Return some of the sites.

        Raises:
            ValueError: There is no such site.
        """
        if strangers := [name for name in names if name not in self.nodes]:
            raise ValueError(f"there is no site {strangers[0]!r}; the sites are {self.names}")
        return replace(self, nodes={name: self.nodes[name] for name in self.nodes if name in names})

    def ask(self, survey: Survey[Any], aggregation: Adder | None) -> Put:
        """Return a function that asks all sites a question.

        Raises:
            ValueError: `aggregation` is not None.
        """
        if aggregation is not None:
            raise ValueError(
                f"over Flower the server sees each site's answers, which {aggregation!r} would "
                "hide; it is for simulations: leave aggregation= out"
            )
        text, name = wire.written(survey), type(survey).__name__

        def put(
            state: Tensors, shapes: Mapping[str, tuple[int, ...]], beyond: dict[str, str]
        ) -> Tensors:
            packed, digest = records.pack(state)
            of = {"survey": text, "digest": digest}
            messages = {
                place: (node, records.message({"state": packed}, **of, place=place))
                for place, node in enumerate(self.nodes.values())
            }
            replies = ask(self.grid, "query.survey", messages, timeout=self.timeout, group=name)
            found, absent, refused = {}, {}, {}
            for place, answer, said in answers(replies, shapes):
                site = self.names[place]
                if "refused" in said:
                    refused[site] = str(said["refused"])[:LONGEST]
                elif isinstance(answer, ValueError):
                    absent[site] = str(answer)
                else:
                    found[place] = answer
                    if rule := str(said.get("beyond", "")):
                        beyond[site] = rule[:LONGEST]
            if absent:
                why = "; ".join(f"site {site!r}: {absent[site]}" for site in sorted(absent))
                raise BadClients(
                    f"{name} has no answer from {why}. sites.only([...]) continues with the others"
                )
            if refused:
                raise Refusal(name, dict(sorted(refused.items())))
            return total(found)

        return put
