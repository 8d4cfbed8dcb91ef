"""One study that the tests share."""

from pathlib import Path

import pytest

from bayesfl.study.table import Table
from tests.study.made import study


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Table]:
    """The study's folder and its table, run in one process and in one go."""
    folder = tmp_path_factory.mktemp("study")
    return folder, study().run(folder, progress=False)


@pytest.fixture(scope="session")
def table(ran: tuple[Path, Table]) -> Table:
    """The study's table."""
    return ran[1]
