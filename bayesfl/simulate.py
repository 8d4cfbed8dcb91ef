"""Federated training on one machine: rounds of local work, in chunks of clients, and what the server makes of it."""

import math
import os
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl import predict
from bayesfl.blocks import Algorithm
from bayesfl.data import FederatedData
from bayesfl.engine import Crew, Engine
from bayesfl.history import History
from bayesfl.likelihood import Bernoulli
from bayesfl.local import DivergenceError, Done, Local, chunks, private_rows, read_rows, write_rows
from bayesfl.predict import Collector
from bayesfl.protocols import Server, StackedPool, Tensors, Uplink, View
from bayesfl.result import Result, Settings, load, of_a_run, present, same_run

PROBE = 32  # examples on which the model's outputs are looked at before training


def simulate(
    algorithm: Algorithm,
    clients: FederatedData,
    *,
    rounds: int,
    participation: float = 1.0,
    sampling: Literal["fixed", "bernoulli"] | None = None,
    train: Literal["cohort", "all"] | None = None,
    seed: int = 0,
    evaluate_every: int | None = 1,
    engine: Engine | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    resume: "Result | str | os.PathLike[str] | None" = None,
    progress: bool | None = None,
) -> Result:
    """Trains a federation on this machine.

    Args:
        algorithm: A method, from `bf.algorithms` or composed.
        clients: Their data.
        rounds: Rounds in all, those of a resumed run included; schedules read it.
        participation: Expected share of the clients whose work is gathered in a round, in (0, 1].
        sampling: `fixed` number of clients, or `bernoulli`; None for the method's own.
        train: `cohort`, or `all` (then only the cohort is gathered); None for the method's own.
        seed: The same seed gives the same draws, whatever the engine.
        evaluate_every: Rounds between evaluations; the last round is always evaluated. None: never.
        engine: How it is computed; changes nothing but speed and rounding.
        device: Where.
        dtype: In which precision.
        resume: A result, or the folder of a saved one, to go on from, bit for bit; not one of `adapt`.
        progress: Whether to show a bar; None where standard error is a terminal.

    Raises:
        TypeError: The method, its likelihood, the data or what is resumed are something else.
        ValueError: Something does not fit: the message names it and the remedy.
        CheckpointError: What is resumed was made with another method or on other data.
        DivergenceError: Training left the finite numbers; it carries the result up to the last finite round.
    """
    of_a_run(algorithm, clients)
    settings = Settings(
        rounds=rounds,
        participation=participation,
        sampling=algorithm.sampling if sampling is None else sampling,
        train=algorithm.train if train is None else train,
        seed=seed,
        evaluate_every=evaluate_every,
    )
    if not isinstance(engine, Engine | None):
        raise ValueError(f"engine must be an Engine, got {engine!r}; a kernel is chosen by engine=bf.Engine(kernel=...)")
    if not isinstance(resume, Result | str | os.PathLike | None):
        raise TypeError(f"resume must be a Result or the folder of a saved one, got {type(resume).__name__}; a new run takes resume=None")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, got {dtype!r}")
    device = present(device)
    _check(algorithm, clients)
    if evaluate_every is not None and "test" not in clients.splits:
        raise ValueError("the data have no test split to evaluate on; give them one, or pass evaluate_every=None")
    if evaluate_every is not None:
        predict.check_tunable(algorithm, clients)
    if resume is None:
        trained = clients.clients if settings.train == "all" else settings.fixed_size(clients.clients)
        engine = engine or Engine()
        engine = replace(engine, chunk=engine.chunk_size(trained, algorithm, device))
        server = algorithm.init(clients.clients, seed=seed, dtype=dtype, device=device)
        private = private_rows(algorithm, server, clients.clients)
        result = Result(algorithm, clients, settings, engine, 0, server, private, History(), device, dtype)
    else:
        saved = same_run(resume, algorithm, clients) if isinstance(resume, Result) else load(resume, algorithm, clients, device=device)
        result = _resumed(saved, settings, engine, device, dtype)
    with result.engine.crew(device) as crew:
        return _rounds(result, clients.to(device, dtype), crew, progress)


def _resumed(saved: Result, settings: Settings, engine: Engine | None, device: torch.device, dtype: torch.dtype) -> Result:
    """A copy of a saved run under new settings: more rounds and other workers are fine, the rest would be another experiment."""
    if saved.novel:
        raise ValueError(
            "resume is a result of adapt: its clients joined after training, and the server holds nothing of theirs to go on from; "
            "resume the federation's own result, or train a federation that has them"
        )
    if saved.device != device:
        raise ValueError(
            f"resume is on device {str(saved.device)!r}, given device={str(device)!r}; pass device={str(saved.device)!r}, or save it and "
            "pass the folder, which loads it to another device"
        )
    if settings.rounds < saved.round:
        raise ValueError(f"rounds counts all rounds, and {saved.round} are already done; got {settings.rounds}")
    free = {"rounds": settings.rounds, "evaluate_every": settings.evaluate_every}
    if replace(saved.settings, **free) != settings or saved.dtype != dtype:
        raise ValueError(f"a resumed run keeps its settings: saved {saved.settings} in {saved.dtype}, given {settings} in {dtype}")
    chunk, kernel = saved.engine.chunk, saved.engine.kernel
    if engine is not None and (engine.kernel != kernel or engine.chunk not in (None, chunk)):
        raise ValueError(f"a resumed run keeps its kernel and chunk, {kernel!r} and {chunk}; got {engine.kernel!r} and {engine.chunk}")
    workers = saved.engine.workers if engine is None else engine.workers
    own = {"private": tree_map(torch.clone, saved.private), "history": History(saved.history.rows), "chosen": None}
    return replace(saved, settings=settings, engine=replace(saved.engine, workers=workers), **own)


