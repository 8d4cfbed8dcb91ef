"""The start of a run from the state that another run has reached: next month's rows, further clients, another learning rate."""

import logging
import os
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Server
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.pools import Mixed
from bayesfl.data import FederatedData
from bayesfl.data.names import generated
from bayesfl.federation.client import State, private_rows
from bayesfl.federation.identity import check_network, identity
from bayesfl.federation.result import Result
from bayesfl.federation.saved import check_state, opened
from bayesfl.federation.settings import same_problem

log = logging.getLogger(__name__)


def from_where(
    start: "Result | str | os.PathLike[str]", algorithm: Algorithm, clients: FederatedData, *, seed: int, device: torch.device
) -> Result:
    """Return the run from whose state another begins, with a warning if its seed is the same.

    Raises:
        TypeError: `start` is neither a result nor a folder.
        ValueError: The data are of another problem than those of the run, see `same_problem`.
        CheckpointError: The folder holds no run that this method could have reached, or the run is of another network.
    """
    if not isinstance(start, Result | str | os.PathLike):
        raise TypeError(f"start must be a Result or the folder of a saved one, got {type(start).__name__}")
    if isinstance(start, Result):
        check_network("start", identity(start.algorithm), algorithm)
    found = start if isinstance(start, Result) else opened(start, algorithm, device)
    same_problem("clients", clients, found.known)
    warn_of_seed(found.settings.seed, seed)
    return found


def continued(
    start: Result, algorithm: Algorithm, names: Sequence[str], *, dtype: torch.dtype, device: torch.device
) -> tuple[State, np.ndarray]:
    """Return the state from which a run of the clients `names` begins, and which of them are new, [new].

    Clients are matched by name. What the server has learnt stays; its entries for single clients, and the clients' private states, go to
    the clients of the same name. New clients begin as clients never seen in training, see `Algorithm.newcomers`.

    Args:
        start: The run that was done before.
        algorithm: The method, whose state must have the same shapes; its options may differ.
        names: The clients' names.
        dtype: The run's precision.
        device: The run's device.

    Raises:
        CheckpointError: The method keeps other tensors than the run before has; the message names the first.
    """
    before = {name: place for place, name in enumerate(start.known.client_names)}
    new, old = (torch.tensor(found, dtype=torch.int64) for found in _matched(names, before))
    known = start.known.clients
    check_state("start", algorithm, start.server, start.private, clients=known, dtype=start.dtype, stacked=True, novel=start.novel)
    moved = carried(start.server, algorithm, len(names), new, old, dtype=dtype, device=device)
    rows = private_rows(algorithm, moved, len(names))
    tree_map(lambda kept, was: kept.index_copy_(0, new.to(device), was.index_select(0, old.to(was.device)).to(kept)), rows, start.private)
    fresh_ids = np.setdiff1d(np.arange(len(names)), new.numpy())
    log.info("%d of %d clients are known from the run before", len(new), len(names))
    if list(names) == generated(len(names)) and list(before) == generated(known):
        if len(names) == known:
            log.info("no client has a name of its own: they are matched by their places")
        else:
            warnings.warn(
                f"the run before has {known} clients and this one {len(names)}, none with a name of its own: they are matched by their "
                "places ('client 0' with 'client 0'), which mixes them up if one has left or joined before others; pass names=, or "
                "client_ids=, to both runs, or here the names that the same clients had there",
                stacklevel=3,
            )
    lost = sorted(set(before) - set(names))
    if len(new) and len(fresh_ids) and lost:
        warnings.warn(
            f"clients {[names[j] for j in fresh_ids[:5]]} are new and {lost[:5]} of the run before are gone; give any that were only "
            "renamed their old names",
            stacklevel=3,
        )
    if not len(new):
        warnings.warn("no client has the name of one in the run that this one starts from; all begin as new ones", stacklevel=3)
    return State(moved, rows, 0), fresh_ids


def carried(
    server: Server, algorithm: Algorithm, clients: int, new: Tensor, old: Tensor, *, dtype: torch.dtype, device: torch.device
) -> Server:
    """Return the server's state of the run before as a run of `clients` begins with it.

    Args:
        server: The state.
        algorithm: The method.
        clients: Number of clients now.
        new: Places of known clients now, [known].
        old: Their places in the run before, [known].
        dtype: The run's precision.
        device: The run's device.
    """
    fresh, more = (algorithm.init(count, dtype=dtype, device=device) for count in (clients, clients + 1))
    server = tree_map(lambda like, t: t.to(like, copy=True), fresh, server)
    novel = algorithm.newcomers(server, clients)
    for name, block in algorithm.blocks.items():
        if isinstance(block.pool, Mixed):  # in a run everyone has a model, new clients the mean
            novel[name] = block.pool.start({"loc": novel[name]["loc"]}, clients)
    return tree_map(lambda one, two, now, then: _moved(one, two, now, then, new, old), fresh, more, novel, server)


def warn_of_seed(before: int, seed: int) -> None:
    """Warn if a run has the seed of the one that it starts from."""
    if before == seed:
        warnings.warn(
            f"seed {seed} is that of the run that this one starts from: batches and draws repeat those of its first rounds; pass another",
            stacklevel=4,
        )


def _matched(names: Sequence[str], before: dict[str, int]) -> tuple[list[int], list[int]]:
    """Return the places of the known clients among `names`, and their places before."""
    new = [place for place, name in enumerate(names) if name in before]
    return new, [before[names[place]] for place in new]


def _moved(one: Tensor, two: Tensor, now: Tensor, then: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the server's tensor `now` with the rows of known clients, along each axis that counts clients.

    Args:
        one: The tensor at the start of a run of as many clients.
        two: The same for one client more.
        now: The tensor as clients never seen in training meet it.
        then: The tensor of the run before.
        new: Places of known clients now.
        old: Their places then.
    """
    axes = [axis for axis in range(one.dim()) if one.dim() == two.dim() and one.shape[axis] != two.shape[axis]]
    if not axes or any(not then.shape[axis] for axis in axes):  # nothing of single clients, or all of them were new themselves
        return now
    for axis in axes:
        then = then.index_select(axis, old.to(then.device))
    return _put(now, then, axes, new.to(now.device))


def _put(into: Tensor, out: Tensor, axes: Sequence[int], places: Tensor) -> Tensor:
    """Return `into` with `out` at the same places along each of several axes."""
    first, *rest = axes
    return into.index_copy(first, places, _put(into.index_select(first, places), out, rest, places) if rest else out)
