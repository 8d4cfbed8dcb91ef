"""Mixtures whose components have a posterior each: against the formula spelt out, and against one
model alone.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.random import Purpose, generator
from bayesfl.composition.predictors import PRECISIONS, LinearisedBelief, LinearisedLaplace, Mixture
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.federation.store.files import CLIENT_FILE
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.posteriors import Laplace, MeanField
from bayesfl.posteriors.linearised import nll_of_predictive, predictive
from bayesfl.posteriors.prior_precision import largest_alike
from tests.cases import EM, numbers, run


def em(model: nn.Module, each: Any, **options: Any) -> bf.Algorithm:
    """FedEM whose two components predict by `each`."""
    plain = bf.algorithms.fedem(
        model, **{"components": 2, "epochs": 2, "batch_size": 10, "optimiser": EM(0.3), **options}
    )
    return replace(plain, predictor=Mixture("components", "pi", each=each))


def by_hand(
    result: Result, j: int, x: Tensor, precision: float
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Client j's pi, and mean and covariance of each component's outputs at `x`: Jacobians and
    matrices of full size.

    The components [M, D] are the server's, or, between neighbours, the client's own.
    """
    algorithm = result.algorithm
    layout, likelihood = algorithm.layout("components"), algorithm.likelihood
    pi, entry = result.private["pi"][j], result.server["components"]
    theta = entry["each"][j] if "each" in entry else entry["loc"]
    rows, y = result.data.train.client(j)
    rows, out = rows.double(), []
    density = torch.stack(
        [(-algorithm.losses(layout.leaves(w), {"x": rows, "y": y})).exp() for w in theta]
    )
    q = pi[:, None] * density / (pi @ density)
    for w, share in zip(theta, q, strict=True):

        def outputs(at: Tensor, x: Tensor) -> Tensor:
            return algorithm.outputs(layout.leaves(at), x)

        jacobian, f = torch.func.jacrev(outputs)(w, rows), outputs(w, rows)
        p = f.softmax(-1)
        inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        if isinstance(likelihood, Gaussian):
            inner = (torch.eye(f.shape[1], dtype=f.dtype) / likelihood.scale**2).expand(
                len(f), -1, -1
            )
        hessian = torch.einsum("n,nod,nop,npe->de", share, jacobian, inner, jacobian)
        hessian += precision * torch.eye(len(w), dtype=w.dtype)
        new = torch.func.jacrev(outputs)(w, x)
        out.append((outputs(w, x), new @ hessian.inverse() @ new.mT))
    return pi, out


@pytest.fixture(scope="module")
def held() -> FederatedData:
    """Four clients with validation data: two by one rule, two by another."""
    xs = [numbers(n, 4, seed=n).float() for n in (30, 23, 16, 31)]
    ys = [
        (x[:, 0] * (1 if j < 2 else -1) + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 1)
        for j, x in enumerate(xs)
    ]
    test = [numbers(9, 4, seed=n).float() for n in range(4)]
    return bf.data.from_arrays(
        xs, ys, test=(test, [torch.zeros(9).long() for _ in xs]), outputs=3, validation=0.25
    )


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return bf.models.mlp(4, hidden=5, outputs=3)


@pytest.fixture(scope="module")
def result(held: FederatedData, small: nn.Module) -> Result:
    return run(em(small, LinearisedLaplace(precision=2.0)), held, 4)


def test_each_component_has_its_own_approximation(result: Result, held: FederatedData):
    """sum_m pi_m p_m, each by its Gaussian under the link; what the entropy has more than the
    components' is epistemic.
    """
    for j in range(held.clients):
        x = held.test.client(j)[0].double()
        pi, each = by_hand(result, j, x, 2.0)
        parts = [predictive(Categorical(), *one) for one in each]
        probs = sum(w * one["probs"] for w, one in zip(pi, parts, strict=True))
        inside = sum(w * one["aleatoric"] for w, one in zip(pi, parts, strict=True))
        epistemic = (torch.special.entr(probs).sum(-1) - inside).clamp_min(0)
        found = result.predict().client(j)
        assert_close([found.probs, found.epistemic], [probs, epistemic], atol=1e-9, rtol=0)
    assert any(0.05 < float(pi[0]) < 0.95 for pi in result.private["pi"])


