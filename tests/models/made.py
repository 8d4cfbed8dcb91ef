"""One network of every kind, at test size."""

import pytest

from bayesfl import models

MAKERS = {
    "mlp": lambda **o: models.mlp(64, outputs=10, **o),
    "mlp-deep": lambda **o: models.mlp((1, 28, 28), outputs=3, hidden=(50, 20), **o),
    "lenet-grey": lambda **o: models.lenet((1, 28, 28), outputs=10, **o),
    "lenet-colour": lambda **o: models.lenet((3, 32, 32), outputs=10, **o),
    "leaky-grey": lambda **o: models.leaky_cnn((1, 28, 28), outputs=10, **o),
    "leaky-colour": lambda **o: models.leaky_cnn((3, 32, 32), outputs=10, **o),
    "cifar100_cnn": lambda **o: models.cifar100_cnn(**o),
}


INPUTS = {
    "mlp": (64,),
    "mlp-deep": (1, 28, 28),
    "lenet-grey": (1, 28, 28),
    "lenet-colour": (3, 32, 32),
    "leaky-grey": (1, 28, 28),
    "leaky-colour": (3, 32, 32),
    "cifar100_cnn": (3, 32, 32),
}


every = pytest.mark.parametrize("name", MAKERS)
