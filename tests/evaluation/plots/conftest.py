"""Drawings are headless, and without a trace in pyplot."""

import pytest


@pytest.fixture(autouse=True)
def _no_trace_in_pyplot():
    """No figure is registered with pyplot, and drawing switches no backend."""
    import matplotlib
    import matplotlib.pyplot as plt

    before = matplotlib.rcParams._get("backend")
    yield
    assert plt.get_fignums() == []
    assert matplotlib.rcParams._get("backend") == before
