"""Statistics over a network: the simulation's numbers to the bit, sites that are lost or refuse,
and what is told of what fails.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

import bayesfl as bf
from bayesfl.commands.main import main
from bayesfl.federation.rounds.admission import PROTOCOL
from bayesfl.flower import BadClients, analyse, analysis_app, records, site_app, statistics
from bayesfl.flower.post import Refused
from bayesfl.stats.asking import Sites
from bayesfl.stats.mixed import Mixed
from bayesfl.stats.policy import Policy, Refusal
from bayesfl.stats.tables import Tables
from tests.flower.grid import LocalGrid
from tests.flower.made import Impatient, later, sleeping
from tests.stats.made import OUTCOMES, SIZES, TERMS, frames, sites

NAMES = sorted(SIZES)
NODES = {"west": 100, "north": 101, "south": 102, "east": 103}
"""In another order than their names."""
OPTIONS: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
    (bf.stats.glm, {"family": "binomial", "intercept": "per_site", "errors": "sandwich"}),
    (bf.stats.glm, {"family": "negative_binomial", "errors": "site"}),
    (bf.stats.glm, {"family": "binomial", "prior": 2.5}),
    (bf.stats.mixed, {"family": "binomial", "draws": 100}),
)


def grid_of(folder: Path, outcome: str = "ill", **options: Any) -> LocalGrid:
    """A node for each site."""

    def load_tables(context: Context) -> Tables:
        name = str(context.node_config["site"])
        return bf.stats.tables({name: frames()[name]}, outcome=outcome, terms=TERMS)

    config = {node: {"site": name} for name, node in NODES.items()}
    folder.mkdir(exist_ok=True)
    policy = options.pop("policy", None)
    if policy is not None:
        (folder / "policy.toml").write_text(policy)
        config[NODES["south"]]["policy"] = str(folder / "policy.toml")
    app = site_app(load_tables)
    return LocalGrid(dict.fromkeys(NODES.values(), app), folder, config=config, **options)


def asks(message: Message, question: str) -> bool:
    """Whether a message puts a question."""
    if message.metadata.message_type != "query.survey":
        return False
    return json.loads(str(records.config(message.content)["survey"]))["class"] == question


@pytest.mark.parametrize(
    ("method", "options"), OPTIONS, ids=[f"{m.__name__}-{o['family']}" for m, o in OPTIONS]
)
def test_the_simulations_numbers_to_the_bit(
    method: Callable[..., Any], options: dict[str, Any], tmp_path: Path
):
    """Tables and evidence, from nodes that answer in another order."""
    wanted = method(sites(options["family"], policy=Policy()), **options)
    grid = grid_of(tmp_path, OUTCOMES[options["family"]])
    found = analyse(grid, lambda remote: method(remote, **options), sites=4, timeout=5.0)
    assert found.table().equals(wanted.table())
    assert found.rows == wanted.rows
    assert found.evidence == wanted.evidence
    rows = frames()["west"].head(5)
    if options.get("intercept") != "per_site":
        assert torch.equal(found.predict(rows), wanted.predict(rows))
    else:
        assert wanted.own_intercepts
        assert not found.own_intercepts  # they stay where they are


def test_an_analysis_asks_as_often_as_it_wants(tmp_path: Path):
    """Several fits, with sites left out; a fit can ask again."""

    def analysis(remote: Sites) -> Any:
        assert remote.names == tuple(NAMES)
        fit = bf.stats.glm(remote, family="binomial")
        return fit.leave_one_out("age"), fit.without("north")

    table, without = analyse(grid_of(tmp_path), analysis, sites=NAMES, timeout=5.0)
    wanted = bf.stats.glm(sites("binomial"), family="binomial")
    assert table.equals(wanted.leave_one_out("age"))
    assert without.table().equals(wanted.without("north").table())
    assert list(without.rows) == ["east", "south", "west"]


def test_own_draws_stay_on_the_node(tmp_path: Path):
    """In its folder, as in the simulation to the bit; of groups, too. Columns have names that the
    server chose, groups such as the site's own data have: none is a formula of a spreadsheet.
    """
    rows = {
        site: frames()[site]
        .rename(columns={"age": "=cmd|age"})
        .assign(ward=lambda t: np.where(np.arange(len(t)) % 2, "=1+1", "@SUM(A1)"))
        for site in ("west", "south")
    }
    nodes = {site: NODES[site] for site in rows}
    options = {"outcome": "score", "terms": ["=cmd|age"], "also": ["ward"]}

    def load_tables(context: Context) -> Tables:
        name = str(context.node_config["site"])
        return bf.stats.tables({name: rows[name]}, **options)

    def fits(given: Sites) -> list[Mixed]:
        options: dict[str, Any] = {"family": "gaussian", "draws": 100}
        plain = bf.stats.mixed(given, random=["1", "=cmd|age"], **options)
        return [plain, bf.stats.mixed(given, group="ward", **options)]

    grid = grid_of(tmp_path)
    grid.apps = dict.fromkeys(nodes.values(), site_app(load_tables))
    found, wanted = (
        analyse(grid, fits, sites=2, timeout=5.0),
        fits(bf.stats.tables(rows, **options)),
    )
    for number, (remote, here) in enumerate(zip(found, wanted, strict=True), 1):
        assert not remote.own
        assert remote.released.questions[-1].answer == {"n_kept": ()}
        for site, node in nodes.items():
            kept = pd.read_csv(tmp_path / f"node-{node}" / f"own-1-{number}.csv", dtype=str)
            draws = here.own[site]
            if number == 2:
                labels = ["(site)", "'=1+1", "'@SUM(A1)"]
                assert kept.pop("ward").tolist() == labels * len(draws)
            assert list(kept) == [name.replace("=", "'=") for name in here.names]
            numbers = kept.map(float).to_numpy().reshape(draws.shape)
            assert np.array_equal(numbers, draws.numpy())


def test_predictions_have_the_offset(tmp_path: Path):
    """Whose column the nodes name."""

    def load_tables(context: Context) -> Tables:
        name = str(context.node_config["site"])
        given = {name: frames()[name]}
        return bf.stats.tables(given, outcome="visits", terms=["age"], offset="exposure")

    grid = grid_of(tmp_path)
    grid.apps = dict.fromkeys(NODES.values(), site_app(load_tables))
    found = analyse(grid, lambda remote: bf.stats.glm(remote, family="poisson"), sites=4, timeout=5)
    wanted = bf.stats.glm(sites("poisson", terms=["age"], offset="exposure"), family="poisson")
    rows = frames()["west"].head(5)
    assert torch.equal(found.predict(rows), wanted.predict(rows))
    bare = bf.stats.glm(sites("poisson", terms=["age"]), family="poisson")
    assert not torch.allclose(found.predict(rows), bare.predict(rows))


def test_the_sheet_says_who_saw_what(tmp_path: Path):
    fit = analyse(
        grid_of(tmp_path),
        lambda remote: bf.stats.mixed(remote, family="binomial", draws=100),
        sites=4,
        timeout=5.0,
    )
    said = str(fit.released)
    assert "they were sent over Flower, and the server saw each site's answers" in said
    assert "Draws: log_likelihood [100]" in said
    sheet = json.loads(fit.released.to_json())
    assert sheet["questions"][0]["sites"] == NAMES
    assert [row["round"] for row in sheet["questions"]] == [
        *range(1, len(fit.released.questions) + 1)
    ]


def without_north(grid: LocalGrid, reason: str, break_it: Callable[[], None]) -> None:
    """The node of a site breaks; the fit names it, and the others go on."""

    def analysis(remote: Sites) -> Any:
        break_it()
        with pytest.raises(BadClients, match=reason):
            bf.stats.glm(remote, family="binomial")
        return bf.stats.glm(remote.only(["east", "west", "south"]), family="binomial")

    fit = analyse(grid, analysis, sites=4, timeout=0.3)
    wanted = bf.stats.glm(sites("binomial").only(["east", "west", "south"]), family="binomial")
    assert fit.table().equals(wanted.table())


def test_a_site_that_is_lost_stops_the_fit_by_name(tmp_path: Path):
    grid = grid_of(tmp_path)
    said = "Likelihood has no answer from site 'north': it did not reply within 0.3 seconds"
    without_north(grid, said, lambda: setattr(grid, "alter", lost_north))


def lost_north(client: Any, message: Message, reply: Message) -> Message | None:
    """North's answers about the likelihood do not arrive."""
    lost = message.metadata.dst_node_id == NODES["north"] and asks(message, "Likelihood")
    return None if lost else reply


