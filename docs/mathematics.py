"""Formulas of docstrings, which are plain text between dollar signs, as LaTeX."""

import re

NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi chi "
    "psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega sum prod log exp min max det sqrt"
)
SIGNS = {
    "||": r"\|",
    " | ": r" \mid ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "~": r"\sim ",
    "*": r"\, ",
    "->": r"\to ",
}


def latex(formula: str) -> str:
    """Return `rho_j^2 = sum_j w_ij / D` in LaTeX: Greek letters, functions, subscripts, powers."""
    for sign, command in SIGNS.items():
        formula = formula.replace(sign, command)
    formula = re.sub(rf"(?<![A-Za-z\\])({NAMES.replace(' ', '|')})(?![A-Za-z])", r"\\\1", formula)
    formula = re.sub(r"(?<![A-Za-z\\])([A-Za-z]{2,})", r"\\text{\1}", formula)
    return re.sub(r"([_^])(\\text\{\w+\}|\\?[A-Za-z]+|-?\d+)", r"\1{\2}", formula)
