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

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import bayesfl as bf
from bayesfl.data import ClientData, FederatedData, SourceInfo
from bayesfl.evaluation import report

RESULTS = Path(__file__).parent / "results" / "memory.json"
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


def resident(key: str) -> float:
    """A line of the process's status, in MiB."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) / 1024


def mib(tree: object) -> float:
    """What a nest of tensors takes, in MiB."""
    return sum(t.nbytes for t in tree_leaves(tree)) / 2**20


def clients_state(method: str, clients: int, pipe: Connection) -> None:
    """Three rounds in this process; sends the figures."""
    torch.set_num_threads(1)
    _, gathered, model, algorithm = METHODS[method]
    start = resident("VmRSS")
    rng = torch.Generator().manual_seed(0)
    n = 20 * clients
    split = ClientData(
        torch.rand(n, 64, generator=rng),
        torch.randint(0, 10, (n,), generator=rng),
        torch.arange(n),
        np.full(clients, 20),
    )
    data = FederatedData(
        splits={"train": split},
        outputs=10,
        task="classification",
        inputs=(64,),
        client_names=tuple(str(j) for j in range(clients)),
        source=SourceInfo(name="random"),
        recipe={},
    )
    with_data = resident("VmRSS")
    clock = time.perf_counter()
    result = bf.simulate(
        algorithm,
        data,
        rounds=3,
        participation=gathered / clients,
        sampling="fixed",
        evaluate_every=None,
        engine=bf.Engine(workers=2),
        progress=False,
    )
    pipe.send(
        {
            "clients": clients,
            "head_weights": sum(p.numel() for p in model.head.parameters()),
            "seconds": time.perf_counter() - clock,
            "before_mib": start,
            "with_data_mib": with_data,
            "kept_state_mib": mib(result.private),
            "server_mib": mib(result.server),
            "peak_mib": resident("VmHWM"),
        }
    )


@contextlib.contextmanager
def anonymous_peak() -> Iterator[Callable[[], float]]:
    """Read the memory that is no file's every two milliseconds; the function gives the largest so
    far, in MiB.
    """
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


def images(kind: str, file: Path, count: int, pipe: Connection) -> None:
    """One round over images of one kind in this process; sends the figures."""
    torch.set_num_threads(1)

    def federation(n: int, clients: int) -> FederatedData:
        x = np.memmap(file, dtype=np.uint8, mode="r", shape=(count, *IMAGE))[:n]
        y, ids = np.arange(n) % 10, np.arange(n) % clients
        if kind == "floats in memory":
            return bf.data.from_arrays(x / np.float32(255), y, client_ids=ids)
        pooled = bf.data.from_arrays(
            x if kind == "bytes in a file" else np.array(x), y, client_ids=ids
        )
        return pooled.transformed(lambda x: x / 255)

    one_round(federation(200, 2))  # what the first round loads is not counted
    start = resident("RssAnon")
    made = federation(count, 100)
    after = resident("RssAnon")
    with anonymous_peak() as peak:
        clock = time.perf_counter()
        one_round(made)
        seconds = time.perf_counter() - clock
        pipe.send({"made_mib": after - start, "peak_mib": peak() - start, "seconds": seconds})


def alone(target: Callable[..., None], *args: object) -> dict[str, float]:
    """The figures that a function sends from a process of its own.

    Raises:
        EOFError: The process ended before it sent them.
        RuntimeError: It failed afterwards.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*args, there))
    process.start()
    there.close()  # so that a process that fails is noticed
    figures = here.recv()
    process.join()
    if process.exitcode:
        raise RuntimeError(
            f"{target.__name__} ended with exit code {process.exitcode} after it sent its figures"
        )
    return figures


def main() -> None:
    """Measures both kinds of federations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a twentieth of the clients, 4,000 images: shows that it runs; nothing is written",
    )
    quick = parser.parse_args().quick
    results = {}
    for method, (clients, *_) in METHODS.items():
        results[method] = figures = alone(
            clients_state, method, clients // 20 if quick else clients
        )
        print(
            f"{method:8s} {figures['clients']} clients: kept state "
            f"{figures['kept_state_mib']:.0f} MiB, the server's {figures['server_mib']:.0f} MiB, "
            f"peak {figures['peak_mib']:.0f} MiB of at most {LIMIT_MIB}, 3 rounds in "
            f"{figures['seconds']:.1f} s",
            flush=True,
        )
        if figures["peak_mib"] > LIMIT_MIB:
            raise SystemExit(f"{method} takes more memory than {LIMIT_MIB} MiB")
    count = 4_000 if quick else 60_000
    each: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images"
        np.random.default_rng(0).integers(0, 256, (count, *IMAGE), dtype=np.uint8).tofile(file)
        for _ in range(1 if quick else 3):
            for kind in KINDS:
                each[kind].append(alone(images, kind, file, count))
    medians = {
        kind: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for kind, rows in each.items()
    }
    for kind, row in medians.items():
        print(
            f"{kind}: made with {row['made_mib']:.0f} MiB, peak of a round {row['peak_mib']:.0f} "
            f"MiB, {row['seconds']:.1f} s",
            flush=True,
        )
    if not quick:
        record = {
            "limit_mib": LIMIT_MIB,
            "rows": results,
            "images": {"count": count, "medians": medians, "each": each},
        }
        report.write_json(
            RESULTS,
            {
                "command": " ".join(["python", *sys.argv]),
                "environment": report.environment(),
                **record,
            },
        )


if __name__ == "__main__":
    main()
