"""Reports of studies, and the table that a folder alone gives."""

from dataclasses import replace
from pathlib import Path

import pytest

import bayesfl as bf
from bayesfl.study.cells import Record
from bayesfl.study.table import Table, read
from tests.browser import assert_fits, needs_browser
from tests.study.made import one, study


def test_a_study(table: Table, tmp_path: Path):
    """Every method with its means, the options that were chosen, all runs."""
    table.report(tmp_path / "report.html")
    found = (tmp_path / "report.html").read_text()
    titles = [part.partition("</h2>")[0] for part in found.split("<h2>")[1:]]
    assert titles == [
        *("Methods", "Options and notes", "Learning curves", "Clients"),
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


def test_a_folder_of_a_study_that_runs(tmp_path: Path):
    """Seeds that some methods lack are told of, in the table and in the report."""
    made = study().run(tmp_path, progress=False)
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


def test_rounds_that_seeds_do_not_share(tmp_path: Path):
    """No curves; numbers with commas are sorted as numbers."""
    clients = bf.data.iid("digits", clients=2)
    method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=4, outputs=10), epochs=1)
    runs = [
        bf.simulate(method, clients, rounds=rounds, evaluate_every=every, seed=every)
        for rounds, every in ((2, 1), (6, 3))
    ]
    bf.table({"FedAvg": runs}).report(tmp_path / "report.html")
    found = (tmp_path / "report.html").read_text()
    assert "Learning curves" not in found
    assert 'data-value="1240.0">1,240</td>' in found


def test_in_notebooks(table: Table):
    """The summary as a table; where options cannot be chosen, why not."""
    assert "personal NLL" in table._repr_html_()
    assert "±" in table.summary()._repr_html_()
    assert "<pre>" in Table(())._repr_html_()


@needs_browser
@pytest.mark.slow
def test_it_fits(table: Table, tmp_path: Path):
    table.report(tmp_path / "report.html")
    assert_fits(tmp_path / "report.html")
