"""A run on the ranks of torchrun has the bits of one process, and ends where a rank does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import bayesfl as bf
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


def on_ranks(folder: Path, ranks: int, *names: str, near: int | None = None) -> list[Any]:
    """What every rank writes of some cases."""
    made = torchrun(
        ranks, "-m", "tests.federation.ranks.program", str(folder / "said"), *names, near=near
    )
    output, _ = made.communicate(timeout=600)
    assert made.returncode == 0, output[-5000:]
    return [json.loads((folder / f"said.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process says."""
    return program.found(list(program.SPECIAL), str(tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(("ranks", "near"), [(2, None), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_special_cases_have_the_same_bits(alone: Any, ranks: int, near: int | None, tmp_path: Path):
    """Faults, secure sums, privacy, what is fitted after training, callbacks, files and errors; on
    one machine, and on three.
    """
    every = on_ranks(tmp_path, ranks, *program.SPECIAL, near=near)
    for one in every:
        assert one["said"] == alone


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_method_has_the_same_bits_and_each_client_steps_once(ranks: int, tmp_path: Path):
    """The client steps of the ranks are those of one process, none twice."""
    names = [name for name in program.EVERY if name not in program.SPECIAL]
    (tmp_path / "one").mkdir()
    (one,) = on_ranks(tmp_path / "one", 1, *names)
    several = on_ranks(tmp_path, ranks, *names)
    for each in several:
        assert each["said"] == one["said"]
    steps = sum((Counter(each["steps"]) for each in several), Counter())
    assert steps == Counter(one["steps"])
    assert all(each["steps"] for each in several)


def test_a_notebooks_call_on_processes_of_its_own():
    """`Engine(processes=)` gives the bits of one process, raises what a process raises, and leaves
    none behind.
    """

    def runs(processes: int | None) -> list[Any]:
        engine = bf.Engine(chunk=2, workers=1, processes=processes)
        wild = program.fedavg(optimiser=bf.optim.SGD(1e30))
        with pytest.raises(bf.DivergenceError) as caught:
            program.run(wild, engine=engine)
        made = program.run(program.fedavg(), engine=engine)
        return [*program.told(made), str(caught.value), caught.value.client]

    assert runs(2) == runs(None)
    assert bf.rank() == 0


APART = """
import bayesfl as bf
from tests.federation.ranks import program
result = program.run(program.fedavg())
if bf.rank() == 0:
    result.predict()
program.run(program.fedavg())
"""


def test_a_call_that_a_rank_leaves_out_is_named(tmp_path: Path):
    """Both calls stand in the message."""
    (tmp_path / "apart.py").write_text(APART)
    made = torchrun(2, str(tmp_path / "apart.py"))
    output, _ = made.communicate(timeout=120)
    assert made.returncode
    assert "ranks make other calls at once: predict, simulate;" in output


LONG = """
import sys
from tests.federation.ranks import program
result = program.run(program.fedavg(), rounds=400, evaluate_every=None, checkpoint=sys.argv[1])
print(program.told(result)[:2])
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_which_goes_on(tmp_path: Path):
    """The message names the rank and its clients; the same command has the bits of a run that
    nothing has stopped.
    """
    (tmp_path / "long.py").write_text(LONG)
    for moment in range(3):
        folder = tmp_path / str(moment)
        made = torchrun(3, str(tmp_path / "long.py"), str(folder))
        while not list(folder.glob("round-*")):
            time.sleep(0.05)
        time.sleep(moment * 0.3)
        (*_, last) = subprocess.check_output(["pgrep", "-P", str(made.pid)], text=True).split()
        os.kill(int(last), signal.SIGKILL)
        output, _ = made.communicate(timeout=90)
        assert made.returncode
        assert "has ended; it trained client" in output, output[-3000:]
    said = {folder.name: torchrun(2, str(tmp_path / "long.py"), str(folder)).communicate()[0]
            for folder in (tmp_path / "never", *(tmp_path / str(m) for m in range(3)))}  # fmt: skip
    assert len({text.split("[")[-1] for text in said.values()}) == 1, said
