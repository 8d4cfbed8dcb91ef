"""Statistics over a network: sites that answer questions about their tables, and an analysis that
puts them.

An analysis is a function of `bayesfl.stats.asking.Sites`, the same as in a simulation. A question
travels as text, of which a node makes one of the library's own (`bayesfl.stats.wire`), together
with the tensors of its state; an answer is a few tensors, of which the server takes a site's own
numbers at the site's own place alone. The node's policy sees each question first, and its ledger
keeps what was asked in all runs. What fails on a node is told by its kind alone, as the text of an
error can quote the data.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from bayesfl.base.options import Count, Range, declared
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import PerClient, Survey, summed
from bayesfl.data.tables.table import pandas_of
from bayesfl.federation.clients.surveying import Adder
from bayesfl.federation.errors import BadClients
from bayesfl.federation.rounds.admission import PROTOCOL
from bayesfl.flower import post, records
from bayesfl.flower.post import Failure
from bayesfl.flower.roster import LONGEST
from bayesfl.stats import wire
from bayesfl.stats.asking import Sites
from bayesfl.stats.formulas import Formula, formula_of
from bayesfl.stats.kept.ledger import Ledger
from bayesfl.stats.policy import Policy, Put, Refusal
from bayesfl.stats.tables import Tables, Weighing, design
from bayesfl.stats.terms import Interaction, Levels, Number

log = logging.getLogger(__name__)
Seconds = Annotated[float, Range(0, why="it is in seconds")]
FILES, NUMBERS = 1000, 10**7
"""So many files of own models, and numbers in each, a node keeps at most."""


def site_app(load_tables: Callable[[Context], Tables]) -> ClientApp:
    """Make a Flower ClientApp that answers questions about the tables of one site.

    A node's configuration names its policy, in a file of its own, as in

        flower-supernode --node-config 'policy="/etc/bayesfl/policy.toml" data-file="/data/va.csv"'

    Without one the rules of `bf.stats.Policy()` hold. It must name a folder as `state-dir`, where
    the node keeps a ledger of what was asked, which `bayesfl show` prints, its own model of each
    fit with own intercepts, and draws of its own coefficients of each mixed model, in CSV files.

    Args:
        load_tables: Function from the context to the tables of this one site, by
            `bf.stats.tables({name: frame}, ...)`. All sites must have the same terms. It is called
            for each question.

    Example:
        >>> import pandas as pd
        >>> def load_tables(context):  # a real one reads the site's own file
        ...     frame = pd.DataFrame({"age": [50, 60, 70], "ill": [0, 1, 1]})
        ...     return bf.stats.tables({"va": frame}, outcome="ill", terms=["age"])
        >>> app = bf.flower.site_app(load_tables)
    """
    app = ClientApp()

    def answered(
        message: Message, context: Context, work: Callable[[Tables, Ledger], RecordDict]
    ) -> Message:
        try:
            if "state-dir" not in context.node_config:
                raise records.RecordError(
                    "no folder for its ledger of what it was asked: name one in --node-config, as "
                    'state-dir="/var/lib/bayesfl"'
                )
            path = context.node_config.get("policy")
            policy = Policy() if path is None else Policy.read(str(path))
            with Ledger.opened(Path(str(context.node_config["state-dir"]))) as ledger:
                policy.ledger = ledger
                told = work(
                    _the_same(replace(load_tables(context), policy=policy), context), ledger
                )
        except Exception as error:
            log.exception("this site could not answer")
            # The words of the message are the server's own; those of other errors may be data.
            said = str(error) if isinstance(error, records.RecordError) else type(error).__name__
            told = _config(failed=said)
        return Message(told, reply_to=message)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        def work(tables: Tables, ledger: Ledger) -> RecordDict:
            records.same_protocol(message.content)
            (name,) = tables.names
            terms, offset = wire.written(tables.terms), tables.offset or ""
            told = {"terms": terms, "offset": offset, "weighing": tables.weighing}
            return _config(protocol=PROTOCOL, name=name, **told)

        return answered(message, context, work)

    @app.query("survey")
    def survey(message: Message, context: Context) -> Message:
        def work(tables: Tables, ledger: Ledger) -> RecordDict:
            question, state, place = _question(message.content)
            put = replace(tables, ids=np.array([place])).ask(question, None)
            shapes, name = question.shapes(state), type(question).__name__
            beyond: dict[str, str] = {}
            told = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
            try:
                answer, digest = records.pack(put(state, shapes, beyond))
            except Refusal as refusal:
                log.warning("%s", refusal)
                (rule,) = refusal.rules.values()
                ledger.note(context.run_id, name, told, rule)
                return _config(refused=rule)
            ledger.note(context.run_id, name, told)
            _keep(question.kept(state, tables.sites[0], place), context)
            config = ConfigRecord({"digest": digest, "beyond": "".join(beyond.values())})
            return RecordDict({"answer": answer, "config": config})

        return answered(message, context, work)

    return app


def _the_same(tables: Tables, context: Context) -> Tables:
    """Return tables, if they are those of which the node answered first in the run.

    Raises:
        RecordError: They are others.
    """
    (site,) = tables.sites
    parts = (site.row_hashes(), site.x.numpy(), site.weights.numpy(), site.offset.numpy())
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in parts))
    first = context.state.setdefault("table", ConfigRecord({"digest": digest.hexdigest()}))
    if dict(cast(ConfigRecord, first))["digest"] != digest.hexdigest():
        raise records.RecordError(
            "another table than that of which it answered first in this run, so that sums would be "
            "of a mixture of both: start the run again"
        )
    return tables


def _question(content: RecordDict) -> tuple[Any, Tensors, int]:
    """Return a question, its state, and the place of the site that is asked.

    Raises:
        RecordError: It is none that this version knows.
    """
    records.same_protocol(content)
    try:
        survey = wire.read(records.setting(content, "survey", str))
    except ValueError as error:
        raise records.RecordError(str(error)) from error
    state = records.unpack(content, "state", records.setting(content, "digest", str))
    return survey, state, records.setting(content, "place", int)


def _keep(found: Any, context: Context) -> None:
    """Write a data frame that a site keeps for itself into its folder. Text that a spreadsheet
    would run is quoted, as the analyst names columns; the number of files and their size are
    bounded, as the analyst says how many.

    Raises:
        RecordError: There are too many files, or the frame is too large.
    """
    if found is None:
        return
    folder = Path(str(context.node_config["state-dir"]))
    number = len(list(folder.glob(f"own-{context.run_id}-*.csv"))) + 1
    if len(list(folder.glob("own-*.csv"))) >= FILES or found.size > NUMBERS:
        raise records.RecordError(
            f"it keeps {FILES} files of its own models at most, of {NUMBERS:,} numbers each; take "
            "older ones out of its state-dir, or ask for fewer draws"
        )
    found = found.rename(columns=_quoted).map(_quoted)
    found.to_csv(folder / f"own-{context.run_id}-{number}.csv", index=False)


def _quoted(value: Any) -> Any:
    """Return a value, text that begins as a formula of a spreadsheet after an apostrophe."""
    formula = isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@")
    return f"'{value}" if formula else value


def _config(**settings: Any) -> RecordDict:
    return RecordDict({"config": ConfigRecord(settings)})


@declared
def analysis_app(
    analysis: Callable[[Sites], Any],
    *,
    sites: Count | Sequence[str],
    timeout: Seconds = 600.0,
    formula: str | None = None,
) -> ServerApp:
    """Make a Flower ServerApp that runs `analyse` with these options, and prints what the analysis
    returns.

    If options depend on the run's configuration, call `analyse` in a main function of your own.

    Args:
        analysis: As of `analyse`.
        sites: As of `analyse`.
        timeout: As of `analyse`.
        formula: As of `analyse`.

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

    The numbers are those of the simulation with the same tables, as answers are added in the order
    of the sites' names. What is a site's own, as intercepts or effects, stays on its node; a mixed
    model asks once more than in a simulation, as nodes keep draws of theirs.

    Args:
        grid: Flower's grid, as a ServerApp receives it.
        analysis: Function of the sites, which are given to `bf.stats.glm` and the like, as often as
            it wants; `sites.only(names)` are some of them.
        sites: Names of the sites that are waited for, or how many.
        timeout: Seconds that a site has for an answer, > 0.
        formula: The formula of the sites' tables, by which a fit predicts here; None where they
            have none. The text that arrives from sites is compared, and never evaluated.

    Raises:
        BadClients: A site does not answer a question; it names the site. Also, the sites' tables
            have different terms, or a site that is there failed, such as one that cannot read its
            file, and no other one was taken for `timeout` seconds.
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
    return analysis(_met(grid, sites, timeout, formula))


