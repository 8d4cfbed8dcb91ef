"""A page of HTML in a single file: sections, their style and the sorting of tables."""

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple

from bayesfl.base.display.html import facts, text
from bayesfl.base.files import atomic_write


class Section(NamedTuple):
    """Hold a section of a page.

    Args:
        title: The title, as text.
        html: The content, made with `bayesfl.base.display.html`.
    """

    title: str
    html: str


def page(
    title: str, sections: Sequence[Section], *, lead: str = "", headline: Mapping[str, Any] = {}
) -> str:
    """Return a page that needs no other file and fetches nothing, for light and dark themes,
    screens of any width and paper.

    Args:
        title: The title.
        sections: The sections in order.
        lead: A sentence below the title.
        headline: {name: number}, shown in large type below the lead.

    Example:
        >>> from bayesfl.base.display.page import Section, page
        >>> made = page("Wards", [Section("Rows", "<p>1,438</p>")], headline={"accuracy": 0.97})
        >>> made.count("https://")
        0
    """
    here = files("bayesfl.base.display")
    look, behaviour = (
        (here / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")
    )
    links = "".join(f'<a href="#part-{i}">{text(one.title)}</a>' for i, one in enumerate(sections))
    parts = [
        f'<section id="part-{i}">\n<h2>{text(one.title)}</h2>\n{one.html}\n</section>'
        for i, one in enumerate(sections)
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title>",
            f"<style>\n{look}</style>",
            "</head>",
            "<body>",
            f"<header>\n<h1>{text(title)}</h1>\n<p>{text(lead)}</p>",
            facts(headline, "headline") if headline else "",
            f"<nav>{links}</nav>\n</header>",
            "<main>",
            *parts,
            "</main>",
            f"<footer>Made by bayesfl {version('bayesfl')}.</footer>",
            f"<script>\n{behaviour}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def write_page(
    path: str | os.PathLike[str], title: str, sections: Sequence[Section], **more: Any
) -> None:
    """Write a page to a file, completely or not at all.

    Args:
        path: The file.
        title: See `page`.
        sections: See `page`.
        **more: See `page`.
    """
    atomic_write(path, page(title, sections, **more))
