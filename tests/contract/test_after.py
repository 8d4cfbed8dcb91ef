"""What is fitted after training: every question by every way of asking it, so that a change of the
machinery between them changes no number.

`python -m tests.contract.test_after` records them anew.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import bayesfl as bf
from bayesfl.base.trees import nest
from bayesfl.federation.run.result import Result
from bayesfl.flower import Deployed, load
from tests.contract.asked import ABSTAINING, STEPS, clients, network, number
from tests.flower.made import deploy, grid_of, predictions, private

RECORDED = Path(__file__).with_name("after.json")
OPTIONS: dict[str, Any] = {"rounds": 1, "seed": 3, "dtype": torch.float64}


def fedavg(predictor: Any = None) -> bf.Algorithm:
    """FedAvg in a few steps, which predicts by a rule."""
    return replace(bf.algorithms.fedavg(network(), epochs=1, batch_size=20), predictor=predictor)


METHODS: dict[str, Callable[[], bf.Algorithm]] = {
    "tuned": lambda: bf.algorithms.fedsi_full(
        network(), steps=3, batch_size=20, finetune_steps=3, predictive_precision=None
    ),
    "laplace": lambda: fedavg(bf.predictors.PooledLaplace()),
    "kronecker": lambda: fedavg(bf.predictors.PooledLaplace("kfac", 1.0)),
    "own": lambda: replace(
        bf.algorithms.fedper(network(), epochs=1, batch_size=20),
        predictor=bf.predictors.LinearisedLaplace(structure="diagonal"),
    ),
    "plain": lambda: bf.algorithms.fedavg_ft(network(), epochs=1, batch_size=20, finetune_epochs=1),
}
"""A tuned number after fine-tuning, pooled curvature, a tuned number without, and neither."""


def told(result: Result, aggregation: Any = None) -> dict[str, Any]:
    """What a result says: its state, its predictions, its client's model, and those of a file."""
    found = {
        "server": number(result.server),
        "private": number(result.private),
        "history": number(
            {
                str(row["round"]): {
                    k: torch.tensor(float(v)) for k, v in row.items() if "seconds" not in k
                }
                for row in result.history
            }
        ),
        "predict": number(vars(result.predict())),
        "mean": number(vars(result.predict(draws=0))) if not result.steps else 0.0,
        "client": number(vars(result.client(1).predict(clients().test.client(1)[0]))),
        "steps": number(
            {str(k): {"s": one.state, "o": one.own} for k, one in enumerate(result.steps)}
        ),
    }
    known = clients() if result.known.clients == 3 else result.data
    with TemporaryDirectory() as folder:
        result.save(folder)
        again = bf.load(folder, result.algorithm, known)
        bare = bf.load(folder, result.algorithm)
        found["loaded"] = number(vars(again.predict()))
        if not result.algorithm.finetune and not getattr(
            result.algorithm.predictor, "needs_data", False
        ):
            found["bare"] = number(vars(bare.client(1).predict(known.test.client(1)[0])))
        result.client(1).save(Path(folder) / "one")
        own = bf.load_client(Path(folder) / "one", result.algorithm.model)
        found["file"] = number(vars(own.predict(known.test.client(1)[0])))
    return found


