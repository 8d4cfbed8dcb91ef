"""Heads of clients' own, each with a Gaussian of all its weights, on the bodies that a federation
has trained: the method that predicts with them, and how they are found by sums over clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import Inputs
from bayesfl.base.protocols import Batch, Server, Tensors, View
from bayesfl.base.surveys import Survey, conduct
from bayesfl.composition import options
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.block import Block
from bayesfl.composition.phases import Once
from bayesfl.composition.predictors import LinearisedBelief
from bayesfl.curvature import Curvature
from bayesfl.data import ClientData
from bayesfl.evaluation.history import History
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients.local import Received, State, private_rows
from bayesfl.federation.clients.surveying import Adder, ask_here, refuse_released
from bayesfl.federation.settings import Method
from bayesfl.posteriors import heads
from bayesfl.posteriors.full_gaussian import FullGaussian

if TYPE_CHECKING:
    from bayesfl.federation.run.result import Result

HEAD, BODY, WIDTH = "own_head", "body", "width"
HIERARCHY, SCALED = "heads", "heads-scaled"
"""The names of the surveys of heads in messages."""
AskHeads: TypeAlias = Callable[[Survey[heads.LocalHeads], str, Mapping[str, Tensors]], Tensors]
"""Conduct a survey of heads of this name, after others with these last states, to its own."""


@options.method()
def with_heads(method: Method) -> Algorithm:
    """Give every client its own head on the body that another method trains for all: a Gaussian
    with full covariance, under a normal prior that all heads share.

    It trains nothing: `result.heads()` makes its federation of a trained one, and it loads what
    that has saved. Over Flower, `bayesfl.flower.serve(grid, bf.with_heads(method), rounds=0,
    start=trained, clients=...)` asks the nodes the same questions.

    Args:
        method: The method that trains the network.

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
        private={WIDTH: 1.0},
        reports={},
        combine=lambda server, ids, uplink: {},
        finetune=(),
        adapt=(Once(_settle, data=True, batched=False),),
        predictor=LinearisedBelief(HEAD, width=WIDTH),
        draws=0,
        watch=None,
    )


def makes(algorithm: Algorithm) -> bool:
    """Say whether a method is one of `with_heads`."""
    return any(isinstance(one, Once) and one.fn is _settle for one in algorithm.adapt)


def trained(algorithm: Algorithm, made_with: Mapping[str, Any]) -> Algorithm:
    """Return the method of which a state is with which a run begins: of a method of `with_heads`
    the one that has trained, unless the state has heads already.

    Args:
        algorithm: The method of the run.
        made_with: The identity of the method that made the state.
    """
    made = algorithm.made
    if not makes(algorithm) or made is None or made_with["method"] == with_heads.__name__:
        return algorithm
    return made.options["method"]


def lacks_prior(algorithm: Algorithm, server: Server) -> bool:
    """Say whether clients are to be asked for the prior of their heads, which is then as at first,
    with a centre that is known.
    """
    return makes(algorithm) and not bool(server["prior"]["spread"].any())


def _last_linear(model: nn.Module) -> str:
    """Return the name of the linear layer that a network declares last.

    Raises:
        ValueError: It has none, or its weights are made of other parameters.
    """
    layers = [
        (name, is_parametrized(part))
        for name, part in model.named_modules()
        if type(part) is nn.Linear or (isinstance(part, nn.Linear) and is_parametrized(part))
    ]
    if not layers or layers[-1][1]:
        raise ValueError(
            "the network has no nn.Linear as its last layer, whose weights would be a client's "
            "head; take those of weight_norm and the like off by "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
        )
    return layers[-1][0]


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
    """Return the prior of heads before it is fitted: around the network's own, with a tau of 1; a
    row for each point of the hierarchy, see `bayesfl.posteriors.heads.Hierarchy`; and the width of
    predictions, see `bayesfl.posteriors.heads.Scaled`.
    """
    centre = blocks[HEAD]["loc"][None].clone()
    none = centre.new_zeros(1, centre.shape[1], centre.shape[1])
    one = centre.new_ones(1)
    points = {"centre": centre, "tau": one + 0 * centre, "spread": none, "weight": one}
    return {"prior": {**points, WIDTH: torch.tensor(1.0)}}


def _rows_of(algorithm: Algorithm, view: View, x: Inputs, y: Tensor) -> heads.Rows:
    """Return what a client's rows say of its last layer.

    Raises:
        ValueError: The linear layer that the network declares last does not make its outputs.
    """
    layout = algorithm.layout(HEAD)
    curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=layout)
    found = curvature.last_layer(x)
    if found is None:
        raise ValueError(
            f"the linear layer that the network declares last, {layout.names}, does not make its "
            "outputs: declare the one that does last in __init__; its weights keep their names"
        )
    features = found[0]
    if len(layout.names) == 2:
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    return heads.Rows(features.cpu(), y.cpu())


