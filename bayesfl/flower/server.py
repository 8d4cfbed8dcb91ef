"""The server's side of a federation over Flower: rounds with the same cohorts, draws and sums as in
a simulation.
"""

import inspect
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from bayesfl.base.described import digest_of
from bayesfl.base.options import Count, Range, declared, refuse_unknown, typed
from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Survey, conduct
from bayesfl.base.targets import Task
from bayesfl.composition.algorithm import Algorithm
from bayesfl.evaluation.calibration import Fitted, Step
from bayesfl.evaluation.history import CALIBRATED, PREFIXES
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients import surveying
from bayesfl.federation.clients.after import Known, answered, answers_of
from bayesfl.federation.clients.predict import value_of
from bayesfl.federation.clients.tuning import check_tunable
from bayesfl.federation.errors import BadClients, FailedSurvey
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.rounds.replies import AggregationRun
from bayesfl.federation.rounds.round import Rules
from bayesfl.federation.run.callbacks import Callback
from bayesfl.federation.run.driver import Clients, check_callbacks, drive
from bayesfl.federation.run.loading import refuse_other_start, warn_of_seed
from bayesfl.federation.settings import (
    BUILD_ADMISSION,
    Method,
    Precision,
    Sampling,
    Settings,
    is_a_function,
)
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import agreement, reading
from bayesfl.flower import records
from bayesfl.flower.deployed import DEPLOYMENT, Deployed, bases, begun, load, opened
from bayesfl.flower.network import Connection, Journey
from bayesfl.flower.orders import orders
from bayesfl.flower.post import REMIND, Failure, answers, total
from bayesfl.flower.roster import Roster
from bayesfl.flower.states import state_name

log = logging.getLogger(__name__)
RESTARTS = 3
"""Maximum number of restarts of a survey after a client of its cohort did not answer."""


@declared
def server_app(algorithm: Method, **options: Any) -> ServerApp:
    """Make a Flower ServerApp that runs `serve` with these options.

    If options depend on the run's configuration, call `serve` in your own main function.

    Raises:
        TypeError: `algorithm` is not an `Algorithm`, or `serve` has no such option.

    Example:
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> app = bf.flower.server_app(method, clients=4, rounds=10)  # in server_app.py
    """
    refuse_unknown(serve, options)
    inspect.signature(serve).bind(None, algorithm, **options)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, algorithm, **options)

    return app


