"""The posterior of the server's model by the rows of all clients: by which everyone predicts, which
is stored, and who is refused.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.base.surveys import uplink_bytes
from bayesfl.composition.predictors import LinearisedLaplace, PooledLaplace
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Conformal, Temperature
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from bayesfl.posteriors import Laplace

STRUCTURES = {"last_layer": "full", "diagonal": "diagonal", "kfac": "kfac", "full": "full"}
NEAR = {"rtol": 1e-10, "atol": 1e-11}
METHODS: dict[str, Callable[..., bf.Algorithm]] = {
    "fedavg": lambda model: bf.algorithms.fedavg(model, epochs=1),
    "ditto": lambda model: bf.algorithms.ditto(model, epochs=1),
    "pfedvem": lambda model: bf.algorithms.pfedvem(model, body_epochs=1, head_epochs=1),
    "fedavg_ft": lambda model: bf.algorithms.fedavg_ft(model, epochs=1),
}


pytestmark = pytest.mark.filterwarnings("ignore:the loss of validation rows")


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    """Five clients of a hundred digits at most, in a form of their own."""
    made = bf.data.dirichlet(
        "digits", clients=5, alpha=0.5, validation=0.2, calibration=0.2, seed=1, max_size=100
    )
    return made.transformed(_doubled)


def _doubled(x: Any) -> Any:
    return 2 * x


def mlp(clients: FederatedData, **options: Any) -> nn.Module:
    return bf.models.mlp(clients.inputs, hidden=6, outputs=clients.outputs, **options)


def trained(method: bf.Algorithm, clients: FederatedData, **options: Any) -> Result:
    options = {"rounds": 2, "dtype": torch.float64, "evaluate_every": None, **options}
    return bf.simulate(method, clients, progress=False, **options)


@pytest.fixture(scope="module")
def fedavg(clients: FederatedData) -> Result:
    """Ten passes over the data, so that predictions tell the labels."""
    method = bf.algorithms.fedavg(mlp(clients), epochs=5, optimiser=SGD(0.1))
    return trained(method, clients)


def of_all(result: Result, structure: Any, precision: float) -> Laplace:
    """The library's own fit to the pooled rows."""
    rows = [result.data.to(dtype=torch.float64).train.client(j)[0] for j in range(5)]
    return Laplace.fit(
        result.model(),
        torch.cat(rows),
        precision=precision,
        structure=STRUCTURES[structure],  # pyright: ignore[reportArgumentType]
        pattern="head.*" if structure == "last_layer" else "*",
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_everyone_predicts_by_the_posterior_of_all_rows(fedavg: Result, structure: Any):
    """That of the pooled rows, in every client's predictions and its own model's."""
    found = fedavg.laplace(structure, precision=0.3)
    want = of_all(fedavg, structure, 0.3)
    assert_close(found.posterior.moments(), want.moments(), **NEAR)
    predictions = found.predict()
    for j in range(5):
        rows = fedavg.data.to(dtype=torch.float64).test.client(j)[0]
        probs = want.predict(rows)["probs"]
        assert_close(predictions.client(j).probs, probs, **NEAR)
        raw = fedavg.data.test.client(j, raw=True)[0]
        assert_close(found.client(j).predict(raw).probs, probs, rtol=1e-8, atol=1e-9)
    assert repr(found).endswith(f"; pooled Laplace, {structure})")
    assert len(repr(found.posterior)) < 100
    assert found.history.rows == fedavg.history.rows


@pytest.mark.parametrize("name", METHODS)
def test_whatever_clients_have_of_their_own(clients: FederatedData, name: str):
    """The server's network has the posterior, and predicts for all; batch norms go with it."""
    model = mlp(clients) if name != "fedavg" else _normed(clients)
    result = trained(METHODS[name](model), clients)
    found = result.laplace("full", precision=2.0)
    want = of_all(result, "full", 2.0)
    assert_close(found.posterior.moments(), want.moments(), **NEAR)
    rows = clients.to(dtype=torch.float64).test.client(3)[0]
    assert_close(found.predict().client(3).probs, want.predict(rows)["probs"], **NEAR)
    at_mean = found.model()(rows).softmax(-1).detach()
    assert_close(found.predict(draws=0).client(3).probs, at_mean, **NEAR)
    assert found.predict(draws=5).client(3).epistemic.isfinite().all()


def _normed(clients: FederatedData) -> nn.Module:
    (size,) = clients.inputs
    body = nn.Sequential(nn.Linear(size, 6), nn.BatchNorm1d(6), nn.Tanh())
    return bf.models.SplitModel(body, nn.Linear(6, clients.outputs))


def test_neither_how_sums_are_added_nor_who_computes(fedavg: Result, clients: FederatedData):
    """Secure sums to their step; two workers and other chunks to the bit."""
    found = fedavg.laplace("kfac")
    hidden = fedavg.laplace("kfac", aggregation=bf.SecureSum(step=2.0**-30))
    assert_close(hidden.posterior.precision, found.posterior.precision, rtol=1e-6, atol=0)
    assert_close(hidden.predict().probs, found.predict().probs, rtol=0, atol=1e-6, equal_nan=True)
    crowd = replace(fedavg, engine=bf.Engine(chunk=2, workers=2)).laplace("kfac")
    assert_close(crowd.predict().probs, found.predict().probs, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match=r"outside SecureSum\(range=1\).* pass range="):
        fedavg.laplace("kfac", aggregation=bf.SecureSum(range=1.0, step=2.0**-30))


def test_newcomers_predict_by_it(clients: FederatedData):
    """With no rows of theirs in it, and nothing asked of them."""
    old, new = clients.hold_out(2, seed=0)
    result = trained(METHODS["pfedvem"](mlp(clients)), old).laplace()
    joined = result.adapt(new)
    assert_close(joined.posterior.moments(), result.posterior.moments(), rtol=0, atol=0)
    rows = new.to(dtype=torch.float64).test.client(1)[0]
    probs = result.posterior.predict(rows)["probs"]
    assert_close(joined.predict().client(1).probs, probs, **NEAR)
    with pytest.raises(ValueError, match=r"own result\.laplace\(\), then adapt"):
        joined.laplace()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_kept_with_the_run(
    clients: FederatedData, fedavg: Result, structure: Any, tmp_path: Path
):
    """In the run's file and in a client's, read with the method that trained it, or the network;
    without data, too.
    """
    found, method = fedavg.laplace(structure), fedavg.algorithm
    found.save(tmp_path / "run")
    again = bf.load(tmp_path / "run", method, clients)
    assert_close(again.predict().probs, found.predict().probs, rtol=0, atol=0, equal_nan=True)
    evidence = found.posterior.log_marginal_likelihood()
    assert_close(again.posterior.log_marginal_likelihood(), evidence, rtol=0, atol=0)
    rows = clients.test.client(2, raw=True)[0]
    probs = found.client(2).predict(rows).probs
    found.client(2).save(tmp_path / "client")
    for read in (method, method.model, found.algorithm):
        own = bf.load_client(tmp_path / "client", read, transform=_doubled)
        assert torch.equal(own.predict(rows).probs, probs)
    with pytest.raises(CheckpointError, match="another method"):
        bf.load(tmp_path / "run", bf.algorithms.fedper(mlp(clients)), clients)
    apart = bf.load(tmp_path / "run", method)
    assert_close(apart.posterior.moments(), found.posterior.moments(), rtol=0, atol=0)


def test_runs_from_before_have_none(fedavg: Result, tmp_path: Path, monkeypatch: Any):
    """Their files do not have the field."""
    fields = {name: entry for name, entry in files.RUN.fields.items() if name != "pooled"}
    with monkeypatch.context() as patch:
        patch.setattr(files, "RUN", replace(files.RUN, fields=fields))
        files.write(tmp_path, files.RUN, fedavg._content())
    assert bf.load(tmp_path, fedavg.algorithm).after == ()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # arviz' own
def test_draws_have_the_names_of_parameters(fedavg: Result):
    """Of the parameters that it covers, with its mean and deviations; of other results there are
    none.
    """
    pytest.importorskip("arviz")
    found = fedavg.laplace("full")
    drawn = found.posterior.to_arviz(draws=4000).posterior
    mean, variance = found.posterior.moments()
    for name, shape in found.posterior.curvature.layout.shapes.items():
        assert drawn[name].shape == (1, 4000, *shape)
    leaves = found.posterior.curvature.layout.leaves
    error = leaves(variance)["head.bias"].sqrt()
    own = torch.from_numpy(drawn["head.bias"].values[0])
    assert float(((own.mean(0) - leaves(mean)["head.bias"]) / error).abs().max()) < 0.08
    assert_close(own.std(0), error, rtol=0.05, atol=0)
    last = fedavg.laplace().posterior.to_arviz(draws=1)
    assert {*last.posterior} == {"head.weight", "head.bias"}
    with pytest.raises(ValueError, match=r"no pooled posterior; .* result\.laplace\("):
        print(fedavg.posterior)


def test_a_temperature_and_sets_are_fitted_to_its_predictions(fedavg: Result, tmp_path: Path):
    """On validation and calibration data, as to any; a result that was calibrated begins anew."""
    found = fedavg.laplace()
    both = found.calibrate(Temperature(), Conformal())
    rows = fedavg.data.validation
    nll = [one.predict(rows).summary(rows)["nll"] for one in (found, both)]
    assert nll[1] <= nll[0]
    both.save(tmp_path)
    again = bf.load(tmp_path, fedavg.algorithm, fedavg.data)
    assert torch.equal(again.predict().sets, both.predict().sets)
    assert fedavg.calibrate(Temperature()).laplace().steps == ()
    assert both.audit().rows.sum() == fedavg.data.test.counts.sum()


@pytest.mark.parametrize("precision", [1e-3, 1e6])
def test_where_the_network_alone_is_better(fedavg: Result, precision: float):
    """It is said by how much; a temperature mends it. Of two that predict alike nothing is said."""
    posterior = of_all(fedavg, "diagonal", precision)
    losses = []
    for j in range(5):
        x, y = fedavg.data.to(dtype=torch.float64).validation.client(j)
        probs = fedavg.model()(x).softmax(-1), posterior.predict(x)["probs"]
        losses.append(torch.stack([-p[torch.arange(len(y)), y].log().detach() for p in probs]))
    plain, averaged = torch.cat(losses, 1)
    more = averaged - plain
    if precision == 1e6:
        assert_close(plain, averaged, rtol=0, atol=1e-4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fedavg.laplace("diagonal", precision=precision)
        return
    assert float(more.mean()) > 2 * float(more.std()) / len(more) ** 0.5
    told = (
        f"{float(plain.mean()):.3g} nats .* {float(averaged.mean()):.3g} with .*Temperature\\(\\)"
    )
    with pytest.warns(UserWarning, match=told):
        found = fedavg.laplace("diagonal", precision=precision)
    rows = fedavg.data.validation
    mended = found.calibrate(Temperature()).predict(rows).summary(rows)["pooled_nll"]
    assert mended < float(averaged.mean())


def test_it_is_the_predictor_of_a_method(clients: FederatedData, fedavg: Result, tmp_path: Path):
    """Clients are asked at each evaluation, and once by a result; it goes on where it was saved."""
    rule = PooledLaplace("diagonal", 0.5)
    method = replace(fedavg.algorithm, predictor=rule)
    result = trained(method, clients, evaluate_every=1)
    measured = result.predict().summary(clients.test)["nll"]
    assert result.history["personal_nll"][-1] == pytest.approx(measured)
    after = fedavg.laplace("diagonal", precision=0.5).predict()
    assert_close(after.probs, result.predict().probs, **NEAR, equal_nan=True)
    trained(method, clients, rounds=1).save(tmp_path)
    gone_on = trained(method, clients, resume=tmp_path, evaluate_every=1)
    assert_close(gone_on.predict().probs, after.probs, **NEAR, equal_nan=True)
    other = replace(result, algorithm=replace(method, predictor=PooledLaplace("diagonal", 5.0)))
    assert float(other.posterior.precision[0]) == 5.0


def test_regression_by_least_squares():
    """Of linear data the intervals are those of all rows: the ratio of standard deviations is 1."""
    torch.manual_seed(0)
    xs = [torch.randn(n, 3, dtype=torch.float64) for n in (60, 25, 40)]
    beta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    ys = [x @ beta + 0.5 * torch.randn(len(x), dtype=torch.float64) for x in xs]
    made = bf.data.from_arrays(xs, ys, task="regression").to(dtype=torch.float64)
    network = bf.models.SplitModel(nn.Identity(), nn.Linear(3, 1))
    method = bf.algorithms.fedavg(network, likelihood=Gaussian(0.5), epochs=1)
    found = trained(method, made).laplace("full", precision=1e-8).posterior
    x = torch.cat([made.train.client(j)[0] for j in range(3)])
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    errors = 0.5 * (x.T @ x).inverse().diagonal().sqrt()
    assert_close(found.moments()[1].sqrt() / errors, torch.ones_like(errors), rtol=1e-7, atol=0)


def test_who_is_refused(clients: FederatedData, fedavg: Result):
    """A server without one network, clients with networks of their own, noise that covers no sums,
    options that are none.
    """
    network = mlp(clients)
    with pytest.raises(ValueError, match="no complete network: parts of it stay"):
        trained(bf.algorithms.fedper(network, epochs=1), clients).laplace()
    with pytest.raises(ValueError, match=r"keep \['v'\], .* use result\.laplace\(\)"):
        replace(METHODS["ditto"](network), predictor=PooledLaplace())
    with pytest.raises(ValueError, match="fine-tune, or predict by several"):
        replace(METHODS["fedavg_ft"](network), predictor=PooledLaplace())
    private = replace(
        fedavg, settings=replace(fedavg.settings, sampling="poisson", aggregation="x")
    )
    with pytest.raises(ValueError, match="PooledCurvature asks clients for sums without noise"):
        private.laplace()
    with pytest.raises(ValueError, match=r"structure must be 'last_layer', .* got 'kron'"):
        fedavg.laplace("kron")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="precision must be > 0"):
        fedavg.laplace(precision=0.0)
    with pytest.raises(ValueError, match="pattern"):
        fedavg.laplace(pattern="head.*")
    numbers = bf.data.from_arrays([torch.rand(9, 2)] * 2, [torch.rand(9)] * 2, seed=0)
    likelihood = bf.likelihoods.Quantiles()
    model = bf.models.mlp(2, hidden=2, outputs=2)
    result = trained(bf.algorithms.fedavg(model, likelihood=likelihood), numbers)
    with pytest.raises(TypeError, match="the curvature of Quantiles is not known"):
        result.laplace()


def test_the_server_network_under_one_clients_curvature_warns():
    own = LinearisedLaplace(precision=1.0)
    with pytest.warns(UserWarning, match=r"one client's rows: .* too wide; use result\.laplace"):
        replace(METHODS["fedavg"](nn.Linear(2, 2)), predictor=own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # those with weights of their own are not warned
        replace(METHODS["ditto"](nn.Linear(2, 2)), predictor=own)
        replace(METHODS["fedavg_ft"](nn.Linear(2, 2)), predictor=own)


def test_what_a_client_is_said_to_send(fedavg: Result):
    """The bytes of the docstring, by the method's own question."""
    rule = PooledLaplace("kfac", pattern="head.*")
    question = rule.question(fedavg.algorithm, fedavg.server)
    assert uplink_bytes(question.shapes({})) == 8 * (2 + 6 * 7 // 2 + 10 * 11 // 2)
