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
