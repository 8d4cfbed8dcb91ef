"""Measure a run on the ranks of torchrun beside one process: seconds, CPU, memory and bytes between
ranks.

1,000 and 20,000 clients of 20 rows of 64 numbers and 10 classes, of whom 100 train in a
round; a network of 64 x 100 x 10. One process with one thread and with two, and two ranks with one
thread each, take turns; each figure is the median over them. A round's seconds are those of the
history without the first round; CPU is that of the busier rank; memory is what the run adds after
import and data, the largest at the end of any round, at the larger rank, of which memory that ranks
share counts in proportion.

python benchmarks/ranks.py [--quick]

Results: benchmarks/results/ranks.json.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import script
import timing
import torch

import bayesfl as bf
from bayesfl.base.processes.ranks import Ranks

CLIENTS, COHORT, ROWS, ROUNDS, TURNS = (1_000, 20_000), 100, 20, 4, 2
METHODS = ("fedavg", "pfedvem", "fedem", "fedsi", "scaffold")
WAYS = {"one thread": (1, 1), "two threads": (1, 2), "two ranks": (2, 1)}
"""Processes, and threads of each."""


def memory() -> float:
    """MiB of this process, of which what others map counts in proportion."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024


def measured(method: str, clients: int, cohort: int, workers: int) -> dict[str, float]:
    """The figures of a run at this rank."""
    torch.set_num_threads(1)
    data = timing.federation([ROWS] * clients, (64,))
    algorithm = getattr(bf.algorithms, method)(bf.models.mlp(64, hidden=100, outputs=10))
    sent, plain = [0], Ranks._send

    def counted(self: Ranks, message: torch.Tensor, other: int) -> None:
        """Send, and count the bytes."""
        sent[0] += len(message)
        plain(self, message, other)

    Ranks._send = counted
    bf.rank()
    marks: list[tuple[float, float, float]] = []
    before = memory()

    def mark(result: Any) -> None:
        """Note memory, CPU and bytes at the end of a round."""
        marks.append((memory() - before, time.process_time(), sent[0]))

    result = bf.simulate(
        algorithm,
        data,
        rounds=ROUNDS,
        participation=cohort / clients,
        train="cohort",
        evaluate_every=None,
        progress=False,
        engine=bf.Engine(workers=workers),
        on_round=[mark],
    )
    _, cpu, bytes_sent = ((b - a) / (ROUNDS - 1) for a, b in zip(marks[0], marks[-1], strict=True))
    return {
        "seconds": statistics.median(row["seconds"] for row in list(result.history)[1:]),
        "cpu": cpu,
        "mib": max(most for most, _, _ in marks),
        "mib_sent": bytes_sent / 2**20,
    }


def on(method: str, clients: int, cohort: int, way: str) -> dict[str, float]:
    """The figures of a run in processes of its own: of seconds, CPU and memory the largest of all
    ranks, of bytes their sum.
    """
    ranks, workers = WAYS[way]
    begin = [sys.executable]
    if ranks > 1:
        begin += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        call = json.dumps([method, clients, cohort, workers])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANKS_CALL": call}
        subprocess.run([*begin, __file__, folder], env=environment, check=True)
        each = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    return {
        name: sum(one[name] for one in each)
        if name == "mib_sent"
        else max(one[name] for one in each)
        for name in each[0]
    }


def main() -> None:
    quick = script.arguments(__doc__).quick
    written, rows = script.made(), {}
    for clients in (60,) if quick else CLIENTS:
        for method in METHODS[:1] if quick else METHODS:
            sides = {
                way: lambda way=way, method=method, clients=clients: on(
                    method, clients, min(COHORT, clients // 2), way
                )
                for way in WAYS
            }
            turns = timing.in_turn(sides, 1 if quick else TURNS)
            one = turns["one thread"]
            for way, found in turns.items():
                name = f"{method}, {clients} clients, {way}"
                rows[name] = {key: statistics.median(t[key] for t in found) for key in found[0]} | {
                    f"{key} / one thread": timing.ratio(
                        [t[key] for t in found], [t[key] for t in one]
                    )
                    for key in ("seconds", "cpu", "mib")
                }
                timing.show(name, rows[name])
            if not quick:
                script.write("ranks", **written, rows=rows)


if __name__ == "__main__":
    if "RANKS_CALL" in os.environ:
        found = measured(*json.loads(os.environ["RANKS_CALL"]))
        Path(sys.argv[1], str(bf.rank())).write_text(json.dumps(found))
    else:
        main()
