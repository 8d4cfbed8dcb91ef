"""The benchmarks as commands: what a machine lacks is one line."""

import runpy
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "device 'cuda' is absent"),
        (("--device", "nonsense"), "device 'nonsense' is absent"),
        (("--device", "cpu"), "--device cpu is no GPU, whose figures these are; pass --quick as well"),
    ],
)
def test_figures_of_a_gpu_need_one(given, words, monkeypatch, capsys):
    """Refused at the start, and nothing is written."""
    if not given and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    path = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    monkeypatch.setattr(sys, "argv", [str(path), *given])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(path), run_name="__main__")
    assert caught.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


SELECTION = Path(__file__).parents[1] / "benchmarks" / "selection.py"


def test_the_corner_that_is_lit_was_constant_in_training():
    """Nine pixels differ from the test images', none of which any training image changes, and they are as light as can be."""
    study = runpy.run_path(str(SELECTION))
    data = study["images"]("digits", "[-1, 1]", 0, study["QUICK"], None)
    lit, plain, train = (x.flatten(1) for x in (data.lit, data.test[: len(data.lit)], data.x))
    changed = (lit != plain).any(0)
    assert 0 < changed.sum() <= study["PATCH"]
    assert (train[:, changed] == -1).all()
    assert (lit[:, changed] == 1).all()
    assert (data.changed(data.x) == 0).all()
    assert data.changed(data.lit).min() >= changed.sum()


def test_the_study_of_rules_runs(monkeypatch, capsys):
    """Its smallest parts, on digits, which write nothing."""
    before = {path: path.read_bytes() for path in (SELECTION.parent / "results").glob("*.json")}
    monkeypatch.setattr(sys, "argv", [str(SELECTION), "--quick", "--parts", "pooled", "control"])
    runpy.run_path(str(SELECTION), run_name="__main__")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("MAP, one temperature", "whole body", "5 %: wasserstein", "changed constant pixels"))
    assert before == {path: path.read_bytes() for path in before}


def test_the_page_on_selection_shows_what_was_made():
    """Its tables are those that the committed results give."""
    root = SELECTION.parents[1]
    tables = runpy.run_path(str(root / "docs" / "tables.py"))
    assert tables["selection"]() in (root / "docs" / "selection.md").read_text()
