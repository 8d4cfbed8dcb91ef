"""The Python blocks of a page are one script, run in order; they assert what the page says, and
print what stands after them.
"""

import sys
from pathlib import Path

import pytest

import bayesfl as bf
from bayesfl.federation.store import files
from tests.docs.pages import has_blocks, run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts and has_blocks(page)
]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"
)  # torch's own, in torch.export
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a page writes
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bf.algorithms, "PAPERS", dict(bf.algorithms.PAPERS))
    monkeypatch.setattr(files, "STEPS", dict(files.STEPS))
    for shown, printed in run(page, tmp_path):
        assert printed is None or shown == printed
    if "matplotlib.pyplot" in sys.modules:  # other libraries' figures are registered there
        sys.modules["matplotlib.pyplot"].close("all")


def test_the_page_on_extending_is_among_them():
    assert "extending.md" in [page.name for page in PAGES]
