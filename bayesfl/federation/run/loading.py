"""Loading of saved runs, with checks against the method and the data, and starting a run from the
state of another run, for example with next month's rows or further clients.
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
    need no training data to predict; with data it is complete.

    Args:
        path: The folder that `Result.save` wrote, or the folder of `simulate`'s checkpoints; the
            newest undamaged checkpoint is loaded.
        algorithm: The method that made the run.
        clients: The run's data; None to load it without data.
        device: The device for its state.

    Raises:
        TypeError: `algorithm` is not an `Algorithm`, or `clients` is not a `FederatedData`.
        ValueError: The device does not exist.
        CheckpointError: The folder contains no run of `simulate`, or the run is damaged or was made
            with another method, other data or other names of columns or classes.

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
    """Load a state that the run's `save` wrote; a `Result`, or another type with a registered
    loader.

    Raises:
        CheckpointError: See `load`.
    """
    return load(path, run.algorithm, run.data, device=run.device)


def started(
    start: Result | str | os.PathLike[str], algorithm: Algorithm, device: torch.device
) -> Result:
    """Return the run from whose state another starts, after checking that its network and tensors
    fit this method; the method's options may differ.

    Raises:
        TypeError: `start` is neither a result nor a folder.
        CheckpointError: The folder contains no run, or the state belongs to another network or has
            other shapes.
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
    """Return a run as stored in a file, and the identity of the method that made it."""
    device = present(device)
    found = files.read(path, files.RUN, device)
    algorithm = servers(algorithm, rule_of(found.pop("predicting")))
    return Result(device=device, **{**found, "algorithm": algorithm}), found["algorithm"]


def on(result: Result, clients: FederatedData, what: str) -> Result:
    """Return a result together with its data."""
    refuse_differences(
        f"{what} was made on other data:",
        result.known.outline.differences(clients.outline),
        "pass the same recipe and seed, with the same names of columns and classes, and the same "
        "functions of inputs in every split",
    )
    return replace(result, known=clients)


def check_state(what: str, run: Run, private: View, *, stacked: bool, novel: bool = False) -> None:
    """Check that a run has the tensors that its method keeps, with their dtypes and shapes.

    Some axes of the server's tensors may have other lengths, see `Algorithm.free`.

    Args:
        what: Description of the run, for the message.
        run: The run.
        private: Its clients' private states.
        stacked: Whether these are the rows of all clients, [J, ...], instead of one client's state.
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
            f"{what} has another state than the method keeps: {wrong[0]} is "
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
    """Return the run from whose state another starts; warn if the seeds are the same.

    Raises:
        TypeError: `start` is neither a result nor a folder.
        ValueError: The data belong to another problem: inputs, outputs, task, or names of columns
            or classes differ.
        CheckpointError: The folder contains no run that this method could have made, or the run has
            another network.
    """
    found = started(start, algorithm, device)
    known, now = found.known.schema, clients.schema
    known.refuse_other("clients", replace(now, tensors=known.tensors, transform=known.transform))
    if other := in_words(known.differences(replace(now, tensors=known.tensors))):
        warn(f"clients has another function of inputs than the run in start: {other}")
    warn_of_seed(found.settings.seed, seed)
    return found


def refuse_other_start(folder: str | os.PathLike[str] | None, began: str, given: str) -> None:
    """Raise ValueError if a checkpoint's run was started from another state than `start`, by their
    descriptions.
    """
    if began != given:
        raise ValueError(
            f"checkpoint folder {str(folder)!r} has a run that started from {began}, but start is "
            f"{given}; pass another folder for a run that starts from start, or leave start out to "
            "continue the existing run"
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
    """Return the server's initial state in a run of the clients `names`, the places of known
    clients, and their places in the earlier run, [known] int64 each.

    Clients are matched by name. The server keeps what it has learnt; its entries for single clients
    are assigned to the clients of the same name, and its numbers that depend on how many clients
    there are (J itself, 1 / J) are those of this run. New clients start as clients never seen in
    training, see `Algorithm.newcomers`.

    Raises:
        ValueError: Clients have the same name.
    """
    clients = len(names)
    fresh = algorithm.init(clients, seed=seed, dtype=dtype, device=device)
    if before is None:
        return fresh, torch.arange(0), torch.arange(0)
    new, old = matched(algorithm, names, before.called)
    more = algorithm.init(clients + 1, seed=seed, dtype=dtype, device=device)
    server = tree_map(lambda like, t: t.to(like, copy=True), fresh, before.server)
    novel = algorithm.newcomers(server, clients)
    for name, block in algorithm.blocks.items():
        if isinstance(block.pool, Mixed):  # every client in a run has a model, new ones the mean
            novel[name] = block.pool.start({"loc": novel[name]["loc"]}, clients)
    carried = tree_map(
        lambda one, two, now, then: _moved(
            one, two, now, then, new, old, same=clients == len(before.called)
        ),
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
    """Return the initial state in a run of the clients `names` on this machine, and the clients
    that must adapt to it, [new]; private states are matched by name, see `begun`. The method's
    `rebuild` makes entries of the server from them.

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
    if algorithm.rebuild is not None:
        server = server | algorithm.rebuild(server, rows)
    return State(server, rows, 0), np.setdiff1d(np.arange(len(names)), known.numpy())


