"""The types and interfaces shared by all parts of the package.

Index letters in code and documentation: `J` clients, `C` clients of a cohort or chunk, `N`
examples, `B` batch, `S` posterior draws, `D` parameters of a block, `P` selected weights of a
subnetwork, `M` copies of a block, `O` outputs. As a subscript, as in H_S, `S` is the set of the
selected weights.

Terms: a "view" is one client's current state of the blocks in a phase; "given" is what every client
received this round; a "block" is a set of parameters treated alike; a "cohort" is the set of
clients whose work is gathered in a round; a "chunk" is a set of clients computed together.

Functions for one client also accept many: tensors may have any leading axes, written [...].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from bayesfl.base.inputs import Inputs
from bayesfl.base.options import Range
from bayesfl.base.targets import Targets

Tensors: TypeAlias = dict[str, Tensor]
"""One posterior of a block, such as {"loc": [..., D], "rho": [..., D]}."""


Server: TypeAlias = dict[str, Any]
"""The federation's state on the server: nested mappings of tensors only, so that it can be stored
and sent.
"""


View: TypeAlias = dict[str, Any]
"""One client's state: the common blocks, its private rows, the entries that the server addressed to
it, and "n", its number of examples.
"""


Uplink: TypeAlias = dict[str, Any]
"""Entries that clients send: their pooled blocks, the algorithm's reports, "n", and "ids", which
the server adds.
"""


Batch: TypeAlias = dict[str, Any]
"""Examples: inputs x [..., B, *], a tensor or a tree of them; y [..., B]; weight [..., B], 0 for
padding; index [..., B] into the client's own rows; where the data have environments, environment
[..., B, E], one-hot."""


Carry: TypeAlias = Any


Info: TypeAlias = dict[str, Tensor]
"""Diagnostics for people, which no computation uses."""


Weight: TypeAlias = Callable[[Server, Uplink], Tensor]
"""Function (server, uplink) -> weights of the clients of an uplink, [C], not normalised; [C, M] for
the copies of a block.
"""


@dataclass(frozen=True)
class Reported:
    """Hold an initial value for an algorithm's `reports` and the range of the numbers that clients
    send. A client that sends numbers outside the range is left out of the round, or stops the run
    with an error that names it.

    Args:
        start: The initial value.
        range: The range of every number.
    """

    start: Any
    range: Range


RESERVED = ("n", "ids", "round", "rounds", "clients")
"""Names of entries that every view or uplink has in addition to the method's own."""


