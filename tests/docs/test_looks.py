"""Code on the pages has enough contrast, and formulas of docstrings are mathematics there."""

import re
import runpy
from pathlib import Path

from pygments.styles import get_style_by_name

DOCS = Path(__file__).parents[2] / "docs"
PAPER = {"light": "f8f9fb", "dark": "202020"}  # furo's colours behind code


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """From 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag():
    assert round(contrast("000000", "ffffff"), 6) == 21
    assert round(contrast("777777", "ffffff"), 2) == 4.48


def test_code_can_be_read():
    """At least 4.5 for every kind of token that one sees."""
    line = next(x for x in (DOCS / "conf.py").read_text().splitlines() if x.startswith("pygments"))
    for light, name in zip(PAPER, re.findall('"(.+?)"', line), strict=True):
        for kind, look in get_style_by_name(name):
            if look["color"] and str(kind) != "Token.Text.Whitespace":
                assert contrast(look["color"], PAPER[light]) >= 4.5, (light, kind)


def test_a_formula_is_read_as_mathematics():
    latex = runpy.run_path(str(DOCS / "mathematics.py"))["latex"]
    assert latex("w_j | w ~ N(w, rho_j^2 I)") == r"w_{j} \mid w \sim  N(w, \rho_{j}^{2} I)"
    assert (
        latex("sum_j tr(H_max^-1) <= 2 * x")
        == r"\sum_{j} \operatorname{tr}(H_{\max}^{-1}) \le  2 \,  x"
    )
    assert latex("KL(q || p_old)") == r"\operatorname{KL}(q \| p_{\text{old}})"
    assert (
        latex("w_ij <- x^(1/2) - sqrt(a (b + c))")
        == r"w_{ij} \leftarrow  x^{1/2} - \sqrt{a (b + c)}"
    )
    assert latex("lam grad F(vbar_j)") == r"\lambda \nabla F(\bar{v}_{j})"
    assert latex("b1^t prior_precision != L^-T") == r"b_{1}^{t} \text{prior\_precision} \ne  L^{-T}"
    assert latex("B (x) A, j in C") == r"B \otimes A, j \in C"
    assert (
        latex("e^(cos(z, z_own)) eps1")
        == r"e^{\operatorname{cos}(z, z_{\text{own}})} \operatorname{eps1}"
    )
    assert latex("server_lr >= f -> zhat") == r"\text{server\_lr} \ge  f \to  \hat{z}"
