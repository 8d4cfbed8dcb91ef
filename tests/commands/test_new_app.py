"""The app that `new-app` makes runs as it is."""

import importlib
import sys
from pathlib import Path

import pytest

from bayesfl.commands.new_app import new_app
from bayesfl.flower import load, serve
from tests.flower.grid import LocalGrid


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two nodes and a server, in this process."""
    folder = tmp_path / "My-App"
    new_app(folder)
    monkeypatch.syspath_prepend(str(folder))
    task, server, node = (
        importlib.import_module(f"federated.{name}") for name in ("task", "server", "node")
    )
    assert server.app is not None
    grid = LocalGrid({100: node.app, 101: node.app}, tmp_path / "states")
    serve(grid, task.method(), clients=task.CLIENTS, rounds=1, seed=0, checkpoint=tmp_path / "run")
    found = load(tmp_path / "run", task.method())
    assert (found.round, found.clients) == (1, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "federated"]:
        monkeypatch.delitem(sys.modules, name)
