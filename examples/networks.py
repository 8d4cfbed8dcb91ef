"""Any network in a federation: a ResNet with batch norms, a transformer, adapters on a frozen body,
a network of two inputs.

    python examples/networks.py --quick  # seconds, no files needed
    python examples/networks.py  # real data, minutes

Each network is trained by FedAvg, by FedBN where it has norms of its own, and by pFedVEM with
fixed variances, and some predict by a Laplace approximation, too:

- `resnet`: ResNet-18 as torchvision builds it, batch norms in training mode, on images stored as
  bytes. A transform makes floats of them whenever they are read, an augmentation shifts them in
  training. Clients have different cameras, one a negative, another a dark image. pFedVEM has its
  batch norms converted to group norms.
- `transformer`: the next character of a role of Shakespeare's, from the characters before it as
int64, with dropout.
- `adapters`: a network that was trained on pooled images is frozen, batch norm included; clients
  with cameras of their own train low-rank terms beside its layers, with dropout.
- `lora`: a vision transformer of Hugging Face's, trained on pooled images, is frozen in bfloat16;
  the same clients train adapters of peft's beside its queries and values.
- `two_inputs`: images with missing pixels, a mapping of floats and bools, {"values": ...,
"missing": ...}.

The quick size takes scikit-learn's digits, and for the transformer its pages on data sets. The
script prints a table for each part, and writes them into a folder.
"""

import copy
import importlib.resources
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.base.files import atomic_write
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.data import FederatedData
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.evaluation import report
from bayesfl.optim import SGD, Adam
from bayesfl.study.grid import Make
from bayesfl.study.table import Row

sys.path.append(str(Path(__file__).parent))  # wherever this file is run from
from command_line import arguments

COLUMNS = (
    report.Column("before_accuracy", title="before pooling", better="higher"),
    report.Column("accuracy", better="higher"),
    report.Column("nll", title="NLL (nats)", better="lower"),
    report.Column("pooled_ece", title="ECE, pooled", better="lower"),
    report.Column("seconds", digits=0),
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
    "lora": Size("mnist", clients=6, train=100, test=300, rounds=20),
    "two_inputs": Size("mnist", clients=8, train=200, test=300, rounds=40),
}
QUICK = {
    "resnet": Size("digits", clients=2, train=10, test=10, rounds=1),
    "transformer": Size("pages", clients=3, train=30, test=10, rounds=1),
    "adapters": Size("digits", clients=3, train=20, test=20, rounds=1),
    "lora": Size("digits", clients=3, train=20, test=20, rounds=1),
    "two_inputs": Size("digits", clients=3, train=20, test=20, rounds=1),
}


@dataclass(frozen=True)
class Part:
    """What a study has of a network, and other predictors for what methods have learnt: {title:
    (method, predictor)}, None for `result.laplace()`.
    """

    data: Callable[..., FederatedData]
    model: Callable[..., nn.Module]
    methods: dict[str, Make]
    laplace: Mapping[str, tuple[str, LinearisedLaplace | None]]


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


def resnet(size: Size, root: Path | None) -> Part:
    """ResNet-18 of torchvision's with batch norms, for pFedVEM with group norms; Laplace's
    approximation is over FedBN's own norms.
    """

    def data(seed: int) -> FederatedData:
        clients = by_camera(size, dealt(size, seed, root)[0], seed)
        clients = clients.transformed(lambda x: (x.float() / 255).expand(-1, 3, -1, -1))
        return clients.augmented(shifted)

    def model(clients: FederatedData) -> nn.Module:
        build = torchvision().models.resnet18
        return bf.models.split(build(weights=None, num_classes=clients.outputs), head="fc")

    steps = {"epochs": 1, "batch_size": 40, "optimiser": SGD(0.05, momentum=0.9)}
    adam = {"head_optimiser": Adam(1e-3), "body_optimiser": Adam(1e-3)}
    methods: dict[str, Make] = {
        "FedAvg": partial(bf.algorithms.fedavg, **steps),
        "FedBN": partial(bf.algorithms.fedbn, **steps),
        # Averages of statistics would leave a personal head with other features than it learned on.
        "pFedVEM, fixed variances, group norms": lambda model: bf.algorithms.pfedvem_held(
            bf.models.group_norm(model), body_epochs=1, batch_size=40, **adam
        ),
    }
    predictor = LinearisedLaplace(block="norms", structure="diagonal")
    return Part(data, model, methods, {"FedBN, Laplace over the norms": ("FedBN", predictor)})


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


def transformer(size: Size, root: Path | None) -> Part:
    """A transformer that reads characters; the norms that FedBN's clients keep are layer norms."""

    def model(clients: FederatedData, seed: int) -> nn.Module:
        shape = {"d": 32, "layers": 2, "heads": 4, "dropout": 0.1}
        return bf.models.transformer(clients.inputs, outputs=clients.outputs, **shape, seed=seed)

    steps = {"epochs": 1, "batch_size": 50, "optimiser": Adam(3e-3)}
    methods: dict[str, Make] = {
        "FedAvg": partial(bf.algorithms.fedavg, **steps),
        "FedBN": partial(bf.algorithms.fedbn, **steps),
        "pFedVEM, fixed variances": partial(
            bf.algorithms.pfedvem_held, body_epochs=1, batch_size=50, body_optimiser=Adam(3e-3)
        ),
    }
    return Part(lambda seed: texts(size, seed, root, length=32), model, methods, {})


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


