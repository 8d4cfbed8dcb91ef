"""Loading of saved runs, with checks against the method and the data for which they are loaded."""

import os
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.protocols import Server, View
from bayesfl.base.trees import alike, flatten
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.data.outline import Outline
from bayesfl.engine import Engine
from bayesfl.evaluation.history import History
from bayesfl.federation import checkpoint, step_files
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.form import check_function
from bayesfl.federation.identity import check_method, check_network, identity, reading
from bayesfl.federation.result import Chosen, Result
from bayesfl.federation.settings import DTYPES, METHOD, Settings, of_a_run, present, same_problem


def load(
    path: str | os.PathLike[str], algorithm: Algorithm, clients: FederatedData | None = None, *, device: torch.device | str = "cpu"
) -> Result:
    """Load a saved run.

    Without data the result has its history, settings and server, and the models of clients that need no training data to predict; with
    data it has everything.

    Args:
        path: The folder that `Result.save` wrote, or the folder of `simulate`'s checkpoints, of which the newest undamaged one is loaded.
        algorithm: The method that made the run.
        clients: The data on which the run was made; None to load it without.
        device: The device for its state.

    Raises:
        TypeError: `algorithm` is no `Algorithm`, or `clients` is no `FederatedData`.
        ValueError: The device is absent, or the data's columns or classes have other names than those of the run, or another order.
        CheckpointError: The folder holds no run of `simulate`, or one that is damaged or was made with another method or on other data; or
            an earlier version wrote it, which can only be loaded with data.
    """
    if clients is not None:
        of_a_run(algorithm, clients)
    result, made_with, made_on, before = _read(path, algorithm, clients, present(device))
    check_method(f"{str(path)!r}", made_with, algorithm)
    if clients is not None and made_on != clients.hash:
        if before is None or before.rows is None:
            raise CheckpointError(
                f"{str(path)!r} was made on other data (hash {made_on[:12]}, given {clients.hash[:12]}), or by an earlier version, with a "
                "transform; give the same recipe and seed, or make it again"
            )
        _check_data(f"{str(path)!r}", before, clients)
    if clients is not None and before is not None:
        problem, known = ((one.inputs, one.outputs, one.task) for one in (before, clients.outline))
        if made_on == clients.hash and problem != known:
            raise CheckpointError(f"{str(path)!r} is damaged: of the same data it says {problem}, and these have {known}")
        same_problem("clients", clients, before)
    return _checked(path, result)


@singledispatch
def reloaded(run: Any, path: str | os.PathLike[str]) -> Any:
    """Return a state of the run, a `Result` or one of another kind that has registered how it is read, that its `save` wrote.

    Raises:
        CheckpointError: As by `load`.
    """
    return load(path, run.algorithm, run.data, device=run.device)


def opened(path: str | os.PathLike[str], algorithm: Algorithm, device: torch.device) -> Result:
    """Open a saved run of this method's network, whose state has its shapes; the method may have other options than the one that made it.

    Raises:
        TypeError: `algorithm` is no `Algorithm`.
        CheckpointError: The folder holds no run, or one that is damaged, of another network or of another shape.
    """
    result, made_with, *_ = _read(path, algorithm, None, device)
    check_network(f"{str(path)!r}", made_with, algorithm)
    return _checked(path, result)


