"""Block and Algorithm: a published method as a value. Blocks say what is believed, tied, sent and kept; phases what is trained."""

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from bayesfl.base.checks import instance, whole
from bayesfl.base.layout import Layout
from bayesfl.base.protocols import (
    RESERVED,
    Batch,
    Likelihood,
    Predictor,
    Server,
    Tensors,
    Uplink,
    View,
)
from bayesfl.base.random import Purpose, generator
from bayesfl.base.trees import flatten
from bayesfl.composition.block import Block
from bayesfl.likelihoods import Categorical
from bayesfl.models import Split, refuse_impure


@dataclass(frozen=True)
class Algorithm:
    """A federated method: blocks x phases, and what it must share, report and combine beyond the blocks.

    Args:
        model: Architecture and initial weights; copied, never changed. Parameters that no block covers stay as they are.
        blocks: The model's parts by name; they need not partition it (Ditto has two over all of it).
        phases: Local work of a round, in order.
        parts: The blocks that make the personal predictor, each parameter at most once.
        likelihood: What y is.
        server: (blocks, number of clients J) -> initial server state beyond the blocks; what it holds for each client is [J, ...].
        private: (given) -> further private state of one client.
        share: (server, ids [C]) -> what every client receives, and what is addressed to each of these, [C, ...].
        report: (given, view) -> further uplink of one client; reads blocks and what `private` names.
        combine: (server, ids, uplink) -> what changed on the server; runs after the pools, sees what was reported, stacked over
            the cohort, and the blocks with a stacked pool.
        finetune: Phases that every client runs on a copy of its view before it predicts.
        adapt: Phases that a client never seen in training runs once.
        predictor: What makes the personal predictions where draws of the blocks in `parts` don't; without it, these do.
        predictive: The paper's number of posterior draws for a prediction; 0 predicts at the mean, or by the predictor's closed form.
        train: Who trains, `cohort` or `all` (then only the cohort is gathered): the paper's default.
        sampling: How a cohort is drawn, `fixed` or `bernoulli`: the paper's default.

    What these functions add has names of its own, other than those of blocks, without dots.

    Raises:
        TypeError: The model is no module.
        ValueError: A pattern matches nothing, two parts claim one parameter, a block's name is reserved or has a dot, or the model
            draws or counts in training.
    """

    model: nn.Module
    blocks: Mapping[str, Block]
    phases: tuple[Any, ...]
    _: KW_ONLY
    parts: tuple[str, ...]
    likelihood: Likelihood = field(default_factory=Categorical)
    server: Callable[[Server, int], Server] = lambda blocks, clients: {}
    private: Callable[[Server], View] = lambda given: {}
    share: Callable[[Server, Tensor], tuple[Server, View]] = lambda server, ids: (server, {})
    report: Callable[[Server, View], Uplink] = lambda given, view: {}
    combine: Callable[[Server, Tensor, Uplink], Server] = lambda server, ids, uplink: {}
    finetune: tuple[Any, ...] = ()
    adapt: tuple[Any, ...] = ()
    predictor: Predictor | None = None
    predictive: int = 0
    train: Literal["cohort", "all"] = "cohort"
    sampling: Literal["fixed", "bernoulli"] = "fixed"

    def __post_init__(self) -> None:
        instance("model", self.model, nn.Module, "build one, as bf.models.mlp(clients.inputs, outputs=clients.outputs)")
        refuse_impure(self.model)
        if shapeless := [name for name, p in self.model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]:
            raise ValueError(
                f"parameters {shapeless} of the model have no shape yet: run it on an example first, or give layers their sizes"
            )
        object.__setattr__(self, "model", copy.deepcopy(self.model))
        reserved = [name for name in self.blocks if name in RESERVED]
        if reserved:
            raise ValueError(f"block names {reserved} are reserved; choose others than {RESERVED}")
        flatten(self.blocks)  # refuses names with dots
        whole("predictive", self.predictive, least=0)
        layouts = {name: Layout(self.model, block.names) for name, block in self.blocks.items()}
        object.__setattr__(self, "_layouts", layouts)
        self.check_parts(self.parts)
        if self.copies(self.parts) is not None and self.predictor is None:
            raise ValueError(f"parts {self.parts} have copies, so a predictor must say how they predict together, as predictors.Mixture()")
        for part in (*self.phases, *self.finetune, *self.adapt, *([] if self.predictor is None else [self.predictor])):
            part.check(self)

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name}: {type(block.posterior).__name__}" for name, block in self.blocks.items())
        return f"Algorithm({type(self.model).__name__}; {blocks}; {len(self.phases)} phases)"

    def check_parts(self, parts: Iterable[str]) -> None:
        """That `parts` are blocks and claim each parameter at most once.

        Raises:
            ValueError: They are not, or do not.
        """
        owner: dict[str, str] = {}
        for part in parts:
            if part not in self.blocks:
                raise ValueError(f"{part!r} is not a block; the blocks are {list(self.blocks)}")
            for name in self.layout(part).names:
                if name in owner:
                    raise ValueError(
                        f"blocks {owner[name]!r} and {part!r} both claim parameter {name!r} in one predictor; narrow one pattern, "
                        "or name only one of them in parts"
                    )
                owner[name] = part
        counts = {count for part in owner.values() if (count := self.blocks[part].copies) is not None}
        if len(counts) > 1:
            raise ValueError(f"parts of one predictor have {sorted(counts)} copies; give them one number")

    def layout(self, block: str) -> Layout:
        """Which parameters a block covers, and how its vector is laid out."""
        return self.__dict__["_layouts"][block]

    def copies(self, parts: Iterable[str]) -> int | None:
        """How many copies the blocks have that stand several times, None where none does."""
        found = {block.copies for block in (self.blocks[part] for part in parts) if block.copies}
        return found.pop() if found else None

    def shared_parts(self) -> tuple[str, ...] | None:
        """The blocks that make a global model: those that the server holds, if together they cover what `parts` cover, once."""
        held = tuple(name for name, block in self.blocks.items() if not block.private)
        covered = [name for block in held for name in self.layout(block).names]
        wanted = {name for part in self.parts for name in self.layout(part).names}
        single = self.copies(held) is None
        return held if single and len(covered) == len(set(covered)) and set(covered) == wanted else None

    # What the mathematics needs

    def module(self, like: Tensor) -> nn.Module:
        """This thread's own copy of the model, in the precision and on the device of `like`; the copy may be overwritten."""
        copies = _LOCAL.__dict__.setdefault("modules", weakref.WeakKeyDictionary()).setdefault(self.model, {})
        key = (like.dtype, like.device)
        if key not in copies:
            copies[key] = copy.deepcopy(self.model).to(dtype=like.dtype, device=like.device).requires_grad_(False)
        return copies[key]

    def leaves(self, parts: Iterable[str], view: View, noise: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Parameters by name, [..., *shape]: a draw from each part's belief where there is noise [..., D], else its mean."""
        noise = noise or {}
        return {
            name: leaf
            for part in parts
            for name, leaf in self.layout(part).leaves(self.blocks[part].posterior.sample(view[part], noise.get(part))).items()
        }

    def network(self, view: View) -> nn.Module:
        """This thread's own copy of the model at one client's weights, those of `parts` at their means; the next call overwrites it."""
        network = self.module(view["n"])
        for name, leaf in self.leaves(self.parts, view).items():
            network.get_parameter(name).copy_(leaf)
        return network

    def outputs(self, leaves: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The model's outputs [B, O] for one client's `x` [B, *] under its parameters."""
        return functional_call(self.module(next(iter(leaves.values()))), dict(leaves), (x,))

    def features(self, leaves: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor | None, Tensor]:
        """What the head of a `Split` gets, [B, F], None for another model, and the outputs [B, O]."""
        module = self.module(next(iter(leaves.values())))
        if not isinstance(module, Split):
            return None, self.outputs(leaves, x)
        body, head = ({k.removeprefix(part): v for k, v in leaves.items() if k.startswith(part)} for part in ("body.", "head."))
        features = functional_call(module.body, body, (x,))
        return features, functional_call(module.head, head, (features,))

    def losses(self, leaves: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Negative log likelihoods [B] of one client's batch under its parameters, in nats."""
        return self.likelihood.nll(self.outputs(leaves, batch["x"]), batch["y"])

    def losses_of_copies(self, parts: Iterable[str], view: View, batch: Batch, noise: Mapping[str, Tensor] | None = None) -> Tensor:
        """`losses` [B] of one client at its weights, or at one draw [D]; [M, B] where a part has M copies."""
        parts, noise = tuple(parts), noise or {}
        count = self.copies(parts)
        leaves = self.leaves(parts, view, {k: self.noise_of_copies(k, e) for k, e in noise.items()})
        if count is None:
            return self.losses(leaves, batch)
        many = {name for part in parts if self.blocks[part].copies for name in self.layout(part).names}
        return torch.stack([self.losses({k: v[m] if k in many else v for k, v in leaves.items()}, batch) for m in range(count)])

    def noise_size(self, block: str) -> int:
        """Standard normals that one draw of a block takes, of all its copies."""
        this = self.blocks[block]
        return (this.copies or 1) * this.posterior.noise_size(self.layout(block).size)

    def noise_of_copies(self, block: str, noise: Tensor) -> Tensor:
        """Standard normals [..., `noise_size`] of a draw, [..., M, size] where the block has M copies."""
        count = self.blocks[block].copies
        return noise if count is None else noise.unflatten(-1, (count, -1))

    def divergence(self, block: str, belief: Tensors, given: Server, view: View) -> Tensor:
        """KL(q || prior) [...] in nats of a block's belief, of all its copies together; for a point, its energy -log p."""
        this = self.blocks[block]
        found = this.prior.energy(*this.posterior.moments(belief), given, view) - this.posterior.entropy(belief)
        return found if this.copies is None else found.sum(-1)

    # What a federation needs

    def init(self, clients: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Server:
        """The server's state before the first round: for each block what travels of it (of a private one its centre), and more."""
        weights = {name: p.detach().float() for name, p in self.model.named_parameters()}
        state: Server = {}
        for index, (name, block) in enumerate(self.blocks.items()):
            layout = self.layout(name)
            loc = layout.ravel(weights)
            if block.copies is not None:
                loc = torch.stack(
                    [self._start(block, loc, generator(seed, Purpose.START, index=index, phase=m)) for m in range(block.copies)]
                )
            else:
                loc = self._start(block, loc, generator(seed, Purpose.START, index=index))
            belief = block.posterior.init(loc.to(dtype=dtype, device=device))
            state[name] = {key: belief[key].clone() for key in (block.pool.sends if block.pool else ("loc",))}
        return state | self._more("server", self.server(state, clients), torch.empty(0, dtype=dtype, device=device))

    @staticmethod
    def _start(block: Block, loc: Tensor, rng: np.random.Generator) -> Tensor:
        return loc if block.start == "module" else torch.as_tensor(block.start(rng, len(loc)))

    def newcomers(self, server: Server, clients: int) -> Server:
        """The server's state as it meets `clients` never seen in training.

        What it has learnt stays. An entry whose shape depends on the number of clients holds something for each of those that
        trained; it is made anew by `server` from the blocks as they are now, as for clients at their start.
        """
        blocks = {name: server[name] for name in self.blocks}
        like = next(iter(blocks.values()))["loc"]
        made, one_more = (self._more("server", self.server(blocks, n), like) for n in (clients, clients + 1))
        learnt = {key: server[key] for key in made}
        return server | tree_map(lambda new, other, old: old if new.shape == other.shape else new, made, one_more, learnt)

    def _more(self, what: str, tree: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """What a method adds to its state beyond the blocks, as tensors on the device of `like`; floating ones in its precision."""
        self._refuse_taken(what, tree, (*self.blocks, *RESERVED))
        out: dict[str, Any] = tree_map(lambda t: _placed(t, like), dict(tree))
        if loose := [key for key, leaf in flatten(out).items() if not isinstance(leaf, Tensor)]:
            raise ValueError(f"`{what}` returns {loose}, which must be tensors or mappings of tensors")
        return out

    def _refuse_taken(self, what: str, tree: Mapping[str, Any], taken: Iterable[str]) -> None:
        if clash := sorted(set(tree) & set(taken)):
            raise ValueError(f"`{what}` returns {clash}, names that blocks have or that are reserved {RESERVED}; choose others")
        flatten(tree)  # refuses names with dots

    def given(self, common: Server, round: int, rounds: int) -> Server:
        """What every client receives in a round; private blocks, of which the server only knows the start, are not in it."""
        kept = {k: v for k, v in common.items() if k not in self.blocks or not self.blocks[k].private}
        # Fine-tuning and adaptation after the last round still have a learning rate: its own.
        return kept | {"round": min(round, rounds - 1), "rounds": rounds}

    def belief(self, block: str, entry: Tensors) -> Tensors:
        """A client's belief about a block as it comes from the server's entry; may alias it."""
        return {**self.blocks[block].posterior.init(entry["loc"]), **entry}

    def rows(self, server: Server) -> View:
        """One client's private state at its start, made from the server's: the blocks it keeps, and what `private` names."""
        loc = next(iter(server[name]["loc"] for name in self.blocks))
        kept = {name: self.belief(name, server[name]) for name, block in self.blocks.items() if block.keep}
        for phase in self.phases:
            kept |= phase.keeps(self, {name: self.belief(name, server[name]) for name in self.blocks})
        return kept | self._more("private", self.private(self.given(server, 0, 1)), loc)

    def views(self, given: Server, addressed: View, rows: View, counts: Tensor) -> View:
        """Views of a chunk of clients, [C, ...] throughout: common blocks expanded, private rows, what was addressed, "n"."""
        chunk = len(counts)
        common = {
            name: tree_map(lambda t: t.expand(chunk, *t.shape), self.belief(name, given[name]))
            for name, block in self.blocks.items()
            if not block.keep and name in given
        }
        return common | rows | addressed | {"n": counts}

    def sent(self, view: View) -> dict[str, Tensors]:
        """What pools gather from a view: of each block the tensors that travel."""
        return {name: {key: view[name][key] for key in block.pool.sends} for name, block in self.blocks.items() if block.pool}

    def uplink(self, dtype: torch.dtype = torch.float32) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and precision of every tensor that a client sends; "n" is known to the server from the start.

        Raises:
            ValueError: `report` reads something that `private` does not name, or a name is taken.
        """
        server = self.init(1, dtype=dtype)
        common, addressed = self.share(server, torch.zeros(1, dtype=torch.long))
        for received in (common, addressed):
            self._refuse_taken("share", received, RESERVED)
        given, rows = self.given(common, 0, 1), tree_map(lambda t: t[None], self.rows(server))
        view = tree_map(lambda t: t[0], self.views(given, addressed, rows, torch.ones(1, dtype=dtype)))
        try:
            more = self.report(given, view)
        except KeyError as error:
            raise ValueError(f"report reads {error} before any phase has run; give it an initial value in `private`") from error
        self._refuse_taken("report", more, (*self.blocks, *RESERVED))
        return {name: (tuple(t.shape), t.dtype) for name, t in flatten(self.sent(view) | more).items()}


_LOCAL = threading.local()


def _placed(value: Any, like: Tensor) -> Tensor:
    """A tensor on the device of `like`, and in its precision where it is floating: counters and masks stay what they are."""
    t = torch.as_tensor(value)
    return t.to(like) if t.is_floating_point() else t.to(like.device)
