"""The vmap kernel, which runs any module, and any pure phase, for a chunk of clients with
torch.func.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from bayesfl.base.inputs import Inputs, each
from bayesfl.base.protocols import Batch, Info, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Phase
from bayesfl.engine import live
from bayesfl.engine.network import Pass, Passage, Rows, by_autograd, there_and_back
from bayesfl.engine.plan import PhasePlan
from bayesfl.models.weights import call_at

_BATCHES: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()
"""Whether torch.func has batched a module successfully, including its gradients."""


def can_batch(module: nn.Module) -> bool:
    """Return whether torch.func can batch the module, as far as is known: no layer must run
    separately, and it has not failed before.
    """
    return _BATCHES.get(module, True) and not any(_alone(part) for part in module.modules())


def _alone(part: nn.Module) -> bool:
    """Return whether a layer cannot be batched, or would then give other results: recurrent layers,
    some options of embeddings, gradient hooks.
    """
    embeds = isinstance(part, nn.Embedding) and (
        part.padding_idx is not None or part.scale_grad_by_freq
    )
    return (
        embeds
        or isinstance(part, nn.RNNBase)
        or bool(part._backward_hooks or part._backward_pre_hooks)
    )


def failed(module: nn.Module, error: RuntimeError) -> bool:
    """Return whether an error means that torch.func cannot batch the module, for example because
    its control flow depends on data; store the result.
    """
    words = (
        "vmap",
        "functorch",
        "torch.func",
        "BatchedTensor",
        "Batching rule",
        "derivative for aten::",
    )
    if not any(word in str(error) for word in words):
        return False
    _BATCHES[module] = False
    return True


def refuse(module: nn.Module) -> None:
    """Raise ValueError with the submodule's name if torch.func cannot batch the module."""
    for name, part in module.named_modules():
        if not can_batch(part) and not any(True for _ in part.children()):
            raise ValueError(
                f"torch.func cannot batch module {name!r} ({type(part).__name__}); use "
                "kernel='live' or 'auto'"
            )


def _forward(
    module: nn.Module, leaves: dict[str, Tensor], x: Inputs, lifted: bool, rows: Rows
) -> tuple[Tensor, bool]:
    own = dict(module.named_parameters())
    drawn = {name: leaf for name, leaf in leaves.items() if leaf.dim() == own[name].dim() + 2}
    fixed = {name: leaf for name, leaf in leaves.items() if name not in drawn}

    def client(drawn: dict[str, Tensor], fixed: dict[str, Tensor], x: Inputs) -> Tensor:
        if not drawn and not lifted:
            return call_at(module, fixed, x)
        return vmap(lambda d, x: call_at(module, fixed | d, x), in_dims=(0, 0 if lifted else None))(
            drawn, x
        )

    return vmap(client)(drawn, fixed, x), lifted or bool(drawn)


def kernel(module: nn.Module) -> Passage:
    """Return the passage of a chunk; its first gradients are compared with those of `live`."""
    batched = by_autograd(_forward)(module)

    def passage(
        leaves: dict[str, Tensor],
        slopes: dict[str, Tensor],
        x: Inputs,
        lifted: bool,
        through: bool,
        rows: Rows = Rows(),
    ) -> Pass:
        if slopes and module not in _BATCHES:
            # At other weights than the module's own, which a backward pass might read instead.
            apart = {
                name: t[:1] * 1.5 if t.is_floating_point() else t[:1] for name, t in leaves.items()
            }
            one = each(lambda t: t[:1], x)
            (_, mine), (outputs, theirs) = (
                there_and_back(passage, apart, slopes, one, lifted=lifted, through=through)[:2]
                for passage in (batched, live.kernel(module))
            )
            most = (
                100 * torch.finfo(outputs.dtype).eps ** 0.5 * max(map(Tensor.norm, theirs.values()))
            )
            if other := [name for name, t in theirs.items() if (mine[name] - t).norm() > most]:
                raise RuntimeError(
                    f"torch.func computes other gradients of {other[:3]} than autograd, for "
                    "example because a backward pass reads a layer, or a tensor has a gradient "
                    "hook; use kernel='live' or 'auto'"
                )
            _BATCHES[module] = True
        return batched(leaves, slopes, x, lifted, through, rows)

    return passage


def run(
    algorithm: Algorithm,
    phase: Phase,
    given: Server,
    views: View,
    plan: PhasePlan,
    batch: Batch | None = None,
    *,
    losses: Callable[[Algorithm, tuple[str, ...], View, Batch], Tensor],
) -> tuple[View, Info]:
    """Run any pure phase for a chunk of clients, step by step over those still training.

    Args:
        algorithm: The algorithm with the phase.
        phase: The phase; the state that its steps carry must be a nest of tensors, numbers and
            None, with the same structure in all steps.
        given: The entries that every client received this round.
        views: The clients' views, [C, ...] throughout.
        plan: Plan of the batches and the noise.
        batch: The batch that `Repeat` shares among its phases; None outside a `Repeat`.
        losses: (algorithm, parts, views, batch) -> the chunk's losses, for a `Once` with `losses`.
    """
    forms: list[tuple[Any, list[bool]]] = []

    def listed(carry: Any) -> list[Tensor]:  # vmap returns tensors only
        leaves, spec = tree_flatten(carry)
        forms[:] = [(spec, [leaf is None for leaf in leaves])]
        return [torch.as_tensor(leaf) for leaf in leaves if leaf is not None]

    def nested(tensors: list[Tensor]) -> Any:
        ((spec, absent),), rest = forms, iter(tensors)
        return tree_unflatten([None if none else next(rest) for none in absent], spec)

    carry = vmap(lambda view: listed(phase.begin(algorithm, given, view)))(views)
    for active, data, noise in plan.walk(phase, phase.noise(algorithm), batch):
        carried, seen = tree_map(lambda leaf, a=active: leaf[:a], (carry, views))
        if parts := getattr(phase, "losses", ()):
            data = {**data, "losses": losses(algorithm, parts, seen, data)}

        def step(
            carry: list[Tensor], view: View, batch: Batch, noise: dict[str, Tensor]
        ) -> list[Tensor]:
            return listed(phase.step(algorithm, nested(carry), given, view, batch, noise))

        new = vmap(step)(carried, seen, data, noise)
        carry = (
            new
            if active == len(plan.ids)
            else tree_map(lambda n, c, a=active: torch.cat([n, c[a:]]), new, carry)
        )
    return vmap(lambda carry, view: phase.end(algorithm, nested(carry), given, view))(carry, views)