def warn_of_seed(before: int, seed: int) -> None:
    """Warn if a run has the same seed as the run that it starts from."""
    if before == seed:
        warn(
            f"seed {seed} is also the seed of the run that this one starts from: batches and draws "
            "repeat those of its first rounds; pass another",
        )


def matched(
    algorithm: Algorithm, names: Sequence[str], before: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return the places of known clients among `names`, and their places in the earlier run,
    [known] int64 each.

    Clients are matched by name, or by number, with a warning, if names of the earlier run are
    unknown. Under a method's `tally` without `rebuild` all clients count as new if one has left,
    because the server cannot remove that client's part from its mean.

    Args:
        algorithm: The method.
        names: The clients' names.
        before: The names in the earlier run; empty text if unknown.

    Raises:
        ValueError: Clients have the same name.
    """
    forgets = algorithm.tally and algorithm.rebuild is None
    if not all(before):
        warn("the clients' names in the earlier run are unknown: clients are matched by number")
        gone = forgets and len(names) < len(before)
        both = torch.arange(0 if gone else min(len(names), len(before)))
        return both, both
    for when, of in (("", names), ("in the earlier run ", before)):
        if twice := repeated(of):
            raise ValueError(
                f"start matches clients by name, but {when}{twice}; give each client its own name, "
                "as from_arrays(client_ids=...) does; over Flower, a run that starts from "
                "dataclasses.replace(bayesfl.flower.load(folder, algorithm), names=()) matches "
                "clients by number"
            )
    places = {name: place for place, name in enumerate(before)}
    new = [place for place, name in enumerate(names) if name in places]
    log.info("%d of %d clients are known from the earlier run", len(new), len(names))
    nameless = all(list(of) == generated(len(of)) for of in (names, before))
    if nameless and len(names) != len(before):
        warn(
            f"the earlier run has {len(before)} clients and this one {len(names)}, none with its "
            "own name: they are matched by position ('client 0' with 'client 0'), which is wrong "
            "if a client has left or joined before others; pass names=, or client_ids=, to both "
            "runs, or pass here the names that the clients had there",
        )
    fresh, lost = [name for name in names if name not in places], sorted(set(before) - set(names))
    if fresh and lost:
        warn(
            f"clients {fresh[:5]} are new and {lost[:5]} of the earlier run are missing; use the "
            "old names of clients that were only renamed",
        )
    if forgets and len(new) < len(before):
        warn(
            f"clients {lost[:5]} of the earlier run are missing, and the server has a mean of all "
            "clients' private states: all clients start as new ones"
        )
        new = []
    return torch.tensor(new, dtype=torch.int64), torch.tensor(
        [places[names[place]] for place in new], dtype=torch.int64
    )


def repeated(names: Sequence[str]) -> str:
    """Return a text that names clients with the same name, as `clients [0, 2] are all called
    'ward'`; empty if there are none.
    """
    name, count = Counter(names).most_common(1)[0]
    return (
        f"clients {[j for j, other in enumerate(names) if other == name]} are all called {name!r}"
        if count > 1
        else ""
    )


def _moved(
    one: Tensor, two: Tensor, now: Tensor, then: Tensor, new: Tensor, old: Tensor, *, same: bool
) -> Tensor:
    """Return the server's tensor `now` with the rows of known clients replaced, along each axis
    that counts clients; a number that depends on the number of clients is `one` if that has
    changed.

    Args:
        one: The initial tensor in a run with this number of clients.
        two: The same with one more client.
        now: The tensor for clients never seen in training.
        then: The tensor of the earlier run.
        new: Places of known clients now.
        old: Their places in the earlier run.
        same: Whether there are as many clients as in the earlier run.
    """
    axes = [
        axis
        for axis in range(one.dim())
        if one.dim() == two.dim() and one.shape[axis] != two.shape[axis]
    ]
    if not axes or any(not then.shape[axis] for axis in axes):
        # It has no entries for single clients, or all of them were new.
        return now if one.dim() or torch.equal(one, two) or same else one
    for axis in axes:
        then = then.index_select(axis, old.to(then.device))
    sizes = enumerate(now.shape)
    places = (new if axis in axes else torch.arange(size) for axis, size in sizes)
    at = torch.meshgrid(*(place.to(now.device) for place in places), indexing="ij")
    return now.index_put(at, then)