def here(name: str, aggregation: Any, conducted: Any) -> dict[str, dict[str, Any]]:
    """What a method's runs say on this machine, by question.

    Args:
        name: The method.
        aggregation: What adds up rounds.
        conducted: What adds up answers after them.
    """
    result = bf.simulate(
        METHODS[name](), clients(), progress=False, aggregation=aggregation, **OPTIONS
    )
    found = {"trained": told(result)}
    if result.tuned is not None:
        found["trained"]["tuned"] = result.tuned
    found["calibrated"] = told(result.calibrate(*STEPS, aggregation=conducted))
    for step in STEPS:
        found[type(step).__name__] = told(result.calibrate(step, aggregation=conducted))
    if name in ("tuned", "plain"):
        found["abstaining"] = told(result.calibrate(*ABSTAINING, aggregation=conducted))
    novel = clients(4).select([2, 3])
    found["novel"] = told(result.adapt(novel))
    found["novel calibrated"] = told(
        result.calibrate(*STEPS[:2], aggregation=conducted).adapt(novel)
    )
    if name == "plain":
        made = result.laplace("last_layer", aggregation=conducted)
        found["laplace()"] = told(made)
        found["laplace(), calibrated"] = told(made.calibrate(*STEPS, aggregation=conducted))
        headed = result.heads(aggregation=conducted)
        found["heads"] = told(headed)
        found["heads calibrated"] = told(headed.calibrate(*STEPS, aggregation=conducted))
        found["heads novel"] = told(headed.adapt(novel))
    state = result.audit(aggregation=conducted).columns()
    found["audit"] = {
        "table": number({k: torch.as_tensor(v) for k, v in state.items() if k != "client"})
    }
    return found


def deployed(run: Deployed, folder: Path) -> dict[str, Any]:
    """What a deployment says: the server, its file, and the nodes' predictions and models."""
    again = load(folder / "server", run.algorithm)
    rows = [clients().test.client(j)[0] for j in range(3)]
    homes = [folder / f"node-{100 + j}/{run.experiment}/client-{j}" for j in range(3)]
    own = [
        bf.load_client(home, run.algorithm.model).predict(x)
        for home, x in zip(homes, rows, strict=True)
    ]
    columns = {k: torch.tensor(float(v)) for k, v in run.history[-1].items() if "seconds" not in k}
    return {
        "server": number(run.server),
        "private": number(nest(private(run, folder)) if run.start else {}),
        "history": number(columns),
        "predictions": number({str(j): predictions(run, folder, j) for j in range(3)}),
        "clients": number({str(j): vars(one) for j, one in enumerate(own)}),
        "steps": number({str(k): one.state for k, one in enumerate(run.steps)}),
        "loaded": number(
            {"server": again.server, "steps": {str(k): o.state for k, o in enumerate(again.steps)}}
        ),
    }


def network_of(name: str) -> dict[str, dict[str, Any]]:
    """What a method's deployments say, by question."""
    found = {}
    for question, steps in (("trained", ()), ("calibrated", STEPS), ("abstaining", ABSTAINING)):
        if question == "abstaining" and name not in ("tuned", "plain"):
            continue
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            algorithm = METHODS[name]()
            about = {**OPTIONS, "calibration": steps, "checkpoint": folder / "server"}
            found[question] = deployed(deploy(algorithm, clients(), folder, **about), folder)
            if name == "plain" and question == "calibrated":
                headed = bf.with_heads(algorithm)
                grid = grid_of(headed, clients(), folder, calibration=STEPS)
                about |= {"rounds": 0, "start": folder / "server", "checkpoint": folder / "heads"}
                made = deploy(headed, clients(), folder, grid, **about)
                (folder / "heads").rename(folder / "server2")
                (folder / "server").rename(folder / "before")
                (folder / "server2").rename(folder / "server")
                found["heads"] = deployed(made, folder)
    return found


WAYS: dict[str, Callable[[str], Any]] = {
    "here": lambda name: here(name, None, None),
    "secure": lambda name: here(name, bf.SecureSum(), bf.SecureSum()),
    "network": network_of,
}


def numbers(way: str, name: str) -> Any:
    """The numbers of a method asked in one way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few rows, at test size
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = WAYS[way](name)
        torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers(way: str, name: str):
    known, now = json.loads(RECORDED.read_text())[f"{way}, {name}"], numbers(way, name)
    assert now.keys() == known.keys()
    for question, answers in now.items():
        assert answers == pytest.approx(known[question], rel=1e-6, abs=1e-6), question


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps(
            {f"{way}, {name}": numbers(way, name) for way in WAYS for name in METHODS}, indent=1
        )
        + "\n"
    )
