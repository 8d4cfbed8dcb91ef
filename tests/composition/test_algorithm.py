"""Blocks, energies and algorithms: what is refused, what is copied, what is declared, and the two
conventions of an energy.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition import Descend, Energy, Once
from bayesfl.models import mlp
from bayesfl.optim import SGD
from tests.cases import numbers
from tests.composition.made import algorithm, data

W = Energy("w", ("w",), likelihood="mean")


def test_overlapping_parts_are_refused():
    """One predictor takes each parameter from one block: the message names both blocks and the
    parameter.
    """
    model = mlp(2, hidden=3, outputs=2)
    with pytest.raises(ValueError, match=r"'all' and 'last' .*'head\.weight'"):
        algorithm(model, {"all": bf.Block(), "last": bf.Block("head.*")})
    assert algorithm(
        model, {"all": bf.Block(), "last": bf.Block("head.*")}, parts=("all",)
    ).parts == ("all",)


def test_phases_are_checked():
    """A phase trains what its energy's predictor contains; fine-tuning and adaptation too."""
    model = mlp(2, hidden=3, outputs=2)
    blocks = {"body": bf.Block("body.*"), "head": bf.Block("head.*")}
    wrong = Descend(Energy("head", ("body",), likelihood="mean"))
    for where in ("finetune", "adapt", "phases"):
        with pytest.raises(ValueError, match=r"\['head'\] .*energy .*\('body',\)"):
            replace(algorithm(model, blocks), **{where: (wrong,)})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, f"'{name}'.*reserved") for name in ("n", "ids", "round", "rounds")),
        *((name, rf"{name!r} .*dots") for name in ("head.mean", "")),
    ],
)
def test_names_of_blocks_that_are_refused(name: str, words: str):
    """Those that views and uplinks use themselves; and state is saved under names joined by
    dots.
    """
    with pytest.raises(ValueError, match=words):
        algorithm(mlp(2, hidden=3, outputs=2), {name: bf.Block()})


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        (
            "server",
            lambda blocks, clients: {"w": torch.zeros(1)},
            r"`server` has the names \['w'\]",
        ),
        (
            "server",
            lambda blocks, clients: {"round": torch.zeros(1)},
            r"`server` has the names \['round'\].*reserved",
        ),
        ("server", lambda blocks, clients: {"a": {"b.c": torch.zeros(1)}}, r"'b\.c' .*dots"),
        ("server", lambda blocks, clients: {0: torch.zeros(1)}, "0 must be text"),
        ("private", {"w": torch.zeros(1)}, r"`private` has the names \['w'\]"),
        ("private", {"n": torch.zeros(1)}, r"`private` has the names \['n'\]"),
        ("reports", {"w": torch.zeros(1)}, r"`reports` has the names \['w'\]"),
        ("reports", {"ids": 0.0}, r"`reports` has the names \['ids'\]"),
        ("reports", {"a.b": 0.0}, r"'a\.b' .*dots"),
        (
            "address",
            lambda server, ids: {"n": torch.zeros(len(ids))},
            r"`address` has the names \['n'\]",
        ),
    ],
)
def test_names_that_are_taken_are_refused(where, what, words):
    """What a method adds would overwrite a block, or be overwritten, without a word; a run refuses
    it before its first round.
    """
    model = mlp(4, hidden=3, outputs=2)
    with pytest.raises(ValueError, match=words):
        bf.simulate(
            algorithm(model, {"w": bf.Block()}, **{where: what}),
            data(),
            rounds=1,
            evaluate_every=None,
            progress=False,
        )


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4, affine=False),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
)
def test_statistics_are_a_block_beside_the_one_that_covers_the_norm(layer):
    """In eval mode they are constants, and norms over single examples have none."""
    model = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer))
    made = algorithm(model, {"w": bf.Block()})
    assert tuple(made.blocks) == made.whole(("w",)) == ("w", "w_buffers")
    assert made.layout("w_buffers").names == ("1.running_mean", "1.running_var")
    with pytest.raises(ValueError, match=r"no block covers the norm '1'"):
        algorithm(model.requires_grad_(True), {"w": bf.Block("0.*")})
    others = (nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4))
    for plain in (model.eval(), *(nn.Sequential(nn.Linear(4, 4), other) for other in others)):
        assert list(algorithm(plain, {"w": bf.Block()}).blocks) == ["w"]


