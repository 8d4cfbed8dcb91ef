"""The benchmarks as commands: what a machine lacks is one line."""

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from benchmarks.papers import fedem


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "device 'cuda' is absent"),
        (("--device", "nonsense"), "device 'nonsense' is absent"),
        (("--device", "cpu"), r"--device cpu .*GPU.* --quick"),
    ],
)
def test_figures_of_a_gpu_need_one(given, words, monkeypatch, capsys):
    """Refused at the start, and nothing is written."""
    if not given and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    path = str(BENCHMARKS / "gpu.py")
    monkeypatch.setattr(sys, "argv", [path, *given])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(path, run_name="__main__")
    assert caught.value.code == 2
    assert re.search(words, capsys.readouterr().err.splitlines()[-1])


ENVIRONMENT = {
    "commit": "0123456789",
    "date": "2026-11-01",
    "cpu": "a processor",
    "cores": 2,
    "torch": "2.11",
}


def cell(low: float, step: float) -> dict[str, Any]:
    """Accuracies that rise evenly with the share of the colour."""
    row = {f"p{p}": low + step * i for i, p in enumerate((0.1, 0.2, 0.3, 0.4, 0.5))}
    row |= {"worst": low, "average": low + 2 * step, "held_back": 0.7}
    return {"row": row, "chosen": {"rate": 1e-3}, "environment": ENVIRONMENT}


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SELECTION = BENCHMARKS / "selection.py"


@pytest.fixture
def quick(monkeypatch, capsys):
    """Run a study's smallest parts, which must write nothing: its names, and what it prints."""

    def run(path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
        before = {file: file.read_bytes() for file in (BENCHMARKS / "results").rglob("*.json")}
        monkeypatch.setattr(sys, "argv", [str(path), "--quick", *arguments])
        study = runpy.run_path(str(path), run_name="__main__")
        assert before == {
            file: file.read_bytes() for file in (BENCHMARKS / "results").rglob("*.json")
        }
        return study, capsys.readouterr().out

    return run


def test_the_corner_that_is_lit_was_constant_in_training():
    """Nine pixels differ from the test images', none of which any training image changes, and they
    are as light as can be.
    """
    study = runpy.run_path(str(SELECTION))
    data = study["images"]("digits", "[-1, 1]", 0, study["QUICK"])
    lit, plain, train = (x.flatten(1) for x in (data.lit, data.test[: len(data.lit)], data.x))
    changed = (lit != plain).any(0)
    assert 0 < changed.sum() <= study["PATCH"]
    assert (train[:, changed] == -1).all()
    assert (lit[:, changed] == 1).all()
    assert (data.changed(data.x) == 0).all()
    assert data.changed(data.lit).min() >= changed.sum()


def test_the_study_of_rules_runs(quick):
    """Its smallest parts, on digits."""
    _, shown = quick(SELECTION, "--parts", "pooled", "control")
    assert all(
        name in shown
        for name in (
            "MAP, one temperature",
            "whole body",
            "5 %: wasserstein",
            "changed constant pixels",
        )
    )


def test_results_are_written_with_what_made_them(tmp_path, monkeypatch):
    """Once, from runs in a folder that stays; nothing for `--quick`."""
    monkeypatch.setattr(sys, "argv", ["x.py"])
    module = runpy.run_path(str(BENCHMARKS / "script.py"))
    monkeypatch.setitem(module["main"].__globals__, "RESULTS", tmp_path)
    monkeypatch.setitem(module["runs"].__wrapped__.__globals__, "ROOT", tmp_path)
    told = []

    def results(folder, *, quick, jobs):
        told.append(folder)
        study = bf.Study(
            data=lambda seed: bf.data.iid("digits", clients=2, seed=seed),
            model=lambda clients: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
            methods={"FedAvg": bf.algorithms.fedavg},
            rounds=1,
        )
        rows = study.run(folder, n_jobs=jobs, progress=False).rows
        return {"cells": {f"FedAvg/{row.seed}": module["cell"](row, row={}) for row in rows}}

    for words in (["--quick"], []):
        monkeypatch.setattr(sys, "argv", ["x.py", *words])
        module["main"](None, "papers/x", results)
    scratch, kept = told
    assert (scratch.exists(), len(list(kept.glob("*.record")))) == (False, 1)
    saved = json.loads((tmp_path / "papers" / "x.json").read_text())
    assert saved["command"] == "python benchmarks/papers/x.py"
    assert saved["cells"]["FedAvg/0"]["environment"]["torch"] == torch.__version__


def test_weights_are_compared_in_the_best_order():
    """The same order of components for all clients; the sum over components, the mean over
    clients.
    """
    distance = fedem.l1
    true = np.array([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]])
    assert distance(true[:, [2, 0, 1]], true) == 0
    assert distance(np.full((2, 3), 1 / 3), true) == pytest.approx(
        np.mean([2 * (0.7 - 1 / 3), 2 * (1 / 3 - 0.1)])
    )
    assert distance(true[:, [2, 0, 1]] + [[0.1, -0.1, 0], [0, 0, 0]], true) == pytest.approx(0.1)


