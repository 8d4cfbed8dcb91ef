"""FedEM against algebra: EM's promise, one component, components that swap names, clusters."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.block import Block
from bayesfl.composition.priors import Normal, server_mean
from bayesfl.composition.topology import erdos_renyi, metropolis, ring
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField, mixture
from tests.algorithms.made import in_turn
from tests.cases import EM, run


def losses(algorithm: bf.Algorithm, components: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[M, N], each component by itself."""
    layout = algorithm.layout("components")
    return torch.stack(
        [algorithm.losses(layout.leaves(c), {"x": x.to(c), "y": y}) for c in components]
    )


def test_two_rounds_by_hand(clients: FederatedData):
    """E step q_im ~ pi_jm p(y_i | x_i, theta_m), pi_j its mean; M step by the gradient of mean_i
    q_im times the loss; the mean by size.
    """
    algorithm = bf.algorithms.fedem(
        nn.Linear(8, 3), components=2, epochs=1, batch_size=None, optimiser=SGD(0.2)
    )
    theta = algorithm.init(7, seed=2, dtype=torch.float64)["components"]["loc"]
    pi = torch.full((7, 2), 0.5, dtype=torch.float64)
    n = torch.from_numpy(clients.train.counts).double()
    for rounds in (1, 2):
        moved = []
        for j in range(7):
            x, y = clients.train.client(j)
            start = theta.clone().requires_grad_()
            table = losses(algorithm, start, x, y)
            joint = pi[j].unsqueeze(-1) * (-table.detach()).exp()
            q = joint / joint.sum(0)
            pi[j] = q.mean(1)
            (slope,) = torch.autograd.grad((q * table).mean(1).sum(), start)
            moved.append(theta - 0.2 * slope)
        theta = torch.einsum("j,jmd->md", n / n.sum(), torch.stack(moved))
        result = run(algorithm, clients, rounds)
        assert_close(result.private["pi"], pi, atol=1e-10, rtol=0)
        assert_close(result.server["components"]["loc"], theta, atol=1e-10, rtol=0)


def test_components_may_swap_names(clients: FederatedData, model: nn.Module):
    """Started in another order, components, weights and predictions come out in that order."""
    order = [2, 0, 1]
    plain = bf.algorithms.fedem(model, components=3, batch_size=10, optimiser=EM(0.1))
    starts = plain.init(7, seed=2)["components"]["loc"]
    swapped = replace(
        plain,
        blocks={"components": replace(plain.blocks["components"], start=in_turn(starts[order]))},
    )
    one, other = run(plain, clients, 3), run(swapped, clients, 3)
    assert_close(
        other.server["components"]["loc"], one.server["components"]["loc"][order], atol=1e-9, rtol=0
    )
    assert_close(other.private["pi"], one.private["pi"][:, order], atol=1e-9, rtol=0)
    assert_close(other.predict().probs, one.predict().probs, atol=1e-9, rtol=0, equal_nan=True)


def clustered(
    clusters: tuple[FederatedData, Tensor], by_responsibility: bool
) -> tuple[Tensor, Tensor]:
    """Displacement of both components in a round that starts near the rules, [2, 3], and FedAvg's
    inside each cluster.
    """
    data, rules = clusters
    model, begin = nn.Linear(3, 1, bias=False), rules + 0.1
    options: dict[str, Any] = {
        "epochs": 2,
        "batch_size": None,
        "optimiser": SGD(1e-4),
        "likelihood": Gaussian(0.1),
    }
    em = bf.algorithms.fedem(model, components=2, by_responsibility=by_responsibility, **options)
    em = replace(em, blocks={"components": replace(em.blocks["components"], start=in_turn(begin))})
    moved = run(em, data).server["components"]["loc"] - begin.double()
    inside = []
    for m in (0, 1):
        avg = replace(
            bf.algorithms.fedavg(model, **options),
            blocks={"w": Block(start=lambda rng, size, m=m: begin[m])},
        )
        inside.append(
            run(avg, data.select([2 * m, 2 * m + 1])).server["w"]["loc"] - begin[m].double()
        )
    return moved, torch.stack(inside)


