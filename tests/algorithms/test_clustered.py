"""Clustered FL against a slow reference, on clients of planted clusters."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.algorithms.clustered import bipartition
from bayesfl.composition.block import Block
from bayesfl.composition.pools import equal
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.cases import run

RULES = torch.tensor([[3.0, 2.0, 1.0], [-3.0, 2.0, 1.0], [-3.0, -2.0, -4.0]], dtype=torch.float64)
# Neighbours in number are of different rules, and so are those of like size.
OWNER = (0, 2, 1, 0, 1, 2, 2, 0, 1, 0, 2)
SIZES = (20, 33, 8, 41, 17, 25, 12, 9, 30, 14, 27)
START = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
LR, EPOCHS = 0.05, 3
OPTIONS: dict[str, Any] = {
    "epochs": EPOCHS,
    "batch_size": None,
    "optimiser": SGD(LR),
    "likelihood": Gaussian(1.0),
}


@pytest.fixture(scope="module")
def planted() -> FederatedData:
    """Eleven clients of three linear rules, in no order."""
    rng = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 3, generator=rng) for n in SIZES]
    ys = [
        x @ RULES[k].float() + 0.3 * torch.randn(len(x), generator=rng)
        for x, k in zip(xs, OWNER, strict=True)
    ]
    return bf.data.from_arrays(xs, ys, test=(xs, ys))


def started(**options: Any) -> bf.Algorithm:
    algorithm = bf.algorithms.clustered(nn.Linear(3, 1, bias=False), **{**OPTIONS, **options})
    return replace(
        algorithm,
        blocks={"w": replace(algorithm.blocks["w"], start=lambda rng, size: START.float())},
    )


def complete_linkage(updates: np.ndarray) -> list[set[int]]:
    """Two groups: again and again the two whose furthest members are nearest become one."""
    length = np.linalg.norm(updates, axis=1)
    distance = 1 - updates @ updates.T / np.outer(length, length)
    groups = [{i} for i in range(len(updates))]
    while len(groups) > 2:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        a, b = min(
            pairs,
            key=lambda pair: max(distance[i, j] for i in groups[pair[0]] for j in groups[pair[1]]),
        )
        groups[b] |= groups.pop(a)
    return sorted(groups, key=min)


def reference(
    data: FederatedData,
    rounds: int,
    eps1: float,
    eps2: float,
    first_split: int,
    alike: bool = False,
):
    """Models of clusters by their members, sets of clients' numbers: {members: model}."""
    clients = [tuple(t.double().numpy() for t in data.train.client(j)) for j in range(data.clients)]
    clusters = {frozenset(range(len(clients))): START.float().double().numpy()}
    unit = None
    splits = []
    for t in range(rounds):
        after = {}
        for members, model in clusters.items():
            update = {}
            for j in members:
                x, y = clients[j]
                w = model.copy()
                for _ in range(EPOCHS):
                    w = w - LR * x.T @ (x @ w - y) / len(y)
                update[j] = w - model

            def mean(of: Any, update: Any = update) -> np.ndarray:
                n = {j: 1 if alike else len(clients[j][1]) for j in of}
                return sum(n[j] * update[j] for j in of) / sum(n.values())

            moved = np.linalg.norm(mean(members))
            furthest = max(np.linalg.norm(u) for u in update.values())
            unit = moved if unit is None else unit
            parts = [members]
            if (
                t >= first_split
                and len(members) > 2
                and moved < eps1 * unit
                and furthest > eps2 * unit
            ):
                order = sorted(members)
                parts = [
                    frozenset(order[i] for i in group)
                    for group in complete_linkage(np.stack([update[j] for j in order]))
                ]
                splits.append((t, {tuple(sorted(part)) for part in parts}))
            after |= {part: model + mean(part) for part in parts}
        clusters = after
    return clusters, splits


def found(result: Any) -> dict[frozenset[int], np.ndarray]:
    cluster = result.server["cluster"]
    return {
        frozenset(np.flatnonzero(cluster == c)): model.numpy()
        for c, model in enumerate(result.server["models"])
    }


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_it_finds_the_planted_clusters_as_a_slow_reference_does(
    planted: FederatedData, alike: bool
):
    """Two splits, the second inside a part; whoever is where, and its model, to rounding."""
    options: dict[str, Any] = {"eps1": 0.02, "eps2": 0.1, "first_split": 4}
    wanted, splits = reference(planted, 60, **options, alike=alike)
    assert len(splits) == 2
    assert splits[0][0] > 4
    rules = [frozenset(np.flatnonzero(np.array(OWNER) == k)) for k in range(3)]
    assert set(wanted) == set(rules)
    result = run(started(**options, **({"weight": equal} if alike else {})), planted, 60)
    got = found(result)
    assert got.keys() == wanted.keys()
    for members, model in got.items():
        assert_close(model, wanted[members], atol=1e-9, rtol=0)
    addressed = result.algorithm.share(result.server, torch.arange(11))[1]["w"]["loc"]
    assert_close(
        addressed,
        torch.stack(
            [torch.from_numpy(next(m for of, m in wanted.items() if j in of)) for j in range(11)]
        ),
    )
    assert_close(result.server["w"]["loc"], addressed.mean(0))
    # The same at the rounds in which something splits, and just before.
    for t, _ in splits:
        for rounds in (t, t + 1):
            part, _ = reference(planted, rounds, **options, alike=alike)
            assert (
                found(
                    run(started(**options, **({"weight": equal} if alike else {})), planted, rounds)
                ).keys()
                == part.keys()
            )


