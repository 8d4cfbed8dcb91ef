"""Networks as users have them, by the layers kernel against the module itself, client by client and
draw by draw: outputs, slopes and running statistics, for clients of unequal numbers of rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.inputs import Inputs, each
from bayesfl.engine import layers, live
from bayesfl.engine.network import Rows
from bayesfl.models.modes import in_training
from bayesfl.optim import SGD
from tests.cases import federation, numbers, run

COUNTS = (7, 4, 1)
DRAWS = 4
KEYS = (11, 12, 13)


class Residual(nn.Module):
    """Two blocks with batch norm and dropout, the second beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.other, self.drop = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(h + self.drop(F.relu(self.other(self.second(h)), inplace=True)))


class Block(nn.Module):
    """A convolutional residual block in torchvision's manner, which adds in place."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.short = nn.Conv2d(2, 4, 1)
        self.norms = nn.ModuleList([norm(4), norm(4)])
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout2d(0.2)
        self.pool, self.last = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norms[1](self.two(self.drop(self.act(self.norms[0](self.one(x))))))
        out += self.short(x)
        return self.last(torch.flatten(self.pool(self.act(out)), 1))


class TwoInputs(nn.Module):
    """Values beside a mask, by a branch each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.act = nn.Linear(8, 4), nn.Linear(8, 2), nn.PReLU(4)
        self.last, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        left = self.act(self.left(values))
        right = F.silu(self.right(mask.to(values.dtype)))
        return self.scale * self.last(torch.cat([left, right], dim=1))


class Words(nn.Module):
    """An embedding with places, the mean over a text, a layer norm, dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4, padding_idx=0), nn.LayerNorm(4)
        self.places, self.last = nn.Parameter(0.1 * torch.ones(5, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x) + self.places).mean(1)
        return self.last(F.dropout(F.gelu(h), 0.4, self.training))


class Attention(nn.Module):
    """Attention of two heads by hand, after which the mean decides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(4, 12), nn.Linear(4, 4), nn.LayerNorm(4)
        self.last, self.drop = nn.Linear(4, 3), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        apart = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2)
        q, k, v = apart.permute(2, 0, 3, 1, 4)
        weights = self.drop((q @ k.transpose(-1, -2) / 2**0.5).softmax(-1))
        heads = (weights @ v).transpose(1, 2).reshape(rows, length, width)
        return self.last((x + self.out(heads)).mean(dim=1))


class Gated(nn.Module):
    """A gate, a branch that is held by `detach`, one without gradients, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 3)
        self.tied = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * torch.sigmoid(self.gate(x))
        with torch.no_grad():
            still = 1 - h.square()
        h = self.tied(F.leaky_relu(self.tied(h) - h.detach()))
        return self.last(F.elu(1 - h) + 0.5 * still)


class Reader(nn.Module):
    """A recurrent network, which no rule runs."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.read(x)[0][:, -1])


