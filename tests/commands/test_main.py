"""Commands: what they print, and errors in one line."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import bayesfl as bf
from bayesfl.commands import demo
from bayesfl.commands.main import main
from tests.study.made import one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved run."""
    clients = bf.data.iid("digits", clients=3, max_size=40)
    method = bf.algorithms.fedavg(bf.models.mlp(clients.inputs, hidden=4, outputs=10))
    folder = tmp_path_factory.mktemp("run")
    result = bf.simulate(method, clients, rounds=2, progress=False)
    result.save(folder)
    result.client(0).save(folder / "clients")
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["show", "nowhere"], "'nowhere' does not exist, or holds no runs"),
        (["report", "nowhere"], "'nowhere' does not exist, or holds no runs"),
        (["new-app", "."], "holds something already; give a new folder"),
    ],
)
def test_errors_end_in_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Of standard error, with status 2."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path / "app")
    try:
        status = main(words)
    except SystemExit as left:  # as argparse does
        status = left.code
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    assert error.splitlines()[-1].startswith("bayesfl")
    assert said in error


def test_a_saved_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It is shown, and its report is written beside it; a client's model is shown, also in a node's
    folder of states.
    """
    assert main(["show", str(run)]) == 0
    found = capsys.readouterr().out
    for part in ("method: fedavg\n", "data: digits, 3 clients\n", "round: 2 of 2, seed 0\n"):
        assert part in found
    assert main(["show", str(run / "clients")]) == 0
    assert "client: client 0\n" in capsys.readouterr().out
    node = tmp_path / "experiment" / "client-0"
    shutil.copytree(run / "clients", node)
    assert main(["show", str(tmp_path)]) == 0
    assert f"{node / 'client.safetensors'}\nmethod: fedavg\nclient: client 0\n" in (
        capsys.readouterr().out
    )
    assert main(["report", str(run)]) == 0
    assert "FedAvg on digits" in Path(capsys.readouterr().out.strip()).read_text()


def test_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of the server's checkpoints: what clients share, by the names that they told."""
    from tests.flower.made import deploy, method

    clients = bf.data.iid("digits", clients=2, max_size=40)
    made = method("ditto", bf.models.mlp(clients.inputs, hidden=4, outputs=10))
    found = deploy(made, clients, tmp_path / "nodes", rounds=1)
    measures = {0: {"nll": 0.25}, 1: {"nll": 0.5, "accuracy": 0.75}}
    replace(found, measures=measures, names=("Basel", "<Chur>")).save(tmp_path / "server")
    assert main(["report", str(tmp_path / "server")]) == 0
    page = Path(capsys.readouterr().out.strip()).read_text()
    assert "2 clients over a network; round 1 of 1." in page
    assert f"<dd>{found.history['personal_accuracy'][-1]:.3f}</dd>" in page
    row = '<th scope="row">&lt;Chur&gt;</th><td class="number" data-value="0.5">0.500</td>'
    assert row in page


def test_a_damaged_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its report is refused."""
    data = bytearray((run / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "state.safetensors").write_bytes(data)
    assert main(["report", str(tmp_path)]) == 2
    assert "digest does not match" in capsys.readouterr().err


def test_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its table, and its report."""
    table = one().run(tmp_path, progress=False)
    for command in ("study", "show"):
        assert main([command, str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{table}\n"
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What comes with a dependency is there; where the rest is looked for."""
    monkeypatch.setenv("BAYESFL_DATA", str(tmp_path))
    assert main(["data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["digits", "1,797", "rows"]
    assert lines[1].split()[:3] == ["mnist", "no", "files"]
    assert lines[-3] == f"Files are read from {tmp_path} (BAYESFL_DATA). Download images with"
    assert "load('mnist', download=True)" in lines[-2]


def test_without_a_command(capsys: pytest.CaptureFixture[str]):
    """The help is printed."""
    assert main([]) == 0
    assert "new-app" in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A table, and two reports; `show` finds the runs in the demo's own folder."""
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "PASSES", 1)
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    found = capsys.readouterr().out
    assert "pFedVEM" in found
    assert {"report.html", "pfedvem.html"} <= {path.name for path in demo.FOLDER.iterdir()}
    assert main(["show"]) == 0
    assert {*capsys.readouterr().out.splitlines()} <= {*found.splitlines()}


@pytest.mark.slow
def test_python_m_bayesfl(tmp_path: Path):
    """The same, as a process."""
    command = [sys.executable, "-m", "bayesfl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (0, f"bayesfl {bf.__version__}\n")
