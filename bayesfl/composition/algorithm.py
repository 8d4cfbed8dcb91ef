"""`Algorithm`: a federated method as a value, composed of blocks (posteriors, and which of them are
sent and kept) and phases (the training).
"""

import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bayesfl.base.described import described
from bayesfl.base.inputs import Inputs, each
from bayesfl.base.layout import Layout, aliases, covers
from bayesfl.base.options import AT_LEAST_0, declared, instance
from bayesfl.base.protocols import (
    RESERVED,
    Batch,
    Likelihood,
    Predictor,
    Reported,
    Server,
    Tensors,
    Uplink,
    View,
)
from bayesfl.base.random import Purpose, generator
from bayesfl.base.trees import flatten
from bayesfl.base.warning import warn
from bayesfl.composition import buffers
from bayesfl.composition.block import Block
from bayesfl.composition.pools import Mixed
from bayesfl.data import ClientData
from bayesfl.likelihoods import Categorical
from bayesfl.models.altered import cut
from bayesfl.models.copies import copied
from bayesfl.models.modes import own_copy
from bayesfl.models.purity import refuse_impure
from bayesfl.models.trial import ROWS, Trial, tried
from bayesfl.models.weights import call_at


@dataclass(frozen=True)
class Made:
    """Identify the method that made an algorithm; a saved run recognises it by these fields.

    Args:
        function: The function that makes the algorithm.
        revision: Number that rises when the method's results change under the same options.
        options: All its options by name, except the model.
    """

    function: Callable[..., Any]
    revision: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
