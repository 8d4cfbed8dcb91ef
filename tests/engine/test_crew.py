"""Workers that run the chunks of a round."""

import time

import pytest
import torch
from torch.func import hessian

import bayesfl as bf
from bayesfl.engine.crew import Crew


def test_threads_are_given_back(clients, model):
    """A run sets one intra-op thread for its workers and gives torch's own number back."""
    torch.set_num_threads(2)
    bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1, evaluate_every=None, progress=False)
    assert torch.get_num_threads() == 2


def test_results_come_in_order():
    """Also where later items are done first."""

    def work(item: int) -> int:
        time.sleep(0.001 * (item % 3 == 0))
        return item**2

    with Crew(3) as crew:
        assert list(crew.over(range(20), work)) == [item**2 for item in range(20)]


def test_what_an_item_raises_is_raised_and_the_rest_dropped():
    """Nothing begins that was not handed out before the error."""
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("of item 1")

    with Crew(1) as crew, pytest.raises(ValueError, match="of item 1"):
        list(crew.over(range(100), work))
    assert max(begun) <= 3


@pytest.mark.parametrize("batched", [True, False])
def test_functions_that_differentiate_forwards_do_not_meet(clients, model, batched):
    """Forward differentiation has one level for all threads of a process: with two workers some
    runs failed.
    """

    def newton(algorithm, given, view, batch):
        loc = view["w"]["loc"]
        curvature = hessian(lambda w: (w[:20].sin() * loc[:20]).sum() + (w[:20] ** 4).sum())(loc)
        return view | {"w": {"loc": loc - 1e-3 * curvature.diagonal()}}

    method = bf.Algorithm(
        model, {"w": bf.Block()}, (bf.Once(newton, batched=batched),), parts=("w",)
    )
    runs = [
        bf.simulate(
            method,
            clients,
            rounds=4,
            evaluate_every=None,
            progress=False,
            engine=bf.Engine(workers=workers, chunk=1),
        )
        for workers in (1, 2, 3)
    ]
    assert all(torch.equal(run.server["w"]["loc"], runs[0].server["w"]["loc"]) for run in runs)
