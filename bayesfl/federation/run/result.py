"""The result of a federation: predictions, adaptation to new clients, and saving."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch.utils._pytree import tree_map

from bayesfl.base.archive import digest_of_tensor
from bayesfl.base.described import described
from bayesfl.base.files import folder
from bayesfl.base.inputs import named
from bayesfl.base.layout import Pattern
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.options import PROBABILITY, Count, declared, instance, suggests
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Server, Tensors, View
from bayesfl.base.random import Purpose, generator
from bayesfl.base.surveys import Survey, conduct
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Descend, unrolled
from bayesfl.composition.predictors import PooledLaplace
from bayesfl.data import ClientData, FederatedData
from bayesfl.data.outline import Outline, place
from bayesfl.data.schema import Schema
from bayesfl.engine import Engine
from bayesfl.evaluation.audit import Audit, Counting, Groups, units
from bayesfl.evaluation.calibration import Fitted, Step, applied
from bayesfl.evaluation.history import History
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.clients import pooling, predict, surveying, tuning
from bayesfl.federation.clients.after import (
    Here,
    Known,
    answered,
    answers_of,
    known_of,
    next_question,
)
from bayesfl.federation.clients.client_model import (
    ClientModel,
    check_file_names,
    client_model,
    needs_data,
)
from bayesfl.federation.clients.local import Local, State, private_rows
from bayesfl.federation.clients.modules import module_at
from bayesfl.federation.run import reporting
from bayesfl.federation.run.record import Run, in_words
from bayesfl.federation.settings import FEDERATION
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import Answer, agree, identity, reading
from bayesfl.models.copies import refuse_changed
from bayesfl.optim import rate_at
from bayesfl.posteriors import Samples
from bayesfl.posteriors.pooled import Structure


@in_own_modes
@dataclass(frozen=True)
class Result(Run):
    """Hold the state of a federation after some rounds; predict, calibrate, adapt and save.

    The members that it shares with a deployment are in `bayesfl.federation.run.record.Run`.

    Args:
        algorithm: The method.
        known: The clients' data, or their outline if the run was loaded without data.
        settings: The run's settings.
        engine: How the run was computed, with its chunk size fixed.
        round: Number of rounds done.
        server: The server's state.
        private: The clients' private states, [J, ...] each.
        history: One row for each round.
        device: The device of the state, which also computes and holds predictions.
        dtype: The precision of the state.
        novel: Whether the clients joined after training, by `adapt`; such a result can predict, but
            training cannot continue from it.
        tolerant: Whether a client whose fine-tuning is no longer finite predicts without it, as in
            runs that skip bad clients; otherwise `DivergenceError` is raised.
        began: Description of the run's start; differs between states.
        after: Objects fitted after training: the clients' answers to the surveys of the method's
            predictor, and the steps of calibration. Answers are valid for the method as it
            predicted then; for another one, from `replace(result, algorithm=...)`, clients are
            asked again. Further training deletes them.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> result = bf.simulate(method, clients, rounds=1)
        >>> result.predict(clients.test)
        Predictions(2 clients of 179 to 180 examples; probs [2, 180, 10])
        >>> result.client(1)
        ClientModel('client 1' after round 1; inputs (64,))
    """

    known: FederatedData | Outline
    engine: Engine
    private: View
    novel: bool = False
    tolerant: bool = False

    def __repr__(self) -> str:
        source = self.known.source if isinstance(self.known, Outline) else self.known.source.name
        rule: Any = self.algorithm.predictor
        laplace = f"; pooled Laplace, {rule.structure}" if hasattr(rule, "question") else ""
        steps = (
            f"; calibrated by {', '.join(type(one.step).__name__ for one in self.steps)}"
            if self.steps
            else ""
        )
        return (
            f"Result({self.known.clients} clients of {source}, round {self.round} of "
            f"{self.settings.rounds}; {self.history}{laplace}{steps})"
        )

    @property
    def data(self) -> FederatedData:
        """Return the clients' data.

        Raises:
            ValueError: The result was loaded without them.
        """
        if isinstance(self.known, Outline):
            raise ValueError(
                "this result was loaded without its clients' data; load it with them: "
                "bf.load(path, algorithm, clients)"
            )
        return self.known

    @property
    def called(self) -> tuple[str, ...]:
        """Return the clients' names."""
        return self.known.client_names

    @property
    def origin(self) -> str:
        """Return a description of this state, see `Run.origin`."""
        what = f"round {self.round} of a run with seed {self.settings.seed}"
        return in_words(what, self.called, {"server": self.server, "private": self.private})

    def uncalibrated(self) -> "Result":
        """Return the result without its steps of calibration."""
        return replace(self, after=tuple(one for one in self.after if isinstance(one, Answer)))

    @property
    def tuned(self) -> float | None:
        """Return the number that the method's predictor tunes on the validation data of all
        clients, such as FedSI's predictive precision.

        None if the method's predictor tunes none.

        Raises:
            ValueError: The data have no validation split, or no candidate gives finite predictions.
            DivergenceError: A client's fine-tuning is not finite, and `tolerant` is False.
        """
        return predict.value_of(self.algorithm, self.answers)

    @cached_property
    def answers(self) -> Known:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the last states of the surveys that the method's predictor needs, by their names;
        missing surveys are conducted.

        Raises:
            ValueError: See `tuned` and `PooledCurvature`; or the result was loaded without its
                clients' data.
            DivergenceError: See `tuned`.
        """
        return self._answered(None)

    def _answered(self, aggregation: surveying.Adder | None) -> Known:
        known = known_of(self.after, self.algorithm)
        asks = next_question(self.algorithm, self.server, known) is not None
        if not asks and not getattr(self.algorithm.predictor, "validates", False):
            return known
        tuning.check_tunable(self.algorithm, tuning.tunable(self.data))
        data = self.data.to(self.device, self.dtype)
        with self.engine.crew(self.device) as crew:
            here = Here(self.local(data.splits), self.state, data, crew, aggregation)
            return answered(self.algorithm, self.server, known, here)

    def _answers(self) -> tuple[Answer, ...]:
        """Return the clients' answers, after conducting missing surveys; a tuned number stays
        undetermined without data to tune it on.
        """
        if tuning.together(self.algorithm) and (
            isinstance(self.known, Outline) or not tuning.tunable(self.data)
        ):
            return answers_of(known_of(self.after, self.algorithm), self.algorithm)
        return answers_of(self.answers, self.algorithm)

    @cached_property
    def state(self) -> State:
        """Return the federation's state; it shares this result's tensors."""
        return State(self.server, self.private, self.round)

    def local(self, splits: Mapping[str, ClientData]) -> Local:
        """Return an object for the clients' local work with these splits of their data, on the
        run's device and in its precision.
        """
        refuse_changed(self.algorithm.model)
        return Local(
            self.algorithm,
            self.engine,
            splits["train"],
            self.settings.seed,
            self.settings.rounds,
            self.tolerant,
            self.known.client_names,
            splits.get("validation"),
        )

    @suggests
    def predict(self, split: ClientData | None = None, *, draws: int | None = None) -> Predictions:
        """Predict with every client's own model on a split of its data, after aggregation (and
        fine-tuning, if the method fine-tunes).

        Args:
            split: One of the splits of `data`, or a part of one, possibly with modified inputs;
                None for the test split.
            draws: Number of posterior draws S to average over; 0 predicts at the mean, None uses
                the number of the method's paper.

        Raises:
            TypeError: `split` is not a `ClientData`.
            ValueError: The split has other inputs, columns or clients; `draws` is not an integer
                >= 0; or the method's predictor must be tuned but the data have no validation split.
            DivergenceError: A client's fine-tuning is not finite, and `tolerant` is False.
            MemoryError: The predictions, padded to the longest client, exceed the memory; `table`
                and `audit` use no padding.
        """
        if split is not None:
            instance(
                "split", split, ClientData, "pass clients.test, or another split of result.data"
            )
        found = self.known_of(self.data.test if split is None else split, draws)
        return replace(found.padded(), class_names=self.known.class_names)

    def known_of(self, split: ClientData, draws: int | None = None) -> LocalPredictions:
        """Return the predictions of `predict` without padding, row after row.

        Raises:
            ValueError: See `predict`; or the steps of calibration were fitted for another way of
                predicting.
        """
        data = self.data.to(self.device, self.dtype)
        split = split.to(self.device, self.dtype)
        about = {"outputs": data.outputs, "task": data.task, "columns": split.columns}
        data.schema.refuse_other("split", Schema.of(split, **about))
        if not any(_is_part(split, known) for known in data.splits.values()):
            raise ValueError(
                "the split belongs to other clients: its labels are not rows of the same clients "
                "in result.data. Pass one of result.data's splits, or a part of one; for clients "
                "never seen use result.adapt(...)"
            )
        surveying.check_draws(self.steps, draws, self.algorithm)
        surveying.check_reading(self)
        (predicted,) = self.local_predictions(split, draws=draws)
        return applied(self.steps, predicted)

    @suggests
    def table(self, split: str = "test", *, draws: int | None = None) -> Any:
        """Return every measure of every client's predictions on a split, as a pandas data frame
        with a row for each client, indexed by name.

        Args:
            split: Name of the split, such as `validation`.
            draws: See `predict`.

        Returns:
            Columns `train_rows`, `test_rows` and so on, the client's rows in each split. For
            classes `accuracy`, `nll`, `ece`, `mce`, `brier`, `macro_f1` and `auroc`, and
            `most_frequent`, the accuracy of always answering the client's most frequent training
            class; for numbers
            `rmse`, `nll`, `crps`, `coverage_50`, `coverage_90` and `width_90`, the mean width of
            90% intervals; for intervals `rmse`, `pinball`, `coverage`, `width` and
            `interval_score`; and the measures of steps of calibration, such as `coverage` and
            `set_size`. NaN for a client without rows in the split.

        Raises:
            KeyError: The data have no such split.
            ValueError: See `predict`.
            DivergenceError: See `predict`.
        """
        import pandas as pd

        measured = self.known_of(self.data.splits[split], draws).measured().table()
        columns = {f"{name}_rows": part.counts for name, part in self.data.splits.items()} | {
            name: values for name, values in measured.items() if name not in ("client", "examples")
        }
        if (often := self.data.most_frequent(split)) is not None:
            columns["most_frequent"] = often
        return pd.DataFrame(columns, index=pd.Index(self.known.client_names, name="client"))

    def local_predictions(
        self, *splits: ClientData, draws: int | None = None, steps: Sequence[Step] = ()
    ) -> tuple[LocalPredictions, ...]:
        """Return the clients' predictions on splits for surveys, before any step of calibration;
        clients fine-tune once for all splits.

        Args:
            *splits: The splits, on the run's device and in its precision.
            draws: See `predict`.
            steps: Further steps of calibration that will read the predictions; these include the
                data that the steps need.
        """
        reads = [*steps, *(one.step for one in self.steps)]
        agree(
            lambda: {
                "rows to predict": [*map(_marks, splits)],
                "draws": draws,
                "results": [identity(self.algorithm), described(self.settings), self.round],
                "states": described(self.server),
                "steps of calibration": described(reads),
            }
        )
        local = self.local(self.data.to(self.device, self.dtype).splits)
        # The posterior means need no surveys, except those of clients' own heads.
        known = known_of(self.after, self.algorithm) if draws == 0 else self.answers
        with self.engine.crew(self.device) as crew:
            found = predict.personal(local, self.state, splits, crew, draws=draws, known=known)
        return tuple(
            surveying.hashed_rows(predicted, split, reads)
            for predicted, split in zip(found, splits, strict=True)
        )

    def calibrate(self, *steps: Step, aggregation: surveying.Adder | None = None) -> "Result":
        """Return the federation with calibrated predictions: steps are fitted one after another, by
        surveys of the clients.

        `predict` and `client` then apply them, and `save` stores them. Parameters that a client
        fits to its own data never leave it.

        Args:
            *steps: Steps of `bf.calibration`, such as `Temperature()`, or others with the members
                of its `Step`; they follow the steps that the result already has.
            aggregation: How the clients' answers are added, such as `SecureSum()`; None adds them
                in the clear.

        Raises:
            TypeError: Something is not a step, or the aggregation cannot add answers.
            ValueError: The split does not exist, a step does not fit the task, an answer is outside
                the aggregation's range, or a step asks for sums after training under
                `ClientPrivacy`.

        Warns:
            UserWarning: Sets are made on the split of another step, a step is fitted to training or
                test rows, the data do not bound a temperature, or a step increases the loss of
                validation rows or of other rows that a step reads.
        """
        surveying.checked_steps(steps, [one.step for one in self.steps])
        surveying.check_reading(self)
        outputs = surveying.about(self, steps)
        splits = self.data.to(self.device, self.dtype).splits
        wanted = {step.split: surveying.asked(step, splits) for step in steps}
        if wanted and "validation" in splits and splits["validation"].counts.any():
            wanted.setdefault("validation", splits["validation"])  # to evaluate the steps
        predicted = dict(
            zip(wanted, self.local_predictions(*wanted.values(), steps=steps), strict=True)
        )
        found = surveying.fitted(steps, self.steps, predicted, outputs, aggregation)
        now = reading(self.algorithm)
        return replace(
            self, after=(*self._answers(), *(replace(one, reading=now) for one in found))
        )

    @suggests
    def laplace(
        self,
        structure: Structure = "last_layer",
        *,
        precision: float | Literal["evidence"] = "evidence",
        pattern: Pattern = "*",
        aggregation: surveying.Adder | None = None,
    ) -> "Result":
        """Return the federation with a Laplace approximation of the server's network from all
        clients' training rows: the clients' curvatures are summed.

        Every client predicts with this one posterior, linearised, and so do clients added by
        `adapt`. The posterior is available as `posterior`, and `save` stores it. To train further,
        use the original result.

        The posterior is valid only around a mode of likelihood times prior: train until the loss
        stops decreasing, with weight_decay = precision / rows of all clients. Predictions may be
        underconfident, most of all under `diagonal`: `calibrate(bf.calibration.Temperature())` fits
        a temperature to them on validation rows.

        Each client answers once and sends eight bytes for each number: D (D + 1) / 2 numbers for D
        weights under `last_layer` and `full` (4.1 MB for a last layer of 100 inputs and 10
        classes), D under `diagonal`, and under `kfac` I (I + 1) / 2 + O (O + 1) / 2 for a layer
        from I to O (41 kB for that layer, pattern="head.*"); and its number of rows and their log
        likelihood.

        Args:
            structure: See `bf.predictors.PooledLaplace`.
            precision: See `bf.predictors.PooledLaplace`.
            pattern: See `bf.predictors.PooledLaplace`.
            aggregation: How the clients' answers are added, such as `SecureSum()`; None adds them
                in the clear.

        Raises:
            TypeError: The likelihood's curvature is not known, or the aggregation cannot add
                answers.
            ValueError: The server has no complete network, or several; the structure does not
                support the network; the run was trained under `ClientPrivacy`; or its clients
                joined after training, by `adapt`, or it was loaded without their data.
            MemoryError: The curvature exceeds the memory.

        Warns:
            UserWarning: The loss of validation rows is larger than for the network alone.

        References:
            Daxberger et al., "Laplace Redux", NeurIPS 2021; their laplace-torch computes the same
            from the pooled rows.

        Example:
            >>> import bayesfl as bf
            >>> clients = bf.data.iid("digits", clients=3, max_size=60)
            >>> model = bf.models.mlp(clients.inputs, hidden=5, outputs=clients.outputs)
            >>> method = bf.algorithms.fedavg(model)
            >>> result = bf.simulate(method, clients, rounds=1, progress=False)
            >>> mean, variance = result.laplace("last_layer").posterior.moments()
            >>> list(variance.shape)  # 5 inputs and 10 classes, with a bias
            [60]
        """
        if self.novel:
            raise ValueError(
                "these clients joined after training, but the posterior belongs to the clients "
                "that trained: use the federation's own result.laplace(), then adapt(novel)"
            )
        rule = PooledLaplace(structure, precision, pattern)
        self.model()  # raises if the server does not have exactly one network
        made = self._by(pooling.servers_method(self.algorithm, rule), aggregation)
        held = self.data.to(self.device, self.dtype).splits.get("validation")
        if held is not None and held.counts.any() and self.known.task == "classification":
            plain, averaged = (made.local_predictions(held, draws=draws)[0] for draws in (0, None))
            losses = surveying.worse(plain, averaged)
            if losses is not None and losses[1] > 1.01 * losses[0]:
                warn(
                    f"the loss of validation rows is {losses[0]:.3g} nats a row for the network "
                    f"alone, and {losses[1]:.3g} with this posterior, whose predictions are "
                    "underconfident: fit a temperature to them, "
                    ".calibrate(bf.calibration.Temperature())"
                )
        return made

    def _by(self, method: Algorithm, aggregation: surveying.Adder | None) -> "Result":
        """Return the federation with a method that trains nothing, after its surveys."""
        server = pooling.servers_state(self.algorithm, self.server, method)
        question: Any = next_question(method, server, {})
        surveying.about(self, [question[1]])
        made = replace(self, algorithm=method, server=server, private={}, after=())
        return replace(made, after=answers_of(made._answered(aggregation), method))

    def heads(self, *, aggregation: surveying.Adder | None = None) -> "Result":
        """Return the federation with clients' own heads on the trained bodies: last layers w_j ~
        N(w, diag tau^2), each with a Gaussian posterior of all its weights given its own rows.

        Mean w and tau, one for each tensor of the layer, are estimated by a few surveys whose
        answers are sums over clients; nothing is trained. The Gaussians include the uncertainty of
        w and tau. Clients predict from the outputs' Gaussians, in closed form. If there are
        validation rows, they select a multiple of tau, and the share of the uncertainty in
        predictions: all, half or none, because Gaussians of many weights may predict worse than
        their means. A client's head is computed from its training rows whenever it predicts, also
        for clients added by `adapt`. Over Flower, `bayesfl.flower.serve` with
        `bf.with_heads(method)` conducts the same surveys.

        Args:
            aggregation: How the clients' answers are added, such as `SecureSum()`; None adds them
                in the clear. An answer has D^2 numbers for a layer of D weights, in each of about
                ten to thirty questions.

        Raises:
            ValueError: There is no linear layer that makes the outputs, clients have no common
                body, an answer is outside the aggregation's range, or the federation was trained
                under `ClientPrivacy`.
        """
        return self._by(pooling.with_heads(self.algorithm), aggregation)

    def survey(self, survey: Survey, *, aggregation: surveying.Adder | None = None) -> Tensors:
        """Conduct a survey of the clients' own predictions, as this result makes them, and return
        the survey's last state.

        Args:
            survey: The survey, see `bayesfl.base.surveys.Survey`.
            aggregation: How the clients' answers are added, such as `SecureSum()`; None adds them
                in the clear.

        Raises:
            TypeError: `survey` is not a survey, or the aggregation cannot add answers.
            ValueError: The split does not exist; or an answer differs in shape from the survey's
                declaration, or is not finite.
        """
        outputs = surveying.about(self, [survey])
        predicted = self.known_of(surveying.asked(survey, self.data.splits))
        return conduct(survey, surveying.ask_here(survey, predicted, aggregation), outputs)

    @declared
    def audit(
        self,
        split: str = "test",
        *,
        by: Literal["client", "label"] = "client",
        groups: Groups | None = None,
        delta: Annotated[float, PROBABILITY] = 0.05,
        aggregation: surveying.Adder | None = None,
    ) -> Audit:
        """Audit the predictions by client, label or group: coverage, set sizes, accuracy and
        calibration error, with exact intervals.

        The audit is a survey: for each unit the server receives counts and sums over all clients;
        by client they are each client's own.

        Args:
            split: The split that is predicted; it must not have been used for anything else.
            by: The unit of the table's rows.
            groups: For each client the group of every row of its split, as text, numbers or bools,
                None for no group; a function that computes these from a client's inputs before any
                transform, see `Columns.values`; or a column of `from_frame`.
            delta: Probability that any of a column's intervals misses, in (0, 1).
            aggregation: How the clients' answers are added, such as `SecureSum()`; None adds them
                in the clear.

        Raises:
            TypeError: The aggregation cannot add answers.
            ValueError: The split does not exist, `by` or `groups` does not fit, or `delta` is out
                of range.
        """
        rows = surveying.asked(Counting("group", (), split), self.data.splits)
        if split == "train" or split in {one.step.split for one in self.steps}:
            warn(
                f"the split {split!r} was used for training or calibration, so the audit is too "
                "favourable; audit rows that were used for neither"
            )
        survey = units(self.data, split, rows, by, groups)
        outputs = surveying.about(self, [survey])
        predicted = self.known_of(rows)
        ask = (
            survey.openly(predicted)
            if aggregation is None
            else surveying.ask_here(survey, predicted, aggregation)
        )
        state, known = conduct(survey, ask, outputs), predicted.predictions
        return survey.audit(state, level=known.promise, risk=known.risk, delta=delta)

    def adapt(self, novel: FederatedData) -> "Result":
        """Return the federation with clients never seen in training: their state starts from the
        server's and is adapted once.

        The server's entries for single clients are initialised for them (`Algorithm.newcomers`).
        The new result can predict and can be saved; training cannot continue from it. Schedules
        are evaluated at the present round; a warning is issued if a rate has fallen below a tenth.

        Args:
            novel: The new clients' data; the method's `adapt` phases use their training data.

        Raises:
            TypeError: `novel` is not a `FederatedData`.
            ValueError: Their inputs, transform, outputs, task, columns or class names, or the order
                of these names, differ from the federation's.
            DivergenceError: A new client's training is not finite.
        """
        instance("novel", novel, FederatedData, FEDERATION)
        self.known.schema.refuse_other("novel", novel.schema)
        algorithm = self.algorithm
        kept = [name for name in algorithm.parts if algorithm.blocks[name].keep]
        if kept and not algorithm.adapt:
            raise ValueError(
                f"each client predicts with its own {kept}, but the method has no `adapt` phases "
                "for a new client to learn them; add some, as "
                "dataclasses.replace(algorithm, adapt=algorithm.phases)"
            )
        self._warn_of_slow_rates()
        server = algorithm.newcomers(self.server, novel.clients)
        private = private_rows(algorithm, server, novel.clients)
        moved = novel.to(self.device, self.dtype)
        with self.engine.crew(self.device) as crew:
            self.local(moved.splits).adapt(State(server, private, self.round), crew)
        new = replace(
            self,
            known=novel,
            server=server,
            private=private,
            history=History(),
            novel=True,
            after=self._answers(),
        )
        return replace(new, after=(*new.after, *self._settled(new, moved))) if self.steps else new

    def _warn_of_slow_rates(self) -> None:
        """Warn if the rate of a phase of `adapt` has fallen below a tenth of its first value."""
        rounds = self.settings.rounds
        at = 1, min(self.round + 1, rounds)  # as in `Algorithm.given`
        rates = [
            [rate_at(phase.optimiser.rate, round, rounds) for round in at]
            for outer in self.algorithm.adapt
            for phase in unrolled(outer)
            if isinstance(phase, Descend)
        ]
        if fallen := [f"{first:.3g} to {now:.3g}" for first, now in rates if now < 0.1 * first]:
            warn(
                "the learning rate of the method's adapt phases has fallen from "
                f"{', '.join(dict.fromkeys(fallen))} after {self.round} rounds, so new clients "
                "hardly learn; adapt them at a constant rate, as dataclasses.replace(result, "
                "algorithm=dataclasses.replace(result.algorithm, adapt=constant.adapt))"
                ".adapt(novel) does, where `constant` is the method with an optimiser such as "
                "SGD(0.1)"
            )

    def _settled(self, new: "Result", novel: FederatedData) -> tuple[Fitted, ...]:
        """Return the steps of calibration with the new clients' own parameters, fitted to their
        rows in the steps' splits, if they have any.

        Args:
            new: The federation with the new clients, without steps.
            novel: Their data, on the run's device and in its precision.
        """
        steps = [one.step for one in self.steps]
        filled = {name: split for name, split in novel.splits.items() if split.counts.any()}
        splits = {step.split: filled.get(step.split, novel.train) for step in steps}
        found = new.local_predictions(*splits.values(), steps=steps)
        predicted = {
            name: one if name in filled else surveying.without_rows(one)
            for name, one in zip(splits, found, strict=True)
        }
        return surveying.settled(self.steps, predicted)

    def client(self, client: int | str) -> ClientModel:
        """Return a client's own model, which predicts for new rows and can be saved.

        It is fine-tuned once if the method fine-tunes before prediction. Later training of this
        federation does not change it.

        Args:
            client: The client's name, or its number, as in `FederatedData.select`.

        Raises:
            TypeError: `client` is neither.
            ValueError: There is no such client, or a number is the name of another; or the model
                needs training data, without which this result was loaded, or validation data to
                tune its predictor.
            DivergenceError: The client's fine-tuning is not finite, and `tolerant` is False.
        """
        surveying.check_reading(self)
        j = place(client, self.known.client_names)
        name = self.known.client_names[j]
        if isinstance(self.known, Outline) and needs_data(self.algorithm):
            raise ValueError(
                f"{name!r} needs its training data, for fine-tuning or for the method's predictor, "
                "but this result was loaded without them; bf.load(path, algorithm, clients) loads "
                "it with them, bf.load_client reads a client's own file"
            )
        if isinstance(self.known, Outline):
            (given, views), train = self._unadapted(j), None
        else:
            local = self.local(
                {
                    name: split.alone(j).to(self.device, self.dtype)
                    for name, split in self.known.splits.items()
                }
            )
            ids = np.array([j])
            done = local.finetuned(ids, self.state.received(self.algorithm, ids), self.round)
            given, views = done.given, done.views
            train = local.own_rows(j)
        return client_model(
            self.algorithm,
            given,
            tree_map(lambda t: t[0].clone(), views),
            train,
            name=name,
            client=j,
            data=self.known,
            round=self.round,
            seed=self.settings.seed,
            known=self.answers,
            steps=tuple(one.of(torch.tensor([j])) for one in self.steps),
        )

    def _unadapted(self, j: int) -> tuple[Server, View]:
        """Return the state that client j received and its view before any phase, [1, ...]."""
        refuse_changed(self.algorithm.model)
        got = self.state.received(self.algorithm, np.array([j]))
        given = self.algorithm.given(got.common, self.round, self.settings.rounds)
        counts = self.known.counts if isinstance(self.known, Outline) else self.known.train.counts
        count = torch.tensor([int(counts[j])], dtype=self.dtype, device=self.device)
        return given, self.algorithm.views(given, got.addressed, got.rows, count)

    def save_clients(self, path: str | os.PathLike[str], *, plug_in: bool = False) -> None:
        """Write every client's model into a folder of its name in the folder `path`; `load_client`
        reads them.

        If the method's predictor needs training data (FedSI), a client's file is as confidential as
        these and must not leave the client, see `ClientModel.save`; use `plug_in=True` for files
        that will leave.

        Args:
            path: The folder, created if it does not exist.
            plug_in: Whether to store only the posterior means, without the covariances computed
                from training data.

        Raises:
            TypeError: `path` is neither text nor a path.
            ValueError: `path` is empty, or a client's name cannot be a folder name (nothing is
                written then); or see `client` and `ClientModel.save`.
            DivergenceError: A client's fine-tuning is not finite, and `tolerant` is False.
        """
        inside, names = folder("path", path), self.known.client_names
        check_file_names(names)
        for name in names:
            self.client(name).save(inside / name, plug_in=plug_in)

    @declared
    def samples(self, client: int | str, block: str, *, draws: Count = 1000) -> Samples:
        """Draw from a client's posterior of a block; its other blocks stay at their posterior
        means.

        For a block with M copies these are the third axis, [1, S, M, D], and there is no single
        network that predicts.

        Args:
            client: The client's name, or its number.
            block: A block whose posterior has an entropy.
            draws: Number of draws S; they are independent and form one chain.

        Raises:
            ValueError: There is no such client or block, or the block's posterior is a point.
        """
        j, algorithm = place(client, self.known.client_names), self.algorithm
        if not algorithm.blocks[block].stochastic:
            drawn = [name for name, this in algorithm.blocks.items() if this.stochastic]
            raise ValueError(
                f"the posterior of block {block!r} is a point, without draws; the blocks with a "
                f"distribution are {drawn}"
            )
        view = (
            self.client(j).view  # its posteriors may depend on answers
            if hasattr(algorithm.predictor, "asks")
            else tree_map(lambda t: t[0], self._unadapted(j)[1])
        )
        rng = generator(
            self.settings.seed,
            Purpose.POSTERIOR,
            round=self.round,
            client=j,
            index=list(algorithm.blocks).index(block),
        )
        noise = torch.from_numpy(
            rng.standard_normal((draws, algorithm.noise_size(block)), np.float32)
        ).to(view[block]["loc"])
        found = algorithm.blocks[block].posterior.sample(
            view[block], algorithm.noise_of_copies(block, noise)
        )
        single = algorithm.copies(algorithm.parts) is None
        network = module_at(algorithm, algorithm.parts, view) if single else algorithm.model
        return Samples(found[None], algorithm.layout(block), network, algorithm.likelihood)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, the settings and the history into the folder `path`; `bf.load` reads
        them.

        The model's code and the data are not written; `bf.load` receives them as arguments and
        checks that they are the same. A run that the folder held is replaced.

        Raises:
            OSError: `path` is a file, or lies under one.
        """
        files.write(path, files.RUN, self._content())

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a report of the run: one page of HTML that needs no other file.

        It contains the settings, the data by client, learning curves, a table of every client's
        measures on its test rows, a reliability diagram, coverage if `calibrate` has made sets or
        intervals, the data that clients sent, and the environment. For a result that was loaded
        without data it contains only the measures of its history.

        Args:
            path: The file, as `report.html`.

        Raises:
            ValueError: See `predict`.
            DivergenceError: See `predict`.

        Example:
            >>> from pathlib import Path
            >>> from tempfile import mkdtemp
            >>> import bayesfl as bf
            >>> clients = bf.data.iid("digits", clients=3, max_size=60)
            >>> model = bf.models.mlp(clients.inputs, hidden=5, outputs=clients.outputs)
            >>> method = bf.algorithms.fedavg(model)
            >>> result = bf.simulate(method, clients, rounds=2, progress=False)
            >>> path = Path(mkdtemp()) / "report.html"
            >>> result.report(path)
            >>> "FedAvg on digits" in path.read_text()
            True
        """
        reporting.write_report(path, {**vars(self), "algorithm": identity(self.algorithm)}, self)

    def save_round(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint of a run in progress into the folder `path`; the previous checkpoint
        is kept, older ones are removed.

        Raises:
            OSError: `path` is a file, or lies under one.
        """
        if current().rank == 0:
            files.write_round(path, files.RUN, self._content())

    def _content(self) -> dict[str, Any]:
        """Return the content of a file; it includes only surveys that were conducted, as they are
        slow.
        """
        known = self.__dict__.get("answers", known_of(self.after, self.algorithm))
        return {
            **vars(self),
            "after": (*answers_of(known, self.algorithm), *self.steps),
            "predicting": pooling.predicting(self.algorithm),
        }


def _marks(split: ClientData) -> list[Any]:
    """Return numbers that other rows would hardly have: the counts of clients, and a thousand rows
    at most.
    """
    some = split.take(split.index[:: max(1, len(split.index) // 1000)])
    return [split.counts.tolist(), [digest_of_tensor(t) for _, t in named(some)]]


def _is_part(split: ClientData, known: ClientData) -> bool:
    """Return whether every client's examples in `split` are among its own in `known`, judged by
    labels and places; inputs may differ.
    """
    if split.clients != known.clients or not (
        split.y is known.y or (split.y.dtype == known.y.dtype and torch.equal(split.y, known.y))
    ):
        return False

    def owned(of: ClientData) -> torch.Tensor:
        client = np.repeat(np.arange(len(of.counts)), of.counts)
        return torch.from_numpy(client).to(of.index.device) * len(of.y) + of.index

    return bool(torch.isin(owned(split), owned(known)).all())
