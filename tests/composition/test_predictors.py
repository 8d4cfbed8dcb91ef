"""Predictors: what they say is what `Laplace` says, their number is chosen on the clients'
validation data together.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.composition.predictors import PRECISIONS, LinearisedLaplace
from bayesfl.data import FederatedData
from bayesfl.evaluation.predictions import Predictions
from bayesfl.federation.clients import predict, tuning
from bayesfl.likelihoods import Bernoulli, Gaussian
from bayesfl.optim import SGD
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.linearised import nll_of_predictive
from bayesfl.posteriors.prior_precision import largest_alike
from bayesfl.posteriors.selection import Evidence
from tests.cases import CASES

HEAVY = SGD(0.05, momentum=0.9)


@pytest.fixture(scope="module")
def held() -> FederatedData:
    """Four clients with validation data, of unequal size; the third has one validation example
    only.
    """
    rng = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, 8, generator=rng) for n in (40, 23, 8, 31)]
    rule = torch.randn(8, 3, generator=rng)
    ys = [(x @ (rule + 0.5 * torch.randn(8, 3, generator=rng))).argmax(-1) for x in xs]
    test = [torch.randn(9, 8, generator=rng) for _ in xs]
    return bf.data.from_arrays(
        xs, ys, test=(test, [torch.zeros(9).long() for _ in xs]), outputs=3, validation=0.2
    )


def trained(
    clients: FederatedData,
    model: nn.Module,
    predictor: Any,
    engine: bf.Engine | None = None,
    epochs: int = 2,
    **options: Any,
):
    algorithm = replace(
        bf.algorithms.fedper(model, epochs=epochs, batch_size=10, optimiser=HEAVY),
        predictor=predictor,
    )
    options = {
        "rounds": 2,
        "dtype": torch.float64,
        "evaluate_every": None,
        "progress": False,
        **options,
    }
    return bf.simulate(
        algorithm, clients, engine=engine or bf.Engine(chunk=2, workers=1), **options
    )


def probs(predictions: Predictions) -> Tensor:
    assert predictions.probs is not None
    return predictions.probs


def by_hand(
    result: Any, j: int, precision: float | Tensor, structure: Any = "full", **rule: Any
) -> Laplace:
    """Client j's approximation, from its weights and its training data."""
    network = bf.models.mlp(8, hidden=16, outputs=3).double()
    algorithm = result.algorithm
    leaves = algorithm.layout("body").leaves(result.server["body"]["loc"]) | algorithm.layout(
        "head"
    ).leaves(result.private["head"]["loc"][j])
    with torch.no_grad():
        for name, leaf in leaves.items():
            network.get_parameter(name).copy_(leaf)
    return Laplace.fit(
        network,
        result.data.train.client(j)[0].double(),
        precision=precision,
        structure=structure,
        pattern="body.*",
        **rule,
    )


class Scripted:
    """A predictor whose probability of class 0, the only label here, is given for every client size
    and candidate; it keeps the noise.
    """

    tunes, grid = "strength", (0.5, 1.0, 2.0)

    def check(self, algorithm: Any) -> None:
        pass

    def __init__(self, table: dict[int, tuple[float, float]]) -> None:
        self.table, self.noise, self.broken, self.nan = table, {}, set(), set()

    def __call__(self, algorithm: Any, given: Any, view: Any, data: Any) -> Any:
        def fitted(
            x: Tensor, *, value: Any = None, noise: Tensor | None = None, plain: bool = False
        ) -> dict[str, Tensor]:
            if isinstance(value, tuple):
                found = [fitted(x, value=one, noise=noise) for one in value]
                return {k: torch.stack([one[k] for one in found]) for k in found[0]}
            if noise is not None:
                self.noise[int(view["n"])] = noise
            probs = dict(zip(self.grid, (0.01, *self.table[int(view["n"])]), strict=True))
            p = torch.full((len(x), 1), probs[value or 1.0], dtype=torch.float64)
            return {
                "probs": torch.cat([p, (1 - p) / 2, (1 - p) / 2], -1),
                "epistemic": torch.zeros(len(x)),
            }

        return fitted


