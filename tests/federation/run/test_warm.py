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
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.run.warm import continued
from tests.cases import CASES, Case, federation
from tests.federation.made import run, state

PLACE: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_clients_begin_where_they_were(case: Case, model, clients: FederatedData):
    """Every tensor of the server and of the clients, to the bit, and nobody is new; the run before
    is left alone.
    """
    before = run(case(model), clients, rounds=2, evaluate_every=None, participation=0.6)
    kept = {name: t.clone() for name, t in state(before).items()}
    begin, new = continued(before, before.algorithm, clients.client_names, **PLACE)
    assert len(new) == 0
    assert begin.round == 0
    assert_close(flatten({"server": begin.server, "private": begin.private}), kept, atol=0, rtol=0)
    run(case(model), clients, rounds=1, seed=9, start=before, evaluate_every=None)
    assert_close(state(before), kept, atol=0, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clients_are_matched_by_name(case: Case, model, clients: FederatedData):
    """In another order, some gone and some new: each known one has its rows, along every axis that
    counts clients; then a round runs.
    """
    before = run(case(model), clients, rounds=2, evaluate_every=None)
    names = ("client 4", "Bern", "client 1", "client 6", "Chur")
    here, there = torch.tensor([0, 2, 3]), torch.tensor([4, 1, 6])
    with pytest.warns(UserWarning, match="are new and"):
        begin, new = continued(before, before.algorithm, names, **PLACE)
    assert new.tolist() == [1, 4]
    now, then = flatten({"server": begin.server, "private": begin.private}), state(before)
    assert now.keys() == then.keys()
    for name, t in now.items():
        found, wanted = t, then[name]
        for axis in range(t.dim()):
            if t.shape[axis] == 5 and then[name].shape[axis] == 7:
                found, wanted = found.index_select(axis, here), wanted.index_select(axis, there)
        assert torch.equal(found, wanted), name
    town = replace(clients.select(range(5)), client_names=names)
    with pytest.warns(UserWarning, match="are new and"):
        assert (
            run(case(model), town, rounds=1, seed=9, start=before, evaluate_every=None).round == 1
        )


def test_new_clients_are_adapted_as_by_adapt(model, clients: FederatedData):
    """Without chance in the adaptation, a new client begins with the private state that
    `Result.adapt` gives it.
    """
    made = bf.algorithms.ditto(model, epochs=1, batch_size=None, adapt_epochs=3)
    before = run(made, clients.select(range(5)), rounds=2, evaluate_every=None)
    novel = before.adapt(clients.select([5, 6]))
    with pytest.warns(UserWarning, match="by their places"):
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
    with pytest.raises(
        CheckpointError,
        match=r"^start .*another network: .*layers\.body\.0: saved Linear.*=16.*, given "
        r"Linear.*=5.*more; build",
    ):
        run(wide, clients, seed=9, start=before)
    with pytest.raises(
        CheckpointError,
        match=r"^start .*another state.*private\.v\.loc is absent, not .*\[7, 195\]",
    ):
        run(bf.algorithms.ditto(model, epochs=1), clients, seed=9, start=before)
    with pytest.raises(CheckpointError, match=r"no saved run"):
        run(method, clients, seed=9, start=tmp_path)
    with pytest.raises(TypeError, match=r"start must name a folder.*got 3"):
        run(method, clients, seed=9, start=3)
    with pytest.raises(ValueError, match=r"start .*resume goes on"):
        run(method, clients, seed=9, start=before, resume=before)
    with pytest.warns(UserWarning, match=r"^seed 3 "):
        run(method, clients, start=before, rounds=1, evaluate_every=None)
    some = replace(clients, client_names=("Bern", *clients.client_names[1:]))
    with pytest.warns(UserWarning, match=r"\['Bern'\] are new and \['client 0'\]"):
        run(method, some, seed=9, start=before, rounds=1, evaluate_every=None)
    strangers = replace(clients, client_names=tuple(f"town {j}" for j in range(7)))
    with pytest.warns(UserWarning, match="no client has the name"):
        run(method, strangers, seed=9, start=before, rounds=1, evaluate_every=None)


def test_a_start_in_another_precision(model, clients: FederatedData):
    """Numbers are converted; counters stay counters."""
    before = run(
        bf.algorithms.ifca(model, clusters=2, epochs=1), clients, rounds=1, evaluate_every=None
    )
    begin, new = continued(
        before,
        before.algorithm,
        clients.client_names,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert np.array_equal(new, [])
    now, then = flatten(begin.server), flatten(before.server)
    assert all(
        t.dtype == (torch.float32 if then[name].is_floating_point() else then[name].dtype)
        for name, t in now.items()
    )


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
    what = "^start has the state of" if form == "result" else f"^'{tmp_path}' has the state of"
    with pytest.raises(
        CheckpointError,
        match=rf"{what} another network: layers\.1: saved ReLU\(\), given Tanh\(\); build",
    ):
        run(network(nn.Tanh), clients, **options)
    with pytest.raises(
        CheckpointError,
        match=rf"{what} .*constants\.0\.weight: saved .*; constants\.0\.bias: saved .*frozen",
    ):
        run(network(seed=1), clients, **options)
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
        assert "matched by their places" in caplog.text
        caplog.clear()
        run(method, fewer, **options)  # which names say who is left
        back = run(method, fewer, rounds=1, evaluate_every=None)
        run(method, unnamed, **{**options, "start": back})  # and who comes back
        assert "places" not in caplog.text
    with pytest.warns(
        UserWarning, match=r"before has 7 clients and this one 6, .*places .*names=.*client_ids="
    ) as told:
        run(method, shifted, **options)
    assert told[0].filename.endswith("made.py")


def test_data_of_another_problem_are_refused(clients: FederatedData, tmp_path: Path):
    """Classes under other numbers; a last class that this month's rows lack, with the remedy in
    words.
    """
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = np.arange(60) % 3
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
    for start in (before, tmp_path):
        with pytest.raises(
            ValueError,
            match=r"^clients has the classes \['ill', 'healthy', 'dead'\], .*\['healthy', 'ill', "
            r"'dead'\]",
        ):
            run(before.algorithm, turned, seed=9, start=start)
        with pytest.raises(
            ValueError,
            match=r"^clients has inputs \(4,\) and 2 outputs .* 3 .*from_arrays\(\.\.\., "
            r"outputs=3\)",
        ):
            run(
                before.algorithm,
                bf.data.from_arrays(x[y < 2], y[y < 2], client_ids=ids[y < 2]),
                seed=9,
                start=start,
            )
    whole = bf.data.from_arrays(x[y < 2], y[y < 2], client_ids=ids[y < 2], outputs=3)
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
        r"run' holds a run that began from round 1 of a run with seed 3 \(digest \w{16}\), and "
        r"start is round 1 of a run with seed"
    )
    longer = run(bf.algorithms.fedavg(model, epochs=2), clients, rounds=1, evaluate_every=None)
    for start, seed in ((other, 4), (renamed, 3), (longer, 3)):
        with pytest.raises(
            ValueError,
            match=rf"{words} {seed} \(digest \w{{16}}\); pass another folder .*or leave start out",
        ):
            run(method, clients, start=start, **options)
    own = {**options, "checkpoint": tmp_path / "own"}
    run(method, clients, rounds=1, **own)
    with pytest.raises(
        ValueError,
        match=r"own' holds a run that began from the method's own start, and start is round 1",
    ):
        run(method, clients, rounds=1, start=before, **own)


def test_checkpoints_have_a_folder_of_their_own(model, clients: FederatedData, tmp_path: Path):
    """A run that begins from the one in a folder is another than that, which the folder would go on
    with.
    """
    method = bf.algorithms.fedavg(model, epochs=1)
    folder = tmp_path / "run"
    run(method, clients, rounds=1, evaluate_every=None, checkpoint=folder).save(tmp_path / "saved")
    with pytest.raises(
        ValueError,
        match=r"run' holds a run that began from the method's own start, and start is round 1 "
        r".*or leave start out",
    ):
        run(method, clients, rounds=1, evaluate_every=None, start=str(folder), checkpoint=folder)
    with pytest.raises(ValueError, match=r"saved' holds a saved result"):
        run(
            method,
            clients,
            rounds=1,
            seed=9,
            start=tmp_path / "saved",
            checkpoint=tmp_path / "saved",
        )
