"""Measure what a federation of many clients keeps in memory.

10,000 clients, 20 samples of 64 floats each, a private mean-field head of 5,000 weights:

python benchmarks/memory.py [--quick]

Kept state is one row per client; working memory grows with the chunk. 100 clients are gathered in a round: FedRep trains these alone,
pFedVEM everyone. Results: benchmarks/results/memory.json.
"""

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import ClientData, FederatedData, SourceInfo
from bayesfl.evaluation import report

RESULTS = Path(__file__).parent / "results" / "memory.json"
LIMIT_MIB = 2048


def resident(key: str) -> float:
    """A line of the process's status, in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def measure(method: str, clients: int, pipe) -> None:
    """Three rounds in this process; sends the figures."""
    torch.set_num_threads(1)
    start = resident("VmRSS")
    rng = torch.Generator().manual_seed(0)
    n = 20 * clients
    split = ClientData(torch.rand(n, 64, generator=rng), torch.randint(0, 10, (n,), generator=rng), torch.arange(n), np.full(clients, 20))
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
    model = bf.models.SplitModel(nn.Sequential(nn.Linear(64, 499), nn.ReLU()), nn.Linear(499, 10))
    algorithm = {
        "fedrep": lambda: bf.algorithms.fedrep(model, head_epochs=1, body_epochs=1),
        "pfedvem": lambda: bf.algorithms.pfedvem(model, head_epochs=3, body_epochs=1),
    }[method]()
    clock = time.perf_counter()
    result = bf.simulate(
        algorithm,
        data,
        rounds=3,
        participation=100 / clients,
        sampling="fixed",
        evaluate_every=None,
        engine=bf.Engine(workers=2),
        progress=False,
    )
    kept = sum(t.nbytes for t in torch.utils._pytree.tree_leaves(result.private)) / 2**20
    pipe.send(
        {
            "clients": clients,
            "head_weights": sum(p.numel() for p in model.head.parameters()),
            "seconds": time.perf_counter() - clock,
            "before_mib": start,
            "with_data_mib": with_data,
            "kept_state_mib": kept,
            "peak_mib": resident("VmHWM"),
        }
    )


def main() -> None:
    """Runs both methods in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="500 clients: shows that it runs; nothing is written")
    quick = parser.parse_args().quick
    context, results = multiprocessing.get_context("spawn"), {}
    for method in ("fedrep", "pfedvem"):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(method, 500 if quick else 10_000, there))
        process.start()
        results[method] = figures = here.recv()
        process.join()
        print(
            f"{method:8s} {figures['clients']} clients: kept state {figures['kept_state_mib']:.0f} MiB, "
            f"peak {figures['peak_mib']:.0f} MiB of at most {LIMIT_MIB}, 3 rounds in {figures['seconds']:.1f} s",
            flush=True,
        )
    if not quick:
        report.write_json(
            RESULTS,
            {"command": " ".join(["python", *sys.argv]), "environment": report.environment(), "limit_mib": LIMIT_MIB, "rows": results},
        )


if __name__ == "__main__":
    main()