@pytest.fixture(scope="module")
def two() -> FederatedData:
    """Two clients: 30 examples and 20 for validation, 6 and 4."""
    xs = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (50, 10)]
    ys = [torch.zeros(n).long() for n in (50, 10)]
    return bf.data.from_arrays(
        xs,
        ys,
        test=([x[:5] for x in xs], [y[:5] for y in ys]),
        outputs=3,
        task="classification",
        validation=0.4,
    )


@pytest.mark.parametrize(
    ("structure", "link"), [("full", "contrasts"), ("diagonal", "contrasts"), ("full", "per_class")]
)
def test_any_method_takes_one(held: FederatedData, model: nn.Module, structure: Any, link: Any):
    """FedPer with a Laplace body: every client's predictions are those of `Laplace` at its own
    weights, under the same link.
    """
    result = trained(held, model, LinearisedLaplace(structure=structure, link=link, precision=2.0))
    found = result.predict()
    for j in range(held.clients):
        expected = by_hand(result, j, 2.0, structure).predict(
            held.test.client(j)[0].double(), link=link
        )
        assert_close(probs(found.client(j)), expected["probs"], atol=1e-9, rtol=0)
        assert_close(
            found.client(j).epistemic, expected["epistemic"], atol=1e-9, rtol=0, equal_nan=True
        )
    assert bool(found.epistemic[found.mask].isnan().all()) == (link == "per_class")


def test_the_precision_may_be_what_the_server_has_learnt(held: FederatedData, model: nn.Module):
    """A function of what the client received and of its view, with one number for each weight;
    nothing is tuned then.
    """

    def learnt(given: Any, view: Any) -> Tensor:
        return given["body"]["loc"].abs() + 0.5

    result = trained(held, model, LinearisedLaplace(precision=learnt))
    assert result.tuned is None
    own, x = learnt(result.server, {}), held.test.client(1)[0].double()
    expected = by_hand(result, 1, own).predict(x)["probs"]
    found = [probs(result.predict().client(1)), probs(result.client(1).predict(x))]
    assert_close(found, [expected, expected], atol=1e-9, rtol=0)
    assert (expected - by_hand(result, 1, 1.0).predict(x)["probs"]).abs().max() > 1e-4


def test_draws_are_a_link(held: FederatedData, model: nn.Module):
    """The number of draws is the method's; the precision is chosen by the same draws for each
    candidate.
    """
    method = replace(
        bf.algorithms.fedper(model, epochs=20, batch_size=10, optimiser=HEAVY),
        predictor=LinearisedLaplace(link="draws"),
        draws=30,
    )
    result = bf.simulate(
        method, held, rounds=2, dtype=torch.float64, evaluate_every=None, progress=False
    )
    assert_close(probs(result.predict()), probs(result.predict(draws=30)))
    losses = torch.zeros(len(PRECISIONS), 0, dtype=torch.float64)
    for j in range(held.clients):
        x, y = held.validation.client(j)
        rng = generator(
            result.settings.seed, Purpose.PREDICT, round=2, client=j, index=len(method.blocks)
        )
        noise = (
            torch.from_numpy(rng.standard_normal((len(x), 30, 3), np.float32))
            .double()
            .transpose(0, 1)
        )
        found = [
            nll_of_predictive(by_hand(result, j, value).predict(x.double(), noise=noise), y)
            for value in PRECISIONS
        ]
        losses = torch.cat([losses, torch.stack(found)], 1)
    assert (
        result.tuned == PRECISIONS[largest_alike(losses.sum(1), losses @ losses.T, losses.shape[1])]
    )
    local, ids = result.local(held.to(dtype=torch.float64).splits), np.arange(held.clients)
    done = local.finetuned(ids, result.state.received(method, ids), result.round)
    asked = tuning.candidates(
        local, done, held.validation.to(dtype=torch.float64), round=result.round
    )
    sums = {name: t.sum(0) for name, t in tuning.Tuning(method.predictor).answer({}, asked).items()}
    wanted = [losses.sum(1), losses @ losses.T]
    assert_close([sums["nll"], sums["products"]], wanted, atol=1e-6, rtol=1e-6)


