"""A record is of what was trained: whoever disturbs a study gets the same numbers, the run once
more, or an error; never the record of another run.
"""

import importlib.util
import random
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base import archive, described
from bayesfl.base.described import digest_of
from bayesfl.data import FederatedData
from bayesfl.federation.store.identity import identity
from bayesfl.study.cells import Record
from bayesfl.study.table import Table, read
from tests.cases import draws_elsewhere
from tests.study.made import DATA, bits, one


def deep(clients: FederatedData) -> nn.Module:
    """Draws for so long that other threads draw meanwhile."""
    layers = [layer for _ in range(15) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Linear(64, 10))


def seeding(clients: FederatedData) -> nn.Module:
    torch.manual_seed(3)
    return deep(clients)


def with_noise(clients: FederatedData) -> nn.Module:
    """Frozen weights of NumPy's generator, which the function seeds for itself."""
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10))
    np.random.seed(4)  # noqa: NPY002
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(np.random.randn(8, 64)))  # noqa: NPY002
    return model


def own_data(seed: int) -> FederatedData:
    """Data of generators that all threads share, seeded as people do."""
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    x = [np.random.randn(30, 64).astype("f4") + random.random() for _ in range(3)]  # noqa: NPY002
    y = [np.random.randint(0, 10, 30) for _ in range(3)]  # noqa: NPY002
    return bf.data.from_arrays(x, y, test=(x, y), validation=0.2, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model": seeding},
        {"model": with_noise},
        {"model": lambda clients, seed: bf.models.mlp(64, hidden=300, outputs=10, seed=seed)},
        {"model": deep, "data": own_data, "dtype": torch.float64},
    ],
    ids=["seeding", "noise", "lambda", "data in float64"],
)
def test_threads_train_what_they_record(tmp_path: Path, changes: dict[str, Any]):
    """Four at a time, while one more thread draws from torch's generator; nothing that all threads
    share is changed, and a run in one thread reads the records.
    """
    methods = {name: partial(bf.algorithms.fedavg, epochs=n) for n, name in enumerate("AB", 1)}
    study = one(methods=methods, rounds=1, **changes)
    alone = bits(study.run(tmp_path / "alone", progress=False))
    before = torch.get_num_threads()
    with joblib.parallel_config(backend="threading"), draws_elsewhere():
        assert bits(study.run(tmp_path / "threads", n_jobs=4, progress=False)) == alone
    assert torch.get_num_threads() == before
    names = [{file.name for file in (tmp_path / one).iterdir()} for one in ("alone", "threads")]
    assert names[0] == names[1]
    assert len(names[0]) == 4


def test_a_start_is_that_of_plain_torch():
    (cell, _) = one(model=deep).cells
    before = torch.get_rng_state()
    _, model = cell.federation()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(cell.seed)
    plain = deep(cell.data(seed=0)).state_dict()
    assert all(torch.equal(t, plain[name]) for name, t in model.state_dict().items())


def unseeded_model(clients: FederatedData) -> nn.Module:
    model = nn.Linear(64, 10)
    with torch.no_grad():
        model.bias.fill_(random.random())
    return model


def unseeded_buffer(clients: FederatedData) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 10))
    model.register_buffer("noise", torch.tensor(random.random()), persistent=False)
    return model


def unseeded_data(seed: int) -> FederatedData:
    x, y = [torch.rand(20, 64)] * 2, [torch.arange(20) % 10] * 2
    return bf.data.from_arrays(x, y, test=(x, y))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": unseeded_model}, "model"),
        ({"model": unseeded_buffer}, "model"),
        ({"data": unseeded_data}, "data"),
    ],
)
def test_what_no_seed_repeats_is_not_recorded(tmp_path: Path, changes: Any, name: str):
    table = one(**changes, seeds=[0]).run(tmp_path, progress=False)
    (row,) = table.rows
    assert f"{name} made something else of seed 0" in row.record.error["text"]
    assert not row.record.history.rows


