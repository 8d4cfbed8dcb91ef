"""Ordinary mistakes: what a newcomer mistypes is refused at once, by an error that names the
argument and the remedy.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import bayesfl as bf
from bayesfl.base.surveys import NotNegative, Semidefinite, checked

X, Y = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
HOLES = X.masked_fill(torch.arange(90).reshape(30, 3) == 40, torch.nan)
NUMBERS: dict[str, Any] = {"x": [0.0] * 20 + [1.0] * 20, "y": [0, 1] * 10 + [1] * 20}
FITS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mean_field": (bf.posteriors.MeanField.fit, {"steps": 2}),
    "full_gaussian": (bf.posteriors.FullGaussian.fit, {"steps": 2}),
    "laplace": (bf.posteriors.Laplace.fit, {}),
    "sgld": (bf.posteriors.sgld, {"draws": 2, "warmup": 2}),
    "sghmc": (bf.posteriors.sghmc, {"draws": 2, "warmup": 2}),
    "ensemble": (bf.posteriors.ensemble, {"members": 2, "steps": 2}),
    "nuts": (bf.posteriors.nuts, {"draws": 2, "warmup": 2, "chains": 1}),
}


@cache
def model() -> nn.Module:
    return bf.models.mlp(3, hidden=4, outputs=2)


@cache
def clients() -> bf.data.FederatedData:
    return bf.data.from_arrays([X, X], [Y, Y])


def method(**options: Any) -> bf.Algorithm:
    return bf.algorithms.fedavg(model(), epochs=1, **options)


def simulate(*more: Any, **options: Any) -> Any:
    return bf.simulate(method(), clients(), *more, **{"rounds": 1, "progress": False, **options})


def weight_normed() -> Any:
    network = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), parametrizations.weight_norm(nn.Linear(4, 2))
    )
    made = bf.algorithms.fedavg(network, epochs=1)
    return bf.simulate(made, clients(), rounds=1, progress=False).heads()


def frame(**more: Any) -> pd.DataFrame:
    return pd.DataFrame(NUMBERS | more)


def twice(column: str) -> pd.DataFrame:
    return pd.concat([frame(h="a"), frame()[[column]]], axis=1)


def tables(table: Any = None, **options: Any) -> Any:
    table = frame() if table is None else table
    return bf.stats.tables({"a": table, "b": table}, **{"outcome": "y", "terms": ["x"], **options})


def glm(*more: Any, **options: Any) -> Any:
    return bf.stats.glm(tables(), *more, **{"family": "log_binomial", **options})


def cox(**options: Any) -> Any:
    return bf.stats.cox(tables(), **options)


algorithms, data, plots, posteriors = bf.algorithms, bf.data, bf.plots, bf.posteriors
Case = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
OPTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "fedavg(lr)": (lambda: method(lr=0.1), "optimiser=bf.optim.SGD(lr)"),
    "fedavg(epoch)": (lambda: algorithms.fedavg(model(), epoch=3), "did you mean epochs?"),
    "fedavg(batchsize)": (lambda: method(batchsize=3), "did you mean batch_size?"),
    "fedavg(optimizer)": (lambda: method(optimizer=None), "optimiser"),
    "fedavg(momentum)": (lambda: method(momentum=0.9), "optimiser=bf.optim.SGD(rate, momentum)"),
    "fedavg(zzz)": (lambda: method(zzz=1), "it has model, epochs, batch_size"),
    "fedpac(lr)": (
        lambda: algorithms.fedpac(model(), lr=0.1),
        "head_optimiser=bf.optim.SGD(lr) or body_optimiser=bf.optim.SGD(lr)",
    ),
    "fedsi_fac(epoch)": (lambda: algorithms.fedsi_fac(model(), epoch=1), "epochs"),
    "SGD(lr)": (lambda: bf.optim.SGD(lr=0.1), "did you mean rate?"),  # type: ignore[call-arg]
    "Adam(beta1)": (lambda: bf.optim.Adam(0.1, beta1=0.9), "betas"),  # type: ignore[call-arg]
    "mlp(num_classes)": (lambda: bf.models.mlp(3, num_classes=2), "outputs"),  # type: ignore[call-arg]
    "mlp(output)": (lambda: bf.models.mlp(3, output=2), "outputs"),  # type: ignore[call-arg]
    "simulate(particpation)": (lambda: simulate(particpation=0.5), "participation"),
    "simulate(fraction)": (lambda: simulate(fraction=0.5), "participation"),
    "simulate(num_rounds)": (lambda: simulate(num_rounds=3), "rounds"),
    "simulate(callbacks)": (lambda: simulate(callbacks=[]), "on_round=[...]"),
    "simulate(random_state)": (lambda: simulate(random_state=0), "seed"),
    "simulate(verbose)": (lambda: simulate(verbose=True), "progress"),
    "simulate(secure)": (
        lambda: simulate(secure=True),
        "did you mean aggregation=bf.SecureSum()?",
    ),
    "iid(num_clients)": (lambda: data.iid("digits", num_clients=3), "clients"),  # type: ignore[call-arg]
    "dirichlet(concentration)": (
        lambda: data.dirichlet("digits", clients=3, concentration=1.0),  # type: ignore[call-arg]
        "alpha",
    ),
    "from_arrays(client_id)": (lambda: data.from_arrays(X, Y, client_id=[0]), "client_ids"),  # type: ignore[call-arg]
    "from_frame(clients_column)": (
        lambda: data.from_frame(frame(), target="y", clients_column="x"),  # type: ignore[call-arg]
        "client",
    ),
    "from_datasets(class_name)": (lambda: data.from_datasets([], class_name=[]), "class_names"),
    "Laplace.fit(structre)": (
        lambda: posteriors.Laplace.fit(model(), X, precision=1.0, structre="full"),  # type: ignore[call-arg]
        "structure",
    ),
    "MeanField.fit(lr)": (
        lambda: posteriors.MeanField.fit(model(), X, Y, precision=1.0, lr=0.1),  # type: ignore[call-arg]
        "optimiser=bf.optim.SGD(lr)",
    ),
    "nuts(prior_precision)": (
        lambda: posteriors.nuts(model(), X, Y, prior_precision=1.0),  # type: ignore[call-arg]
        "precision",
    ),
    "glm(famly)": (lambda: glm(famly="binomial"), "family"),
    "tables(outcme)": (lambda: tables(outcme="y"), "outcome"),
    "cox(evnt)": (lambda: cox(time="x", evnt="y"), "event"),
    "cox(duration)": (lambda: cox(duration="x", event="y"), "did you mean time?"),
    "cox(regularisation)": (
        lambda: cox(time="x", event="y", regularisation=1),
        "; it has sites, time",
    ),
    "Policy(min_row)": (lambda: bf.stats.Policy(min_row=5), "min_rows"),  # type: ignore[call-arg]
    "Admission(min_client)": (
        lambda: bf.Admission("skip", min_client=2),  # type: ignore[call-arg]
        "min_clients",
    ),
    "Block(kep)": (lambda: bf.Block("body.*", kep=True), "keep"),  # type: ignore[call-arg]
    "Normal(mean)": (lambda: bf.priors.Normal(mean=0.0, variance=1.0), "centre"),  # type: ignore[call-arg]
    "Conformal(alpha)": (lambda: bf.calibration.Conformal(alpha=0.1), "level"),  # type: ignore[call-arg]
    "EarlyStopping(patiance)": (
        lambda: bf.callbacks.EarlyStopping("personal_nll", patiance=3),  # type: ignore[call-arg]
        "patience",
    ),
    "server_app(client)": (lambda: bf.flower.server_app(method(), client=3), "clients"),
    "hold_out(sed)": (lambda: clients().hold_out(1, sed=1), "seed"),  # type: ignore[call-arg]
    "learning_curves(mtric)": (lambda: plots.learning_curves({}, mtric="nll"), "metric"),  # type: ignore[call-arg]
}
MISTAKES: dict[str, Case] = {
    **{f"option: {name}": (call, TypeError, (near,)) for name, (call, near) in OPTIONS.items()},
    **{
        f"arrays: {name}": (
            partial(fit, model(), X.numpy(), Y.numpy(), precision=1.0, **more),
            TypeError if name == "laplace" else ValueError,
            ("x", "ndarray", "tensor"),
        )
        for name, (fit, more) in FITS.items()
    },
    **{
        f"exchanged: {name}": (
            partial(fit, model(), Y, X, precision=1.0, **more),
            ValueError,
            ("x holds torch.int64", "exchanged"),
        )
        for name, (fit, more) in FITS.items()
    },
    **{
        f"NaN in x: {name}": (
            partial(fit, model(), HOLES, Y, precision=1.0, **more),
            ValueError,
            ("1 of 30",) if name == "laplace" else ("NaN in x",),
        )
        for name, (fit, more) in FITS.items()
    },
    "NaN in batches": (
        lambda: posteriors.sgld(model(), [(X, Y), (HOLES, Y)], precision=1.0),
        ValueError,
        ("NaN in x", "leave these rows out"),
    ),
    "NaN in y": (
        lambda: posteriors.MeanField.fit(
            nn.Linear(3, 1), X, HOLES[:, 1], precision=1.0, likelihood=bf.likelihoods.Gaussian()
        ),
        ValueError,
        ("NaN in y",),
    ),
    "heads of a weight norm": (weight_normed, ValueError, ("nn.Linear", "remove_parametrizations")),
    "from_arrays(test=0.2)": (
        lambda: data.from_arrays([X], [Y], test=0.2),  # type: ignore[arg-type]
        TypeError,
        ("test", "test_share="),
    ),
    "split(head='fc')": (
        lambda: bf.models.split(model(), head="fc"),
        AttributeError,
        ("`fc`",),
    ),
    "split(head='hed')": (
        lambda: bf.models.split(model(), head="hed"),
        AttributeError,
        ("`hed`",),
    ),
    "separated at the log link": (glm, ValueError, ("separate", "family='poisson'", "sandwich")),
    "separated under a prior": (lambda: glm(prior=2.5), ValueError, ("separate", "'poisson'")),
    "a threshold at the log link": (
        lambda: bf.stats.glm(
            tables(frame(x=np.arange(40.0), y=[0] * 10 + [0, 1] * 10 + [1] * 10)),
            family="log_binomial",
        ),
        ValueError,
        ("separate", "'poisson'"),
    ),
    "a term twice": (lambda: tables(twice("x")), ValueError, ("several columns 'x'", "rename one")),
    "an outcome twice": (lambda: tables(twice("y")), ValueError, ("several columns 'y'",)),
    "a column of a frame twice": (
        lambda: data.from_frame(twice("x"), client="h", target="y"),
        ValueError,
        ("several columns", "'x'"),
    ),
    "a frame in place of sites": (
        lambda: bf.stats.glm(frame(), family="binomial"),  # type: ignore[arg-type]
        TypeError,
        ("sites", "bf.stats.tables({site: frame}"),
    ),
    "weights below 0": (
        lambda: tables(frame(w=-1.0), probability_weights="w"),
        ValueError,
        ("weights <= 0", "'w'"),
    ),
    "with_heads(model)": (
        lambda: bf.with_heads(model()),  # type: ignore[arg-type]
        TypeError,
        ("method", "bf.algorithms.fedavg(model)"),
    ),
    "measures=[f]": (
        lambda: simulate(measures=[bf.metrics.accuracy]),
        TypeError,
        ("measures", "{name: function}"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_helps(name: str):
    call, error, words = MISTAKES[name]
    if name.endswith(": nuts"):
        pytest.importorskip("pyro")
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("shape", "answer"),
    [
        (NotNegative((2,)), [1.0, -1.0]),
        (Semidefinite((2, 2)), [[-1.0, 0.0], [0.0, 1.0]]),
        (Semidefinite((2, 2)), [[1.0, 2.0], [2.0, 1.0]]),  # with a positive diagonal
    ],
)
def test_a_site_that_is_wrong_is_named(shape: Any, answer: Any):
    """Weights below 0 and a Hessian that is no sum over rows, before they enter a sum."""
    with pytest.raises(ValueError, match="site 'a' contains numbers in 'h' that are negative"):
        checked({"h": torch.tensor(answer)}, {"h": shape}, "site 'a'")


def test_rounding_makes_no_matrix_wrong():
    """Nor are matrices without rows refused, or several at once."""
    root = torch.randn(3, 2, dtype=torch.float64)
    for t in (
        root @ root.T,
        torch.zeros(0, 0),
        torch.stack([root @ root.T] * 2),
        torch.zeros(2, 2),
    ):
        checked({"h": t}, {"h": Semidefinite(t.shape)}, "an answer")


def test_what_a_model_takes_is_not_refused():
    """NaN that a forward reads as missing, and one number a row."""

    class Filled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.nan_to_num())

    fitted = posteriors.MeanField.fit(Filled(3, 2), HOLES, Y, precision=1.0, steps=2)
    assert fitted.history.isfinite().all()
    assert data.from_arrays([Y], [X[:, :1]]).outputs == 1
    assert data.from_arrays([Y[:, None]], [X]).outputs == 3
