"""What a round that is skipped has counted."""

import pytest
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.faults import FAULTS, Fault, Lost
from tests.federation.made import METHODS, run


@pytest.mark.parametrize(
    ("faults", "lost", "rejected"),
    [
        ({1: Lost(), 2: Lost(), 3: FAULTS["stale"]}, 2, 1),
        ({4: Lost()}, 1, 0),
        ({4: FAULTS["nan"]}, 0, 1),
    ],
)
def test_a_skipped_round_counts_who_was_missing(
    faults: dict[int, Fault], lost: int, rejected: int, model: nn.Module, clients: FederatedData
):
    """Its row says how many were lost or refused, also where the lost alone were too many."""
    history = run(
        bf.algorithms.fedavg(model, **METHODS["fedavg"]),
        clients,
        faults=lambda round, attempt, ids: faults if round == 1 else {},
        admission=bf.Admission("skip", min_clients=8 - len(faults)),
        evaluate_every=None,
    ).history
    assert [history[name].tolist() for name in ("lost", "rejected", "cohort")] == [
        [0, lost, 0],
        [0, rejected, 0],
        [7, 0, 7],
    ]
