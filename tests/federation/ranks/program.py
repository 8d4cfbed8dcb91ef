"""What a user's script does, as digests: the same lines on one process and on torchrun's ranks.

`python -m tests.federation.ranks.program FILE NAME ...` writes what each rank finds.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import bayesfl as bf
from bayesfl.base.processes.ranks import LostRankError, current
from bayesfl.federation.clients.local import Local
from bayesfl.federation.run.result import Result
from tests.cases import CASES
from tests.cases import federation as made_up
from tests.contract.asked import ABSTAINING, STEPS, digest, network
from tests.contract.asked import clients as asked
from tests.federation.made import power_of_choice, reporting

ENGINE = bf.Engine(chunk=2, workers=1)
"""Seven clients are four chunks."""
TAKEN: Counter[Any] = Counter()
"""How often each client of a case has stepped at this rank, and each site has answered."""
FOLDER: list[str] = []
"""The folder of files, which all ranks see."""
federation = cache(made_up)


def run(method: bf.Algorithm, **options: Any) -> Result:
    """A short run of seven clients."""
    given: dict[str, Any] = {"rounds": 2, "seed": 1, "engine": ENGINE, "progress": False}
    return bf.simulate(method, federation(), **{**given, **options})


def told(result: Result) -> list[Any]:
    """What a result says of its state, its history and its predictions."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in result.history
    ]
    seconds = current().every(lambda: [row.get("seconds") for row in result.history])
    assert all(one == seconds[0] for one in seconds)  # the history is the same at all ranks
    predicted = digest({"probs": result.predict().probs})
    return [digest(result.server), digest(result.private), rows, predicted]


def model() -> torch.nn.Module:
    """The same network each time."""
    torch.manual_seed(0)
    return bf.models.mlp(8, hidden=4, outputs=3)


def fedavg(**options: Any) -> bf.Algorithm:
    """FedAvg of small batches."""
    return bf.algorithms.fedavg(model(), epochs=1, batch_size=8, **options)


def calibrated() -> Any:
    """Steps of calibration, with those of answers that are held back, and an audit."""
    result = bf.simulate(
        bf.algorithms.fedavg_ft(network(), epochs=1, batch_size=20, finetune_epochs=1),
        asked(7), rounds=1, engine=ENGINE, progress=False,
    )  # fmt: skip
    found = [told(result.calibrate(*steps)) for steps in (STEPS, ABSTAINING)]
    return [*found, repr(result.audit())]


def few(below: Any, rounds: int) -> Result:
    """A run whose clients have rows of their own, of which some rounds fail."""
    return run(
        bf.algorithms.pfedvem(model(), head_epochs=1, body_epochs=1, batch_size=8),
        rounds=rounds,
        faults=bf.faults.at_random(0.5, kinds=("lost",)),
        admission=bf.Admission("skip", min_clients=4, below_minimum=below),
    )


def adapted() -> Any:
    """New clients, by a method that adapts them."""
    result = run(bf.algorithms.pfedvem(model(), head_epochs=1, body_epochs=1, batch_size=8))
    return told(result.adapt(made_up()))


def stopped() -> Any:
    """A run that a callback ends, whose best state is returned."""
    early = bf.callbacks.EarlyStopping("train_nll", patience=1, lowest=False, keep="best")
    return told(run(fedavg(), rounds=6, on_round=[early]))


def resumed() -> Any:
    """A run that goes on from a file, which rank 0 has written."""
    run(fedavg(), checkpoint=FOLDER[0])
    return told(run(fedavg(), rounds=3, checkpoint=FOLDER[0]))


def diverged() -> Any:
    """An error of one chunk."""
    try:
        run(fedavg(optimiser=bf.optim.SGD(1e30)))
    except bf.DivergenceError as error:
        return [str(error), error.client, error.result.round]


def failed() -> Any:
    """An error of a user's function at one client."""

    def measure(predictions: Any, labels: Any) -> float:
        raise KeyError("measure")

    try:
        run(fedavg(), measures={"own": measure})
    except KeyError as error:
        return str(error)


def private() -> Any:
    """Noise and a cohort by one secret, that of rank 0."""
    noise = bf.ClientPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-2)
    runs = [run(fedavg(), participation=0.5, aggregation=noise) for _ in range(2)]
    assert digest(runs[0].server) != digest(runs[1].server)
    return len(runs)


def surveyed() -> Any:
    """Sums over rows, regressions, and an error of one site; each site answers at one rank."""
    import pandas as pd  # here, since programs of ranks that ask nothing start sooner without it

    from bayesfl.stats.asking import Sums

    rng, own = np.random.default_rng(0), Sums.of_site
    frames = {
        name: pd.DataFrame({"dose": rng.normal(size=n), "age": rng.normal(size=n)})
        for name, n in (("north", 20), ("south", 35), ("west", 25), ("east", 30))
    }
    ill = {name: frame.assign(ill=rng.random(len(frame)) < 0.4) for name, frame in frames.items()}

    def fitted(terms: list[str], family: Any = "binomial") -> Any:
        return bf.stats.glm(bf.stats.tables(ill, outcome="ill", terms=terms), family=family)

    def counted(self: Any, state: Any, site: Any, place: int) -> Any:
        TAKEN[site.name] += 1
        return own(self, state, site, place)

    with patch.object(Sums, "of_site", counted):
        both = fitted(["dose", "age"])
    compared = both.compare(fitted(["dose"]))
    ill["west"]["ill"] = -1
    try:
        fitted(["dose"], "poisson")
    except ValueError as error:
        refused = str(error)
    total = bf.survey(Rows(), federation())
    told = digest({"loc": both.estimate, "of": both.covariance})
    return [repr(total), told, compared, refused]


