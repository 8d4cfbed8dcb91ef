"""The server's side of a federation over Flower: rounds with the simulation's cohorts, draws and sums."""

import contextlib
import inspect
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from bayesfl.base.checks import instance, number, whole
from bayesfl.composition.algorithm import Algorithm
from bayesfl.evaluation.history import PREFIXES
from bayesfl.federation import warm
from bayesfl.federation.admission import PROTOCOL, Admission, attempts
from bayesfl.federation.callbacks import Callback, checked, ended, finished, over
from bayesfl.federation.checkpoint import KEPT, held
from bayesfl.federation.errors import FailedRound
from bayesfl.federation.identity import fingerprint
from bayesfl.federation.predict import choose
from bayesfl.federation.replies import OpenRun
from bayesfl.federation.round import Rules, run_round
from bayesfl.federation.settings import METHOD, Settings, precision
from bayesfl.flower import deployed, records
from bayesfl.flower.deployed import Deployed
from bayesfl.flower.network import Journey, Network, orders
from bayesfl.flower.post import Failure
from bayesfl.flower.roster import REMIND, Roster
from bayesfl.flower.states import name_of as state_name

log = logging.getLogger(__name__)


def server_app(algorithm: Algorithm, **options: Any) -> ServerApp:
    """Make a Flower ServerApp that runs `serve` with these options.

    If options depend on the run's configuration, call `serve` in a main function of your own.

    Raises:
        TypeError: `algorithm` is no `Algorithm`, or `serve` has no such option.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    inspect.signature(serve).bind(None, algorithm, **options)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, algorithm, **options)

    return app


def serve(
    grid: Grid,
    algorithm: Algorithm,
    *,
    clients: int,
    rounds: int,
    participation: float = 1.0,
    sampling: Literal["fixed", "bernoulli"] | None = None,
    train: Literal["cohort", "all"] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    timeout: float = 600.0,
    admission: Admission = Admission("skip"),
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1,
    start: Deployed | str | os.PathLike[str] | None = None,
    evaluate_every: int | None = None,
    on_round: Sequence[Callback] = (),
) -> Deployed:
    """Train a federation over Flower's grid; the results equal those of `simulate` with the same seed, up to rounding.

    The server waits until all clients have answered, runs the rounds, and finally has every client predict its test data with the final
    model. If the folder of checkpoints holds this experiment, it continues from the newest checkpoint; it then waits for missing clients
    for `timeout` seconds at most, provided that `admission.min_clients` have answered.

    Args:
        grid: Flower's grid, as a ServerApp receives it.
        algorithm: The method, with the same options as the clients'.
        clients: Number of clients J; their ids are 0 to J - 1.
        rounds: Number of rounds in all, including those done before.
        participation: Expected share of the clients whose work is gathered in a round, in (0, 1].
        sampling: How a cohort is drawn, `fixed` or `bernoulli`; None for the method's default.
        train: Which clients train, the `cohort` or `all`; None for the method's default.
        seed: Seed of all random draws, also of the clients', below 2^63.
        dtype: The floating-point type of data and state.
        timeout: Seconds that a client has for its reply, > 0.
        admission: Which replies are taken, and what becomes of a round with too few. A client that is skipped starts its next round from
            its last state that was taken.
        checkpoint: A folder for checkpoints of the server; without one a server that was killed starts anew.
        every: Rounds between checkpoints; a checkpoint is always written after the last round.
        start: A deployed federation, or the folder of its checkpoints, from whose state this one begins, as by `simulate(start=)`. Clients
            are matched by name and go on with the states that they kept; new ones adapt first. A run that goes on from its own checkpoints
            must have begun from the same state. None for the method's own start.
        evaluate_every: Rounds between evaluations on the clients' test and validation data, as of `simulate`. None: the final model alone,
            after the last callback.
        on_round: Callbacks, called one after another after every round with the run so far, see `bayesfl.callbacks`; one that returns True
            ends the run, after which every client predicts; between evaluations it is measured first, as by `simulate`. A run that goes
            on calls them first for the round that it goes on from. The state that is returned, and by which clients predict, is the one
            that they choose, as `EarlyStopping(keep="best")` does; checkpoints are of the last one.

    Raises:
        TypeError: `algorithm` is no `Algorithm`, `admission` no `Admission`, or `on_round` no list of callbacks.
        ValueError: An option is outside its range, another server uses the folder, it holds a run of other settings, the method tunes
            a number and no client has validation data; `start` is given and clients have the same name, or it names the folder of
            checkpoints, or the run in that folder began from another state.
        CheckpointError: The folder's checkpoints are damaged, or were made with another method; or no client has kept its state of the
            run that `start` is.
        BadClients: A reply is missing or bad, and bad clients stop the run.
        FailedRound: With `below_minimum="repeat"`, a round failed three times.
        DivergenceError: The server's state is no longer finite.
        httpx.HTTPError, OSError: The SuperLink cannot be reached.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    drawn, trained = algorithm.sampling if sampling is None else sampling, algorithm.train if train is None else train
    settings = Settings(rounds, participation, drawn, trained, seed, evaluate_every)
    instance("admission", admission, Admission, "build one, as bf.Admission('skip', min_clients=3)")
    whole("clients", clients, least=1)
    whole("every", every, least=1)
    admission.check(settings.largest(clients))
    if settings.seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, which a message can hold, got {seed}")
    if not number("timeout", timeout) > 0:
        raise ValueError(f"timeout is in seconds and must be > 0, got {timeout}")
    precision(dtype)
    callbacks = checked(on_round)
    warm.check_apart(start, checkpoint)
    with contextlib.nullcontext() if checkpoint is None else deployed.alone(Path(checkpoint)):
        run = _Run(grid, admission, float(timeout), checkpoint, every, callbacks)
        state = run.begin(algorithm, settings, clients, dtype, start)
        stopped = over(callbacks, state)
        while state.round < settings.rounds and not stopped:
            state = run.round(state)
            stopped = ended(callbacks, state)
        run.save(state)
        if stopped and settings.evaluate_every is not None and "evaluated" not in state.history[-1]:  # ended between evaluations
            state = run.evaluate(state)
            run.save(state)
            ended(callbacks, state)  # once more, with the measures, as in a simulation
        chosen = finished(callbacks, state)
        if run.evaluated != chosen.round:
            chosen = run.evaluate(chosen)
        if chosen.round == state.round:
            run.save(chosen)
        return chosen


