"""The Python blocks of a page are one script, run in order; they assert what the page says, and print what stands after them."""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

import bayesfl as bf

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def blocks(page):
    """The blocks of a page at the lines where they stand, so that a traceback names them, and what each is said to print."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield "\n" * text.count("\n", 0, match.start(1)) + match[1], match[2]


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts and BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a page writes
    monkeypatch.setattr(bf.algorithms, "PAPERS", dict(bf.algorithms.PAPERS))
    names = {"__name__": f"docs_{page.stem}"}
    for block, printed in blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile(block, str(page), "exec"), names)
        assert printed is None or shown.getvalue() == printed
    if "matplotlib.pyplot" in sys.modules:  # other libraries' figures are registered there
        sys.modules["matplotlib.pyplot"].close("all")


def test_the_page_on_extending_is_among_them():
    assert "extending.md" in [page.name for page in PAGES]
