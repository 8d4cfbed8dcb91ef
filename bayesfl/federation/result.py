"""The result of a federation: predictions, adaptation to new clients, and saving."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from bayesfl.base.checks import instance, whole
from bayesfl.base.copies import refuse_changed
from bayesfl.base.files import folder
from bayesfl.base.protocols import Server, Tensors, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import ClientData, FederatedData
from bayesfl.data.outline import Outline, place
from bayesfl.engine import Engine
from bayesfl.evaluation.alarm import Alarm, Watched
from bayesfl.evaluation.audit import Audit
from bayesfl.evaluation.calibration import Fitted, Step, applied
from bayesfl.evaluation.history import History
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import Mine, Outputs, Survey, conduct
from bayesfl.federation import predict, store, surveying, tuning
from bayesfl.federation.auditing import Groups, audited
from bayesfl.federation.client import Local, State
from bayesfl.federation.client_loading import check_file_names
from bayesfl.federation.client_model import ClientModel
from bayesfl.federation.draws import to_arviz
from bayesfl.federation.identity import Chosen, reading
from bayesfl.federation.joining import adapted
from bayesfl.federation.modules import server_module
from bayesfl.federation.serving import served_client, unadapted
from bayesfl.federation.settings import Settings
from bayesfl.federation.splits import check_split

OWN = "the method's own start"
"""What a run began from that did not begin from another."""


@dataclass(frozen=True)
class Result:
    """The state of a federation after some rounds, with all that its predictions need.

    Args:
        algorithm: The method.
        known: The clients' data; their outline, where the run was loaded without them.
        settings: The run's settings.
        engine: How the run was computed, with its chunk size fixed.
        round: Number of rounds done.
        server: The server's state.
        private: The clients' private states, [J, ...] each.
        history: One row for each round.
        device: The device that holds the state, and computes and holds predictions.
        dtype: The precision of the state.
        novel: Whether the clients joined after training, by `adapt`; then the result predicts, but training cannot continue from it.
        chosen: The value of `tuned` where it is known already, because new clients joined a federation that has one, or because it was
            saved, with the way of predicting that it was chosen for; None where it is not. For another one, as `replace(result,
            algorithm=...)` gives, it is chosen anew.
        tolerant: Whether a client whose fine-tuning is no longer finite predicts without it, as where bad clients are skipped; otherwise
            it raises `DivergenceError`.
        steps: Steps of calibration, as `calibrate` has fitted them, which `predict` and `client` apply.
        calibrated: How the method predicted when they were fitted, see `reading`; None without steps.
        began: What the run began from, in words that differ for other states.
    """

    algorithm: Algorithm
    known: FederatedData | Outline
    settings: Settings
    engine: Engine
    round: int
    server: Server
    private: View
    history: History = field(default_factory=History)
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    novel: bool = False
    chosen: Chosen | None = None
    tolerant: bool = False
    began: str = OWN
    steps: tuple[Fitted, ...] = ()
    calibrated: str | None = None

    def __repr__(self) -> str:
        source = self.known.source if isinstance(self.known, Outline) else self.known.source.name
        steps = f"; calibrated by {', '.join(type(one.step).__name__ for one in self.steps)}" if self.steps else ""
        return f"Result({self.known.clients} clients of {source}, round {self.round} of {self.settings.rounds}; {self.history}{steps})"

    @property
    def data(self) -> FederatedData:
        """Return the clients' data.

        Raises:
            ValueError: The result was loaded without them.
        """
        if isinstance(self.known, Outline):
            raise ValueError("this result was loaded without its clients' data; load it with them: bf.load(path, algorithm, clients)")
        return self.known

    @cached_property
    def tuned(self) -> float | None:
        """Return the number of the method's predictor that best fits the validation data of all clients, as FedSI's predictive precision.

        None where the method's predictor has no such number.

        Raises:
            ValueError: The data have no validation split, or no candidate gives finite predictions.
            DivergenceError: A client's fine-tuning is not finite, and `tolerant` is False.
        """
        if (value := self.known_value) is not None:
            return value
        if not tuning.needs_validation(self.algorithm):
            return tuning.without_data(self.algorithm)
        data = self.data.to(self.device, self.dtype)
        with self.engine.crew(self.device) as crew:
            return tuning.tune(self.local(data.train), self.state, data, crew)

    @property
    def known_value(self) -> float | None:
        """Return the number of `chosen`, if it was chosen for the method's way of predicting."""
        return self.chosen.value if self.chosen and self.chosen.reading == reading(self.algorithm) else None

    def known_choice(self) -> Chosen | None:
        """Return `tuned` where there are data to tune on, otherwise `chosen`."""
        if self.known_value is not None or isinstance(self.known, Outline):
            return self.chosen
        try:
            tuning.check_tunable(self.algorithm, self.data)
        except ValueError:
            return None
        return None if self.tuned is None else Chosen(self.tuned, reading(self.algorithm))

    @property
    def state(self) -> State:
        """Return the federation's state; it shares this result's tensors."""
        return State(self.server, self.private, self.round)

    def local(self, train: ClientData) -> Local:
        """Return the local work of clients whose training data are `train`, which must be on the run's device and in its precision."""
        refuse_changed(self.algorithm.model)
        return Local(self.algorithm, self.engine, train, self.settings.seed, self.settings.rounds, self.tolerant, self.known.client_names)

    def predict(self, split: ClientData | None = None, *, draws: int | None = None) -> Predictions:
        """Predict with every client's own model on a split of its data, after aggregation (and fine-tuning, where the method has it).

        Args:
            split: One of the splits of `data`, or a part of one, whose inputs may have been changed; None for the test split.
            draws: Number of posterior draws S to average over; 0 predicts at the mean, None uses the number of the method's paper.

        Raises:
            TypeError: `split` is no `ClientData`.
            ValueError: The split has no examples, other inputs or other columns, or is of other clients; `draws` is not a whole number
                >= 0; or the method's predictor has to be tuned and the data have no validation split.
            DivergenceError: A client's fine-tuning is not finite, and `tolerant` is False.
        """
        if split is not None:
            instance("split", split, ClientData, "pass clients.test, or another split of result.data")
        data = self.data.to(self.device, self.dtype)
        split = data.test if split is None else split.to(self.device, self.dtype)
        check_split(split, data)
        if draws is not None:
            whole("draws (None is the paper's number)", draws, least=0)
            surveying.check_draws(self.steps, draws, self.algorithm)
        return replace(self.calibrated_mine(split, draws).predictions, class_names=self.known.class_names)

    def calibrated_mine(self, split: ClientData, draws: int | None = None) -> Mine:
        """Return what clients know of themselves on a split, as the result's steps of calibration change it.

        Raises:
            ValueError: The steps were fitted to another way of predicting.
        """
        surveying.check_reading(self)
        (mine,) = self.mine(split, draws=draws)
        return applied(self.steps, mine)

    def mine(self, *splits: ClientData, draws: int | None = None, steps: Sequence[Any] = ()) -> tuple[Mine, ...]:
        """Return what clients know of themselves on splits, before any step of calibration; they fine-tune once for all.

        Args:
            *splits: The splits, on the run's device and in its precision.
            draws: As of `predict`.
            steps: Steps of calibration that are to read it, beside the result's own, by which it holds what they need.
        """
        train, reads = self.data.train.to(self.device, self.dtype), [*steps, *(one.step for one in self.steps)]
        local, value = self.local(train), None if draws == 0 else self.tuned
        with self.engine.crew(self.device) as crew:
            found = predict.personal(local, self.state, splits, crew, draws=draws, value=value)
        return tuple(surveying.known(self, local, *pair, reads) for pair in zip(splits, found, strict=True))

    def calibrate(self, *steps: Step, aggregation: Any = None) -> "Result":
        """Return the federation with its predictions calibrated: steps are fitted one after the other, by surveys of the clients.

        `predict` and `client` apply them from then on, and `save` keeps them. What a client's own data determine never leaves it.

        Args:
            *steps: Steps of `bf.calibration`, as `Temperature()`, or others with the members of its `Step`; after those that the result
                has already.
            aggregation: How the clients' answers are added, as `SecureSum()`; None adds them openly.

        Raises:
            TypeError: Something is no step, or the aggregation cannot add answers.
            ValueError: There is no such split, a step does not fit the task, or an answer is outside the aggregation's range.

        Warns:
            UserWarning: Sets are made on a split to which another step was fitted, a step on training or test rows, or the data do not
                bound a temperature.
        """
        surveying.checked_steps(steps, [one.step for one in self.steps])
        surveying.check_servers_model(steps, self.algorithm)
        surveying.check_reading(self)
        splits = self.data.to(self.device, self.dtype).splits
        wanted = {step.split: surveying.asked(step, splits) for step in steps}
        predicted = dict(zip(wanted, self.mine(*wanted.values(), steps=steps), strict=True))
        found = surveying.fitted(steps, self.steps, predicted, Outputs(self.known.task, self.known.outputs), aggregation)
        return replace(self, steps=found, calibrated=reading(self.algorithm) if found else None, chosen=self.known_choice())

    def survey(self, survey: Survey, *, aggregation: Any = None) -> Tensors:
        """Ask the clients about their own predictions, as this result makes them, and return what the survey tells at last.

        Args:
            survey: The question, see `bayesfl.evaluation.surveys.Survey`.
            aggregation: How the clients' answers are added, as `SecureSum()`; None adds them openly.

        Raises:
            TypeError: It is no survey, or the aggregation cannot add answers.
            ValueError: There is no such split; or an answer has another shape than the survey declares, or is not finite.
        """
        split = surveying.asked(survey, self.data.to(self.device, self.dtype).splits)
        mine = self.calibrated_mine(split)
        return conduct(survey, surveying.put_to(survey, mine, aggregation), Outputs(self.known.task, self.known.outputs))

    def audit(
        self,
        split: str = "test",
        *,
        by: Literal["client", "label"] = "client",
        groups: Groups | None = None,
        delta: float = 0.05,
        aggregation: Any = None,
    ) -> Audit:
        """Audit the predictions by client, label or group: coverage, set sizes, accuracy and calibration error, with exact intervals.

        It is a survey: of each unit the server learns counts and sums over all clients; by client they are each client's own.

        Args:
            split: The split that is predicted, which must have been used for nothing else.
            by: What the rows of the table are.
            groups: For each client the group of every row of its split, as text, numbers or truth values, None for no group; a function
                that makes these of a client's inputs before any transform, see `Columns.values`; or a column of `from_frame`.
            delta: Probability with which any of a column's intervals may miss, in (0, 1).
            aggregation: How the clients' answers are added, as `SecureSum()`; None adds them openly.

        Raises:
            TypeError: The aggregation cannot add answers.
            ValueError: There is no such split, `by` or `groups` does not fit, or `delta` is out of range.
        """
        return audited(self, split, by, groups, delta, aggregation)

    def alarm(self, client: int | str, *, score: Watched = "labels", delta: float = 0.05) -> Alarm:
        """Return an alarm for a client's rows to come, see `ClientModel.alarm`."""
        return self.client(client).alarm(score=score, delta=delta)

    def adapt(self, novel: FederatedData) -> "Result":
        """Return the federation with clients never seen in training: their state starts from the server's and is adapted once.

        The server's entries for single clients are made anew for them (`Algorithm.newcomers`). The new result predicts, and can be saved;
        training cannot continue from it. Schedules are read at the present round; a warning says where a rate has fallen below a tenth.

        Args:
            novel: The new clients' data; the method's `adapt` phases use their training data.

        Raises:
            TypeError: `novel` is no `FederatedData`.
            ValueError: Their inputs, transform, outputs, task, columns or class names differ from the federation's, or these names' order.
            DivergenceError: A new client's training is not finite.
        """
        return adapted(self, novel)

    def client(self, client: int | str) -> ClientModel:
        """Return a client's own model, which predicts for new rows and can be saved.

        It is fine-tuned once where the method does so before it predicts. Later training of this federation does not change it.

        Args:
            client: The client's name, or its number, as in `FederatedData.select`.

        Raises:
            TypeError: `client` is neither.
            ValueError: There is no such client, or a number is the name of another; or the model needs training data, which this result was
                loaded without, or validation data to tune its predictor.
            DivergenceError: The client's fine-tuning is not finite, and `tolerant` is False.
        """
        return served_client(self, client)

    def save_clients(self, path: str | os.PathLike[str], *, plug_in: bool = False) -> None:
        """Write every client's model into a folder of its name in the folder `path`; `load_client` reads them.

        Where the method's predictor needs training data (FedSI's), a client's file is as confidential as these and must not leave the
        client, see `ClientModel.save`; `plug_in=True` is for files that are to leave.

        Args:
            path: The folder, made if it does not exist.
            plug_in: Whether to store the means of the beliefs alone, without the covariances made of training data.

        Raises:
            TypeError: `path` is neither text nor a path.
            ValueError: `path` is empty, or a client's name cannot be that of a folder; nothing is written then. Or as by `client` and
                `ClientModel.save`.
            DivergenceError: A client's fine-tuning is not finite, and `tolerant` is False.
        """
        inside, names = folder("path", path), self.known.client_names
        check_file_names(names)
        for j, name in enumerate(names):
            self.client(j).save(inside / name, plug_in=plug_in)

    def model(self) -> nn.Module:
        """Return the server's network, at the means of its beliefs: a module of its own, in evaluation mode.

        It is what clients have in common, as a start for other training or for a client with no data of its own.

        Raises:
            ValueError: The server holds no whole network, or several.
        """
        return server_module(self.algorithm, self.server, self.known.clients, torch.ones((), dtype=self.dtype, device=self.device))

    def to_arviz(self, client: int | str, block: str, *, draws: int = 1000) -> Any:
        """Draw from a client's posterior of a block, as ArviZ's InferenceData with one variable for each parameter, [chain, draw, ...].

        A block with M copies has them as the third axis, [chain, draw, M, ...].

        Args:
            client: The client's name, or its number.
            block: A block whose posterior has an entropy.
            draws: Number of draws S; they are independent, so they make one chain.

        Raises:
            ValueError: There is no such client or block, the block has nothing to draw, or `draws` is not a whole number >= 0.
            ImportError: ArviZ is not installed.
        """
        j = place(client, self.known.client_names)
        about = {"client": j, "draws": draws, "seed": self.settings.seed, "round": self.round}
        return to_arviz(self.algorithm, unadapted(self, j)[1], block, **about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, the settings and the history into the folder `path`, from which `bf.load` reads them.

        The model's code and the data are not written; `bf.load` is given them and checks that they are the same.

        Raises:
            ValueError: `path` is a file, or lies under one.
        """
        store.write(path, store.RUN, self._content())

    def save_round(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint of a run in progress into the folder `path`; the checkpoint before it is kept, older ones are removed.

        Raises:
            ValueError: `path` is a file, or lies under one.
        """
        store.write_round(path, store.RUN, self._content())

    def _content(self) -> dict[str, Any]:
        """Return what a file holds; of `tuned` what is known, as tuning takes long."""
        tuned = self.__dict__.get("tuned", self.known_value)
        return {**vars(self), "chosen": None if tuned is None else Chosen(tuned, reading(self.algorithm))}
