"""Tables and answers of the pages are those of the committed results."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
STUDIES = sorted(
    path for path in (ROOT / "docs" / "studies").glob("*.md") if path.name != "index.md"
)
ASIDE = re.compile(
    r"<!-- (\w+): begin -->.*?<!-- \1: end -->|```.*?```|<!--.*?-->|\$\$.*?\$\$|\$[^$\n]*\$|"
    r"`[^`\n]*`|\]\([^)]*\)|arXiv:[\d.]*\d",
    re.DOTALL,
)
DECIMAL = re.compile(r"(?<![\w.])[-−]?\d*\.\d+(?!\.\d)")
PLAIN = set(
    "0.01 0.05 0.1 0.5 0.75 0.9 0.95 1.41 2.0 2.1 3.11".split()
    # Three links of one Gaussian, and the seconds of a test.
    + "0.775 0.777 0.845 1.5".split()
)
"""The decimals that prose may have: settings, levels and versions, and those of derivations."""


def plain(text: str) -> list[str]:
    """Return the decimals in a page's prose, tables included, that no script has written."""
    return DECIMAL.findall(ASIDE.sub(" ", text))


def test_decimals_of_prose_are_found():
    """Those of tables typed by hand included; not those of code, formulas and what is generated."""
    found = plain("-0.3, 0.3x, `0.1` and $0.2$\n| 0.4 |\n.5 (see v1.2.3)")
    assert found == ["-0.3", "0.3", "0.4", ".5"]
    assert plain("<!-- a: begin -->\nprecision 0.1\n<!-- a: end --> 0.2") == ["0.2"]


def test_a_mark_of_nothing_is_an_error():
    with pytest.raises(KeyError, match="nobody"):
        TABLES["written"]("<!-- nobody: begin -->\n<!-- nobody: end -->")


@pytest.mark.parametrize("page", TABLES["pages"](), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_what_was_made(page: Path):
    """What the committed results, the methods and the docstrings give; beside it prose has no
    decimal but settings.
    """
    text = page.read_text()
    assert TABLES["written"](text) == text
    if "decisions" not in page.parts:  # what they saw, once
        assert set(plain(text)) <= PLAIN


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_a_study_can_be_read(page: Path):
    """A question, an answer in a few sentences, one picture; the prose is short."""
    text = page.read_text()
    _, question, answer = text.split("\n\n", 3)[:3]
    assert question.startswith("**")
    assert "?" in question
    assert re.fullmatch(r"<!-- \w+_answer: begin -->\n.*\n<!-- \w+_answer: end -->", answer, re.S)
    assert len(re.findall(r"\.\s(?=[A-Z0-9`])", answer)) == 2, "three sentences"
    assert len(DECIMAL.findall(re.sub(r" ± [\d.]+", "", answer))) <= 3, "three figures"
    assert len(re.findall(r"!\[[^\]]+\]\(", text)) == 1
    prose = re.sub(r"(?ms)^:::.*?^:::$|<!--.*?-->|^\|.*?$|\]\([^)]*\)", "", text)
    assert len(re.findall(r"\b\w[\w'’.-]*", prose)) <= 900
