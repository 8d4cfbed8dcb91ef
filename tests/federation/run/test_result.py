"""What a result offers: predictions for its clients, for newcomers, draws."""

import dataclasses
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl import pools, priors
from bayesfl.composition.priors import Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.optim import SGD, Clip, Rate, cosine, multistep
from bayesfl.posteriors import MeanField
from tests.cases import SIZES, federation, run
from tests.federation.made import one_head_each


@pytest.mark.parametrize("number", [3, len(SIZES)])
def test_newcomers_do_not_take_over_what_is_anothers(clients, model, number, tmp_path):
    """Where the server addresses state to each client, one never seen starts from the server's own
    head, as all once did.
    """
    made = one_head_each(model)
    result = bf.simulate(made, clients, rounds=2, evaluate_every=None, progress=False)
    novel = federation(sizes=tuple(20 + j for j in range(number)))
    adapted = result.adapt(novel)
    wanted = result.server | {"heads": result.server["head"]["loc"].expand(number, -1)}
    assert wanted["done"] == 2
    assert_close(adapted.server, wanted, rtol=0, atol=0)
    view = {name: result.server[name] for name in ("body", "head")}
    x, _ = novel.test.client(1)
    assert_close(
        adapted.predict().probs[1], made.outputs(made.leaves(("body", "head"), view), x).softmax(-1)
    )
    assert not torch.isclose(result.server["heads"][1], result.server["head"]["loc"]).all()
    # The result of adapt knows what it is, saved or not.
    adapted.save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", made, novel)
    assert_close(loaded.predict().probs, adapted.predict().probs, rtol=0, atol=0, equal_nan=True)
    for resume in (adapted, loaded, tmp_path / "run"):
        with pytest.raises(ValueError, match=r"resume .*adapt"):
            bf.simulate(made, novel, rounds=3, evaluate_every=None, resume=resume, progress=False)
    assert not result.novel


def test_what_is_shown_is_short(clients, model):
    """Results, data and algorithms print in a line."""
    result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=1, progress=False)
    assert max(len(repr(thing)) for thing in (result, clients, result.algorithm)) < 600


def test_adapting_under_a_schedule_still_learns(clients, model):
    """After the last round a cosine schedule is at its last rate, not at zero."""
    old, novel = clients.hold_out(2, seed=0)
    algorithm = bf.algorithms.fedrep(
        model, optimiser=SGD(cosine(0.5), momentum=0.5), head_epochs=2, body_epochs=1
    )
    result = run(algorithm, old, 2, seed=np.int64(1))
    start = algorithm.rows(result.server)["head"]["loc"]
    assert (result.adapt(novel).private["head"]["loc"] - start).abs().max() > 1e-4


@pytest.mark.parametrize("form", ["steps", "clipped", "repeated"])
def test_adapting_at_a_rate_that_has_fallen_is_told(
    form: str, clients: FederatedData, model: nn.Module
):
    """With both rates, and a remedy that works; a constant rate, or one that has not fallen to a
    tenth, is not mentioned.
    """

    def made(rate: Rate) -> bf.Algorithm:
        if form == "repeated":
            repeated = bf.algorithms.pfedme(model, batches=4, personal_optimiser=SGD(rate))
            return replace(repeated, adapt=repeated.phases)
        optimiser = Clip(SGD(rate), norm=5.0) if form == "clipped" else SGD(rate, momentum=0.9)
        return bf.algorithms.fedper(model, optimiser=optimiser, epochs=3)

    name = "theta" if form == "repeated" else "head"
    result = run(made(multistep(0.1)), clients, 4)
    with pytest.warns(
        UserWarning, match=r"fallen from 0\.1 to 0\.001 after 4 rounds.*SGD\(0\.1\)"
    ) as told:
        slow = result.adapt(clients)
    assert told[0].filename == __file__
    remedy = str(told[0].message).split(", as ")[1].split(" does, ")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = {"constant": made(0.1), "result": result, "novel": clients}
        fast = eval(remedy, {"dataclasses": dataclasses, **names})
        for rate in (0.1, multistep(0.1, factor=0.5)):
            run(made(rate), clients, 4).adapt(clients)
    start = result.algorithm.rows(result.server)[name]["loc"]
    slow_way, fast_way = ((one.private[name]["loc"] - start).norm() for one in (slow, fast))
    assert fast_way > 2 * slow_way > 0


