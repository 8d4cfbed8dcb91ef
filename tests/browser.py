"""Pages as a browser without a window shows them."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), "")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome on the path")

_BEFORE = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
console.error = (...words) => problems.push(words.join(" "));
</script></head>"""
_AFTER = """<script>
addEventListener("load", () => {
  const found = (() => { SCRIPT })();
  const {scrollWidth, clientWidth} = document.documentElement;
  parent.postMessage({found, problems, scrollWidth, clientWidth}, "*");
});
</script></body>"""
# A window has a least width, and a frame has none.
_FRAME = """<body><script>
addEventListener("message", (event) => {
  document.body.dataset.seen = JSON.stringify(event.data);
});
</script><iframe src="watched.html" style="border: 0; height: 900px; width: WIDTHpx">
</iframe></body>"""


def seen(page: Path, width: int, script: str = "") -> dict[str, Any]:
    """Load a page in a frame of this width and run a script in it.

    Returns:
        What the script returns as `found`, the `problems` that were logged as errors, and the
        widths of the page and of what shows it, in pixels.
    """
    text = page.read_text().replace("</head>", _BEFORE)
    watched, around = page.with_name("watched.html"), page.with_name("around.html")
    watched.write_text(text.replace("</body>", _AFTER.replace("SCRIPT", script)))
    around.write_text(_FRAME.replace("WIDTH", str(width)))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--virtual-time-budget=5000", "--dump-dom", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (said,) = re.findall(r'data-seen="([^"]*)"', done.stdout)
    return json.loads(html.unescape(said))


def assert_fits(page: Path) -> None:
    """Assert that a page logs no error and is no wider than a phone, and a screen."""
    for width in (400, 1400):
        found = seen(page, width)
        assert found["problems"] == []
        assert (found["scrollWidth"], found["clientWidth"]) == (width, width)