def test_clusters_slow_each_other_down(clusters: tuple[FederatedData, Tensor]):
    """With one-hot responsibilities a component moves n_c / n of what FedAvg inside its cluster
    does: the others send it back unmoved.
    """
    moved, inside = clustered(clusters, by_responsibility=False)
    assert_close(moved, inside * 0.5, atol=1e-6, rtol=0)


def test_weighed_by_responsibility_it_is_clustered_fedavg(clusters: tuple[FederatedData, Tensor]):
    """Then a client to which a component means nothing does not count in its mean."""
    moved, inside = clustered(clusters, by_responsibility=True)
    assert_close(moved, inside, atol=1e-6, rtol=0)


def test_predictions_mix_probabilities(clients: FederatedData, model: nn.Module):
    """sum_m pi_m softmax of each component, not the softmax of a mean; pi from the client's own
    training data.
    """
    algorithm = bf.algorithms.fedem(model, components=3, batch_size=10, optimiser=EM(0.2))
    result = run(algorithm, clients, 2)
    x = clients.test.client(3)[0].double()
    layout, loc = algorithm.layout("components"), result.server["components"]["loc"]
    each = torch.stack([algorithm.outputs(layout.leaves(c), x).softmax(-1) for c in loc])
    assert_close(
        result.predict().client(3).probs,
        torch.einsum("m,mno->no", result.private["pi"][3], each),
        atol=1e-12,
        rtol=0,
    )
    assert_close(
        result.predict(draws=0).client(3).probs, result.predict().client(3).probs, atol=0, rtol=0
    )


def test_new_clients_fit_their_weights_alone(clients: FederatedData, model: nn.Module):
    """The weights of largest likelihood under the components as they are, which stay."""
    old, novel = clients.hold_out(2, seed=0)
    result = run(
        bf.algorithms.fedem(
            model, components=3, batch_size=10, optimiser=EM(0.3), adapt_iterations=500
        ),
        old,
        3,
    )
    adapted = result.adapt(novel)
    assert torch.equal(adapted.server["components"]["loc"], result.server["components"]["loc"])
    for j in range(2):
        table = losses(result.algorithm, result.server["components"]["loc"], *novel.train.client(j))
        best = mixture.fit_weights(
            table, torch.ones(table.shape[1], dtype=torch.float64), iterations=500
        )
        assert_close(adapted.private["pi"][j], best, atol=1e-9, rtol=0)


def test_a_gaussian_prior_holds_every_copy(clients: FederatedData, model: nn.Module):
    """Point components under a Normal prior: the kernels add its pull to each copy as the reference
    does.
    """
    plain = bf.algorithms.fedem(model, components=2, batch_size=10)
    prior = Normal(
        centre=server_mean("components"), variance=lambda given, view: view["n"][..., None, None]
    )
    tied = replace(plain, blocks={"components": replace(plain.blocks["components"], prior=prior)})
    for prox in (False, True):
        (expect, descend) = tied.phases
        algorithm = replace(tied, phases=(expect, replace(descend, prox=prox)))
        got, reference = (run(algorithm, clients, 2, k).server for k in ("layers", "reference"))
        assert_close(got, reference, atol=1e-9, rtol=0)


def test_copies_that_start_alike_are_refused(model: nn.Module):
    """They would stay alike; and a predictor must say how they predict together."""
    with pytest.raises(ValueError, match=r"block '\*'.*start=bf\.models\.anew"):
        Block(copies=2)
    with pytest.raises(ValueError, match=r"\('components',\).*predictors\.Mixture"):
        replace(bf.algorithms.fedem(model), predictor=None)


