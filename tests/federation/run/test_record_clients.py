"""Clients' own measures: in the history of a run that records them, and in a result's table."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.evaluation.history import History
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from tests.federation.made import run, same

RECORDED = ("accuracy", "nll", "wrong")
PREFIXES = ("personal", "validation", "before_pool", "global")
COLUMNS = [f"{prefix}_{name}" for prefix in PREFIXES for name in RECORDED]


def wrong(predictions: Any, labels: torch.Tensor) -> float:
    """How many of one client's labels are missed."""
    return float((predictions.probs.argmax(-1) != labels).sum())


@pytest.fixture(scope="module")
def parted() -> FederatedData:
    return bf.data.dirichlet("digits", clients=5, alpha=1.0, seed=0, validation=0.2)


@pytest.fixture(scope="module")
def method(parted: FederatedData) -> bf.Algorithm:
    model = bf.models.mlp(parted.inputs, hidden=8, outputs=parted.outputs)
    return bf.algorithms.ditto(model, epochs=1, batch_size=20)


def recording(method: bf.Algorithm, parted: FederatedData, **options: Any) -> Result:
    """Four rounds, of which the second, the third and the last are evaluated."""
    options = {
        "rounds": 4,
        "participation": 0.6,
        "evaluate_every": 2,
        "measures": {"wrong": wrong},
        "record_clients": RECORDED,
        "engine": bf.Engine(chunk=2),
        **options,
    }
    return run(method, parted, **options)


def by_loop(probs: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """One client's measures from its own rows."""
    right = [int(row.argmax()) == int(label) for row, label in zip(probs, y, strict=True)]
    logs = [math.log(float(row.double()[int(label)])) for row, label in zip(probs, y, strict=True)]
    return {
        "accuracy": sum(right) / len(right),
        "nll": -sum(logs) / len(logs),
        "wrong": len(right) - sum(right),
    }


def test_every_clients_own_measures_are_kept(method: bf.Algorithm, parted: FederatedData):
    """Of each model that is measured, those of a loop over the clients' rows; the column of the
    history is their mean. NaN where a round was not evaluated or a client did not train.
    """
    result = recording(method, parted)
    history, names = result.history, parted.client_names
    server = result.model().requires_grad_(False)
    for j in range(5):
        for prefix, split in (("personal", parted.test), ("validation", parted.validation)):
            x, y = split.client(j)
            found = by_loop(result.predict(split).client(names[j]).probs, y)
            for name, value in found.items():
                own = history.clients(f"{prefix}_{name}")[-1, j]
                assert own == pytest.approx(value, abs=1e-12)
        x, y = parted.test.client(j)
        shared = by_loop(server(x.double()).softmax(-1), y)
        assert history.clients("global_nll")[-1, j] == pytest.approx(shared["nll"], abs=1e-12)
    for column in COLUMNS:
        own = history.clients(column)
        assert (own.shape, own.dtype) == ((4, 5), np.float64)
        assert np.isnan(own).all(1).tolist() == [True, False, True, False]
        np.testing.assert_allclose(np.nanmean(own[1::2], 1), history[column][1::2], rtol=1e-12)
        for round in (2, 4):
            took_part = {names.index(name) for name in result.took_part(round)}
            there = set(np.flatnonzero(~np.isnan(own[round - 1])).tolist())
            assert there == (took_part if column.startswith("before_pool") else set(range(5)))


def test_recording_changes_nothing(method: bf.Algorithm, parted: FederatedData):
    """The run has the same bits without it; one worker records the same bits as two."""
    one, two = (recording(method, parted, engine=bf.Engine(chunk=2, workers=w)) for w in (1, 2))
    assert same(one, two)
    assert same(one, recording(method, parted, record_clients=()))
    for column in COLUMNS:
        np.testing.assert_array_equal(one.history.clients(column), two.history.clients(column))


def test_saved_and_resumed_runs_keep_them(
    method: bf.Algorithm, parted: FederatedData, tmp_path: Path
):
    """To the bit, from checkpoints and from saved results; recording may begin or end on the
    way.
    """
    whole = recording(method, parted)
    recording(method, parted, rounds=2).save(tmp_path / "first")
    recording(method, parted, rounds=2, checkpoint=tmp_path / "checkpoints")
    on = recording(method, parted, resume=tmp_path / "first")
    again = recording(method, parted, checkpoint=tmp_path / "checkpoints")
    loaded = bf.load(tmp_path / "checkpoints", method)
    later = recording(method, parted, resume=recording(method, parted, rounds=2, record_clients=()))
    ended = recording(method, parted, resume=tmp_path / "first", record_clients=())
    for column in COLUMNS:
        wanted = whole.history.clients(column)
        for other in (on, again, loaded):
            np.testing.assert_array_equal(other.history.clients(column), wanted, strict=True)
        np.testing.assert_array_equal(later.history.clients(column)[2:], wanted[2:])
        np.testing.assert_array_equal(ended.history.clients(column)[:2], wanted[:2])
        assert np.isnan(later.history.clients(column)[:2]).all()
        assert np.isnan(ended.history.clients(column)[2:]).all()


def test_files_of_before_have_none():
    """They say nothing of clients."""
    found = files.HISTORY.read({"rows": [{"round": 1, "personal_nll": 0.5}], "absent": []})
    assert found["personal_nll"].tolist() == [0.5]
    with pytest.raises(KeyError, match="record_clients"):
        found.clients("personal_nll")
    assert files.HISTORY.write(History())["clients"] == {}


def test_the_best_state_has_its_history(method: bf.Algorithm, parted: FederatedData):
    """And a run that a callback ends between evaluations is recorded then."""
    stop = bf.callbacks.EarlyStopping("personal_nll", patience=1, keep="best", lowest=False)
    best = recording(method, parted, evaluate_every=1, on_round=[stop])
    assert best.round == 1
    assert np.isfinite(best.history.clients("personal_nll")).all()
    ended = recording(method, parted, on_round=[lambda run: run.round == 3])
    assert np.isnan(ended.history.clients("personal_nll")).all(1).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"record_clients": ("personal_nll",)}, r"some of \['accuracy', 'nll'.*got 'personal_nll'"),
        ({"record_clients": "nll"}, r"record_clients .*got 'n'"),
        ({"record_clients": ("accuracy_decile",)}, "got 'accuracy_decile'"),
        ({"record_clients": ("wrong",), "measures": {}}, r"got 'wrong'"),
        ({"evaluate_every": None}, r"record_clients has no effect under evaluate_every=None"),
    ],
)
def test_what_would_record_nothing_is_refused_before_training(
    method: bf.Algorithm, parted: FederatedData, options: dict[str, Any], words: str
):
    with pytest.raises(ValueError, match=words):
        recording(method, parted, **options, on_round=[lambda run: pytest.fail("trained")])


