"""Every likelihood under methods of each kind: kernels, chunks and workers, files, and a network of
Flower.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.engine.driver import KernelName
from bayesfl.evaluation.predictions import measured
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiLabel,
    Poisson,
    Quantiles,
    Tokens,
)
from bayesfl.optim import SGD
from tests.cases import EM, FEWER, numbers
from tests.federation.made import same_bits, state
from tests.flower.made import assert_same, deploy, simulated

IDS = np.repeat(np.arange(len(FEWER)), FEWER)
X = numbers(len(IDS), 8).float().numpy()
PLACES = numbers(len(IDS), 4, 3).float().numpy()


@dataclass(frozen=True)
class Case:
    """A likelihood with targets for it.

    Args:
        likelihood: The likelihood.
        y: Targets.
        task: What they are, where that is not plain.
        places: Whether an example's inputs, and its outputs, have an axis of places.
    """

    likelihood: Any
    y: np.ndarray
    task: Any = None
    places: bool = False

    def __str__(self) -> str:
        return str(self.likelihood)

    @property
    def data(self) -> FederatedData:
        return bf.data.from_arrays(
            PLACES if self.places else X, self.y, client_ids=IDS, task=self.task
        )

    @property
    def model(self) -> nn.Module:
        width = self.likelihood.width(self.data.targets)[-1]
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(3 if self.places else 8, 6), nn.ReLU())
        return bf.models.SplitModel(body, nn.Linear(6, width))

    def method(self, name: str) -> bf.Algorithm:
        options: dict[str, Any] = {
            "fedavg": {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.05, momentum=0.9)},
            "pfedvem": {"head_epochs": 2, "body_epochs": 1, "batch_size": 10, "init_scale": 0.1},
            "fedem": {"epochs": 1, "batch_size": 10, "optimiser": EM(0.05)},
        }
        return getattr(bf.algorithms, name)(self.model, likelihood=self.likelihood, **options[name])


def noise(*shape: int) -> np.ndarray:
    return numbers(len(IDS), *shape, seed=3).numpy()


SIGNAL, TEXTS = X[:, 0], np.arange(len(IDS) * 4).reshape(-1, 4) % 5
CASES = [
    Case(Categorical(), np.digitize(SIGNAL, [-0.5, 0.5])),
    Case(Bernoulli(), (SIGNAL > 0).astype(int)),
    Case(Tokens(), np.where(TEXTS == 4, -100, TEXTS), places=True),
    Case(MultiLabel(), np.where(noise(3) > 1, -100, (X[:, :3] > 0))),
    Case(Gaussian(0.7), SIGNAL + noise()),
    Case(Gaussian("learned"), SIGNAL + noise() * np.exp(X[:, 1] / 2)),
    Case(Poisson(), np.floor(np.exp(SIGNAL / 2 + noise() / 3)), "regression"),
    Case(Quantiles(0.8), SIGNAL + noise()),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
methods = pytest.mark.parametrize(
    "name",
    ["pfedvem", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedem"))],
)


def run(algorithm: bf.Algorithm, data: FederatedData, **options: Any) -> Result:
    defaults: dict[str, Any] = {
        "rounds": 2,
        "participation": 0.6,
        "evaluate_every": None,
        "seed": 2,
        "progress": False,
    }
    return bf.simulate(algorithm, data, **{**defaults, "dtype": torch.float64, **options})


@cases
@methods
def test_kernels_agree(case: Case, name: str):
    """At points, at draws, and at copies of the network."""
    kernels: tuple[KernelName, ...] = ("reference", "live", "layers", "vmap")
    algorithm, data = case.method(name), case.data
    reference, *found = (
        state(run(algorithm, data, engine=bf.Engine(kernel))) for kernel in kernels
    )
    for other in found:
        assert_close(other, reference, atol=1e-12, rtol=0)


@cases
def test_fedavg_is_a_bare_loop(case: Case):
    """One client, all of its examples in each step: gradient steps on the mean of the likelihood's
    own loss.
    """
    data = case.data.select([1])
    algorithm = bf.algorithms.fedavg(
        case.model, epochs=5, batch_size=None, optimiser=SGD(0.05), likelihood=case.likelihood
    )
    result = run(algorithm, data, rounds=1, participation=1.0)
    module = case.model.double()
    module.load_state_dict(
        dict(
            algorithm.layout("w").leaves(algorithm.init(1, seed=2, dtype=torch.float64)["w"]["loc"])
        )
    )
    x, y = data.to(dtype=torch.float64).train.client(0)
    for _ in range(5):
        slopes = torch.autograd.grad(
            case.likelihood.nll(module(x), y).mean(), list(module.parameters())
        )
        with torch.no_grad():
            for p, slope in zip(module.parameters(), slopes, strict=True):
                p -= 0.05 * slope
    for p, own in zip(module.parameters(), result.model().parameters(), strict=True):
        assert_close(own, p, atol=1e-13, rtol=0)


@cases
@methods
def test_workers_and_chunks_do_not_change_the_bits(case: Case, name: str):
    """In float32, in which other sums would show: workers to the bit, chunks to rounding."""
    algorithm, data = case.method(name), case.data
    first, *others = (
        state(
            run(
                algorithm,
                data,
                dtype=torch.float32,
                engine=bf.Engine(chunk=chunk, workers=workers),
            )
        )
        for chunk, workers in ((2, 1), (2, 2), (7, 2))
    )
    assert same_bits(first, others[0])
    for other in others[1:]:
        assert_close(other, first, atol=1e-6, rtol=1e-6)


@cases
@methods
def test_predictions_survive_files(case: Case, name: str, tmp_path: Path):
    """A run and a client's model predict the same bits after loading, and are measured under the
    likelihood.
    """
    algorithm, data = case.method(name), case.data
    result = run(algorithm, data)
    found = result.predict()
    summary = found.summary(data.test)
    assert all(np.isfinite(summary[key]) for key in summary if "auroc" not in key)
    result.save(tmp_path / "run")
    assert bf.load(tmp_path / "run", algorithm, data).predict().summary(data.test) == pytest.approx(
        summary, nan_ok=True
    )
    result.client(3).save(tmp_path / "client", plug_in=algorithm.predictor is None)
    x = np.asarray(case.data.test.client(3)[0])
    mine = result.client(3).predict(x, draws=0)
    theirs = bf.load_client(tmp_path / "client", algorithm).predict(x, draws=0)
    assert mine.likelihood == theirs.likelihood == case.likelihood
    here, there = (
        {key: t for key, t in vars(of).items() if isinstance(t, Tensor)} for of in (mine, theirs)
    )
    assert_close(here, there, atol=0, rtol=0, equal_nan=True)
    table = measured(*found.of_split(data.test)).table()
    assert table["examples"].sum() == int((np.asarray(data.test.y[data.test.index]) != -100).sum())
    names = [key for key in table if key not in ("client", "examples", "auroc", "width_90")]
    assert {key: summary[key] for key in names} == pytest.approx(
        {key: np.nanmean(table[key]) for key in names}
    )


@cases
def test_over_a_network_it_is_the_simulation(case: Case, tmp_path: Path):
    """States, and the measures that clients send."""
    algorithm, data = case.method("pfedvem"), case.data
    found = deploy(algorithm, data, tmp_path, evaluate_every=3)
    sim = simulated(algorithm, data)
    assert_same(found, tmp_path, sim)
    summary = sim.predict().summary(data.test)
    shared = {
        key.removeprefix("personal_"): value
        for key, value in found.history[-1].items()
        if key.startswith("personal_")
    }
    assert {"pinball" if isinstance(case.likelihood, Quantiles) else "nll"} < shared.keys()
    both = [key for key in shared if key in summary and not key.endswith("decile")]
    assert [shared[key] for key in both] == pytest.approx(
        [summary[key] for key in both], rel=1e-6, nan_ok=True
    )


def test_whole_numbers_as_inputs_leave_the_precision():
    """Of tokens as inputs and labels, nothing is a float but the run's own numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    data = bf.data.from_arrays(TEXTS, (TEXTS + 1) % 5, client_ids=IDS)
    algorithm = bf.algorithms.fedavg(
        model, epochs=1, optimiser=SGD(0.1, momentum=0.9), likelihood=Tokens()
    )
    found = [
        state(run(algorithm, data, engine=bf.Engine(kernel)))
        for kernel in ("reference", "live", "vmap")
    ]
    assert all(t.dtype == torch.float64 for t in found[0].values() if t.is_floating_point())
    for other in found[1:]:
        assert_close(other, found[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["pfedvem", "pfedmap", "fedavg"])
def test_a_learned_scale_learns_at_the_methods_own_rates(name: str):
    """Under summed losses and wide beliefs, too: densities without a floor grow without bound, and
    low ones make steps too long.
    """
    data = bf.data.diabetes(clients=6)
    algorithm = getattr(bf.algorithms, name)(
        bf.models.mlp(data.inputs, hidden=16, outputs=2), likelihood=Gaussian("learned")
    )
    result = bf.simulate(algorithm, data, rounds=10, evaluate_every=10, progress=False)
    found = result.predict()
    # The targets' deviation is 1; lower floors gave 39.
    assert found.summary(data.test)["rmse"] < 1.5
    assert float(found.variance.nan_to_num(1.0).min()) >= 0.2**2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["irm", "perinvfl"])
