"""What leaves a client of a deployment, listed by the code that sends it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from bayesfl.base.protocols import Tensors
from bayesfl.base.surveys import conduct
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
    "columns": "the same of what makes inputs of a frame's columns",
}
"""What a client says once, when it is asked who it is."""


@dataclass(frozen=True)
class Sent:
    """Something that a client sends.

    Args:
        when: On which occasion.
        name: Its name in the message.
        size: How many numbers it is; 1 for one number or text.
        what: What it is.
    """

    when: str
    name: str
    size: int
    what: str


def leaves(
    algorithm: Algorithm, *, calibration: Sequence[Step] = (), outputs: int = 10
) -> list[Sent]:
    """Return everything that a client sends in a deployment, in the order in which it is sent.

    Not among it is the text of an error in the client's code, which can quote the data.

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
    server, known = algorithm.init(1), {}
    while (question := next_question(algorithm, server, known)) is not None:
        name, survey = question
        known[name] = survey.start(Outputs(cast(Task, algorithm.likelihood.task), outputs))
        sums = f"sums over {survey.split} rows: {getattr(survey, 'sums', name)}"
        for key, shape in survey.shapes(known[name]).items():
            found.append(Sent("each evaluation", key, math.prod(shape), sums))
    measures = "measures on the client's test and validation rows, one number each"
    found += [
        Sent("each evaluation", name, 1, measures) for name in (*records.MEASURES, "your own")
    ]
    for step in calibration:
        for name, size in _asked(step, Outputs(cast(Task, algorithm.likelihood.task), outputs)):
            when = f"after training, {type(step).__name__}"
            found.append(Sent(when, name, size, f"sums over the client's rows in {step.split!r}"))
    return found


def _asked(step: Step, outputs: Outputs) -> list[tuple[str, int]]:
    """Return the names and sizes of the answers that a step's questions ask for."""
    sizes: dict[str, int] = {}

    def ask(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        sizes.update({name: math.prod(shape) for name, shape in shapes.items()})
        return {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()}

    conduct(step, ask, outputs)
    return list(sizes.items())
