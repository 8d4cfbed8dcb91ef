"""Optimisers against torch's own, and the step in place against the pure one."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from bayesfl.optim import SGD, Adam, AdamW, Clip, check_optimiser, cosine, multistep, rate_at
from tests.cases import numbers

RULES = {
    "plain": SGD(),
    "momentum": SGD(momentum=0.9),
    "decay": SGD(weight_decay=0.2),
    "momentum and decay": SGD(momentum=0.7, weight_decay=0.2),
    "adam": Adam(),
    "adam with decay": Adam(betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2),
    "adamw": AdamW(),
    "adamw with more decay": AdamW(betas=(0.8, 0.95), eps=1e-3, weight_decay=0.2),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def theirs(rule: SGD | Adam, params: list[Tensor], rate: float) -> torch.optim.Optimizer:
    """Torch's optimiser of the same settings."""
    if isinstance(rule, SGD):
        return torch.optim.SGD(
            params, lr=rate, momentum=rule.momentum, weight_decay=rule.weight_decay
        )
    kind = torch.optim.AdamW if isinstance(rule, AdamW) else torch.optim.Adam
    return kind(params, lr=rate, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay)


@rules
def test_update_is_torchs(rule):
    """Ten steps on a nest of tensors, at a rate that changes, are those of torch.optim."""
    params = {"w": {"loc": numbers(4, 3), "rho": numbers(5, seed=1)}}
    live = [
        params["w"]["loc"].clone().requires_grad_(),
        params["w"]["rho"].clone().requires_grad_(),
    ]
    other, state = theirs(rule, live, 0.0), rule.init(params)
    for t in range(10):
        rate = 0.1 / (1 + t)
        grads = [numbers(4, 3, seed=10 + t), numbers(5, seed=30 + t)]
        other.param_groups[0]["lr"] = rate
        for p, g in zip(live, grads, strict=True):
            p.grad = g.clone()
        other.step()
        params, state = rule.update(params, {"w": {"loc": grads[0], "rho": grads[1]}}, state, rate)
        assert_close(
            [params["w"]["loc"], params["w"]["rho"]],
            [p.detach() for p in live],
            rtol=1e-12,
            atol=1e-13,
        )


@rules
def test_update_is_pure(rule):
    """Neither parameters, gradients nor state are changed."""
    params, grads = {"w": numbers(3)}, {"w": numbers(3, seed=1)}
    _, state = rule.update(params, grads, rule.init(params), 0.1)
    kept = torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, state)
    once, _ = rule.update(params, grads, state, 0.1)
    again, _ = rule.update(params, grads, state, 0.1)
    assert_close(state, kept, rtol=0, atol=0)
    assert_close(once, again, rtol=0, atol=0)
    assert_close((params["w"], grads["w"]), (numbers(3), numbers(3, seed=1)), rtol=0, atol=0)


@rules
@pytest.mark.parametrize("strides", ["same", "other"])
def test_update_in_place_while_clients_finish(rule, strides):
    """Clients of 7, 4, 4 and 2 steps: a shrinking prefix moves as each client alone does, and the
    others' numbers stay.
    """
    steps = [7, 4, 4, 2]
    shapes = [(3, 2), (5,), (2, 3, 2, 2)]
    start = [numbers(4, *shape, seed=i) for i, shape in enumerate(shapes)]
    params = [p.clone() for p in start]
    state = rule.init(params)
    grads = [
        [numbers(4, *shape, seed=100 * i + t) for i, shape in enumerate(shapes, 1)]
        for t in range(7)
    ]
    for t in range(7):
        active = sum(n > t for n in steps)
        given = [g[:active] for g in grads[t]]
        if strides == "other":
            given = [g.transpose(0, -1).contiguous().transpose(0, -1) for g in given]
            assert any(
                g.stride() != p[:active].stride() for g, p in zip(given, params, strict=True)
            )
        before = [p.clone() for p in params]
        rule.update_([p[:active] for p in params], given, state, 0.1, active)
        assert_close([p[active:] for p in params], [p[active:] for p in before], rtol=0, atol=0)
    for c, n in enumerate(steps):
        alone = [p[c] for p in start]
        own = rule.init(alone)
        for t in range(n):
            alone, own = rule.update(alone, [g[c] for g in grads[t]], own, 0.1)
        assert_close([p[c] for p in params], alone, rtol=1e-12, atol=1e-12)


