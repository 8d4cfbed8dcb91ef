"""Loading of saved runs, with checks against the method and the data for which they are loaded."""

import os
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bayesfl.base.archive import CheckpointError
from bayesfl.base.files import folder
from bayesfl.base.options import declared
from bayesfl.base.protocols import View
from bayesfl.base.trees import alike, flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.federation.clients.pooling import servers
from bayesfl.federation.clients.predicting import rule_of
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
        TypeError: `algorithm` is no `Algorithm`, or `clients` is no `FederatedData`.
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
        CheckpointError: As by `load`.
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
