"""The state of a deployed federation that the server keeps, and its folder of checkpoints."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.protocols import Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.evaluation.history import History
from bayesfl.federation import checkpoint, warm
from bayesfl.federation.client_model import server_module
from bayesfl.federation.identity import check_method, check_network, identity
from bayesfl.federation.saved import check_state
from bayesfl.federation.settings import DTYPES, METHOD, Settings, changed, name_of
from bayesfl.flower.states import EXPERIMENT, SESSION, STATE


@dataclass(frozen=True)
class Before:
    """The run from whose state another begins; clients are those of the same number.

    Args:
        experiment: Its name, under which clients keep their states.
        base: For each of its clients the name of its last state that was taken; empty for the initial one.
        start: A client's private state at its start.
    """

    experiment: str
    base: tuple[str, ...]
    start: View


@dataclass(frozen=True)
class Deployed:
    """The state of a deployed federation on the server; the clients keep their private states.

    Args:
        algorithm: The method.
        settings: The run's settings.
        experiment: The experiment's name, under which clients keep their states.
        sessions: Sessions of the servers that have run the experiment, in their order, the present one last.
        round: Number of rounds done.
        server: The server's state.
        start: A client's private state at its start.
        base: For each client the name of its last state that was taken, such as `000004-1f6f0c9a`; empty for the initial one.
        history: One row for each round; the last one has the measures of the final evaluation, too.
        dtype: The precision of the state.
        measures: {client: {measure: number}} of the final evaluation, of the clients that share theirs.
        before: The run from whose state this one began; None for the method's own start.
    """

    algorithm: Algorithm
    settings: Settings
    experiment: str
    sessions: tuple[str, ...]
    round: int
    server: Server
    start: View
    base: tuple[str, ...]
    history: History = field(default_factory=History)
    dtype: torch.dtype = torch.float32
    measures: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    before: Before | None = None

    def __repr__(self) -> str:
        return f"Deployed({self.clients} clients, round {self.round} of {self.settings.rounds}; {self.history})"

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.base)

    def model(self) -> nn.Module:
        """Return the server's network at the means of its beliefs: a module of its own, in evaluation mode.

        Each client's own model is on its node, where `bayesfl.load_client` reads it.

        Raises:
            ValueError: The server holds no whole network, or several.
        """
        return server_module(self.algorithm, self.server, torch.ones((), dtype=self.dtype))


def load(folder: str | os.PathLike[str], algorithm: Algorithm) -> Deployed:
    """Load the newest checkpoint of a deployed federation.

    Args:
        folder: The server's folder of checkpoints.
        algorithm: The method that made them.

    Raises:
        TypeError: `algorithm` is no `Algorithm`.
        CheckpointError: The folder has no checkpoint, or its checkpoints are damaged or were made with another method.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    return read(folder, algorithm)[0]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder of checkpoints against other servers; the system releases the lock when the process ends, however it ends.

    Raises:
        ValueError: Another server holds the lock, the folder holds a saved result, or `folder` is a file or lies under one.
    """
    checkpoint.claim(folder, resumed=True)
    try:
        import fcntl
    except ImportError:  # on systems without such locks
        yield
        return
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"checkpoint folder {str(folder)!r} is in use by another server; stop that one first, or take another folder"
            ) from error
        yield


def write(folder: str | os.PathLike[str], state: Deployed, keys: Mapping[int, str], counts: Mapping[int, int]) -> None:
    """Write a checkpoint of a state, with the keys of its clients' nodes and their numbers of examples."""
    meta = {
        "settings": asdict(state.settings),
        "experiment": state.experiment,
        "sessions": state.sessions,
        "round": state.round,
        "dtype": name_of(state.dtype),
        "base": state.base,
        "keys": keys,
        "counts": counts,
        "history": state.history.rows,
        "measures": state.measures,
        "before": None if state.before is None else {"experiment": state.before.experiment, "base": state.before.base},
        "algorithm": identity(state.algorithm),
    }
    before = {} if state.before is None else state.before.start
    checkpoint.write_round(folder, state.round, meta, {"server": state.server, "start": state.start, "before": before})


def read(folder: str | os.PathLike[str], algorithm: Algorithm, *, same: bool = True) -> tuple[Deployed, dict[int, str], dict[int, int]]:
    """Return the state in the newest checkpoint, the keys of its clients' nodes, and their numbers of examples.

    Args:
        folder: The folder of checkpoints.
        algorithm: The method.
        same: Whether the method must be the one that made them; otherwise it must have their network, and keep tensors of the same shapes.

    Raises:
        CheckpointError: The folder has no checkpoint, or its checkpoints are damaged or were made with another method.
    """
    meta, tensors = checkpoint.read(folder)
    try:
        made_with, base = meta["algorithm"], _names(meta["base"])
        keys = {whole("client", int(client), least=0): bytes.fromhex(key).hex() for client, key in meta["keys"].items()}
        counts = {whole("client", int(client), least=0): whole("n", n, least=1) for client, n in meta.get("counts", {}).items()}
        if any(client >= len(base) or n >= 2**63 for client, n in counts.items()):
            raise ValueError("counts must be numbers of examples of its clients")
        state = Deployed(
            algorithm,
            Settings(**meta["settings"]),
            str(meta["experiment"]),
            tuple(map(str, meta["sessions"])),
            whole("round", meta["round"], least=0),
            tensors["server"],
            tensors.get("start", {}),
            base,
            History.read(meta["history"]),
            DTYPES[meta["dtype"]],
            _measures(meta.get("measures", {})),
            _before(meta.get("before"), tensors.get("before", {})),
        )
        if not (EXPERIMENT.fullmatch(state.experiment) and state.sessions and all(map(SESSION.fullmatch, state.sessions))):
            raise ValueError("experiment and sessions must be names")
        if state.round > state.settings.rounds or len(state.history) != state.round:
            raise ValueError(f"round {state.round} of {state.settings.rounds} with a history of {len(state.history)}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise checkpoint.CheckpointError(
            f"{str(folder)!r} is no checkpoint of a deployed federation: {type(error).__name__}, {error}"
        ) from error
    (check_method if same else check_network)(repr(str(folder)), made_with, algorithm)
    check_state(str(folder), algorithm, state.server, state.start, clients=state.clients, dtype=state.dtype, stacked=False)
    return state, keys, counts


