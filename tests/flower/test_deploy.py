"""A SuperLink with TLS, authenticated nodes and processes of their own: the simulation's numbers,
through failures, and who is refused.

These start a network and take minutes: `make test-deploy`. BAYESFL_DEPLOY=ci leaves out what waits
for Flower's heartbeats.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.federation.store import files
from bayesfl.flower import Deployed, load

WANTED = os.environ.get("BAYESFL_DEPLOY", "")
APP = Path(__file__).parent / "app"
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_pfedvem"
sys.path[:0] = [str(APP), str(EXAMPLE)]

import loopback  # noqa: E402 (found by the line above)
from trial import task  # noqa: E402 (likewise)

pytestmark = pytest.mark.skipif(not WANTED, reason="starts a network; make test-deploy")
slow = pytest.mark.skipif(WANTED == "ci", reason="waits for Flower's heartbeats; make test-deploy")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[loopback.Loopback]:
    """A SuperLink and two clients."""
    with loopback.network(tmp_path_factory.mktemp("net"), task.CLIENTS) as net:
        yield net


def submit(net: loopback.Loopback, name: str, **config: Any) -> tuple[int, Path]:
    """Starts a run; its id, and the folder of its checkpoints."""
    folder = net.folder / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "method": name.split("-")[0],
        "marks": str(folder),
        "checkpoint": str(folder / "server"),
        **config,
    }
    return net.submit(APP, **config), folder / "server"


def hangs(net: loopback.Loopback, folder: Path, name: str) -> Path:
    """Waits until a client hangs in mid-round; the file that holds its process's number."""
    mark = folder.parent / name
    net.until(lambda: mark.exists() and mark.read_text() != "", f"{name} in mid-round", seconds=180)
    return mark


def assert_the_simulation(
    net: loopback.Loopback, name: str, folder: Path, *, rounds: int = 3, **options: Any
) -> Deployed:
    """That a run's server and its clients' predictions, calibrated where they are, are those of the
    simulation.
    """
    algorithm = task.method(name)
    found = load(folder, algorithm)
    sim = bf.simulate(
        algorithm,
        task.federation(),
        rounds=rounds,
        seed=task.SEED,
        dtype=found.dtype,
        evaluate_every=None,
        progress=False,
        **options,
    )
    assert found.round == rounds
    assert_close(flatten(found.server), flatten(sim.server), atol=1e-6, rtol=0)
    sim = sim.calibrate(*task.steps(name))
    expected = sim.predict()
    for one, other in zip(found.steps, sim.steps, strict=True):
        assert_close(dict(one.state), dict(other.state), atol=1e-6, rtol=0)
    for client in range(task.CLIENTS):
        (file,) = net.folder.glob(
            f"states/client-{client}*/{found.experiment}/client-{client}/predictions.safetensors"
        )
        predicted = files.read_file(file, files.NODE)["predictions"]
        assert_close(predicted["probs"], expected.client(client).probs, atol=1e-6, rtol=0)
        if expected.sets is not None:
            assert torch.equal(predicted["sets"], expected.client(client).sets)
    return found


@pytest.mark.filterwarnings("ignore:most of the selected weights")
@pytest.mark.parametrize(
    "names", [("pfedvem", "ditto"), pytest.param(("fedpac", "fedsi"), marks=slow)], ids="-".join
)
def test_a_deployment_is_the_simulation(net: loopback.Loopback, names: tuple[str, ...]):
    """Two methods at once on one SuperLink, two rounds each, in float64."""
    runs = {name: submit(net, name, rounds=2) for name in names}
    for name, (run, folder) in runs.items():
        assert net.finish(run) == "finished:completed", net.said(run)
        found = assert_the_simulation(net, name, folder, rounds=2)
        assert found.history["cohort"].tolist() == [2.0, 2.0]
        assert 0 <= found.history["personal_accuracy"][-1] <= 1


@slow
def test_a_pooled_posterior(net: loopback.Loopback):
    """The simulation's posterior of the server's network."""
    run, trained = submit(net, "pooled")
    assert net.finish(run) == "finished:completed", net.said(run)
    found = assert_the_simulation(net, "pooled", trained)
    sim = bf.simulate(
        task.method("pooled"),
        task.federation(),
        rounds=3,
        seed=task.SEED,
        dtype=torch.float64,
        evaluate_every=None,
        progress=False,
    )
    assert_close(found.posterior.moments(), sim.posterior.moments(), atol=1e-6, rtol=0)


