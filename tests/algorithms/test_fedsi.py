"""FedSI against algebra: conditional posteriors of linear-Gaussian clients, centralised Laplace,
every aggregation rule by hand.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.models import SplitModel
from bayesfl.optim import SGD, Adam
from bayesfl.posteriors import Laplace
from bayesfl.posteriors.selection import Evidence, select
from tests.algorithms.made import twin
from tests.cases import keeping, run

DIM, NOISE, ALPHA = 4, 0.5, 2.0
COUNTS = (9, 14, 6)


@pytest.fixture(scope="module")
def regressions() -> FederatedData:
    """Linear regressions whose weights differ between clients."""
    rng = torch.Generator().manual_seed(5)
    xs = [torch.randn(n, DIM, generator=rng) for n in COUNTS]
    ys = [
        x @ torch.randn(DIM, generator=rng) + NOISE * torch.randn(len(x), generator=rng) for x in xs
    ]
    return bf.data.from_arrays(xs, ys, test=([x + 1 for x in xs], [y + 1 for y in ys]))


START = torch.tensor([0.1, -0.2, 0.3, 0.05])


def linear() -> SplitModel:
    """A linear body of one output under a head that only multiplies by 1.5."""
    body, head = nn.Linear(DIM, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        body.weight.copy_(START[None])
        head.weight.fill_(1.5)
    return SplitModel(body, head)


EXACT: dict[str, Any] = {
    "steps": 3000,
    "batch_size": None,
    "optimiser": SGD(0.03),
    "prior_precision": 1 / ALPHA,
    "predictive_precision": 1.0,
    "likelihood": Gaussian(NOISE),
    "finetune_steps": 1,
    "finetune_optimiser": Adam(0.0),
}


def posterior(data: FederatedData, j: int, mean: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and precision of client j's exact posterior under N(mean, diag g); the head makes the
    inputs 1.5 x.
    """
    x, y = data.train.client(j)
    x = 1.5 * x.double()
    precision = x.T @ x / NOISE**2 + torch.diag(1 / g)
    return torch.linalg.solve(precision, x.T @ y.double() / NOISE**2 + mean / g), precision


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_linear_client_sends_the_exact_conditional_posterior(
    regressions: FederatedData, share: float
):
    """The mean is the ridge solution; sigma on S is that of S given the rest, (H_SS)^-1, and S has
    the largest 1 / H_rr. Two rounds.
    """
    one = regressions.select([1])
    algorithm = bf.algorithms.fedsi(linear(), share=share, **EXACT)
    mean, g = START.double(), torch.full((DIM,), ALPHA, dtype=torch.float64)
    for rounds in (1, 2):
        result = run(keeping(algorithm), one, rounds)
        mean, precision = posterior(one, 0, mean, g)
        chosen = (
            (1 / precision.diagonal()).argsort(descending=True)[: int(share * DIM)].sort().values
        )
        std = torch.zeros(DIM, dtype=torch.float64)
        std[chosen] = precision[chosen][:, chosen].inverse().diagonal().sqrt()
        assert_close(result.server["body"]["loc"], mean, atol=1e-9, rtol=0)
        assert_close(result.private["std"][0], std, atol=1e-9, rtol=0)
        g = torch.where(std > 0, std.square(), ALPHA)
        assert_close(result.server["g"], g, atol=1e-9, rtol=0)


