"""What a run that diverges says, and what it gives back."""

from dataclasses import replace

import pytest
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend, Once, Repeat, phase_in_words
from bayesfl.federation.run.result import Result
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


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError])
def test_whatever_ends_a_run_carries_it(clients, model, tmp_path, monkeypatch, ending):
    """Ctrl-C within a round, whose private rows are restored, and a disk that is full at a
    checkpoint.
    """
    method = bf.algorithms.ditto(model, epochs=1, batch_size=10)
    options: dict = {"seed": 1, "progress": False}

    def full(result, path):
        if result.round == 2:
            raise OSError("no space left")

    def interrupted(server, ids, uplink):
        if uplink["round"] == 3:
            raise KeyboardInterrupt
        return {}

    if ending is OSError:
        monkeypatch.setattr(Result, "save_round", full)
        options |= {"checkpoint": tmp_path / "run", "every": 1}
    else:
        method = replace(method, combine=interrupted)
    with pytest.raises(ending) as caught:
        bf.simulate(method, clients, rounds=4, **options)
    kept = bf.simulate(method, clients, rounds=2, seed=1, progress=False)
    assert caught.value.result.round == len(caught.value.result.history) == 2
    assert same(caught.value.result, kept)


def test_every_round_is_logged(clients, model, caplog):
    """A line at INFO, with what was measured."""
    caplog.set_level("INFO", "bayesfl")
    method = bf.algorithms.fedavg(model, epochs=1)
    result = bf.simulate(method, clients, rounds=2, evaluate_every=2, progress=False)
    first, last = [one.message for one in caplog.records if one.message.startswith("round ")]
    assert first.startswith("round 1 of 2: cohort 7, seconds ")
    assert last.endswith(f"personal_accuracy {result.history[-1]['personal_accuracy']:.4g}")
    assert "accuracy" not in first
