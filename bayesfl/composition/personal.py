"""Personal models in addition to a method's own model, for any method that sends one model to
everyone.
"""

from collections.abc import Iterable
from dataclasses import replace

from bayesfl.base.protocols import Batch, Prior, Server, View
from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block
from bayesfl.composition.phases import Once, Phase, Repeat, trained
from bayesfl.composition.priors import Flat


@options.method()
def with_personal(
    method: Algorithm,
    *phases: Phase | Repeat,
    prior: Prior = Flat(),
    restart: bool = False,
    adapt: tuple[Phase | Repeat, ...] | None = None,
) -> Algorithm:
    """Give every client a personal model beside the method's, trained by `phases` after the
    method's own; clients predict with it.

    The new block has the name that the phases' energies give it, covers what the method's predictor
    covers, stays on the client, and is kept from round to round. The method itself is not affected.

    Args:
        method: The method that trains the model that everyone receives.
        phases: Phases that train the personal model, as `Descend(Energy("v", ("v",),
            likelihood="mean"))`.
        prior: Prior of the personal model, as `Normal(centre=server_mean("w"),
            variance=inverse_size(lam))`; by default none.
        restart: Whether the personal model starts each round anew from the model received in that
            round.
        adapt: Phases of a client that joins later, which start from the model that it receives;
            `phases` where None.

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
            "the method fine-tunes its model, or predicts by a predictor, neither of which a "
            "personal model would do; take a method without, as dataclasses.replace(method, "
            "finetune=(), predictor=None)"
        )
    shared = method.shared_parts()
    common, _ = method.to_one(method.init(1))
    if shared is None or not all(part in common for part in shared):
        raise ValueError(
            f"the method {method!r} sends no single model to everyone, to which a personal one "
            "could be tied or start from"
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
            f"parts {method.parts} leave out some parameters of the model, and no one pattern "
            "covers what they have"
        )
    return made


def _new_blocks(method: Algorithm, phases: Iterable[Phase | Repeat]) -> list[str]:
    """Return the blocks that phases train and the method does not have, each once."""
    named = dict.fromkeys(name for phase in phases for name in trained(phase))
    return [name for name in named if name not in method.blocks]
