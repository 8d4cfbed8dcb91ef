"""The state of a deployed federation that the server keeps, and its folder of checkpoints."""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from bayesfl.base.archive import CheckpointError
from bayesfl.base.files import folder as inside
from bayesfl.base.options import declared
from bayesfl.base.protocols import Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.predictors import POOLED
from bayesfl.evaluation.calibration import Fitted, Step
from bayesfl.evaluation.history import History
from bayesfl.federation.clients import pooling
from bayesfl.federation.clients.after import Known, answers_of, known_of
from bayesfl.federation.clients.modules import server_module
from bayesfl.federation.run import warm
from bayesfl.federation.run.loading import check_state, reloaded
from bayesfl.federation.run.result import METHODS_START
from bayesfl.federation.settings import Method, Settings
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import Answer, identity, same_method, same_network
from bayesfl.flower.before import Before, Place
from bayesfl.posteriors.pooled import PooledPosterior

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployed:
    """The state of a deployed federation on the server; the clients keep their private states.

    Args:
        algorithm: The method.
        settings: The run's settings.
        experiment: The experiment's name, under which clients keep their states.
        sessions: Sessions of the servers that have run the experiment, in their order, the present
            one last.
        round: Number of rounds done.
        server: The server's state.
        start: A client's private state at its start.
        base: For each client the name of its last state that was taken, such as `000004-1f6f0c9a`;
            empty for the initial one.
        history: One row for each round; rows of rounds that were evaluated, as the last, have the
            clients' mean measures, too.
        dtype: The precision of the state.
        measures: {client: {measure: number}} of the last evaluation on test data, of the clients
            that share theirs.
        before: The states from which the clients began; None for the method's own start.
        names: The clients' names, as their nodes told them; empty text, or no names at all, where
            they are not known.
        began: What the run began from, in words that differ for other states.
        calibration: The steps of calibration that are fitted after training.
        after: What was fitted after training: what clients have answered to the surveys of the
            method's predictor, and the steps of calibration without clients' own parameters; none
            until clients are asked. Training empties it.

    Example:
        >>> def watch(run):  # for serve(on_round=[watch]); a Deployed is what it is given
        ...     print(run.round, run.history[-1].get("personal_accuracy"))
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
    names: tuple[str, ...] = ()
    began: str = METHODS_START
    calibration: tuple[Step, ...] = ()
    after: tuple[Answer | Fitted, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Deployed({self.clients} clients, round {self.round} of {self.settings.rounds}; "
            f"{self.history})"
        )

    @property
    def clients(self) -> int:
        """Return the number of clients J."""
        return len(self.base)

    def took_part(self, round: int) -> tuple[int | str, ...]:
        """Return the names of clients whose work is in the server's state of a round, counted from
        1; numbers where names are not known.

        Raises:
            KeyError: There was no such round.
        """
        ids = self.settings.took_part(self.clients, self.history, round)
        return tuple(self.names[j] or j if self.names else j for j in ids.tolist())

    @property
    def origin(self) -> str:
        """Return words for this state, in which a run that begins from it keeps what it
        began from.
        """
        return warm.start_in_words(
            f"round {self.round} of experiment {self.experiment}",
            (*self.names, *self.base),
            {"server": self.server, "start": self.start},
        )

    @property
    def steps(self) -> tuple[Fitted, ...]:
        """Return the steps of calibration as the server knows them, without the clients' own
        parameters; none until they are fitted.
        """
        return tuple(one for one in self.after if isinstance(one, Fitted))

    @property
    def answers(self) -> Known:
        """Return the last states of the surveys of the method's predictor, by their names; none
        until clients are asked.
        """
        return known_of(self.after, self.algorithm)

    @property
    def posterior(self) -> PooledPosterior:
        """Return the posterior of the server's network on the rows of all clients.

        Raises:
            ValueError: The method's predictor is no `PooledLaplace`, or clients were not asked.
        """
        rule: Any = self.algorithm.predictor
        if POOLED not in self.answers:
            raise ValueError(
                "there is no pooled posterior; train a method that has its predictor, "
                "dataclasses.replace(method, predictor=bf.predictors.PooledLaplace())"
            )
        return rule.question(self.algorithm, self.server).posterior(self.answers[POOLED])

    def place(self, client: int) -> Place:
        """Return the place of a client's last state that was taken, in this run or in one
        before.
        """
        past = None if self.before is None or self.base[client] else self.before.places[client]
        return past or Place(self.experiment, client, self.base[client])

    def initial(self, experiment: str) -> View:
        """Return a client's private state at the start of this experiment, or of one before."""
        return (
            self.start
            if self.before is None or experiment == self.experiment
            else self.before.starts.get(experiment, {})
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into the folder `path`, completely or not at all, for
        `bayesfl.flower.load` and `serve(start=)`.

        Raises:
            ValueError: `path` is a file, or lies under one.
        """
        files.write(path, DEPLOYMENT, {**vars(self), "keys": {}, "counts": {}})

    def model(self) -> nn.Module:
        """Return the server's network at the means of its beliefs: a module of its own, in
        evaluation mode.

        Each client's own model is on its node, where `bayesfl.load_client` reads it.

        Raises:
            ValueError: The server holds no whole network, or several.
        """
        return server_module(
            self.algorithm, self.server, self.clients, torch.ones((), dtype=self.dtype)
        )


@declared
def load(folder: str | os.PathLike[str], algorithm: Method) -> Deployed:
    """Load a deployed federation: the newest of its checkpoints, or what `Deployed.save` wrote.

    Args:
        folder: The server's folder of checkpoints, or that of a saved state.
        algorithm: The method that made them.

    Raises:
        TypeError: `algorithm` is no `Algorithm`.
        CheckpointError: The folder has no checkpoint, or its checkpoints are damaged or were made
            with another method.

    Example:
        >>> def read(folder, method):
        ...     return bf.flower.load(folder, method).history
    """
    return read_deployed(folder, algorithm)[0]


@reloaded.register
def _(run: Deployed, path: str | os.PathLike[str]) -> Deployed:
    return load(path, run.algorithm)


DEPLOYMENT = files.FileKind(
    "deployment",
    "the checkpoints of a deployment over Flower",
    "bayesfl.flower.load(path, algorithm) reads them, and bayesfl.flower.serve(start=path) begins "
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
        # JSON makes text of clients' numbers.
        "measures": files.Entry(dict, lambda found: {int(j): dict(of) for j, of in found.items()}),
        "keys": files.Entry(dict, lambda found: {int(j): str(of) for j, of in found.items()}),
        "counts": files.Entry(dict, lambda found: {int(j): int(of) for j, of in found.items()}),
        "before": files.Entry(
            lambda one: one and asdict(one), lambda one: one and Before.read(one)
        ),
        "calibration": files.Entry(files.described_steps, files.read_steps),
        "after": files.AFTER,
    },
)
files.KINDS.append(DEPLOYMENT)


def read_deployed(
    folder: str | os.PathLike[str], algorithm: Algorithm, *, same: bool = True
) -> tuple[Deployed, dict[int, str], dict[int, int]]:
    """Return the state in the newest checkpoint, the keys of its clients' nodes, and their numbers
    of examples.

    Args:
        folder: The folder of checkpoints.
        algorithm: The method.
        same: Whether the method must be the one that made them; otherwise it must have their
            network, and keep tensors of the same shapes.

    Raises:
        CheckpointError: The folder has no checkpoint, or its checkpoints are damaged or were made
            with another method.
    """
    found = files.read(folder, DEPLOYMENT)
    keys, counts = found.pop("keys"), found.pop("counts")
    (same_method if same else same_network)(repr(str(folder)), found["algorithm"], algorithm)
    state = Deployed(**{**found, "algorithm": algorithm})
    check_state(
        repr(str(folder)),
        algorithm,
        state.server,
        state.start,
        clients=state.clients,
        dtype=state.dtype,
        stacked=False,
    )
    return state, keys, counts


def opened(
    start: Deployed | str | os.PathLike[str] | None, algorithm: Algorithm, *, dtype: torch.dtype
) -> Deployed | None:
    """Return the run from whose state another begins; None for the method's own start.

    Raises:
        TypeError: `start` is neither.
        ValueError: It is in another precision.
        CheckpointError: The folder holds no deployed federation whose state this method could have
            reached.
    """
    if start is None:
        return None
    given = isinstance(start, Deployed)
    path = "" if given else inside("start", start)
    made_with = identity(start.algorithm) if given else files.read(path, DEPLOYMENT)["algorithm"]
    before = pooling.trained(algorithm, made_with)
    found = start if given else read_deployed(path, before, same=False)[0]
    same_network("start", made_with, algorithm)
    check_state(
        "start",
        before,
        found.server,
        found.start,
        clients=found.clients,
        dtype=found.dtype,
        stacked=False,
    )
    if found.dtype != dtype:
        raise ValueError(
            f"start is in {found.dtype}, as are the states that its clients keep; pass "
            f"dtype={found.dtype}, got {dtype}"
        )
    if before is algorithm:
        return found
    return replace(found, server=pooling.servers_state(before, found.server, algorithm))


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
    """Return the state with which an experiment of the clients `names` begins, by whose names they
    are matched with those `before`.

    Raises:
        ValueError: The experiment begins from another run, and clients have the same name.
    """
    clients, past = len(names), None
    if before is None:
        server = algorithm.init(clients, seed=settings.seed, dtype=dtype)
        if twice := warm.repeated(names):
            log.warning(
                "%s: a run that starts from this one could not tell them apart; let load_data "
                "name its client",
                twice,
            )
    else:
        new, old = warm.matched(algorithm, names, before.names or ("",) * before.clients)
        server = warm.carried(
            before.server, algorithm, clients, new, old, dtype=dtype, device=torch.device("cpu")
        )
        known = dict(zip(new.tolist(), map(before.place, old.tolist()), strict=True))
        initial = {place.experiment for place in known.values() if not place.base}
        past = Before(
            tuple(map(known.get, range(clients))),
            {name: before.initial(name) for name in sorted(initial)},
        )
    return Deployed(
        algorithm,
        settings,
        experiment,
        (session,),
        0,
        server,
        start=algorithm.rows(server),
        base=("",) * clients,
        dtype=dtype,
        before=past,
        began=METHODS_START if before is None else before.origin,
        calibration=calibration,
        after=() if before is None else answers_of(known_of(before.after, algorithm), algorithm),
    )


def taken_up(
    saved: Deployed,
    settings: Settings,
    clients: int,
    dtype: torch.dtype,
    calibration: tuple[Step, ...],
) -> Deployed:
    """Return a saved state under new settings; `rounds` and `evaluate_every` may change, any other
    change would make it another experiment.

    Steps of calibration stay fitted where these are the same.

    Raises:
        ValueError: Another setting has changed, or `rounds` is less than the number of rounds done.
    """
    settings.check_goes_on(
        saved.settings,
        saved.round,
        clients=(saved.clients, clients),
        dtype=(saved.dtype, dtype),
    )
    same = calibration == saved.calibration
    after = saved.after if same else answers_of(saved.answers, saved.algorithm)
    return replace(saved, settings=settings, calibration=calibration, after=after)


def bases(folder: str | os.PathLike[str], clients: int) -> dict[int, tuple[str, ...]]:
    """Return `Deployed.base` of every readable checkpoint in a folder, by its round."""
    found: dict[int, tuple[str, ...]] = {}
    for file in files.checkpoints(folder):
        with contextlib.suppress(CheckpointError):
            if len(base := files.read_file(file, DEPLOYMENT)["base"]) == clients:
                found[files.round_of(file)] = base
    return found