@dataclass(frozen=True, repr=False)
class RemoteSites:
    """Sites on other machines, as `Sites`.

    Args:
        grid: Flower's grid.
        nodes: {site: its node}, by name.
        terms: The terms of all sites' designs.
        offset: Their column of what is added to linear predictors; None where there is none.
        weighing: What the weights of their rows are.
        timeout: Seconds that a site has for an answer.
        formula: The formula of the server's own code, by which it makes the design of rows here.
    """

    grid: Grid
    nodes: Mapping[str, int]
    terms: tuple[Number | Levels | Interaction | Formula, ...]
    offset: str | None
    weighing: Weighing
    timeout: float
    formula: str | None = None
    over = "Flower"

    def __repr__(self) -> str:
        return f"RemoteSites({', '.join(self.names)}; {len(self.columns)} columns)"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the sites."""
        return tuple(self.nodes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns of the design."""
        return tuple(name for term in self.terms for name in term.columns)

    def design(self, frame: Any) -> torch.Tensor:
        """Return the design of rows that are here, [n, p] in float64.

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
        """Return how a question is put to all sites.

        Raises:
            ValueError: Answers are to be added by something.
        """
        if aggregation is not None:
            raise ValueError(
                f"over Flower the server sees each site's answers, which {aggregation!r} is to "
                "hide; it is for simulations: leave aggregation= out"
            )
        text, name = wire.written(survey), type(survey).__name__

        def put(
            state: Tensors, shapes: Mapping[str, tuple[int, ...]], beyond: dict[str, str]
        ) -> Tensors:
            packed, digest = records.pack(state)
            settings = {"protocol": PROTOCOL, "survey": text, "digest": digest}
            messages = {}
            for place, node in enumerate(self.nodes.values()):
                config = ConfigRecord({**settings, "place": place})
                messages[place] = (node, RecordDict({"config": config, "state": packed}))
            found, absent, refused = {}, {}, {}
            for place, reply in post.ask(
                self.grid, "query.survey", messages, timeout=self.timeout, group=name
            ):
                try:
                    found[place] = _answer(reply, shapes, place)
                    if rule := str(records.config(cast(RecordDict, reply)).get("beyond", "")):
                        beyond[self.names[place]] = rule[:LONGEST]
                except _Refused as refusal:
                    refused[self.names[place]] = str(refusal)
                except ValueError as error:
                    absent[self.names[place]] = str(error)
            if absent:
                why = "; ".join(f"site {site!r}: {absent[site]}" for site in sorted(absent))
                raise BadClients(
                    f"{name} has no answer of {why}. sites.only([...]) goes on with the others"
                )
            if refused:
                raise Refusal(name, dict(sorted(refused.items())))
            stacked = {
                name: torch.stack([found[place][name] for place in sorted(found)])
                for name in shapes
            }
            return summed(np.array(sorted(found)), stacked)

        return put


def _answer(
    reply: RecordDict | Failure, shapes: Mapping[str, tuple[int, ...]], place: int
) -> Tensors:
    """Return a site's answer, its own numbers at its own place alone.

    Raises:
        ValueError: It has none, or one of another form than was asked for.
    """
    found = records.answer(_told(reply), shapes)
    for name, shape in shapes.items():
        if isinstance(shape, PerClient):
            found[name] = shape.own(found[name], place)
    return found


class _Refused(ValueError):
    """The name of a rule of a site's policy, which refuses a question."""


