"""The driver of rounds: participation, measures, and what happens when something is wrong."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend, Once, Repeat, described
from bayesfl.composition.pools import Mean, Stack
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.one_machine import OneMachine
from bayesfl.federation.replies import OpenRun
from bayesfl.federation.round import Rules, run_round
from bayesfl.federation.settings import Settings
from bayesfl.likelihoods import Bernoulli, Gaussian
from bayesfl.optim import cosine
from tests.cases import SIZES, federation

SETTINGS = {"rounds": 100, "participation": 0.29, "sampling": "fixed", "train": "cohort", "seed": 0, "evaluate_every": None}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return bf.models.mlp(8, hidden=8, outputs=3)


def test_fixed_cohorts():
    """max(1, floor(J p)) different clients, whatever 0.29 * 100 is in binary; every client gets its turn."""
    settings = Settings(**SETTINGS)
    cohorts = [settings.cohort(100, r) for r in range(100)]
    assert {len(c) for c in cohorts} == {29}
    assert all(len(set(c.tolist())) == 29 for c in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=100)
    assert abs(counts - 29).max() < 5 * math.sqrt(29 * 0.71)
    assert len(Settings(**{**SETTINGS, "participation": 0.001}).cohort(100, 0)) == 1


def test_bernoulli_cohorts_have_two_at_least():
    """Independent coins, given that min(2, J) are in: sizes have that distribution, members are alike, however rare a client is."""
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": 0.1})
    cohorts = [settings.cohort(100, r) for r in range(400)]
    sizes = np.array([len(c) for c in cohorts])
    assert abs(sizes.mean() - 10) < 5 * math.sqrt(9 / 400)
    assert abs(sizes.var() - 9) < 4
    assert all(np.array_equal(c, np.unique(c)) for c in cohorts)
    assert abs(np.bincount(np.concatenate(cohorts), minlength=100) - 40).max() < 5 * math.sqrt(400 * 0.09)
    assert np.array_equal(cohorts[7], Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": 0.1}).cohort(100, 7))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
def test_sizes_of_bernoulli_cohorts(share):
    """Of 6 clients: the binomial distribution without 0 and 1, by its own formula."""
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": share})
    drawn = np.bincount([len(settings.cohort(6, r)) for r in range(4000)], minlength=7)
    expected = np.array([math.comb(6, k) * share**k * (1 - share) ** (6 - k) if k >= 2 else 0.0 for k in range(7)])
    expected *= 4000 / expected.sum()
    assert drawn[:2].sum() == 0
    assert (abs(drawn - expected) < 5 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize("share", [1e-300, 1e-9, 1 - 1e-12, 1.0])
def test_bernoulli_cohorts_need_no_second_draw(share):
    """At the ends of the range the size is the only one that is likely, and it comes at once."""
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": share})
    for clients in (1, 2, 10, 100_000):
        assert len(settings.cohort(clients, 0)) == (min(2, clients) if share < 0.5 else clients)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"participation": 0.0}, "participation"),
        ({"participation": 1.2}, r"participation .* \(0, 1\], got 1.2"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 1.5}, "rounds must be a whole number"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"device": "nonsense"}, "device 'nonsense' is absent"),
        ({"sampling": "poisson"}, "sampling"),
        ({"train": "some"}, "train"),
        ({"sampling": ""}, "sampling"),
        ({"evaluate_every": 0}, "evaluate_every .*at least 1, got 0"),
        ({"evaluate_every": 1.0}, "evaluate_every .*whole number, got 1.0"),
        ({"rounds": "5"}, "rounds must be a whole number, got '5'"),
        ({"rounds": None}, "rounds must be a whole number, got None"),
        ({"rounds": True}, "rounds must be a whole number, got True"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"participation": "a"}, "participation must be a number, got 'a'"),
        ({"participation": None}, "participation must be a number"),
        ({"participation": math.nan}, "participation .* got nan"),
        ({"engine": "layers"}, r"engine must be an Engine, got 'layers'; .*bf\.Engine\(kernel"),
        ({"dtype": "float32"}, "dtype must be a floating-point type .*got 'float32'"),
        ({"dtype": torch.int64}, "dtype must be a floating-point type"),
    ],
)
def test_settings_are_checked(clients, model, change, words):
    """Before anything starts, with the argument and its value in the message."""
    with pytest.raises(ValueError, match=words):
        bf.simulate(bf.algorithms.fedavg(model), clients, **{"rounds": 2, "progress": False, **change})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: bf.algorithms.fedavg(m, epochs=2.0), "epochs must be a whole number, got 2.0"),
        (lambda m: bf.algorithms.fedavg(m, epochs="2"), "epochs must be a whole number, got '2'"),
        (lambda m: bf.algorithms.fedavg(m, epochs=0), "epochs must be at least 1, got 0"),
        (lambda m: bf.algorithms.fedavg(m, batch_size=10.5), "batch_size must be a whole number, got 10.5"),
        (lambda m: bf.algorithms.fedavg(m, lr="0.1"), "rate must be a number, got '0.1'"),
        (lambda m: bf.algorithms.fedavg(m, momentum=None), "momentum must be a number, got None"),
        (lambda m: bf.algorithms.pfedvem(m, draws=5.0), "draws must be a whole number, got 5.0"),
        (lambda m: bf.algorithms.pfedvem(m, init_scale="1"), "init_scale must be a number, got '1'"),
        (lambda m: bf.algorithms.pfedvem(m, scale_prior=1.0), "scale_prior must be two numbers, shape and scale, or None, got 1.0"),
        (lambda m: bf.algorithms.pfedvem(m, scale_prior=(1.0,)), r"scale_prior must be two numbers, .*got \(1.0,\)"),
        (lambda m: bf.algorithms.pfedvem(m, scale_prior=("a", "b")), "each of scale_prior must be a number, got 'a'"),
        (lambda m: bf.algorithms.pfedvem(m, scale_prior=(-1.0, 1.0)), "scale_prior's shape and scale >= 0"),
        (lambda m: bf.algorithms.pfedme(m, batches=2.5), "times must be a whole number, got 2.5"),
        (lambda m: bf.algorithms.pfedme(m, lr=lambda round, rounds: 0.1), "lr must be a number"),
        (lambda m: bf.algorithms.pfedme(m, beta="1"), "step must be a number, got '1'"),
        (lambda m: bf.algorithms.ditto(m, lam="1"), r"strength of a pull \(lam, mu\) must be a number, got '1'"),
        (lambda m: bf.algorithms.pfedmap(m, precision=None), "precision must be a number, got None"),
        (lambda m: bf.algorithms.pfedmap(m, likelihood_scale="both"), "likelihood_scale must be 'sum' or 'mean', got 'both'"),
        (lambda m: bf.algorithms.pfedvem(m, likelihood_scale="both"), "likelihood_scale must be 'sum' or 'mean', got 'both'"),
        (lambda m: bf.Algorithm(m, {"w": bf.Block()}, (), parts=("w",), draws=1.5), "draws must be a whole number, got 1.5"),
    ],
)
def test_options_are_checked(model, make, words):
    """Where a method is built: a fraction of a step, or text, is refused by name instead of failing somewhere inside."""
    with pytest.raises(ValueError, match=words):
        make(model)


def test_an_absent_device_is_named(clients, model):
    """A machine without CUDA says so and names what works."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ValueError, match=r"'cuda' is absent.*device='cpu'"):
        bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1, device="cuda")


