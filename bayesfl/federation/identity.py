"""The identity of a method: a description by which a saved state, or another machine, recognises the method it belongs to."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bayesfl.base.copies import refuse_changed
from bayesfl.base.described import described, held, layers
from bayesfl.composition.algorithm import Algorithm
from bayesfl.federation.errors import CheckpointError
from bayesfl.models.modes import norms, rate

FIRST = 3
"""Number of differences that an error message lists."""


def identity(algorithm: Algorithm) -> dict[str, Any]:
    """Return a description of an algorithm that is equal for two algorithms whose saved states are interchangeable.

    It can be written as JSON and is the same in every process. It holds numbers, names and types of all options, also of what functions
    close over, have as defaults or are partially applied to; the model's layers, the plain values that they hold, which of them draw, the
    shapes of its parameters, and the values of the parameters and buffers that no block covers. It does not hold the code of functions,
    nor of a model's forward: two lambdas of one function differ only where they close over something else.
    """
    parameters = dict(algorithm.model.named_parameters())
    named: dict[str, Any] = {f.name: described(getattr(algorithm, f.name)) for f in fields(algorithm) if f.name != "model"}
    named["layers"] = layers(algorithm.model)
    named["held"] = held(algorithm.model)
    named["drawing"] = [name for name, part in algorithm.model.named_modules() if part.training and rate(part) > 0]
    named["parameters"] = {name: list(p.shape) for name, p in parameters.items()}
    named["constants"] = _constants(algorithm)
    return named


def _constants(algorithm: Algorithm) -> dict[str, str]:
    """Describe the parameters that no block covers, and the buffers; once for each algorithm, since a frozen backbone may be large."""
    refuse_changed(algorithm.model)
    if "_constants" not in algorithm.__dict__:
        covered = {name for block in algorithm.blocks for name in algorithm.layout(block).names}
        model = algorithm.model
        counters = {f"{norm}.num_batches_tracked".removeprefix(".") for norm in norms(model)}
        everything = (*model.named_parameters(), *model.named_buffers())
        constants = {name: t for name, t in everything if name not in covered | counters}
        object.__setattr__(algorithm, "_constants", {name: described(t) for name, t in constants.items()})
    return algorithm.__dict__["_constants"]


def fingerprint(algorithm: Algorithm, calibration: Sequence[Any] = ()) -> str:
    """Return a digest of a method's identity and of its steps of calibration, by which two machines recognise that theirs are the same."""
    everything = identity(algorithm) | ({"calibration": described(list(calibration))} if calibration else {})
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def reading(algorithm: Algorithm) -> str:
    """Describe how a method predicts; of functions, such as rules of selection, their names alone tell them apart."""
    return json.dumps(described([algorithm.predictor, algorithm.parts, algorithm.finetune, algorithm.draws, algorithm.likelihood]))


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Return the places where two identities differ, with what stands there in each; of layers of two kinds nothing else."""
    found = _differences(one, other)
    kinds = {f"held.{path.removeprefix('layers.')}" for path in found if path.startswith("layers.")}
    return {path: both for path, both in found.items() if path.rpartition(".")[0] not in kinds}


def _differences(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        pairs = [(f"{path}.{key}" if path else key, one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{path}[{place}]", *both) for place, both in enumerate(zip(one, other, strict=True))]
    else:
        return {} if one == other else {path: (one, other)}
    return {place: both for inner, a, b in pairs for place, both in _differences(a, b, inner).items()}


def _as_known(made_with: Mapping[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return an identity with what a saved one says of a model's parts: earlier versions wrote less, and those of torch may hold more."""
    found = {name: part for name, part in now.items() if name in made_with or name not in ("held", "drawing")}
    then, own = made_with.get("held"), now["held"]
    if isinstance(then, Mapping) and all(isinstance(old, Mapping) for old in then.values()):  # else the file is damaged, and differs
        found["held"] = {part: {**old, **{key: own[part][key] for key in old if key in own.get(part, {})}} for part, old in then.items()}
    return found


def check_method(what: str, made_with: dict[str, Any], algorithm: Algorithm) -> None:
    """Check by its identity that a saved run was made with this method.

    Args:
        what: The saved run's name, which begins the error message.
        made_with: Identity of the method that made it, see `identity`.
        algorithm: The method for which it is loaded.

    Raises:
        CheckpointError: The two methods differ.
    """
    if different := differences(made_with, _as_known(made_with, identity(algorithm))):
        raise CheckpointError(f"{what} was made with another algorithm, which differs in {_told(different, 'saved', 'given')}")


def check_network(what: str, made_with: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check by its identity that a saved state is one of this method's network; the method's options are free.

    The state's tensors alone would not tell another activation, or another frozen backbone.

    Args:
        what: The state's name, which begins the error message.
        made_with: Identity of the method that made it, see `identity`.
        algorithm: The method that is to go on from it.

    Raises:
        CheckpointError: The layers, the shapes of the parameters, or the values of frozen parameters and buffers differ.
    """
    now = _as_known(made_with, identity(algorithm))
    parts = ("layers", "held", "parameters", "constants")
    if different := differences(*({part: of.get(part) for part in parts} for of in (made_with, now))):
        raise CheckpointError(
            f"{what} has the state of another network, which differs in {_told(different, 'there', 'here')}; build the method on the "
            "network of that run, frozen weights and buffers included"
        )


def _told(different: Mapping[str, tuple[Any, Any]], then: str, now: str) -> str:
    """Return the first differences in words, and how many more there are."""
    told = "; ".join(f"{path.rstrip('.')}: {then} {saved}, {now} {given}" for path, (saved, given) in list(different.items())[:FIRST])
    return told + (f"; and {len(different) - FIRST} more" if len(different) > FIRST else "")
