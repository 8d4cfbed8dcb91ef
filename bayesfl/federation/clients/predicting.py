"""Predictor of a client's model as JSON, by which a client's file loads with the network alone."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from bayesfl import likelihoods
from bayesfl.base.archive import UnknownError, made, plain
from bayesfl.base.protocols import Predictor
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block, standard_normal
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.pools import Mean
from bayesfl.composition.predictors import (
    Heads,
    LinearisedBelief,
    LinearisedLaplace,
    Mixture,
    PooledLaplace,
)
from bayesfl.composition.priors import Normal, inverse_size, server_mean
from bayesfl.posteriors import FullGaussian, MeanField, Point

_KNOWN: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(likelihoods, name) for name in likelihoods.__all__),
        *(Point, MeanField, FullGaussian),
        *(LinearisedLaplace, LinearisedBelief, Mixture, PooledLaplace, Heads),
    )
}


def predicting(algorithm: Algorithm) -> dict[str, Any]:
    """Return how a method predicts, JSON-able; or, where a function or a class of the user's has
    part in it, this alone under "needs".
    """
    try:
        return {
            "blocks": {
                name: {
                    "pattern": plain(block.pattern, _KNOWN),
                    "posterior": plain(block.posterior, _KNOWN),
                    "keep": block.keep,
                    "sent": block.pool is not None,
                    "copies": block.copies,
                }
                for name, block in algorithm.blocks.items()
                if not isinstance(block, Buffers)
            },
            "parts": list(algorithm.parts),
            "likelihood": plain(algorithm.likelihood, _KNOWN),
            "predictor": plain(algorithm.predictor, _KNOWN),
            "draws": algorithm.draws,
            "private": list(algorithm.private),
        }
    except UnknownError as error:
        return {"needs": str(error)}


def rule_of(found: Mapping[str, Any]) -> Predictor | None:
    """Return the predictor that `predicting` says; None where there is none, or it is not said."""
    return made(found.get("predictor"), _KNOWN)


def predictor_of(found: Mapping[str, Any], model: nn.Module) -> Algorithm:
    """Return a method that predicts as `predicting` says, and trains nothing."""
    blocks = {}
    for name, one in found["blocks"].items():
        posterior = made(one["posterior"], _KNOWN)
        blocks[name] = Block(
            made(one["pattern"], _KNOWN),
            posterior=posterior,
            # A belief that draws needs a prior, which nothing reads where nothing is trained.
            prior=Normal(centre=server_mean(name), variance=inverse_size(1.0)),
            pool=Mean() if one["sent"] else None,
            keep=one["keep"],
            start="module" if one["copies"] is None else standard_normal(),
            copies=one["copies"],
        )
    return Algorithm(
        model,
        blocks,
        (),
        parts=tuple(found["parts"]),
        likelihood=made(found["likelihood"], _KNOWN),
        predictor=made(found["predictor"], _KNOWN),
        draws=found["draws"],
        private=dict.fromkeys(found["private"], 0.0),
    )
