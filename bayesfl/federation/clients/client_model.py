"""One client's own model after training: predictions for new rows, export as a module, and files
without data or server.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from bayesfl.base import archive
from bayesfl.base.described import described, differences
from bayesfl.base.files import folder
from bayesfl.base.inputs import words
from bayesfl.base.numerics import in_own_modes
from bayesfl.base.options import suggests
from bayesfl.base.protocols import (
    Batch,
    FittedPredictor,
    Predictor,
    Server,
    StoredPredictor,
    Tensors,
    View,
)
from bayesfl.base.random import hashed
from bayesfl.base.warning import warn
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.predictors import Mixture
from bayesfl.data import FederatedData
from bayesfl.data.outline import Outline
from bayesfl.data.schema import Schema
from bayesfl.data.split import Change
from bayesfl.data.tables.frames import check_index
from bayesfl.evaluation import calibration
from bayesfl.evaluation.alarm import Alarm, Scores, Watched
from bayesfl.evaluation.calibration.conformal import epistemic_score
from bayesfl.evaluation.calibration.steps import any_draws
from bayesfl.evaluation.predictions import Predictions, broken
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.clients import predict, surveying
from bayesfl.federation.clients.exporting import Served, write_onnx
from bayesfl.federation.clients.modules import module_at
from bayesfl.federation.clients.pooling import predicting, predictor_of, rule_of, servers
from bayesfl.federation.settings import present
from bayesfl.federation.store import files
from bayesfl.federation.store.identity import (
    refuse_differences,
    same_method,
    same_network,
)
from bayesfl.models.copies import refuse_changed

LARGEST_TENSOR = 2**28
"""Maximum size of a stored tensor of the predictor in bytes, if the method's predictor needs
training data.
"""

LONGEST_FOLDER = 255  # bytes of a folder's name


@in_own_modes
@dataclass(frozen=True, eq=False)
class ClientModel:
    """Predict with one client's own model for any rows, without labels, other clients or the
    server; made by `Result.client` or `load_client`.

    Args:
        algorithm: The method.
        name: The client's name.
        client: The client's number in its federation, which selects the random draws of its
            predictions.
        view: The client's posteriors, after fine-tuning if the method fine-tunes, [...].
        round: Number of rounds done.
        seed: The run's seed.
        schema: The form of the rows before and after the transform, and the prediction task.
        value: The number that the method's predictor tunes; None if it tunes none.
        plug_in: Whether to predict at the posterior means only.
        predictor: The client's predictor, fitted to training data; None if the method has none.
        steps: Steps of calibration with the client's own parameters, [1, ...] each.
        stored: Tensors that restore the method's predictor, if it was read from a file.

    Example:
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> model = bf.simulate(method, clients, rounds=1).client(0)
        >>> model
        ClientModel('client 0' after round 1; inputs (64,))
        >>> model.predict(torch.rand(3, 64)).probs.shape
        torch.Size([3, 10])
    """

    algorithm: Algorithm
    name: str
    client: int
    view: View
    round: int
    seed: int
    schema: Schema
    value: float | None = None
    plug_in: bool = False
    predictor: FittedPredictor | None = None
    steps: tuple[calibration.Fitted, ...] = ()
    stored: Tensors = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model with its predictor in the form that a file has."""
        held = {of.name: getattr(self, of.name) for of in fields(self)}
        if isinstance(self._rule, StoredPredictor):
            held |= {"predictor": None, "stored": self._stored}
        return ClientModel, tuple(held.values())

    def __repr__(self) -> str:
        how = f"inputs {self.schema.inputs}" + ", at the means" * self.plug_in
        return f"ClientModel({self.name!r} after round {self.round}; {how})"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model."""
        return self.view["n"].dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the model, which also computes its predictions; these are returned
        on the CPU.
        """
        return self.view["n"].device

    @suggests
    def predict(self, x: Any, *, draws: int | None = None) -> Predictions:
        """Predict for new rows.

        For rows of the client's test data the predictions equal those of `Result.predict`, up to
        rounding, with the same random draws.

        Args:
            x: Inputs [N, ...] in the form that the training data had before the federation's
                transform, which is applied here: an array, a tensor, a list or a data frame with
                the same columns, or a tuple or a mapping of these. For a federation made by
                `from_frame`, pass a frame with its columns, or an array in the form that
                `Columns.apply` returns. Floats of any precision are converted to float32, as
                training data are, then to the model's precision. Integers and bools are not
                converted and are not accepted for floats, except in a data frame.
            draws: Number of posterior draws S to average over; 0 predicts at the mean, None uses
                the number of the method's paper.

        Returns:
            The predictions, tensors [N, ...] without an axis of clients.

        Raises:
            TypeError: `x` is not an array.
            ValueError: `x` has other columns or input names, rows of another shape, no rows or
                different numbers of them; its numbers are of another kind (integers for floats),
                or are complex, text, dates or objects; it contains values that are not finite, or
                tokens beyond an embedding's rows; or `draws` is not an integer >= 0.
        """
        surveying.check_draws(self.steps, draws, self.algorithm)
        return calibration.applied(self.steps, self.local_predictions(x, draws=draws)).predictions

    def local_predictions(self, x: Any, *, draws: int | None = None) -> LocalPredictions:
        """Return the client's part in a survey on new rows, before any step of calibration; `x` is
        as in `predict`.
        """
        surveying.check_reading(self)
        refuse_changed(self.algorithm.model)
        rows = self.schema.read_inputs(x, dtype=self.dtype, device=self.device)
        about: dict[str, Any] = {
            "client": self.client,
            "seed": self.seed,
            "round": self.round,
            "fitted": self._fitted,
            "value": self.value,
        }
        found: dict[str, Any] = predict.alone(
            self.algorithm, self.view, rows, draws=0 if self.plug_in else draws, **about
        )
        if (bad := broken(found)).any():
            warn(
                f"the predictions of {self.name!r} are not finite for {int(bad.sum())} rows, first "
                f"for row {int(bad.nonzero()[0])}; check these inputs, the transform and the "
                "weights",
            )
        draws_own = any_draws(one.step for one in self.steps)
        return LocalPredictions.of_one(
            self.client,
            found,
            {"likelihood": self.algorithm.likelihood, "class_names": self.schema.class_names},
            seed=self.seed,
            round=self.round,
            rows=hashed(words(rows.client(0)[0])) if draws_own else None,
        )

    def scores(self, x: Any, y: Any = None) -> np.ndarray:
        """Return how unusual rows are, [N], as input of `Alarm.see`; larger is more unusual.

        Args:
            x: Inputs, see `predict`.
            y: Their labels [N] or targets [N, O], for the scores of `Conformal`; None for the
                epistemic uncertainty of the predictions, which needs no labels. It is NaN if the
                client predicts at the mean of one set of weights.

        Raises:
            ValueError: See `predict`; or the client's model has no conformal sets, or `y` does not
                fit `x`.
        """
        check_index(x=x, y=y)
        place, one = self._sets()
        local = self.local_predictions(x)
        if y is not None:
            made = local.predictions
            if made.probs is not None and made.probs.dim() == 3:
                raise ValueError(
                    "alarms need one label for each row, because the labels of one row are not "
                    "independent; compute a score of your own for each row"
                )
            labels = self.schema.read_labels(y, len(made.mask))
            local = replace(local, predictions=replace(made, labels=labels))
        local = calibration.applied(self.steps[:place], local)
        found = (
            epistemic_score(local)
            if y is None
            else cast(calibration.Conformal, one.step).scored(local)
        ).numpy()
        return Scores.made(found, "epistemic" if y is None else "labels", self._source(one))

    def alarm(self, *, score: Watched = "labels", delta: float = 0.05) -> Alarm:
        """Return an alarm for future rows, which compares them with the client's calibration rows
        and may be read after every row.

        >>> watch = model.alarm()  # doctest: +SKIP
        >>> watch.see(model.scores(x, y)).raised  # doctest: +SKIP

        Args:
            score: The monitored score: `labels`, how badly they fit, for `scores(x, y)`; or
                `epistemic` uncertainty, for `scores(x)`.
            delta: Probability of a false alarm at any time, in (0, 1).

        Raises:
            ValueError: The client's model has no conformal sets, the client has no calibration
                rows, or `score` is NaN.
        """
        kept = {"labels": "scores", "epistemic": "epistemic"}[score]
        _, one = self._sets()
        reference = one.own[kept][0]
        reference = reference[one.own["scores"][0].isfinite()]
        if not len(reference):
            raise ValueError(
                f"{self.name!r} has no rows in the split {one.step.split!r}, with which an alarm "
                "compares new rows; add some rows to it"
            )
        return Alarm(
            reference.numpy(),
            alpha=1 - cast(calibration.Conformal, one.step).level,
            delta=delta,
            seed=self.seed,
            client=self.client,
            round=self.round,
            of=(score, self._source(one)),
        )

    def _source(self, one: calibration.Fitted) -> str:
        """Return a description of the model and its calibration, which determine the scores of the
        calibration rows.
        """
        made = archive.digest_of_tensors(
            repr(one.step), {name: t.cpu() for name, t in one.own.items()}
        )[:8]
        return f"{self.name!r} after round {self.round}, seed {self.seed}, calibration {made}"

    def _sets(self) -> tuple[int, calibration.Fitted]:
        """Return the last step that makes sets, and its place.

        Raises:
            ValueError: The prediction for a row depends on the other rows, so that new rows would
                always differ from calibration rows; or no step makes sets.
        """
        if self.algorithm.predictor is not None and self.algorithm.draws:
            raise ValueError(
                f"the predictor of {self.name!r} draws noise for each row by its place among the "
                "rows that are predicted together, so the alarm's scores would not be comparable: "
                "train the same method with another link, such as 'contrasts', and draws=0"
            )
        found = [
            (place, one)
            for place, one in enumerate(self.steps)
            if isinstance(one.step, calibration.Conformal)
        ]
        if not found:
            raise ValueError(
                f"{self.name!r} has no conformal sets, whose scores the alarm needs: call "
                "result.calibrate(Conformal()) first"
            )
        return found[-1]

    def model(self) -> nn.Module:
        """Return the network at the posterior means: a separate module, in evaluation mode.

        Its outputs are the likelihood's inputs, such as logits. It contains neither the uncertainty
        (use `predict`) nor the federation's transform. Its inputs must be transformed already:
        floats in the run's precision, one tensor as `model(x)`, a tuple as `model(*x)`, a mapping
        as `model(**x)`. If the method trains several networks, it is the one that the client chose,
        as in IFCA.

        For a calibrated client a warning names the steps of calibration that are left out.

        Raises:
            ValueError: The client predicts with several networks together, as in a mixture.
        """
        if self.steps:
            left = ", ".join(type(one.step).__name__ for one in self.steps)
            warn(
                f"the network of {self.name!r} alone leaves out its calibration ({left}); "
                "export(path, x) includes it, and predict(x) applies it",
            )
        return module_at(self.algorithm, self.algorithm.parts, self.view)

    def export(self, path: str | os.PathLike[str], x: Any, *, plug_in: bool = False) -> None:
        """Write the client's prediction function to an ONNX file, completely or not at all.

        The graph accepts any number of rows in the form of `predict` (for a frame, the inputs
        computed from its columns) and applies the federation's transform. It returns `probs` with
        temperature and bias applied, or for numbers the mean or quantiles. The metadata `bayesfl`,
        JSON, have the names of the classes and inputs, the encoding of a frame's columns, and the
        options and thresholds of sets and abstention. Needs onnx and onnxscript.

        Args:
            path: The file, such as `"bern.onnx"`.
            x: Two or more example rows, see `predict`; the graph's output for them is compared with
                that of `predict`.
            plug_in: Whether to predict at the posterior means, for an uncalibrated client that
                averages over a posterior.

        Raises:
            ValueError: See `predict`; or the graph's predictions differ, for example because the
                client averages over a posterior, which ONNX export does not support.
        """
        made = replace(self, plug_in=True) if plug_in else self
        surveying.check_reading(made)
        served, schema = made._served(), self.schema
        rows = schema.read_inputs(x, dtype=self.dtype, device=self.device).x
        found = made.predict(x)
        expected = {
            name: t for name, t in vars(found).items() if isinstance(t, Tensor) and name != "mask"
        }
        about = {
            "client": self.name,
            "round": self.round,
            "class_names": schema.class_names,
            "columns": schema.columns,
            "prepared": None if schema.prepared is None else json.loads(schema.prepared.to_json()),
            "steps": [
                {
                    "step": type(one.step).__name__,
                    "options": described(vars(one.step)),
                    **{
                        name: described(t[0].tolist() if name in one.own else t.tolist())
                        for name, t in (*one.own.items(), *one.state.items())
                        if name in ("temperature", "bias", "threshold", "shared")
                    },
                }
                for one in self.steps
            ],
            "transform": described(schema.transform),
        }
        write_onnx(path, served, rows, expected, about)

    def _served(self) -> Served:
        algorithm, view = self.algorithm, self.view
        rule = self._rule
        views, weights = [view], torch.ones(1, dtype=self.dtype)
        if isinstance(rule, Mixture):
            pi = view[rule.weights]
            copies = pi.nonzero().flatten().tolist()
            views = [
                view | {rule.weights: torch.zeros_like(pi).index_fill(0, torch.tensor(m), 1.0)}
                for m in copies
            ]
            weights = pi[copies].cpu()
        networks = [module_at(algorithm, algorithm.parts, one).cpu() for one in views]
        return Served(
            networks, weights, algorithm.likelihood, self.schema.transform, self.dtype, self.steps
        )

    def save(self, path: str | os.PathLike[str], *, plug_in: bool = False) -> None:
        """Write the model into the folder `path`, completely or not at all; `load_client` reads it
        without data.

        No training row is written unchanged. If the method's predictor needs training data (FedSI,
        `LinearisedLaplace`), the file has the covariance of the weights that was computed from
        them. Such a file is as confidential as the training data and must not leave the client:
        rows can be computed from a covariance, exactly if a unit of the network responds to only
        one row. `plug_in=True` leaves the covariance out, for a file that may leave; the remaining
        means were trained on the data and can still reveal something about them. A calibrated model
        contains scores of the client's calibration rows, for its alarms: this file must not leave
        the client either. A model that the folder held is replaced.

        Args:
            path: The folder, created if it does not exist.
            plug_in: Whether to leave the covariance out, and to predict at the posterior means.

        Raises:
            TypeError: `path` is neither text nor a path.
            OSError: `path` is a file, or lies under one.
            ValueError: `path` is empty; the method's predictor cannot
                be stored; or `plug_in` is True and the model is calibrated, or one of its steps is
                not from bayesfl.
            MemoryError: The method's predictor needs more than `LARGEST_TENSOR` bytes;
                `plug_in=True` leaves it out.
        """
        made = replace(self, plug_in=True) if plug_in else self
        surveying.check_reading(made)
        # Copying a file loses its modification time.
        written = datetime.now(UTC).isoformat(timespec="microseconds")
        content = {
            **vars(made),
            "stored": made._stored,
            "written": written,
            "predicting": predicting(self.algorithm),
        }
        files.write(path, files.CLIENT, content, file=files.CLIENT_FILE)

    @property
    def _rule(self) -> Predictor | None:
        """Return the client's prediction rule: None at the means, unless it combines several
        models, which have no single mean.
        """
        single = self.algorithm.copies(self.algorithm.parts) is None
        return None if self.plug_in and single else self.algorithm.predictor

    @cached_property
    def _fitted(self) -> FittedPredictor | None:
        """Return the client's predictor, restored from its stored tensors if possible, so that
        predictions before and after saving are bit-identical.
        """
        rule = self._rule
        if rule is None:
            return None
        if not isinstance(rule, StoredPredictor):
            return self.predictor
        try:
            return rule.restored(self.algorithm, self.view, self._stored)
        except MemoryError:
            return self.predictor

    @cached_property
    def _stored(self) -> Tensors:
        """Return the tensors that restore the predictor.

        Raises:
            AttributeError: The method's predictor is not a `StoredPredictor`.
            MemoryError: A tensor needs more than `LARGEST_TENSOR` bytes.
        """
        rule = self._rule
        if rule is None:
            return {}  # the means suffice
        if self.predictor is None:
            return self.stored
        stored: Any = rule
        return stored.stored(self.predictor, self.value, limit=LARGEST_TENSOR)