def test_model_and_data_must_fit(clients, model):
    """Outputs, inputs and likelihood are compared with the data before training starts."""
    with pytest.raises(ValueError, match="5 outputs, the data 3 classes"):
        bf.simulate(bf.algorithms.fedavg(bf.models.mlp(8, outputs=5)), clients, rounds=1)
    with pytest.raises(ValueError, match=r"inputs of shape \(8,\) \(mat1 .*\); build it with inputs=clients.inputs"):
        bf.simulate(bf.algorithms.fedavg(bf.models.mlp(9, outputs=3)), clients, rounds=1)
    with pytest.raises(ValueError, match="Gaussian is for regression"):
        bf.simulate(bf.algorithms.fedavg(model, likelihood=Gaussian()), clients, rounds=1)
    with pytest.raises(ValueError, match="Categorical is for classification, the data are for regression"):
        bf.simulate(bf.algorithms.fedavg(bf.models.mlp((10,), outputs=1)), bf.data.diabetes(clients=3), rounds=1)
    with pytest.raises(ValueError, match="Bernoulli is for two classes, the data have 3"):
        bf.simulate(bf.algorithms.fedavg(bf.models.mlp(8, outputs=1), likelihood=Bernoulli()), clients, rounds=1)
    with pytest.raises(ValueError, match="3 outputs, the data 1 targets"):
        bf.simulate(bf.algorithms.fedavg(bf.models.mlp((10,), outputs=3), likelihood=Gaussian()), bf.data.diabetes(clients=3), rounds=1)
    bare = bf.data.FederatedData(
        splits={"train": clients.train}, outputs=3, task="classification", inputs=(8,), client_names=clients.client_names,
        source=clients.source, recipe={},
    )  # fmt: skip
    with pytest.raises(ValueError, match="evaluate_every=None"):
        bf.simulate(bf.algorithms.fedavg(model), bare, rounds=1)
    assert bf.simulate(bf.algorithms.fedavg(model), bare, rounds=1, evaluate_every=None, progress=False).round == 1


