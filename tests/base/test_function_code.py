"""What a digest of a function knows: code, and all values that it reads; and what it does not: names, places, comments."""

import functools
import json
import subprocess
import sys
import types
from collections.abc import Callable
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
    space: dict[str, Any] = {"__name__": "__main__", **more}
    exec(PREFIX + text, space)
    del sys.modules["own"]
    return space["f"]


HOLDS = "class S:\n  def __init__(self, by): self.by = by\n"

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
    "what is caught": ("def f(x):\n  try: return x.sin()\n  except {}: return x", "ValueError", "TypeError"),
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
    "order within sets": ("s = {'a', 'b', 'c'}\nf = lambda x: s", "s = {'c', 'b', 'a'}\nf = lambda x: s"),
    "what cannot be pickled": ("import threading\ns = threading.Lock()\nf = lambda x: s",) * 2,
}


@pytest.mark.parametrize("text", SAME)
def test_what_makes_no_difference(text):
    one, other = SAME[text]
    assert digest_of_code(defined(one)) == digest_of_code(defined(other))


def test_a_function_that_has_run_is_the_same():
    """Python rewrites the bytecode of functions that run often; their digests stand."""
    f = defined("f = lambda x: x / 255 + math.pi")
    before = digest_of_code(f)
    assert sum(f(x) for x in range(1000)) > 0
    assert digest_of_code(f) == before


SCRIPT = """
import torch
from torch import nn
from bayesfl.base.function_code import digest_of_code

class Scale:
    names = {"a", "b", "c", "d"}
    def __init__(self, by): self.by = by
    def __call__(self, x): return torch.where(x > 0, x / self.by, net(x)) if str(x) in self.names else x

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
print(digest_of_code(Scale({"by": 2.0})))
"""


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
    assert told["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert told["function"]["args"] == [2]
