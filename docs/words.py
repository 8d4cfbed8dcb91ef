"""Count the words of prose of the pages, without the reference, code (that within sentences, too),
tables and formulas, and phrases that plain English avoids: python docs/words.py.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ASIDE = re.compile(
    r"\A---\n.*?^---$|^(`{3,}).*?^\1$|<!--.*?-->|^\s*\|.*?$|^:.*?$|\$\$.*?\$\$|\$[^$\n]*\$|"
    r"\]\([^)]*\)|\{[\w:]+\}`[^`]*`|`[^`\n]*`|\{[\w:]+\}",
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile(r"[^\W_][\w'’./-]*")
AVOIDED = r"so many,is told,says,tells,knows,belie(?:f|fs),promises?,evidence".split(",")


def pages() -> list[Path]:
    """The README and every page but those of the reference, which docstrings make."""
    docs = ROOT / "docs"
    found = (page for page in docs.rglob("*.md") if page.relative_to(docs).parts[0] != "api")
    return [ROOT / "README.md", *sorted(page for page in found if "_build" not in page.parts)]


def prose(page: Path) -> str:
    """The sentences and headings of a page."""
    return ASIDE.sub(" ", page.read_text(encoding="utf-8"))


def words(page: Path) -> int:
    """The number of words of prose."""
    return len(WORD.findall(prose(page)))


if __name__ == "__main__":
    counts = {page: words(page) for page in pages()}
    for page, count in counts.items():
        print(f"{count:6,}  {page.relative_to(ROOT)}")
    print(f"{sum(counts.values()):6,}  in all\n")
    everything = "\n".join(page.read_text(encoding="utf-8") for page in counts)
    for phrase in AVOIDED:
        count = len(re.findall(rf"\b(?:{phrase})\b", everything))
        print(f"{count:6,}  {phrase}")
