"""Methods and data of the test, for server, clients and the simulation beside them."""

from dataclasses import replace

import torch

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Conformal, Step, Temperature

CLIENTS, SEED = 2, 3
torch.set_num_threads(1)


def method(name: str) -> bf.Algorithm:
    """A method at test size."""
    model = bf.models.mlp(64, hidden=16, outputs=5, seed=0)
    if name == "pooled":
        plain = bf.algorithms.fedavg(model, epochs=1, batch_size=10)
        return replace(plain, predictor=bf.predictors.PooledLaplace())
    options = {
        "pfedvem": {"head_epochs": 2, "body_epochs": 1, "init_scale": 0.3},
        "ditto": {"epochs": 1},
        "fedpac": {"head_epochs": 1, "body_epochs": 1},
        "fedsi": {
            "epochs": 1,
            "share": 0.3,
            "finetune_steps": 5,
        },  # its predictive precision is tuned over the network
    }
    return getattr(bf.algorithms, name)(model, batch_size=10, **options[name])


def steps(name: str) -> tuple[Step, ...]:
    """How its predictions are calibrated after training."""
    return (Temperature(strength=5.0), Conformal()) if name == "ditto" else ()


def federation() -> FederatedData:
    """Two clients that mean different things by the same labels."""
    return bf.data.concept_drift("digits", clients=CLIENTS, seed=0, validation=0.1, calibration=0.1)