def trained(network: nn.Module, x: Tensor, y: Tensor, *, steps: int) -> nn.Module:
    """A network after steps of Adam on pooled data."""
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,))
        optimiser.zero_grad()
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        optimiser.step()
    return network


def adapters(size: Size, root: Path | None) -> Part:
    """Adapters on a frozen body, averaged, or each client's own; batch norm is frozen by eval(),
    while dropout trains.
    """

    def data(seed: int) -> FederatedData:
        clients = by_camera(size, dealt(size, seed, root)[0], seed)
        return clients.transformed(lambda x: x.float().flatten(1) / 255)

    def model(clients: FederatedData, seed: int) -> nn.Module:
        _, (x, y) = dealt(size, seed, root)
        first = nn.Linear(x[0].numel(), 128)
        second = nn.Linear(128, 64)
        head = nn.Linear(64, clients.outputs)
        norm = nn.BatchNorm1d(128)
        whole = nn.Sequential(first, norm, nn.ReLU(), second, nn.ReLU(), head)
        trained(whole, x[:2000].float().flatten(1) / 255, y[:2000], steps=15 * size.rounds)
        norm.eval().requires_grad_(False)
        low = [Adapted(layer, 4, 0.1) for layer in (first, second)]
        body = nn.Sequential(low[0], norm, nn.ReLU(), low[1], nn.ReLU())
        return bf.models.SplitModel(body, head)

    steps, both = {"epochs": 5, "batch_size": 20, "optimiser": Adam(3e-3)}, ("lora", "head")
    own = bf.Descend(bf.Energy(both, both, likelihood="mean"), **steps)
    blocks = {"lora": bf.Block("body.*", pool=None, keep=True), "head": bf.Block("head.*")}
    adam = {"head_optimiser": Adam(3e-3), "body_optimiser": Adam(3e-3)}
    methods: dict[str, Make] = {
        "FedAvg": partial(bf.algorithms.fedavg, **steps),
        "Own adapters, one head": lambda model: bf.Algorithm(
            model, blocks, (own,), parts=both, adapt=(own,)
        ),
        "pFedVEM, fixed variances": partial(bf.algorithms.pfedvem_held, batch_size=20, **adam),
    }
    laplace = {
        "FedAvg, Laplace": ("FedAvg", LinearisedLaplace()),
        "Own adapters, Laplace": ("Own adapters, one head", LinearisedLaplace()),
    }
    return Part(data, model, methods, laplace)


def gaussian(model: nn.Module, **steps: Any) -> bf.Algorithm:
    """Each client's Gaussian belief about its adapters, under a prior around the mean of all."""
    prior = bf.priors.Normal(
        centre=bf.priors.server_mean("lora"),
        variance=lambda given, view: torch.full_like(view["n"], 0.01)[..., None],
    )
    belief = bf.posteriors.MeanField(init_scale=0.01)
    blocks = {
        "lora": bf.Block("*lora_*", posterior=belief, prior=prior, keep=True),
        "head": bf.Block("!*lora_*"),
    }
    both = ("lora", "head")
    step = bf.Descend(bf.Energy(both, both, likelihood="sum"), **steps)
    return bf.Algorithm(model, blocks, (step,), parts=both, adapt=(step,), draws=20)


def frozen_a(model: nn.Module) -> nn.Module:
    """The model with every A frozen at its start."""
    made = copy.deepcopy(model)
    for name, p in made.named_parameters():
        p.requires_grad_(p.requires_grad and "lora_A" not in name)
    return made


def lora(size: Size, root: Path | None) -> Part:
    """A frozen vision transformer in half precision; A and B shared, one of them, or neither."""

    def data(seed: int) -> FederatedData:
        clients = by_camera(size, dealt(size, seed, root)[0], seed)
        return clients.transformed(lambda x: x.float() / 255)

    def model(clients: FederatedData, seed: int) -> nn.Module:
        torchvision()  # peft and transformers import it
        from peft import LoraConfig, get_peft_model
        from transformers import ViTConfig, ViTForImageClassification

        torch.manual_seed(seed)
        _, (x, y) = dealt(size, seed, root)
        side, shape = x.shape[-1], {"hidden_size": 32, "intermediate_size": 64}
        vit = ViTForImageClassification(
            ViTConfig(
                image_size=side,
                patch_size=side // 4,
                num_channels=1,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_labels=clients.outputs,
                **shape,
            )
        )
        trained(
            bf.models.logits(vit),
            x[:10000].float() / 255,
            y[:10000],
            steps=size.train * size.rounds,
        )
        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]
        )
        return bf.models.logits(get_peft_model(vit.bfloat16(), config).eval())

    adam, passes = {"batch_size": 20, "optimiser": Adam(3e-3)}, {"epochs": 5}
    methods: dict[str, Make] = {
        "Shared A and B": partial(bf.algorithms.fedavg, **adam, **passes),
        "Shared B, frozen A (FFA-LoRA)": lambda model: bf.algorithms.fedavg(
            frozen_a(model), **adam, **passes
        ),
        "Shared A, own B (FedSA-LoRA)": partial(bf.algorithms.fedsa_lora, **adam, steps=20),
        "Own A and B": partial(bf.algorithms.local, **adam, **passes),
        "Gaussian A and B": partial(gaussian, **adam, **passes, draws=2),
    }
    laplace = {
        "Shared A and B, Laplace of the last layer": ("Shared A and B", None),
        "FedSA-LoRA, Laplace over B": ("Shared A, own B (FedSA-LoRA)", LinearisedLaplace("B")),
    }
    return Part(data, model, methods, laplace)


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