def test_numbers_and_intervals_have_measures_of_their_own():
    """By the likelihood, which is known before anything is predicted."""
    data = bf.data.diabetes(clients=3, seed=0)
    for likelihood, name, other in (
        (bf.likelihoods.Gaussian(), "crps", "pinball"),
        (bf.likelihoods.Quantiles(0.8), "pinball", "crps"),
    ):
        outputs = 2 if name == "pinball" else 1
        model = bf.models.mlp(data.inputs, hidden=4, outputs=outputs)
        method = bf.algorithms.fedavg(model, likelihood=likelihood, epochs=1)
        with pytest.raises(ValueError, match=f"got '{other}'"):
            run(method, data, rounds=1, record_clients=(other,))
        history = run(method, data, rounds=1, record_clients=(name,)).history
        own = history.clients(f"personal_{name}")
        assert own.mean() == pytest.approx(history[f"personal_{name}"][0])


def test_the_table_has_a_row_for_each_client(
    method: bf.Algorithm, parted: FederatedData, tmp_path: Path
):
    """By name: the client's rows in each split, and its measures, those of a loop."""
    result = recording(method, parted, record_clients=("nll",), rounds=2)
    result.save(tmp_path)
    table, validation = result.table(), result.table("validation")
    assert (table.index.tolist(), table.index.name) == (list(parted.client_names), "client")
    splits = ["train_rows", "validation_rows", "test_rows"]
    measures = ["accuracy", "most_frequent", "nll", "ece", "mce", "brier", "macro_f1", "auroc"]
    for found in (table, validation):
        assert sorted(found.columns) == sorted([*splits, *measures])
        for name, split in parted.splits.items():
            assert found[f"{name}_rows"].tolist() == split.counts.tolist()
    for j, name in enumerate(parted.client_names):
        for found, split in ((table, parted.test), (validation, parted.validation)):
            wanted = by_loop(result.predict(split).client(j).probs, split.client(j)[1])
            for measure in ("accuracy", "nll"):
                assert found.loc[name, measure] == pytest.approx(wanted[measure], abs=1e-12)
    assert table["nll"].tolist() == result.history.clients("personal_nll")[-1].tolist()
    with pytest.raises(KeyError, match="calibration"):
        result.table("calibration")
    with pytest.raises(ValueError, match="without its clients' data"):
        bf.load(tmp_path, method).table()


def test_a_sample_of_the_clients_is_measured(method: bf.Algorithm, parted: FederatedData):
    """The same in every round, with the values that it has among all; training is as without."""
    every = recording(method, parted)
    some = recording(method, parted, evaluate_clients=2)
    whole, found = (of.history.clients("personal_nll") for of in (every, some))
    there = ~np.isnan(found[-1])
    assert there.sum() == 2
    measured = ~np.isnan(whole).all(1)
    assert np.array_equal(np.isnan(found[measured]), np.tile(~there, (measured.sum(), 1)))
    np.testing.assert_allclose(found[:, there], whole[:, there], rtol=1e-6)
    assert some.history[-1]["personal_nll"] == pytest.approx(float(found[-1][there].mean()))
    rows = parted.test.only(np.flatnonzero(there))
    assert some.history[-1]["global_pooled_nll"] == pytest.approx(
        bf.metrics.nll(*bf.metrics.pool(*_of_the_server(some, rows))),
        rel=1e-6,
    )
    for name, t in some.server["w"].items():
        assert torch.equal(t, every.server["w"][name])


def _of_the_server(result: Result, rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The predictions of the server's network for the rows, their labels and mask."""
    x = rows.take(rows.index)
    probs = result.model()(x.to(result.dtype)).softmax(-1)
    return probs[None], rows.y[rows.index][None], torch.ones(1, len(x), dtype=torch.bool)
