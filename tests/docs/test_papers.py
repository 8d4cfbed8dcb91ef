"""Tables of papers by one command: cells that are there stay, choices are by validation data."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.optim import SGD
from benchmarks import script
from benchmarks.papers import Part, common, quality
from benchmarks.papers import __main__ as entry

WIDTH = 16


def trained(model, rate):
    return bf.algorithms.fedavg(model, batch_size=5, optimiser=SGD(rate, momentum=0.9))


def broken(model):
    raise ValueError("it has no place here")


def parts(size):
    part = Part(
        data=partial(bf.data.iid, "digits", clients=2, max_size=60, validation=0.2),
        model=lambda clients, seed: bf.models.mlp(64, hidden=WIDTH, outputs=10, seed=seed),
        methods={"FedAvg": trained, "Broken": broken},
        rounds=2,
        seconds=1800,
        seeds=(0, 1),
        grid={"FedAvg": {"rate": (1e-5, 0.05)}},
    )
    return {"digits": part}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the entry on a paper of two methods, with results in a folder of their own."""
    toy = SimpleNamespace(parts=parts, PUBLISHED={"FedAvg": {"accuracy": 50.0}}, PLACE="Table 1")
    monkeypatch.setitem(sys.modules, "benchmarks.papers.toy", toy)
    monkeypatch.setattr(entry, "NAMES", ["toy"])
    monkeypatch.setattr(entry, "tree", lambda: report.environment()["commit"].split("-")[0])
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "results" / "papers").mkdir(parents=True)
    file = tmp_path / "results" / "papers" / "toy.json"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["papers", "toy", *words])
        entry.main()
        saved = json.loads(file.read_text()) if file.exists() else {}
        return saved, capsys.readouterr().out.splitlines()

    return run


def test_a_table_cell_by_cell(command):
    """Two choices and two seeds of each method; a finished table runs nothing, one from which a
    cell was deleted that cell alone; the hours are said before.
    """
    saved, shown = command()
    assert shown[0] == "6 runs are left, about 3.0 hours"
    assert len(shown) == 7
    cells = saved["cells"]
    assert set(cells) == {
        *(f"digits/FedAvg/validation/rate {rate}" for rate in ("1e-05", "0.05")),
        *(f"digits/{method}/{seed}" for method in ("FedAvg", "Broken") for seed in (0, 1)),
    }
    small, large = (cells[f"digits/FedAvg/validation/rate {r}"]["value"] for r in ("1e-05", "0.05"))
    assert large > small
    assert cells["digits/FedAvg/1"]["options"] == {"rate": 0.05}
    assert cells["digits/Broken/0"]["error"] == "ValueError: it has no place here"
    assert saved["plan"]["digits"] == {
        "methods": ["FedAvg", "Broken"],
        "seeds": [0, 1],
        "rounds": 2,
    }
    assert (saved["place"], saved["published"]["FedAvg"]) == ("Table 1", {"accuracy": 50.0})
    often = parts("reduced")["digits"].data(seed=1).most_frequent("test")
    assert cells["digits/FedAvg/1"]["often"] == pytest.approx(often.mean())
    assert command()[1] == ["0 runs are left, about 0.0 hours"]
    before = cells["digits/FedAvg/1"].pop("rows")["FedAvg"]
    del cells["digits/FedAvg/1"]
    script.write("papers/toy", **saved)
    again, shown = command()
    assert [line.split(":")[0] for line in shown[1:]] == ["digits/FedAvg/1"]
    now = again["cells"]["digits/FedAvg/1"]["rows"]["FedAvg"]
    assert now["accuracy"] == before["accuracy"]


def test_another_choice_is_run_anew(command):
    """Where the results of choices say that another value is the better one; likewise cells of a
    tree with changes.
    """
    saved, _ = command()
    saved["cells"]["digits/FedAvg/validation/rate 1e-05"]["value"] = 2.0
    saved["cells"]["digits/Broken/0"]["environment"]["commit"] += "-dirty"
    script.write("papers/toy", **saved)
    again, shown = command()
    assert [line.split(":")[0] for line in shown[1:]] == [
        "digits/FedAvg/0",
        "digits/Broken/0",
        "digits/FedAvg/1",
    ]
    assert again["cells"]["digits/FedAvg/0"]["options"] == {"rate": 1e-5}


def test_cells_of_two_machines(command, tmp_path):
    """Those that are here stay, others are added; nothing is run."""
    saved, _ = command()
    other = {"digits/Ditto/0": {"options": {}}, "digits/Broken/0": {"options": {"x": 1}}}
    (tmp_path / "other.json").write_text(json.dumps({"cells": other}))
    merged, shown = command("--merge", str(tmp_path / "other.json"))
    assert shown == []
    assert merged["cells"] == saved["cells"] | {"digits/Ditto/0": {"options": {}}}


def test_quality_is_that_of_the_result():
    """Measures before one temperature are the result's own; afterwards those of the calibrated
    result.
    """
    part = parts("reduced")["digits"]
    clients = part.data(seed=0)
    result = bf.simulate(trained(part.model(clients, seed=0), 0.05), clients, rounds=2)
    found = quality(result)
    warm = result.calibrate(bf.calibration.Temperature(strength=torch.inf))
    for one, suffix in ((result, ""), (warm, "_tempered")):
        summary = one.predict().summary(clients.test)
        for key in ("nll", "ece", "brier"):
            assert found[f"{key}{suffix}"] == pytest.approx(summary[key])
    assert found["accuracy"] == result.predict().summary(clients.test)["accuracy"]


def test_rates_are_multiplied():
    """Those of clients alone; batches are of one size."""
    model = bf.models.mlp(64, hidden=4, outputs=10)
    method = common.rated(bf.algorithms.fedpac, model, 10.0)
    assert [phase.optimiser.rate for phase in method.phases if hasattr(phase, "optimiser")] == [
        1.0,
        0.1,
    ]
    made = common.rated(bf.algorithms.pfedhn, model, 10.0).made.options
    assert made["optimiser"].rate == pytest.approx(5e-2)
    assert made.get("server_optimiser", SGD(1e-2)).rate == 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("paper", entry.NAMES)
def test_every_paper_runs(paper, monkeypatch, capsys):
    """At toy size, which writes nothing; every published row belongs to a method."""
    before = {file: file.read_bytes() for file in script.RESULTS.rglob("*.json")}
    monkeypatch.setattr(sys, "argv", ["papers", paper, "--quick"])
    entry.main()
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + int(shown[0].split()[0])
    assert before == {file: file.read_bytes() for file in script.RESULTS.rglob("*.json")}
