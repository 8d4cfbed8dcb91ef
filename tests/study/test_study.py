"""A study: its cells are plain runs, and neither the engine, nor an interruption, nor another
process changes a number.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import pytest
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from bayesfl.study.cells import Cell, Record
from bayesfl.study.table import Table
from tests.federation.made import same
from tests.recovery.killed import code_of
from tests.study.made import DATA, bits, dying, network, one, study


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells that are trained from here on."""
    ran: list[Any] = []
    train = Cell._ran

    def noting(cell: Cell, *more: Any) -> Any:
        ran.append((cell.method, cell.seed))
        return train(cell, *more)

    monkeypatch.setattr(Cell, "_ran", noting)
    return ran


def test_cells_are_plain_runs(table: Table):
    """Two of them recomputed by hand: every measure of every round, and of every client."""
    assert len(table.rows) == 2 * (2 + 4 + 2)

    def row(method: str, seed: int, **options: Any) -> Any:
        (found,) = (
            r for r in table.rows if (r.method, r.seed, r.options) == (method, seed, options)
        )
        return found

    kept = [row("Ditto", 1, optimiser=SGD(0.1), lam=1.0), row("FedAvg", 0, optimiser=SGD(0.01))]
    for seed, found in zip((1, 0), kept, strict=True):
        clients = bf.data.dirichlet(
            "digits", clients=4, alpha=1.0, max_size=50, validation=0.2, seed=seed
        )
        model = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
        method = (
            bf.algorithms.ditto(model, epochs=1, optimiser=SGD(0.1), lam=1.0)
            if seed
            else bf.algorithms.fedavg(model, epochs=1, optimiser=SGD(0.01))
        )
        result = bf.simulate(method, clients, rounds=2, seed=seed, progress=False)
        for here, there in zip(result.history, found.record.history, strict=True):
            assert here.keys() == there.keys()
            assert [there[k] for k in here if "seconds" not in k] == [
                here[k] for k in here if "seconds" not in k
            ]
        for client, accuracy in enumerate(found.record.clients["accuracy"]):
            x, y = clients.test.client(client)
            right = result.client(client).predict(x).probs.argmax(-1) == y
            assert accuracy == pytest.approx(right.double().mean().item(), abs=1e-6)


def test_what_is_finished_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another method or seed is added to what is there; another network, start, recipe or setting
    is another run. Names of methods, and options given by their defaults, make no difference.
    """
    ran = counted(monkeypatch)
    plain = partial(bf.algorithms.fedavg, epochs=1)
    first = bits(one().run(tmp_path, progress=False))
    assert ran == [("FedAvg", 0), ("FedAvg", 1)]
    ran.clear()
    assert bits(one().run(tmp_path, progress=False)) == first
    one(methods={"another name": lambda model: plain(model, batch_size=50)}).run(
        tmp_path, progress=False
    )
    one(engine=bf.Engine(workers=1), participation=1.0).run(tmp_path, progress=False)
    assert ran == []
    more = {"FedAvg": plain, "Local": partial(bf.algorithms.local, epochs=1)}
    one(methods=more, seeds=range(3)).run(tmp_path, progress=False)
    assert ran == [("FedAvg", 2), ("Local", 0), ("Local", 1), ("Local", 2)]

    def started(clients: FederatedData) -> nn.Module:
        return bf.models.mlp(clients.inputs, hidden=8, outputs=clients.outputs, seed=1)

    def wider(clients: FederatedData) -> nn.Module:
        return bf.models.mlp(clients.inputs, hidden=9, outputs=clients.outputs)

    other = partial(DATA, alpha=2.0)
    for changes in (
        {"model": started},
        {"model": wider},
        {"data": other},
        {"rounds": 1},
        {"participation": 0.5},
        {"steps": 3},
    ):
        ran.clear()
        one(seeds=[0], **changes).run(tmp_path, progress=False)
        assert ran == [("FedAvg", 0)], changes


def test_a_seed_counts_once():
    assert [cell.seed for cell in one(seeds=[1, 0, 1]).cells] == [1, 0]


def drawn(clients: FederatedData) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def seeded(clients: FederatedData, seed: int) -> nn.Module:
    return bf.models.mlp(clients.inputs, hidden=8, outputs=10, seed=seed)


@pytest.mark.parametrize("model", [drawn, seeded])
def test_the_start_depends_on_the_seed(model: Any):
    cell, other = one(model=model).cells
    starts = [made.federation()[1].state_dict() for made in (cell, cell, other)]
    first, again, apart = (next(iter(start.values())) for start in starts)
    assert (first == again).all()
    assert (first != apart).any()


@pytest.mark.filterwarnings("ignore:the predictions for:UserWarning")  # of what diverges
def test_an_error_is_kept_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a run, and of a method that cannot be made; what diverged would do so again, what failed
    otherwise is tried again.
    """
    there = tmp_path / "there"

    def fragile(model: nn.Module, **options: Any) -> bf.Algorithm:
        if not there.exists():

            def burst(algorithm: Any, given: Any, view: Any, batch: Any) -> Any:
                raise OSError("no such file")

            made = bf.algorithms.fedavg(model, **options)
            return bf.Algorithm(model, made.blocks, (*made.phases, bf.Once(burst)), parts=("w",))
        return bf.algorithms.fedavg(model, **options)

    def cells(rates: list[float]) -> bf.Study:
        return one(
            methods={"FedAvg": fragile},
            options={"FedAvg": {"optimiser": [SGD(rate) for rate in rates], "epochs": [1]}},
            seeds=[0],
        )

    nothing = cells([0.1]).run(tmp_path / "a", progress=False)
    for ask in (nothing.summary, nothing.chosen):
        with pytest.raises(ValueError, match=r"no run went through.*OSError: no such file"):
            ask()
    with pytest.raises(ValueError, match="FedAvg with seed 0 failed: OSError: no such file"):
        nothing.result("FedAvg", 0)
    (row,) = nothing.rows
    assert row.record.error["class"] == "OSError"
    assert "no such file" in row.record.error["text"]
    assert "burst" in row.record.error["traceback"]
    there.touch()
    ran = counted(monkeypatch)
    table = cells([0.1, 1e30]).run(tmp_path / "a", progress=False)
    good, diverged = table.rows
    assert (good.record.error, diverged.record.error["class"]) == (None, "DivergenceError")
    cells([0.1, 1e30]).run(tmp_path / "a", progress=False)
    assert len(ran) == 2
    assert "FedAvg: 1 of 2 runs failed: DivergenceError: " in str(table.chosen())
    wrong = one(options={"FedAvg": {"epochs": [0, 1]}}, seeds=[0]).run(
        tmp_path / "a", progress=False
    )
    assert "epochs must be at least 1" in wrong.rows[0].record.error["text"]
    assert wrong.rows[1].record.error is None