@dataclass
class _Run:
    """One run of a server.

    Args:
        grid: Flower's grid.
        admission: Which replies are taken.
        timeout: Seconds that a client has for its reply.
        folder: The folder for checkpoints; None for no checkpoints.
        every: Rounds between checkpoints.
        callbacks: What is called after each round.
    """

    grid: Grid
    admission: Admission
    timeout: float
    folder: str | os.PathLike[str] | None
    every: int
    callbacks: Sequence[Callback]
    network: Network = field(init=False)
    rules: Rules = field(init=False)
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each checkpoint that is kept, by its round, the state's `base`."""
    evaluated: int = -1
    """Number of rounds that were done at the last evaluation of this server."""

    def begin(
        self,
        algorithm: Algorithm,
        settings: Settings,
        clients: int,
        dtype: torch.dtype,
        begins: Deployed | str | os.PathLike[str] | None,
    ) -> Deployed:
        """Return the state from which the run starts or continues, once the clients have answered."""
        keys: dict[int, str] = {}
        counts: dict[int, int] = {}
        state, session = None, secrets.token_hex(4)
        before = deployed.opened(begins, algorithm, dtype=dtype)
        if self.folder is not None and held(self.folder):
            state, keys, counts = deployed.read(self.folder, algorithm)
            state = deployed.resumed(state, settings, clients, dtype)
            if before is not None:
                warm.check_start(self.folder, state.began, before.origin)
            state = replace(state, sessions=(*state.sessions, session))
            log.info("going on after round %d of experiment %s", state.round, state.experiment)
            self.kept = deployed.bases(self.folder, clients)
        elif before is not None:
            warm.warn_of_seed(before.settings.seed, settings.seed)
        experiment = secrets.token_hex(8) if state is None else state.experiment
        known = {} if state is None else {client: name for client, name in enumerate(state.names) if name}
        hello = {"protocol": PROTOCOL, "algorithm": fingerprint(algorithm), "experiment": experiment}
        patience = 2 * self.timeout + REMIND  # answers are read between rounds, and a round may last `timeout` seconds
        roster = Roster(clients, hello, patience, keys, counts=counts, names=known)
        self.network = Network(self.grid, roster, self.timeout)
        roster.wait(self.grid, least=self.admission.min_clients, patience=None if state is None else self.timeout)
        names = roster.everyone()
        if state is None:
            state = deployed.begun(before, algorithm, settings, names, dtype=dtype, experiment=experiment, session=session)
        state = replace(state, names=names)
        run = OpenRun(algorithm, settings, clients, self.admission.min_clients)
        self.rules = Rules(algorithm, settings, clients, algorithm.uplink(dtype), self.admission, run, names)
        predictor = algorithm.predictor
        if predictor is not None and len(predictor.grid) > 1 and not sum(roster.validation.values()):
            raise ValueError(
                f"{predictor.tunes} is chosen on validation data, and no client has any: give them some, or give a number instead, as "
                f"{predictor.tunes}=100.0 to fedsi or precision=100.0 to LinearisedLaplace"
            )
        self.save(state)  # experiment, session and keys are stored before anything depends on them
        if state.before is not None and not state.round and state.start and algorithm.adapt:
            state = self._adapted(state, [j for j, place in enumerate(state.before.places) if place is None and not state.base[j]])
            self.save(state)
        return state

    def _named(self, state: Deployed) -> list[tuple[str, ...]]:
        """Return the `base` of each state that may be asked for again: of checkpoints, and of the best states that callbacks keep."""
        best = [found for callback in self.callbacks if isinstance(found := getattr(callback, "best", None), Deployed)]
        return [*self.kept.values(), *(one.base for one in best if one.experiment == state.experiment)]

    def _adapted(self, state: Deployed, ids: Sequence[int]) -> Deployed:
        """Let new clients adapt to the server's state, from which they then begin; one that does not begins from the method's own start."""
        base = list(state.base)
        told = orders(state, np.array(ids, np.int64), set(), self._named(state))
        for client, reply in self.network.ask("train.adapt", told, group="adapt"):
            if isinstance(reply, Failure):
                log.warning("%s did not adapt: %s", self.network.roster.called(client), reply.reason)
            else:
                base[client] = state_name(0, state.sessions[-1])
        return replace(state, base=tuple(base))

    def round(self, state: Deployed) -> Deployed:
        """Run a round, and return the next state, written to a checkpoint if one is due."""

        def once(attempt: int) -> tuple[Deployed, dict[str, Any]]:
            journey = Journey(self.network, state, self._named(state))
            server, row = run_round(self.rules, state.server, state.round, state.history, journey, attempt=attempt)
            return replace(state, round=state.round + 1, server=server, base=journey.base), row

        tried = attempts(self.admission, once)
        if isinstance(tried, FailedRound):
            tried = replace(state, round=state.round + 1), {"round": state.round + 1, "cohort": 0, **tried.row}
        made, row = tried
        made = replace(made, names=self.network.roster.everyone())
        made.history.append(row)
        log.info("round %d of %d: %s", made.round, made.settings.rounds, ", ".join(f"{k} {v:.4g}" for k, v in row.items()))
        if made.settings.evaluates(state.round):
            made = self.evaluate(made)
        if made.round % self.every == 0 or made.round == made.settings.rounds:
            self.save(made)
        return made

    def evaluate(self, state: Deployed) -> Deployed:
        """Send the model to every client, which stores its own and predicts; the means of the clients' measures go into the history."""
        predictor, value, self.evaluated = state.algorithm.predictor, float("nan"), state.round
        self.network.roster.look(self.grid)
        if predictor is not None and predictor.grid:
            try:
                value = predictor.grid[0] if len(predictor.grid) == 1 else self._tuned(state)
            except ValueError as error:
                log.warning("nothing is predicted: %s", error)
                return state
        found: dict[str, list[float]] = {}
        each: dict[int, dict[str, float]] = {}
        told = orders(state, np.arange(state.clients), set(), self._named(state), value=value, tolerant=self.admission.skips)
        for client, reply in self.network.ask("evaluate", told, group="evaluate"):
            if isinstance(reply, Failure):
                log.warning("%s did not predict: %s", self.network.roster.called(client), reply.reason)
                continue
            for split, prefix in PREFIXES.items():
                for name, measured in records.measures(reply, split).items():
                    found.setdefault(f"{prefix}_{name}", []).append(measured)
            if _shares(reply) and (own := records.measures(reply, "test")):
                each[client] = own
        if found:
            last = state.history.rows[-1]
            last |= {name: float(np.mean(values)) for name, values in found.items()} | {"evaluated": max(map(len, found.values()))}
            last |= {} if np.isnan(value) else {"tuned": value}
            log.info("evaluation: %s", ", ".join(f"{k} {v:.4g}" for k, v in last.items() if k in found))
            state = replace(state, measures=dict(sorted(each.items())))
        return state

    def _tuned(self, state: Deployed) -> float:
        """Choose the number that the method's predictor tunes, by sums over the clients' validation data.

        Raises:
            ValueError: No client has scored the candidates, or no candidate gives finite predictions.
        """
        predictor = state.algorithm.predictor
        assert predictor is not None
        shape = 1 + len(predictor.grid), len(predictor.grid)
        total, examples = torch.zeros(shape, dtype=torch.float64), 0
        asked = np.array([client for client, n in sorted(self.network.roster.validation.items()) if n])
        wanted = {"scores": (shape, torch.float64)}
        told = orders(state, asked, set(), self._named(state), tolerant=self.admission.skips)
        for client, reply in self.network.ask("evaluate.tune", told, group="tune"):
            try:
                if isinstance(reply, Failure):
                    raise records.RecordError(reply.reason)
                tensors = records.unpack(reply, "scores", records.setting(reply, "digest", str), most=records.most_bytes(wanted))
                shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                if shapes != wanted:
                    raise records.RecordError(f"it sent {shapes}, not {wanted}")
                if bool((tensors["scores"].isnan() | tensors["scores"].isneginf()).any() or tensors["scores"][0].isposinf().all()):
                    raise records.RecordError("its scores are not numbers")
            except records.RecordError as error:
                log.warning("%s has no part in tuning %s: %s", self.network.roster.called(client), predictor.tunes, error)
                continue
            total += tensors["scores"]
            examples += self.network.roster.validation[client]
        if not examples:
            raise ValueError(f"no client has scored the candidates for {predictor.tunes}")
        return choose(predictor, total, examples)

    def save(self, state: Deployed) -> None:
        """Write a checkpoint, if there is a folder for them."""
        if self.folder is None:
            return
        deployed.write(self.folder, state, self.network.roster.keys, self.network.roster.counts)
        self.kept = dict(sorted((self.kept | {state.round: state.base}).items())[-KEPT:])


def _shares(reply: RecordDict) -> bool:
    """Say whether a client agrees that its measures are kept as such."""
    try:
        return records.setting(reply, "share", bool)
    except records.RecordError:
        return False
