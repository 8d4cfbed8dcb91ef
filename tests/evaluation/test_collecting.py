"""Predictions put together row after row, so that no client makes another long."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import ClientData, FederatedData
from bayesfl.evaluation.collecting import Collector
from bayesfl.evaluation.metrics.clients import Segments
from bayesfl.federation.clients import predict


def split(*counts: int) -> ClientData:
    """Clients of so many examples."""
    rows = sum(counts)
    return ClientData(
        torch.zeros(rows, 2), torch.arange(rows) % 3, torch.arange(rows), np.array(counts)
    )


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
    first, second = torch.rand(2, 4, 3), torch.rand(1, 2, 3)
    collector.add(np.array([3, 1]), {"probs": first, "epistemic": first[..., 0]})
    collector.add(np.array([0]), {"probs": second, "epistemic": second[..., 0]})
    found = collector.found().padded()
    assert found.mask.tolist() == [
        [True, True, False],
        [True, True, True],
        [False] * 3,
        [True, True, False],
    ]
    assert torch.equal(found.probs[found.mask], torch.cat([second[0], first[1, :3], first[0, :2]]))
    assert bool(found.probs[~found.mask].isnan().all())
    assert torch.equal(found.epistemic[found.mask], found.probs[found.mask][:, 0])


def test_rows_stand_one_clients_after_the_others():
    """Padded to the longest they are what `Result.predict` returns, and again the rows."""
    of, names = split(2, 90, 0, 3, 8), tuple("abcde")
    collector = Collector(of, names)
    for j in (1, 4, 0, 2, 3):
        values = (torch.arange(of.counts[j]) + 100.0 * j).reshape(1, -1, 1)
        collector.add(np.array([j]), {"probs": values, "epistemic": values[..., 0]})
    found = collector.found(seed=3, round=5)
    wanted = [100.0 * j + i for j, n in enumerate(of.counts) for i in range(n)]
    assert found.predictions.probs[:, 0].tolist() == wanted
    assert torch.equal(found.labels, of.y)
    assert (found.seed, found.round, found.ids.tolist()) == (3, 5, [0, 1, 2, 3, 4])
    whole = found.padded()
    assert whole.names == names
    assert whole.probs.shape == (5, 90, 1)
    assert torch.equal(whole.labels, of.padded_labels()[0])
    assert torch.equal(whole.mask, of.padded_labels()[1])
    assert bool(whole.probs[~whole.mask].isnan().all())
    rows, clients = whole.rows()
    assert torch.equal(rows.probs, found.predictions.probs)
    assert torch.equal(clients.counts, found.clients.counts)


def test_a_table_that_does_not_fit_names_what_does(monkeypatch: pytest.MonkeyPatch):
    collector = Collector(split(9, 1, 1))
    collector.add(np.arange(3), {"probs": (t := torch.rand(3, 9, 3)), "epistemic": t[..., 0]})
    monkeypatch.setattr("bayesfl.evaluation.surveys.available_memory", lambda like: 100)
    with pytest.raises(MemoryError, match=r"3 clients.*longest has 9 rows.*result\.table\(\)"):
        collector.found().padded()


def test_sums_by_client():
    """Of values, places and rows in order; clients without rows have zeros, and no mean."""
    clients = Segments(torch.tensor([3, 0, 2]))
    x = torch.tensor([[1.0, 5.0], [2.0, 4.0], [0.5, 3.0], [7.0, 2.0], [6.0, 1.0]])
    assert clients.sum(x).tolist() == [[3.5, 12.0], [0.0, 0.0], [13.0, 3.0]]
    among = torch.tensor([True, False, True, False, False])
    mean = clients.mean(x[:, 1], among).tolist()
    assert mean[0] == 4.0
    assert np.isnan(mean[1:]).all()
    place = torch.tensor([0, 1, 1, 1, 0])
    assert clients.count(place, 2).tolist() == [[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    assert clients.count(place, 2, x[:, 0])[0].tolist() == [1.0, 2.5]
    assert clients.order(x[:, 0]).tolist() == [2, 0, 1, 4, 3]
    assert clients.kept(among).counts.tolist() == [2, 0, 0]
    assert clients.padded(place, -1).tolist() == [[0, 1, 1], [-1] * 3, [1, 0, -1]]


def test_one_long_client_makes_no_other_long(
    uneven: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Where they are predicted: of a chunk those within a factor of two stand together, unless all
    are few; predictions are the same.
    """
    model = bf.models.mlp(uneven.inputs, hidden=3, outputs=uneven.outputs)
    options = {"rounds": 1, "evaluate_every": None, "dtype": torch.float64, "progress": False}
    result = bf.simulate(bf.algorithms.ditto(model), uneven, **options)
    chunks: list[list[int]] = []
    plain = predict._of_views
    monkeypatch.setattr(
        predict, "_of_views", lambda *of: chunks.append(of[4].counts[of[5]].tolist()) or plain(*of)
    )
    whole = result.predict()
    assert [len(one) for one in chunks] == [3, 3]
    monkeypatch.setattr(predict, "FEW", 1)
    chunks.clear()
    apart = result.predict()
    assert all(max(one) < 2 * min(one) for one in chunks)
    assert sum(map(len, chunks)) == 6
    assert len(chunks) > 2
    assert_close(apart.probs, whole.probs, rtol=0, atol=1e-12, equal_nan=True)


def test_an_audit_by_client_has_no_room_for_other_clients():
    """Answers are as many as clients, whatever their number, and are those that hide nothing."""
    data = bf.data.iid("digits", clients=30, max_size=300)
    model = bf.models.mlp(data.inputs, hidden=3, outputs=data.outputs)
    result = bf.simulate(bf.algorithms.fedavg(model), data, rounds=1, progress=False)
    audit, secure = result.audit(), result.audit(aggregation=bf.SecureSum())
    assert audit.right.tolist() == secure.right.tolist()
    assert_close(torch.from_numpy(audit.ece), torch.from_numpy(secure.ece), rtol=0, atol=1e-6)
    assert math.isclose(audit.pooled_ece, secure.pooled_ece, abs_tol=1e-6)
