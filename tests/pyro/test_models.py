"""Ten models beside NUTS on the pooled rows; see `references`.

BAYESFL_DURABILITY=full fits all ten; otherwise those stay out whose statements others have: the
schools of test_posterior, intercepts of sites under another density, and groups within groups.
"""

import json
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.stats.density.posterior import Posterior
from tests.pyro.models import MODELS
from tests.pyro.references import PATH

REFERENCES: dict[str, Any] = json.loads(PATH.read_text())
AGAIN = ("centred", "student", "three_levels")
FULL = os.environ.get("BAYESFL_DURABILITY") == "full"


@cache
def fitted(name: str) -> Posterior:
    model, shared, rows = MODELS[name]
    return bf.pyro.fit(model, rows, shared=shared)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if FULL or name not in AGAIN])
def test_means_and_deviations_are_those_of_nuts(name: str):
    """Shared parameters and sites' own: means within .1 standard deviations, and these within a
    tenth, as some thousand dependent draws know them.
    """
    fit = fitted(name)
    found = dict(fit.draws)
    found |= {f"{site}.{key}": t for site in fit.here for key, t in fit.local(site).items()}
    for key, wanted in REFERENCES[name].items():
        mean, sd = (torch.tensor(wanted[part]).double() for part in ("mean", "sd"))
        free = sd > 1e-6  # as of a Cholesky factor's corner
        apart = (found[key].mean(0) - mean) / sd
        assert float(apart[free].abs().max()) < 0.1, key
        ratio = (found[key].std(0) / sd)[free]
        assert 0.9 < float(ratio.min()), key
        assert float(ratio.max()) < 1.1, key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["non_centred", "layer"])
def test_secure_sums_are_the_same(name: str):
    """Of a function, and of a module."""
    model, shared, rows = MODELS[name]
    hidden = bf.pyro.fit(model, rows, shared=shared, aggregation=bf.SecureSum(range=2.0**26))
    assert np.allclose(hidden.table(), fitted(name).table(), rtol=1e-3, atol=1e-3)
