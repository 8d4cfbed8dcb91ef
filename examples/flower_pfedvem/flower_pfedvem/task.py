"""Define what is learnt, and from which data; nothing here depends on a network."""

import torch

import bayesfl as bf
from bayesfl.data import FederatedData

torch.set_num_threads(1)  # torch's own threads stall beside other busy processes


def method() -> bf.Algorithm:
    """A small network under pFedVEM; server and clients build the same."""
    model = bf.models.mlp(64, hidden=100, outputs=5, head_scale=1.0, seed=0)
    return bf.algorithms.pfedvem(model)


def federation(clients: int) -> FederatedData:
    """Handwritten digits as pairs of classes: what label 0 looks like differs from client to
    client.
    """
    return bf.data.concept_drift("digits", clients=clients, seed=0)


def client_data(client: int, clients: int) -> FederatedData:
    """One client's part. A real node reads its own files here, as `bf.data.from_arrays([x], [y],
    outputs=5)`.
    """
    return federation(clients).select([client])
