"""Reading of data sets from disk: the folder of their files, and the tables and texts among them;
images have a module of their own.
"""

import csv
import os
import re
import string
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from bayesfl.base.options import nearest
from bayesfl.base.random import Purpose, generator
from bayesfl.data.partitions import OFFICIAL, stratified
from bayesfl.data.recipes.images import read_images
from bayesfl.data.sources import INFO, Source


def load(name: str, *, root: str | Path | None = None, download: bool = False) -> Source:
    """Read one of the `available()` data sets, from disk once per process.

    `digits` and `diabetes` come with scikit-learn. The others are looked for in `root`, else in the
    folder that the environment variable BAYESFL_DATA names, else in the user's cache
    (`~/.cache/bayesfl/datasets` on Linux): as `<name>.npz` (`x_train`, `x_test` uint8 images,
    `y_train`, `y_test`), as `heart_disease/heart.csv` or the repository's
    `heart_disease/processed.*.data`, as `shakespeare/moby_plays.txt`, or as torchvision stores
    images, which reads them then, MNIST's unpacked in `MNIST/raw`. `emnist-letters` is used in
    place of EMNIST by class: 26 letters, the files' labels 1 to 26 as 0 to 25, images upright.

    Args:
        name: The data set's name.
        root: Folder of the data's files; None for the default above.
        download: Whether torchvision may download images that are absent.

    Raises:
        ValueError: No data set has that name.
        FileNotFoundError: Its files are absent; the message lists where they were looked for.

    Example:
        >>> source = bf.data.load("digits")
        >>> source.x.shape, source.outputs, source.info.licence
        (torch.Size([1797, 64]), 10, 'CC BY 4.0')
    """
    if name not in INFO:
        raise ValueError(
            f"there is no data set {name!r}; nearest is {nearest(name, list(INFO), 1)[0]!r}, known "
            f"are {', '.join(INFO)}. Your own data: bf.data.from_arrays(x, y)"
        )
    return _load(name, Path(root) if root is not None else default_root(), download)


def default_root() -> Path:
    """Return the folder that BAYESFL_DATA names, else `bayesfl/datasets` in the user's cache."""
    if named := os.environ.get("BAYESFL_DATA"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bayesfl", "datasets")


@lru_cache(maxsize=4)
def _load(name: str, root: Path, download: bool) -> Source:
    readers: dict[str, Callable[[], Source]] = {
        "digits": _digits,
        "diabetes": _diabetes,
        "heart": lambda: _heart(root),
        "shakespeare": lambda: _shakespeare(root),
    }
    return readers[name]() if name in readers else read_images(name, root, download)


def _official_split(labels: np.ndarray | None, rows: int) -> np.ndarray:
    """Return an order of the rows whose first 80% are for training, for data sets without an
    official split.
    """
    rng = generator(0, Purpose.SPLIT, phase=OFFICIAL)
    return np.concatenate(stratified(labels, np.arange(rows), round(0.2 * rows), rng))


def _digits() -> Source:
    """Read 8x8 digits as 64 numbers within [0, 1]."""
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
    """Read ten features and disease progression, standardised by the training rows."""
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
_COLUMNS = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
    "num",
)
_NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
_DUMMIES = (("cp", (2, 3, 4)), ("restecg", (1, 2)))  # the first level is the reference


def _heart_rows(root: Path) -> list[dict[str, str]]:
    """Read every patient's attributes as text: from one table with the hospital in column `centre`,
    or from the repository's four files.
    """
    folder = root / "heart_disease"
    table = folder / "heart.csv"
    files = {name: folder / f"processed.{name}.data" for name in HOSPITALS}
    if table.is_file():
        with table.open(newline="") as file:
            return list(csv.DictReader(file))
    if not all(path.is_file() for path in files.values()):
        raise FileNotFoundError(
            f"the heart disease data are not on disk. Looked at\n  {table}\n  "
            f"{folder / 'processed.*.data'}\nPut the four files processed.<hospital>.data "
            f"({', '.join(HOSPITALS)}) of {INFO['heart'].url} there, or name another folder by "
            "root= or by the environment variable BAYESFL_DATA"
        )
    rows = []
    for name, path in files.items():
        with path.open(newline="") as file:
            rows += [{"centre": name} | row for row in csv.DictReader(file, fieldnames=_COLUMNS)]
    return rows


def _heart(root: Path) -> Source:
    """Read the complete rows of four hospitals, neither split nor standardised: 8 numbers and 5
    dummies.
    """
    x, y, owners = [], [], []
    for row in _heart_rows(root):
        if any(row[key] in ("", "?") for key in (*_NUMBERS, "cp", "restecg", "num")):
            continue
        dummies = [
            float(int(float(row[key])) == level) for key, levels in _DUMMIES for level in levels
        ]
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


def speeches(text: str) -> dict[str, str]:
    """Return the words of each role, {"play, speaker": text}, in the order of their first speech.

    Args:
        text: Plays, each begun by a line `@@PLAY name`; a speech begins with its speaker and a tab
            and ends at the next blank line. Text in square brackets is left out; runs of blanks
            become one blank, and runs of line ends one line end.
    """
    said: dict[str, list[str]] = {}
    for play in text.split("@@PLAY ")[1:]:
        name, _, body = play.partition("\n")
        # The text before it lists the characters of the play.
        opening = re.search(r"^(ACT|PROLOGUE|INDUCTION)", body, re.MULTILINE)
        for block in re.split(r"\n[ \t]*\n", body[opening.start() if opening else 0 :]):
            speaker, tab, words = re.sub(r"\[[^\]]*\]", "", block).strip("\n").partition("\t")
            words = re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", words)).strip()
            if tab and words and speaker.strip() and not speaker.startswith("SCENE"):
                said.setdefault(
                    f"{name.strip()}, {' '.join(speaker.split()).rstrip(':')}", []
                ).append(words)
    return {role: "\n".join(parts) for role, parts in said.items()}


def _shakespeare(root: Path) -> Source:
    """Read each role's words as chunks, each with the character after it, role after role; they are
    not split.
    """
    path = root / "shakespeare" / "moby_plays.txt"
    if not path.is_file():
        raise FileNotFoundError(
            f"the plays are not on disk. Looked at\n  {path}\nPut the plays of "
            f"{INFO['shakespeare'].url} there as one text, each begun by a line '@@PLAY name', its "
            "speeches by the speaker and a tab and ended by a blank line; or name another folder "
            "by root= or by the environment variable BAYESFL_DATA"
        )
    number = np.full(128, -1)
    number[[ord(c) for c in string.printable]] = np.arange(len(string.printable))
    x, y, owners, names = [], [], [], []
    for role, said in speeches(path.read_text(encoding="ascii")).items():
        codes = number[np.frombuffer(said.encode("ascii"), np.uint8)]
        n = (len(codes) - 1) // CHUNK
        if not n:
            continue
        x.append(codes[: n * CHUNK].reshape(n, CHUNK))
        y.append(codes[CHUNK : n * CHUNK + 1 : CHUNK])
        owners.append(np.full(n, len(names)))
        names.append(role)
    return Source(
        x=torch.from_numpy(np.concatenate(x)),
        y=torch.from_numpy(np.concatenate(y)),
        train=sum(map(len, y)),
        outputs=len(string.printable),
        task="classification",
        info=INFO["shakespeare"],
        class_names=tuple(string.printable),
        owners=torch.from_numpy(np.concatenate(owners)),
        owner_names=tuple(names),
    )
