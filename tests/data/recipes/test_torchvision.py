"""torchvision is imported beside any torch."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from bayesfl.data.recipes import torchvision as loader

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


@needs_torchvision
def test_torchvision_imports_beside_any_torch(monkeypatch):
    assert loader.torchvision().__name__ == "torchvision"
    assert loader.torchvision() is importlib.import_module("torchvision")

    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.setattr(loader.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        loader.torchvision()


@needs_torchvision
@pytest.mark.slow
@pytest.mark.parametrize("first", ["loader.torchvision()", "tried()"])
def test_one_call_is_enough(first):
    """Before `import torchvision`, or after one that failed: networks and transforms work, with the
    operators' own message if they lack.
    """
    code = f"""
import torch
from bayesfl.data.recipes import torchvision as loader

def tried():
    try:
        import torchvision
    except RuntimeError:
        pass
    assert loader.torchvision() is loader.torchvision()

{first}
import torchvision
from torchvision.transforms import v2
network = torchvision.models.resnet18(weights=None, num_classes=3).eval()
assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
assert v2.Pad(2)(torch.zeros(3, 28, 28)).shape == (3, 32, 32)
try:
    print(torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.ones(1), 0.5).tolist())
except RuntimeError as error:
    print("custom C++ ops" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[0]", "True")
