"""Measure how fast a round is, in units of a bare loop: a module and a torch.optim.SGD per client,
one after another, on one thread.

python benchmarks/engines.py [--quick] [--rows NAME ...] [--against COMMIT]

Everything in a round that is not a local step (`rest`; gathering batches and posterior noise stand
apart) is to stay below 8 % of the workers' time with two workers and 5 % with one, and beside a
busy neighbour two workers are to take at most 1.2 times as long as one.

Every row runs its sides in turn, repetition by repetition, and takes medians of the ratios within a
repetition, so that a disturbance of the machine falls on both. Seconds are wall; CPU seconds and
the resident memory that a side adds (in a process of its own) stand beside. Results:
benchmarks/results/engines.json.

With --against, our own rounds are timed in this tree and in a checkout of another commit, in
processes that take turns, and a row's figure is the median of the ratios of neighbouring processes;
at most 3 % more is allowed. Results: benchmarks/results/against.json.
"""

import argparse
import contextlib
import copy
import gc
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import bayesfl as bf
from bayesfl.data import ClientData, FederatedData, SourceInfo
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.engine import stability
from bayesfl.evaluation import report
from bayesfl.likelihoods import Bernoulli, Categorical
from bayesfl.optim import SGD

RESULTS = Path(__file__).parent / "results" / "engines.json"
LR, MOMENTUM, BATCH = 0.05, 0.9, 50
REST = {"2 workers": 0.08, "1 worker": 0.05}
TWO_TO_ONE = 1.2
PAIRS, SLOWER = 7, 1.03
ROUNDS = """
import json, sys
tree, name, side, quick, rounds = sys.argv[1:]
sys.path[:0] = [tree, tree + "/benchmarks"]
import torch
torch.set_num_threads(1)
import bayesfl, engines
assert bayesfl.__file__.startswith(tree), bayesfl.__file__
one_round = engines.rows(quick == "quick")[name].sides[side]()
one_round()
print(json.dumps([one_round() for _ in range(int(rounds))]))
"""
"""A program that times rounds of one side of a row in one tree, after a round that warms up; it
runs under earlier commits, too.
"""
Round = Callable[[], float]
Maker = Callable[[bf.Engine], Round]


def federation(
    sizes: list[int],
    shape: tuple[int, ...] = (784,),
    classes: int = 10,
    splits: tuple[str, ...] = ("train",),
) -> FederatedData:
    """Random inputs and labels, as many in every split: speed does not read them."""
    rng = torch.Generator().manual_seed(0)
    n = sum(sizes)
    rows = n * len(splits)
    # Around 0, for which the first rates leave the bodies of all methods alive.
    x = torch.rand(rows, *shape, generator=rng) - 0.5
    y = torch.randint(0, classes, (rows,), generator=rng)
    return FederatedData(
        splits={
            name: ClientData(x, y, torch.arange(n) + k * n, np.array(sizes))
            for k, name in enumerate(splits)
        },
        outputs=classes,
        task="classification",
        inputs=shape,
        client_names=tuple(str(j) for j in range(len(sizes))),
        class_names=None,
        source=SourceInfo(name="random"),
        recipe={},
    )


def unequal(clients: int = 40) -> list[int]:
    """Sizes from 10 to 500."""
    return [int(n) for n in np.clip(np.random.default_rng(0).exponential(180, clients), 10, 500)]


