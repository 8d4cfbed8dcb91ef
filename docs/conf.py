"""Sphinx: `python -m sphinx -q -n -W docs docs/_build`."""

import dataclasses
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import bayesfl

sys.path.insert(0, str(Path(__file__).parent))
from mathematics import latex

project = "bayesfl"
author = "The bayesfl developers"
copyright = author
version = release = bayesfl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # formulas without a network
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "jupyter_execute"]  # the second is of the last build
html_theme = "furo"
html_title = f"bayesfl {version}"
html_static_path = ["static"]
html_css_files = ["bayesfl.css"]
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
html_show_sourcelink = False
pygments_style, pygments_dark_style = "default", "github-dark"  # both of contrast 4.5 or more
copybutton_exclude = ".linenos, .gp, .go"

# Tutorials and the gallery are text notebooks, which every build runs anew in a folder of its own.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 600  # seconds for a cell, on a machine that does other things beside
nb_execution_raise_on_error = True
nb_output_stderr = "error"
nb_merge_streams = True
nb_render_image_options = {"alt": "What the lines above draw"}
# For the notebooks' processes: the warning of tqdm where ipywidgets are not installed, and the one
# that ArviZ gives with its first import of a day.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found,ignore::FutureWarning:arviz"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90  # a longer one has a line for each argument
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# A reference into bayesfl that leads nowhere is an error. Nothing is fetched, so names of other
# projects have no target here.
nitpicky = True
_BUILTIN = (
    r"bool|bytes|callable|dict|float|int|list|object|str|str\]|tuple|tuple\[str|type|KeyError|RuntimeError|"
    r"TypeError|ValueError|FileNotFoundError"
)
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|numpy|np|nn|flwr|httpx|typing|collections|contextlib|pathlib|os|enum|types|matplotlib|datetime)\.[\w.]+",
    ),
    (
        r"py:class",
        r"P|bayesfl\.(base\.options\.[CPRT]|base\.processes\.ranks\.T|engine\.(crew\.(Item|Outcome)|driver\.T)|federation\.rounds\.admission\.T|flower\.records\.T)",
    ),  # type variables
    (r"py:.*", r"(typing|types)\.(Annotated|Literal)\[.*|inspect\.BoundArguments"),
    (
        r"py:.*",
        rf"({_BUILTIN}|Tensor|Any|Callable|Mapping|Sequence|Iterator|Literal|Axes|Figure|optional|default|Ellipsis|None|\.\.\.)",
    ),
]
# Of internals the pages have the modules alone.
_INTERNAL = "|".join(
    name.replace(".", r"\.")
    for page in (Path(__file__).parent / "api" / "internals").glob("*.md")
    for name in re.findall(r"automodule:: (\S+)", page.read_text())
)
nitpick_ignore_regex.append((r"py:.*", rf"({_INTERNAL})\.\w+"))


def _table(rows: list[str]) -> list[str]:
    """A Markdown table as a list-table."""
    out = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        if set(row) <= set("|-: "):
            continue
        cells = [_prose(cell.strip()) for cell in row.strip()[1:-1].split("|")]
        out += [f"   {'* -' if i == 0 else '  -'} {cell}".rstrip() for i, cell in enumerate(cells)]
    return [*out, ""]


def _home(name: str) -> str:
    """Find where what a user writes as bf.load is defined; return the name itself where there is no
    such thing, which is then an error.
    """
    thing: Any = bayesfl
    try:
        for word in name.split("."):
            thing = getattr(thing, word)
    except AttributeError:
        return f"bayesfl.{name}"
    if inspect.ismodule(thing):
        return thing.__name__
    return (
        f"{thing.__module__}.{thing.__qualname__}"
        if hasattr(thing, "__qualname__")
        else f"bayesfl.{name}"
    )


def _prose(text: str) -> str:
    """Single backticks are code, or a reference where they name something of bayesfl; dollar signs
    are mathematics; signs that are no emphasis mean themselves.
    """

    def code(name: str) -> str:
        if re.fullmatch(r"(bf|bayesfl)(\.\w+)+", name):
            return f":py:obj:`~{_home(name.partition('.')[2])}`"
        return f"``{name}``"

    out, done = "", 0
    for found in re.finditer(r"`([^`\n]+)`|\$([^$\n]+)\$|(?<![\w*])\*\w[\w -]*\*(?![\w*])|$", text):
        out += re.sub(r"(?<!\\)([*|]|(?<=\w)_(?!\w))", r"\\\1", text[done : found.start()])
        literal, formula = found.groups()
        out += code(literal) if literal else f":math:`{latex(formula)}`" if formula else found[0]
        done = found.end()
    return out


def _docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The docstrings are plain text with a little Markdown; autodoc wants reStructuredText."""
    out: list[str] = []
    table: list[str] = []
    example: Any = False  # it goes on to the next empty line
    for line in [*lines, ""]:
        if re.fullmatch(r"\s*\|.*\|.*\|\s*", line):
            table.append(line)
            continue
        if table:
            out += _table(table)
            table = []
        example = line.strip() and (example or line.lstrip().startswith(">>> "))
        out.append(line if example else _prose(line))
    # Napoleon reads the first line of these as "type: text", which is not how they are written
    # here.
    lines[:] = ["..", "", *out] if what in ("attribute", "data", "property") else out


def _signature(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> Any:
    """Defaults that have no name are left out."""
    if signature and dataclasses.is_dataclass(obj):
        signature = re.sub(r"<factory>|<function [^>]*>+(?: at 0x\w+>)?", "...", signature)
    return signature, returns


def _public() -> dict[tuple[str, str], str]:
    """{(module, name): what a user writes}, as bf.plots.forest, of what is public."""
    found = {}
    for name in dir(bayesfl):
        thing = getattr(bayesfl, name)
        inner = dir(thing) if inspect.ismodule(thing) else ()
        for path, one in [(f"bf.{name}", thing)] + [
            (f"bf.{name}.{leaf}", getattr(thing, leaf)) for leaf in inner
        ]:
            if not inspect.ismodule(one) and hasattr(one, "__qualname__"):
                found.setdefault((one.__module__, one.__qualname__), path)
    return found


_PUBLIC = _public()


def _heading(app: Any, domain: str, kind: str, content: Any) -> None:
    """A public name is headed as users write it, not by the file that has it."""
    for signature in content.parent.findall(addnodes.desc_signature):
        path = _PUBLIC.get((signature.get("module"), signature.get("fullname")))
        for prefix in signature.findall(addnodes.desc_addname) if path else ():
            told = path.removesuffix(signature["fullname"])
            if told != path:
                prefix.clear()
                prefix += nodes.Text(told)


def setup(app: Any) -> None:
    """Connect the three."""
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    app.connect("autodoc-process-signature", _signature)
    app.connect("object-description-transform", _heading)
