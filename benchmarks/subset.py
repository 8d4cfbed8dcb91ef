"""Writes the part of CIFAR-100 that seed 0 of pFedVEM's reduced table reads, for `make gpu`: python
benchmarks/subset.py FOLDER. The other images are zeros, which take no room, so that clients are the
same as with all images, though the data's hash is another. The whole set is read from BAYESFL_DATA.
"""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.papers import pfedvem


def main(folder: Path) -> None:
    with np.load(Path(os.environ["BAYESFL_DATA"]) / "cifar100.npz") as file:
        arrays = {name: file[name] for name in file.files}
    clients = pfedvem.parts("reduced")["CIFAR-100"].data(seed=0)
    used = np.unique(np.concatenate([split.index.numpy() for split in clients.splits.values()]))
    first = len(arrays["x_train"])
    for name, rows in (("x_train", used[used < first]), ("x_test", used[used >= first] - first)):
        kept = np.zeros_like(arrays[name])
        kept[rows] = arrays[name][rows]
        arrays[name] = kept
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "cifar100.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
