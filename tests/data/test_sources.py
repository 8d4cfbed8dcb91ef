"""Data sets: where they are looked for, every layout they may lie in, and what is said when they are not there."""

import gzip
import hashlib
import importlib
import importlib.util
import pickle
import struct
import sys
from http.client import IncompleteRead
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.base import torchvision as loader
from bayesfl.data import Source, available, load, sources
from bayesfl.data.sources import FINE_TO_COARSE, read_idx
from tests.files import where_present

needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")


def write_idx(path, array, zipped=False):
    data = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if zipped else data)


def images(n, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size=(n, *shape), dtype=np.uint8)


def write_mnist(root, folder="MNIST", zipped=False):
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    arrays = {"train-images-idx3": images(30, 28, 28), "t10k-images-idx3": images(10, 28, 28, seed=1)}
    arrays |= {"train-labels-idx1": np.arange(30, dtype=np.uint8) % 10, "t10k-labels-idx1": np.arange(10, dtype=np.uint8)}
    for name, array in arrays.items():
        write_idx(raw / f"{name}-ubyte{'.gz' if zipped else ''}", array, zipped)
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4)])
def test_idx_round_trip(tmp_path, shape, zipped):
    array = images(*shape)
    path = tmp_path / ("a-ubyte.gz" if zipped else "a-ubyte")
    write_idx(path, array, zipped)
    assert np.array_equal(read_idx(path), array)


def test_idx_refuses_other_files_and_cut_ones(tmp_path):
    path = tmp_path / "a-ubyte"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not an idx file of unsigned bytes: it begins with 504b0304"):
        read_idx(path)
    write_idx(path, images(3, 4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="may be cut short"):
        read_idx(path)
    path.write_bytes(b"\x00\x00\x08\x02\x00")
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(path)


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std"), [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.286, 0.353)]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_layout(tmp_path, name, folder, mean, std, zipped):
    arrays = write_mnist(tmp_path, folder, zipped)
    source = load(name, root=tmp_path)
    assert source.x.shape == (40, 1, 28, 28)
    assert (source.train, source.outputs, source.task) == (30, 10, "classification")
    expected = (torch.from_numpy(arrays["t10k-images-idx3"]).float() / 255 - mean) / std
    assert_close(source.x_test[:, 0], expected)
    assert source.y_train.tolist() == [*range(10)] * 3
    assert source.x_train.data_ptr() == source.x.data_ptr()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_npz_layout(tmp_path, name):
    classes = 10 if name == "cifar10" else 100
    arrays = {"x_train": images(200, 32, 32, 3), "x_test": images(100, 32, 32, 3, seed=1)}
    arrays |= {"y_train": np.arange(200, dtype=np.uint8) % classes, "y_test": np.arange(100, dtype=np.uint8) % classes}
    np.savez(tmp_path / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]
    source = load(name, root=tmp_path)
    assert source.x.shape == (300, 3, 32, 32)
    mean, std = (0.4914, 0.2023) if name == "cifar10" else (0.5074, 0.2011)
    assert_close(source.x_train[:, 0], (torch.from_numpy(arrays["x_train"][..., 0]).float() / 255 - mean) / std)
    if name == "cifar100":
        assert source.superclasses is not None
        assert all(FINE_TO_COARSE[k] == c for c, group in enumerate(source.superclasses) for k in group)
    np.savez(tmp_path / "mnist.npz", x_train=arrays["x_train"])
    with pytest.raises(ValueError, match="lacks"):
        load("mnist", root=tmp_path)


def test_letters_are_numbered_from_zero(tmp_path):
    """EMNIST's labels 1 to 26 as 0 to 25."""
    arrays = {"x_train": images(52, 28, 28), "x_test": images(26, 28, 28, seed=1)}
    arrays |= {"y_train": np.arange(52, dtype=np.uint8) % 26 + 1, "y_test": np.arange(26, dtype=np.uint8) + 1}
    np.savez(tmp_path / "emnist_letters.npz", **arrays)  # pyright: ignore[reportArgumentType]
    source = load("emnist-letters", root=tmp_path)
    assert source.x.shape == (78, 1, 28, 28)
    assert source.outputs == 26
    assert source.y_train.tolist() == [*range(26)] * 2
    assert source.y_test.tolist() == [*range(26)]
    assert source.class_names == tuple("abcdefghijklmnopqrstuvwxyz")
    assert_close(source.x_train[:, 0], (torch.from_numpy(arrays["x_train"]).float() / 255 - 0.1307) / 0.3081)


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
    assert_close(source.x_train[:, 0], (torch.from_numpy(x).mT.float() / 255 - 0.1307) / 0.3081)
    assert source.y_test.tolist() == [*range(26)]


def test_plays_that_are_none_say_so(tmp_path):
    """No file, no play in it, or letters that have no number."""
    (tmp_path / "shakespeare").mkdir()
    path = tmp_path / "shakespeare" / "moby_plays.txt"
    for text, message in (("ROMEO\t" + 100 * "a", "has no speech of more than 80"), ("@@PLAY a\nROMEO\t" + 100 * "\x01", "not printable")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load("shakespeare", root=tmp_path)
    path.unlink()


def test_environment_and_argument_name_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESFL_DATA", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError) as error:
        load("mnist")
    for part in (str(tmp_path / "empty" / "mnist.npz"), "MNIST/raw", "download=True", "BAYESFL_DATA"):
        assert part in str(error.value)
    write_mnist(tmp_path)
    assert load("mnist", root=tmp_path).train == 30
    monkeypatch.setenv("BAYESFL_DATA", str(tmp_path))
    assert load("mnist").train == 30
    monkeypatch.delenv("BAYESFL_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert sources.default_root() == tmp_path / "cache" / "bayesfl" / "datasets"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist", "emnist-letters", "heart", "shakespeare"])
def test_what_is_not_there_says_where_it_was_looked_for(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="Looked at") as error:
        load(name, root=tmp_path)
    assert str(tmp_path) in str(error.value)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="no data set 'minst'; known are digits, mnist"):
        load("minst")


