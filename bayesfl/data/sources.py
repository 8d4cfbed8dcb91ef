"""The data sets that recipes share out: where their files lie, how they are read, whose they are."""

import csv
import gzip
import logging
import math
import os
import re
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.random import Purpose, generator
from bayesfl.base.torchvision import torchvision
from bayesfl.data.federated import OFFICIAL, SourceInfo, Task, label_remedy
from bayesfl.data.partitions import stratified

log = logging.getLogger(__name__)

# fmt: off
FINE_TO_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7, 6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5,
    5, 19, 8, 8, 15, 13, 14, 17, 18, 10, 16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16, 12, 9, 13,
    15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)
"""Superclass of each of CIFAR-100's 100 classes (Krizhevsky, 2009); both numbered in alphabetical order."""
# fmt: on


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """One data set: the training rows first, then the test rows, in tensors that every partition of it shares.

    Args:
        x: Inputs [N, ...] float32.
        y: Class labels [N] int64, or targets [N] or [N, O] float32.
        train: How many of the rows, from the first, are training data.
        outputs: Number of classes or targets.
        task: `classification` or `regression`.
        info: Name, terms and citation.
        class_names: One per class.
        superclasses: Classes grouped by meaning, each group of one size.
        superclass_names: One per group.
        owners: Who holds each row, [N] int64 into `owner_names`, where data come from several places.
        owner_names: One per place.
        scale: Mean and standard deviation by which regression targets were standardised.

    Raises:
        ValueError: Parts that don't fit each other, or labels that are no classes.
    """

    x: Tensor
    y: Tensor
    train: int
    outputs: int
    task: Task
    info: SourceInfo
    class_names: tuple[str, ...] | None = None
    superclasses: tuple[tuple[int, ...], ...] | None = None
    superclass_names: tuple[str, ...] | None = None
    owners: Tensor | None = None
    owner_names: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not 0 < self.train <= len(self.x):
            raise ValueError(
                f"x and y must have as many rows, train of them for training; got {len(self.x)}, {len(self.y)} and {self.train}"
            )
        if self.task == "classification":
            wrong = ((self.y < 0) | (self.y >= self.outputs)).nonzero()
            if len(wrong):
                row = int(wrong[0, 0])
                raise ValueError(
                    f"labels must lie within [0, {self.outputs}), y has {int(self.y[row])} in row {row}: {label_remedy(self.y)}"
                )

    @classmethod
    def from_parts(
        cls,
        x_train: Tensor,
        y_train: Tensor,
        x_test: Tensor,
        y_test: Tensor,
        *,
        name: str,
        outputs: int | None = None,
        task: Task | None = None,
        class_names: tuple[str, ...] | None = None,
        superclasses: tuple[tuple[int, ...], ...] | None = None,
    ) -> "Source":
        """A source of your own tensors, to be shared out by any recipe.

        Args:
            x_train: Inputs [N, ...].
            y_train: Integer labels [N], or float targets [N] or [N, O].
            x_test: Inputs of the test part.
            y_test: Labels or targets of the test part.
            name: What to call it.
            outputs: Number of classes or targets; read from the labels unless given.
            task: Read from the type of the labels unless given.
            class_names: One per class.
            superclasses: Classes grouped by meaning, each group of one size.
        """
        y = torch.cat([y_train, y_test])
        task = task or ("regression" if y.is_floating_point() else "classification")
        y = y.long() if task == "classification" else y.float()
        if outputs is None:
            outputs = max(int(y.max()) + 1, 1) if task == "classification" else math.prod(y.shape[1:])
        return cls(
            x=torch.cat([x_train, x_test]).float(),
            y=y,
            train=len(x_train),
            outputs=outputs,
            task=task,
            info=SourceInfo(name=name),
            class_names=class_names,
            superclasses=superclasses,
        )

    @property
    def x_train(self) -> Tensor:
        """Training inputs [n, ...]."""
        return self.x[: self.train]

    @property
    def y_train(self) -> Tensor:
        """Training labels or targets [n, ...]."""
        return self.y[: self.train]

    @property
    def x_test(self) -> Tensor:
        """Test inputs [n, ...]."""
        return self.x[self.train :]

    @property
    def y_test(self) -> Tensor:
        """Test labels or targets [n, ...]."""
        return self.y[self.train :]