def client_model(
    algorithm: Algorithm,
    given: Server,
    view: View,
    train: Batch | None,
    *,
    name: str,
    client: int,
    data: FederatedData | Outline,
    round: int,
    seed: int,
    known: Mapping[str, Tensors],
    steps: tuple[calibration.Fitted, ...] = (),
) -> ClientModel:
    """Make one client's model.

    Args:
        algorithm: The method.
        given: The state that the client received.
        view: Its view after fine-tuning, [...].
        train: Its training data x and y; None if unknown.
        name: Its name.
        client: Its number.
        data: The federation's data, or their outline.
        round: Number of rounds done.
        seed: The run's seed.
        known: The last states of the surveys that the method's predictor needs, by their names.
        steps: Steps of calibration with its own parameters, [1, ...].

    Raises:
        ValueError: The data have a transform, and only its description is available.
    """
    rule = algorithm.predictor
    told = {**given, **known}
    predictor = None if rule is None else rule(algorithm, told, view, train or {})
    view = getattr(predictor, "view", view)  # with posteriors that the rule fitted to the rows
    wanted = (*algorithm.whole(algorithm.parts), *getattr(rule, "reads", ()), "n")
    names = wanted if rule is None or isinstance(rule, StoredPredictor) else view
    kept = {key: view[key] for key in names}
    if isinstance(data, Outline) and data.transform is not None:
        raise ValueError(
            f"{name!r} needs the transform {data.transform.get('name', '')} for its inputs, but "
            "this result was loaded without the data, which have it; bf.load(path, algorithm, "
            "clients) loads it with them"
        )
    return ClientModel(
        algorithm,
        name,
        client,
        kept,
        round,
        seed,
        data.schema,
        value=predict.value_of(algorithm, known),
        predictor=predictor,
        steps=steps,
    )


