"""Ten models beside NUTS on the pooled rows; see `references`."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import bayesfl as bf
from tests.pyro.models import MODELS
from tests.pyro.references import PATH

REFERENCES: dict[str, Any] = json.loads(PATH.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name in REFERENCES])
def test_means_and_deviations_are_those_of_nuts(name: str):
    """Shared parameters and sites' own: means within .1 standard deviations, and these within a
    tenth, as some thousand dependent draws know them.
    """
    model, shared, rows = MODELS[name]
    fit = bf.pyro.fit(model, rows, shared=shared)
    found = dict(fit.draws)
    found |= {f"{site}.{key}": t for site in rows for key, t in fit.local(site).items()}
    for key, wanted in REFERENCES[name].items():
        mean, sd = (torch.tensor(wanted[part]).double() for part in ("mean", "sd"))
        free = sd > 1e-6  # as of a Cholesky factor's corner
        apart = (found[key].mean(0) - mean) / sd
        assert float(apart[free].abs().max()) < 0.1, key
        ratio = (found[key].std(0) / sd)[free]
        assert 0.9 < float(ratio.min()), key
        assert float(ratio.max()) < 1.1, key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["centred", "layer"])
def test_secure_sums_are_the_same(name: str):
    """Of a model with own effects, and of one whose sites have none."""
    model, shared, rows = MODELS[name]
    fits = [
        bf.pyro.fit(model, rows, shared=shared, aggregation=aggregation)
        for aggregation in (None, bf.SecureSum(range=2.0**26))
    ]
    assert np.allclose(*(fit.table() for fit in fits), rtol=1e-3, atol=1e-3)
