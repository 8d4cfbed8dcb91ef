"""Formulas of docstrings, which are plain text between dollar signs, as LaTeX."""

import re

NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi "
    "psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega sum prod log exp min max det sqrt"
)
SIGNS = {
    "||": r"\|",
    " | ": r" \mid ",
    "<-": r"\leftarrow ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "!=": r"\ne ",
    "~": r"\sim ",
    "*": r"\, ",
    "->": r"\to ",
    " (x) ": r" \otimes ",
}
WORDS = {
    "grad": r"\\nabla",
    "lam": r"\\lambda",
    "in": r"\\in",
    r"(\w)bar": r"\\bar{\1}",
    r"(\w)hat": r"\\hat{\1}",
}


def latex(formula: str) -> str:
    """Return `rho_j^2 = sum_j w_ij / D` in LaTeX: Greek letters, functions, subscripts, powers."""
    for sign, command in SIGNS.items():
        formula = formula.replace(sign, command)
    for word, command in WORDS.items():
        formula = re.sub(rf"(?<![A-Za-z\\]){word}(?![A-Za-z])", command, formula)
    formula = re.sub(rf"(?<![A-Za-z\\])({NAMES.replace(' ', '|')})(?![A-Za-z])", r"\\\1", formula)
    formula = _braced(formula)
    # Options' names, other words, and numbers that letters have, as b1.
    formula = re.sub(r"(?<![\w\\])([a-z]{3,})_(lr|[a-z]{3,})", r"\\text{\1\\_\2}", formula)
    formula = re.sub(
        r"(?<![A-Za-z\\_^])(?<!\\text{)([A-Za-z]{2,}\d*)", r"\\operatorname{\1}", formula
    )
    formula = re.sub(r"(?<![\w\\^])([A-Za-z])(\d+)", r"\1_{\2}", formula)
    # Up to two letters are indices.
    formula = re.sub(r"(?<!\\)([_^])([A-Za-z]{3,})", r"\1{\\text{\2}}", formula)
    return re.sub(r"(?<!\\)([_^])(\\?[A-Za-z]+|-?\d+|-?[A-Za-z])", r"\1{\2}", formula)


def _braced(formula: str) -> str:
    """Give powers, subscripts and roots in parentheses braces."""
    while found := re.search(r"(?:[_^]|\\sqrt)\(", formula):
        end = start = found.end()
        depth = 1
        while depth:
            depth += {"(": 1, ")": -1}.get(formula[end], 0)
            end += 1
        formula = f"{formula[: start - 1]}{{{formula[start : end - 1]}}}{formula[end:]}"
    return formula
