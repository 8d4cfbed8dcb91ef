"""Predictions of every client: with its own model after aggregation, fine-tuned if the method
fine-tunes, or with the shared model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.inputs import Inputs, call, count, each, first
from bayesfl.base.protocols import Batch, FittedPredictor, Tensors, View
from bayesfl.base.random import Purpose, generator
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.predictors import HEAD, Heads, Mixture
from bayesfl.data import ClientData
from bayesfl.engine import Engine
from bayesfl.engine.crew import Crew
from bayesfl.evaluation.collecting import Collector
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions
from bayesfl.federation.clients.local import KEPT, Done, Local, State, read_rows
from bayesfl.models.remedies import explained

Predicted: TypeAlias = tuple[np.ndarray, Tensors]
"""Clients [C], and their predictions, {name: [C, N, ...]}."""

# Bytes of inputs that are predicted at once: activations are many times larger, and should fit in
# the processor's cache.
GATHER = 2**21

FEW = 2**12
"""Maximum number of rows of a chunk, padded to its longest client; below it, all clients of the
chunk are predicted together.
"""

TUNING = "tuning"
"""Name of the survey that chooses the number that a method's predictor tunes."""


def personal(
    local: Local,
    state: State,
    splits: Sequence[ClientData],
    crew: Crew,
    *,
    draws: int | None = None,
    known: Mapping[str, Tensors] = {},
    ids: np.ndarray | None = None,
) -> list[LocalPredictions]:
    """Predict with every client's own model, on several splits of its data.

    Args:
        local: The clients' local work; the fine-tuning phases run first, once for all splits, on a
            copy of each view.
        state: The federation's state.
        splits: The splits to predict; their clients are those of `local`.
        crew: The threads that compute.
        draws: Number of posterior draws S; 0 predicts at the mean, None uses the number of the
            method's paper (or the closed form if its predictor has one).
        known: The last states of the surveys that the method's predictor needs, by their names.
        ids: The clients that predict; None for all.

    Raises:
        DivergenceError: A client's fine-tuning is not finite, and `local.tolerant` is False.
        ValueError: An integer exceeds an embedding's rows.
    """

    def work(ids: np.ndarray) -> list[list[Predicted]]:
        done = state.finetuned(local, ids)
        return of_chunk(local, done, splits, round=state.round, draws=draws, known=known)

    collectors = [Collector(split, local.names, local.algorithm.likelihood) for split in splits]
    for found in local.over(crew, ids, work):
        for collector, parts in zip(collectors, found, strict=True):
            for ids, part in parts:
                collector.add(ids, part)
    return [one.found(seed=local.seed, round=state.round) for one in collectors]


def of_chunk(
    local: Local,
    done: Done,
    splits: Sequence[ClientData],
    *,
    round: int,
    draws: int | None,
    known: Mapping[str, Tensors] = {},
) -> list[list[Predicted]]:
    """Predict for a chunk of clients, on several splits; a method's own predictor runs client by
    client.

    Args:
        local: The clients' local work.
        done: The outcome of local work; the clients predict with its views.
        splits: The splits to predict.
        round: Number of rounds done; it selects the random draws.
        draws: See `personal`.
        known: See `personal`.

    Returns:
        For each split, the chunk's clients with their predictions, in one or more parts.
    """
    algorithm = local.algorithm
    rule = algorithm.predictor
    if rule is None or isinstance(rule, Mixture):
        number = 0 if rule is not None else algorithm.draws if draws is None else draws
        noise = _noise(algorithm, done.ids, done.views["n"], local.seed, round, number)
        return [_by_size(local, done, split, noise) for split in splits]
    out: list[list[Predicted]] = [[] for _ in splits]
    value = value_of(algorithm, known)
    for ids, fitted in fitted_of(local, done, known, draws=draws):
        for split, parts in zip(splits, out, strict=True):
            about: Any = {"client": int(ids[0]), "seed": local.seed, "round": round, "draws": draws}
            rows = rows_of(split, ids)
            parts.append((ids, of_fitted(algorithm, fitted, done.views["n"], rows, value, **about)))
    return out


def alone(
    algorithm: Algorithm,
    view: View,
    split: ClientData,
    *,
    client: int,
    seed: int,
    round: int,
    fitted: FittedPredictor | None,
    draws: int | None,
    value: float | None,
) -> Tensors:
    """Predict for one client at any rows, {name: [N, ...]}, with the same draws as `personal`.

    Args:
        algorithm: The method.
        view: The client's view after its fine-tuning, [...].
        split: Its N rows, as those of the only client; labels are not read.
        client: The client's id, which selects its random draws.
        seed: The run's seed.
        round: Number of rounds done.
        fitted: The client's predictor; None to average over draws of the blocks.
        draws: See `personal`.
        value: The number that the method's predictor tunes; None for the predictor's default.

    Raises:
        ValueError: An integer exceeds an embedding's rows.
    """
    if fitted is None:
        number = algorithm.draws if draws is None else draws
        noise = _noise(algorithm, np.array([client]), view["n"], seed, round, number)
        views = tree_map(lambda t: t.unsqueeze(0), view)
        found = _of_views(
            Engine(), algorithm, algorithm.parts, views, split, np.zeros(1, np.int64), noise
        )
    else:
        about: Any = {"client": client, "seed": seed, "round": round, "draws": draws}
        found = of_fitted(
            algorithm, fitted, view["n"], rows_of(split, np.zeros(1, np.int64)), value, **about
        )
    return {name: t[0] for name, t in found.items()}


