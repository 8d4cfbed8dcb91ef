"""Newton's steps where the sum is rounded."""

import torch

from bayesfl.stats import newton


def quadratic(theta: torch.Tensor, noise: float) -> tuple[torch.Tensor, ...]:
    hessian = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    slope = hessian @ (theta - 3.0)
    return (theta - 3.0) @ slope / 2 + noise, slope, hessian


def test_a_rise_by_rounding_halves_no_step():
    """Near the minimum a step is right, whatever the last digits of the sum say; far from it a
    rise halves it.
    """
    near = torch.tensor([3.001, 3.0], dtype=torch.float64)
    for start, halved in ((near, False), (near + 1, True)):
        state, _ = newton.step(newton.begin(start), *quadratic(start, 0.0))
        after, done = newton.step(state, *quadratic(state["theta"], 5.0))
        assert bool(after["n_halved"]) == halved
        assert not done
    outside = torch.tensor(torch.inf, dtype=torch.float64)
    state, _ = newton.step(newton.begin(near), *quadratic(near, 0.0))
    after, _ = newton.step(state, outside, *quadratic(state["theta"], 0.0)[1:])
    assert after["n_halved"] == 1


def test_steps_do_not_depend_on_units():
    """Of parameters, though these be far apart: a step is the same in its own units."""
    sizes = torch.tensor([1e9, 1e-9], dtype=torch.float64)
    start = torch.tensor([1.0, 1.0], dtype=torch.float64)
    loss, slope, hessian = quadratic(start, 0.0)
    small = newton.step(
        newton.begin(start / sizes), loss, slope * sizes, hessian * sizes.outer(sizes)
    )
    torch.testing.assert_close(
        small[0]["theta"] * sizes,
        newton.step(newton.begin(start), loss, slope, hessian)[0]["theta"],
    )
