"""The method by which clients predict with the posterior of the server's model on the rows of
all.
"""

from bayesfl.base.protocols import Predictor, Server
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block


def servers_method(algorithm: Algorithm, rule: Predictor) -> Algorithm:
    """Return a method by which all clients predict with the server's model and its pooled
    posterior, and which trains nothing.

    Args:
        algorithm: A method that has one network on the server.
        rule: The predictor.
    """
    parts = algorithm.shared_parts()
    assert parts is not None  # as the server has a network
    return Algorithm(
        algorithm.model,
        {name: Block(algorithm.blocks[name].pattern) for name in parts},
        (),
        parts=parts,
        likelihood=algorithm.likelihood,
        predictor=rule,
    )


def servers(algorithm: Algorithm, rule: Predictor | None) -> Algorithm:
    """Return the method that made a file, of the one that is given: the `servers_method` of the one
    that trained, where the file is of its `Result.laplace`.

    Args:
        algorithm: The method that is given.
        rule: The predictor that the file tells of.
    """
    if rule is None or not hasattr(rule, "asks") or algorithm.predictor == rule:
        return algorithm
    return servers_method(algorithm, rule) if algorithm.shared_parts() else algorithm


def servers_state(algorithm: Algorithm, server: Server) -> Server:
    """Return the state of the server for its `servers_method`: the means of its beliefs."""
    parts = algorithm.shared_parts()
    assert parts is not None
    return {name: {"loc": algorithm.centre(name, server)["loc"]} for name in algorithm.whole(parts)}
