"""Predictors of several clients at once predict as those of each client alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.data import FederatedData
from bayesfl.federation.clients import predict
from bayesfl.federation.run.result import Result
from tests.cases import numbers

ROWS = (9, 23, 4, 9, 6, 14, 3)
RULES: dict[str, dict[str, Any]] = {
    "tuned": {"predictive_precision": None},
    "by variance": {"selection": "predictive_variance", "predictive_precision": 0.5},
    "by contrasts": {"selection": "random", "link": "contrasts", "predictive_precision": 2.0},
    "the servers": {"prior": "global", "centre": False, "prior_precision": 0.1},
}


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    """Clients of unequal sizes, of whom one has no validation rows and one no test rows."""

    def parted(counts: list[int], seed: int) -> FederatedData:
        held = [numbers(n, 5, seed=seed + j).float() for j, n in enumerate(counts)]
        labels = [[x[:, :3].argmax(-1) for x in part] for part in (xs, held)]
        return bf.data.from_arrays(xs, labels[0], test=(held, labels[1]), outputs=3)

    xs = [numbers(n, 5, seed=j).float() for j, n in enumerate(ROWS)]
    made, held = parted([2, 3, 4, 5, 0, 7, 8], 90), parted([2, 5, 0, 2, 2, 3, 1], 50)
    return replace(made, splits={**made.splits, "validation": held.test})


def result(clients: FederatedData, **options: Any) -> Result:
    """FedSI after one round."""
    model = bf.models.mlp(5, hidden=6, outputs=3)
    options = {"epochs": 1, "finetune_steps": 3, **options}
    options |= {} if "structure" in options else {"share": 0.4}
    method = bf.algorithms.fedsi(model, **options)
    about: dict[str, Any] = {"dtype": torch.float64, "evaluate_every": None, "progress": False}
    return bf.simulate(method, clients, rounds=1, engine=bf.Engine(chunk=7, workers=1), **about)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients that were fitted at once, as they are fitted."""
    seen: list[int] = []
    kept = LinearisedLaplace.of_several

    def of_several(self: Any, algorithm: Any, given: Any, views: Any, data: Any) -> Any:
        seen.append(len(views["n"]))
        return kept(self, algorithm, given, views, data)

    monkeypatch.setattr(LinearisedLaplace, "of_several", of_several)
    return seen


@pytest.mark.parametrize("rule", RULES)
def test_as_one_by_one(
    rule: str, clients: FederatedData, calls: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Predictions and the tuned number, in chunks of any size, on any number of threads to the
    bit. Where the prior is wide, a client of few rows differs by rounding: alone it has the dual
    form.
    """
    made = result(clients, **RULES[rule])
    found: Any = made.predict()
    assert set(calls) == {7}
    threads: Any = replace(made, engine=bf.Engine(chunk=7, workers=2)).predict()
    assert torch.equal(found.probs.nan_to_num(), threads.probs.nan_to_num())
    chunks = replace(made, engine=bf.Engine(chunk=3, workers=1), after=()).predict()
    assert set(calls) == {3, 7}
    monkeypatch.setattr(LinearisedLaplace, "together", lambda *_: 1)
    calls.clear()
    alone = replace(made, engine=bf.Engine(chunk=7, workers=1), after=())
    assert alone.tuned == made.tuned
    about: dict[str, Any] = {"atol": 1e-8 if rule == "tuned" else 1e-10, "rtol": 0}
    for other in (chunks, alone.predict()):
        assert_close(found.probs, other.probs, equal_nan=True, **about)
        assert_close(found.epistemic, other.epistemic, equal_nan=True, **about)
    assert not calls
    plain: Any = made.predict(draws=0)
    assert float((plain.probs - found.probs).nan_to_num().abs().max()) > 1e-3


def test_the_client_alone_predicts_the_same(clients: FederatedData):
    """A client's own model, fitted alone."""
    made = result(clients, predictive_precision=0.5)
    found = made.predict()
    for j in (0, 6):
        own = made.client(j).predict(clients.test.client(j)[0])
        assert_close(own.probs, found.client(j).probs, atol=1e-6, rtol=0)


def test_draws_curved_weights_and_means_are_one_by_one(clients: FederatedData, calls: list[int]):
    """Where the draws of each client, or the weights that it selects under each precision, are its
    own.
    """
    made = result(clients, predictive_precision=0.5)
    made.predict(draws=5)
    made.predict(draws=0)
    for options in (
        {"link": "draws", "predictive_precision": 0.5},
        {"selection": "curved_wasserstein", "predictive_precision": None},
        {"structure": "diagonal"},
    ):
        result(clients, **options).predict()
    assert not calls


def test_memory_bounds_how_many(
    clients: FederatedData, calls: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Fewer clients at once where these have more rows, and where factors are larger."""
    made = result(clients, predictive_precision=0.5)
    whole = made.predict()
    monkeypatch.setattr("bayesfl.curvature.ggn.BLOCK", 2**14)
    calls.clear()
    parts = made.predict()
    assert 1 < max(calls) < 7
    assert_close(parts.probs, whole.probs, atol=1e-10, rtol=0, equal_nan=True)
    monkeypatch.setattr("bayesfl.composition.predictors.BLOCK", 8 * 14**2)
    calls.clear()
    assert_close(made.predict().probs, whole.probs, atol=1e-10, rtol=0, equal_nan=True)
    assert not calls


def test_a_client_at_the_prior_is_said(clients: FederatedData):
    """If the precision leaves one client of several to the prior."""
    made = result(clients, predictive_precision=1e-6, selection="random")
    with pytest.warns(UserWarning, match="median kappa is below"):
        made.predict()


def test_padding_has_no_weight(clients: FederatedData):
    """The rows of several clients, each client's own first."""
    found = predict.padded_rows(clients.train, np.array([1, 2]))
    assert found["x"].shape == (2, 23, 5)
    assert found["weight"].sum(1).tolist() == [23, 4]
    assert torch.equal(found["x"][1, :4], clients.train.client(2)[0])
