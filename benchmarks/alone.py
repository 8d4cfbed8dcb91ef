"""Posteriors of one network, without a federation: the same network and data for each of the
library's, beside laplace-torch.

    python benchmarks/alone.py [--quick]

Handwritten digits (900 to train, 300 to validate, 597 to test), an MLP of 20 hidden units (1,510
weights), the prior N(0, 1) for each weight; three seeds, each with its own split and network. The
MAP is trained with Adam on all rows, and every Laplace approximation is around it. Precisions "on
validation" and the temperature are chosen by the validation rows; the other posteriors do not read
them. Seconds are of one thread. Results: benchmarks/results/alone.json.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import script
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesfl as bf
from bayesfl import posteriors
from bayesfl.base.random import Purpose, generator
from bayesfl.data.recipes.torchvision import torchvision
from bayesfl.posteriors.prior_precision import by_validation

SEEDS = 3
PRIOR = 1.0


@dataclass(frozen=True)
class Problem:
    """The data of one seed, the network before training, and how much of everything is done."""

    x: Tensor
    y: Tensor
    held: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    model: nn.Module
    quick: bool

    def steps(self, count: int) -> int:
        """Return a number of steps or draws; a few where it is quick."""
        return 5 if self.quick else count


Predict = Callable[[Tensor], Tensor]
"""Function from inputs [N, 64] to class probabilities [N, 10]."""


def problem(seed: int, *, quick: bool) -> Problem:
    """Return the data and the network of one seed."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = generator(seed, Purpose.SPLIT).permutation(len(x))
    x = torch.from_numpy(x[order] / 16).float()
    y = torch.from_numpy(y[order])
    parts = [slice(0, 100 if quick else 900), slice(900, 1200), slice(1200, None)]
    train, held, test = ((x[part], y[part]) for part in parts)
    return Problem(*train, held, test, bf.models.mlp(64, hidden=20, outputs=10, seed=seed), quick)


def trained(p: Problem) -> nn.Module:
    """Return the network at its MAP: an ensemble of one."""
    steps = p.steps(1000)
    found = posteriors.ensemble(p.model, p.x, p.y, precision=PRIOR, members=1, steps=steps)
    torch.nn.utils.vector_to_parameters(found.draws[0, 0], found.model.parameters())
    return found.model.requires_grad_(True)


def of(fitted: Any, **options: Any) -> Predict:
    """Return a posterior's predictions as probabilities."""
    return lambda x: fitted.predict(x, **options)["probs"]


def alone(p: Problem, model: nn.Module) -> Predict:
    return lambda x: model(x).detach().softmax(-1)


def tempered(p: Problem, model: nn.Module) -> Predict:
    x, y = p.held
    temperature = bf.calibration.temperature(model(x), y)
    return lambda x: (model(x).detach() / temperature).softmax(-1)


def laplace(structure: Any, *, validation: bool = False, pattern: str = "*") -> Any:
    """Return how a Laplace approximation is made: at the prior's precision, or at one chosen on
    validation.
    """

    def fit(p: Problem, model: nn.Module) -> Predict:
        fitted = posteriors.Laplace.fit(
            model, p.x, precision=PRIOR, structure=structure, pattern=pattern
        )
        return of(by_validation(fitted, p.x, *p.held) if validation else fitted)

    return fit


def laplace_torch(structure: str, method: str | None = None) -> Any:
    """Return how laplace-torch's approximation is made, at the prior's precision or tuned by one of
    its own ways.
    """

    def fit(p: Problem, model: nn.Module) -> Predict:
        torchvision()  # which its import needs
        theirs = importlib.import_module("laplace").Laplace(
            nn.Sequential(model.get_submodule("body"), model.get_submodule("head")),
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            prior_precision=PRIOR,
        )
        theirs.fit(DataLoader(TensorDataset(p.x, p.y), batch_size=100))
        if method == "gridsearch":
            held = DataLoader(TensorDataset(*p.held), batch_size=100)
            theirs.optimize_prior_precision(method=method, val_loader=held, link_approx="probit")
        elif method is not None:
            theirs.optimize_prior_precision(method=method)
        return lambda x: theirs(x, link_approx="probit").detach()

    return fit


