"""Methods that several files of tests deploy."""

import pytest

from tests.flower.made import method


@pytest.fixture
def fedavg(model):
    return method("fedavg", model)


@pytest.fixture
def ditto(model):
    return method("ditto", model)
