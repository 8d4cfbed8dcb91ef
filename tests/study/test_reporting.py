"""Reports of studies, and the table that a folder alone gives."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.study.cells import Record
from bayesfl.study.table import Table, read
from tests.browser import assert_fits, needs_browser
from tests.study.made import DATA, network, one


def test_a_study(table: Table, tmp_path: Path):
    """Every method with its means, the options that were chosen, all runs."""
    table.report(tmp_path / "report.html")
    found = (tmp_path / "report.html").read_text()
    titles = [part.partition("</h2>")[0] for part in found.split("<h2>")[1:]]
    assert titles == [
        *("Methods", "Options and notes", "Learning curves"),
        *("Cost of a round", "Runs", "Environment"),
    ]
    for estimate in (of["personal_nll"] for of in table.summary().values()):
        assert f'data-value="{estimate.mean}">{estimate}</td>' in found
    assert "Options chosen by validation_nll" in found
    assert ">error</th>" not in found  # as no run failed
    assert "Mean ± standard error over seeds" in found
    alone = replace(table, rows=tuple(row for row in table.rows if row.seed == 0))
    alone.report(tmp_path / "alone.html")
    assert "One seed gives no standard error" in (tmp_path / "alone.html").read_text()


def test_a_folder_has_the_table(tmp_path: Path):
    """Of what is finished, without the code of its methods."""
    made = one().run(tmp_path, progress=False)
    (tmp_path / "notes.json").write_text("[]")
    found = read(tmp_path)
    assert str(found) == str(made)
    assert [row.seed for row in found.rows] == [0, 1]
    with pytest.raises(ValueError, match="no runs of a study"):
        read(tmp_path / "elsewhere")


def test_a_folder_has_the_options(table: Table, tmp_path: Path):
    """By which methods are chosen, in words."""
    for row in table.rows:
        words = {name: repr(value) for name, value in row.options.items()}
        record = replace(row.record, method=row.method, options=words, seed=row.seed)
        record.write(tmp_path / f"{record.address}.record")
    found, wanted = read(tmp_path).summary(), table.summary()
    assert {name: dict(found[name]) for name in found} == {
        name: dict(wanted[name]) for name in wanted
    }


def test_a_folder_of_a_study_that_runs(ran: tuple[Path, Table], tmp_path: Path):
    """Seeds that some methods lack are told of, in the table and in the report."""
    folder, made = ran
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert not read(tmp_path).notes
    lacks = next(row for row in made.rows if row.method == "FedAvg")
    for file in tmp_path.glob("*.record"):
        found = Record.read(file)
        if (found.method, found.seed) == (lacks.method, lacks.seed):
            file.unlink()
    found = read(tmp_path)
    assert "lack seeds that others have" in str(found)
    found.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "lack seeds that others have" in text
    assert "not all with the same seeds and data" in text


SCALE = [1.0]


def scaled(clients: FederatedData) -> nn.Module:
    """Reads a global number, which its own text does not show."""
    return bf.models.mlp(clients.inputs, hidden=8, outputs=10, head_scale=SCALE[0])


@pytest.mark.parametrize(
    ("one_way", "other", "words"),
    [
        ({"rounds": 1}, {"rounds": 2}, ("rounds 1", "rounds 2")),
        ({}, {"participation": 0.5}, ("", "participation 0.5")),
        ({"steps": 2}, {"steps": 3}, ("steps 2", "steps 3")),
        ({"dtype": torch.float64}, {}, ("dtype torch.float64", "")),
        (
            {"methods": {"FedAvg": partial(bf.algorithms.fedavg, epochs=2)}},
            {},
            ("method.epochs 2", "method.epochs 1"),
        ),
        ({"data": partial(DATA, alpha=2.0)}, {}, ("data.alpha 2.0", "data.alpha 1.0")),
        ({"model": lambda c: bf.models.mlp(64, hidden=3, outputs=10)}, {}, ("<lambda>", "network")),
        (
            {"on_round": [bf.callbacks.EarlyStopping("validation_nll", patience=1)]},
            {"on_round": [bf.callbacks.EarlyStopping("validation_nll", patience=2)]},
            ("on_round", "on_round"),
        ),
        ({"measures": {"a": lambda p, y: 1.0}}, {"measures": {"a": lambda p, y: 2.0}}, ("m", "m")),
    ],
)
@pytest.mark.parametrize("seeds", [(range(2), range(2)), (range(2), range(2, 4))])
def test_what_differs_in_more_than_its_seed_is_a_row(
    tmp_path: Path, one_way: Any, other: Any, words: tuple[str, str], seeds: Any
):
    """Every row of a folder has the mean and the error of one study alone."""
    made = [
        one(**{"seeds": which, "rounds": 1, **changes}).run(tmp_path, progress=False)
        for which, changes in zip(seeds, (one_way, other), strict=True)
    ]
    found = read(tmp_path).summary(["personal_nll"])
    wanted = {str(t.summary(["personal_nll"])["FedAvg"]["personal_nll"]) for t in made}
    assert {str(of["personal_nll"]) for of in found.values()} == wanted
    assert len(found) == 2
    assert all(any(word in name for name in found) for word in words)
    with pytest.raises(KeyError):
        found["FedAvg (rounds 9)"]


def test_no_row_has_a_seed_twice(tmp_path: Path):
    """Two versions of a function that no text shows: every run is a row, without an error."""
    for scale in (1.0, 2.0):
        SCALE[0] = scale
        one(seeds=range(2), model=scaled).run(tmp_path, progress=False)
    found = read(tmp_path).summary(["personal_nll"])
    assert len(found) == 4
    assert all(np.isnan(of["personal_nll"].error) for of in found.values())


def test_results_that_are_given_twice_or_mixed_are_rows():
    clients, model = DATA(seed=0), network(DATA(seed=0))

    def ran(rounds: int, seed: int, **options: Any) -> Any:
        method = bf.algorithms.fedavg(model, **options)
        return bf.simulate(method, clients, rounds=rounds, seed=seed, progress=False)

    first, second = ran(1, 0), ran(1, 1)
    summary = bf.table({"A": [first, second], "B": [first, ran(2, 1)], "C": [first, first]})
    assert summary.methods == ("A", "B (rounds 1)", "B (rounds 2)", "C (run 4)", "C (run 5)")
    mixed = bf.table({"A": [first, second, ran(1, 2, epochs=2)]}).summary(["personal_nll"])
    assert [of["personal_nll"].seeds for of in mixed.values()] == [2, 1]


def test_a_file_that_is_no_whole_record_is_named(tmp_path: Path):
    one().run(tmp_path, progress=False)
    first, second = sorted(tmp_path.iterdir())
    second.write_bytes(first.read_bytes())
    with pytest.warns(UserWarning, match=f"{second.stem}.*left out"):
        assert len(read(tmp_path).rows) == 1


def test_rounds_that_seeds_do_not_share(tmp_path: Path):
    """No curves; numbers with commas are sorted as numbers."""
    clients = bf.data.iid("digits", clients=2)
    method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10), epochs=1)
    runs = [
        bf.simulate(
            method,
            clients,
            rounds=6,
            evaluate_every=3,
            seed=seed,
            on_round=[lambda run, last=last: run.round == last],
        )
        for seed, last in enumerate((2, 6))
    ]
    bf.table({"FedAvg": runs}).report(tmp_path / "report.html")
    found = (tmp_path / "report.html").read_text()
    assert "Learning curves" not in found
    assert 'data-value="1240.0">1,240</td>' in found


def test_in_notebooks(table: Table):
    """The summary as a table; where options cannot be chosen, why not."""
    assert "±" in table.summary()._repr_html_()


@needs_browser
@pytest.mark.slow
def test_it_fits(table: Table, tmp_path: Path):
    table.report(tmp_path / "report.html")
    assert_fits(tmp_path / "report.html")
