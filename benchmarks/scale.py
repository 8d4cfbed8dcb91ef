"""Measure what a federation of many clients takes: a round, an evaluation, an audit, a file.

1,000, 5,000 and 20,000 clients of 12 rows of 64 numbers in each split and 10 classes, of whom 100
train in a round; a network of 64 x 16 x 10. Then 20,000 clients of whom one has 20,000 rows. Of
each method and number of clients every step is timed once, in seconds of one core, in a process of
its own, with the memory that it adds to the largest so far.

python benchmarks/scale.py [--quick]

Results: benchmarks/results/scale.json.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import script
import timing

import bayesfl as bf

CLIENTS, COHORT, ROWS = (1_000, 5_000, 20_000), 100, 12
METHODS = ("fedavg", "pfedvem", "fedem", "fedsi", "scaffold", "local")
LONGEST = 20_000
"""Rows of the client that has most, where one has."""


def steps(method: str, clients: int, cohort: int, longest: int) -> dict[str, float]:
    """Seconds and MiB of every step, in this process."""
    sizes, splits = [longest, *[ROWS] * (clients - 1)], ("train", "validation", "test")
    data = timing.federation(sizes, (64,), splits=splits)
    algorithm = getattr(bf.algorithms, method)(bf.models.mlp(64, hidden=16, outputs=10))
    share, found = cohort / clients, {"data_mib": timing.resident("VmRSS")}
    quiet = {"participation": share, "evaluate_every": None, "progress": False}

    def measured(name: str, work: Callable[[], object]) -> None:
        before = timing.resident()
        found[f"{name}_seconds"] = timing.seconds(work, clock=time.process_time)
        found[f"{name}_mib"] = timing.resident() - before

    result = bf.simulate(algorithm, data, rounds=1, **quiet)
    measured("round", lambda: bf.simulate(algorithm, data, rounds=2, resume=result, **quiet))
    often = {**quiet, "evaluate_every": 1}
    measured("evaluated", lambda: bf.simulate(algorithm, data, rounds=2, resume=result, **often))
    found["evaluation_seconds"] = found.pop("evaluated_seconds") - found["round_seconds"]
    measured("audit", result.audit)
    with tempfile.TemporaryDirectory() as folder:
        measured("file", lambda: result.save(folder))
        found["file_bytes"] = sum(file.stat().st_size for file in Path(folder).iterdir())
    return found


def main() -> None:
    quick = script.arguments(__doc__).quick
    written, rows = script.made(), {}
    cases = [(clients, ROWS) for clients in CLIENTS] + [(CLIENTS[-1], LONGEST)]
    for clients, longest in [(60, ROWS), (60, 600)] if quick else cases:
        for method in METHODS[:4:3] if quick else METHODS:
            name = f"{method}, {clients} clients, the longest of {longest} rows"
            rows[name] = timing.alone(
                steps, method, clients, COHORT // 5 if quick else COHORT, longest
            )
            timing.show(name, rows[name])
            if not quick:
                script.write("scale", **written, rows=rows)


if __name__ == "__main__":
    main()
