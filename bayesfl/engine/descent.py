"""Gradient steps for a chunk of clients at once, in place: what the batched kernels share. They differ in how outputs are computed.

Nothing here is mapped: draws, priors and the optimiser are algebra on [C, ...]. Point blocks are sliced into leaves once a
phase; their Gaussian prior is added to the gradient analytically. Blocks with an entropy stay vectors and their KL goes
through autograd. Clients come longest first, so those still at work are a prefix, updated through views.
"""

from collections.abc import Callable
from itertools import accumulate
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bayesfl.blocks import Algorithm
from bayesfl.engine.plan import Plan
from bayesfl.models import Split
from bayesfl.optim import rate_at
from bayesfl.phases import Descend
from bayesfl.priors import Flat
from bayesfl.protocols import Batch, GaussianPrior, Info, Server, Tensors, View

Forward: TypeAlias = Callable[[nn.Module, dict[str, Tensor], Tensor, bool], tuple[Tensor, bool]]
"""(module, leaves, x, lifted) -> (outputs, lifted). Leaves are [C, *shape], or [C, S, *shape] where drawn; x is [C, B, ...], or
[C, S, B, ...] where lifted; so are the outputs."""


class Network:
    """The model of a chunk: body and head apart where it has them, so that draws of a head share one pass through the body.

    Args:
        module: The model.
        forward: How a kernel runs a module.
        still: Whether the body's leaves and inputs are the same in every call, so that its features are computed once.
    """

    def __init__(self, module: nn.Module, forward: Forward, *, still: bool = False) -> None:
        self._module, self._forward, self._still = module, forward, still and isinstance(module, Split)
        self._features: tuple[Tensor, bool] | None = None

    def __call__(self, leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs [C, S, B, O], S = 1 where nothing is drawn."""
        module = self._module
        if isinstance(module, Split):
            body, head = ({k[5:]: v for k, v in leaves.items() if k.startswith(part)} for part in ("body.", "head."))
            if self._features is None or not self._still or len(self._features[0]) != len(x):
                self._features = self._forward(module.body, body, x, False)
            outputs, lifted = self._forward(module.head, head, *self._features)
        else:
            outputs, lifted = self._forward(module, leaves, x, False)
        return outputs if lifted else outputs.unsqueeze(1)


class _Leaves:
    """A point block as leaves [C, *shape], its Gaussian prior's pull added to their gradients."""

    def __init__(self, algorithm: Algorithm, name: str, given: Server, views: View, weight: Tensor, place: Callable[[Tensor], Tensor]) -> None:
        block, self._layout = algorithm.blocks[name], algorithm.layout(name)
        self._leaves = {key: place(leaf.clone()) for key, leaf in self._layout.leaves(views[name]["loc"]).items()}
        self.params = list(self._leaves.values())
        self._centre: list[Tensor] = []
        if isinstance(block.prior, GaussianPrior):
            centre = self._layout.leaves(block.prior.centre(given, views))
            self._centre = [c if c.dim() == p.dim() else c.unsqueeze(0) for c, p in zip(centre.values(), self.params, strict=True)]
            strength = weight.unsqueeze(-1) / block.prior.variance(given, views)
            if strength.shape[-1] == 1:
                self._strength = [strength.view(-1, *[1] * (p.dim() - 1)) for p in self.params]
            else:
                self._strength = list(self._layout.leaves(strength).values())
            same = strength[:1, :1]
            self._uniform = float(same) if bool((strength == same).all()) else None

    def leaves(self, live: list[Tensor], noise: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._leaves, live, strict=True))

    def divergence(self, live: list[Tensor], given: Server, views: View) -> Tensor | None:
        return None

    def pulled(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        if not self._centre:
            return grads
        active = len(params[0])
        pull = torch._foreach_sub(params, [c[:active].expand_as(p) for c, p in zip(self._centre, params, strict=True)])
        torch._foreach_mul_(pull, [k[:active] for k in self._strength] if self._uniform is None else self._uniform)
        torch._foreach_add_(pull, grads)
        return list(pull)

    def belief(self) -> Tensors:
        return {"loc": self._layout.ravel(self._leaves)}


class _Vector:
    """A block with an entropy, or under a prior of another kind: its tensors [C, D], their KL through autograd."""

    def __init__(self, algorithm: Algorithm, name: str, views: View, weight: Tensor) -> None:
        self._algorithm, self._name, self._weight = algorithm, name, weight
        self._belief = {key: t.clone(memory_format=torch.contiguous_format) for key, t in views[name].items()}
        self.params = list(self._belief.values())

    def leaves(self, live: list[Tensor], noise: dict[str, Tensor]) -> dict[str, Tensor]:
        return drawn(self._algorithm, self._name, dict(zip(self._belief, live, strict=True)), noise)

    def divergence(self, live: list[Tensor], given: Server, views: View) -> Tensor:
        belief = dict(zip(self._belief, live, strict=True))
        return self._weight[: len(live[0])] * self._algorithm.divergence(self._name, belief, given, views)

    def pulled(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return grads

    def belief(self) -> Tensors:
        return self._belief


def drawn(algorithm: Algorithm, name: str, belief: Tensors, noise: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leaves of a block's draws [C, S, *shape] where there is noise for it [C, S, D], else of its mean [C, *shape]."""
    posterior, layout = algorithm.blocks[name].posterior, algorithm.layout(name)
    if name not in noise:
        return layout.leaves(posterior.sample(belief))
    return layout.leaves(posterior.sample({key: t.unsqueeze(1) for key, t in belief.items()}, noise[name]))


def descend(
    algorithm: Algorithm,
    phase: Descend,
    given: Server,
    views: View,
    plan: Plan,
    forward: Forward,
    *,
    place: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    batch: Batch | None = None,
) -> tuple[View, Info]:
    """All steps of a `Descend` for a chunk of clients.

    Args:
        algorithm: Whose phase it is.
        phase: The phase.
        given: What the server sent to everyone.
        views: [C, ...] throughout.
        plan: Batches and noise.
        forward: The kernel's way to run a module.
        place: Memory layout of a leaf.
        batch: The batch that `Repeat` shares among its phases, if any.
    """
    energy, chunk = phase.energy, len(views["n"])
    scale, weight = energy.scales(views["n"])
    blocks: list[_Leaves | _Vector] = []
    for name in phase.blocks:
        block = algorithm.blocks[name]
        simple = not block.stochastic and isinstance(block.prior, Flat | GaussianPrior)
        blocks.append(_Leaves(algorithm, name, given, views, weight, place) if simple else _Vector(algorithm, name, views, weight))
    others = [name for name in energy.parts if name not in phase.blocks]
    fixed = {
        key: place(leaf)
        for name in others
        if not algorithm.blocks[name].stochastic
        for key, leaf in drawn(algorithm, name, views[name], {}).items()
    }
    moving = [name for name in energy.parts if name in phase.blocks or algorithm.blocks[name].stochastic]
    still = batch is None and phase.batch_size is None
    still &= not any(key.startswith("body.") for name in moving for key in algorithm.layout(name).names)
    network = Network(algorithm.module(views["n"]), forward, still=still)

    params = [p for block in blocks for p in block.params]
    ends = list(accumulate(len(block.params) for block in blocks))
    spans = [slice(end - len(block.params), end) for end, block in zip(ends, blocks, strict=True)]
    state, rate = phase.optimiser.init(params), rate_at(phase.optimiser.rate, given["round"], given["rounds"])
    shapes = phase.noise(algorithm)
    total = torch.zeros_like(views["n"])
    steps = range(phase.steps or phase.epochs) if batch is not None else range(int(plan.steps.max()))
    front = views
    for t in steps:
        active = chunk if batch is not None else plan.active(t)
        data = batch if batch is not None else plan.batch(t, active)
        noise = plan.noise(shapes, active)
        start = perf_counter()
        if len(front["n"]) != active:
            front = tree_map(lambda leaf, a=active: leaf[:a], views)
        live = [p[:active].detach().requires_grad_() for p in params]
        leaves = {key: leaf[:active] for key, leaf in fixed.items()}
        for name in others:
            if name in noise:
                leaves |= drawn(algorithm, name, front[name], noise)
        extra = []
        for block, of in zip(blocks, spans, strict=True):
            leaves |= block.leaves(live[of], noise)
            if (divergence := block.divergence(live[of], given, front)) is not None:
                extra.append(divergence)
        losses = algorithm.likelihood.nll(network(leaves, data["x"]), data["y"].unsqueeze(1))
        share = data["weight"] / data["weight"].sum(-1, keepdim=True)
        nll = (losses.mean(1) * share).sum(-1)
        loss = sum(extra, scale[:active] * nll)
        grads = list(torch.autograd.grad(loss.sum(), live))
        with torch.no_grad():
            now = [p[:active] for p in params]
            grads = [g for block, of in zip(blocks, spans, strict=True) for g in block.pulled(now[of], grads[of])]
            phase.optimiser.update_(now, grads, state, rate, active)
            total[:active] += nll.detach()
        plan.seconds["steps"] += perf_counter() - start
    beliefs = {name: block.belief() for name, block in zip(phase.blocks, blocks, strict=True)}
    count = torch.as_tensor(plan.steps, dtype=total.dtype, device=total.device) if batch is None else float(len(steps))
    return views | beliefs, {"nll": total / count}