_LECUN = "Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document recognition, Proc. IEEE 86(11), 1998"
_XIAO = (
    "H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms, arXiv:1708.07747"
)
_KRIZHEVSKY = "A. Krizhevsky, Learning multiple layers of features from tiny images, technical report, University of Toronto, 2009"
_COHEN = "G. Cohen, S. Afshar, J. Tapson, A. van Schaik, EMNIST: an extension of MNIST to handwritten letters, arXiv:1702.05373, 2017"
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"

INFO = {
    info.name: info
    for info in (
        SourceInfo(
            name="digits",
            licence="CC BY 4.0",
            citation="E. Alpaydin, C. Kaynak, Optical recognition of handwritten digits, UCI Machine Learning Repository, 1998, "
            "doi 10.24432/C50P49; the test part, as scikit-learn ships it",
            url="https://archive.ics.uci.edu/dataset/80",
        ),
        SourceInfo(name="mnist", licence="often given as CC BY-SA 3.0", citation=_LECUN, url="http://yann.lecun.com/exdb/mnist/"),
        SourceInfo(
            name="fashion-mnist",
            licence="MIT, (c) 2017 Zalando SE",
            citation=_XIAO,
            url="https://github.com/zalandoresearch/fashion-mnist",
        ),
        SourceInfo(name="cifar10", licence="not stated; the authors ask to be cited", citation=_KRIZHEVSKY, url=_CIFAR),
        SourceInfo(name="cifar100", licence="not stated; the authors ask to be cited", citation=_KRIZHEVSKY, url=_CIFAR),
        SourceInfo(name="emnist-letters", citation=_COHEN, url="https://www.nist.gov/itl/products-and-services/emnist-dataset"),
        SourceInfo(
            name="shakespeare",
            licence="public domain",
            citation="W. Shakespeare, the plays of the Complete Moby Shakespeare",
            url="https://www.gutenberg.org/ebooks/3201",
        ),
        SourceInfo(
            name="heart",
            licence="CC BY 4.0; the four investigators ask to be named",
            citation="A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, Heart disease, UCI Machine Learning Repository, 1988, "
            "doi 10.24432/C52P4X",
            url="https://archive.ics.uci.edu/dataset/45",
        ),
        SourceInfo(
            name="diabetes",
            citation="B. Efron, T. Hastie, I. Johnstone, R. Tibshirani, Least angle regression, Annals of Statistics 32(2), 2004",
            url="https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        ),
    )
}

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
_TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "emnist-letters": "EMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_NAMES = {"fashion-mnist": _FASHION, "emnist-letters": tuple(string.ascii_lowercase)}


def unit_range(source: Source, why: str, otherwise: str = "") -> Tensor:
    """A copy of a source's inputs within [0, 1], the usual standardisation of known images undone.

    Args:
        source: Whose inputs.
        why: Who asks for them, the start of the error.
        otherwise: What else the user can do, its end.

    Raises:
        ValueError: Inputs beyond [0, 1].
    """
    x = source.x.clone()
    if source.info.name in NORMALISATION and source.info is INFO[source.info.name]:
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in NORMALISATION[source.info.name])
        x.mul_(std).add_(mean).mul_(255).round_().div_(255)  # rounded: the bytes on disk, to the last bit
    least, most = x.aminmax()
    if not (least >= 0 and most <= 1):
        remedy = ", ".join(filter(None, ("scale them to [0, 1]", otherwise)))
        raise ValueError(f"{why}, those of {source.info.name!r} lie within [{least:.4g}, {most:.4g}]: {remedy}")
    return x


def available() -> dict[str, SourceInfo]:
    """Every data set that `load` and the recipes know, with its terms and citation."""
    return dict(INFO)