def test_draws_of_components(result: Result, held: FederatedData):
    """The mean over draws of sum_m pi_m softmax, the same normals for each; the epistemic part is
    the mutual information.
    """
    x = held.test.client(1)[0].double()
    rng = generator(result.settings.seed, Purpose.PREDICT, round=result.round, client=1, index=1)
    noise = (
        torch.from_numpy(rng.standard_normal((len(x), 40, 3), np.float32)).double().transpose(0, 1)
    )
    pi, each = by_hand(result, 1, x, 2.0)
    centre = torch.eye(3, dtype=torch.float64) - 1 / 3
    drawn = []
    for mean, covariance in each:
        values, vectors = torch.linalg.eigh(centre @ covariance @ centre)
        root = vectors @ values.clamp_min(0).sqrt().diag_embed() @ vectors.mT
        drawn.append((mean + torch.einsum("nop,snp->sno", root, noise)).softmax(-1))
    p = torch.stack(drawn, -1)  # [S, N, O, M]
    found, probs = result.predict(draws=40).client(1), p.mean(0) @ pi
    epistemic = torch.special.entr(probs).sum(-1) - torch.special.entr(p).sum(2).mean(0) @ pi
    assert_close([found.probs, found.epistemic], [probs, epistemic], atol=1e-7, rtol=0)


def test_the_precision_is_chosen_under_the_mixture(held: FederatedData, small: nn.Module):
    """The largest candidate that fits the validation data as well as the best, by the mixture's
    probabilities.
    """
    result = run(em(small, LinearisedLaplace()), held, 4)
    losses = torch.zeros(len(PRECISIONS), 0, dtype=torch.float64)
    for j in range(held.clients):
        x, y = held.validation.client(j)
        rows = []
        for value in PRECISIONS:
            pi, each = by_hand(result, j, x.double(), value)
            probs = sum(
                w * predictive(Categorical(), *one)["probs"]
                for w, one in zip(pi, each, strict=True)
            )
            rows.append(nll_of_predictive({"probs": torch.as_tensor(probs)}, y))
        losses = torch.cat([losses, torch.stack(rows)], 1)
    assert (
        result.tuned == PRECISIONS[largest_alike(losses.sum(1), losses @ losses.T, losses.shape[1])]
    )
    plain = replace(result, algorithm=em(small, None))
    assert_close(result.predict(draws=0).probs, plain.predict().probs, atol=0, rtol=0)
    assert not torch.equal(result.predict().probs, plain.predict().probs)


def one_client(small: nn.Module, copies: int) -> tuple[bf.Algorithm, Tensor, dict[str, Tensor]]:
    """A method of one model, weights [M, D] and a client's data, in float64."""
    single = bf.algorithms.fedavg(small)
    theta = numbers(copies, single.layout("w").size, seed=7) * 0.7
    return single, theta, {"x": numbers(20, 4, seed=8), "y": torch.arange(20) % 3}


@pytest.mark.parametrize(
    "rule", [LinearisedLaplace(), LinearisedLaplace(structure="subnetwork", link="per_class"), None]
)
@pytest.mark.parametrize("pi", [[1.0], [1.0, 0.0], [0.0, 1.0]], ids=str)
def test_a_mixture_of_one_is_that_one(small: nn.Module, rule: Any, pi: list[float]):
    """To the bit: a single component, or the only one of weight; the other may be anything."""
    single, theta, data = one_client(small, len(pi))
    weights, only = torch.tensor(pi, dtype=torch.float64), pi.index(1.0)
    theta[weights == 0] = torch.nan
    n, x = torch.tensor(20.0, dtype=torch.float64), numbers(6, 4, seed=9)
    method = em(small, rule, components=len(pi))
    view = {"components": {"loc": theta}, "pi": weights, "n": n}
    found = Mixture("components", "pi", each=rule)(method, {}, view, data)
    alone = (rule or LinearisedLaplace())(single, {}, {"w": {"loc": theta[only]}, "n": n}, data)
    for options in (
        {"plain": True},
        {"plain": rule is None, "value": 0.1},
        {"plain": rule is None, "noise": numbers(5, 6, 3, seed=1)},
    ):
        one, other = found(x, **options), alone(x, **options)
        assert torch.equal(one["probs"], other["probs"])
        assert_close(one["epistemic"], other["epistemic"], atol=1e-12, rtol=0, equal_nan=True)


