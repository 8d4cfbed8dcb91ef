"""Seconds on a GPU: rounds of cohorts of networks, and curvature.

python benchmarks/gpu.py [--device cuda] [--quick]

Rounds: FedAvg with 100 clients of a LeNet, and FedAvg and pFedVEM with ten clients of the network
of pFedVEM's paper for CIFAR-100, each beside a loop over modules, or beside another kernel.
Curvature of a LeNet: the GGN's diagonal and a subnetwork's Jacobians by each backend, beside
laplace-torch; sides whose package is absent are left out. Each row is written when it is done, to
benchmarks/results/gpu.json. Without a CUDA device only `--quick --device cpu` runs, which shows
that it does.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bayesfl as bf
from bayesfl.curvature import Curvature
from bayesfl.data import FederatedData
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.federation.settings import present

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
import script
import timing
from engines import BATCH, HEAVY, descend

EPOCHS, EXAMPLES = 2, 125
Sides = dict[str, Callable[[], Any]]


def waited(work: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return what times work, until the device is done with it."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return partial(timing.seconds, run)


def loop(model: nn.Module, data: FederatedData, device: torch.device) -> None:
    """Train one client after another, as a loop over modules on the device."""
    for j in range(data.clients):
        x, y = (t.to(device) for t in data.train.client(j))
        net = copy.deepcopy(model).to(device)
        descend(net, lambda x, y, net=net: F.cross_entropy(net(x), y), x, y, EPOCHS)


def ours(method: bf.Algorithm, data: FederatedData, **where: Any) -> float:
    """Return the seconds of a round by `simulate`, the second of two."""
    options = {"evaluate_every": None, "train": "cohort", "progress": False, **where}
    return float(bf.simulate(method, data, rounds=2, **options).history["seconds"][-1])


def kernels(method: bf.Algorithm, data: FederatedData, device: torch.device) -> Sides:
    """Return a round by each kernel that computes several clients at once."""
    return {
        kernel: partial(ours, method, data, device=device, engine=bf.Engine(kernel))
        for kernel in ("layers", "vmap")
    }


def curvatures(device: torch.device, *, quick: bool) -> dict[str, Sides]:
    """Return the diagonal and a subnetwork's Jacobians by each side."""
    model = bf.models.lenet((1, 28, 28), outputs=10).to(device)
    x = torch.rand(8 if quick else EXAMPLES, 1, 28, 28, device=device)
    places = torch.arange(0, Curvature(model, pattern="body.*").size, 10, device=device)
    rows: dict[str, Sides] = {"GGN diagonal, LeNet": {}, "Jacobians of a tenth, LeNet": {}}
    diagonal, jacobians = rows.values()
    for backend in ("layers", "func", "backpack"):
        try:
            whole = Curvature(model, backend=backend)
            body = Curvature(model, pattern="body.*", backend=backend)
        except ImportError:
            continue
        diagonal[backend] = waited(partial(whole.diagonal, x), device)
        jacobians[backend] = waited(partial(body.columns, x, places), device)
    try:
        torchvision()
        from laplace.curvature import BackPackGGN
    except ImportError:
        return rows
    net: Any = nn.Sequential(*copy.deepcopy(model.body), copy.deepcopy(model.head))
    net.output_size = 10
    labels = torch.zeros(len(x), dtype=torch.long, device=device)
    theirs = BackPackGGN(net, "classification")
    diagonal["laplace-torch"] = waited(partial(theirs.diag, x, labels), device)
    some = BackPackGGN(net, "classification", subnetwork_indices=places)
    jacobians["laplace-torch"] = waited(partial(some.jacobians, x), device)
    return rows


def main() -> None:
    given = script.arguments(__doc__, device={"default": "cuda"})
    refuse = argparse.ArgumentParser().error
    try:
        device = present(given.device)
    except ValueError as error:
        refuse(f"{error} with --quick")
    if device.type != "cuda" and not given.quick:
        refuse(f"--device {given.device} is no GPU; to see that it runs, pass --quick as well")
    quick, known = given.quick, script.made()
    lenet = bf.models.lenet((1, 28, 28), outputs=10)
    many = timing.federation([EXAMPLES] * (4 if quick else 100), (1, 28, 28))
    cnn = bf.models.cifar100_cnn(outputs=10)
    ten = timing.federation([10 if quick else 250] * (2 if quick else 10), (3, 32, 32))
    steps: dict[str, Any] = {"batch_size": BATCH}
    plain = {"epochs": EPOCHS, "optimiser": HEAVY, **steps}
    rows = {
        "FedAvg, 100 clients, LeNet": {
            "loop": waited(partial(loop, lenet, many, device), device),
            **kernels(bf.algorithms.fedavg(lenet, **plain), many, device),
        },
        "FedAvg, 10 clients, CIFAR-100 network": {
            "loop": waited(partial(loop, cnn, ten, device), device),
            **kernels(bf.algorithms.fedavg(cnn, **plain), ten, device),
        },
        "pFedVEM, 10 clients, CIFAR-100 network": kernels(
            bf.algorithms.pfedvem(cnn, head_epochs=EPOCHS, body_epochs=EPOCHS, **steps),
            ten,
            device,
        ),
        **curvatures(device, quick=quick),
    }
    for title, sides in rows.items():
        medians = {}
        # Not in turn: laplace-torch's Jacobians leave BackPACK unable to compute ours.
        for name, side in sides.items():
            side()  # which compiles and fills caches
            medians[name] = statistics.median(side() for _ in range(1 if quick else 5))
        timing.show(title, medians)
        if not quick:
            memory = torch.cuda.max_memory_allocated(device) / 2**20
            row = {"seconds": medians, "memory_mib": memory, **known}
            script.write_rows("gpu", {title: row})


if __name__ == "__main__":
    main()
