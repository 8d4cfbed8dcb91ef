"""Cases of the contract beside the table of methods."""

from bayesfl.optim import AdamW
from tests.cases import Case

DECOUPLED = Case(
    "fedavg", {"epochs": 2, "batch_size": 10, "optimiser": AdamW(0.01, weight_decay=1.0)}
)
