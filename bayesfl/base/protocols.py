"""The types and interfaces shared by all parts of the package.

Index letters in code and documentation: `J` clients, `C` clients of a cohort or chunk, `N`
examples, `B` batch, `S` posterior draws, `D` parameters of a block, `P` selected weights of a
subnetwork, `M` copies of a block, `O` outputs. As a subscript, as in H_S, `S` is the set of the
selected weights.

Terms: a "view" is one client's current state of the blocks in a phase; "given" is what every client
received this round; a "block" is a set of parameters treated alike; a "cohort" are the clients
whose work is gathered in a round; a "chunk" are clients computed together.

Functions for one client also serve many: tensors carry any leading axes, written [...].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from bayesfl.base.inputs import Inputs
from bayesfl.base.options import Range
from bayesfl.base.targets import Targets

Tensors: TypeAlias = dict[str, Tensor]
"""One posterior about a block, such as {"loc": [..., D], "rho": [..., D]}."""


Server: TypeAlias = dict[str, Any]
"""The state of the federation on the server: nested mappings of tensors only, so that it can be
stored and sent.
"""


View: TypeAlias = dict[str, Any]
"""The state that one client sees: the common blocks, its private rows, what was addressed to it,
and "n", its number of examples.
"""


Uplink: TypeAlias = dict[str, Any]
"""The entries that clients send: their pooled blocks, what the algorithm reports, "n", and "ids",
which the server adds.
"""


Batch: TypeAlias = dict[str, Any]
"""Examples: inputs x [..., B, *], a tensor or a tree of them; y [..., B]; weight [..., B], 0 for
padding; index [..., B] into the client's own rows; where the data have environments, environment
[..., B, E], one-hot."""


Carry: TypeAlias = Any


Info: TypeAlias = dict[str, Tensor]
"""Information for people to read, which no computation uses."""


Weight: TypeAlias = Callable[[Server, Uplink], Tensor]
"""Function (server, uplink) -> weights of the clients of an uplink, [C], not normalised; [C, M] for
the copies of a block.
"""


@dataclass(frozen=True)
class Reported:
    """A start of an algorithm's `reports`, with the range of the numbers that are sent. A client
    that sends others is left out of the round, or stops the run, by name.

    Args:
        start: The start.
        range: Where every number must lie.
    """

    start: Any
    range: Range


RESERVED = ("n", "ids", "round", "rounds", "clients")
"""Names of entries that every view or uplink holds in addition to the method's own."""


@runtime_checkable
class Posterior(Protocol):
    """The interface of a posterior q(w) about a block's weights; every tensor is [..., D]."""

    def init(self, loc: Tensor) -> Tensors:
        """Return the belief that a client starts from, centred at `loc` [..., D]; may alias it."""
        ...

    def noise_size(self, size: int) -> int:
        """Return how many standard normals one draw of `size` weights takes; 0 if there is nothing
        to draw.
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
    """The interface of a prior p(w_j | w), which ties a client's posterior to the federation."""

    def energy(self, loc: Tensor, var: Tensor, given: Server, view: View) -> Tensor:
        """Return the expected negative log prior [...] in nats, with all constants, for moments
        `loc` and `var` [..., D].
        """
        ...


@runtime_checkable
class AdditivePool(Protocol):
    """The interface of a pool that is a sum over clients, then a closed form.

    The sum can be streamed, computed by a tree of servers, and computed under secure aggregation.
    """

    @property
    def sends(self) -> tuple[str, ...]:
        """Return the names of the posterior's tensors that travel."""
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
    """The interface of a pool that needs every client at once, such as a median."""

    @property
    def sends(self) -> tuple[str, ...]:
        """Return the names of the posterior's tensors that travel."""
        ...

    def __call__(self, server: Server, name: str, uplink: Uplink) -> Tensors:
        """Return the server's new entry for block `name` from all clients' uplinks, [C, ...]."""
        ...