def test_places_in_a_cluster_are_no_clients_numbers(planted: FederatedData):
    """A second split moves clients of its own cluster alone; taken for numbers, places would name
    others.
    """
    options: dict[str, Any] = {"eps1": 0.02, "eps2": 0.1, "first_split": 4}
    _, ((first, _), (second, parts)) = reference(planted, 60, **options)
    before, after = (
        run(started(**options), planted, t).server["cluster"] for t in (second, second + 1)
    )
    changed = tuple(np.flatnonzero(before != after))
    inside = sorted(j for part in parts for j in part)
    assert first < second
    assert inside != list(range(len(inside)))
    assert changed in parts


def test_without_a_split_it_is_fedavg(planted: FederatedData):
    """To rounding; so it is where a cluster may not split: too early, too small, everyone of one
    mind, or a member absent.
    """
    plain = replace(
        bf.algorithms.fedavg(nn.Linear(3, 1, bias=False), **OPTIONS),
        blocks={"w": Block(start=lambda rng, size: START.float())},
    )
    eager: dict[str, Any] = {"eps1": 1e9, "eps2": 0.0, "first_split": 0}
    pair = planted.select([0, 1])
    for options, data, more in (
        ({"eps1": 0.0}, planted, {}),
        ({"eps2": 1e9}, planted, {}),
        ({"first_split": 5}, planted, {}),
        ({}, pair, {}),
        ({}, planted, {"participation": 0.7}),
    ):
        got, wanted = (run(a, data, 5, **more) for a in (started(**{**eager, **options}), plain))
        assert got.server["models"].shape == (1, 3)
        assert_close(got.server["models"][0], wanted.server["w"]["loc"], atol=1e-12, rtol=0)
        assert_close(got.server["w"]["loc"], wanted.server["w"]["loc"], atol=1e-12, rtol=0)
    assert len(run(started(**eager), planted, 1).server["models"]) == 2
    assert len(run(started(**eager), planted.select([0, 1, 2]), 1).server["models"]) == 2


def test_thresholds_are_in_units_of_the_first_mean_update(planted: FederatedData):
    """`norms` are |mean update| and the largest |update| over it; the first is 1 in the first
    round.
    """
    result = run(started(), planted, 1)
    plain = run(started(), planted, 3)
    assert_close(result.server["norms"][0, 0], torch.tensor(1.0, dtype=torch.float64))
    moved = result.server["w"]["loc"] - START.float().double()
    assert_close(result.server["unit"], moved.norm())
    assert_close(plain.server["unit"], moved.norm())
    last = run(started(), planted, 2).server["w"]["loc"]
    assert_close(
        plain.server["norms"][0, 0], (plain.server["w"]["loc"] - last).norm() / moved.norm()
    )
    own = []
    for j in range(11):
        x, y = (t.double() for t in planted.train.client(j))
        w = last
        for _ in range(EPOCHS):
            w = w - LR * x.T @ (x @ w - y) / len(y)
        own.append((w - last).norm())
    assert_close(plain.server["norms"][0, 1], torch.stack(own).max() / moved.norm())


def test_a_cluster_splits_just_where_its_thresholds_say(planted: FederatedData):
    """In the round after `first_split`, with eps1 a little above its norm and eps2 a little below;
    not with either on the other side.
    """
    whole = run(started(), planted, 6).server
    moved, furthest = whole["norms"][0].tolist()
    assert abs(float(whole["unit"]) - 1) > 0.1  # else thresholds as lengths would do the same
    for up, down, rounds, clusters in (
        (1.01, 0.99, 6, 2),
        (0.99, 0.99, 6, 1),
        (1.01, 1.01, 6, 1),
        (1.01, 0.99, 5, 1),
    ):
        result = run(started(eps1=moved * up, eps2=furthest * down, first_split=5), planted, rounds)
        assert len(result.server["models"]) == clusters


def test_a_client_that_stays_away_keeps_its_cluster(planted: FederatedData):
    """Clusters average those who are there; one of which nobody is there stays as it is."""
    algorithm = started(eps1=0.02, eps2=0.1, first_split=4)
    server = run(algorithm, planted, 60).server
    ids = torch.tensor([3, 8, 0])  # of rules 0, 1, 0
    sent = torch.randn(3, 3, dtype=torch.float64)
    new = algorithm.combine(server, ids, {"w": {"loc": sent}, "n": torch.tensor([1.0, 5.0, 3.0])})
    assert torch.equal(new["cluster"], server["cluster"])
    of = [int(server["cluster"][OWNER.index(k)]) for k in range(3)]
    assert_close(new["models"][of[0]], (sent[0] + 3 * sent[2]) / 4)
    assert_close(new["models"][of[1]], sent[1])
    assert torch.equal(new["models"][of[2]], server["models"][of[2]])
    assert torch.equal(new["norms"][of[2]], server["norms"][of[2]])


