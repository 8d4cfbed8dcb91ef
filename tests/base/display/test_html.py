"""Pieces of HTML: numbers as people write them, text escaped."""

import math

import numpy as np
from matplotlib.figure import Figure

from bayesfl.base.display.html import Cell, facts, picture, table, text


def test_text():
    """Numbers in few digits, what is not known as a dash, the rest escaped."""
    pairs = {
        0.5: "0.500",
        -2.5: "−2.500",
        1e6: "1e+06",
        12: "12",
        True: "True",
        "a & b": "a &amp; b",
    }
    assert {value: text(value) for value in pairs} == pairs
    assert [text(np.float32(0.25)), text(np.int64(1200)), text(0)] == ["0.250", "1,200", "0"]
    assert [text(None), text(math.nan), text(Cell(1.0, "<1>"))] == ["–", "–", "&lt;1&gt;"]


def test_table():
    """Names, numbers that are missing, a last row, shades by the largest number."""
    found = table(
        {"who": ["a", "b"], "<n>": [4, None], "m": [2, 1], "why": ["", "no"]},
        caption="Who & how",
        foot=["all", 4],
        shaded=["m"],
    )
    assert found.startswith("<p>Who &amp; how</p>")
    assert '<th class="number">&lt;n&gt;</th>' in found
    assert '<td class="number" data-value="nan">–</td>' in found
    assert 'style="--share: 1.000">2</td>' in found
    assert 'style="--share: 0.500">1</td>' in found
    assert "<td>no</td>" in found
    assert 'data-value="-Infinity"' in table({"who": ["a"], "n": [-math.inf]})
    assert '<tfoot><tr><th scope="row">all</th><td class="number" data-value="4.0">4</td>' in found


def test_facts_and_pictures():
    """A picture is in the page itself, and says in words what it shows."""
    assert facts({"a": "<b>"}) == '<dl class="facts"><div><dt>a</dt><dd>&lt;b&gt;</dd></div></dl>'
    found = picture(Figure((2, 1)), 'a "b"')
    assert 'width="192" height="96" alt="a &quot;b&quot;" src="data:image/png;base64,iVBOR' in found
    assert len(picture(Figure((2000, 2)), "wider than images may be")) > 100