def test_the_number_is_chosen_on_all_validation_data(held: FederatedData, model: nn.Module):
    """The largest candidate within a standard error of the least sum over clients; adapted clients
    and saved runs keep it.
    """
    result = trained(held, model, LinearisedLaplace(), epochs=40)
    found = []
    for j in range(held.clients):
        x, y = held.validation.client(j)
        found.append(
            torch.stack(
                [
                    nll_of_predictive(by_hand(result, j, value).predict(x.double()), y)
                    for value in PRECISIONS
                ]
            )
        )
    assert_close(torch.tensor(PRECISIONS), torch.logspace(-4, 4, 9), rtol=1e-6, atol=0)
    losses = torch.cat(found, 1)
    apart = losses - losses[losses.sum(1).argmin()]
    alike = apart.mean(1) <= apart.std(1) / apart.shape[1] ** 0.5
    assert result.tuned == PRECISIONS[int(alike.nonzero().max())]
    assert int(losses.sum(1).argmin()) < len(PRECISIONS) - 1
    fixed = trained(held, model, LinearisedLaplace(precision=result.tuned), epochs=40)
    assert fixed.tuned == result.tuned
    assert_close(probs(result.predict()), probs(fixed.predict()), equal_nan=True)


@pytest.mark.parametrize("selection", ["wasserstein", "curved_wasserstein"])
def test_candidates_of_a_subnetwork_are_each_as_alone(
    held: FederatedData, model: nn.Module, selection: str
):
    """Under every precision the losses are those of `Laplace` with the weights chosen there."""
    rule = LinearisedLaplace(structure="subnetwork", share=0.2, selection=selection)
    result = trained(held, model, rule)
    double, ids = held.to(dtype=torch.float64), np.arange(held.clients)
    local = result.local(double.splits)
    done = local.finetuned(ids, result.state.received(result.algorithm, ids), result.round)
    asked = tuning.candidates(local, done, double.validation, round=result.round)
    new, y = double.validation.client(1)
    for k, value in enumerate(PRECISIONS):
        alone = by_hand(result, 1, value, "subnetwork", share=0.2, selection=selection)
        expected = alone.predict(new)
        losses = asked.losses[1][:, k]
        assert_close(losses, nll_of_predictive(expected, y), rtol=1e-9, atol=1e-12)


def test_new_clients_take_the_federations_number(
    held: FederatedData, model: nn.Module, clients: FederatedData, tmp_path: Any
):
    """They need no validation data of their own."""
    result = trained(held, model, LinearisedLaplace())
    adapted = result.adapt(clients)
    assert probs(adapted.predict()).shape == (7, 6, 3)
    adapted.save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", result.algorithm, clients)
    assert adapted.tuned == loaded.tuned == result.tuned


def test_a_number_is_of_the_predictor_that_it_was_chosen_for(
    held: FederatedData, model: nn.Module, tmp_path: Any
):
    """A saved run, predicted in another way, takes the precision that is given, or chooses anew; so
    do clients that joined.
    """
    result = trained(held, model, LinearisedLaplace())
    assert result.tuned is not None
    result.save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", result.algorithm, held)
    assert loaded.after
    given = replace(loaded.algorithm, predictor=LinearisedLaplace(precision=1e-3))
    bare = bf.load(tmp_path / "run", result.algorithm)  # no data are needed
    assert [replace(one, algorithm=given).tuned for one in (loaded, result.adapt(held), bare)] == [
        1e-3
    ] * 3
    for other in (
        {"predictor": LinearisedLaplace(link="per_class")},
        {"finetune": result.algorithm.phases},  # after which another number may fit
    ):
        anew = replace(loaded.algorithm, **other)
        assert replace(loaded, algorithm=anew).tuned == replace(result, algorithm=anew).tuned
    learnt = replace(
        loaded.algorithm, predictor=LinearisedLaplace(precision=lambda given, view: 2.0)
    )
    assert replace(bare, algorithm=learnt).tuned is None
    replace(loaded, algorithm=given).save(tmp_path / "other")
    assert bf.load(tmp_path / "other", given, held).tuned == 1e-3