def test_who_is_refused(net: loopback.Loopback, tmp_path: Path):
    """A node whose key is not registered, one that does not know the server's certificate, and one
    without a key.
    """
    stranger = tmp_path / "keys" / "stranger"
    loopback.make_node_key(stranger)
    loopback.make_certificates(tmp_path / "other")
    registered, wrong = net.folder / "keys" / "client-0", tmp_path / "other" / "ca.pem"
    cases = {
        "unregistered": (
            {"key": stranger},
            "superlink",
            "No SuperNode found with the given public key",
        ),
        "wrong-authority": (
            {"key": registered, "authority": wrong},
            "wrong-authority",
            "CERTIFICATE_VERIFY_FAILED",
        ),
        "no-key": ({"key": None}, "superlink", "ApiError:2001"),
    }
    for name, (options, where, words) in cases.items():
        before = net.log(where).count(words) if where == "superlink" else 0
        net.start_node(name, 0, **options)
        net.until(
            lambda w=where, t=words, b=before: net.log(w).count(t) > b,
            f"{words!r} in the log of {where}",
        )
        net.stop(name)


@slow
def test_a_client_that_raises(net: loopback.Loopback):
    """The others' round goes on, the reason is in the server's log, and the client is in the next
    round.
    """
    run, folder = submit(net, "ditto-raise", fail="raise 1 1")
    assert net.finish(run) == "finished:completed"
    found = load(folder, task.method("ditto"))
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]
    assert "client 1 is left out: its node reports error 2" in net.said(run)
    assert "the client has no memory left" in net.said(run)
    sim = bf.simulate(
        task.method("ditto"),
        task.federation(),
        rounds=3,
        seed=task.SEED,
        dtype=found.dtype,
        evaluate_every=None,
        progress=False,
        faults=lambda round, attempt, ids: {1: bf.faults.KINDS["lost"]} if round == 1 else {},
    )
    assert_close(flatten(found.server), flatten(sim.server), atol=1e-6, rtol=0)


@slow
def test_a_client_that_times_out(net: loopback.Loopback):
    """Its round is as without it; it is killed then, as an operator would, and is back when Flower
    has noticed that.
    """
    run, folder = submit(net, "pfedvem-sleep", fail="sleep 0 1", timeout=30.0, rounds=6)
    mark = hangs(net, folder, "sleep-0-1")
    net.until(
        lambda: files.checkpoints(folder)[0].name == "round-000002.safetensors",
        "round 1 to end without it",
        seconds=120,
    )
    os.kill(int(mark.read_text()), signal.SIGKILL)
    assert net.finish(run) == "finished:completed"
    lost = load(folder, task.method("pfedvem")).history["lost"].tolist()
    assert (lost[:2], lost[-1]) == ([0.0, 1.0], 0.0)
    assert "client 0 is left out: it did not reply within 30 seconds" in net.said(run)


@slow
def test_a_superlink_killed_in_mid_round(net: loopback.Loopback):
    """A new run on a restarted SuperLink ends as the simulation that never stopped."""
    run, folder = submit(net, "ditto-kill", fail="sleep 1 2", rounds=4)
    mark = hangs(net, folder, "sleep-1-2")
    net.stop("superlink", signal.SIGKILL)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    net.start_superlink()
    run, folder = submit(net, "ditto-kill", rounds=4)
    assert net.finish(run) == "finished:completed", net.said(run)
    assert "continuing after round 2" in net.said(run)
    assert_the_simulation(net, "ditto", folder, rounds=4)


@slow
def test_a_node_killed_in_mid_round(net: loopback.Loopback):
    """It is missed in its round, is started again, and goes on from its state on disk."""
    run, folder = submit(net, "ditto-node", fail="sleep 1 1", rounds=5)
    hangs(net, folder, "sleep-1-1")
    net.stop("client-1", signal.SIGKILL)
    net.until(
        lambda: "client 1 is left out" in net.said(run),
        "the server to miss client 1",
        seconds=180,
        pause=2.0,
    )

    def back() -> bool:
        """Refused until the SuperLink has given the old one up: an operator's supervisor tries
        again.
        """
        if "client-1" not in net.processes or net.processes["client-1"].poll() is not None:
            net.start_node("client-1", 1, key=net.folder / "keys" / "client-1")
        return net.status(run).startswith("finished")

    net.until(back, f"run {run} to end", seconds=400, pause=3.0)
    assert net.status(run) == "finished:completed", net.said(run)
    lost = load(folder, task.method("ditto")).history["lost"].tolist()
    assert (lost[:2], lost[-1]) == ([0.0, 1.0], 0.0)


def test_the_example(tmp_path: Path):
    """From nothing to a history, equal to the simulation, and nothing left behind."""
    command = [
        sys.executable,
        str(EXAMPLE / "run.py"),
        "--out",
        str(tmp_path / "out"),
        "--rounds",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that it stops what it has started
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    server, probs = re.findall(r"(?:server|probabilities) ([\d.e+-]+)", said.splitlines()[-1])
    assert max(float(server), float(probs)) < 1e-5
    assert "round 1 of 1" in (tmp_path / "out" / "server.log").read_text()