def test_what_fails_is_told_by_its_kind_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The text of an error can quote the data; the node's own log has it."""

    def fails(context: Context) -> Tables:
        raise ValueError("patient 4711 has no age")

    grid = grid_of(tmp_path)
    app = site_app(fails)

    def breaks() -> None:
        grid.apps = {**grid.apps, NODES["north"]: app}

    said = "Sums has no answer from site 'north': .*it failed with ValueError; see its own log"
    without_north(grid, said, breaks)
    assert "patient 4711" in caplog.text
    with pytest.raises(Refused) as told:
        app(grid.sent[0], grid.context(NODES["north"]))
    assert str(told.value) == "it failed with ValueError; see its own log"


def test_a_policy_refuses_by_the_rules_name_alone(tmp_path: Path):
    """The node's own; the others answer."""
    grid = grid_of(tmp_path, policy='columns = ["age", "ill"]')
    with pytest.raises(
        Refusal, match=r"^site 'south' refuses Sums by its policy's rule columns; go on"
    ):
        analyse(grid, lambda s: bf.stats.glm(s, family="binomial"), sites=4, timeout=5.0)
    question = next(m for m in grid.sent if asks(m, "Sums") and m.metadata.dst_node_id == 102)
    reply = grid.apps[102](question, grid.context(102))
    assert {name: dict(part) for name, part in reply.content.items()} == {
        "config": {"protocol": PROTOCOL, "refused": "columns"}
    }
    allowed = grid_of(tmp_path, policy='columns = ["age", "kind", "ill"]')
    analyse(allowed, lambda s: bf.stats.glm(s, family="binomial"), sites=4, timeout=5.0)