def _rounds(result: Result, data: FederatedData, crew: Crew, progress: bool | None) -> Result:
    from tqdm import tqdm

    settings = result.settings
    sent = sum(math.prod(shape) * dtype.itemsize for shape, dtype in result.algorithm.uplink(result.dtype).values())
    measure = "personal_accuracy" if data.task == "classification" else "personal_rmse"
    with tqdm(total=settings.rounds, initial=result.round, unit="round", disable=None if progress is None else not progress) as bar:
        while result.round < settings.rounds:
            before = Collector(data.test) if settings.evaluates(result.round) else None
            result, row = _round(result, data, crew, before, sent)
            if before is not None:
                row |= {f"before_pool_{key}": value for key, value in before.predictions().summary(data.test).items()}
                row |= _measure(result, data, crew)
                bar.set_postfix({measure: f"{row[measure]:.3f}"}, refresh=False)
            result.history.append(row)
            bar.update()
    return result


def _round(result: Result, data: FederatedData, crew: Crew, before: Collector | None, sent: int) -> tuple[Result, dict[str, Any]]:
    """One round, in which a client of the cohort sends `sent` bytes: the result after it, and what the history says of it.

    Private rows are changed in place; whatever is raised, they are put back as they were.
    """
    start = perf_counter()
    algorithm, settings, engine, round = result.algorithm, result.settings, result.engine, result.round
    server, private = result.server, result.private
    local = Local(algorithm, algorithm.phases, engine, data.train, settings.seed, settings.rounds)
    chosen = settings.cohort(data.clients, round)
    rest = np.setdiff1d(np.arange(data.clients), chosen) if settings.train == "all" else chosen[:0]
    # The rest come in chunks of their own, so that whether they are measured does not change who shares a chunk; unmeasured,
    # they leave out the phases whose result would be thrown away.
    size = engine.chunk_size(data.clients, algorithm, result.device)
    todo = [(ids, sends) for group, sends in ((chosen, True), (rest, False)) for ids in chunks(group, data.train.counts, size)]
    kept = len(algorithm.phases) - _wasted(algorithm)

    def work(chunk: tuple[np.ndarray, bool]) -> tuple[Done, Uplink, list[predict.Part], float]:
        ids, sends = chunk
        done = local(ids, server, private, round, None if sends or before is not None else kept)
        reported = engine.map(lambda view: algorithm.report(done.given, view), done.views) if sends else {}
        clock = perf_counter()
        seen: list[predict.Part] = []
        if before is not None:
            address = {"seed": settings.seed, "round": round + 1, "draws": algorithm.predictive}
            (seen,) = predict.of_chunk(algorithm, done.given, done.views, data.train, [data.test], ids, engine, **address)
        return done, reported, seen, perf_counter() - clock

    gather = _Gather(algorithm, server)
    undo: list[tuple[np.ndarray, View]] = []
    finished: list[Done] = []
    measuring = 0.0
    try:
        for (_, sends), (done, reported, seen, seconds) in zip(todo, crew.over(todo, work), strict=True):
            undo.append((done.ids, read_rows(private, done.ids)))
            write_rows(private, done.ids, done.views)
            if sends:
                gather.add(done, reported)
            if before is not None:
                for rows, part in seen:
                    before.add(rows, part)
            measuring += seconds
            finished.append(replace(done, given={}, views={}))
        server = gather.server()
        if not all(bool(t.isfinite().all()) for t in tree_leaves(server)):
            raise DivergenceError(
                f"the server is no longer finite after round {round}, counted from 0; lower the learning rates", round=round
            )
    except BaseException as error:
        for ids, old in undo:
            write_rows(private, ids, old)
        if isinstance(error, DivergenceError):
            error.result = result
        raise
    # Predictions ran in the workers, beside training; their share of the time is taken out.
    row: dict[str, Any] = {"round": round + 1, "cohort": len(chosen)}
    row["seconds"] = perf_counter() - start - measuring / min(len(todo), engine.worker_count(result.device))
    for part in ("steps", "batches", "noise"):
        row[f"seconds_{part}"] = sum(done.seconds.get(part, 0.0) for done in finished)
    row |= {"bytes_up": sent * len(chosen), "bytes_down": sum(done.received for done in finished)}
    losses = [done.info["nll"].double().cpu() for (_, sends), done in zip(todo, finished, strict=True) if sends and "nll" in done.info]
    row["train_nll"] = float(torch.cat(losses).mean()) if losses else math.nan
    return replace(result, round=round + 1, server=server), row


