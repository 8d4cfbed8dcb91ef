"""The server's state of a deployed federation, and its folder of checkpoints."""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from bayesfl.base.archive import CheckpointError
from bayesfl.base.files import folder as inside
from bayesfl.base.options import declared
from bayesfl.base.protocols import View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.evaluation.calibration import Step
from bayesfl.federation.clients import pooling
from bayesfl.federation.clients.after import answers_of, known_of
from bayesfl.federation.run import loading
from bayesfl.federation.run.record import METHODS_START, Run, in_words
from bayesfl.federation.settings import Method, Settings
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import identity, same_method, same_network

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Describe where a client's last accepted state is stored.

    Args:
        experiment: Name of the client's experiment.
        client: The client's number in that experiment.
        base: The state's name; empty for the initial one of that experiment.
    """

    experiment: str
    client: int
    base: str


@dataclass(frozen=True)
class Before:
    """Describe clients' states of earlier runs, with which a run starts.

    Args:
        places: For each client of this run the place of its state; None for a new client.
        starts: {experiment: a client's initial private state}, for the experiments from whose
            initial state a client starts.
    """

    places: tuple[Place | None, ...]
    starts: Mapping[str, View]


@dataclass(frozen=True, kw_only=True)
class Deployed(Run):
    """Hold the server's state of a deployed federation; the clients keep their private states.

    The members that it shares with a simulation are in `bayesfl.federation.run.record.Run`.

    Args:
        algorithm: The method.
        settings: The run's settings.
        experiment: The experiment's name, part of the path of clients' states.
        sessions: Sessions of the servers that have run the experiment, in order, the present one
            last.
        round: Number of rounds done.
        server: The server's state.
        start: A client's initial private state.
        base: For each client the name of its last accepted state, such as `000004-1f6f0c9a`; empty
            for the initial one.
        history: One row for each round; rows of evaluated rounds, and the last row, also have the
            clients' mean measures.
        dtype: The precision of the state.
        measures: {client: {measure: number}} of the last evaluation on test data, for clients that
            share theirs.
        before: The clients' states at the start; None for the method's own start.
        names: The clients' names, as received from their nodes; empty text for an unknown name, and
            empty if all are unknown.
        keys: Public keys of the clients' nodes from the checkpoint, {client: hexadecimal digits}.
        counts: Numbers of training examples from the checkpoint, {client: n}.
        began: Description of the run's start; differs between states.
        calibration: The steps of calibration that are fitted after training.
        after: Objects fitted after training: the clients' answers to the surveys of the method's
            predictor, and the steps of calibration without clients' own parameters; empty before
            the surveys. Further training deletes them.

    Example:
        >>> def watch(run):  # for serve(on_round=[watch]), which receives a Deployed
        ...     print(run.round, run.history[-1].get("personal_accuracy"))
    """

    experiment: str
    sessions: tuple[str, ...]
    start: View
    base: tuple[str, ...]
    measures: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    before: Before | None = None
    names: tuple[str, ...] = ()
    keys: Mapping[int, str] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    calibration: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Deployed({self.clients} clients, round {self.round} of {self.settings.rounds}; "
            f"{self.history})"
        )

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.base)

    @property
    def called(self) -> tuple[str, ...]:
        """Return the clients' names; empty text if a name is unknown."""
        return self.names or ("",) * self.clients

    @property
    def origin(self) -> str:
        """Return a description of this state, which a run that starts from it stores."""
        return in_words(
            f"round {self.round} of experiment {self.experiment}",
            (*self.names, *self.base),
            {"server": self.server, "start": self.start},
        )

    def place(self, client: int) -> Place:
        """Return where a client's last accepted state is stored, in this or an earlier run."""
        past = None if self.before is None or self.base[client] else self.before.places[client]
        return past or Place(self.experiment, client, self.base[client])

    def initial(self, experiment: str) -> View:
        """Return a client's initial private state in this experiment, or in an earlier one."""
        return (
            self.start
            if self.before is None or experiment == self.experiment
            else self.before.starts.get(experiment, {})
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into the folder `path`, completely or not at all; read it with
        `bayesfl.flower.load` or `serve(start=)`.

        Raises:
            OSError: `path` is a file, or lies under one.
        """
        files.write(path, DEPLOYMENT, {**vars(self), "keys": {}, "counts": {}})


@declared
def load(folder: str | os.PathLike[str], algorithm: Method) -> Deployed:
    """Load a deployed federation from its newest checkpoint, or from a state saved by
    `Deployed.save`.

    Args:
        folder: The server's folder of checkpoints, or the folder of a saved state.
        algorithm: The method that made them.

    Raises:
        TypeError: `algorithm` is not an `Algorithm`.
        CheckpointError: The folder has no checkpoint, or its checkpoints are damaged or were made
            with another method.

    Example:
        >>> def read(folder, method):
        ...     return bf.flower.load(folder, method).history
    """
    found = files.read(folder, DEPLOYMENT)
    same_method(repr(str(folder)), found["algorithm"], algorithm)
    state = Deployed(**{**found, "algorithm": algorithm})
    loading.check_state(repr(str(folder)), state, state.start, stacked=False)
    return state


@loading.reloaded.register
def _(run: Deployed, path: str | os.PathLike[str]) -> Deployed:
    return load(path, run.algorithm)


DEPLOYMENT = files.FileKind(
    "deployment",
    "the checkpoints of a deployment over Flower",
    "bayesfl.flower.load(path, algorithm) reads them, and bayesfl.flower.serve(start=path) starts "
    "from them; its clients' states are on their nodes",
    {
        "algorithm": files.METHOD,
        "settings": files.SETTINGS,
        "history": files.HISTORY,
        "dtype": files.DTYPE,
        **dict.fromkeys(("server", "start"), files.PLAIN),
        **dict.fromkeys(("experiment", "began"), files.Entry(read=str)),
        "round": files.WHOLE,
        **dict.fromkeys(
            ("sessions", "names", "base"), files.Entry(read=lambda found: tuple(map(str, found)))
        ),
        # JSON converts clients' numbers to text.
        "measures": files.Entry(dict, lambda found: {int(j): dict(of) for j, of in found.items()}),
        "keys": files.Entry(dict, lambda found: {int(j): str(of) for j, of in found.items()}),
        "counts": files.Entry(dict, lambda found: {int(j): int(of) for j, of in found.items()}),
        "before": files.Entry(
            lambda one: one and asdict(one),
            lambda one: (
                one and Before(tuple(at and Place(**at) for at in one["places"]), one["starts"])
            ),
        ),
        "calibration": files.Entry(files.described_steps, files.read_steps),
        "after": files.AFTER,
    },
)
files.KINDS.append(DEPLOYMENT)


def opened(
    start: Deployed | str | os.PathLike[str] | None, algorithm: Algorithm, *, dtype: torch.dtype
) -> Deployed | None:
    """Return the run from whose state another starts; None for the method's own start.

    Raises:
        TypeError: `start` is neither a `Deployed` nor a folder.
        ValueError: The state has another precision.
        CheckpointError: The folder contains no deployed federation whose state this method could
            have made.
    """
    if start is None:
        return None
    given = isinstance(start, Deployed)
    found = vars(start) if given else files.read(inside("start", start), DEPLOYMENT)
    made_with = identity(start.algorithm) if given else found["algorithm"]
    what, before = "start" if given else repr(str(start)), pooling.trained(algorithm, made_with)
    same_network(what, made_with, algorithm)
    state = Deployed(**{**found, "algorithm": before})
    loading.check_state(what, state, state.start, stacked=False)
    if state.dtype != dtype:
        raise ValueError(
            f"start has dtype {state.dtype}, and so have the states that its clients keep; pass "
            f"dtype={state.dtype}, got {dtype}"
        )
    if before is algorithm:
        return state
    return replace(state, server=pooling.servers_state(before, state.server, algorithm))


def begun(
    before: Deployed | None,
    algorithm: Algorithm,
    settings: Settings,
    names: Sequence[str],
    *,
    dtype: torch.dtype,
    experiment: str,
    session: str,
    calibration: tuple[Step, ...] = (),
) -> Deployed:
    """Return the initial state of an experiment of the clients `names`, which are matched by name
    with the clients of the earlier run.

    Raises:
        ValueError: The experiment starts from another run, and clients have the same name.
    """
    server, new, old = loading.begun(before, algorithm, names, seed=settings.seed, dtype=dtype)
    past = None
    if before is not None:
        if algorithm.rebuild is not None:
            log.warning(
                "the server's state is not rebuilt, because only clients have their private "
                "states: it keeps the earlier run's prior, and the parts of clients that have left"
            )
        known = dict(zip(new.tolist(), map(before.place, old.tolist()), strict=True))
        initial = {place.experiment for place in known.values() if not place.base}
        past = Before(
            tuple(map(known.get, range(len(names)))),
            {name: before.initial(name) for name in sorted(initial)},
        )
    elif twice := loading.repeated(names):
        log.warning(
            "%s: a run that starts from this one could not distinguish them; load_data should name "
            "its client",
            twice,
        )
    return Deployed(
        algorithm=algorithm,
        settings=settings,
        experiment=experiment,
        sessions=(session,),
        round=0,
        server=server,
        start=algorithm.rows(server),
        base=("",) * len(names),
        dtype=dtype,
        before=past,
        began=METHODS_START if before is None else before.origin,
        calibration=calibration,
        after=() if before is None else answers_of(known_of(before.after, algorithm), algorithm),
    )


def bases(folder: str | os.PathLike[str], clients: int) -> dict[int, tuple[str, ...]]:
    """Return `Deployed.base` for every readable checkpoint in a folder, by its round."""
    found: dict[int, tuple[str, ...]] = {}
    for file in files.checkpoints(folder):
        with contextlib.suppress(CheckpointError):
            if len(base := files.read_file(file, DEPLOYMENT)["base"]) == clients:
                found[files.round_of(file)] = base
    return found
