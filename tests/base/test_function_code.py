"""What a digest of a function knows: code, and all values that it reads; and what it does not: names, places, comments."""

import functools
import json
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bayesfl.base.function_code import digest_of_code, function_identity

PREFIX = """
import functools, math, torch
import numpy as np
from collections import namedtuple
from dataclasses import dataclass
from math import sqrt
from torch import nn
import own
"""


def defined(text: str, **more: Any) -> Callable[..., Any]:
    """The `f` of a script of its own; `own` is a module of the user's."""
    sys.modules["own"] = types.ModuleType("own")
    exec(more.pop("own", "def norm(x): return x / 255"), vars(sys.modules["own"]))
    space: dict[str, Any] = {"__name__": "__main__", "types_of": module_of, **more}
    exec(PREFIX + text, space)
    del sys.modules["own"]
    return space["f"]


def module_of(module: types.ModuleType, by: int) -> types.ModuleType:
    """The module with another constant."""
    exec(f"def norm(x): return x / {by}", vars(module))
    return module


HOLDS = "class S:\n  def __init__(self, by): self.by = by\n"

ONES = "f = nn.Linear(1, 1)\nf.weight.data.fill_(1)\nf.bias.data.fill_(0)\n"

DIFFERENT = {
    "a constant": ("f = lambda x: x / {}", "255", "254"),
    "an operation": ("f = lambda x: x {} 255", "/", "*"),
    "a method": ("f = lambda x: x.{}()", "sin", "cos"),
    "an argument by name": ("f = lambda x: x.sum({}=0)", "dim", "axis"),
    "a number's type": ("f = lambda x: x * {}", "1", "1.0"),
    "a function again": ("def f(x): return x / {}", "255", "254"),
    "an inner function": ("def f(x):\n  def g(y): return y / {}\n  return g(x)", "255", "254"),
    "a comprehension": ("f = lambda x: [row / {} for row in x]", "255", "254"),
    "a default": ("def f(x, by={}): return x / by", "255", "254"),
    "a default by name": ("def f(x, *, by={}): return x / by", "255", "254"),
    "a global": ("by = {}\nf = lambda x: x / by", "255", "254"),
    "a global tensor": ("by = torch.tensor([1.0, {}])\nf = lambda x: x / by", "255", "254"),
    "a global array": ("by = np.array([1.0, {}])\nf = lambda x: x / by", "255", "254"),
    "a global of an inner function": ("by = {}\ndef f(x):\n  g = lambda y: y / by\n  return g(x)", "255", "254"),
    "another function": ("def g(x): return x / {}\ndef f(x): return g(x)", "255", "254"),
    "another function's global": ("by = {}\ndef g(x): return x / by\ndef f(x): return g(x)", "255", "254"),
    "a closure": ("def make(by): return lambda x: x / by\nf = make({})", "255", "254"),
    "a closed-over function": ("def make(g): return lambda x: g(x)\nf = make(lambda x: x / {})", "255", "254"),
    "a partial": ("def g(x, by): return x / by\nf = functools.partial(g, by={})", "255", "254"),
    "a part's code": ("def g(x, by): return x / by + {}\nf = functools.partial(g, by=2)", "255", "254"),
    "an object's number": (HOLDS + "  def __call__(self, x): return x / self.by\nf = S({})", "255", "254"),
    "an object's code": ("class S:\n  def __call__(self, x): return x / {}\nf = S()", "255", "254"),
    "what an object calls": ("class S:\n  def g(self, x): return x / {}\n  def __call__(self, x): return self.g(x)\nf = S()", "255", "254"),
    "a parent class": ("class A:\n  def __call__(self, x): return x / {}\nclass S(A): pass\nf = S()", "255", "254"),
    "a class's number": ("class S:\n  by = {}\n  def __call__(self, x): return x / self.by\nf = S()", "255", "254"),
    "a property": ("class S:\n  @property\n  def by(self): return {}\n  def __call__(self, x): return x / self.by\nf = S()", "255", "254"),
    "a static method": ("class S:\n  @staticmethod\n  def g(x): return x / {}\nf = lambda x: S.g(x)", "255", "254"),
    "a class method": ("class S:\n  @classmethod\n  def g(cls, x): return x / {}\nf = S.g", "255", "254"),
    "a method of an object": (HOLDS + "  def g(self, x): return x / self.by\nf = S({}).g", "255", "254"),
    "a global object": (HOLDS + "s = S({})\nf = lambda x: x / s.by", "255", "254"),
    "an object with slots": (HOLDS + "  __slots__ = ('by',)\ns = S({})\nf = lambda x: x / s.by", "255", "254"),
    "a data class": ("@dataclass\nclass S:\n  by: float\ns = S({})\nf = lambda x: x / s.by", "255", "254"),
    "a dictionary": ("s = {{'by': {}}}\nf = lambda x: x / s['by']", "255", "254"),
    "a set": ("f = lambda x: x in {{1, {}}}", "255", "254"),
    "bytes": ("f = lambda x: x + {}", "b'a'", "b'b'"),
    "a module's option": ("f = nn.Softplus(beta={})", "1.0", "2.0"),
    "a module's weight": ("f = nn.Linear(1, 1)\nf.weight.data.fill_({})\nf.bias.data.fill_(0)", "1", "2"),
    "a module's code": ("class M(nn.Module):\n  def forward(self, x): return x / {}\nf = nn.Sequential(M())", "255", "254"),
    "a module's number": (
        "f = nn.Module()\nf.by = {}",
        "255",
        "254",
    ),
    "a cached function": ("@functools.lru_cache\ndef g(y): return {}\ndef f(x): return x / g(1)", "255", "254"),
    "a decorated function": ("@torch.no_grad()\ndef f(x): return x / {}", "255", "254"),
    "a library's function": ("f = torch.{}", "sin", "cos"),
    "a library's function, called": ("f = lambda x: torch.{}(x)", "sin", "cos"),
    "a global library's function": ("from torch import {} as g\nf = lambda x: g(x)", "sin", "cos"),
    "a function of C": ("from {} import sqrt\nf = lambda x: sqrt(x)", "math", "cmath"),
    "NumPy's function": ("g = np.{}\nf = lambda x: g(x)", "sin", "cos"),
    "rows or all rows": ("f = lambda {}x: x[0]", "*", ""),
    "a list or a tuple": ("s = {}\nf = lambda x: x[s]", "[0, 1]", "(0, 1)"),
    "the order of a dictionary": ("s = {}\nf = lambda x: [g(x) for g in s.values()]", "dict(a=abs, b=round)", "dict(b=round, a=abs)"),
    "the order of layers": (
        "from collections import OrderedDict as D\nf = nn.Sequential(D({}))",
        "a=nn.ReLU(), b=nn.Tanh()",
        "b=nn.Tanh(), a=nn.ReLU()",
    ),
    "a layer that is there twice": ("r, t = nn.ReLU(), nn.Tanh()\nf = nn.Sequential({})", "r, t, r", "r, t"),
    "a private attribute of a module": ("f = nn.Module()\nf._by = {}", "255", "254"),
    "a hook": ("f = nn.ReLU()\nf._forward_hooks[0] = lambda m, a, y: y / {}", "255", "254"),
    "a list's class": ("class P(list):\n  def g(self, x): return x / {}\np = P()\nf = lambda x: p.g(x)", "255", "254"),
    "a number's class": ("class P(float):\n  def g(self, x): return x / {}\np = P()\nf = lambda x: p.g(x)", "255", "254"),
    "a named tuple's class": (
        "class P(namedtuple('P', 'a')):\n  def g(self, x): return x / {}\nf = P(1).g",
        "255",
        "254",
    ),
    "an enumeration": ("import enum\nclass E(enum.IntEnum):\n  A = {}\nf = lambda x: x / E.A", "255", "254"),
    "a dictionary's default": ("from collections import defaultdict\ns = defaultdict(lambda: {})\nf = lambda x: x / s[0]", "255", "254"),
    "what a library's function made": ("from torch.optim.swa_utils import get_ema_avg_fn as g\nf = g({})", "0.9", "0.8"),
    "an array of texts": ("s = np.array(['a', '{}'])\nf = lambda x: s", "b", "c"),
    "an array of objects": ("s = np.array(['a', '{}'], dtype=object)\nf = lambda x: s", "b", "c"),
    "an array of complex numbers": ("s = np.array([1j, {}])\nf = lambda x: s", "2j", "3j"),
    "an array of records": ("s = np.array([(1, {})], dtype=[('a', int), ('b', float)])\nf = lambda x: s", "2.0", "3.0"),
    "a date": ("s = np.datetime64('2026-01-{}')\nf = lambda x: s", "01", "02"),
    "an array's layout": ("s = np.arange(9.0).reshape(3, 3)[{}]\nf = lambda x: s", "::-1", "::1"),
    "a sparse tensor": ("s = torch.tensor([0.0, {}]).to_sparse()\nf = lambda x: s", "1.0", "2.0"),
    "a data frame": ("import pandas as pd\ns = pd.DataFrame({{'a': [1.0, {}], 'b': ['x', 'y']}})\nf = lambda x: s", "2.0", "3.0"),
    "a data frame's column": ("import pandas as pd\ns = pd.DataFrame({{'{}': [1.0]}})\nf = lambda x: s", "a", "b"),
    "the end of a chain": (
        "a0 = lambda x: x / {}\nfor i in range(1, 50): exec(f'a{{i}} = lambda x: a{{i - 1}}(x)')\nf = lambda x: a49(x)",
        "255",
        "254",
    ),
    "a module in a closure": ("def make(m): return lambda x: m.norm(x)\nf = make(types_of(own, {}))", "255", "254"),
    "a partial of a class": (
        "def g(x, by): return x\nclass S:\n  g = staticmethod(functools.partial(g, by={}))\nf = S.g",
        "255",
        "254",
    ),
    "a partial method": (
        "class S:\n  def h(self, x, by): return x / by\n  g = functools.partialmethod(h, by={})\ns = S()\nf = lambda x: s.g(x)",
        "255",
        "254",
    ),
    "a cached method": ("class S:\n  @functools.lru_cache\n  def __call__(self, x): return x / {}\nf = S()", "255", "254"),
    "a setter": (
        "class S:\n  @property\n  def a(self): return 1\n  @a.setter\n  def a(self, by): self.by = {}\ns = S()\nf = lambda x: s",
        "255",
        "254",
    ),
    "more in a data class": ("@dataclass\nclass S:\n  by: float\ns = S(1)\ns.more = {}\nf = lambda x: x / s.more", "255", "254"),
    "a queue": ("from collections import deque\ns = deque([1, {}])\nf = lambda x: s", "2", "3"),
    "a function's attribute": ("def f(x): return x / f.by\nf.by = {}", "255", "254"),
    "not a number": ("s = {}\nf = lambda x: s", "float('nan')", "'nan'"),
    "a number's precision": ("s = np.{}(0.5)\nf = lambda x: s", "float32", "float64"),
    "an operation of torch": ("f = torch.ops.aten.{}", "sin", "cos"),
    "what is compiled": ("f = torch.compile(lambda x: x / {})", "255", "254"),
    "a method of another object": ("import types\nf = types.MethodType(lambda self, x: x / {}, 1)", "255", "254"),
    "a forward that was put in": ("import types\nf = nn.ReLU()\nf.forward = types.MethodType(lambda self, x: x / {}, f)", "255", "254"),
    "a parametrised weight": (
        ONES + "nn.utils.parametrizations.weight_norm(f)\nf.parametrizations.weight.original0.data += {}",
        "1",
        "2",
    ),
    "an object that refuses to be pickled": (HOLDS + "  def __reduce__(self): raise KeyError\ns = S({})\nf = lambda x: s", "255", "254"),
    "a masked array": ("s = np.ma.array([1, 2], mask=[0, {}])\nf = lambda x: s", "0", "1"),
    "a tensor's attribute": ("s = torch.ones(1)\ns.by = {}\nf = lambda x: s", "255", "254"),
    "a proxy": ("import types\ns = types.MappingProxyType(dict(a={}))\nf = lambda x: s", "255", "254"),
    "a long chain": (
        "a0 = lambda x: x / {}\nfor i in range(1, 300): exec(f'a{{i}} = lambda x: a{{i - 1}}(x)')\nf = lambda x: a299(x)",
        "255",
        "254",
    ),
    "a part of a set": (HOLDS + "s = {{S({})}}\nf = lambda x: s", "255", "254"),
    "what is caught": ("def f(x):\n  try: return x.sin()\n  except {}: return x", "ValueError", "TypeError"),
    "a number in TorchScript": ("f = torch.jit.trace(lambda x: x / {}, torch.ones(2))", "255.0", "254.0"),
    "a part in TorchScript": ("f = torch.jit.trace(nn.Sequential(nn.{}()), torch.ones(2))", "ReLU", "Tanh"),
    "a weight in TorchScript": (ONES + "f.weight.data += {}\nf = torch.jit.trace(f, torch.ones(1, 1))", "1", "2"),
    "a pattern": ("import re\np = re.compile({})\nf = lambda x: p", "'a'", "'b'"),
}


