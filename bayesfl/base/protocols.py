"""The types that the parts agree on.

Index convention, everywhere in code and documentation: `J` clients, `C` cohort or chunk of clients, `N` examples, `B` batch,
`S` posterior draws, `D` parameters of a block, `O` outputs.

What a part says for one client holds for many: tensors carry any leading axes, written [...].
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Tensors: TypeAlias = dict[str, Tensor]
"""One belief about a block, {"loc": [..., D], "rho": [..., D]}."""


Server: TypeAlias = dict[str, Any]
"""The federation's state: nests of tensors only, so that it can be stored and sent."""


View: TypeAlias = dict[str, Any]
"""What one client sees: the common blocks, its private rows, what was addressed to it, and "n", its number of examples."""


Uplink: TypeAlias = dict[str, Any]
"""What clients send: their pooled blocks, what the algorithm reports, "n", and "ids", which the server adds."""


Batch: TypeAlias = Tensors
"""x [..., B, *], y [..., B], weight [..., B] (0 marks padding), index [..., B] into the client's own rows; where the data have
environments, environment [..., B, E], 1 for the one that an example is from."""


Carry: TypeAlias = Any


Info: TypeAlias = dict[str, Tensor]
"""What people read and the mathematics never does."""


Weight: TypeAlias = Callable[[Server, Uplink], Tensor]
"""Weights of the clients of an uplink, [C], not normalised."""


RESERVED = ("n", "ids", "round", "rounds")
"""Names of what every view or uplink holds beside what a method names."""


@runtime_checkable
class Posterior(Protocol):
    """A belief q(w) about a block's weights; every tensor [..., D]."""

    def init(self, loc: Tensor) -> Tensors:
        """The belief a client starts from, centred at `loc` [..., D]; may alias it."""
        ...

    def noise_size(self, size: int) -> int:
        """Standard normals that one draw of `size` weights takes; 0 where there is nothing to draw."""
        ...

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        """One reparameterised draw [..., D] from `noise` [..., noise_size]; the mean where there is none."""
        ...

    def moments(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Mean and variance of each weight, [..., D] each."""
        ...

    def entropy(self, q: Tensors) -> Tensor:
        """Differential entropy [...] in nats; 0 by convention for a point."""
        ...


@runtime_checkable
class Prior(Protocol):
    """What ties a client's belief to the federation, p(w_j | w)."""

    def energy(self, loc: Tensor, var: Tensor, given: Server, view: View) -> Tensor:
        """Expected negative log prior [...] in nats, every constant kept, for moments `loc` and `var` [..., D]."""
        ...


@runtime_checkable
class GaussianPrior(Prior, Protocol):
    """A prior whose centre and variance are constant during a phase, so that a kernel adds (loc - centre) / variance in place."""

    def centre(self, given: Server, view: View) -> Tensor:
        """Broadcasts against [..., D]."""
        ...

    def variance(self, given: Server, view: View) -> Tensor:
        """Broadcasts against [..., D]; one scale per client comes as [..., 1]."""
        ...


@runtime_checkable
class AdditivePool(Protocol):
    """A sum over clients, then a closed form; the sum streams, fits a tree of servers and works under secure aggregation."""

    @property
    def sends(self) -> tuple[str, ...]:
        """Which of the posterior's tensors travel."""
        ...

    def accumulate(self, total: Tensors | None, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Adds a chunk of clients [C, ...] to `total`, in place, in float64, one client after another."""
        ...

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """The server's new entry for block `name`, in its own precision."""
        ...


@runtime_checkable
class StackedPool(Protocol):
    """A rule that needs every client at once, such as a median."""

    @property
    def sends(self) -> tuple[str, ...]:
        """Which of the posterior's tensors travel."""
        ...

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """The server's new entry for block `name` from all clients' uplinks, [C, ...]."""
        ...


class Likelihood(Protocol):
    """p(y | outputs of the network), for one example."""

    @property
    def task(self) -> str:
        """`classification` or `regression`: which measures apply."""
        ...

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log likelihood [..., B] in nats, of `outputs` [..., B, O] at `y` [..., B] (or [..., B, O])."""
        ...

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The same [..., B], and its derivative by `outputs` [..., B, O]."""
        ...

    def predictive(self, outputs: Tensor) -> Tensors:
        """The predictive distribution averaged over draws `outputs` [..., S, N, O], its epistemic part kept apart."""
        ...


class Fitted(Protocol):
    """One client's predictor, ready to be used."""

    def __call__(self, x: Tensor, *, value: float | None = None, noise: Tensor | None = None, plain: bool = False) -> Tensors:
        """What is predicted at `x` [N, *]: what `Likelihood.predictive` gives, without its draws' axis.

        Args:
            x: Inputs.
            value: Of the number that is tuned, if the predictor has one.
            noise: Standard normals [S, N, O] for draws of the outputs; without them the closed form.
            plain: At the mean of what is uncertain, which then counts as certain.
        """
        ...


class Predictor(Protocol):
    """How a client predicts where draws of its blocks don't say it: from its training data, or from several models together."""

    @property
    def tunes(self) -> str:
        """Name of a number that all clients share, chosen by the likelihood of all their validation data; empty where there is none."""
        ...

    @property
    def grid(self) -> tuple[float, ...]:
        """Its candidates, ascending; where there is one only, nothing is chosen."""
        ...

    def check(self, algorithm: Any) -> None:
        """Raises ValueError where the predictor does not fit the algorithm."""
        ...

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> Fitted:
        """One client's predictor, from what it received, its view (fine-tuned where the method does that), and its training data x, y."""
        ...
