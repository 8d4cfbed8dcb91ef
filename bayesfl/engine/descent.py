"""Gradient steps for a chunk of clients at once, in place; the batched kernels share them and
differ in how they compute the model.

Nothing here uses vmap: draws, priors and the optimiser are algebra on [C, ...]. Point blocks are
sliced into leaves once in a phase, and the gradient of their Gaussian prior is added analytically.
Blocks with draws stay vectors, and autograd differentiates their draws and KL. Clients are ordered
by decreasing number of steps, so those still training are a prefix, updated through views.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import Inputs
from bayesfl.base.protocols import Batch, Info, Server, Tensors, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.energy import Elsewhere, Energy
from bayesfl.composition.phases import Descend, steps_on_batch
from bayesfl.composition.priors import Flat, Normal, Tilt, is_normal
from bayesfl.engine.network import Kernel, Network, Rows, Through
from bayesfl.engine.plan import PhasePlan
from bayesfl.models.trial import draws_in_training, lively
from bayesfl.optim import rate_at
from bayesfl.posteriors.point import Point

_LOCAL = threading.local()


class Descent:
    """Run a `Descend` for a chunk of clients: it holds the parts of the predictor, the energy of
    the data, and the optimiser's state.

    Trained blocks are copied once and then updated in place, for the first clients of the chunk,
    which are still training.

    Args:
        algorithm: The algorithm with the phase.
        phase: The phase.
        given: The entries that every client received this round.
        views: The clients' views at the start of the phase, [C, ...] throughout.
        kernel: Kernel that computes the model for a chunk.
        still: Whether every step uses the same examples, in the order of the phase's plan.
        shared: Whether every step uses one batch, which a `Repeat` gives to its phases.
        alone: Whether there is only one client, whose slopes autograd computes.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        phase: Descend,
        given: Server,
        views: View,
        kernel: Kernel,
        *,
        still: bool,
        shared: bool,
        alone: bool,
    ) -> None:
        self._phase, self._views = phase, views
        self._rate = rate_at(phase.optimiser.rate, given["round"], given["rounds"])
        held = [_Held(algorithm, name) for name in phase.energy.parts if name not in phase.blocks]
        self._trained = [
            _trained(algorithm, phase, name, given, views, alone=alone) for name in phase.blocks
        ]
        # The forward passes write the new statistics into these.
        self._buffers = {
            name: _Vectors(algorithm, name, views[name])
            for name in algorithm.whole(phase.energy.parts)
            if isinstance(algorithm.blocks[name], Buffers)
        }
        self._parts = (*held, *self._trained)
        self._losses = _Losses(algorithm, phase.energy, given, views)
        self._others = [
            _Other(algorithm, name, weights(algorithm, given, views), kernel, len(views["n"]))
            for name, weights in phase.energy.at.items()
        ]
        self._one_batch = still or shared
        self._at: dict[str, Elsewhere] = {}
        drawn = [name for part in held if part.drawn for name in part.layout.names]
        still &= not any(name.startswith("body.") for name in drawn) and not lively(algorithm.model)
        self._network = Network(algorithm.module(views["n"], train=True), kernel, still=still)
        self._beliefs = {
            name: block.belief for name, block in zip(phase.blocks, self._trained, strict=True)
        }
        self._persist = phase.persist
        self._narrow(len(views["n"]))
        self._state = (
            _listed(views[self._persist], self._beliefs)
            if self._persist in views
            else phase.optimiser.init(self._now)
        )

    def step(
        self, active: int, data: Batch, noise: Tensors, draws: tuple[Sequence[int] | None, int]
    ) -> None:
        """Take one step for the first c = `active` clients on examples [c, B, ...], with noise
        {block: [c, S, size]}.

        The model's own random operations use the addresses `draws`, see `PhasePlan.draws`.
        """
        if active != self._active:
            self._narrow(active)
        rows = Rows(data["weight"], *draws)
        through = self._forward(data["x"], noise, rows)
        if self._others:
            if not self._at or not self._one_batch:
                self._at = {one.name: one(data["x"], rows) for one in self._others}
            data = data | {"at": self._at}
        through.back(*self._losses.slopes(through, data))
        self._move()

    def end(self, steps: Tensor | int) -> tuple[View, Info]:
        """Return the final views and the clients' mean losses in nats, after `steps` [C], or one
        number for all.
        """
        kept = {}
        if self._persist is not None and self._state is not None:
            kept[self._persist] = _nested(self._state, self._beliefs, self._views["n"])
        moved = {name: block.belief for name, block in self._buffers.items()}
        if self._phase.counts is not None:
            n = self._views["n"]
            kept[self._phase.counts] = torch.as_tensor(steps).to(n).expand(len(n)).clone()
        return self._views | self._beliefs | moved | kept, {"nll": self._losses.total / steps}

    def _narrow(self, active: int) -> None:
        """Continue with the first `active` clients; views of their tensors are made once, not in
        every step.
        """
        front = tree_map(lambda t: t[:active], self._views)
        for part in (*self._parts, *self._buffers.values(), self._losses, *self._others):
            part.narrow(front)
        self._at = {}
        self._active, self._now = active, [p for block in self._trained for p in block.now]

    def _forward(self, x: Inputs, noise: Tensors, rows: Rows) -> Through:
        """Compute the model; its backward pass writes slopes for the trained blocks."""
        leaves: Tensors = {
            key: leaf for block in self._buffers.values() for key, leaf in block.whole().items()
        }
        slopes: Tensors = {}
        for part in self._parts:
            own, to = part.leaves(noise)
            leaves |= own
            slopes |= to
        return self._network(leaves, x, slopes, rows)

    def _move(self) -> None:
        """Update the trained blocks: the optimiser's step, then the proximal steps of priors that
        are not part of the slopes.
        """
        optimiser = self._phase.optimiser
        slopes = [slope for block in self._trained for slope in block.slopes()]
        optimiser.update_(self._now, slopes, self._state, self._rate, self._active)
        if self._phase.prox:  # all blocks are then points with one tensor each
            for block, pace in zip(
                self._trained, optimiser.pace(self._now, self._state, self._rate), strict=True
            ):
                block.solve(pace)


