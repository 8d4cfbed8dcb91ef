"""Mistakes that people make with a study, each with the error that it gets before anything is
trained.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.optim import SGD
from tests.study.made import DATA, one

RATES = [SGD(0.1), SGD(0.2)]
METHODS = {"Fac": bf.algorithms.fedsi_fac, "FT": bf.algorithms.irm_ft}
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: one(particpation=0.5), TypeError, "'particpation'; did you mean participation"),
    (lambda: one(seed=3), ValueError, "seed belongs to a single cell; a study has .* seeds"),
    (lambda: one(optimizer=SGD(0.1)), TypeError, "'optimizer'"),
    (lambda: one(evaluate=2), TypeError, "'evaluate'; did you mean evaluate_every"),
    (lambda: one(checkpoint="x"), ValueError, "checkpoint belongs to a single cell"),
    (lambda: one(seeds=[0.5, 0.7]), ValueError, "each of seeds must be a whole number, got 0.5"),
    (lambda: one(seeds=[-1]), ValueError, "each of seeds must be at least 0"),
    (lambda: one(seeds=[True]), ValueError, "each of seeds must be a whole number"),
    (lambda: one(seeds="012"), ValueError, "each of seeds must be a whole number, got '0'"),
    (lambda: one(seeds=torch.arange(2.0)), ValueError, "each of seeds must be a whole number"),
    (lambda: one(lr=0.1), TypeError, "'lr'"),
    (lambda: one(callbacks=[]), TypeError, "did you mean on_round="),
    (lambda: one(random_state=1), TypeError, "did you mean seed"),
    (lambda: one(options={"FedAvg": {"lr": [0.1]}}), ValueError, r"optimiser=bf.optim.SGD\(lr\)"),
    (lambda: one(rounds=0), ValueError, "rounds must be at least 1"),
    (
        lambda: one(methods={"A": bf.algorithms.fedavg(nn.Linear(2, 2))}),
        ValueError,
        r"methods\['A'\] must be a function of the network.*, got Algorithm",
    ),
    (
        lambda: one(methods={"A": "fedavg"}),
        ValueError,
        r"methods\['A'\] must be a function of the network.*, got str",
    ),
    (lambda: one(data=DATA(seed=0)), ValueError, "data must be a function.*lambda seed"),
    (lambda: one(model=nn.Linear(2, 2)), ValueError, "model must be a function.*lambda clients"),
    (lambda: one(options={"FedAvg": {"epochs": []}}), ValueError, r"\['epochs'\] must be a list"),
    (lambda: one(options={"FedAvg": {"epochs": 5}}), ValueError, r"\['epochs'\] must be a list"),
    (lambda: one(options={"FedAvg": {"epoch": [5]}}), ValueError, "'epoch'.*'epochs'"),
    (lambda: one(options={"Fedavg": {"epochs": [5]}}), ValueError, "'Fedavg'.*'FedAvg'"),
    *(
        (
            lambda name=name, option=option: one(methods=METHODS, options={name: {option: [1, 2]}}),
            ValueError,
            f"{name} has not an option {option!r}.*{right!r}",
        )
        for name, option, right in (
            ("Fac", "epoch", "epochs"),
            ("Fac", "shares", "share"),
            ("FT", "gama", "gamma"),
            ("FT", "personal_step", "personal_steps"),
        )
    ),
    (
        lambda: one(methods=METHODS, options={"*": {"optimizer": RATES}}),
        ValueError,
        "no method has an option 'optimizer'.*'optimiser'",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_a_mistake_is_named(call: Callable[[], Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        call()


def test_variants_have_the_options_of_their_method(tmp_path: Path):
    study = one(
        methods=METHODS, seeds=[0], options={"*": {"optimiser": [SGD(0.1)]}, "Fac": {"epochs": [1]}}
    )
    assert study.grid == {
        "Fac": {"optimiser": [SGD(0.1)], "epochs": [1]},
        "FT": {"optimiser": [SGD(0.1)]},
    }


def test_whole_numbers_of_any_kind_are_seeds():
    study = one(seeds=np.arange(2, dtype=np.int32))
    assert [(cell.seed, type(cell.seed)) for cell in study.cells] == [(0, int), (1, int)]
    assert [cell.seed for cell in one(seeds=(s for s in (4, 4, np.uint8(2)))).cells] == [4, 2]


def test_a_folder_that_cannot_be_written_is_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from bayesfl.study.cells import Cell

    monkeypatch.setattr(Cell, "_ran", lambda *arguments: pytest.fail("trained"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        one().run(tmp_path / "file" / "runs", progress=False)


def private(**changes: Any) -> bf.Study:
    noise = bf.ClientPrivacy(clip=1.0, noise_multiplier=2.0, delta=1e-3)
    return one(data=partial(DATA, clients=8), aggregation=noise, participation=0.5, **changes)


def test_a_private_study_does_not_choose_and_prints_epsilon(tmp_path: Path):
    with pytest.warns(UserWarning, match="ClientPrivacy no options are chosen"):
        study = private(options={"FedAvg": {"epochs": [1, 2]}})
    table = study.run(tmp_path / "grid", progress=False)
    for ask in (table.chosen, table.summary, lambda: table.chosen("validation_nll", at="best")):
        with pytest.raises(ValueError, match="ClientPrivacy no options are chosen"):
            ask()
    plain = private().run(tmp_path / "plain", progress=False)
    spent = [row.record.history["epsilon"][-1] for row in plain.rows]
    assert f"epsilon {max(spent):.3g} for each run, {sum(spent):.3g} for all 2" in str(plain)
    plain.report(tmp_path / "report.html")
    assert f"epsilon {max(spent):.3g} for each run" in (tmp_path / "report.html").read_text()