def test_draws(held: FederatedData, model: nn.Module):
    """Epistemic and aleatoric parts add up to the entropy; many draws come near the probit; none is
    the plug-in; equal for any chunk.
    """
    result = trained(held, model, LinearisedLaplace(precision=5.0))
    found, closed = result.predict(draws=3000), result.predict()
    assert_close(
        found.aleatoric + found.epistemic, torch.special.entr(probs(found)).sum(-1), equal_nan=True
    )
    inside = found.mask
    assert bool(((found.epistemic > 0) & (found.aleatoric > 0))[inside].all())
    assert_close(probs(found)[inside], probs(closed)[inside], atol=0.06, rtol=0)
    plain = replace(result, algorithm=replace(result.algorithm, predictor=None)).predict(draws=0)
    assert_close(probs(result.predict(draws=0)), probs(plain), atol=0, rtol=0, equal_nan=True)
    assert float((probs(plain) - probs(closed))[inside].abs().max()) > 1e-3
    other = trained(
        held, model, LinearisedLaplace(precision=5.0), bf.Engine(chunk=3, workers=2)
    ).predict(draws=50)
    assert_close(probs(other), probs(result.predict(draws=50)), atol=1e-9, rtol=0, equal_nan=True)


def test_evaluation_takes_the_predictor(held: FederatedData, model: nn.Module):
    """The history's personal columns are those of the predictions, the number chosen anew at every
    evaluation.
    """
    result = trained(held, model, LinearisedLaplace(), evaluate_every=1)
    assert result.history["personal_nll"][-1] == pytest.approx(
        result.predict().summary(held.test)["nll"], abs=1e-9
    )


def test_a_precision_that_is_a_function(held: FederatedData, model: nn.Module):
    """It may return a number, or a tensor; nothing is chosen then."""
    fixed = probs(trained(held, model, LinearisedLaplace(precision=3.0)).predict())
    for precision in (lambda given, view: 3.0, lambda given, view: torch.tensor(3.0)):
        result = trained(held, model, LinearisedLaplace(precision=precision))
        assert result.tuned is None
        assert_close(probs(result.predict()), fixed, atol=1e-12, rtol=0, equal_nan=True)


def test_regression_and_two_classes():
    """Exact moments for targets, with noise; one logit for two classes."""
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 3, generator=rng) for n in (12, 7)]
    for likelihood, ys, outputs in (
        (Gaussian(0.5), [x.sum(-1) for x in xs], 1),
        (Bernoulli(), [(x.sum(-1) > 0).long() for x in xs], 2),
    ):
        task = likelihood.task
        data = bf.data.from_arrays(xs, ys, test=(xs, ys), outputs=outputs, task=task)  # pyright: ignore[reportArgumentType]
        method = bf.algorithms.fedsi_full(
            bf.models.mlp(3, hidden=4, outputs=1), predictive_precision=1.0, likelihood=likelihood
        )
        found = bf.simulate(method, data, rounds=1, progress=False).predict(draws=5).client(1)
        if found.probs is not None:
            assert_close(probs(found).sum(-1), torch.ones(7))
        else:
            own = [found.variance[:, 0] - found.epistemic, found.aleatoric]
            assert_close(own, [torch.full((7,), 0.25)] * 2)


def test_uncentred_is_the_papers(held: FederatedData, model: nn.Module):
    """`centre=False` keeps what is common to all logits, as `Laplace` does; they differ."""
    result, centred = (
        trained(held, model, LinearisedLaplace(precision=2.0, link="per_class", centre=centre))
        for centre in (False, True)
    )
    expected = by_hand(result, 1, 2.0).predict(
        held.test.client(1)[0].double(), link="per_class", centre=False
    )["probs"]
    assert_close(probs(result.predict().client(1)), expected, atol=1e-9, rtol=0)
    assert float((probs(centred.predict().client(1)) - expected).abs().max()) > 1e-4