def descend(
    algorithm: Algorithm,
    phase: Descend,
    given: Server,
    views: View,
    plan: PhasePlan,
    kernel: Kernel,
    *,
    batch: Batch | None = None,
    alone: bool = False,
) -> tuple[View, Info]:
    """Take all steps of a `Descend` for a chunk of clients, and return their views and the mean
    losses.

    Args:
        algorithm: The algorithm with the phase.
        phase: The phase.
        given: The entries that every client received this round.
        views: The clients' views, [C, ...] throughout.
        plan: Plan of the batches and the noise.
        kernel: Kernel that computes the model for a chunk.
        batch: The batch that `Repeat` shares among its phases; None outside a `Repeat`.
        alone: Whether the chunk is one client, whose slopes autograd computes.
    """
    descent = Descent(
        algorithm,
        phase,
        given,
        views,
        kernel,
        still=plan.still,
        shared=batch is not None,
        alone=alone,
    )
    drawing = draws_in_training(algorithm.model)
    for active, data, noise in plan.walk(phase, phase.noise(algorithm), batch):
        start = perf_counter()
        descent.step(active, data, noise, plan.draws(active) if drawing else (None, 0))
        plan.seconds["steps"] += perf_counter() - start
    return descent.end(
        torch.as_tensor(plan.steps).to(views["n"]) if batch is None else steps_on_batch(phase)
    )