def test_a_function_that_another_would_pass_for_is_refused(tmp_path: Path):
    """As its cell would be read for that of the other."""
    measures = {"right": eval("lambda predictions, labels: 1.0")}
    with pytest.raises(ValueError, match="neither a name nor source text"):
        one(measures=measures).run(tmp_path, progress=False).summary()


def test_a_record_says_what_a_run_took(tmp_path: Path):
    (row, _) = one().run(tmp_path, progress=False).rows
    record = row.record
    assert 0 < record.seconds < 60
    assert record.environment["bayesfl"] == bf.__version__
    clients = DATA(seed=0)
    sent = sum(p.numel() for p in network(clients).parameters()) * 4
    assert record.budget["bytes_up"] == sent
    assert record.budget["epochs"] == 1
    assert len(list(tmp_path.glob("*"))) == 2
    for file in tmp_path.glob("*"):
        assert Record.read(file).address == file.stem


def test_whole_results_are_kept(tmp_path: Path):
    """A run that was made without is made again; loading gives its bits."""
    with pytest.raises(ValueError, match="keep='result'"):
        one().run(tmp_path, progress=False).result("FedAvg", 0)
    table = one().run(tmp_path, progress=False, keep="result")
    model = network(clients := DATA(seed=1))
    method = bf.algorithms.fedavg(model, epochs=1)
    plain = bf.simulate(method, clients, rounds=2, seed=1, progress=False)
    assert same(table.result("FedAvg", 1), plain)
    with pytest.raises(ValueError, match=r"FedAvg has no seed 7.*\[0, 1\]"):
        table.result("FedAvg", 7)
    methods = {"FedAvg": partial(bf.algorithms.fedavg, optimiser=SGD(1e30))}
    with pytest.raises(ValueError, match=r"seed 0 failed: DivergenceError: "):
        one(methods=methods).run(tmp_path, progress=False, keep="result").result("FedAvg", 0)


def test_a_record_that_cannot_be_read_is_made_anew(tmp_path: Path):
    whole = one(seeds=[0]).run(tmp_path, progress=False, keep="result")
    (file,) = tmp_path.glob("*.record")
    whole_file = file.read_bytes()
    for damage in (
        b"",
        b"{}",
        whole_file[:100],
        whole_file.replace(b"personal_nll", b"personal_nlx", 1),
    ):
        file.write_bytes(damage)
        assert bits(one(seeds=[0]).run(tmp_path, progress=False)) == bits(whole)
    again = one(seeds=[0]).run(tmp_path, progress=False, keep="result")
    shutil.rmtree(file.with_suffix(""))
    again = one(seeds=[0]).run(tmp_path, progress=False, keep="result")
    assert again.result("FedAvg", 0).round == 2


def test_data_that_fail_for_a_seed_leave_the_others(tmp_path: Path):
    def data(seed: int) -> FederatedData:
        if seed == 1:
            raise OSError("no file of seed 1")
        return DATA(seed=seed)

    table = one(data=data).run(tmp_path, progress=False)
    assert [row.record.error is None for row in table.rows] == [True, False]
    assert "no file of seed 1" in str(table)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": "x"}, "checkpoint belongs to a single cell"),
        ({"options": {"FedAvg": {"epochs": 5}}}, r"options\['FedAvg'\]\['epochs'\] must be a list"),
        ({"model": nn.Linear(2, 2)}, "model must be a function"),
        (
            {"methods": {"A": bf.algorithms.fedavg(nn.Linear(2, 2))}},
            r"methods\['A'\] must be a function",
        ),
    ],
)
def test_what_no_cell_could_use_is_refused_at_once(changes: Any, words: str):
    with pytest.raises(ValueError, match=words):
        one(**changes)


