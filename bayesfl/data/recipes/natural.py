"""Natural federations: every example belongs to its own client from the start, a hospital or a
speaking role.
"""

import math
from typing import Annotated

import numpy as np
import torch

from bayesfl.base.options import Range, declared
from bayesfl.base.random import Purpose, generator
from bayesfl.data import partitions
from bayesfl.data.federated import FederatedData
from bayesfl.data.recipes import shared

_HEART_TEST = 0.34  # FLamby's share
_ROLE_TRAIN = 0.8


@declared
def heart_disease(
    *,
    seed: shared.Seed = 0,
    validation: shared.Validation = 0.0,
    calibration: shared.Calibration = 0.0,
    root: shared.Root = None,
) -> FederatedData:
    """Make a federation of four hospitals that predict heart disease, yes or no: 740 patients, 13
    inputs.

    The protocol of FLamby: three attributes that are mostly missing are dropped (slope, ca, thal),
    then incomplete patients; dummies for chest pain and resting electrocardiogram; each hospital
    split 66 : 34, stratified, and standardised by its own training patients.

    Args:
        root: Folder that holds `heart_disease/heart.csv`, or the four files
            `heart_disease/processed.*.data`.

    Raises:
        FileNotFoundError: The files are absent.

    References:
        Ogier du Terrail et al., "FLamby: datasets and benchmarks for cross-silo federated learning
        in realistic healthcare settings", NeurIPS 2022 (datasets and benchmarks), appendix on
        Fed-Heart-Disease.

    Example:
        >>> bf.data.heart_disease()  # doctest: +SKIP
        FederatedData(heart, 4 clients; train 486, test 254)
    """
    options = shared.Options(
        source="heart",
        seed=seed,
        validation=validation,
        calibration=calibration,
        root=root,
        recipe={"recipe": "heart_disease", "source": "heart"},
    )
    source = options.load()
    owners, y = np.asarray(source.owners), source.y.numpy()
    x = source.x.double()
    train, test = [], []
    for j in range(len(source.owner_names)):
        rows = np.flatnonzero(owners == j)
        rng = generator(seed, Purpose.PARTITION, client=j)
        left, held = partitions.stratified(y[rows], rows, math.ceil(_HEART_TEST * len(rows)), rng)
        mean, std = x[left].mean(0), x[left].std(0, correction=0)
        # A constant feature becomes 0.
        x[rows] = (x[rows] - mean) / std.where(std > 0, torch.ones_like(std))
        train.append(left)
        test.append(held)
    return options.federate(
        source,
        train,
        test,
        pooled=True,
        x=x.float(),
        names=source.owner_names,
    )


@declared
def shakespeare(
    *,
    min_size: Annotated[int, Range(2, ends="[")] = 10,
    max_size: shared.MaxSize = None,
    seed: shared.Seed = 0,
    validation: shared.Validation = 0.0,
    calibration: shared.Calibration = 0.0,
    root: shared.Root = None,
) -> FederatedData:
    """Make a federation of the speaking roles of 37 plays, whose task is to predict the next
    character, for `bf.models.char_lstm`.

    A client is a role of one play. All its words, stage directions left out, are cut into chunks of
    80 characters; an example is a chunk and the character after it, one of the 100 of
    `string.printable`. The first 80 % of a role's examples, in the order of its text, are training
    data, the others test data. Inputs are the characters' numbers, int64. FedEM's code predicts
    every character of a chunk from those before it and weights the loss by character; here each
    chunk has one label, as in LEAF, whose chunks begin at every character.

    Args:
        min_size: Smallest number of examples of a role, at least 2; roles with fewer are left out.
        root: Folder that holds `shakespeare/moby_plays.txt`.

    Raises:
        ValueError: No role has that number of examples.
        FileNotFoundError: The file is absent.

    References:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
        AISTATS 2017; Caldas et al., "LEAF: a benchmark for federated settings", 2018,
        arXiv:1812.01097; Marfoq et al., "Federated multi-task learning under a mixture of
        distributions", NeurIPS 2021.

    Example:
        >>> clients = bf.data.shakespeare(max_size=100)  # doctest: +SKIP
    """
    options = shared.Options(
        source="shakespeare",
        max_size=max_size,
        seed=seed,
        validation=validation,
        calibration=calibration,
        root=root,
        recipe={"recipe": "shakespeare", "source": "shakespeare", "min_size": min_size},
    )
    source = options.load()
    counts = np.bincount(np.asarray(source.owners), minlength=len(source.owner_names))
    # A role's examples are contiguous, in the order of its text.
    starts = np.cumsum(counts) - counts
    chosen = np.flatnonzero(counts >= min_size)
    cuts = [int(_ROLE_TRAIN * counts[j]) for j in chosen]
    return options.federate(
        source,
        [np.arange(starts[j], starts[j] + cut) for j, cut in zip(chosen, cuts, strict=True)],
        [
            np.arange(starts[j] + cut, starts[j] + counts[j])
            for j, cut in zip(chosen, cuts, strict=True)
        ],
        pooled=True,
        names=[source.owner_names[j] for j in chosen],
    )
