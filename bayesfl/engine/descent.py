"""Gradient steps for a chunk of clients at once, in place: what the batched kernels share. They differ in the way through the model.

Nothing here is mapped: draws, priors and the optimiser are algebra on [C, ...]. Point blocks are sliced into leaves once a
phase; their Gaussian prior is added to the gradient analytically. Blocks with an entropy stay vectors, and their draws and their
KL go through autograd. Clients come longest first, so those still at work are a prefix, updated through views.
"""

from collections.abc import Callable
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.blocks import Algorithm
from bayesfl.engine.network import Kernel, Network
from bayesfl.engine.plan import Plan
from bayesfl.optim import rate_at
from bayesfl.phases import Descend
from bayesfl.priors import Flat
from bayesfl.protocols import Batch, GaussianPrior, Info, Server, Tensors, View


class _Leaves:
    """A point block as leaves [C, *shape], its Gaussian prior's pull added to their gradients."""

    def __init__(
        self, algorithm: Algorithm, name: str, given: Server, views: View, weight: Tensor, place: Callable[[Tensor], Tensor]
    ) -> None:
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

    def leaves(self, params: list[Tensor], noise: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._leaves, params, strict=True))

    def gradients(self, params: list[Tensor], slopes: dict[str, Tensor], given: Server, views: View) -> list[Tensor]:
        grads = [slopes[name] for name in self._leaves]
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
    """A block with an entropy, or under a prior of another kind: its tensors [C, D], their KL and their draws through autograd."""

    def __init__(self, algorithm: Algorithm, name: str, views: View, weight: Tensor) -> None:
        self._algorithm, self._name, self._weight = algorithm, name, weight
        self._belief = {key: t.clone(memory_format=torch.contiguous_format) for key, t in views[name].items()}
        self.params = list(self._belief.values())

    def leaves(self, params: list[Tensor], noise: dict[str, Tensor]) -> dict[str, Tensor]:
        self._live = {key: p.detach().requires_grad_() for key, p in zip(self._belief, params, strict=True)}
        self._weights = draw(self._algorithm, self._name, self._live, noise)
        return self._algorithm.layout(self._name).leaves(self._weights.detach())

    def gradients(self, params: list[Tensor], slopes: dict[str, Tensor], given: Server, views: View) -> list[Tensor]:
        slope = self._algorithm.layout(self._name).ravel(slopes)
        divergence = self._weight[: len(slope)] * self._algorithm.divergence(self._name, self._live, given, views)
        return list(torch.autograd.grad([self._weights, divergence], list(self._live.values()), [slope, torch.ones_like(divergence)]))

    def belief(self) -> Tensors:
        return self._belief


def draw(algorithm: Algorithm, name: str, belief: Tensors, noise: dict[str, Tensor]) -> Tensor:
    """Draws [C, S, D] of a block where there is noise for it [C, S, noise size], else its mean [C, D]."""
    posterior = algorithm.blocks[name].posterior
    if name not in noise:
        return posterior.sample(belief)
    return posterior.sample({key: t.unsqueeze(1) for key, t in belief.items()}, noise[name])


def descend(
    algorithm: Algorithm,
    phase: Descend,
    given: Server,
    views: View,
    plan: Plan,
    kernel: Kernel,
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
        kernel: How a chunk goes through the model.
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
        for key, leaf in algorithm.layout(name).leaves(views[name]["loc"]).items()
    }
    moving = [name for name in others if algorithm.blocks[name].stochastic]
    wanted = frozenset(key for name in phase.blocks for key in algorithm.layout(name).names)
    still = batch is None and phase.batch_size is None
    still &= not any(key.startswith("body.") for name in moving for key in algorithm.layout(name).names)
    network = Network(algorithm.module(views["n"]), kernel, wanted, still=still)

    params = [p for block in blocks for p in block.params]
    ends = list(accumulate(len(block.params) for block in blocks))
    spans = [slice(end - len(block.params), end) for end, block in zip(ends, blocks, strict=True)]
    state, rate = phase.optimiser.init(params), rate_at(phase.optimiser.rate, given["round"], given["rounds"])
    shapes = phase.noise(algorithm)
    total = torch.zeros_like(views["n"])
    steps = range(phase.steps or phase.epochs) if batch is not None else range(int(plan.steps.max()))
    front, now, others_now, factor = views, params, fixed, scale.unsqueeze(-1)
    for t in steps:
        active = chunk if batch is not None else plan.active(t)
        data = batch if batch is not None else plan.batch(t, active)
        noise = plan.noise(shapes, active)
        start = perf_counter()
        if active != len(factor):  # some are done: views of the others are made once
            front = tree_map(lambda leaf, a=active: leaf[:a], views)
            now = [p[:active] for p in params]
            others_now = {key: leaf[:active] for key, leaf in fixed.items()}
            factor = scale[:active].unsqueeze(-1)
        leaves = dict(others_now)
        for name in moving:
            leaves |= algorithm.layout(name).leaves(draw(algorithm, name, front[name], noise))
        for block, of in zip(blocks, spans, strict=True):
            leaves |= block.leaves(now[of], noise)
        outputs, lifted, back = network(leaves, data["x"])
        share = energy.shares(given, front, data)
        losses, slope = algorithm.likelihood.nll_and_slope(outputs, data["y"].unsqueeze(1) if lifted else data["y"])
        weights = share * factor
        if lifted:
            losses, weights = losses.mean(1), weights.unsqueeze(1) / outputs.shape[1]
        assert back is not None
        _, slopes = back(slope.mul_(weights.unsqueeze(-1)))
        grads = [g for block, of in zip(blocks, spans, strict=True) for g in block.gradients(now[of], slopes, given, front)]
        phase.optimiser.update_(now, grads, state, rate, active)
        total[:active] += torch.linalg.vecdot(losses, share)
        plan.seconds["steps"] += perf_counter() - start
    beliefs = {name: block.belief() for name, block in zip(phase.blocks, blocks, strict=True)}
    count = torch.as_tensor(plan.steps, dtype=total.dtype, device=total.device) if batch is None else float(len(steps))
    return views | beliefs, {"nll": total / count}
