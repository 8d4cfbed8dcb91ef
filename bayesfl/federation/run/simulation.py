"""Federated training on one machine: rounds of local work in chunks of clients, each followed by
the server's update.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

import numpy as np
import torch

from bayesfl import preflight
from bayesfl.base.described import described
from bayesfl.base.files import folder
from bayesfl.base.options import Count, declared, typed
from bayesfl.base.processes.children import on_processes
from bayesfl.base.processes.ranks import current
from bayesfl.base.random import Purpose, generator
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.engine import Engine
from bayesfl.engine.crew import Crew
from bayesfl.evaluation.history import PREFIXES, History
from bayesfl.evaluation.own_measures import Measure, check_measures, means, measured
from bayesfl.evaluation.predictions import measures_of
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.clients import predict, tuning
from bayesfl.federation.clients.after import Here, answered, answers_of
from bayesfl.federation.clients.local import Local, touched
from bayesfl.federation.clients.surveying import Adder
from bayesfl.federation.rounds.admission import Admission
from bayesfl.federation.rounds.faults import FaultPlan
from bayesfl.federation.rounds.one_machine import OneMachine
from bayesfl.federation.rounds.replies import Aggregation
from bayesfl.federation.rounds.round import Rules
from bayesfl.federation.run.callbacks import Callback
from bayesfl.federation.run.driver import Clients, check_callbacks, drive
from bayesfl.federation.run.loading import (
    continued,
    from_where,
    load,
    on,
    refuse_other_start,
    started,
)
from bayesfl.federation.run.record import METHODS_START
from bayesfl.federation.run.result import Result
from bayesfl.federation.settings import (
    BUILD_ADMISSION,
    OPEN,
    Federation,
    Method,
    Precision,
    Sampling,
    Settings,
    is_a_function,
    present,
)
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import agree, identity, same_method

RunOrFolder: TypeAlias = Result | str | os.PathLike[str]
"""A run: its result, or the folder in which it was saved."""
UNCALIBRATED = (
    "the run that this one continues is calibrated, and training changes its predictions: the "
    "steps are dropped; calibrate the new result"
)


@declared(
    idle={
        ("evaluate_every", None): ("record_clients", "evaluate_clients"),
        ("sampling", is_a_function): ("participation",),
    }
)
def simulate(
    algorithm: Method,
    clients: Federation,
    *,
    rounds: Count,
    participation: float = 1.0,
    sampling: Literal["fixed", "bernoulli"] | Sampling | None = None,
    train: Literal["cohort", "all"] | None = None,
    seed: int = 0,
    evaluate_every: int | None = 1,
    evaluate_clients: Count | None = None,
    engine: Annotated[
        Engine | None, typed(Engine, "pass engine=bf.Engine(kernel=...) to select a kernel")
    ] = None,
    device: torch.device | str = "cpu",
    dtype: Precision = torch.float32,
    resume: RunOrFolder | None = None,
    start: RunOrFolder | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: Count = 1,
    admission: Annotated[Admission | None, typed(Admission, BUILD_ADMISSION)] = None,
    aggregation: Annotated[
        Aggregation | None, typed(Aggregation, "build one, as bayesfl.SecureSum(), or leave it out")
    ] = None,
    faults: FaultPlan | None = None,
    on_round: Annotated[Sequence[Callback], check_callbacks] = (),
    measures: Annotated[
        Mapping[str, Measure], typed(Mapping, "pass {name: function}"), check_measures
    ] = {},
    record_clients: Sequence[str] = (),
    progress: bool | None = None,
) -> Result:
    """Train a federation on this machine.

    Args:
        algorithm: A method, from `bf.algorithms` or composed.
        clients: The clients' data.
        rounds: Number of rounds in all, including those of a resumed run; learning-rate schedules
            depend on it.
        participation: Expected share of the clients whose work is gathered in a round, in (0, 1].
        sampling: How a cohort is drawn: `fixed` number of clients, `bernoulli`, or your own
            function (round, rng, known) -> numbers of clients, see
            `bayesfl.federation.settings.Sampling`; None for the method's default.
        train: Which clients train: the `cohort`, or `all`, with only the cohort gathered; None for
            the method's default.
        seed: The same seed gives the same draws, whatever the engine.
        evaluate_every: Rounds between evaluations; the last round is always evaluated, also if a
            callback ends the run (except for `before_pool_` columns, which only a planned
            evaluation has). None: never.
        evaluate_clients: Number of clients that evaluations measure: a random sample that depends
            on the seed, the same in every round and in resumed runs; other clients have NaN in
            `history.clients`. None for all.
        engine: How the run is computed. It changes only speed and rounding, and under
            `ClientPrivacy` the noise. None for `Engine()`.
        device: The device that computes.
        dtype: The floating-point type of data and state.
        resume: A result, or the folder of a saved one or of checkpoints: this run continues from it
            bit for bit. A result of `adapt` cannot be resumed.
        start: A result, or the folder of a saved run, from whose state this run starts, for example
            with next month's rows, further clients or another learning rate. Clients are matched by
            name and keep their private state; new ones start as in `Result.adapt`. The network must
            be the same, including its frozen weights, and the state must have the shapes of this
            method; columns and classes must have the same names in the same order. Rounds are
            counted from 0 again. None for the method's own start.
        checkpoint: A folder for checkpoints of this run. If it contains some, the run continues
            from the newest undamaged one, so one command can be repeated; method, data and settings
            must then be the same, and `start`, if it is given. The two newest are kept; an
            interruption never leaves a partly written one.
        every: Rounds between checkpoints; a checkpoint is always written after the last round.
        admission: Rules for accepting replies and for rounds with too few. None for
            `Admission("skip")` if there are `faults`, otherwise for `Admission("stop")`, which
            stops the run when a client's training is no longer finite.
        aggregation: How the cohort's uplinks and the clients' answers in evaluations are added up:
            `bayesfl.SecureSum` or `bayesfl.ClientPrivacy`; None if the server may see every uplink.
        faults: A plan of simulated faults, see `bayesfl.faults`; None for none.
        on_round: Callbacks, called one after another after every round with the run so far, see
            `bayesfl.callbacks`; one that returns True ends the run. A resumed run calls them first
            for its last finished round; a run that a callback ended stays ended.
        measures: {name: function} of further measures, each from one client's predictions and its
            labels to a number; the mean over clients becomes a column such as `personal_name`.
        record_clients: Measures, such as `("accuracy", "nll")`, that the history stores for every
            client at each evaluation, in addition to the mean: see
            `history.clients("personal_accuracy")`, and `validation_accuracy` and other prefixes.
        progress: Whether to show a progress bar; None shows one on a terminal, and in a notebook
            with ipywidgets.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or does not fit the method or the data; the message
            names it and the remedy.
        ImportError: `ClientPrivacy` needs dp-accounting, which is not installed.
        CheckpointError: The run to resume is damaged, or was made with another method or other
            data; or the run to start from is damaged, or has another network.
        DivergenceError: Training is no longer finite. Like every error in a round, including Ctrl-C
            and a full disk at a checkpoint, it carries the run up to the last complete round:
            `error.result`.
        FailedRound: With `below_minimum="repeat"`, a round failed three times.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=clients.outputs)
        >>> result = bf.simulate(bf.algorithms.fedavg(model), clients, rounds=2)
        >>> result.round, len(result.history)
        (2, 2)
    """
    given = dict(locals())
    aggregation = aggregation or Aggregation()
    admission = admission or Admission("stop" if faults is None else "skip")
    settings = Settings(
        rounds=rounds,
        participation=participation,
        sampling=aggregation.sampling or sampling or algorithm.sampling,
        train=algorithm.trains(train, 0 if callable(sampling) else participation),
        seed=seed,
        evaluate_every=evaluate_every,
        aggregation=aggregation.name,
    )
    _refuse_contradictions(
        algorithm, clients, settings, sampling, aggregation, admission, faults, start, resume
    )
    device = present(device)
    with (
        on_processes(engine and engine.processes, simulate, given),
        files.claimed(checkpoint) as held,
    ):
        if (
            held
            and resume is not None
            and (
                isinstance(resume, Result)
                or os.path.realpath(resume) != os.path.realpath(checkpoint or "")
            )
        ):
            raise ValueError(
                f"checkpoint folder {str(checkpoint)!r} already has a run, which continues if "
                "resume is left out; or pass another folder"
            )
        goes_on = checkpoint if held and resume is None else resume
        before = (
            from_where(start, algorithm, clients, seed=seed, device=device)
            if start is not None and goes_on is None
            else None
        )
        preflight.check(algorithm, clients)
        origin = goes_on if isinstance(goes_on, Result) else before
        agree(
            lambda: {
                "data": clients.outline.hash,
                "methods": identity(algorithm),
                "settings": described(settings),
                "measures": described([dict(measures), record_clients, evaluate_clients]),
                "faults": described(faults),
                "start": described(origin and origin.server),
            }
        )
        known = [*measures_of(algorithm.likelihood), *measures]
        if unknown := [name for name in record_clients if name not in known]:
            raise ValueError(
                f"record_clients accepts some of {known}, without a prefix such as personal_; got "
                f"{unknown[0]!r}"
            )
        if record_clients and settings.sampling == "poisson":
            raise ValueError(
                "record_clients stores clients' own measures without noise, so the run's epsilon "
                "would not cover its history; leave it out under ClientPrivacy"
            )
        if goes_on is None:
            begins = algorithm, clients, settings, engine or Engine(), before
            result, repeats = _begun(*begins, device=device, dtype=dtype), 0
        else:
            result, repeats = _resumed(
                goes_on,
                algorithm,
                clients,
                settings,
                engine,
                start,
                checkpoint,
                device=device,
                dtype=dtype,
            )
        result = replace(result, tolerant=admission.skips)
        if checkpoint is not None:
            # Now, because the first checkpoint may be hours away.
            files.refuse_nameless(*map(described, (algorithm, clients.outline, vars(settings))))
        sums = aggregation.start(
            result, admission, every=None if checkpoint is None else every, repeats=repeats
        )
        rules = Rules(algorithm.uplink(result.server), admission, sums, clients.client_names)
        sample = generator(seed, Purpose.EVALUATION).choice(
            clients.clients,
            min(evaluate_clients or clients.clients, clients.clients),
            replace=False,
        )
        data = clients.to(device, dtype)
        with result.engine.crew(device) as crew:
            here = _OnOneMachine(
                checkpoint,
                result.local(data.splits),
                data,
                crew,
                np.sort(sample),
                faults,
                measures,
                record_clients,
                aggregation if isinstance(aggregation, Adder) else None,
            )
            return drive(result, rules, here, on_round, every=every, progress=progress)


def _refuse_contradictions(
    algorithm: Algorithm,
    clients: FederatedData,
    settings: Settings,
    sampling: str | Sampling | None,
    aggregation: Aggregation,
    admission: Admission,
    faults: FaultPlan | None,
    start: RunOrFolder | None,
    resume: RunOrFolder | None,
) -> None:
    """Raise ValueError for arguments of `simulate` that do not fit each other.

    Raises:
        ValueError: Some do not fit.
    """
    if aggregation.sampling is not None and sampling is not None:
        raise ValueError(
            f"{type(aggregation).__name__} draws its own cohorts ({aggregation.sampling}), got "
            f"{sampling!r}; leave sampling out"
        )
    if aggregation.name != OPEN and not any(block.pool for block in algorithm.blocks.values()):
        raise ValueError(
            f"{type(aggregation).__name__} adds up clients' blocks, and the method sends none: "
            "leave aggregation out"
        )
    if faults is not None and not admission.skips:
        raise ValueError(
            "faults need admission=Admission('skip'): the first fault would stop the run"
        )
    if start is not None and resume is not None:
        raise ValueError("start starts a new run, resume continues one: pass one of them")
    if start is not None and settings.sampling == "poisson":
        raise ValueError(
            "start uses the releases of another run, which the epsilon of ClientPrivacy would not "
            "count; use resume="
        )
    admission.check(settings.largest(clients.clients))
    if settings.evaluate_every is not None and "test" not in clients.splits:
        raise ValueError(
            "the data have no test split to evaluate on; give them one, or pass evaluate_every=None"
        )
    if settings.evaluate_every is not None:
        tuning.check_tunable(algorithm, tuning.tunable(clients))


def _begun(
    algorithm: Algorithm,
    clients: FederatedData,
    settings: Settings,
    engine: Engine,
    before: Result | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Result:
    """Return a run before its first round: the method's own start, or the state of the earlier run
    with new clients adapted to it.
    """
    if before is not None and before.steps:
        warn(UNCALIBRATED)
    trained = clients.clients if settings.train == "all" else settings.fixed_size(clients.clients)
    # Use the device with the least memory, because chunks are the same at all ranks.
    sizes = current().every(lambda: engine.chunk_size(trained, algorithm, device))
    engine = replace(engine, chunk=min(sizes))
    begin, new = continued(
        before, algorithm, clients.client_names, seed=settings.seed, dtype=dtype, device=device
    )
    result = Result(
        clients,
        engine,
        begin.private,
        algorithm=algorithm,
        settings=settings,
        round=0,
        server=begin.server,
        device=device,
        dtype=dtype,
        began=METHODS_START if before is None else before.origin,
    )
    if len(new) and algorithm.adapt:
        with engine.crew(device) as crew:
            result.local(clients.to(device, dtype).splits).adapt(begin, crew, ids=new)
    return result


def _resumed(
    source: RunOrFolder,
    algorithm: Algorithm,
    clients: FederatedData,
    settings: Settings,
    engine: Engine | None,
    start: RunOrFolder | None,
    checkpoint: str | os.PathLike[str] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Result, int]:
    """Return a copy of the run to continue, under the present settings, and the number of rounds
    that were done already but must be repeated.

    `rounds`, `evaluate_every` and the number of workers may change; any other change would make it
    another experiment.
    """
    if isinstance(source, Result):
        same_method("the result", identity(source.algorithm), algorithm)
        saved = on(source, clients, "the result")
    else:
        saved = load(folder("resume", source), algorithm, clients, device=device)
    if saved.novel:
        raise ValueError(
            "resume is a result of adapt: its clients joined after training, and the server has no "
            "state of theirs to continue from; resume the federation's own result, or train a "
            "federation that includes them"
        )
    given = engine or saved.engine
    engine = replace(given, chunk=saved.engine.chunk)
    settings.check_goes_on(
        saved.settings,
        saved.round,
        dtype=(saved.dtype, dtype),
        device=(saved.device, device),
        kernel=(saved.engine.kernel, given.kernel),
        chunk=(engine.chunk, given.chunk or engine.chunk),
    )
    result = replace(
        saved,
        settings=settings,
        engine=engine,
        private=current().copied(saved.private),
        history=saved.history.copy(),
    )
    if start is not None:
        refuse_other_start(checkpoint, result.began, started(start, algorithm, device).origin)
    if result.steps and result.round < settings.rounds:
        warn(UNCALIBRATED)
    return result, 0 if isinstance(source, Result) else max(0, files.newest(source) - saved.round)


@dataclass(frozen=True)
class _OnOneMachine(Clients[Result]):
    """Provide access to the clients of a run on this machine, see `Clients`.

    Args:
        checkpoint: See `simulate`.
        local: The clients' local work.
        data: The clients' data, on the run's device and in its precision.
        crew: The threads that compute.
        sample: The clients that evaluations measure, ascending.
        faults: See `simulate`.
        measures: See `simulate`.
        recorded: `record_clients` of `simulate`.
        aggregation: How answers in evaluations are added; None adds them in the clear.
    """

    checkpoint: str | os.PathLike[str] | None
    local: Local
    data: FederatedData
    crew: Crew
    sample: np.ndarray
    faults: FaultPlan | None
    measures: Mapping[str, Measure]
    recorded: Sequence[str]
    aggregation: Adder | None

    @cached_property
    def measured(self) -> FederatedData:
        """Return the data; clients outside the sample have only training rows."""
        if len(self.sample) == self.data.clients:
            return self.data
        splits = {
            name: split if name == "train" else split.only(self.sample)
            for name, split in self.data.splits.items()
        }
        return replace(self.data, splits=splits)

    def attempt(self, run: Result) -> OneMachine:
        # Before aggregation, a part that training does not change would predict with a state that
        # was never trained.
        evaluates = run.settings.evaluates(run.round) and touched(run.algorithm)
        test = self.measured.test if evaluates else None
        return OneMachine(self.local, run.state, self.crew, test, self.faults)

    def save(self, run: Result) -> None:
        if self.checkpoint is not None:
            path = self.checkpoint
            current().every(lambda: run.save_round(path))

    def evaluate(self, run: Result, attempt: OneMachine | None) -> Result:
        history, local, state, data = run.history, self.local, run.state, self.measured
        if attempt is not None and attempt.predicted is not None:
            self._note(history, "before_pool", attempt.predicted)
        here = Here(local, state, data, self.crew, self.aggregation, self.sample)
        known = answered(local.algorithm, state.server, {}, here)
        names = [name for name in PREFIXES if name in data.splits]
        splits = [data.splits[name] for name in names]
        predicted = predict.personal(local, state, splits, self.crew, known=known, ids=self.sample)
        for name, predictions in zip(names, predicted, strict=True):
            self._note(history, PREFIXES[name], predictions)
        if (shared := predict.shared(local, state, data.test)) is not None:
            self._note(history, "global", shared)
        if len(self.sample) < self.data.clients:
            # A sample's answers differ from the federation's.
            return run
        return replace(run, after=answers_of(known, run.algorithm))

    def _note(self, history: History, prefix: str, predicted: LocalPredictions) -> None:
        """Add the library's and the user's measures of some predictions."""
        known = predicted.measured()
        found = known.summary()
        own = measured(self.measures, predicted, found)
        found |= means(own)
        history[-1].update({f"{prefix}_{name}": value for name, value in found.items()})
        if self.recorded:
            each = known.table() | own
            history.record({f"{prefix}_{name}": each[name] for name in self.recorded})
