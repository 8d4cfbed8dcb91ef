"""Fixtures that several files of tests here share."""

from pathlib import Path

import pytest

import bayesfl as bf
from tests.cases import federation


@pytest.fixture(scope="module")
def result():
    clients = federation()
    model = bf.models.mlp(8, hidden=8, outputs=3)
    algorithm = bf.algorithms.pfedvem(model, init_scale=0.5, head_epochs=4, body_epochs=1)
    return bf.simulate(algorithm, clients, rounds=2, progress=False, evaluate_every=None)


@pytest.fixture(scope="module")
def saved(clients, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model = bf.models.mlp(8, hidden=8, outputs=3)
    bf.simulate(
        bf.algorithms.pfedvem(model, head_epochs=2, body_epochs=1),
        clients,
        rounds=2,
        progress=False,
    ).save(folder)
    return folder
