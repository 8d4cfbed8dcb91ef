"""Cutting a network into a body and a head, which personal federated learning treats
differently.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, call
from bayesfl.models.copies import duplicate


class SplitModel(nn.Module):
    """A network cut in two: `head(body(x))`.

    Args:
        body: First part, which clients usually share.
        head: Second part, which clients usually keep.

    Example:
        >>> model = bf.models.SplitModel(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 2))
        >>> [name for name, _ in model.named_parameters()]
        ['body.0.weight', 'body.0.bias', 'head.weight', 'head.bias']
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Any = None, /, *more: Any, **named: Any) -> Tensor:
        """Compute outputs [B, O] of inputs [B, ...]; the body receives all of them."""
        return self.head(self.body(*(() if x is None else (x, *more)), **named))


def has_body(module: nn.Module) -> bool:
    """Return whether any parameter named `body.*` is trained; a model without one is all head, as
    in logistic regression.
    """
    if not isinstance(module, nn.Module):  # refused elsewhere, with a remedy
        return True
    return any(name.startswith("body.") for name, p in module.named_parameters() if p.requires_grad)


def split(module: nn.Module, *, head: str = "fc", example: Inputs | None = None) -> SplitModel:
    """Cut any module whose last step is the submodule `head` into a body and that head; the module
    itself is not changed.

    Args:
        module: Any module.
        head: Name of its last submodule, as `named_modules()` gives it: `fc`, `classifier.6`.
        example: Inputs [B, ...], a tensor or a tuple or mapping of several, on which to check that
            the cut network computes what the module did. Without them only a step that an
            `nn.Sequential` takes after `head` is seen; one that a `forward` takes after it is left
            in the body, before the head.

    Raises:
        AttributeError: There is no submodule `head`.
        ValueError: An `nn.Sequential` has modules after it (without `example`), or the cut network
            computes something else on `example`.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> model = bf.models.split(network, head="2", example=torch.rand(5, 4))
        >>> model.head
        Linear(in_features=3, out_features=2, bias=True)
    """
    body = duplicate(module)
    last = body.get_submodule(head)
    if example is None and (after := _after(module, head)):
        raise ValueError(
            f"submodule {head!r} is not the last step of the module, {after} come after it: cut at "
            "the last one that has parameters, and leave out steps after it, such as a softmax"
        )
    parent, _, child = head.rpartition(".")
    setattr(body.get_submodule(parent), child, nn.Identity())
    cut = SplitModel(body, last)
    if example is not None:
        before = _outputs(module, example)
        try:
            # The steps after the head do not take inputs of the head.
            now = _outputs(cut, example)
        except (RuntimeError, ValueError, IndexError):
            now = None
        if (
            now is None
            or before.shape != now.shape
            or not torch.allclose(before, now, equal_nan=True)
        ):
            raise ValueError(
                f"submodule {head!r} is not the last step of the module: cut there, it computes "
                "something else"
            )
    return cut


def _after(module: nn.Module, head: str) -> list[str]:
    """Return the names of the modules that an `nn.Sequential` on the way to `head` runs after it,
    without identities.
    """
    found, at = [], []
    for child in head.split("."):
        parent = module.get_submodule(".".join(at))
        if type(parent).forward is nn.Sequential.forward:
            # named_children leaves out a module that stands there twice.
            names = list(parent._modules)
            later = names[names.index(child) + 1 :]
            found += [
                ".".join([*at, name])
                for name in later
                if not isinstance(parent.get_submodule(name), nn.Identity)
            ]
        at.append(child)
    return found


def _outputs(module: nn.Module, example: Inputs) -> Tensor:
    """Compute the outputs of a copy in evaluation mode."""
    with torch.no_grad():
        return call(duplicate(module).eval(), example)