def test_two_rounds_between_neighbours_by_hand(clients: FederatedData, model: nn.Module):
    """Each client alone goes on from its own mixture; row j of an asymmetric matrix says what j
    takes from whom.
    """
    # Full batches draw nothing.
    options: dict[str, Any] = {"components": 2, "batch_size": None, "optimiser": EM(0.1)}
    shift = torch.eye(7, dtype=torch.float64).roll(1, 0)
    w = 0.5 * torch.eye(7, dtype=torch.float64) + 0.3 * shift + 0.2 * shift @ shift @ shift
    one = bf.algorithms.fedem(model, **options)
    alone = [run(one, clients.select([j])) for j in range(7)]
    models = torch.einsum(
        "jk,kmd->jmd", w, torch.stack([result.server["components"]["loc"] for result in alone])
    )
    started = [
        replace(r, server={**r.server, "components": {"loc": m}})
        for r, m in zip(alone, models, strict=True)
    ]
    further = [run(one, clients.select([j]), 2, resume=started[j]) for j in range(7)]
    wanted = torch.einsum(
        "jk,kmd->jmd", w, torch.stack([result.server["components"]["loc"] for result in further])
    )
    found = run(bf.algorithms.d_fedem(model, mixing=w, **options), clients, 2).server
    assert_close(found["components"]["each"], wanted, atol=1e-10, rtol=0)
    assert_close(found["components"]["loc"], wanted.mean(0), atol=1e-10, rtol=0)


