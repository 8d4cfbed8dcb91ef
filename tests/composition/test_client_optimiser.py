"""Another optimiser on the clients: every gradient step takes it, and nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.optim import SGD, Adam, Clip
from tests.cases import CASES, Case, kernels_of
from tests.federation.made import run, state


def test_it_is_the_method_built_with_that_optimiser(model: nn.Module, clients: FederatedData):
    """To the bit, in training, fine-tuning and adaptation."""
    plain = bf.algorithms.fedavg_ft(model, epochs=1, lr=0.3, momentum=0.9)
    built = bf.algorithms.fedavg_ft(model, epochs=1, lr=0.05, momentum=0.0)
    changed = bf.with_optimiser(plain, SGD(0.05))
    one, two = (run(made, clients) for made in (built, changed))
    assert_close(state(one), state(two), atol=0, rtol=0)
    assert torch.equal(one.predict().probs, two.predict().probs)  # pyright: ignore[reportArgumentType]
    assert torch.equal(one.adapt(clients).predict().probs, two.adapt(clients).predict().probs)  # pyright: ignore[reportArgumentType]


def test_on_some_blocks_alone(model: nn.Module):
    """The head's steps keep theirs."""
    made = bf.with_optimiser(bf.algorithms.fedrep(model), Adam(0.01), on=("body",))
    assert {phase.blocks: type(phase.optimiser) for phase in made.phases} == {("head",): SGD, ("body",): Adam}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_method_takes_it(case: Case, model: nn.Module, clients: FederatedData):
    """By all kernels alike, where a method has gradient steps; what persists has the new optimiser's state."""
    made = bf.with_optimiser(case(model), Clip(Adam(0.01), norm=0.5))
    found = [
        state(run(made, clients, rounds=2, evaluate_every=None, engine=bf.Engine(kernel, chunk=3, workers=1)))
        for kernel in kernels_of(made)
        if kernel != "vmap"
    ]
    for other in found[1:]:
        assert_close(other, found[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"optimiser": 0.1}, ValueError, r"optimiser .*got 0\.1"),
        ({"on": "body"}, TypeError, r"on .*\('body',\)"),
        ({"on": ("tail",)}, ValueError, r"\['tail'\].*\['body', 'head'\]"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], kind: type[Exception], words: str, model: nn.Module):
    with pytest.raises(kind, match=words):
        bf.with_optimiser(bf.algorithms.fedrep(model), **{"optimiser": SGD(0.1), **options})


def test_blocks_that_are_trained_together(model: nn.Module):
    """One optimiser steps them, so that all are named or none."""
    with pytest.raises(ValueError, match=r"\['body', 'head'\].*\['head'\]"):
        bf.with_optimiser(bf.algorithms.fedper(model), SGD(0.1), on=("body",))
    with pytest.raises(ValueError, match="no gradient step"):
        bf.with_optimiser(replace(bf.algorithms.fedavg(model), phases=()), SGD(0.1))


def test_no_block_at_all_is_refused(model: nn.Module):
    with pytest.raises(ValueError, match="on names no block"):
        bf.with_optimiser(bf.algorithms.fedper(model), SGD(0.1), on=())