def needs_data(algorithm: Algorithm) -> bool:
    """Return whether a client needs its training data to predict, for fine-tuning or for the
    method's predictor.
    """
    rule = algorithm.predictor
    return bool(algorithm.finetune) or (rule is not None and getattr(rule, "needs_data", True))


@suggests
def load_client(
    path: str | os.PathLike[str],
    algorithm: Algorithm | nn.Module,
    *,
    transform: Change | None = None,
    device: torch.device | str = "cpu",
) -> ClientModel:
    """Load one client's model, written by `ClientModel.save` or by a node of a deployed federation,
    without any data.

    Args:
        path: The folder, or a folder with models of only one client, such as a node's folder of
            states; the most recently written model is loaded. Each file contains its time, so
            copies keep their order.
        algorithm: The network, with any weights. Or the method that made it, with the same options;
            it is needed only if predictions use a function or a class of your own, such as a
            likelihood or a rule of selection.
        transform: The transform of the federation's data, which the file describes but does not
            contain; None if there was none.
        device: The device for the model and its predictions.

    Raises:
        TypeError: `algorithm` is neither a network nor an `Algorithm`, or `path` is neither text
            nor a path.
        ValueError: The device does not exist, or `path` is empty.
        CheckpointError: The folder has no client model, or models of several clients; or the file
            is damaged, or was made with another method, network or transform, see
            `bayesfl.base.described`.

    Example:
        >>> import tempfile
        >>> clients = bf.data.iid("digits", clients=2)
        >>> network = bf.models.mlp(64, hidden=8, outputs=10)
        >>> result = bf.simulate(bf.algorithms.fedavg(network), clients, rounds=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.client(0).save(folder)
        ...     model = bf.load_client(folder, network)
        >>> model
        ClientModel('client 0' after round 1; inputs (64,))
    """
    file = only_file(folder("path", path))
    found = files.read_file(file, files.CLIENT, present(device))
    schema, known = found.pop("schema"), found.pop("algorithm")
    found.pop("written")
    predicts = found.pop("predicting")
    if isinstance(algorithm, Algorithm):
        algorithm = servers(algorithm, rule_of(predicts))
        same_method(repr(str(file)), known, algorithm)
    else:
        if "needs" in predicts:
            raise archive.CheckpointError(
                f"{str(file)!r} needs the method that made it: files contain no code, but its "
                f"predictions use {predicts['needs']}"
            )
        algorithm = predictor_of(predicts, algorithm)
        same_network(repr(str(file)), known, algorithm)
        # The file's method described it in other words.
        found["steps"] = tuple(replace(one, reading=None) for one in found["steps"])
    apart = differences({"transform": schema.transform}, {"transform": described(transform)})
    refuse_differences(
        f"{str(file)!r} was made with another function of inputs:",
        apart,
        "pass that one as transform=, because a file contains no code",
    )
    return ClientModel(algorithm, **found, schema=replace(schema, transform=transform))


