"""List of all data that leave a client of a deployment, computed by the code that sends them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import Survey, conduct
from bayesfl.base.targets import Task
from bayesfl.composition.algorithm import Algorithm
from bayesfl.evaluation.calibration import Step
from bayesfl.evaluation.surveys import Outputs
from bayesfl.federation.clients.after import next_question
from bayesfl.flower import records

HELLO = {
    "protocol": "version of the messages",
    "client": "the client's number",
    "name": "the client's name in its data",
    "n": "number of training examples",
    "task": "classification or regression",
    "outputs": "number of classes or targets",
    "splits": "names of the splits in which it has rows",
    "transform": "digest of the function of inputs, keyed by the nodes' shared secret",
    "augment": "the same of the function of inputs in training",
    "columns": "the same of the encoding of a frame's columns",
}
"""Contents of a client's first message, sent once."""


@dataclass(frozen=True)
class Sent:
    """Describe a piece of data that a client sends.

    Args:
        when: The occasion.
        name: Its name in the message.
        size: Number of values; 1 for one number or text.
        what: Its meaning.
    """

    when: str
    name: str
    size: int
    what: str


def leaves(
    algorithm: Algorithm, *, calibration: Sequence[Step] = (), outputs: int = 10
) -> list[Sent]:
    """List all data that a client sends in a deployment, in the order of sending.

    The list does not include the text of an error in the client's code, which can quote the data.

    Args:
        algorithm: The method.
        calibration: The steps of calibration that are fitted after training.
        outputs: Number of classes or of targets.

    Example:
        >>> method = bf.algorithms.pfedvem(bf.models.mlp(4, hidden=3, outputs=2))
        >>> sent = bf.flower.leaves(method, outputs=2)
        >>> [one.name for one in sent if one.when == "each round of its cohort"]
        ['body.loc', 'head.loc', 'rho2', 'train_nll']
    """
    found = [Sent("once, at the start", name, 1, what) for name, what in HELLO.items()]
    when = "each round of its cohort"
    for name, (shape, _) in algorithm.uplink(algorithm.init(1)).items():
        of = name.split(".")[0]
        what = f"block {of!r}" if of in algorithm.blocks else "what the method reports"
        found.append(Sent(when, name, math.prod(shape), what))
    found.append(Sent(when, "train_nll", 1, "mean training loss, in nats"))
    about = Outputs(cast(Task, algorithm.likelihood.task), outputs)
    server, known = algorithm.init(1), {}
    while (question := next_question(algorithm, server, known)) is not None:
        name, survey = question
        known[name], sizes = _pretended(survey, about)
        sums = f"sums over {survey.split} rows: {getattr(survey, 'sums', name)}"
        found += [Sent("each evaluation", key, size, sums) for key, size in sizes.items()]
    found += [
        Sent(
            "each evaluation",
            name,
            1,
            "measures on the client's test and validation rows, one number each",
        )
        for name in (*records.MEASURES, "your own")
    ]
    for step in calibration:
        when = f"after training, {type(step).__name__}"
        sums = f"sums over the client's rows in {step.split!r}"
        found += [Sent(when, name, n, sums) for name, n in _pretended(step, about)[1].items()]
    return found


def _pretended(survey: Survey[Any], about: Outputs) -> tuple[Tensors, dict[str, int]]:
    """Return the last state of a survey if every answer is 1 and no candidate fails, and the sizes
    of the answers.
    """
    sizes: dict[str, int] = {}

    def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        sizes.update({name: math.prod(shape) for name, shape in shapes.items()})
        answers = {name: torch.ones(shape).double() for name, shape in shapes.items()}
        return answers | {name: 0 * t for name, t in answers.items() if name == "n_broken"}

    return conduct(survey, ask, about), sizes