def test_a_site_with_a_rare_level_is_left_out_and_named(tmp_path: Path):
    """By its own policy; what the others answered before is on the sheet."""
    grid = grid_of(tmp_path, policy="min_level = 25")
    found = analyse(grid, lambda s: bf.stats.glm(s, family="binomial"), sites=4, timeout=5.0)
    assert list(found.left_out) == ["south"]
    wanted = bf.stats.glm(sites("binomial").only(["east", "north", "west"]), family="binomial")
    assert found.table().equals(wanted.table())
    asked = [question.sites for question in found.released.questions]
    assert asked == [("east", "north", "west")] * (len(wanted.released.questions) + 1)


def test_a_sites_own_model_stays_on_the_node(tmp_path: Path):
    """Its own intercept with the coefficients of all, in its folder; it predicts as in the
    simulation.
    """
    options: dict[str, Any] = {"family": "binomial", "intercept": "per_site"}
    wanted = bf.stats.glm(sites("binomial"), **options)
    grid = grid_of(tmp_path)
    found = analyse(grid, lambda s: bf.stats.glm(s, **options), sites=4, timeout=5.0)
    assert found.released.questions[-1].answer == {"n_kept": ()}
    for site, node in NODES.items():
        kept = pd.read_csv(tmp_path / f"node-{node}" / "own-1-1.csv", dtype=str)
        assert list(kept) == ["(intercept)", *wanted.names]
        values = [wanted.own_intercepts[site], *wanted.estimate.tolist()]
        assert [float(value) for value in kept.iloc[0]] == values


