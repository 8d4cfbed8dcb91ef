"""A page of one file, whose tables a browser sorts."""

import re
from pathlib import Path

import pytest

from bayesfl.base.display.html import facts, picture, table
from bayesfl.base.display.page import Section, page, write_page
from tests.browser import assert_fits, needs_browser, seen

COLUMNS = {"ward": ["b", "<a>", "c10", "c9"], "n": [9.0, None, -1.0, 10.0]}
SORTED = """
  const heads = document.querySelectorAll("th button");
  const rows = () => [...document.querySelectorAll("tbody tr")];
  const names = () => rows().map((row) => row.cells[0].innerText);
  return [1, 1, 0].map((column) => (heads[column].click(), names()));
"""


def test_it_needs_no_other_file():
    """Nothing is fetched, whatever the titles."""
    found = page("<T>", [Section("One & two", "<p>x</p>")], lead="a < b", headline={"n": 3})
    assert not re.findall(r'(?:src|href)="(?!#|data:)|url\(|@import', found)
    for part in ("<title>&lt;T&gt;</title>", "<h2>One &amp; two</h2>", "a &lt; b", "<dd>3</dd>"):
        assert part in found


@needs_browser
@pytest.mark.slow
def test_a_browser_sorts(tmp_path: Path):
    """Numbers as numbers, what is not known last either way, names with their numbers."""
    write_page(tmp_path / "page.html", "Wards", [Section("Table", table(COLUMNS, foot=["all", 1]))])
    found = seen(tmp_path / "page.html", 1400, SORTED)
    assert found["problems"] == []
    assert found["found"] == [
        ["c10", "b", "c9", "<a>"],
        ["c9", "b", "c10", "<a>"],
        ["<a>", "b", "c9", "c10"],
    ]


@needs_browser
@pytest.mark.slow
def test_it_fits(tmp_path: Path):
    """A phone too, with names, tables and pictures that are wider than that."""
    from matplotlib.figure import Figure

    wide = {f"column {i}": ["x" * 30] for i in range(40)}
    parts = [
        Section("W" * 60, facts({"y" * 80: "z" * 80}) + table(wide) + picture(Figure((16, 2)), ""))
    ]
    write_page(tmp_path / "page.html", "T" * 90, parts, headline={"h" * 50: "v" * 50})
    assert_fits(tmp_path / "page.html")
