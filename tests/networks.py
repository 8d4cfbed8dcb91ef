"""One table of networks that reach their weights in unusual ways."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from bayesfl.models import SplitModel
from bayesfl.models.starts import seeded

RNG = torch.Generator().manual_seed(0)
X = torch.randn(24, 6, generator=RNG).double()  # as data hold it
Y = torch.arange(24) % 3
KINDS: dict[str, type[nn.Module]] = {}


def listed(kind: type[nn.Module]) -> type[nn.Module]:
    """Enter a network into the table."""
    KINDS[kind.__name__] = kind
    return kind


class Base(nn.Module):
    """Two layers; `begin` changes what a network reaches, and `hidden` how it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
        self.begin()

    def begin(self) -> None:
        """Hold something else, too."""

    def hidden(self, x: Tensor) -> Tensor:
        """Compute the hidden layer."""
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.hidden(x).tanh())


@listed
class InAList(Base):
    def begin(self):
        self.held = [self.a.weight, {"bias": (self.a.bias,)}]

    def hidden(self, x):
        return F.linear(x, self.held[0], self.held[1]["bias"][0])


@listed
class ByItsName(Base):
    def hidden(self, x):
        return F.linear(x, self.get_parameter("a.weight"), self.a.bias)


class Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


@listed
class InAnObject(Base):
    def begin(self):
        self.held = Holder(self.a)

    def hidden(self, x):
        return self.held.layer(x)


@listed
class InALambda(Base):
    def begin(self):
        self.f = lambda x: self.a(x)

    def hidden(self, x):
        return self.f(x)


@listed
class InADefault(Base):
    def begin(self):
        self.f = lambda x, layer=self.a, *, scale=self.a.bias: layer(x) * scale

    def hidden(self, x):
        return self.f(x)


@listed
class InAPartial(Base):
    def begin(self):
        self.f = partial(F.linear, weight=self.a.weight, bias=self.a.bias)
        self.g = partial(lambda layer, x: layer(x), self.a)

    def hidden(self, x):
        return self.f(x) + self.g(x)


@listed
class InAMethod(Base):
    def begin(self):
        self.f = self.a.forward

    def hidden(self, x):
        return self.f(x)


@listed
class InADecorator(Base):
    def begin(self):
        def doubled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            @wraps(function)
            def inner(x: Tensor) -> Tensor:
                return 2 * function(x)

            return inner

        self.f = {"f": [doubled(lambda x: self.a(x))]}

    def hidden(self, x):
        return self.f["f"][0](x)


@listed
class InARecursion(Base):
    def begin(self):
        def f(x: Tensor, n: int) -> Tensor:
            return g(x, n - 1) if n else self.a(x)

        def g(x: Tensor, n: int) -> Tensor:
            return 2 * f(x, n)

        self.f = f

    def hidden(self, x):
        return self.f(x, 2)


@listed
class InItsOwnForward(Base):
    def begin(self):
        plain = self.a.forward
        self.a.forward = lambda x: plain(x) + self.o.weight.sum()


@listed
class InHooks(Base):
    def begin(self):
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(6))
        self.a.register_forward_hook(lambda m, x, out: out * self.scale)
        self.a.register_forward_pre_hook(lambda m, x: x[0] + self.shift)


@listed
class InABackwardHook(Base):
    def begin(self):
        self.a.register_full_backward_hook(lambda m, to, of: tuple(2 * t for t in to))

    def hidden(self, x):
        return self.a(x + self.a.bias[:6])


@listed
class InAGradientsHook(Base):
    def hidden(self, x):
        out = self.a(x)
        if out.requires_grad:
            out.register_hook(lambda slope: slope * self.o.weight[0])
        return out


@listed
class SharedLayer(Base):
    def begin(self):
        self.b = nn.Linear(8, 8)
        self.f = nn.Sequential(self.b, nn.Tanh(), self.b)

    def hidden(self, x):
        return self.f(self.a(x)) + self.b(x @ x.new_ones(6, 8))


