"""One study that the tests share."""

import pytest

from bayesfl.study.table import Table
from tests.study.made import study


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """The study's table, run in one process and in one go."""
    return study().run(tmp_path_factory.mktemp("study"), progress=False)
