"""The README: short, its programs run and print what stands there, its links lead somewhere."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

import bayesfl as bf

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_it_is_short():
    """At most 450 words of prose; all pages beside the reference have at most 40,000."""
    words = runpy.run_path(str(ROOT / "docs" / "words.py"))
    assert words["words"](ROOT / "README.md") <= 450
    assert sum(map(words["words"], words["pages"]())) <= 40_000


def test_prose_is_counted(tmp_path: Path):
    """Without code, tables, formulas, comments, addresses and options of directives."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One title\n\nThree *plain* [words](to/a.md) $x y$.\n\n```python\nno = 1\n```\n\n"
        "| no | no |\n|---|---|\n\n<!-- no -->\n:class: no\n{py:func}`~a.b` and `c`.\n"
    )
    words = runpy.run_path(str(ROOT / "docs" / "words.py"))["words"]
    assert words(page) == 6


def test_every_method_is_named_once():
    """By a link to the file that has it."""
    found = re.findall(r"\[`(\w+)`\]\((bayesfl/algorithms/\w+\.py)\)", README)
    assert sorted(name for name, _ in found) == sorted(bf.algorithms.PAPERS)
    assert all(f"def {name}(" in (ROOT / path).read_text() for name, path in found)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("door", range(3))
def test_a_door_opens(door: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each program prints what stands below it, line by line."""
    doors = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", README, re.M | re.S)
    assert len(doors) == 3
    program, printed = doors[door]
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert shown.getvalue() == printed
