"""Tables that align, tables and records in files, a record of the machine."""

import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.evaluation.report import Column, table

ROWS = {
    "FedAvg": {"accuracy": [0.811, 0.807], "nll": [0.5, 0.6]},
    "Ditto": {"accuracy": [0.9, 0.84], "nll": [12.3, 14.3], "seconds": 3.0},
    "diverged": {"accuracy": [math.nan, 0.3]},
}


def test_mean_and_error():
    """std(ddof=1) / sqrt(n); one seed has no error, none has no mean."""
    for values, wanted in (
        ([1.0, 2.0, 6.0], (3.0, math.sqrt(7 / 3))),
        (torch.tensor([2.0]), (2.0, math.nan)),
        ([], (math.nan, math.nan)),
        ([1, math.nan], (math.nan, math.nan)),
    ):
        assert report.mean_and_error(values) == pytest.approx(wanted, nan_ok=True)


def test_text_table():
    """Numbers aligned at the point and the sign, the best marked, what is missing a dash."""
    text = table(
        ROWS,
        columns=[Column("accuracy", better="higher"), Column("nll", better="lower"), "seconds"],
    )
    assert str(text).splitlines() == [
        "method          accuracy              NLL  seconds",
        "--------  --------------  ---------------  -------",
        "FedAvg    0.809 ± 0.002    0.550 ± 0.050*        -",
        "Ditto     0.870 ± 0.030*  13.300 ± 1.000     3.000",
        "diverged    nan                -                 -",
    ]


def test_markdown_table():
    """Valid markdown with bars escaped, the best in bold, columns of equal width."""
    lines = table(
        ROWS | {"a|b": {"accuracy": [0.5]}},
        columns=[Column("accuracy", better="higher"), "nll"],
    )
    lines = lines.to_markdown().splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "method",
        "accuracy",
        "NLL",
    ]
    assert set(lines[1]) == set("|-: ")
    assert "| **0.870 ± 0.030** |" in lines[3]
    assert "| a\\|b " in lines[5]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("name", "markdown", "text"),
    [
        ("a|b", "a\\|b", "a|b"),
        ("a\\|b", "a\\\\\\|b", "a\\|b"),  # the backslash, too: `\\|` would end the cell
        ("one\ntwo\r\nthree", "one two three", "one two three"),
        ("<script>`x`*", "\\<script>\\`x\\`\\*", "<script>`x`*"),
        ("![a](http://b)", "![a\\](http://b)", "![a](http://b)"),
        ("sex[m] & age > 5", "sex[m] \\& age > 5", "sex[m] & age > 5"),
    ],
)
def test_a_name_is_one_cell(name: str, markdown: str, text: str):
    """As it is written: no markup, no other cell, no other line."""
    found = table({name: {"nll": [1.0]}})
    for told, wanted in ((found.to_markdown(), markdown), (str(found), text)):
        lines = told.splitlines()
        assert len(lines) == 3
        assert wanted in lines[2]
    study = bf.table({name: bf.simulate(*small(), rounds=1, progress=False)})
    assert all(markdown in part for part in study.to_markdown().split("\n\n")[:2])


def small() -> tuple[bf.Algorithm, bf.data.FederatedData]:
    clients = bf.data.from_arrays([torch.ones(8, 2)] * 2, [torch.arange(8) % 2] * 2)
    return bf.algorithms.fedavg(nn.Linear(2, 2), epochs=1), clients


def test_nothing_is_marked_unasked():
    """Neither style marks a column that does not say which end is better, nor a lone method."""
    assert "*" not in str(table(ROWS))
    assert "*" not in table(ROWS).to_markdown()
    assert "*" not in str(table({"only": {"nll": [1.0]}}, columns=[Column("nll", better="lower")]))


def test_methods_that_print_alike_are_best_together():
    """A difference that is not shown is not claimed."""
    rows = {"a": {"accuracy": [0.81204]}, "b": {"accuracy": [0.81201]}, "c": {"accuracy": [0.8]}}
    text = table(rows, columns=[Column("accuracy", better="higher")])
    assert [line.endswith("*") for line in str(text).splitlines()[2:]] == [True, True, False]


def test_which_values_are_best():
    """By the measure at the end of a name; of a coverage neither the highest nor the lowest."""
    best = {
        "higher": "accuracy before_pool_accuracy_decile validation_macro_f1 personal_auroc",
        "lower": "nll train_nll personal_pooled_ece mce global_brier personal_rmse",
        None: "round personal_coverage_90 bytes_up none",
    }
    for end, keys in best.items():
        assert {report.better(key) for key in keys.split()} == {end}


def test_columns():
    """Defaults by name, own choices, and all keys when none are given."""
    for key, title in (
        ("pooled_accuracy", "pooled accuracy"),
        ("coverage", "coverage"),
        ("ece", "ECE"),
        ("personal_macro_f1", "personal macro F1"),
    ):
        assert (Column(key).title, Column(key).scale, Column(key).digits) == (title, 1, 3)
    assert "0.02" in str(table({"a": {"ece": 0.016}}, columns=[Column("ece", digits=2)]))
    scaled = table({"a": {"ms": [1.4, 1.6]}}, columns=[Column("ms", scale=1000, digits=0)])
    assert "1500 ± 100" in str(scaled)
    assert str(table(ROWS)).splitlines()[0].split() == ["method", "accuracy", "NLL", "seconds"]


def test_json(tmp_path: Path):
    """Tensors, arrays, paths, dataclasses; what JSON cannot say becomes null, so that every reader
    can read it.
    """

    @dataclass(frozen=True)
    class Options:
        lr: float
        sizes: tuple[int, ...]

    obj = {
        "nan": [math.nan, math.inf, 1.5],
        "tensor": torch.tensor([[1, 2]]),
        "array": np.array([0.5, np.nan]),
        "scalar": np.int64(3),
        "path": Path("runs") / "a",
        "options": Options(0.1, (1, 2)),
        7: None,
        "flag": True,
    }
    report.write_json(tmp_path / "a.json", obj)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse) == {
        "nan": [None, None, 1.5],
        "tensor": [[1, 2]],
        "array": [0.5, None],
        "scalar": 3,
        "path": os.path.join("runs", "a"),
        "options": {"lr": 0.1, "sizes": [1, 2]},
        "7": None,
        "flag": True,
    }


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Everything is there and can be written; without git there is no commit and no error."""
    record = report.environment()
    assert {
        "date",
        "bayesfl",
        "python",
        "platform",
        "torch",
        "numpy",
        "cpu",
        "cores",
        "threads",
        "accelerator",
        "commit",
    } == set(record)
    assert record["torch"] == torch.__version__
    assert record["commit"] is None or len(record["commit"].removesuffix("-dirty")) == 40
    report.write_json(tmp_path / "environment.json", record)

    def missing(*args: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert report.environment()["commit"] is None
