"""The Python blocks of a page as one script, with the network that its commands would start."""

import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Context, RecordDict

from tests.flower.grid import LocalGrid

PART = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?|^<!-- the network "
    r"runs here -->$",
    re.M | re.S,
)
FILE = re.compile(r"# file: (\S+\.py)\n")


def has_blocks(page: Path) -> bool:
    """Say whether a page has Python blocks."""
    return "\n```python\n" in page.read_text(encoding="utf-8")


def run(page: Path, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Run a page's blocks in the present folder, and yield what each prints, with what the page
    says it prints.

    A block that begins with `# file: NAME` is written to that file instead; where the page's
    network runs, so does one in this process.
    """
    text = page.read_text(encoding="utf-8")
    names = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    for part in PART.finditer(text):
        if part["code"] is None:
            network(folder)
            continue
        if named := FILE.match(part["code"]):
            file = folder / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(part["code"])
            continue
        # At the lines where they stand: tracebacks name them.
        block = "\n" * text.count("\n", 0, part.start("code")) + part["code"]
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile(block, str(page), "exec"), names)
        yield shown.getvalue(), part["printed"]


def network(folder: Path) -> None:
    """Run the app of two hospitals as two nodes with files of their own would."""
    for seed, name in enumerate(("basel", "chur")):
        (folder / name).mkdir()
        made(seed).to_csv(folder / name / f"{name}.csv", index=False)
    importlib.invalidate_caches()
    server, node = (importlib.import_module(f"wards.{part}").app for part in ("server", "node"))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    server(_Nodes({100: node, 101: node}, folder), context)


class _Nodes(LocalGrid):
    """Two nodes, configured as the page says."""

    def context(self, node: int) -> Context:
        name = ("basel", "chur")[node - 100]
        config: dict[str, Any] = {
            "client-id": node - 100,
            "hospital": name.title(),
            "state-dir": str(self.folder / name / "state"),
            "data-file": str(self.folder / name / f"{name}.csv"),
        }
        return Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )


def made(seed: int) -> pd.DataFrame:
    """A hospital's patients: whether they are ill depends on age and pressure, in the second one on
    cholesterol as well.
    """
    rng = np.random.default_rng(seed)
    age, pressure, cholesterol = (
        rng.normal(centre, spread, 300).round()
        for centre, spread in ((62, 9), (130, 15), (240, 45))
    )
    score = (age - 62) / 6 + (pressure - 130) / 20 + seed * (cholesterol - 240) / 30
    return pd.DataFrame(
        {
            "age": age,
            "pressure": pressure,
            "cholesterol": cholesterol,
            "ill": (rng.random(300) < 1 / (1 + np.exp(-score))).astype(int),
        }
    )
