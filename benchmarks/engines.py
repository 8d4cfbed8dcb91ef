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

With --against, our own rounds are timed in this tree and in a checkout of another commit, by two
processes that take turns round by round, and a row's figure is the median of the ratios of
neighbouring rounds; at most 3 % more is allowed. Results: benchmarks/results/against.json.
"""

import contextlib
import copy
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import script
import timing
import torch
import torch.nn.functional as F
from timing import federation
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.engine import stability
from bayesfl.likelihoods import Bernoulli, Categorical
from bayesfl.optim import SGD

LR, MOMENTUM, BATCH = 0.05, 0.9, 50
HEAVY = SGD(LR, MOMENTUM)
REST = {"2 workers": 0.08, "1 worker": 0.05}
PAIRS, SLOWER = 40, 1.03
ROUNDS = """
import sys
tree, name, side, quick = sys.argv[1:]
sys.path[:0] = [tree, tree + "/benchmarks"]
import torch
torch.set_num_threads(1)
import bayesfl, engines
assert bayesfl.__file__.startswith(tree), bayesfl.__file__
one_round = engines.rows(quick == "quick")[name].sides[side]()
one_round()
one_round()
for _ in sys.stdin:
    print("seconds", one_round(), flush=True)
"""
"""A program that times a round in a tree, of now or of before, for each line that it reads."""
Round = Callable[[], float]  # which gives its seconds
Make = Callable[[], Round]
Data = Callable[[], FederatedData]


def bare(
    model: nn.Module,
    data: Data,
    shared: Callable[[nn.Module], list[Tensor]],
    train: Callable[[nn.Module, Tensor, Tensor], None],
) -> Round:
    """A round as a loop, which averages by size what is shared."""
    split = data().train
    clients = [split.client(j) for j in range(len(split.counts))]
    nets = [copy.deepcopy(model) for _ in clients]
    server = [t.detach().clone() for t in shared(model)]
    weight = torch.tensor([len(x) for x, _ in clients]) / sum(len(x) for x, _ in clients)

    def one_round() -> None:
        for net, (x, y) in zip(nets, clients, strict=True):
            with torch.no_grad():
                for t, s in zip(shared(net), server, strict=True):
                    t.copy_(s)
            train(net, x, y)
        with torch.no_grad():
            for s, *own in zip(server, *map(shared, nets), strict=True):
                s.copy_(torch.einsum("j,j...->...", weight, torch.stack(own)))

    return lambda: timing.seconds(one_round)


def descend(net: nn.Module, loss: Any, x: Tensor, y: Tensor, epochs: int, lr: float = LR) -> None:
    """Steps on mini-batches, by an optimiser of their own."""
    optimiser = torch.optim.SGD(net.parameters(), lr=lr, momentum=MOMENTUM)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=x.device).split(BATCH):
            optimiser.zero_grad()
            loss(x[rows], y[rows]).backward()
            optimiser.step()


def bare_fedavg(model: nn.Module, data: Data, epochs: int) -> Round:
    """FedAvg as a loop; running statistics are averaged, too."""

    def averaged(net: nn.Module) -> list[Tensor]:
        return [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]

    def train(net: nn.Module, x: Tensor, y: Tensor) -> None:
        descend(net, lambda x, y: F.cross_entropy(net(x), y), x, y, epochs)

    return bare(model, data, averaged, train)


def bare_pfedvem(model: nn.Module, data: Data, epochs: int, draws: int) -> Round:
    """PFedVEM as a loop: the same gradient steps and the same number of draws."""
    centre = [model.head.weight.detach().clone(), model.head.bias.detach().clone()]
    size = sum(c.numel() for c in centre)
    heads: dict[nn.Module, list[Tensor]] = defaultdict(
        lambda: [*(c.clone() for c in centre), *(torch.full_like(c, 0.5413) for c in centre)]
    )

    def loss(features: Tensor, y: Tensor, head: list[Tensor], reduction: str) -> Tensor:
        w, b, s, t = head[0], head[1], F.softplus(head[2]), F.softplus(head[3])
        total = torch.zeros(())
        for _ in range(draws):
            logits = F.linear(features, w + s * torch.randn_like(s), b + t * torch.randn_like(t))
            total = total + F.cross_entropy(logits, y, reduction=reduction) / draws
        return total

    def moments(head: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Variances and squared distances to the centre."""
        for m, r, c in zip(head[:2], head[2:], centre, strict=True):
            yield F.softplus(r).square(), (m - c).square()

    def train(body: nn.Module, x: Tensor, y: Tensor) -> None:
        head = heads[body]
        with torch.no_grad():
            rho2 = sum((s2 + d2).sum() for s2, d2 in moments(head)) / size
        for p in head:
            p.requires_grad_(True)
        optimiser = torch.optim.SGD(head, lr=1e-3, momentum=MOMENTUM)
        for _ in range(epochs):
            optimiser.zero_grad()
            with torch.no_grad():
                features = body(x)
            energy = loss(features, y, head, "sum")
            for s2, d2 in moments(head):
                energy = energy + 0.5 * ((s2 + d2) / rho2 - 1 + (rho2 / s2).log()).sum()
            energy.backward()
            optimiser.step()
        for p in head:
            p.requires_grad_(False)
        descend(body, lambda x, y: loss(body(x), y, head, "mean"), x, y, epochs, lr=1e-2)

    return bare(model.body, data, lambda body: list(body.parameters()), train)


