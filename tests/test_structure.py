"""The package as a whole: imports point downwards, stay light, and what is offered is what is
documented.
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import bayesfl as bf

PACKAGE = Path(bf.__file__).parent
ORDER = (
    {"base"},
    {"likelihoods", "optim", "models", "data"},
    {"curvature"},
    {"posteriors"},
    {"composition"},
    {"evaluation"},
    {"engine"},
    {"algorithms"},
    {"preflight"},
    {"federation"},
    {"stats", "study"},
    {"flower", "pyro"},
    {"commands"},
    {"__main__"},
)
"""A folder or file imports only from lines above its own."""


def module_of(path: Path) -> str:
    """A file's name as it is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(path: Path) -> set[str]:
    """Modules of bayesfl that a file imports, not for type checkers alone; `from package import
    module` names the module.
    """
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            node.body = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "bayesfl"
        ):
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in MODULES else node.module
                for alias in node.names
            }
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "bayesfl"}
    return found


def folder(module: str) -> str:
    """Its folder, or its own name, below bayesfl."""
    return module.split(".")[1] if "." in module else module


def test_imports_point_downwards():
    """Posteriors know nothing of a federation, engines no algorithm."""
    level = {name: i for i, names in enumerate(ORDER) for name in names}
    for module, path in MODULES.items():
        if module == "bayesfl":
            continue
        assert folder(module) in level, f"{module} has no place in the order"
        for other in imported(path):
            if folder(other) != folder(module):
                assert level[folder(other)] < level[folder(module)], (
                    f"{module} imports {other}, which is not below it"
                )


def room(module: str) -> str:
    """A module's sub-package, `federation.store` of `bayesfl.federation.store.files`; a module of
    no sub-package stands alone.
    """
    names = module.split(".")
    return ".".join(names[:3]) if len(names) > 3 else module


@pytest.mark.parametrize("unit", [str, room])
def test_no_import_goes_in_a_circle(unit: Callable[[str], str]):
    """Neither from module to module nor from sub-package to sub-package; what is imported for type
    checkers alone may.
    """
    needs: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module != "bayesfl" and (path.name != "__init__.py" or unit is str):
            needs.setdefault(unit(module), set()).update(
                {unit(other) for other in imported(path)} - {unit(module)}
            )
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {error.args[1]}")


def test_a_room_holds_no_more_than_a_head_does():
    """At most fourteen files in a folder; each published method has a file of its own."""
    for folder in {path.parent for path in MODULES.values()} - {PACKAGE, PACKAGE / "algorithms"}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 14, (
            folder
        )


def test_siblings_are_imported_by_their_full_path():
    """A package's own face is for others."""
    for module, path in MODULES.items():
        package = ".".join(module.split(".")[:2])
        if module != package and path.name != "__init__.py":
            assert package not in imported(path), (
                f"{module} imports from the face of its own package"
            )


def test_algorithms_speak_the_language_of_methods():
    """Their files import what a method is composed of from one place, and what its options mean
    from another.
    """
    for module, path in MODULES.items():
        if folder(module) == "algorithms":
            inner = {other for other in imported(path) if other.startswith("bayesfl.composition.")}
            assert inner <= {"bayesfl.composition.options", "bayesfl.composition.simplex"}, module


def test_no_file_of_the_ground_floor_is_a_script():
    """Run as a script, `base/random.py` would stand where the standard library's `random` is looked
    for.
    """
    for path in (PACKAGE / "base").glob("*.py"):
        assert '__name__ == "__main__"' not in path.read_text(), path
        assert not path.read_text().startswith("#!"), path


def test_the_top_is_small():
    """Who opens the package sees the architecture: at most twenty folders and files."""
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 21


def test_only_the_network_knows_of_flower():
    """Nothing outside `bayesfl.flower` imports flwr."""
    for path in PACKAGE.rglob("*.py"):
        if "flower" not in path.relative_to(PACKAGE).parts:
            assert "flwr" not in {name.split(".")[0] for name in _everything_imported(path)}, path


def _everything_imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
    }