def averaged(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and running statistics."""
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


def bare_fedavg(model: torch.nn.Module, data: FederatedData, epochs: int) -> Round:
    """FedAvg as a loop; running statistics are averaged, too."""
    clients = [data.train.client(j) for j in range(data.clients)]
    models = [copy.deepcopy(model) for _ in clients]
    server = [t.detach().clone() for t in averaged(model)]

    def one_round() -> float:
        start = time.perf_counter()
        for net, (x, y) in zip(models, clients, strict=True):
            with torch.no_grad():
                for t, s in zip(averaged(net), server, strict=True):
                    t.copy_(s)
            optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
            for _ in range(epochs):
                for rows in torch.randperm(len(x)).split(BATCH):
                    optimiser.zero_grad()
                    F.cross_entropy(net(x[rows]), y[rows]).backward()
                    optimiser.step()
        with torch.no_grad():
            weight = torch.tensor([len(x) for x, _ in clients]) / sum(len(x) for x, _ in clients)
            for k, s in enumerate(server):
                s.copy_(
                    torch.einsum(
                        "j,j...->...", weight, torch.stack([averaged(net)[k] for net in models])
                    )
                )
        return time.perf_counter() - start

    return one_round


def bare_pfedvem(
    model: torch.nn.Module, data: FederatedData, head_epochs: int, body_epochs: int, draws: int
) -> Round:
    """PFedVEM as a loop: the same gradient steps and the same number of draws."""
    clients = [data.train.client(j) for j in range(data.clients)]
    bodies = [copy.deepcopy(model.body) for _ in clients]
    server = [p.detach().clone() for p in model.body.parameters()]
    centre = [model.head.weight.detach().clone(), model.head.bias.detach().clone()]
    heads = [
        [*(c.clone() for c in centre), *(torch.full_like(c, 0.5413) for c in centre)]
        for _ in clients
    ]

    def losses(
        features: torch.Tensor, y: torch.Tensor, head: list[torch.Tensor], reduction: str
    ) -> torch.Tensor:
        w, b, s, t = head[0], head[1], F.softplus(head[2]), F.softplus(head[3])
        total = torch.zeros(())
        for _ in range(draws):
            logits = F.linear(features, w + s * torch.randn_like(s), b + t * torch.randn_like(t))
            total = total + F.cross_entropy(logits, y, reduction=reduction) / draws
        return total

    def one_round() -> float:
        start = time.perf_counter()
        for body, head, (x, y) in zip(bodies, heads, clients, strict=True):
            size = sum(c.numel() for c in centre)
            with torch.no_grad():
                for p, s in zip(body.parameters(), server, strict=True):
                    p.copy_(s)
                rho2 = (
                    sum(
                        (F.softplus(r).square() + (m - c).square()).sum()
                        for m, r, c in zip(head[:2], head[2:], centre, strict=True)
                    )
                    / size
                )
            for p in head:
                p.requires_grad_(True)
            optimiser = torch.optim.SGD(head, lr=1e-3, momentum=MOMENTUM)
            for _ in range(head_epochs):
                optimiser.zero_grad()
                with torch.no_grad():
                    features = body(x)
                loss = losses(features, y, head, "sum")
                for m, r, c in zip(head[:2], head[2:], centre, strict=True):
                    s2 = F.softplus(r).square()
                    loss = (
                        loss + 0.5 * ((s2 + (m - c).square()) / rho2 - 1 + (rho2 / s2).log()).sum()
                    )
                loss.backward()
                optimiser.step()
            for p in head:
                p.requires_grad_(False)
            optimiser = torch.optim.SGD(body.parameters(), lr=1e-2, momentum=MOMENTUM)
            for _ in range(body_epochs):
                for rows in torch.randperm(len(x)).split(BATCH):
                    optimiser.zero_grad()
                    losses(body(x[rows]), y[rows], head, "mean").backward()
                    optimiser.step()
        with torch.no_grad():
            for k, s in enumerate(server):
                s.copy_(torch.stack([list(body.parameters())[k] for body in bodies]).mean(0))
        return time.perf_counter() - start

    return one_round


class Encoder(torch.nn.Module):
    """Two layers of a transformer with dropout, on sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, 10] of x [B, T, 256]."""
        return self.head(self.encoder(x).mean(1))


class ResidualMLP(torch.nn.Module):
    """Two layers with batch norm and dropout, the second beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(20, 64), torch.nn.Linear(64, 64)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(64), torch.nn.BatchNorm1d(64)])
        self.drop, self.last = torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, 2] of x [B, 20]."""
        h = self.drop(torch.relu(self.norms[0](self.first(x))))
        return self.last(h + self.drop(torch.relu(self.norms[1](self.second(h)))))


class TwoHeads(torch.nn.Module):
    """Fed-RoD's network: a generic head, and a personal one that adds to it without a say in the
    body.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU())
        self.generic, self.personal = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, 2 * 10] of x [B, 20], those of the generic head first."""
        z = self.body(x)
        generic = self.generic(z)
        return torch.cat([generic, generic.detach() + self.personal(z.detach())], -1)


@dataclass(frozen=True)
class Personal(Categorical):
    """The likelihood of the second half of the outputs."""

    def width(self, targets: Any) -> tuple[int, ...]:
        """Two logits a class."""
        return (2 * targets.count,)

    def nll(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of the personal logits."""
        return super().nll(outputs.chunk(2, -1)[1], y)

    def nll_and_slope(
        self, outputs: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the personal logits; the others have slope 0."""
        generic, personal = outputs.chunk(2, -1)
        losses, slope = super().nll_and_slope(personal.contiguous(), y)
        return losses, torch.cat([torch.zeros_like(generic), slope], -1)

    def predictive(self, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the personal logits."""
        return super().predictive(outputs.chunk(2, -1)[1])


def fed_rod(model: torch.nn.Module, epochs: int) -> bf.Algorithm:
    """Fed-RoD (Chen and Chao, ICLR 2022) as a newcomer writes it: a balanced softmax of the generic
    head, the personal head on top.
    """

    def prior(algorithm: bf.Algorithm, given: Any, view: Any, batch: Any) -> Any:
        share = (F.one_hot(batch["y"], 10) * batch["weight"].unsqueeze(-1)).sum(0) + 1
        return view | {"prior": (share / share.sum()).log()}

    def balanced(
        features: Any, outputs: torch.Tensor, losses: Any, batch: Any, given: Any, view: Any
    ) -> torch.Tensor:
        logits = outputs.chunk(2, -1)[0] + view["prior"].unsqueeze(-2)
        nll = -logits.log_softmax(-1).gather(-1, batch["y"].unsqueeze(-1)).squeeze(-1)
        return (nll * batch["weight"]).sum(-1) / batch["weight"].sum(-1)

    parts = ("body", "generic", "personal")
    energy = bf.Energy(parts, parts, likelihood="mean", penalty=balanced)
    step = bf.Descend(energy, epochs=epochs, batch_size=BATCH, optimiser=SGD(LR, MOMENTUM))
    blocks = {
        "body": bf.Block("body.*", pool=bf.pools.Mean()),
        "generic": bf.Block("generic.*", pool=bf.pools.Mean()),
        "personal": bf.Block("personal.*", pool=None, keep=True),
    }
    phases = (bf.Once(prior, data=True), step)
    return bf.Algorithm(model, blocks, phases, parts=parts, likelihood=Personal())


def bare_fed_rod(model: torch.nn.Module, data: FederatedData, epochs: int) -> Round:
    """The same as a loop."""
    clients = [data.train.client(j) for j in range(data.clients)]
    models = [copy.deepcopy(model) for _ in clients]
    shares = [F.one_hot(y, 10).sum(0) + 1.0 for _, y in clients]
    weight = torch.tensor([len(x) for x, _ in clients]) / sum(len(x) for x, _ in clients)
    server = [p.detach().clone() for p in [*model.body.parameters(), *model.generic.parameters()]]

    def one_round() -> float:
        start = time.perf_counter()
        for net, (x, y), share in zip(models, clients, shares, strict=True):
            shared = [*net.body.parameters(), *net.generic.parameters()]
            with torch.no_grad():
                for p, s in zip(shared, server, strict=True):
                    p.copy_(s)
            optimiser, prior = (
                torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM),
                (share / share.sum()).log(),
            )
            for _ in range(epochs):
                for rows in torch.randperm(len(x)).split(BATCH):
                    optimiser.zero_grad()
                    generic, personal = net(x[rows]).chunk(2, -1)
                    loss = F.cross_entropy(generic + prior, y[rows])
                    (loss + F.cross_entropy(personal, y[rows])).backward()
                    optimiser.step()
        with torch.no_grad():
            for k, s in enumerate(server):
                rows = [[*net.body.parameters(), *net.generic.parameters()][k] for net in models]
                s.copy_(torch.einsum("j,j...->...", weight, torch.stack(rows)))
        return time.perf_counter() - start

    return one_round