@declared(idle={("sampling", is_a_function): ("participation",)})
def serve(
    grid: Grid,
    algorithm: Method,
    *,
    clients: Count,
    rounds: int,
    participation: float = 1.0,
    sampling: Literal["fixed", "bernoulli"] | Sampling | None = None,
    train: Literal["cohort", "all"] | None = None,
    seed: int = 0,
    dtype: Precision = torch.float32,
    timeout: Annotated[float, Range(0, why="it is in seconds")] = 600.0,
    admission: Annotated[Admission, typed(Admission, BUILD_ADMISSION)] = Admission("skip"),
    checkpoint: str | os.PathLike[str] | None = None,
    every: Count = 1,
    start: Deployed | str | os.PathLike[str] | None = None,
    evaluate_every: int | None = None,
    on_round: Annotated[Sequence[Callback], check_callbacks] = (),
    calibration: Sequence[Step] = (),
) -> Deployed:
    """Train a federation over Flower's grid; the results equal those of `simulate` with the same
    seed, up to rounding.

    The server waits until all clients have answered, runs the rounds, and finally asks every client
    to predict its test data with the final model. It stops waiting if a connected node is not
    accepted, and no other one was accepted for `timeout` seconds. If the folder of checkpoints
    contains this experiment, the run continues from the newest checkpoint; it then waits for
    missing clients for at most `timeout` seconds, if `admission.min_clients` have answered.

    Args:
        grid: Flower's grid, as a ServerApp receives it.
        algorithm: The method, with the same options as the clients'.
        clients: Number of clients J; their ids are 0 to J - 1.
        rounds: Number of rounds in all, including those done before. 0 trains nothing: clients that
            are not in `start` adapt, and all predict, for example with `bf.with_heads(method)`
            after a run of the method itself.
        participation: Expected share of the clients whose work is gathered in a round, in (0, 1].
        sampling: How a cohort is drawn, `fixed`, `bernoulli`, or your own function, see
            `bayesfl.federation.settings.Sampling`; None for the method's default.
        train: Which clients train, the `cohort` or `all`; None for the method's default.
        seed: Seed of all random draws, including the clients', below 2^63.
        dtype: The floating-point type of data and state.
        timeout: Time limit for a client's reply in seconds, > 0.
        admission: Rules for accepting replies and for rounds with too few. A client that is skipped
            starts its next round from its last accepted state.
        checkpoint: A folder for checkpoints of the server; without one, a killed server starts
            again from the beginning.
        every: Rounds between checkpoints; a checkpoint is always written after the last round.
        start: A deployed federation, or the folder of its checkpoints, from whose state this one
            starts, as in `simulate(start=)`. Clients are matched by name and continue with their
            stored states; new ones adapt first. A run that continues from its own checkpoints must
            have started from the same state. None for the method's own start.
        evaluate_every: Rounds between evaluations on the clients' test and validation data, see
            `simulate`. None: only the final model, after the last callback.
        on_round: Callbacks, called one after another after every round with the run so far, see
            `bayesfl.callbacks`; one that returns True ends the run, and every client then predicts.
            A run that ends between evaluations is evaluated first, as in `simulate`. A continued
            run calls them first for its last finished round. If a callback selects a state, as
            `EarlyStopping(keep="best")` does, that state is returned and used for predictions;
            checkpoints contain the last one.
        calibration: Steps of calibration, see `Result.calibrate`, with the same options as the
            clients'. They are fitted to the returned state by surveys of the clients before these
            predict. A survey's cohort is the clients that answer its first question. If one of them
            is lost, the survey starts again, at most three times, and is then abandoned: the
            clients predict without calibration, and an error is logged. Columns `calibrated_...` of
            the history measure the calibrated predictions of test data.

    Raises:
        TypeError: `algorithm` is not an `Algorithm`, `admission` is not an `Admission`, `on_round`
            is not a list of callbacks, or a step is not a step of calibration.
        ValueError: An option is outside its range; another server uses the folder, or it contains a
            run with other settings; the method tunes a number and no client has validation data; or
            a step of calibration does not fit, or no client has rows in its split. With `start`:
            clients have the same name, or it names the folder of checkpoints, or the run in that
            folder started from another state.
        CheckpointError: The folder's checkpoints are damaged, or were made with another method; or
            no client has kept its state of the run in `start`.
        BadClients: A reply is missing or bad, and bad clients stop the run. Or connected nodes are
            not accepted, such as those with another method, and no other one was accepted for
            `timeout` seconds.
        FailedRound: With `below_minimum="repeat"`, a round failed three times.
        DivergenceError: The server's state is no longer finite. As in `simulate`, an error in a
            round or after the last one carries the run as `error.result`.
        httpx.HTTPError, OSError: The SuperLink cannot be reached.

    Example:
        >>> from flwr.serverapp import ServerApp
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> app = ServerApp()
        >>> @app.main()
        ... def main(grid, context):
        ...     run = bf.flower.serve(grid, method, clients=4, rounds=10, checkpoint="checkpoints")
        ...     print(run.history[-1])
    """
    settings = Settings(
        rounds,
        participation,
        sampling or algorithm.sampling,
        algorithm.trains(train, 0 if callable(sampling) else participation),
        seed,
        evaluate_every,
    )
    admission.check(settings.largest(clients))
    steps = surveying.checked_steps(calibration)
    files.described_steps(steps)
    with files.claimed(checkpoint):
        there = _OverFlower(grid, admission, timeout, checkpoint, on_round, steps)
        state = there.begin(algorithm, settings, clients, dtype, start)
        return drive(state, there.rules, there, on_round, every=every, progress=False)