def test_regression_has_the_moments_of_the_mixture():
    """Mean pi m; variance s^2 + pi (v + m^2) - (pi m)^2, of which all but s^2 is epistemic."""
    xs = [numbers(n, 3, seed=n).float() for n in (20, 12)]
    ys = [torch.stack([x[:, 0] * sign, x[:, 1]], -1) for x, sign in zip(xs, (1, -1), strict=True)]
    data = bf.data.from_arrays(xs, ys, test=(xs, ys), outputs=2, task="regression")
    model = bf.models.mlp(3, hidden=4, outputs=2)
    result = run(
        em(model, LinearisedLaplace(precision=0.5), optimiser=EM(0.01), likelihood=Gaussian(1.0)),
        data,
        5,
    )
    pi, each = by_hand(result, 0, xs[0].double(), 0.5)
    mean = torch.stack([m for m, _ in each], -1)
    variance = torch.stack([c.diagonal(dim1=1, dim2=2) for _, c in each], -1)
    spread = mean.square() @ pi - (mean @ pi).square()
    found, plain = result.predict().client(0), result.predict(draws=0).client(0)
    assert_close(
        [found.mean, found.variance, found.epistemic, plain.mean, plain.variance],
        [
            mean @ pi,
            1 + variance @ pi + spread,
            (variance @ pi + spread).sum(-1),
            mean @ pi,
            1 + spread,
        ],
        atol=1e-9,
        rtol=0,
    )
    assert float(pi.max()) < 0.99
    assert not bool(plain.epistemic.isfinite().any())


@pytest.mark.parametrize("structure", ["full", "subnetwork", "diagonal"])
def test_a_client_is_stored_with_all_its_components(
    structure: Any, held: FederatedData, small: nn.Module, tmp_path: Path
):
    """Read without data, it predicts the same bits; at the means, the file has no covariance, not
    even of one that was read.
    """
    rule: dict[str, Any] = {"share": 0.4} if structure == "subnetwork" else {}
    method = em(small, LinearisedLaplace(structure=structure, precision=2.0, **rule))
    result = run(method, held, 2)
    one, x = result.client(1), held.test.client(1)[0]
    assert_close(one.predict(x).probs, result.predict().client(1).probs, atol=1e-12, rtol=0)
    one.save(tmp_path / "one")
    again = bf.load_client(tmp_path / "one", method)
    for draws in (None, 9):
        mine, theirs = (model.predict(x, draws=draws) for model in (again, one))
        assert_close([mine.probs, mine.epistemic], [theirs.probs, theirs.epistemic], atol=0, rtol=0)
    again.save(tmp_path / "again")
    kept, stored = (load_file(tmp_path / name / CLIENT_FILE) for name in ("again", "one"))
    assert {"stored.0_root", "stored.1_root"} <= stored.keys()
    assert_close(kept, stored, atol=0, rtol=0)
    for name, model in (("means", one), ("means of a file", again)):
        model.save(tmp_path / name, plug_in=True)
        assert not [
            key for key in load_file(tmp_path / name / CLIENT_FILE) if key.startswith("stored")
        ]
        assert_close(
            bf.load_client(tmp_path / name, method).predict(x).probs,
            result.predict(draws=0).client(1).probs,
            atol=1e-12,
            rtol=0,
        )
    result.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"'client 1' needs its training data"):
        bf.load(tmp_path / "run", method).client(1)