class Signal(nn.Module):
    """Convolutions along one axis, with channels left out and pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.SiLU(),
            nn.Dropout1d(0.3),
            nn.AvgPool1d(2),
            nn.Conv1d(4, 3, 2),
            nn.Flatten(),
            nn.LeakyReLU(0.2),
        )
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


TOKENS = (numbers(3, 7, 5, seed=3).abs() * 3).long().clamp(max=6)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "residual": (Residual, numbers(3, 7, 8, seed=3)),
    "convolutions and batch norm": (lambda: Block(nn.BatchNorm2d), numbers(3, 7, 2, 5, 5, seed=3)),
    "convolutions and group norm": (
        lambda: Block(lambda width: nn.GroupNorm(2, width)),
        numbers(3, 7, 2, 5, 5, seed=3),
    ),
    "norms without weights": (
        lambda: Block(lambda width: nn.BatchNorm2d(width, affine=False)),
        numbers(3, 7, 2, 5, 5, seed=3),
    ),
    "two inputs": (TwoInputs, (numbers(3, 7, 8, seed=3), numbers(3, 7, 8, seed=5) > 0)),
    "inputs by name": (
        TwoInputs,
        {"mask": numbers(3, 7, 8, seed=5) > 0, "values": numbers(3, 7, 8, seed=3)},
    ),
    "words": (Words, TOKENS),
    "attention": (Attention, numbers(3, 7, 5, 4, seed=3)),
    "gates": (Gated, numbers(3, 7, 8, seed=3)),
    "signal": (Signal, numbers(3, 7, 2, 6, seed=3)),
    "recurrent": (Reader, numbers(3, 7, 5, 4, seed=3)),
}
RULED = [name for name in NETWORKS if name != "recurrent"]


def seeded(made: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return made()


def of(module: nn.Module, drawn: Callable[[str], bool]) -> dict[str, Tensor]:
    """Leaves of three clients, some with draws, and their statistics."""
    tensors = dict(module.named_parameters())
    leaves = {
        name: p.detach() + 0.3 * numbers(3, *(DRAWS,) * drawn(name), *p.shape, seed=k)
        for k, (name, p) in enumerate(tensors.items())
    }
    return leaves | {
        name: t.expand(3, *t.shape).clone() + (0.1 if t.is_floating_point() else 0)
        for name, t in module.named_buffers()
        if t.is_floating_point()
    }


def both(module: nn.Module, x: Inputs, leaves: dict[str, Tensor]) -> tuple[list[Any], list[Any]]:
    """Outputs, slopes and statistics by the rules and by the module itself."""
    like = next(iter(leaves.values()))
    weight = (torch.arange(max(COUNTS)) < torch.tensor(COUNTS)[:, None]).to(like)
    wanted = [name for name, _ in module.named_parameters()]
    one = {name: leaf.clone() for name, leaf in leaves.items()}
    to = {name: torch.full_like(one[name], torch.nan) for name in wanted}
    passed = layers.kernel(module)(one, to, x, False, False, Rows(weight, KEYS, 5))
    up = (3, *(DRAWS,) * passed.lifted)
    slope = numbers(*passed.outputs.shape, seed=9).to(like)
    slope = slope * weight.view(3, *[1] * passed.lifted, -1, 1)
    assert passed.outputs.shape[: len(up)] == up
    assert passed.back is not None
    passed.back(slope)
    found, expected = [], []
    for c, n in enumerate(COUNTS):
        own = {name: leaf[c : c + 1].clone() for name, leaf in leaves.items()}
        into = {name: torch.full_like(own[name], torch.nan) for name in wanted}
        given = each(lambda t, c=c, n=n: t[c : c + 1, :n], x)
        alone = live.kernel(module)(own, into, given, False, False, Rows(None, KEYS[c : c + 1], 5))
        assert alone.back is not None
        alone.back(slope[c : c + 1, ..., :n, :])
        expected += [alone.outputs[0], *(into[name][0] for name in wanted)]
        expected += [own[name][0] for name in own if name not in into]
        found += [passed.outputs[c, ..., :n, :], *(to[name][c] for name in wanted)]
        found += [one[name][c] for name in one if name not in to]
    return found, expected


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("which", ["none", "all", "weights", "last"])
@pytest.mark.parametrize("name", RULED)
def test_rules_compute_what_the_module_does(name: str, which: str, train: bool):
    """Each client by its own rows alone: with no weights drawn, all, all but biases, or those of
    the last layer; with one row, of which torch's norms take no statistics.
    """
    made, x = NETWORKS[name]
    module = seeded(made).double()
    module = in_training(module) if train else module.eval()
    drawn = {
        "none": lambda name: False,
        "all": lambda name: True,
        "weights": lambda name: name.endswith("weight"),
        "last": lambda name: name.startswith("last"),
    }[which]
    found, expected = both(module.requires_grad_(False), x, of(module, drawn))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULED)
def test_single_precision(name: str):
    """To ten roundings of the largest number: a bias before a batch norm has a slope of 0."""
    made, x = NETWORKS[name]
    module = in_training(seeded(made)).requires_grad_(False)
    leaves = {key: leaf.float() for key, leaf in of(module, lambda name: False).items()}
    x = each(lambda t: t.float() if t.is_floating_point() else t, x)
    found, expected = both(module, x, leaves)
    size = max(float(t.abs().max()) for t in expected)
    assert_close(found, expected, rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("name", NETWORKS)
def test_methods_train_them(name: str):
    """FedAvg of clients with unequal rows by every kernel, with the same bits for any number of
    workers, and to rounding for any chunk; `auto` takes the rules where there are rules.
    """
    made, x = NETWORKS[name]
    data = federation(sizes=(12, 9, 31, 1))
    rows = len(data.train.y)
    flat = each(lambda t: t.flatten(0, 1).repeat(4, *[1] * (t.dim() - 2))[:rows], x)
    splits = {key: replace(split, x=flat) for key, split in data.splits.items()}
    data = replace(data, splits=splits, inputs=splits["train"].inputs)
    method = bf.algorithms.fedavg(seeded(made), epochs=2, batch_size=5, optimiser=SGD(0.1, 0.9))
    wanted = run(method, data, 2, engine=bf.Engine("live", workers=1))

    def near(other: Any, tolerance: float) -> None:
        assert_close(other.server, wanted.server, rtol=0, atol=tolerance)
        assert_close(
            other.predict().probs, wanted.predict().probs, rtol=0, atol=tolerance, equal_nan=True
        )

    one, *others = (run(method, data, 2, engine=bf.Engine(workers=w)) for w in (1, 2, 3))
    near(one, 1e-12)
    for other in others:
        assert_close(other.server, one.server, rtol=0, atol=0)
    for chunk in (1, 3, 4):
        near(run(method, data, 2, engine=bf.Engine(chunk=chunk)), 1e-12)
    module = method.module(torch.zeros(1).double(), train=True)
    assert layers.supported(module, each(lambda t: t[:4], flat)) == (name in RULED)


class Counting(nn.Module):
    """A network whose steps depend on what it is given."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.last, self.norm, self.own = nn.Linear(4, 3), nn.BatchNorm1d(3), forward
        self.zeros = nn.Linear(3, 3)
        nn.init.zeros_(self.zeros.weight)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))  # next to which all is small

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


