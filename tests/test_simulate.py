"""The driver of rounds: participation, measures, and what happens when something is wrong."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import bayesfl as bf
from bayesfl.blocks import Energy
from bayesfl.checkpoint import CheckpointError
from bayesfl.likelihood import Bernoulli, Gaussian
from bayesfl.optim import cosine
from bayesfl.phases import Descend
from bayesfl.result import Settings
from tests.cases import SIZES, federation

SETTINGS = {"rounds": 100, "participation": 0.29, "sampling": "fixed", "train": "cohort", "seed": 0, "evaluate_every": None}


@pytest.fixture(scope="module")
def clients():
    return federation()


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


def test_bernoulli_cohorts_are_redrawn_until_two_are_in():
    """Independent coins, but never fewer than min(2, J)."""
    settings = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": 0.1})
    sizes = np.array([len(settings.cohort(100, r)) for r in range(400)])
    assert abs(sizes.mean() - 10) < 5 * math.sqrt(9 / 400)
    assert abs(sizes.var() - 9) < 4
    rare = Settings(**{**SETTINGS, "sampling": "bernoulli", "participation": 0.01})
    assert min(len(rare.cohort(10, r)) for r in range(50)) == 2
    assert len(rare.cohort(1, 0)) == 1


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
        ({"evaluate_every": 0}, "evaluate_every"),
    ],
)
def test_settings_are_checked(clients, model, change, words):
    """Before anything starts, with the argument and its value in the message."""
    with pytest.raises(ValueError, match=words):
        bf.simulate(bf.algorithms.fedavg(model), clients, **{"rounds": 2, "progress": False, **change})


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
    with pytest.raises(ValueError, match="inputs of shape"):
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


@pytest.mark.parametrize("train", ["cohort", "all"])
def test_divergence_gives_back_the_last_finite_round(clients, model, train):
    """A loss that leaves the finite numbers stops the run, names client, round and phase, and loses nothing before it."""

    def explosive(rate):
        return bf.algorithms.fedrep(model, lr=rate, head_epochs=1, body_epochs=1)

    options = {"participation": 0.6, "train": train, "seed": 1, "evaluate_every": 1, "progress": False, "engine": bf.Engine(chunk=2)}
    with pytest.raises(bf.DivergenceError, match=r"client .* phase .* round 2") as caught:
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
    with pytest.raises(ValueError, match="already done"):
        bf.simulate(algorithm, clients, rounds=1, evaluate_every=None, resume=bf.simulate(algorithm, clients, rounds=2, progress=False))


def test_addressed_share_stack_and_combine(clients, model):
    """What methods with one server result per client need: gossip over a ring, the server keeping a copy for each client."""
    jobs = len(SIZES)
    ring = torch.zeros(jobs, jobs).double()
    for j in range(jobs):
        ring[j, [j, (j + 1) % jobs, (j - 1) % jobs]] = 1 / 3
    step = bf.algorithms.fedavg(model, epochs=1, batch_size=10).phases
    from bayesfl.pools import Stack

    gossip = bf.Algorithm(
        model,
        {"w": bf.Block(pool=Stack())},
        step,
        parts=("w",),
        server=lambda blocks, count: {"copies": blocks["w"]["loc"].expand(count, -1)},
        share=lambda server, ids: ({"w": server["w"]}, {"w": {"loc": server["copies"][ids]}}),
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


def test_an_energy_of_other_blocks_is_refused(model):
    """What is trained and whose KL counts are named alike."""
    both = ("body", "head")
    blocks = {"body": bf.Block("body.*"), "head": bf.Block("head.*")}
    with pytest.raises(ValueError, match="name the same in both"):
        bf.Algorithm(model, blocks, (Descend(both, Energy("head", both, likelihood="mean")),), parts=both)
    with pytest.raises(ValueError, match="GroupNorm"):
        bf.algorithms.fedavg(nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3, track_running_stats=False)))
