"""Cells: one run of a study, its address, and the file of its record.

A cell's address is the identity of its saved run: the method with all its options and its network,
the initial weights, the data by their hash, the seed and the settings. Names in the study, and the
code that makes the parts, do not count. The file's name is the address. A cell trains only with the
data and the initial weights of its address.
"""

import inspect
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from torch import nn

from bayesfl.base import archive
from bayesfl.base.addressed import Seeded
from bayesfl.base.described import described, digest_of, packages
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData
from bayesfl.engine import Engine
from bayesfl.evaluation import report
from bayesfl.evaluation.history import History
from bayesfl.federation.errors import DivergenceError
from bayesfl.federation.run.loading import load
from bayesfl.federation.run.result import Result
from bayesfl.federation.run.simulation import simulate
from bayesfl.federation.store.files import refuse_nameless
from bayesfl.federation.store.identity import identity
from bayesfl.models.copies import anew
from bayesfl.study.budget import epochs, gradient_steps, with_steps
from bayesfl.study.settings import in_words, recipe_of, value_in_words

_BUILDING = threading.RLock()


@dataclass(frozen=True)
class Record:
    """Hold the record of one run.

    Args:
        address: The address of its cell.
        method: The method's name in the study that ran it.
        options: The options that this study set, in words.
        seed: The seed.
        recipe: Its other parts, see `bayesfl.study.settings.recipe`.
        data: SHA-256 of the data, see `FederatedData.hash`.
        history: The measures of every evaluated round.
        clients: Every measure of test data by client, {measure: [J]}, after the last round; None
            where it was not computed.
        often: Accuracy on test data of always answering each client's most frequent training class,
            mean over clients; None where it is not known.
        budget: `steps`, `epochs`, `bytes_up` and `bytes_down` of a training client in a round,
            means over clients and rounds.
        settings: The settings of the run, in words.
        scaled: How its phases were scaled to a study's `steps`, in words.
        seconds: Seconds that the run took.
        environment: Machine, versions and commit, see `bayesfl.evaluation.report.environment`.
        kept: Whether the whole result is saved beside it.
        error: `class`, `text` and `traceback` of the error that ended it; None where none did.
    """

    address: str = ""
    method: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    recipe: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    history: History = field(default_factory=History)
    clients: Mapping[str, list[Any]] | None = None
    often: float | None = None
    budget: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    scaled: str = ""
    seconds: float | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    kept: bool = False
    error: Mapping[str, str] | None = None

    def write(self, path: Path) -> None:
        """Write the record, completely or not at all."""
        archive.write(path, KIND, {**vars(self), "history": self.history.rows}, {})

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Return the record that a file holds.

        Raises:
            CheckpointError: The file is damaged, or is none of a record.
            TypeError: It has fields of another version.
        """
        found, _ = archive.read_kind(path, KIND)
        return cls(**{**found, "history": History(found["history"])})


KIND, SUFFIX = "record", ".record"
"""The kind of a record's file, and the end of its name."""


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        method: The method's name in the study.
        make: (model, options by name) -> algorithm.
        options: The options that this cell sets.
        seed: Seed of the data, of the model's start where the model draws it, and of the run.
        data: (seed=) -> the federation's data.
        model: (data) -> the network, or (data, seed=) -> the network.
        settings: Arguments of `bf.simulate`, `rounds` among them.
        told: Description of those settings that change numbers.
        recipe: The parts of its runs, without the seed.
        steps: Number of gradient steps of a client in a round; None for the method's own.
    """

    method: str
    make: Callable[..., Algorithm]
    options: Mapping[str, Any]
    seed: int
    data: Callable[..., FederatedData]
    model: Callable[..., nn.Module]
    settings: Mapping[str, Any]
    told: Any
    recipe: Mapping[str, str]
    steps: int | None = None

    def federation(self) -> tuple[FederatedData, nn.Module]:
        """Return the data, and the network with weights that depend on the seed alone."""
        with _BUILDING, _one_thread():  # one at a time, as functions may seed what threads share
            clients = self.data(seed=self.seed)
            seeded = "seed" in inspect.signature(self.model).parameters
            with Seeded(self.seed):
                return clients, self.model(clients, **({"seed": self.seed} if seeded else {}))

    def algorithm(self, clients: FederatedData, model: nn.Module) -> tuple[Algorithm, str]:
        """Return the method, and in words how its phases were scaled."""
        made = self.make(model, **self.options)
        if self.steps is None:
            return made, ""
        return with_steps(made, self.steps, clients.outline.counts, seed=self.seed)

    def address(self, clients: FederatedData, model: nn.Module) -> str:
        """Return the address of the cell: digests of the method, settings and functions; of these
        with the seed and the data; of the rows; and of the initial weights.

        Raises:
            ValueError: A function of the method, of the data or of the settings has neither a name
                nor source text.
        """
        algorithm, _ = self.algorithm(clients, model)
        with packages() as read:
            changes = [(split.transform, split.augment) for split in clients.splits.values()]
            what = identity(algorithm)
            start = [what.pop("constants"), clients.hash, self.seed]
            parts = described([what, self.told, changes])
        refuse_nameless(parts, described(clients.outline))
        asked = [digest_of([parts, read]), start]
        return f"{asked[0][:8]}-{digest_of(asked)[:16]}-{_trained(clients, model)}"

    def run(
        self, folder: Path, address: str, *, keep: bool, workers: int | None, every: int | None
    ) -> None:
        """Run the cell and write its record, that of an error too; one that is finished stays.

        Args:
            folder: The folder of the study.
            address: The cell's address.
            keep: Whether to save the whole result.
            workers: Number of threads where the settings name no engine; None for all cores.
            every: Rounds between checkpoints, so that an interrupted cell can go on; None for no
                checkpoints.

        Raises:
            OSError: The folder cannot be written to.
        """
        file = folder / f"{address}{SUFFIX}"
        if finished(file, keep=keep):
            return
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # now, as the record may be due in hours
        rounds_so_far = file.with_suffix(".rounds")
        saving = {} if every is None else {"checkpoint": rounds_so_far, "every": every}
        with _one_thread():
            try:
                record = self._ran(address, file.with_suffix("") if keep else None, workers, saving)
            except Exception as error:  # whatever a method or a user's function raises
                record = failed(error)
        rounds = self.settings["rounds"]
        replace(
            record,
            address=address,
            method=self.method,
            options={name: value_in_words(value, rounds) for name, value in self.options.items()},
            seed=self.seed,
            recipe=self.recipe,
        ).write(file)
        shutil.rmtree(rounds_so_far, ignore_errors=True)

    def _ran(
        self, address: str, kept: Path | None, workers: int | None, saving: Mapping[str, Any]
    ) -> Record:
        clients, model = self.federation()
        if not address.endswith(_trained(clients, model)):
            name = "model" if clients.rows_hash[:16] in address else "data"
            raise ValueError(
                f"{name} made something else of seed {self.seed} when it was called again, so that "
                "no run of it can be repeated; draw from a generator that the seed starts, as "
                "np.random.default_rng(seed)"
            )
        algorithm, scaled = self.algorithm(clients, model)
        settings = {"engine": Engine(workers=workers), **anew(dict(self.settings)), **saving}
        start = time.perf_counter()
        result = simulate(algorithm, clients, seed=self.seed, progress=False, **settings)
        seconds = time.perf_counter() - start
        if kept is not None:
            result.save(kept)
        return replace(
            recorded(result),
            clients=by_client(result),
            scaled=scaled,
            seconds=seconds,
            environment=report.environment(),
            kept=kept is not None,
        )

    def result(self, path: Path, record: Record) -> Result:
        """Load the saved run of this cell from a folder.

        Raises:
            CheckpointError: It is another run than that of the record.
        """
        clients, model = self.federation()
        algorithm, _ = self.algorithm(clients, model)
        found = load(path, algorithm, clients, device=self.settings.get("device", "cpu"))
        if repr(found.history.rows) != repr(record.history.rows):
            raise archive.CheckpointError(
                f"{str(path)!r} holds another run than the record beside it; delete it, and run "
                "the study again"
            )
        return found


def _trained(clients: FederatedData, model: nn.Module) -> str:
    """Return digests of the rows and of the weights and buffers that a run begins with."""
    start = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    return f"{clients.rows_hash[:16]}-{digest_of(start)[:16]}"


_THREADS: list[int] = []
"""Torch's number of threads before each of the cells that this process runs now, which is 1 for all
but the first."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread, as a kernel's last bits may depend on the number, until the last of
    the cells that run at the same time is done.
    """
    with _BUILDING:
        _THREADS.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _BUILDING:
            torch.set_num_threads(_THREADS.pop())


def finished(file: Path, *, keep: bool) -> bool:
    """Return whether a file holds a finished run: one that succeeded, with its whole result if
    `keep`, or one that diverged, as it would again.
    """
    record = record_of(file) if not keep or file.with_suffix("").exists() else None
    if record is None or record.error is None:
        return record is not None and (record.kept or not keep)
    return record.error["class"] == DivergenceError.__name__


def record_of(file: Path) -> Record | None:
    """Return the record that a file holds; None where it is not there, is damaged, or is that of
    another cell or version.
    """
    try:
        record = Record.read(file)
    except (archive.CheckpointError, TypeError):
        return None
    return record if record.address == file.stem else None


def failed(error: Exception) -> Record:
    """Return the record of an error."""
    return Record(
        error={
            "class": type(error).__name__,
            "text": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        },
        environment=report.environment(),
    )


def recorded(result: Result) -> Record:
    """Return the record of a finished run."""
    outline, history, seed = result.known.outline, result.history, result.settings.seed
    gathered = sum(row["cohort"] for row in history)
    trained = len(history) * outline.clients if result.settings.train == "all" else gathered
    shares = {"bytes_up": gathered, "bytes_down": trained}
    known = result.known
    often = None
    if isinstance(known, FederatedData) and "test" in known.splits:
        often = known.most_frequent("test")
    return Record(
        recipe=recipe_of(result),
        data=outline.hash,
        history=history,
        often=None if often is None else float(np.nanmean(often)),
        budget={
            "steps": gradient_steps(result.algorithm, outline.counts, seed=seed),
            "epochs": epochs(result.algorithm, outline.counts, seed=seed),
            **{
                name: float(history[name].sum()) / max(1, number)
                for name, number in shares.items()
                if name in history.columns
            },
        },
        settings=in_words(result),
    )


def by_client(result: Result) -> dict[str, list[Any]] | None:
    """Return every measure of test data by client, [J] each, before any step of calibration; None
    without a test split.
    """
    if "test" not in result.data.splits:
        return None
    table = result.uncalibrated().table()
    return {name: column.tolist() for name, column in table.reset_index().items()}
