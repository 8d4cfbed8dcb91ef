"""Identity of a method, a network and data, as JSON, and the one error that lists where two of
them differ.

A method of the library is its name, its revision and its options; one that was composed by hand, or
changed by `dataclasses.replace`, is what its fields hold, see `bayesfl.base.described`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bayesfl.base.archive import CheckpointError
from bayesfl.base.described import described, differences, in_words, network
from bayesfl.base.protocols import Tensors
from bayesfl.composition.algorithm import Algorithm
from bayesfl.models.copies import refuse_changed
from bayesfl.models.modes import norms, rate


def identity(algorithm: Algorithm) -> dict[str, Any]:
    """Return a description of an algorithm that is equal for two algorithms whose saved states are
    interchangeable.

    It can be written as JSON and is the same in every process. Beside the method it holds the
    network, see `bayesfl.base.described.network`, which of its layers draw, the shapes of the
    parameters, and the values of parameters and buffers that no block covers.
    """
    model = algorithm.model
    return {
        **described(algorithm),
        **network(model),
        "drawing": [
            name for name, part in model.named_modules() if part.training and rate(part) > 0
        ],
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
        "constants": _constants(algorithm),
    }


def _constants(algorithm: Algorithm) -> dict[str, str]:
    """Describe the parameters that no block covers, and the buffers; once for each algorithm, since
    a frozen backbone may be large.
    """
    refuse_changed(algorithm.model)
    if "_constants" not in algorithm.__dict__:
        covered = {name for block in algorithm.blocks for name in algorithm.layout(block).names}
        model = algorithm.model
        counters = {f"{norm}.num_batches_tracked".removeprefix(".") for norm in norms(model)}
        everything = (*model.named_parameters(), *model.named_buffers())
        constants = {name: t for name, t in everything if name not in covered | counters}
        object.__setattr__(
            algorithm, "_constants", {name: described(t) for name, t in constants.items()}
        )
    return algorithm.__dict__["_constants"]


def agreement(algorithm: Algorithm, calibration: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a method's identity and its steps of calibration, which two machines must have in
    common; they compare its digest.
    """
    return {**identity(algorithm), "calibration": described(calibration)}


class Answer(NamedTuple):
    """Answers of clients to a survey of a method's predictor.

    Args:
        name: The survey's name.
        state: The survey's last state.
        reading: How the method predicted then, see `reading`; under another one it says nothing.
    """

    name: str
    state: Tensors
    reading: str


def reading(algorithm: Algorithm) -> str:
    """Describe how a method predicts; of functions, such as rules of selection, their names alone
    tell them apart.
    """
    return json.dumps(
        described(
            [
                algorithm.predictor,
                algorithm.parts,
                algorithm.finetune,
                algorithm.draws,
                algorithm.likelihood,
            ]
        )
    )


def refuse_differences(what: str, different: Mapping[str, tuple[Any, Any]], remedy: str) -> None:
    """Raise CheckpointError if something saved differs from what is given, with the first
    differences; `what` begins the message.
    """
    if different:
        raise CheckpointError(f"{what} {in_words(different)}; {remedy}")


def method_differences(
    made_with: Mapping[str, Any], algorithm: Algorithm
) -> dict[str, tuple[Any, Any]]:
    """Return where a method and its network differ from those of a saved identity: of two methods
    their names alone.
    """
    now = identity(algorithm)
    name = now["method"]
    if made_with.get("method") != name:
        return {"method": (made_with.get("method"), name)}
    saved, given = (
        {part: of.get(part) for part in ("revision", "source", "drawing", name)}
        for of in (made_with, now)
    )
    return differences(saved, given, absent="its default") | network_differences(
        made_with, algorithm
    )


def network_differences(
    made_with: Mapping[str, Any], algorithm: Algorithm
) -> dict[str, tuple[Any, Any]]:
    """Return where a method's network differs from that of a saved identity; of layers of two kinds
    nothing else.

    The state's tensors alone would not tell another activation, or another frozen backbone.
    """
    now, known = identity(algorithm), made_with.get("held")
    if isinstance(known, Mapping):  # later versions of torch may hold more
        for part, of in now["held"].items():
            then = known.get(part)
            if isinstance(then, Mapping):
                now["held"][part] = {key: one for key, one in of.items() if key in then}
    found: dict[str, tuple[Any, Any]] = {}
    for part in ("layers", "parameters", "held", "code", "constants"):
        found |= differences({part: made_with.get(part, {})}, {part: now[part]})
    # What layers of two kinds hold must differ.
    kinds = {f"held.{path.removeprefix('layers.')}" for path in found if path.startswith("layers.")}
    return {path: both for path, both in found.items() if path.rpartition(".")[0] not in kinds}


def same_method(what: str, made_with: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check by its saved identity that something was made with this method.

    Raises:
        CheckpointError: The two methods, or their networks, differ; `what` begins the message.
    """
    refuse_differences(
        f"{what} was made with another method:",
        method_differences(made_with, algorithm),
        "give the method that made it",
    )


def same_network(what: str, made_with: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check by its saved identity that a state is one of this method's network; the method's
    options are free.

    Raises:
        CheckpointError: The layers, the shapes of the parameters, or the values of frozen
            parameters and buffers differ.
    """
    refuse_differences(
        f"{what} has the state of another network:",
        network_differences(made_with, algorithm),
        "build the method on that network, frozen weights and buffers included",
    )
