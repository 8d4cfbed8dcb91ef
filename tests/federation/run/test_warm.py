"""A run that begins where another ended: the same clients, others, more of them, other options."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.run.loading import continued
from bayesfl.federation.run.result import Result
from tests.cases import CASES, Case, federation
from tests.federation.made import run, state

PLACE: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
OF_THE_LAST_ROUND = {
    f"server.{block}.{key}": torch.empty(0, dtype=dtype).expand([0] * axes)
    for block in ("head", "components")
    for key, axes, dtype in (("weights", 2, torch.float64), ("cohort", 1, torch.int64))
}
"""What a `Mixed` pool tells of the last round: a run that begins has had none."""


OF_THEIR_NUMBER = ("server.size", "server.largest_share")
"""What a method's server computes of the number of clients."""

_BEFORE: dict[int, Result] = {}


def before_of(case: Case, model: nn.Module, clients: FederatedData) -> Result:
    """A method's run in which not all clients took part, which the tests of every method share."""
    if id(case) not in _BEFORE:
        options: dict[str, Any] = {"rounds": 2, "evaluate_every": None, "participation": 0.6}
        _BEFORE[id(case)] = run(case(model), clients, **options)
    return _BEFORE[id(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_clients_begin_where_they_were(case: Case, model, clients: FederatedData):
    """Every tensor of the server and of the clients, to the bit unless it is made anew of the
    clients' states, and nobody is new; the run before is left alone.
    """
    before = before_of(case, model, clients)
    kept = {name: t.clone() for name, t in state(before).items()}
    begin, new = continued(before, before.algorithm, clients.client_names, **PLACE)
    assert (len(new), begin.round) == (0, 0)
    wanted = kept | {name: t for name, t in OF_THE_LAST_ROUND.items() if name in kept}
    found = flatten({"server": begin.server, "private": begin.private})
    rounding = 0 if before.algorithm.rebuild is None else 1e-12
    assert_close(found, wanted, atol=rounding, rtol=rounding)
    run(before.algorithm, clients, rounds=1, seed=9, start=before, evaluate_every=None)
    assert_close(state(before), kept, atol=0, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clients_are_matched_by_name(case: Case, model, clients: FederatedData):
    """In another order, some gone and some new: each known one has its rows, along every axis that
    counts clients, and numbers that depend on how many there are are this run's; then a round runs.
    Of a mean that the server holds, none is known.
    """
    before = before_of(case, model, clients)
    names = ("client 4", "Bern", "client 1", "client 6", "Chur")
    known = 0 if before.algorithm.tally and before.algorithm.rebuild is None else 3
    here, there = torch.tensor([0, 2, 3])[:known], torch.tensor([4, 1, 6])[:known]
    with pytest.warns(UserWarning, match="are new and"):
        begin, new = continued(before, before.algorithm, names, **PLACE)
    assert new.tolist() == ([1, 4] if known else [0, 1, 2, 3, 4])
    now, then = flatten({"server": begin.server, "private": begin.private}), state(before)
    assert now.keys() == then.keys()
    five = flatten({"server": before.algorithm.init(5, dtype=torch.float64)})
    for name, t in now.items():
        found, wanted = t, OF_THE_LAST_ROUND.get(name, then[name])
        if name in OF_THEIR_NUMBER:
            wanted = five[name]
        if before.algorithm.rebuild is not None and name.startswith("server.w."):
            continue  # the product of these clients' factors, see the tests of factors
        for axis, sizes in enumerate(zip(t.shape, wanted.shape, strict=True)):
            if sizes == (5, 7):
                found, wanted = found.index_select(axis, here), wanted.index_select(axis, there)
        assert torch.equal(found, wanted), name
    town = replace(clients.select(range(5)), client_names=names)
    with pytest.warns(UserWarning, match="are new and"):
        after = run(before.algorithm, town, rounds=1, seed=9, start=before, evaluate_every=None)
    assert after.round == 1


def test_new_clients_are_adapted_as_by_adapt(model, clients: FederatedData):
    """Without chance in the adaptation, a new client begins with the private state that
    `Result.adapt` gives it.
    """
    made = bf.algorithms.ditto(model, epochs=1, batch_size=None, adapt_epochs=3)
    before = run(made, clients.select(range(5)), rounds=2, evaluate_every=None)
    novel = before.adapt(clients.select([5, 6]))
    with pytest.warns(UserWarning, match="by position"):
        begun = run(
            replace(made, phases=()), clients, rounds=1, seed=9, start=before, evaluate_every=None
        )
    for name, t in flatten(begun.private).items():
        assert_close(t[5:], flatten(novel.private)[name], atol=1e-12, rtol=0)
        assert torch.equal(t[:5], flatten(before.private)[name])
        assert (t[5:] - flatten(made.rows(before.server))[name]).abs().max() > 1e-3


def test_next_month(model, clients: FederatedData, tmp_path: Path):
    """Other rows, another rate; from a result or its folder alike; saved, resumed and repeated as
    any run.
    """
    before = run(bf.algorithms.ditto(model, epochs=1, batch_size=10), clients, evaluate_every=None)
    before.save(tmp_path / "before")
    later = federation(sizes=(30, 20, 40, 25, 30, 20, 10))
    method = bf.algorithms.ditto(model, epochs=2, batch_size=5, optimiser=bf.optim.SGD(0.02))
    runs = [run(method, later, seed=9, start=start) for start in (before, tmp_path / "before")]
    assert_close(state(runs[0]), state(runs[1]), atol=0, rtol=0)
    assert runs[0].round == len(runs[0].history) == 3
    options: dict[str, Any] = {"seed": 9, "start": before, "checkpoint": tmp_path / "run"}
    assert run(method, later, rounds=1, **options).round == 1
    assert_close(state(run(method, later, rounds=3, **options)), state(runs[0]), atol=0, rtol=0)


def test_what_does_not_fit_is_refused(model, clients: FederatedData, tmp_path: Path):
    before = run(bf.algorithms.fedavg(model, epochs=1), clients, rounds=1, evaluate_every=None)
    wide, method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=5, outputs=3)), before.algorithm
    for made, options, error, words in (
        (
            wide,
            {"start": before},
            CheckpointError,
            r"^start .*another network: .*layers\.body\.0: saved Linear.*=16.*, given "
            "Linear.*=5.*more; build",
        ),
        (
            bf.algorithms.ditto(model, epochs=1),
            {"start": before},
            CheckpointError,
            r"^start .*another state.*private\.v\.loc is absent, not .*\[7, 195\]",
        ),
        (method, {"start": tmp_path}, CheckpointError, "no saved run"),
        (method, {"start": 3}, TypeError, "start must name a folder.*got 3"),
        (method, {"start": before, "resume": before}, ValueError, "start .*resume continues"),
    ):
        with pytest.raises(error, match=words):
            run(made, clients, seed=9, **options)
    some = replace(clients, client_names=("Bern", *clients.client_names[1:]))
    strangers = replace(clients, client_names=tuple(f"town {j}" for j in range(7)))
    for data, seed, words in (
        (clients, 3, "^seed 3 "),
        (some, 9, r"\['Bern'\] are new and \['client 0'\]"),
        (strangers, 9, r"\['town 0', .* are new and \['client 0'"),
    ):
        with pytest.warns(UserWarning, match=words):
            run(method, data, seed=seed, start=before, rounds=1, evaluate_every=None)


def test_a_start_in_another_precision(model, clients: FederatedData):
    """Numbers are converted; counters stay counters."""
    before = run(
        bf.algorithms.ifca(model, clusters=2, epochs=1), clients, rounds=1, evaluate_every=None
    )
    begin, _ = continued(
        before, before.algorithm, clients.client_names, **{**PLACE, "dtype": torch.float32}
    )
    assert {name: t.dtype for name, t in flatten(begin.server).items()} == {
        name: torch.float32 if t.is_floating_point() else t.dtype
        for name, t in flatten(before.server).items()
    }


@pytest.mark.parametrize("form", ["result", "folder"])
def test_another_network_is_refused(form: str, clients: FederatedData, tmp_path: Path):
    """Other activations, or another frozen backbone, have tensors of the same shapes; other options
    of the method are free.
    """

    def network(
        activation: type[nn.Module] = nn.ReLU, seed: int = 0, **options: Any
    ) -> bf.Algorithm:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(8, 4), activation(), nn.Linear(4, 3))
        layers[0].requires_grad_(False)
        return bf.algorithms.fedavg(layers, epochs=1, **options)

    before = run(network(), clients, rounds=1, evaluate_every=None)
    before.save(tmp_path)
    start = before if form == "result" else tmp_path
    options: dict[str, Any] = {"rounds": 1, "seed": 9, "evaluate_every": None, "start": start}
    what = "start" if form == "result" else f"'{tmp_path}'"
    for method, words in (
        (network(nn.Tanh), r"another network: layers\.1: saved ReLU\(\), given Tanh\(\); build"),
        (
            network(seed=1),
            r".*constants\.0\.weight: saved .*; constants\.0\.bias: saved .*frozen",
        ),
    ):
        with pytest.raises(CheckpointError, match=f"^{what} has the state of {words}"):
            run(method, clients, **options)
    assert run(network(optimiser=bf.optim.SGD(0.5)), clients, **options).round == 1