def mean_field(p: Problem, model: nn.Module) -> Predict:
    return of(posteriors.MeanField.fit(p.model, p.x, p.y, precision=PRIOR, steps=p.steps(3000)))


def full_gaussian(p: Problem, model: nn.Module) -> Predict:
    fitted = posteriors.FullGaussian.fit(p.model, p.x, p.y, precision=PRIOR, steps=p.steps(800))
    return of(fitted)


def sgld(p: Problem, model: nn.Module) -> Predict:
    options = {"draws": p.steps(100), "warmup": p.steps(4000), "thin": p.steps(40)}
    return of(posteriors.sgld(model, p.x, p.y, precision=PRIOR, rate=0.05, **options))


def sghmc(p: Problem, model: nn.Module) -> Predict:
    options = {"draws": p.steps(100), "warmup": p.steps(4000), "thin": p.steps(40)}
    return of(posteriors.sghmc(model, p.x, p.y, precision=PRIOR, rate=0.02, **options))


def cold(p: Problem, model: nn.Module) -> Predict:
    options = {"draws": p.steps(100), "warmup": p.steps(4000), "thin": p.steps(40)}
    drawn = posteriors.sghmc(
        model, p.x, p.y, precision=PRIOR, rate=0.02, temperature=0.1, **options
    )
    return of(drawn)


def ensemble(p: Problem, model: nn.Module) -> Predict:
    return of(posteriors.ensemble(p.model, p.x, p.y, precision=PRIOR, steps=p.steps(1000)))


ROWS: dict[str, tuple[str, Callable[[Problem, nn.Module], Predict]]] = {
    "the MAP alone": ("-", alone),
    "the MAP, one temperature": ("on validation", tempered),
    "`Laplace`, all weights": ("1", laplace("full")),
    "`Laplace`, all weights, tuned": ("on validation", laplace("full", validation=True)),
    "`Laplace`, Kronecker factors": ("1", laplace("kfac")),
    "`Laplace`, Kronecker factors, tuned": ("on validation", laplace("kfac", validation=True)),
    "`Laplace`, last layer, tuned": (
        "on validation",
        laplace("full", validation=True, pattern="head.*"),
    ),
    "laplace-torch, all weights": ("1", laplace_torch("full")),
    "laplace-torch, Kronecker factors": ("1", laplace_torch("kron")),
    "laplace-torch, Kronecker factors, evidence": ("by evidence", laplace_torch("kron", "marglik")),
    "laplace-torch, Kronecker factors, tuned": (
        "on validation",
        laplace_torch("kron", "gridsearch"),
    ),
    "`MeanField`": ("1", mean_field),
    "`FullGaussian`": ("1", full_gaussian),
    "`sgld`": ("1", sgld),
    "`sghmc`": ("1", sghmc),
    "`sghmc`, temperature 0.1": ("1", cold),
    "`ensemble` of five": ("1", ensemble),
}


def measured(p: Problem, predict: Predict) -> dict[str, float]:
    """Return the measures of predictions on the test rows, and the seconds that they take."""
    x, y = p.test
    start = time.perf_counter()
    probs = predict(x)
    seconds = time.perf_counter() - start
    measures = {name: getattr(bf.metrics, name) for name in ("accuracy", "nll", "ece")}
    found = {name: float(measure(probs, y)) for name, measure in measures.items()}
    return {**found, "predict_seconds": seconds}


def main() -> None:
    """Measure every row on every seed, and write the results."""
    given = script.arguments(__doc__)
    made = script.made()
    rows: dict[str, dict[str, Any]] = {}
    for seed in range(1 if given.quick else SEEDS):
        p = problem(seed, quick=given.quick)
        start = time.perf_counter()
        model = trained(p)
        training = time.perf_counter() - start
        for name, (precision, fit) in ROWS.items():
            start = time.perf_counter()
            predict = fit(p, model)
            seconds = training if fit is alone else time.perf_counter() - start
            found = {"fit_seconds": seconds, **measured(p, predict)}
            row = rows.setdefault(name, {"precision": precision, "seeds": []})
            row["seeds"].append(found)
            told = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
            print(f"seed {seed}, {name}: {told}", flush=True)
        if not given.quick:
            script.write("alone", rows=rows, **made)


if __name__ == "__main__":
    main()
