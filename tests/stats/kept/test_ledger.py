"""The ledger of a node: what is kept, in what form, and under whose lock."""

import json
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bayesfl as bf
from bayesfl.stats import Policy
from bayesfl.stats.asking import Questions, Sums
from bayesfl.stats.kept import ledger as module
from bayesfl.stats.kept.ledger import FILE, Ledger
from bayesfl.stats.policy import Refusal


def asked(folder: Path, rows: pd.DataFrame, **options: object) -> float:
    """The sum of a column, asked of a node's folder."""
    policy = Policy()
    with Ledger.opened(folder) as policy.ledger:
        tables = bf.stats.tables({"va": rows}, policy=policy, **{"terms": ["age"], **options})  # pyright: ignore
        sums = Questions(tables).conduct(Sums(1, len(tables.columns)))
        return float(sums["centre"][0] * sums["weight"])


def rows(n: int = 43) -> pd.DataFrame:
    cut = {f"upto{k}": (np.arange(n) < k).astype(int) for k in (20, 23)}
    return pd.DataFrame({"age": np.arange(n) * 1.5, "patient": [f"p{i}" for i in range(n)], **cut})


def test_it_outlives_a_process(tmp_path: Path):
    """Rows and columns are compared with those of earlier analyses, and new rows wait."""
    first = asked(tmp_path, rows(43), outcome="upto20")
    assert asked(tmp_path, rows(50), outcome="upto20") == pytest.approx(first)
    with pytest.raises(Refusal, match="its rows differ"):
        asked(tmp_path, rows(40), outcome="upto20")
    with pytest.raises(Refusal, match=r"'upto23' differs by fewer from another column"):
        asked(tmp_path, rows(43), outcome="upto23")
    assert asked(tmp_path, rows(53), outcome="upto20") > first


def test_rows_alike_are_different_people(tmp_path: Path):
    twins = pd.DataFrame({"age": [50.0, 60.0] * 20})
    asked(tmp_path, twins)
    with pytest.raises(Refusal, match="its rows differ"):
        asked(tmp_path, twins.iloc[1:])


def test_it_holds_no_value_in_clear(tmp_path: Path):
    """Hashes have a key of their own; the folder is the node's alone."""
    folders = tmp_path / "one", tmp_path / "two"
    found = []
    for folder in folders:
        asked(folder, rows())
        assert (folder.stat().st_mode & 0o077) == 0
        text = (folder / FILE).read_text()
        assert "p17" not in text
        found.append(json.loads(text))
    one, two = (file["analyses"]["va"][0]["rows"] for file in found)
    assert len({*one, *two}) == 2 * 43


def test_two_processes_take_turns(tmp_path: Path):
    """Neither loses what the other wrote."""

    def write(run: int) -> None:
        for _ in range(10):
            with Ledger.opened(tmp_path) as ledger:
                ledger.note(run, "Sums", "sum [3]")

    threads = [threading.Thread(target=write, args=(run,)) for run in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["run"] for line in Ledger.read(tmp_path).lines) == sorted([1, 2, 3] * 10)


def test_its_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is compared is not."""
    monkeypatch.setattr(module, "LINES", 5)
    ledger = Ledger()
    for run in range(20):
        ledger.note(run, "Sums", "sum [3]", "min_rows" if run % 2 else "")
    assert [line["run"] for line in ledger.lines] == [15, 16, 17, 18, 19]
    assert "run 19: Sums, refused by min_rows" in str(ledger)
    assert "run 18: Sums, answered sum [3]" in str(ledger)


def test_rows_are_compared_by_the_columns_of_earlier_tables(tmp_path: Path):
    """Whatever types numbers are read as, and whatever columns are new."""
    beds = rows(44).assign(beds=np.arange(44))
    first = asked(tmp_path, beds[:43])
    gap = beds.astype({"beds": float})
    gap.loc[43, "beds"] = np.nan
    assert asked(tmp_path, gap) == pytest.approx(first)  # the new row waits
    assert asked(tmp_path, beds.assign(more=1)) == pytest.approx(first)
    with pytest.raises(Refusal, match="its rows differ"):
        asked(tmp_path, beds[:42].assign(more=1))
    with pytest.raises(Refusal, match=r"had \['beds'\], and cannot be compared"):
        asked(tmp_path, rows(43))
