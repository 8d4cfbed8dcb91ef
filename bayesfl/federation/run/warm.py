"""The start of a run from the state that another run has reached: next month's rows, further
clients, another learning rate.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.described import in_words
from bayesfl.base.protocols import Server
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.pools import Mixed
from bayesfl.data import FederatedData
from bayesfl.data.names import generated
from bayesfl.federation.clients.local import State, private_rows
from bayesfl.federation.run.loading import started
from bayesfl.federation.run.record import Run
from bayesfl.federation.run.result import Result

log = logging.getLogger(__name__)


def from_where(
    start: "Result | str | os.PathLike[str]",
    algorithm: Algorithm,
    clients: FederatedData,
    *,
    seed: int,
    device: torch.device,
) -> Result:
    """Return the run from whose state another begins, with a warning if its seed is the same.

    Raises:
        TypeError: `start` is neither a result nor a folder.
        ValueError: The data are of another problem than those of the run: inputs, outputs, task,
            or names of columns or classes differ.
        CheckpointError: The folder holds no run that this method could have reached, or the run is
            of another network.
    """
    found = started(start, algorithm, device)
    known, now = found.known.schema, clients.schema
    known.refuse_other("clients", replace(now, tensors=known.tensors, transform=known.transform))
    if other := in_words(known.differences(replace(now, tensors=known.tensors))):
        warn(f"clients has another function of inputs, {other}: the start was trained on others")
    warn_of_seed(found.settings.seed, seed)
    return found


def refuse_other_start(folder: str | os.PathLike[str] | None, began: str, given: str) -> None:
    """Raise ValueError if what the run in a folder of checkpoints began from is not what `start` is
    now, by their words.
    """
    if began != given:
        raise ValueError(
            f"checkpoint folder {str(folder)!r} holds a run that began from {began}, and start is "
            f"{given}; pass another folder for a run that begins from start, or leave start out to "
            "go on with the one that is there"
        )


def begun(
    before: Run | None,
    algorithm: Algorithm,
    names: Sequence[str],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device = torch.device("cpu"),
) -> tuple[Server, Tensor, Tensor]:
    """Return the server's state with which a run of the clients `names` begins, the places of known
    clients, and their places in the run before, [known] int64 each.

    Clients are matched by name. What the server has learnt stays; its entries for single clients go
    to the clients of the same name. New clients begin as clients never seen in training, see
    `Algorithm.newcomers`.

    Raises:
        ValueError: Clients have the same name.
    """
    clients = len(names)
    fresh = algorithm.init(clients, seed=seed, dtype=dtype, device=device)
    if before is None:
        return fresh, torch.arange(0), torch.arange(0)
    new, old = matched(algorithm, names, before.called)
    more = algorithm.init(clients + 1, dtype=dtype, device=device)
    server = tree_map(lambda like, t: t.to(like, copy=True), fresh, before.server)
    novel = algorithm.newcomers(server, clients)
    for name, block in algorithm.blocks.items():
        if isinstance(block.pool, Mixed):  # in a run everyone has a model, new clients the mean
            novel[name] = block.pool.start({"loc": novel[name]["loc"]}, clients)
    carried = tree_map(
        lambda one, two, now, then: _moved(one, two, now, then, new, old),
        fresh,
        more,
        novel,
        server,
    )
    return carried, new, old


def continued(
    before: Result | None,
    algorithm: Algorithm,
    names: Sequence[str],
    *,
    seed: int = 0,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[State, np.ndarray]:
    """Return the state from which a run of the clients `names` on this machine begins, and which of
    them are to adapt to it, [new]; private states go to the clients of the same name, see `begun`.

    Raises:
        ValueError: Clients have the same name.
    """
    server, known, old = begun(before, algorithm, names, seed=seed, dtype=dtype, device=device)
    rows = private_rows(algorithm, server, len(names))
    if before is None:
        return State(server, rows, 0), np.arange(0)
    tree_map(
        lambda kept, was: kept.index_copy_(
            0, known.to(device), was.index_select(0, old.to(was.device)).to(kept)
        ),
        rows,
        before.private,
    )
    return State(server, rows, 0), np.setdiff1d(np.arange(len(names)), known.numpy())


def warn_of_seed(before: int, seed: int) -> None:
    """Warn if a run has the seed of the one that it starts from."""
    if before == seed:
        warn(
            f"seed {seed} is that of the run that this one starts from: batches and draws repeat "
            "those of its first rounds; pass another",
        )


def matched(
    algorithm: Algorithm, names: Sequence[str], before: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return the places of known clients among `names`, and their places in the run before, [known]
    int64 each.

    Clients are matched by name, and by number, with a warning, where names of the run before are
    not known. Under a method's `tally` none is known where one is gone: the server cannot take what
    that one keeps out of its mean.

    Args:
        algorithm: The method.
        names: The clients' names.
        before: Those of the run before; empty text where a name is not known.

    Raises:
        ValueError: Clients have the same name.
    """
    if not all(before):
        warn("the names of clients in the run before are not known: clients are matched by number")
        gone = algorithm.tally and len(names) < len(before)
        both = torch.arange(0 if gone else min(len(names), len(before)))
        return both, both
    for when, of in (("", names), ("in the run before ", before)):
        if twice := repeated(of):
            raise ValueError(
                f"start matches clients by name, and {when}{twice}; give each a name of its own, "
                "as from_arrays(client_ids=...) does; over Flower, a run that begins from "
                "dataclasses.replace(bayesfl.flower.load(folder, algorithm), names=()) matches "
                "clients by number"
            )
    places = {name: place for place, name in enumerate(before)}
    new = [place for place, name in enumerate(names) if name in places]
    log.info("%d of %d clients are known from the run before", len(new), len(names))
    nameless = all(list(of) == generated(len(of)) for of in (names, before))
    if nameless and len(names) != len(before):
        warn(
            f"the run before has {len(before)} clients and this one {len(names)}, none with a name "
            "of its own: they are matched by their places ('client 0' with 'client 0'), which "
            "mixes them up if one has left or joined before others; pass names=, or client_ids=, "
            "to both runs, or here the names that the same clients had there",
        )
    fresh, lost = [name for name in names if name not in places], sorted(set(before) - set(names))
    if new and fresh and lost:
        warn(
            f"clients {fresh[:5]} are new and {lost[:5]} of the run before are gone; give any "
            "that were only renamed their old names",
        )
    if not new:
        warn(
            "no client has the name of one in the run that this one starts from; all begin as new "
            "ones"
        )
    if algorithm.tally and len(new) < len(before):
        warn(
            f"clients {lost[:5]} of the run before are gone, and the server holds a mean of what "
            "all of them kept: all clients begin as new ones"
        )
        new = []
    return torch.tensor(new, dtype=torch.int64), torch.tensor(
        [places[names[place]] for place in new], dtype=torch.int64
    )


