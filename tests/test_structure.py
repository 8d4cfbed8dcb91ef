"""The package as a whole: imports point one way, stay light, and what is offered is what is documented."""

import ast
import subprocess
import sys
from pathlib import Path

import bayesfl as bf

PACKAGE = Path(bf.__file__).parent
# A module imports only from lines above its own.
ORDER = (
    {"checks", "_torchvision"},
    {"protocols", "random", "numerics", "files", "digest", "layout", "simplex"},
    {"optim", "likelihood", "history", "models", "topology"},
    {"curvature"},
    {"posteriors", "selection"},
    {"priors", "pools", "predictors", "robust"},
    {"blocks"},
    {"energy"},
    {"phases", "server"},
    {"invariance"},
    {"data"},
    {"metrics"},
    {"calibration", "detection"},
    {"engine"},
    {"admission"},
    {"faults"},
    {"local", "checkpoint", "identity"},
    {"predict", "gather"},
    {"result"},
    {"secure", "privacy"},
    {"rounds"},
    {"simulate"},
    {"report"},
    {"plots"},
    {"algorithms"},
    {"flower"},
)


def imports(path: Path) -> set[str]:
    """Modules of bayesfl that a file imports where it runs, by their first name."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bayesfl":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return names


def test_imports_point_one_way():
    """Posteriors know nothing of a federation, engines no algorithm."""
    level = {name: i for i, names in enumerate(ORDER) for name in names}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = parts[0]
        if name == "__init__":
            continue
        assert name in level, f"{path} has no place in the order"
        for other in imports(path) - {name}:
            assert level[other] < level[name], f"bayesfl.{name} imports bayesfl.{other}, which is not below it"
    assert imports(PACKAGE / "engine" / "driver.py").isdisjoint({"algorithms", "simulate"})


def test_only_the_network_knows_of_flower():
    """Nothing outside `bayesfl.flower` imports flwr."""
    for path in PACKAGE.rglob("*.py"):
        if "flower" not in path.relative_to(PACKAGE).parts:
            assert "flwr" not in {name.split(".")[0] for name in _everything_imported(path)}, path


def _everything_imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_importing_is_light():
    """`import bayesfl` needs torch and numpy alone."""
    heavy = ("scipy", "sklearn", "safetensors", "matplotlib", "tqdm", "pyro", "laplace", "backpack", "arviz", "torchvision", "flwr")
    code = f"import sys, torch; b = set(sys.modules); import bayesfl; print([m for m in {heavy!r} if m in sys.modules and m not in b])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_top_level_holds_what_it_offers():
    """Every name in `__all__` is there after `import bayesfl` alone."""
    code = "import bayesfl as bf; print(*[name for name in bf.__all__ if getattr(bf, name) is None], bf.curvature.Curvature.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["Curvature"]
    assert {"calibration", "curvature", "detection", "selection"} <= set(bf.__all__)


def test_available_is_read_off_the_compositions():
    """Names, beliefs and traffic, of every method."""
    table = {entry.name: entry for entry in bf.algorithms.available()}
    assert table["pfedvem"].posterior == "body: Point, head: MeanField"
    assert table["pfedvem"].sent == "body, head, rho2"
    assert table["pfedvem"].private == "head (rho)"
    assert table["fedper"].private == "head"
    assert table["local"].sent == "nothing"


def test_the_readme_shows_what_was_made():
    """Its tables are those that the committed results and the compositions give."""
    sys.path.insert(0, str(PACKAGE.parent / "docs"))
    try:
        import tables
    finally:
        sys.path.pop(0)
    readme = (PACKAGE.parent / "README.md").read_text()
    assert all(table() in readme for table in (tables.implemented, tables.demo, tables.engines))
    assert tables.privacy() in (PACKAGE.parent / "docs" / "privacy.md").read_text()
