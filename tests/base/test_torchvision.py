"""torchvision is imported beside any torch."""

import importlib
import importlib.util

import pytest

from bayesfl.base import torchvision as loader

needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")


@needs_torchvision
def test_torchvision_imports_beside_any_torch(monkeypatch):
    assert loader.torchvision().__name__ == "torchvision"
    assert loader.torchvision() is importlib.import_module("torchvision")

    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.setattr(loader.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        loader.torchvision()