def test_what_came_is_named(clients, model, tmp_path):
    """The wrong sort of thing is refused where it comes in, with the argument, its type and the remedy."""
    made = bf.algorithms.fedavg(model)
    result = bf.simulate(made, clients, rounds=1, evaluate_every=None, progress=False)
    arrays: Any = ([torch.zeros(3, 8)], [torch.zeros(3)])
    wrong: Any = 3
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: bf.simulate(model, clients, rounds=1), r"algorithm must .* Algorithm, got SplitModel; .*bf\.algorithms\.fedavg\(model\)"),
        (lambda: bf.simulate(made, arrays, rounds=1), r"clients must .* FederatedData, got tuple; .*bf\.data\.from_arrays"),
        (lambda: bf.load(tmp_path, model, clients), "algorithm must .* Algorithm, got SplitModel"),
        (lambda: bf.load(tmp_path, made, arrays), "clients must .* FederatedData, got tuple"),
        (lambda: result.predict(clients), r"split must .* ClientData, got FederatedData; pass clients\.test"),
        (lambda: result.predict(torch.zeros(3, 8)), r"split must .* ClientData, got Tensor; pass clients\.test"),
        (lambda: result.adapt(clients.test), r"novel must .* FederatedData, got ClientData; .*bf\.data\.from_arrays"),
        (lambda: bf.simulate(made, clients, rounds=1, resume=wrong), "resume must be a Result or the folder .*got int; .*resume=None"),
        (lambda: bf.simulate(bf.algorithms.fedavg(model, likelihood="categorical"), clients, rounds=1), r"likelihood .*got str; .*Cat"),
        (lambda: bf.simulate(bf.algorithms.fedavg(model, likelihood=Bernoulli), clients, rounds=1), "likelihood .*the class Bernoulli"),
        (lambda: bf.algorithms.fedavg("mlp"), r"model must .* Module, got str; .*bf\.models\.mlp"),
        (lambda: bf.algorithms.pfedvem(nn.Linear), r"model must .* Module, got the class Linear; "),
    )
    for call, words in calls:
        with pytest.raises(TypeError, match=words):
            call()


