"""Heads of clients' own, each with a Gaussian of all its weights, on the bodies that a federation
has trained: the method that predicts with them, and how they are found by sums over clients.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import Inputs
from bayesfl.base.options import Natural
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.base.surveys import conduct
from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block
from bayesfl.composition.phases import Once
from bayesfl.curvature import Curvature
from bayesfl.data import ClientData
from bayesfl.evaluation.history import History
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients.local import State, private_rows
from bayesfl.federation.clients.surveying import Adder, ask_here, refuse_released
from bayesfl.posteriors import heads
from bayesfl.posteriors.full_gaussian import FullGaussian

if TYPE_CHECKING:
    from bayesfl.federation.run.result import Result

HEAD, BODY = "own_head", "body"


@options.method()
def with_heads(method: Algorithm, *, draws: Natural = 100) -> Algorithm:
    """Return a method whose clients predict with a head of their own on the body that another
    method trains for all, by a Gaussian with all covariances under a normal prior that they share.

    It trains nothing: `result.heads()` makes its federation of a trained one, and it loads what
    that has saved.

    Args:
        method: The method that trains the network.
        draws: Number of draws of a prediction; 0 predicts at the mean.

    Raises:
        ValueError: The network has no linear layer, or clients have no body in common.

    Example:
        >>> method = bf.with_heads(bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10)))
        >>> method
        Algorithm(SplitModel; own_head: FullGaussian, body: Point; 0 phases)
    """
    layer = _last_linear(method.model)
    mine = tuple(
        f"{layer}.{name}".removeprefix(".")
        for name, _ in method.model.get_submodule(layer).named_parameters()
    )
    body = tuple(
        name
        for part in _common(method, mine)
        for name in method.layout(part).names
        if name not in mine
    )
    blocks = {HEAD: Block(mine, posterior=FullGaussian(), pool=None, keep=True)}
    if body:
        blocks[BODY] = Block(body, pool=None)
    return replace(
        method,
        blocks=blocks,
        phases=(),
        parts=tuple(blocks),
        server=_prior,
        broadcast=("prior",),
        address=lambda server, ids: {},
        private={},
        reports={},
        combine=lambda server, ids, uplink: {},
        finetune=(),
        adapt=(Once(_settle, data=True, batched=False),),
        measured={},
        predictor=None,
        draws=draws,
        watch=None,
    )


def _last_linear(model: nn.Module) -> str:
    """Return the name of a network's last linear layer.

    Raises:
        ValueError: It has none.
    """
    names = [name for name, part in model.named_modules() if type(part) is nn.Linear]
    if not names:
        raise ValueError("the network has no nn.Linear, whose weights would be a client's head")
    return names[-1]


def _common(method: Algorithm, head: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts of the network whose body all clients have in common: what they predict
    with, or else the server's.

    Raises:
        ValueError: There is none.
    """
    addressed = method.to_one(method.init(2))[1]

    def shared(part: str) -> bool:
        alone = {*method.layout(part).names} <= {*head}
        return alone or not (method.blocks[part].keep or part in addressed)

    if method.copies(method.parts) is None and all(map(shared, method.parts)):
        return method.parts
    if (parts := method.shared_parts()) is None:
        raise ValueError(
            "clients have no body in common, on which heads could have a common prior; take a "
            "method whose body is the server's, as fedavg, fedper or pfedvem"
        )
    return parts


def _prior(blocks: Server, clients: int) -> Server:
    """Return the prior of heads before it is fitted: the network's own, with a width of 1."""
    loc = blocks[HEAD]["loc"]
    return {"prior": {"centre": loc.clone(), "tau": torch.ones_like(loc)}}


def _rows_of(algorithm: Algorithm, view: View, x: Inputs, y: Tensor) -> heads.Rows:
    """Return what a client's rows say of its last layer.

    Raises:
        ValueError: The last linear layer does not make the network's outputs.
    """
    layout = algorithm.layout(HEAD)
    curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=layout)
    found = curvature.last_layer(x)
    if found is None:
        raise ValueError(
            f"the last linear layer, {layout.names}, does not make the network's outputs: heads "
            "are for networks that end with a linear layer"
        )
    features = found[0]
    if len(layout.names) == 2:
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    return heads.Rows(features, y)


