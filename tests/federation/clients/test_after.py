"""What a stranger's predictor asks of clients: one file, no registration, and it works wherever
the library's own do.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.federation.store.identity import Answer
from bayesfl.flower import leaves
from tests.flower.made import assert_predicts, deploy, simulated


@dataclass(frozen=True)
class Shift:
    """A survey: one bias of the logits for all clients, by so many steps of its gradient."""

    steps: int = 3
    split = "validation"
    reads = "predictions"

    def start(self, about: Any) -> dict[str, Tensor]:
        return {"bias": torch.zeros(about.count).double(), "done": torch.tensor(0)}

    def shapes(self, state: Any) -> dict[str, tuple[int, ...]]:
        return {"n_rows": (), "slope": (len(state["bias"]),)}

    def answer(self, state: Any, local: Any) -> dict[str, Tensor]:
        logits, labels, clients = local.labelled
        wrong = (logits + state["bias"]).softmax(-1) - torch.eye(logits.shape[-1])[labels]
        return {"n_rows": clients.counts, "slope": clients.sum(wrong)}

    def solve(self, state: Any, total: Any) -> tuple[dict[str, Tensor], bool]:
        bias, done = state["bias"] - total["slope"] / total["n_rows"], state["done"] + 1
        return {"bias": bias, "done": done}, int(done) == self.steps


@dataclass(frozen=True)
class Shifted:
    """Predict at the means, with the bias that all clients have found."""

    tunes = ""
    grid = ()
    needs_data = False
    reads = ()

    def check(self, algorithm: Any) -> None: ...

    def asks(self, algorithm: Any, server: Any, known: Any) -> Any:
        return None if "shift" in known else ("shift", Shift())

    def __call__(self, algorithm: Any, given: Any, view: Any, data: Any) -> Any:
        found = given.get("shift", {"bias": torch.zeros(2)})
        return self.restored(algorithm, view, {"bias": found["bias"]})

    def stored(self, fitted: Any, value: Any, *, limit: int) -> dict[str, Tensor]:
        return {"bias": fitted.bias}

    def restored(self, algorithm: Any, view: Any, tensors: Any) -> Any:
        return Fitted(algorithm, view, tensors["bias"])


@dataclass(frozen=True)
class Counted(Shift):
    """With a key that its last state alone has."""

    def solve(self, state: Any, total: Any) -> tuple[dict[str, Tensor], bool]:
        state, done = super().solve(state, total)
        return state | ({"rows": total["n_rows"]} if done else {}), done


class Twice(Shifted):
    """The second survey reads that key."""

    def asks(self, algorithm: Any, server: Any, known: Any) -> Any:
        if "first" not in known:
            return "first", Counted()
        rows = int(known["first"]["rows"])
        return None if "shift" in known else ("shift", replace(Shift(), steps=rows))


@dataclass
class Fitted:
    algorithm: Any
    view: Any
    bias: Tensor

    def __call__(self, x: Any, *, value: Any = None, noise: Any = None, plain: bool = False) -> Any:
        outputs = self.algorithm.outputs(
            self.algorithm.leaves(self.algorithm.parts, self.view), x
        ) + (0 if plain else self.bias.to(self.view["n"]))
        found = self.algorithm.likelihood.predictive(outputs.unsqueeze(0))
        return found | {"epistemic": torch.full_like(found["epistemic"], torch.nan)}


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(40 + 10 * j, 4, generator=rng) for j in range(3)]
    return bf.data.from_arrays(xs, [(x[:, 0] > 0.8).long() for x in xs], validation=0.3)


@pytest.fixture(scope="module")
def method() -> bf.Algorithm:
    torch.manual_seed(0)
    model = bf.models.mlp(4, hidden=3, outputs=2)
    return replace(bf.algorithms.fedavg(model, epochs=1, batch_size=10), predictor=Shifted())


@pytest.fixture(scope="module")
def result(method: bf.Algorithm, clients: FederatedData) -> Result:
    return simulated(method, clients)


def by_hand(result: Result, clients: FederatedData) -> Tensor:
    """The bias of three steps, of the rows of all together."""
    model, bias = result.model(), torch.zeros(2).double()
    x = torch.cat([clients.validation.client(j)[0] for j in range(3)]).double()
    y = torch.cat([clients.validation.client(j)[1] for j in range(3)])
    for _ in range(3):
        bias = bias - ((model(x) + bias).softmax(-1) - torch.eye(2)[y]).mean(0)
    return bias


def test_it_is_the_pooled_rows(result: Result, clients: FederatedData):
    assert result.after == ()
    assert_close(result.answers["shift"]["bias"], by_hand(result, clients))
    x = clients.test.client(1)[0].double()
    want = (result.model()(x) + by_hand(result, clients)).softmax(-1)
    assert_close(result.predict().client(1).probs, want)
    assert_close(result.client(1).predict(clients.test.client(1)[0]).probs, want)


def test_it_is_kept(result: Result, clients: FederatedData, tmp_path: Path):
    """In files, with calibration, for newcomers and in reports; a round asks anew."""
    served = result.calibrate(bf.calibration.Temperature())
    assert [type(one) for one in served.after] == [Answer, bf.calibration.Fitted]
    assert served.uncalibrated().after == served.after[:1]
    served.save(tmp_path / "run")
    again = bf.load(tmp_path / "run", result.algorithm, clients)
    assert_close(again.predict().probs, served.predict().probs, rtol=0, atol=0, equal_nan=True)
    bare = bf.load(tmp_path / "run", result.algorithm)
    assert torch.equal(bare.answers["shift"]["bias"], result.answers["shift"]["bias"])
    bare.client(0).save(tmp_path / "client")
    own = bf.load_client(tmp_path / "client", result.algorithm)
    rows = clients.test.client(0)[0]
    assert_close(own.predict(rows).probs, served.client(0).predict(rows).probs)
    joined = result.adapt(clients)
    assert torch.equal(joined.answers["shift"]["bias"], result.answers["shift"]["bias"])
    served.report(tmp_path / "report.html")
    more = bf.simulate(
        result.algorithm,
        clients,
        rounds=4,
        seed=3,
        dtype=torch.float64,
        resume=tmp_path / "run",
        evaluate_every=None,
        progress=False,
    )
    assert more.after == ()


def test_evaluations_ask_by_the_runs_aggregation(
    method: bf.Algorithm, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """And keep what was answered."""
    rule, added = bf.SecureSum(), []
    plain = bf.SecureSum.added
    monkeypatch.setattr(
        bf.SecureSum, "added", lambda self, summands: added.append(1) or plain(self, summands)
    )
    hidden = bf.simulate(method, clients, rounds=1, aggregation=rule, progress=False)
    assert len(added) == 3
    assert [one.name for one in hidden.after] == ["shift"]
    hidden.predict()
    assert len(added) == 3
    open_ = replace(hidden, after=()).answers["shift"]["bias"]
    assert 0 < (hidden.answers["shift"]["bias"] - open_).abs().max() < 1e-6


def test_what_leaves_by_surveys_after_another(method: bf.Algorithm):
    """As the last state of the first one would have it."""
    sent = leaves(replace(method, predictor=Twice()), outputs=2)
    found = [(one.name, one.size, one.what) for one in sent if "sums" in one.what]
    assert found == [
        (name, size, f"sums over validation rows: {survey}")
        for survey in ("first", "shift")
        for name, size in (("n_rows", 1), ("slope", 2))
    ]


def test_what_leaves_where_a_number_is_tuned():
    method = bf.algorithms.fedsi_full(bf.models.mlp(4, hidden=3, outputs=2), steps=1)
    sizes = {one.name: one.size for one in leaves(method) if "tuned number" in one.what}
    count = len(method.predictor.grid)
    assert sizes == {"nll": count, "products": count**2, "n_examples": 1, "n_broken": count}


def test_over_a_network(
    method: bf.Algorithm, result: Result, clients: FederatedData, tmp_path: Path
):
    found = deploy(method, clients, tmp_path)
    assert_close(found.answers["shift"]["bias"], result.answers["shift"]["bias"])
    assert_predicts(found, tmp_path, result)


def test_clients_fine_tune_once(clients: FederatedData, monkeypatch: pytest.MonkeyPatch):
    """For the tuned number, for every split and for the predictions that follow."""
    method = bf.algorithms.fedsi_full(
        bf.models.mlp(4, hidden=3, outputs=2), steps=1, finetune_steps=2, predictive_precision=None
    )
    run = bf.simulate(method, clients, rounds=1, evaluate_every=None, progress=False)
    tuned, plain = [], bf.federation.clients.local.Local.finetuned
    monkeypatch.setattr(
        bf.federation.clients.local.Local,
        "finetuned",
        lambda self, ids, *more: tuned.extend(ids.tolist()) or plain(self, ids, *more),
    )
    probs = run.predict().probs
    assert sorted(tuned) == [0, 1, 2]
    monkeypatch.setattr("bayesfl.federation.clients.local.KEPT", 0)
    again = replace(run)
    assert_close(again.predict().probs, probs, rtol=0, atol=0, equal_nan=True)
    assert len(tuned) == 3 * 3
