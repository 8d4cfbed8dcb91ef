"""Predictions by the Gaussian that a block holds, linearised around its mean."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition import Block, LinearisedBelief, Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.optim import SGD
from bayesfl.posteriors import FullGaussian, MeanField
from bayesfl.posteriors.linearised import predictive


def diffuse(model: nn.Module, scale: float = 0.2, **options: Any) -> bf.Algorithm:
    """FedAvg whose clients hold a Gaussian on all weights."""
    prior = Normal(
        centre=server_mean("w"), variance=lambda given, view: torch.ones_like(view["n"])[..., None]
    )
    block = Block(posterior=MeanField(init_scale=scale), prior=prior, keep=True)
    plain = bf.algorithms.fedavg(model, epochs=2, optimiser=SGD(0.01, momentum=0.9))
    phases = (replace(plain.phases[0], energy=replace(plain.phases[0].energy, parts=("w",))),)
    return replace(plain, blocks={"w": block}, phases=phases, parts=("w",), **options)


def test_predictions_by_the_belief_that_a_block_holds(
    clients: FederatedData, model: nn.Module, tmp_path: Any
):
    """J diag(var) J' by autograd, row by row, under the link; from a file, the same bits."""
    method = diffuse(model, predictor=LinearisedBelief())
    result = bf.simulate(
        method, clients, rounds=2, dtype=torch.float64, progress=False, evaluate_every=None
    )
    assert result.tuned is None
    found = result.predict().client(1)
    loc, variance = method.blocks["w"].posterior.moments(
        {key: t[1] for key, t in result.private["w"].items()}
    )
    x = clients.test.client(1)[0].double()

    def outputs(vector: Tensor) -> Tensor:
        return method.outputs(method.layout("w").leaves(vector), x)

    mean = outputs(loc)
    jacobian = torch.func.jacrev(outputs)(loc)
    covariance = torch.einsum("nod,d,npd->nop", jacobian, variance, jacobian)
    expected = predictive(method.likelihood, mean, covariance)
    assert_close(
        [found.probs, found.epistemic],
        [expected["probs"], expected["epistemic"]],
        atol=1e-9,
        rtol=0,
    )
    result.client(1).save(tmp_path)
    assert torch.equal(
        bf.load_client(tmp_path, method).predict(x).probs, result.client(1).predict(x).probs
    )


def test_a_full_gaussian_counts_with_its_covariances(clients: FederatedData, model: nn.Module):
    """J S J' by autograd, S all of one block's and the variances of another one's."""
    plain = diffuse(model)
    blocks = {
        name: replace(plain.blocks["w"], pattern=f"{name}.*", posterior=posterior, keep=True)
        for name, posterior in (("body", MeanField(init_scale=0.1)), ("head", FullGaussian()))
    }
    prior = {name: replace(plain.blocks["w"].prior, centre=server_mean(name)) for name in blocks}
    blocks = {name: replace(block, prior=prior[name]) for name, block in blocks.items()}
    parts = ("body", "head")
    method = replace(plain, blocks=blocks, phases=(), parts=parts, predictor=LinearisedBelief())
    layouts = {name: method.layout(name) for name in parts}
    rng = torch.Generator().manual_seed(0)
    size = layouts["head"].size
    root = torch.randn(size, size, generator=rng, dtype=torch.float64) / size
    loc = {name: torch.randn(layouts[name].size, generator=rng).double() for name in parts}
    view = {
        "body": MeanField(init_scale=0.1).init(loc["body"]),
        "head": FullGaussian().of_moments(loc["head"], root @ root.T),
        "n": torch.ones(()).double(),
    }
    x = clients.test.client(1)[0].double()

    def outputs(body: Tensor, head: Tensor) -> Tensor:
        return method.outputs({**layouts["body"].leaves(body), **layouts["head"].leaves(head)}, x)

    mean = outputs(loc["body"], loc["head"])
    of_body, of_head = torch.func.jacrev(outputs, (0, 1))(loc["body"], loc["head"])
    covariance = 0.01 * of_body @ of_body.mT + of_head @ root @ root.T @ of_head.mT
    wanted = predictive(method.likelihood, mean, covariance)["probs"]
    assert method.predictor is not None
    found = method.predictor(method, {}, view, {})(x)["probs"]
    assert_close(found, wanted, atol=1e-9, rtol=0)