def test_pfedme_by_proximal_sgd_by_hand():
    """Every client goes on from its own model, with weight decay, pulled towards the mean of the
    last round's by size; no momentum.
    """
    clients = bf.data.linear_mixture(clients=3, inputs=4, test=5)
    model = torch.nn.Linear(4, 1)
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    algorithm = fedem.proximal(model, 0.3)
    (step,) = algorithm.phases
    algorithm = replace(algorithm, phases=(replace(step, batch_size=None),))
    options = {"rounds": 4, "dtype": torch.float64, "evaluate_every": None, "progress": False}
    result = bf.simulate(algorithm, clients, **options)
    own, centre, n = [start] * 3, start, torch.from_numpy(clients.train.counts).double()
    for rate in (0.3, 0.3, 0.03, 0.003):
        for j in range(3):
            x, y = (t.double() for t in clients.train.client(j))
            w = own[j]
            residual = (x @ w[:4] + w[4]).sigmoid() - y
            gradient = torch.cat([x.T @ residual / len(x), residual.mean()[None]])
            own[j] = w - rate * (gradient + 5e-4 * w + 1.0 * (w - centre))
        centre = sum(m * w for m, w in zip(n, own, strict=True)) / n.sum()
    assert_close(result.private["w"]["loc"], torch.stack(own), atol=1e-12, rtol=0)
    assert_close(result.server["w"]["loc"], centre, atol=1e-12, rtol=0)
    probs = result.predict().client(1).probs
    assert probs is not None
    x = clients.test.client(1)[0].double()
    assert_close(probs[:, 1], (x @ own[1][:4] + own[1][4]).sigmoid())


def test_fedavg_plus_is_one_more_epoch_at_the_rate_of_the_run():
    """As the authors' code takes before every evaluation: with the schedule, which has fallen a
    hundredfold at the end.
    """
    (finetune,) = fedem.METHODS["FedAvg+"](torch.nn.Linear(4, 1), rate=0.3).finetune
    optimiser = finetune.optimiser
    assert (finetune.epochs, finetune.steps, finetune.batch_size) == (1, None, 128)
    assert (optimiser.momentum, optimiser.weight_decay) == (0.9, 5e-4)
    rates = [optimiser.rate(round, 200) for round in (99, 100, 199)]
    assert rates == pytest.approx([0.3, 0.03, 0.003])


def test_claims_about_the_coloured_sets(tmp_path):
    """By means over seeds: what holds, what does not, what is open where a method has not run; the
    page shows what there is.
    """
    tables = runpy.run_path(str(BENCHMARKS.parent / "docs" / "tables.py"))
    worst = {
        "FedAvg": 0.1,
        "Ditto": 0.12,
        "FedAvg-FT": 0.1,
        "pFedMe": 0.15,
        "IRM": 0.6,
        "IRM-L2": 0.5,
        "IRM-FT": 0.65,
        "PerInvFL-IRM": 0.55,
    }
    cells = {}
    for method, low in worst.items():
        for seed, shift in ((0, -0.01), (1, 0.01)):
            cells[f"rc-mnist, upright/{method}/{seed}"] = cell(low + shift, (0.7 - low) / 4)
    cells["coloured mnist, central/IRM/0"] = {
        "row": {"training": 0.7, "test": 0.65},
        "environment": ENVIRONMENT,
    }

    def shown(cells):
        (tmp_path / "papers").mkdir(exist_ok=True)
        saved = {
            "command": "python x.py",
            "cells": cells,
            "published": {"IRM": {"training": 70.8, "test": 66.9}},
        }
        (tmp_path / "papers" / "perinvfl.json").write_text(json.dumps(saved))
        tables["perinvfl"].__globals__["RESULTS"] = tmp_path
        return tables["perinvfl"]()

    open_ones = shown(cells)
    assert open_ones.count("| open |") == 3, "three claims need PerInvFL-DRO"
    for words in (
        "| MNIST, upright | PerInvFL-IRM over IRM-FT | -0.100 ± 0.000 | 0 of 2 |",
        "| IRM-L2 and IRM-FT are worse than IRM, on average | does not hold |",
        "| not a claim of the paper: IRM is above FedAvg at p = 0.1 | holds |",
        "Made by `python x.py`, 2026-11-01, a processor, 2 cores, torch 2.11, at 0123456: 17 "
        "cells, all from clean working trees.",
    ):
        assert words in open_ones
    # Spreads: IRM 0.1, FedAvg's row at least 0.55, PerInvFL-IRM 0.15.
    for low, step, best, spread in (
        (0.68, 0.01, "holds", "holds"),
        (0.3, 0.01, "does not hold", "holds"),
        (0.3, 0.1, "does not hold", "holds"),
    ):
        for seed in (0, 1):
            cells[f"rc-mnist, upright/PerInvFL-DRO/{seed}"] = cell(low, step)
        found = shown(cells)
        assert f"| the best worst case is PerInvFL's | {best} |" in found
        assert f"FedAvg-FT and pFedMe | {spread} |" in found
    assert "| MNIST, upright | PerInvFL-IRM over IRM-FT | -0.100" in found
    for seed in (0, 1):
        cells[f"rc-mnist, upright/PerInvFL-IRM/{seed}"]["row"]["p0.1"] = 0.2
    assert "FedAvg-FT and pFedMe | does not hold |" in shown(cells)


@pytest.mark.slow
def test_the_same_digits(quick):
    """On a part of the rows, where every difference is rounding or the rivals' tolerance."""
    pytest.importorskip("statsmodels", reason="statsmodels is not installed")
    pytest.importorskip("lifelines", reason="lifelines is not installed")
    study, shown = quick(BENCHMARKS / "same_digits.py")
    # Where sites hardly differ, as on these rows, MixedLM ends without a maximum.
    whole = [line for line in shown.splitlines() if ", random intercept" not in line]
    apart = [float(found) for found in re.findall(r"coefficient (\S+?)[,;]", "\n".join(whole))]
    # Of regressions, weights, a formula, Cox's five, curves, their test, and the cut one.
    assert len(apart) == 2 * len(study["CHOSEN"]) + 2 + 8
    assert max(apart) < 1e-5