class Ours:
    """The same round by `simulate`, one call a round, with what it spent where."""

    def __init__(
        self, algorithm: bf.Algorithm, data: FederatedData, engine: bf.Engine, **options: object
    ) -> None:
        self._run = lambda rounds, resume: bf.simulate(
            algorithm,
            data,
            rounds=rounds,
            engine=engine,
            evaluate_every=None,
            progress=False,
            resume=resume,
            train="cohort",
            sampling="fixed",
            **options,
        )
        self._result: Any = None
        self._done = 0
        self.workers = engine.workers or 1
        self.parts: list[dict[str, float]] = []

    def __call__(self) -> float:
        """One more round."""
        self._done += 1
        self._result = self._run(self._done, self._result)
        row = self._result.history.rows[-1]
        self.parts.append(
            {k: row[k] for k in ("seconds", "seconds_steps", "seconds_batches", "seconds_noise")}
        )
        return row["seconds"]

    def shares(self) -> dict[str, float]:
        """Shares of the workers' time, medians over repetitions; `rest` is neither steps nor
        batches nor noise.
        """
        out: dict[str, list[float]] = {"batches": [], "noise": [], "rest": []}
        for part in self.parts[1:]:
            total = part["seconds"] * self.workers
            out["batches"].append(part["seconds_batches"] / total)
            out["noise"].append(part["seconds_noise"] / total)
            out["rest"].append(
                1
                - (part["seconds_steps"] + part["seconds_batches"] + part["seconds_noise"]) / total
            )
        return {key: statistics.median(values) for key, values in out.items()}