def load(name: str, *, root: str | Path | None = None, download: bool = False) -> Source:
    """One of the `available()` data sets; read from disk once per process.

    `digits` and `diabetes` come with scikit-learn. The others are looked for in `root`, else in the folder that the environment
    variable BAYESFL_DATA names, else in the user's cache (`~/.cache/bayesfl/datasets` on Linux): as `<name>.npz` (`x_train`,
    `x_test` uint8 images, `y_train`, `y_test`), as the original idx files (`MNIST/raw`, `FashionMNIST/raw`, gzipped or not), as
    `heart_disease/heart.csv` or the repository's `heart_disease/processed.*.data`, as `shakespeare/moby_plays.txt`, or as torchvision keeps
    them. `emnist-letters` stands in for EMNIST by class: 26 letters, the files' labels 1 to 26 as 0 to 25, images upright.

    Args:
        name: Its name.
        root: Folder to look in.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: No data set has that name.
        FileNotFoundError: Its files are not there; the message lists the places.
    """
    if name not in INFO:
        raise ValueError(f"there is no data set {name!r}; known are {', '.join(INFO)}. Your own data: bf.data.from_arrays(x, y)")
    return _load(name, Path(root) if root is not None else default_root(), download)


def default_root() -> Path:
    """The folder that BAYESFL_DATA names, else `bayesfl/datasets` in the user's cache."""
    if named := os.environ.get("BAYESFL_DATA"):
        return Path(named)
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bayesfl" / "datasets"


@lru_cache(maxsize=4)
def _load(name: str, root: Path, download: bool) -> Source:
    readers: dict[str, Callable[[], Source]] = {
        "digits": _digits,
        "diabetes": _diabetes,
        "heart": lambda: _heart(root),
        "shakespeare": lambda: _shakespeare(root),
    }
    if name in readers:
        return readers[name]()
    return _images(name, root, download)


def _official_split(labels: np.ndarray | None, rows: int) -> np.ndarray:
    """A fixed order of the rows, the first 80% for training: data sets without an official split get this one."""
    rng = generator(0, Purpose.SPLIT, phase=OFFICIAL)
    return np.concatenate(stratified(labels, np.arange(rows), round(0.2 * rows), rng))


def _digits() -> Source:
    """8x8 digits as 64 numbers within [0, 1]."""
    from sklearn.datasets import load_digits

    data, target = map(np.asarray, load_digits(return_X_y=True))
    order = _official_split(target, len(target))
    return Source(
        x=torch.from_numpy((data[order] / 16).astype(np.float32)),
        y=torch.from_numpy(target[order].astype(np.int64)),
        train=len(target) - round(0.2 * len(target)),
        outputs=10,
        task="classification",
        info=INFO["digits"],
        class_names=tuple(map(str, range(10))),
    )


def _diabetes() -> Source:
    """Ten features and disease progression, standardised by the training rows."""
    from sklearn.datasets import load_diabetes

    data, target = map(np.asarray, load_diabetes(return_X_y=True, scaled=False))
    order = _official_split(None, len(target))
    train = len(target) - round(0.2 * len(target))
    x, y = data[order].astype(np.float64), target[order].astype(np.float64)
    centre, scale = float(y[:train].mean()), float(y[:train].std())
    return Source(
        x=torch.from_numpy(((x - x[:train].mean(0)) / x[:train].std(0)).astype(np.float32)),
        y=torch.from_numpy(((y - centre) / scale).astype(np.float32)),
        train=train,
        outputs=1,
        task="regression",
        info=INFO["diabetes"],
        scale=(centre, scale),
    )


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num")
_NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
_DUMMIES = (("cp", (2, 3, 4)), ("restecg", (1, 2)))  # the first level is the reference


def _heart_rows(root: Path) -> list[dict[str, str]]:
    """Every patient's attributes as text: one table with the hospital in column `centre`, or the repository's four files."""
    folder = root / "heart_disease"
    table, files = folder / "heart.csv", {name: folder / f"processed.{name}.data" for name in HOSPITALS}
    if table.is_file():
        with table.open(newline="") as file:
            return list(csv.DictReader(file))
    if not all(path.is_file() for path in files.values()):
        raise FileNotFoundError(
            f"the heart disease data are not on disk. Looked at\n  {table}\n  {folder / 'processed.*.data'}\nPut the four files "
            f"processed.<hospital>.data ({', '.join(HOSPITALS)}) of {INFO['heart'].url} there, or name another folder by root= or by the "
            "environment variable BAYESFL_DATA"
        )
    rows = []
    for name, path in files.items():
        with path.open(newline="") as file:
            rows += [{"centre": name} | row for row in csv.DictReader(file, fieldnames=_COLUMNS)]
    return rows


