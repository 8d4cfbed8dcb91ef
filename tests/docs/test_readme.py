"""The README: short, its program runs and prints what stands there, its links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import bayesfl as bf

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_it_is_short():
    """At most 450 words, those of tables and code counted, comments not."""
    words = [
        word
        for word in re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL).split()
        if re.search(r"\w", word)
    ]
    assert len(words) <= 450


def test_every_method_is_named_once():
    """By a link to the file that has it."""
    found = re.findall(r"\[`(\w+)`\]\((bayesfl/algorithms/\w+\.py)\)", README)
    assert sorted(name for name, _ in found) == sorted(bf.algorithms.PAPERS)
    assert all(f"def {name}(" in (ROOT / path).read_text() for name, path in found)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.slow
def test_the_program_prints_what_stands_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Line by line, and it leaves a picture and a saved run."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert shown.getvalue() == printed
    assert (tmp_path / "reliability.png").stat().st_size > 10_000
    assert (tmp_path / "pfedvem").is_dir()
