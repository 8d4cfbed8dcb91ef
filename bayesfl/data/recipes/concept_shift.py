"""Recipes with concept shift: the same label has different meanings in different groups of
clients.
"""

import math
from typing import Unpack

import numpy as np
import torch

from bayesfl.base.options import Count
from bayesfl.data import partitions
from bayesfl.data.federated import FederatedData
from bayesfl.data.recipes import shared
from bayesfl.data.recipes.even import deal_evenly


@shared.recipe()
def concept_drift(
    options: shared.Options,
    *,
    clients: shared.Clients = 20,
    superclasses: shared.Superclasses = None,
    min_piece: Count = 1,
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Divide a data set so that labels have different meanings: each client has one subclass of
    every superclass.

    Labels are superclasses ("vehicle" is a bus to one client and a train to another). Clients come
    in groups as large as a superclass: within a group every subclass goes to one client, and each
    class is cut at the same random places into one piece per group, so that clients of a group have
    equally many rows and groups do not. A client has on average the number of training rows divided
    by that of clients. It is tested on all test rows of its subclasses.

    With `cifar100` (20 superclasses of 5) this is the partition of the paper, from the authors'
    code. Other data without superclasses of their own pair classes: superclass k is classes 2k and
    2k + 1.

    Args:
        clients: Number of clients, a multiple of the size of a superclass.
        min_piece: Smallest number of training rows of a class in a piece.

    Raises:
        ValueError: `clients` is no such multiple or too large, or `superclasses` are not groups of
            one size of different classes.

    References:
        Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via
        hierarchical Bayesian modeling", FL-NeurIPS 2022, experiments; details from the authors'
        code, github.com/JunyiZhu-AI/confidence_aware_PFL.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> clients.classes  # pairs of digits
        5
    """
    opened, y_train, y_test = options.by_class()
    groups = shared.superclass_groups(opened, superclasses)
    size = len(groups[0])
    fewest = int(np.bincount(y_train, minlength=opened.outputs)[np.concatenate(groups)].min())
    most = fewest // min_piece * size
    if clients % size or clients > most:
        raise ValueError(
            f"clients must be a multiple of {size}, the number of classes in a superclass, and at "
            f"most {most}, because the smallest class has {fewest} training examples and each "
            f"group of {size} clients takes at least {min_piece}; got {clients}"
        )
    options.recipe["superclasses"] = groups
    train, held = partitions.drift(y_train, groups, clients, min_piece, options.rng)
    by_class = partitions.rows_by_class(y_test, opened.outputs)
    test = partitions.concatenated([[by_class[k] for k in mine] for mine in held])
    mapped = torch.full((opened.outputs,), -1)
    for k, group in enumerate(groups):
        mapped[group] = k
    names = opened.superclass_names if superclasses is None else None
    if names is None:
        known = opened.class_names or tuple(map(str, range(opened.outputs)))
        names = tuple("/".join(known[k] for k in group) for group in groups)
    return options.federate(
        opened,
        train,
        test,
        y=mapped[opened.y],
        outputs=len(groups),
        class_names=names,
    )


@shared.recipe()
def swapped_labels(
    options: shared.Options,
    *,
    clients: shared.Clients = 20,
    groups: Count = 4,
    swaps: Count = 2,
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Divide a data set evenly among groups of clients that exchange the labels of some classes, in
    training and test data alike.

    Rows are divided as by `iid`, without skew of the inputs. Client j is in group j mod G. The
    first group keeps all labels; in each other one, `swaps` disjoint pairs of classes, drawn for
    the group, exchange theirs, no two groups alike. `recipe["names"]` [G, O] holds, for each group,
    the label of every one of the O classes.

    Args:
        groups: Number of groups G.
        swaps: Number of pairs that exchange labels.

    Raises:
        ValueError: There are more clients than rows, or too many groups for all to differ.

    Example:
        >>> clients = bf.data.swapped_labels("digits", clients=4, groups=2, swaps=1)
        >>> clients.recipe["names"][1]
        [0, 3, 2, 1, 4, 5, 6, 7, 8, 9]
    """
    opened = options.by_class()[0]
    count = opened.outputs
    ways = math.comb(count, 2 * swaps) * math.prod(range(1, 2 * swaps, 2))
    if groups - 1 > ways:
        raise ValueError(
            f"{swaps} pairs of {count} classes can change names in {ways} ways: use at most "
            f"{ways + 1} groups, got {groups}"
        )
    rng = options.rng
    train, test = deal_evenly(opened, clients, rng)
    options.recipe["names"] = names = [list(range(count))]
    while len(names) < groups:
        new, chosen = list(range(count)), rng.permutation(count)[: 2 * swaps].tolist()
        for a, b in zip(chosen[::2], chosen[1::2], strict=True):
            new[a], new[b] = b, a
        if new not in names:
            names.append(new)
    y, called = opened.y.clone(), torch.tensor(names)
    for j in range(clients):
        for rows in (train[j], test[j] + opened.train):
            y[rows] = called[j % groups][opened.y[rows]]
    return options.federate(opened, train, test, y=y)