def _heart(root: Path) -> Source:
    """Complete rows of four hospitals, not yet split or standardised: 8 numbers and 5 dummies."""
    x, y, owners = [], [], []
    for row in _heart_rows(root):
        if any(row[key] in ("", "?") for key in (*_NUMBERS, "cp", "restecg", "num")):
            continue
        dummies = [float(int(float(row[key])) == level) for key, levels in _DUMMIES for level in levels]
        x.append([float(row[key]) for key in _NUMBERS] + dummies)
        y.append(int(float(row["num"]) > 0))
        owners.append(HOSPITALS.index(row["centre"]))
    return Source(
        x=torch.tensor(x),
        y=torch.tensor(y),
        train=len(y),
        outputs=2,
        task="classification",
        info=INFO["heart"],
        class_names=("no disease", "disease"),
        owners=torch.tensor(owners),
        owner_names=HOSPITALS,
    )


CHUNK = 80  # characters of an example
_OPENING = re.compile(r"^(ACT|PROLOGUE|INDUCTION)", re.MULTILINE)  # what stands before lists who is in the play


def speeches(text: str) -> dict[str, str]:
    """What each role says, {"play, speaker": text}, roles in the order in which they first speak.

    Args:
        text: Plays, each begun by a line `@@PLAY name`; a speech begins with its speaker and a tab and goes on to the next blank line.
            What is in square brackets is left out, runs of blanks are one, and so are line ends.
    """
    said: dict[str, list[str]] = {}
    for play in text.split("@@PLAY ")[1:]:
        name, _, body = play.partition("\n")
        opening = _OPENING.search(body)
        for block in re.split(r"\n[ \t]*\n", body[opening.start() if opening else 0 :]):
            speaker, tab, words = re.sub(r"\[[^\]]*\]", "", block).strip("\n").partition("\t")
            words = re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", words)).strip()
            if tab and words and speaker.strip() and not speaker.startswith("SCENE"):
                said.setdefault(f"{name.strip()}, {' '.join(speaker.split()).rstrip(':')}", []).append(words)
    return {role: "\n".join(parts) for role, parts in said.items()}


def _shakespeare(root: Path) -> Source:
    """Chunks of what a role says and the character after each, roles one after another; not yet split."""
    path = root / "shakespeare" / "moby_plays.txt"
    if not path.is_file():
        raise FileNotFoundError(
            f"the plays are not on disk. Looked at\n  {path}\nPut the plays of {INFO['shakespeare'].url} there as one text, each begun by "
            "a line '@@PLAY name', its speeches by the speaker and a tab and ended by a blank line; or name another folder by root= or by "
            "the environment variable BAYESFL_DATA"
        )
    number = np.full(128, -1)
    number[[ord(c) for c in string.printable]] = np.arange(len(string.printable))
    x, y, owners, names = [], [], [], []
    for role, said in speeches(path.read_text(encoding="ascii")).items():
        codes = number[np.frombuffer(said.encode("ascii"), np.uint8)]
        n = (len(codes) - 1) // CHUNK
        if not n:
            continue
        if (codes < 0).any():
            raise ValueError(f"{path} has characters that are not printable, in what {role!r} says: take them out")
        x.append(codes[: n * CHUNK].reshape(n, CHUNK))
        y.append(codes[CHUNK : n * CHUNK + 1 : CHUNK])
        owners.append(np.full(n, len(names)))
        names.append(role)
    if not names:
        raise ValueError(f"{path} has no speech of more than {CHUNK} characters after a line '@@PLAY name': it is not such a text")
    return Source(
        x=torch.from_numpy(np.concatenate(x)).float(),
        y=torch.from_numpy(np.concatenate(y)),
        train=sum(map(len, y)),
        outputs=len(string.printable),
        task="classification",
        info=INFO["shakespeare"],
        class_names=tuple(string.printable),
        owners=torch.from_numpy(np.concatenate(owners)),
        owner_names=tuple(names),
    )