@pytest.mark.slow
def test_fac_keeps_every_weight_on_its_own(regressions: FederatedData):
    """sigma_r = H_rr^(-1/2) for all weights: FedSI with all of them where inputs are orthogonal,
    and larger than nothing else.
    """
    result = run(keeping(bf.algorithms.fedsi_fac(linear(), **EXACT)), regressions)
    start, g = START.double(), torch.full((DIM,), ALPHA, dtype=torch.float64)
    for j in range(len(COUNTS)):
        assert_close(
            result.private["std"][j],
            posterior(regressions, j, start, g)[1].diagonal().rsqrt(),
            atol=1e-9,
            rtol=0,
        )
    mean, one = result.server["body"]["loc"], torch.ones(DIM, dtype=torch.float64)
    for j in range(len(COUNTS)):
        x = 1.5 * regressions.test.client(j)[0].double()
        found: Any = result.predict().client(j)
        expected = x.square() @ (1 / posterior(regressions, j, mean, one)[1].diagonal()) + NOISE**2
        assert_close(found.variance[:, 0], expected, atol=1e-9, rtol=0)
    orthogonal = bf.data.from_arrays(
        [2 * torch.eye(DIM)], [torch.ones(DIM)], outputs=1, task="regression"
    )
    fac, all_of_them = (
        run(keeping(algorithm), orthogonal)
        for algorithm in (
            bf.algorithms.fedsi_fac(linear(), **EXACT),
            bf.algorithms.fedsi(linear(), share=1.0, **EXACT),
        )
    )
    assert_close(fac.server["g"], all_of_them.server["g"], atol=1e-12, rtol=0)