@rules
def test_update_in_place_of_parameters_with_strides_of_their_own(rule):
    """A leaf that lies channels last is stepped where it lies, with a gradient that lies
    otherwise.
    """
    leaf = numbers(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    params, alone = [leaf.clone(memory_format=torch.preserve_format)], [leaf]
    state, own = rule.init(params), rule.init(alone)
    for t in range(5):
        grad = numbers(2, 3, 4, 4, seed=t)
        rule.update_(params, [grad], state, 0.1, 2)
        alone, own = rule.update(alone, [grad], own, 0.1)
    assert_close(params, alone, rtol=1e-12, atol=1e-12)


@rules
def test_update_in_place_leaves_gradients_alone(rule):
    """Gradients, which may be views of something else, are only read."""
    params, grads = [numbers(2, 3)], [numbers(2, 3, seed=1)]
    rule.update_(params, grads, rule.init(params), 0.1, 2)
    assert_close(grads[0], numbers(2, 3, seed=1), rtol=0, atol=0)


@pytest.mark.parametrize(
    "rule", [Adam(weight_decay=0.2), AdamW(weight_decay=0.2)], ids=["adam", "adamw"]
)
def test_update_in_place_of_clients_that_took_different_numbers_of_steps(rule: Adam):
    """Each client's moments are corrected by its own count; those behind the active ones stay."""
    start, count, active = [numbers(3, 2, 2), numbers(3, 4, seed=1)], [0, 5, 2], 2
    kept = {
        "mean": [numbers(3, 2, 2, seed=2), numbers(3, 4, seed=3)],
        "square": [numbers(3, 2, 2, seed=4) ** 2, numbers(3, 4, seed=5) ** 2],
    }
    grads = [
        [numbers(active, 2, 2, seed=10 + t), numbers(active, 4, seed=20 + t)] for t in range(3)
    ]
    params = [p.clone() for p in start]
    state = {name: [t.clone() for t in kept[name]] for name in kept} | {
        "steps": torch.tensor(count)
    }
    for given in grads:
        rule.update_([p[:active] for p in params], given, state, 0.1, active)
    for c in range(active):
        alone = [p[c] for p in start]
        own = {name: [t[c] for t in kept[name]] for name in kept} | {
            "steps": torch.tensor(count[c])
        }
        for given in grads:
            alone, own = rule.update(alone, [g[c] for g in given], own, 0.1)
        assert_close([p[c] for p in params], alone, rtol=1e-12, atol=1e-12)
    assert state["steps"].tolist() == [3, 8, 2]
    assert_close([p[active:] for p in params], [p[active:] for p in start], rtol=0, atol=0)


def test_adamw_without_decay_is_adam():
    """To the bit, pure and in place; with it, the decay has no part in the moments."""
    none, adam = AdamW(0.1, (0.8, 0.95), 1e-3, weight_decay=0.0), Adam(0.1, (0.8, 0.95), 1e-3)
    some = replace(none, weight_decay=0.2)
    pure, inside = (
        {rule: ([numbers(2, 3)], rule.init([numbers(2, 3)])) for rule in (none, adam, some)}
        for _ in range(2)
    )
    for t in range(5):
        grads = [numbers(2, 3, seed=t + 1)]
        for rule in (none, adam, some):
            pure[rule] = rule.update(pure[rule][0], grads, pure[rule][1], 0.1)
            rule.update_(inside[rule][0], grads, inside[rule][1], 0.1, 2)
    for found in (pure, inside):
        assert_close(found[none], found[adam], rtol=0, atol=0)
        assert_close(found[some][1], found[adam][1], rtol=0, atol=0)
        assert (found[some][0][0] - found[adam][0][0]).abs().max() > 1e-2


def test_multistep():
    """The rate falls by its factor once each share of the rounds has passed."""
    schedule = multistep(0.5)
    assert [schedule(r, 200) for r in (0, 99, 100, 149, 150, 199)] == pytest.approx(
        [0.5, 0.5, 0.05, 0.05, 0.005, 0.005]
    )
    own = multistep(1.0, milestones=(0.2, 0.4, 0.6), factor=0.5)
    assert [own(r, 10) for r in (1, 2, 3, 4, 6, 9)] == pytest.approx(
        [1.0, 0.5, 0.5, 0.25, 0.125, 0.125]
    )


def test_cosine():
    """From the rate over the middle to the final one, along 1 + cos."""
    schedule = cosine(0.4, final=0.2)
    assert [schedule(r, 100) for r in (0, 50, 100)] == pytest.approx([0.4, 0.3, 0.2])
    assert schedule(25, 100) == pytest.approx(0.2 + 0.1 * (1 + math.sqrt(0.5)))
    assert cosine(1.0)(75, 100) == pytest.approx(0.5 * (1 - math.sqrt(0.5)))


def test_rate_is_a_number_or_a_schedule():
    """A schedule is asked with the round, from 0, and the number of rounds."""
    assert rate_at(0.3, 5, 10) == 0.3
    assert rate_at(lambda round, rounds: round / rounds, 6, 10) == 0.5
    assert SGD(multistep(0.1)).rate(0, 1) == 0.1
    assert Adam(cosine(0.1)).rate(0, 1) == 0.1


@pytest.mark.parametrize("found", [None, -0.1, math.nan, math.inf, "0.1", True, torch.ones(2)])
def test_schedules_return_rates(found: Any):
    """A negative rate would climb the loss, silently; the message names the round."""
    with pytest.raises(ValueError, match=r"^rate .*returned .* round 4 of 10 \(round=3\)"):
        rate_at(lambda round, rounds: found, 4, 10)
    assert rate_at(lambda round, rounds: torch.tensor(0.5), 3, 10) == 0.5  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: SGD(-0.1), "rate"),
        (lambda: SGD(math.inf), "rate"),
        (lambda: SGD(math.nan), "rate"),
        (lambda: SGD("a"), "rate must be a number, got 'a'"),  # pyright: ignore[reportArgumentType]
        (lambda: SGD(momentum="a"), "momentum must be a number, got 'a'"),  # pyright: ignore[reportArgumentType]
        (lambda: SGD(momentum=-0.1), "momentum"),
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay"),
        (lambda: Adam(-0.1), "rate"),
        (lambda: Adam(eps=-1e-8), "eps"),
        (lambda: Adam(weight_decay=math.inf), "weight_decay"),
        (lambda: AdamW(weight_decay=-1.0), "weight_decay"),
        (lambda: Adam(betas=(1.0, 0.9)), "betas"),
        (lambda: Adam(betas=(0.9, -0.1)), "betas"),
        (lambda: Clip(SGD(0.1), norm=0.0), "norm .*> 0 .*got 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(make, word):
    """The message names the argument: rates and decays from 0, momentum and betas within [0, 1)."""
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype: torch.dtype):
    """In which torch's fused SGD computes wrong steps on a CPU."""
    with pytest.raises(TypeError, match=r"float32.*got torch\.(b?)float16"):
        SGD(0.1).init([torch.ones(3, dtype=dtype)])