def read_idx(path: str | Path) -> np.ndarray:
    """An array of unsigned bytes in the idx format of MNIST, gzipped or not.

    Args:
        path: The file.

    Raises:
        ValueError: The file is not such an array, or not whole.
    """
    path = Path(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read()
    start = 4 + 4 * data[3] if len(data) >= 4 else 4
    if len(data) < start or data[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes: it begins with {data[:4].hex()}")
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], dtype=">u4"))
    values = np.frombuffer(data[start:], dtype=np.uint8)
    if len(values) != math.prod(shape):
        raise ValueError(f"{path} should hold an array of shape {shape} but has {len(values)} bytes: it may be cut short, fetch it again")
    return values.reshape(shape)


def _images(name: str, root: Path, download: bool) -> Source:
    """Images and labels as they lie on disk, standardised by the usual means and deviations."""
    looked = [root / f"{name}.npz", root / f"{name.replace('-', '_')}.npz"]
    for path in dict.fromkeys(looked):
        if path.is_file():
            with np.load(path, allow_pickle=False) as file:
                return _standardised(name, {key: file[key] for key in file.files})
    if name in ("mnist", "fashion-mnist"):
        folder = root / _FOLDER[name] / "raw"
        looked += [folder / "*-ubyte", folder / "*-ubyte.gz"]
        arrays = _idx_arrays(folder)
        if arrays is not None:
            return _standardised(name, arrays)
    else:
        looked.append(root / _FOLDER[name])
    if download or (_FOLDER[name] not in ("MNIST", "FashionMNIST") and looked[-1].is_dir()):
        try:
            arrays = _torchvision_arrays(name, root, download)
        except (OSError, RuntimeError, HTTPException) as error:
            raise FileNotFoundError(_absent(name, root, looked, download, error)) from error
        return _standardised(name, arrays)
    raise FileNotFoundError(_absent(name, root, looked, download))


def _absent(name: str, root: Path, looked: list[Path], download: bool, error: Exception | None = None) -> str:
    """That a data set is not there: why not, where it was looked for, and how to get it."""
    what = "is not on disk"
    if error is not None:
        reason = " ".join(str(error).split())
        what += f", and torchvision could not fetch it: {reason}" if download else f" as a whole: {reason}"
    places = "\n  ".join(dict.fromkeys(map(str, looked)))
    first = "Try again with a network connection" if download else "Pass download=True"
    return (
        f"the data set {name!r} {what}. Looked at\n  {places}\n{first} to let torchvision fetch it into {root}, put one of these files "
        "there, or name another folder by root= or by the environment variable BAYESFL_DATA"
    )


def _idx_arrays(folder: Path) -> dict[str, np.ndarray] | None:
    """The four arrays of MNIST's layout, or None where not all four are there."""
    names = {"x_train": "train-images-idx3", "y_train": "train-labels-idx1", "x_test": "t10k-images-idx3", "y_test": "t10k-labels-idx1"}
    found = {}
    for key, stem in names.items():
        paths = [path for end in ("-ubyte", "-ubyte.gz") if (path := folder / f"{stem}{end}").is_file()]
        if not paths:
            return None
        found[key] = paths[0]
    return {key: read_idx(path) for key, path in found.items()}


def _torchvision_arrays(name: str, root: Path, download: bool) -> dict[str, np.ndarray]:
    """The same arrays through torchvision, which fetches them where it may."""
    try:
        torchvision()
    except ImportError:
        raise ImportError(f"reading or fetching {name} in its original form needs torchvision: pip install torchvision") from None
    from torchvision import datasets

    log.info("reading %s through torchvision in %s", name, root)
    arrays = {}
    for part, train in (("train", True), ("test", False)):
        letters = {"split": "letters"} if name == "emnist-letters" else {}
        data = getattr(datasets, _TORCHVISION[name])(str(root), train=train, download=download, **letters)
        x = np.asarray(data.data)
        arrays |= {f"x_{part}": x.swapaxes(1, 2) if letters else x, f"y_{part}": np.asarray(data.targets)}  # EMNIST's lie on their side
    if name.startswith("cifar"):
        arrays["label_names"] = np.asarray(data.classes)
    return arrays


def _standardised(name: str, arrays: dict[str, np.ndarray]) -> Source:
    """A source of uint8 images [N, H, W] or [N, H, W, 3] and labels: float32 [N, channels, H, W]."""
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in arrays]
    if missing:
        raise ValueError(f"the file of {name!r} lacks {missing}: it must hold x_train, y_train, x_test and y_test")
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