def test_one_client_and_one_round_is_centralised_subnetwork_laplace(
    model: nn.Module, clients: FederatedData
):
    """On a classifier: the same subnetwork, the same variances, and after fine-tuning the same
    predictions, by `Laplace` alone.
    """
    one = clients.select([0])
    options: dict[str, Any] = {
        "share": 0.3,
        "epochs": 5,
        "batch_size": 10,
        "prior_precision": 0.5,
        "predictive_precision": 3.0,
        "finetune_steps": 7,
    }
    algorithm = bf.algorithms.fedsi(model, **options)
    result = run(keeping(algorithm), one)
    x = one.train.client(0)[0].double()
    network = twin(model)
    layout = algorithm.layout("body")

    def at(body: Tensor, head: Tensor | None = None) -> nn.Module:
        with torch.no_grad():
            leaves = layout.leaves(body) | (
                algorithm.layout("head").leaves(head) if head is not None else {}
            )
            for name, leaf in leaves.items():
                network.get_parameter(name).copy_(leaf)
        return network

    def subnetwork(precision: float) -> Laplace:
        whole = Laplace.fit(network, x, precision=precision, structure="diagonal", pattern="body.*")
        chosen = select(
            "wasserstein",
            Evidence(whole.loc, whole.diagonal, 1 / whole.precision),
            int(0.3 * layout.size),
        )
        return Laplace.fit(
            network,
            x,
            precision=precision,
            structure="subnetwork",
            indices=chosen,
            pattern="body.*",
        )

    at(result.server["body"]["loc"])
    assert_close(
        result.private["std"][0].square(), subnetwork(0.5).moments()[1], atol=1e-12, rtol=1e-9
    )
    head = fine_tuned_head(algorithm, result, one)
    at(result.server["body"]["loc"], head)
    expected = subnetwork(3.0).predict(one.test.client(0)[0].double(), link="per_class")["probs"]
    assert_close(result.predict().client(0).probs, expected, atol=1e-9, rtol=0)
    with torch.no_grad():
        plain = network(one.test.client(0)[0].double()).softmax(-1)
    assert_close(result.predict(draws=0).client(0).probs, plain, atol=1e-9, rtol=0)
    assert float((plain - expected).abs().max()) > 1e-3
    other = replace(result, algorithm=bf.algorithms.fedsi(model, link="contrasts", **options))
    contrasts = subnetwork(3.0).predict(one.test.client(0)[0].double())["probs"]
    assert_close(other.predict().client(0).probs, contrasts, atol=1e-9, rtol=0)
    assert float((contrasts - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("structure", ["subnetwork", "diagonal"])
def test_the_papers_literal_reading_predicts_with_the_servers_variances(
    model: nn.Module, clients: FederatedData, structure: Any
):
    """Step 4 of its algorithm 1: H = GGN + diag(1 / g), the same g for the choice of the
    subnetwork; no validation data are needed.
    """
    share = {"share": 0.3} if structure == "subnetwork" else {}
    algorithm = bf.algorithms.fedsi(
        model,
        structure=structure,
        prior="global",
        centre=False,
        prior_precision=2.0,
        epochs=2,
        finetune_steps=3,
        **share,
    )
    result = run(algorithm, clients)
    assert result.tuned is None
    g = result.server["g"].double()
    assert len(g.unique()) > 3
    x, _ = clients.train.client(2)
    network = twin(model)
    network.load_state_dict(result.client(2).model().state_dict())
    fit = partial(Laplace.fit, network, x.double(), precision=1 / g, pattern="body.*")
    whole = fit(structure="diagonal")
    if structure == "subnetwork":
        chosen = select("wasserstein", Evidence(whole.loc, whole.diagonal, g), int(0.3 * len(g)))
        whole = fit(structure="subnetwork", indices=chosen)
    new = clients.test.client(2)[0].double()
    expected = whole.predict(new, link="per_class", centre=False)["probs"]
    assert_close(result.predict().client(2).probs, expected, atol=1e-9, rtol=0)


def test_only_a_link_of_draws_draws(model: nn.Module):
    """And of regressions none."""
    assert bf.algorithms.fedsi(model, link="draws").draws == 100
    single = bf.models.mlp(8, hidden=4, outputs=1)
    assert bf.algorithms.fedsi(single, likelihood=Gaussian()).draws == 0


def fine_tuned_head(algorithm: bf.Algorithm, result: Any, data: FederatedData) -> Tensor:
    """The head as a client has it when it predicts: one that keeps its view is asked."""
    seen: list[Tensor] = []

    class Watch:
        tunes, grid = "", ()

        def check(self, algorithm: Any) -> None:
            pass

        def __call__(self, algorithm: Any, given: Any, view: Any, data: Any) -> Any:
            seen.append(view["head"]["loc"].clone())
            assert not torch.equal(view["head"]["loc"], given["head"]["loc"])
            return lambda x, value=None, noise=None, plain=False: {
                "probs": x[:, :3].softmax(-1),
                "epistemic": x[:, 0],
            }

    replace(result, algorithm=replace(algorithm, predictor=Watch())).predict()
    return seen[0]


STDS = torch.tensor([[0.0, 1.0, 0.5, 0.0, 3.0], [0.0, 0.0, 0.1, 1e-6, 3.0]], dtype=torch.float64)
LOCS = torch.tensor([[0.0, 1.0, 2.0, 0.0, 1.0], [4.0, 3.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
RULES = {
    "mean_std": [2.0, 0.25, 0.09, 1e-8, 2.0],
    "mean_var": [2.0, 0.5, 0.13, 1e-8, 2.0],
    "mean_over_selecting": [2.0, 1.0, 0.09, 1e-8, 2.0],
    "moment_match": [2.0, 1.5, 1.13, 1e-8, 2.0],
    "product": [2.0, 1.0, 1 / 104, 1e-8, 2.0],
}


@pytest.mark.parametrize("rule", RULES)
def test_aggregation_by_hand(regressions: FederatedData, rule: Any):
    """Never selected: alpha, whatever the means. By one of two, by both, below the floor, above the
    cap (alpha).
    """
    algorithm = bf.algorithms.fedsi(
        SplitModel(nn.Linear(5, 1, bias=False), nn.Linear(1, 1)), aggregation=rule, **EXACT
    )
    server = algorithm.init(2, dtype=torch.float64)
    uplink = {
        "std": STDS,
        "body": {"loc": LOCS},
        "uncurved": torch.tensor([0.25, 0.75], dtype=torch.float64),
        "round": 0,
    }
    new = algorithm.combine(server, torch.arange(2), uplink)
    assert_close(new["g"], torch.tensor(RULES[rule], dtype=torch.float64), atol=1e-12, rtol=1e-9)
    assert_close(new["uncurved_share"], torch.tensor(0.5, dtype=torch.float64))


def test_the_product_weighs_means_by_precision():
    """Among those that selected a weight; the plain mean where nobody did, and everywhere for the
    other rules.
    """
    model = SplitModel(nn.Linear(5, 1, bias=False), nn.Linear(1, 1))
    uplink = {"std": STDS, "body": {"loc": LOCS}, "uncurved": torch.zeros(2), "round": 0}
    for rule, third in (("product", 2 * 4 / 104), ("moment_match", 1.0)):
        algorithm = bf.algorithms.fedsi(model, aggregation=rule, **EXACT)  # pyright: ignore[reportArgumentType]
        server = algorithm.init(2, dtype=torch.float64)
        loc = algorithm.combine(server, torch.arange(2), uplink)["body"]["loc"]
        second = 1.0 if rule == "product" else 2.0
        assert_close(
            loc,
            torch.tensor([2.0, second, third, 0.0, 1.0], dtype=torch.float64),
            atol=1e-12,
            rtol=0,
        )


def test_curvature_every_other_round(regressions: FederatedData):
    """Between fits g stays, whoever is in the cohort, and the means move on."""
    algorithm = bf.algorithms.fedsi(linear(), share=0.5, curvature_every=2, **{**EXACT, "steps": 3})
    one, two, three = (
        run(keeping(algorithm), regressions, rounds, participation=0.67, seed=3)
        for rounds in (1, 2, 3)
    )
    assert set(one.settings.cohort(3, 0)) != set(one.settings.cohort(3, 1))
    assert torch.equal(one.server["g"], two.server["g"])
    assert not torch.equal(one.server["body"]["loc"], two.server["body"]["loc"])
    assert not torch.equal(two.server["g"], three.server["g"])


def test_random_subnetworks_are_one_for_all(model: nn.Module, clients: FederatedData):
    """Equal seeds choose equal weights on every client and in every round, so that indices need not
    travel; another seed others.
    """
    options: dict[str, Any] = {
        "share": 0.2,
        "selection": "random",
        "epochs": 1,
        "predictive_precision": 1.0,
    }
    chosen = [
        run(keeping(bf.algorithms.fedsi(model, seed=seed, **options)), clients, rounds).private[
            "std"
        ]
        > 0
        for seed, rounds in ((0, 1), (0, 2), (1, 1))
    ]
    assert bool((chosen[0] == chosen[0][0]).all())
    assert int(chosen[0][0].sum()) == int(0.2 * chosen[0].shape[1])
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def test_the_whole_body_trains_under_one_variance(regressions: FederatedData):
    """Its mean is the average of ridge solutions under N(mu, alpha), its predictions those of the
    full Laplace approximation at it.
    """
    result = run(keeping(bf.algorithms.fedsi_full(linear(), **EXACT)), regressions)
    start, g = START.double(), torch.full((DIM,), ALPHA, dtype=torch.float64)
    mean = torch.stack([posterior(regressions, j, start, g)[0] for j in range(len(COUNTS))]).mean(0)
    assert_close(result.server["body"]["loc"], mean, atol=1e-9, rtol=0)
    found = result.predict()
    for j in range(len(COUNTS)):
        precision = posterior(regressions, j, mean, torch.ones(DIM, dtype=torch.float64))[1]
        x = 1.5 * regressions.test.client(j)[0].double()
        variance = (x @ precision.inverse() * x).sum(-1) + NOISE**2
        assert_close(found.client(j).variance[:, 0], variance, atol=1e-9, rtol=0)  # pyright: ignore[reportOptionalSubscript]
        assert_close(found.client(j).mean[:, 0], x @ mean, atol=1e-9, rtol=0)  # pyright: ignore[reportOptionalSubscript]


def test_the_product_weighs_clients_that_have_fitted(model: nn.Module, clients: FederatedData):
    """A round without fits reports 0, as where nobody selected a weight."""
    algorithm = bf.algorithms.fedsi(
        model,
        aggregation="product",
        curvature_every=2,
        share=0.3,
        epochs=1,
        predictive_precision=1.0,
    )
    found: list[Tensor] = []

    def combine(server: Any, ids: Tensor, uplink: Any) -> Any:
        found.append(uplink["std"])
        return algorithm.combine(server, ids, uplink)

    run(replace(algorithm, combine=combine), clients, rounds=2)
    assert [bool((std > 0).any()) for std in found] == [True, False]


def test_the_share_without_curvature_is_told(model: nn.Module, clients: FederatedData):
    """Inputs that are constant 0 have weights without curvature: the server's mean of the clients'
    shares says how many were taken.
    """
    data = replace(
        clients,
        splits={
            k: replace(s, x=torch.cat([s.x[:, :6], torch.zeros_like(s.x[:, 6:])], 1))
            for k, s in clients.splits.items()
        },
    )
    result = run(
        keeping(
            bf.algorithms.fedsi(
                model, share=0.1, epochs=1, selection="random", predictive_precision=1.0
            )
        ),
        data,
    )
    layout = result.algorithm.layout("body")
    dead = torch.zeros(layout.size, dtype=torch.bool)
    layout.leaves(dead)["body.0.weight"][:, 6:] = True
    chosen = result.private["std"] > 0
    told, least = result.private["uncurved"], (chosen & dead).sum(1) / chosen.sum(1).double()
    assert bool((told >= least - 1e-12).all())  # units that a small client never lights come on top
    assert_close(told[:2], least[:2], atol=0.08, rtol=0)
    assert 0.1 < float(result.server["uncurved_share"]) == pytest.approx(float(told.mean()))


def test_heads_that_train_are_private(model: nn.Module, clients: FederatedData):
    """As in the authors' code: every client has a head of its own, moved with the body; by default
    the common one stands still.
    """
    options: dict[str, Any] = {"epochs": 2, "share": 0.3, "predictive_precision": 1.0}
    still, own = (
        run(keeping(bf.algorithms.fedsi(model, train_head=train, **options)), clients)
        for train in (False, True)
    )
    start = still.algorithm.init(7, dtype=torch.float64)["head"]["loc"]
    assert torch.equal(still.server["head"]["loc"], start)
    assert "head" not in still.private
    assert len(own.private["head"]["loc"].unique(dim=0)) == 7
    assert not any(key.startswith("head") for key in own.algorithm.uplink(own.server))
    for make in (bf.algorithms.fedsi_fac, bf.algorithms.fedsi_full):
        moved = run(
            keeping(make(model, train_head=True, epochs=2, predictive_precision=1.0)), clients
        ).private["head"]["loc"]
        assert len(moved.unique(dim=0)) == 7


@pytest.mark.filterwarnings("ignore:most of the selected weights")
def test_the_literal_prior_is_stable(model: nn.Module, clients: FederatedData):
    """alpha = 1e-4 as a variance: after a round of averaging the pull is k = 1 / (g n) in the
    thousands, and training stays finite.
    """
    algorithm = bf.algorithms.fedsi(
        model,
        prior_precision=1e4,
        predictive_precision=1e4,
        optimiser=SGD(0.1),
        share=0.1,
        epochs=3,
        batch_size=10,
    )
    result = run(keeping(algorithm), clients, rounds=4)
    assert bool((result.server["g"] < 0.99e-4).any())
    assert float(1 / result.server["g"].min() / 43) > 1000
    assert bool(result.server["body"]["loc"].isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision must lie within"),
        ({"predictive_precision": -1.0}, r"precision must be > 0 and finite, got -1\.0"),
        ({"share": 0.0}, r"^share .*\(0, 1\].* got 0\.0"),
        ({"aggregation": "median"}, r"aggregation .*'moment_match'.* got 'median'"),
        ({"curvature_every": 0}, r"curvature_every .*1.* got 0"),
        ({"steps": 0}, r"^steps .*1.* got 0"),
        ({"prior": "local"}, r"prior .*got 'local'"),
        ({"link": "probit"}, r"link .*got 'probit'"),
        (
            {"prior": "global", "predictive_precision": 2.0},
            r"predictive_precision .*prior='global'.*got 2\.0",
        ),
        ({"structure": "full", "prior": "global"}, r"prior .*structure='full'.*'global'"),
        (
            {"likelihood": Gaussian(), "link": "draws"},
            r"link has no effect under a likelihood of Gaussian, got 'draws'",
        ),
        (
            {"likelihood": Gaussian(), "centre": False},
            r"centre has no effect under a likelihood of Gaussian, got False",
        ),
    ],
)
def test_what_is_refused(model: nn.Module, options: dict[str, Any], message: str):
    """Numbers out of range; a precision beside the server's, a learnt prior where nothing is
    learnt, what only some read.
    """
    with pytest.raises(ValueError, match=message):
        bf.algorithms.fedsi(model, **options)
