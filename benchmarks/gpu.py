"""A cohort of CNNs on a GPU: 100 clients at once against looping over them there, and how many
clients a round takes in ten seconds.

python benchmarks/gpu.py [--device cuda] [--quick]

Results: benchmarks/results/gpu.json; without a CUDA device only `--quick --device cpu` runs, which
shows that it does.
"""

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import bayesfl as bf
from bayesfl.data import ClientData, FederatedData, SourceInfo
from bayesfl.evaluation import report
from bayesfl.federation.settings import present
from bayesfl.optim import SGD

RESULTS = Path(__file__).parent / "results" / "gpu.json"
LR, MOMENTUM, BATCH, EPOCHS, EXAMPLES = 0.05, 0.9, 50, 2, 125


def federation(clients: int) -> FederatedData:
    """Random images."""
    n = clients * EXAMPLES
    rng = torch.Generator().manual_seed(0)
    split = ClientData(
        torch.rand(n, 1, 28, 28, generator=rng),
        torch.randint(0, 10, (n,), generator=rng),
        torch.arange(n),
        np.full(clients, EXAMPLES),
    )
    names = tuple(str(j) for j in range(clients))
    return FederatedData(
        splits={"train": split},
        outputs=10,
        task="classification",
        inputs=(1, 28, 28),
        client_names=names,
        source=SourceInfo(name="random"),
        recipe={},
    )


def loop(model: torch.nn.Module, data: FederatedData, device: torch.device) -> float:
    """Seconds of a round as a loop over modules on the device."""
    clients = [tuple(t.to(device) for t in data.train.client(j)) for j in range(data.clients)]
    start = time.perf_counter()
    for x, y in clients:
        net = copy.deepcopy(model).to(device)
        optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x), device=device).split(BATCH):
                optimiser.zero_grad()
                F.cross_entropy(net(x[rows]), y[rows]).backward()
                optimiser.step()
    _wait(device)
    return time.perf_counter() - start


def ours(
    model: torch.nn.Module, data: FederatedData, device: torch.device, engine: bf.Engine
) -> float:
    """Seconds of a round by `simulate`, the second of two."""
    algorithm = bf.algorithms.fedavg(
        model, epochs=EPOCHS, batch_size=BATCH, optimiser=SGD(LR, MOMENTUM)
    )
    result = bf.simulate(
        algorithm, data, rounds=2, evaluate_every=None, device=device, engine=engine, progress=False
    )
    return float(result.history["seconds"][-1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Runs both questions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="few clients; nothing is written")
    options = parser.parse_args()
    try:
        device = present(options.device)
    except ValueError as error:
        parser.error(f"{error} with --quick")
    if device.type != "cuda" and not options.quick:
        parser.error(
            f"--device {options.device} is no GPU, whose figures these are; pass --quick as well "
            "to see that it runs"
        )
    torch.set_num_threads(1)
    model = bf.models.lenet((1, 28, 28), outputs=10)
    data = federation(4 if options.quick else 100)
    loop(model, data, device)
    kernels = ("layers", "vmap")
    seconds: dict[str, list[float]] = {name: [] for name in ("loop", *kernels)}
    for _ in range(1 if options.quick else 5):
        seconds["loop"].append(loop(model, data, device))
        for kernel in kernels:
            seconds[kernel].append(ours(model, data, device, bf.Engine(kernel)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:8s} {value:.3f} s, {value / medians['loop']:.3f} of the loop", flush=True)
    clients = data.clients
    while not options.quick:
        took = ours(model, federation(2 * clients), device, bf.Engine())
        print(f"{2 * clients} clients: {took:.2f} s a round", flush=True)
        if took > 10:
            break
        clients *= 2
    if not options.quick:
        figures = {
            "seconds": medians,
            "clients_within_10_s": clients,
            "memory_mib": torch.cuda.max_memory_allocated(device) / 2**20,
        }
        report.write_json(
            RESULTS,
            {
                "command": " ".join(["python", *sys.argv]),
                "environment": report.environment(),
                "rows": figures,
            },
        )


if __name__ == "__main__":
    main()