def test_components_between_neighbours_and_clusters(held: FederatedData, small: nn.Module):
    """D-FedEM's components are the client's own; IFCA's choice is one model, whose approximation it
    is.
    """
    rule = LinearisedLaplace(precision=2.0)
    gossip = bf.algorithms.d_fedem(small, components=2, batch_size=10)
    ran = run(replace(gossip, predictor=Mixture("components", "pi", each=rule)), held, 2)
    for j in range(held.clients):
        pi, each = by_hand(ran, j, held.test.client(j)[0].double(), 2.0)
        probs = sum(
            w * predictive(Categorical(), *one)["probs"] for w, one in zip(pi, each, strict=True)
        )
        assert_close(ran.predict().client(j).probs, probs, atol=1e-9, rtol=0)
    method = bf.algorithms.ifca(small, clusters=2, epochs=1, batch_size=10)
    result = run(replace(method, predictor=Mixture("models", "cluster", each=rule)), held, 2)
    one, x = result.client(2), held.test.client(2)[0]
    expected = Laplace.fit(
        one.model().double(), held.train.client(2)[0].double(), precision=2.0
    ).predict(x.double())
    assert_close(one.predict(x).probs, expected["probs"], atol=1e-9, rtol=0)


def test_components_that_are_beliefs(held: FederatedData, small: nn.Module, tmp_path: Path):
    """Mean-field components, each linearised around its own mean; no data are needed."""
    method = em(small, LinearisedBelief(), posterior=MeanField(init_scale=0.3))
    result = run(method, held, 2)
    x = held.test.client(1)[0].double()
    layout, pi = method.layout("components"), result.private["pi"][1]
    loc, variance = MeanField().moments(result.server["components"])
    probs = torch.zeros(9, 3, dtype=torch.float64)
    for m in range(2):

        def outputs(w: Tensor) -> Tensor:
            return method.outputs(layout.leaves(w), x)

        mean, jacobian = outputs(loc[m]), torch.func.jacrev(outputs)(loc[m])
        covariance = torch.einsum("nod,d,npd->nop", jacobian, variance[m], jacobian)
        probs += pi[m] * predictive(Categorical(), mean, covariance)["probs"]
    assert_close(result.predict().client(1).probs, probs, atol=1e-9, rtol=0)
    result.save(tmp_path / "run")
    assert torch.equal(
        bf.load(tmp_path / "run", method).client(1).predict(x).probs,
        result.client(1).predict(x).probs,
    )


def test_a_component_without_examples_is_no_reason_to_warn(small: nn.Module):
    """It has the prior under any precision; one that made examples and shrinks all the same is
    named.
    """
    _, theta, data = one_client(small, 2)
    method = em(small, rule := LinearisedLaplace(precision=1e-4))
    for pi, n, warned in (([1 - 1e-6, 1e-6], 20.0, True), ([0.5, 0.5], 1.0, False)):
        view = {
            "components": {"loc": theta},
            "pi": torch.tensor(pi).double(),
            "n": torch.tensor(n).double(),
        }
        fitted = Mixture("components", "pi", each=rule)(method, {}, view, data)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fitted(numbers(6, 4, seed=9))
        assert [str(one.message).split(" ")[0] for one in said] == [
            "predictive_precision=0.0001"
        ] * warned


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda model: em(model, LinearisedLaplace("body")),
            r"block 'body' .*\('components',\)",
        ),
        (lambda model: em(model, LinearisedLaplace(link="draws")), r"link='draws' .*draws=100"),
        (lambda model: em(model, LinearisedBelief()), r"no block holds a Gaussian"),
        (
            lambda model: em(model, LinearisedLaplace(), likelihood=Categorical(smoothing=0.1)),
            r"training loss.*Categorical\(\)",
        ),
        (
            lambda model: replace(
                bf.algorithms.fedavg(model),
                predictor=Mixture("w", "pi", each=LinearisedLaplace()),
            ),
            r"block 'w' .*have copies",
        ),
        (
            lambda model: replace(
                em(model, None, posterior=MeanField(init_scale=0.3)), predictor=LinearisedBelief()
            ),
            r"2 copies; .*Mixture\('components', 'pi', each=LinearisedBelief\(\)\)",
        ),
        (
            lambda model: replace(em(model, None), predictor=LinearisedLaplace("components")),
            r"'components' has 2 copies; .*Mixture\('components', 'pi', "
            r"each=LinearisedLaplace\(\)\)",
        ),
    ],
)
def test_what_does_not_fit_the_method(make: Any, words: str, small: nn.Module):
    """As for one model: a block that is none, draws without a number, points without a belief, a
    training loss; and no copies, at composition, not after hours of training.
    """
    with pytest.raises(ValueError, match=words):
        make(small)