def started(
    start: Deployed | str | os.PathLike[str] | None, algorithm: Algorithm, clients: int, seed: int, dtype: torch.dtype
) -> tuple[Server, Before | None]:
    """Return the server's state at the start of a run, and the run from whose state it begins.

    Args:
        start: A deployed federation or the folder of its checkpoints; None for the method's own start.
        algorithm: The method.
        clients: Number of clients.
        seed: The run's seed.
        dtype: The run's precision.

    Raises:
        TypeError: `start` is neither.
        ValueError: It is in another precision.
        CheckpointError: The folder holds no deployed federation whose state this method could have reached.
    """
    if start is None:
        return algorithm.init(clients, seed=seed, dtype=dtype), None
    if not isinstance(start, Deployed | str | os.PathLike):
        raise TypeError(f"start must be a Deployed or the folder of its checkpoints, got {type(start).__name__}")
    found = start if isinstance(start, Deployed) else read(start, algorithm, same=False)[0]
    check_network("start", identity(found.algorithm), algorithm)
    check_state("start", algorithm, found.server, found.start, clients=found.clients, dtype=found.dtype, stacked=False)
    if found.dtype != dtype:
        raise ValueError(f"start is in {found.dtype}, as are the states that its clients keep; pass dtype={found.dtype}, got {dtype}")
    warm.warn_of_seed(found.settings.seed, seed)
    same = torch.arange(min(clients, found.clients))
    server = warm.carried(found.server, algorithm, clients, same, same, dtype=dtype, device=torch.device("cpu"))
    return server, Before(found.experiment, found.base, found.start)


def resumed(saved: Deployed, settings: Settings, clients: int, dtype: torch.dtype) -> Deployed:
    """Return a saved state under new settings; only `rounds` may change, any other change would make it another experiment.

    Raises:
        ValueError: Another setting has changed, or `rounds` is less than the number of rounds done.
    """
    if settings.rounds < saved.round:
        raise ValueError(f"rounds counts all rounds, and {saved.round} are already done; got {settings.rounds}")
    then = {**vars(saved.settings), "rounds": settings.rounds, "clients": saved.clients, "dtype": saved.dtype}
    if apart := changed(then, {**vars(settings), "clients": clients, "dtype": dtype}):
        raise ValueError(f"a run that goes on keeps its settings: {apart}; another experiment takes another folder of checkpoints")
    return replace(saved, settings=settings)


def bases(folder: str | os.PathLike[str], clients: int) -> dict[int, tuple[str, ...]]:
    """Return `Deployed.base` of every readable checkpoint in a folder, by its round."""
    found: dict[int, tuple[str, ...]] = {}
    for file in checkpoint.held(folder):
        with contextlib.suppress(checkpoint.CheckpointError, KeyError, TypeError, ValueError):
            meta, _ = checkpoint.read_file(file)
            if len(base := _names(meta["base"])) == clients:
                found[checkpoint.round_of(file)] = base
    return found


def _measures(found: Any) -> dict[int, dict[str, float]]:
    """Return the clients' measures in a checkpoint.

    Raises:
        ValueError: `found` is no mapping from clients to numbers by name.
    """
    if not isinstance(found, Mapping) or not all(isinstance(row, Mapping) for row in found.values()):
        raise ValueError("measures must be numbers of each client by name")
    return {whole("client", int(client), least=0): {str(k): number(str(k), v) for k, v in row.items()} for client, row in found.items()}


def _before(found: Any, start: View) -> Before | None:
    """Return the run before of a checkpoint, if it has one.

    Raises:
        KeyError: An entry is missing.
        ValueError: Its experiment or its states have no valid names.
    """
    if found is None:
        return None
    if not EXPERIMENT.fullmatch(str(found["experiment"])):
        raise ValueError("the experiment before must have a name")
    return Before(str(found["experiment"]), _names(found["base"]), start)


def _names(base: Any) -> tuple[str, ...]:
    """Return the names of states in a checkpoint.

    Raises:
        ValueError: `base` is no list of such names.
    """
    if not isinstance(base, list) or not base or not all(isinstance(name, str) and (not name or STATE.fullmatch(name)) for name in base):
        raise ValueError("base must name a state of each client")
    return tuple(base)