class Watched(Ours):
    """The same, with every round looked at for stability, or none."""

    def __init__(self, always: bool, *args: Any, **options: object) -> None:
        super().__init__(*args, **options)
        self._always = always

    def __call__(self) -> float:
        """One more round."""
        with mock.patch.object(stability, "is_due", return_value=self._always):
            return super().__call__()


class Predicted(Ours):
    """The same, and after each round predictions for the test examples, for which the precision is
    chosen.
    """

    def __call__(self) -> float:
        """One more round, and its predictions."""
        seconds, start = super().__call__(), time.perf_counter()
        self._result.predict()
        return seconds + time.perf_counter() - start


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        title: What is run.
        unit: The side that everything is measured in.
        sides: {name: makes a round}.
        limits: {name: at most this ratio}.
        repetitions: Of all sides, after one that warms up.
        steps_alone: Whether the local work is gradient steps and nothing else, so that the rest of
            a round has its limit.
    """

    title: str
    unit: str
    sides: dict[str, Callable[[], Round]]
    limits: dict[str, float]
    repetitions: int
    steps_alone: bool = True


def rows(quick: bool) -> dict[str, Row]:
    """The table's rows by name."""
    epochs = 2 if quick else 10
    mlp, heavy = bf.models.mlp(784, hidden=100, outputs=10), SGD(LR, MOMENTUM)
    fedavg = bf.algorithms.fedavg(mlp, epochs=epochs, optimiser=heavy)
    one, two = bf.Engine(workers=1), bf.Engine(workers=2)

    def against(
        bare: Callable[[], Round], algorithm: bf.Algorithm, data: Callable[[], FederatedData]
    ) -> dict[str, Callable[[], Round]]:
        return {
            "bare": bare,
            "bare, 2 threads": lambda: _threaded(bare(), 2),
            "1 worker": lambda: Ours(algorithm, data(), one),
            "2 workers": lambda: Ours(algorithm, data(), two),
        }

    def make(
        title: str,
        bare,
        algorithm: bf.Algorithm,
        data,
        at_two: float,
        at_one: float,
        repetitions: int,
    ) -> Row:
        return Row(
            title,
            "bare",
            against(bare, algorithm, data),
            {"2 workers": at_two, "1 worker": at_one},
            2 if quick else repetitions,
        )

    def beside(
        title: str,
        algorithm: bf.Algorithm,
        unit: str,
        other: bf.Algorithm,
        data,
        limit: float,
        repetitions: int = 21,
    ) -> Row:
        theirs, mine = (
            lambda engine, one=one: Ours(one, data(), engine) for one in (other, algorithm)
        )
        return pairs(title, unit, theirs, mine, limit=limit, repetitions=repetitions)

    def pairs(
        title: str, unit: str, other: Maker, mine: Maker, *, limit: float | None, repetitions: int
    ) -> Row:
        sides: dict[str, Callable[[], Round]] = {
            unit: lambda: other(one),
            "1 worker": lambda: mine(one),
            f"{unit}, 2 workers": lambda: other(two),
            "2 workers": lambda: mine(two),
        }
        limits = {} if limit is None else {"1 worker": limit, "2 workers": limit}
        return Row(
            f"{title}, in units of our own {unit} round",
            unit,
            sides,
            limits,
            2 if quick else repetitions,
        )

    ten, hundred = (
        (lambda: federation([250] * 10)),
        (lambda: federation([250] * (20 if quick else 100))),
    )
    predicting = partial(
        federation, [10] * 2 if quick else [50] * 4, splits=("train", "validation", "test")
    )
    forty, images = (
        (lambda: federation(unequal())),
        (lambda: federation([125] * (4 if quick else 20), (1, 28, 28))),
    )
    net = bf.models.lenet((1, 28, 28), outputs=10)
    cnn = bf.algorithms.fedavg(net, epochs=2, optimiser=heavy)
    vem, held = (
        new(mlp, head_epochs=epochs, body_epochs=epochs)
        for new in (bf.algorithms.pfedvem, bf.algorithms.pfedvem_held)
    )
    curved = {"epochs": epochs, "optimiser": SGD(0.01), "selection": "random"}
    fedsi = {
        link: bf.algorithms.fedsi(mlp, link=link, **curved) for link in ("per_class", "contrasts")
    }
    ditto = bf.algorithms.ditto(mlp, epochs=epochs, batch_size=BATCH, optimiser=heavy)
    linear = torch.nn.Linear(150, 1)
    once = {"epochs": 1, "batch_size": 128, "likelihood": Bernoulli()}
    mean = bf.algorithms.fedavg(linear, optimiser=heavy, **once)
    mixed = bf.algorithms.fedem(
        linear, components=3, optimiser=replace(heavy, weight_decay=5e-4), **once
    )
    twenty, wide = (
        (lambda: federation([120 if quick else 600] * 20)),
        bf.models.mlp(784, hidden=128, outputs=10),
    )
    leaky = bf.models.leaky_cnn((1, 28, 28), outputs=10)
    fives = {"head_epochs": 1, "body_epochs": 1 if quick else 5, "batch_size": BATCH}
    rep, pac = bf.algorithms.fedrep(wide, **fives), bf.algorithms.fedpac(wide, **fives)
    rep_cnn, pac_cnn = bf.algorithms.fedrep(leaky, **fives), bf.algorithms.fedpac(leaky, **fives)
    mixture = cache(lambda: bf.data.linear_mixture(clients=60 if quick else 300, test=1))
    normed, dropping = copy.deepcopy(net), copy.deepcopy(net)
    normed.body = torch.nn.Sequential(
        net.body[0],
        torch.nn.BatchNorm2d(6),
        *net.body[1:4],
        torch.nn.BatchNorm2d(16),
        *net.body[4:],
    )
    dropping.body = torch.nn.Sequential(
        *net.body[:9], torch.nn.Dropout(0.3), *net.body[9:], torch.nn.Dropout(0.3)
    )
    residual, small = ResidualMLP(), (lambda: federation([40] * (20 if quick else 200), (20,), 2))
    heads, rod = TwoHeads(), (lambda: federation([100] * 20, (20,)))
    encoder, tokens = Encoder(), (lambda: federation([50] * 4, (64, 256)))
    few, resnet = (
        (lambda: federation([20 if quick else 100] * 4, (3, 32, 32))),
        torchvision().models.resnet18(num_classes=10),
    )
    lone = {
        name: bf.algorithms.fedavg(one, epochs=5, optimiser=heavy)
        for name, one in {"r": resnet, "e": encoder}.items()
    }
    short = bf.algorithms.fedavg(resnet, epochs=1, optimiser=heavy)
    live = {
        name: bf.algorithms.fedavg(one, epochs=2, optimiser=heavy)
        for name, one in {"b": normed, "d": dropping}.items()
    }
    return {
        "mlp10": make(
            "FedAvg, MLP 784-100-10, 10 clients x 250",
            lambda: bare_fedavg(mlp, ten(), epochs),
            fedavg,
            ten,
            0.45,
            0.72,
            31,
        ),
        "mlp100": make(
            "the same, 100 clients",
            lambda: bare_fedavg(mlp, hundred(), epochs),
            fedavg,
            hundred,
            0.40,
            0.65,
            5,
        ),
        "unequal": make(
            "40 clients of 10 to 500",
            lambda: bare_fedavg(mlp, forty(), epochs),
            fedavg,
            forty,
            0.45,
            0.65,
            11,
        ),
        "lenet": make(
            "LeNet 6-16-120-84, 20 clients x 125",
            lambda: bare_fedavg(net, images(), 2),
            cnn,
            images,
            0.55,
            0.95,
            15,
        ),
        "lenet_norm": make(
            "the same with batch norm",
            lambda: bare_fedavg(normed, images(), 2),
            live["b"],
            images,
            0.7,
            1.0,
            15,
        ),
        "lenet_dropout": make(
            "the same with dropout",
            lambda: bare_fedavg(dropping, images(), 2),
            live["d"],
            images,
            0.7,
            1.0,
            15,
        ),
        "residual": make(
            "Residual MLP 20-64-64-2, batch norm and dropout, 200 clients x 40",
            lambda: bare_fedavg(residual, small(), epochs),
            bf.algorithms.fedavg(residual, epochs=epochs, optimiser=heavy),
            small,
            0.15,
            0.25,
            7,
        ),
        "fed_rod": make(
            "Fed-RoD as one writes it, MLP 20-64-10, 20 clients x 100",
            lambda: bare_fed_rod(heads, rod(), epochs),
            fed_rod(heads, epochs),
            rod,
            1.2,
            1.2,
            15,
        ),
        "transformer": make(
            "Transformer, d = 256, 4 x 50",
            lambda: bare_fedavg(encoder, tokens(), 5),
            lone["e"],
            tokens,
            0.8,
            1.0,
            5,
        ),
        "resnet": make(
            "ResNet-18, batch norm, 4 x 100",
            lambda: bare_fedavg(resnet, few(), 5),
            lone["r"],
            few,
            0.8,
            1.05,
            3,
        ),
        "resnet_short": make(
            "the same, one epoch", lambda: bare_fedavg(resnet, few(), 1), short, few, 0.8, 1.05, 5
        ),
        "pfedvem": make(
            "pFedVEM, 10 clients, 5 draws",
            lambda: bare_pfedvem(mlp, ten(), epochs, epochs, 5),
            vem,
            ten,
            0.40,
            0.60,
            15,
        ),
        "pfedvem_held": beside("pFedVEM, scales held", held, "pFedVEM", vem, ten, 1.05),
        "pfedvem_watched": pairs(
            "pFedVEM, every round looked at for stability",
            "unwatched",
            lambda engine: Watched(False, vem, ten(), engine),
            lambda engine: Watched(True, vem, ten(), engine),
            limit=None,
            repetitions=21,
        ),
        "fedsi_contrasts": replace(
            pairs(
                "FedSI at random weights, predicting by contrasts after every round",
                "class-wise",
                lambda engine: Predicted(fedsi["per_class"], predicting(), engine),
                lambda engine: Predicted(fedsi["contrasts"], predicting(), engine),
                limit=1.05,
                repetitions=7,
            ),
            steps_alone=False,
        ),
        "ditto": beside("Ditto", ditto, "FedAvg", fedavg, ten, 2.3),
        "fedem": replace(
            beside("FedEM, 3 linear components, 300 clients", mixed, "FedAvg", mean, mixture, 2.4),
            steps_alone=False,
        ),
        "fedpac": replace(
            beside("FedPAC, MLP 784-128-10, 20 clients x 600", pac, "FedRep", rep, twenty, 1.5),
            steps_alone=False,
        ),
        "fedpac_cnn": replace(
            beside("FedPAC, its CNN, 20 clients x 125", pac_cnn, "FedRep", rep_cnn, images, 1.5, 5),
            steps_alone=False,
        ),
    }


