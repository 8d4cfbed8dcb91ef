"""Recipes that give clients equal parts of the rows: drawn at random, or in the order of a
feature.
"""

from typing import Unpack

import numpy as np

from bayesfl.base.options import declared
from bayesfl.data import partitions
from bayesfl.data.federated import FederatedData
from bayesfl.data.recipes import shared
from bayesfl.data.sources import Source


def deal_evenly(
    source: Source, clients: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Divide shuffled training and test rows into equal parts, to within one."""
    parts = [
        np.array_split(rng.permutation(rows), clients)
        for rows in (source.train, len(source.x) - source.train)
    ]
    return partitions.concatenated([[part] for part in parts[0]]), partitions.concatenated(
        [[part] for part in parts[1]]
    )


@shared.recipe()
def iid(
    options: shared.Options,
    *,
    clients: shared.Clients = 20,
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Divide shuffled rows into parts whose sizes differ by at most one, without any skew; for
    classification and regression.

    Raises:
        ValueError: There are more clients than training rows.

    Example:
        >>> bf.data.iid("digits", clients=4, validation=0.1)
        FederatedData(digits, 4 clients; train 1294, test 359, validation 144)
    """
    opened = options.open()
    if opened.scale is not None:
        mean, deviation = (round(number, 9) for number in opened.scale)
        options.recipe.update(target_mean=mean, target_scale=deviation)
    return options.federate(opened, *deal_evenly(opened, clients, options.rng))


@declared
def diabetes(
    *,
    clients: shared.Clients = 10,
    seed: shared.Seed = 0,
    validation: shared.Validation = 0.0,
    calibration: shared.Calibration = 0.0,
) -> FederatedData:
    """Divide a regression data set: disease progression of 442 patients from ten features, 354 of
    them for training; part of scikit-learn.

    Features and target are standardised by the training rows; `recipe["target_mean"]` and
    `recipe["target_scale"]` convert targets back to their units.

    Raises:
        ValueError: There are more clients than training rows.

    Example:
        >>> bf.data.diabetes(clients=4)
        FederatedData(diabetes, 4 clients; train 354, test 88)
    """
    return iid(
        "diabetes", clients=clients, seed=seed, validation=validation, calibration=calibration
    )