def _measure(result: Result, data: FederatedData, crew: Crew) -> dict[str, float]:
    """Columns of the models after aggregation."""
    settings, algorithm, row = result.settings, result.algorithm, {}
    prefixes = {"test": "personal", "validation": "validation"}
    splits = {name: data.splits[name] for name in prefixes if name in data.splits}
    address = {"seed": settings.seed, "round": result.round, "rounds": settings.rounds}
    state = (algorithm, result.server, result.private, data)
    value = predict.tune(*state, result.engine, crew, **address)
    personal = predict.personal(*state, list(splits.values()), result.engine, crew, **address, value=value)
    for (name, split), predictions in zip(splits.items(), personal, strict=True):
        row |= {f"{prefixes[name]}_{key}": value for key, value in predictions.summary(split).items()}
    shared = predict.shared(algorithm, result.server, data.test, result.engine, **address)
    if shared is not None:
        row |= {f"global_{key}": value for key, value in shared.summary(data.test).items()}
    return row


class _Gather:
    """What the server adds up over a round."""

    def __init__(self, algorithm: Algorithm, server: Server) -> None:
        self._algorithm, self._server = algorithm, server
        self._totals: dict[str, Tensors] = {}
        self._stacked: list[Uplink] = []
        self._pools = {name: block.pool for name, block in algorithm.blocks.items() if block.pool}

    def add(self, done: Done, reported: Uplink) -> None:
        """The uplinks of a chunk, client after client."""
        sent = self._algorithm.sent(done.views)
        ids = torch.from_numpy(done.ids).to(done.views["n"].device)
        extra = reported | {"n": done.views["n"], "ids": ids}
        for name, pool in self._pools.items():
            if not isinstance(pool, StackedPool):
                self._totals[name] = pool.accumulate(self._totals.get(name), self._server, name, sent | extra)
        self._stacked.append(extra | {name: sent[name] for name, pool in self._pools.items() if isinstance(pool, StackedPool)})

    def server(self) -> Server:
        """The server's next state."""
        uplink = tree_map(lambda *rows: torch.cat(rows), *self._stacked)
        new = dict(self._server)
        for name, pool in self._pools.items():
            if isinstance(pool, StackedPool):
                new[name] = pool(self._server, name, uplink)
            else:
                new[name] = pool.solve(self._server, name, self._totals[name])
        return new | self._algorithm.combine(new, uplink["ids"], uplink)


def _wasted(algorithm: Algorithm) -> int:
    """How many phases at the end train only what a client outside the cohort neither keeps nor sends."""
    count = 0
    for phase in reversed(algorithm.phases):
        trained = getattr(phase, "blocks", None)
        if not trained or getattr(phase, "persist", None) or any(algorithm.blocks[name].keep for name in trained):
            break
        count += 1
    return count


def _check(algorithm: Algorithm, data: FederatedData) -> None:
    """That the method's likelihood and the model's outputs fit the data, and outputs repeat, before training starts."""
    likelihood = algorithm.likelihood
    if isinstance(likelihood, type) or not all(hasattr(likelihood, name) for name in ("task", "nll", "nll_and_slope", "predictive")):
        came = f"the class {likelihood.__name__}" if isinstance(likelihood, type) else type(likelihood).__name__
        raise TypeError(
            f"likelihood must be a Likelihood, got {came}; build the algorithm with one of bayesfl.likelihood, as likelihood=Categorical()"
        )
    if algorithm.likelihood.task != data.task:
        raise ValueError(
            f"likelihood {type(algorithm.likelihood).__name__} is for {algorithm.likelihood.task}, the data are for {data.task}; "
            "build the algorithm with likelihood=" + ("Gaussian(scale=...)" if data.task == "regression" else "Categorical()")
        )
    module = algorithm.module(torch.empty(0, dtype=data.train.x.dtype))
    try:
        outputs, again = _twice(module, data.train.x[:PROBE].cpu())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the model does not take inputs of shape {data.inputs} ({error}); build it with inputs=clients.inputs") from error
    if ((outputs - again).abs().max() > 100 * torch.finfo(outputs.dtype).eps * outputs.abs().max()).item():
        raise ValueError(
            f"the model {type(algorithm.model).__name__} gives other outputs when it sees the same examples again: its forward draws its "
            "own randomness (as F.dropout does) or counts, which no seed could repeat; remove that, or pass training=False there"
        )
    if isinstance(algorithm.likelihood, Bernoulli) and data.outputs != 2:
        raise ValueError(f"likelihood Bernoulli is for two classes, the data have {data.outputs}; use Categorical()")
    wanted = 1 if isinstance(algorithm.likelihood, Bernoulli) else data.outputs
    if outputs.shape[-1] != wanted:
        what = "targets" if data.task == "regression" else "classes"
        raise ValueError(
            f"the model has {outputs.shape[-1]} outputs, the data {data.outputs} {what}; build the model with outputs={wanted}"
        )


def _twice(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the same examples twice, in the mode that training uses; torch's generator is left as it was."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return module(x), module(x)