def _threaded(one_round: Round, threads: int) -> Round:
    def run() -> float:
        torch.set_num_threads(threads)
        seconds = one_round()
        torch.set_num_threads(1)
        return seconds

    return run


@contextlib.contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A process that spins on one core, or none."""
    if not busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(row: Row, *, busy: bool) -> dict[str, dict[str, float]]:
    """All sides of a row in turn; beside a busy process without torch's own threads, which stall
    for seconds.
    """
    sides = {name: make() for name, make in row.sides.items() if not (busy and "threads" in name)}
    for side in sides.values():
        side()
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(row.repetitions):
        for name, side in sides.items():
            gc.collect()
            start = time.process_time()
            wall[name].append(side())
            cpu[name].append(time.process_time() - start)
    out = {}
    for name, side in sides.items():
        unit = wall[f"{row.unit}, {name}" if f"{row.unit}, {name}" in wall else row.unit]
        out[name] = {
            "seconds": statistics.median(wall[name]),
            "cpu_seconds": statistics.median(cpu[name]),
            "ratio": statistics.median(a / b for a, b in zip(wall[name], unit, strict=True)),
            **(side.shares() if isinstance(side, Ours) else {}),
        }
        if name in row.limits:
            out[name]["at_most"] = row.limits[name]
            if not busy and row.steps_alone:
                out[name]["rest_at_most"] = REST[name]
    out["2 workers"]["to_one_worker"] = statistics.median(
        a / b for a, b in zip(wall["2 workers"], wall["1 worker"], strict=True)
    )
    return out


def _peak(name: str, side: str, quick: bool, pipe) -> None:
    torch.set_num_threads(1)
    one_round = rows(quick)[name].sides[side]
    before = high_water()
    one_round()()
    pipe.send(high_water() - before)


def high_water() -> float:
    """Largest resident memory of this process so far, in MiB; getrusage would count the parent's
    too.
    """
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def peak_memory(name: str, side: str, quick: bool) -> float:
    """MiB that one round of a side adds, its data included, in a process of its own."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_peak, args=(name, side, quick, there)
    )
    process.start()
    process.join()
    return here.recv()