def rows_of(algorithm: Algorithm, received: Received, split: ClientData, client: int) -> heads.Rows:
    """Return what a client's rows in a split say of its last layer.

    Args:
        algorithm: The method, of `with_heads`.
        received: What the client has received.
        split: The split.
        client: The client's place in it.

    Raises:
        ValueError: No linear layer is known to make the network's outputs.
    """
    given = algorithm.given(received.common, 0, 1)
    count = torch.ones(1, dtype=split.dtype, device=split.device)
    view = algorithm.views(given, received.addressed, received.rows, count)
    return _rows_of(algorithm, tree_map(lambda t: t[0], view), *split.client(client))


def _head(algorithm: Algorithm) -> heads.Head:
    """Return the last layer of a method of `with_heads`."""
    layout = algorithm.layout(HEAD)
    outputs = layout.shapes[layout.names[0]][0]
    return heads.Head(outputs, len(layout.names) == 2, algorithm.likelihood)


def _settle(algorithm: Algorithm, given: Server, view: View, batch: Batch) -> View:
    """Return a client's view with its posterior under the prior."""
    rows = _rows_of(algorithm, view, batch["x"], batch["y"])
    prior = {name: t.cpu().double() for name, t in given["prior"].items()}
    found = FullGaussian().of_moments(*_head(algorithm).posterior(rows, prior))
    own = {name: t.to(view[HEAD]["loc"]) for name, t in found.items()}
    return view | {HEAD: own, WIDTH: given["prior"][WIDTH]}


def hierarchy(algorithm: Algorithm, server: Server) -> heads.Hierarchy:
    """Return the survey that finds the prior of a method of `with_heads`.

    Args:
        algorithm: The method.
        server: The server's state, or what it sends to every client.
    """
    centre = server[HEAD]["loc"].double().cpu()
    return heads.Hierarchy(_head(algorithm), algorithm.layout(HEAD).sizes, centre)


def scaled(algorithm: Algorithm, prior: Tensors) -> heads.Scaled:
    """Return the survey that scales this prior on validation rows."""
    return heads.Scaled(_head(algorithm), prior)


def with_prior(algorithm: Algorithm, server: Server, ask: AskHeads, *, validates: bool) -> Server:
    """Return the server's state with the prior of heads that clients' answers give.

    Args:
        algorithm: The method, of `with_heads`.
        server: The server's state, with the body that was trained.
        ask: How a survey is conducted.
        validates: Whether there are validation rows, on which tau and predictions are scaled.
    """
    prior, width = ask(hierarchy(algorithm, server), HIERARCHY, {}), torch.tensor(1.0)
    if validates:
        found = ask(scaled(algorithm, prior), SCALED, {HIERARCHY: prior})
        prior, width = prior | {"tau": prior["tau"] * found["scale"]}, found["width"]
    like = server[HEAD]["loc"]
    mean = prior["weight"] @ prior["centre"]
    prior = {name: t.to(like) for name, t in (prior | {WIDTH: width}).items()}
    return {**server, HEAD: {"loc": mean.to(like)}, "prior": prior}


def fitted(result: "Result", aggregation: Adder | None) -> "Result":
    """Return the federation with heads of clients' own; see `Result.heads`."""
    method, outputs = with_heads(result.algorithm), Outputs(result.known.task, result.known.outputs)
    data = result.data.to(result.device, result.dtype)
    server = carried(result.algorithm, result.server, method, data.clients)
    refuse_released([hierarchy(method, server)], outputs, result.settings)
    ids = np.arange(data.clients)
    state = State(server, private_rows(method, server, data.clients), result.round)

    def rows(split: ClientData, j: int) -> heads.Rows:
        return rows_of(method, state.received(method, ids[j : j + 1]), split, j)

    train = [rows(data.train, j) for j in range(data.clients)]

    def ask(survey: Survey[Any], name: str, before: Mapping[str, Tensors]) -> Tensors:
        split = data.splits[survey.split]
        asked = [rows(split, j) if split.counts[j] else None for j in range(data.clients)]
        local = heads.LocalHeads(asked, train, ids)
        return conduct(survey, ask_here(survey, local, aggregation), outputs)

    validates = "validation" in data.splits and bool(data.validation.counts.any())
    server = with_prior(method, server, ask, validates=validates)
    made = replace(
        result,
        algorithm=method,
        server=server,
        private=private_rows(method, server, data.clients),
        history=History(),
        novel=True,
        after=(),
    )
    with result.engine.crew(result.device) as crew:
        made.local(data.train).adapt(made.state, crew)
    return made


def carried(before: Algorithm, trained: Server, method: Algorithm, clients: int) -> Server:
    """Return the server's state of a method of `with_heads` on the body that another has trained.

    Args:
        before: The method that has trained.
        trained: The server's state of that.
        method: The method of `with_heads`.
        clients: Number of clients.
    """
    parts = _common(before, method.layout(HEAD).names)
    held = {name: before.centre(name, trained) for name in before.whole(parts)}
    leaves = before.leaves(parts, held)
    like = next(iter(leaves.values()))
    server = method.init(clients, dtype=like.dtype, device=like.device)
    return server | {name: {"loc": method.layout(name).ravel(leaves)} for name in method.blocks}
