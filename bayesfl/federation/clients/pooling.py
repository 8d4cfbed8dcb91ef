"""Methods that predict with a trained federation and train nothing: the posterior of the server's
model given all clients' rows, and clients' own heads.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from bayesfl import likelihoods
from bayesfl.base.archive import UnknownError, made, plain
from bayesfl.base.layout import aliases
from bayesfl.base.protocols import Predictor, Server
from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block, standard_normal
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.pools import Mean
from bayesfl.composition.predictors import (
    HEAD,
    Heads,
    LinearisedBelief,
    LinearisedLaplace,
    Mixture,
    Neighbours,
    PooledLaplace,
)
from bayesfl.composition.priors import Normal, inverse_size, server_mean
from bayesfl.federation.settings import Method
from bayesfl.posteriors import FullGaussian, MeanField, Point

_KNOWN: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(getattr(likelihoods, name) for name in likelihoods.__all__),
        *(Point, MeanField, FullGaussian),
        *(LinearisedLaplace, LinearisedBelief, Mixture, Neighbours, PooledLaplace, Heads),
    )
}


def servers_method(algorithm: Algorithm, rule: Predictor) -> Algorithm:
    """Return a method without training: all clients predict from the server's model and its pooled
    posterior.

    Args:
        algorithm: A method with one network on the server.
        rule: The predictor.
    """
    parts: Any = algorithm.shared_parts()
    return Algorithm(
        algorithm.model,
        {name: Block(algorithm.blocks[name].pattern) for name in parts},
        (),
        parts=parts,
        likelihood=algorithm.likelihood,
        predictor=rule,
    )


@options.method()
def with_heads(method: Method) -> Algorithm:
    """Give every client its own head on the body that another method trains: a Gaussian with full
    covariance, under a normal prior that all heads share.

    The method trains nothing. `result.heads()` applies it to a trained federation; use it to load
    what that result has saved. Over Flower, `bayesfl.flower.serve(grid, bf.with_heads(method),
    rounds=0, start=trained, clients=...)` conducts the same surveys on the nodes.

    Args:
        method: The method that trains the network.

    Raises:
        ValueError: The network has no linear layer, or clients have no common body.

    Example:
        >>> method = bf.with_heads(bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10)))
        >>> method
        Algorithm(SplitModel; own_head: FullGaussian, body: Point; 0 phases)
    """
    layers = [
        (name, is_parametrized(part))
        for name, part in method.model.named_modules()
        if type(part) is nn.Linear or (isinstance(part, nn.Linear) and is_parametrized(part))
    ]
    if not layers or layers[-1][1]:
        raise ValueError(
            "the network has no nn.Linear as its last layer, whose weights would be a client's "
            "head; remove weight_norm and the like with "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
        )
    layer = layers[-1][0]
    also = aliases(method.model)  # a block covers all names of a parameter
    mine = tuple(
        alias
        for name, _ in method.model.get_submodule(layer).named_parameters()
        for whole in [f"{layer}.{name}".removeprefix(".")]
        for alias in sorted(also.get(whole, {whole}))
    )
    body = tuple(
        alias
        for part in _common(method, mine)
        for name in method.layout(part).names
        if name not in mine
        for alias in sorted(also.get(name, {name}))
    )
    blocks = {HEAD: Block(mine, posterior=FullGaussian(), pool=None)}
    if body:
        blocks["body"] = Block(body, pool=None)
    return Algorithm(
        method.model,
        blocks,
        (),
        parts=tuple(blocks),
        likelihood=method.likelihood,
        predictor=Heads(),
    )


def _common(method: Algorithm, head: tuple[str, ...]) -> tuple[str, ...]:
    """Return the blocks of the network that contains the clients' common body: the clients' own
    predictor, or else the server's network.

    Raises:
        ValueError: There is no common body.
    """
    addressed = method.to_one(method.init(2))[1]

    def shared(part: str) -> bool:
        alone = {*method.layout(part).names} <= {*head}
        return alone or not (method.blocks[part].keep or part in addressed)

    if method.copies(method.parts) is None and all(map(shared, method.parts)):
        return method.parts
    if (parts := method.shared_parts()) is None:
        raise ValueError(
            "clients have no common body, which a common prior of heads needs; choose a method "
            "whose body is the server's, such as fedavg, fedper or pfedvem"
        )
    return parts


def servers_state(before: Algorithm, server: Server, method: Algorithm) -> Server:
    """Return the server's state for a method that trains nothing: the posterior means that another
    method has trained.

    Args:
        before: The method that was trained.
        server: Its server's state.
        method: The method that trains nothing.
    """
    own = method.layout(HEAD).names if HEAD in method.blocks else ()
    parts = _common(before, own)
    held = {name: before.centre(name, server) for name in before.whole(parts)}
    leaves = before.leaves(parts, held)
    return {name: {"loc": method.layout(name).ravel(leaves)} for name in method.blocks}


def trained(algorithm: Algorithm, made_with: Mapping[str, Any]) -> Algorithm:
    """Return the method whose state a run can start from: for a method of `with_heads`, the trained
    one, unless the state itself is from `with_heads`.

    Args:
        algorithm: The method of the run.
        made_with: The identity of the method that made the state.
    """
    anew = isinstance(algorithm.predictor, Heads) and made_with["method"] != with_heads.__name__
    return algorithm.made.options["method"] if anew and algorithm.made else algorithm


def servers(algorithm: Algorithm, rule: Predictor | None) -> Algorithm:
    """Return the method that made a file, given the trained method: if the file is from
    `Result.laplace` or `Result.heads`, the method that these derive from it.

    Args:
        algorithm: The trained method.
        rule: The predictor that the file names.
    """
    if rule is None or not hasattr(rule, "asks") or algorithm.predictor == rule:
        return algorithm
    if isinstance(rule, Heads):
        return with_heads(algorithm)
    return servers_method(algorithm, rule) if algorithm.shared_parts() else algorithm


def predicting(algorithm: Algorithm) -> dict[str, Any]:
    """Describe how a method predicts, as JSON; if predictions use a function or a class of the
    user, only that, under "needs".
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
    """Return the predictor in a description of `predicting`; None if it has none."""
    return made(found.get("predictor"), _KNOWN)


def predictor_of(found: Mapping[str, Any], model: nn.Module) -> Algorithm:
    """Return a method that predicts as `predicting` describes, and trains nothing."""
    blocks = {}
    for name, one in found["blocks"].items():
        posterior = made(one["posterior"], _KNOWN)
        blocks[name] = Block(
            made(one["pattern"], _KNOWN),
            posterior=posterior,
            # A posterior with draws needs a prior, which is unused without training.
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
