"""An optimiser on the server, which treats the mean change of a round as a gradient, for any method
that sends everyone the same.
"""

from dataclasses import replace
from typing import Annotated, Any

from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Server, Uplink
from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.buffers import Buffers
from bayesfl.optim import Optimiser, check_optimiser, rate_at

OPTIMISER_STATE = "server_optimiser"


@options.method()
def with_server_optimiser(
    algorithm: Algorithm, optimiser: Annotated[Optimiser, check_optimiser]
) -> Algorithm:
    """Add an optimiser on the server, which treats each round's change of the model as a gradient.

        w <- update(w, w - pooled)

    is the step for every block that is gathered. Statistics of norms stay as pooled, since a step
    of Adam could take a variance below 0. `SGD(1.0)` gives the method itself. Where clients take
    one plain gradient step of rate 1, the gradient is that of their objectives' mean under the
    pool's weights. With weights n_j / n, mean losses and everyone taking part, this is the mean
    loss of all data together; a penalty is averaged in the same way, not added up, see
    `bayesfl.algorithms.irm`.

    Args:
        algorithm: The method; its own `combine` changes the blocks first.
        optimiser: One of `bayesfl.optim`. Its state, and the blocks as they were sent out, stay on
            the server.

    Raises:
        ValueError: At the start of a run: the method already has an optimiser on the server, or
            sends clients or clusters different models (D-FedEM, FedPAC, clustered FL), which a step
            on the gathered block would not change.

    References:
        Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 1. FedAdam's own step
        has no bias correction.

    Example:
        >>> plain = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> fedadam = bf.with_server_optimiser(plain, bf.optim.Adam(0.01))
        >>> list(fedadam.init(1))
        ['w', 'server_optimiser']
    """
    gathered = [
        name
        for name, block in algorithm.blocks.items()
        if block.pool is not None and not isinstance(block, Buffers)
    ]

    def entries(server: Server) -> Server:
        return {name: server[name] for name in gathered}

    def kept(now: Server, state: Any) -> Server:
        return {"before": now} if state is None else {"before": now, "state": state}

    def start(blocks: Server, clients: int) -> Server:
        now, own = entries(blocks), algorithm.server(blocks, clients)
        common, addressed = algorithm.to_one({**blocks, **own})
        if apart := [name for name in gathered if name not in common or name in addressed]:
            raise ValueError(
                "an optimiser on the server steps what is sent to everyone alike, and of this "
                f"method {apart} are not: some clients get others; leave the optimiser out"
            )
        return {**own, OPTIMISER_STATE: kept(now, optimiser.init(now))}

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        own = {name: entry for name, entry in server.items() if name != OPTIMISER_STATE}
        changed = algorithm.combine(own, ids, uplink)
        last = server[OPTIMISER_STATE]
        before, after = last["before"], entries(own | changed)
        gradient = tree_map(lambda old, new: old - new, before, after)
        rate = rate_at(optimiser.rate, uplink["round"], uplink["rounds"])
        now, state = optimiser.update(before, gradient, last.get("state"), rate)
        return {**changed, **now, OPTIMISER_STATE: kept(now, state)}

    return replace(algorithm, server=start, combine=combine)
