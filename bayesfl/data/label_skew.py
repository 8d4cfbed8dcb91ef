"""Recipes with label skew: clients have other classes, or others of them more often."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from weakref import ref

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfl.base.checks import number, whole
from bayesfl.base.random import Purpose, generator
from bayesfl.data import partitions
from bayesfl.data.assembly import assemble
from bayesfl.data.federated import FederatedData
from bayesfl.data.images import unit_range
from bayesfl.data.recipes import check_clients, classes, federate, open_source, superclass_groups
from bayesfl.data.sources import Source

_centred_inputs = WeakTensorKeyDictionary()


def labels_per_client(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    labels: int = 2,
    sizes: Literal["equal", "random"] = "equal",
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """Label skew: every client has a few classes only.

    Classes are given out as evenly as can be, and each class's training rows are dealt to the clients that have it. A client is
    tested on all test rows of its classes, whatever its share of the training rows; so clients with a class in common share
    its test rows.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        labels: Classes of each client.
        sizes: Deal a class in `equal` parts, or cut it at `random` places.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: Labels that are no whole number, more of them than classes, or more clients than rows.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017, section 3,
        for two classes per client.
    """
    opened = open_source(source, root, download)
    y_train, y_test = classes(opened, "labels_per_client")
    labels = _check_labels(labels, opened)
    if sizes not in ("equal", "random"):
        raise ValueError(f"sizes must be 'equal' or 'random', got {sizes!r}")
    check_clients(clients, len(y_train), "training examples")
    rng = generator(seed, Purpose.PARTITION)
    held = partitions.spread_labels(opened.outputs, clients, labels, rng)
    train = partitions.deal_labels(y_train, held, opened.outputs, sizes == "equal", rng)
    by_class = partitions.rows_by_class(y_test, opened.outputs)
    return federate(
        opened,
        train,
        partitions.join([[by_class[k] for k in mine] for mine in held]),
        recipe={"recipe": "labels_per_client", "source": opened.info.name, "clients": clients, "labels": labels, "sizes": sizes},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def shards(
    source: str | Source = "digits",
    *,
    clients: int = 100,
    shards: int = 2,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """The pathological partition: training rows sorted by label and cut into shards of one size, a few shards for every client.

    Every training row belongs to one client, and clients have equally much (to within a row for each shard). A client has about as many
    classes as shards: a shard where one class ends and the next begins has two, and two shards may be of one class. Its share of a class's
    test rows is its share of that class's training rows, rounded; a client that would get none is lent one of another's. FedEM's code
    pools training and test rows and cuts each client's 80 : 20; here the data's own division is kept.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        shards: Shards of each client.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: Numbers that are not whole, or more shards than training rows.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017, section 3.
    """
    opened = open_source(source, root, download)
    y_train, y_test = classes(opened, "shards")
    shards = whole("shards", shards, least=1)
    check_clients(clients, len(y_train) // shards, f"sets of {shards} training examples")
    rng = generator(seed, Purpose.PARTITION)
    train = partitions.shards(y_train, clients, shards, rng)
    counts = np.stack([np.bincount(y_train[rows], minlength=opened.outputs) for rows in train], axis=1)
    return federate(
        opened,
        train,
        partitions.follow_counts(y_test, counts, rng),
        recipe={"recipe": "shards", "source": opened.info.name, "clients": clients, "shards": shards},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def dirichlet(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    alpha: float = 0.5,
    min_size: int = 10,
    label_clusters: int | None = None,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """Label and size skew: each class is dealt to all clients in proportions drawn from a symmetric Dirichlet.

    Where a client has too little, the proportions are drawn anew, at most 100 times; after that small clients are topped up from
    the largest, so that the call ends for any alpha (`recipe["moved"]` says how many rows that took). A client's share of a
    class's test rows is its share of that class's training rows, rounded; a client that would get none is lent one of another's.

    With `label_clusters` classes are first put into so many groups at random, as large as each other to within one, and a group's rows are
    dealt as those of one class: FedEM's CIFAR-10 is 80 clients, alpha 0.4 and 3 groups. Its code draws the numbers from a multinomial and
    cuts pooled rows 80 : 20; here they are the proportions, rounded, and the data's own division is kept. `recipe["label_clusters"]` has
    the groups.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        alpha: Concentration, > 0: the smaller, the more skewed.
        min_size: Fewest training rows of a client, before validation and calibration.
        label_clusters: Groups of classes that are dealt together; None deals each class by itself.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: Numbers out of range or of another sort, or too few rows for so many clients.

    References:
        Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019, section 4. Groups: Marfoq et al.,
        "Federated multi-task learning under a mixture of distributions", NeurIPS 2021, experiments.
    """
    opened = open_source(source, root, download)
    y_train, y_test = classes(opened, "dirichlet")
    alpha, min_size = _concentration("alpha", alpha), whole("min_size", min_size, least=1)
    check_clients(clients, len(y_train), "training examples")
    if clients * min_size > len(y_train):
        raise ValueError(
            f"{clients} clients of at least {min_size} examples need {clients * min_size}, {opened.info.name!r} has {len(y_train)} "
            "training examples: use fewer clients or a smaller min_size"
        )
    rng = generator(seed, Purpose.PARTITION)
    clusters = None
    if label_clusters is not None:
        if whole("label_clusters", label_clusters, least=1) > opened.outputs:
            raise ValueError(f"label_clusters must lie within [1, {opened.outputs}], the number of classes, got {label_clusters}")
        clusters = [np.sort(group) for group in np.array_split(rng.permutation(opened.outputs), label_clusters)]
        cluster_of = np.empty(opened.outputs, dtype=np.int64)
        for k, group in enumerate(clusters):
            cluster_of[group] = k
        y_train, y_test = cluster_of[y_train], cluster_of[y_test]
    sizes = np.bincount(y_train, minlength=opened.outputs if clusters is None else len(clusters))
    counts, moved = partitions.dirichlet_counts(sizes, clients, alpha, min_size, rng)
    return federate(
        opened,
        partitions.deal_counts(y_train, counts, rng),
        partitions.follow_counts(y_test, counts, rng),
        recipe={
            "recipe": "dirichlet",
            "source": opened.info.name,
            "clients": clients,
            "alpha": alpha,
            "min_size": min_size,
            "moved": moved,
            **({} if clusters is None else {"label_clusters": [group.tolist() for group in clusters]}),
        },
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def pachinko(
    source: str | Source = "cifar100",
    *,
    clients: int = 100,
    size: int | None = None,
    alpha: float = 0.4,
    beta: float = 10.0,
    superclasses: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """Label skew down a tree: a client has few superclasses, and of these most classes; clients have equally much.

    Pachinko allocation: every client draws weights of the superclasses from a symmetric Dirichlet of `alpha` and of the classes in each
    from one of `beta`, and every training row of it a superclass and then a class by these weights, without replacement; what has no rows
    left is drawn no more. Test rows follow as in `shards`. FedEM's code pools the 60,000 images, 600 for a client, and cuts each client's
    80 : 20; here the data's own division is kept, 500 training and about 100 test images.

    Args:
        source: Name of a data set, or a source of your own. Without superclasses of its own, k is classes 2k and 2k + 1.
        clients: Number of clients.
        size: Training rows of each client, before validation and calibration; None shares all of them out, to within a remainder.
        alpha: Concentration over superclasses, > 0.
        beta: Concentration over the classes of one, > 0.
        superclasses: The classes of each superclass, groups of one size.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: Numbers out of range or of another sort, too few rows for so many clients, or superclasses that don't work out.

    References:
        Reddi et al., "Adaptive federated optimization", ICLR 2021, appendix on CIFAR-100 (after Li and McCallum, "Pachinko allocation",
        ICML 2006); the values of Marfoq et al., "Federated multi-task learning under a mixture of distributions", NeurIPS 2021.
    """
    opened = open_source(source, root, download)
    y_train, y_test = classes(opened, "pachinko")
    groups = superclass_groups(opened, superclasses)
    alpha, beta = _concentration("alpha", alpha), _concentration("beta", beta)
    sizes = np.bincount(y_train, minlength=opened.outputs)
    rows = int(sizes[[k for group in groups for k in group]].sum())
    check_clients(clients, rows, "training examples")
    size = rows // clients if size is None else whole("size", size, least=1)
    if clients * size > rows:
        raise ValueError(f"{clients} clients of {size} training examples need {clients * size}, there are {rows}: take fewer, or size=None")
    rng = generator(seed, Purpose.PARTITION)
    counts = partitions.pachinko_counts(sizes, groups, clients, size, alpha, beta, rng)
    return federate(
        opened,
        partitions.deal_counts(y_train, counts, rng),
        partitions.follow_counts(y_test, counts, rng),
        recipe={
            "recipe": "pachinko",
            "source": opened.info.name,
            "clients": clients,
            "size": size,
            "alpha": alpha,
            "beta": beta,
            "superclasses": groups,
        },
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def dominant_classes(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    train: int = 50,
    test: int = 30,
    uniform: float = 0.2,
    groups: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """Label skew in groups that overlap: a share of each client's examples is of all classes alike, the rest of its group's dominant ones.

    Client j is in group j mod G. Unless `groups` are given, group g has the classes 2g, 2g + 1 and 2g + 2, modulo the number of classes, so
    that neighbours have one class in common where the number of classes is even and six or more: with ten {0, 1, 2}, {2, 3, 4}, {4, 5, 6},
    {6, 7, 8}, {8, 9, 0}, as in the paper.

    Each class's rows, of the training and of the test part, are a shuffled queue that clients take from one after another; where it ends
    it starts again. So CLIENTS MAY SHARE EXAMPLES, though none has one twice: `recipe["shared"]` says how many training and test rows
    belong to several. Where training rows do, there is no validation or calibration part, which others would have trained on.

    Sizes of the paper, as `train` and `test`, with 20 or 100 clients: CIFAR-10 and CINIC-10 600 and 300, Fashion-MNIST 600 and 600; EMNIST
    1,000 and 600 with digits, capitals and small letters as three groups. The authors' code takes rows as they come and, on CIFAR-10,
    starts at the 2,000th.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        train: Training rows of each client, before validation and calibration.
        test: Test rows of each client.
        uniform: Share of them that is of all classes alike, within [0, 1]; numbers are rounded to sum up.
        groups: Dominant classes of each group; a class may be in several.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: A number out of range, groups that are none, a client that wants more of a class than there is, or a validation or
            calibration part of rows that clients share.

    References:
        Xu, Tong, Huang, "Personalized federated learning with feature alignment and classifier collaboration", ICLR 2023,
        arXiv:2306.11867, experiments; the groups and the queues from the authors' code, github.com/JianXu95/FedPAC.
    """
    opened = open_source(source, root, download)
    y_train, y_test = classes(opened, "dominant_classes")
    count = opened.outputs
    train, test = whole("train", train, least=1), whole("test", test, least=1)
    check_clients(clients, len(y_train), "training examples")
    if not 0 <= number("uniform", uniform) <= 1:
        raise ValueError(f"uniform is a share of a client's examples and must lie within [0, 1], got {uniform}")
    if groups is None:
        if count < 4:
            raise ValueError(f"{opened.info.name!r} has {count} classes, too few for groups of three: pass groups=, such as [[0], [1]]")
        groups = [[(2 * g + k) % count for k in range(3)] for g in range(-(-count // 2))]
    held = [sorted({int(k) for k in group}) for group in groups]
    if not held or any(not group or group[0] < 0 or group[-1] >= count for group in held):
        raise ValueError(f"groups must each hold classes within [0, {count}), got {groups}")
    shares = np.full((len(held), count), uniform / count)
    for row, group in zip(shares, held, strict=True):
        row[group] += (1 - uniform) / len(group)
    rng = generator(seed, Purpose.PARTITION)
    rows = []
    for labels, size in ((y_train, train), (y_test, test)):
        wanted = np.array([partitions.largest_remainder(size, row) for row in shares])
        rows.append(partitions.deal_around(labels, wanted[np.arange(clients) % len(held)], rng))
    shared = [int((np.unique(np.concatenate(part), return_counts=True)[1] > 1).sum()) for part in rows]
    if shared[0] and (validation or calibration):
        raise ValueError(
            f"{shared[0]} training examples belong to several clients, so that one's validation or calibration part would be trained on "
            "by another: take a smaller `train`, fewer clients, or neither part"
        )
    return federate(
        opened,
        *rows,
        recipe={
            "recipe": "dominant_classes",
            "source": opened.info.name,
            "clients": clients,
            "train": train,
            "test": test,
            "uniform": uniform,
            "groups": held,
            "shared": shared,
        },
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def label_groups(
    source: str | Source = "digits",
    *,
    clients: int = 10,
    labels: int = 5,
    train: int = 14,
    test: int = 20,
    centred: bool = True,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """Label skew in groups: consecutive classes, as many examples of each for every client, training and test data POOLED.

    Client u has the classes (labels * u + k) mod O for k < labels, where O is the number of classes. With 5 of 10 classes, as in
    the paper, that makes two groups only: classes 0 to 4 for the even clients, 5 to 9 for the odd ones. The paper says no more
    than 5 of 10 labels per client; the groups come from the authors' code.

    The data's own division is not kept: training and test part are pooled, and every client gets `train` and `test` examples of
    each of its classes out of the pool, without replacement, so that no example belongs to two clients or to both splits.
    Numbers are therefore not comparable to ones on the official test part; `recipe["pooled"]` says so. The authors' code takes
    examples as they come and meets the numbers per class on average; here they are drawn at random and exact.

    Sizes of the paper, as `train` and `test`: MNIST and Fashion-MNIST with 10 clients, small 50 and 950, large 900 and 300;
    CIFAR-10 with 20 clients, small 25 and 475, large 450 and 150, which takes every image there is.

    Inputs are `centred` as the authors do it, by mean 0.5 and standard deviation 0.5 of pixels within [0, 1]. It matters to whatever
    asks for curvature: at [0, 1] a pixel that is always black is always 0, so that the weights on it have no curvature at all.

    Args:
        source: Name of a data set, or a source of your own, which has inputs within [0, 1] if they are to be centred.
        clients: Number of clients.
        labels: Classes of each client.
        train: Training rows of each class and client, before validation and calibration.
        test: Test rows of each class and client.
        centred: Map inputs from [0, 1] to [-1, 1]. Otherwise they stay as `load` gives them: images standardised by their usual
            mean and deviation, digits within [0, 1].
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: More labels than classes, too few rows of a class, or inputs that cannot be centred.

    References:
        Chen, Liu, Wu, Fan, Cao, "FedSI: federated subnetwork inference for efficient uncertainty quantification", 2024,
        arXiv:2404.15657, experiments; the groups, the pooling and the centring from the authors' code,
        github.com/hyLiu1994/BPFedMePD.
    """
    opened = open_source(source, root, download)
    y = np.concatenate(classes(opened, "label_groups"))
    labels, train, test = _check_labels(labels, opened), whole("train", train, least=1), whole("test", test, least=1)
    check_clients(clients, len(y), "examples")
    held = (labels * np.arange(clients)[:, None] + np.arange(labels)) % opened.outputs
    rng = generator(seed, Purpose.PARTITION)
    rows = partitions.deal_exactly(y, held, opened.outputs, (train, test), rng)
    return assemble(
        _centred(opened) if centred else opened.x,
        opened.y,
        {"train": rows[0], "test": rows[1]},
        outputs=opened.outputs,
        task=opened.task,
        names=[f"client {j}" for j in range(clients)],
        class_names=opened.class_names,
        source=opened.info,
        recipe={
            "recipe": "label_groups",
            "source": opened.info.name,
            "pooled": True,
            "clients": clients,
            "labels": labels,
            "train": train,
            "test": test,
            "centred": bool(centred),
        },
        validation=validation,
        calibration=calibration,
        seed=seed,
    )


def _check_labels(labels: int, source: Source) -> int:
    """Classes of each client, as many as there are at most."""
    labels = whole("labels", labels, least=1)
    if labels > source.outputs:
        raise ValueError(f"labels must lie within [1, {source.outputs}], the number of classes of {source.info.name!r}, got {labels}")
    return labels


def _concentration(name: str, value: float) -> float:
    value = number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is a concentration and must be a finite number > 0, got {value}")
    return value


def _centred(source: Source) -> Tensor:
    """Inputs mapped from [0, 1] to [-1, 1], the usual standardisation of known images undone first; one copy while it is in use.

    Raises:
        ValueError: Inputs beyond [0, 1].
    """
    known = _centred_inputs.get(source.x)
    if known is not None and known[0] == source.x._version and (x := known[1]()) is not None:
        return x
    x = unit_range(source, "centred maps inputs from [0, 1] to [-1, 1]", "or pass centred=False")
    x.mul_(2).sub_(1)
    _centred_inputs[source.x] = (source.x._version, ref(x))
    return x