def test_importing_is_light():
    """`import bayesfl` needs torch and numpy alone; after it every name in `__all__` is there."""
    heavy = (
        "scipy",
        "sklearn",
        "safetensors",
        "matplotlib",
        "tqdm",
        "pyro",
        "curvlinops",
        "backpack",
        "arviz",
        "torchvision",
        "flwr",
        "joblib",
    )
    code = (
        "import sys, torch; b = set(sys.modules); import bayesfl as bf; "
        f"print([m for m in {heavy!r} if m in sys.modules and m not in b]); "
        "print(*[name for name in bf.__all__ if getattr(bf, name) is None], "
        "bf.curvature.Curvature.__name__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]", "Curvature"]
    assert {"calibration", "curvature", "detection", "selection"} <= set(bf.__all__)


def test_completion_offers_what_is_public():
    """And nothing that a module imports."""
    assert dir(bf) == sorted(bf.__all__)
    for name in ("algorithms", "data", "flower", "plots", "stats"):
        module = getattr(bf, name)
        assert dir(module) == sorted(module.__all__), name
    assert {"SGD", "Adam", "cosine", "Rate"} <= {*dir(bf.optim)}
    for module in (bf.optim, bf.pools, bf.priors, bf.callbacks):
        assert not {"torch", "np", "Any", "Tensor", "Callable", "dataclass"} & {*dir(module)}, (
            module
        )


def test_modules_are_imported_by_their_short_names():
    """In a process of its own: a short name is the very module, so that no class is there twice and
    what is pickled is found by its place; with what is in it.
    """
    code = """
        import importlib, pickle, sys
        import bayesfl.calibration.temperatures as inner
        from bayesfl.calibration import Temperature
        import bayesfl as bf
        assert "matplotlib" not in sys.modules
        assert inner.Temperature is Temperature is bf.calibration.Temperature
        assert Temperature.__module__ == "bayesfl.evaluation.calibration.temperatures"
        assert type(pickle.loads(pickle.dumps(Temperature()))) is Temperature
        for name in bf.__all__:
            if isinstance(getattr(bf, name), type(sys)):
                module = importlib.import_module(f"bayesfl.{name}")
                assert module is getattr(bf, name) is sys.modules[module.__name__], name
                assert module.__spec__.name == module.__name__, name
        try:
            import bayesfl.calibration.nothing
        except ModuleNotFoundError as error:
            print(error)
    """
    found = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "No module named 'bayesfl.calibration.nothing'\n"


def test_every_public_name_is_listed():
    """What `__all__` of `bf` and of its modules offers stands on the pages of public names; the
    methods have a page of their own.
    """
    pages = (PACKAGE.parent / "docs" / "api").glob("names*.md")
    listed = {name for page in pages for name in re.findall(r"`(bf\.[\w.]+) <", page.read_text())}
    modules = {
        name: thing for name in bf.__all__ if isinstance(thing := getattr(bf, name), ModuleType)
    }
    offered = {f"bf.{name}" for name in bf.__all__ if name not in modules}
    offered |= {
        f"bf.{name}.{inner}"
        for name, module in modules.items()
        if name != "algorithms"
        for inner in getattr(module, "__all__", ())
    }
    assert offered <= listed, sorted(offered - listed)
    assert all(
        hasattr(module, "__all__")
        for module in modules.values()
        if (module.__file__ or "").endswith("__init__.py")
    )


def test_available_is_read_off_the_compositions():
    """Names, beliefs and traffic, of every method."""
    table = {entry.name: entry for entry in bf.algorithms.available()}
    assert set(table) == set(bf.algorithms.PAPERS) <= set(bf.algorithms.__all__)
    assert table["pfedvem"].posterior == "body: Point, head: MeanField"
    assert table["pfedvem"].sent == "body, head, rho2"
    assert table["pfedvem"].private == "head (rho)"
    assert table["fedper"].private == "head"
    assert table["local"].sent == "nothing"


def test_every_module_is_in_the_reference_once():
    """On one page under docs/api, by automodule."""
    pages = (
        "\n".join(page.read_text() for page in (PACKAGE.parent / "docs" / "api").rglob("*.md"))
        + "\n"
    )
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert {name: pages.count(f"automodule:: {name}\n") for name in modules} == dict.fromkeys(
        modules, 1
    )
