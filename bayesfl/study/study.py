"""Studies: several methods, each with a grid of options, over several seeds, in one call.

A study is a value; its runs are cells, which are independent of each other. joblib runs them, on
this machine or on a cluster chosen by `joblib.parallel_config`, or any
`concurrent.futures.Executor`. Finished cells are read from disk, so a study continues after an
interruption or with one more method.
"""

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from typing import Any, Literal

from torch import nn

from bayesfl.base import files
from bayesfl.base.described import described, packages
from bayesfl.base.display.progress import progress_bar
from bayesfl.base.options import Count, declared, refuse_unknown, whole
from bayesfl.base.warning import warn
from bayesfl.data import FederatedData
from bayesfl.federation.run.simulation import simulate
from bayesfl.models.copies import anew
from bayesfl.study.cells import SUFFIX, Cell, Record, failed, finished
from bayesfl.study.grid import Grid, Make, combinations, grids
from bayesfl.study.settings import recipe
from bayesfl.study.table import UNCOVERED, Row, Table


class Study:
    """Run a grid of methods x options x seeds, on data and models that are made for each seed.

    Every cell makes its own data, model and method, and trains it by `bf.simulate`. With functions
    at the top level of a script, or lambdas, the study travels to other processes.

    Args:
        data: Function that makes the data, called as data(seed=s); a `partial` of a recipe of
            `bf.data`.
        model: Function that makes the network, called as model(clients), or model(clients, seed=s)
            where it has an argument `seed`, as those of `bf.models` want it for a start of each
            seed's own. Weights that are drawn of torch's own generator depend on the seed alone.
        methods: {name: function (model, options) -> algorithm}, of `bf.algorithms`, partials of
            these, or your own.
        options: {name of a method: {option: list of values to choose among}}. Options under `"*"`
            go to every method that has them; a value of the grid replaces one that a partial
            holds.
        seeds: Seeds of data and training; methods are compared seed by seed.
        rounds: Number of rounds.
        steps: Number of gradient steps of every client in a round, for all methods whose phases are
            `Descend` or `Repeat`; they share it among their phases as before. The same number is
            taken by large and small clients. None for each method's own.
        **settings: Further arguments of `bf.simulate`, as `participation=0.1`.

    Raises:
        TypeError: `bf.simulate` has no such argument.
        ValueError: Options are named for a method that is not there, or one that no method has, or
            without values; a method, the model or the data are given themselves, and not a function
            that makes them; a seed is no whole number; or a setting is each cell's own, as
            `checkpoint`.

    Warns:
        UserWarning: There are options to choose among under `ClientPrivacy`, where none are chosen.

    Example:
        >>> from functools import partial
        >>> from tempfile import mkdtemp
        >>> import bayesfl as bf
        >>> from bayesfl.optim import SGD
        >>> study = bf.Study(
        ...     data=partial(bf.data.iid, "digits", clients=4, validation=0.2),
        ...     model=lambda clients: bf.models.mlp(clients.inputs, hidden=8, outputs=10),
        ...     methods={"FedAvg": bf.algorithms.fedavg, "Ditto": bf.algorithms.ditto},
        ...     options={"*": {"optimiser": [SGD(0.01), SGD(0.1)]}},
        ...     seeds=range(2),
        ...     rounds=1,
        ... )
        >>> table = study.run(mkdtemp(), progress=False)
        >>> best = table.chosen("validation_nll")
        >>> best.options["Ditto"]["optimiser"].rate
        0.1
    """

    @declared
    def __init__(
        self,
        *,
        data: Callable[..., FederatedData],
        model: Callable[..., nn.Module],
        methods: Mapping[str, Make],
        options: Mapping[str, Grid] = {},
        seeds: Iterable[int] = (0,),
        rounds: Count,
        steps: Count | None = None,
        **settings: Any,
    ) -> None:
        if own := sorted({"checkpoint", "resume", "progress", "seed", "start"} & {*settings}):
            raise ValueError(f"{own[0]} belongs to a single cell; a study has a folder and seeds")
        for name, given, of in (
            *((f"methods[{name!r}]", make, "network") for name, make in methods.items()),
            ("model", model, "clients"),
            ("data", data, "seed"),
        ):
            if isinstance(given, nn.Module) or not callable(given):
                raise ValueError(
                    f"{name} must be a function of the {of}, as lambda {of}: ..., got "
                    f"{type(given).__name__}"
                )
        # Copies, as callbacks that another run uses change.
        settings = {"rounds": rounds, **anew(settings)}
        refuse_unknown(simulate, settings)  # now, and not in every cell
        usual = inspect.signature(simulate).parameters
        with packages() as told:
            told[""] = described(
                {
                    name: value
                    for name, value in settings.items()
                    if name != "engine" and value != usual[name].default
                }
            )
        made = {"data": data, "model": model, "steps": steps, **settings}
        self.rounds, self.steps = rounds, steps
        self.grid, self.notes = grids(methods, options)
        if self._chooses and getattr(settings.get("aggregation"), "sampling", None) == "poisson":
            warn(UNCOVERED)
        # A seed given twice is no second run.
        seeds = dict.fromkeys(whole("each of seeds", seed, least=0) for seed in seeds)
        self.cells = tuple(
            Cell(name, make, chosen, seed, data, model, settings, told, of, steps)
            for name, make in methods.items()
            for chosen in combinations(self.grid[name])
            for of in [recipe(method=make, options=chosen, **made)]
            for seed in seeds
        )

    def __repr__(self) -> str:
        return f"Study({len(self.cells)} cells of {', '.join(self.grid)})"

    @declared
    def run(
        self,
        folder: str | PathLike[str],
        *,
        n_jobs: int | None = None,
        executor: Any = None,
        keep: Literal["result"] | None = None,
        every: Count | None = None,
        progress: bool | None = None,
    ) -> Table:
        """Run the cells that are not finished, and return the table of all cells.

        A cell's record is written when it is done, under a temporary name first. A cell that raises
        an error keeps it in its record, and the others go on; the next call tries it again, unless
        it diverged, as it would do so again. Two processes may work on one folder; a cell that both
        begin is run twice, with the same numbers.

        Each cell uses one thread of torch, and one worker where several cells run at a time, unless
        the study has an `engine`; neither changes its numbers.

        Args:
            folder: The folder of the records, which every process must see.
            n_jobs: Number of cells at a time, as of `joblib.Parallel`; None for one, or for as many
                as in `joblib.parallel_config`, which also chooses the backend.
            executor: An executor that runs the cells instead, such as
                `concurrent.futures.ProcessPoolExecutor`, Dask's `client.get_executor()`, or those
                of mpi4py and submitit.
            keep: `result` to save every run beside its record, so that `Table.result` can load it.
            every: Rounds between checkpoints of a cell, so that an interrupted one can go on; None
                for none: such a cell begins anew.
            progress: Whether to show a progress bar, with the time left; None shows one on a
                terminal, and in a notebook with ipywidgets.

        Warns:
            UserWarning: There are options to choose among, and the data have no validation split.
        """
        import joblib

        inside, kept = files.folder("folder", folder), keep == "result"
        places = self._places()
        todo = [
            (cell, place)
            for cell, place in zip(self.cells, places, strict=True)
            if isinstance(place, str) and not finished(inside / f"{place}{SUFFIX}", keep=kept)
        ]
        alone = executor is None and joblib.effective_n_jobs(n_jobs) == 1  # type: ignore[arg-type]
        calls = [
            partial(cell.run, inside, place, keep=kept, workers=None if alone else 1, every=every)
            for cell, place in todo
        ]
        if executor is None:
            parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered", batch_size=1)  # type: ignore[arg-type]
            done: Any = parallel(joblib.delayed(call)() for call in calls)
        else:
            # Executors pickle, and functions without a name travel by cloudpickle alone.
            sent = [executor.submit(joblib.wrap_non_picklable_objects(call)) for call in calls]
            done = (future.result() for future in sent)
        hidden = None if progress is None else not progress
        with progress_bar(
            done, total=len(places), initial=len(places) - len(calls), unit="cell", disable=hidden
        ) as bar:
            for _ in bar:
                pass
        rows = []
        for cell, place in zip(self.cells, places, strict=True):
            record = Record.read(inside / f"{place}{SUFFIX}") if isinstance(place, str) else place
            saved = partial(cell.result, inside / record.address, record) if record.kept else None
            rows.append(Row(cell.method, cell.options, cell.seed, record, saved))
        return Table(tuple(rows), self.grid, self.rounds, self.notes)

    def main(self, folder: str | PathLike[str], *, keep: Literal["result"] | None = None) -> None:
        """Run the study as a script, by the arguments of its command; the script ends in this call.

        Without arguments all cells are run and the table is printed; `--jobs N` runs N at a time.
        `--cell INDEX`, from 0, runs one, for the array jobs of a cluster.

        Args:
            folder: As in `run`.
            keep: As in `run`.
        """
        parser = argparse.ArgumentParser(description=f"Run {self!r} in {str(folder)!r}.")
        parser.add_argument(
            "--cell",
            type=int,
            choices=range(len(self.cells)),
            metavar="INDEX",
            help="run this cell alone",
        )
        parser.add_argument(
            "--jobs", type=int, metavar="N", help="number of cells to run at a time"
        )
        given = parser.parse_args()
        if given.cell is None:
            print(self.run(folder, n_jobs=given.jobs, keep=keep))
        else:
            cell, inside = self.cells[given.cell], files.folder("folder", folder)
            place = cell.address(*cell.federation())
            cell.run(inside, place, keep=keep == "result", workers=None, every=None)

    @property
    def _chooses(self) -> bool:
        """Return whether a method has several choices of options."""
        return any(len(combinations(grid)) > 1 for grid in self.grid.values())

    def _places(self) -> list[str | Record]:
        """Return the address of every cell; the record of its error where data, model or method
        cannot be made. Data and model are made once for each seed.
        """
        found: dict[int, str | Record] = {}
        numbers = range(len(self.cells))
        for seed in dict.fromkeys(cell.seed for cell in self.cells):
            mine = [number for number in numbers if self.cells[number].seed == seed]
            try:
                clients, model = self.cells[mine[0]].federation()
            except Exception as error:  # of this seed
                found |= dict.fromkeys(mine, failed(error))
                continue
            if not found and self._chooses and "validation" not in clients.splits:
                warn(
                    "the data have no validation split, so no options can be chosen: test data "
                    "never choose; make the data with validation=0.2"
                )
            for number in mine:
                try:
                    found[number] = self.cells[number].address(clients, model)
                except Exception as error:  # of this combination of options
                    found[number] = failed(error)
        return [found[number] for number in numbers]