def check_file_names(names: Sequence[str]) -> None:
    """Check that clients' names can be folder names inside the folder that contains them.

    Raises:
        ValueError: A name is empty, `.` or `..`, is too long, or contains a slash or another
            character that is not allowed in folder names; or two names are equal.
    """
    alike = Counter(map(str.casefold, names))
    if bad := [
        name
        for name in names
        if not re.fullmatch(r"[^/\\\0]+", name)
        or name in (".", "..")
        or len(os.fsencode(name)) > LONGEST_FOLDER
        or alike[name.casefold()] > 1
    ]:
        raise ValueError(
            f"clients' names become folder names, but {bad[0][:40]!r} is not allowed, is too long, "
            "or equals another name up to case; save clients one by one with "
            "result.client(...).save(path)"
        )


def only_file(path: Path) -> Path:
    """Return the file of the only client's model in a folder or below it; if that client has
    several, the most recently written one.

    Raises:
        CheckpointError: There is no model, or there are models of several clients.
    """
    direct = path / files.CLIENT_FILE
    found = [direct] if direct.is_file() else sorted(path.rglob(files.CLIENT_FILE)) or [direct]
    models = {file: files.read_file(file, files.CLIENT) for file in found}
    # A client's folder, and possibly its number, differs between experiments.
    experiments = {file.parent.parent.name for file in found}
    if len(experiments) < len(found) or len({model["name"] for model in models.values()}) > 1:
        several = ", ".join(str(file.parent) for file in found[:3])
        raise archive.CheckpointError(
            f"{str(path)!r} contains models of {len(found)} clients: {several}; pass one of these "
            "folders"
        )
    return max(found, key=lambda file: models[file]["written"])