@pytest.mark.parametrize("inner", [SGD(0.1, 0.9), Adam(0.1)])
def test_clipped_gradients(inner: Any):
    """Each client's over all its parameters together: torch's clip_grad_norm_, then the inner
    optimiser; short ones stay as they are.
    """
    clip = Clip(inner, norm=1.5)
    params = [numbers(3, 4), numbers(3, 2, 2, seed=1)]
    grads = [numbers(3, 4, seed=2), numbers(3, 2, 2, seed=3)]
    grads[0][1] /= 100
    grads[1][1] /= 100
    moved, state = [p.clone() for p in params], clip.init(params)
    clip.update_(moved, [g.clone() for g in grads], state, 0.1, 3)
    for client in range(3):
        own, slope = [p[client] for p in params], [g[client].clone() for g in grads]
        leaves = [torch.nn.Parameter(p.clone()) for p in own]
        for leaf, g in zip(leaves, slope, strict=True):
            leaf.grad = g.clone()
        length = torch.nn.utils.clip_grad_norm_(leaves, 1.5)
        assert (length < 1.5) == (client == 1)
        expected, _ = inner.update(own, [leaf.grad for leaf in leaves], inner.init(own), 0.1)
        found, _ = clip.update(own, slope, clip.init(own), 0.1)
        assert_close(found, expected, atol=1e-6, rtol=0)
        assert_close([t[client] for t in moved], expected, atol=1e-6, rtol=0)


def test_a_gradient_of_zero_is_not_divided_by():
    found, _ = Clip(SGD(0.1), norm=1.0).update([torch.ones(2)], [torch.zeros(2)], None, 0.1)
    assert torch.equal(found[0], torch.ones(2))


@pytest.mark.parametrize("wrong", [SGD, 0.1, "sgd"])
def test_what_is_no_optimiser_is_named(wrong: Any):
    with pytest.raises(
        TypeError, match=r"optimiser must be an optimiser, as bf\.optim\.SGD\(0\.1\)"
    ):
        Clip(wrong)


def test_a_step_is_overridden_in_both_forms():
    """Kernels take either; the one that is left would be another optimiser's. An optimiser inside
    Clip, too.
    """

    class Sign(SGD):
        def update(self, params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
            return super().update(params, tree_map(torch.sign, grads), state, rate)

    class Both(Sign):
        def update(self, *given: Any) -> tuple[Any, Any]:
            return super().update(*given)

        def update_(self, *given: Any) -> None:
            super().update_(*given)

    for wrong in (lambda: check_optimiser("optimiser", Sign(0.1)), lambda: Clip(Sign(0.1))):
        with pytest.raises(
            ValueError,
            match=r"Sign takes update from Sign and update_ from SGD.*define both in Sign",
        ):
            wrong()
    check_optimiser("optimiser", Both(0.1))