def _noise(
    algorithm: Algorithm, ids: np.ndarray, like: Tensor, seed: int, round: int, draws: int
) -> dict[str, Tensor]:
    """Draw standard normals {block: [C, S, size]} for the blocks with random weights, from each
    client's own generator.
    """
    out = {}
    for index, name in enumerate(algorithm.blocks):
        if draws and name in algorithm.parts and algorithm.blocks[name].stochastic:
            shape = (
                draws,
                algorithm.blocks[name].posterior.noise_size(algorithm.layout(name).size),
            )
            rngs = [
                generator(seed, Purpose.PREDICT, round=round, client=int(i), index=index)
                for i in ids
            ]
            out[name] = torch.from_numpy(
                np.stack([rng.standard_normal(shape, np.float32) for rng in rngs])
            ).to(like)
    return out


def _by_size(
    local: Local, done: Done, split: ClientData, noise: dict[str, Tensor]
) -> list[Predicted]:
    """Predict for a chunk of clients from their views; clients with similar numbers of rows are
    predicted together, to avoid padding.
    """
    algorithm, counts, found = local.algorithm, split.counts[done.ids], []
    # Numbers of rows between the same two powers of 2 form a group.
    sizes = np.frexp(counts)[1] * (len(counts) * counts.max() > FEW)
    for size in np.unique(sizes):
        places = np.flatnonzero(sizes == size)
        views, own = (
            (done.views, noise)
            if len(places) == len(counts)
            else read_rows((done.views, noise), places)
        )
        ids = done.ids[places]
        of = local.engine, algorithm, algorithm.parts, views, split, ids, own
        found.append((ids, _of_views(*of)))
    return found


def _of_views(
    engine: Engine,
    algorithm: Algorithm,
    parts: tuple[str, ...],
    views: View,
    split: ClientData,
    ids: np.ndarray,
    noise: dict[str, Tensor],
) -> Tensors:
    """Return the predictions of a chunk of clients from their views, {name: [C, N, ...]}.

    Rows pass through the model in pieces of `GATHER` bytes; the outputs of a piece at all draws are
    in memory at once.
    """
    pieces = []
    for x in _inputs(split, ids):
        with explained(x):
            outputs = engine.outputs(algorithm, parts, views, x, noise)
        if (copies := algorithm.copies(parts)) is None:
            piece = algorithm.likelihood.predictive(outputs)
        else:
            assert isinstance(algorithm.predictor, Mixture)
            each = algorithm.likelihood.predictive(outputs.flatten(0, 1).unsqueeze(1))
            of_copies = {name: t.unflatten(0, (-1, copies)) for name, t in each.items()}
            piece = algorithm.predictor.mixed(of_copies, views)
        if not noise:
            piece["epistemic"] = torch.full_like(piece["epistemic"], torch.nan)
        pieces.append(piece)
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}


