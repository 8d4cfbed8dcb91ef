"""How plain the code is: statements, lines, raises and defence by folder, and the way to the first
step.

    python benchmarks/house.py [TREE]

Statements are those of Python's `ast` without docstrings. A function that only raises counts as a
raise at each call. Defence is what is run to refuse or to warn: statements `raise` and `assert`,
calls of such functions and of `warn`, and conditions and loops that hold nothing else, each with
the assignments that only they read. The way to the first step follows a run of pFedVEM until an
optimiser is asked for its first update, the looks of `preflight` and what they call left out: how
often the file changes from one call to the next, and how many files there are. Then come the
changes of file of `Result.predict`, all looks counted.
"""

import ast
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

TREE = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
LOOKS = ("/preflight/", "/stability.py", "/fits.py")  # in this tree and in earlier ones


def statements(node: ast.AST) -> int:
    """Count the statements in a part of a program, docstrings left out."""
    found = [one for one in ast.walk(node) if isinstance(one, ast.stmt)]
    values = [one.value for one in found if isinstance(one, ast.Expr)]
    texts = [one for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return len(found) - len(texts)


def only_raises(function: ast.FunctionDef) -> bool:
    """Say whether a function does nothing but look: it returns nothing, and raises somewhere."""
    inner = list(ast.walk(function))
    returns = any(isinstance(one, ast.Return | ast.Yield) and one.value for one in inner)
    return not returns and any(isinstance(one, ast.Raise) for one in inner)


def called(node: ast.AST) -> str:
    """Return the last part of the name that a call has; '' for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def looks(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of functions that only raise, or only warn, special ones left out."""
    return {"warn"} | {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name[:2] != "__" and only_raises(node)
    }


def is_defence(node: ast.stmt, names: set[str]) -> bool:
    """Say whether a statement does nothing but look."""
    if isinstance(node, ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.Expr):
        return called(node.value) in names
    if isinstance(node, ast.If | ast.For | ast.With):
        inner = [*node.body, *(node.orelse if isinstance(node, ast.If) else [])]
        return all(is_defence(one, names) for one in inner)
    return False


def defence(tree: ast.AST, names: set[str]) -> int:
    """Count the statements that look: whole functions of looks, and looks within others."""
    count = 0
    for child in ast.iter_child_nodes(tree):
        look = isinstance(child, ast.FunctionDef) and child.name in names
        if look or (isinstance(child, ast.stmt) and is_defence(child, names)):
            count += statements(child)
        else:
            count += defence(child, names)
    return count


def counted(path: Path, tree: ast.Module, names: set[str]) -> Counter[str]:
    """Return the figures of a file."""
    calls = Counter(called(node) for node in ast.walk(tree))
    return Counter(
        files=1,
        lines=path.read_text().count("\n"),
        statements=statements(tree),
        raises=sum(isinstance(node, ast.Raise) for node in ast.walk(tree)),
        calls=sum(calls[name] for name in names - {"warn"}),
        defence=defence(tree, names),
    )


def changes(files: list[str]) -> int:
    """Count how often the file changes from one call to the next."""
    return sum(one != other for one, other in pairwise(files))


def table(root: Path) -> None:
    """Print the figures of a folder's parts."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    names, total = looks(trees), Counter()
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for path, tree in trees.items():
        found = counted(path, tree, names)
        parts[path.relative_to(root).parts[0]].update(found)
        total.update(found)
    print(f"{root.name:24s} files  lines  statements  raises  defence")
    for part, n in [*sorted(parts.items()), ("all", total)]:
        raises, share = f"{n['raises']}+{n['calls']}", n["defence"] / max(1, n["statements"])
        size = f"{n['files']:5d} {n['lines']:6d} {n['statements']:11d}"
        print(f"  {part:22s} {size} {raises:>7s} {share:7.1%}")


def way() -> tuple[int, int, int, int]:
    """Return the numbers of calls, of changes of file, and of files before the first step; and the
    changes of file in `Result.predict`.
    """
    sys.path.insert(0, str(TREE))
    import torch

    import bayesfl as bf

    torch.set_num_threads(1)
    clients = bf.data.iid("digits", clients=3)
    method = bf.algorithms.pfedvem(bf.models.mlp(clients.inputs, hidden=8, outputs=10))
    options: dict[str, Any] = {"engine": bf.Engine(workers=1), "evaluate_every": None}
    run = partial(bf.simulate, method, clients, rounds=1, progress=False, **options)
    package = str(TREE / "bayesfl")
    files: list[str] = []
    stepped = threading.Event()

    def under_a_look(frame: FrameType | None) -> bool:
        if frame is None:
            return False
        name = frame.f_code.co_filename
        return any(part in name for part in LOOKS) or under_a_look(frame.f_back)

    def follow(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(package) or stepped.is_set():
            return
        if name.endswith("optim.py") and frame.f_code.co_name in ("update", "update_"):
            stepped.set()
        elif not under_a_look(frame):
            files.append(name)

    def followed(work: Callable[[], object], follow: Any) -> list[str]:
        files.clear()
        threading.setprofile(follow)
        sys.setprofile(follow)
        work()
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType] (None takes it off)
        return list(files)

    def every(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.append(frame.f_code.co_filename)

    result = run()  # what is made once
    result.predict()
    first = followed(run, follow)
    predicted = changes(followed(replace(result).predict, every))
    return len(first), changes(first), len(set(first)), predicted


if __name__ == "__main__":
    table(TREE / "bayesfl")
    table(TREE / "tests")
    calls, moves, files, predicted = way()
    print(f"pFedVEM's first step: {calls} calls, {moves} changes of file, {files} files")
    print(f"its Result.predict: {predicted} changes of file")