def _told(reply: RecordDict | Failure) -> RecordDict:
    """Return a reply that is an answer.

    Raises:
        _Refused: The site's policy refuses one.
        RecordError: It is none for another reason, and says which.
    """
    reply = post.content_of(reply)
    config = records.config(reply)
    if "refused" in config:
        raise _Refused(records.setting(reply, "refused", str)[:LONGEST])
    if "failed" in config:
        said = records.setting(reply, "failed", str)
        raise records.RecordError(f"it failed with {said[:LONGEST]}; its own log says more")
    return reply


def _met(
    grid: Grid, wanted: int | Sequence[str], timeout: float, formula: str | None
) -> RemoteSites:
    """Wait until sites have said who they are, and return them.

    Raises:
        BadClients: Their terms differ, or sites are there that cannot be taken.
    """
    count = wanted if isinstance(wanted, int) else len(wanted)
    nodes: dict[str, int] = {}
    terms: dict[str, tuple[str, ...]] = {}

    def take(node: int, reply: RecordDict | Failure) -> None:
        name, *told = (
            records.setting(_told(reply), key, str)
            for key in ("name", "terms", "offset", "weighing")
        )
        if not isinstance(wanted, int) and name not in wanted:
            raise records.RecordError(f"nobody waits for a site {name[:LONGEST]!r}")
        if name in nodes:
            raise records.RecordError(f"site {name!r} is node {nodes[name]} already")
        if len(nodes) < count:
            nodes[name], terms[name] = node, tuple(told)

    hello = post.Hello(_config(protocol=PROTOCOL), timeout)
    while (before := len(nodes)) < count:
        hello.look(grid, set(grid.get_node_ids()), nodes.values(), take)
        if len(nodes) == before:
            missing = "" if isinstance(wanted, int) else f": {sorted({*wanted} - {*nodes})}"
            hello.wait(f"{count - before} of {count} sites{missing}", timeout)
    names = sorted(nodes)
    if others := [name for name in names if terms[name] != terms[names[0]]]:
        raise BadClients(
            f"sites {names[0]!r} and {others[0]!r} have different terms, offsets or weights, "
            f"{terms[names[0]]} and {terms[others[0]]}; ship the same app to all"
        )
    design, offset, weighing = terms[names[0]]
    return RemoteSites(
        grid=grid,
        nodes={name: nodes[name] for name in names},
        terms=wire.read(design),
        offset=offset or None,
        weighing=cast(Weighing, weighing),
        timeout=timeout,
        formula=formula,
    )