def _read(
    path: str | os.PathLike[str], algorithm: Algorithm, clients: FederatedData | None, device: torch.device
) -> tuple[Result, dict[str, Any], str, Outline | None]:
    """Return a saved run as its file has it, the identity of the method that made it, and the hash and the outline of its data."""
    instance("algorithm", algorithm, Algorithm, METHOD)
    meta, state = checkpoint.read(path, checkpoint.RUN, device)
    if clients is None and "clients" not in meta:
        raise CheckpointError(f"{str(path)!r} does not say who its clients are, as an earlier version wrote it; pass their data, too")
    try:
        made_with, made_on = dict(meta["algorithm"]), str(meta["data"])
        before = Outline.read(meta["clients"]) if "clients" in meta else None
        known = clients or Outline.read(meta["clients"])
        result = Result(
            algorithm,
            known,
            Settings(**meta["settings"]),
            Engine(**meta["engine"]),
            whole("round", meta["round"], least=0),
            state["server"],
            state.get("private", {}),
            History.read(meta["history"]),
            device,
            DTYPES[meta["dtype"]],
            meta["novel"],
            None if meta["chosen"] is None else Chosen(number("chosen", meta["chosen"]), reading(algorithm)),
            meta["tolerant"],
            None if meta.get("began") is None else str(meta["began"]),
            step_files.read(meta.get("steps", ()), state.get("steps", {}), clients=known.clients),
            meta.get("calibrated"),
        )
        for name in ("novel", "tolerant"):
            instance(name, meta[name], bool, "save writes True or False")
        if result.round > result.settings.rounds or not (result.novel or len(result.history) == result.round):
            raise ValueError(f"round {result.round} of {result.settings.rounds} with a history of {len(result.history)}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{str(path)!r} is no saved run of this version: {type(error).__name__}, {error}") from error
    return result, made_with, made_on, before


def _checked(path: str | os.PathLike[str], result: Result) -> Result:
    """Return a saved run if its state has the shapes of its method."""
    about = {"clients": result.known.clients, "dtype": result.dtype, "stacked": True, "novel": result.novel}
    check_state(str(path), result.algorithm, result.server, result.private, **about)
    return result


def same_run(result: Result, algorithm: Algorithm, clients: FederatedData) -> Result:
    """Return `result` with these data if it was made with this method on them.

    Raises:
        CheckpointError: `result` was made with another method or on other data.
        ValueError: The data's columns or classes have other names, or another order.
    """
    check_method("the result", identity(result.algorithm), algorithm)
    if result.known.hash != clients.hash:
        _check_data("the result", result.known if isinstance(result.known, Outline) else result.known.outline, clients)
    same_problem("clients", clients, result.known)
    return replace(result, known=clients)


def check_state(
    path: str, algorithm: Algorithm, server: Server, private: View, *, clients: int, dtype: torch.dtype, stacked: bool, novel: bool = False
) -> None:
    """Check that a state has the tensors that the method keeps, with their dtypes and shapes.

    What a method holds on the server beyond its blocks may grow along its first axis, as models of clusters do, unless that axis is the
    clients'.

    Args:
        path: The folder or file that held the state, for the error message.
        algorithm: The method.
        server: The server's state.
        private: The private state.
        clients: Number of clients.
        dtype: The run's precision.
        stacked: Whether `private` has the rows of all clients, [J, ...], or is the state of one, [...].
        novel: Whether these clients joined after training.

    Raises:
        CheckpointError: A tensor is missing or unknown, or has another dtype or shape.
    """
    start = algorithm.init(clients, dtype=dtype)
    start = algorithm.newcomers(start, clients) if novel else start
    own = algorithm.rows(start)
    own = tree_map(lambda t: t.expand(clients, *t.shape), own) if stacked else own
    wanted = flatten({"server": start, "private": own})
    found = flatten({"server": server, "private": private})

    def fits(name: str) -> bool:
        free = name.removeprefix("server.") in algorithm.free(clients)
        return name in wanted and name in found and alike(wanted[name], found[name], free=free)

    def picture(name: str, tensors: dict[str, Any]) -> str:
        return f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "absent"

    if wrong := sorted(name for name in wanted.keys() | found.keys() if not fits(name)):
        raise CheckpointError(
            f"{path!r} holds another state than the method keeps: {wrong[0]} is {picture(wrong[0], found)}, not {picture(wrong[0], wanted)}"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        )


def _check_data(what: str, before: Outline, clients: FederatedData) -> None:
    """Check what makes data of another hash than those on which a run was made: other rows, or another function of inputs."""
    if before.rows != clients.rows_hash:
        raise CheckpointError(
            f"{what} was made on other data (hash {before.hash[:12]}, given {clients.hash[:12]}); give the same recipe and seed"
        )
    check_function(what, "transform", before.transform, clients.train.transform)
    check_function(what, "augment", before.augment, clients.train.augment)
    then, now = ([one and one["code"] for one in (outline.transform, outline.augment)] for outline in (before, clients.outline))
    if then == now:
        raise CheckpointError(f"{what} was made on splits of which one has another transform; give all splits of the data the same")
