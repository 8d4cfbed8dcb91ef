"""What notebooks show of data, methods and runs: tables, with names escaped."""

from dataclasses import replace

import pytest

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result


@pytest.fixture(scope="module")
def run() -> Result:
    clients = bf.data.dirichlet("digits", clients=12, alpha=1.0)
    clients = replace(clients, client_names=("<Basel>", *clients.client_names[1:]))
    method = bf.algorithms.fedper(bf.models.mlp(clients.inputs, hidden=4, outputs=10))
    return bf.simulate(method, clients, rounds=2, progress=False)


def test_data(run: Result):
    """The first ten clients, with their labels."""
    data: FederatedData = run.data
    found = data._repr_html_()
    assert "12 clients" in found
    assert "the first 10 of 12 rows" in found
    assert "&lt;Basel&gt;" in found
    assert "<Basel>" not in found
    labels = data.label_counts
    assert labels is not None
    assert labels.shape == (12, 10)
    assert labels.sum(1).tolist() == data.train.counts.tolist()
    assert f'data-value="{float(labels[0, 3])}"' in found
    assert "label" not in bf.data.iid("diabetes", clients=2)._repr_html_()


def test_a_method(run: Result):
    """Its blocks: whose they are."""
    found = run.algorithm._repr_html_()
    assert "fedper: " in found
    assert '<th scope="row">head</th><td class="number" data-value="50.0">50</td>' in found
    assert "<td>yes</td>" in found


def test_a_run(run: Result):
    """Its history, to the last digit; in a sentence what it is."""
    last = run.history[-1]["personal_nll"]
    for found in (run._repr_html_(), run.history._repr_html_()):
        assert f'data-value="{last}"' in found
    assert "Result(12 clients of digits, round 2 of 2)" in run._repr_html_()
