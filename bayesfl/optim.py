"""Optimisers as values: a pure step for one client, and the same step in place for a chunk of
clients.

`update` returns new tensors; the reference kernel uses it. `update_` changes lists of tensors in
place, whose first axis may be clients. The two agree to rounding. A learning rate is a number or a
schedule (round, rounds) -> number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Annotated, Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bayesfl.base.numerics import inverse_softplus
from bayesfl.base.options import AT_LEAST_0, Range, declared

Schedule: TypeAlias = Callable[[int, int], float]
Rate: TypeAlias = Annotated[
    float | Schedule, AT_LEAST_0, "Learning rate >= 0, or a schedule (round, rounds) -> rate."
]
Decay: TypeAlias = Annotated[float, Range(0, 1, "[")]
L2: TypeAlias = Annotated[float, AT_LEAST_0, "L2 coefficient; its term is added to the gradient."]


def multistep(
    rate: float, *, milestones: Sequence[float] = (0.5, 0.75), factor: float = 0.1
) -> Schedule:
    """Return a schedule that starts at `rate` and multiplies by `factor` each time a share of the
    rounds in `milestones` has passed.

    Example:
        >>> rate = bf.optim.multistep(0.1)
        >>> [round(rate(at, 100), 4) for at in (0, 50, 75)]
        [0.1, 0.01, 0.001]
    """
    return partial(_multistep, rate, tuple(milestones), factor)


def _multistep(
    rate: float, milestones: tuple[float, ...], factor: float, round: int, rounds: int
) -> float:
    return rate * factor ** sum(round >= share * rounds for share in milestones)


def cosine(rate: float, *, final: float = 0.0) -> Schedule:
    """Return a schedule that falls from `rate` in the first round to `final` at the end of the
    last, along half a cosine.

    Example:
        >>> rate = bf.optim.cosine(0.1)
        >>> [round(rate(at, 100), 4) for at in (0, 50, 100)]
        [0.1, 0.05, 0.0]
    """
    return partial(_cosine, rate, final)


def _cosine(rate: float, final: float, round: int, rounds: int) -> float:
    return final + 0.5 * (rate - final) * (1 + math.cos(math.pi * round / rounds))


def rate_at(rate: Rate, round: int, rounds: int) -> float:
    """Return the learning rate of one round.

    Args:
        rate: A number, or a schedule.
        round: The round, counted from 1; a schedule is given it from 0.
        rounds: Number of rounds in all.

    Raises:
        ValueError: A schedule returns something else than a number >= 0 that is finite.
    """
    if not callable(rate):
        return rate
    found = rate(round - 1, rounds)
    found = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if isinstance(found, bool) or not isinstance(found, Real) or not 0 <= found < math.inf:
        raise ValueError(
            f"rate must be >= 0 and finite, its schedule returned {found!r} for round {round} "
            f"of {rounds} (round={round - 1}); let it return a number there"
        )
    return float(found)


class Optimiser(Protocol):
    """The interface of an optimiser, as phases use it; `state` holds nests of tensors and the
    number of steps taken.

    Example:
        >>> optimiser, w = bf.optim.SGD(0.1), torch.tensor([1.0])
        >>> w, state = optimiser.update(w, torch.tensor([2.0]), optimiser.init(w), rate=0.1)
        >>> round(w.item(), 4)
        0.8
    """

    @property
    def rate(self) -> Rate:
        """Return the learning rate, a number or a schedule over rounds."""
        ...

    def init(self, params: Any) -> Any:
        """Return the state before the first step."""
        ...

    def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
        """Return new parameters and state; the arguments are not changed."""
        ...

    def update_(
        self, params: list[Tensor], grads: list[Tensor], state: Any, rate: float, active: int
    ) -> None:
        """Take one step in place: `params` and `grads` hold the first `active` clients, `state` all
        of them.
        """
        ...

    def pace(self, params: Any, state: Any, rate: float) -> Any:
        """Return how fast each parameter moves along a constant gradient: numbers, or tensors like
        `params`.

        A proximal step after the gradient step uses this as its rate, so that the two balance at
        the minimum of the whole energy.
        """
        ...


def check_optimiser(name: str, value: object) -> None:
    """Check that an optimiser has its two steps from one class: `update` and `update_` are one step
    in two forms, and kernels use either.

    Raises:
        TypeError: `value` is no optimiser, but a learning rate or a class.
        ValueError: A subclass overrides one of the two.
    """
    kind: Any = type(value)
    if not hasattr(kind, "update_"):
        own = f"{kind.__name__}(1e-3)" if kind.__name__ in ("Adam", "AdamW") else "SGD(0.1)"
        got = value if isinstance(value, int | float | type) else kind
        raise TypeError(f"{name} must be an optimiser, as bf.optim.{own}, got {got!r}")
    steps = {"update": kind.update, "update_": kind.update_}
    one, other = (next(base for base in kind.__mro__ if step in vars(base)) for step in steps)
    if one is not other:
        raise ValueError(
            f"{name}: {kind.__name__} takes update from {one.__name__} and update_ from "
            f"{other.__name__}; the two are one step, as new tensors and in place, and kernels "
            f"take either: define both in {kind.__name__}"
        )


def _front(state: list[Tensor], active: int) -> list[Tensor]:
    return state if len(state[0]) == active else [v[:active] for v in state]


def _aligned(number: Any, like: Tensor) -> Any:
    """Reshape numbers for each client of a chunk, [C], to broadcast against `like`, which holds the
    first clients; a single number stays.
    """
    if not isinstance(number, Tensor) or not number.dim():
        return number
    return number[: len(like)].to(like).view(-1, *[1] * (like.dim() - 1))


def _matched(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    # The fused kernels ignore strides: a gradient must have the memory layout of its parameter.
    return [
        g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


@dataclass(frozen=True)
@declared
class SGD:
    """Stochastic gradient descent: v <- momentum v + g + weight_decay w, w <- w - rate v.

    Args:
        momentum: Heavy-ball coefficient, undamped, in [0, 1).

    Example:
        >>> optimiser, w = bf.optim.SGD(0.1, momentum=0.9), torch.tensor([1.0])
        >>> state = optimiser.init(w)
        >>> for _ in range(2):
        ...     w, state = optimiser.update(w, torch.tensor([1.0]), state, rate=0.1)
        >>> round(w.item(), 4)  # 1 - 0.1 - 0.19
        0.71
    """

    rate: Rate = 0.01
    momentum: Decay = 0.0
    weight_decay: L2 = 0.0

    def init(self, params: Any) -> Any:
        """Return zero velocities, one for each parameter; None without momentum.

        Raises:
            TypeError: A parameter is in half precision, where torch's fused SGD computes wrong
                steps on a CPU.
        """
        if half := {
            str(t.dtype) for t in tree_leaves(params) if t.dtype in (torch.float16, torch.bfloat16)
        }:
            raise TypeError(
                "parameters must be in torch.float32 or torch.float64, got "
                f"{', '.join(sorted(half))}; convert them by .float()"
            )
        return tree_map(torch.zeros_like, params) if self.momentum else None

    def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
        """Return new parameters and state, see `Optimiser.update`."""
        step = tree_map(lambda w, g: g + self.weight_decay * w, params, grads)
        if self.momentum:
            step = state = tree_map(lambda v, g: self.momentum * v + g, state, step)
        return tree_map(lambda w, s: w - rate * s, params, step), state

    def update_(
        self, params: list[Tensor], grads: list[Tensor], state: Any, rate: float, active: int
    ) -> None:
        """Take one step in place, see `Optimiser.update_`."""
        velocity = _front(state, active) if self.momentum else []
        torch._fused_sgd_(
            params,
            _matched(params, grads),
            velocity,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def pace(self, params: Any, state: Any, rate: float) -> Any:
        """Return the pace, see `Optimiser.pace`: the velocity grows to 1 / (1 - momentum) times the
        gradient.
        """
        return tree_map(lambda w: rate / (1 - self.momentum), params)


def rate_limit(curvature: float, precision: float, momentum: float, *, prox: bool = False) -> float:
    """Return the learning rate above which steps of `SGD` diverge on a quadratic under a tie;
    infinite if none does.

    Source: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964;
    docs/derivations/pfedvem.md.

    Args:
        curvature: The largest eigenvalue of the quadratic's Hessian, >= 0.
        precision: Precision of the tie to a centre, >= 0.
        momentum: Heavy-ball coefficient, in [0, 1).
        prox: Whether the tie is solved after each step and not part of the gradient.

    Example:
        >>> bf.optim.rate_limit(curvature=4.0, precision=1.0, momentum=0.0)  # 2 / 5
        0.4
    """
    left = (
        curvature - (1 + momentum) / (1 - momentum) * precision if prox else curvature + precision
    )
    return 2 * (1 + momentum) / left if left > 0 else math.inf


@dataclass(frozen=True)
@declared
class Adam:
    """Adam with L2 weight decay in the gradient (Kingma and Ba, "Adam: a method for stochastic
    optimization", ICLR 2015).

    Example:
        >>> optimiser, w = bf.optim.Adam(0.1), torch.tensor([1.0])
        >>> w, state = optimiser.update(w, torch.tensor([50.0]), optimiser.init(w), rate=0.1)
        >>> round(w.item(), 4)
        0.9
    """

    rate: Rate = 1e-3
    betas: Annotated[
        tuple[Decay, Decay], "Decay of the running mean and of the running square, each in [0, 1)."
    ] = (0.9, 0.999)
    eps: Annotated[float, AT_LEAST_0, "Number added to the root of the running square."] = 1e-8
    weight_decay: L2 = 0.0

    def init(self, params: Any) -> Any:
        """Return zero moments and a count of 0 steps."""
        return {
            "mean": tree_map(torch.zeros_like, params),
            "square": tree_map(torch.zeros_like, params),
            "steps": 0,
        }

    def _corrections(self, steps: Any) -> tuple[Any, Any]:
        steps = steps.double() if isinstance(steps, Tensor) else steps
        return 1 - self.betas[0] ** steps, (1 - self.betas[1] ** steps) ** 0.5

    def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
        """Return new parameters and state, see `Optimiser.update`."""
        first, second = self.betas
        grads = tree_map(lambda w, g: g + self.weight_decay * w, params, grads)
        mean = tree_map(lambda m, g: first * m + (1 - first) * g, state["mean"], grads)
        square = tree_map(lambda v, g: second * v + (1 - second) * g * g, state["square"], grads)
        steps = state["steps"] + 1
        a, b = self._corrections(steps)
        params = tree_map(
            lambda w, m, v: w - rate / a * m / (v.sqrt() / b + self.eps), params, mean, square
        )
        return params, {"mean": mean, "square": square, "steps": steps}

    def update_(
        self, params: list[Tensor], grads: list[Tensor], state: Any, rate: float, active: int
    ) -> None:
        """Take one step in place, see `Optimiser.update_`; clients whose state persists may have
        taken different numbers of steps, [C].
        """
        first, second = self.betas
        grads = _matched(params, grads)
        mean, square = _front(state["mean"], active), _front(state["square"], active)
        differ = isinstance(state["steps"], Tensor)
        if differ:
            state["steps"][:active] += 1
        else:
            state["steps"] += 1
        a, b = self._corrections(state["steps"])
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
        torch._foreach_lerp_(mean, grads, 1 - first)
        torch._foreach_mul_(square, second)
        torch._foreach_addcmul_(square, grads, grads, 1 - second)
        root = torch._foreach_sqrt(square)
        torch._foreach_div_(root, [_aligned(b, w) for w in root] if differ else b)
        torch._foreach_add_(root, self.eps)
        if differ:
            torch._foreach_mul_(root, [_aligned(a, w) for w in root])
        torch._foreach_addcdiv_(params, mean, root, -rate if differ else -rate / a)

    def pace(self, params: Any, state: Any, rate: float) -> Any:
        """Return the pace, see `Optimiser.pace`; `params` may hold the first clients of `state`
        only.
        """
        b = self._corrections(state["steps"])[1]
        return tree_map(
            lambda w, v: rate / (v[: len(w)].sqrt() / _aligned(b, w) + self.eps),
            params,
            state["square"],
        )


@dataclass(frozen=True)
@declared
class AdamW(Adam):
    """Adam with decoupled weight decay: w <- (1 - rate weight_decay) w, and then Adam's step, in
    which the decay has no part.

    Its state is Adam's.

    References:
        Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019, algorithm 2, with
        the schedule in the rate.

    Example:
        >>> optimiser, w = bf.optim.AdamW(0.1, weight_decay=0.5), torch.tensor([1.0])
        >>> w, state = optimiser.update(w, torch.tensor([50.0]), optimiser.init(w), rate=0.1)
        >>> round(w.item(), 4)  # 0.95 - 0.1
        0.85
    """

    weight_decay: Annotated[
        float, AT_LEAST_0, "Share of each weight, in units of the rate, that a step takes away."
    ] = 1e-2

    @property
    def _step(self) -> Adam:
        return Adam(self.rate, self.betas, self.eps)

    def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
        """Return new parameters and state, see `Optimiser.update`."""
        return self._step.update(
            tree_map(lambda w: (1 - rate * self.weight_decay) * w, params), grads, state, rate
        )

    def update_(
        self, params: list[Tensor], grads: list[Tensor], state: Any, rate: float, active: int
    ) -> None:
        """Take one step in place, see `Optimiser.update_`."""
        torch._foreach_mul_(params, 1 - rate * self.weight_decay)
        self._step.update_(params, grads, state, rate, active)


@dataclass(frozen=True)
@declared
class IVON:
    """IVON for posteriors of a mean and a deviation s = softplus(rho) for each weight, as
    `bayesfl.posteriors.MeanField`: natural-gradient steps on the mean and on the precision 1 / s^2
    (Shen et al., "Variational learning is effective for large deep networks", ICML 2024).

    From the slopes of the bound of all rows, as an `Energy` with `likelihood="sum"` has them,

        $D = slope_s / s$,

        $P <- P + (1 - b2) D + (1 - b2)^2 D^2 / (2 P)$, $P = 1 / s^2$,

        $g <- b1 g + (1 - b1) slope_m$, $m <- m - rate g / ((1 - b1^t) P)$, m the mean.

    With $P = n h + d$ this is the paper's step, but that g contains the prior's slope.

    Example:
        >>> q = {"w": bf.posteriors.MeanField(init_scale=1.0).init(torch.tensor([1.0]))}
        >>> slopes = {"w": {"loc": torch.tensor([2.0]), "rho": torch.tensor([0.0])}}
        >>> optimiser = bf.optim.IVON(0.1)
        >>> q, state = optimiser.update(q, slopes, optimiser.init(q), rate=0.1)
        >>> round(q["w"]["loc"].item(), 4)
        0.8
    """

    rate: Rate = 0.1
    betas: Annotated[
        tuple[Decay, Decay], "Decay of the running mean and of the precision, each in [0, 1)."
    ] = (0.9, 0.995)

    def init(self, params: Any) -> Any:
        """Return zero means and a count of 0 steps.

        Raises:
            ValueError: A posterior is a point.
        """
        if len(tree_leaves(params)) % 2:
            raise ValueError("IVON trains a mean and a deviation of each weight: use a MeanField")
        return {"mean": tree_map(torch.zeros_like, params), "steps": 0}

    def _moved(
        self, params: list[Tensor], grads: list[Tensor], mean: list[Tensor], state: Any, rate: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return new means, their rhos and running means of slopes, of each posterior."""
        first, second = self.betas
        found, fresh = [], 1 - second
        for loc, rho, slope, bend, g in zip(
            params[::2], params[1::2], grads[::2], grads[1::2], mean[::2], strict=True
        ):
            s = F.softplus(rho)
            precision, change = s**-2, fresh * bend / (rho.sigmoid() * s)
            precision = precision + change + change.square() / (2 * precision)
            g = first * g + (1 - first) * slope
            away = g / _aligned(1 - first ** state["steps"], g)
            found.append((loc - rate * away / precision, inverse_softplus(precision.rsqrt()), g))
        return found

    def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
        """Return new parameters and state, see `Optimiser.update`."""
        leaves, form = tree_flatten(params)
        state = state | {"steps": state["steps"] + 1}
        moved = self._moved(leaves, tree_leaves(grads), tree_leaves(state["mean"]), state, rate)
        new = tree_unflatten([t for loc, rho, _ in moved for t in (loc, rho)], form)
        return new, state | {"mean": tree_unflatten([g for *_, g in moved for _ in "mr"], form)}

    def update_(
        self, params: list[Tensor], grads: list[Tensor], state: Any, rate: float, active: int
    ) -> None:
        """Take one step in place, see `Optimiser.update_`."""
        mean = _front(state["mean"], active)
        if isinstance(state["steps"], Tensor):
            state["steps"][:active] += 1
        else:
            state["steps"] += 1
        moved = self._moved(params, grads, mean, state, rate)
        for place, new in enumerate(moved):
            for old, now in zip((*params[2 * place :][:2], mean[2 * place]), new, strict=True):
                old.copy_(now)

    def pace(self, params: Any, state: Any, rate: float) -> Any:
        """Raise ValueError: proximal steps are of points."""
        raise ValueError("IVON has no proximal steps: use prox=False")


@dataclass(frozen=True)
@declared
class Clip:
    """Clip the gradients of each client to a Euclidean norm before another optimiser takes the
    step.

    The length is Euclidean, over all parameters that one step trains together (Pascanu, Mikolov,
    Bengio, "On the difficulty of training recurrent neural networks", ICML 2013). The gradient is
    that of the phase's energy: of a sum over n examples it is n times as long as of their mean.
    Weight decay is added by the inner optimiser, after the clipping.

    Example:
        >>> optimiser, w = bf.optim.Clip(bf.optim.SGD(0.1), norm=1.0), torch.zeros(2)
        >>> w, state = optimiser.update(w, torch.tensor([30.0, 40.0]), None, rate=0.1)
        >>> w
        tensor([-0.0600, -0.0800])
    """

    optimiser: Annotated[Optimiser, check_optimiser, "The optimiser that takes the steps."]
    norm: Annotated[float, Range(0), "Largest length of a gradient, > 0."] = 1.0

    @property
    def rate(self) -> Rate:
        """Return the inner optimiser's learning rate."""
        return self.optimiser.rate

    def init(self, params: Any) -> Any:
        """Return the inner optimiser's state before the first step."""
        return self.optimiser.init(params)

    def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
        """Return new parameters and state, see `Optimiser.update`."""
        factor = self._factor(torch.stack([g.square().sum() for g in tree_leaves(grads)]).sum())
        return self.optimiser.update(params, tree_map(lambda g: g * factor, grads), state, rate)

    def update_(
        self, params: list[Tensor], grads: list[Tensor], state: Any, rate: float, active: int
    ) -> None:
        """Take one step in place, see `Optimiser.update_`."""
        factor = self._factor(torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0))
        self.optimiser.update_(
            params, [g * _aligned(factor, g) for g in grads], state, rate, active
        )

    def pace(self, params: Any, state: Any, rate: float) -> Any:
        """Return the inner optimiser's pace, see `Optimiser.pace`."""
        return self.optimiser.pace(params, state, rate)

    def _factor(self, squares: Tensor) -> Tensor:
        return (self.norm / squares.sqrt().clamp_min(torch.finfo(squares.dtype).tiny)).clamp_max(
            1.0
        )
