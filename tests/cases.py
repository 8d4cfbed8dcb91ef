"""One table of algorithms; each entry meets the whole contract battery."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.data import FederatedData
from bayesfl.engine.driver import KernelName
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD, Adam
from bayesfl.posteriors import MeanField

SIZES = (43, 40, 17, 5, 31, 43, 8)


@dataclass(frozen=True)
class Case:
    """An algorithm at test size.

    Args:
        name: In `bf.algorithms`.
        options: Small numbers of steps.
        server: An optimiser on the server.
        of: What it makes of a network that it is given.
    """

    name: str
    options: dict[str, Any]
    server: Any = None
    of: Callable[[nn.Module], nn.Module] = lambda model: model

    def __call__(self, model: torch.nn.Module, **more: Any) -> bf.Algorithm:
        """The algorithm on `model`."""
        make: Callable[..., bf.Algorithm] = getattr(bf.algorithms, self.name)
        made = make(self.of(model), **{**self.options, **more})
        return made if self.server is None else bf.with_server_optimiser(made, self.server)

    def __str__(self) -> str:
        return "-".join(
            [self.name, *(self.options[key] for key in ("lower", "variant") if key in self.options)]
        )


def normed(model: nn.Module) -> nn.Module:
    """A network with a norm before its head, of a kind that every kernel takes."""
    assert isinstance(model, bf.models.SplitModel)
    assert isinstance(model.body, nn.Sequential)
    assert isinstance(model.head, nn.Linear)
    return bf.models.SplitModel(
        nn.Sequential(*model.body, nn.LayerNorm(model.head.in_features)), model.head
    )


def adapted(model: nn.Module) -> nn.Module:
    """The same network, whose body has the name of an adapter's A."""
    assert isinstance(model, bf.models.SplitModel)
    return bf.models.SplitModel(nn.Sequential(OrderedDict(lora_A=model.body)), model.head)


def keeping(algorithm: bf.Algorithm) -> bf.Algorithm:
    """The same, but clients keep what they report, where a test can look at it."""
    return replace(algorithm, private={**algorithm.private, **algorithm.reports})


def halving(round: int, rounds: int) -> float:
    """A learning rate that changes from round to round, whatever their number."""
    return 0.05 * 0.5**round