def test_every_source_has_terms_and_citation():
    for name, info in available().items():
        assert info.name == name
        assert info.licence
        assert info.citation


def test_digits_and_diabetes_need_no_files(tmp_path):
    digits = load("digits", root=tmp_path)
    assert digits.x.shape == (1797, 64)
    assert (float(digits.x.min()), float(digits.x.max())) == (0.0, 1.0)
    assert digits.train == 1438
    share = torch.bincount(digits.y_test) / torch.bincount(digits.y)
    assert_close(share, torch.full((10,), 0.2), atol=0.005, rtol=0)
    assert load("digits", root=tmp_path) is digits
    diabetes = load("diabetes", root=tmp_path)
    assert (diabetes.x.shape, diabetes.train, diabetes.task) == ((442, 10), 354, "regression")


def test_hearts_from_the_repository_files(tmp_path):
    folder = tmp_path / "heart_disease"
    folder.mkdir()
    for name in sources.HOSPITALS:
        rows = ["63,1,1,145,233,1,2,150,0,2.3,3,0,6,0", "40,0,4,120,?,0,0,100,1,1.0,?,?,?,2", "50,0,4,120,9,0,0,100,1,1,?,?,?,2"]
        (folder / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    source = load("heart", root=tmp_path)
    assert source.y.tolist() == [0, 1] * 4
    assert source.owners is not None
    assert source.owners.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert source.x[0].tolist() == pytest.approx([63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1])
    assert source.x[1, 8:].tolist() == [0, 0, 1, 0, 0]


def test_source_of_your_own_tensors():
    source = Source.from_parts(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]), torch.ones(2, 2), torch.tensor([3, 0]), name="mine")
    assert (source.outputs, source.train, source.task) == (4, 4, "classification")
    assert source.x_test.sum() == 4
    line = Source.from_parts(torch.zeros(4, 2), torch.zeros(4, 3), torch.ones(2, 2), torch.zeros(2, 3), name="line")
    assert (line.outputs, line.task) == (3, "regression")
    with pytest.raises(ValueError, match=r"y has -1 in row 5: .*leave out examples without a label"):
        Source.from_parts(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]), torch.ones(2, 2), torch.tensor([2, -1]), name="mine")
    with pytest.raises(ValueError, match=r"labels must lie within \[0, 2\), y has 2 in row 2: .*outputs=3"):
        Source.from_parts(torch.zeros(3, 2), torch.tensor([0, 1, 2]), torch.ones(1, 2), torch.tensor([0]), name="mine", outputs=2)
    with pytest.raises(ValueError, match="as many rows"):
        Source(x=torch.zeros(3, 1), y=torch.zeros(2), train=1, outputs=1, task="regression", info=source.info)