class Dropping(nn.Module):
    """Dropout as a function, which no list of layers shows."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(8, 3), p

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, self.p, training=self.training))


def test_a_forward_that_draws_is_refused(clients):
    """Equal seeds would give unequal weights; torch's own generator is not moved by the look at it."""
    options = {"rounds": 1, "evaluate_every": None, "progress": False}
    drawing, still = [Dropping(0.5), Dropping(0.05)], [Dropping(0.0), Dropping(0.5).eval()]
    before = torch.get_rng_state()
    for module in drawing:
        with pytest.raises(ValueError, match=r"the model Dropping gives other outputs .*F\.dropout.*pass training=False"):
            bf.simulate(bf.algorithms.fedavg(module), clients, **options)
    for module in still:
        assert bf.simulate(bf.algorithms.fedavg(module), clients, **options).round == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("train", ["cohort", "all"])
def test_divergence_gives_back_the_last_finite_round(clients, model, train):
    """A loss that leaves the finite numbers stops the run, names client, round and phase, and loses nothing before it."""

    def explosive(rate):
        return bf.algorithms.fedrep(model, lr=rate, head_epochs=1, body_epochs=1)

    options = {"participation": 0.6, "train": train, "seed": 1, "evaluate_every": 1, "progress": False, "engine": bf.Engine(chunk=2)}
    with pytest.raises(bf.DivergenceError, match=r"client .* phase [01] \(Descend on (head|body)\) of round 2, .* from 0") as caught:
        bf.simulate(explosive(lambda round, rounds: 0.05 if round < 2 else 1e38), clients, rounds=5, **options)
    error = caught.value
    assert error.round == 2
    assert error.client in range(len(SIZES))
    assert error.phase in (0, 1)
    assert error.result is not None
    assert error.result.round == len(error.result.history) == 2
    kept = bf.simulate(explosive(lambda round, rounds: 0.05), clients, rounds=2, **options)
    for a, b in zip(tree_leaves((error.result.server, error.result.private)), tree_leaves((kept.server, kept.private)), strict=True):
        assert torch.equal(a, b)
    assert_close(error.result.predict().probs, kept.predict().probs, equal_nan=True)


def test_divergence_names_the_blocks():
    """Those that a phase trains, also inside `Repeat`; a phase that trains none is named alone."""
    step = Descend(Energy(("a", "b"), ("a", "b"), likelihood="mean"))
    assert described(step) == "Descend on a, b"
    assert described(Repeat((Once(lambda algorithm, given, view, batch: view), step), times=2)) == "Repeat on a, b"
    assert described(Once(lambda algorithm, given, view, batch: view)) == "Once"


class Interrupted(BaseException):
    """Neither an error nor ours."""


@pytest.mark.parametrize("where", ["combine", "solve", "phase"])
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_whatever_is_raised_leaves_private_rows_as_they_were(clients, model, where, error):
    """An error in any part of a method, or from outside, undoes what its round has written, as a divergence does."""
    fail: list[str] = []

    def maybe(part: str) -> None:
        if part in fail:
            raise error(part)

    class Pool(Mean):
        def solve(self, server: Server, name: str, total: Tensors) -> Tensors:
            maybe("solve")
            return super().solve(server, name, total)

    def touch(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        if int(view["n"]) == min(SIZES):  # the last chunk
            maybe("phase")
        return view

    def combine(server: Server, ids: Tensor, uplink: dict[str, Tensor]) -> Server:
        maybe("combine")
        return {}

    plain = bf.algorithms.fedper(model, epochs=1)
    blocks = {"body": replace(plain.blocks["body"], pool=Pool()), "head": plain.blocks["head"]}
    made = replace(plain, blocks=blocks, phases=(*plain.phases, Once(touch)), combine=combine)
    options = {"engine": bf.Engine("reference", chunk=2, workers=1), "evaluate_every": None, "progress": False}
    first = bf.simulate(made, clients, rounds=1, **options)
    kept = [t.clone() for t in tree_leaves((first.server, first.private))]
    fail.append(where)
    with pytest.raises(error, match=where):
        bf.simulate(made, clients, rounds=2, resume=first, **options)
    rules = Rules(made, first.settings, clients.clients, made.uplink(), bf.Admission(), OpenRun(made, first.settings, clients.clients, 1))
    with first.engine.crew(first.device) as crew:
        transport = OneMachine(first.local(clients.train), first.state, crew, None, None)
        with pytest.raises(error, match=where):
            run_round(rules, first.server, first.round, first.history, transport)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves((first.server, first.private)), kept, strict=True))
    fail.clear()
    again = bf.simulate(made, clients, rounds=2, resume=first, **options)
    whole = bf.simulate(made, clients, rounds=2, **options)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(again.private), tree_leaves(whole.private), strict=True))