def _inputs(split: ClientData, ids: np.ndarray) -> Iterator[Inputs]:
    """Yield the inputs of a chunk of clients [C, N, *] in pieces of rows; clients with fewer rows
    repeat their first one.
    """
    counts, width = split.counts[ids], int(split.counts[ids].max())
    size = max(1, GATHER // (len(ids) * split.row_bytes))
    for start in range(0, max(width, 1), size):
        places = np.arange(start, min(start + size, max(width, 1)))[None]
        index = split.offsets[ids][:, None] + np.where(places < counts[:, None], places, 0)
        flat = split.index[
            torch.from_numpy(np.minimum(index, len(split.index) - 1)).to(split.index.device)
        ]
        yield each(lambda t, shape=flat.shape: t.unflatten(0, shape), split.take(flat.reshape(-1)))


def rows_of(split: ClientData, ids: np.ndarray) -> Iterator[Inputs]:
    """Yield the clients' inputs [C, N, *] in pieces of rows; nothing if they have no rows."""
    if split.counts[ids].any():
        yield from _inputs(split, ids)


def padded_rows(split: ClientData, ids: np.ndarray) -> Batch:
    """Return the inputs of several clients, x [C, N, *], padded to the longest, and the `weight`
    [C, N] of their rows, 0 for padding.
    """
    inside = np.arange(split.counts[ids].max()) < split.counts[ids][:, None]
    pieces: list[Any] = list(_inputs(split, ids))
    weight = torch.from_numpy(inside).to(split.device, split.dtype)
    return {"x": torch.cat(pieces, 1), "weight": weight}


def value_of(algorithm: Algorithm, known: Mapping[str, Tensors]) -> float | None:
    """Return the number that a method's predictor tunes, chosen on clients' validation data, or the
    only one of its grid; None if it tunes none.

    Args:
        algorithm: The method.
        known: The last states of the surveys of its predictor, by their names.
    """
    if TUNING in known:
        return float(known[TUNING]["value"])
    grid = algorithm.predictor.grid if algorithm.predictor is not None else ()
    return grid[0] if len(grid) == 1 else None


def fitted_of(
    local: Local, done: Done, known: Mapping[str, Tensors], *, draws: int | None = None
) -> Iterator[tuple[np.ndarray, FittedPredictor]]:
    """Yield the clients of a chunk with their predictor, which receives the last states of its
    surveys in addition to the server's state: one by one, or several if the predictor's
    `of_several` fits them at once.
    """
    rule: Any = local.algorithm.predictor
    given = {**done.given, **known}
    keeps = bool(known) and isinstance(local.algorithm.predictor, Heads)
    joined = hasattr(rule, "together") and draws is None and not local.algorithm.draws
    start = 0
    while start < len(done.ids):
        client = int(done.ids[start])
        view, data = tree_map(lambda t, c=start: t[c], done.views), local.own_rows(client)
        many = rule.together(local.algorithm, view, data["x"]) if joined else 1
        ids = done.ids[start : start + max(1, many)]
        if len(ids) > 1:
            views = tree_map(lambda t, c=start, n=len(ids): t[c : c + n], done.views)
            fitted: Any = rule.of_several(
                local.algorithm, given, views, padded_rows(local.train, ids)
            )
        elif keeps and client in done.heads:
            own, tensors = done.heads[client]
            fitted = rule.restored(local.algorithm, view | own, tensors)
        else:
            fitted = rule(local.algorithm, given, view, data)
            made = ({HEAD: fitted.view[HEAD]}, fitted.state) if keeps else ()
            # Include this client only if all so far and this one fit.
            if keeps and (len(done.heads) + 1) * sum(t.nbytes for t in tree_leaves(made)) <= KEPT:
                done.heads[client] = made
        yield ids, fitted
        start += len(ids)


def of_fitted(
    algorithm: Algorithm,
    fitted: FittedPredictor,
    like: Tensor,
    rows: Iterable[Inputs],
    value: float | tuple[float, ...] | None,
    *,
    client: int,
    seed: int,
    round: int,
    draws: int | None = None,
) -> Tensors:
    """Predict with the predictor of C clients, for inputs in pieces of rows, {name: [C, N, ...]},
    or [K, C, N, ...] for several values; empty if there are no inputs. Each call makes the same
    draws, for one client.
    """
    number = algorithm.draws if draws is None else draws
    about = {"client": client, "round": round, "index": len(algorithm.blocks)}
    rng = generator(seed, Purpose.PREDICT, **about) if number else None
    axis, pieces = 1 + isinstance(value, tuple), []
    for piece in rows:
        noise, shape, flat = None, first(piece).shape[:2], each(lambda t: t.flatten(0, 1), piece)
        with explained(flat):
            if rng is not None:
                outputs = call(algorithm.module(like), each(lambda t: t[:1], flat))
                noise = (
                    torch.from_numpy(
                        rng.standard_normal((count(flat), number, outputs.shape[-1]), np.float32)
                    )
                    .to(outputs)
                    .transpose(0, 1)
                )
            found = fitted(flat, value=value, noise=noise, plain=draws == 0)
        pieces.append({name: t.unflatten(axis - 1, shape) for name, t in found.items()})
    names = [f.name for f in fields(Predictions) if pieces and f.name in pieces[0]]
    return {name: torch.cat([piece[name] for piece in pieces], axis) for name in names}


def shared(local: Local, state: State, split: ClientData) -> LocalPredictions | None:
    """Predict with the mean of the server's model on every client's split; None if the server has
    no complete model.

    All clients use the same model, so their rows are computed together.
    """
    algorithm, server = local.algorithm, state.server
    if (parts := algorithm.shared_parts()) is None:
        return None
    means = {name: algorithm.centre(name, server) for name in algorithm.whole(parts)}
    views = tree_map(lambda t: t.unsqueeze(0), means) | {
        "n": torch.ones(1, dtype=split.dtype, device=split.device)
    }
    together = replace(split, counts=np.array([len(split.index)]))
    flat = _of_views(local.engine, algorithm, parts, views, together, np.zeros(1, np.int64), {})
    collector = Collector(split, local.names, algorithm.likelihood)
    for j, (start, n) in enumerate(zip(split.offsets, split.counts, strict=True)):
        collector.add(np.array([j]), {name: t[:, start : start + n] for name, t in flat.items()})
    return collector.found()
