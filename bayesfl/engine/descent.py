"""Gradient steps for a chunk of clients at once, in place: what the batched kernels share. They differ in the way through the model.

Nothing here is mapped: draws, priors and the optimiser are algebra on [C, ...]. Point blocks are sliced into leaves once a
phase; their Gaussian prior is added to the gradient analytically. Blocks with an entropy stay vectors, and their draws and their
KL go through autograd. Clients come longest first, so those still at work are a prefix, updated through views.
"""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Batch, GaussianPrior, Info, Server, Tensors, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Flat
from bayesfl.engine.network import Kernel, Network, Through
from bayesfl.engine.plan import Plan
from bayesfl.optim import rate_at


class _Vectors:
    """A block's tensors [C, D], copied, for an optimiser to move."""

    def __init__(self, algorithm: Algorithm, name: str, tensors: Tensors) -> None:
        self._algorithm, self._name, self._layout = algorithm, name, algorithm.layout(name)
        self.belief = {key: t.clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}
        self.params = self.now = list(self.belief.values())

    def narrow(self, active: int) -> None:
        """From here on only the first `active` clients move."""
        self.now = [p[:active] for p in self.params]


class _Points(_Vectors):
    """A point block; its Gaussian prior's pull is added to the gradient, or solved after a step. Leaves and slopes are views that stay."""

    def __init__(self, algorithm: Algorithm, name: str, given: Server, views: View, weight: Tensor, prox: bool) -> None:
        super().__init__(algorithm, name, views[name])
        prior, loc = algorithm.blocks[name].prior, self.belief["loc"]
        self._slope, self._share = torch.zeros_like(loc), None
        self._added = self._solved = False
        if isinstance(prior, GaussianPrior):
            self._added, self._solved = not prox, prox
            self._centre = prior.centre(given, views).expand_as(loc)
            self._strength = weight.view(-1, *[1] * (loc.dim() - 1)) / prior.variance(given, views)
            self._pull = torch.empty_like(loc)

    def narrow(self, active: int) -> None:
        super().narrow(active)
        self._leaves, self._slopes = self._layout.leaves(self.now[0]), self._layout.leaves(self._slope[:active])

    def leaves(self, noise: Tensors) -> tuple[Tensors, Tensors]:
        return self._leaves, self._slopes

    def gradients(self, given: Server, views: View) -> list[Tensor]:
        (loc,), active = self.now, len(self.now[0])
        slope = self._slope[:active]
        if self._added:
            pull = torch.sub(loc, self._centre[:active], out=self._pull[:active])
            slope.addcmul_(pull, self._strength[:active])
        return [slope]

    def solve(self, rate: Any) -> None:
        """The proximal step of a prior that was left out of the gradient, at the optimiser's pace: part of the way to its centre."""
        if not self._solved:
            return
        (loc,), active = self.now, len(self.now[0])
        if isinstance(rate, Tensor):
            pull = torch.mul(rate, self._strength[:active], out=self._pull[:active])
            loc.lerp_(self._centre[:active], rate.copy_(pull).add_(1).reciprocal_().mul_(pull))
        else:
            if self._share is None:  # constant in a phase
                self._share = self._strength * rate / (1 + self._strength * rate)
            loc.lerp_(self._centre[:active], self._share[:active])


class _Beliefs(_Vectors):
    """A block with an entropy, or under a prior of another kind: its KL and its draws go through autograd."""

    def __init__(self, algorithm: Algorithm, name: str, given: Server, views: View, weight: Tensor) -> None:
        super().__init__(algorithm, name, views[name])
        self._weight = weight

    def leaves(self, noise: Tensors) -> tuple[Tensors, Tensors]:
        self._live = {key: p.detach().requires_grad_() for key, p in zip(self.belief, self.now, strict=True)}
        self._weights = draw(self._algorithm, self._name, self._live, noise)
        self._slope = torch.zeros_like(self._weights)
        return self._layout.leaves(self._weights.detach()), self._layout.leaves(self._slope)

    def gradients(self, given: Server, views: View) -> list[Tensor]:
        divergence = self._weight[: len(self._slope)] * self._algorithm.divergence(self._name, self._live, given, views)
        ends = [self._slope, torch.ones_like(divergence)]
        return list(torch.autograd.grad([self._weights, divergence], list(self._live.values()), ends))


