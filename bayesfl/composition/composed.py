"""Checks of what an `Algorithm` is composed of, before anything is looked up in it."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bayesfl.base.layout import aliases, covers
from bayesfl.base.protocols import RESERVED, Server
from bayesfl.base.trees import alike, flatten, shapes
from bayesfl.composition.block import Block


def check_composed(algorithm: Any) -> None:
    """Check the types of an algorithm's parts, and that the names it uses are free.

    Raises:
        TypeError: A part is none: of the blocks, phases, functions or tuples of names.
        ValueError: A parameter of the model has no shape yet, a block covers a tied one by some of its names only, or a name is reserved,
            has a dot, or stands twice.
    """
    if not isinstance(algorithm.blocks, Mapping) or not all(isinstance(block, Block) for block in algorithm.blocks.values()):
        raise TypeError(f"blocks must be a mapping {{name: Block(...)}}, got {algorithm.blocks!r}")
    for name in ("phases", "parts", "broadcast", "finetune", "adapt"):
        if not isinstance(getattr(algorithm, name), tuple):
            raise TypeError(f"{name} must be a tuple, such as (it,) of one, got {getattr(algorithm, name)!r}")
    for phase in (*algorithm.phases, *algorithm.finetune, *algorithm.adapt):
        if isinstance(phase, type) or not hasattr(phase, "check"):
            raise TypeError(f"a phase must be a Descend, a Once, a Repeat or one of your own, got {phase!r}; wrap a function in Once(...)")
    if shapeless := [name for name, p in algorithm.model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]:
        raise ValueError(f"parameters {shapeless} of the model have no shape yet: run it on an example first, or give layers their sizes")
    check_tied(algorithm.model, algorithm.blocks)
    reserved = [name for name in algorithm.blocks if name in RESERVED]
    if reserved:
        raise ValueError(f"block names {reserved} are reserved; choose others than {RESERVED}")
    flatten(algorithm.blocks)  # refuses names with dots
    for name in ("private", "reports"):
        if not isinstance(getattr(algorithm, name), Mapping):
            raise TypeError(f"{name} must be a mapping {{name: start}}, got {type(getattr(algorithm, name)).__name__}")
        refuse_taken(name, getattr(algorithm, name), (*algorithm.blocks, *RESERVED))
    if any(name in (*algorithm.blocks, *RESERVED) for name in algorithm.broadcast):
        raise ValueError(f"broadcast must be names that `server` adds, other than blocks, got {algorithm.broadcast!r}")
    for name in ("server", "address", "combine"):
        if not callable(getattr(algorithm, name)):
            raise TypeError(f"{name} must be a function, got {getattr(algorithm, name)!r}; see {name} in Algorithm's arguments")


def check_tied(model: nn.Module, blocks: Mapping[str, Block]) -> None:
    """Check that no block covers a tied parameter by some of its names only: a shared body and a private head cannot both have it.

    Raises:
        ValueError: A block does so; the message has the names.
    """
    for name, names in aliases(model).items():
        for block in blocks.values():
            inside = {one for one in names if covers(block.pattern, one)}
            if inside and inside != names and model.get_parameter(name).requires_grad:
                raise ValueError(
                    f"pattern {block.pattern!r} covers a tied parameter by {sorted(inside)} and not by {sorted(names - inside)}, which are "
                    "names of the same tensor: untie the two, or cover both"
                )


def check_addressed(algorithm: Any, own: Any, server: Server, ids: Tensor) -> None:
    """Check what an algorithm's `address` returns for the clients `ids` [C].

    Raises:
        ValueError: It is no mapping of tensors, has a name that is taken, lacks a row for each client, or is no belief about its block.
    """
    if not isinstance(own, Mapping) or not all(isinstance(t, Tensor) for t in flatten(own).values()):
        raise ValueError(f"`address` must return a mapping of tensors, {{}} for nothing, got {own!r}")
    refuse_taken("address", own, (*RESERVED, *algorithm.private, *algorithm.reports))
    for name in own.keys() & algorithm.blocks.keys():
        entry, held = own[name], server[name]
        if not isinstance(entry, Mapping) or not {"loc"} <= entry.keys() <= algorithm.belief(name, {"loc": held["loc"]}).keys():
            raise ValueError(f"`address` returns {entry!r} for the block {name!r}; return {{'loc': ...}} or all tensors of its belief")
        if not all(t.dim() and alike(held["loc"].expand(t.shape[0], *held["loc"].shape), t) for t in entry.values()):
            raise ValueError(f"`address` returns {shapes({name: entry})} for a block of {shapes({name: held})}; one row a client")
    if wrong := [key for key, t in flatten(own).items() if t.shape[:1] != (len(ids),)]:
        raise ValueError(f"`address` returns {wrong} without a row for each of its {len(ids)} ids; index what the server holds by them")


def refuse_taken(what: str, tree: Mapping[str, Any], taken: Iterable[str]) -> None:
    """Raise ValueError if a method's entries have names that are taken, or names with dots."""
    if clash := sorted(set(tree) & set(taken)):
        raise ValueError(f"`{what}` has {clash}, names that blocks have or that are reserved {RESERVED}; choose others")
    flatten(tree)  # refuses names with dots