class Encoder(nn.Module):
    """Two layers of a transformer with dropout, on sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, 10] of x [B, T, 256]."""
        return self.head(self.encoder(x).mean(1))


class ResidualMLP(nn.Module):
    """Two layers with batch norm and dropout, the second beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 64), nn.Linear(64, 64)
        self.norms = nn.ModuleList([nn.BatchNorm1d(64), nn.BatchNorm1d(64)])
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, 2] of x [B, 20]."""
        h = self.drop(torch.relu(self.norms[0](self.first(x))))
        return self.last(h + self.drop(torch.relu(self.norms[1](self.second(h)))))


class TwoHeads(nn.Module):
    """Fed-RoD's network: a generic head, and a personal one without a say in the body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.generic, self.personal = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
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

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Of the personal logits."""
        return super().nll(outputs.chunk(2, -1)[1], y)

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Of the personal logits; the others have slope 0."""
        generic, personal = outputs.chunk(2, -1)
        losses, slope = super().nll_and_slope(personal.contiguous(), y)
        return losses, torch.cat([torch.zeros_like(generic), slope], -1)

    def predictive(self, outputs: Tensor) -> dict[str, Tensor]:
        """Of the personal logits."""
        return super().predictive(outputs.chunk(2, -1)[1])


def fed_rod(model: nn.Module, epochs: int) -> bf.Algorithm:
    """Fed-RoD (Chen and Chao, ICLR 2022) as a newcomer writes it."""

    def prior(algorithm: bf.Algorithm, given: Any, view: Any, batch: Any) -> Any:
        share = (F.one_hot(batch["y"], 10) * batch["weight"].unsqueeze(-1)).sum(0) + 1
        return view | {"prior": (share / share.sum()).log()}

    def balanced(
        features: Any, outputs: Tensor, losses: Any, batch: Any, given: Any, view: Any
    ) -> Tensor:
        logits = outputs.chunk(2, -1)[0] + view["prior"].unsqueeze(-2)
        nll = -logits.log_softmax(-1).gather(-1, batch["y"].unsqueeze(-1)).squeeze(-1)
        return (nll * batch["weight"]).sum(-1) / batch["weight"].sum(-1)

    parts = ("body", "generic", "personal")
    energy = bf.Energy(parts, parts, likelihood="mean", penalty=balanced)
    step = bf.Descend(energy, epochs=epochs, batch_size=BATCH, optimiser=HEAVY)
    blocks = {
        "body": bf.Block("body.*", pool=bf.pools.Mean()),
        "generic": bf.Block("generic.*", pool=bf.pools.Mean()),
        "personal": bf.Block("personal.*", pool=None, keep=True),
    }
    phases = (bf.Once(prior, data=True), step)
    return bf.Algorithm(model, blocks, phases, parts=parts, likelihood=Personal())


def bare_fed_rod(model: nn.Module, data: Data, epochs: int) -> Round:
    def train(net: nn.Module, x: Tensor, y: Tensor) -> None:
        share = F.one_hot(y, 10).sum(0) + 1.0
        prior = (share / share.sum()).log()

        def loss(x: Tensor, y: Tensor) -> Tensor:
            generic, personal = net(x).chunk(2, -1)
            return F.cross_entropy(generic + prior, y) + F.cross_entropy(personal, y)

        descend(net, loss, x, y, epochs)

    return bare(model, data, lambda net: [*net.body.parameters(), *net.generic.parameters()], train)


class Ours:
    """The same round by `simulate`, one call a round, with what it spent where."""

    def __init__(self, algorithm: bf.Algorithm, data: Data, engine: bf.Engine) -> None:
        self._given = algorithm, data()
        self._engine = engine
        self._result: Any = None

    def __call__(self) -> float:
        """One more round."""
        self._result = bf.simulate(
            *self._given,
            rounds=self._result.round + 1 if self._result else 1,
            resume=self._result,
            engine=self._engine,
            evaluate_every=None,
            progress=False,
            train="cohort",
            sampling="fixed",
        )
        return self._result.history[-1]["seconds"]

    def shares(self) -> dict[str, float]:
        """Medians over rounds but the first; `rest` is no step, batch or noise."""
        found: dict[str, list[float]] = {"batches": [], "noise": [], "rest": []}
        for row in self._result.history.rows[1:]:
            total = row["seconds"] * (self._engine.workers or 1)
            share = {part: row[f"seconds_{part}"] / total for part in ("steps", "batches", "noise")}
            share["rest"] = 1 - sum(share.values())
            for part, values in found.items():
                values.append(share[part])
        return {part: statistics.median(values) for part, values in found.items()}


class Watched(Ours):
    """The same, with every round looked at for stability, or none."""

    def __init__(self, always: bool, *given: Any) -> None:
        super().__init__(*given)
        self._always = always

    def __call__(self) -> float:
        """One more round."""
        with mock.patch.object(stability, "is_due", return_value=self._always):
            return super().__call__()


class Predicted(Ours):
    """The same, and after each round predictions for the test examples."""

    def __call__(self) -> float:
        """One more round, and its predictions."""
        return super().__call__() + timing.seconds(lambda: self._result.predict())


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    title: str
    unit: str  # the side that everything is measured in
    sides: dict[str, Make]  # each makes a round
    limits: dict[str, float]  # at most this ratio
    repetitions: int  # of all sides, after one that warms up
    # Whether the local work is gradient steps alone, so that the rest of a round has its limit.
    steps_alone: bool = True


ONE, TWO = bf.Engine(workers=1), bf.Engine(workers=2)


def beside_bare(title: str, bare: Make, method: bf.Algorithm, data: Data, *limits: Any) -> Row:
    """Our round in units of the loop; limits for two workers and for one, and repetitions."""
    at_most, repetitions = limits
    sides: dict[str, Make] = {
        "bare": bare,
        "bare, 2 threads": lambda: threaded(bare(), 2),
        "1 worker": partial(Ours, method, data, ONE),
        "2 workers": partial(Ours, method, data, TWO),
    }
    named = dict(zip(("2 workers", "1 worker"), at_most, strict=True))
    return Row(title, "bare", sides, named, repetitions)


def fedavg(title: str, model: nn.Module, data: Data, epochs: int, *limits: Any) -> Row:
    """A round of FedAvg in units of the loop; limits and repetitions as of `beside_bare`."""
    algorithm = bf.algorithms.fedavg(model, epochs=epochs, optimiser=HEAVY)
    return beside_bare(title, partial(bare_fedavg, model, data, epochs), algorithm, data, *limits)


def beside(
    title: str,
    mine: bf.Algorithm,
    unit: str,
    other: bf.Algorithm,
    data: Data,
    limit: float | None,
    repetitions: int = 21,
    *,
    ways: tuple[Any, Any] = (Ours, Ours),
    **options: bool,
) -> Row:
    """A round of ours in units of another of ours."""
    my_way, other_way = ways
    sides: dict[str, Make] = {
        unit: partial(other_way, other, data, ONE),
        "1 worker": partial(my_way, mine, data, ONE),
        f"{unit}, 2 workers": partial(other_way, other, data, TWO),
        "2 workers": partial(my_way, mine, data, TWO),
    }
    limits = {} if limit is None else {"1 worker": limit, "2 workers": limit}
    title = f"{title}, in units of our own {unit} round"
    return Row(title, unit, sides, limits, repetitions, **options)


def rows(quick: bool) -> dict[str, Row]:
    epochs = 2 if quick else 10
    ten = partial(federation, [250] * 10)
    hundred = partial(federation, [250] * (20 if quick else 100))
    sizes = np.random.default_rng(0).exponential(180, 40).clip(10, 500).astype(int).tolist()
    forty = partial(federation, sizes)
    images = partial(federation, [125] * (4 if quick else 20), (1, 28, 28))
    small = partial(federation, [40] * (20 if quick else 200), (20,), 2)
    photos = partial(federation, [20 if quick else 100] * 4, (3, 32, 32))
    tokens, rod = partial(federation, [50] * 4, (64, 256)), partial(federation, [100] * 20, (20,))
    twenty = partial(federation, [120 if quick else 600] * 20)
    splits = ("train", "validation", "test")
    predicting = partial(federation, [10] * 2 if quick else [50] * 4, splits=splits)
    mixture = cache(lambda: bf.data.linear_mixture(clients=60 if quick else 300, test=1))

    mlp = bf.models.mlp(784, hidden=100, outputs=10)
    lenet = bf.models.lenet((1, 28, 28), outputs=10)
    normed, dropping = copy.deepcopy(lenet), copy.deepcopy(lenet)
    first, second, rest = lenet.body[:1], lenet.body[1:4], lenet.body[4:]
    normed.body = nn.Sequential(*first, nn.BatchNorm2d(6), *second, nn.BatchNorm2d(16), *rest)
    dropping.body = nn.Sequential(
        *lenet.body[:9], nn.Dropout(0.3), *lenet.body[9:], nn.Dropout(0.3)
    )
    linear, residual, heads, encoder = nn.Linear(150, 1), ResidualMLP(), TwoHeads(), Encoder()
    resnet = torchvision().models.resnet18(num_classes=10)
    wide = bf.models.mlp(784, hidden=128, outputs=10)
    leaky = bf.models.leaky_cnn((1, 28, 28), outputs=10)

    plain = bf.algorithms.fedavg(mlp, epochs=epochs, optimiser=HEAVY)
    ditto = bf.algorithms.ditto(mlp, epochs=epochs, batch_size=BATCH, optimiser=HEAVY)
    both = {"head_epochs": epochs, "body_epochs": epochs}
    vem, held = bf.algorithms.pfedvem(mlp, **both), bf.algorithms.pfedvem_held(mlp, **both)
    curved = {"epochs": epochs, "optimiser": SGD(0.01), "selection": "random"}
    contrasts = bf.algorithms.fedsi(mlp, link="contrasts", **curved)
    by_class = bf.algorithms.fedsi(mlp, link="per_class", **curved)
    once = {"epochs": 1, "batch_size": 128, "likelihood": Bernoulli()}
    decaying = replace(HEAVY, weight_decay=5e-4)
    mean = bf.algorithms.fedavg(linear, optimiser=HEAVY, **once)
    em = bf.algorithms.fedem(linear, components=3, optimiser=decaying, **once)

    mixed = {"steps_alone": False}

    def fedpac(title: str, model: nn.Module, data: Data, *repetitions: int) -> Row:
        options = {"head_epochs": 1, "body_epochs": 1 if quick else 5, "batch_size": BATCH}
        pac, rep = (new(model, **options) for new in (bf.algorithms.fedpac, bf.algorithms.fedrep))
        return beside(title, pac, "FedRep", rep, data, 1.5, *repetitions, **mixed)

    watched, twice = (partial(Watched, True), partial(Watched, False)), (Predicted, Predicted)
    looked = "pFedVEM, stability check in every round"
    predicted = "FedSI at random weights, predicting by contrasts after every round"
    components = "FedEM, 3 linear components, 300 clients"
    residual_title = "Residual MLP 20-64-64-2, batch norm and dropout, 200 clients x 40"
    rod_title = "Fed-RoD as one writes it, MLP 20-64-10, 20 clients x 100"
    rod_loop = partial(bare_fed_rod, heads, rod, epochs)
    vem_loop = partial(bare_pfedvem, mlp, ten, epochs, 5)
    return {
        "mlp10": fedavg(
            "FedAvg, MLP 784-100-10, 10 clients x 250", mlp, ten, epochs, (0.45, 0.72), 31
        ),
        "mlp100": fedavg("the same, 100 clients", mlp, hundred, epochs, (0.40, 0.65), 5),
        "unequal": fedavg("40 clients of 10 to 500", mlp, forty, epochs, (0.45, 0.65), 11),
        "lenet": fedavg("LeNet 6-16-120-84, 20 clients x 125", lenet, images, 2, (0.55, 0.95), 15),
        "lenet_norm": fedavg("the same with batch norm", normed, images, 2, (0.7, 1.0), 15),
        "lenet_dropout": fedavg("the same with dropout", dropping, images, 2, (0.7, 1.0), 15),
        "residual": fedavg(residual_title, residual, small, epochs, (0.15, 0.25), 7),
        "fed_rod": beside_bare(rod_title, rod_loop, fed_rod(heads, epochs), rod, (1.2, 1.2), 15),
        "transformer": fedavg("Transformer, d = 256, 4 x 50", encoder, tokens, 5, (0.8, 1.0), 5),
        "resnet": fedavg("ResNet-18, batch norm, 4 x 100", resnet, photos, 5, (0.8, 1.05), 3),
        "resnet_short": fedavg("the same, one epoch", resnet, photos, 1, (0.8, 1.05), 5),
        "pfedvem": beside_bare("pFedVEM, 10 clients, 5 draws", vem_loop, vem, ten, (0.4, 0.6), 15),
        "pfedvem_held": beside("pFedVEM, fixed variances", held, "pFedVEM", vem, ten, 1.05),
        "pfedvem_watched": beside(looked, vem, "unwatched", vem, ten, None, ways=watched),
        "fedsi_contrasts": beside(
            predicted, contrasts, "class-wise", by_class, predicting, 1.05, 7, ways=twice, **mixed
        ),
        "ditto": beside("Ditto", ditto, "FedAvg", plain, ten, 2.3),
        "fedem": beside(components, em, "FedAvg", mean, mixture, 2.4, **mixed),
        "fedpac": fedpac("FedPAC, MLP 784-128-10, 20 clients x 600", wide, twenty),
        "fedpac_cnn": fedpac("FedPAC, its CNN, 20 clients x 125", leaky, images, 5),
    }


def threaded(one_round: Round, threads: int) -> Round:
    """The same on several of torch's own threads."""

    def run() -> float:
        torch.set_num_threads(threads)
        seconds = one_round()
        torch.set_num_threads(1)
        return seconds

    return run


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """A process that spins on one core."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def clocked(one_round: Round) -> tuple[float, float]:
    start = time.process_time()
    return one_round(), time.process_time() - start


def measure(row: Row, repetitions: int, *, busy: bool) -> dict[str, dict[str, float]]:
    """All sides in turn; a busy process stalls torch's own threads for seconds."""
    sides = {name: make() for name, make in row.sides.items() if not (busy and "threads" in name)}
    for side in sides.values():
        side()
    clocks = {name: partial(clocked, side) for name, side in sides.items()}
    turns = timing.in_turn(clocks, repetitions)
    wall = {name: [seconds for seconds, _ in found] for name, found in turns.items()}
    out = {}
    for name, side in sides.items():
        unit = f"{row.unit}, {name}" if f"{row.unit}, {name}" in wall else row.unit
        out[name] = {
            "seconds": statistics.median(wall[name]),
            "cpu_seconds": statistics.median(cpu for _, cpu in turns[name]),
            "ratio": timing.ratio(wall[name], wall[unit]),
            **(side.shares() if isinstance(side, Ours) else {}),
        }
        if name in row.limits:
            out[name]["at_most"] = row.limits[name]
            if not busy and row.steps_alone:
                out[name]["rest_at_most"] = REST[name]
    out["2 workers"]["to_one_worker"] = timing.ratio(wall["2 workers"], wall["1 worker"])
    return out


