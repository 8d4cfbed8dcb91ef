"""Recipes with label skew: clients have different classes, or the same classes in different
proportions.
"""

from typing import Literal, Unpack

import numpy as np

from bayesfl.base.options import Count, Positive
from bayesfl.data import partitions
from bayesfl.data.federated import FederatedData
from bayesfl.data.recipes import shared


@shared.recipe()
def labels_per_client(
    options: shared.Options,
    *,
    clients: shared.Clients = 20,
    labels: shared.Labels = 2,
    sizes: Literal["equal", "random"] = "equal",
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Divide a data set so that every client has a few classes only.

    Classes are assigned as evenly as possible, and each class's training rows are divided among the
    clients that have it. A client is tested on all test rows of its classes, whatever its share of
    the training rows; so clients with a class in common share its test rows.

    Args:
        sizes: Whether a class is divided into `equal` parts, or at `random` places.

    Raises:
        ValueError: `labels` exceeds the number of classes, or there are more clients than rows.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
        AISTATS 2017, section 3, for two classes per client.

    Example:
        >>> clients = bf.data.labels_per_client("digits", clients=4, labels=2)
        >>> clients.train.client(0)[1].unique().tolist()
        [2, 3]
    """
    opened, y_train, y_test = options.by_class()
    rng = options.rng
    held = partitions.spread_labels(opened.outputs, clients, labels, rng)
    train = partitions.deal_labels(y_train, held, opened.outputs, sizes == "equal", rng)
    by_class = partitions.rows_by_class(y_test, opened.outputs)
    return options.federate(
        opened,
        train,
        partitions.concatenated([[by_class[k] for k in mine] for mine in held]),
    )


@shared.recipe()
def shards(
    options: shared.Options,
    *,
    clients: shared.Clients = 100,
    shards: Count = 2,
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Sort the training rows by label, cut them into shards of one size, and give every client a
    few: the pathological partition.

    Every training row belongs to one client, and clients have equally many (to within a row for
    each shard). A client has about as many classes as shards: a shard where one class ends and the
    next begins has two, and two shards may be of one class. Its share of a class's test rows is its
    share of that class's training rows, rounded; a client that would get none receives one that
    another client has too. FedEM's code pools training and test rows and divides each client's 80 :
    20; here the data's own division is kept.

    Args:
        shards: Number of shards of each client.

    Raises:
        ValueError: There are more shards than training rows.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
        AISTATS 2017, section 3.

    Example:
        >>> clients = bf.data.shards("digits", clients=4, shards=2)
        >>> clients.counts["train"].tolist()
        [360, 358, 360, 360]
    """
    opened, y_train, y_test = options.by_class()
    rng = options.rng
    train = partitions.shards(y_train, clients, shards, rng)
    counts = np.stack(
        [np.bincount(y_train[rows], minlength=opened.outputs) for rows in train], axis=1
    )
    return options.federate(opened, train, partitions.follow_counts(y_test, counts, rng))


@shared.recipe()
def dirichlet(
    options: shared.Options,
    *,
    clients: shared.Clients = 20,
    alpha: Positive = 0.5,
    min_size: Count = 10,
    **_: Unpack[shared.Cut],
) -> FederatedData:
    """Divide each class among all clients in proportions drawn from a symmetric Dirichlet, which
    skews labels and sizes.

    If a client has fewer than `min_size` rows, all proportions are drawn again, up to 100 draws in
    all; then small clients are topped up from the largest, so that the call ends for any alpha
    (`recipe["moved"]` is the number of rows that were moved). A client's share of a class's test
    rows is its share of that class's training rows, rounded; a client that would get none receives
    one that another client has too.

    Args:
        alpha: Concentration, > 0: the smaller, the more skewed.
        min_size: Smallest number of training rows of a client, before validation and calibration.

    Raises:
        ValueError: There are fewer rows than clients need.

    References:
        Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019,
        section 4.

    Example:
        >>> bf.data.dirichlet("digits", clients=4, alpha=0.1).counts["train"].tolist()
        [209, 243, 435, 551]
    """
    opened, y_train, y_test = options.by_class()
    shared.check_clients(clients, len(y_train) // min_size, f"sets of {min_size} training examples")
    rng = options.rng
    sizes = np.bincount(y_train, minlength=opened.outputs)
    counts, options.recipe["moved"] = partitions.dirichlet_counts(
        sizes, clients, alpha, min_size, rng
    )
    return options.federate(
        opened,
        partitions.deal_counts(y_train, counts, rng),
        partitions.follow_counts(y_test, counts, rng),
    )


@shared.recipe("cifar100")
def pachinko(
    options: shared.Options,
    *,
    clients: shared.Clients = 100,
    size: shared.TrainRows | None = None,
    alpha: Positive = 0.4,
    beta: Positive = 10.0,
    superclasses: shared.Superclasses = None,
    **_: Unpack[shared.Read],
) -> FederatedData:
    """Divide a data set along a tree of superclasses and classes: a client has few superclasses,
    and most classes of these.

    Pachinko allocation: every client draws weights of the superclasses from a symmetric Dirichlet
    of `alpha`, and weights of the classes in each from one of `beta`. For every training row it
    draws a superclass and then a class by these weights, without replacement; classes without rows
    left are no longer drawn. All clients have equally many rows. Test rows are divided as in
    `shards`. FedEM's code pools the 60,000 images, 600 for a client, and divides each client's 80 :
    20; here the data's own division is kept, 500 training and about 100 test images.

    Args:
        source: Name of a data set, or a source of your own. In data without superclasses,
            superclass k is classes 2k and 2k + 1.
        size: Number of training rows of each client, before validation and calibration; None
            divides all rows equally, but for a remainder.
        alpha: Concentration over superclasses, > 0.
        beta: Concentration over the classes of one superclass, > 0.

    Raises:
        ValueError: There are fewer rows than clients need, or the superclasses are not groups
            of one size of different classes.

    References:
        Reddi et al., "Adaptive federated optimization", ICLR 2021, appendix on CIFAR-100 (after Li
        and McCallum, "Pachinko allocation", ICML 2006); the values of Marfoq et al., "Federated
        multi-task learning under a mixture of distributions", NeurIPS 2021.

    Example:
        >>> clients = bf.data.pachinko("digits", clients=4, size=100)
        >>> clients.counts["train"].tolist()
        [100, 100, 100, 100]
    """
    opened, y_train, y_test = options.by_class()
    groups = shared.superclass_groups(opened, superclasses)
    sizes = np.bincount(y_train, minlength=opened.outputs)
    rows = int(sizes[[k for group in groups for k in group]].sum())
    size = max(1, rows // clients) if size is None else size
    shared.check_clients(clients, rows // size, f"sets of {size} training examples")
    rng = options.rng
    options.recipe.update(size=size, superclasses=groups)
    counts = partitions.pachinko_counts(sizes, groups, clients, size, alpha, beta, rng)
    return options.federate(
        opened,
        partitions.deal_counts(y_train, counts, rng),
        partitions.follow_counts(y_test, counts, rng),
    )
