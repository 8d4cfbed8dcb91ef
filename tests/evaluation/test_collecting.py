"""Predictions put together in parts of clients with similar numbers of rows."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import ClientData, FederatedData
from bayesfl.evaluation import collecting
from bayesfl.evaluation.collecting import Collector, alike
from bayesfl.evaluation.surveys import Parts


def split(*counts: int) -> ClientData:
    """Clients of so many examples."""
    rows = sum(counts)
    return ClientData(
        torch.zeros(rows, 2), torch.arange(rows) % 3, torch.arange(rows), np.array(counts)
    )


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients stand together only where they have similar numbers of rows."""
    monkeypatch.setattr(collecting, "FEW", 1)


@pytest.fixture(scope="module")
def uneven() -> FederatedData:
    """Six clients of 4 to 90 rows."""
    rng = np.random.default_rng(0)
    counts = [40, 5, 90, 12, 4, 61]
    xs = [rng.normal(size=(n, 3)).astype("f") for n in counts]
    ys = [(x.sum(1) + rng.normal(size=len(x)) > 0).astype(int) for x in xs]
    return bf.data.from_arrays(xs, ys, validation=0.2, calibration=0.2)


def test_chunks_are_put_together():
    """In any order and under any padding; a client that was never added has no rows."""
    collector = Collector(split(2, 3, 1, 2))
    assert collector.empty
    first, second = torch.rand(2, 4, 3), torch.rand(1, 2, 3)
    collector.add(np.array([3, 1]), {"probs": first, "epistemic": first[..., 0]})
    collector.add(np.array([0]), {"probs": second, "epistemic": second[..., 0]})
    assert not collector.empty
    found = collector.parts().predictions
    assert found.mask.tolist() == [
        [True, True, False],
        [True, True, True],
        [False] * 3,
        [True, True, False],
    ]
    assert torch.equal(found.probs[found.mask], torch.cat([second[0], first[1, :3], first[0, :2]]))
    assert bool(found.probs[~found.mask].isnan().all())
    assert torch.equal(found.epistemic[found.mask], found.probs[found.mask][:, 0])


def test_predictions_that_are_not_finite_name_a_client():
    """Measures are NaN then, and nothing else would say which example did it; padding counts
    nothing.
    """
    collector = Collector(split(2, 3), ("Bern", "Chur"))
    probs = torch.full((2, 3, 3), 1 / 3)
    probs[1, 2, 0], probs[0, 2] = math.nan, math.nan
    collector.add(np.array([0, 1]), {"probs": probs, "epistemic": torch.full((2, 3), math.nan)})
    with pytest.warns(
        UserWarning,
        match=r"predictions for 1 examples are not finite, the first that of row 2 of client "
        r"'Chur'",
    ):
        collector.parts()


@pytest.mark.usefixtures("apart")
def test_one_long_client_makes_no_other_long():
    """In a part, padding is at most as much as examples, and no part is larger than asked; every
    client stands in one.
    """
    counts = np.array([20_000, *[12] * 500, 0, 700, 900, 13_000])
    groups = alike(counts, most=5_000)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(counts)))
    for ids in groups:
        padded = counts[ids].max() * len(ids)
        assert len(ids) == 1 or padded <= min(5_000, 2 * counts[ids].sum())
        assert np.all(np.diff(ids) > 0)
    assert len(groups) < 6
    assert [ids.tolist() for ids in alike(np.zeros(3, np.int64), most=10)] == [[0, 1, 2]]


def test_few_rows_stand_in_one_part():
    assert [ids.tolist() for ids in alike(np.array([1, 40, 7]), most=10**6)] == [[0, 1, 2]]


@pytest.mark.usefixtures("apart")
def test_parts_are_the_whole():
    """Put together they are padded to the longest, as `Result.predict` returns them; a part has its
    own clients alone.
    """
    of, names = split(2, 90, 0, 3, 8), tuple("abcde")
    collector = Collector(of, names)
    for j, n in enumerate(of.counts):
        values = (torch.arange(n) + 100.0 * j).reshape(1, -1, 1)
        collector.add(np.array([j]), {"probs": values, "epistemic": values[..., 0]})
    parts = collector.parts()
    assert [part.ids.tolist() for part in parts] == [[1, 4], [0, 2, 3]]
    whole = parts.predictions
    assert whole.names == names
    assert whole.probs.shape == (5, 90, 1)
    for j, n in enumerate(of.counts):
        assert whole.client(j).probs[:, 0].tolist() == [100 * j + i for i in range(n)]
    assert torch.equal(whole.labels, of.padded_labels()[0])
    assert bool(whole.probs[~whole.mask].isnan().all())
    some = parts.only([0, 4]).predictions
    assert some.names == ("a", "e")
    assert some.probs[some.mask].tolist() == [[0.0], [1.0], *[[400.0 + i] for i in range(8)]]
    assert sorted(parts.rows.probs.flatten().tolist()) == sorted(
        whole.probs[whole.mask].flatten().tolist()
    )


