"""The live kernel: one client after another, best for CNNs on a CPU, where a second client's activations leave the cache.

Stacks of known layers go by the layer rules, other modules through themselves, convolutions in channels-last memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesfl.engine import layers
from bayesfl.engine.network import Pass, by_autograd


def has_convolutions(module: nn.Module) -> bool:
    """Whether channels-last memory matters to it."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def _forward(module: nn.Module, leaves: dict[str, Tensor], x: Tensor, lifted: bool) -> tuple[Tensor, bool]:
    own = dict(module.named_parameters())
    leaves = {name: leaf.squeeze(0) for name, leaf in leaves.items()}
    drawn = {name: leaf for name, leaf in leaves.items() if leaf.dim() > own[name].dim()}
    x = x.squeeze(0)
    if not drawn and not lifted:
        return functional_call(module, leaves, (_channels_last(x),)).unsqueeze(0), False
    draws = len(x) if lifted else len(next(iter(drawn.values())))
    out = [
        functional_call(module, leaves | {name: leaf[s] for name, leaf in drawn.items()}, (_channels_last(x[s] if lifted else x),))
        for s in range(draws)
    ]
    return torch.stack(out).unsqueeze(0), True


_module_itself = by_autograd(_forward)


def kernel(module: nn.Module, leaves: dict[str, Tensor], wanted: frozenset[str], x: Tensor, lifted: bool, through: bool) -> Pass:
    """See `network.Kernel`, for a chunk of one client: by the layer rules where there are any, else the module itself."""
    return (layers.kernel if layers.supported(module) else _module_itself)(module, leaves, wanted, x, lifted, through)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def place(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The memory layout of leaves [1, *shape]: channels last where the module itself is run."""
    return torch.Tensor.contiguous if layers.supported(model) else _weights_channels_last


def _weights_channels_last(leaf: Tensor) -> Tensor:
    # Strides decide which layout a convolution works in, and `contiguous` leaves those of a single channel as they are.
    if leaf.dim() != 5:
        return leaf.contiguous()
    one = leaf.squeeze(0)
    return torch.empty(one.shape, dtype=leaf.dtype, device=leaf.device, memory_format=torch.channels_last).copy_(one).unsqueeze(0)