def test_mixing_is_the_matrix_times_what_clients_made(clients: FederatedData, model: nn.Module):
    """W times the locally trained components; their mean stays; who is absent keeps its own, and
    who is present what it would have got.
    """
    w = metropolis(ring(7))
    algorithm = bf.algorithms.d_fedem(
        model, mixing=w, components=2, batch_size=10, optimiser=EM(0.1)
    )
    made: list[Tensor] = []

    def combine(server: Any, ids: Tensor, uplink: Any) -> Any:
        made.append(
            torch.zeros(7, *uplink["components"]["loc"].shape[1:], dtype=torch.float64).index_copy(
                0, ids, uplink["components"]["loc"]
            )
        )
        return algorithm.combine(server, ids, uplink)

    watched = replace(algorithm, combine=combine)
    result = run(watched, clients, 1)
    assert_close(
        result.server["components"]["each"],
        torch.einsum("jk,kmd->jmd", w, made[0]),
        atol=1e-12,
        rtol=0,
    )
    assert_close(result.server["components"]["each"].mean(0), made[0].mean(0), atol=1e-12, rtol=0)
    part = run(watched, clients, 1, participation=0.5)
    present = part.settings.cohort(7, 0)
    absent = [j for j in range(7) if j not in present]
    start = algorithm.init(7, seed=2, dtype=torch.float64)["components"]["each"]
    assert_close(part.server["components"]["each"][absent], start[absent], atol=0, rtol=0)
    assert_close(
        part.server["components"]["each"][present].sum(0),
        made[1][present].sum(0),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize("mixing", [None, metropolis(ring(7))], ids=["default", "ring"])
def test_mixing_among_a_cohort_as_with_the_whole_matrix(
    mixing: Tensor | None, clients: FederatedData, model: nn.Module, tmp_path: Path
):
    """Absent neighbours' weights are the client's own, in a [J, J] matrix that is the identity for
    the absent, in cohorts of several sizes; a saved run goes on from one to the next.
    """
    algorithm = bf.algorithms.d_fedem(
        model, mixing=mixing, components=2, batch_size=10, optimiser=EM(0.1)
    )
    w = metropolis(erdos_renyi(7)) if mixing is None else mixing
    sent: list[Tensor] = []

    def combine(server: Any, ids: Tensor, uplink: Any) -> Any:
        present = torch.zeros(7, dtype=torch.bool).index_fill(0, ids, True)
        dense = torch.where(present[:, None] & present, w, 0.0)
        dense += torch.diag(1 - dense.sum(1))
        made = sent[-1].index_copy(0, ids, uplink["components"]["loc"])
        sent.append(torch.einsum("jk,kmd->jmd", dense, made))
        return algorithm.combine(server, ids, uplink)

    sent.append(algorithm.init(7, seed=2, dtype=torch.float64)["components"]["each"])
    options: dict[str, Any] = {"participation": 0.5, "sampling": "bernoulli"}
    result = run(replace(algorithm, combine=combine), clients, 4, **options)
    found = result.server["components"]
    assert len({len(result.settings.cohort(7, t)) for t in range(4)}) > 1
    assert_close(found["each"], sent[-1], atol=1e-12, rtol=0)
    last = result.settings.cohort(7, 3)
    assert found["cohort"].tolist() == last.tolist()
    off = ~torch.eye(len(last), dtype=torch.bool)
    assert_close(found["weights"][off], w[last][:, last][off], atol=1e-15, rtol=0)
    assert_close(found["weights"].sum(1), torch.ones(len(last)).double(), atol=1e-15, rtol=0)
    run(algorithm, clients, 1, **options).save(tmp_path)
    again = run(algorithm, clients, 4, resume=tmp_path, **options).server["components"]
    assert all(torch.equal(again[key], found[key]) for key in found)


def test_a_matrix_for_others_is_refused(clients: FederatedData, model: nn.Module):
    """In the first round, with the number of clients; one that does not mix, as it is given."""
    with pytest.raises(ValueError, match="graph is not connected"):
        bf.algorithms.d_fedem(model, mixing=torch.eye(7))
    with pytest.raises(ValueError, match=r"mixing .*\[7, 7\].* got \[3, 3\]"):
        run(bf.algorithms.d_fedem(model, mixing=torch.full((3, 3), 1 / 3)), clients)


def test_one_way_mixing_needs_everyone(clients: FederatedData, model: nn.Module):
    """A part of an asymmetric matrix does not keep the cohort's mean, so it is refused; one that is
    symmetric in float32 is not.
    """
    w = (torch.eye(7) + torch.eye(7).roll(1, 0)) / 2
    algorithm = bf.algorithms.d_fedem(model, mixing=w, components=2, batch_size=None)
    run(algorithm, clients)
    with pytest.raises(ValueError, match=r"mixing .*3 of 7 clients.*topology\.metropolis"):
        run(algorithm, clients, participation=0.5)
    run(
        bf.algorithms.d_fedem(
            model, mixing=metropolis(ring(7)).float(), components=2, batch_size=None
        ),
        clients,
        participation=0.5,
    )


@pytest.mark.parametrize("method", ["fedem", "d_fedem"])
def test_a_component_that_dies_is_named(
    method: str, clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """Once, with its share, and left as it is; the usage is the mean of pi by size."""
    made = getattr(bf.algorithms, method)(
        nn.Linear(8, 3), components=3, optimiser=EM(0.1), batch_size=None
    )
    parts = [clients.train.client(j) for j in range(7)]
    clients = bf.data.from_arrays(
        [x for x, _ in parts], [y.clamp(max=1) for _, y in parts], outputs=3, task="classification"
    )
    wrong = torch.zeros(27)
    wrong[-1] = 300.0  # sure of a class that nobody has
    start = cycle(
        [torch.zeros(27), 0.1 * torch.randn(27, generator=torch.Generator().manual_seed(0)), wrong]
    )
    hopeless = replace(made.blocks["components"], start=lambda rng, size: next(start))
    algorithm = replace(made, blocks={"components": hopeless})
    with caplog.at_level("WARNING", logger="bayesfl"):
        result = run(algorithm, clients, 3)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("component 2 of 3 has died")
    n = torch.from_numpy(clients.train.counts).double()
    assert_close(result.server["usage"], n @ result.private["pi"] / n.sum())
    assert float(result.server["usage"][2]) < 1e-3
    assert_close(result.server["usage"].sum(), torch.tensor(1.0, dtype=torch.float64))


def test_a_component_that_the_cohort_does_not_use_is_alive(
    clients: FederatedData, caplog: pytest.LogCaptureFixture
):
    """Two kinds of clients, one of them in a round: what the others sent last still counts."""
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    kinds = [(x @ torch.ones(8) > 0).long(), (x @ torch.ones(8) <= 0).long()]  # opposite rules
    federation = bf.data.from_arrays(
        [x] * 4, [kinds[j % 2] for j in range(4)], outputs=2, task="classification"
    )
    start = cycle(
        [
            torch.cat([torch.full((8,), -5.0), torch.full((8,), 5.0), torch.zeros(2)]) * sign
            for sign in (1.0, -1.0)
        ]
    )
    made = bf.algorithms.fedem(
        nn.Linear(8, 2), components=2, optimiser=EM(0.1), by_responsibility=True
    )
    algorithm = replace(
        made,
        blocks={
            "components": replace(made.blocks["components"], start=lambda rng, size: next(start))
        },
    )
    with caplog.at_level("WARNING", logger="bayesfl"):
        result = run(algorithm, federation, 12, participation=0.25, sampling="fixed")
    said = [record.getMessage() for record in caplog.records]
    # Until a client of the other kind has come, one is unused.
    assert all("has died" in line for line in said[::2])
    assert all("is back" in line for line in said[1::2])
    assert len(said) <= 2
    assert float(result.server["usage"].min()) > 0.2


@pytest.mark.slow
def test_beliefs_of_one_component_by_hand():
    """M = 1, regression, all at once: mean-field VI of a linear model, whose optimum is known,
    pooled by moments.
    """
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 2, generator=rng) for n in (12, 7)]
    ys = [x @ torch.tensor([1.0, -0.5]) for x in xs]
    data = bf.data.from_arrays(xs, ys, outputs=1, task="regression")
    algorithm = bf.algorithms.fedem(
        nn.Linear(2, 1, bias=False),
        components=1,
        posterior=MeanField(),
        prior_variance=0.7,
        draws=64,
        epochs=900,
        batch_size=None,
        optimiser=SGD(0.01, momentum=0.9),
        likelihood=Gaussian(0.5),
    )
    start = algorithm.init(2, seed=2, dtype=torch.float64)["components"]["loc"][0]
    found = run(algorithm, data).server["components"]
    loc, variance = (t[0] for t in MeanField().moments(found))
    means, variances = [], []
    for x, y in zip(xs, ys, strict=True):
        precision = x.double().T @ x.double() / 0.25 + torch.eye(2, dtype=torch.float64) / 0.7
        means.append(torch.linalg.solve(precision, x.double().T @ y.double() / 0.25 + start / 0.7))
        variances.append(1 / precision.diagonal())
    share = torch.tensor([12 / 19, 7 / 19], dtype=torch.float64)
    mean = share @ torch.stack(means)
    assert_close(loc, mean, atol=0.03, rtol=0)
    assert_close(
        variance,
        share @ (torch.stack(variances) + (torch.stack(means) - mean).square()),
        atol=0,
        rtol=0.15,
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prior_variance": 0.0}, ValueError, "prior_variance must be > 0"),
        (
            {"posterior": MeanField(), "by_responsibility": True},
            ValueError,
            r"by_responsibility has no effect under a posterior of MeanField, got True",
        ),
        (
            {"prior_variance": 2.0},
            ValueError,
            r"prior_variance has no effect under a posterior of Point, got 2\.0",
        ),
        ({"draws": 3}, ValueError, r"draws has no effect under a posterior of Point, got 3"),
        ({"by_responsibility": "yes"}, TypeError, r"by_responsibility .*bool.* got str"),
        ({"components": 0}, ValueError, r"components .*1.* got 0"),
    ],
)
def test_options_that_do_not_work(options: dict[str, Any], error: type[Exception], message: str):
    """Refused as the method is made."""
    with pytest.raises(error, match=message):
        bf.algorithms.fedem(nn.Linear(2, 2), **options)