def draw(algorithm: Algorithm, name: str, belief: Tensors, noise: dict[str, Tensor]) -> Tensor:
    """Draws [C, S, D] of a block where there is noise for it [C, S, noise size], else its mean [C, D].

    Of M copies the draws of all [C, S M, D], or their means [C, M, D].
    """
    block = algorithm.blocks[name]
    if name not in noise:
        return block.posterior.sample(belief)
    own = algorithm.noise_of_copies(name, noise[name])
    drawn = block.posterior.sample({key: t.unsqueeze(1) for key, t in belief.items()}, own)
    return drawn if block.copies is None else drawn.flatten(1, 2)


def _listed(state: Any, places: dict[str, list[str]]) -> Any:
    """An optimiser's state for one nest of blocks {block: {tensor}} as that for a list of the same tensors, copied."""
    if not isinstance(state, dict):
        return state.clone()
    if state.keys() == places.keys():
        return [state[name][key].clone(memory_format=torch.contiguous_format) for name, keys in places.items() for key in keys]
    return {key: _listed(value, places) for key, value in state.items()}


def _nested(state: Any, places: dict[str, list[str]]) -> Any:
    """The reverse."""
    if isinstance(state, list):
        rest = iter(state)
        return {name: {key: next(rest) for key in keys} for name, keys in places.items()}
    return {key: _nested(value, places) for key, value in state.items()} if isinstance(state, dict) else state


def _penalised(
    energy: Energy, through: Through, losses: Tensor, slope: Tensor, data: Batch, given: Server, front: View
) -> tuple[Tensor | None, Tensor | None]:
    """Slopes of an energy's penalty at the outputs and at the features, None where it does not read them.

    The losses come in as numbers: what the penalty's slope at them is worth at the outputs is `slope` [..., B, O], that of each loss.
    """
    assert energy.penalty is not None
    with torch.enable_grad():
        outputs, each = through.outputs.detach().requires_grad_(), losses.detach().requires_grad_()
        features = None if through.features is None else through.features.detach().requires_grad_()
        value = energy.penalty(features, outputs, each, data, given, front)
        if not value.requires_grad:
            return None, None
        ends = [outputs, each] if features is None else [outputs, each, features]
        at_outputs, at_losses, at_features = [*torch.autograd.grad(value.sum(), ends, allow_unused=True), None][:3]
    if at_losses is not None:
        through_losses = at_losses.unsqueeze(-1) * slope
        at_outputs = through_losses if at_outputs is None else at_outputs + through_losses
    return at_outputs, at_features