class Slower:
    """A callback with options and a state, which ends a run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.seen = rounds, 0

    def __call__(self, result: Any) -> bool:
        self.seen += 1
        return self.seen >= self.rounds


class Drifting:
    """A measure that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, predictions: Any, labels: Any) -> float:
        self.asked += 1
        return float(self.asked)


SEEN: list[int] = []


def after(rounds: int) -> Callable[[Any], bool]:
    """Stop by a counter that the function closes over."""
    calls = 0

    def stop(run: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls >= rounds

    return stop


used = bf.callbacks.EarlyStopping("validation_nll", patience=1, keep="best")


@pytest.mark.parametrize(
    "made",
    [
        lambda: {"on_round": [bf.callbacks.EarlyStopping("validation_nll", patience=1)]},
        lambda: {"on_round": [used]},
        lambda: {"on_round": [Slower(2)]},
        lambda: {"on_round": [lambda run: SEEN.append(run.round)]},
        lambda: {"on_round": [after(2)]},
        lambda: {"measures": {"drift": Drifting()}},
    ],
)
def test_what_a_run_used_is_new_for_the_next(tmp_path: Path, made: Callable[[], dict[str, Any]]):
    """One study run again, and with what it was given used elsewhere between; every cell begins
    with the callback as it was given.
    """
    alone = [
        bits(one(rounds=3, seeds=[seed], **made()).run(tmp_path / "alone", progress=False))
        for seed in range(2)
    ]
    given = made()
    study = one(rounds=3, **given)
    first = bits(study.run(tmp_path, progress=False))
    assert first == [line for lines in alone for line in lines]
    clients = DATA(seed=5)
    method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10))
    bf.simulate(method, clients, rounds=3, **given)
    assert bits(study.run(tmp_path, progress=False)) == first
    assert len(list(tmp_path.glob("*.record"))) == 2
    SEEN.clear()
    again = one(rounds=3, seeds=[1, 0], **made()).run(tmp_path, progress=False)
    assert sorted(bits(again)) == sorted(first)
    assert len(list(tmp_path.glob("*.record"))) == 2


class Scaled(nn.Module):
    """A network whose factor is held as `hold` holds it."""

    def __init__(self, factor: float, hold: Callable[[nn.Module, float], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)
        self._read = found if isinstance(found := hold(self.inner, factor), float) else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self._read)


class Hook:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, module: nn.Module, args: Any) -> Any:
        return (args[0] * self._factor,)


def by_class(factor: float) -> type:
    class Own:
        read = factor

    return Own


HELD: dict[str, Callable[[nn.Module, float], Any]] = {
    "private": lambda inner, factor: factor,
    "lambda": lambda inner, factor: inner.register_forward_pre_hook(
        lambda module, args: (args[0] * factor,)
    ),
    "object": lambda inner, factor: inner.register_forward_pre_hook(Hook(factor)),
    "deque": lambda inner, factor: inner.register_forward_pre_hook(
        lambda module, args, held=deque([factor]): (args[0] * held[0],)
    ),
    "class": lambda inner, factor: inner.register_forward_pre_hook(
        lambda module, args, kind=by_class(factor): (args[0] * kind.read,)
    ),
}


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_networks_that_differ_anywhere_are_other_runs(tmp_path: Path, hold: Any):
    def made(factor: float) -> nn.Module:
        torch.manual_seed(0)
        return Scaled(factor, hold)

    table = one(model=lambda clients: made(1.0), seeds=[0]).run(tmp_path, progress=False)
    other = one(model=lambda clients: made(4.0), seeds=[0]).run(tmp_path, progress=False)
    assert bits(table) != bits(other)
    assert len(list(tmp_path.glob("*.record"))) == 2
    again = one(model=lambda clients: made(1.0), seeds=[0]).run(tmp_path, progress=False)
    assert bits(again) == bits(table)
    assert len(read(tmp_path).methods) == 2


def test_other_options_of_a_callback_are_another_run(tmp_path: Path):
    for patience in (1, 2, 1):
        stop = bf.callbacks.EarlyStopping("validation_nll", patience=patience)
        one(seeds=[0], on_round=[stop]).run(tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 2


PACKAGE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x):
        return self.inner(x) * {factor}

