"""Each snippet of the gallery runs alone, and each picture has a text."""

import ast
import builtins
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text()
SNIPPET = re.compile(
    r"^### (?P<title>.*?)$.*?^---\n(?P<meta>.*?)^---\n(?P<code>.*?)^```$", re.M | re.S
)
SNIPPETS = {found["title"]: found for found in SNIPPET.finditer(TEXT)}


def undefined(code: str) -> set[str]:
    """Return the names that code reads and neither makes nor imports."""
    read, made = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    return read - made


def test_an_undefined_name_is_found():
    assert undefined("import a as b\nc = lambda d: d + b\nprint(c, e)") == {"e"}


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_snippet_stands_alone(title: str):
    """It makes all that it reads."""
    assert undefined(SNIPPETS[title]["code"]) == set()
    assert re.search(r"alt: \".{10,}\"", SNIPPETS[title]["meta"])


def test_all_are_found():
    assert len(SNIPPETS) == TEXT.count("### ") == 16