class Doubled(torch.autograd.Function):
    """A function whose gradients torch does not show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return 3 * slopes[0]


NOT_RECORDED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "the examples decide": (
        lambda m, x: m.last(x if bool(x.sum() > 0) else -x),
        "reads the numbers",
    ),
    "their number decides": (
        lambda m, x: m.last(x).tanh() if len(x) > 2 else m.last(x),
        "other steps|other numbers",
    ),
    "one row decides": (
        lambda m, x: m.norm(m.last(x)) if len(x) > 1 else m.last(x),
        "a batch of one example",
    ),
    "their number is a factor": (lambda m, x: m.last(x) / len(x) ** 0.5, "number of rows|numbers"),
    "their number decides late": (
        lambda m, x: torch.cat([m.norm(part) for part in m.last(x).split(16)]),
        "cannot be run for several",
    ),
    "their number is a shift": (
        lambda m, x: m.last(x).roll(len(x) + 1, 1),
        "computes with the number of rows",
    ),
    "rows are mixed": (lambda m, x: m.last(x) - m.last(x).mean(0), "something other"),
    "numbers are drawn": (lambda m, x: m.last(x) + torch.randn(3, dtype=x.dtype), "draws numbers"),
    "one number is drawn": (lambda m, x: m.last(x) * (torch.rand(()) < 0.9), "draws numbers"),
    "limits of the precision": (
        lambda m, x: m.last(x).clamp(min=torch.finfo(x.dtype).tiny),
        "limits of its precision",
    ),
    "gradients of its own before zeros": (
        lambda m, x: m.zeros(Doubled.apply(m.last(x))),
        "something other",
    ),
    "a draw without a rule": (
        lambda m, x: F.alpha_dropout(m.last(x), 0.5, True),
        "draws|has no rule",
    ),
    "a function of its own": (lambda m, x: Doubled.apply(m.last(x)), "something other"),
    "a view that is written": (
        lambda m, x: (lambda h: (h[:, 0].add_(1), h)[1])(m.last(x)),
        "something other",
    ),
    "a tuple": (lambda m, x: (m.last(x),), "no result"),
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_what_is_not_recorded(name: str):
    """Whatever a recording could get wrong is run as it is."""
    forward, words = NOT_RECORDED[name]
    module = in_training(seeded(lambda: Counting(forward)).double()).requires_grad_(False)
    x = numbers(20, 4, seed=2)
    assert not layers.supported(module, x)
    run, leaves = layers.kernel(module), {name: p[None] for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match=rf"layers kernel .*Counting, which .*({words})"):
        run(leaves, {}, x[None], False, False)


def test_a_recording_is_of_one_shape():
    """A size that is read is another for other inputs, and so is the recording."""
    module = nn.Sequential(nn.Conv2d(1, 2, 1), Whole(), nn.Flatten()).double()
    module.requires_grad_(False)
    for size in (4, 6):
        x = numbers(2, 3, 1, size, size, seed=size)
        leaves = {name: p.expand(2, *p.shape) for name, p in module.named_parameters()}
        found = layers.kernel(module)(leaves, {}, x, False, False).outputs
        assert_close(found[1], module(x[1]), rtol=0, atol=1e-12)


class Whole(nn.Module):
    """The mean over an image, by a pooling of its size."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, x.shape[-1])


def test_an_embedding_gives_no_client_the_rows_of_another():
    """A number beyond the table, or below 0, is an error as in torch."""
    table = nn.Embedding(3, 2).requires_grad_(False)
    leaves = {"weight": table.weight.expand(2, 3, 2).clone()}
    passage = layers.kernel(table)
    passage(leaves, {}, torch.tensor([[0, 2], [1, 2]]), False, False)
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="out of range"):
            passage(leaves, {}, torch.tensor([[0, wrong], [1, 2]]), False, False)


def test_a_recording_is_made_once_for_all_copies():
    """Threads share it, and so do precisions; a module of another mode has its own."""
    method = bf.algorithms.fedavg(seeded(Residual))
    x = torch.rand(4, 8)
    single, double = (
        method.module(torch.zeros(1, dtype=d), train=True) for d in (torch.float32, torch.float64)
    )
    assert layers._plan(single, x) is layers._plan(double, x.double())
    assert layers._plan(method.module(torch.zeros(1)), x) is not layers._plan(single, x)
    rows = [layers._plan(single, x, n).rows for n in (4, 30, 12)]
    assert rows == [8, 30, 30]