def against(commit: str, names: list[str], quick: bool) -> dict[str, dict[str, float]]:
    """Seconds of a round of ours in this tree and in a checkout of `commit`, and their ratio;
    medians over pairs of processes.
    """
    here, found = str(Path(__file__).parents[1]), {}
    with tempfile.TemporaryDirectory() as there:
        subprocess.run(["git", "clone", "--quiet", here, there], check=True)
        subprocess.run(["git", "-C", there, "checkout", "--quiet", commit], check=True)

        def seconds(tree: str, name: str, side: str) -> float:
            size = ["quick" if quick else "whole", "2" if quick else "5"]
            command = [sys.executable, "-c", ROUNDS, tree, name, side, *size]
            said = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=there
            ).stdout
            return statistics.median(json.loads(said.splitlines()[-1]))

        for name in names:
            for side in ("1 worker", "2 workers"):
                pairs = []
                for turn in range(2 if quick else PAIRS):
                    both = {
                        tree: seconds(tree, name, side)
                        for tree in ((here, there) if turn % 2 else (there, here))
                    }
                    pairs.append((both[here], both[there]))
                now, then = (statistics.median(times) for times in zip(*pairs, strict=True))
                ratio = statistics.median(a / b for a, b in pairs)
                found[f"{name}, {side}"] = {
                    "seconds": now,
                    "before": then,
                    "ratio": ratio,
                    "at_most": SLOWER,
                }
                print(
                    f"{name}, {side}: {now:.3f} s, before {then:.3f} s, ratio {ratio:.3f} (at "
                    f"most {SLOWER})",
                    flush=True,
                )
    return found


