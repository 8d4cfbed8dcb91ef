"""Changes of a method: an optimiser on the server, and personal models in addition to the common
one.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Batch, Prior, Server, Uplink, View
from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.phases import Once, Phase, Repeat, trained
from bayesfl.composition.priors import Flat
from bayesfl.optim import Optimiser, check_optimiser, rate_at

OPTIMISER_STATE = "server_optimiser"


@options.method()
def with_server_optimiser(
    algorithm: Algorithm, optimiser: Annotated[Optimiser, check_optimiser]
) -> Algorithm:
    """Add an optimiser on the server, which treats each round's change of the model as a gradient.

        w <- update(w, w - pooled)

    is the step for every block that is gathered. Statistics of norms stay as pooled, because a step
    of Adam could make a variance negative. `SGD(1.0)` gives the method itself. If clients take one
    plain gradient step of rate 1, the gradient is that of the mean of their objectives under the
    pool's weights. With weights $n_j / n$, mean losses and all clients in the cohort, that is the
    mean loss of all data together. A penalty is averaged in the same way, not summed, see
    `bayesfl.algorithms.irm`.

    Args:
        algorithm: The method; its own `combine` changes the blocks first.
        optimiser: One of `bayesfl.optim`. Its state and the blocks before the round stay on the
            server.

    Raises:
        ValueError: The method makes the server's state from clients' private states (PVI, FedEP).
            At the start of a run: the method already has an optimiser on the server, or
            sends different models to clients or clusters (D-FedEM, FedPAC, clustered FL); a step on
            the gathered block would not change these.

    References:
        Reddi et al., "Adaptive federated optimization", ICLR 2021, algorithm 1. FedAdam's own step
        has no bias correction.

    Example:
        >>> plain = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> fedadam = bf.with_server_optimiser(plain, bf.optim.Adam(0.01))
        >>> list(fedadam.init(1))
        ['w', 'server_optimiser']
    """
    if algorithm.rebuild is not None:
        raise ValueError(
            "the method makes the server's state from clients' private states, such as factors, "
            "which a step of an optimiser on the server would not change: leave the optimiser out"
        )
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
        common, addressed = algorithm.to_one(algorithm.redrawn({**blocks, **own}, seed=0, round=0))
        if apart := [name for name in gathered if name not in common or name in addressed]:
            raise ValueError(
                "an optimiser on the server changes blocks that all clients receive, but this "
                f"method sends different {apart} to some clients; leave the optimiser out"
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


@options.method()
def with_personal(
    method: Algorithm,
    *phases: Phase | Repeat,
    prior: Prior = Flat(),
    restart: bool = False,
    adapt: tuple[Phase | Repeat, ...] | None = None,
) -> Algorithm:
    """Give every client a personal model in addition to the method's, trained by `phases` after the
    method's own; clients predict with it.

    The new block has the name in the phases' energies, covers the parameters of the method's
    predictor, stays on the client, and is kept from round to round. The method itself does not
    change.

    Args:
        method: The method that trains the model that everyone receives.
        phases: Phases that train the personal model, as `Descend(Energy("v", ("v",),
            likelihood="mean"))`.
        prior: Prior of the personal model, as `Normal(centre=server_mean("w"),
            variance=inverse_size(lam))`; by default none.
        restart: Whether the personal model starts each round from the model received in that round.
        adapt: Phases of a client that joins later, from the model that it receives; None for
            `phases`.

    Returns:
        The method with one more block.

    Raises:
        ValueError: The phases do not train exactly one new block; no single pattern covers the
            parameters of the method's predictor; no single model is sent to everyone; or the method
            has fine-tuning phases or a predictor, which would be lost.

    Example:
        >>> plain = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> own = bf.Descend(bf.Energy("v", ("v",), likelihood="mean"), batch_size=50)
        >>> method = bf.with_personal(plain, own)
        >>> list(method.blocks), method.parts
        (['w', 'v'], ('v',))
    """
    names, later = _new_blocks(method, phases), _new_blocks(method, adapt or ())
    if len(names) != 1 or set(later) - set(names):
        found = list(dict.fromkeys(names + later)) or "none"
        raise ValueError(
            f"phases must train one block that the method does not have, got {found} beside "
            f"{list(method.blocks)}; name it in their energies, as Energy('v', ('v',), "
            "likelihood='mean')"
        )
    (name,) = names
    if method.finetune or method.predictor is not None:
        raise ValueError(
            "the method fine-tunes its model, or has a predictor, and a personal model would use "
            "neither; remove them by dataclasses.replace(method, finetune=(), predictor=None)"
        )
    shared = method.shared_parts()
    common, _ = method.to_one(method.init(1))
    if shared is None or not all(part in common for part in shared):
        raise ValueError(
            f"the method {method!r} sends no single model to all clients, from which personal "
            "models could start"
        )
    pattern = method.blocks[method.parts[0]].pattern if len(method.parts) == 1 else "*"
    block = Block(pattern, prior=prior, pool=None, keep=True)

    def start(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        leaves = algorithm.leaves(shared, given)
        own = {
            one: algorithm.belief(one, {"loc": algorithm.layout(one).ravel(leaves)})
            for one in algorithm.whole((name,))
        }
        return view | own

    again = (Once(start),)
    made = replace(
        method,
        blocks={**method.blocks, name: block},
        phases=(*method.phases, *(again if restart else ()), *phases),
        parts=(name,),
        adapt=again + (phases if adapt is None else tuple(adapt)),
    )
    if set(made.layout(name).names) != {
        p for part in method.parts for p in method.layout(part).names
    }:
        raise ValueError(
            f"parts {method.parts} leave out some parameters of the model, and no single pattern "
            "covers the others"
        )
    return made


def _new_blocks(method: Algorithm, phases: Iterable[Phase | Repeat]) -> list[str]:
    """Return the blocks that phases train and that the method does not have, each once."""
    named = dict.fromkeys(name for phase in phases for name in trained(phase))
    return [name for name in named if name not in method.blocks]
