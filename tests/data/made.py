"""Made-up data that several files of tests use."""

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfl.data import Source, SourceInfo


def write_idx(path, array):
    data = (
        struct.pack(">BBBB", 0, 0, 8, array.ndim)
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    path.write_bytes(data)


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size=(n, *shape), dtype=np.uint8)


def write_mnist(root, folder="MNIST"):
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    arrays = {
        "train-images-idx3": images(30, 28, 28),
        "t10k-images-idx3": images(10, 28, 28, seed=1),
    }
    arrays |= {
        "train-labels-idx1": np.arange(30, dtype=np.uint8) % 10,
        "t10k-labels-idx1": np.arange(10, dtype=np.uint8),
    }
    for name, array in arrays.items():
        write_idx(raw / f"{name}-ubyte", array)
    return arrays


def arrays(sizes=(7, 4, 9), classes=3, features=5, seed=0):
    rng = np.random.default_rng(seed)
    xs = [rng.normal(size=(n, features)) for n in sizes]
    ys = [np.resize(np.arange(classes), n) for n in sizes]
    return xs, ys


def environments(sizes=(20, 30, 25)):
    return [np.arange(n) % (j + 1) for j, n in enumerate(sizes)]


def fine_labels(data, source, split):
    """Original class of each example of each client."""
    part = data.splits[split]
    return [source.y[part.rows(j)].numpy() for j in range(data.clients)]


def source_of(
    x_train: Tensor, y_train: Tensor, x_test: Tensor, y_test: Tensor, *, name: str, **options: Any
) -> Source:
    """A source of training and test parts; its outputs and task are those that the labels say."""
    y = torch.cat([y_train, y_test])
    numbers = y.is_floating_point()
    given: dict[str, Any] = {
        "outputs": int(np.prod(y.shape[1:])) if numbers else int(y.max()) + 1,
        "task": "regression" if numbers else "classification",
    }
    return Source(
        x=torch.cat([x_train, x_test]),
        y=y,
        train=len(x_train),
        info=SourceInfo(name=name),
        **given | options,
    )


def small(classes: int) -> Source:
    """Four training and two test rows of each class."""
    y = torch.arange(classes)
    return source_of(
        torch.zeros(4 * classes, 1),
        y.repeat(4),
        torch.zeros(2 * classes, 1),
        y.repeat(2),
        name="small",
    )