@pytest.mark.usefixtures("apart")
def test_a_table_that_does_not_fit_names_what_does(monkeypatch: pytest.MonkeyPatch):
    collector = Collector(split(9, 1, 1))
    collector.add(np.arange(3), {"probs": (t := torch.rand(3, 9, 3)), "epistemic": t[..., 0]})
    monkeypatch.setattr("bayesfl.evaluation.surveys.available_memory", lambda like: 100)
    with pytest.raises(MemoryError, match=r"3 clients.*longest has 9 rows.*result\.table\(\)"):
        _ = collector.parts().predictions


def test_measures_by_parts_are_those_of_all_at_once(
    uneven: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Of histories, tables, audits, calibrated predictions and a user's own, to rounding."""
    model = bf.models.mlp(uneven.inputs, hidden=3, outputs=uneven.outputs)
    options = {"rounds": 2, "record_clients": ("accuracy", "own"), "dtype": torch.float64}
    own = {"own": lambda predictions, labels: float(predictions.probs.amax()) + len(labels)}
    steps = (bf.calibration.Temperature(), bf.calibration.Conformal(level=0.8, score="aps"))
    groups = [["x" if i % 3 else "y" for i in range(n)] for n in uneven.test.counts]

    def found() -> tuple[Parts, list[object]]:
        method = bf.algorithms.ditto(model)
        result = bf.simulate(method, uneven, measures=own, progress=False, **options)
        history, before = result.history, result
        result = result.calibrate(*steps)
        audits = [result.audit(**by).columns() for by in ({}, {"by": "label"}, {"groups": groups})]
        secure = result.audit(aggregation=bf.SecureSum()).columns()
        summary = result.predict().summary(uneven.test)
        numbers = [
            [{k: v for k, v in row.items() if "seconds" not in k} for row in history.rows],
            history.clients("personal_own"),
            {
                name: t.numpy()
                for one in result.steps
                for name, t in {**one.state, **one.own}.items()
            },
            result.table().to_dict("list"),
            *audits,
            {k: v for k, v in secure.items() if "width" not in k},
            summary,
            before.predict().probs.numpy(),
        ]
        return result.known_of(uneven.test), numbers

    at_once, whole = found()
    monkeypatch.setattr(collecting, "FEW", 1)
    parts, apart = found()
    assert (len(at_once), len(parts)) == (1, 2)

    def same(one: object, other: object) -> None:
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            for name in one:
                same(one[name], other[name])
        elif isinstance(one, np.ndarray) and one.dtype.kind == "U":
            assert one.tolist() == other.tolist()
        elif isinstance(one, list) and one and isinstance(one[0], dict):
            for pair in zip(one, other, strict=True):
                same(*pair)
        else:
            assert_close(
                torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=1e-12, equal_nan=True
            )

    for pair in zip(whole, apart, strict=True):
        same(*pair)


@pytest.mark.usefixtures("apart")
def test_an_audit_by_client_has_no_room_for_other_clients():
    """Answers are as many as clients, whatever their number, and are those that hide nothing."""
    data = bf.data.iid("digits", clients=30, max_size=300)
    model = bf.models.mlp(data.inputs, hidden=3, outputs=data.outputs)
    result = bf.simulate(bf.algorithms.fedavg(model), data, rounds=1, progress=False)
    audit, secure = result.audit(), result.audit(aggregation=bf.SecureSum())
    assert audit.right.tolist() == secure.right.tolist()
    assert_close(torch.from_numpy(audit.ece), torch.from_numpy(secure.ece), rtol=0, atol=1e-6)
    assert math.isclose(audit.pooled_ece, secure.pooled_ece, abs_tol=1e-6)