@declared
class Algorithm:
    """Describe a federated method: its blocks, its phases, and further state that server and
    clients keep, send and combine.

    Args:
        model: Architecture and initial weights; copied, never changed. Parameters that no block
            covers stay as they are.
        blocks: The model's parts by name; they need not partition it (Ditto has two over all of
            it).
        phases: Local work of a round, in order.
        parts: Names of the blocks that make the personal predictor; together they cover each
            parameter at most once.
        likelihood: Distribution of y given the model's outputs.
        server: (blocks, number of clients J) -> initial server state beyond the blocks; an entry
            with a row for each client is [J, ...]. A number that depends on J is computed anew
            in a run that begins from another by `start=`.
        broadcast: Names of `server`'s entries that every client receives in addition to the blocks;
            other entries are not sent to everyone.
        drawn: {name: (generator) -> value} for values that the server draws in each round, such as
            a coin, a mask or a number of steps. Every client receives them, and `combine` reads
            them in the server's state.
        address: (server, ids [C], in any order) -> entries for each of these clients alone, [C,
            ...]; a block among them is not sent to everyone.
        private: {name: start} of further entries that a client keeps from round to round.
        reports: {name: start} of further entries that a client sends. Before each round the view
            receives the start, and the client sends the view's entry after the round; it keeps the
            entry only if `private` has the name, too. The starts of `private` and `reports` are
            tensors, numbers, nested mappings of these, or functions (given) -> one of these; those
            of `reports` also `Reported`, with the range of what is sent.
        combine: (server, ids, uplink) -> the server's changed entries; runs after the pools.
            `uplink` has the cohort's reports and the blocks with a stacked pool, each [C, ...], "n"
            and "ids" [C], and the numbers "round" (from 1), "rounds" and "clients" J.
        finetune: Phases that every client runs on a copy of its view before it predicts.
        adapt: Phases that a client runs once if it was never seen in training.
        predictor: Rule that makes the personal predictions; None averages predictions over draws of
            the blocks in `parts`.
        draws: Default number of posterior draws for a prediction, the paper's; 0 predicts at the
            mean, or by the predictor's closed form.
        train: The paper's choice of clients that train: the `cohort`, or `all`, with only the
            cohort gathered.
        sampling: The paper's way to draw a cohort: `fixed` or `bernoulli`.
        tally: Whether the server has the mean or product of all clients' private state. Then only
            clients whose work is gathered train, and if a client of an earlier run has left, all
            start as new ones, unless there is `rebuild`.
        rebuild: (server, private) -> the server's changed entries when a run begins from another by
            `start=`, from the private state of its clients, [J, ...]. Over a network the server
            does not have this state, keeps its own entries, and warns. None for no changes.
        watch: (algorithm, phase, given, view, batch, client's name) -> {kind: warning} on a
            client's training; a run emits each kind once. It is called before each training phase
            of rounds 1, 2, 4, 8 and so on, for the client of each chunk with the most examples.
            None for no warnings.
        made: The library's method that made it; None if it was composed by hand, or changed by
            `dataclasses.replace`.

    Names that `server`, `private` and `reports` add must differ from the blocks' names and contain
    no dot.

    Raises:
        TypeError: `likelihood` is not a `Likelihood`.
        ValueError: A pattern matches no parameter, two parts cover one parameter, a name is
            reserved or contains a dot, or the model cannot be trained.

    Example:
        >>> model = bf.models.mlp(64, hidden=8, outputs=10)
        >>> step = bf.Descend(bf.Energy("w", ("w",), likelihood="mean"), batch_size=50)
        >>> method = bf.Algorithm(model, {"w": bf.Block()}, (step,), parts=("w",))
        >>> method.uplink(method.init(1))
        {'w.loc': ((610,), torch.float32)}
    """

    model: nn.Module
    blocks: Mapping[str, Block]
    phases: tuple[Any, ...]
    _: KW_ONLY
    parts: tuple[str, ...]
    likelihood: Likelihood = field(default_factory=Categorical)
    server: Callable[[Server, int], Server] = lambda blocks, clients: {}
    broadcast: tuple[str, ...] = ()
    drawn: Mapping[str, Callable[[np.random.Generator], Any]] = field(default_factory=dict)
    address: Callable[[Server, Tensor], View] = lambda server, ids: {}
    private: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[str, Any] = field(default_factory=dict)
    combine: Callable[[Server, Tensor, Uplink], Server] = lambda server, ids, uplink: {}
    finetune: tuple[Any, ...] = ()
    adapt: tuple[Any, ...] = ()
    predictor: Predictor | None = None
    draws: Annotated[int, AT_LEAST_0] = 0
    train: Literal["cohort", "all"] = "cohort"
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    tally: bool = False
    rebuild: Callable[[Server, View], Server] | None = None
    watch: Callable[[Any, Any, Server, View, Batch, str], Mapping[str, str]] | None = field(
        default=None, repr=False, compare=False
    )
    made: Made | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        instance(
            "likelihood",
            self.likelihood,
            Likelihood,
            "build one, as Categorical(), or one with task, width, nll, nll_and_slope, predictive",
        )
        refuse_impure(self.model)
        _check_tied(self.model, self.blocks)
        for what in ("blocks", "private", "reports"):
            entries = getattr(self, what)
            flatten(entries)  # raises for a name with a dot
            blocks = () if what == "blocks" else self.blocks
            _refuse_taken(what, entries, (*blocks, *RESERVED))
        object.__setattr__(self, "model", copied(self.model))
        object.__setattr__(self, "blocks", buffers.with_buffers(self.model, self.blocks))
        object.__setattr__(
            self,
            "_layouts",
            {name: buffers.layout(self.model, block) for name, block in self.blocks.items()},
        )
        self.check_parts(self.parts)
        if self.copies(self.parts) is not None and self.predictor is None:
            raise ValueError(
                f"parts {self.parts} have copies, so the method needs a predictor that combines "
                "them, such as predictors.Mixture()"
            )
        for part in (
            *self.phases,
            *self.finetune,
            *self.adapt,
            *([] if self.predictor is None else [self.predictor]),
        ):
            part.check(self)

    def described_as(self) -> dict[str, Any]:
        """Return the description from which a saved run recognises the method, see
        `bayesfl.base.described`: name and options, or the fields, without those at their defaults.
        """
        if self.made is None:
            name = "composed by hand"
            return {
                "method": name,
                name: {
                    f.name: getattr(self, f.name)
                    for f in fields(self)
                    if f.name not in ("model", "made", "watch")
                    and getattr(self, f.name) is not f.default
                },
            }
        function = inspect.unwrap(self.made.function)
        whose = (
            {"name": function.__name__}
            if function.__module__.startswith("bayesfl.")
            else described(function)
        )
        name, known = whose.pop("name"), inspect.signature(function).parameters
        options = {
            key: value
            for key, value in self.made.options.items()
            if key not in known or described(value) != described(known[key].default)
        }
        return {"method": name, "revision": self.made.revision, name: options, **whose}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a method of the library as its function, options and model; any other as its
        fields, whose functions pickle finds by name.
        """
        if self.made is None:
            held = {
                f.name: getattr(self, f.name)
                for f in fields(self)
                if f.init and getattr(self, f.name) is not f.default
            }
            return partial(Algorithm, **held), ()
        function = inspect.unwrap(self.made.function)
        where = (function.__module__, function.__qualname__)
        return _made_again, (*where, self.model, dict(self.made.options))

    def __repr__(self) -> str:
        blocks = ", ".join(
            f"{name}: {type(block.posterior).__name__}" for name, block in self.blocks.items()
        )
        return f"Algorithm({type(self.model).__name__}; {blocks}; {len(self.phases)} phases)"

    def check_parts(self, parts: Iterable[str]) -> None:
        """Check that `parts` cover each parameter at most once.

        Raises:
            KeyError: A part is not a block.
            ValueError: Two parts cover one parameter, or the parts differ in their number of
                copies.
        """
        owner: dict[str, str] = {}
        for part in parts:
            for name in self.layout(part).names:
                if name in owner:
                    raise ValueError(
                        f"blocks {owner[name]!r} and {part!r} both claim parameter {name!r} in one "
                        "predictor; narrow one pattern, as Block('head.*'), or name only one of "
                        "them in parts"
                    )
                owner[name] = part
        counts = {
            count for part in owner.values() if (count := self.blocks[part].copies) is not None
        }
        if len(counts) > 1:
            raise ValueError(
                f"parts of one predictor have {sorted(counts)} copies; give them one number"
            )

    def layout(self, block: str) -> Layout:
        """Return the parameters that a block covers, and the layout of its vector."""
        return self.__dict__["_layouts"][block]

    def copies(self, parts: Iterable[str]) -> int | None:
        """Return the number M of copies of the blocks `parts`; None if no part has copies."""
        found = {block.copies for block in (self.blocks[part] for part in parts) if block.copies}
        return found.pop() if found else None

    def shared_parts(self) -> tuple[str, ...] | None:
        """Return the blocks of one global model: `parts`, or all blocks on the server if they cover
        the same parameters once; otherwise None.
        """
        if not any(self.blocks[name].private for name in self.parts):
            return self.parts if self.copies(self.parts) is None else None
        held = tuple(
            name
            for name, block in self.blocks.items()
            if not block.private and not isinstance(block, buffers.Buffers)
        )
        covered = [name for block in held for name in self.layout(block).names]
        wanted = {name for part in self.parts for name in self.layout(part).names}
        single = self.copies(held) is None
        return (
            held
            if single and len(covered) == len(set(covered)) and set(covered) == wanted
            else None
        )

    def trains(
        self, train: Literal["cohort", "all"] | None, participation: float
    ) -> Literal["cohort", "all"]:
        """Return which clients train in a run: `train`, or the method's default for None.

        Raises:
            ValueError: Clients whose work is not gathered would train, and the method needs that
                work.
        """
        chosen = train or self.train
        if self.tally and chosen == "all" and participation < 1:
            raise ValueError(
                "train='all' changes the private state of all clients, and the server, which has "
                "its mean or product, gathers the cohort's changes only: leave train out, or let "
                "all clients take part in every round"
            )
        return chosen

    # Parameters, outputs and losses of one client

    def module(self, like: Tensor, *, train: bool = False) -> nn.Module:
        """Return this thread's own copy of the model, in the precision and on the device of `like`;
        the copy may be overwritten.

        It is in evaluation mode; with `train`, it has the modes of the given model.
        """
        return own_copy(self.model, like, train=train)

    def trial(self, split: ClientData) -> Trial:
        """Return the result of a trial of the network on some rows of a split, made once in a
        process.

        Raises:
            ValueError: The network does not accept the rows, or is rejected, see `models.trial`.
        """
        x = each(Tensor.cpu, split.take(split.index[:ROWS]))
        return tried(self.model, x, torch.empty(0, dtype=split.dtype))

    def whole(self, parts: Iterable[str]) -> tuple[str, ...]:
        """Return the parts, each followed by the block of its norms' buffers."""
        found = dict.fromkeys(name for part in parts for name in (part, part + buffers.SUFFIX))
        return tuple(name for name in found if name in self.blocks)

    def leaves(
        self, parts: Iterable[str], view: View, noise: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return parameters by name, [..., *shape]: a draw from each part's posterior if there is
        noise [..., D], otherwise its mean.
        """
        noise = noise or {}
        return {
            name: leaf
            for part in self.whole(parts)
            for name, leaf in self.layout(part)
            .leaves(self.blocks[part].posterior.sample(view[part], noise.get(part)))
            .items()
        }

    def network(self, view: View, parts: tuple[str, ...] | None = None) -> nn.Module:
        """Return this thread's copy of the model at one client's weights, `parts` at their means;
        the next call overwrites it.
        """
        network = self.module(view["n"])
        held = dict(network.named_parameters()) | dict(network.named_buffers())
        for name, leaf in self.leaves(self.parts if parts is None else parts, view).items():
            held[name].copy_(leaf)
        return network

    def outputs(self, leaves: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """Compute the model's outputs [B, O] for one client's `x` [B, *] at the parameters
        `leaves`.
        """
        return call_at(self.module(next(iter(leaves.values()))), leaves, x)

    def features(self, leaves: Mapping[str, Tensor], x: Inputs) -> tuple[Tensor | None, Tensor]:
        """Compute the features [B, F] that the head of a `SplitModel` receives (None for another
        model), and the outputs [B, O].
        """
        module = self.module(next(iter(leaves.values())))
        if not cut(module):
            return None, self.outputs(leaves, x)
        body, head = (
            {k.removeprefix(part): v for k, v in leaves.items() if k.startswith(part)}
            for part in ("body.", "head.")
        )
        features = call_at(module.body, body, x)
        return features, call_at(module.head, head, features)

    def losses(self, leaves: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Compute the negative log likelihoods [B] of one client's batch at the parameters
        `leaves`, in nats.
        """
        return self.likelihood.nll(self.outputs(leaves, batch["x"]), batch["y"])

    def losses_of_copies(
        self,
        parts: Iterable[str],
        view: View,
        batch: Batch,
        noise: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute `losses` [B] of one client at its weights, or at one draw from noise [D]; [M, B]
        if a part has M copies.
        """
        parts, noise = self.whole(parts), noise or {}
        count = self.copies(parts)
        leaves = self.leaves(parts, view, {k: self.noise_of_copies(k, e) for k, e in noise.items()})
        if count is None:
            return self.losses(leaves, batch)
        many = {
            name for part in parts if self.blocks[part].copies for name in self.layout(part).names
        }
        return torch.stack(
            [
                self.losses({k: v[m] if k in many else v for k, v in leaves.items()}, batch)
                for m in range(count)
            ]
        )

    def noise_size(self, block: str) -> int:
        """Return the number of standard normals for one draw of a block with all its copies."""
        this = self.blocks[block]
        return (this.copies or 1) * this.posterior.noise_size(self.layout(block).size)

    def noise_of_copies(self, block: str, noise: Tensor) -> Tensor:
        """Reshape the standard normals [..., `noise_size`] of a draw to [..., M, size] if the block
        has M copies.
        """
        count = self.blocks[block].copies
        return noise if count is None else noise.unflatten(-1, (count, -1))

    def of_copy(self, parts: Iterable[str], view: View, copy: int) -> View:
        """Return a client's view with only one copy of each block of `parts`, as for blocks without
        copies.
        """
        return view | {
            part: tree_map(lambda t: t[copy], view[part])
            for part in self.whole(parts)
            if self.blocks[part].copies
        }

    def divergence(self, block: str, belief: Tensors, given: Server, view: View) -> Tensor:
        """Compute KL(q || prior) [...] of a block's posterior in nats, summed over its copies; for
        a point, the energy -log p.
        """
        this = self.blocks[block]
        found = this.prior.energy(
            *this.posterior.moments(belief), given, view
        ) - this.posterior.entropy(belief)
        return found if this.copies is None else found.sum(-1)

    # The server's state, the clients' views, and the messages between them

    def init(
        self,
        clients: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Server:
        """Return the server's state before the first round: the sent tensors of blocks (for private
        ones the centre), and further entries.
        """
        covered = {name for block in self.blocks for name in self.layout(block).names}
        weights = {name: t for name, t in buffers.tensors_of(self.model).items() if name in covered}
        state: Server = {}
        for index, (name, block) in enumerate(self.blocks.items()):
            loc = self.layout(name).ravel(weights)
            rngs = (
                generator(seed, Purpose.START, index=index, phase=m)
                for m in range(block.copies or 1)
            )
            starts = [
                loc if block.start == "module" else torch.as_tensor(block.start(rng, len(loc)))
                for rng in rngs
            ]
            loc = starts[0] if block.copies is None else torch.stack(starts)
            belief = block.posterior.init(loc.to(dtype=dtype, device=device))
            entry = {
                key: belief[key].clone() for key in (block.pool.sends if block.pool else ("loc",))
            }
            state[name] = (
                block.pool.start(entry, clients) if isinstance(block.pool, Mixed) else entry
            )
        like = torch.empty(0, dtype=dtype, device=device)
        state |= self._more("server", self.server(state, clients), like)
        return self.redrawn(state, seed=seed, round=0)

    def redrawn(self, server: Server, *, seed: int, round: int) -> Server:
        """Return the server's state with the draws of a round, see `drawn`."""
        values = {
            name: draw(generator(seed, Purpose.COMMON, round=round, index=index))
            for index, (name, draw) in enumerate(self.drawn.items())
        }
        like = server[next(iter(self.blocks))]["loc"]
        return server | self._more("drawn", values, like)

    def free(self, clients: int) -> Mapping[str, int]:
        """Return the dotted names of the server's tensors whose first axes may change in length,
        with the number of such axes.

        One axis is free for entries other than blocks, such as models of clusters, if the shape
        does not depend on the number of clients. In a `Mixed` pool's entry the axes of a round's
        cohort are free.
        """
        kept = self.__dict__.setdefault("_free", {})
        if clients not in kept:
            blocks = {name: self.init(clients)[name] for name in self.blocks}
            one, two = (
                flatten(self._more("server", self.server(blocks, n), torch.empty(0)))
                for n in (clients, clients + 1)
            )
            kept[clients] = {
                f"{name}.{key}": axes for name in self._mixed for key, axes in Mixed.holds.items()
            } | {
                name: 1
                for name, t in one.items()
                if name in two and t.dim() and t.shape == two[name].shape
            }
        return kept[clients]

    def newcomers(self, server: Server, clients: int) -> Server:
        """Return the server's state for `clients` never seen in training.

        Learnt entries stay. If an entry's shape depends on the number of clients, it belongs to the
        clients that trained, and `server` recomputes it from the present blocks, as at the start of
        a run. A block with a `Mixed` pool has no model for new clients: they receive the mean.
        """
        mixed = self._mixed
        blocks = {
            name: mixed[name].start(server[name], 0) if name in mixed else server[name]
            for name in self.blocks
        }
        like = next(iter(blocks.values()))["loc"]
        made, one_more = (
            self._more("server", self.server(blocks, n), like) for n in (clients, clients + 1)
        )
        learnt = {key: server[key] for key in made}
        return (
            server
            | blocks
            | tree_map(
                lambda new, other, old: old if new.shape == other.shape else new,
                made,
                one_more,
                learnt,
            )
        )

    def _more(self, what: str, tree: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """Convert a method's further entries to tensors on the device of `like`; floating-point
        ones in its precision.
        """
        _refuse_taken(what, tree, (*self.blocks, *RESERVED))
        return tree_map(
            lambda t: placed(t, like), dict(tree), is_leaf=lambda t: isinstance(t, list)
        )

    def _starts(
        self, what: str, starts: Mapping[str, Any], given: Server, like: Tensor
    ) -> dict[str, Any]:
        """Return the starts of one client's `private` or `reports` entries."""
        made = {}
        for name, start in starts.items():
            bare = start.start if isinstance(start, Reported) else start
            made[name] = bare(given) if callable(bare) else bare
        return self._more(what, made, like)

    def centre(self, block: str, server: Server) -> Tensors:
        """Return the posterior from the server's entry of a block, for a `Mixed` pool the mean over
        clients; may alias it.
        """
        return self.belief(block, self._entry(block, server))

    @property
    def _mixed(self) -> dict[str, Mixed]:
        return {
            name: block.pool for name, block in self.blocks.items() if isinstance(block.pool, Mixed)
        }

    def _entry(self, block: str, server: Server) -> Tensors:
        """Return the server's entry of a block without the tensors for single clients."""
        return {
            key: t
            for key, t in server[block].items()
            if block not in self._mixed or key not in Mixed.holds
        }

    def share(self, server: Server, ids: Tensor) -> tuple[Server, View]:
        """Return the server's messages: the part for every client, and the part addressed to each
        of `ids` [C], [C, ...].

        Every client receives each block that is not private, unless it is addressed to single
        clients, the entries in `broadcast`, and the round's draws.
        """
        addressed = {
            name: {"loc": server[name]["each"][ids]}
            for name in self._mixed
            if len(server[name]["each"])
        }
        own = self.address(server, ids)
        _refuse_taken("address", own, (*RESERVED, *self.private, *self.reports))
        if wrong := [key for key, t in flatten(own).items() if t.shape[:1] != (len(ids),)]:
            raise ValueError(
                f"`address` returns {wrong} without a row for each of its {len(ids)} ids; index "
                "the server's tensors by them"
            )
        addressed |= own
        common = {
            name: self._entry(name, server)
            for name, block in self.blocks.items()
            if not block.private and name not in addressed
        }
        return common | {name: server[name] for name in (*self.broadcast, *self.drawn)}, addressed

    def to_one(self, server: Server) -> tuple[Server, View]:
        """Return the messages to client 0 alone, see `share`; for shapes and starts."""
        return self.share(server, torch.zeros(1, dtype=torch.long))

    def given(self, common: Server, round: int, rounds: int) -> Server:
        """Return the entries that every client receives after `round` rounds, with the keys
        "round", from 1, and "rounds".
        """
        # Fine-tuning and adaptation after the last round use the learning rate of the last round.
        return common | {"round": min(round + 1, max(rounds, 1)), "rounds": rounds}

    def belief(self, block: str, entry: Tensors) -> Tensors:
        """Return a client's posterior of a block, made from the server's entry; may alias it."""
        return {**self.blocks[block].posterior.init(entry["loc"]), **entry}

    def rows(self, server: Server) -> View:
        """Return one client's private state at its start: its kept blocks, the state of phases, and
        the entries of `private`.
        """
        beliefs = {name: self.centre(name, server) for name in self.blocks}
        kept = {name: beliefs[name] for name, block in self.blocks.items() if block.keep}
        for phase in self.phases:
            more = phase.keeps(self, beliefs)
            _refuse_taken(
                "what a phase keeps", more, (*self.blocks, *RESERVED, *self.private, *self.reports)
            )
            kept |= more
        given = self.given(self.to_one(server)[0], 0, 1)
        like = next(iter(beliefs.values()))["loc"]
        return kept | self._starts("private", self.private, given, like)

    def views(self, given: Server, addressed: View, rows: View, counts: Tensor) -> View:
        """Return the views of a chunk of clients, [C, ...]: shared entries expanded, private rows,
        addressed entries, and "n".
        """
        common = {
            name: self.belief(name, given[name])
            for name, block in self.blocks.items()
            if not block.keep and name in given
        }
        common |= self._starts("reports", self.reports, given, counts)
        own = {
            name: self.belief(name, entry) if name in self.blocks else entry
            for name, entry in addressed.items()
        }
        return (
            tree_map(lambda t: t.expand(len(counts), *t.shape), common) | rows | own | {"n": counts}
        )

    def sent(self, view: View) -> dict[str, Tensors]:
        """Return the tensors that pools gather from a view, by block."""
        return {
            name: {key: view[name][key] for key in block.pool.sends}
            for name, block in self.blocks.items()
            if block.pool
        }

    def reported(self, view: View) -> Uplink:
        """Return the further entries that a client sends, from its view after a round."""
        return {name: view[name] for name in self.reports if name in view}

    def check_reported(self, started: View, ended: View) -> None:
        """Check that a client's reports still have the declared shapes and dtypes.

        Args:
            started: A view at the start of a round, which has the declared shapes and dtypes.
            ended: The same view after the round.

        Raises:
            ValueError: A phase has changed the shape or dtype of an entry.
        """
        before, after = (
            {
                name: (t.dtype, tuple(t.shape[1:]))
                for name, t in flatten(self.reported(view)).items()
            }
            for view in (started, ended)
        )
        for name in before.keys() | after.keys():
            one, other = before.get(name, "nothing"), after.get(name, "nothing")
            if one != other:
                raise ValueError(
                    f"`reports` declares {name!r} as {one}, but a phase returns {other}; give "
                    "`reports` a start of that form"
                )

    def check_names(self, started: View, ended: View) -> None:
        """Warn if a phase returned an entry that is not declared, and a declared one with a similar
        name stayed as it was.

        Args:
            started: A view at the start of the round.
            ended: The same view after the round.
        """
        for name in ended.keys() - started.keys():
            for meant in get_close_matches(name, [*self.private, *self.reports], cutoff=0.8):
                leaves = zip(tree_leaves(started[meant]), tree_leaves(ended[meant]), strict=True)
                if all(torch.equal(*both) for both in leaves):
                    warn(
                        f"a phase returns {name!r}, which the method does not declare, and leaves "
                        f"{meant!r}, which it declares, as it was; if one is meant, use one name",
                    )

    def uplink(self, server: Server) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name, shape and dtype of every tensor that a client sends, without "n", which the
        server has from the start.

        Args:
            server: The server's state, as `init` starts it.

        Raises:
            ValueError: A name is already used by a block or is reserved.
        """
        beliefs = {name: self.centre(name, server) for name in self.blocks}
        given = self.given(self.to_one(server)[0], 0, 1)
        reports = self._starts("reports", self.reports, given, next(iter(beliefs.values()))["loc"])
        return {
            name: (tuple(t.shape), t.dtype)
            for name, t in flatten(self.sent(beliefs) | reports).items()
        }


def _made_again(module: str, name: str, model: nn.Module, options: dict[str, Any]) -> Algorithm:
    """Return an algorithm made by the function of this name; used by pickle."""
    function = operator.attrgetter(name)(importlib.import_module(module))
    bound = inspect.signature(function).bind_partial()
    unset = [key for key in inspect.signature(function).parameters if key not in options]
    bound.arguments |= {key: model for key in unset} | options
    return function(*bound.args, **bound.kwargs)


def placed(value: Any, like: Tensor) -> Tensor:
    """Return a tensor on the device of `like`, in its precision if it is floating; counters and
    masks keep their dtype.
    """
    t = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    return t.to(like) if t.is_floating_point() else t.to(like.device)


def _check_tied(model: nn.Module, blocks: Mapping[str, Block]) -> None:
    """Check that no block covers a tied parameter by some of its names only: a shared body and a
    private head cannot both have it.

    Raises:
        ValueError: A block does so; the message has the names.
    """
    for name, names in aliases(model).items():
        for block in blocks.values():
            inside = {one for one in names if covers(block.pattern, one)}
            if inside and inside != names and model.get_parameter(name).requires_grad:
                raise ValueError(
                    f"pattern {block.pattern!r} covers a tied parameter by {sorted(inside)} and "
                    f"not by {sorted(names - inside)}, which are names of the same tensor: untie "
                    "the two, or cover both"
                )


def _refuse_taken(what: str, tree: Mapping[str, Any], taken: Iterable[str]) -> None:
    """Raise ValueError if a method's entries have names that are taken; those with dots are refused
    by `flatten`.
    """
    if clash := sorted(set(tree) & set(taken)):
        raise ValueError(
            f"`{what}` has the names {clash}, which blocks use or which are reserved {RESERVED}; "
            "choose others"
        )
