"""The synthetic row of FedEM's table 2: 300 clients, mixtures of three linear rules, 200 rounds.

    python benchmarks/papers/fedem.py [--quick] [--methods ...] [--rates ...] [--seeds ...]
    [--workers N]

Each method's learning rate is the best of the grid on data of the same clients that are used for
nothing else (the same sizes, mixture weights and rules, other examples, but for the first client's,
which are the same; a fifth is held back to choose), seed 0; then it is trained once for each seed
of starts and batches. The clients' sizes are those of the authors' seed, with 2,000 test examples
of each client. Momentum, where a method has it, is kept between rounds, as in the authors' code;
rates fall tenfold at half and at three quarters of the rounds, but for pFedMe's. Resumable: what is
finished stands in the results and is passed over. Results: benchmarks/results/papers/fedem.json;
`python docs/tables.py` writes the page from them.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

import bayesfl as bf
from bayesfl import Descend
from bayesfl.data import FederatedData
from bayesfl.evaluation import report
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import SGD, multistep

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers" / "fedem.json"
RATES = (0.03, 0.1, 0.3, 1.0)
PLAIN = partial(SGD, weight_decay=5e-4)
HEAVY = partial(PLAIN, momentum=0.9)
BATCHES: dict[str, Any] = {"batch_size": 128, "likelihood": Bernoulli()}
ONE: dict[str, Any] = {**BATCHES, "epochs": 1}
MOREAU: dict[str, Any] = {**BATCHES, "lam": 1.0, "batches": 2, "inner_steps": 5}
# Table 2, synthetic data: average and bottom decile of the clients' accuracies, in %.
PUBLISHED: dict[str, dict[str, float]] = {
    "Local": {"accuracy": 65.7, "accuracy_decile": 58.4},
    "FedAvg": {"accuracy": 68.2, "accuracy_decile": 58.9},
    "FedProx": {"accuracy": 68.2, "accuracy_decile": 59.0},
    "FedAvg+": {"accuracy": 68.9, "accuracy_decile": 60.2},
    "Clustered FL": {"accuracy": 69.1, "accuracy_decile": 59.0},
    "pFedMe, proximal SGD": {"accuracy": 69.2, "accuracy_decile": 61.2},
    "FedEM": {"accuracy": 74.7, "accuracy_decile": 66.7},
}
Make = Callable[[torch.nn.Module, float], bf.Algorithm]
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "fedem.py")))


def kept(algorithm: bf.Algorithm) -> bf.Algorithm:
    """The same with momentum that a client keeps from round to round."""
    phases = [
        replace(phase, persist="velocity") if isinstance(phase, Descend) else phase
        for phase in algorithm.phases
    ]
    return replace(algorithm, phases=tuple(phases))


def proximal(model: torch.nn.Module, rate: float) -> bf.Algorithm:
    """The authors' pFedMe: FedProx whose clients go on from their own last model, pulled towards
    the mean of all.
    """
    algorithm = bf.algorithms.fedprox(model, mu=1.0, optimiser=PLAIN(multistep(rate)), **ONE)
    return replace(algorithm, blocks={"w": replace(algorithm.blocks["w"], keep=True)})


METHODS: dict[str, Make] = {
    "Local": lambda model, rate: kept(
        bf.algorithms.local(model, optimiser=HEAVY(multistep(rate)), **ONE)
    ),
    "FedAvg": lambda model, rate: kept(
        bf.algorithms.fedavg(model, optimiser=HEAVY(multistep(rate)), **ONE)
    ),
    "FedProx": lambda model, rate: bf.algorithms.fedprox(
        model, mu=0.1, optimiser=PLAIN(multistep(rate)), **ONE
    ),
    "FedAvg+": lambda model, rate: kept(
        bf.algorithms.fedavg_ft(model, finetune_epochs=1, optimiser=HEAVY(multistep(rate)), **ONE)
    ),
    "Clustered FL": lambda model, rate: kept(
        bf.algorithms.clustered(model, optimiser=HEAVY(multistep(rate)), **ONE)
    ),
    "pFedMe": lambda model, rate: bf.algorithms.pfedme(
        model, lr=rate, personal_optimiser=PLAIN(rate), **MOREAU
    ),
    "pFedMe, proximal SGD": proximal,
    "FedEM": lambda model, rate: kept(
        bf.algorithms.fedem(model, optimiser=HEAVY(multistep(rate)), **ONE)
    ),
    "D-FedEM": lambda model, rate: kept(
        bf.algorithms.d_fedem(model, optimiser=HEAVY(multistep(rate)), **ONE)
    ),
}


def l1(learned: np.ndarray, true: np.ndarray) -> float:
    """Mean over clients of the L1 distance between weights [J, M], components in the order that is
    best for all clients together.
    """
    return float(np.abs(example.matched(learned, true) - true).sum(1).mean())


def best_rule(clients: FederatedData) -> float:
    """The largest share of examples that one linear rule can get right: 1 - angle / pi under each
    true rule, by the shares of these.

    Of rules that combine the true ones; angles stand for shares where inputs are spherical, which
    150 uniform ones nearly are.
    """
    rules, shares = np.array(clients.recipe["rules"]), np.array(clients.recipe["weights"]).mean(0)

    def wrong(mix: np.ndarray) -> float:
        rule = mix @ rules
        cosines = rules @ rule / (np.linalg.norm(rules, axis=1) * np.linalg.norm(rule))
        return float(shares @ np.arccos(cosines.clip(-1, 1)) / np.pi)

    starts = [np.ones(len(rules)), *np.eye(len(rules))]
    return 1 - min(
        float(
            minimize(
                wrong, start, method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10}
            ).fun
        )
        for start in starts
    )


def run(
    method: str, rate: float, seed: int, clients: FederatedData, rounds: int, workers: int | None
) -> Result:
    """One federation, everyone in every round."""
    torch.manual_seed(seed)  # of the linear layer that is the start of methods with one model
    algorithm = METHODS[method](torch.nn.Linear(clients.inputs[0], 1), rate)
    options = {
        "train": "cohort",
        "sampling": "fixed",
        "evaluate_every": None,
        "engine": bf.Engine(workers=workers),
    }
    return bf.simulate(algorithm, clients, rounds=rounds, seed=seed, progress=False, **options)


def measured(result: Result, clients: FederatedData) -> dict[str, Any]:
    """Measure a finished run: accuracies, distance of the weights, clusters."""
    found = result.predict(draws=0).summary(clients.test)
    row: dict[str, Any] = {key: found[key] for key in ("accuracy", "accuracy_decile", "nll")}
    true = np.array(clients.recipe["weights"])
    if "pi" in result.private:
        row |= {
            "l1": l1(result.private["pi"].numpy(), true),
            "l1_equal_shares": l1(np.full_like(true, 1 / true.shape[1]), true),
        }
    if "cluster" in result.server:
        row["cluster_sizes"] = sorted(
            torch.bincount(result.server["cluster"]).tolist(), reverse=True
        )
    row["round_seconds"] = float(np.median(result.history["seconds"]))
    return row


def main() -> None:
    """Runs what is missing, writing each run as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="20 clients, 4 rounds, one rate: shows that it runs; nothing is written",
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--workers", type=int, default=None, help="threads that run clients (default: the cores)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size, rounds = (
        ({"clients": 20, "test": 100}, 4)
        if arguments.quick
        else ({"clients": 300, "test": 2000}, 200)
    )
    rates, seeds = (
        (arguments.rates[-1:], arguments.seeds[:1])
        if arguments.quick
        else (arguments.rates, arguments.seeds)
    )
    saved: dict[str, Any] = (
        json.loads(RESULTS.read_text())
        if RESULTS.exists() and not arguments.quick
        else {"cells": {}}
    )
    environment, clients = report.environment(), bf.data.linear_mixture(**size)
    saved |= {"published": PUBLISHED, "rounds": rounds, "best_single_rule": best_rule(clients)}
    held = bf.data.linear_mixture(**size | {"test": 1}, validation=0.2)

    def keep(key: str, cell: dict[str, Any]) -> None:
        saved["cells"][key] = cell | {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment,
        }
        print(
            key,
            {
                name: value if isinstance(value, list) else round(value, 4)
                for name, value in cell.items()
            },
            flush=True,
        )
        if not arguments.quick:
            report.write_json(RESULTS, saved)

    for method in arguments.methods:
        scores = {}
        for rate in rates:
            key = f"{method}/validation/{rate:g}"
            if key not in saved["cells"]:
                result = run(method, rate, 0, held, rounds, arguments.workers)
                keep(
                    key,
                    {
                        "accuracy": result.predict(held.validation, draws=0).summary(
                            held.validation
                        )["accuracy"]
                    },
                )
            scores[rate] = saved["cells"][key]["accuracy"]
        best = max(scores, key=lambda rate: scores[rate])
        for seed in seeds:
            if f"{method}/{seed}" not in saved["cells"]:
                keep(
                    f"{method}/{seed}",
                    {"rate": best}
                    | measured(
                        run(method, best, seed, clients, rounds, arguments.workers), clients
                    ),
                )


if __name__ == "__main__":
    main()
