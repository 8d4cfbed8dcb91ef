"""Importing torchvision, even if it was built for another torch."""

import importlib
import sys
from types import ModuleType

import torch

_kept_alive: list[torch.library.Library] = []


def torchvision() -> ModuleType:
    """Import the module `torchvision` and return it, also beside a torch without CUDA; call it
    once, before what imports torchvision.

    The package index has torchvision for CUDA only. Beside a torch without CUDA its compiled
    operators do not load, and `import torchvision` stops with "operator torchvision::nms does not
    exist", because it attaches rules of shapes to two of them; so do libraries that import it, such
    as peft. This function declares the two first. Networks, transforms and data sets then work; a
    compiled operator, such as `torchvision.ops.nms`, raises an error when it is called. Where the
    plain import works, the function does nothing else.

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