def memory(name: str, side: str, quick: bool) -> float:
    """MiB that one round of a side adds to this process, its data included."""
    make = rows(quick)[name].sides[side]
    return timing.added(lambda: make()())


def against(commit: str, names: list[str], quick: bool) -> dict[str, dict[str, float]]:
    """Our rounds here and in a checkout of `commit`: medians over pairs of processes."""
    here, found = str(script.ROOT), {}
    with tempfile.TemporaryDirectory() as there:
        subprocess.run(["git", "clone", "--quiet", here, there], check=True)
        subprocess.run(["git", "-C", there, "checkout", "--quiet", commit], check=True)
        for name, side in itertools.product(names, ("1 worker", "2 workers")):
            times: dict[str, list[float]] = {here: [], there: []}
            with contextlib.ExitStack() as stack:
                ask = {tree: stack.enter_context(rounds(tree, name, side, quick)) for tree in times}
                for turn in range(2 if quick else PAIRS):
                    for tree in (here, there) if turn % 2 else (there, here):
                        times[tree].append(ask[tree]())
            found[f"{name}, {side}"] = row = {
                "seconds": statistics.median(times[here]),
                "before": statistics.median(times[there]),
                "ratio": timing.ratio(times[here], times[there]),
                "at_most": SLOWER,
            }
            timing.show(f"{name}, {side}", row)
    return found