EM = partial(SGD, momentum=0.9, weight_decay=5e-4)
PERSONAL: dict[str, Any] = {
    "gamma": 30.0,
    "anneal": 1,
    "steps": 3,
    "personal_steps": 2,
    "batch_size": 10,
    "personal_optimiser": Adam(0.02),
}
CASES = (
    Case("local", {"epochs": 2, "batch_size": 10, "adapt_epochs": 3}),
    Case("fedavg", {"epochs": 2, "batch_size": 10}),
    Case("fedavg_ft", {"epochs": 2, "batch_size": 10, "finetune_epochs": 2}),
    Case("knn_per", {"epochs": 2, "batch_size": 10, "k": 3, "share": 0.4}),
    Case(
        "fedprox", {"epochs": 2, "batch_size": 10, "mu": 0.3, "optimiser": SGD(1e-2, momentum=0.5)}
    ),
    Case("fedpa", {"epochs": 1, "batch_size": 10, "samples": 3, "average": 2, "shrinkage": 0.2}),
    Case("scaffold", {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.05), "server_lr": 0.7}),
    Case("moon", {"epochs": 2, "batch_size": 10, "mu": 0.8}),
    Case("fedper", {"epochs": 2, "batch_size": 10, "adapt_epochs": 3}),
    Case(
        "fedrep",
        {
            "head_epochs": 2,
            "body_epochs": 1,
            "batch_size": 10,
            "optimiser": SGD(halving, momentum=0.5),
        },
    ),
    Case("fedpac", {"head_epochs": 1, "body_epochs": 2, "batch_size": 10, "lam": 0.7}),
    Case("fedrod", {"epochs": 2, "batch_size": 10, "adapt_epochs": 3}),
    Case("lg_fedavg", {"epochs": 2, "batch_size": 10, "adapt_epochs": 3}),
    Case(
        "fedsa_lora",
        {"steps": 6, "batch_size": 10, "adapt_epochs": 3},
        of=adapted,
    ),
    Case(
        "fedbabu",
        {"epochs": 2, "batch_size": 10, "finetune_epochs": 2, "optimiser": SGD(1e-2, 0.9, 1e-3)},
    ),
    Case("fedbn", {"epochs": 2, "batch_size": 10, "adapt_epochs": 3}, of=normed),
    Case("ditto", {"epochs": 2, "batch_size": 10, "lam": 0.5, "adapt_epochs": 3}),
    Case(
        "pfedme",
        {
            "batches": 5,
            "inner_steps": 3,
            "batch_size": 10,
            "beta": 0.7,
            "personal_optimiser": SGD(9e-2, weight_decay=1e-3),
        },
    ),
    Case("l2gd", {"p": 0.4, "batch_size": 10, "optimiser": SGD(0.05)}),
    Case("apfl", {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.05), "adapt_epochs": 3}),
    Case("fedamp", {"epochs": 2, "batch_size": 10, "lam": 0.4, "adapt_epochs": 3}),
    Case("fedfomo", {"models": 2, "epochs": 2, "batch_size": 10, "rows": "train"}),
    Case("pfedhn", {"steps": 4, "batch_size": 10, "hidden": 5, "layers": 2, "embedding": 3}),
    Case("pfedbayes", {"batches": 4, "inner_steps": 2, "batch_size": 10, "draws": 2, "beta": 0.7}),
    Case("bpfed", {"steps": 6, "batch_size": 10, "draws": 2, "optimiser": SGD(1e-2)}),
    Case("fedpop", {"chains": 2, "burn_in": 2, "kept": 3, "batch_size": 10, "adapt_steps": 3}),
    Case("fola", {"epochs": 2, "batch_size": 10}),
    Case("fedivon", {"steps": 4, "batch_size": 10, "draws": 2}),
    Case("qlsd", {"chains": 2, "batch_size": 10, "levels": 5}),
    Case("pvi", {"epochs": 2, "batch_size": 10, "draws": 2, "optimiser": SGD(1e-2)}),
    Case("fedep", {"epochs": 2, "batch_size": 10}),
    Case("pfedmap", {"head_epochs": 4, "body_epochs": 1, "batch_size": 10}),
    Case(
        "pfedvem",
        {
            "head_epochs": 4,
            "body_epochs": 2,
            "batch_size": 10,
            "init_scale": 0.3,
            "scale_floor": 1.001,
            "draws": 3,
            "beta": 0.2,
        },
    ),
    Case("pfedvem_held", {"head_epochs": 4, "body_epochs": 2, "batch_size": 10, "draws": 3}),
    Case("clustered", {"epochs": 2, "batch_size": 10, "first_split": 1, "eps1": 2.0, "eps2": 0.1}),
    Case("ifca", {"clusters": 2, "epochs": 2, "batch_size": 10}),
    Case("fedem", {"components": 2, "epochs": 2, "batch_size": 10, "optimiser": EM(0.1)}),
    Case(
        "fedem",
        {
            "components": 2,
            "epochs": 1,
            "batch_size": 10,
            "optimiser": EM(0.05),
            "posterior": MeanField(),
            "draws": 2,
        },
    ),
    Case("d_fedem", {"components": 2, "epochs": 2, "batch_size": 10, "optimiser": EM(0.1)}),
    Case(
        "irm",
        {
            "gamma": 30.0,
            "anneal": 1,
            "l2": 0.1,
            "steps": 5,
            "batch_size": 10,
            "optimiser": Adam(0.01),
        },
    ),
    Case(
        "group_dro",
        {
            "eta": 0.5,
            "environments": 4,
            "loss_examples": 30,
            "steps": 5,
            "batch_size": 10,
            "optimiser": Adam(0.01),
        },
    ),
    Case("irm_l2", {"lam": 0.5, **PERSONAL, "estimator": "unbiased"}, server=Adam(0.05)),
    Case("irm_ft", {**PERSONAL, "optimiser": SGD(0.1)}),
    Case("perinvfl", {"lam": 0.5, **PERSONAL, "adapt_steps": 3}),
    Case(
        "perinvfl",
        {
            "lower": "group_dro",
            "environments": 2,
            "eta": 0.5,
            "lam": 0.5,
            **PERSONAL,
            "adapt_steps": 3,
        },
    ),
    Case("perinvfl", {"variant": "contrastive", "lam": 0.5, **PERSONAL, "adapt_steps": 3}),
    Case(
        "fedsi",
        {
            "epochs": 2,
            "batch_size": 10,
            "share": 0.3,
            "finetune_steps": 5,
            "predictive_precision": 1.0,
        },
    ),
    Case(
        "fedsi_fac",
        {
            "epochs": 2,
            "batch_size": 10,
            "finetune_steps": 5,
            "predictive_precision": 1.0,
            "curvature_every": 2,
        },
    ),
    Case(
        "fedsi_full",
        {"steps": 5, "batch_size": 10, "finetune_steps": 5, "predictive_precision": 1.0},
    ),
)