def test_a_client_that_names_no_cluster_gets_the_last(planted: FederatedData):
    """Whatever a client says that it joined, no other client's round ends for it."""
    algorithm = started(eps1=0.02, eps2=0.1, first_split=4)
    server = run(algorithm, planted, 60).server
    server["cluster"][3] = -1
    said = {"w": {"loc": torch.randn(1, 3, dtype=torch.float64)}, "n": torch.ones(1)}
    new = algorithm.combine(server, torch.tensor([3]), said | {"joined": torch.tensor([50])})
    assert int(new["cluster"][3]) == len(server["models"]) - 1


def test_a_new_client_takes_the_model_that_fits_it_best(planted: FederatedData):
    """By its training loss; those who trained predict by their own cluster's, whatever fits."""
    result = run(started(eps1=0.02, eps2=0.1, first_split=4), planted, 60)
    for j, k in ((2, 1), (3, 0), (5, 2)):
        adapted = result.adapt(planted.select([j]))
        model = result.server["models"][int(result.server["cluster"][OWNER.index(k)])]
        mean: Any = adapted.predict().client(0).mean
        assert_close(mean.flatten(), planted.test.client(j)[0].double() @ model)
    swapped = replace(result, server=result.server | {"cluster": result.server["cluster"].flip(0)})
    mean = swapped.predict().client(4).mean
    assert_close(
        mean.flatten(),
        planted.test.client(4)[0].double()
        @ result.server["models"][int(result.server["cluster"][6])],
    )


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_a_new_client_joins_the_cluster_that_fits_it_best(planted: FederatedData, chunk: int):
    """In a run that begins from another; the others train as they would without it, whoever shares
    their chunk.
    """
    first = run(
        started(eps1=0.02, eps2=0.1, first_split=4),
        planted.select([j for j in range(planted.clients) if j != 5]),
        60,
    )
    assert len(first.server["models"]) == 3
    then: dict[str, Any] = {
        "seed": 1,
        "start": first,
        "progress": False,
        "evaluate_every": None,
        "dtype": torch.float64,
    }
    method, engine = first.algorithm, bf.Engine(chunk=chunk)
    joined = bf.simulate(method, planted, rounds=1, engine=engine, **then)
    of = {j: int(joined.server["cluster"][j]) for j in range(planted.clients)}
    assert of[5] == next(of[j] for j in range(planted.clients) if j != 5 and OWNER[j] == OWNER[5])
    alone = bf.simulate(method, first.data, rounds=1, engine=engine, **then)
    untouched = [c for c in range(3) if c != of[5]]
    assert_close(
        joined.server["models"][untouched], alone.server["models"][untouched], atol=1e-12, rtol=0
    )
    few = bf.simulate(method, planted, rounds=1, participation=0.2, **then).server["cluster"]
    assert few[5] in (-1, of[5])


def test_clusters_have_no_model_in_common(planted: FederatedData):
    """The mean over clusters is nobody's; before the first split there is one network for all."""
    algorithm = started(eps1=0.02, eps2=0.1, first_split=4)
    assert run(algorithm, planted, 2).model() is not None
    with pytest.raises(ValueError, match=r"several networks.*result\.client\(name\)"):
        run(algorithm, planted, 60).model()


def test_two_groups_by_complete_linkage():
    """As by hand; the first one's group is not the new one; an update of length 0 is as far from
    one as from another.
    """
    rng = np.random.default_rng(0)
    for size in range(2, 12):
        updates = rng.standard_normal((size, 4))
        stays, leaves = complete_linkage(updates)
        group = bipartition(torch.from_numpy(updates))
        assert not group[0]
        assert (set(np.flatnonzero(~group)), set(np.flatnonzero(group))) == (stays, leaves)
        # Lengths don't matter.
        assert torch.equal(
            bipartition(torch.from_numpy(updates) * torch.arange(1.0, size + 1)[:, None]), group
        )
    still: Tensor = bipartition(torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.1], [-1.0, 0.0]]))
    assert still[2:].tolist() == [False, True]


@pytest.mark.parametrize(("name", "value"), [("eps1", -1), ("eps2", True), ("first_split", -1)])
def test_bad_thresholds_are_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"{name} .*got {value}"):
        bf.algorithms.clustered(nn.Linear(3, 1), **{name: value})


def test_the_unit_is_the_first_update_that_moves(planted: FederatedData):
    """A warm-up from rate 0 sets none."""

    def rising(round: int, rounds: int) -> float:
        return LR * min(round, 1)

    found = run(started(optimiser=SGD(rising)), planted, 2).server
    wanted = run(started(), planted, 1).server
    for key in ("unit", "norms"):
        assert_close(found[key], wanted[key])