def two_inputs(size: Size, root: Path | None) -> Part:
    """Clients who miss more pixels or fewer, from none to three quarters."""

    def data(seed: int) -> FederatedData:
        rng, n = torch.Generator().manual_seed(seed), size.train
        train, test = ([], []), ([], [])
        for j, (x, y) in enumerate(dealt(size, seed, root)[0]):
            values = x.flatten(1).float() / 255
            missing = torch.rand(values.shape, generator=rng) < 0.75 * j / max(1, size.clients - 1)
            for (xs, ys), rows in ((train, slice(n)), (test, slice(n, None))):
                xs.append({"values": values[rows], "missing": missing[rows]})
                ys.append(y[rows])
        return bf.data.from_arrays(*train, test=test, validation=0.2, outputs=10, seed=seed)

    def model(clients: FederatedData) -> nn.Module:
        inputs = clients.train.client(0)[0]["values"].shape[1]
        return bf.models.SplitModel(WithMissing(inputs, 64), nn.Linear(64, clients.outputs))

    steps, heavy = {"epochs": 2, "batch_size": 20}, SGD(0.05, momentum=0.9)
    methods: dict[str, Make] = {
        "FedAvg": partial(bf.algorithms.fedavg, optimiser=heavy, **steps),
        "FedBN": partial(bf.algorithms.fedbn, optimiser=SGD(0.05), **steps),
        "pFedVEM, fixed variances": partial(
            bf.algorithms.pfedvem_held, body_epochs=2, batch_size=20, body_optimiser=heavy
        ),
    }
    laplace = {"FedBN, Laplace over the norms": ("FedBN", LinearisedLaplace(block="norms"))}
    return Part(data, model, methods, laplace)


PARTS = {
    "resnet": resnet,
    "transformer": transformer,
    "adapters": adapters,
    "lora": lora,
    "two_inputs": two_inputs,
}
SHOWN = {name: f"personal_{name}" for name in ("accuracy", "nll", "pooled_ece")}


def measured(
    name: str, size: Size, seeds: list[int], *, root: Path | None, folder: Path, jobs: int
) -> Iterator[tuple[str, Row, dict[str, float]]]:
    """Each method of a part, its runs, and what was measured on the clients' test data."""
    part = PARTS[name](size, root)
    study = bf.Study(
        data=part.data,
        model=part.model,
        methods=part.methods,
        seeds=seeds,
        rounds=size.rounds,
        evaluate_every=size.rounds,
        engine=bf.Engine(workers=1),
    )
    table = study.run(folder, n_jobs=jobs, keep="result")
    for run in table.rows:
        last = run.measures("last", None)
        columns = {**SHOWN, "before_accuracy": "before_pool_accuracy"}
        row = {key: last[column] for key, column in columns.items() if column in last}
        yield run.method, run, {**row, "seconds": run.record.seconds}
    for title, (method, predictor) in part.laplace.items():
        for run in (run for run in table.rows if run.method == method):
            result = table.result(method, run.seed)
            if predictor is None:
                result, own = result.laplace(), {}
            else:
                result = replace(result, algorithm=replace(result.algorithm, predictor=predictor))
                own = {"log10_precision": torch.tensor(result.tuned).log10().item()}
            found: dict[str, Any] = result.predict().summary(result.data.test)
            yield title, run, {key: found[key] for key in SHOWN} | own


def main(argv: list[str] | None = None) -> None:
    """Run the parts with every seed, print the tables and write them."""
    options = arguments(
        __doc__,
        argv,
        parts=(list(PARTS), "networks to train"),
        quick=False,
        seeds=[0],
        jobs=1,
        data_root=None,
        out=Path("runs/networks"),
    )
    text = []
    for part in options.parts:
        size = (QUICK if options.quick else SIZES)[part]
        where = {"root": options.data_root, "folder": options.out / "runs", "jobs": options.jobs}
        rows: dict[str, dict[str, list[float]]] = {}
        for title, _, row in measured(part, size, options.seeds, **where):
            for key, value in row.items():
                rows.setdefault(title, {}).setdefault(key, []).append(value)
        text.append(f"{part}, {size}\n{report.table(rows, columns=COLUMNS)}")
        print(f"{text[-1]}\n", flush=True)
        atomic_write(options.out / "tables.txt", "\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
