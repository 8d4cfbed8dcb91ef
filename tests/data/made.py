"""Made-up data that several files of tests use."""

import struct

import numpy as np
import torch

from bayesfl.data import Source


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


def small(classes: int) -> Source:
    """Four training and two test rows of each class."""
    y = torch.arange(classes)
    return Source.from_parts(
        torch.zeros(4 * classes, 1),
        y.repeat(4),
        torch.zeros(2 * classes, 1),
        y.repeat(2),
        name="small",
    )
