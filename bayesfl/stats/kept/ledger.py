"""Records of a site's earlier questions. They prevent that the difference of two analyses reveals a
person.

Rows and columns are kept as hashes under the ledger's own key.
"""

import contextlib
import hashlib
import json
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor

from bayesfl.base.files import atomic_write

if TYPE_CHECKING:
    from bayesfl.stats.tables import Site

FILE = "ledger.json"
LINES = 10_000
"""Maximum number of lines about questions. The hashes that later analyses are compared with are
never removed.
"""


Indicators: TypeAlias = Mapping[str, Tensor]
"""{a column, or a column and its level: who has it, [n] of bools}."""


@dataclass
class Ledger:
    """Record the questions to one site on a node, or to several in a simulation.

    Args:
        key: Key of the hashes, in hexadecimal digits.
        drawn: Number of log likelihoods at shared draws that were answered.
        analyses: {site: its analyses}. Each has the hashes of `rows` by the columns `of` its table,
            and for each of some `columns` the hashes of rows with one of two values.
        known: Digests of rows and columns of these.
        lines: The questions: when, run, name, answer, and the rule that refused it.
        hidden: The sets of sites whose answers were added unseen.
        ends: {site: {columns of times and events: ends of the bins of earlier counts}}.
    """

    key: str = field(default_factory=lambda: secrets.token_hex(32))
    drawn: int = 0
    analyses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    hidden: set[frozenset[str]] = field(default_factory=set)
    ends: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """Return the ledger of a node's folder; a new one where there is none."""
        file = folder / FILE
        return cls(**json.loads(file.read_text())) if file.exists() else cls()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path) -> Iterator["Ledger"]:
        """Return the ledger of a node's folder, locked until the end; a new folder is readable only
        for the node's own user.
        """
        import fcntl  # on Linux and macOS, where nodes run

        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / "ledger.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ledger = cls.read(folder)
            yield ledger
            kept = asdict(ledger)
            del kept["hidden"]  # a node sees its own answers alone
            atomic_write(folder / FILE, json.dumps(kept))

    def note(self, run: int, question: str, answer: str, rule: str = "") -> None:
        """Write a line."""
        line = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": run,
            "question": question,
            "answer": answer,
            "rule": rule,
        }
        self.lines = [*self.lines, line][-LINES:]

    def settled(self, site: "Site") -> "Site":
        """Return a site without new rows that are too few, counted as left out; see
        `Policy.min_rows`.
        """
        assert site.policy is not None
        for analysis in reversed(self.analyses.get(site.name, [])):
            if not {*analysis["of"]} <= {*site.frame}:
                continue
            marks, before = self._marks(site, analysis["of"]), {*analysis["rows"]}
            if before < {*marks} and len(marks) - len(before) < site.policy.min_rows:
                old = np.array([mark in before for mark in marks])
                return replace(site.some(old), dropped=site.dropped + int((~old).sum()))
        return site

    def differs(self, site: "Site", indicators: Indicators, least: int) -> str | None:
        """Return a text on what differs from an earlier analysis in fewer rows than `least`; None
        if nothing does.

        Rows are compared by the columns of the earlier analysis's table.

        Args:
            site: The site.
            indicators: The rows with one of two values, by column.
            least: Fewest rows.
        """
        if not least or self._digest(site, indicators) in self.known:
            return None
        alike: dict[tuple[str, ...], list[set[str]]] = {(*sorted(site.frame),): []}
        for analysis in self.analyses.get(site.name, []):
            of = tuple(analysis["of"])
            if gone := {*of} - {*site.frame}:
                return f"rows of an earlier analysis had {sorted(gone)}, and cannot be compared"
            rows, _ = self._sets(site, indicators, of)
            if 0 < len(apart := rows ^ {*analysis["rows"]}) < least:
                return "its rows differ from those of an earlier analysis by fewer"
            others = alike.setdefault(of, [])
            others += [] if apart else [{*one} for one in analysis["columns"]]
        for of, others in alike.items():
            rows, columns = self._sets(site, indicators, of)
            for place, (name, one) in enumerate(zip(indicators, columns, strict=True)):
                for other in (*others, *columns[:place]):
                    for apart in (one ^ other if one & other else set(), rows - (one ^ other)):
                        # Unions of columns are answered anyway, as other levels.
                        told = set().union(*(own for own in columns if own <= apart))
                        if 0 < len(apart) < least and apart != told:
                            return f"{name} differs by fewer from another column, or its complement"
        return None

    def keep(self, site: "Site", indicators: Indicators) -> None:
        """Record an analysis for later ones; see `differs`."""
        if (digest := self._digest(site, indicators)) not in self.known:
            self.known.append(digest)
            of = sorted(site.frame)
            rows, columns = self._sets(site, indicators, of)
            analysis = {
                "of": of,
                "rows": sorted(rows),
                "columns": [sorted(one) for one in columns],
            }
            self.analyses.setdefault(site.name, []).append(analysis)

    def fewest(self, site: "Site", time: str, event: str, ends: Iterable[float]) -> float:
        """Return the smallest positive number of events between neighbouring ends of bins, of this
        analysis and earlier ones together: differences of answers reveal it. Infinity if this
        analysis has no new ends, or there was none before.
        """
        known = self.ends.get(site.name, {}).get(f"{time}, {event}", [])
        if not known or {*ends} <= {*known}:
            return math.inf
        times = site.column(time)[site.column(event) == 1].numpy()
        counts = np.bincount(np.searchsorted(sorted({*known, *ends}), times))
        return float(min(counts[counts > 0], default=math.inf))

    def tells_one(self, names: Sequence[str]) -> bool:
        """Return whether sums over these sites and earlier sums together determine one site's, for
        any questions, because several questions have the same sums.
        """
        sets = [*self.hidden, frozenset(names)]
        everyone = sorted(frozenset().union(*sets))
        sums = np.array([[name in one for name in everyone] for one in sets], float)
        rank = np.linalg.matrix_rank(sums)
        return any(np.linalg.matrix_rank([*sums, one]) == rank for one in np.eye(len(everyone)))

    def _marks(self, site: "Site", of: Sequence[str]) -> list[str]:
        """Return a hash of each row by some columns, [n]; equal rows have different hashes."""
        seen: defaultdict[int, count[int]] = defaultdict(count)
        hashes = site.row_hashes(tuple(of)).tolist()
        return [self._hash(b"%d %d" % (row, next(seen[row]))) for row in hashes]

    def _sets(
        self, site: "Site", indicators: Indicators, of: Sequence[str]
    ) -> tuple[set[str], list[set[str]]]:
        """Return the hashes of all rows by some columns, and those of each indicator's rows."""
        marks = np.array(self._marks(site, of))
        return {*marks.tolist()}, [{*marks[one.numpy()].tolist()} for one in indicators.values()]

    def _digest(self, site: "Site", indicators: Indicators) -> str:
        columns = ",".join(sorted(site.frame))
        parts = [site.row_hashes(), *(one.numpy() for one in indicators.values())]
        text = f"{site.name} {columns} ".encode()
        return self._hash(b"".join([text, *(one.tobytes() for one in parts)]))

    def _hash(self, text: bytes) -> str:
        return hashlib.blake2b(text, key=bytes.fromhex(self.key), digest_size=8).hexdigest()

    def __str__(self) -> str:
        lines = [
            "{when}, run {run}: {question}, ".format(**line)
            + (f"refused by {line['rule']}" if line["rule"] else f"answered {line['answer']}")
            for line in self.lines
        ]
        return "\n".join(
            [f"Statistics: {self.drawn} log likelihoods at shared draws answered.", *lines]
        )