@pytest.mark.parametrize("runs", [1, 2])
def test_draws_are_counted(runs: int, tmp_path: Path):
    """Of two fits the second goes beyond, in a run or, as the ledger counts, over two."""

    def analysis(remote: Sites) -> None:
        for _ in range(2 // runs):
            bf.stats.mixed(remote, family="binomial", draws=100)

    def run() -> None:
        analyse(grid_of(tmp_path, policy="max_draws = 199"), analysis, sites=4, timeout=5.0)

    if runs == 2:
        run()
    with pytest.raises(Refusal, match=r"^site 'south' refuses Draws by .* rule max_draws; go on"):
        run()


def test_a_question_that_this_version_does_not_know(tmp_path: Path):
    """Nothing but the library's own is made of what arrives."""
    grid = grid_of(tmp_path)
    state, digest = records.pack({})
    for survey in ('{"class": "Popen", "options": {"args": "true"}}', "no text"):
        settings = {"protocol": PROTOCOL, "survey": survey, "digest": digest, "place": 0}
        content = RecordDict({"config": ConfigRecord(settings), "state": state})
        message = Message(content, dst_node_id=100, message_type="query.survey")
        with pytest.raises((records.RecordError, Refused)):
            grid.apps[100](message, grid.context(100))


def test_secure_sums_are_for_simulations(tmp_path: Path):
    def analysis(remote: Sites) -> Any:
        return bf.stats.glm(remote, family="binomial", aggregation=bf.SecureSum(range=2.0**20))

    with pytest.raises(ValueError, match="the server sees each site's answers"):
        analyse(grid_of(tmp_path), analysis, sites=4, timeout=5.0)


def test_who_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Sites by name, of which each is one node; a stranger has no part."""
    two = analyse(grid_of(tmp_path), lambda s: s.names, sites=["west", "east"], timeout=5.0)
    assert two == ("east", "west")
    assert "site 'north' is not expected" in caplog.text
    assert len(analyse(grid_of(tmp_path), lambda s: s.names, sites=2, timeout=5.0)) == 2
    grid = grid_of(tmp_path)
    grid.config = {**grid.config, 100: {"site": "east"}}

    def enough(seconds: float) -> None:
        raise Impatient

    monkeypatch.setattr("bayesfl.flower.roster.time.sleep", enough)
    with pytest.raises(Impatient):
        analyse(grid, lambda s: s.names, sites=["west", "east"], timeout=5.0)
    assert "site 'east' is node" in caplog.text
    assert "waiting for 1 of 2 sites: ['west']" in caplog.text


@pytest.mark.parametrize("wanted", [4, NAMES, ["south", "east"]])
@pytest.mark.parametrize("broken", [["east"], NAMES])
def test_a_site_that_fails_ends_the_wait(
    wanted: Any, broken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One or all, after the timeout; the reason does not show what the site's error tells."""

    def load_tables(context: Context) -> Tables:
        raise FileNotFoundError("/data/secret.csv")

    clock, grid = sleeping(monkeypatch), grid_of(tmp_path)
    grid.apps = {**grid.apps, **{NODES[name]: site_app(load_tables) for name in broken}}
    with pytest.raises(BadClients, match=r"node .*103: .*with FileNotFoundError; see its own"):
        analyse(grid, lambda s: s.names, sites=wanted, timeout=60.0)
    assert 61 <= clock.monotonic() <= 63


def test_a_site_of_another_name_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As one that is misspelt on the server."""
    sleeping(monkeypatch)
    with pytest.raises(BadClients, match=r"sites: \['Ost'\].*site 'east' is not expected"):
        analyse(grid_of(tmp_path), lambda s: s.names, sites=["west", "Ost"], timeout=60.0)


def test_sites_that_come_late_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For as long as it takes, if no node is refused; and one that fails is mended in time."""
    clock, grid = sleeping(monkeypatch), grid_of(tmp_path)
    west = grid.apps[NODES["west"]]
    grid.apps = {NODES["east"]: grid.apps[NODES["east"]]}

    def load_tables(context: Context) -> Tables:
        raise FileNotFoundError

    changes = {
        1000.0: lambda grid: grid.apps.update({NODES["west"]: site_app(load_tables)}),
        1050.0: lambda grid: grid.apps.update({NODES["west"]: west}),
    }
    names = analyse(
        later(grid, clock, changes), lambda s: s.names, sites=["west", "east"], timeout=100.0
    )
    assert names == ("east", "west")
    assert clock.monotonic() >= 1050


def test_sites_with_other_terms_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As methods are, by the node's name; it has the time to be mended."""
    sleeping(monkeypatch)

    def load_tables(context: Context) -> Tables:
        return bf.stats.tables({"east": frames()["east"]}, outcome="ill", terms=["age"])

    grid = grid_of(tmp_path)
    grid.apps = {**grid.apps, NODES["east"]: site_app(load_tables)}
    with pytest.raises(BadClients, match=r"node 103: .*'west' and 'east' have different terms"):
        analyse(grid, lambda s: s.names, sites=4, timeout=5.0)


def of_formula(grid: LocalGrid, texts: dict[str, str]) -> LocalGrid:
    """The same nodes with the formulas of their apps."""

    @cache  # formulaic takes long
    def at(name: str) -> Tables:
        return bf.stats.tables({name: frames()[name]}, formula=texts.get(name, texts[""]))

    def load_tables(context: Context) -> Tables:
        return at(str(context.node_config["site"]))

    grid.apps = dict.fromkeys(NODES.values(), site_app(load_tables))
    return grid


def test_a_formula_is_compared_and_only_the_servers_own_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The simulation's numbers to the bit; what arrived makes no design."""
    pytest.importorskip("formulaic", reason="formulaic is not installed")
    text = "ill ~ C(kind, levels=['a', 'b', 'c']):age + {age ** 2}"
    grid, rows = of_formula(grid_of(tmp_path), {"": text}), frames()["west"].head(5)
    wanted = bf.stats.glm(bf.stats.tables(frames(), formula=text), family="gaussian")

    def found(**options: Any) -> Any:
        def fit(remote: Sites) -> Any:
            return bf.stats.glm(remote, family="gaussian")

        return analyse(grid, fit, sites=4, timeout=5.0, **options)

    own = found(formula=text)
    assert own.table().equals(wanted.table())
    assert own.names[2] == "kind[a]:age"
    assert torch.equal(own.predict(rows.drop(columns="ill")), wanted.predict(rows))
    with pytest.raises(ValueError, match="comes from another machine, and runs no code"):
        found().predict(rows)
    with pytest.raises(ValueError, match="formula= is 'ill ~ age', but the sites' terms"):
        found(formula="ill ~ age").predict(rows)
    sleeping(monkeypatch)
    grid = of_formula(grid_of(tmp_path / "other"), {"": text, "north": "ill ~ age"})
    with pytest.raises(BadClients, match=r"node 101: .*'west' and 'north' have different terms"):
        found(formula=text)


def test_the_servers_app_prints_what_an_analysis_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    app = analysis_app(lambda remote: f"{len(remote.names)} sites", sites=4)
    grid = grid_of(tmp_path)
    app(grid, grid.context(0))
    assert capsys.readouterr().out == "4 sites\n"


def test_a_site_writes_at_its_own_place_alone(tmp_path: Path):
    """South adds to and takes from other sites' numbers; the fit is as if it had not."""

    def meddle(client: Any, message: Message, reply: Message) -> Message:
        if client != 2 or not (asks(message, "Sums") or asks(message, "Looks")):
            return reply
        found = records.unpack(
            reply.content, "answer", str(records.config(reply.content)["digest"])
        )
        for name in {"outcome", "weights", "n_dropped", "expected", "spread", "auc"} & {*found}:
            found[name][0] += 40
        answer, digest = records.pack(found)
        config = ConfigRecord({**records.config(reply.content), "digest": digest})
        return Message(RecordDict({"answer": answer, "config": config}), reply_to=message)

    def analysis(remote: Sites) -> Any:
        fit = bf.stats.glm(remote, family="binomial", intercept="per_site")
        return fit, fit.diagnostics().sites

    (fit, looks), (wanted, known) = (
        analyse(grid_of(tmp_path / name, alter=alter), analysis, sites=4, timeout=5.0)
        for name, alter in (("one", meddle), ("two", None))
    )
    assert (fit.rows, fit.events, fit.dropped) == (wanted.rows, wanted.events, wanted.dropped)
    assert fit.table().equals(wanted.table())
    assert looks.equals(known)


def longer(table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([table, table.head(4).assign(age=33.0)])


def altered(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(age=[*table["age"].iloc[:-1], 99.0])


def doubled(table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([table, table])


@pytest.mark.parametrize("change", [doubled, altered, longer])
def test_a_table_that_changes_during_a_run_ends_it(change: Callable[..., Any], tmp_path: Path):
    """By more rows, or another value; a few new rows wait."""
    asked: dict[str, int] = {}

    def load_tables(context: Context) -> Tables:
        name = str(context.node_config["site"])
        asked[name] = asked.get(name, 0) + 1
        rows = frames()[name]
        if name == "south" and asked[name] > 4:
            rows = change(rows)
        return bf.stats.tables({name: rows}, outcome="ill", terms=TERMS)

    def fit(given: Sites) -> Any:
        return bf.stats.glm(given, family="binomial").table()

    grid = grid_of(tmp_path)
    grid.apps = dict.fromkeys(NODES.values(), site_app(load_tables))
    if change is longer:
        assert analyse(grid, fit, sites=4, timeout=5.0).equals(fit(sites("binomial")))
    else:
        said = "Likelihood has no answer from site 'south': .*another table than at its first"
        with pytest.raises(BadClients, match=said):
            analyse(grid, fit, sites=4, timeout=5.0)


def test_a_node_without_a_folder_refuses_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As it has no ledger."""
    sleeping(monkeypatch)
    grid = grid_of(tmp_path)
    context = grid.context

    def without(node: int) -> Context:
        found = context(node)
        if node == NODES["west"]:
            del found.node_config["state-dir"]
        return found

    monkeypatch.setattr(grid, "context", without)
    with pytest.raises(BadClients, match="no folder for its ledger of questions"):
        analyse(grid, lambda s: s.names, sites=4, timeout=5.0)


def test_the_ledger_says_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In all runs, and which rule stopped what."""

    grid = grid_of(tmp_path)
    with pytest.raises(Refusal, match="Draws by its policy's rule max_draws"):
        analyse(
            grid,
            lambda remote: bf.stats.mixed(remote, family="binomial", draws=5000),
            sites=4,
            timeout=5.0,
        )
    TaskIdentity.run_id = 2
    analyse(grid, lambda remote: bf.stats.glm(remote, family="binomial"), sites=4, timeout=5.0)
    assert main(["show", str(tmp_path / "node-100")]) == 0
    said = capsys.readouterr().out
    assert "0 log likelihoods at shared draws answered" in said
    assert "run 1: Draws, refused by max_draws" in said
    assert said.count("Likelihood, answered loss [], slope [4]") == 5


def test_files_of_a_node_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In their number, and in the numbers of each."""

    def short(remote: Sites) -> Any:
        return bf.stats.glm(remote, family="gaussian", intercept="per_site")

    for name in ("FILES", "NUMBERS"):
        with monkeypatch.context() as patch:
            patch.setattr(statistics, name, 1)
            grid = grid_of(tmp_path / name)
            (tmp_path / name / "node-100").mkdir()
            (tmp_path / name / "node-100" / "own-1-1.csv").touch()
            with pytest.raises(BadClients, match=r"at most .* files of its own models"):
                analyse(grid, short, sites=4, timeout=5.0)


def schools(sigma: Tensor, y: Tensor) -> None:
    """Eight schools."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def test_a_pyro_model_over_nodes(tmp_path: Path):
    """The simulation's numbers; draws of own effects stay on the nodes."""
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
    sigma = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])
    rows = {"north": (sigma[:4], y[:4]), "south": (sigma[4:], y[4:])}

    @cache  # a look at a model takes long
    def at(name: str) -> Tables:
        return bf.pyro.densities(schools, {name: rows[name]}, shared=["mu", "tau"])

    def load_tables(context: Context) -> Tables:
        return at(str(context.node_config["site"]))

    (tmp_path / "policy.toml").write_text("min_rows = 1\nmax_parameters_per_row = 1.0")
    nodes = {NODES[name]: name for name in rows}
    config = {
        node: {"site": name, "policy": str(tmp_path / "policy.toml")}
        for node, name in nodes.items()
    }
    grid = LocalGrid(dict.fromkeys(nodes, site_app(load_tables)), tmp_path, config=config)

    def analysis(remote: Sites) -> Any:
        return bf.pyro.fit(schools, remote, shared=["mu", "tau"])

    found = analyse(grid, analysis, sites=list(rows), timeout=60.0)
    wanted = bf.pyro.fit(schools, rows, shared=["mu", "tau"])
    assert np.allclose(found.table(), wanted.table(), rtol=1e-9)
    assert found.evidence == pytest.approx(wanted.evidence, rel=1e-9)
    assert found.integrals.keys() == rows.keys()
    with pytest.raises(ValueError, match="stay at the site"):
        found.local("north")
    (kept,) = (tmp_path / f"node-{NODES['south']}").glob("own-*.csv")
    own = pd.read_csv(kept)
    assert np.allclose(
        own["theta[1]"].mean(), wanted.local("south")["theta"][:, 1].mean(), rtol=1e-9
    )