@contextlib.contextmanager
def rounds(tree: str, name: str, side: str, quick: bool) -> Iterator[Round]:
    """Enter a process that does rounds in a tree, one at a call, which returns its seconds."""
    command = [sys.executable, "-c", ROUNDS, tree, name, side, "quick" if quick else "whole"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tree, **pipes) as process:
        assert process.stdin is not None  # as these are pipes
        assert process.stdout is not None

        def one_round() -> float:
            print(file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("seconds"):
                    return float(line.split()[1])
            raise RuntimeError(f"no round of {name} was done in {tree}; its error is above")

        yield one_round
        process.stdin.close()


def main() -> None:
    names = list(rows(True))
    alone = "time our own rounds here and in a checkout of this commit, and nothing else"
    options: dict[str, Any] = {
        "rows": {"nargs": "+", "choices": names, "default": names},
        "no-neighbour": {"action": "store_true", "help": "leave out the busy neighbour"},
        "against": {"metavar": "COMMIT", "help": alone},
    }
    given = script.arguments(__doc__, **options)
    made = script.made()
    if given.against:
        for chosen in given.rows:
            found = against(given.against, [chosen], given.quick)
            if not given.quick:
                script.write_rows("against", {name: {**row, **made} for name, row in found.items()})
        return
    table = rows(given.quick)
    for name in given.rows:
        row = table[name]
        repetitions = 2 if given.quick else row.repetitions
        for busy in (False,) if given.no_neighbour or row.unit != "bare" else (False, True):
            with neighbour() if busy else contextlib.nullcontext():
                sides = measure(row, repetitions, busy=busy)
            title = row.title + (", busy neighbour" if busy else "")
            print(title)
            for side, figures in sides.items():
                if not busy:
                    figures["memory_mib"] = timing.alone(memory, name, side, given.quick)
                timing.show(side, figures)
            if not given.quick:
                found = {"title": title, "repetitions": repetitions, **made, "sides": sides}
                script.write_rows("engines", {f"{name}{'_busy' * busy}": found})


if __name__ == "__main__":
    main()