SAMPLE = ("fedavg", "ditto", "pfedvem", "fedem", "fedbn")
"""Methods of points, personal models, draws, copies and norms: a battery beside the contract's runs
these quickly, all others slowly.
"""


def sampled(cases: Iterable[Case]) -> list[Any]:
    """The cases, of which those of other methods than `SAMPLE` are marked as slow."""
    return [
        case if case.name in SAMPLE else pytest.param(case, marks=pytest.mark.slow)
        for case in cases
    ]


def federation(
    shape: tuple[int, ...] = (8,), sizes: tuple[int, ...] = SIZES, classes: int = 3
) -> FederatedData:
    """Clients of unequal size whose labels follow related linear rules; every other has two
    environments.
    """
    rng = torch.Generator().manual_seed(1)
    width = int(torch.tensor(shape).prod())
    common = torch.randn(width, classes, generator=rng)
    xs, ys = [], []
    for n in sizes:
        x = torch.randn(n + 6, *shape, generator=rng)
        own = common + 0.7 * torch.randn(width, classes, generator=rng)
        xs.append(x)
        ys.append((x.flatten(1) @ own).argmax(-1))
    train = [x[:-6] for x in xs], [y[:-6] for y in ys]
    environments = [torch.arange(n) % (1 + j % 2) for j, n in enumerate(sizes)]
    test = [x[-6:] for x in xs], [y[-6:] for y in ys]
    return bf.data.from_arrays(
        *train, test=test, outputs=classes, task="classification", environments=environments
    )


def run(
    algorithm: bf.Algorithm,
    clients: FederatedData,
    rounds: int = 1,
    kernel: KernelName = "auto",
    **options: Any,
) -> Result:
    """A quiet run in float64 that measures nothing on the way."""
    defaults: dict[str, Any] = {
        "dtype": torch.float64,
        "evaluate_every": None,
        "seed": 2,
        "progress": False,
        "engine": bf.Engine(kernel),
    }
    return bf.simulate(algorithm, clients, rounds=rounds, **{**defaults, **options})


def close(a: Any, b: Any, tolerance: float = 1e-12) -> None:
    """In float64."""
    assert_close(
        *(torch.as_tensor(t, dtype=torch.float64) for t in (a, b)), rtol=tolerance, atol=tolerance
    )


def weights(algorithm: bf.Algorithm, block: str = "w") -> Tensor:
    """Where seven clients start under the seed of `run`."""
    return algorithm.init(7, seed=2, dtype=torch.float64)[block]["loc"]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal draws in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def burst_by_fine_tuning(model: nn.Module) -> bf.Algorithm:
    """FedAvg whose third client's fine-tuning is not finite; that of the others moves every weight
    by 1.
    """

    def burst(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        loc = view["w"]["loc"]
        return view | {
            "w": {
                "loc": torch.where(view["n"] == SIZES[2], torch.full_like(loc, torch.nan), loc + 1)
            }
        }

    return replace(bf.algorithms.fedavg(model, epochs=1), finetune=(bf.Once(burst),))


class Turned(nn.Module):
    """A network that declares its head before its body."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.body = nn.Linear(hidden, outputs), nn.Linear(inputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def with_batch_norm(dropout: float = 0.0) -> bf.models.SplitModel:
    """A network for `federation` whose body has a batch norm and dropout."""
    plain = bf.models.mlp(8, hidden=16, outputs=3)
    assert isinstance(plain.body, nn.Sequential)
    first, *rest = plain.body
    return bf.models.SplitModel(
        nn.Sequential(first, nn.BatchNorm1d(16), *rest, nn.Dropout(dropout)), plain.head
    )


def scaled(clients: FederatedData, factors: tuple[float, ...]) -> FederatedData:
    """The same clients, each with its inputs times a number."""
    parts = {}
    for name in ("train", "test"):
        split = clients.splits[name]
        rows = [split.client(j) for j in range(clients.clients)]
        parts[name] = (
            [x * factor for (x, _), factor in zip(rows, factors, strict=True)],
            [y for _, y in rows],
        )
    return bf.data.from_arrays(
        *parts["train"], test=parts["test"], outputs=clients.outputs, task="classification"
    )


@contextlib.contextmanager
def draws_elsewhere() -> Iterator[None]:
    """Another thread draws from torch's shared generator all the while."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(100)

    other = threading.Thread(target=draw)
    other.start()
    try:
        yield
    finally:
        stop.set()
        other.join()
