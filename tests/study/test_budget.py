"""Gradient steps and passes of a round, counted client by client; and methods that take a given
number of steps.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import nn

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.data import FederatedData
from bayesfl.engine.plan import passes
from bayesfl.study.budget import epochs, gradient_steps, with_steps
from bayesfl.study.cells import recorded
from tests.cases import CASES, Case, run


def seen(steps: int, size: int, counts: Any) -> float:
    """How often a client goes over its data in so many steps, batch by batch."""
    gone = []
    for n in counts:
        batches = itertools.cycle([size] * (n // size) + [n % size] * bool(n % size))
        gone.append(sum(itertools.islice(batches, steps)) / n)
    return float(np.mean(gone))


def steps_of_l2gd(round: int) -> int:
    """Return how many steps on the data all clients take."""
    return int(generator(2, Purpose.COMMON, round=round, index=1).geometric(0.4))


BODY, HEAD, W = 144, 51, 195
"""Numbers of the network's parts, and of the whole."""
EPOCHS, STEPS, WHOLE = "epochs", "steps", "whole"
TRAINS = {
    **dict.fromkeys(
        ("local", "fedavg", "fedavg_ft", "knn_per", "fedprox", "scaffold", "moon"), ((2, EPOCHS),)
    ),
    **dict.fromkeys(("fedper", "lg_fedavg", "fedbabu", "fedbn", "fedamp", "apfl"), ((2, EPOCHS),)),
    **dict.fromkeys(("pvi", "fedep", "fola", "fedfomo"), ((2, EPOCHS),)),
    # the mean of the drawn numbers
    "l2gd": ((np.mean([steps_of_l2gd(round) for round in range(200)]), EPOCHS),),
    **dict.fromkeys(("bpfed", "fedsa_lora"), ((6, STEPS),)),
    "fedivon": ((4, STEPS),),
    # each batch trains both chains, and later the body under both, too
    "fedpop": (*((2, STEPS),) * 2, *((3, STEPS),) * 4),
    "qlsd": ((1, STEPS),) * 2,  # both chains
    **dict.fromkeys(("fedrep", "fedpac"), ((3, EPOCHS),)),  # of the head and of the body
    **dict.fromkeys(("fedrod", "ditto"), ((2, EPOCHS),) * 2),  # the shared and an own part
    "pfedme": ((5, STEPS),) * 3,  # inner steps on each of the batches
    "fedpa": ((1, EPOCHS), *((2, STEPS),) * 3),  # before the averages, and of each
    "pfedhn": ((4, STEPS),),
    "pfedbayes": ((4, STEPS),) * 2,  # inner steps on each of the batches
    "pfedmap": ((4, WHOLE), (1, EPOCHS)),
    **dict.fromkeys(("pfedvem", "pfedvem_held"), ((4, WHOLE), (2, EPOCHS))),
    **dict.fromkeys(("clustered", "ifca"), ((2, EPOCHS),)),  # the model of the client's cluster
    **dict.fromkeys(("fedem", "d_fedem"), ((2, EPOCHS),) * 2),  # both components
    **dict.fromkeys(("irm", "group_dro", "fedsi_full"), ((5, STEPS),)),
    **dict.fromkeys(("irm_l2", "irm_ft", "perinvfl"), ((3, STEPS), (2 * 3, STEPS))),
    "perinvfl-contrastive": ((3, STEPS),) * 4,  # the shared, one alone, two of the own
    **dict.fromkeys(("fedsi", "fedsi_fac"), ((2, EPOCHS),)),
}
"""The phases of a round, each with its passes in batches of 10, its steps on such batches, or its
steps on all data."""
SENDS = {
    "local": (0, 0),
    "scaffold": (2 * W, 2 * W),  # with the control variates
    **dict.fromkeys(("fedper", "fedrep", "fedbabu", "fedsa_lora", "fedsi_full"), (BODY, BODY)),
    "lg_fedavg": (HEAD, HEAD),
    # Counts, h, a variance and centroids; centroids, and which are known as three bools.
    "fedpac": (W + 3 + 48 + 1 + 48, W + 48 + 3 / 8),
    "fedbn": (W, W),
    "fedamp": (W, 2 * W + 1),  # the client's own cloud model, and the number of clients
    "pfedbayes": (2 * W, 2 * W),  # means and deviations
    "l2gd": (W, W + 2),  # and two numbers of steps
    "fedfomo": (W + 2, 3 * W + 1),  # gains; two more models, and what the server draws
    "bpfed": (2 * BODY, 2 * BODY),
    "fedpop": (BODY + 2 * HEAD + 1,) * 2,  # both chains, and a variance
    **dict.fromkeys(("fola", "fedivon"), (2 * W, 2 * W + 1)),  # and the number of clients
    # levels in a byte each, and a unit, of two chains; a number of clients and one for the noise
    "qlsd": (2 * W / 8 + 2, 2 * W + 2),
    **dict.fromkeys(("pvi", "fedep"), (2 * W, 2 * W + 1)),  # and the number of clients
    "pfedvem": (W + 1, W + 1),  # the scale
    "clustered": (W + 1, W),
    **dict.fromkeys(("ifca", "fedem", "d_fedem"), (2 * W + 2, 2 * W)),  # and shares of the copies
    "group_dro": (W + 4 + 4, W + 4),  # by environment
    "perinvfl-group_dro": (W + 2 + 2, W + 2),
    **dict.fromkeys(("fedsi", "fedsi_fac"), (2 * BODY + 1, 2 * BODY)),
}
"""Numbers of 8 bytes that a client sends and receives in a round; all weights where none stand."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_client_does_and_sends(case: Case, model: nn.Module, clients: FederatedData):
    """By hand, from the options of the case; and as many steps under one number for all."""
    n = clients.train.counts
    phases = TRAINS.get(str(case)) or TRAINS[case.name]
    factor = 1
    if case.options.get("posterior"):  # means and widths of both components, one pass each
        phases, factor = ((1, EPOCHS),) * 2, 2
    batches = np.ceil(n / 10).mean()
    steps = sum(k * batches if unit == EPOCHS else k for k, unit in phases)
    gone = sum(seen(k, 10, n) if unit == STEPS else k for k, unit in phases)
    result = run(method := case(model), clients, rounds=2, participation=3 / 7)
    found = recorded(result).budget
    assert (found["steps"], found["epochs"]) == pytest.approx((steps, gone))
    up, down = SENDS.get(str(case)) or SENDS.get(case.name) or (W, W)
    sent = [up, down] if factor == 1 else [2 * up - 2, 2 * down]
    assert [found["bytes_up"] / 8, found["bytes_down"] / 8] == sent
    scaled, _ = with_steps(method, 60, n)
    assert gradient_steps(scaled, n) == 60


def test_every_model_counts(model: nn.Module, clients: FederatedData):
    """Second models, heads, components, and the steps of a `Repeat` on each batch."""
    algorithms, n = bf.algorithms, clients.train.counts
    tens = np.ceil(n / 10).mean()
    for method, gone, steps in (
        (algorithms.fedavg(model, epochs=3, batch_size=10), 3, 3 * tens),
        (algorithms.fedavg(model, epochs=3, batch_size=None), 3, 3),
        (algorithms.ditto(model, epochs=3, batch_size=10), 6, 6 * tens),
        (algorithms.fedrep(model, head_epochs=2, body_epochs=1, batch_size=10), 3, 3 * tens),
        (algorithms.fedem(model, components=3, epochs=2, batch_size=10), 6, 6 * tens),
        (
            algorithms.pfedme(model, batches=4, batch_size=5, inner_steps=3),
            3 * seen(4, 5, n),
            12,
        ),
    ):
        assert epochs(method, n) == pytest.approx(gone)
        assert gradient_steps(method, n) == pytest.approx(steps)
        assert gradient_steps(method, [*n, 0]) == pytest.approx(
            steps
        )  # who has no data, trains not


def test_epochs_by_client_are_those_of_the_first_round(model: nn.Module, clients: FederatedData):
    def drawn(client: int, rng: np.random.Generator) -> int:
        return 1 + client + int(rng.integers(3))

    method, n = bf.algorithms.fedavg(model, epochs=drawn, batch_size=10), clients.train.counts
    ids = np.arange(len(n))
    each = passes(method.phases[0], ids, {}, seed=5, round=0)
    assert epochs(method, n, seed=5) == each.mean()
    assert gradient_steps(method, n, seed=5) == (each * np.ceil(n / 10)).mean()
    scaled, told = with_steps(method, 7, n)
    assert gradient_steps(scaled, n) == 7
    assert told.endswith("7 steps instead of epochs by client")


def test_one_number_of_steps(model: nn.Module, clients: FederatedData):
    """Phases share it as they shared their own steps, to the last step; copies and steps on a batch
    count.
    """
    algorithms, n = bf.algorithms, clients.train.counts

    def lengths(method: bf.Algorithm, steps: int) -> list[int]:
        found, _ = with_steps(method, steps, n)
        assert gradient_steps(found, n) == steps
        return [phase.steps for phase in found.phases if not isinstance(phase, bf.Once)]

    assert lengths(algorithms.fedavg(model, epochs=3, batch_size=10), 7) == [7]
    assert lengths(algorithms.ditto(model, epochs=3), 7) == [4, 3]
    rep = algorithms.fedrep(model, head_epochs=2, body_epochs=1, batch_size=10)
    assert lengths(rep, 12) == [8, 4]
    assert lengths(algorithms.fedem(model, components=3, batch_size=10), 12) == [4]
    me = algorithms.pfedme(model, batches=4, inner_steps=3)
    assert lengths(me, 12) == lengths(me, 12) == [4]
    found, told = with_steps(me, 13, n)  # no whole number of batches has 13
    assert gradient_steps(found, n) == 12
    assert "4 batches instead of 4 batches" in told
    _, told = with_steps(algorithms.ditto(model, epochs=3), 7, n)
    assert told == (
        "Descend on w: 4 steps instead of 3 epochs; Descend on v: 3 steps instead of 3 epochs"
    )


def test_what_takes_no_such_number_is_named(model: nn.Module, clients: FederatedData):
    @dataclass(frozen=True)
    class Other(bf.Once):
        pass

    class Strange:
        epochs, steps, batch_size, phases, batched = 1, None, None, (), True

        def check(self, algorithm: Any) -> None: ...

    plain = bf.algorithms.fedavg(model)
    still = bf.Algorithm(
        model, plain.blocks, (bf.Once(lambda algorithm, given, view, batch: view),), parts=("w",)
    )
    strange = bf.Algorithm(model, plain.blocks, (*plain.phases, Strange()), parts=("w",))
    for method, words in ((still, "takes no gradient steps"), (strange, "Strange is no Descend")):
        same, told = with_steps(method, 10, clients.train.counts)
        assert same is method
        assert words in told
    assert np.isnan([gradient_steps(strange, [9]), epochs(strange, [9])]).all()


def test_a_scaled_method_runs(model: nn.Module, clients: FederatedData):
    """As the same method with that number of steps, written by hand."""
    from dataclasses import replace

    plain = bf.algorithms.fedavg(model, batch_size=10)
    by_hand = replace(plain, phases=(replace(plain.phases[0], steps=4),))
    found, _ = with_steps(plain, 4, clients.train.counts)
    one, other = (run(method, clients) for method in (found, by_hand))
    assert (one.server["w"]["loc"] == other.server["w"]["loc"]).all()
