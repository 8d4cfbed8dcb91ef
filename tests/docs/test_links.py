"""Links between the pages lead somewhere."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_links_between_pages():
    """Each file that a page links to is there; sphinx writes some names without their `.md`."""
    dead = []
    for page in DOCS.rglob("*.md"):
        if "_build" in page.parts:
            continue
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", prose):
            file = page.parent / target
            if "://" not in target and not (file.exists() or Path(f"{file}.md").exists()):
                dead.append(f"{page.relative_to(DOCS)}: {target}")
    assert not dead
