"""Recipes: one call from the name of a data set to a federation, as papers make them.

All but `label_groups` keep the data's own division into training and test rows, and all share one copy of the data between
clients. The same arguments give the same partition on every machine; `FederatedData.hash` tells whether two are the same.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfl.checks import number, whole
from bayesfl.data import partitions
from bayesfl.data.federated import FederatedData, assemble
from bayesfl.data.sources import Source, load, unit_range
from bayesfl.random import Purpose, generator

_HEART_TEST = 0.34  # FLamby's share
_centred_inputs = WeakTensorKeyDictionary()


def _open(source: str | Source, root: str | Path | None, download: bool) -> Source:
    opened = source if isinstance(source, Source) else load(source, root=root, download=download)
    if opened.owners is not None:
        raise ValueError(f"{opened.info.name!r} belongs to its own clients already and has no test part to share out; use heart_disease()")
    return opened


def _labels(source: Source, recipe: str) -> tuple[np.ndarray, np.ndarray]:
    """Classes of the training and of the test rows."""
    if source.task != "classification":
        raise ValueError(f"{recipe} shares data out by class, {source.info.name!r} is a regression: use iid, or diabetes(by=...)")
    return source.y_train.numpy(), source.y_test.numpy()


def _check_labels(labels: int, source: Source) -> int:
    """Classes of each client, as many as there are at most."""
    labels = whole("labels", labels, least=1)
    if labels > source.outputs:
        raise ValueError(f"labels must lie within [1, {source.outputs}], the number of classes of {source.info.name!r}, got {labels}")
    return labels


def _check_clients(clients: int, most: int, what: str) -> None:
    if isinstance(clients, bool) or not isinstance(clients, int | np.integer) or not 1 <= clients <= most:
        raise ValueError(f"clients must be a whole number within [1, {most}], as many as there are {what}, got {clients!r}")


def _federate(
    source: Source,
    train: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    *,
    recipe: dict[str, Any],
    seed: int,
    validation: float,
    calibration: float,
    y: Tensor | None = None,
    outputs: int | None = None,
    class_names: Sequence[str] | None = None,
) -> FederatedData:
    """Federated data of rows of the source's training part and rows of its test part, each numbered from 0."""
    return assemble(
        source.x,
        source.y if y is None else y,
        {"train": train, "test": [rows + source.train for rows in test]},
        outputs=source.outputs if outputs is None else outputs,
        task=source.task,
        names=[f"client {j}" for j in range(len(train))],
        class_names=source.class_names if class_names is None else class_names,
        source=source.info,
        recipe=recipe,
        validation=validation,
        calibration=calibration,
        seed=seed,
    )


