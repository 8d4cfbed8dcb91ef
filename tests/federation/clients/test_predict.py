"""Predictions: draws, the plug-in, fine-tuning, masks, and the shared model."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.phases import Once
from bayesfl.data import ClientData
from bayesfl.federation.clients import predict
from bayesfl.optim import SGD
from tests.cases import SIZES, federation


def test_padding(result):
    """Rows that pad a shorter client are NaN and masked; a client alone has none."""
    predictions = result.predict(result.data.train)
    assert predictions.probs.shape == (len(SIZES), max(SIZES), 3)
    assert predictions.mask.sum(1).tolist() == list(SIZES)
    assert bool(predictions.probs[~predictions.mask].isnan().all())
    assert_close(predictions.probs[predictions.mask].sum(-1), torch.ones(sum(SIZES)))
    assert predictions.client(3).probs.shape == (5, 3)


def third(result):
    """The third client's view and test inputs."""
    view = {
        "body": result.server["body"],
        "head": {key: t[2] for key, t in result.private["head"].items()},
    }
    return view, result.data.test.client(2)[0]


def test_the_plug_in_is_the_model_at_its_mean(result):
    """draws=0, which is pFedVEM's own predictor: softmax at the posterior's mean, with no epistemic
    part.
    """
    algorithm, (view, x) = result.algorithm, third(result)
    expected = algorithm.outputs(algorithm.leaves(("body", "head"), view), x).softmax(-1)
    plug_in = result.predict(draws=0)
    assert_close(plug_in.probs[2], expected)
    assert bool(plug_in.epistemic.isnan().all())
    assert_close(result.predict().probs, plug_in.probs)


def test_draws_average_probabilities(result):
    """Many draws: the mean of softmax over the posterior, checked by draws of one's own; the
    epistemic part is the mutual information.
    """
    algorithm, (view, x) = result.algorithm, third(result)
    noise = torch.randn(
        4000, algorithm.layout("head").size, generator=torch.Generator().manual_seed(0)
    )
    probs = torch.stack(
        [
            algorithm.outputs(algorithm.leaves(("body", "head"), view, {"head": e}), x).softmax(-1)
            for e in noise
        ]
    )
    averaged = result.predict(draws=4000).client(2)
    assert_close(averaged.probs, probs.mean(0), atol=0.03, rtol=0)
    information = torch.special.entr(probs.mean(0)).sum(-1) - torch.special.entr(probs).sum(
        -1
    ).mean(0)
    assert_close(averaged.epistemic, information, atol=0.03, rtol=0)
    assert bool((averaged.epistemic > 0).all())


def test_draws_have_addresses(result):
    """The same whatever the engine; more clients or rows change nobody's."""
    few = replace(result, engine=bf.Engine("reference", chunk=2, workers=1)).predict(draws=3)
    assert_close(result.predict(draws=3).probs, few.probs, atol=1e-6, rtol=1e-5, equal_nan=True)
    train = result.data.train
    few_rows = replace(
        train,
        index=torch.cat([train.rows(j)[:5] for j in range(len(SIZES))]),
        counts=np.minimum(train.counts, 5),
    )
    assert_close(
        result.predict(few_rows, draws=3).epistemic[3],
        result.predict(train, draws=3).epistemic[3, :5],
    )


def test_pieces_do_not_matter(result, monkeypatch):
    """Inputs are gathered in pieces of bounded memory; the pieces leave no seam."""
    whole = result.predict(result.data.train, draws=2)
    monkeypatch.setattr(predict, "GATHER", 1)
    assert_close(result.predict(result.data.train, draws=2).probs, whole.probs, equal_nan=True)


def test_clients_without_test_examples_are_left_out(result):
    """Their rows are masked, and measures are those of the others."""
    test = result.data.test
    keep = torch.cat([test.rows(j) for j in range(len(SIZES)) if j != 4])
    counts = test.counts.copy()
    counts[4] = 0
    part = ClientData(test.x, test.y, keep, counts)
    predictions = result.predict(part)
    assert predictions.mask.any(1).tolist() == [j != 4 for j in range(len(SIZES))]
    assert_close(predictions.probs[2], result.predict().probs[2])
    assert predictions.summary(part)["accuracy"] >= 0


def test_finetuning_predicts_from_a_copy():
    """FedAvg-FT's predictions are those of FedAvg followed by an epoch on each client; the state is
    FedAvg's.
    """
    clients, model = federation(), bf.models.mlp(8, hidden=8, outputs=3)
    options = {"rounds": 2, "dtype": torch.float64, "evaluate_every": None, "progress": False}
    fast = SGD(0.2, momentum=0.9)
    tuned, plain = (
        bf.simulate(make(model, batch_size=None, epochs=1), clients, **options)
        for make in (
            partial(bf.algorithms.fedavg_ft, finetune_epochs=3, finetune_optimiser=fast),
            bf.algorithms.fedavg,
        )
    )
    assert torch.equal(tuned.server["w"]["loc"], plain.server["w"]["loc"])
    x, y = (t.double() if t.is_floating_point() else t for t in clients.train.client(1))
    net = plain.model().train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    expected = net(clients.test.client(1)[0].double()).softmax(-1).detach()
    assert_close(tuned.predict().probs[1], expected, atol=1e-10, rtol=0)


def test_finetuning_runs_once_for_all_splits():
    """Both splits are predicted by one fine-tuned copy of each client."""
    seen: list[int] = []

    def watch(algorithm: bf.Algorithm, given: Server, view: View, batch: Batch) -> View:
        seen.append(int(view["n"]))
        return view | {"w": {"loc": view["w"]["loc"] + 1.0}}

    data = bf.data.iid("digits", clients=3, validation=0.2, seed=0)
    plain = bf.algorithms.fedavg(bf.models.mlp(data.inputs, hidden=4, outputs=10), epochs=1)
    result = bf.simulate(
        replace(plain, finetune=(Once(watch),)),
        data,
        rounds=1,
        engine=bf.Engine("reference", workers=1),
        progress=False,
    )
    assert len(seen) == 3
    for split, prefix in ((data.test, "personal"), (data.validation, "validation")):
        assert_close(
            result.predict(split).summary(split)["nll"], result.history[f"{prefix}_nll"][-1]
        )


def test_a_mixture_predicts_for_a_chunk_as_for_each_client():
    """Copies of weight 0 take no part, whatever they predict."""
    data = bf.data.concept_drift("digits", clients=4, seed=0)
    model = bf.models.mlp(data.inputs, hidden=4, outputs=data.outputs)
    result = bf.simulate(
        bf.algorithms.fedem(model), data, rounds=2, dtype=torch.float64, progress=False
    )
    pi = result.private["pi"]
    pi[1] = torch.tensor([0.0, 1.0, 0.0]).to(pi)
    result.server["components"]["loc"][0, 0] = torch.nan
    for j, found in ((1, result.predict(draws=0)), (1, result.predict())):
        alone = result.client(j).predict(data.test.client(j)[0].double())
        assert_close(found.client(j).probs, alone.probs, atol=1e-12, rtol=0)
        assert bool(found.client(j).probs.isfinite().all())
