"""What a run that diverges says, and what it gives back."""

import pytest
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend, Once, Repeat, phase_in_words
from bayesfl.optim import SGD
from tests.cases import SIZES
from tests.federation.made import same


@pytest.mark.parametrize("train", ["cohort", "all"])
def test_divergence_gives_back_the_last_finite_round(clients, model, train):
    """A loss that leaves the finite numbers stops the run, names client, round and phase, and loses
    nothing before it.
    """

    def explosive(rate):
        return bf.algorithms.fedrep(
            model, optimiser=SGD(rate, momentum=0.5), head_epochs=1, body_epochs=1
        )

    options = {
        "participation": 0.6,
        "train": train,
        "seed": 1,
        "evaluate_every": 1,
        "progress": False,
        "engine": bf.Engine(chunk=2),
    }
    with pytest.raises(
        bf.DivergenceError, match=r"client .* phase [12] \(Descend on (head|body)\) of round 3\b"
    ) as caught:
        bf.simulate(
            explosive(lambda round, rounds: 0.05 if round < 2 else 1e38),
            clients,
            rounds=5,
            **options,
        )
    error = caught.value
    assert error.round == error.result.round + 1 == 3
    assert error.client in range(len(SIZES))
    assert error.phase in (1, 2)
    kept = bf.simulate(explosive(lambda round, rounds: 0.05), clients, rounds=2, **options)
    assert same(error.result, kept)
    assert_close(error.result.predict().probs, kept.predict().probs, equal_nan=True)


def test_divergence_names_the_blocks():
    """Those that a phase trains, also inside `Repeat`; a phase that trains none is named alone."""
    step = Descend(Energy(("a", "b"), ("a", "b"), likelihood="mean"))
    once = Once(lambda algorithm, given, view, batch: view)
    assert [phase_in_words(phase) for phase in (step, Repeat((once, step), times=2), once)] == [
        "Descend on a, b",
        "Repeat on a, b",
        "Once",
    ]
