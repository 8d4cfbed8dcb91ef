"""FedPAC's comparison under label skew in groups: Fashion-MNIST with the paper's network and 600
images a client, EMNIST letters and CIFAR-10 with 200; heterogeneity, and concept shift.

Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier
collaboration", ICLR 2023. Every client trains in every round and goes over its data six times:
FedPAC once for the head and five times for the body. The paper has 200 rounds, as has `--full`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD
from bayesfl.study.grid import Make
from bayesfl.study.table import Row
from benchmarks.papers import Part, Size, measured

PLACE = "The paper's tables are lost here: no copy that we have holds their numbers."
PUBLISHED: Mapping[str, Mapping[str, float]] = {}
RATES = (0.01, 0.03, 0.1)
BATCH = 50
STEPS = partial(SGD, momentum=0.5, weight_decay=5e-4)


def whole(make: Callable[..., bf.Algorithm], epochs: int = 6, **options: Any) -> Make:
    """Return a method of (model, rate) whose models are trained by one optimiser."""
    return lambda model, rate: make(
        model, epochs=epochs, batch_size=BATCH, optimiser=STEPS(rate), **options
    )


METHODS: dict[str, Make] = {
    "Local": whole(bf.algorithms.local),
    "FedAvg": whole(bf.algorithms.fedavg),
    "FedAvg-FT": whole(bf.algorithms.fedavg_ft),
    "FedPer": whole(bf.algorithms.fedper),
    "LG-FedAvg": whole(bf.algorithms.lg_fedavg),
    "FedRep": lambda model, rate: bf.algorithms.fedrep(
        model, head_epochs=1, body_epochs=5, batch_size=BATCH, optimiser=STEPS(rate)
    ),
    "Fed-RoD": whole(bf.algorithms.fedrod),
    "FedBABU": whole(bf.algorithms.fedbabu),
    "Ditto": whole(bf.algorithms.ditto, 3),  # for each of two models
    "FedPAC": lambda model, rate: bf.algorithms.fedpac(
        model, head_optimiser=STEPS(0.1), body_optimiser=STEPS(rate), batch_size=BATCH
    ),
    # Two steps on each batch, without momentum.
    "APFL": lambda model, rate: bf.algorithms.apfl(
        model, epochs=3, batch_size=BATCH, optimiser=SGD(rate)
    ),
    "kNN-Per": whole(bf.algorithms.knn_per),
}
SHARED = ("Local", "FedAvg", "FedRep", "FedPAC")  # in the figures


def network(clients: FederatedData, seed: int) -> nn.Module:
    """Return the paper's network for images, one hidden layer for digits."""
    if min(clients.inputs[1:], default=0) >= 16:
        return bf.models.leaky_cnn(clients.inputs, outputs=clients.classes, seed=seed)
    return bf.models.mlp(clients.inputs, hidden=64, outputs=clients.classes, seed=seed)


def both(run: Row, result: Result) -> dict[str, Any]:
    """Return the rows of a run, with the accuracy after local training beside that with what the
    server made.
    """
    found = measured(run, result)
    last = result.history[-1]
    found["rows"][run.method]["trained_accuracy"] = last.get("before_pool_accuracy")
    return found


def skewed(source: str, images: int, **options: Any) -> Callable[..., FederatedData]:
    """Return clients with so many training images, and a tenth of that for choices."""
    held = {"train": images * 11 // 10, "test": images, "validation": 1 / 11}
    return partial(bf.data.dominant_classes, source, clients=20, **held, **options)


def parts(size: Size) -> dict[str, Part]:
    """Return the tables' federations, and those of the figures."""
    quick, few = size == "quick", 600 if size == "full" else 200
    small = Part(
        data=skewed("fashion-mnist", few),
        model=network,
        methods=METHODS,
        rounds=200 if size == "full" else 20,
        seconds=3000 if size == "full" else 100,
        grid={"*": {"rate": RATES}},
        settings={"sampling": "fixed"},
        measure=both,
    )
    if quick:
        held: dict[str, Any] = {"clients": 5, "train": 50, "test": 30, "validation": 0.2}
        data = partial(bf.data.dominant_classes, "digits", **held)
        grid = {"*": {"rate": RATES[-2:]}}
        return {"digits": replace(small, data=data, rounds=2, seconds=1, seeds=(0,), grid=grid)}
    curve = replace(small, methods={name: METHODS[name] for name in SHARED})
    shift = partial(bf.data.swapped_labels, "fashion-mnist", clients=20, max_size=few * 11 // 10)
    return {
        "Fashion-MNIST": replace(
            small, data=skewed("fashion-mnist", 600), seconds=max(300, small.seconds)
        ),
        "EMNIST letters": replace(small, data=skewed("emnist-letters", few)),
        "CIFAR-10": replace(small, data=skewed("cifar10", few)),
        **{
            f"Fashion-MNIST, uniform {share:g}": replace(
                curve, data=skewed("fashion-mnist", few, uniform=share)
            )
            for share in (0.0, 0.2, 0.5, 1.0)
        },
        "Fashion-MNIST, concept shift": replace(
            curve, data=partial(shift, groups=4, validation=1 / 11)
        ),
    }
