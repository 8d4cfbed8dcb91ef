"""Made-up patients of three hospitals, and their network on this machine."""

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pandas as pd
from loopback import Loopback, network

HERE = Path(__file__).parent
PATIENTS = {"basel": 180, "bern": 150, "chur": 120}


def make_files(folder: Path) -> dict[str, Path]:
    """Made-up patients of each hospital in a CSV file; {hospital: its file}. Hospitals differ in
    how many die within five years, in what treatment does, and in whom they treat.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    files = {}
    for place, (name, n) in enumerate(PATIENTS.items()):
        age = rng.normal(62 + 2 * place, 9, n).round(1)
        stage = rng.choice(["I", "II", "III"], n, p=[0.4, 0.35, 0.25])
        treated = rng.random(n) < 0.3 + 0.15 * place
        eta = -0.8 + 0.04 * (age - 62) + 0.6 * (stage == "II") + 1.2 * (stage == "III")
        eta += 0.3 * place - (0.9 - 0.3 * place) * treated
        died = rng.random(n) < 1 / (1 + np.exp(-eta))
        months = np.where(died, rng.exponential(20 * np.exp(-eta / 2)), 60.0).clip(0.1, 60.0)
        columns = {"age": age, "stage": stage, "treated": treated.astype(int)}
        columns["months"] = months.round(1)
        files[name] = folder / f"{name}.csv"
        pd.DataFrame({**columns, "died": died.astype(int)}).to_csv(files[name], index=False)
    return files


def network_of(out: Path) -> AbstractContextManager[Loopback]:
    """A network of the three hospitals, which is a context that stops it."""
    files = make_files(out / "data")
    return network(
        out,
        len(files),
        [
            {"site": name, "data-file": str(file), "policy": str((HERE / "policy.toml").absolute())}
            for name, file in files.items()
        ],
    )
