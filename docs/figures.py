"""Writes the figures in the prose of the README and of pages under docs from the committed results:
python docs/figures.py.

A figure is a number with the expression that makes it in a comment behind it, which no reader sees:

    FedSI reaches 0.847<!-- = mean(cells(papers.fedsi, "mnist/fedsi/*", "rows", "FedSI", "nll")) -->

Names are those of files under benchmarks/results, `papers.fedsi` that of
benchmarks/results/papers/fedsi.json; square brackets read them. `mean`, `se` (standard error),
`median`, `min`, `max`, `abs` and `len` take lists, `cells` collects from every cell whose key
matches a pattern, `lines("ditto")` counts the lines of a method's composition. As many decimals are
written as stand there; a sign before the number and units behind it stay.
"""

import ast
import fnmatch
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = re.compile(
    r"(?P<sign>[-−]?)(?P<number>\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"(?P<unit>(?:\s?%|\*\*|\s(?:s|nats|points|MiB|GiB))*)<!-- = (?P<made>.+?) -->"
)
_MADE = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)
_ASIDE = re.compile(
    r"```.*?```|<!--.*?-->|\$\$.*?\$\$|\$[^$\n]*\$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL
)
_DECIMAL = re.compile(r"(?<![\w.])[-−]?(?:\d+)?\.\d+(?!\.\d)")


def cells(saved: Mapping[str, Any], pattern: str, *path: str) -> list[Any]:
    """Collect what stands under `path` in every cell whose key matches, those of several seeds for
    instance.
    """
    found = []
    for key, cell in saved["cells"].items():
        if fnmatch.fnmatchcase(key, pattern):
            for name in path:
                cell = cell[name]
            found.append(cell)
    if not found:
        raise KeyError(f"no cell matches {pattern!r}")
    return found


def lines(method: str) -> int:
    """Count the lines of a method's function below its docstring."""
    for path in (ROOT / "bayesfl" / "algorithms").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == method:
                return (node.body[-1].end_lineno or 0) - node.body[1].lineno + 1
    raise KeyError(f"no method {method!r}")


def _names() -> dict[str, Any]:
    def of(folder: Path) -> dict[str, Any]:
        return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    def se(values: Sequence[float]) -> float:
        return statistics.stdev(values) / math.sqrt(len(values))

    papers = SimpleNamespace(**of(RESULTS / "papers"))
    tools = {"cells": cells, "lines": lines, "mean": mean, "se": se, "median": statistics.median}
    return {
        **of(RESULTS),
        "papers": papers,
        **tools,
        "min": min,
        "max": max,
        "abs": abs,
        "len": len,
    }


def written(text: str) -> str:
    """Return a page's text with every figure as the committed results give it.

    Raises:
        KeyError, NameError, SyntaxError: An expression names what is not there; the message has the
            expression.
    """
    names = _names()

    def write(found: re.Match[str]) -> str:
        number, made = found["number"], found["made"]
        try:
            # An expression of a page may raise anything; it is named and passed on.
            value = float(eval(made, {**names, "__builtins__": {}}))
        except Exception as error:
            raise type(error)(f"{made}: {error}") from error
        places = len(number.partition(".")[2])
        size = (
            f"{abs(value):,.{places}f}"
            if "," in number or abs(value) >= 10_000
            else f"{abs(value):.{places}f}"
        )
        size = size.removeprefix("0") if number.startswith(".") else size
        sign = (found["sign"] or "-") if value < 0 and size.strip("0.") else ""
        return f"{sign}{size}{found['unit']}<!-- = {made} -->"

    return FIGURE.sub(write, text)


def unmarked(text: str) -> list[str]:
    """Return the decimals of a page that nothing makes: those outside code, formulas and what
    docs/tables.py writes.
    """
    return _DECIMAL.findall(_ASIDE.sub(" ", FIGURE.sub(" ", _MADE.sub(" ", text))))


def pages() -> list[Path]:
    """Return the README, the page for contributors, every page of the documentation and those
    beside the benchmarks.
    """
    built = ROOT / "docs" / "_build"
    found = [
        page
        for folder in ("docs", "benchmarks")
        for page in sorted((ROOT / folder).rglob("*.md"))
        if built not in page.parents
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text()))
