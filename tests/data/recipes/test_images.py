"""Images: every layout they may lie in, and what is said when they are not there."""

import hashlib
import importlib.util
import pickle

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import load
from bayesfl.data.recipes import torchvision as loader
from bayesfl.data.recipes.images import FINE_TO_COARSE
from tests.data.made import images, write_mnist
from tests.files import where_present

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std"),
    [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.286, 0.353)],
)
def test_mnist_layout(tmp_path, name, folder, mean, std):
    arrays = write_mnist(tmp_path, folder)
    source = load(name, root=tmp_path)
    assert (source.x.shape, source.train, source.outputs, source.task) == (
        (40, 1, 28, 28),
        30,
        10,
        "classification",
    )
    expected = (torch.from_numpy(arrays["t10k-images-idx3"]).float() / 255 - mean) / std
    assert_close(source.x[source.train :][:, 0], expected)
    assert source.y[: source.train].tolist() == [*range(10)] * 3
    assert source.x[: source.train].data_ptr() == source.x.data_ptr()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_npz_layout(tmp_path, name):
    classes = 10 if name == "cifar10" else 100
    arrays = {"x_train": images(200, 32, 32, 3), "x_test": images(100, 32, 32, 3, seed=1)}
    arrays |= {
        "y_train": np.arange(200, dtype=np.uint8) % classes,
        "y_test": np.arange(100, dtype=np.uint8) % classes,
    }
    np.savez(tmp_path / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]
    source = load(name, root=tmp_path)
    assert source.x.shape == (300, 3, 32, 32)
    mean, std = (0.4914, 0.2023) if name == "cifar10" else (0.5074, 0.2011)
    assert_close(
        source.x[: source.train][:, 0],
        (torch.from_numpy(arrays["x_train"][..., 0]).float() / 255 - mean) / std,
    )
    if name == "cifar100":
        assert source.superclasses is not None
        groups = [[FINE_TO_COARSE[k] for k in group] for group in source.superclasses]
        assert groups == [[c] * 5 for c in range(20)]


def test_letters_are_numbered_from_zero(tmp_path):
    """EMNIST's labels 1 to 26 as 0 to 25."""
    arrays = {"x_train": images(52, 28, 28), "x_test": images(26, 28, 28, seed=1)}
    arrays |= {
        "y_train": np.arange(52, dtype=np.uint8) % 26 + 1,
        "y_test": np.arange(26, dtype=np.uint8) + 1,
    }
    np.savez(tmp_path / "emnist_letters.npz", **arrays)  # pyright: ignore[reportArgumentType]
    source = load("emnist-letters", root=tmp_path)
    assert (source.x.shape, source.outputs) == ((78, 1, 28, 28), 26)
    assert source.y.tolist() == [*range(26)] * 3
    assert source.class_names == tuple("abcdefghijklmnopqrstuvwxyz")
    assert_close(
        source.x[: source.train][:, 0],
        (torch.from_numpy(arrays["x_train"]).float() / 255 - 0.1307) / 0.3081,
    )


@needs_torchvision
def test_letters_through_torchvision_stand_upright(tmp_path, monkeypatch):
    """Its images lie on their side."""
    loader.torchvision()
    from torchvision import datasets

    x = images(26, 28, 28)

    class Letters:
        def __init__(self, root, *, split, train, download):
            assert split == "letters"
            self.data, self.targets = torch.from_numpy(x), torch.arange(1, 27)

    monkeypatch.setattr(datasets, "EMNIST", Letters)
    source = load("emnist-letters", root=tmp_path, download=True)
    assert_close(
        source.x[: source.train][:, 0], (torch.from_numpy(x).mT.float() / 255 - 0.1307) / 0.3081
    )
    assert source.y[source.train :].tolist() == [*range(26)]


@needs_torchvision
def test_torchvision_files(tmp_path):
    """The original pickles, made small, read by torchvision itself."""
    loader.torchvision()
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    lists = []
    for i, name in enumerate(
        [
            "data_batch_1",
            "data_batch_2",
            "data_batch_3",
            "data_batch_4",
            "data_batch_5",
            "test_batch",
            "batches.meta",
        ]
    ):
        content = (
            {"data": images(10, 3072, seed=i), "labels": [*range(10)]}
            if name != "batches.meta"
            else {"label_names": list("abcdefghij")}
        )
        (folder / name).write_bytes(pickle.dumps(content))
        lists.append([name, hashlib.md5((folder / name).read_bytes()).hexdigest()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CIFAR10, "train_list", lists[:5])
        patch.setattr(CIFAR10, "test_list", lists[5:6])
        patch.setattr(
            CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": lists[6][1]}
        )
        source = load("cifar10", root=tmp_path)
    assert (source.x.shape, source.class_names) == ((60, 3, 32, 32), tuple("abcdefghij"))
    red = torch.from_numpy(images(10, 3072, seed=0).reshape(10, 3, 32, 32)[:, 0]).float()
    assert_close(source.x[:10, 0], (red / 255 - 0.4914) / 0.2023)


@where_present
def test_the_coarse_table_is_that_of_the_file():
    source = load("cifar100")
    assert source.superclasses is not None
    assert [
        next(c for c, group in enumerate(source.superclasses) if k in group) for k in range(100)
    ] == list(FINE_TO_COARSE)