def main() -> None:
    """Runs the rows, prints the table, writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and few repetitions: shows that it runs; nothing is written",
    )
    parser.add_argument("--rows", nargs="+", choices=list(rows(True)), default=list(rows(True)))
    parser.add_argument(
        "--no-neighbour", action="store_true", help="leave out the rows with a busy neighbour"
    )
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="time our own rounds here and in a checkout of this commit, and nothing else",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Before anything is written, which would count as an uncommitted change.
    environment = report.environment()
    print(
        f"torch {torch.__version__}, {environment['cores']} cores, 1 intra-op thread unless said",
        flush=True,
    )
    if arguments.against:
        found = against(arguments.against, arguments.rows, arguments.quick)
        if not arguments.quick:
            about = {"command": " ".join(["python", *sys.argv]), "environment": environment}
            path = RESULTS.with_name("against.json")
            known = json.loads(path.read_text())["rows"] if path.exists() else {}
            known |= {name: {**row, **about} for name, row in found.items()}
            report.write_json(path, {"rows": known})
        return
    results: dict[str, dict] = (
        json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and not arguments.quick else {}
    )
    table = rows(arguments.quick)
    for name in arguments.rows:
        row = table[name]
        for busy in (False, True)[: 1 if arguments.no_neighbour or row.unit != "bare" else 2]:
            with neighbour(busy):
                sides = measure(row, busy=busy)
            if not busy:
                for side, figures in sides.items():
                    figures["memory_mib"] = peak_memory(name, side, arguments.quick)
            title = row.title + (", busy neighbour" if busy else "")
            print(title)
            for side, f in sides.items():
                shares = (
                    f"  shares: batches {f['batches']:.3f} noise {f['noise']:.3f} rest "
                    f"{f['rest']:.3f}"
                    if "rest" in f
                    else ""
                )
                shares += f" (at most {f['rest_at_most']:.2f})" if "rest_at_most" in f else ""
                shares += (
                    f"  {f['to_one_worker']:.2f} of 1 worker (at most {TWO_TO_ONE})"
                    if busy and "to_one_worker" in f
                    else ""
                )
                limit = f" (at most {f['at_most']:.2f})" if "at_most" in f and not busy else ""
                memory = f"  {f['memory_mib']:.0f} MiB" if "memory_mib" in f else ""
                print(
                    f"  {side:18s} {f['seconds']:.3f} s  cpu {f['cpu_seconds']:.3f} s  ratio "
                    f"{f['ratio']:.2f}{limit}{memory}{shares}",
                    flush=True,
                )
            results[f"{name}{'_busy' if busy else ''}"] = {
                "title": title,
                "repetitions": row.repetitions,
                "command": " ".join(["python", *sys.argv]),  # rows may be measured anew one by one
                "environment": environment,
                "sides": sides,
            }
            if not arguments.quick:
                order = [key for one in table for key in (one, f"{one}_busy")]
                report.write_json(
                    RESULTS, {"rows": {key: results[key] for key in order if key in results}}
                )


if __name__ == "__main__":
    main()