@pytest.mark.parametrize("text", DIFFERENT)
def test_what_makes_a_function_another(text):
    frame, one, other = DIFFERENT[text]
    first, again, changed = (digest_of_code(defined(frame.format(part))) for part in (one, one, other))
    assert first == again != changed


def test_functions_of_ones_own_modules_are_read():
    for text in ("f = own.norm", "f = lambda x: own.norm(x)", "from own import norm\nf = lambda x: norm(x)"):
        changed = defined(text, own="def norm(x): return x / 254")
        assert digest_of_code(defined(text)) == digest_of_code(defined(text)) != digest_of_code(changed)


SAME = {
    "names": ("f = lambda x: x / 255", "def scaled(images):\n  return images / 255\nf = scaled"),
    "places": ("f = lambda x: x / 255", "def make():\n  return lambda x: x / 255\nf = make()"),
    "comments and docstrings": ("def f(x):\n  '''One.'''\n  return x / 255", "def f(x):\n  # more\n\n  '''Two.'''\n  return x / 255"),
    "globals that are not read": ("sin = 1\nf = lambda x: x.sin()", "sin = 2\nf = lambda x: x.sin()"),
    "functions that call themselves": ("def f(x): return f(x)",) * 2,
    "objects that hold themselves": ("class S: pass\ns = S()\ns.s = s\nf = lambda x: s",) * 2,
    "lists that hold themselves": ("s = [1]\ns.append(s)\nf = lambda x: s",) * 2,
    "lists that hold one list often": ("s = [1]\nfor _ in range(60): s = [s, s]\nf = lambda x: s",) * 2,
    "modules of Python": ("import math\nf = lambda x: math.pi", "import math\nmath.own = 1\nf = lambda x: math.pi"),
    "texts that are another object": ("s = ['ab', 'ab']\nf = lambda x: s", "s = ['ab', ''.join(['a', 'b'])]\nf = lambda x: s"),
    "sets that lead back": ("class S:\n  all = set()\ns = S()\nS.all.add(s)\nS.all.add(S())\nf = lambda x: s",) * 2,
    "sets within sets": ("s = frozenset([1])\nfor i in range(60): s = frozenset([s, frozenset([s, i])])\nf = lambda x: s",) * 2,
    "order within sets": ("s = {'a', 'b', 'c'}\nf = lambda x: s", "s = {'c', 'b', 'a'}\nf = lambda x: s"),
    "what cannot be pickled": ("import threading\ns = threading.Lock()\nf = lambda x: s",) * 2,
}