def concept_drift(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    superclasses: Sequence[Sequence[int]] | None = None,
    min_piece: int = 1,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """Label concept drift by superclass: clients agree on the labels but mean different things by them.

    Labels are superclasses, and each client knows every superclass by one of its subclasses only ("vehicle" is a bus to one and
    a train to another). Clients come in groups as large as a superclass: within a group every subclass goes to one client, and
    each class is cut at the same random places into one piece per group, so that clients of a group have equally much and groups
    don't. Expected size: training rows over clients. A client is tested on all test rows of its subclasses.

    With `cifar100` (20 superclasses of 5) this is the partition of the paper, from the authors' code. Other data without
    superclasses of their own pair classes: superclass k is classes 2k and 2k + 1.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients, a multiple of the size of a superclass.
        superclasses: The classes of each superclass, groups of one size.
        min_piece: Fewest training rows of a class in a piece.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: Clients or superclasses that don't work out, or a `min_piece` that is no whole number of at least 1.

    References:
        Zhu, Ma, Blaschko, "Tackling personalized federated learning with label concept drift via hierarchical Bayesian modeling",
        FL-NeurIPS 2022, experiments; details from the authors' code, github.com/JunyiZhu-AI/confidence_aware_PFL.
    """
    opened = _open(source, root, download)
    y_train, y_test = _labels(opened, "concept_drift")
    given = superclasses if superclasses is not None else opened.superclasses
    if given is None:
        if opened.outputs % 2:
            raise ValueError(
                f"{opened.info.name!r} has {opened.outputs} classes, which don't make pairs: pass superclasses=, groups of one size"
            )
        given = [(k, k + 1) for k in range(0, opened.outputs, 2)]
    groups = [[int(k) for k in group] for group in given]
    flat = [k for group in groups for k in group]
    if not flat or len({len(group) for group in groups}) > 1 or len(set(flat)) < len(flat) or not set(flat) <= set(range(opened.outputs)):
        raise ValueError(f"superclasses must be groups of one size of different classes within [0, {opened.outputs}), got {groups}")
    size = len(groups[0])
    fewest = int(np.bincount(y_train, minlength=opened.outputs)[flat].min())
    min_piece = whole("min_piece", min_piece, least=1)
    most = fewest // min_piece * size
    if isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients % size or not size <= clients <= most:
        raise ValueError(
            f"clients must be a multiple of {size}, the number of classes in a superclass, and at most {most}, because the smallest class "
            f"has {fewest} training examples and each group of {size} clients takes at least {min_piece}; got {clients}"
        )
    rng = generator(seed, Purpose.PARTITION)
    train, held = partitions.drift(y_train, groups, clients, min_piece, rng)
    by_class = partitions.rows_by_class(y_test, opened.outputs)
    test = partitions.join([[by_class[k] for k in mine] for mine in held])
    mapped = torch.full((opened.outputs,), -1)
    for k, group in enumerate(groups):
        mapped[group] = k
    names = opened.superclass_names if superclasses is None else None
    if names is None:
        known = opened.class_names or tuple(map(str, range(opened.outputs)))
        names = tuple("/".join(known[k] for k in group) for group in groups)
    return _federate(
        opened,
        train,
        test,
        recipe={"recipe": "concept_drift", "source": opened.info.name, "clients": clients, "superclasses": groups, "min_piece": min_piece},
        seed=seed,
        validation=validation,
        calibration=calibration,
        y=mapped[opened.y],
        outputs=len(groups),
        class_names=names,
    )


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
    opened = _open(source, root, download)
    y_train, y_test = _labels(opened, "labels_per_client")
    labels = _check_labels(labels, opened)
    if sizes not in ("equal", "random"):
        raise ValueError(f"sizes must be 'equal' or 'random', got {sizes!r}")
    _check_clients(clients, len(y_train), "training examples")
    rng = generator(seed, Purpose.PARTITION)
    held = partitions.spread_labels(opened.outputs, clients, labels, rng)
    train = partitions.deal_labels(y_train, held, opened.outputs, sizes == "equal", rng)
    by_class = partitions.rows_by_class(y_test, opened.outputs)
    return _federate(
        opened,
        train,
        partitions.join([[by_class[k] for k in mine] for mine in held]),
        recipe={"recipe": "labels_per_client", "source": opened.info.name, "clients": clients, "labels": labels, "sizes": sizes},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


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
    opened = _open(source, root, download)
    y = np.concatenate(_labels(opened, "label_groups"))
    labels, train, test = _check_labels(labels, opened), whole("train", train, least=1), whole("test", test, least=1)
    _check_clients(clients, len(y), "examples")
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


def dirichlet(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    alpha: float = 0.5,
    min_size: int = 10,
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

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        alpha: Concentration, > 0: the smaller, the more skewed.
        min_size: Fewest training rows of a client, before validation and calibration.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: Numbers out of range or of another sort, or too few rows for so many clients.

    References:
        Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML 2019, section 4.
    """
    opened = _open(source, root, download)
    y_train, y_test = _labels(opened, "dirichlet")
    alpha, min_size = number("alpha", alpha), whole("min_size", min_size, least=1)
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha is a concentration and must be a finite number > 0, got {alpha}")
    _check_clients(clients, len(y_train), "training examples")
    if clients * min_size > len(y_train):
        raise ValueError(
            f"{clients} clients of at least {min_size} examples need {clients * min_size}, {opened.info.name!r} has {len(y_train)} "
            "training examples: use fewer clients or a smaller min_size"
        )
    rng = generator(seed, Purpose.PARTITION)
    counts, moved = partitions.dirichlet_counts(np.bincount(y_train, minlength=opened.outputs), clients, alpha, min_size, rng)
    return _federate(
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
        },
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def iid(
    source: str | Source = "digits",
    *,
    clients: int = 20,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
    download: bool = False,
) -> FederatedData:
    """No skew: shuffled rows in equal parts, to within one; for classification and regression.

    Args:
        source: Name of a data set, or a source of your own.
        clients: Number of clients.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder of the data's files.
        download: Let torchvision fetch images that are not there.

    Raises:
        ValueError: More clients than training or test rows.
    """
    opened = _open(source, root, download)
    _check_clients(clients, min(opened.train, len(opened.x) - opened.train), "test examples")
    rng = generator(seed, Purpose.PARTITION)
    train, test = (
        partitions.join([[part] for part in np.array_split(rng.permutation(rows), clients)])
        for rows in (opened.train, len(opened.x) - opened.train)
    )
    return _federate(
        opened,
        train,
        test,
        recipe={"recipe": "iid", "source": opened.info.name, "clients": clients, **_scale(opened)},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def diabetes(
    *,
    clients: int = 10,
    by: Literal["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"] | None = None,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
) -> FederatedData:
    """Regression: disease progression of 442 patients from ten features, 354 of them for training; ships with scikit-learn.

    Features and target are standardised by the training rows; `recipe["target_mean"]` and `recipe["target_scale"]` give the
    target's units back.

    Args:
        clients: Number of clients.
        by: Skew: clients are equal parts of the patients in the order of this feature, ties at random. None for no skew.
        seed: Seed of the partition and of the shares below.
        validation: Share of each client's training rows for tuning.
        calibration: Likewise, for conformal thresholds.

    Raises:
        ValueError: Too many clients, or an unknown feature.
    """
    if by is None:
        return iid("diabetes", clients=clients, seed=seed, validation=validation, calibration=calibration)
    features = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")
    if by not in features:
        raise ValueError(f"by must be one of {', '.join(features)}, or None, got {by!r}")
    source = load("diabetes")
    _check_clients(clients, len(source.x) - source.train, "test examples")
    rng = generator(seed, Purpose.PARTITION)
    parts = []
    for x in (source.x_train, source.x_test):
        shuffled = rng.permutation(len(x))
        order = shuffled[np.argsort(x[shuffled, features.index(by)].numpy(), kind="stable")]
        parts.append(partitions.join([[part] for part in np.array_split(order, clients)]))
    return _federate(
        source,
        *parts,
        recipe={"recipe": "diabetes", "by": by, "clients": clients, **_scale(source)},
        seed=seed,
        validation=validation,
        calibration=calibration,
    )


def _scale(source: Source) -> dict[str, float]:
    return {} if source.scale is None else {"target_mean": round(source.scale[0], 9), "target_scale": round(source.scale[1], 9)}


def heart_disease(
    *,
    seed: int = 0,
    validation: float = 0.0,
    calibration: float = 0.0,
    root: str | Path | None = None,
) -> FederatedData:
    """Four hospitals, heart disease yes or no: a natural federation of 740 patients, 13 inputs.

    The protocol of FLamby: three attributes that are mostly missing are dropped (slope, ca, thal), then incomplete patients;
    dummies for chest pain and resting electrocardiogram; each hospital split 66 : 34, stratified, and standardised by its
    own training patients.

    Args:
        seed: Seed of the split and of the shares below.
        validation: Share of each hospital's training patients for tuning.
        calibration: Likewise, for temperatures and conformal thresholds.
        root: Folder that holds `heart_disease/heart.csv`.

    References:
        Ogier du Terrail et al., "FLamby: datasets and benchmarks for cross-silo federated learning in realistic healthcare
        settings", NeurIPS 2022 (datasets and benchmarks), appendix on Fed-Heart-Disease.
    """
    source = load("heart", root=root)
    assert source.owners is not None
    owners, y = source.owners.numpy(), source.y.numpy()
    x = source.x.double()
    train, test = [], []
    for j in range(len(source.owner_names)):
        rows = np.flatnonzero(owners == j)
        rng = generator(seed, Purpose.PARTITION, client=j)
        left, held = partitions.stratified(y[rows], rows, math.ceil(_HEART_TEST * len(rows)), rng)
        mean, std = x[left].mean(0), x[left].std(0, correction=0)
        x[rows] = (x[rows] - mean) / std.where(std > 0, torch.ones_like(std))  # a constant feature becomes 0
        train.append(left)
        test.append(held)
    return assemble(
        x.float(),
        source.y,
        {"train": train, "test": test},
        outputs=2,
        task="classification",
        names=source.owner_names,
        class_names=source.class_names,
        source=source.info,
        recipe={"recipe": "heart_disease", "source": "heart"},
        validation=validation,
        calibration=calibration,
        seed=seed,
    )
