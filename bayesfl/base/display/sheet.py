"""A table for people: columns and notes, written as text, Markdown, HTML or LaTeX."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from bayesfl.base.display import html

_LATEX = {one: f"\\{one}" for one in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "\N{MINUS SIGN}": "$-$",
    "†": r"$\dagger$",
    "<": "$<$",
    ">": "$>$",
    "|": r"\textbar{}",
}


@dataclass(frozen=True)
class Sheet:
    r"""Hold columns and notes, which `print`, notebooks and papers show alike.

    Args:
        columns: {title: a cell for each row}; the first column names the rows. A cell is a text, a
            number, None, or a `Cell`.
        caption: Text above the table.
        notes: Sentences below the table.

    Example:
        >>> from bayesfl.base.display.sheet import Sheet
        >>> sheet = Sheet({"client": ["a|b", "c"], "rows": [20, 7]}, notes=("Of one day.",))
        >>> print(sheet)
        client  rows
        ------  ----
        a|b       20
        c          7
        Of one day.
        >>> print(sheet.to_latex())
        \begin{tabular}{lr}
        \toprule
        client & rows \\
        \midrule
        a\textbar{}b & 20 \\
        c & 7 \\
        \bottomrule
        \end{tabular}
        <BLANKLINE>
        Of one day.
    """

    columns: Mapping[str, Sequence[Any]]
    caption: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = _aligned([[title, *_column(of)] for title, of in self.columns.items()])
        lines[1:1] = [["-" * len(cell) for cell in line] for line in lines[:1]]
        table = ["  ".join(line).rstrip() for line in lines]
        return "\n".join([*([self.caption] if self.caption else []), *table, *self.notes])

    def to_markdown(self) -> str:
        """Return the table in Markdown, its notes as a list."""
        lines = _aligned(
            [[escaped(title), *map(_in_markdown, of)] for title, of in self.columns.items()]
        )
        for head in lines[:1]:
            first, *others = map(len, head)
            lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        notes = "\n".join(f"- {escaped(note)}" for note in self.notes)
        return "\n\n".join(part for part in (escaped(self.caption), table, notes) if part)

    def to_latex(self) -> str:
        r"""Return the table in LaTeX, with the rules of booktabs (`\usepackage{booktabs}`)."""
        cells = [[_latex(title), *map(_in_latex, of)] for title, of in self.columns.items()]
        rows = [" & ".join(row) + r" \\" for row in zip(*cells, strict=True)]
        form = "l" + "r" * (len(self.columns) - 1)
        ruled = ["\\toprule", *rows[:1], "\\midrule", *rows[1:], "\\bottomrule", "\\end{tabular}"]
        table = "\n".join([f"\\begin{{tabular}}{{{form}}}", *ruled]) if self.columns else ""
        below = "\\\\\n".join(map(_latex, self.notes))
        return "\n\n".join(part for part in (_latex(self.caption), table, below) if part)

    def _repr_html_(self) -> str:
        table = html.table(self.columns) if self.columns else ""
        caption, *notes = (
            f"<p>{html.text(one)}</p>" * bool(one) for one in (self.caption, *self.notes)
        )
        return caption + table + "".join(notes)


class Shown(ABC):
    """Add text, Markdown, HTML and LaTeX output to an object that is a table."""

    @abstractmethod
    def sheet(self) -> Sheet:
        """Return the table and its notes."""

    def __str__(self) -> str:
        return str(self.sheet())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.sheet()._repr_html_()

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        return self.sheet().to_markdown()

    def to_latex(self) -> str:
        r"""Return the table in LaTeX, for `\usepackage{booktabs}`."""
        return self.sheet().to_latex()


def of_frame(frame: Any, caption: str = "", notes: Sequence[str] = ()) -> Sheet:
    """Return the sheet of a pandas data frame, with the index as row names and numbers to four
    digits.
    """
    names = [", ".join(map(str, one)) if isinstance(one, tuple) else one for one in frame.index]
    columns = {
        str(title): [
            html.Cell(x, "" if x != x else f"{x:.4g}") if isinstance(x, float) else x for x in of
        ]
        for title, of in frame.items()
    }
    return Sheet({frame.index.name or "": names, **columns}, caption, tuple(notes))


def escaped(text: object) -> str:
    r"""Escape a text, such as a method's name, for one line of Markdown.

    Example:
        >>> from bayesfl.base.display.sheet import escaped
        >>> print(escaped("a|b"))
        a\|b
    """
    return re.sub(r"[\\`*_<|&~$]|\](?=\()", r"\\\g<0>", " ".join(str(text).splitlines()))


def _column(cells: Sequence[Any]) -> list[str]:
    """Return a column's cells as text, aligned at the decimal point and at the sign ±."""
    found = [one if isinstance(one, html.Cell) else html.Cell(0.0, html.told(one)) for one in cells]
    width = max((len(one.shown) for one in found if one.error), default=0)
    tail = max((len(one.error) for one in found), default=0)
    marked = any(one.best is not None for one in found)
    return [
        " ".join(one.shown.splitlines()).rjust(width)
        + (f" ± {one.error:>{tail}}" if one.error else " " * (tail + 3) * bool(tail))
        + ("*" if one.best else " ") * marked
        for one in found
    ]


def _in_markdown(cell: Any) -> str:
    found = escaped(html.told(cell))
    return f"**{found}**" if isinstance(cell, html.Cell) and cell.best else found


def _in_latex(cell: Any) -> str:
    if not isinstance(cell, html.Cell):
        text = html.told(cell)
        return _latex(text.replace("-", "\N{MINUS SIGN}") if isinstance(cell, Real) else text)
    found = _latex(cell.told)
    return (f"\\textbf{{{found}}}" if cell.best else found) + _latex(cell.mark)


def _latex(text: object) -> str:
    line = " ".join(str(text).splitlines())
    start = "{}" * line.startswith(("[", "*"))  # these would be options of the line before
    return start + "".join(_LATEX.get(one, one) for one in line)


def _aligned(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows from columns of texts, padded to one width, the first column left-aligned."""
    widths = [max(map(len, column)) for column in columns]
    return [
        [
            f"{cell:{'>' if i else '<'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in zip(*columns, strict=True)
    ]