def test_the_model_is_copied():
    """Changing the original afterwards changes nothing, and training changes neither."""
    model = mlp(4, hidden=3, outputs=2)
    made = bf.algorithms.fedavg(model, epochs=1)
    start = made.init(1)["w"]["loc"].clone()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    assert made.model is not model
    assert torch.equal(made.init(1)["w"]["loc"], start)
    kept = [p.clone() for p in made.model.parameters()]
    result = bf.simulate(made, data(), rounds=1, evaluate_every=None, progress=False)
    assert not torch.equal(result.server["w"]["loc"], start)
    assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), kept, strict=True))
    assert all((p == 7.0).all() for p in model.parameters())


def test_counters_and_masks_stay_what_they_are():
    """Only floating state takes the run's precision, on the server and on the clients."""
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"w": bf.Block()},
        server=lambda blocks, clients: {
            "calls": torch.zeros(clients, dtype=torch.int64),
            "scale": 0.5,
            "open": True,
        },
        private={"steps": torch.tensor(3), "mask": torch.tensor([True, False]), "tau": 0.1},
    )
    server = made.init(4, dtype=torch.float64)
    assert (server["calls"].dtype, server["scale"].dtype, server["open"].dtype) == (
        torch.int64,
        torch.float64,
        torch.bool,
    )
    rows = made.rows(server)
    assert (rows["steps"].dtype, rows["mask"].dtype, rows["tau"].dtype) == (
        torch.int64,
        torch.bool,
        torch.float64,
    )
    assert made.rows(made.init(4))["tau"].dtype == torch.float32


def test_only_what_is_named_leaves_the_server():
    """Blocks, unless they are private or addressed, and what `broadcast` names; the rest stays,
    however it came there.
    """
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {
            "body": bf.Block("body.*"),
            "head": bf.Block("head.*"),
            "own": bf.Block("head.*", pool=None, keep=True),
        },
        parts=("body", "head"),
        server=lambda blocks, clients: {
            "heads": blocks["head"]["loc"].expand(clients, -1),
            "told": 1.0,
            "secret": 2.0,
        },
        broadcast=("told",),
        address=lambda server, ids: {"head": {"loc": server["heads"][ids]}},
    )
    common, addressed = made.share(
        made.init(4) | {"by_combine": torch.tensor(3.0)}, torch.tensor([2, 0])
    )
    assert set(common) == {"body", "told"}
    assert {name: entry["loc"].shape for name, entry in addressed.items()} == {"head": (2, 8)}


def test_reports_are_declared_by_their_start():
    """Tensors, numbers or functions of what is received; in the view at the start of each round,
    sent, and kept where `private` says so.
    """
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"w": bf.Block()},
        reports={
            "drift": lambda given: torch.zeros_like(given["w"]["loc"]),
            "count": torch.tensor(0),
            "tau": 0.5,
        },
        private={"tau": 0.5},
    )
    declared = made.uplink(made.init(1, dtype=torch.float64))
    assert [declared[name] for name in ("drift", "count", "tau")] == [
        ((17,), torch.float64),
        ((), torch.int64),
        ((), torch.float64),
    ]
    server = made.init(3, dtype=torch.float64)
    assert set(made.rows(server)) == {"tau"}
    given = made.given(made.share(server, torch.arange(2))[0], 0, 1)
    view = made.views(
        given, {}, {"tau": torch.tensor([0.25, 0.5]).double()}, torch.ones(2).double()
    )
    assert (view["drift"].shape, view["tau"].tolist()) == ((2, 17), [0.25, 0.5])
    made.check_reported(view, view)
    with pytest.raises(ValueError, match=r"`reports` .*'drift' .*\(17,\).*\(16,\)"):
        made.check_reported(view, view | {"drift": torch.zeros(2, 16).double()})
    with pytest.raises(ValueError, match=r"`reports` .*'count' .*nothing"):
        made.check_reported(view, {name: entry for name, entry in view.items() if name != "count"})
    with pytest.warns(UserWarning, match=r"returns 'dirft'.*leaves 'drift'"):
        made.check_names(view, view | {"dirft": view["drift"] + 1})
    made.check_names(view, view | {"dirft": view["drift"], "drift": view["drift"] + 1})
    made.check_names(view, view | {"old_drift": view["drift"]})