def test_the_seed_of_a_selection(held: FederatedData, model: nn.Module):
    """Another seed, other random weights, other predictions; in pieces or at once, the same."""
    one, other = (
        probs(
            trained(
                held,
                model,
                LinearisedLaplace(
                    structure="subnetwork", selection="random", seed=s, precision=0.5
                ),
            ).predict()
        )
        for s in (0, 5)
    )
    assert float((one - other).nan_to_num().abs().max()) > 1e-4


def test_pieces_change_nothing(
    held: FederatedData, model: nn.Module, monkeypatch: pytest.MonkeyPatch
):
    """Neither the closed form nor the draws, however few rows are looked at together."""
    result = trained(held, model, LinearisedLaplace(precision=2.0))
    whole = [probs(result.predict(draws=d)) for d in (None, 9)]
    monkeypatch.setattr(predict, "GATHER", 3 * 8 * 8)
    for before, draws in zip(whole, (None, 9), strict=True):
        assert_close(probs(result.predict(draws=draws)), before, atol=1e-9, rtol=0, equal_nan=True)


@pytest.mark.slow
def test_every_method_takes_one(clients: FederatedData, model: nn.Module):
    """Whatever its parts are called."""
    for case in CASES:
        algorithm = case(model)
        if algorithm.copies(algorithm.parts):
            continue
        algorithm = replace(algorithm, predictor=LinearisedLaplace(precision=3.0))
        result = bf.simulate(
            algorithm,
            clients,
            rounds=1,
            evaluate_every=None,
            progress=False,
            engine=bf.Engine(workers=1),
        )
        assert bool(probs(result.predict())[result.predict().mask].isfinite().all()), case.name


def test_of_candidates_alike_the_largest_is_taken(two: FederatedData, model: nn.Module):
    """A difference that is no larger than its standard error says nothing, a sure one does; a
    choice at an edge is told.
    """
    with pytest.warns(UserWarning, match=r"strength .*upper edge.* 2"):
        assert trained(two, model, Scripted({30: (0.9, 0.85), 6: (0.5, 0.6)})).tuned == 2.0
    assert trained(two, model, Scripted({30: (0.9, 0.8999), 6: (0.9, 0.8999)})).tuned == 1.0
    with pytest.warns(UserWarning, match=r"strength .*lower edge.* 0\.5"):
        assert trained(two, model, Scripted({30: (0.001, 0.001), 6: (0.001, 0.001)})).tuned == 0.5


def test_what_is_not_finite_is_passed_over(two: FederatedData, model: nn.Module):
    """A candidate without Cholesky factor, or with NaN, is not chosen; where all are such, that is
    said.
    """

    class Failing(Scripted):
        def __call__(self, algorithm: Any, given: Any, view: Any, data: Any) -> Any:
            inner = super().__call__(algorithm, given, view, data)

            def fitted(x: Tensor, *, value: Any = None, **more: Any) -> dict[str, Tensor]:
                if self.broken:
                    raise torch.linalg.LinAlgError("no factor")
                found = inner(x, value=value, **more)
                for place, one in enumerate(value):
                    found["probs"][place] *= torch.nan if one in self.nan else 1.0
                return found

            return fitted

    table = {30: (0.5, 0.9), 6: (0.5, 0.9)}
    predictor = Failing(table)
    predictor.nan = {0.5, 2.0}
    assert trained(two, model, predictor).tuned == 1.0
    predictor.broken = {0.5, 1.0, 2.0}
    with pytest.raises(ValueError, match="no candidate gives finite predictions"):
        _ = trained(two, model, predictor).tuned


