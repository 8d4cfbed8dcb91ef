"""Identity of a method, a network and data, as JSON, and the error that lists differences between
two identities.

The identity of a library method is its name, revision and options; that of a method composed by
hand, or changed by `dataclasses.replace`, describes its fields, see `bayesfl.base.described`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bayesfl.base.archive import CheckpointError
from bayesfl.base.described import described, differences, in_words, network
from bayesfl.base.processes.ranks import current
from bayesfl.base.protocols import Tensors
from bayesfl.composition.algorithm import Algorithm
from bayesfl.models.copies import refuse_changed
from bayesfl.models.modes import norms, rate


def identity(algorithm: Algorithm) -> dict[str, Any]:
    """Describe an algorithm; the descriptions of two algorithms are equal if their saved states are
    interchangeable.

    The description is JSON and identical in every process. In addition to the method it contains
    the network, see `bayesfl.base.described.network`, its layers with random draws, the shapes of
    the parameters, and the values of parameters and buffers that no block covers.
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
    """Describe the parameters that no block covers, and the buffers; cached for each algorithm,
    because a frozen backbone may be large.
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
    """Return a method's identity and its steps of calibration, which must be the same on two
    machines; they compare its digest.
    """
    return {**identity(algorithm), "calibration": described(calibration)}


def agree(about: Callable[[], Mapping[str, Any]]) -> None:
    """Check that all ranks of a run compute the same.

    Args:
        about: Function that returns descriptions of what must be the same, by their names.

    Raises:
        ValueError: A description differs.
    """
    if not current().compares:
        return
    first, *others = current().every(lambda: json.loads(json.dumps(about(), default=str)))
    if apart := [name for name in first if any(differences(first[name], r[name]) for r in others)]:
        raise ValueError(
            f"these differ between ranks: {', '.join(apart)}; each must make the same call with "
            "the same arguments; seed whatever draws them"
        )


class Answer(NamedTuple):
    """Hold the clients' answers to a survey of a method's predictor.

    Args:
        name: The survey's name.
        state: The survey's last state.
        reading: Description of how the method predicted then, see `reading`; the answers are valid
            only if it is unchanged.
    """

    name: str
    state: Tensors
    reading: str


def reading(algorithm: Algorithm) -> str:
    """Describe how a method predicts; functions, such as rules of selection, are described by name
    only.
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
    """Raise CheckpointError with the first differences if a saved description differs from the
    present one; `what` begins the message.
    """
    if different:
        raise CheckpointError(f"{what} {in_words(different)}; {remedy}")


def method_differences(
    made_with: Mapping[str, Any], algorithm: Algorithm
) -> dict[str, tuple[Any, Any]]:
    """Return the differences between a method with its network and a saved identity; for two
    different methods only their names.
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
    """Return the differences between a method's network and a saved identity; for layers of
    different types only the types.

    The shapes of the state would not reveal another activation, or another frozen backbone.
    """
    now, known = identity(algorithm), made_with.get("held")
    if isinstance(known, Mapping):  # later versions of torch may have more entries
        for part, of in now["held"].items():
            then = known.get(part)
            if isinstance(then, Mapping):
                now["held"][part] = {key: one for key, one in of.items() if key in then}
    parts = ("layers", "parameters", "held", "code", "constants")
    found = differences(
        {part: made_with.get(part, {}) for part in parts}, {part: now[part] for part in parts}
    )
    # The values of layers of different types differ in any case.
    kinds = {f"held.{path.removeprefix('layers.')}" for path in found if path.startswith("layers.")}
    return {path: both for path, both in found.items() if path.rpartition(".")[0] not in kinds}


def same_method(what: str, made_with: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check with a saved identity that an object was made with this method.

    Raises:
        CheckpointError: The two methods, or their networks, differ; `what` begins the message.
    """
    refuse_differences(
        f"{what} was made with another method:",
        method_differences(made_with, algorithm),
        "pass the method that made it",
    )


def same_network(what: str, made_with: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Check with a saved identity that a state belongs to this method's network; the method's
    options may differ.

    Raises:
        CheckpointError: The layers, the shapes of the parameters, or the values of frozen
            parameters and buffers differ.
    """
    refuse_differences(
        f"{what} has the state of another network:",
        network_differences(made_with, algorithm),
        "build the method on that network, including its frozen weights and buffers",
    )
