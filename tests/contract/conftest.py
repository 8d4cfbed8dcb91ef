"""What tests of every method share."""

import pytest

from bayesfl.data import FederatedData
from tests.cases import FEWER, federation


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    """The clients of all tests, with fewer rows."""
    return federation(sizes=FEWER)