@dataclass
class _OverFlower(Clients[Deployed]):
    """Provide access to the clients of a run over Flower, see `Clients`.

    Args:
        grid: Flower's grid.
        admission: Rules for accepting replies.
        timeout: Time limit for a client's reply in seconds.
        folder: The folder for checkpoints; None for no checkpoints.
        callbacks: Functions called after each round; the best states that they hold are kept.
        calibration: Steps of calibration, fitted after the last round.
    """

    grid: Grid
    admission: Admission
    timeout: float
    folder: str | os.PathLike[str] | None
    callbacks: Sequence[Callback]
    calibration: tuple[Step, ...]
    network: Connection = field(init=False)
    rules: Rules = field(init=False)
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each kept checkpoint, by its round, the state's `base`."""
    evaluated: int = -1
    """Number of rounds done at this server's last evaluation."""

    def begin(
        self,
        algorithm: Algorithm,
        settings: Settings,
        clients: int,
        dtype: torch.dtype,
        begins: Deployed | str | os.PathLike[str] | None,
    ) -> Deployed:
        """Return the state at the start of the run, or of its continuation, after clients have
        answered.
        """
        state, session = None, secrets.token_hex(4)
        before = opened(begins, algorithm, dtype=dtype)
        if self.folder is not None and files.checkpoints(self.folder):
            saved = load(self.folder, algorithm)
            settings.check_goes_on(
                saved.settings,
                saved.round,
                clients=(saved.clients, clients),
                dtype=(saved.dtype, dtype),
            )
            same = self.calibration == saved.calibration
            after = saved.after if same else answers_of(saved.answers, algorithm)
            state = replace(
                saved,
                settings=settings,
                sessions=(*saved.sessions, session),
                calibration=self.calibration,
                after=after,
            )
            if before is not None:
                refuse_other_start(self.folder, state.began, before.origin)
            log.info("continuing after round %d of experiment %s", state.round, state.experiment)
            self.kept = bases(self.folder, clients)
        elif before is not None and settings.rounds:
            warn_of_seed(before.settings.seed, settings.seed)
        experiment = secrets.token_hex(8) if state is None else state.experiment
        agreed = agreement(algorithm, self.calibration)
        roster = Roster(
            clients,
            {
                "algorithm": digest_of(agreed),
                "agreement": json.dumps(agreed),  # lets a node report where its own differs
                "experiment": experiment,
            },
            # Answers are read between rounds, and a round may last `timeout` seconds.
            patience=2 * self.timeout + REMIND,
            keys=dict(state.keys if state else {}),
            counts=dict(state.counts if state else {}),
            names={j: name for j, name in enumerate(state.names if state else ()) if name},
        )
        self.network = Connection(self.grid, roster, self.timeout)
        roster.wait(
            self.grid,
            least=clients if state is None else self.admission.min_clients,
            timeout=self.timeout,
        )
        names = roster.everyone()
        if state is None:
            state = begun(
                before,
                algorithm,
                settings,
                names,
                dtype=dtype,
                experiment=experiment,
                session=session,
                calibration=self.calibration,
            )
        state = replace(state, names=names)
        self.rules = Rules(
            algorithm.uplink(state.server),
            self.admission,
            AggregationRun(algorithm, settings, clients, self.admission.min_clients),
            names,
        )
        check_tunable(algorithm, roster.having("validation"), "no client has any: give them some")
        for step in self.calibration:
            step.start(self._outputs())  # raises an error if it does not fit the clients' task
            if not roster.having(step.split):
                raise ValueError(
                    f"{type(step).__name__} reads the split {step.split!r}, but no client has rows "
                    f"in it: let load_data make them with {step.split}=0.1, or pass split="
                )
        self.save(state)  # experiment, session and keys must be stored before they are used
        if state.before is not None and not state.round and state.start and algorithm.adapt:
            base, places = list(state.base), enumerate(state.before.places)
            new = [j for j, place in places if place is None and not base[j]]
            messages = orders(state, np.array(new, np.int64), set(), self._named(state))
            for client, reply in self.network.ask("train.adapt", messages, group="adapt"):
                if isinstance(reply, Failure):  # it starts from the method's own start
                    log.warning("%s did not adapt: %s", roster.called(client), reply.reason)
                else:
                    base[client] = state_name(0, state.sessions[-1])
            state = replace(state, base=tuple(base))
            self.save(state)
        return state

    def _named(self, state: Deployed) -> list[tuple[str, ...]]:
        """Return the `base` of each state that may be needed again: of checkpoints, and of the best
        states that callbacks keep.
        """
        best = [getattr(callback, "best", None) for callback in self.callbacks]
        return [
            *self.kept.values(),
            *(
                one.base
                for one in best
                if isinstance(one, Deployed) and one.experiment == state.experiment
            ),
        ]

    def attempt(self, run: Deployed) -> Journey:
        return Journey(self.network, run, self._named(run))

    def taken(self, run: Deployed, attempt: Journey) -> Deployed:
        return replace(run, base=attempt.base, names=self.network.roster.everyone())

    def finish(self, run: Deployed) -> Deployed:
        calibrates = bool(self.calibration) and not run.steps
        run = self.calibrate(run) if calibrates else run
        return self.evaluate(run, None) if calibrates or self.evaluated != run.round else run

    def _outputs(self) -> Outputs:
        """Return the description of the targets that the clients report; each has checked that the
        method fits its own.
        """
        task, count = next(iter(self.network.roster.predicted.values()))
        return Outputs(cast(Task, task), count)

    def _conduct(self, run: Deployed, survey: Survey[Any], name: str) -> Tensors:
        """Conduct a survey among the clients that have rows in its split, and return its last
        state.

        The first question includes the model, and a client predicts once with it; the clients that
        answer are the survey's cohort. Further questions are sent only to them, and without the
        model, except in surveys of the method's predictor that read more than the last layer. If a
        client of the cohort is lost, the survey starts again.

        Args:
            run: The federation, with the fitted steps of calibration.
            survey: The survey.
            name: Its name in messages.

        Raises:
            ValueError: See `bayesfl.base.surveys.conduct`.
            BadClients: A client does not answer, or wrongly, and bad clients stop the run.
            FailedSurvey: Clients were lost in every attempt.
        """
        what, network, began = type(survey).__name__, self.network, 0
        roster, admission = network.roster, self.admission
        cohort: list[int] | None = None
        before = {str(place): one.state for place, one in enumerate(run.steps)}

        def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
            nonlocal cohort
            if cohort is None:
                roster.look(self.grid)
            messages = orders(
                run,
                np.array(roster.having(survey.split) if cohort is None else cohort, np.int64),
                set(),
                self._named(run),
                tolerant=admission.skips,
                survey=name,
                survey_states={**before, name: state},
                # A predictor's survey needs the model, which a client does not store; a survey of
                # heads needs only what the client stores.
                whole=cohort is None or getattr(survey, "reads", "head") != "head",
            )
            found: dict[int, Tensors] = {}
            replies = network.ask("query.survey", messages, group=f"survey-{name}")
            for client, answer, _ in answers(replies, shapes):
                who = roster.called(client)
                if not isinstance(answer, ValueError):
                    found[client] = answer
                elif not admission.skips:
                    raise BadClients(f"{who} has no part in a survey: {answer}") from answer
                else:
                    log.warning("%s has no part in %s: %s", who, what, answer)
            if cohort is None and len(found) < admission.min_clients:
                raise FailedSurvey(
                    f"{len(found)} clients answered and {admission.min_clients} are needed "
                    "(min_clients)"
                )
            if missing := [roster.called(client) for client in cohort or () if client not in found]:
                raise FailedSurvey(f"{', '.join(missing)} did not answer a further question")
            cohort = sorted(found)
            return total(found)

        while True:
            try:
                return conduct(survey, ask, self._outputs())
            except FailedSurvey as error:
                began, cohort = began + 1, None
                if began > RESTARTS:
                    raise FailedSurvey(
                        f"{what} is abandoned after {began} attempts: {error}; start the server "
                        "again, with its folder of checkpoints, when the clients are back"
                    ) from error
                log.warning("%s starts again: %s", what, error)

    def calibrate(self, state: Deployed) -> Deployed:
        """Fit the steps of calibration by surveys of the clients; if one is abandoned, none is
        fitted, and an error is logged.
        """
        try:
            fitted = state = self._answered(state)
            for place, step in enumerate(self.calibration):
                found = self._conduct(fitted, step, str(place))
                one = Fitted(step, found, {}, reading(state.algorithm))
                fitted = replace(fitted, after=(*fitted.after, one))
        except (FailedSurvey, ValueError) as error:
            log.error("nothing is calibrated: %s", error)
            return state
        return fitted

    def _answered(self, state: Deployed) -> Deployed:
        """Return the state with the clients' answers to the surveys of the method's predictor,
        conducted once for each state.

        Raises:
            ValueError: No client has rows in a survey's split, or a survey's answers do not fit.
            FailedSurvey: A survey was abandoned.
        """

        def ask(name: str, survey: Survey[Any], known: Known) -> Tensors:
            told = replace(state, after=answers_of(known, state.algorithm))
            return self._conduct(told, survey, name)

        known = answered(state.algorithm, state.server, state.answers, ask)
        return replace(state, after=(*answers_of(known, state.algorithm), *state.steps))

    def evaluate(self, run: Deployed, attempt: Journey | None) -> Deployed:
        """Send the model to every client, which stores its own and predicts; add the means of the
        clients' measures to the history.
        """
        self.evaluated = run.round
        self.network.roster.look(self.grid)
        try:
            run = self._answered(run)
        except (FailedSurvey, ValueError) as error:
            log.warning("nothing is predicted: %s", error)
            return run
        value = value_of(run.algorithm, run.answers)
        found: dict[str, list[float]] = {}
        each: dict[int, dict[str, float]] = {}
        messages = orders(
            run,
            np.arange(run.clients),
            set(),
            self._named(run),
            tolerant=self.admission.skips,
            survey_states={str(place): one.state for place, one in enumerate(run.steps)},
        )
        for client, reply in self.network.ask("evaluate", messages, group="evaluate"):
            if isinstance(reply, Failure):
                log.warning(
                    "%s did not predict: %s", self.network.roster.called(client), reply.reason
                )
                continue
            for split, prefix in (*PREFIXES.items(), (CALIBRATED, CALIBRATED)):
                for name, measured in records.measures(reply, split).items():
                    found.setdefault(f"{prefix}_{name}", []).append(measured)
            split = CALIBRATED if run.steps else "test"
            said = reply.get("config")
            if (
                isinstance(said, ConfigRecord)
                and said.get("share") is True
                and (own := records.measures(reply, split))
            ):
                each[client] = own
        if found:
            if not run.history.rows:
                run.history.append({"round": run.round})
            run.history.rows[-1] |= {
                **{name: float(np.mean(values)) for name, values in found.items()},
                "evaluated": max(map(len, found.values())),
                **({} if value is None else {"tuned": value}),
            }
            run = replace(run, measures=dict(sorted(each.items())))
        return run

    def save(self, run: Deployed) -> None:
        """Write a checkpoint, if there is a folder for checkpoints."""
        if self.folder is None:
            return
        roster = self.network.roster
        files.write_round(
            self.folder,
            DEPLOYMENT,
            {**vars(run), "keys": roster.keys, "counts": roster.counts},
        )
        self.kept = dict(sorted((self.kept | {run.round: run.base}).items())[-files.KEPT :])
