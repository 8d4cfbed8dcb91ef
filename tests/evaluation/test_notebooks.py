"""What notebooks show of data, methods and runs: tables, with names escaped."""

from dataclasses import replace

import pytest

import bayesfl as bf
from bayesfl.federation.run.result import Result


@pytest.fixture(scope="module")
def run() -> Result:
    clients = bf.data.dirichlet("digits", clients=12, alpha=1.0)
    clients = replace(clients, client_names=("<Basel>", *clients.client_names[1:]))
    method = bf.algorithms.fedper(bf.models.mlp(clients.inputs, hidden=4, outputs=10))
    return bf.simulate(method, clients, rounds=2, progress=False)


def test_a_method(run: Result):
    """Its blocks: whose they are."""
    found = run.algorithm._repr_html_()
    assert "fedper: " in found
    assert '<th scope="row">head</th><td class="number" data-value="50.0">50</td>' in found
    assert "<td>yes</td>" in found
