"""Several results in one table, and what of their training differs."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.comparison import compare, passes
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD, Adam, Clip, cosine, multistep
from tests.cases import run


def found(method: bf.Algorithm, clients: FederatedData, **options: Any) -> Any:
    return run(method, clients, 2, evaluate_every=1, **options)


def differing(told: str) -> list[str]:
    """The lines on options that no column has."""
    return [line for line in told.splitlines() if "differs" in line]


def has(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def test_what_differs_stands_beneath(model: nn.Module, clients: FederatedData):
    """Steps, batches, optimisers, rounds and who takes part, as far as the results differ in them;
    with every phase that trains.
    """
    results = {
        "FedAvg": found(
            bf.algorithms.fedavg(model, epochs=1, batch_size=10, optimiser=SGD(0.1)), clients
        ),
        "FedRep": found(
            bf.algorithms.fedrep(
                model, head_epochs=2, body_epochs=1, batch_size=10, optimiser=SGD(0.1)
            ),
            clients,
        ),
        "pFedMe": found(bf.algorithms.pfedme(model, batch_size=5), clients, participation=0.5),
    }
    text = compare(results)
    first, second = text.split("\n\n")
    for name, result in results.items():
        (line,) = [line for line in first.splitlines() if line.startswith(name)]
        assert f"{result.history[-1]['personal_accuracy']:.3f}" in line
    head, _, *lines = second.splitlines()
    columns = ["participation", "steps", "passes a round", "batch", "optimiser"]
    assert head.split() == ["trained", "with", *" ".join(columns).split()]
    assert "*" not in first
    assert "head: 2 epochs, body: 1 epoch" in lines[1]
    assert has(lines[2], "0.5 (all trains)", " 5 ")
    assert "SGD(0.1)" in lines[0]


def test_passes_count_every_model(model: nn.Module, clients: FederatedData):
    """Second models, heads, components, and the steps of a `Repeat` on each batch."""

    def counted(method: bf.Algorithm) -> float:
        return passes(run(method, clients, rounds=1, evaluate_every=None))

    algorithms, n = bf.algorithms, clients.train.counts
    assert counted(algorithms.fedavg(model, epochs=3)) == 3
    assert counted(algorithms.ditto(model, epochs=3)) == 6
    assert counted(algorithms.fedrep(model, head_epochs=2, body_epochs=1)) == 3
    assert counted(algorithms.fedem(model, components=3, epochs=2)) == 6
    found = counted(algorithms.pfedme(model, batches=4, batch_size=5, inner_steps=3))
    assert found == pytest.approx(3 * 4 * np.minimum(1, 5 / n).mean())


def test_what_is_alike_is_not_said(model: nn.Module, clients: FederatedData):
    """Nothing differs between two runs of one setting; a schedule is called one; several seeds make
    one row.
    """
    one = found(
        bf.algorithms.fedavg(
            model, epochs=1, optimiser=SGD(lambda round, rounds: 0.1, momentum=0.9)
        ),
        clients,
    )
    told = compare({"a": one, "b": [one, one]})
    assert ("trained with" in told, "±" in told) == (False, True)
    other = found(bf.algorithms.fedavg(model, epochs=1), clients)
    assert "a schedule" in compare({"a": one, "b": other}, style="markdown")


def test_what_cannot_be_compared(model: nn.Module, clients: FederatedData):
    for one, options, words in (
        ({"evaluate_every": 1}, {"columns": ["speed"]}, r"'a' .*'speed'"),
        ({}, {}, r"'a' .*'accuracy'.*evaluate_every"),
    ):
        result = run(bf.algorithms.fedavg(model, epochs=1), clients, **one)
        with pytest.raises(ValueError, match=words):
            compare({"a": result}, **options)


def test_other_data_and_other_seeds_are_told(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Numbers on other data cannot be compared; results that were loaded without their data know
    them, too.
    """
    method = bf.algorithms.fedavg(model, epochs=1)
    few = clients.select(range(clients.clients - 1))
    one, other = found(method, clients, seed=0), found(method, few, seed=1)
    one.save(tmp_path / "one")
    alone = bf.load(tmp_path / "one", method)
    known, fewer = (f"{data.source.name} {data.hash[:8]}" for data in (clients, few))
    lines = compare({"a": alone, "b": [other, one]}).splitlines()[-2:]
    assert [" ".join(line.split()) for line in lines] == [
        f"a {known} 0",
        f"b {fewer}, {known} 0, 1",
    ]
    assert "data" not in compare({"a": one, "b": found(method, clients, seed=1)})


def test_what_clip_and_schedules_hold_is_told(model: nn.Module, clients: FederatedData):
    """The optimiser that is clipped, with its rate; a schedule's first and last rate; steps inside
    a `Repeat` are steps.
    """
    method = partial(bf.algorithms.fedavg, model, epochs=1)
    one, two = (
        found(method(optimiser=Clip(inner)), clients)
        for inner in (Adam(1e-3), SGD(1e-3, momentum=0.5))
    )
    clipped = ("Clip(Adam(0.001), norm 1)", "Clip(SGD(0.001, momentum 0.5), norm 1)")
    assert has(compare({"a": one, "b": two}), *clipped)
    falling, halved = (
        found(method(optimiser=SGD(rate, momentum=0.9)), clients)
        for rate in (cosine(0.1), multistep(0.5))
    )
    assert "a schedule, 0.1 to " in compare({"a": falling, "b": halved})
    me = found(bf.algorithms.pfedme(model, batches=4, inner_steps=3), clients)
    assert "4 batches, each 3 steps" in compare({"a": one, "b": me})


