"""Recipes with label skew in groups: clients of a group have the same classes, or mostly the same
ones.
"""

import functools
from collections.abc import Sequence
from typing import Unpack

import numpy as np
from torch import Tensor

from bayesfl.data import partitions
from bayesfl.data.federated import FederatedData
from bayesfl.data.recipes import shared
from bayesfl.data.recipes.images import unit_range
from bayesfl.data.sources import Source


@shared.recipe()
def dominant_classes(
    options: shared.Options,
    *,
    clients: shared.Clients = 20,
    train: shared.TrainRows = 50,
    test: shared.TestRows = 30,
    uniform: shared.Share = 0.2,
    groups: Sequence[Sequence[int]] | None = None,
    **_: Unpack[shared.Read],
) -> FederatedData:
    """Divide a data set among groups of clients; most of a client's examples are of the few classes
    that dominate in its group.

    A share `uniform` of a client's examples is of all classes alike, the rest of the dominant
    classes of its group.

    Client j is in group j mod G. Unless `groups` are given, group g has the classes 2g, 2g + 1 and
    2g + 2, modulo the number of classes, so that neighbours have one class in common if the number
    of classes is even and at least six: with ten {0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9,
    0}, as in the paper.

    Each class's rows, of the training and of the test part, form a shuffled queue. Clients take
    rows from it one after another, and it starts again at its end. So clients may share examples,
    but none has one twice: `recipe["shared"]` has the numbers of training and test rows that belong
    to several clients. If training rows do, a validation or calibration part raises an error, since
    other clients would train on it.

    Sizes of the paper, as `train` and `test`, with 20 or 100 clients: CIFAR-10 and CINIC-10 600 and
    300, Fashion-MNIST 600 and 600; EMNIST 1,000 and 600 with digits, capitals and small letters as
    three groups. The authors' code takes rows in their order and, on CIFAR-10, starts at the
    2,000th.

    Args:
        uniform: Share of these rows that is of all classes alike, within [0, 1]; numbers are
            rounded so that they add up.
        groups: Dominant classes of each group; a class may be in several. None for the groups
            above.

    Raises:
        ValueError: There are more clients than training rows, a client would get more rows of a
            class than there are, or clients would share training rows beside a validation or
            calibration part.

    References:
        Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier
        collaboration", ICLR 2023, arXiv:2306.11867, experiments; the groups and the queues from the
        authors' code, github.com/JianXu95/FedPAC.

    Example:
        >>> clients = bf.data.dominant_classes("digits", clients=5)
        >>> torch.bincount(clients.train.client(0)[1], minlength=10).tolist()
        [15, 14, 14, 1, 1, 1, 1, 1, 1, 1]
    """
    opened, y_train, y_test = options.by_class()
    count = opened.outputs
    if groups is None:
        groups = [[(2 * g + k) % count for k in range(3)] for g in range(-(-count // 2))]
    held = [sorted({int(k) for k in group}) for group in groups]
    shares = np.full((len(held), count), uniform / count)
    for row, group in zip(shares, held, strict=True):
        row[group] += (1 - uniform) / len(group)
    rng, rows = options.rng, []
    for labels, size in ((y_train, train), (y_test, test)):
        wanted = np.array([partitions.largest_remainder(size, row) for row in shares])
        rows.append(partitions.deal_around(labels, wanted[np.arange(clients) % len(held)], rng))
    twice = [
        int((np.unique(np.concatenate(part), return_counts=True)[1] > 1).sum()) for part in rows
    ]
    if twice[0] and (options.validation or options.calibration):
        raise ValueError(
            f"{twice[0]} training examples belong to several clients, so that one's validation or "
            "calibration part would be trained on by another: take a smaller `train`, fewer "
            "clients, or neither part"
        )
    options.recipe.update(groups=held, shared=twice)
    return options.federate(opened, rows[0], rows[1])


@shared.recipe()
def label_groups(
    options: shared.Options,
    *,
    clients: shared.Clients = 10,
    labels: shared.Labels = 5,
    train: shared.TrainRows = 14,
    test: shared.TestRows = 20,
    centred: bool = True,
    **_: Unpack[shared.Read],
) -> FederatedData:
    """Give every client consecutive classes, with equally many examples of each, from the pooled
    training and test data.

    Client u has the classes (labels * u + k) mod O for k < labels, where O is the number of
    classes. With 5 of 10 classes, as in the paper, that makes two groups only: classes 0 to 4 for
    the even clients, 5 to 9 for the odd ones. The paper specifies only that clients have 5 of 10
    labels; the groups come from the authors' code.

    The data's own division is not kept: training and test part are pooled, and every client gets
    `train` and `test` examples of each of its classes from the pool, without replacement, so that
    no example belongs to two clients or to both splits. Results are therefore not comparable to
    those on the official test part; `recipe["pooled"]` is True. The authors' code takes examples in
    their order and reaches the numbers per class on average; here they are drawn at random and
    exact.

    Sizes of the paper, as `train` and `test`: MNIST and Fashion-MNIST with 10 clients, small 50 and
    950, large 900 and 300; CIFAR-10 with 20 clients, small 25 and 475, large 450 and 150, which
    takes every image there is.

    Inputs are `centred` as the authors do it, by mean 0.5 and standard deviation 0.5 of pixels
    within [0, 1]. It matters to methods that compute curvature: at [0, 1] a pixel that is always
    black is always 0, so that the weights on it have no curvature at all.

    Args:
        source: Name of a data set, or a source of your own, whose inputs must lie within [0, 1] to
            be centred.
        train: Number of training rows of each class and client, before validation and calibration.
        test: Number of test rows of each class and client.
        centred: Whether to map inputs from [0, 1] to [-1, 1]. Otherwise they stay as `load` gives
            them: images standardised by their usual mean and deviation, digits within [0, 1].

    Raises:
        ValueError: `labels` exceeds the number of classes, a class has too few rows, or inputs to
            be centred lie outside [0, 1].

    References:
        Chen, Liu, Wu, Fan, Cao, "FedSI: federated subnetwork inference for efficient uncertainty
        quantification", 2024, arXiv:2404.15657, experiments; the groups, the pooling and the
        centring from the authors' code, github.com/hyLiu1994/BPFedMePD.

    Example:
        >>> clients = bf.data.label_groups("digits", clients=2, labels=5)
        >>> clients.train.client(0)[1].unique().tolist()
        [0, 1, 2, 3, 4]
    """
    opened, *y = options.by_class()
    held = (labels * np.arange(clients)[:, None] + np.arange(labels)) % opened.outputs
    counts = np.zeros((opened.outputs, clients, 2), dtype=np.int64)
    counts[held, np.arange(clients)[:, None]] = train, test
    most, have = counts.sum((1, 2)), np.bincount(np.concatenate(y), minlength=opened.outputs)
    if (most > have).any():
        k = int((most - have).argmax())
        raise ValueError(
            f"class {k} has {have[k]} rows, and its clients need {most[k]}; take fewer clients or "
            "fewer rows"
        )
    rows = partitions.deal_counts(
        np.concatenate(y), counts.reshape(opened.outputs, -1), options.rng
    )
    options.recipe["pooled"] = True
    return options.federate(
        opened,
        rows[::2],
        rows[1::2],
        pooled=True,
        x=_centred(opened, opened.x._version) if centred else None,
    )


@functools.lru_cache(maxsize=1)
def _centred(source: Source, version: int) -> Tensor:
    """Map inputs from [0, 1] to [-1, 1], after undoing the usual standardisation of known images;
    the last copy is shared by data made of one `version` of the source's tensor.

    Raises:
        ValueError: The inputs lie outside [0, 1].
    """
    x = unit_range(source, "centred maps inputs from [0, 1] to [-1, 1]", "or pass centred=False")
    return x.mul_(2).sub_(1)
