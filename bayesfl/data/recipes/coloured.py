"""Coloured images: the colour agrees with the label to a different degree in every environment, the
shape to the same degree in all.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from bayesfl.base.options import Count, Option, declared
from bayesfl.base.random import Purpose, generator
from bayesfl.data.federated import FederatedData
from bayesfl.data.recipes import shared
from bayesfl.data.recipes.images import unit_range
from bayesfl.data.sources import Source
from bayesfl.data.split import ClientData

_share = Option.of(shared.Share)
_FLIP, _COLOUR = 1, 2  # `phase` under Purpose.PARTITION; 0 is the order of the rows


def _coloured(grey: Tensor, y: Tensor, drawn: Tensor, agreement: Tensor | float) -> Tensor:
    """Paint images into two channels [N, 2, H, W], one of them black: the colour is the label's
    with probability `agreement`.
    """
    colour = torch.where(drawn < agreement, y, 1 - y)
    x = grey.new_zeros(len(grey), 2, *grey.shape[1:])
    x[torch.arange(len(grey)), colour] = grey
    return x


@shared.recipe()
def coloured(
    options: shared.Options,
    *,
    agreement: Sequence[float | Sequence[float]] = (0.9, 0.85, 0.8, 0.75),
    test_agreement: shared.Share = 0.1,
    rotate: bool = True,
    flip: shared.Share = 0.25,
    test: Count | None = None,
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Paint images in two colours: in training, colour predicts the label better than shape does;
    in the test, colour misleads.

    The label is whether the class is among the first half, flipped with probability `flip`: no
    shape can be right more often than 1 - `flip`. The colour agrees with that noisy label with a
    probability of its own in each client's training data, and with `test_agreement` in every
    client's test data; `recoloured` gives the same test images other colours. Client i's images, of
    both parts, are rotated by i quarter turns counter-clockwise. Inputs are [2, H, W] within [0,
    1]; of images of 28 x 28 every second pixel is kept.

    * `coloured("fashion-mnist", test=10_000)`: RC-FMNIST, four clients, as the authors' generator
    makes it.
    * `coloured("mnist", agreement=(0.95, 0.9, 0.85, 0.8), test_agreement=0.5, test=10_000)`:
    RC-MNIST, by the values in its folder's name.
    * `rotate=False`: the same without the rotation, from which a network could recognise clients.
    * `coloured("mnist", agreement=((0.8, 0.9),), rotate=False, test=10_000)`: IRM's coloured MNIST,
    on one machine.

    Args:
        source: Name of a data set of grey images, or a source of your own with inputs [1, H, W] (or
            H H numbers) within [0, 1].
        agreement: For each client the probability that colour agrees with label in training, or
            several, one for each of its environments.
        test_agreement: The same probability in the test data.
        rotate: Whether each client's images are rotated.
        flip: Probability of a flipped label, in [0, 1].
        test: Number of rows, the last of the source's training part, that are the test data, as
            IRM's code has it with 10,000 of MNIST; None for the source's own test part.

    Raises:
        ValueError: An agreement lies outside [0, 1], or the data are no grey images with classes.

    References:
        Arjovsky, Bottou, Gulrajani, Lopez-Paz, "Invariant risk minimization", 2019,
        arXiv:1907.02893, section 5.2, and its code. Turned, for clients: Tang, Guo, Zhang,
        "Exploiting personalized invariance for better out-of-distribution generalization in
        federated learning", 2022, arXiv:2211.11243; shares and order of the draws from its code,
        github.com/Tangx-yy/Per-InvFL.

    Example:
        >>> bf.data.coloured("digits", agreement=(0.9, 0.8))
        FederatedData(digits, 2 clients; train 1438, test 359)
    """
    opened = options.by_class()[0]
    nested = [[_share("agreement", one) for one in np.ravel(own).tolist()] for own in agreement]
    options.recipe["agreement"] = nested
    parts = [
        (client, environment)
        for client, own in enumerate(nested)
        for environment in range(len(own))
    ]
    rows = len(opened.x) if test is None else opened.train
    train = opened.train if test is None else opened.train - test
    grey = _grey(opened)[:rows]
    first = (opened.y[:rows] < opened.outputs // 2).long()
    flipped, drawn = (
        torch.from_numpy(generator(options.seed, Purpose.PARTITION, phase=word).random(rows))
        for word in (_FLIP, _COLOUR)
    )
    y = torch.where(flipped < flip, 1 - first, first)
    order = options.rng.permutation(train)

    owner, environment = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    agrees = torch.full((rows,), test_agreement, dtype=torch.float64)
    trained: list[list[np.ndarray]] = [[] for _ in nested]
    for k, (client, e) in enumerate(parts):
        mine = order[k :: len(parts)]
        trained[client].append(mine)
        owner[mine], environment[mine], agrees[mine] = client, e, nested[client][e]
    held = [np.arange(train + client, rows, len(nested)) for client in range(len(nested))]
    owner[train:] = torch.arange(rows - train) % len(nested)  # as `held` deals the test rows
    x = _coloured(grey, y, drawn, agrees)
    if rotate:
        for client in range(len(nested)):
            x[owner == client] = x[owner == client].rot90(client, (-2, -1))
    return options.federate(
        opened,
        [np.concatenate(own) for own in trained],
        held,
        pooled=True,
        x=x,
        y=y,
        outputs=2,
        class_names=("last half", "first half"),
        environment=environment,
    )


@declared
def recoloured(clients: FederatedData, agreement: shared.Share) -> ClientData:
    """Colour the test images of `coloured` data anew, so that colour and label agree with another
    probability; all else stays the same.

    `result.predict(split).summary(split)` measures one trained model on it.

    Args:
        clients: Data made by `coloured`.
        agreement: The probability that colour agrees with label.

    Example:
        >>> clients = bf.data.coloured("digits", agreement=(0.9, 0.8))
        >>> bf.data.recoloured(clients, agreement=0.5).clients
        2
    """
    split: Any = clients.test
    rows = split.index
    drawn = torch.from_numpy(
        generator(clients.recipe["seed"], Purpose.PARTITION, phase=_COLOUR).random(len(split.x))
    )[rows.cpu()]
    x = split.x.clone()
    x[rows] = _coloured(split.x[rows].sum(1), split.y[rows], drawn.to(rows.device), agreement)
    return replace(split, x=x, index=rows)


def _grey(source: Source) -> Tensor:
    """Return a source's images as [N, H, W] within [0, 1]; of images of 28 x 28, every second
    pixel.
    """
    shape = tuple(source.x.shape[1:])
    side = math.isqrt(shape[0])
    shape = (1, side, side) if len(shape) == 1 and side * side == shape[0] else shape
    if len(shape) != 3 or shape[0] != 1:
        raise ValueError(
            "coloured needs grey images, inputs of shape [1, H, W] or of H H numbers, "
            f"{source.info.name!r} has {list(shape)}"
        )
    x = unit_range(source, "coloured needs inputs within [0, 1]").view(-1, *shape[1:])
    return x[:, ::2, ::2] if shape[1:] == (28, 28) else x
