"""The live kernel, which runs one client after another, for larger CNNs on a CPU, where the activations of two clients exceed the cache.

Stacks of known layers are run by the layer rules; other modules are called themselves, with convolutions in channels-last memory.
"""

import torch
from torch import Tensor, nn

from bayesfl.base.addressed import restart
from bayesfl.base.inputs import Inputs, call_at, count, each
from bayesfl.engine import layers
from bayesfl.engine.network import Passage, by_autograd


def has_convolutions(module: nn.Module) -> bool:
    """Say whether the module has convolutions, for which the memory layout matters."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def _forward(module: nn.Module, leaves: dict[str, Tensor], x: Inputs, lifted: bool) -> tuple[Tensor, bool]:
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    leaves = {name: leaf.squeeze(0) for name, leaf in leaves.items()}
    drawn = {name: leaf for name, leaf in leaves.items() if leaf.dim() > own[name].dim()}
    fixed = {name: _channels_last(leaf) for name, leaf in leaves.items() if name not in drawn}
    x = each(lambda t: t.squeeze(0), x)
    if not drawn and not lifted:
        return call_at(module, fixed, each(_channels_last, x)).unsqueeze(0), False
    draws = count(x) if lifted else max(len(leaf) for leaf in drawn.values())
    out = []
    for s in range(draws):
        restart()  # the same dropout for each draw
        weights = fixed | {name: _channels_last(leaf[s % len(leaf)]) for name, leaf in drawn.items()}  # statistics are of copies alone
        out.append(call_at(module, weights, each(lambda t, s=s: _channels_last(t[s] if lifted else t), x)))
    return torch.stack(out).unsqueeze(0), True


def _channels_last(t: Tensor) -> Tensor:
    # A convolution chooses its memory layout by strides, which `contiguous` leaves as they are for a single channel.
    return t.to(memory_format=torch.channels_last, copy=True) if t.dim() == 4 else t


_module_itself = by_autograd(_forward)


def kernel(module: nn.Module) -> Passage:
    """Return the passage of a module for a chunk of one client, see `network.Kernel`.

    It uses the layer rules if every layer has one, else the module itself.
    """
    return layers.kernel(module) if layers.supported(module) else _module_itself(module)
