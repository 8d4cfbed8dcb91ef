"""What a round that is skipped has counted."""

import numpy as np
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.faults import FAULTS, Fault, Lost
from tests.federation.made import METHODS, of_client, run


def test_a_skipped_round_counts_the_refused_beside_the_lost(
    model: nn.Module, clients: FederatedData
):
    """Also where the lost alone were too many."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])

    def plan(round: int, attempt: int, ids: np.ndarray) -> dict[int, Fault]:
        return {1: Lost(), 2: Lost(), 3: FAULTS["stale"]} if round == 1 else {}

    found = run(
        algorithm,
        clients,
        faults=plan,
        admission=bf.Admission("skip", min_clients=6),
        evaluate_every=None,
    )
    assert (found.history["lost"][1], found.history["rejected"][1], found.history["cohort"][1]) == (
        2.0,
        1.0,
        0.0,
    )


def test_a_skipped_round_counts_who_was_missing(model: nn.Module, clients: FederatedData):
    """Its row says how many were lost or refused."""
    algorithm = bf.algorithms.fedavg(model, **METHODS["fedavg"])
    found = run(
        algorithm,
        clients,
        faults=of_client(4, 1, Lost()),
        admission=bf.Admission("skip", min_clients=7),
        evaluate_every=None,
    )
    assert found.history["lost"].tolist() == [0.0, 1.0, 0.0]
    found = run(
        algorithm,
        clients,
        faults=of_client(4, 1, FAULTS["nan"]),
        admission=bf.Admission("skip", min_clients=7),
        evaluate_every=None,
    )
    assert found.history["rejected"].tolist() == [0.0, 1.0, 0.0]