class Rows:
    """Count the rows of all clients."""

    split = "train"

    def start(self, about: Any) -> Any:
        """Begin with nothing."""
        return {}

    def shapes(self, state: Any) -> Any:
        """Return the shape of the sum."""
        return {"n_rows": ()}

    def answer(self, state: Any, local: Any) -> Any:
        """Return each client's number of rows."""
        TAKEN.update(local.ids.tolist())
        return {"n_rows": torch.tensor([len(y) for _, y in local])}

    def solve(self, state: Any, total: Any) -> Any:
        """Return the sum."""
        return total, True


SPECIAL: dict[str, Callable[[], Any]] = {
    "lost and altered": lambda: told(run(fedavg(), rounds=4, faults=bf.faults.at_random(0.3))),
    "repeated": lambda: told(few("repeat", 2)),
    "skipped": lambda: told(few("skip", 8)),
    "sampled": lambda: told(run(reporting(fedavg()), rounds=3, sampling=power_of_choice)),
    "secure": lambda: told(run(fedavg(), aggregation=bf.SecureSum())),
    "secure, lost": lambda: told(
        run(
            fedavg(),
            aggregation=bf.SecureSum(),
            faults=bf.faults.at_random(0.3, kinds=("lost",)),
            admission=bf.Admission("skip", max_norm=None),
        )
    ),
    "private": lambda: told(
        run(
            fedavg(),
            aggregation=bf.ClientPrivacy(
                clip=1.0, noise_multiplier=1.0, delta=1e-2, secret=bytes(range(32))
            ),
        )
    ),
    "private, own secret": private,
    "calibrated": calibrated,
    "laplace": lambda: told(run(fedavg()).laplace()),
    "heads": lambda: told(run(bf.with_heads(fedavg()), evaluate_every=2)),
    "tuned": lambda: told(
        bf.simulate(
            bf.algorithms.fedsi_full(
                network(), steps=3, batch_size=20, finetune_steps=3, predictive_precision=None
            ),
            asked(5),
            rounds=1,
            engine=ENGINE,
            progress=False,
        )
    ),
    "all train": lambda: told(
        run(
            bf.algorithms.pfedvem(model(), head_epochs=1, body_epochs=1, batch_size=8),
            participation=0.5,
            train="all",
        )
    ),
    "adapted": adapted,
    "stopped": stopped,
    "resumed": resumed,
    "diverged": diverged,
    "failed": failed,
    "surveyed": surveyed,
}
METHODS = {
    str(case): lambda case=case: told(run(case(model()), evaluate_every=2)) for case in CASES
}
"""The special cases evaluate after each round."""
EVERY = SPECIAL | METHODS


def found(names: list[str], folder: str) -> dict[str, Any]:
    """What each of some cases says, as JSON gives it back, and how often each client stepped."""
    FOLDER[:] = [folder]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    train = Local.run

    def counted(self: Local, stage: Any, ids: np.ndarray, *more: Any, **options: Any) -> Any:
        TAKEN.update(ids.tolist())
        return train(self, stage, ids, *more, **options)

    for name in names:
        TAKEN.clear()
        with patch.object(Local, "run", counted):
            made[name] = {"said": EVERY[name](), "steps": dict(TAKEN)}
    return json.loads(json.dumps(made, default=repr))


def noisy(split: bf.data.ClientData, seed: int) -> bf.data.ClientData:
    """A split whose inputs have other noise at every rank."""
    noise = torch.randn(split.x.shape, generator=torch.Generator().manual_seed(seed))
    return replace(split, x=split.x + noise)


def apart() -> list[str]:
    """What a rank is told of a call that another leaves out, of one with other options, and of
    each argument that must be the same.
    """
    result, leads, said = run(fedavg()), bf.rank() == 0, []
    other = run(fedavg(), seed=5)
    steps = [one(split="test") for one in (bf.calibration.Temperature, bf.calibration.Bias)]
    plans = None, bf.faults.at_random(0.5, kinds=("lost",))
    folder = f"{FOLDER[0]}-apart" if leads else None
    for call in (
        lambda: result.predict() if leads else run(fedavg()),
        lambda: run(fedavg(), checkpoint=folder),
        lambda: run(fedavg(optimiser=bf.optim.SGD(0.1 + bf.rank()))),
        lambda: run(fedavg(), seed=bf.rank()),
        lambda: run(fedavg(), record_clients=["nll"] * leads),
        lambda: run(fedavg(), faults=plans[leads], admission=bf.Admission("skip")),
        lambda: run(fedavg(), start=other if leads else result),
        lambda: result.predict(noisy(result.data.test, bf.rank())),
        lambda: (other if leads else result).predict(),
        lambda: result.calibrate(steps[leads]),
        lambda: result.predict(draws=int(leads)),
    ):
        try:
            call()
        except (LostRankError, ValueError) as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    made = found(sys.argv[2:], f"{sys.argv[1]}-files") | {"apart": apart()}
    Path(f"{sys.argv[1]}.{bf.rank()}").write_text(json.dumps(made))