def test_unnamed_clients_of_another_number_are_told(
    model, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """Places are all that is known of them: the same number goes on, another warns, also where
    clients have only gone; names do not.
    """
    method = bf.algorithms.fedavg(model, epochs=1)
    unnamed = replace(clients, client_names=tuple(f"client {j}" for j in range(7)))
    before = run(method, unnamed, rounds=1, evaluate_every=None)
    options: dict[str, Any] = {"rounds": 1, "seed": 9, "evaluate_every": None, "start": before}
    fewer = unnamed.select(range(1, 7))
    shifted = replace(fewer, client_names=tuple(f"client {j}" for j in range(6)))
    with warnings.catch_warnings(), caplog.at_level("INFO", "bayesfl"):
        warnings.simplefilter("error")
        run(method, unnamed, **options)
        run(method, fewer, **options)  # which names say who is left
        back = run(method, fewer, rounds=1, evaluate_every=None)
        run(method, unnamed, **{**options, "start": back})  # and who comes back
        assert "places" not in caplog.text
    with pytest.warns(
        UserWarning,
        match=r"the earlier run has 7 clients and this one 6, .*position .*names=.*client_ids=",
    ) as told:
        run(method, shifted, **options)
    assert told[0].filename.endswith("made.py")


def test_data_of_another_problem_are_refused(clients: FederatedData, tmp_path: Path):
    """Classes under other numbers; a last class that this month's rows lack, with the remedy in
    words.
    """
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    ids = np.arange(60) // 20
    named: dict[str, Any] = {"client_ids": ids, "class_names": ["healthy", "ill", "dead"]}
    data = bf.data.from_arrays(x, y, **named)
    turned = bf.data.from_arrays(x, y, **{**named, "class_names": ["ill", "healthy", "dead"]})
    before = run(
        bf.algorithms.fedavg(bf.models.mlp(4, outputs=3), epochs=1),
        data,
        rounds=1,
        evaluate_every=None,
    )
    before.save(tmp_path)
    few, whole = (
        bf.data.from_arrays(x[y < 2], y[y < 2], client_ids=ids[y < 2], outputs=outputs)
        for outputs in (None, 3)
    )
    for other, words in (
        (turned, r"class_names: saved \('healthy', .*given \('ill', 'healthy', .*Categorical"),
        (few, r"outputs: saved 3, given 2; .*from_arrays\(\.\.\., outputs=3\)"),
    ):
        for start in (before, tmp_path):
            with pytest.raises(ValueError, match=f"^clients has other rows .*{words}"):
                run(before.algorithm, other, seed=9, start=start)
    assert run(before.algorithm, whole, rounds=1, seed=9, start=before).round == 1


def test_a_run_that_goes_on_began_from_the_same_start(
    model, clients: FederatedData, tmp_path: Path
):
    """Killed and repeated, from a result or its folder, it goes on without a word; from another
    start it does not.
    """
    method = bf.algorithms.fedavg(model, epochs=1)
    quiet: dict[str, Any] = {"evaluate_every": None, "seed": 9}
    before, other = (run(method, clients, rounds=1, **{**quiet, "seed": seed}) for seed in (3, 4))
    before.save(tmp_path / "before")
    options = {**quiet, "checkpoint": tmp_path / "run"}
    whole = run(method, clients, start=before, **quiet)
    run(
        method,
        clients,
        rounds=3,
        start=before,
        on_round=[lambda so_far: so_far.round == 1],
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in (before, tmp_path / "before", bf.load(tmp_path / "before", method), None):
            assert_close(
                state(run(method, clients, start=start, **options)), state(whole), atol=0, rtol=0
            )
    renamed = replace(
        before, known=replace(clients, client_names=tuple(f"town {j}" for j in range(7)))
    )
    words = (
        r"run' has a run that started from round 1 of a run with seed 3 \(digest \w{16}\), but "
        r"start is round 1 of a run with seed"
    )
    longer = run(bf.algorithms.fedavg(model, epochs=2), clients, rounds=1, evaluate_every=None)
    for start, seed in ((other, 4), (renamed, 3), (longer, 3)):
        with pytest.raises(
            ValueError,
            match=rf"{words} {seed} \(digest \w{{16}}\); pass another folder .*or leave start out",
        ):
            run(method, clients, start=start, **options)


def test_checkpoints_have_a_folder_of_their_own(model, clients: FederatedData, tmp_path: Path):
    """A run that begins from the one in a folder is another than that, which the folder would go on
    with.
    """
    method, options = bf.algorithms.fedavg(model, epochs=1), {"rounds": 1, "evaluate_every": None}
    run(method, clients, checkpoint=tmp_path / "run", **options).save(tmp_path / "saved")
    for name, seed, words in (
        (
            "run",
            3,
            "run' has a run that started from the method's own start, but start is round 1 .*or "
            "leave start out",
        ),
        ("saved", 9, "saved' contains a saved result"),
    ):
        folder = tmp_path / name
        with pytest.raises(ValueError, match=words):
            run(method, clients, seed=seed, start=str(folder), checkpoint=folder, **options)