@pytest.mark.parametrize("text", SAME)
def test_what_makes_no_difference(text):
    one, other = SAME[text]
    assert digest_of_code(defined(one)) == digest_of_code(defined(other))


def test_functions_are_read_by_several_threads():
    """The limit of recursion, which is that of all threads, is as it was after it."""
    before = sys.getrecursionlimit()
    text, one, _ = DIFFERENT["a long chain"]
    deep = defined(text.format(one))
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(digest_of_code, [deep] * 40))) == 1
    assert sys.getrecursionlimit() == before


def test_a_function_that_has_run_is_the_same():
    """Python rewrites the bytecode of functions that run often; their digests stand."""
    f = defined("f = lambda x: x / 255 + math.pi")
    before = digest_of_code(f)
    assert sum(f(x) for x in range(1000)) > 0
    assert digest_of_code(f) == before


SCRIPT = """
import enum, logging, math, re
import numpy as np
import torch
from torch import nn
from bayesfl.base.function_code import digest_of_code

class Plain:
    def __init__(self, by): self.by = by

class Scale:
    names = {"a", "b", "c", "d"}
    kinds = set(enum.Enum("E", "A B C D"))
    objects = {Plain(by) for by in range(9)}
    def __init__(self, by): self.by = by
    def __call__(self, x):
        logging.getLogger("a").info(torch.float32, torch.rand, np.sin, math.sqrt, re.compile("a"), torch.channels_last, mixed)
        return torch.where(x > 0, x / self.by, net(x)) if str(x) in self.names else self.kinds

mixed = [torch.float32, torch.sin, np.cos, math.sin, nn.functional.relu, torch.compile(lambda x: x + 1), np.float32(2)]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
print(digest_of_code(Scale({"by": 2.0})))
"""


