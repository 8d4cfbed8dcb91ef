"""The model of a chunk of clients: its outputs, and the way back from a slope at the outputs to the parameters."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from bayesfl.models import SplitModel

Back: TypeAlias = Callable[[Tensor], Tensor | None]
"""From a slope at the outputs to the slope at the inputs, None where it was not asked for; those of leaves are written on the way."""


class Pass(NamedTuple):
    """What went through a module.

    Args:
        outputs: [C, B, ...], or [C, S, B, ...] where lifted.
        lifted: Whether weights were drawn, so that outputs have an axis of draws.
        back: The way back; None where nothing was asked for.
    """

    outputs: Tensor
    lifted: bool
    back: Back | None


class Through(NamedTuple):
    """What went through a whole model.

    Args:
        outputs: [C, B, O], or [C, S, B, O] where lifted.
        lifted: Whether weights were drawn, so that outputs have an axis of draws.
        features: What the head got; None where the model is not cut in two.
        back: The way back from slopes at the outputs, and at the features where something else reads them.
    """

    outputs: Tensor
    lifted: bool
    features: Tensor | None
    back: Callable[[Tensor, Tensor | None], None]


class Passage(Protocol):
    """A module, ready for a chunk of clients to go through."""

    def __call__(self, leaves: dict[str, Tensor], slopes: dict[str, Tensor], x: Tensor, lifted: bool, through: bool) -> Pass:
        """Outputs and the way back.

        Args:
            leaves: Parameters by name, [C, *shape], or [C, S, *shape] where drawn.
            slopes: Where the way back writes the slopes of the leaves that are wanted, in their shapes.
            x: Inputs [C, B, ...], or [C, S, B, ...] where lifted.
            lifted: Whether they have an axis of draws.
            through: Whether the slope at the inputs is wanted.
        """
        ...


Kernel: TypeAlias = Callable[[nn.Module], Passage]
"""How a chunk of clients goes through a module."""


def by_autograd(call: Callable[[nn.Module, dict[str, Tensor], Tensor, bool], tuple[Tensor, bool]]) -> Kernel:
    """A kernel from a function that only goes forward."""

    def kernel(module: nn.Module) -> Passage:
        def passage(leaves: dict[str, Tensor], slopes: dict[str, Tensor], x: Tensor, lifted: bool, through: bool) -> Pass:
            if not slopes and not through:
                with torch.no_grad():
                    return Pass(*call(module, leaves, x, lifted), None)
            with torch.enable_grad():
                live = {name: leaves[name].detach().requires_grad_() for name in slopes}
                start = x.detach().requires_grad_() if through else x
                outputs, lifted = call(module, leaves | live, start, lifted)

            def back(slope: Tensor) -> Tensor | None:
                ends = [*live.values(), start] if through else list(live.values())
                found = torch.autograd.grad(outputs, ends, slope, materialize_grads=True)  # some modules leave parameters unused
                for buffer, value in zip(slopes.values(), found, strict=False):
                    buffer.copy_(value)
                return found[-1] if through else None

            return Pass(outputs.detach(), lifted, back)

        return passage

    return kernel


class Network:
    """A model under a kernel; body and head apart where it has them, so that draws of a head share one pass through the body.

    Args:
        module: The model.
        kernel: How a chunk goes through it.
        still: Whether inputs and the body's leaves are the same in every call; then its features are computed once, where no
            slopes of it are wanted.
    """

    def __init__(self, module: nn.Module, kernel: Kernel, *, still: bool = False) -> None:
        parts = {"body.": module.body, "head.": module.head} if isinstance(module, SplitModel) else {"": module}
        self._passages = {prefix: kernel(part) for prefix, part in parts.items()}
        self._still = still
        self._features: Pass | None = None

    def __call__(self, leaves: dict[str, Tensor], x: Tensor, slopes: dict[str, Tensor] | None = None) -> Through:
        """What goes through the model; the way back writes into `slopes`."""
        slopes = slopes or {}
        if "" in self._passages:
            whole = self._passages[""](leaves, slopes, x, False, False)

            def all_the_way(slope: Tensor, at_features: Tensor | None = None) -> None:
                if whole.back is not None:
                    whole.back(slope)

            return Through(whole.outputs, whole.lifted, None, all_the_way)
        of_body, of_head = _apart(leaves)
        to_body, to_head = _apart(slopes)
        features = self._features
        if features is None or not self._still or to_body or len(features.outputs) != len(x):
            features = self._features = self._passages["body."](of_body, to_body, x, False, False)
        outputs = self._passages["head."](of_head, to_head, features.outputs, features.lifted, bool(to_body))

        def back(slope: Tensor, at_features: Tensor | None = None) -> None:
            through = None if outputs.back is None else outputs.back(slope)
            if features.back is not None and through is not None:
                features.back(through if at_features is None else through + at_features)

        return Through(outputs.outputs, outputs.lifted, features.outputs, back)


def _apart(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    body = {name[5:]: t for name, t in tensors.items() if name.startswith("body.")}
    return body, {name[5:]: t for name, t in tensors.items() if name.startswith("head.")}
