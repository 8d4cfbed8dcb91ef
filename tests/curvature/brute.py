"""The definitions, spelt out: Jacobians by jacrev, matrices of full size. In float64, for networks
of a hundred weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

from bayesfl.base.protocols import Likelihood
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from bayesfl.models import SplitModel


class Residual(nn.Module):
    """x + tanh(Wx), then a head; no stack."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inner, self.squash, self.head = nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.squash(self.inner(x)))


def mlp(outputs: int) -> nn.Module:
    body = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.ReLU())
    return SplitModel(body, nn.Linear(5, outputs))


def cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 10, 2, padding=1, bias=False),
        nn.SiLU(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(40, outputs),
    ).eval()


def along(outputs: int) -> nn.Module:
    """A linear layer applied at three places."""
    return nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Flatten(), nn.Linear(6, outputs)
    )


def plain_cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, outputs)
    )


class Joining(nn.Module):
    """A network of two inputs, which it joins for a network of one."""

    def __init__(self, one: nn.Module) -> None:
        super().__init__()
        self.one = one

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(torch.cat([a, b.flatten(1)], -1))


def two_inputs(count: int = 9) -> tuple[nn.Module, nn.Module, Tensor, Tensor, Tensor]:
    """A network of one input, the same network of two, their one input [N, 7], and its parts [N, 3]
    and [N, 2, 2].
    """
    torch.manual_seed(0)
    one = mlp(4).double()
    x = torch.randn(count, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return one, Joining(one), x, x[:, :3], x[:, 3:].unflatten(1, (2, 2))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def token_model(count: int = 9) -> tuple[nn.Module, Tensor]:
    """A network of tokens, and tokens [N, 5] int64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 3), Mean(), nn.Tanh(), nn.Linear(3, 4)).double()
    return model, torch.randint(11, (count, 5), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Case:
    name: str
    make: object
    shape: tuple[int, ...]
    backends: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def model(self, outputs: int = 4) -> nn.Module:
        torch.manual_seed(0)
        return self.make(outputs).double()  # type: ignore[operator]

    def data(self, count: int, seed: int = 1) -> Tensor:
        x = torch.randn(
            count, *self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        # Some inputs are zero.
        x[:, 0] *= torch.arange(count).view(-1, *(1,) * (x.dim() - 2)) % 3 > 0
        return x


CASES = (
    Case("mlp", mlp, (7,), ("layers", "func", "backpack")),
    Case("cnn", cnn, (2, 8, 8), ("layers", "func")),
    Case("plain_cnn", plain_cnn, (2, 8, 8), ("layers", "func", "backpack")),
    Case("along", along, (3, 4), ("layers", "func")),
    Case("residual", Residual, (5,), ("func", "backpack")),
)
PAIRS = [(case, backend) for case in CASES for backend in case.backends]
LIKELIHOODS = (Categorical(), Gaussian(0.5), Bernoulli(), Poisson())


def outputs_of(likelihood: Likelihood) -> int:
    return 1 if isinstance(likelihood, Bernoulli) else 4


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """[N, O, D], in the order of named_parameters()."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(jacrev(lambda p, x: functional_call(model, p, (x[None],))[0]), in_dims=(None, 0))(
        parameters, x
    )
    return torch.cat([found[name].flatten(2) for name in parameters], -1)


def output_hessian(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Lambda [N, O, O] by differentiating the negative log likelihood twice; it does not depend on
    the label.
    """

    def nll(f: Tensor) -> Tensor:
        if isinstance(likelihood, Categorical):
            return f.logsumexp(-1) - f[0]
        if isinstance(likelihood, Bernoulli):
            return F.softplus(f[0]) - f[0]
        if isinstance(likelihood, Poisson):
            return (f.exp() - f).sum()
        assert isinstance(likelihood, Gaussian)
        return 0.5 * (f / likelihood.scale).square().sum()

    return vmap(hessian(nll))(outputs.detach())


def ggn(model: nn.Module, likelihood: Likelihood, x: Tensor) -> Tensor:
    """[D, D]."""
    j = jacobian(model, x)
    return torch.einsum("nos,nop,npt->st", j, output_hessian(likelihood, model(x)), j)