@pytest.mark.slow  # 10 s: three processes import torch
def test_every_process_has_the_same_digest():
    found = {
        subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
    assert len(found.pop()) == 65


def test_the_identity_is_what_json_holds():
    told = function_identity(functools.partial(pow, 2))
    assert json.loads(json.dumps(told)) == told
    assert told["under"].startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}, torch 2.")
    assert told["function"] == ["pow", 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("by = 2.0\ndef f(x, more=3): return x / by", ["f", 3]),
        ("def make(by, name): return lambda x: name + x / by\nf = make(2.0, 'a')", ["make.<locals>.<lambda>", 2.0, "a"]),
        (HOLDS + "  def __call__(self, x): return x\nf = S(2)", ["S", 2]),
        (HOLDS + "  def g(self, x): return x\nf = S(2).g", ["S.g", 2]),
        ("f = functools.partial(max, 0, key=float('inf'))", ["max", 0]),
        ("f = nn.Softplus(beta=2.0)", ["Softplus", True, 2.0, 20]),
        ("f = torch.sin", ["sin"]),
    ],
)
def test_what_a_reader_is_told(text: str, words: list[Any]):
    assert function_identity(defined(text))["function"] == words


def test_what_is_nested_too_deeply_is_refused():
    with pytest.raises(ValueError, match=r"^f reads values that are nested too deeply"):
        digest_of_code(defined("s = []\nfor _ in range(10_000): s = [s]\nf = lambda x: s\nf.__qualname__ = 'f'"))
