"""Image data sets: reading, the usual standardisation, and its inverse."""

import logging
import string
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.data.sources import INFO, Source

log = logging.getLogger(__name__)

# fmt: off
FINE_TO_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11,
    6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17,
    10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13, 15, 13,
    16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)
"""Superclass of each of CIFAR-100's 100 classes (Krizhevsky, 2009); both numbered in alphabetical
order.
"""
# fmt: on

NORMALISATION = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "emnist-letters": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5074, 0.4867, 0.4411), (0.2011, 0.1987, 0.2025)),
}
_FOLDER = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "emnist-letters": "EMNIST",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}
_TORCHVISION = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "emnist-letters": "EMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
_NAMES = {
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    "emnist-letters": tuple(string.ascii_lowercase),
}


def read_images(name: str, root: Path, download: bool) -> Source:
    """Read an image data set from the folder `root`, and standardise it by its usual means and
    deviations.

    Raises:
        FileNotFoundError: The files are absent, and `download` is False.
        RuntimeError: torchvision finds some files only, and `download` is False.
    """
    looked = [root / f"{name}.npz", root / f"{name.replace('-', '_')}.npz"]
    for path in dict.fromkeys(looked):
        if path.is_file():
            with np.load(path, allow_pickle=False) as file:
                return _standardised(name, {key: file[key] for key in file.files})
    looked.append(root / _FOLDER[name])
    if download or looked[-1].is_dir():
        return _standardised(name, _torchvision_arrays(name, root, download))
    places = "\n  ".join(dict.fromkeys(map(str, looked)))
    raise FileNotFoundError(
        f"the data set {name!r} is not on disk. Looked at\n  {places}\nPass download=True to let "
        f"torchvision fetch it into {root}, put one of these files there, or name another folder "
        "by root= or by the environment variable BAYESFL_DATA"
    )


def _torchvision_arrays(name: str, root: Path, download: bool) -> dict[str, np.ndarray]:
    """Read the four arrays through torchvision, which downloads them if `download`."""
    torchvision()
    from torchvision import datasets

    log.info("reading %s through torchvision in %s", name, root)
    arrays = {}
    for part, train in (("train", True), ("test", False)):
        letters = {"split": "letters"} if name == "emnist-letters" else {}
        data = getattr(datasets, _TORCHVISION[name])(
            str(root), train=train, download=download, **letters
        )
        x = np.asarray(data.data)
        # EMNIST's images are transposed.
        arrays |= {
            f"x_{part}": x.swapaxes(1, 2) if letters else x,
            f"y_{part}": np.asarray(data.targets),
        }
    if name.startswith("cifar"):
        arrays["label_names"] = np.asarray(data.classes)
    return arrays


def _standardised(name: str, arrays: dict[str, np.ndarray]) -> Source:
    """Make a source, float32 [N, channels, H, W], of uint8 images [N, H, W] or [N, H, W, 3] and
    labels.
    """
    raw, mean, std = arrays, *NORMALISATION[name]
    train, test = len(raw["x_train"]), len(raw["x_test"])
    height, width = raw["x_train"].shape[1:3]
    x = torch.empty(train + test, len(mean), height, width)
    for part, place in (("x_train", x[:train]), ("x_test", x[train:])):
        images = torch.from_numpy(np.array(raw[part]))
        place.copy_(images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2))
    x.div_(255).sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None])
    names = raw["label_names"].tolist() if "label_names" in raw else _NAMES.get(name)
    superclasses, superclass_names = None, None
    if name == "cifar100":
        coarse = raw["coarse_of_fine"] if "coarse_of_fine" in raw else np.array(FINE_TO_COARSE)
        superclasses = tuple(tuple(np.flatnonzero(coarse == k).tolist()) for k in range(20))
        superclass_names = tuple(raw["coarse_names"].tolist()) if "coarse_names" in raw else None
    classes = {"cifar100": 100, "emnist-letters": 26}.get(name, 10)
    y = np.concatenate([raw["y_train"], raw["y_test"]]).astype(np.int64)
    return Source(
        x=x,
        y=torch.from_numpy(y - 1 if name == "emnist-letters" else y),
        train=train,
        outputs=classes,
        task="classification",
        info=INFO[name],
        class_names=tuple(map(str, names if names is not None else range(classes))),
        superclasses=superclasses,
        superclass_names=superclass_names,
    )


def unit_range(source: Source, why: str, otherwise: str = "") -> Tensor:
    """Return a copy of a source's inputs within [0, 1], with the usual standardisation of known
    images undone.

    Args:
        source: The source.
        why: Start of the error message: the reason for the range.
        otherwise: End of the error message: another remedy.

    Raises:
        ValueError: The inputs are no floats, or lie outside [0, 1].
    """
    x = source.x.clone()
    if source.info.name in NORMALISATION and source.info is INFO[source.info.name]:
        mean, std = (
            torch.tensor(numbers)[:, None, None] for numbers in NORMALISATION[source.info.name]
        )
        # Rounding gives exactly the stored bytes.
        x.mul_(std).add_(mean).mul_(255).round_().div_(255)
    least, most = x.aminmax()
    if not (x.is_floating_point() and least >= 0 and most <= 1):
        remedy = ", ".join(filter(None, ("make floats within [0, 1] of them", otherwise)))
        raise ValueError(
            f"{why}, those of {source.info.name!r} are {x.dtype} within [{least:.4g}, {most:.4g}]: "
            f"{remedy}, as x.float() / 255 does of bytes"
        )
    return x
