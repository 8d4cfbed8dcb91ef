"""Stacks of layers, leaves and slopes for them, and the slow way through a module."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.base.protocols import Server, View
from bayesfl.data import ClientData
from bayesfl.engine import layers, live, vmap
from bayesfl.engine.plan import PhasePlan
from bayesfl.models import SplitModel
from tests.cases import numbers
from tests.networks import residual

KERNELS = {"layers": layers.kernel, "live": live.kernel, "vmap": vmap.kernel}


kernels = pytest.mark.parametrize("kernel", KERNELS)


C, S, B = 3, 2, 5  # clients, draws, examples
TANH = nn.Tanh()
STACKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 3), (4,)),
    "linear without bias": (nn.Linear(4, 3, bias=False), (4,)),
    "two linears": (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), (4,)),
    "nested": (
        nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Tanh())), nn.Linear(6, 3)),
        (4,),
    ),
    "flatten": (nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), (2, 2, 2)),
    "convolution": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 7, 6)),
    "convolution with groups": (
        nn.Conv2d(4, 6, (3, 2), dilation=(1, 2), padding=(0, 1), groups=2, bias=False),
        (4, 6, 5),
    ),
    "convolution of one channel": (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 3)),
        (1, 4, 4),
    ),
    "two convolutions": (
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 2)
        ),
        (1, 6, 6),
    ),
    "max pooling of pairs": (
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)
        ),
        (1, 6, 6),
    ),
    "max pooling of pairs, odd sizes": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d((2, 2), 2), nn.Conv2d(3, 2, 1)),
        (1, 7, 9),
    ),
    "max pooling": (
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(27, 2)
        ),
        (1, 6, 6),
    ),
    "overlapping pooling after a ReLU": (
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(3, 2, 1)
        ),
        (1, 7, 7),
    ),
    "max pooling with all options": (
        nn.Sequential(
            nn.Conv2d(1, 3, 2),
            nn.MaxPool2d((3, 2), stride=(2, 1), padding=1, dilation=(1, 2), ceil_mode=True),
        ),
        (1, 7, 7),
    ),
    "average pooling": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        (1, 6, 6),
    ),
    "adaptive pooling": (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)),
        (1, 6, 6),
    ),
    "linear over further axes": (
        nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 2)),
        (2, 4),
    ),
    "one activation used twice": (
        nn.Sequential(nn.Linear(4, 6), TANH, nn.Linear(6, 3), TANH),
        (4,),
    ),
    "body and head": (SplitModel(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)), (4,)),
    **{
        type(act).__name__: (
            nn.Sequential(act, nn.Linear(4, 6), act.__class__(), nn.Linear(6, 3)),
            (4,),
        )
        for act in (
            nn.ReLU(),
            nn.Tanh(),
            nn.GELU(),
            nn.SiLU(),
            nn.Sigmoid(),
            nn.ELU(),
            nn.LeakyReLU(),
            nn.Identity(),
        )
    },
}
for stack, _ in STACKS.values():
    stack.double().requires_grad_(False)


def chunk(algorithm: bf.Algorithm, data: ClientData) -> tuple[Server, View, PhasePlan]:
    """What all clients are given in the first round, their views of it, and the plan of the first
    phase, in float64.
    """
    count = len(data.counts)
    server = algorithm.init(count, dtype=torch.float64)
    rows = tree_map(lambda t: t.expand(count, *t.shape).clone(), algorithm.rows(server))
    given = algorithm.given(server, 0, 1)
    views = algorithm.views(given, {}, rows, torch.from_numpy(data.counts).double())
    plan = PhasePlan(algorithm.phases[0], data, np.arange(count), dtype=torch.float64)
    return given, views, plan


class Reader(nn.Module):
    """Reads sequences [B, T, F]; the last state decides. No rule knows it, and torch.func cannot
    batch it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, 2]."""
        return self.head(self.reader(x)[0][:, -1])


WITHOUT_RULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "lstm": (Reader().double(), (5, 3)),
    "residual": (residual(2, outputs=3).double(), (2, 8, 8)),
    "same padding": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Flatten()).double(),
        (2, 4, 4),
    ),
    "circular padding": (
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten()
        ).double(),
        (2, 4, 4),
    ),
}


def owners(module: nn.Module) -> list[str]:
    """Prefixes of the layers that have parameters."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in module.named_parameters()))


def of_layers(module: nn.Module, prefixes: list[str] | tuple[str, ...]) -> frozenset[str]:
    """The parameters of some layers."""
    return frozenset(
        name for name, _ in module.named_parameters() if name.rpartition(".")[0] in prefixes
    )


def parameters(
    module: nn.Module, drawn: frozenset[str] = frozenset(), covered: frozenset[str] | None = None
) -> dict[str, Tensor]:
    """Leaves as an engine has them: views of vectors [C, D], or [C, S, D] of the drawn ones; only
    the covered ones.
    """
    layout = Layout(copy.deepcopy(module).requires_grad_(), "*")
    fixed = layout.leaves(0.6 * numbers(C, layout.size, seed=1))
    moving = layout.leaves(0.6 * numbers(C, S, layout.size, seed=2))
    return {
        name: moving[name] if name in drawn else fixed[name]
        for name in layout.names
        if covered is None or name in covered
    }


def inputs(shape: tuple[int, ...], lifted: bool) -> Tensor:
    """Examples of every client, and of every draw where lifted."""
    return numbers(C, S, B, *shape, seed=3) if lifted else numbers(C, B, *shape, seed=3)


def slopes_at(outputs: Tensor) -> Tensor:
    """A slope at the outputs that does not lie as they do."""
    return numbers(*outputs.shape[::-1], seed=4).permute(*reversed(range(outputs.dim())))


def slow(
    module: nn.Module, leaves: dict[str, Tensor], x: Tensor, lifted: bool
) -> tuple[Tensor, bool, dict[str, Tensor]]:
    """The module itself, one client and one draw at a time: outputs, whether lifted, slopes of
    every leaf and, as "", of x.
    """
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    x = x.clone().requires_grad_()
    own = dict(module.named_parameters())
    drawn = {name for name, leaf in leaves.items() if leaf.dim() == own[name].dim() + 2}
    up = lifted or bool(drawn)
    rows = []
    for c in range(C):
        draws = [
            functional_call(
                copy.deepcopy(module),  # torch leaves a layer in two places without its parameters
                {k: v[c, s] if k in drawn else v[c] for k, v in leaves.items()},
                (x[c, s] if lifted else x[c],),
            )
            for s in range(S if up else 1)
        ]
        rows.append(torch.stack(draws) if up else draws[0])
    outputs = torch.stack(rows)
    found = torch.autograd.grad(
        outputs, [*leaves.values(), x], slopes_at(outputs), allow_unused=True
    )
    return outputs.detach(), up, dict(zip([*leaves, ""], found, strict=True))
