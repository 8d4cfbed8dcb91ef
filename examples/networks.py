"""Any network in a federation: a ResNet with batch norms, a transformer, adapters on a frozen body,
a network of two inputs.

    python examples/networks.py --smoke  # seconds, no files needed
    python examples/networks.py --data-root DIR  # real data, minutes

Each network is trained by FedAvg, by FedBN where it has norms of its own, and by pFedVEM with
scales held, and some predict by a Laplace approximation, too:

- `resnet`: ResNet-18 as torchvision builds it, batch norms in training mode, on images stored as
  bytes. A transform makes floats of them whenever they are read, an augmentation shifts them in
  training. Clients have different cameras, one a negative, another a dark image. pFedVEM has its
  batch norms converted to group norms.
- `transformer`: the next character of a role of Shakespeare's, from the characters before it as
int64, with dropout.
- `adapters`: a network that was trained on pooled images is frozen, batch norm included; clients
  with cameras of their own train low-rank terms beside its layers, with dropout.
- `two_inputs`: images with missing pixels, a mapping of floats and bools, {"values": ...,
"missing": ...}.

The smoke size takes scikit-learn's digits, and for the transformer its pages on data sets. The
script prints a table for each part, and writes them into a run folder.
"""

import argparse
import importlib.resources
import string
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.files import atomic_write
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.data import FederatedData
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.evaluation import report
from bayesfl.federation.run.result import Result
from bayesfl.optim import SGD, Adam

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import one_experiment, refuse_repeats

EXPERIMENT = ("parts", "seeds", "smoke")
COLUMNS = (
    report.Column("before_accuracy", title="before pooling", better="higher"),
    report.Column("accuracy", better="higher"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("pooled_ece", title="ECE, pooled", better="lower"),
    report.Column("seconds", title="CPU seconds", digits=0),
)
CAMERAS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: 255 - x,  # a negative
    lambda x: 0.3 * x,  # dark
    lambda x: 255 - 0.3 * x,  # the negative of that
    lambda x: 100 + 0.2 * x,  # faint
    lambda x: 155 - 0.2 * x,
)


@dataclass(frozen=True)
class Size:
    """How much a part takes: a data set, clients, each one's examples, and rounds."""

    dataset: str
    clients: int
    train: int
    test: int
    rounds: int


SIZES = {
    "resnet": Size("fashion-mnist", clients=6, train=150, test=150, rounds=30),
    "transformer": Size("shakespeare", clients=10, train=400, test=100, rounds=15),
    "adapters": Size("mnist", clients=6, train=100, test=300, rounds=20),
    "two_inputs": Size("mnist", clients=8, train=200, test=300, rounds=40),
}
SMOKE = {
    "resnet": Size("digits", clients=3, train=20, test=20, rounds=2),
    "transformer": Size("pages", clients=4, train=60, test=20, rounds=2),
    "adapters": Size("digits", clients=4, train=40, test=40, rounds=2),
    "two_inputs": Size("digits", clients=4, train=40, test=40, rounds=2),
}


@dataclass(frozen=True)
class Part:
    """A federation, the methods to train, and other predictors for what they have learnt: {title:
    (method's title, predictor)}.
    """

    clients: FederatedData
    methods: dict[str, bf.Algorithm]
    laplace: dict[str, tuple[str, LinearisedLaplace]]


def pixels(dataset: str, root: Path | None) -> tuple[Tensor, Tensor]:
    """Images [N, 1, height, width] as bytes, and labels [N]."""
    source = bf.data.load(dataset, root=root)
    x = source.x - source.x.min()
    x = (255 * x / x.max()).round().to(torch.uint8)
    return x.view(len(x), 1, 8, 8) if dataset == "digits" else x, source.y


