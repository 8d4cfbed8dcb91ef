"""The end of a round on the server: the method's `combine` after the pools, also where the server
has not seen single replies.
"""

from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.protocols import Server
from bayesfl.base.trees import flatten
from bayesfl.composition.algorithm import Algorithm


class Unseen:
    """A placeholder for uplinks that the server has not seen; it tells `combine` the numbers of the
    round, of rounds and of clients only.

    Any other use of it raises ValueError.

    Args:
        why: Why the uplinks are missing, the beginning of the error message.
        round: The current round, counted from 0.
        rounds: Number of rounds of the run.
        clients: Number of clients J of the federation.
    """

    def __init__(self, why: str, round: int, rounds: int, clients: int) -> None:
        self._why, self._known = why, {"round": round, "rounds": rounds, "clients": clients}

    def __getitem__(self, name: Any) -> Any:
        return (
            self._known[name]
            if isinstance(name, str) and name in self._known
            else self._refuse(name)
        )

    def _refuse(self, *asked: Any) -> Any:
        raise ValueError(
            f"{self._why}, but the method's `combine` reads {asked[0] if asked else 'them'!r}; "
            "take a method whose server only adds up, or, where it can do without, "
            "dataclasses.replace(algorithm, combine=bf.Algorithm.combine, reports={})"
        )

    __contains__ = __iter__ = __len__ = __getattr__ = _refuse


def check_combine(result: Any, ids: Any, why: str) -> None:
    """Check that the method's `combine` works without the replies of single clients, by calling it
    once with a placeholder for them.

    Args:
        result: The state that the run starts from, a `Result`.
        ids: The clients that `combine` is told of, [clients] int64, or a placeholder if the server
            does not know them either.
        why: The reason that the server does not see single replies, with which the error message
            begins.

    Raises:
        ValueError: `combine` reads a reply, or fails without the replies.
    """
    unseen = Unseen(why, result.round, result.settings.rounds, result.data.clients)
    try:
        combined(result.algorithm, result.server, ids, unseen)
    except (TypeError, IndexError) as error:
        raise ValueError(f"{why}, and the method's `combine` fails without it: {error}") from error


def combined(algorithm: Algorithm, server: Server, ids: Any, uplink: Any) -> Server:
    """Return what the method's `combine` changes on the server.

    Raises:
        ValueError: `combine` changes what it is given.
    """
    given = tree_map(lambda t: t, server)  # in new mappings
    versions = [t._version for t in tree_leaves(server)]
    changed = algorithm.combine(given, ids, uplink)
    before, after = flatten(server), flatten(given)
    assigned = before.keys() != after.keys() or any(before[key] is not after[key] for key in before)
    if assigned or versions != [t._version for t in tree_leaves(server)]:
        raise ValueError(
            "`combine` changes the server's state in place, which earlier results share; return "
            "new tensors, as {'k': server['k'] + 1}"
        )
    return changed
