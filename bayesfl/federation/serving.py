"""A client's own model, made of a federation's state."""

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from bayesfl.base.copies import refuse_changed
from bayesfl.base.protocols import Server, View
from bayesfl.data.outline import Outline, place
from bayesfl.federation.client_model import ClientModel, needs_data, of_client
from bayesfl.federation.surveying import check_reading


def served_client(result: Any, client: int | str) -> ClientModel:
    """Return a client's own model; see `Result.client`.

    Args:
        result: The federation, a `Result`, whose module imports this one.
        client: The client's name or number.

    Raises:
        TypeError: As by `Result.client`.
        ValueError: As by `Result.client`.
        DivergenceError: The client's fine-tuning is not finite, and `tolerant` is False.
    """
    check_reading(result)
    name = result.known.client_names[j := place(client, result.known.client_names)]
    if isinstance(result.known, Outline) and needs_data(result.algorithm):
        raise ValueError(
            f"{name!r} needs its training data, for fine-tuning or for the method's predictor, and this result was loaded without "
            "them; bf.load(path, algorithm, clients) loads it with them, bf.load_client reads a client's own file"
        )
    if isinstance(result.known, Outline):
        (given, views), train, value = unadapted(result, j), None, result.known_value
    else:
        local, ids = result.local(result.known.train.alone(j).to(result.device, result.dtype)), np.array([j])
        done = local.finetuned(ids, result.state.received(result.algorithm, ids), result.round)
        given, views, train, value = done.given, done.views, dict(zip("xy", local.train.client(j), strict=True)), result.tuned
    view = tree_map(lambda t: t[0].clone(), views)
    own = tuple(one.of(torch.tensor([j])) for one in result.steps)
    about: dict[str, Any] = {
        "steps": own,
        "name": name,
        "client": j,
        "data": result.known,
        "round": result.round,
        "seed": result.settings.seed,
        "value": value,
        "server": result.server,
    }
    return of_client(result.algorithm, given, view, train, **about)


def unadapted(result: Any, j: int) -> tuple[Server, View]:
    """Return what client j received and its view before any phase, [1, ...]."""
    refuse_changed(result.algorithm.model)
    got = result.state.received(result.algorithm, np.array([j]))
    given = result.algorithm.given(got.common, result.round, result.settings.rounds)
    counts = result.known.counts if isinstance(result.known, Outline) else result.known.train.counts
    count = torch.tensor([int(counts[j])], dtype=result.dtype, device=result.device)
    return given, result.algorithm.views(given, got.addressed, got.rows, count)