def test_options_of_one_method_are_told(model: nn.Module, clients: FederatedData):
    """What no column has: a proximal weight, betas; and networks of other widths, of which some
    layers may be frozen.
    """
    prox = {
        name: found(bf.algorithms.fedprox(model, mu=mu, epochs=1), clients)
        for name, mu in (("a", 0.1), ("b", 2.0), ("c", 0.1))
    }
    told = compare(prox)
    assert differing(told) == ["b differs from a in fedprox.mu: 2.0, not 0.1"]
    assert "trained with" not in told
    adam = {
        str(b): found(
            bf.algorithms.fedavg(model, epochs=1, optimiser=Adam(0.1, betas=(b, 0.9))), clients
        )
        for b in (0.5, 0.7)
    }
    assert "Adam(0.1, betas (0.5, 0.9))" in compare(adam)
    wide, part = (
        bf.models.mlp(clients.inputs, hidden=width, outputs=clients.outputs) for width in (9, 4)
    )
    part.get_submodule("body").requires_grad_(False)
    told = compare(
        {
            "wide": found(bf.algorithms.fedavg(wide, epochs=1), clients),
            "part": found(bf.algorithms.fedavg(part, epochs=1), clients),
        }
    )
    count, held = (
        sum(p.numel() for p in of.parameters()) for of in (wide, part.get_submodule("body"))
    )
    assert has(
        told,
        f"SplitModel of {count} weights",
        f" weights and {held} frozen",
        "part differs from wide in layers.body.0: Linear(in_features=8, out_features=4",
    )


def test_schedules_with_equal_ends_differ_by_their_means(model: nn.Module, clients: FederatedData):
    rates = {
        "flat": lambda round, rounds: 0.1,
        "dip": lambda round, rounds: 0.1 if round != 1 else 0.01,
    }
    made = {
        name: bf.algorithms.fedavg(model, epochs=1, optimiser=SGD(rate, momentum=0.9))
        for name, rate in rates.items()
    }
    told = compare({name: run(one, clients, 3, evaluate_every=1) for name, one in made.items()})
    assert has(told, "0.1 to 0.1, mean 0.1,", "0.1 to 0.1, mean 0.07,")


def test_all_of_a_list_is_told(model: nn.Module, clients: FederatedData):
    """Not of the first result alone: rounds, optimisers, and the options that no column has."""
    methods = [
        bf.algorithms.fedprox(model, mu=mu, optimiser=SGD(rate), epochs=1)
        for mu, rate in ((0.1, 0.01), (2.0, 0.5), (0.1, 0.5))
    ]
    one, two, three = (
        run(made, clients, rounds, evaluate_every=1)
        for made, rounds in zip(methods, (2, 2, 3), strict=True)
    )
    told = compare({"mixed": [one, two, three], "b": three})
    mixed, b = (
        [line for line in told.splitlines() if line.startswith(name)][1] for name in ("mixed", "b")
    )
    assert has(mixed, "2, 3", "SGD(0.01), SGD(0.5)")
    assert "0.01" not in b
    assert differing(told) == ["mixed differs from its first run in fedprox.mu: 2.0, not 0.1"]


def test_rounds_of_a_run_that_was_ended(model: nn.Module, clients: FederatedData):
    method = bf.algorithms.fedavg(model, epochs=1)
    ended = found(method, clients, on_round=[lambda result: result.round == 1])
    told = compare({"ended": ended, "whole": found(method, clients)}).splitlines()[-2:]
    assert [line.split() for line in told] == [["ended", "1", "of", "2"], ["whole", "2"]]


def test_likelihood_precision_and_sampling_are_told(model: nn.Module, clients: FederatedData):
    """In columns, also between methods; who is drawn matters only where not everyone is."""
    method = bf.algorithms.fedavg(model, epochs=1)
    smooth = found(
        bf.algorithms.fedavg(model, epochs=1, likelihood=Categorical(smoothing=0.2)), clients
    )
    for other in (bf.algorithms.ditto(model, epochs=1), method):
        told = compare({"a": smooth, "b": found(other, clients)})
        assert has(told, "smoothing=0.2", "smoothing=0.0")
    assert "differs" not in told
    half, single = found(method, clients), found(method, clients, dtype=torch.float32)
    assert [line.split()[-1] for line in compare({"a": half, "b": single}).splitlines()[-4:]] == [
        "dtype",
        "-------",
        "float64",
        "float32",
    ]
    for share, alike in ((0.5, False), (1.0, True)):
        some = {
            kind: found(method, clients, participation=share, sampling=kind)
            for kind in ("fixed", "bernoulli")
        }
        assert ("trained with" not in compare(some)) == alike
        assert ("0.5 (cohort trains, bernoulli)" in compare(some)) != alike


def test_layers_are_told_and_lines_are_few(clients: FederatedData):
    """Activations, of which no shape tells; of many differences the first eight."""

    def network(activation: type[nn.Module], depth: int) -> Any:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), activation())]
        return found(
            bf.algorithms.fedavg(nn.Sequential(*layers, nn.Linear(8, 3)), epochs=1), clients
        )

    assert compare({"relu": network(nn.ReLU, 1), "tanh": network(nn.Tanh, 1)}).splitlines()[-1] == (
        "tanh differs from relu in layers.1: Tanh(), not ReLU()"
    )
    *_, eighth, last = compare(
        {"relu": network(nn.ReLU, 10), "tanh": network(nn.Tanh, 10)}
    ).splitlines()
    assert eighth == "tanh differs from relu in layers.15: Tanh(), not ReLU()"
    assert last == "tanh differs in 2 more"
