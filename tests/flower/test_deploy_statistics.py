"""Regressions over a SuperLink with three nodes in processes of their own: the simulation's tables,
and a hospital that is killed.

These start a network and take minutes: `make test-deploy`.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

WANTED = os.environ.get("BAYESFL_DEPLOY", "")
EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "flower_hospitals"
sys.path[:0] = [str(EXAMPLE), str(EXAMPLES / "flower_pfedvem")]

import made_up  # noqa: E402 (found by the line above)
from loopback import Loopback  # noqa: E402 (likewise)
from regressions.analysis import analysis  # noqa: E402 (likewise)
from regressions.site import tables  # noqa: E402 (likewise)

from bayesfl.commands.main import main  # noqa: E402 (found as always)
from bayesfl.stats import Policy  # noqa: E402 (likewise)

pytestmark = pytest.mark.skipif(
    WANTED != "full", reason="starts a network for minutes; make test-deploy"
)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """A SuperLink and three hospitals."""
    with made_up.network_of(tmp_path_factory.mktemp("hospitals")) as net:
        yield net


def test_the_simulations_tables_digit_for_digit(net: Loopback):
    """A logistic regression, Cox's and a mixed one, from three processes at once."""
    run = net.submit(EXAMPLE, out=str(net.folder / "network"))
    assert net.finish(run, seconds=900.0) == "finished:completed", net.said(run)
    files = {name: str(net.folder / "data" / f"{name}.csv") for name in made_up.PATIENTS}
    analysis(tables(files, Policy.read(EXAMPLE / "policy.toml")), net.folder / "here")
    for name in ("glm.csv", "cox.csv", "mixed.csv"):
        found, wanted = (net.folder / where / name for where in ("network", "here"))
        assert found.read_text() == wanted.read_text()
    sheet = json.loads((net.folder / "network" / "mixed-released.json").read_text())
    assert "over Flower, and the server saw each site's answers" in sheet["seen"]
    assert list(sheet["bytes"]) == list(made_up.PATIENTS)
    for client in range(len(made_up.PATIENTS)):  # its own model, and draws of its own coefficients
        assert len(list((net.folder / "states" / f"client-{client}").glob("own-*.csv"))) == 2


def test_an_analysis_that_is_refused_and_the_ledger(
    net: Loopback, capsys: pytest.CaptureFixture[str]
):
    """The days of deaths are not told; each hospital's ledger has what was asked in both runs."""
    run = net.submit(EXAMPLE, out=str(net.folder / "refused"), **{"exact-times": True})
    assert net.finish(run, seconds=900.0) == "finished:failed"
    said = net.said(run)
    assert "Refusal: site 'basel' refuses EventTimes by its policy's rule exact_times" in said
    assert not (net.folder / "refused" / "cox.csv").exists()
    for client in range(len(made_up.PATIENTS)):
        assert main(["show", str(net.folder / "states" / f"client-{client}")]) == 0
        ledger = capsys.readouterr().out
        assert re.search(rf"run {run}: EventTimes, .*refused by exact_times", ledger), ledger
        for question in ("Sums", "Likelihood", "PartialLikelihood", "Draws"):
            assert re.search(rf"run \d+: {question}, .*answered", ledger), ledger
        assert "1000 log likelihoods at shared draws answered" in ledger


def test_a_hospital_without_its_file_ends_the_run(net: Loopback):
    """After the timeout, with the reason; the file is back for the next run."""
    file, away = net.folder / "data" / "bern.csv", net.folder / "bern.csv"
    file.rename(away)
    try:
        run = net.submit(EXAMPLE, out=str(net.folder / "unread"), timeout=40.0)
        assert net.finish(run, seconds=300.0) == "finished:failed"
    finally:
        away.rename(file)
    said = net.said(run)
    assert re.search(r"stopped waiting for 1 of 3 sites.*failed with FileNotFoundError", said), said


def test_a_hospital_that_is_killed_is_named(net: Loopback):
    """In the middle of a fit; the run ends with its name and how to go on."""
    answered = net.log("client-1").count("Sending: query.survey")
    run = net.submit(EXAMPLE, out=str(net.folder / "killed"), timeout=60.0)
    net.until(
        lambda: net.log("client-1").count("Sending: query.survey") > answered,
        "a hospital to answer a question",
        seconds=180,
    )
    net.stop("client-1", signal.SIGKILL)
    assert net.finish(run, seconds=300.0) == "finished:failed"
    said = net.said(run)
    assert re.search(r"BadClients: \w+ has no answer from site 'bern': ", said), said
    assert "sites.only([...]) continues with the others" in said
    assert "site 'basel'" not in said
    assert not (net.folder / "killed" / "glm.csv").exists()
