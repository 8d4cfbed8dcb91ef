"""Pieces of HTML that notebooks and reports share: tables, lists of facts, pictures.

Every text is escaped: the names of clients and columns are whatever their owners wrote.
"""

import base64
import html
import io
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

PIXELS = 96
"""Pixels of a page for an inch of a figure; its image has twice as many."""
LARGEST = 10_000
"""Largest side of an image in pixels: figures grow with the number of clients."""


class Cell(NamedTuple):
    """Hold a table cell with separate values for sorting and for display.

    Args:
        value: The number for sorting.
        shown: The displayed text, such as `0.971`.
        error: The displayed error, such as `0.002`; empty for none.
        best: Whether the cell is the best of its column; None if none is marked.
        mark: A mark that a paper prints after the number.
    """

    value: float
    shown: str
    error: str = ""
    best: bool | None = None
    mark: str = ""

    @property
    def told(self) -> str:
        """Return the text with its error, such as `0.971 ± 0.002`."""
        return self.shown + (f" ± {self.error}" if self.error else "")


def text(value: Any) -> str:
    """Return a value as escaped text, see `told`."""
    return html.escape(told(value))


def told(value: Any) -> str:
    """Return a value as text: numbers with three decimals, or with three digits if very large or
    small; NaN and None as a dash.

    >>> from bayesfl.base.display.html import told
    >>> told(0.12345), told(1e-5), told(20_000), told("<a>")
    ('0.123', '1e-05', '20,000', '<a>')
    """
    if isinstance(value, Cell):
        return value.told
    if value is None or (_number(value) and math.isnan(value)):
        return "–"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    if _number(value):
        size = abs(float(value))
        found = f"{value:.3f}" if size == 0 or 1e-3 <= size < 1e4 else f"{value:.3g}"
        return found.replace("-", "\N{MINUS SIGN}", found.startswith("-"))
    return str(value)


def table(
    columns: Mapping[Any, Sequence[Any] | np.ndarray],
    *,
    caption: str = "",
    foot: Sequence[Any] = (),
    shaded: Collection[Any] = (),
) -> str:
    """Return an HTML table, with a class of pandas so that notebooks style it.

    Args:
        columns: {title: a value for each row}; the first column names the rows. Columns of numbers
            are right-aligned, and a page sorts them as numbers.
        caption: Text above the table.
        foot: A last row that is not sorted with the others, such as means.
        shaded: Columns of numbers >= 0 whose cells are darker the larger they are among all of
            these columns.

    Returns:
        The HTML; a page makes its rows sortable, see `bayesfl.base.display.page`.

    Example:
        >>> from bayesfl.base.display.html import table
        >>> print(table({"client": ["<b>", "c"], "accuracy": [0.5, 1.0]}))
        <div class="scrolls"><table class="dataframe">
        <thead><tr><th>client</th><th class="number">accuracy</th></tr></thead>
        <tbody>
        <tr><th scope="row">&lt;b&gt;</th><td class="number" data-value="0.5">0.500</td></tr>
        <tr><th scope="row">c</th><td class="number" data-value="1.0">1.000</td></tr>
        </tbody>
        </table></div>
    """
    values = {title: list(column) for title, column in columns.items()}
    numeric = {
        title: all(one is None or isinstance(one, Cell) or _number(one) for one in column)
        for title, column in values.items()
    }
    most = max((one for title in shaded for one in values[title]), default=0) or 1
    heads = [
        f'<th class="number">{text(title)}</th>'
        if numeric[title] and i
        else f"<th>{text(title)}</th>"
        for i, title in enumerate(values)
    ]

    def cell(title: Any, one: Any, *, first: bool, inside: bool = True) -> str:
        if first:
            return f'<th scope="row">{text(one)}</th>'
        if not numeric[title]:
            return f"<td>{text(one)}</td>"
        number = one.value if isinstance(one, Cell) else math.nan if one is None else float(one)
        shade = f' style="--share: {number / most:.3f}"' if title in shaded and inside else ""
        known = str(number).replace("inf", "Infinity")  # as JavaScript spells it
        return f'<td class="number" data-value="{known}"{shade}>{text(one)}</td>'

    rows = [
        "".join(
            cell(title, one, first=not i)
            for i, (title, one) in enumerate(zip(values, row, strict=True))
        )
        for row in zip(*values.values(), strict=True)
    ]
    last = "".join(
        cell(title, one, first=not i, inside=False)
        for i, (title, one) in enumerate(zip(values, foot, strict=False))
    )
    return "\n".join(
        [
            *([f"<p>{text(caption)}</p>"] if caption else []),
            '<div class="scrolls"><table class="dataframe">',
            f"<thead><tr>{''.join(heads)}</tr></thead>",
            "<tbody>",
            *(f"<tr>{row}</tr>" for row in rows),
            "</tbody>",
            *([f"<tfoot><tr>{last}</tr></tfoot>"] if last else []),
            "</table></div>",
        ]
    )


def facts(of: Mapping[str, Any], kind: str = "facts") -> str:
    """Return a list of facts, {name: value}, as HTML with this class."""
    pairs = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in of.items())
    return f'<dl class="{kind}">{pairs}</dl>'


def picture(figure: Any, alt: str) -> str:
    """Return a matplotlib figure as an image embedded in the page.

    Args:
        figure: The figure.
        alt: Description of the figure, for readers who cannot see it.
    """
    file = io.BytesIO()
    inches = figure.get_size_inches()
    # SVG would be far larger for hatched areas; a white background would glare on a dark page.
    dpi = min(2 * PIXELS, LARGEST / max(inches))
    figure.savefig(file, format="png", dpi=dpi, transparent=True)
    data = base64.b64encode(file.getvalue()).decode()
    width, height = (round(PIXELS * side) for side in inches)
    return (
        f'<figure><img width="{width}" height="{height}" alt="{html.escape(alt, quote=True)}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def size(count: float) -> str:
    """Return a number of bytes as text with a unit.

    >>> from bayesfl.base.display.html import size
    >>> size(500), size(41_000), size(4.1e6)
    ('500 bytes', '41.0 kB', '4.1 MB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"
