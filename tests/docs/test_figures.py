"""Figures in prose are those of the committed results."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES, TABLES = (
    runpy.run_path(str(ROOT / "docs" / name)) for name in ("figures.py", "tables.py")
)
UNMARKED = {
    "README.md": "3.11 2.0",
    "CONTRIBUTING.md": "3.11",
    "docs/choosing.md": "0.5 0.75 0.5",
    "docs/decisions/0004-layer-rules-go-back-by-hand.md": "1.8 2.0 0.95 1.1 1.2 1.4",
    "docs/decisions/0005-one-split-of-shared-tensors.md": "2.5",
    "docs/decisions/0008-what-stands-between.md": "0.94 1.3 0.08 1.5 0.8 0.7 1.5",
    "docs/studies/demo.md": "0.01",
    "docs/deployment.md": "1.41 1.41",
    "docs/derivations/curvature.md": "1.5",
    "docs/derivations/fedpac.md": "2306.11867 0.01 0.1",
    "docs/derivations/fedsi.md": "2404.15657 0.01 0.1 0.775 0.777 0.845",
    "docs/glossary.md": "0.01",
    "docs/howto/posteriors.md": ".57 .82 .9 .44",
    "docs/gotchas.md": "7.2",
    "docs/howto/adapters.md": "0.01",
    "docs/howto/reliability.md": "0.95",
    "docs/studies/links.md": "0.1",
    "docs/studies/long-training.md": "0.1 0.1 0.1 0.001 0.002 0.003 0.1 0.1 0.001 0.05 0.1 0.2 0.3 0.5 "
    "0.05 0.1 0.01 0.9",
    "docs/studies/fedem.md": "0.03 0.1 0.3 0.9 0.1 0.4 1.6 0.03 0.4 1.6 1.6",
    "docs/studies/fedsi.md": "2404.15657 0.1 0.1 0.01",
    "docs/studies/perinvfl.md": "2211.11243 .95 .80 .90 .75 .75 .1 .75",
    "docs/privacy.md": "1.83 2.10",
    "docs/studies/selection.md": "0.5 0.1 0.01 0.02",
    "docs/studies/speed.md": "1.8 2.6",
    "docs/start.md": "3.11",
    "benchmarks/reliability.md": "2.1",
}
"""The decimals of a page that no expression makes, those of tables written by hand included; they
should become fewer.

Left are numbers of arXiv, sections and versions; settings (learning rates, pulls, precisions,
thresholds, shares of colours); figures of other papers and of tests; and what was read off by hand,
once, which the page then says: timings in decision 0008, other runs in speed.
"""


def test_a_figure_is_written_as_its_expression_says():
    """With the decimals and the unit that stand there; what is no figure stays."""
    text = (
        "version 3.11, **1.5 %**<!-- = 100 * 0.25 -->, .05<!-- = 1 / 8 -->, 7 nats<!-- = len([1, "
        "2]) -->, 1,000<!-- = 2e4 -->"
    )
    assert FIGURES["written"](text) == text.replace("1.5", "25.0").replace(".05", ".12").replace(
        "7 ", "2 "
    ).replace("1,000", "20,000")
    assert FIGURES["unmarked"](text + " `0.1` and $0.2$\n| 0.3 |\n0.4 (see v1.2.3)") == [
        "3.11",
        "0.3",
        "0.4",
    ]
    assert FIGURES["unmarked"]("<!-- a: begin -->\nprecision 0.1\n<!-- a: end --> 0.2") == ["0.2"]
    assert FIGURES["written"]("1<!-- = max([mean(row) for row in ([1, 3], [5])]) -->").startswith(
        "5<"
    )


def test_a_sign_is_part_of_a_figure():
    """A direction that turns round changes the page, and so does a sign that an expression does not
    give.
    """
    assert (
        FIGURES["written"]("gains 0.50<!-- = -0.5 -->, -2.0<!-- = 2 -->, −1<!-- = -3 -->")
        == "gains -0.50<!-- = -0.5 -->, 2.0<!-- = 2 -->, −3<!-- = -3 -->"
    )
    assert FIGURES["unmarked"]("-0.3 and 0.3x") == ["-0.3", "0.3"]


@pytest.mark.parametrize(
    "made", ["nothing[0]", 'demo["rows"]["FedAvgg"]', 'cells(papers.fedsi, "no/*")']
)
def test_a_figure_of_nothing_is_an_error(made: str):
    with pytest.raises((KeyError, NameError), match=r"nothing|FedAvgg|no/"):
        FIGURES["written"](f"1<!-- = {made} -->")


@pytest.mark.parametrize("page", FIGURES["pages"](), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_what_was_made(page: Path):
    """Every marked figure as the results give it, and no decimal more that nothing makes."""
    text = page.read_text()
    assert FIGURES["written"](text) == text
    assert " ".join(FIGURES["unmarked"](text)) == UNMARKED.get(str(page.relative_to(ROOT)), "")


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_the_tables_that_were_made(page: Path):
    """Those that the committed results, the methods and the docstrings give."""
    text = page.read_text()
    assert all(make() in text for make in TABLES["PAGES"][page])
