"""Figures in prose are those of the committed results."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES, TABLES = (runpy.run_path(str(ROOT / "docs" / name)) for name in ("figures.py", "tables.py"))
UNMARKED = {
    "README.md": 2,
    "docs/decisions/0004-layer-rules-go-back-by-hand.md": 6,
    "docs/decisions/0005-one-split-of-shared-tensors.md": 1,
    "docs/decisions/0008-what-stands-between.md": 7,
    "docs/demo.md": 2,
    "docs/deployment.md": 2,
    "docs/derivations/curvature.md": 1,
    "docs/derivations/fedpac.md": 3,
    "docs/derivations/fedsi.md": 1,
    "docs/gotchas.md": 1,
    "docs/papers/fedem.md": 11,
    "docs/papers/fedsi.md": 5,
    "docs/papers/perinvfl.md": 6,
    "docs/privacy.md": 2,
    "docs/selection.md": 4,
    "docs/speed.md": 2,
    "docs/start.md": 1,
}
"""How many decimals of a page's prose no expression makes; the counts should fall.

Left are numbers of arXiv, sections and versions; settings (learning rates, pulls, precisions, thresholds, shares of colours); figures of
other papers and of tests; and what was read off by hand, once, which the page then says: timings in decision 0008, other runs in speed.
"""


def test_a_figure_is_written_as_its_expression_says():
    """With the decimals and the unit that stand there; what is no figure stays."""
    text = "version 3.11, **1.5 %**<!-- = 100 * 0.25 -->, .05<!-- = 1 / 8 -->, 7 nats<!-- = len([1, 2]) -->, 1,000<!-- = 2e4 -->"
    assert FIGURES["written"](text) == text.replace("1.5", "25.0").replace(".05", ".12").replace("7 ", "2 ").replace("1,000", "20,000")
    assert FIGURES["unmarked"](text + " `0.1` and $0.2$\n| 0.3 |\n0.4 (see v1.2.3)") == ["3.11", "0.4"]
    assert FIGURES["unmarked"]("<!-- a: begin -->\nprecision 0.1\n<!-- a: end --> 0.2") == ["0.2"]
    assert FIGURES["written"]("1<!-- = max([mean(row) for row in ([1, 3], [5])]) -->").startswith("5<")


@pytest.mark.parametrize("made", ["nothing[0]", 'demo["rows"]["FedAvgg"]', 'cells(papers.fedsi, "no/*")'])
def test_a_figure_of_nothing_is_an_error(made: str):
    with pytest.raises((KeyError, NameError), match=r"nothing|FedAvgg|no/"):
        FIGURES["written"](f"1<!-- = {made} -->")


@pytest.mark.parametrize("page", FIGURES["pages"](), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_what_was_made(page: Path):
    """Every marked figure as the results give it, and no decimal more that nothing makes."""
    text = page.read_text()
    assert FIGURES["written"](text) == text
    assert len(FIGURES["unmarked"](text)) == UNMARKED.get(str(page.relative_to(ROOT)), 0), FIGURES["unmarked"](text)


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_the_tables_that_were_made(page: Path):
    """Those that the committed results, the methods and the docstrings give."""
    text = page.read_text()
    assert all(make() in text for make in TABLES["PAGES"][page])