def descend(
    algorithm: Algorithm, phase: Descend, given: Server, views: View, plan: Plan, kernel: Kernel, *, batch: Batch | None = None
) -> tuple[View, Info]:
    """All steps of a `Descend` for a chunk of clients.

    Args:
        algorithm: Whose phase it is.
        phase: The phase.
        given: What the server sent to everyone.
        views: [C, ...] throughout.
        plan: Batches and noise.
        kernel: How a chunk goes through the model.
        batch: The batch that `Repeat` shares among its phases, if any.
    """
    energy, chunk, copies = phase.energy, len(views["n"]), algorithm.copies(phase.energy.parts)
    scale, weight = energy.scales(views["n"])
    rate = rate_at(phase.optimiser.rate, given["round"], given["rounds"])
    blocks: dict[str, _Points | _Beliefs] = {}
    for name in phase.blocks:
        block = algorithm.blocks[name]
        if not block.stochastic and isinstance(block.prior, Flat | GaussianPrior):
            blocks[name] = _Points(algorithm, name, given, views, weight, phase.prox)
        else:
            blocks[name] = _Beliefs(algorithm, name, given, views, weight)
    others = [name for name in energy.parts if name not in phase.blocks]
    moving = [name for name in others if algorithm.blocks[name].stochastic]
    still = batch is None and phase.batch_size is None
    still &= not any(key.startswith("body.") for name in moving for key in algorithm.layout(name).names)
    network = Network(algorithm.module(views["n"]), kernel, still=still)

    params = [p for block in blocks.values() for p in block.params]
    places = {name: list(block.belief) for name, block in blocks.items()}
    kept = phase.persist if phase.persist in views else None
    state = phase.optimiser.init(params) if kept is None else _listed(views[kept], places)
    shapes = phase.noise(algorithm)
    total = torch.zeros_like(views["n"])
    steps = range(phase.steps or phase.epochs) if batch is not None else range(int(plan.steps.max()))
    front, fixed, factor, sums, before = views, {}, scale, total, 0
    for t in steps:
        active = chunk if batch is not None else plan.active(t)
        data = batch if batch is not None else plan.batch(t, active)
        noise = plan.noise(shapes, active)
        start = perf_counter()
        if active != before:  # some are done: views of the others are made once
            before, front, factor = active, tree_map(lambda leaf, a=active: leaf[:a], views), scale[:active].unsqueeze(-1)
            sums = total[:active]
            fixed = {k: v for name in others if name not in moving for k, v in algorithm.layout(name).leaves(front[name]["loc"]).items()}
            for block in blocks.values():
                block.narrow(active)
        leaves, slopes = dict(fixed), {}
        for name in moving:
            leaves |= algorithm.layout(name).leaves(draw(algorithm, name, front[name], noise))
        for block in blocks.values():
            now, to = block.leaves(noise)
            leaves, slopes = leaves | now, slopes | to
        through = network(leaves, data["x"], slopes)
        outputs, lifted = through.outputs, through.lifted
        share = energy.shares(given, front, data)
        losses, slope = algorithm.likelihood.nll_and_slope(outputs, data["y"].unsqueeze(1) if lifted else data["y"])
        at_outputs, at_features = None, None
        if energy.penalty is not None:
            at_outputs, at_features = _penalised(energy, through, losses, slope, data, given, front)
        if copies:  # [C, S M, B] of which every copy's draws count alike
            share = share if share.dim() > 2 else share.unsqueeze(1).expand(-1, copies, -1)
            losses = losses.unflatten(1, (-1, copies))
            weights = (share * factor.unsqueeze(-1)).unsqueeze(1).expand_as(losses).flatten(1, 2) / losses.shape[1]
            losses = losses.mean(1)
        elif lifted:
            weights = (share * factor).unsqueeze(1) / outputs.shape[1]
            losses = losses.mean(1)
        else:
            weights = share * factor
        slope.mul_(weights.unsqueeze(-1))
        if at_outputs is not None:
            slope.addcmul_(at_outputs, factor.unsqueeze(-1))
        through.back(slope, None if at_features is None else at_features * factor.unsqueeze(-1))
        grads = [g for block in blocks.values() for g in block.gradients(given, front)]
        now = [p for block in blocks.values() for p in block.now]
        phase.optimiser.update_(now, grads, state, rate, active)
        if phase.prox:
            points = [block for block in blocks.values() if isinstance(block, _Points)]  # all of them, of one tensor each
            for block, pace in zip(points, phase.optimiser.pace(now, state, rate), strict=True):
                block.solve(pace)
        sums.add_((losses * share).flatten(1).sum(-1))
        plan.seconds["steps"] += perf_counter() - start
    count = torch.as_tensor(plan.steps, dtype=total.dtype, device=total.device) if batch is None else float(len(steps))
    done = {} if kept is None else {kept: _nested(state, places)}
    return views | {name: block.belief for name, block in blocks.items()} | done, {"nll": total / count}
