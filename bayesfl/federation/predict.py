"""Predictions of every client: personal, after aggregation, fine-tuned where the method says so; and those of the shared model."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.protocols import Fitted, Predictor, Server, Tensors, View
from bayesfl.base.random import Purpose, Stage, generator
from bayesfl.composition.algorithm import Algorithm
from bayesfl.data import FederatedData, Split
from bayesfl.engine import Crew, Engine, Plan
from bayesfl.engine.plan import chunks
from bayesfl.evaluation.predictions import Collector, Predictions
from bayesfl.federation.client import read_rows
from bayesfl.posteriors.linearised import nll
from bayesfl.posteriors.prior_precision import ALIKE

Part: TypeAlias = tuple[np.ndarray, Tensors]
"""Clients [C], and what is predicted for them, {name: [C, N, ...]}."""


# Inputs gathered at once for predictions, in bytes: activations are many times larger, and should stay in the cache.
GATHER = 2**21


def of_chunk(
    algorithm: Algorithm,
    given: Server,
    views: View,
    train: Split,
    splits: Sequence[Split],
    rows: np.ndarray,
    engine: Engine,
    *,
    seed: int,
    round: int,
    draws: int | None,
    value: float | None = None,
) -> list[list[Part]]:
    """A chunk of clients on each of some splits, from their views: by the method's own predictor where it has one, client by client.

    Args:
        algorithm: Whose clients they are.
        given: What they received.
        views: Their views [C, ...].
        train: The clients' training data, which predictors may need.
        splits: What is predicted.
        rows: Places of the clients in these splits, [C].
        engine: How it is computed.
        seed: The experiment's seed.
        round: An address.
        draws: See `personal`.
        value: See `personal`.
    """
    count = algorithm.predictive if draws is None else draws
    if algorithm.predictor is None:
        return [
            [(rows, of_views(algorithm, algorithm.parts, views, split, rows, engine, seed=seed, round=round, draws=count))]
            for split in splits
        ]
    address = {"seed": seed, "round": round, "index": len(algorithm.blocks)}
    out: list[list[Part]] = [[] for _ in splits]
    for row, fitted in _fitted(algorithm, given, views, train, rows):
        client = int(row[0])
        for split, parts in zip(splits, out, strict=True):
            x = split.client(client)[0]
            parts.append((row, _of_fitted(algorithm, fitted, x, value, count, client=client, plain=draws == 0, **address)))
    return out


def of_views(
    algorithm: Algorithm,
    parts: tuple[str, ...],
    views: View,
    split: Split,
    rows: np.ndarray,
    engine: Engine,
    *,
    seed: int,
    round: int,
    draws: int,
) -> Tensors:
    """Predictions of a chunk of clients from their views, {name: [C, N, ...]}; draws come from each client's own address.

    Rows go through the model a piece at a time (`GATHER`); of a piece, the outputs at all draws are held at once.
    """
    noise: dict[str, Tensor] = {}
    n = views["n"]
    for index, name in enumerate(algorithm.blocks):
        if draws and name in parts and algorithm.blocks[name].stochastic:
            size = algorithm.blocks[name].posterior.noise_size(algorithm.layout(name).size)
            buffer = np.stack(
                [
                    generator(seed, Purpose.PREDICT, round=round, client=int(i), index=index).standard_normal((draws, size), np.float32)
                    for i in rows
                ]
            )
            noise[name] = torch.from_numpy(buffer).to(n)
    pieces = []
    for x in _inputs(split, rows):
        outputs = engine.outputs(algorithm, parts, views, x, noise)
        piece = algorithm.likelihood.predictive(outputs)
        if not noise:
            piece["epistemic"] = torch.full_like(piece["epistemic"], torch.nan)
        pieces.append(piece)
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}


def _inputs(split: Split, rows: np.ndarray) -> Iterator[Tensor]:
    """The inputs of a chunk of clients [C, N, *], a piece of rows at a time; short clients repeat their first row."""
    counts, width = split.counts[rows], int(split.counts[rows].max())
    size = max(1, GATHER // max(1, len(rows) * split.x[:1].nbytes))
    for start in range(0, max(width, 1), size):
        places = np.arange(start, min(start + size, max(width, 1)))[None]
        index = split.offsets[rows][:, None] + np.where(places < counts[:, None], places, 0)
        flat = split.index[torch.from_numpy(np.minimum(index, len(split.index) - 1)).to(split.index.device)]
        yield split.x.index_select(0, flat.reshape(-1)).unflatten(0, flat.shape)


def personal(
    algorithm: Algorithm,
    server: Server,
    private: View,
    data: FederatedData,
    splits: Sequence[Split],
    engine: Engine,
    crew: Crew,
    *,
    seed: int,
    round: int,
    rounds: int,
    draws: int | None = None,
    value: float | None = None,
) -> list[Predictions]:
    """Every client's own predictor after `round` rounds, on each of some splits of its data.

    Args:
        algorithm: Its `finetune` phases run first, once for all splits, on a copy of each view, over the training data.
        server: The server's state.
        private: Private rows [J, ...].
        data: The clients, on the run's device and in its precision.
        splits: What is predicted; their clients are those of `data`.
        engine: How it is computed.
        crew: Who computes it.
        seed: The experiment's seed.
        round: Rounds done; an address.
        rounds: Rounds in all; schedules read it.
        draws: Posterior draws; 0 predicts at the mean, None as the method's paper does (by the closed form, where its predictor has one).
        value: Of the number that the method's predictor tunes, see `tune`.
    """

    def work(rows: np.ndarray) -> list[list[Part]]:
        given, views = _personal_views(algorithm, server, private, data.train, engine, rows, seed=seed, round=round, rounds=rounds)
        return of_chunk(algorithm, given, views, data.train, splits, rows, engine, seed=seed, round=round, draws=draws, value=value)

    collectors = [Collector(split) for split in splits]
    for found in crew.over(_everyone(algorithm, data, engine), work):
        for collector, parts in zip(collectors, found, strict=True):
            for rows, chunk in parts:
                collector.add(rows, chunk)
    return [collector.predictions() for collector in collectors]


def tune(
    algorithm: Algorithm,
    server: Server,
    private: View,
    data: FederatedData,
    engine: Engine,
    crew: Crew,
    *,
    seed: int,
    round: int,
    rounds: int,
) -> float | None:
    """The number that the method's predictor tunes: of its grid, what makes the validation data of all clients together most likely.

    Every client scores the whole grid and sends one sum for each candidate. Of candidates that are as good as the best, to `ALIKE` nats an
    example, the largest is taken, for a precision the one that does least. None where the method has no such number.

    Raises:
        ValueError: There are no validation data, or no candidate gives finite predictions.
    """
    predictor = algorithm.predictor
    if predictor is None or not predictor.grid:
        return None
    if len(predictor.grid) == 1:
        return predictor.grid[0]
    check_tunable(algorithm, data)

    def work(rows: np.ndarray) -> Tensor:
        given, views = _personal_views(algorithm, server, private, data.train, engine, rows, seed=seed, round=round, rounds=rounds)
        return scores(algorithm, given, views, data.train, data.validation, rows)

    total = torch.stack(list(crew.over(_everyone(algorithm, data, engine), work))).sum(0)
    return choose(predictor, total, int(data.validation.counts.sum()))


def scores(algorithm: Algorithm, given: Server, views: View, train: Split, validation: Split, rows: np.ndarray) -> Tensor:
    """Negative log likelihood of a chunk's validation data under each candidate of the method's predictor, summed, in nats [candidates]."""
    assert algorithm.predictor is not None
    grid = algorithm.predictor.grid
    total = torch.zeros(len(grid), dtype=torch.float64)
    for row, fitted in _fitted(algorithm, given, views, train, rows):
        x, y = validation.client(int(row[0]))
        for k, value in enumerate(grid if len(x) else ()):
            try:
                total[k] += nll(fitted(x, value=value), y).sum().cpu()
            except torch.linalg.LinAlgError:
                total[k] = torch.inf
    return total


def choose(predictor: Predictor, total: Tensor, examples: int) -> float:
    """The candidate with the least `total` [candidates], the largest of those that are as good.

    Args:
        predictor: Whose candidates they are.
        total: `scores`, summed over clients.
        examples: How many examples were scored.

    Raises:
        ValueError: No candidate gives finite predictions.
    """
    total = total.clone()
    total[total.isnan()] = torch.inf
    alike = total <= total.min() + ALIKE * examples
    best = int(alike.nonzero().max())
    if not total[best].isfinite():
        raise ValueError(
            f"no {predictor.tunes} of the grid {predictor.grid} gives finite predictions; look at the scale of inputs and weights"
        )
    if best == 0:
        warnings.warn(
            f"{predictor.tunes} is at the lower edge of its grid, {predictor.grid[0]:g}: the validation data do not bound it; hold more of "
            "them back, or give a number",
            stacklevel=3,
        )
    return predictor.grid[best]


def check_tunable(algorithm: Algorithm, data: FederatedData) -> None:
    """That there are data to tune the method's predictor on, where it has a number to tune.

    Raises:
        ValueError: There are none.
    """
    predictor = algorithm.predictor
    if predictor is not None and len(predictor.grid) > 1 and not ("validation" in data.splits and data.validation.counts.any()):
        raise ValueError(
            f"{predictor.tunes} is chosen on validation data, and the data have none: make them with validation=0.1, or give the method a "
            f"number, as {predictor.tunes}=1.0"
        )


def _everyone(algorithm: Algorithm, data: FederatedData, engine: Engine) -> list[np.ndarray]:
    size = engine.chunk_size(data.clients, algorithm, data.train.x.device)
    return chunks(np.arange(data.clients), data.train.counts, size)


def _personal_views(
    algorithm: Algorithm,
    server: Server,
    private: View,
    train: Split,
    engine: Engine,
    rows: np.ndarray,
    *,
    seed: int,
    round: int,
    rounds: int,
) -> tuple[Server, View]:
    """`finetuned` of a chunk of clients whose state is at hand."""
    common, addressed = algorithm.share(server, torch.from_numpy(rows).to(train.x.device))
    own = read_rows(private, rows)
    return finetuned(algorithm, common, addressed, own, train, engine, rows, seed=seed, round=round, rounds=rounds)


def finetuned(
    algorithm: Algorithm,
    common: Server,
    addressed: View,
    own: View,
    train: Split,
    engine: Engine,
    rows: np.ndarray,
    *,
    seed: int,
    round: int,
    rounds: int,
) -> tuple[Server, View]:
    """What a chunk of clients received, and their views [C, ...], fine-tuned where the method says so.

    Args:
        algorithm: The method.
        common: What the server sent to all.
        addressed: What it sent to each, [C, ...].
        own: The clients' private rows [C, ...].
        train: The clients' training data.
        engine: How it is computed.
        rows: The clients' ids [C].
        seed: The experiment's seed.
        round: Rounds done; an address.
        rounds: Rounds in all; schedules read it.
    """
    dtype, device = train.x.dtype, train.x.device
    counts = torch.from_numpy(train.counts[rows]).to(dtype=dtype, device=device)
    given = algorithm.given(common, round, rounds)
    views = algorithm.views(given, addressed, own, counts)
    for position, phase in enumerate(algorithm.finetune):
        plan = Plan(phase, train, rows, seed=seed, round=round, stage=Stage.FINETUNE, position=position, dtype=dtype)
        views, _ = engine.run(algorithm, phase, given, views, plan)
    return given, views


def _fitted(algorithm: Algorithm, given: Server, views: View, train: Split, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Fitted]]:
    """Each client of a chunk, [1], and its predictor."""
    assert algorithm.predictor is not None
    for c in range(len(rows)):
        x, y = train.client(int(rows[c]))
        yield rows[c : c + 1], algorithm.predictor(algorithm, given, tree_map(lambda t, c=c: t[c], views), {"x": x, "y": y})


def _of_fitted(
    algorithm: Algorithm,
    fitted: Fitted,
    x: Tensor,
    value: float | None,
    draws: int,
    *,
    plain: bool,
    seed: int,
    round: int,
    client: int,
    index: int,
) -> Tensors:
    """What one client's predictor says at its inputs, {name: [1, N, ...]}, a piece of rows at a time; nothing where there are none."""
    rng = generator(seed, Purpose.PREDICT, round=round, client=client, index=index)
    pieces: list[Tensors] = []
    for piece in x.split(max(1, GATHER // max(1, x[:1].nbytes))) if len(x) else ():
        noise = None
        if draws:
            shape = (len(piece), draws, algorithm.module(x)(piece[:1]).shape[-1])
            noise = torch.from_numpy(rng.standard_normal(shape, np.float32)).to(x).transpose(0, 1)
        pieces.append(fitted(piece, value=value, noise=noise, plain=plain))
    names = [f.name for f in fields(Predictions) if pieces and f.name in pieces[0]]
    return {name: torch.cat([piece[name] for piece in pieces]).unsqueeze(0) for name in names}


def shared(algorithm: Algorithm, server: Server, split: Split, engine: Engine, *, seed: int, round: int, rounds: int) -> Predictions | None:
    """The server's model, at its mean, on every client's split; None where the server holds no whole model.

    One model serves all clients, so their rows go through it together.
    """
    parts = algorithm.shared_parts()
    if parts is None:
        return None
    given = algorithm.given(server, round, rounds)
    views = {name: tree_map(lambda t: t.unsqueeze(0), algorithm.belief(name, given[name])) for name in parts}
    views["n"] = torch.ones(1, dtype=split.x.dtype, device=split.x.device)
    everyone = Split(split.x, split.y, split.index, np.array([len(split.index)]))
    flat = of_views(algorithm, parts, views, everyone, np.zeros(1, np.int64), engine, seed=seed, round=round, draws=0)
    collector = Collector(split)
    for j, (start, n) in enumerate(zip(split.offsets, split.counts, strict=True)):
        collector.add(np.array([j]), {name: value[:, start : start + n] for name, value in flat.items()})
    return collector.predictions()
