"""Methods that several files of tests deploy."""

import pytest

from bayesfl.data import FederatedData
from tests.cases import FEWER, federation
from tests.flower.made import method


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    """The clients of all tests, with fewer rows."""
    return federation(sizes=FEWER)


@pytest.fixture
def fedavg(model):
    return method("fedavg", model)


@pytest.fixture
def ditto(model):
    return method("ditto", model)