def dealt(
    size: Size, seed: int, root: Path | None
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """The images and labels of each client, in the order of a draw, and those of nobody."""
    x, y = pixels(size.dataset, root)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    each = size.train + size.test
    rows = order[: size.clients * each].split(each)
    rest = order[size.clients * each :]
    return [(x[own], y[own]) for own in rows], (x[rest], y[rest])


def by_camera(size: Size, parts: list[tuple[Tensor, Tensor]], seed: int) -> FederatedData:
    """Clients whose images, as bytes, were taken by different cameras."""
    xs = [
        CAMERAS[j % len(CAMERAS)](x.float()).round().to(torch.uint8)
        for j, (x, _) in enumerate(parts)
    ]
    n, ys = size.train, [y for _, y in parts]
    test = [x[n:] for x in xs], [y[n:] for y in ys]
    return bf.data.from_arrays(
        [x[:n] for x in xs], [y[:n] for y in ys], test=test, validation=0.2, outputs=10, seed=seed
    )


def shifted(x: Tensor) -> Tensor:
    """Images [B, C, H, W], each shifted by up to two pixels."""
    places = torch.randint(0, 5, (len(x), 2)).tolist()
    padded = F.pad(x, (2, 2, 2, 2), mode="replicate")
    return torch.stack(
        [
            image[:, i : i + x.shape[2], j : j + x.shape[3]]
            for image, (i, j) in zip(padded, places, strict=True)
        ]
    )


def resnet(size: Size, seed: int, root: Path | None) -> Part:
    """ResNet-18 of torchvision's with batch norms, for pFedVEM with group norms; Laplace's
    approximation is over FedBN's own norms.
    """
    clients = by_camera(size, dealt(size, seed, root)[0], seed)
    clients = clients.transformed(lambda x: (x.float() / 255).expand(-1, 3, -1, -1)).augmented(
        shifted
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = torchvision().models.resnet18(weights=None, num_classes=clients.outputs)
    model = bf.models.split(network, head="fc")
    # Averages of statistics would leave a personal head with other features than it learned on.
    converted = bf.models.group_norm(model)
    steps = {"epochs": 1, "batch_size": 40, "optimiser": SGD(0.05, momentum=0.9)}
    methods = {
        "FedAvg": bf.algorithms.fedavg(model, **steps),
        "FedBN": bf.algorithms.fedbn(model, **steps),
        "pFedVEM, scales held, group norms": bf.algorithms.pfedvem_held(
            converted,
            body_epochs=1,
            batch_size=40,
            head_optimiser=Adam(1e-3),
            body_optimiser=Adam(1e-3),
        ),
    }
    return Part(
        clients,
        methods,
        {
            "FedBN, Laplace over the norms": (
                "FedBN",
                LinearisedLaplace(block="norms", structure="diagonal"),
            )
        },
    )


def pages() -> list[str]:
    """Texts that are there without a download: scikit-learn's pages on data sets."""
    files = importlib.resources.files("sklearn.datasets.descr").iterdir()
    return [
        file.read_text(encoding="utf-8")
        for file in sorted(files, key=lambda file: file.name)
        if file.name.endswith(".rst")
    ]


def texts(size: Size, seed: int, root: Path | None, length: int) -> FederatedData:
    """The largest roles, and the character after each `length` characters of theirs: the first
    examples for training, the last to test.
    """
    if size.dataset == "pages":
        number = {c: i for i, c in enumerate(string.printable)}
        said = [torch.tensor([number[c] for c in text if c in number]) for text in pages()]
        chunks = [text.unfold(0, length + 1, 3) for text in said]
        pairs = [
            (chunk[:, :-1], chunk[:, -1]) for chunk in sorted(chunks, key=len)[-size.clients :]
        ]
    else:
        roles = bf.data.shakespeare(min_size=size.train + size.test, root=root)
        largest = sorted(range(roles.clients), key=lambda j: -roles.train.counts[j])[: size.clients]
        both = [(roles.train.client(j), roles.test.client(j)) for j in largest]
        pairs = [tuple(torch.cat(parts) for parts in zip(*split, strict=True)) for split in both]
        pairs = [(x[:, -length:], y) for x, y in pairs]
    n, m = size.train, size.test
    train = ([x[:n] for x, _ in pairs], [y[:n] for _, y in pairs])
    test = ([x[-m:] for x, _ in pairs], [y[-m:] for _, y in pairs])
    return bf.data.from_arrays(*train, test=test, outputs=len(string.printable), seed=seed)


def transformer(size: Size, seed: int, root: Path | None) -> Part:
    """A transformer that reads characters; the norms that FedBN's clients keep are layer norms."""
    clients = texts(size, seed, root, length=32)
    model = bf.models.transformer(
        clients.inputs, outputs=clients.outputs, d=32, layers=2, heads=4, dropout=0.1, seed=seed
    )
    steps = {"epochs": 1, "batch_size": 50, "optimiser": Adam(3e-3)}
    methods = {
        "FedAvg": bf.algorithms.fedavg(model, **steps),
        "FedBN": bf.algorithms.fedbn(model, **steps),
        "pFedVEM, scales held": bf.algorithms.pfedvem_held(
            model, body_epochs=1, batch_size=50, body_optimiser=Adam(3e-3)
        ),
    }
    return Part(clients, methods, {})


class Adapted(nn.Module):
    """A frozen linear layer and a term of low rank beside it, which begins at zero, on inputs of
    which some are dropped in training.
    """

    def __init__(self, layer: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = layer.requires_grad_(False), nn.Dropout(dropout)
        self.lora_A = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Compute [B, O] of [B, I]."""
        return self.layer(x) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T


def trained(network: nn.Module, x: Tensor, y: Tensor, *, steps: int = 300) -> nn.Module:
    """A network after steps of Adam on pooled data."""
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,))
        optimiser.zero_grad()
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        optimiser.step()
    return network


def adapters(size: Size, seed: int, root: Path | None) -> Part:
    """Adapters on a frozen body, averaged, or each client's own; batch norm is frozen by eval(),
    while dropout trains.
    """
    parts, (x, y) = dealt(size, seed, root)
    clients = by_camera(size, parts, seed).transformed(lambda x: x.float().flatten(1) / 255)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = nn.Linear(x[0].numel(), 128)
        second = nn.Linear(128, 64)
        head = nn.Linear(64, clients.outputs)
        norm = nn.BatchNorm1d(128)
        trained(
            nn.Sequential(first, norm, nn.ReLU(), second, nn.ReLU(), head),
            x[:2000].float().flatten(1) / 255,
            y[:2000],
        )
        norm.eval().requires_grad_(False)
        body = nn.Sequential(
            Adapted(first, 4, 0.1), norm, nn.ReLU(), Adapted(second, 4, 0.1), nn.ReLU()
        )
    model = bf.models.SplitModel(body, head)
    steps, both = {"epochs": 5, "batch_size": 20, "optimiser": Adam(3e-3)}, ("lora", "head")
    own = bf.Descend(bf.Energy(both, both, likelihood="mean"), **steps)
    blocks = {"lora": bf.Block("body.*", pool=None, keep=True), "head": bf.Block("head.*")}
    methods = {
        "FedAvg": bf.algorithms.fedavg(model, **steps),
        "Own adapters, one head": bf.Algorithm(model, blocks, (own,), parts=both, adapt=(own,)),
        "pFedVEM, scales held": bf.algorithms.pfedvem_held(
            model, batch_size=20, head_optimiser=Adam(3e-3), body_optimiser=Adam(3e-3)
        ),
    }
    laplace = {
        "FedAvg, Laplace": ("FedAvg", LinearisedLaplace()),
        "Own adapters, Laplace": ("Own adapters, one head", LinearisedLaplace()),
    }
    return Part(clients, methods, laplace)


class WithMissing(nn.Module):
    """Features [B, hidden] of values [B, D] of which some are missing, [B, D] bool."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2 * inputs, hidden)
        self.rest = nn.Sequential(nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, values: Tensor, missing: Tensor) -> Tensor:
        """Compute features [B, hidden]."""
        return self.rest(
            self.layer(torch.cat([values.masked_fill(missing, 0), missing.to(values)], 1))
        )


def two_inputs(size: Size, seed: int, root: Path | None) -> Part:
    """Clients who miss more pixels or fewer, from none to three quarters."""
    parts, _ = dealt(size, seed, root)
    rng = torch.Generator().manual_seed(seed)
    xs, ys = [], [y for _, y in parts]
    for j, (x, _) in enumerate(parts):
        values = x.flatten(1).float() / 255
        missing = torch.rand(values.shape, generator=rng) < 0.75 * j / max(1, size.clients - 1)
        xs.append({"values": values, "missing": missing})
    n = size.train
    train, test = (
        [{name: t[rows] for name, t in x.items()} for x in xs]
        for rows in (slice(n), slice(n, None))
    )
    clients = bf.data.from_arrays(
        train,
        [y[:n] for y in ys],
        test=(test, [y[n:] for y in ys]),
        validation=0.2,
        outputs=10,
        seed=seed,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = bf.models.SplitModel(
            WithMissing(xs[0]["values"].shape[1], 64), nn.Linear(64, clients.outputs)
        )
    steps = {"epochs": 2, "batch_size": 20}
    methods = {
        "FedAvg": bf.algorithms.fedavg(model, optimiser=SGD(0.05, momentum=0.9), **steps),
        "FedBN": bf.algorithms.fedbn(model, optimiser=SGD(0.05), **steps),
        "pFedVEM, scales held": bf.algorithms.pfedvem_held(
            model, body_epochs=2, batch_size=20, body_optimiser=SGD(0.05, momentum=0.9)
        ),
    }
    return Part(
        clients,
        methods,
        {"FedBN, Laplace over the norms": ("FedBN", LinearisedLaplace(block="norms"))},
    )


BEFORE = "before_pool_accuracy"
PARTS = {
    "resnet": resnet,
    "transformer": transformer,
    "adapters": adapters,
    "two_inputs": two_inputs,
}


def run(
    name: str, size: Size, seed: int, root: Path | None = None, workers: int | None = None
) -> dict[str, dict[str, float]]:
    """{method: what was measured on the clients' test data}, of one part under one seed."""
    part = PARTS[name](size, seed, root)
    found, results = {}, {}
    for title, algorithm in part.methods.items():
        start = time.process_time()
        options = {
            "rounds": size.rounds,
            "evaluate_every": size.rounds,
            "seed": seed,
            "engine": bf.Engine(workers=workers),
        }
        results[title] = bf.simulate(algorithm, part.clients, progress=False, **options)
        found[title] = measured(results[title], part.clients) | {
            "seconds": time.process_time() - start
        }
        row = results[title].history.rows[-1]
        found[title] |= {"before_accuracy": row[BEFORE]} if BEFORE in row else {}
    for title, (method, predictor) in part.laplace.items():
        reading = replace(
            results[method], algorithm=replace(part.methods[method], predictor=predictor)
        )
        found[title] = measured(reading, part.clients) | {
            "log10_precision": torch.tensor(reading.tuned).log10().item()
        }
    return found


def measured(result: Result, clients: FederatedData) -> dict[str, float]:
    """Means over clients on their test data."""
    summary = result.predict().summary(clients.test)
    return {name: summary[name] for name in ("accuracy", "nll", "pooled_ece")}


def compare(options: argparse.Namespace) -> None:
    """Runs the parts with every seed, prints the tables and writes them.

    Raises:
        ValueError: Arguments that don't work out.
        OSError: The data are not there.
        DivergenceError: Training left the finite numbers.
    """
    refuse_repeats({name: getattr(options, name) for name in ("parts", "seeds")})
    one_experiment(options.out, {name: getattr(options, name) for name in EXPERIMENT})
    sizes = SMOKE if options.smoke else SIZES
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    text = []
    for part in options.parts:
        rows: dict[str, dict[str, list[float]]] = tables.setdefault(part, {})
        for seed in options.seeds:
            for title, row in run(
                part, sizes[part], seed, options.data_root, options.workers
            ).items():
                for key, value in row.items():
                    rows.setdefault(title, {}).setdefault(key, []).append(value)
        text.append(f"{part}, {sizes[part]}\n{report.table(rows, columns=COLUMNS)}")
        print(f"{text[-1]}\n", flush=True)
        record = {
            "arguments": vars(options),
            "sizes": sizes,
            "environment": report.environment(),
            "tables": tables,
        }
        report.write_json(options.out / "table.json", record)
    atomic_write(options.out / "tables.txt", "\n\n".join(text) + "\n")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0, or 1 where training diverged, or 2 where the arguments don't work out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=list(PARTS),
        help="networks to train (default: all)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a few rounds on data that need no file: shows that it runs",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="seeds, one run for each (default: 0)"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        help="threads that run clients (default: the number of cores)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/networks"),
        help="folder of the tables (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        compare(options)
    except (bf.DivergenceError, ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, bf.DivergenceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
