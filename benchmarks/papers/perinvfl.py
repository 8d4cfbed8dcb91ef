"""PerInvFL's RC-MNIST and RC-FMNIST, ten methods and five cases, the same without rotation, and
IRM's own coloured MNIST as an anchor.

The paper's numbers are lost, and so is part of its recipe. This one: four clients, 201 rounds of 5
mini-batches of 200, Adam at 5e-4 kept across rounds, the penalty's weight 91257 from round 12 on
with Adam's state zeroed there, GroupDRO's losses on 1,000 examples of a client. Personal learning
rate and pull come from a grid by the accuracy on held-back data of the training colours, on the
first seed, and stay. No test data choose anything. Federations, methods and measures are those of
examples/perinvfl.py.

The anchor is IRM on one machine, two environments, 501 full-batch steps by Adam, beside the same
without penalty.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import bayesfl as bf
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import Adam
from bayesfl.study.table import Row
from benchmarks import script
from benchmarks.papers import Part, Size

GRID = {"rate": [1e-4, 1e-3], "lam": [0.1, 1.0, 10.0]}
SETS = ("rc-mnist", "rc-fmnist", "rc-mnist, upright", "rc-fmnist, upright")
SEEDS = (0, 1, 2)
ANCHOR = "coloured mnist, central"
ANCHORS = {"IRM": 91257.18613115903, "ERM": 0.0}
PLACE = (
    "Training and test accuracy (%) of IRM's authors on coloured MNIST, mean of ten runs; the "
    "paper's own numbers are lost"
)
PUBLISHED = {"IRM": {"training": 70.8, "test": 66.9}, "ERM": {"training": 87.4, "test": 17.1}}
shown = script.names_of("examples/perinvfl.py")


def coloured(
    make: Callable[..., bf.Algorithm],
    model: Any,
    anneal: int,
    rate: float | None = None,
    lam: float | None = None,
) -> bf.Algorithm:
    """Return a method at a personal rate and a pull, where it has them."""
    has = inspect.signature(make).parameters
    options: dict[str, Any] = {"anneal": anneal} if "anneal" in has else {}
    if rate is not None:
        options["personal_optimiser"] = Adam(rate)
    if lam is not None:
        options["lam"] = lam
    return make(model, **options)


def measured(run: Row, result: Result) -> dict[str, Any]:
    """Return the cases of a run."""
    return {
        "row": shown.measured(result),
        "round_seconds": float(np.median(result.history["seconds"])),
        "seconds": run.record.seconds,
    }


def federated(name: str, *, quick: bool) -> Part:
    """Return one of the coloured sets."""
    source, _, upright = name.partition(", ")
    rounds, anneal = (3, 1) if quick else (201, 12)
    own = {"rate": "personal_optimiser", "lam": "lam"}
    grid = {
        method: {
            option: values[-1:] if quick else values
            for option, values in GRID.items()
            if own[option] in inspect.signature(make).parameters
        }
        for method, make in shown.METHODS.items()
    }
    return Part(
        data=partial(shown.federation, "digits" if quick else source, upright=bool(upright)),
        model=shown.network,
        methods={
            method: partial(coloured, make, anneal=anneal) for method, make in shown.METHODS.items()
        },
        rounds=rounds,
        seconds=1 if quick else 150,
        seeds=SEEDS[:1] if quick else SEEDS,
        grid=grid,
        settings={"train": "all"},
        measure=measured,
    )


def both_splits(run: Row, result: Result) -> dict[str, Any]:
    """Return training and test accuracy."""
    splits = {"training": result.data.train, "test": result.data.test}
    row = {name: result.predict(x).summary(x)["accuracy"] for name, x in splits.items()}
    return {"row": row, "seconds": run.record.seconds}


def central(*, quick: bool) -> Part:
    """Return IRM's own experiment. Its code takes the mean over the two environments of what is
    their sum here, so gamma is half of its.

    Two things differ from that code: till round 190 the penalty has weight 1 on the sum, twice of
    theirs, and then Adam starts anew.
    """
    more = {} if quick else {"source": "mnist", "test": 10_000}
    return Part(
        data=partial(bf.data.coloured, agreement=((0.8, 0.9),), rotate=False, **more),
        model=lambda clients, seed: bf.models.mlp(
            clients.inputs, hidden=(390, 390), outputs=1, start="xavier", seed=seed
        ),
        methods={
            name: partial(
                bf.algorithms.irm,
                gamma=gamma / 2,
                anneal=2 if quick else 190,
                steps=1,
                batch_size=None,
                optimiser=Adam(0.0004898536566546834),
                likelihood=Bernoulli(),
            )
            for name, gamma in ANCHORS.items()
        },
        rounds=4 if quick else 501,
        seconds=1 if quick else 600,
        seeds=SEEDS[:1] if quick else SEEDS,
        settings={"evaluate_every": None},
        measure=both_splits,
    )


def parts(size: Size) -> dict[str, Part]:
    """Return the anchor, and set by set."""
    quick = size == "quick"
    return {ANCHOR: central(quick=quick)} | {
        name: federated(name, quick=quick) for name in SETS[: 1 if quick else None]
    }
