"""What a client does in a round: its state, its losses and its traffic."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.phases import Once
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from tests.cases import burst_by_fine_tuning, federation
from tests.federation.made import one_head_each, run, state, without


def breaking(model: nn.Module, clients: FederatedData) -> bf.Algorithm:
    """FedPer whose third client loses its head to NaN, and then goes on training."""
    plain = bf.algorithms.fedper(model, epochs=1, batch_size=10)
    n = int(clients.train.counts[2])
    assert (clients.train.counts == n).sum() == 1

    def lose(algorithm: bf.Algorithm, given: Any, view: Any, data: Any) -> Any:
        nan = torch.where(view["n"] == n, torch.nan, 1.0)
        return view | {"head": {"loc": view["head"]["loc"] * nan}}

    return replace(plain, phases=(*plain.phases, Once(lose), *plain.phases))


@pytest.mark.parametrize("kernel", ["layers", "live", "reference"])
def test_training_that_leaves_the_numbers(
    kernel: Any, model: nn.Module, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Skipped, its client is left out, and the others of its chunk are as they were."""
    engine = bf.Engine(kernel, chunk=3)
    result = run(breaking(model, clients), clients, admission=bf.Admission("skip"), engine=engine)
    assert result.history["rejected"].tolist() == [1, 1, 1]
    plain = bf.algorithms.fedper(model, epochs=1, batch_size=10)
    for round in range(3):
        without(2, round, monkeypatch)
    healthy = run(replace(plain, phases=(*plain.phases, *plain.phases)), clients, engine=engine)
    assert_close(state(result), state(healthy), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", ["reference", "live", "layers", "vmap"])
def test_counters_and_masks_are_kept(clients, model, kernel, tmp_path):
    """Private and server state of whole numbers and truth values goes through rounds, checks,
    saving and adapting as it is.
    """

    def count(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        return view | {"rounds_in": view["rounds_in"] + 1, "mask": ~view["mask"]}

    plain = bf.algorithms.fedper(model, epochs=1)
    made = replace(
        plain,
        phases=(Once(count), *plain.phases),
        server=lambda blocks, jobs: {
            "seen": torch.zeros(jobs, dtype=torch.int64),
            "on": torch.tensor(True),
        },
        private={"rounds_in": torch.tensor(0), "mask": torch.tensor([True, False])},
        reports={"rounds_in": torch.tensor(0)},
        combine=lambda server, ids, uplink: {
            "seen": server["seen"].index_add(0, ids, torch.ones_like(ids)),
            "on": ~server["on"],
        },
    )
    run = bf.simulate(
        made,
        clients,
        rounds=3,
        participation=0.5,
        evaluate_every=None,
        progress=False,
        engine=bf.Engine(kernel, chunk=2, workers=1),
    )
    chosen = np.bincount(np.concatenate([run.settings.cohort(7, r) for r in range(3)]), minlength=7)
    assert run.server["seen"].tolist() == run.private["rounds_in"].tolist() == chosen.tolist()
    assert run.private["mask"].tolist() == [[n % 2 == 0, n % 2 == 1] for n in chosen]
    assert run.server["on"].item() is False
    run.save(tmp_path / "run")
    again = bf.load(tmp_path / "run", made, clients)
    assert (again.private["mask"].dtype, again.server["seen"].dtype) == (torch.bool, torch.int64)
    assert made.uplink(made.init(1))["rounds_in"] == ((), torch.int64)
    assert run.adapt(federation(sizes=(9, 8, 7))).server["seen"].tolist() == [0, 0, 0]


def test_a_fine_tuning_that_leaves_the_numbers(clients, model, tmp_path):
    """It stops a plain run, which gives back its last round; where bad clients are skipped its
    client predicts without it, later too.
    """
    algorithm = burst_by_fine_tuning(model)
    with pytest.raises(
        bf.DivergenceError, match=r"client 2 .*fine-tuning phase 1 \(Once\) of round 2"
    ) as raised:
        bf.simulate(algorithm, clients, rounds=2, progress=False)
    assert (raised.value.result.round, len(raised.value.result.history)) == (1, 1)
    found = bf.simulate(
        algorithm, clients, rounds=1, progress=False, admission=bf.Admission("skip")
    )
    assert np.isfinite(found.history["personal_nll"]).all()
    found.save(tmp_path / "run")
    for result in (found, bf.load(tmp_path / "run", algorithm, clients)):
        assert result.predict().summary(clients.test)["nll"] == pytest.approx(
            found.history.rows[0]["personal_nll"], abs=1e-12
        )
    strict = bf.simulate(
        algorithm, clients, rounds=2, evaluate_every=None, progress=False, resume=found
    )
    with pytest.raises(bf.DivergenceError, match="client 2"):
        strict.predict()


def test_bytes_down(clients, model):
    """What a client receives in a round: shared blocks, what is addressed to it and what the method
    adds; not what never changes.
    """
    body, head = (sum(p.numel() for p in part.parameters()) for part in (model.body, model.head))
    for made, numbers in (
        (bf.algorithms.fedavg(model), body + head),
        (bf.algorithms.fedper(model), body),
        (bf.algorithms.fedbabu(model), body),
        (bf.algorithms.lg_fedavg(model), head),
        (bf.algorithms.ditto(model), body + head),
        (bf.algorithms.local(model), 0),
        (
            bf.algorithms.pfedvem(model, head_epochs=1, body_epochs=1),
            body + head + 1,
        ),  # the pooled scale; its share stays up there
        (one_head_each(model), body + 2 * head),
    ):
        for dtype, size in ((torch.float32, 4), (torch.float64, 8)):
            history = run(
                made,
                clients,
                rounds=2,
                dtype=dtype,
                participation=0.5,
                train="cohort",
                sampling="fixed",
                evaluate_every=None,
            ).history
            assert history["bytes_down"].tolist() == [3 * size * numbers] * 2
    # The last: both blocks, one of them stacked, and a report.
    assert history["bytes_up"].tolist() == [3 * 8 * (body + head + 1)] * 2


def test_train_nll(clients, model):
    """The mean over the cohort of what a client's last trained phase saw, batch by batch, before
    each step.
    """
    net = bf.models.mlp(8, hidden=16, outputs=3).double()

    def told(method: bf.Algorithm, **options: Any) -> tuple[Result, float]:
        result = run(method, clients, rounds=1, evaluate_every=None, **options)
        return result, result.history["train_nll"][0]

    def loss(j: int) -> float:
        x, y = clients.train.client(j)
        return nn.functional.cross_entropy(net(x.double()), y).item()

    method = bf.algorithms.fedavg(model, epochs=1, batch_size=None)
    plain, found = told(method, participation=0.5)
    assert_close(found, np.mean([loss(j) for j in plain.settings.cohort(7, 0)]))
    # FedRep's last phase is the body's, under the head that the first one fitted.
    fedrep = bf.algorithms.fedrep(model, head_epochs=3, body_epochs=1, batch_size=None)
    personal, found = told(fedrep)
    seen = []
    for j, head in enumerate(personal.private["head"]["loc"]):
        net.head.load_state_dict(
            {name[5:]: leaf for name, leaf in fedrep.layout("head").leaves(head).items()}
        )
        seen.append(loss(j))
    assert_close(found, np.mean(seen))
    assert np.isnan(told(replace(method, phases=()))[1])


def test_a_client_set_aside_predicts_from_its_start(clients, model):
    """Whatever later phases make of it; the others go on from what the first one made."""
    burst = burst_by_fine_tuning(model)

    def shift(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        return view | {"w": {"loc": view["w"]["loc"] + 1}}

    algorithm = replace(burst, finetune=(*burst.finetune, Once(shift)))
    result = bf.simulate(algorithm, clients, rounds=1, evaluate_every=None, progress=False)
    ids, start = np.array([0, 2]), result.server["w"]["loc"]
    done = (
        replace(result, tolerant=True)
        .local(clients.splits)
        .finetuned(ids, result.state.received(algorithm, ids), 1)
    )
    assert done.diverged.tolist() == [False, True]
    assert_close(done.views["w"]["loc"], torch.stack([start + 2, start]))


def test_adaptation_is_never_tolerant(model: nn.Module, clients: FederatedData):
    """A new client that could not be adapted would predict as if it had been."""
    burst = burst_by_fine_tuning(model)
    made = replace(burst, finetune=(), adapt=burst.finetune)
    result = run(made, clients, admission=bf.Admission("skip"))
    with pytest.raises(bf.DivergenceError, match="client 2"):
        result.adapt(clients)


@pytest.mark.parametrize("name", ["Genève", "2", "client 2"])
def test_a_client_is_called_by_its_name(
    name: str, model: nn.Module, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """In errors and in the log, by its number too; a name that says no more than the number is left
    out.
    """
    data = replace(clients, client_names=("a", "b", name, "d", "e", "f", "g"))
    called = "client 2 ('Genève')" if name == "Genève" else "client 2"
    with pytest.raises(bf.DivergenceError, match=re.escape(f"{called} is no longer finite")):
        run(breaking(model, data), data)
    run(breaking(model, data), data, rounds=1, admission=bf.Admission("skip"))
    assert f"{called} is left out" in caplog.text
    caplog.clear()
    run(burst_by_fine_tuning(model), data, rounds=1, admission=bf.Admission("skip"))
    assert f"fine-tuning of {called} is not finite" in caplog.text