def test_several_blocks_that_draw_count_together(clients: FederatedData, model: nn.Module):
    """Body and head have a Gaussian each: their variances add up, as the blocks are independent;
    one named is alone.
    """
    plain = diffuse(model)
    halves = {
        name: replace(
            plain.blocks["w"],
            pattern=f"{name}.*",
            prior=replace(plain.blocks["w"].prior, centre=server_mean(name)),
            posterior=MeanField(init_scale=scale),
        )
        for name, scale in (("body", 0.1), ("head", 0.3))
    }
    energy = replace(plain.phases[0].energy, block="body", parts=("body", "head"))
    method = replace(
        plain,
        blocks=halves,
        phases=(replace(plain.phases[0], energy=energy),),
        parts=("body", "head"),
    )
    found = {}
    for block in (None, "body", "head"):
        result = bf.simulate(
            replace(method, predictor=LinearisedBelief(block)),
            clients,
            rounds=1,
            dtype=torch.float64,
            progress=False,
            evaluate_every=None,
        )
        found[block] = result.predict().client(1)
    x, layouts = clients.test.client(1)[0].double(), {name: method.layout(name) for name in halves}
    beliefs = {name: {key: t[1] for key, t in result.private[name].items()} for name in halves}
    covariances = {}
    for name in halves:

        def outputs(vector: Tensor, name: str = name) -> Tensor:
            at = {other: halves[other].posterior.sample(beliefs[other]) for other in halves} | {
                name: vector
            }
            return method.outputs(
                {key: t for other in halves for key, t in layouts[other].leaves(at[other]).items()},
                x,
            )

        loc, variance = halves[name].posterior.moments(beliefs[name])
        mean, jacobian = outputs(loc), torch.func.jacrev(outputs)(loc)
        covariances[name] = torch.einsum("nod,d,npd->nop", jacobian, variance, jacobian)
    covariances[None] = covariances["body"] + covariances["head"]
    wanted = {
        block: predictive(method.likelihood, mean, covariance)["probs"]
        for block, covariance in covariances.items()
    }
    assert_close({block: one.probs for block, one in found.items()}, wanted, atol=1e-9, rtol=0)


def test_a_wide_belief_keeps_the_classes_of_its_mean(clients: FederatedData, model: nn.Module):
    """Raw draws of all weights predict others."""
    plain = diffuse(model, scale=1.5)
    result = bf.simulate(
        replace(plain, predictor=LinearisedBelief()),
        clients,
        rounds=2,
        dtype=torch.float64,
        progress=False,
    )
    drawn = replace(result, algorithm=plain).predict(draws=50)
    own = result.predict()
    assert torch.equal(
        own.probs.argmax(-1)[own.mask], result.predict(draws=0).probs.argmax(-1)[own.mask]
    )
    assert not torch.equal(drawn.probs.argmax(-1)[own.mask], own.probs.argmax(-1)[own.mask])


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_widths_at_the_ends_of_the_numbers(clients: FederatedData, model: nn.Module, scale: float):
    """Next to none predicts as the mean; an endless one as no data at all, without an error of a
    precision that nobody gave.
    """
    method = diffuse(model, predictor=LinearisedBelief())
    result = bf.simulate(
        method, clients, rounds=1, dtype=torch.float64, progress=False, evaluate_every=None
    )
    rho = torch.full_like(result.private["w"]["rho"], scale if scale > 1 else math.log(scale))
    wide = replace(result, private={**result.private, "w": {**result.private["w"], "rho": rho}})
    found, mean = wide.predict(), wide.predict(draws=0).probs
    wanted, tolerance = (mean, 1e-9) if scale < 1 else (torch.full_like(mean, 1 / 3), 1e-6)
    assert_close(found.probs[found.mask], wanted[found.mask], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("make", "predictor", "words"),
    [
        (
            bf.algorithms.fedavg,
            lambda: LinearisedBelief(),
            r"no block holds a Gaussian.*draw are \[\].*LinearisedLaplace",
        ),
        (bf.algorithms.pfedvem, lambda: LinearisedBelief("body"), r"block 'body' .*\['head'\]"),
        (
            bf.algorithms.pfedvem,
            lambda: LinearisedBelief(link="draws"),
            r"link='draws' .*draws=100",
        ),
    ],
)
def test_blocks_without_a_gaussian(make: Any, predictor: Any, words: str, model: nn.Module):
    """Points, parts that are none, mixtures, and draws without a number."""
    with pytest.raises(ValueError, match=words):
        replace(make(model), predictor=predictor())