def test_the_coarse_table_has_twenty_groups_of_five():
    assert np.bincount(FINE_TO_COARSE).tolist() == [5] * 20


@needs_torchvision
def test_torchvision_files(tmp_path):
    """The original pickles, made small, read by torchvision itself."""
    loader.torchvision()
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    lists = []
    for i, name in enumerate(
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch", "batches.meta"]
    ):
        content = (
            {"data": images(10, 3072, seed=i), "labels": [*range(10)]} if name != "batches.meta" else {"label_names": list("abcdefghij")}
        )
        (folder / name).write_bytes(pickle.dumps(content))
        lists.append([name, hashlib.md5((folder / name).read_bytes()).hexdigest()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CIFAR10, "train_list", lists[:5])
        patch.setattr(CIFAR10, "test_list", lists[5:6])
        patch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": lists[6][1]})
        source = load("cifar10", root=tmp_path)
    assert source.x.shape == (60, 3, 32, 32)
    assert source.class_names == tuple("abcdefghij")
    red = torch.from_numpy(images(10, 3072, seed=0).reshape(10, 3, 32, 32)[:, 0]).float()
    assert_close(source.x[:10, 0], (red / 255 - 0.4914) / 0.2023)


@needs_torchvision
@pytest.mark.parametrize(
    ("name", "cls", "error"),
    [
        ("cifar10", "CIFAR10", URLError("no network")),
        ("mnist", "MNIST", RuntimeError("Error downloading a.gz:\nTried b, got:\nno network\n")),
        ("cifar100", "CIFAR100", IncompleteRead(b"", 9)),
    ],
)
def test_a_download_that_fails_says_where_it_was_looked_for(tmp_path, monkeypatch, name, cls, error):
    """Not torchvision's own error alone, which is kept as the cause."""
    loader.torchvision()
    from torchvision import datasets

    def offline(*args, **options):
        raise error

    monkeypatch.setattr(datasets, cls, offline)
    with pytest.raises(FileNotFoundError, match=rf"'{name}' is not on disk, and torchvision could not fetch it: ") as caught:
        load(name, root=tmp_path, download=True)
    assert caught.value.__cause__ is error
    message = str(caught.value)
    assert " ".join(str(error).split()) in message
    for part in (str(tmp_path / f"{name}.npz"), "Try again with a network connection", "root=", "BAYESFL_DATA"):
        assert part in message


@needs_torchvision
def test_a_folder_that_is_not_whole_says_so(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(FileNotFoundError, match=r"(?s)'cifar10' is not on disk as a whole: .*Looked at.*Pass download=True") as caught:
        load("cifar10", root=tmp_path)
    assert isinstance(caught.value.__cause__, RuntimeError)


@needs_torchvision
def test_torchvision_imports_beside_any_torch(monkeypatch):
    assert loader.torchvision().__name__ == "torchvision"
    assert loader.torchvision() is importlib.import_module("torchvision")

    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.setattr(loader.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        loader.torchvision()


def test_import_brings_torch_and_numpy_only():
    """In a fresh interpreter, importing the data modules loads nothing that is used by some only."""
    import subprocess

    lazy = ("sklearn", "torchvision", "scipy", "pandas", "PIL")
    code = f"import sys, bayesfl.data, bayesfl.models; print([m for m in {lazy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "shape", "train"),
    [
        ("mnist", (70_000, 1, 28, 28), 60_000),
        ("fashion-mnist", (70_000, 1, 28, 28), 60_000),
        ("cifar10", (60_000, 3, 32, 32), 50_000),
        ("cifar100", (60_000, 3, 32, 32), 50_000),
        ("emnist-letters", (36_400, 1, 28, 28), 26_000),
        ("heart", (740, 13), 740),
    ],
)
@where_present
def test_the_real_files(name, shape, train):
    source = load(name)
    assert tuple(source.x.shape) == shape
    assert source.train == train
    if len(shape) == 4:
        assert source.x_train.mean().abs() < (0.2 if name == "emnist-letters" else 0.02)  # which is given MNIST's mean
        assert torch.bincount(source.y_test).unique().numel() == (1 if name != "mnist" else 10)


@where_present
def test_the_coarse_table_is_that_of_the_file():
    source = load("cifar100")
    assert source.superclasses is not None
    assert [next(c for c, group in enumerate(source.superclasses) if k in group) for k in range(100)] == list(FINE_TO_COARSE)