@pytest.mark.parametrize("number", [3, 5])
def test_newcomers_get_nobody_elses_state(number):
    """What the server holds for each client is made anew from the blocks as they are; what it has
    learnt for all stays.
    """
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"body": bf.Block("body.*"), "head": bf.Block("head.*")},
        server=lambda blocks, clients: {
            "per": {
                "heads": blocks["head"]["loc"].expand(clients, -1),
                "share": torch.full((clients,), 1 / clients),
            },
            "learnt": torch.zeros(3),
            "rounds_done": torch.tensor(0),
        },
    )
    server = made.init(3, dtype=torch.float64)
    server["head"] = {"loc": numbers(8)}
    server["per"] = {
        "share": torch.tensor([0.1, 0.2, 0.7]).double(),
        "heads": numbers(3, 8, seed=1),
    }
    server |= {
        "learnt": numbers(3, seed=2),
        "rounds_done": torch.tensor(7),
        "added_by_combine": torch.tensor(1.0),
    }
    found = made.newcomers(server, number)
    assert_close(found["per"]["heads"], server["head"]["loc"].expand(number, -1))
    assert_close(
        found["per"]["share"], torch.full((number,), 1 / number).double(), rtol=1e-6, atol=0
    )
    kept = ("body", "head", "learnt", "rounds_done", "added_by_combine")
    assert [name for name in kept if found[name] is not server[name]] == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fedavg", ("w",)),
        ("ditto", ("w",)),
        ("fedper", None),
        ("fedbabu", ("body", "head")),
        ("pfedvem", ("body", "head")),
        ("local", None),
    ],
)
def test_shared_parts(name, parts):
    """The blocks of a global model, where those that the server holds make one."""
    assert getattr(bf.algorithms, name)(mlp(2, hidden=3, outputs=2)).shared_parts() == parts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {
                "phases": (Descend(W, persist="opt", optimiser=SGD(0.1, 0.9)),),
                "reports": {"opt": 0.0},
            },
            r"phase .*\['opt'\]",
        ),
        (
            {
                "phases": (Once(lambda a, g, v, d: v, kept={"k": torch.zeros(())}),),
                "private": {"k": 0.0},
            },
            r"phase .*\['k'\]",
        ),
        ({"phases": (Descend(W, persist="n", optimiser=SGD(0.1, 0.9)),)}, r"phase .*\['n'\]"),
        (
            {"address": lambda server, ids: {"c": torch.zeros(len(ids))}, "private": {"c": 0.0}},
            "`address` has the names .'c'.",
        ),
        ({"address": lambda server, ids: {"q": torch.zeros(4)}}, r"`address` .*\['q'\].* 1 ids"),
    ],
)
def test_names_and_rows_are_held_against_each_other(options: dict[str, Any], words: str):
    """What a client sends, keeps and is sent goes into one view: a name that stands twice is
    refused before the first round.
    """
    made = replace(algorithm(mlp(2, hidden=3, outputs=2), {"w": bf.Block()}), **options)
    with pytest.raises(ValueError, match=words):
        made.rows(made.init(4))


def test_a_tensor_of_any_name_travels():
    """Only a Mixed pool holds models for single clients, under `each`; another belief's tensor of
    that name is sent as any.
    """
    made = algorithm(mlp(2, hidden=3, outputs=2), {"w": bf.Block()})
    server = made.init(2)
    server["w"] |= {"each": torch.ones(2), "weights": torch.ones(2)}
    common, addressed = made.share(server, torch.arange(1))
    assert (set(common["w"]), addressed) == ({"loc", "each", "weights"}, {})


def test_a_first_axis_that_counts_clients_is_theirs():
    """Of entries beyond the blocks others may grow, those that have a row for each client and
    single numbers may not.
    """
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"w": bf.Block()},
        server=lambda blocks, clients: {
            "each": torch.zeros(clients, 3),
            "models": torch.zeros(1, 3),
            "one": 0.0,
            "more": {"a": torch.zeros(2)},
        },
    )
    assert made.free(1) == made.free(4) == {"models": 1, "more.a": 1}


def test_a_model_in_double_precision_starts_from_all_its_digits():
    """In a run of that precision; in single precision from the nearest numbers."""
    model = mlp(3, hidden=4, outputs=2).double()
    with torch.no_grad():
        model.get_parameter("head.bias").fill_(1 / 3)
    made = bf.algorithms.fedavg(model)
    for dtype in (torch.float64, torch.float32):
        assert made.init(1, dtype=dtype)["w"]["loc"][-1] == torch.tensor(1 / 3, dtype=dtype)