@runtime_checkable
class Likelihood(Protocol):
    """The interface of a likelihood p(y | outputs of the network), for one example."""

    @property
    def task(self) -> str:
        """Return `classification` or `regression`, which decides the measures that apply."""
        ...

    def width(self, targets: Targets) -> tuple[int, ...]:
        """Return the shape of a network's outputs for one example, as (O,).

        Raises:
            ValueError: The likelihood is for other targets.
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
        """Return the predictive distribution averaged over draws `outputs` [..., S, N, O]; its
        epistemic part is a separate entry.
        """
        ...


class FittedPredictor(Protocol):
    """The interface of one client's predictor, ready to be used."""

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
            value: Value of the number that is tuned, if the predictor has one; None for the first
                of its grid. For several, [K], the predictions at each are stacked, [K, N, ...].
            noise: Standard normals [S, N, O] for S draws of the outputs; None for the closed form.
            plain: Whether to predict at the means of the uncertain weights, as if these were
                certain.
        """
        ...


class Predictor(Protocol):
    """The interface of a rule by which a client predicts, from its training data or from several
    models together.

    Without one, predictions are averaged over draws of the client's blocks.
    """

    @property
    def tunes(self) -> str:
        """Return the name of a number that is chosen for all clients by the likelihood of their
        validation data; empty if there is none.
        """
        ...

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the candidates for this number, ascending; a single one is taken as it is."""
        ...

    def check(self, algorithm: Any) -> None:
        """Raise ValueError if the predictor does not fit the algorithm."""
        ...

    def __call__(self, algorithm: Any, given: Server, view: View, data: Batch) -> FittedPredictor:
        """Return one client's predictor.

        It is made from what the client received, its view (after fine-tuning, if the method has
        any), and its training data x, y; and of a predictor whose attribute `validates` is True
        from its `validation` data, {x, y}, on which it may choose a number of its own.
        """
        ...


class AskingPredictor(Predictor, Protocol):
    """The interface of a predictor that needs what clients answer to surveys.

    Its surveys are put to the clients before they predict, in a simulation and over a network. Each
    says what it `reads` of a client: `rows`, as `LocalRows`; `predictions`, as `LocalPredictions`
    by what is known so far; or its last layer, `head`, as `LocalHeads` by the predictor's own
    `rows(algorithm, view, x, y)`, without the model after its first question. The predictor finds
    the last states in `given`, by their names; they are not there where clients predict before
    aggregation, or at the means.
    """

    def asks(
        self, algorithm: Any, server: Server, known: Mapping[str, Tensors]
    ) -> tuple[str, Any] | None:
        """Return the next survey that predictions need, after its name; None after the last one.

        Args:
            algorithm: The method.
            server: The server's state, or what it sends to every client.
            known: The last states of the surveys so far, by their names.
        """
        ...


@runtime_checkable
class StoredPredictor(Predictor, Protocol):
    """The interface of a predictor that can be stored with a client's model, so that it predicts
    without the training data.
    """

    @property
    def needs_data(self) -> bool:
        """Return whether predictions need the client's training data."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the view's entries that it reads in addition to the blocks of the
        predictor.
        """
        ...

    def stored(self, fitted: FittedPredictor, value: float | None, *, limit: int) -> Tensors:
        """Return the tensors by which `restored` predicts; none of them holds a row of the training
        data as it is.

        They can be as confidential as the rows, which may be computed from them, see
        `ClientModel.save`.

        Args:
            fitted: One client's predictor, as the rule itself or `restored` made it.
            value: Value of the number that is tuned; None for the first of the grid.
            limit: Bytes that one tensor may take.

        Raises:
            MemoryError: A tensor takes more bytes than `limit`; the message says how many.
        """
        ...

    def restored(self, algorithm: Any, view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor from the blocks of its view, the entries that `reads`
        names, and the stored `tensors`.

        Raises:
            ValueError: The tensors do not fit the model.
        """
        ...
