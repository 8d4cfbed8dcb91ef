"""Writes the README's tables from what the commands made: python docs/tables.py.

What is implemented comes from the compositions themselves, the demo's table from benchmarks/results/demo.json (`make demo` writes it to
runs/demo/table.json), speed from benchmarks/results/engines.json (`make benchmarks`).
"""

import json
from pathlib import Path

import bayesfl as bf
from bayesfl import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def implemented() -> str:
    """What is implemented, in Markdown."""
    lines = [
        "| method | in `bf.algorithms` | paper | belief of a client | sent each round | never leaves the client |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {e.title} | `{e.name}` | {e.paper} | {e.posterior} | {e.sent} | {e.private} |" for e in bf.algorithms.available()]
    return "\n".join(lines)


def demo() -> str:
    """The demo's table, in Markdown."""
    saved = json.loads((RESULTS / "demo.json").read_text())
    columns = [
        report.Column("accuracy", better="higher"),
        report.Column("nll", title="NLL (nats)", better="lower"),
        report.Column("ece", title="ECE", better="lower"),
        report.Column("brier", title="Brier", better="lower"),
    ]
    return report.table(saved["rows"], columns=columns, style="markdown")


def engines() -> str:
    """Speed, in Markdown: ratios to the bare loop beside what was aimed at."""
    saved = json.loads((RESULTS / "engines.json").read_text())
    lines = [
        "| work | unit | 2 workers (aim) | 1 worker (aim) | not a step (8 %, 5 %) | busy neighbour, 2 workers / 1 (1.2) |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in saved["rows"].items():
        if name.endswith("_busy"):
            continue
        sides = row["sides"]
        cells = [f"{sides[side]['ratio']:.2f} ({sides[side]['at_most']:.2f})" for side in ("2 workers", "1 worker")]
        unit = next(iter(sides))
        busy = saved["rows"].get(f"{name}_busy", {}).get("sides")
        rest = f"{100 * sides['2 workers']['rest']:.0f} %, {100 * sides['1 worker']['rest']:.0f} %"
        beside = f"{busy['2 workers']['to_one_worker']:.2f}" if busy else ""
        lines.append(f"| {row['title']} | {unit}, {sides[unit]['seconds']:.2f} s | {cells[0]} | {cells[1]} | {rest} | {beside} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = (ROOT / "README.md").read_text()
    for make in (implemented, demo, engines):
        begin, end = f"<!-- {make.__name__}: begin -->", f"<!-- {make.__name__}: end -->"
        text = text[: text.index(begin) + len(begin)] + f"\n{make()}\n" + text[text.index(end) :]
    (ROOT / "README.md").write_text(text)