@pytest.mark.parametrize("kernel", ["reference", "live", "layers", "vmap"])
def test_counters_and_masks_are_kept(clients, model, kernel, tmp_path):
    """Private and server state of whole numbers and truth values goes through rounds, checks, saving and adapting as it is."""

    def count(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        return view | {"rounds_in": view["rounds_in"] + 1, "mask": ~view["mask"]}

    plain = bf.algorithms.fedper(model, epochs=1)
    made = replace(
        plain,
        phases=(Once(count), *plain.phases),
        server=lambda blocks, jobs: {"seen": torch.zeros(jobs, dtype=torch.int64), "on": torch.tensor(True)},
        private={"rounds_in": torch.tensor(0), "mask": torch.tensor([True, False])},
        reports={"rounds_in": torch.tensor(0)},
        combine=lambda server, ids, uplink: {"seen": server["seen"].index_add(0, ids, torch.ones_like(ids)), "on": ~server["on"]},
    )
    options = {"participation": 0.5, "evaluate_every": None, "progress": False, "engine": bf.Engine(kernel, chunk=2, workers=1)}
    run = bf.simulate(made, clients, rounds=3, **options)
    chosen = np.bincount(np.concatenate([run.settings.cohort(7, r) for r in range(3)]), minlength=7)
    assert run.server["seen"].tolist() == run.private["rounds_in"].tolist() == chosen.tolist()
    assert run.private["mask"].tolist() == [[n % 2 == 0, n % 2 == 1] for n in chosen]
    assert run.server["on"].item() is False
    run.save(tmp_path / "run")
    again = bf.load(tmp_path / "run", made, clients)
    assert (again.private["mask"].dtype, again.server["seen"].dtype) == (torch.bool, torch.int64)
    assert made.uplink()["rounds_in"] == ((), torch.int64)
    novel = run.adapt(federation(sizes=(9, 8, 7)))
    assert novel.server["seen"].tolist() == [0, 0, 0]


def test_history_tells_the_models_apart(clients, model):
    """FedAvg: personal and global model are one; before pooling they are not. FedPer has no global model. Rounds in between say less."""
    result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=5, evaluate_every=2, progress=False)
    history = result.history
    assert history["round"].tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(history["personal_accuracy"]).tolist() == [True, False, True, False, False]
    for key in ("accuracy", "nll", "brier", "ece"):
        assert_close(history[f"personal_{key}"], history[f"global_{key}"], equal_nan=True)
    assert abs(history["before_pool_nll"][-1] - history["personal_nll"][-1]) > 1e-4
    assert (history["seconds"] > 0).all()
    fedper = bf.simulate(bf.algorithms.fedper(model), clients, rounds=1, progress=False).history
    assert not [key for key in fedper.columns if key.startswith("global_")]
    ditto = bf.simulate(bf.algorithms.ditto(model), clients, rounds=1, progress=False).history
    assert ditto["global_nll"][-1] != ditto["personal_nll"][-1]


def test_before_pool_is_the_model_that_training_left(clients, model):
    """Local never pools: its models before and after are the same, and so are their measures."""
    history = bf.simulate(bf.algorithms.local(model), clients, rounds=2, progress=False).history
    for key in ("accuracy", "nll", "brier", "ece", "mce"):
        assert_close(history[f"before_pool_{key}"], history[f"personal_{key}"])