def test_without_validation_data(clients: FederatedData, model: nn.Module):
    """Refused before training where it will be measured, and as it predicts; a number, or no closed
    form, needs none.
    """
    with pytest.raises(ValueError, match=r"predictive_precision .*validation=0.1"):
        trained(clients, model, LinearisedLaplace(), evaluate_every=1)
    result = trained(clients, model, LinearisedLaplace())
    with pytest.raises(ValueError, match=r"predictive_precision .*validation=0.1"):
        result.predict()
    assert probs(result.predict(draws=0)).shape[0] == 7


@pytest.mark.filterwarnings("error")
def test_a_precision_that_ruins_predictions_is_named(held: FederatedData, model: nn.Module):
    """The paper's training precision in a prediction: the median kappa is far below .3; a good one
    is silent.
    """
    with pytest.warns(
        UserWarning, match=r"predictive_precision=0\.0001 .*predictive_precision=None"
    ):
        trained(held, model, LinearisedLaplace(precision=1e-4)).predict()
    trained(held, model, LinearisedLaplace(precision=10.0)).predict()


def test_an_empty_client(held: FederatedData, model: nn.Module):
    """A client without rows in a split has none in its predictions."""
    result = trained(held, model, LinearisedLaplace(precision=1.0))
    split = replace(held.test, index=held.test.index[9:], counts=held.test.counts * [0, 1, 1, 1])
    found = result.predict(split)
    assert found.mask.sum(1).tolist() == [0, 9, 9, 9]
    assert_close(probs(found)[1:], probs(result.predict())[1:])


def test_a_rule_sees_the_predictions_prior(held: FederatedData, model: nn.Module):
    """The variance that a selection reads is that of the precision at hand, 1 / precision, at every
    candidate.
    """
    seen: list[float] = []

    def rule(evidence: Evidence) -> Tensor:
        seen.append(float(evidence.variance.unique()))
        return evidence.curvature

    result = trained(
        held, model, LinearisedLaplace(structure="subnetwork", selection=rule, share=0.3)
    )
    assert result.tuned in PRECISIONS
    assert seen == pytest.approx([1 / value for value in PRECISIONS] * held.clients)


def test_every_validation_example_counts_alike(two: FederatedData, model: nn.Module):
    """Twenty that are a little better off by the second candidate outweigh four that are much
    better off by the first.
    """
    assert trained(two, model, Scripted({30: (0.5, 0.6), 6: (0.9, 0.5)})).tuned == 2.0
    assert trained(two, model, Scripted({30: (0.5, 0.52), 6: (0.9, 0.5)})).tuned == 1.0


def test_clients_draw_for_themselves(two: FederatedData, model: nn.Module):
    """Noise [S, N, O] differs from client to client, and a split read by itself gets the noise that
    it gets beside others.
    """
    predictor = Scripted({30: (0.5, 0.5), 6: (0.5, 0.5)})
    trained(two, model, predictor).predict(draws=7)
    first = dict(predictor.noise)
    assert first[30].shape == (7, 5, 3)
    assert not torch.equal(first[30], first[6])
    trained(two, model, predictor, bf.Engine(chunk=1, workers=2)).predict(draws=7)
    assert_close(predictor.noise, first, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (bf.algorithms.fedavg, {"share": 0.3}, r"share .*structure='full'"),
        (
            bf.algorithms.fedavg,
            {"structure": "diagonal", "selection": "random"},
            r"selection .*structure='diagonal'",
        ),
        (bf.algorithms.fedavg, {"seed": 4}, r"seed .*structure='full'"),
        (bf.algorithms.fedavg, {"block": "body"}, r"block 'body' .*\('w',\)"),
        (bf.algorithms.fedper, {"link": "draws"}, r"link='draws' .*draws=100"),
    ],
)
def test_what_is_refused_as_it_is_composed(make: Any, options: Any, words: str, model: nn.Module):
    """What chooses a subnetwork where there is none, a block that is no part, and draws without
    their number.
    """
    with pytest.raises(ValueError, match=words):
        replace(make(model), predictor=LinearisedLaplace(**options))
