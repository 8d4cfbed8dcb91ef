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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.settings import present

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
import script
import timing
from engines import BATCH, HEAVY, descend

EPOCHS, EXAMPLES = 2, 125


def federation(clients: int) -> FederatedData:
    return timing.federation([EXAMPLES] * clients, (1, 28, 28))


def loop(model: torch.nn.Module, data: FederatedData, device: torch.device) -> float:
    """Seconds of a round as a loop over modules on the device."""
    clients = [tuple(t.to(device) for t in data.train.client(j)) for j in range(data.clients)]

    def one_round() -> None:
        for x, y in clients:
            net = copy.deepcopy(model).to(device)
            descend(net, lambda x, y, net=net: F.cross_entropy(net(x), y), x, y, EPOCHS)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return timing.seconds(one_round)


def ours(model: torch.nn.Module, data: FederatedData, **where: Any) -> float:
    """Seconds of a round by `simulate`, the second of two."""
    algorithm = bf.algorithms.fedavg(model, epochs=EPOCHS, batch_size=BATCH, optimiser=HEAVY)
    options = {"evaluate_every": None, "progress": False, **where}
    return float(bf.simulate(algorithm, data, rounds=2, **options).history["seconds"][-1])


def main() -> None:
    given = script.arguments(__doc__, device={"default": "cuda"})
    refuse = argparse.ArgumentParser().error
    try:
        device = present(given.device)
    except ValueError as error:
        refuse(f"{error} with --quick")
    if device.type != "cuda" and not given.quick:
        refuse(f"--device {given.device} is no GPU; to see that it runs, pass --quick as well")
    model, data = bf.models.lenet((1, 28, 28), outputs=10), federation(4 if given.quick else 100)
    sides = {"loop": partial(loop, model, data, device)}
    for kernel in ("layers", "vmap"):
        sides[kernel] = partial(ours, model, data, device=device, engine=bf.Engine(kernel))
    sides["loop"]()
    found = timing.in_turn(sides, 1 if given.quick else 5)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    timing.show("seconds of a round", medians)
    if given.quick:
        return
    clients = data.clients
    while (took := ours(model, federation(2 * clients), device=device)) <= 10:
        clients *= 2
        timing.show(f"{clients} clients", {"seconds": took})
    memory = torch.cuda.max_memory_allocated(device) / 2**20
    rows = {"seconds": medians, "clients_within_10_s": clients, "memory_mib": memory}
    script.write("gpu", **script.made(), rows=rows)


if __name__ == "__main__":
    main()