@listed
class SharedRecurrent(Base):
    def begin(self):
        del self.a
        layer = nn.Linear(6, 6)
        self.f, self.r = nn.Sequential(layer, nn.Tanh(), layer), nn.GRU(6, 8, batch_first=True)

    def hidden(self, x):
        return self.r(self.f(x)[:, None])[0][:, 0]


@listed
class RecurrentInAList(Base):
    def begin(self):
        self.r = nn.GRU(8, 8, batch_first=True)
        self.held = [self.r]

    def hidden(self, x):
        return self.held[0](self.a(x)[:, None])[0][:, 0]


@listed
class OneLayerThrice(Base):
    def begin(self):
        self.layers = nn.ModuleList([nn.Linear(8, 8)] * 3)

    def hidden(self, x):
        x = self.a(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@listed
class TiedWeights(Base):
    def begin(self):
        self.b = nn.Linear(6, 8)
        self.b.weight = self.a.weight
        self.ties = nn.ParameterList([self.a.bias])

    def hidden(self, x):
        return self.b(x) * self.a(x) + self.ties[0]


@listed
class CheckpointOfInputs(Base):
    def hidden(self, x):
        return checkpoint(self.a, x.detach().requires_grad_(), use_reentrant=True)


@listed
class KeepsResults(Base):
    def hidden(self, x):
        self.kept = self.a(x)
        return self.kept


@listed
class Pruned(Base):
    def begin(self):
        prune.random_unstructured(self.a, "weight", 0.3)


@listed
class OlderNorm(Base):
    def begin(self):
        self.a = nn.utils.weight_norm(self.a)


class Product(torch.autograd.Function):
    """A product whose way back reads the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g @ ctx.layer.weight, g.T @ x, None


@listed
class BackwardReadsTheLayer(Base):
    def begin(self):
        self.b = nn.Linear(8, 8, bias=False)

    def hidden(self, x):
        return Product.apply(self.a(x), self.b.weight, self.b)


class Shifted(torch.autograd.Function):
    """The same of the newer kind, with a context of its own."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, net: nn.Module) -> Tensor:
        return x @ w.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x, _, ctx.net = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.net.b.weight, g.T @ ctx.x, None


@listed
class BackwardReadsTheNetwork(BackwardReadsTheLayer):
    def hidden(self, x):
        return Shifted.apply(self.a(x), self.b.weight, self)


@listed
class Checkpoint(Base):
    def hidden(self, x):
        return checkpoint(self.a, x, use_reentrant=False)


@listed
class ReentrantCheckpoint(BackwardReadsTheLayer):
    def hidden(self, x):
        return checkpoint(self.b, self.a(x), use_reentrant=True)


@listed
class ReentrantHead(Base):
    def forward(self, x):
        return checkpoint(self.o, self.a(x).tanh(), use_reentrant=True)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.r, self.o = kind(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, h = x.unflatten(1, (3, 2)), None
        if isinstance(self.r, nn.RNNBase):
            return self.o(self.r(x.transpose(0, 1))[0][-1])
        for t in range(3):
            h = self.r(x[:, t], h)
        return self.o(h[0] if isinstance(h, tuple) else h)


for cell in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
    KINDS[cell.__name__] = partial(Recurrent, cell)  # pyright: ignore[reportArgumentType] (a function that makes one)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[name]()


class Residual(nn.Module):
    """Two convolutions with group norms, added to their input."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.steps = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(2, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(2, after),
        )
        self.shortcut = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.GroupNorm(2, after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.steps(x) + self.shortcut(x))


@seeded
def residual(channels: int, *, outputs: int, width: int = 4, seed: int = 0) -> SplitModel:
    """ResNet-18 for small images [B, channels, H, W], with group norms."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.GroupNorm(2, width),
        nn.ReLU(),
    ]
    before = width
    for after in (width, 2 * width, 4 * width, 8 * width):
        layers += [Residual(before, after, after // before), Residual(after, after, 1)]
        before = after
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return SplitModel(body, nn.Linear(before, outputs))
