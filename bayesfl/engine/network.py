"""The model of a chunk of clients: its outputs, and the backward pass from slopes at the outputs to
slopes at the parameters.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, count, each, first
from bayesfl.models.altered import cut

Back: TypeAlias = Callable[[Tensor], Tensor | None]
"""Function from a slope at the outputs to the slope at the inputs, None if that is not needed; it
also writes the leaves' slopes.
"""


class Shares(NamedTuple):
    """Hold a norm's weights for the statistics of clients' batches.

    Args:
        each: The share of each value of a channel in its client's mean, [C, B]; 0 for padding.
        unbiased: Factor from a mean square to an unbiased variance, [C, 1].
        several: 1 for clients with several values of a channel and 0 for others, which use their
            running statistics, [C, 1]; None if all have several.
    """

    each: Tensor
    unbiased: Tensor
    several: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Hold the weights of a chunk's rows, and the addresses of the module's draws.

    Args:
        weight: Weights [C, B], 0 for padding; None if there is no padding.
        keys: Address of each client's draws, see `Addressed`; None if the module draws nothing.
        start: Number of earlier draws at the same address.
    """

    weight: Tensor | None = None
    keys: Sequence[int] | None = None
    start: int = 0

    def shares(self, x: Tensor, places: int) -> Shares:
        """Return the shares for norms of x [C, B, ...] with this number of values of a channel for
        each example.
        """
        real = x.new_ones(x.shape[:2]) if self.weight is None else self.weight
        count = real.sum(1, keepdim=True) * places
        several = count > 1
        every = bool(several.all())
        return Shares(
            real / (count if every else count.masked_fill(~several, torch.inf)),
            count / (count - 1).clamp(min=1),
            None if every else several.to(real),
        )


class Pass(NamedTuple):
    """Hold the result of running a module for a chunk of clients.

    Args:
        outputs: Outputs [C, B, ...], or [C, S, B, ...] if lifted.
        lifted: Whether weights were drawn, so that outputs have an axis of draws.
        back: The backward pass; it returns slopes at the inputs if these were requested.
    """

    outputs: Tensor
    lifted: bool
    back: Back


class Through(NamedTuple):
    """Hold the result of running a whole model for a chunk of clients.

    Args:
        outputs: Outputs [C, B, O], or [C, S, B, O] if lifted.
        lifted: Whether weights were drawn, so that outputs have an axis of draws.
        features: Inputs of the head; None if the model is not a `SplitModel`.
        back: The backward pass from slopes at the outputs and, if a penalty needs them, slopes at
            the features.
    """

    outputs: Tensor
    lifted: bool
    features: Tensor | None
    back: Callable[[Tensor, Tensor | None], object]


class Passage(Protocol):
    """Define the interface of a module that is prepared to run for a chunk of clients."""

    def __call__(
        self,
        leaves: dict[str, Tensor],
        slopes: dict[str, Tensor],
        x: Inputs,
        lifted: bool,
        through: bool,
        rows: Rows = ...,
    ) -> Pass:
        """Return the outputs and the backward pass.

        Args:
            leaves: Parameters by name, [C, *shape], or [C, S, *shape] if drawn.
            slopes: Buffers, in the leaves' shapes, for the requested slopes of the backward pass.
            x: Inputs [C, B, ...], or [C, S, B, ...] if lifted.
            lifted: Whether the inputs have an axis of draws.
            through: Whether the slope at the inputs is requested.
            rows: Weights of the rows, 0 for padding, and the addresses of draws.
        """
        ...


Kernel: TypeAlias = Callable[[nn.Module], Passage]
"""Function from a module to its `Passage` for a chunk of clients."""


def by_autograd(
    call: Callable[[nn.Module, dict[str, Tensor], Inputs, bool, Rows], tuple[Tensor, bool]],
) -> Kernel:
    """Make a kernel from a function that computes outputs; autograd computes the backward pass."""

    def kernel(module: nn.Module) -> Passage:
        def passage(
            leaves: dict[str, Tensor],
            slopes: dict[str, Tensor],
            x: Inputs,
            lifted: bool,
            through: bool,
            rows: Rows = Rows(),
        ) -> Pass:
            if not slopes and not through:
                with torch.no_grad():
                    return Pass(*call(module, leaves, x, lifted, rows), lambda slope: None)
            with torch.enable_grad():
                live = {name: leaves[name].detach().requires_grad_() for name in slopes}
                # A head's inputs are one tensor.
                start = x.detach().requires_grad_() if through and isinstance(x, Tensor) else x
                outputs, lifted = call(module, leaves | live, start, lifted, rows)

            def back(slope: Tensor) -> Tensor | None:
                ends = [*live.values(), start] if through else list(live.values())
                # Some modules leave parameters unused.
                found = torch.autograd.grad(outputs, ends, slope, materialize_grads=True)
                for buffer, value in zip(slopes.values(), found, strict=False):
                    buffer.copy_(value)
                return found[-1] if through else None

            return Pass(outputs.detach(), lifted, back)

        return passage

    return kernel


