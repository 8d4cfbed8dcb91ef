"""Which learning rates are the demo's, and does its result survive other settings?

    python benchmarks/sensitivity.py --rates  # the rates, by NLL on validation data
    python benchmarks/sensitivity.py [--quick]  # the demo's seeds in other settings

In every setting all methods have the same rule of who trains.

Results: benchmarks/results/sensitivity.json.
"""

import argparse
import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import bayesfl as bf
from bayesfl.evaluation import report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sensitivity.json"
example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "pfedvem.py")))
DEMO = example.PRESETS["digits"]
ROUNDS = example.arguments([]).rounds
GRID = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)


def scaled(factor: float) -> Any:
    """The demo's preset with every learning rate times the factor."""
    rates = {name: factor * rate for name, rate in DEMO.rates.items()}
    return replace(DEMO, rates=rates, head_rate=factor * DEMO.head_rate)


SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a third of the rates": (scaled(1 / 3), {}),
    "three times the rates": (scaled(3), {}),
    "five epochs for every body": (replace(DEMO, epochs=DEMO.body_epochs), {}),
    "five times the rounds": (
        replace(DEMO, head_epochs=4, body_epochs=1, epochs=5),
        {"rounds": 5 * ROUNDS},
    ),
    "a cohort of two": (DEMO, {"participation": 0.1}),
}
"""The preset, and options of the run that are not the demo's. The same rates but for the first two:
none is chosen anew.
"""
COLUMNS = [
    report.Column("accuracy", better="higher"),
    report.Column("nll", better="lower"),
    report.Column("ece", better="lower"),
]


def last(name: str, preset: Any, seed: int, validation: float, **options: Any) -> dict[str, Any]:
    """What was measured after the last round of a run; nothing if it diverged."""
    clients = bf.data.concept_drift("digits", clients=20, seed=seed, validation=validation)
    model = preset.model(clients.inputs, clients.classes, seed)
    rounds = options.pop("rounds", ROUNDS)
    try:
        result = bf.simulate(
            example.composed(name, model, preset),
            clients,
            rounds=rounds,
            sampling="fixed",
            train="cohort",
            seed=seed,
            evaluate_every=rounds,
            progress=False,
            **options,
        )
    except bf.DivergenceError:
        return {}
    return result.history[-1]


def chosen(quick: bool) -> dict[str, Any]:
    """NLL on validation data by method, rate and seed, and each method's best rate."""
    options = {"rounds": 2} if quick else {}
    rates, seeds = (GRID[:2], (10,)) if quick else (GRID, (10, 11, 12))
    nll: dict[str, dict[str, list[float]]] = {}
    for name in example.METHODS:
        nll[name] = {}
        for rate in rates:
            preset = replace(DEMO, rates={name: rate})
            rows = [last(name, preset, seed, 0.2, **options) for seed in seeds]
            nll[name][str(rate)] = [row.get("validation_nll", math.inf) for row in rows]
        means = {rate: f"{sum(of) / len(of):.4f}" for rate, of in nll[name].items()}
        print(f"{name}: {means}", flush=True)
    best = {name: float(min(of, key=lambda rate: sum(of[rate]))) for name, of in nll.items()}
    return {"nll": nll, "chosen": best}


def elsewhere(quick: bool) -> dict[str, Any]:
    """The demo's measures by setting, method and seed; of a diverged run none."""
    tables: dict[str, Any] = {}
    for setting, (preset, options) in SETTINGS.items():
        options = options | {"rounds": 2} if quick else options
        rows: dict[str, dict[str, list[float]]] = {}
        for name in example.METHODS:
            found = [last(name, preset, seed, 0.0, **options) for seed in range(1 if quick else 5)]
            rows[example.TITLES[name]] = {
                column.key: [row.get(f"personal_{column.key}", math.nan) for row in found]
                for column in COLUMNS
            }
        tables[setting] = rows
        print(f"{setting}\n{report.table(rows, columns=COLUMNS)}\n", flush=True)
    return {"rows": tables}


def main() -> None:
    """Runs, prints and writes one of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", action="store_true", help="choose the demo's learning rates")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two rounds, one seed: shows that it runs; nothing is written",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    environment = report.environment()
    found = chosen(options.quick) if options.rates else elsewhere(options.quick)
    if not options.quick:
        saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        command = " ".join(["python", *sys.argv])
        part = "rates" if options.rates else "settings"
        saved[part] = {"command": command, "environment": environment, **found}
        report.write_json(RESULTS, saved)


if __name__ == "__main__":
    main()