def _beside(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with trailing axes of size 1 added until it has as many axes as `like`."""
    return t[(..., *(like.dim() - t.dim()) * (None,))]


class _Losses:
    """Compute the data's part of an energy for a chunk of clients, and sum their batches' mean
    losses, [C].
    """

    def __init__(self, algorithm: Algorithm, energy: Energy, given: Server, views: View) -> None:
        self._likelihood, self._energy, self._given = algorithm.likelihood, energy, given
        self._copies = algorithm.copies(energy.parts)
        self._scale, _ = energy.scales(views["n"])
        self.total = torch.zeros_like(views["n"])

    def narrow(self, front: View) -> None:
        """Continue with the clients of `front` [c, ...], the first of the chunk."""
        active = len(front["n"])
        self._front = front
        self._factor = self._scale[:active].unsqueeze(-1)
        self._sum = self.total[:active]

    def slopes(self, through: Through, data: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the slopes of a batch at the outputs and, if a penalty needs them, at the
        features; add its losses to the sum.
        """
        y = data["y"].unsqueeze(1) if through.lifted else data["y"]
        losses, slope = self._likelihood.nll_and_slope(through.outputs, y)
        at_outputs, at_features = self._penalty(through, losses, slope, data)
        self._weigh(losses, slope, data, lifted=through.lifted)
        if at_outputs is not None:
            slope.addcmul_(at_outputs, _beside(self._factor, slope))
        return slope, None if at_features is None else at_features * _beside(
            self._factor, at_features
        )

    def _weigh(self, losses: Tensor, slope: Tensor, data: Batch, *, lifted: bool) -> None:
        """Add the weighted mean of `losses` to the sum, and multiply each example's `slope` by its
        factor in the energy, in place.

        They are [c, B] and [c, B, O], or [c, S, B] and [c, S, B, O] if lifted; M copies have S M
        draws. If an example has several labels, further axes precede O.
        """
        share, factor = self._energy.shares(self._given, self._front, data), self._factor
        event = slope.dim() - losses.dim()  # axes of an example's outputs
        if self._copies:
            # Each copy has its own draws, and its losses are averaged over these only.
            losses = losses.unflatten(1, (-1, self._copies))
            slope = slope.unflatten(1, (-1, self._copies))
            share, factor = share if share.dim() > 2 else share.unsqueeze(1), factor.unsqueeze(-1)
        weight = share * factor
        if lifted:
            weight, losses = weight.unsqueeze(1) / losses.shape[1], losses.mean(1)
        slope.mul_(weight[(..., *event * (None,))])
        self._sum.add_((losses * share).flatten(1).sum(-1))

    def _penalty(
        self, through: Through, losses: Tensor, slope: Tensor, data: Batch
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the slopes of the energy's penalty at the outputs and at the features, None where
        the penalty does not depend on them.

        The losses enter as constants; the penalty's slope at them is propagated to the outputs with
        `slope` [..., B, O], the slope of each loss.
        """
        if self._energy.penalty is None:
            return None, None
        with torch.enable_grad():
            outputs = through.outputs.detach().requires_grad_()
            each = losses.detach().requires_grad_()
            features = (
                None if through.features is None else through.features.detach().requires_grad_()
            )
            value = self._energy.penalty(features, outputs, each, data, self._given, self._front)
            if value.shape[:1] != outputs.shape[:1]:
                raise ValueError(
                    f"the energy's penalty returns shape {list(value.shape)} for {len(outputs)} "
                    "clients; it must be one number for each, so reduce only over the last axes, "
                    "as .sum(-1) or (batch['weight'] * each).sum(-1)"
                )
            if not value.requires_grad:
                return None, None
            ends = [outputs, each] if features is None else [outputs, each, features]
            at_outputs, at_losses, at_features = [
                *torch.autograd.grad(value.sum(), ends, allow_unused=True),
                None,
            ][:3]
        if at_losses is not None:
            through_losses = _beside(at_losses, slope) * slope
            at_outputs = through_losses if at_outputs is None else at_outputs + through_losses
        return at_outputs, at_features


class _Held:
    """Provide a part of the predictor that is not trained: constant, or drawn in every step."""

    def __init__(self, algorithm: Algorithm, name: str) -> None:
        self._algorithm, self._name, self.layout = algorithm, name, algorithm.layout(name)
        self.drawn = algorithm.blocks[name].stochastic

    def narrow(self, front: View) -> None:
        """Continue with the clients of `front` [c, ...]."""
        self._belief = front[self._name]
        self._leaves = (
            {}
            if self.drawn
            else self.layout.leaves(draw(self._algorithm, self._name, self._belief, {}))
        )

    def leaves(self, noise: Tensors) -> tuple[Tensors, Tensors]:
        """Return the leaves of a step; there are no slopes, because nothing is trained."""
        if self.drawn:
            return self.layout.leaves(draw(self._algorithm, self._name, self._belief, noise)), {}
        return self._leaves, {}


class _Other:
    """Compute the features and outputs that a penalty needs, from the network at other weights than
    those in training, in evaluation mode.

    Args:
        algorithm: The algorithm.
        name: Their name in the penalty.
        leaves: Parameters and buffers by name, [C, *shape], or [*shape] if they are the same for
            all clients.
        kernel: Kernel that computes the model for a chunk.
        clients: The number of clients C.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        name: str,
        leaves: Mapping[str, Tensor],
        kernel: Kernel,
        clients: int,
    ) -> None:
        module = algorithm.module(next(iter(leaves.values())))
        axes = {key: t.dim() for key, t in (*module.named_parameters(), *module.named_buffers())}
        self._whole = {
            key: leaf if leaf.dim() > axes[key] else leaf.expand(clients, *leaf.shape)
            for key, leaf in leaves.items()
        }
        self._network, self.name = Network(module, kernel), name

    def narrow(self, front: View) -> None:
        """Continue with the clients of `front` [c, ...], the first of the chunk."""
        self._leaves = {key: leaf[: len(front["n"])] for key, leaf in self._whole.items()}

    def __call__(self, x: Inputs, rows: Rows) -> Elsewhere:
        """Compute features and outputs at `x` [c, B, ...], without gradients."""
        through = self._network(self._leaves, x, rows=replace(rows, keys=None))
        return Elsewhere(through.features, through.outputs)


class _Vectors:
    """Hold copies of a block's tensors [C, ...], which an optimiser updates."""

    def __init__(self, algorithm: Algorithm, name: str, tensors: Tensors) -> None:
        self._layout = algorithm.layout(name)
        self.belief = {
            key: t.clone(memory_format=torch.contiguous_format) for key, t in tensors.items()
        }

    def narrow(self, front: View) -> None:
        """Continue with the clients of `front` [c, ...], the first of the chunk."""
        self.now = [p[: len(front["n"])] for p in self.belief.values()]

    def whole(self) -> Tensors:
        """Return views of the first tensor in the shapes of the parameters or buffers."""
        return self._layout.leaves(self.now[0])

    def solve(self, pace: Tensor | float) -> None:
        """Do nothing; subclasses whose slopes leave out the prior take a proximal step.

        Args:
            pace: Rate of a proximal step, set by the preceding optimiser's step: a number, or a
                tensor that broadcasts with [C, ...].
        """


class _Points(_Vectors):
    """Train a point block with its Gaussian or linear prior, if it has one; its leaves and their
    slopes are views made once.

    The prior is part of the slopes or, with `prox`, solved after the optimiser's step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        name: str,
        belief: Tensors,
        prior: "_Gaussian | _Linear | None",
        *,
        prox: bool,
    ) -> None:
        super().__init__(algorithm, name, belief)
        self._whole = _workspace(name, self.belief["loc"])
        self._prior, self._prox = prior, prox

    def narrow(self, front: View) -> None:
        super().narrow(front)
        (self._loc,), self._slope = self.now, self._whole[: len(front["n"])]
        self._leaves, self._to = self._layout.leaves(self._loc), self._layout.leaves(self._slope)
        if self._prior is not None:
            self._prior.narrow(len(front["n"]))

    def leaves(self, noise: Tensors) -> tuple[Tensors, Tensors]:
        """Return the leaves, and the buffers for their slopes."""
        return self._leaves, self._to

    def slopes(self) -> list[Tensor]:
        """Return the energy's slope at the vector, including the prior's."""
        if self._prior is not None and not self._prox:
            self._prior.pull(self._loc, self._slope)
        return [self._slope]

    def solve(self, pace: Tensor | float) -> None:
        """Take the proximal step of the prior at the optimiser's pace."""
        if isinstance(self._prior, _Gaussian):  # `Descend` allows no other with `prox`
            self._prior.solve(self._loc, pace)


class _Kept:
    """Hold a slope without a copy, if nobody writes to it later."""

    now: Tensor

    def copy_(self, value: Tensor) -> None:
        """Keep a slope."""
        self.now = value


class _Leaves(_Vectors):
    """Train a point block of a single client, without a prior and with slopes by autograd, which
    the optimiser uses directly, without collecting them in a vector.
    """

    def narrow(self, front: View) -> None:
        """Continue with the client."""
        self._leaves = self._layout.leaves(self.belief["loc"])
        self._to: dict[str, Any] = {name: _Kept() for name in self._leaves}
        self.now = list(self._leaves.values())

    def leaves(self, noise: Tensors) -> tuple[Tensors, Tensors]:
        """Return the leaves, and the holders of their slopes."""
        return self._leaves, self._to

    def slopes(self) -> list[Tensor]:
        """Return the slope at every leaf."""
        return [kept.now for kept in self._to.values()]


def _workspace(name: str, like: Tensor) -> Tensor:
    """Return this thread's own uninitialised tensor for the slopes of a block, because allocating
    memory takes longer than a pass over it.
    """
    rooms = _LOCAL.__dict__.setdefault("rooms", {})
    room = rooms.get(name)
    if room is None or (room.shape, room.dtype, room.device) != (
        like.shape,
        like.dtype,
        like.device,
    ):
        room = rooms[name] = torch.empty_like(like)
    return room


class _Gaussian:
    """Apply a Gaussian prior to points like `loc` [C, ...], with constant centre and strength,
    weight / variance.
    """

    def __init__(
        self, prior: Normal, given: Server, views: View, loc: Tensor, weight: Tensor
    ) -> None:
        strength = weight.view(-1, *[1] * (loc.dim() - 1)) / prior.variance(given, views)
        room = torch.empty_like(loc, memory_format=torch.contiguous_format)
        self._whole = prior.centre(given, views).expand_as(loc), strength, room

    def narrow(self, active: int) -> None:
        """Continue with the first `active` clients."""
        self._centre, self._strength, self._room = (t[:active] for t in self._whole)
        self._share: Tensor | None = None

    def pull(self, loc: Tensor, slope: Tensor) -> None:
        """Add the prior's slope at `loc` to `slope`."""
        slope.addcmul_(torch.sub(loc, self._centre, out=self._room), self._strength)

    def solve(self, loc: Tensor, pace: Tensor | float) -> None:
        """Move `loc` towards the centre by the share pace k / (1 + pace k), for strength k."""
        if isinstance(pace, Tensor):
            pull = torch.mul(pace, self._strength, out=self._room)
            loc.lerp_(self._centre, pace.copy_(pull).add_(1).reciprocal_().mul_(pull))
        else:
            if self._share is None:  # it is constant within a phase if pace is a number
                self._share = self._strength * pace / (1 + self._strength * pace)
            loc.lerp_(self._centre, self._share)


class _Linear:
    """Apply a prior `Tilt` to points like `loc` [C, ...]; slope times weight is constant."""

    def __init__(
        self, prior: Tilt, given: Server, views: View, loc: Tensor, weight: Tensor
    ) -> None:
        slope = weight.view(-1, *[1] * (loc.dim() - 1)) * prior.slope(given, views)
        self._whole = slope.expand_as(loc)

    def narrow(self, active: int) -> None:
        """Continue with the first `active` clients."""
        self._slope = self._whole[:active]

    def pull(self, loc: Tensor, slope: Tensor) -> None:
        """Add the prior's slope, which is the same at every `loc`, to `slope`."""
        slope.add_(self._slope)


class _Beliefs(_Vectors):
    """Train a block with draws, or with a prior of another type: autograd differentiates its KL and
    its draws.
    """

    def __init__(
        self, algorithm: Algorithm, name: str, belief: Tensors, given: Server, weight: Tensor
    ) -> None:
        super().__init__(algorithm, name, belief)
        self._algorithm, self._name, self._given, self._whole = algorithm, name, given, weight

    def narrow(self, front: View) -> None:
        super().narrow(front)
        self._front, self._weight = front, self._whole[: len(front["n"])]

    def leaves(self, noise: Tensors) -> tuple[Tensors, Tensors]:
        """Return the leaves of a draw, and the buffers for their slopes."""
        self._live = {
            key: p.detach().requires_grad_() for key, p in zip(self.belief, self.now, strict=True)
        }
        self._drawn = draw(self._algorithm, self._name, self._live, noise)
        self._slope = torch.zeros_like(self._drawn)
        return self._layout.leaves(self._drawn.detach()), self._layout.leaves(self._slope)

    def slopes(self) -> list[Tensor]:
        """Return the energy's slopes at the posterior's tensors, through the draw and through
        the KL.
        """
        divergence = self._weight * self._algorithm.divergence(
            self._name, self._live, self._given, self._front
        )
        ends = [(self._drawn, self._slope), (divergence, torch.ones_like(divergence))]
        outputs, slopes = zip(*[pair for pair in ends if pair[0].requires_grad], strict=True)
        return list(torch.autograd.grad(outputs, list(self._live.values()), slopes))


def _trained(
    algorithm: Algorithm, phase: Descend, name: str, given: Server, views: View, *, alone: bool
) -> _Leaves | _Points | _Beliefs:
    """Return an object that trains a block of the phase."""
    block, belief, (_, weight) = (
        algorithm.blocks[name],
        views[name],
        phase.energy.scales(views["n"]),
    )
    if type(block.posterior) is not Point or not (
        type(block.prior) in (Flat, Tilt) or is_normal(block.prior)
    ):
        return _Beliefs(algorithm, name, belief, given, weight)
    # leaves of copies are not contiguous, which fused optimisers need
    whole = block.copies is None and phase.persist is None
    if alone and whole and type(block.prior) is Flat:
        return _Leaves(algorithm, name, belief)
    prior = None
    if is_normal(block.prior):
        prior = _Gaussian(block.prior, given, views, belief["loc"], weight)
    elif isinstance(block.prior, Tilt):
        prior = _Linear(block.prior, given, views, belief["loc"], weight)
    return _Points(algorithm, name, belief, prior, prox=phase.prox)


def draw(algorithm: Algorithm, name: str, belief: Tensors, noise: dict[str, Tensor]) -> Tensor:
    """Draw a block, [C, S, D], if there is noise for it [C, S, noise size], else return its mean
    [C, D].

    For M copies, the draws of all are [C, S M, D], or their means [C, M, D].
    """
    block = algorithm.blocks[name]
    if name not in noise:
        return block.posterior.sample(belief)
    own = algorithm.noise_of_copies(name, noise[name])
    drawn = block.posterior.sample({key: t.unsqueeze(1) for key, t in belief.items()}, own)
    return drawn if block.copies is None else drawn.flatten(1, 2)


def _listed(state: Any, beliefs: dict[str, Tensors]) -> Any:
    """Convert an optimiser's state for a nest of tensors such as `beliefs` to the state for a list
    of them; tensors are copied.
    """
    if not isinstance(state, dict):
        return state.clone()
    if state.keys() == beliefs.keys():
        return [
            state[name][key].clone(memory_format=torch.contiguous_format)
            for name, belief in beliefs.items()
            for key in belief
        ]
    return {key: _listed(value, beliefs) for key, value in state.items()}


def _nested(state: Any, beliefs: dict[str, Tensors], n: Tensor) -> Any:
    """Convert the state for a list of tensors back to the state for the nest; a number that is
    common to all clients becomes one number for each client, shaped like `n` [C].
    """
    if isinstance(state, list):
        rest = iter(state)
        return {name: {key: next(rest) for key in belief} for name, belief in beliefs.items()}
    if isinstance(state, dict):
        return {key: _nested(value, beliefs, n) for key, value in state.items()}
    return torch.as_tensor(state, device=n.device).expand(len(n)).clone()
