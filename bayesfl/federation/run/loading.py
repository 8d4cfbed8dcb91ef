"""Loading of saved runs, with checks against the method and the data for which they are loaded, and
the start of a run from the state that another run has reached: next month's rows, further clients.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.archive import CheckpointError
from bayesfl.base.described import in_words
from bayesfl.base.files import folder
from bayesfl.base.options import declared
from bayesfl.base.protocols import Server, View
from bayesfl.base.trees import alike, flatten
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.pools import Mixed
from bayesfl.data import FederatedData
from bayesfl.data.names import generated
from bayesfl.federation.clients.local import State, private_rows
from bayesfl.federation.clients.pooling import rule_of, servers
from bayesfl.federation.run.record import Run
from bayesfl.federation.run.result import Result
from bayesfl.federation.settings import Federation, Method, present
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import (
    identity,
    refuse_differences,
    same_method,
    same_network,
)

log = logging.getLogger(__name__)


@declared
def load(
    path: str | os.PathLike[str],
    algorithm: Method,
    clients: Federation | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Result:
    """Load a saved run.

    Without data the result has its history, settings and server, and the models of clients that
    need no training data to predict; with data it has everything.

    Args:
        path: The folder that `Result.save` wrote, or the folder of `simulate`'s checkpoints, of
            which the newest undamaged one is loaded.
        algorithm: The method that made the run.
        clients: The data on which the run was made; None to load it without.
        device: The device for its state.

    Raises:
        TypeError: `algorithm` is not an `Algorithm`, or `clients` is not a `FederatedData`.
        ValueError: The device is absent.
        CheckpointError: The folder holds no run of `simulate`, or one that is damaged or was made
            with another method or on other data, or names of its columns or classes.

    Example:
        >>> import tempfile
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bf.simulate(method, clients, rounds=1).save(folder)
        ...     result = bf.load(folder, method, clients)
        >>> result.round
        1
    """
    result, made_with = _read(path, algorithm, device)
    algorithm = result.algorithm
    same_method(repr(str(path)), made_with, algorithm)
    check_state(repr(str(path)), result, result.private, stacked=True, novel=result.novel)
    return result if clients is None else on(result, clients, repr(str(path)))


@singledispatch
def reloaded(run: Any, path: str | os.PathLike[str]) -> Any:
    """Return a state of the run, a `Result` or one of another kind that has registered how it is
    read, that its `save` wrote.

    Raises:
        CheckpointError: See `load`.
    """
    return load(path, run.algorithm, run.data, device=run.device)


def started(
    start: Result | str | os.PathLike[str], algorithm: Algorithm, device: torch.device
) -> Result:
    """Return the run from whose state another begins, of this method's network and with its
    tensors; the method's options may differ.

    Raises:
        TypeError: `start` is neither a result nor a folder.
        CheckpointError: The folder holds no run, or the state is one of another network or of
            another shape.
    """
    what = "start" if isinstance(start, Result) else repr(str(start))
    found, made_with = (
        (start, identity(start.algorithm))
        if isinstance(start, Result)
        else _read(folder("start", start), algorithm, device)
    )
    same_network(what, made_with, algorithm)
    check_state(
        what, replace(found, algorithm=algorithm), found.private, stacked=True, novel=found.novel
    )
    return found


def _read(
    path: str | os.PathLike[str], algorithm: Algorithm, device: torch.device | str
) -> tuple[Result, dict[str, Any]]:
    """Return a saved run as its file has it, and the identity of the method that made it."""
    device = present(device)
    found = files.read(path, files.RUN, device)
    algorithm = servers(algorithm, rule_of(found.pop("predicting")))
    return Result(device=device, **{**found, "algorithm": algorithm}), found["algorithm"]


def on(result: Result, clients: FederatedData, what: str) -> Result:
    """Return a result with the data on which it was made."""
    refuse_differences(
        f"{what} was made on other data:",
        result.known.outline.differences(clients.outline),
        "give the same recipe and seed, with the same names of columns and classes, and the same "
        "functions of inputs in every split",
    )
    return replace(result, known=clients)


def check_state(what: str, run: Run, private: View, *, stacked: bool, novel: bool = False) -> None:
    """Check that a run has the tensors that its method keeps, with their dtypes and shapes.

    What a method holds on the server may have other lengths along some axes, see
    `Algorithm.free`.

    Args:
        what: What the run is, for the message.
        run: The run.
        private: Its clients' private states.
        stacked: Whether these are the rows of all clients, [J, ...], and not the state of one.
        novel: Whether the clients joined after training.

    Raises:
        CheckpointError: A tensor is missing or unknown, or has another dtype or shape.
    """
    algorithm, clients = run.algorithm, len(run.called)
    start = algorithm.init(clients, dtype=run.dtype)
    start = algorithm.newcomers(start, clients) if novel else start
    own = algorithm.rows(start)
    own = tree_map(lambda t: t.expand(clients, *t.shape), own) if stacked else own
    wanted = flatten({"server": start, "private": own})
    found = flatten({"server": run.server, "private": private})

    def fits(name: str) -> bool:
        free = algorithm.free(clients).get(name.removeprefix("server."), 0)
        return name in wanted and name in found and alike(wanted[name], found[name], free=free)

    def picture(name: str, tensors: dict[str, Any]) -> str:
        return f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "absent"

    if wrong := sorted(name for name in wanted.keys() | found.keys() if not fits(name)):
        raise CheckpointError(
            f"{what} holds another state than the method keeps: {wrong[0]} is "
            f"{picture(wrong[0], found)}, not {picture(wrong[0], wanted)}"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        )


def from_where(
    start: Result | str | os.PathLike[str],
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
