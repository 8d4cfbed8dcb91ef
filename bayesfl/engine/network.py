"""The model of a chunk of clients: its outputs, and the way back from a slope at the outputs to the parameters."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from bayesfl.models import Split

Back: TypeAlias = Callable[[Tensor], tuple[Tensor | None, dict[str, Tensor]]]
"""From a slope at the outputs to the slope at the inputs (None where it was not asked for) and those of the wanted leaves."""


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


class Kernel(Protocol):
    """How a kernel takes a chunk of clients through a module."""

    def __call__(
        self, module: nn.Module, leaves: dict[str, Tensor], wanted: frozenset[str], x: Tensor, lifted: bool, through: bool
    ) -> Pass:
        """Outputs and the way back.

        Args:
            module: The module.
            leaves: Parameters by name, [C, *shape], or [C, S, *shape] where drawn.
            wanted: Names of those whose slopes are wanted.
            x: Inputs [C, B, ...], or [C, S, B, ...] where lifted.
            lifted: Whether they have an axis of draws.
            through: Whether the slope at the inputs is wanted.
        """
        ...


def by_autograd(call: Callable[[nn.Module, dict[str, Tensor], Tensor, bool], tuple[Tensor, bool]]) -> Kernel:
    """A kernel from a function that only goes forward."""

    def kernel(module: nn.Module, leaves: dict[str, Tensor], wanted: frozenset[str], x: Tensor, lifted: bool, through: bool) -> Pass:
        if not wanted and not through:
            with torch.no_grad():
                return Pass(*call(module, leaves, x, lifted), None)
        names = [name for name in leaves if name in wanted]
        with torch.enable_grad():
            live = {name: leaves[name].detach().requires_grad_() for name in names}
            start = x.detach().requires_grad_() if through else x
            outputs, lifted = call(module, leaves | live, start, lifted)

        def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
            ends = [*live.values(), start] if through else list(live.values())
            slopes = torch.autograd.grad(outputs, ends, slope)
            return (slopes[-1] if through else None), dict(zip(names, slopes, strict=False))

        return Pass(outputs.detach(), lifted, back)

    return kernel


class Network:
    """A model under a kernel; body and head apart where it has them, so that draws of a head share one pass through the body.

    Args:
        module: The model.
        kernel: How a chunk goes through it.
        wanted: Parameters whose slopes are wanted.
        still: Whether inputs and the body's leaves are the same in every call; then its features are computed once.
    """

    def __init__(self, module: nn.Module, kernel: Kernel, wanted: frozenset[str] = frozenset(), *, still: bool = False) -> None:
        self._module, self._kernel, self._wanted = module, kernel, wanted
        self._of_body = frozenset(name[5:] for name in wanted if name.startswith("body."))
        self._of_head = frozenset(name[5:] for name in wanted if name.startswith("head."))
        self._still = still and not self._of_body
        self._features: Pass | None = None

    def __call__(self, leaves: dict[str, Tensor], x: Tensor) -> Pass:
        """What goes through the model, [C, B, ...]."""
        module, kernel = self._module, self._kernel
        if not isinstance(module, Split):
            return kernel(module, leaves, self._wanted, x, False, False)
        body, head = ({k[5:]: v for k, v in leaves.items() if k.startswith(part)} for part in ("body.", "head."))
        features = self._features
        if features is None or not self._still or len(features.outputs) != len(x):
            features = self._features = kernel(module.body, body, self._of_body, x, False, False)
        outputs = kernel(module.head, head, self._of_head, features.outputs, features.lifted, bool(self._of_body))

        def back(slope: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
            slopes: dict[str, Tensor] = {}
            through: Tensor | None = slope
            for part, passed in (("head.", outputs), ("body.", features)):
                if passed.back is not None and through is not None:
                    through, new = passed.back(through)
                    slopes |= {part + name: value for name, value in new.items()}
            return None, slopes

        return Pass(outputs.outputs, outputs.lifted, back)