def test_unknown_settings_are_refused_at_once():
    with pytest.raises(TypeError, match="'participatoin'; did you mean participation"):
        one(participatoin=0.5)


def test_one_cell_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """For array jobs; without a number the script runs all."""

    def called(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["study.py", *arguments])
        one(options={"*": {"epochs": [1, 2]}}).main(tmp_path)
        return capsys.readouterr().out

    ran = counted(monkeypatch)
    called("--cell", "2")
    called("--cell", "2")
    assert ran == [("FedAvg", 0)]
    assert "Options chosen by validation_nll:\nFedAvg: epochs " in called()
    assert len(ran) == 4
    with pytest.raises(SystemExit):
        called("--cell", "4")


MOMENTS = (("flush", 1), ("rename", 2), ("folder", 1), ("round", 4))
SCRIPT = """
from functools import partial
import bayesfl as bf

def own(model, rate):
    step = bf.Descend(bf.Energy("w", ("w",), likelihood="mean"), optimiser=bf.optim.SGD(rate))
    stay = bf.Once(lambda algorithm, given, view, batch: view)
    return bf.Algorithm(model, {"w": bf.Block()}, (step, stay), parts=("w",))

study = bf.Study(
    data=partial(bf.data.iid, "digits", clients=2, max_size=40, validation=0.2),
    model=lambda clients: bf.models.mlp(clients.inputs, hidden=4, outputs=10),
    methods={"own": own},
    options={"own": {"rate": [0.1, 0.2]}},
    rounds=1,
)
if __name__ == "__main__":
    study.main("runs")
"""


@pytest.mark.slow
def test_functions_of_a_script_are_known_again(tmp_path: Path):
    """Its methods and networks have no module to be imported from; other processes that run them,
    and the script itself when it is started again, give the cells the same addresses.
    """
    (tmp_path / "script.py").write_text(SCRIPT)

    def called(*arguments: str) -> str:
        command = [sys.executable, "script.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    called("--cell", "1")
    called("--jobs", "2")
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.slow
def test_two_at_a_time_give_the_same_bits(tmp_path: Path, table: Table):
    """By joblib, and by an executor of Python's own; functions without a name travel, too."""
    assert bits(study().run(tmp_path / "joblib", n_jobs=2, progress=False)) == bits(table)
    alone = bits(one().run(tmp_path / "alone", progress=False))
    with ProcessPoolExecutor(2) as executor:
        nameless = one(model=lambda clients: network(clients))
        assert bits(nameless.run(tmp_path / "pool", executor=executor, progress=False)) == alone


@pytest.mark.slow
def test_a_cluster_gives_the_same_bits(tmp_path: Path):
    distributed = pytest.importorskip("distributed", reason="Dask's distributed is not installed")
    alone = bits(one().run(tmp_path / "alone", progress=False))
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        with joblib.parallel_config(backend="dask"):
            assert bits(one().run(tmp_path / "backend", progress=False)) == alone
        executor = client.get_executor()
        assert bits(one().run(tmp_path / "pool", executor=executor, progress=False)) == alone


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path: Path, table: Table):
    """By SIGKILL before a file is flushed or renamed, after its rename, and in training: in the end
    the bits of a study that never stopped.
    """
    for moment, count in MOMENTS * (3 if os.environ.get("BAYESFL_DURABILITY") == "full" else 1):
        assert code_of(dying, str(tmp_path), moment, count) == -9
    finished = len(list(tmp_path.glob("[!.]*.record")))
    assert 0 < finished < len(table.rows)
    assert bits(study().run(tmp_path, progress=False)) == bits(table)


def test_a_cell_goes_on_from_its_checkpoint(tmp_path: Path):
    """One that was interrupted in its third round goes on behind the second, and has the bits of
    one that was not; its checkpoints are removed.
    """
    seen = tmp_path / "rounds"

    def note(run):
        before = seen.read_text() if seen.exists() else ""
        seen.write_text(f"{before}{run.round} ")
        if before == "1 2 ":
            raise KeyboardInterrupt

    options = {"seeds": [0], "rounds": 4, "on_round": [note]}
    with pytest.raises(KeyboardInterrupt):
        one(**options).run(tmp_path / "a", progress=False, every=1)
    assert list((tmp_path / "a").glob("*.rounds"))
    table = one(**options).run(tmp_path / "a", progress=False, every=1)
    assert seen.read_text() in ("1 2 3 3 4 ", "1 2 3 2 3 4 ")
    assert not list((tmp_path / "a").glob("*.rounds"))
    assert bits(table) == bits(one(seeds=[0], rounds=4).run(tmp_path / "b", progress=False))
