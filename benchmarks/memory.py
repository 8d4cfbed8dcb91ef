"""Measure what a federation keeps in memory: of many clients, and of many images.

10,000 clients, 20 samples of 64 floats each, a private mean-field head of 5,000 weights: kept state
is one row per client; working memory grows with the chunk. 100 clients are gathered in a round:
FedRep trains these alone, pFedVEM everyone.

5,000 clients with the same samples and a network of 64 x 16 x 10, of whom 50 train in a round: of
FedPAC and D-FedEM the server knows every client, of FedAvg none.

100 clients with 60,000 images of 3 x 32 x 32 bytes, FedAvg of a LeNet, a round of one epoch and an
evaluation: the images as floats in memory, as bytes in memory, and as bytes in a mapped file. What
is counted is memory that is no file's: a machine cannot take it back.

python benchmarks/memory.py [--quick]

Every measurement has a process of its own, the images' in turn. Results:
benchmarks/results/memory.json.
"""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import script
import timing
from timing import resident
from torch import nn
from torch.utils._pytree import tree_leaves

import bayesfl as bf
from bayesfl.data import FederatedData

LIMIT_MIB = 2048
LARGE = bf.models.SplitModel(nn.Sequential(nn.Linear(64, 499), nn.ReLU()), nn.Linear(499, 10))
SMALL = bf.models.mlp(64, hidden=16, outputs=10)
METHODS: dict[str, tuple[int, int, bf.models.SplitModel, bf.Algorithm]] = {
    "fedrep": (10_000, 100, LARGE, bf.algorithms.fedrep(LARGE, head_epochs=1, body_epochs=1)),
    "pfedvem": (10_000, 100, LARGE, bf.algorithms.pfedvem(LARGE, head_epochs=3, body_epochs=1)),
    "fedavg": (5_000, 50, SMALL, bf.algorithms.fedavg(SMALL, epochs=1)),
    "fedpac": (5_000, 50, SMALL, bf.algorithms.fedpac(SMALL, head_epochs=1, body_epochs=1)),
    "d_fedem": (5_000, 50, SMALL, bf.algorithms.d_fedem(SMALL, epochs=1)),
}
"""Of each the number of clients, how many are gathered in a round, the network and the method."""
KINDS = ("floats in memory", "bytes in memory", "bytes in a file")
IMAGE = (3, 32, 32)


def mib(tree: object) -> float:
    return sum(t.nbytes for t in tree_leaves(tree)) / 2**20


def clients_state(method: str, clients: int) -> dict[str, float]:
    """The figures of three rounds in this process."""
    _, gathered, model, algorithm = METHODS[method]
    start = resident("VmRSS")
    data = timing.federation([20] * clients, (64,))
    with_data = resident("VmRSS")
    options = {"participation": gathered / clients, "sampling": "fixed", "evaluate_every": None}
    engine, clock = bf.Engine(workers=2), time.perf_counter()
    result = bf.simulate(algorithm, data, rounds=3, engine=engine, progress=False, **options)
    return {
        "clients": clients,
        "head_weights": sum(p.numel() for p in model.head.parameters()),
        "seconds": time.perf_counter() - clock,
        "before_mib": start,
        "with_data_mib": with_data,
        "kept_state_mib": mib(result.private),
        "server_mib": mib(result.server),
        "peak_mib": resident("VmHWM"),
    }


@contextlib.contextmanager
def anonymous_peak() -> Iterator[Callable[[], float]]:
    """Watch the memory that is no file's; the function gives the largest so far, in MiB."""
    found, done = [resident("RssAnon")], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            found[0] = max(found[0], resident("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: found[0]
    finally:
        done.set()
        thread.join()


def one_round(clients: FederatedData) -> None:
    """FedAvg of a LeNet, one epoch and an evaluation."""
    algorithm = bf.algorithms.fedavg(bf.models.lenet(IMAGE, outputs=10), epochs=1, batch_size=50)
    bf.simulate(algorithm, clients, rounds=1, engine=bf.Engine(workers=1), progress=False)


def images(kind: str, file: Path, count: int) -> dict[str, float]:
    """The figures of one round over images of one kind in this process."""

    def federation(n: int, clients: int) -> FederatedData:
        x = np.memmap(file, dtype=np.uint8, mode="r", shape=(count, *IMAGE))[:n]
        y, ids = np.arange(n) % 10, np.arange(n) % clients
        if kind == "floats in memory":
            return bf.data.from_arrays(x / np.float32(255), y, client_ids=ids)
        pixels = x if kind == "bytes in a file" else np.array(x)
        pooled = bf.data.from_arrays(pixels, y, client_ids=ids)
        return pooled.transformed(lambda x: x / 255)

    one_round(federation(200, 2))  # what the first round loads is not counted
    start = resident("RssAnon")
    made = federation(count, 100)
    after = resident("RssAnon")
    with anonymous_peak() as peak:
        seconds = timing.seconds(lambda: one_round(made))
        return {"made_mib": after - start, "peak_mib": peak() - start, "seconds": seconds}


def main() -> None:
    quick = script.arguments(__doc__).quick
    written, rows = script.made(), {}
    for method, (clients, *_) in [*METHODS.items()][: 1 if quick else None]:
        few = clients // 20 if quick else clients
        rows[method] = timing.alone(clients_state, method, few)
        timing.show(method, rows[method])
        if rows[method]["peak_mib"] > LIMIT_MIB:
            raise SystemExit(f"{method} takes more memory than {LIMIT_MIB} MiB")
    count = 4_000 if quick else 60_000
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images"
        np.random.default_rng(0).integers(0, 256, (count, *IMAGE), dtype=np.uint8).tofile(file)
        sides = {kind: partial(timing.alone, images, kind, file, count) for kind in KINDS}
        each = timing.in_turn(sides, 1 if quick else 3)
    medians = {
        kind: {key: statistics.median(row[key] for row in found) for key in found[0]}
        for kind, found in each.items()
    }
    for kind, row in medians.items():
        timing.show(kind, row)
    if not quick:
        pictures = {"count": count, "medians": medians, "each": each}
        script.write("memory", **written, limit_mib=LIMIT_MIB, rows=rows, images=pictures)


if __name__ == "__main__":
    main()