def in_microbatches(kernel: Kernel, most: int) -> Kernel:
    """Make a kernel that computes at most `most` rows of each client at once.

    Memory holds the activations of these rows only: the backward pass repeats their forward pass,
    as with checkpoints of activations. Outputs are those of the whole batch, so a loss may depend
    on all its rows.
    """

    def kernel_in_microbatches(module: nn.Module) -> Passage:
        whole = kernel(module)

        def passage(
            leaves: dict[str, Tensor],
            slopes: dict[str, Tensor],
            x: Inputs,
            lifted: bool,
            through: bool,
            rows: Rows = Rows(),
        ) -> Pass:
            # No layer here reads `rows`: `Engine` refuses norms and draws in training mode.
            axis = 1 + lifted
            starts = range(0, first(x).shape[axis], most)

            def part(start: int, slopes: dict[str, Tensor], through: bool) -> Pass:
                own = slice(start, start + most)
                here = each(lambda t: t[:, :, own] if lifted else t[:, own], x)
                return whole(leaves, slopes, here, lifted, through)

            if len(starts) == 1:
                return part(0, slopes, through)
            outputs, draws, _ = zip(*[part(start, {}, False) for start in starts], strict=True)

            def back(slope: Tensor) -> Tensor | None:
                sums, found = {name: torch.zeros_like(leaves[name]) for name in slopes}, []
                for start, piece in zip(starts, slope.split(most, 1 + draws[0]), strict=True):
                    own = {name: torch.empty_like(t) for name, t in sums.items()}
                    found.append(part(start, own, through).back(piece))
                    for name, total in sums.items():
                        total += own[name]
                for name, buffer in slopes.items():
                    buffer.copy_(sums[name])
                return torch.cat(found, axis) if through else None

            return Pass(torch.cat(outputs, 1 + draws[0]), draws[0], back)

        return passage

    return kernel_in_microbatches


def there_and_back(
    passage: Passage,
    leaves: dict[str, Tensor],
    names: Iterable[str],
    x: Inputs,
    *,
    lifted: bool = False,
    through: bool = False,
    rows: Rows = Rows(),
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Return all results of a passage: the outputs, and the slopes of the sum of their sines at the
    leaves with these `names` and at the inputs.
    """
    slopes = {name: torch.zeros_like(leaves[name]) for name in names}
    passed = passage(leaves, slopes, x, lifted, through, rows)
    at = passed.outputs.cos()
    if rows.weight is not None:
        at *= rows.weight[(..., *(at.dim() - 2) * (None,))]
    return passed.outputs, slopes, passed.back(at)


class Network:
    """Run a model with a kernel; body and head are run separately if it has them, so that draws of
    a head share one pass through the body.

    Args:
        module: The model.
        kernel: Kernel that computes it for a chunk.
        still: Whether inputs and the body's leaves are the same in every call; the features are
            then computed once, unless slopes of the body are requested.
    """

    def __init__(self, module: nn.Module, kernel: Kernel, *, still: bool = False) -> None:
        parts = {"body.": module.body, "head.": module.head} if cut(module) else {"": module}
        self._passages = {prefix: kernel(part) for prefix, part in parts.items()}
        self._still = still
        self._features: Pass | None = None

    def __call__(
        self,
        leaves: dict[str, Tensor],
        x: Inputs,
        slopes: dict[str, Tensor] | None = None,
        rows: Rows = Rows(),
    ) -> Through:
        """Compute the model for a chunk of clients; the backward pass writes into `slopes`."""
        slopes = slopes or {}
        if "" in self._passages:
            whole = self._passages[""](leaves, slopes, x, False, False, rows)
            return Through(whole.outputs, whole.lifted, None, lambda slope, _: whole.back(slope))
        of_body, of_head = _apart(leaves)
        to_body, to_head = _apart(slopes)
        features = self._features
        if features is None or not self._still or to_body or len(features.outputs) != count(x):
            features = self._features = self._passages["body."](
                of_body, to_body, x, False, False, rows
            )
        outputs = self._passages["head."](
            of_head,
            to_head,
            features.outputs,
            features.lifted,
            bool(to_body),
            replace(rows, start=rows.start + 2**32),
        )

        def back(slope: Tensor, at_features: Tensor | None = None) -> None:
            through = outputs.back(slope)
            if through is not None:
                features.back(through if at_features is None else through + at_features)

        return Through(outputs.outputs, outputs.lifted, features.outputs, back)


def _apart(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    body = {name[5:]: t for name, t in tensors.items() if name.startswith("body.")}
    return body, {name[5:]: t for name, t in tensors.items() if name.startswith("head.")}
