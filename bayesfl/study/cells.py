"""Cells: one run of a study, its address, and the file that holds what is kept of it.

A cell's address is the identity that a saved run of it has: the method with all its options and its
network, the start of its weights, the data by their hash, the seed and the settings. What they are
called, and the code that makes them, does not count. The file has the address as its name and is
JSON: what is read from a folder runs no code.
"""

import inspect
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayesfl.base.described import described, digest_of
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
from bayesfl.study.budget import epochs, gradient_steps, with_steps
from bayesfl.study.settings import in_words, value_in_words


@dataclass(frozen=True)
class Record:
    """Hold what is kept of one run.

    Args:
        method: The method's name in the study that ran it.
        options: The options that this study set, in words.
        seed: The seed.
        data: SHA-256 of the data, see `FederatedData.hash`.
        history: The measures of every evaluated round.
        clients: Every measure of test data by client, {measure: [J]}, after the last round; None
            where it was not computed.
        budget: `steps`, `epochs`, `bytes_up` and `bytes_down` of a client in a round in which it
            trains, means over clients and rounds.
        settings: The settings of the run, in words.
        scaled: How its phases were scaled to a study's `steps`, in words.
        seconds: Seconds that the run took.
        memory: Largest memory of the process until the run's end, in MiB.
        environment: Machine, versions and commit, see `bayesfl.evaluation.report.environment`.
        kept: Whether the whole result is saved beside it.
        error: `class`, `text` and `traceback` of the error that ended it; None where none did.
    """

    method: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    data: str = ""
    history: History = field(default_factory=History)
    clients: Mapping[str, list[Any]] | None = None
    budget: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    scaled: str = ""
    seconds: float | None = None
    memory: float | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    kept: bool = False
    error: Mapping[str, str] | None = None

    def write(self, path: Path) -> None:
        """Write the record, completely or not at all."""
        report.write_json(path, {**vars(self), "history": self.history.rows})

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Return the record that a file holds."""
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in found["history"]  # JSON has no NaN
        ]
        return cls(**{**found, "history": History(rows)})

    def finished(self, *, keep: bool) -> bool:
        """Say whether the run need not be made again: it went through, and was kept if it is to be,
        or it diverged, as it would again.
        """
        if self.error is not None:
            return self.error["class"] == DivergenceError.__name__
        return self.kept or not keep


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
        steps: Number of gradient steps of a client in a round; None for the method's own.
    """

    method: str
    make: Callable[..., Algorithm]
    options: Mapping[str, Any]
    seed: int
    data: Callable[..., FederatedData]
    model: Callable[..., nn.Module]
    settings: Mapping[str, Any]
    steps: int | None = None

    def federation(self) -> tuple[FederatedData, nn.Module]:
        """Return the data, and the network with weights that depend on the seed alone."""
        clients = self.data(seed=self.seed)
        seeded = "seed" in inspect.signature(self.model).parameters
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return clients, self.model(clients, **({"seed": self.seed} if seeded else {}))

    def algorithm(self, clients: FederatedData, model: nn.Module) -> tuple[Algorithm, str]:
        """Return the method, and in words how its phases were scaled."""
        made = self.make(model, **self.options)
        if self.steps is None:
            return made, ""
        return with_steps(made, self.steps, clients.outline.counts, seed=self.seed)

    def address(self, clients: FederatedData, model: nn.Module) -> str:
        """Return the address of the cell, hexadecimal.

        Raises:
            ValueError: A function of the method, of the data or of the settings has neither a name
                nor source text.
        """
        algorithm, _ = self.algorithm(clients, model)
        usual = inspect.signature(simulate).parameters
        settings = {
            name: value
            for name, value in self.settings.items()
            if name != "engine" and value != usual[name].default
        }
        parts = described(
            [identity(algorithm), dict(model.state_dict()), clients.hash, self.seed, settings]
        )
        refuse_nameless(parts, described(clients.outline))
        return digest_of(parts)[:40]

    def run(self, folder: Path, address: str, *, keep: bool, workers: int | None) -> None:
        """Run the cell and write its record, that of an error too; one that is finished stays.

        Args:
            folder: The folder of the study.
            address: The cell's address.
            keep: Whether to save the whole result.
            workers: Number of threads where the settings name no engine; None for all cores.
        """
        file = folder / f"{address}.json"
        if finished(file, keep=keep):
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # which a kernel's last bits may depend on
        try:
            record = self._ran(folder / address if keep else None, workers)
        except Exception as error:  # whatever a method or a user's function raises
            record = failed(error)
        finally:
            torch.set_num_threads(threads)
        rounds = self.settings["rounds"]
        told = {name: value_in_words(value, rounds) for name, value in self.options.items()}
        replace(record, method=self.method, options=told, seed=self.seed).write(file)

    def _ran(self, kept: Path | None, workers: int | None) -> Record:
        clients, model = self.federation()
        algorithm, scaled = self.algorithm(clients, model)
        settings = {"engine": Engine(workers=workers), **self.settings}
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
            memory=_memory(),
            environment=report.environment(),
            kept=kept is not None,
        )

    def result(self, path: Path) -> Result:
        """Load the saved run of this cell from a folder."""
        clients, model = self.federation()
        algorithm, _ = self.algorithm(clients, model)
        return load(path, algorithm, clients, device=self.settings.get("device", "cpu"))


def finished(file: Path, *, keep: bool) -> bool:
    """Say whether a file holds a run that need not be made again; one that cannot be read, or whose
    whole run was deleted, must.
    """
    if not file.exists() or (keep and not file.with_suffix("").exists()):
        return False
    try:
        return Record.read(file).finished(keep=keep)
    except (ValueError, KeyError, TypeError):
        return False


def failed(error: Exception) -> Record:
    """Return the record of an error."""
    told = {
        "class": type(error).__name__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    return Record(error=told, environment=report.environment())


def recorded(result: Result) -> Record:
    """Return what a finished run itself tells."""
    outline, history, seed = result.known.outline, result.history, result.settings.seed
    gathered = sum(row["cohort"] for row in history)
    trained = len(history) * outline.clients if result.settings.train == "all" else gathered
    shares = {"bytes_up": gathered, "bytes_down": trained}
    return Record(
        data=outline.hash,
        history=history,
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
    table = replace(result, steps=()).table()
    return {name: column.tolist() for name, column in table.reset_index().items()}


def _memory() -> float | None:
    """Return the largest memory of this process so far, in MiB; None where it is not told."""
    try:
        import resource
    except ImportError:  # on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