def test_validation_has_its_own_columns(model):
    """Tuning reads validation columns; `best` refuses nothing, but the test split is not needed for it."""
    clients = bf.data.iid("digits", clients=4, validation=0.2, seed=0)
    net = bf.models.mlp(clients.inputs, hidden=8, outputs=10)
    history = bf.simulate(bf.algorithms.fedavg(net), clients, rounds=3, progress=False).history
    assert history.best("validation_nll", lowest=True)["round"] == int(np.argmin(history["validation_nll"])) + 1


def test_resume_keeps_the_experiment(clients, model):
    """More rounds, other workers: fine. Another seed, participation or kernel would be another experiment."""
    algorithm = bf.algorithms.fedavg(model)
    first = bf.simulate(algorithm, clients, rounds=1, evaluate_every=None, progress=False)
    assert (
        bf.simulate(algorithm, clients, rounds=2, evaluate_every=None, resume=first, engine=bf.Engine(workers=1), progress=False).round == 2
    )
    assert first.round == 1
    for change in ({"seed": 5}, {"participation": 0.5}, {"dtype": torch.float64}):
        with pytest.raises(ValueError, match="a resumed run keeps its settings"):
            bf.simulate(algorithm, clients, **{"rounds": 2, "evaluate_every": None, "resume": first, **change})
    with pytest.raises(ValueError, match="keeps its kernel"):
        bf.simulate(algorithm, clients, rounds=2, evaluate_every=None, resume=first, engine=bf.Engine("vmap"))
    with pytest.raises(CheckpointError, match="another algorithm"):
        bf.simulate(bf.algorithms.fedavg(model, lr=9.0), clients, rounds=2, evaluate_every=None, resume=first)
    with pytest.raises(CheckpointError, match="other data"):
        bf.simulate(algorithm, federation(sizes=(6, 7)), rounds=2, evaluate_every=None, resume=first)
    with pytest.raises(ValueError, match=r"on device 'cpu', given device='meta'; pass device='cpu'"):
        bf.simulate(algorithm, clients, rounds=2, evaluate_every=None, resume=first, device="meta")
    with pytest.raises(ValueError, match="already done"):
        bf.simulate(algorithm, clients, rounds=1, evaluate_every=None, resume=bf.simulate(algorithm, clients, rounds=2, progress=False))


