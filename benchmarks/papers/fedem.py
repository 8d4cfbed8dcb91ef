"""The synthetic row of FedEM's table 2: 300 clients, mixtures of three linear rules, 200 rounds.

    python benchmarks/papers/fedem.py [--quick] [--jobs N]

Each method's learning rate is the best of the grid on data of the same clients that are used for
nothing else (the same sizes, mixture weights and rules, other examples, but for the first client's,
which are the same; a fifth is held back to choose), seed 0; then it is trained once for each seed
of starts and batches. The clients' sizes are those of the authors' seed, with 2,000 test examples
of each client. Momentum, where a method has it, is kept between rounds, as in the authors' code;
rates fall tenfold at half and at three quarters of the rounds, but for pFedMe's. Results:
benchmarks/results/papers/fedem.json; `python docs/tables.py` writes the page from them.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

import bayesfl as bf
from bayesfl import Descend
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Bernoulli
from bayesfl.optim import SGD, multistep

sys.path.append(str(Path(__file__).parents[1]))
import script

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
shown = script.names_of("examples/fedem.py")


def kept(algorithm: bf.Algorithm) -> bf.Algorithm:
    """The same with momentum that a client keeps from round to round."""
    phases = [
        replace(phase, persist="velocity") if isinstance(phase, Descend) else phase
        for phase in algorithm.phases
    ]
    return replace(algorithm, phases=tuple(phases))


def proximal(model: torch.nn.Module, rate: float) -> bf.Algorithm:
    """The authors' pFedMe: FedProx that goes on from a client's own model, pulled to the mean."""
    algorithm = bf.algorithms.fedprox(model, mu=1.0, optimiser=PLAIN(multistep(rate)), **ONE)
    return replace(algorithm, blocks={"w": replace(algorithm.blocks["w"], keep=True)})


def heavy(method: Any, **options: Any) -> Make:
    """A method whose steps have momentum that is kept."""
    options |= ONE
    return lambda model, rate: kept(method(model, optimiser=HEAVY(multistep(rate)), **options))


METHODS: dict[str, Make] = {
    "Local": heavy(bf.algorithms.local),
    "FedAvg": heavy(bf.algorithms.fedavg),
    "FedProx": lambda model, rate: bf.algorithms.fedprox(
        model, mu=0.1, optimiser=PLAIN(multistep(rate)), **ONE
    ),
    "FedAvg+": heavy(bf.algorithms.fedavg_ft, finetune_epochs=1),
    "Clustered FL": heavy(bf.algorithms.clustered),
    "pFedMe": lambda model, rate: bf.algorithms.pfedme(
        model, lr=rate, personal_optimiser=PLAIN(rate), **MOREAU
    ),
    "pFedMe, proximal SGD": proximal,
    "FedEM": heavy(bf.algorithms.fedem),
    "D-FedEM": heavy(bf.algorithms.d_fedem),
}


def l1(learned: np.ndarray, true: np.ndarray) -> float:
    """Mean L1 distance of clients' weights [J, M], in the one best order of components."""
    return shown.distance(shown.matched(learned, true), true)


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

    how: dict[str, Any] = {"method": "Nelder-Mead", "options": {"xatol": 1e-8, "fatol": 1e-10}}
    starts = [np.ones(len(rules)), *np.eye(len(rules))]
    return 1 - min(float(minimize(wrong, start, **how).fun) for start in starts)


def learned(result: Result) -> dict[str, Any]:
    true, row = np.array(result.data.recipe["weights"]), {}
    if "pi" in result.private:
        row["l1"] = l1(result.private["pi"].numpy(), true)
        row["l1_equal_shares"] = l1(np.full_like(true, 1 / true.shape[1]), true)
    if "cluster" in result.server:
        sizes = torch.bincount(result.server["cluster"]).tolist()
        row["cluster_sizes"] = sorted(sizes, reverse=True)
    return row


def results(folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    """Choose each method's rate, and train it with every seed."""
    rounds, many, test = (4, 20, 100) if quick else (200, 300, 2000)
    clients = bf.data.linear_mixture(clients=many, test=test)
    held = bf.data.linear_mixture(clients=many, test=1, validation=0.2)
    settings = {"rounds": rounds, "train": "cohort", "sampling": "fixed", "evaluate_every": rounds}
    settings["model"] = lambda clients: torch.nn.Linear(clients.inputs[0], 1)
    grid = {"*": {"rate": RATES[-1:] if quick else RATES}}
    study = bf.Study(data=lambda seed: held, methods=METHODS, options=grid, **settings)
    tried = study.run(folder, n_jobs=jobs)
    best = tried.chosen("validation_accuracy").options
    methods = {name: partial(make, **best[name]) for name, make in METHODS.items()}
    seeds = (0,) if quick else (0, 1, 2)
    study = bf.Study(data=lambda seed: clients, methods=methods, seeds=seeds, **settings)
    table = study.run(folder, n_jobs=jobs, keep="result")
    cells = {}
    for row in tried.rows:
        if row.record.error is None:
            accuracy = row.measures("last", None)["validation_accuracy"]
            key = f"{row.method}/validation/{row.options['rate']:g}"
            cells[key] = script.cell(row, accuracy=accuracy)
    for row in table.rows:
        found = row.measures("last", None)
        quality = {key: found[f"personal_{key}"] for key in ("accuracy", "accuracy_decile", "nll")}
        more = learned(table.result(row.method, row.seed))
        more["round_seconds"] = float(np.median(row.record.history["seconds"]))
        made = script.cell(row, **best[row.method], **quality, **more)
        cells[f"{row.method}/{row.seed}"] = made
    known = {"published": PUBLISHED, "rounds": rounds, "best_single_rule": best_rule(clients)}
    return {**known, "cells": cells}


if __name__ == "__main__":
    script.main(__doc__, "papers/fedem", results)