@runtime_checkable
class Posterior(Protocol):
    """Define the interface of a posterior q(w) of a block's weights; every tensor is [..., D]."""

    def init(self, loc: Tensor) -> Tensors:
        """Return a client's initial posterior, centred at `loc` [..., D]; may alias it."""
        ...

    def noise_size(self, size: int) -> int:
        """Return the number of standard normals for one draw of `size` weights; 0 if the posterior
        is a point.
        """
        ...

    def sample(self, q: Tensors, noise: Tensor | None = None) -> Tensor:
        """Return one reparameterised draw [..., D] from `noise` [..., noise_size]; the mean if
        `noise` is None.
        """
        ...

    def moments(self, q: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each weight, [..., D] each."""
        ...

    def entropy(self, q: Tensors) -> Tensor:
        """Return the differential entropy [...] in nats; 0 by convention for a point."""
        ...


@runtime_checkable
class Prior(Protocol):
    """Define the interface of a prior p(w_j | w), which couples a posterior to the federation."""

    def energy(self, loc: Tensor, var: Tensor, given: Server, view: View) -> Tensor:
        """Return the expected negative log prior [...] in nats, with all constants, for moments
        `loc` and `var` [..., D].
        """
        ...


@runtime_checkable
class AdditivePool(Protocol):
    """Define the interface of a pool that computes a sum over clients and then a closed form.

    The sum can be streamed, computed by a tree of servers, or under secure aggregation.
    """

    @property
    def sends(self) -> tuple[str, ...]:
        """Return the names of the posterior's tensors that are sent."""
        ...

    def accumulate(
        self, total: Tensors | None, server: Server, name: str, uplink: Uplink
    ) -> Tensors:
        """Add a chunk of clients [C, ...] to `total`, in place, in float64, one client after
        another.
        """
        ...

    def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
        """Return the server's new entry for block `name`, in its own precision."""
        ...


@runtime_checkable
class StackedPool(Protocol):
    """Define the interface of a pool that needs every client at once, such as a median."""

    @property
    def sends(self) -> tuple[str, ...]:
        """Return the names of the posterior's tensors that are sent."""
        ...

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Return the server's new entry for block `name` from all clients' uplinks, [C, ...]."""
        ...


@runtime_checkable
class Likelihood(Protocol):
    """Define the interface of a likelihood p(y | outputs of the network), for one example."""

    @property
    def task(self) -> str:
        """Return `classification` or `regression`, which selects the measures."""
        ...

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return the shape of a network's outputs for one example, as (O,).

        Raises:
            ValueError: The likelihood does not accept these targets.
        """
        ...

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log likelihood [..., B] in nats, of `outputs` [..., B, O] at `y`
        [..., B] (or [..., B, O]).
        """
        ...

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return `nll` [..., B] and its derivative with respect to `outputs`, [..., B, O]."""
        ...

    def predictive(self, outputs: Tensor) -> Tensors:
        """Return the predictive distribution averaged over draws `outputs` [..., S, N, O], with the
        epistemic part as a separate entry.
        """
        ...


class FittedPredictor(Protocol):
    """Define the interface of one client's fitted predictor."""

    def __call__(
        self,
        x: Inputs,
        *,
        value: float | tuple[float, ...] | None = None,
        noise: Tensor | None = None,
        plain: bool = False,
    ) -> Tensors:
        """Return the prediction at `x` [N, *], with the entries of `Likelihood.predictive`, without
        the axis of draws.

        Args:
            x: Inputs [N, *], a tensor or a tree of them.
            value: Value of the tuned number, if the predictor has one; None for the first value of
                its grid. For several, [K], the predictions at each are stacked, [K, N, ...].
            noise: Standard normals [S, N, O] for S draws of the outputs; None for the closed form.
            plain: Whether to predict at the means of the uncertain weights, as if they had no
                variance.
        """
        ...


class Predictor(Protocol):
    """Define the interface of a client's rule that predicts from training data or several models.

    Without such a rule, predictions are averages over draws of the client's blocks.
    """

    @property
    def tunes(self) -> str:
        """Return the name of a number that is tuned for all clients by the likelihood of their
        validation data; empty if there is none.
        """
        ...

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the candidates for this number, ascending; a single one is used as it is."""
        ...

    def check(self, algorithm: Any) -> None:
        """Raise ValueError if the predictor does not fit the algorithm."""
        ...

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> FittedPredictor:
        """Return one client's predictor.

        It is computed from the entries that the client received, its view (after fine-tuning, if
        the method fine-tunes) and its training data x, y. A predictor whose attribute `validates`
        is True also receives the client's `validation` data, {x, y}, to choose its own number.
        """
        ...


@runtime_checkable
class StoredPredictor(Predictor, Protocol):
    """Define the interface of a predictor that can be stored with a client's model, so that it
    predicts without the training data.
    """

    @property
    def needs_data(self) -> bool:
        """Return whether predictions need the client's training data."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the view's entries that it reads in addition to its blocks."""
        ...

    def stored(self, fitted: FittedPredictor, value: float | None, *, limit: int) -> Tensors:
        """Return the tensors from which `restored` makes a predictor; none contains a row of the
        training data unchanged.

        They can be as confidential as the rows, which may be computable from them, see
        `ClientModel.save`.

        Args:
            fitted: One client's predictor, from the rule itself or from `restored`.
            value: Value of the tuned number; None for the first of the grid.
            limit: Maximum number of bytes of one tensor.

        Raises:
            MemoryError: A tensor exceeds `limit`; the message has its size.
        """
        ...

    def restored(self, algorithm: Any, view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor from the blocks of its view, the entries that `reads`
        names, and the stored `tensors`.

        Raises:
            ValueError: The tensors do not fit the model.
        """
        ...
