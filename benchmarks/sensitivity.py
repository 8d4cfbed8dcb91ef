"""Which learning rates are the demo's, and does its result survive other settings?

    python benchmarks/sensitivity.py --rates  # the rates, by NLL on validation data
    python benchmarks/sensitivity.py [--quick]  # the demo's seeds in other settings

In every setting all methods have the same rule of who trains.

Results: benchmarks/results/sensitivity.json.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import script

import bayesfl as bf
from bayesfl.evaluation import report
from bayesfl.optim import SGD

example = script.names_of("examples/pfedvem.py")
DEMO = example.PRESETS["digits"]
GRID = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
DATA = partial(bf.data.concept_drift, "digits", clients=20)


def scaled(factor: float) -> Any:
    """Return the demo's preset with every learning rate times the factor."""
    rates = {name: factor * rate for name, rate in DEMO.rates.items()}
    return replace(DEMO, rates=rates, head_rate=factor * DEMO.head_rate)


FEWER_EPOCHS = replace(DEMO, head_epochs=4, body_epochs=1, epochs=5)
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a third of the rates": (scaled(1 / 3), {}),
    "three times the rates": (scaled(3), {}),
    "five epochs for every body": (replace(DEMO, epochs=DEMO.body_epochs), {}),
    "five times the rounds": (FEWER_EPOCHS, {"rounds": 5 * example.ROUNDS}),
    "a cohort of two": (DEMO, {"participation": 0.1}),
}
"""The preset, and options of the run: the demo's rates but for the first two."""
COLUMNS = [report.Column(key, better=report.better(key)) for key in ("accuracy", "nll", "ece")]


def chosen(folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    """Return NLL on validation data by method, rate and seed, and each method's best rate."""
    rates = [SGD(rate, momentum=0.9) for rate in (GRID[:2] if quick else GRID)]
    names = {example.TITLES[name]: name for name in example.METHODS}
    rounds = 2 if quick else example.ROUNDS
    grid = {
        title: {"optimiser" if name in example.WHOLE else "body_optimiser": rates}
        for title, name in names.items()
    }
    seeds, held_back = (10,) if quick else (10, 11, 12), partial(DATA, validation=0.2)
    settings = {"seeds": seeds, "rounds": rounds, "evaluate_every": rounds}
    study = example.comparison(DEMO, data=held_back, options=grid, **settings)
    table = study.run(folder, n_jobs=jobs)
    nll: dict[str, dict[str, list[float]]] = {name: {} for name in names.values()}
    for run in table.rows:
        (optimiser,) = run.options.values()
        found = run.measures("last", None).get("validation_nll", math.nan)
        nll[names[run.method]].setdefault(str(optimiser.rate), []).append(found)
    best = table.chosen("validation_nll")
    print(best)
    rate_of = {names[title]: next(iter(of.values())).rate for title, of in best.options.items()}
    return {"nll": nll, "chosen": rate_of}


def elsewhere(folder: Path, *, quick: bool, jobs: int) -> dict[str, Any]:
    """Return the demo's measures by setting, method and seed, null where a run failed."""
    tables: dict[str, Any] = {}
    for setting, (preset, options) in SETTINGS.items():
        rounds = 2 if quick else options.get("rounds", example.ROUNDS)
        settings = {**options, "rounds": rounds, "evaluate_every": rounds}
        seeds = range(1 if quick else 5)
        table = example.comparison(preset, data=DATA, seeds=seeds, **settings)
        frame = table.run(folder, n_jobs=jobs).to_pandas()
        tables[setting] = {
            title: {column.key: runs[f"personal_{column.key}"].tolist() for column in COLUMNS}
            for title, runs in frame.groupby("method", sort=False)
        }
        print(f"{setting}\n{report.table(tables[setting], columns=COLUMNS)}\n", flush=True)
    return {"rows": tables}


def main() -> None:
    rates: dict[str, Any] = {"action": "store_true", "help": "choose the demo's learning rates"}
    given = script.arguments(__doc__, rates=rates, jobs=script.JOBS)
    made = script.made()
    part, study = ("rates", chosen) if given.rates else ("settings", elsewhere)
    with script.runs("sensitivity", quick=given.quick) as folder:
        found = study(folder, quick=given.quick, jobs=given.jobs)
    if not given.quick:
        script.write("sensitivity", **{part: {**made, **found}})


if __name__ == "__main__":
    main()