def test_scales_of_several_labels(name: str):
    """The slope of an example's loss by a scale is a sum over its labels, also where there are as
    many as rows in a batch.
    """
    x, y = numbers(5, 5, 3), torch.arange(25).view(5, 5) % 4
    outputs = numbers(5, 5, 4, seed=1)
    scale = torch.ones(5, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(Tokens().nll(outputs * scale[:, None, None], y).sum(), scale)
    assert_close(bf.invariance.scale_slopes(Tokens(), outputs, y), wanted, atol=1e-12, rtol=0)
    data = bf.data.from_arrays(
        [x.numpy()] * 3,
        [y.numpy()] * 3,
        environments=[np.array([0, 0, 1, 1, 1])] * 3,
        test_share=0.0,
        outputs=4,
    )
    algorithm = getattr(bf.algorithms, name)(
        bf.models.SplitModel(nn.Linear(3, 6), nn.Linear(6, 4)), likelihood=Tokens()
    )
    found = [
        state(run(algorithm, data, engine=bf.Engine(kernel))) for kernel in ("reference", "vmap")
    ]
    assert_close(found[1], found[0], atol=1e-12, rtol=0)


def test_rates_that_underflow_are_measured():
    """A mean of counts is never 0, whatever the outputs."""
    seen = Poisson().predictive(torch.full((1, 3, 1), -200.0))
    assert min(float(seen[key].min()) for key in ("mean", "variance")) > 0


def test_test_targets_are_looked_at_before_training():
    case = CASES[6]
    data = bf.data.from_arrays(
        X[:100],
        case.y[:100],
        client_ids=IDS[:100],
        task="regression",
        test=(X[100:], -1 - case.y[100:], IDS[100:] % 3),
    )
    with pytest.raises(ValueError, match="Poisson is of counts"):
        run(case.method("fedavg"), data)


def test_labels_as_examples():
    """For calibration and detection: places that are known, with their probabilities."""
    case = CASES[2]
    data = case.data
    found = run(case.method("fedavg"), data).predict()
    flat = found.places()
    assert flat.mask.sum() == int((np.asarray(data.test.y[data.test.index]) >= 0).sum())
    pooled = bf.metrics.nll(*bf.metrics.pool(flat.probs, flat.labels, flat.mask))
    assert float(pooled) == pytest.approx(found.summary(data.test)["pooled_nll"])
    assert flat.places() is flat
    with pytest.raises(ValueError, match=r"predictions\.places\(\)"):
        bf.metrics.nll(found.probs, found.labels, found.mask)  # type: ignore[arg-type]


def test_intervals_beside_others_in_one_table():
    """Their loss is no NLL, and stands in a column of its own."""
    results = {
        str(case): run(case.method("fedavg"), case.data, evaluate_every=2)
        for case in (CASES[4], CASES[7])
    }
    head, _, *rows = str(bf.table(results)).splitlines()[:4]
    assert head.replace("personal ", "").split() == ["method", "RMSE", "NLL", "pinball"]
    assert [[value == "-" for value in row.split()[-2:]] for row in rows] == [
        [False, True],
        [True, False],
    ]