def test_other_clients_are_refused(result):
    """A split of other clients needs adapt, however many they are; adapted data must be of the same
    problem.
    """
    data = result.data
    others = bf.data.from_arrays(
        [x + 1 for x, _ in map(data.train.client, range(7))],
        [y.flip(0) for _, y in map(data.train.client, range(7))],
        outputs=3,
    )
    for call, given, words in (
        (result.predict, {"split": data.test.select([0, 1])}, "to other clients.*result.adapt"),
        (result.predict, {"split": others.test}, "to other clients.*result.adapt"),
        (
            result.predict,
            {"split": data.test.select([1, 0, 2, 3, 4, 5, 6])},
            "to other clients.*result.adapt",
        ),
        (result.predict, {"draws": 2.5}, r"^draws .*got 2\.5"),
        (result.predict, {"draws": -1}, "^draws .*0.* got -1"),
        (result.adapt, {"novel": federation((5,))}, "same problem"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**given)
    again = federation()  # the same data, made anew
    assert_close(
        result.predict(again.test).probs, result.predict().probs, rtol=0, atol=0, equal_nan=True
    )
    noisy = replace(data.test, x=data.test.x + 0.1)
    assert not torch.equal(result.predict(noisy).probs, result.predict().probs)


def test_new_clients_of_other_classes_are_refused(model: nn.Module):
    """The same classes under other numbers; and rows in which the last class does not occur, with
    the remedy in words.
    """
    x, y = np.random.default_rng(0).normal(size=(60, 8)), np.arange(60) % 3
    known, turned = (
        bf.data.from_arrays([x], [y], class_names=names)
        for names in (["a", "b", "c"], ["b", "a", "c"])
    )
    result = run(bf.algorithms.fedavg(model, epochs=1), known, 1)
    for novel, words in (
        (turned, r"class_names: saved \('a', 'b', 'c'\), given \('b', 'a', 'c'\);"),
        (
            bf.data.from_arrays([x[y < 2]], [y[y < 2]]),
            r"outputs: saved 3, given 2; .*from_arrays\(\.\.\., outputs=3\)",
        ),
        (bf.data.from_arrays([x], [y], outputs=4), "outputs: saved 3, given 4; .*same problem"),
    ):
        with pytest.raises(ValueError, match=f"^novel has other rows .*, {words}"):
            result.adapt(novel)
    assert result.adapt(bf.data.from_arrays([x[y < 2]], [y[y < 2]], outputs=3)).novel


@pytest.mark.filterwarnings("ignore:no block of the method covers")
def test_blocks_draw_apart_for_arviz(result):
    """Two blocks of one client, and one block of two clients, have draws of their own."""
    pytest.importorskip("arviz")
    prior = Normal(centre=server_mean("a"), variance=lambda given, view: torch.ones(1))
    blocks = {
        name: bf.Block("head.*", posterior=MeanField(), prior=prior, pool=None, keep=True)
        for name in ("a", "b")
    }
    made = bf.Algorithm(bf.models.mlp(8, hidden=8, outputs=3), blocks, (), parts=("a",))
    one = run(made, result.data)
    a, b, other = (
        torch.tensor(
            one.samples(client, block, draws=50).to_arviz().posterior["head.weight"].values
        )
        for client, block in ((1, "a"), (1, "b"), (2, "a"))
    )
    assert not torch.isclose(a, torch.stack([b, other])).any()


def is_drawn(
    weight: Any, layout: Any, moments: Any, *, atol: tuple[float, float], rtol: float
) -> None:
    """Draws of the head's weight have these moments."""
    drawn = torch.tensor(weight.values[0])
    mean, variance = (layout.leaves(of)["head.weight"] for of in moments)
    assert_close(drawn.mean(0), mean, atol=atol[0], rtol=0)
    assert_close(drawn.var(0), variance, atol=atol[1], rtol=rtol)


def test_draws_of_copies_for_arviz(result):
    """A mixture's components, each about its own mean with its own width, [chain, draw, M, ...]."""
    pytest.importorskip("arviz")
    plain = bf.algorithms.fedem(
        bf.models.mlp(8, hidden=4, outputs=3), components=2, epochs=1, optimiser=SGD(0.1, 0.9, 5e-4)
    )
    prior = Normal(centre=server_mean("components"), variance=lambda given, view: torch.ones(1))
    block = replace(plain.blocks["components"], posterior=MeanField(init_scale=0.1), prior=prior)
    made = run(replace(plain, blocks={"components": block}), result.data)
    weight = made.samples(1, "components", draws=2000).to_arviz().posterior["head.weight"]
    assert weight.shape == (1, 2000, 2, 3, 4)
    moments = block.posterior.moments(
        made.algorithm.belief("components", made.server["components"])
    )
    is_drawn(weight, made.algorithm.layout("components"), moments, atol=(0.02, 0), rtol=0.15)


def test_posterior_draws_for_arviz(result):
    """A client's block as InferenceData, whose moments are the posterior's."""
    pytest.importorskip("arviz")
    weight = result.samples(2, "head", draws=4000).to_arviz().posterior["head.weight"]
    assert weight.shape == (1, 4000, 3, 8)
    moments = result.algorithm.blocks["head"].posterior.moments(
        {k: t[2] for k, t in result.private["head"].items()}
    )
    is_drawn(weight, result.algorithm.layout("head"), moments, atol=(0.05, 0.05), rtol=0.1)
    drawn = result.samples(2, "head", draws=30)
    x = result.data.test.client(2)[0]
    head = drawn.layout.leaves(drawn.draws[0])
    features = drawn.model.body(x).detach()
    logits = torch.einsum("nd,sod->sno", features, head["head.weight"]) + head["head.bias"][:, None]
    assert_close(drawn.outputs(x), logits)
    assert_close(drawn.predict(x)["probs"], logits.softmax(-1).mean(0))
    for client, block, words in (
        (2, "body", r"'body' is a point.*\['head'\]"),
        (7, "head", "client"),
    ):
        with pytest.raises(ValueError, match=words):
            result.samples(client, block)


def test_draws_are_of_the_belief_that_a_client_is_sent(clients: FederatedData, model: nn.Module):
    """Of an addressed block, as under Mixed, that is the client's own centre and not the mean of
    all.
    """
    prior = priors.Normal(
        centre=lambda given, view: view["w"]["loc"],
        variance=lambda given, view: torch.ones_like(view["n"])[..., None],
    )
    block = bf.Block(
        posterior=MeanField(init_scale=1e-6),
        prior=prior,
        pool=pools.Mixed(lambda server, ids, uplink: torch.eye(len(ids))),
    )
    step = bf.Descend(bf.Energy("w", ("w",), likelihood="sum"), epochs=2)
    method = bf.Algorithm(model, {"w": block}, (step,), parts=("w",))
    result = bf.simulate(method, clients, rounds=1, evaluate_every=None, progress=False)
    drawn = result.samples(3, "w", draws=5).to_arviz().posterior
    leaves = method.layout("w").leaves(result.server["w"]["each"][3])
    for name, leaf in leaves.items():
        np.testing.assert_allclose(drawn[name].to_numpy()[0, 0], leaf.numpy(), atol=1e-4)
    assert not torch.allclose(result.server["w"]["each"][3], result.server["w"]["loc"], atol=1e-3)


def test_clients_that_would_learn_nothing_of_their_own_are_refused(
    clients: FederatedData, model: nn.Module
):
    """Where each client predicts with a part that it keeps, a new one needs phases to learn it."""
    plain = bf.algorithms.fedper(model, epochs=1)
    with pytest.raises(ValueError, match=r"\['head'\].*`adapt`"):
        run(replace(plain, adapt=()), clients).adapt(clients)
    assert run(bf.algorithms.fedavg(model, epochs=1), clients).adapt(clients).novel


@pytest.mark.parametrize(
    "mode", [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, torch.inference_mode]
)
def test_modes_of_the_caller_change_nothing(mode: Any, model: nn.Module, clients: FederatedData):
    """A run, its predictions, heads and posterior and those of a client's model are in the run's
    precision, whichever threads compute them.
    """

    def found() -> Any:
        result = bf.simulate(
            bf.algorithms.ditto(model, epochs=1, batch_size=10), clients, rounds=2, progress=False
        )
        x, _ = clients.test.client(1)
        own = result.client(1).predict(x)
        shared = bf.simulate(
            bf.algorithms.fedavg(model, epochs=1), clients, rounds=1, progress=False
        )
        return (
            result.history["global_nll"],
            result.predict().probs,
            own.probs,
            shared.heads().predict().probs,
            shared.laplace("kfac").posterior.moments()[1],
        )

    expected = found()
    with mode():
        assert_close(found(), expected, rtol=0, atol=0, equal_nan=True)
