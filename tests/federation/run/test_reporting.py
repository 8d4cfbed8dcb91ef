"""Reports of runs: what is in them, with data and without."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from bayesfl.calibration import Conformal

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.reporting import write_report
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from tests.browser import assert_fits, needs_browser


@pytest.fixture(scope="module")
def wards() -> FederatedData:
    clients = bf.data.dirichlet("digits", clients=3, alpha=1.0, max_size=60, calibration=0.3)
    return replace(clients, client_names=("Basel", "<Chur>", "Visp & Brig"))


@pytest.fixture(scope="module")
def method(wards: FederatedData) -> bf.Algorithm:
    return bf.algorithms.pfedvem(bf.models.mlp(wards.inputs, hidden=5, outputs=wards.outputs))


@pytest.fixture(scope="module")
def run(method: bf.Algorithm, wards: FederatedData) -> Result:
    options = {"record_clients": ("accuracy",), "progress": False}
    return bf.simulate(method, wards, rounds=2, **options)


@pytest.fixture(scope="module")
def report(run: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "report.html"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few rows to calibrate on
        calibrated = run.calibrate(Conformal(split="calibration"))
    calibrated.report(path)
    return path


def titles(path: Path) -> list[str]:
    return [part.partition("</h2>")[0] for part in path.read_text().split("<h2>")[1:]]


def test_a_calibrated_run(run: Result, report: Path):
    """Every part is there, names are escaped, and the numbers are those of the run's own table."""
    assert titles(report) == [
        *("Clients", "Reliability", "Coverage", "Learning curves"),
        *("Data", "What was sent", "Settings", "Environment"),
    ]
    found = report.read_text()
    assert "&lt;Chur&gt;" in found
    assert "<Chur>" not in found
    for accuracy in run.table()["accuracy"]:
        assert f'data-value="{accuracy}"' in found
    assert found.count("most frequent class") == 2  # at the top, and by client
    for often in run.table()["most_frequent"]:
        assert f'data-value="{often}"' in found
    sent = run.algorithm.uplink(run.server)
    assert all(f'<th scope="row">{name}</th>' in found for name in sent)
    for fact in ("rounds</dt><dd>2", "beta</dt><dd>0.0", "score</dt><dd>lac"):
        assert f"<dt>{fact}</dd>" in found


def test_a_saved_run(run: Result, method: bf.Algorithm, tmp_path: Path):
    """Without its data a run has what its history tells of clients; its file alone says the
    same.
    """
    run.save(tmp_path)
    bf.load(tmp_path, method).report(tmp_path / "loaded.html")
    write_report(tmp_path / "alone.html", files.read(tmp_path, files.RUN))
    for name in ("loaded.html", "alone.html"):
        assert titles(tmp_path / name)[:3] == ["Clients", "Learning curves", "Data"]
        found = (tmp_path / name).read_text()
        assert "As recorded in round 2." in found
        assert f'data-value="{run.history.clients("personal_accuracy")[-1][0]}"' in found


def test_a_saved_run_that_is_calibrated(run: Result, tmp_path: Path):
    """Its measures are those of its training, and it says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few rows to calibrate on
        run.calibrate(Conformal(split="calibration")).save(tmp_path)
    write_report(tmp_path / "report.html", files.read(tmp_path, files.RUN))
    assert "before the steps of calibration" in (tmp_path / "report.html").read_text()


def test_numbers_and_no_test_rows(tmp_path: Path):
    """Regressions have a diagram of their own; without test rows there are no measures."""
    clients = bf.data.iid("diabetes", clients=2)
    model = bf.models.mlp(clients.inputs, hidden=3, outputs=1)
    method = bf.algorithms.fedavg(model, likelihood=bf.likelihoods.Gaussian())
    run = bf.simulate(method, clients, rounds=1, progress=False)
    run.report(tmp_path / "report.html")
    assert titles(tmp_path / "report.html")[:2] == ["Clients", "Reliability"]
    assert "<dt>RMSE</dt>" in (tmp_path / "report.html").read_text()
    alone = replace(clients, splits={"train": clients.train})
    run = bf.simulate(method, alone, rounds=1, evaluate_every=None, progress=False)
    run.report(tmp_path / "report.html")
    assert titles(tmp_path / "report.html")[:2] == ["Clients", "Data"]


@needs_browser
@pytest.mark.slow
def test_it_fits(report: Path):
    assert_fits(report)
