"""Settings in words, by which readers see what differs between two runs."""

from functools import partial
from typing import Any

import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Adam, Clip, cosine, multistep
from bayesfl.study.settings import in_words, value_in_words
from tests.cases import run


def told(method: bf.Algorithm, clients: FederatedData, **options: Any) -> dict[str, str]:
    return in_words(run(method, clients, 2, **options))


def test_phases_are_told_by_their_blocks(model: nn.Module, clients: FederatedData):
    rep = bf.algorithms.fedrep(model, head_epochs=2, body_epochs=1, batch_size=10)
    found = told(rep, clients)
    assert found["length"] == "head: 2 epochs, body: 1 epoch"
    assert (found["batch"], found["rounds"], found["dtype"]) == ("10", "2", "float64")
    assert found["data"] == f"{clients.source.name} {clients.hash[:8]}"
    me = bf.algorithms.pfedme(model, batches=4, batch_size=5, inner_steps=3)
    assert told(me, clients)["length"] == "4 batches, each 3 steps"


def test_who_takes_part_is_told(model: nn.Module, clients: FederatedData):
    """Who is drawn matters only where not everyone is; and rounds, of a run that was ended."""
    method = bf.algorithms.fedavg(model, epochs=1)
    for share, kind, words in (
        (0.5, "fixed", "0.5 (cohort trains)"),
        (0.5, "bernoulli", "0.5 (cohort trains, bernoulli)"),
        (1.0, "bernoulli", "1 (cohort trains)"),
    ):
        found = told(method, clients, participation=share, sampling=kind)
        assert found["participation"] == words
    ended = told(method, clients, on_round=[lambda result: result.round == 1])
    assert ended["rounds"] == "1 of 2"


def test_networks_and_likelihoods_are_told(clients: FederatedData):
    part = bf.models.mlp(clients.inputs, hidden=4, outputs=clients.outputs)
    part.get_submodule("body").requires_grad_(False)
    trained, frozen = (
        sum(p.numel() for p in part.parameters() if p.requires_grad == which)
        for which in (True, False)
    )
    smooth = bf.algorithms.fedavg(part, epochs=1, likelihood=Categorical((1.0, 2.0, 1.0)))
    found = told(smooth, clients, dtype=torch.float32)
    assert found["model"] == f"SplitModel of {trained} weights and {frozen} frozen"
    assert "weights=(1.0, 2.0, 1.0)" in found["likelihood"]
    assert found["dtype"] == "float32"


def test_values_are_told_with_what_is_not_by_default():
    """The optimiser that is clipped, with its rate; a schedule's first, last and mean rate."""
    words = partial(value_in_words, rounds=4)
    assert words(Clip(Adam(1e-3))) == "Clip(Adam(0.001), norm 1)"
    assert words(SGD(1e-3, momentum=0.5)) == "SGD(0.001, momentum 0.5)"
    assert words(Adam(0.1, betas=(0.5, 0.9))) == "Adam(0.1, betas (0.5, 0.9))"
    assert words(SGD(multistep(0.5))) == "SGD(a schedule, 0.5 to 0.005, mean 0.264)"
    assert "a schedule, 0.1 to " in words(SGD(cosine(0.1)))
    assert (words(0.1), words("sum"), words(None)) == ("0.1", "sum", "None")
