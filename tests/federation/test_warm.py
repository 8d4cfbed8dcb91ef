"""A run that begins where another ended: the same clients, others, more of them, other options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.warm import continued
from tests.cases import CASES, Case, federation
from tests.federation.made import run, state

PLACE: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_clients_begin_where_they_were(case: Case, model, clients: FederatedData):
    """Every tensor of the server and of the clients, to the bit, and nobody is new; the run before is left alone."""
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
    """In another order, some gone and some new: each known one has its rows, along every axis that counts clients; then a round runs."""
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
        assert run(case(model), town, rounds=1, seed=9, start=before, evaluate_every=None).round == 1


def test_new_clients_are_adapted_as_by_adapt(model, clients: FederatedData):
    """Without chance in the adaptation, a new client begins with the private state that `Result.adapt` gives it."""
    made = bf.algorithms.ditto(model, epochs=1, batch_size=None, adapt_epochs=3)
    before = run(made, clients.select(range(5)), rounds=2, evaluate_every=None)
    novel = before.adapt(clients.select([5, 6]))
    begun = run(replace(made, phases=()), clients, rounds=1, seed=9, start=before, evaluate_every=None)
    for name, t in flatten(begun.private).items():
        assert_close(t[5:], flatten(novel.private)[name], atol=1e-12, rtol=0)
        assert torch.equal(t[:5], flatten(before.private)[name])
        assert (t[5:] - flatten(made.rows(before.server))[name]).abs().max() > 1e-3


def test_next_month(model, clients: FederatedData, tmp_path: Path):
    """Other rows, another rate; from a result or its folder alike; saved, resumed and repeated as any run."""
    before = run(bf.algorithms.ditto(model, epochs=1, batch_size=10), clients, evaluate_every=None)
    before.save(tmp_path / "before")
    later = federation(sizes=(30, 20, 40, 25, 30, 20, 10))
    method = bf.algorithms.ditto(model, epochs=2, batch_size=5, lr=0.02)
    runs = [run(method, later, seed=9, start=start) for start in (before, tmp_path / "before")]
    assert_close(state(runs[0]), state(runs[1]), atol=0, rtol=0)
    assert runs[0].round == len(runs[0].history) == 3
    options: dict[str, Any] = {"seed": 9, "start": before, "checkpoint": tmp_path / "run", "resume": True}
    assert run(method, later, rounds=1, **options).round == 1
    assert_close(state(run(method, later, rounds=3, **options)), state(runs[0]), atol=0, rtol=0)


def test_what_does_not_fit_is_refused(model, clients: FederatedData, tmp_path: Path):
    before = run(bf.algorithms.fedavg(model, epochs=1), clients, rounds=1, evaluate_every=None)
    wide, method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=5, outputs=3)), before.algorithm
    with pytest.raises(CheckpointError, match=r"start.*server\.w\.loc is .*\[195\], not .*\[63\]"):
        run(wide, clients, seed=9, start=before)
    with pytest.raises(CheckpointError, match=r"no saved run"):
        run(method, clients, seed=9, start=tmp_path)
    with pytest.raises(TypeError, match=r"start .*Result.*got int"):
        run(method, clients, seed=9, start=3)
    with pytest.raises(ValueError, match=r"start .*resume"):
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
    before = run(bf.algorithms.ifca(model, clusters=2, epochs=1), clients, rounds=1, evaluate_every=None)
    begin, new = continued(before, before.algorithm, clients.client_names, dtype=torch.float32, device=torch.device("cpu"))
    assert np.array_equal(new, [])
    now, then = flatten(begin.server), flatten(before.server)
    assert all(t.dtype == (torch.float32 if then[name].is_floating_point() else then[name].dtype) for name, t in now.items())