def repeated(names: Sequence[str]) -> str:
    """Say which clients have the same name, as `clients [0, 2] are all called 'ward'`; empty where
    none do.
    """
    name, count = Counter(names).most_common(1)[0]
    return (
        f"clients {[j for j, other in enumerate(names) if other == name]} are all called {name!r}"
        if count > 1
        else ""
    )


def _moved(one: Tensor, two: Tensor, now: Tensor, then: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the server's tensor `now` with the rows of known clients, along each axis that counts
    clients.

    Args:
        one: The tensor at the start of a run of as many clients.
        two: The same for one client more.
        now: The tensor as clients never seen in training meet it.
        then: The tensor of the run before.
        new: Places of known clients now.
        old: Their places then.
    """
    axes = [
        axis
        for axis in range(one.dim())
        if one.dim() == two.dim() and one.shape[axis] != two.shape[axis]
    ]
    if not axes or any(not then.shape[axis] for axis in axes):
        # Nothing of single clients, or all of them were new themselves.
        return now
    for axis in axes:
        then = then.index_select(axis, old.to(then.device))
    sizes = enumerate(now.shape)
    places = (new if axis in axes else torch.arange(size) for axis, size in sizes)
    at = torch.meshgrid(*(place.to(now.device) for place in places), indexing="ij")
    return now.index_put(at, then)