def test_a_fine_tuning_that_leaves_the_numbers(clients, model, caplog):
    """It stops a plain run, which gives back its last round; where bad clients are skipped its client predicts without it."""

    def burst(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        loc = view["w"]["loc"]
        return view | {"w": {"loc": torch.where(view["n"] == SIZES[2], torch.full_like(loc, torch.nan), loc + 1)}}

    algorithm = replace(bf.algorithms.fedavg(model, epochs=1), finetune=(Once(burst),))
    with pytest.raises(bf.DivergenceError, match=r"client 2 is no longer finite after fine-tuning phase 0 \(Once\) of round 1") as raised:
        bf.simulate(algorithm, clients, rounds=2, progress=False)
    assert (raised.value.result.round, len(raised.value.result.history)) == (1, 1)
    caplog.clear()
    found = bf.simulate(algorithm, clients, rounds=1, progress=False, admission=bf.Admission("skip"))
    assert "the fine-tuning of client 2 is not finite; it predicts without it" in caplog.text
    assert np.isfinite(found.history["personal_nll"]).all()


def test_addressed_share_stack_and_combine(clients, model):
    """What methods with one server result per client need: gossip over a ring, the server keeping a copy for each client."""
    jobs = len(SIZES)
    ring = torch.zeros(jobs, jobs).double()
    for j in range(jobs):
        ring[j, [j, (j + 1) % jobs, (j - 1) % jobs]] = 1 / 3
    step = bf.algorithms.fedavg(model, epochs=1, batch_size=10).phases
    gossip = bf.Algorithm(
        model,
        {"w": bf.Block(pool=Stack())},
        step,
        parts=("w",),
        server=lambda blocks, count: {"copies": blocks["w"]["loc"].expand(count, -1)},
        address=lambda server, ids: {"w": {"loc": server["copies"][ids]}},
        combine=lambda server, ids, uplink: {"copies": ring @ torch.empty_like(server["copies"]).index_copy_(0, ids, uplink["w"]["loc"])},
    )
    options = {"dtype": torch.float64, "evaluate_every": None, "progress": False}
    one = bf.simulate(gossip, clients, rounds=1, engine=bf.Engine(chunk=2), **options)
    alone = bf.simulate(bf.algorithms.local(model, epochs=1, batch_size=10), clients, rounds=1, **options)
    assert_close(one.server["copies"], ring @ alone.private["w"]["loc"])
    two = bf.simulate(gossip, clients, rounds=2, engine=bf.Engine(chunk=3), **options)
    probs = two.predict().probs
    x, _ = clients.test.client(3)
    expected = gossip.outputs(gossip.leaves(("w",), {"w": {"loc": two.server["copies"][3]}}), x.double()).softmax(-1)
    assert_close(probs[3], expected)


def one_head_each(model: nn.Module) -> bf.Algorithm:
    """A shared body, and a head for each client that the server holds and addresses to it, mixed by halves with the mean."""

    def start(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        return view | {"head": {"loc": view["head_init"]}}

    def combine(server: Server, ids: Tensor, uplink: dict[str, Tensor]) -> Server:
        heads = uplink["head"]["loc"]
        return {"heads": server["heads"].index_copy(0, ids, 0.5 * (heads + heads.mean(0))), "done": server["done"] + 1}

    both = ("body", "head")
    step = Descend(Energy(both, both, likelihood="mean"), batch_size=10)
    return bf.Algorithm(
        model,
        {"body": bf.Block("body.*"), "head": bf.Block("head.*", pool=Stack())},
        (Once(start), step, Once(lambda algorithm, given, view, data: view | {"moved": (view["head"]["loc"] - view["head_init"]).norm()})),
        parts=both,
        server=lambda blocks, clients: {"heads": blocks["head"]["loc"].expand(clients, -1), "done": torch.tensor(0)},
        address=lambda server, ids: {"head_init": server["heads"][ids]},
        reports={"moved": 0.0},
        combine=combine,
        finetune=(Once(start),),
    )


@pytest.mark.parametrize("number", [3, len(SIZES)])
def test_newcomers_do_not_take_over_what_is_anothers(clients, model, number, tmp_path):
    """Where the server addresses state to each client, one never seen starts from the server's own head, as all once did."""
    made = one_head_each(model)
    result = bf.simulate(made, clients, rounds=2, evaluate_every=None, progress=False)
    novel = federation(sizes=tuple(20 + j for j in range(number)))
    adapted = result.adapt(novel)
    assert_close(adapted.server["heads"], result.server["head"]["loc"].expand(number, -1), rtol=0, atol=0)
    assert adapted.server["done"] == 2
    assert torch.equal(adapted.server["body"]["loc"], result.server["body"]["loc"])
    view = {name: result.server[name] for name in ("body", "head")}
    x, _ = novel.test.client(1)
    assert_close(adapted.predict().probs[1], made.outputs(made.leaves(("body", "head"), view), x).softmax(-1))
    assert not torch.isclose(result.server["heads"][1], result.server["head"]["loc"]).all()
    # The result of adapt knows what it is, saved or not.
    adapted.save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", made, novel)
    assert_close(loaded.predict().probs, adapted.predict().probs, rtol=0, atol=0, equal_nan=True)
    for resume in (adapted, loaded, tmp_path / "run"):
        with pytest.raises(ValueError, match="resume is a result of adapt"):
            bf.simulate(made, novel, rounds=3, evaluate_every=None, resume=resume, progress=False)
    assert not result.novel


def test_bytes_down(clients, model):
    """What a client receives in a round: shared blocks, what is addressed to it and what the method adds; not what never changes."""
    body, head = (sum(p.numel() for p in part.parameters()) for part in (model.body, model.head))
    for made, numbers in (
        (bf.algorithms.fedavg(model), body + head),
        (bf.algorithms.fedper(model), body),
        (bf.algorithms.fedbabu(model), body),
        (bf.algorithms.lg_fedavg(model), head),
        (bf.algorithms.ditto(model), body + head),
        (bf.algorithms.local(model), 0),
        (bf.algorithms.pfedvem(model, head_epochs=1, body_epochs=1), body + head + 1),  # the pooled scale; its share stays up there
        (one_head_each(model), body + 2 * head),
    ):
        for dtype, size in ((torch.float32, 4), (torch.float64, 8)):
            options = {"participation": 0.5, "train": "cohort", "sampling": "fixed", "evaluate_every": None, "progress": False}
            history = bf.simulate(made, clients, rounds=2, dtype=dtype, **options).history
            assert history["bytes_down"].tolist() == [3 * size * numbers] * 2
    assert history["bytes_up"].tolist() == [3 * 8 * (body + head + 1)] * 2  # the last: both blocks, one of them stacked, and a report


def test_train_nll(clients, model):
    """The mean over the cohort of what a client's last trained phase saw, batch by batch, before each step."""
    options = {"rounds": 1, "evaluate_every": None, "dtype": torch.float64, "progress": False}
    net = bf.models.mlp(8, hidden=8, outputs=3).double()

    def losses(chosen) -> list[float]:
        with torch.no_grad():
            return [float(nn.functional.cross_entropy(net(x.double()), y)) for x, y in map(clients.train.client, chosen)]

    plain = bf.simulate(bf.algorithms.fedavg(model, epochs=1, batch_size=None), clients, participation=0.5, **options)
    assert_close(plain.history["train_nll"][0], np.mean(losses(plain.settings.cohort(7, 0))))
    # FedRep's last phase is the body's, under the head that the first one fitted.
    fedrep = bf.algorithms.fedrep(model, head_epochs=3, body_epochs=1, batch_size=None)
    run = bf.simulate(fedrep, clients, **options)
    heads = run.private["head"]["loc"]
    seen = []
    for j in range(7):
        net.head.load_state_dict({name[5:]: leaf for name, leaf in fedrep.layout("head").leaves(heads[j]).items()})
        seen += losses([j])
    assert_close(run.history["train_nll"][0], np.mean(seen))
    assert np.isnan(bf.simulate(replace(plain.algorithm, phases=()), clients, **options).history["train_nll"][0])


def test_threads_are_given_back(clients, model):
    """A run sets one intra-op thread for its workers and gives torch's own number back."""
    torch.set_num_threads(2)
    bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1, evaluate_every=None, progress=False)
    assert torch.get_num_threads() == 2


def test_strengths_are_checked(model):
    """A negative or undefined pull is refused where the method is built."""
    for make, options in (
        (bf.algorithms.ditto, {"lam": -1.0}),
        (bf.algorithms.fedprox, {"mu": -1.0}),
        (bf.algorithms.ditto, {"lam": math.nan}),
    ):
        with pytest.raises(ValueError, match="strength of a pull"):
            make(model, **options)
    with pytest.raises(ValueError, match="scale_floor"):
        bf.algorithms.pfedvem(model, scale_floor=0.0)


def test_what_is_shown_is_short(clients, model):
    """Results, data and algorithms print in a line."""
    result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1, progress=False)
    assert max(len(repr(thing)) for thing in (result, clients, result.algorithm)) < 600


def test_adapting_under_a_schedule_still_learns(clients, model):
    """After the last round a cosine schedule is at its last rate, not at zero."""
    old, novel = clients.hold_out(2, seed=0)
    algorithm = bf.algorithms.fedrep(model, lr=cosine(0.5), head_epochs=2, body_epochs=1)
    result = bf.simulate(algorithm, old, rounds=2, seed=np.int64(1), evaluate_every=None, progress=False)
    start = algorithm.rows(result.server)["head"]["loc"]
    assert (result.adapt(novel).private["head"]["loc"] - start).abs().max() > 1e-4
