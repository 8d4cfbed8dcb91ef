"""A whole run: what it refuses, what it measures, and how it goes on."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import SGD
from tests.cases import federation, run


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: bf.algorithms.fedavg(m, epochs=2.0), r"epochs .*got 2\.0"),
        (lambda m: bf.algorithms.fedavg(m, epochs="2"), r"epochs .*got '2'"),
        (lambda m: bf.algorithms.fedavg(m, epochs=0), r"epochs .*1.* got 0"),
        (lambda m: bf.algorithms.fedavg(m, batch_size=10.5), r"batch_size .*got 10\.5"),
        (lambda m: bf.algorithms.pfedvem(m, draws=5.0), r"^draws .*got 5\.0"),
        (lambda m: bf.algorithms.pfedvem(m, init_scale="1"), r"init_scale .*got '1'"),
        (lambda m: bf.algorithms.pfedvem(m, scale_prior=1.0), r"scale_prior .*2 numbers, got 1.0"),
        (
            lambda m: bf.algorithms.pfedvem(m, scale_prior=(1.0,)),
            r"scale_prior .*2 numbers, got \(1.0,\)",
        ),
        (lambda m: bf.algorithms.pfedvem(m, scale_prior=("a", "b")), r"scale_prior .*got 'a'"),
        (
            lambda m: bf.algorithms.pfedvem(m, scale_prior=(-1.0, 1.0)),
            "each of scale_prior must be >= 0 .*got -1",
        ),
        (lambda m: bf.algorithms.pfedme(m, batches=2.5), r"^batches .*got 2\.5"),
        (
            lambda m: bf.algorithms.pfedme(m, lr=lambda round, rounds: 0.1),
            r"lr .*number.* got <function",
        ),
        (lambda m: bf.algorithms.pfedme(m, beta="1"), r"^beta .*got '1'"),
        (lambda m: bf.algorithms.ditto(m, lam="1"), r"^lam .*got '1'"),
        (lambda m: bf.algorithms.ditto(m, lam=-1.0), "^lam must be >= 0 and finite"),
        (lambda m: bf.algorithms.ditto(m, lam=math.nan), "^lam must be >= 0 and finite"),
        (lambda m: bf.algorithms.fedprox(m, mu=-1.0), "^mu must be >= 0 and finite"),
        (lambda m: bf.algorithms.pfedvem(m, scale_floor=0.0), "scale_floor"),
        (lambda m: bf.algorithms.pfedmap(m, precision=None), r"precision .*got None"),
        (
            lambda m: bf.algorithms.pfedmap(m, likelihood_scale="both"),
            r"likelihood_scale .*'sum'.*'mean'.* got 'both'",
        ),
        (
            lambda m: bf.algorithms.pfedvem(m, likelihood_scale="both"),
            r"likelihood_scale .*'sum'.*'mean'.* got 'both'",
        ),
        (
            lambda m: bf.Algorithm(m, {"w": bf.Block()}, (), parts=("w",), draws=1.5),
            r"^draws .*got 1\.5",
        ),
    ],
)
def test_options_are_checked(model, make, words):
    """Where a method is built: a fraction of a step, or text, is refused by name instead of failing
    somewhere inside.
    """
    with pytest.raises(ValueError, match=words):
        make(model)


def test_what_came_is_named(clients, model, tmp_path):
    """The wrong sort of thing is refused where it comes in, with the argument, its type and the
    remedy.
    """
    made = bf.algorithms.fedavg(model)
    result = bf.simulate(made, clients, rounds=1, evaluate_every=None, progress=False)
    arrays: Any = ([torch.zeros(3, 8)], [torch.zeros(3)])
    for call, words in (
        (
            lambda: bf.simulate(model, clients, rounds=1),
            r"algorithm must .* Algorithm, got SplitModel; .*bf\.algorithms\.fedavg\(model\)",
        ),
        (
            lambda: bf.simulate(made, arrays, rounds=1),
            r"clients must .* FederatedData, got tuple; .*bf\.data\.from_arrays",
        ),
        (lambda: bf.load(tmp_path, model, clients), "algorithm must .* Algorithm, got SplitModel"),
        (lambda: bf.load(tmp_path, made, arrays), "clients must .* FederatedData, got tuple"),
        (
            lambda: result.predict(clients),
            r"split must .* ClientData, got FederatedData; pass clients\.test",
        ),
        (
            lambda: result.predict(torch.zeros(3, 8)),
            r"split must .* ClientData, got Tensor; pass clients\.test",
        ),
        (
            lambda: result.adapt(clients.test),
            r"novel must .* FederatedData, got ClientData; .*bf\.data\.from_arrays",
        ),
        (
            lambda: bf.simulate(made, clients, rounds=1, resume=3),
            r"^resume must name a folder.*got ",
        ),
        (
            lambda: bf.simulate(
                bf.algorithms.fedavg(model, likelihood="categorical"), clients, rounds=1
            ),
            r"likelihood .*got str; .*Cat",
        ),
        (
            lambda: bf.simulate(
                bf.algorithms.fedavg(model, likelihood=Bernoulli), clients, rounds=1
            ),
            "likelihood .*the class Bernoulli",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_history_tells_the_models_apart(clients, model):
    """FedAvg: personal and global model are one; before pooling they are not. FedPer has no global
    model. Rounds in between say less.
    """
    result = bf.simulate(
        bf.algorithms.fedavg(model), clients, rounds=5, evaluate_every=2, progress=False
    )
    history = result.history
    assert history["round"].tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(history["personal_accuracy"]).tolist() == [True, False, True, False, False]
    for key in ("accuracy", "nll", "brier", "ece"):
        assert_close(history[f"personal_{key}"], history[f"global_{key}"], equal_nan=True)
    assert abs(history["before_pool_nll"][-1] - history["personal_nll"][-1]) > 1e-4
    assert (history["seconds"] > 0).all()
    fedper, ditto = (
        run(make(model), clients, evaluate_every=1).history
        for make in (bf.algorithms.fedper, bf.algorithms.ditto)
    )
    assert not [key for key in fedper.columns if key.startswith("global_")]
    assert ditto["global_nll"][-1] != ditto["personal_nll"][-1]


def test_before_pool_is_the_model_that_training_left(clients, model):
    """Local never pools: its models before and after are the same, and so are their measures."""
    history = bf.simulate(bf.algorithms.local(model), clients, rounds=2, progress=False).history
    for key in ("accuracy", "nll", "brier", "ece", "mce"):
        assert_close(history[f"before_pool_{key}"], history[f"personal_{key}"])


def test_resume_keeps_the_experiment(clients, model):
    """More rounds, other workers: fine. Another seed, participation or kernel would be another
    experiment.
    """
    algorithm = bf.algorithms.fedavg(model)

    def go_on(before: Any, method: Any = algorithm, data: Any = clients, **options: Any) -> Any:
        options = {"rounds": 2, "evaluate_every": None, "progress": False, **options}
        return bf.simulate(method, data, resume=before, **options)

    first = go_on(None, rounds=1)
    second = go_on(first, engine=bf.Engine(workers=1))
    assert (first.round, second.round) == (1, 2)
    elsewhere = replace(first, device=torch.device("meta"))
    other = bf.algorithms.fedavg(model, optimiser=SGD(9.0, momentum=0.9))
    for before, change, error, words in (
        (first, {"seed": 5}, ValueError, "keeps its settings, seed: saved 0, given 5;"),
        (
            first,
            {"participation": 0.5},
            ValueError,
            r"keeps its settings, participation: saved 1\.0, given 0\.5;",
        ),
        (
            first,
            {"dtype": torch.float64, "seed": 1},
            ValueError,
            "keeps its settings, seed: saved 0, given 1; "
            r"dtype: saved torch\.float32, given torch\.float64;",
        ),
        (first, {"engine": bf.Engine("vmap")}, ValueError, "kernel: saved auto, given vmap"),
        (first, {"method": other}, CheckpointError, "another method"),
        (first, {"data": federation(sizes=(6, 7))}, CheckpointError, "other data"),
        (elsewhere, {}, ValueError, "device: saved meta, given cpu"),
        (second, {"rounds": 1}, ValueError, "already done"),
    ):
        with pytest.raises(error, match=words):
            go_on(before, **change)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            lambda self, x: self.net(nn.functional.embedding(x, torch.ones(3, 8))),
            r"\(8,\).*takes whole numbers.*astype\('int64'\)",
        ),
        (
            lambda self, x, mask: self.net(x),
            r"\(8,\).*mask.*one array are passed as model\(x\), a tuple",
        ),
        (lambda self, x: self.net(x[:, :5]), r"\(8,\).*inputs=clients\.inputs"),
    ],
)
def test_models_that_do_not_take_the_inputs(forward: Any, words: str, clients: FederatedData):
    """The remedy is the one that helps."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3)

    Net.forward = forward
    with pytest.raises(ValueError, match=words):
        bf.simulate(bf.algorithms.fedavg(Net()), clients, rounds=1, progress=False)