def _head(algorithm: Algorithm) -> heads.Head:
    """Return the last layer of a method of `with_heads`."""
    layout = algorithm.layout(HEAD)
    outputs = layout.shapes[layout.names[0]][0]
    return heads.Head(outputs, len(layout.names) == 2, algorithm.likelihood)


def _settle(algorithm: Algorithm, given: Server, view: View, batch: Batch) -> View:
    """Return a client's view with its posterior under the prior."""
    rows = _rows_of(algorithm, view, batch["x"], batch["y"])
    centre, tau = (given["prior"][name].double() for name in ("centre", "tau"))
    found = heads.belief(*_head(algorithm).posterior(rows, centre, tau))
    return view | {HEAD: {name: t.to(view[HEAD]["loc"]) for name, t in found.items()}}


def fitted(result: "Result", draws: int, aggregation: Adder | None) -> "Result":
    """Return the federation with heads of clients' own; see `Result.heads`."""
    method = with_heads(result.algorithm, draws=draws)
    data = result.data.to(result.device, result.dtype)
    clients = data.clients
    state = _carried(result, method)
    train = _rows(method, state, data.train)
    ids = np.arange(clients)
    layout, head = method.layout(HEAD), _head(method)
    question = heads.Hierarchy(head, layout.sizes, state.server[HEAD]["loc"].double().cpu())
    refuse_released([question], Outputs(data.task, data.outputs), result.settings)
    local = heads.LocalHeads(train, train, ids)
    found = conduct(question, ask_here(question, local, aggregation), None)
    centre, tau = found["centre"], found["tau"]
    if "validation" in data.splits and data.splits["validation"].counts.any():
        held = _rows(method, state, data.splits["validation"])
        scaled = heads.Scaled(
            head, layout.sizes, centre, tau, max(draws, 100), result.settings.seed
        )
        asked = heads.LocalHeads(held, train, ids)
        loss = conduct(scaled, ask_here(scaled, asked, aggregation), None)["loss"]
        by, scale = divmod(int(loss.argmin()), len(heads.SCALES))
        tau = tau * heads.SCALES[scale]
        method = with_heads(result.algorithm, draws=draws if by else 0)
    each = tau.repeat_interleave(torch.tensor(layout.sizes))
    like = state.server[HEAD]["loc"]
    state.server["prior"] = {"centre": centre.to(like), "tau": each.to(like)}
    state.server[HEAD] = {"loc": centre.to(like)}
    made = replace(
        result,
        algorithm=method,
        server=state.server,
        private=state.private,
        history=History(),
        novel=True,
        chosen=None,
        steps=(),
        calibrated=None,
    )
    with result.engine.crew(result.device) as crew:
        made.local(data.train).adapt(made.state, crew)
    return made


def _carried(result: "Result", method: Algorithm) -> State:
    """Return the state of a method of `with_heads` on the bodies that a federation has trained."""
    before, clients = result.algorithm, result.known.clients
    server = method.init(clients, dtype=result.dtype, device=result.device)
    parts = _common(before, method.layout(HEAD).names)
    held = {name: before.centre(name, result.server) for name in before.whole(parts)}
    leaves = before.leaves(parts, held)
    for name in method.blocks:
        server[name] = {"loc": method.layout(name).ravel(leaves)}
    return State(server, private_rows(method, server, clients), result.round)


def _rows(method: Algorithm, state: State, split: ClientData) -> list[heads.Rows]:
    """Return each client's rows at its last layer; of one without rows in the split none."""
    found: list[heads.Rows] = []
    for j in range(split.clients):
        got = state.received(method, np.array([j]))
        given = method.given(got.common, state.round, state.round + 1)
        count = torch.ones(1, dtype=split.dtype, device=split.device)
        view = tree_map(lambda t: t[0], method.views(given, got.addressed, got.rows, count))
        x, y = split.client(j)
        found.append(_rows_of(method, view, x, y))
    return found
