"""A client's or the server's network at the posterior means, as a separate module."""

import torch
from torch import Tensor, nn

from bayesfl.base.protocols import Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.predictors import Mixture
from bayesfl.models.copies import duplicate, refuse_changed


def module_at(algorithm: Algorithm, parts: tuple[str, ...], view: View) -> nn.Module:
    """Return the method's network at the posterior means, as a separate module in evaluation mode;
    frozen parameters stay frozen.

    For blocks with copies, it is the only copy with weight in the view's mixture.

    Args:
        algorithm: The method.
        parts: Names of the blocks that make the network.
        view: Posteriors of these blocks [...], "n", and the entries that the method's predictor
            reads.

    Raises:
        ValueError: Several copies of a block predict together.
    """
    if (copies := algorithm.copies(parts)) is not None:
        rule = algorithm.predictor
        weighted = (
            view[rule.weights].nonzero().flatten().tolist()
            if isinstance(rule, Mixture)
            else range(copies)
        )
        if len(weighted) != 1:
            raise ValueError(
                f"there is no single network: {len(weighted)} of {copies} copies predict together; "
                "use predict(x), which averages over them"
            )
        view = algorithm.of_copy(parts, view, weighted[0])
    refuse_changed(algorithm.model)
    network = duplicate(algorithm.network(view, parts))
    for part in parts:
        for name in algorithm.layout(part).names:
            network.get_parameter(name).requires_grad_(True)
    return network.eval()


def server_module(algorithm: Algorithm, server: Server, clients: int, like: Tensor) -> nn.Module:
    """Return the server's network at the posterior means, as a separate module in evaluation mode.

    Args:
        algorithm: The method.
        server: The server's state.
        clients: Number of clients.
        like: A tensor with the precision and the device of the state.

    Raises:
        ValueError: The server has no complete network, or several.
    """
    if (parts := algorithm.shared_parts()) is None:
        raise ValueError(
            "the server has no complete network: parts of it stay with the clients, or clients mix "
            "several networks; use a client's own, result.client(name)"
        )
    own = algorithm.address(server, torch.arange(clients, device=like.device))
    if any(bool((t != t[:1]).any()) for name in parts for t in own.get(name, {}).values()):
        raise ValueError(
            "the server has several networks, one for each cluster of clients; use a client's own, "
            "result.client(name)"
        )
    return module_at(
        algorithm,
        parts,
        {name: algorithm.centre(name, server) for name in algorithm.whole(parts)} | {"n": like},
    )
