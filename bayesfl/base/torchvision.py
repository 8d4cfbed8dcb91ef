"""Importing torchvision, even if it was built for another torch."""

import importlib
import sys
from types import ModuleType

import torch

_kept_alive: list[torch.library.Library] = []


def torchvision() -> ModuleType:
    """Import the module `torchvision` and return it, with a workaround where the plain import fails.

    The package index has torchvision for CUDA only. With a CPU-only torch its compiled operators do not load, and its Python part
    then fails with "operator torchvision::nms does not exist", because it attaches shape rules to two of them. Declaring the two
    first lets the import succeed: data sets, transforms and models work, while the detection operators themselves are missing.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    if not _kept_alive:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept_alive.append(library)  # its operators vanish with it
    return importlib.import_module("torchvision")