class Measure:
    def __call__(self, predictions, labels):
        return {factor}

def scaled(x):
    return x * {factor}
"""


@pytest.mark.parametrize("where", ["model", "measures", "transform", "nowhere"])
def test_code_of_another_package_is_known_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    """Of a network, of an object and of a function: another version of the text is another run."""
    installed = tmp_path / "site-packages" / "installed_elsewhere.py"
    installed.parent.mkdir()
    monkeypatch.syspath_prepend(str(installed.parent))

    def found(factor: float) -> tuple[str, str]:
        installed.write_text(PACKAGE.format(factor=factor))
        spec = importlib.util.spec_from_file_location(installed.stem, installed)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, installed.stem, module)
        exec(installed.read_text(), vars(module))
        described._package.cache_clear()  # as in a new process
        changes = {
            "model": {"model": lambda clients: module.Net()},
            "measures": {"measures": {"own": module.Measure()}},
            "transform": {"data": lambda seed: DATA(seed=seed).transformed(module.scaled)},
            "nowhere": {},
        }[where]
        cell = one(seeds=[0], **changes).cells[0]
        clients, model = cell.federation()
        method, _ = cell.algorithm(clients, model)
        return cell.address(clients, model), digest_of([identity(method), clients.hash])

    (first, plain), (again, _), (other, same) = found(1.0), found(1.0), found(2.0)
    assert first == again
    assert (first != other) == (where != "nowhere")
    assert plain == same  # a saved run is found again after an upgrade


def other_number(file: Path, other: Path) -> None:
    """A number changed in place, of as many digits."""
    text = file.read_bytes()
    place = text.index(b"personal_nll") + len(b'personal_nll\\": 0.')
    digit = b"1" if text[place : place + 1] != b"1" else b"2"
    file.write_bytes(text[:place] + digit + text[place + 1 :])


def of_another_kind(file: Path, other: Path) -> None:
    said, _ = archive.read_kind(file, "record")
    archive.write(file, "run", said, {})


def of_another_version(file: Path, other: Path) -> None:
    said, _ = archive.read_kind(file, "record")
    archive.write(file, "record", said | {"later": 1}, {})


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "another's": lambda file, other: shutil.copy(other, file),
    "swapped": lambda file, other: (
        file.rename(file.parent / "x"),
        other.rename(file),
        (file.parent / "x").rename(other),
    ),
    "a number": other_number,
    "cut": lambda file, other: file.write_bytes(file.read_bytes()[:-40]),
    "empty": lambda file, other: file.write_bytes(b""),
    "a kind": of_another_kind,
    "a version": of_another_version,
    "deleted": lambda file, other: file.unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_record_is_held_against_its_cell(tmp_path: Path, name: str):
    whole: Table = one(rounds=1).run(tmp_path, progress=False)
    file, other = sorted(tmp_path.iterdir())
    DAMAGE[name](file, other)
    assert bits(one(rounds=1).run(tmp_path, progress=False)) == bits(whole)
    assert sorted(tmp_path.iterdir()) == [file, other]
    assert Record.read(file).history.rows[-1]["round"] == 1


def test_a_kept_run_is_that_of_its_record(tmp_path: Path):
    """Data that do not depend on the seed: only the weights tell the runs apart."""
    study = one(data=lambda seed: DATA(seed=0), model=deep, rounds=1)
    table = study.run(tmp_path, progress=False, keep="result")
    one_run, other = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    shutil.copytree(other, one_run, dirs_exist_ok=True)
    wrong = 0
    for seed in (0, 1):
        try:
            assert table.result("FedAvg", seed).settings.seed == seed
        except RuntimeError as error:
            wrong += "holds another run than the record" in str(error)
    assert wrong == 1


@pytest.mark.slow
def test_two_studies_in_one_folder_at_once(tmp_path: Path):
    """In threads of one process; both find all numbers."""
    found: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(bits(one(model=deep).run(tmp_path, progress=False)))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == bits(one(model=deep).run(tmp_path / "alone", progress=False))
