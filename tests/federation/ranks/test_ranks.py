"""A run on the ranks of torchrun has the bits of one process, and ends where a rank does."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

import bayesfl as bf
from bayesfl.base.processes import ranks
from bayesfl.federation.store.files import newest
from tests.federation.ranks import program

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(ranks: int, *program: str, near: int | None = None) -> subprocess.Popen[str]:
    """Start a program on ranks, of which `near` pretend to be on one machine."""
    said = [] if near is None else ["env", f"LOCAL_WORLD_SIZE={near}", sys.executable]
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*begin, f"--nproc_per_node={ranks}", *(["--no-python", *said] if said else []), *program],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


APART = (
    *("lost and altered", "repeated", "calibrated", "all train"),
    *("adapted", "resumed", "diverged", "failed", "surveyed"),
)
"""Special cases for ranks on several machines, too: one for each kind of what they exchange
and of what they write.
"""


OTHERS = (
    *("methods", "settings", "measures", "faults", "start", "rows to predict"),
    *("results, states", "steps of calibration", "draws"),
)
"""What differs between the ranks in calls of `apart`, as the messages name it."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a case says on one process, which is run once."""

    @cache
    def found(name: str) -> Any:
        return program.found([name], str(tmp_path_factory.mktemp("alone")))[name]

    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "ranks", "near"),
    [(list(program.EVERY), 2, None), (list(APART), 3, 1)],
    ids=["one machine", "three machines"],
)
def test_ranks_have_the_bits_of_one_process(
    names: list[str],
    ranks: int,
    near: int | None,
    alone: Callable[[str], Any],
    tmp_path: Path,
):
    """Faults, secure sums, privacy, what is fitted after training, callbacks, files, errors, and
    every method, whose client steps on all ranks are those of one process; the ranks name a call
    that one of them leaves out, and one that differs.
    """
    file = tmp_path / "said"
    made = torchrun(ranks, "-m", "tests.federation.ranks.program", str(file), *names, near=near)
    single = {name: alone(name) for name in names}
    output, _ = made.communicate(timeout=600)
    assert made.returncode == 0, output[-5000:]
    several = [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    for name, one in single.items():
        assert [each[name]["said"] for each in several] == [one["said"]] * ranks, name
        if name not in program.SPECIAL or name == "surveyed":
            steps = [Counter(each[name]["steps"]) for each in several]
            assert sum(steps, Counter()) == Counter(one["steps"])
            assert all(steps)
    calls = ", ".join(["predict", *["simulate"] * (ranks - 1)])
    inner = ", ".join(["claimed", *["agree"] * (ranks - 1)])
    for each in several:
        for told, names in zip(each["apart"][:2], (calls, inner), strict=True):
            assert told.startswith(f"ranks make different calls at once: {names};")
        for told, other in zip(each["apart"][2:], OTHERS, strict=True):
            assert told.startswith(
                f"these differ between ranks: {other}; each must make the same call"
            )


def test_a_notebooks_call_on_processes_of_its_own():
    """`Engine(processes=)` has the bits of one process and raises what a process raises."""

    def runs(processes: int | None) -> list[Any]:
        engine = bf.Engine(chunk=2, workers=1, processes=processes)
        wild = bf.optim.SGD(lambda round, rounds: 0.1 if round == 1 else 1e30)
        with pytest.raises(bf.DivergenceError) as caught:
            program.run(program.fedavg(optimiser=wild), engine=engine)
        error = caught.value
        return [*program.told(error.result), error.result.round, str(error), error.client]

    assert runs(2) == runs(None)
    assert bf.rank() == 0


OWN = """
import torch, bayesfl as bf

class Net(torch.nn.Linear):
    pass

def rate(round, rounds):
    return 0.1

clients, net = bf.data.iid("digits", clients=4), Net(64, 10)
method = bf.algorithms.fedavg(net, optimiser=bf.optim.SGD(rate))
engine = bf.Engine(processes=2)
measures = {"one": lambda predictions, labels: 1.0}
print(bf.simulate(method, clients, rounds=1, engine=engine, measures=measures).round)
"""


@pytest.mark.slow
def test_what_a_script_defines_is_the_same_in_its_processes(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    command = [sys.executable, "own.py"]
    made = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert made.stdout == "1\n", made.stderr


def test_shared_memory_spares_the_folders_of_others(tmp_path: Path, monkeypatch):
    """The folder of a killed process goes, as the system has released its lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    for name in ("bayesfl-2026-results", f"{ranks.FOLDER}mine", f"{ranks.FOLDER}left"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{ranks.FOLDER}left" / ranks.LOCK).touch()
    with ExitStack() as held, ExitStack() as other:
        made = [Path(ranks._folder({}, each)) for each in (held, other)]
        assert all((each / ranks.LOCK).is_file() for each in made)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bayesfl-2026-results",
        f"{ranks.FOLDER}mine",
    ]


LONG = """
import sys
from tests.federation.ranks import program
program.run(program.fedavg(), rounds=10**4, evaluate_every=None, checkpoint=sys.argv[1])
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_which_goes_on(tmp_path: Path):
    """The message names the rank and its clients; on two other ranks the run goes on, with the bits
    of one that nothing has stopped.
    """
    (tmp_path / "long.py").write_text(LONG)
    folder = tmp_path / "run"
    # Without torchrun, which ends the other ranks itself, on a busy machine before they have
    # written their message.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "3"}
    about |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "long.py"), str(folder)],
            env={**ENVIRONMENT, **about, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    while not list(folder.glob("round-*")):
        time.sleep(0.05)
    time.sleep(0.3)
    ranks[2].kill()
    for each in ranks:
        _, output = each.communicate(timeout=90)
        assert each.returncode
        assert each is ranks[2] or "has ended; it trained client" in output, output[-3000:]

    rounds = newest(folder) + 2

    def goes_on(**options: Any) -> list[Any]:
        made = program.run(program.fedavg(), rounds=rounds, evaluate_every=None, **options)
        return program.told(made)[:2]

    never = goes_on()
    two = bf.Engine(chunk=2, workers=1, processes=2)
    assert goes_on(checkpoint=folder, engine=two) == never