def test_a_likelihood_that_lacks_something(clients: FederatedData, model: nn.Module):
    """Is told what it takes."""

    class Plain:
        task = "classification"

        def nll(self, outputs: Any, y: Any) -> Any: ...

        def predictive(self, outputs: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"likelihood .*got Plain; .*width, nll, nll_and_slope"):
        bf.simulate(bf.algorithms.fedavg(model, likelihood=Plain()), clients, rounds=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "measured"), [("fedbabu", 0), ("fedper", 1), ("fedpac", 1)])
def test_parts_that_training_does_not_touch_are_not_measured_before_pooling(
    name: str, measured: int, clients: FederatedData, model: nn.Module
):
    """FedBABU's head is at its start until clients fine-tune it; a model with it would be taken for
    what training has left.
    """
    result = run(getattr(bf.algorithms, name)(model), clients, evaluate_every=1)
    columns = [f"{when}_accuracy" for when in ("before_pool", "personal")]
    assert [column in result.history.columns for column in columns] == [measured, True]


def test_other_blocks_do_not_hide_the_global_model(clients: FederatedData, model: nn.Module):
    """The server's model is measured where it holds all parts, whatever blocks there are beside
    them.
    """
    plain = bf.algorithms.fedavg(model, epochs=1)
    for more in (
        bf.Block("head.*", pool=None, keep=True),
        bf.Block(pool=None),
        bf.Block("head.*", keep=True),
    ):
        made = replace(plain, blocks={**plain.blocks, "other": more})
        assert made.shared_parts() == ("w",)
        assert "global_accuracy" in run(made, clients, evaluate_every=1).history.columns


@pytest.mark.slow
def test_threads_that_draw_meanwhile_get_no_model_refused(clients: FederatedData):
    """No look reads or sets a generator that the whole process shares."""

    def simulate(seed: int) -> Result:
        model = bf.models.mlp(clients.inputs, hidden=4, outputs=3, seed=seed)
        return run(bf.algorithms.fedavg(model, epochs=1), clients)

    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            random.random()
            np.random.rand()  # noqa: NPY002 (the generator that others share)

    with ThreadPoolExecutor(6) as pool:
        drawing = [pool.submit(draw) for _ in range(2)]
        done = [pool.submit(simulate, seed) for _ in range(6) for seed in range(4)]
        wait(done)
        stop.set()
    assert {one.result().round for one in done} == {1}
    assert all(one.exception() is None for one in drawing)
