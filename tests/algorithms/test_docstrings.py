"""Every file of methods shows how to run one: three lines, which run."""

import doctest
import importlib
from pathlib import Path

import pytest

import bayesfl as bf

FILES = sorted(
    path.stem
    for path in Path(bf.algorithms.__file__).parent.glob("*.py")
    if path.stem != "__init__"
)


@pytest.mark.parametrize("name", FILES)
def test_the_example_of_a_file_runs(name: str):
    module = importlib.import_module(f"bayesfl.algorithms.{name}")
    found = doctest.DocTestParser().get_doctest(module.__doc__ or "", {}, name, module.__file__, 0)
    assert 3 <= len(found.examples) <= 5
    said: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(found, out=said.append, clear_globs=False)
    assert outcome.failed == 0, "".join(said)
    assert found.globs["result"].round == 1
